"""Hard links of a shard, resolved: each gets the content, times and kind of the member that it names."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wdsfs import names
from wdsfs.index.member_draft import MemberDraft
from wdsfs.index.record import STRAY
from wdsfs.names import readable
from wdsfs.tar.problems import Problem, Problems


def resolve(draft: MemberDraft, columns: dict[str, NDArray[np.int64]], problems: Problems) -> dict[int, int]:
    """Return for each link that does not dangle its row and that of its target, which is no link itself.

    `columns` and `draft` get what the link shares with its target. A link that dangles is added to `problems`.
    """
    if not draft.links:
        return {}
    targets: dict[int, int] = {}
    found = _last_members(draft)
    for link in draft.links:
        target = found.get(link.row)
        if target is None:
            offset = int(columns["head"][link.row])
            text = f"hard link at offset {offset} to {readable(link.target)!r}, which is not before it"
            problems.append(Problem(offset, "dangling link", text))
        else:
            targets[link.row] = targets.get(target, target)
    for row, target in targets.items():
        for column in columns.values():
            column[row] = column[target]
    return targets


def _last_members(draft: MemberDraft) -> dict[int, int]:
    """For each link (by its row) the row of the last earlier member with the name that it points to."""
    targets: dict[int, tuple[int | None, bytes]] = {}
    for link in draft.links:
        folder, base = names.split_folder(link.target)
        targets[link.row] = draft.folders.find(folder), base
    wanted = set(targets.values())
    last: dict[tuple[int | None, bytes], int] = {}
    found = {}
    extensions = list(draft.extensions)
    for row, (entry, extension) in enumerate(zip(draft.member_entry, draft.member_extension, strict=True)):
        if row in targets and targets[row] in last:
            found[row] = last[targets[row]]
        name = draft.entry_names[entry]
        if not draft.entry_flags[entry] & STRAY:
            name += b"." + extensions[extension]
        place = draft.entry_folder[entry], name
        if place in wanted and (row not in targets or row in found):
            last[place] = row
    return found
