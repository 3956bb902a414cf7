"""Step "decode": adds the content of members that are compressed one by one: `x.json` beside `x.json.gz`."""

from __future__ import annotations

import numpy as np

from wdsfs.errors import CorruptShard
from wdsfs.tar import member_reader
from wdsfs.tar.problems import UNDECODED, Problem
from wdsfs.tree.composition import text_of
from wdsfs.tree.draft import DECODED, OWN, SHIFT, Draft, rows_of


def decode(draft: Draft) -> None:
    """Add the decoded content of compressed members; those that cannot be decoded become problems."""
    place = draft.place(DECODED, b"", ())
    there = set(draft.codes(draft.rows).tolist())
    found = []
    known = ((number, draft.wanted.codec_of(one)) for number, one in enumerate(list(draft.extensions)))
    chosen = [(number, *codec) for number, codec in known if codec is not None and draft.wanted.wants(codec[1])]
    into = [draft.number_of(name) for _, _, name in chosen]
    sames = draft.same()[into].tolist()
    order = np.argsort(draft.rows.extension, kind="stable")
    ordered = draft.rows.extension[order]
    for (number, codec, _), decoded, same in zip(chosen, into, sames, strict=True):
        extension = draft.extensions[number]
        first, last = np.searchsorted(ordered, [number, number + 1])
        for at in order[first:last].tolist():
            entry, address = int(draft.rows.entry[at]), int(draft.rows.address[at])
            code = entry << 32 | same
            # Semantics decision: a member `x.json` of the shard wins over a decoded `x.json.gz`.
            if draft.strays[entry] or code in there:
                continue
            there.add(code)
            size = _decoded_size(draft, codec, address, entry, extension)
            if size is not None:
                row = (entry, decoded, place << SHIFT | len(draft.decoded), size, int(draft.rows.mtime[at]))
                found.append(row)
                draft.decoded.append((address, codec))
    draft.rows = draft.rows.plus(rows_of(found))


def _decoded_size(draft: Draft, codec: int, address: int, entry: int, extension: bytes) -> int | None:
    """Return the decoded size of a member in bytes; None, and add a problem, if it cannot be decoded."""
    try:
        return len(member_reader.decode(codec, draft.read(address)))
    except CorruptShard as error:
        name = text_of(draft.paths[entry] + b"." + extension)
        head = draft.record.member(address).head if address >> SHIFT == OWN else 0
        draft.problems.append(Problem(head, UNDECODED, f"{name}: {error}; it is shown as it is"))
        return None
