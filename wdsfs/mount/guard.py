"""The guard of a mounted image: nobody reads a mix of old and new bytes of a shard that is written in place.

The kernel does not look at the times of shards. So the guard holds a read lease (fcntl(2), F_SETLEASE) on each,
and on the image: an open for writing or a truncation by anybody waits until the guard has let go of it, or for the
time in /proc/sys/fs/lease-break-time. The guard ends the mount first, waits until the last program has closed its
files of it, and then lets go. Where a file system has no leases, the times of the file are looked at every second.

A shard that is replaced by another file, or removed, is none of its business: the kernel keeps the old file.
`wdsfs refresh` makes a new image then, and the guard has it mounted in the place of the old one, whose shards it
holds until the last file of it is closed. A guard that was killed leaves the mount: the next one adopts it.

In the place of a compressed shard the kernel reads a copy in the cache, and that is what is guarded: whatever
happens to the shard itself, the mount shows what it was. That the copy is not evicted takes no guard
(`storage/held_files.py`).

Above an image there may be an overlay of the kernel's. Then there is only that mount, which keeps the image in
use, and the guard has the overlay's lock until the last file of it is closed.

One thread, no memory of what was: signals only wake the loop, which looks at everything that may have happened.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from wdsfs import host, mount_table
from wdsfs.errors import MountError, StaleShard, WdsfsError, several
from wdsfs.kernel import devices, erofs_mount, manifest
from wdsfs.kernel.devices import HeldShards, check_devices, check_image, open_image, raise_file_limit, superblocks
from wdsfs.kernel.manifest import MountedImage, identity_of, image_of
from wdsfs.mount.mountpoint import check_mountpoint
from wdsfs.status import control

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
_REQUEST_MAX = 1 << 26  # bytes; a request for an overlay has the paths of all shards
_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class MadeBy(NamedTuple):
    """The command of a mount, which `wdsfs refresh` repeats: its arguments, the directory in which it was given,
    and the variables of the environment that say where the index is."""

    arguments: list[str]
    directory: str
    environment: dict[str, str]


@dataclass(frozen=True, slots=True)
class Registration:
    """How commands find a guard: its process, and what it guards.

    `paths` are those of shards, `inodes` the numbers of the files that the kernel has open; `leased` have a lease.
    `copies` are the paths of files that it reads in the place of shards, "" for one that it reads itself.
    `identity` is that of the image, `superblocks` are the kernel's names of the mount; `made` is how it was made.
    Relative paths in the image are below `base`; `trusting`: the times of shards may be others than in the image.
    The rest is for a mount with an `overlay`: the number of its `device`, the `shards` below it (paths and names),
    how they are read and shown, the directory of their index, and the `options` of `-o`, which a new image takes.
    """

    pid: int
    start_ticks: int
    mountpoint: str
    image: str
    paths: list[str]
    inodes: list[int]
    leased: int
    log: str | None
    copies: list[str] = field(default_factory=list)
    identity: str = ""
    superblocks: list[str] = field(default_factory=list)
    made: MadeBy | None = None
    base: str = ""
    trusting: bool = False
    overlay: str | None = None
    device: int = 0
    shards: list[list[str]] = field(default_factory=list)
    reading: dict[str, bool] = field(default_factory=dict)
    layout: str = ""
    names: str = ""
    merge: bool = False
    index: str | None = None
    options: list[str] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        return control.start_ticks(self.pid) == self.start_ticks

    def guards(self, mount: MountPoint) -> bool:
        """True if this is the mount that it guards, also if the image has been removed since."""
        is_there = os.fsdecode(mount.path) == self.mountpoint and mount.source == os.fsencode(self.image)
        return is_there and mount.fstype in ("erofs", "overlay") and self.alive

    def was_exchanged(self) -> bool:
        """True if the guard has mounted another image since this was read."""
        now = guard_of(self.mountpoint)
        return now is not None and now.identity != self.identity

    def replaced(self) -> list[str]:
        """The paths at which there is another file now, or none; also if a copy is read of what was there."""
        devices = zip_longest(self.paths, self.inodes, self.copies)
        return [path for path, inode, copy in devices if not _is_the_same(path, inode, copy)]


def _is_the_same(shard: str, inode: int, copy: str | None) -> bool:
    if copy:
        return devices.is_copy_of(shard, copy)
    try:
        return os.stat(shard).st_ino == inode
    except OSError:
        return False


def _file(mountpoint: str) -> Path:
    return host.runtime_dir() / f"{control.identity(mountpoint)}.guard"


def guard_of(mountpoint: str) -> Registration | None:
    """The guard of the image at this path, alive or not; None if it has ended in good order."""
    try:
        found: dict[str, Any] = json.loads(_file(mountpoint).read_text())
        made = found.get("made")
        return Registration(**{**found, "made": None if made is None else MadeBy(**made)})
    except (OSError, ValueError, TypeError):
        return None


def _guards() -> Iterator[Registration]:
    """All guards, alive or not."""
    for file in host.runtime_dir().glob("*.guard"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = guard_of(json.loads(file.read_text())["mountpoint"])
            if found is not None:
                yield found


def living_guards() -> list[Registration]:
    """The guards that are at work. Raises MountError."""
    return [one for one in _guards() if one.alive]


def without_image() -> list[MountedImage]:
    """The mounts whose image has been removed since, of which only their guards know. Raises MountError."""
    lost = [one for one in mount_table.mounts() if one.fstype in ("erofs", "overlay") and image_of(one) is None]
    guards = living_guards() if lost else []
    return [MountedImage(one, one.source) for one in lost if any(guard.guards(one) for guard in guards)]


def forget(guard: Registration) -> None:
    """Remove what makes a guard known, unless a later one at the same place has taken it over."""
    if guard_of(guard.mountpoint) == guard:
        _file(guard.mountpoint).unlink(missing_ok=True)
        control.socket_path(guard.mountpoint).unlink(missing_ok=True)


class Guard:
    """Guards the mount at `mountpoint` of an image over shards, all of which it keeps open.

    `wanted` is the overlay that is to be above the image, if there is to be one.
    """

    def __init__(
        self,
        held: HeldShards,
        mountpoint: str,
        log_file: Path | None,
        made: MadeBy | None = None,
        wanted: OverlayOver | None = None,
    ) -> None:
        self.mountpoint, self.log_file, self.made = mountpoint, log_file, made
        self._held, self._before = held, list[HeldShards]()
        self._wanted = wanted
        self._overlay: MountedOverlay | None = None
        self._listener: socket.socket
        self._attributes = 0
        self._has_mounted = False
        self._told_to_end = 0  # so many times
        self._receiver, self._sender = socket.socketpair()
        self._handlers: dict[int, Any] = {}  # of signals, as they were before

    def take(self, is_there: bool = False) -> None:
        """Take the overlay, and have every later writer of a shard wait for this process.

        `is_there`: the kernel has it mounted already, and nobody guards that. What a shard is has to be compared
        afterwards. Raises MountError for one that is being written, OverlayUnusable, OverlayBusy.
        """
        if self._wanted is not None:
            self._overlay = self._wanted.taken(self.mountpoint if is_there else None)
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._handlers[signal.SIGIO] = signal.signal(signal.SIGIO, lambda *_: None)
        for number in _ENDS:
            self._handlers[number] = signal.signal(number, self._note_end)
        self._held.take_leases()

    def _note_end(self, *_: object) -> None:
        self._told_to_end += 1

    def mount(self, attributes: int, instead: bool = False) -> None:
        """Have the kernel mount the image, with `instead` in the place of what is there. Raises MountError."""
        if self._wanted is not None:
            self._wanted.set_who_enters()
        self._mount(self._held, attributes, instead)
        self._has_mounted = True
        self._settle(attributes)

    def _mount(self, held: HeldShards, attributes: int, instead: bool) -> None:
        """Have the kernel mount these, and note the name of the superblock (and of those that others make at that
        moment). Raises MountError, StaleShard."""
        with _one_at_a_time():
            if not instead:  # another one may have been made there since it was looked
                check_mountpoint(self.mountpoint, nonempty=True, busy=[])
            before = superblocks()
            self._ask_kernel(held, attributes, instead)
            held.superblocks = superblocks() - before
        try:
            check_image(held.image)
        except StaleShard:
            erofs_mount.detach(self.mountpoint)
            raise

    def _ask_kernel(self, held: HeldShards, attributes: int, instead: bool) -> None:
        image, fds = os.fsdecode(held.image.path), [one.fd for one in held.devices]
        if self._wanted is not None:
            self._wanted.mount(image, self.mountpoint, fds, attributes, instead)
        else:
            mount = erofs_mount.exchange_image if instead else erofs_mount.mount_image
            mount(image, self.mountpoint, fds, attributes)

    def adopt(self, attributes: int, known: Registration | None) -> None:
        """Guard the mount of this image that is there already, whose guard is gone: `known`, if it left a sign."""
        found = superblocks() & set(known.superblocks) if known is not None else self._unknown()
        self._held.superblocks = found
        self._settle(attributes)
        log.warning(
            "%s: guarded again; for some time what was written into a shard was not noticed", self.mountpoint
        )

    def _unknown(self) -> set[str]:
        """The superblock of a mount whose guard has left no sign, or that never had one."""
        found, there = mount_table.mounted_at(self.mountpoint), superblocks()
        device = b"" if found is None else os.path.basename(found.source)
        if os.fsdecode(device) in there:  # by mount(8), on a loop device
            return {os.fsdecode(device)}
        # The kernel does not say which is whose: without inotify those of others are waited for, too.
        return there - {name for one in _guards() if one.mountpoint != self.mountpoint for name in one.superblocks}

    def _settle(self, attributes: int) -> None:
        self._attributes = attributes
        self._held.watch_mount(self.mountpoint)
        for found, reason in (
            (self._held.without_lease(), "no lease can be had there"),
            (self._held.on_layers(), "the file system there shows files of another one, where no writer waits"),
        ):
            if found:
                log.warning(
                    "%s: %s; changes are looked for every second, and bytes that are read meanwhile may be old "
                    "and new ones",
                    *(several(found), reason),
                )

    def exchange(self, image: str, base: str, trusting: bool) -> None:
        """Have the kernel mount this image in the place of the mount. Raises WdsfsError: nothing has changed."""
        if self._wanted is not None:
            self._wanted.refuse_writable(self.mountpoint)
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
        """Let commands find this guard while the context is open.

        Raises MountError where that cannot be; then the mount has ended, unless it is another guard's.
        """
        with contextlib.ExitStack() as stack:
            try:
                self._listener = stack.enter_context(self._listening())
                self._register()
            except OSError as error:
                if self._has_mounted:
                    self._held.end()
                raise MountError(f"{host.runtime_dir()}: {error.strerror}; it takes a file there") from None
            try:
                yield
            finally:
                found = guard_of(self.mountpoint)
                if found is not None and found.pid == os.getpid():
                    forget(found)

    def close(self) -> None:
        """Let go of all shards. This process guards nothing any more, and may mount by FUSE now."""
        signal.set_wakeup_fd(-1)
        self._receiver.close()
        self._sender.close()
        for one in (self._held, *self._before):
            one.close()
        for number, handler in self._handlers.items():  # now that no lease sends any
            signal.signal(number, handler)

    def _register(self) -> None:
        own = Registration(
            pid=os.getpid(),
            start_ticks=control.start_ticks(os.getpid()) or 0,
            mountpoint=self.mountpoint,
            image=os.fsdecode(self._held.image.path),
            paths=[os.fsdecode(one.path) for one in self._held.devices],
            inodes=[os.fstat(one.fd).st_ino for one in self._held.devices],
            leased=sum(one is not self._held.image for one in self._held.leased),
            copies=[one.copy for one in self._held.devices],
            log=None if self.log_file is None else str(self.log_file),
            identity=identity_of(self._held.image.path),
            superblocks=sorted(self._held.superblocks),
            device=0 if self._held.mounted is None else self._held.mounted.device,
            made=self.made,
            base=self._held.base,
            trusting=self._held.trusting,
            **({} if self._wanted is None else self._wanted.about()),
        )
        about = {one.name: getattr(own, one.name) for one in fields(own)}  # `asdict` would copy each path
        about["made"] = None if self.made is None else self.made._asdict()
        control.write_registration(_file(self.mountpoint), about)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[socket.socket]:
        """The socket at which `wdsfs refresh` finds this guard."""
        path = control.socket_path(self.mountpoint)
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as listener:
            with control.socket_address(self.mountpoint) as address:
                listener.bind(address)
            listener.listen()
            own = path.stat().st_ino
            try:
                yield listener
            finally:
                with contextlib.suppress(FileNotFoundError):
                    if path.stat().st_ino == own:
                        path.unlink()

    def run(self) -> None:
        """Return when the mount has ended, by others or because a shard is about to change."""
        with open(mount_table.MOUNTINFO, "rb") as table:
            while True:
                self._sleep(table.fileno())
                with contextlib.suppress(BlockingIOError):
                    self._receiver.recv(4096)
                changing = self._held.changing()
                if changing:
                    self._give_way(changing)
                    break
                if self._told_to_end:
                    self._end()
                    break
                self._let_go()
                self._answer()
                if not self._is_mounted() and not self._is_used():
                    break
        if self._wanted is not None and not self._is_used():
            self._wanted.clean_work()

    def _sleep(self, table: int) -> None:
        """Return when something may have happened; `table` is the open mount table."""
        poller = select.poll()
        poller.register(self._receiver, select.POLLIN)
        poller.register(self._listener, select.POLLIN)
        poller.register(table, select.POLLPRI | select.POLLERR)
        for one in (self._held, *self._before):
            if one.ending is not None:
                poller.register(one.ending, select.POLLIN)
        poller.poll(self._patience())

    def _patience(self) -> float | None:
        """How long the loop may sleep (ms) when nothing wakes it; None: for ever."""
        if any(one.deadline is not None for one in self._before):
            return _STEP_SECONDS * 1000
        has_to_look = self._held.is_watching or self._before or not self._is_mounted()
        return LOOK_SECONDS * 1000 if has_to_look else None

    def _let_go(self) -> None:
        """Let go of the shards of earlier mounts of which nobody has files open, or of which one is to change.

        A writer of such a shard waits for their readers; nothing else does.
        """
        for one in list(self._before):
            changing = one.changing()
            if changing and one.deadline is None:
                one.deadline = _deadline()
                one.end()
            is_used = one.is_used()
            is_late = one.deadline is not None and time.monotonic() > one.deadline
            if is_used and is_late:
                self._report_mix(changing)
            if is_late or not is_used:
                one.close()
                self._before.remove(one)

    def _answer(self) -> None:
        """Do what a client asks for, if there is one."""
        try:
            client, _ = self._listener.accept()
        except BlockingIOError:
            return
        with client, contextlib.suppress(OSError):  # it may be gone
            client.settimeout(control.ANSWER_SECONDS)
            with client.makefile("rb") as lines:
                answer = self._done(lines.readline(_REQUEST_MAX))
            client.sendall(json.dumps(answer).encode() + b"\n")

    def _done(self, line: bytes) -> dict[str, Any]:
        try:
            asked: dict[str, Any] = json.loads(line)
            if asked["do"] != "exchange":
                return {"error": f"a guard does not know: {asked['do']}"}
            self.exchange(asked["image"], asked["base"], asked["trusting"])
            if self._wanted is not None:
                self._wanted.show(asked["shards"])
        except (WdsfsError, OSError) as error:
            return {"error": str(error)}
        except (ValueError, KeyError, TypeError):
            return {"error": "the request cannot be read"}
        except Exception as error:  # whatever it is: without a guard nobody would notice writers
            log.exception("a request has failed; please report this")
            return {"error": f"the guard has failed: {error!r}; see its log"}
        try:
            self._register()
        except OSError as error:
            log.error(
                "%s: shows the new shards, but `wdsfs status` the old ones: %s: %s",
                *(self.mountpoint, host.runtime_dir(), error.strerror),
            )
        return {"done": True}

    def _is_mounted(self) -> bool:
        return self._held.mounted is not None and erofs_mount.at(self.mountpoint) == self._held.mounted

    def _is_used(self) -> bool:
        return any(one.is_used() for one in (self._held, *self._before))

    def _end(self) -> None:
        """End the mount, as a signal demands, but let nobody write below files of it that are open."""
        self._held.end()
        if self._is_used():
            log.info(
                "%s: has ended, and waits for programs with files of it; a second signal ends that",
                self.mountpoint,
            )
            if not self._wait_for_users():
                log.warning(
                    "%s: has ended, and programs still have files of it open; from now on nobody is kept from "
                    "writing into the shards",
                    self.mountpoint,
                )

    def _give_way(self, changing: Sequence[str]) -> None:
        """End the mount, and wait for its users as long as the writer can be kept waiting."""
        log.warning("%s: is opened for writing; %s is ended for that", several(changing), self.mountpoint)
        self._held.end()
        if not self._wait_for_users():
            self._report_mix(changing)

    def _report_mix(self, changing: Sequence[str]) -> None:
        log.error(
            "%s: programs still have files of it open; from now on they may read old and new bytes of %s",
            self.mountpoint,
            several(changing),
        )

    def _wait_for_users(self) -> bool:
        """Wait until nobody uses the mount; False if somebody does for longer than a writer can wait."""
        deadline = _deadline()
        while self._is_used():
            if time.monotonic() > deadline or self._told_to_end > 1:
                return False
            time.sleep(_STEP_SECONDS)
        return True


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Keep other guards from mounting meanwhile: the kernel does not say which superblock is whose."""
    fd = os.open(host.runtime_dir() / "superblocks.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _deadline() -> float:
    """Until when a writer that begins to wait now can be kept waiting, as `time.monotonic` counts."""
    return time.monotonic() + writer_seconds()


def writer_seconds() -> float:
    """How long a writer is kept waiting for readers: less than the kernel has it wait for a lease."""
    try:
        seconds = float(BREAK_TIME.read_text()) or USUAL_SECONDS  # 0: for ever
    except (OSError, ValueError):
        seconds = USUAL_SECONDS
    return max(seconds - SPARE_SECONDS, seconds * 3 / 4)
