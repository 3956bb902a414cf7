"""Decodes members: draws pictures again, reads the headers of sound, and makes rows of tables and arrays.

A browser plays sound. Nothing is unpickled.
"""

from __future__ import annotations

import bz2
import contextlib
import csv
import gzip
import io
import itertools
import json
import lzma
import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.lib import format as npy
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError
from tinytag import TinyTag, TinyTagException

from wdsfs.errors import UsageError, counted
from wdsfs.pages.preview import (
    KIND_BYTES,
    PLAYERS,
    UNPLAYED,
    Content,
    Detail,
    Picture,
    Preview,
    TooMuch,
    content_of,
    decoded,
    error_text,
    hex_preview,
    plain_preview,
    text_preview,
    without_controls,
)
from wdsfs.wings import zstd

PICKLE_NOTE = "A pickle can run any code when it is loaded, so it is not loaded here."

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM")
DECODED_MAX = 256 << 20  # bytes of a picture in memory
_DEPTHS = {"I": 4, "F": 4, "I;16": 2, "I;16L": 2, "I;16B": 2, "I;16N": 2}  # bytes of a pixel
_EXACT = ("1", "P", "PA")  # masks and the like: the mean of two values means something else
_QUALITY = 80
_ORIENTATION = 0x0112


class Member(NamedTuple):
    """An open member for a decoder; `size` in bytes. Not `is_whole`: the beginning of something longer."""

    file: BinaryIO
    size: int
    extension: str
    is_whole: bool = True

    @property
    def least_size(self) -> int:
        """The size; for the beginning of a member a number beyond any size."""
        return self.size if self.is_whole else 1 << 62


def decode_picture(member: Member, detail: Detail) -> Preview:
    """Return the first frame of a picture, upright and without metadata.

    Raises TooMuch, and what Pillow raises.
    """
    try:
        opened = Image.open(member.file, formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"it is none of {', '.join(FORMATS)}") from None
    with opened as image:
        name = image.format or ""
        summary = f"{image.width:,} x {image.height:,} pixels, {name}, {image.mode}"
        # A JPEG can be decoded at a half, a quarter or an eighth of its size.
        image.draft(None, (detail.edge, detail.edge))
        if image.width * image.height * _DEPTHS.get(image.mode, len(image.getbands())) > DECODED_MAX:
            raise TooMuch(
                f"{image.width:,} x {image.height:,} pixels are too many for a preview, "
                f"which has {DECODED_MAX >> 20} MiB."
            )
        problem = _load(image)
        upright = ImageOps.exif_transpose(_shrunk(image, detail.edge))
        if image.mode.startswith(("I", "F")):
            summary += ", its smallest value shown black, its largest white"
        return Preview("image", summary, (picture_of(upright, summary),), problem=problem)


def _load(image: Image.Image) -> str:
    """Decode as much of a picture as there is; return the problem, or ""."""
    try:
        image.load()
        return ""
    except OSError as error:
        text = str(error)
    ImageFile.LOAD_TRUNCATED_IMAGES = True
    try:
        image.load()
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = False
    return f"It is damaged or cut off: {text[:200]}."


def _shrunk(image: Image.Image, edge: int) -> Image.Image:
    """Return a copy that fits, with the orientation of the original."""
    size = _fitting(image.width, image.height, edge)
    if image.mode.startswith(("I", "F")):
        small = stretched(np.asarray(image.resize(size, Image.Resampling.NEAREST)))
    elif image.mode in _EXACT:
        small = image.resize(size, Image.Resampling.NEAREST)
    else:
        small = image.resize(size, Image.Resampling.LANCZOS, reducing_gap=2)
    small.info = {name: value for name, value in image.info.items() if name == "transparency"}
    orientation = image.getexif().get(_ORIENTATION)
    if orientation:
        small.getexif()[_ORIENTATION] = orientation
    return small


def _fitting(width: int, height: int, edge: int) -> tuple[int, int]:
    """Return the size of a picture whose longer edge is at most `edge`."""
    scale = min(edge / width, edge / height, 1)
    return max(round(width * scale), 1), max(round(height * scale), 1)


