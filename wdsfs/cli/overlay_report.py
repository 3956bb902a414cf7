"""The output of `diff` and `commit` as lines, tables and JSON: changes of an overlay, and shards written."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from wdsfs.cli.output import print_table, say, table_of, write_json
from wdsfs.errors import bytes_text, counted

if TYPE_CHECKING:
    from wdsfs.packing.diff import ChangedSample, Changes
    from wdsfs.packing.plan import Plan, Remark, Step


def show_changes(found: Changes) -> None:
    """Write the changes of an overlay, a line for each sample, then remarks."""
    for sample in [*found.samples, *found.others]:
        say(_sample_line(sample))
    remarks = {
        "conflict": found.conflicts,
        "cannot be packed": found.unpackable,
        "left behind": found.leavings,
        "note": found.notes,
    }
    for word, some in remarks.items():
        for one in some:
            say(f"{word}: {os.fsdecode(one.path)}: {one.reason}")


def counts_line(found: Changes) -> str:
    """Return the numbers of samples changed, by kind, and of files that cannot be packed, as a line."""
    counts = Counter(sample.kind for sample in found.samples)
    samples = [f"{counts[kind]:,} {kind}" for kind in ("added", "changed", "renamed", "removed")]
    samples += [f"{counts[kind]:,} {kind}" for kind in ("time only",) if counts[kind]]
    files = [f"{len(found.unpackable):,} cannot be packed"]
    files += [counted(len(found.conflicts), "conflict")] if found.conflicts else []
    files += [f"{len(found.leavings):,} left behind by programs"] if found.leavings else []
    return f"samples: {', '.join(samples)}; {', '.join(files)}"


def _sample_line(sample: ChangedSample) -> str:
    path = os.fsdecode(sample.path)
    if sample.was:
        path = f"{os.fsdecode(sample.was)} -> {path}"
    columns = [("+", sample.added), ("~", sample.changed), ("-", sample.removed), ("=", sample.times)]
    shown = [mark + os.fsdecode(one) for mark, some in columns for one in some]
    # Of a sample that comes or goes as a whole its extensions say nothing new.
    whole = sample.kind in ("added", "removed")
    return " ".join([f"{sample.kind:<8}", path, *(() if whole else shown)])


def changes_json(found: Changes) -> dict[str, Any]:
    """The changes of an overlay, as `diff --json` shows them."""

    def row(sample: ChangedSample) -> dict[str, Any]:
        columns = {name: _texts(getattr(sample, name)) for name in ("added", "changed", "removed", "times")}
        return {"kind": sample.kind, "path": _text(sample.path), "was": _text(sample.was) or None, **columns}

    remarks = {
        "conflicts": found.conflicts,
        "unpackable": found.unpackable,
        "leavings": found.leavings,
        "notes": found.notes,
    }
    return {
        "samples": [row(sample) for sample in found.samples],
        "others": [row(sample) for sample in found.others],
        **{key: _remarks_json(rows) for key, rows in remarks.items()},
    }


def _remarks_json(rows: Sequence[Remark]) -> list[dict[str, str]]:
    return [{"path": _text(one.path), "reason": one.reason} for one in rows]


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _texts(names: Sequence[bytes]) -> list[str]:
    return [_text(name) for name in names]


def steps_json(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """The shards of a plan, as `commit --json` shows them."""
    return [
        {
            "shard": _text(step.output.target),
            "action": step.action,
            "samples": step.samples,
            "bytes": step.output.length,
        }
        for step in steps
    ]


def unshown_samples(found: Changes) -> dict[str, int]:
    """Count samples that were removed or renamed: shards with only new and changed samples do not show these."""
    kinds = Counter(sample.kind for sample in found.samples)
    return {kind: kinds[kind] for kind in ("removed", "renamed")}


def _show_unshown(unshown: dict[str, int] | None) -> None:
    parts = [f"{count:,} {kind}" for kind, count in (unshown or {}).items() if count]
    if parts:
        say(f"these shards do not show which samples were removed or renamed: {', '.join(parts)}")


def show_plan(plan: Plan, unshown: dict[str, int] | None, as_json: bool) -> None:
    """Write the shards of a plan that is not carried out (`--dry-run`)."""
    rows = steps_json(plan.steps)
    if as_json:
        write_json(rows)
        return
    table = table_of("shard", "action", "samples", "bytes")
    for row in rows:
        table.add_row(row["shard"], row["action"], f"{row['samples']:,}", bytes_text(row["bytes"]))
    print_table(table)
    _show_left_out(plan)
    _show_unshown(unshown)


def show_done(
    plan: Plan, done: Sequence[Step], unshown: dict[str, int] | None, seconds: float, as_json: bool
) -> None:
    """Write what a commit has done in so many seconds."""
    if as_json:
        left_out = _remarks_json(plan.left_out)
        report = {
            "shards": steps_json(plan.steps),
            "written": len(done),
            "left_out": left_out,
            "seconds": round(seconds, 3),
        }
        write_json(report if unshown is None else {**report, "not_told": unshown})
        return
    _show_left_out(plan)
    if not plan.steps:
        say("the overlay changes no shard" if unshown is None else "the overlay adds and changes no sample")
        _show_unshown(unshown)
        return
    counts = Counter(step.action for step in plan.steps)
    parts = [f"{counts[action]:,} {word}" for action, word in _WORDS.items() if counts[action]]
    kept = f", {len(plan.steps) - len(done)} of them there already" if len(done) < len(plan.steps) else ""
    samples = sum(step.samples for step in plan.steps)
    size = bytes_text(sum(step.output.length for step in plan.steps))
    say(f"shards: {', '.join(parts)}{kept}; {samples:,} samples, {size}, in {seconds:.1f} s")
    for step in plan.steps:
        if step.action == "new":
            say(f"new: {os.fsdecode(step.output.target)}")
    _show_unshown(unshown)


def _show_left_out(plan: Plan) -> None:
    for one in plan.left_out:
        say(f"left out: {os.fsdecode(one.path)}: {one.reason}")


def show_further(steps: Sequence[Step]) -> None:
    """Say which new shards the next mount has to name."""
    new = [os.path.basename(os.fsdecode(step.output.target)) for step in steps if step.action == "new"]
    if new:
        shards = "this shard" if len(new) == 1 else "these shards"
        names = ", ".join(new) if len(new) <= 3 else f"{new[0]} ... {new[-1]}"
        say(f"SHARDS of the next mount must include {shards}, too: {names}")


_WORDS = {"rewrite": "rewritten", "new": "new", "copy": "copied", "link": "linked"}
