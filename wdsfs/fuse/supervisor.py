"""The processes of a FUSE mount: a supervisor, which holds the descriptor and serves nothing, and its workers.

When a worker dies, the supervisor forks another and asks the kernel to send the requests in flight again
(FUSE_NOTIFY_RESEND, Linux 6.9): their clients wait some milliseconds and see no error. Older kernels cannot do
so; there each worker has a clone of the descriptor, and its death fails only its own request. When the supervisor
dies, the workers continue.

This works because every worker can compute the state of any other, and because reading twice is harmless.

A worker that waits for a disk notes that on the board. When all workers wait, the supervisor forks further ones,
which exit when they are not needed any more. The watchdog replaces a worker that works at one request for long
without waiting for a disk. A request at which several workers in a row die gets EIO for a while
(`fuse/counters.py`). If workers die before they reach any request, all requests get EIO, from a worker that opens
nothing. "In a row" means that each worker was started after the previous death. If all workers are killed at
once, the request that is sent again reaches one dying worker after the other, but it does not cause their deaths.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, cast

import trio

from wdsfs.errors import MountError
from wdsfs.fuse import fuse_device, protocol
from wdsfs.fuse.child_process import HelperProcess, kill, start_child
from wdsfs.fuse.counters import DEADLY, DEADLY_NS, SLOTS, Board
from wdsfs.fuse.fuse_device import answer_requests
from wdsfs.fuse.protocol import Request
from wdsfs.fuse.pusher import PushedMount, PusherProcess, push_ahead
from wdsfs.fuse.read_ops import BACKGROUND, BACKGROUND_REMOTE, Operations
from wdsfs.tree.tree import LowerTree, MountedTree

if TYPE_CHECKING:
    from wdsfs.door.remote_side import FetcherLink

log = logging.getLogger(__name__)

WORKERS_MAX = 16  # including workers that wait for disks
HANG_SECONDS = 60.0  # after which a worker at one request, without waiting for a disk, is replaced
WATCHDOG_SECONDS = 1.0  # interval of the watchdog
LATE_MAX = 8  # retired workers that may finish their long work, also when another change comes meanwhile
RETIRE_SECONDS = 1.0  # how long a worker that does not wait for a disk may take to end its last request
HELPER_SECONDS = 10.0  # how long the end of the mount waits for the follower, and for the pusher
PUSHER_SECONDS = 1.0  # before a pusher is forked again
CRASHES_MAX = 5  # deaths in a row without a single answer in between
QUARANTINE_SECONDS = 0.3  # how long requests get EIO then; requests in flight are sent again at once

_SURPLUS, _AGAIN = 10, 11  # exit codes of a worker that is not needed any more, and of one that has to be replaced
_BACKOFF = (0.0, 0.0, 0.05, 0.2, 0.5, 1.0)  # seconds before a replacement, by crashes in a row


class Duty(Enum):
    """The purpose of a worker. The death of one that was killed on purpose (ENDING, DISMISSED) is not counted."""

    SERVING = "serves the set that is shown now"
    ENDING = "was killed; no other takes its place before it is gone"
    RETIRED = "serves an earlier set, and ends after the request that it is at"
    DISMISSED = "was retired, and was killed"


_IN_PLACE = (Duty.SERVING, Duty.ENDING)  # of the workers of the set that is shown now


@dataclass(slots=True)
class Worker:
    """A process that answers requests; `slot` is the number of its counters on the board."""

    pid: int
    slot: int
    device: int | None  # the supervisor's copy of the worker's own descriptor, on kernels that cannot resend
    started: int  # in ns, by the monotonic clock
    duty: Duty = Duty.SERVING


class Crashes:
    """Deaths of workers in a row, without a single answer in between: forks wait longer, then requests get EIO."""

    def __init__(self) -> None:
        self._count, self._answered, self._last_ns = 0, 0, 0
        self.refuse_until = 0.0  # by the monotonic clock

    @property
    def refusing(self) -> bool:
        """True while requests get EIO, from a worker that opens nothing."""
        return time.monotonic() < self.refuse_until

    @property
    def pause(self) -> float:
        """The seconds to wait before the next fork."""
        return _BACKOFF[min(self._count, len(_BACKOFF) - 1)]

    def add(self, dead: Sequence[Worker], answered: int) -> None:
        """Count the deaths of these workers; `answered` requests have been answered since the mount began."""
        if answered != self._answered:
            self._count, self._answered, self._last_ns = 0, answered, time.monotonic_ns()
        elif any(worker.started > self._last_ns for worker in dead):
            self._count, self._last_ns = self._count + 1, time.monotonic_ns()
        if self._count >= CRASHES_MAX:
            log.error("workers die before they answer anything; requests get EIO for %g s", QUARANTINE_SECONDS)
            self.refuse_until = time.monotonic() + QUARANTINE_SECONDS
            self._count = 0


class Supervisor:
    """Serves pyfuse3's session, which must have been mounted, with several processes.

    `make_tree` is called in each worker: it opens everything again, since neither LMDB nor descriptors with a
    position may be shared over a fork. `follow` is called in a process of its own: there it reports changes of
    shards to the kernel, and returns when the file system is gone.
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
        self.worker_count, self.spin, self.follow = workers, spin, follow
        self.device = fuse_device.find_device()
        self.workers: dict[int, Worker] = {}
        self.fetcher: FetcherLink | None = None  # for remote shards; kept running
        self.place: tuple[str, int] | None = None  # the mount point, and the device number of the mount
        self.resends = False  # True if the kernel can send unanswered requests again
        self.epochs = False  # True if it can invalidate all names at once
        self._follower = HelperProcess("the process that follows changes of shards")
        self._restarts_follower = False
        self._pusher = None if board.passes is None else PusherProcess(board.passes)
        self._crashes = Crashes()
        self._ended = False
        # The process that follows changes must not keep a mount alive that has no server: it exits when the last
        # writer of this pipe is gone.
        self.life, self._living = os.pipe()
        self._calls, self._call = os.pipe()
        os.set_blocking(self._call, False)  # without a supervisor it has no reader

    def answer_init(self) -> None:
        """Answer the kernel's first request, so that workers can be forked. Raises MountError, OSError."""
        request = Request(memoryview(os.read(self.device, protocol.REQUEST_MIN)))
        try:
            kernel = protocol.kernel_of(request.body)
        except ValueError as error:
            os.write(self.device, protocol.header(request.unique, 0, errno.EPROTO))
            raise MountError(f"{error}") from None
        hands_over = self.fetcher is not None and kernel.minor >= protocol.MINOR_RESEND
        background = BACKGROUND_REMOTE if hands_over else BACKGROUND
        answer = protocol.init_reply(kernel, self.operations.flags, background, self.operations.write_max)
        os.write(self.device, protocol.header(request.unique, len(answer)) + answer)
        self.resends = self._notify(protocol.resend())
        self.epochs = self._notify(protocol.forget_all())

    def _notify(self, note: bytes) -> bool:
        """Send a notification; returns True if the kernel accepts it."""
        return fuse_device.notify(self.device, note)

    def _resend(self) -> None:
        """Have the kernel send the requests in flight again, where it can."""
        if self.resends:
            self._notify(protocol.resend())

    # --- from the start of the mount to its end

    async def run(self) -> None:
        """Fork the workers, and replace workers that end, until the file system is unmounted."""
        gc.freeze()  # so that the memory of present objects stays shared: the workers' collectors skip them
        async with trio.open_nursery() as nursery:
            with trio.open_signal_receiver(signal.SIGCHLD) as deaths:
                if self.fetcher is not None:
                    self.fetcher.promise_restart()
                    self._keep_fetcher()
                self._top_up()
                nursery.start_soon(self._watch)
                nursery.start_soon(self._hear_calls)
                nursery.start_soon(self._keep_pusher)
                while not (self._ended and not self.workers):
                    with trio.move_on_after(WATCHDOG_SECONDS):  # no signal comes if there was never a worker
                        await deaths.__anext__()
                    await self._replace(self._reap())
            nursery.cancel_scope.cancel()
        await self._end_helpers()

    def stop(self) -> None:
        """Kill all workers, at the end of the mount; `run` then returns."""
        self._ended = True
        self._end_pusher()
        for pid in self.workers:
            kill(pid)
        self._follower.kill()

    async def _end_helpers(self) -> None:
        """End the follower and the pusher, and wait for them, so that no process of the mount outlives this one.

        The wait is limited: while they send a notification, they may wait in the kernel for a request of the mount
        that nobody answers, and the unmount would wait for them. So requests are refused when it takes long.
        """
        for helper in self._helpers:
            helper.kill()
        begin = time.monotonic()
        while not self._has_no_helpers() and time.monotonic() < begin + HELPER_SECONDS:
            if time.monotonic() > begin + RETIRE_SECONDS:
                self._refuse(self.device, self._has_no_helpers)
            await trio.sleep(0.001)

    @property
    def _helpers(self) -> list[HelperProcess]:
        return [self._follower] if self._pusher is None else [self._follower, self._pusher]

    def _has_no_helpers(self) -> bool:
        self._reap_helpers()
        return not any(helper.pid for helper in self._helpers)

    def _reap_helpers(self) -> None:
        for helper in self._helpers:
            helper.reap()
        self.board.helper = self._follower.pid

    def _refuse(self, device: int, stop: Callable[[], object]) -> None:
        """Answer requests with EIO, also requests that workers had, until `stop` says so, or the mount is gone.

        REQUIRES: there are no workers.
        """
        if self.resends:
            fuse_device.notify(device, protocol.resend())
        self.operations.refuse(self.board.slot(0))
        with contextlib.suppress(OSError):
            answer_requests(device, self.operations.answer, stop=stop, wait=0.01)

    # --- another set

    @property
    def serves_earlier_set(self) -> bool:
        """True while a worker of an earlier set is still at its last request."""
        return any(worker.duty not in _IN_PLACE for worker in self.workers.values())

    def renew(self, make_tree: Callable[[], MountedTree], follow: Callable[[Supervisor], None] | None) -> None:
        """Replace all workers by ones that open another set, and invalidate the kernel's caches."""
        self.make_tree, self.follow = make_tree, follow
        self._end_pusher()
        for worker in self.workers.values():
            self._end(worker)
        self._follower.kill()
        if self.epochs:
            self._notify(protocol.forget_all())

    async def exchange(
        self, make_tree: Callable[[], MountedTree], follow: Callable[[Supervisor], None] | None
    ) -> bool:
        """Replace all workers by workers that open another set; return True if no old worker is left.

        Every request that is received after this is answered from the new set. A worker that waits for a disk
        first finishes its request, because its successor would have to repeat the work. A killed
        worker that cannot end (it sleeps uninterruptibly, say on a hard NFS mount) is not waited for without end.
        """
        self.make_tree, self.follow = make_tree, follow
        old = list(self.workers.values())
        for worker in old:
            self._retire(worker)
        self._end_pusher()
        self.restart_follower()
        now = time.monotonic()
        overdue, end = now + RETIRE_SECONDS, now + 2 * RETIRE_SECONDS
        while sum(not self._has_left(worker, now > overdue) for worker in old) and now < end:
            await trio.sleep(0.001)
            now = time.monotonic()
        # Requests in flight are sent again at each change, so more and more workers would do the same long work.
        # The first ones do it, and the others wait for them.
        for late in [worker for worker in self.workers.values() if worker.duty not in _IN_PLACE][LATE_MAX:]:
            self._end(late)
        return all(worker.pid not in self.workers for worker in old)

    def _retire(self, worker: Worker) -> None:
        worker.duty = Duty.RETIRED if worker.duty is Duty.SERVING else Duty.DISMISSED
        self.board.slot(worker.slot).retire()

    def _end(self, worker: Worker) -> None:
        """Kill a worker on purpose."""
        worker.duty = Duty.ENDING if worker.duty in _IN_PLACE else Duty.DISMISSED
        kill(worker.pid)

    def _has_left(self, worker: Worker, late: bool) -> bool:
        """Return True if a retired worker is gone, or waits for a disk; an idle one is killed."""
        slot, there = self.board.slot(worker.slot), worker.pid in self.workers
        if there and not slot.waiting and (late or slot.request is None) and worker.duty is Duty.RETIRED:
            # The worker sleeps in the receive. A request that it receives at this moment is sent again; where the
            # kernel cannot do that, the request fails with ECONNABORTED.
            self._end(worker)
        return not there or slot.waiting

    # --- the follower and the pusher

    def restart_follower(self) -> None:
        """Start the process that follows changes again."""
        self._restarts_follower = True
        self._follower.kill()

    def _fork_follower(self) -> None:
        try:
            self._follower.fork(self._be_the_follower)
        except OSError as error:  # the next look tries again
            log.error("changes of shards are noticed late: %s", error.strerror)
        self.board.helper = self._follower.pid

    def _be_the_follower(self) -> int:
        self._leave_supervisor()
        if self.follow is not None:
            self.follow(self)
        return 0

    async def _keep_pusher(self) -> None:
        """Fork a pusher when a pass calls for one. A pusher without a pass ends by itself after some time."""
        pusher = self._pusher
        while pusher is not None and not pusher.passes.off:
            await trio.lowlevel.wait_readable(pusher.passes.calls)
            pusher.fork(self._be_the_pusher)
            await trio.sleep(PUSHER_SECONDS)
            while pusher.pid:  # noqa: ASYNC110  # it ends by a signal, or by itself
                await trio.sleep(PUSHER_SECONDS)

    def _be_the_pusher(self) -> int:
        assert self._pusher is not None
        self._leave_supervisor()
        mount = PushedMount(self.device, self.place, self.life, lambda device: self._refuse(device, lambda: False))
        # Mounts with an overlay have no passes, so this is the tree of the shards.
        return push_ahead(mount, cast(LowerTree, self.make_tree()), self._pusher.passes)

    def _leave_supervisor(self) -> None:
        """Close, in a helper, the descriptors that would keep the mount and the workers' requests alive."""
        os.close(self._living)
        self._close_devices()

    def _end_pusher(self) -> None:
        """Kill the pusher, and wait for it while workers answer: it may wait for a READ that they have."""
        if self._pusher is None:
            return
        self._pusher.kill()
        until = time.monotonic() + RETIRE_SECONDS
        while self._pusher.pid and time.monotonic() < until:
            self._reap_helpers()
            time.sleep(0.0005)

    # --- workers that come and go

    def _fork(self, *, extra: bool = False) -> None:
        slot = next(number for number in range(SLOTS) if number not in {w.slot for w in self.workers.values()})
        started, device = time.monotonic_ns(), None
        try:
            device = None if self.resends else fuse_device.clone_device(self.device)
            pid = start_child(lambda: self._work(slot, device, extra), "a worker")
        except OSError as error:  # no memory, too many processes: the next look tries again
            log.error("a worker cannot be started: %s", error.strerror)
            if device is not None:
                os.close(device)
            return
        self.workers[pid] = Worker(pid, slot, device, started)
        self.board.slot(slot).start(pid)

    def _top_up(self) -> None:
        """Fork as many workers as are missing."""
        if self._ended:
            return
        # While requests are refused, one worker is enough.
        number = 1 if self._crashes.refusing else self.worker_count
        for _ in range(number - sum(worker.duty in _IN_PLACE for worker in self.workers.values())):
            self._fork()
        if self.follow is not None and not self._follower.pid:
            self._fork_follower()

    def _reap(self) -> list[Worker]:
        """Collect the processes that have ended; returns the workers that have to be replaced."""
        self._keep_fetcher()
        self._reap_helpers()
        if self._restarts_follower and not self._follower.pid and not self._ended and self.follow is not None:
            self._restarts_follower = False
            self._fork_follower()
        ended = [
            (worker, os.waitstatus_to_exitcode(status))
            for worker in self.workers.values()
            for pid, status in [os.waitpid(worker.pid, os.WNOHANG)]
            if pid
        ]
        dead = [worker for worker, code in ended if self._has_to_be_replaced(worker, code)]
        for worker, _ in ended:
            self._forget(worker)
        if not dead and any(worker.duty is not Duty.SERVING for worker, _ in ended):  # else `_replace` does so
            self._resend()
            self._top_up()
        return dead

    def _forget(self, worker: Worker) -> None:
        """Forget a worker that has ended."""
        del self.workers[worker.pid]
        self.board.slot(worker.slot).reset()
        if worker.device is not None:
            os.close(worker.device)  # the kernel now fails the request that the worker had in flight

    def _has_to_be_replaced(self, worker: Worker, code: int) -> bool:
        """Return True if another worker has to be forked for one that has ended; count its death."""
        if worker.duty in (Duty.ENDING, Duty.DISMISSED):
            return False
        if code == 0:  # the session is over
            self._ended = True
        elif code == _AGAIN:
            return True
        elif code != _SURPLUS and not self._ended:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            log.warning("worker %s ended (%s): replacing it", worker.pid, how)
            self._blame(self.board.slot(worker.slot).request, worker.started)
            return True
        return False

    def _blame(self, request: int | None, started: int) -> None:
        """Count a death against a request; workers refuse one that keeps killing them."""
        if request is not None and self.board.blame(request, started) == DEADLY:
            log.error("%s workers have died at the same request, which gets EIO for %g s", DEADLY, DEADLY_NS / 1e9)

    async def _replace(self, dead: list[Worker]) -> None:
        if not dead or self._ended:
            return
        self.board.replaced(len(dead))
        self._crashes.add(dead, self.board.done)
        self._resend()  # requests in flight come before new ones
        await trio.sleep(self._crashes.pause)
        self._top_up()

    def _keep_fetcher(self) -> None:
        """Start a fetcher if the mount needs one and none runs. A new fetcher has the requests sent again."""
        if self.fetcher is None or self._ended:
            return
        try:
            self.fetcher.ensure()
        except OSError as error:  # no memory, too many processes: the next look tries again
            log.error("the fetcher cannot be started: %s", error.strerror)

    async def _watch(self) -> None:
        """Watch the workers, and replace workers that hang."""
        while True:
            await trio.sleep(WATCHDOG_SECONDS)
            self._keep_fetcher()
            self._top_up()
            for worker in self.workers.values():
                seconds = self.board.slot(worker.slot).busy_seconds
                if seconds > HANG_SECONDS:
                    log.error("worker %s has been at one request for %.0f s: replacing it", worker.pid, seconds)
                    os.kill(worker.pid, signal.SIGKILL)

    async def _hear_calls(self) -> None:
        """Fork further workers when all present ones wait for disks."""
        while True:
            await trio.lowlevel.wait_readable(self._calls)
            os.read(self._calls, 1 << 10)
            if not self._ended and self._ready() < 1 and len(self.workers) < WORKERS_MAX:
                self._fork(extra=True)

    def _ready(self) -> int:
        """Return the number of workers of the current set that do not wait for disks."""
        return sum(
            worker.duty in _IN_PLACE and not self.board.slot(worker.slot).waiting
            for worker in self.workers.values()
        )

    # --- in a worker

    def _work(self, slot: int, device: int | None, extra: bool) -> int:
        """Serve until the session is over, or this worker is not needed any more; return the exit code."""
        if device is not None:
            os.dup2(device, self.device)
            os.close(device)
            self._close_devices()
        own = self.board.slot(slot)
        if self._crashes.refusing:
            self.operations.refuse(own)
            over = answer_requests(
                self.device, self.operations.answer, stop=lambda: not self._crashes.refusing, wait=0.1
            )
            return _AGAIN if over else 0
        tree, clean = self.make_tree(), False
        try:
            self.operations.attach(tree, own, self._call_for_help)
            self.operations.notify = self._notify
            if self.resends:
                self.operations.fetcher = self.fetcher
            tree.lower.on_files, retired = own.files, own.retirement
            is_surplus = answer_requests(
                *(self.device, self.operations.answer),
                stop=(lambda: retired[0] or not self.board.waiting) if extra else lambda: retired[0],
                after_reply=self.operations.after_reply,
                spin=self.spin,
                room=self.operations.room,
            )
            clean = not is_surplus
        finally:
            self._close(tree, clean)
        return _SURPLUS if is_surplus else 0

    @staticmethod
    def _close(tree: MountedTree, clean: bool) -> None:
        try:
            tree.close(clean)
        except OSError as error:  # the mount is gone; writers have got the result of their fsync
            log.error("the last writes may not be on disk: %s", error)

    def _close_devices(self) -> None:
        """Close, in a child, the descriptors of other workers, so that their requests in flight end with them."""
        for other in self.workers.values():
            if other.device is not None:
                os.close(other.device)

    def _call_for_help(self) -> None:
        # Another worker can serve, or no other worker may.
        if self.board.waiting < self.worker_count or self.operations.alone:
            return
        with contextlib.suppress(OSError):  # the pipe is full of such calls
            os.write(self._call, b"+")
