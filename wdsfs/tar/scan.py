"""Finds all members of a tar, in order, with what is wrong with it.

Knows the tar formats (v7, ustar, GNU, PAX, sparse files) and nothing of samples, indexes, caches or FUSE.
Every function of the room works on a descriptor that the caller opened, or on what stands for one
(`source.TarBytes`), reads with `pread` and keeps no state, so it may run in any thread or process.

The speed comes from two passes over each batch of headers: `walk.py` hops from header to header and looks at the
size field only; `columns.py` then parses names, times and checksums of up to `BATCH` headers at once with NumPy.
"""

from __future__ import annotations

from collections.abc import Iterator

from wdsfs.storage.source import TarBytes, size_of
from wdsfs.tar.columns import Chunk, decode
from wdsfs.tar.headers import BLOCK, MAGIC, is_header
from wdsfs.tar.magic import appearance, compression
from wdsfs.tar.problems import Damage, Problem, Problems
from wdsfs.tar.walk import Batch, walk
from wdsfs.tar.window import Window, read_fully

BATCH = 8192  # headers per chunk: 4 MiB of header bytes, so memory stays flat in shards of any size


def scan(
    fd: TarBytes,
    problems: list[Problem] | Problems,
    start: int = 0,
    limit: int | None = None,
    marks: list[int] | None = None,
) -> Iterator[Chunk]:
    """Yield the members of the tar at `fd` from byte `start` on, in order, at most `limit`.

    Damage ends the scan and is appended to `problems`; the members before it are yielded. As in tarfile and GNU
    tar the scan ends at the first block of zeros, and a tar without one is complete if it ends after a member;
    data after such an end mark, and a missing one, are reported as well. Raises OSError when the file cannot be
    read.

    With `marks` it goes on after an end mark if the first thing after the zeros is a header, as GNU tar's
    --ignore-zeros does; the offsets of these end marks are appended.
    Semantics decision: anything else there ends the shard, where GNU tar looks at block after block for the next
    header: what looks like one may be the content of a member.
    """
    size = size_of(fd)
    window = Window(fd, size)
    common: dict[bytes, bytes] = {}  # records of global PAX headers, for all members after them
    position, more, left = start, True, limit
    while more:
        batch = Batch(marks is not None)
        damage = None
        try:
            position, more = walk(window, position, BATCH if left is None else min(BATCH, left), batch, common)
        except Damage as error:
            damage, more = error.problem, False
        chunk, broken = decode(batch)
        more = more and broken is None
        # A wrong checksum ends the shard there: nothing that the walk saw after it counts.
        end = size + 1 if broken is None else broken.offset
        damage = broken or damage or batch.truncation()
        if damage is not None and damage.offset == 0 and not chunk.names and not problems:
            damage = _no_tar(fd, damage)
        problems.extend(problem for problem in batch.problems if problem.offset < end and problem != damage)
        problems.extend([damage] if damage is not None else [])
        if marks is not None:
            marks.extend(mark for mark in batch.marks if mark < end)
        if chunk.names:
            yield chunk
        if left is not None:
            left -= len(chunk.names)
            more = more and left > 0
    if limit is None and size == 0 and not problems:
        problems.append(Problem(0, "empty", "is empty (0 bytes), not a tar: download or make it again"))


def _no_tar(fd: TarBytes, damage: Problem) -> Problem:
    """Return what is wrong with a file that is damaged from its very first header on: it may be no tar.

    A tar has a sound header there, or at least the mark of one: then it is a damaged tar.
    """
    start = read_fully(fd, BLOCK, 0)
    if is_header(start) or start[MAGIC] == b"ustar":
        return damage
    packed = compression(start)
    if packed is not None:
        return Problem(0, "compressed", f"is {packed}-compressed inside: unpack it to a plain .tar first")
    return Problem(0, "not a tar", appearance(start))
