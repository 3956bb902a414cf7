"""Where a path of a mount comes from: shard, member, key, place; for mounts of both engines.

A mount by FUSE says it in the extended attributes of its files. An image says where the bytes of a file are, by
the inode number that the kernel shows; the shard is read to find the member that begins there. Nothing is asked of
the network, and nothing is written.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from wdsfs import mount_registry, mount_table, names
from wdsfs.errors import MissingShard, NoSuchEntry, UnreadableShard, UsageError, WdsfsError
from wdsfs.kernel import devices, manifest
from wdsfs.kernel.manifest import image_of
from wdsfs.kernel.places_in_image import ImagePlaces
from wdsfs.mount.guard import guard_of
from wdsfs.mount.shown_image import check_is_of_mount
from wdsfs.mount_table import MountPoint
from wdsfs.overlay.overlay_directory import OverlayDirectory, upper_of
from wdsfs.overlay.upper_format import ORIGIN
from wdsfs.remote.shard_paths import is_remote
from wdsfs.storage import source
from wdsfs.storage.held_files import HeldFile
from wdsfs.tar.compressed import kind_at
from wdsfs.tar.problems import Problems
from wdsfs.tar.scan import scan
from wdsfs.tree import numbered_tree
from wdsfs.tree.tree import XATTR

FUSE, KERNEL = "fuse", "kernel"
FILE, LINK, SAMPLE, DIRECTORY = "file", "link", "sample", "directory"
UPPER, LOWER = "upper", "lower"
NAMES_LOOKED_AT = 4096  # of directories, until a file is found that says where they come from
# Parts of an inode number of the kernel's overlay (`xino`): the bit of the lower layer, the number in the image.
_OF_LOWER, _NUMBER = 1 << 63, (1 << 62) - 1
_COPIED = {ORIGIN, "user.overlay.origin"}  # attributes of a file of the upper that was one of a shard
_BY_INDEX = os.fsdecode(numbered_tree.NAME)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a path comes from. What cannot be said, or does not apply, is None.

    `kind` is FILE, LINK, SAMPLE (the directory of one) or DIRECTORY. `shard` is the path of a tar or its URL; of a
    file that is no member of a shard, that of a label file. `member` and `key` are as in the tar. `offset` is the
    byte in the tar at which the content starts: in the unpacked one, if it is compressed; with `stored`, in the
    image. `layer` is UPPER for what is in an overlay, LOWER for what shows through, None without an overlay.
    `upper` is the path there. `replaced`: at the path of the shard is another file than the mount shows.
    """

    path: str
    mountpoint: str
    engine: str
    kind: str
    shard: str | None = None
    url: str | None = None
    compressed: bool | None = None
    key: str | None = None
    member: str | None = None
    offset: int | None = None
    size: int | None = None
    layer: str | None = None
    upper: str | None = None
    image: str | None = None
    stored: bool = False
    replaced: bool = False


@dataclass(frozen=True, slots=True)
class NoOrigin:
    """Why nothing can be said about a path."""

    path: str
    error: WdsfsError


def origins(paths: Sequence[str]) -> list[Origin | NoOrigin]:
    """Where these paths come from, in their order."""
    images: dict[str, _ImageMount] = {}
    found: list[Origin | _InImage | NoOrigin] = []
    try:
        for path in paths:
            try:
                found.append(_look(path, images))
            except WdsfsError as error:
                found.append(NoOrigin(path, error))
            except OSError as error:
                found.append(NoOrigin(path, NoSuchEntry(f"{path}: {error.strerror}")))
        named = _members([one for one in found if isinstance(one, _InImage)])
        return [named[id(one)] if isinstance(one, _InImage) else one for one in found]
    finally:
        for mounted in images.values():
            mounted.places.close()


