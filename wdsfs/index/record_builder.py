"""The record of a shard, made: a pure function of the shard's bytes.

What is in a record and what its parts are called is described at the head of `index/record.py`, the bytes in
docs/format.md. `_MemberCollector` collects members batch by batch, `_RecordPacker` puts them into the order of the
record.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdsfs import names
from wdsfs.errors import CorruptShard
from wdsfs.index.record import FORMAT, HAS_SAMPLES, IS_TWIN, KINDS, LINK, MAGIC, STRAY, TWIN, ends_checksum
from wdsfs.inodes import FOLDER, INDEX_MAX, MEMBER, SAMPLE, index_of, kind_of, position
from wdsfs.names import readable
from wdsfs.reading import PLAIN, Reading
from wdsfs.storage.source import TarBytes
from wdsfs.tar import scan

PROBLEMS_MAX = 1000  # problems and unshown members kept word for word; further ones are counted


class Alias(NamedTuple):
    child: int
    parent: int
    name: bytes


class _Folders:
    """The folders of a shard in order of appearance; number 0 is the top.

    Of their paths only checksums are kept (`sums`; `prefixes` with the slash behind it): the paths themselves
    would grow with the square of the depth, and a name may have half a million slashes.
    """

    def __init__(self) -> None:
        self.names, self.parents = [b""], [0]
        self.sums, self.prefixes = [0], [0]
        self.numbers: dict[tuple[int, bytes], int] = {}
        self.by_raw: dict[bytes, int] = {b"": 0}
        self.mtimes: dict[int, int] = {}

    def number(self, raw: bytes) -> int:
        """The folder of this raw name (with its last slash), made with its parents if it is new."""
        found = self.by_raw.get(raw)
        if found is None:
            found = 0
            for component in names.folder_components(raw):
                found = self._child(found, component)
            self.by_raw[raw] = found
        return found

    def find(self, raw: bytes) -> int | None:
        """The folder of this raw name (with its last slash), if there is one."""
        found: int | None = 0
        for component in names.folder_components(raw):
            found = self.numbers.get((found, component)) if found is not None else None
        return found

    def _child(self, parent: int, name: bytes) -> int:
        found = self.numbers.get((parent, name))
        if found is None:
            found = len(self.names)
            self.numbers[parent, name] = found
            self.names.append(name)
            self.parents.append(parent)
            self.sums.append(zlib.crc32(name, self.prefixes[parent]))
            self.prefixes.append(zlib.crc32(b"/", self.sums[found]))
        return found

    def breadth_first(self) -> list[int]:
        """Numbers in the order in which the record keeps them: all children of a folder side by side."""
        children: list[list[int]] = [[] for _ in self.names]
        for number, parent in enumerate(self.parents[1:], 1):
            children[parent].append(number)
        order, queue = [], deque([0])
        while queue:
            number = queue.popleft()
            order.append(number)
            queue.extend(children[number])
        return order


class _Link(NamedTuple):
    """A hard link that waits for the end of the scan; `row` counts members."""

    row: int
    target: bytes


class _MemberCollector:
    """Collects entries and members chunk by chunk in compact arrays."""

    def __init__(self, group_by_key: bool = False) -> None:
        # Samples by raw key, where members that lie apart are one sample; those that have some.
        self.known: dict[bytes, int] | None = {} if group_by_key else None
        self.apart: set[int] = set()
        self.folders = _Folders()
        self.entry_folder, self.entry_crc = array("I"), array("I")
        self.entry_flags = bytearray()
        self.entry_names: list[bytes] = []
        self.extensions: dict[bytes, int] = {}
        self.member_entry, self.member_extension = array("I"), array("I")
        self.columns: dict[str, list[NDArray[np.int64]]] = {"head": [], "data": [], "size": [], "mtime": []}
        self.symlinks: dict[int, bytes] = {}
        self.links: list[_Link] = []
        self.sparse: dict[int, NDArray[np.int64]] = {}  # a row for each segment
        self.unshown: list[scan.Problem] = []
        self.unshown_count = 0
        self.odd_entries: set[int] = set()
        self.plain = True
        self.key, self.key_entry = b"", -1
        self.last_head = 0

    def add(self, chunk: scan.Chunk) -> None:
        plain = names.are_plain(chunk.names)
        self.plain = self.plain and plain
        keep: list[int] = []
        fast = plain and not chunk.sparse and not (chunk.types != scan.REGULAR).any()
        if fast:
            self._add_plain(chunk.names)
        else:
            keep = self._add_any(chunk, plain)
        for name, column in zip(self.columns, (chunk.heads, chunk.datas, chunk.sizes, chunk.mtimes), strict=True):
            self.columns[name].append(column if fast else column[keep])
        if len(chunk.heads):
            self.last_head = int(chunk.heads[-1])

    def _add_plain(self, member_names: list[bytes]) -> None:
        """The fast path: regular members, none of them sparse, whose names need no escape."""
        key, entry, extensions, folders = self.key, self.key_entry, self.extensions, self.folders
        apart = self.known is not None
        quick = None  # the key when a name that starts so, and has no more slashes, is surely of its sample
        add_entry, add_extension = self.member_entry.append, self.member_extension.append
        for name in member_names:
            head, dot, extension = name.partition(b".")
            if head != quick or not dot or b"/" in extension:
                split = names.split(name)
                if split is None:
                    add_entry(self._stray(name))
                    add_extension(0)
                    continue
                folder, stem, extension = split
                head = folder + stem
                if head != key:
                    key = head
                    # Not by `_sample` as a rule: a call for each sample is a percent of all.
                    where = folders.number(folder)
                    entry = self._sample(key, where, stem) if apart else self._entry(where, stem, 0)
                quick = None if key.startswith(b"__") else key  # `__a.b` is in a sample, `__a.b__` is not
            add_entry(entry)
            number = extensions.get(extension)
            if number is None:
                number = extensions[extension] = len(extensions)
            add_extension(number)
        self.key, self.key_entry = key, entry

    def _add_any(self, chunk: scan.Chunk, plain: bool) -> list[int]:
        """The slow path: any kind of member, any name. Returns the rows that became members."""
        keep: list[int] = []
        base = len(self.member_entry)
        for row, name in enumerate(chunk.names):
            kind = int(chunk.types[row])
            if kind == scan.DIRECTORY:
                self.folders.mtimes[self.folders.number(name + b"/" if name else b"")] = int(chunk.mtimes[row])
                continue
            if kind in (scan.CHARACTER, scan.BLOCK_DEVICE, scan.FIFO):
                self._leave_out(int(chunk.heads[row]), name, KINDS[kind])
                continue
            member = base + len(keep)
            split = names.split(name) if kind == scan.REGULAR else None
            if split is not None:
                extension = split.extension
                # The raw folder tells keys apart: `./a` and `a` are two keys for every reader of the format.
                key = split.folder + split.stem
                if key != self.key:
                    self.key = key
                    self.key_entry = self._sample(key, self.folders.number(split.folder), split.stem)
                entry = self.key_entry
            else:
                extension = b""
                entry = self._stray(name, LINK if kind == scan.HARD_LINK else 0)
            keep.append(row)
            self.member_entry.append(entry)
            self.member_extension.append(
                self.extensions.setdefault(extension, len(self.extensions)) if split else 0
            )
            if not plain and not names.are_plain([name]):
                self.odd_entries.add(entry)
            if kind == scan.SYMLINK:
                self.symlinks[member] = chunk.links[row]
            elif kind == scan.HARD_LINK:
                self.links.append(_Link(member, chunk.links[row]))
            if row in chunk.sparse:
                self.sparse[member] = np.array(chunk.sparse[row], dtype=np.int64).reshape(-1, 2)
        return keep

    def take(self, source: DerivedMembers) -> None:
        """All members of a derived record at once."""
        for path, stray in zip(source.paths, source.strays.tolist(), strict=True):
            folder, stem = names.split_folder(path)
            self._entry(self.folders.number(folder), stem, STRAY if stray else 0)
        longest = max(map(len, source.extensions), default=0) + max(map(len, source.paths), default=0)
        self.plain = (
            names.are_plain(source.paths)
            and names.are_plain([b"x." + extension for extension in source.extensions])
            and longest < names.NAME_MAX
        )
        if not self.plain:
            for entry, extension in zip(source.entry.tolist(), source.extension.tolist(), strict=True):
                path = source.paths[entry]
                name = path if source.strays[entry] else path + b"." + source.extensions[extension]
                if not names.are_plain([name]):
                    self.odd_entries.add(entry)
        self.extensions = {extension: number for number, extension in enumerate(source.extensions)}
        self.member_entry = array("I", source.entry.astype(np.uint32).tobytes())
        self.member_extension = array("I", source.extension.astype(np.uint32).tobytes())
        heads = source.addresses * scan.BLOCK
        self.columns = {"head": [heads], "data": [heads], "size": [source.sizes], "mtime": [source.mtimes]}
        self.symlinks = dict(source.links)
        for raw, mtime in source.folders.items():
            number = self.folders.find(raw)
            if number is not None:
                self.folders.mtimes[number] = mtime
        self.unshown, self.unshown_count = source.unshown, source.unshown_count

    def _leave_out(self, offset: int, name: bytes, kind: str) -> None:
        self.unshown_count += 1
        if len(self.unshown) < PROBLEMS_MAX:
            self.unshown.append(scan.Problem(offset, kind, readable(name)))

    def _sample(self, key: bytes, folder: int, stem: bytes) -> int:
        """The entry of a sample of which a run of members begins."""
        found = None if self.known is None else self.known.get(key)
        if found is not None:
            self.apart.add(found)
            return found
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


def build(
    fd: TarBytes, fingerprint: list[int], problem: scan.Problem | None = None, reading: Reading = PLAIN
) -> bytes:
    """The record of the shard open at `fd`, read so.

    `fingerprint` (size in bytes, mtime in ns, inode) is what the caller saw of the file before, `problem` what is
    wrong with it besides; they are stored as they are. A damaged shard gives a record of what is intact, with the
    damage in `Record.problems`. Raises OSError when the file cannot be read, CorruptShard when it has more members
    than a record can number.
    """
    problems = [] if problem is None else [problem]
    builder = _MemberCollector(reading.group_by_key)
    marks = reading.marks()
    for chunk in scan.scan(fd, problems, marks=marks):
        builder.add(chunk)
        if len(builder.member_entry) > INDEX_MAX:
            raise CorruptShard(f"more than {INDEX_MAX} members in one shard")
    packer = _RecordPacker(builder, problems)
    packer.pack()
    ends = [builder.last_head, ends_checksum(fd, builder.last_head)]
    return packer.to_bytes(fingerprint, ends, end_marks=len(marks or ()))


@dataclass(slots=True)
class DerivedMembers:
    """What a record is derived from: entries, and members in the order of their entries.

    `paths` are the plain paths of entries, `strays` says which are in no sample. The other columns are those of
    members: `entry` (ascending) and `extension` are numbers in `paths` and `extensions`; `addresses` say where a
    member lies in the terms of whoever derives it, `sizes` are bytes, `mtimes` ns. `links` are the targets of
    members that are symbolic links, `folders` times (ns) of folders, by raw path. `lists` of byte strings and
    columns of 8-byte `numbers` are further parts of the record.
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
    problems: list[scan.Problem] = field(default_factory=list)
    problems_more: int = 0  # problems that are not kept word for word
    unshown: list[scan.Problem] = field(default_factory=list)
    unshown_count: int = 0
    lists: dict[str, list[bytes]] = field(default_factory=dict)
    numbers: dict[str, list[int]] = field(default_factory=dict)


