"""Options of how a set is opened: index, processes, damage that is tolerated, progress. Light to import."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from wdsfs.errors import UsageError
from wdsfs.host import default_jobs

if TYPE_CHECKING:
    from wdsfs.cluster.engines import Workers
    from wdsfs.errors import ShardError
    from wdsfs.tree.shard_set import ShardSet

# Returns all that is wrong in a set, but for the shards that cannot be read.
Findings = Callable[["ShardSet", "Mapping[bytes, ShardError]"], Iterable[str]]


class Tolerance(NamedTuple):
    """The damage that is tolerated: shards that cannot be read may be missing (`--allow-missing`), or nothing may
    be wrong at all (`--strict`, with the function that finds what is).

    `is_option` is False where neither option is for the user to give: what shows a mount, or shows or undoes its
    changes, makes no set of its own.
    """

    allow_missing: bool = False
    strict: Findings | None = None
    is_option: bool = True

    def check(self) -> Tolerance:
        """Raises UsageError where both are asked for."""
        if self.allow_missing and self.strict:
            raise UsageError("--allow-missing and --strict contradict each other")
        return self


class Progress:
    """Is told how far the work on a set is; this one shows nothing."""

    @contextmanager
    def indexing(self, shards: int) -> Iterator[Callable[[int], None]]:
        """A block that indexes shards; it gets a function to be called with the members of each that is done."""
        yield lambda _: None

    @contextmanager
    def composing(self, shards: int) -> Iterator[Callable[[int], None]]:
        """A block that makes the records of a view; it gets a function to be called with how many are done."""
        yield lambda _: None


class Opening(NamedTuple):
    """How a set is opened: the place of the index, the processes that build it, the damage tolerated, the
    progress.

    `workers` are those of a cluster. With `quiet` no hints are logged.
    """

    index_dir: Path | None = None
    jobs: int = default_jobs()
    quiet: bool = False
    tolerance: Tolerance = Tolerance()
    workers: Workers | None = None
    progress: Progress = Progress()
