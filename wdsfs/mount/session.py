"""A mount from start to end: options, index, session, control socket, readiness, signals.

`run` does everything in the process that calls it; `in_background` forks first, so that the process that the
user started can tell when the tree is usable. Knows nothing of what a data set looks like.

Order of a start: the shards are indexed (with progress, still in front of the user), the file system is
mounted, the kernel's INIT is answered, the daemon is registered, and only then is anybody told. Order of an
end: the mount goes first, then the registration, so that `wdsfs umount` can wait for the process.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import json
import logging
import os
import resource
import select
import shlex
import signal
import socket
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import pyfuse3
import trio

from wdsfs import host, names, trust
from wdsfs.commit.replace_in_place import is_half_done
from wdsfs.dataset.generations import Generations
from wdsfs.dataset.merged_tree import is_merged
from wdsfs.dataset.numbered_tree import check_name, make_numbered
from wdsfs.dataset.shard_access import Access, access_of
from wdsfs.dataset.shard_set import ShardSet
from wdsfs.dataset.shard_tree import ShardTree, View
from wdsfs.errors import MountError, ShardError, UsageError, WdsfsError, counted
from wdsfs.fuse.protocol import notes_of
from wdsfs.fuse.read_ops import TIMEOUT_SECONDS, HiddenDirectoryOperations, Operations, Owner
from wdsfs.fuse.supervisor import Supervisor
from wdsfs.fuse.worker import SPIN_SECONDS
from wdsfs.fuse.write_ops import RESTORE, WritableOperations
from wdsfs.index.store import Index, open_index
from wdsfs.interop.soundness import Tolerance, judge
from wdsfs.mount import watch
from wdsfs.mount.mountpoint import DEAD_MOUNT_ERRNOS, check_mountpoint
from wdsfs.overlay.mounted_overlay import MountedOverlay
from wdsfs.overlay.system_calls import sync_filesystem
from wdsfs.overlay.writable_tree import WritableTree
from wdsfs.spec.expand import Selection, Shard, expand, extended, refuse_left_out
from wdsfs.status import control, status_report
from wdsfs.status.counters import Board
from wdsfs.status.dot_wdsfs import HiddenDirectory
from wdsfs.status.text_ring import TextRing
from wdsfs.views.view_record import Composition
from wdsfs.views.view_set import Companions, ViewSet, is_view, open_set

log = logging.getLogger(__name__)

LOG_BYTES = 4 << 20  # a mount that finds a longer log starts a new one and keeps the old
END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LEFT, READY, GONE = b"-", b"+", b"."  # what a daemon tells the process that waits for it
TELL_SECONDS = 3.0  # of an unmount, after which it says what it waits for
LOOK_SECONDS = 0.2  # how often that one looks whether the daemon is still there
ID_MAX = (1 << 32) - 2  # the kernel takes the last number for "nobody at all"
VALUE_MAX = 1 << 16  # bytes of an extended attribute (XATTR_SIZE_MAX)
SYNC_SECONDS = 10.0  # how long the end of a mount by a signal waits for what is in the kernel's memory

# Options of `-o` that libfuse or the kernel understands. Anything else is a typing error and is said to be one.
_FLAGS = frozenset(
    (
        *("ro", "allow_other", "allow_root", "auto_unmount", "default_permissions", "nonempty"),
        *("dev", "nodev", "suid", "nosuid", "exec", "noexec", "sync", "async", "dirsync"),
        *("atime", "noatime"),
    )
)
_VALUES = frozenset(["fsname", "subtype", "context", "fscontext", "defcontext", "rootcontext"])


@dataclass(slots=True)
class FuseOptions:
    """The options of `-o`, taken apart."""

    fuse: set[str] = field(default_factory=set)
    owner: Owner = field(default_factory=lambda: Owner(os.getuid(), os.getgid()))
    nonempty: bool = False


@dataclass(slots=True)
class MountOptions:
    """What to mount, where and how."""

    specs: list[str]
    mountpoint: str
    view: View = field(default_factory=View)
    merge: bool = False
    selection: Selection = field(default_factory=Selection)
    composition: Composition = field(default_factory=Composition)
    tolerance: Tolerance = field(default_factory=Tolerance)
    index_dir: Path | None = None
    jobs: int = 1
    lazy: bool = False
    overlay: Path | None = None
    workers: int = 2
    spin: float = SPIN_SECONDS  # seconds
    readahead: int = 256 << 10  # bytes
    options: list[str] = field(default_factory=list)
    foreground: bool = False
    log: Path | None = None  # of a mount in the background; chosen by `run`

    def __post_init__(self) -> None:
        self.mountpoint = control.canonical(self.mountpoint)
        self.merge = is_merged(self.view, self.merge)


@dataclass(frozen=True, slots=True)
class Front:
    """What a front end shows while the set is made ready: called with shards to index, with what to derive.

    Both return the shards that cannot be read, by path, and why. `adviser` returns what to say of a set that can
    be mounted.
    """

    indexer: Callable[[Index, Sequence[Shard], int], dict[bytes, str]]
    composer: Callable[[ShardSet], dict[bytes, str]]
    adviser: Callable[[ShardSet], str | None] = lambda _: None


def parse_options(options: Sequence[str], writable: bool = False) -> FuseOptions:
    """Take `-o` options apart. Raises UsageError for one that nobody knows."""
    parsed = FuseOptions()
    uid, gid, umask = parsed.owner.uid, parsed.owner.gid, 0
    for option in _split(options):
        name, equals, value = option.partition("=")
        if name == "remount" or (name == "rw" and not writable):
            raise UsageError(f"-o {name}: this mount is read-only; --overlay DIR makes one that can be written")
        if name == "rw":
            continue
        if name in ("uid", "gid", "umask") and equals:
            number = _number(option, value, *((8, 0o777) if name == "umask" else (10, ID_MAX)))
            uid, gid, umask = (
                number if name == "uid" else uid,
                number if name == "gid" else gid,
                number if name == "umask" else umask,
            )
        elif option == "nonempty":
            parsed.nonempty = True
        elif option in _FLAGS or (equals and name in _VALUES):
            parsed.fuse.add(option)
        else:
            known = sorted(known_options())
            raise UsageError(
                f"-o {option}: no such option; known are {', '.join(known)}{names.meant(name, known)}"
            )
    parsed.owner = Owner(uid, gid, umask)
    return parsed


def known_options() -> set[str]:
    """What `-o` takes; an option with a value ends in `=`."""
    return {*_FLAGS} | {f"{name}=" for name in _VALUES | {"uid", "gid", "umask"}}


def _split(options: Sequence[str]) -> list[str]:
    """Single options; a comma behind a backslash belongs to a value, as for libfuse."""
    found, current, escaped = [], "", False
    for character in ",".join(options) + ",":
        if character == "," and not escaped:
            if current:
                found.append(current)
            current = ""
        else:
            current += character
        escaped = character == "\\" and not escaped
    return found


def _number(option: str, value: str, base: int, largest: int) -> int:
    try:
        number = int(value, base)
    except ValueError:
        number = -1
    if not 0 <= number <= largest:
        kind = f"an octal number up to {largest:o}" if base == 8 else f"a number up to {largest}"
        raise UsageError(f"-o {option}: {kind} is needed")
    return number


# --- checks before anything is done ------------------------------------------------------------------------


def raise_file_limit() -> int:
    """Take as many descriptors as this process may have; returns how many shards may be open at a time."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 65536) if hard != resource.RLIM_INFINITY else 65536
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return max(16, min(soft if soft != resource.RLIM_INFINITY else 65536, 8192) // 2)


# --- running -----------------------------------------------------------------------------------------------


def _refuse_view(mount: MountOptions, shards: Sequence[Shard]) -> None:
    """Raises UsageError for what cannot go with an overlay."""
    refuse_left_out(shards, "--overlay is for whole shards")
    if is_view(shards, mount.composition):
        raise UsageError(
            "--overlay takes shards as they are: what a view leaves out or adds could not be committed. Mount "
            "without --overlay, or without the options of the view"
        )
    if mount.view.index_tree:
        raise UsageError(
            "--index-tree is for read-only mounts, because changes would give samples other numbers; leave out "
            "--index-tree, or --overlay"
        )


def run(mount: MountOptions, front: Front, leave: Callable[[], None], ready: Callable[[], None]) -> None:
    """Mount and serve until the mount ends.

    `leave` is called when everything that can go wrong in front of the user has gone right, before the
    workers are forked; `ready` when the tree is usable. Raises WdsfsError when it cannot be mounted.
    """
    parsed = parse_options(mount.options, mount.overlay is not None)
    shards = expand(mount.specs, *mount.selection)
    companions = Companions(mount.composition, mount.selection.reading)
    composition = mount.composition
    # Before anything is read: what comes later is held against this.
    shared = os.geteuid() == 0 or "allow_other" in parsed.fuse
    access = access_of([*(one.path for one in shards), *companions.files], shared)
    if mount.overlay is not None:
        _refuse_view(mount, shards)
    check_name(shards, mount.view, mount.merge)
    index = open_index(mount.index_dir)
    try:
        for notice in index.notices:
            log.warning("%s", notice)
        own = [index.directory.absolute(), host.runtime_dir(), control.log_path(mount.mountpoint)]
        if mount.overlay is not None:
            own.append(mount.overlay.absolute())
            if mount.overlay.resolve() in Path(mount.mountpoint).parents:
                raise MountError(
                    f"{mount.mountpoint}: lies in the overlay {mount.overlay}; take another directory"
                )
        busy = [*(one.path for one in shards), *companions.files, *map(os.fsencode, own)]
        check_mountpoint(mount.mountpoint, parsed.nonempty, busy)
        below = open_set(shards, index, mount.composition, companions, access=access)
        try:
            unreadable: dict[bytes, str] = {}
            # One tree over all shards, numbers over all of them, and a look at all of them, need all of them.
            if not mount.lazy or mount.merge or mount.view.index_tree or mount.tolerance.strict:
                stale = index.stale([*shards, *companions.shards])
                unreadable |= front.indexer(index, [one for one, _ in stale], mount.jobs)
                unreadable |= front.composer(below)
                if isinstance(below, ViewSet):
                    composition = below.wanted  # with what was found out on the way
            remarks = [*judge(below, unreadable, mount.tolerance, mount.merge), *index.miscounted(shards)]
            _say(remarks)
            advice = front.adviser(below)
        finally:
            below.release()
        if not mount.foreground:
            mount.log = open_log(mount.mountpoint)
        index.suspend()
        descriptors, stack = raise_file_limit(), None
        if mount.overlay is not None:
            owner = parsed.owner.uid, parsed.owner.gid
            stack = MountedOverlay(mount.overlay, shards, mount.view, mount.merge, owner, parsed.owner.umask)
        wanted = _Set(
            mount, shards, composition, companions, access, index, descriptors, Generations(len(shards)), stack
        )
        if advice is not None:
            log.info("%s", advice)

        def leave_and_log() -> None:
            leave()
            if not mount.foreground:  # what was said on the terminal, now in the log
                _say(remarks)

        _serve(mount, parsed, wanted, leave_and_log, ready)
    finally:
        index.discard()


def _say(remarks: Sequence[str]) -> None:
    for text in remarks:
        log.warning("%s", text)


@dataclass(frozen=True, slots=True)
class _Set:
    """What each worker needs to open the set for itself."""

    mount: MountOptions
    shards: Sequence[Shard]
    composition: Composition
    companions: Companions
    access: Access
    index: Index
    descriptors: int
    tags: Generations
    stack: MountedOverlay | None

    def tree(self) -> ShardTree | WritableTree:
        """What is mounted, as a worker serves it."""
        below = self.lower_tree()
        return below if self.stack is None else _prepared(self.stack.tree(below))

    def lower_tree(self) -> ShardTree:
        """What the shards hold."""
        index = self.index.reopen()
        below = open_set(
            *(self.shards, index, self.composition, self.companions),
            *(self.descriptors, self.tags, self.access),
        )
        return _prepared(make_numbered(below, self.mount.view, self.mount.merge))


TreeKind = TypeVar("TreeKind", ShardTree, WritableTree)


def _prepared(tree: TreeKind) -> TreeKind:
    # A shard may have changed since the mount began. One that cannot be read, or is being written, must not keep a
    # worker from serving: whoever asks for it is told.
    with contextlib.suppress(ShardError):
        tree.lower.with_index(tree.prepare)
    return tree


def _serve(
    mount: MountOptions, parsed: FuseOptions, wanted: _Set, leave: Callable[[], None], ready: Callable[[], None]
) -> None:
    board = Board()
    stack = wanted.stack
    operations = (
        Operations(parsed.owner, board)
        if stack is None
        else WritableOperations(parsed.owner, board, lambda: stack.frozen, stack.note, stack.token)
    )
    daemon = _daemon(mount, wanted)
    special = HiddenDirectory(daemon, board, TextRing(), lambda: is_half_done(daemon.overlay))
    operations.special = HiddenDirectoryOperations(parsed.owner, board, special)
    options = {"default_permissions", *parsed.fuse} | ({"ro"} if stack is None else set())
    for name, value in (("subtype", "wdsfs"), ("fsname", _fsname(mount.specs))):
        if not any(option.startswith(f"{name}=") for option in options):
            options.add(f"{name}={value}")
    with _Signals() as signals:
        try:
            pyfuse3.init(pyfuse3.Operations(), mount.mountpoint, options)  # it mounts; we serve
        except (RuntimeError, UnicodeEncodeError) as error:
            raise MountError(
                f"{mount.mountpoint}: libfuse could not mount ({error}); "
                f"`wdsfs doctor {shlex.quote(mount.mountpoint)}` may tell why"
            ) from None
        session, clean, engine = None, False, None
        try:
            follow = _follower(wanted)
            workers = 1 if operations.alone else mount.workers
            engine = Supervisor(operations, board, wanted.tree, workers, mount.spin, follow)
            engine.answer_init()
            if mount.merge and follow is not None and engine.epochs:
                # Names of the top are the names of samples there: not to be asked for again every second.
                operations.change_seconds = TIMEOUT_SECONDS
            _set_readahead(mount)
            leave()
            session = _RunningMount(daemon, wanted, engine, signals, ready)
            trio.run(session.run)
            clean = True
            if session.failure is not None:
                raise session.failure
        finally:
            if engine is not None:
                engine.stop()  # nobody would look after workers that are left
            if stack is not None:
                stack.finish()
            # After a failure the directory must not look empty: a copy job would delete its mirror. But what
            # nobody was told of yet, nobody copies.
            pyfuse3.close(unmount=clean or session is None or not session.usable)


def _daemon(mount: MountOptions, wanted: _Set) -> control.Daemon:
    """What this process says of itself."""
    return control.Daemon(
        pid=os.getpid(),
        start_ticks=control.start_ticks(os.getpid()) or 0,
        mountpoint=mount.mountpoint,
        specs=mount.specs,
        layout=mount.view.layout,
        names=mount.view.names,
        merge=mount.merge,
        started=time.time(),
        log=_place_of_stderr() if mount.log is None else str(mount.log),
        overlay=None if wanted.stack is None else str(wanted.stack.place.path),
        index=str(wanted.index.directory.absolute()),
        selection=mount.selection.arguments,
        composition=mount.composition.text,
        index_tree=mount.view.index_tree,
        directory=_working_directory(),
    )


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it has been removed
        return ""


def _place_of_stderr() -> str | None:
    """Where a mount in the foreground logs: "journal" under systemd, or a file; None for a terminal or a pipe."""
    try:
        found = os.fstat(2)
        if os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}":  # systemd.exec(5)
            return "journal"
        return os.readlink("/proc/self/fd/2") if stat.S_ISREG(found.st_mode) else None
    except OSError:
        return None


