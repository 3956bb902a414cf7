"""A commit of an overlay: finds its changes, plans the new shards, and writes them elsewhere or in place.

`overlay_source.py` decides what is written. The caller holds the overlay, and freezes the mount that shows it, if
there is one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from wdsfs.door.shard_door import DOOR
from wdsfs.door.urls import is_remote
from wdsfs.errors import CommitError
from wdsfs.overlay.overlay_directory import OverlayDirectory, read_settings, unfinished
from wdsfs.overlay.overlay_shards import Written, add_outputs, distinct_sample, uncommitted_text
from wdsfs.packing.diff import Changes, changes_of
from wdsfs.packing.overlay_source import CommitOptions, Planner
from wdsfs.packing.plan import Step, canonical, refuse_below
from wdsfs.packing.replacement import Replacement, read_plan
from wdsfs.packing.runner import Runner
from wdsfs.packing.shard_writer import Files
from wdsfs.tree.set_options import Opening
from wdsfs.tree.tree import LowerTree

log = logging.getLogger(__name__)


class OverlayCommit:
    """A commit of the overlay at `place` over the set that `tree` shows, planned.

    Where a commit in place was stopped half-way, it only goes on: then there are no `changes`. `mountpoint` is
    that of the mount that is committed. Raises UsageError, CommitError, ShardErrors, OSErrors.
    """

    def __init__(
        self,
        place: OverlayDirectory,
        tree: LowerTree,
        options: CommitOptions,
        mountpoint: str | None = None,
    ) -> None:
        self.place, self.lower, self.options = place, tree.lower, options
        self.changes: Changes | None = None
        if unfinished(place):
            self.plan = read_plan(place, tree.lower)
        else:
            self.changes = changes_of(place, tree, options.rules)
            if self.changes or not options.in_place:
                _refuse_reading(place, mountpoint)
            self.plan = Planner(tree.lower, self.changes, options).make()
        refuse_below(self.plan, str(place.path), "the directory of the overlay")
        if mountpoint is not None:
            refuse_below(self.plan, mountpoint, "the mount that is committed")

    @property
    def is_half_way(self) -> bool:
        """True if shards may have been replaced, so that the commit has to be finished."""
        return unfinished(self.place)

    def write(
        self,
        opening: Opening,
        on_bytes: Callable[[int], None] = lambda _: None,
        show: Callable[[Sequence[bytes], Sequence[bytes]], None] = lambda _new, _replaced: None,
        *,
        space_check: bool = True,
    ) -> list[Step]:
        """Write the shards of the plan; return the steps that were done now.

        `space_check` and `show` are for a commit in place (`Replacement`). Raises CommitError,
        ShardErrors, OSErrors.
        """
        in_place = self.options.in_place
        runner = Runner(
            self.plan,
            Files(os.fsencode(self.place.upper)),
            self.lower,
            opening.jobs,
            on_bytes=on_bytes,
            workers=opening.workers,
            space_check=in_place and space_check,
        )
        if not in_place:
            self._note_outputs(done=False)
            steps = runner.write()
            self._note_outputs(done=True)
            return steps
        if not self.plan.steps:
            return []
        replacement = Replacement(self.place, runner, show)
        if self.changes is not None:
            replacement.begin()
        return replacement.finish()

    def _note_outputs(self, *, done: bool) -> None:
        """Note which shards have the changes of the overlay, so that the overlay is not used over them."""
        changes, pattern = self.changes, self.options.output
        assert changes is not None
        assert pattern is not None
        written = []
        for step in self.plan.steps:
            if step.number in changes.shards or (step.number is None and (changes.shards or changes.further)):
                path, length = canonical(step.target), step.output.length
                if is_remote(path):
                    etag = DOOR.remote.pin_of(path).etag if done else ""
                    written.append(Written(path, length, pattern, etag=etag))
                else:
                    sources = [self.plan.sources[number].path for number in step.output.sources]
                    sample = distinct_sample(path, step.output.first_change, sources) if done else None
                    written.append(Written(path, length, pattern, sample))
        try:
            if written:
                add_outputs(self.place, written)
        except OSError as error:  # an overlay on a read-only disk can be committed, too
            text = "%s cannot be written (%s): nothing will stop this overlay from being used over the new shards"
            log.warning(text, self.place.outputs, error.strerror)


def _refuse_reading(place: OverlayDirectory, mountpoint: str | None) -> None:
    """Raise CommitError for an overlay over shards that are read with options, as earlier releases took them.

    Semantics decision: the new shards would have to be repaired, so that other readers find the samples that the
    mount shows. `pack` does that for a whole set, before it is edited.
    """
    settings = read_settings(place)
    if settings is not None and not settings.reading.is_plain:
        raise CommitError(uncommitted_text(place, settings, mountpoint or "MOUNTPOINT"))


class Abandoned(NamedTuple):
    """The shards of a commit in place that was ended half-way: those that are written, and the others.

    `aside` is where the overlay was moved to, if it was.
    """

    done: list[Step]
    left: list[Step]
    aside: Path | None


def abandon(
    place: OverlayDirectory, tree: LowerTree, show: Callable[[Sequence[bytes], Sequence[bytes]], None]
) -> Abandoned:
    """Give up a commit in place that was stopped half-way. Raises CommitError."""
    if not unfinished(place):
        raise CommitError("no commit in place of this overlay was stopped half-way, so there is none to abandon")
    runner = Runner(read_plan(place, tree.lower), Files(), tree.lower)
    done, aside = Replacement(place, runner, show=show).abandon(tree.merged)
    return Abandoned(done, [step for step in runner.plan.steps if step not in done], aside)
