"""Finds the sample of a file in the upper: one of the lower, a new one, or none.

Reads records, and names of members from shards; no content. One thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from wdsfs import inodes, names
from wdsfs.index.record import BY_NAME, STRAY, Record
from wdsfs.inodes import FOLDER, MEMBER, ROOT, SAMPLE, index_of, kind_of
from wdsfs.packing.changes import (
    DOTTED_KEY,
    HIDDEN,
    META,
    NO_EXTENSION,
    ODD_FOLDER,
    OTHER_STEM,
    OUTSIDE,
    OUTSIDE_FILES,
    OUTSIDE_MERGED,
    RESERVED,
)
from wdsfs.tar.member_reader import read_name
from wdsfs.tree.tree import AT_PARENT, LowerTree


@dataclass(frozen=True, slots=True)
class Spot:
    """A directory of the upper: its shown path, and the directory of the lower at the same place.

    `lower` is the inode number of the lower's directory, 0 if there is none. `shard` is its number, None for a new
    directory at the top and everywhere in a merged tree; `top` is the name of the new directory. `components` are
    the folders of its files, as they are written in the tar. `left`: it and all in it are leftovers of a program.
    """

    path: bytes
    lower: int
    shard: int | None = None
    top: bytes = b""
    components: tuple[bytes, ...] = ()
    left: bool = False

    def below(self, name: bytes) -> bytes:
        """The shown path of a name in this directory."""
        return self.path + b"/" + name if self.path else name


class Home(NamedTuple):
    """The sample that a new file belongs to: an existing one (`entry` of a shard), or a new one with this key."""

    shard: int | None
    entry: int
    top: bytes
    key: bytes


class Homes:
    """Finds the sample of a file, and of a directory.

    `paths` has the shown paths of samples, by shard and entry; the path of each sample that is found is added.
    """

    def __init__(self, tree: LowerTree, paths: dict[tuple[int, int], bytes]) -> None:
        self.tree, self.lower, self.paths = tree, tree.lower, paths
        self._entries: dict[tuple[tuple[bytes, ...], bytes], tuple[int, int] | None] = {}

    def find(self, spot: Spot, name: bytes) -> tuple[Home, bytes] | str:
        """Return the sample and the extension of a new file, or the reason why it is in no sample."""
        at_top = spot.shard is None and not spot.top and not self.tree.merged
        if at_top:
            return self._outside()
        found = self._in_files(spot, name) if self.tree.files_layout else self._in_sample(spot, name)
        return self._outside() if found is None else found

    def home(self, spot: Spot) -> Home:
        """Return the sample of a directory: that of the lower, or a new one."""
        _, number, where = inodes.unpack(spot.lower)
        if spot.lower and kind_of(where) == SAMPLE:
            return self._existing(number, index_of(where))
        if spot.lower and kind_of(where) == FOLDER and spot.lower != ROOT:
            twin = self._twin(spot.lower)
            if twin is not None:
                return self._existing(*twin)
        return Home(spot.shard, -1, spot.top, b"/".join(spot.components))

    def _twin(self, folder: int) -> tuple[int, int] | None:
        """Return the shard and the sample that shares its directory with a folder. Its files are listed first."""
        first = next(self.tree.listing(folder, AT_PARENT), None)
        if first is None or kind_of(first.node.inode) != MEMBER:
            return None
        _, number, where = inodes.unpack(first.node.inode)
        return number, self.lower.record(number).entry_of(index_of(where))

    def _existing(self, number: int, entry: int) -> Home:
        """Return a sample of a shard, with its key as written in the tar (with `./`, for example)."""
        record = self.lower.record(number)
        member = record.entry_member[entry]
        return Home(number, entry, b"", self.member_name(number, member)[: -len(record.extension(member)) - 1])

    def member_name(self, number: int, member: int) -> bytes:
        """Return the name of a member as written in the tar."""
        content = self.lower.content(number, self.lower.tag(number), member)
        return read_name(content.file.source, self.lower.record(number).member(member).head)

    def plain(self, name: bytes, found: int | None) -> bytes:
        """Return the name of a directory as written in the tar."""
        if found is None:
            plain = names.unescape(name)
            return plain if names.escape(plain) == name else name
        _, number, where = inodes.unpack(found)
        record = self.lower.record(number)
        kind = kind_of(where)
        return record.folder_name[index_of(where)] if kind == FOLDER else record.entry_name[index_of(where)]

    def _outside(self) -> str:
        if self.tree.files_layout:
            return OUTSIDE_FILES
        return OUTSIDE_MERGED if self.tree.merged else OUTSIDE

    def _in_sample(self, spot: Spot, name: bytes) -> tuple[Home, bytes] | str | None:
        """Return the sample and the extension of a new file in a sample's directory, or why it has none."""
        if not spot.components:
            return None
        home = self.home(spot)
        if home.shard is not None and home.entry >= 0:
            self.paths.setdefault((home.shard, home.entry), spot.path)
        extension = self.plain(name, None)
        if self.tree.domain == BY_NAME:
            stem = spot.components[-1] + b"."
            if not extension.startswith(stem):
                return NO_EXTENSION if b"." not in extension else OTHER_STEM
            extension = extension[len(stem) :]
        return self._checked(home, extension)

    def _in_files(self, spot: Spot, name: bytes) -> tuple[Home, bytes] | str | None:
        """Return the sample and the extension of a new file in the files layout, or why it has none."""
        base = self.plain(name, None)
        stem, dot, extension = base.partition(b".")
        if not dot:
            return NO_EXTENSION
        place = self._entry_at(spot, stem)
        key = b"/".join((*spot.components, stem))
        home = Home(spot.shard, -1, spot.top, key) if place is None else self._existing(*place)
        if place is not None:
            self.paths.setdefault(place, spot.below(stem))
        return self._checked(home, extension)

    def _entry_at(self, spot: Spot, stem: bytes) -> tuple[int, int] | None:
        """Return the first sample of this key, in the shard or in the merged set."""
        key = spot.components, stem
        if spot.shard is not None:
            entry = self._entry_in(spot.shard, *key)
            return None if entry is None else (spot.shard, entry)
        if spot.top:
            return None
        if key not in self._entries:
            found = ((n, self._entry_in(n, *key)) for n in range(len(self.lower)))
            self._entries[key] = next(((n, entry) for n, entry in found if entry is not None), None)
        return self._entries[key]

    def _entry_in(self, number: int, components: tuple[bytes, ...], stem: bytes) -> int | None:
        record = self.lower.record(number)
        folder = _folder_of(record, components)
        if folder is None:
            return None
        entries = record.find_entries(folder, stem, record.crc_below(folder, stem))
        return next((entry for entry in entries if not record.entry_flags[entry] & STRAY), None)

    def _checked(self, home: Home, extension: bytes) -> tuple[Home, bytes] | str:
        """Check that readers find this key and this extension in the name of the member."""
        if extension.lower() in names.RESERVED:
            return RESERVED
        found = names.split(home.key + b"." + extension)
        if found is None:
            base = home.key.rpartition(b"/")[2]
            return HIDDEN if not base or base.startswith(b".") else META
        if found.folder + found.stem != home.key:
            return DOTTED_KEY
        if home.entry < 0 and b"/".join((*names.folder_components(found.folder), found.stem)) != home.key:
            return ODD_FOLDER
        return home, extension


def _folder_of(record: Record, components: Sequence[bytes]) -> int | None:
    folder: int | None = 0
    for component in components:
        if folder is not None:
            folder = record.find_folder(folder, component, record.crc_below(folder, component))
    return folder
