"""Mounts a set by FUSE from start to end: prepares it, mounts, serves, and ends in good order.

`run` does everything in the process that calls it. The module knows nothing of the content of a set.

Order of a start: index the shards (with progress on the terminal), mount, answer the kernel's INIT, register the
daemon, announce the start. Order of an end: unmount, then remove the registration, so that `wdsfs umount` can wait
for the process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyfuse3
import trio

from wdsfs import host, mount_table
from wdsfs.door.shard_door import DOOR
from wdsfs.door.urls import is_remote
from wdsfs.errors import MountError, NotATar, ShardError, UnreadableShard, counted
from wdsfs.fuse.child_process import Child, in_child
from wdsfs.fuse.counters import Board
from wdsfs.fuse.pass_notes import PassNotes
from wdsfs.fuse.read_ops import TIMEOUT_SECONDS, ReadOperations
from wdsfs.fuse.supervisor import Supervisor
from wdsfs.fuse.write_ops import WritableOperations
from wdsfs.index.portable import attached
from wdsfs.index.record_of_file import settles_in
from wdsfs.index.store import Index, Needed, open_index
from wdsfs.mount import daemon
from wdsfs.mount.control_socket import ControlSocket
from wdsfs.mount.daemon import log_path, open_log
from wdsfs.mount.followed_set import Growth
from wdsfs.mount.hidden_directory import HiddenDirectory, HiddenDirectoryOperations
from wdsfs.mount.hints import hints
from wdsfs.mount.mount_options import OFF, FuseOptions, MountOptions, parse_options, refuse_view
from wdsfs.mount.mount_search import check_mountpoint
from wdsfs.mount.mounted_set import MountedSet
from wdsfs.mount.reports import SetState, TextRing
from wdsfs.mount_registry import FUSE, Registration, listening, registered, start_ticks
from wdsfs.overlay.mounted_overlay import MountedOverlay
from wdsfs.overlay.overlay_directory import OverlayDirectory, is_half_done
from wdsfs.overlay.overlay_shards import refuse_reading
from wdsfs.overlay.upper_files import sync_filesystem
from wdsfs.shards import Shard, Shards
from wdsfs.spec import objects
from wdsfs.spec.dependencies import noted
from wdsfs.spec.expand import expand, expand_again
from wdsfs.tree.companions import Companions
from wdsfs.tree.composition import Composition
from wdsfs.tree.freshness import Generations
from wdsfs.tree.numbered_tree import check_name
from wdsfs.tree.opening import judge, make_view, refresh_index
from wdsfs.tree.shard_access import access_of, refuse_foreign_lists
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.view_set import ViewSet, make_shard_set

log = logging.getLogger(__name__)

DESCRIPTORS_MAX = 4096  # open shards of a worker
END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SYNC_SECONDS = 10.0  # longest wait for writes in the kernel's memory, when a signal ends the mount
SYNC_PAUSE_SECONDS = 1.0  # pause before the next attempt


# --- running -----------------------------------------------------------------------------------------------


def mount_by_fuse(mount: MountOptions) -> int:
    """Mount, in the foreground or in a daemon.

    Returns an exit code when the tree is usable, in the foreground when the mount has ended.
    """
    if mount.serving.foreground:
        return daemon.guarded(lambda: run(mount, lambda _: None, lambda: daemon.notify_systemd("READY=1")))
    return daemon.fork(mount.mountpoint, lambda leave, ready: run(mount, leave, ready))


def run(mount: MountOptions, leave: daemon.Leave, ready: Callable[[], None]) -> None:
    """Mount and serve until the mount ends.

    `run` calls `leave` after all checks whose errors the user should see at once, before it forks the workers. It
    calls `ready` when the tree is usable. Raises WdsfsError if the set cannot be mounted.
    """
    serving, tree, view = mount.serving, mount.tree, mount.view
    host.map_large_blocks()
    parsed = parse_options(mount.dash_o, writable=mount.overlay is not None)
    with noted() as used:
        shards = Shards(_shards(mount))
        directories = [] if serving.follow is None else used.absolute()
        companions = Companions(tree.composition, mount.selection.reading)
    # Before anything is read: files that come later are compared with the files of this moment.
    shared = os.geteuid() == 0 or "allow_other" in parsed.fuse
    refuse_foreign_lists(used.files, shared)
    files = [*(shard.path for shard in shards), *companions.files]
    access = access_of(files, shared, allow_missing=mount.opening.tolerance.allow_missing)
    if mount.overlay is not None:
        refuse_view(shards, tree)
        if not OverlayDirectory(mount.overlay).settings.exists():  # before the shards are indexed
            refuse_reading(mount.selection.reading)
    check_name(shards, view)
    index = open_index(mount.opening.index_dir)
    try:
        index.log_notices()
        index.portables = attached([*shards, *companions.shards])
        busy = [path for path in files if not is_remote(path)]
        check_mountpoint(mount.mountpoint, parsed.nonempty, [*busy, *_own_paths(mount, index)])
        below = make_shard_set(shards, index, tree.composition, companions, access=access)
        composition, remarks, advice, is_derived = _make_ready(mount, below, companions)
        log_file = None if serving.foreground else open_log(mount.mountpoint)
        index.suspend()
        overlay = None
        descriptors = min(host.files_for_shards(host.raise_file_limit()), DESCRIPTORS_MAX)
        if mount.overlay is not None:
            owner = parsed.owner.uid, parsed.owner.gid
            overlay = MountedOverlay(mount.overlay, shards, view, owner, parsed.owner.umask)
        tags = Generations.at_mount(len(shards), followed=serving.follow is not None)
        served = MountedSet(mount, shards, composition, companions, access, index, descriptors, tags, overlay)
        growth = Growth(served, _working_directory(), directories, SetState(serving.follow))

        def leave_and_log() -> None:
            for line in advice:
                log.info("%s", line)
            leave(log_file)
            if not serving.foreground:  # the warnings of the terminal, again in the log
                _say(remarks)

        _serve(parsed, growth, log_file, leave_and_log, ready, is_derived)
    finally:
        index.discard()


def _shards(mount: MountOptions) -> list[Shard]:
    """Return the shards of a mount. Raises the errors of `expand`."""
    selection = mount.selection
    if mount.serving.new:
        return []
    if mount.serving.follow is not None and selection.allow_missing:  # missing shards may come
        return expand_again(mount.specs, selection.split, selection.reading, selection.base)
    return expand(mount.specs, *selection)


def _own_paths(mount: MountOptions, index: Index) -> list[bytes]:
    """Return the paths of index, runtime directory, log and overlay.

    Raises MountError for a mount point in the overlay.
    """
    own = [index.directory.absolute(), host.runtime_dir(), log_path(mount.mountpoint)]
    if mount.overlay is not None:
        own.append(mount.overlay.absolute())
        if mount.overlay.resolve() in Path(mount.mountpoint).parents:
            raise MountError(f"{mount.mountpoint}: lies in the overlay {mount.overlay}; name another mount point")
    return list(map(os.fsencode, own))


class _Ready(NamedTuple):
    """A set that can be mounted: its view, warnings about its shards, and hints for the user."""

    composition: Composition
    remarks: list[str]
    advice: Sequence[str]
    is_derived: bool  # False: the running mount makes most of the view


def _make_ready(mount: MountOptions, below: ShardSet, companions: Companions) -> _Ready:
    """Index the set, unless this can wait, and judge it; release `below`. Raises the errors of `opening.judge`."""
    tree, opening, index = mount.tree, mount.opening, below.index
    composition, strict, merge = tree.composition, opening.tolerance.strict, mount.merge
    is_derived, judged = True, below
    try:
        unreadable: dict[bytes, ShardError] = {}
        if not mount.puts_off:
            # Else the first use of a shard fetches or copies its record.
            whole = merge or strict or mount.overlay is not None
            needed = Needed.USABLE if whole or isinstance(below, ViewSet) else Needed.LISTED
            unreadable = refresh_index(index, [*below.shards, *companions.shards], opening, needed).unreadable
            some = not (whole or tree.index_tree)
            unreadable = make_view(below, opening, some=some) | unreadable  # the errors of `make_view` say more
            if isinstance(below, ViewSet):
                composition = below.composition  # completed by `make_view`
                is_derived = not below.rest_waits
                judged = below if is_derived else below.plain
        if mount.serving.follow is not None:
            unreadable = dict(map(_unfinished, unreadable.items()))
        remarks = [*judge(judged, unreadable, opening.tolerance, merge), *index.miscounted(below.shards)]
        _say(remarks)
        advice = () if opening.quiet else hints(judged, tree, mount.overlay is not None)
        return _Ready(composition, remarks, advice, is_derived)
    finally:
        below.release()


def _unfinished(unreadable: tuple[bytes, ShardError]) -> tuple[bytes, ShardError]:
    """Return the error of an unreadable shard in a set that grows: its download may just have begun."""
    path, error = unreadable
    if not isinstance(error, NotATar) or settles_in(path) is None:
        return unreadable
    return path, UnreadableShard(f"{error}; a program may still be writing it")


def _say(remarks: Sequence[str]) -> None:
    for text in remarks:
        log.warning("%s", text)


def _serve(
    parsed: FuseOptions,
    growth: Growth,
    log_file: Path | None,
    leave: Callable[[], None],
    ready: Callable[[], None],
    is_derived: bool,
) -> None:
    """Mount the set, fork the workers, and serve until the mount ends."""
    served = growth.served
    mount, board = served.mount, Board(objects.stores_of(served.files))
    # Not with an overlay: a file that is copied up must not get the content of the shard.
    if served.overlay is None and mount.serving.push != OFF:
        board.passes = PassNotes()
    daemon = _registration(served, log_file)
    operations = _operations(parsed, growth, board, daemon)
    with contextlib.ExitStack() as end:
        signals = end.enter_context(_signals_kept())
        place = end.enter_context(_mounted(mount, parsed))
        if served.overlay is not None:
            end.callback(served.overlay.finish)
        follow = growth.follower()
        workers = 1 if operations.alone else mount.workers
        supervisor = Supervisor(operations, board, served.tree, workers, mount.serving.spin / 1e6, follow)
        end.callback(supervisor.stop)  # no worker may outlive the supervisor
        _begin(supervisor, served, log_file)
        # Forked before the daemon leaves its process group: until the mount is announced, an automount (autofs)
        # stops all processes of other groups on the way to the mount point.
        look = Child(lambda: {"mode": os.stat(mount.mountpoint).st_mode}, supervisor.device)
        leave()
        growth.supervisor = supervisor
        running = RunningMount(daemon, growth, supervisor, signals, ready, is_derived, look)
        try:
            trio.run(running.run)
        except BaseException:
            # The directory must not look empty: a copy job would delete its mirror. No job copies a mount that was
            # not announced.
            place.stays = running.usable
            raise
        if running.failure is not None:
            raise running.failure


def _operations(
    parsed: FuseOptions, growth: Growth, board: Board, daemon: Registration
) -> ReadOperations | WritableOperations:
    """Return the operations that answer the kernel's requests."""
    overlay = growth.served.overlay
    operations = (
        ReadOperations(parsed.owner, board)
        if overlay is None
        else WritableOperations(parsed.owner, board, lambda: overlay.frozen, overlay.note, overlay.token)
    )
    hidden = HiddenDirectory(daemon, board, TextRing(), growth.state, lambda: is_half_done(daemon.overlay))
    operations.hidden = HiddenDirectoryOperations(parsed.owner, board, hidden)
    return operations


