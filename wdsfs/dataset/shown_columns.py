"""What a shard tree shows of a whole shard, in columns: for work over all names at once.

The same as `ShardTree.listing` says directory by directory, for records in which nothing is odd: no links, no
aliases, no sample that shares its directory with a folder. Of any other record there are no columns.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdsfs.dataset.shard_tree import ShardTree
from wdsfs.dataset.tree import Node
from wdsfs.index.record import BY_EXTENSION, IS_TWIN, STRAY, Record
from wdsfs.inodes import FOLDER, pack, position

Ints = NDArray[np.int64]


class ShownColumns(NamedTuple):
    """Directories are numbered: those of folders, then those of samples, in the order of the record.

    `folders` are the nodes of folder directories, the top first. `folder_holder`, `sample_holder` and
    `file_holder` are the directories that things are in (-1: the top's). `samples` are entries of the record, with
    the times (ns) of their directories; `members` those of the files. Names are `lengths` bytes of `text` from
    `starts` on, those of the folders first (without the top), then those of samples, then those of files.
    """

    folders: list[Node]
    folder_holder: Ints
    samples: Ints
    sample_holder: Ints
    sample_mtime_ns: Ints
    members: Ints
    file_holder: Ints
    text: NDArray[np.uint8]
    starts: Ints
    lengths: Ints


def columns_of(tree: ShardTree, number: int) -> ShownColumns | None:
    """The columns of a shard of a tree; None if something in it is odd. Raises what `ShardTree.listing` raises."""
    record = tree.lower.record(number)
    if tree.merged or not record.is_plain or record.aliases[tree.domain] is not None:
        return None
    if not tree.files_layout and bool((record.array("folder.flags") & IS_TWIN).any()):
        return None
    shown = [n for n in range(record.folders) if not n or tree.names.is_shown(record, n)]
    at = np.full(record.folders, -1, np.int64)
    at[shown] = np.arange(len(shown))
    holder = at[record.array("folder.parent")[shown].astype(np.int64)]
    holder[0] = -1
    entry_folder = np.repeat(np.arange(record.folders), _steps(record.array("folder.entry").astype(np.int64)))
    bounds = record.array("entry.member").astype(np.int64)
    every_member = np.arange(record.members)
    names = _Texts()
    names.add([record.folder_name[n] for n in shown[1:]])
    if tree.files_layout:
        samples = np.zeros(0, np.int64)
        members = every_member
        file_holder = at[np.repeat(entry_folder, _steps(bounds))]
        names.add(record.file_names(range(record.members)))
    else:
        is_sample = (record.array("entry.flags") & STRAY) == 0
        samples = np.flatnonzero(is_sample)
        rank = np.cumsum(is_sample) - 1 + len(shown)
        counts = _steps(bounds)
        members = every_member[np.repeat(is_sample, counts)]
        file_holder = np.repeat(rank, counts)[members]
        names.add_packed(record, "entry.name", samples)
        if tree.domain == BY_EXTENSION:
            names.add_packed(record, "ext.name", record.array("member.ext")[members].astype(np.int64))
        else:
            whole = record.file_names(range(record.members))
            names.add([whole[member] for member in members.tolist()])
    tag = tree.lower.tag(number)
    return ShownColumns(
        [tree.getattr(pack(tag, number, position(FOLDER, n))) for n in shown],
        holder,
        samples,
        at[entry_folder[samples]],
        record.mtimes_ns(bounds[:-1][samples]),
        members,
        file_holder,
        *names.columns(),
    )


def _steps(bounds: Ints) -> Ints:
    return bounds[1:] - bounds[:-1]


class _Texts:
    """Names as one text, with the start and length of each."""

    def __init__(self) -> None:
        self._texts: list[NDArray[np.uint8]] = []
        self._starts: list[Ints] = []
        self._lengths: list[Ints] = []
        self._size = 0

    def add(self, names: list[bytes]) -> None:
        lengths = np.fromiter(map(len, names), np.int64, len(names))
        self._append(np.frombuffer(b"".join(names), np.uint8), np.cumsum(lengths) - lengths, lengths)

    def add_packed(self, record: Record, section: str, numbers: Ints) -> None:
        """Names of a packed list of the record, by their numbers there."""
        bounds = record.array(f"{section}.start").astype(np.int64)
        text = record.array(section)
        self._append(text, bounds[numbers], _steps(bounds)[numbers])

    def _append(self, text: NDArray[np.uint8], starts: Ints, lengths: Ints) -> None:
        self._texts.append(text)
        self._starts.append(starts + self._size)
        self._lengths.append(lengths)
        self._size += len(text)

    def columns(self) -> tuple[NDArray[np.uint8], Ints, Ints]:
        return np.concatenate(self._texts), np.concatenate(self._starts), np.concatenate(self._lengths)
