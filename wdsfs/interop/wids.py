"""The index that wids reads, as bytes, and a check for samples that wids reads differently.

Opens no file: `export` writes the index where wids looks for it. docs/reference/formats.md has the format.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from wdsfs import names
from wdsfs.names import readable
from wdsfs.storage.source import TarBytes, pread, size_of
from wdsfs.tar import headers, scan, streams
from wdsfs.tar.problems import Problems

# `splitname` of wids: the first dot after the last slash ends the key; if there is none, one in a folder does.
_WIDS_KEY = re.compile(rb"^((?:.*/)?.*?)(\..*)$")


class WidsShard(NamedTuple):
    """A row of a wids index: where the shard is, its samples, its size in bytes, its MD5 if that was computed."""

    url: str
    samples: int
    size: int
    md5: str | None = None


def wids_index(shards: Sequence[WidsShard], name: str | None = None) -> bytes:
    """Return the index of a set for wids: JSON with the keys of `widsindex create`, in the order of the set.

    The reader takes a relative URL from the directory of the index, and looks at `url` and `nsamples` only.

    Source: wids/wids_index.py (main_create), wids/wids_specs.py (check_shards), webdataset 0.2.
    """
    rows: list[dict[str, Any]] = []
    for shard in shards:
        md5 = {} if shard.md5 is None else {"md5sum": shard.md5}
        rows.append({"url": shard.url, **md5, "nsamples": shard.samples, "filesize": shard.size})
    index: dict[str, Any] = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": rows}
    if name is not None:
        index["name"] = name
    return json.dumps(index, indent=2).encode() + b"\n"


class _SeenMember(NamedTuple):
    """A member of a sample as a reader sees it; `first` of its sample."""

    name: bytes
    data: int
    first: bool


def wids_misreading(fd: TarBytes) -> str | None:
    """Return where wids would find other samples than wdsfs in the shard open at `fd`; None if nowhere.

    wids knows headers of 512 bytes only: no ustar prefix, no long names of GNU or PAX, no numbers but octal ones;
    and it makes samples of dotfiles and `__meta__` members. Its sample numbers are off from there on.

    Raises OSError.

    Source: wids/wids_mmtar.py (MMIndexedTar), wids/wids.py (group_by_key, splitname), webdataset 0.2.
    """
    if streams.compression(pread(fd, headers.BLOCK, 0)) is not None:
        return "it is compressed, and wids reads plain tars only"
    theirs = _seen_by_wids(fd)
    for ours in itertools.chain(_seen_by_us(fd), (None,)):
        try:
            their = next(theirs, None)
        except (ValueError, UnicodeDecodeError) as error:
            where = f"at {readable(ours.name)}" if ours is not None else "after the last sample"
            return f"{where} wids fails ({error})"
        if their == ours:
            continue
        if their is None or ours is None or their.data != ours.data:
            first_odd = their if ours is None or (their is not None and their.data < ours.data) else ours
            assert first_odd is not None  # they differ
            takes = "takes" if first_odd is their else "does not take"
            return f"wids {takes} {readable(first_odd.name)} for a member of a sample"
        name = readable(ours.name)
        if their.name != ours.name:
            return f"wids reads the name {name} as {readable(their.name)}"
        return f"wids takes {name} for {'the first' if their.first else 'a later'} member of a sample"
    return None


def _seen_by_us(fd: TarBytes) -> Iterator[_SeenMember]:
    last = None
    for chunk in scan.scan(fd, Problems()):
        for name, kind, data in zip(chunk.names, chunk.types.tolist(), chunk.datas.tolist(), strict=True):
            split = names.split(name) if kind == headers.REGULAR else None
            if split is not None:
                key = split.folder + split.stem
                yield _SeenMember(name, data, key != last)
                last = key


def _seen_by_wids(fd: TarBytes) -> Iterator[_SeenMember]:
    """Yield the members that wids sees. Raises ValueError, UnicodeDecodeError where wids does."""
    end, position, last = size_of(fd), 0, None
    while position < end:
        header = pread(fd, headers.BLOCK, position)
        name, digits = header[:100].strip(b"\0"), header[124:136].decode().strip("\0")
        name.decode()
        size = int(digits, 8) if digits else 0
        if name and name != b"././@PaxHeader" and header[156:157] in (b"0", b"\0") and b"." in name:
            match = _WIDS_KEY.match(name)
            if match is None:
                raise ValueError(f"it takes no key from {readable(name)}")
            yield _SeenMember(name, position + headers.BLOCK, match[1] != last)
            last = match[1]
        if not digits:
            return
        position += headers.BLOCK + (size + headers.BLOCK - 1) // headers.BLOCK * headers.BLOCK
