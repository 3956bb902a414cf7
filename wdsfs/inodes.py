"""The layout of the inode number.

A number says where a file is; there is no table. The same file has the same number after a remount, every
process can serve every request, and memory does not grow with the data set::

     63   62   61      52 51          32 31  30 29                    0
    +---+----+----------+--------------+------+-----------------------+
    | 0 | up |   tag    |    shard     | kind |         index         |
    +---+----+----------+--------------+------+-----------------------+

| part  | bits | meaning |
|-------|------|---------|
| up    | 1    | the number space of new files in an overlay; 0 for everything in a shard |
| tag   | 10   | the shard's generation (`board.Tags`): a changed shard gets other numbers |
| shard | 20   | position of the shard in the set |
| kind  | 2    | 1 folder, 2 sample, 3 member; 0 for the root (number 1) |
| index | 30   | position in the shard's record |

The lower 32 bits, kind and index, are the node's `position` in its record.
"""

from __future__ import annotations

ROOT = 1
UP = 1 << 62  # the space of new files: this, and the number that the file has in the upper
FOLDER, SAMPLE, MEMBER = 1, 2, 3

INDEX_MAX = (1 << 30) - 1
SHARD_MAX = (1 << 20) - 1
TAG_MAX = (1 << 10) - 1


def position(kind: int, index: int) -> int:
    return kind << 30 | index


def kind_of(where: int) -> int:
    """The kind of a position or of a whole inode number."""
    return where >> 30 & 3


def index_of(where: int) -> int:
    return where & INDEX_MAX


def pack(tag: int, shard: int, where: int) -> int:
    return tag << 52 | shard << 32 | where


def unpack(inode: int) -> tuple[int, int, int]:
    """An inode number as (tag, shard, position)."""
    return inode >> 52 & TAG_MAX, inode >> 32 & SHARD_MAX, inode & 0xFFFFFFFF
