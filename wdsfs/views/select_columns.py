"""Step "columns": shows chosen extensions only, each under the name that was typed."""

from __future__ import annotations

import numpy as np

from wdsfs.views.composition import EMPTY, text_of
from wdsfs.views.draft import MISSING_WAY_OUT, NOTHING, SHIFT, Draft, rows_of

COLUMNS_NAMED = 20  # columns that a message names


def select(draft: Draft) -> None:
    """Of each output's alternatives the first in the order of the tar, as DALI does."""
    rows, count = draft.rows, len(draft.paths)
    chosen = np.zeros(len(rows.entry), bool)
    shown = rows.extension.copy()
    kept = np.ones(count, bool)
    found = []
    empty = -1
    for alternatives in draft.wanted.columns:
        typed = _typed(draft, alternatives)
        matches = np.isin(rows.extension, list(typed))
        entries, first = np.unique(rows.entry[matches], return_index=True)
        first = np.flatnonzero(matches)[first]
        fresh = first[~chosen[first]]
        chosen[fresh] = True
        names_ = np.arange(len(draft.extensions))
        for number, name in typed.items():
            names_[number] = name
        shown[fresh] = names_[rows.extension[fresh]]
        missing = np.setdiff1d(np.arange(count), entries, assume_unique=True)
        text = f"has no column {text_of(b';'.join(alternatives))!r}"
        way_out = MISSING_WAY_OUT
        if not len(entries):  # not one has it: it may be called otherwise
            way_out = f"{_columns_hint(draft, alternatives)}; {MISSING_WAY_OUT}"
        kept &= draft.judged(draft.wanted.missing, missing, text, way_out)
        if len(missing) and draft.wanted.missing == EMPTY:
            empty = draft.place(NOTHING, draft.source.path, ()) if empty < 0 else empty
            name, mtime = draft.number_of(alternatives[0]), draft.record.fingerprint[1]
            found += [(entry, name, empty << SHIFT, 0, mtime) for entry in missing.tolist()]
    rows.extension = shown
    draft.rows = rows.take(chosen).plus(rows_of(found))
    draft.keep(kept)


def _columns_hint(draft: Draft, alternatives: tuple[bytes, ...]) -> str:
    """What may have been meant by a column that no sample of the shard has."""
    there = [one for one in draft.extensions if one]
    more = f" and {len(there) - COLUMNS_NAMED} more" if len(there) > COLUMNS_NAMED else ""
    named = ", ".join(repr(text_of(one)) for one in there[:COLUMNS_NAMED])
    hint = f"the shard has the columns {named}{more}" if there else "the shard has no columns"
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


def _typed(draft: Draft, alternatives: tuple[bytes, ...]) -> dict[int, int]:
    """The extensions that match one of these, with the one that each is shown as."""
    if not draft.wanted.ignore_case:
        return {draft.numbers[one]: draft.numbers[one] for one in alternatives if one in draft.numbers}
    lowered = {one.lower(): one for one in reversed(alternatives)}
    typed = {}
    for number, extension in enumerate(list(draft.extensions)):
        name = extension if extension in alternatives else lowered.get(extension.lower())
        if name is not None:
            typed[number] = draft.number_of(name)
    return typed
