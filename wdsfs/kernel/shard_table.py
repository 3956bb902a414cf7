"""Makes the tables of a shard for an image: objects and names, with the place of each file in a device.

A shard is one table, unless much of its content is stored in the image: then it is several, so that memory stays
small. Directories that hold names of several shards, or of several tables, lie outside of the tables.

Content that no pointer can reach is stored in the image: fields of JSON, values of label files, sparse members
whose parts do not begin at blocks, and content in a last block of a shard that is not whole. If a shard ends too
early, everything from the first missing block on is on a device that does not exist, so reading it fails. A field
of JSON that cannot be parsed is there, too.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from wdsfs.errors import CorruptShard, ImageError
from wdsfs.kernel import erofs_header
from wdsfs.kernel.erofs_encoding import NOTHING_STORED, Chunks, Outside, Stored, Table, blocks_of_all, placed
from wdsfs.kernel.erofs_header import BLOCK, CHUNK_BITS_MAX, NO_BLOCK, blocks_of
from wdsfs.tree import content as content_module
from wdsfs.tree.content import APART, HELD, IN_DATA, Content, ContentColumns
from wdsfs.tree.shown_names import ShownColumns
from wdsfs.tree.texts import Ints, Texts

STORED_MAX = 16 << 20  # bytes of stored content in a table
FILE_STORED_MAX = 256 << 20  # bytes of a file that is stored
CHUNKS_MAX = 1 << 24  # of a file: 128 MiB of indexes
CHUNKS_DAMAGED = 1 << 18  # of a file that is not whole, as far as its size can be believed
_PIECE = 1 << 20  # bytes that are read at a time
_SYMLINK_MODE = stat.S_IFLNK | 0o777


class Pieces(NamedTuple):
    """The parts of a file that lie in a shard: where each is in the file, its size, where in the shard (bytes)."""

    start: Ints
    size: Ints
    place: Ints


class DeviceFile(NamedTuple):
    """A device: its number, and the size of the file that it is (bytes)."""

    number: int
    size: int


class ContentPlaces:
    """The places of content, with `devices` by path of shard, and the number of a device that is `missing`."""

    def __init__(self, devices: Mapping[bytes, DeviceFile], missing: int | None) -> None:
        self._devices, self._missing = devices, missing

    def of_all(self, contents: ContentColumns, members: Ints, sizes: Ints) -> tuple[Ints, Ints]:
        """Return the places of files, in columns: of these members of a shard, with these sizes (bytes).

        A device IN_DATA, APART or HELD is as `ContentColumns` says it. Raises ImageError.
        """
        devices = [*map(self._device, contents.paths), DeviceFile(0, 0)]
        numbers, rooms = np.array([[device.number, device.size // BLOCK] for device in devices], np.int64).T
        file, start = contents.file[members], contents.start[members]
        at = np.maximum(file, -1)  # the last row is of members that are in no file
        whole = start // BLOCK + blocks_of_all(sizes) <= rooms[at]
        device = np.where(file < 0, file, np.where(whole, numbers[at], APART))
        device[sizes == 0] = 0
        return device, np.where(device > 0, start // BLOCK, NO_BLOCK)

    def _device(self, path: bytes) -> DeviceFile:
        device = self._devices.get(path)
        if device is None:
            raise ImageError(f"{os.fsdecode(path)}: is not a shard of the image")
        return device

    def of(self, content: Content) -> Chunks | bytes:
        """Return where the chunks of a file are, or its bytes.

        Raises ImageError, and ShardErrors when stored content cannot be read.
        """
        pieces = _pieces(content)
        if pieces is None:
            try:
                return _read_content(content, 0)
            except CorruptShard:
                if content.held is None or self._missing is None:
                    raise
                # A file that is made of damaged data: reading it fails, as on a mount.
                bits = _bits_of_small_chunks(content.size)
                count = -(-content.size // (BLOCK << bits))
                return Chunks(bits, np.full(count, self._missing, np.int64), np.zeros(count, np.int64))
        return self._chunks(content, pieces, self._device(content.file.path))

    def _chunks(self, content: Content, pieces: Pieces, device: DeviceFile) -> Chunks:
        bits = _chunk_bits(content, pieces)
        chunk = BLOCK << bits
        count = -(-content.size // chunk)
        if count > CHUNKS_MAX:
            raise ImageError(
                f"{os.fsdecode(content.file.path)}: a sparse member has more than {CHUNKS_MAX:,} pieces; mount "
                "this set by FUSE"
            )
        devices, blocks = np.zeros(count, np.int64), np.full(count, NO_BLOCK, np.int64)
        nth, begins, ends = _of_chunks(pieces, chunk)
        there = -(-ends // BLOCK) <= device.size // BLOCK
        stored = b""
        if not there.all() and int(ends[-1]) <= device.size:  # the last block of the shard is not whole
            stored, there[-1] = _read_content(content, int(nth[-1]) * chunk), True
        if self._missing is None and not there.all():
            raise ImageError(f"{os.fsdecode(content.file.path)}: ends before its last member does")
        devices[nth] = np.where(there, device.number, self._missing or 0)
        blocks[nth] = np.where(there, begins // BLOCK, 0)
        return Chunks(bits, devices, blocks, stored)


def _of_chunks(pieces: Pieces, chunk: int) -> tuple[Ints, Ints, Ints]:
    """Return the numbers of the chunks that lie in pieces, and where each begins and ends in the shard."""
    start, size, place = pieces
    first = start // chunk
    counts = -(-(start + size) // chunk) - first
    before = np.cumsum(counts) - counts
    nth = np.repeat(first - before, counts) + np.arange(counts.sum())
    begins = np.repeat(place - start, counts) + nth * chunk
    return nth, begins, np.minimum(begins + chunk, np.repeat(place + size, counts))


def _chunk_bits(content: Content, pieces: Pieces) -> int:
    """Return how many times a block is doubled to get chunks of a file of which each lies in a single piece."""
    edges = np.concatenate((pieces.start, pieces.start + pieces.size))
    edges = edges[edges != content.size]
    if edges.any():
        unit = int(np.gcd.reduce(edges))
        return (unit & -unit).bit_length() - BLOCK.bit_length()
    return _bits_of_small_chunks(content.size)  # a hole, or one piece, whose end is missing or no whole block


def _bits_of_small_chunks(size: int) -> int:
    """Return how many times a block is doubled to get chunks of a file that are small, but not too many."""
    return min((blocks_of(size) // CHUNKS_DAMAGED).bit_length(), CHUNK_BITS_MAX)


def _pieces(content: Content) -> Pieces | None:
    """Return the parts of a file that lie in a shard; None if a block of the file is no block of the shard."""
    if content.held is not None:
        return None
    extents = content.extents
    columns = ([0], [content.size], [0]) if extents is None else extents
    start, size, place = (np.array(column, np.int64) for column in columns)
    place += content.data
    if (start % BLOCK).any() or (place % BLOCK).any() or (size % BLOCK != 0)[start + size != content.size].any():
        return None
    return Pieces(start, size, place)


def _read_content(content: Content, start: int) -> bytes:
    """Return the bytes of a file from `start` on.

    Raises ImageError if they are too many, else as `content.read`.
    """
    if content.size - start > FILE_STORED_MAX:
        raise ImageError(
            f"{os.fsdecode(content.file.path)}: {content.size - start:,} bytes of a file would have to be stored "
            f"in the image, and the limit is {FILE_STORED_MAX:,}; mount this set by FUSE"
        )
    pieces = range(start, content.size, _PIECE)
    return b"".join(content_module.read(content, at, min(_PIECE, content.size - at)) for at in pieces)


class ShardFiles:
    """The files that are shown of a shard, and where their bytes are.

    `content` says it of all members, `content_of` of one by its number, where the columns do not.
    """

    def __init__(
        self,
        shown: ShownColumns,
        content: ContentColumns,
        content_of: Callable[[int], Content],
        places: ContentPlaces,
    ) -> None:
        self._shown, self._content, self._content_of, self._places = shown, content, content_of, places
        self._device, self._block = places.of_all(content, shown.members, shown.sizes)
        self._device[[*shown.targets]] = HELD
        in_image = (self._device == IN_DATA) | (self._device == HELD)
        self.stored_sizes = np.where(in_image, shown.sizes, 0)  # bytes of each that are in the image itself

    def places(self, files: Ints, objects: Ints) -> tuple[Ints, Ints, dict[int, Chunks], Stored]:
        """Return the places of files, which are these objects of a table: device, block, chunks, stored content.

        Raises ImageError, and ShardErrors when stored content cannot be read.
        """
        device, block = self._device[files], self._block[files]
        if not (device < 0).any():
            return device, block, {}, NOTHING_STORED
        chunks, stored, contents = dict[int, Chunks](), list[int](), list[bytes]()
        for row in np.flatnonzero((device == APART) | (device == HELD)).tolist():
            place = self._place(int(files[row]))
            if isinstance(place, Chunks):
                chunks[int(objects[row])] = place
            else:
                stored.append(row)
                contents.append(place)
        in_data = np.flatnonzero(device == IN_DATA)
        start = self._content.start[self._shown.members[files[in_data]]]
        sizes = self._shown.sizes[files[in_data]]
        texts = Texts.joined([Texts(self._content.data, start, sizes), Texts.of(contents)])
        rows = np.concatenate([in_data, np.array(stored, np.int64)])
        return np.maximum(device, 0), block, chunks, Stored(objects[rows], texts)

    def _place(self, file: int) -> Chunks | bytes:
        target = self._shown.targets.get(file)
        return self._places.of(self._content_of(int(self._shown.members[file]))) if target is None else target


@dataclass(frozen=True, slots=True)
class _Layout:
    """The things that are shown of a shard, and their names, in columns.

    A *thing* is a directory (folders, then samples) or a file, numbered in this order. An *object* is a thing that
    lies in a table. Objects are numbered in the order of the shard, so that a sample and its files lie together.
    """

    directories: int  # how many there are: the first things
    # Of each directory: the inode number of one that lies outside of the tables, else -1.
    outside: Ints
    first_holder: Ints  # of each file: the directory that has its first name
    thing_of: Ints  # of each object
    object_of: Ints  # of each thing; -1 for a directory outside
    # Of each name: the directory that it is in, the thing that it names, and its type as EROFS counts them.
    holder: Ints
    named: Ints
    kind: Ints

    @staticmethod
    def of(shown: ShownColumns, outside: Ints) -> _Layout:
        """Return the columns; `outside` has the inode numbers of folders that lie outside, -1 for the others."""
        directories = len(shown.folders) + len(shown.named.samples)
        outside = np.concatenate([outside, np.full(len(shown.named.samples), -1)])
        first_holder = np.empty(len(shown.members), np.int64)
        first_holder[shown.name_file[::-1]] = shown.named.member_holder[::-1]
        inside = np.flatnonzero(outside < 0)
        things = np.concatenate([inside, np.arange(len(shown.members)) + directories])
        thing_of = things[np.argsort(np.concatenate([inside, first_holder]), kind="stable")]
        object_of = np.full(directories + len(shown.members), -1, np.int64)
        object_of[thing_of] = np.arange(len(things))
        named = np.concatenate([np.arange(1, directories), shown.name_file + directories])
        kind = np.full(len(named), erofs_header.DIRECTORY_ENTRY, np.int64)
        kind[directories - 1 :] = erofs_header.FILE_ENTRY
        if shown.targets:
            kind[directories - 1 :][np.isin(shown.name_file, [*shown.targets])] = erofs_header.SYMLINK_ENTRY
        holder = np.concatenate(
            [shown.named.folder_holder[1:], shown.named.sample_holder, shown.named.member_holder]
        )
        return _Layout(directories, outside, first_holder, thing_of, object_of, holder, named, kind)

    def names(self, *, outside: bool) -> Ints:
        """Return the names of objects in directories of the tables, or in those outside."""
        return np.flatnonzero(((self.outside[self.holder] >= 0) == outside) & (self.object_of[self.named] >= 0))


class ShardTables:
    """Tables of the names and files of a shard, with the modes of directories and files.

    The top is in the directory with the inode number `parent`. `outside` are the inode numbers of folders that lie
    outside of the tables, -1 for the others; where one table is not enough, all do.
    """

    def __init__(
        self, shown: ShownColumns, files: ShardFiles, modes: tuple[int, int], parent: int, outside: Ints
    ) -> None:
        self._shown, self._files, self._modes, self._parent = shown, files, modes, parent
        self._layout = _Layout.of(shown, outside)

    def __iter__(self) -> Iterator[Table]:
        """Yield the tables, one after the other. Raises what `ShardFiles.places` raises."""
        layout, bounds = self._layout, self._bounds()
        names = layout.names(outside=False)
        # A name in a directory of a table is in that table.
        table_of = np.searchsorted(bounds, layout.object_of[layout.holder[names]], "right") - 1
        for number, (begin, end) in enumerate(pairwise(bounds)):
            yield self._table(begin, end, names[table_of == number])

    def names_outside(self, nids: Ints) -> Outside:
        """Return the names in directories outside; `nids` are the inode numbers of all objects, table by table."""
        layout = self._layout
        rows = layout.names(outside=True)
        return Outside(
            layout.outside[layout.holder[rows]],
            nids[layout.object_of[layout.named[rows]]],
            layout.kind[rows],
            self._shown.named.names.take(rows),
        )

    def _bounds(self) -> list[int]:
        """Return the objects at which tables begin, and how many there are."""
        layout = self._layout
        count, is_file = len(layout.thing_of), layout.thing_of >= layout.directories
        if fits_one_table(self._files):
            return [0, count]
        files = layout.thing_of[is_file] - layout.directories
        sizes = np.zeros(count, np.int64)
        sizes[is_file] = self._files.stored_sizes[files]
        begins = ~is_file  # objects that a table can begin with
        begins[is_file] = layout.outside[layout.first_holder[files]] >= 0
        possible, before = np.append(np.flatnonzero(begins), count), np.append(0, np.cumsum(sizes))
        bounds = [0]
        while bounds[-1] < count:
            most = int(np.searchsorted(before[possible], before[bounds[-1]] + STORED_MAX, "right")) - 1
            bounds.append(int(max(possible[most], possible[np.searchsorted(possible, bounds[-1], "right")])))
        return bounds

    def _table(self, begin: int, end: int, names: Ints) -> Table:
        shown, layout = self._shown, self._layout
        things = layout.thing_of[begin:end]
        is_file = things >= layout.directories
        files, directories = things[is_file] - layout.directories, things[~is_file]
        folders = len(shown.folders)

        def column(of_folders: list[int], of_samples: Ints | int, of_files: Ints | int) -> Ints:
            values, all_of = np.empty(end - begin, np.int64), np.empty(layout.directories, np.int64)
            all_of[:folders], all_of[folders:] = of_folders, of_samples
            values[~is_file], values[is_file] = all_of[directories], of_files
            return values

        holder = np.concatenate([shown.named.folder_holder, shown.named.sample_holder])[directories]
        above = np.where(holder < 0, self._parent, layout.outside[holder])
        directory_mode, file_mode = self._modes
        modes: Ints | int = file_mode
        if shown.targets:
            modes = np.where(np.isin(files, [*shown.targets]), _SYMLINK_MODE, file_mode)
        device, block, chunks, stored = self._files.places(files, np.flatnonzero(is_file))
        return Table(
            mode=column([node.mode for node in shown.folders], directory_mode, modes),
            links=column([node.links for node in shown.folders], 2, shown.links[files]),
            size=column([0] * folders, 0, shown.sizes[files]),
            mtime_ns=column(
                [node.mtime_ns for node in shown.folders], shown.sample_mtime_ns, shown.mtimes_ns[files]
            ),
            device=column([0] * folders, 0, device),
            block=column([0] * folders, 0, block),
            parent=np.where(above >= 0, placed(above), layout.object_of[holder] - begin),
            holder=layout.object_of[layout.holder[names]] - begin,
            child=layout.object_of[layout.named[names]] - begin,
            kind=layout.kind[names],
            names=shown.named.names.take(names),
            chunks=chunks,
            stored=stored,
        )


def fits_one_table(files: ShardFiles) -> bool:
    """Return True if one table is enough for a shard with these files."""
    return int(files.stored_sizes.sum()) <= STORED_MAX
