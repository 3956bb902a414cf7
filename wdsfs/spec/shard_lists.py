"""Files of other tools that name shards -> words: the paths that stand in them, in their order.

| file | read as by |
|---|---|
| wids index (`*.json`) | wids of the webdataset library 0.2.x: `wids_specs.py` |
| webdataset's YAML spec | the webdataset library: `shardlist.py`, `MultiShardSample.parse_spec` |
| prepared Energon dataset (a directory with `.nv-meta`) | Megatron-Energon: `flavors/webdataset/metadata.py` |

docs/format.md has the fields. Relative paths in a file are below the directory of the file, whoever reads it
from wherever. Where a shard lies is not restricted: a file is as trustworthy as who wrote it. Whether a shard is
there is for `spec/expand.py` to see.
"""

from __future__ import annotations

import logging
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import NamedTuple

from wdsfs.errors import SpecError
from wdsfs.spec import braces
from wdsfs.spec.located import Field, load_json, load_yaml

log = logging.getLogger(__name__)

SUFFIXES = (".json", ".yaml", ".yml")  # of files that are read for the shards they name
META = ".nv-meta"

_INFO = (".info.json", ".info.yaml")  # the first that is there counts; the second is that of older versions
_SPLIT = ("split.yaml", "split.json")
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*://|file:|pipe:|-$")
_FILE_URL = re.compile(r"file:(?://(?=/)|(?!//))")


class Word(NamedTuple):
    """One path that a spec names, of a file or a directory.

    `origin` is where it stands, if not on the command line: `list.txt:3`, or a Field. `samples` is how many there
    are in it according to the file that names it, `without` the keys of those that are to be left out.
    """

    path: str
    origin: str | Field = ""
    samples: int | None = None
    without: frozenset[bytes] = frozenset()

    @property
    def shown(self) -> str:
        """How an error names it."""
        return f"{self.path!r} ({self.origin})" if self.origin else repr(self.path)


def without_scheme(text: str) -> str:
    """The path of a `file:` URL without a host, as the webdataset library and wids open it; else the text."""
    return _FILE_URL.sub("", text, 1)


def is_elsewhere(text: str) -> bool:
    """Whether this is an address for the webdataset library, and no path."""
    return _ELSEWHERE.match(text) is not None


def words_of(path: str, split: str | None) -> Iterator[Word]:
    """The shards that a JSON or YAML file names. Raises SpecError, UnreadableShard."""
    directory, name = os.path.split(path)
    dataset, above = os.path.split(directory)
    if above == META:
        return energon(dataset, split, None if name in _INFO else path)
    if split is not None:
        raise without_splits(path, split)
    words = _wids(load_json(path)) if path.endswith(".json") else _webdataset(load_yaml(path))
    return _some(words, path)


def _some(words: Iterator[Word], path: str) -> Iterator[Word]:
    """The words; raises SpecError when there is none."""
    first = next(words, None)
    if first is None:
        raise SpecError(f"{path}: names no shards")
    yield first
    yield from words


def without_splits(path: str, split: str) -> SpecError:
    return SpecError(
        f"--split {split}: {path!r} has no splits. Only a dataset that `energon prepare` has prepared has them, a "
        f"directory with {META}; name such directories only, or leave out --split"
    )


def _path(base: str, text: str, place: Field) -> str:
    """The path that a text in a file means. `base`, which relative ones are below, is empty or ends in a slash.

    Raises SpecError for what no path can be.
    """
    if is_elsewhere(text := without_scheme(text)):
        raise place.wrong(f"{str(text)!r} is no path: wdsfs takes paths of files on mounted file systems")
    if not text or "\0" in text:
        raise place.wrong(f"a NUL in the shard name {str(text)!r}" if text else "an empty shard name")
    if not text.isascii():
        try:
            os.fsencode(text)
        except UnicodeEncodeError:
            raise place.wrong(f"the shard name {str(text)!r} cannot be encoded for the file system") from None
    return text if text.startswith("/") else base + text


