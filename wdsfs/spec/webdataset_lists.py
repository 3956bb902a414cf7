"""Reads the shards that files of the webdataset library name: indexes of wids (`*.json`), and YAML specs.

Sources: `wids_specs.py` of wids 0.2.x; `shardlist.py`, `MultiShardSample.parse_spec`. docs/reference/formats.md
has the fields.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

from wdsfs.door import urls
from wdsfs.errors import SpecError
from wdsfs.spec import objects
from wdsfs.spec.located import Field, load_json
from wdsfs.spec.spec_words import Word, expand_field, listed_path, parent_of

log = logging.getLogger(__name__)


def read_wids_index(top: Field) -> Iterator[Word]:
    """Yield the shards of a wids index, version 1. As in wids, the `base` at the top is not used."""
    version = top.get("wids_version")
    if version is None:
        raise top.wrong("is not a list of shards: an index of wids has a 'wids_version'")
    if version.value != 1:
        raise version.wrong("only version 1 is known")
    base = parent_of(top.file)
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
        component = load_json(listed_path(base, source.text(), source))
        base = parent_of(component.file)
        for further in (component.get("source_url"), component.get("datasets")):
            if further is not None and further.value:
                raise further.wrong(f"{source.where} refers to this file, and a reference leads one step only")
    own = component.get("base")
    if own is not None:
        base = listed_path(base, own.text(), own).rstrip("/") + "/"
    yield from _shardlist(component.need("shardlist"), base)


def _shardlist(shards: Field, base: str) -> Iterator[Word]:
    for shard in shards.items():
        url = shard.need("url")
        yield Word(listed_path(base, url.text(), url), url, shard.need("nsamples").number())


# -- YAML ----------------------------------------------------------------------------------------------------


def read_yaml_spec(top: Field) -> Iterator[Word]:
    """Yield the shards of a webdataset spec: prefix + bucket / shard, variables, `~` and braces expanded.

    Semantics decision: `choose` and `resample` are not followed. The library draws other shards in every epoch, so
    each of them can come up; a mount has no epochs and shows all of them.
    """
    top.allow(("prefix", "datasets", "buckets"))
    base = parent_of(top.file)
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
            for shard in expand_field(_expanded(shards), shards):
                text = prefix + os.path.join(bucket, shard)
                _refuse_hidden_command(text, typed)
                yield Word(listed_path(base, text, shards), shards)


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
