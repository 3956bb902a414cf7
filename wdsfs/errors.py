"""The exceptions of wdsfs, each with the errno a tool sees and the exit code a shell sees.

::

    WdsfsError                 EIO        1
    |-- UsageError             EINVAL     2   a bad option or argument
    |   |-- NotInstalled       EINVAL     2   a part of wdsfs that the request needs was left out
    |   '-- SpecError          EINVAL     2   a shard specification that means nothing
    |       '-- NoMatch        EINVAL     3   a glob or a directory without a shard
    |-- ShardError             EIO        3
    |   |-- MissingShard       EIO        3   a shard of the set is not there
    |   |   '-- MissingObject  EIO        3   its store has no such object
    |   |-- UnreadableShard    EIO        3   it is there, but cannot be opened or read
    |   |   |-- DeniedObject   EACCES     3   its store refuses it to these credentials
    |   |   |-- CacheFull      EIO        3   the cache has no room for all of its bytes
    |   |   |-- NoRanges       EIO        3   its server sends whole objects only
    |   |   |-- NotATar        EIO        3   it is another file, such as a failed download leaves
    |   |   '-- Unreachable    EIO        3   its store does not answer, or not as it should
    |   |-- CorruptShard       EIO        3   its bytes are no (whole) tar
    |   |-- DecodeError        EIO        3   a file is not what its extension says, or holds a pickle
    |   |-- ViewError          EIO        3   its view (`--columns`, `--join` ...) cannot be made
    |   |-- RefusedShard       EACCES     3   others may have replaced it since the mount
    |   |-- ObjectExists       EIO        3   its store has an object of this name already
    |   '-- StaleShard         ESTALE     3   it changed underneath
    |       |-- ObjectChanged  ESTALE     3   its store has another object in its place
    |       '-- StaleMount     ESTALE     3   a worker of a cluster sees another file under its path
    |-- Interrupted            EINTR    1   the client of a request of the kernel is ending
    |-- IndexUnusable          EIO        4   the index directory cannot be used
    |-- MountError             EIO        5   the mount could not be made, found or ended
    |-- OverlayUnusable        EIO        8   the overlay's directory cannot be used
    |   '-- OverlayBusy        EBUSY      8   another mount or commit uses it
    |-- CommitError            EIO        7   a commit could not be made, or could not be finished
    |-- ExecutorUnusable       EIO       10   what --executor names is not there, or has broken
    |-- ExportError            EIO        9   another tool would misread the index, or it cannot be written
    |-- ImageError             EIO        9   an image cannot be made of this set, or cannot be written
    '-- EntryError             EIO        6   raised while walking the tree
        |-- NoSuchEntry        ENOENT     6
        |-- NotADirectory      ENOTDIR    6
        |-- IsADirectory       EISDIR     6
        |-- NoSuchAttribute    ENODATA    6
        |-- ReadOnly           EROFS      6
        |-- EntryExists        EEXIST     6
        |-- NotEmpty           ENOTEMPTY  6
        |-- CrossDevice        EXDEV      6   a rename that only copying can do
        |-- NotPermitted       EPERM      6
        |-- Unsupported        ENOTSUP    6
        |-- InvalidRequest     EINVAL     6
        |-- StaleEntry         ESTALE     6   the inode is gone or has changed; its name may still exist
        '-- NameTooLong        ENAMETOOLONG 6

A message names the thing (shard, offset, member, path) and what to do about it, if something can be done.
Exit code 1 is also what `wdsfs check` and `diff` give when they have findings, 130 an interrupt.
"""

import errno
import re
from collections.abc import Sequence

from wdsfs.names import shown

# Errors that JSON of another program can cause: it may be nested without end, and hold any type anywhere.
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError)


class WdsfsError(Exception):
    """Root of the tree; never raised itself. Each argument is one line, whatever names are in it."""

    errno = errno.EIO
    exit_code = 1

    def __init__(self, *lines: object, message: str = "") -> None:
        super().__init__(*lines, *message.splitlines())

    def __str__(self) -> str:
        return "\n".join(shown(str(line)) for line in self.args)

    @property
    def message(self) -> str:
        """The text. PyTorch gives the traceback of a worker by `message=` to a class that has this name."""
        return str(self)


class UsageError(WdsfsError):
    errno = errno.EINVAL
    exit_code = 2


class NotInstalled(UsageError):
    pass


class SpecError(UsageError):
    pass


class NoMatch(SpecError):
    # As for a missing shard: a file system that is not mounted yet looks so, and a unit of systemd tries again.
    exit_code = 3


