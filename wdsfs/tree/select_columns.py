"""Step "columns": shows chosen extensions only, each under the name that was typed or given."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wdsfs.tree.composition import EMPTY, Column, text_of
from wdsfs.tree.draft import FIELD, MISSING_WAY_OUT, NOTHING, SHIFT, Draft, rows_of


def select(draft: Draft) -> None:
    """Choose for each output one of its alternatives; files of fields that no output names stay as they are."""
    rows, count = draft.rows, len(draft.paths)
    kept = np.ones(count, bool)
    free = _free_fields(draft)
    taken = free.copy()
    chosen = [(np.flatnonzero(free), rows.extension[free])]
    found = []
    empty = -1
    for column in draft.wanted.columns:
        ranks, shown = _matches(draft, column)
        matches = np.flatnonzero(ranks >= 0)
        # Semantics decision: the first in the order of the tar, as in DALI; with a name the first in the order in
        # which they are typed, as in webdataset's `rename`.
        if column.name:
            matches = matches[np.lexsort((matches, ranks[matches], rows.entry[matches]))]
        entries, first = np.unique(rows.entry[matches], return_index=True)
        first = matches[first]
        # Under its own name a member is shown once; others may show it under other names, too.
        fresh = first if column.name else first[~taken[first]]
        if not column.name:
            taken[fresh] = True
        chosen.append((fresh, shown[rows.extension[fresh]]))
        missing = np.setdiff1d(np.arange(count), entries, assume_unique=True)
        text = f"has no column {text_of(b';'.join(column.alternatives))!r}"
        way_out = MISSING_WAY_OUT
        if not len(entries):  # not one has it: it may be called otherwise
            way_out = f"{_columns_hint(draft, column.alternatives)}; {MISSING_WAY_OUT}"
            if any(b"," in one for one in column.alternatives):
                way_out = f"between columns to choose from is a semicolon: --columns 'jpg;png'; {way_out}"
        kept &= draft.judged(draft.wanted.missing, missing, text, way_out)
        if len(missing) and draft.wanted.missing == EMPTY:
            empty = draft.place(NOTHING, draft.source.path, ()) if empty < 0 else empty
            name, mtime = draft.number_of(_name_of(column)), draft.record.fingerprint.mtime_ns
            found += [(entry, name, empty << SHIFT, 0, mtime) for entry in missing.tolist()]
    numbers, extensions = (np.concatenate(some) for some in zip(*chosen, strict=True))
    order = np.argsort(numbers, kind="stable")  # that of the tar
    draft.rows = rows.take(numbers[order])
    draft.rows.extension = extensions[order]
    draft.rows = draft.rows.plus(rows_of(found))
    draft.keep(kept)


def _free_fields(draft: Draft) -> NDArray[np.bool_]:
    """Which rows are files of fields that no output names."""
    free = [number for number, place in enumerate(draft.places) if place["kind"] == FIELD]
    rows = draft.rows
    named = [number for number, one in enumerate(draft.extensions) if draft.wanted.shows(one)]
    return np.isin(rows.address >> SHIFT, free) & ~np.isin(rows.extension, named)


def _name_of(column: Column) -> bytes:
    return column.name or column.alternatives[0]


def _matches(draft: Draft, column: Column) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each row the rank of the alternative that it matches, or -1; for each extension the one to be shown."""
    typed = _typed(draft, column.alternatives)
    if column.name:
        name = draft.number_of(column.name)
        typed = {number: (rank, name) for number, (rank, _) in typed.items()}
    ranks = np.full(len(draft.extensions), -1, np.int64)
    shown = np.arange(len(draft.extensions))
    for number, (rank, name) in typed.items():
        ranks[number], shown[number] = rank, name
    return ranks[draft.rows.extension], shown


def _columns_hint(draft: Draft, alternatives: tuple[bytes, ...]) -> str:
    """Return a hint at what a column that no sample of the shard has may have meant."""
    there, hint = draft.columns(), draft.columns_there()
    for one in alternatives:
        parts = one.split(b",")
        if len(parts) > 1 and all(part in there for part in parts):
            options = " ".join(f"--columns {text_of(part)}" for part in parts)
            return f"{hint}; for several columns write {options}"
        if one.lstrip(b".*") in there:
            return f"{hint}; write --columns {text_of(one.lstrip(b'.*'))}"
        if any(one.lower() == other.lower() for other in there):
            return f"{hint}; --ignore-case matches any letter case"
    return hint


def _typed(draft: Draft, alternatives: tuple[bytes, ...]) -> dict[int, tuple[int, int]]:
    """The extensions that match one of these, with the rank of that one, and the number of what is shown."""
    ranks = {one: rank for rank, one in reversed([*enumerate(alternatives)])}
    if not draft.wanted.ignore_case:
        there = [(draft.numbers[one], rank) for one, rank in ranks.items() if one in draft.numbers]
        return {number: (rank, number) for number, rank in there}
    lowered = {one.lower(): one for one in reversed(alternatives)}
    typed = {}
    for number, extension in enumerate(list(draft.extensions)):
        name = extension if extension in ranks else lowered.get(extension.lower())
        if name is not None:
            typed[number] = ranks[name], draft.number_of(name)
    return typed
