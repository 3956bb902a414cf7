"""The options of a set as plain values, checked: which shards, how they are opened and shown, who owns the files.

Light to import. How they are typed is `cli/view_options.py`; nothing here reads a shard. What a view shows is
`composition.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from wdsfs import wings
from wdsfs.errors import UsageError
from wdsfs.host import default_jobs
from wdsfs.names import PLAIN, Reading
from wdsfs.tree.composition import Composition

if TYPE_CHECKING:
    from wdsfs.cluster_workers import Workers
    from wdsfs.spec.expand import Slice
    from wdsfs.tree.tree import View


class Owner(NamedTuple):
    """Owner and group of all files and directories, and the umask for their modes 0444 and 0555."""

    uid: int = 0
    gid: int = 0
    umask: int = 0


class Tolerance(NamedTuple):
    """The damage that is tolerated.

    Unreadable shards may be missing (`--allow-missing`), or no problem at all is allowed (`--strict`). `is_option`
    is False for commands that have neither option: commands that show a mount, or show or undo its changes, use
    the set of the mount.
    """

    allow_missing: bool = False
    strict: bool = False
    is_option: bool = True

    def check(self) -> Tolerance:
        """Raise UsageError where both are set, NotInstalled if nothing can judge."""
        if self.allow_missing and self.strict:
            raise UsageError("--allow-missing and --strict contradict each other")
        if self.strict:
            wings.load("interop")
        return self


class Progress:
    """A receiver of the progress of work on a set. The base class shows nothing."""

    @contextmanager
    def indexing(self, shards: int) -> Iterator[Callable[[int], None]]:
        """Provide a block that indexes shards with a function to call with the members of each."""
        yield lambda _: None

    @contextmanager
    def shards(self, label: str, shards: int) -> Iterator[Callable[[], None]]:
        """Provide a block that works on shards with a function to call after each of them."""
        yield lambda: None

    @contextmanager
    def composing(self, shards: int) -> Iterator[Callable[[int], None]]:
        """Provide a block that makes records of a view with a function to call with their number."""
        yield lambda _: None


class Opening(NamedTuple):
    """The way to open a set: the place of the index, processes that build it, tolerated damage, progress.

    `workers` are those of a cluster. With `quiet` no hints are logged. `descriptors` is the number of file
    descriptors that open shards may take.
    """

    index_dir: Path | None = None
    jobs: int = default_jobs()
    quiet: bool = False
    tolerance: Tolerance = Tolerance()
    workers: Workers | None = None
    progress: Progress = Progress()
    descriptors: int = 256


class TreeOptions(NamedTuple):
    """The options of a tree: layout, names, and the view of the set."""

    layout: str = "samples"
    names: str = "ext"
    merge: bool = False
    index_tree: bool = False
    composition: Composition = Composition()

    def view(self, *, partial: bool = False) -> View:
        """Return the layout as trees take it; `partial`: some shards may be missing. Raises UsageError."""
        from wdsfs.tree.tree import View

        layout = self.layout
        if layout != "samples" and self.index_tree:
            raise UsageError(
                f"--index-tree is for --layout samples; in --layout {layout} a sample has no directory"
            )
        if layout != "samples" and self.names == "full":
            raise UsageError(
                f"--names full is for --layout samples; in --layout {layout} the names are always whole"
            )
        return View(layout, self.names, self.merge, self.index_tree, partial)


class Selection(NamedTuple):
    """The part of the set that is wanted, and how it is read: `expand(specs, *selection)`."""

    split: str | None = None
    slice: Slice | None = None
    reading: Reading = PLAIN
    allow_missing: bool | None = None  # None: the command has no such option
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


def selection_of(
    split: str | None = None,
    shard_id: int | None = None,
    num_shards: int | None = None,
    *,
    ignore_zeros: bool = False,
    group_by_key: bool = False,
    last_dot: bool = False,
    base: str | None = None,
) -> Selection:
    """Return the selection that these options mean. Raises UsageError."""
    from wdsfs.spec.expand import Slice

    reading = Reading(ignore_zeros, group_by_key, last_dot)
    if shard_id is None and num_shards is None:
        return Selection(split, reading=reading, base=base)
    if shard_id is None or num_shards is None:
        raise UsageError("--shard-id and --num-shards belong together: part N of M")
    if not 0 <= shard_id < num_shards:
        raise UsageError(
            f"--shard-id {shard_id}: parts are counted from 0, so the last of {num_shards} is {num_shards - 1}"
        )
    return Selection(split, Slice(shard_id, num_shards), reading=reading, base=base)
