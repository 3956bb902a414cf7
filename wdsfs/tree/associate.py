"""Step "associate": adds the columns of a label file to the samples that it names."""

from __future__ import annotations

import numpy as np

from wdsfs.tree.composition import text_of
from wdsfs.tree.draft import MISSING_WAY_OUT, SHIFT, TWICE_WAY_OUT, VALUES, Draft, Labels, rows_of


def add_labels(draft: Draft, labels: Labels) -> None:
    """Add the columns of these labels, in place of the shard's own. Raises ViewError."""
    samples = draft.samples().tolist()
    known = labels.find([draft.paths[number] for number in samples])
    place = draft.place(VALUES, labels.path, labels.fingerprint)
    mtime = labels.fingerprint.mtime_ns
    missing, twice, found = [], [], []
    numbers: dict[bytes, int] = {}
    for entry in samples:
        lines = known.get(draft.paths[entry])
        if lines is None:
            missing.append(entry)
        elif len(lines) > 1:
            twice.append(entry)
        else:
            for extension, value in lines[0].items():
                number = numbers.get(extension)
                if number is None:
                    number = numbers[extension] = (
                        draft.number_of(extension) if draft.wanted.wants(extension) else -1
                    )
                if number >= 0:
                    row = draft.values.number(value)
                    found.append((entry, number, place << SHIFT | row, len(value), mtime))
    where = text_of(labels.path)
    kept = draft.judged(draft.wanted.missing, np.array(missing, int), f"is not in {where}", MISSING_WAY_OUT)
    unique = draft.judged(
        draft.wanted.duplicates, np.array(twice, int), f"is more than once in {where}", TWICE_WAY_OUT
    )
    rows = rows_of(found)
    # Semantics decision: a label wins over the shard's own column, as in webdataset's `associate`.
    replaced = np.isin(draft.codes(draft.rows), draft.codes(rows))
    own = draft.rows.take(~replaced | draft.strays[draft.rows.entry])
    draft.rows = own.plus(rows)
    draft.keep(kept & unique)
