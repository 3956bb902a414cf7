"""The record of a shard: everything that serving it needs, packed into one value that is used in place.

`record_builder.py` makes a record from the bytes of a shard and nothing else, so it can run in any process on any
machine. `Record` answers questions about it from the packed columns, without decoding them into Python objects: a
record of a million samples costs no more memory to open than one of ten.

Folders are the directories of member names. An entry is a run of adjacent members with the same key, or a *stray*:
a single member that is in no sample. Both are numbered so that the children of a folder are neighbours, in the
order of the tar; so are the members of an entry. A column of sorted CRC-32 sums of the whole path finds a name by
bisection. docs/reference/formats.md shows the bytes.

A child whose plain name is odd or taken is shown under another name, an *alias*. Names can collide in three
domains (kinds of listing), and each has a table of aliases:

| domain      | lists                           | so a directory holds                                        |
|-------------|---------------------------------|-------------------------------------------------------------|
| BY_EXTENSION | `<folders>/<stem>/<extension>` | folders and samples; a sample its extensions                |
| BY_NAME      | `<folders>/<stem>/<stem.extension>` | the same; a sample its full file names                  |
| FILES        | `<folders>/<stem.extension>`   | folders and all members                                     |
"""

from __future__ import annotations

import bisect
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from wdsfs.errors import NotATar
from wdsfs.formats import Format
from wdsfs.index.record_columns import (
    AliasTable,
    Columns,
    MadeOfColumns,
    PackedNames,
    equal_range,
    names_of,
    rows_with_sum,
    view_of,
)
from wdsfs.shards import Fingerprint
from wdsfs.source import TarBytes, pread
from wdsfs.tar import headers, streams
from wdsfs.tar.problems import NO_TAR, Problem
from wdsfs.tar.sparse import Extents

RECORD = Format("a record", (3,))
MAGIC = b"wdsfs-r\n"
BY_EXTENSION, BY_NAME, FILES = range(3)

# Flags of entries and folders.
STRAY, LINK, TWIN = 1, 2, 4  # in no sample; a hard link (always a stray); shares its path with a folder
HAS_SAMPLES, IS_TWIN = 1, 2  # a sample lies somewhere below; shares its path with a sample

FEW_MADE = 4  # attributes made of columns: as many as `extent` and `extents` need
FEW_MEMBERS = 256  # of a sample, or samples with one name: among more the extension is not searched one by one
EXTENSIONS_KEPT = 16  # extensions of a shard that are kept as objects while its record is open
KINDS = {
    headers.CHARACTER: "character device",
    headers.BLOCK_DEVICE: "block device",
    headers.FIFO: "fifo",
    headers.HARD_LINK: "hard link",
    headers.SYMLINK: "symbolic link",
    headers.DIRECTORY: "directory",
    headers.GNU_VOLUME_LABEL: "volume label of GNU tar",
    headers.GNU_CONTINUED: "part of a file that begins in another volume of GNU tar",
}


class Member(NamedTuple):
    """Place of a member in its shard (bytes), and its size (bytes) and time (ns) for stat."""

    head: int
    data: int
    size: int
    mtime_ns: int


def ends_checksum(fd: TarBytes, last_head: int) -> int:
    """Return a checksum over the first and the last header of a shard. Raises OSError."""
    first = pread(fd, headers.BLOCK, 0) if last_head else b""
    return zlib.crc32(pread(fd, headers.BLOCK, last_head), zlib.crc32(first))


def ends_match(fd: TarBytes, ends: list[int]) -> bool:
    """Return True if the first and the last header of the shard are still those of the record. Raises OSError."""
    return ends_checksum(fd, ends[0]) == ends[1]


def _first_extensions(column: Columns) -> list[bytes]:
    names = names_of("ext.name")(column)
    return names.of(range(min(len(names), EXTENSIONS_KEPT)))


def _numbers_of_extensions(column: Columns) -> dict[bytes, int]:
    names = names_of("ext.name")(column)
    return {name: number for number, name in enumerate(names.of(range(len(names))))}


def _all_aliases(column: Columns) -> list[AliasTable | None]:
    return [
        AliasTable(column, f"alias{domain}") if f"alias{domain}.child" in column else None
        for domain in (BY_EXTENSION, BY_NAME, FILES)
    ]


