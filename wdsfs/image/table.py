"""A table: a part of a tree in columns, ready to be laid out.

*Objects* are directories, files and symbolic links, numbered in the order in which they are to lie in the image.
*Entries* are names in directories. A *reference* to an object is its number, or `placed(nid)` for one that lies in
the image already.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def placed(nid: int) -> int:
    """The reference to an object whose inode number in the image is known."""
    return ~nid


def resolved(references: Ints, nids: Ints) -> Ints:
    """The inode numbers that references stand for; `nids` are those of the objects."""
    return np.where(references < 0, ~references, nids[np.maximum(references, 0)])


class Chunks(NamedTuple):
    """Content in several chunks of `BLOCK << bits` bytes: the number of the device and the block of each.

    `stored`, if there is any, are the bytes of the last one, which is in the image itself.
    """

    bits: int
    device: Ints
    block: Ints
    stored: bytes = b""


class Stored(NamedTuple):
    """Content that is in the image itself."""

    data: bytes


Special = Chunks | Stored


@dataclass(slots=True)
class Table:
    """Columns of objects: `mode` is type and permission bits, `size` in bytes (that of a directory is found when
    it is laid out), `device` and `block` are where a file of one chunk begins. `special` is the content of others.

    Columns of entries: `holder` is the directory, an object of this table; `child` a reference; `kind` the type as
    EROFS counts them; the name is `length` bytes of `text` from `start` on. `parent` is a reference for each
    directory, in their order. `text` begins with two dots, which are the names that every directory has.
    """

    mode: Ints
    links: Ints
    size: Ints
    mtime_ns: Ints
    device: Ints
    block: Ints
    parent: Ints
    holder: Ints
    child: Ints
    kind: Ints
    start: Ints
    length: Ints
    text: NDArray[np.uint8]
    special: dict[int, Special] = field(default_factory=dict)
