"""Has the shards of a packed set written: those that are not there yet, several at a time.

A `PackRun` compares what is there already, makes directories and the list of the classes, and hands out units of
work (`shard_unit.py`): to processes, or for stores to threads of this process, which has their secrets.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from wdsfs.errors import CommitError, ShardError, bytes_text, several
from wdsfs.index import process_pool
from wdsfs.packing import shard_unit
from wdsfs.packing.packing_plan import PackingPlan, PlannedShard, SmallFile
from wdsfs.packing.shard_unit import ShardUnit, UnitWriter
from wdsfs.remote.shard_paths import is_remote
from wdsfs.storage.durable import Disk, make_directories, remove_leftover, temporary_of, write_whole

if TYPE_CHECKING:
    from wdsfs.cluster.engines import Workers
    from wdsfs.packing.object_outputs import ObjectOutputs

# Less work than this is finished here before other processes have started.
ALONE_FILES, ALONE_BYTES = 4_000, 64 << 20


class _Stopped(Exception):
    """Stops a thread that sends a shard, after another one has failed."""


class PackRun:
    """Writes the shards of a plan, `jobs` at a time. `on_bytes` is called with each number of bytes done.

    `space_check`: refuse to begin where the file system seems too full. With `workers` the shards are written by
    these; those that go to a store are still written here.
    """

    def __init__(
        self,
        plan: PackingPlan,
        jobs: int = 1,
        on_bytes: Callable[[int], None] = lambda _: None,
        space_check: bool = True,
        workers: Workers | None = None,
    ) -> None:
        self.plan, self.jobs, self.on_bytes, self.space_check = plan, jobs, on_bytes, space_check
        self.workers = workers
        self._stop = threading.Event()
        small = plan.length < ALONE_BYTES and len(plan.samples.rows) < ALONE_FILES
        self._processes = 1 if small else jobs

    def write(self) -> list[PlannedShard]:
        """Write the shards; return those that were written now.

        Those that an earlier, killed run has finished are compared and kept. Raises CommitError, before anything
        is written, if something else has one of the names; ShardErrors; OSErrors.
        """
        objects = self._objects()
        there = self._there(objects)
        self._refuse_taken(there, objects)
        left = [shard for shard in self.plan.shards if shard.target not in there]
        files = [shard for shard in left if not is_remote(shard.target)]
        remote = [shard for shard in left if is_remote(shard.target)]
        if self.space_check:
            _refuse_without_space(files)
        if remote:
            objects.refuse_without_space(remote, self.jobs)
        disk = Disk()
        for directory in sorted({os.path.dirname(shard.target) for shard in files}):
            make_directories(disk, directory)
        if self.plan.classes_file is not None and self.plan.classes_file.target not in there:
            self._put(self.plan.classes_file)
        self._write_files(files)
        self._in_threads(objects.publish, remote)
        return left

    # --- what is there

    def _objects(self) -> ObjectOutputs[ShardUnit]:
        from wdsfs.packing.object_outputs import ObjectOutputs  # late, as in `remote/shard_paths.py`

        return ObjectOutputs(UnitWriter(on_bytes=self._count), self._count)

    def _go_on(self) -> None:
        if self._stop.is_set():
            raise _Stopped

    def _count(self, count: int) -> None:
        self._go_on()
        self.on_bytes(count)

    def _there(self, objects: ObjectOutputs[ShardUnit]) -> set[bytes]:
        """Return which of the names are taken."""
        small = [] if self.plan.classes_file is None else [self.plan.classes_file.target]
        targets = [*(shard.target for shard in self.plan.shards), *self.plan.beyond, *small]
        remote = [target for target in targets if is_remote(target)]
        if remote:
            objects.look(remote)
        found = {target for target in targets if not is_remote(target) and os.path.lexists(target)}
        return found | {target for target in remote if objects.exists(target)}

    def _refuse_taken(self, there: set[bytes], objects: ObjectOutputs[ShardUnit]) -> None:
        """Raise CommitError for names that something else has than this set."""
        beyond = [target for target in self.plan.beyond if target in there]
        if beyond:
            raise CommitError(
                f"{os.fsdecode(beyond[0])} exists, and this set ends before it: it would be taken for a part of "
                "it. Remove it with those after it, or choose another --output"
            )
        small = self.plan.classes_file
        if small is not None and small.target in there and self._content_of(small, objects) != small.content:
            raise CommitError(
                f"{os.fsdecode(small.target)} exists already, and has other classes: {_OTHER_OUTPUT}"
            )
        found = [shard for shard in self.plan.shards if shard.target in there]
        taken = [shard.target for shard in found if _size_at(shard, objects) not in (shard.length, None)]
        if not taken:
            taken = list(self._different(found, objects))
        if taken:
            verbs = ("exists", "is") if len(taken) == 1 else ("exist", "are")
            names = several([os.fsdecode(target) for target in taken])
            raise CommitError(f"{names} {verbs[0]} already and {verbs[1]} something else: {_OTHER_OUTPUT}")

    def _different(self, shards: Sequence[PlannedShard], objects: ObjectOutputs[ShardUnit]) -> Iterator[bytes]:
        """Yield the shards that have other bytes than planned. All of them are read."""
        files = [shard for shard in shards if not is_remote(shard.target)]
        for shard, same in self._units(shard_unit.is_there, files):
            self.on_bytes(shard.length)
            if not same:
                yield shard.target
        for shard in shards:
            if is_remote(shard.target) and not objects.is_done(self.plan.unit(shard)):
                yield shard.target

    def _content_of(self, small: SmallFile, objects: ObjectOutputs[ShardUnit]) -> bytes | None:
        if not is_remote(small.target):
            with open(small.target, "rb") as file:
                return file.read(len(small.content) + 1)
        return objects.read(small.target, len(small.content) + 1)

    # --- writing

    def _write_files(self, shards: Sequence[PlannedShard]) -> None:
        done: set[bytes] = set()
        try:
            for shard, _ in self._units(shard_unit.publish, shards):
                done.add(shard.target)
                self.on_bytes(shard.length)
        except BaseException:
            # Processes that are killed in the middle of a shard leave the unfinished file.
            for shard in shards:
                if shard.target not in done:
                    with contextlib.suppress(CommitError, OSError):
                        remove_leftover(temporary_of(shard.target))
            raise

    def _units(
        self, function: Callable[[ShardUnit], bool | None], shards: Sequence[PlannedShard]
    ) -> Iterator[tuple[PlannedShard, bool | None]]:
        """Yield each shard with the result of the function. Raises what that raises, and ShardErrors."""
        results = process_pool.units(
            function,
            shards,
            self._processes,
            self.workers,
            name=lambda one: os.fsdecode(one.target),
            prepare=self.plan.unit,
        )
        with contextlib.closing(results):
            for shard, result in results:
                if isinstance(result, ShardError):
                    raise result
                yield shard, result

    def _in_threads(self, work: Callable[[ShardUnit], None], shards: Sequence[PlannedShard]) -> None:
        """Do the work for each shard, in threads: one sends while another one reads."""
        from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

        queue, running = iter(shards), set[Future[None]]()
        with ThreadPoolExecutor(self.jobs, "pack") as threads:
            try:
                while True:
                    for shard in itertools.islice(queue, 2 * self.jobs - len(running)):
                        running.add(threads.submit(work, self.plan.unit(shard)))
                    if not running:
                        return
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        future.result()
            except BaseException:
                self._stop.set()
                threads.shutdown(cancel_futures=True)
                raise

    def _put(self, small: SmallFile) -> None:
        if is_remote(small.target):
            self._objects().put(small.target, small.content)
        else:
            write_whole(small.target, small.content)


_OTHER_OUTPUT = "remove it, or choose another --output"


def _size_at(shard: PlannedShard, objects: ObjectOutputs[ShardUnit]) -> int | None:
    """The size of what has the name of a shard; None for a remote one, which `is_done` looks at."""
    if is_remote(shard.target):
        return None
    return os.lstat(shard.target).st_size


def _refuse_without_space(shards: Iterable[PlannedShard]) -> None:
    """Raise CommitError if a file system lacks the room for these shards."""
    needed: Counter[int] = Counter()
    places: dict[int, bytes] = {}
    for shard in shards:
        directory = os.path.dirname(shard.target)
        while not os.path.isdir(directory):
            directory = os.path.dirname(directory)
        device = os.stat(directory).st_dev
        needed[device] += shard.length
        places.setdefault(device, directory)
    for device, directory in places.items():
        found = os.statvfs(directory)
        free = (found.f_bavail if os.geteuid() else found.f_bfree) * found.f_frsize
        if found.f_blocks and needed[device] > free:
            raise CommitError(
                f"{os.fsdecode(directory)}: the shards need {bytes_text(needed[device])} on this file system, "
                f"and {bytes_text(free)} are free: make room, or use --no-space-check"
            )
