"""The images that `mount --engine kernel` makes: one for each mount point, kept for the next mount of the set.

They lie beside the index. A mount with another set or other options replaces the image of its mount point; what is
mounted from the old one goes on. Those that are not mounted can be removed at any time, by `wdsfs cache`; of those
that are mounted `status` and `where` have to read what they say.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from wdsfs import __version__, trust
from wdsfs.errors import MountError
from wdsfs.kernel import erofs, manifest
from wdsfs.kernel.devices import has_copy, is_copy_of
from wdsfs.kernel.manifest import ImageOptions
from wdsfs.storage import cache_directory
from wdsfs.storage.identity import Fingerprint

if TYPE_CHECKING:
    from wdsfs.tree.tree import LowerTree

_DAMAGED = "!"  # at the end of the key of an image of damaged shards, of which each mount warns


class KeptImage(NamedTuple):
    """An image: when it was last mounted (seconds since the epoch), its path and size (bytes), how many shards it
    has, and if these are as they were."""

    used: float
    path: str
    size: int
    shards: int
    current: bool


def place() -> Path:
    """The directory of the images. Raises IndexUnusable, UsageError."""
    return cache_directory.place() / "images"


def images() -> list[KeptImage]:
    """All images, the one first that was mounted the longest time ago. Raises OSError."""
    return sorted(_images(place()))


def _images(directory: Path) -> Iterator[KeptImage]:
    try:
        files = list(directory.glob("*.erofs"))
    except FileNotFoundError:
        return
    for file in files:
        try:
            found = file.stat()
            devices = manifest.read(str(file)).devices
        except FileNotFoundError:
            continue
        except MountError:
            devices = []  # damaged, or of another version
        current = bool(devices) and all(map(_is_current, devices))
        shards = len({one.path for one in devices})
        yield KeptImage(found.st_mtime, str(file), found.st_size, shards, current)


def _is_current(device: manifest.Device) -> bool:
    if device.copy is not None:
        return has_copy(device.copy) and is_copy_of(device.shard("/"), device.copy.path)
    try:
        found = os.stat(os.path.join("/", device.path))
    except OSError:
        return False
    return (found.st_size, found.st_mtime_ns) == (device.size, device.mtime_ns)


def trim(size: int | None, mounted: Collection[str]) -> int:
    """Remove images until at most `size` bytes are left, those that were not mounted for the longest time first.

    Without a size those whose shards are gone or have changed. The images `mounted` stay. Returns the bytes freed.
    Raises OSError.
    """
    found = images()
    used = before = sum(one.size for one in found)
    for one in _removable(found, mounted):
        if not one.current if size is None else used > size:
            Path(one.path).unlink(missing_ok=True)
            used -= one.size
    return before - used


def _removable(found: Sequence[KeptImage], mounted: Collection[str]) -> Iterator[KeptImage]:
    return (one for one in found if one.path not in mounted)


def path_of(mountpoint: str) -> Path:
    """Where the image for this mount point (absolute) is kept. Raises IndexUnusable, OSError."""
    directory = place()
    trust.directory(directory, create=True, tighten=True)
    return (
        directory
        / f"{hashlib.blake2b(mountpoint.encode(errors='surrogateescape'), digest_size=12).hexdigest()}.erofs"
    )


def key_of(tree: LowerTree, options: ImageOptions) -> str:
    """A text that differs for every other image: other shards or options, changed shards, another version."""
    lower, view = tree.lower, tree.view
    shards = [(one.key, one.name, lower.fingerprint(number)) for number, one in enumerate(lower.shards)]
    sources = () if lower.plain is lower else lower.sources
    read = [(one.path, below.fingerprint(at)) for below in sources for at, one in enumerate(below.shards)]
    key = _key(shards, (view.layout, view.names, view.index_tree, view.partial), options, read)
    return key + _DAMAGED if next(lower.known_damage(), None) is not None else key


def key_of_plain(
    shards: Iterable[tuple[bytes, bytes, Fingerprint]],
    layout: str,
    names: str,
    index_tree: bool,
    partial: bool,
    options: ImageOptions,
) -> str:
    """The key of the image of whole shards that are shown as they are, and of which none is damaged.

    It takes no index. `shards` are their keys, names and fingerprints; the rest is what a view says.
    """
    return _key(shards, (layout, names, index_tree, partial), options, ())


def _key(
    shards: Iterable[tuple[bytes, bytes, Fingerprint]],
    view: tuple[str, str, bool, bool],
    options: ImageOptions,
    read: Sequence[tuple[bytes, Fingerprint]],
) -> str:
    own = options._replace(copies=dict(options.copies))
    # The version, for what is shown of the same shards may be other names in a later one.
    text = repr((__version__, erofs.LAYOUT, own, view, [*shards], [*read]))
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=16).hexdigest()


def is_there(path: Path, key: str) -> bool:
    """True if this image is whole and has this key."""
    if not manifest.is_image(str(path)):
        return False
    try:
        return manifest.read(str(path)).key == key
    except MountError:
        return False


@contextlib.contextmanager
def put_back(image: str, unless: Callable[[], bool]) -> Iterator[None]:
    """Put the image at this path back if the block fails, which makes it anew and has that mounted.

    For the old one is mounted still, and `status` and `where` read it. `unless`: if the new one is mounted all the
    same. An image that was not made for a mount is left alone.
    """
    try:
        is_ours = bool(manifest.read(image).key)
    except MountError:
        is_ours = False
    if not is_ours:
        yield
        return
    before = Path(f"{image}.before")
    with contextlib.suppress(OSError):  # a file system without hard links
        before.unlink(missing_ok=True)  # of a command that was killed
        before.hardlink_to(image)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            if not unless():
                before.replace(image)
        raise
    finally:
        before.unlink(missing_ok=True)
