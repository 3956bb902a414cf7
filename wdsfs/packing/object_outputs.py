"""New shards that are objects in a store: each is written and verified as a local file, then sent.

The file has no name, so nothing is left of it after a kill. It lies in the directory of the cache of remote
objects: an overlay may be on a small disk or a read-only one.

What an earlier commit has finished is known by its content alone, so nothing is noted for that: a commit that is
repeated sends only what is missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from wdsfs.errors import CommitError, ObjectChanged, ObjectExists
from wdsfs.packing.plan import Output
from wdsfs.packing.shard_writer import ShardWriter
from wdsfs.remote import shard_paths
from wdsfs.storage.durable import CHUNK, named
from wdsfs.storage.identity import Fingerprint

if TYPE_CHECKING:
    from wdsfs.remote.urls import Pin

OBJECT_MAX = 5_000 << 20  # bytes that Azure's store takes in one request; S3 takes 5 GiB


class ObjectOutputs:
    """Sends the shards that `writer` writes.

    `count` is called with the bytes of each that is sent, and with 0 twice a second meanwhile; it may raise to
    stop all.
    """

    def __init__(self, writer: ShardWriter, count: Callable[[int], None]) -> None:
        self._writer, self._count = writer, count
        self._there: dict[bytes, Pin] = {}

    def look(self, targets: Sequence[bytes]) -> None:
        """Find out which of these objects are there. Raises ShardError."""
        self._there = shard_paths.existing(targets)

    def exists(self, target: bytes) -> bool:
        return target in self._there

    def is_written(self, target: bytes, size: int, digest: str) -> bool:
        """True if the object has this size and MD5. Raises ShardError."""
        pin = self._there[target]
        if pin.size != size:
            return False
        if pin.etag == f'"{digest}"':
            return True
        tar = shard_paths.open_object(target)
        try:
            return _md5(tar.pread(CHUNK, at) for at in range(0, size, CHUNK)) == digest
        finally:
            tar.close()

    def read(self, target: bytes, count: int) -> bytes:
        """Return the first bytes of an object. Raises ShardError."""
        tar = shard_paths.open_object(target)
        try:
            return tar.pread(min(count, self._there[target].size), 0)
        finally:
            tar.close()

    def put(self, target: bytes, content: bytes) -> None:
        """Make a small object. Raises CommitError if there is another one; ShardErrors, OSError."""
        with _staging() as directory, tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            file.write(content)
            self._upload(target, file.fileno(), None)

    def is_done(self, output: Output) -> bool:
        """True if the object has exactly these bytes already."""
        pin = self._there[output.target]
        if pin.size != output.length:
            return False
        if pin.etag == f'"{_md5(data for _, data in self._writer.content(output))}"':
            return True
        tar = shard_paths.open_object(output.target)
        try:
            return all(tar.pread(len(data), at) == data for at, data in self._writer.content(output))
        finally:
            tar.close()

    def refuse_without_space(self, outputs: Sequence[Output], jobs: int) -> None:
        """Raise CommitError if the shards that are written at a time have no room, or one is too large to send.

        `jobs` is how many are written at a time on this machine: none if a cluster writes them.
        """
        for output in outputs:
            if output.length > OBJECT_MAX:
                text = (
                    f"{output.length:,} bytes are more than stores take at once: make smaller shards (--maxsize)"
                )
                raise CommitError(f"{os.fsdecode(output.target)}: {text}")
        needed = sum(sorted((output.length for output in outputs), reverse=True)[:jobs])
        with _staging() as directory:
            space = os.statvfs(directory)
        free = space.f_bavail * space.f_frsize
        if needed > free:
            raise CommitError(
                f"{directory}: {needed:,} bytes are needed there for shards before they are sent, and {free:,} "
                "are free: make room, write fewer at a time (--jobs), or name another place (WDSFS_CACHE_DIR)"
            )

    def publish(self, output: Output) -> None:
        """Write a shard and send it, as a new object.

        Raises CommitError if there is another one. Raises ShardErrors, OSError.
        """
        self._send(output, None, None)

    def copied(self, output: Output, source: bytes) -> bool:
        """Have the store copy a shard that stays as it is; False if it cannot. Raises as `publish`."""
        try:
            done = shard_paths.copy(source, output.target, lambda: self._count(0))
        except ObjectChanged as error:
            raise CommitError(f"{error}: start again") from None
        if done:
            self._count(2 * output.length)  # not written here, and not sent
        return done

    def replace(self, output: Output, source: Fingerprint | None, before: Callable[[int, str], None]) -> None:
        """Write a shard and send it, in the place of the object with this fingerprint, or of none.

        `before` is called with size and MD5 of the shard before it is sent. Raises as `publish`.
        """
        changed = CommitError(f"{os.fsdecode(output.target)} was changed by somebody else meanwhile")
        pin = None
        if source is not None:
            pin = shard_paths.pin_of(output.target)
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
            self._upload(output.target, fd, replaces)

    def _upload(self, target: bytes, fd: int, replaces: Pin | None) -> None:
        try:
            shard_paths.upload(target, fd, replaces, lambda: self._count(0))
        except ObjectExists:
            text = "is there already: somebody else has written it meanwhile, and it stays as it is"
            raise CommitError(f"{os.fsdecode(target)} {text}") from None
        self._count(os.fstat(fd).st_size)


def _md5(pieces: Iterable[bytes | bytearray]) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


@contextlib.contextmanager
def _staging() -> Iterator[Path]:
    directory = shard_paths.staging()
    with named(os.fsencode(directory)):
        yield directory
