"""The names of shards in the mount. Plain functions over paths; no file system."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from wdsfs import names
from wdsfs.door import urls
from wdsfs.shards import Shard
from wdsfs.spec import objects

JOINER = b"--"


def names_of(paths: list[bytes]) -> list[bytes]:
    """Return a distinct name for each of these distinct absolute paths.

    Semantics decision: a shard's name is its base name without `.tar`, `.tar.gz` or another suffix of a shard. The
    suffix stays where nothing, `.` or `..` would be left of the name, and where the set holds the path without it,
    too. Of `x.tar` and `x.tar.gz` in one directory the first is `x`, and all others keep theirs. So it is with the
    sum of a query: `x.tar?download=true` alone is `x`; of several that differ in the query each keeps its sum.
    Semantics decision: shards of equal names get the shortest trailing path that no other of them has, its
    components joined by `--`: `a/train-0.tar` and `b/train-0.tar` are `a--train-0` and `b--train-0`. Only the
    clashing ones are lengthened. `--`, because it needs no quoting in any shell.
    Semantics decision: what is longer than 255 bytes then is cut and marked by a checksum, as all names are.
    Semantics decision: a lengthened name that is some shard's name already gets `~2`, `~3`, ... in the order
    of the set. So do the outputs of commands that name no shard, which are all called `pipe`.
    """
    stems = _stems(paths)
    depths = [
        1 if objects.is_unnamed(path) else depth
        for path, depth in zip(paths, _distinguishing_depths(stems), strict=True)
    ]
    proposals = [JOINER.join(_trailing(stem, depth)) for stem, depth in zip(stems, depths, strict=True)]
    plain = [
        depth == 1 and len(name) <= names.NAME_MAX and not objects.is_unnamed(path)
        for path, depth, name in zip(paths, depths, proposals, strict=True)
    ]
    taken = {name for name, is_plain in zip(proposals, plain, strict=True) if is_plain}
    return [name if is_plain else free_name(name, taken) for name, is_plain in zip(proposals, plain, strict=True)]


def extended(shards: Sequence[Shard], paths: Sequence[bytes]) -> list[Shard]:
    """Return the set with these further shards at its end; no name changes."""
    known = {shard.path for shard in shards}
    taken = {shard.name for shard in shards}
    longer = list(shards)
    for path in paths:
        if path not in known:
            name = free_name(_stems([path])[0].rpartition(b"/")[2], taken)
            taken.add(name)
            longer.append(Shard(path, name, reading=shards[0].reading))
    return longer


def _stems(paths: list[bytes]) -> list[bytes]:
    """Return the paths without their suffixes, or with them where they have to stay. Distinct for distinct paths.

    A path keeps its suffix whenever its stem is a path of the set, so no stem equals such a path. Stems of `.tar`
    differ as their paths do; any other suffix is cut only where no other path has that stem.
    """
    known = set(paths)
    cut = [names.without_suffix(urls.without_mark(path)) for path in paths]
    times = Counter(cut)

    def stem(path: bytes, cut: bytes) -> bytes:
        shared = times[cut] > 1 and not path.endswith(names.SHARD_SUFFIXES[0])
        return path if shared or cut in known or cut.endswith((b"/", b"/.", b"/..")) else cut

    return [stem(path, short) for path, short in zip(paths, cut, strict=True)]


def _distinguishing_depths(stems: list[bytes]) -> list[int]:
    """Return for each stem the least number of trailing components that no other stem ends with."""
    depths = [0] * len(stems)
    clashing: Sequence[int] = range(len(stems))
    depth = 0
    while clashing:
        depth += 1
        for position in clashing:
            depths[position] = depth
        clashing = _clashing(stems, clashing, depth)
    return depths


def _clashing(stems: list[bytes], positions: Sequence[int], depth: int) -> list[int]:
    """Return the positions whose stem shares its last `depth` components with that of another position."""
    groups: defaultdict[bytes, list[int]] = defaultdict(list)
    for position in positions:
        groups[b"/".join(stems[position].rsplit(b"/", depth)[-depth:])].append(position)
    return [position for group in groups.values() if len(group) > 1 for position in group]


def _trailing(stem: bytes, depth: int) -> list[bytes]:
    """Return the last components of a stem; the root directory, which has no name, is left out."""
    return [component for component in stem.rsplit(b"/", depth)[-depth:] if component]


def free_name(proposal: bytes, taken: set[bytes]) -> bytes:
    """Return a name like `proposal`, of at most 255 bytes, that is not in `taken`; it is added to it."""
    name = names.shorten(proposal)
    number = 1
    while name in taken:
        number += 1
        name = names.numbered(proposal, number)
    taken.add(name)
    return name
