"""What `wdsfs check` finds in the set, looked for when a page asks for it.

A check reads the headers of every shard, which takes long for remote ones; so it begins only when asked for. One
thread goes through the shards in their order, and pages show what it has found so far. What the index knows
(damage, shards that cannot be read) is there without a check.
"""

from __future__ import annotations

import itertools
import os
import threading
from array import array
from contextlib import suppress
from typing import NamedTuple

from wdsfs.errors import ShardError
from wdsfs.interop.lint import Judge, LintFinding, lint
from wdsfs.pages.library import Library, Snapshot

KEPT_MAX = 2000  # findings that are kept; further ones are counted
SHARED_MAX = 5_000_000  # samples of a set in which keys are compared between shards: 16 bytes each


class Problem(NamedTuple):
    """A finding in a shard, by its name, and the path of the sample that it is in; b"" if it is in none."""

    shard: bytes
    finding: LintFinding
    sample: bytes


class Check:
    """A check of the whole set in a thread of its own."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self.problems: list[Problem] = []
        self.findings = self.notes = self.done = 0
        self.is_complete = False
        with library.snapshot() as now:
            self.compares_keys = now.total <= SHARED_MAX

    @property
    def begun(self) -> bool:
        """True if the check is running or has ended."""
        return self._thread is not None

    def begin(self) -> None:
        """Start, unless it has been started."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="check", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Have it end after the present shard, which may take long; does not wait for that."""
        self._stopped.set()

    def _run(self) -> None:
        with self._library.snapshot() as now:
            self._look_at(now)

    def _look_at(self, now: Snapshot) -> None:
        judge, shards = Judge(), now.shards
        numbers = {os.fsdecode(shard.path): number for number, shard in enumerate(shards)}
        for number, one in enumerate(shards):
            if self._stopped.is_set():
                return
            try:
                found = lint(one.path, one.reading)
                if not self.compares_keys:
                    found.keys, found.offsets = array("Q"), array("q")
                for finding in judge.add(os.fsdecode(one.path), found, one.miscount(found.samples)):
                    self._add(now, number, finding)
            except ShardError as error:
                self._add(now, number, LintFinding("unreadable", -1, "", str(error)))
            self.done = number + 1
        for path, finding in itertools.chain(judge.shared_keys(), judge.missing(), judge.uneven()):
            self._add(now, numbers[path], finding)
        self.is_complete = True

    def _add(self, now: Snapshot, shard: int, finding: LintFinding) -> None:
        if finding.is_note:
            self.notes += 1
            return
        self.findings += 1
        if len(self.problems) < KEPT_MAX:
            sample = None
            if finding.offset >= 0:
                with suppress(ShardError):  # a shard that cannot be read, or is another by now, has no such sample
                    sample = now.sample_at_offset(shard, finding.offset)
            self.problems.append(Problem(now.shards[shard].name, finding, sample or b""))
