"""What `view` shows of a mount: the same set, seen by the same options, as the mount's daemon tells them.

The daemon is asked again while the pages are served, so that shards that come or go there do so here. What the
kernel serves has no daemon, and is refused.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from wdsfs.cli.opening import opened_set
from wdsfs.cli.options import Opening, set_for_all
from wdsfs.cli.overlay_session import FREEZE_SECONDS, mount_above, silent, told_shards
from wdsfs.cli.progress import make_view
from wdsfs.cli.tree_options import TreeOptions, tree_options, view_of
from wdsfs.errors import MountError, OverlayBusy, ShardError, UsageError
from wdsfs.host import in_directory

if TYPE_CHECKING:
    from wdsfs.dataset.shard_set import ShardSet
    from wdsfs.dataset.tree import LowerTree
    from wdsfs.spec.expand import Shard
    from wdsfs.status.control import Daemon
    from wdsfs.view.edits import Edits
    from wdsfs.view.library import Library
    from wdsfs.view.renewal import Renewal
    from wdsfs.views.composition import Composition


ANSWER_SECONDS = 5.0  # how long a page waits for the list of shards


class Viewed(NamedTuple):
    """What the pages show: the set, what changes it, what renews it, and what is said of it on every page."""

    library: Library
    edits: Edits | None = None
    renewal: Renewal | None = None
    note: str = ""


def samples_of(below: ShardSet, names: str = "ext") -> LowerTree:
    """The tree of the pages: a directory for each sample, below that of its shard."""
    from wdsfs.dataset.merged_tree import make_tree

    return make_tree(below, view_of("samples", names), merge=False)


def daemon_of_mount(sources: Sequence[str]) -> Daemon | None:
    """The daemon of the mount that is named; None for SHARDS. Raises MountError for a path in a mount."""
    from wdsfs.status import control

    if len(sources) != 1 or not os.path.isdir(sources[0]):
        return None
    found = control.find(sources[0])
    if found is None:
        above = mount_above(sources[0])
        if above is not None:
            raise MountError(f"{sources[0]}: lies in a mount; name its MOUNTPOINT: {above}")
        _refuse_kernel(sources[0])
        if _is_empty(sources[0]):
            raise UsageError(f"{sources[0]}: is an empty directory, and nothing is mounted there")
    return found


def _is_empty(directory: str) -> bool:
    try:
        return not os.listdir(directory)
    except OSError:
        return False


def _refuse_kernel(mountpoint: str) -> None:
    """Raise MountError for a mount that the kernel serves: nobody can be asked for its shards."""
    from wdsfs import mount_table
    from wdsfs.image.mounted import image_of
    from wdsfs.overlay.kernel_use import upper_of
    from wdsfs.status import control

    mount = mount_table.mounted_at(control.canonical(mountpoint))
    if mount is None or image_of(mount) is None:
        return
    text = f"{mountpoint}: is served by the kernel, which cannot be asked for its set"
    upper = upper_of(mount)
    if upper is not None:
        place = shlex.quote(os.path.dirname(upper))
        raise MountError(f"{text}; unmount it, and look at its changes with: wdsfs view --overlay {place} SHARDS")
    raise MountError(f"{text}; name its SHARDS, which are listed by: wdsfs status {shlex.quote(mountpoint)}")


@contextlib.contextmanager
def of_a_mount(mountpoint: str, daemon: Daemon, opening: Opening) -> Iterator[Viewed]:
    """The set of a mount, with the changes of its overlay, which are made through the mount."""
    from wdsfs.overlay.overlay_directory import OverlayDirectory
    from wdsfs.view.edits import Edits, MountedFiles
    from wdsfs.view.library import Library

    if opening.index_dir is None and daemon.index:
        opening = opening._replace(index_dir=Path(daemon.index))
        set_for_all("WDSFS_INDEX_DIR", daemon.index)
    mounted = _Mounted(mountpoint, daemon, opening)
    if not mounted.shards:
        raise UsageError(f"{mountpoint}: has no shards yet; commit what is in it first")
    with mounted.opened() as below:
        library = Library(samples_of(below, mounted.names), in_classes=daemon.layout == "classes")
        if daemon.overlay is None or daemon.layout != "samples" or daemon.merge:
            yield Viewed(library, renewal=mounted.renewal(library), note=_note(daemon))
        else:
            files = MountedFiles(daemon.mountpoint, mounted.restore)
            edits = Edits(library, OverlayDirectory(Path(daemon.overlay)), files, [mountpoint])
            yield Viewed(library, edits, mounted.renewal(library))


def _note(daemon: Daemon) -> str:
    """How the pages differ from the mount."""
    if daemon.overlay is not None:
        where = shlex.quote(daemon.mountpoint)
        return (
            "The mount has another layout than the pages, so these are the shards without its changes: "
            f"wdsfs diff {where} shows them, and files are changed in the mount."
        )
    if daemon.merge and daemon.layout != "classes":
        return "The mount is one tree over all shards; here samples are below their shards."
    return ""


class _Mounted:
    """A mount, and its set as its daemon has told it last."""

    def __init__(self, mountpoint: str, daemon: Daemon, opening: Opening) -> None:
        self._mountpoint, self._daemon, self._opening = mountpoint, daemon, opening
        self._told = self._ask({"do": "shards"})
        self._tree = _typed(daemon)

    @property
    def names(self) -> str:
        """How files are called in the directory of a sample."""
        return self._daemon.names if self._daemon.layout == "samples" else "ext"

    @property
    def shards(self) -> list[Shard]:
        """The shards of the mount, in their order."""
        return told_shards(self._told)

    @contextlib.contextmanager
    def opened(self) -> Iterator[ShardSet]:
        """The set, with the options of the mount."""
        from wdsfs.dataset.shard_access import access_from_json

        with contextlib.ExitStack() as stack:
            with self._where_it_was_typed():
                access = access_from_json(self._told.get("seen"))
                found = opened_set(self.shards, self._opening, self._composition, access=access)
                below = stack.enter_context(found)
            yield below

    @property
    def _composition(self) -> Composition | None:
        from wdsfs.views.view_set import is_view

        return self._tree.composition if is_view(self.shards, self._tree.composition) else None

    def _where_it_was_typed(self) -> contextlib.AbstractContextManager[None]:
        """Relative paths of joined shards and label files are of the directory of the mount's command."""
        return in_directory(self._daemon.directory) if self._daemon.composition else contextlib.nullcontext()

    # --- while the pages are served

    def renewal(self, library: Library) -> Renewal:
        """What has the library show what the mount shows by then."""
        from wdsfs.view.renewal import Renewal

        return Renewal(library, self._look)

    def _look(self, below: ShardSet) -> LowerTree | None:
        """The tree of the set as it is now, None for the one that is shown. Raises WdsfsErrors, OSErrors."""
        told = self._ask({"do": "shards"}, ANSWER_SECONDS)
        if told == self._told:
            return None
        self._told = told
        with self._where_it_was_typed():
            return samples_of(self._opened_again(below), self.names)

    def _opened_again(self, below: ShardSet) -> ShardSet:
        """The set as it is now, over the same index; the daemon has indexed what is new."""
        from wdsfs.dataset.indexing import indexed
        from wdsfs.dataset.shard_access import access_from_json
        from wdsfs.dataset.shard_set import ShardSet
        from wdsfs.index.portable import attached
        from wdsfs.views.companions import Companions
        from wdsfs.views.view_set import open_set

        shards, index, composition = self.shards, below.index, self._composition
        access = access_from_json(self._told.get("seen"))
        companions = None if composition is None else Companions(composition, shards[0].reading)
        further = [] if companions is None else companions.shards
        index.portables = attached([*shards, *further])
        if composition is None or companions is None:
            return ShardSet(shards, index, access=access)
        found = open_set(shards, index, composition, companions, access=access)
        for source in found.sources:
            for number in source.numbers:
                with contextlib.suppress(ShardError):  # told on the page of problems
                    indexed(source.summary, number)
        make_view(found, quiet=True)
        return found

    # --- the daemon

    def restore(self, paths: Sequence[bytes]) -> None:
        """Have the mount show these paths as the shards have them. Raises MountError, OverlayBusy."""
        self._ask({"do": "restore", "paths": [os.fsdecode(path) for path in paths]})

    def _ask(self, question: dict[str, object], seconds: float = FREEZE_SECONDS) -> dict[str, Any]:
        """The answer of the daemon. Raises MountError, OverlayBusy."""
        from wdsfs.status import control

        try:
            with control.Talk(self._daemon) as talk:
                answer = talk.ask(question, seconds)
        except (OSError, ValueError) as error:
            if not self._daemon.alive:
                raise MountError(f"{self._mountpoint}: the mount has ended") from None
            raise silent(self._mountpoint, error) from None
        if "error" in answer:
            raise OverlayBusy(answer["error"])
        return answer


def _typed(daemon: Daemon) -> TreeOptions:
    """The options with which a mount shows its set, from their text."""

    @click.command()
    @tree_options
    def options(tree: TreeOptions) -> TreeOptions:
        return tree

    found: TreeOptions = options.main(
        ["--layout", daemon.layout, *shlex.split(daemon.composition)], standalone_mode=False
    )
    return found
