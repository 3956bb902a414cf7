"""Random access to compressed shards without unpacking them, by libraries that know where one can begin to read.

rapidgzip for gzip and bzip2, indexed_zstd for zstd of several frames, python-xz for xz of several blocks. All of
them are optional. An index of places is made once (`index_of`) and kept; `open_reader` reads with it.

Memory: a reader holds its index (gzip: 1 to 3 % of the shard, for at each place there are 32 KiB that the data
behind it refers to) and some unpacked pieces.
"""

from __future__ import annotations

import errno
import importlib
import io
import itertools
import json
import threading
import weakref
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

CHUNK = 1 << 20  # bytes of compressed data between two places of a gzip: a read unpacks half of that first
PIECE_MAX = 64 << 20  # bytes that a read may have to unpack first
_MAGIC = b"wdsfs-k\n"
_HEADER = len(_MAGIC) + 4  # and the CRC-32 of the rest: the size of the tar (8 bytes) and the places


class Unusable(Exception):
    """The text says why a shard cannot be read without unpacking it."""


class _Format(NamedTuple):
    package: str  # as it is installed
    module: str
    open: Callable[[Any, int], Any]  # the module and a descriptor -> a file object
    check: Callable[[Any], None]  # what can be told at once. Raises Unusable
    places: Callable[[Any], bytes]  # where one can begin to read; reads all of it. Raises Unusable
    take: Callable[[Any, bytes], None]  # tell a file object these places


def _read_through(raw: Any) -> bytes:
    raw.seek(0, io.SEEK_END)
    with io.BytesIO() as out:  # rapidgzip never lets go of the object: closed, it holds nothing
        raw.export_index(out)
        return out.getvalue()


def _take_gzip(raw: Any, places: bytes) -> None:
    with io.BytesIO(places) as file:
        raw.import_index(file)


def _block_offsets(raw: Any) -> bytes:
    offsets: dict[int, int] = raw.block_offsets()
    _check_pieces(list(offsets.values()))
    return json.dumps(list(offsets.items())).encode()


def _check_frames(raw: Any) -> None:
    if not raw.is_multiframe():
        raise Unusable("it is one zstd frame, which can only be read from its start")


def _check_blocks(raw: Any) -> None:
    _check_pieces([*raw.block_boundaries, len(raw)])


def _check_pieces(starts: list[int]) -> None:
    longest = max((end - start for start, end in itertools.pairwise(starts)), default=0)
    if longest > PIECE_MAX:
        raise Unusable(f"it is compressed in pieces of up to {longest} bytes, each to be read from its start")


_FORMATS = {
    "gzip": _Format(
        *("rapidgzip", "rapidgzip"),
        lambda module, fd: module.RapidgzipFile(fd, 1, chunk_size=CHUNK),  # one thread: several processes serve
        lambda raw: None,
        _read_through,
        _take_gzip,
    ),
    "bzip2": _Format(
        *("rapidgzip", "rapidgzip"),
        lambda module, fd: module.IndexedBzip2File(fd, 1),
        lambda raw: None,
        _block_offsets,
        lambda raw, places: raw.set_block_offsets(dict(json.loads(places))),
    ),
    "zstd": _Format(
        *("indexed_zstd", "indexed_zstd"),
        lambda module, fd: module.IndexedZstdFile(fd),
        _check_frames,
        _block_offsets,
        lambda raw, places: raw.set_block_offsets(dict(json.loads(places))),
    ),
    "xz": _Format(
        *("python-xz", "xz"),
        lambda module, fd: module.XZFile(f"/proc/self/fd/{fd}"),
        _check_blocks,
        lambda raw: b"",  # the file has them at its end
        lambda raw, places: None,
    ),
}


class SeekReader:
    """A `source.TarReader` of the file objects of one of the libraries."""

    def __init__(self, raw: Any, size: int, failures: tuple[type[Exception], ...]) -> None:
        self.size = size
        self._raw, self._failures = raw, failures
        self._lock = threading.Lock()
        # At the end of the process, too: rapidgzip aborts one that ends with an open reader.
        self._close = weakref.finalize(self, raw.close)

    def pread(self, size: int, offset: int, /) -> bytes:
        with self._lock:
            try:
                self._raw.seek(offset)
                found: bytes = self._raw.read(max(min(size, self.size - offset), 0))
            except self._failures as error:
                raise OSError(errno.EIO, f"byte {offset} cannot be unpacked: {error}") from None
        return found

    def close(self) -> None:
        self._close()


def check(kind: str, fd: int) -> None:
    """Raises Unusable when it can be told at once that `index_of` will."""
    raw, failures = _open(kind, fd)
    try:
        _FORMATS[kind].check(raw)
    except failures as error:
        raise Unusable(f"{_FORMATS[kind].package} cannot read it: {error}") from None
    finally:
        raw.close()


def index_of(kind: str, fd: int) -> tuple[bytes, int]:
    """What `open_reader` needs to read the compressed file at `fd`, and the bytes that this unpacks to.

    That is right for a whole file only: what is cut off may look whole to some of the libraries. Raises Unusable
    when there is no library for it, or no place but its start where one can begin to read.
    """
    raw, failures = _open(kind, fd)
    try:
        places = _FORMATS[kind].places(raw)
        size: int = raw.seek(0, io.SEEK_END)
    except failures as error:
        raise Unusable(f"{_FORMATS[kind].package} cannot read it: {error}") from None
    finally:
        raw.close()
    body = size.to_bytes(8, "little") + places
    return _MAGIC + zlib.crc32(body).to_bytes(4, "little") + body, size


def open_reader(kind: str, fd: int, index: bytes) -> SeekReader:
    """A reader of the compressed file at `fd`, which has to stay open, by what `index_of` has found.

    Raises ValueError for a damaged index, Unusable when the library is not there.
    """
    body = index[_HEADER:]
    if index[:_HEADER] != _MAGIC + zlib.crc32(body).to_bytes(4, "little"):
        raise ValueError("a damaged index of places")
    raw, failures = _open(kind, fd)
    try:
        _FORMATS[kind].take(raw, body[8:])
    except failures as error:
        raw.close()
        raise Unusable(f"{_FORMATS[kind].package} cannot read it: {error}") from None
    return SeekReader(raw, int.from_bytes(body[:8], "little"), failures)


def _open(kind: str, fd: int) -> tuple[Any, tuple[type[Exception], ...]]:
    """A file object of the library, and what it raises where the data is not what it should be."""
    format_ = _FORMATS[kind]
    try:
        module = importlib.import_module(format_.module)
    except ImportError:
        raise Unusable(f"{format_.package} is not installed: pip install 'wdsfs[compressed]'") from None
    # Those in C++ pass on whatever was thrown.
    failures: tuple[type[Exception], ...] = (OSError, ValueError, RuntimeError, EOFError)
    if kind == "xz":
        failures = (*failures, module.XZError)
    try:
        return format_.open(module, fd), failures
    except failures as error:
        raise Unusable(f"{format_.package} cannot read it: {error}") from None