def _base(path: str) -> str:
    """The directory of a file, with its last slash; empty for the current one."""
    return path[: path.rfind("/") + 1]


def _braces(text: str, place: Field) -> Iterator[str]:
    try:
        return braces.expand(text)
    except SpecError as error:
        raise place.wrong(str(error)) from None


# -- wids ----------------------------------------------------------------------------------------------------


def _wids(top: Field) -> Iterator[Word]:
    """The shards of a wids index, version 1. The `base` at the top is not used: wids does not use it either."""
    if top.is_object() and (top.get("split_parts") or top.get("shard_counts")):
        raise _not_in_meta(top)
    version = top.get("wids_version")
    if version is None:
        raise top.wrong("no index of wids, which has a 'wids_version', and no other list of shards")
    if version.value != 1:
        raise version.wrong("only version 1 is known")
    base = _base(top.file)
    immediate, components = top.get("shardlist"), top.get("datasets")
    if immediate is not None:
        yield from _shardlist(immediate, base)
    if components is not None:
        for component in components.items():
            yield from _component(component, base)


def _component(component: Field, base: str) -> Iterator[Word]:
    """The shards of one of the `datasets`, which may stand in a file of their own."""
    source = component.get("source_url")
    if source is not None:
        if component.get("shardlist") is not None:
            raise component.wrong("has both a source_url and a shardlist: one is needed")
        component = load_json(_path(base, source.text(), source))
        base = _base(component.file)
        for further in (component.get("source_url"), component.get("datasets")):
            if further is not None and further.value:
                raise further.wrong(f"{source.where} refers to this file, and a reference leads one step only")
    own = component.get("base")
    if own is not None:
        base = _path(base, own.text(), own).rstrip("/") + "/"
    yield from _shardlist(component.need("shardlist"), base)


def _shardlist(shards: Field, base: str) -> Iterator[Word]:
    for one in shards.items():
        url = one.need("url")
        yield Word(_path(base, url.text(), url), url, one.need("nsamples").number())


# -- webdataset's YAML ---------------------------------------------------------------------------------------


def _webdataset(top: Field) -> Iterator[Word]:
    """The shards of a webdataset spec: prefix + bucket / shard, variables, `~` and braces expanded.

    Semantics decision: `choose` and `resample` are not followed. The library draws shards anew in every epoch, so
    each of them can come up; a mount has no epochs and shows all of them.
    """
    if top.is_object() and top.get("split_parts"):
        raise _not_in_meta(top)
    top.allow(("prefix", "datasets", "buckets"))
    base = _base(top.file)
    prefix = _expanded(found) if (found := top.get("prefix")) else ""
    for dataset in top.need("datasets").items():
        dataset.allow(("buckets", "name", "shards", "resample", "choose"))
        for drawn in filter(None, (dataset.get("resample"), dataset.get("choose"))):
            log.info("%s: a mount has no epochs to draw shards for; all shards are shown", drawn.where)
        bucket = _bucket(dataset.get("buckets") or top.get("buckets"))
        for shards in dataset.need("shards").texts():
            for shard in _braces(_expanded(shards), shards):
                yield Word(_path(base, prefix + os.path.join(bucket, shard), shards), shards)


def _bucket(buckets: Field | None) -> str:
    found = [] if buckets is None else [_expanded(bucket) for bucket in buckets.texts()]
    if buckets is not None and len(found) > 1:
        raise buckets.wrong("more than one bucket: the webdataset library takes one; make a dataset of each")
    return found[0] if found else ""


def _expanded(field: Field) -> str:
    return os.path.expanduser(os.path.expandvars(field.text()))


# -- prepared Energon datasets -------------------------------------------------------------------------------


def dataset_at(directory: str) -> str | None:
    """The prepared dataset that a directory is or, by the name .nv-meta, is inside of; None for any other."""
    parent, base = os.path.split(directory.rstrip("/"))
    if base == META:
        return parent
    return directory if _first(directory, _INFO) else None


