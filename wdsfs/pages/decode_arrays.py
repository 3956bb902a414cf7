"""NumPy arrays: shape, type, range and first values, and a picture where they look like one. Never unpickled."""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.lib import format as npy
from PIL import Image

from wdsfs.errors import counted
from wdsfs.pages.decode_pictures import picture_of, stretched
from wdsfs.pages.plain import error_text, readable
from wdsfs.pages.preview import ARRAY, Detail, Picture, Preview

VALUES_BYTES = 48 << 20  # of one array that are looked at
ARRAYS_MAX = 12  # of an npz that are shown
EDGE_OF_MANY = 256  # pixels of their pictures: a page has all of them
_EDGE_MIN = 8  # pixels: a smaller array is hardly a picture
_HEADER_MAX = 10_000  # characters
SHOWN = 64  # first values that are shown
CELL = 60  # characters of them in a row of an npz


class _Array(NamedTuple):
    """What a preview says of one array. Without `dtype` it could not be read; `problem` says why."""

    shape: str = ""
    dtype: str = ""
    range: str = ""
    values: str = ""
    is_cut: bool = False
    problem: str = ""
    picture: Picture | None = None

    @property
    def summary(self) -> str:
        return ", ".join(part for part in (self.dtype, self.shape, self.range) if part)


def decode_array(file: BinaryIO, detail: Detail) -> Preview:
    """The preview of an npy file. Raises ValueError if it is not one."""
    found = _array(file, detail, _values_bytes(detail))
    pictures = (found.picture,) if found.picture else ()
    return Preview(ARRAY, found.summary, pictures, found.values, is_cut=found.is_cut, problem=found.problem)


def decode_arrays(file: BinaryIO, detail: Detail) -> Preview:
    """The preview of an npz file: its first arrays. Raises BadZipFile."""
    left = _values_bytes(detail)
    rows = [("array", "type", "shape", "range", "")]
    pictures = []
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        edge = detail.edge if len(entries) == 1 else min(detail.edge, EDGE_OF_MANY)
        for entry in entries[:ARRAYS_MAX]:
            name = readable(entry.filename.removesuffix(".npy"))[:200]
            try:
                with archive.open(entry) as member:
                    found = _array(member, detail._replace(edge=edge), left)
            except (
                ValueError,
                OSError,
                zipfile.BadZipFile,
                NotImplementedError,
                RuntimeError,
                zlib.error,
            ) as error:
                found = _Array(problem=f"It cannot be decoded: {error_text(error)}.")
            left -= min(left, entry.file_size)
            rows.append((name, found.dtype, found.shape, found.range, found.problem or found.values[:CELL]))
            if found.picture:
                pictures.append(found.picture._replace(alt=f"{name}: {found.picture.alt}"))
    is_cut = len(entries) > ARRAYS_MAX
    return Preview(ARRAY, counted(len(entries), "array"), tuple(pictures), rows=tuple(rows), is_cut=is_cut)


def _values_bytes(detail: Detail) -> int:
    return min(VALUES_BYTES, detail.read // 4 * 3)


def _array(file: Any, detail: Detail, most: int) -> _Array:
    """An array, of which `most` bytes may be read."""
    shape, fortran, dtype = _header(file)
    told = _Array(" x ".join(f"{n:,}" for n in shape) or "a single value", _name_of(dtype))
    if dtype.hasobject:
        return told._replace(problem="It holds pickled Python objects, which could run anything: never loaded.")
    count = math.prod(shape)
    if not dtype.itemsize or not count:
        return told._replace(range="no values")
    wanted = min(count, most // dtype.itemsize)
    data = _read(file, wanted * dtype.itemsize)
    got = len(data) // dtype.itemsize
    values = np.frombuffer(data, dtype, got)
    problem = ""
    if got < wanted:
        problem = f"It is cut off: {got:,} of {count:,} values are there."
    elif got < count:
        problem = f"Only the first {got:,} of {count:,} values are looked at."
    told = told._replace(
        range=_range(values), values=_first(values, detail), is_cut=count > SHOWN, problem=problem
    )
    if got < count:
        return told
    image = _image(values.reshape(shape, order="F" if fortran else "C"), detail)
    return told._replace(picture=picture_of(image, f"array of {told.summary}") if image else None)


def _header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, order and type of the array that follows. Raises ValueError."""
    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"an npy file of the unknown version {version}")
    shape, fortran, dtype = read(file, max_header_size=_HEADER_MAX)
    if len(shape) > 32 or any(n < 0 for n in shape):
        raise ValueError("an impossible shape")
    return shape, fortran, dtype


def _read(file: Any, length: int) -> bytes:
    target = io.BytesIO()
    while length and (part := file.read(min(length, 1 << 20))):
        target.write(part)
        length -= len(part)
    return target.getvalue()


def _name_of(dtype: np.dtype[Any]) -> str:
    return readable(str(dtype.descr) if dtype.names else str(dtype))[:500]


def _range(values: np.ndarray) -> str:
    """The smallest and the largest value, and how many are not finite."""
    if values.dtype.kind not in "biuf" or not len(values):
        return ""
    odd = 0
    if values.dtype.kind == "f":
        finite = np.isfinite(values)
        odd = len(values) - int(finite.sum())
        values = values[finite] if odd else values
    found = f"from {values.min()} to {values.max()}" if len(values) else ""
    return f"{found}, {odd:,} not finite".removeprefix(", ") if odd else found


def _first(values: np.ndarray, detail: Detail) -> str:
    """The first values, as NumPy writes them."""
    some = values[:SHOWN]
    if some.dtype.kind in "SUV" and some.dtype.itemsize > 1000:
        return ""
    return readable(np.array2string(some, threshold=SHOWN, max_line_width=100))[: detail.characters]


def _image(values: np.ndarray, detail: Detail) -> Image.Image | None:
    """A picture of an array of two dimensions, or of one with 1, 3 or 4 channels first or last."""
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


def warm_up() -> None:
    """Load what NumPy loads when it is first needed."""
    target = io.BytesIO()
    np.savez_compressed(target, a=np.zeros((9, 9, 3), np.float32), b=np.zeros(3, "S2"), c=np.zeros(3, "i4,f8"))
    target.seek(0)
    decode_arrays(target, Detail(64, 100, 3))
