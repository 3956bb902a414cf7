"""Builds the record of a shard: scans its bytes, and packs the members and names into sections. Pure.

The content of a record is described at the head of `record.py`, its bytes in docs/reference/formats.md: sections,
each an array or a list of names, behind a directory. `build` reads the members into a draft (`member_draft.py`),
resolves hard links, puts all into the order of the record, finds its aliases (for names that repeat, clash or are
odd), and packs the sections. `derive` does the same for members that lie in other shards.

Children of a folder lie side by side, then in the order of the tar. `OrderedDraft` numbers folders, entries and
members by that order, and finds the samples that share their directory with a folder.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdsfs import names
from wdsfs.errors import CorruptShard, StaleMount
from wdsfs.index import member_draft
from wdsfs.index.member_draft import DerivedMembers, Folders, MemberDraft
from wdsfs.index.record import (
    BY_EXTENSION,
    BY_NAME,
    FILES,
    HAS_SAMPLES,
    IS_TWIN,
    MAGIC,
    RECORD,
    STRAY,
    TWIN,
    Record,
    ends_checksum,
)
from wdsfs.inodes import FOLDER, INDEX_MAX, MEMBER, SAMPLE, index_of, kind_of, position
from wdsfs.names import PLAIN, Reading
from wdsfs.shards import Fingerprint
from wdsfs.source import TarBytes, size_of
from wdsfs.tar import headers, scan
from wdsfs.tar.problems import Problem, Problems


class OrderedDraft:
    """Columns of the folders, entries and members of a draft, each in the order of the record.

    `new_folder`, `new_entry` and `new_member` give the number in the record for each number of the draft, and
    `member_order` the number in the draft for each member of the record.
    """

    def __init__(self, draft: MemberDraft) -> None:
        self.plain, self.last_dot = draft.plain, draft.last_dot  # `plain`: no name needs an escape
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
        if draft.last_dot and any(b"." in extension for extension in draft.extensions):
            # A view may have `a.b` of one sample as a column `c.x`, and `a` as a column `b.c.x`.
            dirty |= set(draft.entry_folder.tolist())
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
    """Give each child of a directory a name of its own; return the aliases of the children that need one.

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


class Sections:
    """The sections of a record, in the order in which they are put."""

    def __init__(self) -> None:
        self._parts: list[tuple[str, str, bytes]] = []

    def put(self, name: str, values: Any, dtype: str) -> None:
        """Add a section of numbers."""
        self._parts.append((name, dtype, np.ascontiguousarray(values, dtype=dtype).tobytes()))

    def put_narrow(self, name: str, values: NDArray[Any]) -> None:
        """Add a section of unsigned numbers, of the smallest type that holds them all."""
        top = int(values.max()) if len(values) else 0
        dtype = "u1" if top < 1 << 8 else "<u2" if top < 1 << 16 else "<u4" if top < 1 << 32 else "<u8"
        self.put(name, values, dtype)

    def put_names(self, name: str, values: Iterable[bytes]) -> None:
        """Add a list of byte strings: where each starts (one more for the end) and all of them joined."""
        values = list(values)
        starts = np.zeros(len(values) + 1, dtype=np.int64)
        np.cumsum(np.fromiter(map(len, values), np.int64, len(values)), out=starts[1:])
        self.put_narrow(name + ".start", starts)
        self._parts.append((name, "B", b"".join(values)))

    def put_hash(
        self, name: str, sums: NDArray[Any], parents: Sequence[int] | NDArray[Any], names: Sequence[bytes]
    ) -> None:
        """Add sorted checksums, and of each the row that it belongs to.

        Rows with equal sums are in the order of their parents and names: anybody can make names of equal sums.
        """
        order = np.argsort(sums, kind="stable")
        edges = np.flatnonzero(np.diff(sums[order], prepend=-1, append=-1))
        for at in np.flatnonzero(np.diff(edges) > 1).tolist():
            rows = slice(edges[at], edges[at + 1])
            order[rows] = sorted(order[rows].tolist(), key=lambda row: (parents[row], names[row]))
        self.put(name + ".hash", sums[order], "<u4")
        self.put(name + ".order", order, "<u4")

    def put_times(self, name: str, mtimes: NDArray[np.int64]) -> None:
        """Add times (ns): equal ones as one value, whole seconds in 4 bytes where they fit, else 8 bytes each."""
        if len(mtimes) and (mtimes == mtimes[0]).all():
            self.put(name, mtimes[:1], "<i8")
            return
        seconds = mtimes // 10**9
        if len(mtimes) and (seconds * 10**9 == mtimes).all() and seconds.min() >= 0 and seconds.max() < 1 << 32:
            self.put(name, seconds, "<u4")
        else:
            self.put(name, mtimes, "<i8")

    def to_bytes(self, directory: dict[str, Any]) -> bytes:
        """Return the whole record.

        Magic, checksum, length of the directory, the directory (JSON), the sections.
        """
        offset, table = 0, []
        parts: list[bytes] = []
        for name, dtype, data in self._parts:
            table.append([name, dtype, offset, len(data)])
            padding = -len(data) % 8
            parts += [data, bytes(padding)]
            offset += len(data) + padding
        return _pack_parts({**directory, "sections": table}, parts)


