"""Compressed streams: recognises gzip, bzip2, xz and zstd, and decodes whole files.

A file may have any number of streams; decoding takes bounded memory and linear time.

Sources: RFC 1952 (gzip: several members are one file; zeros after them), the xz file format 1.1.0 (several
streams, padding), RFC 8878 (zstd: frames, skippable ones too). Anything else after the data is ignored, as gzip
does.

A stream may ask for any amount of memory before its first byte: an xz dictionary up to 4 GiB, a zstd window up to
2 GiB. One that asks for more than `memory_limit` is refused. The others need 4 MB at the most.
"""

from __future__ import annotations

import bz2
import lzma
import os
import re
import shlex
import zlib
from collections.abc import Callable
from typing import Protocol

from wdsfs import source
from wdsfs.errors import counted, parse_size
from wdsfs.names import SHARD_SUFFIXES
from wdsfs.shared_settings import setting
from wdsfs.source import TarBytes
from wdsfs.tar.headers import BLOCK, is_header
from wdsfs.wings import zstd

# The first bytes of compressed files. A zstd file may begin with a skippable frame, too (pzstd writes one first).
COMPRESSED = {
    "gzip": (b"\x1f\x8b\x08",),
    "bzip2": (b"BZh",),
    "xz": (b"\xfd7zXZ\0",),
    "zstd": (b"\x28\xb5\x2f\xfd", *(bytes((0x50 + n, 0x2A, 0x4D, 0x18)) for n in range(16))),
}

AGAIN = "download it again"
_PACK = "name the directory of such files: wdsfs pack DIRECTORY"
# Files in place of a tar, as failed downloads leave them: their beginning (in lower case), a name, the way out.
_LEFT_BEHIND = (
    (b"version https://git-lfs.github.com/", "a git LFS pointer", "fetch its content: git lfs pull"),
    (b"<!doctype html", "an HTML page", AGAIN),
    (b"<html", "an HTML page", AGAIN),
    (b"<?xml", "an XML document, as stores send errors", AGAIN),
    (b"pk\x03\x04", "a zip archive", "make a tar of its content"),
    (b"par1", "a Parquet file", "only tars can be shards"),
    (b"\xff\xd8\xff", "a JPEG image", _PACK),
    (b"\x89png", "a PNG image", _PACK),
    (b"flac", "a FLAC file", _PACK),
    (b"riff", "a WAV or WebP file", _PACK),
)
_TEXT_BYTES = bytes([*b"\t\n\f\r", *range(32, 127), *range(128, 256)])
_SHOWN = 40  # bytes of a text that a message has


def appearance(start: bytes) -> str:
    """Describe a file that is not a tar by its first block, and say what to do about it."""
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for mark, name, way_out in _LEFT_BEHIND:
        if text.startswith(mark):
            return f"is {name}, not a tar: {way_out}"
    if not text.translate(None, delete=_TEXT_BYTES):
        if text.partition(b"\n")[0].rstrip().endswith(SHARD_SUFFIXES):
            return "is a list of shards, not a tar: write an @ before its name"
        begin = start[:_SHOWN].decode(errors="replace")
        return f"is text, not a tar, and begins with {begin!a}: {AGAIN}"
    size = f" of {counted(len(start), 'byte')}, less than a header" if len(start) < BLOCK else ""
    return f"is not a tar, but another file{size}: {AGAIN}"


# The name of a part that split(1) has made: up to the mark of the part, and that mark.
_SUFFIXES = "|".join(re.escape(suffix.decode()) for suffix in SHARD_SUFFIXES)
_PART = re.compile(rf"(.*(?:{_SUFFIXES})(?:[._-]?part)?[._-]?)([a-z]+|\d+)", re.DOTALL)
_FIRST_PARTS = (("a", "b"), ("0", "1"), ("1", "2"))  # the last characters of the marks of two parts


def split_tar(path: str) -> str:
    """Return the message about an unreadable file that is one of the parts of a tar; "" for any other file."""
    match = _PART.fullmatch(path)
    if match is None:
        return ""
    begin, mark = match.groups()
    blank = ("a" if mark.isalpha() else "0") * (len(mark) - 1)
    if not any(all(os.path.exists(f"{begin}{blank}{end}") for end in ends) for ends in _FIRST_PARTS):
        return ""
    whole = shlex.quote(f"pipe:cat {shlex.quote(begin)}{'' if mark.isalpha() else '[0-9]'}*")
    return f"looks like one of the parts into which a tar was split: name the whole tar: {whole}"


def compression(start: bytes) -> str | None:
    """Return the format in which a file with this first block (or less) is compressed, None if it is not.

    A tar may begin with the same bytes, as the name of its first member; the checksum of its header shows that.
    """
    for name, magics in COMPRESSED.items():
        if start.startswith(magics):
            return None if is_header(start) else name
    return None


