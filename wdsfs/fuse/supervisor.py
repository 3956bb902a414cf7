"""The processes of a mount: a supervisor that holds the FUSE descriptor and serves nothing, workers that serve.

When a worker dies, however, the supervisor forks another and asks the kernel to hand out again what was in
flight (FUSE_NOTIFY_RESEND, Linux 6.9): its clients wait some milliseconds and see no error. An older kernel is
not asked; there each worker has a clone of the descriptor, and its death fails its own request only. When the
supervisor dies, the workers go on.

This holds because a worker has no state that another cannot work out, and because reading twice is harmless.

A worker that waits for a disk says so on the board; when nobody else is left to serve, the supervisor forks
more, which leave again when they are not needed. One that is long at a request without such a reason hangs and
is replaced. A request at which one worker after another dies gets EIO for a while (`status/counters.py`). Where
workers die before they come to any request, all requests do, from a worker that touches nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import logging
import os
import signal
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import trio

from wdsfs.dataset.tree import MountedTree
from wdsfs.errors import MountError
from wdsfs.fuse import protocol, worker
from wdsfs.fuse.read_ops import BACKGROUND, Operations
from wdsfs.status.counters import DEADLY, DEADLY_NS, SLOTS, Board

log = logging.getLogger(__name__)

WORKERS_MAX = 16  # with those that wait for disks
HANG_SECONDS = 60.0  # at one request, without waiting for a disk
LOOK_SECONDS = 1.0  # how often the supervisor looks for hanging workers
CRASHES_MAX = 5  # deaths in a row without a single answer in between
QUARANTINE_SECONDS = 0.3  # how long requests get EIO then: what is in flight is resent at once

_CLONE = 0x8004E500  # FUSE_DEV_IOC_CLONE: _IOR(229, 0, uint32_t)
_SURPLUS, _AGAIN = 10, 11  # exit codes of a worker that is not needed any more, and of one to be replaced
_BACKOFF = (0.0, 0.0, 0.05, 0.2, 0.5, 1.0)  # seconds before a replacement, by crashes in a row


@dataclass(slots=True)
class _Worker:
    pid: int
    slot: int
    device: int | None  # the supervisor's copy of the worker's own descriptor, on kernels that cannot resend


class Supervisor:
    """Serves pyfuse3's session, which must have been mounted, with several processes.

    `make_tree` is called in each worker: it opens everything anew, since neither LMDB nor descriptors with a
    position may be shared over a fork. `follow` is called in a process of its own with what `epochs` says, and
    returns when the file system is gone.
    """

    def __init__(
        self,
        operations: Operations[Any],  # for the kind of tree that `make_tree` makes
        board: Board,
        make_tree: Callable[[], MountedTree],
        workers: int,
        spin: float,
        follow: Callable[[Supervisor], None] | None = None,
    ) -> None:
        self.operations, self.board, self.make_tree = operations, board, make_tree
        board.supervise(os.getpid())
        self.wanted, self.spin, self.follow = workers, spin, follow
        self.device = _session_descriptor()
        self.workers: dict[int, _Worker] = {}
        self.resends = False  # the kernel hands out again what was not answered
        self.epochs = False  # it can be told to ask again for everything
        self._follower = 0
        self._dismissed: set[int] = set()  # workers that are killed on purpose
        self._ended = False
        self._crashes, self._done_before = 0, 0
        self._quarantine_until = 0.0
        # What follows changes must not keep a mount up that nobody serves: it ends with the last writer of this.
        self.life, self._living = os.pipe()
        self._calls, self._call = os.pipe()
        os.set_blocking(self._call, False)  # without a supervisor nobody reads it

    # --- the supervisor

    def answer_init(self) -> None:
        """Answer the kernel's first request, so that workers can be forked. Raises MountError, OSError."""
        message = os.read(self.device, protocol.REQUEST_MIN)
        _, unique, _, body = protocol.take_apart(message)
        try:
            kernel = protocol.kernel_of(body)
        except ValueError as error:
            os.write(self.device, protocol.header(unique, 0, errno.EPROTO))
            raise MountError(f"{error}") from None
        answer = protocol.start(kernel, self.operations.flags, BACKGROUND, self.operations.write_max)
        os.write(self.device, protocol.header(unique, len(answer)) + answer)
        self.resends = self._notify(protocol.resend())
        self.epochs = self._notify(protocol.forget_all())

    def _notify(self, note: bytes) -> bool:
        """Whether the kernel has taken this."""
        try:
            os.write(self.device, note)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS):
                log.debug("a notification was refused: %s", error)
            return False
        return True

    async def run(self) -> None:
        """Fork the workers and keep them up until the file system is unmounted."""
        gc.freeze()  # what exists now stays shared with the workers, untouched by their collectors
        async with trio.open_nursery() as nursery:
            with trio.open_signal_receiver(signal.SIGCHLD) as deaths:
                self._top_up()
                nursery.start_soon(self._watch)
                nursery.start_soon(self._hear_calls)
                while not (self._ended and not self.workers):
                    await deaths.__anext__()
                    await self._replace(self._reap())
            nursery.cancel_scope.cancel()

    def stop(self) -> None:
        """Kill all workers; `run` then returns. For when the mount is gone or must go."""
        self._ended = True
        for pid in (*self.workers, self._follower):
            with contextlib.suppress(ProcessLookupError):
                if pid:
                    os.kill(pid, signal.SIGKILL)

    def renew(self, make_tree: Callable[[], MountedTree], follow: Callable[[Supervisor], None] | None) -> None:
        """Go on with workers that open something else, and have the kernel ask again for whatever it knows."""
        self.make_tree, self.follow = make_tree, follow
        self._dismissed.update(self.workers)
        for pid in (*self.workers, self._follower):
            with contextlib.suppress(ProcessLookupError):
                if pid:
                    os.kill(pid, signal.SIGKILL)
        if self.epochs:
            self._notify(protocol.forget_all())

    def _fork(self, extra: bool = False) -> None:
        slot = next(number for number in range(SLOTS) if number not in {w.slot for w in self.workers.values()})
        try:
            device = None if self.resends else _clone(self.device)
            pid = os.fork()
        except OSError as error:  # no memory, too many processes: the next look tries again
            log.error("a worker cannot be started: %s", error.strerror)
            return
        if not pid:
            code = 1
            try:
                code = self._work(slot, device, extra)
            except BaseException:
                log.exception("a worker failed")
            finally:
                os._exit(code)
        self.workers[pid] = _Worker(pid, slot, device)
        self.board.slot(slot).start(pid)

    def _fork_follower(self) -> None:
        try:
            self._follower = os.fork()
        except OSError as error:
            log.error("changes of shards are noticed late: %s", error.strerror)
            return
        if not self._follower:
            code = 1
            try:
                _be_a_child()
                os.close(self._living)
                self._close_devices()
                if self.follow is not None:
                    self.follow(self)
                code = 0
            except BaseException:
                log.exception("the process that hears of changes failed")
            finally:
                os._exit(code)
        self.board.helper = self._follower

    def _reap(self) -> int:
        """Take note of every worker that has ended; returns how many of them died."""
        dead = 0
        if self._follower and os.waitpid(self._follower, os.WNOHANG)[0]:
            self._follower = self.board.helper = 0
        for one in list(self.workers.values()):
            pid, status = os.waitpid(one.pid, os.WNOHANG)
            if pid:
                del self.workers[pid]
                dead += self._judge(one, os.waitstatus_to_exitcode(status))
                self.board.slot(one.slot).reset()
                if one.device is not None:
                    os.close(one.device)  # the kernel now fails what the worker had in flight
        return dead

    async def _replace(self, dead: int) -> None:
        if not dead or self._ended:
            return
        self.board.replaced(dead)
        self._count_crashes(dead)
        if self.resends:  # what was in flight comes before whatever has been asked since
            self._notify(protocol.resend())
        await trio.sleep(_BACKOFF[min(self._crashes, len(_BACKOFF) - 1)])
        self._top_up()

    def _top_up(self) -> None:
        """Fork as many workers as are missing."""
        if self._ended:
            return
        # While requests are refused, one worker does that.
        wanted = 1 if time.monotonic() < self._quarantine_until else self.wanted
        for _ in range(wanted - len(self.workers)):
            self._fork()
        if self.follow is not None and not self._follower:
            self._fork_follower()

    def _judge(self, one: _Worker, code: int) -> int:
        """Whether this end was a death."""
        if one.pid in self._dismissed:
            self._dismissed.remove(one.pid)
            return 1
        if code == 0:  # the session is over
            self._ended = True
        elif code == _AGAIN:
            return 1
        elif code != _SURPLUS and not self._ended:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            log.warning("worker %s ended (%s); it is replaced", one.pid, how)
            self._blame(self.board.slot(one.slot).request)
            return 1
        return 0

    def _blame(self, request: int | None) -> None:
        """Have workers refuse a request that keeps killing them."""
        if request is not None and self.board.blame(request) == DEADLY:
            log.error("%s workers have died at one request; it gets EIO for %g s", DEADLY, DEADLY_NS / 1e9)

    def _count_crashes(self, dead: int) -> None:
        done = self.board.done
        self._crashes = self._crashes + dead if done == self._done_before else 0
        self._done_before = done
        if self._crashes >= CRASHES_MAX:
            log.error("workers die before they answer anything; requests get EIO for %g s", QUARANTINE_SECONDS)
            self._quarantine_until = time.monotonic() + QUARANTINE_SECONDS
            self._crashes = 0

    async def _watch(self) -> None:
        """Replace workers that hang."""
        while True:
            await trio.sleep(LOOK_SECONDS)
            self._top_up()
            for one in self.workers.values():
                seconds = self.board.slot(one.slot).busy_seconds
                if seconds > HANG_SECONDS:
                    log.error("worker %s has been at one request for %.0f s; it is replaced", one.pid, seconds)
                    os.kill(one.pid, signal.SIGKILL)

    async def _hear_calls(self) -> None:
        """Fork more workers when those that there are wait for disks."""
        while True:
            await trio.lowlevel.wait_readable(self._calls)
            os.read(self._calls, 1 << 10)
            if not self._ended and self._serving() < 1 and len(self.workers) < WORKERS_MAX:
                self._fork(extra=True)

    def _serving(self) -> int:
        return sum(not self.board.slot(one.slot).waiting for one in self.workers.values())

    # --- a worker

    def _work(self, slot: int, device: int | None, extra: bool) -> int:
        _be_a_child()
        if device is not None:
            os.dup2(device, self.device)
            os.close(device)
            self._close_devices()
        until = self._quarantine_until
        if time.monotonic() < until:
            self.operations.refuse(self.board.slot(slot))
            worker.serve(self.device, self.operations.answer, stop=lambda: time.monotonic() > until, wait=0.1)
            return _AGAIN if time.monotonic() > until else 0
        tree, clean, left = self.make_tree(), False, False
        try:
            own = self.board.slot(slot)
            self.operations.attach(tree, own, self._call_for_help)
            self.operations.notify = self._notify
            tree.lower.on_files = own.files

            def surplus() -> bool:
                nonlocal left
                self.operations.answered()
                left = extra and not self.board.waiting
                return left

            worker.serve(
                self.device, self.operations.answer, stop=surplus, spin=self.spin, room=self.operations.room
            )
            clean = not left
        finally:
            self._close(tree, clean)
        return _SURPLUS if left else 0

    @staticmethod
    def _close(tree: MountedTree, clean: bool) -> None:
        try:
            tree.close(clean)
        except OSError as error:  # the mount is gone, and who wrote has been told of what fsync said
            log.error("what was written last may not be on disk: %s", error)

    def _close_devices(self) -> None:
        """In a child: let go of other workers' descriptors, so that what they have in flight ends with them."""
        for other in self.workers.values():
            if other.device is not None:
                os.close(other.device)

    def _call_for_help(self) -> None:
        # Somebody is left to serve, or nobody else may.
        if self.board.waiting < self.wanted or self.operations.alone:
            return
        with contextlib.suppress(OSError):  # full: it has been called often enough
            os.write(self._call, b"+")


def _be_a_child() -> None:
    """Leave to the supervisor what is meant for it."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGHUP):  # these end the supervisor, which ends the mount
        signal.signal(number, signal.SIG_IGN)


def _session_descriptor() -> int:
    """The descriptor of pyfuse3's session, which it does not tell."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "/dev/fuse":
                return int(name)
    raise RuntimeError("no FUSE descriptor is open")


def _clone(device: int) -> int:
    """A descriptor of the same connection with requests of its own in flight."""
    clone = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(clone, _CLONE, struct.pack("<I", device))
    return clone
