"""The head of a portable index (`*.wdsidx`): which shards it lists, and where in the file their records are.

One immutable file: a header, a table with a row for each shard, texts (paths, ETags), then the records. It names
shards, so it stands wherever SHARDS stand. `index/portable.py` uses its records, and decides whether a shard is
still the one of its row. docs/reference/formats.md has the bytes.

Anybody may have written the file. So each number is compared with the size of the file before it is used, and a
number that cannot be right is a SpecError. Nothing of a record is read here.
"""

from __future__ import annotations

import functools
import os
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from wdsfs.door import urls
from wdsfs.door.pins import SPOOLED, Pin
from wdsfs.door.remote_side import Presumption
from wdsfs.door.shard_door import DOOR
from wdsfs.errors import SpecError, UnreadableShard
from wdsfs.formats import Format, OtherVersion
from wdsfs.names import Reading
from wdsfs.shards import Fingerprint
from wdsfs.spec import objects

SUFFIX = objects.INDEX_SUFFIX
MAGIC = b"wdsfs-x\n"
WDSIDX = Format("an index", (1, 2), "make it again with `wdsfs index -o`, or use the wdsfs that wrote it")
ALIGNMENT = 8  # bytes; of each record

# Magic, version, format of the records, flags, number of shards, bytes of the base, bytes of the table and the
# texts, bytes of the file, CRC-32 of table and texts. Then zeros, and the CRC-32 of the header at its end.
_FILE_HEADER = struct.Struct("<8sIIIIIQQI")
HEADER_SIZE = 64
_TIMES = struct.Struct("<Qq")
_NUMBERS = struct.Struct("<IIIIIIQII")
_ROW = struct.Struct("<QqQQIHHI" + _NUMBERS.format[1:])
ROW_SIZE = _ROW.size
READ_BYTES = (
    4 << 20
)  # bytes of the file that are asked for at a time: the first has the table of some 30,000 shards
_COUNT_MAX, _BYTES_MAX = 1 << 31, 1 << 60  # of a shard: more does not fit into answers to the kernel
_TEXT_MAX = 1 << 16  # bytes of a path or of a base
_TABLE_MAX = 256 << 20  # bytes of table and texts: those of a million shards


class Times(NamedTuple):
    """Size and time of a shard when it was indexed; see `Row`."""

    size: int
    mtime_ns: int


class Row(NamedTuple):
    """A shard as it was when it was indexed, and the place of its record in the file.

    `path` is relative to the base, or whole. `mtime_ns`, `etag` and `version` are what a file system or a store
    said of the shard. `numbers` are those of `index/store.py::Summary` after the fingerprint.
    """

    size: int
    mtime_ns: int
    offset: int
    length: int
    crc: int
    path: str
    etag: str
    version: str
    numbers: tuple[int, ...]

    @property
    def pin(self) -> Pin:
        """The shard as an object in a store."""
        return Pin(self.size, self.mtime_ns, self.etag, self.version)


