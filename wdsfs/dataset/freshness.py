"""Whether the shards are still the files that they were: who decides that a shard is stale.

A shard's path is looked at again when it is used, at most once a second, and at once after an alarm: a process of
the mount has met a change, or `mount/watch.py` has heard of one. What a change means for records and open files is
for `shard_set.py`, which is called back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from wdsfs.dataset.generations import Generations
from wdsfs.errors import RefusedShard, ShardError

log = logging.getLogger(__name__)

FRESH_SECONDS = 1.0  # how long a look at a shard's path is believed
Fingerprint = tuple[int, int, int]
GONE: Fingerprint = (0, 0, 0)  # of a shard that was there and cannot be read now


@dataclass(slots=True)
class State:
    """What is known of a shard that has been looked at."""

    fingerprint: Fingerprint
    looked: float  # monotonic seconds of the last look at its path
    tag: int


class Freshness:
    """What each shard of a set was at the last look at it.

    `look` returns the fingerprint of a shard's path now, or raises ShardError. `changed` is called with the
    number, the fingerprint before and the one now (GONE: it cannot be read) when they differ, and before the new
    one is kept.
    """

    def __init__(
        self,
        tags: Generations,
        look: Callable[[int], Fingerprint],
        changed: Callable[[int, Fingerprint, Fingerprint], None],
    ) -> None:
        self.tags = tags
        self.states: dict[int, State] = {}
        self.heard = 0  # the alarms that this process has acted on
        self._look, self._changed = look, changed
        self._believed = 0.0  # looks from before this moment (monotonic seconds) are not believed
        self._said = ""  # the last error that was logged

    def fingerprint(self, number: int) -> Fingerprint:
        """The fingerprint of a shard, at most a second old. Raises MissingShard, UnreadableShard."""
        state = self.states.get(number)
        now = time.monotonic()
        if self.tags.alarms != self.heard:
            self.heard, self._believed = self.tags.alarms, now
        if state is None or state.fingerprint == GONE or state.looked < self._believed:
            return self._look_again(number, state, now)
        return state.fingerprint if now - state.looked < FRESH_SECONDS else self._look_again(number, state, now)

    def look_again(self, number: int) -> Fingerprint:
        """The fingerprint of a shard as it is now. Raises MissingShard, UnreadableShard."""
        return self._look_again(number, self.states.get(number), time.monotonic())

    def _look_again(self, number: int, state: State | None, now: float) -> Fingerprint:
        try:
            found = self._look(number)
        except ShardError as error:
            if state is not None and state.fingerprint != GONE:
                # A refusal is logged already; and of many shards it is the same where a view lacks something.
                if str(error) != self._said and not isinstance(error, RefusedShard):
                    log.error("%s; what was open from it gets ESTALE", error)
                self._said = str(error)
                self._changed(number, state.fingerprint, GONE)
                self.states[number] = State(GONE, now, state.tag)
            raise
        if state is None:
            self.states[number] = State(found, now, self.tags.of(number, found))
        elif state.fingerprint != found:
            self._said = ""
            self._changed(number, state.fingerprint, found)
            self.states[number] = State(found, now, self.tags.of(number, found))
        else:
            state.looked = now
            state.tag = self.tags.of(number, found)  # others may have seen it go and come back
        return found

    def tag(self, number: int) -> int:
        """The tag of the shard's inode numbers. Raises MissingShard, UnreadableShard."""
        state = self.states.get(number)
        if state is None or state.fingerprint == GONE:
            self.fingerprint(number)
            state = self.states[number]
        return state.tag

    def believed_until(self, number: int) -> float:
        """When (monotonic seconds) the last look at a shard is no longer believed."""
        return self.states[number].looked + FRESH_SECONDS

    def version(self) -> int:
        """A number that differs after each change of a shard that was noticed, also after many of them.

        It is about what this process knows; the same in all that know the same, and after a remount.
        """
        return sum(2 * state.tag + (state.fingerprint == GONE) for state in self.states.values())

    def reconsider(self, number: int) -> None:
        """A shard has other content under the fingerprint that it had: give it a new tag, and look again."""
        self.tags.renew(number)
        self.states.pop(number, None)