def _follower(wanted: _Set) -> Callable[[Supervisor], None] | None:
    """What follows the changes of the shards, in a process of its own; None where the kernel tells of none."""
    try:
        seen = watch.Watch(wanted.shards, look=wanted.mount.merge, companions=wanted.companions.files)
    except OSError as error:
        log.warning("a change of a shard is noticed a second late: inotify: %s", error.strerror)
        return None
    return lambda engine: watch.follow(seen, engine.device, engine.life, wanted.tags, engine.epochs)


def _set_readahead(mount: MountOptions) -> None:
    """Where this is allowed: to root, and with /sys writable."""
    mounted = host.mounted_at(mount.mountpoint)
    try:
        if mounted is not None:
            host.set_readahead(mounted.device, mount.readahead)
    except OSError as error:
        log.debug("the kernel's readahead stays as it is: %s", error)


class _Signals:
    """Keeps signals that come while nobody can act on them: by default they would leave a dead mount."""

    def __init__(self) -> None:
        self.kept: list[int] = []

    def __enter__(self) -> _Signals:
        self._before = {number: signal.signal(number, self._keep) for number in END_SIGNALS}
        return self

    def _keep(self, number: int, frame: object) -> None:
        self.kept.append(number)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _fsname(specs: Sequence[str]) -> str:
    """The source that `mount` and `df` show: what was mounted, within what an option can carry."""
    text = " ".join(specs).encode("ascii", "backslashreplace").decode()
    text = text if len(text) <= 200 else text[:197] + "..."
    return "wdsfs#" + text.replace("\\", "\\\\").replace(",", "\\,")


