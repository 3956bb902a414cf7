"""The index that DALI reads, as bytes: written from records, and checked.

Opens no file. `export` writes the index where DALI looks. `lint` compares an existing index with the headers of
its shard. docs/reference/formats.md has the format, and the members that the tools group differently from wdsfs.

The writer follows wdsfs's samples, in the order of the tar. A member that DALI would misread raises ExportError,
which names it; the caller knows the shard.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import numpy as np

from wdsfs import names
from wdsfs.errors import ExportError
from wdsfs.index.record import Record
from wdsfs.names import PLAIN, Reading, readable
from wdsfs.tar import headers, scan
from wdsfs.tar.problems import HARMLESS, Problems

ENTRIES = 4096  # samples whose numbers are Python objects at a time

_BLANK = re.compile(rb"[ \t\n\v\f\r]")  # where C++'s `>>` ends a word


class DaliRows(NamedTuple):
    """Columns of equal length: offsets and sizes of contents (bytes), and the numbers of their extensions."""

    offsets: array[int]
    sizes: array[int]
    extensions: array[int]

    @classmethod
    def empty(cls) -> DaliRows:
        """Return columns without rows."""
        return cls(array("q"), array("q"), array("q"))

    def add(self, offset: int, size: int, extension: int) -> None:
        """Add a row."""
        self.offsets.append(offset)
        self.sizes.append(size)
        self.extensions.append(extension)


class DaliSample(NamedTuple):
    """A sample of a record: its plain key, and its members in the order of the tar."""

    key: bytes
    members: range


def dali_path(shard: bytes) -> bytes:
    """Return the path of the DALI index of a shard: where `wds2idx` puts it, if the name has no further dot."""
    return shard.removesuffix(b".tar") + b".idx"


def samples(record: Record) -> Iterator[DaliSample]:
    """Yield the samples of a shard in the order of the tar."""
    entries = record.samples_in_order()
    within, folder = range(0), b""
    for start in range(0, len(entries), ENTRIES):
        for entry in entries[start : start + ENTRIES].tolist():
            if entry not in within:
                number = record.folder_of(entry)
                within, folder = record.folder_entries(number), record.folder_path(number)
                folder += b"/" if number else b""
            yield DaliSample(folder + record.entry_name[entry], record.entry_members(entry))


# --- DALI --------------------------------------------------------------------------------------------------


def dali_index(record: Record, shown: bytes | None = None) -> bytes:
    """Return the index of a shard for DALI's `readers.webdataset`; b"" if it would list no sample.

    `shown` has 1 for each member of the samples to list; None lists all.

    Text, as `wds2idx` writes it: a line `v1.2 N`, then for each of the N samples a line with `extension offset
    size name` for each member, where offset is that of the content in bytes, a multiple of 512. The reader splits
    lines at blanks, so when a name has one the index is of version 1.1, which is the same without names.

    Raises ExportError for what the reader would misread: an empty extension or one with a blank, sparse members,
    a damaged shard.

    Source: dali/operators/reader/loader/webdataset_loader.cc (ParseIndexFile, ParseSampleDesc), tools/wds2idx.py.
    """
    damage = [problem for problem in record.problems if problem.kind not in HARMLESS]
    if damage:  # an index of the intact part would hide the rest
        raise ExportError(f"the shard is damaged: {damage[0].text}")
    named = not _has_blank_names(record)
    doubtful = _doubtful_members(record)
    lines = []
    for key, members in samples(record):
        if shown is not None and not shown[members.start]:
            continue
        words = []
        for member in members:
            extension = record.extension(member)
            if member in doubtful:
                raise ExportError(f"{readable(key + b'.' + extension)}: {doubtful[member]}")
            words.append(b"%b %d %d" % (extension, *record.extent(member)))
            if named:
                words.append(key + b"." + extension)
        lines.append(b" ".join(words) + b"\n")
    return b"".join([b"v1.%d %d\n" % (2 if named else 1, len(lines)), *lines]) if lines else b""


def _has_blank_names(record: Record) -> bool:
    """Return True if the name of a member of a sample has a blank outside of its extension."""
    texts = (record.folder_name.text, record.entry_name.text)
    if not any(map(_BLANK.search, texts)):  # nearly always; else they may be the names of strays
        return False
    return any(_BLANK.search(key) for key, _ in samples(record))


def _doubtful_members(record: Record) -> dict[int, str]:
    """Return the members that an index for DALI cannot have, by number, with the reason."""
    reasons = dict.fromkeys(
        record.sparse_members().tolist(), "a sparse member, which DALI reads as it is stored, without holes"
    )
    extensions, of_members = record.extension_name, record.array("member.ext")
    odd = [n for n in range(len(extensions)) if not extensions[n] or _BLANK.search(extensions[n])]
    for member in np.flatnonzero(np.isin(of_members, odd)).tolist():
        why = "has a blank in its extension" if extensions[of_members[member]] else "has an empty extension"
        reasons[member] = f"{why}, which an index for DALI cannot have: rename it"
    return reasons


def dali_misfit(fd: int, index: BinaryIO, reading: Reading = PLAIN) -> str | None:
    """Return the fault of a DALI index of the shard open at `fd`; None for a right index and for another file.

    The index must name places of regular members only, with their sizes and extensions, and all members of
    samples. Groups of members are not checked: they differ between wdsfs, DALI and `wds2idx`. Raises OSError.
    """
    if index.readline(2) != b"v1":  # other files are called .idx, too
        return None
    index.seek(0)
    numbers: dict[bytes, int] = {}
    there, expected = DaliRows.empty(), 0
    for chunk in scan.scan(fd, Problems(), marks=reading.marks()):
        columns = (chunk.names, chunk.types.tolist(), chunk.datas.tolist(), chunk.sizes.tolist())
        for name, kind, data, size in zip(*columns, strict=True):
            if kind == headers.REGULAR:
                split = names.split(name, last_dot=reading.last_dot)
                expected += split is not None
                extension = numbers.setdefault(split.extension, len(numbers)) if split is not None else -1
                there.add(data, size, extension)
    try:
        rows, ends = _parse_rows(index, numbers)
    except ValueError as error:
        return str(error)
    offsets = np.asarray(there.offsets)
    at = np.searchsorted(offsets, rows.offsets)
    inside = at < len(offsets)
    at[~inside] = 0
    own = np.asarray(there.extensions)
    if len(offsets):
        inside &= (offsets[at] == rows.offsets) & (np.asarray(there.sizes)[at] == rows.sizes)
        inside &= (own[at] == rows.extensions) | (own[at] < 0)
    if not inside.all():
        row = int(np.flatnonzero(~inside)[0])
        line = int(np.searchsorted(ends, row, side="right")) + 2
        return f"line {line} names {rows.sizes[row]} bytes at offset {rows.offsets[row]}: there is no such member"
    missing = int(((own >= 0) & ~np.isin(offsets, rows.offsets)).sum())
    return f"it lacks {missing} of {expected} members" if missing else None


def _parse_rows(lines: Iterator[bytes], numbers: dict[bytes, int]) -> tuple[DaliRows, array[int]]:
    """Return the rows of an index, and for each line the number of rows up to its end. Raises ValueError."""
    version, *count = next(lines, b"").split()[:2] or (b"",)
    if version not in (b"v1.1", b"v1.2") or not count or not count[0].isdigit():
        raise ValueError("line 1 is not `v1.2` or `v1.1` and a number of samples")
    width, rows, ends = 4 if version == b"v1.2" else 3, DaliRows.empty(), array("q")
    for number, line in enumerate(lines, 2):
        words = line.split()
        # More than 18 digits are no offset in any file, and do not fit a column.
        numeric = all(word.isdigit() and len(word) < 19 for at in (1, 2) for word in words[at::width])
        if not words or len(words) % width or not numeric:
            raise ValueError(f"line {number} is not `extension offset size{' name' * (width - 3)}`, repeated")
        for at in range(0, len(words), width):
            rows.add(int(words[at + 1]), int(words[at + 2]), numbers.get(words[at], -2))
        ends.append(len(rows.offsets))
    if len(ends) != int(count[0]):
        raise ValueError(f"line 1 counts {int(count[0])} samples, and {len(ends)} lines follow")
    return rows, ends
