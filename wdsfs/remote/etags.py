"""Web servers whose ETags mislead: which they are, and what is compared instead.

Two kinds are common. Several machines behind one address each have an ETag of their own for the same object: then
only size and Last-Modified tell if it was replaced. Others refuse If-Match although the ETag is right: then no
condition is sent, and only the answers are compared.

An object that was really replaced never gets its old ETag back with the same size and time. So an ETag that comes
back after another one proves that each machine of its server has an ETag of its own.
"""

from __future__ import annotations

import logging
from collections import OrderedDict

from wdsfs.door.pins import Pin
from wdsfs.door.urls import WEB, Url
from wdsfs.remote.answers import require_same

log = logging.getLogger(__name__)

OBJECTS_MAX = 4096  # whose ETags are remembered
ETAGS_MAX = 64  # of one object


class ETags:
    """The ETags in the answers of web servers, as one process sees them. Usable by several threads."""

    def __init__(self) -> None:
        self._of_machines: set[str] = set()  # servers, as `Url.store`
        self._refusing: set[str] = set()  # servers
        self._seen: OrderedDict[Url, tuple[int, int, list[str]]] = OrderedDict()  # size, time, ETags in order

    def are_of_machines(self, url: Url) -> bool:
        """Return True if the machines of a server have different ETags for the same object."""
        return url.store in self._of_machines

    def trusted(self, url: Url, pin: Pin) -> Pin:
        """Return the pin, without its ETag where that proves nothing."""
        return pin._replace(etag="") if self.are_of_machines(url) and not pin.is_spooled else pin

    def condition(self, url: Url, pin: Pin) -> dict[str, str]:
        """Return the header, if there is one, that makes a server refuse a request for another object."""
        return {} if url.store in self._refusing else self._compared(url, pin).condition

    def require_same(self, url: Url, pin: Pin, now: Pin) -> None:
        """Raise ObjectChanged if an answer, `now`, is of another object than the pinned one."""
        if url.scheme in WEB and now.etag != pin.etag:
            self.note(url, pin, is_now=False)
            self.note(url, now)
        require_same(url, self._compared(url, pin), now)

    def _compared(self, url: Url, pin: Pin) -> Pin:
        """Return what answers are compared with.

        An object without Last-Modified keeps its ETag until it is pinned again: its size alone proves less.
        """
        return self.trusted(url, pin) if pin.mtime_ns else pin

    def note(self, url: Url, pin: Pin, *, is_now: bool = True) -> None:
        """Note the ETag of an object: from an answer (`is_now`), or from an earlier pin."""
        size, mtime_ns, etags = self._seen.get(url, (-1, -1, []))
        if (size, mtime_ns) != (pin.size, pin.mtime_ns):
            if not is_now and etags:
                return
            etags = []
        if is_now and pin.etag in etags[:-1]:
            self.note_machines(url)
        if pin.etag not in etags:
            etags = [*etags, pin.etag] if is_now else [pin.etag, *etags]
        self._seen.pop(url, None)  # not `move_to_end`: another thread may drop it in between
        self._seen[url] = pin.size, pin.mtime_ns, etags[-ETAGS_MAX:]
        while len(self._seen) > OBJECTS_MAX:
            self._seen.popitem(last=False)

    def note_machines(self, url: Url) -> None:
        """Note that a server has several ETags for one object."""
        if url.store not in self._of_machines:
            self._of_machines.add(url.store)
            log.warning(
                "%s: has several ETags for one object: size and Last-Modified are compared instead", url.store
            )

    def note_refusal(self, url: Url) -> bool:
        """Note that a server refuses a condition that holds; return False if none was sent."""
        if url.store in self._refusing:
            return False
        self._refusing.add(url.store)
        log.warning("%s: refuses If-Match for objects that have not changed: its answers are compared", url.store)
        return True