def stretched(values: np.ndarray) -> Image.Image:
    """Return numbers as shades of grey: the smallest and infinite ones and NaN black, the largest white."""
    numbers = values.astype(np.float64)
    finite = np.isfinite(numbers)
    low, high = (numbers[finite].min(), numbers[finite].max()) if finite.any() else (0.0, 0.0)
    grey = np.where(finite, (numbers - low) / ((high - low) or 1.0), 0.0)
    return Image.fromarray((grey * 255).astype(np.uint8))


def picture_of(image: Image.Image, alt: str) -> Picture:
    """Return a small image as a file: PNG where its colours are few or exact, else WebP. `alt` describes it."""
    exact = image.mode in _EXACT or max(image.size) <= 64
    if image.mode in ("CMYK", "YCbCr", "LAB", "HSV", "RGBX", "RGBa"):
        image = image.convert("RGB")
    elif image.mode == "La":
        image = image.convert("LA")
    target = io.BytesIO()
    if exact:
        image.save(target, "PNG")
        return Picture(target.getvalue(), "image/png", *image.size, alt)
    image.convert("RGBA" if image.has_transparency_data else "RGB").save(
        target, "WEBP", quality=_QUALITY, method=2
    )
    return Picture(target.getvalue(), "image/webp", *image.size, alt)


# --- sound


def decode_audio(member: Member, detail: Detail) -> Preview:
    """Return the facts in the headers of a sound file."""
    facts = [member.extension.upper()]
    try:
        tag = TinyTag.get(file_obj=member.file, tags=True, image=False)
    except (TinyTagException, ValueError, struct.error, EOFError) as error:
        return Preview("audio", facts[0], problem=f"Its headers cannot be read: {error_text(error)}.")
    if tag.duration:
        facts.append(_duration_text(tag.duration))
    if tag.samplerate:
        facts.append(f"{tag.samplerate:,} Hz")
    if tag.channels:
        facts.append(counted(tag.channels, "channel"))
    if tag.bitdepth:
        facts.append(counted(tag.bitdepth, "bit"))
    facts += [repr(without_controls(str(value))[:200]) for value in (tag.title, tag.artist) if value]
    problem = "" if member.extension in PLAYERS else UNPLAYED
    return Preview("audio", ", ".join(facts), problem=problem)


