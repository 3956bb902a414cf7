"""Files that are whole and on disk, or not there at all: the steps by which shards and indexes are written.

Write under a temporary name in the same directory, sync, rename (`new_file`), sync the directory. Every step goes
through `Disk`, so that the tests can record it, stop there or let it fail.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from typing import Any

from wdsfs.errors import CommitError, CorruptShard, counted
from wdsfs.source import TarBytes, pread

CHUNK = 1 << 20  # bytes of a file that are read at a time, and of small pieces that are written together
COPY_MAX = 1 << 25  # bytes per copy by the kernel, and unwritten bytes before the disk is asked to write


# Errors of copy_file_range and sendfile where they do not work: another file system, old kernel, special file. EIO
# may be of either file, so it is tried again by reading and writing.
_NOT_HERE = frozenset(
    (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.ETXTBSY, errno.EIO)
)


class Disk:
    """The steps by which anything is written. Tests replace it."""

    def open_temporary(self, path: bytes, mode: int = 0o666) -> int:
        """Create and lock a new file that nobody else has open. A leftover of a killed commit is removed first.

        The leftover itself is never used: if others can write to the directory it may be theirs, or a link to a
        file of this user. Raises CommitError, OSErrors.
        """
        while True:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            except FileExistsError:
                remove_leftover(path)
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Was it removed as a leftover between the two calls?
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False)):
                        return fd
            except BlockingIOError:  # locked by another commit, which is about to remove it
                pass
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def write(self, fd: int, data: bytes | bytearray) -> None:
        """Write all of the data."""
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]

    def copy(self, source: TarBytes, target: int, start: int, count: int, path: bytes | None = None) -> None:
        """Copy bytes from `start` to the position of `target`, in the kernel if possible.

        `path` is that of the source. Raises CorruptShard, and OSErrors, which name it if it cannot be read.
        """
        for copy in (_copy_file_range, _sendfile):
            while count and isinstance(source, int):
                try:
                    done = copy(source, target, start, count)
                except OSError as error:
                    if error.errno not in _NOT_HERE:
                        raise
                    break
                if not done:
                    break
                start, count = start + done, count - done
        while count:
            with named(path):
                data = pread(source, min(count, CHUNK), start)
            if not data:
                where = "the shard" if path is None else os.fsdecode(path)
                raise CorruptShard(
                    f"{where} ends at byte {start}, {counted(count, 'byte')} too early: download or make it again"
                )
            self.write(target, data)
            start, count = start + len(data), count - len(data)

    def set_owner(self, fd: int, like: os.stat_result) -> None:
        """Set mode and, if allowed, owner to those of the file that is replaced."""
        with contextlib.suppress(PermissionError):
            os.fchown(fd, like.st_uid, like.st_gid)
        os.fchmod(fd, stat.S_IMODE(like.st_mode))

    def start_writing(self, fd: int) -> None:
        """Start writing to disk now instead of at the end: this saves a third of the time of a commit.

        Only a hint: `sync` makes it durable.
        """
        if _sync_file_range is not None:
            _sync_file_range(fd, 0, 0, _SYNC_FILE_RANGE_WRITE)

    def sync(self, fd: int) -> None:
        """Sync a file."""
        os.fsync(fd)

    def rename(self, source: bytes, target: bytes) -> None:
        """Rename a file."""
        os.rename(source, target)

    def link(self, source: bytes, target: bytes) -> None:
        """Make a hard link."""
        os.link(source, target)

    def make_directory(self, path: bytes) -> None:
        """Make a directory."""
        os.mkdir(path)

    def remove(self, path: bytes) -> None:
        """Remove a file."""
        os.unlink(path)

    def sync_directory(self, path: bytes) -> None:
        """Sync a directory: names in it are on disk then."""
        fd = os.open(path or b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextlib.contextmanager
def new_file(disk: Disk, target: bytes, mode: int = 0o666, temporary: bytes | None = None) -> Iterator[int]:
    """Open an empty file that replaces `target` when the block ends; an exception removes it.

    Until then its name is `temporary`, or that of `temporary_of`. The block writes the file and syncs it; the
    caller syncs the directory, once for all files that it writes there. Raises CommitError, OSErrors.
    """
    temporary = temporary or temporary_of(target)
    fd = disk.open_temporary(temporary, mode)
    try:
        yield fd
        disk.rename(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            disk.remove(temporary)
        raise
    finally:
        os.close(fd)


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of the data at this offset (bytes) in a file, by several calls if needed. Raises OSError."""
    left = memoryview(data)
    while left:
        done = os.pwrite(fd, left, offset)
        left, offset = left[done:], offset + done


def make_directories(disk: Disk, path: bytes) -> None:
    """Make a directory, and those above it that are missing; all are on disk then. Raises OSErrors.

    Other processes may make the same directories at the same time.
    """
    missing = []
    while path and not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for directory in reversed(missing):
        try:
            disk.make_directory(directory)
        except FileExistsError:
            if not os.path.isdir(directory):
                raise
        disk.sync_directory(os.path.dirname(directory))


def write_whole(path: bytes, content: bytes, mode: int = 0o666) -> None:
    """Write a small file to disk; a kill or a power cut leaves the old one or the new one.

    Raises CommitError, OSErrors.
    """
    disk = Disk()
    with named(path), new_file(disk, path, mode) as fd:
        disk.write(fd, content)
        disk.sync(fd)
    disk.sync_directory(os.path.dirname(path))


def remove_leftover(path: bytes) -> None:
    """Remove the file with a temporary name, unless it is being written. Raises CommitError, OSErrors."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EACCES):  # a link, a socket, one of another user
            raise
        fd = -1
    try:
        if fd >= 0:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    except BlockingIOError:
        raise CommitError(f"another process of wdsfs is writing {os.fsdecode(path)}") from None
    except PermissionError as error:
        raise CommitError(
            f"{os.fsdecode(path)} cannot be removed: it belongs to another user ({error.strerror})"
        ) from None
    finally:
        if fd >= 0:
            os.close(fd)


_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range: Any = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def _copy_file_range(source: int, target: int, start: int, count: int) -> int:
    return os.copy_file_range(source, target, count, start)


def _sendfile(source: int, target: int, start: int, count: int) -> int:
    return os.sendfile(target, source, start, count)


def temporary_of(target: bytes) -> bytes:
    """Return the name under which a shard is written: in its directory, and hidden, so that no glob matches."""
    directory, name = os.path.split(target)
    return os.path.join(directory, b".wdsfs-" + name + b".tmp")


@contextlib.contextmanager
def named(path: bytes | None) -> Iterator[None]:
    """Add this file name to an OSError in the block that has none, as errors of writing to a descriptor."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = path
        raise
