"""Opens and lists the remote objects in the cache, and notes which object is at a URL.

For each object there are a sparse file and a table of its blocks (`cached_object.py`), and for each URL a note of
its pin. Other modules fill the cache. Without an object, or without a usable cache, reads are only slower. The
room `cache` decides where the files are (`cache_directory.py`), and which files are evicted (`cache_room.py`).

An object is opened, started and removed under the lock of its table, which takes microseconds; a process that is
killed leaves no lock. An object that was half started or half removed is started again. Data files are open for
writing only while they are written, so that a mount by the kernel notices every writer.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from wdsfs.cache import cache_directory
from wdsfs.cache.cache_directory import DATA, TABLE, CacheDirectory, CacheEntry, is_at, table_locked, unlink
from wdsfs.cache.cache_room import chosen_limit
from wdsfs.cache.file_cache import FileCache
from wdsfs.door.pins import Pin
from wdsfs.door.remote_side import CachedEntry
from wdsfs.remote.cached_object import BLOCK, BlockTable, CachedObject

_NOTE_MAX = 1 << 16


def cache() -> ObjectCache:
    """Return the cache that this process uses. Raises UsageError, IndexUnusable."""
    return ObjectCache(cache_directory.place(), chosen_limit())


def key_of(shown: str, pin: Pin) -> str:
    """Return the key of an object."""
    return cache_directory.key_of(shown.encode(errors="surrogateescape"), pin.fingerprint(shown))


class ObjectCache:
    """The cache in a directory that only this user can write, which its first entry makes."""

    def __init__(self, directory: Path, limit: int | None) -> None:
        self.directory, self.limit = directory, limit
        self.files = FileCache(directory, limit)  # the same cache, for whole files
        self._directory = CacheDirectory(directory)
        self.room = self.files.room

    # --- objects

    def open(self, shown: str, pin: Pin) -> CachedObject:
        """Return the object at a URL (as it is shown), to read and to fill. Raises OSError."""
        fd, table = self._open_files(shown, pin)
        try:
            return CachedObject(fd, table, self.room)
        except BaseException:
            os.close(fd)
            os.close(table.fd)
            raise

    def _open_files(self, shown: str, pin: Pin) -> tuple[int, BlockTable]:
        """Return the data file and the table of an object; create them if necessary."""
        key = key_of(shown, pin)
        path = self._directory.file(key, TABLE)
        while True:
            fd = self._directory.open(path)
            try:
                with table_locked(fd):
                    table = self._table(fd, key, shown, pin) if is_at(fd, path) else None
                    data = None if table is None else self._data(key, table)
                    if table is not None and data is not None:
                        return data, table
            except BaseException as error:
                os.close(fd)
                if isinstance(error, OSError) and error.errno == errno.ESTALE:  # by another node
                    continue
                raise
            os.close(fd)  # another process has just removed the file, or this one, because it was damaged

    def _table(self, fd: int, key: str, shown: str, pin: Pin) -> BlockTable | None:
        """Return the table in a file that is locked; remove one that is damaged."""
        if os.fstat(fd).st_size == 0:
            unlink(self._directory.file(key, DATA))
            return BlockTable.create(fd, shown, pin)
        table = BlockTable.load(fd)
        if table is None or (table.shown, table.pin) != (shown, pin):
            self._unlink(key)
            return None
        table.note_use()
        return table

    def _data(self, key: str, table: BlockTable) -> int | None:
        """Return the data file for a locked table, open for reading; remove both if they do not match."""
        path = self._directory.file(key, DATA)
        if table.count() == 0:
            self._start(path, table.pin.size)
        with contextlib.suppress(FileNotFoundError):  # lost, unlike its table
            fd = os.open(path, cache_directory.READING)
            if os.fstat(fd).st_size == table.pin.size:
                return fd
            os.close(fd)
        self._unlink(key)
        return None

    def _start(self, path: str, size: int) -> None:
        """Give an empty data file the size of its object."""
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path, follow_symlinks=False).st_size == size:
                return  # without opening it for writing: it may be mounted, although its blocks were dropped
        fd = self._directory.open(path)
        try:
            if os.fstat(fd).st_size == 0:
                os.ftruncate(fd, size)
        finally:
            os.close(fd)

    def _unlink(self, key: str) -> None:
        unlink(self._directory.file(key, DATA))  # first: without it a table is started again
        unlink(self._directory.file(key, TABLE))

    def _load(self, key: str) -> tuple[int, BlockTable] | None:
        """Return the data file and the table of an object that is here, to look at. Raises OSError."""
        with contextlib.ExitStack() as opened, contextlib.suppress(FileNotFoundError):
            fd = os.open(self._directory.file(key, TABLE), cache_directory.WRITING)
            opened.callback(os.close, fd)
            table = BlockTable.load(fd)
            if table is not None:
                data = os.open(self._directory.file(key, DATA), cache_directory.READING)
                opened.pop_all()
                return data, table
        return None

    def has_all(self, shown: str, pin: Pin) -> bool:
        """Return True if all of an object is here. Raises OSError."""
        files = self._load(key_of(shown, pin))
        if files is None:
            return False
        with contextlib.closing(CachedObject(*files, self.room)) as cached:
            return cached.complete

    # --- notes about URLs

    def pin_of(self, shown: str, unknown: Pin | None = None) -> Pin | None:
        """Return the last known pin of a URL; None if the object is gone, `unknown` if there is no note."""
        note = self._note_of(shown)
        if note is None:
            return unknown
        return None if len(note) == 1 else Pin(*note[1:])

    def keep_pin(self, shown: str, pin: Pin) -> None:
        """Note the pin of a URL, as seen now. An object of another pin is removed. Raises OSError."""
        before = self.pin_of(shown, pin) or pin
        self._note(shown, [time.time(), *pin])
        if before != pin:
            self._directory.remove(CacheEntry(0.0, 0, key_of(shown, before), TABLE))

    def drop_pin(self, shown: str) -> None:
        """Note, for all processes, that no object is at a URL any more. Raises OSError."""
        if self.pin_of(shown) is not None:
            self._note(shown, [time.time()])

    def _note_of(self, shown: str) -> list[Any] | None:
        """Return the note about a URL: its time (seconds since the epoch), and the pin if there was an object."""
        try:
            fd = os.open(self._note_file(shown), cache_directory.READING)
        except OSError:  # as for most shards of a large set
            return None
        try:
            line, end, _ = os.read(fd, _NOTE_MAX).partition(b"\n")
        except OSError:
            return None
        finally:
            os.close(fd)
        check, _, text = line.partition(b" ")
        if not end or check != _check_of(text):
            return None
        url, *note = json.loads(text)
        return note if url == shown else None

    def _note(self, shown: str, note: list[Any]) -> None:
        text = json.dumps([shown, *note]).encode()
        fd = self._directory.open(self._note_file(shown))
        try:
            # In one write, and with a checksum: a reader sees the old note, the new one or none.
            os.pwrite(fd, _check_of(text) + b" " + text + b"\n", 0)
        finally:
            os.close(fd)

    def _note_file(self, shown: str) -> str:
        digest = hashlib.blake2b(shown.encode(errors="surrogateescape"), digest_size=16)
        return self._directory.file(digest.hexdigest(), cache_directory.NOTE)

    # --- for `wdsfs cache`

    def usage(self, prefix: str = "") -> Iterator[CachedEntry]:
        """Yield the objects whose URL begins with `prefix`, the longest unused one first. Raises OSError."""
        for files in self._directory.entries():
            entry = self._entry(files) if files.kind == TABLE else None
            if entry is not None and entry.shown.startswith(prefix):
                yield entry

    def _entry(self, files: CacheEntry) -> CachedEntry | None:
        loaded = self._load(files.key)
        if loaded is None:
            return None
        fd, table = loaded
        try:
            here = min(table.count() * BLOCK, table.pin.size)
        finally:
            os.close(fd)
            os.close(table.fd)
        return CachedEntry(table.shown, table.pin, files.used, here, files)

    def clear(self, prefix: str) -> list[CachedEntry]:
        """Remove the objects whose URL begins with `prefix`; return the removed ones. Raises OSError."""
        gone = [entry for entry in self.usage(prefix) if self._directory.remove(entry.files)]
        if gone:
            self.room.recount()
        return gone

    def verify(self, prefix: str = "") -> Iterator[tuple[CachedEntry, int]]:
        """Compare the cached bytes with their checksums; yield each object, and its damaged bytes, now dropped.

        Raises OSError.
        """
        for entry in self.usage(prefix):
            files = self._load(entry.files.key)
            if files is not None:
                with contextlib.closing(CachedObject(*files, self.room)) as cached:
                    yield entry, cached.verify() * BLOCK


def _check_of(text: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(text).encode()
