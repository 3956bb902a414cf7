"""Runs a plan: writes its shards, several at a time.

A `Runner` writes new shards elsewhere and never touches the sources; `replace_in_place.py` uses its threads
to replace the old shards. One shard is written by `packing/shard_writer.py`, and sent to a store by
`packing/object_outputs.py`.

The calling thread hands out the work and reads the index; other threads write.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from wdsfs.errors import CommitError, StaleShard
from wdsfs.packing.output_units import remove_attempts
from wdsfs.packing.pieces import CopiedRange
from wdsfs.packing.shard_writer import ShardWriter
from wdsfs.packing.source_layout import SourceLayout, layout
from wdsfs.packing.steps import COPY, LINK, Output, Plan, SourceShard, Step
from wdsfs.remote import shard_paths
from wdsfs.remote.shard_paths import is_remote
from wdsfs.storage.durable import Disk, make_directories
from wdsfs.storage.identity import Fingerprint
from wdsfs.tree.indexing import NotIndexed
from wdsfs.tree.shard_set import ShardSet

if TYPE_CHECKING:
    from wdsfs.cluster.engines import Workers
    from wdsfs.packing.cluster_run import ClusterRun
    from wdsfs.packing.object_outputs import ObjectOutputs

AHEAD = 2  # shards per thread that are prepared before a thread is free


class Elsewhere(NamedTuple):
    """The workers that write the shards, and where they find the upper."""

    workers: Workers
    upper: bytes


def _changed_since(path: bytes) -> CommitError:
    return CommitError(f"{os.fsdecode(path)} has changed since the commit was planned; start again")


class _Stopped(Exception):
    """Stops a writing thread after another one has failed or the user has interrupted the command."""


class Runner:
    """Writes the shards of a plan, `jobs` at a time.

    `on_bytes` is called with each number of bytes written, or sent to a store, in any thread. With `elsewhere`
    workers of a cluster write.
    """

    def __init__(
        self,
        lower: ShardSet,
        plan: Plan,
        files: Callable[[bytes], int],
        jobs: int = 1,
        disk: Disk | None = None,
        on_bytes: Callable[[int], None] = lambda _: None,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self.lower, self.plan, self.jobs = lower, plan, jobs
        self.disk = disk or Disk()
        self.writer = ShardWriter(plan.sources, files, self.disk, self._count)
        self._on_bytes = on_bytes
        self._elsewhere = elsewhere
        self._stop = threading.Event()

    @cached_property
    def cluster(self) -> ClusterRun | None:
        """What has the shards written elsewhere; None if they are written here."""
        if self._elsewhere is None:
            return None
        from wdsfs.packing.cluster_run import ClusterRun  # late: few commits need it

        return ClusterRun(*self._elsewhere, self.plan.sources, self.disk, self._on_bytes)

    @property
    def together(self) -> int:
        """How many shards are written at the same time."""
        return self.cluster.together if self.cluster else self.jobs

    @cached_property
    def objects(self) -> ObjectOutputs[Output]:
        from wdsfs.packing.object_outputs import ObjectOutputs  # late, as in `remote/shard_paths.py`

        return ObjectOutputs(self.writer, self._count)

    def _count(self, count: int) -> None:
        self._refuse_when_stopped()
        self._on_bytes(count)

    def _refuse_when_stopped(self) -> None:
        if self._stop.is_set():
            raise _Stopped

    def write(self) -> list[Step]:
        """Write new shards elsewhere; return the steps that were done now.

        Shards that an earlier, killed commit has finished are kept. Raises CommitError before anything is written
        if another file or object has one of the names.
        """
        left, taken = [], []
        remote = [path for step in self.plan.steps if is_remote(path := step.output.target)]
        if remote:
            self.objects.look(remote)
        for step in self.plan.steps:
            if not self._exists(step.output.target):
                left.append(step)
            elif not self._is_done(step):
                taken.append(step)
        if taken:
            names = ", ".join(os.fsdecode(step.output.target) for step in taken[:3])
            more = f" and {len(taken) - 3} more" if len(taken) > 3 else ""
            verbs = ("exists", "is") if len(taken) == 1 else ("exist", "are")
            text = f"{names}{more} {verbs[0]} already and {verbs[1]} something else: choose another --output"
            raise CommitError(text)
        files = [step.output.target for step in left if not is_remote(step.output.target)]
        for directory in sorted({os.path.dirname(target) for target in files}):
            make_directories(self.disk, directory)
        if remote:
            new = [step.output for step in left if is_remote(step.output.target)]
            self.objects.refuse_without_space(new, 0 if self.cluster else self.jobs)
        if self.cluster:
            for step in left:
                if step.action == LINK:
                    self._publish(step)
            self.cluster.each([step for step in left if step.action != LINK], self.prepare)
        else:
            self.each(left, self._publish)
        remove_attempts(path for step in self.plan.steps if not is_remote(path := step.output.target))
        return left

    def _exists(self, target: bytes) -> bool:
        return self.objects.exists(target) if is_remote(target) else os.path.lexists(target)

    def _is_done(self, step: Step) -> bool:
        if is_remote(step.output.target):
            return self.objects.is_done(step.output)
        if step.action == LINK and step.number is not None:
            return os.path.samefile(self.plan.sources[step.number].path, step.output.target)
        return self.writer.is_there(step.output)

    def _publish(self, step: Step) -> None:
        if is_remote(step.output.target):
            if not self._copied_there(step):
                self.objects.publish(step.output)
        elif step.action == LINK and step.number is not None:
            self._link(self.plan.sources[step.number], step.output.target)
        else:
            self.writer.publish(step.output)

    def _copied_there(self, step: Step) -> bool:
        """True if the store has copied a whole shard, of which nothing had to be fetched."""
        if step.action != COPY or step.number is None:
            return False
        source = self.plan.sources[step.number]
        if not is_remote(source.path):
            return False
        if shard_paths.look(source.path) != source.fingerprint:
            raise _changed_since(source.path)
        return self.objects.copied(step.output, source.path)

    def _link(self, source: SourceShard, target: bytes) -> None:
        if Fingerprint.at(source.path) != source.fingerprint:
            raise _changed_since(source.path)
        try:
            self.disk.link(os.path.realpath(source.path), target)
        except OSError as error:
            text = f"{os.fsdecode(target)}: cannot be a hard link of the shard ({error.strerror}); use --copy"
            raise CommitError(text) from None
        self.disk.sync_directory(os.path.dirname(target))

    def each(self, steps: Sequence[Step], work: Callable[[Step], None]) -> None:
        """Do the work for each step in threads: while the kernel copies, other threads run."""
        running: set[Future[None]] = set()
        with ThreadPoolExecutor(self.jobs, "commit") as threads:
            try:
                for step in steps:
                    self.prepare(step)
                    running.add(threads.submit(work, step))
                    if len(running) >= AHEAD * self.jobs:
                        running = self._settle(running)
                while running:
                    running = self._settle(running)
            except BaseException:
                self._stop.set()
                threads.shutdown(cancel_futures=True)
                raise

    def _settle(self, running: set[Future[None]]) -> set[Future[None]]:
        done, running = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            future.result()
        return running

    def prepare(self, step: Step) -> None:
        """Get the layouts of the sources of an output, to verify it. They are too large to keep all of them."""
        if step.action in (COPY, LINK):
            return
        numbers = {piece.shard for piece in step.output.pieces if isinstance(piece, CopiedRange)}
        step.output.layouts = {number: self._layout(number) for number in numbers}

    def _layout(self, number: int) -> SourceLayout:
        path = self.lower.shards[number].path
        try:
            return layout(number, path, self.lower.record(number))
        except NotIndexed:
            text = f"{os.fsdecode(path)} has changed since the commit was planned; start again"
            raise StaleShard(text) from None
