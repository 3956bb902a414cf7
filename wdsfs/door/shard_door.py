"""The door to the bytes of shards, by path: look at a shard (fingerprint), open it, read its bytes.

The path of a file is absolute, that of a remote shard is its URL without secrets. An open shard is a descriptor of
the file, or an `OpenObject`. A file may be changed while it is open, which its fingerprint shows; all bytes of an
`OpenObject` always belong to the same object.

The door handles files itself. It loads the wing `remote` for the first remote shard: that takes as long as the
rest of a small command, and most sets have no URL.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeAlias

from wdsfs import source, wings
from wdsfs.door.urls import is_remote
from wdsfs.shards import Fingerprint

if TYPE_CHECKING:
    from wdsfs.door.pins import Pin
    from wdsfs.door.remote_side import OpenObject, RemoteSide

OpenShard: TypeAlias = "int | OpenObject"


class Door:
    """The shards of a process, by path.

    The processes that it forks inherit the door, with the URLs and pins that it knows.
    """

    def __init__(self) -> None:
        self._remote: RemoteSide | None = None

    @property
    def remote(self) -> RemoteSide:
        """The remote shards of this process. Raises NotInstalled."""
        if self._remote is None:
            side: RemoteSide = wings.load("remote", "remote_shards").remote_side()
            if self._remote is None:  # else another thread was faster, and has noted URLs in its own
                self._remote = side
        return self._remote

    def close(self) -> None:
        """End the connection to the fetcher, and forget all pins and URLs; the next use connects again."""
        if self._remote is not None:
            self._remote.close()
            self._remote = None

    def look(self, path: bytes) -> Fingerprint:
        """Return the fingerprint of a shard: of a file now, of a remote one as its store told it last.

        Raises ShardError.
        """
        if not is_remote(path):
            return Fingerprint.at(path)
        return self.remote.pin_of(path).fingerprint(os.fsdecode(path))

    def look_again(self, path: bytes) -> Fingerprint:
        """Return the fingerprint as `look` does, but always ask the store of a remote shard. Raises ShardError."""
        if not is_remote(path):
            return Fingerprint.at(path)
        return self.remote.pin_now(path).fingerprint(os.fsdecode(path))

    def open_shard(self, path: bytes) -> OpenShard:
        """Open a shard; `source.close` closes it. Raises ShardError."""
        return self.remote.open(path) if is_remote(path) else source.open_shard(path)

    def read_range(self, path: bytes, size: int, offset: int) -> tuple[bytes, Fingerprint]:
        """Read up to `size` bytes at byte `offset`; return them, and the fingerprint before the read.

        Raises ShardError, OSError.
        """
        shard = self.open_shard(path)
        try:
            now = fingerprint_of(shard)
            return source.pread(shard, size, offset), now
        finally:
            source.close(shard)

    # --- facts that need no store; none where no remote shard has been named

    def note_order(self, shard: OpenShard, following: bytes) -> None:
        """Note the shard that follows an open one in the set: passes over remote shards continue there."""
        if not isinstance(shard, int) and is_remote(following):
            self.remote.note_order(shard, following)

    def known_objects(self) -> list[bytes]:
        """Return the paths of the objects whose pins this process knows."""
        return [] if self._remote is None else self._remote.known_paths()

    def is_presumed(self, path: bytes) -> bool:
        """Return True for a remote shard of which this process knows only the row in a list."""
        return self._remote is not None and self._remote.is_presumed(path)

    def presumed_pin(self, path: bytes) -> Pin | None:
        """Return the pin of a remote shard in the list that names it; None without such a list."""
        return None if self._remote is None else self._remote.presumed_pin(path)


def fingerprint_of(shard: OpenShard) -> Fingerprint:
    """Return the fingerprint of an open shard now. Raises OSError."""
    return Fingerprint.of(os.fstat(shard)) if isinstance(shard, int) else shard.fingerprint


def failure_of(shard: OpenShard) -> str:
    """Return how the command failed that has written an open shard; "" for all other shards."""
    return "" if isinstance(shard, int) else shard.failure


DOOR = Door()  # the one of this process: all rooms ask it
