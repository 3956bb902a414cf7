"""`mount --engine`: an image is made, kept and mounted in one step, or FUSE is taken, with the reason."""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import sets, tars
from tests.conftest import ROOT, Program
from tests.kernel.mounts import KERNEL, engine_of, mount, the_guard, told
from wdsfs import host, mount_table
from wdsfs.cli import mount_helper
from wdsfs.kernel import engine, erofs_mount
from wdsfs.kernel.guard import guard_of
from wdsfs.mount import fuse_session
from wdsfs.mount.mount_options import MountOptions


@pytest.fixture
def shard(program: Program) -> Path:
    """A shard for the kernel to serve."""
    return program.write("s0.tar", sets.content(0))


def names_below(top: Path) -> set[str]:
    return {str(path.relative_to(top)) for path in top.rglob("*")}


def test_an_image_is_made_kept_and_mounted_in_one_step(program: Program, shard: Path) -> None:
    """The image is kept for the next mount, and made anew when options are others or a shard has changed."""
    mount, said = ("mount", "--engine", "kernel"), list[bytes]()
    shown = {
        "s0",
        *(f"s0/d{n % 2}{more}" for n in range(3) for more in ("", f"/0-{n}", f"/0-{n}/txt", f"/0-{n}/cls")),
    }
    inodes = []
    for options in ((), (), ("-o", "allow_other,uid=7,umask=007")):
        said.append(program.run(*mount, *options, shard, program.mountpoint).stderr)
        assert names_below(program.mountpoint) == shown
        found = (program.mountpoint / "s0/d0/0-0/txt").stat()
        top = program.mountpoint.stat()
        assert (found.st_uid, oct(found.st_mode), oct(top.st_mode)) == (
            (7, "0o100440", "0o40550") if options else (0, "0o100444", "0o40500")
        )
        guard = the_guard(program)
        inodes.append(Path(guard.image).stat().st_ino)
        program.run("umount", program.mountpoint)
    shard.write_bytes(sets.content(5))
    program.run(*mount, shard, program.mountpoint)
    assert (program.mountpoint / "s0/d0/5-0/txt").read_bytes() == b"5"
    assert inodes[0] == inodes[1] != inodes[2]
    assert said == [b"", b"", b""]  # nothing odd, no hints


def test_hints_are_given_when_an_image_is_made(program: Program, shard: Path) -> None:
    """As a mount by FUSE gives them; the next mount takes the image."""
    shard.write_bytes(tars.tar(tars.member(b"a.jpg")))
    said = list[bytes]()
    for _ in range(2):
        said.append(program.run("mount", "--engine", "kernel", shard, program.mountpoint).stderr)
        program.run("umount", program.mountpoint)
    hint = b"wdsfs: loaders that look for *.jpg need --names full or --layout files\n"
    assert said == [hint + b"wdsfs: `wdsfs help layouts` shows the layout for each loader\n", b""]


def test_a_kept_image_is_mounted_without_the_index(program: Program, shard: Path) -> None:
    """Its set is known by the shards alone; not if one has changed, or something is to be said of the set."""
    index = program.home / "index" / "data.mdb"

    def mount(*options: str) -> tuple[bool, bytes]:
        """Mount the set, without an index; if one was made, and what was said."""
        index.unlink(missing_ok=True)
        said = program.run("mount", "--engine", "kernel", *options, shard, program.mountpoint).stderr
        assert (program.mountpoint / "s0/d0/0-0/txt").read_bytes() == b"0"
        program.run("umount", program.mountpoint)
        return index.exists(), said

    assert [mount() for _ in range(3)] == [(True, b""), (False, b""), (False, b"")]
    assert mount("--strict") == (True, b"")
    assert [mount("--ignore-case") for _ in range(2)] == [(True, b"")] * 2  # a view
    assert mount("--layout", "samples") == (False, b"")
    before = shard.stat()
    shard.chmod(0o600)  # no other bytes, but the fingerprint of a file that may have been written
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert [mount() for _ in range(2)] == [(True, b""), (False, b"")]
    with shard.open("ab") as file:
        file.truncate(len(sets.content(0)) - 1024 - 100)
    first, again = mount(), mount()
    assert first == again
    assert first[0]
    assert b"see: wdsfs check" in first[1]


def test_two_mounts_of_one_image(program: Program, shard: Path) -> None:
    """At two places: each has its guard."""
    other = program.directory("other")
    first = mount(program, shard)
    program.run(*KERNEL, shard, other)
    second = guard_of(str(other))
    assert second is not None
    assert (second.image, second.pid == first.pid) == (first.image, False)
    program.run("umount", program.mountpoint)
    assert (other / "s0/d0/0-0/txt").read_bytes() == b"0"