class IndexFile:
    """A portable index, of which table and texts are in memory; `path` is absolute, or a URL.

    Raises SpecError for a file that is damaged or of another version.
    """

    def __init__(self, path: str, fingerprint: Fingerprint, header: bytes, table: bytes) -> None:
        self.path, self.fingerprint = path, fingerprint
        head = _parse_header(path, header, fingerprint.size)
        self.record_format, self.reading, self.count = head.record_format, head.reading, head.shards
        if zlib.crc32(table) != head.table_crc:
            raise _damaged(path, "the checksum of its table is wrong")
        self._table = table
        self._end = HEADER_SIZE + len(table)  # where records may begin
        texts = self.count * ROW_SIZE
        self._base = os.fsdecode(table[texts : texts + head.base_size])
        self._starts = self._text_places(texts + head.base_size)
        self._rows: dict[str, dict[bytes, int]] = {}  # for the base that was asked for last

    def _text_places(self, start: int) -> list[int]:
        """Check all rows; returns where the texts of each begin, and where the last ones end. Raises SpecError."""
        sizes, end = [], self.fingerprint.size
        for number, row in enumerate(_ROW.iter_unpack(self._table[: self.count * ROW_SIZE])):
            offset, length, _, etag, version, path = row[2:8]
            if max(row[8:14]) >= _COUNT_MAX or row[14] >= _BYTES_MAX:
                raise _damaged(self.path, f"the counts of shard {number} are impossible")
            if offset % ALIGNMENT or offset < self._end or length < ALIGNMENT or offset + length > end:
                raise _damaged(self.path, f"the record of shard {number} is not inside the file")
            if not 0 < path <= _TEXT_MAX:
                raise _damaged(self.path, f"shard {number} has no name")
            sizes.append(path + etag + version)
        starts = list(accumulate(sizes, initial=start))
        if starts[-1] != len(self._table):
            raise _damaged(self.path, "its texts do not have the lengths that its rows state")
        if b"\0" in self._table[self.count * ROW_SIZE :]:
            raise _damaged(self.path, "there is a NUL in one of its texts")
        return starts

    def __len__(self) -> int:
        return self.count

    def times(self, number: int) -> Times:
        """Return size and time in one row."""
        return Times(*_TIMES.unpack_from(self._table, number * ROW_SIZE))

    def numbers(self, number: int) -> tuple[int, ...]:
        """Return the numbers of the summary in one row."""
        return _NUMBERS.unpack_from(self._table, number * ROW_SIZE + _NUMBERS_OFFSET)

    def row(self, number: int) -> Row:
        """Return one row."""
        fields = _ROW.unpack_from(self._table, number * ROW_SIZE)
        size, mtime_ns, offset, length, crc, etag, version, path, *numbers = fields
        bounds = accumulate((path, etag, version), initial=self._starts[number])
        shown, tag, mark = (os.fsdecode(self._table[begin:end]) for begin, end in pairwise(bounds))
        return Row(size, mtime_ns, offset, length, crc, shown, tag, mark, tuple(numbers))

    def path_of(self, number: int) -> str:
        """Return the path of a shard as it stands in the file."""
        start = self._starts[number]
        (size,) = _PATH_SIZE.unpack_from(self._table, number * ROW_SIZE + _PATH_OFFSET)
        return os.fsdecode(self._table[start : start + size])

    def base(self, given: str | None = None) -> str:
        """Return the directory of relative paths, with its last slash: `given`, else that of the file.

        Raises SpecError.
        """
        if given is not None:
            if objects.is_url(given):
                return objects.path_of_url(given.rstrip("/") + "/")
            return os.path.join(os.path.abspath(given), "")
        directory = self.path[: self.path.rfind("/") + 1]
        return self._joined(directory, self._base)

    def paths(self, base: str | None = None) -> list[str]:
        """Return the paths of all shards, in order; relative ones are below `base`. Raises SpecError."""
        directory = self.base(base)
        return [self._joined(directory, text) for text in map(self.path_of, range(self.count))]

    def rows(self, base: str | None = None) -> Mapping[bytes, int]:
        """Return the numbers of the rows by the paths of their shards, as `paths` has them. Raises SpecError."""
        directory = self.base(base)
        if directory not in self._rows:
            self._rows = {directory: {os.fsencode(path): row for row, path in enumerate(self.paths(base))}}
        return self._rows[directory]

    def presumed(self, base: str | None = None) -> list[str]:
        """Presume that remote shards are the objects of their rows until their stores say otherwise.

        Sends no request. Only rows with an ETag count: a request with it is answered for no other object. Returns
        the paths of the shards. Raises SpecError.
        """
        rows, certain = self.rows(base), self._strong_etags()
        known = {path: row for path, row in rows.items() if certain[row] and urls.is_remote(path)}
        if known:
            # One table for all of its users, where it can be.
            presumption = Presumption(rows if len(known) == len(rows) else known, lambda row: self.row(row).pin)
            DOOR.remote.presume(f"{self.path}\0{self.base(base)}", presumption)
        return list(map(os.fsdecode, known))

    def _strong_etags(self) -> bytes:
        """Return a byte for each row: 1 if it has a strong ETag that its store has made."""
        table, certain = self._table, bytearray(self.count)
        for row, (etag, path) in enumerate(_LENGTHS.iter_unpack(table[: self.count * ROW_SIZE])):
            at = self._starts[row] + path
            certain[row] = etag > 0 and not table.startswith(_UNCERTAIN, at, at + etag)
        return bytes(certain)

    def _joined(self, directory: str, text: str) -> str:
        """Return the path that a text means, a relative one below `directory`.

        Raises SpecError for a path that is refused.
        """
        if ":" not in text and ".." not in text and not text.startswith(("/", urls.STDIN)):
            return directory + text  # as nearly all are: below the directory, no URL, no command
        objects.refuse_command(text, self.path)
        if objects.is_url(text):
            return objects.path_of_url(text)
        text = text.removeprefix(urls.HERE)
        if ".." in text.split("/"):
            raise _damaged(self.path, f"{text!r} leads out of the directory of the shards")
        if text.startswith("/"):
            objects.refuse_local(text, self.path)
            return text
        return directory + text


class _Head(NamedTuple):
    record_format: int
    reading: Reading
    shards: int
    base_size: int
    table_size: int
    table_crc: int


_NUMBERS_OFFSET = ROW_SIZE - _NUMBERS.size
_PATH_OFFSET = struct.calcsize("<QqQQIHH")
_PATH_SIZE = struct.Struct("<I")
_LENGTHS = struct.Struct(f"<{struct.calcsize('<QqQQI')}xH2xI{_NUMBERS.size}x")  # of ETag and path, in a row
_UNCERTAIN = (b"W/", SPOOLED.encode())  # beginnings of ETags that do not identify content in a store


