"""The writable tree: what is seen, and what stays after a stop at any system call, an error, or a power cut."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import sets, tars
from tests.overlay.test_model import Refusing, WithoutDevices
from tests.packing.overlays import Set
from tests.thorough import THOROUGH
from tests.writables import MTIME, Members, Mount, a_set, check_whiteouts, fast_directory, shard
from wdsfs import shards
from wdsfs.errors import EntryError, NoSuchEntry, Unsupported
from wdsfs.inodes import ROOT, UP
from wdsfs.overlay.overlay_shards import check_set
from wdsfs.overlay.upper_files import EXCHANGE, NOREPLACE, SystemCalls
from wdsfs.overlay.writable_tree import JOURNAL_BYTES, Key, RequestJournal
from wdsfs.tree.indexing import indexed
from wdsfs.tree.tree import LowerTree, View

CALLS = [name for name in vars(SystemCalls) if not name.startswith("_")]


# --- what is seen


def test_a_copy_keeps_number_time_and_mode(mount: Mount) -> None:
    before = mount.look(b"s0/a/x")
    mount.setxattr(b"s0/a/x", b"user.note", b"1")
    after = mount.look(b"s0/a/x")
    assert after[:5] == before[:5]
    assert (before.mode, before.mtime_ns) == (stat.S_IFREG | 0o644, MTIME * 10**9)
    mount.replace_worker()
    assert mount.look(b"s0/a/x")[:5] == before[:5]
    mount.remount()
    assert mount.look(b"s0/a/x")[:5] == before[:5]


def test_a_file_that_is_cut_or_grown_before_its_first_write_has_a_new_time(mount: Mount) -> None:
    """As truncate(2) of another file system: the kernel passes no time along."""
    for path, change, is_written in ((b"s0/a/x", -1, True), (b"s0/a/y", 1, True), (b"s0/d/b/x", 0, False)):
        before = mount.look(path)
        mount.change(path, size=before.size + change)
        assert (mount.look(path).mtime_ns > before.mtime_ns) == is_written


def test_a_changed_directory_has_one_link(mount: Mount) -> None:
    """Its subdirectories are not counted: programs take 1 for "not known"."""
    before = {path: mount.look(path).links for path in (b"s0", b"s1")}
    assert min(before.values()) > 2
    mount.mkdir(b"s0/new")
    assert {path: mount.look(path).links for path in before} == {b"s0": 1, b"s1": before[b"s1"]}


def test_a_directory_above_a_copy_keeps_its_time(mount: Mount) -> None:
    before = {path: mount.look(path).mtime_ns for path in (b"s0", b"s0/a")}
    mount.write(b"s0/a/x", b"!")
    mount.change(b"s0/a/y", mode=0o600)
    assert {path: mount.look(path).mtime_ns for path in before} == before
    mount.create(b"s0/a/new")
    assert mount.look(b"s0/a").mtime_ns != before[b"s0/a"]


def test_a_removed_file_of_a_shard_can_still_be_read_and_written(mount: Mount) -> None:
    inode = mount.look(b"s0/a/x").inode
    mount.unlink(b"s0/a/x")
    assert (mount.tree.getattr(inode).links, mount.tree.read(inode, 0, 9)) == (0, b"ax")
    mount.tree.write(inode, 1, b"!")
    assert mount.tree.read(inode, 0, 9) == b"a!"
    mount.replace_worker()
    assert (mount.tree.getattr(inode).links, mount.tree.read(inode, 0, 9)) == (0, b"a!")
    assert b"x" not in mount.names(b"s0/a")
    mount.remount()
    with pytest.raises(FileNotFoundError):
        mount.look(b"s0/a/x")


def test_the_number_of_what_was_removed_is_not_used_again(mount: Mount) -> None:
    """It is an orphan until the kernel has forgotten it."""
    mount.mkdir(b"s0/one")
    first, orphans = mount.look(b"s0/one").inode, mount.home / "work/orphans"
    mount.rmdir(b"s0/one")
    mount.mkdir(b"s0/two")
    assert mount.look(b"s0/two").inode != first
    assert mount.tree.getattr(first).links == 0
    assert [entry.name for entry in mount.tree.listing(first)] == [b".", b".."]
    file = mount.create(b"s0/new")
    mount.unlink(b"s0/new")
    assert len(os.listdir(orphans)) == 2
    for inode in (first, file):
        mount.forget(inode)
        with pytest.raises(NoSuchEntry):
            mount.tree.getattr(inode)
    assert os.listdir(orphans) == []


def test_a_shard_or_a_folder_of_keys_cannot_be_renamed(mount: Mount) -> None:
    for path in (b"s0", b"s0/d", b"s0/a"):  # the last is a sample and a folder
        with pytest.raises(OSError, check=lambda error: error.errno == errno.EXDEV):
            mount.rename(path, b"elsewhere")


def test_a_renamed_sample_keeps_its_numbers(mount: Mount) -> None:
    """And its names: found by the model, those that were listed before were left out of its new names for ever."""
    before = mount.look(b"s0/d/b").inode, mount.look(b"s0/d/b/x").inode
    mount.change(b"s0/d/b", mtime_ns=1)
    assert mount.names(b"s0/d/b") == [b"x"]
    mount.rename(b"s0/d/b", b"s1/other")
    assert mount.names(b"s1/other") == [b"x"]
    assert (mount.look(b"s1/other").inode, mount.look(b"s1/other/x").inode) == before
    mount.remount()
    assert (mount.look(b"s1/other").inode, mount.look(b"s1/other/x").inode) == before
    mount.mkdir(b"s0/d/b")
    assert mount.names(b"s0/d/b") == []
    assert mount.look(b"s0/d/b").inode & UP


def test_attributes_of_the_format_are_neither_seen_nor_set(mount: Mount) -> None:
    mount.setxattr(b"s0/a/x", b"user.note", b"1")
    assert mount.tree.xattrs(mount.look(b"s0/a/x").inode) == [b"user.note"]
    inode = mount.look(b"s0/a/x").inode
    for name in (b"user.overlay.opaque", b"user.wdsfs.origin", b"trusted.overlay.opaque", b"security.capability"):
        with pytest.raises(Unsupported):
            mount.tree.setxattr(inode, name, b"y")
        with pytest.raises(Unsupported):
            mount.tree.removexattr(inode, name)
        with pytest.raises(EntryError):
            mount.tree.getxattr(inode, name)
    # What shows through a directory still says where it comes from.
    assert mount.tree.getxattr(mount.look(b"s0/a").inode, b"user.wdsfs.shard").endswith(b"s0.tar")


def test_a_whiteout_cannot_be_made_by_a_user(mount: Mount) -> None:
    with pytest.raises(EntryError, match="0:0"):
        mount.tree.mknod(ROOT, b"w", stat.S_IFCHR, 0)


def test_new_names_of_a_listing_keep_their_order(mount: Mount) -> None:
    for number in range(40):
        mount.create(b"s0/n%d" % number)
    inode = mount.look(b"s0").inode
    seen = []
    for step, entry in enumerate(mount.tree.listing(inode)):
        seen.append((entry.name, entry.cursor))
        if step == 20:
            break
    mount.unlink(b"s0/" + seen[10][0])
    mount.create(b"s0/later")
    mount.replace_worker()
    rest = [entry.name for entry in mount.tree.listing(inode, seen[-1][1])]
    names = [name for name, _ in seen] + rest
    assert len(names) == len(set(names))
    assert {b"n%d" % number for number in range(40)} <= set(names)


def test_unusual_names(mount: Mount) -> None:
    for name in (b"\xff\xfe", b"n" * 255, b" ", b"a\nb", b"#1-1", b"whiteout", "ä".encode() * 127):
        mount.put(b"s0/a/" + name, name)
        assert mount.read(b"s0/a/" + name) == name
        mount.rename(b"s0/a/" + name, b"s1/" + name)
        mount.remount()
        assert mount.read(b"s1/" + name) == name
    for name, number in ((b"n" * 256, errno.ENAMETOOLONG), (b"..", errno.EINVAL), (b"", errno.EINVAL)):
        with pytest.raises(EntryError, check=lambda error, number=number: error.errno == number):
            mount.tree.create(ROOT, name, 0o644)


def test_deeper_than_a_path_can_be_long(mount: Mount) -> None:
    inode = mount.look(b"s0/a").inode
    for _ in range(60):
        inode = mount.tree.mkdir(inode, b"d" * 200, 0o755).inode
    file = mount.tree.create(inode, b"f", 0o644).inode
    mount.tree.write(file, 0, b"deep")
    mount.replace_worker()
    assert mount.tree.read(file, 0, 9) == b"deep"
    assert [entry.name for entry in mount.tree.listing(inode)][2:] == [b"f"]
    mount.tree.fsync(file)
    mount.tree.rename(inode, b"f", ROOT, b"up")
    assert mount.read(b"up") == b"deep"
    mount.remount()
    assert mount.read(b"up") == b"deep"


def replace_shard(tree: LowerTree, members: Members) -> None:
    """Put another file into the place of the first shard."""
    path = Path(os.fsdecode(tree.lower.shards[0].path))
    path.with_suffix(".new").write_bytes(shard(members))
    path.with_suffix(".new").rename(path)
    tree.lower.distrust()


def test_a_shard_that_changes_under_the_overlay() -> None:
    """Changes stay where they were made; a copy's number is not that of another content."""
    with a_set([[("a.x", b"ax"), ("b.x", b"bx")], [("c.x", b"cx")]]) as tree, fast_directory() as home:
        mount = Mount(tree, home)
        mount.write(b"s0/a/x", b"!")
        mount.unlink(b"s1/c/x")
        held = mount.look(b"s0/a/x").inode
        replace_shard(tree, [("a.x", b"AX"), ("a.y", b"AY"), ("z.x", b"zx")])
        tree.lower._freshness.states.clear()
        tree.lower.index.refresh(tree.lower.shards)
        tree.lower.was_indexed_elsewhere(0)
        mount.replace_worker()
        assert mount.read(b"s0/a/x") == b"!x"
        assert mount.names(b"s0") == [b"a", b"z"]
        assert sorted(mount.names(b"s0/a")) == [b"x", b"y"]
        assert mount.look(b"s0/a/x").inode != held
        assert mount.names(b"s1/c") == []
        mount.close()


