"""Objects that can be read once, or only whole: output of `pipe:`, standard input, answers without ETag and date.

Their bytes are collected in a file without a name, in the directory of the cache, until all bytes have arrived.
Only then size and hash are known, and together they are the pin. The whole object must be in the cache, so other
objects are evicted for it, however recently they were used. An object that can be read only once stays in the
cache as long as a process has it open.

A command runs when its shard is first used. If the command fails, its output is a shard, too, with the exit code
and the last line of standard error in the pin. The log gets all lines of standard error.

If a server sends neither ETag nor Last-Modified, it is unknown whether two answers are of the same object. So one
answer is kept from its first byte to its last. After an eviction the whole object is fetched again. If its bytes
have changed, it counts as another object.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import signal
import subprocess
import tempfile
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BufferedIOBase
from typing import IO, NamedTuple, TypeAlias, cast

from wdsfs import trust
from wdsfs.door.pins import NO_LENGTH, SPOOLED, Pin
from wdsfs.door.urls import Url
from wdsfs.errors import ObjectChanged, Unreachable, UnreadableShard
from wdsfs.remote.cached_object import CachedObject
from wdsfs.remote.object_cache import ObjectCache
from wdsfs.remote.parts import Buffer
from wdsfs.remote.retries import Result

log = logging.getLogger(__name__)

PIECE = 8 << 20  # bytes that are copied at a time
AT_ONCE = 8  # commands that run, and objects that are fetched
ATTEMPTS = 3  # after answers that were cut: each attempt has to begin from the first byte
LOGGED_LINES, LOGGED_LINE = 100, 1000  # of each run in the log; characters of a line
END_SECONDS = 1.0  # how long to wait for its end: a child that outlives the command may keep it open
LAST_LINE = 200  # characters of the last line that are kept

Bodies: TypeAlias = Callable[[Pin], AsyncIterator[Buffer]]  # requests a whole object, and returns the answer


class Spool(NamedTuple):
    """The bytes that have arrived."""

    file: IO[bytes]
    size: int  # bytes
    digest: str

    def pin(self, version: str = "") -> Pin:
        """Return the pin: equal output is the same object, so its index is found again."""
        return Pin(self.size, 0, f'"{self.digest}"', version)


def spool(cache: ObjectCache, shown: str, source: BufferedIOBase) -> Spool:
    """Read a source to its end, into a file. Raises UnreadableShard if the cache has no room for all of it."""
    digest, size = hashlib.blake2b(digest_size=16), 0
    try:
        trust.directory(cache.directory, create=True)
        limit = cache.room.most()
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(tempfile.TemporaryFile(dir=cache.directory))
            while piece := source.read1(PIECE):
                size += len(piece)
                if size > limit:
                    raise _no_room(shown, size, limit)
                digest.update(piece)
                file.write(piece)
            file.flush()
            stack.pop_all()
    except OSError as error:
        raise _refused(cache, shown, error) from None
    return Spool(file, size, digest.hexdigest())


def keep(cache: ObjectCache, shown: str, pin: Pin, spooled: Spool) -> CachedObject:
    """Put a spooled object into the cache; return it, open. Raises UnreadableShard if there is no room for it."""
    try:
        with contextlib.ExitStack() as stack:
            cached = stack.enter_context(contextlib.closing(cache.open(shown, pin)))
            for begin, end in cached.missing(0, pin.size):
                for offset in range(begin, end, PIECE):
                    piece = os.pread(spooled.file.fileno(), min(PIECE, end - offset), offset)
                    if not cached.put(offset, piece, is_needed=True):
                        raise _no_room(shown, pin.size, cache.room.most())
            stack.pop_all()
    except OSError as error:
        raise _refused(cache, shown, error) from None
    return cached


def _no_room(shown: str, size: int, limit: int) -> UnreadableShard:
    room = f"the cache has room for {limit:,}" if size > limit else "the rest of the cache is in use"
    return UnreadableShard(
        f"{shown}: it has at least {size:,} bytes, and {room}: give the cache more by --cache-size, or by "
        "WDSFS_CACHE_DIR on another disk"
    )


def _refused(cache: ObjectCache, shown: str, error: OSError) -> UnreadableShard:
    return UnreadableShard(f"{shown}: cannot be kept in the cache {str(cache.directory)!r}: {error.strerror}")


class SpooledObjects:
    """The objects of a fetcher that come once and in order, in `cache`."""

    def __init__(self, cache: ObjectCache | None) -> None:
        self._cache = cache
        self._threads = ThreadPoolExecutor(AT_ONCE, "spool")
        self._turns: defaultdict[Url, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._outputs: dict[Url, tuple[Pin, CachedObject]] = {}
        self._running: set[subprocess.Popen[bytes]] = set()

    async def output(self, url: Url) -> Pin:
        """Return the pin of the output of a command, which is run unless it was before. Raises ShardError."""
        cache = self._needed_cache(url)
        async with self._turns[url]:
            if url not in self._outputs:
                self._outputs[url] = await self._in_thread(lambda: self._run(url, cache))
            return self._outputs[url][0]

    async def pin(self, url: Url, marks: Pin, bodies: Bodies) -> Pin:
        """Return the pin of an object whose server tells no more than `marks`. Raises ShardError."""
        cache = self._needed_cache(url)
        async with self._turns[url]:
            known = cache.pin_of(url.shown)
            if known is not None and known.is_spooled and _is_marked(known, marks):
                with contextlib.suppress(OSError):
                    if cache.has_all(url.shown, known):
                        return known
            return await self._fetch(cache, url, marks, _version(marks), bodies)

    async def read(self, url: Url, pin: Pin, begin: int, end: int, bodies: Bodies) -> bytes:
        """Return bytes `begin` to `end` (not included) of the pinned object. Raises ShardError."""
        cache = self._needed_cache(url)
        async with self._turns[url]:
            with contextlib.closing(cache.open(url.shown, pin)) as cached:
                data = cached.read(end - begin, begin)
                if data is None and not url.is_program:
                    marks = Pin(NO_LENGTH if pin.version else pin.size, 0, "", "")
                    now = await self._fetch(cache, url, marks, pin.version, bodies)
                    if now != pin:
                        cache.keep_pin(url.shown, now)
                        raise ObjectChanged(f"{url}: it has been replaced: its bytes differ from those before")
                    data = cached.read(end - begin, begin)
        if data is None:
            once = "can be read only once, and " if url.is_program else ""
            raise UnreadableShard(
                f"{url}: {once}is not in the cache any more: give that more room by --cache-size"
            )
        return data

    def end(self) -> None:
        """Stop the commands that still run."""
        for process in list(self._running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)

    def _needed_cache(self, url: Url) -> ObjectCache:
        if self._cache is None:
            raise UnreadableShard(f"{url}: it can only be read from a cache, and there is none")
        return self._cache

    async def _fetch(self, cache: ObjectCache, url: Url, marks: Pin, version: str, bodies: Bodies) -> Pin:
        """Bring one whole answer into the cache."""
        for attempt in range(1, ATTEMPTS + 1):
            body = _Body(bodies(marks), asyncio.get_running_loop())
            try:
                return await self._in_thread(lambda body=body: _spooled_answer(cache, url, version, body))  # type: ignore[misc]
            except Unreachable:
                if attempt == ATTEMPTS:
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    # --- in a thread

    def _run(self, url: Url, cache: ObjectCache) -> tuple[Pin, CachedObject]:
        """Run a command, with its output into the cache."""
        if not url.user:
            raise UnreadableShard(f"{url}: can be read only once, and is not in the cache any more")
        with self._started(url) as (process, standard_error):
            spooled = spool(cache, url.shown, cast("BufferedIOBase", process.stdout))
            with spooled.file:
                code = process.wait()
                pin = spooled.pin("" if code == 0 else _ending(code) + standard_error.last())
                cached = keep(cache, url.shown, pin, spooled)
                with contextlib.suppress(OSError):  # without such locks it stays as long as there is room
                    cached.hold()
        if code:
            log.warning("%s: the command ended with %s, so its output counts as a damaged shard", url, pin.version)
        return pin, cached

    @contextlib.contextmanager
    def _started(self, url: Url) -> Iterator[tuple[subprocess.Popen[bytes], _StandardError]]:
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", url.user],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=url.query,
                start_new_session=True,  # so that all processes of the command can be stopped
            )
        except OSError as error:
            raise UnreadableShard(f"{url}: cannot be run in {url.query!r}: {error.strerror}") from None
        self._running.add(process)
        assert process.stderr is not None
        standard_error = _StandardError(url, process.stderr)
        try:
            yield process, standard_error
        finally:
            with contextlib.suppress(ProcessLookupError):
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            standard_error.last()
            self._running.remove(process)


def _is_marked(pin: Pin, marks: Pin) -> bool:
    """Return True if an object that was fetched whole may be the one that its server describes now."""
    return pin.version == _version(marks) and (marks.has_no_length or pin.size == marks.size)


def _version(marks: Pin) -> str:
    """Return ETag and time of an object without a length, which show that it was replaced; "" for any other."""
    return f"{marks.etag or 'no ETag'} {marks.mtime_ns}" if marks.has_no_length else ""


def _spooled_answer(cache: ObjectCache, url: Url, version: str, body: BufferedIOBase) -> Pin:
    spooled = spool(cache, url.shown, body)
    with spooled.file:
        pin = Pin(spooled.size, 0, f'{SPOOLED}{spooled.digest}"', version)
        keep(cache, url.shown, pin, spooled).close()
    return pin


class _Body(BufferedIOBase):
    """The body of an answer, which comes in the loop, to be read by a thread."""

    def __init__(self, pieces: AsyncIterator[Buffer], loop: asyncio.AbstractEventLoop) -> None:
        self._pieces, self._loop = pieces, loop

    def read1(self, size: int = -1, /) -> bytes:
        return bytes(asyncio.run_coroutine_threadsafe(self._next(), self._loop).result())

    async def _next(self) -> Buffer:
        return await anext(self._pieces, b"")


def _ending(code: int) -> str:
    """Return how a command ended; codes from 128 on are those of a shell whose last command a signal ended."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"


class _StandardError:
    """The standard error of a command: it is logged, and read to its end, so that the command never waits."""

    def __init__(self, url: Url, stream: IO[bytes]) -> None:
        self._last = ""
        self._reading = threading.Thread(target=self._read, args=(url, stream), daemon=True)
        self._reading.start()

    def _read(self, url: Url, stream: IO[bytes]) -> None:
        with stream:
            for number, line in enumerate(iter(lambda: stream.readline(LOGGED_LINE), b"")):
                text = line.decode(errors="replace").strip()
                self._last = text or self._last
                if number < LOGGED_LINES:
                    log.warning("%s says: %s", url, text)

    def last(self) -> str:
        """Return ": " and the last line of a command that has ended; "" if it wrote none."""
        self._reading.join(END_SECONDS)
        return f": {self._last[:LAST_LINE]}" if self._last else ""
