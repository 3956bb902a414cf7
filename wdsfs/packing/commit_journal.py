"""The plan of an in-place commit as JSON: the content of `commit.json`."""

from __future__ import annotations

import json
import os
from typing import Any

from wdsfs.errors import MALFORMED, CommitError
from wdsfs.overlay.overlay_directory import (
    OverlayDirectory,
    state_of,
)
from wdsfs.packing.changes import Remark
from wdsfs.packing.pieces import CopiedRange, NewMember, Piece, Zeros
from wdsfs.packing.steps import Output, Plan, SourceShard, Step
from wdsfs.storage.identity import Fingerprint
from wdsfs.tree.shard_set import ShardSet

VERSION = 2  # of the journal; 1 has no checksums: shards are known again by size and mtime


def read_plan(place: OverlayDirectory, lower: ShardSet) -> Plan:
    """Return the plan of an unfinished commit of this set. Raises CommitError."""
    path = state_of(place) / "commit.json"
    try:
        plan = plan_from_json(path.read_bytes())
    except (OSError, *MALFORMED) as error:
        raise CommitError(f"{path} cannot be used: {error}") from None
    for number, source in plan.sources.items():
        if number >= len(lower) or lower.shards[number].path != source.path:
            text = f"shard {number + 1} of the set was {os.fsdecode(source.path)} when the commit was begun"
            raise CommitError(f"{text}: name the same SHARDS in the same order")
    return plan


def plan_to_json(plan: Plan) -> bytes:
    """The plan as `plan_from_json` reads it."""
    steps = [
        {
            "target": os.fsdecode(step.output.target),
            "action": step.action,
            "number": step.number,
            "samples": step.samples,
            "pieces": [_piece_to_json(piece) for piece in step.output.pieces],
        }
        for step in plan.steps
    ]
    sources = {
        number: [os.fsdecode(one.path), one.fingerprint, one.checksum] for number, one in plan.sources.items()
    }
    upper = {os.fsdecode(path): list(stamp) for path, stamp in plan.upper.items()}
    left_out = [[os.fsdecode(one.path), one.reason] for one in plan.left_out]
    about = {"version": VERSION, "sources": sources, "steps": steps, "upper": upper, "left_out": left_out}
    return json.dumps(about, indent=1).encode() + b"\n"


def plan_from_json(data: bytes) -> Plan:
    """Return the plan. Raises one of MALFORMED for JSON that `plan_to_json` does not write."""
    about = json.loads(data)
    if about["version"] not in (1, VERSION):
        raise ValueError(f"version {about['version']}, not {VERSION}")
    plan = Plan()
    for number, (path, fingerprint, *checksum) in about["sources"].items():
        plan.sources[int(number)] = SourceShard(os.fsencode(path), Fingerprint(*fingerprint), *checksum)
    plan.upper = {os.fsencode(path): (inode, ctime) for path, (inode, ctime) in about["upper"].items()}
    plan.left_out = [Remark(os.fsencode(path), reason) for path, reason in about.get("left_out", ())]
    for one in about["steps"]:
        output = Output(os.fsencode(one["target"]), [_piece_from_json(piece) for piece in one["pieces"]])
        plan.steps.append(Step(output, one["action"], one["number"], one["samples"]))
    return plan


def _piece_to_json(piece: Piece) -> list[Any]:
    if isinstance(piece, CopiedRange):
        return ["run", *piece]
    if isinstance(piece, Zeros):
        return ["zeros", *piece]
    common = [key.decode() for key in piece.common]
    return ["new", os.fsdecode(piece.name), os.fsdecode(piece.path), piece.size, piece.mtime_ns, common]


def _piece_from_json(piece: list[Any]) -> Piece:
    kind, *rest = piece
    if kind == "run":
        return CopiedRange(*rest)
    if kind == "zeros":
        return Zeros(*rest)
    name, path, size, mtime_ns, common = rest
    return NewMember(os.fsencode(name), os.fsencode(path), size, mtime_ns, tuple(key.encode() for key in common))
