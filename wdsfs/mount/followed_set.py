"""Follows changes under a mount: changed shards and, in a set that grows, new and removed shards.

| process | does what |
|---|---|
| a process that watches (`follow`) | makes the kernel forget its cache of a changed shard |
| the same process | gives a hint when a name appears in one of the directories, or disappears |
| the supervisor (`Growth`) | makes a child look: after a hint, after an interval, and for `wdsfs refresh` |
| the child (`look_again.py`) | expands SHARDS, indexes new shards, answers with the change |
| the supervisor (`Growth`) | replaces the workers by workers of the new list, then makes the kernel ask again |

The process that watches only sleeps in the kernel (inotify), so it notices a change within a millisecond. A
notification may have to wait for a lookup in flight, and then delays no other request. Some changes make no event:
changes on another node of a network file system, and changes behind a link on the way. In a merged tree the kernel
keeps names for long, so the process also looks at all shards from time to time. In other trees the entries of the
mount's top expire soon enough (`read_ops.CHANGE_SECONDS`).

Only the supervisor writes the list of shards, and workers get it by the fork. So all workers switch together: a
worker of the old list or of the new list answers a request. After `Supervisor.exchange` only workers of the new
list answer. A killed child or worker changes nothing: the next look finds the same changes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import trio
from inotify_simple import INotify, flags

from wdsfs.door.shard_door import DOOR
from wdsfs.door.urls import is_remote
from wdsfs.errors import ShardError, WdsfsError, counted, several
from wdsfs.fuse import protocol
from wdsfs.fuse.child_process import in_child
from wdsfs.fuse.supervisor import Supervisor
from wdsfs.inodes import ROOT
from wdsfs.mount.look_again import Earlier, LeftOut, change_of, look_again
from wdsfs.mount.mounted_set import MountedSet
from wdsfs.mount.reports import SetState
from wdsfs.shards import GONE, Fingerprint, Shard
from wdsfs.spec import objects
from wdsfs.spec.growth import Change
from wdsfs.tree.freshness import Generations
from wdsfs.tree.numbered_tree import NAME as BY_INDEX

log = logging.getLogger(__name__)

NOTE_SECONDS = 0.02  # between two notifications: a writer of a shard causes thousands of events
# Interval of requests to stores for changes of remote shards, and the shortest pause between two rounds. `Watch`
# needs some seconds more to notice a change; the documentation promises a minute.
ASK_SECONDS, ASK_PAUSE_SECONDS = 50.0, 5.0
SCAN_SECONDS, SCAN_SECONDS_EACH = 2.0, 0.002  # interval of looks at shards, and the addition for each shard

# After a hint: new shards of one moment should make one change, because a change costs each worker its caches.
PAUSE_SECONDS = 0.05
# Rest between two looks, as a multiple of the duration of the last look: after a change, and after a look without
# a change. Other files than shards may appear and disappear all the time.
REST_SHARE, REST_SHARE_FOR_NOTHING = 2, 9
WAIT_MIN = 0.5  # seconds between looks at a file that is being written
AGAIN_SECONDS = 5.0  # pause after a look whose process failed
LATE_SECONDS = 1.0  # interval of checks that workers of an earlier list have ended

_CONTENT = flags.MODIFY | flags.ATTRIB | flags.CLOSE_WRITE
_NAME = flags.CREATE | flags.DELETE | flags.MOVED_FROM | flags.MOVED_TO


# --- watching: a process of its own


class Watch:
    """Watches the directories of the shards of a set, and the directories of the targets of links among them.

    With `look` it also looks at the shards themselves. `companions` are label files and joined shards. It calls
    `on_names` when a name appears or disappears in one of `directories`, or a file there is complete. Raises
    OSError if the kernel watches no (more) directories.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        companions: Sequence[bytes] = (),
        directories: Sequence[str] = (),
        on_names: Callable[[], None] = lambda: None,
        *,
        look: bool = False,
    ) -> None:
        self.shards, self.on_names = shards, on_names
        self._notify = INotify()
        self._followed: set[int] = set()
        self._is_blind = False  # a followed directory was removed; a new one may get its name
        self._names: dict[int, dict[bytes, set[int]]] = {}
        self._watches: dict[bytes, int] = {}
        everything = set(range(len(shards)))
        try:
            for number, shard in enumerate(shards):
                if shard.gone is None:
                    self._add(shard.path, {number})
            for path in companions:
                self._add(path, everything)
            for directory in directories:
                self._follow(os.fsencode(directory))
        except BaseException:
            self._notify.close()
            raise
        self._pause = SCAN_SECONDS + SCAN_SECONDS_EACH * len(shards) if look else None
        self._next = time.monotonic() + (self._pause or 0)  # time of the next look
        self._companions = companions
        files = (*(shard.path for shard in shards if shard.gone is None), *companions)
        self.remote = [path for path in files if is_remote(path)]
        self._seen, self._seen_companions = self._fingerprints(first=True) if look else ([], [])

    def _add(self, file: bytes, numbers: set[int]) -> None:
        """Watch this file. A change of the file counts as a change of the shards with these numbers."""
        for path in () if is_remote(file) else _paths_to_watch(file):
            directory, name = os.path.split(path)
            if directory not in self._watches:
                self._watches[directory] = self._notify.add_watch(directory, _CONTENT | _NAME)
            names = self._names.setdefault(self._watches[directory], {})
            names[name] = names[name] | numbers if name in names else numbers

    def _follow(self, directory: bytes) -> None:
        """Watch a directory for new names."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            if directory not in self._watches:
                self._watches[directory] = self._notify.add_watch(directory, _CONTENT | _NAME)
            self._followed.add(self._watches[directory])

    def wait(self, life: int) -> set[int] | None:
        """Return the numbers of changed shards; None when watching ends.

        Watching ends when `life`, the reading end of a pipe, has no writer any more, and when a followed directory
        was removed: then make a new `Watch`.
        """
        poll = select.poll()
        poll.register(self._notify.fd, select.POLLIN)
        poll.register(life, 0)  # poll reports hangups without a flag
        while True:
            ready = poll.poll(None if self._pause is None else max(self._next - time.monotonic(), 0) * 1000)
            if any(fd == life for fd, _ in ready):
                return None
            changed = self._read() if ready else set()
            if self._is_blind:
                return None
            if self._pause is not None and time.monotonic() >= self._next:
                changed |= self._look()
                self._next = time.monotonic() + self._pause
            if changed:
                return changed

    def _read(self) -> set[int]:
        changed: set[int] = set()
        appeared = False
        for event in self._notify.read(timeout=0):
            if event.mask & flags.Q_OVERFLOW:
                self.on_names()
                return set(range(len(self.shards)))
            changed |= self._names.get(event.wd, {}).get(os.fsencode(event.name), set())
            self._is_blind |= event.wd in self._followed and bool(event.mask & flags.IGNORED)
            appeared |= event.wd in self._followed and bool(event.mask & (_NAME | flags.CLOSE_WRITE))
        if appeared:
            self.on_names()
        return changed

    def _fingerprints(self, *, first: bool = False) -> tuple[list[Fingerprint | None], list[Fingerprint]]:
        """Return the fingerprints of the shards and of the companions.

        None for a shard that agrees with the list that names it. The first look assumes this of every shard.
        """
        states = [GONE if shard.gone is not None else _state(shard.path, first) for shard in self.shards]
        return states, list(map(_fingerprint, self._companions))

    def _look(self) -> set[int]:
        before, companions = self._seen, self._seen_companions
        self._seen, self._seen_companions = self._fingerprints()
        if companions != self._seen_companions:
            return set(range(len(self.shards)))
        return {number for number, seen in enumerate(self._seen) if seen != before[number]}


def _state(path: bytes, first: bool) -> Fingerprint | None:
    """Return the fingerprint of a shard; None if it agrees with the list that names it."""
    if first and DOOR.is_presumed(path):
        return None
    presumed, now = DOOR.presumed_pin(path), _fingerprint(path)
    return None if presumed is not None and presumed.fingerprint(os.fsdecode(path)) == now else now


def _fingerprint(path: bytes) -> Fingerprint:
    try:
        return DOOR.look(path) if is_remote(path) else Fingerprint.of(os.stat(path))
    except (OSError, ShardError):
        return GONE


def _paths_to_watch(path: bytes) -> list[bytes]:
    return [path, os.path.realpath(path)] if os.path.islink(path) else [path]


def follow(watch: Watch, device: int, life: int, tags: Generations, epochs: bool) -> None:
    """Invalidate the caches of the kernel and of all processes of the mount whenever a shard changes.

    Returns when `life`, the reading end of a pipe, has no writer any more: all processes that serve the mount have
    ended. (The device would tell this, too, but each request wakes every process that polls the device.) `epochs`:
    the kernel can invalidate everything at once (Linux 6.16). For an older kernel, `follow` invalidates only the
    directories of the changed shards, which a merged tree does not have.
    """
    watch.on_names()  # for changes before the watch began
    if watch.remote:
        threading.Thread(target=_ask_stores, args=(watch.remote,), daemon=True).start()
    while (changed := watch.wait(life)) is not None:
        tags.alarm(notified=True)
        names = [watch.shards[number].name for number in changed]
        for note in [protocol.forget_all()] if epochs else [protocol.forget_entry(ROOT, name) for name in names]:
            try:
                os.write(device, note)
            except OSError as error:
                if error.errno != errno.ENOENT:  # the kernel does not know the name
                    log.debug("the kernel's cache was not invalidated after a change: %s", error)
        time.sleep(NOTE_SECONDS)


def _ask_stores(paths: Sequence[bytes]) -> None:
    """Repeatedly ask the stores for the state of these shards; `Watch` then sees a change."""
    start, took = 0, 0.0
    while True:
        time.sleep(max(ASK_SECONDS - took, ASK_PAUSE_SECONDS))
        begun = time.monotonic()
        try:
            start = objects.ask_again([os.fsdecode(path) for path in paths], start)
        except WdsfsError as error:
            log.debug("the stores of remote shards were not asked for changes: %s", error)
        took = time.monotonic() - begun


# --- a set that grows: the supervisor


class Hints:
    """A pipe by which the watching process asks for another look."""

    def __init__(self) -> None:
        self._receiver, self._sender = os.pipe()
        os.set_blocking(self._receiver, False)
        os.set_blocking(self._sender, False)

    def give(self) -> None:
        """Give a hint. Raises nothing."""
        with contextlib.suppress(OSError):  # the pipe is full, or the supervisor has ended
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
    """The current set of a mount, `served`, and its growth: expands SHARDS again, relative to `directory`.

    New shards may appear in `directories`. `supervisor`, set before `run`, shows the changes.
    """

    supervisor: Supervisor

    def __init__(self, served: MountedSet, directory: str, directories: Sequence[str], state: SetState) -> None:
        self.served, self.state = served, state
        self._directory, self._directories = directory, list(directories)
        self._follow = served.mount.serving.follow
        self._hints = None if self._follow is None else Hints()
        self._looking = trio.Lock()
        self._earlier = Earlier({})
        self._wait: float | None = None  # time (s) until an unfinished file may be complete
        self._is_late = False  # True while the kernel may keep answers from an earlier list
        self._failure = ""  # the last logged failure

    def follower(self) -> Callable[[Supervisor], None] | None:
        """Return the function that follows changes of the shards, for its own process; None without inotify.

        In a set that grows, the function gives a hint when a name appears or disappears in one of the directories.
        """
        served, hints = self.served, self._hints
        directories, on_names = ((), lambda: None) if hints is None else (self._directories, hints.give)
        look = served.mount.merge or any(map(is_remote, served.files))
        try:
            seen = Watch(served.shards, served.companions.files, directories, on_names, look=look)
        except OSError as error:
            log.warning(
                "the mount notices changes of shards a second late, because inotify is unavailable: %s",
                error.strerror,
            )
            return None
        return lambda supervisor: follow(seen, supervisor.device, supervisor.life, served.tags, supervisor.epochs)

    async def run(self) -> None:
        """Look again and again until the mount ends, if it follows its set."""
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
        """Look, and show the change; return the answer to `{"do": "refresh"}` (`mount_registry.py`).

        `at_once`: a user has asked, so try unreadable shards again.
        """
        async with self._looking:
            earlier = Earlier({}, self._earlier.superseded) if at_once else self._earlier
            fetches = self.supervisor.fetcher is not None
            served, device = self.served, self.supervisor.device
            seen = await in_child(lambda: look_again(served, self._directory, earlier, fetches), device)
            answer = seen or {"error": "the look for shards failed; see the log of the mount", "left_out": []}
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
        """Make the rest of the view, which the start of the mount skipped."""
        if refusal := (await in_child(self.served.derive, self.supervisor.device)).get("refusal"):
            log.warning("the mount makes the rest of the view at its first use: %s", refusal)

    # --- showing

    async def _show(self, change: Change) -> None:
        """Replace the workers by workers that serve the changed set, and invalidate the kernel's caches."""
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

        Call this also after a failed first attempt.
        """
        while True:
            await trio.sleep(LATE_SECONDS)
            if self._is_late and not self.supervisor.serves_earlier_set:
                self._is_late = False
                if not await self._invalidate([shard.name for shard in self.served.shards]):
                    self._is_late = True  # not `|=`, which would forget a value that `_show` has set meanwhile

    async def _invalidate(self, names: Sequence[bytes]) -> bool:
        """Invalidate these names of the top and all below them; in a merged tree, everything.

        Returns False if no process could be started for this.
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
        """Run `follower` for a later list, with its first look at the shards in this process."""
        follow = self.follower()
        if follow is not None:
            follow(supervisor)
            return
        poll = select.poll()  # without inotify: only wait for the end of the workers
        poll.register(supervisor.life, 0)
        poll.poll()

    def _watch_directories(self, directories: Sequence[str]) -> None:
        """Also watch these directories, if they are new."""
        if self._hints is None or set(directories) <= set(self._directories):
            return
        self._directories = list(directories)
        if self.supervisor.follow is not None:
            self.supervisor.follow = self._late_follower
            self.supervisor.restart_follower()

    # --- reporting

    def _note(self, failure: str, left_out: Sequence[LeftOut]) -> None:
        """Log new problems."""
        if failure and failure != self._failure:
            log.warning("the mount still shows the same shards: %s", failure)
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
