"""Step "join": adds the members of the same samples from a parallel set of shards."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wdsfs.tree.composition import text_of
from wdsfs.tree.draft import MISSING, MISSING_WAY_OUT, SHIFT, TWICE, TWICE_WAY_OUT, Draft, JoinedSet, Rows


def add_joined(draft: Draft, joined: JoinedSet) -> None:
    """Add the members that this set has for the same keys. Raises ViewError, ShardErrors."""
    samples = draft.samples()
    shards, entries = joined.find([draft.paths[number] for number in samples.tolist()])
    missing, twice = samples[shards == MISSING], samples[shards == TWICE]
    kept = draft.judged(draft.wanted.missing, missing, "is not in the set that is joined", MISSING_WAY_OUT)
    unique = draft.judged(
        draft.wanted.duplicates, twice, "is more than once in the set that is joined", TWICE_WAY_OUT
    )
    found = [
        _joined_rows(draft, joined, number, samples[shards == number], entries[shards == number])
        for number in np.unique(shards[shards >= 0]).tolist()
    ]
    draft.keep(_add(draft, found) & kept & unique)


def _joined_rows(
    draft: Draft, joined: JoinedSet, number: int, samples: NDArray[np.int64], entries: NDArray[np.int64]
) -> Rows:
    """The members of these entries of a joined shard, as members of these samples."""
    record, path = joined.record(number), joined.path(number)
    place = draft.shard_places.get(path)
    if place is None:
        place = draft.shard_places[path] = len(draft.places)
        draft.places.append(draft.shard_place(path, record))
    starts = np.asarray(record.entry_member).astype(np.int64)
    first, counts = starts[entries], starts[entries + 1] - starts[entries]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    members = np.repeat(first, counts) + within
    own = [record.extension_name[one] for one in range(len(record.extension_name))]
    wanted = np.array([draft.wanted.wants(one) for one in own], bool)
    numbers = np.array([draft.number_of(one) if draft.wanted.wants(one) else -1 for one in own], np.int64)
    extension = record.array("member.ext")[members]
    return Rows(
        np.repeat(samples, counts),
        numbers[extension],
        members | place << SHIFT,
        np.asarray(record.array("member.size"))[members].astype(np.int64),
        record.mtimes_ns(members),
    ).take(wanted[extension])


def _add(draft: Draft, found: list[Rows]) -> NDArray[np.bool_]:
    """Add joined members. A column that the sample has already is a duplicate; return the entries to keep."""
    kept = np.ones(len(draft.paths), bool)
    for rows in found:
        clash = np.isin(draft.codes(rows), draft.codes(draft.rows))
        if clash.any():
            first = draft.extensions[int(rows.extension[clash][0])]
            text = f"has the column {text_of(first)!r} itself, and so has the set that is joined"
            kept &= draft.judged(draft.wanted.duplicates, np.unique(rows.entry[clash]), text, TWICE_WAY_OUT)
            rows = rows.take(~clash)
        draft.rows = draft.rows.plus(rows)
    return kept
