"""The writable tree against a plain directory: the same is done to both, and they look the same after each step.

A small alphabet, so that names meet often. A worker's death and a remount are steps like any other. What was found
this way is kept below as tests with names.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.writables import (
    EXT,
    FILES,
    FULL,
    Members,
    Mount,
    a_set,
    check_whiteouts,
    copy_out,
    fast_directory,
    walk_directory,
)
from wdsfs.overlay.upper_files import EXCHANGE, NOREPLACE, WITH_WHITEOUT, SystemCalls
from wdsfs.tree.tree import LowerTree, View

SAMPLES: list[Members] = [
    [("a.x", b"ax"), ("a.y", b"ay" * 3), ("d/b.x", b"dbx"), ("d/a.y", b"day"), ("a/b.x", b"abx")],
    [("b.y", b"by"), ("d/c.x", b"dcx")],
]
TAR: list[Members] = [
    [
        *(("a.x", b"ax"), ("d", None), ("d/b.x", b"dbx"), ("b", "== a.x"), ("d/a", "== a.x"), ("c", "-> a.x")),
        ("e", None),
    ]
]
SETS: dict[str, tuple[list[Members], View, bool]] = {
    "samples": (SAMPLES, EXT, False),
    "full-names": (SAMPLES, FULL, False),
    "files": (TAR, FILES, False),
    "merged": (SAMPLES, EXT, True),
    "merged-files": ([*SAMPLES, *TAR], FILES, True),
}

names = st.sampled_from([b"a", b"b", b"x", b"s0", b"d", b"a.x"])
some = st.integers(0, 1 << 20)  # picks one of what there is


def _errno_of(call: Callable[[], Any]) -> int:
    try:
        call()
    except OSError as error:
        return error.errno or -1
    return 0


# POSIX allows either; or which of two reasons comes first is nobody's business.
EQUAL = [{errno.ENOTEMPTY, other} for other in (errno.EEXIST, errno.EINVAL, errno.EISDIR)]


def _difference(ours: dict[bytes, Any], theirs: dict[bytes, Any]) -> str:
    odd = sorted(path for path in {*ours, *theirs} if ours.get(path) != theirs.get(path))
    return "\n".join(f"{path!r}: {ours.get(path)}, not {theirs.get(path)}" for path in odd)


class Refusing(SystemCalls):
    """A file system that cannot leave a whiteout at the old name of a rename."""

    def rename(self, name: bytes, directory: int, new: bytes, new_directory: int, flags: int = 0) -> None:
        if flags & WITH_WHITEOUT:
            raise OSError(errno.EINVAL, "no such rename")
        super().rename(name, directory, new, new_directory, flags)


class WithoutDevices(Refusing):
    """A file system on which no device can be made: whiteouts are files with an attribute."""

    def mknod(self, name: bytes, mode: int, device: int, directory: int) -> None:
        if device == 0 and mode & 0o170000 == 0o020000:
            raise PermissionError(errno.EPERM, "no devices here")
        super().mknod(name, mode, device, directory)


class Model(RuleBasedStateMachine):
    """Both sides. `plain` is the directory, `mount` the writable tree; `open` are files that are held open."""

    tree: LowerTree
    calls: type[SystemCalls] = SystemCalls

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.home = self.stack.enter_context(fast_directory())
        self.plain = os.fsencode(self.home / "plain")
        os.mkdir(self.plain)
        self.mount = Mount(self.tree, self.home / "overlay", self.calls())
        self.open: list[tuple[int, int]] = []
        copy_out(self.mount, self.plain)

    def teardown(self) -> None:
        for _, fd in self.open:
            os.close(fd)
        self.mount.close()
        self.stack.close()

    # --- doing the same to both

    def both(self, ours: Callable[[], Any], theirs: Callable[[], Any]) -> bool:
        """True if both have done it; else both have failed in the same way."""
        number = _errno_of(ours)
        if number == errno.EXDEV:
            return False
        expected = _errno_of(theirs)
        assert {number, expected} in ({expected}, *EQUAL), (number, expected)
        return not number

    def directories(self) -> list[bytes]:
        return [b"", *sorted(path for path, about in self.seen.items() if about[0] == "directory")]

    def directory(self, which: int) -> bytes:
        directories = self.directories()
        return directories[which % len(directories)]

    def path(self, which: int, name: bytes) -> bytes:
        """A name in some directory; there may be such a thing or not."""
        directory = self.directory(which)
        return directory + b"/" + name if directory else name

    def thing(self, which: int) -> bytes:
        paths = sorted(self.seen)
        return paths[which % len(paths)] if paths else b"nothing"

    def there(self, path: bytes) -> bytes:
        return os.path.join(self.plain, path)

    @initialize()
    def look(self) -> None:
        self.compare()

    @invariant()
    def compare(self) -> None:
        theirs = walk_directory(self.plain)
        ours = self.mount.walk()
        assert ours == theirs, _difference(ours, theirs)
        for path, (kind, *_) in theirs.items():
            if kind == "directory":
                assert sorted(self.mount.names(path)) == sorted(os.listdir(self.there(path)))
        self.seen = theirs
        for inode, fd in self.open:
            size = os.fstat(fd).st_size
            assert self.mount.read_inode(inode) == os.pread(fd, size, 0)
            node = self.mount.tree.getattr(inode)
            assert (node.links, node.size) == (os.fstat(fd).st_nlink, size)

    # --- steps

    @rule(which=some, name=names)
    def create(self, which: int, name: bytes) -> None:
        self.make_there("create", self.path(which, name))

    @rule(kind=st.sampled_from(["create", "mkdir", "mkdir", "symlink", "mkfifo"]), which=some, name=names)
    def make(self, kind: str, which: int, name: bytes) -> None:
        self.make_there(kind, self.path(which, name))

    def make_there(self, kind: str, path: bytes) -> None:
        there = self.there(path)
        ours, theirs = {
            "create": (lambda: self.mount.create(path), lambda: os.mknod(there, 0o644)),
            "mkdir": (lambda: self.mount.mkdir(path), lambda: os.mkdir(there, 0o755)),
            "symlink": (lambda: self.mount.symlink(b"to", path), lambda: os.symlink(b"to", there)),
            "mkfifo": (lambda: self.mount.mkfifo(path), lambda: os.mkfifo(there)),
        }[kind]
        self.both(ours, theirs)

    @rule(which=some, name=st.sampled_from(["unlink", "rmdir"]))
    def remove(self, which: int, name: str) -> None:
        path = self.thing(which)
        self.both(lambda: getattr(self.mount, name)(path), lambda: getattr(os, name)(self.there(path)))

    @rule(which=some)
    def remove_all(self, which: int) -> None:
        """Do what `rm -r` does."""
        top = self.thing(which)
        below = sorted((path for path in self.seen if path.startswith(top + b"/")), reverse=True)
        for path in [*below, top]:
            directory = self.seen.get(path, ("nothing",))[0] == "directory"
            ours = self.mount.rmdir if directory else self.mount.unlink
            theirs = os.rmdir if directory else os.unlink
            self.both(functools.partial(ours, path), functools.partial(theirs, self.there(path)))

    @rule(source=some, which=some, name=names, flags=st.sampled_from([0, 0, 0, NOREPLACE]))
    def rename(self, source: int, which: int, name: bytes, flags: int) -> None:
        self.rename_to(self.thing(source), self.path(which, name), flags)

    @rule(source=some, goal=some, flags=st.sampled_from([0, 0, EXCHANGE, NOREPLACE]))
    def rename_over(self, source: int, goal: int, flags: int) -> None:
        self.rename_to(self.thing(source), self.thing(goal), flags)

    def rename_to(self, path: bytes, new: bytes, flags: int) -> None:
        self.both(
            lambda: self.mount.rename(path, new, flags),
            lambda: SystemCalls().rename(self.there(path), -100, self.there(new), -100, flags),
        )

    @rule(source=some, which=some, name=names)
    def link(self, source: int, which: int, name: bytes) -> None:
        path, new = self.thing(source), self.path(which, name)
        self.both(
            lambda: self.mount.link(path, new),
            lambda: os.link(self.there(path), self.there(new), follow_symlinks=False),
        )

    @rule(which=some, offset=st.integers(0, 9), data=st.binary(max_size=4))
    def write(self, which: int, offset: int, data: bytes) -> None:
        path = self.a_file(which)

        def theirs() -> None:
            fd = os.open(self.there(path), os.O_WRONLY)
            os.pwrite(fd, data, offset)
            os.close(fd)

        if path:
            self.both(lambda: self.mount.write(path, data, offset), theirs)

    @rule(which=some, size=st.integers(0, 9))
    def truncate(self, which: int, size: int) -> None:
        path = self.a_file(which)
        if path:
            self.both(lambda: self.mount.change(path, size=size), lambda: os.truncate(self.there(path), size))

    def a_file(self, which: int) -> bytes:
        files = sorted(path for path, about in self.seen.items() if about[0] == "file")
        return files[which % len(files)] if files else b""

    @rule(which=some, mode=st.sampled_from([0o600, 0o755, 0o444, 0]))
    def chmod(self, which: int, mode: int) -> None:
        path = self.thing(which)
        if self.seen.get(path, ("symlink",))[0] != "symlink":
            self.both(lambda: self.mount.change(path, mode=mode), lambda: os.chmod(self.there(path), mode))

    @rule(which=some)
    def touch(self, which: int) -> None:
        path = self.thing(which)
        if path in self.seen:
            self.mount.change(path, mtime_ns=7_000_000_001)
            assert self.mount.look(path).mtime_ns == 7_000_000_001

    @rule(which=some, value=st.sampled_from([b"1", b"2"]), flags=st.sampled_from([0, 1, 2]))
    def setxattr(self, which: int, value: bytes, flags: int) -> None:
        path = self.with_attributes(which)
        if path:
            self.both(
                lambda: self.mount.setxattr(path, b"user.u", value, flags),
                lambda: os.setxattr(self.there(path), b"user.u", value, flags),
            )

    @rule(which=some)
    def removexattr(self, which: int) -> None:
        path = self.with_attributes(which)
        if path:
            self.both(
                lambda: self.mount.removexattr(path, b"user.u"),
                lambda: os.removexattr(self.there(path), b"user.u"),
            )

    def with_attributes(self, which: int) -> bytes:
        paths = sorted(path for path, about in self.seen.items() if about[0] in ("file", "directory"))
        return paths[which % len(paths)] if paths else b""

    @rule(which=some)
    def hold_open(self, which: int) -> None:
        path = self.a_file(which)
        if path and len(self.open) < 3:
            inode = self.mount.look(path).inode
            self.mount.told[inode] += 1  # which `forget_others` leaves out
            self.mount.tree.remember(inode)
            self.open.append((inode, os.open(self.there(path), os.O_RDWR)))

    @precondition(lambda self: self.open)
    @rule(which=some, data=st.binary(min_size=1, max_size=3))
    def write_open(self, which: int, data: bytes) -> None:
        inode, fd = self.open[which % len(self.open)]
        self.mount.tree.write(inode, 1, data)
        os.pwrite(fd, data, 1)

    @precondition(lambda self: self.open)
    @rule(which=some)
    def close(self, which: int) -> None:
        inode, fd = self.open.pop(which % len(self.open))
        os.close(fd)
        if all(inode != other for other, _ in self.open):
            self.mount.forget(inode)

    @rule()
    def forget_others(self) -> None:
        """The kernel drops everything that nobody has open."""
        for inode in list(self.mount.told):
            if all(inode != other for other, _ in self.open):
                self.mount.forget(inode)

    @rule(which=some)
    def fsync(self, which: int) -> None:
        path = self.thing(which)
        if path in self.seen:
            self.mount.fsync(path)

    def numbers(self) -> dict[bytes, int]:
        """The inode numbers that are kept: those of symbolic links are not."""
        return {path: inode for path, inode in self.mount.inodes().items() if self.seen[path][0] != "symlink"}

    @rule()
    def replace_worker(self) -> None:
        before = self.numbers()
        self.mount.replace_worker(self.calls())
        assert self.numbers() == before

    @precondition(lambda self: not self.open)
    @rule()
    def remount(self) -> None:
        before = self.numbers()
        self.mount.remount(self.calls())
        assert self.numbers() == before
        assert sorted(os.listdir(self.home / "overlay/work")) == ["orphans", "whiteout"]
        assert os.listdir(self.home / "overlay/work/orphans") == []
        check_whiteouts(self.tree, self.home / "overlay/upper")


_SETTINGS = settings(
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking takes minutes
    stateful_step_count=25,
    deadline=None,
    derandomize="WDSFS_RANDOM" not in os.environ,  # set it to look for more
    suppress_health_check=list(HealthCheck),
)


def check(tree: LowerTree, calls: type[SystemCalls] = SystemCalls, examples: int = 25) -> None:
    case: Any = type("Case", (Model,), {"tree": tree, "calls": calls})
    case = case.TestCase
    case.settings = settings(_SETTINGS, max_examples=examples)
    case().runTest()


def test_the_tree_behaves_as_a_plain_directory(tree: LowerTree) -> None:
    check(tree)


@pytest.mark.parametrize("calls", [Refusing, WithoutDevices])
def test_the_tree_behaves_as_a_plain_directory_on_poorer_file_systems(calls: type[SystemCalls]) -> None:
    with a_set(*SETS["samples"]) as tree:
        check(tree, calls, 15)
