"""The rows of one shard as columns of Arrow: keys and sizes by its record, values from its bytes.

Values are those of small texts: classes and numbers (`cls`), texts (`txt`), and the fields of JSON, by the last
part of the extension, as the webdataset library decodes them. Whatever is in a shard, the number of columns, the
depth of fields and the length of a text are bounded, and values that are left out are counted.
"""

from __future__ import annotations

import codecs
import json
import operator
import os
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from wdsfs.errors import CorruptShard, ShardError
from wdsfs.index.record import BY_EXTENSION, Record
from wdsfs.inodes import MEMBER, position
from wdsfs.tree import json_fields
from wdsfs.tree.composition import Composition
from wdsfs.tree.sample_decoder import INTEGER, JSON, KINDS, PICTURES, TEXT
from wdsfs.tree.sample_reader import SampleReader
from wdsfs.tree.shown_names import ShownNames
from wdsfs.tree.texts import Texts
from wdsfs.tree.tree import View
from wdsfs.tree.view_content import FIELD, VALUES

KEY, SHARD, NUMBER = "__key__", "__shard__", "__number__"
SIZE = "bytes."  # before the name of a column: its size in bytes

COLUMNS_MAX = 200  # columns with sizes, and columns with values, of a shard
DEPTH_MAX = 4  # names in the path to a field; a value that lies deeper is part of a text of JSON
TEXT_MAX = 1024  # bytes of a value; a longer one is cut
SMALL_MAX = 8 << 10  # bytes of a file of a column that may have texts, though its name does not say so
ROOM, CELL = 1 << 31, 32  # bytes of memory for the values of a shard; of each, without its text
CUT = "..."  # the end of a value that was cut

_SMALL = 3  # the kind of such a column

_WHOLE = re.compile(r"-?(?:0|[1-9][0-9]{0,30})")
_JSON_NUMBER = re.compile(_WHOLE.pattern + r"(?:\.[0-9]{1,30})?(?:[eE][-+]?[0-9]{1,3})?")
_INT64 = range(-(1 << 63), 1 << 63)
_Decoder = codecs.getincrementaldecoder("utf-8")

Ints = NDArray[np.int64]
KindOf = Callable[[str], int | None]


class Left(NamedTuple):
    """Counts of values that a table lacks: values that were cut, unreadable files, values beyond limits.

    `example` names the first unreadable file, and says why.
    """

    cut: int = 0
    unreadable: int = 0
    excess: int = 0
    example: str = ""

    def plus(self, other: Left) -> Left:
        """Return the counts of both."""
        cut, unreadable, excess = map(operator.add, self[:3], other[:3])
        return Left(cut, unreadable, excess, self.example or other.example)


def kinds_of(composition: Composition, record: Record) -> KindOf:
    """Return a function that returns the kind of the values of a column of a shard; None for no small text.

    Columns of label files and of fields of JSON have values whatever their names. So have columns of small files,
    if these turn out to be texts.
    """
    named = {os.fsdecode(column.name): os.fsdecode(column.alternatives[0]) for column in composition.columns}
    added = {**dict.fromkeys(_small_columns(record), _SMALL), **dict.fromkeys(_added(record), INTEGER)}

    def kind_of(column: str) -> int | None:
        first = column.partition("~")[0]  # a second one of a sample is `txt~2`
        return KINDS.get(named.get(first, first).rpartition(".")[2].lower(), added.get(column))

    return lru_cache(maxsize=1024)(kind_of)


def _added(record: Record) -> list[str]:
    """Return the columns of a view with values that are in no file of their own."""
    if record.view is None:
        return []
    places = [number for number, place in enumerate(record.view["places"]) if place["kind"] in (VALUES, FIELD)]
    is_added = np.isin(record.array("member.head").astype(np.int64) >> record.view["shift"], places)
    extensions = np.unique(record.array("member.ext")[is_added]).tolist()
    return [os.fsdecode(record.extension_name[extension]) for extension in extensions]


def _small_columns(record: Record) -> list[str]:
    """Return the columns without a large file; no pictures."""
    extensions = record.array("member.ext")
    largest = np.zeros(len(record.extension_name), np.int64)
    np.maximum.at(largest, extensions, record.array("member.size"))
    names = [os.fsdecode(record.extension_name[at]) for at in np.flatnonzero(largest <= SMALL_MAX).tolist()]
    return [name for name in names if name.rpartition(".")[2].lower() not in PICTURES]


# --- keys and sizes ---------------------------------------------------------------------------------------------


def entries_of(order: Sequence[int] | NDArray[np.uint32]) -> Ints:
    """Return samples of a record (`samples_of`) as an array, also those of a range."""
    return np.arange(order.start, order.stop) if isinstance(order, range) else np.asarray(order, np.int64)


def folders_of(record: Record, entries: Ints) -> Ints:
    """Return the number of the folder of each sample."""
    return np.searchsorted(record.array("folder.entry").astype(np.int64), entries, "right") - 1


