"""The index: records of shards, kept in LMDB between mounts and shared by every mount and command.

One environment holds, for each shard, a `Summary` (small, fixed, read for every shard of a set when it is mounted)
and a record (`index/record.py`, read in place when the shard is first used). The key is a digest of the shard's
absolute path. An entry is valid if its fingerprint is that of the shard.

Portable indexes (`index/portable.py`) may have records that LMDB does not have. All others are built.

Nothing in it is trusted: every value has a checksum, and a damaged one counts as missing. What happens when the
directory is bad is decided in `index/index_directory.py`.

Threads: an `Index` is used by one thread at a time.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lmdb

from wdsfs.cache import file_cache
from wdsfs.cache.cache_directory import PART, key_of
from wdsfs.cluster_workers import Workers
from wdsfs.door.shard_door import DOOR
from wdsfs.door.urls import is_remote
from wdsfs.errors import IndexUnusable, MissingShard, NotATar, ShardError, UnreadableShard
from wdsfs.index import index_directory, lmdb_check, process_pool
from wdsfs.index.index_directory import IndexDirectory
from wdsfs.index.portable import Portables, path_in_key
from wdsfs.index.record import Record
from wdsfs.index.record_builder import adopted
from wdsfs.index.record_of_file import build_file
from wdsfs.shards import Fingerprint, Shard
from wdsfs.spec import objects
from wdsfs.tar.compressed import COPIES, INDEX

COMMIT_SECONDS, COMMIT_BYTES = 1.0, 64 << 20  # how much work a crash may lose while indexing

_SUMMARY = struct.Struct("<QqQIIIIIIQII")
_CRC_BYTES = 4
MISCOUNTED_MAX = 3  # shards that warnings name


class Summary(NamedTuple):
    """The few numbers that a mount needs of each shard before one is opened."""

    size: int
    mtime_ns: int
    identity: int
    folders: int
    entries: int
    top_folders: int
    top_directories: int
    members: int
    samples: int
    member_bytes: int
    problems: int
    unshown: int

    @property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of the shard."""
        return Fingerprint(*self[:3])

    def is_of(self, fingerprint: Fingerprint) -> bool:
        """Return True if the shard had this fingerprint. Asked of every shard at a mount, so it makes none."""
        return self[:3] == fingerprint


_PROBLEMS = Summary._fields.index("problems") - len(Fingerprint._fields)  # among the numbers of a portable index


class Needed(enum.Enum):
    """Conditions for a shard that need not be indexed; each asks for more than the one before.

    LISTED: a row of a portable index is enough. USABLE: the record need not be copied here first. PROVABLE: the
    record is undamaged, and size and time, or the ETag, show that it is of the shard, not headers alone.
    """

    LISTED = 1
    USABLE = 2
    PROVABLE = 3


