"""Decodes JSON, tables and NumPy arrays: as text, rows and pictures. Nothing is unpickled."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy
from PIL import Image

from wdsfs.errors import counted
from wdsfs.pages.decode_media import picture_of, stretched
from wdsfs.pages.preview import Detail, Picture, Preview, decoded, error_text, text_preview, without_controls
from wdsfs.pages.wire import Member

PARSED_MAX = 4 << 20  # bytes of JSON; of more only the beginning is shown, as text
LINES_MAX = 1000  # of JSON lines that are parsed
_WRITTEN = 50  # bytes of JSON lines that are read for each character that is shown

FIRST_BYTES = 1 << 20  # of a csv file that is too long to be counted; no cell is longer
COUNTED = 8  # rows are counted in csv files of up to this part (an eighth) of the bytes that may be read
COLUMNS_MAX = 100  # that are shown
CELL_MAX = 200  # characters

VALUES_BYTES = 48 << 20  # of one array that are read
ARRAYS_MAX = 12  # of an npz that are shown
EDGE_OF_MANY = 256  # pixels of their pictures: a page has all of them
SHOWN = 64  # first values that are shown
CELL = 60  # characters of them in a row of an npz
_EDGE_MIN = 8  # pixels: a smaller array is hardly a picture
_HEADER_MAX = 10_000  # characters


def _read_exactly(file: BinaryIO, length: int) -> bytes:
    """Return `length` bytes, fewer only at the end."""
    target = io.BytesIO()
    while length and (part := file.read(min(length, 1 << 20))):
        target.write(part)
        length -= len(part)
    return target.getvalue()


# --- JSON


def decode_json(member: Member, detail: Detail) -> Preview:
    """Return a JSON document with a line for each value; as text if it is too large, or broken."""
    size = member.least_size
    if size > PARSED_MAX:
        data = member.file.read(detail.characters * 4)
        return text_preview(data, size, detail)._replace(
            kind="json", problem=f"More than {PARSED_MAX >> 20} MiB: the beginning is shown as text."
        )
    data = member.file.read(size)
    try:
        value = json.loads(decoded(data, True)[0])
        text, is_cut = _beginning_of_json([value], detail.characters, indent=2)
    except (ValueError, RecursionError) as error:
        return text_preview(data, size, detail)._replace(problem=f"It is not shown as JSON: {error_text(error)}.")
    return Preview("json", _json_summary(value), text=text, is_cut=is_cut)


def decode_lines(member: Member, detail: Detail) -> Preview:
    """Decode JSON lines: a document in each line, as far as they fit."""
    size = member.least_size
    data = member.file.read(min(size, PARSED_MAX, detail.characters * _WRITTEN))
    lines = decoded(data, len(data) >= size)[0].removesuffix("\n").split("\n")  # not U+2028: a text may have it
    if len(data) < size and len(lines) > 1:
        lines.pop()  # perhaps cut
    values = []
    try:
        for line in lines[:LINES_MAX]:
            if line.strip():
                values.append(json.loads(line))
        text, is_cut = _beginning_of_json(values, detail.characters)
    except (ValueError, RecursionError) as error:
        problem = f"It is not shown as JSON, because of line {len(values) + 1:,}: {error_text(error)}."
        return text_preview(data, size, detail)._replace(problem=problem)
    is_cut = is_cut or len(data) < size or len(lines) > LINES_MAX
    summary = "the beginning" if len(data) < size else counted(len(lines), "line")
    return Preview("json", summary, text=text, is_cut=is_cut)


def _json_summary(value: Any) -> str:
    if isinstance(value, dict):
        return f"an object of {counted(len(value), 'field')}"
    return f"a list of {counted(len(value), 'item')}" if isinstance(value, list) else "a value"


def _beginning_of_json(values: list[Any], most: int, indent: int | None = None) -> tuple[str, bool]:
    """Return the first `most` characters of the documents as text, and True if there are more.

    Each document begins a line. Raises RecursionError for one that is nested too deeply.
    """
    encoder = json.JSONEncoder(ensure_ascii=False, indent=indent)
    parts, length = list[str](), 0
    for number, value in enumerate(values):
        # Piece by piece: with its indentation, a nested list may be a hundred times as long as it was.
        for part in itertools.chain(["\n"] if number else [], encoder.iterencode(value)):
            parts.append(part)
            length += len(part)
            if length > most:
                return without_controls("".join(parts)[:most]), True
    return without_controls("".join(parts)), False


# --- tables


def decode_csv(member: Member, detail: Detail) -> Preview:
    """Return a csv or tsv file whose first row has the names."""
    is_counted = member.least_size <= detail.read // COUNTED
    data = _read_exactly(member.file, member.size if is_counted else FIRST_BYTES)
    text, note = decoded(data, is_counted or len(data) == member.least_size)
    rows = _csv_rows(text, "\t" if member.extension == "tsv" else _delimiter(text))
    header = next(rows, [])
    shown = list(itertools.islice(rows, detail.rows))
    total = None
    if is_counted:
        try:
            total = len(shown) + sum(1 for _ in rows)
        except csv.Error:
            total = None
    names = [without_controls(name)[:CELL_MAX] for name in header[:COLUMNS_MAX]]
    columns = tuple((name, _type_of([row[at] for row in shown if at < len(row)])) for at, name in enumerate(names))
    cells = tuple(tuple(_cell(cell) for cell in row[:COLUMNS_MAX]) for row in shown)
    return _table(columns, cells, total, len(header), note)


def _delimiter(text: str) -> str:
    """Return the delimiter of the first line: a comma, unless there are more semicolons or tabs."""
    line = text.partition("\n")[0]
    return max(",;\t", key=line.count)


def _csv_rows(text: str, delimiter: str) -> Iterator[list[str]]:
    csv.field_size_limit(FIRST_BYTES)
    lines = (line.replace("\x00", "\u2400") for line in io.StringIO(text, newline=""))
    return (row for row in csv.reader(lines, delimiter=delimiter) if row)


def _type_of(cells: list[str]) -> str:
    """Return the type of the first values of a column: integer, number or text; empty without values."""
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
    text = without_controls(value if isinstance(value, str) else str(value))
    return text if len(text) <= CELL_MAX else text[:CELL_MAX] + "…"


def _table(
    columns: tuple[tuple[str, str], ...],
    cells: tuple[tuple[str, ...], ...],
    total: int | None,
    width: int,
    problem: str,
) -> Preview:
    """Return a table of these columns (name and type), the first of `width`; it has `total` rows (or None)."""
    summary = counted(width, "column")
    summary = f"{counted(total, 'row')} of {summary}" if total is not None else summary
    if width > len(columns):
        problem = f"{problem} Only the first {len(columns):,} columns are shown.".strip()
    names = tuple(f"{name} ({kind})" if kind else name for name, kind in columns)
    is_cut = total is None or total > len(cells) or width > len(columns)
    return Preview("table", summary, rows=(names, *cells), is_cut=is_cut, problem=problem)


# --- arrays


def decode_array(member: Member, detail: Detail) -> Preview:
    """Return an npy file: type, shape, range and first values, and a picture. Raises ValueError."""
    return _array(member.file, detail, _values_bytes(detail))


def decode_arrays(member: Member, detail: Detail) -> Preview:
    """Return an npz file: its first arrays. Raises BadZipFile."""
    left = _values_bytes(detail)
    rows = [("array", "type, shape, range", "first values")]
    pictures: list[Picture] = []
    with zipfile.ZipFile(member.file) as archive:
        entries = archive.infolist()
        edge = detail.edge if len(entries) == 1 else min(detail.edge, EDGE_OF_MANY)
        for entry in entries[:ARRAYS_MAX]:
            name = without_controls(entry.filename.removesuffix(".npy"))[:200]
            array = _array_in(archive, entry, detail._replace(edge=edge), left)
            left -= min(left, entry.file_size)
            rows.append((name, array.summary, array.problem or array.text[:CELL]))
            pictures += (picture._replace(alt=f"{name}: {picture.alt}") for picture in array.pictures)
    is_cut = len(entries) > ARRAYS_MAX
    return Preview("array", counted(len(entries), "array"), tuple(pictures), rows=tuple(rows), is_cut=is_cut)


def _array_in(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, detail: Detail, most: int) -> Preview:
    try:
        with archive.open(entry) as file:
            return _array(file, detail, most)
    except (ValueError, OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error) as error:
        return Preview("array", problem=f"It cannot be decoded: {error_text(error)}.")


def _values_bytes(detail: Detail) -> int:
    return min(VALUES_BYTES, detail.read // 4 * 3)


def _array(file: Any, detail: Detail, most: int) -> Preview:
    """Return an array, of which `most` bytes may be read."""
    shape, fortran, dtype = _header(file)
    summary = f"{_name_of(dtype)}, {' x '.join(f'{n:,}' for n in shape) or 'a single value'}"
    if dtype.hasobject:
        text = "It holds pickled Python objects, which could run anything: never loaded."
        return Preview("array", summary, problem=text)
    count = math.prod(shape)
    if not dtype.itemsize or not count:
        return Preview("array", f"{summary}, no values")
    allowed = min(count, most // dtype.itemsize)
    data = _read_exactly(file, allowed * dtype.itemsize)
    there = len(data) // dtype.itemsize
    values = np.frombuffer(data, dtype, there)
    problem, pictures = "", tuple[Picture, ...]()
    if there < allowed:
        problem = f"It is cut off: it has {there:,} of {count:,} values."
    elif there < count:
        problem = f"Only the first {there:,} of {count:,} values are read."
    summary = f"{summary}, {_range(values)}".removesuffix(", ")
    if there == count:
        image = _image(values.reshape(shape, order="F" if fortran else "C"), detail)
        pictures = (picture_of(image, f"array of {summary}"),) if image else ()
    return Preview("array", summary, pictures, _first(values, detail), is_cut=count > SHOWN, problem=problem)


def _header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, order and type of the array that follows. Raises ValueError."""
    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"an npy file of the unknown version {version}")
    shape, fortran, dtype = read(file, max_header_size=_HEADER_MAX)
    if len(shape) > 32 or any(n < 0 for n in shape):
        raise ValueError("an impossible shape")
    return shape, fortran, dtype


