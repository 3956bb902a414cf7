"""Writes a portable index: the records of a set, with the times and ETags by which other machines know its shards.

The same shards give the same bytes: nothing of this machine is in the file, no inode, no ctime, no time of its
own. Records of an older portable index are copied in runs, by the kernel where it can, which shares them on file
systems that do. The file is whole or not there, as everything that `durable.py` writes; a store gets it by
one conditional request.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from wdsfs.door.shard_door import DOOR
from wdsfs.door.urls import is_remote
from wdsfs.durable import Disk, named, new_file
from wdsfs.errors import IndexUnusable, ObjectChanged, ObjectExists, StaleShard, UsageError
from wdsfs.index.portable import PortableIndex
from wdsfs.index.record import RECORD, Record
from wdsfs.index.record_builder import restamped
from wdsfs.index.store import Index, Summary
from wdsfs.shards import Fingerprint, Shard
from wdsfs.spec import portable_head
from wdsfs.spec.portable_head import ALIGNMENT, SUFFIX, Row

RACY_NS = 2_000_000_000  # age from which a time of whole seconds says that a file is not being written any more


class _Listed(NamedTuple):
    """A shard, and its row in the index, still without a record."""

    shard: Shard
    fingerprint: Fingerprint
    row: Row


class _Run(NamedTuple):
    """Records that are side by side in an older index, as a range of its bytes."""

    fd: int
    start: int
    end: int


class PortableWriter:
    """Writes the records of `shards`, which `index` has (`Index.stale` with `exact`), for a file at `target`."""

    def __init__(
        self,
        index: Index,
        shards: Sequence[Shard],
        target: bytes,
        on_shard: Callable[[], None],
    ) -> None:
        self._index, self._disk, self._on_shard = index, Disk(), on_shard
        self._target = os.fsdecode(target)
        self._listed, self._base = self._list(shards)
        self._reading = shards[0].reading
        self._run: _Run | None = None  # of an older index, which is still to be copied

    def _list(self, shards: Sequence[Shard]) -> tuple[list[_Listed], str]:
        base, paths = portable_head.place_of((os.fsdecode(shard.path) for shard in shards), self._target)
        listed = []
        for shard, path in zip(shards, paths, strict=True):
            fingerprint, etag, version = _known(shard.path)
            row = Row(fingerprint.size, fingerprint.mtime_ns, 0, 0, 0, path, etag, version, _NO_NUMBERS)
            listed.append(_Listed(shard, fingerprint, row))
        return listed, base

    def write(self, fd: int) -> None:
        """Write the index to an empty file. Raises StaleShard, OSError."""
        rows = [listed.row for listed in self._listed]
        at = len(self._head(rows, 0))
        at += -at % ALIGNMENT
        os.lseek(fd, at, os.SEEK_SET)
        for number, listed in enumerate(self._listed):
            rows[number] = self._append(fd, listed, at)
            at += rows[number].length
            padding = -at % ALIGNMENT
            if padding:  # of a record that another program has written: ours need none
                self._flush(fd)
                self._disk.write(fd, bytes(padding))
                at += padding
            self._on_shard()
        self._flush(fd)
        os.lseek(fd, 0, os.SEEK_SET)
        self._disk.write(fd, self._head(rows, at))

    def _head(self, rows: Sequence[Row], size: int) -> bytes:
        return portable_head.head_of(rows, self._base, RECORD.version, self._reading, size)

    def _append(self, fd: int, listed: _Listed, at: int) -> Row:
        """Write one record at the end of the file, which is `at`, or plan that; returns its row."""
        data_here = self._index.packed(listed.shard.key, listed.fingerprint)
        if data_here is None:
            older = self._index.portables.same(listed.shard.key, listed.fingerprint)
            if older is None:
                raise StaleShard(f"{os.fsdecode(listed.shard.path)} has changed meanwhile; repeat the command")
            source, row = older
            if self._planned(fd, source, row, listed.shard.key):
                return listed.row._replace(offset=at, length=row.length, crc=row.crc, numbers=row.numbers)
            copied = self._index.portables.copy(listed.shard.key, listed.fingerprint, exact=True)
            if copied is None:
                raise StaleShard(f"{self._target}: its record of {listed.row.path} is damaged; repeat the command")
            data_here = memoryview(copied)
        data = restamped(data_here, Fingerprint(listed.fingerprint.size, listed.fingerprint.mtime_ns, 0))
        self._flush(fd)
        self._disk.write(fd, data)
        crc, numbers = int.from_bytes(data[8:16], "little"), Record(data, verify=False).counts()
        return listed.row._replace(offset=at, length=len(data), crc=crc, numbers=numbers)

    def _planned(self, fd: int, older: PortableIndex, row: Row, key: bytes) -> bool:
        """Plan to copy the record of an older index with its neighbours; False if it has to be read."""
        number = older.number_of(key)
        if number is None or older.in_place(number) is None:
            return False
        run = self._run
        if run is None or run.fd != older.fd or run.end != row.offset:
            self._flush(fd)
            run = _Run(older.fd, row.offset, row.offset)
        self._run = run._replace(end=row.offset + row.length)
        return True

    def _flush(self, fd: int) -> None:
        if self._run is not None:
            self._disk.copy(self._run.fd, fd, self._run.start, self._run.end - self._run.start)
            self._run = None


_NO_NUMBERS = (0,) * (len(Summary._fields) - len(Fingerprint._fields))


def _known(path: bytes) -> tuple[Fingerprint, str, str]:
    """Return the present fingerprint, ETag and version of a shard. Raises ShardError, UsageError."""
    fingerprint = DOOR.look(path)
    if is_remote(path):
        if DOOR.remote.url_of(path).is_program:
            raise UsageError(f"{os.fsdecode(path)}: is the output of a command, which an index cannot list")
        pin = DOOR.remote.pin_of(path)
        return fingerprint, pin.etag, pin.version
    # On a file system with times of whole seconds a change within the same second would not be seen elsewhere.
    age = time.time_ns() - fingerprint.mtime_ns
    if fingerprint.mtime_ns % 1_000_000_000 == 0 and 0 <= age < RACY_NS:
        time.sleep((RACY_NS - age) / 1e9)
        if DOOR.look(path) != fingerprint:
            raise StaleShard(f"{os.fsdecode(path)} is being written; repeat the command when it is finished")
    return fingerprint, "", ""


def checked_target(text: str) -> bytes:
    """Return the path, or URL, of a portable index to be written. Raises UsageError, SpecError."""
    if not text.endswith(SUFFIX):
        raise UsageError(f"{text}: the name of an index of shards ends in {SUFFIX}")
    path = os.fsencode(portable_head.where(text))
    if not is_remote(path) and not os.path.isdir(os.path.dirname(path)):
        raise UsageError(f"{text}: there is no directory {os.fsdecode(os.path.dirname(path))}; make it first")
    return path


def write_index(
    index: Index, shards: Sequence[Shard], target: bytes, on_shard: Callable[[], None] = lambda: None
) -> int:
    """Write the portable index of these shards, in the place of the one that is there; returns its size in bytes.

    Raises StaleShard, IndexUnusable, ShardErrors, UsageError; CommitError if another process writes it.
    """
    writer, disk = PortableWriter(index, shards, target, on_shard), Disk()
    try:
        if is_remote(target):
            return _send(writer, target)
        with named(target), new_file(disk, target) as fd:
            writer.write(fd)
            size = os.fstat(fd).st_size
            disk.sync(fd)
        disk.sync_directory(os.path.dirname(target))
    except OSError as error:
        where = os.fsdecode(error.filename or target)
        raise IndexUnusable(f"{where}: the index cannot be written: {error.strerror}") from None
    return size


def _send(writer: PortableWriter, target: bytes) -> int:
    """Write the index to a file without a name, and send that. Raises as `write_index`, and OSError."""
    replaces = DOOR.remote.existing_objects([target]).get(target)
    with tempfile.TemporaryFile(dir=DOOR.remote.staging_directory(), buffering=0) as file:
        writer.write(file.fileno())
        try:
            DOOR.remote.upload(target, file.fileno(), replaces, lambda: None)
        except (ObjectExists, ObjectChanged):
            raise IndexUnusable(
                f"{os.fsdecode(target)}: another program has written it meanwhile, so it was left unchanged: "
                "repeat the command to replace it"
            ) from None
        return os.fstat(file.fileno()).st_size
