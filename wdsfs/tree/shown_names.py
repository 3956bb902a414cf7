"""The names that a record shows in each directory of a shard, one by one or as columns for all.

A position is a kind (folder, sample, member) and an index in the record (`inodes.py`). Nothing here needs more
than the record and the view; the trees decide which directories have these names. A directory of three files takes
less time name by name; a shard of thousands takes a tenth of the time in columns.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from wdsfs.errors import NotADirectory
from wdsfs.index.record import BY_EXTENSION, BY_NAME, HAS_SAMPLES, LINK, STRAY, TWIN, Record
from wdsfs.inodes import FOLDER, INDEX_MAX, MEMBER, SAMPLE, index_of, kind_of, position
from wdsfs.names import text_of
from wdsfs.tree.texts import Ints, Texts
from wdsfs.tree.tree import SAMPLES_LAYOUT, Node, View

_DOT = np.frombuffer(b".", np.uint8)


class ShownNames:
    """The names that records show in one view."""

    def __init__(self, view: View) -> None:
        self.domain = view.domain
        self.files_layout = view.layout != SAMPLES_LAYOUT

    # --- from a name to a position

    def find(self, record: Record, where: int, name: bytes) -> int | None:
        """Return the position of the child with this shown name of the directory at `where`."""
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
        """Yield the children with this plain name; one with an alias is shown under another name."""
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
        """Return True if a folder has a directory.

        In a layout with directories of samples, a folder without samples below it has none.
        """
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
        """Yield the files that are shown under this name in a folder of the files layout."""
        end = name.find(b".", 1)
        while end > 0:
            for member in record.find_files(folder, name[:end], name[end + 1 :]):
                yield position(MEMBER, member)
            end = name.find(b".", end + 1) if record.last_dot else -1
        for entry in record.find_entries(folder, name, crc):
            if record.entry_flags[entry] & STRAY:
                for member in record.entry_members(entry):
                    if record.link_target(member) is not None:
                        yield position(MEMBER, member)

    # --- from a position to names

    def children(self, record: Record, where: int, after: int, *, twins: bool = False) -> Iterator[int]:
        """Yield the positions of the children of a directory after the cursor.

        Children are files of its sample, folders, samples or files; with `twins` also samples that share their
        directory with a folder.
        """
        kind, index = kind_of(where), index_of(where)
        if kind == SAMPLE:
            yield from _positions_after(MEMBER, record.entry_members(index), after)
            return
        if self.files_layout:
            if kind_of(after) in (0, FOLDER):
                yield from _positions_after(FOLDER, record.child_folders(index), after)
            entries = record.folder_entries(index)
            members = range(record.entry_member[entries.start], record.entry_member[entries.stop])
            for child in _positions_after(MEMBER, members, after):
                if not record.has_links or record.link_target(index_of(child)) is not None:
                    yield child
            return
        if kind_of(after) in (0, MEMBER):
            twin = record.twin_sample(index)
            if twin is not None:
                yield from _positions_after(MEMBER, record.entry_members(twin), after)
            after = 0
        if kind_of(after) in (0, FOLDER):
            for child in _positions_after(FOLDER, record.child_folders(index), after):
                if record.all_sampled or self.is_shown(record, index_of(child)):
                    yield child
            after = 0
        hidden = STRAY if twins else STRAY | TWIN
        for child in _positions_after(SAMPLE, record.folder_entries(index), after):
            if not record.entry_flags[index_of(child)] & hidden:
                yield child

    def shown(self, record: Record, child: int) -> bytes:
        """Return the name under which a child is listed."""
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
        """Return the positions at which a member is shown: its own, and in the files layout its hard links."""
        if kind_of(where) != MEMBER or not self.files_layout or record.link_count(index_of(where)) < 2:
            return [where]
        links = record.array("link.member")[record.array("link.target") == index_of(where)]
        return [where, *(position(MEMBER, link) for link in links.tolist() if link != index_of(where))]

    def holder(self, record: Record, where: int) -> int:
        """Return the position of the directory in which a position is shown."""
        kind, index = kind_of(where), index_of(where)
        if kind == FOLDER:
            return position(FOLDER, record.folder_parent[index])
        if kind == SAMPLE:
            return position(FOLDER, record.folder_of(index))
        entry = record.entry_of(index)
        if self.files_layout:
            return position(FOLDER, record.folder_of(entry))
        return home_of(record, position(SAMPLE, entry))


def _positions_after(kind: int, indexes: range, after: int) -> Iterator[int]:
    """Return positions of these indexes after the cursor `after`."""
    first = max(indexes.start, index_of(after) + 1) if kind_of(after) == kind else indexes.start
    base = kind << 30
    return (base | index for index in range(first, indexes.stop))


def home_of(record: Record, where: int) -> int:
    """Return the directory of a sample's files: its own, or that of the folder with the same path."""
    twin = record.twin_folder(index_of(where)) if kind_of(where) == SAMPLE else None
    return where if twin is None else position(FOLDER, twin)


