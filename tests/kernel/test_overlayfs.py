"""`mount --engine kernel --overlay`: the kernel's overlayfs above an image, and the commands on its changes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Program, fails
from tests.kernel.mounts import KERNEL, end_mount, kill, mount, need_erofs, the_guard, told, wait_for_the_end
from tests.processes import PATIENCE, wait_until
from tests.writables import shard, walk_directory
from wdsfs import mount_registry, mount_table
from wdsfs.errors import OverlayBusy
from wdsfs.kernel import image as image_module
from wdsfs.kernel import overlayfs, remount
from wdsfs.kernel.guard import guard_of
from wdsfs.overlay import overlay_directory
from wdsfs.overlay.overlay_directory import OverlayDirectory, held
from wdsfs.packing.replacement import Replacement

BUSY = 8  # exit code: the overlay is in use, or cannot be used
WHEN = (1_700_000_000, 1_700_000_000)


def make_set(program: Program) -> list[Path]:
    """Two shards; the second has links, too."""
    plain: list[tuple[str, str | bytes | None]] = [
        (f"d/{n}.{ext}", f"{n}{ext}".encode() * 300) for n in range(6) for ext in ("cls", "json", "txt")
    ]
    more: list[tuple[str, str | bytes | None]] = [
        ("f/z.txt", b"z"),
        ("e/x.txt", b"x"),
        ("e/far", "-> x.txt"),
        ("e/y.txt", "== e/x.txt"),
    ]
    return [program.write("s0.tar", shard(plain)), program.write("s1.tar", shard([*plain, *more]))]


@pytest.fixture
def sources(program: Program) -> list[Path]:
    return make_set(program)


@contextmanager
def mounted(program: Program, *words: str | Path, overlay: str = "edits") -> Iterator[Path]:
    """A mount by the kernel with an overlay, which is ended afterwards."""
    need_erofs()
    try:
        program.run(*KERNEL, "--overlay", program.home / overlay, *words, program.mountpoint)
        yield program.mountpoint
        program.run("umount", program.mountpoint)
        assert guard_of(str(program.mountpoint)) is None
    finally:
        end_mount(program.mountpoint)


def wait_until_free(overlay: Path) -> None:
    """Return when the last process of a mount by FUSE has ended, which the daemon itself may not have been."""

    def is_free() -> bool:
        try:
            with held(OverlayDirectory(overlay)):
                return True
        except OverlayBusy:
            return False

    wait_until(is_free, "the lock of the overlay")


def put(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    os.utime(path, WHEN)


def save(path: Path, data: bytes) -> None:
    """As editors do: another file takes the name."""
    put(path.with_name(".new~"), data)
    path.with_name(".new~").rename(path)


def edit_samples(top: Path, shards: tuple[str, ...]) -> None:
    """What people and programs do, below the directory of a shard or, merged, at the top."""
    one, other = (top / name for name in shards)
    put(one / "d/0/cls", b"changed")
    save(one / "d/1/txt", b"saved")
    with (one / "d/2/json").open("ab") as file:
        file.write(b"more")
    os.utime(one / "d/2/json", WHEN)
    (one / "d/2/txt").rename(one / "d/2/text")
    (one / "d/3/cls").unlink()
    shutil.rmtree(one / "d/4")
    (one / "d/4").mkdir()
    put(one / "d/4/only", b"another one")
    os.utime(one / "d/5/txt", WHEN)
    (one / "d/5/cls").chmod(0o600)
    (one / "new").mkdir()
    put(one / "new/cls", b"7")
    (one / "new").rename(one / "newer")
    os.link(one / "newer/cls", one / "newer/label")
    (one / "newer/link").symlink_to("cls")
    os.mkfifo(one / "newer/pipe")
    put(one / "newer/.cls.swp", b"left behind")
    shutil.rmtree(other / "f/z")
    (top / "more/k").mkdir(parents=True)
    put(top / "more/k/txt", b"in a new shard, or a folder")


def edit_files(top: Path, shards: tuple[str, ...]) -> None:
    one, other = (top / name for name in shards)
    put(one / "d/0.cls", b"changed")
    (one / "d/1.txt").rename(one / "d/1.text")
    (one / "d/2.json").unlink()
    put(one / "d/9.txt", b"new")
    (other / "e/far").unlink()
    (other / "e/far").symlink_to("elsewhere")
    (top / "more").mkdir()
    put(top / "more/k.txt", b"new shard")


EDITS: Mapping[str, tuple[Any, tuple[str, ...], tuple[str, ...]]] = {
    "samples": (edit_samples, ("s0", "s1"), ()),
    "merged": (edit_samples, (".", "."), ("--merge",)),
    "files": (edit_files, ("s0", "s1"), ("--layout", "files")),
}


@pytest.mark.parametrize("kind", EDITS)
def test_the_same_edits_are_the_same_changes(kind: str, program: Program) -> None:
    """By FUSE and by the kernel: what the mount shows, what `diff` says, and the bytes of what is committed."""
    need_erofs()
    edit, below, words = EDITS[kind]
    sources = make_set(program)[1 if kind == "merged" else 0 :]
    found: dict[str, Any] = {}
    seen: dict[str, Any] = {}
    for engine in ("fuse", "kernel"):
        overlay = program.home / engine
        try:
            program.run(
                *("mount", "--engine", engine, "-q", "--overlay", overlay, *words, *sources, program.mountpoint)
            )
            edit(program.mountpoint, below)
            by_mount = program.run("diff", "--json", program.mountpoint, code=1).stdout
            seen[engine] = {
                name: about[0] if about[0] != "file" else about[3]
                for name, about in walk_directory(os.fsencode(program.mountpoint)).items()
            }
            program.run(
                *("commit", "--leave-out", "-o", program.home / f"{engine}-m" / "%d.tar", program.mountpoint)
            )
            program.run("umount", program.mountpoint)
        finally:
            end_mount(program.mountpoint)
        wait_until_free(overlay)
        by_overlay = program.run("diff", "--json", "--overlay", overlay, *sources, code=1).stdout
        assert json.loads(by_mount) == json.loads(by_overlay)
        found[engine] = json.loads(by_overlay)
        program.run(
            "commit", "--leave-out", "-o", program.home / f"{engine}-o" / "%d.tar", "--overlay", overlay, *sources
        )
    assert found["fuse"] == found["kernel"]
    assert seen["fuse"] == seen["kernel"]
    written = [
        {path.name: path.read_bytes() for path in (program.home / f"{engine}-{how}").iterdir()}
        for engine in ("fuse", "kernel")
        for how in "mo"
    ]
    assert written[0]
    assert all(one == written[0] for one in written)


def test_either_engine_goes_on_where_the_other_was(program: Program, sources: list[Path]) -> None:
    """An overlay changes hands; what it shows stays the same."""
    with mounted(program, *sources) as top:
        edit_samples(top, ("s0", "s1"))
        before = walk_directory(os.fsencode(top))
    with program.mounted("--overlay", program.home / "edits", *sources) as by_fuse:
        shown = walk_directory(os.fsencode(by_fuse.path))
        assert {name: about[0] for name, about in shown.items()} == {
            name: about[0] for name, about in before.items()
        }
        (by_fuse.path / "s1/d/1").rename(by_fuse.path / "s1/d/renamed")
        shutil.rmtree(by_fuse.path / "s1/d/2")
    with mounted(program, *sources) as top:
        assert (top / "s1/d/renamed/txt").read_bytes() == b"1txt" * 300
        assert not (top / "s1/d/1").exists()
        assert not (top / "s1/d/2").exists()
        assert "renamed  s1/d/1 -> s1/d/renamed" in program.run("diff", top, code=1).stdout.decode()


def test_whiteouts_that_hide_nothing_are_not_listed(program: Program, sources: list[Path]) -> None:
    """Neither those that earlier versions left in renamed samples, nor where a shard has lost the sample."""
    with program.mounted("--overlay", "edits", *sources) as by_fuse:
        for number in range(3):
            (by_fuse.path / f"s0/d/{number}/cls").unlink()
        (by_fuse.path / "s0/d/0").rename(by_fuse.path / "s0/d/renamed")
        shutil.rmtree(by_fuse.path / "s1/d/2")
    upper = program.home / "edits/upper/s0/d"
    assert sorted(os.listdir(upper / "renamed")) == ["json", "txt"]
    os.mknod(upper / "renamed/cls", 0o020000)
    (upper / "renamed/other").touch()
    os.setxattr(upper / "renamed/other", "user.overlay.whiteout", b"y")
    os.removexattr(upper / "2", "user.overlay.origin")
    program.write("s0.tar", shard([("d/0.txt", b"0"), ("f/x.txt", b"x")]))
    with mounted(program, *sources) as top:
        found = walk_directory(os.fsencode(top))
        assert {name for name in found if name.startswith(b"s0/")} == {
            *(b"s0/d", b"s0/d/1", b"s0/d/2", b"s0/d/renamed", b"s0/d/renamed/json", b"s0/d/renamed/txt"),
            *(b"s0/f", b"s0/f/x", b"s0/f/x/txt"),
        }
        shutil.copytree(top, program.home / "copy")
        shutil.rmtree(top / "s0/d/renamed")
        shutil.rmtree(top / "s0/d/2")
    with program.mounted("--overlay", "edits", *sources) as by_fuse:
        by_fuse.expect_log("have changed since the overlay")
        gone = {b"s0/d/2", b"s0/d/renamed", b"s0/d/renamed/json", b"s0/d/renamed/txt"}
        assert set(walk_directory(os.fsencode(by_fuse.path))) == set(found) - gone


def test_who_may_write_and_enter(program: Program, sources: list[Path]) -> None:
    with mounted(program, *sources) as top:
        assert [oct(path.stat().st_mode & 0o777) for path in (top, top / "s0/d", top / "s0/d/0/txt")] == [
            *("0o700", "0o755", "0o644")
        ]
        number = (top / "s0/d/0/txt").stat()
        put(top / "s0/d/0/txt", b"1")
        again = (top / "s0/d/0/txt").stat()
        assert (again.st_ino, again.st_dev) == (number.st_ino, top.stat().st_dev)
        with fails(1):  # EPERM: it would be a whiteout
            os.mknod(top / "s0/d/0/null", 0o020000)
        with fails(18):  # EXDEV, as by FUSE for folders; `mv` copies
            (top / "s0/d").rename(top / "s0/f")
        os.setxattr(top / "s0/d/0/txt", "user.overlay.opaque", b"y")  # only looks like a mark
        os.setxattr(top / "s0/d", "user.overlay.opaque", b"y")
        assert "changed  s0/d/0 ~txt" in program.run("diff", top).stdout.decode()
    with mounted(program, "-o", "allow_other,uid=7", "-r", *sources) as top:
        assert oct(top.stat().st_mode & 0o777) == "0o755"
        assert (top / "s0/d/1/txt").stat().st_uid == 7
        with fails(30):  # EROFS
            (top / "s0/d/1/txt").write_bytes(b"")


def test_marks_of_root_are_refused(program: Program, sources: list[Path]) -> None:
    """Root can copy attributes of another overlay into the mount: the kernel does not heed them there."""
    with mounted(program, *sources) as top:
        os.setxattr(top / "s0/d", "trusted.overlay.opaque", b"y")
        assert (top / "s0/d/0").exists()
        message = program.refused("diff", top, code=BUSY)
        assert "'s0/d' in the overlay has the attribute trusted.overlay.opaque" in message
        os.removexattr(top / "s0/d", "trusted.overlay.opaque")
        program.run("diff", top)


def test_a_name_that_fuse_mounts_keep_is_not_packed(program: Program, sources: list[Path]) -> None:
    with mounted(program, *sources) as top:
        (top / ".wdsfs/k").mkdir(parents=True)
        put(top / ".wdsfs/k/txt", b"")
        said = program.run("diff", top, code=1).stdout.decode()
        assert "cannot be packed: .wdsfs: a mount uses this name for itself" in said


def test_hard_links_that_come_apart_are_a_conflict(program: Program, sources: list[Path]) -> None:
    """By the kernel one name of a linked member is changed alone: no tar can have that."""
    with mounted(program, "--layout", "files", *sources) as top:
        put(top / "s1/e/x.txt", b"changed")
        assert (top / "s1/e/y.txt").read_bytes() == b"x"
        assert "conflict: s1/e/x.txt: has hard links" in program.run("diff", top, code=1).stdout.decode()
        program.run("commit", "--leave-out", "-o", program.home / "out/%d.tar", top, code=7)
        (top / "s1/e/y.txt").unlink()
        os.link(top / "s1/e/x.txt", top / "s1/e/y.txt")
        assert "changed" in program.run("diff", top).stdout.decode()


def test_status_lock_and_refusals(program: Program, sources: list[Path]) -> None:
    overlay = program.home / "edits"
    with mounted(program, *sources) as top:
        (about,) = program.json("status", top)
        assert (about["overlay"], about["mode"], about["state"]) == (str(overlay), "rw", "served by the kernel")
        shown = program.run("status", top).stdout.decode()
        assert f"{top}: served by the kernel, read-write" in shown
        assert f"overlay  {overlay}" in shown
        message = program.refused("diff", "--overlay", overlay, *sources, code=BUSY)
        assert f"is in use by process {the_guard(program).pid}" in message
        message = program.refused(*KERNEL, "--overlay", program.home / "other", *sources, top, code=5)
        assert f"{top}: wdsfs is mounted there already" in message
        message = program.refused("restore", "--all", top, code=5)
        assert f"wdsfs restore --overlay {overlay} PATH..." in message
        put(top / "s0/d/0/txt", b"1")
    program.run("restore", "--overlay", overlay, "s0/d/0")
    with mounted(program, *sources) as top:
        assert (top / "s0/d/0/txt").read_bytes() == b"0txt" * 300
    message = program.refused(*(*KERNEL, "--overlay", program.home / "o", "--new", program.mountpoint), code=5)
    assert "--new is for FUSE" in message


def test_a_commit_waits_for_no_writer(program: Program, sources: list[Path]) -> None:
    """A file that is open for writing stops a commit before it begins; while it runs nobody can open one."""
    with mounted(program, *sources) as top:
        file = top / "s0/d/0/txt"
        with file.open("r+b") as writer:
            message = program.refused("commit", "-o", program.home / "out/%d.tar", top, code=BUSY)
            assert "programs have files open that are written to" in message
            writer.write(b"1")
        place = OverlayDirectory(program.home / "edits")
        with overlayfs.frozen(str(top), place):
            with fails(30):  # EROFS
                file.write_bytes(b"2")
            assert file.read_bytes()[:1] == b"1"
            message = program.refused("commit", "-o", program.home / "out/%d.tar", top, code=BUSY)
            assert "another commit or refresh is running" in message
        put(file, b"2")
        program.run("commit", "-o", program.home / "out/%d.tar", top)
        put(file, b"3")


def test_commit_in_place_makes_the_mount_anew(program: Program, sources: list[Path]) -> None:
    """The mount shows the new shards and can be written; what is open from the old one stays as it was."""
    with mounted(program, "-o", "uid=7", *sources) as top:
        edit_samples(top, ("s0", "s1"))
        (top / "s0/newer/pipe").unlink()
        (top / "s0/newer/link").unlink()
        (top / "s0/newer/.cls.swp").unlink()
        shown = walk_directory(os.fsencode(top))
        guard = the_guard(program)
        with (top / "s0/d/1/json").open("rb") as kept:
            program.run("commit", "--in-place", top)
            assert kept.read() == b"1json" * 300
            assert guard.alive
        assert the_guard(program).pid == guard.pid
        after = walk_directory(os.fsencode(top))
        renamed = {b"s2" + name[4:] if name.startswith(b"more") else name for name in shown}
        assert set(after) == renamed - {b"s1/f"}  # tars have no empty directories
        assert after[b"s0/d/0/cls"][3] == b"changed"
        assert (top / "s0/d/0/cls").stat().st_uid == 7
        assert json.loads(program.run("diff", "--json", top).stdout)["samples"] == []
        put(top / "s2/k/txt", b"changed again")
        assert "changed  s2/k ~txt" in program.run("diff", top).stdout.decode()
        assert [path.name for path in sorted(program.home.glob("s*.tar"))] == ["s0.tar", "s1.tar", "s2.tar"]


def test_a_commit_in_place_that_was_killed_is_finished(
    program: Program, sources: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mount stays as it was, read-only, until then."""
    with mounted(program, *sources) as top:
        put(top / "s0/d/0/txt", b"changed")

        def killed(*_: object) -> None:
            raise SystemExit(9)

        with monkeypatch.context() as patched:
            patched.setattr(Replacement, "_empty", killed)
            patched.setenv("XDG_RUNTIME_DIR", str(program.home / "run"))
            told(program.home, "commit", "--in-place", "-q", top, code=9)
        assert (top / "s0/d/0/txt").read_bytes() == b"changed"
        with fails(30):  # EROFS
            put(top / "s0/d/0/txt", b"lost")
        assert "finish it: repeat that commit" in program.run("status", top).stdout.decode()
        program.run("commit", "--in-place", top)
        assert (top / "s0/d/0/txt").read_bytes() == b"changed"
        put(top / "s0/d/0/txt", b"changed again")
        assert "changed  s0/d/0 ~txt" in program.run("diff", top).stdout.decode()


