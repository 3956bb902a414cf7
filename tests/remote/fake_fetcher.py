"""A fetcher whose stores are in its memory: for tests of processes and mounts without a network.

The first part of a key says how the store behaves: `plain` answers at once, `slow` after 20 ms, `never` does not,
`gated` when the file that the settings name exists, `changed` has another object. With `body` in the settings each
object is that file.
"""

from __future__ import annotations

import asyncio
import functools
import os
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.remote.stores import MemoryCache, content
from wdsfs.door.pins import Listing, Pin
from wdsfs.door.urls import Url
from wdsfs.errors import DeniedObject, MissingObject, ObjectChanged, Unreachable
from wdsfs.remote.fetcher import serve, start
from wdsfs.remote.parts import Take

START = (
    "import sys; sys.path[:] = sys.argv[2:]; from tests.remote.fake_fetcher import main; main(int(sys.argv[1]))"
)
SIZE = 24 << 20
PIN = Pin(SIZE, 0, '"1"', "")


@functools.cache
def body_of(key: str) -> bytes:
    return content(SIZE, zlib.crc32(key.encode()))


class FakeStores:
    def __init__(self, settings: dict[str, str]) -> None:
        self.settings = settings

    async def head(self, url: Url) -> Pin:
        kind = url.key.partition("/")[0]
        if kind == "missing":
            raise MissingObject(f"{url.shown}: there is no such object")
        if kind == "crash":
            os._exit(1)
        return PIN._replace(etag='"2"') if kind == "changed" else PIN

    async def fetch(self, url: Url, pin: Pin, begin: int, end: int, take: Take) -> None:
        match url.key.partition("/")[0]:
            case "slow":
                await asyncio.sleep(0.02)
            case "never":
                await asyncio.sleep(float(self.settings.get("total", 1e9)))
                raise Unreachable(f"{url.shown}: no answer")
            case "gated":
                while not os.path.exists(self.settings["gate"]):  # noqa: ASYNC110, ASYNC240 - set by another process
                    await asyncio.sleep(0.002)
            case "changed":
                raise ObjectChanged(f"{url.shown} has changed")
            case "denied":
                raise DeniedObject(f"{url.shown}: access denied")
        if "body" in self.settings:
            take(begin, Path(self.settings["body"]).read_bytes()[begin:end])  # noqa: ASYNC240 - small
        else:
            take(begin, body_of(url.key)[begin:end])

    async def get_all(self, url: Url, pin: Pin) -> AsyncIterator[bytes]:
        yield body_of(url.key)

    async def list(self, prefix: Url, *, deep: bool) -> Listing:
        assert deep
        return Listing([(prefix._replace(key=f"{prefix.key}/{number}"), PIN) for number in range(3)], [])

    def latency(self, url: Url) -> float:
        return 0.0

    def end(self) -> None:
        pass

    async def describe(self, url: Url) -> dict[str, Any]:
        return {"reachable": True}


class FakeCache:
    """Dies with its fetcher."""

    def open(self, shown: str, pin: Pin) -> MemoryCache:
        return MemoryCache({}, pin.size, [])

    def drop_pin(self, shown: str) -> None:
        pass

    def keep_pin(self, shown: str, pin: Pin) -> None:
        pass


def main(descriptor: int) -> None:
    configuration = start(descriptor)
    if configuration is not None:
        cache: Any = None if configuration.cache is None else FakeCache()
        stores: Any = FakeStores(configuration.settings)
        asyncio.run(serve(configuration, stores, cache))
