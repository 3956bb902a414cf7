"""One shard of a packed set as a unit of work: read the files, write the tar, verify it, give it its name.

A `ShardUnit` has all that this takes, so it can be sent to another process, or to another machine that reaches the
same files. Whatever is killed in the middle, the shard is there whole or not at all. A file that is not what it
was when the set was planned is an error that names it.

Most of the time goes into the system calls for each small file, so these are few: open, read, fstat, close.
"""

from __future__ import annotations

import itertools
import os
from array import array
from collections.abc import Callable, Iterator
from typing import NamedTuple

import xxhash

from wdsfs.errors import CommitError
from wdsfs.storage.durable import CHUNK, COPY_MAX, Disk, named, new_file
from wdsfs.tar import headers

OPEN_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
OPEN_DIRECTORIES = 64  # at a time: a shuffled set goes to and fro between directories

BLOCK = len(headers.END) // 2
ZEROS = bytes(BLOCK)


class ClassColumn(NamedTuple):
    """A member that each sample gets: its extension, and its content by class.

    `starts` has the first file of each sample among those of the unit, `class_of` its class.
    """

    extension: bytes
    contents: tuple[bytes, ...]
    starts: array[int]
    class_of: array[int]


class ShardUnit(NamedTuple):
    """A shard to be written. Columns, not objects for each file: they are made and sent quickly.

    `length` is that of the tar in bytes. `directories` are absolute paths; `prefixes` stand in front of the names
    of their files in the tar. Of each file there are: its name, with a NUL between any two; the number of its
    directory; its size in bytes; its mtime in ns. `mtime` (seconds) is that of all members; None: each has its
    own. `follow_links`: files may be symbolic links.
    """

    target: bytes
    length: int
    directories: tuple[bytes, ...]
    prefixes: tuple[bytes, ...]
    names: bytes
    directory_of: array[int]
    sizes: array[int]
    times_ns: array[int]
    classes: ClassColumn | None = None
    mtime: int | None = None
    follow_links: bool = False


# Of a member: the number of its directory (-1: it is made up), its name there (whole), its size, mtime in ns, and
# the content of a made-up one.
Member = tuple[int, bytes, int, int, bytes]


def members(unit: ShardUnit) -> Iterator[Member]:
    """Yield the members of a shard in order."""
    files = zip(
        unit.directory_of, unit.names.split(b"\0"), unit.sizes, unit.times_ns, itertools.repeat(b""), strict=False
    )
    return files if unit.classes is None else _with_classes(unit, unit.classes, list(files))


def _with_classes(unit: ShardUnit, classes: ClassColumn, files: list[Member]) -> Iterator[Member]:
    stops = itertools.chain(classes.starts[1:], [len(files)])
    for start, stop, label in zip(classes.starts, stops, classes.class_of, strict=True):
        directory, name, _, mtime_ns, _ = files[start]
        own = name.partition(b".")[0] + b"." + classes.extension
        content = classes.contents[label]
        # At its place among the names, with the time of the sample.
        place = start + sum(one[1] < own for one in files[start:stop])
        yield from files[start:place]
        yield -1, unit.prefixes[directory] + own, len(content), mtime_ns, content
        yield from files[place:stop]


def publish(unit: ShardUnit) -> None:
    """Write a shard, verify it, and give it its name, which must be free, or have this shard already.

    It may have, when the result of a worker was lost and its unit is repeated. Raises CommitError, OSErrors.
    """
    writer = UnitWriter()
    if not writer.is_there(unit):
        writer.publish(unit)


def is_there(unit: ShardUnit) -> bool:
    """True if the target has exactly these bytes already. Raises CommitError, OSErrors."""
    return UnitWriter().is_there(unit)


