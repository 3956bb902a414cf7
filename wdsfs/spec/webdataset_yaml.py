"""Reads the shards that a YAML spec of the webdataset library names.

Source: `shardlist.py`, `MultiShardSample.parse_spec`. docs/reference/formats.md has the fields.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

from wdsfs.door import urls
from wdsfs.errors import SpecError
from wdsfs.spec import objects
from wdsfs.spec.located import Field
from wdsfs.spec.spec_words import Word, expand_field, listed_path, parent_of

log = logging.getLogger(__name__)


def read_shards(top: Field) -> Iterator[Word]:
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
