"""A set that grows: looks at SHARDS again, and has the mount show what came and what went.

| who | does what |
|---|---|
| the process that watches (`watch.py`) | gives a hint when a name has come or gone in one of the directories |
| the supervisor, here | has a child look: after a hint, after an interval, and when `wdsfs refresh` asks |
| the child (`look_again.py`) | expands SHARDS, indexes new shards, answers with the change |
| the supervisor, here | replaces the workers by ones of the new list, then has the kernel ask again |

The list of shards is written by the supervisor alone, and workers get it when they are forked. So all of them
switch together: a request is answered by a worker of the old list or by one of the new list, and once
`Supervisor.exchange` has returned only by the latter. A child or a worker that is killed changes nothing: the next
look finds the same.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import time
from collections.abc import Callable, Sequence
from typing import Any

import trio

from wdsfs.errors import counted, several
from wdsfs.fuse import protocol
from wdsfs.fuse.supervisor import Supervisor
from wdsfs.inodes import ROOT
from wdsfs.mount.child import in_child
from wdsfs.mount.look_again import Earlier, LeftOut, change_of, look_again
from wdsfs.mount.mounted_set import MountedSet
from wdsfs.mount.watch import follower
from wdsfs.spec.expand import Shard
from wdsfs.spec.growth import Change
from wdsfs.status.set_state import SetState
from wdsfs.tree.numbered_tree import NAME as BY_INDEX

log = logging.getLogger(__name__)

# After a hint: several shards that come together make one change, and a change costs every worker its caches.
PAUSE_SECONDS = 0.05
# There is no look for so many times the duration of the last one: after one that has found something, and after
# one for nothing. Other files than shards may come and go all the time.
REST_SHARE, REST_SHARE_FOR_NOTHING = 2, 9
WAIT_MIN = 0.5  # seconds between looks at a file that is being written
LATE_SECONDS = 1.0  # how often to see if workers of an earlier list have ended their work


class Hints:
    """A pipe by which the watching process says that it is worth to look."""

    def __init__(self) -> None:
        self._receiver, self._sender = os.pipe()
        os.set_blocking(self._receiver, False)
        os.set_blocking(self._sender, False)

    def give(self) -> None:
        """Give a hint. Raises nothing."""
        with contextlib.suppress(OSError):  # it is full of hints, or the supervisor is gone
            os.write(self._sender, b"+")

    async def wait(self, seconds: float | None) -> None:
        """Wait for a hint, or for so many seconds."""
        with trio.move_on_after(float("inf") if seconds is None else seconds):
            await trio.lowlevel.wait_readable(self._receiver)

    def take(self) -> None:
        """Take the hints that there are."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._receiver, 1 << 10):
                pass


