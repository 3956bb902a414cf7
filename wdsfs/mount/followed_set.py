"""Follows changes under a mount: shards that change and, in a set that grows, new and lost ones.

| who | does what |
|---|---|
| a process that watches (`shard_watch.py`) | has the kernel forget what it keeps of a changed shard |
| the same process | gives a hint when a name has come or gone in one of the directories |
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
from wdsfs.fuse.child_process import in_child
from wdsfs.fuse.supervisor import Supervisor
from wdsfs.inodes import ROOT
from wdsfs.mount.look_again import Earlier, LeftOut, change_of, look_again
from wdsfs.mount.mounted_set import MountedSet
from wdsfs.mount.reports import SetState
from wdsfs.mount.shard_watch import follower
from wdsfs.shards import Shard
from wdsfs.spec.growth import Change
from wdsfs.tree.numbered_tree import NAME as BY_INDEX

log = logging.getLogger(__name__)

# After a hint: several shards that come together make one change, and a change costs every worker its caches.
PAUSE_SECONDS = 0.05
# Rest between two looks, as a multiple of the duration of the last one: after a look that has found a change, and
# after one that has not. Other files than shards may come and go all the time.
REST_SHARE, REST_SHARE_FOR_NOTHING = 2, 9
WAIT_MIN = 0.5  # seconds between looks at a file that is being written
AGAIN_SECONDS = 5.0  # the pause before a look is repeated because its process failed
LATE_SECONDS = 1.0  # how often to see if workers of an earlier list have ended their work


class Hints:
    """A pipe by which the watching process asks for another look."""

    def __init__(self) -> None:
        self._receiver, self._sender = os.pipe()
        os.set_blocking(self._receiver, False)
        os.set_blocking(self._sender, False)

    def give(self) -> None:
        """Give a hint. Raises nothing."""
        with contextlib.suppress(OSError):  # it is full of hints, or the supervisor is gone
            os.write(self._sender, b"+")

    async def wait(self, seconds: float | None) -> None:
        """Wait for a hint, at most for this time (s)."""
        with trio.move_on_after(float("inf") if seconds is None else seconds):
            await trio.lowlevel.wait_readable(self._receiver)

    def take(self) -> None:
        """Take all hints."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._receiver, 1 << 10):
                pass


