"""Things that the lint finds, and counts in a shard for what it finds in the whole set.

docs/reference/semantics.md lists the kinds.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from wdsfs.tar.problems import Problem

EXAMPLES = 100  # findings of one kind in one shard that are listed; further ones are counted
KEPT = 1000  # samples of a shard that are remembered in case they lack an extension that others have
FIRST_SAMPLES = 5  # NUM_EXAMPLES_FOR_FEATURES_INFERENCE of Hugging Face's `datasets`
UNEVEN = "uneven columns"  # a kind
EXTRA, LATE, EMPTY, UNREADABLE = "extra column", "late column", "empty member", "unreadable"  # kinds
NOTES = frozenset(("directory", "meta", "unextractable", UNEVEN, EXTRA))  # kinds that webdataset does not mind


class LintFinding(NamedTuple):
    """One line of the report. `offset` is the byte where the member's first header is, -1 for a whole shard."""

    kind: str
    offset: int
    member: str
    text: str

    @property
    def is_note(self) -> bool:
        """True if webdataset reads it without trouble."""
        return self.kind in NOTES

    def line(self, path: str) -> str:
        """Return the line of a report on the shard at `path`."""
        where = f"{path}:{self.offset}" if self.offset >= 0 else path
        return ": ".join(filter(None, (where, self.member, f"[{self.kind}] {self.text}")))


class FirstSample(NamedTuple):
    """A sample at the start of a shard: where its first header is (bytes), its key, and its extensions."""

    offset: int
    key: str
    extensions: frozenset[bytes]


@dataclass(slots=True)
class Column:
    """Counts for one column of a shard: its members, those of 0 bytes, and some of the latter (offset, name)."""

    members: int = 0
    empty: int = 0
    examples: list[tuple[int, str]] = field(default_factory=list)

    def add_empty(self, name: bytes, offset: int) -> None:
        """Count a member of 0 bytes."""
        self.empty += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append((offset, escaped(name)))


@dataclass(slots=True)
class Lint:
    """The findings in one shard, and its counts for those in the whole set."""

    findings: list[LintFinding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    samples: int = 0
    members: int = 0
    # By set of extensions: how many samples have exactly these, and the first of them (offset, key).
    patterns: dict[frozenset[bytes], int] = field(default_factory=dict)
    examples: dict[frozenset[bytes], list[tuple[int, str]]] = field(default_factory=dict)
    # 64-bit digests of the shard's keys and where each is first seen: for keys that several shards have.
    keys: array[int] = field(default_factory=lambda: array("Q"))
    offsets: array[int] = field(default_factory=lambda: array("q"))
    first: list[FirstSample] = field(default_factory=list)  # a few samples at its start
    columns: dict[bytes, Column] = field(default_factory=dict)

    def add(self, kind: str, offset: int, member: str, text: str) -> None:
        """Count a finding; it is listed if it is one of the first of its kind."""
        self.counts[kind] += 1
        if self.counts[kind] <= EXAMPLES:
            self.findings.append(LintFinding(kind, offset, member, text))

    def add_problems(self, problems: Sequence[Problem], count: int, last: tuple[int, bytes] = (-1, b"")) -> None:
        """Add the problems of a shard, `count` in all; `last` has the head and the name of its last member."""
        for problem in problems:
            member = escaped(last[1]) if problem.offset == last[0] else ""
            self.add(problem.kind, problem.offset, member, problem.text)
        if count > len(problems):
            self.add(problems[0].kind, -1, "", f"and {count - len(problems)} more problems")


def escaped(name: bytes) -> str:
    """Return a name as text, with bytes that are not UTF-8 escaped."""
    return name.decode("utf-8", "backslashreplace")
