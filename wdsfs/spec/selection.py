"""The selected part of a set, and how its shards are read: options of all commands that take SHARDS."""

from __future__ import annotations

from typing import NamedTuple

from wdsfs.names import PLAIN, Reading


class Slice(NamedTuple):
    """One of `num_shards` equal parts of a set, counted from 0; the words are DALI's.

    REQUIRES: 0 <= shard_id < num_shards.
    """

    shard_id: int
    num_shards: int


class Selection(NamedTuple):
    """The part of the set that is wanted, and how it is read: `expand(specs, *selection)`."""

    split: str | None = None
    slice: Slice | None = None
    reading: Reading = PLAIN
    allow_missing: bool = False
    base: str | None = None  # where the shards of a portable index are, if not beside it

    @property
    def arguments(self) -> list[str]:
        """The command line options that make the same selection among the shards that exist."""
        arguments = [] if self.split is None else ["--split", self.split]
        if self.slice is not None:
            arguments += ["--shard-id", str(self.slice.shard_id), "--num-shards", str(self.slice.num_shards)]
        if self.base is not None:
            arguments += ["--base", self.base]
        return arguments + self.reading.arguments
