"""A draft in the order of the record: children of a folder side by side, then in the order of the tar.

`OrderedDraft` numbers folders, entries and members anew, and finds the samples that share their directory with a
folder. `record_builder.py` packs its columns, `aliases.py` asks it which children a directory has.
"""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from wdsfs.index.member_draft import Folders, MemberDraft
from wdsfs.index.record import HAS_SAMPLES, IS_TWIN, STRAY, TWIN
from wdsfs.inodes import FOLDER, SAMPLE, position


class OrderedDraft:
    """Columns of the folders, entries and members of a draft, each in the order of the record.

    `new_folder`, `new_entry` and `new_member` give the number in the record for each number of the draft, and
    `member_order` the number in the draft for each member of the record.
    """

    def __init__(self, draft: MemberDraft) -> None:
        self.plain = draft.plain  # no name needs an escape
        self._order_folders(draft.folders)
        self._order_entries(draft)
        self._order_members(draft)
        self.odd_entries = {int(self.new_entry[number]) for number in draft.odd_entries}
        self.folder_flags = self._folder_flags()
        self.twins = self._find_twins()  # entry -> folder

    def _order_folders(self, folders: Folders) -> None:
        order = folders.breadth_first()
        self.new_folder = _inverse(np.array(order))
        self.folder_names = [folders.names[number] for number in order]
        self.folder_sums = np.array([folders.sums[number] for number in order], dtype=np.uint32)
        self.folder_prefixes = [folders.prefixes[number] for number in order]
        self.folder_parents = self.new_folder[[folders.parents[number] for number in order]]
        self.folder_parents[0] = 0

    def _order_entries(self, draft: MemberDraft) -> None:
        folder = self.new_folder[_rows(draft.entry_folder)]
        order = np.argsort(folder, kind="stable")
        self.new_entry = _inverse(order)
        self.entry_folder = folder[order]
        self.entry_names = [draft.entry_names[number] for number in order.tolist()]
        self.entry_flags = np.frombuffer(bytes(draft.entry_flags), dtype=np.uint8)[order].copy()
        self.entry_crc = _rows(draft.entry_crc)[order]

    def _order_members(self, draft: MemberDraft) -> None:
        entry = self.new_entry[_rows(draft.member_entry)]
        self.member_order = np.argsort(entry, kind="stable")
        self.new_member = _inverse(self.member_order)
        self.member_entry = entry[self.member_order]
        self.member_extension = _rows(draft.member_extension)[self.member_order]
        self.extensions = list(draft.extensions)

    def _folder_flags(self) -> NDArray[np.uint8]:
        flags = np.zeros(len(self.folder_names), dtype=np.uint8)
        sampled = self.entry_folder[(self.entry_flags & STRAY) == 0]
        flags[sampled] = HAS_SAMPLES
        for number in range(len(flags) - 1, 0, -1):  # children come after their parents
            if flags[number]:
                flags[self.folder_parents[number]] |= HAS_SAMPLES
        return flags

    def _find_twins(self) -> dict[int, int]:
        """Flag and return the samples that share their path with a folder: `a.jpg` beside `a/b.jpg`."""
        twins: dict[int, int] = {}
        numbers = {
            (int(self.folder_parents[n]), self.folder_names[n]): n
            for n in range(1, len(self.folder_names))
            if self.folder_flags[n] & HAS_SAMPLES
        }
        if not numbers:
            return twins
        crcs = self.folder_sums[list(numbers.values())]
        for entry in np.flatnonzero(np.isin(self.entry_crc, crcs) & ((self.entry_flags & STRAY) == 0)).tolist():
            folder = numbers.pop((int(self.entry_folder[entry]), self.entry_names[entry]), None)
            if folder is not None:  # only the first sample of a key shares the directory; others get a suffix
                twins[entry] = folder
                self.entry_flags[entry] |= TWIN
                self.folder_flags[folder] |= IS_TWIN
        return twins

    # --- the children of a directory

    def entries(self, folder: int) -> range:
        """The entries of a folder."""
        first, last = np.searchsorted(self.entry_folder, [folder, folder + 1])
        return range(int(first), int(last))

    def members(self, entry: int) -> range:
        """The members of an entry."""
        first, last = np.searchsorted(self.member_entry, [entry, entry + 1])
        return range(int(first), int(last))

    def child_folders(self, folder: int) -> list[tuple[int, bytes]]:
        """Position and name of the folders in a folder."""
        return [(position(FOLDER, number), self.folder_names[number]) for number in self._children(folder)]

    def directories(self, folder: int) -> list[tuple[int, bytes]]:
        """Position and name of the directories in a folder: folders with samples below, then samples."""
        folders = [
            (position(FOLDER, number), self.folder_names[number])
            for number in self._children(folder)
            if self.folder_flags[number]
        ]
        samples = [
            (position(SAMPLE, entry), self.entry_names[entry])
            for entry in self.entries(folder)
            if not self.entry_flags[entry] & (STRAY | TWIN)
        ]
        return folders + samples

    def _children(self, folder: int) -> range:
        first, last = np.searchsorted(self.folder_parents[1:], [folder, folder + 1]) + 1
        return range(int(first), int(last))

    def file_name(self, entry: int, member: int, full: bool) -> bytes:
        """The plain name of a member in the directory of its sample, `full` or only its extension."""
        extension: bytes = self.extensions[self.member_extension[member]]
        return b"%b.%b" % (self.entry_names[entry], extension) if full else extension


def _rows(column: array[int]) -> NDArray[np.uint32]:
    """A column of the draft, without a copy."""
    return np.frombuffer(column, dtype=np.uint32) if column else np.zeros(0, dtype=np.uint32)


def _inverse(order: NDArray[np.int64]) -> NDArray[np.int64]:
    """The new number of each row that is moved into this order."""
    new = np.empty(len(order), dtype=np.int64)
    new[order] = np.arange(len(order))
    return new
