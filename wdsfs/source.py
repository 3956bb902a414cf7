"""Sources of a tar's bytes: a descriptor of a file, or a reader that makes them on demand.

Nearly always it is a descriptor, and all fast paths use it as one. `TarReader` is for compressed shards that are
not unpacked (`tar/seekable.py`), and for remote ones (`remote/client.py`).
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from typing import BinaryIO, Protocol

from wdsfs.errors import MissingShard, UnreadableShard

STEP = 128 << 10  # bytes; the smallest readahead that disks are set to
WRITER_SECONDS = 10.0  # the wait for a program that opens a named pipe to write
_NOT_WAITING = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe in the place of a file must not block


class TarReader(Protocol):
    """The bytes of a tar that is not a file. Safe to use in several threads."""

    size: int

    def pread(self, size: int, offset: int, /) -> bytes:
        """Return up to `size` bytes at byte `offset`; none only at the end. Raises OSError, ShardError."""

    def close(self) -> None:
        """Release memory and files. Idempotent."""


TarBytes = int | TarReader


def pread(source: TarBytes, size: int, offset: int) -> bytes:
    """Read as `os.pread`. Raises OSError."""
    return os.pread(source, size, offset) if isinstance(source, int) else source.pread(size, offset)


def size_of(source: TarBytes) -> int:
    """Return the size of the tar in bytes."""
    return os.fstat(source).st_size if isinstance(source, int) else source.size


def begin_reading(fd: int, begin: int, end: int) -> None:
    """Begin to bring these bytes of a file into the page cache; do not wait.

    The kernel cuts each request to what it would read ahead by itself, so they are small.
    """
    for step in range(begin, end, STEP):
        os.posix_fadvise(fd, step, min(STEP, end - step), os.POSIX_FADV_WILLNEED)


def skip_hole(source: TarBytes, offset: int) -> int | None:
    """Return the first byte from `offset` on that is not in a hole of the file; None if the rest is a hole."""
    if isinstance(source, int):
        try:
            return max(offset, os.lseek(source, offset, os.SEEK_DATA))
        except OSError as error:  # a file system without holes may give any other errno
            if error.errno == errno.ENXIO:
                return None
    return offset


def open_beside(path: bytes) -> BinaryIO:
    """Open a file that lies beside a shard. Raises OSError, also if it is not a regular file.

    A pipe or a device with the name of an index must not block the reader.
    """
    fd = os.open(path, _NOT_WAITING)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "is not a regular file", path)
    return os.fdopen(fd, "rb")


def open_stream(path: str | int) -> BinaryIO:
    """Open a file, a pipe or a descriptor, to be read once from its start to its end. Raises OSError.

    Of a named pipe it waits at most WRITER_SECONDS for a program that opens it to write.
    """
    if isinstance(path, int):
        return open(path, "rb", closefd=False)
    return open(path, "rb", opener=_open_in_time)


def _open_in_time(path: str, _: int) -> int:
    if stat.S_ISFIFO(os.stat(path).st_mode):
        return _open_pipe(path)
    fd = os.open(path, _NOT_WAITING)
    os.set_blocking(fd, True)
    return fd


def _open_pipe(path: str) -> int:
    """Return the read end of a named pipe that a program writes to. Raises OSError if there is none."""
    from concurrent.futures import Future  # late: few sets have a pipe, and a small command does without it

    opening = Future[int]()

    def open_and_wait() -> None:
        try:
            opening.set_result(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            opening.set_exception(error)

    threading.Thread(target=open_and_wait, daemon=True).start()
    try:
        return opening.result(WRITER_SECONDS)
    except TimeoutError:
        os.close(os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK))  # which ends the thread's wait
        os.close(opening.result())
    raise OSError(errno.EPIPE, "is a pipe that no program writes to", path)


def close(source: TarBytes) -> None:
    """Close a descriptor or a reader."""
    if isinstance(source, int):
        os.close(source)
    else:
        source.close()


def open_shard(path: bytes) -> int:
    """Open the shard at `path`. Raises MissingShard, UnreadableShard."""
    try:
        return os.open(path, _NOT_WAITING)
    except FileNotFoundError:
        raise MissingShard(f"{os.fsdecode(path)}: there is no such shard") from None
    except OSError as error:
        raise UnreadableShard(f"{os.fsdecode(path)}: {error.strerror}") from None
