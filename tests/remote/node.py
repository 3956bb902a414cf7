"""A process of another node that has the cache, too. Each line of its input is a call; it answers with JSON.

With `as_nfs` its flock(2) is that of NFS: a lock of all bytes, and an exclusive one takes a file open to write.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from tests.remote.cached import LIMIT, URL, content_of, opened, pin_of
from wdsfs.cache.cache_directory import TABLE, CacheDirectory, CacheEntry, lock_range
from wdsfs.cache.file_cache import FileCache, NewFile
from wdsfs.remote.cached_object import CachedObject
from wdsfs.remote.object_cache import ObjectCache, key_of

RANGE, RANGES = 1 << 16, 64
SIZE = RANGE * RANGES - 100
KEY = "0" * 32


def nfs_flock(fd: int, how: int) -> None:
    """flock(2) as the kernel's client of NFS makes it of locks of bytes."""
    mode, size = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE, 0  # up to any end
    if how & fcntl.LOCK_UN:
        return lock_range(fd, fcntl.F_UNLCK, 0, size)
    is_exclusive = bool(how & fcntl.LOCK_EX)
    if mode == (os.O_RDONLY if is_exclusive else os.O_WRONLY):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    kind = fcntl.F_WRLCK if is_exclusive else fcntl.F_RDLCK
    return lock_range(fd, kind, 0, size, wait=not how & fcntl.LOCK_NB)


class Node:
    """The cache at a directory; what `claim` and `open_file` have opened stays so."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files = FileCache(directory, LIMIT)
        self.claimed: list[CachedObject] = []
        self.fds: list[int] = []

    def fetch(self, seed: int, first: int, count: int) -> list[int]:
        """Read ranges in an order of its own, and fetch those that are not here; returns these."""
        content, fetched, numbers = content_of(SIZE), [], list(range(RANGES))
        random.Random(seed).shuffle(numbers)
        with opened(self.directory, SIZE) as cached:
            for number in numbers[first : first + count]:
                begin, end = number * RANGE, min((number + 1) * RANGE, SIZE)
                while (data := cached.read(end - begin, begin)) is None:
                    if cached.claim(begin, end):
                        if cached.missing(begin, end):
                            fetched.append(number)
                            assert cached.put(begin, content[begin:end])
                        cached.release(begin, end)
                    time.sleep(0.001)
                assert data == content[begin:end]
        return fetched

    def claim(self, begin: int, end: int) -> bool:
        self.claimed.append(ObjectCache(self.directory, LIMIT).open(URL, pin_of(SIZE)))
        return self.claimed[-1].claim(begin, end)

    def open(self) -> int:
        with opened(self.directory, SIZE) as cached:
            return cached.size

    def remove(self, kind: str) -> bool:
        key = key_of(URL, pin_of(SIZE)) if kind == TABLE else KEY
        return CacheDirectory(self.directory).remove(CacheEntry(0.0, 0, key, kind))

    def make(self) -> bool:
        """Have a file made, unless it is there; True if it was made here."""
        made = []

        def fill(new: NewFile) -> tuple[str, int]:
            made.append(new)
            new.write(b"whole")
            return "tar", 5

        with contextlib.closing(os.fdopen(self.files.make(KEY, ["tar"], fill).fd, "rb")) as file:
            assert file.read() == b"whole"
        return bool(made)

    def open_file(self) -> bool:
        file = self.files.find(KEY, ["tar"])
        self.fds += [] if file is None else [file.fd]
        return file is not None

    def close_files(self) -> None:
        while self.fds:
            os.close(self.fds.pop())

    def reserve(self, size: int, times: int) -> int:
        for _ in range(times):
            assert self.files.room.reserve(size, 0.0)
        return self.files.room.state()[0]


def main() -> None:
    directory, as_nfs = sys.argv[1:]
    if as_nfs == "as_nfs":
        fcntl.flock = nfs_flock  # type: ignore[assignment]
    node = Node(Path(directory))
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        answer: Any = getattr(node, name)(*arguments)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
