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

from wdsfs.dataset.content import Content
from wdsfs.dataset.content_columns import APART, HELD, IN_DATA, ContentColumns
from wdsfs.dataset.shown_columns import ShownColumns
from wdsfs.dataset.texts import Ints, Texts
from wdsfs.image import erofs
from wdsfs.image.content_places import ContentPlaces
from wdsfs.image.table import NOTHING_STORED, Chunks, Outside, Stored, Table, placed

STORED_MAX = 16 << 20  # bytes of stored content in a table

_SYMLINK_MODE = stat.S_IFLNK | 0o777


class ShardContent(NamedTuple):
    """Where the bytes of a shard's members are, and the function that says it of one, by its number."""

    columns: ContentColumns
    of: Callable[[int], Content]


class ShardTable:
    """Tables of what is shown of a shard. `modes` are those of directories and files."""

    def __init__(
        self, shown: ShownColumns, content: ShardContent, places: ContentPlaces, modes: tuple[int, int]
    ) -> None:
        self._shown, self._content, self._places, self._modes = shown, content, places, modes
        self._folders = len(shown.folders)
        self._directories = self._folders + len(shown.samples)
        self._of_files = places.of_all(content.columns, shown.members, shown.sizes)
        self._of_files.device[[*shown.targets]] = HELD
        self._weights = self._of_files.stored_sizes(shown.sizes)

    @property
    def is_one(self) -> bool:
        """True if one table is enough. Else all folders have to lie outside."""
        return int(self._weights.sum()) <= STORED_MAX

    def tables(self, parent: int, outside: Ints) -> Iterator[Table]:
        """The tables, one after the other; the top is in the directory with the inode number `parent`.

        `outside` are the inode numbers of folders that lie outside, -1 for the others. Raises ImageError, and
        ShardErrors when what is stored cannot be read.
        """
        shown, directories = self._shown, self._directories
        self._outside = np.concatenate([outside, np.full(len(shown.samples), -1)])
        first_holder = np.empty(len(shown.members), np.int64)
        first_holder[shown.name_file[::-1]] = shown.name_holder[::-1]
        # Directories and files in the order of the shard: what belongs together lies together.
        inside = np.flatnonzero(self._outside < 0)
        things = np.concatenate([inside, np.arange(len(shown.members)) + directories])
        order = np.argsort(np.concatenate([inside, first_holder]), kind="stable")
        self._things = things[order]  # of each object: the directory, or the file with a number after theirs
        self._object = np.full(directories + len(shown.members), -1, np.int64)
        self._object[self._things] = np.arange(len(things))
        self._holder = np.concatenate([shown.folder_holder[1:], shown.sample_holder, shown.name_holder])
        self._thing = np.concatenate([np.arange(1, directories), shown.name_file + directories])
        self._kind = np.full(len(self._thing), erofs.DIRECTORY, np.int64)
        self._kind[directories - 1 :] = erofs.REGULAR
        if shown.targets:
            self._kind[directories - 1 :][np.isin(shown.name_file, [*shown.targets])] = erofs.SYMLINK
        # A name in a directory of a table is in that table.
        holder = self._outside[self._holder] < 0
        self._inner = np.flatnonzero(holder & (self._object[self._thing] >= 0))
        self._outer = np.flatnonzero(~holder & (self._object[self._thing] >= 0))
        bounds = self._bounds(first_holder)
        table_of = np.searchsorted(bounds, self._object[self._holder[self._inner]], "right") - 1
        for number, (begin, end) in enumerate(pairwise(bounds)):
            yield self._table(begin, end, self._inner[table_of == number], parent)

    def outside(self, nids: Ints) -> Outside:
        """The names in directories outside; `nids` are the inode numbers of all objects, table by table."""
        rows = self._outer
        return Outside(
            self._outside[self._holder[rows]],
            nids[self._object[self._thing[rows]]],
            self._kind[rows],
            self._shown.names.take(rows),
        )

    def _bounds(self, first_holder: Ints) -> list[int]:
        """The objects at which tables begin, and how many there are."""
        count = len(self._things)
        if self.is_one:
            return [0, count]
        is_file = self._things >= self._directories
        files = self._things[is_file] - self._directories
        weights = np.zeros(count, np.int64)
        weights[is_file] = self._weights[files]
        begins = ~is_file  # what a table can begin with
        begins[is_file] = self._outside[first_holder[files]] >= 0
        possible, before = np.append(np.flatnonzero(begins), count), np.append(0, np.cumsum(weights))
        found = [0]
        while found[-1] < count:
            most = int(np.searchsorted(before[possible], before[found[-1]] + STORED_MAX, "right")) - 1
            found.append(int(max(possible[most], possible[np.searchsorted(possible, found[-1], "right")])))
        return found

    def _table(self, begin: int, end: int, names: Ints, parent: int) -> Table:
        shown, things = self._shown, self._things[begin:end]
        is_file = things >= self._directories
        files, directories = things[is_file] - self._directories, things[~is_file]
        at_files = np.flatnonzero(is_file)

        def column(of_folders: list[int], of_samples: Ints | int, of_files: Ints | int) -> Ints:
            found, all_of = np.empty(end - begin, np.int64), np.empty(self._directories, np.int64)
            all_of[: self._folders], all_of[self._folders :] = of_folders, of_samples
            found[~is_file], found[is_file] = all_of[directories], of_files
            return found

        holder = np.concatenate([shown.folder_holder, shown.sample_holder])[directories]
        above = np.where(holder < 0, parent, self._outside[holder])
        directory_mode, file_mode = self._modes
        modes: Ints | int = file_mode
        if shown.targets:
            modes = np.where(np.isin(files, [*shown.targets]), _SYMLINK_MODE, file_mode)
        device, block = self._of_files.device[files], self._of_files.block[files]
        chunks, stored = self._special(files, device, block, at_files)
        return Table(
            mode=column([node.mode for node in shown.folders], directory_mode, modes),
            links=column([node.links for node in shown.folders], 2, shown.links[files]),
            size=column([0] * self._folders, 0, shown.sizes[files]),
            mtime_ns=column(
                [node.mtime_ns for node in shown.folders], shown.sample_mtime_ns, shown.mtimes_ns[files]
            ),
            device=column([0] * self._folders, 0, np.maximum(device, 0)),
            block=column([0] * self._folders, 0, block),
            parent=np.where(above >= 0, placed(above), self._object[holder] - begin),
            holder=self._object[self._holder[names]] - begin,
            child=self._object[self._thing[names]] - begin,
            kind=self._kind[names],
            names=shown.names.take(names),
            chunks=chunks,
            stored=stored,
        )

    def _special(self, files: Ints, device: Ints, block: Ints, at: Ints) -> tuple[dict[int, Chunks], Stored]:
        """The content of files that are not in one piece of a device, by object: `at` are those of the files.
        Places that were asked for are put into `device` and `block`."""
        if not (device < 0).any():
            return {}, NOTHING_STORED
        shown, columns = self._shown, self._content.columns
        chunks, stored, contents = dict[int, Chunks](), list[int](), list[bytes]()
        for row in np.flatnonzero((device == APART) | (device == HELD)).tolist():
            file, found = int(files[row]), shown.targets.get(int(files[row]))
            place = self._places.of(self._content.of(int(shown.members[file]))) if found is None else found
            if isinstance(place, Chunks):
                chunks[int(at[row])] = place
            elif isinstance(place, bytes):
                stored.append(row)
                contents.append(place)
            else:
                device[row], block[row] = place
        kept = np.flatnonzero(device == IN_DATA)
        in_data = Texts(columns.data, columns.start[shown.members[files[kept]]], shown.sizes[files[kept]])
        objects = at[np.concatenate([kept, np.array(stored, np.int64)])]
        return chunks, Stored(objects, Texts.joined([in_data, Texts.of(contents)]))
