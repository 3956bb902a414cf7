"""The guard of a mounted image: whoever writes into a shard waits until nobody reads it through the mount."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import tars
from tests.conftest import Program
from tests.kernel.mounts import (
    end_mount,
    is_mounted,
    kill,
    run_image,
    shard_and_image,
    the_guard,
    told,
    wait_for_the_end,
)
from tests.processes import PATIENCE, Process, wait_until
from wdsfs import host, mount_registry, mount_table
from wdsfs.errors import MountError
from wdsfs.kernel import devices, erofs_header
from wdsfs.kernel import guard as guard_module
from wdsfs.kernel.devices import OpenDevice
from wdsfs.kernel.guard import guard_of
from wdsfs.mount import mount_search
from wdsfs.mount.mount_options import MountOptions

OLD, NEW, SIZE = b"o", b"n", 3 << 20
WRITE = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY)
os.pwrite(fd, b"n" * (3 << 20), 512)
"""
CUT = "import os, sys; os.truncate(sys.argv[1], 512)"


@contextmanager
def mounted(program: Program) -> Iterator[tuple[Path, Path]]:
    """An image over a shard of one large member: the paths of the shard and of the member."""
    shard, image = shard_and_image(program, tars.tar(tars.member(b"a.x", OLD * SIZE), tars.member(b"b.x", b"b")))
    program.run("mount", image, program.mountpoint)
    yield shard, program.mountpoint / "s" / "a" / "x"


def modules_loaded(program: Program, *arguments: str | Path) -> set[str]:
    """The modules that a mount by the kernel loads, from the start of the command to the end of its guard."""
    environment = {"PYTHONPROFILEIMPORTTIME": "1"}
    options: dict[str, Any] = {"new_interpreter": True, "env": environment, "stderr": subprocess.PIPE}
    with program.start("mount", "--foreground", *arguments, program.mountpoint, **options) as guard:
        wait_until(lambda: guard_of(str(program.mountpoint)) is not None, "the guard to be known")
        os.kill(guard.pid, signal.SIGTERM)
        _, said = guard.communicate(timeout=PATIENCE)
        assert guard.returncode == 0
    return set(re.findall(r"^import time: +\d+ \| +\d+ \| +(\S+)$", said.decode(), re.M))


def test_the_mount_of_an_image_loads_little(program: Program) -> None:
    """Imports are most of the time that a mount takes; of a set whose image is kept it takes a little more.

    195 modules when this was written, of which click loads a half; and 208.
    """
    with mounted(program) as (shard, _):
        end_mount(program.mountpoint)
    of_set = ("--engine", "kernel", shard)
    program.run("mount", *of_set, program.mountpoint)
    end_mount(program.mountpoint)
    for arguments in ((program.home / "set.erofs",), of_set):
        loaded = modules_loaded(program, *arguments)
        assert {"click", "wdsfs.kernel.guard"} <= loaded
        heavy = {"numpy", "lmdb", "trio", "pyfuse3", "rich", "yaml", "asyncio", "multiprocessing", "concurrent"}
        assert {one for one in loaded if one.partition(".")[0] in heavy} == set()
        rooms = {one.split(".")[1] for one in loaded if one.startswith("wdsfs.") and one.count(".") > 1}
        assert rooms & {"index", "overlay", "fuse"} == set()
        assert len(loaded) < 240


