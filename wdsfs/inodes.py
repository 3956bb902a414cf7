"""The layout of the inode number: generation and number of the shard, kind, index in the record.

A number says where a file is; there is no table. The same file has the same number after a remount, every
process can serve every request, and memory does not grow with the data set::

     63   62   61      52 51          32 31  30 29                    0
    +---+----+----------+--------------+------+-----------------------+
    | 0 | up |   tag    |    shard     | kind |         index         |
    +---+----+----------+--------------+------+-----------------------+

| part  | bits | meaning |
|-------|------|---------|
| up    | 1    | the number space of new files in an overlay; 0 for everything in a shard |
| tag   | 10   | the shard's generation (`tree.freshness.Generations`): a changed shard gets other numbers |
| shard | 20   | position of the shard in the set |
| kind  | 2    | 1 folder, 2 sample, 3 member; 0 for the root (number 1) and what else is in no shard |
| index | 30   | position in the shard's record |

The lower 32 bits, kind and index, are the node's `position` in its record.

An inode in neither a shard nor the upper is an *extra*. The highest 4 bits of its index are its type. The other
26, with the 30 bits of shard and tag above them, are a number of 56 bits. `mount/hidden_directory.py` or
`tree/numbered_tree.py` defines its meaning. The bits of `NOT_HIDDEN` are all zero for extras of the hidden
directory, and only for those.
"""

from __future__ import annotations

ROOT = 1
UP = 1 << 62  # marks new files; the other bits are the inode number in the upper
FOLDER, SAMPLE, MEMBER = 1, 2, 3

INDEX_MAX = (1 << 30) - 1
POSITION = (1 << 32) - 1  # the bits of the position
SHARD_MAX = (1 << 20) - 1
TAG_MAX = (1 << 10) - 1


_NUMBER_BITS = 26  # of the number of an extra, in its index
_LOWER = (1 << _NUMBER_BITS) - 1
NOT_HIDDEN = UP | 3 << 30 | 1 << 29  # all zero for the root and for inodes of the hidden directory
# Types of extras: first those of the hidden directory, then those of the tree by number.
HIDDEN, STATUS, METRICS, PROBLEMS = range(1, 5)
BY_INDEX, MILLION, THOUSAND, NUMBERED = range(8, 12)


def position(kind: int, index: int) -> int:
    """Return the position of a node in its record: kind and index."""
    return kind << 30 | index


def kind_of(where: int) -> int:
    """Return the kind of a position or of a whole inode number."""
    return where >> 30 & 3


def index_of(where: int) -> int:
    """Return the index in a position, or in a whole inode number."""
    return where & INDEX_MAX


def pack(tag: int, shard: int, where: int) -> int:
    """Return the inode number of the node at a position of a shard."""
    return tag << 52 | shard << 32 | where


def pack_extra(what: int, number: int = 0) -> int:
    """Return the inode of an extra; `number` has up to 56 bits."""
    return number >> _NUMBER_BITS << 32 | what << _NUMBER_BITS | number & _LOWER


def unpack_extra(inode: int) -> tuple[int, int]:
    """Return the type of an extra and its number; type 0 if the inode is none."""
    if inode & (UP | 3 << 30) or inode <= ROOT:
        return 0, 0
    return inode >> _NUMBER_BITS & 15, inode >> 32 << _NUMBER_BITS | inode & _LOWER


def unpack(inode: int) -> tuple[int, int, int]:
    """Return an inode number as (tag, shard, position)."""
    return inode >> 52 & TAG_MAX, inode >> 32 & SHARD_MAX, inode & POSITION
