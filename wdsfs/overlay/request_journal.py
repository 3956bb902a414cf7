"""A note, in shared memory, of the change that a worker is making, for the worker that takes over.

The kernel sends the request of a worker that died again. Most requests can simply be done twice; but "create this
name" fails the second time, because the name exists. So before such a change a worker notes it in memory that
outlives the worker, and clears the note when the reply has been sent. A new worker that gets the same request from
the same thread knows that it was under way, and checks if it was carried out.

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
    """The request that is served, noted in `memory` of SIZE bytes.

    The memory has the note of the previous worker; without it no note outlives the process.

    `requester` is the thread (the pid in FUSE's header) whose request is served; `resent` is True if the kernel
    has sent the request before. The adapter sets both.
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
        """Note a coming change: `key` identifies its request, `about` serves to check the result."""
        entry = marshal.dumps((self.requester, what, key, about))
        self.drop_previous()  # the length comes last: a stop in between leaves no partial note
        if len(entry) <= SIZE - _LENGTH.size:
            self._memory[_LENGTH.size : _LENGTH.size + len(entry)] = entry
            _LENGTH.pack_into(self._memory, 0, len(entry))

    def clear(self) -> None:
        """Clear the note: the reply has been sent.

        A note of the previous worker stays until it is known that its request does not come again: if this worker
        dies, the next one may need the note.
        """
        if self._left is None:
            _LENGTH.pack_into(self._memory, 0, 0)

    def drop_previous(self) -> None:
        """Drop the note of the previous worker: the kernel sends its request again before new ones, or never."""
        self._left = None
        self.clear()

    def repeats(self, what: str, key: Key) -> Key | None:
        """Return the `about` of the previous worker's note, if that was for this request of the same thread; once.

        A thread waits for its reply; so if it sends another request, the previous one was answered.
        """
        if self._left is None or not self.resent or self._left[0] != self.requester:
            return None
        _, left, left_key, about = self._left
        self._left = None
        return about if (left, left_key) == (what, key) else None
