"""Where the bytes of a tar come from: a descriptor of a file, or a reader that makes them as they are asked for.

Nearly always it is a descriptor, and everything that has to be fast takes it as one. `TarReader` is for compressed
shards that are not unpacked (`storage/seekable.py`).
"""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO, Protocol

from wdsfs.errors import MissingShard, UnreadableShard


class TarReader(Protocol):
    """The bytes of a tar that is no file. Usable by several threads."""

    size: int

    def pread(self, size: int, offset: int, /) -> bytes:
        """Up to `size` bytes at byte `offset`; none only at the end. Raises OSError."""

    def close(self) -> None:
        """Give back what it holds. Can be repeated."""


TarBytes = int | TarReader


def pread(source: TarBytes, size: int, offset: int) -> bytes:
    """As `os.pread`. Raises OSError."""
    return os.pread(source, size, offset) if isinstance(source, int) else source.pread(size, offset)


def size_of(source: TarBytes) -> int:
    """Bytes of the whole tar."""
    return os.fstat(source).st_size if isinstance(source, int) else source.size


def skip_hole(source: TarBytes, offset: int) -> int | None:
    """The first byte from `offset` on that is not in a hole of the file; None when all of the rest is one."""
    if isinstance(source, int):
        try:
            return max(offset, os.lseek(source, offset, os.SEEK_DATA))
        except OSError as error:  # a file system that knows no holes may say so with any other number
            if error.errno == errno.ENXIO:
                return None
    return offset


def open_beside(path: bytes) -> BinaryIO:
    """A file that somebody has put beside a shard. Raises OSError, also for one that is no regular file.

    Nobody waits for a pipe, or reads a device, because it has the name of an index.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "is no regular file", path)
    return os.fdopen(fd, "rb")


def close(source: TarBytes) -> None:
    if isinstance(source, int):
        os.close(source)
    else:
        source.close()


def open_shard(path: bytes) -> int:
    """A descriptor of the shard at `path`. Raises MissingShard, UnreadableShard."""
    try:
        # A pipe in the place of a shard must not be waited for.
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise MissingShard(f"{os.fsdecode(path)}: there is no such shard") from None
    except OSError as error:
        raise UnreadableShard(f"{os.fsdecode(path)}: {error.strerror}") from None