def _begin(supervisor: Supervisor, served: MountedSet, log_file: Path | None) -> None:
    """Answer INIT and set up what workers inherit; start the fetcher of a set that has remote shards."""
    mount = served.mount
    first = next(filter(is_remote, served.files), None)
    if first is not None:
        supervisor.fetcher = DOOR.remote.attach(supervisor.device, log_file, first)
        served.tags.fetched = supervisor.fetcher.alarm_words
    supervisor.answer_init()
    if mount.merge and supervisor.follow is not None and supervisor.epochs:
        # Names at the top are names of samples: the kernel must not ask for them every second.
        supervisor.operations.change_seconds = TIMEOUT_SECONDS
    mounted = mount_table.mounted_at(mount.mountpoint)
    if mounted is not None:
        supervisor.place = mount.mountpoint, mounted.device
        _set_readahead(mounted.device, mount)


class _MountPlace:
    """The mount point of a mount in progress; with `stays` its end leaves a dead mount."""

    stays = False


@contextlib.contextmanager
def _mounted(mount: MountOptions, parsed: FuseOptions) -> Iterator[_MountPlace]:
    """Mount by libfuse for the block, and unmount at its end. Raises MountError."""
    _mount(mount, parsed)
    place = _MountPlace()
    try:
        yield place
    finally:
        pyfuse3.close(unmount=not place.stays)
        if mount.removes_mountpoint:
            with contextlib.suppress(OSError):  # still mounted, or no longer empty
                os.rmdir(mount.mountpoint)


