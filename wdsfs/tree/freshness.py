"""Decides whether a shard is stale: whether its file has changed since it was indexed.

The path of a shard is checked when the shard is used: at most once a second, but at once after an alarm. An alarm
is a change that a process of the mount has met, or that was reported to `mount/followed_set.py`. After a change
this module calls `shard_set.py`, which drops records and open files. The processes of a mount share the generation
of each shard in memory, so all of them give the same inode numbers to the same content.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from wdsfs.errors import MissingShard, RefusedShard, ShardError
from wdsfs.inodes import TAG_MAX
from wdsfs.shards import GONE, Fingerprint

log = logging.getLogger(__name__)

FRESH_SECONDS = 1.0  # seconds for which a check of a shard's path is valid


Words: TypeAlias = "memoryview[int]"  # of 64 bits each
_NO_FETCHER: Words = memoryview(bytes(8)).cast("Q")


@dataclass(slots=True)
class Generations:
    """The generation of each shard of a set under this mount. Inode numbers contain the generation.

    It goes up by one with each change that a process notices, so an inode number of the old content never stands
    for the new content. It starts from the fingerprint, so that numbers are the same after a remount.

    The words are in memory that the processes of the mount share. That of a shard is the sum of its last
    fingerprint (upper half) and the generation; two processes that notice the same change write the same word.
    Workers have one counter of alarms, and the process that follows changes has another one, because no process
    may undo the increment of another. `fetched` is a third counter, of remote shards that the fetcher found
    changed.

    `edition` counts how often shards were added or removed since the mount. `changed_ns` is the time of the last
    such change (ns since the epoch, 0 for never). In a set that is `followed`, a missing shard is about to be
    removed from the set.
    """

    words: Words
    alarm_words: Words
    first_new: int  # shards from this number on were added after the mount, and start from generation 0
    followed: bool = False
    edition: int = 0
    changed_ns: int = 0
    last_tags: Mapping[int, int] = field(default_factory=dict)  # of shards that are not in the set any more
    fetched: Words = _NO_FETCHER

    @classmethod
    def at_mount(cls, shards: int, *, followed: bool = False) -> Generations:
        """Return the generations of the shards of a new mount."""
        return cls(_share_words(shards), _share_words(2), shards, followed)

    @property
    def alarms(self) -> int:
        """A counter of changed shards that any process of the mount has met or has been notified of."""
        return self.alarm_words[0] + self.alarm_words[1] + self.fetched[0]

    def alarm(self, *, notified: bool = False) -> None:
        """Note that a worker has met a changed shard, or, with `notified`, that inotify has reported one."""
        self.alarm_words[notified] += 1

    def extended(self, shards: int) -> Generations:
        """Return the generations of this set with further shards at its end, as after a new mount."""
        longer = Generations.at_mount(shards)
        longer.words[: len(self.words)] = self.words
        longer.fetched = self.fetched
        return longer

    def grown(self, shards: int, out: Iterable[int], now_ns: int) -> Generations:
        """Return the generations after shards were added or removed; `out` are the removed numbers.

        Removed shards keep their last tag. So the sum over the set does not change, and a listing can
        continue.
        """
        last = {number: self.last_tags.get(number, self.words[number] & TAG_MAX) for number in out}
        return replace(
            self.extended(shards),
            first_new=self.first_new,
            followed=self.followed,
            edition=self.edition + 1,
            changed_ns=now_ns,
            last_tags=last,
        )

    def of(self, number: int, fingerprint: Fingerprint) -> int:
        """Return the tag of a shard that has this fingerprint now."""
        sum_, word = fingerprint.sum, self.words[number]  # read once: another process may write it
        seen, generation = word >> 32, word & 0xFFFFFFFF
        if seen != sum_:
            first = sum_ >> 1 & TAG_MAX if number < self.first_new else 0
            generation = generation + 1 & 0xFFFFFFFF if seen else first
            self.words[number] = sum_ << 32 | generation
        return generation & TAG_MAX

    def renew(self, number: int) -> None:
        """Increment the generation: the shard has other content under the same fingerprint."""
        word = self.words[number]
        self.words[number] = word & ~0xFFFFFFFF | word + 1 & 0xFFFFFFFF


def _share_words(count: int) -> Words:
    """Return words that are 0, in memory that forks share."""
    return memoryview(mmap.mmap(-1, 8 * max(count, 1))).cast("Q")[:count]


@dataclass(slots=True)
class State:
    """A shard as of the last look at it."""

    fingerprint: Fingerprint
    checked: float  # monotonic seconds of the last look at its path
    tag: int


class Freshness:
    """The state of each shard of a set as of the last look at it.

    `look` returns the fingerprint of a shard's path now, or raises ShardError. `changed` is called with the
    number, the fingerprint before and the one now (GONE: it cannot be read) when they differ, and before the new
    one is kept. The shards `out` are not in the set any more.
    """

    def __init__(
        self,
        tags: Generations,
        look: Callable[[int], Fingerprint],
        changed: Callable[[int, Fingerprint, Fingerprint], None],
        out: Set[int] = frozenset(),
    ) -> None:
        self.tags, self._out = tags, out
        self.states: dict[int, State] = {}
        self.heard = 0  # the alarms that this process has acted on
        self._look, self._changed = look, changed
        self._valid_since = 0.0  # results of looks before this moment (monotonic seconds) are ignored
        self._logged_error = ""  # the last error that was logged

    def fingerprint(self, number: int) -> Fingerprint:
        """Return the fingerprint of a shard, at most a second old. Raises MissingShard, UnreadableShard."""
        state, now, alarms = self.states.get(number), time.monotonic(), self.tags.alarms
        if alarms != self.heard:
            self.heard, self._valid_since = alarms, now
        if state is None or now - state.checked >= FRESH_SECONDS or state.checked < self._valid_since:
            return self._look_again(number, state, now)
        return state.fingerprint if state.fingerprint != GONE else self._look_again(number, state, now)

    def look_again(self, number: int) -> Fingerprint:
        """Return the fingerprint of a shard now. Raises MissingShard, UnreadableShard."""
        return self._look_again(number, self.states.get(number), time.monotonic())

    def _look_again(self, number: int, state: State | None, now: float) -> Fingerprint:
        try:
            fingerprint = self._look(number)
        except ShardError as error:
            if state is not None and state.fingerprint != GONE:
                # A refusal is logged already. If a companion of a view is missing, many shards give one error.
                if str(error) != self._logged_error and not isinstance(error, RefusedShard):
                    # A followed set is about to lose the shard, as its user wants.
                    is_wanted = self.tags.followed and isinstance(error, MissingShard)
                    level = logging.INFO if is_wanted else logging.ERROR
                    log.log(level, "%s; open files of the shard get ESTALE", error)
                self._logged_error = str(error)
                self._changed(number, state.fingerprint, GONE)
                self.states[number] = State(GONE, now, state.tag)
            raise
        if state is None:
            self.states[number] = State(fingerprint, now, self.tags.of(number, fingerprint))
        elif state.fingerprint != fingerprint:
            self._logged_error = ""
            self._changed(number, state.fingerprint, fingerprint)
            self.states[number] = State(fingerprint, now, self.tags.of(number, fingerprint))
        else:
            state.checked = now
            # Other processes may have seen the shard disappear and appear again.
            state.tag = self.tags.of(number, fingerprint)
        return fingerprint

    def tag(self, number: int) -> int:
        """Return the tag of the shard's inode numbers. Raises MissingShard, UnreadableShard."""
        state = self.states.get(number)
        if state is None or state.fingerprint == GONE:
            self.fingerprint(number)
            state = self.states[number]
        return state.tag

    def believed_until(self, number: int) -> float:
        """Return the moment (monotonic seconds) up to which the last look at a shard is believed."""
        return self.states[number].checked + FRESH_SECONDS

    def version(self) -> int:
        """Return a number that differs after each change of a shard that was noticed, also after many of them.

        The number depends on the changes that this process has noticed. It is equal in all processes that have
        noticed the same changes, and after a remount. Added and removed shards do not change it, because names
        that were listed before keep their places.
        """
        states = [state for number, state in self.states.items() if number not in self._out]
        missing = 0 if self.tags.followed else sum(state.fingerprint == GONE for state in states)
        tags = sum(state.tag for state in states) + sum(self.tags.last_tags.values())
        return 2 * tags + missing

    def reconsider(self, number: int) -> None:
        """Give a shard a new tag, because it has other content under the same fingerprint."""
        self.tags.renew(number)
        self.states.pop(number, None)
