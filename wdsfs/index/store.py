"""The index: records of shards, kept in LMDB between mounts and shared by every mount and command.

One environment holds, for each shard, a `Summary` (small, fixed, read for every shard of a set when it is
mounted) and a record (`index/record.py`, read in place when the shard is first used). The key is a digest of the
shard's absolute path; what makes an entry valid is its fingerprint, not the key.

The index is a cache: losing it costs time only. So whatever is wrong with its directory (missing, full,
read-only, damaged, another format, on a network file system, where LMDB's locks and maps are not safe), the
answer is a notice in words and an index that works, if need be a temporary one. Nothing in it is believed:
`index/lmdb_check.py` looks at LMDB's own structure before LMDB does, and every value has a checksum.

Threads: an `Index` is used by one thread at a time; `build_file` is a pure function for any process.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import logging
import os
import stat
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import numpy as np

from wdsfs import host, trust
from wdsfs.errors import IndexUnusable, MissingShard, ShardError, StaleShard, UnreadableShard
from wdsfs.index import lmdb_check, merged_names, process_pool, record_builder
from wdsfs.index.hints import reading_ahead
from wdsfs.index.record import Record
from wdsfs.reading import PLAIN, Reading
from wdsfs.spec.expand import Shard
from wdsfs.storage import unpack_cache
from wdsfs.storage.identity import fingerprint_of, look
from wdsfs.tar import compressed

log = logging.getLogger(__name__)

FORMAT = b"1"
MAP_SIZES = (1 << 42, 1 << 38, 1 << 35, 1 << 31)  # bytes of address space; the smaller ones for a `ulimit -v`
READERS = 4096  # processes that may read one index at a time
LOCK_BYTES = 64 * READERS + 4096  # of LMDB's lock file, a cache line for each reader
COMMIT_SECONDS, COMMIT_BYTES = 1.0, 64 << 20  # how much work a crash may cost while indexing
PATIENCE_SECONDS, PAUSE_SECONDS = 10.0, 0.2  # how long to wait for a shard that is being written, and how often
TICK_NS = 20_000_000  # no clock of the kernel that gives files their times is coarser

# What says that the file is at fault. Anything else (no space, no memory, no permission ...) is no reason to
# throw away what is in it.
_DAMAGE = (
    *(
        lmdb_check.Damaged,
        lmdb.CorruptedError,
        lmdb.PageNotFoundError,
        lmdb.InvalidError,
        lmdb.VersionMismatchError,
    ),
    *(lmdb.CursorFullError, lmdb.PageFullError, lmdb.IncompatibleError),
)

_SUMMARY = struct.Struct("<QqQIIIIIIQII")
_CRC_BYTES = 4
_FILES = ("data.mdb", "lock.mdb")
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


def open_shard(path: bytes) -> int:
    """A descriptor of the shard at `path`. Raises MissingShard, UnreadableShard."""
    try:
        # A pipe in the place of a shard must not be waited for.
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise MissingShard(f"{os.fsdecode(path)}: there is no such shard") from None
    except OSError as error:
        raise UnreadableShard(f"{os.fsdecode(path)}: {error.strerror}") from None


def is_compressed(path: bytes, open_file: Callable[[bytes], int] = open_shard) -> bool:
    """Whether the shard at `path` is compressed. Raises MissingShard, UnreadableShard."""
    fd = open_file(path)
    try:
        return compressed.kind_of(fd) is not None
    except OSError as error:
        raise UnreadableShard(f"{os.fsdecode(path)}: {error.strerror}") from None
    finally:
        os.close(fd)


@contextlib.contextmanager
def opened_shard(path: bytes) -> Iterator[tuple[int, compressed.Opened]]:
    """A descriptor of the shard at `path`, and the bytes of the tar in it. Raises ShardErrors."""
    fd = open_shard(path)
    try:
        with compressed.opened(fd, path) as found:
            yield fd, found
    finally:
        os.close(fd)


def build_file(path: bytes, reading: Reading = PLAIN, open_file: Callable[[bytes], int] = open_shard) -> bytes:
    """The record of the shard at `path`, read so; `open_file` gives a descriptor of it.

    Raises MissingShard or UnreadableShard when there is nothing to read, or when it is being written for longer
    than one cares to wait; a damaged shard gives a record.
    """
    fd = open_file(path)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise UnreadableShard(f"{os.fsdecode(path)}: is no regular file")
        with reading_ahead(fd, path):
            return _build_when_quiet(fd, path, reading)
    except OSError as error:
        raise UnreadableShard(f"{os.fsdecode(path)}: {error.strerror}") from None
    finally:
        os.close(fd)


def _build_when_quiet(fd: int, path: bytes, reading: Reading) -> bytes:
    """A shard that is still being written changes while it is read: what counts is a quiet pass."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        found = os.fstat(fd)
        before = fingerprint_of(found)
        wait_for_tick(found)
        with contextlib.suppress(StaleShard), compressed.opened(fd, path) as (source, problem):
            data = record_builder.build(source, list(before), problem, reading)
            if fingerprint_of(os.fstat(fd)) == before:
                return data
        if time.monotonic() > deadline:
            raise UnreadableShard(f"{os.fsdecode(path)}: is being written; try again when it is finished")
        time.sleep(PAUSE_SECONDS)