def _look(path: str, images: dict[str, _ImageMount]) -> Origin | _InImage:
    if not path:
        raise UsageError("a path is empty")
    parent, base = os.path.split(os.path.abspath(path))
    real = os.path.join(os.path.realpath(parent), base)  # a link itself, not what it leads to
    about = os.lstat(real)
    mount = mount_table.mount_of(os.path.dirname(real) if stat.S_ISLNK(about.st_mode) else real)
    if mount is not None and stat.S_ISLNK(about.st_mode) and _is_numbered(real, os.fsdecode(mount.path)):
        real = os.path.realpath(real)  # it stands for a sample
        about = os.lstat(real)
    if mount is not None and mount.fstype == "fuse.wdsfs":
        return _by_fuse(real, os.fsdecode(mount.path), about)
    if mount is not None and image_of(mount) is not None:
        place = os.fsdecode(mount.path)
        if place not in images:
            images[place] = _image_mount(mount)
        return images[place].look(real, about)
    if mount is not None and mount.fstype == "erofs" and not os.access(mount.source, os.R_OK):
        source = os.fsdecode(mount.source)
        why = "which you may not read; ask its owner"
        if os.geteuid() == 0:
            why = "an image that has been removed; make it again, or see: wdsfs status"
        raise NoSuchEntry(f"{path}: is served by the kernel from {source}, {why}")
    raise NoSuchEntry(f"{path}: is in no mount of wdsfs; see: wdsfs status")


def _is_numbered(path: str, mountpoint: str) -> bool:
    return os.path.relpath(path, mountpoint).split("/")[0] == _BY_INDEX


def _kind(about: os.stat_result) -> str:
    if stat.S_ISLNK(about.st_mode):
        return LINK
    return DIRECTORY if stat.S_ISDIR(about.st_mode) else FILE


# --- by FUSE -----------------------------------------------------------------------------------------------


def _by_fuse(path: str, mountpoint: str, about: os.stat_result) -> Origin:
    """Raises NoSuchEntry for what wdsfs or its overlay has made, OSError."""
    if os.path.relpath(path, mountpoint).split("/")[0] == ".wdsfs":
        raise NoSuchEntry(f"{path}: wdsfs makes it; it is in no shard")
    found = Origin(path, mountpoint, FUSE, _kind(about))
    if found.kind == FILE:
        found = replace(found, size=about.st_size)
    upper = _upper_of(path, mountpoint)
    said = _attributes(path)
    if not said and path != mountpoint and found.kind != DIRECTORY:
        found = _without_attributes(found, upper)
    elif not said and upper.path is not None:
        raise _made_by_overlay(path, upper.path)
    if upper.is_known:
        found = replace(found, layer=LOWER if upper.path is None else UPPER, upper=upper.path)
    if not said:
        return found
    if found.kind == DIRECTORY and "key" in said:
        found = replace(found, kind=SAMPLE)
    offset = said.get("offset")
    return _with_shard(
        replace(
            found, key=said.get("key"), member=said.get("member"), offset=None if offset is None else int(offset)
        ),
        said.get("shard"),
    )


@dataclass(frozen=True, slots=True)
class _Upper:
    """If it is known whether the mount has an overlay, and the path in the upper: None if it has nothing there."""

    is_known: bool
    path: str | None = None


def _upper_of(path: str, mountpoint: str) -> _Upper:
    """Look a path up in the overlay of a mount of this user."""
    daemon = mount_registry.find(mountpoint)
    if daemon is None or daemon.overlay is None or path == mountpoint:
        return _Upper(False)
    place = os.path.join(OverlayDirectory(Path(daemon.overlay)).upper, os.path.relpath(path, mountpoint))
    return _Upper(True, place if os.path.lexists(place) else None)


def _attributes(path: str) -> dict[str, str]:
    prefix = os.fsdecode(XATTR)
    found = [name for name in os.listxattr(path, follow_symlinks=False) if name.startswith(prefix)]
    return {
        name.removeprefix(prefix): os.fsdecode(os.getxattr(path, name, follow_symlinks=False)) for name in found
    }


