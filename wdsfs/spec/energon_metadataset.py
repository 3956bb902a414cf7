"""Energon's metadatasets: YAML files that blend and join prepared datasets, read as the shards of their parts.

The fields are those of Megatron-Energon: `MetadatasetV2` (`metadataset_v2.py`), `Metadataset` (`metadataset.py`).
What a mount cannot follow, weights and repetitions, is listed by `parts_of`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from wdsfs.errors import SpecError
from wdsfs.spec import energon_dataset, objects
from wdsfs.spec.located import Field, load_yaml
from wdsfs.spec.spec_words import Word, path_in

log = logging.getLogger(__name__)

SUFFIXES = (".yaml", ".yml")
PARTS_MAX = 100_000  # of one metadataset: aliases of YAML repeat a list at no cost
NESTED_MAX = 20  # metadatasets in each other
_WEIGHTS = {"datasets": "weight", "blend": "weight", "blend_epochized": "repetitions"}


class DatasetPart(NamedTuple):
    """A prepared dataset in a metadataset: its directory, split, and split file if it is not the usual one.

    `weight` is its weight in the split `of` of the metadataset, as written: `2`, or `2 repetitions`; in a nested
    metadataset all weights on the way.
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
            words = list(energon_dataset.read_shards(*named))
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
    if not is_yaml or os.path.basename(os.path.dirname(path)) == energon_dataset.META:
        return []
    top = load_yaml(path)
    return list(_parts(top, split)) if is_metadataset(top) else []


def _parts(top: Field, split: str | None) -> Iterator[DatasetPart]:
    reader = _Reader()
    for name, part in top.need("splits").named():
        if split in (None, name):
            yield from reader.node(part, name, _Way(name, (), ()))
    if not reader.count:
        known = ", ".join(repr(name) for name, _ in top.need("splits").named())
        raise top.wrong(
            "names no datasets" if split is None else f"no split is called {split!r}; there are: {known}"
        )


class _Way(NamedTuple):
    """The way to a part: the split of the outermost metadataset, the files around, the weights so far."""

    of: str
    inside: tuple[str, ...]
    weights: tuple[str, ...]


class _Reader:
    """Reads the parts of a metadataset, up to a number of them."""

    def __init__(self) -> None:
        self.count = 0

    def node(self, node: Field, split: str, way: _Way) -> Iterator[DatasetPart]:
        """Yield the parts of a split, a blend, a join or a reference."""
        self.count += 1
        if self.count > PARTS_MAX:
            raise node.wrong(f"too many parts: the limit is {PARTS_MAX:,}")
        if node.get("subset") is not None:
            log.warning("%s: the subset is not followed; all samples of these shards are shown", node.where)
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
            yield from self.node(item, split, way._replace(weights=(*way.weights, *weight)))

    def _reference(self, node: Field, split: str, way: _Way) -> Iterator[DatasetPart]:
        path = path_in(node.file, node.need("path"))
        if path.endswith(".jsonl"):
            raise node.wrong("a JSONL dataset of Energon has no shards")
        if path.endswith(SUFFIXES) and objects.is_file(path):
            yield from self._nested(path, node, split, way)
            return
        file = node.get("split_config")
        split_file = None if file is None else os.path.join(path, energon_dataset.META, _name_of(file))
        weight = " x ".join(filter(None, way.weights)) or "1"
        yield DatasetPart(path, split, split_file, way.of, weight, node.where)

    def _nested(self, path: str, node: Field, split: str, way: _Way) -> Iterator[DatasetPart]:
        inside = (*way.inside, os.path.realpath(node.file))
        if os.path.realpath(path) in inside or len(inside) > NESTED_MAX:
            raise node.wrong(f"the metadataset {path!r} includes itself, or is nested more than {NESTED_MAX} deep")
        top = load_yaml(path)
        if not is_metadataset(top):
            raise node.wrong(f"{path!r} is not a metadataset: it has no 'splits'")
        yield from self.node(top.need("splits").need(split), split, way._replace(inside=inside))


def _weight(item: Field, unit: str) -> str:
    """Return a weight as it is shown. Raises SpecError for what is not a number."""
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
        raise SpecError(f"{file.where}: {name!r} is not the name of a split file in {energon_dataset.META}")
    return name
