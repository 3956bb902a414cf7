"""Options of how shards are read: which members a tar has, and which of them form a sample.

All shards of a set are read alike. In a plain reading a tar ends at its first end mark and a sample is a run of
adjacent members, as for every reader of the format; both options are for tars of which such a reader sees only a
part. `scan.scan` and `member_draft.py` apply them; the index keeps a record under the shard's path and
`Reading.mark`.
"""

from __future__ import annotations

from typing import NamedTuple


class Reading(NamedTuple):
    """`ignore_zeros`: a tar goes on after end marks. `group_by_key`: a sample has all members of its key."""

    ignore_zeros: bool = False
    group_by_key: bool = False

    @property
    def is_plain(self) -> bool:
        return self == PLAIN

    @property
    def arguments(self) -> list[str]:
        """The command line options that select this reading."""
        return ["--ignore-zeros"] * self.ignore_zeros + ["--group-by-key"] * self.group_by_key

    def marks(self) -> list[int] | None:
        """Return a new list for `scan.scan`, which reads on after end marks if it gets one; else None."""
        return [] if self.ignore_zeros else None

    @property
    def mark(self) -> bytes:
        """The part of a record's key after the path of the shard; empty for a plain reading."""
        return b"" if self.is_plain else b"\0" + " ".join(self.arguments).encode()


PLAIN = Reading()