def test_an_overlay_whose_guard_was_killed_can_be_committed(program: Program, sources: list[Path]) -> None:
    """The mount goes on without its guard; nothing takes its overlay from it; then it is committed."""
    overlay = program.home / "edits"
    with mounted(program, *sources) as top:
        put(top / "s0/d/0/txt", b"before")
        guard = the_guard(program)
        kill(guard)
        put(top / "s0/d/1/txt", b"after")
        assert "it has no guard" in program.run("status", top).stdout.decode()
        assert "has no guard, which a refresh needs" in program.refused("refresh", top, code=5)
        assert "changed  s0/d/1 ~txt" in program.run("diff", top).stdout.decode()
        message = program.refused("commit", "--in-place", "--overlay", overlay, *sources, code=BUSY)
        assert f"the kernel serves it at {top}, without a guard; end that with: wdsfs umount {top}" in message
        with (top / "s0/d/2/txt").open("r+b") as writer:
            program.run("umount", "--lazy", top)
            message = program.refused("mount", "--overlay", overlay, *sources, program.mountpoint, code=BUSY)
            assert "it was unmounted, but programs still have its files open" in message
            writer.write(b"late")
        program.run("commit", "--in-place", "--overlay", overlay, *sources)
        program.run(*KERNEL, "--overlay", overlay, *sources, top)
        found = [(top / f"s0/d/{n}/txt").read_bytes()[:6] for n in range(3)]
        assert found == [b"before", b"after", b"late2t"]


