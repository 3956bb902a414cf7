"""The index: records of shards, kept in LMDB between mounts and shared by every mount and command.

One environment holds, for each shard, a `Summary` (small, fixed, read for every shard of a set when it is
mounted) and a record (`record.py`, read in place when the shard is first used). The key is a digest of the
shard's absolute path; what makes an entry valid is its fingerprint, not the key.

The index is a cache: losing it costs time only. So whatever is wrong with its directory (missing, full,
read-only, damaged, another format, on a network file system, where LMDB's locks and maps are not safe), the
answer is a notice in words and an index that works, if need be a temporary one.

Threads: an `Index` is used by one thread at a time; `build_file` is a pure function for any process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
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

from wdsfs import pool, record, system
from wdsfs.errors import IndexUnusable, MissingShard, ShardError, UnreadableShard
from wdsfs.inodes import tag_of
from wdsfs.record import Record
from wdsfs.spec import Shard

FORMAT = b"1"
MAP_SIZES = (
    1 << 42,
    1 << 38,
    1 << 35,
    1 << 31,
)  # bytes of address space; smaller ones for a limited `ulimit -v`
READERS = 4096  # processes that may read one index at a time
COMMIT_SECONDS, COMMIT_BYTES = 1.0, 64 << 20  # how much work a crash may cost while indexing

_SUMMARY = struct.Struct("<QqQIIIIIIQII")


class Summary(NamedTuple):
    """What a mount needs to know of each shard before anyone looks inside."""

    size: int
    mtime_ns: int
    inode: int
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
        return self.size, self.mtime_ns, self.inode

    @property
    def tag(self) -> int:
        return tag_of(self.fingerprint)


def fingerprint_of(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def look(path: bytes) -> tuple[int, int, int]:
    """The fingerprint of the file at `path` now. Raises MissingShard, UnreadableShard."""
    try:
        return fingerprint_of(os.stat(path))
    except FileNotFoundError:
        raise MissingShard(f"{os.fsdecode(path)}: the shard is gone") from None
    except OSError as error:
        raise UnreadableShard(f"{os.fsdecode(path)}: {error.strerror}") from None


def build_file(path: bytes) -> bytes:
    """The record of the shard at `path`.

    Raises MissingShard or UnreadableShard when there is nothing to read; a damaged shard gives a record.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise MissingShard(f"{os.fsdecode(path)}: there is no such shard") from None
    except OSError as error:
        raise UnreadableShard(f"{os.fsdecode(path)}: {error.strerror}") from None
    try:
        while True:
            before = fingerprint_of(os.fstat(fd))
            data = record.build(fd, list(before))
            # A shard that is still being written changes while it is read: what counts is a quiet pass.
            if fingerprint_of(os.fstat(fd)) == before:
                return data
            time.sleep(0.2)
    except OSError as error:
        raise UnreadableShard(f"{os.fsdecode(path)}: {error.strerror}") from None
    finally:
        os.close(fd)


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
        self._env, self._base = env, base
        self._txns: list[lmdb.Transaction] = []
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    # --- reading

    def renew(self) -> None:
        """See what other processes have committed. Every Record got before must not be used any more."""
        for txn in self._txns:
            txn.abort()
        self._txns = []

    def _get(self, key: bytes) -> memoryview | None:
        if not self._txns:
            envs = [self._env] if self._base is None else [self._env, self._base]
            self._txns = [env.begin(buffers=True) for env in envs]
        for txn in self._txns:
            try:
                value: Any = txn.get(key)
            except lmdb.Error:  # a damaged page; the shard is indexed anew
                continue
            if value is not None:
                return memoryview(value)
        return None

    def summary(self, path: bytes) -> Summary | None:
        """The stored summary of the shard at `path`, valid or not."""
        value = self._get(b"s" + _digest(path))
        return Summary(*_SUMMARY.unpack_from(value)) if value is not None else None

    def record(self, path: bytes, fingerprint: tuple[int, int, int]) -> Record | None:
        """The record of the shard at `path`, in place, valid until `renew`; None when it has to be built."""
        value = self._get(b"r" + _digest(path))
        if value is None:
            return None
        try:
            found = Record(value)
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
            summary = self.summary(one.path)
            if summary is None or summary.fingerprint != fingerprint:
                yield one, fingerprint[0]

    # --- writing

    def forget(self, path: bytes) -> None:
        """Drop what is stored of a shard, although its fingerprint may fit."""
        self.renew()
        with contextlib.suppress(lmdb.Error), self._env.begin(write=True) as txn:
            txn.delete(b"s" + _digest(path))
            txn.delete(b"r" + _digest(path))

    def store(self, built: Sequence[tuple[bytes, bytes]]) -> None:
        """Keep records, given as (path, record), in one durable step.

        When the directory cannot take them, they go on in a temporary index, and a notice says so.
        """
        self.renew()
        try:
            self._put(built)
        except lmdb.Error as error:
            if self._temporary is not None:
                raise IndexUnusable(
                    f"the temporary index in {self.directory} cannot be written: {error}"
                ) from None
            self._move_to_temporary(f"the index in {self.directory} cannot be written ({error})")
            self._put(built)

    def _put(self, built: Sequence[tuple[bytes, bytes]]) -> None:
        with self._env.begin(write=True) as txn:
            for path, data in built:
                digest = _digest(path)
                txn.put(b"s" + digest, summarize(Record(data, verify=False)) + path)
                txn.put(b"r" + digest, data)

    def _move_to_temporary(self, why: str) -> None:
        self._base, self._base_directory = self._env, self.directory
        self._env, self.directory, self._temporary = _temporary_env()
        self.notices.append(f"{why}; using a temporary index in {self.directory}, which ends with this process")

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
        self._collect(pool.each(build_file, shards, jobs, executor), on_done)

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
                    on_done(one, None, str(result))
                    continue
                pending.append((one.path, result))
                size += len(result)
                on_done(one, Summary(*_SUMMARY.unpack(summarize(Record(result, verify=False)))), None)
                if time.monotonic() - since > COMMIT_SECONDS or size > COMMIT_BYTES:
                    self.store(pending)
                    pending, since, size = [], time.monotonic(), 0
        finally:
            if pending:
                self.store(pending)

    def prune(self) -> int:
        """Drop the records of shards that are no longer there; returns how many."""
        self.renew()
        gone = []
        with self._env.begin() as txn:
            for key, value in txn.cursor():
                if key[:1] == b"s" and not os.path.exists(value[_SUMMARY.size :]):
                    gone.append(key[1:])
        with self._env.begin(write=True) as txn:
            for digest in gone:
                txn.delete(b"s" + digest)
                txn.delete(b"r" + digest)
        return len(gone)

    # --- one tree over many shards

    def union(self, shards: Sequence[Shard], records: Callable[[int], Record | None]) -> Union:
        """Which shards may hold a path, for the whole set; made once and kept like the records."""
        state = hashlib.blake2b(digest_size=16)
        for one in shards:
            summary = self.summary(one.path)
            state.update(one.path + b"\0" + struct.pack("<QqQ", *(summary.fingerprint if summary else (0, 0, 0))))
        key = b"u" + _digest(b"\0".join(one.path for one in shards))
        value = self._get(key)
        if value is None or bytes(value[:16]) != state.digest() or zlib.crc32(value[20:]) != _crc_at(value):
            body = Union.build(len(shards), records)
            data = state.digest() + zlib.crc32(body).to_bytes(4, "little") + body
            self.renew()
            try:
                with self._env.begin(write=True) as txn:
                    txn.put(key, data)
            except lmdb.Error as error:
                self._move_to_temporary(f"the index in {self.directory} cannot be written ({error})")
                with self._env.begin(write=True) as txn:
                    txn.put(key, data)
        return Union(key, self._get)

    def discard(self) -> None:
        """Delete a temporary index that was suspended."""
        if self._temporary is not None:
            self._temporary.cleanup()

    def suspend(self) -> None:
        """Close the environments, so that processes forked from here on can `reopen` them.

        LMDB can neither be used over a fork nor be opened twice in one process.
        """
        self.renew()
        self._env.close()
        if self._base is not None:
            self._base.close()

    def reopen(self) -> Index:
        """The same index in this process; a temporary one is not deleted by closing it. Raises lmdb.Error."""
        base = None if self._base_directory is None else _open_read_only(self._base_directory)
        index = Index(_open_env(self.directory), self.directory, base, self._base_directory)
        index.notices = self.notices
        return index

    def close(self) -> None:
        """End the use of the index; a temporary one is deleted. No Record may be used afterwards."""
        self.renew()
        if self._temporary is not None:
            self._temporary.cleanup()


