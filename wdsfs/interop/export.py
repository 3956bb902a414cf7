"""Writes the indexes of other tools, and our portable one, of a set to where the tools look for them.

Their content is decided in `dali`, `wids`, `energon` and `index/portable_writer.py`. Each file is written under a
hidden name, synced and renamed, so a reader sees the old one or the new one, whole; an export that was stopped is
simply repeated. The shards are never touched.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import pickle
import sqlite3
import stat
import uuid
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from wdsfs import __version__
from wdsfs.door import urls
from wdsfs.door.urls import is_remote
from wdsfs.errors import MALFORMED, ExportError, ShardError, StaleShard, UnreadableShard, and_others, several
from wdsfs.executors import Workers
from wdsfs.index import process_pool, record_of_file
from wdsfs.index.portable_writer import PortableWriter
from wdsfs.index.record import Record
from wdsfs.interop import dali, energon, wids
from wdsfs.remote import shard_paths
from wdsfs.remote.shard_paths import OpenShard, fingerprint_of, open_shard
from wdsfs.shards import Shard
from wdsfs.storage import source
from wdsfs.storage.durable import Disk, make_directories, new_file, temporary_of
from wdsfs.tree.indexing import indexed
from wdsfs.tree.shard_set import ShardSet

DALI, ENERGON, WIDS, WDSIDX = FORMATS = ("dali", "energon", "wids", "wdsidx")
WDSIDX_NAME = b"set.wdsidx"
WIDS_NAME = b"shardindex.json"  # as `widsindex create` calls it
Answer = TypeVar("Answer")
AHEAD = 8  # shards per process whose results are in memory, to be written in the order of the set
MD5_BYTES = 1 << 20  # bytes of a shard that are read at a time


@dataclass(slots=True)
class Report:
    """The result of an export: paths written, in order; warnings; and failures with their reasons."""

    written: list[bytes] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def warn(self, path: bytes, text: str) -> None:
        """Add a warning about a path."""
        self.warnings.append(f"{os.fsdecode(path)}: {text}")


def export(
    lower: ShardSet,
    kinds: Iterable[str],
    directory: bytes | None,
    jobs: int = 1,
    on_shard: Callable[[], None] = lambda: None,
    workers: Workers | None = None,
    md5: bool = False,
) -> Report:
    """Write the indexes of these formats; see `Export.write`. Raises ExportError, ShardErrors."""
    writer = Export(lower, jobs, on_shard=on_shard, workers=workers)
    try:
        for kind in dict.fromkeys(kinds):
            writer.write(kind, directory, md5)
        writer.finish()
    except OSError as error:
        where = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
        raise ExportError(f"{where}{error.strerror}; mend that, then repeat the command") from None
    return writer.report


class Export:
    """Writes indexes of the shards of `lower`; `report` has the result. Ends with `finish`.

    `on_shard` is called for each shard that is done; it may raise an exception to stop. Shards are read by workers
    of a cluster if `workers` are given; the files are written here.
    """

    def __init__(
        self,
        lower: ShardSet,
        jobs: int,
        disk: Disk | None = None,
        on_shard: Callable[[], None] = lambda: None,
        workers: Workers | None = None,
    ) -> None:
        self.lower, self.jobs, self.on_shard, self.workers = lower, jobs, on_shard, workers
        self.report = Report()
        self._disk = disk or Disk()
        self._directories: set[bytes] = set()

    def write(self, kind: str, directory: bytes | None, md5: bool = False) -> None:
        """Write the index of format `kind` into `directory`; None: DALI's beside each shard, others above all.

        Raises ExportError and ShardErrors if an index of the whole set is impossible. In a format with an index
        for each shard, `report.failures` has the shards without one.
        """
        root = os.path.abspath(directory) if directory is not None else None
        if root is None:
            self._refuse_remote("no index is written beside a shard in a store; name a directory with --output")
        if kind == DALI:
            self._dali(root)
        elif kind == WIDS:
            self._wids(root or self._common(), md5)
        elif kind == WDSIDX:
            self._wdsidx(root or self._common())
        else:
            self._energon(root or energon_root(self._common()))

    def finish(self) -> None:
        """Sync the directories of the new files."""
        for directory in sorted(self._directories):
            self._disk.sync_directory(directory)

    def _refuse_remote(self, text: str) -> None:
        """Raise ExportError for a set with remote shards."""
        for shard in self.lower.shards:
            if is_remote(shard.path):
                raise ExportError(f"{os.fsdecode(shard.path)}: {text}")

    def _common(self) -> bytes:
        return os.path.commonpath([os.path.dirname(shard.path) for shard in self.lower.shards])

    def _record(self, number: int) -> Record:
        """Return the record of a shard whose bytes are those of a tar. Raises ExportError, ShardErrors."""
        self._refuse_compressed(number)
        return indexed(self.lower.record, number)

    def _refuse_compressed(self, number: int) -> None:
        if self.lower.is_compressed(number):
            raise ExportError(
                f"{self.lower.path_text(number)}: is compressed, and other tools read plain tars only; unpack it"
            )

    # --- files

    def _put(self, path: bytes, pieces: Iterable[bytes]) -> None:
        """Write a file, whole, in the place of the one that is there. Raises what `pieces` raise, OSError."""
        with self._prepared(path) as fd:
            for piece in pieces:
                self._disk.write(fd, piece)

    @contextlib.contextmanager
    def _prepared(self, path: bytes) -> Iterator[int]:
        """Open an empty file, which replaces `path` when the block ends, with its owner and mode."""
        make_directories(self._disk, os.path.dirname(path))
        with new_file(self._disk, path) as fd:
            yield fd
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

    # --- DALI

    def _dali(self, directory: bytes | None) -> None:
        for shard, index in self._dali_indexes():
            path = (
                dali.dali_path(shard.path) if directory is None else os.path.join(directory, shard.name + b".idx")
            )
            if isinstance(index, ExportError | ShardError):
                self.report.failures.append(f"{index}{self._remove_older(path)}")
            elif index:
                self._put(path, [index])
            else:
                text = "has no samples, and DALI refuses such a shard: it is left out"
                self.report.warn(shard.path, text + self._remove_older(path))
            self.on_shard()

    def _dali_indexes(self) -> Iterator[tuple[Shard, bytes | ExportError | ShardError]]:
        """Return the index of each shard, in order; empty for a shard without samples."""
        numbers = {shard.path: number for number, shard in enumerate(self.lower.shards)}

        def packed(shard: Shard) -> _DaliUnit | ExportError:
            number = numbers[shard.path]
            try:
                self._refuse_compressed(number)
                record, plain = indexed(self.lower.record_and_plain, number)
                return _DaliUnit(shard.path, plain.packed(), None if record is plain else shown_of(record, plain))
            except ExportError as error:
                return error

        return self._in_order(_dali_of, packed)

    def _in_order(
        self, function: Callable[[Any], Answer], argument: Callable[[Shard], Any]
    ) -> Iterator[tuple[Shard, Answer | ShardError]]:
        """Yield each shard with the result of `function`, in the order of the set."""
        shards = self.lower.shards
        step = 1 if self.jobs == 1 else self.jobs * AHEAD
        if self.workers is not None:
            step = self.workers.in_flight()
        for begin in range(0, len(shards), step):
            some = shards[begin : begin + step]
            answers = dict(process_pool.each(function, some, self.jobs, self.workers, argument))
            yield from ((shard, answers.pop(shard)) for shard in some)

    # --- wids

    def _wids(self, directory: bytes, md5: bool) -> None:
        shards = self.lower.shards
        self._refuse_unreachable([shard.path for shard in shards if is_remote(shard.path)])
        sums: dict[bytes, str] = {}
        together = process_pool.together(shards, self.workers)
        misreading = functools.partial(_wids_misreading, together=together)
        functions: list[Callable[[bytes], str | None]] = [misreading, *([_md5] if md5 else [])]
        for function in functions:
            for shard, answer in process_pool.each(function, shards, self.jobs, self.workers):
                if isinstance(answer, ShardError):
                    raise answer
                if function is _md5:
                    assert answer is not None
                    sums[shard.path] = answer
                elif answer is not None:
                    self.report.warn(shard.path, answer)
        rows = []
        for number, shard in enumerate(shards):
            record = self._record(number)
            try:
                dali.refuse_damaged(record)
                dali.refuse_irregular(record, "wids")
            except ExportError as error:
                raise ExportError(f"{os.fsdecode(shard.path)}: {error}") from None
            url = _url(directory, shard.path)
            rows.append(wids.WidsShard(url, record.samples, record.fingerprint.size, sums.get(shard.path)))
            self.on_shard()
        self._put(os.path.join(directory, WIDS_NAME), [wids.wids_index(rows)])

    def _refuse_unreachable(self, remote: list[bytes]) -> None:
        """Raise ExportError for the output of commands; warn of URLs that need secrets."""
        if not remote:
            return
        bare = []
        for path in remote:
            url = shard_paths.url_of(path)
            if url.is_program:
                raise ExportError(f"{url}: wids cannot read the output of a command: write it to a file first")
            if url.query or url.user:
                bare.append(path)
        if bare:
            self.report.warn(
                bare[0] + and_others(len(bare)).encode(),
                "is listed without its user, password and signature, so wids cannot read it: download the shards, "
                "for example with curl, and export an index of the files",
            )

    # --- our own portable index

    def _wdsidx(self, directory: bytes) -> None:
        index, path = self.lower.index, os.path.join(directory, WDSIDX_NAME)
        moved = [shard for shard, _ in index.stale(self.lower.shards, ready=True, exact=True)]
        if moved:  # known by their headers only, which is not enough to tell others
            index.refresh(moved, self.jobs, exact=True)
        writer = PortableWriter(index, self.lower.shards, path, self._disk, self.on_shard)
        with self._prepared(path) as fd:
            writer.write(fd)

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
                f"{os.fsdecode(folder)} has {several(lost)}, too: name all shards of the dataset, "
                "or remove its .info.json to begin again"
            )
        counts = self._energon_index(root, names)
        self._put(os.path.join(folder, b".info.json"), [energon.info_text(counts, f"wdsfs {__version__}")])
        split = os.path.join(folder, b"split.yaml")
        older = [name for name in (split, os.path.join(folder, b"split.json")) if os.path.exists(name)]
        if not older:
            self._put(split, [energon.split_text(list(counts))])
        elif set(before) != set(counts):
            changed = several(sorted(set(before) ^ set(counts)))
            self.report.warn(older[0], f"is unchanged, but the shards are not ({changed}): edit it")
        dataset = os.path.join(folder, b"dataset.yaml")
        if not os.path.exists(dataset):
            self._put(dataset, [energon.DATASET_TEXT])
        # Last: Energon's caches compare it to notice a new index.
        self._put(os.path.join(folder, b"index.uuid"), [str(uuid.uuid4()).encode()])

    def _energon_names(self, root: bytes) -> dict[str, int]:
        """Return the shards by their paths below the root, with their numbers. Raises ExportError."""
        self._refuse_remote(
            "no index is written beside a shard in a store, where Energon looks for it; copy the set here first"
        )
        numbers: dict[str, int] = {}
        for number, shard in enumerate(self.lower.shards):
            path = below(root, shard.path)
            if path is None:
                raise ExportError(
                    f"{os.fsdecode(shard.path)} is not below {os.fsdecode(root)}: Energon's indexes lie beside "
                    "the shards, so --output is the directory that has them all"
                )
            if not path.endswith(b".tar"):
                raise ExportError(f"{os.fsdecode(shard.path)}: Energon reads shards called *.tar only")
            try:
                numbers[path.decode()] = number
            except UnicodeDecodeError:
                raise ExportError(
                    f"{os.fsdecode(shard.path)}: the name is not UTF-8, and Energon takes no other"
                ) from None
        return numbers

    def _energon_index(self, root: bytes, names: dict[str, int]) -> dict[str, int]:
        """Write `index.sqlite` and the `.tar.idx` files; returns the samples of each shard that has any."""
        counts: dict[str, int] = {}
        path = os.path.join(root, energon.FOLDER, b"index.sqlite")
        with self._prepared(path):
            database = energon.Database(temporary_of(path))
            try:
                for (name, number), samples in zip(names.items(), self._energon_samples(), strict=True):
                    borders = self._energon_shard(database, number, counts, samples)
                    own = energon.energon_path(os.path.join(root, os.fsencode(name)))
                    if borders:
                        counts[name] = len(borders) - 1
                        self._compare_samples(number, counts[name])
                        self._put(own, [borders.tobytes()])
                    else:
                        text = "has no samples, and Energon refuses such a shard: it is left out"
                        self.report.warn(self.lower.shards[number].path, text + self._remove_older(own))
                    self.on_shard()
                if not counts:
                    raise ExportError("the set has no samples, and Energon refuses such a dataset")
                database.finish()
            except sqlite3.OperationalError as error:  # a full disk, for example
                raise ExportError(f"{os.fsdecode(path)}: {error}") from None
            finally:
                database.close()
        return counts

    def _compare_samples(self, number: int, count: int) -> None:
        ours = self._record(number).samples
        if count != ours:
            text = f"Energon finds {count} samples, as it counts hidden files, and other tools {ours}"
            self.report.warn(self.lower.shards[number].path, text)

    def _energon_samples(self) -> Iterator[Callable[[], Iterator[energon.EnergonSample]]]:
        """Yield for each shard a function that returns its samples; it raises ExportError, ShardError, OSError."""
        if self.workers is None and self.jobs == 1:
            for shard in self.lower.shards:
                yield functools.partial(_energon_of_file, shard.path)
        else:
            for _, rows in self._in_order(_energon_rows, lambda shard: shard.path):
                yield functools.partial(_energon_of_rows, rows)

    def _noticed(self, path: bytes, samples: Iterator[energon.EnergonSample]) -> Iterator[energon.EnergonSample]:
        """Yield the samples; warn of the first of which Energon shows only some members."""
        warned = False
        for sample in samples:
            if not warned and len({part.name for part in sample.parts}) < len(sample.parts):
                text = f"{sample.key} has an extension twice, of which Energon shows the last"
                self.report.warn(path, text)
                warned = True
            yield sample

    def _energon_shard(
        self,
        database: energon.Database,
        number: int,
        earlier: Collection[str],
        samples: Callable[[], Iterator[energon.EnergonSample]],
    ) -> array[int]:
        path, record = self.lower.shards[number].path, self._record(number)
        try:
            dali.refuse_irregular(record, "Energon")
            return database.add(len(earlier), self._noticed(path, samples()))
        except energon.DuplicateKey as error:
            whose = "itself" if error.first == len(earlier) else list(earlier)[error.first]
            text = f"the key {error.key!r} is also in {whose}: Energon needs distinct keys"
            if error.key.endswith("/"):
                text += "; Energon gives this key to hidden files (._x, .x): `wdsfs pack SHARDS` leaves them out"
            raise ExportError(f"{os.fsdecode(path)}: {text}") from None
        except ExportError as error:
            raise ExportError(f"{os.fsdecode(path)}: {error}") from None


# --- places ------------------------------------------------------------------------------------------------


def below(directory: bytes, path: bytes) -> bytes | None:
    """Return the path from `directory` on; None if it is not below it. Follows links only if needed."""
    if is_remote(path):
        return None
    for root, place in ((directory, path), (os.path.realpath(directory), os.path.realpath(path))):
        if place.startswith(root.rstrip(b"/") + b"/"):
            return place[len(root.rstrip(b"/")) + 1 :]
    return None


def _url(directory: bytes, path: bytes) -> str:
    """Return a shard as wids names it: relative to the index, and never like a command."""
    relative = below(directory, path)
    return os.fsdecode(path) if relative is None else urls.local(os.fsdecode(relative))


def energon_root(directory: bytes) -> bytes:
    """Return the dataset that `directory` belongs to: itself, or the nearest one above that has metadata."""
    place = directory
    while not os.path.isdir(os.path.join(place, energon.FOLDER)):
        if place == os.path.dirname(place):
            return directory
        place = os.path.dirname(place)
    return place


def left_behind(shards: Iterable[bytes], kinds: Collection[str]) -> list[bytes]:
    """Return the indexes of other kinds that still describe the shards before they were replaced."""
    left: dict[bytes, None] = {}
    for path in shards:
        folder = os.path.join(energon_root(os.path.dirname(path)), energon.FOLDER)
        places = {
            DALI: [dali.dali_path(path)],
            ENERGON: [energon.energon_path(path), os.path.join(folder, b"index.sqlite")],
            WIDS: [os.path.join(os.path.dirname(path), WIDS_NAME)],
            WDSIDX: [os.path.join(os.path.dirname(path), WDSIDX_NAME)],
        }
        for kind, paths in places.items():
            if kind not in kinds:
                left.update(dict.fromkeys(filter(os.path.exists, paths)))
    return list(left)


def _known_shards(folder: bytes) -> list[str]:
    """Return the shards of the metadata that is there. Raises ExportError."""
    path = os.path.join(folder, b".info.json")
    try:
        with open(path, "rb") as file:
            return list(json.load(file)["shard_counts"])
    except FileNotFoundError:
        return []
    except MALFORMED as error:
        raise ExportError(f"{os.fsdecode(path)} is not metadata of Energon ({error}): remove it") from None


# --- questions to a shard, in any process --------------------------------------------------------------


def _wids_misreading(path: bytes, together: int) -> str | None:
    def of(shard: OpenShard) -> str | None:
        record_of_file.begin(shard)
        return wids.wids_misreading(record_of_file.reader_of(shard, shard, together))

    return _of_shard(path, of)


class _DaliUnit(NamedTuple):
    """The task of a worker: the path and record of a shard, and which of its members are shown (None: all)."""

    path: bytes
    record: bytes
    shown: bytes | None


def shown_of(record: Record, plain: Record) -> bytes:
    """Return for each member of a shard 1 if a view that only chooses samples shows it, else 0."""
    shown = bytearray(plain.members)
    for member in range(record.members):
        shown[record.address(member)[1]] = 1
    return bytes(shown)


def _dali_of(unit: _DaliUnit | ExportError) -> bytes | ExportError:
    """Return the index of a shard; an error is returned, not raised."""
    if isinstance(unit, ExportError):
        return unit
    record = Record(unit.record)
    if not (record.samples or record.problems) or (unit.shown is not None and not any(unit.shown)):
        return b""
    try:
        return b"".join(dali.dali_index(record, unit.shown))
    except ExportError as error:
        return ExportError(f"{os.fsdecode(unit.path)}: {error}")


def _energon_of_file(path: bytes) -> Iterator[energon.EnergonSample]:
    """Yield the samples that Energon finds in a shard. Raises ExportError, StaleShard, UnreadableShard."""
    shard = open_shard(path)
    try:
        before = fingerprint_of(shard)
        yield from energon.samples(shard)
        if fingerprint_of(shard) != before:
            raise StaleShard(f"{os.fsdecode(path)} has changed while it was read; start again")
    except OSError as error:
        raise UnreadableShard(f"{os.fsdecode(path)}: {error.strerror}") from None
    finally:
        source.close(shard)


def _energon_rows(path: bytes) -> bytes | ExportError:
    """Return the samples of a shard, pickled as plain tuples, in a third of the time; or the error."""
    try:
        return pickle.dumps([(*sample[:3], [*map(tuple, sample.parts)]) for sample in _energon_of_file(path)])
    except ExportError as error:
        return error


def _energon_of_rows(rows: bytes | ExportError | ShardError) -> Iterator[energon.EnergonSample]:
    if not isinstance(rows, bytes):
        raise rows
    for key, start, end, parts in pickle.loads(rows):
        yield energon.EnergonSample(key, start, end, [energon.EnergonPart(*part) for part in parts])


def _md5(path: bytes) -> str | None:
    return _of_shard(path, _md5_of)


def _md5_of(shard: OpenShard) -> str:
    if not isinstance(shard, int):
        shard.stream()
    digest, position = hashlib.md5(usedforsecurity=False), 0
    while data := source.pread(shard, MD5_BYTES, position):
        digest.update(data)
        position += len(data)
    return digest.hexdigest()


def _of_shard(path: bytes, function: Callable[[OpenShard], Answer]) -> Answer:
    """Call a function with this shard, opened; return its answer. Raises MissingShard, UnreadableShard."""
    shard = open_shard(path)
    try:
        return function(shard)
    except OSError as error:
        raise UnreadableShard(f"{os.fsdecode(path)}: {error.strerror}") from None
    finally:
        source.close(shard)
