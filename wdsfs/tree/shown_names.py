"""The names that a record shows in each directory of a shard: from a name to a position and back.

A position is a kind (folder, sample, member) and an index in the record (`inodes.py`). Nothing here needs more
than the record and the view; which directory a shard or a merged tree makes of it is decided by the trees.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from wdsfs.errors import NotADirectory
from wdsfs.index.record import BY_EXTENSION, BY_NAME, HAS_SAMPLES, STRAY, TWIN, Record
from wdsfs.inodes import FOLDER, MEMBER, SAMPLE, index_of, kind_of, position
from wdsfs.tree.tree import SAMPLES_LAYOUT, View, text_of


class ShownNames:
    """The names that records show in one view."""

    def __init__(self, view: View) -> None:
        self.domain = view.domain
        self.files_layout = view.layout != SAMPLES_LAYOUT

    # --- from a name to a position

    def find(self, record: Record, where: int, name: bytes) -> int | None:
        """The position of the child with this shown name of the directory at `where`."""
        kind = kind_of(where)
        if kind == MEMBER:
            raise NotADirectory(f"{text_of(name)!r}: its parent is a file")
        aliases = record.aliases[self.domain]
        if aliases is not None:
            child = aliases.find(_crc_below(record, where, name), home_of(record, where), name)
            if child is not None and (kind == FOLDER or kind_of(child) == MEMBER):
                return child
        for child in self._find_plain(record, where, name):
            if aliases is None or aliases.of(child) is None:
                return child
        return None

    def _find_plain(self, record: Record, where: int, name: bytes) -> Iterator[int]:
        """The children with this plain name; one with an alias is shown under another name."""
        if kind_of(where) == SAMPLE:
            yield from self._find_in_sample(record, index_of(where), name)
            return
        folder = index_of(where)
        crc = record.crc_below(folder, name)
        child = record.find_folder(folder, name, crc)
        if child is not None and self.is_shown(record, child):
            yield position(FOLDER, child)
        if self.files_layout:
            yield from self.find_file(record, folder, name, crc)
            return
        for entry in record.find_entries(folder, name, crc):
            if not record.entry_flags[entry] & (STRAY | TWIN):
                yield position(SAMPLE, entry)
        twin = record.twin_sample(folder)
        if twin is not None:
            yield from self._find_in_sample(record, twin, name)

    def is_shown(self, record: Record, folder: int) -> bool:
        """True if a folder has a directory: with directories of samples, one without samples below it has none."""
        return self.files_layout or bool(record.folder_flags[folder] & HAS_SAMPLES)

    def _find_in_sample(self, record: Record, entry: int, name: bytes) -> Iterator[int]:
        if self.domain == BY_NAME:
            stem = record.entry_name[entry] + b"."
            if not name.startswith(stem):
                return
            name = name[len(stem) :]
        for member in record.find_members(entry, name):
            yield position(MEMBER, member)

    def find_file(self, record: Record, folder: int, name: bytes, crc: int) -> Iterator[int]:
        """The files that are shown under this name in a folder of the files layout."""
        stem, dot, extension = name.partition(b".")
        if dot and stem:
            for member in record.find_files(folder, stem, extension):
                yield position(MEMBER, member)
        for entry in record.find_entries(folder, name, crc):
            if record.entry_flags[entry] & STRAY:
                for member in record.entry_members(entry):
                    if record.link_target(member) is not None:
                        yield position(MEMBER, member)

    # --- from a position to names

    def children(self, record: Record, where: int, after: int, twins: bool = False) -> Iterator[int]:
        """Positions of the children of a directory after the cursor: files of its sample, folders, samples or
        files.

        With `twins` also samples that share their directory with a folder.
        """
        kind, index = kind_of(where), index_of(where)
        if kind == SAMPLE:
            yield from _after(MEMBER, record.entry_members(index), after)
            return
        if self.files_layout:
            if kind_of(after) in (0, FOLDER):
                yield from _after(FOLDER, record.child_folders(index), after)
            entries = record.folder_entries(index)
            members = range(record.entry_member[entries.start], record.entry_member[entries.stop])
            for child in _after(MEMBER, members, after):
                if not record.has_links or record.link_target(index_of(child)) is not None:
                    yield child
            return
        if kind_of(after) in (0, MEMBER):
            twin = record.twin_sample(index)
            if twin is not None:
                yield from _after(MEMBER, record.entry_members(twin), after)
            after = 0
        if kind_of(after) in (0, FOLDER):
            for child in _after(FOLDER, record.child_folders(index), after):
                if record.all_sampled or self.is_shown(record, index_of(child)):
                    yield child
            after = 0
        hidden = STRAY if twins else STRAY | TWIN
        for child in _after(SAMPLE, record.folder_entries(index), after):
            if not record.entry_flags[index_of(child)] & hidden:
                yield child

    def shown(self, record: Record, child: int) -> bytes:
        """The name under which a child is listed."""
        aliases = record.aliases[self.domain]
        if aliases is not None:
            name = aliases.of(child)
            if name is not None:
                return name
        kind, index = kind_of(child), index_of(child)
        if home_of(record, child) != child:
            return self.shown(record, home_of(record, child))
        if kind == FOLDER:
            return record.folder_name[index]
        if kind == SAMPLE:
            return record.entry_name[index]
        if self.domain == BY_EXTENSION:
            return record.extension(index)
        entry = record.entry_of(index)
        if record.entry_flags[entry] & STRAY:
            return record.entry_name[entry]
        return record.entry_name[entry] + b"." + record.extension(index)

    def positions_of(self, record: Record, where: int) -> list[int]:
        """The positions under which this one is shown: its own, and in the files layout those of hard links to
        it."""
        if kind_of(where) != MEMBER or not self.files_layout or record.link_count(index_of(where)) < 2:
            return [where]
        links = record.array("link.member")[record.array("link.target") == index_of(where)]
        return [where, *(position(MEMBER, one) for one in links.tolist() if one != index_of(where))]

    def holder(self, record: Record, where: int) -> int:
        """The position of the directory in which a position is shown."""
        kind, index = kind_of(where), index_of(where)
        if kind == FOLDER:
            return position(FOLDER, record.folder_parent[index])
        if kind == SAMPLE:
            return position(FOLDER, record.folder_of(index))
        entry = record.entry_of(index)
        if self.files_layout:
            return position(FOLDER, record.folder_of(entry))
        return home_of(record, position(SAMPLE, entry))


def _after(kind: int, indexes: range, after: int) -> Iterator[int]:
    """Positions of these indexes after the cursor `after`."""
    first = max(indexes.start, index_of(after) + 1) if kind_of(after) == kind else indexes.start
    base = kind << 30
    return (base | index for index in range(first, indexes.stop))


def home_of(record: Record, where: int) -> int:
    """The directory of a sample's files: its own, or that of the folder with the same path."""
    twin = record.twin_folder(index_of(where)) if kind_of(where) == SAMPLE else None
    return where if twin is None else position(FOLDER, twin)


def parent_folder(record: Record, where: int) -> int | None:
    """The folder that holds the directory at a position; None for the directory of the shard."""
    kind, index = kind_of(where), index_of(where)
    if kind != FOLDER:
        return record.folder_of(index)
    return record.folder_parent[index] if index else None


def _crc_below(record: Record, where: int, name: bytes) -> int:
    if kind_of(where) == FOLDER:
        return record.crc_below(index_of(where), name)
    return zlib.crc32(name, zlib.crc32(record.entry_path(index_of(where)) + b"/"))
