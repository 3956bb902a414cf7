"""Problems of a shard: the findings of a scan, and the exception that ends it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from wdsfs.errors import and_others

PROBLEMS_MAX = 1000  # problems of a shard kept word for word; further ones are counted

# Kinds of problems without damage to members that a reader sees. (`index/member_draft.py` finds dangling links.)
HARMLESS = frozenset(("no end mark", "behind end mark", "dangling link", "trailing header"))

# Kinds that mean that the file is not a tar: there is nothing to show.
NO_TAR = frozenset(("not a tar", "empty", "compressed"))

# A member that a view cannot make: tars have no such problem, so `wdsfs check` does not find it.
BROKEN_FIELD = "broken field"


class Problem(NamedTuple):
    """A problem of a shard: the byte offset of a header, the kind, and a text for people. -1 is the whole file."""

    offset: int
    kind: str
    text: str


class Problems:
    """The problems of a shard: their number, and the text of some."""

    def __init__(self, problems: Iterable[Problem] = ()) -> None:
        self._count = 0
        self._problems: list[Problem] = []
        self.extend(problems)

    def __len__(self) -> int:
        return self._count

    def extend(self, problems: Iterable[Problem]) -> None:
        """Add problems."""
        for problem in problems:
            self.append(problem)

    def append(self, problem: Problem) -> None:
        """Add a problem."""
        self._count += 1
        self._problems.append(problem)
        if len(self._problems) > 2 * PROBLEMS_MAX:
            self._problems = self.listed()

    def listed(self) -> list[Problem]:
        """Return at most `PROBLEMS_MAX` of them, in order; harmless ones are left out first."""
        chosen = sorted(self._problems, key=lambda problem: (problem.kind in HARMLESS, problem))
        return sorted(chosen[:PROBLEMS_MAX])


class Damage(Exception):
    """Raised inside the scan where the tar stops making sense; becomes a Problem."""

    def __init__(self, offset: int, kind: str, text: str) -> None:
        super().__init__(text)
        self.problem = Problem(offset, kind, text)


def problems_text(first: Problem, count: int) -> str:
    """Return all problems of a shard in a line."""
    return first.text + and_others(count)
