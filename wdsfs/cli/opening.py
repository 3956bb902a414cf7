"""Opening the set of a command: indexed, seen as its options say, and judged."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from wdsfs.cli.options import Opening
from wdsfs.cli.progress import make_view, refresh_index

if TYPE_CHECKING:
    from wdsfs.errors import ShardError
    from wdsfs.spec.expand import Shard
    from wdsfs.spec.selection import Selection
    from wdsfs.tree.composition import Composition
    from wdsfs.tree.shard_access import Access
    from wdsfs.tree.shard_set import ShardSet
    from wdsfs.tree.tree import LowerTree, Node

log = logging.getLogger("wdsfs")


@contextlib.contextmanager
def opened(
    shards: Sequence[str],
    selection: Selection,
    opening: Opening,
    composition: Composition | None = None,
    whole: bool = False,
) -> Iterator[ShardSet]:
    """The lower of a set, all of it indexed, shown as `composition` says; without one all shards as they are.

    Logs warnings about damaged shards. `whole`: shards that cannot be read would be missing in what is shown; if
    that is tolerated, they are left out. Raises what `soundness.judge` raises, and ViewError when the view is
    refused.
    """
    from wdsfs.spec.expand import expand

    selection = selection._replace(allow_missing=opening.tolerance.allow_missing)
    with opened_set(expand(shards, *selection), opening, composition, whole) as below:
        yield below


@contextlib.contextmanager
def opened_set(
    shards: Sequence[Shard],
    opening: Opening,
    composition: Composition | None = None,
    whole: bool = False,
    access: Access | None = None,
    shared: bool = False,
) -> Iterator[ShardSet]:
    """As `opened`, of shards that are known, reached as `access` says.

    `shared`: others than this user will see them, so what no mount shows to others is refused (RefusedShard).
    """
    from wdsfs.index.portable import attached
    from wdsfs.index.store import open_index
    from wdsfs.interop.soundness import judge
    from wdsfs.spec.dependencies import noted
    from wdsfs.tree.companions import Companions
    from wdsfs.tree.shard_access import access_of, refuse_foreign_lists
    from wdsfs.tree.shard_set import ShardSet
    from wdsfs.tree.view_set import open_set

    with noted() as used:
        companions = None if composition is None else Companions(composition, shards[0].reading)
    if shared:
        refuse_foreign_lists(used.files, shared)
        files = [*(one.path for one in shards), *(companions.files if companions else ())]
        access = access_of(files, shared, opening.tolerance.allow_missing)
    index = open_index(opening.index_dir)
    index.log_notices()
    index.portables = attached([*shards, *(companions.shards if companions else ())])
    _, unreadable = refresh_index(index, [*shards, *(companions.shards if companions else ())], opening)
    if whole and opening.tolerance.allow_missing:
        shards = readable(shards, unreadable)
    if composition is None or companions is None:
        below = ShardSet(shards, index, access=access)
    else:
        below = open_set(shards, index, composition, companions, access=access)
    try:
        unreadable = make_view(below, opening.quiet) | unreadable  # which says more
        for text in judge(below, unreadable, opening.tolerance, whole):
            log.warning("%s", text)
        yield below
    finally:
        below.close()


def readable(shards: Sequence[Shard], unreadable: Mapping[bytes, ShardError]) -> list[Shard]:
    """The shards without those that cannot be read. Raises UnreadableShard if none is left."""
    from wdsfs.errors import UnreadableShard, several

    found = [one for one in shards if one.path not in unreadable]
    if not found:
        raise UnreadableShard(f"no shard of the set can be read: {several([*map(str, unreadable.values())])}")
    return found


_TOP_NAMED = 3  # names at the top of a tree that a message has


def resolved(tree: LowerTree, path: bytes) -> Node:
    """The node at a path of a tree. Raises EntryError; for an unknown first name it has names that exist."""
    from wdsfs.errors import NoSuchEntry
    from wdsfs.inodes import ROOT
    from wdsfs.tree.indexing import indexed
    from wdsfs.tree.tree import text_of

    try:
        return indexed(tree.resolve, path)
    except NoSuchEntry as error:
        try:
            indexed(tree.lookup, ROOT, path.partition(b"/")[0])
        except NoSuchEntry:
            names = (entry.name for entry in tree.listing(ROOT) if entry.name not in (b".", b".."))
            there = [repr(text_of(name)) for name in itertools.islice(names, _TOP_NAMED + 1)]
            more = " ..." if len(there) > _TOP_NAMED else ""
            if there:
                raise NoSuchEntry(f"{error}; there is {', '.join(there[:_TOP_NAMED])}{more}") from None
        raise