def wait_for_tick(found: os.stat_result) -> None:
    """Wait until one more write to a file would show in its times: within the tick of the last it would not."""
    if 0 <= time.time_ns() - found.st_ctime_ns < TICK_NS:
        time.sleep(TICK_NS / 1e9)


class Index:
    """Records by shard. Made by `open_index`; `notices` says in words what is not as it should be."""

    def __init__(
        self,
        env: lmdb.Environment,
        directory: Path,
        base: lmdb.Environment | None = None,
        base_directory: Path | None = None,
    ) -> None:
        self.directory = directory
        self._base_directory = base_directory
        self.notices: list[str] = []
        self.failures: dict[bytes, str] = {}  # by key: shards that `refresh` could not read, and why
        self._env, self._base = env, base
        self._retired: lmdb.Environment | None = None  # damaged; kept mapped, in case a Record is still around
        self._data_inode = _data_inode(directory)
        self._txns: list[lmdb.Transaction] = []
        self.snapshot = 0  # goes up when no Record that was got before may be used any more
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    # --- reading

    def renew(self) -> None:
        """See what other processes have committed. Every Record got before must not be used any more."""
        for txn in self._txns:
            txn.abort()
        self._txns = []
        self.snapshot += 1

    def _begin(self) -> None:
        envs = [self._env] if self._base is None else [self._env, self._base]
        self._txns = [env.begin(buffers=True) for env in envs]

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
        page_size = self._env.stat()["psize"]
        with self._env.begin(buffers=True) as reader:
            small: Any = reader.get(b"format")
            if small is None:
                raise lmdb_check.Damaged("its format is gone")
            for key, _ in changes:
                old: Any = reader.get(key)
                if old:
                    lmdb_check.check_extent(old, small, page_size)
        with self._env.begin(write=True) as txn:
            for key, value in changes:
                if value is not None:
                    txn.put(key, value)
                elif self._base is not None:
                    txn.put(key, b"")
                else:
                    txn.delete(key)

    def _leave(self, error: Exception) -> None:
        """Go on without the environment that gave this error: with a new one in its place, or a temporary one."""
        self._txns = []
        self.snapshot += 1
        if self._temporary is not None:
            raise IndexUnusable(f"the temporary index in {self.directory} cannot be used: {error}") from None
        if isinstance(error, _DAMAGE):
            with contextlib.suppress(OSError, lmdb.Error, lmdb_check.Damaged), _open_lock(self.directory):
                if _data_inode(self.directory) == self._data_inode:  # nobody else has replaced it yet
                    _remove(self.directory)
                self._retired, self._env = self._env, _open_env(self.directory)
                self._data_inode = _data_inode(self.directory)
                self._say(f"the index in {self.directory} is damaged ({error}); it is rebuilt")
                return
        else:
            self._base, self._base_directory = self._env, self.directory
        # LMDB calls it an input/output error when a write stops half-way.
        full = "; its disk is full" if _is_full(self.directory) else ""
        why = f"the index in {self.directory} cannot be used ({error}{full})"
        self._env, self.directory, self._temporary = _temporary_env()
        self._say(f"{why}; using a temporary index in {self.directory}, which ends with this process")

    def _say(self, notice: str) -> None:
        self.notices.append(notice)
        log.warning("%s", notice)

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
        with self._env.begin(buffers=True) as txn, txn.cursor() as cursor:
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
        return self._temporary is not None

    def discard(self) -> None:
        """Delete a temporary index that was suspended."""
        if self._temporary is not None:
            self._temporary.cleanup()

    def suspend(self) -> None:
        """Close the environments, so that processes forked from here on can `reopen` them.

        LMDB can neither be used over a fork nor be opened twice in one process.
        """
        self.renew()
        for env in (self._env, self._base, self._retired):
            if env is not None:
                env.close()

    def reopen(self) -> Index:
        """The same index in this process; a temporary one is not deleted by closing it."""
        notices: list[str] = []
        index = _open_at(self.directory, notices)
        for notice in (*notices, *index.notices):
            log.warning("%s", notice)
        if index._temporary is None and self._base_directory is not None:
            index._base, index._base_directory = _open_read_only(self._base_directory), self._base_directory
        index.notices[:0] = [*self.notices, *notices]
        return index

    def close(self) -> None:
        """End the use of the index; a temporary one is deleted. No Record may be used afterwards."""
        self.suspend()
        self.discard()


