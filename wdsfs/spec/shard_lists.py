"""Reads the paths of shards, in order, from files of other tools: wids, webdataset's YAML, Energon.

| file | read as by |
|---|---|
| wids index (`*.json`) | wids of the webdataset library 0.2.x: `wids_specs.py` |
| webdataset's YAML spec | the webdataset library: `shardlist.py`, `MultiShardSample.parse_spec` |
| portable index (`*.wdsidx`) | `spec/index_file.py` |
| prepared Energon dataset (a directory with `.nv-meta`) | Megatron-Energon: `flavors/webdataset/metadata.py` |

docs/reference/formats.md has the fields. Relative paths in a file are below the directory of the file, not below
the working directory. A shard may lie anywhere: a file is as trustworthy as its author. But a file at a URL names
nothing of this machine, and `.nv-meta` of another user nothing outside of its dataset: who names a directory
does not name that file. `spec/expand.py` checks if the shards exist.
"""

from __future__ import annotations

import logging
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import NamedTuple

from wdsfs import trust
from wdsfs.door import urls
from wdsfs.errors import DeniedObject, SpecError, Unreachable, and_others
from wdsfs.spec import braces, dependencies, index_file, objects
from wdsfs.spec.located import Field, load_json, load_yaml

log = logging.getLogger(__name__)

SUFFIXES = (".json", ".yaml", ".yml")  # of files that are read as lists of shards
META = ".nv-meta"

_INFO = (".info.json", ".info.yaml")  # the first that exists counts; older versions write the second
_SPLIT = ("split.yaml", "split.json")
_ELSEWHERE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|file:|pipe:|-$")
NOT_READ = f"{{!r}} is neither a path nor a URL that wdsfs reads ({', '.join(sorted(urls.SCHEMES))}, file)"
_FILE_URL = re.compile(r"file:(?://(?=/)|(?!//))")


class Word(NamedTuple):
    """One path that a spec names, of a file or a directory.

    `origin` is its place, if that is not the command line: `list.txt:3`, or a Field. `samples` is the number of
    samples according to the file that names it, `without` the keys of samples to leave out. `index_file` is the
    portable index that names it.
    """

    path: str
    origin: str | Field = ""
    samples: int | None = None
    without: frozenset[bytes] = frozenset()
    index_file: str = ""

    @property
    def shown(self) -> str:
        """The text for error messages."""
        return f"{self.path!r} ({self.origin})" if self.origin else repr(self.path)


def without_scheme(text: str) -> str:
    """Return the path of a `file:` URL without a host, as the webdataset library and wids do; else the text."""
    scheme = _FILE_URL.match(text)
    return text if scheme is None else urls.local(text[scheme.end() :])


def is_elsewhere(text: str) -> bool:
    """Return True for what the webdataset library reads, but wdsfs does not."""
    return _ELSEWHERE.match(text) is not None and not urls.is_url(text)


def words_of(path: str, split: str | None) -> Iterator[Word]:
    """Return the shards that a JSON or YAML file names. Raises SpecError, UnreadableShard."""
    directory, name = os.path.split(path)
    dataset, above = os.path.split(directory)
    if above == META:
        return energon(dataset, split, None if name in _INFO else path)
    if split is not None:
        raise without_splits(path, split)
    words = _wids(load_json(path)) if path.endswith(".json") else _webdataset(load_yaml(path))
    return _some(words, path)


def _some(words: Iterator[Word], path: str) -> Iterator[Word]:
    """Yield the words; raise SpecError if there is none."""
    first = next(words, None)
    if first is None:
        raise SpecError(f"{path}: names no shards")
    yield first
    yield from words


def without_splits(path: str, split: str) -> SpecError:
    """Return the error for `--split` with shards that have no splits."""
    return SpecError(
        f"--split {split}: {path!r} has no splits. Only a dataset that `energon prepare` has prepared has them, a "
        f"directory with {META}; name such directories only, or leave out --split"
    )


def _path(base: str, text: str, place: Field) -> str:
    """Return the path that a text in a file means. A relative one is below `base`, which is empty or ends in /.

    Raises SpecError for a text that cannot be a path.
    """
    try:
        objects.refuse_command(text, place.file)
    except SpecError as error:
        raise place.wrong(str(error)) from None
    if is_elsewhere(text := without_scheme(text)):
        raise place.wrong(NOT_READ.format(objects.without_secrets(str(text))))
    if not text or "\0" in text:
        raise place.wrong(f"a NUL in the shard name {str(text)!r}" if text else "an empty shard name")
    if not text.isascii():
        try:
            os.fsencode(text)
        except UnicodeEncodeError:
            raise place.wrong(f"the shard name {str(text)!r} cannot be encoded for the file system") from None
    path = text if text.startswith("/") or urls.is_url(text) else base + text
    try:
        objects.refuse_local(path, place.file)
        return objects.path_of(path) if urls.is_url(path) else path
    except SpecError as error:
        raise place.wrong(str(error)) from None


def path_in(file: str, field: Field) -> str:
    """Return the path that a field of a file means, below the directory of the file. Raises SpecError."""
    return _path(_base(file), field.text(), field)