def derive(source: DerivedMembers, fingerprint: Sequence[int], view: dict[str, Any]) -> bytes:
    """A record of what `source` says, with `view` in its directory. Raises CorruptShard when that is too much."""
    if len(source.entry) > INDEX_MAX:
        raise CorruptShard(f"more than {INDEX_MAX} members in one shard")
    builder = _MemberCollector()
    builder.take(source)
    packer = _RecordPacker(builder, source.problems)
    packer.problems_more = source.problems_more
    packer.pack()
    for name, values in source.lists.items():
        packer._put_names(name, values)
    for name, numbers in source.numbers.items():
        packer._put(name, numbers, "<i8")
    return packer.to_bytes(list(fingerprint), [0, 0], view)


class _RecordPacker:
    """Puts what a `_MemberCollector` collected into the order of the record, finds the aliases and writes the
    bytes."""

    def __init__(self, builder: _MemberCollector, problems: list[scan.Problem]) -> None:
        self.builder, self.problems = builder, problems
        self.problems_more = 0
        self.sections: list[tuple[str, str, bytes]] = []

    def pack(self) -> None:
        self._order()
        self._put_folders()
        self._put_entries()
        self._put_members()
        self._put_aliases()

    # Each name below is a section of the record; docs/format.md lists them.

    def _put(self, name: str, values: Any, dtype: str) -> None:
        self.sections.append((name, dtype, np.ascontiguousarray(values, dtype=dtype).tobytes()))

    def _put_names(self, name: str, values: Iterable[bytes]) -> None:
        """A list of byte strings: where each starts (one more for the end) and all of them joined."""
        values = list(values)
        starts = np.zeros(len(values) + 1, dtype=np.int64)
        np.cumsum(np.fromiter(map(len, values), np.int64, len(values)), out=starts[1:])
        self._put(name + ".start", starts, _narrow(starts))
        self.sections.append((name, "B", b"".join(values)))

    def _order(self) -> None:
        b = self.builder
        order = b.folders.breadth_first()
        self.folder_order = order
        self.new_folder = np.empty(len(order), dtype=np.int64)
        self.new_folder[order] = np.arange(len(order))
        folder = self.new_folder[np.frombuffer(b.entry_folder, dtype=np.uint32)] if b.entry_folder else _NONE
        self.entry_order = np.argsort(folder, kind="stable")
        self.entry_folder = folder[self.entry_order]
        self.new_entry = np.empty(len(folder), dtype=np.int64)
        self.new_entry[self.entry_order] = np.arange(len(folder))
        member_entry = self.new_entry[np.frombuffer(b.member_entry, dtype=np.uint32)] if b.member_entry else _NONE
        self.member_order = np.argsort(member_entry, kind="stable")
        self.member_entry = member_entry[self.member_order]
        self.new_member = np.empty(len(member_entry), dtype=np.int64)
        self.new_member[self.member_order] = np.arange(len(member_entry))
        self.entry_names = [b.entry_names[number] for number in self.entry_order.tolist()]
        self.entry_flags = np.frombuffer(bytes(b.entry_flags), dtype=np.uint8)[self.entry_order].copy()
        self.entry_crc = np.frombuffer(b.entry_crc, dtype=np.uint32)[self.entry_order] if b.entry_crc else _NONE

    def _put_folders(self) -> None:
        f = self.builder.folders
        order = self.folder_order
        count = len(order)
        self.folder_names = [f.names[number] for number in order]
        self.folder_sums = np.array([f.sums[number] for number in order], dtype=np.uint32)
        self.folder_prefixes = [f.prefixes[number] for number in order]
        self.folder_parents = self.new_folder[[f.parents[number] for number in order]]
        self.folder_parents[0] = 0
        # Children are side by side, so where those of a folder start follows from how many others have.
        children = np.bincount(self.folder_parents[1:], minlength=count)
        first_child = 1 + np.concatenate(([0], np.cumsum(children)))
        self._put("folder.parent", self.folder_parents, "<u4")
        self._put("folder.child", first_child, "<u4")
        self._put("folder.entry", np.searchsorted(self.entry_folder, np.arange(count + 1)), "<u4")
        self._put("folder.prefix", self.folder_prefixes, "<u4")
        self._put_names("folder.name", self.folder_names)
        self._put_hash("folder", self.folder_sums)
        if f.mtimes:
            mtimes = np.full(count, np.iinfo(np.int64).min)
            mtimes[self.new_folder[list(f.mtimes)]] = list(f.mtimes.values())
            self._put("folder.mtime", mtimes, "<i8")
        self.folder_flags = self._folder_flags()

    def _folder_flags(self) -> NDArray[np.uint8]:
        flags = np.zeros(len(self.folder_order), dtype=np.uint8)
        sampled = self.entry_folder[(self.entry_flags & STRAY) == 0]
        flags[sampled] = HAS_SAMPLES
        for number in range(len(flags) - 1, 0, -1):  # children come behind their parents
            if flags[number]:
                flags[self.folder_parents[number]] |= HAS_SAMPLES
        return flags

    def _put_hash(self, name: str, sums: NDArray[Any]) -> None:
        order = np.argsort(sums, kind="stable")
        self._put(name + ".hash", sums[order], "<u4")
        self._put(name + ".order", order, "<u4")

    def _put_entries(self) -> None:
        self._put_names("entry.name", self.entry_names)
        self._put("entry.member", np.searchsorted(self.member_entry, np.arange(len(self.entry_names) + 1)), "<u4")
        self._put_hash("entry", self.entry_crc)
        self._find_twins()
        self._put("entry.flags", self.entry_flags, "u1")
        self._put("folder.flags", self.folder_flags, "u1")

    def _find_twins(self) -> None:
        """Mark the samples that share their path with a folder: `a.jpg` beside `a/b.jpg`."""
        self.twins: dict[int, int] = {}  # entry -> folder
        numbers = {
            (int(self.folder_parents[n]), self.folder_names[n]): n
            for n in range(1, len(self.folder_names))
            if self.folder_flags[n] & HAS_SAMPLES
        }
        if not numbers:
            return
        crcs = self.folder_sums[list(numbers.values())]
        for entry in np.flatnonzero(np.isin(self.entry_crc, crcs) & ((self.entry_flags & STRAY) == 0)).tolist():
            folder = numbers.pop((int(self.entry_folder[entry]), self.entry_names[entry]), None)
            if folder is not None:  # only the first sample of a key shares the directory; others get a suffix
                self.twins[entry] = folder
                self.entry_flags[entry] |= TWIN
                self.folder_flags[folder] |= IS_TWIN

    def _put_members(self) -> None:
        b = self.builder
        column = {
            name: np.concatenate(parts)[self.member_order] if parts else _NONE for name, parts in b.columns.items()
        }
        self._resolve_links(column)
        head, body = column["head"] // scan.BLOCK, (column["data"] - column["head"]) // scan.BLOCK
        self._put("member.head", head, _narrow(head))
        self._put("member.body", body, _narrow(body))
        self._put("member.size", column["size"], _narrow(column["size"]))
        self._put("member.mtime", *_pack_times(column["mtime"]))
        extensions = np.frombuffer(b.member_extension, dtype=np.uint32) if b.member_extension else _NONE
        self.member_extension = extensions[self.member_order]
        self._put("member.ext", self.member_extension, _narrow(self.member_extension))
        self.extensions = list(b.extensions)
        self._put_names("ext.name", self.extensions)
        symlinks = sorted((int(self.new_member[row]), target) for row, target in b.symlinks.items())
        if symlinks:
            self._put("symlink.member", [row for row, _ in symlinks], "<u4")
            self._put_names("symlink.target", [target for _, target in symlinks])
        sparse = sorted(((int(self.new_member[row]), segments) for row, segments in b.sparse.items()), key=_first)
        if sparse:
            self._put("sparse.member", [row for row, _ in sparse], "<u4")
            self._put("sparse.start", np.cumsum([0] + [len(segments) for _, segments in sparse]), "<u4")
            self._put("sparse.segment", np.concatenate([segments for _, segments in sparse]), "<i8")

    def _resolve_links(self, column: dict[str, NDArray[np.int64]]) -> None:
        """Let each hard link stand for the member it names: the last one of that name before the link."""
        b = self.builder
        targets: dict[int, int] = {}
        if b.links:
            found = self._last_members(b.links)
            for link in b.links:
                target = found.get(link.row)
                if target is None:
                    offset = int(column["head"][self.new_member[link.row]])
                    text = f"hard link at offset {offset} to {readable(link.target)!r}, which is not before it"
                    self.problems.append(scan.Problem(offset, "dangling link", text))
                else:
                    targets[link.row] = targets.get(target, target)
        for row, target in targets.items():
            new, source = int(self.new_member[row]), int(self.new_member[target])
            for name in ("data", "size"):
                column[name][new] = column[name][source]
            column["head"][new] = column["head"][source]
            column["mtime"][new] = column["mtime"][source]
            if target in b.symlinks:
                b.symlinks[row] = b.symlinks[target]
            if target in b.sparse:
                b.sparse[row] = b.sparse[target]
        self.targets = {int(self.new_member[row]): int(self.new_member[to]) for row, to in targets.items()}
        if self.targets:
            rows = sorted(self.targets)
            self._put("link.member", rows, "<u4")
            self._put("link.target", [self.targets[row] for row in rows], "<u4")
            linked, counts = np.unique(list(self.targets.values()), return_counts=True)
            self._put("linked.member", linked, "<u4")
            self._put("linked.count", counts + 1, "<u4")

    def _last_members(self, links: list[_Link]) -> dict[int, int]:
        """For each link (by its row) the row of the last earlier member with the name that it points to."""
        b = self.builder
        targets: dict[int, tuple[int | None, bytes]] = {}
        for link in links:
            folder, base = names.split_folder(link.target)
            targets[link.row] = b.folders.find(folder), base
        wanted = set(targets.values())
        last: dict[tuple[int | None, bytes], int] = {}
        found = {}
        extensions = list(b.extensions)
        for row, (entry, extension) in enumerate(zip(b.member_entry, b.member_extension, strict=True)):
            if row in targets and targets[row] in last:
                found[row] = last[targets[row]]
            name = b.entry_names[entry]
            if not b.entry_flags[entry] & STRAY:
                name += b"." + extensions[extension]
            place = b.entry_folder[entry], name
            if place in wanted and (row not in targets or row in found):
                last[place] = row
        return found

    # --- aliases

    def _put_aliases(self) -> None:
        odd_entries = {int(self.new_entry[number]) for number in self.builder.odd_entries}
        odd_folders = set()
        if not self.builder.plain:
            odd_folders = {n for n, name in enumerate(self.folder_names) if n and names.escape(name) != name}
        self.dangling = {
            int(self.new_member[link.row])
            for link in self.builder.links
            if int(self.new_member[link.row]) not in self.targets
        }
        by_sample = self._sample_directories(odd_entries, odd_folders)
        by_extension = by_sample + self._sample_files(odd_entries, full=False)
        by_name = by_sample + self._sample_files(odd_entries, full=True)
        files = self._files(odd_entries, odd_folders)
        for domain, aliases in enumerate((by_extension, by_name, files)):
            if aliases:
                self._put_alias_table(f"alias{domain}", aliases)

    def _put_alias_table(self, name: str, aliases: list[Alias]) -> None:
        aliases.sort()
        self._put(name + ".child", [alias.child for alias in aliases], "<u4")
        self._put(name + ".parent", [alias.parent for alias in aliases], "<u4")
        self._put_names(name + ".name", [alias.name for alias in aliases])
        sums = [zlib.crc32(alias.name, self._prefix(alias.parent)) for alias in aliases]
        self._put_hash(name, np.array(sums, dtype=np.uint32))

    def _prefix(self, where: int) -> int:
        """The checksum of the path of a directory with the slash behind it."""
        if kind_of(where) == FOLDER:
            return self.folder_prefixes[index_of(where)]
        return zlib.crc32(b"/", int(self.entry_crc[index_of(where)]))

    def _duplicate_keys(self) -> set[int]:
        """Folders in which two samples have the same key."""
        samples = np.flatnonzero((self.entry_flags & STRAY) == 0)
        crcs = self.entry_crc[samples]
        order = np.argsort(crcs, kind="stable")
        same = np.flatnonzero(crcs[order][1:] == crcs[order][:-1])
        doubtful = {int(samples[order[at]]) for step in (0, 1) for at in (same + step).tolist()}
        seen: set[tuple[int, bytes]] = set()
        folders = set()
        for entry in doubtful:
            key = (int(self.entry_folder[entry]), self.entry_names[entry])
            if key in seen:
                folders.add(key[0])
            seen.add(key)
        return folders

    def _sample_directories(self, odd_entries: set[int], odd_folders: set[int]) -> list[Alias]:
        """Aliases of folders and of samples as directories."""
        self.duplicated = self._duplicate_keys()
        dirty = set(self.duplicated)
        dirty |= {int(self.entry_folder[entry]) for entry in odd_entries}
        dirty |= {int(self.folder_parents[folder]) for folder in odd_folders}
        aliases: list[Alias] = []
        for folder in dirty:
            aliases += _assign(position(FOLDER, folder), self._directories(folder))
        return aliases

    def _directories(self, folder: int) -> list[tuple[int, bytes]]:
        """What a folder holds in the samples layout: folders with samples below, then samples."""
        folders = [child for child in self._child_folders(folder) if self.folder_flags[index_of(child[0])]]
        samples = [
            (position(SAMPLE, entry), self.entry_names[entry])
            for entry in self._entries(folder)
            if not self.entry_flags[entry] & (STRAY | TWIN)
        ]
        return folders + samples

    def _child_folders(self, folder: int) -> list[tuple[int, bytes]]:
        first = np.searchsorted(self.folder_parents[1:], [folder, folder + 1]) + 1
        return [(position(FOLDER, number), self.folder_names[number]) for number in range(first[0], first[1])]

    def _entries(self, folder: int) -> range:
        first, last = np.searchsorted(self.entry_folder, [folder, folder + 1])
        return range(int(first), int(last))

    def _members(self, entry: int) -> range:
        first, last = np.searchsorted(self.member_entry, [entry, entry + 1])
        return range(int(first), int(last))

    def _sample_files(self, odd_entries: set[int], full: bool) -> list[Alias]:
        """Aliases of the files in sample directories: extensions that repeat, are odd, or meet a sub-key."""
        dirty = set(self.twins) | self._repeating_entries()
        if full:  # such a name is odd only if the member's whole name is: it has a stem, so is never "." or ".."
            dirty |= odd_entries
        else:
            odd_extensions = {n for n, text in enumerate(self.extensions) if names.escape(text) != text}
            dirty |= self._entries_with(odd_extensions) if odd_extensions else set()
        aliases: list[Alias] = []
        for entry in dirty:
            if self.entry_flags[entry] & STRAY:
                continue
            twin = self.twins.get(entry)
            parent, taken = position(SAMPLE, entry), set()
            if twin is not None:  # the folder's own children have their names already
                parent = position(FOLDER, twin)
                taken = _shown_names(parent, self._directories(twin))
            files = [(position(MEMBER, m), self._file_name(entry, m, full)) for m in self._members(entry)]
            aliases += _assign(parent, files, taken)
        return aliases

    def _entries_with(self, extensions: set[int]) -> set[int]:
        return set(self.member_entry[np.isin(self.member_extension, list(extensions))].tolist())

    def _file_name(self, entry: int, member: int, full: bool) -> bytes:
        extension: bytes = self.extensions[self.member_extension[member]]
        return b"%b.%b" % (self.entry_names[entry], extension) if full else extension

    def _repeating_entries(self) -> set[int]:
        """Samples in which an extension occurs twice."""
        pairs = self.member_entry.astype(np.int64) << 32 | self.member_extension.astype(np.int64)
        pairs = np.sort(pairs)
        repeated = (pairs[1:][pairs[1:] == pairs[:-1]] >> 32).tolist()
        return {entry for entry in repeated if not self.entry_flags[entry] & STRAY}

    def _files(self, odd_entries: set[int], odd_folders: set[int]) -> list[Alias]:
        """Aliases in the tree of all members, where a name can be taken by any other member or a folder."""
        dirty = set(self.duplicated)
        dirty |= {int(self.entry_folder[entry]) for entry in odd_entries | self._repeating_entries()}
        dirty |= {int(self.folder_parents[folder]) for folder in odd_folders}
        dirty |= self._folders_with_strays()
        dirty |= {int(self.folder_parents[n]) for n, name in enumerate(self.folder_names) if n and b"." in name}
        aliases: list[Alias] = []
        for folder in dirty:
            children = self._child_folders(folder)
            in_tar_order: list[tuple[int, bytes]] = []
            for entry in self._entries(folder):
                stray = self.entry_flags[entry] & STRAY
                for member in self._members(entry):
                    if member not in self.dangling:
                        name = self.entry_names[entry] if stray else self._file_name(entry, member, full=True)
                        in_tar_order.append((position(MEMBER, member), name))
            aliases += _assign(position(FOLDER, folder), children + in_tar_order)
        return aliases

    def _folders_with_strays(self) -> set[int]:
        """Folders where a stray could take the name of something else."""
        strays = np.flatnonzero(self.entry_flags & STRAY)
        if not len(strays):
            return set()
        crcs = self.entry_crc[strays]
        repeated, counts = np.unique(crcs, return_counts=True)
        repeated = repeated[counts > 1]
        doubtful = np.isin(crcs, repeated) | np.isin(crcs, self.folder_sums[1:])
        dotted = np.fromiter((b"." in self.entry_names[n][1:] for n in strays.tolist()), bool, len(strays))
        return set(self.entry_folder[strays[doubtful | dotted]].tolist())

    def to_bytes(
        self, fingerprint: list[int], ends: list[int], view: dict[str, Any] | None = None, end_marks: int = 0
    ) -> bytes:
        """The whole record: magic, length of the directory, the directory (JSON), the sections, a checksum."""
        offset, table = 0, []
        parts: list[bytes] = []
        for name, dtype, data in self.sections:
            table.append([name, dtype, offset, len(data)])
            padding = -len(data) % 8
            parts += [data, bytes(padding)]
            offset += len(data) + padding
        b = self.builder
        meta = {
            "format": FORMAT,
            "fingerprint": fingerprint,
            "ends": ends,
            "folders": len(self.folder_names),
            "entries": len(self.entry_names),
            "members": len(self.member_entry),
            "samples": int(((self.entry_flags & STRAY) == 0).sum()),
            "all_sampled": bool((self.folder_flags[1:] & HAS_SAMPLES).all()),
            "links": bool(self.builder.links),
            "all_listed": not self.entry_flags.any(),
            "problems": sorted(self.problems)[:PROBLEMS_MAX],
            "problem_count": len(self.problems) + self.problems_more,
            "unshown": b.unshown,
            "unshown_count": b.unshown_count,
            "sections": table,
        }
        if view is not None:
            meta["view"] = view
        if end_marks:
            meta["end_marks"] = end_marks
        if b.apart:
            meta["apart"] = len(b.apart)
        text = json.dumps(meta, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 4) % 8)
        body = b"".join([len(text).to_bytes(4, "little"), text, *parts])
        return MAGIC + zlib.crc32(body).to_bytes(8, "little") + body


