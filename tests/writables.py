"""Writable trees for the tests: sets with an overlay, and paths instead of inode numbers.

`MountOptions` does what a kernel does with a writable tree: it looks up a path name by name, keeps count of what
it was told, and turns every exception into an OSError. So a test can do the same thing to it and to a plain
directory.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from wdsfs.errors import WdsfsError
from wdsfs.index.store import open_index
from wdsfs.inodes import ROOT
from wdsfs.overlay.overlay_directory import OverlayDirectory
from wdsfs.overlay.upper_directory import UpperDirectory
from wdsfs.overlay.upper_files import SystemCalls
from wdsfs.overlay.upper_format import DIRECTORY, OPEN_DIRECTORY, WHITEOUT, load_names
from wdsfs.overlay.writable_tree import JOURNAL_BYTES, AttributeChange, RequestJournal, WritableTree
from wdsfs.spec.expand import expand
from wdsfs.tree.merged_tree import make_tree
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.tree import LowerTree, Node, View

EXT, FULL, FILES = View(), View(names="full"), View("files")
MTIME = 1_600_000_000

Members = Sequence[
    tuple[str, bytes | str | None]
]  # name and content; a str is a symlink's or a hard link's target


def shard(members: Members) -> bytes:
    """A tar; the content "-> x" makes a symbolic link, "== x" a hard link, None a directory."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, errors="surrogateescape") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.mtime = MTIME
            if content is None:
                info.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                info.type = tarfile.SYMTYPE if content.startswith("-> ") else tarfile.LNKTYPE
                info.linkname = content[3:]
            else:
                info.size = len(content)
            tar.addfile(info, io.BytesIO(content if isinstance(content, bytes) else b""))
    return out.getvalue()


@contextlib.contextmanager
def a_set(shards: Sequence[Members], view: View = EXT, merge: bool = False) -> Iterator[LowerTree]:
    """The tree over shards s0, s1 ... in a directory of its own."""
    with tempfile.TemporaryDirectory() as home:
        for number, members in enumerate(shards):
            Path(home, f"s{number}.tar").write_bytes(shard(members))
        paths = [Path(home, f"s{number}.tar") for number in range(len(shards))]
        with tree_over(paths, Path(home, "index"), view, merge) as tree:
            yield tree


@contextlib.contextmanager
def tree_over(shards: Sequence[Path], index: Path, view: View, merge: bool) -> Iterator[LowerTree]:
    """The tree over these shards."""
    found, opened = expand([os.fspath(path) for path in shards]), open_index(index)
    opened.refresh(found)
    tree = make_tree(ShardSet(found, opened), replace(view, merge=merge))
    try:
        yield tree
    finally:
        tree.lower.close()


@contextlib.contextmanager
def mounted(tree: LowerTree, calls: SystemCalls | None = None) -> Iterator[Mount]:
    """A writable tree over `tree`, with an overlay in a directory of its own."""
    with fast_directory() as home:
        mount = Mount(tree, home, calls)
        try:
            yield mount
        finally:
            mount.close()