def _without_attributes(found: Origin, upper: _Upper) -> Origin:
    """The origin of a link, or of a file copied into the overlay, by its directory. Raises NoSuchEntry."""
    if upper.path is not None and ORIGIN not in os.listxattr(upper.path, follow_symlinks=False):
        raise _made_by_overlay(found.path, upper.path)
    if found.kind == FILE and not upper.is_known:
        raise NoSuchEntry(f"{found.path}: is in no shard; an overlay has it, or wdsfs makes it")
    said = _attributes(os.path.dirname(found.path))
    return _with_shard(replace(found, key=said.get("key")), said.get("shard"))


def _made_by_overlay(path: str, upper: str) -> NoSuchEntry:
    return NoSuchEntry(f"{path}: was made in the overlay, at {upper}; `wdsfs commit` writes it into a shard")


def _with_shard(found: Origin, shard: str | None) -> Origin:
    if shard is None:
        return found
    if is_remote(os.fsencode(shard)):
        packed = names.suffix_of(os.fsencode(shard.partition("?")[0])) not in (b"", b".tar")
        return replace(found, shard=shard, url=shard, compressed=packed)
    return replace(found, shard=shard, compressed=_is_compressed(shard))


def _is_compressed(shard: str) -> bool | None:
    try:
        return kind_at(os.fsencode(shard)) is not None
    except (MissingShard, UnreadableShard):
        return None


# --- by the kernel -----------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """A byte of a shard of an image: the number of the shard, from 1 on, and the byte."""

    device: int
    offset: int


@dataclass(frozen=True, slots=True)
class _InImage:
    """A path in a mounted image.

    `own` is where its bytes are. Of a directory, an empty file or a link `columns` are the places of the files
    beside or in it, and `device` is the shard that has all of these, if it is one shard.
    """

    origin: Origin
    mounted: _ImageMount
    own: _Place | None = None
    columns: tuple[_Place, ...] = ()
    device: int | None = None

    @property
    def places(self) -> tuple[_Place, ...]:
        return self.columns if self.own is None else (self.own,)

    @property
    def is_empty(self) -> bool:
        return self.origin.kind == FILE and self.origin.size == 0 and self.origin.layer != UPPER

    @property
    def below(self) -> str:
        """The path in the mount."""
        return os.path.relpath(self.origin.path, self.mounted.mountpoint)


@dataclass(frozen=True, slots=True)
class _Device:
    """A shard of an image. `tar` is the file whose members tell names: the copy that the kernel reads, else the
    shard; None if it is not there any more. `is_replaced`: there is another shard now."""

    path: str
    is_replaced: bool
    tar: str | None
    is_compressed: bool = False


