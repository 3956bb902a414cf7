"""The files and directories that a mount of a set would show, read without one."""

from __future__ import annotations

import contextlib
import fnmatch
import io
import os
import re
import stat as modes
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple, ParamSpec, TypeVar, Unpack

from wdsfs.errors import IsADirectory, NoSuchEntry, NotADirectory, StaleShard, UsageError
from wdsfs.library.opened_set import Closed, OfSet, OpenedSet, SetOptions, Shards, check_choice, options_named_here
from wdsfs.names import text_of
from wdsfs.tree import content as content_module
from wdsfs.tree.indexing import indexed
from wdsfs.tree.numbered_tree import check_name, make_numbered
from wdsfs.tree.opening import resolve_path
from wdsfs.tree.set_options import TreeOptions
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.tree import AT_PARENT, Entry, LowerTree, Node, View

LAYOUTS, NAMES = ("samples", "files", "classes"), ("ext", "full")
LINKS_MAX = 40  # symbolic links on the way to a file, as in the kernel

P = ParamSpec("P")
Answered = TypeVar("Answered")


class FilesOptions(SetOptions, total=False):
    """Options of a tree, with those of its classes."""

    names: str
    merge: bool
    index_tree: bool
    class_from: str | None
    class_names: str | None
    class_digits: int | None


class TreeEntry(NamedTuple):
    """A file or directory in a listing: its name and attributes."""

    name: str
    stat: os.stat_result


