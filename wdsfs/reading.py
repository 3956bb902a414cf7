"""How shards are read: the options that decide which members a tar has, and which of them are a sample.

All shards of a set are read alike. Plainly, a tar ends at its first end mark and a sample is a run of adjacent
members, as for every reader of the format; both options are for tars that such a reader does not see whole. What
they do to the bytes is in `scan.scan` and `record_builder.py`; a record is kept under the shard's path and
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
        """The options of a command that read so."""
        return ["--ignore-zeros"] * self.ignore_zeros + ["--group-by-key"] * self.group_by_key

    def marks(self) -> list[int] | None:
        """A new list for `scan.scan`, which reads on after end marks where it gets one."""
        return [] if self.ignore_zeros else None

    @property
    def mark(self) -> bytes:
        """What follows the path of a shard in the key of its record: nothing for a plain reading."""
        return b"" if self.is_plain else b"\0" + " ".join(self.arguments).encode()


PLAIN = Reading()
