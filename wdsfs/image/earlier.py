"""The image that a new one replaces, as a source of parts that have not changed.

Nothing of it is believed that could be damaged or somebody else's work: other users can neither write nor replace
it, its table of parts has the checksum that the manifest says, and each part has its own.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from wdsfs import trust
from wdsfs.errors import CorruptShard, ImageError, MountError
from wdsfs.image import manifest
from wdsfs.image.erofs import BLOCK, SLOT
from wdsfs.image.parts import Part, Wanted, checksum_of, decoded, map_blocks, slots_of
from wdsfs.image.relocation import Move, relocate
from wdsfs.storage.durable import Disk, write_at

log = logging.getLogger(__name__)

_CUT = "the image that was to be replaced was cut meanwhile; repeat the command"
RUN_BLOCKS = (2 << 20) // BLOCK  # of parts that are moved together, unless one alone has more: what a cache holds


class EarlierImage:
    """The parts of the image `fd`, whose metadata begins at the block `metadata`."""

    def __init__(self, fd: int, metadata: int, parts: Sequence[Part]) -> None:
        self.fd, self.metadata = fd, metadata
        self._parts: dict[bytes, list[Part]] = {}
        for one in parts:
            self._parts.setdefault(one.key, []).append(one)

    def close(self) -> None:
        os.close(self.fd)

    def part(self, wanted: Wanted, place: int) -> Part | None:
        """A part with this key that is not damaged, preferably one that begins at the block `place`.

        Raises OSError.
        """
        found = self._parts.get(wanted.key, [])
        for one in sorted(found, key=lambda one: one.first != place):
            if wanted.numbers_for(one) is not None and checksum_of(self.fd, one) == one.checksum:
                return one
            found.remove(one)
        return None


def opened(path: bytes) -> EarlierImage | None:
    """The image at this path, if there is one that can be used; the caller closes it."""
    try:
        trust.content(os.fsdecode(path))
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        log.debug("%s: no part of it is used: %s", os.fsdecode(path), error)
        return None
    try:
        return EarlierImage(fd, *_table(fd))
    except (MountError, ValueError, struct.error, OSError) as error:
        os.close(fd)
        log.debug("%s: no part of it is used: %s", os.fsdecode(path), error)
        return None


def _table(fd: int) -> tuple[int, list[Part]]:
    """Where the metadata of an image begins (block), and its parts.

    Raises MountError, ValueError, struct.error, OSError.
    """
    found = manifest.read(f"/proc/self/fd/{fd}").parts
    if found is None:
        raise ValueError("it has no table of parts")
    data = os.pread(fd, found.size, found.offset)
    if xxhash.xxh3_128_hexdigest(data) != found.checksum:
        raise ValueError("its table of parts is damaged")
    return decoded(data)


class Taking:
    """Copies parts of `earlier` into the file `target`, whose metadata begins at the block `metadata`.

    Those that were neighbours and are again are copied together. `taken` are those that are there, with the places
    and the checksums that they have now.
    """

    def __init__(self, earlier: EarlierImage, target: int, metadata: int) -> None:
        self._earlier, self._target, self._metadata = earlier, target, metadata
        self._run: list[Part] = []
        self._numbers: dict[int, int] = {}
        self._move = self._move_of(0, 0, self._numbers)
        self._stays = True  # the run, where it was, with the bytes that it has
        self.taken: list[Part] = []

    def take(self, part: Part, first: int, numbers: dict[int, int]) -> None:
        """Have a part copied to the block `first`, with these numbers of its devices, now or by `flush`."""
        own = self._move_of(part.first, first, numbers)
        stays = own.changes_nothing
        if self._run and stays == self._stays and self._continues(part, own):
            self._numbers.update(numbers)
        else:
            self.flush()
            self._numbers = dict(numbers)
            self._move, self._stays = own._replace(devices=self._numbers), stays
        self._run.append(part)

    def _move_of(self, before: int, after: int, numbers: dict[int, int]) -> Move:
        return Move(before, after, self._earlier.metadata, self._metadata, numbers)

    def _continues(self, part: Part, own: Move) -> bool:
        """True if a part with this move can go with the run, which stays or moves as it does."""
        move = self._move
        return (
            part.first == self._run[-1].end
            and own.block - own.block_before == move.block - move.block_before
            and all(self._numbers.get(one, other) == other for one, other in own.devices.items())
            and (self._stays or part.end - move.block_before <= RUN_BLOCKS)
        )

    def flush(self) -> None:
        """Copy what was not copied yet. Raises ImageError, OSError."""
        if self._run:
            start, size = self._move.block_before * BLOCK, (self._run[-1].end - self._move.block_before) * BLOCK
            if self._stays:
                self._copy(start, size)
            else:
                self._relocate(start, size)
            self._run = []

    def _copy(self, start: int, size: int) -> None:
        """Copy the run as it is: where the file system can do that, both images share the blocks then."""
        os.lseek(self._target, start, os.SEEK_SET)
        try:
            Disk().copy(self._earlier.fd, self._target, start, size)
        except CorruptShard:
            raise ImageError(_CUT) from None
        self.taken += self._run

    def _relocate(self, start: int, size: int) -> None:
        data, move, slots = np.empty(size, np.uint8), self._move, []
        _read(self._earlier.fd, data, start)
        for one in self._run:
            begin = (one.first - move.block_before) * BLOCK
            behind = begin + one.blocks * BLOCK
            slots.append(slots_of(data[behind : behind + map_blocks(one.blocks) * BLOCK]) + begin // SLOT)
        relocate(data.view(np.uint32), np.concatenate(slots), move)
        write_at(self._target, data.data, move.block * BLOCK)
        for one in self._run:
            begin, end = ((block - move.block_before) * BLOCK for block in (one.first, one.end))
            self.taken.append(
                one._replace(
                    first=one.first - move.block_before + move.block,
                    missing=move.devices.get(one.missing, 0),
                    devices=tuple(move.devices[device] for device in one.devices),
                    checksum=xxhash.xxh3_64_intdigest(data[begin:end].data),
                )
            )


def _read(fd: int, data: NDArray[np.uint8], offset: int) -> None:
    """Fill `data` with the bytes of a file from `offset` on. Raises ImageError, OSError."""
    view = data.data
    while view:
        done = os.preadv(fd, [view], offset)
        if not done:
            raise ImageError(_CUT)
        view, offset = view[done:], offset + done
