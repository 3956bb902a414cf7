"""The changes of an overlay as lines and JSON, for `diff`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from wdsfs.cli.output import say
from wdsfs.errors import counted

if TYPE_CHECKING:
    from wdsfs.packing.diff import ChangedSample, Changes
    from wdsfs.packing.plan import Remark


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
