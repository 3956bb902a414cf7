"""Compressed shards: what they are recognised by, how they are unpacked, and which way they are read.

To everything above, a compressed shard is the bytes of the tar inside (`source.TarBytes`). By default these are a
copy in the cache (`storage/unpack_cache.py`), read like a plain shard. Where there is no room for one, they come
from a reader that can begin in the middle of the file (`storage/seekable.py`), if its format and the installed
libraries allow it.

Only bytes that the format's checksums vouch for are served: where unpacking fails, what was put out since the end
of the last whole stream may be wrong before anything is noticed, so it does not count. A file that is merely cut
off is unpacked up to its end, as a plain tar would be read.

Sources: RFC 1952 (gzip: several members are one file; zeros behind them), the xz file format 1.1.0 (several
streams, padding), RFC 8878 (zstd: frames, skippable ones too). Anything else behind the data is left alone, as
gzip does.
"""

from __future__ import annotations

import bz2
import contextlib
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from wdsfs.errors import IndexUnusable, StaleShard, UnreadableShard, UsageError
from wdsfs.storage import seekable, source, unpack_cache
from wdsfs.storage.source import TarBytes, open_shard
from wdsfs.storage.unpack_cache import (
    COPIES,
    DAMAGED,
    INDEX,
    TRAILING,
    TRUNCATED,
    WHOLE,
    Kept,
    NoRoom,
    UnpackCache,
    Write,
)
from wdsfs.tar import member_codecs, scan
from wdsfs.tar.scan import Problem

AUTO, ALWAYS, NEVER = "auto", "always", "never"
POLICIES = (AUTO, ALWAYS, NEVER)  # whether shards are unpacked into the cache

RATIO_MAX = 200  # times the size of a file that what it unpacks to may have, where no cache limits it
_INPUT, _OUTPUT = 1 << 18, 1 << 20  # bytes that are read, and put out, at a time: what a bomb may take of memory


class Opened(NamedTuple):
    """Where the bytes of a shard come from, and what is wrong with the compressed data."""

    source: TarBytes
    problem: Problem | None


def policy() -> str:
    """What `WDSFS_UNPACK` says. Raises UsageError."""
    found = os.environ.get("WDSFS_UNPACK") or AUTO
    if found not in POLICIES:
        raise UsageError(f"WDSFS_UNPACK is {found!r}: it has to be one of {', '.join(POLICIES)}")
    return found


def kind_of(fd: int) -> str | None:
    """How the file is compressed, by its first bytes, whatever it is called; None for a plain tar."""
    return scan.compression(os.pread(fd, scan.BLOCK, 0))


@contextlib.contextmanager
def opened(fd: int, path: bytes) -> Iterator[Opened]:
    """The bytes of the tar in the shard that is open at `fd`. Raises what `unpacked` raises."""
    kind = kind_of(fd)
    if kind is None:
        yield Opened(fd, None)
        return
    found = unpacked(kind, fd, path)
    try:
        yield found
    finally:
        source.close(found.source)


def unpacked(kind: str, fd: int, path: bytes) -> Opened:
    """The bytes of the tar in a compressed shard, which is open at `fd` and has to stay so.

    Takes as long as unpacking does, unless that has been done before. Raises StaleShard when the file changes
    meanwhile, UnreadableShard when it cannot be unpacked here.
    """
    name = os.fsdecode(path)
    try:
        before = os.fstat(fd)
        found = _open(_CompressedShard(kind, fd, before.st_size, unpack_cache.key_of(path, before)))
        after = os.fstat(fd)
    except (_Refused, IndexUnusable, UsageError) as error:
        raise UnreadableShard(f"{name} is {kind}-compressed: {error}") from None
    except OSError as error:
        raise UnreadableShard(f"{name} cannot be unpacked: {error.strerror}{_place_of(error)}") from None
    if unpack_cache.key_of(path, before) != unpack_cache.key_of(path, after):
        source.close(found.source)
        raise StaleShard(f"{name} has changed while it was unpacked")
    return found


def _place_of(error: OSError) -> str:
    return f" ({os.fsdecode(error.filename)}); WDSFS_CACHE_DIR names another place" if error.filename else ""


class _Refused(Exception):
    """Says why a shard cannot be read, and the way out."""


class _CompressedShard(NamedTuple):
    kind: str
    fd: int
    size: int  # bytes, compressed
    key: str


def _open(one: _CompressedShard) -> Opened:
    cache, how = unpack_cache.cache(), policy()
    wanted = {AUTO: (*COPIES, INDEX), ALWAYS: COPIES, NEVER: (INDEX,)}[how]
    kept = cache.find(one.key, wanted)
    if kept is not None and kept.state == INDEX:
        try:
            return _read_by(one, kept)
        except ValueError:  # damaged: it is made anew
            cache.drop(one.key, INDEX)
        except _Refused:  # the library is no longer there
            if how == NEVER:
                raise
        kept = None
    if kept is None:
        kept = _index(cache, one) if how == NEVER else _unpack(cache, one, how == AUTO)
    return _read_by(one, kept) if kept.state == INDEX else Opened(kept.fd, _problem(one.kind, kept))


def _read_by(one: _CompressedShard, kept: Kept) -> Opened:
    """Read with an index of places. Raises ValueError for a damaged one."""
    with os.fdopen(kept.fd, "rb") as file:
        data = file.read()
    try:
        return Opened(seekable.open_reader(one.kind, one.fd, data), None)
    except seekable.Unusable as error:
        raise _Refused(f"{error}") from None


