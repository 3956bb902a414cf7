"""What kind of content a member has: by its extension, and by its first bytes where that says nothing."""

from __future__ import annotations

from typing import NamedTuple

HEAD = 4096  # first bytes of a member that kinds are found by


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


PICTURES = _words("jpg jpeg jpe jfif mpo png apng webp gif bmp dib tif tiff ppm pgm pbm pnm")
LABELS = _words("cls cls2 class label labels id index inx count key")
TEXTS = _words(
    "txt text caption captions transcript trn lab md rst srt vtt log py sh yaml yml toml ini cfg tex bib"
)
ACTIVE = _words("svg html htm xhtml xml js css")  # a browser would run, or load, what is in them
PICKLES = _words("pkl pickle pyd pth pt ckpt joblib")
LINES = _words("jsonl ndjson")
TABLES = _words("csv tsv")
PARQUET = _words("parquet pq")
PACKED = _words("gz bz2 xz lzma zst")

PLAYERS = {
    "wav": "audio/wav",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "ogg": "audio/ogg",
    "oga": "audio/ogg",
    "opus": "audio/ogg",
    "m4a": "audio/mp4",
    "aac": "audio/aac",
    "mp4": "video/mp4",
    "m4v": "video/mp4",
    "mov": "video/quicktime",
    "webm": "video/webm",
    "mkv": "video/x-matroska",
    "ogv": "video/ogg",
}
UNPLAYED = {"aiff": "audio", "aif": "audio", "wma": "audio", "sph": "audio", "avi": "video", "mpg": "video"}

# The library that only workers for videos load, and what these call the decoder that uses it.
PYAV, DRAWN_VIDEO = "av", "drawn video"

# What the worker calls a decoder, by extension.
_DECODERS = {
    **dict.fromkeys(PICTURES, "picture"),
    **dict.fromkeys(LINES, "json_lines"),
    **dict.fromkeys(PICKLES, "pickle"),
    **dict.fromkeys(TABLES, "csv"),
    **dict.fromkeys(PARQUET, "parquet"),
    **dict.fromkeys(PACKED, "packed"),
    **{extension: media.split("/")[0] for extension, media in PLAYERS.items()},
    **UNPLAYED,
    **dict.fromkeys(LABELS, "label"),
    **dict.fromkeys(TEXTS | ACTIVE, "text"),
    "json": "json",
    "npy": "array",
    "npz": "arrays",
    "pdf": "pdf",
}

_SIGNATURES = (
    (b"\xff\xd8\xff", "jpg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"GIF8", "gif"),
    (b"II*\x00", "tif"),
    (b"MM\x00*", "tif"),
    (b"\x93NUMPY", "npy"),
    (b"fLaC", "flac"),
    (b"OggS", "ogg"),
    (b"ID3", "mp3"),
    (b"\x1a\x45\xdf\xa3", "webm"),
    (b"PAR1", "parquet"),
    (b"%PDF-", "pdf"),
    (b"\x1f\x8b\x08", "gz"),
    (b"\x28\xb5\x2f\xfd", "zst"),
    (b"\xfd7zXZ\x00", "xz"),
)
_RIFF = {b"WEBP": "webp", b"WAVE": "wav", b"AVI ": "avi"}


class Content(NamedTuple):
    """The decoder for a member, and the extension that it was chosen by."""

    decoder: str
    extension: str


def content_of(name: str, head: bytes) -> Content:
    """The content of a member, by its extension (`seg.png`), file name or column name, and by its first bytes.

    An extension that is known decides, also over the bytes; so a wrong one shows. The bytes
    decide where there is none (`img`, `audio`).
    """
    extension = name.rpartition(".")[2].lower()
    if extension in _DECODERS:
        return Content(_DECODERS[extension], extension)
    found = _by_signature(head)
    if found:
        return Content(_DECODERS[found], found)
    return Content("text" if is_text(head) else "hex", extension)


def inner_name(name: str) -> str:
    """The name of what is in a compressed member: `log.txt` of `log.txt.gz`."""
    return name.rpartition(".")[0]


def is_text(head: bytes) -> bool:
    """True if these first bytes look like text in UTF-8, perhaps cut in a character."""
    if not head or b"\x00" in head:
        return False
    text = head.decode("utf-8", "replace")
    whole = text[:-1] if text.endswith("\ufffd") else text
    odd = sum(character < " " and character not in "\t\n\r\f\v\x1b" for character in whole)
    return "\ufffd" not in whole and odd == 0


def _by_signature(head: bytes) -> str | None:
    if head[:4] == b"RIFF":
        return _RIFF.get(head[8:12])
    if head[4:8] == b"ftyp":
        return "m4a" if head[8:11] == b"M4A" else "mp4"
    return next((extension for signature, extension in _SIGNATURES if head.startswith(signature)), None)
