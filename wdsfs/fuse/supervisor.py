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
nothing. "In a row" means that each worker was started after the death of the one before. For when somebody kills
all workers at once, a request that is sent again reaches one after the other, and is not the cause of their
deaths.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import json
import logging
import os
import select
import signal
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import trio

from wdsfs.errors import MountError
from wdsfs.fuse import protocol
from wdsfs.fuse.counters import DEADLY, DEADLY_NS, SLOTS, Board
from wdsfs.fuse.lister import Lister
from wdsfs.fuse.pass_notes import PassNotes
from wdsfs.fuse.protocol import Request
from wdsfs.fuse.pusher import Pusher
from wdsfs.fuse.read_ops import BACKGROUND, BACKGROUND_REMOTE, Operations
from wdsfs.fuse.request_loop import answer_requests
from wdsfs.tree.tree import LowerTree, MountedTree

if TYPE_CHECKING:
    from wdsfs.door.remote_side import FetcherLink

log = logging.getLogger(__name__)

WORKERS_MAX = 16  # including those that wait for disks
HANG_SECONDS = 60.0  # after which a worker at one request, without waiting for a disk, is replaced
WATCHDOG_SECONDS = 1.0  # interval of the watchdog
LATE_MAX = 8  # retired workers that may finish their long work, also when another change comes meanwhile
RETIRE_SECONDS = 1.0  # how long a worker that does not wait for a disk may take to end its last request
HELPER_SECONDS = 10.0  # how long the end of the mount waits for the follower, and for the pusher
PUSHER_SECONDS = 1.0  # before a pusher is forked again
PUSHER_FAILURES = 5  # after which nothing is pushed any more
CRASHES_MAX = 5  # deaths in a row without a single answer in between
QUARANTINE_SECONDS = 0.3  # how long requests get EIO then; those in flight are sent again at once

_CLONE = 0x8004E500  # FUSE_DEV_IOC_CLONE: _IOR(229, 0, uint32_t)
_SURPLUS, _AGAIN = 10, 11  # exit codes of a worker that is not needed any more, and of one that has to be replaced
_BACKOFF = (0.0, 0.0, 0.05, 0.2, 0.5, 1.0)  # seconds before a replacement, by crashes in a row


@dataclass(slots=True)
class _Worker:
    pid: int
    slot: int
    device: int | None  # the supervisor's copy of the worker's own descriptor, on kernels that cannot resend
    started: int  # in ns, by the monotonic clock
    retired: bool = False  # it serves an earlier set, and ends after the request that it is at


