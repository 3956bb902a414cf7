"""Opens and checks the directory of the index; replaces a bad one, or leaves it for a temporary one.

The index is a cache: losing it costs time only. So if anything is wrong with its directory (missing, full,
read-only, damaged, another format, on a network file system, where LMDB's locks and maps are not safe), the result
is a notice and an index that works: a new one in the same place, or a temporary one. This holds when it is opened
(`open_directory`) and when it fails later (`IndexDirectory.leave`).

LMDB maps its files and trusts their content. So before it opens them, their owner is checked (`trust`), their
blocks are reserved, and `lmdb_check.py` looks at their structure.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import tempfile
import threading
from pathlib import Path

import lmdb

from wdsfs import host, trust
from wdsfs.errors import IndexUnusable
from wdsfs.formats import Format
from wdsfs.index import lmdb_check
from wdsfs.shared_settings import setting

INDEX = Format("an index directory", (2,))
_FORMAT = b"%d" % INDEX.version
MAP_SIZES = (1 << 42, 1 << 38, 1 << 35, 1 << 31)  # bytes of address space; the smaller ones for a `ulimit -v`
READERS = 4096  # processes that may read one index at a time
LOCK_BYTES = 64 * READERS + 4096  # of LMDB's lock file, a cache line for each reader

# Errors that mean that the file is damaged. Anything else (no space, no memory, no permission ...) is no reason to
# discard its content.
DAMAGE = (
    *(
        lmdb_check.Damaged,
        lmdb.CorruptedError,
        lmdb.PageNotFoundError,
        lmdb.InvalidError,
        lmdb.VersionMismatchError,
    ),
    *(lmdb.CursorFullError, lmdb.PageFullError, lmdb.IncompatibleError),
)
_FILES = ("data.mdb", "lock.mdb")


def is_full(directory: Path) -> bool:
    """Return True if the disk of `directory` has less than 1 MiB left."""
    try:
        disk = os.statvfs(directory)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < 1 << 20


def open_or_replace(home: Path, notices: list[str]) -> lmdb.Environment:
    """Return the environment in `home`; a new one, and a notice, if it is damaged or of another format.

    REQUIRES: the lock of `index_directory` is held. Raises lmdb.Error, lmdb_check.Damaged, OSError.
    """
    try:
        env = open_env(home)
    except DAMAGE as error:
        what = "not trusted" if isinstance(error, _NotTrusted) else "damaged"
        notices.append(f"the index in {home} is {what} ({error}), so it is rebuilt")
    else:
        version = _version_of(env)
        if version == _FORMAT:
            return env
        env.close()
        if not version.isdigit():  # an index of another release is made again without a notice: it is a cache
            notices.append(f"the files in {home} are not an index of wdsfs, so they are replaced")
    remove(home)
    return open_env(home)


def remove(home: Path) -> None:
    """Remove the environment's files; the next `open_env` makes new ones."""
    # Not truncated in place: another process may have the old file mapped.
    for name in _FILES:
        (home / name).unlink(missing_ok=True)


def data_inode(home: Path) -> int:
    """Return the inode of the data file, which changes when another process replaces the environment.

    Not a Fingerprint: size and times change with every transaction.
    """
    return os.stat(home / "data.mdb").st_ino


def open_env(home: Path) -> lmdb.Environment:
    """Open or create the environment. Raises lmdb.Error, lmdb_check.Damaged, OSError."""
    data = home / "data.mdb"
    for name in _FILES:
        _require_file(home / name)
    if data.exists() and data.stat().st_size:
        with data.open("rb") as file:
            lmdb_check.check_metas(file.fileno())
    _reserve_locks(home)
    env = _map(home)
    try:
        with data.open("rb") as file:
            _check(env, file.fileno())
        _share(home)
        env.reader_check()  # readers that were killed; as long as they are listed, LMDB reuses no page
        if not env.stat()["entries"]:
            with env.begin(write=True) as txn:
                txn.put(b"format", _FORMAT)
    except BaseException:
        env.close()
        raise
    return env


class _NotTrusted(lmdb_check.Damaged):
    """A file of the index that another user may have written; the text says how."""


