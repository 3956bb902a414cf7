"""The rows of one shard as columns of Arrow: keys and sizes by its record, values from its bytes.

Values are those of small texts: classes and numbers (`cls`), texts (`txt`), and the fields of JSON, by the last
part of the extension, as the webdataset library decodes them. Whatever is in a shard, the number of columns, the
depth of fields and the length of a text are bounded, and values that are left out are counted.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from wdsfs.errors import ShardError
from wdsfs.index.record import BY_EXTENSION, Record
from wdsfs.tree import json_fields
from wdsfs.tree.composition import Composition
from wdsfs.tree.sample_reader import SampleReader
from wdsfs.tree.texts import Texts

KEY, SHARD, NUMBER = "__key__", "__shard__", "__number__"
SIZE = "bytes."  # before the name of a column: its size in bytes

COLUMNS_MAX = 200  # columns with sizes, and columns with values, of a shard
DEPTH_MAX = 4  # names in the path to a field; a value that lies deeper is part of a text of JSON
TEXT_MAX = 1024  # bytes of a value; a longer one is cut
CUT = "..."  # the end of a value that was cut

_NUMBER, _TEXT, _JSON = range(3)
_KINDS = {
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), _NUMBER),
    **dict.fromkeys(("txt", "text", "transcript", "caption"), _TEXT),
    **dict.fromkeys(("json", "jsn"), _JSON),
}
_INT64 = range(-(1 << 63), 1 << 63)
_Decoder = codecs.getincrementaldecoder("utf-8")

Ints = NDArray[np.int64]
KindOf = Callable[[str], int | None]


class Left(NamedTuple):
    """Counts of what is not in a table: values that were cut, unreadable files, values of too many columns.

    `example` names the first unreadable file, and says why.
    """

    cut: int = 0
    unreadable: int = 0
    columns: int = 0
    example: str = ""

    def plus(self, other: Left) -> Left:
        """Return the counts of both."""
        return Left(
            self.cut + other.cut,
            self.unreadable + other.unreadable,
            self.columns + other.columns,
            self.example or other.example,
        )


def kinds_of(composition: Composition) -> KindOf:
    """Return a function that returns the kind of the values of a column; None for one that is no small text."""
    named = {os.fsdecode(column.name): os.fsdecode(column.alternatives[0]) for column in composition.columns}

    def kind_of(column: str) -> int | None:
        first = column.partition("~")[0]  # a second one of a sample is `txt~2`
        return _KINDS.get(named.get(first, first).rpartition(".")[2].lower())

    return kind_of


# --- keys and sizes ---------------------------------------------------------------------------------------------


def keys_of(record: Record, entries: Ints) -> Any:
    """Return the keys of samples as an array of texts; bytes that are not UTF-8 are written as `\\xNN`."""
    bounds = record.array("folder.entry").astype(np.int64)
    folders = np.searchsorted(bounds, entries, "right") - 1
    paths = [record.folder_path(folder) + b"/" if folder else b"" for folder in range(record.folders)]
    names = record.entry_name
    packed = Texts.packed(np.frombuffer(names.text, np.uint8), np.asarray(names.starts))
    keys = Texts.chained([Texts.of(paths).take(folders), packed.take(entries)])
    text = keys.text.tobytes()
    try:
        text.decode()
    except UnicodeDecodeError:
        return pa.array([key.decode("utf-8", "backslashreplace") for key in keys.to_list()], pa.large_string())
    offsets = np.append(keys.starts, len(text)).astype(np.int64)
    return pa.LargeStringArray.from_buffers(len(entries), pa.py_buffer(offsets), pa.py_buffer(text))


class ShardMembers:
    """The members of the samples of a shard, as columns: the row of each, its number, the number of its extension.

    `name_of` returns the name of the column of a member, which only further members with one extension have alone.
    """

    def __init__(self, record: Record, entries: Ints, name_of: Callable[[int], str]) -> None:
        self._record, self._name_of, self._count = record, name_of, len(entries)
        firsts = record.array("entry.member").astype(np.int64)
        begin, counts = firsts[entries], firsts[entries + 1] - firsts[entries]
        self._rows = np.repeat(np.arange(len(entries)), counts)
        self._members = np.arange(len(self._rows)) + np.repeat(begin - (np.cumsum(counts) - counts), counts)
        self._extensions = record.array("member.ext")[self._members]
        self._further = np.zeros(len(self._rows), np.bool_)
        if record.aliases[BY_EXTENSION] is not None:
            self._further = _repeated(self._rows, self._extensions)

    def names(self) -> dict[str, NDArray[np.bool_]]:
        """Return the columns by name, each with a mask of the members; at most COLUMNS_MAX."""
        names: dict[str, NDArray[np.bool_]] = {}
        for extension in np.flatnonzero(np.bincount(self._extensions)).tolist()[:COLUMNS_MAX]:
            of = (self._extensions == extension) & ~self._further
            names[self._name_of(int(self._members[int(of.argmax())]))] = of
        for at in np.flatnonzero(self._further).tolist():
            name = self._name_of(int(self._members[at]))
            if name in names or len(names) < COLUMNS_MAX:
                names.setdefault(name, np.zeros(len(self._rows), np.bool_))[at] = True
        return names

    def sizes(self) -> dict[str, Any]:
        """Return the sizes (bytes) of each column, null where a sample has none."""
        sizes = self._record.array("member.size")[self._members]
        columns = {}
        for name, of in self.names().items():
            column, missing = np.zeros(self._count, np.int64), np.ones(self._count, np.bool_)
            column[self._rows[of]], missing[self._rows[of]] = sizes[of], False
            columns[name] = pa.array(column, mask=missing)
        return columns


def _repeated(rows: Ints, extensions: NDArray[Any]) -> NDArray[np.bool_]:
    """Return a mask of the members with the extension of one that comes before them in their sample."""
    order = np.lexsort((np.arange(len(rows)), extensions, rows))
    same = (np.diff(rows[order]) == 0) & (np.diff(extensions[order].astype(np.int64)) == 0)
    repeated = np.zeros(len(rows), np.bool_)
    repeated[order[1:][same]] = True
    return repeated


# --- values -----------------------------------------------------------------------------------------------------


def values_of(reader: SampleReader, numbers: range, kind_of: KindOf) -> tuple[Any, Left]:
    """Return the values of samples as a table of Arrow, and what is not in it. Raises ShardErrors of reading."""
    values = _Values(len(numbers))
    for row, number in enumerate(numbers):
        sample = reader.sample(number, lambda column: kind_of(column) is not None)
        key, shard = sample.pop(KEY), sample.pop(SHARD)
        for column, data in sample.items():
            try:
                values.add(row, column, kind_of(column), data)
            except (ShardError, UnicodeDecodeError) as error:
                why = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
                values.counts["unreadable"] += 1
                values.example = values.example or f"{shard}/{key}.{column} {why}"
    return values.table(), Left(**values.counts, example=values.example)


class _Values:
    """The values of some samples, by column and row."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._columns: dict[str, list[Any]] = {}
        self._types: dict[str, Any] = {}
        self.counts = {"cut": 0, "unreadable": 0, "columns": 0}
        self.example = ""

    def add(self, row: int, column: str, kind: int | None, data: bytes) -> None:
        """Add the content of a file. Raises CorruptShard, UnicodeDecodeError."""
        if kind == _JSON:
            document = json_fields.parse(data)
            if isinstance(document, dict):
                for name, value in _fields(document, column):
                    self._put(row, name, value)
                return
            value = _flat(document)
        else:
            # A character has up to four bytes; that in the middle of which the text is cut is not decoded.
            text = _Decoder().decode(data[: TEXT_MAX + 4], final=len(data) <= TEXT_MAX)
            value = _number(text) if kind == _NUMBER else text
        self._put(row, column, value)

    def _put(self, row: int, name: str, value: Any) -> None:
        column = self._columns.get(name)
        if column is None:
            if len(self._columns) >= COLUMNS_MAX:
                self.counts["columns"] += 1
                return
            column = self._columns[name] = [None] * self._rows
            self._types[name] = set()
        if isinstance(value, str) and len(value) > TEXT_MAX // 4 and len(value.encode()) > TEXT_MAX:
            value = value.encode()[: TEXT_MAX - len(CUT)].decode("utf-8", "ignore") + CUT
            self.counts["cut"] += 1
        if column[row] is not None:  # as a field of JSON and a column with one name
            self._put(row, name + "~2", value)
            return
        column[row] = value
        self._types[name].add(type(value))

    def table(self) -> Any:
        """Return the values as a table of Arrow."""
        arrays = {_column_name(name): self._array(name) for name in self._columns}
        return pa.table(arrays)

    def _array(self, name: str) -> Any:
        kind = pa.null()
        for python_type in self._types[name]:
            kind = common_type(kind, _ARROW[python_type])
        column = self._columns[name]
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


