"""The daemon's side of the control socket: its answers to `status`, `refresh`, `diff`, `commit` and `restore`.

`mount_registry.py` has the client's side and the path of the socket. A question and an answer are one line of JSON
each. A commit keeps its connection as long as writes are refused.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shlex
from collections.abc import Sequence
from typing import Any

import trio

from wdsfs import __version__
from wdsfs.fuse.child_process import in_child
from wdsfs.fuse.protocol import notes_of
from wdsfs.fuse.supervisor import Supervisor
from wdsfs.fuse.write_ops import RESTORE
from wdsfs.mount import reports
from wdsfs.mount.followed_set import Growth
from wdsfs.mount.mounted_set import MountedSet
from wdsfs.mount_registry import LINE_MAX, Registration, decode, encode
from wdsfs.overlay.mounted_overlay import MountedOverlay
from wdsfs.overlay.overlay_directory import is_half_done

log = logging.getLogger(__name__)

VALUE_MAX = 1 << 16  # bytes of an extended attribute (XATTR_SIZE_MAX)
NOTIFY_SECONDS, NOTIFY_PAUSE_SECONDS = 5.0, 0.5  # to invalidate caches: in all, and between two attempts
NOT_COUNTED = "no process could be started to report more; the log says why"


class JsonLines:
    """Messages over a stream, each a line of JSON."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._received = b""

    async def receive(self) -> dict[str, Any]:
        """Receive a message. Raises EOFError if the other side has closed, or sends no JSON object."""
        while b"\n" not in self._received:
            part = await self._stream.receive_some(1 << 16)
            if not part or len(self._received) > LINE_MAX:
                raise EOFError
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        try:
            return decode(line)
        except ValueError:
            raise EOFError from None  # not a client of wdsfs

    async def send(self, message: dict[str, Any]) -> None:
        await self._stream.send_all(encode(message))


