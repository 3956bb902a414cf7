"""Makes an image of a tree: a file of names, and of pointers into the shards, which have the data.

The same shards and options give the same bytes by the same version of wdsfs, on any machine: nothing in an image
depends on when, where or by whom it was made.

The tables of each shard (`shard_table.py`) are written one after the other. A directory with names of several
shards, or of several tables, stays open until all its names are known. Its inode is reserved first, because its
children refer to this inode. Only the tables of one shard, and the names of open directories, are in memory.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from wdsfs.door.shard_door import DOOR
from wdsfs.door.urls import is_remote
from wdsfs.durable import Disk, named, new_file, write_at
from wdsfs.errors import ImageError, MissingShard, StaleShard
from wdsfs.inodes import ROOT
from wdsfs.kernel import erofs_header
from wdsfs.kernel.erofs_encoding import Outside, Table, Times, lay_out, lay_out_directories, placed
from wdsfs.kernel.manifest import Device, ImageOptions, ImageSet, Manifest, stored_path
from wdsfs.kernel.shard_table import ContentPlaces, DeviceFile, ShardFiles, ShardTables, fits_one_table
from wdsfs.shards import GONE, Fingerprint
from wdsfs.tree.indexing import indexed
from wdsfs.tree.set_options import Owner
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.shard_tree import ShardTree
from wdsfs.tree.shown_names import ShownColumns
from wdsfs.tree.texts import Ints
from wdsfs.tree.tree import AT_PARENT, LowerTree, Node

OnShard = Callable[[], None]

_RESERVED = erofs_header.BLOCK // erofs_header.EXTENDED_SIZE  # inodes in a block of inodes that are written later
_RESERVED_STEP = erofs_header.EXTENDED_SIZE // erofs_header.SLOT  # between the numbers of these
_NAMES = 1 << 16  # of directories that are laid out together, unless one has more
TOP = b""  # the path of the top, among those of directories with names of several shards


class Built(NamedTuple):
    """An image: the shards that are devices, the inodes, and the size of the file (bytes)."""

    devices: int
    inodes: int
    size: int


# The path of a shard that becomes a device, and its fingerprint.
Source = tuple[bytes, Fingerprint]


def make_image(tree: LowerTree, target: bytes, options: ImageOptions, on_shard: OnShard = lambda: None) -> Built:
    """Write the image of `tree`, all of whose shards are indexed, to the file `target`, which it replaces.

    `on_shard` is called for each name at the top. Raises ImageError, ShardErrors, CommitError.
    """
    _refuse_overwriting((shard.path for below in tree.lower.sources for shard in below.shards), target)
    disk = Disk()
    try:
        with named(target), new_file(disk, target) as fd:
            built = write_image(tree, fd, options, on_shard)
            disk.sync(fd)
        disk.sync_directory(os.path.dirname(target))
    except OSError as error:
        raise ImageError(f"{os.fsdecode(target)}: {error.strerror}; mend that, then repeat the command") from None
    return built


def write_image(tree: LowerTree, fd: int, options: ImageOptions, on_shard: OnShard) -> Built:
    """Write the image of a tree to an empty file. Raises ImageError, ShardErrors, OSError."""
    sources = _sources(tree.lower)
    devices = {path: DeviceFile(number, known.size) for number, (path, known) in enumerate(sources, 1)}
    missing = None
    if any(True for below in (*tree.lower.sources, tree.lower) for _ in below.damaged()):
        if erofs_header.missing_device(len(sources)) is None:
            sources.append(sources[-1])  # one number more, so that one number stays without a device
        missing = erofs_header.missing_device(len(sources))
    table = erofs_header.device_table([(os.path.basename(path)[:63], known.size) for path, known in sources])
    shown = _set(tree.lower, options)
    times = Times(_common_time(tree), options.since)
    image = ImageFile(fd, len(sources), times, options.owner, private=options.private)
    root = put_tree(tree, image, ContentPlaces(devices, missing), on_shard)
    _refuse_changed(sources)
    if _set(tree.lower, options) != shown:
        raise StaleShard("tables have changed while the image was made; run the command again")
    manifest = Manifest(
        [_device(path, known, options.base) for path, known in sources],
        *(tree.view.layout, tree.view.names, options.merge, False),
        *(options.composition, ".".join(map(str, options.since)), shown),
    )
    tail = manifest.encoded()
    text = repr((erofs_header.LAYOUT, options.owner, options.key))
    head = erofs_header.super_block(
        root=root,
        inodes=image.inodes,
        blocks=image.blocks,
        metadata=image.metadata,
        epoch_ns=times.epoch_ns,
        identity=hashlib.blake2b(tail + text.encode(), digest_size=16).digest(),
        devices=len(sources),
    )
    end = image.blocks * erofs_header.BLOCK
    os.ftruncate(fd, end)
    write_at(fd, head + table, erofs_header.SUPER_OFFSET)
    write_at(fd, tail, end)
    return Built(len(sources), image.inodes, end + len(tail))


def _device(path: bytes, known: Fingerprint, base: bytes | None) -> Device:
    return Device(os.fsdecode(path) if is_remote(path) else stored_path(path, base), known.size, known.mtime_ns)


def _set(lower: ShardSet, options: ImageOptions) -> ImageSet:
    """Return the set in the manifest. Raises UnreadableShard for a label file."""
    shards, base, directory = lower.shards, options.base, options.directory
    if directory is not None and base is not None:
        directory = os.path.relpath(directory, base)
    return ImageSet(
        shards=[os.fsdecode(shard.name) for shard in shards],
        reading=shards[0].reading.as_json(),
        without={
            os.fsdecode(shard.name): sorted(map(os.fsdecode, shard.without)) for shard in shards if shard.without
        },
        labels=[_device(path, _look_beside(path), base) for path in lower.label_files],
        directory="" if directory is None else os.fsdecode(directory),
    )


def _look_beside(path: bytes) -> Fingerprint:
    """Return the fingerprint of a label file; GONE if it is missing, or empty (SQLite may leave an empty file)."""
    try:
        fingerprint = DOOR.look(path)
    except MissingShard:
        return GONE
    return fingerprint if fingerprint.size else GONE


def _sources(lower: ShardSet) -> list[Source]:
    """Return all shards that files of the set may lie in.

    Raises ImageError for a shard that cannot be a device.
    """
    sources: dict[bytes, Fingerprint] = {}
    for below in lower.sources:
        for number, shard in enumerate(below.shards):
            what = "remote" if is_remote(shard.path) else "compressed" if below.is_compressed(number) else None
            if what is not None:
                raise ImageError(
                    f"{below.path_text(number)}: is {what}, and the kernel reads plain tars of this machine only; "
                    "mount the set by FUSE: wdsfs mount SHARDS... MOUNTPOINT"
                )
            sources.setdefault(shard.path, below.fingerprint(number))
    return list(sources.items())


def _refuse_overwriting(shards: Iterable[bytes], target: bytes) -> None:
    """Raise ImageError if the image would replace one of its shards, or something other than a file."""
    try:
        status = os.stat(target)
    except OSError:
        return
    if not stat.S_ISREG(status.st_mode):
        raise ImageError(f"{os.fsdecode(target)}: is not a regular file; name another file for the image")
    for path in shards:
        if not is_remote(path) and os.path.samestat(status, os.stat(path)):
            raise ImageError(f"{os.fsdecode(target)}: is a shard of the set; name another file for the image")


def _common_time(tree: LowerTree) -> int:
    """Return a time (ns) that many files have: that of the first file."""
    inode = ROOT
    while True:
        entry = indexed(lambda at: next(tree.listing(at, AT_PARENT), None), inode)
        if entry is None:
            return 0
        if not stat.S_ISDIR(entry.node.mode):
            return max(entry.node.mtime_ns, 0)
        inode = entry.node.inode


def _refuse_changed(sources: Sequence[Source]) -> None:
    """Raise StaleShard if a shard has changed since the image was begun."""
    for path, known in sources:
        if DOOR.look(path) != known:
            raise StaleShard(f"{os.fsdecode(path)} has changed while the image was made; run the command again")


# --- the file


class ImageFile:
    """Writes to the descriptor `fd` an image over `devices` shards.

    Only its owner can enter the top of a `private` image, which is the first inode that is reserved.
    """

    def __init__(self, fd: int, devices: int, times: Times, owner: Owner, *, private: bool = False) -> None:
        self._fd, self._times, self._owner, self._private = fd, times, owner, private
        self.metadata = erofs_header.metadata_block(devices)
        self.blocks = self.metadata + 1  # an empty block: no inode has the number 0
        self.inodes = 0
        self._reserved: list[int] = []

    def reserve(self) -> int:
        """Return the number of an inode that is written later."""
        if not self._reserved:
            first = (self.blocks - self.metadata) * erofs_header.SLOTS_PER_BLOCK
            self._reserved = [first + _RESERVED_STEP * nth for nth in reversed(range(_RESERVED))]
            self._grow(1)
        return self._reserved.pop()

    def _grow(self, blocks: int) -> None:
        self.blocks += blocks
        if self.blocks > erofs_header.BLOCKS_MAX:
            raise ImageError("the image would have more than 2 TiB; make several images")

    def append(self, table: Table) -> Ints:
        """Write a table; returns the inode numbers of its objects. Raises ImageError, OSError."""
        table.mode &= ~self._owner.umask
        data, nids = lay_out(table, self.blocks, self.metadata, self._times, self._owner[:2])
        write_at(self._fd, data.data, self.blocks * erofs_header.BLOCK)
        self._grow(len(data) // erofs_header.BLOCK)
        self.inodes += len(nids)
        return nids

    def write_directories(self, nids: Ints, table: Table) -> None:
        """Write the directories of `table`, whose inodes were reserved. Raises ImageError, OSError."""
        table.mode &= ~self._owner.umask
        if self._private:
            table.mode = np.where(nids == erofs_header.SLOTS_PER_BLOCK, table.mode & ~0o077, table.mode)
        inodes, listings = lay_out_directories(table, nids, self.blocks, self._owner[:2])
        # Inodes that were reserved one after the other lie side by side.
        ends = np.append(np.flatnonzero(np.diff(nids) != _RESERVED_STEP) + 1, len(nids))
        first = 0
        for end in ends.tolist():
            place = self.metadata * erofs_header.BLOCK + int(nids[first]) * erofs_header.SLOT
            write_at(self._fd, inodes[first:end].reshape(-1).view(np.uint8).data, place)
            first = end
        write_at(self._fd, listings.data, self.blocks * erofs_header.BLOCK)
        self._grow(len(listings) // erofs_header.BLOCK)
        self.inodes += len(nids)


class OpenDirectories:
    """Directories of `image` that are not written yet, by keys that the caller chooses."""

    def __init__(self, image: ImageFile) -> None:
        self._image = image
        self._nids: dict[object, int] = {}
        self._described: dict[int, tuple[Node, int]] = {}  # by inode number; with that of its directory
        self._parts = [Outside.directories([], [], [])]

    @property
    def nids(self) -> list[int]:
        """The inode numbers of all directories."""
        return [*self._nids.values()]

    def reserve(self, key: object) -> int:
        """Return the inode number of a directory."""
        nid = self._nids.get(key)
        if nid is None:
            nid = self._nids[key] = self._image.reserve()
        return nid

    def describe(self, nid: int, node: Node, parent: int) -> bool:
        """Set attributes and parent of a directory, unless they are known; return True if they were not."""
        is_new = nid not in self._described
        self._described.setdefault(nid, (node, parent))
        return is_new

    def add(self, names: Outside) -> None:
        """Add names to directories."""
        if len(names.nids):
            self._parts.append(names._replace(names=names.names.compact()))

    def write(self) -> None:
        """Write all described directories, and forget their names. Raises ImageError, OSError."""
        nids = np.array(sorted(self._described), np.int64)
        names = Outside.joined(self._parts)
        self._parts = self._parts[:1]
        order = np.argsort(names.holders, kind="stable")
        ends = np.searchsorted(names.holders[order], nids, "right")
        first = row = 0
        while first < len(nids):
            last = max(first + 1, int(np.searchsorted(ends, row + _NAMES, "right")))
            rows, row = order[row : ends[last - 1]], int(ends[last - 1])
            self._write(nids[first:last], names.take(rows))
            first = last
        self._described.clear()

    def _write(self, nids: Ints, names: Outside) -> None:
        described = [self._described[nid] for nid in nids.tolist()]
        nothing = np.zeros(len(nids), np.int64)
        table = Table(
            mode=np.array([node.mode for node, _ in described], np.int64),
            links=np.array([node.links for node, _ in described], np.int64),
            size=nothing,
            mtime_ns=np.array([node.mtime_ns for node, _ in described], np.int64),
            device=nothing,
            block=nothing,
            parent=np.array([placed(parent) for _, parent in described], np.int64),
            holder=np.searchsorted(nids, names.holders),
            child=placed(names.nids),
            kind=names.kinds.astype(np.int64),
            names=names.names.compact(),
        )
        self._image.write_directories(nids, table)


# --- shards


def put_tree(tree: LowerTree, image: ImageFile, places: ContentPlaces, on_shard: Callable[[], None]) -> int:
    """Put a tree into an image; return the inode number of its top. `on_shard` is called after each shard.

    Raises ImageError, ShardErrors, OSError.
    """
    assert isinstance(tree, ShardTree)
    directories = OpenDirectories(image)
    root = directories.reserve(TOP)
    directories.describe(root, indexed(tree.getattr, ROOT), root)
    shards = _Shards(tree, image, places, directories)
    for number in indexed(tree.numbers):
        shards.put(number)
        on_shard()
    directories.write()
    return root


class _Shards:
    """Puts the shards of `tree` into `image`."""

    def __init__(
        self, tree: ShardTree, image: ImageFile, places: ContentPlaces, directories: OpenDirectories
    ) -> None:
        self._tree, self._image, self._places, self._directories = tree, image, places, directories
        self._root = directories.reserve(TOP)

    def put(self, number: int) -> None:
        """Put the names and files of a shard into the image."""
        tree = self._tree
        shown = indexed(tree.columns, number)
        files = ShardFiles(
            shown,
            indexed(tree.lower.content_columns, number),
            lambda member: indexed(tree.lower.content, number, tree.lower.tag(number), member),
            self._places,
        )
        # Folders of this shard alone that lie outside of its tables.
        own = None if fits_one_table(files) else OpenDirectories(self._image)
        outside, names = self._folders(shown, own)
        tables = ShardTables(shown, files, (tree.directory_mode, tree.file_mode), self._root, outside)
        nids = np.concatenate([*map(self._image.append, tables), np.zeros(0, np.int64)])
        names = Outside.joined([names, tables.names_outside(nids)])
        if own is not None:
            is_own = np.isin(names.holders, own.nids)
            own.add(names.take(is_own))
            own.write()
            names = names.take(~is_own)
        self._directories.add(names)
        if not tree.merged:
            top = int(nids[0] if outside[0] < 0 else outside[0])
            self._directories.add(Outside.directories([self._root], [top], [tree.lower.shards[number].name]))

    def _folders(self, shown: ShownColumns, own: OpenDirectories | None) -> tuple[Ints, Outside]:
        """Return the inode numbers of folders outside of the tables, -1 for the others; and the names of new ones.

        A name is new if no earlier shard had it. With `own` all folders lie outside, and folders that are not
        shared are opened there.
        """
        outside, new = np.full(len(shown.folders), -1, np.int64), []
        for folder, path in enumerate(shown.named.shared):
            directories = own if path is None else self._directories
            if directories is None:
                continue
            nid = outside[folder] = directories.reserve(folder if path is None else path)
            holder = int(shown.named.folder_holder[folder])
            parent = self._root if holder < 0 else int(outside[holder])
            if directories.describe(nid, shown.folders[folder], parent):
                new.append(folder)
        below = np.array([folder for folder in new if folder], np.int64)
        kinds = np.full(len(below), erofs_header.DIRECTORY_ENTRY, np.int64)
        return outside, Outside(
            outside[shown.named.folder_holder[below]], outside[below], kinds, shown.named.names.take(below - 1)
        )