def _mount(mount: MountOptions, parsed: FuseOptions) -> None:
    """Mount by libfuse, without its loop over requests. Raises MountError."""
    options = {"default_permissions", *parsed.fuse} | ({"ro"} if mount.overlay is None else set())
    for name, value in (("subtype", "wdsfs"), ("fsname", _fsname(mount.specs or ["new"]))):
        if not any(option.startswith(f"{name}=") for option in options):
            options.add(f"{name}={value}")
    try:
        with _released_last() if "auto_unmount" in options else contextlib.nullcontext():
            pyfuse3.init(pyfuse3.Operations(), mount.mountpoint, options)
    except (RuntimeError, UnicodeEncodeError) as error:
        from wdsfs.mount.doctor import preventing  # late: this import takes a tenth of the start of a mount

        nothing = f"libfuse's own message is above; `wdsfs doctor {shlex.quote(mount.mountpoint)}` finds no cause"
        findings = preventing(mount.mountpoint, parsed.fuse)
        why = "; ".join(f"{finding.name}: {finding.detail} -> {finding.remedy}" for finding in findings) or nothing
        raise MountError(f"{mount.mountpoint}: libfuse could not mount ({error}): {why}") from None


@contextlib.contextmanager
def _released_last() -> Iterator[None]:
    """Give the socket that libfuse opens in the block a lower number than its FUSE descriptor has.

    With `auto_unmount`, fusermount3 waits for the end of that socket, then unmounts if the mount gives ENOTCONN.
    The kernel releases the descriptors of a killed process from the highest number downwards. If the socket came
    first, fusermount3 could get ECONNABORTED from the ending connection, and would leave the mount.
    """
    low, before = os.open(os.devnull, os.O_RDONLY), _sockets()
    yield
    for number in _sockets() - before:
        null = os.dup(low)
        os.dup2(number, low)  # the fetcher inherits it, together with the FUSE descriptor
        os.dup2(null, number)  # the number belongs to libfuse and stays in use
        os.close(null)


