"""One member of a tar, by where it lies: its content, its name, its end."""

from __future__ import annotations

from typing import NamedTuple

from wdsfs.errors import CorruptShard
from wdsfs.storage.source import TarBytes, size_of
from wdsfs.tar.extension_headers import own_name
from wdsfs.tar.headers import is_header
from wdsfs.tar.problems import Damage
from wdsfs.tar.sparse import Extents, read_extents
from wdsfs.tar.walk import Batch, take_member
from wdsfs.tar.window import WINDOW_MIN, Window, read_fully


def read(fd: TarBytes, data: int, size: int, extents: Extents | None, offset: int, length: int) -> bytes:
    """Return bytes `offset` to `offset + length` of a member of `size` bytes whose payload starts at byte `data`.

    Returns less only at the end of the member. Raises CorruptShard if the shard ends before that: with fewer
    bytes, the kernel would report the end of the file, and the reader would not notice the damage.
    """
    length = max(min(length, size - offset), 0)
    if extents is not None:
        return read_extents(fd, data, extents, offset, length)
    content = read_fully(fd, length, data + offset)
    if len(content) < length:
        raise CorruptShard(f"the shard ends at byte {data + offset + len(content)}, inside a member")
    return content


class Placed(NamedTuple):
    """A member by its own headers: raw name, first byte of its content, size (bytes)."""

    name: bytes
    data: int
    size: int


def read_name(fd: TarBytes, head: int) -> bytes:
    """Return the raw name of the member whose first header is at byte `head`. Raises CorruptShard."""
    return placed(fd, head).name


def placed(fd: TarBytes, head: int) -> Placed:
    """Return the member whose first header is at byte `head`. Raises CorruptShard."""
    batch = Batch()
    try:
        take_member(Window(fd, size_of(fd), WINDOW_MIN), head, batch, {})
    except Damage as error:
        raise CorruptShard(error.problem.text) from None
    if not batch.headers or not all(map(is_header, [*batch.extras, *batch.headers])):
        raise CorruptShard(f"no member at offset {head}")
    header, extended = batch.headers[0], batch.extended.get(0)
    name = own_name(header, extended)
    if (extended is None or extended.name is None) and header[257:263] == b"ustar\0" and header[345]:
        name = header[345:500].split(b"\0", 1)[0] + b"/" + name
    return Placed(name, batch.datas[0], batch.sizes[0])


def end_of(fd: TarBytes, head: int) -> int:
    """Return the offset after the member whose first header is at byte `head`, and after its padding.

    It may be after the end of a file that was written without its last padding. Raises CorruptShard.
    """
    try:
        end = take_member(Window(fd, size_of(fd), WINDOW_MIN), head, Batch(), {})
    except Damage as error:
        raise CorruptShard(error.problem.text) from None
    if end is None:
        raise CorruptShard(f"no member at offset {head}")
    return end
