"""Random access to compressed shards without unpacking them, by libraries that find the seek points.

rapidgzip for gzip and bzip2, indexed_zstd for zstd of several frames, python-xz for xz of several blocks. All of
them are optional. An index of seek points is made once (`index_of`) and kept; `SeekReader` uses it.

Memory: a reader holds its index (gzip: 1 to 3 % of the shard, since the data after each point refers to the 32 KiB
before it) and some unpacked pieces.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import itertools
import json
import os
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from wdsfs.errors import bytes_text
from wdsfs.wings import install_command

POINT = 1 << 20  # compressed bytes between two seek points of a gzip: on average a read unpacks half of it first
PIECE_MAX = 64 << 20  # bytes that a read may have to unpack first
_MAGIC = b"wdsfs-k\n"
_INDEX_HEAD = len(_MAGIC) + 4  # and the CRC-32 of the size of the tar (8 bytes) and the seek points, which follow


class Unusable(Exception):
    """A shard cannot be read without unpacking it; the text says why."""


class _Format(NamedTuple):
    package: str  # the name to install
    module: str
    open: Callable[[Any, int], Any]  # the module and a descriptor -> a file object
    places: Callable[[Any], bytes]  # finds the seek points; reads the whole file. Raises Unusable
    take: Callable[[Any, bytes], None]  # gives a file object these seek points
    check: Callable[[Any], None] = lambda raw: None  # quick checks. Raises Unusable


def _read_through(raw: Any) -> bytes:
    raw.seek(0, io.SEEK_END)
    with io.BytesIO() as out:  # rapidgzip keeps the object for ever; a closed one holds no memory
        raw.export_index(out)
        return out.getvalue()


def _take_gzip(raw: Any, places: bytes) -> None:
    with io.BytesIO(places) as file:
        raw.import_index(file)


def _block_offsets(raw: Any) -> bytes:
    offsets: dict[int, int] = raw.block_offsets()
    _check_pieces(list(offsets.values()))
    return json.dumps(list(offsets.items())).encode()


def _take_offsets(raw: Any, places: bytes) -> None:
    raw.set_block_offsets(dict(json.loads(places)))


def _check_frames(raw: Any) -> None:
    if not raw.is_multiframe():
        raise Unusable("it is a single zstd frame, which can only be read from its start")


def _check_blocks(raw: Any) -> None:
    _check_pieces([*raw.block_boundaries, len(raw)])


def _check_pieces(starts: list[int]) -> None:
    longest = max((end - start for start, end in itertools.pairwise(starts)), default=0)
    if longest > PIECE_MAX:
        raise Unusable(
            f"it is compressed in pieces of up to {bytes_text(longest)}, each to be read from its start"
        )


_FORMATS = {
    "gzip": _Format(
        "rapidgzip",
        "rapidgzip",
        lambda module, fd: module.RapidgzipFile(fd, 1, chunk_size=POINT),  # one thread: several processes serve
        _read_through,
        _take_gzip,
    ),
    "bzip2": _Format(
        "rapidgzip", "rapidgzip", lambda module, fd: module.IndexedBzip2File(fd, 1), _block_offsets, _take_offsets
    ),
    "zstd": _Format(
        "indexed_zstd",
        "indexed_zstd",
        lambda module, fd: module.IndexedZstdFile(fd),
        _block_offsets,
        _take_offsets,
        _check_frames,
    ),
    "xz": _Format(
        "python-xz",
        "xz",
        lambda module, fd: module.XZFile(f"/proc/self/fd/{fd}"),
        lambda raw: b"",  # the file has an index at its end
        lambda raw, places: None,
        _check_blocks,
    ),
}


class SeekReader:
    """A `source.TarReader` of the compressed file at `fd`, which has to stay open, by a file object of a library.

    `index_fd` is a file with the index of `index_of`; the caller may close it. Raises ValueError for a damaged
    index, Unusable if the library is not installed, OSError.

    The threads of a library do not survive a fork, and parent and child would share the position in the file. So
    the file object is closed before a fork; the next read opens another one.
    """

    def __init__(self, kind: str, fd: int, index_fd: int) -> None:
        self.lock = threading.Lock()
        self._kind, self._fd, self._index_fd = kind, fd, index_fd
        self._raw: Any = None
        self.size = self._load()
        self._index_fd = os.dup(index_fd)
        _readers.add(self)

    def _load(self) -> int:
        """Open a file object with the seek points; return its size (bytes). Raises as the class."""
        index = os.pread(self._index_fd, os.fstat(self._index_fd).st_size, 0)
        body = index[_INDEX_HEAD:]
        if index[:_INDEX_HEAD] != _MAGIC + zlib.crc32(body).to_bytes(4, "little"):
            raise ValueError("a damaged index of seek points")
        raw, failures = _open_by_library(self._kind, self._fd)
        try:
            _FORMATS[self._kind].take(raw, body[8:])
        except failures as error:
            raw.close()
            raise Unusable(f"{_FORMATS[self._kind].package} cannot read it: {error}") from None
        self._raw = raw
        self._failures: tuple[type[Exception], ...] = (*failures, Unusable)
        # Also at exit: rapidgzip aborts a process that ends with an open reader.
        self._close = weakref.finalize(self, raw.close)
        return int.from_bytes(body[:8], "little")

    def pread(self, size: int, offset: int, /) -> bytes:
        with self.lock:
            try:
                if self._raw is None:
                    self._load()
                self._raw.seek(offset)
                data: bytes = self._raw.read(max(min(size, self.size - offset), 0))
            except self._failures as error:
                raise OSError(errno.EIO, f"byte {offset} cannot be unpacked: {error}") from None
        return data

    def suspend(self) -> None:
        """Close the file object; the next read opens another one. REQUIRES: the lock is held."""
        self._close()
        self._raw = None

    def close(self) -> None:
        _readers.discard(self)
        self.suspend()
        os.close(self._index_fd)


_readers: weakref.WeakSet[SeekReader] = weakref.WeakSet()
_suspended: list[SeekReader] = []


def _before_fork() -> None:
    # Hooks run in the reverse order of their registration. So the library, which imports this module, has locked
    # its sets by now. The locks of sets have to be taken first, because a question to a set may wait for a reader.
    for reader in list(_readers):
        reader.lock.acquire()
        _suspended.append(reader)
        reader.suspend()


def _after_fork() -> None:
    while _suspended:
        _suspended.pop().lock.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


def check(kind: str, fd: int) -> None:
    """Raise Unusable if a quick check shows that `index_of` would."""
    with _opened(kind, fd) as raw:
        _FORMATS[kind].check(raw)


def index_of(kind: str, fd: int) -> tuple[bytes, int]:
    """Return the index with which `SeekReader` reads the compressed file at `fd`, and its unpacked size in bytes.

    Correct for a whole file only: some of the libraries take a truncated file for a whole one. Raises Unusable if
    there is no library for it, or no seek point but its start.
    """
    with _opened(kind, fd) as raw:
        places = _FORMATS[kind].places(raw)
        size: int = raw.seek(0, io.SEEK_END)
    body = size.to_bytes(8, "little") + places
    return _MAGIC + zlib.crc32(body).to_bytes(4, "little") + body, size


@contextlib.contextmanager
def _opened(kind: str, fd: int) -> Iterator[Any]:
    """Open a file by the library of its format. Raises Unusable, also for what the library raises in the block."""
    raw, failures = _open_by_library(kind, fd)
    try:
        yield raw
    except failures as error:
        raise Unusable(f"{_FORMATS[kind].package} cannot read it: {error}") from None
    finally:
        raw.close()


def _open_by_library(kind: str, fd: int) -> tuple[Any, tuple[type[Exception], ...]]:
    """Return a file object of the library, and the exceptions that it raises for bad data."""
    format_ = _FORMATS[kind]
    try:
        module = importlib.import_module(format_.module)
    except ImportError:
        raise Unusable(f"{format_.package} is not installed; type: {install_command('compressed')}") from None
    # The libraries in C++ pass on exceptions of any kind.
    failures: tuple[type[Exception], ...] = (OSError, ValueError, RuntimeError, EOFError)
    if kind == "xz":
        failures = (*failures, module.XZError)
    try:
        return format_.open(module, fd), failures
    except failures as error:
        raise Unusable(f"{format_.package} cannot read it: {error}") from None
