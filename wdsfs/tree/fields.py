"""Step "fields": makes files of fields of JSON columns: `caption.txt` of `caption` in `json`.

Only their sizes are kept. The content is taken out of the JSON again when it is read (`derived_content.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from wdsfs.errors import CorruptShard
from wdsfs.tar.problems import BROKEN_FIELD, Problem
from wdsfs.tree import json_fields
from wdsfs.tree.composition import Field, text_of
from wdsfs.tree.draft import FIELD, OWN, SHIFT, TWICE_WAY_OUT, Draft, rows_of


class _File(NamedTuple):
    """A file of a field: its size (bytes), and why reading it fails."""

    size: int
    problem: Problem | None = None


def add_fields(draft: Draft) -> None:
    """Add a file for each field that a sample has. Raises ViewError, ShardErrors."""
    own = set(draft.codes(draft.rows).tolist())
    clashing: set[int] = set()
    found = []
    columns: dict[bytes, list[tuple[Field, int, int]]] = {}
    for one in draft.wanted.fields:
        place = draft.place(FIELD, b"", ())
        draft.places[place]["field"] = one.path
        columns.setdefault(one.column, []).append((one, place, draft.number_of(one.name)))
    same = draft.same()
    for column, fields in columns.items():
        for at in _members(draft, column):
            entry, address = int(draft.rows.entry[at]), int(draft.rows.address[at])
            files = _files(draft, at, [one for one, _, _ in fields])
            for (one, place, extension), made in zip(fields, files, strict=True):
                if made is None:
                    continue
                # Semantics decision: as for joined columns, only what is shown can clash.
                if draft.wanted.shows(one.name) and entry << 32 | int(same[extension]) in own:
                    clashing.add(entry)
                    continue
                row = place << SHIFT | len(draft.fields)
                found.append((entry, extension, row, made.size, int(draft.rows.mtime[at])))
                draft.fields.append(address)
                if made.problem is not None:
                    draft.if_shown[row] = made.problem
    draft.rows = draft.rows.plus(rows_of(found))
    if clashing:
        text = "has a column of the name of a --field itself"
        draft.keep(draft.judged(draft.wanted.duplicates, np.array(sorted(clashing)), text, TWICE_WAY_OUT))


def _members(draft: Draft, column: bytes) -> list[int]:
    """For each sample the first row with this column, in the order of the shard, so that the disk is read once."""
    rows = draft.rows
    at = np.flatnonzero(np.isin(rows.extension, draft.matching(column)) & ~draft.strays[rows.entry])
    first = at[np.unique(rows.entry[at], return_index=True)[1]]
    ordered: list[int] = first[np.argsort(rows.address[first], kind="stable")].tolist()
    return ordered


def _files(draft: Draft, at: int, fields: list[Field]) -> list[_File | None]:
    """The files of these fields of the member in this row; None for no file.

    Semantics decision: what cannot be read may have the field, so there is a file, and reading it fails. It has
    the size of the JSON, because a file without bytes would be read without an error.
    """
    size, address = int(draft.rows.size[at]), int(draft.rows.address[at])
    try:
        json_fields.refuse_size(size)
        document: Any = json_fields.parse(draft.read(address))
    except CorruptShard as error:
        return [_File(max(size, 1), _problem(draft, at, error))] * len(fields)
    found: list[_File | None] = []
    for one in fields:
        try:
            data = json_fields.content_at(document, one.path)
            found.append(None if data is None else _File(len(data)))
        except CorruptShard as error:
            found.append(_File(max(size, 1), _problem(draft, at, error)))
    return found


def _problem(draft: Draft, at: int, error: CorruptShard) -> Problem:
    """The problem of a member, by its row, of which fields cannot be read."""
    address = int(draft.rows.address[at])
    name = text_of(draft.paths[int(draft.rows.entry[at])] + b"." + draft.extensions[draft.rows.extension[at]])
    head = draft.record.member(address).head if address >> SHIFT == OWN else 0
    return Problem(head, BROKEN_FIELD, f"{name}: {error}; reading what --field makes of it fails")