class PathUnion:
    """For each path in a set of shards the shards that may have it: candidates, to be asked themselves.

    Two columns sorted by the CRC-32 of the path, one pair for folders and one for everything else. Equal sums
    of different paths only cost a question more. 8 bytes a name.
    """

    def __init__(self, key: bytes, index: Index) -> None:
        self._key, self._index = key, index

    @staticmethod
    def build(count: int, records: Callable[[int], Record | None]) -> tuple[list[Sequence[int]], bytes]:
        """The fingerprints of the records that went into it, and the two columns, twice."""
        fingerprints: list[Sequence[int]] = []
        sums: dict[str, list[Any]] = {"folder": [], "entry": []}
        owners: dict[str, list[Any]] = {"folder": [], "entry": []}
        for number in range(count):
            one = records(number)
            fingerprints.append((0, 0, 0) if one is None else one.fingerprint)
            if one is None:
                continue
            tables = {"folder": ["folder.hash"], "entry": ["entry.hash"]}
            tables["entry"] += [f"alias{domain}.hash" for domain in range(3) if one.aliases[domain]]
            tables["folder"] += [f"alias{domain}.hash" for domain in range(3) if one.aliases[domain]]
            for kind, sections in tables.items():
                for section in sections:
                    sums[kind].append(one.array(section).copy())
                    owners[kind].append(np.full(len(sums[kind][-1]), number, dtype=np.uint32))
        parts = []
        for kind in ("folder", "entry"):
            hashes = np.concatenate([np.zeros(0, np.uint32), *sums[kind]]).astype("<u4")
            shards = np.concatenate([np.zeros(0, np.uint32), *owners[kind]]).astype("<u4")
            order = np.argsort(hashes, kind="stable")
            parts.append(len(hashes).to_bytes(8, "little") + hashes[order].tobytes() + shards[order].tobytes())
        return fingerprints, b"".join(parts)

    def columns(self) -> list[tuple[memoryview, memoryview]]:
        """(sums, shards) of folders and of entries, in place, valid until the index is renewed."""
        value = self._index.kept(self._key)
        at, found = 0, []
        for _ in range(2):
            size = 4 * int.from_bytes(value[at : at + 8], "little")
            at += 8
            found.append((value[at : at + size].cast("I"), value[at + size : at + 2 * size].cast("I")))
            at += 2 * size
        return found