class Mount:
    """A writable tree over `tree` with its overlay in `home`."""

    def __init__(
        self, tree: LowerTree, home: Path, calls: SystemCalls | None = None, descriptors: int = 16
    ) -> None:
        self.below = tree
        self.home = home
        self.memory = bytearray(JOURNAL_BYTES)
        self.descriptors = descriptors
        self.told: dict[int, int] = {}
        self.start(calls)

    def start(self, calls: SystemCalls | None = None, inherited: bool = False) -> None:
        self.upper = UpperDirectory(
            OverlayDirectory(self.home), None, calls, self.descriptors, inherited=inherited
        )
        self.tree = WritableTree(self.below, self.upper, None, RequestJournal(self.memory))
        self.tree.prepare()

    def replace_worker(self, calls: SystemCalls | None = None) -> None:
        """The worker is killed, and another takes over."""
        self.upper.close()
        self.start(calls, inherited=True)

    def remount(self, calls: SystemCalls | None = None) -> None:
        """A clean end, and a new start."""
        self.upper.close(clean=True)
        self.memory[:] = bytes(JOURNAL_BYTES)
        self.told.clear()
        self.start(calls)

    def close(self) -> None:
        self.upper.close()

    # --- as the kernel

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if function.__name__ not in ("lookup", "getattr", "read"):
            self.last = function.__name__, arguments
        try:
            return function(*arguments)
        except WdsfsError as error:
            raise OSError(error.errno, str(error)) from error

    def resend(self) -> None:
        """Ask the worker that there is now what the last one was asked last."""
        name, arguments = self.last
        self._call(getattr(self.tree, name), *arguments)

    def _tell(self, node: Node) -> Node:
        self.told[node.inode] = self.told.get(node.inode, 0) + 1
        self.tree.remember(node.inode)
        return node

    def look(self, path: bytes) -> Node:
        node: Node = self._call(self.tree.getattr, ROOT)
        for name in filter(None, path.split(b"/")):
            if not stat.S_ISDIR(node.mode):
                raise OSError(errno.ENOTDIR, "not a directory")
            node = self._tell(self._call(self.tree.lookup, node.inode, name))
        return node

    def at(self, path: bytes) -> tuple[int, bytes]:
        head, _, name = path.rpartition(b"/")
        node = self.look(head)
        if not stat.S_ISDIR(node.mode):
            raise OSError(errno.ENOTDIR, "not a directory")
        return node.inode, name

    def forget(self, inode: int) -> None:
        self.tree.forget(inode, self.told.pop(inode, 0))

    def forget_all(self) -> None:
        for inode in list(self.told):
            self.forget(inode)

    # --- as os

    def _change(self, function: Callable[..., Any], *arguments: Any, is_told: bool = False) -> Any:
        """A change of names, which the journal notes until the kernel has its answer."""
        answer = self._call(function, *arguments)
        if is_told:
            self._tell(answer)
        self.tree.journal.clear()
        return answer

    def create(self, path: bytes, mode: int = 0o644) -> int:
        node: Node = self._change(self.tree.create, *self.at(path), mode, is_told=True)
        return node.inode

    def mkdir(self, path: bytes, mode: int = 0o755) -> None:
        self._change(self.tree.mkdir, *self.at(path), mode, is_told=True)

    def mkfifo(self, path: bytes) -> None:
        self._change(self.tree.mknod, *self.at(path), stat.S_IFIFO | 0o600, is_told=True)

    def symlink(self, target: bytes, path: bytes) -> None:
        self._change(self.tree.symlink, *self.at(path), target, is_told=True)

    def link(self, path: bytes, new: bytes) -> None:
        self._change(self.tree.link, self.look(path).inode, *self.at(new), is_told=True)

    def unlink(self, path: bytes) -> None:
        self.look(path)
        self._change(self.tree.unlink, *self.at(path))

    def rmdir(self, path: bytes) -> None:
        self.look(path)
        self._change(self.tree.rmdir, *self.at(path))

    def rename(self, path: bytes, new: bytes, flags: int = 0) -> None:
        self.look(path)
        self._change(self.tree.rename, *self.at(path), *self.at(new), flags)

    def write(self, path: bytes, data: bytes, offset: int = 0) -> None:
        node = self.look(path)
        assert self._call(self.tree.write, node.inode, offset, data) == len(data)

    def put(self, path: bytes, data: bytes) -> None:
        """Write a whole file, new or not."""
        try:
            inode = self.create(path)
        except FileExistsError:
            inode = self.look(path).inode
            self._call(self.tree.setattr, inode, AttributeChange(size=0))
        self._call(self.tree.write, inode, 0, data)

    def change(self, path: bytes, **fields: int) -> None:
        self._call(self.tree.setattr, self.look(path).inode, AttributeChange(**fields))

    def fsync(self, path: bytes) -> None:
        self._call(self.tree.fsync, self.look(path).inode)

    def setxattr(self, path: bytes, name: bytes, value: bytes, flags: int = 0) -> None:
        self._change(self.tree.setxattr, self.look(path).inode, name, value, flags)

    def removexattr(self, path: bytes, name: bytes) -> None:
        self._change(self.tree.removexattr, self.look(path).inode, name)

    def read(self, path: bytes) -> bytes:
        return self.read_inode(self.look(path).inode)

    def read_inode(self, inode: int) -> bytes:
        size = self._call(self.tree.getattr, inode).size
        data: bytes = self._call(self.tree.read, inode, 0, size + 1)
        return data

    def names(self, path: bytes = b"", page: int = 3) -> list[bytes]:
        """A listing in pages, as the kernel asks for it."""
        inode, after = self.look(path).inode, 0
        found: list[bytes] = []
        while True:
            entries = []
            for entry in self.tree.listing(inode, after):
                entries.append(entry)
                if len(entries) == page:
                    break
            if not entries:
                return found[2:]
            found += [entry.name for entry in entries]
            after = entries[-1].cursor

    # --- the whole tree

    def walk(self) -> dict[bytes, tuple[Any, ...]]:
        """Everything that can be seen, by path; what `walk_directory` finds in a directory."""
        found: dict[bytes, tuple[Any, ...]] = {}
        waiting = [(b"", ROOT)]
        while waiting:
            path, inode = waiting.pop()
            for entry in list(self.tree.listing(inode))[2:]:
                node, below = entry.node, path + entry.name
                assert below not in found, f"{below!r} is listed twice"
                assert self.tree.lookup(inode, entry.name)[:5] == node[:5]
                assert self.tree.getattr(node.inode)[:5] == node[:5]
                if stat.S_ISDIR(node.mode):
                    waiting.append((below + b"/", node.inode))
                    found[below] = ("directory", stat.S_IMODE(node.mode), self._attributes(node.inode))
                elif stat.S_ISLNK(node.mode):
                    found[below] = ("symlink", self.tree.readlink(node.inode))
                elif stat.S_ISREG(node.mode):
                    found[below] = (
                        "file",
                        stat.S_IMODE(node.mode),
                        node.links,
                        self.read_inode(node.inode),
                        self._attributes(node.inode),
                    )
                else:
                    found[below] = ("other",)
        return found

    def _attributes(self, inode: int) -> dict[bytes, bytes]:
        names = [name for name in self.tree.xattrs(inode) if not name.startswith(b"user.wdsfs.")]
        return {name: self.tree.getxattr(inode, name) for name in names}

    def inodes(self) -> dict[bytes, int]:
        return {path: self.look(path).inode for path in self.walk()}


