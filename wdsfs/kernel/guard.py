"""Guards a mounted image: nobody reads a mix of old and new bytes of a shard that is written in place.

The kernel does not look at the times of shards. So the guard holds a read lease (fcntl(2), F_SETLEASE) on each
shard and on the image. A process that opens such a file for writing, or truncates it, then waits until the guard
has released the lease, at most for the time in /proc/sys/fs/lease-break-time. The guard first ends the mount, then
waits until programs have closed all files of the mount, and only then releases the lease. Where a file system has
no leases, the guard compares the times of the files every second.

The guard ignores a shard that is replaced by another file, or removed: the kernel keeps the old file. A guard that
was killed leaves the mount: the next one adopts it.

| what happens | while it is mounted | while it is unmounted, and programs have its files open |
|---|---|---|
| a program opens a shard for writing | unmount, wait for these programs, end | wait for these programs, end |
| SIGTERM, SIGINT or SIGHUP | unmount, wait for these programs, end | wait for these programs, end |
| another such signal | end at once | end at once |
| somebody unmounts it | go on, as long as files are open | |
| the last file is closed | | end |

The wait for programs ends before the kernel would break a lease by force. When the guard ends, it releases the
leases.

The guard is single-threaded and stateless: a signal only wakes the loop, which checks everything again. No command
talks to it: commands read its registration (`mount_registry.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wdsfs import host, mount_registry, mount_table
from wdsfs.errors import MountError, StaleShard, several
from wdsfs.kernel import erofs_mount
from wdsfs.kernel.devices import HeldShards, check_image, superblocks
from wdsfs.kernel.manifest import identity_of
from wdsfs.shared_settings import setting

if TYPE_CHECKING:
    from wdsfs.mount_table import MountPoint

log = logging.getLogger(__name__)

CHECK_SECONDS = 1.0  # how often shards without a lease are looked at, and a mount that is detached but in use
SPARE_SECONDS = 5.0  # before the kernel would break a lease by force; of a short time a quarter
USUAL_SECONDS = 45.0  # that the kernel has a writer wait
BREAK_TIME = Path("/proc/sys/fs/lease-break-time")
_STEP_SECONDS = 0.02
_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded(mount_registry.Registration):
    """The registration of a guard: its process, and what it guards.

    `paths` are those of shards, `inodes` the numbers of the files that the kernel has open; `leased` have a lease.
    `identity` is that of the image, `superblocks` are the kernel's names of the mount, `device` is its number.
    Relative paths in the image are below `base`; `trusting`: the times of shards may be others than in the image.
    Only a guard of an earlier release has an `overlay`, of the kernel's overlayfs above the image.
    """

    image: str
    paths: list[str]
    inodes: list[int]
    leased: int
    identity: str
    superblocks: list[str]
    device: int
    base: str
    trusting: bool

    def is_of(self, mount: MountPoint) -> bool:
        """Return True if this is the mount that it guards, or has guarded; the image may have been removed."""
        is_there = os.fsdecode(mount.path) == self.mountpoint and mount.fstype in ("erofs", "overlay")
        return is_there and (mount.device == self.device or mount.source == os.fsencode(self.image))

    def replaced(self) -> list[str]:
        """Return the paths of shards that were replaced or removed."""
        return [path for path, inode in zip(self.paths, self.inodes, strict=True) if not _is_the_same(path, inode)]


def _is_the_same(shard: str, inode: int) -> bool:
    try:
        return os.stat(shard).st_ino == inode
    except OSError:
        return False


def guard_of(mountpoint: str) -> Guarded | None:
    """Return the guard of the image at this path, alive or not; None if it has ended in good order."""
    return mount_registry.registration_of(mountpoint, Guarded)


class Guard:
    """The guard of a mount of an image over shards, all of which it keeps open.

    `check` raises MountError for a mount point that cannot be used. `specs` are SHARDS, or the image.
    """

    def __init__(
        self,
        held: HeldShards,
        mountpoint: str,
        check: Callable[[Sequence[bytes]], None],
        log_file: Path | None,
        specs: Sequence[str],
    ) -> None:
        self.mountpoint, self.log_file, self.specs = mountpoint, log_file, specs
        self._held, self._check = held, check
        self._has_mounted = False
        self._end_signals = 0
        self._started = time.time()
        self._receiver, self._sender = socket.socketpair()
        self._handlers: dict[int, Any] = {}  # of signals, as they were before

    def take(self) -> None:
        """Take leases, so that every later writer of a shard waits for this process.

        The shards have to be compared afterwards. Raises MountError for a shard that is being written.
        """
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._handlers[signal.SIGIO] = signal.signal(signal.SIGIO, lambda *_: None)
        for number in _ENDS:
            self._handlers[number] = signal.signal(number, self._note_end)
        self._held.take_leases()

    def _note_end(self, *_: object) -> None:
        self._end_signals += 1

    def mount(self, attributes: int) -> None:
        """Mount the image, and note the name of the superblock (and of those that others make at that moment).

        Raises MountError, StaleShard.
        """
        held = self._held
        image, fds = os.fsdecode(held.image.path), [device.fd for device in held.devices]
        # Other guards wait: the kernel does not say which superblock is whose.
        with host.locked(host.runtime_dir() / "superblocks.lock"):
            self._check(())  # another mount may have been made there since the last check
            before = superblocks()
            erofs_mount.mount_image(image, self.mountpoint, fds, attributes)
            held.superblocks = superblocks() - before
        try:
            check_image(held.image)
        except StaleShard:
            erofs_mount.detach(self.mountpoint)
            raise
        self._has_mounted = True
        self._watch()

    def adopt(self, known: Guarded | None) -> None:
        """Guard an existing mount of this image; `known` is the registration of its former guard, if any."""
        current = superblocks()
        self._held.superblocks = self._unknown() if known is None else current & set(known.superblocks)
        self._watch()
        log.warning(
            "%s: guarded again; changes of shards since the last guard ended were not noticed", self.mountpoint
        )

    def _unknown(self) -> set[str]:
        """Return the superblock of a mount whose guard left no registration, or that never had a guard."""
        mounted, current = mount_table.mounted_at(self.mountpoint), superblocks()
        device = "" if mounted is None else os.fsdecode(os.path.basename(mounted.source))
        if device in current:  # by mount(8), on a loop device
            return {device}
        # The kernel does not say which is whose: without inotify those of others are waited for, too.
        others = (guard for guard in mount_registry.registrations(Guarded) if guard.mountpoint != self.mountpoint)
        return current - {name for guard in others for name in guard.superblocks}

    def _watch(self) -> None:
        """Watch for the end of the mount; warn where writers of its shards do not wait."""
        self._held.watch_mount(self.mountpoint)
        for files, reason in (
            (self._held.without_lease(), "their file system gives no lease"),
            (self._held.on_layers(), "their file system shows files of another one, where writers do not wait"),
        ):
            if files:
                log.warning(
                    "%s: %s; so changes are noticed up to a second late, and until then programs may read a mix "
                    "of old and new bytes",
                    *(several(files), reason),
                )

    @contextlib.contextmanager
    def registered(self) -> Iterator[None]:
        """Register this guard, so that commands find it, while the context is open.

        Raises MountError where that cannot be; then the mount has ended, unless it is another guard's.
        """
        registration = self._registration()
        try:
            mount_registry.register(registration)
        except OSError as error:
            if self._has_mounted:
                self._held.end()
            raise MountError(f"{host.runtime_dir()}: cannot create a file there: {error.strerror}") from None
        try:
            yield
        finally:
            mount_registry.forget(registration)

    def close(self) -> None:
        """Release all shards. This process guards nothing any more, and may mount by FUSE now."""
        signal.set_wakeup_fd(-1)
        self._receiver.close()
        self._sender.close()
        self._held.close()
        for number, handler in self._handlers.items():  # now that no lease sends any
            signal.signal(number, handler)

    def _registration(self) -> Guarded:
        held, about, index = self._held, self._held.about, setting("INDEX_DIR")
        return Guarded(
            engine=mount_registry.KERNEL,
            pid=os.getpid(),
            start_ticks=mount_registry.start_ticks(os.getpid()) or 0,
            mountpoint=self.mountpoint,
            specs=[*self.specs],
            started=self._started,
            log=None if self.log_file is None else str(self.log_file),
            layout=about.layout,
            names=about.names,
            merge=about.merge,
            index_tree=about.index_tree,
            composition=about.composition,
            index=os.path.abspath(index) if index else None,
            image=os.fsdecode(held.image.path),
            paths=[os.fsdecode(device.path) for device in held.devices],
            inodes=[os.fstat(device.fd).st_ino for device in held.devices],
            leased=sum(device is not held.image for device in held.leased),
            identity=identity_of(held.image.path),
            superblocks=sorted(held.superblocks),
            device=0 if held.mounted is None else held.mounted.device,
            base=held.base,
            trusting=held.trusting,
        )

    def run(self) -> None:
        """Serve until the mount has ended, by others or because a shard is about to change."""
        with open(mount_table.MOUNTINFO, "rb") as table:
            while self._is_mounted() or self._held.is_used():
                self._sleep(table.fileno())
                with contextlib.suppress(BlockingIOError):
                    self._receiver.recv(4096)
                changing = self._held.changing()
                if changing:
                    self._give_way(changing)
                    return
                if self._end_signals:
                    self._end()
                    return

    def _sleep(self, table: int) -> None:
        """Wait until something may have happened; `table` is the open mount table."""
        poller = select.poll()
        poller.register(self._receiver, select.POLLIN)
        poller.register(table, select.POLLPRI | select.POLLERR)
        if self._held.ending is not None:
            poller.register(self._held.ending, select.POLLIN)
        has_to_look = self._held.is_watching or not self._is_mounted()
        poller.poll(CHECK_SECONDS * 1000 if has_to_look else None)

    def _is_mounted(self) -> bool:
        return self._held.mounted is not None and erofs_mount.filesystem_at(self.mountpoint) == self._held.mounted

    def _end(self) -> None:
        """End the mount after a signal, but let nobody write into shards of which files are still open."""
        self._held.end()
        if self._held.is_used():
            log.info(
                "%s: unmounted; waiting for programs that have its files open (a second signal ends the wait)",
                self.mountpoint,
            )
            if not self._wait_for_users():
                log.warning(
                    "%s: unmounted, but programs still have its files open; the shards are no longer protected "
                    "against writing",
                    self.mountpoint,
                )

    def _give_way(self, changing: Sequence[str]) -> None:
        """End the mount, and wait for its users as long as the writer can be kept waiting."""
        log.warning("%s: a program opens it for writing; so %s is unmounted", several(changing), self.mountpoint)
        self._held.end()
        if not self._wait_for_users():
            log.error(
                "%s: programs still have its files open; from now on they may read a mix of old and new bytes of "
                "%s",
                *(self.mountpoint, several(changing)),
            )

    def _wait_for_users(self) -> bool:
        """Wait until nobody uses the mount; False if somebody does for longer than a writer can wait."""
        deadline = time.monotonic() + writer_seconds()
        while self._held.is_used():
            if time.monotonic() > deadline or self._end_signals > 1:
                return False
            time.sleep(_STEP_SECONDS)
        return True


def writer_seconds() -> float:
    """Return how long a writer waits for readers: less than the kernel makes it wait for a lease."""
    try:
        seconds = float(BREAK_TIME.read_text()) or USUAL_SECONDS  # 0: for ever
    except (OSError, ValueError):
        seconds = USUAL_SECONDS
    return max(seconds - SPARE_SECONDS, seconds * 3 / 4)
