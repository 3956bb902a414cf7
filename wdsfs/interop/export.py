"""Exports: the indexes of other tools, written for the shards of a set where those tools look for them.

What is in them is decided in `dali`, `wids` and `energon`. Each file is written under a hidden name, synced and
renamed, so whoever reads meets the old one or the new one, whole; an export that was stopped is simply repeated.

Reads shards and the index, writes below one directory; no FUSE. The sources are never touched.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import stat
import uuid
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from wdsfs import __version__
from wdsfs.dataset.shard_set import ShardSet
from wdsfs.errors import ExportError, ShardError, StaleShard, UnreadableShard, several
from wdsfs.index import hints, process_pool
from wdsfs.index.record import Record
from wdsfs.interop import dali, energon, wids
from wdsfs.storage.durable import Disk, new_file, temporary_of
from wdsfs.storage.identity import fingerprint_of
from wdsfs.storage.source import open_shard

DALI, ENERGON, WIDS = FORMATS = ("dali", "energon", "wids")
WIDS_NAME = b"shardindex.json"  # as `widsindex create` calls it
Answer = TypeVar("Answer")
MD5_BYTES = 1 << 20  # bytes of a shard that are read at a time


@dataclass(slots=True)
class Report:
    """What an export has written (paths, in order), what to know of it, and what could not be written, and why."""

    written: list[bytes] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def warn(self, path: bytes, text: str) -> None:
        self.warnings.append(f"{os.fsdecode(path)}: {text}")


class Export:
    """Writes indexes of the shards of `lower`; `report` says what became of it. To be closed by `finish`.

    `on_shard` is called for each shard that is done; it may raise an exception to stop.
    """

    def __init__(
        self, lower: ShardSet, jobs: int, disk: Disk | None = None, on_shard: Callable[[], None] = lambda: None
    ) -> None:
        self.lower, self.jobs, self.on_shard = lower, jobs, on_shard
        self.report = Report()
        self._disk = disk or Disk()
        self._directories: set[bytes] = set()

    def write(self, kind: str, directory: bytes | None, md5: bool = False) -> None:
        """Write the index of format `kind` into `directory`; None: DALI's beside each shard, others above all.

        Raises ExportError and ShardErrors for what stands in the way of an index of the whole set. Where each
        shard has an index of its own, those that cannot have one are in `report.failures`.
        """
        root = os.path.abspath(directory) if directory is not None else None
        if kind == DALI:
            self._dali(root)
        elif kind == WIDS:
            self._wids(root or self._common(), md5)
        else:
            self._energon(root or energon_root(self._common()))

    def finish(self) -> None:
        """See to it that the new names are on the disk, too."""
        for directory in sorted(self._directories):
            self._disk.sync_directory(directory)

    def _common(self) -> bytes:
        return os.path.commonpath([os.path.dirname(one.path) for one in self.lower.shards])

    def _record(self, number: int) -> Record:
        """The record of a shard whose bytes are those of a tar. Raises ExportError, ShardErrors."""
        self._refuse_compressed(number)
        return self.lower.with_index(lambda: self.lower.record(number))

    def _refuse_compressed(self, number: int) -> None:
        if self.lower.is_compressed(number):
            raise ExportError(
                f"{self.lower.path_text(number)}: is compressed, and the other tools read plain tars only"
            )

    # --- files

    def _put(self, path: bytes, pieces: Iterable[bytes]) -> None:
        """Write a file, whole, in the place of the one that is there. Raises what `pieces` raise, OSError."""
        with self._prepared(path) as fd:
            for piece in pieces:
                self._disk.write(fd, piece)

    @contextlib.contextmanager
    def _prepared(self, path: bytes) -> Iterator[int]:
        """A descriptor of an empty file, which replaces `path` when the block ends, with its owner and mode."""
        self._make_directory(os.path.dirname(path))
        with new_file(self._disk, path) as fd:
            yield fd
            with contextlib.suppress(FileNotFoundError):
                older = os.lstat(path)  # a link gives way, and what it leads to stays as it is
                if stat.S_ISREG(older.st_mode):
                    self._disk.set_owner(fd, older)
            self._disk.sync(fd)
        self._directories.add(os.path.dirname(path))
        self.report.written.append(path)

    def _make_directory(self, path: bytes) -> None:
        if not os.path.isdir(path):
            self._make_directory(os.path.dirname(path))
            self._disk.make_directory(path)
            self._directories.add(os.path.dirname(path))

    def _remove_older(self, path: bytes) -> str:
        """Remove an index that tells of another shard than the one that is there; returns what to say of it."""
        if not os.path.lexists(path):
            return ""
        self._disk.remove(path)
        return f"; the older {os.fsdecode(path)} is removed"

    # --- DALI

    def _dali(self, directory: bytes | None) -> None:
        for number, one in enumerate(self.lower.shards):
            path = hints.dali_path(one.path) if directory is None else os.path.join(directory, one.name + b".idx")
            try:
                record = self._record(number)
                if record.samples or record.problems:
                    self._put(path, _telling(one.path, dali.dali_index(record)))
                else:
                    text = "has no samples, and DALI takes no shard without: it is left out"
                    self.report.warn(one.path, text + self._remove_older(path))
            except (ExportError, ShardError) as error:
                self.report.failures.append(f"{error}{self._remove_older(path)}")
            self.on_shard()

    # --- wids

    def _wids(self, directory: bytes, md5: bool) -> None:
        shards = self.lower.shards
        sums: dict[bytes, str] = {}
        for function in (_wids_misreading, *([_md5] if md5 else [])):
            for one, found in process_pool.each(function, shards, self.jobs):
                if isinstance(found, ShardError):
                    raise found
                if function is _md5:
                    assert found is not None
                    sums[one.path] = found
                elif found is not None:
                    self.report.warn(one.path, f"wids reads it otherwise: {found}")
        rows = []
        for number, one in enumerate(shards):
            record = self._record(number)
            try:
                dali.refuse_damaged(record)
                dali.refuse_irregular(record, "wids")
            except ExportError as error:
                raise ExportError(f"{os.fsdecode(one.path)}: {error}") from None
            url = os.fsdecode(below(directory, one.path) or one.path)
            rows.append(wids.WidsShard(url, record.samples, record.fingerprint[0], sums.get(one.path)))
            self.on_shard()
        self._put(os.path.join(directory, WIDS_NAME), [wids.wids_index(rows)])

    # --- Energon

    def _energon(self, root: bytes) -> None:
        names = self._energon_names(root)
        folder = os.path.join(root, energon.FOLDER)
        before = _known_shards(folder)
        lost = [
            name for name in before if name not in names and os.path.exists(os.path.join(root, os.fsencode(name)))
        ]
        if lost:
            raise ExportError(
                f"{os.fsdecode(folder)} has {several(lost)}, too: name all shards of the data set, "
                "or remove its .info.json to begin anew"
            )
        counts = self._energon_index(root, names)
        self._put(os.path.join(folder, b".info.json"), [energon.info_text(counts, f"wdsfs {__version__}")])
        split = os.path.join(folder, b"split.yaml")
        kept = [name for name in (split, os.path.join(folder, b"split.json")) if os.path.exists(name)]
        if not kept:
            self._put(split, [energon.split_text(list(counts))])
        elif set(before) != set(counts):
            changed = several(sorted(set(before) ^ set(counts)))
            self.report.warn(kept[0], f"is kept; the set of shards is another now ({changed}): edit it")
        dataset = os.path.join(folder, b"dataset.yaml")
        if not os.path.exists(dataset):
            self._put(dataset, [energon.DATASET_TEXT])
        # Last: with it whoever keeps something of the index hears that there is a new one.
        self._put(os.path.join(folder, b"index.uuid"), [str(uuid.uuid4()).encode()])

    def _energon_names(self, root: bytes) -> dict[str, int]:
        """The shards by their paths below the root, with their numbers. Raises ExportError."""
        found: dict[str, int] = {}
        for number, one in enumerate(self.lower.shards):
            path = below(root, one.path)
            if path is None:
                raise ExportError(
                    f"{os.fsdecode(one.path)} is not below {os.fsdecode(root)}: Energon's indexes lie beside the "
                    "shards, so --output is the directory that has them all"
                )
            if not path.endswith(b".tar"):
                raise ExportError(f"{os.fsdecode(one.path)}: Energon reads shards called *.tar only")
            try:
                found[path.decode()] = number
            except UnicodeDecodeError:
                raise ExportError(
                    f"{os.fsdecode(one.path)}: the name is no UTF-8, and Energon takes no other"
                ) from None
        return found

    def _energon_index(self, root: bytes, names: dict[str, int]) -> dict[str, int]:
        """Write `index.sqlite` and the `.tar.idx` files; returns the samples of each shard that has any."""
        counts: dict[str, int] = {}
        path = os.path.join(root, energon.FOLDER, b"index.sqlite")
        with self._prepared(path):
            database = energon.Database(temporary_of(path))
            try:
                for name, number in names.items():
                    borders = self._energon_shard(database, number, counts)
                    own = hints.energon_path(os.path.join(root, os.fsencode(name)))
                    if borders:
                        counts[name] = len(borders) - 1
                        self._compare_samples(number, counts[name])
                        self._put(own, [borders.tobytes()])
                    else:
                        text = "has no samples, and Energon takes no shard without: it is left out"
                        self.report.warn(self.lower.shards[number].path, text + self._remove_older(own))
                    self.on_shard()
                if not counts:
                    raise ExportError("the set has no samples, and Energon takes no data set without")
                database.finish()
            except sqlite3.OperationalError as error:  # a full disk, for example
                raise ExportError(f"{os.fsdecode(path)}: {error}") from None
            finally:
                database.close()
        return counts

    def _compare_samples(self, number: int, count: int) -> None:
        ours = self._record(number).samples
        if count != ours:
            text = f"{count} samples to Energon, which takes hidden files for some, {ours} to others"
            self.report.warn(self.lower.shards[number].path, text)

    def _noticed(self, path: bytes, found: Iterator[energon.EnergonSample]) -> Iterator[energon.EnergonSample]:
        """The same samples, with a warning of the first one of which Energon shows less than there is."""
        told = False
        for sample in found:
            if not told and len({part.name for part in sample.parts}) < len(sample.parts):
                text = f"{sample.key} has an extension twice, of which Energon shows the last"
                self.report.warn(path, text)
                told = True
            yield sample

    def _energon_shard(self, database: energon.Database, number: int, earlier: Collection[str]) -> array[int]:
        path, record = self.lower.shards[number].path, self._record(number)
        fd = open_shard(path)
        try:
            dali.refuse_irregular(record, "Energon")
            before = fingerprint_of(os.fstat(fd))
            borders = database.add(len(earlier), self._noticed(path, energon.samples(fd)))
            if fingerprint_of(os.fstat(fd)) != before:
                raise StaleShard(f"{os.fsdecode(path)} has changed while it was read; start again")
            return borders
        except energon.DuplicateKey as error:
            whose = "itself" if error.first == len(earlier) else list(earlier)[error.first]
            raise ExportError(
                f"{os.fsdecode(path)}: the key {error.key!r} is also in {whose}: Energon takes a key once only"
            ) from None
        except ExportError as error:
            raise ExportError(f"{os.fsdecode(path)}: {error}") from None
        except OSError as error:
            raise UnreadableShard(f"{os.fsdecode(path)}: {error.strerror}") from None
        finally:
            os.close(fd)


# --- places ------------------------------------------------------------------------------------------------


def below(directory: bytes, path: bytes) -> bytes | None:
    """The path from `directory` on; None for what is not below it. Links are followed only if it needs that."""
    for one, other in ((directory, path), (os.path.realpath(directory), os.path.realpath(path))):
        if other.startswith(one.rstrip(b"/") + b"/"):
            return other[len(one.rstrip(b"/")) + 1 :]
    return None


def energon_root(directory: bytes) -> bytes:
    """The data set that `directory` belongs to: the nearest directory, itself or above, that has metadata."""
    place = directory
    while not os.path.isdir(os.path.join(place, energon.FOLDER)):
        if place == os.path.dirname(place):
            return directory
        place = os.path.dirname(place)
    return place


def left_behind(shards: Iterable[bytes], kinds: Collection[str]) -> list[bytes]:
    """Indexes of other kinds than these that tell of what was there before these shards were replaced."""
    found: dict[bytes, None] = {}
    for path in shards:
        folder = os.path.join(energon_root(os.path.dirname(path)), energon.FOLDER)
        places = {
            DALI: [hints.dali_path(path)],
            ENERGON: [hints.energon_path(path), os.path.join(folder, b"index.sqlite")],
            WIDS: [os.path.join(os.path.dirname(path), WIDS_NAME)],
        }
        for kind, paths in places.items():
            if kind not in kinds:
                found.update(dict.fromkeys(filter(os.path.exists, paths)))
    return list(found)


def _known_shards(folder: bytes) -> list[str]:
    """The shards of the metadata that is there. Raises ExportError."""
    path = os.path.join(folder, b".info.json")
    try:
        with open(path, "rb") as file:
            return list(json.load(file)["shard_counts"])
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError) as error:
        raise ExportError(f"{os.fsdecode(path)} is no metadata of Energon ({error}): remove it") from None


def _telling(path: bytes, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same pieces; what is wrong with them is told with the path of the shard."""
    try:
        yield from pieces
    except ExportError as error:
        raise ExportError(f"{os.fsdecode(path)}: {error}") from None


# --- what is asked of a shard, in any process --------------------------------------------------------------


def _wids_misreading(path: bytes) -> str | None:
    return _of_file(path, wids.wids_misreading)


def _md5(path: bytes) -> str | None:
    return _of_file(path, _md5_of)


def _md5_of(fd: int) -> str:
    found, position = hashlib.md5(usedforsecurity=False), 0
    while data := os.pread(fd, MD5_BYTES, position):
        found.update(data)
        position += len(data)
    return found.hexdigest()


def _of_file(path: bytes, function: Callable[[int], Answer]) -> Answer:
    """Raises MissingShard, UnreadableShard."""
    fd = open_shard(path)
    try:
        return function(fd)
    except OSError as error:
        raise UnreadableShard(f"{os.fsdecode(path)}: {error.strerror}") from None
    finally:
        os.close(fd)
