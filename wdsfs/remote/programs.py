"""Shards that are the output of programs (`pipe:COMMAND`), as one more store of the fetcher, beside all others.

A command is run when its shard is looked at for the first time, and again when a part that was evicted from the
cache is read; other output than before is then another object. One that fails gives a shard, too: of what has
come, with the exit code and the last line of its standard error in its pin. All of these lines go to the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import signal
import subprocess
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BufferedIOBase
from typing import IO, Any, Protocol, TypeVar, cast

from wdsfs.errors import ObjectChanged, UnreadableShard
from wdsfs.remote.demand import Store
from wdsfs.remote.object_cache import ObjectCache
from wdsfs.remote.parts import Buffer, Take
from wdsfs.remote.spool import keep, spool
from wdsfs.remote.spooled_objects import SpooledObjects
from wdsfs.remote.urls import Pin, Url

log = logging.getLogger(__name__)

AT_ONCE = 8  # commands
SAID_LINES, SAID_LINE = 100, 1000  # of each run in the log; characters of a line
SAID_SECONDS = 1.0  # how long to wait for its end: a child that the command has left behind may keep it open
LAST_LINE = 200  # characters of the last line that are kept

Result = TypeVar("Result")


class StoresLike(Store, Protocol):
    """The part of `stores.Stores` that the fetcher uses."""

    async def head(self, url: Url) -> Pin: ...

    async def list(self, prefix: Url) -> list[tuple[Url, Pin]]: ...

    async def describe(self, url: Url) -> dict[str, Any]: ...

    async def get(self, url: Url, pin: Pin, begin: int, end: int) -> Buffer: ...

    async def put(self, url: Url, content: mmap.mmap, replaces: Pin | None) -> str: ...

    async def copy(self, url: Url, size: int, target: Url) -> None: ...


class StoresAndPrograms:
    """All stores, and the output of programs."""

    def __init__(self, stores: StoresLike, cache: ObjectCache | None) -> None:
        self._stores, self._cache = stores, cache
        self._spooled = SpooledObjects(stores, cache)
        self._threads = ThreadPoolExecutor(AT_ONCE, "program")
        self._news: dict[Url, Pin] = {}  # of what has just been run again
        self._running: set[subprocess.Popen[bytes]] = set()
        self._turns: defaultdict[Url, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def head(self, url: Url) -> Pin:
        """Run a program, or ask a store. Raises ShardError."""
        if url.is_program:
            return await self._in_turn(url, self._look)
        pin = await self._stores.head(url)
        return await self._spooled.pin(url, pin) if pin.is_blind else pin

    async def fetch(self, url: Url, pin: Pin, begin: int, end: int, take: Take) -> None:
        """Have bytes `begin` to `end` (not included) of the pinned object taken. Raises ShardError."""
        if url.is_program:
            take(begin, await self._in_turn(url, lambda url: self._read(url, pin, begin, end)))
        elif pin.is_spooled:
            take(begin, await self._spooled.read(url, pin, begin, end))
        else:
            await self._stores.fetch(url, pin, begin, end, take)

    async def get(self, url: Url, pin: Pin, begin: int, end: int) -> Buffer:
        """These bytes of an object in a store. Raises ShardError."""
        return await self._stores.get(url, pin, begin, end)

    def get_all(self, url: Url, pin: Pin) -> AsyncIterator[Buffer]:
        """The pinned object of a server that ignores Range."""
        return self._stores.get_all(url, pin)

    async def list(self, prefix: Url) -> list[tuple[Url, Pin]]:
        """All objects below a prefix. Raises ShardError."""
        return await self._stores.list(prefix)

    async def describe(self, url: Url) -> dict[str, Any]:
        """What can be said of a URL, for people."""
        return {"error": f"{url}: is a program"} if url.is_program else await self._stores.describe(url)

    async def put(self, url: Url, content: mmap.mmap, replaces: Pin | None) -> str:
        """Make an object. Raises ShardError."""
        return await self._stores.put(url, content, replaces)

    async def copy(self, url: Url, size: int, target: Url) -> None:
        """Have a store copy an object. Raises ShardError."""
        await self._stores.copy(url, size, target)

    def end(self) -> None:
        """End the programs that still run."""
        for process in list(self._running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)

    async def _in_turn(self, url: Url, work: Callable[[Url], Result]) -> Result:
        """One at a time for each program: who waits for it finds its output in the cache."""
        async with self._turns[url]:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, url)

    # --- in a thread

    def _look(self, url: Url) -> Pin:
        return self._news.pop(url, None) or self._run(url)

    def _read(self, url: Url, pin: Pin, begin: int, end: int) -> bytes:
        found = self._cached(url, pin, begin, end)
        if found is None:
            log.info("%s: is run again, since its output is not in the cache any more", url)
            now = self._run(url)
            if now != pin:
                self._news[url] = now
                raise ObjectChanged(f"{url}: its output is another one now")
            found = self._cached(url, pin, begin, end)
        if found is None:
            raise UnreadableShard(f"{url}: its output does not stay in the cache: --cache-size gives it more room")
        return found

    def _cached(self, url: Url, pin: Pin, begin: int, end: int) -> bytes | None:
        with contextlib.closing(self._needed_cache(url).open(url.shown, pin)) as cached:
            return cached.read(end - begin, begin)

    def _run(self, url: Url) -> Pin:
        """Run a command, with its output into the cache."""
        cache = self._needed_cache(url)
        if not url.user:
            raise UnreadableShard(f"{url}: came once, and is not in the cache any more")
        with self._started(url) as (process, said):
            spooled = spool(cache, url.shown, cast("BufferedIOBase", process.stdout))
            with spooled.file:
                code = process.wait()
                pin = spooled.pin("" if code == 0 else _ending(code) + said.last())
                keep(cache, url.shown, pin, spooled)
        if code:
            log.warning("%s: the command ended with %s; what came is taken for a damaged shard", url, pin.version)
        return pin

    @contextlib.contextmanager
    def _started(self, url: Url) -> Iterator[tuple[subprocess.Popen[bytes], _Said]]:
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", url.user],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=url.query,
                start_new_session=True,  # so that all of it can be ended
            )
        except OSError as error:
            raise UnreadableShard(f"{url}: cannot be run in {url.query!r}: {error.strerror}") from None
        self._running.add(process)
        assert process.stderr is not None
        said = _Said(url, process.stderr)
        try:
            yield process, said
        finally:
            with contextlib.suppress(ProcessLookupError):
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            said.last()
            self._running.remove(process)

    def _needed_cache(self, url: Url) -> ObjectCache:
        if self._cache is None:
            raise UnreadableShard(f"{url}: there is no cache for its output")
        return self._cache


def _ending(code: int) -> str:
    """How it ended; a shell gives the number of a signal that has ended its last command as 128 and more."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"


class _Said:
    """What a command says on its standard error. All is read, so that it never waits for that, and logged."""

    def __init__(self, url: Url, stream: IO[bytes]) -> None:
        self._last = ""
        self._reading = threading.Thread(target=self._read, args=(url, stream), daemon=True)
        self._reading.start()

    def _read(self, url: Url, stream: IO[bytes]) -> None:
        with stream:
            for number, line in enumerate(iter(lambda: stream.readline(SAID_LINE), b"")):
                text = line.decode(errors="replace").strip()
                self._last = text or self._last
                if number < SAID_LINES:
                    log.warning("%s says: %s", url, text)

    def last(self) -> str:
        """ ": " and the last line of a command that has ended; "" if it said nothing."""
        self._reading.join(SAID_SECONDS)
        return f": {self._last[:LAST_LINE]}" if self._last else ""