def _require_file(path: Path) -> None:
    """Check that LMDB, which opens its files by their paths, finds our own. Raises _NotTrusted.

    A link, or a file of another user, was put there while others could write to the directory.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if stat.S_ISDIR(status.st_mode):
        return  # LMDB reports it
    try:
        trust.require_file(status, path.name)
    except trust.Untrusted as error:
        raise _NotTrusted(str(error.strerror).removesuffix(": remove it")) from None


def _reserve_locks(home: Path) -> None:
    """Make LMDB's lock file with all of its blocks.

    LMDB would make it of holes and write through a map: on a full disk that ends a process with SIGBUS. An
    existing one is not opened: closing it again would drop the locks of this process, if it has the index open.
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
    """Make the index writable for the group of a directory, accepted by `trust`, in which the group may write."""
    if os.stat(home).st_mode & stat.S_IWGRP:
        for name in (*_FILES, "open.lock"):
            with contextlib.suppress(PermissionError, FileNotFoundError):  # another user's file, who has done it
                os.chmod(home / name, 0o660)


def _map(home: Path) -> lmdb.Environment:
    for size in MAP_SIZES:
        try:
            return lmdb.open(
                str(home),
                map_size=size,
                max_readers=READERS,
                metasync=False,  # a power cut may cost the last commit, never the file
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


def _version_of(env: lmdb.Environment) -> bytes:
    with env.begin() as txn:
        return bytes(txn.get(b"format") or b"")


def temporary_env() -> tuple[lmdb.Environment, Path, tempfile.TemporaryDirectory[str]]:
    """Return a new environment, its directory, and the object that removes that. Raises IndexUnusable."""
    handle = None
    try:
        handle = _temporary_directory()
        return open_env(Path(handle.name)), Path(handle.name), handle
    except (OSError, lmdb.Error) as error:
        if handle is not None:
            handle.cleanup()
        raise IndexUnusable(f"no index can be made, not even a temporary one: {error}; set --index-dir") from None


def _temporary_directory() -> tempfile.TemporaryDirectory[str]:
    """Make a temporary directory in TMPDIR, or in /tmp if others could replace it in TMPDIR. Raises OSErrors."""
    handle = tempfile.TemporaryDirectory(prefix="wdsfs-index-")
    try:
        trust.directory(handle.name)
    except trust.Untrusted:
        handle.cleanup()
        handle = tempfile.TemporaryDirectory(prefix="wdsfs-index-", dir="/tmp")
    return handle


log = logging.getLogger(__name__)

_open_homes: dict[Path, IndexDirectory] = {}  # by path; closed ones are opened again
_reopening = threading.Lock()  # LMDB refuses a second environment, and two threads may open one at once


class IndexDirectory:
    """The LMDB environments of an index: `env` in the directory `path`, and perhaps one on a `full` disk.

    The full one is read on: `env` is then a temporary one, whose values hide those in it. `notices` are messages
    about what is wrong. What the values mean, and which transactions are open, is for `index/store.py`.
    """

    def __init__(
        self,
        env: lmdb.Environment,
        path: Path,
        notices: list[str],
        temporary: tempfile.TemporaryDirectory[str] | None = None,
    ) -> None:
        self._env: lmdb.Environment | None = env
        self.path, self.notices = path, notices
        self.full: lmdb.Environment | None = None
        self._full_path: Path | None = None
        self._temporary = temporary
        self._retired: lmdb.Environment | None = None  # damaged; kept mapped, in case a Record is still around
        self._data_inode = data_inode(path)
        self._maker, self._users = os.getpid(), 1

    @property
    def env(self) -> lmdb.Environment:
        """The environment to which new values are written, opened again after `close`."""
        if self._env is None:
            with _reopening:
                if self._env is None:
                    self._reopen()
        assert self._env is not None
        return self._env

    def _reopen(self) -> None:
        fresh = self.reopened()
        if fresh._temporary is not None:
            _open_homes.pop(self.path, None)
        self._discard_here()
        self._temporary = self._temporary or fresh._temporary
        self.full, self.path, self._data_inode = fresh.full, fresh.path, fresh._data_inode
        self._env = fresh._env  # last: others use it at once

    def join(self) -> IndexDirectory:
        """Return this directory for one more user in this process."""
        self._users += 1
        return self

    def left(self) -> bool:
        """Note that a user of `join` has left; True if it was the last one."""
        self._users -= 1
        return self._users == 0

    def environments(self) -> list[lmdb.Environment]:
        """Return the environments in which to look for a value, in this order."""
        env = self.env
        return [env] if self.full is None else [env, self.full]

    @property
    def temporary(self) -> bool:
        """True if this index is deleted at the end of the process that made it."""
        return self._temporary is not None

    def leave(self, error: Exception, *, can_read: bool) -> None:
        """Replace the environment that gave this error by a new one in its place, or by a temporary one.

        If it `can_read` still, the environment is read beside the temporary one. Raises IndexUnusable if the
        temporary one gave the error.
        """
        if self._temporary is not None:
            raise IndexUnusable(f"the temporary index in {self.path} cannot be used: {error}") from None
        if isinstance(error, DAMAGE):
            with contextlib.suppress(OSError, lmdb.Error, lmdb_check.Damaged), _lock(self.path):
                if data_inode(self.path) == self._data_inode:  # no other process has replaced it yet
                    remove(self.path)
                self._retired, self._env = self.env, open_env(self.path)
                self._data_inode = data_inode(self.path)
                self._say(f"the index in {self.path} is damaged ({error}), so it is rebuilt")
                return
        elif can_read:
            self.full, self._full_path = self.env, self.path
        # LMDB calls it an input/output error when a write stops half-way.
        full = ": the disk is full" if is_full(self.path) else ""
        why = f"the index in {self.path} cannot be used ({error}{full})"
        _open_homes.pop(self.path, None)
        self._env, self.path, self._temporary = temporary_env()
        self._say(_uses_temporary(why, self.path))

    def _say(self, notice: str) -> None:
        self.notices.append(notice)
        log.warning("%s", notice)

    def log_notices(self) -> None:
        """Log the notices as warnings."""
        for notice in self.notices:
            log.warning("%s", notice)

    def close(self) -> None:
        """Close the environments; a temporary directory stays. REQUIRES: no transaction is open."""
        for env in (self._env, self.full, self._retired):
            if env is not None:
                env.close()
        self._env = self.full = self._retired = None

    def discard(self) -> None:
        """Give up a directory that was closed; a temporary one is deleted."""
        _open_homes.pop(self.path, None)
        self._discard_here()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _discard_here(self) -> None:
        """Leave the temporary directory of a parent to the parent."""
        if self._temporary is not None and self._maker != os.getpid():
            self._temporary._finalizer.detach()  # type: ignore[attr-defined]
            self._temporary = None

    def reopened(self) -> IndexDirectory:
        """Return the same, after `close`, in this process, which does not delete a temporary directory."""
        home = _open_at(self.path, [])
        home.log_notices()
        if home._temporary is None and self._full_path is not None:
            with contextlib.suppress(OSError, *DAMAGE, lmdb.Error):
                home.full, home._full_path = open_env(self._full_path), self._full_path
        home.notices[:0] = self.notices
        return home


def open_directory(directory: Path | None = None) -> IndexDirectory:
    """Open the index in `directory` (default: `WDSFS_INDEX_DIR`, else the user's cache directory).

    If anything is wrong with it, the notices say what was done. Raises IndexUnusable only if even a temporary
    one cannot be made. A directory that this process has open already is shared, as LMDB requires.
    """
    chosen = directory or (Path(setting("INDEX_DIR")) if setting("INDEX_DIR") else None)
    home = Path(os.path.abspath(chosen or host.cache_dir()))
    notices: list[str] = []
    local = host.index_place(home, notices)
    if local is None:
        return _open_temporary(notices.pop(), notices)
    if local in _open_homes:
        return _open_homes[local].join()
    opened = _open_at(local, notices)
    if not opened.temporary:
        _open_homes[local] = opened
    return opened


def _lock(home: Path) -> contextlib.AbstractContextManager[None]:
    """Keep two processes from replacing a damaged index at the same time."""
    return host.locked(home / "open.lock")


def _open_at(home: Path, notices: list[str]) -> IndexDirectory:
    try:
        trust.directory(home, create=True)
        with _lock(home):
            return IndexDirectory(open_or_replace(home, notices), home, notices)
    except OSError as error:
        why = f"the index directory {home} cannot be used ({error.strerror}{_way_out(error)})"
    except (lmdb.Error, lmdb_check.Damaged) as error:
        why = f"the index in {home} cannot be opened ({error})"
    return _open_temporary(why, notices)


def _way_out(error: OSError) -> str:
    return "; an index to be read only is a file: wdsfs index -o" if error.errno == errno.EROFS else ""


def _open_temporary(why: str, notices: list[str]) -> IndexDirectory:
    env, path, handle = temporary_env()
    return IndexDirectory(env, path, [*notices, _uses_temporary(why, path)], handle)


def _uses_temporary(why: str, path: Path) -> str:
    return f"{why}; using a temporary index in {path}, which ends with this process"