class Supervisor:
    """Serves pyfuse3's session, which must have been mounted, with several processes.

    `make_tree` is called in each worker: it opens everything again, since neither LMDB nor descriptors with a
    position may be shared over a fork. `follow` is called in a process of its own; it reports changes of shards
    to the kernel, and returns when the file system is gone.
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
        self.device = _session_descriptor()
        self.workers: dict[int, _Worker] = {}
        self.fetcher: FetcherLink | None = None  # for remote shards; kept running
        self.place: tuple[str, int] | None = None  # the mount point, and the device number of the mount
        self.resends = False  # True if the kernel can send unanswered requests again
        self.epochs = False  # True if it can invalidate all names at once
        self._follower, self._restarting = 0, False
        self._pusher = self._pusher_failures = 0
        self._dismissed: set[int] = set()  # workers that were killed on purpose
        self._ended = False
        self._crashes, self._done_before, self._crashed = 0, 0, 0  # `_crashed` in ns, by the monotonic clock
        self._quarantine_until = 0.0
        # The process that follows changes must not keep a mount alive that has no server: it exits when the last
        # writer of this pipe is gone.
        self.life, self._living = os.pipe()
        self._calls, self._call = os.pipe()
        os.set_blocking(self._call, False)  # without a supervisor it has no reader

    # --- the supervisor

    def answer_init(self) -> None:
        """Answer the kernel's first request, so that workers can be forked. Raises MountError, OSError."""
        request = Request(memoryview(os.read(self.device, protocol.REQUEST_MIN)))
        try:
            kernel = protocol.kernel_of(request.body)
        except ValueError as error:
            os.write(self.device, protocol.header(request.unique, 0, errno.EPROTO))
            raise MountError(f"{error}") from None
        hands_over = self.fetcher is not None and kernel.resends
        background = BACKGROUND_REMOTE if hands_over else BACKGROUND
        answer = protocol.init_reply(kernel, self.operations.flags, background, self.operations.write_max)
        os.write(self.device, protocol.header(request.unique, len(answer)) + answer)
        self.resends = self._notify(protocol.resend())
        self.epochs = self._notify(protocol.forget_all())

    def _notify(self, note: bytes) -> bool:
        """Send a notification; returns True if the kernel accepts it."""
        try:
            os.write(self.device, note)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS):
                log.debug("a notification was refused: %s", error)
            return False
        return True

    async def run(self) -> None:
        """Fork the workers, and replace those that end, until the file system is unmounted."""
        gc.freeze()  # so that the memory of present objects stays shared: the workers' collectors skip them
        async with trio.open_nursery() as nursery:
            with trio.open_signal_receiver(signal.SIGCHLD) as deaths:
                if self.fetcher is not None:
                    self.fetcher.keep()
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

    async def _end_helpers(self) -> None:
        """End the follower and the pusher, and wait for them, so that no process of the mount outlives this one.

        The wait is limited: while they send a notification, they may wait in the kernel for a request of the mount
        that nobody answers, and the unmount would wait for them. So requests are refused when it takes long.
        """
        self._kill(self._follower)
        self._kill(self._pusher)
        begin = time.monotonic()
        while not self._has_no_helpers() and time.monotonic() < begin + HELPER_SECONDS:
            if time.monotonic() > begin + RETIRE_SECONDS:
                self._refuse(self._has_no_helpers)
            await trio.sleep(0.001)

    def _has_no_helpers(self) -> bool:
        self._reap_helpers()
        return not (self._follower or self._pusher)

    def _refuse(self, stop: Callable[[], object]) -> None:
        """Answer requests with EIO, also those that workers had, until `stop` says so, or the mount is gone.

        REQUIRES: there are no workers.
        """
        if self.resends:
            self._notify(protocol.resend())
        self.operations.refuse(self.board.slot(0))
        with contextlib.suppress(OSError):
            answer_requests(self.device, self.operations.answer, stop=stop, wait=0.01)

    def _reap_helpers(self) -> None:
        if self._follower and os.waitpid(self._follower, os.WNOHANG)[0]:
            self._follower = self.board.helper = 0
        if self._pusher and self.board.passes is not None:
            pid, status = os.waitpid(self._pusher, os.WNOHANG)
            if pid:
                self._pusher = self.board.passes.pusher = 0
                if os.waitstatus_to_exitcode(status) > 0:  # it has said why
                    self._count_pusher_failure(self.board.passes)

    def _count_pusher_failure(self, passes: PassNotes) -> None:
        self._pusher_failures += 1
        if self._pusher_failures == PUSHER_FAILURES:
            log.error("nothing is pushed ahead of readers any more, until the next mount")
            passes.turn_off()

    def _end_pusher(self) -> None:
        """Kill the pusher, and wait for it while workers answer: it may wait for a READ that they have."""
        self._kill(self._pusher)
        until = time.monotonic() + RETIRE_SECONDS
        while self._pusher and time.monotonic() < until:
            self._reap_helpers()
            time.sleep(0.0005)

    def stop(self) -> None:
        """Kill all workers, at the end of the mount; `run` then returns."""
        self._ended = True
        self._end_pusher()
        for pid in (*self.workers, self._follower):
            self._kill(pid)

    def renew(self, make_tree: Callable[[], MountedTree], follow: Callable[[Supervisor], None] | None) -> None:
        """Replace all workers by ones that open another set, and invalidate the kernel's caches."""
        self.make_tree, self.follow = make_tree, follow
        self._end_pusher()
        self._dismissed.update(self.workers)
        for pid in (*self.workers, self._follower):
            self._kill(pid)
        if self.epochs:
            self._notify(protocol.forget_all())

    async def exchange(
        self, make_tree: Callable[[], MountedTree], follow: Callable[[Supervisor], None] | None
    ) -> bool:
        """Replace all workers by ones that open another set; return True if none of the old ones is left.

        Every request that is received after this is answered from the new set. A worker that waits for a disk
        first finishes its request: that may be long work which its successor would have to do again. A killed
        worker that cannot end (it sleeps uninterruptibly, say on a hard NFS mount) is not waited for without end.
        """
        self.make_tree, self.follow = make_tree, follow
        old = list(self.workers.values())
        for worker in old:
            worker.retired = True
            self.board.slot(worker.slot).retire()
        self._end_pusher()
        self.restart_follower()
        now = time.monotonic()
        overdue, end = now + RETIRE_SECONDS, now + 2 * RETIRE_SECONDS
        while sum(not self._has_left(worker, now > overdue) for worker in old) and now < end:
            await trio.sleep(0.001)
            now = time.monotonic()
        # Requests in flight are sent again at each change, so more and more workers would do the same long work.
        # The first ones do it, and the others wait for them.
        for late in [worker for worker in self.workers.values() if worker.retired][LATE_MAX:]:
            self._dismiss(late)
        return all(worker.pid not in self.workers for worker in old)

    def restart_follower(self) -> None:
        """Start the process that follows changes again."""
        self._restarting = True
        self._kill(self._follower)

    def _has_left(self, worker: _Worker, late: bool) -> bool:
        """Return True if a retired worker is gone, or waits for a disk; an idle one is killed."""
        slot, there = self.board.slot(worker.slot), worker.pid in self.workers
        if there and not slot.waiting and (late or slot.request is None) and worker.pid not in self._dismissed:
            # The worker sleeps in the receive. A request that it receives at this moment is sent again; where the
            # kernel cannot do that, the request fails with ECONNABORTED.
            self._dismiss(worker)
        return not there or slot.waiting

    def _dismiss(self, worker: _Worker) -> None:
        self._dismissed.add(worker.pid)
        self._kill(worker.pid)

    def _kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if pid:
                os.kill(pid, signal.SIGKILL)

    def _fork(self, *, extra: bool = False) -> None:
        slot = next(number for number in range(SLOTS) if number not in {w.slot for w in self.workers.values()})
        started, device = time.monotonic_ns(), None
        try:
            device = None if self.resends else _clone(self.device)
            pid = _start_child(lambda: self._work(slot, device, extra), "a worker")
        except OSError as error:  # no memory, too many processes: the next look tries again
            log.error("a worker cannot be started: %s", error.strerror)
            if device is not None:
                os.close(device)
            return
        self.workers[pid] = _Worker(pid, slot, device, started)
        self.board.slot(slot).start(pid)

    def _fork_follower(self) -> None:
        try:
            self._follower = _start_child(self._be_the_follower, "the process that follows changes of shards")
        except OSError as error:  # the next look tries again
            log.error("changes of shards are noticed late: %s", error.strerror)
            return
        self.board.helper = self._follower

    def _be_the_follower(self) -> int:
        os.close(self._living)
        self._close_devices()
        if self.follow is not None:
            self.follow(self)
        return 0

    def _reap(self) -> list[_Worker]:
        """Collect the workers that have ended; returns those that have to be replaced."""
        dead, planned = list[_Worker](), 0
        self._keep_fetcher()
        self._reap_helpers()
        if self._restarting and not self._follower and not self._ended and self.follow is not None:
            self._restarting = False
            self._fork_follower()
        for worker in list(self.workers.values()):
            pid, status = os.waitpid(worker.pid, os.WNOHANG)
            if pid:
                del self.workers[pid]
                planned += worker.retired or pid in self._dismissed
                if self._judge(worker, os.waitstatus_to_exitcode(status)):
                    dead.append(worker)
                self.board.slot(worker.slot).reset()
                if worker.device is not None:
                    os.close(worker.device)  # the kernel now fails the request that the worker had in flight
        if planned and not dead:  # else `_replace` does so
            if self.resends:
                self._notify(protocol.resend())
            self._top_up()
        return dead

    async def _replace(self, dead: list[_Worker]) -> None:
        if not dead or self._ended:
            return
        self.board.replaced(len(dead))
        self._count_crashes(dead)
        if self.resends:  # requests in flight come before those that are new
            self._notify(protocol.resend())
        await trio.sleep(_BACKOFF[min(self._crashes, len(_BACKOFF) - 1)])
        self._top_up()

    def _top_up(self) -> None:
        """Fork as many workers as are missing."""
        if self._ended:
            return
        # While requests are refused, one worker is enough.
        number = 1 if time.monotonic() < self._quarantine_until else self.worker_count
        for _ in range(number - sum(not worker.retired for worker in self.workers.values())):
            self._fork()
        if self.follow is not None and not self._follower:
            self._fork_follower()

    def _judge(self, worker: _Worker, code: int) -> bool:
        """Return True if a worker that has ended has to be replaced."""
        if worker.pid in self._dismissed:
            self._dismissed.remove(worker.pid)
            return False
        if code == 0:  # the session is over
            self._ended = True
        elif code == _AGAIN:
            return True
        elif code != _SURPLUS and not self._ended:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            log.warning("worker %s ended (%s); it is replaced", worker.pid, how)
            self._blame(self.board.slot(worker.slot).request, worker.started)
            return True
        return False

    def _blame(self, request: int | None, started: int) -> None:
        """Count a death against a request; workers refuse one that keeps killing them."""
        if request is not None and self.board.blame(request, started) == DEADLY:
            log.error("%s workers have died at the same request; it gets EIO for %g s", DEADLY, DEADLY_NS / 1e9)

    def _count_crashes(self, dead: list[_Worker]) -> None:
        done = self.board.done
        if done != self._done_before:
            self._crashes, self._done_before, self._crashed = 0, done, time.monotonic_ns()
        elif any(worker.started > self._crashed for worker in dead):
            self._crashes, self._crashed = self._crashes + 1, time.monotonic_ns()
        if self._crashes >= CRASHES_MAX:
            log.error("workers die before they answer anything; requests get EIO for %g s", QUARANTINE_SECONDS)
            self._quarantine_until = time.monotonic() + QUARANTINE_SECONDS
            self._crashes = 0

    def _keep_fetcher(self) -> None:
        """Start a fetcher where one is needed and there is none. A new one has requests sent again by itself."""
        if self.fetcher is None or self._ended:
            return
        try:
            self.fetcher.ensure()
        except OSError as error:  # no memory, too many processes: the next look tries again
            log.error("the fetcher cannot be started: %s", error.strerror)

    async def _watch(self) -> None:
        """Watch the workers, and replace those that hang."""
        while True:
            await trio.sleep(WATCHDOG_SECONDS)
            self._keep_fetcher()
            self._top_up()
            for worker in self.workers.values():
                seconds = self.board.slot(worker.slot).busy_seconds
                if seconds > HANG_SECONDS:
                    log.error("worker %s has been at one request for %.0f s; it is replaced", worker.pid, seconds)
                    os.kill(worker.pid, signal.SIGKILL)

    async def _keep_pusher(self) -> None:
        """Fork a pusher when a pass calls for one; it ends by itself when there is none for some time."""
        while (passes := self.board.passes) is not None and not passes.off:
            await trio.lowlevel.wait_readable(passes.calls)
            self._fork_pusher(passes)
            await trio.sleep(PUSHER_SECONDS)
            while self._pusher:  # noqa: ASYNC110  # it ends by a signal, or by itself
                await trio.sleep(PUSHER_SECONDS)

    def _fork_pusher(self, passes: PassNotes) -> None:
        try:
            self._pusher = _start_child(
                lambda: self._push(passes), "the process that pushes content ahead of readers"
            )
        except OSError as error:  # the calls are still there: it is tried again
            log.error("nothing is pushed ahead of readers: %s", error.strerror)
            return
        passes.pusher = self._pusher

    def _push(self, passes: PassNotes) -> int:
        """Push content ahead of readers until no pass calls for it; return the exit code."""
        os.close(self._living)
        self._close_devices()
        # Mounts with an overlay have no passes, so this is the tree of the shards.
        tree, shared = cast(LowerTree, self.make_tree()), self.device
        self.device = self._own_device()
        try:
            lister = self._lister(tree, passes, shared)
        except OSError as error:  # no memory, too many processes: the next pusher tries again
            log.error("nothing is pushed ahead of readers: %s", error.strerror)
            return 0
        threading.Thread(target=self._outlive, daemon=True).start()
        Pusher(self.device, tree, passes, lister).run(self.life)
        return 0

    def _lister(self, tree: LowerTree, passes: PassNotes, shared: int) -> Lister | None:
        """Return what lists samples ahead of clients; None where that is not possible. Raises OSError.

        Without samples there is nothing to list. On the `shared` descriptor the lister would keep the mount alive,
        and wait for a listing from nobody.
        """
        if self.place is None or self.device == shared or tree.files_layout:
            return None
        return Lister(tree, passes, *self.place, release=lambda: os.close(self.device))

    def _outlive(self) -> None:
        """Refuse requests once all other processes are gone, in a thread of the pusher.

        The pusher may be waiting, uninterruptibly, for a READ that none of them has received. Its descriptor would
        keep the mount, and so that READ, for ever.
        """
        select.select([self.life], [], [])
        self._refuse(lambda: False)

    def _own_device(self) -> int:
        """Return a descriptor for the pusher alone; it then closes the shared one.

        So when all other processes are killed, the kernel ends the READ for whose page the pusher may be waiting.
        """
        try:
            device = _clone(self.device)
        except OSError:
            return self.device
        os.close(self.device)
        return device

    async def _hear_calls(self) -> None:
        """Fork further workers when all present ones wait for disks."""
        while True:
            await trio.lowlevel.wait_readable(self._calls)
            os.read(self._calls, 1 << 10)
            if not self._ended and self._serving() < 1 and len(self.workers) < WORKERS_MAX:
                self._fork(extra=True)

    def _serving(self) -> int:
        """Return the number of workers of the current set that do not wait for disks."""
        return sum(
            not (worker.retired or self.board.slot(worker.slot).waiting) for worker in self.workers.values()
        )

    # --- a worker

    def _work(self, slot: int, device: int | None, extra: bool) -> int:
        if device is not None:
            os.dup2(device, self.device)
            os.close(device)
            self._close_devices()
        until = self._quarantine_until
        if time.monotonic() < until:
            self.operations.refuse(self.board.slot(slot))
            over = answer_requests(
                self.device, self.operations.answer, stop=lambda: time.monotonic() > until, wait=0.1
            )
            return _AGAIN if over else 0
        tree, clean = self.make_tree(), False
        try:
            own = self.board.slot(slot)
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
            log.error("what was written last may not be on disk: %s", error)

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


