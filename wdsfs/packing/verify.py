"""Reads a new shard back before it gets its name, and compares it with its plan.

Either all bytes are compared with their sources, or all headers are read and the content of new members is
compared by checksum: whichever is quicker for members of this size. Then Python's tarfile reads the end.
"""

from __future__ import annotations

import contextlib
import os
import tarfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from wdsfs.errors import CommitError
from wdsfs.packing.pieces import CopiedRange, NewMember, Zeros
from wdsfs.packing.source_layout import Numbers, SourceLayout
from wdsfs.packing.steps import Output
from wdsfs.storage.durable import CHUNK
from wdsfs.storage.source import TarBytes, pread
from wdsfs.tar import headers, scan
from wdsfs.tar.columns import Chunk
from wdsfs.tar.problems import HARMLESS, Problems

DENSE = 8192  # bytes per member; with less, comparing all bytes is quicker than reading the headers

_NO_FILES = (headers.HARD_LINK, headers.CHARACTER, headers.BLOCK_DEVICE, headers.DIRECTORY, headers.FIFO)

OpenSource = Callable[[int], AbstractContextManager[TarBytes]]  # opens a source shard by its number in the set


class WrittenFile(NamedTuple):
    """A new member as written: its first byte in the shard, and the CRC-32 of its content."""

    head: int
    piece: NewMember
    checksum: int


def verify(fd: int, output: Output, written: Sequence[WrittenFile], open_source: OpenSource) -> None:
    """Verify the file at `fd` against its plan. Raises CommitError.

    A shard that is copied whole may have the damage of its source, so only its length is compared.
    """
    if os.fstat(fd).st_size != output.length:
        raise _wrong(output, "it has another length")
    if output.layouts is None:
        return
    members = sum(len(one.heads) for one in output.layouts.values())
    if output.length < DENSE * members:
        _compare(fd, output, written, open_source)
    else:
        _scan_back(fd, output, written)
    _read_end(fd, output)


def _compare(fd: int, output: Output, written: Sequence[WrittenFile], open_source: OpenSource) -> None:
    """Compare all bytes with their sources. Each piece must start with a header, or at the end mark."""
    checksums = {one.head: one.checksum for one in written}
    at = 0
    with contextlib.ExitStack() as stack:
        opened: dict[int, TarBytes] = {}
        for piece in output.pieces:
            if not isinstance(piece, Zeros) and not _may_start(os.pread(fd, headers.BLOCK, at)):
                raise _wrong(output, f"there is no header at byte {at}")
            if isinstance(piece, CopiedRange):
                if piece.shard not in opened:
                    opened[piece.shard] = stack.enter_context(open_source(piece.shard))
                same = _is_same(opened[piece.shard], piece.start, fd, at, piece.length)
            elif isinstance(piece, NewMember):
                head = piece.header
                same = os.pread(fd, len(head), at) == head
                same = same and _checksum(fd, at + len(head), piece.size) == checksums[at]
            else:
                same = not any(os.pread(fd, piece.length, at))
            if not same:
                raise _wrong(output, f"the {piece.length} bytes from byte {at} on are others")
            at += piece.length


def _is_same(one: TarBytes, start: int, other: int, at: int, length: int) -> bool:
    """True if two files have the same bytes from these places on."""
    for done in range(0, length, CHUNK):
        count = min(CHUNK, length - done)
        if pread(one, count, start + done) != os.pread(other, count, at + done):
            return False
    return True


def _checksum(fd: int, start: int, size: int) -> int:
    checksum = 0
    for done in range(0, size, CHUNK):
        checksum = zlib.crc32(os.pread(fd, min(CHUNK, size - done), start + done), checksum)
    return checksum


def _may_start(block: bytes) -> bool:
    return headers.is_header(block) or not any(block)


def _scan_back(fd: int, output: Output, written: Sequence[WrittenFile]) -> None:
    """Read all headers: every member has to be in its place, with its size, and there must be no other.

    For new members name, time and content are compared, too; copied ranges were copied by the kernel.
    """
    layouts = output.layouts or {}
    problems = Problems()
    heads, sizes = _expected(output, layouts)
    new = {one.head: one for one in written}
    at = 0
    for chunk in scan.scan(fd, problems):
        rows = np.flatnonzero(~np.isin(chunk.types, _NO_FILES))
        stop = at + len(rows)
        same = np.array_equal(chunk.heads[rows], heads[at:stop])
        if not same or not np.array_equal(chunk.sizes[rows], sizes[at:stop]):
            raise _wrong(output, "its members are not where they should be")
        for row in rows[np.isin(chunk.heads[rows], list(new))].tolist() if new else ():
            _verify_new(fd, output, chunk, row, new.pop(int(chunk.heads[row])))
        at = stop
    damage = [problem for problem in problems.listed() if problem.kind not in HARMLESS]
    if at != len(heads) or new or damage:
        raise _wrong(output, damage[0].text if damage else "members are missing")


def _expected(output: Output, layouts: Mapping[int, SourceLayout]) -> tuple[Numbers, Numbers]:
    """Return the first bytes of the members of an output, and their sizes, in order."""
    heads: list[Any] = [np.zeros(0, np.int64)]
    sizes: list[Any] = [np.zeros(0, np.int64)]
    done = 0
    for piece in output.pieces:
        if isinstance(piece, CopiedRange):
            source = layouts[piece.shard]
            first, last = np.searchsorted(source.heads, [piece.start, piece.end])
            heads.append(source.heads[first:last] + (done - piece.start))
            sizes.append(source.sizes[first:last])
        elif isinstance(piece, NewMember):
            heads.append([done])
            sizes.append([piece.size])
        done += piece.length
    return np.concatenate(heads), np.concatenate(sizes)


def _verify_new(fd: int, output: Output, chunk: Chunk, row: int, wanted: WrittenFile) -> None:
    piece, at = wanted.piece, int(chunk.datas[row])
    if chunk.names[row] != piece.name or int(chunk.mtimes[row]) != piece.mtime * 10**9:
        raise _wrong(output, f"{os.fsdecode(piece.name)} has another name or time in it")
    if _checksum(fd, at, piece.size) != wanted.checksum:
        raise _wrong(output, f"{os.fsdecode(piece.name)} has other content in it")


def _read_end(fd: int, output: Output) -> None:
    """Read the end of the shard as Python's tarfile does, and so webdataset; other readers are less strict.

    There an extension header without a member is an error, by which the reader also loses the last sample.
    """
    try:
        with open(fd, "rb", closefd=False) as file:
            file.seek(_end_of_members(output))
            with tarfile.open(fileobj=file, mode="r:") as archive:
                while archive.next() is not None:
                    pass
    except (tarfile.TarError, RecursionError) as error:
        raise _wrong(output, f"Python's tarfile, and so webdataset, fails at its end: {error}") from None


def _end_of_members(output: Output) -> int:
    """Return the byte after the last regular member of an output and its padding."""
    at = output.length
    for piece in reversed(output.pieces):
        if isinstance(piece, NewMember):
            return at
        at -= piece.length
        if isinstance(piece, CopiedRange):
            source = (output.layouts or {})[piece.shard]
            last = int(np.searchsorted(source.heads, piece.end)) - 1
            if last >= 0 and source.heads[last] >= piece.start:
                return at + int(source.ends[last]) - piece.start
    return 0


def _wrong(output: Output, text: str) -> CommitError:
    return CommitError(f"{os.fsdecode(output.target)}: what was written cannot be read back: {text}")
