"""What a preview is: plain data about one file, for a page to show. Never HTML, never active content."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol

# Kinds of a preview, by which a page chooses its layout; what a preview has is shown in any case.
IMAGE, AUDIO, VIDEO, TEXT, JSON = "image", "audio", "video", "text", "json"
ARRAY, TABLE, DOCUMENT, HEX = "array", "table", "document", "hex"


class Source(Protocol):
    """The bytes of one file of a set. Safe in any thread."""

    @property
    def size(self) -> int:
        """In bytes."""

    @property
    def key(self) -> Hashable:
        """Identifies the content for the cache (fingerprint of the shard, offset); None: it is not kept."""

    def read(self, offset: int, length: int) -> bytes:
        """These bytes, fewer only at the end of the file. Raises WdsfsError."""


class Detail(NamedTuple):
    """How much a preview shows: the longer edge of pictures (pixels), characters of texts, rows of tables.

    `read` is how many bytes of the member a decoder may ask for; what needs more is refused, or seen in part.
    """

    edge: int
    characters: int
    rows: int
    read: int = 64 << 20


CARD = Detail(edge=256, characters=600, rows=4, read=16 << 20)  # for one of many on a page
WHOLE = Detail(edge=1024, characters=100_000, rows=50)  # for a page of its own


class Picture(NamedTuple):
    """A picture that was drawn anew; it holds no byte of a member as it was."""

    data: bytes
    media_type: str  # image/png or image/webp
    width: int  # pixels
    height: int
    alt: str  # what it shows, in words: "array of float32, 3 x 64 x 64"


class Preview(NamedTuple):
    """What a page shows of a file. All text is plain text, which the page escapes."""

    kind: str  # one of those above
    summary: str = ""  # one line: "640 x 480 pixels, JPEG", "float32, 3 x 224 x 224, from -1.5 to 2.1"
    pictures: tuple[Picture, ...] = ()
    text: str = ""  # text, pretty JSON, first values or a hex dump
    rows: tuple[tuple[str, ...], ...] = ()  # of a table; the first row has the names of the columns
    is_cut: bool = False  # there is more than is shown
    problem: str = ""  # in sentences, why there is no more to see
    media_type: str = ""  # under which a browser may play the member ("audio/flac"), or ""

    @property
    def weight(self) -> int:
        """About how many bytes of memory it takes."""
        cells = sum(4 * len(cell) + 60 for row in self.rows for cell in row)
        return 1000 + 4 * len(self.text) + cells + sum(500 + len(picture.data) for picture in self.pictures)


def packed(preview: Preview, blob: bytearray) -> dict[str, Any]:
    """A preview as JSON can have it; the data of pictures is appended to `blob`."""
    found = preview._asdict()
    found["pictures"] = []
    for picture in preview.pictures:
        found["pictures"].append((len(blob), len(picture.data), *picture[1:]))
        blob += picture.data
    return found


def unpacked(found: dict[str, Any], blob: bytes) -> Preview:
    """The preview that `packed` has packed. Raises ValueError, TypeError or KeyError for anything else.

    The worker that packed it may have been taken over by the bytes that it decoded, so the type of each value is
    made right here.
    """
    return Preview(
        kind=_text(found["kind"]),
        summary=_text(found["summary"]),
        pictures=tuple(_picture(blob, *picture) for picture in found["pictures"]),
        text=_text(found["text"]),
        rows=tuple(tuple(_text(cell) for cell in row) for row in found["rows"]),
        is_cut=bool(found["is_cut"]),
        problem=_text(found["problem"]),
        media_type=_text(found["media_type"]),
    )


def _text(value: Any) -> str:
    """Text that can be sent as UTF-8: without lone surrogates, which JSON and tags can hold."""
    return str(value).encode("utf-8", "replace").decode()


def _picture(blob: bytes, start: int, length: int, media_type: str, width: int, height: int, alt: str) -> Picture:
    if media_type not in ("image/png", "image/webp"):
        raise ValueError("a picture of a type that was not asked for")
    return Picture(blob[int(start) : int(start) + int(length)], media_type, int(width), int(height), _text(alt))
