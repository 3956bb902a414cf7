"""Finds the image of a set in the cache, or makes it there.

Opening the index takes longer than all other steps of a mount. So an image is found without the index where shards
are shown without a view and no problems of theirs have to be reported.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wdsfs import __version__, host
from wdsfs.cache import file_cache
from wdsfs.cache.file_cache import CachedFile, NewFile, NoRoom
from wdsfs.door.urls import is_remote
from wdsfs.errors import ShardError
from wdsfs.kernel import erofs_header
from wdsfs.kernel.manifest import ImageOptions
from wdsfs.mount.engines import CannotServe
from wdsfs.shards import Fingerprint
from wdsfs.tree.set_options import Owner

if TYPE_CHECKING:
    from wdsfs.shards import Shard
    from wdsfs.tree.set_options import Opening, TreeOptions
    from wdsfs.tree.shard_set import ShardSet
    from wdsfs.tree.tree import LowerTree

# The modules that open and make a set are imported late: they load NumPy, and most mounts find their image.

KINDS = ("erofs",)  # of files in the cache

View = tuple[str, str, bool]  # layout, names, if shards may be missing


@dataclass(frozen=True, slots=True)
class ServedSet:
    """A set that the kernel is to serve, how it is shown, and how it is opened where that is needed.

    `on_made` is called with it when its image is made.
    """

    shards: Sequence[Shard]
    tree: TreeOptions
    opening: Opening
    on_made: Callable[[ShardSet], None] = lambda _: None

    @property
    def partial(self) -> bool:
        """True if shards may be missing."""
        return self.opening.tolerance.allow_missing

    def options(self, owner: Owner, private: bool) -> ImageOptions:
        """Return the options of its image for this kernel."""
        since, composition = min(host.kernel_version()[:2], erofs_header.OWN_TIMES_KERNEL), self.tree.composition
        return ImageOptions(
            *(owner, None, (since[0], since[1]), self.tree.merge, composition.public_text, private),
            directory=os.getcwdb() if composition.names_files else None,
        )


def find_or_make(served: ServedSet, options: ImageOptions) -> tuple[str, int]:
    """Return the path of the image of a set, and a descriptor: as long as it is open, the image is not evicted.

    Raises CannotServe, ImageError, ShardErrors.
    """
    cache = file_cache.cache()
    while True:
        key = _quick_key(served, options)
        image = None if key is None else cache.find(key, KINDS)
        if image is None:
            image = _made(served, options)
        path = cache.place_of(image.fd)
        if path is not None:
            return path, image.fd
        os.close(image.fd)  # somebody has written it: it is removed and made again


def _made(served: ServedSet, options: ImageOptions) -> CachedFile:
    """Make the image of a set, unless it is there. Raises what `find_or_make` raises."""
    from wdsfs.kernel.image import write_image
    from wdsfs.tree.merged_tree import make_tree
    from wdsfs.tree.opening import open_known_set

    view, progress = served.tree.view(partial=served.partial), served.opening.progress
    composition = served.tree.composition
    with open_known_set(served.shards, served.opening, composition, whole=True, shared=True) as lower:
        tree = make_tree(lower, view)
        key = key_of(tree, options)

        def fill(new: NewFile) -> tuple[str, int]:
            with progress.shards("writing", len(lower)) as on_shard:
                size = write_image(tree, new.fd, options._replace(key=key), on_shard).size
            served.on_made(lower)
            return KINDS[0], size

        try:
            return file_cache.cache().make(key, KINDS, fill)
        except NoRoom as error:
            raise CannotServe(f"its image does not fit into the cache: {error}") from None


# --- keys


def _quick_key(served: ServedSet, options: ImageOptions) -> str | None:
    """Return the key of the image, if it follows from the fingerprints of the shards alone; else None."""
    shards, tree = served.shards, served.tree
    is_plain = tree.composition.is_plain and not any(shard.without or shard.index_file for shard in shards)
    if not is_plain or served.opening.tolerance.strict or any(is_remote(shard.path) for shard in shards):
        return None
    try:
        states = [(shard.key, shard.name, Fingerprint.at(shard.path)) for shard in shards]
    except ShardError:
        return None  # opening the set decides what that means
    return _key(states, (tree.layout, tree.names, served.partial), options)


def key_of(tree: LowerTree, options: ImageOptions) -> str:
    """Return a key that differs for every other image: other shards or options, changed shards, another version.

    An image of damaged shards is not found by `_quick_key`, so that each mount warns of the damage.
    """
    lower, view = tree.lower, tree.view
    states = [(shard.key, shard.name, lower.fingerprint(number)) for number, shard in enumerate(lower.shards)]
    sources = () if lower.plain is lower else lower.sources
    read = [(shard.path, below.fingerprint(at)) for below in sources for at, shard in enumerate(below.shards)]
    is_damaged = next(lower.known_damage(), None) is not None
    return _key(states, (view.layout, view.names, view.partial), options, read, is_damaged=is_damaged)


def _key(
    states: Iterable[tuple[bytes, bytes, Fingerprint]],
    view: View,
    options: ImageOptions,
    read: Sequence[tuple[bytes, Fingerprint]] = (),
    *,
    is_damaged: bool = False,
) -> str:
    # The version, because a later one may show the same shards with other names.
    text = repr((__version__, erofs_header.LAYOUT, options, view, [*states], [*read], is_damaged))
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=16).hexdigest()