class _JsonLines:
    """A line of JSON at a time over a stream."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._received = b""

    async def receive(self) -> dict[str, Any]:
        """Raises EOFError when the other side is gone, or talks of something else."""
        while b"\n" not in self._received:
            part = await self._stream.receive_some(1 << 16)
            if not part:
                raise EOFError
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise EOFError  # nobody who speaks this language
        return message

    async def send(self, message: dict[str, Any]) -> None:
        await self._stream.send_all(json.dumps(message).encode() + b"\n")


class _RunningMount:
    """The supervisor's side of a running mount: the engine, the control socket and the signals side by side."""

    def __init__(
        self,
        daemon: control.Daemon,
        wanted: _Set,
        engine: Supervisor,
        signals: _Signals,
        ready: Callable[[], None],
    ) -> None:
        self.daemon, self.wanted, self.engine, self.ready = daemon, wanted, engine, ready
        self.mount, self.signals = wanted.mount, signals
        self.usable = False
        self.committing = False  # a client that commits is there
        self.restoring = trio.Lock()
        self.failure: MountError | None = None

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_signals)
            nursery.start_soon(self._announce)
            await self.engine.run()
            nursery.cancel_scope.cancel()

    async def _watch_signals(self) -> None:
        with trio.open_signal_receiver(*END_SIGNALS) as signals:
            for number in self.signals.kept:
                await self._end(number)
            async for number in signals:
                await self._end(number)

    async def _end(self, number: int) -> None:
        log.info("ended by %s", signal.Signals(number).name)
        if self.wanted.stack is not None:
            with trio.move_on_after(SYNC_SECONDS):  # what programs have changed in mapped files
                await self._in_child(self._sync)
        self.engine.stop()

    def _sync(self) -> dict[str, Any]:
        sync_filesystem(self.mount.mountpoint)
        return {}

    async def _announce(self) -> None:
        """Open the socket, register, tell whoever waits."""
        path = control.socket_path(self.mount.mountpoint)
        path.unlink(missing_ok=True)
        listener = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with control.socket_address(self.mount.mountpoint) as address:
            await listener.bind(address)
        os.chmod(path, 0o600)
        listener.listen()
        with control.registered(self.daemon), listener:
            # An answer about the root proves that the mount works. A worker may die of it; this process must not.
            if not await self._in_child(lambda: {"mode": os.stat(self.mount.mountpoint).st_mode}):
                self.failure = MountError(f"{self.mount.mountpoint}: the mount does not answer")
                self.engine.stop()
                return
            self.ready()
            self.usable = True
            log.info("mounted %s at %s", counted(len(self.wanted.shards), "shard"), self.mount.mountpoint)
            await trio.serve_listeners(self._answer, [trio.SocketListener(listener)])

    async def _in_child(self, function: Callable[[], dict[str, Any]], keep_device: bool = False) -> dict[str, Any]:
        """What `function` returns in a forked process, empty if it fails: this one opens no index and touches no
        mount."""
        receiver, sender = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                signal.set_wakeup_fd(-1)
                if not keep_device:
                    os.close(self.engine.device)  # else what nobody answers would keep the mount alive, and itself
                os.write(sender, json.dumps(function()).encode() + b"\n")
            except Exception:
                log.exception("a question to the mount has failed")
                os.write(sender, b"{}\n")
            finally:
                os._exit(0)
        os.close(sender)
        text = b""
        try:
            # Not until the end of the pipe: a worker that is forked meanwhile has it, too.
            while not text.endswith(b"\n"):
                await trio.lowlevel.wait_readable(receiver)
                part = os.read(receiver, 1 << 16)
                if not part:
                    break
                text += part
            while not os.waitpid(pid, os.WNOHANG)[0]:  # noqa: ASYNC110, ASYNC222  # it does not block
                await trio.sleep(0.001)
        except BaseException:
            # Not waited for: it may be waiting for this mount, which is about to end, and cannot die before.
            os.kill(pid, signal.SIGKILL)
            raise
        finally:
            os.close(receiver)
        answer: dict[str, Any] = json.loads(text or b"{}")
        return answer

    async def _answer(self, stream: trio.SocketStream) -> None:
        async with stream:
            try:
                lines = _JsonLines(stream)
                question = await lines.receive()
                if question.get("do") == "freeze":
                    await self._freeze(lines)
                elif question.get("do") == "restore":
                    await lines.send(await self._restore([os.fsencode(path) for path in question["paths"]]))
                elif question.get("do") == "shards":
                    await lines.send(self._shards())
                elif question.get("do") == "status":
                    seen = await self._in_child(self._report)
                    if seen:
                        await lines.send(seen)
                await stream.send_eof()  # closing is not enough: a worker forked meanwhile has it, too
            except (trio.BrokenResourceError, trio.ClosedResourceError, EOFError):
                pass
            except Exception:  # whatever it is, it must not end the mount
                log.exception("a client of the control socket was not served")

    async def _freeze(self, lines: _JsonLines) -> None:
        """Let nobody change anything until the client has committed, or is gone."""
        stack = self.wanted.stack
        if stack is None or self.committing:
            reason = "has no overlay" if stack is None else "is being committed already"
            await lines.send({"error": f"{self.mount.mountpoint} {reason}"})
            return
        stack.freeze(True)  # it is still, if the last client was stopped half-way
        self.committing = True
        try:
            await self._let_finish()
            await lines.send(self._shards())
            with contextlib.suppress(EOFError):
                answer = await lines.receive()
                new, published = ([os.fsencode(path) for path in answer[key]] for key in ("new", "published"))
                self._renew(new, published)
                await lines.send({})
                await lines.receive()  # nothing: the commit is over when the client is gone
        finally:
            self.committing = False
            if stack.is_half_committed:
                log.error(
                    "a commit in place was stopped half-way; nothing can be changed until it is finished: wdsfs "
                    "commit --in-place %s",
                    shlex.quote(self.mount.mountpoint),
                )
            else:
                stack.freeze(False)

    async def _restore(self, paths: list[bytes]) -> dict[str, Any]:
        """Have the worker undo what was changed at these paths, and the kernel ask again for it."""
        stack, where = self.wanted.stack, self.mount.mountpoint
        if stack is None:
            return {"error": f"{where} has no overlay"}
        async with self.restoring:
            if stack.frozen:
                why = (
                    "a commit in place was stopped half-way"
                    if stack.is_half_committed
                    else "it is being committed"
                )
                return {"error": f"{where}: nothing can be restored: {why}"}
            done = await self._in_child(lambda: self._ask_worker(stack.token, paths))
            sent = await self._in_child(lambda: self._invalidate(stack), keep_device=True)
            if sent:
                stack.drop_notes()
        return (
            done
            if done and sent
            else {"error": f"{where}: this could not be done; see {self.daemon.log or 'its log'}"}
        )

    def _ask_worker(self, token: bytes, paths: list[bytes]) -> dict[str, Any]:
        """In a child: the mount itself is the only way to a worker."""
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

    def _invalidate(self, stack: MountedOverlay) -> dict[str, Any]:
        """In a child: this may wait for a directory in which somebody is busy."""
        for note in notes_of(stack.notes()):
            try:
                os.write(self.engine.device, note)
            except OSError as error:
                if error.errno != errno.ENOENT:  # the kernel does not know that one
                    raise
        return {"done": True}

    def _shards(self) -> dict[str, Any]:
        shards = self.wanted.shards
        names = [[os.fsdecode(shard.name), os.fsdecode(shard.path)] for shard in shards]
        reading = self.mount.selection.reading._asdict()
        return {"shards": names, "reading": reading, "seen": self.wanted.access.to_json()}

    async def _let_finish(self) -> None:
        """Wait for what a worker is at: it may have begun before the freeze."""
        board, done = self.engine.board, self.engine.board.done
        while board.busy and board.done == done:  # noqa: ASYNC110  # shared memory tells nobody
            await trio.sleep(0.001)

    def _renew(self, further: Sequence[bytes], published: Sequence[bytes]) -> None:
        """Show the shards as they are now, with `further` ones at the end; a commit has replaced `published`."""
        shards = extended(self.wanted.shards, further)
        tags = self.wanted.tags.extended(len(shards))
        access = self.wanted.access.renewed(published, further)
        self.wanted = replace(self.wanted, shards=shards, tags=tags, access=access)
        self.engine.renew(self.wanted.tree, _follower(self.wanted))

    def _report(self) -> dict[str, Any]:
        tree = self.wanted.lower_tree()
        told = status_report.gather(tree.lower, tree.totals, self.engine.board, self.daemon.started)
        return {**told, "unfinished_commit": is_half_done(self.daemon.overlay)}