class Tree(OfSet):
    """The tree of a set, made by `wdsfs.tree`. Paths are texts below its top, with or without a `/` at the start.

    It can be used by several threads, after a fork, and in processes to which it is pickled. A shard that changes
    shows its new content; files that were open from it raise StaleShard. Symbolic links are followed.
    """

    @options_named_here()
    def __init__(
        self,
        shards: Shards,
        layout: str = "samples",
        *,
        names: str = "ext",
        merge: bool = False,
        index_tree: bool = False,
        **options: Any,
    ) -> None:
        check_choice("layout", layout, LAYOUTS)
        check_choice("names", names, NAMES)
        view = TreeOptions(layout, names, merge, index_tree).view(partial=bool(options.get("allow_missing")))
        self._arguments = {"layout": layout, "names": names, "merge": merge, "index_tree": index_tree}
        self._set = OpenedSet(shards, layout, view.merged or index_tree, **options)
        self._tree = self._set.build(lambda lower: _prepared(lower, view))

    def close(self) -> None:
        self._tree = Closed()  # type: ignore[assignment]  # it raises whatever is asked
        super().close()

    # --- names

    def listdir(self, path: str = "") -> list[str]:
        """Return the names in a directory, in the order of the tar. Raises EntryError, ShardError."""
        return [text_of(entry.name) for entry in self._entries(path)]

    def scandir(self, path: str = "") -> list[TreeEntry]:
        """Return the names in a directory with their attributes. Raises EntryError, ShardError."""
        return [TreeEntry(text_of(entry.name), _attributes(entry.node)) for entry in self._entries(path)]

    def stat(self, path: str = "") -> os.stat_result:
        """Return the attributes of a file or directory. Raises EntryError, ShardError."""
        return _attributes(self._node(path))

    def exists(self, path: str) -> bool:
        """Return True if there is something at a path. Raises ShardError where that cannot be known."""
        return self._mode(path) != 0

    def isdir(self, path: str) -> bool:
        """Return True for a directory. Raises ShardError."""
        return modes.S_ISDIR(self._mode(path))

    def isfile(self, path: str) -> bool:
        """Return True for a file. Raises ShardError."""
        return modes.S_ISREG(self._mode(path))

    def walk(self, top: str = "") -> Iterator[tuple[str, list[str], list[str]]]:
        """Yield each directory with the names of directories and files in it, from the top down, as `os.walk`.

        Directories that are taken out of a list are not visited. Raises EntryError, ShardError.
        """
        entries = self.scandir(top)
        names = [entry.name for entry in entries if modes.S_ISDIR(entry.stat.st_mode)]
        yield top, names, [entry.name for entry in entries if not modes.S_ISDIR(entry.stat.st_mode)]
        for name in names:
            yield from self.walk(f"{top.rstrip('/')}/{name}" if top else name)

    def glob(self, pattern: str) -> list[str]:
        """Return the paths that match: `*`, `?` and `[...]` in a name, `**` for directories of any depth."""
        return list(dict.fromkeys(self._matches("", [part for part in pattern.split("/") if part])))

    def _matches(self, top: str, parts: list[str]) -> Iterator[str]:
        part, *rest = parts or [""]
        below = top + "/" if top else ""
        if part == "**":
            for path, _, files in self.walk(top):
                yield from self._matches(path, rest) if rest else [path] if path else []
                if not rest:
                    yield from (f"{path}/{name}" if path else name for name in files)
        elif not re.search(r"[*?[]", part):
            if part and self.exists(below + part):
                yield from self._matches(below + part, rest) if rest else [below + part]
        elif self.isdir(top):
            is_match = re.compile(fnmatch.translate(part)).match
            for name in filter(is_match, self.listdir(top)):
                yield from self._matches(below + name, rest) if rest else [below + name]

    # --- content

    def open(self, path: str, mode: str = "rb", buffering: int = -1, **text: Any) -> IO[Any]:
        """Open a file to read, as `open` does: mode `rb`, or `r` with `encoding`, `errors`, `newline`.

        The file object seeks. Raises EntryError and ShardError. Reads raise ShardError.
        """
        if mode not in ("rb", "r", "rt"):
            raise UsageError(f"mode {mode!r}: files of a set are read-only; use mode rb or r")
        if text and mode == "rb":
            raise UsageError(f"mode rb takes no {', '.join(text)}: use mode r")
        raw = MemberFile(self, self._node(path), path)
        if buffering == 0 and mode == "rb":
            return raw  # type: ignore[return-value]
        buffered = io.BufferedReader(raw, buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE)
        return buffered if mode == "rb" else io.TextIOWrapper(buffered, **text)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Return the content of a file, or `length` bytes from byte `offset` on. Raises EntryError, ShardError."""

        def content() -> bytes:
            with MemberFile(self, self._node(path), path) as file:
                return file.pread(file.size if length is None else length, offset)

        try:
            return content()
        except StaleShard:  # a moment ago another shard was there
            return content()

    # --- questions to the tree, which is for one thread at a time

    def _ask(self, question: Callable[P, Answered], *args: P.args, **kwargs: P.kwargs) -> Answered:
        with self._set.lock:
            self._tree.lower.tidy()
            return indexed(question, *args, **kwargs)

    def _entries(self, path: str) -> list[Entry]:
        node = self._node(path)
        if not modes.S_ISDIR(node.mode):
            raise NotADirectory(f"{path} is a file")
        inode = node.inode
        return self._ask(lambda: list(self._tree.listing(inode, AT_PARENT)))

    def _node(self, path: str) -> Node:
        """Return the node at a path; follow symbolic links. Raises EntryError, ShardError."""
        parts = _parts(path)
        if ".." not in parts:
            with contextlib.suppress(NotADirectory):  # a file on the way, or a link
                node = self._resolved(parts)
                if not modes.S_ISLNK(node.mode):
                    return node
        return self._walked(parts, path)

    def _walked(self, parts: list[str], path: str) -> Node:
        """Return the node at a path with links, step by step as the kernel: `..` is above the target of a link."""
        above, ahead, links = list[str](), parts[::-1], 0
        while ahead:
            part = ahead.pop()
            if part == "..":
                if not above:
                    raise NoSuchEntry(f"{path} leads out of the set")
                above.pop()
                continue
            node = self._resolved([*above, part])
            if not modes.S_ISLNK(node.mode):
                if ahead and not modes.S_ISDIR(node.mode):
                    raise NotADirectory(f"{path}: a part of it is a file")
                above.append(part)
                continue
            links += 1
            if links > LINKS_MAX:
                raise NoSuchEntry(f"{path}: there are too many symbolic links on the way")
            ahead += self._target(node)[::-1]
        return self._resolved(above)

    def _target(self, link: Node) -> list[str]:
        """Return the parts of the target of a link. Raises NoSuchEntry for one outside."""
        target = text_of(self._ask(self._tree.readlink, link.inode))
        if target.startswith("/"):
            raise NoSuchEntry(f"a symbolic link leads out of the set: {target}")
        return _parts(target)

    def _resolved(self, parts: list[str]) -> Node:
        try:
            path = os.fsencode("/".join(parts))
        except UnicodeEncodeError:
            raise NoSuchEntry(f"no {'/'.join(parts)!a} in the tree: it is not valid UTF-8") from None
        return self._ask(resolve_path, self._tree, path)

    def _mode(self, path: str) -> int:
        try:
            return self._node(path).mode
        except (NoSuchEntry, NotADirectory):
            return 0

    # --- other processes

    def __repr__(self) -> str:
        return f"<wdsfs.tree: {self._arguments['layout']} of {len(self._set.lower):,} shards>"

    def __reduce__(self) -> tuple[Any, ...]:
        shards, options = self._set.sent
        return _sent, (shards, self._arguments | options)


def _prepared(lower: ShardSet, view: View) -> LowerTree:
    check_name(lower.shards, view)
    tree = make_numbered(lower, view)
    indexed(tree.prepare)
    return tree


class MemberFile(io.RawIOBase):
    """A file of a tree, open to read. `name` is its path, `size` its size (bytes)."""

    def __init__(self, tree: Tree, node: Node, path: str) -> None:
        super().__init__()
        if modes.S_ISDIR(node.mode):
            raise IsADirectory(f"{path or '/'} is a directory")
        self.name, self.size, self.mode = path, node.size, "rb"
        self._tree, self._inode, self._at = tree, node.inode, 0
        self._content = tree._ask(tree._tree.content, node.inode)

    def pread(self, length: int, offset: int) -> bytes:
        """Return up to `length` bytes from byte `offset` on, wherever the file stands. Raises ShardError."""
        if self.closed:
            raise ValueError("I/O operation on closed file")
        if offset < 0 or length < 0:
            raise UsageError(f"{self.name}: {length} bytes at {offset}: neither can be negative")
        length = max(min(length, self.size - offset), 0)
        set_ = self._tree._set
        with set_.lock:
            if self._content.file.ended:  # closed for others that were opened
                self._content = self._tree._ask(self._tree._tree.content, self._inode)
            content = self._content
            if content.held is not None:  # made in memory that all files share
                return content_module.read(content, offset, length)
            content.file.hold()
        try:
            return content_module.read(content, offset, length) if length else b""
        except StaleShard:
            with set_.lock:
                set_.lower.distrust()  # so that the next `open` gives the new content at once
            raise
        finally:
            with set_.lock:
                content.file.let_go()

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self.pread(len(view), self._at)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

    def readall(self) -> bytes:
        data = self.pread(self.size, self._at)
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}.get(whence)
        if base is None or base + offset < 0:
            raise ValueError(f"seek({offset}, {whence}): there is no such place")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def _attributes(node: Node) -> os.stat_result:
    seconds, times = node.mtime_ns // 10**9, node.mtime_ns / 1e9
    numbers = (node.mode, node.inode, 0, node.links, os.getuid(), os.getgid(), node.size, *(seconds,) * 3)
    exact = {
        f"st_{name}time{unit}": value for name in "amc" for unit, value in (("", times), ("_ns", node.mtime_ns))
    }
    return os.stat_result(numbers, exact)


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _sent(shards: list[str], arguments: dict[str, Any]) -> Tree:
    return Tree(shards, **arguments)


def tree(shards: Shards, layout: str = "samples", **options: Unpack[FilesOptions]) -> Tree:
    """Open the tree that `wdsfs mount` would show for the same SHARDS and options, without a mount.

    ::

        files = wdsfs.tree("train-{000000..000999}.tar", layout="files")
        files.listdir("train-000000"), files.read("train-000000/a.txt")

    `layout` is samples, files or classes. Options are those of `wdsfs.samples`, and `names`, `merge`,
    `index_tree`, `class_from`, `class_names`, `class_digits`. Raises WdsfsError.
    """
    return Tree(shards, layout, **options)