# --- a guard that was killed, and shards that are other ones ------------------------------------------------


def replace(shard: Path, text: bytes) -> None:
    """Another file takes the name of a shard; it has `text` in place of `0txt`."""
    other = shard.with_name("new")
    other.write_bytes(shard.read_bytes().replace(b"0txt", text))
    other.rename(shard)


def test_a_mount_whose_guard_was_killed_is_guarded_again(program: Program, sources: list[Path]) -> None:
    """By the same command, under the hands of a writer; commits and writers of shards are as before."""
    with mounted(program, *sources) as top:
        first, before = the_guard(program), mount_table.mounted_at(top)
        put(top / "s0/d/0/txt", b"before")
        top.chmod(0o750)
        kill(first)
        assert "repeat its mount command" in program.run("status", top).stdout.decode()
        with (top / "s0/d/1/txt").open("r+b") as writer, (top / "s0/d/2/txt").open("rb") as reader:
            program.run(*KERNEL, "--overlay", "edits", *sources, top)
            writer.write(b"late")
            assert reader.read() == b"2txt" * 300
        guard = the_guard(program)
        assert (guard.pid != first.pid, guard.leased) == (True, 2)
        # Those that others than wdsfs have made at the same moment may be gone by now.
        assert set(guard.superblocks) <= set(first.superblocks)
        assert mount_table.mounted_at(top) == before
        assert oct(top.stat().st_mode & 0o777) == "0o750"
        message = program.refused("diff", "--overlay", "edits", *sources, code=BUSY)
        assert f"is in use by process {guard.pid}" in message
        program.run("commit", "--in-place", top)
        found = [(top / f"s0/d/{n}/txt").read_bytes()[:6] for n in range(3)]
        assert found == [b"before", b"late1t", b"2txt2t"]
        assert the_guard(program).pid == guard.pid