def keys_of(record: Record, entries: Ints) -> Any:
    """Return the keys of samples as an array of texts; bytes that are not UTF-8 are written as `\\xNN`."""
    names = record.entry_name
    keys = Texts.packed(np.frombuffer(names.text, np.uint8), np.asarray(names.starts)).take(entries)
    if record.folders > 1:
        paths = [record.folder_path(folder) + b"/" if folder else b"" for folder in range(record.folders)]
        keys = Texts.chained([Texts.of(paths).take(folders_of(record, entries)), keys])
    keys = keys.compact()
    text = keys.text.tobytes()
    try:
        text.decode()
    except UnicodeDecodeError:
        return pa.array([key.decode("utf-8", "backslashreplace") for key in keys.to_list()], pa.large_string())
    offsets = np.append(keys.starts, len(text)).astype(np.int64)
    return pa.LargeStringArray.from_buffers(len(entries), pa.py_buffer(offsets), pa.py_buffer(text))


class ShardMembers:
    """The members of the samples of a shard, as columns: the row of each, its number, and that of its column."""

    def __init__(self, record: Record, entries: Ints) -> None:
        self._record, self._count, self._shown = record, len(entries), ShownNames(View())
        firsts = record.array("entry.member").astype(np.int64)
        begin, counts = firsts[entries], firsts[entries + 1] - firsts[entries]
        self._rows = np.repeat(np.arange(len(entries)), counts)
        self._members = np.arange(len(self._rows)) + np.repeat(begin - (np.cumsum(counts) - counts), counts)
        self.names: dict[str, int] = {}  # of at most COLUMNS_MAX columns, each with its number
        self._columns = self._columns_of(record.array("member.ext")[self._members])

    def _columns_of(self, extensions: NDArray[Any]) -> Ints:
        """Return the column of each member, -1 for one beyond COLUMNS_MAX."""
        used = np.flatnonzero(np.bincount(extensions))
        firsts = np.zeros(len(used) and used[-1] + 1, np.int64)
        firsts[extensions[::-1]] = np.arange(len(extensions))[::-1]
        column_of = np.full(len(firsts), -1)
        for extension in used.tolist()[:COLUMNS_MAX]:
            column_of[extension] = self._column_of(int(self._members[firsts[extension]]))
        columns: Ints = column_of[extensions]
        if self._record.aliases[BY_EXTENSION] is not None:
            for at in np.flatnonzero(_repeated(self._rows, extensions)).tolist():
                columns[at] = self._column_of(int(self._members[at]))
        return columns

    def _column_of(self, member: int) -> int:
        """Return the number of the column of a member, which only further ones with its extension have alone."""
        name = self._shown.shown(self._record, position(MEMBER, member)).decode("utf-8", "backslashreplace")
        if len(self.names) < COLUMNS_MAX:
            return self.names.setdefault(name, len(self.names))
        return self.names.get(name, -1)

    def sizes(self) -> dict[str, Any]:
        """Return the sizes (bytes) of each column, null where a sample has none."""
        shape = len(self.names) + 1, self._count  # the last one is for members without a column
        sizes, missing = np.zeros(shape, np.int64), np.ones(shape, np.bool_)
        sizes[self._columns, self._rows] = self._record.array("member.size")[self._members]
        missing[self._columns, self._rows] = False
        return {name: pa.array(sizes[at], mask=missing[at]) for name, at in self.names.items()}


def _repeated(rows: Ints, extensions: NDArray[Any]) -> NDArray[np.bool_]:
    """Return a mask of the members with the extension of one that comes before them in their sample."""
    order = np.lexsort((np.arange(len(rows)), extensions, rows))
    same = (np.diff(rows[order]) == 0) & (np.diff(extensions[order].astype(np.int64)) == 0)
    repeated = np.zeros(len(rows), np.bool_)
    repeated[order[1:][same]] = True
    return repeated


# --- values -----------------------------------------------------------------------------------------------------


def values_of(reader: SampleReader, numbers: range, kind_of: KindOf) -> tuple[Any, Left]:
    """Return the values of samples as a table of Arrow, and counts of values that it lacks. Raises ShardErrors."""
    values, is_read = _Values(len(numbers)), lru_cache(maxsize=1024)(lambda column: kind_of(column) is not None)
    for row, number in enumerate(numbers):
        try:
            sample = reader.sample(number, is_read)
        except CorruptShard as error:  # the shard is cut off, or damaged there
            values.refuse(str(error))
            continue
        key, shard = sample.pop(KEY), sample.pop(SHARD)
        for column, data in sample.items():
            kind = kind_of(column)
            try:
                values.add(row, column, kind, data)
            except (ShardError, UnicodeDecodeError) as error:
                if kind == _SMALL:
                    values.drop(column)
                    continue
                why = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
                values.refuse(f"{shard}/{key}.{column} {why}")
    return values.table(), Left(**values.counts, example=values.example)