class Growth:
    """The set of a mount as it is shown now: `served`. Looks again at what SHARDS, relative to `directory`, stand
    for; `directories` are those that shards may appear in."""

    def __init__(self, served: MountedSet, directory: str, directories: Sequence[str], state: SetState) -> None:
        self.served, self.state = served, state
        self._directory, self._directories = directory, list(directories)
        self._follow = served.mount.follow
        self._hints = None if self._follow is None else Hints()
        self._looking = trio.Lock()
        self._earlier = Earlier({})
        self._wait: float | None = None  # until a file that is being written may be complete (s)
        self._is_late = False  # workers of an earlier list may still be at long work
        self._failure = ""  # the last one that was logged

    def follower(self) -> Callable[[Supervisor], None] | None:
        """The function that follows changes of the shards, for a process of its own; None without inotify."""
        hint = (lambda: None) if self._hints is None else self._hints.give
        return follower(self.served, self._directories if self._hints else (), hint)

    def attach(self, supervisor: Supervisor) -> None:
        """Have this supervisor serve what is found."""
        self.supervisor = supervisor

    async def run(self) -> None:
        """Look again for as long as the mount is there, if it follows its set."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_late_workers)
            nursery.start_soon(self._look_often)

    async def _look_often(self) -> None:
        rested = 0.0
        while self._hints is not None:
            await self._hints.wait(min(filter(None, (self._follow, self._wait))))
            await trio.sleep(max(PAUSE_SECONDS, rested - time.monotonic()))
            self._hints.take()
            began = time.monotonic()
            found = await self.look()
            now = time.monotonic()
            share = REST_SHARE if found["added"] or found["removed"] else REST_SHARE_FOR_NOTHING
            rested = now + share * (now - began)

    async def look(self, at_once: bool = False) -> dict[str, Any]:
        """Look, and show what is found; returns the answer to `{"do": "refresh"}` (`mount_registry.py`).

        `at_once`: a user has asked, so what could not be read before is tried again.
        """
        async with self._looking:
            earlier = Earlier({}, self._earlier.superseded) if at_once else self._earlier
            fetches = self.supervisor.fetcher is not None
            served, device = self.served, self.supervisor.device
            answer = await in_child(lambda: look_again(served, self._directory, earlier, fetches), device)
            answer = answer or {"error": "the look has failed; see the log of the mount", "left_out": []}
            change = change_of(served, answer)
            left_out = [LeftOut(*row) for row in answer["left_out"]]
            self._note(answer["error"] or answer.get("kept", ""), left_out)
            self._earlier = Earlier({one.path: one for one in left_out})
            waits = [one.wait for one in left_out if one.wait is not None]
            self._wait = max(min(waits), WAIT_MIN) if waits else None
            if change:
                await self._show(change)
            self._watch_directories(answer.get("directories", ()))
            self._write(change, left_out)
            return self._report(served, change, left_out, answer["error"])

    # --- showing

    async def _show(self, change: Change) -> None:
        """Have the workers serve the set after a change, and the kernel ask them."""
        before = self.served
        self.served = before.grown(change)
        self._earlier = self._earlier._replace(superseded=before.shards)
        gone = [before.shards[number].name for number in change.gone]
        come = [self.served.shards[number].name for number in change.back] + [one.name for one in change.new]
        follows = self._late_follower if self.supervisor.follow is not None else None
        self._is_late = not await self.supervisor.exchange(self.served.tree, follows)
        await self._invalidate([*gone, *come])
        for what, names in (("come", come), ("gone", gone)):
            if names:
                have = "has" if len(names) == 1 else "have"
                shown = several([os.fsdecode(name) for name in names])
                log.info("%s %s %s: %s", counted(len(names), "shard"), have, what, shown)

    async def _watch_late_workers(self) -> None:
        """Have the kernel ask once more: it may have cached what a worker of an earlier list answered last."""
        while True:
            await trio.sleep(LATE_SECONDS)
            if self._is_late and not any(one.retired for one in self.supervisor.workers.values()):
                self._is_late = False
                await self._invalidate([shard.name for shard in self.served.shards])

    async def _invalidate(self, names: Sequence[bytes]) -> None:
        """Have the kernel ask again for these names of the top and what is below, and for all of a merged tree."""
        notes = [protocol.forget_content(ROOT)]
        if self.served.mount.merge:
            notes += [protocol.forget_all()] * self.supervisor.epochs
        else:
            notes += [protocol.forget_entry(ROOT, name) for name in dict.fromkeys(names)]
        if self.served.mount.view.index_tree:
            notes.append(protocol.forget_entry(ROOT, BY_INDEX))
        # In a child: the kernel may wait for a directory that a request has locked.
        await in_child(lambda: self._notify(notes), None)

    def _notify(self, notes: Sequence[bytes]) -> dict[str, Any]:
        for note in notes:
            with contextlib.suppress(OSError):  # the kernel does not know that one
                os.write(self.supervisor.device, note)
        return {"done": True}

    # --- watching

    def _late_follower(self, supervisor: Supervisor) -> None:
        """As `follower`, for a list that is not the first: what it looks at is looked at in its process."""
        follow = self.follower()
        if follow is not None:
            follow(supervisor)
            return
        poll = select.poll()  # without inotify there is nothing to do but to end with those who serve
        poll.register(supervisor.life, 0)
        poll.poll()

    def _watch_directories(self, directories: Sequence[str]) -> None:
        """Watch these directories, too, if they are others than before."""
        if self._hints is None or set(directories) <= set(self._directories):
            return
        self._directories = list(directories)
        if self.supervisor.follow is not None:
            self.supervisor.follow = self._late_follower
            self.supervisor.restart_follower()

    # --- telling

    def _note(self, failure: str, left_out: Sequence[LeftOut]) -> None:
        """Log what is new of what is wrong."""
        if failure and failure != self._failure:
            log.warning("the set stays as it is: %s", failure)
        self._failure = failure
        for one in left_out:
            known = self._earlier.left_out.get(one.path)
            if known is None or known.why != one.why:
                log.log(
                    logging.INFO if one.wait is not None else logging.WARNING,
                    "%s is not shown: %s", one.path, one.why,
                )  # fmt: skip

    def _write(self, change: Change, left_out: Sequence[LeftOut]) -> None:
        state = self.state.read()
        self.state.write(
            {
                **state,
                "looked": time.time(),
                "added": state["added"] + len(change.new) + len(change.back),
                "removed": state["removed"] + len(change.gone),
                "left_out": _rows(left_out),
                "left_out_count": len(left_out),
                "error": self._failure,
            }
        )

    def _report(
        self, before: MountedSet, change: Change, left_out: Sequence[LeftOut], error: str
    ) -> dict[str, Any]:
        shards = self.served.shards
        added = (*change.back, *range(len(before.shards), len(shards)))
        return {
            "added": [_named(shards[number]) for number in added],
            "removed": [_named(before.shards[number]) for number in change.gone],
            "left_out": _rows(left_out),
            "shards": sum(shard.gone is None for shard in shards),
            "kept": "" if error else self._failure,
            "error": error,
        }


def _named(shard: Shard) -> dict[str, str]:
    return {"name": os.fsdecode(shard.name), "shard": os.fsdecode(shard.path)}


def _rows(left_out: Sequence[LeftOut]) -> list[dict[str, str]]:
    return [{"shard": one.path, "why": one.why} for one in left_out]
