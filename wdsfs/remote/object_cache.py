"""The cache of remote objects: one directory, shared by all processes, mounts and commands of a user.

Per object a sparse file and a table of what of it is here (`cached_object.py`, `block_table.py`). It outlives
unmounts and reboots; what goes when it is full is decided in `cache_room.py`, names and locks of the files in
`cache_directory.py`. Filling it is for others: a cache without an object, or that cannot be used, is only slow.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from wdsfs.remote.block_table import BLOCK
from wdsfs.remote.cache_directory import DATA, CacheDirectory, StoredObject, key_of
from wdsfs.remote.cache_room import CacheRoom
from wdsfs.remote.cached_object import CachedObject
from wdsfs.remote.urls import Pin
from wdsfs.storage import cache_place, held_files

_PIN_MAX = 1 << 16


class CachedEntry(NamedTuple):
    """An object in the cache, as `wdsfs cache` shows it."""

    shown: str
    pin: Pin
    used: float  # seconds since the epoch
    bytes: int  # of the object that are here
    disk: int  # bytes of the disk
    key: str

    @property
    def complete(self) -> bool:
        return self.bytes == self.pin.size


def cache() -> ObjectCache:
    """The cache that this process uses. Raises UsageError, IndexUnusable."""
    place = cache_place.place("remote shards", beside_index="remote", in_given="remote")
    return ObjectCache(place, cache_place.limit())


class ObjectCache:
    """The cache in a directory that only this user can write; it is made when something is put into it."""

    def __init__(self, directory: Path, limit: int | None) -> None:
        self.directory, self.limit = directory, limit
        self._directory = CacheDirectory(directory)
        self._room = CacheRoom(self._directory, limit)

    def open(self, shown: str, pin: Pin) -> CachedObject:
        """The object at a URL (as it is shown), to read and to fill. Raises OSError."""
        fd, table = self._directory.open_object(shown, pin)
        try:
            return CachedObject(fd, table, self._room)
        except BaseException:
            os.close(fd)
            os.close(table.fd)
            raise

    def has_all(self, shown: str, pin: Pin) -> bool:
        """True if all of an object is here. Raises OSError."""
        found = self._directory.load(key_of(shown, pin))
        if found is None:
            return False
        with contextlib.closing(CachedObject(*found, self._room)) as one:
            return one.complete

    def is_held(self, key: str) -> bool:
        """True if a mount of the kernel's reads an object."""
        return held_files.is_held_at(self._directory.file(key, DATA))

    def room(self) -> int:
        """The bytes of the largest object that can be kept as a whole. Raises OSError."""
        return self._room.most()

    # --- what is known of URLs

    def pin_of(self, shown: str) -> tuple[Pin, float] | None:
        """The last known pin of a URL, and when it was seen (seconds since the epoch); None without one."""
        found = self._note_of(shown)
        return None if found is None or len(found) == 1 else (Pin(*found[1:]), found[0])

    def is_gone(self, shown: str) -> bool:
        """True if its store said, when it was asked last, that there is nothing at a URL any more."""
        found = self._note_of(shown)
        return found is not None and len(found) == 1

    def _note_of(self, shown: str) -> list[Any] | None:
        """What is noted of a URL: when (seconds since the epoch), and its pin if there was an object."""
        try:
            fd = os.open(self._directory.pin_file(shown), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            line, end, _ = os.pread(fd, _PIN_MAX, 0).partition(b"\n")
        except OSError:
            return None
        finally:
            os.close(fd)
        check, _, text = line.partition(b" ")
        if not end or check != _check_of(text):
            return None
        url, *found = json.loads(text)
        return found if url == shown else None

    def keep_pin(self, shown: str, pin: Pin) -> None:
        """Note the pin of a URL, as seen now. An object of another pin is removed. Raises OSError."""
        before = self.pin_of(shown)
        self._note(shown, [time.time(), *pin])
        if before is not None and before[0] != pin:
            self._directory.remove(key_of(shown, before[0]))

    def drop_pin(self, shown: str) -> None:
        """Note that there is nothing at a URL any more, for all processes. Raises OSError."""
        if self.pin_of(shown) is not None:
            self._note(shown, [time.time()])

    def _note(self, shown: str, found: list[Any]) -> None:
        text = json.dumps([shown, *found]).encode()
        fd = self._directory.open(self._directory.pin_file(shown))
        try:
            # At once, and with a checksum: a reader sees the old, the new or nothing.
            os.pwrite(fd, _check_of(text) + b" " + text + b"\n", 0)
        finally:
            os.close(fd)

    # --- for `wdsfs cache` and `status`

    def state(self) -> tuple[int, int]:
        """The bytes of the disk that it takes, without reading the directory, and its limit. Raises OSError."""
        return self._room.state()

    def usage(self, prefix: str = "") -> Iterator[CachedEntry]:
        """The objects whose URL begins with `prefix`, the one first that was not used for the longest time.

        Raises OSError.
        """
        for one in self._directory.objects():
            entry = self._entry(one)
            if entry is not None and entry.shown.startswith(prefix):
                yield entry

    def _entry(self, stored: StoredObject) -> CachedEntry | None:
        found = self._directory.load(stored.key)
        if found is None:
            return None
        fd, table = found
        try:
            here = min(table.count() * BLOCK, table.pin.size)
        finally:
            os.close(fd)
            os.close(table.fd)
        return CachedEntry(table.shown, table.pin, stored.used, here, stored.bytes, stored.key)

    def trim(self, size: int | None = None) -> int:
        """Remove the longest unused objects until the cache has at most `size` bytes; the bytes that are freed.

        Without a size down to the limit, which is that of now. Raises OSError.
        """
        return self._room.trim(size) if os.path.isdir(self.directory) else 0

    def clear(self, prefix: str = "") -> list[CachedEntry]:
        """Remove the objects whose URL begins with `prefix`; those that were removed. Raises OSError."""
        gone = [one for one in self.usage(prefix) if self._directory.remove(one.key)]
        if gone and prefix:
            self._room.recount()
        elif not prefix:
            self.trim(0)  # also what is damaged, and has no URL
        return gone

    def verify(self, prefix: str = "") -> Iterator[tuple[CachedEntry, int]]:
        """Compare what is here with its checksums: each object, and how many bytes were damaged and are dropped.

        Raises OSError.
        """
        for entry in self.usage(prefix):
            found = self._directory.load(entry.key)
            if found is not None:
                with contextlib.closing(CachedObject(*found, self._room)) as one:
                    yield entry, one.verify() * BLOCK


def _check_of(text: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(text).encode()