def test_options_of_the_mount(program: Program, shard: Path) -> None:
    mount = ("mount", "--engine", "kernel")
    for words, wanted in (
        (["-o", "allow_root,default_permissions,sync,async,dirsync"], {"ro", "nosuid", "nodev", "relatime"}),
        (["-o", "suid,dev,noexec,noatime"], {"ro", "noexec", "noatime"}),
    ):
        program.run(*mount, *words, shard, program.mountpoint)
        found = mount_table.mounted_at(program.mountpoint)
        assert found is not None
        assert set(found.options) == wanted
        program.run("umount", program.mountpoint)
    message = told(program.home, *mount, "-o", "auto_unmount", shard, program.mountpoint, code=2)
    assert "-o auto_unmount: not for an image" in message


@pytest.mark.parametrize("ready", [False, True], ids=["a new directory", "an empty directory"])
def test_a_directory_that_was_made_for_a_mount_goes_with_it(ready: bool, program: Program, shard: Path) -> None:
    place = shard.with_suffix("")
    if ready:
        place.mkdir()
    program.run("mount", "-q", "--engine", "kernel", shard.name)
    try:
        assert engine_of(place) == "erofs"
    finally:
        program.run("umount", place)
    assert place.exists() == ready


# What only FUSE serves: options, and the reason that is given.
FOR_FUSE = [
    (["--overlay", "edits", "s0.tar"], "--overlay is for FUSE"),
    (["--overlay", "edits", "--new"], "--overlay is for FUSE"),
    (["--lazy", "s0.tar"], "--lazy is for FUSE"),
    (["--follow", "s0.tar"], "--follow is for FUSE"),
    (["--index-tree", "s0.tar"], "--index-tree is for FUSE"),
    (["packed.tar.gz"], "packed.tar.gz is compressed"),
    (["packed.tar"], "packed.tar: is compressed"),
    (
        ["--columns", "txt", "--duplicates", "skip", "--join", "depth.tar.gz", "s0.tar"],
        "depth.tar.gz: is compressed",
    ),
]


@pytest.mark.parametrize(("words", "reason"), FOR_FUSE, ids=lambda value: value if isinstance(value, str) else "")
def test_what_only_fuse_serves(words: list[str], reason: str, program: Program, shard: Path) -> None:
    """`kernel` refuses it, and says so; `auto` takes FUSE, also for a set without a suffix that tells."""
    for name in ("packed.tar", "packed.tar.gz", "depth.tar.gz"):
        program.write(name, gzip.compress(sets.content(0)))
    message = program.refused("mount", "--engine", "kernel", *words, program.mountpoint, code=5)
    assert reason in message
    assert "--engine auto takes FUSE instead" in message
    assert not (program.home / "edits").exists()
    assert mount_table.mounted_at(program.mountpoint) is None
    with program.mounted("--engine", "auto", *words) as mounted:
        assert engine_of(mounted.path) == "fuse.wdsfs"
        assert "engine: FUSE, because " in mounted.output
        assert reason in mounted.output


@pytest.mark.parametrize("what", ["large", "written"])
def test_auto_takes_fuse_for_what_no_image_can_hold(what: str, program: Program, shard: Path) -> None:
    """A shard of more than 2 TiB (most of it a hole), known when the image is made; and one that is written."""
    reason = "EROFS takes up to 2 TiB"
    with shard.open("r+b") if what == "written" else contextlib.nullcontext():
        if what == "written":
            reason = f"engine: FUSE, because {shard}: a program has it open for writing"
        else:
            os.truncate(shard, (2 << 40) + 512)
        with program.mounted("--engine", "auto", shard) as mounted:
            assert engine_of(mounted.path) == "fuse.wdsfs"
            assert reason in mounted.output


