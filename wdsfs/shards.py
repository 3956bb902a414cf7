"""A shard of a set, and the fingerprint of a file: while it stays the same, so does the content.

The fingerprint is the one answer to "is this still the same file?", for shards and for everything else whose
content is stored somewhere. Code that compares something else says why. The room `spec` decides which shards a set
has.
"""

from __future__ import annotations

import errno
import functools
import os
import struct
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from wdsfs import mount_table
from wdsfs.errors import MissingShard, SpecError, UnreadableShard
from wdsfs.inodes import SHARD_MAX
from wdsfs.names import PLAIN, Reading

TICK_NS = 20_000_000  # the coarsest clock from which the kernel takes the times of files
_COARSE_NS = (2_000_000_000, 1_000_000_000)  # the ticks of file systems that store whole seconds
# File systems that may give an unchanged file another inode number: some servers number the files that are looked
# up, and a disk with FAT stores no numbers. FAT and most of FUSE have copies of the mtimes for ctimes.
_WITHOUT_NUMBERS = frozenset({"cifs", "nfs", "nfs4", "smb3", "vboxsf"})
_WITHOUT_CTIMES = frozenset({"exfat", "msdos", "vfat"})
DEVICE_SECONDS = 60  # how long a device number is believed to be of the same file system
_MIX = 0x9E3779B97F4A7C15  # the golden ratio in 64 bits
_MASK = 0xFFFFFFFFFFFFFFFF
_PACKED = struct.Struct("<QqQ")


class Fingerprint(NamedTuple):
    """The identity of the content of a file: another one when the content may differ.

    `identity` is the inode number mixed with the ctime. Only the ctime shows that a file was rewritten in place
    and got its old mtime back (`cp -p`, `rsync -t --inplace`). The price: after a chmod or a new hard link a shard
    is indexed again.

    Semantics decision: on a file system that may renumber its files (`lasting_number`) the ctime alone is the
    identity. So a shard stays the same there as long as its size and times do.

    Compared at every request, so make one only where the file is looked at. In files it stands as three numbers.
    """

    size: int  # bytes
    mtime_ns: int
    identity: int  # 64 bits

    @classmethod
    def of(cls, status: os.stat_result) -> Fingerprint:
        """Return the fingerprint of a file by its attributes."""
        return cls._with(status, lasting_number(status))

    @classmethod
    def numbered(cls, status: os.stat_result) -> Fingerprint:
        """Return the fingerprint with the inode number, whether that lasts or not."""
        return cls._with(status, status.st_ino)

    @classmethod
    def _with(cls, status: os.stat_result, number: int) -> Fingerprint:
        mtime_ns = status.st_mtime_ns
        if mtime_ns.bit_length() > 63:  # some file systems have times after the year 2262
            mtime_ns = max(min(mtime_ns, (1 << 63) - 1), -(1 << 63))
        return cls(status.st_size, mtime_ns, number ^ status.st_ctime_ns * _MIX & _MASK)

    @classmethod
    def at(cls, path: bytes) -> Fingerprint:
        """Return the fingerprint of the file at `path` now. Raises MissingShard, UnreadableShard."""
        try:
            fingerprint = cls.of(os.stat(path))
            if not os.access(path, os.R_OK):
                raise UnreadableShard(f"{os.fsdecode(path)}: {os.strerror(errno.EACCES)}")
            return fingerprint
        except FileNotFoundError:
            raise MissingShard(f"{os.fsdecode(path)}: the shard is gone") from None
        except OSError as error:
            raise UnreadableShard(f"{os.fsdecode(path)}: {error.strerror}") from None

    @property
    def is_by_mtime(self) -> bool:
        """True if nothing but size and mtime identifies the file: no inode number that lasts, nor a ctime."""
        return self.identity == self.mtime_ns * _MIX & _MASK

    @property
    def packed(self) -> bytes:
        """The three numbers as 24 bytes, to make a digest of."""
        return _PACKED.pack(*self)

    @property
    def sum(self) -> int:
        """32 bits that stand for the fingerprint; never 0."""
        return zlib.crc32(self.packed) | 1

    def mixed_with(self, number: int) -> Fingerprint:
        """Return the fingerprint of a file together with something else, which 64 bits stand for."""
        return Fingerprint(self.size, self.mtime_ns, self.identity ^ number)


def numbered_at(path: bytes) -> Fingerprint:
    """Return the fingerprint of a file as overlays of older versions have it; GONE if it cannot be read."""
    try:
        return Fingerprint.numbered(os.stat(path))
    except OSError:
        return GONE