class _Values:
    """The values of some samples, by column and row."""

    def __init__(self, rows: int) -> None:
        self._rows, self._room = rows, ROOM
        self._columns: dict[str, list[Any]] = {}
        self._dropped: set[str] = set()
        self.counts = {"cut": 0, "unreadable": 0, "excess": 0}
        self.example = ""

    def drop(self, column: str) -> None:
        """Leave out a column that turned out to have other content than texts."""
        self._dropped.add(column)
        self._columns.pop(column, None)

    def refuse(self, why: str) -> None:
        """Count an unreadable file."""
        self.counts["unreadable"] += 1
        self.example = self.example or why

    def add(self, row: int, column: str, kind: int | None, data: bytes) -> None:
        """Add the content of a file. Raises CorruptShard, UnicodeDecodeError."""
        if column in self._dropped:
            return
        if kind == _SMALL and b"\0" in data:
            raise CorruptShard("is no text")
        if kind == JSON:
            document = json_fields.parse(data)
            if isinstance(document, dict):
                self._put_fields(row, column, document)
                return
            value = _flat(document)
        else:
            # A character has up to four bytes. If the text is cut in the middle of one, that character is not
            # decoded.
            text = data.decode() if len(data) <= TEXT_MAX else _Decoder().decode(data[: TEXT_MAX + 4])
            value = text if kind == TEXT else _FileText(text.strip()) or None
        self._put(row, column, value)

    def _put_fields(self, row: int, path: str, document: dict[str, Any], depth: int = 1) -> None:
        """Add the fields of a document, with names that begin with `path`."""
        for name, value in document.items():
            field = f"{path}.{name[:TEXT_MAX]}"
            if isinstance(value, dict) and value and depth < DEPTH_MAX:
                self._put_fields(row, field, value, depth + 1)
            else:
                self._put(row, field, _flat(value))

    def _put(self, row: int, name: str, value: Any) -> None:
        column = self._columns.get(name) or self._new_column(name)
        if isinstance(value, str):
            if len(value) > TEXT_MAX // 4 and len(value.encode()) > TEXT_MAX:
                value = value.encode()[: TEXT_MAX - len(CUT)].decode("utf-8", "ignore") + CUT
                self.counts["cut"] += 1
            self._room -= len(value)
        self._room -= CELL
        if column is None or self._room < 0:
            self.counts["excess"] += 1
        elif column[row] is not None:  # as a field of JSON and a column with one name
            self._put(row, name + "~2", value)
        else:
            column[row] = value

    def _new_column(self, name: str) -> list[Any] | None:
        """Return a new column; None if there are too many."""
        if len(self._columns) >= COLUMNS_MAX or self._room < 0:
            return None
        self._room -= CELL * self._rows
        return self._columns.setdefault(name, [None] * self._rows)

    def table(self) -> Any:
        """Return the values as a table of Arrow."""
        return pa.table({_column_name(name): _array(column) for name, column in self._columns.items()})


def _array(column: list[Any]) -> Any:
    kind, types = pa.null(), set(map(type, column))
    if _FileText in types:
        column = _read_numbers(column)
        types = set(map(type, column))
    for python_type in types:
        kind = common_type(kind, _ARROW[python_type])
    if pa.types.is_string(kind):
        column = [value if value is None or isinstance(value, str) else json.dumps(value) for value in column]
    elif pa.types.is_floating(kind):
        column = [None if value is None else float(value) for value in column]
    return pa.array(column, kind)


def _column_name(name: str) -> str:
    """Return the name of a column of values: UTF-8, and not that of another column of the table."""
    text = _unicode(name)
    return f"value.{text}" if text.startswith((SIZE, "__")) else text


def _unicode(text: str) -> str:
    """Return a text of which half of a surrogate pair is written as the bytes that it stands for."""
    if text.isascii():
        return text
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "backslashreplace")


class _FileText(str):
    """The text of a file, which is a number where all of its column are. `007` is none."""

    __slots__ = ()


def _read_numbers(column: list[Any]) -> list[Any]:
    """Return a column with numbers for the texts of files, if all of these are numbers."""
    texts = [value for value in column if type(value) is _FileText]
    read: Callable[[str], Any] = str
    whole = [int(text) for text in texts if _WHOLE.fullmatch(text)]
    if all(number in _INT64 for number in whole) and all(_JSON_NUMBER.fullmatch(text) for text in texts):
        read = int if len(whole) == len(texts) else float
    return [read(value) if type(value) is _FileText else value for value in column]


def _flat(value: Any) -> Any:
    """Return the value of a cell: lists and objects as JSON, and whole numbers of more than 64 bits."""
    if isinstance(value, str):
        return _unicode(value)
    if isinstance(value, dict | list) or (isinstance(value, int) and value not in _INT64):
        return json.dumps(value)
    return value


_ARROW = {type(None): pa.null(), bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}


def common_type(first: Any, second: Any) -> Any:
    """Return the type that has the values of both: any number is a float, and everything else a text."""
    if first == second or pa.types.is_null(second):
        return first
    if pa.types.is_null(first):
        return second
    return pa.float64() if {first, second} == {pa.int64(), pa.float64()} else pa.string()
