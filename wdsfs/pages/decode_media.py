"""Decodes pictures and sound: pictures are drawn again, of sound the headers are read; a browser plays it."""

from __future__ import annotations

import io
import struct

import numpy as np
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError
from tinytag import TinyTag, TinyTagException

from wdsfs.errors import counted
from wdsfs.pages.preview import PLAYERS, UNPLAYED, Detail, Picture, Preview, TooMuch, error_text, without_controls
from wdsfs.pages.wire import Member

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM")
DECODED_MAX = 256 << 20  # bytes of a picture in memory
_DEPTHS = {"I": 4, "F": 4, "I;16": 2, "I;16L": 2, "I;16B": 2, "I;16N": 2}  # bytes of a pixel
_EXACT = ("1", "P", "PA")  # masks and the like: the mean of two values means something else
_QUALITY = 80
_ORIENTATION = 0x0112


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
    """Return numbers as shades of grey, the smallest black, the largest white; those not finite are black."""
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


# --- loading


def warm_up() -> None:
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
