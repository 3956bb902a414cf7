"""Expands SHARDS (paths, globs, braces, lists, URLs) to a list of shards, each with its name in the mount.

`spec_words.py` says which paths the specs name, `existence.py` which shards exist; how they are named in the
mount is decided here. Plain functions over names in the file system; no FUSE, no LMDB.

The order of the shards is the order of the specs, and the set is exactly the one that was asked for: a shard that
is missing or named twice is an error, never a smaller set (unless `allow_missing`).
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from wdsfs import names
from wdsfs.door import urls
from wdsfs.errors import SpecError, and_others
from wdsfs.names import PLAIN, Reading
from wdsfs.shards import Shard, check_count
from wdsfs.spec import existence, objects
from wdsfs.spec.spec_words import Word, absolute_paths, collect, expand_words

JOINER = b"--"


class Slice(NamedTuple):
    """One of `num_shards` equal parts of a set, counted from 0; the words are DALI's.

    REQUIRES: 0 <= shard_id < num_shards.
    """

    shard_id: int
    num_shards: int


def expand(
    specs: Sequence[str | bytes],
    split: str | None = None,
    slice: Slice | None = None,
    reading: Reading = PLAIN,
    allow_missing: bool | None = None,
    base: str | None = None,
) -> list[Shard]:
    """Return the shards that `specs` name, in order: all of them, or those of a split, or of a slice.

    `reading` is how they are to be read. With `allow_missing` some may be missing, but not all; with None
    no error names that option. `base` is the directory, or URL, of the shards of a portable index.

    Semantics decision: a spec that names something that exists is taken literally, whatever it looks like: a
    command (`pipe:`), a URL, `-`, `@`, braces, glob characters or `::`. Otherwise it is split at `::`, then
    variables are replaced, then braces are expanded, then `@`, `~` and globs. Each result that exists is that
    path, too, and what a glob or a listing of a directory finds is a path only. Else the author of a file name
    would decide what a shell's `*.tar` runs. A spec of bytes is a path (`Shard.path`): nothing in it is expanded.
    Semantics decision: the shards of a glob or a directory are sorted bytewise by path, whatever the locale.
    Semantics decision: one path given twice is an error. Keeping it once would silently change the set, and
    twice would make two trees of one shard. Two links to one file are two shards.
    Semantics decision: a slice has every M-th shard, as with the webdataset library's `split_by_node`, which also
    distributes shards. (DALI distributes contiguous samples.) Neighbours, which are often alike, go to different
    parts, and parts differ by at most one shard. The slice is cut last, from the set with all its names: every
    rank sees the same errors, and a shard has the same name in all of them.

    Raises SpecError (means nothing, nothing matches, not a regular file, given twice), MissingShard, and
    UnreadableShard when the file system refuses to say whether a shard is there.
    """
    shards = _named_shards(
        specs, reading, lambda words: existence.existing_files(words, split, allow_missing, base)
    )
    chosen = shards if slice is None else _sliced(shards, slice)
    check_count(len(chosen))
    return chosen


def expand_again(
    specs: Sequence[str | bytes], split: str | None = None, reading: Reading = PLAIN, base: str | None = None
) -> list[Shard]:
    """Return the shards that are there now, as `expand`, for a set that is checked again.

    Shards that are named one by one and missing are left out, unless all are missing.
    """
    return _named_shards(specs, reading, lambda words: existence.present_files(words, split, base))


def _named_shards(
    specs: Sequence[str | bytes], reading: Reading, files: Callable[[list[Word]], list[Word]]
) -> list[Shard]:
    """Return the shards that `specs` name; `files` returns those of the words that count, directories replaced."""
    named = collect(expand_words(specs))
    if not named:
        raise SpecError("no shards given: name at least one, for example 'train-{000000..000099}.tar'")
    existing = files(named)
    paths = absolute_paths([word.path for word in existing])
    _refuse_repeated(paths, existing)
    return [
        Shard(path, name, word.without, word.samples, reading=reading, index_file=word.index_file)
        for path, name, word in zip(paths, names_of(list(map(urls.decoded, paths))), existing, strict=True)
    ]


def _sliced(shards: list[Shard], part: Slice) -> list[Shard]:
    if len(shards) < part.num_shards:
        # All ranks fail: if one failed alone, the others would wait for it.
        raise SpecError(
            f"the set has {len(shards):,} shards and cannot be cut into {part.num_shards:,} parts: "
            "one of them would be empty"
        )
    placed = (replace(shard, place=(number, len(shards))) for number, shard in enumerate(shards))
    return list(placed)[part.shard_id :: part.num_shards]


def _refuse_repeated(paths: list[bytes], words: list[Word]) -> None:
    if len(set(paths)) == len(paths):
        return
    repeated = [path for path, count in Counter(paths).items() if count > 1]
    places = [
        str(word.origin) for path, word in zip(paths, words, strict=True) if path == repeated[0] and word.origin
    ]
    where = f" ({', '.join(places[:3])})" if places else ""
    shards = f"{os.fsdecode(repeated[0])!r}{and_others(len(repeated))}"
    raise SpecError(f"the shard {shards} is named twice{where}: name it once")


def refuse_left_out(shards: Iterable[Shard], why: str) -> None:
    """Raise SpecError if samples of these shards are left out: a part of a shard cannot be changed."""
    for shard in shards:
        if shard.without:
            raise SpecError(
                f"{why}: samples of {os.fsdecode(shard.path)!r} are excluded by the split file of its dataset; "
                "name the shards themselves, for example 'DIR/*.tar'"
            )


def split_path(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """Split the `SHARDS... [PATH]` of `wdsfs ls` into the specs and the path inside the tree, if any.

    Semantics decision: the last of two or more arguments is PATH when it names no shard at all: no file of that
    name, no list, no directory that holds a shard, no glob match, and not one existing file among its brace
    expansions (a set of which a part exists stays a spec, so that `expand` can report what is missing). An
    argument with `${NAME}` is never PATH. No list is read to decide this.
    """
    *specs, last = arguments
    if not specs or existence.names_a_shard(last):
        return list(arguments), None
    return specs, last


# -- names in the mount --------------------------------------------------------------------------------------


def names_of(paths: list[bytes]) -> list[bytes]:
    """Return a distinct name for each of these distinct absolute paths.

    Semantics decision: a shard's name is its base name without `.tar`, `.tar.gz` or another suffix of a shard. The
    suffix stays where nothing, `.` or `..` would be left of the name, and where the set holds the path without it,
    too. Of `x.tar` and `x.tar.gz` in one directory the first is `x`, and all others keep theirs. So it is with the
    sum of a query: `x.tar?download=true` alone is `x`; of several that differ in the query each keeps its sum.
    Semantics decision: shards of equal names get the shortest trailing path that no other of them has, its
    components joined by `--`: `a/train-0.tar` and `b/train-0.tar` are `a--train-0` and `b--train-0`. Only the
    clashing ones are lengthened. `--`, because it needs no quoting in any shell. Semantics decision: a name that
    is then longer than 255 bytes is cut and marked by a checksum, as all names are. Semantics decision: a
    lengthened name that is some shard's name already gets `~2`, `~3`, ... in the order of the set. So do the
    outputs of commands that name no shard, which are all called `pipe`.
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
    """Return a name like `proposal`, of at most 255 bytes, that is not in `taken`, and add it there."""
    name = names.shorten(proposal)
    number = 1
    while name in taken:
        number += 1
        name = names.numbered(proposal, number)
    taken.add(name)
    return name