class Claims:
    """Which shards want a path in one tree over all of them, exactly. 8 bytes a name."""

    def __init__(self, key: bytes, index: Index) -> None:
        self._key, self._index = key, index
        self._snapshot = -1
        self._tables: merged_names.Tables | None = None

    def tables(self) -> merged_names.Tables:
        """The tables in place, valid until the index is renewed."""
        if self._tables is None or self._snapshot != self._index.snapshot:
            self._tables = merged_names.parse(self._index.kept(self._key))
            self._snapshot = self._index.snapshot
        return self._tables


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


def _is_full(directory: Path) -> bool:
    try:
        found = os.statvfs(directory)
    except OSError:
        return False
    return found.f_bavail * found.f_frsize < 1 << 20


def _digest(path: bytes) -> bytes:
    return hashlib.blake2b(path, digest_size=16).digest()


# --- opening -----------------------------------------------------------------------------------------------


def open_index(directory: Path | None = None) -> Index:
    """Open the index in `directory` (default: `WDSFS_INDEX_DIR`, else the user's cache directory).

    Whatever is wrong with it, an index comes back; its `notices` say what was done. Raises IndexUnusable only
    when not even a temporary one can be made.
    """
    chosen = directory or (Path(os.environ["WDSFS_INDEX_DIR"]) if os.environ.get("WDSFS_INDEX_DIR") else None)
    home = Path(os.path.abspath(chosen or host.cache_dir()))
    notices: list[str] = []
    local = host.index_place(home, notices)
    index = _temporary_index(notices.pop(), None) if local is None else _open_at(local, notices)
    index.notices[:0] = notices
    return index


def _open_lock(home: Path) -> contextlib.AbstractContextManager[None]:
    """Keeps two processes from replacing a damaged index at the same time."""
    return host.locked(home / "open.lock")


def _open_at(home: Path, notices: list[str]) -> Index:
    try:
        trust.directory(home, create=True)
        with _open_lock(home):
            return Index(_open_or_replace(home, notices), home)
    except OSError as error:
        why = f"the index directory {home} cannot be used ({error.strerror})"
    except (lmdb.Error, lmdb_check.Damaged) as error:
        why = f"the index in {home} cannot be opened ({error})"
    return _temporary_index(why, home)


def _temporary_index(why: str, base_directory: Path | None) -> Index:
    env, directory, handle = _temporary_env()
    base = None if base_directory is None else _open_read_only(base_directory)
    index = Index(env, directory, base, base_directory)
    index._temporary = handle
    index.notices.append(f"{why}; using a temporary index in {directory}, which ends with this process")
    return index


def _open_or_replace(home: Path, notices: list[str]) -> lmdb.Environment:
    try:
        env = _open_env(home)
    except _DAMAGE as error:
        what = "not trusted" if isinstance(error, _NotTrusted) else "damaged"
        notices.append(f"the index in {home} is {what} ({error}); it is rebuilt")
    else:
        found = _format_of(env)
        if found == FORMAT:
            return env
        env.close()
        text = found.decode("ascii", "backslashreplace")
        notices.append(f"the index in {home} has format {text}; this is format {FORMAT.decode()}: it is rebuilt")
    _remove(home)
    return _open_env(home)


def _remove(home: Path) -> None:
    # Not truncated in place: another process may have the old file mapped.
    for name in _FILES:
        (home / name).unlink(missing_ok=True)


def _data_inode(home: Path) -> int:
    return os.stat(home / "data.mdb").st_ino


def _open_env(home: Path, read_only: bool = False) -> lmdb.Environment:
    """Open or create the environment. Raises lmdb.Error, pages.Damaged, OSError."""
    data = home / "data.mdb"
    for name in _FILES:
        _require_file(home / name)
    if data.exists() and data.stat().st_size:
        with _opened(data) as fd:
            lmdb_check.check_metas(fd)
    if not read_only:
        _reserve_locks(home)
    env = _map(home, read_only)
    try:
        with _opened(data) as fd:
            _check(env, fd)
        if not read_only:
            _share(home)
            env.reader_check()  # readers that were killed; as long as they count, no page is used again
            if not env.stat()["entries"]:
                with env.begin(write=True) as txn:
                    txn.put(b"format", FORMAT)
    except BaseException:
        env.close()
        raise
    return env


