"""A live mount by FUSE: commands ask its daemon, over the socket of its registration.

What the daemon answers is decided in `control_socket.py`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shlex
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from wdsfs import host, mount_registry, mount_table, mount_users
from wdsfs.errors import CommitError, MountError, OverlayBusy, OverlayUnusable, bytes_text, several
from wdsfs.formats import OtherVersion
from wdsfs.mount import live_mount
from wdsfs.mount_registry import DEAD, FOREIGN, RUNNING, SILENT, UNSUPERVISED, Registration, Talk
from wdsfs.names import Reading
from wdsfs.overlay.overlay_directory import OverlayDirectory, held
from wdsfs.overlay.upper_files import sync_filesystem
from wdsfs.shards import Shard
from wdsfs.tree.set_options import TreeOptions
from wdsfs.tree.shard_access import access_from_json
from wdsfs.trust import user_name

log = logging.getLogger(__name__)

REFRESH_SECONDS = 24 * 3600.0  # indexing new shards may take long; a daemon that ends closes the connection
_ANNOUNCE_SECONDS = 3.0  # of waiting for a daemon, after which it is said what it does


class FuseMount(live_mount.LiveMount):
    """A mount by FUSE; without a registration it is one of another user, or of another session."""

    engine = mount_registry.FUSE
    has_hidden_directory = has_attributes = True
    _patience = live_mount.FREEZE_SECONDS  # a page waits for a later answer, and for no first one

    @property
    def _daemon(self) -> Registration:
        if self.registration is None:
            raise self._foreign()
        return self.registration

    def _foreign(self) -> MountError:
        return MountError(
            f"{self.mountpoint}: is a mount of another user or session, whose daemon does not answer here; run "
            "the command there"
        )

    @property
    def options(self) -> TreeOptions:
        return live_mount.options_of(self._daemon)

    @property
    def directory(self) -> str:
        return self._daemon.directory

    @property
    def remedy(self) -> str:
        return f"wdsfs umount {shlex.quote(self.mountpoint)}, and mount it again"

    # --- asking

    def _ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer of the daemon. Raises MountError, OverlayBusy."""
        if self.registration is None:
            raise self._foreign()
        try:
            with Talk(self.registration) as talk:
                answer = talk.ask(request, seconds)
        except (OSError, ValueError) as error:
            raise self._silent(error) from None
        if answer.get("error"):
            raise OverlayBusy(answer["error"])
        return answer

    def _silent(self, error: Exception) -> MountError:
        again = f"end it with `wdsfs umount {shlex.quote(self.mountpoint)}`, and mount it again"
        if not self.is_alive:
            return MountError(f"{self.mountpoint}: the mount has ended: its daemon is gone; {again}")
        if isinstance(error, OtherVersion):
            return MountError(f"{self.mountpoint} {error}")
        return MountError(f"{self.mountpoint}: its daemon does not answer ({error}); {again}")

    def shown(self) -> live_mount.ShownSet:
        seconds, self._patience = self._patience, mount_registry.ANSWER_SECONDS
        return _shown_set(self._ask({"do": "shards"}, seconds))

    def lower(self) -> live_mount.ShownSet:
        return self.shown()

    def restore(self, paths: Sequence[bytes]) -> None:
        self._ask({"do": "restore", "paths": [os.fsdecode(path) for path in paths]}, live_mount.FREEZE_SECONDS)

    def refresh(self) -> dict[str, Any]:
        try:
            return self._ask({"do": "refresh"}, REFRESH_SECONDS)
        except OverlayBusy as error:
            raise MountError(str(error)) from None

    @contextlib.contextmanager
    def frozen(self) -> Iterator[live_mount.Frozen]:
        self._sync()
        try:
            with contextlib.ExitStack() as stack:
                talk = stack.enter_context(Talk(self._daemon))
                answer = talk.ask({"do": "freeze"}, live_mount.FREEZE_SECONDS)
                opened = stack.pop_all()
        except (OSError, ValueError) as error:
            raise self._silent(error) from None
        with opened:
            if "error" in answer:
                raise OverlayBusy(answer["error"])
            try:
                yield live_mount.Frozen(_shown_set(answer), self.mountpoint, talk)
            finally:
                talk.finish(live_mount.THAW_SECONDS)  # who writes when the command has ended gets no EBUSY

    def _sync(self) -> None:
        """Flush changes of mapped files to the overlay. Raises CommitError, and MountError for a dead mount."""
        try:
            sync_filesystem(self.mountpoint)
        except OSError as error:
            if error.errno in (errno.ENOTCONN, errno.ECONNABORTED):
                raise self._silent(error) from None
            # The kernel says this once, whichever file it is of; what it could not write is dropped.
            why = "its shard was replaced meanwhile" if error.errno == errno.ESTALE else error.strerror
            raise CommitError(
                f"{self.mountpoint}: a change of a mapped file could not be written ({why}), "
                "so nothing was committed; the log (see `wdsfs status`) says more. Make the change again if it is "
                "needed, then repeat the command"
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
            "mode": "ro" if live_mount.is_read_only(self.mountpoint, self.overlay) else "rw",
        }

    def _report_of_others(self) -> dict[str, Any]:
        """Report what the kernel knows of a mount of another user, whose daemon may never answer."""
        mounted = mount_table.mounted_at(self.mountpoint)
        user = user_name(0 if mounted is None else mounted.user)
        return {
            "engine": self.engine,
            "mountpoint": self.mountpoint,
            "state": FOREIGN,
            "notices": [f"its daemon belongs to {user}: `wdsfs status` of that user says more"],
            "user": user,
            "specs": [] if mounted is None else [os.fsdecode(mounted.source).removeprefix("wdsfs#")],
            "mode": "ro" if mounted is None or "ro" in mounted.options else "rw",
        }

    def _status(self) -> dict[str, Any]:
        """Return the status that the daemon reports; a notice if it has another version; empty if it is silent."""
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

    def end(self, *, lazy: bool = False, wait_seconds: float = live_mount.END_SECONDS) -> None:
        """End the mount; its requests first, if its daemon is gone and nobody answers them."""
        daemon = self.registration
        if daemon is not None and daemon.alive:
            _continue(daemon)
        super().end(lazy=lazy, wait_seconds=wait_seconds)

    def _end_requests(self) -> None:
        """Fail all requests if nobody answers them: readers would wait for ever. Raises MountError."""
        if self.registration is None or self._state_without_answer(self.registration) != SILENT:
            return
        mounted = mount_table.mounted_at(self.mountpoint)
        try:
            if mounted is not None:
                mount_table.abort(mounted)
        except OSError:
            raise MountError(
                f"{self.mountpoint}: its daemon is gone, and only root can end what waits for it: "
                f"sudo umount --force --lazy {shlex.quote(self.mountpoint)}"
            ) from None

    def _is_dead(self) -> bool:
        if self.registration is None:
            return _state_of_mount(self.mountpoint) == DEAD
        return not self.registration.alive

    def _wait_for_process(self, registration: Registration, seconds: float, device: int) -> None:
        """Wait until the daemon is gone: as long as it waits for a disk, and else up to `seconds`."""
        since = time.monotonic()
        deadline, announced = since + seconds, False
        while registration.alive:
            now = time.monotonic()
            if waits_for_disk(registration.pid):
                deadline = now + seconds
                if not announced and now - since > _ANNOUNCE_SECONDS:
                    announced = True
                    log.info(
                        "waiting for process %s: %s. An interrupt (Ctrl-C) ends only the waiting",
                        *(registration.pid, self._what_is_written()),
                    )
            if now > deadline:
                still = f"process {registration.pid} is still there, {now - since:.0f} s after the unmount"
                raise MountError(f"{still}, and {_why_still(registration, device)}")
            time.sleep(0.01)
        self._wait_for_overlay(registration, seconds)

    def _wait_for_overlay(self, registration: Registration, seconds: float) -> None:
        """Wait for workers that have outlived a killed daemon: the next mount can have the overlay then."""
        if self.overlay is None or mount_registry.find_registration(self.mountpoint) != registration:
            return  # one that ends in good order waits for its workers, and is not registered any more
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                with held(OverlayDirectory(Path(self.overlay))):
                    return
            except OverlayBusy:
                time.sleep(0.01)
            except (OverlayUnusable, OSError):  # it is removed, or another user's
                return

    def _what_is_written(self) -> str:
        """Return why the daemon of a mount that is gone is still there."""
        if self.overlay is None:
            return "it waits for a disk"
        left = host.unwritten_bytes()
        rest = "" if left is None else f"; this machine has {bytes_text(left)} to write in all"
        return f"it writes the changes in {self.overlay} to the disk{rest}"


