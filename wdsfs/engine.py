"""The processes of a mount: a supervisor that holds the FUSE descriptor and serves nothing, workers that serve.

When a worker dies, however, the supervisor forks another and asks the kernel to hand out again what was in
flight (FUSE_NOTIFY_RESEND, Linux 6.9): its clients wait some milliseconds and see no error. An older kernel is
not asked; there each worker has a clone of the descriptor, and its death fails its own request only. When the
supervisor dies, the workers go on.

This holds because a worker has no state that another cannot work out, and because reading twice is harmless.

A worker that waits for a disk says so on the board; when nobody else is left to serve, the supervisor forks
more, which leave again when they are not needed. One that is long at a request without such a reason hangs and
is replaced. Workers that die without ever answering, again and again, are not replaced by more of the same:
for a while requests get EIO from a worker that touches nothing, so that the request that kills is answered.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import trio

from wdsfs import worker
from wdsfs.board import SLOTS, Board
from wdsfs.ops import Operations
from wdsfs.tree import Tree

log = logging.getLogger(__name__)

WORKERS_MAX = 16  # with those that wait for disks
HANG_SECONDS = 60.0  # at one request, without waiting for a disk
LOOK_SECONDS = 1.0  # how often the supervisor looks for hanging workers
CRASHES_MAX = 5  # deaths in a row without a single answer in between
QUARANTINE_SECONDS = 0.3  # how long requests get EIO then: what is in flight is resent at once

# struct fuse_out_header: length, error, unique. A notification has its code for the error and no request.
_RESEND = struct.pack("<IiQ", 16, 7, 0)
_CLONE = 0x8004E500  # FUSE_DEV_IOC_CLONE: _IOR(229, 0, uint32_t)
_SURPLUS, _AGAIN = 10, 11  # exit codes of a worker that is not needed any more, and of one to be replaced
_BACKOFF = (0.0, 0.0, 0.05, 0.2, 0.5, 1.0)  # seconds before a replacement, by crashes in a row


@dataclass(slots=True)
class _Worker:
    pid: int
    slot: int
    device: int | None  # the supervisor's copy of the worker's own descriptor, on kernels that cannot resend


class Engine:
    """Serves pyfuse3's session, which must have been initialised, with several processes.

    `make_tree` is called in each worker: it opens everything anew, since neither LMDB nor descriptors with a
    position may be shared over a fork.
    """

    def __init__(
        self, operations: Operations, board: Board, make_tree: Callable[[], Tree], workers: int, spin: float
    ) -> None:
        self.operations, self.board, self.make_tree = operations, board, make_tree
        self.wanted, self.spin = workers, spin
        self.device = _session_descriptor()
        self.workers: dict[int, _Worker] = {}
        self.resends = False
        self.restarts = 0
        self._ended = False
        self._crashes, self._done_before = 0, 0
        self._quarantine_until = 0.0
        self._calls, self._call = os.pipe()
        os.set_blocking(self._call, False)  # without a supervisor nobody reads it

    # --- the supervisor

    def answer_init(self) -> None:
        """Answer the kernel's first request, so that workers can be forked. Raises OSError."""
        worker.serve(stop=lambda: self.operations.started, spin=0.0)
        self.resends = self._resend()

    def _resend(self) -> bool:
        try:
            os.write(self.device, _RESEND)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS):
                log.debug("resend: %s", error)
            return False
        return True

    async def run(self) -> None:
        """Fork the workers and keep them up until the file system is unmounted."""
        gc.freeze()  # what exists now stays shared with the workers, untouched by their collectors
        async with trio.open_nursery() as nursery:
            with trio.open_signal_receiver(signal.SIGCHLD) as deaths:
                for _ in range(self.wanted):
                    self._fork()
                nursery.start_soon(self._watch)
                nursery.start_soon(self._hear_calls)
                while not (self._ended and not self.workers):
                    await deaths.__anext__()
                    await self._replace(self._reap())
            nursery.cancel_scope.cancel()

    def stop(self) -> None:
        """Kill all workers; `run` then returns. For when the mount is gone or must go."""
        self._ended = True
        for one in list(self.workers.values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)

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

    def _reap(self) -> int:
        """Take note of every worker that has ended; returns how many of them died."""
        dead = 0
        for one in list(self.workers.values()):
            pid, status = os.waitpid(one.pid, os.WNOHANG)
            if pid:
                del self.workers[pid]
                self.board.slot(one.slot).reset()
                dead += self._judge(one, os.waitstatus_to_exitcode(status))
                if one.device is not None:
                    os.close(one.device)  # the kernel now fails what the worker had in flight
        return dead

    async def _replace(self, dead: int) -> None:
        if not dead or self._ended:
            return
        self.restarts += dead
        self._count_crashes(dead)
        await trio.sleep(_BACKOFF[min(self._crashes, len(_BACKOFF) - 1)])
        self._top_up()
        if self.resends and not self._ended:
            self._resend()

    def _top_up(self) -> None:
        """Fork as many workers as are missing."""
        if self._ended:
            return
        # While requests are refused, one worker does that.
        wanted = 1 if time.monotonic() < self._quarantine_until else self.wanted
        for _ in range(wanted - len(self.workers)):
            self._fork()

    def _judge(self, one: _Worker, code: int) -> int:
        """Whether this end was a death."""
        if code == 0:  # the session is over
            self._ended = True
        elif code == _AGAIN:
            return 1
        elif code != _SURPLUS and not self._ended:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            log.warning("worker %s ended (%s); it is replaced", one.pid, how)
            return 1
        return 0

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
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number in (signal.SIGINT, signal.SIGHUP):  # these end the supervisor, which ends the mount
            signal.signal(number, signal.SIG_IGN)
        if device is not None:
            os.dup2(device, self.device)
            os.close(device)
            for other in self.workers.values():  # what they have in flight must not outlive them here
                if other.device is not None:
                    os.close(other.device)
        until = self._quarantine_until
        if time.monotonic() < until:
            self.operations.refuse(self.board.slot(slot))
            worker.serve(stop=lambda: time.monotonic() > until, wait=0.1)
            return _AGAIN if time.monotonic() > until else 0
        with _opened(self.make_tree) as tree:
            own = self.board.slot(slot)
            self.operations.attach(tree, own, self._call_for_help)
            logging.getLogger("pyfuse3").addFilter(_is_news)
            tree.lower.on_files = own.files
            left = False

            def surplus() -> bool:
                nonlocal left
                left = extra and not self.board.waiting
                return left

            worker.serve(stop=surplus, spin=self.spin)
        return _SURPLUS if left else 0

    def _call_for_help(self) -> None:
        with contextlib.suppress(OSError):  # full: it has been called often enough
            os.write(self._call, b"+")


@contextlib.contextmanager
def _opened(make_tree: Callable[[], Tree]) -> Iterator[Tree]:
    tree = make_tree()
    try:
        yield tree
    finally:
        tree.lower.close()


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a message of pyfuse3 is worth telling: an answer that nobody waits for any more is not.

    After a resend the kernel knows a request under another number, and the answer to the old one, by a worker
    that was at it, is refused. An interrupted client does the same.
    """
    return not record.getMessage().endswith(f"failed with {os.strerror(errno.ENOENT)}")


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
