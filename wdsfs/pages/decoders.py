"""The decoders by name, as a worker calls them."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import BinaryIO, NamedTuple

from wdsfs.pages import (
    decode_arrays,
    decode_json,
    decode_media,
    decode_packed,
    decode_pictures,
    decode_tables,
    decode_video,
    plain,
)
from wdsfs.pages.kinds import DRAWN_VIDEO, HEAD, PLAYERS, PYAV, content_of, inner_name
from wdsfs.pages.preview import Detail, Preview

PARQUET = "pyarrow"  # the library that only workers for parquet files load: it is slow to load, and large


class Task(NamedTuple):
    """What to make of a member: the decoder, the member's extension or name, and how much to show."""

    decoder: str
    name: str
    detail: Detail


class _Member(NamedTuple):
    """An open member; `size` in bytes; `is_whole` is False for the beginning of something longer."""

    file: BinaryIO
    size: int
    extension: str
    is_whole: bool = True


_Decoder = Callable[[_Member, Detail], Preview]

_DECODERS: dict[str, _Decoder] = {
    "picture": lambda member, detail: decode_pictures.decode_picture(member.file, detail),
    "json": lambda member, detail: decode_json.decode_json(member.file, _told(member), detail),
    "json_lines": lambda member, detail: decode_json.decode_lines(member.file, _told(member), detail),
    "array": lambda member, detail: decode_arrays.decode_array(member.file, detail),
    "arrays": lambda member, detail: decode_arrays.decode_arrays(member.file, detail),
    "csv": lambda member, detail: decode_tables.decode_csv(
        member.file, _told(member), detail, member.extension == "tsv"
    ),
    "parquet": lambda member, detail: decode_tables.decode_parquet(member.file, detail),
    "audio": lambda member, detail: decode_media.decode_audio(
        member.file, member.extension, PLAYERS.get(member.extension, "")
    ),
    "video": lambda member, detail: decode_media.decode_video(
        member.file, member.size, member.extension, PLAYERS.get(member.extension, "")
    ),
    DRAWN_VIDEO: lambda member, detail: decode_video.decode_video(
        member.file, member.size, member.extension, PLAYERS.get(member.extension, ""), detail
    ),
    "pickle": lambda member, detail: decode_packed.decode_pickle(member.file, member.size, detail),
    "text": lambda member, detail: plain.text_preview(
        member.file.read(plain.bytes_needed(detail)), _told(member), detail, member.extension
    ),
    "label": lambda member, detail: plain.label_preview(
        member.file.read(plain.bytes_needed(detail)), _told(member), detail
    ),
    "hex": lambda member, detail: plain.hex_preview(member.file.read(plain.HEX_BYTES), member.size),
    "pdf": lambda member, detail: plain.pdf_preview(member.file.read(plain.HEX_BYTES), member.size),
}
_OF_BEGINNINGS = ("json_lines", "csv", "text", "label", "hex", "pdf")


def _told(member: _Member) -> int:
    """The size, or one that is larger than what is there, for the beginning of something longer."""
    return member.size if member.is_whole else 1 << 62


def decode(task: Task, file: BinaryIO, size: int) -> Preview:
    """The preview of a member. Raises TooMuch, and any exception that a library raises."""
    if task.decoder != "packed":
        extension = content_of(task.name, b"").extension
        return _DECODERS[task.decoder](_Member(file, size, extension), task.detail)
    return _decode_packed(task, file)


def _decode_packed(task: Task, file: BinaryIO) -> Preview:
    data, is_whole = decode_packed.unpacked(file, content_of(task.name, b"").extension, task.detail.read // 2)
    content = content_of(inner_name(task.name) or "", data[:HEAD])
    note = f"unpacked from {content_of(task.name, b'').extension}"
    decoder = content.decoder
    if not is_whole:
        note = f"only its first {len(data) >> 20} MiB were unpacked"
        if decoder not in _OF_BEGINNINGS:
            decoder = "text" if decoder == "json" else "hex"
    elif decoder in ("packed", "parquet"):
        decoder = "hex"
    member = _Member(io.BytesIO(data), len(data), content.extension, is_whole)
    preview = _DECODERS[decoder](member, task.detail)
    # No browser plays the member: it would get the packed bytes.
    return preview._replace(
        summary=f"{preview.summary}; {note}", is_cut=preview.is_cut or not is_whole, media_type=""
    )


def warm_up(libraries: Sequence[str]) -> None:
    """Load everything that decoding needs, since later no file can be opened."""
    decode_pictures.warm_up()
    decode_arrays.warm_up()
    decode_media.warm_up()
    decode_packed.warm_up()
    decode_json.decode_json(io.BytesIO(b'{"a": [1]}'), 10, Detail(1, 10, 1))
    decode_tables.decode_csv(io.BytesIO(b"a,b\n1,2\n"), 8, Detail(1, 10, 1), False)
    for encoding in ("utf-16", "utf-8-sig", "latin-1"):
        "a".encode(encoding).decode(encoding)
    if PARQUET in libraries:
        decode_tables.warm_up_parquet()
    if PYAV in libraries:
        decode_video.warm_up()
