"""The files of the cache of remote objects, by their names in one directory that only its user can write.

    KEY.data    what is here of an object, at its place: a sparse file of the size of the object
    KEY.table   which blocks of it are here, their checksums, URL and pin (`block_table.py`)
    KEY.pin     what is known of a URL: its pin and when that was seen (`object_cache.py`)
    room        how much is taken (`cache_room.py`)

An object is opened, started and removed under the lock of its table (flock), which takes microseconds; a process
that is killed leaves no lock. One that was half started or half removed is started anew. What a mount of the
kernel's reads (`storage/held_files.py`) is not removed. Data are open to write only while they are written, so
that such a mount learns of every writer.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from wdsfs import trust
from wdsfs.remote.block_table import BlockTable
from wdsfs.remote.urls import Pin
from wdsfs.storage import held_files
from wdsfs.storage.cache_place import is_at

DATA, TABLE, PIN = "data", "table", "pin"
PINS_KEPT = 30 * 86400.0  # seconds
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
_READING = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_ST_BLOCK = 512


class StoredObject(NamedTuple):
    """The files of one object on the disk."""

    used: float  # seconds since the epoch
    bytes: int  # of the disk
    key: str


def key_of(shown: str, pin: Pin) -> str:
    """The name for the files of an object."""
    return _digest("\0".join((shown, *map(str, pin))))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=16).hexdigest()


class CacheDirectory:
    """The directory, by path: it may be removed and made again at any time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.room_file = f"{path}/room"
        self._is_trusted = False

    def file(self, key: str, what: str) -> str:
        return f"{self.path}/{key}.{what}"

    def pin_file(self, shown: str) -> str:
        return self.file(_digest(shown), PIN)

    def open(self, path: str) -> int:
        """A descriptor of one of the files, which is made if there is none. Raises OSError, trust.Untrusted."""
        if self._is_trusted:
            with contextlib.suppress(FileNotFoundError):  # somebody has removed the directory
                return os.open(path, _FLAGS | os.O_CREAT, 0o600)
        trust.directory(self.path, create=True)
        self._is_trusted = True
        return os.open(path, _FLAGS | os.O_CREAT, 0o600)

    def open_object(self, shown: str, pin: Pin) -> tuple[int, BlockTable]:
        """The data file and the table of an object, started if there are none. Raises OSError."""
        key = key_of(shown, pin)
        path = self.file(key, TABLE)
        while True:
            fd = self.open(path)
            try:
                with flocked(fd):
                    table = self._table(fd, key, shown, pin) if is_at(fd, path) else None
                    if table is not None:
                        data = self._data(key, table)
                        if data is not None:
                            return data, table
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # another process has just removed it, or it is removed here since it is damaged

    def _table(self, fd: int, key: str, shown: str, pin: Pin) -> BlockTable | None:
        """The table in a file that is locked; removes one that is damaged."""
        if os.fstat(fd).st_size == 0:
            _unlink(self.file(key, DATA))
            return BlockTable.create(fd, shown, pin)
        table = BlockTable.load(fd)
        if table is None or (table.shown, table.pin) != (shown, pin):
            self._unlink(key)
            return None
        table.note_use()
        return table

    def _data(self, key: str, table: BlockTable) -> int | None:
        """The data file to a table that is locked, to read; removes both if they do not fit."""
        path = self.file(key, DATA)
        if table.count() == 0:
            self._start(path, table.pin.size)
        try:
            fd = os.open(path, _READING)
        except FileNotFoundError:  # lost, unlike its table
            self._unlink(key)
            return None
        if os.fstat(fd).st_size != table.pin.size:
            self._unlink(key)
            os.close(fd)
            return None
        return fd

    def _start(self, path: str, size: int) -> None:
        """Give an empty data file the size of its object."""
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path, follow_symlinks=False).st_size == size:
                return  # and not opened to write: it may be mounted, although its blocks were dropped
        fd = self.open(path)
        try:
            if os.fstat(fd).st_size == 0:
                os.ftruncate(fd, size)
        finally:
            os.close(fd)

    def load(self, key: str) -> tuple[int, BlockTable] | None:
        """The data file and the table of an object that is here, to look at. Raises OSError."""
        path = self.file(key, TABLE)
        try:
            fd = os.open(path, _FLAGS)
        except FileNotFoundError:
            return None
        table = None
        try:
            table = BlockTable.load(fd)
            return None if table is None else (os.open(self.file(key, DATA), _READING), table)
        except FileNotFoundError:
            table = None
            return None
        finally:
            if table is None:
                os.close(fd)

    def objects(self) -> list[StoredObject]:
        """All objects, the one first that was not used for the longest time. Raises OSError.

        Removes pins that nobody has asked for in a month.
        """
        found: dict[str, list[os.stat_result | None]] = {}
        for key, what, state in self._scan():
            if what in (DATA, TABLE):
                found.setdefault(key, [None, None])[what == TABLE] = state
            elif what == PIN and state.st_mtime < time.time() - PINS_KEPT:
                _unlink(self.file(key, PIN))
        return sorted(
            StoredObject(
                table.st_mtime if table else 0.0,  # data without a table is of no use
                sum(one.st_blocks * _ST_BLOCK for one in (data, table) if one),
                key,
            )
            for key, (data, table) in found.items()
        )

    def _scan(self) -> Iterator[tuple[str, str, os.stat_result]]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path) as entries:
            for entry in entries:
                key, _, what = entry.name.partition(".")
                if what in (DATA, TABLE, PIN):
                    with contextlib.suppress(FileNotFoundError):
                        yield key, what, entry.stat(follow_symlinks=False)

    def remove(self, key: str) -> bool:
        """Remove an object; who has it open keeps its bytes. False if it is just being opened, or is held.

        Raises OSError.
        """
        path = self.file(key, TABLE)
        try:
            fd = os.open(path, _FLAGS)
        except FileNotFoundError:
            _unlink(self.file(key, DATA))
            return True
        try:
            with flocked(fd, fcntl.LOCK_NB):
                if held_files.is_held_at(self.file(key, DATA)):
                    return False
                if is_at(fd, path):
                    self._unlink(key)
        except BlockingIOError:
            return False
        finally:
            os.close(fd)
        return True

    def _unlink(self, key: str) -> None:
        _unlink(self.file(key, DATA))  # first: without it a table is started anew
        _unlink(self.file(key, TABLE))


def is_certified(data: str, fd: int) -> bool:
    """True if an open data file has all of its object, compared with its checksums since the last change.

    Raises OSError.
    """
    table_fd = os.open(f"{data.removesuffix(DATA)}{TABLE}", _READING)
    try:
        table = BlockTable.load(table_fd)
        if table is None or table.count() < table.blocks:
            return False
        return table.is_whole(os.fstat(fd).st_ctime_ns)
    finally:
        os.close(table_fd)


@contextlib.contextmanager
def flocked(fd: int, how: int = 0) -> Iterator[None]:
    """Lock a file. Unlocked in so many words: a child that was forked meanwhile has the descriptor, too."""
    fcntl.flock(fd, fcntl.LOCK_EX | how)
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
