"""The overlay of one mount: its lock, the check that it fits the set, and memory that the workers share.

Made once, before the workers are forked; the lock and the shared memory pass on to them.
"""

from __future__ import annotations

import logging
import mmap
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from wdsfs import trust
from wdsfs.errors import OverlayUnusable
from wdsfs.overlay.overlay_directory import OverlayDirectory, clean, hold, unfinished, write_settings
from wdsfs.overlay.overlay_shards import check_set, judge_reading
from wdsfs.overlay.upper_directory import UpperDirectory
from wdsfs.overlay.writable_tree import JOURNAL_BYTES, RequestJournal, WritableTree
from wdsfs.shards import Shard
from wdsfs.tree.tree import LowerTree, View

log = logging.getLogger(__name__)


_BEGUN, _FROZEN = JOURNAL_BYTES, JOURNAL_BYTES + 1  # bytes after the journal


class MountedOverlay:
    """The overlay in `directory` over these shards in this view. Raises OverlayUnusable, OverlayBusy.

    `owner` (uid, gid) owns the files of the shards; `umask` is applied to their modes.
    """

    def __init__(
        self, directory: Path, shards: Sequence[Shard], view: View, owner: tuple[int, int], umask: int = 0
    ) -> None:
        self.place = OverlayDirectory(directory.absolute())
        self.owner, self.umask = owner, umask
        self.token = os.urandom(16)  # a secret of the daemon and its workers
        self._memory = mmap.mmap(-1, JOURNAL_BYTES + 2)
        self._notes = os.memfd_create("wdsfs-notes")
        try:
            trust.directory(directory, create=True)
            self._lock = hold(self.place)  # open as long as this process or a worker is there
            if self.is_half_committed:
                raise OverlayUnusable(
                    f"a commit in place of {directory} was stopped half-way; finish it first: wdsfs commit "
                    f"--in-place --overlay {shlex.quote(str(directory))} SHARDS... (or give it up: use --abandon "
                    "instead of --in-place)"
                )
            clean(self.place)
            settings = check_set(self.place, shards, view)
            judge_reading(self.place, settings)
            UpperDirectory(self.place, owner).close()  # makes missing directories; raises the errors of a worker
            if not self.place.settings.exists():
                write_settings(self.place, settings)
        except OSError as error:
            raise OverlayUnusable(f"{directory} cannot be used as an overlay: {error.strerror}") from error

    def tree(self, below: LowerTree) -> WritableTree:
        """Return the tree of a worker; the tree of a second worker continues where the first one was stopped."""
        inherited = bool(self._memory[_BEGUN])
        upper = UpperDirectory(self.place, self.owner, inherited=inherited)
        self._memory[_BEGUN] = 1
        return WritableTree(below, upper, self.owner, RequestJournal(self._memory), self.umask)

    def note(self, note: bytes) -> None:
        """Keep a notification for the kernel, in memory that outlives this process, until it can be sent."""
        os.pwrite(self._notes, note, os.fstat(self._notes).st_size)

    def notes(self) -> bytes:
        """Return all notifications that were kept."""
        return os.pread(self._notes, os.fstat(self._notes).st_size, 0)

    def drop_notes(self) -> None:
        """Forget the notifications that were kept: they have been sent."""
        os.ftruncate(self._notes, 0)

    def finish(self) -> None:
        """Write everything to disk at the end, also when no worker was left to do it."""
        try:
            UpperDirectory(self.place, self.owner).close(clean=True)
        except (OSError, OverlayUnusable) as error:
            log.error("the last writes may not be on disk: %s", error)

    @property
    def is_half_committed(self) -> bool:
        """True if a commit in place was interrupted: until it is finished, the overlay must not be used."""
        return unfinished(self.place)

    @property
    def frozen(self) -> bool:
        """True while all changes are refused."""
        return bool(self._memory[_FROZEN])

    def freeze(self, frozen: bool) -> None:
        """Refuse all changes, or allow them again."""
        self._memory[_FROZEN] = frozen
