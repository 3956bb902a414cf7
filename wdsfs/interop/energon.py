"""The indexes of Megatron-Energon beside shards: where they lie, and whether a `.tar.idx` fits its shard.

Energon finds a sample by the offset of its first header, and groups the members after it by their raw names. So
the offsets here come from the headers of a shard, by Energon's own rule, not from wdsfs's records.
`energon prepare` writes these indexes. docs/reference/formats.md shows the file.

Sources: megatron-energon 7.4.1, flavors/webdataset/{indexing,itar,itar_reader,structs}.py.
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Iterator
from typing import BinaryIO

from wdsfs import names
from wdsfs.errors import ExportError, counted
from wdsfs.names import readable
from wdsfs.source import TarBytes
from wdsfs.tar import headers, scan
from wdsfs.tar.columns import Chunk
from wdsfs.tar.problems import HARMLESS, Problems

FOLDER = b".nv-meta"

# `split_name_re` of config.py. Unlike `names.split` it takes `d/.hidden` for a sample with the key `d/`, and lets
# no line feed into a folder. The reader refuses a sample if a member of another sample lies within its bytes.
_SPLIT = re.compile(rb"^((?:.*/|)[^.]+)[.]([^/]*)$")


def energon_path(shard: bytes) -> bytes:
    """Return the path at which Energon looks for the offsets of a shard called *.tar."""
    return shard + b".idx"


def database_path(directory: bytes) -> bytes:
    """Return where the database of a dataset is that has this directory; the path of no file if there is none.

    The dataset is the nearest directory, from this one upwards, that has metadata.
    """
    place = directory
    while place != os.path.dirname(place) and not os.path.isdir(os.path.join(place, FOLDER)):
        place = os.path.dirname(place)
    return os.path.join(place, FOLDER, b"index.sqlite")


def borders(fd: TarBytes) -> array[int]:
    """Return the offsets in a `.tar.idx` of the shard open at `fd`; none if it has no samples.

    They are those of the first header of each sample, extension headers included, and that of the end mark.
    Raises ExportError where Energon would skip or misread something: a damaged shard (also after its last sample),
    an empty file, sparse members, names that are not UTF-8. Raises OSError when the file cannot be read.
    """
    problems = Problems()
    key, last = None, -1
    offsets = array("Q")
    for chunk in scan.scan(fd, problems):
        for own, head in _keys(chunk):
            if own != key:
                key = own
                offsets.append(head)
        last = int(chunk.heads[-1])
    damage = [problem for problem in problems.listed() if problem.kind not in HARMLESS]
    if damage:
        raise ExportError(f"the shard is damaged: {damage[0].text}")
    if offsets:
        offsets.append(scan.end_of(fd, last))
    return offsets


def _keys(chunk: Chunk) -> Iterator[tuple[str, int]]:
    """Yield the key and the offset of the first header of each member that Energon takes into a sample."""
    columns = (chunk.names, chunk.types.tolist(), chunk.heads.tolist())
    for row, (name, kind, head) in enumerate(zip(*columns, strict=True)):
        match = _SPLIT.match(name) if kind == headers.REGULAR and not names.is_meta(name) else None
        if match is None:
            continue
        if row in chunk.sparse:
            raise ExportError(
                f"{readable(name)}: a sparse member, which Energon reads as it is stored, without holes"
            )
        try:
            name.decode()
        except UnicodeDecodeError:
            raise ExportError(f"{readable(name)}: the name is not UTF-8, and Energon cannot store it") from None
        yield match[1].decode(), head


def misfit(fd: int, index: BinaryIO) -> str | None:
    """Return the fault of a `.tar.idx` of the shard open at `fd`; None if it has none. Raises OSError."""
    try:
        right = borders(fd)
    except ExportError as error:
        return f"the shard cannot be read by Energon: {error}"
    data = index.read()
    if data == right.tobytes():
        return None
    count, expected = max(len(data) // right.itemsize - 1, 0), max(len(right) - 1, 0)
    if count != expected:
        return f"it has {count} samples, the shard {expected}"
    offsets = array("Q", data[: len(right) * right.itemsize])
    wrong = next((at for at, pair in enumerate(zip(offsets, right, strict=True)) if pair[0] != pair[1]), None)
    if wrong is None:
        return f"its {counted(len(data), 'byte')} are not a whole number of offsets"
    what = f"sample {wrong} starts" if wrong < expected else "the samples end"
    return f"it has offset {offsets[wrong]} where {what} at {right[wrong]}"