@pytest.mark.parametrize(
    ("before", "said"),
    [("pass", "a signal ended the daemon before the mount was usable: Killed"), ("leave(None)", "see /")],
    ids=["at the terminal", "in the background"],
)
def test_a_guard_that_is_killed_before_it_is_ready(before: str, said: str, program: Program) -> None:
    """The command ends, and says what has happened."""
    code = f"""
import os, sys
from wdsfs.mount import daemon
def action(leave, ready):
    {before}
    os.kill(os.getpid(), 9)
sys.exit(daemon.fork("/mnt", action))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=program.environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 1
    assert said in done.stderr


@pytest.mark.parametrize("code", [WRITE, CUT], ids=["write", "truncate"])
def test_a_writer_waits_for_readers(code: str, program: Program) -> None:
    """The mount ends at once; what is open of it can be read on, as it was; then the writer goes on."""
    with mounted(program) as (shard, file), file.open("rb", buffering=0) as reader:
        assert reader.read(SIZE // 2) == OLD * (SIZE // 2)
        with Process([sys.executable, "-c", code, shard]) as writer:
            wait_for_the_end(program)
            assert not file.exists()
            os.posix_fadvise(reader.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            assert reader.read() == OLD * (SIZE - SIZE // 2)
            assert writer.poll() is None
            reader.close()
            assert writer.wait(PATIENCE) == 0
        assert shard.read_bytes()[512:1024] == (NEW * 512 if code == WRITE else b"")
        assert told(program.home, "status", program.mountpoint, code=5)


def test_readers_never_see_a_mix(program: Program) -> None:
    """Under load: whoever reads gets the old bytes, or finds no file."""
    reading = """
import sys
seen = 0
while True:
    try:
        found = set(open(sys.argv[1], "rb").read())
    except FileNotFoundError:
        sys.exit(0 if seen else 1)
    if found != {111}:
        sys.exit(2)
    seen += 1
    print(seen, flush=True)
"""
    with mounted(program) as (shard, file):
        command: list[str | Path] = [sys.executable, "-c", reading, file]
        readers = [Process(command, stdout=subprocess.PIPE) for _ in range(2)]
        for reader in readers:
            assert reader.stdout is not None
            reader.stdout.readline()  # it is reading
        subprocess.run([sys.executable, "-c", WRITE, shard], check=True, timeout=PATIENCE)
        for reader in readers:
            reader.communicate(timeout=PATIENCE)
            assert reader.returncode == 0


def test_a_shard_that_is_replaced_is_shown_as_such(program: Program) -> None:
    """The mount keeps the old file; `status` tells; and without its guard it tells that, too."""
    with mounted(program) as (shard, file):
        other = program.write("other", b"x" * 4096)
        other.rename(shard)
        assert set(file.read_bytes()) == set(OLD)
        shown = told(program.home, "status", program.mountpoint, code=0)
        assert f"replaced  {shard}; to show the new content: wdsfs umount {program.mountpoint}" in shown
        guard = the_guard(program)
        assert (guard.leased, guard.paths) == (1, [str(shard)])
        kill(guard)
        assert "it has no guard" in told(program.home, "status", program.mountpoint, code=0)
        told(program.home, "umount", program.mountpoint, code=0)
        assert guard_of(str(program.mountpoint)) is None


def write(path: Path, content: bytes = NEW) -> None:
    """Write into a file in place, in this process: its guard is another one."""
    with path.open("r+b") as file:
        file.write(content)


def test_an_image_that_is_written_ends_the_mount(program: Program) -> None:
    """As by `cp` over it: the kernel has a part of the old one in memory, and would read the rest of the new."""
    with mounted(program) as (_, file):
        write(program.home / "set.erofs")
        assert not file.exists()
        wait_until(lambda: guard_of(str(program.mountpoint)) is None, "the guard to end")


@contextmanager
def in_another_namespace(path: Path) -> Iterator[Callable[[], bool]]:
    """A process in a mount namespace of its own, as in a container; it can be asked if the path exists there."""
    script = 'while echo; read line; do test -e "$0" && echo there || echo gone; done'
    command: list[str | Path] = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, path]
    with Process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        given, said = process.stdin, process.stdout

        def exists() -> bool:
            said.readline()
            given.write(b"\n")
            given.flush()
            return bool(said.readline() == b"there\n")

        assert exists()
        yield exists
        given.close()


def test_a_writer_ends_all_mounts(program: Program) -> None:
    """Also a bind mount, and one in a container, both of which stay when the mount itself is ended."""
    other = program.directory("other")
    with mounted(program) as (shard, file), in_another_namespace(file) as exists_there:
        guard = the_guard(program)
        subprocess.run(["mount", "--bind", program.mountpoint, other], check=True)
        with pytest.raises(MountError, match=f"{guard.pid} still guards the shards.*grep -l .*set.erofs"):
            mount_search.require_mount(str(program.mountpoint)).end(wait_seconds=0)
        assert (other / "s" / "b" / "x").read_bytes() == b"b"
        assert exists_there()
        write(shard)
        assert mount_table.mounted_at(other) is None
        assert not file.exists()
        assert not exists_there()
        wait_until(lambda: not guard.alive, "the guard to end")


@pytest.mark.parametrize(("kernel", "seconds"), [("45\n", 40), ("4\n", 3), ("0\n", 40), ("", 40)])
def test_how_long_a_writer_waits(
    kernel: str, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less than the kernel keeps a lease, but never not at all. With 0 the kernel would wait for ever."""
    monkeypatch.setattr(guard_module, "BREAK_TIME", tmp_path / "lease-break-time")
    (tmp_path / "lease-break-time").write_text(kernel)
    assert guard_module.writer_seconds() == seconds