def _row_of(member: int, column: Sequence[int] | None) -> int | None:
    """Return the row of a member in a column of a few members, in order; None if it is not there."""
    if column is None:
        return None
    at = bisect.bisect_left(column, member)
    return at if at < len(column) and column[at] == member else None


class _SortedMembers(NamedTuple):
    """The members of one sample, or of all samples with one name, in the order of their extensions' numbers."""

    key: tuple[int, bytes | None]
    numbers: memoryview
    members: memoryview

    def of(self, number: int) -> list[int]:
        """Return the members with this extension."""
        rows = equal_range(self.numbers, number)
        return self.members[rows.start : rows.stop].tolist()


class Record:
    """A record, read in place from `buffer`, which must outlive it.

    Many are open at a time. Attributes that are made of columns are made at their first use, and can be dropped
    again (`rest`).

    Raises ValueError when the buffer holds no record of this format or its checksum is wrong (`verify`).
    """

    folder_parent = MadeOfColumns(view_of("folder.parent"))
    folder_child = MadeOfColumns(view_of("folder.child"))
    folder_entry = MadeOfColumns(view_of("folder.entry"))
    folder_prefix = MadeOfColumns(view_of("folder.prefix"))
    folder_flags = MadeOfColumns(view_of("folder.flags"))
    folder_name = MadeOfColumns(names_of("folder.name"))
    _folder_hash = MadeOfColumns(view_of("folder.hash"))
    _folder_order = MadeOfColumns(view_of("folder.order"))
    entry_member = MadeOfColumns(view_of("entry.member"))
    entry_flags = MadeOfColumns(view_of("entry.flags"))
    entry_name = MadeOfColumns(names_of("entry.name"))
    _entry_hash = MadeOfColumns(view_of("entry.hash"))
    _entry_order = MadeOfColumns(view_of("entry.order"))
    extension_name = MadeOfColumns(names_of("ext.name"))
    aliases = MadeOfColumns(_all_aliases)
    _head = MadeOfColumns(view_of("member.head"))
    _body = MadeOfColumns(view_of("member.body"))
    _size = MadeOfColumns(view_of("member.size"))
    _mtime = MadeOfColumns(view_of("member.mtime"))
    _time_unit = MadeOfColumns(lambda column: 10**9 if column["member.mtime"].format == "I" else 1)
    _same_time = MadeOfColumns(lambda column: len(column["member.mtime"]) == 1)
    _extension = MadeOfColumns(view_of("member.ext"))
    _sparse = MadeOfColumns(lambda column: column.get("sparse.member"))
    _few_extensions = MadeOfColumns(_first_extensions)
    _extension_numbers = MadeOfColumns(_numbers_of_extensions)

    def __init__(self, buffer: Any, *, verify: bool = True) -> None:
        view = memoryview(buffer)
        if bytes(view[:8]) != MAGIC:
            raise ValueError("not a shard record")
        if verify and zlib.crc32(view[16:]) != int.from_bytes(view[8:16], "little"):
            raise ValueError("damaged shard record")
        length = int.from_bytes(view[16:20], "little")
        meta = json.loads(bytes(view[20 : 20 + length]))
        RECORD.check(meta["format"])
        self._buffer = view
        column = self.column = Columns(view[20 + length :], meta["sections"])
        self.made: list[str] = []  # names of attributes
        self._sorted: _SortedMembers | None = None
        self.fingerprint = Fingerprint(*meta["fingerprint"])
        self.ends: list[int] = meta["ends"]
        self.compression: str | None = meta.get("compression")  # None for a plain tar (`tar/streams.py`)
        self.folders: int = meta["folders"]
        self.entries: int = meta["entries"]
        self.members: int = meta["members"]
        self.samples: int = meta["samples"]
        self.all_sampled: bool = meta["all_sampled"]  # no folder is without samples
        self.all_listed: bool = meta["all_listed"]  # every entry is a sample with a directory of its own
        self.problems = [Problem(*problem) for problem in meta["problems"]]
        self.problem_count: int = meta["problem_count"]
        self.unshown = [Problem(*member) for member in meta["unshown"]]
        self.unshown_count: int = meta["unshown_count"]
        self.has_links: bool = meta["links"]
        # Only with options of `names.Reading`: end marks with tars after them, samples with members not adjacent.
        self.end_marks: int = meta.get("end_marks", 0)
        self.apart: int = meta.get("apart", 0)
        self.last_dot = bool(meta.get("last_dot"))  # keys may have dots
        # Of a record that was derived from others (`tree/view_record.py`): where its members are. Else None.
        self.view: dict[str, Any] | None = meta.get("view")
        # Of a record that only some headers show to be of its shard (`index/portable.py`): the members whose
        # headers were compared. Else None.
        self.moved: set[int] | None = set() if meta.get("moved") else None
        # No member is a link of any kind: each is one regular file.
        self.is_plain = not (self.has_links or "symlink.member" in column or "linked.member" in column)

    def check_is_tar(self, path: str) -> None:
        """Raise NotATar if the file, which is at `path`, is not a tar."""
        if not self.members and self.problems and self.problems[0].kind in NO_TAR:
            raise NotATar(f"{path}: {streams.split_tar(path) or self.problems[0].text}")

    def rest(self) -> None:
        """Free the attributes that were made; the next use makes them again.

        The few that reading needs stay: a shuffled pass over many shards needs them for each shard again and
        again.
        """
        if len(self.made) > FEW_MADE:
            for name in self.made:
                delattr(self, name)
            self.made.clear()
            self._sorted = None

    def packed(self) -> bytes:
        """Return the record as it was built, to be sent elsewhere."""
        return bytes(self._buffer)

    def digest(self) -> bytes:
        """Return a digest (16 bytes) of everything that is in the record but which files it was made of."""
        length = int.from_bytes(self._buffer[16:20], "little")
        meta = json.loads(bytes(self._buffer[20 : 20 + length]))
        del meta["fingerprint"]
        meta.pop("view", None)
        digest = xxhash.xxh3_128(json.dumps(meta, sort_keys=True).encode())
        digest.update(self._buffer[20 + length :])
        return digest.digest()

    def checksum(self) -> str:
        """Return a checksum of everything in the headers of the shard: names, places, sizes, times, links.

        Every file with the same headers has the same checksum. The content of members does not count.
        """
        digest = hashlib.blake2b(json.dumps([self.ends, self.problem_count, list(self.column)]).encode())
        for name in self.column:
            digest.update(self.column[name])
        return digest.hexdigest()[:32]

    # --- folders and entries

    def counts(self) -> tuple[int, ...]:
        """Return the numbers of its summary (`index/store.py`), after the fingerprint."""
        return (
            self.folders,
            self.entries,
            len(self.child_folders(0)),
            self.count_directories(0),
            self.members,
            self.samples,
            self.total_size(),
            self.problem_count,
            self.unshown_count,
        )

    def count_directories(self, folder: int) -> int:
        """Count the directories in a folder of the samples layout: samples, and folders with samples below."""
        folders = self.child_folders(folder)
        shown = len(folders) if self.all_sampled else sum(self.folder_flags[n] & HAS_SAMPLES for n in folders)
        entries = self.folder_entries(folder)
        if self.all_listed:
            return shown + len(entries)
        flags = np.asarray(self.entry_flags[entries.start : entries.stop])
        return shown + int(((flags & (STRAY | TWIN)) == 0).sum())

    def folder_path(self, folder: int) -> bytes:
        """Return the plain path of a folder, empty for the top."""
        parts = []
        while folder:
            parts.append(self.folder_name[folder])
            folder = self.folder_parent[folder]
        return b"/".join(reversed(parts))

    def child_folders(self, folder: int) -> range:
        """Return the folders in a folder."""
        return range(self.folder_child[folder], self.folder_child[folder + 1])

    def folder_entries(self, folder: int) -> range:
        """Return the samples and strays in a folder."""
        return range(self.folder_entry[folder], self.folder_entry[folder + 1])

    def entry_members(self, entry: int) -> range:
        """Return the members of a sample; of a stray the one that it is."""
        return range(self.entry_member[entry], self.entry_member[entry + 1])

    def folder_of(self, entry: int) -> int:
        """Return the folder that an entry is in."""
        return bisect.bisect_right(self.folder_entry, entry) - 1

    def entry_of(self, member: int) -> int:
        """Return the sample or stray that a member belongs to."""
        return bisect.bisect_right(self.entry_member, member) - 1

    def entry_path(self, entry: int) -> bytes:
        """Return the plain path of an entry: the key of a sample, the name of a stray."""
        folder = self.folder_of(entry)
        return self.folder_path(folder) + b"/" + self.entry_name[entry] if folder else self.entry_name[entry]

    def crc_below(self, folder: int, name: bytes) -> int:
        """Return the checksum under which the child `name` of a folder is filed."""
        return zlib.crc32(name, self.folder_prefix[folder])

    def find_folder(self, parent: int, name: bytes, crc: int) -> int | None:
        """Return the folder called `name` in `parent`; `crc` is the CRC-32 of its path."""
        order = self._folder_order
        for at in rows_with_sum(self._folder_hash, order, crc, (parent, name), self._folder_key):
            folder = order[at]
            if self.folder_parent[folder] != parent or self.folder_name[folder] != name:
                break
            if folder:
                return folder
        return None

    def _folder_key(self, folder: int) -> tuple[int, bytes]:
        return self.folder_parent[folder], self.folder_name[folder]

    def find_path(self, path: bytes) -> int | None:
        """Return the folder with this plain path, the top left out."""
        equal = equal_range(self._folder_hash, zlib.crc32(path))
        if len(equal) < 2:
            folder = self._folder_order[equal[0]] if equal else 0
            return folder if folder and self.folder_path(folder) == path else None
        place: int | None = 0
        for name in path.split(b"/"):
            if place is not None:
                place = self.find_folder(place, name, self.crc_below(place, name))
        return place

    def find_entries(self, folder: int, name: bytes, crc: int) -> Iterator[int]:
        """Yield the samples and strays of a folder with this plain name, in the order of the tar."""
        order, within = self._entry_order, self.folder_entries(folder)
        for at in rows_with_sum(self._entry_hash, order, crc, (folder, name), self._entry_key):
            entry = order[at]
            if entry not in within or self.entry_name[entry] != name:
                break
            yield entry

    def _entry_key(self, entry: int) -> tuple[int, bytes]:
        return self.folder_of(entry), self.entry_name[entry]

    def find_samples(self, path: bytes, crc: int) -> list[int]:
        """Return the samples with this plain path, whose CRC-32 is `crc`."""
        equal = equal_range(self._entry_hash, crc)
        entries: Iterable[int] = (
            self._entry_order[at] for at in equal if self.entry_path(self._entry_order[at]) == path
        )
        if len(equal) > 1:
            folder, slash, name = path.rpartition(b"/")
            where = self.find_path(folder) if slash else 0
            entries = () if where is None else self.find_entries(where, name, crc)
        return [entry for entry in entries if not self.entry_flags[entry] & STRAY]

    def samples_in_order(self) -> NDArray[np.int64]:
        """Return the entries that are samples, in the order of the tar."""
        entries = np.flatnonzero((self.array("entry.flags") & STRAY) == 0)
        heads = self.array("member.head")[self.array("entry.member")[entries]]
        return entries[np.argsort(heads, kind="stable")]

    def members_in_order(self) -> NDArray[np.int64]:
        """Return the members of samples, in the order of the tar."""
        members = np.flatnonzero((self.array("entry.flags")[self._entries_of_members()] & STRAY) == 0)
        return members[np.argsort(self.array("member.head")[members], kind="stable")]

    def _entries_of_members(self) -> NDArray[np.int64]:
        starts = self.array("entry.member").astype(np.int64)
        return np.repeat(np.arange(self.entries), starts[1:] - starts[:-1])

    def twin_sample(self, folder: int) -> int | None:
        """Return the sample that shares its directory with this folder."""
        if not self.folder_flags[folder] & IS_TWIN:
            return None
        parent, name = self.folder_parent[folder], self.folder_name[folder]
        for entry in self.find_entries(parent, name, self.crc_below(parent, name)):
            if self.entry_flags[entry] & TWIN:
                return entry
        return None

    def twin_folder(self, entry: int) -> int | None:
        """Return the folder that shares its directory with this sample."""
        if not self.entry_flags[entry] & TWIN:
            return None
        parent, name = self.folder_of(entry), self.entry_name[entry]
        return self.find_folder(parent, name, self.crc_below(parent, name))

    def folder_mtime_ns(self, folder: int) -> int | None:
        """Return the time of the tar's own member for this directory, if it has one."""
        column = self.column.get("folder.mtime")
        value = column[folder] if column is not None else None
        return None if value == -(1 << 63) else value

    # --- members

    def member(self, member: int) -> Member:
        """Return place, size and time of a member."""
        head = self._head[member] * headers.BLOCK
        return Member(head, head + self._body[member] * headers.BLOCK, self._size[member], self.mtime_ns(member))

    def extent(self, member: int) -> tuple[int, int]:
        """Return offset and size (bytes) of the content of a member in its shard."""
        return (self._head[member] + self._body[member]) * headers.BLOCK, self._size[member]

    def address(self, member: int) -> tuple[int, int]:
        """Return, in a derived record, the source that a member comes from, and its number there."""
        assert self.view is not None
        shift = self.view["shift"]
        return self._head[member] >> shift, self._head[member] & (1 << shift) - 1

    def names_in(self, section: str) -> PackedNames:
        """Return a packed list of byte strings of the record."""
        return names_of(section)(self.column)

    def paths(self) -> list[bytes]:
        """Return the plain path of every entry: the keys of samples, the names of strays."""
        paths: list[bytes] = []
        for folder in range(self.folders):
            names = self.entry_name.of(self.folder_entries(folder))
            prefix = self.folder_path(folder) + b"/" if folder and names else b""
            paths += [prefix + name for name in names] if prefix else names
        return paths

    def size_and_time(self, member: int) -> tuple[int, int]:
        """Return size (bytes) and mtime (ns) of a member."""
        return self._size[member], self.mtime_ns(member)

    def sizes_and_times(self, members: range) -> tuple[list[int], list[int]]:
        """Return sizes (bytes) and mtimes (ns) of a few neighbouring members; arrays take longer for these."""
        sizes: list[int] = self._size[members.start : members.stop].tolist()
        if self._same_time:
            return sizes, [self.mtime_ns(0)] * len(sizes)
        return sizes, [time * self._time_unit for time in self._mtime[members.start : members.stop]]

    def mtime_ns(self, member: int) -> int:
        """Return the time (ns) of a member."""
        return self._mtime[0 if self._same_time else member] * self._time_unit

    def file_names(self, members: range) -> list[bytes]:
        """Return the plain names of neighbouring members, with their extensions; of strays, just theirs."""
        if not members:
            return []
        first, start = self.entry_of(members.start), members.start
        entries = range(first, self.entry_of(members.stop - 1) + 1)
        bounds = self.entry_member[first : entries.stop + 1].tolist()
        bounds[0], bounds[-1] = start, members.stop
        numbers = self._extension[start : members.stop].tolist()
        suffixes = {n: b"." + self.extension_name[n] for n in set(numbers) if n < len(self.extension_name)}
        names: list[bytes] = []
        for stem, flags, (begin, end) in zip(
            self.entry_name.of(entries), self.entry_flags[first : entries.stop], pairwise(bounds), strict=True
        ):
            if flags & STRAY:
                names += [stem] * (end - begin)
            elif end == begin + 1:  # as the next branch, in half the time
                names.append(stem + suffixes[numbers[begin - start]])
            else:
                names += [stem + suffixes[number] for number in numbers[begin - start : end - start]]
        return names

    def sizes(self, members: range) -> NDArray[Any]:
        """Return sizes (bytes) of neighbouring members."""
        return np.asarray(self._size[members.start : members.stop])

    def mtimes_ns(self, members: Any) -> NDArray[np.int64]:
        """Return times (ns) of these members, a range or an array of numbers."""
        if self._same_time:
            return np.full(len(members), self._mtime[0] * self._time_unit, np.int64)
        column = np.asarray(self._mtime)
        chosen = column[members.start : members.stop] if isinstance(members, range) else column[members]
        return chosen.astype(np.int64) * self._time_unit

    def first_members(self, entries: range) -> NDArray[Any]:
        """Return the first member of each of neighbouring samples."""
        return np.asarray(self.entry_member[entries.start : entries.stop])

    def extensions(self, members: range) -> list[bytes]:
        """Return the extensions of a few neighbouring members."""
        numbers, few = self._extension[members.start : members.stop].tolist(), self._few_extensions
        return [few[number] if number < EXTENSIONS_KEPT else self.extension_name[number] for number in numbers]

    def extension(self, member: int) -> bytes:
        """Return the extension of a member."""
        number = self._extension[member]
        return self._few_extensions[number] if number < EXTENSIONS_KEPT else self.extension_name[number]

    def find_members(self, entry: int, extension: bytes) -> list[int]:
        """Return the members of a sample with this extension, in the order of the tar."""
        number = self._extension_numbers.get(extension)
        if number is None:
            return []
        first, last = self.entry_member[entry], self.entry_member[entry + 1]
        if last - first > FEW_MEMBERS:
            return self._sorted_members((entry, None), lambda: [entry]).of(number)
        return [member for member in range(first, last) if self._extension[member] == number]

    def find_files(self, folder: int, stem: bytes, extension: bytes) -> Iterator[int]:
        """Yield the members with this extension of all samples with this plain name in a folder."""
        number = self._extension_numbers.get(extension)
        if number is None:
            return
        if self._sorted is not None and self._sorted.key == (folder, stem):
            yield from self._sorted.of(number)
            return
        entries = self.find_entries(folder, stem, self.crc_below(folder, stem))
        some = list(islice(entries, FEW_MEMBERS + 1))
        if len(some) > FEW_MEMBERS:
            yield from self._sorted_members((folder, stem), lambda: [*some, *entries]).of(number)
            return
        for entry in some:
            if not self.entry_flags[entry] & STRAY:
                yield from self.find_members(entry, extension)

    def _sorted_members(self, key: tuple[int, bytes | None], entries: Callable[[], list[int]]) -> _SortedMembers:
        """Return the members of samples by extension; the last result is cached."""
        if self._sorted is None or self._sorted.key != key:
            chosen = [entry for entry in entries() if not self.entry_flags[entry] & STRAY]
            members = np.concatenate([np.arange(*self.entry_member[entry : entry + 2]) for entry in chosen])
            numbers = np.asarray(self._extension)[members]
            order = np.argsort(numbers, kind="stable")
            self._sorted = _SortedMembers(key, numbers[order].data, members[order].data)
        return self._sorted

    def symlink(self, member: int) -> bytes | None:
        """Return the target of a symbolic link; None for a regular member."""
        at = _row_of(self._linked_member(member), self.column.get("symlink.member"))
        return None if at is None else self.names_in("symlink.target")[at]

    def extents(self, member: int) -> Extents | None:
        """Return the stored parts of a sparse member; None for any other."""
        at = None if self._sparse is None else _row_of(self._linked_member(member), self._sparse)
        if at is None:
            return None
        starts = self.column["sparse.start"]
        return Extents(
            *(self.column[f"sparse.{name}"][starts[at] : starts[at + 1]] for name in ("offset", "size", "place"))
        )

    def _linked_member(self, member: int) -> int:
        """Return the member that a hard link stands for; any other member itself."""
        at = _row_of(member, self.column.get("link.member"))
        return member if at is None else self.column["link.target"][at]

    def sparse_members(self) -> NDArray[np.int64]:
        """Return the sparse members, and hard links to them."""
        return self._with_links("sparse.member")

    def symlinks(self) -> NDArray[np.int64]:
        """Return the symbolic links, and hard links to them."""
        return self._with_links("symlink.member")

    def _with_links(self, section: str) -> NDArray[np.int64]:
        if section not in self.column:
            return np.zeros(0, np.int64)
        members = self.array(section).astype(np.int64)
        if "link.member" in self.column:
            links = self.array("link.member")[np.isin(self.array("link.target"), members)]
            members = np.concatenate((members, links.astype(np.int64)))
        return members

    def link_target(self, member: int) -> int | None:
        """Return the member that a hard link stands for; the member itself if it is no link.

        None if it dangles.
        """
        at = _row_of(member, self.column.get("link.member"))
        if at is not None:
            return self.column["link.target"][at]
        return None if self.entry_flags[self.entry_of(member)] & LINK else member

    def link_count(self, member: int) -> int:
        """Return the number of names of a member in the shard: itself and hard links to it."""
        at = _row_of(member, self.column.get("linked.member"))
        return 1 if at is None else self.column["linked.count"][at]

    def array(self, name: str) -> NDArray[Any]:
        """Return a section as a NumPy array, without a copy: for statistics over the whole shard."""
        return np.asarray(self.column[name])

    def total_size(self) -> int:
        """Return the bytes of all members in sum."""
        return int(self.array("member.size").sum(dtype=np.uint64)) if self.members else 0
