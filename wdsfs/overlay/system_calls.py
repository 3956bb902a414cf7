"""The system calls that change an upper, in one class: a test passes a subclass that fails, stops or records them.

Which calls make up a change is decided in the modules above; nothing is remembered here.
"""

from __future__ import annotations

import ctypes
import errno
import os

NOREPLACE, EXCHANGE, WITH_WHITEOUT = 1, 2, 4  # flags of renameat2(2)
FILE_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # of open(2), for files of the upper

_libc = ctypes.CDLL(None, use_errno=True)
_renameat2 = getattr(_libc, "renameat2", None)  # not every libc has it
if _renameat2 is not None:
    _renameat2.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]


class SystemCalls:
    """Each method is one system call. Directories are descriptors, names are relative to them; raises OSErrors."""

    def create(self, name: bytes, flags: int, mode: int, directory: int) -> int:
        return os.open(name, flags | os.O_CREAT | os.O_EXCL | FILE_FLAGS, mode, dir_fd=directory)

    def mkdir(self, name: bytes, mode: int, directory: int) -> None:
        os.mkdir(name, mode, dir_fd=directory)

    def mknod(self, name: bytes, mode: int, device: int, directory: int) -> None:
        os.mknod(name, mode, device, dir_fd=directory)

    def symlink(self, target: bytes, name: bytes, directory: int) -> None:
        os.symlink(target, name, dir_fd=directory)

    def link(self, name: bytes, directory: int, new: bytes, new_directory: int) -> None:
        os.link(name, new, src_dir_fd=directory, dst_dir_fd=new_directory, follow_symlinks=False)

    def unlink(self, name: bytes, directory: int) -> None:
        os.unlink(name, dir_fd=directory)

    def rmdir(self, name: bytes, directory: int) -> None:
        os.rmdir(name, dir_fd=directory)

    def rename(self, name: bytes, directory: int, new: bytes, new_directory: int, flags: int = 0) -> None:
        if not flags:
            os.rename(name, new, src_dir_fd=directory, dst_dir_fd=new_directory)
        elif _renameat2 is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        elif _renameat2(directory, name, new_directory, new, flags):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), name)

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def setxattr(self, fd: int, name: bytes | str, value: bytes, flags: int = 0) -> None:
        os.setxattr(fd, name, value, flags)

    def removexattr(self, fd: int, name: bytes | str) -> None:
        os.removexattr(fd, name)

    def chmod(self, name: bytes, mode: int, directory: int) -> None:
        os.chmod(name, mode, dir_fd=directory)

    def chown(self, name: bytes, uid: int, gid: int, directory: int) -> None:
        os.chown(name, uid, gid, dir_fd=directory, follow_symlinks=False)

    def utime(self, name: bytes, times: tuple[int, int], directory: int) -> None:
        os.utime(name, ns=times, dir_fd=directory, follow_symlinks=False)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def syncfs(self, fd: int) -> None:
        if _libc.syncfs(fd):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def write_all(calls: SystemCalls, fd: int, data: bytes | memoryview, offset: int) -> int:
    """Write all of the data, or raise the OSError that says why not. Returns how many bytes, which are all."""
    size = len(data)
    done = calls.write(fd, data, offset)
    while done < size:  # a disk that fills up; the next call says so
        done += calls.write(fd, memoryview(data)[done:], offset + done)
    return size


def sync_filesystem(path: str) -> None:
    """Write the dirty pages of the file system that `path` is in to disk. Raises OSError.

    On a mount of ours this sends the worker what programs have changed in mapped files. Not every kernel waits for
    the answers of a FUSE file system. The worker answers in turn, so all of it is there after one more answer; a
    second call reports what has failed.
    """
    calls = SystemCalls()
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        calls.syncfs(fd)
        os.fstatvfs(fd)
        calls.syncfs(fd)
    finally:
        os.close(fd)