def restamped(data: bytes | memoryview, fingerprint: Fingerprint, *, moved: bool = False) -> bytes:
    """Return a sound record with another fingerprint; `moved` as in `Record`."""
    end = 20 + int.from_bytes(data[16:20], "little")
    directory = json.loads(bytes(data[20:end]))
    directory.pop("moved", None)
    directory["fingerprint"] = list(fingerprint)
    if moved:
        directory["moved"] = True
    return _pack_parts(directory, [bytes(data[end:])])


def _pack_parts(directory: dict[str, Any], parts: Iterable[bytes]) -> bytes:
    text = json.dumps(directory, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 4) % 8)
    body = b"".join([len(text).to_bytes(4, "little"), text, *parts])
    return MAGIC + zlib.crc32(body).to_bytes(8, "little") + body


def adopted(data: bytes, fingerprint: Fingerprint) -> bytes:
    """Return a record that another machine has made, under the fingerprint that the shard has on this one.

    Raises StaleMount if it is of a shard of another size or time.
    """
    try:
        theirs = Record(data).fingerprint
    except (ValueError, KeyError, TypeError) as error:
        raise StaleMount(f"a worker has sent a malformed record: {error}") from None
    if theirs == fingerprint:
        return data
    if theirs[:2] != fingerprint[:2]:
        raise StaleMount("the shard has changed while a worker read it; try again when it is finished")
    return restamped(data, fingerprint)


def build(
    fd: TarBytes,
    fingerprint: Fingerprint,
    problem: Problem | None = None,
    reading: Reading = PLAIN,
    compression: str | None = None,
) -> bytes:
    """Return the record of the shard whose tar is `fd`, with the options `reading`.

    `fingerprint` is that of the file before it was read, `problem` a problem that is known already, `compression`
    that of the file; all three are stored. A damaged shard gives a record of the intact part, with the damage in
    `Record.problems`. Raises OSError when the file cannot be read, CorruptShard when it has more members than a
    record can number.
    """
    problems = Problems([] if problem is None else [problem])
    draft = MemberDraft(reading, size_of(fd))
    marks = reading.marks()
    for chunk in scan.scan(fd, problems, marks=marks):
        damage = draft.add(chunk)
        if damage is not None:
            problems.append(damage)
            break
        _check_count(len(draft.member_entry))
    about: dict[str, Any] = {
        "fingerprint": fingerprint,
        "ends": [draft.last_head, ends_checksum(fd, draft.last_head)],
    }
    if compression is not None:
        about["compression"] = compression
    if marks:
        about["end_marks"] = len(marks)
    if draft.apart:
        about["apart"] = len(draft.apart)
    sections = Sections()
    directory = _pack(draft, problems, sections)
    return sections.to_bytes({**directory, **about})


def derive(
    source: DerivedMembers, fingerprint: Fingerprint, view: dict[str, Any], reading: Reading = PLAIN
) -> bytes:
    """Return a record of `source`, with `view` in its directory. `reading` is that of the shard.

    Raises CorruptShard when it has more members than a record can number.
    """
    _check_count(len(source.entry))
    draft = MemberDraft(reading)
    draft.take(source)
    sections = Sections()
    directory = _pack(draft, Problems(source.problems), sections)
    directory["problem_count"] += source.problems_more
    for name, values in source.lists.items():
        sections.put_names(name, values)
    for name, numbers in source.numbers.items():
        sections.put(name, numbers, "<i8")
    return sections.to_bytes({**directory, "fingerprint": fingerprint, "ends": [0, 0], "view": view})


def _check_count(members: int) -> None:
    if members > INDEX_MAX:
        raise CorruptShard(f"more than {INDEX_MAX:,} members in one shard; split it")


def _pack(draft: MemberDraft, problems: Problems, sections: Sections) -> dict[str, Any]:
    """Put all sections of a draft; return the entries of the record's directory.

    docs/reference/formats.md lists the sections. Their order counts: `Record.checksum`, which commits keep,
    depends on it.
    """
    columns = draft.columns_joined()
    targets = member_draft.resolve(draft, columns, problems)
    ordered = OrderedDraft(draft)
    _put_folders(sections, ordered, draft.folders)
    _put_entries(sections, ordered)
    links = {int(ordered.new_member[row]): int(ordered.new_member[to]) for row, to in targets.items()}
    _put_links(sections, links)
    _put_members(sections, ordered, columns)
    _put_symlinks(sections, ordered, draft)
    _put_sparse(sections, ordered, draft)
    dangling = {int(ordered.new_member[row]) for row in draft.links if row not in targets}
    for domain, aliases in find_aliases(ordered, dangling).items():
        if aliases:
            _put_aliases(sections, f"alias{domain}", aliases, ordered)
    return {
        "format": RECORD.version,
        "folders": len(ordered.folder_names),
        "entries": len(ordered.entry_names),
        "members": len(ordered.member_entry),
        "samples": int(((ordered.entry_flags & STRAY) == 0).sum()),
        "all_sampled": bool((ordered.folder_flags[1:] & HAS_SAMPLES).all()),
        "links": bool(draft.links),
        "all_listed": not ordered.entry_flags.any(),
        "problems": problems.listed(),
        "problem_count": len(problems),
        "unshown": draft.unshown,
        "unshown_count": draft.unshown_count,
        **({"last_dot": True} if draft.last_dot else {}),
    }


