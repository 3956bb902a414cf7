"""The exceptions of wdsfs, each with the errno that a program sees and the exit code that a shell sees.

A message names the thing (shard, offset, member, path) and what to do about it, if something can be done.
docs/reference/messages.md lists the classes by exit code. Exit code 1 is also what `wdsfs check` and `diff` give
when they have findings, 130 an interrupt.
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
    """A bad option or argument."""

    errno = errno.EINVAL
    exit_code = 2


class NotInstalled(UsageError):
    """A part of wdsfs that the request needs was left out."""


class SpecError(UsageError):
    """A specification of shards that means nothing."""


class NoMatch(SpecError):
    """A glob or a directory without a shard."""

    # As for a missing shard: a file system that is not mounted yet looks so, and a unit of systemd tries again.
    exit_code = 3


class ShardError(WdsfsError):
    """Any error of a shard."""

    exit_code = 3


class MissingShard(ShardError):
    """A shard of the set does not exist."""

    # Not ENOENT: a tool would take that for "no such sample" and go on with a smaller data set.


class MissingObject(MissingShard):
    """A store has no such object."""


class UnreadableShard(ShardError):
    """The shard exists, but cannot be opened or read."""


class DeniedObject(UnreadableShard):
    """The store refuses an object to these credentials."""

    errno = errno.EACCES


class CacheFull(UnreadableShard):
    """The cache has no room for all bytes of a shard."""


class NoRanges(UnreadableShard):
    """The server sends whole objects only."""


class NotATar(UnreadableShard):
    """The file is something else, such as a failed download."""


class Unreachable(UnreadableShard):
    """The store does not answer, or not as it should."""


class CorruptShard(ShardError):
    """The bytes are no (whole) tar."""


class DecodeError(ShardError):
    """The content of a file does not fit its extension, or is a pickle."""


class ViewError(ShardError):
    """The view of a shard (`--columns`, `--join` ...) cannot be made."""


class RefusedShard(ShardError):
    """Other users may have replaced the shard since the mount."""

    errno = errno.EACCES


class StaleShard(ShardError):
    """The shard has changed since it was opened."""

    errno = errno.ESTALE


class ObjectChanged(StaleShard):
    """The store has another object in the place of the shard."""


class StaleMount(StaleShard):
    """A worker of a cluster sees another file under the path of the shard."""


class ObjectExists(ShardError):
    """The store has an object of this name already."""


class Interrupted(WdsfsError):
    """The client of a request of the kernel is ending."""

    errno = errno.EINTR


class IndexUnusable(WdsfsError):
    """The index directory cannot be used."""

    exit_code = 4


class MountError(WdsfsError):
    """The mount could not be made, found or ended."""

    exit_code = 5


class OverlayUnusable(WdsfsError):
    """The directory of the overlay cannot be used."""

    exit_code = 8


class OverlayBusy(OverlayUnusable):
    """Another mount or commit uses the overlay."""

    errno = errno.EBUSY


class CommitError(WdsfsError):
    """A commit or pack could not be begun or finished."""

    exit_code = 7


class ExportError(WdsfsError):
    """Another tool would misread the index, or the index cannot be written."""

    exit_code = 9


class ExecutorUnusable(WdsfsError):
    """The cluster that --executor names does not exist, or has failed."""

    exit_code = 10


class ImageError(WdsfsError):
    """An image cannot be made of this set, or cannot be written."""

    exit_code = 9


class EntryError(WdsfsError):
    """Any error of a walk through the tree."""

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
    """A rename that only copying can do."""

    errno = errno.EXDEV


class NotPermitted(EntryError):
    errno = errno.EPERM


class Unsupported(EntryError):
    errno = errno.ENOTSUP


class InvalidRequest(EntryError):
    errno = errno.EINVAL


class StaleEntry(EntryError):
    """The inode is gone or has changed; the name may still exist."""

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
