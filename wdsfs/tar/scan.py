"""The scan of a tar: finds all members, in order, and reports what is wrong; reads one whose place is known.

Knows the tar formats (v7, ustar, GNU, PAX, sparse files) and nothing of samples, indexes, caches or FUSE. Every
function of the room works on a descriptor that the caller opened, or on a `source.TarBytes` in its place. It reads
with `pread` and keeps no state, so it may run in any thread or process.

The speed comes from two passes over each batch of headers: `walk` hops from header to header and looks at the type
and the size field only. Then `columns.py` parses names, times and checksums of up to `BATCH` headers at once with
NumPy. A header that this fast path does not understand takes the slow one, `take_member`; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from wdsfs.errors import CorruptShard, counted
from wdsfs.source import TarBytes, size_of
from wdsfs.tar import headers, sparse
from wdsfs.tar.columns import Batch, Chunk, decode
from wdsfs.tar.headers import (
    BLOCK,
    EXTENSIONS,
    PAX_GLOBAL,
    REGULAR,
    ZERO_BLOCK,
    Extended,
    Window,
    padded,
    read_fully,
)
from wdsfs.tar.problems import Damage, Problem, Problems
from wdsfs.tar.sparse import Segments
from wdsfs.tar.streams import appearance, compression

EXTENSION_MAX = 1 << 20  # bytes of PAX and GNU headers before one member; most hold a path and a few numbers
_COMMON = (b"path", b"linkpath", b"mtime")  # records of global PAX headers that change members
# Bytes of such a record. Each member gets a copy: with no more than its header has, a shard cannot grow by that.
COMMON_MAX = BLOCK
WEIGHT_MAX = 1 << 24  # bytes of extension headers and sparse maps per chunk; a fuller one ends early
BATCH = 8192  # headers per chunk: 4 MiB of header bytes, so memory stays flat in shards of any size


def walk(window: Window, position: int, batch: Batch, common: dict[bytes, bytes]) -> tuple[int, bool]:
    """Take up to `BATCH` members from `position` on; return the next position and whether more may follow.

    Raises Damage where the tar makes no sense any more.
    """
    blocks, heads, datas, sizes = batch.headers, batch.heads, batch.datas, batch.sizes
    end, limit = window.size, BATCH
    data, base = window.data, window.base
    while len(blocks) < limit and position < end:
        index = position - base
        if index < 0 or index + BLOCK > len(data):
            index = window.seek(position)
            data, base = window.data, window.base
        kind = data[index + 156]
        terminator = data[index + 135]
        if (kind == REGULAR) and not common and (terminator == 0 or terminator == 32):
            digits = data[index + 124 : index + 135]
            if digits.isdigit():
                try:
                    size = int(digits, 8)
                except ValueError:
                    raise _bad_header(position) from None
                blocks.append(data[index : index + BLOCK])
                heads.append(position)
                position += BLOCK
                datas.append(position)
                sizes.append(size)
                position += (size + 511) & ~511
                continue
        stop = take_member(window, position, batch, common)
        if stop is None:
            return position, False
        position = stop
        data, base = window.data, window.base
        if batch.weight > WEIGHT_MAX:
            break
    if position >= end and blocks:
        _report_end(batch, end)
    return position, position < end


def _report_end(batch: Batch, end: int) -> None:
    """Report that the file ends at byte `end` with its last member, or inside it, and not with an end mark."""
    head, stored = batch.heads[-1], batch.sizes[-1]
    segments = batch.sparse.get(len(batch.heads) - 1)
    if segments is not None:
        stored = sum(length for _, length in segments)
    missing = batch.datas[-1] + stored - end
    if missing > 0:
        short = counted(missing, "byte")
        text = f"the file ends at byte {end}, {short} before the end of the member at offset {head}"
        batch.problems.append(Problem(head, "truncated", text))
    else:
        text = "the file ends without an end-of-archive mark: perhaps it is cut off after a whole member"
        batch.problems.append(Problem(end, "no end mark", text))


def _bad_header(position: int) -> Damage:
    return Damage(position, "damaged", f"the header at offset {position} is damaged")


def take_member(window: Window, position: int, batch: Batch, common: dict[bytes, bytes]) -> int | None:
    """Take one member of any kind with its extension headers, or an end mark that is passed.

    Returns the next position, None at the end. `common` has the records of global PAX headers so far, and gets the
    records that this function reads.
    """
    head = start = position
    extended: Extended | None = None
    while True:
        index = window.seek(position)
        header = window.data[index : index + BLOCK]
        kind = header[156]
        if kind == PAX_GLOBAL:
            body, position = _read_extension(window, position, start, batch)
            # Only records that change a member count (git archives start with a mere comment): the others would
            # send every member of the shard down this slow path.
            common.update(_common_records(body, position))
            head = head if extended else position
        elif kind in EXTENSIONS:
            body, position = _read_extension(window, position, start, batch)
            extended = extended or Extended()
            extended.add(kind, body, head)
        elif header == ZERO_BLOCK:
            if extended is not None:
                raise Damage(head, "damaged", f"extension header at offset {head} without a member after it")
            if position > start:
                batch.problems.append(_trailing_header(start))
            batch.weight += position + BLOCK - start
            return _after_mark(window, position, batch)
        else:
            break
    batch.weight += position - start
    if common or extended is not None:
        extended = extended or Extended()
        extended.apply([*common.items(), *extended.records], start)
    why = None if extended is None else headers.unusable(extended)
    if why is not None:
        batch.problems.append(Problem(head, "unusable name", f"the member at offset {head} is left out: {why}"))
        batch = Batch()  # only where it ends counts
    return _take(window, head, position, header, extended, batch)


def _common_records(body: bytes, position: int) -> list[tuple[bytes, bytes]]:
    """Return the records that change members of the global PAX header that ends at `position`. Raises Damage."""
    records = [record for record in headers.pax_records(body, position) if record[0] in _COMMON]
    for key, value in records:
        if len(value) > COMMON_MAX:
            text = (
                f"the global PAX header that ends at offset {position} sets for all members after it a "
                f"{key.decode()} of {len(value):,} bytes; the limit is {COMMON_MAX}"
            )
            raise Damage(position, "damaged", text)
    return records


def _read_extension(window: Window, position: int, start: int, batch: Batch) -> tuple[bytes, int]:
    """Return the body of the extension header at `position`, and the next position.

    `start` is the position of the first extension header of the member. The window has the header already.
    """
    header = window.data[position - window.base : position - window.base + BLOCK]
    batch.extras.append(header)
    batch.extra_offsets.append(position)
    size = headers.number_of(header[124:136])
    if size is None or not 0 <= size <= EXTENSION_MAX - (position - start):
        raise Damage(
            position, "damaged", f"the extension header at offset {position} has an impossible size ({size})"
        )
    index = window.seek(position + BLOCK, size)
    return window.data[index : index + size], position + BLOCK + padded(size)


def _trailing_header(start: int) -> Problem:
    text = (
        f"no member follows the global PAX header at offset {start}: Python's tarfile and webdataset "
        "raise ReadError there; any commit that changes the shard leaves it out"
    )
    return Problem(start, "trailing header", text)


def _take(window: Window, head: int, position: int, header: bytes, extended: Extended | None, batch: Batch) -> int:
    """Add the member whose own header is at `position`; return where the next one starts."""
    row, kind = len(batch.headers), header[156]
    stored = (
        extended.size if extended is not None and extended.size is not None else headers.number_of(header[124:136])
    )
    data = position + BLOCK
    # Semantics decision, as in tarfile: links, directories, devices and fifos have no payload, whatever
    # their size field says; a v7 regular member whose name ends in "/" is a directory.
    dataless = kind in headers.DATALESS
    if kind == headers.OLD_REGULAR and headers.own_name(header, extended).endswith(b"/"):
        dataless = True
        batch.old_directories.append(row)
    if dataless:
        stored = 0
    if stored is None or not 0 <= stored <= headers.FILE_SIZE_MAX - data:
        raise _bad_header(position)
    size = stored
    following = data + padded(stored)
    segments: Segments | None = None
    if kind == headers.GNU_SPARSE:
        segments, size, data = sparse.gnu_map(window, position, header)
        following = data + padded(stored)
    elif extended is not None and extended.records and not dataless:
        sparse_map = sparse.pax_map(window, extended.records, data)
        if sparse_map is not None:
            segments, size, shift = sparse_map
            data += shift
    if segments is not None:
        sparse.check_segments(segments, size, following - data, position)
        batch.sparse[row] = segments
        batch.weight += 16 * len(segments)
    batch.headers.append(header)
    batch.heads.append(head)
    batch.datas.append(data)
    batch.sizes.append(size)
    if extended is not None:
        extended.records = []  # not needed any more, and those of a whole chunk may be large
        batch.extended[row] = extended
    return following


def _after_mark(window: Window, position: int, batch: Batch) -> int | None:
    """Return where to read on after the end mark at `position`, None for nowhere; report what is not read."""
    first = headers.skip_zeros(window.fd, position + BLOCK, window.size)
    if first == window.size:
        return None
    block = first - first % BLOCK
    joined = headers.is_header(read_fully(window.fd, BLOCK, block))
    if joined and batch.ignore_zeros:
        batch.marks.append(position)
        return block
    why = "; no header is there, so they are not read" if batch.ignore_zeros else ""
    why = why or "; as in tar and webdataset they are not read"
    rest = window.size - first
    text = (
        f"{counted(rest, 'byte')} from offset {first} on, after the end-of-archive mark at offset {position}"
        f"{why}{' (another tar: --ignore-zeros reads it)' if joined else ''}"
    )
    batch.problems.append(Problem(first, "behind end mark", text))
    return None


def scan(fd: TarBytes, problems: list[Problem] | Problems, marks: list[int] | None = None) -> Iterator[Chunk]:
    """Yield the members of the tar at `fd`, in order.

    Damage ends the scan and is appended to `problems`; the members before it are yielded. As in tarfile and GNU
    tar the scan ends at the first block of zeros. A tar without such an end mark is complete if it ends after a
    member. Data after an end mark, and a missing end mark, are reported as well. Raises OSError when the file
    cannot be read.

    With `marks` it goes on after an end mark if the first thing after the zeros is a header, as GNU tar's
    --ignore-zeros does; the offsets of these end marks are appended. Semantics decision: anything else there ends
    the shard, where GNU tar searches block after block for the next header: a block that looks like a header may
    be the content of a member.
    """
    size = size_of(fd)
    window = Window(fd, size)
    common: dict[bytes, bytes] = {}  # records of global PAX headers, for all members after them
    position, more = 0, True
    while more:
        batch = Batch(ignore_zeros=marks is not None)
        damage = None
        try:
            position, more = walk(window, position, batch, common)
        except Damage as error:
            damage, more = error.problem, False
        chunk, broken = decode(batch)
        more = more and broken is None
        # A wrong checksum ends the shard there: nothing that the walk saw after it counts.
        end = size + 1 if broken is None else broken.offset
        truncation = next((problem for problem in batch.problems if problem.kind == "truncated"), None)
        damage = broken or damage or truncation
        if damage is not None and damage.offset == 0 and not chunk.names and not problems:
            damage = _no_tar(fd, damage)
        problems.extend(problem for problem in batch.problems if problem.offset < end and problem != damage)
        problems.extend([damage] if damage is not None else [])
        if marks is not None:
            marks.extend(mark for mark in batch.marks if mark < end)
        if chunk.names:
            yield chunk
    if size == 0 and not problems:
        problems.append(Problem(0, "empty", "is empty (0 bytes), not a tar: download or make it again"))


def _no_tar(fd: TarBytes, damage: Problem) -> Problem:
    """Return the problem of a file that is damaged from its first header on: perhaps it is not a tar.

    A damaged tar has a sound header there, or at least the mark of one.
    """
    start = read_fully(fd, BLOCK, 0)
    if headers.is_header(start) or start[headers.MAGIC] == b"ustar":
        return damage
    packed = compression(start)
    if packed is not None:
        return Problem(0, "compressed", f"is {packed}-compressed inside: unpack it to a plain .tar first")
    return Problem(0, "not a tar", appearance(start))


class Placed(NamedTuple):
    """A member by its own headers: raw name, first byte of its content, size (bytes)."""

    name: bytes
    data: int
    size: int


def placed(fd: TarBytes, head: int) -> Placed:
    """Return the member whose first header is at byte `head`. Raises CorruptShard."""
    batch = Batch()
    try:
        take_member(Window(fd, size_of(fd), headers.WINDOW_MIN), head, batch, {})
    except Damage as error:
        raise CorruptShard(error.problem.text) from None
    if not batch.headers or not all(map(headers.is_header, [*batch.extras, *batch.headers])):
        raise CorruptShard(f"no member at offset {head}")
    header, extended = batch.headers[0], batch.extended.get(0)
    name = headers.own_name(header, extended)
    if (extended is None or extended.name is None) and header[257:263] == b"ustar\0" and header[345]:
        name = header[345:500].split(b"\0", 1)[0] + b"/" + name
    return Placed(name, batch.datas[0], batch.sizes[0])


def end_of(fd: TarBytes, head: int) -> int:
    """Return the offset after the member whose first header is at byte `head`, and after its padding.

    It may be after the end of a file that was written without its last padding. Raises CorruptShard.
    """
    try:
        end = take_member(Window(fd, size_of(fd), headers.WINDOW_MIN), head, Batch(), {})
    except Damage as error:
        raise CorruptShard(error.problem.text) from None
    if end is None:
        raise CorruptShard(f"no member at offset {head}")
    return end


def split_gap(fd: TarBytes, start: int, end: int) -> Iterator[tuple[int, int, frozenset[bytes] | None]]:
    """Yield (start, end, keywords) of each part from byte `start` to the end mark, or to byte `end`.

    A part is a member with its headers (keywords None), or a global PAX header, which sets these keywords for all
    members after it. Raises CorruptShard.
    """
    while start < end:
        header = read_fully(fd, BLOCK, start)
        if len(header) < BLOCK or header == ZERO_BLOCK:
            return
        keywords = None
        if header[156] == PAX_GLOBAL:
            size = headers.number_of(header[124:136]) or 0
            following = start + BLOCK + padded(size)
            try:
                keywords = frozenset(
                    key for key, _ in headers.pax_records(read_fully(fd, size, start + BLOCK), following)
                )
            except Damage as error:
                raise CorruptShard(error.problem.text) from None
        else:
            following = end_of(fd, start)
        yield start, following, keywords
        start = following


def end_of_zeros(fd: TarBytes, start: int, end: int) -> int:
    """Return the offset of the first block after the zero block at `start` that is not zeros, at most `end`."""
    first = headers.skip_zeros(fd, start + BLOCK, end)
    return min(first - first % BLOCK, end) if first < end else end


def global_headers(fd: TarBytes, head: int, data: int) -> list[tuple[int, int]]:
    """Return (start, end) of the global PAX headers between the first header of a member and its content."""
    places = []
    while head < data - BLOCK:
        header = read_fully(fd, BLOCK, head)
        if header[156] not in EXTENSIONS:  # the member's own header; a sparse map may follow
            break
        following = head + BLOCK + padded(headers.number_of(header[124:136]) or 0)
        if header[156] == PAX_GLOBAL:
            places.append((head, following))
        head = following
    return places
