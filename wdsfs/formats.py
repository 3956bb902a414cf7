"""The indexes that DALI and wids read, as bytes: written from records, and read. (`energon` has its own.)

Nothing here opens a file. `export` puts them where the tools look, `check` compares those that lie beside a shard
with its headers. docs/format.md has the formats, and in which members the tools group differently
from wdsfs.

The writers follow wdsfs's samples, in the order of the tar. What a tool would misread raises ExportError, which
names the member; the caller knows the shard.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from wdsfs import names, shard
from wdsfs.errors import ExportError
from wdsfs.names import readable
from wdsfs.reading import PLAIN, Reading
from wdsfs.record import Record
from wdsfs.shard import HARMLESS

LINES = 1024  # lines of a text that are handed on at a time
ENTRIES = 4096  # samples whose numbers are Python objects at a time

# `splitname` of wids: the first dot behind the last slash ends the key; if there is none, one in a folder does.
_WIDS_KEY = re.compile(rb"^((?:.*/)?.*?)(\..*)$")
_BLANK = re.compile(rb"[ \t\n\v\f\r]")  # where C++'s `>>` ends a word


def dali_path(shard: bytes) -> bytes:
    """Where the DALI index of a shard lies: where `wds2idx` puts it, if the name has no further dot."""
    return shard.removesuffix(b".tar") + b".idx"


class Sample(NamedTuple):
    """A sample of a record: its plain key, and its members in the order of the tar."""

    key: bytes
    members: range


def samples(record: Record) -> Iterator[Sample]:
    """The samples of a shard in the order of the tar, as a reader of the format meets them."""
    entries = record.samples_in_order()
    within, folder = range(0), b""
    for start in range(0, len(entries), ENTRIES):
        for entry in entries[start : start + ENTRIES].tolist():
            if entry not in within:
                number = record.folder_of(entry)
                within, folder = record.folder_entries(number), record.folder_path(number)
                folder += b"/" if number else b""
            yield Sample(folder + record.entry_name[entry], record.entry_members(entry))


def refuse_damaged(record: Record) -> None:
    """Raises ExportError for a shard that is not whole: an index of what is intact would hide the rest."""
    damage = [problem for problem in record.problems if problem.kind not in HARMLESS]
    if damage:
        raise ExportError(f"the shard is damaged: {damage[0].text}")


def refuse_irregular(record: Record, tool: str) -> None:
    """Raises ExportError for a shard in which a tool that reads it by itself would find other samples."""
    if record.is_irregular:
        what = "its samples lie apart" if record.apart else "it is several tars joined"
        raise ExportError(
            f"{what}, and {tool} would find other samples in it: write it anew first, by a commit of a mount with "
            "the same options"
        )


# --- DALI --------------------------------------------------------------------------------------------------


def dali_index(record: Record) -> Iterator[bytes]:
    """The index of a shard for DALI's `readers.webdataset`, piece by piece.

    Text, as `wds2idx` writes it: a line `v1.2 N`, then for each of the N samples a line with `extension offset
    size name` for each member, where offset is that of the content in bytes, a multiple of 512. The reader splits
    lines at blanks, so when a name has one the index is of version 1.1, which is the same without names.

    Raises ExportError, possibly behind the first piece, for what the reader refuses or would misread: no samples,
    an extension that is empty or has a blank, sparse members, a damaged shard.

    Source: dali/operators/reader/loader/webdataset_loader.cc (ParseIndexFile, ParseSampleDesc), tools/wds2idx.py.
    """
    refuse_damaged(record)
    if not record.samples:
        raise ExportError("the shard has no samples, and DALI reads no shard without")
    named = not _has_blank_names(record)
    lines = [b"v1.%d %d\n" % (2 if named else 1, record.samples)]
    doubtful = _doubtful_members(record)
    for key, members in samples(record):
        words = []
        for member in members:
            extension = record.extension(member)
            if member in doubtful:
                raise ExportError(f"{readable(key + b'.' + extension)}: {doubtful[member]}")
            words.append(b"%b %d %d" % (extension, *record.extent(member)))
            if named:
                words.append(key + b"." + extension)
        lines.append(b" ".join(words) + b"\n")
        if len(lines) >= LINES:
            yield b"".join(lines)
            lines = []
    yield b"".join(lines)


def _has_blank_names(record: Record) -> bool:
    """Whether the name of a member of a sample has a blank outside of its extension."""
    texts = (record.folder_name.text, record.entry_name.text)
    if not any(map(_BLANK.search, texts)):  # nearly always; else they may be the names of strays
        return False
    return any(_BLANK.search(key) for key, _ in samples(record))


def _doubtful_members(record: Record) -> dict[int, str]:
    """Members that an index for DALI cannot have, and why not: numbers of members, samples' and strays'."""
    found = dict.fromkeys(
        record.column.get("sparse.member", ()), "a sparse member, which DALI reads as it is stored, without holes"
    )
    extensions = record.extension_name
    for number in range(len(extensions)):
        if not extensions[number] or _BLANK.search(extensions[number]):
            why = "has a blank in its extension" if extensions[number] else "has an empty extension"
            for member in np.flatnonzero(record.array("member.ext") == number).tolist():
                found[member] = f"{why}, which an index for DALI cannot have: rename it"
    return found


class _Rows(NamedTuple):
    """Where contents lie and how long they are (bytes), and the numbers of their extensions, in equal columns."""

    offsets: array[int]
    sizes: array[int]
    extensions: array[int]

    @classmethod
    def empty(cls) -> _Rows:
        return cls(array("q"), array("q"), array("q"))

    def add(self, offset: int, size: int, extension: int) -> None:
        self.offsets.append(offset)
        self.sizes.append(size)
        self.extensions.append(extension)


def dali_misfit(fd: int, index: BinaryIO, reading: Reading = PLAIN) -> str | None:
    """What is wrong with a DALI index of the shard open at `fd`; None if nothing is, or if it is something else.

    It has to name places of regular members only, with their sizes and extensions, and all members of samples. How
    it groups them is its own business: that differs between wdsfs, DALI and `wds2idx`. Raises OSError.
    """
    if index.readline(2) != b"v1":  # many things are called .idx
        return None
    index.seek(0)
    numbers: dict[bytes, int] = {}
    there, wanted = _Rows.empty(), 0
    for chunk in shard.scan(fd, [], marks=reading.marks()):
        columns = (chunk.names, chunk.types.tolist(), chunk.datas.tolist(), chunk.sizes.tolist())
        for name, kind, data, size in zip(*columns, strict=True):
            if kind == shard.REGULAR:
                split = names.split(name)
                wanted += split is not None
                extension = numbers.setdefault(split.extension, len(numbers)) if split is not None else -1
                there.add(data, size, extension)
    try:
        told, ends = _dali_rows(index, numbers)
    except ValueError as error:
        return str(error)
    offsets = np.asarray(there.offsets)
    at = np.searchsorted(offsets, told.offsets)
    inside = at < len(offsets)
    at[~inside] = 0
    own = np.asarray(there.extensions)
    if len(offsets):
        inside &= (offsets[at] == told.offsets) & (np.asarray(there.sizes)[at] == told.sizes)
        inside &= (own[at] == told.extensions) | (own[at] < 0)
    if not inside.all():
        row = int(np.flatnonzero(~inside)[0])
        line = int(np.searchsorted(ends, row, side="right")) + 2
        return (
            f"line {line} tells of {told.sizes[row]} bytes at offset {told.offsets[row]}: no such member is there"
        )
    missing = int(((own >= 0) & ~np.isin(offsets, told.offsets)).sum())
    return f"it lacks {missing} of {wanted} members" if missing else None


def dali_places(index: BinaryIO, most: int) -> Sequence[int]:
    """Where a DALI index says that contents are (bytes), unless it tells of more than `most` samples.

    Raises ValueError for something else.
    """
    words = index.readline(64).split()
    if len(words) != 2 or not words[1].isdigit() or int(words[1]) > most:
        return ()
    index.seek(0)
    return _dali_rows(index, {})[0].offsets


def _dali_rows(lines: Iterator[bytes], numbers: dict[bytes, int]) -> tuple[_Rows, array[int]]:
    """The rows of an index, and for each line how many rows end with it. Raises ValueError."""
    version, *count = next(lines, b"").split()[:2] or (b"",)
    if version not in (b"v1.1", b"v1.2") or not count or not count[0].isdigit():
        raise ValueError("line 1 is not `v1.2` or `v1.1` and a number of samples")
    width, told, ends = 4 if version == b"v1.2" else 3, _Rows.empty(), array("q")
    for number, line in enumerate(lines, 2):
        words = line.split()
        # More than 18 digits are no place in any file, and no number for a column.
        numeric = all(word.isdigit() and len(word) < 19 for at in (1, 2) for word in words[at::width])
        if not words or len(words) % width or not numeric:
            raise ValueError(f"line {number} is not `extension offset size{' name' * (width - 3)}`, repeated")
        for at in range(0, len(words), width):
            told.add(int(words[at + 1]), int(words[at + 2]), numbers.get(words[at], -2))
        ends.append(len(told.offsets))
    if len(ends) != int(count[0]):
        raise ValueError(f"line 1 tells of {int(count[0])} samples, and {len(ends)} lines follow")
    return told, ends


# --- wids --------------------------------------------------------------------------------------------------


class WidsShard(NamedTuple):
    """A row of a wids index: where the shard is, its samples, its size in bytes, its MD5 if that was computed."""

    url: str
    samples: int
    size: int
    md5: str | None = None


def wids_index(shards: Sequence[WidsShard], name: str | None = None) -> bytes:
    """The index of a set for wids: JSON with the keys of `widsindex create`, in the order of the set.

    The reader takes a relative URL from the directory of the index, and looks at `url` and `nsamples` only.

    Source: wids/wids_index.py (main_create), wids/wids_specs.py (check_shards), webdataset 0.2.
    """
    rows: list[dict[str, Any]] = []
    for one in shards:
        md5 = {} if one.md5 is None else {"md5sum": one.md5}
        rows.append({"url": one.url, **md5, "nsamples": one.samples, "filesize": one.size})
    index: dict[str, Any] = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": rows}
    if name is not None:
        index["name"] = name
    return json.dumps(index, indent=2).encode() + b"\n"


class _Seen(NamedTuple):
    """A member of a sample as a reader sees it; `first` of its sample."""

    name: bytes
    data: int
    first: bool


def wids_misreading(fd: int) -> str | None:
    """Where wids would find other samples than wdsfs in the shard open at `fd`, None if nowhere.

    wids knows headers of 512 bytes only: no ustar prefix, no long names of GNU or PAX, no numbers but octal ones;
    and it makes samples of dotfiles and `__meta__` members. Its sample numbers are off from there on.

    Raises OSError.

    Source: wids/wids_mmtar.py (MMIndexedTar), wids/wids.py (group_by_key, splitname), webdataset 0.2.
    """
    if shard.compression(os.pread(fd, shard.BLOCK, 0)) is not None:
        return "it is compressed, and wids reads plain tars only"
    theirs = _seen_by_wids(fd)
    for ours in itertools.chain(_seen_by_us(fd), (None,)):
        try:
            found = next(theirs, None)
        except (ValueError, UnicodeDecodeError) as error:
            where = f"at {readable(ours.name)}" if ours is not None else "behind the last sample"
            return f"{where} wids fails ({error})"
        if found == ours:
            continue
        if found is None or ours is None or found.data != ours.data:
            one = found if ours is None or (found is not None and found.data < ours.data) else ours
            assert one is not None  # they differ
            whose = "a member of a sample, which it is not" if one is found else "no member of a sample"
            return f"{readable(one.name)} is to wids {whose}"
        name = readable(ours.name)
        if found.name != ours.name:
            return f"{name} is called {readable(found.name)} by wids, which reads 100 bytes of a name"
        return f"{name} is to wids {'the first' if found.first else 'not the first'} member of a sample"
    return None


def _seen_by_us(fd: int) -> Iterator[_Seen]:
    last = None
    for chunk in shard.scan(fd, []):
        for name, kind, data in zip(chunk.names, chunk.types.tolist(), chunk.datas.tolist(), strict=True):
            split = names.split(name) if kind == shard.REGULAR else None
            if split is not None:
                key = split.folder + split.stem
                yield _Seen(name, data, key != last)
                last = key


def _seen_by_wids(fd: int) -> Iterator[_Seen]:
    """Raises ValueError, UnicodeDecodeError where wids does."""
    end, position, last = os.fstat(fd).st_size, 0, None
    while position < end:
        header = os.pread(fd, shard.BLOCK, position)
        name, digits = header[:100].strip(b"\0"), header[124:136].decode().strip("\0")
        name.decode()
        size = int(digits, 8) if digits else 0
        if name and name != b"././@PaxHeader" and header[156:157] in (b"0", b"\0") and b"." in name:
            match = _WIDS_KEY.match(name)
            if match is None:
                raise ValueError(f"it takes no key from {readable(name)}")
            yield _Seen(name, position + shard.BLOCK, match[1] != last)
            last = match[1]
        if not digits:
            return
        position += shard.BLOCK + (size + shard.BLOCK - 1) // shard.BLOCK * shard.BLOCK
