"""Decodes the columns of samples by the last part of their extension, as the webdataset library does.

Pictures become those of Pillow, arrays those of NumPy. Columns without a decoder stay bytes, pickles too: loading
one can run any code.
"""

from __future__ import annotations

import importlib
import io
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from wdsfs.errors import DecodeError, UsageError, bytes_text
from wdsfs.tree import json_fields

INTEGER, TEXT, JSON = range(3)
# The kinds of small texts, by the last part of the extension.
KINDS = {
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), INTEGER),
    **dict.fromkeys(("txt", "text", "transcript", "caption"), TEXT),
    **dict.fromkeys(("json", "jsn"), JSON),
}
PICTURES = ("jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm", "pbm", "pnm")
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # whatever the name says: others run programs
_ARRAYS_MAX = 4 << 30  # bytes of all arrays of an .npz

Decoder = Callable[[bytes], Any]


def _number(data: bytes) -> int:
    try:
        return int(data)
    except ValueError:
        raise ValueError(f"{data!r:.40} is no whole number; decode={{'cls': bytes.decode}} is its text") from None


def _picture(data: bytes) -> Any:
    """Return a picture in the mode that the file has, such as RGB, L or P."""
    try:
        image = importlib.import_module("PIL.Image")
    except ImportError:
        raise UsageError("pictures need Pillow: pip install pillow, or decode={'jpg': bytes}") from None
    try:
        picture = image.open(io.BytesIO(data), formats=_FORMATS)
    except image.UnidentifiedImageError:
        raise ValueError(f"it is none of {', '.join(_FORMATS)}") from None
    picture.load()
    return picture


def _array(data: bytes) -> Any:
    return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)


def _arrays(data: bytes) -> dict[str, Any]:
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        size = sum(member.file_size for member in file.infolist())
    if size > _ARRAYS_MAX:
        raise ValueError(f"its arrays have {bytes_text(size)}; the limit is {bytes_text(_ARRAYS_MAX)}")
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return dict(arrays)


_OF_KIND: dict[int, Decoder] = {INTEGER: _number, TEXT: bytes.decode, JSON: json_fields.parse}
_DECODERS: dict[str, Decoder] = {
    **{extension: _OF_KIND[kind] for extension, kind in KINDS.items()},
    **dict.fromkeys(PICTURES, _picture),
    "npy": _array,
    "npz": _arrays,
}


class SampleDecoder:
    """Decodes samples; `decoders` come before the usual ones, by the end of a column's name: `png`, or `seg.png`.

    Raises UsageError for anything but functions by extension.
    """

    def __init__(self, decoders: Mapping[str, Decoder]) -> None:
        if not isinstance(decoders, Mapping):
            raise UsageError(f"decode={decoders!r:.40}: give functions of bytes by extension")
        for extension, decoder in decoders.items():
            if not callable(decoder):
                raise UsageError(f"decode: {extension!r:.40} needs a function of bytes, not {decoder!r:.40}")
        self._decoders = _DECODERS | {extension.lower(): decoder for extension, decoder in decoders.items()}

    def decode(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return a sample with the values of its columns; the value of an empty file is the empty text or None.

        Raises DecodeError, which names sample and column.
        """
        return {name: self._value(sample, name) for name in sample}

    def _value(self, sample: Mapping[str, Any], name: str) -> Any:
        data, end = sample[name], name.lower()
        while end and end not in self._decoders:
            end = end.partition(".")[2]
        if not end or not isinstance(data, bytes):
            return data
        decoder = self._decoders[end]
        if not data and decoder not in (bytes, bytes.decode):
            return None
        try:
            return decoder(data)
        except UsageError:
            raise
        except Exception as error:
            place = f"{sample.get('__shard__', '')}/{sample.get('__key__', '')}.{name}"
            raise DecodeError(f"{place} cannot be decoded: {str(error) or type(error).__name__}") from error