def test_auto_takes_fuse_after_the_kernel_has_refused(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a reason that nothing has told before."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, "for some reason")

    def by_fuse(wanted: MountOptions) -> int:
        taken.append(wanted.mountpoint)
        return 0

    taken: list[str] = []
    shard = program.write("s0.tar", sets.content(0))
    monkeypatch.setattr(erofs_mount, "_mount", refuse)
    monkeypatch.setattr(fuse_session, "mount_by_fuse", by_fuse)
    monkeypatch.setenv("XDG_STATE_HOME", str(program.home / "state"))
    said = told(program.home, "mount", "--engine", "auto", shard, program.mountpoint, code=0)
    assert said.splitlines()[-1] == "wdsfs: engine: FUSE, because the kernel has not mounted it"
    assert taken == [str(program.mountpoint)]
    told(program.home, "mount", "--engine", "kernel", shard, program.mountpoint, code=5)
    assert len(taken) == 1


def test_a_line_of_fstab_that_is_mounted_already(program: Program) -> None:
    """`mount -a` calls the helper for it each time, since the list of mounts has the image."""
    program.write("s0.tar", sets.content(0))
    code = "import sys; from wdsfs.__main__ import mount_helper; sys.exit(mount_helper())"
    line = [sys.executable, "-c", code, str(program.home / "s{0..0}.tar"), str(program.mountpoint), "-o"]

    def code_of(options: str) -> int:
        return subprocess.run([*line, options], env=program.environment, capture_output=True).returncode

    assert code_of("ro,engine=kernel") == 0
    before = mount_table.mounted_at(program.mountpoint)
    assert code_of("ro,engine=kernel") == 0
    assert mount_table.mounted_at(program.mountpoint) == before
    line[3] = str(program.home / "s0.tar")
    assert code_of("ro,engine=kernel") == mount_helper.MOUNT_FAILURE


def test_a_process_that_may_not_mount(program: Program) -> None:
    """As root in a container: it is known before an image is made."""
    if shutil.which("setpriv") is None:
        pytest.skip("there is no setpriv")
    code = "from wdsfs.kernel.erofs_mount import refusal_of_kernel as found; print(found())"
    without = ("setpriv", "--bounding-set=-sys_admin", sys.executable, "-c", code)
    assert b"this process may not mount: only root may do that" in program.tool(*without, cwd=ROOT)
    assert erofs_mount.refusal_of_kernel() is None


def test_a_current_directory_that_was_removed(program: Program, shard: Path) -> None:
    """Whole paths still lead to everything."""
    script = 'mkdir "$0" && cd "$0" && rmdir "$0" && exec "$@"'

    def run(*words: str | Path) -> None:
        command = ("sh", "-c", script, program.home / "gone", *program.command(*words))
        subprocess.run(command, env=program.environment, check=True)

    run("mount", "--engine", "kernel", "-q", shard, program.mountpoint)
    assert (program.mountpoint / "s0/d0/0-0/txt").read_bytes() == b"0"
    run("umount", program.mountpoint)


def test_obstacles_to_the_kernel_engine_are_named(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    file = program.write("s0.tar", sets.content(0))
    shard = sets.at(file)
    assert engine.obstacle([shard], trusting=False) is None
    remote = sets.at(b"s3://bucket/s.tar")
    assert "s3://bucket/s.tar is remote" in str(engine.obstacle([remote], trusting=False))
    monkeypatch.setattr(mount_table, "filesystem_type", lambda _: "nfs4")
    reason = f"{file} lies on nfs4, which other machines can write"
    assert engine.obstacle([shard], trusting=False) == reason
    assert engine.obstacle([shard], trusting=True) is None
    monkeypatch.setattr(resource, "getrlimit", lambda _: (50, 50))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: (_ for _ in ()).throw(OSError(errno.EPERM, "no")))
    assert "the mount needs 65 open files, and the limit is 50" in str(engine.obstacle([shard], trusting=True))
    monkeypatch.undo()
    monkeypatch.setattr(host, "kernel_version", lambda: (6, 11))
    assert engine.obstacle([shard], trusting=True) is None
    monkeypatch.setattr(erofs_mount, "LOOPS", str(program.home / "no-loops"))
    reason = f"there is no {program.home}/no-loops, which EROFS needs before Linux 6.12 (modprobe loop)"
    assert engine.obstacle([shard], trusting=True) == reason


# --- `wdsfs doctor`


@pytest.mark.parametrize(
    ("version", "has_erofs", "has_loops", "user", "level", "text"),
    [
        ((6, 18, 1), True, False, 0, "ok", "EROFS, shards as files"),
        ((6, 18), True, True, 1000, "ok", "EROFS, shards as files; only for root"),
        ((6, 8), True, True, 0, "ok", "EROFS, shards as loop devices"),
        ((6, 8), True, False, 0, "warn", "before Linux 6.12"),
        ((5, 10), True, True, 0, "ok", "needs Linux 5.16 or later, not 5.10"),
        ((6, 18), False, True, 0, "warn", "this kernel has no EROFS"),
    ],
)
def test_doctor_checks_the_requirements_of_the_engine(
    version: tuple[int, ...],
    has_erofs: bool,
    has_loops: bool,
    user: int,
    level: str,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no modprobe
    systems, loops = tmp_path / "filesystems", tmp_path / "loop-control"
    systems.write_text("nodev\tproc\n\text4\n" + "\terofs\n" * has_erofs)
    if has_loops:
        loops.touch()
    monkeypatch.setattr(host, "kernel_version", lambda: version)
    monkeypatch.setattr(engine, "FILE_SYSTEMS", systems)
    monkeypatch.setattr(engine, "LOOPS", str(loops))
    monkeypatch.setattr(engine, "refusal_of_kernel", lambda: None)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    found = engine.check_machine()
    assert (found.level, text in found.detail) == (level, True), found
    assert bool(found.remedy) == (level == "warn")
