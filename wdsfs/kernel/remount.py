"""Replaces the mount of an overlay by one over new shards, at the end of a commit in place.

The image is made before the overlay is emptied: if that fails, the mount stays, read-only, and the commit
can be repeated. Then the guard exchanges the mounts; files that are open from the old one stay as they were, and
guarded. Where there is no guard, or it cannot do that, the mount ends, for it would show neither the old set nor
the new one; without a guard it is then mounted again, with a new one.

All this is done by a process of its own, which is forked when the command begins: the commit has the index open,
and a process can open it only once.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import multiprocessing
import os
import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from wdsfs.errors import CommitError, MountError, WdsfsError
from wdsfs.formats import OtherVersion
from wdsfs.kernel import erofs_mount
from wdsfs.kernel.guard import Guarded
from wdsfs.kernel.image_mount import ImageMount
from wdsfs.kernel.set_image import CannotServe
from wdsfs.mount_registry import Talk

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from wdsfs.shards import Shard

log = logging.getLogger("wdsfs")

EXCHANGE_SECONDS = 60.0  # how long a guard may take

MakeImage = Callable[["Sequence[Shard]"], ImageMount]  # of new shards
Mount = Callable[[ImageMount], int]  # returns an exit code


class _State(enum.Enum):
    BEGUN = enum.auto()
    READY = enum.auto()  # the image of the new set is made
    SHOWN = enum.auto()
    AGAIN = enum.auto()  # the old mount has ended; only its guard was missing, so it can be mounted again
    ENDED = enum.auto()


class Remount:
    """Replaces the mount that `guard` guards, or has guarded, by one of the new shards."""

    def __init__(self, guard: Guarded, make_image: MakeImage, mount: Mount) -> None:
        self.guard = guard
        self._state, self._reason = _State.BEGUN, ""  # why the mount has ended
        forking = multiprocessing.get_context("fork")
        self._process_end, other = forking.Pipe()
        arguments = (self._process_end, other, guard, make_image, mount)
        self._process = forking.Process(target=_work, args=arguments)
        self._process.start()
        other.close()

    @property
    def failed(self) -> bool:
        """True if there is no mount any more. REQUIRES: it is closed."""
        return self._state in (_State.AGAIN, _State.ENDED)

    def make_image(self, shards: Sequence[Shard]) -> None:
        """Make the image of the new set. Raises CommitError: the mount is as it was."""
        reason = self._ask(list(shards))
        if reason:
            where, overlay = shlex.quote(self.guard.mountpoint), shlex.quote(str(self.guard.overlay))
            raise CommitError(
                f"{self.guard.mountpoint}: the shards are written, but the kernel cannot serve them: {reason}. So "
                "the mount still shows the old shards, read-only, and the commit is not finished. Mend that and "
                f"repeat the command; or run `wdsfs umount {where}`, and commit --overlay {overlay} SHARDS..."
            )
        self._state = _State.READY

    def run(self, shards: Sequence[Shard]) -> None:
        """Mount this set in the place of the old one, or end the mount. REQUIRES: its overlay has been emptied."""
        if self._state is _State.BEGUN:
            self._reason = self._ask(list(shards))
        can_mount = not self._reason
        self._reason = self._reason or self._ask(None)
        if not self._reason:
            self._state = _State.SHOWN
            return
        self._state = _State.AGAIN if can_mount and not self.guard.alive else _State.ENDED
        shown = erofs_mount.at(self.guard.mountpoint)
        if shown is not None:
            erofs_mount.detach_everywhere(shown)

    def _ask(self, request: list[Shard] | None) -> str:
        """Send the process its next step; return why the step failed, or ""."""
        try:
            self._process_end.send(request)
            answer: str = self._process_end.recv()
        except (OSError, EOFError):
            return "the process that mounts them was killed"
        return answer

    def close(self) -> None:
        """Mount it again, if that is needed and can be. REQUIRES: the overlay has been released."""
        if self._state is _State.AGAIN:
            with contextlib.suppress(OSError):
                self._process_end.send(None)
        self._process_end.close()
        self._process.join()
        if self._state is _State.AGAIN and self._process.exitcode == 0:
            self._state = _State.SHOWN
        if self.failed:
            log.error(
                "%s: the shards are written, but could not be mounted: %s. The mount has ended; mount it again",
                *(self.guard.mountpoint, self._reason),
            )


@contextlib.contextmanager
def prepared(guard: Guarded, make_image: MakeImage, mount: Mount) -> Iterator[Remount]:
    """Start a `Remount` for the time of a block. REQUIRES: no thread was started, and no index is open."""
    remount = Remount(guard, make_image, mount)
    try:
        yield remount
    finally:
        remount.close()


def _work(other: Connection, connection: Connection, guard: Guarded, make_image: MakeImage, mount: Mount) -> None:
    """Run the forked process. Interrupts are for the commit, which may be past the point where it can stop."""
    other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = 1
    try:
        _remount(connection, guard, make_image, mount)
        code = 0
    except EOFError:  # the command needs nothing more, or was killed
        code = 0
    except (WdsfsError, OSError, CannotServe) as error:
        _send(connection, str(error))
    except Exception as error:  # of any class: the process ends below, and nobody else would report it
        log.exception("the new image could not be mounted; please report this")
        _send(connection, repr(error))
    finally:
        os._exit(code)


def _send(connection: Connection, text: str) -> None:
    with contextlib.suppress(OSError):  # it is closed: nobody waits
        connection.send(text)


def _remount(connection: Connection, guard: Guarded, make_image: MakeImage, mount: Mount) -> None:
    """Do one step after the other, each when the command says so."""
    shards: list[Shard] = connection.recv()
    image = make_image(shards)
    connection.send("")
    connection.recv()
    reason = exchange(guard, image, shards, EXCHANGE_SECONDS)
    connection.send(reason)
    if reason:
        connection.recv()
        connection.close()
        image.made = guard.made
        if mount(image):
            raise MountError("the kernel has not mounted the new image")


def exchange(guard: Guarded, image: ImageMount, shards: Sequence[Shard], seconds: float) -> str:
    """Ask the guard to exchange the mounts, within this many `seconds`; return why it did not, or "".

    `shards` are those below the overlay.
    """
    if not guard.alive:
        return f"its guard (process {guard.pid}) has died"
    request = {
        "do": "exchange",
        "image": image.image,
        "base": image.base,
        "trusting": image.trusting,
        "shards": [[os.fsdecode(shard.path), os.fsdecode(shard.name)] for shard in shards],
    }
    try:
        with Talk(guard) as talk:
            return str(talk.ask(request, seconds).get("error") or "")
    except OtherVersion as error:
        return str(error)
    except (OSError, ValueError) as error:
        return f"its guard (process {guard.pid}) does not answer: {error}"