@dataclass(frozen=True, slots=True)
class _ImageMount:
    """A mount of an image: its inodes and shards. `upper` is that of the overlay above it."""

    mountpoint: str
    image: str
    about: manifest.Manifest
    places: ImagePlaces
    devices: list[_Device] = field(default_factory=list)
    upper: str | None = None

    def look(self, path: str, about: os.stat_result) -> _InImage:
        """Raises NoSuchEntry for what was made in the overlay."""
        found = Origin(path, self.mountpoint, KERNEL, _kind(about), image=self.image)
        changed = self._changed(path)
        if self.upper is not None and path != self.mountpoint:
            found = replace(found, layer=LOWER if changed is None else UPPER, upper=changed)
        if found.kind == DIRECTORY:
            directory = self._directory(found)
            if changed is not None and not about.st_ino & _OF_LOWER and not directory.columns:
                raise _made_by_overlay(path, changed)
            return directory
        if changed is not None and not _COPIED.intersection(os.listxattr(changed, follow_symlinks=False)):
            raise _made_by_overlay(path, changed)
        if found.kind == FILE:
            found = replace(found, size=about.st_size)
        if found.kind == LINK or changed is not None:
            return replace(self._directory(replace(found, path=os.path.dirname(path))), origin=found)
        inode = self.places.inode(about.st_ino & _NUMBER)
        if inode.device == 0:
            return _InImage(replace(found, stored=True, offset=inode.offset), self)
        if inode.device is None:  # empty, or lost: the files beside it are in the same shard
            return replace(self._directory(replace(found, path=os.path.dirname(path))), origin=found)
        return _InImage(found, self, _Place(inode.device, inode.offset), device=inode.device)

    def _changed(self, path: str) -> str | None:
        """The path in the upper, if there is an entry."""
        if self.upper is None:
            return None
        place = os.path.join(self.upper, os.path.relpath(path, self.mountpoint))
        return place if os.path.lexists(place) else None

    def _directory(self, found: Origin) -> _InImage:
        """Look a directory up by its files, or by those below it if it has none."""
        below = os.path.relpath(found.path, self.mountpoint)
        is_numbered = self.about.index_tree and _is_numbered(found.path, self.mountpoint)
        if below == "." or self.about.layout == "classes" or is_numbered:
            return _InImage(found, self)
        columns = tuple(self._files(found.path))
        some = columns or (() if self.about.merge else tuple(islice(self._below(found.path), 1)))
        devices = {one.device for one in some}
        return _InImage(found, self, None, columns, devices.pop() if len(devices) == 1 else None)

    def _files(self, directory: str) -> Iterator[_Place]:
        """The places of the files in a directory, as far as they are in shards."""
        with os.scandir(directory) as entries:
            for entry in islice(entries, NAMES_LOOKED_AT):
                if entry.is_file(follow_symlinks=False) and self._changed(entry.path) is None:
                    inode = self.places.inode(entry.inode() & _NUMBER)
                    if inode.device:
                        yield _Place(inode.device, inode.offset)

    def _below(self, directory: str) -> Iterator[_Place]:
        """The places of the first files in a directory and in those below it."""
        stack, left = [directory], NAMES_LOOKED_AT
        while stack and left:
            at = stack.pop()
            left -= 1
            yield from self._files(at)
            with os.scandir(at) as entries:
                stack += [one.path for one in islice(entries, left) if one.is_dir(follow_symlinks=False)]


def _image_mount(mount: MountPoint) -> _ImageMount:
    """Raises MountError if the image is not there any more, OSError."""
    image, mountpoint = image_of(mount) or b"", os.fsdecode(mount.path)
    places = ImagePlaces(image)
    try:
        check_is_of_mount(image, mount)
        about = manifest.read(image)
        devices = _devices(about, image, mountpoint)
        return _ImageMount(mountpoint, os.fsdecode(image), about, places, devices, upper_of(mount))
    except BaseException:
        places.close()
        raise


def _devices(about: manifest.Manifest, image: bytes, mountpoint: str) -> list[_Device]:
    """The shards of a mounted image: the paths that its guard opened, else those in the image."""
    guard = guard_of(mountpoint)
    if guard is not None and len(guard.paths) == len(about.devices):
        replaced = set(guard.replaced())
        pairs = zip(guard.paths, about.devices, strict=True)
        return [_device(path, path in replaced, one.copy) for path, one in pairs]
    found = []
    for one, path in zip(about.devices, about.paths(image), strict=True):
        if one.copy is not None:
            found.append(_device(path, not devices.is_copy_of(path, one.copy.path), one.copy))
            continue
        try:
            now = os.stat(path)
            found.append(_device(path, (now.st_size, now.st_mtime_ns) != (one.size, one.mtime_ns), None))
        except OSError:
            found.append(_device(path, True, None))
    return found


def _device(path: str, is_replaced: bool, copy: HeldFile | None) -> _Device:
    if copy is None:
        return _Device(path, is_replaced, None if is_replaced else path)
    place = copy.path if devices.has_copy(copy) else None
    return _Device(path, is_replaced, place, devices.is_unpacked(copy.path))


@dataclass(slots=True)
class _Wanted:
    """What is to be found in a shard: the names of the members whose content begins at these bytes; where empty
    members are, if `empty` is set."""

    places: set[int] = field(default_factory=set)
    empty: bool = False