def _shown_set(answer: dict[str, Any]) -> live_mount.ShownSet:
    """Return the set of a mount, by the answer of its daemon."""
    reading, without = Reading(**answer["reading"]), answer["without"]
    shards = [Shard.of_texts(path, name, reading, without.get(path, ())) for name, path in answer["shards"]]
    return live_mount.ShownSet(answer, shards, access_from_json(answer["seen"]))


def _state_of_mount(mountpoint: str) -> str:
    """Return DEAD for a mount that only the kernel still lists, SILENT for one that does not answer in time."""
    import subprocess  # late: every command loads this module, and only this takes processes

    # Not in this process: if the workers hang, the question hangs, too. It asks for the file system: the kernel
    # may have cached the attributes of the directory, and returns these for a dead mount, too.
    stat = subprocess.Popen(
        ["stat", "--file-system", "--", mountpoint], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        return DEAD if stat.wait(mount_registry.ANSWER_SECONDS) else UNSUPERVISED
    except subprocess.TimeoutExpired:
        stat.kill()  # and not waited for: a request that a worker has taken cannot be killed
        return SILENT


def waits_for_disk(pid: int) -> bool:
    """Return True if a process or one of its children is in uninterruptible sleep, which only a disk ends."""
    try:
        pids = [pid, *mount_registry.children(pid)]
        return any(Path(f"/proc/{process}/stat").read_bytes().rpartition(b") ")[2][:1] == b"D" for process in pids)
    except OSError:  # one has just ended
        return False


def _continue(daemon: Registration) -> None:
    """Let stopped processes of a mount go on (SIGCONT): they could neither answer the unmount nor end."""
    for pid in (daemon.pid, *mount_registry.children(daemon.pid)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGCONT)


def _why_still(daemon: Registration, device: int) -> str:
    """Return why a daemon may outlive its mount, and what to do."""
    holders = mount_users.holders(device) if device else []
    if holders:
        who = several([str(pid) for pid in holders])
        return (
            f"ends when the mount is gone everywhere: process {who} (a container?) has a mount table of its own, "
            "which still has the mount; end that process, or unmount there"
        )
    return "does not wait for a disk" + (f"; see {daemon.log}" if daemon.log else "")