def _put_folders(sections: Sections, ordered: OrderedDraft, folders: Folders) -> None:
    count = len(ordered.folder_names)
    # Children are side by side, so where those of a folder start follows from how many the folders before it have.
    children = np.bincount(ordered.folder_parents[1:], minlength=count)
    sections.put("folder.parent", ordered.folder_parents, "<u4")
    sections.put("folder.child", 1 + np.concatenate(([0], np.cumsum(children))), "<u4")
    sections.put("folder.entry", np.searchsorted(ordered.entry_folder, np.arange(count + 1)), "<u4")
    sections.put("folder.prefix", ordered.folder_prefixes, "<u4")
    sections.put_names("folder.name", ordered.folder_names)
    sections.put_hash("folder", ordered.folder_sums, ordered.folder_parents, ordered.folder_names)
    if folders.mtimes:
        mtimes = np.full(count, np.iinfo(np.int64).min)
        mtimes[ordered.new_folder[list(folders.mtimes)]] = list(folders.mtimes.values())
        sections.put("folder.mtime", mtimes, "<i8")


def _put_entries(sections: Sections, ordered: OrderedDraft) -> None:
    starts = np.searchsorted(ordered.member_entry, np.arange(len(ordered.entry_names) + 1))
    sections.put_names("entry.name", ordered.entry_names)
    sections.put("entry.member", starts, "<u4")
    sections.put_hash("entry", ordered.entry_crc, ordered.entry_folder, ordered.entry_names)
    sections.put("entry.flags", ordered.entry_flags, "u1")
    sections.put("folder.flags", ordered.folder_flags, "u1")


def _put_links(sections: Sections, links: dict[int, int]) -> None:
    """Put the hard links: which member each stands for, and how many names a member with links has."""
    if links:
        rows = sorted(links)
        sections.put("link.member", rows, "<u4")
        sections.put("link.target", [links[row] for row in rows], "<u4")
        linked, counts = np.unique(list(links.values()), return_counts=True)
        sections.put("linked.member", linked, "<u4")
        sections.put("linked.count", counts + 1, "<u4")


def _put_members(sections: Sections, ordered: OrderedDraft, columns: dict[str, NDArray[np.int64]]) -> None:
    head, data, size, mtime = (columns[name][ordered.member_order] for name in ("head", "data", "size", "mtime"))
    sections.put_narrow("member.head", head // headers.BLOCK)
    sections.put_narrow("member.body", (data - head) // headers.BLOCK)
    sections.put_narrow("member.size", size)
    sections.put_times("member.mtime", mtime)
    sections.put_narrow("member.ext", ordered.member_extension)
    sections.put_names("ext.name", ordered.extensions)


def _put_symlinks(sections: Sections, ordered: OrderedDraft, draft: MemberDraft) -> None:
    symlinks = sorted((int(ordered.new_member[row]), target) for row, target in draft.symlinks.items())
    if symlinks:
        sections.put("symlink.member", [row for row, _ in symlinks], "<u4")
        sections.put_names("symlink.target", [target for _, target in symlinks])


def _put_sparse(sections: Sections, ordered: OrderedDraft, draft: MemberDraft) -> None:
    sparse = {int(ordered.new_member[row]): segments for row, segments in draft.sparse.items()}
    if sparse:
        rows = sorted(sparse)
        starts = np.cumsum([0, *(len(sparse[row]) for row in rows)])
        offsets, sizes = np.concatenate([sparse[row] for row in rows]).T
        ends = np.concatenate(([0], np.cumsum(sizes)))
        sections.put("sparse.member", rows, "<u4")
        sections.put("sparse.start", starts, "<u4")
        sections.put("sparse.offset", offsets, "<i8")
        sections.put("sparse.size", sizes, "<i8")
        sections.put("sparse.place", ends[:-1] - np.repeat(ends[starts[:-1]], np.diff(starts)), "<i8")


def _put_aliases(sections: Sections, name: str, aliases: list[Alias], ordered: OrderedDraft) -> None:
    sections.put(name + ".child", [alias.child for alias in aliases], "<u4")
    parents, shown = [alias.parent for alias in aliases], [alias.name for alias in aliases]
    sections.put(name + ".parent", parents, "<u4")
    sections.put_names(name + ".name", shown)
    sums = [zlib.crc32(alias.name, _prefix(ordered, alias.parent)) for alias in aliases]
    sections.put_hash(name, np.array(sums, dtype=np.uint32), parents, shown)


def _prefix(ordered: OrderedDraft, where: int) -> int:
    """Return the checksum of the path of a directory and the slash after it."""
    if kind_of(where) == FOLDER:
        return ordered.folder_prefixes[index_of(where)]
    return zlib.crc32(b"/", int(ordered.entry_crc[index_of(where)]))
