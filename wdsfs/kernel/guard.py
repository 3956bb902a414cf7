"""Mounts an image and guards it: nobody reads a mix of old and new bytes of a shard that is written in place.

The kernel does not look at the times of shards. So the guard holds a read lease (fcntl(2), F_SETLEASE) on each
shard and on the image. A process that opens such a file for writing, or truncates it, then waits until the guard
has released the lease, at most for the time in /proc/sys/fs/lease-break-time. The guard first ends the mount, then
waits until programs have closed all files of the mount, and only then releases the lease. Where a file system has
no leases, the guard compares the times of the files every second.

The guard ignores a shard that is replaced by another file, or removed: the kernel keeps the old file.

| what happens | while it is mounted | while it is unmounted, and programs have its files open |
|---|---|---|
| a program opens a shard for writing | unmount, wait for these programs, end | wait for these programs, end |
| SIGTERM, SIGINT or SIGHUP | unmount, wait for these programs, end | wait for these programs, end |
| another such signal | end at once | end at once |
| a user unmounts it | continue, as long as files are open | |
| the last file is closed | | end |

The wait for programs ends before the kernel would break a lease by force. When the guard ends, it releases the
leases.

The kernel serves the mount. The guard is the one process that stays, and serves nothing. If it dies, the mount
continues unguarded. The next guard adopts such a mount, or ends it if the mount cannot be trusted.

The guard is single-threaded and stateless: a signal only wakes the loop, which checks everything again. No command
talks to it: commands read its registration (`mount_registry.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shlex
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from wdsfs import host, mount_registry, mount_table
from wdsfs.errors import MountError, StaleShard, several
from wdsfs.kernel import devices, erofs_mount
from wdsfs.kernel.devices import HeldShards
from wdsfs.kernel.manifest import Manifest, identity_of, image_of, is_mounted_at, read_manifest
from wdsfs.shared_settings import setting

if TYPE_CHECKING:
    from wdsfs.mount.mount_options import MountOptions
    from wdsfs.mount_table import MountPoint

log = logging.getLogger(__name__)

CHECK_SECONDS = 1.0  # how often shards without a lease are looked at, and a mount that is detached but in use
SPARE_SECONDS = 5.0  # before the kernel would break a lease by force; of a short time a quarter
USUAL_SECONDS = 45.0  # seconds for which the kernel makes a writer wait
BREAK_TIME = Path("/proc/sys/fs/lease-break-time")
_STEP_SECONDS = 0.02
_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

Check = Callable[[Sequence[bytes]], None]  # of the mount point, given the paths that the mount needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded(mount_registry.Registration):
    """The registration of a guard: its process, and what it guards.

    `paths` are those of shards, `inodes` the numbers of the files that the kernel has open; `leased` have a lease.
    `identity` is that of the image, `device` the number of the mount.
    Relative paths in the image are below `base`; `trusting`: the times of shards may be others than in the image.
    Only a guard of an earlier release has an `overlay`, of the kernel's overlayfs above the image.
    """

    image: str
    paths: list[str]
    inodes: list[int]
    leased: int
    identity: str
    device: int
    base: str
    trusting: bool
    superblocks: list[str] = field(default_factory=list)  # for earlier releases, which require it

    def is_of(self, mount: MountPoint) -> bool:
        """Return True if this guard guards, or has guarded, this mount. The image may have been removed."""
        is_there = os.fsdecode(mount.path) == self.mountpoint and mount.fstype in ("erofs", "overlay")
        return is_there and (mount.device == self.device or mount.source == os.fsencode(self.image))

    def replaced(self) -> list[str]:
        """Return the paths of replaced and removed shards."""
        return [path for path, inode in zip(self.paths, self.inodes, strict=True) if not _is_the_same(path, inode)]


def _is_the_same(shard: str, inode: int) -> bool:
    try:
        return os.stat(shard).st_ino == inode
    except OSError:
        return False


def guard_of(mountpoint: str) -> Guarded | None:
    """Return the guard of the image at this path, alive or not; None if it has ended in good order."""
    return mount_registry.registration_of(mountpoint, Guarded)


class Unguarded(NamedTuple):
    """A mount without a living guard, of the image at the path `image`.

    `known` is the registration that the guard left, if any.
    """

    mountpoint: str
    image: str
    known: Guarded | None

    def shows(self, image: str) -> bool:
        """Return True if this image is mounted here, as far as can be known."""
        identity = identity_of(image)
        shown = is_mounted_at(identity, self.mountpoint)
        return shown if shown is not None else self.known is not None and self.known.identity == identity

    def end_if_written(self, about: Manifest, base: str, trusting: bool) -> None:
        """End the mount if a shard was written in place: readers may get a mix.

        A shard that was replaced by another file, according to the guard's registration, is whole in the mount.
        """
        replaced = set(() if self.known is None else self.known.replaced())
        paths = [(device.shard(base), device) for device in about.devices]
        changed = [
            path for path, device in paths if path not in replaced and devices.was_written(path, device, trusting)
        ]
        shown = erofs_mount.filesystem_at(self.mountpoint)
        if changed and shown is not None:
            erofs_mount.detach_everywhere(shown)
            log.error(
                "%s: unmounted, because files that it reads were written while it had no guard: %s",
                *(self.mountpoint, several(changed)),
            )


def unguarded(mountpoint: str) -> Unguarded | None:
    """Return the mount at this path (canonical) if that is an image without a living guard."""
    mounted = mount_table.mounted_at(mountpoint)
    image = None if mounted is None or mounted.fstype != "erofs" else image_of(mounted)
    known = guard_of(mountpoint)
    if image is None or (known is not None and known.alive):
        return None
    return Unguarded(mountpoint, os.fsdecode(image), known)


def end_if_wrong(mountpoint: str) -> None:
    """End the mount at this path if it has no guard and its shards were written."""
    current = unguarded(mount_registry.canonical(mountpoint))
    if current is not None and current.shows(current.image):
        known = current.known
        base, trusting = (os.path.dirname(current.image), False) if known is None else (known.base, known.trusting)
        current.end_if_written(read_manifest(current.image), base, trusting)


def mount_and_guard(
    mount: MountOptions,
    image: str,
    base: str,
    attributes: int,
    check: Check,
    log_file: Path | None,
    leave: Callable[[Path | None], None],
    ready: Callable[[], None],
) -> None:
    """Mount an image with these attributes and guard it until the mount ends.

    Relative paths of shards are below `base`. `check` raises MountError for a mount point that cannot be used.
    `leave` and `ready` are as in `mount/daemon.fork`. Raises MountError, and what `open_devices` raises.
    """
    host.runtime_dir()  # its errors must come before the mount
    guard = Guard(mount, base, HeldShards(devices.open_image(image)), check, log_file)
    try:
        guard.begin(attributes)
        leave(log_file)
        with guard.registered():
            ready()
            guard.run()
            if mount.removes_mountpoint:
                with contextlib.suppress(OSError):  # somebody has put something there
                    os.rmdir(mount.mountpoint)
    finally:
        guard.close()


class Guard:
    """The guard of a mount of an image over shards, all of which it keeps open.

    `check` raises MountError for a mount point that cannot be used.
    """

    def __init__(
        self, mount: MountOptions, base: str, held: HeldShards, check: Check, log_file: Path | None
    ) -> None:
        self.mountpoint, self._specs, self._base = mount.mountpoint, mount.specs, base
        self._trusting, self._image = mount.serving.trust_shards, os.fsdecode(held.image.path)
        self._held, self._check, self._log_file = held, check, log_file
        self._about: Manifest
        self._has_mounted = False
        self._end_signals = 0
        self._started = time.time()
        self._receiver, self._sender = socket.socketpair()
        self._handlers: dict[int, Any] = {}  # of signals, as they were before

    # --- the start of the mount

    def begin(self, attributes: int) -> None:
        """Mount the image with these attributes, or adopt the mount that is there. Raises as `mount_and_guard`."""
        image, base, trusting, held = self._image, self._base, self._trusting, self._held
        about = self._about = read_manifest(image)
        if host.kernel_version() < host.kernel_version(about.since):
            log.warning(
                "%s: was made for Linux %s; with this older kernel its files have the time 1970-01-01. Make the "
                "image again: wdsfs image",
                *(image, about.since),
            )
        devices.require_file_limit(len(about.devices))
        current = self._left_by_a_guard()
        try:
            held.devices = devices.open_devices(about, base, trusting)
        except StaleShard:
            if current is not None:
                current.end_if_written(about, base, trusting)
            raise
        if current is None:
            self._check([held.image.path, *(device.path for device in held.devices)])
        if not trusting:
            _refuse_network([*held.devices, held.image])
        self.take()
        devices.check_devices(held.devices, about, trusting)  # from now on no program can write unnoticed
        if current is None:
            self._mount(attributes)
        else:
            self._watch()
            log.warning(
                "%s: guarded again; changes of shards since the last guard ended were not noticed", self.mountpoint
            )

    def _left_by_a_guard(self) -> Unguarded | None:
        """Return the mount of this image that is there without a guard, if any; end one whose shards were written.

        Raises StaleShard if another image is mounted there.
        """
        current = unguarded(self.mountpoint)
        if current is not None and not current.shows(self._image):
            end_if_wrong(self.mountpoint)
            current = unguarded(self.mountpoint)
        if current is not None and not current.shows(self._image):
            raise StaleShard(
                f"{self.mountpoint}: other shards were mounted there, or these have changed since; to show what "
                f"is there now: wdsfs umount {shlex.quote(self.mountpoint)}, and repeat the command"
            )
        return current

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

    def _mount(self, attributes: int) -> None:
        """Mount the image. Raises MountError, StaleShard; then nothing stays mounted."""
        fds = [device.fd for device in self._held.devices]
        with host.locked(host.runtime_dir() / "mounting.lock"):  # else two guards could pass the check at once
            self._check(())  # another mount may have been made there since the last check
            erofs_mount.mount_image(self._image, self.mountpoint, fds, attributes)
            self._held.mounted = erofs_mount.filesystem_at(self.mountpoint)
        try:
            devices.check_image(self._held.image)
            self._watch()
        except (MountError, StaleShard):
            self._held.end()  # not by its path: another process may have mounted over it
            raise
        self._has_mounted = True

    def _watch(self) -> None:
        """Watch for the end of the mount; warn where writers of its shards do not wait. Raises MountError."""
        self._held.watch_mount(self.mountpoint)
        for has_lease, reason in (
            (False, "their file system gives no lease"),
            (True, "their file system shows files of another one, where writers do not wait"),
        ):
            if files := self._held.watched(has_lease=has_lease):
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
        held, about, index = self._held, self._about, setting("INDEX_DIR")
        return Guarded(
            engine=mount_registry.KERNEL,
            pid=os.getpid(),
            start_ticks=mount_registry.start_ticks(os.getpid()) or 0,
            mountpoint=self.mountpoint,
            specs=[*self._specs],
            started=self._started,
            log=None if self._log_file is None else str(self._log_file),
            **about.options(),
            index=os.path.abspath(index) if index else None,
            image=self._image,
            paths=[os.fsdecode(device.path) for device in held.devices],
            inodes=[os.fstat(device.fd).st_ino for device in held.devices],
            leased=sum(device is not held.image for device in held.leased),
            identity=identity_of(held.image.path),
            device=0 if held.mounted is None else held.mounted.device,
            base=self._base,
            trusting=self._trusting,
        )

    def run(self) -> None:
        """Guard until the mount has ended: a user unmounts it, or a shard is about to change."""
        with open(mount_table.MOUNTINFO, "rb") as table:
            while self._is_mounted() or self._held.is_used():
                self._sleep(table.fileno())
                with contextlib.suppress(BlockingIOError):
                    self._receiver.recv(4096)
                changing = self._held.changing()
                if changing or self._end_signals:
                    self._end(changing)
                    return

    def _sleep(self, table: int) -> None:
        """Wait until something may have happened; `table` is the open mount table."""
        poller = select.poll()
        poller.register(self._receiver, select.POLLIN)
        poller.register(table, select.POLLPRI | select.POLLERR)
        poller.register(self._held.ending, select.POLLIN)
        has_to_look = self._held.is_watching or not self._is_mounted()
        poller.poll(CHECK_SECONDS * 1000 if has_to_look else None)

    def _is_mounted(self) -> bool:
        return self._held.mounted is not None and erofs_mount.filesystem_at(self.mountpoint) == self._held.mounted

    def _end(self, changing: Sequence[str]) -> None:
        """End the mount, and wait for its users as long as a writer of files that are `changing` can wait.

        Without a writer, a signal ends the mount. No program may write into shards while their files are still
        open.
        """
        if changing:
            log.warning(
                "%s: a program opens it for writing; so %s is unmounted", several(changing), self.mountpoint
            )
        self._held.end()
        if self._held.is_used() and not changing:
            log.info(
                "%s: unmounted; waiting for programs that have its files open (a second signal ends the wait)",
                self.mountpoint,
            )
        if self._wait_for_users():
            return
        if changing:
            log.error(
                "%s: programs still have its files open; from now on they may read a mix of old and new bytes of "
                "%s",
                *(self.mountpoint, several(changing)),
            )
        else:
            log.warning(
                "%s: unmounted, but programs still have its files open; the shards are no longer protected "
                "against writing",
                self.mountpoint,
            )

    def _wait_for_users(self) -> bool:
        """Wait until no program uses the mount; return False if one uses it for longer than a writer can wait."""
        deadline = time.monotonic() + writer_seconds()
        while self._held.is_used():
            if time.monotonic() > deadline or self._end_signals > 1:
                return False
            time.sleep(_STEP_SECONDS)
        return True


def writer_seconds() -> float:
    """Return how long a writer waits for readers: less than the kernel makes it wait for a lease."""
    try:
        seconds = float(BREAK_TIME.read_text()) or USUAL_SECONDS  # 0: forever
    except (OSError, ValueError):
        seconds = USUAL_SECONDS
    return max(seconds - SPARE_SECONDS, seconds * 3 / 4)


def _refuse_network(files: Sequence[devices.OpenDevice]) -> None:
    """Raise MountError for files that another machine can change unnoticed."""
    place = mount_table.on_network(device.path for device in files)
    if place is not None:
        path, fstype = place
        raise MountError(
            f"{os.fsdecode(path)}: lies on {fstype}, where other machines can write it unnoticed. Mount with "
            "--trust-shards if nobody will; or mount the shards by FUSE"
        )
