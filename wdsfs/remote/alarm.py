"""An alarm that the fetcher raises for all processes of a mount: an object has changed.

A number in shared memory, since a worker asks for it at every request. Only one process writes it. The rest of the
memory is for what a fetcher leaves to its successor.
"""

from __future__ import annotations

import mmap
import os

SIZE = 1 << 17  # bytes


class Alarm:
    """Shared memory with one number; `fd` can be inherited by a process that does not share the memory yet."""

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            fd = os.memfd_create("wdsfs-alarm")
            os.ftruncate(fd, SIZE)
        self.fd = fd
        self._words = memoryview(mmap.mmap(fd, SIZE)).cast("Q")

    @property
    def words(self) -> memoryview[int]:
        """The memory; the first word is `count`."""
        return self._words

    @property
    def left(self) -> memoryview[int]:
        """The memory from one fetcher to the next."""
        return self._words[1:]

    @property
    def count(self) -> int:
        """How often it was raised."""
        return self._words[0]

    def ring(self) -> None:
        self._words[0] += 1
