"""Writes the missing shards of a plan, several at a time: by threads, processes or a cluster.

`shard_writer.py` writes a shard, or sends it to a store. Threads are enough to let the kernel copy ranges; new
members from many small files need processes. The calling thread distributes the work and reads the index.
`replacement.py` uses this module, too, to replace old shards.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import cached_property
from typing import TypeVar

from wdsfs.cluster_workers import Workers
from wdsfs.door.shard_door import DOOR
from wdsfs.door.urls import is_remote
from wdsfs.durable import Disk, make_directories, remove_leftover, temporary_of
from wdsfs.errors import CommitError, ShardError, bytes_text, several
from wdsfs.index import process_pool
from wdsfs.index.record import Record
from wdsfs.packing.cluster_units import ClusterRun, changed_since_planned, remove_attempts
from wdsfs.packing.plan import COPY, LINK, Output, Plan, SourceShard, Step, refuse_beyond
from wdsfs.packing.shard_writer import Contents, ObjectOutputs, ShardWriter
from wdsfs.packing.source_layout import layout
from wdsfs.shards import Fingerprint
from wdsfs.tree.indexing import NotIndexed
from wdsfs.tree.shard_set import ShardSet

PREPARED_AHEAD = 2  # shards per thread that are prepared before a thread is free

Outcome = TypeVar("Outcome")
Unit = tuple[Mapping[int, SourceShard], Contents, Output]  # a shard, as a process gets it


class _Stopped(Exception):
    """Stops a writing thread after another one has failed or the user has interrupted the command."""


class Runner:
    """Writes the shards of a plan, `jobs` at a time.

    `contents` reads new members, `lower` has the sources of copied ranges. `on_bytes` is called with each number
    of bytes written, or sent to a store, in any thread. With `processes` these write the files, with
    `workers` the workers of a cluster. `space_check`: refuse to begin if a file system seems too full.
    """

    def __init__(
        self,
        plan: Plan,
        contents: Contents,
        lower: ShardSet | None = None,
        jobs: int = 1,
        *,
        disk: Disk | None = None,
        on_bytes: Callable[[int], None] = lambda _: None,
        processes: int = 1,
        workers: Workers | None = None,
        space_check: bool = False,
    ) -> None:
        self.plan, self.jobs, self.space_check = plan, jobs, space_check
        self.disk = disk or Disk()
        self.writer = ShardWriter(plan.sources, contents, self.disk, self._count, jobs)
        self.objects = ObjectOutputs(self.writer, self._count)
        self._lower, self._on_bytes = lower, on_bytes
        self._processes, self._workers = processes, workers
        self._stop = threading.Event()

    @property
    def lower(self) -> ShardSet:
        """Return the set of the sources. REQUIRES: the plan has some."""
        assert self._lower is not None
        return self._lower

    @cached_property
    def cluster(self) -> ClusterRun | None:
        """Return the cluster whose workers write the shards; None if they are written here."""
        if self._workers is None:
            return None
        writer = self.writer
        return ClusterRun(self._workers, writer.contents, writer.sources, self.disk, self._on_bytes)

    @property
    def together(self) -> int:
        """Return the number of shards that are written at the same time."""
        return self.cluster.together if self.cluster else self.jobs

    def _count(self, count: int) -> None:
        if self._stop.is_set():
            raise _Stopped
        self._on_bytes(count)

    # --- new shards elsewhere

    def write(self) -> list[Step]:
        """Write new shards like `write_missing`, and remove the leftovers of a killed command and its workers."""
        steps = self.write_missing()
        remove_attempts(step.target for step in self.plan.steps if not step.is_remote)
        return steps

    def write_missing(self) -> list[Step]:
        """Write new shards; return the steps that were done now.

        Shards that an earlier, killed command has finished are kept. Raises CommitError before anything is written
        if something else has one of the names; ShardErrors, OSErrors.
        """
        there = self._names_taken()
        self._refuse_taken(there)
        beside = [step for step in self.plan.beside if step.target not in there]
        left = [step for step in self.plan.steps if step.target not in there]
        if self.space_check:
            refuse_without_space(left, self.together)
        self.refuse_without_staging(left)
        for directory in sorted({os.path.dirname(step.target) for step in (*beside, *left) if not step.is_remote}):
            make_directories(self.disk, directory)
        self._write_all([*beside, *left])
        return left

    def _names_taken(self) -> set[bytes]:
        """Return the names that exist."""
        targets = [*(step.target for step in (*self.plan.steps, *self.plan.beside)), *self.plan.beyond]
        remote = [target for target in targets if is_remote(target)]
        if remote:
            self.objects.look(remote)
        return {
            target
            for target in targets
            if (self.objects.exists(target) if is_remote(target) else os.path.lexists(target))
        }

    def _refuse_taken(self, there: set[bytes]) -> None:
        """Raise CommitError for names of the plan that other files have already."""
        for target in self.plan.beyond:
            if target in there:
                refuse_beyond(target)
        steps = [step for step in (*self.plan.beside, *self.plan.steps) if step.target in there]
        taken = [step.target for step in steps if self._has_other_size(step)]
        taken = taken or [step.target for step, same in self._compared(steps) if not same]
        if taken:
            verbs = ("exists", "it") if len(taken) == 1 else ("exist", "them")
            names = several([os.fsdecode(target) for target in taken])
            text = f"{names} {verbs[0]} already with other content: remove {verbs[1]}, or choose another --output"
            raise CommitError(text)

    def _has_other_size(self, step: Step) -> bool:
        return not step.is_remote and step.action != LINK and os.lstat(step.target).st_size != step.output.length

    def _compared(self, steps: Sequence[Step]) -> Generator[tuple[Step, bool], None, None]:
        """Yield each shard, and True if it has exactly the bytes of the plan. Reads all bytes."""
        files = [step for step in steps if not step.is_remote and step.action != LINK]
        for step, same in self._in_processes(is_there, files):
            self._on_bytes(step.output.length)
            yield step, same
        for step in steps:
            if step.is_remote:
                yield step, self.objects.is_done(step.output)
            elif step.action == LINK and step.number is not None:
                yield step, os.path.samefile(self.plan.sources[step.number].path, step.target)

    def refuse_without_staging(self, steps: Sequence[Step]) -> None:
        """Raise CommitError if objects have no room before they are sent, or one is too large."""
        remote = [step.output for step in steps if step.is_remote]
        if remote:
            self.objects.refuse_without_space(remote, 0 if self._workers else self.jobs)

    # --- one shard

    def _write_all(self, steps: Sequence[Step]) -> None:
        if self.cluster:
            for step in steps:
                if step.action == LINK:
                    self._publish(step)
            self.cluster.each([step for step in steps if step.action != LINK], self.prepare)
        elif self._processes > 1:
            self._publish_in_processes([step for step in steps if not step.is_remote])
            self.each([step for step in steps if step.is_remote], self._publish)
        else:
            self.each(steps, self._publish)

    def _publish(self, step: Step) -> None:
        source = None if step.number is None else self.plan.sources.get(step.number)
        if step.is_remote:
            if not self._copied_there(step, source):
                self.objects.publish(step.output)
        elif step.action == LINK and source is not None:
            self._link(source, step.target)
        else:
            self.writer.publish(step.output)

    def _copied_there(self, step: Step, source: SourceShard | None) -> bool:
        """Return True if the store has copied a whole shard, so that wdsfs need not fetch any of its bytes."""
        if step.action != COPY or source is None or not is_remote(source.path):
            return False
        if DOOR.look(source.path) != source.fingerprint:
            raise changed_since_planned(source.path)
        return self.objects.copied(step.output, source.path)

    def _link(self, source: SourceShard, target: bytes) -> None:
        if Fingerprint.at(source.path) != source.fingerprint:
            raise changed_since_planned(source.path)
        try:
            self.disk.link(os.path.realpath(source.path), target)
        except OSError as error:
            text = f"{os.fsdecode(target)}: is no hard link of the shard ({error.strerror}); leave out --link"
            raise CommitError(text) from None
        self.disk.sync_directory(os.path.dirname(target))

    def prepare(self, step: Step) -> None:
        """Load the places of members in the sources of one shard, to verify it. Memory has no room for all."""
        if self.plan.sources and step.action not in (COPY, LINK):
            step.output.places = {
                number: layout(*self._source(number)).places.within(ranges)
                for number, ranges in step.output.ranges.items()
            }

    def _source(self, number: int) -> tuple[int, bytes, Record]:
        path = self.lower.shards[number].path
        try:
            return number, path, self.lower.record(number)
        except NotIndexed:
            raise changed_since_planned(path) from None

    # --- several at a time

    def each(self, steps: Sequence[Step], work: Callable[[Step], None]) -> None:
        """Do the work for each step in threads: while the kernel copies, other threads run."""
        if self.jobs == 1:
            for step in steps:
                self.prepare(step)
                self._settled(step, work)
            return
        running: set[Future[None]] = set()
        with ThreadPoolExecutor(self.jobs, "packing") as threads:
            try:
                for step in steps:
                    self.prepare(step)
                    running.add(threads.submit(self._settled, step, work))
                    if len(running) >= PREPARED_AHEAD * self.jobs:
                        running = _some_done(running)
                while running:
                    running = _some_done(running)
            except BaseException:
                self._stop.set()
                threads.shutdown(cancel_futures=True)
                raise

    def _settled(self, step: Step, work: Callable[[Step], None]) -> None:
        work(step)
        step.output.places = None

    def _publish_in_processes(self, steps: Sequence[Step]) -> None:
        done: set[bytes] = set()
        try:
            for step, _ in self._in_processes(publish, steps):
                done.add(step.target)
                self._on_bytes(step.output.length)
        except BaseException:
            # A process that is killed in the middle of a shard leaves the unfinished file.
            for step in steps:
                if step.target not in done:
                    with contextlib.suppress(CommitError, OSError):
                        remove_leftover(temporary_of(step.target))
            raise

    def _in_processes(
        self, function: Callable[[Unit], Outcome], steps: Sequence[Step]
    ) -> Generator[tuple[Step, Outcome], None, None]:
        """Yield each step with the result of the function. Raises what that raises, and ShardErrors."""
        results = process_pool.units(
            function,
            steps,
            self._processes,
            name=lambda step: os.fsdecode(step.target),
            prepare=lambda step: (self.plan.sources, self.writer.contents, step.output),
        )
        with contextlib.closing(results):
            for step, result in results:
                if isinstance(result, ShardError):
                    raise result
                yield step, result


def publish(unit: Unit) -> None:
    """Write a shard in a process of its own. Raises CommitError, OSErrors."""
    sources, contents, output = unit
    ShardWriter(sources, contents).publish(output)


def is_there(unit: Unit) -> bool:
    """Return True if the file of a shard has its bytes already. Raises CommitError, OSErrors."""
    sources, contents, output = unit
    return ShardWriter(sources, contents).is_there(output)


def _some_done(running: set[Future[None]]) -> set[Future[None]]:
    """Wait for a thread; return the work that is still under way."""
    done, running = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        future.result()
    return running


def refuse_without_space(steps: Sequence[Step], jobs: int) -> None:
    """Raise CommitError if a file system lacks the bytes that these files need at one time, `jobs` at once.

    A new shard is complete before the old shard is removed. Savings by reflinks and compression do not count. An
    old shard with other links frees no bytes.
    """
    grows: Counter[int] = Counter()
    copies: dict[int, list[int]] = {}
    directories: dict[int, bytes] = {}
    for step in steps:
        if step.is_remote:
            continue
        directory = os.path.dirname(step.target)
        while not os.path.isdir(directory):
            directory = os.path.dirname(directory)
        device = os.stat(directory).st_dev
        directories.setdefault(device, directory)
        old, new = _freed_by(step), step.output.length
        grows[device] += max(new - old, 0)
        copies.setdefault(device, []).append(min(new, old))
    for device, directory in directories.items():
        beside = sum(sorted(copies[device], reverse=True)[:jobs])
        space = os.statvfs(directory)
        if space.f_flag & os.ST_RDONLY:
            raise CommitError(f"{os.fsdecode(directory)}: the disk is read-only: name another place with --output")
        free = (space.f_bavail if os.geteuid() else space.f_bfree) * space.f_frsize
        if space.f_blocks and grows[device] + beside > free:
            why = ", since they are written beside the old ones," if beside else ""
            fewer = (
                f", write fewer shards at a time (--jobs, now {jobs})" if beside and jobs > 1 < len(steps) else ""
            )
            raise CommitError(
                f"{os.fsdecode(directory)}: the new shards need {bytes_text(grows[device] + beside)} on this file "
                f"system{why} and {bytes_text(free)} are free: make room{fewer}, or use --no-space-check"
            )


def _freed_by(step: Step) -> int:
    """Return the bytes that a step frees when it replaces its target."""
    try:
        status = os.stat(step.target)
    except FileNotFoundError:
        return 0
    return status.st_size if status.st_nlink == 1 else 0