def _start_child(work: Callable[[], int], name: str) -> int:
    """Return the number of a forked process that does this work and exits with its result. Raises OSError."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            _be_a_child()
            code = work()
        except BaseException:
            log.exception("%s failed", name)
        finally:
            os._exit(code)
    return pid


def _be_a_child() -> None:
    """Restore the signal handling that the supervisor has changed for itself."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGHUP):  # the supervisor acts on these, and ends the mount
        signal.signal(number, signal.SIG_IGN)


def _session_descriptor() -> int:
    """Return the descriptor of pyfuse3's session. pyfuse3 has no call that returns it, so search for it."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "/dev/fuse":
                return int(name)
    raise RuntimeError("no FUSE descriptor is open")


def _clone(device: int) -> int:
    """Return a descriptor of the same connection; the kernel accounts requests in flight to each descriptor.

    Its number is higher, so that it is released before the socket of `auto_unmount`, too (`fuse_session.py`).
    """
    opened = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(opened, _CLONE, struct.pack("<I", device))
        return fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, device)
    finally:
        os.close(opened)


async def in_child(function: Callable[[], dict[str, Any]], device: int | None) -> dict[str, Any]:
    """Run `function` in a forked process; return its result, empty if it fails."""
    return await Child(function, device).answer()


_killed: set[int] = set()  # children that may not have ended yet: the next `Child` collects them


class Child:
    """A forked process that runs `function`.

    This is for work that the supervisor must not do itself, such as opening an index or using its own mount: no
    request would be served meanwhile, and a mount that does not answer would block it forever.

    The child closes `device`, unless that is None: a request that is never answered would keep the mount alive,
    and the mount the child.
    """

    def __init__(self, function: Callable[[], dict[str, Any]], device: int | None) -> None:
        self._pid = 0  # no process could be started
        _killed.difference_update([pid for pid in _killed if os.waitpid(pid, os.WNOHANG)[0]])
        try:
            self._start(function, device)
        except OSError as error:
            log.error("a question to the mount has failed: %s", error.strerror)

    def _start(self, function: Callable[[], dict[str, Any]], device: int | None) -> None:
        """Start the process. Raises OSError."""
        self._receiver, sender = os.pipe()
        try:
            self._pid = _start_child(lambda: _send_answer(function, sender, device), "a question to the mount")
        except OSError:
            os.close(self._receiver)
            raise
        finally:
            os.close(sender)

    async def answer(self) -> dict[str, Any]:
        """Wait for the result of the function; return that, empty if it fails. To be called once."""
        if not self._pid:
            return {}
        try:
            text = await self._read()
            while not os.waitpid(self._pid, os.WNOHANG)[0]:  # noqa: ASYNC110, ASYNC222  # it does not block
                await trio.sleep(0.001)
        except BaseException:
            # Nobody waits for the child: it may wait for this mount, and cannot die before that answers or ends.
            os.kill(self._pid, signal.SIGKILL)
            _killed.add(self._pid)
            raise
        finally:
            os.close(self._receiver)
        # If there is no line feed, the child was killed while it wrote.
        answer: dict[str, Any] = json.loads(text) if text.endswith(b"\n") else {}
        return answer

    async def _read(self) -> bytes:
        """Return the answer, up to its line feed: a process that the child has forked may hold the pipe open."""
        text = b""
        while not text.endswith(b"\n"):
            await trio.lowlevel.wait_readable(self._receiver)
            part = os.read(self._receiver, 1 << 16)
            if not part:
                break
            text += part
        return text


def _send_answer(function: Callable[[], dict[str, Any]], sender: int, device: int | None) -> int:
    """Write the result of a function as a line, in a child."""
    if device is not None:
        os.close(device)
    os.write(sender, json.dumps(function()).encode() + b"\n")
    return 0
