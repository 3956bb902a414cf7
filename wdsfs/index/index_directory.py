"""Where an index is opened, and what happens when its directory is bad.

The index is a cache: losing it costs time only. So if anything is wrong with its directory (missing, full,
read-only, damaged, another format, on a network file system, where LMDB's locks and maps are not safe), the result
is a notice and an index that works: a new one in the same place, or a temporary one. This
holds when it is opened (`open_directory`) and when it fails later (`IndexDirectory.leave`). How one environment is
opened and checked is in `index/lmdb_env.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from pathlib import Path

import lmdb

from wdsfs import host, trust
from wdsfs.errors import IndexUnusable
from wdsfs.index import lmdb_check, lmdb_env

log = logging.getLogger(__name__)


class IndexDirectory:
    """The LMDB environments of an index: `env` in the directory `path`, and perhaps a `base`.

    A base is an index that can be read but not written; values in `env` hide those in it. `notices` are messages
    about what is wrong. What the values mean, and which transactions are open, is for `index/store.py`.
    """

    def __init__(
        self,
        env: lmdb.Environment,
        path: Path,
        notices: list[str],
        base_path: Path | None = None,
        temporary: tempfile.TemporaryDirectory[str] | None = None,
    ) -> None:
        self.env, self.path, self.notices = env, path, notices
        self._base_path = base_path
        self.base = None if base_path is None else lmdb_env.open_read_only(base_path)
        self._temporary = temporary
        self._retired: lmdb.Environment | None = None  # damaged; kept mapped, in case a Record is still around
        self._data_inode = lmdb_env.data_inode(path)

    def environments(self) -> list[lmdb.Environment]:
        """The environments in which to look for a value, in this order."""
        return [self.env] if self.base is None else [self.env, self.base]

    @property
    def temporary(self) -> bool:
        """True if this index is deleted at the end of the process that made it."""
        return self._temporary is not None

    def leave(self, error: Exception) -> None:
        """Replace the environment that gave this error by a new one in its place, or by a temporary one.

        Raises IndexUnusable if the temporary one gave it.
        """
        if self._temporary is not None:
            raise IndexUnusable(f"the temporary index in {self.path} cannot be used: {error}") from None
        if isinstance(error, lmdb_env.DAMAGE):
            with contextlib.suppress(OSError, lmdb.Error, lmdb_check.Damaged), _lock(self.path):
                if lmdb_env.data_inode(self.path) == self._data_inode:  # no other process has replaced it yet
                    lmdb_env.remove(self.path)
                self._retired, self.env = self.env, lmdb_env.open_env(self.path)
                self._data_inode = lmdb_env.data_inode(self.path)
                self._say(f"the index in {self.path} is damaged ({error}); it is rebuilt")
                return
        else:
            self.base, self._base_path = self.env, self.path
        # LMDB calls it an input/output error when a write stops half-way.
        full = "; its disk is full" if lmdb_env.is_full(self.path) else ""
        why = f"the index in {self.path} cannot be used ({error}{full})"
        self.env, self.path, self._temporary = lmdb_env.temporary_env()
        self._say(_uses_temporary(why, self.path))

    def _say(self, notice: str) -> None:
        self.notices.append(notice)
        log.warning("%s", notice)

    def log_notices(self) -> None:
        for notice in self.notices:
            log.warning("%s", notice)

    def close(self) -> None:
        """Close the environments; a temporary directory stays. REQUIRES: no transaction is open."""
        for env in (self.env, self.base, self._retired):
            if env is not None:
                env.close()

    def discard(self) -> None:
        """Delete a temporary directory that was closed."""
        if self._temporary is not None:
            self._temporary.cleanup()

    def reopened(self) -> IndexDirectory:
        """The same, after `close`, in this process; a temporary directory is not deleted by it."""
        home = _open_at(self.path, [])
        home.log_notices()
        if home._temporary is None and self._base_path is not None:
            home.base, home._base_path = lmdb_env.open_read_only(self._base_path), self._base_path
        home.notices[:0] = self.notices
        return home


def open_directory(directory: Path | None = None) -> IndexDirectory:
    """Open the index in `directory` (default: `WDSFS_INDEX_DIR`, else the user's cache directory).

    If anything is wrong with it, the notices say what was done. Raises IndexUnusable only if even a temporary
    one cannot be made.
    """
    chosen = directory or (Path(os.environ["WDSFS_INDEX_DIR"]) if os.environ.get("WDSFS_INDEX_DIR") else None)
    home = Path(os.path.abspath(chosen or host.cache_dir()))
    notices: list[str] = []
    local = host.index_place(home, notices)
    return _open_temporary(notices.pop(), None, notices) if local is None else _open_at(local, notices)


def _lock(home: Path) -> contextlib.AbstractContextManager[None]:
    """Keeps two processes from replacing a damaged index at the same time."""
    return host.locked(home / "open.lock")


def _open_at(home: Path, notices: list[str]) -> IndexDirectory:
    try:
        trust.directory(home, create=True)
        with _lock(home):
            return IndexDirectory(lmdb_env.open_or_replace(home, notices), home, notices)
    except OSError as error:
        why = f"the index directory {home} cannot be used ({error.strerror})"
    except (lmdb.Error, lmdb_check.Damaged) as error:
        why = f"the index in {home} cannot be opened ({error})"
    return _open_temporary(why, home, notices)


def _open_temporary(why: str, base_path: Path | None, notices: list[str]) -> IndexDirectory:
    env, path, handle = lmdb_env.temporary_env()
    return IndexDirectory(env, path, [*notices, _uses_temporary(why, path)], base_path, handle)


def _uses_temporary(why: str, path: Path) -> str:
    return f"{why}; using a temporary index in {path}, which ends with this process"
