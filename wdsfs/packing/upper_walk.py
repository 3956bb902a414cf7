"""The walk of an upper beside the tree of the lower, which collects the changes of each member.

Finds the sample of each file: one of the lower, a new one, or none. `diff.py` turns the result into samples.
Writes nothing. One thread.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from wdsfs import inodes, names
from wdsfs.durable import named
from wdsfs.errors import NoSuchEntry, NotADirectory
from wdsfs.index.record import BY_EXTENSION, BY_NAME, STRAY, Record
from wdsfs.inodes import FOLDER, MEMBER, ROOT, SAMPLE, index_of, kind_of
from wdsfs.overlay.upper_format import DIRECTORY, FILE, SYMLINK, WHITEOUT, Origin, UpperNode
from wdsfs.packing import reasons
from wdsfs.packing.plan import NewMember, Remark
from wdsfs.tree import content as content_module
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
        """Return the shown path of a name in this directory."""
        return self.path + b"/" + name if self.path else name


class Home(NamedTuple):
    """The sample that a new file belongs to: an existing one (`entry` of a shard), or a new one with this key."""

    shard: int | None
    entry: int
    top: bytes
    key: bytes


FileKey = tuple[tuple[bytes, ...], bytes]  # the folders of a file, and the stem of its name


class Homes:
    """Finds the sample of a file, and of a directory.

    `paths` has the shown paths of samples, by shard and entry; the path of each sample that is found is added.
    """

    def __init__(self, tree: LowerTree, paths: dict[tuple[int, int], bytes]) -> None:
        self.tree, self.lower, self.paths = tree, tree.lower, paths
        self._entries: dict[FileKey, tuple[int, int]] = {}  # of a merged set in the files layout

    def find(self, spot: Spot, name: bytes) -> tuple[Home, bytes] | str:
        """Return the sample and the extension of a new file, or the reason why it is in no sample."""
        at_top = spot.shard is None and not spot.top and not self.tree.merged
        if at_top:
            return self._outside()
        place = self._in_files(spot, name) if self.tree.files_layout else self._in_sample(spot, name)
        return self._outside() if place is None else place

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
        return Home(
            number, entry, b"", self.lower.member_name(number, member)[: -len(record.extension(member)) - 1]
        )

    def plain(self, name: bytes, inode: int | None) -> bytes:
        """Return the name of a directory as written in the tar."""
        if inode is None:
            plain = names.unescape(name)
            return plain if names.escape(plain) == name else name
        _, number, where = inodes.unpack(inode)
        record = self.lower.record(number)
        kind = kind_of(where)
        return record.folder_name[index_of(where)] if kind == FOLDER else record.entry_name[index_of(where)]

    def _outside(self) -> str:
        if self.tree.files_layout:
            return reasons.OUTSIDE_FILES
        return reasons.OUTSIDE_MERGED if self.tree.merged else reasons.OUTSIDE

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
                return reasons.NO_EXTENSION if b"." not in extension else reasons.OTHER_STEM
            extension = extension[len(stem) :]
        return self._checked(home, extension)

    def _in_files(self, spot: Spot, name: bytes) -> tuple[Home, bytes] | str | None:
        """Return the sample and the extension of a new file in the files layout, or why it has none."""
        base = self.plain(name, None)
        stem, dot, extension = base.partition(b".")
        if not dot:
            return reasons.NO_EXTENSION
        place = self._entry_at(spot, stem)
        key = b"/".join((*spot.components, stem))
        home = Home(spot.shard, -1, spot.top, key) if place is None else self._existing(*place)
        if place is not None:
            self.paths.setdefault(place, spot.below(stem))
        return self._checked(home, extension)

    def _entry_at(self, spot: Spot, stem: bytes) -> tuple[int, int] | None:
        """Return the first sample of this key, in the shard or in the merged set.

        REQUIRES: in a merged set `find_entries` has looked for the key.
        """
        if spot.shard is not None:
            entry = self._entry_in(spot.shard, spot.components, stem)
            return None if entry is None else (spot.shard, entry)
        return None if spot.top else self._entries.get((spot.components, stem))

    def find_entries(self, keys: Iterable[FileKey]) -> None:
        """Find the first sample of each of these keys in a merged set: each record is looked into once for all."""
        missing: dict[int, list[FileKey]] = {}  # by the checksum of the path, which is the same in all records
        for components, stem in keys:
            path = b"/".join((*components, stem))
            missing.setdefault(zlib.crc32(path), []).append((components, stem))
        for number in range(len(self.lower)):
            if not missing:
                return
            sums = self.lower.record(number).array("entry.hash")
            checksums = np.array([*missing], sums.dtype)
            first, stop = (np.searchsorted(sums, checksums, side) for side in ("left", "right"))
            for checksum in checksums[first < stop].tolist():
                for key in list(missing[checksum]):
                    entry = self._entry_in(number, *key)
                    if entry is not None:
                        self._entries[key] = number, entry
                        missing[checksum].remove(key)
                if not missing[checksum]:
                    del missing[checksum]

    def _entry_in(self, number: int, components: tuple[bytes, ...], stem: bytes) -> int | None:
        record = self.lower.record(number)
        folder = _folder_of(record, components)
        if folder is None:
            return None
        entries = record.find_entries(folder, stem, record.crc_below(folder, stem))
        return next((entry for entry in entries if not record.entry_flags[entry] & STRAY), None)

    def _checked(self, home: Home, extension: bytes) -> tuple[Home, bytes] | str:
        """Check that readers find this key and this extension in the name of the member."""
        reason = reasons.misread(home.key, extension)
        if reason is None and home.entry < 0:
            folder, stem = names.split_folder(home.key)
            if b"/".join((*names.folder_components(folder), stem)) != home.key:
                reason = reasons.ODD_FOLDER
        return reason or (home, extension)


def _folder_of(record: Record, components: Sequence[bytes]) -> int | None:
    folder: int | None = 0
    for component in components:
        if folder is not None:
            folder = record.find_folder(folder, component, record.crc_below(folder, component))
    return folder


COMPARED_BYTES = 1 << 20  # bytes that are compared at a time


class UpperFile(NamedTuple):
    """A file of the upper, with its present `mtime_ns` and `size` (bytes)."""

    node: UpperNode
    path: bytes
    size: int
    mtime_ns: int

    def new(self, name: bytes) -> NewMember:
        """Return the new member with this name and the content of the file."""
        return NewMember(name, self.path, self.size, self.mtime_ns)


class Walk:
    """Collects the changes of each member."""

    def __init__(self, tree: LowerTree, open_file: Callable[[UpperNode], int], rules: Rules) -> None:
        self.tree, self.lower, self.open_file, self.rules = tree, tree.lower, open_file, rules
        self.gone: dict[int, set[int]] = {}  # by shard: members that are hidden
        self.files: dict[int, dict[int, UpperFile]] = {}  # by shard and member: the files that replace it
        self.times: dict[int, set[int]] = {}  # by shard: members that are replaced by the same content
        self.covering: dict[int, set[int]] = {}  # by shard: members that a copy of themselves covers
        self.fresh: dict[Home, dict[bytes, UpperFile]] = {}  # by sample and extension: new files
        self.origins: dict[Home, Origin] = {}  # the sample that a new one was before
        self.paths: dict[tuple[int, int], bytes] = {}  # by shard and entry: where the sample is shown
        self.homes = Homes(tree, self.paths)
        self.unpackable: list[Remark] = []
        self.conflicts: list[Remark] = []
        self.notes: list[Remark] = []
        self.leavings: list[Remark] = []
        self.covered: set[bytes] = set()  # paths of files of the upper that need not be written

    # --- directories

    def directory(self, node: UpperNode, spot: Spot) -> None:
        """Collect the changes in a directory of the upper and in everything below it."""
        if self.tree.merged and self.tree.files_layout:
            self.homes.find_entries(self._keys_of_new(node, spot))
        waiting = [(node, spot)]
        while waiting:
            node, spot = waiting.pop()
            if node.opaque and spot.lower:
                self.hide(spot.lower, spot.path)
            for name in sorted(node.children):
                child = node.children[name]
                inner = self._child(node, spot, name, child)
                if inner is not None:
                    waiting.append((child, inner))
            if not spot.lower and not any(child.kind != WHITEOUT for child in node.children.values()):
                self.notes.append(Remark(spot.path, reasons.EMPTY_DIRECTORY))

    def _keys_of_new(self, node: UpperNode, spot: Spot) -> set[FileKey]:
        """Return the keys of all files in a directory, and below it, that the lower does not have."""
        keys = set[FileKey]()
        waiting = [(node, spot)]
        while waiting:
            node, spot = waiting.pop()
            for name, child in node.children.items():
                inode = self._lookup(spot, name)
                if child.kind == DIRECTORY:
                    waiting.append((child, self._inside(spot, name, inode)))
                elif child.kind == FILE and (inode is None or not self._is_file(inode)):
                    keys.add((spot.components, self.homes.plain(name, None).partition(b".")[0]))
        return keys

    def _child(self, parent: UpperNode, spot: Spot, name: bytes, child: UpperNode) -> Spot | None:
        """Collect a name in a directory; returns the place to continue at if it is a directory."""
        path = spot.below(name)
        inode = self._lookup(spot, name)
        if child.kind == WHITEOUT:
            if inode is None:
                if not parent.opaque:
                    self.notes.append(Remark(path, reasons.DANGLING))
            else:
                self._hide_entry(inode, path)
            return None
        if inode is None and not spot.path and name == names.HIDDEN_DIRECTORY:
            self.unpackable.append(Remark(path, reasons.OF_MOUNT))  # made by hand, or by an earlier release
            return None
        if child.kind == DIRECTORY:
            return self._enter(spot, name, child, inode)
        if inode is not None and (kind_of(inode) != MEMBER or child.kind != FILE):
            if child.kind == SYMLINK and self._is_same_link(inode, child):
                _, number, where = inodes.unpack(inode)
                self.covering.setdefault(number, set()).add(index_of(where))
                self.covered.add(path)
                return None
            self._hide_entry(inode, path)
            inode = None
        if inode is None and self._is_left(spot, name, child):
            self.leavings.append(Remark(path, reasons.LEAVING))
        elif child.kind != FILE:
            self.unpackable.append(Remark(path, reasons.SYMBOLIC if child.kind == SYMLINK else reasons.SPECIAL))
        elif inode is not None:
            self._replace(spot, name, inode, child, path)
        else:
            # A directory that hides the lower has all that is left of a sample that was renamed to it.
            self._add(spot, name, child, path, parent.opaque or not spot.lower)
        return None

    def _lookup(self, spot: Spot, name: bytes) -> int | None:
        """Return the inode number of a child of the lower's directory, hidden or not."""
        if not spot.lower:
            return None
        try:
            return self.tree.lookup(spot.lower, name).inode
        except (NoSuchEntry, NotADirectory):
            return None

    def _enter(self, spot: Spot, name: bytes, child: UpperNode, inode: int | None) -> Spot:
        if inode is not None and kind_of(inode) == MEMBER:
            self._hide_entry(inode, spot.below(name))
            inode = None
        inner = self._inside(spot, name, inode)
        if inode is None and inner.components:
            self._note_escape(name, inner.path)
        origin = child.origin
        if inode is None and origin is not None and not self.tree.files_layout and inner.components:
            self.origins[self.homes.home(inner)] = origin
        return inner

    def _inside(self, spot: Spot, name: bytes, inode: int | None) -> Spot:
        """Return the place of a directory, which the lower has under this inode number, if it is one there."""
        if inode is not None and kind_of(inode) == MEMBER:
            inode = None
        path = spot.below(name)
        left = spot.left or (inode is None and names.is_leaving(name, directory=True))
        if spot.lower == ROOT and not self.tree.merged:
            number = None if inode is None else inodes.unpack(inode)[1]
            return Spot(path, inode or 0, number, name if number is None else b"", (), left)
        return Spot(
            path, inode or 0, spot.shard, spot.top, (*spot.components, self.homes.plain(name, inode)), left
        )

    def _is_file(self, inode: int) -> bool:
        """Return True for a regular member of the lower."""
        _, number, where = inodes.unpack(inode)
        return kind_of(where) == MEMBER and self.lower.record(number).symlink(index_of(where)) is None

    def _is_left(self, spot: Spot, name: bytes, child: UpperNode) -> bool:
        """Return True if a new file is a leftover of some program.

        Semantics decision: a column that a sample has in its shard is none, whatever its name; nor is it if the
        sample is renamed. (An editor's `cls~` may be the file that was `cls` in the shard.)
        """
        if self.rules.with_leavings or not (spot.left or names.is_leaving(name)):
            return False
        place = None if child.origin is None else self.place_of(child.origin)
        if place is None or kind_of(place[1]) != MEMBER:
            return True
        number, member = place[0], index_of(place[1])
        if self.tree.domain == BY_EXTENSION:
            return not names.is_leaving(self.lower.record(number).extension(member))
        return not names.is_leaving(self.lower.member_name(number, member).rpartition(b"/")[2])

    def place_of(self, origin: Origin) -> tuple[int, int] | None:
        """Return the shard and the position in its record of an origin; None if the shard has changed."""
        _, number, where = inodes.unpack(origin.inode)
        if number >= len(self.lower) or not self.lower.has_sum(number, origin.sum):
            return None
        record = self.lower.record(number)
        if index_of(where) >= (record.entries if kind_of(where) == SAMPLE else record.members):
            return None
        return number, where

    # --- removals

    def hide(self, inode: int, path: bytes) -> None:
        """Collect the removal of everything in the lower's directory."""
        if kind_of(inode) == SAMPLE:
            _, number, where = inodes.unpack(inode)
            entry = index_of(where)
            self.paths[number, entry] = path
            self.gone.setdefault(number, set()).update(self.lower.record(number).entry_members(entry))
            return
        for listed in list(self.tree.listing(inode, AT_PARENT)):
            # A hard link has the number of its member, and a cursor of its own.
            is_member = index_of(listed.cursor) == index_of(listed.node.inode)
            inner = path + b"/" + listed.name if path else listed.name
            self._hide_entry(listed.node.inode, inner, with_links=is_member)

    def _hide_entry(self, inode: int, path: bytes, *, with_links: bool = False) -> None:
        """Collect the removal of an entry. `with_links`: if it is a member, also one that has hard links."""
        if kind_of(inode) != MEMBER:
            self.hide(inode, path)
        elif self._is_linked(inode) and not with_links:
            self.conflicts.append(Remark(path, reasons.LINKED))
        else:
            _, number, where = inodes.unpack(inode)
            self._note_path(number, index_of(where), path)
            self.gone.setdefault(number, set()).add(index_of(where))

    def _note_path(self, number: int, member: int, path: bytes) -> None:
        """Keep the path of a member's sample: its directory; in the files layout the member without extension."""
        record = self.lower.record(number)
        entry = record.entry_of(member)
        if record.entry_flags[entry] & STRAY:
            shown = path
        elif self.tree.files_layout and record.has_links and record.link_count(member) > 1:
            # The path may be that of any link, in any folder.
            top = [] if self.tree.merged else [self.lower.shards[number].name]
            shown = b"/".join([*top, *map(names.escape, record.entry_path(entry).split(b"/"))])
        elif self.tree.files_layout:
            folder, base = names.split_folder(path)
            shown = folder + base.partition(b".")[0]
        else:
            shown = path.rpartition(b"/")[0]
        self.paths.setdefault((number, entry), shown)

    def _is_linked(self, inode: int) -> bool:
        _, number, where = inodes.unpack(inode)
        record = self.lower.record(number)
        return record.has_links and record.link_count(index_of(where)) > 1

    # --- replacements and additions

    def _replace(self, spot: Spot, name: bytes, inode: int, child: UpperNode, path: bytes) -> None:
        _, number, where = inodes.unpack(inode)
        member, file = index_of(where), self._file(child, path)
        if self.lower.record(number).symlink(member) is not None:
            self._hide_entry(inode, path)
            self._add(spot, name, child, path, False)
            return
        same = self.has_content(number, member, file)
        if same and (self.rules.ignore_times or self.has_time(number, member, file)):
            self.covering.setdefault(number, set()).add(member)
            self.covered.add(path)
            self.notes.append(
                Remark(path, reasons.SAME if self.has_time(number, member, file) else reasons.TIME_IGNORED)
            )
        elif self._is_linked(inode) and not self._has_all_names(number, member, child):
            self.conflicts.append(Remark(path, reasons.LINKED))
        else:
            self._note_path(number, member, path)
            files = self.files.setdefault(number, {})
            if member in files:  # further names of a file are links in the tar, too
                self.covered.add(path)
            else:
                files[member] = file
                if same:
                    self.times.setdefault(number, set()).add(member)

    def _has_all_names(self, number: int, member: int, child: UpperNode) -> bool:
        """Return True if a file replaces all names of a member with hard links.

        They become links to the new one.
        """
        return not self.tree.files_layout or len(child.places()) >= self.lower.record(number).link_count(member)

    def _file(self, node: UpperNode, path: bytes) -> UpperFile:
        with self._opened(node) as fd:
            status = os.fstat(fd)
        return UpperFile(node, path, status.st_size, status.st_mtime_ns)

    def has_time(self, number: int, member: int, file: UpperFile) -> bool:
        """Return True if a file has the time of the member, in whole seconds."""
        return file.mtime_ns // 10**9 == self.lower.record(number).member(member).mtime_ns // 10**9

    def has_content(self, number: int, member: int, file: UpperFile) -> bool:
        """Return True if a file has the content of the member, as after a change of mode only."""
        if file.size != self.lower.record(number).member(member).size:
            return False
        content = self.lower.content(number, self.lower.tag(number), member)

        def of_shard(offset: int) -> bytes:
            with named(self.lower.shards[number].path):
                return content_module.read(content, offset, COMPARED_BYTES)

        with self._opened(file.node) as fd:
            return all(
                os.pread(fd, COMPARED_BYTES, offset) == of_shard(offset)
                for offset in range(0, file.size, COMPARED_BYTES)
            )

    @contextlib.contextmanager
    def _opened(self, node: UpperNode) -> Iterator[int]:
        """Open a file or directory of the upper for a block; OSErrors name it."""
        with named(node.path()):
            fd = self.open_file(node)
            try:
                yield fd
            finally:
                os.close(fd)

    def _is_same_link(self, inode: int, child: UpperNode) -> bool:
        _, number, where = inodes.unpack(inode)
        if kind_of(where) != MEMBER:
            return False
        target = self.lower.record(number).symlink(index_of(where))
        if target is None or child.parent is None:
            return False
        with self._opened(child.parent) as directory:
            return os.readlink(child.name, dir_fd=directory) == target

    def _add(self, spot: Spot, name: bytes, child: UpperNode, path: bytes, alone: bool) -> None:
        """Collect a file that the lower does not have: of an existing sample, of a new one, or of none.

        `alone`: its directory has no counterpart in the lower.
        """
        place = self.homes.find(spot, name)
        if place == reasons.OTHER_STEM and alone and not name.startswith(b"."):
            self.conflicts.append(Remark(path, reasons.OLD_STEM))  # leaving it out would lose the sample
        elif isinstance(place, str):
            self.unpackable.append(Remark(path, place))
        else:
            home, extension = place
            files = self.fresh.setdefault(home, {})
            if extension in files:
                self.conflicts.append(Remark(path, reasons.TWICE))
            files[extension] = self._file(child, path)
            self._note_escape(name, path)

    def _note_escape(self, name: bytes, path: bytes) -> None:
        """Add a note if a mount shows a new name in another way, since it is no escape but reads like one."""
        shown = names.escape(self.homes.plain(name, None))
        if shown != name:
            self.notes.append(Remark(path, f"{reasons.ESCAPED} {names.readable(shown)}"))


class Rules(NamedTuple):
    """Whether leftovers of programs are changes, and a different time (whole seconds) alone."""

    with_leavings: bool = False
    ignore_times: bool = False
