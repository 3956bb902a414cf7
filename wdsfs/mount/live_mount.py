"""Live mounts for the commands: report, list the set, freeze, refresh, restore, end.

`LiveMount` is the interface for both engines, so commands need not know the engine. `FuseMount` asks the daemon of
a mount by FUSE, over the socket of its registration; `control_socket.py` has the answers. `kernel/live_kernel.py`
implements the interface for the kernel's engine. `mount_search.py` finds mounts.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shlex
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from wdsfs import host, mount_registry, mount_table, mount_users
from wdsfs.errors import (
    DEAD_MOUNT_ERRNOS,
    CommitError,
    MountError,
    OverlayBusy,
    OverlayUnusable,
    bytes_text,
    several,
)
from wdsfs.formats import OtherVersion
from wdsfs.mount_registry import DEAD, FOREIGN, RUNNING, SILENT, UNSUPERVISED, Registration, Talk
from wdsfs.names import Reading
from wdsfs.overlay.overlay_directory import OverlayDirectory, held, is_half_done
from wdsfs.overlay.upper_files import sync_filesystem
from wdsfs.shards import Shard
from wdsfs.tree.set_options import TreeOptions
from wdsfs.tree.shard_access import Access, access_from_json
from wdsfs.trust import user_name

if TYPE_CHECKING:
    from wdsfs.tree.set_options import Opening
    from wdsfs.tree.shard_set import ShardSet

log = logging.getLogger(__name__)

FREEZE_SECONDS = THAW_SECONDS = 60.0  # longest time for a mount to refuse writes, and to accept them again
RENEW_SECONDS = 60.0  # longest time for a daemon to show new shards
END_SECONDS = 30.0  # longest time for a process to outlive its mount
REFRESH_SECONDS = 24 * 3600.0  # indexing new shards may take long; an ending daemon closes the connection
_ANNOUNCE_SECONDS = 3.0  # wait for a daemon before a message says what it does
_USERS_NAMED = 5  # most processes in a message
# Between attempts at a busy mount: its own lister (`fuse/lister.py`) has a directory open for milliseconds.
_BUSY_SECONDS = 0.01, 0.05, 0.2
_BUSY = re.compile(r": [A-Za-z ]+ busy\.?$", re.MULTILINE)  # of fusermount3


@dataclass(frozen=True, slots=True)
class ShownSet:
    """The set of a mount at one moment: its shards in order, the access to them, and remarks for the user.

    Two values are equal if `state` is equal, that is, for the same set.
    """

    state: object
    shards: list[Shard] = field(compare=False)
    access: Access = field(compare=False)
    news: str = field(compare=False, default="")


class Frozen:
    """A mount whose daemon refuses writes until the conversation ends, for a commit of the overlay.

    `lower` is the set below the overlay. `is_wrong`: the mount may not show the new shards.
    """

    def __init__(self, lower: ShownSet, mountpoint: str, talk: Talk) -> None:
        self.lower, self.is_wrong = lower, False
        self._mountpoint, self._talk = mountpoint, talk

    def show(self, new: Sequence[bytes], published: Sequence[bytes]) -> None:
        """Show the further shards `new`, and open those at the paths `published` again.

        REQUIRES: the overlay has been emptied.
        """
        request = {"new": [*map(os.fsdecode, new)], "published": [*map(os.fsdecode, published)]}
        try:
            self._talk.ask(request, RENEW_SECONDS)
        except (OSError, ValueError) as error:  # the commit has written the shards
            self.is_wrong = True
            log.error(
                "%s: the shards are written, but the daemon of the mount did not answer (%s) and may show old "
                "shards; unmount, and mount again",
                *(self._mountpoint, error),
            )


class LiveMount(ABC):
    """A live mount, or a dead mount that an ended process has left.

    `registration` is the registration of its process, alive or not, or None. `overlay` is the directory of its
    changes. `index` is the directory of its index, None for the default.
    """

    engine: ClassVar[str]
    is_by_fuse: ClassVar[bool]  # shows `.wdsfs`, and the origin of files as `user.wdsfs.*`

    def __init__(self, mountpoint: str, registration: Registration | None) -> None:
        self.mountpoint, self.registration = mountpoint, registration
        self.overlay = None if registration is None else registration.overlay
        self.index = None if registration is None else registration.index

    @property
    @abstractmethod
    def remedy(self) -> str:
        """The remedy for a user if the process has ended or does not answer."""

    @property
    def unfinished_commit(self) -> bool:
        """True if a commit in place of its overlay was stopped half-way."""
        return is_half_done(self.overlay)

    @property
    def is_alive(self) -> bool:
        """True if its process runs."""
        return self.registration is not None and self.registration.alive

    @property
    @abstractmethod
    def options(self) -> TreeOptions:
        """The options of its view, from its process or its image. Raises MountError."""

    @property
    @abstractmethod
    def directory(self) -> str:
        """The directory of relative paths in the options. Raises MountError."""

    @abstractmethod
    def report(self) -> dict[str, Any]:
        """Return the report of `wdsfs status --json`."""

    @abstractmethod
    def shown(self) -> ShownSet:
        """Return the current set, without the changes in its overlay. Raises MountError, OverlayBusy, OSErrors."""

    @contextlib.contextmanager
    def opened(self, shown: ShownSet, opening: Opening, *, on_demand: bool = False) -> Iterator[ShardSet]:
        """Open the set that the mount shows. Accept damage, which the mount has judged. Raises WdsfsError.

        `on_demand` is the same as for `open_known_set`.
        """
        from wdsfs.tree.opening import open_known_set  # late: it loads NumPy
        from wdsfs.tree.view_set import is_view

        composition = self.options.composition
        tolerance = opening.tolerance._replace(is_option=False)
        index_dir = Path(self.index) if opening.index_dir is None and self.index else opening.index_dir
        opening = opening._replace(index_dir=index_dir, tolerance=tolerance)
        with contextlib.ExitStack() as stack:
            # Relative paths of joined shards and label files begin in the directory of the mount's command.
            with host.in_directory(self.directory) if composition.names_files else contextlib.nullcontext():
                view = composition if is_view(shown.shards, composition) else None
                opened = open_known_set(shown.shards, opening, view, access=shown.access, on_demand=on_demand)
                below = stack.enter_context(opened)
            yield below

    @abstractmethod
    def frozen(self) -> AbstractContextManager[Frozen]:
        """Freeze the mount for a block: no program can write to it, and all earlier writes are on disk.

        It stays frozen if a commit in place stops half-way. Raises MountError, OverlayBusy, CommitError.
        """

    @abstractmethod
    def restore(self, paths: Sequence[bytes]) -> None:
        """Show the content of the shards at these paths. Raises MountError, OverlayBusy."""

    @abstractmethod
    def refresh(self) -> dict[str, Any]:
        """Expand SHARDS again, and show the result; return the output of `wdsfs refresh --json`.

        Raises MountError.
        """

    def end(self, *, lazy: bool = False, wait_seconds: float = END_SECONDS) -> None:
        """End the mount, dead or alive. Unless `lazy`, wait for the end of its process. Raises MountError."""
        mounted = mount_table.mounted_at(self.mountpoint)
        if mounted is not None:  # else another process has ended it; the code below removes leftovers
            self._unmount(lazy)
        if self.registration is None:
            return
        if not lazy:
            self._wait_for_process(self.registration, wait_seconds, 0 if mounted is None else mounted.device)
        if not self.registration.alive:
            mount_registry.forget(self.registration)

    def _unmount(self, lazy: bool) -> None:
        for seconds in (*_BUSY_SECONDS, 0.0):
            # Check at each attempt: the daemon may be about to end, and then no process answers its clients.
            is_dead = self._is_dead()
            if is_dead:
                self._end_requests()
            if _unmounted(self.mountpoint, lazy or is_dead):
                return
            time.sleep(seconds)
        raise MountError(_busy_text(self.mountpoint))

    def _end_requests(self) -> None:  # noqa: B027  # not abstract: the kernel answers its own
        """Fail the requests of a dead mount, which no process will answer. Raises MountError."""

    def _is_dead(self) -> bool:
        """Return True if no process serves the mount any more."""
        try:
            os.statvfs(self.mountpoint)
        except OSError as error:
            return error.errno in DEAD_MOUNT_ERRNOS
        return False

    @abstractmethod
    def _wait_for_process(self, registration: Registration, seconds: float, device: int) -> None:
        """Wait for the process of an ended mount. `device` is the device of the mount, 0 if unknown.

        Raises MountError.
        """


_SHOWN_BY = attrgetter("layout", "names", "merge", "index_tree", "composition")


def options_of(about: object) -> TreeOptions:
    """Return the options of a tree from the registration of a process or the manifest of an image."""
    from wdsfs.tree.composition import parse_composition  # late: few commands need them

    layout, names, merge, index_tree, composition = _SHOWN_BY(about)
    return TreeOptions(layout, names, merge, index_tree, parse_composition(layout, composition))


def is_read_only(mountpoint: str, overlay: str | None) -> bool:
    """Return True for a mount without an overlay, or with `-o ro`."""
    mounted = mount_table.mounted_at(mountpoint)
    return not overlay or (mounted is not None and "ro" in mounted.options)


def _unmounted(path: str, lazy: bool) -> bool:
    """Unmount the mount at this path; return False if it is in use. Raises MountError."""
    if os.geteuid():
        return _unmounted_by_fusermount(path, lazy)
    try:
        mount_table.unmount(path, lazy=lazy)
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        if mount_table.mounted_at(path) is None:  # another process has ended it
            return True
        raise MountError(f"{path}: cannot be unmounted: {error.strerror}") from None
    return True


def _unmounted_by_fusermount(path: str, lazy: bool) -> bool:
    import subprocess  # late: most commands load this module, and few end a mount

    program = host.program("fusermount3")
    if program is None:
        raise MountError("fusermount3 is not installed; type: sudo apt install fuse3")
    done = subprocess.run(
        [program, "-u", *(["-z"] if lazy else []), "--", path],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        env={**os.environ, "LC_ALL": "C"},  # in English, for `_BUSY`
    )
    if done.returncode and not _BUSY.search(done.stderr):
        raise MountError(done.stderr.strip())
    return not done.returncode


def _busy_text(path: str) -> str:
    """Return the message about a busy mount, with the processes that use it, if this user may see them."""
    quoted = shlex.quote(path)
    users = [f"{user.command} ({user.pid}, {user.what})" for user in mount_users.users(os.fsencode(path))]
    who = (
        f"by {several(users, _USERS_NAMED)}"
        if users
        else f"by processes that only root sees: sudo fuser -vm {quoted}"
    )
    return f"{path}: is in use {who}; end these processes, or detach the mount now: wdsfs umount --lazy {quoted}"


# --- by FUSE


class FuseMount(LiveMount):
    """A mount by FUSE. Without a registration it belongs to another user or another session."""

    engine = mount_registry.FUSE
    is_by_fuse = True
    _patience = FREEZE_SECONDS  # only the first answer may take long: a page waits for the later answers

    @property
    def _daemon(self) -> Registration:
        if self.registration is None:
            raise MountError(f"{self.mountpoint}: is a mount of another user or session: run the command there")
        return self.registration

    @property
    def options(self) -> TreeOptions:
        return options_of(self._daemon)

    @property
    def directory(self) -> str:
        return self._daemon.directory

    @property
    def remedy(self) -> str:
        return f"wdsfs umount {shlex.quote(self.mountpoint)}, and mount it again"

    # --- asking

    def _ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer of the daemon. Raises MountError, OverlayBusy."""
        daemon = self._daemon
        try:
            with Talk(daemon) as talk:
                answer = talk.ask(request, seconds)
        except (OSError, ValueError) as error:
            raise self._silent(error) from None
        if answer.get("error"):
            raise OverlayBusy(answer["error"])
        return answer

    def _silent(self, error: Exception) -> MountError:
        again = f"end it with `wdsfs umount {shlex.quote(self.mountpoint)}`, and mount it again"
        if not self.is_alive:
            return MountError(f"{self.mountpoint}: the mount has ended, because its daemon is gone; {again}")
        if isinstance(error, OtherVersion):
            return MountError(f"{self.mountpoint} {error}")
        return MountError(f"{self.mountpoint}: its daemon does not answer ({error}); {again}")

    def shown(self) -> ShownSet:
        seconds, self._patience = self._patience, mount_registry.ANSWER_SECONDS
        return _shown_set(self._ask({"do": "shards"}, seconds))

    def restore(self, paths: Sequence[bytes]) -> None:
        self._ask({"do": "restore", "paths": [os.fsdecode(path) for path in paths]}, FREEZE_SECONDS)

    def refresh(self) -> dict[str, Any]:
        try:
            return self._ask({"do": "refresh"}, REFRESH_SECONDS)
        except OverlayBusy as error:
            raise MountError(str(error)) from None

    @contextlib.contextmanager
    def frozen(self) -> Iterator[Frozen]:
        self._sync()
        try:
            with contextlib.ExitStack() as stack:
                talk = stack.enter_context(Talk(self._daemon))
                answer = talk.ask({"do": "freeze"}, FREEZE_SECONDS)
                opened = stack.pop_all()
        except (OSError, ValueError) as error:
            raise self._silent(error) from None
        with opened:
            if "error" in answer:
                raise OverlayBusy(answer["error"])
            try:
                yield Frozen(_shown_set(answer), self.mountpoint, talk)
            finally:
                talk.finish(THAW_SECONDS)  # no write may get EBUSY after the end of the command

    def _sync(self) -> None:
        """Flush changes of mapped files to the overlay. Raises CommitError, and MountError for a dead mount."""
        try:
            sync_filesystem(self.mountpoint)
        except OSError as error:
            if error.errno in (errno.ENOTCONN, errno.ECONNABORTED):
                raise self._silent(error) from None
            # The kernel reports this once, without the name of the file, and drops the unwritten data.
            why = "its shard was replaced meanwhile" if error.errno == errno.ESTALE else error.strerror
            raise CommitError(
                f"{self.mountpoint}: the kernel could not write a change of a mapped file ({why}), so nothing was "
                "committed; the log (see `wdsfs status`) says more. Make the change again if you need it, then "
                "repeat the command"
            ) from None

    # --- reporting

    def report(self) -> dict[str, Any]:
        if self.registration is None:
            return self._report_of_others()
        answer = self._status() if self.registration.alive else {}
        return {
            **self.registration.as_json(),
            "state": RUNNING if answer else self._state_without_answer(self.registration),
            **answer,
            "user": user_name(os.geteuid()),
            "unfinished_commit": self.unfinished_commit,
            "mode": "ro" if is_read_only(self.mountpoint, self.overlay) else "rw",
        }

    def _report_of_others(self) -> dict[str, Any]:
        """Report the facts of the kernel about a mount of another user, whose daemon may never answer."""
        mounted = mount_table.mounted_at(self.mountpoint)
        user = user_name(0 if mounted is None else mounted.user)
        return {
            "engine": self.engine,
            "mountpoint": self.mountpoint,
            "state": FOREIGN,
            "notices": [f"its daemon belongs to {user}: only `wdsfs status` of that user shows more"],
            "user": user,
            "specs": [] if mounted is None else [os.fsdecode(mounted.source).removeprefix("wdsfs#")],
            "mode": "ro" if mounted is None or "ro" in mounted.options else "rw",
        }

    def _status(self) -> dict[str, Any]:
        """Return the status from the daemon, or a notice about its other version, or nothing without an answer."""
        try:
            with Talk(self._daemon) as talk:
                return talk.ask({"do": "status"})
        except OtherVersion as error:
            return {"notices": [f"it {error}"]}
        except (OSError, ValueError):
            return {}

    def _state_without_answer(self, daemon: Registration) -> str:
        """Return the state, in words, of a mount whose daemon does not answer."""
        if daemon.alive:
            return SILENT
        return DEAD if mount_table.mounted_at(self.mountpoint) is None else _state_of_mount(self.mountpoint)

    # --- ending

    def end(self, *, lazy: bool = False, wait_seconds: float = END_SECONDS) -> None:
        """End the mount. First continue stopped processes, so that they can answer and end."""
        daemon = self.registration
        if daemon is not None and daemon.alive:
            _continue(daemon)
        super().end(lazy=lazy, wait_seconds=wait_seconds)

    def _end_requests(self) -> None:
        """Fail all requests that no process answers: their readers would wait forever. Raises MountError."""
        if self.registration is None or self._state_without_answer(self.registration) != SILENT:
            return
        mounted = mount_table.mounted_at(self.mountpoint)
        try:
            if mounted is not None:
                mount_table.abort(mounted)
        except OSError:
            raise MountError(
                f"{self.mountpoint}: its daemon has ended, and only root can end the programs that wait for it: "
                f"sudo umount --force --lazy {shlex.quote(self.mountpoint)}"
            ) from None

    def _is_dead(self) -> bool:
        if self.registration is None:
            return _state_of_mount(self.mountpoint) == DEAD
        return not self.registration.alive

    def _wait_for_process(self, registration: Registration, seconds: float, device: int) -> None:
        """Wait for the end of the daemon: up to `seconds`, longer while it waits for a disk."""
        since = time.monotonic()
        deadline, announced = since + seconds, False
        while registration.alive:
            now = time.monotonic()
            if waits_for_disk(registration.pid):
                deadline = now + seconds
                if not announced and now - since > _ANNOUNCE_SECONDS:
                    announced = True
                    log.info(
                        "waiting for process %s: %s. Ctrl-C ends only this wait",
                        *(registration.pid, self._what_is_written()),
                    )
            if now > deadline:
                still = f"process {registration.pid} still runs {now - since:.0f} s after the unmount"
                raise MountError(f"{still}, and {_why_still(registration, device)}")
            time.sleep(0.01)
        self._wait_for_overlay(registration, seconds)

    def _wait_for_overlay(self, registration: Registration, seconds: float) -> None:
        """Wait for workers that have outlived a killed daemon, so that the next mount can lock the overlay."""
        if self.overlay is None or mount_registry.find_registration(self.mountpoint) != registration:
            return  # a daemon that ends in good order waits for its workers, then removes its registration
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                with held(OverlayDirectory(Path(self.overlay))):
                    return
            except OverlayBusy:
                time.sleep(0.01)
            except (OverlayUnusable, OSError):  # removed, or the overlay of another user
                return

    def _what_is_written(self) -> str:
        """Return the reason why the daemon of an ended mount still runs."""
        if self.overlay is None:
            return "it waits for a disk"
        left = host.unwritten_bytes()
        rest = "" if left is None else f" (unwritten on this machine: {bytes_text(left)})"
        return f"it writes the changes in {self.overlay} to the disk{rest}"


