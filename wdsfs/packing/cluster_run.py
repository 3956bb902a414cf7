"""Carries a plan out on the workers of a cluster: each output shard is a unit of work.

A worker writes and verifies a shard under a name of its own (`packing/output_units.py`). This process, which holds
the overlay and the journal, publishes it: it sees that the file and the sources are what they should be, logs it
and renames it. So a plan can be finished after the death of any worker, and of this process, as without a cluster.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from wdsfs.cluster.engines import Workers
from wdsfs.cluster.far_side import SeenShard
from wdsfs.cluster.shard_units import seen_here
from wdsfs.cluster.spread import Job, spread
from wdsfs.errors import CommitError, ShardError, StaleShard
from wdsfs.packing.output_units import OutputUnit, write_file, write_object
from wdsfs.packing.pieces import CopiedRange
from wdsfs.packing.source_layout import SourceLayout
from wdsfs.packing.steps import Output, SourceShard, Step
from wdsfs.remote.shard_paths import is_remote, look, look_again
from wdsfs.storage.durable import Disk, named, temporary_of
from wdsfs.storage.identity import Fingerprint

_NO_NUMBERS = np.zeros(0, np.int64)


class Publication(NamedTuple):
    """What a file replaces, and what is called with the finished file before it gets its name."""

    replaces: os.stat_result | None = None
    before: Callable[[os.stat_result], None] = lambda _: None


class ObjectNote(NamedTuple):
    """Of an object of a commit in place: the file that notes what is sent by it, and what the object replaces."""

    log: bytes = b""
    commit: str = ""
    replaces: Fingerprint | None = None


class ClusterRun:
    """Writes outputs of a plan by `workers`, which find the upper at `upper`.

    `sources` are those of the plan; `prepare` gets the layouts of a step; `on_bytes` is called with the bytes of
    each finished shard.
    """

    def __init__(
        self,
        workers: Workers,
        upper: bytes,
        sources: dict[int, SourceShard],
        disk: Disk,
        on_bytes: Callable[[int], None],
    ) -> None:
        self.workers, self._upper, self._sources = workers, upper, sources
        self._disk, self._on_bytes = disk, on_bytes
        self._placeholders: dict[bytes, int] = {}  # by target: descriptors

    @property
    def together(self) -> int:
        """How many shards may be written at the same time."""
        return self.workers.engine.width() or self.workers.in_flight()

    def each(
        self,
        steps: Sequence[Step],
        prepare: Callable[[Step], None],
        publication: Callable[[Step], Publication] = lambda _: Publication(),
        note: Callable[[Step], ObjectNote] = lambda _: ObjectNote(),
    ) -> None:
        """Write the shards of these steps. Raises CommitError, ShardErrors, OSErrors, ExecutorUnusable."""

        def unit_of(step: Step) -> tuple[bool, OutputUnit]:
            prepare(step)
            output = step.output
            unit = OutputUnit(_slim(output), self._seen(output), self._upper)
            output.layouts = None
            if is_remote(output.target):
                return True, unit._replace(**note(step)._asdict())
            self._hold(output.target)
            return False, unit

        job = Job(write, unit_of, lambda step: os.fsdecode(step.output.target))
        try:
            for step, result in spread(self.workers, job, steps):
                if isinstance(result, ShardError):
                    raise result
                self._on_bytes(step.output.length)
                if is_remote(step.output.target):
                    look_again(step.output.target)  # what this machine knew of it is old
                    self._on_bytes(step.output.length)  # which were sent
                else:
                    self._publish(step.output, result, publication(step))
        finally:
            for target in list(self._placeholders):
                with contextlib.suppress(OSError):
                    self._release(target)

    def _seen(self, output: Output) -> dict[int, SeenShard]:
        numbers = {piece.shard for piece in output.pieces if isinstance(piece, CopiedRange)}
        return {number: self._unchanged(number) for number in numbers}

    def _unchanged(self, number: int) -> SeenShard:
        """A source, as it was when the commit was planned, and is. Raises StaleShard."""
        source = self._sources[number]
        seen = seen_here(source.path)
        if seen.fingerprint != source.fingerprint:
            raise _changed(source.path)
        return seen

    def _hold(self, target: bytes) -> None:
        """Make the placeholder of a shard, which also keeps other commits away from it."""
        placeholder = temporary_of(target)
        with named(target):
            fd = self._disk.open_temporary(placeholder)
            self._placeholders[target] = fd
            self._remove_attempts(placeholder)

    def _release(self, target: bytes) -> None:
        """Remove the placeholder of a shard and the files of attempts that were given up."""
        fd = self._placeholders.pop(target)
        try:
            self._disk.remove(temporary_of(target))
            self._remove_attempts(temporary_of(target))
        finally:
            os.close(fd)

    def _remove_attempts(self, placeholder: bytes) -> None:
        for path in glob.glob(glob.escape(placeholder) + b"." + b"[0-9a-f]" * 8):
            with contextlib.suppress(FileNotFoundError):
                self._disk.remove(path)

    def _publish(self, output: Output, path: bytes, publication: Publication) -> None:
        """Give a file that a worker has written its name. Raises CommitError, StaleShard, OSErrors."""
        replaces, before = publication
        with named(output.target):
            fd = self._open(output, path)
            try:
                if replaces is not None:
                    self._disk.set_owner(fd, replaces)
                else:
                    self._disk.set_owner(fd, os.fstat(self._placeholders[output.target]))
                self._disk.sync(fd)
                for piece in output.pieces:
                    if isinstance(piece, CopiedRange):
                        source = self._sources[piece.shard]
                        if not is_remote(source.path) and look(source.path) != source.fingerprint:
                            raise _changed(source.path)
                before(os.fstat(fd))
                if replaces is None and os.path.lexists(output.target):
                    raise CommitError(f"{os.fsdecode(output.target)} is there already")
                self._disk.rename(path, output.target)
            finally:
                os.close(fd)
            self._release(output.target)
            self._disk.sync_directory(os.path.dirname(output.target))

    def _open(self, output: Output, path: bytes) -> int:
        target = os.fsdecode(output.target)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise CommitError(
                f"{target}: a worker has written it as {os.fsdecode(path)}, which this machine does not see: the "
                "new shards have to be on a file system that all machines share"
            ) from None
        size = os.fstat(fd).st_size
        if size != output.length:
            os.close(fd)
            text = f"a worker has written {output.length:,} bytes, and this machine sees {size:,}"
            raise CommitError(f"{target}: {text}; repeat the command")
        return fd


def write(task: tuple[bool, OutputUnit]) -> bytes:
    """On a worker: write a shard as an object, or as a file; returns the name of the file, or nothing."""
    is_object, unit = task
    return write_object(unit) if is_object else write_file(unit)


def _changed(path: bytes) -> StaleShard:
    return StaleShard(f"{os.fsdecode(path)} has changed since the commit was planned; start again")


def _slim(output: Output) -> Output:
    """The output with as much of the layouts of its sources as verifying it takes."""
    if output.layouts is None:
        return output
    layouts: dict[int, SourceLayout] = {
        number: dataclasses.replace(one, members=_NO_NUMBERS, entries=_NO_NUMBERS, _place=None)
        for number, one in output.layouts.items()
    }
    return dataclasses.replace(output, layouts=layouts)