class Index:
    """Records by shard. Made by `open_index`; `notices` are messages about what is wrong with it."""

    def __init__(self, home: IndexDirectory, portables: Portables | None = None) -> None:
        self._home = home
        self.portables = portables or Portables()  # are asked for records that are not here
        self.failures: dict[bytes, str] = {}  # by key: shards that `refresh` could not read, and why
        self._whole: set[bytes] = set()  # keys of shards without damage, as `stale` has found them
        self._txns: list[lmdb.Transaction] = []
        self.snapshot = 0  # goes up when Records that were returned earlier must not be used any more

    @property
    def directory(self) -> Path:
        """The directory to which new records are written."""
        return self._home.path

    @property
    def notices(self) -> list[str]:
        """Messages about what is wrong with the index."""
        return self._home.notices

    def log_notices(self) -> None:
        """Log the notices as warnings."""
        self._home.log_notices()

    # --- reading

    def renew(self) -> None:
        """See what other processes have committed. Records that were returned before must not be used any more."""
        for txn in self._txns:
            txn.abort()
        self._txns = []
        self.snapshot += 1

    def _begin(self) -> None:
        self._txns = [env.begin(buffers=True) for env in self._home.environments()]

    def _get(self, key: bytes) -> memoryview | None:
        if not self._txns:
            try:
                self._begin()
            except lmdb.Error as error:  # too many readers; or another process let it grow beyond our map
                self._leave(error, can_read=False)
                self._begin()
        for txn in self._txns:
            try:
                value: Any = txn.get(key)
            except lmdb.Error:  # damaged since it was opened; the shard is indexed again
                continue
            if value is not None:
                return memoryview(value) if len(value) else None  # an empty value hides that of the full one
        return None

    def summary(self, path: bytes, fingerprint: Fingerprint | None = None) -> Summary | None:
        """Return the summary of the shard at `path` with this fingerprint; by default the last known one.

        For a shard that is not read plainly (`Shard.key`), and for a record of a view (`ViewSet`), the path is
        followed by a NUL and the options that distinguish it from others.
        """
        stored = self._stored_summary(path)
        if fingerprint is None:
            row = None if stored is not None else self.portables.known(path)
            return stored if row is None else Summary(*row[0], 0, *row[1])
        if stored is not None and stored.is_of(fingerprint):
            return stored
        numbers = self.portables.numbers(path, fingerprint)
        return None if numbers is None else Summary(*fingerprint, *numbers)

    def _stored_summary(self, path: bytes) -> Summary | None:
        value = self._get(b"s" + _digest(path))
        unsealed = None if value is None else _unseal(value)
        return unsealed[0] if unsealed is not None and unsealed[1] == path else None

    def record(self, path: bytes, fingerprint: Fingerprint, *, verify: bool = True) -> Record | None:
        """Return the record of the shard at `path`, in place, valid until `renew`.

        None if it has to be copied or built. To `verify` takes time for each member. A record that was right once
        stays right until `renew`.
        """
        record = self._stored_record(path, verify)
        if record is not None and record.fingerprint == fingerprint:
            return record
        return self.portables.record(path, fingerprint)

    def _stored_record(self, path: bytes, verify: bool) -> Record | None:
        value = self._get(b"r" + _digest(path))
        if value is None:
            return None
        try:
            return Record(value, verify=verify)
        except (ValueError, KeyError, TypeError):  # damaged: counts as missing
            return None

    def packed(self, path: bytes, fingerprint: Fingerprint) -> memoryview | None:
        """Return the bytes of the record of exactly this shard as they are kept here, valid until `renew`."""
        record = self._stored_record(path, verify=False)
        if record is None or record.fingerprint != fingerprint or record.moved is not None:
            return None
        return self._get(b"r" + _digest(path))

    def stale(self, shards: Sequence[Shard], needed: Needed = Needed.LISTED) -> Iterator[tuple[Shard, int]]:
        """Yield the shards that have to be indexed, with their sizes in bytes. Missing files count 0 bytes."""
        for shard in shards:
            numbers = self.portables.presumed(shard) if needed is Needed.LISTED else None
            if numbers is not None:
                self._note_if_whole(shard.key, numbers[_PROBLEMS])
                continue
            try:
                fingerprint = DOOR.look(shard.path)
            except (MissingShard, UnreadableShard):
                yield shard, 0
                continue
            if not self._is_indexed(shard.key, fingerprint, needed):
                yield shard, fingerprint.size

    def _is_indexed(self, key: bytes, fingerprint: Fingerprint, needed: Needed) -> bool:
        stored = self._stored_summary(key)
        if stored is not None and stored.is_of(fingerprint):
            self._note_if_whole(key, stored.problems)
            if needed is not Needed.PROVABLE:
                return True
            record = self._stored_record(key, verify=True)  # to be passed on: no damage, no older format
            return record is not None and record.moved is None
        numbers = self.portables.numbers(key, fingerprint, exact=needed is Needed.PROVABLE)
        if numbers is None:
            return False
        self._note_if_whole(key, numbers[_PROBLEMS])
        return needed is Needed.LISTED or self.portables.has_in_place(key, fingerprint)

    def _note_if_whole(self, key: bytes, problems: int) -> None:
        if not problems:
            self._whole.add(key)

    def no_tars(self, shards: Sequence[Shard]) -> dict[bytes, ShardError]:
        """Return the files among these shards that are no tars, by path, as far as they are indexed."""
        refused: dict[bytes, ShardError] = {}
        for shard in shards:
            summary = None if self.is_whole(shard.key) else self.summary(shard.key)
            try:
                self.check_is_tar(shard, summary)
            except NotATar as error:
                refused[shard.path] = error
        return refused

    def check_is_tar(self, shard: Shard, summary: Summary | None) -> None:
        """Raise NotATar for a shard with this summary that is not a tar."""
        if summary is not None and summary.problems and not summary.members:
            record = self.record(shard.key, summary.fingerprint, verify=False)
            if record is not None:
                record.check_is_tar(os.fsdecode(shard.path))

    def is_whole(self, path: bytes) -> bool:
        """Return True if `stale` has just seen that a shard has no damage, so that its summary is not needed."""
        return path in self._whole

    def miscounted(self, shards: Sequence[Shard]) -> list[str]:
        """Return warnings about shards whose number of samples is not the one that their list of shards states.

        The first few are named, further ones counted. Shards that are not indexed are left out.
        """
        expected = (shard for shard in shards if shard.expected_samples is not None)
        seen = ((shard, summary) for shard in expected if (summary := self.summary(shard.key)) is not None)
        warnings = [
            f"{os.fsdecode(shard.path)}: {text}" for shard, has in seen if (text := shard.miscount(has.samples))
        ]
        if len(warnings) <= MISCOUNTED_MAX:
            return warnings
        more = f"{len(warnings) - MISCOUNTED_MAX:,} more shards differ in their number of samples from the list"
        return [*warnings[:MISCOUNTED_MAX], f"{more}; see: wdsfs check"]

    # --- writing

    def forget(self, path: bytes) -> None:
        """Drop the record of a shard, even if its fingerprint is right."""
        self._whole.discard(path)
        self.portables.refuse(path)
        self._write([(b"s" + _digest(path), None), (b"r" + _digest(path), None)])

    def store(self, built: Sequence[tuple[bytes, bytes]]) -> None:
        """Store records, given as (path, record), in one durable step.

        If they cannot be written to the directory, they go to a temporary index, and a notice reports it.
        """
        changes: list[tuple[bytes, bytes | None]] = []
        for path, data in built:
            self._whole.discard(path)
            digest = _digest(path)
            changes.append((b"s" + digest, _seal(_SUMMARY.pack(*summary_of(Record(data, verify=False))) + path)))
            changes.append((b"r" + digest, data))
        self._write(changes)

    def _write(self, changes: Sequence[tuple[bytes, bytes | None]]) -> None:
        """Store each value under its key, or drop the key if the value is None, all in one step."""
        try:
            self._apply(changes)
        except (lmdb.Error, lmdb_check.Damaged) as error:
            self._leave(error, can_read=True)
            try:
                self._apply(changes)
            except lmdb.Error as again:
                raise IndexUnusable(f"the index in {self.directory} cannot be written: {again}") from None

    def _apply(self, changes: Sequence[tuple[bytes, bytes | None]]) -> None:
        self.renew()
        page_size = self._home.env.stat()["psize"]
        with self._home.env.begin(buffers=True) as reader:
            small: Any = reader.get(b"format")
            if small is None:
                raise lmdb_check.Damaged("its format is gone")
            for key, _ in changes:
                old: Any = reader.get(key)
                if old:
                    lmdb_check.check_extent(old, small, page_size)
        with self._home.env.begin(write=True) as txn:
            for key, value in changes:
                if value is not None:
                    txn.put(key, value)
                elif self._home.full is not None:
                    txn.put(key, b"")
                else:
                    txn.delete(key)

    def _leave(self, error: Exception, *, can_read: bool) -> None:
        """Stop using the environment that gave this error. Raises IndexUnusable."""
        self._txns = []
        self.snapshot += 1
        self._home.leave(error, can_read=can_read)

    def refresh(
        self,
        shards: Sequence[Shard],
        jobs: int = 1,
        on_done: Callable[[Shard, Summary | None, str | None], None] = lambda *_: None,
        workers: Workers | None = None,
        needed: Needed = Needed.LISTED,
    ) -> int:
        """Build the records of these shards and store them, `jobs` at a time, or by workers elsewhere.

        Records of portable indexes are copied; returns how many.

        `on_done` is called for each finished shard, with its summary or with why it could not be read. An
        interrupt keeps the records that are finished. `needed` is what `stale` was asked with.
        """
        known: set[bytes] = set()
        if self.portables.files:
            self._collect(self._copies(shards, known, exact=needed is Needed.PROVABLE), on_done)
            shards = [shard for shard in shards if shard.path not in known]
        for reading in dict.fromkeys(shard.reading for shard in shards):
            some = [shard for shard in shards if shard.reading == reading]
            together = process_pool.together(some, workers)
            build = functools.partial(build_file, reading=reading, together=together)
            built = process_pool.each(build, some, jobs, workers, adopt=adopted)
            with contextlib.closing(built) as results:
                self._collect(results, on_done)
        return len(known)

    def _copies(
        self, shards: Sequence[Shard], known: set[bytes], *, exact: bool
    ) -> Iterator[tuple[Shard, bytes | ShardError]]:
        """Yield the shards whose records portable indexes have, with these records; `known` gets their paths."""
        for shard in shards:
            with contextlib.suppress(ShardError):
                data = self.portables.copy(shard.key, DOOR.look(shard.path), exact=exact)
                if data is not None:
                    known.add(shard.path)
                    yield shard, data

    def _collect(
        self,
        results: Iterator[tuple[Shard, bytes | ShardError]],
        on_done: Callable[[Shard, Summary | None, str | None], None],
    ) -> None:
        pending: list[tuple[bytes, bytes]] = []
        since, size = time.monotonic(), 0
        try:
            for shard, result in results:
                if isinstance(result, ShardError):
                    self.failures[shard.key] = str(result)
                    on_done(shard, None, str(result))
                    continue
                pending.append((shard.key, result))
                size += len(result)
                on_done(shard, summary_of(Record(result, verify=False)), None)
                if time.monotonic() - since > COMMIT_SECONDS or size > COMMIT_BYTES:
                    self.store(pending)
                    pending, since, size = [], time.monotonic(), 0
        finally:
            if pending:
                self.store(pending)

    def prune(self) -> int:
        """Drop the records of shards that do not exist any more, and their unpacked copies; return how many.

        Records of remote shards stay unless the store reports now that the object is missing.
        """
        self.renew()
        gone, keys = [], set()
        remote: dict[bytes, list[bytes]] = {}  # the stored entries of each remote shard
        with self._home.env.begin(buffers=True) as txn, txn.cursor() as cursor:
            for key, value in cursor if cursor.set_range(b"s") else ():
                if bytes(key[:1]) != b"s":
                    break
                unsealed = _unseal(value)
                if unsealed is None:
                    continue
                path = path_in_key(unsealed[1])
                if is_remote(path):
                    remote.setdefault(path, []).append(bytes(key[1:]))
                    keys.add(key_of(path, unsealed[0].fingerprint))
                    continue
                try:
                    keys.add(key_of(path, Fingerprint.at(path)))
                except MissingShard:
                    gone.append(bytes(key[1:]))
                except UnreadableShard:  # for now: the store did not say that the object is missing
                    keys.add(key_of(path, unsealed[0].fingerprint))
        gone += [digest for path in objects.gone(list(remote)) for digest in remote[path]]
        self._write([(kind + digest, None) for digest in gone for kind in (b"s", b"r")])
        file_cache.cache().prune((*COPIES, INDEX, PART), keys)
        return len(gone)

    # --- tables over a whole set

    def keep_table(
        self,
        kind: bytes,
        paths: Sequence[bytes],
        fingerprints: Sequence[Fingerprint],
        build: Callable[[], tuple[Sequence[Fingerprint], bytes]],
    ) -> bytes:
        """Make a table over a set, unless it is kept for shards with these fingerprints; returns its key.

        `kind` says which table this is. `paths` are the keys under which the records of the shards are stored, and
        `fingerprints` the present ones of the shards, GONE for a shard without a record. `build` returns the
        fingerprints that it has seen, and the table.
        """
        key = _table_key(kind, paths)
        value = self._get(key)
        sound = value is not None and zlib.crc32(value[20:]) == int.from_bytes(value[16:20], "little")
        if value is None or not sound or bytes(value[:16]) != _state(fingerprints):
            seen, body = build()
            self._write([(key, _state(seen) + zlib.crc32(body).to_bytes(4, "little") + body)])
        return key

    def table(self, key: bytes) -> memoryview:
        """Return the table at `key`, in place, valid until the index is renewed.

        Raises IndexUnusable if it is gone.
        """
        value = self._get(key)
        if value is None:
            raise IndexUnusable(
                "a table over the whole set is gone from the index; mount again, or repeat the command"
            )
        return value[20:]

    def drop_tables(self, kinds: Sequence[bytes], paths: Sequence[bytes]) -> None:
        """Drop tables over a set that is not shown any more."""
        keys = [_table_key(kind, paths) for kind in kinds]
        self._write([(key, None) for key in keys if self._get(key) is not None])

    @property
    def temporary(self) -> bool:
        """True if this index is deleted at the end of the process that made it."""
        return self._home.temporary

    def discard(self) -> None:
        """Delete a temporary index that was suspended."""
        self._home.discard()

    def suspend(self) -> None:
        """Close the environments, so that processes forked from here on can `reopen` them.

        LMDB can neither be used over a fork nor be opened twice in one process. The next question to this index,
        in this process or in a child, opens them again.
        """
        self.renew()
        self._whole.clear()
        self._home.close()

    def reopen(self) -> Index:
        """Return the same index in this process; a temporary one is not deleted by closing it."""
        return Index(self._home.reopened(), self.portables)

    def close(self) -> None:
        """Close the index and delete a temporary one, unless others of this process have it open.

        No Record may be used afterwards.
        """
        self.renew()
        self._whole.clear()
        self.portables = Portables()  # deleting closes its files
        if self._home.left():
            self.suspend()
            self.discard()


