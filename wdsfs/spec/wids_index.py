"""Reads the shards that an index of wids names (`*.json`), as wids of the webdataset library 0.2.x does.

Source: `wids_specs.py`. docs/reference/formats.md has the fields.
"""

from __future__ import annotations

from collections.abc import Iterator

from wdsfs.spec.located import Field, load_json
from wdsfs.spec.spec_words import Word, listed_path, parent_of


def read_shards(top: Field) -> Iterator[Word]:
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