def test_a_signal_waits_for_readers(program: Program) -> None:
    """The mount ends, and what is open of it is guarded until a second signal."""
    with mounted(program) as (shard, file), file.open("rb", buffering=0) as reader:
        guard = the_guard(program)
        os.kill(guard.pid, 15)
        wait_for_the_end(program)
        with Process([sys.executable, "-c", WRITE, shard]) as writer:
            assert reader.read() == OLD * SIZE
            assert writer.poll() is None
            os.kill(guard.pid, 15)
            assert writer.wait(PATIENCE) == 0
        wait_until(lambda: not guard.alive, "the guard to end")


def test_an_image_of_others_is_refused(program: Program) -> None:
    """Root would show what they want, and the kernel would believe what they have written."""
    shard, _ = shard_and_image(program)
    place, link = program.directory("place"), program.home / "link.erofs"
    image = place / "set.erofs"
    program.run("image", shard, "-o", image)
    link.symlink_to(image)
    mount = ("mount", image, program.mountpoint)
    os.chown(image, 65534, 65534)
    says = program.refused(*mount, code=5)
    assert says.startswith(
        f"wdsfs: {image}: an image can show any file, so other users must not be able to write it: {image} belongs"
    )
    os.chown(image, 0, 0)
    image.chmod(0o666)
    assert f"others can write to {image} (mode 0666): chmod go-w {image}" in program.refused(*mount, code=5)
    image.chmod(0o644)
    place.chmod(0o777)
    assert f"others can write to {place}" in program.refused("mount", link, program.mountpoint, code=5)
    program.run("mount", "--trust", "everyone", link, program.mountpoint)
    program.run("umount", program.mountpoint)
    place.chmod(0o755)
    os.chown(place, 65534, 65534)
    program.run(*mount, env={"SUDO_UID": "65534"})  # who types sudo could do it in any case


def test_links_of_others_lead_to_their_own_files_only(program: Program) -> None:
    """They cannot have a file of root's shown that has the size and time of a shard."""
    nobody, secret = 65534, program.home / "secret"
    place = program.directory("place")
    shard, image, mountpoint = place / "s.tar", program.home / "set.erofs", program.mountpoint
    shard.write_bytes(tars.tar(tars.member(b"a.x", b"a" * 5000)))
    program.run("image", shard, "-o", image)
    secret.write_bytes(b"secret" * 10_000)
    os.truncate(secret, shard.stat().st_size)
    os.utime(secret, ns=(0, shard.stat().st_mtime_ns))
    shard.rename(place / "before.tar")

    def link_to(target: Path, mine: bool) -> None:
        shard.unlink(missing_ok=True)
        shard.symlink_to(target)
        os.chown(shard, *((0, 0) if mine else (nobody, nobody)), follow_symlinks=False)

    os.chown(place, nobody, nobody)
    link_to(secret, mine=False)
    says = program.refused("mount", image, mountpoint, code=5)
    assert says == (
        f"wdsfs: {shard}: a link of another user (nobody) leads to a file of root: name the file, or "
        "--trust nobody"
    )
    shard.unlink()
    secret.chmod(0o600)
    os.link(secret, shard)
    assert "is a hard link of a file of root that not" in program.refused("mount", image, mountpoint, code=5)
    link_to(place / "before.tar", mine=False)
    message = program.refused("mount", "--engine", "kernel", shard, mountpoint, code=3)
    assert "(nobody) leads to a file of root" in message
    done = program.run("mount", "--engine", "auto", shard, mountpoint, code=3)
    assert f"engine: FUSE, because {shard}: a link of another user" in done.stderr.decode()
    assert f"wdsfs: {shard}: a link of another user" in done.stderr.decode()
    os.chown(place / "before.tar", nobody, nobody)
    (program.home / "mine").symlink_to(place)
    ways = [("mount", image), ("mount", "--engine", "kernel", program.home / "mine" / "s.tar")]
    for words in ways:
        program.run(*words, mountpoint)
        assert (mountpoint / "s" / "a" / "x").read_bytes() == b"a" * 5000
        program.run("umount", mountpoint)
    link_to(program.write("other.tar", (place / "before.tar").read_bytes()), mine=True)
    program.run("mount", "--engine", "kernel", shard, mountpoint)


