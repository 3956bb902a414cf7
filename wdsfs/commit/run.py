"""Runs a plan: writes its shards, several at a time.

A `Runner` writes new shards elsewhere and never touches the sources; `commit/replace_in_place.py` uses its threads
to replace the old shards. One shard is written by `commit/shard_writer.py`.

The calling thread hands out the work and reads the index; other threads write.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from wdsfs.commit.pieces import CopiedRange
from wdsfs.commit.shard_writer import ShardWriter
from wdsfs.commit.source_layout import SourceLayout, layout
from wdsfs.commit.steps import COPY, LINK, Plan, SourceShard, Step
from wdsfs.dataset.indexing import NotIndexed
from wdsfs.dataset.shard_set import ShardSet
from wdsfs.errors import CommitError, StaleShard
from wdsfs.overlay.upper_format import OPEN_DIRECTORY
from wdsfs.storage.durable import Disk
from wdsfs.storage.identity import look

AHEAD = 2  # shards per thread that are made ready before one is free


class Files:
    """Opens files of an upper by their paths below it."""

    def __init__(self, directory: int) -> None:
        self.directory = directory

    def __call__(self, path: bytes) -> int:
        """A descriptor of a regular file. Raises OSErrors."""
        fd = os.open(".", OPEN_DIRECTORY, dir_fd=self.directory)
        *way, name = path.split(b"/")
        try:
            for step in way:  # one by one: a path may be longer than the kernel takes
                inner = os.open(step, OPEN_DIRECTORY, dir_fd=fd)
                os.close(fd)
                fd = inner
            return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=fd)
        finally:
            os.close(fd)


class _Stopped(Exception):
    """Ends a thread that is writing, after another one has failed or the user has interrupted the command."""


class Runner:
    """Writes the shards of a plan, `jobs` at a time.

    `on_bytes` is called with each number of bytes written, in any thread.
    """

    def __init__(
        self,
        lower: ShardSet,
        plan: Plan,
        files: Callable[[bytes], int],
        jobs: int = 1,
        disk: Disk | None = None,
        on_bytes: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.lower, self.plan, self.jobs = lower, plan, jobs
        self.disk = disk or Disk()
        self.writer = ShardWriter(plan.sources, files, self.disk, self._count)
        self._on_bytes = on_bytes
        self._stop = threading.Event()

    def _count(self, count: int) -> None:
        if self._stop.is_set():
            raise _Stopped
        self._on_bytes(count)

    def write(self) -> list[Step]:
        """Write new shards elsewhere; returns the steps that were done now.

        Shards that an earlier, killed commit has finished are kept. Raises CommitError before anything is written
        if another file has one of the names.
        """
        left, taken = [], []
        for step in self.plan.steps:
            if not os.path.lexists(step.output.target):
                left.append(step)
            elif not self._is_done(step):
                taken.append(step)
        if taken:
            names = ", ".join(os.fsdecode(step.output.target) for step in taken[:3])
            more = f" and {len(taken) - 3} more" if len(taken) > 3 else ""
            verbs = ("exists", "is") if len(taken) == 1 else ("exist", "are")
            text = f"{names}{more} {verbs[0]} already and {verbs[1]} something else: choose another --output"
            raise CommitError(text)
        for directory in sorted({os.path.dirname(step.output.target) for step in left}):
            self._make_directory(directory)
        self.each(left, self._publish)
        return left

    def _is_done(self, step: Step) -> bool:
        if step.action == LINK and step.number is not None:
            return os.path.samefile(self.plan.sources[step.number].path, step.output.target)
        return self.writer.is_there(step.output)

    def _make_directory(self, path: bytes) -> None:
        if not os.path.isdir(path):
            parent = os.path.dirname(path)
            self._make_directory(parent)
            self.disk.make_directory(path)
            self.disk.sync_directory(parent)

    def _publish(self, step: Step) -> None:
        if step.action == LINK and step.number is not None:
            self._link(self.plan.sources[step.number], step.output.target)
        else:
            self.writer.publish(step.output)

    def _link(self, source: SourceShard, target: bytes) -> None:
        if look(source.path) != source.fingerprint:
            raise CommitError(f"{os.fsdecode(source.path)} has changed since the commit was planned; start again")
        try:
            self.disk.link(os.path.realpath(source.path), target)
        except OSError as error:
            text = f"{os.fsdecode(target)}: cannot be a hard link of the shard ({error.strerror}); use --copy"
            raise CommitError(text) from None
        self.disk.sync_directory(os.path.dirname(target))

    def each(self, steps: Sequence[Step], work: Callable[[Step], None]) -> None:
        """Do the work for each step in threads: the kernel copies, and other threads run meanwhile."""
        running: set[Future[None]] = set()
        with ThreadPoolExecutor(self.jobs, "commit") as threads:
            try:
                for step in steps:
                    self._prepare(step)
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

    def _prepare(self, step: Step) -> None:
        """Measure the sources of an output, to verify it. Layouts are too large to be kept since the planning."""
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
