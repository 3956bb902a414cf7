"""Where the bytes of all members of a shard are, in columns: the same as `ShardSet.content` says of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdsfs.index.record import Record
from wdsfs.tar.headers import BLOCK
from wdsfs.tree.texts import Ints

IN_DATA, APART, HELD = -1, -2, -3


class ContentColumns(NamedTuple):
    """For each member of a record the number of its `file` in `paths`, and the byte there from which on it lies.

    With IN_DATA it lies in `data` instead. Of what is not in one piece (APART), and of what has to be made (HELD),
    ask `ShardSet.content`.
    """

    paths: Sequence[bytes]
    file: Ints
    start: Ints
    data: NDArray[np.uint8]


NO_DATA = np.zeros(0, np.uint8)


def content_in_shard(record: Record, path: bytes) -> ContentColumns:
    """Of the record of a shard as it is; `path` is that of the shard."""
    file = np.zeros(record.members, np.int64)
    file[record.sparse_members()] = APART
    start = (record.array("member.head").astype(np.int64) + record.array("member.body")) * BLOCK
    return ContentColumns([path], file, start, NO_DATA)
