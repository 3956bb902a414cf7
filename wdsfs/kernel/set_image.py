"""Finds the image of a set in the cache, or makes it there, with copies of remote and compressed shards.

Opening the index takes longer than all other steps of a mount. So an image is found without the index where shards
are shown without a view and no problems of theirs have to be reported.

A copy is what the kernel reads in the place of a shard that is no plain tar of this machine: the unpacked file of
a compressed shard, or the file of a remote shard, which has to be complete. Image and copies lie in the cache, and
are not evicted while they are open here, nor afterwards while a mount reads them (`storage/held_files.py`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wdsfs import __version__, host
from wdsfs.errors import CorruptShard, ShardError, UnreadableShard
from wdsfs.kernel import erofs
from wdsfs.kernel.devices import raise_file_limit
from wdsfs.kernel.manifest import ImageOptions
from wdsfs.remote import shard_paths
from wdsfs.remote.shard_paths import is_remote
from wdsfs.shards import Fingerprint
from wdsfs.storage import file_cache
from wdsfs.storage.file_cache import CachedFile, NewFile, NoRoom
from wdsfs.storage.held_files import HeldFile
from wdsfs.tree.options import Owner

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from wdsfs.shards import Shard
    from wdsfs.tree.options import Opening, Progress, TreeOptions
    from wdsfs.tree.shard_set import ShardSet
    from wdsfs.tree.tree import LowerTree

# What opens and makes a set is imported late: it loads NumPy, and most mounts find their image.

KINDS = ("erofs",)  # of files in the cache

View = tuple[str, str, bool, bool]  # layout, names, if there are links by number, if shards may be missing


class CannotServe(Exception):
    """The kernel cannot serve a set, as turns out when its image is made; the text says why."""


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

    def options(self, owner: Owner, private: bool, writable: bool) -> ImageOptions:
        """Return the options of its image for this kernel."""
        since, composition = min(host.kernel_version()[:2], erofs.OWN_TIMES_KERNEL), self.tree.composition
        return ImageOptions(
            *(owner, None, (since[0], since[1]), self.tree.merge, composition.public_text, private, writable),
            directory=os.getcwdb() if composition.names_files else None,
        )


def find_or_make(served: ServedSet, options: ImageOptions) -> tuple[str, ExitStack]:
    """Return the path of the image of a set, and a stack that closes it and the copies.

    After that only a mount holds them. Raises CannotServe, ImageError, ShardErrors.
    """
    cache, stack = file_cache.cache(), ExitStack()
    try:
        path = None
        while path is None:  # one that somebody has written is removed, and made again
            key = _quick_key(served, options)
            image = None if key is None else cache.find(key, KINDS)
            if image is None:
                image = _made(served, options, stack)
            stack.callback(os.close, image.fd)
            try:
                path = cache.hold(image.fd)
            except OSError:  # no leases there: it may be evicted, and the mount goes on
                path = os.readlink(f"/proc/self/fd/{image.fd}")
    except BaseException:
        stack.close()
        raise
    return path, stack


def _made(served: ServedSet, options: ImageOptions, stack: ExitStack) -> CachedFile:
    """Make the image of a set, unless it is there; `stack` closes the copies that it reads.

    Raises what `find_or_make` raises.
    """
    from wdsfs.kernel.image import write_image
    from wdsfs.tree.numbered_tree import check_name, make_numbered
    from wdsfs.tree.opening import opened_set

    view, progress = served.tree.view(served.partial), served.opening.progress
    composition = served.tree.composition
    with opened_set(served.shards, served.opening, composition, whole=True, shared=True) as lower:
        check_name(lower.shards, view)
        tree = make_numbered(lower, view)
        options = options._replace(copies=_copies_of(lower, progress, stack))
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
        return None  # what that means is decided where the set is opened
    return _key(states, (tree.layout, tree.names, tree.index_tree, served.partial), options)


def key_of(tree: LowerTree, options: ImageOptions) -> str:
    """Return a key that differs for every other image: other shards or options, changed shards, another version.

    An image of damaged shards is not found by `_quick_key`, so that each mount warns of the damage.
    """
    lower, view = tree.lower, tree.view
    states = [(shard.key, shard.name, lower.fingerprint(number)) for number, shard in enumerate(lower.shards)]
    sources = () if lower.plain is lower else lower.sources
    read = [(shard.path, below.fingerprint(at)) for below in sources for at, shard in enumerate(below.shards)]
    is_damaged = next(lower.known_damage(), None) is not None
    return _key(states, (view.layout, view.names, view.index_tree, view.partial), options, read, is_damaged)


def _key(
    states: Iterable[tuple[bytes, bytes, Fingerprint]],
    view: View,
    options: ImageOptions,
    read: Sequence[tuple[bytes, Fingerprint]] = (),
    is_damaged: bool = False,
) -> str:
    own = options._replace(copies=dict(options.copies))
    # The version, for what is shown of the same shards may be other names in a later one.
    text = repr((__version__, erofs.LAYOUT, own, view, [*states], [*read], is_damaged))
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=16).hexdigest()


# --- copies


def _copies_of(lower: ShardSet, progress: Progress, stack: ExitStack) -> dict[bytes, HeldFile]:
    """Return the copies that the kernel reads in the place of shards, by path; `stack` closes them.

    A shard that is not unpacked, or has changed since, is unpacked here. Raises CannotServe, ShardErrors.
    """
    kinds = _kinds_of(lower)
    raise_file_limit(2 * len(kinds))
    packed = {path: kind for path, kind in kinds.items() if kind is not None}
    with progress.shards("looking at copies", len(kinds)) as on_shard:
        try:
            _refuse_more_than_the_cache([path for path in packed if not is_remote(path)])
            copies = _unpacked(packed, stack, on_shard)
            return copies | _complete_objects([path for path in kinds if path not in packed], stack, on_shard)
        except (UnreadableShard, CorruptShard) as error:
            raise CannotServe(str(error)) from None


def _kinds_of(lower: ShardSet) -> dict[bytes, str | None]:
    """Return the shards that the set, and whatever it is joined with, needs copies of: compression by path."""
    from wdsfs.tree.shard_set import indexed

    kinds: dict[bytes, str | None] = {}
    for below in lower.sources:
        for number, shard in enumerate(below.shards):
            kind = indexed(below.record, number).compression
            if kind is not None or is_remote(shard.path):
                kinds[shard.path] = kind
    return kinds


def _refuse_more_than_the_cache(shards: Sequence[bytes]) -> None:
    """Raise UnreadableShard if the compressed shards alone are larger than the cache."""
    limit = file_cache.cache().room.most()
    packed = sum(os.stat(path).st_size for path in shards)
    if packed > limit:
        raise UnreadableShard(
            f"the compressed shards have {packed:,} bytes, and the cache, which has to hold all of them unpacked, "
            f"takes {limit:,}; give it more room with --cache-size"
        )


def _unpacked(
    shards: Mapping[bytes, str], stack: ExitStack, on_shard: Callable[[], None]
) -> dict[bytes, HeldFile]:
    from wdsfs.tree import open_shards

    copies = {}
    with _threads() as threads:
        waiting = [threads.submit(open_shards.held_copy, kind, path) for path, kind in shards.items()]
        for path, unpacking in zip(shards, waiting, strict=True):
            copy = unpacking.result()
            stack.callback(copy.close)
            copies[path] = _held_file(copy.path, copy.fd)
            on_shard()
    return copies


def _complete_objects(
    shards: Sequence[bytes], stack: ExitStack, on_shard: Callable[[], None]
) -> dict[bytes, HeldFile]:
    copies, objects = {}, []
    for path in shards:
        cached = shard_paths.whole_in_cache(path)
        stack.callback(cached.close)
        place = cached.hold()
        if place is None:
            raise UnreadableShard(f"{os.fsdecode(path)} was evicted from the cache meanwhile; repeat the command")
        copies[path] = _held_file(place, cached.fd)
        objects.append(cached)
    # Afterwards: what was marked just now is compared once it has settled.
    with _threads() as threads:
        waiting = [threads.submit(cached.certify) for cached in objects]
        for path, certified in zip(shards, waiting, strict=True):
            if not certified.result():
                raise CorruptShard(
                    f"{os.fsdecode(path)}: some of its bytes in the cache were damaged, and have been dropped; "
                    "fetch them again: wdsfs fetch"
                )
            on_shard()
    return copies


def _held_file(path: str, fd: int) -> HeldFile:
    status = os.fstat(fd)
    return HeldFile(path, status.st_size, status.st_ino)


@contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    """Provide threads, one for each processor; after an exception no waiting work begins."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        try:
            yield threads
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
