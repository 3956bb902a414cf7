"""Sound and video: what their headers say. Nothing of them is decoded here: a browser plays the member itself."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from typing import BinaryIO

from tinytag import TinyTag, TinyTagException

from wdsfs.errors import counted
from wdsfs.pages.plain import error_text, readable
from wdsfs.pages.preview import AUDIO, VIDEO, Preview

UNPLAYED = "Browsers do not play this format; extract the member to play it."
BOXES_MAX = 2000  # of an MP4 that are looked at
_INSIDE = (b"moov", b"trak")  # boxes of boxes on the way to what is looked for
_ISO = ("mp4", "m4v", "mov")


def decode_audio(file: BinaryIO, extension: str, player: str) -> Preview:
    """The preview of a sound file; what its headers do not say is left out."""
    facts = [extension.upper()]
    try:
        tag = TinyTag.get(file_obj=file, tags=True, image=False)
    except (TinyTagException, ValueError, struct.error, EOFError) as error:
        return Preview(
            AUDIO, facts[0], problem=f"Its headers cannot be read: {error_text(error)}.", media_type=player
        )
    if tag.duration:
        facts.append(duration_text(tag.duration))
    if tag.samplerate:
        facts.append(f"{tag.samplerate:,} Hz")
    if tag.channels:
        facts.append(counted(tag.channels, "channel"))
    if tag.bitdepth:
        facts.append(counted(tag.bitdepth, "bit"))
    facts += [repr(readable(str(value))[:200]) for value in (tag.title, tag.artist) if value]
    return Preview(AUDIO, ", ".join(facts), problem="" if player else UNPLAYED, media_type=player)


def decode_video(file: BinaryIO, size: int, extension: str, player: str) -> Preview:
    """The preview of a video; only MP4 and related formats give duration and picture size."""
    facts = [extension.upper()]
    if extension in _ISO:
        facts += _facts_of_mp4(file, size)
    return Preview(VIDEO, ", ".join(facts), problem="" if player else UNPLAYED, media_type=player)


def duration_text(seconds: float) -> str:
    """`12.3 s`, `3:05`, `1:02:03`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _facts_of_mp4(file: BinaryIO, size: int) -> list[str]:
    found: list[str] = []
    for name, body in _boxes(file, 0, size, [BOXES_MAX]):
        if name == b"mvhd" and (seconds := _movie_seconds(body)):
            found.append(duration_text(seconds))
        elif name == b"tkhd" and len(body) >= 84:
            # The last two numbers of a track's header, in 16.16 bits; 0 x 0 for sound.
            width, height = struct.unpack(">HxxHxx", body[-8:])
            if width and height:
                found.append(f"{width:,} x {height:,} pixels")
    return found


def _boxes(file: BinaryIO, at: int, end: int, left: list[int]) -> Iterator[tuple[bytes, bytes]]:
    """The boxes of a movie with the first bytes of what is in them; `left` counts how many may still follow."""
    while at + 8 <= end and left[0] > 0:
        left[0] -= 1
        file.seek(at)
        head = file.read(16)
        if len(head) < 8:
            return
        length, name = struct.unpack(">I4s", head[:8])
        begin = at + 8
        if length == 1 and len(head) == 16:
            length, begin = int.from_bytes(head[8:], "big"), at + 16
        elif length == 0:
            length = end - at
        if length < begin - at:
            return
        if name in _INSIDE:
            yield from _boxes(file, begin, min(at + length, end), left)
        elif name in (b"mvhd", b"tkhd"):
            file.seek(begin)
            yield name, file.read(min(length - (begin - at), 128))
        at += length


def _movie_seconds(body: bytes) -> float:
    """The duration in a movie's header, 0 if it says none."""
    form = ">4xQQIQ" if body[:1] == b"\x01" else ">4xIIII"
    if len(body) < struct.calcsize(form):
        return 0.0
    _, _, scale, length = struct.unpack_from(form, body)
    return length / scale if scale else 0.0


def warm_up() -> None:
    """Load what tinytag imports at its first use: reading a small file makes it do so."""
    head = (
        b"RIFF$\x00\x00\x00WAVEfmt \x10\x00\x00\x00\x01\x00\x01\x00@\x1f\x00\x00@\x1f\x00\x00\x01\x00\x08\x00data"
    )
    decode_audio(io.BytesIO(head + bytes(4)), "wav", "")
