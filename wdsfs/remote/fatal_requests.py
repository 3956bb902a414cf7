"""Of which requests of the kernel fetchers have died, so that no request ends one fetcher after the other.

In shared memory, since a fetcher that dies can say nothing: it notes a request when it begins, and takes the note
back when it is answered. What its successor finds noted was under way when it died. Only one process writes.

The memory holds the number of the present fetcher, then slots of two words: the number of a request, and which
fetcher began it and how many died before that. Two requests may want the same slot: the count begins anew then.
"""

from __future__ import annotations

_DEATHS = 1 << 8  # more than are ever counted


class FatalRequests:
    """The notes of this fetcher and of those before it, in this memory of words."""

    def __init__(self, words: memoryview[int]) -> None:
        words[0] += 1
        self._fetcher, self._slots = words[0], words[1:]

    def begin(self, request: int) -> int:
        """Note that a request is under way; return during how many attempts at it a fetcher has died."""
        at, deaths = self._place(request), 0
        if self._slots[at] == request:
            fetcher, deaths = divmod(self._slots[at + 1], _DEATHS)
            deaths += fetcher != self._fetcher
        self._slots[at], self._slots[at + 1] = request, self._fetcher * _DEATHS + deaths
        return deaths

    def end(self, request: int) -> None:
        """Note that a request was answered."""
        at = self._place(request)
        if self._slots[at] == request:
            self._slots[at] = 0

    def _place(self, request: int) -> int:
        return request // 2 % (len(self._slots) // 2) * 2  # the kernel numbers by twos
