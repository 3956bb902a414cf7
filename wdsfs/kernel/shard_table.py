"""The tables of a whole shard, made of its columns: a hundred times as fast as name by name.

A shard is one table, unless much of its content is stored in the image: then it is several, so that memory stays
small. Directories can lie outside of the tables: those that hold names of several shards, or of several tables.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from wdsfs.kernel import erofs
from wdsfs.kernel.content_places import ContentPlaces, Place
from wdsfs.kernel.table import NOTHING_STORED, Chunks, Outside, Stored, Table, placed
from wdsfs.tree.content import Content
from wdsfs.tree.content_columns import APART, HELD, IN_DATA, ContentColumns
from wdsfs.tree.shown_columns import ShownColumns
from wdsfs.tree.texts import Ints, Texts

STORED_MAX = 16 << 20  # bytes of stored content in a table

_SYMLINK_MODE = stat.S_IFLNK | 0o777


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

    def places(self, files: Ints, objects: Ints) -> FilePlacement:
        """The places of these files, which are these objects of a table.

        Raises ImageError, and ShardErrors when what is stored cannot be read.
        """
        device, block = self._device[files], self._block[files]
        if not (device < 0).any():
            return FilePlacement(device, block, {}, NOTHING_STORED)
        chunks, stored, contents = dict[int, Chunks](), list[int](), list[bytes]()
        for row in np.flatnonzero((device == APART) | (device == HELD)).tolist():
            place = self._place(int(files[row]))
            if isinstance(place, Chunks):
                chunks[int(objects[row])] = place
            elif isinstance(place, bytes):
                stored.append(row)
                contents.append(place)
            else:
                device[row], block[row] = place
        kept = np.flatnonzero(device == IN_DATA)
        start, sizes = self._content.start[self._shown.members[files[kept]]], self._shown.sizes[files[kept]]
        texts = Texts.joined([Texts(self._content.data, start, sizes), Texts.of(contents)])
        rows = np.concatenate([kept, np.array(stored, np.int64)])
        return FilePlacement(np.maximum(device, 0), block, chunks, Stored(objects[rows], texts))

    def _place(self, file: int) -> Place | Chunks | bytes:
        target = self._shown.targets.get(file)
        return self._places.of(self._content_of(int(self._shown.members[file]))) if target is None else target


class FilePlacement(NamedTuple):
    """The columns of a table that say where files are, as in `Table`: the first two are of the files alone."""

    device: Ints
    block: Ints
    chunks: dict[int, Chunks]
    stored: Stored


class ShardTables:
    """Tables of what is shown of a shard, with the modes of directories and files.

    The top is in the directory with the inode number `parent`. `outside` are the inode numbers of folders that lie
    outside of the tables, -1 for the others; where one table is not enough, all do.
    """

    def __init__(
        self, shown: ShownColumns, files: ShardFiles, modes: tuple[int, int], parent: int, outside: Ints
    ) -> None:
        self._shown, self._files, self._modes, self._parent = shown, files, modes, parent
        directories = self._directories = len(shown.folders) + len(shown.samples)
        self._outside = np.concatenate([outside, np.full(len(shown.samples), -1)])
        # Directories and files in the order of the shard: what belongs together lies together.
        self._first_holder = np.empty(len(shown.members), np.int64)
        self._first_holder[shown.name_file[::-1]] = shown.name_holder[::-1]
        inside = np.flatnonzero(self._outside < 0)
        things = np.concatenate([inside, np.arange(len(shown.members)) + directories])
        order = np.argsort(np.concatenate([inside, self._first_holder]), kind="stable")
        self._things = things[order]  # of each object: the directory, or the file with a number after theirs
        self._object = np.full(directories + len(shown.members), -1, np.int64)
        self._object[self._things] = np.arange(len(things))
        # Names: in which directory, of which thing, which type.
        self._holder = np.concatenate([shown.folder_holder[1:], shown.sample_holder, shown.name_holder])
        self._thing = np.concatenate([np.arange(1, directories), shown.name_file + directories])
        self._kind = np.full(len(self._thing), erofs.DIRECTORY, np.int64)
        self._kind[directories - 1 :] = erofs.REGULAR
        if shown.targets:
            self._kind[directories - 1 :][np.isin(shown.name_file, [*shown.targets])] = erofs.SYMLINK

    def __iter__(self) -> Iterator[Table]:
        """The tables, one after the other. Raises what `ShardFiles.places` raises."""
        names = np.flatnonzero((self._outside[self._holder] < 0) & (self._object[self._thing] >= 0))
        bounds = self._bounds()
        # A name in a directory of a table is in that table.
        table_of = np.searchsorted(bounds, self._object[self._holder[names]], "right") - 1
        for number, (begin, end) in enumerate(pairwise(bounds)):
            yield self._table(begin, end, names[table_of == number])

    def names_outside(self, nids: Ints) -> Outside:
        """The names in directories outside; `nids` are the inode numbers of all objects, table by table."""
        rows = np.flatnonzero((self._outside[self._holder] >= 0) & (self._object[self._thing] >= 0))
        return Outside(
            self._outside[self._holder[rows]],
            nids[self._object[self._thing[rows]]],
            self._kind[rows],
            self._shown.names.take(rows),
        )

    def _bounds(self) -> list[int]:
        """The objects at which tables begin, and how many there are."""
        count, is_file = len(self._things), self._things >= self._directories
        if is_one_table(self._files):
            return [0, count]
        files = self._things[is_file] - self._directories
        sizes = np.zeros(count, np.int64)
        sizes[is_file] = self._files.stored_sizes[files]
        begins = ~is_file  # what a table can begin with
        begins[is_file] = self._outside[self._first_holder[files]] >= 0
        possible, before = np.append(np.flatnonzero(begins), count), np.append(0, np.cumsum(sizes))
        found = [0]
        while found[-1] < count:
            most = int(np.searchsorted(before[possible], before[found[-1]] + STORED_MAX, "right")) - 1
            found.append(int(max(possible[most], possible[np.searchsorted(possible, found[-1], "right")])))
        return found

    def _table(self, begin: int, end: int, names: Ints) -> Table:
        shown, things = self._shown, self._things[begin:end]
        is_file = things >= self._directories
        files, directories = things[is_file] - self._directories, things[~is_file]
        folders = len(shown.folders)

        def column(of_folders: list[int], of_samples: Ints | int, of_files: Ints | int) -> Ints:
            found, all_of = np.empty(end - begin, np.int64), np.empty(self._directories, np.int64)
            all_of[:folders], all_of[folders:] = of_folders, of_samples
            found[~is_file], found[is_file] = all_of[directories], of_files
            return found

        holder = np.concatenate([shown.folder_holder, shown.sample_holder])[directories]
        above = np.where(holder < 0, self._parent, self._outside[holder])
        directory_mode, file_mode = self._modes
        modes: Ints | int = file_mode
        if shown.targets:
            modes = np.where(np.isin(files, [*shown.targets]), _SYMLINK_MODE, file_mode)
        placement = self._files.places(files, np.flatnonzero(is_file))
        return Table(
            mode=column([node.mode for node in shown.folders], directory_mode, modes),
            links=column([node.links for node in shown.folders], 2, shown.links[files]),
            size=column([0] * folders, 0, shown.sizes[files]),
            mtime_ns=column(
                [node.mtime_ns for node in shown.folders], shown.sample_mtime_ns, shown.mtimes_ns[files]
            ),
            device=column([0] * folders, 0, placement.device),
            block=column([0] * folders, 0, placement.block),
            parent=np.where(above >= 0, placed(above), self._object[holder] - begin),
            holder=self._object[self._holder[names]] - begin,
            child=self._object[self._thing[names]] - begin,
            kind=self._kind[names],
            names=shown.names.take(names),
            chunks=placement.chunks,
            stored=placement.stored,
        )


def is_one_table(files: ShardFiles) -> bool:
    """True if one table is enough for a shard with these files."""
    return int(files.stored_sizes.sum()) <= STORED_MAX
