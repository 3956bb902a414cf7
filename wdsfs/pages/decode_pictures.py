"""Pictures: small ones, drawn anew from the decoded content, upright and without metadata."""

from __future__ import annotations

import io
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from wdsfs.pages.member_file import TooMuch
from wdsfs.pages.preview import IMAGE, Detail, Picture, Preview

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM")
DECODED_MAX = 256 << 20  # bytes of a picture in memory
_DEPTHS = {"I": 4, "F": 4, "I;16": 2, "I;16L": 2, "I;16B": 2, "I;16N": 2}  # bytes of a pixel
_EXACT = ("1", "P", "PA")  # masks and the like: the mean of two values means something else
_QUALITY = 80


def decode_picture(file: BinaryIO, detail: Detail) -> Preview:
    """The first frame of a picture. Raises TooMuch, and what Pillow raises."""
    try:
        opened = Image.open(file, formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"it is none of {', '.join(FORMATS)}") from None
    with opened as image:
        name = image.format or ""
        summary = f"{image.width:,} x {image.height:,} pixels, {name}, {image.mode}"
        # A JPEG can be decoded at a half, a quarter or an eighth of its size.
        image.draft(None, (detail.edge, detail.edge))
        _refuse_large(image)
        problem = _load(image)
        upright = ImageOps.exif_transpose(_shrunk(image, detail.edge))
        if image.mode.startswith(("I", "F")):
            summary += ", its smallest value shown black, its largest white"
        return Preview(IMAGE, summary, (picture_of(upright, summary),), problem=problem)


def _refuse_large(image: Image.Image) -> None:
    pixel = _DEPTHS.get(image.mode, len(image.getbands()))
    if image.width * image.height * pixel > DECODED_MAX:
        raise TooMuch(
            f"{image.width:,} x {image.height:,} pixels are too many for a preview: "
            f"it may take {DECODED_MAX >> 20} MiB."
        )


def _load(image: Image.Image) -> str:
    """Decode as much of a picture as there is; returns what is wrong with it."""
    try:
        image.load()
        return ""
    except OSError as error:
        said = str(error)
    ImageFile.LOAD_TRUNCATED_IMAGES = True
    try:
        image.load()
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = False
    return f"It is damaged or cut off: {said[:200]}."


def _shrunk(image: Image.Image, edge: int) -> Image.Image:
    """A copy that fits, with the orientation of the original."""
    scale = min(edge / image.width, edge / image.height, 1)
    size = max(round(image.width * scale), 1), max(round(image.height * scale), 1)
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


_ORIENTATION = 0x0112


def stretched(values: np.ndarray) -> Image.Image:
    """Numbers as shades of grey, the smallest black, the largest white; what is not finite is black."""
    numbers = values.astype(np.float64)
    finite = np.isfinite(numbers)
    low, high = (numbers[finite].min(), numbers[finite].max()) if finite.any() else (0.0, 0.0)
    grey = np.where(finite, (numbers - low) / ((high - low) or 1.0), 0.0)
    return Image.fromarray((grey * 255).astype(np.uint8))


def picture_of(image: Image.Image, alt: str) -> Picture:
    """A small image as a file: PNG where its colours are few or exact, else WebP. `alt` says what it shows."""
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


def warm_up() -> None:
    """Load what Pillow loads when it is first needed: afterwards no file can be opened."""
    Image.MAX_IMAGE_PIXELS = None  # the limit is ours
    Image.init()
    for mode, name in (
        ("RGB", "JPEG"),
        ("RGBA", "WEBP"),
        ("P", "GIF"),
        ("L", "TIFF"),
        ("RGB", "PNG"),
        ("1", "PPM"),
    ):
        target = io.BytesIO()
        Image.new(mode, (80, 80)).save(target, name)
        target.seek(0)
        decode_picture(target, Detail(70, 1, 1))
    picture_of(stretched(np.zeros((80, 80))), "")