_NONE = np.zeros(0, dtype=np.int64)


def _first(pair: tuple[int, Any]) -> int:
    return pair[0]


def _narrow(values: NDArray[Any]) -> str:
    """The smallest unsigned type that holds all of these."""
    top = int(values.max()) if len(values) else 0
    return "u1" if top < 1 << 8 else "<u2" if top < 1 << 16 else "<u4" if top < 1 << 32 else "<u8"


def _pack_times(mtimes: NDArray[np.int64]) -> tuple[NDArray[np.int64], str]:
    """Equal times as one value, whole seconds in 4 bytes where they fit, else ns in 8 bytes."""
    if len(mtimes) and (mtimes == mtimes[0]).all():
        return mtimes[:1], "<i8"
    seconds = mtimes // 10**9
    if len(mtimes) and (seconds * 10**9 == mtimes).all() and seconds.min() >= 0 and seconds.max() < 1 << 32:
        return seconds, "<u4"
    return mtimes, "<i8"


def _assign(parent: int, children: list[tuple[int, bytes]], taken: Iterable[bytes] = ()) -> list[Alias]:
    """Give each child of a directory a name of its own; returns the aliases of those that need one.

    Semantics decision: the first child (in the order given) that wants a name gets it; a later one gets the
    lowest free `name~N`, N from 2. Nothing is hidden. Names in `taken` are gone already.
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
