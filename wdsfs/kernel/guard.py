"""Guards a mounted image: nobody reads a mix of old and new bytes of a shard that is written in place.

The kernel does not look at the times of shards. So the guard holds a read lease (fcntl(2), F_SETLEASE) on each
shard and on the image. A process that opens such a file for writing, or truncates it, then waits until the guard
has released the lease, at most for the time in /proc/sys/fs/lease-break-time. The guard first ends the mount, then
waits until programs have closed all files of the mount, and only then releases the lease. Where a file system has
no leases, the guard compares the times of the files every second.

The guard ignores a shard that is replaced by another file, or removed: the kernel keeps the old file. `wdsfs
refresh` then makes a new image, and the guard mounts it in the place of the old one. It holds the shards of the
old image until the last file of that mount is closed. A guard that was killed leaves the mount: the next one
adopts it.

In the place of a compressed or remote shard the kernel reads a copy in the cache. The copy is guarded, so the
mount goes on showing the old content whatever happens to the shard itself. Protecting the copy from eviction needs
no guard (`storage/held_files.py`).

Above an image there may be an overlay of the kernel. Then there is only the overlay's mount, which keeps the image
in use, and the guard has the overlay's lock until the last file of that mount is closed.

The guard is single-threaded and stateless: a signal only wakes the loop, which checks everything again. At
its socket (`mount_registry.py`) it answers `{"do": "exchange", "image", "base", "trusting", "shards"}` by
`{"done": true}` or `{"error": text}`.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from wdsfs import host, mount_registry, mount_table
from wdsfs.errors import MountError, StaleShard, WdsfsError, several
from wdsfs.kernel import erofs_mount, manifest
from wdsfs.kernel.devices import (
    HeldShards,
    check_devices,
    check_image,
    is_copy_of,
    open_image,
    raise_file_limit,
    superblocks,
)
from wdsfs.kernel.manifest import identity_of

if TYPE_CHECKING:
    from wdsfs.kernel.overlayfs import OverlayOver
    from wdsfs.mount_table import MountPoint
    from wdsfs.overlay.mounted_overlay import MountedOverlay

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # how often shards without a lease are looked at, and a mount that is detached but in use
SPARE_SECONDS = 5.0  # before the kernel would break a lease by force; of a short time a quarter
USUAL_SECONDS = 45.0  # that the kernel has a writer wait
BREAK_TIME = Path("/proc/sys/fs/lease-break-time")
_STEP_SECONDS = 0.02
_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class MadeBy(NamedTuple):
    """The command of a mount, which `wdsfs refresh` repeats: arguments, working directory, environment.

    `environment` has only the variables that say where the index is.
    """

    arguments: list[str]
    directory: str
    environment: dict[str, str]

    @property
    def index_directory(self) -> str | None:
        """The directory of the index, None for the usual one."""
        named = self.environment.get("WDSFS_INDEX_DIR")
        return None if named is None else os.path.join(self.directory, named)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded(mount_registry.Registration):
    """The registration of a guard: its process, and what it guards.

    `paths` are those of shards, `inodes` the numbers of the files that the kernel has open; `leased` have a lease.
    `copies` are the paths of files that it reads in the place of shards, empty for a shard that it reads itself.
    `identity` is that of the image, `superblocks` are the kernel's names of the mount, `device` is its number;
    `made` is the command. Relative paths in the image are below `base`; `trusting`: the times of shards may be
    others than in the image. With an overlay: the `shards` below it (paths and names), how they are read, and the
    `options` of `-o`, which a new image takes.
    """

    image: str
    paths: list[str]
    inodes: list[int]
    leased: int
    copies: list[str]
    identity: str
    superblocks: list[str]
    device: int
    base: str
    trusting: bool
    made: MadeBy | None = None
    shards: list[list[str]] = field(default_factory=list)
    reading: dict[str, bool] = field(default_factory=dict)
    options: list[str] = field(default_factory=list)

    @classmethod
    def parse(cls, content: dict[str, Any]) -> Self:
        made = content["made"]
        return cls(**cls.known({**content, "made": None if made is None else MadeBy(*made)}))

    def is_of(self, mount: MountPoint) -> bool:
        """Return True if this is the mount that it guards, or has guarded; the image may have been removed."""
        is_there = os.fsdecode(mount.path) == self.mountpoint and mount.fstype in ("erofs", "overlay")
        return is_there and (mount.device == self.device or mount.source == os.fsencode(self.image))

    def replaced(self) -> list[str]:
        """Return the paths of shards that were replaced or removed, also where the kernel reads a copy."""
        shards = zip(self.paths, self.inodes, self.copies, strict=True)
        return [path for path, inode, copy in shards if not _is_the_same(path, inode, copy)]


def _is_the_same(shard: str, inode: int, copy: str) -> bool:
    if copy:
        return is_copy_of(shard, copy)
    try:
        return os.stat(shard).st_ino == inode
    except OSError:
        return False


def guard_of(mountpoint: str) -> Guarded | None:
    """Return the guard of the image at this path, alive or not; None if it has ended in good order."""
    return mount_registry.registration_of(mountpoint, Guarded)


class Guard:
    """The guard of a mount of an image over shards, all of which it keeps open.

    `check` raises MountError for a mount point that cannot be used. `over` is the overlay that comes above the
    image.
    """

    def __init__(
        self,
        held: HeldShards,
        mountpoint: str,
        check: Callable[[Sequence[bytes]], None],
        log_file: Path | None,
        made: MadeBy | None = None,
        over: OverlayOver | None = None,
    ) -> None:
        self.mountpoint, self.log_file, self.made = mountpoint, log_file, made
        self._held, self._before = held, list[HeldShards]()
        self._check, self._over = check, over
        self._overlay: MountedOverlay | None = None
        self._listener: socket.socket
        self._attributes = 0
        self._has_mounted = False
        self._end_signals = 0
        self._started = time.time()
        self._receiver, self._sender = socket.socketpair()
        self._handlers: dict[int, Any] = {}  # of signals, as they were before

    def take(self, is_there: bool = False) -> None:
        """Take the overlay, and leases so that every later writer of a shard waits for this process.

        `is_there`: the kernel has the overlay mounted already, without a guard. The shards have to be compared
        afterwards. Raises MountError for a shard that is being written, OverlayUnusable, OverlayBusy.
        """
        if self._over is not None:
            self._overlay = self._over.taken(self.mountpoint if is_there else None)
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._handlers[signal.SIGIO] = signal.signal(signal.SIGIO, lambda *_: None)
        for number in _ENDS:
            self._handlers[number] = signal.signal(number, self._note_end)
        self._held.take_leases()

    def _note_end(self, *_: object) -> None:
        self._end_signals += 1

    def mount(self, attributes: int, instead: bool = False) -> None:
        """Mount the image; with `instead`, in the place of the present mount. Raises MountError."""
        if self._over is not None:
            self._over.set_who_enters()
        self._mount(self._held, attributes, instead)
        self._has_mounted = True
        self._settle(attributes)

    def _mount(self, held: HeldShards, attributes: int, instead: bool) -> None:
        """Mount the image, and note the name of the superblock (and of those that others make at that moment).

        Raises MountError, StaleShard.
        """
        # Other guards wait: the kernel does not say which superblock is whose.
        with host.locked(host.runtime_dir() / "superblocks.lock"):
            if not instead:  # another mount may have been made there since the last check
                self._check(())
            before = superblocks()
            self._ask_kernel(held, attributes, instead)
            held.superblocks = superblocks() - before
        try:
            check_image(held.image)
        except StaleShard:
            erofs_mount.detach(self.mountpoint)
            raise

    def _ask_kernel(self, held: HeldShards, attributes: int, instead: bool) -> None:
        image, fds = os.fsdecode(held.image.path), [device.fd for device in held.devices]
        if self._over is not None:
            self._over.mount(image, self.mountpoint, fds, attributes, instead)
        else:
            mount = erofs_mount.exchange_image if instead else erofs_mount.mount_image
            mount(image, self.mountpoint, fds, attributes)

    def adopt(self, attributes: int, known: Guarded | None) -> None:
        """Guard an existing mount of this image; `known` is the registration of its former guard, if any."""
        current = superblocks()
        self._held.superblocks = self._unknown() if known is None else current & set(known.superblocks)
        self._settle(attributes)
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

    def _settle(self, attributes: int) -> None:
        self._attributes = attributes
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

    def exchange(self, image: str, base: str, trusting: bool) -> None:
        """Mount this image in the place of the present one. After a WdsfsError nothing has changed."""
        if self._over is not None:
            self._over.refuse_writable(self.mountpoint)
        held = HeldShards(open_image(image))
        try:
            about = manifest.read(image)
            raise_file_limit(2 * len(about.devices))
            held.open_shards(about, base, trusting)
            held.take_leases()
            check_devices(held.devices, about, trusting)
            self._mount(held, self._attributes, instead=True)
        except BaseException:
            held.close()
            raise
        self._before.append(self._held)
        self._held = held
        self._settle(self._attributes)

    @contextlib.contextmanager
    def registered(self) -> Iterator[None]:
        """Register this guard, so that commands find it, while the context is open.

        Raises MountError where that cannot be; then the mount has ended, unless it is another guard's.
        """
        with contextlib.ExitStack() as stack:
            try:
                self._listener = stack.enter_context(mount_registry.listening(self.mountpoint))
                registration = self._registration()
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
        for held in (self._held, *self._before):
            held.close()
        for number, handler in self._handlers.items():  # now that no lease sends any
            signal.signal(number, handler)

    def _registration(self) -> Guarded:
        held, about = self._held, self._held.about
        own = Guarded(
            engine=mount_registry.KERNEL,
            pid=os.getpid(),
            start_ticks=mount_registry.start_ticks(os.getpid()) or 0,
            mountpoint=self.mountpoint,
            specs=[os.fsdecode(held.image.path)],
            started=self._started,
            log=None if self.log_file is None else str(self.log_file),
            layout=about.layout,
            names=about.names,
            merge=about.merge,
            index_tree=about.index_tree,
            composition=about.composition,
            index=None if self.made is None else self.made.index_directory,
            image=os.fsdecode(held.image.path),
            paths=[os.fsdecode(device.path) for device in held.devices],
            inodes=[os.fstat(device.fd).st_ino for device in held.devices],
            leased=sum(device is not held.image for device in held.leased),
            copies=[device.copy for device in held.devices],
            identity=identity_of(held.image.path),
            superblocks=sorted(held.superblocks),
            device=0 if held.mounted is None else held.mounted.device,
            base=held.base,
            trusting=held.trusting,
            made=self.made,
        )
        return own if self._over is None else replace(own, **self._over.registered())

    def run(self) -> None:
        """Serve until the mount has ended, by others or because a shard is about to change."""
        with open(mount_table.MOUNTINFO, "rb") as table:
            while True:
                self._sleep(table.fileno())
                with contextlib.suppress(BlockingIOError):
                    self._receiver.recv(4096)
                changing = self._held.changing()
                if changing:
                    self._give_way(changing)
                    break
                if self._end_signals:
                    self._end()
                    break
                self._let_go()
                mount_registry.answer_client(self._listener, self._answer)
                if not self._is_mounted() and not self._is_used():
                    break
        if self._over is not None and not self._is_used():
            self._over.clean_work()

    def _sleep(self, table: int) -> None:
        """Wait until something may have happened; `table` is the open mount table."""
        poller = select.poll()
        poller.register(self._receiver, select.POLLIN)
        poller.register(self._listener, select.POLLIN)
        poller.register(table, select.POLLPRI | select.POLLERR)
        for held in (self._held, *self._before):
            if held.ending is not None:
                poller.register(held.ending, select.POLLIN)
        poller.poll(self._patience())

    def _patience(self) -> float | None:
        """Return how long the loop may sleep (ms) when nothing wakes it; None: for ever."""
        if any(held.deadline is not None for held in self._before):
            return _STEP_SECONDS * 1000
        has_to_look = self._held.is_watching or self._before or not self._is_mounted()
        return LOOK_SECONDS * 1000 if has_to_look else None

    def _let_go(self) -> None:
        """Release the shards of earlier mounts that nobody reads, or for which a writer waited too long."""
        for held in list(self._before):
            changing = held.changing()
            if changing and held.deadline is None:
                held.deadline = _deadline()
                held.end()
            is_used = held.is_used()
            is_late = held.deadline is not None and time.monotonic() > held.deadline
            if is_used and is_late:
                self._report_mix(changing)
            if is_late or not is_used:
                held.close()
                self._before.remove(held)

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Exchange the image, which is the only request that a guard takes."""
        try:
            if request["do"] != "exchange":
                return {"error": f"unknown request to a guard: {request['do']}"}
            self.exchange(request["image"], request["base"], request["trusting"])
            if self._over is not None:
                self._over.show(request["shards"])
        except (WdsfsError, OSError) as error:
            return {"error": str(error)}
        except (ValueError, KeyError, TypeError):
            return {"error": "the request cannot be read"}
        except Exception as error:  # whatever it is: without a guard nobody would notice writers
            log.exception("a request has failed; please report this")
            return {"error": f"the guard has failed: {error!r}; see its log"}
        try:
            mount_registry.register(self._registration())
        except OSError as error:
            log.error(
                "%s: shows the new shards, but `wdsfs status` still the old ones: %s: %s",
                *(self.mountpoint, host.runtime_dir(), error.strerror),
            )
        return {"done": True}

    def _is_mounted(self) -> bool:
        return self._held.mounted is not None and erofs_mount.at(self.mountpoint) == self._held.mounted

    def _is_used(self) -> bool:
        return any(held.is_used() for held in (self._held, *self._before))

    def _end(self) -> None:
        """End the mount after a signal, but let nobody write into shards of which files are still open."""
        self._held.end()
        if self._is_used():
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
            self._report_mix(changing)

    def _report_mix(self, changing: Sequence[str]) -> None:
        log.error(
            "%s: programs still have its files open; from now on they may read a mix of old and new bytes of %s",
            self.mountpoint,
            several(changing),
        )

    def _wait_for_users(self) -> bool:
        """Wait until nobody uses the mount; False if somebody does for longer than a writer can wait."""
        deadline = _deadline()
        while self._is_used():
            if time.monotonic() > deadline or self._end_signals > 1:
                return False
            time.sleep(_STEP_SECONDS)
        return True


def _deadline() -> float:
    """Return until when (by `time.monotonic`) a writer that begins to wait now can be kept waiting."""
    return time.monotonic() + writer_seconds()


def writer_seconds() -> float:
    """Return how long a writer waits for readers: less than the kernel makes it wait for a lease."""
    try:
        seconds = float(BREAK_TIME.read_text()) or USUAL_SECONDS  # 0: for ever
    except (OSError, ValueError):
        seconds = USUAL_SECONDS
    return max(seconds - SPARE_SECONDS, seconds * 3 / 4)
