"""The metadata of Megatron-Energon as bytes: `.nv-meta`, a `.tar.idx` beside each shard, small texts.

Energon finds a sample by the offset of its first header, and groups the members after it by their raw names. So
the rows here come from the headers of a shard, by Energon's own rule, as `energon prepare` writes them, not from
wdsfs's records. docs/reference/formats.md shows the files. `export` puts them in their places.

Sources: megatron-energon 7.4.1, flavors/webdataset/{config,prepare,indexing,itar,itar_reader,structs}.py.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple

from wdsfs import names
from wdsfs.errors import ExportError, counted
from wdsfs.names import readable
from wdsfs.storage.source import TarBytes
from wdsfs.tar import headers, member_reader, scan
from wdsfs.tar.problems import HARMLESS, Problems

FOLDER = b".nv-meta"

# `split_name_re` of config.py. Unlike `names.split` it takes `d/.hidden` for a sample with the key `d/`, and lets
# no line feed into a folder; the reader refuses a sample in whose bytes another one's member lies.
_SPLIT = re.compile(rb"^((?:.*/|)[^.]+)[.]([^/]*)$")

_TABLES = """
CREATE TABLE samples (tar_file_id INTEGER NOT NULL, sample_key TEXT NOT NULL UNIQUE, sample_index INTEGER NOT NULL,
    byte_offset INTEGER, byte_size INTEGER);
CREATE TABLE sample_parts (tar_file_id INTEGER, sample_index INTEGER, part_name TEXT, content_byte_offset INTEGER,
    content_byte_size INTEGER);
"""
_INDEXES = """
CREATE INDEX idx_samples_by_tar_and_idx ON samples(tar_file_id, sample_index);
CREATE INDEX idx_sample_parts_seq ON sample_parts(tar_file_id, sample_index, content_byte_offset);
CREATE INDEX idx_sample_parts_full ON sample_parts(tar_file_id, sample_index, part_name, content_byte_offset,
    content_byte_size);
