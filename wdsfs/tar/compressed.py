"""Compressed shards: recognises, unpacks and reads them, with limits against bombs.

To everything above, a compressed shard is the bytes of the tar inside (`source.TarBytes`). By default these are a
copy in the cache (`cache/file_cache.py`), read like a plain shard. Where there is no room for one, they come
from a reader that can begin in the middle of the file (`tar/seekable.py`), if its format and the installed
libraries allow it.

Only bytes that a checksum of the format covers are served: when unpacking fails, the output since the end of the
last whole stream may be wrong already, so it is dropped. A file that is only cut off is unpacked up to its end, as
a plain tar would be read.

A file that unpacks to more than `RATIO_MAX` times its size is a bomb, not a set of samples. Unpacking ends there,
so the room that a shard takes in the cache is in proportion to its size.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from wdsfs import source
from wdsfs.cache import file_cache
from wdsfs.cache.cache_directory import key_of
from wdsfs.cache.file_cache import CachedFile, FileCache, NewFile, NoRoom
from wdsfs.door.shard_door import DOOR, OpenShard, fingerprint_of
from wdsfs.durable import named
from wdsfs.errors import IndexUnusable, StaleShard, UnreadableShard, UsageError, counted
from wdsfs.shards import Fingerprint, wait_for_tick
from wdsfs.shared_settings import setting
from wdsfs.source import TarBytes
from wdsfs.tar import headers, seekable, streams
from wdsfs.tar.problems import Problem
from wdsfs.tar.streams import DAMAGED, TRAILING, TRUNCATED, WHOLE

AUTO, ALWAYS, NEVER = "auto", "always", "never"
POLICIES = (AUTO, ALWAYS, NEVER)  # whether shards are unpacked into the cache
# Kinds of files in the cache: copies, and an index with the seek points to read a shard without a copy.
COPIES, INDEX = (WHOLE, TRAILING, TRUNCATED, DAMAGED), "seek"
RECENT_SECONDS = 3600.0  # a file used since then is not evicted for a shard that can be read without a copy

RATIO_MAX = 200  # the most that a file may unpack to, as a multiple of its size, unless the policy is ALWAYS
ALLOWED = 64 << 20  # bytes that any file may unpack to


class Opened(NamedTuple):
    """The tar in a shard, the problem of the compressed data if it has one, and its compression (`kind_of`)."""

    source: TarBytes
    problem: Problem | None
    kind: str | None


def policy() -> str:
    """Return the value of `WDSFS_UNPACK`. Raises UsageError."""
    value = setting("UNPACK") or AUTO
    if value not in POLICIES:
        raise UsageError(f"WDSFS_UNPACK={value}: take one of {', '.join(POLICIES)}")
    return value


def kind_of(shard: OpenShard) -> str | None:
    """Return the compression of a shard by its first bytes, whatever its name is; None for a plain tar."""
    return streams.compression(source.pread(shard, headers.BLOCK, 0))


def kind_at(path: bytes) -> str | None:
    """Return the kind of a local shard that is not open, as `kind_of`. Raises MissingShard, UnreadableShard."""
    fd = source.open_shard(path)
    try:
        return kind_of(fd)
    finally:
        source.close(fd)


@contextlib.contextmanager
def open_tar(shard: OpenShard, path: bytes) -> Iterator[Opened]:
    """Open the bytes of the tar in an open shard. Raises what `unpacked` raises."""
    kind = kind_of(shard)
    if kind is None:
        yield Opened(shard, None, None)
        return
    content = unpacked(kind, shard, path)
    try:
        yield content
    finally:
        source.close(content.source)


def unpacked(kind: str, shard: OpenShard, path: bytes) -> Opened:
    """Return the bytes of the tar in a compressed shard, which has to stay open.

    Takes as long as unpacking, unless that was done before. Raises StaleShard when the file changes meanwhile,
    UnreadableShard when it cannot be unpacked here.
    """
    name = os.fsdecode(path)
    try:
        before = _key_of(shard, path)
        content = _open(_CompressedShard(kind, shard, source.size_of(shard), before, path))
        after = _key_of(shard, path)
    except (_Refused, streams.TooLarge, IndexUnusable, UsageError) as error:
        raise UnreadableShard(f"{name} is {kind}-compressed: {error}") from None
    except OSError as error:
        raise UnreadableShard(f"{name} cannot be unpacked: {error.strerror}{_where(error)}") from None
    if before != after:
        source.close(content.source)
        raise StaleShard(f"{name} has changed while it was unpacked")
    return content


def _key_of(shard: OpenShard, path: bytes) -> str:
    return key_of(path, fingerprint_of(shard))


def _where(error: OSError) -> str:
    return f" ({os.fsdecode(error.filename)}); WDSFS_CACHE_DIR names another place" if error.filename else ""


class _Refused(Exception):
    """A shard cannot be read: why, and what to do."""


class _CompressedShard(NamedTuple):
    kind: str
    shard: OpenShard
    size: int  # bytes, compressed
    key: str
    path: bytes

    def unpack(self, copy: NewFile) -> tuple[str, int]:
        """Unpack as `streams.unpack`, but refuse a bomb; fetch a remote shard ahead, in one pass."""
        if not isinstance(self.shard, int):
            self.shard.stream()
        return streams.unpack(self.kind, self.shard, self.bounded(copy.write))

    def bounded(self, write: Callable[[bytes], None]) -> Callable[[bytes], None]:
        """Return `write`, which raises _Refused for more than this shard may unpack to."""
        if policy() == ALWAYS:
            return write
        left = max(RATIO_MAX * self.size, ALLOWED)

        def write_some(data: bytes) -> None:
            nonlocal left
            left -= len(data)
            if left < 0:
                raise _Refused(
                    f"it unpacks to more than {RATIO_MAX} times its size, unlike nearly all sets of samples; "
                    "--unpack always unpacks it anyway"
                )
            write(data)

        return write_some

    def file(self) -> int:
        """Return a descriptor of the compressed data; a remote shard is brought into the cache.

        Raises ShardError.
        """
        return self.shard if isinstance(self.shard, int) else self.shard.whole()


def _open(shard: _CompressedShard) -> Opened:
    how, cache = policy(), file_cache.cache()
    kinds = {AUTO: (*COPIES, INDEX), ALWAYS: COPIES, NEVER: (INDEX,)}[how]
    cached = cache.find(shard.key, kinds)
    if cached is not None and cached.kind == INDEX:
        try:
            return _read_by(shard, cached)
        except ValueError:  # damaged: it is made again
            cache.drop(shard.key, INDEX)
        except _Refused:  # the library was removed
            if how == NEVER:
                raise
        cached = None
    if cached is None:
        if isinstance(shard.shard, int) and wait_for_tick(status := os.fstat(shard.shard)):
            _require_in_place(shard, status)
        cached = _index(cache, shard) if how == NEVER else _unpack(cache, shard, how == AUTO)
    return (
        _read_by(shard, cached)
        if cached.kind == INDEX
        else Opened(cached.fd, _problem(shard.kind, cached), shard.kind)
    )


def _require_in_place(shard: _CompressedShard, status: os.stat_result) -> None:
    """Raise StaleShard if another file has come to the path of an open one. Its times may be the same."""
    if Fingerprint.numbered(os.stat(shard.path)) != Fingerprint.numbered(status):
        raise StaleShard(f"{os.fsdecode(shard.path)} has changed since it was opened")


def _read_by(shard: _CompressedShard, cached: CachedFile) -> Opened:
    """Return a reader that uses an index of seek points. Raises ValueError if the index is damaged."""
    try:
        return Opened(seekable.SeekReader(shard.kind, shard.file(), cached.fd), None, shard.kind)
    except seekable.Unusable as error:
        raise _Refused(f"{error}") from None
    finally:
        os.close(cached.fd)


def _unpack(cache: FileCache, shard: _CompressedShard, may_seek: bool) -> CachedFile:
    """Make a copy; or, if it `may_seek` and copies in use would have to be evicted, an index of seek points.

    Raises _Refused.
    """
    least = shard.size - shard.size // 50  # data that cannot be compressed grows a little
    why = ""
    if may_seek:
        try:
            return cache.make(shard.key, COPIES, shard.unpack, least, RECENT_SECONDS)
        except NoRoom:
            try:
                return _index(cache, shard)
            except _Refused as refused:
                why = f", and {refused}"
    try:
        return cache.make(shard.key, COPIES, shard.unpack, least)
    except NoRoom as error:
        raise _Refused(f"{error}{why}; --cache-size gives it more room, WDSFS_CACHE_DIR another place") from None


def _index(cache: FileCache, shard: _CompressedShard) -> CachedFile:
    """Make an index of seek points. Raises _Refused."""

    def fill(file: NewFile) -> tuple[str, int]:
        fd = shard.file()
        seekable.check(shard.kind, fd)
        # None of the libraries reliably reports what is cut off, or checks every checksum.
        state, size = streams.unpack(shard.kind, fd, shard.bounded(lambda data: None))
        if state == WHOLE:
            index, readable_size = seekable.index_of(shard.kind, fd)
            if readable_size == size:
                file.write(index)
                return INDEX, len(index)
        raise seekable.Unusable("it is damaged or has something else after it")

    try:
        return cache.make(shard.key, (INDEX,), fill)
    except NoRoom as error:
        raise _Refused(f"there is no room for an index of seek points: {error}") from None
    except seekable.Unusable as error:
        raise _Refused(f"it can only be unpacked, since {error}") from None


def _problem(kind: str, cached: CachedFile) -> Problem | None:
    size = source.size_of(cached.fd)
    if cached.kind == TRUNCATED:
        text = f"the {kind} data is cut off; {counted(size, 'byte')} could be unpacked"
        return Problem(-1, "truncated", text)
    if cached.kind == DAMAGED:
        text = (
            f"the {kind} data is damaged; no checksum covers the unpacked data from byte {size} on, so it is not "
            "shown"
        )
        return Problem(-1, "damaged", text)
    if cached.kind == TRAILING:
        return Problem(-1, "behind end mark", f"other data follows the {kind} data and is not read")
    return None


@contextlib.contextmanager
def open_shard_and_tar(path: bytes) -> Iterator[tuple[OpenShard, Opened]]:
    """Open the shard at `path`, and the bytes of the tar in it. Raises ShardErrors, OSErrors that name it."""
    shard = DOOR.open_shard(path)
    try:
        with open_tar(shard, path) as content:
            yield shard, content
    finally:
        with named(path):
            source.close(shard)
