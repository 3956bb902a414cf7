"""Stores the content of whole files in the kernel's page cache of a mount (FUSE_NOTIFY_STORE).

A READ in flight locks its pages, and a process that stores into these pages waits for the READ. So this process
must not answer requests. `pusher.py` decides which files are stored, and when.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from wdsfs.errors import UnreadableShard
from wdsfs.fuse import protocol
from wdsfs.inodes import MEMBER, index_of, kind_of, unpack
from wdsfs.tree.content import Content, check_unchanged
from wdsfs.tree.open_shards import ShardFile
from wdsfs.tree.tree import LowerTree

log = logging.getLogger(__name__)

FILE_MAX = 2 << 20  # bytes; a larger file is read ahead by the kernel as well
# Bytes of several files that are read from the shard together, as many as stay in a processor's cache, and of the
# largest gap between two of them.
READ_MAX, GAP_MAX = 512 << 10, 64 << 10
UNKNOWN_MAX = 4  # refused files in a row after which storing ends: the kernel has not looked up their names yet

_UNABLE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # a kernel without the message
_GONE = (errno.ENODEV, errno.ENOTCONN, errno.ECONNABORTED)  # the file system was unmounted


class Ended(Exception):
    """The mount is gone; with `unable` the kernel does not know the message."""

    def __init__(self, *, unable: bool = False) -> None:
        super().__init__()
        self.unable = unable


class Members(NamedTuple):
    """Whole files that may be stored, as columns: the shard of each file, its first byte there, and its size."""

    inodes: list[int]
    files: list[ShardFile]
    starts: list[int]
    sizes: list[int]

    def add(self, inode: int, content: Content) -> None:
        """Add a file."""
        self.inodes.append(inode)
        self.files.append(content.file)
        self.starts.append(content.data)
        self.sizes.append(content.size)

    def without(self, at: int) -> Members:
        """Return the files without the one in row `at`."""
        return Members(*([*column[:at], *column[at + 1 :]] for column in self))

    def run(self, at: int) -> int:
        """Return the end of the files that are read together, from row `at` on."""
        starts, sizes, file = self.starts, self.sizes, self.files[at]
        begin, stop = starts[at], at + 1
        while (
            stop < len(starts)
            and self.files[stop] is file
            and 0 <= starts[stop] - starts[stop - 1] - sizes[stop - 1] <= GAP_MAX
            and starts[stop] + sizes[stop] - begin <= READ_MAX
        ):
            stop += 1
        return stop


class Stored(NamedTuple):
    """The files and bytes that the kernel has accepted, the last inode number, and the number of refused files."""

    files: int
    bytes: int
    last: int
    refused: int


def _is_readable(file: ShardFile) -> bool:
    """Return True for a plain shard, local or remote. Ranges of other shards are slow to read."""
    return isinstance(file.source, int) or file.remote is not None


class PageCache:
    """Stores files of a tree by a FUSE descriptor."""

    def __init__(self, device: int, tree: LowerTree) -> None:
        self.device, self.tree = device, tree
        self._buffer = memoryview(bytearray(FILE_MAX))

    def members(self, inodes: Sequence[int], room: int) -> Members:
        """Return the members among these inodes of one shard that can be stored, up to `room` bytes.

        Raises NotIndexed, ShardErrors.
        """
        members = Members([], [], [], [])
        for inode, content in self._contents(inodes):
            if members.inodes and content.size > room:
                break
            room -= content.size
            if 0 < content.size <= FILE_MAX and content.extents is None and _is_readable(content.file):
                members.add(inode, content)
        return members

    def _contents(self, inodes: Sequence[int]) -> Iterator[tuple[int, Content]]:
        """Yield the members among these inodes, with their content, but no symbolic links."""
        tag, number, where = unpack(inodes[0]) if inodes else (0, 0, 0)
        if kind_of(where) != MEMBER:
            return
        lower, base = self.tree.lower, inodes[0] - index_of(where)
        record = lower.record(number, tag)
        end = base + record.members
        inodes = [inode for inode in inodes if inode < end]
        if not inodes:
            return
        if lower.plain is lower and record.is_plain and record.moved is None and not len(record.sparse_members()):
            file = self.tree.content(inodes[0]).file
            yield from ((inode, Content(file, *record.extent(inode - base), None)) for inode in inodes)
            return
        for inode in inodes:
            if record.symlink(inode - base) is None:
                content = self.tree.content(inode)
                if record.size_and_time(inode - base)[0] == content.size:
                    yield inode, content

    def store(self, members: Members, front: Callable[[], int]) -> Stored:
        """Store files, except files up to the inode number `front`, which the reader has already reached.

        Ends early after UNKNOWN_MAX files that the kernel does not know. Raises StaleShard, UnreadableShard,
        Ended.
        """
        inodes, starts, sizes = members.inodes, members.starts, members.sizes
        files = size = last = refused = unknown = at = 0
        while at < len(inodes) and unknown < UNKNOWN_MAX:
            if inodes[at] <= front():
                at += 1
                continue
            begin, stop = starts[at], members.run(at)
            data = self._read(members.files[at], begin, starts[stop - 1] + sizes[stop - 1])
            if data is None:
                break
            for number in range(at, stop):
                start = starts[number] - begin
                if inodes[number] <= front():
                    continue
                if unknown == UNKNOWN_MAX:
                    break
                if self._write(inodes[number], data[start : start + sizes[number]]):
                    files, size, last, unknown = files + 1, size + sizes[number], inodes[number], 0
                else:
                    refused, unknown = refused + 1, unknown + 1
            at = stop
        return Stored(files, size, last, refused)

    def _read(self, file: ShardFile, begin: int, end: int) -> memoryview | None:
        """Return these bytes of a shard that has not changed, valid until the next call.

        None if the shard is remote and these bytes have not arrived yet.
        """
        source = file.source
        if file.remote is not None:
            return file.remote.read_cached(end - begin, begin)
        data = self._buffer[: end - begin]
        assert isinstance(source, int)  # see `members`
        file.look_ahead(begin, end)
        try:
            size = os.preadv(source, (data,), begin)
        except OSError as error:
            raise UnreadableShard(f"{os.fsdecode(file.path)}: {error.strerror}") from None
        # After the read, before anything is stored: no file gets bytes of two shards.
        check_unchanged(Content(file, begin, end - begin, None))
        if size < end - begin:
            raise UnreadableShard(f"{os.fsdecode(file.path)}: ends early")
        return data

    def _write(self, inode: int, data: memoryview) -> bool:
        """Store a whole file; returns False if the kernel does not take it. Raises Ended."""
        try:
            os.writev(self.device, (protocol.store(inode, 0, len(data)), data))
        except OSError as error:
            if error.errno in _GONE:
                raise Ended from None
            if error.errno in _UNABLE:
                raise Ended(unable=True) from None
            if error.errno != errno.ENOENT:  # ENOENT: the kernel does not know the inode; else it has no memory
                log.debug("the kernel takes no content ahead of readers: %s", error.strerror)
            return False
        return True
