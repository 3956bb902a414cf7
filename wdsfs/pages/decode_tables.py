"""Tables: the columns, how many rows, and the first of these."""

from __future__ import annotations

import csv
import importlib
import io
import itertools
from collections.abc import Iterator
from typing import Any, BinaryIO

from wdsfs.errors import counted
from wdsfs.pages.plain import UTF_16, decoded, readable
from wdsfs.pages.preview import TABLE, Detail, Preview

FIRST_BYTES = 1 << 20  # of a csv file that columns, types and first rows are taken from
_COUNTED = 8  # rows are counted in csv files of up to this part (an eighth) of the bytes that may be read
COLUMNS_MAX = 100  # that are shown
CELL_MAX = 200  # characters
ITEMS_MAX = 20  # of a list in a cell
_CHUNK = 1 << 20


def decode_csv(file: BinaryIO, size: int | None, detail: Detail, tabs: bool) -> Preview:
    """A csv or tsv file whose first row has the names. `size` is None where only reading to the end gives it."""
    data = _read(file, FIRST_BYTES)
    is_whole = len(data) < FIRST_BYTES or len(data) == size
    text, note = decoded(data, is_whole)
    delimiter = "\t" if tabs else _delimiter(text)
    rows = _rows(text, delimiter)
    header = next(rows, [])
    shown = [row for row, _ in zip(rows, range(detail.rows), strict=False)]
    if data[:2] in UTF_16:
        total = sum(1 for row in _rows(text, delimiter)) - 1 if is_whole else None
    else:
        total = _count(file, data, size, delimiter, detail.read // _COUNTED)
    names = [readable(name)[:CELL_MAX] for name in header[:COLUMNS_MAX]]
    columns = tuple((name, _type_of([row[at] for row in shown if at < len(row)])) for at, name in enumerate(names))
    cells = tuple(tuple(_cell(cell) for cell in row[:COLUMNS_MAX]) for row in shown)
    return _preview(columns, cells, total, len(header), note)


def _read(file: BinaryIO, length: int) -> bytes:
    """So many bytes, fewer only at the end."""
    target = io.BytesIO()
    while length and (part := file.read(length)):
        target.write(part)
        length -= len(part)
    return target.getvalue()


def _delimiter(text: str) -> str:
    """What divides the cells of the first line: a comma, unless there are more semicolons or tabs."""
    line = text.partition("\n")[0]
    return max(",;\t", key=line.count)


def _rows(text: str, delimiter: str) -> Iterator[list[str]]:
    csv.field_size_limit(FIRST_BYTES)
    lines = (line.replace("\x00", "\u2400") for line in io.StringIO(text, newline=""))
    return (row for row in csv.reader(lines, delimiter=delimiter) if row)


def _count(file: BinaryIO, first: bytes, size: int | None, delimiter: str, most: int) -> int | None:
    """The rows below the header; None where the file is too large to count them."""
    if size is not None and size > most:
        return None
    lines = _Lines(file, first, most)
    csv.field_size_limit(FIRST_BYTES)
    try:
        rows = sum(1 for row in csv.reader(lines, delimiter=delimiter) if row)
    except csv.Error:
        return None
    return None if lines.has_more else max(rows - 1, 0)


class _Lines:
    """The lines of a file of which the beginning has been read, up to `most` bytes."""

    def __init__(self, file: BinaryIO, first: bytes, most: int) -> None:
        self._file, self._first, self._most = file, first, most
        self.has_more = False

    def __iter__(self) -> Iterator[str]:
        seen, kept, data = 0, b"", self._first
        while data:
            seen += len(data)
            *lines, kept = (kept + data).split(b"\n")
            for line in lines:
                yield line.decode("latin-1").replace("\x00", " ") + "\n"
            if seen > self._most or len(kept) > FIRST_BYTES:
                self.has_more = True
                return
            data = self._file.read(_CHUNK)
        if kept:
            yield kept.decode("latin-1").replace("\x00", " ")


def _type_of(cells: list[str]) -> str:
    """What the first values of a column look like."""
    filled = [cell for cell in cells if cell.strip()]
    for name, kind in (("integer", int), ("number", float)):
        try:
            for cell in filled:
                kind(cell)
        except ValueError:
            continue
        return name if filled else ""
    return "text"


def _cell(value: Any) -> str:
    text = readable(value if isinstance(value, str) else str(value))
    return text if len(text) <= CELL_MAX else text[:CELL_MAX] + "…"


def _preview(
    columns: tuple[tuple[str, str], ...],
    cells: tuple[tuple[str, ...], ...],
    total: int | None,
    width: int,
    problem: str,
) -> Preview:
    """A table of these columns (name and type), all or the first; it has `total` rows, if that is known."""
    summary = counted(width, "column")
    summary = f"{counted(total, 'row')} of {summary}" if total is not None else summary
    if width > len(columns):
        problem = f"{problem} Only the first {len(columns):,} columns are shown.".strip()
    names = tuple(f"{name} ({kind})" if kind else name for name, kind in columns)
    is_cut = total is None or total > len(cells) or width > len(columns)
    return Preview(TABLE, summary, rows=(names, *cells), is_cut=is_cut, problem=problem)


def decode_parquet(file: BinaryIO, detail: Detail) -> Preview:
    """A parquet file, by pyarrow. Raises what pyarrow raises."""
    parquet = importlib.import_module("pyarrow.parquet")
    with parquet.ParquetFile(file, memory_map=False, pre_buffer=False) as table:
        schema = table.schema_arrow
        width, total = len(schema), int(table.metadata.num_rows)
        columns = tuple(
            (readable(one.name)[:CELL_MAX], str(one.type)[:CELL_MAX]) for one in list(schema)[:COLUMNS_MAX]
        )
        names = [one.name for one in list(schema)[:COLUMNS_MAX]]
        found: list[tuple[str, ...]] = []
        for batch in table.iter_batches(batch_size=detail.rows, columns=names, use_threads=False):
            lists = [_values(column) for column in batch.columns]
            found += zip(*lists, strict=False)
            break
    return _preview(columns, tuple(found[: detail.rows]), total, width, "")


def _values(column: Any) -> list[str]:
    return [_cell(_shown(value)) for value in column]


def _shown(value: Any) -> Any:
    """A value of Arrow for a cell: bytes by their number, lists by their first items, times as they are kept.

    Python has no times in nanoseconds or far away, and those of a zone need files that a worker cannot open.
    """
    types = importlib.import_module("pyarrow").types
    kind = value.type
    if not value.is_valid:
        return ""
    if types.is_dictionary(kind):
        return _shown(value.value)
    if types.is_struct(kind):
        return {name: _shown(one) for name, one in itertools.islice(value.items(), ITEMS_MAX)}
    if types.is_nested(kind) and hasattr(value, "values"):
        items = value.values  # sliced before it is taken apart: a list may be long
        shown = [_shown(one) for one in items.slice(0, ITEMS_MAX)]
        return f"{str(shown)[:-1]}, … {len(items) - ITEMS_MAX:,} more]" if len(items) > ITEMS_MAX else shown
    if types.is_timestamp(kind):
        return _time_text(value)
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return counted(value.as_buffer().size, "byte")
    try:
        return value.as_py()
    except (ValueError, OverflowError):  # out of Python's range, or a text that is not UTF-8
        return _by_arrow(value)


def _time_text(value: Any) -> str:
    """A time as `2024-05-01 12:00:00.000000001`; one that has a zone in UTC, with `Z`."""
    pyarrow = importlib.import_module("pyarrow")
    plain = pyarrow.scalar(value.value, pyarrow.timestamp(value.type.unit))
    return f"{_by_arrow(plain)}{'Z' if value.type.tz else ''}"


def _by_arrow(value: Any) -> str:
    """A value as Arrow writes it; where it cannot, the number that it keeps, and its type."""
    pyarrow = importlib.import_module("pyarrow")
    try:
        return str(value.cast(pyarrow.string()).as_py())
    except (ValueError, pyarrow.ArrowException):
        return f"{getattr(value, 'value', '')} ({value.type})".strip()


def warm_up_parquet() -> None:
    """Load what pyarrow loads when it is first needed."""
    pyarrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    pyarrow.set_cpu_count(1)
    pyarrow.set_io_thread_count(1)
    target = io.BytesIO()
    times = pyarrow.array([1, 2], pyarrow.timestamp("ns", "UTC"))
    columns = {"a": [1, 2], "b": ["x", None], "c": [[1], [2]], "d": [b"", b"1"], "e": times, "f": [{"x": 1}, None]}
    parquet.write_table(pyarrow.table(columns), target)
    target.seek(0)
    decode_parquet(target, Detail(1, 1, 2))
