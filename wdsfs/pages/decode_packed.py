"""Content in a container: compressed members are unpacked up to a limit; pickles are never loaded."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import zipfile
from typing import Any, BinaryIO

from wdsfs.errors import UsageError, counted
from wdsfs.pages.member_file import TooMuch
from wdsfs.pages.plain import hex_preview, readable
from wdsfs.pages.preview import Detail, Preview
from wdsfs.tar import streams

PICKLE_NOTE = "A pickle could run anything when it is loaded, so it never is."


def unpacked(file: BinaryIO, extension: str, most: int) -> tuple[bytes, bool]:
    """Up to `most` bytes of a compressed content, and True if that is all. Raises what its reader raises."""
    with _reader(file, extension) as reader:
        target = io.BytesIO()
        while part := reader.read(min(1 << 20, most - target.tell())):
            target.write(part)
        return target.getvalue(), target.tell() < most or not reader.read(1)


def _reader(file: BinaryIO, extension: str) -> Any:
    if extension == "gz":
        return gzip.GzipFile(fileobj=file)
    if extension == "bz2":
        return bz2.BZ2File(file)
    if extension in ("xz", "lzma"):
        return lzma.LZMAFile(file)
    try:
        return streams.zstd().ZstdFile(file)
    except UsageError as error:
        raise TooMuch(f"It cannot be unpacked: {error}.") from None


def decode_pickle(file: BinaryIO, size: int, detail: Detail) -> Preview:
    """A pickle, or the names in a PyTorch archive: as bytes, never loaded."""
    head = file.read(4096)
    preview = hex_preview(head, size, PICKLE_NOTE)
    if not head.startswith(b"PK\x03\x04"):
        return preview
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    rows = [(readable(one.filename)[:200], f"{one.file_size:,}") for one in entries[: detail.rows]]
    summary = f"a zip archive of {counted(len(entries), 'file')}, {preview.summary}"
    return preview._replace(summary=summary, rows=(("name", "bytes"), *rows))


def warm_up() -> None:
    """Load what is imported when it is first needed."""
    for extension, data in (("gz", gzip.compress(b"a")), ("bz2", bz2.compress(b"a")), ("xz", lzma.compress(b"a"))):
        unpacked(io.BytesIO(data), extension, 10)
    with contextlib.suppress(UsageError):
        unpacked(io.BytesIO(streams.zstd().compress(b"a")), "zst", 10)