MEMORY = 256 << 20  # bytes: twice the window of `zstd -d` without --long, four times that of `xz -9`
# `unpack` gives the intact part of a shard: all (with or without other data after it), or the part before the cut
# or the damage.
WHOLE, TRAILING, TRUNCATED, DAMAGED = "tar", "trailing", "truncated", "damaged"
_INPUT, _OUTPUT = 1 << 18, 1 << 20  # bytes that are read, and written, at a time: bounds the memory for a bomb
# Bytes that a stream gets first, then twice as many each time. Bytes that the stream does not need are copied
# back, and every ten bytes may be a stream.
_FIRST = 512
_ZEROS = re.compile(rb"\0*")


class TooLarge(Exception):
    """A stream needs more memory than a decoder may take; the text says so and names the way out."""


def memory_limit() -> int:
    """Return the limit of the memory (bytes) that a stream may ask for. Raises UsageError."""
    size = setting("UNPACK_MEMORY")
    return parse_size(size) if size else MEMORY


def unpack(kind: str, packed: TarBytes, write: Callable[[bytes], object]) -> tuple[str, int]:
    """Unpack a file by calls of `write`; return the outcome, and how many bytes count.

    These are fewer than were written if the file is damaged. Raises OSError, TooLarge, UsageError without a
    decoder, and what `write` raises.
    """
    make, failures = _decoder_of(kind)
    magics = COMPRESSED[kind]
    given, sound = _Input(packed), 0
    while True:
        start = given.peek(max(map(len, magics)))
        if not start:
            return WHOLE, sound
        if not start.startswith(magics):
            cut_off = any(magic.startswith(start) for magic in magics)
            return TRUNCATED if cut_off else TRAILING, sound
        decoder, done = make(), sound
        given.begin()
        while not decoder.eof:
            data = given.take() if decoder.needs_input else b""
            if decoder.needs_input and not data:
                return TRUNCATED, done
            try:
                data = decoder.decompress(data, _OUTPUT)
            except failures as error:
                _refuse_large(error)
                return DAMAGED, sound
            write(data)
            done += len(data)
        given.give_back(len(decoder.unused_data))
        given.skip_zeros()  # padding
        sound = done


class _Decoder(Protocol):
    """Unpacks one stream, as the decompressors of bz2 and lzma do."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


class _Gzip:
    """zlib's decompressor with the interface of the others."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(16 + zlib.MAX_WBITS)

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def needs_input(self) -> bool:
        return not self._zlib.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    def decompress(self, data: bytes, max_length: int = -1) -> bytes:
        return self._zlib.decompress(self._zlib.unconsumed_tail + data, max(max_length, 0))


def _decoder_of(kind: str) -> tuple[Callable[[], _Decoder], tuple[type[Exception], ...]]:
    """Return a function that makes a decoder for a stream, and the errors that it raises for damaged data.

    Raises UsageError.
    """
    if kind == "gzip":
        return _Gzip, (zlib.error,)
    if kind == "bzip2":
        return bz2.BZ2Decompressor, (OSError, ValueError)
    limit = memory_limit()
    if kind == "xz":
        return lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=limit), (lzma.LZMAError, MemoryError)
    module = zstd()
    # A window is a power of two, or up to an eighth of one more.
    options = {module.DecompressionParameter.window_log_max: min(max(limit.bit_length() - 1, 10), 31)}
    return lambda: module.ZstdDecompressor(options=options), (module.ZstdError,)


# The libraries have no other sign for it than these words.
_LARGE = ("Memory usage limit exceeded", "too much memory")


def _refuse_large(error: Exception) -> None:
    """Raise TooLarge if that is the reason for an error of a decoder."""
    if any(words in str(error) for words in _LARGE):
        raise TooLarge(
            f"it needs more than {memory_limit() >> 20} MiB of memory to be unpacked; --unpack-memory allows more"
        )


class _Input:
    """A file, read in pieces."""

    def __init__(self, packed: TarBytes) -> None:
        self._packed, self._next = packed, 0
        self._data, self._at = b"", 0
        self._piece = _FIRST

    def peek(self, size: int) -> bytes:
        """Return the next bytes, fewer only at the end."""
        while len(self._data) - self._at < size and self._read():
            pass
        return self._data[self._at : self._at + size]

    def begin(self) -> None:
        """Note that a stream begins here."""
        self._piece = _FIRST

    def take(self) -> bytes:
        """Return some bytes, none only at the end."""
        if self._at == len(self._data):
            self._read()
        data = self._data[self._at : self._at + self._piece]
        self._at += len(data)
        self._piece = min(2 * self._piece, _INPUT)
        return data

    def give_back(self, size: int) -> None:
        """Give back the last bytes that were taken: they belong to what follows."""
        self._at -= size

    def skip_zeros(self) -> None:
        """Skip the zeros that are next."""
        while self.peek(1) == b"\0":
            zeros = _ZEROS.match(self._data, self._at)
            assert zeros is not None
            self._at = zeros.end()

    def _read(self) -> bool:
        more = source.pread(self._packed, _INPUT, self._next)
        self._next += len(more)
        self._data, self._at = self._data[self._at :] + more, 0
        return bool(more)