@dataclass(slots=True)
class _Found:
    """Members of a shard: names by the first byte of their content, places of empty ones by their names."""

    names: dict[int, bytes] = field(default_factory=dict)
    empty: dict[bytes, int] = field(default_factory=dict)


def _members(found: Sequence[_InImage]) -> dict[int, Origin]:
    """The origins of paths in images, by the identity of these: each shard is read once, for all of them."""
    wanted: dict[str, _Wanted] = {}
    for one in found:
        for place in one.places:
            device = one.mounted.devices[place.device - 1]
            if device.tar is not None:
                wanted.setdefault(device.tar, _Wanted()).places.add(place.offset)
        if one.device is not None and one.is_empty:
            device = one.mounted.devices[one.device - 1]
            if device.tar is not None:
                wanted.setdefault(device.tar, _Wanted()).empty = True
    shards = {path: _members_of(path, one) for path, one in wanted.items()}
    return {id(one): _named(one, shards) for one in found}


def _named(one: _InImage, shards: dict[str, _Found]) -> Origin:
    origin, tar = one.origin, None
    if one.device is not None:
        device = one.mounted.devices[one.device - 1]
        origin, tar = _of_device(origin, device), device.tar
    members = [
        shards[path].names.get(place.offset)
        for place in one.places
        if (path := one.mounted.devices[place.device - 1].tar) in shards
    ]
    keys = [None if member is None else names.raw_key(member) for member in members]
    if one.own is not None:
        member, key = (members[0], keys[0]) if members else (None, None)
        return replace(origin, offset=one.own.offset, member=_text(member), key=_text(key))
    key = None
    if one.mounted.about.layout == "samples" and origin.kind != LINK:
        key = next((key for key in keys if key is not None), None)
    if one.is_empty and tar in shards:
        return _empty_member(one, origin, key, shards[tar].empty)
    kind = SAMPLE if key is not None and origin.kind == DIRECTORY else origin.kind
    return replace(origin, kind=kind, key=_text(key))


def _of_device(origin: Origin, device: _Device) -> Origin:
    """The origin of something that is in the shard of this device."""
    url = device.path if is_remote(os.fsencode(device.path)) else None
    return replace(
        origin, shard=device.path, url=url, compressed=device.is_compressed, replaced=device.is_replaced
    )


def _empty_member(one: _InImage, origin: Origin, key: bytes | None, there: dict[bytes, int]) -> Origin:
    """The origin of an empty file, which has no place: the empty member of the shard that has its name."""
    path, base = os.fsencode(one.below), os.fsencode(os.path.basename(origin.path))
    inside = path if one.mounted.about.merge else path.partition(b"/")[2]
    around = os.path.dirname(os.path.dirname(inside))  # of the directory of a sample
    members = [inside, os.path.join(around, base), *([] if key is None else [key + b"." + base])]
    member = next((name for name in members if name in there), None)
    if member is None:
        return replace(origin, key=_text(key))
    return replace(origin, member=_text(member), key=_text(names.raw_key(member)), offset=there[member])


def _text(name: bytes | None) -> str | None:
    return None if name is None else os.fsdecode(name)


def _members_of(shard: str, wanted: _Wanted) -> _Found:
    """The wanted members of a tar; none of one that cannot be read."""
    found = _Found()
    try:
        fd = source.open_shard(os.fsencode(shard))
    except (MissingShard, UnreadableShard):
        return found
    problems = Problems()
    try:
        for chunk in scan(fd, problems, marks=[]):
            for at, size, name in zip(chunk.datas.tolist(), chunk.sizes.tolist(), chunk.names, strict=True):
                if size and at in wanted.places:
                    found.names[at] = name
                elif not size and wanted.empty:
                    found.empty.setdefault(name, at)
            if len(found.names) == len(wanted.places) and not wanted.empty:
                break
    finally:
        source.close(fd)
    return found
