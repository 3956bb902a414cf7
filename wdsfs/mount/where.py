"""The origin of a path of a mount: shard, member, key, place in the tar, layer of the overlay.

A mount by FUSE has the origin in extended attributes of its files. For a mount by the kernel, and for changed
files of an overlay, `where` looks the path up in the tree that makes these attributes. It indexes only the shards
of the path. So the answers for both engines are the same.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import ClassVar, NamedTuple

from wdsfs import mount_table, names
from wdsfs.door.urls import is_remote
from wdsfs.errors import NoSuchEntry, ShardError, UsageError, WdsfsError, reason_of
from wdsfs.mount import mount_search
from wdsfs.mount.live_mount import LiveMount
from wdsfs.overlay.overlaid_tree import number_of
from wdsfs.overlay.overlay_directory import OverlayDirectory
from wdsfs.overlay.upper_format import MERGED, OPAQUE, ORIGIN, parse_origin
from wdsfs.tree import numbered_tree
from wdsfs.tree.indexing import indexed
from wdsfs.tree.open_shards import is_compressed
from wdsfs.tree.set_options import Opening
from wdsfs.tree.tree import XATTR, LowerTree

OF_FILE, OF_LINK, OF_SAMPLE, OF_DIRECTORY = "file", "link", "sample", "directory"
UPPER, LOWER = "upper", "lower"
_COPIED = {ORIGIN, MERGED}  # attributes of a file of the upper that was copied from a shard


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a path. Attributes that are unknown or do not apply are None.

    `kind` is OF_FILE, OF_LINK, OF_SAMPLE (the directory of a sample) or OF_DIRECTORY. `shard` is the path or URL
    of a tar, or the path of a label file for a file from a table. `member` and `key` are as in the tar. `offset`
    is the byte in the (unpacked) tar at which the content begins. `layer` is UPPER for a file in an overlay, LOWER
    for a file that shows through, None without an overlay. `upper` is the path in the overlay.
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


@dataclass(frozen=True, slots=True)
class NoOrigin:
    """A path without a known origin, and the error with the reason."""

    path: str
    error: WdsfsError


class _Place(NamedTuple):
    """A path in a mount: its number in the request, the typed path, the path without links, its attributes."""

    number: int
    typed: str
    path: str
    about: os.stat_result

    @property
    def kind(self) -> str:
        if stat.S_ISLNK(self.about.st_mode):
            return OF_LINK
        return OF_DIRECTORY if stat.S_ISDIR(self.about.st_mode) else OF_FILE


def origins(paths: Sequence[str]) -> list[Origin | NoOrigin]:
    """Return the origins of these paths, in order. It opens each set at most once."""
    answers: dict[int, Origin | NoOrigin] = {}
    mounts: dict[str, tuple[LiveMount, list[_Place]]] = {}
    for number, path in enumerate(paths):
        try:
            mount, place = _placed(number, path)
            mounts.setdefault(mount.mountpoint, (mount, []))[1].append(place)
        except (WdsfsError, OSError) as error:
            answers[number] = _failure(path, error)
    for mount, places in mounts.values():
        try:
            with contextlib.ExitStack() as stack:
                tree = cache(partial(_entered, stack, mount))
                answers |= {place.number: _answer(mount, tree, place) for place in places}
        except (WdsfsError, OSError) as error:
            answers |= {place.number: _failure(place.typed, error) for place in places}
    return [answers[number] for number in range(len(paths))]


def _failure(path: str, error: WdsfsError | OSError) -> NoOrigin:
    return NoOrigin(path, error if isinstance(error, WdsfsError) else NoSuchEntry(f"{path}: {reason_of(error)}"))


def _placed(number: int, path: str) -> tuple[LiveMount, _Place]:
    """Return the mount of a path, and the place in the mount. Raises UsageError, NoSuchEntry, OSError."""
    if not path:
        raise UsageError("a path is empty")
    parent, base = os.path.split(os.path.abspath(path))
    real = os.path.join(os.path.realpath(parent), base)  # the link itself, not its target
    about = os.lstat(real)
    directory = os.path.dirname(real) if stat.S_ISLNK(about.st_mode) else real
    mount = mount_search.find_around(directory)
    if mount is None:
        raise NoSuchEntry(f"{path}: is in no mount of wdsfs; see: wdsfs status{_image_of_others(directory)}")
    below = os.path.relpath(real, mount.mountpoint).split("/")
    if stat.S_ISLNK(about.st_mode) and os.fsencode(below[0]) == numbered_tree.NAME:
        real = os.path.realpath(real)  # this link stands for a sample
        about = os.lstat(real)
    if os.fsencode(below[0]) == names.HIDDEN_DIRECTORY and mount.is_by_fuse:
        raise NoSuchEntry(f"{real}: is a file of wdsfs itself, not of a shard")
    return mount, _Place(number, path, real, about)


def _image_of_others(directory: str) -> str:
    """Return the end of a message about a path that may lie in an image of another user."""
    mounted = mount_table.mount_of(directory)
    if mounted is None or mounted.fstype != "erofs":
        return ""
    source = os.fsdecode(mounted.source)
    return f". The kernel serves it from {source}, which you cannot read, or which was removed"


@contextlib.contextmanager
def _tree_of(mount: LiveMount) -> Iterator[LowerTree]:
    """Open the tree that a mount shows, without the changes in its overlay. Raises WdsfsError, OSError."""
    options = mount.options
    with mount.opened(mount.shown(), Opening(quiet=True), on_demand=True) as below:
        yield numbered_tree.make_numbered(below, options.view(partial=True))


def _entered(stack: contextlib.ExitStack, mount: LiveMount) -> LowerTree:
    return stack.enter_context(_tree_of(mount))


def _answer(mount: LiveMount, tree: Callable[[], LowerTree], place: _Place) -> Origin | NoOrigin:
    try:
        return _origin(mount, tree, place)
    except (WdsfsError, OSError) as error:
        return _failure(place.typed, error)


def _origin(mount: LiveMount, tree: Callable[[], LowerTree], place: _Place) -> Origin:
    """Look a path up. Raises EntryErrors, ShardErrors, OSError."""
    entry = _entry_at(mount, tree, place)
    known = entry.attributes()
    offset, shard = known.get("offset"), known.get("shard")
    return Origin(
        place.path,
        mount.mountpoint,
        mount.engine,
        OF_SAMPLE if place.kind == OF_DIRECTORY and "key" in known else place.kind,
        shard=shard,
        url=shard if shard is not None and is_remote(os.fsencode(shard)) else None,
        compressed=None if shard is None else is_compressed(os.fsencode(shard)),
        key=known.get("key"),
        member=known.get("member") if entry.is_in_tar else None,
        offset=int(offset) if offset is not None and entry.is_in_tar and place.kind == OF_FILE else None,
        size=place.about.st_size if place.kind == OF_FILE else None,
        layer=entry.layer,
        upper=entry.upper,
    )


def _entry_at(mount: LiveMount, tree: Callable[[], LowerTree], place: _Place) -> _Entry:
    below = os.path.relpath(place.path, mount.mountpoint)
    if mount.overlay is None or below == ".":
        return _Entry(mount, tree, place, below)
    upper = os.path.join(OverlayDirectory(Path(mount.overlay)).upper, below)
    if os.path.lexists(upper):
        return _ChangedEntry(mount, tree, place, below, upper)
    return _UnchangedEntry(mount, tree, place, below)


@dataclass(frozen=True)
class _Entry:
    """A path in a mount without an overlay; `below` is the path from the top."""

    mount: LiveMount
    tree: Callable[[], LowerTree]
    place: _Place
    below: str
    upper: str | None = None  # the path in the upper, if the overlay has changed it
    layer: ClassVar[str | None] = None

    @property
    def is_in_tar(self) -> bool:
        """True if the tar has the member and its content."""
        return True

    def attributes(self) -> dict[str, str]:
        """Return the attributes of the path, from the mount or from its tree. Raises EntryErrors, ShardErrors."""
        if not self.mount.is_by_fuse:
            return _attributes_in(self.tree(), os.fsencode(self.below))
        known = _shown_attributes(self.place.path)
        if not known and self.place.kind == OF_FILE:
            raise NoSuchEntry(f"{self.place.path}: is in no shard; an overlay has it")
        return known


class _UnchangedEntry(_Entry):
    """A path that shows through an overlay."""

    layer = LOWER


class _ChangedEntry(_Entry):
    """A path that an overlay has, at `upper`: a changed directory, or the copy of a file."""

    layer = UPPER

    @property
    def is_in_tar(self) -> bool:
        return self.place.kind == OF_DIRECTORY

    def attributes(self) -> dict[str, str]:
        assert self.upper is not None
        if not _shows_lower(self.tree, self.place, self.upper, self.below):
            raise NoSuchEntry(
                f"{self.place.path}: was made in the overlay, at {self.upper}; "
                "`wdsfs commit` writes it into a shard"
            )
        if self.place.kind == OF_DIRECTORY or not self.mount.is_by_fuse:
            return super().attributes()
        return _attributes_of_copy(self.tree, self.place.path, self.below)


def _shows_lower(tree: Callable[[], LowerTree], place: _Place, upper: str, below: str) -> bool:
    """Return True if an entry of the upper is a changed directory or file of the lower at this path.

    Semantics decision: a copy of an unknown original counts as a copy of the file at its path.
    """
    top = upper.removesuffix(below)
    if any(_is_opaque(top + path) for path in accumulate(below.split("/"), os.path.join)):
        return False
    attributes = os.listxattr(upper, follow_symlinks=False)
    if place.kind == OF_DIRECTORY:
        return bool(_shown_attributes(place.path))
    if _COPIED.isdisjoint(attributes):
        return False
    try:
        node = indexed(tree().resolve, os.fsencode(below))
        if stat.S_IFMT(node.mode) != stat.S_IFMT(place.about.st_mode):
            return False
        if ORIGIN in attributes:
            origin = parse_origin(os.getxattr(upper, ORIGIN))
            return origin is None or indexed(number_of, tree().lower, origin) == node.inode
    except NoSuchEntry:
        return False
    except ShardError:
        pass  # only the mount has the shard
    return True


def _is_opaque(path: str) -> bool:
    """Return True for a directory of the upper that hides the lower."""
    with contextlib.suppress(OSError):
        return os.getxattr(path, OPAQUE, follow_symlinks=False) == b"y"
    return False


def _shown_attributes(path: str) -> dict[str, str]:
    """Return the attributes of a path in a mount. Raises OSError."""
    prefix = os.fsdecode(XATTR)
    listed = [name for name in os.listxattr(path, follow_symlinks=False) if name.startswith(prefix)]
    return {
        name.removeprefix(prefix): os.fsdecode(os.getxattr(path, name, follow_symlinks=False)) for name in listed
    }


def _attributes_of_copy(tree: Callable[[], LowerTree], path: str, below: str) -> dict[str, str]:
    """Return the attributes of the original of a file, or of its directory if only the mount has the shard."""
    try:
        return _attributes_in(tree(), os.fsencode(below))
    except ShardError:
        return _shown_attributes(os.path.dirname(path))


def _attributes_in(tree: LowerTree, path: bytes) -> dict[str, str]:
    """Return the extended attributes of a path in a tree. Raises EntryErrors, ShardErrors."""
    inode = indexed(tree.resolve, path).inode
    return {
        os.fsdecode(name.removeprefix(XATTR)): os.fsdecode(indexed(tree.getxattr, inode, name))
        for name in indexed(tree.xattrs, inode)
    }