def test_a_guard_adopts_only_its_own_mount(program: Program, sources: list[Path]) -> None:
    """Another overlay, no overlay, another view; a mount of which nothing is known any more."""
    with mounted(program, *sources) as top:
        guard = the_guard(program)
        kill(guard)
        there = f"{top}: wdsfs is mounted there already"
        assert there in program.refused(*KERNEL, "--overlay", "other", *sources, top, code=5)
        assert there in program.refused(*KERNEL, *sources, top, code=5)
        again = (*KERNEL, "--overlay", "edits")
        assert "was made with --layout samples" in program.refused(
            *again, "--layout", "files", *sources, top, code=BUSY
        )
        assert "is an overlay of a set that has s1, too" in program.refused(*again, sources[0], top, code=BUSY)
        assert (top / "s0/d/0/txt").read_bytes() == b"0txt" * 300
        file = program.home / "guard"
        registration = mount_registry.file_of(str(top), ".json", Path("/run/wdsfs"))
        registration.rename(file)
        assert there in program.refused(*again, *sources, top, code=5)
        file.rename(registration)


@pytest.mark.parametrize("how", ["refresh", "mount"])
def test_shards_that_were_replaced(how: str, program: Program, sources: list[Path]) -> None:
    """Changes stay above the new shards. Nobody may be writing meanwhile; then nothing has happened."""
    with mounted(program, *sources) as top:
        put(top / "s0/d/1/txt", b"changed")
        replace(sources[0], b"next")
        if how == "mount":
            kill(the_guard(program))
        again = ["refresh"] if how == "refresh" else [*KERNEL, "--overlay", "edits", *map(str, sources)]
        with (top / "s0/d/2/txt").open("r+b") as writer:
            done = program.run(*again, top, code=BUSY).stderr.decode()
            assert "programs have files open that are written to" in done
            writer.write(b"late")
        assert (top / "s0/d/0/txt").read_bytes() == b"0txt" * 300
        put(top / "s0/d/3/txt", b"still to be written")
        with (top / "s0/d/0/txt").open("rb") as reader:
            assert "edits was made: s0; its changes" in program.run(*again, top).stderr.decode()
            assert reader.read() == b"0txt" * 300
        found = [(top / f"s0/d/{n}/txt").read_bytes()[:7] for n in range(4)]
        assert found == [b"nextnex", b"changed", b"late2tx", b"still t"]
        assert sum(one.path == os.fsencode(top) for one in mount_table.mounts()) == 1
        put(top / "s0/d/0/txt", b"changed, too")
        assert "changed  s0/d/0 ~txt" in program.run("diff", top).stdout.decode()
        program.run("commit", "--in-place", top)
        assert (top / "s0/d/0/txt").read_bytes() == b"changed, too"


