"""The subject of the pages: a set, the mount that shows it, and where its samples are changed.

A set that grows is renewed before a page is made, at most every few seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from wdsfs.errors import WdsfsError, counted
from wdsfs.pages.library import Library
from wdsfs.pages.writable_mount import WritableMount
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.tree import LowerTree

# Seconds between two looks, and how many times as long as the last look: with many shards it takes its time.
LOOK_SECONDS, REST_SHARE = 1.0, 10


class Renewal:
    """The set of a library over time. `look` returns the tree to show from now on, None for the one that is shown;
    `news` more to say about it, if anything.

    Answers that have begun go on with the set that they began with.
    """

    def __init__(
        self, library: Library, look: Callable[[ShardSet], LowerTree | None], news: Callable[[], str]
    ) -> None:
        self._library, self._look, self._news = library, look, news
        self._begun = self._names()
        self._looking = threading.Lock()
        self._next = 0.0
        self._error = ""

    def look(self) -> bool:
        """Look for another set, unless that was done a moment ago; True if the library shows another one now."""
        with self._looking:
            return self._look_now()

    def _look_now(self) -> bool:
        began = time.monotonic()
        if began < self._next:
            return False
        try:
            with self._library.lock:
                tree = self._look(self._library.tree.lower)
                if tree is not None:
                    self._library.renew(tree)
            self._error = ""
            return tree is not None
        except (WdsfsError, OSError) as error:
            self._error = str(error)
            return False
        finally:
            now = time.monotonic()
            self._next = now + max(LOOK_SECONDS, (now - began) * REST_SHARE)

    @property
    def text(self) -> str:
        """The news for each page; empty while nothing has changed."""
        if self._error:
            return f"The set is shown as it was, for it cannot be read again: {self._error}"
        now = self._names()
        changes = (len(now - self._begun), "came"), (len(self._begun - now), "went")
        texts = [f"{counted(number, 'shard')} {word}" for number, word in changes if number]
        changed = f"{' and '.join(texts)} since this view began." if texts else ""
        return " ".join(filter(None, (changed, self._news())))

    def _names(self) -> set[bytes]:
        return {shard.name for shard in self._library.tree.lower.shards}


class Place(NamedTuple):
    """Where samples are changed: below the directory `top`, once `command` has been typed."""

    top: str
    command: str


class Subject(NamedTuple):
    """What the pages show: a set, and `mount`, the writable mount that shows it, if there is one.

    `place` is None where samples have other paths in a mount than here. `note` is shown on every page: what is
    special about this view of the set.
    """

    library: Library
    mount: WritableMount | None = None
    place: Place | None = None
    note: str = ""
    renewal: Renewal | None = None