def _base(path: str) -> str:
    """Return the directory of a file, with its last slash; empty for the current one."""
    return path[: path.rfind("/") + 1]


def _braces(text: str, place: Field) -> Iterator[str]:
    try:
        return braces.expand(text)
    except SpecError as error:
        raise place.wrong(str(error)) from None


# -- wids ----------------------------------------------------------------------------------------------------


def _wids(top: Field) -> Iterator[Word]:
    """Yield the shards of a wids index, version 1. As in wids, the `base` at the top is not used."""
    if top.is_object() and (top.get("split_parts") or top.get("shard_counts")):
        raise _not_in_meta(top)
    version = top.get("wids_version")
    if version is None:
        raise top.wrong("is not a list of shards: an index of wids has a 'wids_version'")
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
    """Yield the shards of one of the `datasets`, which may be in a file of its own."""
    source = component.get("source_url")
    if source is not None:
        if component.get("shardlist") is not None:
            raise component.wrong("has both a source_url and a shardlist: leave one out")
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
    for shard in shards.items():
        url = shard.need("url")
        yield Word(_path(base, url.text(), url), url, shard.need("nsamples").number())


# -- webdataset's YAML ---------------------------------------------------------------------------------------


def _webdataset(top: Field) -> Iterator[Word]:
    """Yield the shards of a webdataset spec: prefix + bucket / shard, variables, `~` and braces expanded.

    Semantics decision: `choose` and `resample` are not followed. The library draws other shards in every epoch, so
    each of them can come up; a mount has no epochs and shows all of them.
    """
    if top.is_object() and top.get("split_parts"):
        raise _not_in_meta(top)
    top.allow(("prefix", "datasets", "buckets"))
    base = _base(top.file)
    prefix_field = top.get("prefix")
    prefix = _expanded(prefix_field) if prefix_field else ""
    for dataset in top.need("datasets").items():
        dataset.allow(("buckets", "name", "shards", "resample", "choose"))
        for drawn in filter(None, (dataset.get("resample"), dataset.get("choose"))):
            log.info("%s: a mount has no epochs to draw shards for; all shards are shown", drawn.where)
        buckets = dataset.get("buckets") or top.get("buckets")
        bucket = _bucket(buckets)
        first = next(buckets.texts(), None) if buckets else None
        for shards in dataset.need("shards").texts():
            typed = prefix_field or first or shards
            for shard in _braces(_expanded(shards), shards):
                text = prefix + os.path.join(bucket, shard)
                _refuse_hidden_command(text, typed)
                yield Word(_path(base, text, shards), shards)


def _refuse_hidden_command(text: str, typed: Field) -> None:
    try:
        objects.refuse_hidden_command(text, typed.text())
    except SpecError as error:
        raise typed.wrong(str(error)) from None


def _bucket(buckets: Field | None) -> str:
    names = [] if buckets is None else [_expanded(bucket) for bucket in buckets.texts()]
    if buckets is not None and len(names) > 1:
        raise buckets.wrong("more than one bucket: the webdataset library takes one; make a dataset of each")
    return names[0] if names else ""


def _expanded(field: Field) -> str:
    text = os.path.expanduser(os.path.expandvars(field.text()))
    if text != field.text() and urls.is_url(field.file):  # a variable may be a secret, which its server would get
        raise field.wrong(f"{str(field.text())!r}: variables of this machine are not for a list at a URL")
    return text


# -- portable indexes ----------------------------------------------------------------------------------------


def portable(path: str, base: str | None) -> list[Word]:
    """Return the shards that a portable index lists; relative ones are below `base`.

    Raises SpecError, ShardError.
    """
    dependencies.note_file(path)
    file = index_file.load(path)
    return [Word(shard, file.path, index_file=file.path) for shard in file.paths(base)]


# -- prepared Energon datasets -------------------------------------------------------------------------------


def dataset_at(directory: str) -> str | None:
    """Return the prepared dataset of a directory: itself, the parent of a .nv-meta, None for any other."""
    parent, base = os.path.split(directory.rstrip("/"))
    if base == META:
        return parent
    try:
        return directory if _first(directory, _INFO) else None
    except DeniedObject:  # what is wrong is said of the directory, when it is listed
        return None
    except Unreachable as error:
        raise objects.not_listed(error) from None


def energon(dataset: str, split: str | None, split_file: str | None = None) -> Iterator[Word]:
    """Yield the shards of a prepared dataset, of one split or all, without those that its split file excludes.

    Semantics decision: the order is that of the split, without one that of `.info.json`, as in Energon. Without
    --split these are all shards that are not excluded, also those in no split: this is the whole dataset.

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
            path = _path(base, name, place)
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
        for name in _braces(names.text(), names):
            if name not in shards:
                raise names.wrong(
                    f"{name!r} is not a shard of {_INFO[0]}; `energon prepare` writes both files again"
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
        for text in _braces(entry.text(), entry):
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


def _load(path: str) -> Field:
    return load_json(path) if path.endswith(".json") else load_yaml(path)


def _not_in_meta(top: Field) -> SpecError:
    return top.wrong(f"a file of Energon belongs into the directory {META} of its dataset: name that directory")
