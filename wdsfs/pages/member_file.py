"""A member as a worker sees it: a file that can be read and sought, whose bytes the server sends on request."""

from __future__ import annotations

import io
import socket
from typing import Any

from wdsfs.pages import wire

BUFFER = 256 << 10  # bytes that are asked for at a time, at least


class TooMuch(Exception):
    """A preview would cost more than it may. The text is a whole sentence."""


class MemberFile(io.RawIOBase):
    """The bytes of a member of `size` bytes, of which `head` are the first, and `most` more may be read."""

    def __init__(self, connection: socket.socket, size: int, head: bytes, most: int) -> None:
        self._connection, self.size, self._head, self._most = connection, size, head, most
        self._at = 0
        self._asked = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        if start + offset < 0:
            raise ValueError("a seek before the beginning")
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, target: Any) -> int:
        """Fill `target` as far as there is content. Raises TooMuch, and OSError if the member cannot be read."""
        view = memoryview(target).cast("B")
        length = max(min(len(view), self.size - self._at), 0)
        if not length:
            return 0
        data = self._head[self._at : self._at + length] or self._ask(length)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _ask(self, length: int) -> bytes:
        length = min(length, wire.BYTES_MAX)
        self._asked += length
        if self._asked > self._most:
            raise TooMuch(f"More than {self._most >> 20} MiB of it would have to be read for a preview.")
        wire.send(self._connection, {"read": [self._at, length]})
        answer, data = wire.receive(self._connection)
        if "failed" in answer:
            raise OSError("the member cannot be read")
        return data


def open_member(connection: socket.socket, size: int, head: bytes, most: int) -> io.BufferedReader:
    """A buffered MemberFile."""
    return io.BufferedReader(MemberFile(connection, size, head, most), BUFFER)
