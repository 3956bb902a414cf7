"""The tree of a set as a file system of fsspec, `wdsfs://`, for tools that read by URLs."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat as modes
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, NoReturn

from fsspec.spec import AbstractFileSystem

from wdsfs.errors import UsageError, WdsfsError
from wdsfs.library.files import Tree
from wdsfs.library.opened_set import Shards

_SCHEMES = {"gcs": "gs", "abfs": "az", "local": "file"}  # of fsspec, where ours has another name

# Options of every file system of fsspec; all others are those of the tree.
_OF_ALL = {
    *("use_listings_cache", "listings_expiry_time", "max_paths"),
    *("skip_instance_cache", "asynchronous", "loop", "batch_size"),
}


@contextlib.contextmanager
def _os_errors(path: str | None) -> Iterator[None]:
    """Turn errors of wdsfs into those of the operating system, which tools expect of a file system.

    Those about options stay UsageErrors. None: more than one file may be at fault, and the message says which.
    """
    try:
        yield
    except UsageError:
        raise
    except WdsfsError as error:
        raise OSError(error.errno, str(error), path) from error


class WdsfsFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The files of a set, read only: `fsspec.filesystem("wdsfs", shards="train-{000..009}.tar")`.

    In a chained URL the shards come last: `wdsfs://train-000/a/jpg::train-{000..009}.tar`. They are read by wdsfs,
    also from stores. `layout` and all options are those of `wdsfs.tree`.
    """

    protocol = "wdsfs"
    root_marker = ""

    def __init__(
        self,
        shards: Shards | None = None,
        layout: str = "samples",
        *,
        fo: str = "",
        target_protocol: str | None = None,
        target_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        of_all = {name: options.pop(name) for name in options.keys() & _OF_ALL}
        super().__init__(**of_all)
        if shards is None:
            shards = _spec_of(fo, target_protocol, target_options)
        with _os_errors(None):
            self._tree = Tree(shards, layout, **options)

    # --- names

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        stripped = super()._strip_protocol(path)
        return stripped.lstrip("/") if isinstance(stripped, str) else stripped

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        with _os_errors(path):
            return _info(path, self._tree.stat(path))

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        info = self.info(path)
        if info["type"] != "directory":
            return [info] if detail else [path]
        below = path + "/" if path else ""
        with _os_errors(path):
            if not detail:
                return [below + name for name in self._tree.listdir(path)]
            entries = self._tree.scandir(path)
        return [
            self.info(below + entry.name)
            if modes.S_ISLNK(entry.stat.st_mode)
            else _info(below + entry.name, entry.stat)
            for entry in entries
        ]

    def created(self, path: str) -> datetime:
        return self.modified(path)

    def modified(self, path: str) -> datetime:
        return datetime.fromtimestamp(self.info(path)["mtime"], UTC)

    # --- content

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        if mode != "rb":
            self._refuse(path)
        with _os_errors(path):
            return _Buffered(self._tree.open(path, buffering=0))  # type: ignore[arg-type]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        path = self._strip_protocol(path)
        size = self.info(path)["size"] if (start or 0) < 0 or (end or 0) < 0 else 0
        begin = max(size + start, 0) if start is not None and start < 0 else start or 0
        stop = size + end if end is not None and end < 0 else end
        with _os_errors(path):
            return self._tree.read(path, begin, None if stop is None else max(stop - begin, 0))

    def _refuse(self, path: str, *_: Any, **__: Any) -> NoReturn:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    mkdir = makedirs = rmdir = rm = rm_file = _rm = cp_file = mv = touch = pipe_file = put_file = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        _, (shards, arguments) = self._tree.__reduce__()
        base = {name: value for name, value in self.storage_options.items() if name in _OF_ALL}
        return _sent, (shards, base | arguments)

    def close(self) -> None:
        """Close the shards. Later instances with the same arguments open them again."""
        self._tree.close()
        self._cache.pop(self._fs_token, None)


class _Buffered(io.BufferedReader):
    """A file with its size (bytes), which `read_block` and Dask ask for."""

    @property
    def size(self) -> int:
        return self.raw.size  # type: ignore[attr-defined, no-any-return]


def _sent(shards: list[str], arguments: dict[str, Any]) -> WdsfsFileSystem:
    return WdsfsFileSystem(shards, **arguments)


def _info(path: str, status: os.stat_result) -> dict[str, Any]:
    return {
        "name": path,
        "type": "directory" if modes.S_ISDIR(status.st_mode) else "file",
        "size": status.st_size,
        "mode": status.st_mode,
        "ino": status.st_ino,
        "mtime": status.st_mtime,
    }


def _spec_of(fo: str, protocol: str | None, options: dict[str, Any] | None) -> str:
    """Return the shards of a chained URL, whose last part fsspec has taken apart. Raises UsageError."""
    if not fo:
        raise UsageError("no shards are named: give shards=, or wdsfs://PATH::SHARDS")
    if options:
        names = ", ".join(options)
        raise UsageError(f"wdsfs reads {fo} itself, so options of {protocol} mean nothing to it: {names}")
    scheme = _SCHEMES.get(protocol or "file", protocol or "file")
    return fo if scheme == "file" or "://" in fo else f"{scheme}://{fo}"
