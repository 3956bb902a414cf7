"""The pieces of a new shard, in the order of its bytes.

A `CopiedRange` is a range of raw bytes of a source shard: whole members with all their headers and padding, and
what lies between them. A `NewMember` has a file of the upper as its content. `Zeros` are padding or an end mark.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from wdsfs.tar import headers

MAXCOUNT, MAXSIZE = 100_000, 3e9  # of a new shard, ShardWriter's defaults: samples, bytes of content


class CopiedRange(NamedTuple):
    """A raw range, `start` to `end`, of a source shard (its number in the set)."""

    shard: int
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


class GlobalHeader(CopiedRange):
    """A range that is a global PAX header. Exists only until `joined` turns it into a plain range."""

    __slots__ = ()


class NewMember(NamedTuple):
    """A member with the content of a file of the upper directory.

    `size` (bytes) and `mtime_ns` are as at the planning; `common` are the keywords of the global PAX headers in
    front of it.
    """

    name: bytes
    path: bytes
    size: int
    mtime_ns: int
    common: tuple[bytes, ...] = ()

    @property
    def header(self) -> bytes:
        """Its headers in the tar."""
        return headers.encode(self.name, self.size, self.mtime, self.common)

    @property
    def mtime(self) -> int:
        """Whole seconds, as a tar header has them."""
        return self.mtime_ns // 10**9

    @property
    def length(self) -> int:
        """Bytes in the tar, with headers and padding."""
        return len(self.header) + self.size + headers.padding(self.size)


class Zeros(NamedTuple):
    """Padding that a source shard lacks, or an end mark."""

    length: int


Piece = CopiedRange | NewMember | Zeros


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the same bytes in as few pieces as possible."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if not piece.length:
            continue
        if (
            isinstance(piece, CopiedRange)
            and isinstance(last, CopiedRange)
            and (last.shard, last.end) == piece[:2]
        ):
            found[-1] = CopiedRange(piece.shard, last.start, piece.end)
        else:
            found.append(CopiedRange(*piece) if isinstance(piece, CopiedRange) else piece)
    return found


def split_trailing(pieces: Sequence[Piece]) -> tuple[list[Piece], list[Piece]]:
    """Split the pieces of a shard before its end mark: the pieces, and the global headers after its last member.

    Semantics decision: those headers are left out of the shard. They apply to none of its members, and tarfile,
    and so webdataset, raises ReadError if no member follows.
    """
    left = list(pieces)
    trailing: list[Piece] = []
    while left and (isinstance(left[-1], GlobalHeader) or not left[-1].length):
        trailing.insert(0, left.pop())
    return left, [piece for piece in trailing if piece.length]
