"""Reads the shards of a dataset that `energon prepare` has prepared: a directory with `.nv-meta`.

Source: Megatron-Energon, `flavors/webdataset/metadata.py`. docs/reference/formats.md has the fields. Metadata that
another user has written names nothing outside of its dataset: who names a directory does not name its files.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import NamedTuple

from wdsfs import trust
from wdsfs.door import urls
from wdsfs.errors import DeniedObject, SpecError, Unreachable, and_others
from wdsfs.spec import objects
from wdsfs.spec.located import Field, load_file
from wdsfs.spec.spec_words import Word, expand_field, listed_path

log = logging.getLogger(__name__)

META = ".nv-meta"
INFO = (".info.json", ".info.yaml")  # the first that exists counts; older versions write the second
_SPLIT = ("split.yaml", "split.json")


def dataset_at(directory: str) -> str | None:
    """Return the prepared dataset of a directory: itself, the parent of a .nv-meta, None for any other."""
    parent, base = os.path.split(directory.rstrip("/"))
    if base == META:
        return parent
    try:
        return directory if _first(directory, INFO) else None
    except DeniedObject:  # what is wrong is said of the directory, when it is listed
        return None
    except Unreachable as error:
        raise objects.not_listed(error) from None


def read_shards(dataset: str, split: str | None, split_file: str | None = None) -> Iterator[Word]:
    """Yield the shards of a prepared dataset, of one split or all, without those that its split file excludes.

    Semantics decision: the order is that of the split, without one that of `.info.json`, as in Energon. Without
    --split these are all shards that are not excluded, also those in no split: this is the whole dataset.

    Raises SpecError, UnreadableShard.
    """
    info = _first(dataset, INFO)
    if info is None:
        raise SpecError(f"{os.path.join(dataset, META)!r} has no {INFO[0]}: `energon prepare` writes it")
    shards = dict(load_file(info).need("shard_counts").named())
    split_file = split_file or _first(dataset, _SPLIT)
    splits = None if split_file is None else load_file(split_file)
    if splits is not None:
        splits.allow(("split_parts", "exclude"))
    if split is None:
        named_shards: Iterator[tuple[str, Field]] = iter(shards.items())
    elif splits is None:
        raise SpecError(f"--split {split}: {os.path.join(dataset, META)!r} has no {_SPLIT[0]} and so no splits")
    else:
        named_shards = _split_part(splits, split, shards)
    base = os.path.join(dataset, "")
    excluded = _excluded(None if splits is None else splits.get("exclude"), shards)
    is_empty = True
    for name, place in named_shards:
        if name not in excluded.shards:
            is_empty = False
            path = listed_path(base, name, place)
            if _leads_out(name) and not urls.is_url(path):
                _require_own(info, place)
            yield Word(path, place, shards[name].number(), frozenset(excluded.samples.get(name, ())))
    if is_empty:
        part = "the dataset" if split is None else f"the split {split!r}"
        raise SpecError(f"{part} in {os.path.join(dataset, META)!r} has no shard that is not excluded")


def _leads_out(name: str) -> bool:
    """Return True for the name of a shard that may lie outside of the directory of its dataset."""
    return name.startswith(("/", "file:")) or ".." in name.split("/")


def _require_own(info: str, place: Field) -> None:
    """Check that nobody else can have written a file that names a shard outside of its dataset.

    Semantics decision: who may write in a directory of sets does not decide which files elsewhere a mount by root
    shows, neither by a link nor by a name. Raises SpecError.
    """
    try:
        trust.content(info, trust.behind_sudo())
    except trust.Untrusted as error:
        raise place.wrong(
            f"a shard outside of the dataset, in a file that others can write ({error.strerror}): name the shard "
            "itself, or --trust the users who write it"
        ) from None


def _split_part(splits: Field, split: str, shards: Collection[str]) -> Iterator[tuple[str, Field]]:
    """Yield the names in a split, each with its place in the file."""
    parts = splits.need("split_parts")
    part = parts.get(split)
    if part is None:
        known = ", ".join(repr(str(name)) for name, _ in parts.named())
        raise parts.wrong(f"no split is called {split!r}; there are: {known or 'none'}")
    for names in part.items():
        for name in expand_field(names.text(), names):
            if name not in shards:
                raise names.wrong(
                    f"{name!r} is not a shard of {INFO[0]}; `energon prepare` writes both files again"
                )
            yield name, names


class _Excluded(NamedTuple):
    shards: set[str]
    samples: defaultdict[str, set[bytes]]  # keys, by shard


def _excluded(exclude: Field | None, shards: Collection[str]) -> _Excluded:
    """Return the shards and samples (`shard/key`) of an `exclude` list. Both may have slashes."""
    excluded = _Excluded(set(), defaultdict(set))
    lengths = sorted(set(map(len, shards)))
    unknown: list[str] = []
    for entry in [] if exclude is None else exclude.items():
        for text in expand_field(entry.text(), entry):
            cuts = [at for at in lengths if text[at : at + 1] == "/" and text[:at] in shards]
            samples = [(text[:at], text[at + 1 :]) for at in cuts]
            for shard, key in samples:
                excluded.samples[shard].add(key.encode("utf-8", "surrogateescape"))
            if text in shards:
                excluded.shards.add(text)
            elif not samples:
                unknown.append(f"{entry.where}: {str(text)!r}")
    if unknown:
        # No error, as for Energon: a shard may have left the dataset. But it may also be a typing error.
        named = f"{unknown[0]}{and_others(len(unknown))}"
        log.warning("%s names no shard of the dataset and excludes nothing", named)
    return excluded


def _first(dataset: str, names: tuple[str, ...]) -> str | None:
    """Return the first of these files that exists."""
    paths = (os.path.join(dataset, META, name) for name in names)
    return next((path for path in paths if objects.is_file(path)), None)


def refuse_misplaced(top: Field) -> None:
    """Raise SpecError for a file of a prepared dataset that is not in its place."""
    if top.is_object() and (top.get("split_parts") or top.get("shard_counts")):
        raise top.wrong(f"a file of Energon belongs into the directory {META} of its dataset: name that directory")


def without_splits(path: str, split: str) -> SpecError:
    """Return the error for `--split` with shards that have no splits."""
    return SpecError(
        f"--split {split}: {path!r} has no splits. Only a dataset that `energon prepare` has prepared has them, a "
        f"directory with {META}; name such directories only, or leave out --split"
    )
