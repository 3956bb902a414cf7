"""Follows changes of shards while they are mounted, and invalidates what the kernel keeps of them.

A process of its own: it sleeps in the kernel (inotify) and does nothing else, so a change is known within a
millisecond, and a notification that has to wait for a lookup in flight holds nobody up. Not every change makes an
event: one made on another node of a network file system does not, nor one behind a link on the way to a shard. In
one tree over all shards, where the kernel keeps names for long, all shards are looked at from time to time, too.
Elsewhere the entries of the mount's top run out soon enough (`read_ops.CHANGE_SECONDS`).
"""

from __future__ import annotations

import errno
import logging
import os
import select
import time
from collections.abc import Callable, Sequence

from inotify_simple import INotify, flags

from wdsfs.dataset.generations import Generations
from wdsfs.fuse import protocol
from wdsfs.fuse.supervisor import Supervisor
from wdsfs.inodes import ROOT
from wdsfs.mount.mounted_set import MountedSet
from wdsfs.spec.expand import Shard

log = logging.getLogger(__name__)

PAUSE_SECONDS = 0.02  # between two notifications: a shard that is being written gives thousands of events
LOOK_SECONDS, LOOK_SECONDS_EACH = 2.0, 0.002  # how often shards are looked at, and what each adds to that

_CONTENT = flags.MODIFY | flags.ATTRIB | flags.CLOSE_WRITE
_NAME = flags.CREATE | flags.DELETE | flags.MOVED_FROM | flags.MOVED_TO


class Watch:
    """The directories that the shards of a set, and the files that they are links to, lie in.

    With `look` the shards themselves are looked at, too. `companions` are files that what is shown of every shard
    depends on. Raises OSError when the kernel watches no (more) directories.
    """

    def __init__(self, shards: Sequence[Shard], look: bool = False, companions: Sequence[bytes] = ()) -> None:
        self.shards = shards
        self._notify = INotify()
        self._names: dict[int, dict[bytes, set[int]]] = {}
        self._watches: dict[bytes, int] = {}
        everything = set(range(len(shards)))
        try:
            for number, shard in enumerate(shards):
                self._add(shard.path, {number})
            for path in companions:
                self._add(path, everything)
        except BaseException:
            self._notify.close()
            raise
        self._pause = LOOK_SECONDS + LOOK_SECONDS_EACH * len(shards) if look else None
        self._next = time.monotonic() + (self._pause or 0)  # when they are looked at again
        self._companions = companions
        self._seen, self._seen_companions = self._stamps() if look else ([], [])

    def _add(self, file: bytes, numbers: set[int]) -> None:
        """Have a change of this file be one of the shards with these numbers."""
        for path in _places(file):
            directory, name = os.path.split(path)
            if directory not in self._watches:
                self._watches[directory] = self._notify.add_watch(directory, _CONTENT | _NAME)
            names = self._names.setdefault(self._watches[directory], {})
            names[name] = names[name] | numbers if name in names else numbers

    def wait(self, *ends: int) -> set[int] | None:
        """Numbers of shards that something has happened to; None when one of the descriptors `ends` has: the file
        system is gone, or everybody who serves it."""
        poll = select.poll()
        poll.register(self._notify.fd, select.POLLIN)
        for end in ends:
            poll.register(end, 0)  # an error or a hangup is told without being asked for
        while True:
            ready = poll.poll(None if self._pause is None else max(self._next - time.monotonic(), 0) * 1000)
            if any(fd in ends for fd, _ in ready):
                return None
            changed = self._read() if ready else set()
            if self._pause is not None and time.monotonic() >= self._next:
                changed |= self._look()
                self._next = time.monotonic() + self._pause
            if changed:
                return changed

    def _read(self) -> set[int]:
        changed: set[int] = set()
        for event in self._notify.read(timeout=0):
            if event.mask & flags.Q_OVERFLOW:
                return set(range(len(self.shards)))
            changed |= self._names.get(event.wd, {}).get(os.fsencode(event.name), set())
        return changed

    def _stamps(self) -> tuple[list[Stamp], list[Stamp]]:
        """Of the shards, and of what they are shown with."""
        return [_stamp(shard.path) for shard in self.shards], list(map(_stamp, self._companions))

    def _look(self) -> set[int]:
        before, companions = self._seen, self._seen_companions
        self._seen, self._seen_companions = self._stamps()
        if companions != self._seen_companions:
            return set(range(len(self.shards)))
        return {number for number, seen in enumerate(self._seen) if seen != before[number]}


Stamp = tuple[int, int, int] | None


def _stamp(path: bytes) -> Stamp:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns


def _places(path: bytes) -> list[bytes]:
    return [path, os.path.realpath(path)] if os.path.islink(path) else [path]


def follow(watch: Watch, device: int, life: int, tags: Generations, epochs: bool) -> None:
    """Have the kernel, and all processes of the mount, look again whenever a shard changes.

    Returns at the unmount, or when `life`, the reading end of a pipe, has no writer any more. `epochs` says that
    the kernel can be told to ask again for everything (Linux 6.16); an older one is told of the directories of the
    changed shards, which one tree over all shards does not have.
    """
    while (changed := watch.wait(device, life)) is not None:
        tags.alarm(heard=True)
        names = [watch.shards[number].name for number in changed]
        for note in [protocol.forget_all()] if epochs else [protocol.forget_entry(ROOT, name) for name in names]:
            try:
                os.write(device, note)
            except OSError as error:
                if error.errno != errno.ENOENT:  # the kernel does not know that name
                    log.debug("the kernel was not told of a change: %s", error)
        time.sleep(PAUSE_SECONDS)


def follower(served: MountedSet) -> Callable[[Supervisor], None] | None:
    """What follows the changes of the shards, in a process of its own; None if inotify is unavailable."""
    try:
        seen = Watch(served.shards, look=served.mount.merge, companions=served.companions.files)
    except OSError as error:
        log.warning("a change of a shard is noticed a second late: inotify: %s", error.strerror)
        return None
    return lambda engine: follow(seen, engine.device, engine.life, served.tags, engine.epochs)