@pytest.mark.parametrize("way", ["walk", "listing"])
def test_the_way_to_a_changed_directory_meets_the_shard_that_was_replaced(way: str) -> None:
    """The kernel repeats a walk that gives ESTALE, and no listing: so what comes before has to notice."""
    with a_set([[("a.x", b"ax"), ("b.x", b"bx")]]) as tree, fast_directory() as home:
        mount = Mount(tree, home)
        mount.write(b"s0/a/x", b"!")
        assert mount.names(b"s0") == [b"a", b"b"]
        replace_shard(tree, [("a.x", b"AX"), ("z.x", b"zx")])
        if way == "listing":
            [_, _, top] = indexed(lambda: list(mount.tree.listing(ROOT)))
            names = [entry.name for entry in indexed(lambda: list(mount.tree.listing(top.node.inode)))]
            assert names == [b".", b"..", b"a", b"z"]
        assert indexed(mount.names, b"s0") == [b"a", b"z"]
        mount.close()


# --- stopped at every call


class Stopped(BaseException):
    """Raised in place of the next system call of a killed process: no handler runs after a SIGKILL."""


class Seam(SystemCalls):
    """Counts the calls; from the `at`th on, none is done, and `stop` is raised instead: once, or from then on."""

    def __init__(
        self, base: type[SystemCalls] = SystemCalls, at: int = 1 << 60, stop: Callable[[], BaseException] = Stopped
    ) -> None:
        self.base, self.at, self.stop, self.count, self.armed = base(), at, stop, 0, False
        self.once = False

    def __getattribute__(self, name: str) -> Any:
        if name not in CALLS:
            return object.__getattribute__(self, name)
        return lambda *arguments: self._do(name, arguments)

    def _do(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if self.armed:
            self.count += 1
            if self.count == self.at or (self.count > self.at and not self.once):
                raise self.stop()
        return getattr(self.base, name)(*arguments)


def keep(mount: Mount) -> None:
    """Something of every kind for the operations below to meet."""
    mount.mkdir(b"own")
    mount.mkdir(b"own/empty")
    mount.put(b"own/file", b"file")
    mount.put(b"own/other", b"other")
    mount.mkdir(b"own/full")
    mount.put(b"own/full/f", b"f")
    mount.mkdir(b"own/gone")
    mount.put(b"own/gone/f", b"f")
    mount.unlink(b"own/gone/f")
    for path in sorted(mount.walk()):
        if path.endswith((b"d/b/x", b"d/b.x")):
            mount.unlink(path)  # a whiteout, and in most sets an empty directory over it
        if path == b"s1/d/c/x":
            mount.write(path, b"!")


Walk = dict[bytes, Any]
Operation = Callable[[Mount], None]


def operations(x: bytes) -> dict[str, Operation]:
    """Changes by name, over a set that has a file x in a directory a, at this path."""
    home = x.rpartition(b"/")[0]
    gone = {b"s0/a/x": b"s0/d/b", b"a/x": b"d/b", b"s0/a.x": b"s0/d"}[x]
    whiteout = gone + (b"/x" if x.endswith(b"a/x") else b"/b.x")
    return {
        "create": lambda m: m.create(home + b"/new") and None,
        "create over whiteout": lambda m: m.create(whiteout) and None,
        "write": lambda m: m.write(x, b"!"),
        "truncate": lambda m: m.change(x, size=1),
        "empty": lambda m: m.change(x, size=0),
        "grow": lambda m: m.change(x, size=9),
        "chmod": lambda m: m.change(x, mode=0o600),
        "mkdir": lambda m: m.mkdir(home + b"/new"),
        "mkdir over whiteout": lambda m: m.mkdir(whiteout),
        "mkfifo": lambda m: m.mkfifo(home + b"/new"),
        "symlink": lambda m: m.symlink(b"to", home + b"/new"),
        "symlink over whiteout": lambda m: m.symlink(b"to", whiteout),
        "link": lambda m: m.link(x, home + b"/new"),
        "link over whiteout": lambda m: m.link(b"own/file", whiteout),
        "unlink lower": lambda m: m.unlink(x),
        "unlink own": lambda m: m.unlink(b"own/file"),
        "rmdir own": lambda m: m.rmdir(b"own/empty"),
        "rmdir with whiteout": lambda m: m.rmdir(b"own/gone"),
        "rename lower": lambda m: m.rename(x, b"own/new"),
        "rename lower over own": lambda m: m.rename(x, b"own/file"),
        "rename own": lambda m: m.rename(b"own/file", b"own/new"),
        "rename own over own": lambda m: m.rename(b"own/file", b"own/other"),
        "rename own over lower": lambda m: m.rename(b"own/file", x),
        "rename own over whiteout": lambda m: m.rename(b"own/file", whiteout),
        "rename lower over whiteout": lambda m: m.rename(x, whiteout),
        "rename directory": lambda m: m.rename(b"own/full", home + b"/new"),
        "rename directory over empty": lambda m: m.rename(b"own/full", b"own/empty"),
        "rename directory over whiteouts": lambda m: m.rename(b"own/full", b"own/gone"),
        "rename directory over whiteout": lambda m: m.rename(b"own/full", whiteout),
        "rename noreplace": lambda m: m.rename(x, home + b"/new", NOREPLACE),
        "exchange": lambda m: m.rename(x, b"own/file", EXCHANGE),
        "exchange directories": lambda m: m.rename(b"own/full", b"own/empty", EXCHANGE),
        "exchange kinds": lambda m: m.rename(x, b"own/full", EXCHANGE),
        "setxattr": lambda m: m.setxattr(x, b"user.a", b"1"),
        "setxattr new": lambda m: m.setxattr(x, b"user.a", b"1", os.XATTR_CREATE),
    }


ONLY_SAMPLES: dict[str, Operation] = {
    "rename sample": lambda m: m.rename(b"s1/b", b"own/new"),
    "rename changed sample": lambda m: m.rename(b"s1/d/c", b"own/new"),
    "rename emptied sample": lambda m: m.rename(b"s0/d/b", b"own/new"),
    "rename sample over empty": lambda m: m.rename(b"s1/b", b"own/empty"),
    "rename over emptied sample": lambda m: m.rename(b"own/full", b"s0/d/b"),
    "exchange samples": lambda m: m.rename(b"s1/b", b"s1/d/c", EXCHANGE),
    "rmdir sample": lambda m: m.rmdir(b"s0/d/b"),
}
NAMES = list(operations(b"s0/a/x"))


def do_at_every_call(
    tree: LowerTree,
    name: str,
    check: Callable[[Mount, Walk, Walk, Operation], None],
    base: type[SystemCalls] = SystemCalls,
    stop: Callable[[], BaseException] = Stopped,
    once: bool = False,
) -> None:
    """Do an operation with its first, second ... call stopped, and `check` each time."""
    at, last = 1, False
    before: Walk = {}
    after: Walk = {}
    while not last:
        with fast_directory() as home:
            mount = Mount(tree, home, base())
            keep(mount)
            x = next(path for path in sorted(mount.walk()) if path.endswith((b"a/x", b"a.x")))
            operation = operations(x).get(name) or ONLY_SAMPLES[name]
            mount.remount()
            if not before:
                before = mount.walk()
                operation(mount)
                after = mount.walk()
                mount.close()
                continue
            seam = Seam(base, at, stop)
            mount.upper.close()
            mount.start(seam)
            mount.tree.journal.requester = 7
            mount.walk()
            seam.armed, seam.once = True, once
            try:
                operation(mount)
                last = seam.count < at
            except (Stopped, OSError):
                pass
            seam.armed = False
            if not last:
                check(mount, before, after, operation)
            mount.close()
            at += 1
    assert at > 1


@pytest.mark.parametrize("tree", ["samples", "files", "merged"], indirect=True)
@pytest.mark.parametrize("name", NAMES)
def test_stopped_at_any_call_it_is_done_or_not(tree: LowerTree, name: str) -> None:
    do_at_every_call(tree, name, look_and_repeat)


@pytest.mark.parametrize("name", ONLY_SAMPLES)
def test_a_sample_stopped_at_any_call_is_changed_or_not(samples: LowerTree, name: str) -> None:
    do_at_every_call(samples, name, look_and_repeat)


def look_and_repeat(mount: Mount, before: Walk, after: Walk, operation: Operation) -> None:
    mount.replace_worker()
    assert mount.walk() in (before, after)
    mount.tree.journal.requester = 7
    mount.resend()
    assert mount.walk() == after
    mount.remount()
    assert mount.walk() == after
    check_whiteouts(mount.below, mount.home / "upper")


@pytest.mark.parametrize("base", [Refusing, WithoutDevices])
@pytest.mark.parametrize("name", [name for name in NAMES if "rename" in name or "over" in name])
def test_on_poorer_file_systems_nothing_is_lost(samples: LowerTree, name: str, base: type[SystemCalls]) -> None:
    """If a rename takes two calls, source and target are the same file between them, and a repeat completes it."""

    def check(mount: Mount, before: Walk, after: Walk, operation: Operation) -> None:
        mount.replace_worker(base())
        contents = {about[-2] for about in mount.walk().values() if about[0] == "file"}
        expected = {about[-2] for about in after.values() if about[0] == "file"}
        assert expected - {b""} <= contents
        mount.tree.journal.requester = 7
        mount.resend()
        assert mount.walk() == after

    do_at_every_call(samples, name, check, base)


# --- errors at every call


ERRORS = [errno.ENOSPC, errno.EROFS, errno.EIO]


@pytest.mark.parametrize(
    ("name", "number"),
    # One error each: few places tell them apart. All pairs are for thorough runs.
    list(itertools.product(NAMES, ERRORS) if THOROUGH > 1 else zip(NAMES, itertools.cycle(ERRORS), strict=False)),
)
def test_an_error_at_any_call_leaves_a_whole_tree(samples: LowerTree, name: str, number: int) -> None:
    """The request fails or not; what is seen is as before or after, now and after a restart; a repeat works."""

    def check(mount: Mount, before: Walk, after: Walk, operation: Operation) -> None:
        now = mount.walk()
        assert now in (before, after), now
        mount.tree.journal.clear()
        mount.replace_worker()
        assert mount.walk() == now
        if now == before:
            operation(mount)
            assert mount.walk() == after

    do_at_every_call(samples, name, check, SystemCalls, lambda: OSError(number, os.strerror(number)), once=True)


# --- power cuts


class Disk(SystemCalls):
    """Knows what is on disk: a file's bytes and a directory's names as they were at their last fsync.

    That is worse than any file system in use: those keep the names of one moment.
    """

    def __init__(self) -> None:
        self.files: dict[int, bytes] = {}
        self.directories: dict[int, list[tuple[str, os.stat_result, dict[str, bytes], str]]] = {}

    def fsync(self, fd: int) -> None:
        status = os.fstat(fd)
        path = f"/proc/self/fd/{fd}"
        if stat.S_ISDIR(status.st_mode):
            with os.scandir(path) as entries:
                self.directories[status.st_ino] = [_about(entry) for entry in entries]
        else:
            self.files[status.st_ino] = os.pread(fd, status.st_size, 0)

    fdatasync = fsync

    def cut(self, top: Path, new: Path) -> None:
        """Make the directory `new` as `top` is after a power cut."""
        new.mkdir()
        made: dict[int, Path] = {}
        waiting = [(os.stat(top).st_ino, new)]
        while waiting:
            number, where = waiting.pop()
            for name, status, attributes, target in self.directories.get(number, []):
                path, form = where / name, stat.S_IFMT(status.st_mode)
                if form == stat.S_IFLNK:
                    path.symlink_to(target)
                elif form == stat.S_IFDIR:
                    path.mkdir()
                    waiting.append((status.st_ino, path))
                elif form != stat.S_IFREG:
                    os.mknod(path, status.st_mode, status.st_rdev)
                elif status.st_ino in made:
                    os.link(made[status.st_ino], path)
                else:
                    made[status.st_ino] = path
                    path.write_bytes(self.files.get(status.st_ino, b""))
                for key, value in attributes.items():
                    os.setxattr(path, key, value, follow_symlinks=False)


def _about(entry: os.DirEntry[str]) -> tuple[str, os.stat_result, dict[str, bytes], str]:
    keys = os.listxattr(entry.path, follow_symlinks=False)
    attributes = {key: os.getxattr(entry.path, key, follow_symlinks=False) for key in keys}
    target = os.readlink(entry.path) if entry.is_symlink() else ""
    return entry.name, entry.stat(follow_symlinks=False), attributes, target


class Cutting:
    """Does what users do, by chance, and pulls the plug after each step."""

    def __init__(self, tree: LowerTree, home: Path, seed: int) -> None:
        self.tree, self.home, self.chance = tree, home, random.Random(seed)
        self.disk = Disk()
        self.mount = Mount(tree, home / "overlay", self.disk)
        self.lower = [path for path, about in self.mount.walk().items() if about[0] == "file"]
        self.versions: dict[bytes, set[bytes]] = {path: {self.mount.read(path)} for path in self.lower}
        self.taken: set[bytes] = set()  # names of the shards that have been removed or moved at some time
        self.saved: set[bytes] = set()
        self.promised: dict[bytes, bytes] = {}
        self.cuts = 0

    def run(self) -> None:
        steps = [self.write, self.save, self.truncate, self.unlink, self.create, self.fsync, self.fsync, self.move]
        for _ in range(12):
            self.chance.choice(steps)()
            for path in self.versions:
                with contextlib.suppress(OSError):
                    self.versions[path].add(self.mount.read(path))
            self.pull_the_plug()
        self.mount.close()

    def pull_the_plug(self) -> None:
        after = self.home / f"after{self.cuts}"
        self.cuts += 1
        after.mkdir()
        self.disk.cut(self.home / "overlay/upper", after / "upper")
        mount = Mount(self.tree, after)
        for path in self.lower:
            try:
                assert mount.read(path) in self.versions[path], path
            except FileNotFoundError:
                assert path in self.taken
        for path, content in self.promised.items():
            assert mount.read(path) == content, path
        mount.close()

    def one(self) -> bytes:
        return self.chance.choice([path for path, about in self.mount.walk().items() if about[0] == "file"])

    def write(self) -> None:
        path = self.one()
        self.promised.pop(path, None)
        self.mount.write(path, self.chance.randbytes(3), self.chance.randrange(4))

    def save(self) -> None:
        """As editors do, without fsync."""
        path = self.one()
        if path in self.saved or path not in self.lower or path in self.taken:
            return
        self.saved.add(path)
        self.promised.pop(path, None)
        self.mount.put(b"s0/save", b"saved" + path)
        self.mount.rename(b"s0/save", path)

    def truncate(self) -> None:
        path = self.one()
        self.promised.pop(path, None)
        self.mount.change(path, size=self.chance.randrange(3))

    def unlink(self) -> None:
        path = self.one()
        self.promised.pop(path, None)
        self.taken.add(path)
        self.mount.unlink(path)

    def create(self) -> None:
        path = self.chance.choice(self.lower)
        name = path if path in self.taken else path + b"%d" % self.cuts
        with contextlib.suppress(FileExistsError):
            self.mount.create(name)
            self.versions.setdefault(name, set()).add(b"")
            self.mount.write(name, b"created")

    def move(self) -> None:
        path, new = self.one(), b"s1/moved%d" % self.cuts
        self.promised.pop(path, None)
        self.taken.add(path)
        self.mount.rename(path, new)

    def fsync(self) -> None:
        path = self.one()
        self.mount.fsync(path)
        self.promised[path] = self.mount.read(path)


@pytest.mark.parametrize("seed", range(40 * THOROUGH))
def test_a_power_cut_takes_nothing_that_was_synced_nor_the_bytes_of_a_shard(samples: LowerTree, seed: int) -> None:
    with fast_directory() as home:
        Cutting(samples, home, seed).run()


def test_shards_that_an_older_version_knew_by_inode_numbers_have_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = Set(tmp_path, tars.tar(tars.member(b"a.txt")))
    monkeypatch.setattr(shards, "lasting_number", lambda status: 0)
    check_set(here.place, [sets.at(path) for path in here.shards], View())
    assert "changed" not in caplog.text
    os.utime(here.shards[0])
    check_set(here.place, [sets.at(path) for path in here.shards], View())
    assert "changed" in caplog.text


# --- the journal: what a worker that takes over knows of the request that was under way

KEY = (1, b"name")


def journal(memory: bytearray, requester: int = 7, resent: bool = True) -> RequestJournal:
    """That of a new worker, which gets a request."""
    journal = RequestJournal(memory)
    journal.requester, journal.resent = requester, resent
    if not resent:
        journal.drop_previous()
    return journal


def begun() -> bytearray:
    """Return the journal of a worker that was killed at a mkdir of thread 7."""
    memory = bytearray(JOURNAL_BYTES)
    journal(memory, resent=False).begin("mkdir", KEY, (5,))
    return memory


def test_only_the_same_request_is_recognised_and_once() -> None:
    one = journal(begun())
    assert [one.repeats("mkdir", KEY), one.repeats("mkdir", KEY)] == [(5,), None]
    assert journal(begun()).repeats("rmdir", KEY) is None
    assert journal(begun()).repeats("mkdir", (2, b"name")) is None
    assert journal(begun(), requester=8).repeats("mkdir", KEY) is None
    assert journal(begun(), resent=False).repeats("mkdir", KEY) is None


@pytest.mark.parametrize(
    ("step", "about"),
    [
        (lambda memory: (one := journal(memory), one.repeats("mkdir", KEY), one.clear()), None),  # it is answered
        (lambda memory: journal(memory).clear(), (5,)),  # a worker is killed before its first request
        # Nothing was in flight: else a later mkdir of this thread, killed twice, would be taken for the first.
        (lambda memory: journal(memory, resent=False), None),
        (lambda memory: journal(memory, resent=False).begin("mkdir", (1, b"x" * JOURNAL_BYTES)), None),  # no room
    ],
)
def test_a_note_stays_until_its_request_cannot_come_again(
    step: Callable[[bytearray], object], about: Key | None
) -> None:
    memory = begun()
    step(memory)
    assert journal(memory).repeats("mkdir", KEY) == about
