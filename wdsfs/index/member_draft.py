"""A record in the making: the members of a shard in the order of the tar, hard links resolved.

`MemberDraft` takes the chunks of a scan, or all members of a derived record at once. It decides which sample,
folder and extension each member has. A hard link gets the content, times and kind of the member that it names.
`record_builder.py` puts the draft into the order of the record.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from wdsfs import names
from wdsfs.index.record import KINDS, LINK, STRAY
from wdsfs.names import PLAIN, Reading, readable
from wdsfs.tar import headers
from wdsfs.tar.columns import Chunk
from wdsfs.tar.problems import PROBLEMS_MAX, Problem, Problems

# Folders that any shard may have, and the bytes of a shard that allow one more. A folder takes some 350 bytes of
# memory, and needs a member, whose header has 512 bytes.
FOLDERS_FREE, FOLDER_BYTES = 1 << 16, 128


def folders_max(size: int) -> int:
    """Return how many folders a shard of this size (bytes) can have. A reader ends at the next one."""
    return FOLDERS_FREE + size // FOLDER_BYTES


@dataclass(slots=True)
class DerivedMembers:
    """The entries of a derived record, and its members in the order of their entries.

    `paths` are the plain paths of entries, `strays` says which are in no sample. The other columns are those of
    members: `entry` (ascending) and `extension` are numbers in `paths` and `extensions`; `addresses` say where a
    member lies, in units that the caller chooses; `sizes` are bytes, `mtimes` ns. `links` has the targets of
    symbolic links by member, `folders` the times (ns) of folders by raw path. `lists` (byte strings) and `numbers`
    (8 bytes each) become further sections of the record.
    """

    paths: list[bytes]
    strays: NDArray[np.bool_]
    entry: NDArray[np.int64]
    extension: NDArray[np.int64]
    extensions: list[bytes]
    addresses: NDArray[np.int64]
    sizes: NDArray[np.int64]
    mtimes: NDArray[np.int64]
    links: dict[int, bytes] = field(default_factory=dict)
    folders: dict[bytes, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    problems_more: int = 0  # problems that are not kept word for word
    unshown: list[Problem] = field(default_factory=list)
    unshown_count: int = 0
    lists: dict[str, list[bytes]] = field(default_factory=dict)
    numbers: dict[str, list[int]] = field(default_factory=dict)


class Folders:
    """The folders of a shard in order of appearance; number 0 is the top.

    Of their paths only checksums are kept: `sums`, and `prefixes`, which include the slash after the path. The
    paths themselves would grow with the square of the depth.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.names, self.parents = [b""], [0]
        self.sums, self.prefixes = [0], [0]
        self.numbers: dict[tuple[int, bytes], int] = {}
        self.by_raw: dict[bytes, int] = {b"": 0}
        self.mtimes: dict[int, int] = {}

    def number(self, raw: bytes) -> int:
        """Return the number of the folder with this raw name (with its last slash), added with its parents if new.

        Raises TooManyFolders.
        """
        folder = self.by_raw.get(raw)
        if folder is None:
            folder = 0
            for component in names.folder_components(raw):
                folder = self._child(folder, component)
            self.by_raw[raw] = folder
        return folder

    def find(self, raw: bytes) -> int | None:
        """Return the number of the folder with this raw name (with its last slash), None if there is none."""
        folder: int | None = 0
        for component in names.folder_components(raw):
            folder = self.numbers.get((folder, component)) if folder is not None else None
        return folder

    def _child(self, parent: int, name: bytes) -> int:
        folder = self.numbers.get((parent, name))
        if folder is None:
            folder = len(self.names)
            if folder > self.limit:
                raise TooManyFolders
            self.numbers[parent, name] = folder
            self.names.append(name)
            self.parents.append(parent)
            self.sums.append(zlib.crc32(name, self.prefixes[parent]))
            self.prefixes.append(zlib.crc32(b"/", self.sums[folder]))
        return folder

    def breadth_first(self) -> list[int]:
        """Return all numbers in the order of the record, which has the children of a folder side by side."""
        children: list[list[int]] = [[] for _ in self.names]
        for number, parent in enumerate(self.parents[1:], 1):
            children[parent].append(number)
        order, queue = [], deque([0])
        while queue:
            number = queue.popleft()
            order.append(number)
            queue.extend(children[number])
        return order


class TooManyFolders(Exception):
    """Raised where a shard gets more folders than one of its size can have."""


