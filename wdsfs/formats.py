"""The rule by which this release reads, rebuilds or refuses what another release has written.

Each format has its `Format` in the module that reads it; docs/reference/formats.md has them all.
"""

from __future__ import annotations

from typing import NamedTuple

from wdsfs import __version__


class OtherVersion(ValueError):
    """Something of a version that this release does not read; the text says whose it is, and the way out."""


class Format(NamedTuple):
    """A format on disk or on a socket: the versions that are read, lowest first, of which the last is written.

    `way_out` is what to do about another version; empty for a cache, which is made again.
    """

    name: str
    reads: tuple[int, ...]
    way_out: str = ""

    @property
    def version(self) -> int:
        """The version that this release writes."""
        return self.reads[-1]

    def check(self, version: object) -> int:
        """Return the version if this release reads it. Raises OtherVersion."""
        if type(version) is int and version in self.reads:
            return version
        writer = "a newer wdsfs" if type(version) is int and version > self.version else "another wdsfs"
        reads = " and ".join(map(str, self.reads))
        way_out = f": {self.way_out}" if self.way_out else ""
        raise OtherVersion(
            f"is {self.name} of version {version}, by {writer}; wdsfs {__version__} reads {reads}{way_out}"
        )
