"""The first picture of a video, by PyAV (FFmpeg). Only workers for videos load it: it is large."""

from __future__ import annotations

import importlib
import io
from typing import Any, BinaryIO

from PIL import Image

from wdsfs.pages.decode_media import decode_video as decode_headers
from wdsfs.pages.decode_media import duration_text
from wdsfs.pages.decode_pictures import DECODED_MAX, picture_of
from wdsfs.pages.kinds import PYAV
from wdsfs.pages.member_file import TooMuch
from wdsfs.pages.plain import error_text
from wdsfs.pages.preview import Detail, Picture, Preview

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


def decode_video(file: BinaryIO, size: int, extension: str, player: str, detail: Detail) -> Preview:
    """What the headers of a video say, and its first picture. Raises TooMuch."""
    headers = decode_headers(file, size, extension, player)
    try:
        file.seek(0)
        facts, picture = _first_picture(file, extension, detail)
    except TooMuch as error:
        return headers._replace(problem=_also(headers.problem, str(error)))
    except Exception as error:  # of any class: the content is damaged
        return headers._replace(problem=_also(headers.problem, f"There is no picture of it: {_said(error)}."))
    summary = ", ".join([extension.upper(), *facts])
    return headers._replace(summary=summary, pictures=(picture._replace(alt=f"The first picture: {summary}"),))


def _said(error: Exception) -> str:
    said = getattr(error, "strerror", None)  # FFmpeg's numbers of errors mean nothing to a reader
    return str(said)[:200] if said else error_text(error)


def _also(problem: str, text: str) -> str:
    return f"{problem} {text}".strip()


def _first_picture(file: BinaryIO, extension: str, detail: Detail) -> tuple[list[str], Picture]:
    av: Any = importlib.import_module(PYAV)

    with av.open(file, "r", format=_FORMATS.get(extension), metadata_errors="replace") as container:
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
        facts = [duration_text(container.duration / av.time_base)] if container.duration else []
        facts += [f"{frame.width:,} x {frame.height:,} pixels", str(stream.codec_context.name)]
        return facts, picture_of(_small(frame, detail.edge), "")


def _refuse_large(width: int, height: int) -> None:
    if width * height * _PIXEL * _FRAMES > DECODED_MAX:
        raise TooMuch(f"{width:,} x {height:,} pixels are too many for a picture of a video.")


def _small(frame: Any, edge: int) -> Image.Image:
    scale = min(edge / frame.width, edge / frame.height, 1)
    size = max(round(frame.width * scale), 1), max(round(frame.height * scale), 1)
    image: Image.Image = frame.reformat(*size, format="rgb24").to_image()
    turn = getattr(frame, "rotation", 0)
    return image.rotate(turn, expand=True) if turn else image


def warm_up() -> None:
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
    _first_picture(file, "mkv", Detail(16, 10, 1))