class MemberDraft:
    """Entries and members of a shard, collected chunk by chunk in compact arrays."""

    def __init__(self, reading: Reading = PLAIN, size: int = 1 << 62) -> None:
        """Make a draft for a shard of `size` bytes, which limit the number of folders."""
        self.last_dot = reading.last_dot
        # With `group_by_key`: samples by raw key, and the samples whose members are not adjacent.
        self.known: dict[bytes, int] | None = {} if reading.group_by_key else None
        self.apart: set[int] = set()
        self.folders = Folders(folders_max(size))
        self.entry_folder, self.entry_crc = array("I"), array("I")
        self.entry_flags = bytearray()
        self.entry_names: list[bytes] = []
        self.extensions: dict[bytes, int] = {}
        self.member_entry, self.member_extension = array("I"), array("I")
        self.columns: dict[str, list[NDArray[np.int64]]] = {"head": [], "data": [], "size": [], "mtime": []}
        self.symlinks: dict[int, bytes] = {}
        self.links: dict[int, bytes] = {}  # hard links, resolved after the scan: member -> target
        self.sparse: dict[int, NDArray[np.int64]] = {}  # a row for each segment
        self.unshown: list[Problem] = []
        self.unshown_count = 0
        self.odd_entries: set[int] = set()
        self.plain = True
        self.key, self.key_entry = b"", -1
        self.last_head = 0

    def add(self, chunk: Chunk) -> Problem | None:
        """Add the members of a chunk; return the problem that ends the shard inside it, if there is one."""
        plain = names.are_plain(chunk.names)
        self.plain = self.plain and plain
        keep: list[int] = []
        fast = plain and not chunk.sparse and not (chunk.types != headers.REGULAR).any()
        rest, damage, end = iter(chunk.names), None, len(chunk.names)
        try:
            if fast:
                self._add_plain(rest)
            else:
                self._add_any(chunk, rest, plain, keep)
        except TooManyFolders:
            end -= len(list(rest)) + 1
            text = f"more than {self.folders.limit:,} folders in a shard of its size: what follows is not read"
            damage = Problem(int(chunk.heads[end]), "damaged", text)
        for name, column in zip(self.columns, (chunk.heads, chunk.datas, chunk.sizes, chunk.mtimes), strict=True):
            self.columns[name].append(column[:end] if fast else column[keep])
        if end:
            self.last_head = int(chunk.heads[end - 1])
        return damage

    def _add_plain(self, member_names: Iterator[bytes]) -> None:
        """Add, on the fast path, regular members, none of them sparse, whose names need no escape."""
        key, entry, extensions, folders = self.key, self.key_entry, self.extensions, self.folders
        apart, last_dot = self.known is not None, self.last_dot
        quick = None  # the key, if names that start with it and have no more slashes surely belong to its sample
        add_entry, add_extension = self.member_entry.append, self.member_extension.append
        for name in member_names:
            head, dot, extension = name.partition(b".")
            if head != quick or not dot or b"/" in extension:
                split = names.split(name, last_dot=last_dot)
                if split is None:
                    add_entry(self._stray(name))
                    add_extension(0)
                    continue
                folder, stem, extension = split
                head = folder + stem
                if head != key:
                    key = head
                    # Calls `_sample` only where it must: one more call per sample costs one percent.
                    where = folders.number(folder)
                    entry = self._sample(key, where, stem) if apart else self._entry(where, stem, 0)
                # `__a.b` is in a sample, `__a.b__` is not.
                quick = None if last_dot or key.startswith(b"__") else key
            add_entry(entry)
            number = extensions.get(extension)
            if number is None:
                number = extensions[extension] = len(extensions)
            add_extension(number)
        self.key, self.key_entry = key, entry

    def _add_any(self, chunk: Chunk, member_names: Iterator[bytes], plain: bool, keep: list[int]) -> None:
        """Add, on the slow path, members of any kind and name. `keep` gets the rows that become members."""
        base = len(self.member_entry)
        for row, name in enumerate(member_names):
            kind = int(chunk.types[row])
            if kind == headers.DIRECTORY:
                self.folders.mtimes[self.folders.number(name + b"/" if name else b"")] = int(chunk.mtimes[row])
                continue
            if kind in headers.UNSHOWN:
                self._leave_out(int(chunk.heads[row]), name, KINDS[kind])
                continue
            member = base + len(keep)
            split = names.split(name, last_dot=self.last_dot) if kind == headers.REGULAR else None
            if split is not None:
                extension = split.extension
                # The key has the raw folder: `./a` and `a` are two keys for every reader of the format.
                key = split.folder + split.stem
                if key != self.key:
                    self.key = key
                    self.key_entry = self._sample(key, self.folders.number(split.folder), split.stem)
                entry = self.key_entry
            else:
                extension = b""
                entry = self._stray(name, LINK if kind == headers.HARD_LINK else 0)
            keep.append(row)
            self.member_entry.append(entry)
            self.member_extension.append(
                self.extensions.setdefault(extension, len(self.extensions)) if split else 0
            )
            if not plain and not names.are_plain([name]):
                self.odd_entries.add(entry)
            if kind == headers.SYMLINK:
                self.symlinks[member] = chunk.links[row]
            elif kind == headers.HARD_LINK:
                self.links[member] = chunk.links[row]
            if row in chunk.sparse:
                self.sparse[member] = np.array(chunk.sparse[row], dtype=np.int64).reshape(-1, 2)

    def take(self, source: DerivedMembers) -> None:
        """Add all members of a derived record at once. The draft must be empty."""
        for path, stray in zip(source.paths, source.strays.tolist(), strict=True):
            folder, stem = names.split_folder(path)
            self._entry(self.folders.number(folder), stem, STRAY if stray else 0)
        self._find_odd_names(source)
        self.extensions = {extension: number for number, extension in enumerate(source.extensions)}
        self.member_entry = array("I", source.entry.astype(np.uint32).tobytes())
        self.member_extension = array("I", source.extension.astype(np.uint32).tobytes())
        heads = source.addresses * headers.BLOCK
        self.columns = {"head": [heads], "data": [heads], "size": [source.sizes], "mtime": [source.mtimes]}
        self.symlinks = dict(source.links)
        for raw, mtime in source.folders.items():
            number = self.folders.find(raw)
            if number is not None:
                self.folders.mtimes[number] = mtime
        self.unshown, self.unshown_count = source.unshown, source.unshown_count

    def _find_odd_names(self, source: DerivedMembers) -> None:
        longest = max(map(len, source.extensions), default=0) + max(map(len, source.paths), default=0)
        self.plain = (
            names.are_plain(source.paths)
            and names.are_plain([b"x." + extension for extension in source.extensions])
            and longest < names.NAME_MAX
        )
        if self.plain:
            return
        for entry, extension in zip(source.entry.tolist(), source.extension.tolist(), strict=True):
            path = source.paths[entry]
            name = path if source.strays[entry] else path + b"." + source.extensions[extension]
            if not names.are_plain([name]):
                self.odd_entries.add(entry)

    def columns_joined(self) -> dict[str, NDArray[np.int64]]:
        """Return the columns of members: head, data, size and mtime, each as one array."""
        return {
            name: np.concatenate(parts) if parts else np.zeros(0, np.int64) for name, parts in self.columns.items()
        }

    def _leave_out(self, offset: int, name: bytes, kind: str) -> None:
        self.unshown_count += 1
        if len(self.unshown) < PROBLEMS_MAX:
            self.unshown.append(Problem(offset, kind, readable(name)))

    def _sample(self, key: bytes, folder: int, stem: bytes) -> int:
        """Return the entry for a run of members with this key: a new one, or with `group_by_key` the known one."""
        sample = None if self.known is None else self.known.get(key)
        if sample is not None:
            self.apart.add(sample)
            return sample
        entry = self._entry(folder, stem, 0)
        if self.known is not None:
            self.known[key] = entry
        return entry

    def _entry(self, folder: int, stem: bytes, flags: int) -> int:
        self.entry_crc.append(zlib.crc32(stem, self.folders.prefixes[folder]))
        self.entry_folder.append(folder)
        self.entry_names.append(stem)
        self.entry_flags.append(flags)
        return len(self.entry_names) - 1

    def _stray(self, name: bytes, flags: int = 0) -> int:
        folder, base = names.split_folder(name)
        return self._entry(self.folders.number(folder), base, STRAY | flags)


