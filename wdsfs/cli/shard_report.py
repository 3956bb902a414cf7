"""The output of `commit` and `pack` as lines, tables and JSON: the shards of a plan, written or not."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from wdsfs.cli.output import print_table, say, table_of
from wdsfs.errors import UsageError, bytes_text
from wdsfs.remote.shard_paths import is_remote

if TYPE_CHECKING:
    from wdsfs.packing.plan import Plan, Remark, Step

STOPPED = "; what is finished is kept, and the same command goes on from there"
_WORDS = {"rewrite": "rewritten", "new": "new", "copy": "copied", "link": "linked"}


def steps_json(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Return the shards of a plan, as `--json` shows them."""
    return [
        {
            "shard": _text(step.target),
            "action": step.action,
            "samples": step.samples,
            "bytes": step.output.length,
        }
        for step in steps
    ]


def remarks_json(remarks: Sequence[Remark]) -> list[dict[str, str]]:
    """Return remarks about files, as `--json` shows them."""
    return [{"path": _text(remark.path), "reason": remark.reason} for remark in remarks]


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def print_steps(steps: Sequence[Step]) -> None:
    """Write the shards of a plan that is not carried out (`--dry-run`)."""
    table = table_of("shard", "action", "samples", "bytes")
    for step in steps:
        cells = (f"{step.samples:,}", bytes_text(step.output.length))
        table.add_row(os.fsdecode(step.target), step.action, *cells)
    print_table(table)


def say_left_out(plan: Plan) -> None:
    """Say which files are in no shard."""
    for remark in plan.left_out:
        say(f"left out: {os.fsdecode(remark.path)}: {remark.reason}")


def say_done(plan: Plan, done: Sequence[Step], seconds: float) -> None:
    """Print how many shards there are now, and how many of them were written in these seconds."""
    counts = Counter(step.action for step in plan.steps)
    parts = [f"{counts[action]:,} {word}" for action, word in _WORDS.items() if counts[action]]
    before = len(plan.steps) - len(done)
    there = f", {before} of them there already" if before else ""
    samples = sum(step.samples for step in plan.steps)
    size = bytes_text(sum(step.output.length for step in plan.steps))
    say(f"shards: {', '.join(parts)}{there}; {samples:,} samples, {size}, in {seconds:.1f} s")


def refuse_exports(paths: Sequence[bytes], exports: Sequence[str]) -> None:
    """Raise UsageError for indexes that would go into a store, beside shards of these paths."""
    if exports and any(map(is_remote, paths)):
        raise UsageError(
            "--export writes beside the new shards, which a store is no place for: afterwards use `wdsfs export`"
        )
