"""A commit's plan: its steps, one for each shard that is written, and the sources as they were.

A plan is complete before the first byte is written. `packing/plan.py` makes it; `packing/run.py` and
`packing/replace_in_place.py` carry it out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from wdsfs import names
from wdsfs.index.record import STRAY, Record
from wdsfs.packing.changes import Remark
from wdsfs.packing.pieces import CopiedRange, NewMember, Piece
from wdsfs.packing.source_layout import SourceLayout
from wdsfs.remote.shard_paths import is_remote
from wdsfs.storage.identity import Fingerprint
from wdsfs.tar import headers
from wdsfs.tree.indexing import indexed
from wdsfs.tree.shard_set import ShardSet

COPY, LINK, REWRITE, NEW = "copy", "link", "rewrite", "new"


@dataclass(slots=True)
class Output:
    """A shard to be written: its path, and its pieces in order.

    `layouts` are those of the source shards of its copied ranges, to verify it; None for a copy of a whole shard.
    """

    target: bytes
    pieces: list[Piece]
    layouts: Mapping[int, SourceLayout] | None = None

    @property
    def length(self) -> int:
        return sum(piece.length for piece in self.pieces)

    @property
    def first_change(self) -> int:
        """The offset of the first byte that may differ from a source shard: all before it is copied from one."""
        at, source = 0, None
        for piece in self.pieces:
            if not isinstance(piece, CopiedRange) or piece.start != at or source not in (None, piece.shard):
                break
            at, source = piece.end, piece.shard
        return at


def member_names(output: Output, lower: ShardSet) -> Iterator[tuple[bytes, bytes]]:
    """Yield key and extension of the members of samples in a shard to be written, in the order of the tar."""
    for piece in output.pieces:
        if isinstance(piece, NewMember):
            split = names.split(piece.name)
            if split is not None:
                yield split.folder + split.stem, split.extension
        elif isinstance(piece, CopiedRange):
            yield from _copied_names(indexed(lower.plain.record, piece.shard), piece)


def _copied_names(record: Record, piece: CopiedRange) -> Iterator[tuple[bytes, bytes]]:
    heads = record.array("member.head").astype(np.int64) * headers.BLOCK
    rows = np.flatnonzero((heads >= piece.start) & (heads < piece.end))
    for member in rows[np.argsort(heads[rows])].tolist():
        entry = record.entry_of(member)
        if not record.entry_flags[entry] & STRAY:
            yield record.entry_path(entry), record.extension_name[record.array("member.ext")[member]]


class SourceShard(NamedTuple):
    """A source shard as it was when the commit was planned. `checksum` is that of its record, "" if not known."""

    path: bytes
    fingerprint: Fingerprint
    checksum: str = ""


class Step(NamedTuple):
    """One shard of a plan: what is done (COPY, LINK, REWRITE, NEW), and how many samples it has.

    `number` is the source shard; None if there are several, or none.
    """

    output: Output
    action: str
    number: int | None
    samples: int


@dataclass(slots=True)
class Plan:
    """All shards that are to be written, in order, and the sources as they were when this was planned.

    `upper` is for an in-place commit of an upper that the kernel wrote: everything in it but directories, as
    path: (inode, ctime in ns). The kernel does not know of our commits, and may go on writing there.

    `left_out` are the files of the upper that are not written, with the reason.
    """

    steps: list[Step] = field(default_factory=list)
    sources: dict[int, SourceShard] = field(default_factory=dict)
    upper: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    left_out: list[Remark] = field(default_factory=list)

    @property
    def length(self) -> int:
        """The bytes that will be written."""
        return sum(step.output.length for step in self.steps if step.action != LINK)

    @property
    def sent(self) -> int:
        """The bytes of these that will go to a store."""
        return sum(step.output.length for step in self.steps if is_remote(step.output.target))
