"""Whether a file is still the one that it was: its fingerprint.

The one home of that question for shards and for everything else whose content is kept somewhere.
"""

from __future__ import annotations

import errno
import os
import struct
import zlib

from wdsfs.errors import MissingShard, UnreadableShard


def sum_of(fingerprint: tuple[int, int, int]) -> int:
    """32 bits that stand for a fingerprint (size in bytes, mtime in ns, inode); never 0."""
    return zlib.crc32(struct.pack("<QqQ", *fingerprint)) | 1


_MIX = 0x9E3779B97F4A7C15  # the golden ratio in 64 bits


def fingerprint_of(found: os.stat_result) -> tuple[int, int, int]:
    """What tells a file from its successors: size in bytes, mtime in ns, and inode number and ctime as one number.

    The ctime is in it because nothing else gives away a file that was rewritten in place and got its old mtime
    back (`cp -p`, `rsync -t --inplace`). The price: after a chmod or a new hard link a shard is indexed again.
    """
    # Some file systems have times that 64 bits of nanoseconds do not reach (the year 2262).
    mtime_ns = max(min(found.st_mtime_ns, (1 << 63) - 1), -(1 << 63))
    return found.st_size, mtime_ns, (found.st_ino ^ found.st_ctime_ns * _MIX) & 0xFFFFFFFFFFFFFFFF


def look(path: bytes) -> tuple[int, int, int]:
    """The fingerprint of the file at `path` now. Raises MissingShard, UnreadableShard."""
    try:
        found = fingerprint_of(os.stat(path))
        if not os.access(path, os.R_OK):
            raise UnreadableShard(f"{os.fsdecode(path)}: {os.strerror(errno.EACCES)}")
        return found
    except FileNotFoundError:
        raise MissingShard(f"{os.fsdecode(path)}: the shard is gone") from None
    except OSError as error:
        raise UnreadableShard(f"{os.fsdecode(path)}: {error.strerror}") from None