def _sockets() -> set[int]:
    """Return the numbers of this process's descriptors that are sockets."""
    numbers = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the list
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                numbers.add(int(name))
    return numbers


def _registration(served: MountedSet, log_file: Path | None) -> Registration:
    """Return the registration of this process."""
    mount = served.mount
    return Registration(
        engine=FUSE,
        pid=os.getpid(),
        start_ticks=start_ticks(os.getpid()) or 0,
        mountpoint=mount.mountpoint,
        specs=[objects.without_secrets(spec) for spec in mount.specs],
        layout=mount.tree.layout,
        names=mount.tree.names,
        merge=mount.merge,
        started=time.time(),
        log=_place_of_stderr() if log_file is None else str(log_file),
        overlay=None if served.overlay is None else str(served.overlay.place.path),
        index=str(served.index.directory.absolute()),
        selection=mount.selection.arguments,
        composition=mount.tree.composition.public_text,
        index_tree=mount.tree.index_tree,
        follow=mount.serving.follow,
        directory=_working_directory(),
    )


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it has been removed
        return ""


def _place_of_stderr() -> str | None:
    """Return where a mount in the foreground logs: "journal" under systemd, or a file; None for a terminal."""
    try:
        status = os.fstat(2)
        if os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}":  # systemd.exec(5)
            return "journal"
        return os.readlink("/proc/self/fd/2") if stat.S_ISREG(status.st_mode) else None
    except OSError:
        return None


