"""The end of a commit in place in a mount that the kernel serves: a new image, and the overlay anew above it.

The image is made before the overlay is emptied: if that fails, the mount stays as it is, read-only, and the commit
can be repeated. Then the guard exchanges the mounts; files that are open from the old one stay as they were, and
guarded. Where there is no guard, or it cannot do that, the mount ends, for it would show neither the old set nor
the new one; without a guard it is then made anew, with a new one.

All of it is done by a process of its own, which is forked when the command begins: the commit has the index open,
and a process can open it only once.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import shlex
import signal
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from wdsfs.errors import CommitError, MountError, WdsfsError
from wdsfs.kernel import erofs_mount
from wdsfs.kernel.kept_images import put_back
from wdsfs.mount.guard import Guarded
from wdsfs.mount.image_mount import CannotServe, ImageMount, mount_in_background
from wdsfs.mount_registry import Talk

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from wdsfs.mount.live_mount import MakeImage
    from wdsfs.spec.expand import Shard

log = logging.getLogger("wdsfs")

EXCHANGE_SECONDS = 60.0  # how long a guard may take


class Remount:
    """Replaces the mount that `guard` guards, or has guarded, by one of the new shards.

    `failed` says that there is no mount any more.
    """

    def __init__(self, guard: Guarded, make_image: MakeImage) -> None:
        self.guard, self.failed = guard, False
        self._has_image = False
        self._reason = ""  # why the mount was ended
        self._may_mount = False  # only the guard was missing, so it can be mounted again
        forking = multiprocessing.get_context("fork")
        self._process_end, other = forking.Pipe()
        self._process = forking.Process(target=_work, args=(self._process_end, other, guard, make_image))
        self._process.start()
        other.close()

    def make_image(self, shards: Sequence[Shard]) -> None:
        """Make the image of the new set. Raises CommitError: the mount is as it was."""
        reason = self._make_image(shards)
        if reason:
            where, overlay = shlex.quote(self.guard.mountpoint), shlex.quote(str(self.guard.overlay))
            raise CommitError(
                f"{self.guard.mountpoint}: the shards are written, but the kernel cannot serve them: {reason}. So "
                "the mount stays as it is, read-only, and the commit is not finished: repeat the command when "
                f"that is mended; or wdsfs umount {where}, and finish it with --overlay {overlay} SHARDS..."
            )

    def _make_image(self, shards: Sequence[Shard]) -> str:
        reason = self._ask(list(shards))
        self._has_image = not reason
        return reason

    def run(self, shards: Sequence[Shard]) -> None:
        """Mount this set in the place of the old one, or end the mount. REQUIRES: its overlay has been emptied."""
        reason = "" if self._has_image else self._make_image(shards)
        self._reason = reason or self._ask(None)
        if self._reason:
            self._may_mount = self._has_image and not self.guard.alive
            _end(self.guard.mountpoint)

    def _ask(self, question: list[Shard] | None) -> str:
        """Send the process its next step; return why the step failed, or ""."""
        try:
            self._process_end.send(question)
            answer: str = self._process_end.recv()
        except (OSError, EOFError):
            return "the process that does it was killed"
        return answer

    def close(self) -> None:
        """Mount it again, if that is needed and can be. REQUIRES: the overlay has been released."""
        if self._may_mount:
            with contextlib.suppress(OSError):
                self._process_end.send(None)
        self._process_end.close()
        self._process.join()
        self.failed = bool(self._reason) and not (self._may_mount and self._process.exitcode == 0)
        if self.failed:
            log.error(
                "%s: the shards are written, but it could not be mounted anew: %s. It has ended; mount it again",
                *(self.guard.mountpoint, self._reason),
            )


def _end(mountpoint: str) -> None:
    shown = erofs_mount.at(mountpoint)
    if shown is not None:
        erofs_mount.detach_everywhere(shown)


@contextlib.contextmanager
def prepared(guard: Guarded, make_image: MakeImage) -> Iterator[Remount]:
    """A `Remount` for the time of a block. REQUIRES: no thread was started, and no index is open."""
    remount = Remount(guard, make_image)
    try:
        yield remount
    finally:
        remount.close()


def _work(other: Connection, connection: Connection, guard: Guarded, make_image: MakeImage) -> None:
    """The forked process. An interrupt is for the commit, which may be past the point where it can stop."""
    other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = 1
    try:
        _remount(connection, guard, make_image)
        code = 0
    except EOFError:  # the command needs nothing more, or was killed
        code = 0
    except (WdsfsError, OSError, CannotServe) as error:
        _send(connection, str(error))
    except Exception as error:  # of any kind: the process ends below, and would say nothing of it
        log.exception("the mount could not be made anew; please report this")
        _send(connection, repr(error))
    finally:
        os._exit(code)


def _send(connection: Connection, text: str) -> None:
    with contextlib.suppress(OSError):  # it is closed: nobody waits
        connection.send(text)


def _remount(connection: Connection, guard: Guarded, make_image: MakeImage) -> None:
    """Do one step after the other, each when the command says so."""

    shards: list[Shard] = connection.recv()
    with put_back(guard.image, guard.was_exchanged):
        wanted = make_image(guard, shards)
        connection.send("")
        connection.recv()
        reason = exchange(guard, wanted, shards, EXCHANGE_SECONDS)
        connection.send(reason)
        if reason:
            connection.recv()
            connection.close()
            wanted.made = guard.made
            if mount_in_background(wanted):
                raise MountError("the kernel has not mounted it")


def exchange(guard: Guarded, wanted: ImageMount, shards: Sequence[Shard], seconds: float) -> str:
    """Ask the guard to exchange the mounts, within so many `seconds`; return why it did not, or "".

    `shards` are those below the overlay.
    """
    if not guard.alive:
        return f"its guard (process {guard.pid}) has died"
    request = {
        "do": "exchange",
        "image": wanted.image,
        "base": wanted.base,
        "trusting": wanted.trusting,
        "shards": [[os.fsdecode(shard.path), os.fsdecode(shard.name)] for shard in shards],
    }
    try:
        with Talk(guard.mountpoint) as talk:
            return str(talk.ask(request, seconds).get("error") or "")
    except (OSError, ValueError) as error:
        return f"its guard (process {guard.pid}) does not answer: {error}"