def parent_folder(record: Record, where: int) -> int | None:
    """Return the folder that holds the directory at a position; None for the directory of the shard."""
    kind, index = kind_of(where), index_of(where)
    if kind != FOLDER:
        return record.folder_of(index)
    return record.folder_parent[index] if index else None


def _crc_below(record: Record, where: int, name: bytes) -> int:
    if kind_of(where) == FOLDER:
        return record.crc_below(index_of(where), name)
    return zlib.crc32(name, zlib.crc32(record.entry_path(index_of(where)) + b"/"))


class NameColumns(NamedTuple):
    """The names that a shard shows, and the directories that hold them.

    Directories are numbered: first those of `folders` of the record, beginning with the top, then those of
    `samples` (its entries). Holders are directories (-1: that of the top). `names` has the names of the folders
    without the top, of the samples, and of `members`: a file, or several names of a file in the files layout (hard
    links). `shared` is the path of each folder that may have names of other shards in a merged tree, else None.
    """

    folders: list[int]
    folder_holder: Ints
    samples: Ints
    sample_holder: Ints
    members: Ints
    member_holder: Ints
    names: Texts
    shared: list[bytes | None]

    @property
    def first(self) -> int:
        """The row of the first name that is not that of a folder."""
        return len(self.folders) - 1

    def position_of(self, row: int) -> int:
        """Return the position in the record of the sample or file with the name in this row."""
        at = row - self.first
        if at < len(self.samples):
            return position(SAMPLE, int(self.samples[at]))
        return position(MEMBER, int(self.members[at - len(self.samples)]))

    def folder_names(self) -> list[bytes]:
        """Return the names of the folders, without the top."""
        return self.names.take(slice(self.first)).to_list()

    def rows_in_folders(self) -> tuple[Ints, Ints]:
        """Return the rows of samples and files in folders, and the folder that each is in."""
        holder = np.concatenate([self.sample_holder, self.member_holder])
        chosen = np.flatnonzero(holder < len(self.folders))
        return self.first + chosen, holder[chosen]


class ShownColumns(NamedTuple):
    """All that is shown of a shard: names and attributes.

    `folders` are the nodes of folder directories, and samples have the times (ns) of their directories. For each
    file `members` is its position in the record, `links` the number of its names, `sizes` its size (bytes),
    `mtimes_ns` its time. `targets` are the targets of symbolic links, by the number of the file. `name_file` is
    the file of each name in `named.members`.
    """

    named: NameColumns
    folders: list[Node]
    sample_mtime_ns: Ints
    members: Ints
    links: Ints
    sizes: Ints
    mtimes_ns: Ints
    targets: dict[int, bytes]
    name_file: Ints


def columns_of(record: Record, named: NameColumns, folders: list[Node]) -> ShownColumns:
    """Return all columns of a record with these names; `folders` are the nodes of its folders."""
    members, name_file = _without_hard_links(record, named.members)
    targets, sizes = _symbolic_links(record, members)
    return ShownColumns(
        named=named,
        folders=folders,
        sample_mtime_ns=record.mtimes_ns(record.array("entry.member")[named.samples]),
        members=members,
        links=_link_counts(record)[members],
        sizes=sizes,
        mtimes_ns=record.mtimes_ns(members),
        targets=targets,
        name_file=name_file,
    )


def names_of(record: Record, shown: ShownNames, apart: Sequence[int] = ()) -> NameColumns:
    """Return the names of a record.

    `apart` are samples that have a directory of their own although a folder has the same path.
    """
    folders = [n for n in range(record.folders) if not n or shown.is_shown(record, n)]
    at = np.full(record.folders, -1, np.int64)  # the directory of each folder
    at[folders] = np.arange(len(folders))
    holder = at[record.array("folder.parent")[folders].astype(np.int64)]
    holder[0] = -1
    entry_folder = np.repeat(np.arange(record.folders), _steps(record.array("folder.entry").astype(np.int64)))
    bounds = record.array("entry.member").astype(np.int64)
    if shown.files_layout:
        samples = np.zeros(0, np.int64)
        directory = at[entry_folder]  # of the files of each entry
        members = _members_with_names(record)
    else:
        samples, directory = _directories_of_samples(record, at, apart)
        stray = (record.array("entry.flags") & STRAY) != 0
        members = np.flatnonzero(np.repeat(~stray, _steps(bounds)))
    plain = [Texts.of([record.folder_name[n] for n in folders[1:]]), _texts_in(record, "entry.name").take(samples)]
    if shown.domain == BY_EXTENSION:
        plain.append(_texts_in(record, "ext.name").take(record.array("member.ext")[members].astype(np.int64)))
    else:
        plain.append(_file_names(record, members))
    texts = _with_aliases(
        record, shown.domain, Texts.joined(plain), (np.array(folders[1:], np.int64), samples, members)
    )
    if apart:  # they have the name of the folder
        rows = len(folders) - 1 + np.searchsorted(samples, apart)
        texts = texts.replaced(rows, Texts.of([shown.shown(record, position(SAMPLE, entry)) for entry in apart]))
    return NameColumns(
        folders=folders,
        folder_holder=holder,
        samples=samples,
        sample_holder=at[entry_folder[samples]],
        members=members,
        member_holder=np.repeat(directory, _steps(bounds))[members],
        names=texts,
        shared=[None] * len(folders),
    )


