"""What the tests of the cache share, also with the processes that they start."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

from wdsfs.door.pins import Pin
from wdsfs.remote.cached_object import CachedObject
from wdsfs.remote.object_cache import ObjectCache

URL = "s3://bucket/train-000000.tar"
LIMIT = 1 << 40


def content_of(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def pin_of(size: int) -> Pin:
    return Pin(size, 1_700_000_000_000_000_000, '"abc"', "")


@contextlib.contextmanager
def opened(directory: Path, size: int) -> Iterator[CachedObject]:
    one = ObjectCache(directory, LIMIT).open(URL, pin_of(size))
    with contextlib.closing(one):
        yield one


@contextlib.contextmanager
def filled(directory: Path, content: bytes) -> Iterator[CachedObject]:
    """The object with this content, all of it in the cache, open."""
    with opened(directory, len(content)) as one:
        assert one.put(0, content)
        yield one


def file_of(directory: Path, what: str) -> Path:
    [found] = directory.glob(f"*.{what}")
    return found


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        [byte] = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 0xFF]))
