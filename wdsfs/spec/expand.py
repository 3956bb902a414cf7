"""Expands SHARDS (paths, globs, braces, lists, URLs) to a list of shards, each with its name in the mount.

`spec_words.py` says which paths the specs name, `existence.py` which shards exist, `shard_names.py` how they are
named. Plain functions over names in the file system; no FUSE, no LMDB.

The order of the shards is the order of the specs, and the set is exactly the one that was asked for: a shard that
is missing or named twice is an error, never a smaller set (unless `allow_missing`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from wdsfs.door import urls
from wdsfs.errors import SpecError, and_others
from wdsfs.names import PLAIN, Reading
from wdsfs.shards import Shard, check_count
from wdsfs.spec import existence, shard_names
from wdsfs.spec.spec_words import Word, absolute_paths, collect, expand_words


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
        specs, split, reading, lambda words: existence.existing_files(words, split, allow_missing, base)
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
    return _named_shards(specs, split, reading, lambda words: existence.present_files(words, split, base))


def _named_shards(
    specs: Sequence[str | bytes],
    split: str | None,
    reading: Reading,
    files: Callable[[list[Word]], list[Word]],
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
        for path, name, word in zip(
            paths, shard_names.names_of(list(map(urls.decoded, paths))), existing, strict=True
        )
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