# --- background --------------------------------------------------------------------------------------------


def in_background(mount: MountOptions, front: Front) -> int:
    """Fork a daemon that runs this mount; returns 0 when its tree is usable, else the daemon's exit code.

    The daemon stays attached to the terminal until then: it shows progress, says what is wrong, and gets an
    interrupt. Must be called before any thread is started.
    """
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid:
        os.close(sender)
        return _wait_for(pid, receiver, control.log_path(mount.mountpoint))
    os.close(receiver)
    code = 1
    try:
        code = guarded(
            lambda: run(mount, front, lambda: _leave_terminal(mount, sender), lambda: _tell(sender, READY))
        )
    finally:
        _tell(sender, GONE)
        os._exit(code)


def guarded(action: Callable[[], None]) -> int:
    """Run to the end; errors become a message and an exit code."""
    try:
        action()
    except WdsfsError as error:
        log.error("%s", error)
        return error.exit_code
    except KeyboardInterrupt:
        log.error("interrupted; what was indexed is kept")
        return 130
    except BaseException:
        log.exception("wdsfs failed; please report this")
        return 1
    return 0


def _wait_for(pid: int, receiver: int, log_file: Path) -> int:
    heard, status = b"", 0
    while READY not in heard:
        try:
            # Not by the end of the pipe: the daemon's workers have it, too, and may outlive it.
            if select.select([receiver], [], [], LOOK_SECONDS)[0]:
                word = os.read(receiver, 16)
                heard += word or GONE  # killed, and nobody else has the pipe
            elif os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                break
        except KeyboardInterrupt:  # the daemon has got it, too, and ends in good order
            continue
        if heard.endswith(GONE):
            break
    if READY in heard:
        return 0
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if LEFT in heard:  # what it said then is not on this terminal
        log.error("the daemon has ended before its tree was usable; see %s", log_file)
    return code if code > 0 else 1


