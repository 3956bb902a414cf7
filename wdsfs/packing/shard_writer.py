"""Writes one shard of a plan: atomically, whole or not at all.

`ShardWriter` writes the pieces under a temporary name, syncs the file, reads it back (`verify.py`) and only
then gives it its name. The kernel copies the ranges of source shards, so untouched members stay byte-identical and
a commit runs at disk speed.

Which pieces a shard has is decided in `packing/plan.py`. Every write goes through `Disk`, whose steps the tests
record, stop and let fail. Threads: several threads may use one `ShardWriter`, each for another shard.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator, Mapping

from wdsfs.errors import CommitError
from wdsfs.packing.pieces import CopiedRange, NewMember, Piece
from wdsfs.packing.source_layout import check_unchanged
from wdsfs.packing.steps import Output, SourceShard
from wdsfs.packing.verify import WrittenFile, verify
from wdsfs.storage.durable import CHUNK, COPY_MAX, Disk, named, new_file
from wdsfs.storage.source import TarBytes, pread
from wdsfs.tar import headers
from wdsfs.tar.compressed import opened_shard


class ShardWriter:
    """Writes shards.

    `sources` has each source shard as it was when the commit was planned, by its number in the set; `open_file`
    opens a file of the upper directory by its path; `on_bytes` is called with each number of bytes written, in any
    thread, and may raise an exception to stop.
    """

    def __init__(
        self,
        sources: Mapping[int, SourceShard],
        open_file: Callable[[bytes], int],
        disk: Disk | None = None,
        on_bytes: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.sources, self.open_file, self.on_bytes = sources, open_file, on_bytes
        self.disk = disk or Disk()

    def publish(
        self,
        output: Output,
        replaces: os.stat_result | None = None,
        before: Callable[[os.stat_result], None] = lambda _: None,
    ) -> None:
        """Write a shard and give it its name. After a kill at any instant, that is the old file or the new one.

        `replaces` is the file to be replaced; without it the name must be free. `before` is called with the
        finished file before the rename. Raises CommitError, ShardErrors, OSError, and leaves no file behind.
        """
        with named(output.target):
            self._publish(output, replaces, before)

    def _publish(
        self, output: Output, replaces: os.stat_result | None, before: Callable[[os.stat_result], None]
    ) -> None:
        # A replacement gets its mode at the end; until then nobody else can open it.
        with new_file(self.disk, output.target, 0o666 if replaces is None else 0o600) as fd:
            written = self._write(fd, output)
            if replaces is not None:
                self.disk.set_owner(fd, replaces)
            self.disk.sync(fd)
            verify(fd, output, written, self._source)
            before(os.fstat(fd))
            if replaces is None and os.path.lexists(output.target):
                raise CommitError(f"{os.fsdecode(output.target)} is there already")
        self.disk.sync_directory(os.path.dirname(output.target))

    def fill(self, fd: int, output: Output, sync: bool = False) -> None:
        """Write a shard into an empty file, sync it if so wanted, and verify it. Raises as `publish`."""
        written = self._write(fd, output)
        if sync:
            self.disk.sync(fd)
        verify(fd, output, written, self._source)

    def _write(self, fd: int, output: Output) -> list[WrittenFile]:
        """Write the pieces, small ones together. Raises CommitError, StaleShard, CorruptShard, OSError."""
        written: list[WrittenFile] = []
        pending, done, sent = bytearray(), 0, 0
        with contextlib.ExitStack() as stack:
            opened: dict[int, TarBytes] = {}
            for piece in output.pieces:
                if isinstance(piece, CopiedRange):
                    self._flush(fd, pending)
                    if piece.shard not in opened:
                        opened[piece.shard] = stack.enter_context(self._source(piece.shard))
                    self._copy(opened[piece.shard], fd, piece)
                elif isinstance(piece, NewMember):
                    pending += piece.header
                    checksum = self._write_file(fd, piece, pending)
                    written.append(WrittenFile(done, piece, checksum))
                else:
                    pending += bytes(piece.length)
                done += piece.length
                if done - sent >= COPY_MAX:
                    self.disk.start_writing(fd)
                    sent = done
            self._flush(fd, pending)
        return written

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
        with opened_shard(path) as (shard, tar):
            check_unchanged(shard, path, fingerprint)
            yield tar.source
            check_unchanged(shard, path, fingerprint)

    def _write_file(self, fd: int, piece: NewMember, pending: bytearray) -> int:
        """Append a file and its padding; returns its CRC-32."""
        checksum = 0
        for data in self._content(piece):
            checksum = zlib.crc32(data, checksum)
            pending += data
            if len(pending) >= CHUNK:
                self._flush(fd, pending)
        pending += bytes(headers.padding(piece.size))
        return checksum

    def _content(self, piece: NewMember) -> Iterator[bytes]:
        """Yield the content of a file, which must not have changed since the commit was planned.

        Compared by size and mtime, which is what the journal has of it, not by a Fingerprint.
        """
        with named(piece.path):
            source = self.open_file(piece.path)
            try:
                left = piece.size
                while left and (data := os.read(source, min(left, CHUNK))):
                    left -= len(data)
                    yield data
                found = os.fstat(source)
                if left or (found.st_size, found.st_mtime_ns) != (piece.size, piece.mtime_ns):
                    raise CommitError(f"{os.fsdecode(piece.path)} has changed while it was packed; start again")
            finally:
                os.close(source)

    def _flush(self, fd: int, pending: bytearray) -> None:
        if pending:
            self.disk.write(fd, pending)
            self.on_bytes(len(pending))
            pending.clear()

    # --- what is there already

    def is_there(self, output: Output) -> bool:
        """True if the target has exactly these bytes already: a killed commit had finished it."""
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
        """Yield the bytes of an output in chunks, with their places."""
        at = 0
        for piece in output.pieces:
            for data in self._piece_bytes(piece):
                yield at, data
                at += len(data)

    def _piece_bytes(self, piece: Piece) -> Iterator[bytes]:
        if isinstance(piece, CopiedRange):
            with self._source(piece.shard) as fd:
                for start in range(piece.start, piece.end, CHUNK):
                    with named(self.sources[piece.shard].path):
                        data = pread(fd, min(CHUNK, piece.end - start), start)
                    yield data
        elif isinstance(piece, NewMember):
            yield piece.header
            yield from self._content(piece)
            yield bytes(headers.padding(piece.size))
        else:
            yield bytes(piece.length)
