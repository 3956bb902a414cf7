"""Where caches lie, and how much of a disk they may take: what the cache of unpacked shards and that of remote
objects have in common.

`WDSFS_CACHE_DIR` names the place of both, else they lie beside the index; `WDSFS_CACHE_SIZE` is the limit of each.
By the environment, because all processes of a mount or a command have to agree.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

from wdsfs import host, trust
from wdsfs.errors import IndexUnusable, UsageError

DISK_KEPT = 4 << 30  # bytes of a disk that caches leave to others; of a small one 5 %
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(text: str) -> int:
    """`800M`, `32G`, or plain bytes. Raises UsageError."""
    number, unit = (text[:-1], text[-1:].upper()) if text[-1:].isalpha() else (text, "")
    if unit not in _UNITS or not number.isascii() or not number.isdigit():
        raise UsageError(f"{text!r} is no size: write bytes, or a number with K, M, G or T, for example 32G")
    return int(number) * _UNITS[unit]


def limit() -> int | None:
    """The limit that was set for each cache in bytes, if there is one. Raises UsageError."""
    size = os.environ.get("WDSFS_CACHE_SIZE")
    return parse_size(size) if size else None


def place(what: str, beside_index: str, in_given: str) -> Path:
    """The directory of a cache: below that of the index, or of the one that `WDSFS_CACHE_DIR` names.

    `what` is its content, for the message. Raises UsageError, IndexUnusable.
    """
    given, index = os.environ.get("WDSFS_CACHE_DIR"), os.environ.get("WDSFS_INDEX_DIR")
    if given:
        directory = Path(os.path.abspath(given)) / in_given
    else:
        directory = _beside(Path(os.path.abspath(index or host.cache_dir()))) / beside_index
    try:
        trust.directory(directory, tighten=not given)
    except trust.Untrusted as error:
        # No other place is taken: it might have too little room.
        raise IndexUnusable(f"the cache of {what} is not used, since {error.strerror}") from None
    except OSError:
        pass  # not there yet; any other error is reported when a file in it is opened
    return directory


@functools.lru_cache(8)
def _beside(index: Path) -> Path:
    """Where the index goes, which may be another place than the one that was named. Raises IndexUnusable."""
    notices: list[str] = []
    found = host.index_place(index, notices)
    if found is None:
        raise IndexUnusable("; ".join(notices))
    return host.beside_index(found)


def disk_room(directory: Path) -> int:
    """Bytes of the disk that are free and not left to others. Raises OSError."""
    found = os.statvfs(directory)
    return found.f_frsize * (found.f_bavail - min(found.f_blocks // 20, DISK_KEPT // found.f_frsize))


def is_at(fd: int, path: str | Path) -> bool:
    """True if a file is still the one with this name."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
