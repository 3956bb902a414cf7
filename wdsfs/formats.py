"""The indexes that DALI and wids read, as bytes, written from records. Pure functions: nothing here opens a
file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from wdsfs.errors import ExportError
from wdsfs.record import STRAY, Record


def dali_index(record: Record) -> Iterator[bytes]:
    """The index of a shard for DALI's `readers.webdataset`, piece by piece: `v1.2 N`, then a line for each sample.

    Raises ExportError when there are no samples. Source: dali/operators/reader/loader/webdataset_loader.cc.
    """
    if not record.samples:
        raise ExportError("the shard has no samples, and DALI reads no shard without")
    yield b"v1.2 %d\n" % record.samples
    entries = np.flatnonzero((record.array("entry.flags") & STRAY) == 0)
    heads = record.array("member.head")[record.array("entry.member")[entries]]
    for entry in entries[np.argsort(heads, kind="stable")].tolist():
        words = []
        for member in record.entry_members(entry):
            extension = record.extension(member)
            name = record.entry_path(entry) + b"." + extension
            words.append(b"%b %d %d %b" % (extension, *record.extent(member), name))
        yield b" ".join(words) + b"\n"


class WidsShard(NamedTuple):
    """A row of a wids index: where the shard is, its samples, its size in bytes, its MD5 if that was computed."""

    url: str
    samples: int
    size: int
    md5: str | None = None


def wids_index(shards: Sequence[WidsShard], name: str | None = None) -> bytes:
    """The index of a set for wids, in the order of the set. Source: wids/wids_index.py, webdataset 0.2."""
    rows: list[dict[str, Any]] = []
    for one in shards:
        md5 = {} if one.md5 is None else {"md5sum": one.md5}
        rows.append({"url": one.url, **md5, "nsamples": one.samples, "filesize": one.size})
    index: dict[str, Any] = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": rows}
    if name is not None:
        index["name"] = name
    return json.dumps(index, indent=2).encode() + b"\n"
