"""A table: a part of a tree in columns, ready to be laid out.

*Objects* are directories, files and symbolic links, numbered in the order in which they are to lie in the image.
*Entries* are names in directories. A *reference* to an object is its number, or `placed(nid)` for one that lies in
the image already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from wdsfs.kernel import erofs
from wdsfs.tree.texts import Ints, Texts

Reference = TypeVar("Reference", int, Ints)


def placed(nid: Reference) -> Reference:
    """The reference to an object whose inode number in the image is known; or those to several."""
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
    """Content that is in the image itself: of these objects, the bytes of each."""

    objects: Ints
    contents: Texts


NOTHING_STORED = Stored(np.zeros(0, np.int64), Texts.of([]))


class Outside(NamedTuple):
    """Names in directories that are objects of no table: the inode number of the directory and of what has the
    name, its type as EROFS counts them, and the name."""

    holders: Ints
    nids: Ints
    kinds: Ints
    names: Texts

    def take(self, rows: NDArray[Any]) -> Outside:
        """These rows of them."""
        return Outside(self.holders[rows], self.nids[rows], self.kinds[rows], self.names.take(rows))

    @staticmethod
    def joined(parts: Sequence[Outside]) -> Outside:
        """All of these, in their order."""
        holders, nids, kinds, names = zip(*parts, strict=True)
        return Outside(np.concatenate(holders), np.concatenate(nids), np.concatenate(kinds), Texts.joined(names))


NO_NAMES = Outside(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), Texts.of([]))


def directory_in(holder: int, nid: int, name: bytes) -> Outside:
    """The name of a directory in another one."""
    holders, nids, kinds = np.array([[holder], [nid], [erofs.DIRECTORY]], np.int64)
    return Outside(holders, nids, kinds, Texts.of([name]))


@dataclass(slots=True)
class Table:
    """Columns of objects: `mode` is type and permission bits, `size` in bytes (that of a directory is found when
    it is laid out), `device` and `block` are where a file of one chunk begins. `chunks` and `stored` have the
    content of others.

    Columns of entries: `holder` is the directory, an object of this table; `child` a reference; `kind` the type as
    EROFS counts them; `names`, without the two dots that every directory has. `parent` is a reference for each
    directory, in their order.
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
    names: Texts
    chunks: dict[int, Chunks] = field(default_factory=dict)
    stored: Stored = NOTHING_STORED
