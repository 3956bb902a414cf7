"""Opens a set of shards as a user names it: indexed, shown as a view says, and judged.

Every command and front end opens its sets here, with plain values as options. How progress is shown is up to them
(`Progress`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from wdsfs import errors, wings
from wdsfs.cluster_workers import Workers
from wdsfs.door.remote_side import FetchResult
from wdsfs.door.shard_door import DOOR
from wdsfs.index import process_pool
from wdsfs.index.portable import attached
from wdsfs.index.portable_writer import checked_target, write_index
from wdsfs.index.store import Index, Needed, Summary, open_index
from wdsfs.inodes import ROOT
from wdsfs.names import text_of
from wdsfs.shards import Shard
from wdsfs.spec.dependencies import noted
from wdsfs.spec.expand import expand
from wdsfs.tar import streams
from wdsfs.tar.problems import BROKEN_FIELD, Problem, problems_text
from wdsfs.tree.companions import Companions
from wdsfs.tree.composition import Composition
from wdsfs.tree.indexing import ATTEMPTS_MAX, indexed
from wdsfs.tree.set_options import Opening, Selection, Tolerance
from wdsfs.tree.shard_access import Access, access_of, refuse_foreign_lists
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.tree import AT_PARENT, Entry, LowerTree, Node
from wdsfs.tree.view_set import ViewSet, make_shard_set

log = logging.getLogger("wdsfs")

LISTED_BY_CHECK = "see: wdsfs check"
LISTED_BY_STRICT = "--strict lists all"  # of problems that only a view has, which `wdsfs check` does not see
NAMED = 3  # shards that warnings name one by one, and names in a message; the others are counted
FIRST_SHARDS = 3  # that are searched for the fields of a view
BATCH = 1000  # entries of a directory that are listed at a time


@contextmanager
def open_typed_set(
    specs: Sequence[str],
    selection: Selection,
    opening: Opening,
    composition: Composition | None = None,
    *,
    whole: bool = False,
) -> Iterator[ShardSet]:
    """Open the set that these words name, indexed and shown as `composition` says; without one unchanged.

    Logs warnings about damaged shards. `whole`: the command shows the set as one, so a shard that cannot be read
    would be missing; if that is tolerated, it is left out. Raises what `judge` raises, and ViewError when the view
    is refused.
    """
    if opening.tolerance.is_option:
        selection = selection._replace(allow_missing=opening.tolerance.allow_missing)
    with open_known_set(expand(specs, *selection), opening, composition, whole=whole) as below:
        yield below


@contextmanager
def open_known_set(
    shards: Sequence[Shard],
    opening: Opening,
    composition: Composition | None = None,
    *,
    whole: bool = False,
    access: Access | None = None,
    shared: bool = False,
    on_demand: bool = False,
) -> Iterator[ShardSet]:
    """Open a set of known shards, reached as `access` says; else as `open_typed_set`.

    `shared`: other users will see the shards, so files that a mount must not show them are refused (RefusedShard).
    `on_demand`: a shard is indexed when it is first needed (`indexed`), and the set is not judged.
    """
    tolerance = opening.tolerance
    with noted() as used:
        companions = None if composition is None else Companions(composition, shards[0].reading)
    joined = companions.shards if companions else ()
    if shared:
        refuse_foreign_lists(used.files, shared)
        files = [*(shard.path for shard in shards), *(companions.files if companions else ())]
        access = access_of(files, shared, allow_missing=tolerance.allow_missing)
    index = open_index(opening.index_dir)
    index.portables = attached([*shards, *joined])
    unreadable: dict[bytes, errors.ShardError] = {}
    if not on_demand:
        index.log_notices()
        unreadable = refresh_index(index, [*shards, *joined], opening).unreadable
    if whole and tolerance.allow_missing:
        shards = leave_out_unreadable(shards, unreadable)
    if composition is None or companions is None:
        below = ShardSet(shards, index, opening.descriptors, access=access)
    else:
        below = make_shard_set(
            shards, index, composition, companions, descriptors=opening.descriptors, access=access
        )
    try:
        if not on_demand or (composition is not None and composition.classes):  # classes are of the whole set
            unreadable = make_view(below, opening) | unreadable  # the reasons of the view say more
        for text in [] if on_demand else judge(below, unreadable, tolerance, whole):
            log.warning("%s", text)
        yield below
    finally:
        below.close()


def leave_out_unreadable(shards: Sequence[Shard], unreadable: Mapping[bytes, errors.ShardError]) -> list[Shard]:
    """Return the shards that can be read. Raises UnreadableShard if there is none."""
    left = [shard for shard in shards if shard.path not in unreadable]
    if not left:
        raise errors.UnreadableShard(
            f"no shard of the set can be read: {errors.several([*map(str, unreadable.values())])}"
        )
    return left


class Refreshed(NamedTuple):
    """The number of shards indexed, and by path why others cannot be read."""

    indexed: int
    unreadable: dict[bytes, errors.ShardError]


def refresh_index(
    index: Index, shards: Sequence[Shard], opening: Opening, needed: Needed = Needed.USABLE
) -> Refreshed:
    """Index those of the shards that are new or have changed."""
    stale = [shard for shard, _ in index.stale(shards, needed)]
    unreadable: dict[bytes, errors.ShardError] = {}
    count = 0
    if stale:
        with opening.progress.indexing(len(stale)) as advance:

            def on_done(shard: Shard, summary: Summary | None, error: str | None) -> None:
                if error is not None:
                    unreadable[shard.path] = errors.UnreadableShard(error)
                advance(summary.members if summary else 0)

            copied = index.refresh(stale, opening.jobs, on_done, opening.workers, needed)
        count = len(stale) - copied - len(unreadable)
    unreadable.update(index.no_tars(shards))
    if stale:  # headers of moved shards are compared now
        for text in index.portables.remarks(stale, exact=needed is Needed.PROVABLE):
            log.warning("%s", text)
    return Refreshed(count, unreadable)


def make_view(below: ShardSet, opening: Opening, *, some: bool = False) -> dict[bytes, errors.ShardError]:
    """Make the records of a view; returns by path why those of some shards cannot be made.

    `some` is that of `ViewSet.make`. Raises ViewError when the view is refused.
    """
    if not isinstance(below, ViewSet):
        return {}
    with opening.progress.composing(len(below)) as update:
        refused = below.make(update, some=some)
    if refused is not None:
        raise errors.ViewError(refused)
    for text in [] if opening.quiet else below.guesses():
        log.info("%s", text)
    if below.rest_waits:
        return below.unmade
    missing, unused = _compared_tables(below)
    if missing is not None and not opening.tolerance.strict:  # --strict lists it
        log.warning("%s", missing)
    for text in [] if opening.quiet else unused:
        log.info("%s", text)
    for field in [] if opening.quiet else below.missing_fields(FIRST_SHARDS):
        text = "--field %s: no sample of the first shards has this field, so there are no such files"
        log.warning(text, field.text)
    return below.unmade


def rules() -> Any:
    """Return the rules of the wing `interop` (`judge.py`), which `--strict` asks. Raises NotInstalled."""
    return wings.load("interop", "judge")


def judge(
    below: ShardSet, unreadable: Mapping[bytes, errors.ShardError], tolerance: Tolerance, whole: bool
) -> list[str]:
    """Return the warnings about an indexed set (or its indexed part); empty when all is well.

    This is the only place that decides whether a command continues with a set that is damaged or incomplete. The
    damage of a shard is in its record, also in an old one; `shard_set.py` handles later changes.

    `unreadable` has the reason, by path, why shards could not be indexed. `whole`: their absence would not be
    noticed in the output of the command (a tree over all shards, a sum, an index of the set).

    Raises NotATar for files that are no shards, UnreadableShard when shards would be missing, CorruptShard for
    findings that `strict` does not allow, after it has logged all of them.
    """
    texts = [*dict.fromkeys(map(str, unreadable.values()))]  # each once: a joined shard can have two names
    if tolerance.strict:
        _refuse_all([*map(str, unreadable.values()), *rules().findings_of_set(below, unreadable)])
    if not tolerance.allow_missing:
        advice = "; --allow-missing goes on without" if tolerance.is_option else ""
        # Treated as missing shards: the download has failed, and later attempts would fail, too.
        no_tars = dict.fromkeys(str(error) for error in unreadable.values() if isinstance(error, errors.NotATar))
        if no_tars and tolerance.is_option:
            raise errors.NotATar(f"{errors.several([*no_tars])}{advice}")
        if whole and texts:
            raise errors.UnreadableShard(
                f"the set would be smaller without shards that cannot be read: {errors.several(texts)}{advice}"
            )
    damaged = [
        f"{path}: {problems_text(first, count)}; {_advice(path, first)}"
        for path, first, count in below.known_damage()
    ]
    return [*_first_of(texts, "cannot be read"), *_first_of(damaged, "are damaged")]


def _advice(path: str, problem: Problem) -> str:
    if problem.kind == BROKEN_FIELD:
        return LISTED_BY_STRICT
    return streams.split_tar(path) or LISTED_BY_CHECK


def _refuse_all(findings: Sequence[str]) -> None:
    for text in findings:
        log.error("%s", text)
    if findings:
        count = f"{len(findings):,} finding{'s' * (len(findings) > 1)}"
        raise errors.CorruptShard(f"--strict: {count}, listed above")


def _first_of(texts: Sequence[str], what: str) -> list[str]:
    if len(texts) <= NAMED + 1:  # to name one more takes no more room than "and 1 more"
        return list(texts)
    last = LISTED_BY_STRICT if all(text.endswith(LISTED_BY_STRICT) for text in texts) else LISTED_BY_CHECK
    return [*texts[:NAMED], f"{len(texts) - NAMED:,} more shards {what}; {last}"]


def resolve_path(tree: LowerTree, path: bytes) -> Node:
    """Return the node at a path of a tree. Raises EntryError, with names that exist for an unknown first one."""
    try:
        return indexed(tree.resolve, path)
    except errors.NoSuchEntry as error:
        try:
            indexed(tree.lookup, ROOT, path.partition(b"/")[0])
        except errors.NoSuchEntry:
            names = (entry.name for entry in tree.listing(ROOT) if entry.name not in (b".", b".."))
            there = [repr(text_of(name)) for name in itertools.islice(names, NAMED + 1)]
            more = " ..." if len(there) > NAMED else ""
            if there:
                raise errors.NoSuchEntry(f"{error}; there is {', '.join(there[:NAMED])}{more}") from None
        raise


def index_set(
    shards: Sequence[Shard], opening: Opening, target: str | None, allow_missing: bool, prune: bool
) -> dict[str, Any]:
    """Build or refresh the index of these shards; return the counts of `wdsfs index --json`.

    Logs the problems of the shards. All records are also written to `target` (.wdsidx), if given; only with
    `allow_missing` may shards be absent from it. `prune` drops the records of shards that are gone. Raises
    UsageError, IndexUnusable for an index that would not last, UnreadableShard, ExportError.
    """
    place = None if target is None else checked_target(target)
    with contextlib.closing(open_index(opening.index_dir)) as index:
        index.log_notices()
        index.portables = attached(shards)
        done = refresh_index(index, shards, opening, Needed.USABLE if place is None else Needed.PROVABLE)
        remarks = judge(ShardSet(shards, index), done.unreadable, Tolerance(allow_missing=True), whole=False)
        for text in [*remarks, *index.miscounted(shards)]:
            log.warning("%s", text)
        pruned, written = index.prune() if prune else 0, None
        if place is not None:
            if done.unreadable and not allow_missing:
                texts = errors.several([*map(str, done.unreadable.values())])
                raise errors.UnreadableShard(
                    f"{texts}: an index must have all shards; with --allow-missing it leaves out these"
                )
            with opening.progress.shards("writing", len(shards)) as on_shard:
                written = write_index(index, leave_out_unreadable(shards, done.unreadable), place, on_shard)
        if index.temporary and place is None:
            raise errors.IndexUnusable(
                "the index was a temporary one, so the records are lost; see above, or set --index-dir"
            )
        counts = {**_counts(index, shards, done), "pruned": pruned, "index": str(index.directory)}
        return counts if written is None else {**counts, "written": target, "bytes": written}


def _counts(index: Index, shards: Sequence[Shard], done: Refreshed) -> dict[str, int]:
    summaries = list[Summary]()
    for shard in shards:
        with contextlib.suppress(errors.ShardError):
            summaries += filter(None, [index.summary(shard.key, DOOR.look(shard.path))])
    return {
        "shards": len(shards),
        "rebuilt": done.indexed,
        "unreadable": len(done.unreadable),
        "damaged": sum(bool(summary.problems) for summary in summaries) - len(index.no_tars(shards)),
        "samples": sum(summary.samples for summary in summaries),
        "members": sum(summary.members for summary in summaries),
    }


def walk_tree(
    tree: LowerTree, node: Node, prefix: bytes, recursive: bool, failures: list[errors.WdsfsError]
) -> Iterator[tuple[bytes, Node]]:
    """Yield (path, node) of the entries of a directory, in the tree's order; with `recursive` of everything below.

    An error of a directory below it is logged and appended to `failures`; the listing goes on.
    """
    cursor = AT_PARENT
    while True:
        batch = indexed(_batch, tree, node.inode, cursor)
        for entry in batch:
            yield prefix + entry.name, entry.node
            if recursive and stat.S_ISDIR(entry.node.mode):
                try:
                    yield from walk_tree(tree, entry.node, prefix + entry.name + b"/", recursive, failures)
                except errors.WdsfsError as error:
                    log.error("%s", error)
                    failures.append(error)
        if len(batch) < BATCH:
            return
        cursor = batch[-1].cursor


def _batch(tree: LowerTree, inode: int, cursor: int) -> list[Entry]:
    return list(itertools.islice(tree.listing(inode, cursor), BATCH))


def keys_missing(below: ShardSet) -> str | None:
    """Make a view; return a remark if no sample has some of the listed keys. Raises ViewError.

    Raises StaleShard if the list changes each time.
    """
    return _compared_tables(below)[0]


def _compared_tables(below: ShardSet) -> tuple[str | None, list[str]]:
    """Make a view as `keys_missing`; return its remark, and those on rows of label files that no sample has."""
    for left in reversed(range(ATTEMPTS_MAX)):
        if not isinstance(below, ViewSet):
            break
        refused = below.make()
        if refused is not None:
            raise errors.ViewError(refused)
        try:
            return below.keys_missing(), below.labels_missing()
        except errors.StaleShard:
            if not left:
                raise
    return None, []


def fetch_shards(
    shards: Sequence[Shard], jobs: int, workers: Workers | None, advance: Callable[[int], None]
) -> FetchResult:
    """Bring remote shards into the cache, `jobs` at a time, or into the caches of the workers of a cluster.

    `advance` gets the bytes that come. Raises WdsfsError.
    """
    if not shards:
        return FetchResult(0, 0, 0, {})
    if workers is None:
        return DOOR.remote.fetch_all([shard.path for shard in shards], jobs, advance)
    failed: dict[bytes, errors.ShardError] = {}
    size = there = 0
    for shard, outcome in process_pool.each(_fetch_counted, shards, 1, workers):
        if isinstance(outcome, errors.ShardError):
            failed[shard.path] = outcome
        else:
            size, there = size + outcome[0], there + outcome[1]
            advance(outcome[0])
    return FetchResult(size, size - there, there, failed)


def _fetch_counted(path: bytes) -> tuple[int, int]:
    """Fetch a shard, in a worker of a cluster."""
    return DOOR.remote.fetch_counted(path)
