"""A write-ahead note of the request that a worker is serving, for the worker that takes over.

The kernel sends the request of a worker that died again. Most requests can simply be done twice; but "create this
name" fails the second time, because the name is there. So before such a change a worker writes down what it is
about to do, in memory that outlives it, and whoever has sent the reply clears it. A new worker that gets the same
request from the same thread knows that it was under way, and looks whether it was done.

Plain memory, made before the workers are forked; one worker at a time writes.
"""

from __future__ import annotations

import marshal
import mmap
import struct
from typing import Any

SIZE = 4096
_LENGTH = struct.Struct("<I")

Key = tuple[Any, ...]  # numbers and bytes


class RequestJournal:
    """One request. `memory` of SIZE bytes is what the worker before left; without it nothing outlives the process.

    `requester` is the thread (the pid in FUSE's header) whose request is served, `resent` whether the kernel has
    handed it out before; the adapter sets both.
    """

    def __init__(self, memory: mmap.mmap | bytearray | None = None) -> None:
        self._memory = memoryview(bytearray(SIZE) if memory is None else memory)
        self.requester = 0
        self.resent = True
        self._left: tuple[int, str, Key, Key] | None = self._read()

    def _read(self) -> tuple[int, str, Key, Key] | None:
        (length,) = _LENGTH.unpack_from(self._memory)
        if not length or length > SIZE - _LENGTH.size:
            return None
        requester, what, key, about = marshal.loads(self._memory[_LENGTH.size : _LENGTH.size + length])
        return requester, what, key, about

    def begin(self, what: str, key: Key, about: Key = ()) -> None:
        """This is going to be done now. `key` tells the request, `about` what has to be known to look at it."""
        entry = marshal.dumps((self.requester, what, key, about))
        self.settle()  # the length comes last: a stop in between leaves no half an entry
        if len(entry) <= SIZE - _LENGTH.size:
            self._memory[_LENGTH.size : _LENGTH.size + len(entry)] = entry
            _LENGTH.pack_into(self._memory, 0, len(entry))

    def clear(self) -> None:
        """The reply has been sent. What the worker before left stays until it is known whether it is asked for
        again: the worker after this one may have to answer that."""
        if self._left is None:
            _LENGTH.pack_into(self._memory, 0, 0)

    def settle(self) -> None:
        """Nothing that the worker before left is asked for again: the kernel hands out such requests first."""
        self._left = None
        self.clear()

    def repeats(self, what: str, key: Key) -> Key | None:
        """If the worker before was about to do this for the same thread: the `about` of that; once.

        A thread waits for its reply; so if it wants something else, what it wanted before was answered.
        """
        if self._left is None or not self.resent or self._left[0] != self.requester:
            return None
        _, left, left_key, about = self._left
        self._left = None
        return about if (left, left_key) == (what, key) else None