def open_index(directory: Path | None = None) -> Index:
    """Open the index in `directory` (default: `WDSFS_INDEX_DIR`, else the user's cache directory).

    If anything is wrong with it, an index is returned all the same, and its `notices` say what was done. Raises
    IndexUnusable only if even a temporary one cannot be made.
    """
    return Index(index_directory.open_directory(directory))


def summary_of(record: Record) -> Summary:
    """Return the summary of a record."""
    return Summary(*record.fingerprint, *record.counts())


def _state(fingerprints: Sequence[Fingerprint]) -> bytes:
    """Return 16 bytes that change with any of the fingerprints."""
    packed = b"".join(fingerprint.packed for fingerprint in fingerprints)
    return hashlib.blake2b(packed, digest_size=16).digest()


def _table_key(kind: bytes, paths: Sequence[bytes]) -> bytes:
    return kind[:1] + _digest(b"\0".join((*paths, kind[1:])))


def _seal(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(_CRC_BYTES, "little") + data


def _unseal(value: memoryview) -> tuple[Summary, bytes] | None:
    """Return the summary and the path in a value, None when it is damaged."""
    data = value[_CRC_BYTES:]
    if len(data) < _SUMMARY.size or zlib.crc32(data) != int.from_bytes(value[:_CRC_BYTES], "little"):
        return None
    return Summary(*_SUMMARY.unpack_from(data)), bytes(data[_SUMMARY.size :])


def _digest(path: bytes) -> bytes:
    return hashlib.blake2b(path, digest_size=16).digest()
