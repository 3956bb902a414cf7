"""Makes an image of a tree: a file of names and pointers, whose data are the shards themselves.

The same shards and options give the same bytes by the same version of wdsfs, on any machine: nothing in an image
depends on when, where or by whom it was made.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from wdsfs.errors import ImageError, MissingShard, StaleShard
from wdsfs.inodes import ROOT
from wdsfs.kernel import erofs
from wdsfs.kernel.image_writer import ImageFile, put_tree
from wdsfs.kernel.layout import Times
from wdsfs.kernel.manifest import Device, ImageOptions, ImageSet, Manifest, stored_path
from wdsfs.kernel.shard_table import ContentPlaces, DeviceFile
from wdsfs.remote import shard_paths
from wdsfs.remote.shard_paths import is_remote
from wdsfs.storage.durable import Disk, named, new_file, write_at
from wdsfs.storage.held_files import HeldFile
from wdsfs.storage.identity import GONE, Fingerprint
from wdsfs.tree.shard_set import ShardSet, indexed
from wdsfs.tree.tree import AT_PARENT, LowerTree

OnShard = Callable[[], None]


class Built(NamedTuple):
    """An image: the shards that are devices, the inodes, and the size of the file (bytes)."""

    devices: int
    inodes: int
    size: int


class _Source(NamedTuple):
    """A shard that becomes a device, its fingerprint, and the copy that the kernel reads instead."""

    path: bytes
    fingerprint: Fingerprint
    copy: HeldFile | None = None

    @property
    def size(self) -> int:
        """The bytes of the device."""
        return self.fingerprint.size if self.copy is None else self.copy.size


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
    if options.writable:
        tree.make_writable()
    sources = _sources(tree.lower, options.copies)
    devices = {source.path: DeviceFile(number, source.size) for number, source in enumerate(sources, 1)}
    missing = None
    if any(True for below in (*tree.lower.sources, tree.lower) for _ in below.damaged()):
        if erofs.missing_device(len(sources)) is None:
            sources.append(sources[-1])  # one number more, so that one is left without a device
        missing = erofs.missing_device(len(sources))
    table = erofs.device_table([(os.path.basename(source.path)[:63], source.size) for source in sources])
    shown = _set(tree.lower, options)
    times = Times(_common_time(tree), options.since)
    image = ImageFile(fd, len(sources), times, options.owner, options.private)
    root = put_tree(tree, image, ContentPlaces(devices, missing), on_shard)
    _refuse_changed(sources)
    if _set(tree.lower, options) != shown:
        raise StaleShard("label files have changed while the image was made; run the command again")
    manifest = Manifest(
        [_device(source, options.base) for source in sources],
        *(tree.view.layout, tree.view.names, options.merge, tree.view.index_tree),
        *(options.composition, ".".join(map(str, options.since)), shown),
    )
    tail = manifest.encoded()
    text = repr((erofs.LAYOUT, options.owner, options.private, options.writable))
    head = erofs.super_block(
        root=root,
        inodes=image.inodes,
        blocks=image.blocks,
        metadata=image.metadata,
        epoch_ns=times.epoch_ns,
        identity=hashlib.blake2b(tail + text.encode(), digest_size=16).digest(),
        devices=len(sources),
    )
    end = image.blocks * erofs.BLOCK
    os.ftruncate(fd, end)
    write_at(fd, head + table, erofs.SUPER_OFFSET)
    write_at(fd, tail, end)
    return Built(len(sources), image.inodes, end + len(tail))


def _device(source: _Source, base: bytes | None) -> Device:
    size, mtime_ns, _ = source.fingerprint
    path = os.fsdecode(source.path) if is_remote(source.path) else stored_path(source.path, base)
    return Device(path, size, mtime_ns, source.copy)


def _set(lower: ShardSet, options: ImageOptions) -> ImageSet:
    """The set in the manifest. Raises UnreadableShard for a label file."""
    shards, base, directory = lower.shards, options.base, options.directory
    if directory is not None and base is not None:
        directory = os.path.relpath(directory, base)
    return ImageSet(
        shards=[os.fsdecode(shard.name) for shard in shards],
        reading=shards[0].reading._asdict(),
        without={
            os.fsdecode(shard.name): sorted(map(os.fsdecode, shard.without)) for shard in shards if shard.without
        },
        labels=[_device(_Source(path, _look_beside(path)), base) for path in lower.label_files],
        directory="" if directory is None else os.fsdecode(directory),
    )


def _look_beside(path: bytes) -> Fingerprint:
    """The fingerprint of a label file; GONE if it is not there, or empty, as SQLite may leave one."""
    try:
        fingerprint = shard_paths.look(path)
    except MissingShard:
        return GONE
    return fingerprint if fingerprint.size else GONE


def _sources(lower: ShardSet, copies: Mapping[bytes, HeldFile]) -> list[_Source]:
    """All shards that files of the set may lie in. Raises ImageError for a shard that cannot be a device."""
    sources: dict[bytes, _Source] = {}
    for below in lower.sources:
        for number, shard in enumerate(below.shards):
            copy = copies.get(shard.path)
            if is_remote(shard.path) and copy is None:
                raise ImageError(
                    f"{below.path_text(number)}: an image is over files, not those in a cache of this machine. "
                    "Copy it to a file first; or fetch it, and mount the set in one step: wdsfs mount --engine "
                    "kernel"
                )
            if below.is_compressed(number) and copy is None:
                raise ImageError(
                    f"{below.path_text(number)}: is compressed; the copy that the kernel could read is in a cache "
                    "of this machine, to which an image for others cannot refer. Unpack it first, or mount the "
                    "set in one step: wdsfs mount --engine kernel"
                )
            sources.setdefault(shard.path, _Source(shard.path, below.fingerprint(number), copy))
    return list(sources.values())


def _refuse_overwriting(shards: Iterable[bytes], target: bytes) -> None:
    """Raise ImageError if the image would replace one of its shards, or what is no file."""
    try:
        status = os.stat(target)
    except OSError:
        return
    if not stat.S_ISREG(status.st_mode):
        raise ImageError(f"{os.fsdecode(target)}: is no regular file; name another one for the image")
    for path in shards:
        if not is_remote(path) and os.path.samestat(status, os.stat(path)):
            raise ImageError(f"{os.fsdecode(target)}: is a shard of the set; name another file for the image")


def _common_time(tree: LowerTree) -> int:
    """A time (ns) that many files have: that of the first file."""
    inode = ROOT
    while True:
        entry = indexed(lambda at: next(tree.listing(at, AT_PARENT), None), inode)
        if entry is None:
            return 0
        if not stat.S_ISDIR(entry.node.mode):
            return max(entry.node.mtime_ns, 0)
        inode = entry.node.inode


def _refuse_changed(sources: Sequence[_Source]) -> None:
    """Raise StaleShard if a shard has changed since the image was begun."""
    for source in sources:
        if shard_paths.look(source.path) != source.fingerprint:
            text = "has changed while the image was made; run the command again"
            raise StaleShard(f"{os.fsdecode(source.path)} {text}")
