"""The set of a mount, and how its changes are undone. The daemon of a FUSE mount is asked for it;
of a mount by the kernel the image is read.

Both are asked again while pages are served, so that what comes or goes in the mount does so there.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import click

from wdsfs.cli.overlay_session import FREEZE_SECONDS, guard_of_overlay, mount_above, silent, told_shards
from wdsfs.cli.tree_options import TreeOptions, tree_options
from wdsfs.errors import MountError, OverlayBusy, UsageError, several

if TYPE_CHECKING:
    from wdsfs.mount.shown_image import ShownImage
    from wdsfs.spec.expand import Shard
    from wdsfs.status.control import Daemon
    from wdsfs.tree.shard_access import Access

ANSWER_SECONDS = 5.0  # how long a page waits for the list of shards


@dataclass(frozen=True, slots=True)
class Told:
    """The set of a mount at one moment: its shards in their order, how they are reached, and what is to be said of
    it. Equal for the same set: `state` differs for another one."""

    state: object
    shards: list[Shard] = field(compare=False)
    access: Access = field(compare=False)
    news: str = field(compare=False, default="")


class ServedMount(Protocol):
    """A mount, by FUSE or by the kernel.

    `tree` are the options with which it shows its set; relative paths in them are of `directory`. `index` is the
    directory of its index, None for the usual one, `overlay` that of its changes. `lasting` says why changes
    cannot be taken back while it is mounted; it is empty if they can.
    """

    mountpoint: str
    tree: TreeOptions
    directory: str
    index: str | None
    overlay: str | None
    lasting: str

    def told(self) -> Told:
        """The set as it is now. Raises MountError, OverlayBusy, OSErrors."""
        ...

    def restore(self, paths: Sequence[bytes]) -> None:
        """Have the mount show these paths as the shards have them. Raises MountError, OverlayBusy."""
        ...


def mount_of(sources: Sequence[str]) -> ServedMount | None:
    """The mount that is named; None for SHARDS. Raises MountError for a path in a mount."""
    from wdsfs.mount.shown_image import shown_at
    from wdsfs.status import control

    if len(sources) != 1 or not os.path.isdir(sources[0]):
        return None
    daemon = control.find(sources[0])
    if daemon is not None:
        return _ByFuse(daemon)
    shown = shown_at(control.canonical(sources[0]))
    if shown is not None:
        return _ByKernel(shown)
    above = mount_above(sources[0])
    if above is not None:
        raise MountError(f"{sources[0]}: lies in a mount; name its MOUNTPOINT: {above}")
    if _is_empty(sources[0]):
        raise UsageError(f"{sources[0]}: is an empty directory, and nothing is mounted there")
    return None


def _is_empty(directory: str) -> bool:
    try:
        return not os.listdir(directory)
    except OSError:
        return False


def _typed(layout: str, names: str, merge: bool, composition: str) -> TreeOptions:
    """The options with which a mount shows its set, from their text."""

    @click.command()
    @tree_options
    def options(tree: TreeOptions) -> TreeOptions:
        return tree

    found: TreeOptions = options.main(["--layout", layout, *shlex.split(composition)], standalone_mode=False)
    return found._replace(names=names, merge=merge)


class _ByFuse:
    """A mount by FUSE, as its daemon tells it."""

    lasting = ""

    def __init__(self, daemon: Daemon) -> None:
        self.mountpoint, self.directory = daemon.mountpoint, daemon.directory
        self.index, self.overlay = daemon.index, daemon.overlay
        self.tree = _typed(daemon.layout, daemon.names, daemon.merge, daemon.composition)
        self._daemon = daemon
        self._patience = FREEZE_SECONDS  # no page waits for the first answer

    def told(self) -> Told:
        from wdsfs.tree.shard_access import access_from_json

        answer = self._ask({"do": "shards"}, self._patience)
        self._patience = ANSWER_SECONDS
        return Told(answer, told_shards(answer), access_from_json(answer.get("seen")))

    def restore(self, paths: Sequence[bytes]) -> None:
        self._ask({"do": "restore", "paths": [os.fsdecode(path) for path in paths]}, FREEZE_SECONDS)

    def _ask(self, question: dict[str, object], seconds: float) -> dict[str, Any]:
        """The answer of the daemon. Raises MountError, OverlayBusy."""
        from wdsfs.status import control

        try:
            with control.Talk(self._daemon) as talk:
                answer = talk.ask(question, seconds)
        except (OSError, ValueError) as error:
            if not self._daemon.alive:
                raise MountError(f"{self.mountpoint}: the mount has ended") from None
            raise silent(self.mountpoint, error) from None
        if "error" in answer:
            raise OverlayBusy(answer["error"])
        return answer


class _ByKernel:
    """A mount that the kernel serves, as its image tells it. Raises MountError for one with an overlay of which
    nothing is known."""

    def __init__(self, shown: ShownImage) -> None:
        made = None if shown.guard is None else shown.guard.made
        index = None if made is None else made.environment.get("WDSFS_INDEX_DIR")
        over = guard_of_overlay(shown.mountpoint)
        self.mountpoint, self.directory = shown.mountpoint, shown.directory
        self.index = None if made is None or index is None else os.path.join(made.directory, index)
        self.overlay = None if over is None else over.overlay
        self.tree = _tree_of(shown)
        place = shlex.quote(shown.mountpoint)
        self.lasting = (
            "The kernel serves this mount, and lets nobody take changes back while it is mounted. To do that: "
            f"wdsfs umount {place}; wdsfs restore --overlay {shlex.quote(str(self.overlay))} PATH...; and mount "
            "it again."
        )

    def told(self) -> Told:
        from wdsfs.mount.shown_image import ShownAccess, shown_at

        shown = shown_at(self.mountpoint)
        if shown is None:
            raise MountError(f"{self.mountpoint}: the mount has ended")
        overlay = None if shown.guard is None else shown.guard.overlay
        if (_tree_of(shown), shown.directory, overlay) != (self.tree, self.directory, self.overlay):
            raise MountError(f"{self.mountpoint}: another mount is there by now; start this view again")
        access = ShownAccess(shown)
        others = sorted(access.others())
        return Told((shown.identity, shown.paths, others), shown.shards, access, self._news(others))

    def _news(self, others: Sequence[str]) -> str:
        if not others:
            return ""
        return (
            f"Replaced, changed or removed since they were mounted: {several(others)}. The mount shows what they "
            "were, which cannot be read here. To have both show what is there now: wdsfs refresh "
            f"{shlex.quote(self.mountpoint)}"
        )

    def restore(self, paths: Sequence[bytes]) -> None:
        raise OverlayBusy(self.lasting)


def _tree_of(shown: ShownImage) -> TreeOptions:
    about = shown.about
    return _typed(about.layout, about.names, about.merge, about.composition)
