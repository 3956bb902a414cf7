"""Previews as plain data, never HTML: finds the kind of a content, and makes those of texts and hex dumps.

The kind follows from extension and first bytes. All that needs a decoder is made by workers (`previewer.py`).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal, NamedTuple, Protocol

from wdsfs.errors import counted

# Kinds of a preview, by which a page chooses its layout; all fields of a preview are shown in any case.
Kind = Literal["image", "audio", "video", "text", "json", "array", "table", "document", "hex"]

KIND_BYTES = 4096  # first bytes of a member by which its kind is known
HEX_BYTES = 512  # of a member that a hex dump shows
LABEL_CHARACTERS = 200  # a longer text is no label
UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # the marks at the beginning of such a text
UNPLAYED = "Browsers do not play this format; extract the member to play it."
PDF_NOTE = "PDF can hold active content, so it is not opened here; extract the member to read it."
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {0x7F: 0x2421}
# Marks that turn the direction of the text behind them: it could look like another one.
_CONTROLS |= dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD)


class TooMuch(Exception):
    """A preview would cost more than it may. The text is a whole sentence."""


class Source(Protocol):
    """The bytes of one file of a set. Safe in any thread."""

    @property
    def size(self) -> int:
        """Return the size in bytes."""

    @property
    def key(self) -> Hashable:
        """Identifies the content for the cache (fingerprint of the shard, offset); None: it is not cached."""

    def read(self, offset: int, length: int) -> bytes:
        """Return these bytes, fewer only at the end of the file. Raises WdsfsError."""


class Detail(NamedTuple):
    """The size of a preview: the longer edge of pictures (pixels), characters of texts, rows of tables.

    A decoder may ask for `read` bytes of the member. A larger member is refused, or shown in part.
    """

    edge: int
    characters: int
    rows: int
    read: int = 64 << 20


CARD = Detail(edge=256, characters=600, rows=4, read=16 << 20)  # for one of many on a page
WHOLE = Detail(edge=1024, characters=100_000, rows=50)  # for a page of its own


class Picture(NamedTuple):
    """A picture that was drawn again, so that no byte of a member reaches the browser."""

    data: bytes
    media_type: str  # image/png or image/webp
    width: int  # pixels
    height: int
    alt: str  # what it shows, in words: "array of float32, 3 x 64 x 64"


class Preview(NamedTuple):
    """The data that a page shows of a file. All text is plain text, which the page escapes."""

    kind: Kind
    summary: str = ""  # one line: "640 x 480 pixels, JPEG", "float32, 3 x 224 x 224, from -1.5 to 2.1"
    pictures: tuple[Picture, ...] = ()
    text: str = ""  # text, pretty JSON, first values or a hex dump
    rows: tuple[tuple[str, ...], ...] = ()  # of a table; the first row has the names of the columns
    is_cut: bool = False  # there is more than is shown
    problem: str = ""  # in sentences, why there is no more to see

    @property
    def weight(self) -> int:
        """The bytes of memory that this takes, about."""
        cells = sum(4 * len(cell) + 60 for row in self.rows for cell in row)
        return 1000 + 4 * len(self.text) + cells + sum(500 + len(picture.data) for picture in self.pictures)


# --- kinds of content


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TEXTS = _words(
    "txt text caption captions transcript trn lab md rst srt vtt log py sh yaml yml toml ini cfg tex bib"
)
ACTIVE = _words("svg html htm xhtml xml js css")  # a browser would run, or load, their content

# Media types of the files that a player may get. Nothing here can run: these are sound and moving pictures.
PLAYERS = {
    **dict.fromkeys(("ogg", "oga", "opus"), "audio/ogg"),
    **dict.fromkeys(("mp4", "m4v", "mov"), "video/mp4"),
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "m4a": "audio/mp4",
    "aac": "audio/aac",
    "weba": "audio/webm",
    "webm": "video/webm",
    "mkv": "video/x-matroska",
    "ogv": "video/ogg",
}

# The extensions of the members of each decoder.
_EXTENSIONS = {
    "picture": "jpg jpeg jpe jfif mpo png apng webp gif bmp dib tif tiff ppm pgm pbm pnm",
    "audio": "aiff aif wma sph",
    "video": "avi mpg",
    "label": "cls cls2 class label labels id index inx count key",
    "json": "json",
    "json_lines": "jsonl ndjson",
    "csv": "csv tsv",
    "array": "npy",
    "arrays": "npz",
    "pickle": "pkl pickle pyd pth pt ckpt joblib",
    "packed": "gz bz2 xz lzma zst",
    "pdf": "pdf",
}
_DECODERS = {
    **dict.fromkeys(TEXTS | ACTIVE, "text"),
    **{extension: media_type.split("/")[0] for extension, media_type in PLAYERS.items()},
    **{extension: decoder for decoder, extensions in _EXTENSIONS.items() for extension in extensions.split()},
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
    """Return the content of a member, by its extension, file name or column name, and by its first bytes.

    A known extension (`seg.png`) decides, even against the bytes, so that a wrong one is noticed. The bytes decide
    where there is none (`img`, `audio`).
    """
    extension = name.rpartition(".")[2].lower()
    if extension not in _DECODERS:
        by_signature = _by_signature(head)
        if by_signature is None:
            return Content("text" if _is_text(head) else "hex", extension)
        extension = by_signature
    return Content(_DECODERS[extension], extension)


def _is_text(head: bytes) -> bool:
    """Return True if these first bytes look like text in UTF-8, perhaps cut in a character."""
    if not head or b"\x00" in head:
        return False
    text = head.decode("utf-8", "replace")
    whole = text[:-1] if text.endswith("\ufffd") else text
    return "\ufffd" not in whole and not any(
        character < " " and character not in "\t\n\r\f\v\x1b" for character in whole
    )


def _by_signature(head: bytes) -> str | None:
    if head[:4] == b"RIFF":
        return _RIFF.get(head[8:12])
    if head[4:8] == b"ftyp":
        return "m4a" if head[8:11] == b"M4A" else "mp4"
    return next((extension for signature, extension in _SIGNATURES if head.startswith(signature)), None)


# --- texts, labels and hex


def without_controls(text: str) -> str:
    """Return text in which every control character is visible, and line ends are newlines."""
    return text.replace("\r\n", "\n").translate(_CONTROLS)


def error_text(error: Exception) -> str:
    """Return the text of a decoder's exception, for the middle of a sentence."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    text = without_controls(" ".join(str(error).split())[:200]).rstrip(".")
    return text or f"it is cut off or damaged ({type(error).__name__})"