class ControlSocket:
    """Answers the requests of clients to the mount. `growth` has the current set."""

    def __init__(self, daemon: Registration, growth: Growth, supervisor: Supervisor) -> None:
        self.daemon, self.growth, self.supervisor = daemon, growth, supervisor
        self.mount = growth.served.mount
        self.committing = False  # a client is committing
        self.restoring = trio.Lock()

    @property
    def served(self) -> MountedSet:
        """The current set."""
        return self.growth.served

    async def answer(self, stream: trio.SocketStream) -> None:
        """Answer one client, until it closes the connection."""
        async with stream:
            try:
                lines = JsonLines(stream)
                question = await lines.receive()
                if question.get("do") == "freeze":
                    await self._freeze(lines)
                elif question.get("do") == "restore":
                    await lines.send(await self._restore([os.fsencode(path) for path in question["paths"]]))
                elif question.get("do") == "refresh":
                    await lines.send(await self._refresh())
                elif question.get("do") == "shards":
                    await lines.send(self._shards())
                elif question.get("do") == "status":
                    seen = await in_child(self._report, self.supervisor.device)
                    await lines.send(seen or {"notices": [NOT_COUNTED]})
                else:
                    text = f"{self.mount.mountpoint} is served by wdsfs {__version__}, which has no such request"
                    await lines.send({"error": text})
                await stream.send_eof()  # closing is not enough: a worker forked in the meantime inherits it
            except (trio.BrokenResourceError, trio.ClosedResourceError, EOFError):
                pass
            except Exception:  # no error of a client may end the mount
                log.exception("a client of the control socket was not served")

    async def _freeze(self, lines: JsonLines) -> None:
        """Refuse writes until the client has committed or closed the connection."""
        overlay = self.served.overlay
        if overlay is None or self.committing:
            reason = "has no overlay" if overlay is None else "is already being committed"
            await lines.send({"error": f"{self.mount.mountpoint} {reason}"})
            return
        overlay.freeze(True)  # already frozen if the last client was stopped half-way
        self.committing = True
        try:
            await self._let_finish()
            await lines.send(self._shards())
            with contextlib.suppress(EOFError):
                answer = await lines.receive()
                new, published = ([os.fsencode(path) for path in answer[key]] for key in ("new", "published"))
                self._renew(new, published)
                await lines.send({})
                await lines.receive()  # nothing: the commit is over when the client closes
        finally:
            self.committing = False
            if overlay.is_half_committed:
                log.error(
                    "a commit in place was stopped half-way; to allow changes again, finish it: wdsfs commit "
                    "--in-place %s",
                    shlex.quote(self.mount.mountpoint),
                )
            else:
                overlay.freeze(False)

    async def _refresh(self) -> dict[str, Any]:
        """Look for new and removed shards now."""
        why = self.mount.fixed_because
        if why is not None:
            remedy = ": unmount it, and mount it again" if self.mount.overlay is not None else ""
            return {"error": f"{self.mount.mountpoint} cannot be refreshed: {why}{remedy}"}
        return await self.growth.look(at_once=True)

    async def _restore(self, paths: list[bytes]) -> dict[str, Any]:
        """Undo the changes at these paths by the worker, then invalidate the kernel's caches of these paths."""
        overlay, where = self.served.overlay, self.mount.mountpoint
        if overlay is None:
            return {"error": f"{where} has no overlay"}
        async with self.restoring:
            if overlay.frozen:
                why = (
                    "a commit in place was stopped half-way"
                    if overlay.is_half_committed
                    else "it is being committed"
                )
                return {"error": f"{where}: nothing can be restored: {why}"}
            done = await in_child(lambda: self._ask_worker(overlay.token, paths), self.supervisor.device)
            sent = await self._show_restored(overlay)
        return (
            done if done and sent else {"error": f"{where}: restoring failed; see {self.daemon.log or 'its log'}"}
        )

    async def _show_restored(self, overlay: MountedOverlay) -> bool:
        """Invalidate the kernel's caches of restored paths; return False if this fails now."""
        with trio.move_on_after(NOTIFY_SECONDS):
            while not await in_child(lambda: self._invalidate(overlay), None):  # noqa: ASYNC110  # it fails
                await trio.sleep(NOTIFY_PAUSE_SECONDS)
            overlay.drop_notes()
            return True
        log.error("the kernel may still show old content at the restored paths; the next restore tries again")
        return False

    def _ask_worker(self, token: bytes, paths: list[bytes]) -> dict[str, Any]:
        """Ask a worker, in a child: the mount itself is the only way to a worker."""
        waiting = list(reversed(paths))
        while waiting:
            some = [waiting.pop()]
            while waiting and len(token) + sum(map(len, some)) + len(some) + len(waiting[-1]) <= VALUE_MAX:
                some.append(waiting.pop())
            try:
                os.setxattr(self.mount.mountpoint, RESTORE, token + b"\0".join(some))
            except OSError as error:
                return {"error": f"{self.mount.mountpoint}: nothing more can be restored: {error.strerror}"}
        return {"done": True}

    def _invalidate(self, overlay: MountedOverlay) -> dict[str, Any]:
        """Invalidate the kernel's caches, in a child, as the kernel may wait for a locked directory."""
        for note in notes_of(overlay.notes()):
            try:
                os.write(self.supervisor.device, note)
            except OSError as error:
                if error.errno != errno.ENOENT:  # the kernel does not know this entry
                    raise
        return {"done": True}

    def _shards(self) -> dict[str, Any]:
        shards = [shard for shard in self.served.shards if shard.gone is None]
        names = [[os.fsdecode(shard.name), os.fsdecode(shard.path)] for shard in shards]
        reading = self.mount.selection.reading.as_json()
        without = {
            os.fsdecode(shard.path): [*map(os.fsdecode, shard.without)] for shard in shards if shard.without
        }
        return {"shards": names, "reading": reading, "without": without, "seen": self.served.access.to_json()}

    async def _let_finish(self) -> None:
        """Wait for the current request of a worker, which may have begun before the freeze."""
        board, done = self.supervisor.board, self.supervisor.board.done
        while board.busy and board.done == done:  # noqa: ASYNC110  # shared memory gives no event
            await trio.sleep(0.001)

    def _renew(self, further: Sequence[bytes], published: Sequence[bytes]) -> None:
        """Show the current shards, with `further` shards at the end; a commit has replaced `published`."""
        self.growth.served = self.served.extended(further, published)
        self.supervisor.renew(self.served.tree, self.growth.follower())

    def _report(self) -> dict[str, Any]:
        tree = self.served.lower_tree()
        report = reports.gather(tree.lower, tree.totals, self.supervisor.board, self.daemon.started)
        return {**report, "set": self.growth.state.read(), "unfinished_commit": is_half_done(self.daemon.overlay)}
