"""Puts a draft into the order of the record, and finds its aliases: names that repeat, clash or are odd.

Children of a folder lie side by side, then in the order of the tar. `OrderedDraft` numbers folders, entries and
members by that order, and finds the samples that share their directory with a folder. `record_builder.py` packs
its columns.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdsfs import names
from wdsfs.index.member_draft import Folders, MemberDraft
from wdsfs.index.record import BY_EXTENSION, BY_NAME, FILES, HAS_SAMPLES, IS_TWIN, STRAY, TWIN
from wdsfs.inodes import FOLDER, MEMBER, SAMPLE, position


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
        folder = self.new_folder[_as_numbers(draft.entry_folder)]
        order = np.argsort(folder, kind="stable")
        self.new_entry = _inverse(order)
        self.entry_folder = folder[order]
        self.entry_names = [draft.entry_names[number] for number in order.tolist()]
        self.entry_flags = np.frombuffer(bytes(draft.entry_flags), dtype=np.uint8)[order].copy()
        self.entry_crc = _as_numbers(draft.entry_crc)[order]

    def _order_members(self, draft: MemberDraft) -> None:
        entry = self.new_entry[_as_numbers(draft.member_entry)]
        self.member_order = np.argsort(entry, kind="stable")
        self.new_member = _inverse(self.member_order)
        self.member_entry = entry[self.member_order]
        self.member_extension = _as_numbers(draft.member_extension)[self.member_order]
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
        """Mark and return the samples that share their path with a folder: `a.jpg` beside `a/b.jpg`."""
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
        """Return the entries of a folder."""
        first, last = np.searchsorted(self.entry_folder, [folder, folder + 1])
        return range(int(first), int(last))

    def members(self, entry: int) -> range:
        """Return the members of an entry."""
        first, last = np.searchsorted(self.member_entry, [entry, entry + 1])
        return range(int(first), int(last))

    def child_folders(self, folder: int) -> list[tuple[int, bytes]]:
        """Return position and name of the folders in a folder."""
        return [(position(FOLDER, number), self.folder_names[number]) for number in self._children(folder)]

    def directories(self, folder: int) -> list[tuple[int, bytes]]:
        """Return position and name of the directories in a folder: folders with samples below, then samples."""
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
        """Return the plain name of a member in the directory of its sample, `full` or only its extension."""
        extension: bytes = self.extensions[self.member_extension[member]]
        return b"%b.%b" % (self.entry_names[entry], extension) if full else extension


def _as_numbers(column: array[int]) -> NDArray[np.uint32]:
    """Return a column of the draft, without a copy."""
    return np.frombuffer(column, dtype=np.uint32) if column else np.zeros(0, dtype=np.uint32)


def _inverse(order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the new number of each row that is moved into this order."""
    new = np.empty(len(order), dtype=np.int64)
    new[order] = np.arange(len(order))
    return new


class Alias(NamedTuple):
    """The shown name of a child; `child` and `parent` are positions (`inodes.position`)."""

    child: int
    parent: int
    name: bytes


def find_aliases(draft: OrderedDraft, dangling: set[int]) -> dict[int, list[Alias]]:
    """Return the aliases of each domain in order. `dangling` are the links that no domain shows."""
    finder = _AliasFinder(draft, dangling)
    directories = finder.directories()
    return {
        BY_EXTENSION: sorted(directories + finder.sample_files(full=False)),
        BY_NAME: sorted(directories + finder.sample_files(full=True)),
        FILES: sorted(finder.files()),
    }


