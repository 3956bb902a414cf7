"""Writes an index for DALI of each shard of a set, and knows which indexes of other tools lie beside shards.

`dali` decides the content of an index. Each file is written under a hidden name, synced and renamed, so a reader
sees the whole old one or the whole new one. An export that was stopped is simply repeated. The shards are never
touched.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from wdsfs.cluster_workers import Workers
from wdsfs.durable import Disk, make_directories, new_file
from wdsfs.errors import ExportError, ShardError
from wdsfs.index import process_pool
from wdsfs.index.record import Record
from wdsfs.interop import dali, energon
from wdsfs.shards import Shard
from wdsfs.tree.indexing import indexed
from wdsfs.tree.shard_set import ShardSet

AHEAD_PER_JOB = 8  # shards per process whose results are in memory, to be written in the order of the set


@dataclass(slots=True)
class Report:
    """The result of an export: paths written, in order; warnings; and failures with their reasons."""

    written: list[bytes] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def export(
    lower: ShardSet,
    directory: bytes | None,
    jobs: int = 1,
    on_shard: Callable[[], None] = lambda: None,
    workers: Workers | None = None,
    disk: Disk | None = None,
) -> Report:
    """Write the index of each shard of `lower` into `directory`, or with None beside the shard.

    `on_shard` is called for each finished shard, and may raise an exception to stop. With `workers` the workers of
    a cluster make the indexes, and this process writes the files. `failures` of the report are the shards without
    an index. Raises ExportError if nothing can be written.
    """
    writer = _Writer(disk or Disk())
    try:
        for shard, index in _indexes(lower, jobs, workers):
            writer.add(shard, index, None if directory is None else os.path.abspath(directory))
            on_shard()
        writer.finish()
    except OSError as error:
        where = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
        raise ExportError(f"{where}{error.strerror}; mend that, then repeat the command") from None
    return writer.report


class _Writer:
    """Writes index files, and reports on them."""

    def __init__(self, disk: Disk) -> None:
        self.report = Report()
        self._disk = disk
        self._directories: set[bytes] = set()

    def add(self, shard: Shard, index: bytes | ExportError | ShardError, directory: bytes | None) -> None:
        """Write the index of a shard; an older one of a shard that cannot have one is removed. Raises OSError."""
        path = dali.dali_path(shard.path) if directory is None else os.path.join(directory, shard.name + b".idx")
        if isinstance(index, ExportError | ShardError):
            self.report.failures.append(f"{index}{self._remove_older(path)}")
        elif index:
            self._write(path, index)
        else:
            text = "has no samples, and DALI refuses such a shard: it is left out"
            self.report.warnings.append(f"{os.fsdecode(shard.path)}: {text}{self._remove_older(path)}")

    def finish(self) -> None:
        """Sync the directories of the new files. Raises OSError."""
        for directory in sorted(self._directories):
            self._disk.sync_directory(directory)

    def _write(self, path: bytes, content: bytes) -> None:
        """Write a file, whole, in the place of the one that is there, with its owner and mode."""
        make_directories(self._disk, os.path.dirname(path))
        with new_file(self._disk, path) as fd:
            self._disk.write(fd, content)
            with contextlib.suppress(FileNotFoundError):
                older = os.lstat(path)  # a link is replaced, its target is not touched
                if stat.S_ISREG(older.st_mode):
                    self._disk.set_owner(fd, older)
            self._disk.sync(fd)
        self._directories.add(os.path.dirname(path))
        self.report.written.append(path)

    def _remove_older(self, path: bytes) -> str:
        """Remove an index of the shard as it was before; returns the text to add to a message."""
        if not os.path.lexists(path):
            return ""
        self._disk.remove(path)
        return f"; the older {os.fsdecode(path)} is removed"


# --- the indexes, by several processes -----------------------------------------------------------------------


class _Unit(NamedTuple):
    """The task of a worker: the path and record of a shard, and which of its members are shown (None: all)."""

    path: bytes
    record: bytes
    shown: bytes | None


def _indexes(
    lower: ShardSet, jobs: int, workers: Workers | None
) -> Iterator[tuple[Shard, bytes | ExportError | ShardError]]:
    """Yield each shard with its index, in the order of the set; empty for a shard without samples."""
    shards = lower.shards
    numbers = {shard.path: number for number, shard in enumerate(shards)}

    def unit_of(shard: Shard) -> _Unit | ExportError:
        return _unit_of(lower, numbers[shard.path])

    step = workers.in_flight() if workers is not None else 1 if jobs == 1 else jobs * AHEAD_PER_JOB
    for begin in range(0, len(shards), step):
        some = shards[begin : begin + step]
        answers = dict(process_pool.each(_index_of, some, jobs, workers, unit_of))
        yield from ((shard, answers.pop(shard)) for shard in some)


def _unit_of(lower: ShardSet, number: int) -> _Unit | ExportError:
    """Return the task for a shard; an ExportError is returned, not raised. Raises ShardErrors."""
    if lower.is_compressed(number):
        return ExportError(
            f"{lower.path_text(number)}: is compressed, and other tools read plain tars only; unpack it"
        )
    record, plain = indexed(lower.record_and_plain, number)
    return _Unit(lower.shards[number].path, plain.packed(), None if record is plain else shown_of(record, plain))


def shown_of(record: Record, plain: Record) -> bytes:
    """Return for each member of a shard 1 if a view that only chooses samples shows it, else 0."""
    shown = bytearray(plain.members)
    for member in range(record.members):
        shown[record.address(member)[1]] = 1
    return bytes(shown)


def _index_of(unit: _Unit | ExportError) -> bytes | ExportError:
    """Return the index of a shard; an error is returned, not raised."""
    if isinstance(unit, ExportError):
        return unit
    try:
        return dali.dali_index(Record(unit.record), unit.shown)
    except ExportError as error:
        return ExportError(f"{os.fsdecode(unit.path)}: {error}")


# --- indexes that lie beside shards --------------------------------------------------------------------------


def left_behind(shards: Iterable[bytes], *, renewed: bool = False) -> dict[bytes, str]:
    """Return the indexes that still describe these shards as they were before they were replaced.

    Each has the command that writes it again. Those for DALI are not among them if they were `renewed`.
    """
    left: dict[bytes, str] = {}
    for path in shards:
        folder = os.path.dirname(path)
        for place, command in (
            (dali.dali_path(path), "" if renewed else "wdsfs export"),
            (energon.energon_path(path), "energon prepare"),
            (energon.database_path(folder), "energon prepare"),
            (os.path.join(folder, b"shardindex.json"), "widsindex create"),
            (os.path.join(folder, b"set.wdsidx"), "wdsfs index --update"),
        ):
            if command and os.path.exists(place):
                left[place] = command
    return left