def _directories_of_samples(record: Record, at: Ints, apart: Sequence[int]) -> tuple[Ints, Ints]:
    """Return the samples with directories of their own, and for each entry the directory of its files (-1: none).

    `at` are the directories of folders.
    """
    flags = record.array("entry.flags").copy()
    flags[list(apart)] &= ~np.uint8(TWIN)
    samples = np.flatnonzero((flags & (STRAY | TWIN)) == 0)
    directory = np.full(record.entries, -1, np.int64)
    directory[samples] = np.arange(len(samples)) + np.count_nonzero(at >= 0)
    for entry in np.flatnonzero(flags & TWIN).tolist():
        folder = record.twin_folder(entry)
        assert folder is not None
        directory[entry] = at[folder]
    return samples, directory


def _steps(bounds: Ints) -> Ints:
    return bounds[1:] - bounds[:-1]


def _texts_in(record: Record, section: str) -> Texts:
    return Texts.packed(record.array(section), record.array(f"{section}.start"))


def _file_names(record: Record, members: Ints) -> Texts:
    """Return the plain names of members, with their extensions."""
    entry = np.repeat(np.arange(record.entries), _steps(record.array("entry.member").astype(np.int64)))[members]
    samples = (record.array("entry.flags")[entry] & STRAY) == 0  # others have no extension
    extension = np.where(samples, record.array("member.ext")[members], 0)
    suffixes = _texts_in(record, "ext.name").take(extension) if samples.any() else Texts.of([b""] * len(members))
    return Texts.chained(
        [
            _texts_in(record, "entry.name").take(entry),
            Texts(_DOT, np.zeros(len(members), np.int64), samples.astype(np.int64)),
            suffixes._replace(lengths=np.where(samples, suffixes.lengths, 0)),
        ]
    )


def _members_with_names(record: Record) -> Ints:
    """Return the members that the files layout shows: all but hard links that lead nowhere."""
    leads_nowhere = np.repeat(
        (record.array("entry.flags") & LINK) != 0, _steps(record.array("entry.member").astype(np.int64))
    )
    if "link.member" in record.column:
        leads_nowhere[record.array("link.member")] = False
    return np.flatnonzero(~leads_nowhere)


def _without_hard_links(record: Record, listed: Ints) -> tuple[Ints, Ints]:
    """Return the members that are files, and for each listed name its file among these."""
    if "link.member" not in record.column:
        return listed, np.arange(len(listed))
    targets = np.arange(record.members)
    targets[record.array("link.member").astype(np.int64)] = record.array("link.target")
    members, file = np.unique(targets[listed], return_inverse=True)
    return members, file.reshape(-1)


def _link_counts(record: Record) -> Ints:
    counts = np.ones(record.members, np.int64)
    if "linked.member" in record.column:
        counts[record.array("linked.member").astype(np.int64)] = record.array("linked.count")
    return counts


def _symbolic_links(record: Record, members: Ints) -> tuple[dict[int, bytes], Ints]:
    """Return the targets of the symbolic links among these members, and the sizes (bytes) of all."""
    sizes = record.array("member.size")[members].astype(np.int64)
    if "symlink.member" not in record.column:
        return {}, sizes
    links = np.flatnonzero(np.isin(members, record.symlinks())).tolist()
    targets = {file: record.symlink(int(members[file])) or b"" for file in links}
    sizes[links] = [len(target) for target in targets.values()]
    return targets, sizes


def _with_aliases(record: Record, domain: int, names: Texts, named: tuple[Ints, Ints, Ints]) -> Texts:
    """Return these names, with aliases in the place of plain names that are odd or taken.

    `named` are the folders, samples and members.
    """
    aliases = record.aliases[domain]
    if aliases is None:
        return names
    child = np.asarray(aliases.child).astype(np.int64)
    rows = np.full(len(child), -1, np.int64)
    before = 0
    for kind, shown in zip((FOLDER, SAMPLE, MEMBER), named, strict=True):
        its = np.flatnonzero(child >> 30 == kind)
        index, places = child[its] & INDEX_MAX, np.zeros(0, np.int64)
        if len(shown):
            places = np.minimum(np.searchsorted(shown, index), len(shown) - 1)
            rows[its] = np.where(shown[places] == index, places + before, -1)
        before += len(shown)
    chosen = np.flatnonzero(rows >= 0)
    others = Texts.packed(np.asarray(aliases.name.text), np.asarray(aliases.name.starts))
    return names.replaced(rows[chosen], others.take(chosen))