class _AliasFinder:
    """Finds the directories in which names can collide or are odd (`dirty`), and assigns names in these."""

    def __init__(self, draft: OrderedDraft, dangling: set[int]) -> None:
        self.draft, self.dangling = draft, dangling
        self.odd_folders: set[int] = set()
        if not draft.plain:
            self.odd_folders = {n for n, name in enumerate(draft.folder_names) if n and names.escape(name) != name}
        self.repeating = self._repeating_entries()
        dirty = self._folders_with_equal_keys()
        dirty |= self._folders_of(draft.odd_entries)
        dirty |= self._parents_of(self.odd_folders)
        self.dirty_folders = dirty  # in every domain

    def _folders_of(self, entries: Iterable[int]) -> set[int]:
        return {int(self.draft.entry_folder[entry]) for entry in entries}

    def _parents_of(self, folders: Iterable[int]) -> set[int]:
        return {int(self.draft.folder_parents[folder]) for folder in folders}

    def directories(self) -> list[Alias]:
        """Return aliases of folders and of samples as directories."""
        aliases: list[Alias] = []
        for folder in self.dirty_folders:
            aliases += _assign(position(FOLDER, folder), self.draft.directories(folder))
        return aliases

    def sample_files(self, full: bool) -> list[Alias]:
        """Return aliases of files in sample directories: extensions that repeat, are odd, or clash."""
        draft = self.draft
        dirty = set(draft.twins) | self.repeating
        if full:  # such a name is odd only if the member's whole name is: it has a stem, so is never "." or ".."
            dirty |= draft.odd_entries
        else:
            dirty |= self._entries_with_odd_extensions()
        aliases: list[Alias] = []
        for entry in dirty:
            if draft.entry_flags[entry] & STRAY:
                continue
            twin = draft.twins.get(entry)
            parent, taken = position(SAMPLE, entry), set()
            if twin is not None:  # the folder's own children have their names already
                parent = position(FOLDER, twin)
                taken = _shown_names(parent, draft.directories(twin))
            files = [(position(MEMBER, m), draft.file_name(entry, m, full)) for m in draft.members(entry)]
            aliases += _assign(parent, files, taken)
        return aliases

    def files(self) -> list[Alias]:
        """Return aliases in the tree of all members, where a name can be taken by any other member or a folder."""
        draft = self.draft
        dotted = {n for n, name in enumerate(draft.folder_names) if n and b"." in name}
        dirty = self.dirty_folders | self._folders_of(self.repeating) | self._parents_of(dotted)
        dirty |= self._folders_with_strays()
        aliases: list[Alias] = []
        for folder in dirty:
            children = draft.child_folders(folder)
            for entry in draft.entries(folder):
                stray = draft.entry_flags[entry] & STRAY
                for member in draft.members(entry):
                    if member not in self.dangling:
                        name = draft.entry_names[entry] if stray else draft.file_name(entry, member, full=True)
                        children.append((position(MEMBER, member), name))
            aliases += _assign(position(FOLDER, folder), children)
        return aliases

    # --- where names can collide

    def _folders_with_equal_keys(self) -> set[int]:
        """Return folders in which two samples have the same key."""
        draft = self.draft
        samples = np.flatnonzero((draft.entry_flags & STRAY) == 0)
        crcs = draft.entry_crc[samples]
        order = np.argsort(crcs, kind="stable")
        same = np.flatnonzero(crcs[order][1:] == crcs[order][:-1])
        doubtful = {int(samples[order[at]]) for step in (0, 1) for at in (same + step).tolist()}
        seen: set[tuple[int, bytes]] = set()
        folders = set()
        for entry in doubtful:
            key = (int(draft.entry_folder[entry]), draft.entry_names[entry])
            if key in seen:
                folders.add(key[0])
            seen.add(key)
        return folders

    def _repeating_entries(self) -> set[int]:
        """Return samples in which an extension occurs twice."""
        draft = self.draft
        pairs = draft.member_entry.astype(np.int64) << 32 | draft.member_extension.astype(np.int64)
        pairs = np.sort(pairs)
        repeated = (pairs[1:][pairs[1:] == pairs[:-1]] >> 32).tolist()
        return {entry for entry in repeated if not draft.entry_flags[entry] & STRAY}

    def _entries_with_odd_extensions(self) -> set[int]:
        draft = self.draft
        odd = [n for n, text in enumerate(draft.extensions) if names.escape(text) != text]
        if not odd:
            return set()
        return set(draft.member_entry[np.isin(draft.member_extension, odd)].tolist())

    def _folders_with_strays(self) -> set[int]:
        """Return folders where a stray could take the name of something else."""
        draft = self.draft
        strays = np.flatnonzero(draft.entry_flags & STRAY)
        if not len(strays):
            return set()
        crcs = draft.entry_crc[strays]
        repeated, counts = np.unique(crcs, return_counts=True)
        repeated = repeated[counts > 1]
        doubtful = np.isin(crcs, repeated) | np.isin(crcs, draft.folder_sums[1:])
        dotted = np.fromiter((b"." in draft.entry_names[n][1:] for n in strays.tolist()), bool, len(strays))
        return set(draft.entry_folder[strays[doubtful | dotted]].tolist())


def _assign(parent: int, children: list[tuple[int, bytes]], taken: Iterable[bytes] = ()) -> list[Alias]:
    """Give each child of a directory a name of its own; return the aliases of those that need one.

    Semantics decision: the first child (in the order given) that wants a name gets it; a later one gets the
    lowest free `name~N`, N from 2. Nothing is hidden. Names in `taken` are not free.
    """
    escaped = [(child, plain, names.escape(plain)) for child, plain in children]
    shown_names = {shown for _, _, shown in escaped}
    taken = set(taken)
    latest: dict[bytes, int] = {}
    aliases = []
    for child, plain, shown in escaped:
        name, number = shown, latest.get(shown, 1)
        while name in taken or (name != shown and name in shown_names):
            number += 1
            name = names.numbered(shown, number)
        latest[shown] = number
        taken.add(name)
        if name != plain:
            aliases.append(Alias(child, parent, name))
    return aliases


def _shown_names(parent: int, children: list[tuple[int, bytes]]) -> set[bytes]:
    """Return the names under which the children of a directory are shown."""
    shown = dict(children)
    shown.update((alias.child, alias.name) for alias in _assign(parent, children))
    return set(shown.values())
