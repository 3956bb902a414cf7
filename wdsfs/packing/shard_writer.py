"""Writes, verifies and publishes a new shard, whole or not at all: as a file, or as an object in a store.

A file is written under a temporary name, synced, read back, and only then renamed. An object is first written to a
file without a name, so that a kill leaves nothing, then read back, and sent by a conditional request. The kernel
copies the ranges of source shards, so untouched members keep their bytes and a commit runs at disk speed. Every
write goes through `Disk`, whose steps the tests record, stop and let fail. Threads may share a writer, if each
writes a different shard.

A finished shard of an earlier command is recognised by its content alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import tarfile
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import xxhash

from wdsfs.door.shard_door import DOOR
from wdsfs.durable import CHUNK, COPY_MAX, Disk, named, new_file
from wdsfs.errors import CommitError, ObjectChanged, ObjectExists
from wdsfs.overlay.upper_format import OPEN_DIRECTORY
from wdsfs.packing.plan import CopiedRange, NewMember, Numbers, Output, Piece, SourceShard
from wdsfs.packing.source_layout import check_unchanged
from wdsfs.shards import Fingerprint
from wdsfs.source import TarBytes, pread
from wdsfs.tar import columns, headers, scan
from wdsfs.tar.compressed import open_shard_and_tar
from wdsfs.tar.problems import HARMLESS, Problems

if TYPE_CHECKING:
    from wdsfs.door.pins import Pin

DENSE = 8192  # bytes per member; for smaller members, comparing all bytes is quicker than reading the headers
MEMBERS_AT_ONCE = 1024  # members whose headers are made together
OPEN_SOURCES = 128  # open at a time, in all threads: a shuffled set copies from all of its shards
OPEN_DIRECTORIES = 64  # open at a time: a shuffled set alternates between directories

_OPEN_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_ZEROS = bytes(headers.BLOCK)
_NO_FILES = (headers.HARD_LINK, headers.DIRECTORY, *headers.UNSHOWN)

# Opens source shards when they are needed, by their numbers in the set.
OpenSources = Callable[[], AbstractContextManager[Callable[[int], TarBytes]]]


# --- the content of new members --------------------------------------------------------------------------------


class Contents(Protocol):
    """The content of new members, which must not have changed since the shard was planned."""

    def opened(self) -> AbstractContextManager[Callable[[NewMember], Iterable[bytes]]]:
        """Return a function that reads a member in pieces, valid while a shard is written."""


class Files(NamedTuple):
    """Files with the content of new members: by absolute paths, or by paths below a directory `top`.

    Below `top` no link is followed, and a path may be longer than PATH_MAX; elsewhere files may be links if
    `follow_links`. Can be pickled.
    """

    top: bytes = b""
    follow_links: bool = False

    @contextlib.contextmanager
    def opened(self) -> Iterator[Callable[[NewMember], Iterable[bytes]]]:
        reader = _FileReader(self)
        try:
            yield reader.read
        finally:
            reader.close()


class _FileReader:
    def __init__(self, files: Files) -> None:
        self._files = files
        self._flags = _OPEN_FILE | (0 if files.follow_links else os.O_NOFOLLOW)
        self._open: dict[bytes, int] = {}  # directories

    def read(self, member: NewMember) -> Iterable[bytes]:
        """Return the content of a member in pieces. Raises CommitError; OSErrors, which name the file."""
        _, path, size, mtime_ns, _, content, _ = member
        if content is not None:
            return (content,)
        if size > CHUNK:
            return self._large(member)
        directory, _, name = path.rpartition(b"/")
        try:
            fd = os.open(name, self._flags, dir_fd=self._open.get(directory) or self._directory(directory))
            try:
                data = os.read(fd, size)
                status = os.fstat(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise self._named(error, member) from None
        if len(data) != size or status.st_size != size or status.st_mtime_ns != mtime_ns:
            raise self._changed(member, "changed")
        return (data,)

    def _large(self, member: NewMember) -> Iterator[bytes]:
        directory, _, name = member.path.rpartition(b"/")
        left = member.size
        try:
            fd = os.open(name, self._flags, dir_fd=self._open.get(directory) or self._directory(directory))
            with os.fdopen(fd, "rb", buffering=0) as file:
                while left and (data := file.read(min(left, CHUNK))):
                    left -= len(data)
                    yield data
                status = os.fstat(fd)
        except OSError as error:
            raise self._named(error, member) from None
        if left or (status.st_size, status.st_mtime_ns) != (member.size, member.mtime_ns):
            raise self._changed(member, "changed")

    def _directory(self, path: bytes) -> int:
        if len(self._open) >= OPEN_DIRECTORIES:
            os.close(self._open.pop(next(iter(self._open))))
        fd = self._below_top(path) if self._files.top else os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._open[path] = fd
        return fd

    def _below_top(self, path: bytes) -> int:
        fd = os.open(self._files.top, OPEN_DIRECTORY)
        for name in filter(None, path.split(b"/")):
            above = fd
            try:
                fd = os.open(name, OPEN_DIRECTORY, dir_fd=above)
            finally:
                os.close(above)
        return fd

    def _named(self, error: OSError, member: NewMember) -> OSError | CommitError:
        error.filename = os.path.join(self._files.top, member.path)
        if self._files.top:
            return error
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return self._changed(member, "vanished")
        return CommitError(f"{os.fsdecode(member.path)}: {error.strerror}; mend that, then repeat the command")

    def _changed(self, member: NewMember, what: str) -> CommitError:
        path = os.fsdecode(os.path.join(self._files.top, member.path))
        return CommitError(
            f"{path} has {what} since the shards were planned: repeat the command when nobody changes the files"
        )

    def close(self) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()


# --- writing -------------------------------------------------------------------------------------------------


class Stretch(NamedTuple):
    """New bytes of a shard, as written: the first one, how many, and their XXH3."""

    start: int
    length: int
    digest: bytes


class ShardWriter:
    """Writes shards.

    `sources` has each source shard as it was when the plan was made, by its number in the set. `contents` reads
    new members. `on_bytes` is called with each number of bytes written, in any thread, and may raise an exception
    to stop. `threads` is the number of threads that share the writer.
    """

    def __init__(
        self,
        sources: Mapping[int, SourceShard],
        contents: Contents,
        disk: Disk | None = None,
        on_bytes: Callable[[int], None] = lambda _: None,
        threads: int = 1,
    ) -> None:
        self.sources, self.contents, self.on_bytes = sources, contents, on_bytes
        self._threads = threads
        self.disk = disk or Disk()

    def publish(
        self,
        output: Output,
        replaces: os.stat_result | None = None,
        before: Callable[[os.stat_result], None] = lambda _: None,
    ) -> None:
        """Write a shard and give it its name. After a kill at any time, the name leads to the old or the new file.

        `replaces` is the file to be replaced; without it the name must be free. `before` is called with the
        finished file before the rename. Raises CommitError, ShardErrors, OSError, and leaves no file behind.
        """
        # A replacement gets its mode at the end; until then no other user can open it.
        mode = 0o666 if replaces is None else 0o600
        with named(output.target), new_file(self.disk, output.target, mode) as fd:
            written = self._write(fd, output)
            if replaces is not None:
                self.disk.set_owner(fd, replaces)
            self.disk.sync(fd)
            _verify(fd, output, written, self._sources)
            before(os.fstat(fd))
            if replaces is None and os.path.lexists(output.target):
                raise CommitError(f"{os.fsdecode(output.target)} exists already")
        self.disk.sync_directory(os.path.dirname(output.target))

    def fill(self, fd: int, output: Output, *, sync: bool = False) -> None:
        """Write a shard into an empty file, `sync` it, and verify it. Raises as `publish`."""
        written = self._write(fd, output)
        if sync:
            self.disk.sync(fd)
        _verify(fd, output, written, self._sources)

    def _write(self, fd: int, output: Output) -> list[Stretch]:
        """Write the bytes of a shard. Raises CommitError, StaleShard, CorruptShard, OSError."""
        written: list[Stretch] = []
        done = sent = 0
        with self._sources() as source:
            for part in self._parts(output):
                if isinstance(part, CopiedRange):
                    self._copy(source(part.shard), fd, part)
                    done += part.length
                else:
                    written.append(Stretch(done, len(part), xxhash.xxh3_128_digest(part)))
                    self.disk.write(fd, part)
                    self.on_bytes(len(part))
                    done += len(part)
                if done - sent >= COPY_MAX:
                    self.disk.start_writing(fd)
                    sent = done
        return written

    def _parts(self, output: Output) -> Iterator[bytes | CopiedRange]:
        """Yield ranges to copy, and new bytes, some `CHUNK` at a time."""
        pending: list[bytes] = []
        size = 0
        with self.contents.opened() as read:
            for piece, header in _with_headers(output.pieces):
                if isinstance(piece, NewMember):
                    pending.append(header)
                    size += len(header)
                    for data in read(piece):
                        pending.append(data)
                        size += len(data)
                        if size >= CHUNK:
                            yield b"".join(pending)
                            pending.clear()
                            size = 0
                    pending.append(_ZEROS[: -piece.size % headers.BLOCK])
                elif isinstance(piece, CopiedRange):
                    if pending:
                        yield b"".join(pending)
                        pending.clear()
                    size = 0
                    yield piece
                else:
                    pending.append(piece.content)
        if pending:
            yield b"".join(pending)

    def _copy(self, source: TarBytes, fd: int, run: CopiedRange) -> None:
        path = self.sources[run.shard].path
        for start in range(run.start, run.end, COPY_MAX):
            count = min(COPY_MAX, run.end - start)
            self.disk.copy(source, fd, start, count, path)
            self.on_bytes(count)
            if count == COPY_MAX:
                self.disk.start_writing(fd)

    @contextlib.contextmanager
    def _source(self, number: int) -> Iterator[TarBytes]:
        """Open a source shard; check before and after the copying that it has not changed."""
        path, fingerprint, _ = self.sources[number]
        with open_shard_and_tar(path) as (shard, tar):
            check_unchanged(shard, path, fingerprint)
            yield tar.source
            check_unchanged(shard, path, fingerprint)

    @contextlib.contextmanager
    def _sources(self) -> Iterator[Callable[[int], TarBytes]]:
        """Return a function that returns an open source shard. The shards that were used last stay open."""
        opened: OrderedDict[int, tuple[contextlib.ExitStack, TarBytes]] = OrderedDict()
        with contextlib.ExitStack() as stack:

            def source(number: int) -> TarBytes:
                if number not in opened:
                    if len(opened) >= max(OPEN_SOURCES // self._threads, 1):
                        opened.popitem(last=False)[1][0].close()
                    own = stack.enter_context(contextlib.ExitStack())
                    opened[number] = own, own.enter_context(self._source(number))
                opened.move_to_end(number)
                return opened[number][1]

            yield source

    # --- comparing with existing shards

    def is_there(self, output: Output) -> bool:
        """Return True if the target has exactly these bytes, because a killed command has finished it."""
        try:
            fd = os.open(output.target, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        try:
            if os.fstat(fd).st_size != output.length:
                return False
            return all(os.pread(fd, len(data), at) == data for at, data in self.content(output))
        finally:
            os.close(fd)

    def content(self, output: Output) -> Iterator[tuple[int, bytes]]:
        """Yield the bytes of a shard in chunks, with their places."""
        at = 0
        with self._sources() as source:
            for part in self._parts(output):
                for data in self._range(source(part.shard), part) if isinstance(part, CopiedRange) else (part,):
                    yield at, data
                    at += len(data)

    def _range(self, source: TarBytes, piece: CopiedRange) -> Iterator[bytes]:
        for start in range(piece.start, piece.end, CHUNK):
            with named(self.sources[piece.shard].path):
                data = pread(source, min(CHUNK, piece.end - start), start)
            yield data


def _with_headers(pieces: Iterable[Piece]) -> Iterator[tuple[Piece, bytes]]:
    """Yield each piece with the headers of a new member. They are made for many members at once."""
    pieces = iter(pieces)
    while some := list(itertools.islice(pieces, MEMBERS_AT_ONCE)):
        members = [piece for piece in some if isinstance(piece, NewMember)]
        made = iter(
            columns.encode(
                [member.name for member in members],
                [member.size for member in members],
                [member.mtime for member in members],
                [member.common for member in members],
            )
        )
        for piece in some:
            yield piece, next(made) if isinstance(piece, NewMember) else b""


# --- reading back --------------------------------------------------------------------------------------------


def _verify(fd: int, output: Output, written: Sequence[Stretch], open_sources: OpenSources) -> None:
    """Compare the file at `fd` with its plan. Raises CommitError.

    New bytes are compared by their sums. For copied ranges, either all bytes are compared with their sources, or
    all headers are read, whichever is quicker for members of this size. Then Python's tarfile reads the end. A
    shard that is copied whole may have the damage of its source, so only its length is compared.
    """
    if os.fstat(fd).st_size != output.length:
        raise _wrong(output, "its length is wrong")
    for start, length, digest in written:
        if xxhash.xxh3_128_digest(os.pread(fd, length, start)) != digest:
            raise _wrong(output, f"the {length} bytes from byte {start} on are wrong")
    if not output.places:
        return
    if output.length < DENSE * sum(len(places.heads) for places in output.places.values()):
        _compare(fd, output, open_sources)
    else:
        _scan_back(fd, output)
    _read_end(fd, output)


def _compare(fd: int, output: Output, open_sources: OpenSources) -> None:
    """Compare copied ranges with their sources. Each must start with a header, or at the end mark."""
    at = 0
    with open_sources() as source:
        for piece in output.pieces:
            if isinstance(piece, CopiedRange):
                block = os.pread(fd, headers.BLOCK, at)
                if any(block) and not headers.is_header(block):
                    raise _wrong(output, f"there is no header at byte {at}")
                if not _is_same(source(piece.shard), piece.start, fd, at, piece.length):
                    raise _wrong(output, f"the {piece.length} bytes from byte {at} on are wrong")
            at += piece.length


def _is_same(source: TarBytes, start: int, fd: int, at: int, length: int) -> bool:
    """Return True if a source and a file have the same bytes from these places on."""
    for done in range(0, length, CHUNK):
        count = min(CHUNK, length - done)
        if pread(source, count, start + done) != os.pread(fd, count, at + done):
            return False
    return True


def _scan_back(fd: int, output: Output) -> None:
    """Read all headers. Every member must be in its place, with its size, and no other member may exist."""
    problems = Problems()
    heads, sizes = _expected(output)
    at = 0
    for chunk in scan.scan(fd, problems):
        rows = np.flatnonzero(~np.isin(chunk.types, _NO_FILES))
        stop = at + len(rows)
        same = np.array_equal(chunk.heads[rows], heads[at:stop])
        if not same or not np.array_equal(chunk.sizes[rows], sizes[at:stop]):
            raise _wrong(output, "its members are in wrong places")
        at = stop
    damage = [problem for problem in problems.listed() if problem.kind not in HARMLESS]
    if at != len(heads) or damage:
        raise _wrong(output, damage[0].text if damage else "members are missing")


def _expected(output: Output) -> tuple[Numbers, Numbers]:
    """Return the first bytes of the members of an output, and their sizes, in order."""
    heads: list[Any] = [np.zeros(0, np.int64)]
    sizes: list[Any] = [np.zeros(0, np.int64)]
    done = 0
    for piece in output.pieces:
        if isinstance(piece, CopiedRange):
            places = (output.places or {})[piece.shard]
            first, last = np.searchsorted(places.heads, [piece.start, piece.end])
            heads.append(places.heads[first:last] + (done - piece.start))
            sizes.append(places.sizes[first:last])
        elif isinstance(piece, NewMember):
            heads.append([done])
            sizes.append([piece.size])
        done += piece.length
    return np.concatenate(heads), np.concatenate(sizes)


def _read_end(fd: int, output: Output) -> None:
    """Read the end of the shard as Python's tarfile does, and so webdataset; other readers are less strict.

    For tarfile an extension header without a member is an error, and the reader also loses the last sample.
    """
    try:
        with open(fd, "rb", closefd=False) as file:
            file.seek(_end_of_members(output))
            with tarfile.open(fileobj=file, mode="r:") as archive:
                while archive.next() is not None:
                    pass
    except (tarfile.TarError, RecursionError) as error:
        raise _wrong(output, f"Python's tarfile, and so webdataset, fails at its end: {error}") from None


def _end_of_members(output: Output) -> int:
    """Return the byte after the last regular member of an output and its padding."""
    at = output.length
    for piece in reversed(list(output.pieces)):
        if isinstance(piece, NewMember):
            return at
        at -= piece.length
        if isinstance(piece, CopiedRange):
            places = (output.places or {})[piece.shard]
            last = int(np.searchsorted(places.heads, piece.end)) - 1
            if last >= 0 and places.heads[last] >= piece.start:
                return at + int(places.ends[last]) - piece.start
    return 0


def _wrong(output: Output, text: str) -> CommitError:
    return CommitError(f"{os.fsdecode(output.target)}: the new shard is damaged when it is read back: {text}")


# --- objects in stores ---------------------------------------------------------------------------------------


class ObjectOutputs:
    """Sends the shards that `writer` writes.

    `count` is called with the bytes of each sent shard, and with 0 twice a second meanwhile. It may raise an
    exception to stop all.
    """

    def __init__(self, writer: ShardWriter, count: Callable[[int], None]) -> None:
        self._writer, self._count = writer, count
        self._there: dict[bytes, Pin] = {}

    def look(self, targets: Sequence[bytes]) -> None:
        """Find out which of these objects exist. Raises ShardError."""
        self._there = DOOR.remote.existing_objects(targets)

    def exists(self, target: bytes) -> bool:
        return target in self._there

    def is_written(self, target: bytes, size: int, digest: str) -> bool:
        """Return True if the object has this size and MD5. Raises ShardError."""
        pin = self._there[target]
        if pin.size != size:
            return False
        if pin.etag == f'"{digest}"':
            return True
        with contextlib.closing(DOOR.remote.open(target)) as tar:
            return _md5(tar.pread(CHUNK, at) for at in range(0, size, CHUNK)) == digest

    def is_done(self, output: Output) -> bool:
        """Return True if the object has the size and MD5 of this output already."""
        if self._there[output.target].size != output.length:
            return False  # known without a look at the sources
        return self.is_written(
            output.target, output.length, _md5(data for _, data in self._writer.content(output))
        )

    def refuse_without_space(self, outputs: Sequence[Output], jobs: int) -> None:
        """Raise CommitError if the shards that are written at a time have no room.

        `jobs` is how many are written at a time on this machine: none if a cluster writes them.
        """
        needed = sum(sorted((output.length for output in outputs), reverse=True)[:jobs])
        with _staging() as directory:
            space = os.statvfs(directory)
        free = space.f_bavail * space.f_frsize
        if needed > free:
            raise CommitError(
                f"{directory}: {needed:,} bytes are needed for shards before they are sent, and {free:,} "
                "are free: make room, write fewer at a time (--jobs), or name another place (WDSFS_CACHE_DIR)"
            )

    def publish(self, output: Output) -> None:
        """Write a shard and send it, as a new object.

        Raises CommitError if another object exists. Raises ShardErrors, OSError.
        """
        self._send(output, None, None)

    def copied(self, output: Output, source: bytes) -> bool:
        """Copy an unchanged shard within its store; return False if the store cannot. Raises as `publish`."""
        try:
            done = DOOR.remote.copy(source, output.target, lambda: self._count(0))
        except ObjectChanged as error:
            raise CommitError(f"{error}: start again") from None
        if done:
            self._count(2 * output.length)  # not written here, and not sent
        return done

    def replace(self, output: Output, source: Fingerprint | None, before: Callable[[int, str], None]) -> None:
        """Write a shard and send it, in the place of the object with this fingerprint, or of none.

        `before` is called with size and MD5 of the shard before it is sent. Raises as `publish`.
        """
        changed = CommitError(f"{os.fsdecode(output.target)} was changed by another program meanwhile")
        pin = None
        if source is not None:
            pin = DOOR.remote.pin_of(output.target)
            if pin.fingerprint(os.fsdecode(output.target)) != source:
                raise changed
        try:
            self._send(output, pin, before)
        except ObjectChanged:
            raise changed from None

    def _send(self, output: Output, replaces: Pin | None, before: Callable[[int, str], None] | None) -> None:
        with _staging() as directory, tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            fd = file.fileno()
            self._writer.fill(fd, output)
            if before is not None:
                before(output.length, _md5(os.pread(fd, CHUNK, at) for at in range(0, output.length, CHUNK)))
            try:
                DOOR.remote.upload(output.target, fd, replaces, lambda: self._count(0))
            except ObjectExists:
                text = "exists already: another program has written it meanwhile, and wdsfs left it unchanged"
                raise CommitError(f"{os.fsdecode(output.target)} {text}") from None
        self._count(output.length)


def _md5(pieces: Iterable[bytes]) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


@contextlib.contextmanager
def _staging() -> Iterator[Path]:
    directory = DOOR.remote.staging_directory()
    with named(os.fsencode(directory)):
        yield directory