class _NotTrusted(lmdb_check.Damaged):
    """Somebody else can have written a file of the index; the text says how."""


def _require_file(path: Path) -> None:
    """See that LMDB, which opens its files by their paths, finds our own. Raises _NotTrusted.

    A link, or a file of another user, is left from a time when others could write to the directory.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if stat.S_ISDIR(found.st_mode):
        return  # LMDB says so
    try:
        trust.require_file(found, path.name)
    except trust.Untrusted as error:
        raise _NotTrusted(str(error.strerror).removesuffix(": remove it")) from None


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _reserve_locks(home: Path) -> None:
    """Make LMDB's lock file with all of its blocks.

    LMDB would make it of holes and write through a map: on a full disk that ends a process with SIGBUS. One that
    is there is not opened: to close it again would drop the locks of this process, if it has the index open.
    """
    if (home / "lock.mdb").exists():
        return
    new = home / "lock.new"
    try:
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, LOCK_BYTES)
        finally:
            os.close(fd)
        new.rename(home / "lock.mdb")
    except OSError:
        new.unlink(missing_ok=True)
        raise


def _share(home: Path) -> None:
    """Let the group of a directory that it may write (one that `trust` knows) write the index in it, too."""
    if os.stat(home).st_mode & stat.S_IWGRP:
        for name in (*_FILES, "open.lock"):
            with contextlib.suppress(PermissionError, FileNotFoundError):  # somebody else's, who has done it
                os.chmod(home / name, 0o660)


def _map(home: Path, read_only: bool) -> lmdb.Environment:
    for size in MAP_SIZES:
        try:
            return lmdb.open(
                str(home),
                map_size=size,
                max_readers=READERS,
                metasync=False,  # a power cut may cost the last commit, never the file
                readonly=read_only,
                # Without locks pages could be used again while they are read here: only for an image.
                lock=not (read_only and _is_image(home)),
                mode=0o600,
            )
        except (lmdb.MemoryError, MemoryError):
            continue
    raise OSError(errno.ENOMEM, "there is not enough address space: ulimit -v")


def _check(env: lmdb.Environment, fd: int) -> None:
    for _ in range(10):  # while others commit
        with env.begin() as txn:
            if lmdb_check.check(fd, txn.id()):
                return
    raise lmdb_check.Damaged("its meta pages do not fit together")


def _format_of(env: lmdb.Environment) -> bytes:
    with env.begin() as txn:
        return bytes(txn.get(b"format") or b"?")


def _open_read_only(home: Path) -> lmdb.Environment | None:
    """An index that cannot be written may still be read, from a read-only image for example."""
    try:
        if not (_is_image(home) or os.access(home / "lock.mdb", os.W_OK)):
            return None
        env = _open_env(home, read_only=True)
        if _format_of(env) == FORMAT:
            return env
        env.close()
    except (lmdb.Error, lmdb_check.Damaged, OSError):
        pass
    return None


def _is_image(home: Path) -> bool:
    """Whether nobody can write to the file system; not just: not here, or not we."""
    try:
        mount = host.mount_of(home)
    except OSError:
        return False
    return mount is not None and "ro" in mount.super_options


def _temporary_env() -> tuple[lmdb.Environment, Path, tempfile.TemporaryDirectory[str]]:
    handle = None
    try:
        handle = _temporary_directory()
        return _open_env(Path(handle.name)), Path(handle.name), handle
    except (OSError, lmdb.Error) as error:
        if handle is not None:
            handle.cleanup()
        raise IndexUnusable(f"no index can be made, not even a temporary one: {error}; set --index-dir") from None


def _temporary_directory() -> tempfile.TemporaryDirectory[str]:
    """In TMPDIR, or in /tmp when others could replace it there. Raises OSErrors."""
    handle = tempfile.TemporaryDirectory(prefix="wdsfs-index-")
    try:
        trust.directory(handle.name)
    except trust.Untrusted:
        handle.cleanup()
        handle = tempfile.TemporaryDirectory(prefix="wdsfs-index-", dir="/tmp")
    return handle