class Growth:
    """The set that a mount shows now, `served`, and its growth: expands SHARDS again, relative to `directory`.

    New shards may appear in `directories`.
    """

    def __init__(self, served: MountedSet, directory: str, directories: Sequence[str], state: SetState) -> None:
        self.served, self.state = served, state
        self._directory, self._directories = directory, list(directories)
        self._follow = served.mount.serving.follow
        self._hints = None if self._follow is None else Hints()
        self._looking = trio.Lock()
        self._earlier = Earlier({})
        self._wait: float | None = None  # until a file that is being written may be complete (s)
        self._is_late = False  # the kernel may keep answers from an earlier list
        self._failure = ""  # the last one that was logged

    def follower(self) -> Callable[[Supervisor], None] | None:
        """Return the function that follows changes of the shards, for a process of its own.

        None without inotify.
        """
        if self._hints is None:
            return follower(self.served)
        return follower(self.served, self._directories, self._hints.give)

    def attach(self, supervisor: Supervisor) -> None:
        """Use this supervisor to show changes."""
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
            report = await self.look()
            now = time.monotonic()
            share = REST_SHARE if report["added"] or report["removed"] else REST_SHARE_FOR_NOTHING
            rested = now + share * (now - began)

    async def look(self, *, at_once: bool = False) -> dict[str, Any]:
        """Look, and show the change; returns the answer to `{"do": "refresh"}` (`mount_registry.py`).

        `at_once`: a user has asked, so unreadable shards are tried again.
        """
        async with self._looking:
            earlier = Earlier({}, self._earlier.superseded) if at_once else self._earlier
            fetches = self.supervisor.fetcher is not None
            served, device = self.served, self.supervisor.device
            seen = await in_child(lambda: look_again(served, self._directory, earlier, fetches), device)
            answer = seen or {"error": "looking for shards has failed; see the log of the mount", "left_out": []}
            change = change_of(served, answer)
            left_out = [LeftOut(*row) for row in answer["left_out"]]
            self._note(answer["error"] or answer.get("kept", ""), left_out)
            self._earlier = Earlier({candidate.path: candidate for candidate in left_out})
            waits = [candidate.wait for candidate in left_out if candidate.wait is not None]
            waits += [] if seen else [AGAIN_SECONDS]
            self._wait = max(min(waits), WAIT_MIN) if waits else None
            if change:
                await self._show(change)
            self._watch_directories(answer.get("directories", ()))
            self._write(change, left_out)
            return self._report(served, change, left_out, answer["error"])

    async def derive_rest(self) -> None:
        """Make the part of the view that was left when the mount began."""
        if refusal := (await in_child(self.served.derive, self.supervisor.device)).get("refusal"):
            log.warning("the rest of the view is made when it is used: %s", refusal)

    # --- showing

    async def _show(self, change: Change) -> None:
        """Replace the workers by ones that serve the changed set, and invalidate what the kernel keeps."""
        before = self.served
        self.served = before.grown(change)
        self._earlier = self._earlier._replace(superseded=before.shards)
        gone = [before.shards[number].name for number in change.gone]
        come = [self.served.shards[number].name for number in change.back] + [shard.name for shard in change.new]
        follows = self._late_follower if self.supervisor.follow is not None else None
        is_over = await self.supervisor.exchange(self.served.tree, follows)
        self._is_late = not (await self._invalidate([*gone, *come]) and is_over)
        for what, names in (("come", come), ("gone", gone)):
            if names:
                have = "has" if len(names) == 1 else "have"
                shown = several([os.fsdecode(name) for name in names])
                log.info("%s %s %s: %s", counted(len(names), "shard"), have, what, shown)

    async def _watch_late_workers(self) -> None:
        """Invalidate once more: the kernel may have cached the last answer of a worker of an earlier list.

        Also if the first attempt has failed.
        """
        while True:
            await trio.sleep(LATE_SECONDS)
            if self._is_late and not self.supervisor.serves_earlier_set:
                self._is_late = False
                if not await self._invalidate([shard.name for shard in self.served.shards]):
                    self._is_late = True  # not `|=`, which would forget what `_show` has set meanwhile

    async def _invalidate(self, names: Sequence[bytes]) -> bool:
        """Invalidate these names of the top and all below them; of a merged tree everything.

        Returns False if no process could be started for that.
        """
        notes = [protocol.forget_content(ROOT)]
        if self.served.mount.merge:
            notes += [protocol.forget_all()] * self.supervisor.epochs
        else:
            notes += [protocol.forget_entry(ROOT, name) for name in dict.fromkeys(names)]
        if self.served.mount.tree.index_tree:
            notes.append(protocol.forget_entry(ROOT, BY_INDEX))
        # In a child: the kernel may wait for a directory that a request has locked.
        return bool(await in_child(lambda: self._notify(notes), None))

    def _notify(self, notes: Sequence[bytes]) -> dict[str, Any]:
        for note in notes:
            with contextlib.suppress(OSError):  # the kernel does not know that one
                os.write(self.supervisor.device, note)
        return {"done": True}

    # --- watching

    def _late_follower(self, supervisor: Supervisor) -> None:
        """Run `follower` for a list that is not the first, with its look at the shards in this process."""
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
        """Log new problems."""
        if failure and failure != self._failure:
            log.warning("the mount still shows the same shards as before: %s", failure)
        self._failure = failure
        for candidate in left_out:
            known = self._earlier.left_out.get(candidate.path)
            if known is None or known.why != candidate.why:
                log.log(
                    logging.INFO if candidate.wait is not None else logging.WARNING,
                    "%s is not shown: %s", candidate.path, candidate.why,
                )  # fmt: skip

    def _write(self, change: Change, left_out: Sequence[LeftOut]) -> None:
        state = self.state.read()
        self.state.write(
            {
                **state,
                "looked": time.time(),
                "added": state["added"] + len(change.new) + len(change.back),
                "removed": state["removed"] + len(change.gone),
                "left_out": _left_out_rows(left_out),
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
            "left_out": _left_out_rows(left_out),
            "shards": sum(shard.gone is None for shard in shards),
            "kept": "" if error else self._failure,
            "error": error,
        }


def _named(shard: Shard) -> dict[str, str]:
    return {"name": os.fsdecode(shard.name), "shard": os.fsdecode(shard.path)}


def _left_out_rows(left_out: Sequence[LeftOut]) -> list[dict[str, str]]:
    return [{"shard": candidate.path, "why": candidate.why} for candidate in left_out]
