"""The index: records of shards, kept in LMDB between mounts and shared by every mount and command.

One environment holds, for each shard, a `Summary` (small, fixed, read for every shard of a set when it is
mounted) and a record (`index/record.py`, read in place when the shard is first used). The key is a digest of the
shard's absolute path; what makes an entry valid is its fingerprint, not the key.

Nothing in it is believed: every value has a checksum, and a damaged one counts as none. What happens when the
directory is bad is decided in `index/index_directory.py`.

Threads: an `Index` is used by one thread at a time.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NamedTuple

import lmdb

from wdsfs import host
from wdsfs.errors import IndexUnusable, MissingShard, ShardError, UnreadableShard
from wdsfs.index import index_directory, lmdb_check, merged_names, process_pool
from wdsfs.index.index_directory import IndexDirectory
from wdsfs.index.record import Record
from wdsfs.index.record_of_file import build_file
from wdsfs.index.set_tables import Claims, PathUnion
from wdsfs.spec.expand import Shard
from wdsfs.storage import unpack_cache
from wdsfs.storage.identity import look

COMMIT_SECONDS, COMMIT_BYTES = 1.0, 64 << 20  # how much work a crash may cost while indexing

_SUMMARY = struct.Struct("<QqQIIIIIIQII")
_CRC_BYTES = 4
MISCOUNTED_TOLD = 3  # shards that warnings name


class Summary(NamedTuple):
    """What a mount needs to know of each shard before anyone looks inside."""

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
    def fingerprint(self) -> tuple[int, int, int]:
        return self.size, self.mtime_ns, self.identity


class Index:
    """Records by shard. Made by `open_index`; `notices` says in words what is not as it should be."""

    def __init__(self, home: IndexDirectory) -> None:
        self._home = home
        self.failures: dict[bytes, str] = {}  # by key: shards that `refresh` could not read, and why
        self._txns: list[lmdb.Transaction] = []
        self.snapshot = 0  # goes up when no Record that was got before may be used any more

    @property
    def directory(self) -> Path:
        """The directory that new records go to."""
        return self._home.path

    @property
    def notices(self) -> list[str]:
        """What is not as it should be, in words."""
        return self._home.notices

    # --- reading

    def renew(self) -> None:
        """See what other processes have committed. Every Record got before must not be used any more."""
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
                self._leave(error)
                self._begin()
        for txn in self._txns:
            try:
                value: Any = txn.get(key)
            except lmdb.Error:  # damaged since it was opened; the shard is indexed anew
                continue
            if value is not None:
                return memoryview(value) if len(value) else None  # an empty one hides what the base has
        return None

    def summary(self, path: bytes) -> Summary | None:
        """The stored summary of the shard at `path`, valid or not.

        For one that is not read plainly (`Shard.key`), and for what was derived from a shard (`views`), the path
        is followed by a NUL and what tells it from others.
        """
        value = self._get(b"s" + _digest(path))
        found = None if value is None else _unseal(value)
        return found[0] if found is not None and found[1] == path else None

    def record(self, path: bytes, fingerprint: tuple[int, int, int], verify: bool = True) -> Record | None:
        """The record of the shard at `path`, in place, valid until `renew`; None when it has to be built.

        To `verify` takes time for each member. What was right once is so until `renew`.
        """
        value = self._get(b"r" + _digest(path))
        if value is None:
            return None
        try:
            found = Record(value, verify)
        except (ValueError, KeyError, TypeError):  # damaged: as good as none
            return None
        return found if tuple(found.fingerprint) == fingerprint else None

    def stale(self, shards: Sequence[Shard]) -> Iterator[tuple[Shard, int]]:
        """The shards that have to be indexed, with their sizes in bytes. Missing files count 0 bytes."""
        for one in shards:
            try:
                fingerprint = look(one.path)
            except (MissingShard, UnreadableShard):
                yield one, 0
                continue
            summary = self.summary(one.key)
            if summary is None or summary.fingerprint != fingerprint:
                yield one, fingerprint[0]

    def miscounted(self, shards: Sequence[Shard]) -> list[str]:
        """Warnings of shards that do not have as many samples as the file says that names them.

        A few of them one by one, and how many more. What is not indexed is left out.
        """
        expected = (one for one in shards if one.expected_samples is not None)
        seen = ((one, summary) for one in expected if (summary := self.summary(one.key)) is not None)
        found = [f"{os.fsdecode(one.path)}: {text}" for one, has in seen if (text := one.miscount(has.samples))]
        if len(found) <= MISCOUNTED_TOLD:
            return found
        more = f"{len(found) - MISCOUNTED_TOLD:,} more shards do not have as many samples as they should have"
        return [*found[:MISCOUNTED_TOLD], f"{more}; see: wdsfs check"]

    # --- writing

    def forget(self, path: bytes) -> None:
        """Drop what is stored of a shard, although its fingerprint may fit."""
        self._write([(b"s" + _digest(path), None), (b"r" + _digest(path), None)])

    def store(self, built: Sequence[tuple[bytes, bytes]]) -> None:
        """Keep records, given as (path, record), in one durable step.

        When the directory cannot take them, they go on in a temporary index, and a notice says so.
        """
        changes: list[tuple[bytes, bytes | None]] = []
        for path, data in built:
            digest = _digest(path)
            changes.append((b"s" + digest, _seal(summarize(Record(data, verify=False)) + path)))
            changes.append((b"r" + digest, data))
        self._write(changes)

    def _write(self, changes: Sequence[tuple[bytes, bytes | None]]) -> None:
        """Do all of these in one step: keep a value under a key, or with None drop it."""
        try:
            self._apply(changes)
        except (lmdb.Error, lmdb_check.Damaged) as error:
            self._leave(error)
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
                elif self._home.base is not None:
                    txn.put(key, b"")
                else:
                    txn.delete(key)

    def _leave(self, error: Exception) -> None:
        """Go on without the environment that gave this error. Raises IndexUnusable."""
        self._txns = []
        self.snapshot += 1
        self._home.leave(error)

    def refresh(
        self,
        shards: Sequence[Shard],
        jobs: int = 1,
        on_done: Callable[[Shard, Summary | None, str | None], None] = lambda *_: None,
        executor: Executor | None = None,
    ) -> None:
        """Build the records of these shards and store them, `jobs` at a time.

        `on_done` hears of each shard when it is built: its summary, or why it could not be read. What is
        finished stays, also when this is interrupted.
        """
        for reading in dict.fromkeys(one.reading for one in shards):
            some = [one for one in shards if one.reading == reading]
            build = functools.partial(build_file, reading=reading)
            with contextlib.closing(process_pool.each(build, some, jobs, executor)) as results:
                self._collect(results, on_done)

    def _collect(
        self,
        results: Iterator[tuple[Shard, bytes | ShardError]],
        on_done: Callable[[Shard, Summary | None, str | None], None],
    ) -> None:
        pending: list[tuple[bytes, bytes]] = []
        since, size = time.monotonic(), 0
        try:
            for one, result in results:
                if isinstance(result, ShardError):
                    self.failures[one.key] = str(result)
                    on_done(one, None, str(result))
                    continue
                pending.append((one.key, result))
                size += len(result)
                on_done(one, Summary(*_SUMMARY.unpack(summarize(Record(result, verify=False)))), None)
                if time.monotonic() - since > COMMIT_SECONDS or size > COMMIT_BYTES:
                    self.store(pending)
                    pending, since, size = [], time.monotonic(), 0
        finally:
            if pending:
                self.store(pending)

    def prune(self) -> int:
        """Drop the records of shards that are no longer there; returns how many. Their unpacked copies go, too."""
        self.renew()
        gone, keys = [], set()
        with self._home.env.begin(buffers=True) as txn, txn.cursor() as cursor:
            for key, value in cursor if cursor.set_range(b"s") else ():
                if bytes(key[:1]) != b"s":
                    break
                found = _unseal(value)
                if found is None:
                    continue
                if not _is_there(found[1]):
                    gone.append(bytes(key[1:]))
                else:
                    path = _path_of(found[1])
                    with contextlib.suppress(OSError):
                        keys.add(unpack_cache.key_of(path, os.stat(path)))
        self._write([(kind + digest, None) for digest in gone for kind in (b"s", b"r")])
        unpack_cache.cache().prune(keys)
        return len(gone)

    # --- one tree over many shards

    def union(
        self,
        paths: Sequence[bytes],
        fingerprints: Sequence[tuple[int, int, int]],
        records: Callable[[int], Record | None],
    ) -> PathUnion:
        """Which shards may hold a path, for the whole set; made once and kept like the records.

        `paths` are what the records of the shards are kept under, `fingerprints` those of the shards
        now, 0 for one without a record.
        """
        key = b"u" + _digest(b"\0".join(paths))
        self._keep(key, fingerprints, lambda: PathUnion.build(len(paths), records))
        return PathUnion(key, self)

    def claims(
        self,
        paths: Sequence[bytes],
        kind: bytes,
        fingerprints: Sequence[tuple[int, int, int]],
        records: Callable[[int], Record | None],
        wants: Callable[[Record], merged_names.Wants],
    ) -> Claims:
        """As `union`: the claims of the whole set. `kind` is a name for what `wants` counts as wanted."""
        key = b"c" + _digest(b"\0".join((*paths, kind)))
        self._keep(key, fingerprints, lambda: merged_names.build(len(paths), records, wants))
        return Claims(key, self)

    def _keep(
        self,
        key: bytes,
        fingerprints: Sequence[tuple[int, int, int]],
        build: Callable[[], tuple[Sequence[Sequence[int]], bytes]],
    ) -> None:
        """Make the value at `key` unless it is of shards with these fingerprints.

        `build` gives the fingerprints that it has seen, and the value.
        """
        value = self._get(key)
        sound = value is not None and zlib.crc32(value[20:]) == int.from_bytes(value[16:20], "little")
        if value is None or not sound or bytes(value[:16]) != _state(fingerprints):
            seen, body = build()
            self._write([(key, _state(seen) + zlib.crc32(body).to_bytes(4, "little") + body)])

    def kept(self, key: bytes) -> memoryview:
        """What `union` or `claims` made, in place, valid until the index is renewed."""
        value = self._get(key)
        if value is None:
            raise IndexUnusable("the index of the merged tree is gone; mount again")
        return value[20:]

    @property
    def label_tables(self) -> Path:
        """The directory of what label files are read into (`views/label_files.py`). Raises IndexUnusable."""
        return host.beside_index(self.directory) / "labels"

    @property
    def temporary(self) -> bool:
        """Whether this index ends with the process that made it."""
        return self._home.temporary

    def discard(self) -> None:
        """Delete a temporary index that was suspended."""
        self._home.discard()

    def suspend(self) -> None:
        """Close the environments, so that processes forked from here on can `reopen` them.

        LMDB can neither be used over a fork nor be opened twice in one process.
        """
        self.renew()
        self._home.close()

    def reopen(self) -> Index:
        """The same index in this process; a temporary one is not deleted by closing it."""
        return Index(self._home.reopened())

    def close(self) -> None:
        """End the use of the index; a temporary one is deleted. No Record may be used afterwards."""
        self.suspend()
        self.discard()


def open_index(directory: Path | None = None) -> Index:
    """Open the index in `directory` (default: `WDSFS_INDEX_DIR`, else the user's cache directory).

    If anything is wrong with it, an index comes back nevertheless; its `notices` say what was done. Raises
    IndexUnusable only when not even a temporary one can be made.
    """
    return Index(index_directory.open_directory(directory))


def summarize(one: Record) -> bytes:
    return _SUMMARY.pack(
        *one.fingerprint,
        one.folders,
        one.entries,
        len(one.child_folders(0)),
        one.count_directories(0),
        one.members,
        one.samples,
        one.total_size(),
        one.problem_count,
        one.unshown_count,
    )


def _state(fingerprints: Sequence[Sequence[int]]) -> bytes:
    """16 bytes that change with any of the fingerprints."""
    packed = b"".join(struct.pack("<QqQ", *one) for one in fingerprints)
    return hashlib.blake2b(packed, digest_size=16).digest()


def _seal(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(_CRC_BYTES, "little") + data


def _unseal(value: memoryview) -> tuple[Summary, bytes] | None:
    """The summary and the path in a value, None when it is damaged."""
    data = value[_CRC_BYTES:]
    if len(data) < _SUMMARY.size or zlib.crc32(data) != int.from_bytes(value[:_CRC_BYTES], "little"):
        return None
    return Summary(*_SUMMARY.unpack_from(data)), bytes(data[_SUMMARY.size :])


def _path_of(key: bytes) -> bytes:
    """The path of the shard that a record is of, which may be that of a view."""
    return key.partition(b"\0")[0]


def _is_there(key: bytes) -> bool:
    try:
        look(_path_of(key))
    except MissingShard:
        return False
    except UnreadableShard:
        return True  # or not: nobody can tell now
    return True


def _digest(path: bytes) -> bytes:
    return hashlib.blake2b(path, digest_size=16).digest()
