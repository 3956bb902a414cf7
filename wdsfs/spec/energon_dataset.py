"""Reads the shards of Energon's datasets: directories with `.nv-meta`, and metadatasets, YAML that blends them.

Sources: Megatron-Energon, `flavors/webdataset/metadata.py`; `MetadatasetV2` (`metadataset_v2.py`), `Metadataset`
(`metadataset.py`). docs/reference/formats.md has the fields. Metadata that another user has written names nothing
outside of its dataset: a user who names a directory does not trust the files in it. `parts_of` lists the parts of
a metadataset that a mount cannot follow: weights and repetitions.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from wdsfs import trust
from wdsfs.door import urls
from wdsfs.errors import DeniedObject, SpecError, Unreachable, and_others
from wdsfs.spec import objects
from wdsfs.spec.located import Field, load_file, load_yaml
from wdsfs.spec.spec_words import Word, expand_field, listed_path, path_in

log = logging.getLogger(__name__)

META = ".nv-meta"
INFO = (".info.json", ".info.yaml")  # the first that exists counts; older versions write the second
_SPLIT = ("split.yaml", "split.json")

SUFFIXES = (".yaml", ".yml")
PARTS_MAX = 100_000  # of one metadataset: aliases of YAML repeat a list at no cost
NESTED_MAX = 20  # metadatasets in each other
DEPTH_MAX = 100  # blends and joins in each other
_WEIGHTS = {"datasets": "weight", "blend": "weight", "blend_epochized": "repetitions"}


def dataset_at(directory: str) -> str | None:
    """Return the prepared dataset of a directory: itself, the parent of a .nv-meta, None for any other."""
    parent, base = os.path.split(directory.rstrip("/"))
    if base == META:
        return parent
    try:
        return directory if _first_existing(directory, INFO) else None
    except DeniedObject:  # the listing of the directory reports what is wrong
        return None
    except Unreachable as error:
        raise objects.not_listed(error) from None


def read_shards(dataset: str, split: str | None, split_file: str | None = None) -> Iterator[Word]:
    """Yield the shards of a prepared dataset, of one split or all, except for shards that its split file excludes.

    Semantics decision: the order is that of the split, and without a split that of `.info.json`, as in Energon.
    Without --split the shards are the whole dataset: all that are not excluded, also shards in no split.

    Raises SpecError, UnreadableShard.
    """
    info = _first_existing(dataset, INFO)
    if info is None:
        raise SpecError(f"{os.path.join(dataset, META)!r} has no {INFO[0]}: `energon prepare` writes it")
    shards = dict(load_file(info).need("shard_counts").named())
    split_file = split_file or _first_existing(dataset, _SPLIT)
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

    Semantics decision: a user who may write in a directory of sets cannot make a mount by root show files
    elsewhere, neither by a link nor by a name. Raises SpecError.
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
                unknown.append(f"{entry}: {str(text)!r}")
    if unknown:
        # No error, as for Energon: a shard may have left the dataset. But it may also be a typing error.
        named = f"{unknown[0]}{and_others(len(unknown))}"
        log.warning("%s names no shard of the dataset and excludes nothing", named)
    return excluded


def _first_existing(dataset: str, names: tuple[str, ...]) -> str | None:
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


# -- metadatasets --------------------------------------------------------------------------------------------


class DatasetPart(NamedTuple):
    """A prepared dataset in a metadataset: its directory, split, and split file if it is not the usual one.

    `weight` is its weight in the split `of` of the metadataset, as written: `2`, or `2 repetitions`; in a nested
    metadataset, all weights on the way.
    """

    path: str
    split: str
    split_file: str | None
    of: str
    weight: str
    where: str  # the place in the metadataset

    def as_json(self) -> dict[str, Any]:
        """Return the part for a report."""
        return {"split": self.of, "dataset": self.path, "part": self.split, "weight": self.weight}


def is_metadataset(top: Field) -> bool:
    """Return True for the content of a metadataset, False for that of any other file that names shards."""
    return top.file.endswith(SUFFIXES) and top.is_object() and top.get("splits") is not None


def read_part_shards(top: Field, split: str | None) -> Iterator[Word]:
    """Yield the shards that a metadataset names.

    Semantics decision: a shard that several parts name is there once, in its first place, whatever their weights;
    without `--split` those of all splits of the metadataset. Raises SpecError, UnreadableShard.
    """
    seen: set[str] = set()
    parts = dict[tuple[str, str, str | None], str]()
    for path, part, split_file, *_, where in _parts(top, split):
        parts.setdefault((path, part, split_file), where)
    for named, where in parts.items():
        try:
            words = list(read_shards(*named))
        except SpecError as error:
            raise type(error)(f"{where}: {error}") from None
        for word in words:
            place = word.path if objects.is_url(word.path) else os.path.abspath(word.path)
            if place not in seen:
                seen.add(place)
                yield word


def parts_of(path: str, split: str | None) -> list[DatasetPart]:
    """Return the datasets of a metadataset with their weights; none for another file. Raises SpecError."""
    is_yaml = path.endswith(SUFFIXES) and os.path.isfile(path)
    if not is_yaml or os.path.basename(os.path.dirname(path)) == META:
        return []
    top = load_yaml(path)
    return list(_parts(top, split)) if is_metadataset(top) else []


def _parts(top: Field, split: str | None) -> Iterator[DatasetPart]:
    reader = _Reader()
    for name, part in top.need("splits").named():
        if split in (None, name):
            yield from reader.node(part, name, _Way(name, (), (), 0))
    if not reader.count:
        known = ", ".join(repr(name) for name, _ in top.need("splits").named())
        raise top.wrong(
            "names no datasets" if split is None else f"no split is called {split!r}; there are: {known}"
        )


class _Way(NamedTuple):
    """The way to a part: the split of the outermost metadataset, the files around, weights and depth so far."""

    of: str
    inside: tuple[str, ...]
    weights: tuple[str, ...]
    depth: int


class _Reader:
    """Reads the parts of a metadataset, up to a number of them."""

    def __init__(self) -> None:
        self.count = 0

    def node(self, node: Field, split: str, way: _Way) -> Iterator[DatasetPart]:
        """Yield the parts of a split, a blend, a join or a reference."""
        self.count += 1
        if self.count > PARTS_MAX:
            raise node.wrong(f"too many parts: the limit is {PARTS_MAX:,}")
        if way.depth > DEPTH_MAX:  # an alias of YAML may lead to a blend that it is in
            raise node.wrong(f"nested more than {DEPTH_MAX} deep")
        if node.get("subset") is not None:
            log.warning("%s: the subset is not followed; all samples of these shards are shown", node)
        own = node.get("split_part")
        split = split if own is None else own.text()
        kinds = [kind for kind in (*_WEIGHTS, "join", "path") if node.get(kind) is not None]
        if len(kinds) > 1:
            raise node.wrong(f"has {' and '.join(map(repr, kinds))}, of which Energon reads one")
        if kinds in ([], ["path"]):
            yield from self._reference(node, split, way)
            return
        parts = node.need(kinds[0])
        items = (
            [item for _, item in parts.named()] if parts.is_object() and kinds == ["join"] else [*parts.items()]
        )
        if not items:
            raise parts.wrong("is empty: it names no dataset")
        for item in items:
            weight = (_weight(item, _WEIGHTS[kinds[0]]),) if kinds[0] in _WEIGHTS else ()
            yield from self.node(item, split, way._replace(weights=(*way.weights, *weight), depth=way.depth + 1))

    def _reference(self, node: Field, split: str, way: _Way) -> Iterator[DatasetPart]:
        path = path_in(node.file, node.need("path"))
        if path.endswith(".jsonl"):
            raise node.wrong("a JSONL dataset of Energon has no shards")
        if path.endswith(SUFFIXES) and objects.is_file(path):
            yield from self._nested(path, node, split, way)
            return
        file = node.get("split_config")
        split_file = None if file is None else os.path.join(path, META, _name_of(file))
        weight = " x ".join(filter(None, way.weights)) or "1"
        yield DatasetPart(path, split, split_file, way.of, weight, str(node))

    def _nested(self, path: str, node: Field, split: str, way: _Way) -> Iterator[DatasetPart]:
        inside = (*way.inside, os.path.realpath(node.file))
        if os.path.realpath(path) in inside or len(inside) > NESTED_MAX:
            raise node.wrong(f"the metadataset {path!r} includes itself, or is nested more than {NESTED_MAX} deep")
        top = load_yaml(path)
        if not is_metadataset(top):
            raise node.wrong(f"{path!r} is not a metadataset: it has no 'splits'")
        yield from self.node(top.need("splits").need(split), split, way._replace(inside=inside))


def _weight(item: Field, unit: str) -> str:
    """Return a weight as it is shown. Raises SpecError if it is not a number."""
    field = item.get(unit)
    text = "1" if field is None else field.text()
    try:
        if not 0 <= float(text) < float("inf"):
            raise ValueError(text)
    except ValueError:
        raise item.wrong(f"the {unit} is not a number from 0 on: {text[:40]!r}") from None
    return text if unit == "weight" else f"{text} repetitions"


def _name_of(file: Field) -> str:
    """Return the name of a file in the directory of a dataset. Raises SpecError for one that leads elsewhere."""
    name = str(file.text())
    if "/" in name or "\0" in name or not name.endswith((*SUFFIXES, ".json")):
        raise file.wrong(f"{name!r} is not the name of a split file in {META}")
    return name