def walk_directory(top: bytes) -> dict[bytes, tuple[Any, ...]]:
    """Return what `Mount.walk` should find, from a plain directory."""
    found: dict[bytes, tuple[Any, ...]] = {}
    for path, directories, files in os.walk(top):
        for name in directories + files:
            whole = os.path.join(path, name)
            below, status = os.path.relpath(whole, top), os.lstat(whole)
            if stat.S_ISDIR(status.st_mode):
                found[below] = ("directory", stat.S_IMODE(status.st_mode), _attributes_of(whole))
            elif stat.S_ISLNK(status.st_mode):
                found[below] = ("symlink", os.readlink(whole))
            elif stat.S_ISREG(status.st_mode):
                data = Path(os.fsdecode(whole)).read_bytes()
                found[below] = ("file", stat.S_IMODE(status.st_mode), status.st_nlink, data, _attributes_of(whole))
            else:
                found[below] = ("other",)
    return found


def _attributes_of(path: bytes) -> dict[bytes, bytes]:
    names = [os.fsencode(name) for name in os.listxattr(path) if re.match(r"user\.(?!wdsfs\.)", name)]
    return {name: os.getxattr(path, name) for name in names}


def copy_out(mount: Mount, top: bytes) -> None:
    """Make a plain directory of what a mount shows."""
    inodes: dict[int, bytes] = {}
    for path, (kind, *about) in sorted(mount.walk().items()):
        whole = os.path.join(top, path)
        if kind == "directory":
            os.mkdir(whole)
            os.chmod(whole, about[0])
        elif kind == "symlink":
            os.symlink(about[0], whole)
        else:
            inode = mount.look(path).inode
            if inode in inodes:
                os.link(inodes[inode], whole)
                continue
            inodes[inode] = whole
            Path(os.fsdecode(whole)).write_bytes(about[2])
            os.chmod(whole, about[0])


def check_whiteouts(tree: LowerTree, upper: Path) -> None:
    """Each whiteout hides a name of the lower: the kernel would list any other one."""
    directory = os.open(upper, OPEN_DIRECTORY)
    try:
        waiting = [(load_names(directory), ROOT)]
    finally:
        os.close(directory)
    while waiting:
        node, below = waiting.pop()
        names = {entry.name: entry.node for entry in tree.listing(below)} if below else {}
        for name, child in node.children.items():
            there = names.get(name)
            if child.kind == WHITEOUT:
                assert there is not None, f"{node.path()!r} has a whiteout {name!r}, which hides nothing"
                assert node.merged or node.parent is None
            elif child.kind == DIRECTORY:
                is_merged = there is not None and stat.S_ISDIR(there.mode) and not child.opaque
                waiting.append((child, there.inode if there is not None and is_merged else 0))


@contextlib.contextmanager
def fast_directory() -> Iterator[Path]:
    """A directory in memory where that can hold an overlay; else an ordinary one."""
    place = "/dev/shm" if os.path.isdir("/dev/shm") else None
    path = Path(tempfile.mkdtemp(dir=place))
    try:
        os.setxattr(path, "user.test", b"")
    except OSError:
        path.rmdir()
        path = Path(tempfile.mkdtemp())
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
