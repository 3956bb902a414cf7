"""Memory for the latest bytes of objects that are in no cache."""

from __future__ import annotations

import mmap

from wdsfs.remote.cached_object import BLOCK
from wdsfs.remote.parts import RemoteObject

SLAB, SLABS = 4 << 20, 8  # bytes of a slab of memory for held pieces, at most; the number of slabs, at least


class Held:
    """Holds the latest bytes of objects that are in no cache: pieces in slabs of memory, `most` bytes in all.

    In the heap, pieces of many sizes that stay for long would leave holes of 100 MiB. Readers may still use a
    piece of a slab that was released.
    """

    def __init__(self, most: int) -> None:
        self._slab = max(min(SLAB, most // SLABS) // BLOCK * BLOCK, BLOCK)
        self._most = max(most // self._slab, 1)
        self._pieces: dict[mmap.mmap, set[tuple[RemoteObject, int]]] = {}  # by slab: their objects and first bytes
        self._free: memoryview | None = None  # of the newest slab

    @property
    def size(self) -> int:
        """The bytes of all slabs."""
        return len(self._pieces) * self._slab

    def add(self, item: RemoteObject, begin: int, data: memoryview) -> None:
        """Hold a copy of these bytes."""
        for start, stop in item.held.gaps(begin, begin + len(data)):
            while start < stop:
                free = self._free or self._new_slab()
                piece, self._free = free[: stop - start], free[stop - start :]
                piece[:] = data[start - begin : start - begin + len(piece)]
                item.held.add(start, start + len(piece), piece)
                self._pieces[_slab_of(piece)].add((item, start))
                start += len(piece)

    def forget(self, item: RemoteObject) -> None:
        """Release the bytes of an object, and the slabs that have no others."""
        for begin, _, piece in list(item.held):
            slab = _slab_of(piece)
            item.held.remove(begin)
            self._pieces[slab].remove((item, begin))
            if not self._pieces[slab]:
                self._release(slab)

    def release_oldest(self) -> None:
        """Release the oldest slab."""
        slab = next(iter(self._pieces))
        for item, begin in self._pieces[slab]:
            item.held.remove(begin)
        self._release(slab)

    def _new_slab(self) -> memoryview:
        while len(self._pieces) >= self._most:
            self.release_oldest()
        slab = mmap.mmap(-1, self._slab, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._pieces[slab] = set()
        return memoryview(slab)

    def _release(self, slab: mmap.mmap) -> None:
        del self._pieces[slab]  # its memory is free when the last reader has dropped its pieces
        if self._free is not None and _slab_of(self._free) is slab:
            self._free = None


def _slab_of(piece: memoryview) -> mmap.mmap:
    assert isinstance(piece.obj, mmap.mmap)
    return piece.obj