class ShardError(WdsfsError):
    exit_code = 3


class MissingShard(ShardError):
    # Not ENOENT: a tool would take that for "no such sample" and go on with a smaller data set.
    pass


class MissingObject(MissingShard):
    pass


class UnreadableShard(ShardError):
    pass


class DeniedObject(UnreadableShard):
    errno = errno.EACCES


class CacheFull(UnreadableShard):
    pass


class NoRanges(UnreadableShard):
    pass


class NotATar(UnreadableShard):
    pass


class Unreachable(UnreadableShard):
    pass


class CorruptShard(ShardError):
    pass


class DecodeError(ShardError):
    pass


class ViewError(ShardError):
    pass


class RefusedShard(ShardError):
    errno = errno.EACCES


class StaleShard(ShardError):
    errno = errno.ESTALE


class ObjectChanged(StaleShard):
    pass


class StaleMount(StaleShard):
    pass


class ObjectExists(ShardError):
    pass


class Interrupted(WdsfsError):
    errno = errno.EINTR


class IndexUnusable(WdsfsError):
    exit_code = 4


class MountError(WdsfsError):
    exit_code = 5


class OverlayUnusable(WdsfsError):
    exit_code = 8


class OverlayBusy(OverlayUnusable):
    errno = errno.EBUSY


class CommitError(WdsfsError):
    exit_code = 7


class ExportError(WdsfsError):
    exit_code = 9


class ExecutorUnusable(WdsfsError):
    exit_code = 10


class ImageError(WdsfsError):
    exit_code = 9


class EntryError(WdsfsError):
    exit_code = 6


class NoSuchEntry(EntryError):
    errno = errno.ENOENT


class NotADirectory(EntryError):
    errno = errno.ENOTDIR


class IsADirectory(EntryError):
    errno = errno.EISDIR


class NoSuchAttribute(EntryError):
    errno = errno.ENODATA


class ReadOnly(EntryError):
    errno = errno.EROFS


class EntryExists(EntryError):
    errno = errno.EEXIST


class NotEmpty(EntryError):
    errno = errno.ENOTEMPTY


class CrossDevice(EntryError):
    errno = errno.EXDEV


class NotPermitted(EntryError):
    errno = errno.EPERM


class Unsupported(EntryError):
    errno = errno.ENOTSUP


class InvalidRequest(EntryError):
    errno = errno.EINVAL


class StaleEntry(EntryError):
    errno = errno.ESTALE


class NameTooLong(EntryError):
    errno = errno.ENAMETOOLONG


def counted(count: int, noun: str) -> str:
    """Return `1 shard`, `2 shards`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def bytes_text(count: float) -> str:
    """Return a number of bytes for people: `512 B`, `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def several(things: Sequence[str], most: int = 3) -> str:
    """Return a list for a message: `a, b, c and 7 more`."""
    return ", ".join(things[:most]) + (f" and {len(things) - most:,} more" if len(things) > most else "")


def and_others(count: int) -> str:
    """Return ` (and 2 more)` for a message that names the first of three things; "" for a single one."""
    return f" (and {count - 1:,} more)" if count > 1 else ""


DEAD_MOUNT_ERRNOS = frozenset((errno.ENOTCONN, errno.ECONNABORTED))  # of a mount by FUSE that nobody serves


def reason_of(error: OSError) -> str:
    """Return why a path cannot be looked at, with the remedy where it lies in a dead mount."""
    remedy = "; clear that dead mount with: wdsfs umount MOUNTPOINT" if error.errno in DEAD_MOUNT_ERRNOS else ""
    return f"{error.strerror}{remedy}"


# Semantics decision: `32G` and `32GiB` have powers of 1024, as in systemd and `du -h`; `32GB` has powers of 1000.
_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}IB": 1024**_power, f"{_letter}B": 1000**_power}


_SIZE = re.compile(r"\s*(\d{1,20})(\.\d{1,20})?\s*([A-Za-z]*)\s*", re.ASCII)


def parse_size(text: str) -> int:
    """Return the bytes of `800M`, `32GiB`, `1.5 GB`, or plain bytes. Raises UsageError."""
    size = _SIZE.fullmatch(text)
    unit = _UNITS.get(size[3].upper()) if size else None
    if size is None or unit is None or (size[2] and unit == 1):
        raise UsageError(
            f"{text!r} is not a size: write bytes, or a number and a unit, such as 32G, 32GiB or 34GB"
        )
    return int(size[1]) * unit + int(float(size[2] or 0) * unit)