def lasting_number(status: os.stat_result) -> int:
    """Return the inode number of a file; a constant where the file system may give the file another number."""
    stand_in = _stand_in(status.st_dev, int(time.monotonic()) // DEVICE_SECONDS)
    return status.st_ino if stand_in is None else stand_in


@functools.lru_cache(maxsize=256)
def _stand_in(device: int, _: int) -> int | None:
    """Return the constant for inode numbers that do not last, 0 if the ctime may be the mtime; None if they do."""
    types = mount_table.types_of(device)
    if any(fstype in _WITHOUT_CTIMES or fstype.startswith("fuse") for fstype in types):
        return 0
    return 1 if types & _WITHOUT_NUMBERS else None


GONE = Fingerprint(0, 0, 0)  # of a file that cannot be read


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard of a set.

    `path` is absolute, but not resolved: a symbolic link keeps the name that the user gave. `name` is the name of
    its directory in the mount: one path component, at most 255 bytes, unlike every other shard's of the set.

    `without` are the raw keys of samples that are left out. `expected_samples` is the number of samples in the
    shard, those included, according to the file that names it.

    `place` is the number of the shard in the whole set and the size of that set, if this is a part of it, or if it
    has grown since. `reading` is the same for all shards of a set. `index_file` is the portable index that lists
    the shard, if its list is one. `gone` is the number of samples of a shard that is not in the set any more: only
    its number, which no other shard gets, is kept (`spec/growth.py`).
    """

    path: bytes
    name: bytes
    without: frozenset[bytes] = frozenset()
    expected_samples: int | None = None
    place: tuple[int, int] | None = field(default=None, compare=False)
    reading: Reading = PLAIN
    index_file: str = field(default="", compare=False)
    gone: int | None = None

    @classmethod
    def of_texts(cls, path: str, name: str, reading: Reading, without: Iterable[str] = ()) -> Shard:
        """Return a shard by the texts in the report of a mount: path, name, and the keys that are left out."""
        return cls(os.fsencode(path), os.fsencode(name), frozenset(map(os.fsencode, without)), reading=reading)

    @property
    def key(self) -> bytes:
        """The key of the shard's record in the index."""
        return self.path + self.reading.mark

    def miscount(self, samples: int) -> str:
        """Return the fault if the shard has this many samples; "" if that is the expected number."""
        if self.expected_samples in (None, samples):
            return ""
        return f"has {samples:,} samples; the file that names it says {self.expected_samples:,}"


class Shards(tuple[Shard, ...]):
    """The shards of a set in its order, with what a process that serves it asks of all of them.

    Made before workers are forked: a look at each shard, which counts references to it, would give every worker a
    copy of the memory that they share.
    """

    def __init__(self, _: Iterable[Shard]) -> None:
        check_count(len(self))
        self.keys = [shard.key for shard in self]  # under which the index has their records
        self.out = frozenset(number for number, shard in enumerate(self) if shard.gone is not None)
        self.are_whole = not any(shard.without for shard in self)

    @classmethod
    def of(cls, shards: Sequence[Shard]) -> Shards:
        """Return these shards, as they are if they are of this class."""
        return shards if isinstance(shards, cls) else cls(shards)


def check_count(shards: int) -> None:
    """Raise SpecError for a set of more shards than inode numbers can tell apart."""
    if shards > SHARD_MAX + 1:
        raise SpecError(
            f"{shards:,} shards, and a set can have {SHARD_MAX + 1:,}: name fewer, or take a part of them with "
            "--num-shards and --shard-id"
        )


def wait_for_tick(status: os.stat_result) -> bool:
    """Wait until another write to a file would change its times: within the tick of the last one it would not.

    Return True if that took time. Meanwhile another file may have come to its path with the same times, so the
    caller has to open the path again.

    Semantics decision: a ctime of whole seconds is of a file system that stores no finer times (ext4 with small
    inodes, some NFS servers), or only even seconds (FAT). There a tick takes as long.
    """
    coarse_ns = next((tick for tick in _COARSE_NS if status.st_ctime_ns % tick == 0), 0)
    rest_ns = coarse_ns + TICK_NS - (time.time_ns() - status.st_ctime_ns)
    if not 0 < rest_ns <= coarse_ns + TICK_NS:
        return False
    time.sleep(rest_ns / 1e9)
    return True
