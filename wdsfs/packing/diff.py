"""Compares an overlay with its shards, sample by sample: for `wdsfs diff`, and for a commit.

`find` walks the upper beside the tree of the lower (`packing/walk.py`) and returns for each shard the members that
are removed, replaced and added, and the samples that are removed, changed, renamed and added
(`packing/summary.py`). Files that no tar of samples can hold are returned with the reason. Nothing is written.

New members of an existing sample go after its last member, new samples in a shard's directory after the shard's
last sample, everything else into further shards. docs/overlay.md has the same rules for users.

`packing/source_layout.py` knows the places of members in a tar, `packing/plan.py` decides what is written to which
shard. One thread.
"""

from __future__ import annotations

from collections.abc import Callable

from wdsfs.inodes import ROOT
from wdsfs.overlay.upper_format import UpperNode
from wdsfs.packing.changes import Changes, Rules
from wdsfs.packing.homes import Spot
from wdsfs.packing.summary import SampleSummary
from wdsfs.packing.walk import Walk
from wdsfs.tree.indexing import indexed
from wdsfs.tree.tree import LowerTree


def find(
    tree: LowerTree,
    upper: UpperNode,
    open_file: Callable[[UpperNode], int],
    rules: Rules = Rules(),  # noqa: B008  # immutable
) -> Changes:
    """Return the changes of the tree by the upper. `open_file` opens a file of the upper.

    Raises ShardErrors for shards that are needed and cannot be read, OSErrors of the upper.
    """
    return indexed(_find, tree, upper, open_file, rules)


def _find(tree: LowerTree, upper: UpperNode, open_file: Callable[[UpperNode], int], rules: Rules) -> Changes:
    walk = Walk(tree, open_file, rules)
    tree.prepare()
    walk.directory(upper, Spot(b"", ROOT))
    found = SampleSummary(walk).changes()
    found.upper, found.covered = upper, walk.covered
    return found