class Union:
    """For each path in a set of shards the shards that may have it: candidates, to be asked themselves.

    Two columns sorted by the CRC-32 of the path, one pair for folders and one for everything else. Equal sums
    of different paths only cost a question more. 8 bytes a name.
    """

    def __init__(self, key: bytes, get: Callable[[bytes], memoryview | None]) -> None:
        self._key, self._get = key, get

    @staticmethod
    def build(count: int, records: Callable[[int], Record | None]) -> bytes:
        sums: dict[str, list[Any]] = {"folder": [], "entry": []}
        owners: dict[str, list[Any]] = {"folder": [], "entry": []}
        for number in range(count):
            one = records(number)
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
        return b"".join(parts)

    def columns(self) -> list[tuple[memoryview, memoryview]]:
        """(sums, shards) of folders and of entries, in place, valid until the index is renewed."""
        value = self._get(self._key)
        if value is None:
            raise IndexUnusable("the index of the merged tree is gone; mount again")
        at, found = 20, []
        for _ in range(2):
            size = 4 * int.from_bytes(value[at : at + 8], "little")
            at += 8
            found.append((value[at : at + size].cast("I"), value[at + size : at + 2 * size].cast("I")))
            at += 2 * size
        return found


def _crc_at(value: memoryview) -> int:
    return int.from_bytes(value[16:20], "little")


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