def _shown_set(answer: dict[str, Any]) -> ShownSet:
    """Return the set of a mount from the answer of its daemon."""
    reading, without = Reading(**answer["reading"]), answer["without"]
    shards = [Shard.of_texts(path, name, reading, without.get(path, ())) for name, path in answer["shards"]]
    return ShownSet(answer, shards, access_from_json(answer["seen"]))


def _state_of_mount(mountpoint: str) -> str:
    """Return DEAD for a mount that only the kernel still lists, SILENT for a mount without an answer in time."""
    import subprocess  # late: every command loads this module, and only this function needs processes

    # In another process: if the workers hang, the question hangs, too. It asks for the file system, because the
    # kernel may have cached the attributes of the directory even for a dead mount.
    stat = subprocess.Popen(
        ["stat", "--file-system", "--", mountpoint], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        return DEAD if stat.wait(mount_registry.ANSWER_SECONDS) else UNSUPERVISED
    except subprocess.TimeoutExpired:
        stat.kill()  # without a wait: a process with a request at a worker cannot be killed
        return SILENT


def waits_for_disk(pid: int) -> bool:
    """Return True if a process or one of its children sleeps uninterruptibly, until a disk answers."""
    try:
        pids = [pid, *mount_registry.children(pid)]
        return any(Path(f"/proc/{process}/stat").read_bytes().rpartition(b") ")[2][:1] == b"D" for process in pids)
    except OSError:  # a process has just ended
        return False


def _continue(daemon: Registration) -> None:
    """Continue stopped processes of a mount (SIGCONT), which could neither answer the unmount nor end."""
    for pid in (daemon.pid, *mount_registry.children(daemon.pid)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGCONT)


def _why_still(daemon: Registration, device: int) -> str:
    """Return the reason why a daemon may outlive its mount, and the remedy."""
    holders = mount_users.holders(device) if device else []
    if holders:
        who = several([str(pid) for pid in holders])
        return (
            f"waits for the end of the mount in all mount tables: process {who} (a container?) still has the "
            "mount in its own; end that process, or unmount there"
        )
    return "does not wait for a disk" + (f"; see {daemon.log}" if daemon.log else "")