class UnitWriter:
    """Writes units. `on_bytes` is called with each number of bytes done, and may raise to stop."""

    def __init__(self, disk: Disk | None = None, on_bytes: Callable[[int], None] = lambda _: None) -> None:
        self.disk, self.on_bytes = disk or Disk(), on_bytes

    def publish(self, unit: ShardUnit) -> None:
        """Write a shard, verify it, and give it its name, which must be free. Raises CommitError, OSErrors."""
        with named(unit.target), new_file(self.disk, unit.target) as fd:
            self._write(fd, unit, sync=True)
            if os.path.lexists(unit.target):
                raise CommitError(f"{os.fsdecode(unit.target)} is there already")
        self.disk.sync_directory(os.path.dirname(unit.target))

    def fill(self, fd: int, unit: ShardUnit) -> None:
        """Write a shard into an empty file without a name, and verify it. Raises CommitError, OSErrors."""
        self._write(fd, unit, sync=False)

    def _write(self, fd: int, unit: ShardUnit, sync: bool) -> None:
        written, done, sent = xxhash.xxh3_128(), 0, 0
        for data in _chunks(unit):
            written.update(data)
            self.disk.write(fd, data)
            done += len(data)
            self.on_bytes(len(data))
            if done - sent >= COPY_MAX:
                self.disk.start_writing(fd)
                sent = done
        if sync:
            self.disk.sync(fd)
        _verify(fd, unit, written.digest())

    def is_there(self, unit: ShardUnit) -> bool:
        """As the function `is_there`."""
        try:
            fd = os.open(unit.target, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        try:
            if os.fstat(fd).st_size != unit.length:
                return False
            return all(os.pread(fd, len(data), at) == data for at, data in self.content(unit))
        finally:
            os.close(fd)

    def content(self, unit: ShardUnit) -> Iterator[tuple[int, bytes]]:
        """Yield the bytes of a shard in chunks, with their places."""
        at = 0
        for data in _chunks(unit):
            yield at, bytes(data)
            at += len(data)
            self.on_bytes(len(data))


def _verify(fd: int, unit: ShardUnit, digest: bytes) -> None:
    """Read a file back, and compare it with what was to be written. Raises CommitError."""
    found, at = xxhash.xxh3_128(), 0
    while data := os.pread(fd, CHUNK, at):
        found.update(data)
        at += len(data)
    if at != unit.length or found.digest() != digest:
        raise CommitError(f"{os.fsdecode(unit.target)}: what was written cannot be read back: it has other bytes")


def _chunks(unit: ShardUnit) -> Iterator[bytearray]:
    """Yield the bytes of a shard, some `CHUNK` at a time; each is valid until the next one."""
    pending = bytearray()
    reader = _Reader(unit)
    encode = headers.encode
    try:
        for directory, name, size, mtime_ns, content in members(unit):
            mtime = mtime_ns // 10**9 if unit.mtime is None else unit.mtime
            whole = name if directory < 0 else unit.prefixes[directory] + name
            pending += encode(whole, size, mtime)
            if directory < 0:
                pending += content
            elif size <= CHUNK:
                pending += reader.small(directory, name, size, mtime_ns)
            else:
                for data in reader.large(directory, name, size, mtime_ns):
                    pending += data
                    if len(pending) >= CHUNK:
                        yield pending
                        pending.clear()
            pending += ZEROS[: -size % BLOCK]
            if len(pending) >= CHUNK:
                yield pending
                pending.clear()
        pending += headers.END
        yield pending
    finally:
        reader.close()


class _Reader:
    """Reads the files of a unit, each of which must be as it was when the set was planned. Raises CommitError."""

    def __init__(self, unit: ShardUnit) -> None:
        self._unit = unit
        self._flags = OPEN_FILE | (0 if unit.follow_links else os.O_NOFOLLOW)
        self._open: dict[int, int] = {}  # directories

    def small(self, directory: int, name: bytes, size: int, mtime_ns: int) -> bytes:
        """Return the content of a file that is read at once."""
        try:
            fd = os.open(name, self._flags, dir_fd=self._open.get(directory) or self._directory(directory))
            try:
                data = os.read(fd, size)
                found = os.fstat(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise self._unreadable(directory, name, error) from None
        if len(data) != size or found.st_size != size or found.st_mtime_ns != mtime_ns:
            raise self._changed(directory, name, "has changed")
        return data

    def large(self, directory: int, name: bytes, size: int, mtime_ns: int) -> Iterator[bytes]:
        """Yield the content of a file in pieces."""
        left = size
        try:
            fd = os.open(name, self._flags, dir_fd=self._open.get(directory) or self._directory(directory))
            with os.fdopen(fd, "rb", buffering=0) as file:
                while left and (data := file.read(min(left, CHUNK))):
                    left -= len(data)
                    yield data
                found = os.fstat(fd)
        except OSError as error:
            raise self._unreadable(directory, name, error) from None
        if left or found.st_size != size or found.st_mtime_ns != mtime_ns:
            raise self._changed(directory, name, "has changed")

    def _directory(self, number: int) -> int:
        if len(self._open) >= OPEN_DIRECTORIES:
            os.close(self._open.pop(next(iter(self._open))))
        path = self._unit.directories[number]
        found = self._open[number] = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return found

    def _unreadable(self, directory: int, name: bytes, error: OSError) -> CommitError:
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return self._changed(directory, name, "has vanished")
        path = os.fsdecode(self._unit.directories[directory] + b"/" + name)
        return CommitError(f"{path}: {error.strerror}; mend that, then repeat the command")

    def _changed(self, directory: int, name: bytes, what: str) -> CommitError:
        path = os.fsdecode(self._unit.directories[directory] + b"/" + name)
        return CommitError(f"{path} {what} since the set was planned: start again when nobody changes the tree")

    def close(self) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()