def _name_of(dtype: np.dtype[Any]) -> str:
    return without_controls(str(dtype.descr) if dtype.names else str(dtype))[:500]


def _range(values: np.ndarray) -> str:
    """Return the smallest and the largest value, and how many are not finite."""
    if values.dtype.kind not in "biuf" or not len(values):
        return ""
    odd = 0
    if values.dtype.kind == "f":
        finite = np.isfinite(values)
        odd = len(values) - int(finite.sum())
        values = values[finite] if odd else values
    text = f"from {values.min()} to {values.max()}" if len(values) else ""
    return f"{text}, {odd:,} not finite".removeprefix(", ") if odd else text


def _first(values: np.ndarray, detail: Detail) -> str:
    """Return the first values, as NumPy writes them."""
    some = values[:SHOWN]
    if some.dtype.kind in "SUV" and some.dtype.itemsize > 1000:
        return ""
    return without_controls(np.array2string(some, threshold=SHOWN, max_line_width=100))[: detail.characters]


def _image(values: np.ndarray, detail: Detail) -> Image.Image | None:
    """Return a picture of an array of two dimensions, or of one with 1, 3 or 4 channels first or last."""
    if values.dtype.kind not in "biuf":
        return None
    if values.ndim == 3:
        if values.shape[2] not in (1, 3, 4) and values.shape[0] in (1, 3, 4):
            values = values.transpose(1, 2, 0)
        if values.shape[2] not in (1, 3, 4):
            return None
        values = values[:, :, 0] if values.shape[2] == 1 else values
    if values.ndim not in (2, 3) or min(values.shape[:2]) < _EDGE_MIN:
        return None
    step = max(math.ceil(max(values.shape[:2]) / detail.edge), 1)
    values = np.ascontiguousarray(values[::step, ::step])
    if not min(values.shape[:2]):
        return None
    if values.dtype == np.uint8:
        return Image.fromarray(values)
    if values.ndim == 3:
        return Image.merge("RGB", [stretched(values[:, :, n]) for n in range(3)])
    return stretched(values)


# --- loading


def warm_up() -> None:
    """Make NumPy and others load what they load at their first use: afterwards no file can be opened."""
    target = io.BytesIO()
    np.savez_compressed(target, a=np.zeros((9, 9, 3), np.float32), b=np.zeros(3, "S2"), c=np.zeros(3, "i4,f8"))
    target.seek(0)
    decode_arrays(Member(target, 0, "npz"), Detail(64, 100, 3))
    decode_json(Member(io.BytesIO(b'{"a": [1]}'), 10, "json"), Detail(1, 10, 1))
    decode_csv(Member(io.BytesIO(b"a,b\n1,2\n"), 8, "csv"), Detail(1, 10, 1))