def _tell(sender: int, word: bytes) -> None:
    """Tell the waiting process how far this one is."""
    with contextlib.suppress(BrokenPipeError):  # nobody waits any more
        os.write(sender, word)


def _leave_terminal(mount: MountOptions, sender: int) -> None:
    """Go on in the background, with the log in a file."""
    _tell(sender, LEFT)
    log_to_file(mount.log)
    os.setsid()
    for name in ("WDSFS_INDEX_DIR", "WDSFS_CACHE_DIR"):  # workers take the place of unpacked shards from these
        if os.environ.get(name):
            os.environ[name] = os.path.abspath(os.environ[name])
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)


def open_log(mountpoint: str) -> Path | None:
    """The file that a mount in the background logs to, where one can be written; a long old one is put aside."""
    for path in (control.log_path(mountpoint), control.spare_log_path(mountpoint)):
        try:
            trust.directory(path.parent, create=True, tighten=True)
            if path.exists() and path.stat().st_size > LOG_BYTES:
                path.replace(path.with_suffix(".log.old"))
            fd = trust.open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.fchmod(fd, 0o600)  # names of samples are in it, and an older version made it for all
            os.close(fd)
        except OSError as error:
            log.warning("no log can be kept in %s: %s", path.parent, error.strerror)
        else:
            return path
    return None