def bytes_needed(detail: Detail) -> int:
    """Return the number of first bytes of a member that `plain_preview` needs for this detail."""
    return detail.characters * 4 + 4


def decoded(data: bytes, is_whole: bool) -> tuple[str, str]:
    """Return bytes as text, and a note about bytes that are not. UTF-16 is known by its mark."""
    encoding = "utf-16" if data[:2] in UTF_16 else "utf-8-sig"
    try:
        return data.decode(encoding), ""
    except UnicodeDecodeError as error:
        if not is_whole and error.end == len(data):  # cut in a character
            return data[: error.start].decode(encoding), ""
    return data.decode(encoding, "replace"), "Not all of it is UTF-8: other bytes are shown as \ufffd."


def plain_preview(content: Content, data: bytes, size: int, detail: Detail) -> Preview | None:
    """Return the preview of a member of `size` bytes by its first bytes; None for one that needs a decoder."""
    if content.decoder == "hex" or not size:
        return hex_preview(data, size)
    if content.decoder == "text":
        return text_preview(data, size, detail, content.extension)
    if content.decoder == "label":
        return _label_preview(data, size, detail)
    if content.decoder == "pdf":
        return hex_preview(data, size, PDF_NOTE)._replace(kind="document")
    if content.decoder == "video":  # a browser shows it, with its first picture
        problem = "" if content.extension in PLAYERS else UNPLAYED
        return Preview("video", content.extension.upper(), problem=problem)
    return None


def text_preview(data: bytes, size: int, detail: Detail, extension: str = "") -> Preview:
    """Return a text of `size` bytes, by its first bytes."""
    text, note = decoded(data, len(data) >= size)
    is_cut = len(data) < size or len(text) > detail.characters
    lines = text.count("\n") + (not text.endswith("\n")) if text else 0
    summary = "the beginning" if is_cut else f"{counted(len(text), 'character')} in {counted(lines, 'line')}"
    if extension in ACTIVE:
        summary += "; shown as text: nothing in it is run or loaded"
    return Preview("text", summary, text=without_controls(text[: detail.characters]), is_cut=is_cut, problem=note)


def _label_preview(data: bytes, size: int, detail: Detail) -> Preview:
    """Return the preview of a class or a number; a long one, or one of several lines, is shown as a text."""
    text = text_preview(data, size, detail)
    label = text.text.strip()
    if text.is_cut or len(label) > LABEL_CHARACTERS or "\n" in label:
        return text
    return Preview("text", "label" if label else "empty", text=label, problem=text.problem)


def hex_preview(data: bytes, size: int, problem: str = "") -> Preview:
    """Return the first bytes, sixteen a line, in hex and as ASCII."""
    shown = data[:HEX_BYTES]
    lines = []
    for at in range(0, len(shown), 16):
        part = shown[at : at + 16]
        letters = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        lines.append(f"{at:08x}  {part[:8].hex(' '):<23}  {part[8:].hex(' '):<23}  {letters}")
    summary = counted(size, "byte") if size else "empty"
    return Preview("hex", summary, text="\n".join(lines), is_cut=len(shown) < size, problem=problem)