def _parse_header(path: str, header: bytes, size: int) -> _Head:
    """Return the header of a file of this size. Raises SpecError."""
    if len(header) < HEADER_SIZE or header[:8] != MAGIC:
        raise _damaged(path, "it does not begin with the header of an index")
    _, version, record_format, flags, count, base, table, whole, crc = _FILE_HEADER.unpack_from(header)
    try:
        WDSIDX.check(version)
    except OtherVersion as error:
        raise SpecError(f"{path} {error}") from None
    if zlib.crc32(header[: HEADER_SIZE - 4]) != int.from_bytes(header[HEADER_SIZE - 4 : HEADER_SIZE], "little"):
        raise _damaged(path, "the checksum of its header is wrong")
    if whole != size:
        raise _damaged(path, f"it has {size:,} bytes instead of {whole:,}")
    fits = HEADER_SIZE + table <= size and count * ROW_SIZE + base <= table <= _TABLE_MAX
    if not fits or not count or base > _TEXT_MAX:
        raise _damaged(path, "its table does not fit into it")
    reading = Reading(*(bool(flags >> bit & 1) for bit in range(len(Reading._fields))))
    return _Head(record_format, reading, count, base, table, crc)


def _damaged(path: str, why: str) -> SpecError:
    return SpecError(f"{path}: is not a sound index of shards: {why}; make it again with `wdsfs index -o`")


# --- reading one -------------------------------------------------------------------------------------------


def load_index(path: str) -> IndexFile:
    """Read header and table of the index at a path or URL, once as long as it does not change.

    Raises SpecError, MissingShard, UnreadableShard.
    """
    place = where(path)
    return _load(place, DOOR.look(os.fsencode(place)))


def where(text: str) -> str:
    """Return the path of the index that was typed: absolute, or a URL without secrets. Raises SpecError."""
    return objects.path_of_url(text) if objects.is_url(text) else os.path.abspath(text)


@functools.lru_cache(maxsize=8)
def _load(path: str, _: Fingerprint) -> IndexFile:
    first, now = _read_range(path, 0, READ_BYTES)
    head = _parse_header(path, first, now.size)
    pieces, end = [first], HEADER_SIZE + head.table_size
    for begin in range(len(first), end, READ_BYTES):
        data, again = _read_range(path, begin, min(begin + READ_BYTES, end))
        if again != now:
            raise UnreadableShard(f"{path}: is being replaced; repeat the command")
        pieces.append(data)
    data = b"".join(pieces)
    return IndexFile(path, now, data[:HEADER_SIZE], data[HEADER_SIZE:end])


def _read_range(path: str, begin: int, end: int) -> tuple[bytes, Fingerprint]:
    """Read a range of the file, and its fingerprint. Raises SpecError, UnreadableShard.

    Opens the file for each range: consecutive reads of an open remote file look like a pass over it, and much more
    would be fetched ahead.
    """
    try:
        return DOOR.read_range(os.fsencode(path), end - begin, begin)
    except OSError as error:
        raise UnreadableShard(f"{path}: {error.strerror}") from None


# --- writing one -------------------------------------------------------------------------------------------


def head_of(rows: Sequence[Row], base: str, record_format: int, reading: Reading, size: int) -> bytes:
    """Return header, table and texts of an index of `size` bytes. Their length does not depend on the numbers."""
    packed, texts = [], [os.fsencode(base)]
    for row in rows:
        path, etag, version = map(os.fsencode, (row.path, row.etag, row.version))
        numbers = (row.size, row.mtime_ns, row.offset, row.length, row.crc, len(etag), len(version), len(path))
        packed.append(_ROW.pack(*numbers, *row.numbers))
        texts += [path, etag, version]
    table = b"".join([*packed, *texts])
    flags = sum(on << bit for bit, on in enumerate(reading))  # the lowest bit is the first option
    form = WDSIDX.version if reading.last_dot else WDSIDX.reads[0]  # earlier releases read all but `last_dot`
    counts = (len(rows), len(texts[0]), len(table), size, zlib.crc32(table))
    header = _FILE_HEADER.pack(MAGIC, form, record_format, flags, *counts).ljust(HEADER_SIZE - 4, b"\0")
    return header + zlib.crc32(header).to_bytes(4, "little") + table


def place_of(paths: Iterable[str], file: str) -> tuple[str, list[str]]:
    """Return the base of an index at `file`, and the paths in it: relative ones where all are below one directory.

    The base is empty if they are below the directory of the index itself.
    """
    absolute = list(paths)
    own = file[: file.rfind("/") + 1]
    if all(path.startswith(own) for path in absolute):
        return "", [urls.local(path[len(own) :]) for path in absolute]
    common = os.path.commonprefix([path[: path.rfind("/") + 1] for path in absolute])  # noqa: RUF071 -- also of URLs
    common = common[: common.rfind("/") + 1]
    if common in ("", "/") or common.endswith("://"):
        return "", absolute
    return common, [urls.local(path[len(common) :]) for path in absolute]
