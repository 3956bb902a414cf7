"""The end of a commit in place in a mount that the kernel serves: a new image, and the overlay anew above it.

The image is made by a process of its own, which is forked when the command begins: the commit has the index open,
and a process can open it only once. Until the image is whole the old mount stays, read-only. Then the guard
exchanges the mounts; files that are open from the old one stay as they were, and guarded.
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

from wdsfs.cli.options import Opening
from wdsfs.cli.tree_options import TreeOptions
from wdsfs.errors import MountError, WdsfsError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from wdsfs.mount.guard import Registration
    from wdsfs.spec.expand import Shard

log = logging.getLogger("wdsfs")

EXCHANGE_SECONDS = 60.0  # how long a guard may take


class Remount:
    """Replaces the mount that `guard` guards by one of the new shards."""

    def __init__(self, guard: Registration, opening: Opening) -> None:
        self.guard = guard
        forking = multiprocessing.get_context("fork")
        receiver, self._sender = forking.Pipe(duplex=False)
        self._process = forking.Process(target=_wait, args=(receiver, self._sender, guard, opening))
        self._process.start()
        receiver.close()

    def run(self, shards: Sequence[Shard]) -> None:
        """Mount this set in the place of the old one. Errors are logged: the commit is done all the same."""
        self._sender.send(list(shards))
        self._process.join()
        if self._process.exitcode:
            where = self.guard.mountpoint
            log.warning(
                "%s could not be mounted anew, so it shows the old shards, or nothing; unmount it (wdsfs umount "
                "%s), and mount it again",
                *(where, shlex.quote(where)),
            )

    def close(self) -> None:
        """End the process, if it was not needed."""
        self._sender.close()
        self._process.join()


@contextlib.contextmanager
def prepared(guard: Registration, opening: Opening) -> Iterator[Remount]:
    """A `Remount` for the time of a block. REQUIRES: no thread was started, and no index is open."""
    found = Remount(guard, opening)
    try:
        yield found
    finally:
        found.close()


def _wait(receiver: Connection, sender: Connection, guard: Registration, opening: Opening) -> None:
    """The forked process. An interrupt is for the commit, which may be past the point where it can stop."""
    sender.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        shards: list[Shard] = receiver.recv()
    except EOFError:
        os._exit(0)
    code = 1
    try:
        _mount(shards, guard, opening)
        code = 0
    except (WdsfsError, OSError) as error:
        log.error("%s", error)
    except Exception:  # of any kind: the process ends below, and would say nothing of it
        log.exception("the mount could not be made anew; please report this")
    finally:
        os._exit(code)


def _mount(shards: Sequence[Shard], guard: Registration, opening: Opening) -> None:
    from pathlib import Path

    from wdsfs.cli.kernel_engine import image_mount
    from wdsfs.image.kept import put_back
    from wdsfs.status import control
    from wdsfs.views.composition import Composition

    tree = TreeOptions(guard.layout, guard.names, guard.merge, index_tree=False, composition=Composition())
    overlay = Path(str(guard.overlay))
    quiet = opening._replace(quiet=True, workers=None)
    with put_back(guard.image, guard.was_exchanged):
        wanted = image_mount(shards, guard.mountpoint, tree, quiet, guard.options, guard.trusting, overlay)
        question = {
            "do": "exchange",
            "image": wanted.image,
            "base": wanted.base,
            "trusting": wanted.trusting,
            "shards": [[os.fsdecode(one.path), os.fsdecode(one.name)] for one in shards],
        }
        with control.Talk(guard) as talk:
            answer = talk.ask(question, seconds=EXCHANGE_SECONDS)
        if answer.get("error"):
            raise MountError(str(answer["error"]))