"""
_UNSAFE = "PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF;"  # the file gets its name when it is whole and synced


class EnergonPart(NamedTuple):
    """A member of a sample: extension, offset and size (bytes) of its content."""

    name: str
    data: int
    size: int


class EnergonSample(NamedTuple):
    """A sample as Energon finds it.

    Its bytes start with its first header, extension headers included, and end with the first header of the next
    sample, or with the end mark.
    """

    key: str
    start: int
    end: int
    parts: list[EnergonPart]


def energon_path(shard: bytes) -> bytes:
    """Return the path at which Energon looks for the offsets of a shard called *.tar."""
    return shard + b".idx"


def samples(fd: TarBytes) -> Iterator[EnergonSample]:
    """Yield the samples of the shard open at `fd`, in order, from its headers.

    Raises ExportError where Energon would skip or misread something: a damaged shard (also after its last sample),
    an empty file, sparse members, names that are not UTF-8. Raises OSError when the file cannot be read.
    """
    problems = Problems()
    key, start, last = None, 0, -1
    parts: list[EnergonPart] = []
    for chunk in scan.scan(fd, problems):
        columns = (
            chunk.names,
            chunk.types.tolist(),
            chunk.heads.tolist(),
            chunk.datas.tolist(),
            chunk.sizes.tolist(),
        )
        for row, (name, kind, head, data, size) in enumerate(zip(*columns, strict=True)):
            match = _SPLIT.match(name) if kind == headers.REGULAR and not names.is_meta(name) else None
            if match is None:
                continue
            if row in chunk.sparse:
                text = "a sparse member, which Energon reads as it is stored, without holes"
                raise ExportError(f"{readable(name)}: {text}")
            try:
                own, extension = match[1].decode(), match[2].decode()
            except UnicodeDecodeError:
                raise ExportError(
                    f"{readable(name)}: the name is not UTF-8, and Energon cannot store it"
                ) from None
            if own != key:
                if key is not None:
                    yield EnergonSample(key, start, head, parts)
                key, start, parts = own, head, []
            parts.append(EnergonPart(extension, data, size))
        last = int(chunk.heads[-1])
    damage = [problem for problem in problems.listed() if problem.kind not in HARMLESS]
    if damage:
        raise ExportError(f"the shard is damaged: {damage[0].text}")
    if key is not None:
        yield EnergonSample(key, start, member_reader.end_of(fd, last), parts)


def misfit(fd: int, index: BinaryIO) -> str | None:
    """Return what is wrong with a `.tar.idx` of the shard open at `fd`; None if nothing. Raises OSError."""
    try:
        borders = array("Q")
        for sample in samples(fd):
            borders.extend((sample.start, sample.end) if not borders else (sample.end,))
    except ExportError as error:
        return f"the shard cannot be read by Energon: {error}"
    data = index.read()
    if data == borders.tobytes():
        return None
    count, expected = max(len(data) // borders.itemsize - 1, 0), max(len(borders) - 1, 0)
    if count != expected:
        return f"it has {count} samples, the shard {expected}"
    offsets = array("Q", data[: len(borders) * borders.itemsize])
    wrong = next((at for at, pair in enumerate(zip(offsets, borders, strict=True)) if pair[0] != pair[1]), None)
    if wrong is None:
        return f"its {counted(len(data), 'byte')} are not a whole number of offsets"
    what = f"sample {wrong} starts" if wrong < expected else "the samples end"
    return f"it has offset {offsets[wrong]} where {what} at {borders[wrong]}"


class Database:
    """Writes `index.sqlite` at `path`, where an empty file may be. Must be closed."""

    def __init__(self, path: bytes) -> None:
        import sqlite3  # here: indexing a shard loads this module, too, and needs no database

        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.executescript(_UNSAFE + _TABLES)
        self._db.execute("BEGIN")
        self._last = ""  # the key that is being added

    def add(self, number: int, samples: Iterator[EnergonSample]) -> array[int]:
        """Add the samples of shard `number`; returns the content of its `.tar.idx`: all starts, and the end.

        Raises DuplicateKey, ExportError.
        """
        borders = array("Q")
        try:
            for index, sample in enumerate(samples):
                self._last = sample.key
                row = (number, sample.key, index, sample.start, sample.end - sample.start)
                self._db.execute("INSERT INTO samples VALUES (?, ?, ?, ?, ?)", row)
                parts = [(number, index, *part) for part in sample.parts]
                self._db.executemany("INSERT INTO sample_parts VALUES (?, ?, ?, ?, ?)", parts)
                if not index:
                    borders.append(sample.start)
                borders.append(sample.end)
        except self._db.IntegrityError:
            query = "SELECT tar_file_id FROM samples WHERE sample_key = ?"
            raise DuplicateKey(self._last, self._db.execute(query, (self._last,)).fetchone()[0]) from None
        return borders

    def finish(self) -> None:
        """Write everything to the file. Raises sqlite3.OperationalError for errors of the disk, as `add` does."""
        self._db.execute("COMMIT")
        self._db.executescript(_INDEXES)

    def close(self) -> None:
        """Close the database."""
        self._db.close()


class DuplicateKey(Exception):
    """A key that an earlier sample has already, in shard `first`."""

    def __init__(self, key: str, first: int) -> None:
        super().__init__(key)
        self.key, self.first = key, first


# --- the texts ---------------------------------------------------------------------------------------------


def info_text(counts: dict[str, int], version: str) -> bytes:
    """Return `.info.json`: the samples of each shard, by its path below the root; the order numbers the shards."""
    about = {"energon_version": version, "shard_counts": counts}
    return json.dumps(about, indent=2, ensure_ascii=False).encode()


def split_text(shards: Sequence[str]) -> bytes:
    """Return `split.yaml`: all shards are for training. Names are brace expressions to the reader."""
    named = (json.dumps(re.sub(r"([\\{}])", r"\\\1", shard), ensure_ascii=False) for shard in shards)
    # To YAML, NEL and U+2028 end a line, also in quotes, and other control characters are errors.
    named = ("".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in name) for name in named)
    lines = [
        "split_parts:",
        "  train:",
        *(f"  - {name}" for name in named),
        "  val: []",
        "  test: []",
        "exclude: []",
    ]
    return "".join(line + "\n" for line in lines).encode()


# Samples as they are, for a task encoder to cook: the only class that takes any set without further settings.
DATASET_TEXT = b"__module__: megatron.energon\n__class__: CrudeWebdataset\n"
