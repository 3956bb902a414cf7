"""A shard by its path, wherever it is: what it is now, and opening it.

The path of a file is absolute, that of a remote shard is its URL as it is shown. An open shard is a descriptor of
the file, or a `RemoteTar`. A file may be changed while it is open, which its fingerprint shows; what is read of a
`RemoteTar` always belongs to one object.

`remote/shards.py` is imported late: it takes as long to load as the rest of a small command, and most sets have no
URL.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeAlias

from wdsfs.storage import source
from wdsfs.storage.identity import Fingerprint

if TYPE_CHECKING:
    from wdsfs.remote.client import RemoteTar

OpenShard: TypeAlias = "int | RemoteTar"


def is_remote(path: bytes) -> bool:
    """True for the path of a remote shard; paths of files are absolute."""
    return not path.startswith(b"/")


def look(path: bytes) -> Fingerprint:
    """Return the fingerprint of a shard now; of a remote one as its store was asked last.

    Raises MissingShard, UnreadableShard.
    """
    if not is_remote(path):
        return Fingerprint.at(path)
    from wdsfs.remote import shards  # late: see the head of this module

    return shards.look(path)


def open_shard(path: bytes) -> OpenShard:
    """Open a shard; `source.close` closes it. Raises MissingShard, UnreadableShard."""
    if not is_remote(path):
        return source.open_shard(path)
    from wdsfs.remote import shards  # late: see the head of this module

    return shards.open_shard(path)


def renewed(path: bytes) -> Fingerprint:
    """As `look`, but a store is asked. Raises ShardError."""
    if not is_remote(path):
        return Fingerprint.at(path)
    from wdsfs.remote import shards  # late: see the head of this module

    return shards.look_again(path)


def fingerprint_of(shard: OpenShard) -> Fingerprint:
    """Return the fingerprint of an open shard now. Raises OSError."""
    return Fingerprint.of(os.fstat(shard)) if isinstance(shard, int) else shard.fingerprint


def failure_of(shard: OpenShard) -> str:
    """Return how the command failed whose output an open shard is; "" for all others."""
    return "" if isinstance(shard, int) else shard.failure