def _set_readahead(device: int, mount: MountOptions) -> None:
    """Set the readahead of the mount, which only root may do, and only where /sys is writable."""
    try:
        host.set_readahead(device, mount.serving.readahead << 10)
    except OSError as error:
        log.debug("the kernel's readahead cannot be changed: %s", error)


@contextlib.contextmanager
def _signals_kept() -> Iterator[list[int]]:
    """Keep signals until the supervisor handles them: their default action would leave a dead mount."""
    pending: list[int] = []
    before = {number: signal.signal(number, lambda number, _: pending.append(number)) for number in END_SIGNALS}
    try:
        yield pending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _fsname(specs: Sequence[str]) -> str:
    """Return the source that `mount` and `df` show: the SHARDS, in ASCII and cut to 200 characters."""
    text = " ".join(map(objects.without_secrets, specs)).encode("ascii", "backslashreplace").decode()
    text = text if len(text) <= 200 else text[:197] + "..."
    return "wdsfs#" + text.replace("\\", "\\\\").replace(",", "\\,")


@dataclass
class RunningMount:
    """The supervisor's side of a running mount: workers, control socket and signals, side by side.

    `look` looks at the root of the tree. `usable`: the tree was announced. `failure`: the error that prevented it.
    """

    daemon: Registration
    growth: Growth
    supervisor: Supervisor
    pending_signals: Sequence[int]
    ready: Callable[[], None]
    is_derived: bool
    look: Child
    usable: bool = False
    failure: MountError | None = None

    async def run(self) -> None:
        """Serve until the file system is unmounted."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_signals)
            nursery.start_soon(self._announce)
            nursery.start_soon(self.growth.run)
            await self.supervisor.run()
            nursery.cancel_scope.cancel()

    async def _watch_signals(self) -> None:
        with trio.open_signal_receiver(*END_SIGNALS) as signals:
            for number in self.pending_signals:
                await self._end(number)
            async for number in signals:
                await self._end(number)

    async def _end(self, number: int) -> None:
        log.info("ended by %s", signal.Signals(number).name)
        if self.growth.served.overlay is not None:
            with trio.move_on_after(SYNC_SECONDS):  # flush changes in mapped files
                while not await in_child(self._sync, self.supervisor.device):  # noqa: ASYNC110  # it fails
                    await trio.sleep(SYNC_PAUSE_SECONDS)
        self.supervisor.stop()

    def _sync(self) -> dict[str, Any]:
        sync_filesystem(self.daemon.mountpoint)
        return {"done": True}

    async def _announce(self) -> None:
        """Open the control socket, register, announce that the mount is usable."""
        with listening(self.daemon.mountpoint) as listener, registered(self.daemon):
            # An answer about the root proves that the mount works. The question may kill a worker, but not this
            # process.
            if not await self.look.answer():
                self.failure = MountError(f"{self.daemon.mountpoint}: the mount does not answer")
                self.supervisor.stop()
                return
            self.ready()
            self.usable = True
            log.info("mounted %s at %s", counted(len(self.growth.served.shards), "shard"), self.daemon.mountpoint)
            listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(listener))]
            async with trio.open_nursery() as nursery:
                if not self.is_derived:
                    nursery.start_soon(self.growth.derive_rest)
                await trio.serve_listeners(
                    ControlSocket(self.daemon, self.growth, self.supervisor).answer, listeners
                )