class _Formatter(logging.Formatter):
    """Lines that a terminal may be shown, whatever names are in them."""

    def format(self, record: logging.LogRecord) -> str:
        return names.shown_lines(super().format(record))


def log_to_file(path: Path | None) -> None:
    """Send the log of this process to a file, with tracebacks of crashes and, on SIGUSR1, of all threads."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    fd = os.open(os.devnull, flags) if path is None else trust.open_file(path, flags)
    # Not rotated while the mount runs: the crash handlers below keep writing to this one file.
    stream = os.fdopen(fd, "a", buffering=1, encoding="utf-8", errors="backslashreplace")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    faulthandler.enable(stream)
    faulthandler.register(signal.SIGUSR1, stream, all_threads=True)


def notify_systemd(message: str) -> None:
    """Tell a service manager, if one asked to be told (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as client:
            client.connect(address)
            client.sendall(message.encode())
    except OSError as error:  # the mount works all the same
        log.warning("the service manager could not be told (NOTIFY_SOCKET=%s): %s", address, error)


# --- ending ------------------------------------------------------------------------------------------------


def unmount(mountpoint: str, lazy: bool = False, wait_seconds: float = 30.0) -> None:
    """End the mount at this path, alive or dead; returns when its daemon is gone. Raises MountError."""
    path = control.canonical(mountpoint)
    daemon = control.find(path)
    mounted = host.mounted_at(path)
    if mounted is None and daemon is None:
        raise MountError(f"{path}: nothing is mounted there")
    if mounted is not None:  # else the mount has ended otherwise; what is left of it is cleared below
        if daemon is None and mounted.fstype != "fuse.wdsfs":
            raise MountError(f"{path}: that is a mount of type {mounted.fstype}, not one of wdsfs")
        dead = not daemon.alive if daemon is not None else _is_dead(path)
        _detach_mount(path, lazy or dead)
    if daemon is not None:
        if not lazy:
            _wait_for_end(daemon, wait_seconds)
        if not daemon.alive:
            control.forget(daemon)


def _is_dead(path: str) -> bool:
    try:
        os.statvfs(path)
    except OSError as error:
        return error.errno in DEAD_MOUNT_ERRNOS
    return False


def _detach_mount(path: str, lazy: bool) -> None:
    import subprocess

    command = ["umount"] if os.geteuid() == 0 else ["fusermount3", "-u"]
    if lazy:
        command.append("-l" if command[0] == "umount" else "-z")
    try:
        # In the language of the messages that are looked into below.
        environment = {**os.environ, "LC_ALL": "C"}
        done = subprocess.run(
            [*command, "--", path], capture_output=True, text=True, errors="replace", check=False, env=environment
        )
    except FileNotFoundError:
        raise MountError(f"{command[0]} is not installed; `wdsfs doctor` tells what to type") from None
    if done.returncode:
        text = done.stderr.strip()
        if "busy" in text:
            quoted = shlex.quote(path)
            text += f"; see who uses it with: fuser -vm {quoted}; or: wdsfs umount --lazy {quoted}"
        raise MountError(text)


def _wait_for_end(daemon: control.Daemon, seconds: float) -> None:
    """Wait until the daemon is gone: as long as it waits for a disk, and else up to `seconds`."""
    since = time.monotonic()
    deadline, told = since + seconds, False
    while daemon.alive:
        now = time.monotonic()
        if control.waits_for_disk(daemon.pid):
            deadline = now + seconds
            if not told and now - since > TELL_SECONDS:
                told = True
                log.info(
                    "waiting for process %s: %s. An interrupt ends the waiting only",
                    *(daemon.pid, _what_is_written(daemon)),
                )
        if now > deadline:
            where = f"; see {daemon.log}" if daemon.log else ""
            raise MountError(
                f"process {daemon.pid} is still there, {now - since:.0f} s after the unmount, and does not wait "
                f"for a disk{where}"
            )
        time.sleep(0.01)


def _what_is_written(daemon: control.Daemon) -> str:
    """What a daemon does whose mount is gone."""
    if daemon.overlay is None:
        return "it waits for a disk"
    left = host.unwritten_bytes()
    rest = "" if left is None else f", and this machine has {left >> 20:,} MiB to write in all"
    return f"it has the changes in {daemon.overlay} written to the disk{rest}"
