"""The bytes of a member: where they are, and how they are read."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from wdsfs.dataset.open_files import ShardFile
from wdsfs.errors import CorruptShard, StaleShard, UnreadableShard
from wdsfs.tar import scan

READ_MAX = 1 << 20  # bytes; the most that the kernel asks for at once


class Held:
    """Bytes that lie in no file as they are read: `load` gets them when they are not `data` already."""

    __slots__ = ("data", "load")

    def __init__(self, load: Callable[[], bytes], data: bytes | None = None) -> None:
        self.load, self.data = load, data


@dataclass(slots=True)
class Content:
    """Everything needed to read a member without the lower: where it lies (bytes) in which file.

    With `held` the bytes are those; `file` is what they come from, and `segments` is not None.
    """

    file: ShardFile
    data: int
    size: int
    segments: scan.Segments | None
    held: Held | None = None


_scratch = memoryview(bytearray(READ_MAX))


def read(content: Content, offset: int, length: int) -> bytes:
    """Read a member; the bytes are those of the shard that was indexed, or there are none.

    Raises StaleShard when the shard has changed, CorruptShard when it ends too early, UnreadableShard.
    """
    file = content.file
    try:
        if content.held is not None:
            data = _held(content.held, offset, length)
        else:
            data = scan.read(file.source, content.data, content.size, content.segments, offset, length)
    except CorruptShard as error:
        check_unchanged(content)
        raise CorruptShard(f"{os.fsdecode(file.path)}: {error}") from None
    except OSError as error:
        raise UnreadableShard(f"{os.fsdecode(file.path)}: {error.strerror}") from None
    # After the read: a change before it or during it shows in the times, one behind it does not matter.
    check_unchanged(content)
    return data


def read_cached(content: Content, offset: int, length: int) -> memoryview | None:
    """As `read`, but None when it would have to wait for a disk, or is not worth the trouble here.

    The bytes are there until the next call: no memory is taken for each read.
    """
    length = min(length, content.size - offset)
    file = content.file
    fd = file.source
    if content.segments is not None or not 0 < length <= READ_MAX or not isinstance(fd, int):
        return None if content.held is None else _held_cached(content, offset, length)
    data, begin = _scratch[:length], content.data + offset
    file.look_ahead(begin, begin + length)
    try:
        got = os.preadv(fd, (data,), begin, os.RWF_NOWAIT)
    except OSError:  # EAGAIN: not in the page cache; EOPNOTSUPP: this file system cannot say
        return None
    if got < length:
        return None
    check_unchanged(content)
    return data


def _held(held: Held, offset: int, length: int) -> bytes:
    if held.data is None:
        held.data = held.load()
    return held.data[offset : offset + length]


def _held_cached(content: Content, offset: int, length: int) -> memoryview | None:
    if content.held is None or content.held.data is None:
        return None
    check_unchanged(content)
    return memoryview(content.held.data)[offset : offset + length]


def check_unchanged(content: Content) -> None:
    """Raises StaleShard when the shard is no longer the file that was indexed."""
    if os.fstat(content.file.fd).st_ctime_ns != content.file.ctime_ns:
        raise StaleShard(f"{os.fsdecode(content.file.path)} has changed since this was opened")
