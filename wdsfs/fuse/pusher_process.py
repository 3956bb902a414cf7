"""The process of the pusher: what it has of the mount, and how it ends with the mount.

The supervisor forks it when a pass calls for one. What is pushed is decided in `pusher.py`.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable
from typing import NamedTuple

from wdsfs.fuse.child_process import HelperProcess
from wdsfs.fuse.fuse_device import clone_device
from wdsfs.fuse.lister import Lister
from wdsfs.fuse.pass_notes import PassNotes
from wdsfs.fuse.pusher import Pusher
from wdsfs.tree.tree import LowerTree

log = logging.getLogger(__name__)

FAILURES_MAX = 5  # after which nothing is pushed any more
_NOTHING_PUSHED = "nothing is pushed ahead of readers: %s"


class PushedMount(NamedTuple):
    """A mount as the pusher gets it.

    `device` is the FUSE descriptor of the supervisor. `place` is the mount point and the device number of the
    mount, None if it is unknown. `life` is the reading end of a pipe whose writers are the processes that serve.
    `refuse` answers all requests at a descriptor with EIO.
    """

    device: int
    place: tuple[str, int] | None
    life: int
    refuse: Callable[[int], None]


class PusherProcess(HelperProcess):
    """The pusher of a mount, of which the workers' notes are `passes`."""

    def __init__(self, passes: PassNotes) -> None:
        super().__init__("the process that pushes content ahead of readers")
        self.passes = passes
        self._failures = 0

    def fork(self, work: Callable[[], int]) -> None:
        """Fork the process. Without memory for it nothing happens: the calls stay, so the next one tries again."""
        try:
            super().fork(work)
        except OSError as error:
            log.error(_NOTHING_PUSHED, error.strerror)
            return
        self.passes.pusher = self.pid

    def reap(self) -> int | None:
        """Collect the process if it has ended; after some failures in a row nothing is pushed any more."""
        code = super().reap()
        if code is not None:
            self.passes.pusher = 0
        if code is not None and code > 0:  # it has said why
            self._failures += 1
            if self._failures == FAILURES_MAX:
                log.error("nothing is pushed ahead of readers any more, until the next mount")
                self.passes.turn_off()
        return code


def push_ahead(mount: PushedMount, tree: LowerTree, passes: PassNotes) -> int:
    """Push content ahead of readers until no pass calls for it; return the exit code of the process."""
    device = _own_device(mount.device)
    try:
        lister = _lister(mount, device, tree, passes)
    except OSError as error:  # no memory, too many processes: the next pusher tries again
        log.error(_NOTHING_PUSHED, error.strerror)
        return 0
    threading.Thread(target=_outlive, args=(mount, device), daemon=True).start()
    Pusher(device, tree, passes, lister).run(mount.life)
    return 0


def _own_device(shared: int) -> int:
    """Return a descriptor for the pusher alone, and close the shared one; the shared one if there can be no other.

    So when all other processes are killed, the kernel ends the READ for whose page the pusher may be waiting.
    """
    try:
        device = clone_device(shared)
    except OSError:
        return shared
    os.close(shared)
    return device


def _lister(mount: PushedMount, device: int, tree: LowerTree, passes: PassNotes) -> Lister | None:
    """Return what lists samples ahead of clients; None where that is not possible. Raises OSError.

    Without samples there is nothing to list. On the shared descriptor the lister would keep the mount alive, and
    wait for a listing from nobody.
    """
    if mount.place is None or device == mount.device or tree.files_layout:
        return None
    return Lister(tree, passes, *mount.place, release=lambda: os.close(device))


def _outlive(mount: PushedMount, device: int) -> None:
    """Refuse requests once all other processes are gone, in a thread of the pusher.

    The pusher may be waiting, uninterruptibly, for a READ that none of them has received. Its descriptor would
    keep the mount, and so that READ, for ever.
    """
    select.select([mount.life], [], [])
    mount.refuse(device)