def _duration_text(seconds: float) -> str:
    """Return `12.3 s`, `3:05`, `1:02:03`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


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
    """Return a table of these columns (name and type), the first of `width`, with `total` rows (None: unknown)."""
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


# --- by the kind of a content


_DECODERS: dict[str, Callable[[Member, Detail], Preview]] = {
    "picture": decode_picture,
    "audio": decode_audio,
    "array": decode_array,
    "arrays": decode_arrays,
    "json": decode_json,
    "json_lines": decode_lines,
    "csv": decode_csv,
    "pickle": lambda member, detail: _decode_pickle(member, detail),
}


def decode(decoder: str, name: str, member: Member, detail: Detail) -> Preview:
    """Return the preview of a member. Raises TooMuch, and any exception that a library raises."""
    return _decode_packed(name, member, detail) if decoder == "packed" else _DECODERS[decoder](member, detail)


def _decode_packed(name: str, member: Member, detail: Detail) -> Preview:
    """Return the preview of the content of a compressed member, unpacked up to a limit."""
    data, is_whole = unpacked(member, detail.read // 2)
    content = content_of(name.rpartition(".")[0], data[:KIND_BYTES])
    note = f"unpacked from {member.extension}"
    if not is_whole:
        note = f"only its first {len(data) >> 20} MiB were unpacked"
        if content.decoder not in ("json_lines", "csv", "text", "label", "hex", "pdf"):
            content = Content("text" if content.decoder == "json" else "hex", content.extension)
    elif content.decoder == "packed":
        content = Content("hex", content.extension)
    inner = Member(io.BytesIO(data), len(data), content.extension, is_whole)
    shown_size = inner.size if content.decoder in ("hex", "pdf") else inner.least_size
    preview = plain_preview(content, data, shown_size, detail)
    if preview is None:
        preview = _DECODERS[content.decoder](inner, detail)
    return preview._replace(summary=f"{preview.summary}; {note}", is_cut=preview.is_cut or not is_whole)


def unpacked(member: Member, most: int) -> tuple[bytes, bool]:
    """Return up to `most` unpacked bytes of a content, and True if that is all. Raises what its reader raises."""
    with _reader(member) as reader:
        target = io.BytesIO()
        while part := reader.read(min(1 << 20, most - target.tell())):
            target.write(part)
        return target.getvalue(), target.tell() < most or not reader.read(1)


def _reader(member: Member) -> Any:
    if member.extension == "gz":
        return gzip.GzipFile(fileobj=member.file)
    if member.extension == "bz2":
        return bz2.BZ2File(member.file)
    if member.extension in ("xz", "lzma"):
        return lzma.LZMAFile(member.file)
    try:
        return zstd().ZstdFile(member.file)
    except UsageError as error:
        raise TooMuch(f"It cannot be unpacked: {error}.") from None


def _decode_pickle(member: Member, detail: Detail) -> Preview:
    """Return a pickle, or the names in a PyTorch archive: as bytes, never loaded."""
    head = member.file.read(KIND_BYTES)
    preview = hex_preview(head, member.size, PICKLE_NOTE)
    if not head.startswith(b"PK\x03\x04"):
        return preview
    with zipfile.ZipFile(member.file) as archive:
        entries = archive.infolist()
    rows = [(without_controls(entry.filename)[:200], f"{entry.file_size:,}") for entry in entries[: detail.rows]]
    summary = f"a zip archive of {counted(len(entries), 'file')}, {preview.summary}"
    return preview._replace(summary=summary, rows=(("name", "bytes"), *rows))


# --- loading


def warm_up() -> None:
    """Load everything that decoding needs, since later no file can be opened."""
    _warm_up_media()
    _warm_up_data()
    for extension, data in (("gz", gzip.compress(b"a")), ("bz2", bz2.compress(b"a")), ("xz", lzma.compress(b"a"))):
        unpacked(Member(io.BytesIO(data), len(data), extension), 10)
    with contextlib.suppress(UsageError):
        unpacked(Member(io.BytesIO(zstd().compress(b"a")), 0, "zst"), 10)
    for encoding in ("utf-16", "utf-8-sig", "latin-1"):
        "a".encode(encoding).decode(encoding)


def _warm_up_media() -> None:
    """Make Pillow and tinytag load what they load at their first use: afterwards no file can be opened."""
    Image.MAX_IMAGE_PIXELS = None  # the limit is ours
    Image.init()
    forms = {"JPEG": "RGB", "WEBP": "RGBA", "GIF": "P", "TIFF": "L", "PNG": "RGB", "PPM": "1"}
    for form, mode in forms.items():
        target = io.BytesIO()
        Image.new(mode, (80, 80)).save(target, form)
        target.seek(0)
        decode_picture(Member(target, 0, ""), Detail(70, 1, 1))
    picture_of(stretched(np.zeros((80, 80))), "")
    sound = (
        b"RIFF$\x00\x00\x00WAVEfmt \x10\x00\x00\x00\x01\x00\x01\x00@\x1f\x00\x00@\x1f\x00\x00\x01\x00\x08\x00data"
    )
    decode_audio(Member(io.BytesIO(sound + bytes(4)), 48, "wav"), Detail(1, 1, 1))


def _warm_up_data() -> None:
    """Make NumPy and others load what they load at their first use: afterwards no file can be opened."""
    target = io.BytesIO()
    np.savez_compressed(target, a=np.zeros((9, 9, 3), np.float32), b=np.zeros(3, "S2"), c=np.zeros(3, "i4,f8"))
    target.seek(0)
    decode_arrays(Member(target, 0, "npz"), Detail(64, 100, 3))
    decode_json(Member(io.BytesIO(b'{"a": [1]}'), 10, "json"), Detail(1, 10, 1))
    decode_csv(Member(io.BytesIO(b"a,b\n1,2\n"), 8, "csv"), Detail(1, 10, 1))
