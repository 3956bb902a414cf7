"""Decodes pictures, sound and video: pictures are drawn again, of the others the headers are read.

A browser plays sound and video itself. The first picture of a video is drawn with PyAV (FFmpeg), which only
workers for videos load: it is large.
"""

from __future__ import annotations

import importlib
import io
import struct
import sys
from typing import Any

import numpy as np
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError
from tinytag import TinyTag, TinyTagException

from wdsfs.errors import counted
from wdsfs.pages.preview import (
    PLAYERS,
    PYAV,
    Detail,
    Picture,
    Preview,
    TooMuch,
    error_text,
    readable,
)
from wdsfs.pages.wire import Member

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM")
DECODED_MAX = 256 << 20  # bytes of a picture in memory
_DEPTHS = {"I": 4, "F": 4, "I;16": 2, "I;16L": 2, "I;16B": 2, "I;16N": 2}  # bytes of a pixel
_EXACT = ("1", "P", "PA")  # masks and the like: the mean of two values means something else
_QUALITY = 80
_ORIENTATION = 0x0112

UNPLAYED = "Browsers do not play this format; extract the member to play it."

# How FFmpeg calls the format. Only this one is tried: others read lists of further files.
_FORMATS = {
    **dict.fromkeys(("mp4", "m4v", "mov"), "mov"),
    **dict.fromkeys(("mkv", "webm"), "matroska"),
    "ogv": "ogg",
    "avi": "avi",
    "mpg": "mpeg",
}
_PIXEL = 4  # bytes of a decoded pixel, at the most
_FRAMES = 8  # decoded pictures that a decoder may hold at a time


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
                f"{image.width:,} x {image.height:,} pixels are too many for a preview: "
                f"it may take {DECODED_MAX >> 20} MiB."
            )
        problem = _load(image)
        upright = ImageOps.exif_transpose(_shrunk(image, detail.edge))
        if image.mode.startswith(("I", "F")):
            summary += ", its smallest value shown black, its largest white"
        return Preview("image", summary, (picture_of(upright, summary),), problem=problem)


def _load(image: Image.Image) -> str:
    """Decode as much of a picture as there is; returns what is wrong with it."""
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
    """Return a small image as a file: PNG where its colours are few or exact, else WebP.

    `alt` says what it shows.
    """
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


# --- sound and video


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
    facts += [repr(readable(str(value))[:200]) for value in (tag.title, tag.artist) if value]
    problem = "" if member.extension in PLAYERS else UNPLAYED
    return Preview("audio", ", ".join(facts), problem=problem)


def _duration_text(seconds: float) -> str:
    """Return `12.3 s`, `3:05`, `1:02:03`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def decode_video(member: Member, detail: Detail) -> Preview:
    """Return the first picture of a video and the facts in its headers, where PyAV is loaded."""
    facts = [member.extension.upper()]
    problem = "" if member.extension in PLAYERS else UNPLAYED
    if PYAV not in sys.modules:
        return Preview("video", facts[0], problem=problem)
    try:
        facts[1:], picture = _first_picture(member, detail)
    except TooMuch as error:
        problem = f"{problem} {error}".strip()
    except Exception as error:  # of any class: the content is damaged
        text = getattr(error, "strerror", None) or error_text(error)  # FFmpeg's numbers of errors mean nothing
        problem = f"{problem} No picture can be shown: {str(text)[:200]}.".strip()
    else:
        summary = ", ".join(facts)
        pictures = (picture._replace(alt=f"The first picture: {summary}"),)
        return Preview("video", summary, pictures, problem=problem)
    return Preview("video", facts[0], problem=problem)


def _first_picture(member: Member, detail: Detail) -> tuple[list[str], Picture]:
    """Return facts about a video, and its first picture. Raises TooMuch, and what PyAV raises."""
    av: Any = importlib.import_module(PYAV)
    form = _FORMATS.get(member.extension)
    with av.open(member.file, "r", format=form, metadata_errors="replace") as container:
        if not container.streams.video:
            raise ValueError("there is no video in it")
        stream = container.streams.video[0]
        stream.thread_type = "NONE"  # the stacks of threads would count as memory
        stream.codec_context.thread_count = 1
        _refuse_large(stream.width, stream.height)
        frame = next(container.decode(stream), None)
        if frame is None:
            raise ValueError("it ends before the first one")
        _refuse_large(frame.width, frame.height)
        facts = [_duration_text(container.duration / av.time_base)] if container.duration else []
        facts += [f"{frame.width:,} x {frame.height:,} pixels", str(stream.codec_context.name)]
        size = _fitting(frame.width, frame.height, detail.edge)
        image: Image.Image = frame.reformat(*size, format="rgb24").to_image()
        turn = getattr(frame, "rotation", 0)
        return facts, picture_of(image.rotate(turn, expand=True) if turn else image, "")


def _refuse_large(width: int, height: int) -> None:
    if width * height * _PIXEL * _FRAMES > DECODED_MAX:
        raise TooMuch(f"{width:,} x {height:,} pixels are too many for a picture of a video.")


# --- loading


def warm_up() -> None:
    """Load what Pillow and tinytag load at their first use: afterwards no file can be opened."""
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


def warm_up_video() -> None:
    """Load what PyAV loads at its first use: decoding a small film makes it do so."""
    av: Any = importlib.import_module(PYAV)
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        stream: Any = container.add_stream("mpeg4", rate=1)
        stream.width = stream.height = 16
        stream.pix_fmt = "yuv420p"
        black = av.VideoFrame(16, 16, "yuv420p")
        container.mux([*stream.encode(black), *stream.encode()])
    file.seek(0)
    _first_picture(Member(file, file.getbuffer().nbytes, "mkv"), Detail(16, 10, 1))
