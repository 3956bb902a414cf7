"""Problems of a shard: the findings of a scan, and the exception that ends it."""

from __future__ import annotations

from typing import NamedTuple

# Kinds of problems in spite of which all members that a reader sees are whole. (Dangling links are found by
# `index/hard_links.py`.)
HARMLESS = frozenset(("no end mark", "behind end mark", "dangling link", "empty", "trailing header"))

# Kinds of what a view cannot make of a member: a tar has no such problem, so `wdsfs check` does not find it.
BROKEN_FIELD, UNDECODED = "broken field", "not decoded"
OF_VIEWS = frozenset((BROKEN_FIELD, UNDECODED))


class Problem(NamedTuple):
    """Something wrong with a shard: where (byte offset of a header; -1: the whole file), what kind, in words."""

    offset: int
    kind: str
    text: str


class Damage(Exception):
    """Raised inside the scan where the tar stops making sense; becomes a Problem."""

    def __init__(self, offset: int, kind: str, text: str) -> None:
        super().__init__(text)
        self.problem = Problem(offset, kind, text)


def problems_text(first: Problem, count: int) -> str:
    """All problems of a shard in a line."""
    return first.text + (f" (and {count - 1} more)" if count > 1 else "")