def test_shards_that_come_and_go_below_an_overlay(program: Program) -> None:
    """One more is shown; without one that the overlay is of the mount stays as it is."""
    make_set(program)
    with mounted(program, program.home) as top:
        put(top / "s0/d/1/txt", b"changed")
        program.write("s2.tar", shard([("d/9.txt", b"9")]))
        assert [one["name"] for one in program.json("refresh", top)["added"]] == ["s2"]
        assert (top / "s2/d/9/txt").read_bytes() == b"9"
        assert (top / "s0/d/1/txt").read_bytes() == b"changed"
        (program.home / "s1.tar").unlink()
        message = program.refused("refresh", top, code=BUSY)
        assert "is an overlay of a set that has s1, too" in message
        assert (top / "s1/d/1/txt").read_bytes() == b"1txt" * 300
        put(top / "s0/d/2/txt", b"changed")


def test_a_shard_that_is_written_ends_both(program: Program) -> None:
    """The overlay and the image below it go, before the writer goes on; what was changed stays in the overlay."""
    need_erofs()
    sources, overlay = make_set(program), program.home / "edits"
    try:
        guard = mount(program, "--overlay", overlay, *sources)
        put(program.mountpoint / "s0/d/0/txt", b"changed")
        sources[1].write_bytes(sources[1].read_bytes())
        wait_for_the_end(program)
        wait_until(lambda: not guard.alive, "the guard to end")
    finally:
        end_mount(program.mountpoint)
    said = program.run("diff", "--overlay", overlay, *sources)
    assert "changed  s0/d/0 ~txt" in said.stdout.decode()
    assert "have changed since the overlay" in said.stderr.decode()