def energon(dataset: str, split: str | None, split_file: str | None = None) -> Iterator[Word]:
    """The shards of a prepared dataset, those of one split or all, less what its split file excludes.

    Semantics decision: the order is that of the split, without one that of `.info.json`, as in Energon. Without
    --split it is every shard that is not excluded, also those that are in no split: this is the whole dataset.

    Raises SpecError, UnreadableShard.
    """
    info = _first(dataset, _INFO)
    if info is None:
        raise SpecError(f"{os.path.join(dataset, META)!r} has no {_INFO[0]}: `energon prepare` writes it")
    shards = dict(_load(info).need("shard_counts").named())
    split_file = split_file or _first(dataset, _SPLIT)
    splits = None if split_file is None else _load(split_file)
    if splits is not None:
        splits.allow(("split_parts", "exclude"))
    if split is None:
        wanted: Iterator[tuple[str, Field]] = iter(shards.items())
    elif splits is None:
        raise SpecError(f"--split {split}: {os.path.join(dataset, META)!r} has no {_SPLIT[0]} and so no splits")
    else:
        wanted = _split_part(splits, split, shards)
    base = os.path.join(dataset, "")
    excluded = _excluded(None if splits is None else splits.get("exclude"), shards)
    found = False
    for name, place in wanted:
        if name not in excluded.shards:
            found = True
            path = _path(base, name, place)
            yield Word(path, place, shards[name].number(), frozenset(excluded.samples.get(name, ())))
    if not found:
        part = "the dataset" if split is None else f"the split {split!r}"
        raise SpecError(f"{part} in {os.path.join(dataset, META)!r} has no shard that is not excluded")


def _split_part(splits: Field, split: str, shards: Collection[str]) -> Iterator[tuple[str, Field]]:
    """The names in a split, and where each stands."""
    parts = splits.need("split_parts")
    part = parts.get(split)
    if part is None:
        known = ", ".join(repr(str(name)) for name, _ in parts.named())
        raise parts.wrong(f"no split is called {split!r}; there are: {known or 'none'}")
    for names in part.items():
        for name in _braces(names.text(), names):
            if name not in shards:
                raise names.wrong(f"{name!r} is no shard of {_INFO[0]}; `energon prepare` writes both anew")
            yield name, names


class _Excluded(NamedTuple):
    shards: set[str]
    samples: defaultdict[str, set[bytes]]  # keys, by shard


def _excluded(exclude: Field | None, shards: Collection[str]) -> _Excluded:
    """What an `exclude` list names: shards, and samples as `shard/key`. Both may have slashes in them."""
    found = _Excluded(set(), defaultdict(set))
    unknown: list[str] = []
    for entry in [] if exclude is None else exclude.items():
        for text in _braces(entry.text(), entry):
            samples = [(shard, key) for shard, key in _cuts(text) if shard in shards]
            for shard, key in samples:
                found.samples[shard].add(key.encode("utf-8", "surrogateescape"))
            if text in shards:
                found.shards.add(text)
            elif not samples:
                unknown.append(f"{entry.where}: {str(text)!r}")
    if unknown:
        # As for Energon no error: a shard may have left the dataset. But it may be a typing error, too.
        more = f" (and {len(unknown) - 1:,} more)" if len(unknown) > 1 else ""
        log.warning("%s%s names no shard of the dataset and excludes nothing", unknown[0], more)
    return found


def _cuts(text: str) -> Iterator[tuple[str, str]]:
    """`a/b/c` -> (`a`, `b/c`), (`a/b`, `c`)."""
    position = text.find("/")
    while position >= 0:
        yield text[:position], text[position + 1 :]
        position = text.find("/", position + 1)


def _first(dataset: str, names: tuple[str, ...]) -> str | None:
    """The first of these files that is there."""
    paths = (os.path.join(dataset, META, name) for name in names)
    return next(filter(os.path.isfile, paths), None)


def _load(path: str) -> Field:
    return load_json(path) if path.endswith(".json") else load_yaml(path)


def _not_in_meta(top: Field) -> SpecError:
    return top.wrong(f"a file of Energon belongs into the directory {META} of its dataset: name that directory")
