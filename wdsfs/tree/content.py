"""The content of members: places of their bytes, one by one or as columns, and reading from these.

`read_stored` decides what happens to a member that reaches past the end of its shard.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdsfs import source
from wdsfs.errors import CorruptShard, StaleShard, UnreadableShard
from wdsfs.index.record import Record
from wdsfs.source import TarBytes
from wdsfs.tar import scan, sparse
from wdsfs.tar.headers import BLOCK, read_fully
from wdsfs.tar.sparse import Extents
from wdsfs.tree.open_shards import ShardFile
from wdsfs.tree.texts import Ints

if TYPE_CHECKING:
    from wdsfs.door.remote_side import OpenObject

NO_DATA = np.zeros(0, np.uint8)
READ_MAX = 1 << 20  # bytes; the most that the kernel asks for at once
SAMPLE_MAX = 8 << 20  # bytes of a sample that is fetched with the first of its columns
_scratch = memoryview(bytearray(READ_MAX))

IN_DATA, APART, HELD = -1, -2, -3


class ContentColumns(NamedTuple):
    """Places of all members of a record: the number of the `file` in `paths`, and the first byte there.

    With IN_DATA the bytes lie in `data` instead. For members that lie in several pieces (APART) or have to be made
    (HELD), ask `ShardSet.content`.
    """

    paths: Sequence[bytes]
    file: Ints
    start: Ints
    data: NDArray[np.uint8]


def content_in_shard(record: Record, path: bytes) -> ContentColumns:
    """Return the columns of the record of a plain shard at this path."""
    file = np.zeros(record.members, np.int64)
    file[record.sparse_members()] = APART
    start = (record.array("member.head").astype(np.int64) + record.array("member.body")) * BLOCK
    return ContentColumns([path], file, start, NO_DATA)


class Held:
    """Bytes that no file has in this form: `load` makes them, unless `data` has them already."""

    __slots__ = ("data", "load")

    def __init__(self, load: Callable[[], bytes], data: bytes | None = None) -> None:
        self.load, self.data = load, data


@dataclass(slots=True)
class Content:
    """The place (bytes) of a member, and its file: enough to read it without the set of shards.

    With `held` those are its bytes; `file` is what they come from, and `extents` is not None.
    """

    file: ShardFile
    data: int
    size: int
    extents: Extents | None
    held: Held | None = None
    # For a remote shard: where all columns of the sample lie, as begin and end (bytes).
    sample: Callable[[], Sequence[tuple[int, int]]] | None = None


class RemoteRange(NamedTuple):
    """The bytes of a remote shard that a read needs, and those of the rest of the sample."""

    tar: OpenObject
    begin: int
    end: int
    sample: Sequence[tuple[int, int]]


def read(content: Content, offset: int, length: int) -> bytes:
    """Read a member: bytes of the shard that was indexed, never others.

    Raises StaleShard when the shard has changed, CorruptShard when it ends too early, UnreadableShard.
    """
    file = content.file
    try:
        if content.held is not None:
            data = _read_held(content.held, offset, length)
        else:
            data = read_stored(file.source, content.data, content.size, content.extents, offset, length)
    except CorruptShard as error:
        check_unchanged(content)
        raise CorruptShard(f"{os.fsdecode(file.path)}: {error}") from None
    except OSError as error:
        raise UnreadableShard(f"{os.fsdecode(file.path)}: {error.strerror}") from None
    except MemoryError:
        raise UnreadableShard(f"{os.fsdecode(file.path)}: no memory for {length:,} bytes of a member") from None
    # After the read: a change before or during the read shows in the times, a later one does not matter.
    check_unchanged(content)
    return data


def read_stored(tar: TarBytes, data: int, size: int, extents: Extents | None, offset: int, length: int) -> bytes:
    """Return bytes `offset` to `offset + length` of a member of `size` bytes whose payload starts at byte `data`.

    Returns less only at the end of the member. Raises CorruptShard if the shard ends before that: a short answer
    would look like the end of the file, and hide the damage. A long read of such bytes is not begun, or memory
    would be allocated for the size that a header claims.
    """
    length = max(min(length, size - offset), 0)
    begin = data + offset
    if extents is not None:
        return sparse.read_extents(tar, data, extents, offset, length)
    end = source.size_of(tar) if length > READ_MAX else begin + length
    if end >= begin + length:
        content = read_fully(tar, length, begin)
        if len(content) == length:
            return content
        end = begin + len(content)
    raise CorruptShard(f"the shard ends at byte {end}, inside a member")


def read_cached(content: Content, offset: int, length: int) -> memoryview | None:
    """Read as `read`; None if that would have to wait for a disk, or needs more than one read.

    The bytes are valid until the next call: no memory is allocated for each read.
    """
    length = min(length, content.size - offset)
    file = content.file
    if content.extents is not None or not 0 < length <= READ_MAX:
        return None if content.held is None else _read_held_cached(content, offset, length)
    fd, data, begin = file.source, _scratch[:length], content.data + offset
    if not isinstance(fd, int):
        cached = None if file.remote is None else file.remote.read_cached(length, begin)
        if cached is None:
            return None
        data[:] = cached  # copied: before the reply is sent, other files of the sample may be read from the cache
        return data
    file.look_ahead(begin, begin + length)
    try:
        got = os.preadv(fd, (data,), begin, os.RWF_NOWAIT)
    except OSError:  # EAGAIN: not in the page cache; EOPNOTSUPP: the file system does not know
        return None
    if got < length:
        return None
    check_unchanged(content)
    return data


def remote_range(content: Content, offset: int, length: int) -> RemoteRange | None:
    """Return the range of a read in a remote shard; None if the bytes are elsewhere, or in several pieces."""
    tar, end = content.file.remote, min(offset + length, content.size)
    if tar is None or content.extents is not None or offset >= end:
        return None
    sample = [] if content.sample is None else content.sample()
    if sum(stop - start for start, stop in sample) > SAMPLE_MAX:
        sample = []
    return RemoteRange(tar, content.data + offset, content.data + end, sample)


def _read_held(held: Held, offset: int, length: int) -> bytes:
    if held.data is None:
        held.data = held.load()
    return held.data[offset : offset + length]


def _read_held_cached(content: Content, offset: int, length: int) -> memoryview | None:
    if content.held is None or content.held.data is None:
        return None
    check_unchanged(content)
    return memoryview(content.held.data)[offset : offset + length]


def read_name(content: Content, head: int) -> bytes:
    """Return the raw name of a member of the shard of `content`, whose first header is at byte `head`.

    Raises StaleShard, CorruptShard, OSError.
    """
    name = scan.placed(content.file.source, head).name
    check_unchanged(content)
    return name


def check_unchanged(content: Content) -> None:
    """Raise StaleShard when the shard is no longer the file that was indexed.

    Called at every read. It compares no Fingerprint: the ctime alone shows any change of an open file. An open
    remote shard always stays the same object.
    """
    shard = content.file.shard
    if isinstance(shard, int) and os.fstat(shard).st_ctime_ns != content.file.ctime_ns:
        raise StaleShard(f"{os.fsdecode(content.file.path)} has changed since this was opened")
