"""Compares an overlay with its shards, in terms of samples: for `wdsfs diff`, and for a commit.

`find` walks the upper beside the tree of the lower (`commit/walk.py`) and returns for each shard the members that
are removed, replaced and added, and the samples that are removed, changed, renamed and added
(`commit/summary.py`). Files that no tar of samples can hold are returned with the reason. Nothing is written.

New members of an existing sample go after its last member, new samples in a shard's directory after the shard's
last sample, everything else into further shards. docs/overlay.md says the same to users.

Where members lie in a tar is known to `commit/source_layout.py`, and what is written to which shard to
`commit/plan.py`. One thread.
"""

from __future__ import annotations

from collections.abc import Callable

from wdsfs.commit.changes import (
    Changes,
    Rules,
)
from wdsfs.commit.homes import Spot
from wdsfs.commit.summary import SampleSummary
from wdsfs.commit.walk import Walk
from wdsfs.dataset.indexing import NotIndexed
from wdsfs.dataset.tree import LowerTree
from wdsfs.inodes import ROOT
from wdsfs.overlay.upper_format import UpperNode


def find(
    tree: LowerTree,
    upper: UpperNode,
    open_file: Callable[[UpperNode], int],
    rules: Rules = Rules(),  # noqa: B008  # immutable
) -> Changes:
    """What the upper changes in the tree. `open_file` opens one of its files.

    Raises ShardErrors for shards that have to be looked at and cannot be, OSErrors of the upper.
    """
    while True:
        walk = Walk(tree, open_file, rules)
        try:
            tree.prepare()
            walk.directory(upper, Spot(b"", ROOT))
            found = SampleSummary(walk).changes()
            found.upper, found.covered = upper, walk.covered
            return found
        except NotIndexed as wanted:
            tree.lower.index_now(wanted.number)
