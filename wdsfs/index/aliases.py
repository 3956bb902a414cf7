"""Shown names that differ from plain ones, because a name is odd or another child of the directory has it.

`find_aliases` finds them for each of the three domains in which names can collide (head of `record.py`). How an
odd name is shown is decided in `names.py`, which child gets a disputed name in `_assign`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from wdsfs import names
from wdsfs.index.record import BY_EXTENSION, BY_NAME, FILES, STRAY
from wdsfs.index.record_order import OrderedDraft
from wdsfs.inodes import FOLDER, MEMBER, SAMPLE, position


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
        """Aliases of folders and of samples as directories."""
        aliases: list[Alias] = []
        for folder in self.dirty_folders:
            aliases += _assign(position(FOLDER, folder), self.draft.directories(folder))
        return aliases

    def sample_files(self, full: bool) -> list[Alias]:
        """Aliases of files in sample directories: extensions that repeat, are odd, or collide with a sub-key."""
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
        """Aliases in the tree of all members, where a name can be taken by any other member or a folder."""
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
        """Folders in which two samples have the same key."""
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
        """Samples in which an extension occurs twice."""
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
        """Folders where a stray could take the name of something else."""
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
    wanted = {shown for _, _, shown in escaped}
    taken = set(taken)
    latest: dict[bytes, int] = {}
    aliases = []
    for child, plain, shown in escaped:
        name, number = shown, latest.get(shown, 1)
        while name in taken or (name != shown and name in wanted):
            number += 1
            name = names.numbered(shown, number)
        latest[shown] = number
        taken.add(name)
        if name != plain:
            aliases.append(Alias(child, parent, name))
    return aliases


def _shown_names(parent: int, children: list[tuple[int, bytes]]) -> set[bytes]:
    """The names under which the children of a directory are shown."""
    shown = dict(children)
    shown.update((alias.child, alias.name) for alias in _assign(parent, children))
    return set(shown.values())