def _unpack(cache: UnpackCache, one: _CompressedShard, may_seek: bool) -> Kept:
    """A copy; but if it `may_seek`, an index of places when other copies that are in use would have to go.

    Raises _Refused.
    """

    def fill(write: Write) -> tuple[str, int]:
        return unpack(one.kind, one.fd, write)

    least = one.size - one.size // 50  # data that cannot be compressed grows a little
    why = ""
    if may_seek:
        try:
            return cache.make(one.key, COPIES, fill, least, spare_recent=True)
        except NoRoom:
            try:
                return _index(cache, one)
            except _Refused as refused:
                why = f", and {refused}"
    try:
        return cache.make(one.key, COPIES, fill, least)
    except NoRoom as error:
        raise _Refused(f"{error}{why}; --cache-size gives it more room, WDSFS_CACHE_DIR another place") from None


def _index(cache: UnpackCache, one: _CompressedShard) -> Kept:
    """An index of places. Raises _Refused."""
    left = max(RATIO_MAX * one.size, _OUTPUT)

    def count(data: bytes) -> None:
        nonlocal left
        left -= len(data)
        if left < 0:
            raise seekable.Unusable(
                f"it unpacks to more than {RATIO_MAX} times its size, as no set of samples does"
            )

    def fill(write: Write) -> tuple[str, int]:
        seekable.check(one.kind, one.fd)
        # None of the libraries can be relied on to tell what is cut off, or to look at every checksum.
        state, size = unpack(one.kind, one.fd, count)
        if state == WHOLE:
            index, found = seekable.index_of(one.kind, one.fd)
            if found == size:
                write(index)
                return INDEX, len(index)
        raise seekable.Unusable("it is damaged or has something else behind it")

    try:
        return cache.make(one.key, (INDEX,), fill)
    except NoRoom as error:
        raise _Refused(f"there is no room for an index of places: {error}") from None
    except seekable.Unusable as error:
        raise _Refused(f"it can only be unpacked, since {error}") from None


def _problem(kind: str, kept: Kept) -> Problem | None:
    size = source.size_of(kept.fd)
    if kept.state == TRUNCATED:
        text = f"the {kind} data is cut off; {size} bytes could be unpacked"
        return Problem(-1, "truncated", text)
    if kept.state == DAMAGED:
        text = (
            f"the {kind} data is damaged; no checksum vouches for what it unpacks to from byte {size} on, so that "
            "is not shown"
        )
        return Problem(-1, "damaged", text)
    if kept.state == TRAILING:
        return Problem(-1, "behind end mark", f"something else lies behind the {kind} data; it is not read")
    return None


# --- unpacking ---------------------------------------------------------------------------------------------


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
    """What makes a decoder for a stream, and what that raises for damaged data. Raises UsageError."""
    if kind == "gzip":
        return _Gzip, (zlib.error,)
    if kind == "bzip2":
        return bz2.BZ2Decompressor, (OSError, ValueError)
    if kind == "xz":
        return lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), (lzma.LZMAError,)
    zstd = member_codecs.zstd()
    options = {zstd.DecompressionParameter.window_log_max: 31}  # whatever `zstd --long` may have been told
    return lambda: zstd.ZstdDecompressor(options=options), (zstd.ZstdError,)


class _Input:
    """A file, read in pieces."""

    def __init__(self, fd: int) -> None:
        self.fd, self.at, self.data = fd, 0, b""

    def peek(self, size: int) -> bytes:
        """The next bytes; fewer only at the end."""
        while len(self.data) < size and self._read():
            pass
        return self.data[:size]

    def take(self) -> bytes:
        """Some bytes, none only at the end."""
        if not self.data:
            self._read()
        data, self.data = self.data, b""
        return data

    def _read(self) -> bool:
        more = os.pread(self.fd, _INPUT, self.at)
        self.at += len(more)
        self.data += more
        return bool(more)

    def skip_zeros(self) -> None:
        while self.peek(1) == b"\0":
            self.data = self.data.lstrip(b"\0")


def unpack(kind: str, fd: int, write: Write) -> tuple[str, int]:
    """Pass what a compressed file unpacks to on to `write`; returns what became of it, and how many bytes count.

    These are fewer than were written when the file is damaged. Raises OSError, UsageError without a decoder.
    """
    make, failures = _decoder_of(kind)
    magics = scan.COMPRESSED[kind]
    given, done, sound = _Input(fd), 0, 0
    while True:
        if done or given.at:
            given.skip_zeros()  # padding
        start = given.peek(max(map(len, magics)))
        if not start:
            return WHOLE, sound
        if not start.startswith(magics):
            cut_off = any(magic.startswith(start) for magic in magics)
            return TRUNCATED if cut_off else TRAILING, sound
        decoder = make()
        while not decoder.eof:
            data = given.take() if decoder.needs_input else b""
            if decoder.needs_input and not data:
                return TRUNCATED, done
            try:
                data = decoder.decompress(data, _OUTPUT)
            except failures:
                return DAMAGED, sound
            write(data)
            done += len(data)
        given.data = decoder.unused_data + given.data
        sound = done


def is_compressed(path: bytes, open_file: Callable[[bytes], int] = open_shard) -> bool:
    """Whether the shard at `path` is compressed. Raises MissingShard, UnreadableShard."""
    fd = open_file(path)
    try:
        return kind_of(fd) is not None
    except OSError as error:
        raise UnreadableShard(f"{os.fsdecode(path)}: {error.strerror}") from None
    finally:
        os.close(fd)


@contextlib.contextmanager
def opened_shard(path: bytes) -> Iterator[tuple[int, Opened]]:
    """A descriptor of the shard at `path`, and the bytes of the tar in it. Raises ShardErrors."""
    fd = open_shard(path)
    try:
        with opened(fd, path) as found:
            yield fd, found
    finally:
        os.close(fd)