def resolve(draft: MemberDraft, columns: dict[str, NDArray[np.int64]], problems: Problems) -> dict[int, int]:
    """Return for each link that does not dangle its row and that of its target, which is no link itself.

    `columns` and `draft` get what the link shares with its target. A link that dangles is added to `problems`.
    """
    if not draft.links:
        return {}
    targets: dict[int, int] = {}
    last_members = _last_members(draft)
    for row, name in draft.links.items():
        target = last_members.get(row)
        if target is None:
            offset = int(columns["head"][row])
            text = f"hard link at offset {offset} to {readable(name)!r}, which is not before it"
            problems.append(Problem(offset, "dangling link", text))
        else:
            targets[row] = targets.get(target, target)
    for row, target in targets.items():
        for column in columns.values():
            column[row] = column[target]
    return targets


def _last_members(draft: MemberDraft) -> dict[int, int]:
    """Map each link (its row) to the row of the last earlier member with the name that it points to."""
    targets: dict[int, tuple[int | None, bytes]] = {}
    for link, target in draft.links.items():
        folder, base = names.split_folder(target)
        targets[link] = draft.folders.find(folder), base
    places = set(targets.values())
    last: dict[tuple[int | None, bytes], int] = {}
    members = {}
    extensions = list(draft.extensions)
    for row, (entry, extension) in enumerate(zip(draft.member_entry, draft.member_extension, strict=True)):
        if row in targets and targets[row] in last:
            members[row] = last[targets[row]]
        name = draft.entry_names[entry]
        if not draft.entry_flags[entry] & STRAY:
            name += b"." + extensions[extension]
        place = draft.entry_folder[entry], name
        if place in places and (row not in targets or row in members):
            last[place] = row
    return members
