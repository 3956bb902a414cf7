"""Reading ahead where an index of another tool says that the headers of a shard are.

A scan is a chain of reads, for each header tells where the next one is. Between large members each read waits
for the disk, or the network. A DALI or Energon index beside the shard knows all the places; whether it is right
does not matter, since it is a hint to the kernel and nothing else: the scan reads and checks every header as ever.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence

from wdsfs import energon, formats
from wdsfs.source import open_beside

SPARSE = 64 << 10  # bytes of a shard per sample; where there are fewer a scan reads everything, and in order
AROUND = 2048  # bytes on both sides of a place: extension headers in front, the next header behind a small member
_PAGE = 4096


@contextlib.contextmanager
def reading_ahead(fd: int, path: bytes) -> Iterator[None]:
    """While the shard open at `fd` is scanned, have its headers read ahead, if something tells where they are."""
    size = os.fstat(fd).st_size
    places = _places(path, size)
    if not places:
        yield
        return
    enough = threading.Event()
    thread = threading.Thread(target=_advise, args=(fd, size, places, enough), name="ahead")
    with contextlib.suppress(RuntimeError):  # there may be no more threads; the scan needs none
        thread.start()
    try:
        yield
    finally:
        enough.set()
        if thread.ident is not None:
            thread.join()


def _places(path: bytes, size: int) -> Sequence[int]:
    """Where an index says that contents or headers are (bytes); nothing if it is not worth it."""
    most = size // SPARSE
    for side, read in (
        (formats.dali_path(path), formats.dali_places),
        (energon.offsets_path(path), energon.places),
    ):
        # Whatever is wrong with it is for `wdsfs check` to tell.
        with contextlib.suppress(OSError, ValueError), open_beside(side) as file:
            if most and (found := read(file, most)):
                return found
    return ()


def _advise(fd: int, size: int, places: Sequence[int], enough: threading.Event) -> None:
    asked = 0
    for place in places:
        if enough.is_set():
            return
        start, end = max(place - AROUND, asked) & -_PAGE, min(place + AROUND, size)
        if start < end:  # not when it lies behind the end
            with contextlib.suppress(OSError):  # it is advice
                os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_WILLNEED)
            asked = end