@contextmanager
def disk(image: Path, place: Path) -> Iterator[Path]:
    """An ext4 file system in a file, mounted."""
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "loop", image, place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_power_cut(program: Program) -> None:
    """A copy of the disk, made while the mount is in use, is what a power cut leaves of it."""
    need_erofs()
    sources, image, copy = make_set(program), program.home / "disk", program.home / "copy"
    with image.open("wb") as file:
        file.truncate(32 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    with disk(image, program.home / "before"), mounted(program, *sources, overlay="before/edits") as top:
        put(top / "s0/d/0/txt", b"synced")
        save(top / "s0/d/1/txt", b"synced, too")
        shutil.rmtree(top / "s0/d/2")
        (top / "s0/n").mkdir()
        put(top / "s0/n/cls", b"new")
        subprocess.run(["sync", "-f", top], check=True)
        put(top / "s0/d/3/txt", b"maybe")
        with (top / "s0/d/4/txt").open("r+b"):  # copied up, and open
            shutil.copyfile(image, copy)
    with disk(copy, program.home / "after") as after:
        overlay = after / "edits"
        changed = [
            line.rstrip()
            for line in program.run("diff", "--overlay", overlay, *sources).stdout.decode().splitlines()
            if "d/3" not in line and "d/4" not in line
        ]
        assert changed == [
            *("changed  s0/d/0 ~txt", "changed  s0/d/1 ~txt", "removed  s0/d/2", "added    s0/n"),
        ]
        program.run("commit", "--in-place", "--overlay", overlay, *sources)
        with mounted(program, *sources, overlay="after/edits") as top:
            assert (top / "s0/d/0/txt").read_bytes() == b"synced"
            assert not (top / "s0/d/2").exists()
            assert (top / "s0/d/3/txt").read_bytes() in (b"maybe", b"", b"3txt" * 300)  # `>` truncates first
            assert (top / "s0/d/4/txt").read_bytes() == b"4txt" * 300


def test_the_kernel_is_asked_who_uses_an_upper(tmp_path: Path) -> None:
    """Names that mean something to overlayfs are names; asking leaves nothing behind."""
    need_erofs()
    for name in ("plain", "a:b", "a,b", "back\\slash"):
        place = OverlayDirectory(tmp_path / name)
        for one in (place.upper, place.kernel_work, tmp_path / "lower", tmp_path / "m"):
            one.mkdir(parents=True, exist_ok=True)
        assert not overlay_directory.is_used(place.upper)
        assert not list(place.upper.iterdir())
        assert not os.listxattr(place.upper)
        mount_table.mount(
            b"overlay",
            [
                (b"lowerdir", os.fsencode(tmp_path / "lower")),
                (b"upperdir", overlay_directory.escaped(place.upper)),
                (b"workdir", overlay_directory.escaped(place.kernel_work)),
            ],
            [b"userxattr"],
            str(tmp_path / "m"),
            0,
        )
        try:
            assert overlay_directory.is_used(place.upper)
            found = overlay_directory.mounted_on(place.upper)
            assert found is not None
            assert found.path == os.fsencode(tmp_path / "m")
        finally:
            subprocess.run(["umount", tmp_path / "m"], check=True)


# `wdsfs commit`, with the guard and maybe the commit itself killed at one of its steps.
_KILLED = """
import os, signal, sys
from wdsfs.cli import main as cli
from wdsfs.kernel.guard import guard_of
from wdsfs.storage.durable import Disk

step, mountpoint, *names = sys.argv[1:4]
me, real = os.getpid(), {name: getattr(Disk, name) for name in ("rename", "remove")}

def stop(name):
    def method(disk, path, *to):
        is_here = os.getpid() == me and (name, os.path.basename((to or (path,))[-1])) == STEPS[step]
        if name == "rename":
            real[name](disk, path, *to)
        if is_here:
            guard = guard_of(mountpoint)
            os.kill(guard.pid, signal.SIGKILL)
            while guard.alive:
                pass
            if WHO == "both":
                os.kill(me, signal.SIGKILL)
        if name == "remove":
            real[name](disk, path)
    return method

STEPS = {
    "begun": ("rename", b"commit.json"),
    "one shard": ("rename", b"s0.tar"),
    "all shards": ("rename", b"committed"),
    "at the end": ("remove", b"commit.json"),
}
for name in real:
    setattr(Disk, name, stop(name))
cli.main(["commit", "--in-place", "--jobs", "1", mountpoint], prog_name="wdsfs")
"""


def commit_with_a_kill(program: Program, who: str, step: str) -> subprocess.CompletedProcess[bytes]:
    """Commit in place what is mounted, with the guard ("guard"), or the commit itself, too ("both"), killed."""
    command: list[str | Path] = [sys.executable, "-c", _KILLED.replace("WHO", repr(who)), step, program.mountpoint]
    return subprocess.run(
        command, env=program.environment, cwd=program.home, timeout=PATIENCE, capture_output=True, check=False
    )


def edit_some(top: Path) -> None:
    put(top / "s0/d/0/txt", b"changed")
    (top / "s0/d/1/cls").unlink()
    shutil.rmtree(top / "s1/d/2")


def check_committed(program: Program) -> None:
    """The mount shows the new shards, is guarded, and can be written and committed again."""
    top = program.mountpoint
    assert (top / "s0/d/0/txt").read_bytes() == b"changed"
    assert not (top / "s0/d/1/cls").exists()
    assert not (top / "s1/d/2").exists()
    assert (top / "s1/d/3/txt").read_bytes() == b"3txt" * 300
    assert the_guard(program).alive
    assert program.json("diff", top)["samples"] == []
    put(top / "s0/d/0/txt", b"changed again")
    assert b"1 rewritten" in program.run("commit", "--in-place", top).stdout
    assert (top / "s0/d/0/txt").read_bytes() == b"changed again"


@pytest.mark.parametrize("step", ["begun", "one shard", "all shards"])
def test_the_advice_after_guard_and_commit_were_killed_works(
    step: str, program: Program, sources: list[Path]
) -> None:
    """`diff` and the mount command name the command that finishes the commit, and has the mount guarded again."""
    with mounted(program, *sources) as top:
        edit_some(top)
        shown = walk_directory(os.fsencode(top))
        assert commit_with_a_kill(program, "both", step).returncode == -signal.SIGKILL
        assert walk_directory(os.fsencode(top)) == shown
        with fails(30):  # EROFS
            put(top / "s0/d/0/txt", b"lost")
        advice = f"wdsfs commit --in-place {top} (or give it up"
        assert f"finish it with: {advice}" in program.refused("diff", top, code=7)
        said = program.refused(*KERNEL, "--overlay", "edits", *sources, top, code=BUSY)
        assert f"finish it first: {advice}" in said
        program.run("commit", "--in-place", top)
        check_committed(program)


def test_edits_between_the_new_mount_and_the_end_of_its_commit_stay(program: Program, sources: list[Path]) -> None:
    with mounted(program, *sources) as top:
        edit_some(top)
        assert commit_with_a_kill(program, "both", "at the end").returncode == -signal.SIGKILL
        put(top / "s0/d/3/txt", b"later")
        (top / "s0/d/4/txt").unlink()
        program.run("commit", "--in-place", top)
        assert (top / "s0/d/3/txt").read_bytes() == b"later"
        assert not (top / "s0/d/4/txt").exists()
        program.run("commit", "--in-place", top)
        check_committed(program)


@pytest.mark.parametrize("step", ["begun", "all shards"])
def test_a_guard_that_is_killed_during_a_commit_is_replaced(
    step: str, program: Program, sources: list[Path]
) -> None:
    with mounted(program, *sources) as top:
        edit_some(top)
        before = the_guard(program)
        done = commit_with_a_kill(program, "guard", step)
        assert done.returncode == 0
        assert [line for line in done.stderr.splitlines() if not line.startswith(b"wdsfs: note: ")] == []
        assert not before.alive
        check_committed(program)


def test_the_image_is_made_before_the_overlay_is_emptied(
    program: Program, sources: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without room for it the mount stays as it was, and the commit is finished later."""
    with mounted(program, *sources) as top:
        edit_some(top)
        shown = walk_directory(os.fsencode(top))

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", "images")

        with monkeypatch.context() as patched:
            patched.setattr(image_module, "write_image", full)
            patched.setenv("XDG_RUNTIME_DIR", str(program.home / "run"))
            said = told(program.home, "commit", "--in-place", "-q", top, code=7)
        assert "the kernel cannot serve them: its image does not fit into the cache: the disk of" in said
        assert walk_directory(os.fsencode(top)) == shown
        assert "finish it with: wdsfs commit --in-place" in program.refused("diff", top, code=7)
        program.run("commit", "--in-place", top)
        check_committed(program)


def test_a_mount_that_cannot_be_exchanged_ends(
    program: Program, sources: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would show neither the old set nor the new one; the exit code says so."""
    need_erofs()
    try:
        program.run(*KERNEL, "--overlay", "edits", *sources, program.mountpoint)
        edit_some(program.mountpoint)
        guard = the_guard(program)
        with monkeypatch.context() as patched:
            patched.setattr(remount, "exchange", lambda *_: "a program writes it")
            patched.setenv("XDG_RUNTIME_DIR", str(program.home / "run"))
            said = told(program.home, "commit", "--in-place", program.mountpoint, code=5)
        assert "shards: 2 rewritten" in said
        assert "could not be mounted: a program writes it. The mount has ended; mount it again" in said
        assert not program.mountpoint.is_mount()
        wait_until(lambda: not guard.alive, "the guard to end")
        program.run(*KERNEL, "--overlay", "edits", *sources, program.mountpoint)
        check_committed(program)
    finally:
        end_mount(program.mountpoint)