def _digest(path: bytes) -> bytes:
    return hashlib.blake2b(path, digest_size=16).digest()


# --- opening -----------------------------------------------------------------------------------------------


def open_index(directory: Path | None = None) -> Index:
    """Open the index in `directory` (default: `WDSFS_INDEX_DIR`, else the user's cache directory).

    Whatever is wrong with it, an index comes back; its `notices` say what was done. Raises IndexUnusable only
    when not even a temporary one can be made.
    """
    chosen = directory or (Path(os.environ["WDSFS_INDEX_DIR"]) if os.environ.get("WDSFS_INDEX_DIR") else None)
    home = chosen or system.cache_dir()
    notices: list[str] = []
    kind = system.filesystem_type(home)
    if system.is_network(kind):
        local = system.node_local_dir()
        notices.append(f"{home} is on a network file system ({kind}), where LMDB is not safe; using {local}")
        home = local
    index = _open_at(home, notices)
    index.notices[:0] = notices
    return index


def _open_at(home: Path, notices: list[str]) -> Index:
    try:
        home.mkdir(parents=True, exist_ok=True)
        with _locked(home):
            return Index(_open_or_replace(home, notices), home)
    except OSError as error:
        why = f"the index directory {home} cannot be used ({error.strerror})"
    except lmdb.Error as error:
        why = f"the index in {home} cannot be opened ({error})"
    env, temporary, handle = _temporary_env()
    index = Index(env, temporary, _open_read_only(home), home)
    index._temporary = handle
    index.notices.append(f"{why}; using a temporary index in {temporary}, which ends with this process")
    return index


@contextlib.contextmanager
def _locked(home: Path) -> Iterator[None]:
    """Keep two processes from replacing a damaged index at the same time."""
    fd = os.open(home / "open.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _open_or_replace(home: Path, notices: list[str]) -> lmdb.Environment:
    try:
        env = _open_env(home)
        found = _format_of(env)
        if found is None or found == FORMAT:
            return env
        notices.append(
            f"the index in {home} has format {found.decode()}; this is format {FORMAT.decode()}: it is rebuilt"
        )
    except (lmdb.DiskError, lmdb.ReadonlyError):
        raise
    except lmdb.Error as error:
        notices.append(f"the index in {home} is damaged ({error}); it is rebuilt")
    # Not truncated in place: another process may have the old file mapped.
    for name in ("data.mdb", "lock.mdb"):
        (home / name).unlink(missing_ok=True)
    return _open_env(home)


def _open_env(home: Path, read_only: bool = False) -> lmdb.Environment:
    """Open or create the environment. Raises lmdb.Error, OSError."""
    for size in MAP_SIZES:
        try:
            env = lmdb.open(
                str(home),
                map_size=size,
                max_readers=READERS,
                metasync=False,  # a power cut may cost the last commit, never the file
                readonly=read_only,
                lock=not read_only,
                mode=0o600,
            )
            break
        except (lmdb.MemoryError, MemoryError):
            if size == MAP_SIZES[-1]:
                raise
    # LMDB trusts the length of its file; reading past a cut would end the process with SIGBUS.
    pages = env.info()["last_pgno"] + 1
    if pages > 2 and pages * env.stat()["psize"] > os.stat(home / "data.mdb").st_size:
        env.close()
        raise lmdb.CorruptedError("its file is cut off")
    return env


def _format_of(env: lmdb.Environment) -> bytes | None:
    """The format of an environment; a new one gets ours."""
    with env.begin() as txn:
        found = txn.get(b"format")
        if found is None and env.stat()["entries"] == 0:
            found = None
        elif found is None:
            return b"0"
    if found is None and not env.flags().get("readonly"):
        with env.begin(write=True) as txn:
            txn.put(b"format", FORMAT)
    return found


def _open_read_only(home: Path) -> lmdb.Environment | None:
    """An index that cannot be written may still be read, from a read-only image for example."""
    try:
        if not os.access(home / "data.mdb", os.R_OK):
            return None
        env = _open_env(home, read_only=True)
        return env if _format_of(env) == FORMAT else None
    except (lmdb.Error, OSError):
        return None


def _temporary_env() -> tuple[lmdb.Environment, Path, tempfile.TemporaryDirectory[str]]:
    try:
        handle = tempfile.TemporaryDirectory(prefix="wdsfs-index-")
        env = _open_env(Path(handle.name))
        _format_of(env)
    except (OSError, lmdb.Error) as error:
        raise IndexUnusable(f"no index can be made, not even a temporary one: {error}; set --index-dir") from None
    return env, Path(handle.name), handle