def _number(text: str) -> int | str | None:
    """Return the number that a class is, else its text; None for an empty one. `007` is a text."""
    text = text.strip()
    if len(text) <= len(str(_INT64.start)) and text.isascii() and text.removeprefix("-").isdigit():
        number = int(text)
        return number if number in _INT64 and str(number) == text else text
    return text or None


def _fields(document: dict[str, Any], path: str, depth: int = 1) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a document with their paths, which begin with `path`."""
    for name, value in document.items():
        field = f"{path}.{name[:TEXT_MAX]}"
        if isinstance(value, dict) and value and depth < DEPTH_MAX:
            yield from _fields(value, field, depth + 1)
        else:
            yield field, _flat(value)


def _flat(value: Any) -> Any:
    """Return the value of a cell: lists and objects as JSON, and whole numbers of more than 64 bits."""
    if isinstance(value, str):
        return _unicode(value)
    if isinstance(value, dict | list) or (isinstance(value, int) and value not in _INT64):
        return json.dumps(value)
    return value


_ARROW = {
    type(None): pa.null(),
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
}


def common_type(first: Any, second: Any) -> Any:
    """Return the type that has the values of both: any number is a float, and everything else a text."""
    if first == second or pa.types.is_null(second):
        return first
    if pa.types.is_null(first):
        return second
    return pa.float64() if {first, second} == {pa.int64(), pa.float64()} else pa.string()
