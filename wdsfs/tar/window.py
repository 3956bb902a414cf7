"""Reading a tar front to back: a buffer over its headers, and skipping zeros."""

from __future__ import annotations

import os

from wdsfs.storage.source import TarBytes, pread, skip_hole
from wdsfs.tar.headers import BLOCK
from wdsfs.tar.problems import Damage

WINDOW_MIN, WINDOW_MAX = 2048, 1 << 18  # bytes read at a time from header to header
ZEROS_MIN, ZEROS_MAX = 1 << 14, 1 << 20  # bytes of zeros read at a time; GNU tar pads to 10 KiB


class Window:
    """A buffer over a file. Its size adapts to the distance between headers."""

    def __init__(self, fd: TarBytes, size: int, span: int = WINDOW_MAX // 4) -> None:
        self.fd, self.size = fd, size
        self.base, self.data = 0, b""
        self.span = span

    def seek(self, position: int, need: int = BLOCK) -> int:
        """Make `need` bytes at `position` available and return their index in `data`.

        Raises Damage if the file ends before that.
        """
        index = position - self.base
        if index >= 0 and index + need <= len(self.data):
            return index
        # One header per window means that the windows are mostly payload: read less. Several: read more.
        used = index < 2 * len(self.data)
        self.span = min(self.span * 2, WINDOW_MAX) if used else max(self.span // 2, WINDOW_MIN)
        self.data = read_fully(self.fd, max(self.span, need), position)
        self.base = position
        if len(self.data) < need:
            text = f"the file ends at byte {position + len(self.data)}, inside the header at offset {position}"
            raise Damage(position, "truncated", text)
        return 0


def read_fully(fd: TarBytes, size: int, offset: int) -> bytes:
    """As `source.pread`, but repeated until there are `size` bytes or the file ends. Raises OSError."""
    data = os.pread(fd, size, offset) if isinstance(fd, int) else fd.pread(size, offset)
    while len(data) < size:
        more = pread(fd, size - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


def skip_zeros(fd: TarBytes, position: int, end: int) -> int:
    """Return the offset of the first byte from `position` on that is not 0, at most `end`."""
    span = ZEROS_MIN
    while position < end:
        found = skip_hole(fd, position)
        data = b"" if found is None else pread(fd, min(span, end - found), found)
        if found is None or not data:
            return end
        rest = len(data.lstrip(b"\0"))
        if rest:
            return found + len(data) - rest
        position, span = found + len(data), min(2 * span, ZEROS_MAX)
    return end
