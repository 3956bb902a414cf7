"""The overlay that `diff`, `commit` and `restore` work on, over its set; it may be mounted or not.

As in `cli/main.py`, what is worked with is imported when it is needed. What an overlay changes is decided in
`packing/diff.py`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource

from wdsfs.cli import completion
from wdsfs.cli.options import handing_over, set_for_all, set_options
from wdsfs.cli.tree_options import ViewOptions, view_of, view_options
from wdsfs.errors import CommitError, MissingShard, MountError, OverlayBusy, OverlayUnusable, UsageError, several
from wdsfs.remote.shard_paths import is_remote, look, pin_of

if TYPE_CHECKING:
    from wdsfs.cli.remount import Remount
    from wdsfs.mount.guard import Registration
    from wdsfs.overlay.overlay_directory import OverlayDirectory, OverlaySettings
    from wdsfs.overlay.upper_format import UpperNode
    from wdsfs.packing.diff import Changes
    from wdsfs.packing.plan import Plan
    from wdsfs.packing.shard_writer import Files
    from wdsfs.packing.upper_walk import Rules
    from wdsfs.spec.expand import Shard
    from wdsfs.spec.selection import Selection
    from wdsfs.status.control import Daemon, Talk
    from wdsfs.tree.opening import Opening
    from wdsfs.tree.shard_access import Access
    from wdsfs.tree.shard_set import ShardSet
    from wdsfs.tree.tree import LowerTree

log = logging.getLogger("wdsfs")

FREEZE_SECONDS = RENEW_SECONDS = THAW_SECONDS = 60.0  # how long a daemon may take to do what it is asked for

sources_argument = click.argument(
    "sources", metavar="[MOUNTPOINT|SHARDS...]", nargs=-1, shell_complete=completion.mount_points_or_paths
)
overlay_option = click.option(
    "--overlay",
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False),
    help="The directory with the changes: of a writable mount, or the upperdir of the kernel's overlayfs.",
)


class Wanted(NamedTuple):
    """The arguments of a command: a mount point; or an overlay, the shards below it, and how they are shown."""

    sources: Sequence[str]
    selection: Selection
    overlay: str | None
    view: ViewOptions


wanted_options = handing_over(
    "wanted",
    Wanted,
    {"sources": sources_argument, "selection": set_options, "overlay": overlay_option, "view": view_options},
)


@dataclass(slots=True)
class OverlaySession:
    """An overlay over its set, protected from other writers.

    `directory` is a descriptor of its upper, None if it has none; `talk` is the connection to the daemon of the
    mount at `mountpoint`, if it is mounted. One that the kernel serves has no daemon: `remount` makes it anew.
    """

    place: OverlayDirectory
    tree: LowerTree
    directory: int | None
    talk: Talk | None = None
    mountpoint: str | None = None
    remount: Remount | None = None
    daemon_is_silent: bool = False

    @property
    def mount_is_wrong(self) -> bool:
        """True if the mount does not show the new shards, or has ended. REQUIRES: the session has ended."""
        return self.daemon_is_silent or (self.remount is not None and self.remount.failed)

    def changes(self, rules: Rules | None = None) -> Changes:
        """Find the changes of the overlay, by these rules. Raises ShardErrors, and OSErrors that name a file."""
        from wdsfs.overlay import upper_format
        from wdsfs.overlay.upper_directory import load_upper
        from wdsfs.packing import diff, upper_walk

        directory = -1 if self.directory is None else self.directory

        def open_file(node: UpperNode) -> int:
            return upper_format.open_below(directory, node.path())

        # Even if nothing is changed yet: shards that other tools read otherwise are reported, too.
        upper = load_upper(self.place)
        return diff.find(self.tree, upper, open_file, rules or upper_walk.Rules())

    def files(self) -> Files:
        """The files of the upper, for a commit to open."""
        from wdsfs.packing.shard_writer import Files

        return Files(os.fsencode(self.place.upper))

    def refuse_inside(self, plan: Plan) -> None:
        """Raise UsageError for new shards that would come to lie in the overlay, or in the mount of it."""
        from wdsfs.packing.output_names import refuse_below

        refuse_below(plan, str(self.place.path), "the directory of the overlay")
        if self.mountpoint is not None:
            refuse_below(plan, self.mountpoint, "the mount that is committed")

    def note_outputs(self, plan: Plan, changes: Changes, pattern: str, done: bool) -> None:
        """Record which shards have the changes of the overlay, so that it is not used over them."""
        from wdsfs.overlay.overlay_shards import Written, add_outputs, sample_of
        from wdsfs.packing.output_names import canonical

        written = []
        for step in plan.steps:
            if step.number in changes.shards or (step.number is None and (changes.shards or changes.further)):
                path = canonical(step.output.target)
                if is_remote(path):
                    etag = pin_of(path).etag if done else ""
                    written.append(Written(path, step.output.length, pattern, etag=etag))
                    continue
                sample = sample_of(path, step.output.first_change) if done else None
                written.append(Written(path, step.output.length, pattern, sample))
        try:
            if written:
                add_outputs(self.place, written)
        except OSError as error:  # an overlay on a read-only disk can be committed, too
            text = "%s cannot be written (%s): nothing will stop this overlay from being used over the new shards"
            log.warning(text, self.place.outputs, error.strerror)

    def prepare_new(self, new: Sequence[bytes]) -> None:
        """Prepare the mount, if there is one, for `new` shards. Raises CommitError: the mount is unchanged."""
        if self.remount is not None:
            from wdsfs.spec.expand import extended

            self.remount.make_image(extended(self.tree.lower.shards, new))

    def show_new(self, new: Sequence[bytes], published: Sequence[bytes]) -> None:
        """Have the mount, if there is one, show `new` shards, and open replaced (`published`) ones anew."""
        if self.remount is not None:
            from wdsfs.spec.expand import extended

            self.remount.run(extended(self.tree.lower.shards, new))
        if self.talk is not None:
            paths = {"new": new, "published": published}
            try:
                question = {key: [os.fsdecode(path) for path in some] for key, some in paths.items()}
                self.talk.ask(question, RENEW_SECONDS)
            except (OSError, ValueError) as error:  # the shards are written all the same
                self.daemon_is_silent = True
                log.error(
                    "%s: the shards are written, but its daemon has not answered (%s), so it may show old ones; "
                    "unmount it, and mount it again",
                    *(self.mountpoint, error),
                )


@contextlib.contextmanager
def overlay_session(
    wanted: Wanted, opening: Opening, freeze: bool, whole: bool = False
) -> Iterator[OverlaySession]:
    """The overlay of a mount, or one that is not mounted. `whole` says that all shards of the set are needed."""
    if wanted.overlay is None and len(wanted.sources) != 1:
        raise UsageError("name one MOUNTPOINT, or --overlay DIR and the SHARDS below it")
    if wanted.overlay is None and wanted.selection.arguments:
        raise UsageError(f"{wanted.selection.arguments[0]} is for SHARDS; a mount knows which it shows")
    with (
        mounted(wanted.sources[0], opening, freeze, whole)
        if wanted.overlay is None
        else _held(wanted.overlay, wanted, opening, whole) as one
    ):
        yield one


@contextlib.contextmanager
def _held(overlay: str, wanted: Wanted, opening: Opening, whole: bool) -> Iterator[OverlaySession]:
    """Hold the overlay and open the set below it, shown as it was when the overlay was made."""
    from pathlib import Path

    from wdsfs.overlay.overlay_directory import OverlayDirectory, clean, held, read_settings, unfinished
    from wdsfs.overlay.overlay_shards import refuse_outputs
    from wdsfs.spec.expand import expand, refuse_left_out

    place = OverlayDirectory(Path(os.path.abspath(overlay)))
    settings, selection, view = read_settings(place), wanted.selection, wanted.view
    if settings is not None:
        view = _agreed(settings, view, selection)
        selection = selection._replace(reading=settings.reading)
    with contextlib.ExitStack() as stack:
        stack.enter_context(held(place))
        selection = selection._replace(allow_missing=opening.tolerance.allow_missing)
        try:
            shards = expand(wanted.sources, *selection) if wanted.sources else _of_a_new_set(settings)
        except MissingShard as error:
            if not unfinished(place):
                raise
            text = (
                "a commit of this overlay was stopped half-way: put the shard back, or an empty tar in its place "
                "(truncate -s 10240 FILE)"
            )
            raise CommitError(
                f"{error}; {text}, then finish it (--in-place) or end it as it is (--abandon)"
            ) from None
        refuse_left_out(shards, "the overlay is of whole shards")
        if not unfinished(place):
            clean(place)
            refuse_outputs(place, [shard.path for shard in shards])
        tree = stack.enter_context(tree_below(place, shards, view, opening, whole))
        yield OverlaySession(place, tree, stack.enter_context(upper_of(place)))


def _of_a_new_set(settings: OverlaySettings | None) -> list[Shard]:
    """The shards of a set that begins empty: none. Raises UsageError if the overlay has shards below it."""
    if settings is None or settings.shards:
        raise UsageError("name the SHARDS below the overlay, too; only one of `mount --new` has none")
    return []


def told_shards(answer: dict[str, Any]) -> list[Shard]:
    """The shards of a mount, in their order, by the answer of its daemon."""
    from wdsfs.names import Reading
    from wdsfs.spec.expand import Shard

    reading, without = Reading(**answer.get("reading", {})), answer.get("without", {})
    return [Shard.of_texts(path, name, reading, without.get(path, ())) for name, path in answer["shards"]]


@contextlib.contextmanager
def mounted(mountpoint: str, opening: Opening, freeze: bool, whole: bool = False) -> Iterator[OverlaySession]:
    """The overlay of a mount; with `freeze` all writes to the mount are refused meanwhile."""
    from pathlib import Path

    from wdsfs.overlay.overlay_directory import OverlayDirectory, unfinished
    from wdsfs.overlay.overlay_shards import refuse_outputs
    from wdsfs.status import control
    from wdsfs.tree.shard_access import access_from_json

    guard = guard_of_overlay(mountpoint)
    if guard is not None:
        with _by_kernel(mountpoint, guard, opening, freeze, whole) as one:
            yield one
        return
    daemon, directory = daemon_of(mountpoint)
    view = ViewOptions(daemon.layout, daemon.names, daemon.merge)
    if opening.index_dir is None and daemon.index:
        opening = opening._replace(index_dir=Path(daemon.index))
        set_for_all("WDSFS_INDEX_DIR", daemon.index)
    with contextlib.ExitStack() as stack:
        if freeze:
            _sync(mountpoint)
        try:
            talk = stack.enter_context(control.Talk(daemon))
            answer = talk.ask({"do": "freeze" if freeze else "shards"}, FREEZE_SECONDS)
        except (OSError, ValueError) as error:
            raise silent(mountpoint, error) from None
        if "error" in answer:
            raise OverlayBusy(answer["error"])
        if freeze:
            stack.callback(talk.finish, THAW_SECONDS)  # who writes when the command has ended gets no EBUSY
        shards = told_shards(answer)
        place = OverlayDirectory(Path(directory))
        if not unfinished(place):
            refuse_outputs(place, [shard.path for shard in shards])
        # What the mount refuses to show, its user must not copy into shards, or write to, either.
        access = access_from_json(answer.get("seen"))
        tree = stack.enter_context(tree_below(place, shards, view, opening, whole, access))
        upper = stack.enter_context(upper_of(place))
        yield OverlaySession(place, tree, upper, talk if freeze else None, mountpoint)


def guard_of_overlay(mountpoint: str) -> Registration | None:
    """The guard, alive or not, of an overlay that the kernel serves here; None for any other mount, or none.

    Raises MountError if nothing is known of it any more.
    """
    from wdsfs import mount_table
    from wdsfs.kernel.manifest import image_of
    from wdsfs.mount.guard import guard_of
    from wdsfs.overlay.overlay_directory import upper_of
    from wdsfs.status import control

    found = mount_table.mounted_at(control.canonical(mountpoint))
    upper = None if found is None else upper_of(found)
    if found is None or upper is None:
        return None
    guard = guard_of(control.canonical(mountpoint))
    if guard is not None and guard.overlay is not None:
        return guard
    if image_of(found) is None:
        return None
    raise MountError(
        f"{mountpoint}: is served by the kernel, and was mounted by another user or in another place, so what is "
        f"below it is not known; unmount it, then name --overlay {shlex.quote(os.path.dirname(upper))} and SHARDS"
    )


@contextlib.contextmanager
def _by_kernel(
    mountpoint: str, guard: Registration, opening: Opening, freeze: bool, whole: bool
) -> Iterator[OverlaySession]:
    """The overlay of a mount that the kernel serves; with `freeze` the mount is read-only meanwhile."""
    from pathlib import Path

    from wdsfs.cli.remount import prepared
    from wdsfs.kernel.overlayfs import frozen
    from wdsfs.names import Reading
    from wdsfs.overlay.overlay_directory import OverlayDirectory, unfinished
    from wdsfs.overlay.overlay_shards import refuse_outputs
    from wdsfs.spec.expand import Shard

    place = OverlayDirectory(Path(str(guard.overlay)))
    if opening.index_dir is None and guard.index:
        opening = opening._replace(index_dir=Path(guard.index))
        set_for_all("WDSFS_INDEX_DIR", guard.index)
    with contextlib.ExitStack() as stack:
        remount = None
        if freeze:
            remount = stack.enter_context(prepared(guard, opening))
            if not guard.alive:
                stack.enter_context(_held_without_guard(mountpoint, guard, place))
            stack.enter_context(frozen(mountpoint, place))
        reading = Reading(**guard.reading)
        shards = [Shard.of_texts(path, name, reading) for path, name in guard.shards]
        if not unfinished(place):
            refuse_outputs(place, [shard.path for shard in shards])
        view = ViewOptions(guard.layout, guard.names, guard.merge)
        tree = stack.enter_context(tree_below(place, shards, view, opening, whole))
        upper = stack.enter_context(upper_of(place))
        yield OverlaySession(place, tree, upper, mountpoint=mountpoint, remount=remount)


def _held_without_guard(
    mountpoint: str, guard: Registration, place: OverlayDirectory
) -> contextlib.AbstractContextManager[None]:
    """Hold the overlay for a mount whose guard has died. Raises MountError if it is another mount by now."""
    from wdsfs.mount.image_mount import unguarded
    from wdsfs.overlay.overlay_directory import held
    from wdsfs.status import control

    where = control.canonical(mountpoint)
    if unguarded(where, place.path) is None:
        raise MountError(
            f"{mountpoint}: is not the mount whose guard (process {guard.pid}) has died; unmount it, and name "
            f"--overlay {shlex.quote(str(place.path))} and the SHARDS"
        )
    return held(place, served_at=where)


@contextlib.contextmanager
def tree_below(
    place: OverlayDirectory,
    shards: Sequence[Shard],
    view: ViewOptions,
    opening: Opening,
    whole: bool = False,
    access: Access | None = None,
) -> Iterator[LowerTree]:
    """The tree below an overlay. Warns of shards that have changed since the overlay was made."""
    from wdsfs.overlay.overlay_directory import read_settings
    from wdsfs.tree.merged_tree import make_tree

    settings = read_settings(place)
    with _opened(shards, view, opening, whole, access) as below:
        if settings is not None:
            _warn_of_changed(place, settings, below)
        yield make_tree(below, view_of(view.layout, view.names), view.merge)


def mount_above(path: str) -> str | None:
    """The mount point of the wdsfs mount that a path lies in, below its top; None if it lies in none."""
    from wdsfs import mount_table
    from wdsfs.kernel.manifest import image_of
    from wdsfs.status import control

    found = mount_table.mount_of(path)
    if found is None or os.fsdecode(found.path) == control.canonical(path):
        return None
    is_ours = found.fstype == "fuse.wdsfs" or image_of(found) is not None
    return os.fsdecode(found.path) if is_ours else None


def daemon_of(mountpoint: str) -> tuple[Daemon, str]:
    """The daemon of a mount, and the directory of its overlay. Raises MountError when it has none."""
    from wdsfs.status import control

    daemon = control.find(mountpoint)
    if daemon is None:
        above = mount_above(mountpoint)
        if above is not None:
            raise MountError(f"{mountpoint}: lies in a mount; name its MOUNTPOINT first: {above}")
        if _shows_an_image(mountpoint):
            raise MountError(f"{mountpoint}: that mount has no overlay, so nothing in it was changed")
        raise MountError(
            f"{mountpoint}: no mount of wdsfs is there; for one that is not mounted name --overlay DIR"
        )
    if daemon.overlay is None:
        text = f"{mountpoint}: that mount has no overlay, so nothing in it was changed"
        if daemon.composition:
            text += f"; what it shows becomes new shards by: wdsfs commit {daemon.composition} -o PATTERN SHARDS"
        raise MountError(text)
    return daemon, daemon.overlay


def _shows_an_image(mountpoint: str) -> bool:
    from wdsfs import mount_table
    from wdsfs.kernel.manifest import image_of
    from wdsfs.status import control

    found = mount_table.mounted_at(control.canonical(mountpoint))
    return found is not None and image_of(found) is not None


def silent(mountpoint: str, error: Exception) -> MountError:
    """The error for a daemon that does not answer."""
    again = f"end it with `wdsfs umount {shlex.quote(mountpoint)}`, and mount it again"
    return MountError(f"{mountpoint}: its daemon does not answer ({error}); {again}")


def _sync(mountpoint: str) -> None:
    """Flush dirty pages of mapped files to the overlay. Raises CommitError, and MountError for a dead mount."""
    from wdsfs.overlay.upper_files import sync_filesystem

    try:
        sync_filesystem(mountpoint)
    except OSError as error:
        if error.errno in (errno.ENOTCONN, errno.ECONNABORTED):
            raise silent(mountpoint, error) from None
        # The kernel says this once, whichever file it is of; what it could not write is dropped.
        why = "its shard was replaced meanwhile" if error.errno == errno.ESTALE else error.strerror
        raise CommitError(
            f"{mountpoint}: a change of a mapped file could not be written ({why}), "
            "so nothing was committed; the log (see `wdsfs status`) says more. Make the change again if it is "
            "needed, then repeat the command"
        ) from None


def _opened(
    shards: Sequence[Shard],
    view: ViewOptions,
    opening: Opening,
    whole: bool,
    access: Access | None = None,
) -> contextlib.AbstractContextManager[ShardSet]:
    """The set below an overlay. What cannot be read stays in it: changes of it are no new samples."""
    from wdsfs.tree.opening import opened_set

    if view.merge and opening.tolerance.allow_missing:
        raise UsageError(
            "--allow-missing is not for an overlay with --merge: a sample could be new, or belong to one "
            "that cannot be read"
        )
    whole = (whole or view.merge) and not opening.tolerance.allow_missing
    return opened_set(shards, opening, whole=whole, access=access)


@contextlib.contextmanager
def upper_of(place: OverlayDirectory) -> Iterator[int | None]:
    """A descriptor of the upper, None if there is none yet."""
    from wdsfs.overlay.upper_format import OPEN_DIRECTORY

    if not place.upper.is_dir():
        yield None
        return
    directory = os.open(place.upper, OPEN_DIRECTORY)
    try:
        yield directory
    finally:
        os.close(directory)


def _agreed(settings: OverlaySettings, view: ViewOptions, selection: Selection) -> ViewOptions:
    """The options of the view that the overlay was made with. Raises UsageError if the user gave others."""
    context = click.get_current_context()
    made = ViewOptions(settings.layout, settings.names, settings.merge)
    given = {**view._asdict(), **selection.reading._asdict()}
    for name, value in {**made._asdict(), **settings.reading._asdict()}.items():
        typed = context.get_parameter_source(name) not in (ParameterSource.DEFAULT, None)
        if typed and given[name] != value:
            raise UsageError(f"the overlay was made with {' '.join(settings.options)}: use these options, or none")
    return made


def _warn_of_changed(place: OverlayDirectory, settings: OverlaySettings, below: ShardSet) -> None:
    """Warn of shards that have changed since the overlay was made. Raises OverlayUnusable."""
    from wdsfs.overlay.overlay_directory import unfinished

    changed = _compare(settings, {shard.name: shard.path for shard in below.shards})
    if changed and not unfinished(place):  # else it is the commit that has changed them
        text = "%s: changed since the overlay was made; the changes apply to the current contents"
        log.warning(text, several(changed))


def _compare(settings: OverlaySettings, shards: dict[bytes, bytes]) -> list[str]:
    """Return the shards that have changed. Raises OverlayUnusable if the set is not the one below the overlay."""
    from wdsfs.errors import ShardError

    missing = [os.fsdecode(one.name) for one in settings.shards if one.name not in shards]
    if missing:
        raise OverlayUnusable(f"the overlay was made over a set with {several(missing)}: name the same SHARDS")
    changed = []
    for one in settings.shards:
        with contextlib.suppress(ShardError):  # an error where it is needed
            if look(shards[one.name]) != one.fingerprint:
                changed.append(os.fsdecode(shards[one.name]))
    return changed


def unfinished_advice(wanted: Wanted) -> CommitError:
    """The error for an overlay with an unfinished commit: how to finish it."""
    which = ["--overlay", wanted.overlay] if wanted.overlay is not None else []
    command = shlex.join(["wdsfs", "commit", "--in-place", *which, *wanted.selection.arguments, *wanted.sources])
    return CommitError(
        f"a commit of this overlay was stopped half-way; finish it with: {command} (or end it as it is: use "
        "--abandon instead of --in-place)"
    )
