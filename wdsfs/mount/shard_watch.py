"""Watches the shards of a mount: has the kernel forget what it keeps of a changed one, and hints at new names.

This is the work of a process of its own (`follow`). It sleeps in the kernel (inotify) and does nothing else, so a
change is known within a millisecond, and a notification that has to wait for a lookup in flight delays no other
request. Not every change makes an event: one made on another node of a network file system does not, nor one
beyond a link on the way. In one tree over all shards, where the kernel keeps names for long, all shards are looked
at from time to time, too. Elsewhere the entries of the mount's top run out soon enough
(`read_ops.CHANGE_SECONDS`). What new names mean is decided in `followed_set.py`.
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

from inotify_simple import INotify, flags

from wdsfs.door.shard_door import DOOR
from wdsfs.door.urls import is_remote
from wdsfs.errors import ShardError, WdsfsError
from wdsfs.fuse import protocol
from wdsfs.fuse.supervisor import Supervisor
from wdsfs.inodes import ROOT
from wdsfs.mount.mounted_set import MountedSet
from wdsfs.shards import GONE, Fingerprint, Shard
from wdsfs.spec import objects
from wdsfs.tree.freshness import Generations

log = logging.getLogger(__name__)

NOTE_SECONDS = 0.02  # between two notifications: a shard that is being written gives thousands of events
# How often stores are asked for changes of remote shards, and the shortest pause between two rounds. `Watch` needs
# some seconds more to notice a change, and the documentation promises a minute.
ASK_SECONDS, ASK_PAUSE_SECONDS = 50.0, 5.0
SCAN_SECONDS, SCAN_SECONDS_EACH = 2.0, 0.002  # how often shards are looked at, and what each adds to that

_CONTENT = flags.MODIFY | flags.ATTRIB | flags.CLOSE_WRITE
_NAME = flags.CREATE | flags.DELETE | flags.MOVED_FROM | flags.MOVED_TO


class Watch:
    """Watches the directories of the shards of a set, and of the files that links among them lead to.

    With `look` the shards themselves are looked at, too. `companions` are files that every shard is shown with.
    `on_names` is called when a name has come or gone in one of `directories`, or a file there is complete. Raises
    OSError when the kernel watches no (more) directories.
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
        self._is_blind = False  # a followed directory is gone; another of that name may come
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
        self._next = time.monotonic() + (self._pause or 0)  # when they are looked at again
        self._companions = companions
        files = (*(shard.path for shard in shards if shard.gone is None), *companions)
        self.remote = [path for path in files if is_remote(path)]
        self._seen, self._seen_companions = self._fingerprints(first=True) if look else ([], [])

    def _add(self, file: bytes, numbers: set[int]) -> None:
        """Watch this file; its changes count as changes of the shards with these numbers."""
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
        """Return the numbers of shards that events are about; None when watching ends.

        It ends when `life`, the reading end of a pipe, has no writer any more, and when a followed directory is
        gone: then watch again.
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
        """Return the fingerprints of the shards, and of the files that they are shown with.

        None for a shard that is as the list that names it says: at first that is presumed.
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
    """Return the fingerprint of a shard; None if it is as the list that names it says."""
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
    """Invalidate what the kernel, and all processes of the mount, have cached whenever a shard changes.

    Returns when `life`, the reading end of a pipe, has no writer any more: all processes that serve the mount have
    ended, as they do at the unmount. (The device would say so, too, but each request wakes every process that
    polls it.) `epochs` says that the kernel can invalidate everything at once (Linux 6.16); on an older one only
    the directories of the changed shards are invalidated, which one tree over all shards does not have.
    """
    watch.on_names()  # what came or went before it began to watch
    if watch.remote:
        threading.Thread(target=_ask_stores, args=(watch.remote,), daemon=True).start()
    while (changed := watch.wait(life)) is not None:
        tags.alarm(notified=True)
        names = [watch.shards[number].name for number in changed]
        for note in [protocol.forget_all()] if epochs else [protocol.forget_entry(ROOT, name) for name in names]:
            try:
                os.write(device, note)
            except OSError as error:
                if error.errno != errno.ENOENT:  # the kernel does not know that name
                    log.debug("the kernel's cache was not invalidated after a change: %s", error)
        time.sleep(NOTE_SECONDS)


def _ask_stores(paths: Sequence[bytes]) -> None:
    """Ask the stores again and again what these shards are now; a change is then seen by `Watch`."""
    start, took = 0, 0.0
    while True:
        time.sleep(max(ASK_SECONDS - took, ASK_PAUSE_SECONDS))
        begun = time.monotonic()
        try:
            start = objects.ask_again([os.fsdecode(path) for path in paths], start)
        except WdsfsError as error:
            log.debug("the stores of remote shards were not asked for changes: %s", error)
        took = time.monotonic() - begun


def follower(
    served: MountedSet,
    directories: Sequence[str] = (),
    on_names: Callable[[], None] = lambda: None,
) -> Callable[[Supervisor], None] | None:
    """Return the function that follows changes of the shards, for a process of its own; None without inotify.

    It calls `on_names` when a name has come or gone in one of `directories`.
    """
    try:
        remote = any(is_remote(path) for path in served.files)
        look = served.mount.merge or remote
        seen = Watch(served.shards, served.companions.files, directories, on_names, look=look)
    except OSError as error:
        log.warning(
            "a change of a shard is noticed a second late, because inotify is unavailable: %s", error.strerror
        )
        return None
    return lambda supervisor: follow(seen, supervisor.device, supervisor.life, served.tags, supervisor.epochs)
