"""The interface to a live mount of either engine: its report and set; freezes, refreshes, restores, ends it.

`live_fuse.py` and `kernel/live_kernel.py` implement it, `mount_search.py` finds mounts. No command asks for the
engine.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from wdsfs import host, mount_table, mount_users
from wdsfs.errors import DEAD_MOUNT_ERRNOS, MountError, several
from wdsfs.host import in_directory
from wdsfs.mount_registry import Registration, Talk, forget
from wdsfs.overlay.overlay_directory import is_half_done

if TYPE_CHECKING:
    from wdsfs.shards import Shard
    from wdsfs.tree.set_options import Opening, TreeOptions
    from wdsfs.tree.shard_access import Access
    from wdsfs.tree.shard_set import ShardSet

log = logging.getLogger(__name__)

FREEZE_SECONDS = THAW_SECONDS = 60.0  # how long a mount may take to stand still, and to go on
RENEW_SECONDS = 60.0  # how long a daemon may take to show new shards
END_SECONDS = 30.0  # how long a process may outlive its mount
_USERS_NAMED = 5  # processes that a message names
# Between attempts at a busy mount: its own lister (`fuse/lister.py`) has a directory open for milliseconds.
_BUSY_SECONDS = 0.01, 0.05, 0.2
_BUSY = re.compile(r": [A-Za-z ]+ busy\.?$", re.MULTILINE)  # of fusermount3


@dataclass(frozen=True, slots=True)
class ShownSet:
    """The set of a mount at one moment: its shards in their order, how they are reached, and remarks for its user.

    Equal for the same set: `state` differs for another one.
    """

    state: object
    shards: list[Shard] = field(compare=False)
    access: Access = field(compare=False)
    news: str = field(compare=False, default="")


class Frozen:
    """A mount whose daemon refuses writes for as long as the conversation lasts: its overlay is committed.

    `lower` is the set below the overlay. `is_wrong`: the mount may not show the new shards.
    """

    def __init__(self, lower: ShownSet, mountpoint: str, talk: Talk) -> None:
        self.lower, self.is_wrong = lower, False
        self._mountpoint, self._talk = mountpoint, talk

    def show(self, new: Sequence[bytes], published: Sequence[bytes]) -> None:
        """Show the further shards `new`, and open those at the paths `published` again.

        REQUIRES: the overlay has been emptied.
        """
        paths = {"new": new, "published": published}
        try:
            request = {key: [os.fsdecode(path) for path in some] for key, some in paths.items()}
            self._talk.ask(request, RENEW_SECONDS)
        except (OSError, ValueError) as error:  # the shards are written all the same
            self.is_wrong = True
            log.error(
                "%s: the shards are written, but its daemon has not answered (%s), so it may show old ones; "
                "unmount it, and mount it again",
                *(self._mountpoint, error),
            )


class LiveMount(ABC):
    """A live mount, or one that was left behind by a process that is gone.

    `registration` is that of its process, alive or not; None if there is none. `overlay` is the directory of its
    changes, `index` the directory of its index, None for the usual one.
    """

    engine: ClassVar[str]
    has_hidden_directory: ClassVar[bool]  # `.wdsfs`
    has_attributes: ClassVar[bool]  # `user.wdsfs.*` of its files, which say where these come from

    def __init__(self, mountpoint: str, registration: Registration | None) -> None:
        self.mountpoint, self.registration = mountpoint, registration
        self.overlay = None if registration is None else registration.overlay
        self.index = None if registration is None else registration.index

    @property
    @abstractmethod
    def remedy(self) -> str:
        """The remedy where its process is gone or silent, for a user."""

    @property
    def unfinished_commit(self) -> bool:
        """True if a commit in place of its overlay was stopped half-way."""
        return is_half_done(self.overlay)

    @property
    def is_alive(self) -> bool:
        """True if its process is there."""
        return self.registration is not None and self.registration.alive

    @property
    @abstractmethod
    def options(self) -> TreeOptions:
        """The options with which it shows its set, as its process or its image says. Raises MountError."""

    @property
    @abstractmethod
    def directory(self) -> str:
        """The directory that relative paths in the options are of. Raises MountError."""

    @abstractmethod
    def report(self) -> dict[str, Any]:
        """Return the report of `wdsfs status --json`."""

    @abstractmethod
    def shown(self) -> ShownSet:
        """Return the set that is shown now. Raises MountError, OverlayBusy, OSErrors."""

    @contextmanager
    def opened(self, shown: ShownSet, opening: Opening, *, on_demand: bool = False) -> Iterator[ShardSet]:
        """Open the set that the mount shows, without refusing damage: the mount has judged it. Raises WdsfsError.

        `on_demand` is that of `open_known_set`.
        """
        from wdsfs.tree.opening import open_known_set  # late: it loads NumPy
        from wdsfs.tree.view_set import is_view

        composition = self.options.composition
        tolerance = opening.tolerance._replace(is_option=False)
        index_dir = Path(self.index) if opening.index_dir is None and self.index else opening.index_dir
        opening = opening._replace(index_dir=index_dir, tolerance=tolerance)
        with ExitStack() as stack:
            # Relative paths of joined shards and label files are of the directory of the mount's command.
            with in_directory(self.directory) if composition.names_files else nullcontext():
                view = composition if is_view(shown.shards, composition) else None
                opened = open_known_set(shown.shards, opening, view, access=shown.access, on_demand=on_demand)
                below = stack.enter_context(opened)
            yield below

    @abstractmethod
    def lower(self) -> ShownSet:
        """Return the set below its overlay, by the paths of the shards. Raises MountError, OverlayBusy."""

    @abstractmethod
    def frozen(self) -> AbstractContextManager[Frozen]:
        """Freeze the mount for a block: nobody can write to it, and everything written before is on disk.

        A commit in place that stops half-way leaves it so. Raises MountError, OverlayBusy, CommitError.
        """

    @abstractmethod
    def restore(self, paths: Sequence[bytes]) -> None:
        """Show these paths as the shards have them. Raises MountError, OverlayBusy."""

    @abstractmethod
    def refresh(self) -> dict[str, Any]:
        """Look at SHARDS again, and show what they stand for now; return what `wdsfs refresh --json` says.

        Raises MountError.
        """

    def end(self, *, lazy: bool = False, wait_seconds: float = END_SECONDS) -> None:
        """End the mount, dead or alive; returns when its process is gone, unless `lazy`. Raises MountError."""
        mounted = mount_table.mounted_at(self.mountpoint)
        if mounted is not None:  # else another process has ended it; leftovers are cleared below
            self._unmount(lazy)
        if self.registration is None:
            return
        if not lazy:
            self._wait_for_process(self.registration, wait_seconds, 0 if mounted is None else mounted.device)
        if not self.registration.alive:
            forget(self.registration)

    def _unmount(self, lazy: bool) -> None:
        for seconds in (*_BUSY_SECONDS, 0.0):
            # Asked again at each attempt: the daemon may be about to end, and its clients then wait for nobody.
            is_dead = self._is_dead()
            if is_dead:
                self._end_requests()
            if _unmounted(self.mountpoint, lazy or is_dead):
                return
            time.sleep(seconds)
        raise MountError(_busy_text(self.mountpoint))

    def _end_requests(self) -> None:  # noqa: B027  # not abstract: the kernel answers its own
        """Fail the requests of a dead mount that nobody will answer. Raises MountError."""

    def _is_dead(self) -> bool:
        """Return True if nobody serves the mount any more."""
        try:
            os.statvfs(self.mountpoint)
        except OSError as error:
            return error.errno in DEAD_MOUNT_ERRNOS
        return False

    @abstractmethod
    def _wait_for_process(self, registration: Registration, seconds: float, device: int) -> None:
        """Wait for the end of the process of a mount that is gone; `device` is that of the mount, 0 if unknown.

        Raises MountError.
        """


class ShownTree(Protocol):
    """The options of a tree, as a process has registered them, or as an image has them."""

    @property
    def layout(self) -> str: ...
    @property
    def names(self) -> str: ...
    @property
    def merge(self) -> bool: ...
    @property
    def index_tree(self) -> bool: ...
    @property
    def composition(self) -> str: ...


def options_of(about: ShownTree) -> TreeOptions:
    """Return the options of a tree that a process has registered, or that an image has."""
    from wdsfs.tree.composition import parse_composition  # late: few commands need them
    from wdsfs.tree.set_options import TreeOptions  # late: few commands need them

    composition = parse_composition(about.layout, about.composition)
    return TreeOptions(about.layout, about.names, about.merge, about.index_tree, composition)


def is_read_only(mountpoint: str, overlay: str | None) -> bool:
    """Return True for a mount without an overlay, or one that was mounted with `-o ro`."""
    mounted = mount_table.mounted_at(mountpoint)
    return not overlay or (mounted is not None and "ro" in mounted.options)


def _unmounted(path: str, lazy: bool) -> bool:
    """Unmount what is at this path; return False if it is in use. Raises MountError."""
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
        env={**os.environ, "LC_ALL": "C"},  # in English, for the message is searched
    )
    if done.returncode and not _BUSY.search(done.stderr):
        raise MountError(done.stderr.strip())
    return not done.returncode


def _busy_text(path: str) -> str:
    """Return the message about a mount that is used: by whom, as far as this user may see."""
    quoted = shlex.quote(path)
    users = [f"{user.command} ({user.pid}, {user.what})" for user in mount_users.users(os.fsencode(path))]
    who = f"by {several(users, _USERS_NAMED)}" if users else f"by whom only root sees: sudo fuser -vm {quoted}"
    return f"{path}: is in use {who}; end that, or detach the mount now: wdsfs umount --lazy {quoted}"