def test_a_shard_that_is_being_written_is_refused(program: Program) -> None:
    shard, image = shard_and_image(program)
    with shard.open("r+b"):
        message = program.refused("mount", image, program.mountpoint, code=5)
    assert message == f"wdsfs: {shard}: a program has it open for writing"


def test_without_leases_times_are_looked_at(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on file systems that have none; on one that is shared with other machines it takes --trust-shards."""
    shard, image = shard_and_image(program)
    plainly = fcntl.fcntl

    def refuse(fd: int, command: int, argument: Any = 0) -> Any:
        if command == fcntl.F_SETLEASE:
            raise OSError(errno.EINVAL, "no leases here")
        return plainly(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(program.home / "run"))
    forked = multiprocessing.get_context("fork")
    serving = forked.Process(target=lambda: sys.exit(run_image(program, image, foreground=True)))
    try:
        serving.start()
        wait_until(lambda: guard_of(str(program.mountpoint)) is not None, "the mount")
        with shard.open("r+b") as file:
            file.write(b"b")
        wait_for_the_end(program)
    finally:
        serving.join(PATIENCE)
        end_mount(program.mountpoint)
    assert serving.exitcode == 0
    monkeypatch.setattr(mount_table, "filesystem_type", lambda _: "nfs4")
    monkeypatch.setattr(host, "kernel_version", lambda text=None: (6, 12) if text is None else (6, 15))
    with monkeypatch.context() as patch:  # as an earlier release made an image with --linux 6.15
        patch.setattr(erofs_header, "OLDEST_KERNEL", (6, 15))
        told(program.home, "image", shard, "-o", image, code=0)
    says = told(program.home, "mount", "-f", image, program.mountpoint, code=5)
    assert f"{shard}: lies on nfs4, where other machines can write it unnoticed" in says
    assert "was made for Linux 6.15; with this older kernel its files have the time 1970" in says


def test_a_write_below_an_overlay_layer_ends_the_mount(program: Program) -> None:
    """An overlay of the kernel's. No lease tells of it; so the times are looked at."""
    below, _, upper, work, shown = map(program.directory, ("below", "w", "w/upper", "w/work", "shown"))
    layers = f"lowerdir={below},upperdir={upper},workdir={work}"
    subprocess.run(["mount", "-t", "overlay", "-o", layers, "layers", shown], check=True)
    try:
        (below / "s.tar").write_bytes(tars.tar(tars.member(b"a.x", OLD * 5000)))
        says = program.run("mount", "--engine", "kernel", shown / "s.tar", program.mountpoint).stderr.decode()
        assert f"{shown}/s.tar: their file system shows files of another one, where writers do not wait" in says
        with (below / "s.tar").open("r+b") as file:
            file.seek(512)
            file.write(NEW * 5000)
        wait_for_the_end(program)
    finally:
        end_mount(program.mountpoint)
        subprocess.run(["umount", "--lazy", shown], check=True)


def test_which_changes_of_the_times_are_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another mode, another name, and a removal are none."""
    monkeypatch.setattr(mount_table, "filesystem_type", lambda _: "fuse.bindfs")
    image, shard = tmp_path / "i.erofs", tmp_path / "s.tar"
    image.touch()
    shard.touch()

    def opened(path: Path) -> OpenDevice:
        return OpenDevice(bytes(path), os.open(path, os.O_RDONLY))

    def changes(change: Callable[[], object]) -> list[str]:
        held = devices.HeldShards(opened(image))
        held.devices = [opened(shard)]
        held.take_leases()
        assert held.watched(has_lease=True) == [str(shard), str(image)]
        try:
            # Times of file systems go by the clock's tick: until the next one a change may not be seen in them.
            before = shard.stat().st_ctime_ns
            spare = tmp_path / "spare"
            spare.touch()
            wait_until(lambda: (spare.touch(), spare.stat().st_ctime_ns)[1] > before, "the next tick")
            change()
            first = held.changing()
            assert held.changing() == first  # also when it is asked again
            return first
        finally:
            held.close()

    assert changes(lambda: shard.chmod(0o600)) == []
    assert changes(lambda: os.link(shard, tmp_path / "other")) == []
    assert changes(lambda: os.chown(shard, 0, os.getegid() if os.geteuid() else 7)) == []
    assert changes(lambda: (tmp_path / "s2.tar").write_bytes(b"") or (tmp_path / "s2.tar").replace(shard)) == []
    times = (shard.stat().st_atime_ns, shard.stat().st_mtime_ns)
    assert changes(lambda: os.utime(shard, ns=times)) == [str(shard)]  # as who has written, and sets it back
    assert changes(lambda: os.utime(shard, (1, 1))) == [str(shard)]
    assert changes(shard.unlink) == []


def test_signals_are_handled_as_before_when_a_guard_has_given_up(tmp_path: Path) -> None:
    """With `--engine auto --foreground` the same process goes on by FUSE, and has to end at an interrupt."""
    image = tmp_path / "i.erofs"
    image.touch()
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGIO)
    before = [signal.getsignal(number) for number in numbers]
    held = devices.HeldShards(OpenDevice(bytes(image), os.open(image, os.O_RDONLY)))
    waiting = guard_module.Guard(MountOptions([], str(tmp_path)), "/", held, lambda _: None, None)
    waiting.take()
    waiting.close()
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_runtime_directory_that_is_full(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is mounted that commands could not find."""
    _, image = shard_and_image(program)

    def write(_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(mount_registry, "register", write)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(program.home / "run"))
    assert run_image(program, image) == MountError.exit_code
    assert not is_mounted(program)


def test_without_inotify_nothing_stays_mounted(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard could not tell when the last program has closed its files."""
    _, image = shard_and_image(program)

    def refuse(_: str) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(mount_table, "end_of_use", refuse)
    assert run_image(program, image) == MountError.exit_code
    assert not is_mounted(program)


def test_an_image_that_was_removed(program: Program) -> None:
    """The kernel has it open, so the mount goes on; commands know it by its guard."""
    shard = program.write("s.tar", tars.tar(tars.member(b"a.x", b"one")))
    program.run("mount", "--engine", "kernel", shard, program.mountpoint)
    guard = the_guard(program)
    Path(guard.image).unlink()
    assert (program.mountpoint / "s" / "a" / "x").read_bytes() == b"one"
    for place in ([], [program.mountpoint]):
        shown = told(program.home, "status", *place, code=0)
        assert f"{program.mountpoint}: served by the kernel" in shown
        assert f"{guard.image}: No such file or directory" in shown
    said = program.refused("where", program.mountpoint / "s", code=5)
    assert "its image has been removed" in said


def test_two_mounts_at_once(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one is made after this one has looked at the mount point: one of them is refused."""
    _, image = shard_and_image(program)

    def overtaken(*_: object) -> None:
        program.run("mount", image, program.mountpoint)

    monkeypatch.setattr(guard_module, "_refuse_network", overtaken)
    assert run_image(program, image) == MountError.exit_code
    there = [one for one in mount_table.mounts() if os.fsdecode(one.path) == str(program.mountpoint)]
    assert len(there) == 1
