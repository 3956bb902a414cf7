"""The command `refresh`: has a mount look at its SHARDS again, and says what came and what went."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from wdsfs.cli import completion
from wdsfs.cli.options import json_option
from wdsfs.cli.output import say, write_json
from wdsfs.errors import MountError, ShardError, counted, several

if TYPE_CHECKING:
    from wdsfs.mount.guard import Registration
    from wdsfs.mount.image_mount import ImageMount

REFRESH_SECONDS = 24 * 3600.0  # indexing new shards may take long; a daemon that ends closes the connection


@click.command()
@click.argument("mountpoint", shell_complete=completion.mount_points)
@json_option
def refresh(mountpoint: str, as_json: bool) -> None:
    """Look again at the SHARDS of the mount at MOUNTPOINT: show new ones, and hide those that are gone.

    Returns when the mount shows what is there now. A mount with --follow looks by itself, too. One that the kernel
    serves gets a new image in the place of the old one; open files keep what they were. With --overlay no file
    may be open for writing then.

    \b
    Examples:
      wdsfs refresh /mnt/train
      wdsfs refresh --json /mnt/train
    """
    answer = _ask(mountpoint)
    if answer.get("error"):
        raise MountError(answer["error"])
    if as_json:
        write_json(answer)
        return
    for sign, key in (("+", "added"), ("-", "removed")):
        for one in answer[key]:
            say(f"{sign} {one['name']}  {one['shard']}")
    for one in answer.get("replaced", ()):
        say(f"~ {one}")
    for one in answer["left_out"]:
        say(f"not shown: {one['shard']}: {one['why']}", err=True)
    if answer["kept"]:
        say(f"kept: {answer['kept']}", err=True)
    changes = f"{len(answer['added']):,} added, {len(answer['removed']):,} removed"
    if answer.get("replaced"):
        changes += f", {len(answer['replaced']):,} replaced"
    say(f"{counted(answer['shards'], 'shard')}: {changes}")


def _ask(mountpoint: str) -> dict[str, Any]:
    """The answer of the mount's daemon. Raises MountError."""
    from wdsfs.status import control

    daemon = control.find(mountpoint)
    if daemon is None:
        answer = _by_kernel(control.canonical(mountpoint))
        if answer is not None:
            return answer
        raise MountError(f"{control.canonical(mountpoint)}: no mount of yours is there; see: wdsfs status")
    if not daemon.alive:
        raise MountError(f"{daemon.mountpoint}: its daemon is gone; see: wdsfs status")
    try:
        with control.Talk(daemon) as talk:
            return talk.ask({"do": "refresh"}, seconds=REFRESH_SECONDS)
    except (OSError, ValueError):
        raise MountError(
            f"{daemon.mountpoint}: its daemon does not answer, or was started by a version without `refresh`; "
            "see: wdsfs status"
        ) from None


def _by_kernel(mountpoint: str) -> dict[str, Any] | None:
    """The answer for a mount of an image, which its guard exchanges; None if none is there. Raises WdsfsError."""
    from wdsfs import mount_table
    from wdsfs.kernel.manifest import image_of
    from wdsfs.mount.guard import guard_of

    mounted = mount_table.mounted_at(mountpoint)
    guard = guard_of(mountpoint)
    is_guarded = mounted is not None and guard is not None and guard.guards(mounted)
    if mounted is None or (image_of(mounted) is None and not is_guarded):
        return None
    if guard is None or not guard.alive:
        raise MountError(
            f"{mountpoint}: has no guard, which would do it; repeat the command that mounted it, no unmount"
        )
    return _exchanged(guard)


def _exchanged(guard: Registration) -> dict[str, Any]:
    """Have the guard mount the image of the set as it is now. Raises WdsfsError."""
    from wdsfs.cli.mount_command import prepared_again
    from wdsfs.kernel import manifest
    from wdsfs.kernel.kept_images import put_back
    from wdsfs.kernel.manifest import identity_of
    from wdsfs.names import without_suffix
    from wdsfs.status import control

    quoted = shlex.quote(guard.mountpoint)
    if guard.made is None:
        raise MountError(
            f"{guard.mountpoint}: how it was mounted was not kept, as there may be a secret in it; type: "
            f"wdsfs umount {quoted}, and mount it again"
        )
    if guard.overlay is not None:
        _refuse_half_done(guard)
    with put_back(guard.image, guard.was_exchanged):
        try:
            wanted = prepared_again(guard.made)
        except ShardError as error:  # it may name an option of `mount`
            text = f"{error}; the mount shows what it has shown, and takes options when it is mounted"
            raise type(error)(text) from None
        if identity_of(wanted.image) == guard.identity:
            _refuse_old_image(guard)
        else:
            question = {"do": "exchange", "image": wanted.image, "base": wanted.base, "trusting": wanted.trusting}
            still = contextlib.nullcontext() if guard.overlay is None else _still(guard, wanted, question)
            try:
                with still, control.Talk(guard) as talk:
                    answer = talk.ask(question, seconds=REFRESH_SECONDS)
            except (OSError, ValueError):
                silent = f"{guard.mountpoint}: its guard does not answer; see: wdsfs status {quoted}"
                raise MountError(silent) from None
            if answer.get("error"):
                raise MountError(f"{answer['error']}; the mount shows what it has shown")
    about = manifest.read(wanted.image)
    now = [one.shard(wanted.base) for one in about.devices]
    replaced = guard.replaced()

    def named(paths: Iterable[str]) -> list[dict[str, str]]:
        found = ((os.fsdecode(without_suffix(os.fsencode(os.path.basename(path)))), path) for path in paths)
        return [{"name": name, "shard": path} for name, path in found]

    return {
        "shards": len(set(now)),
        "added": named(path for path in dict.fromkeys(now) if path not in guard.paths),
        "removed": named(path for path in dict.fromkeys(guard.paths) if path not in now),
        "replaced": [path for path in dict.fromkeys(now) if path in replaced],
        "left_out": [],
        "kept": "",
    }


def _refuse_half_done(guard: Registration) -> None:
    """Raise MountError for an overlay whose shards are those of a commit that was stopped half-way."""
    from wdsfs.overlay.overlay_directory import is_half_done

    if is_half_done(guard.overlay):
        raise MountError(
            f"{guard.mountpoint}: a commit in place was stopped half-way; finish it first: repeat that commit"
        )


@contextlib.contextmanager
def _still(guard: Registration, wanted: ImageMount, question: dict[str, Any]) -> Iterator[None]:
    """Let nobody write to the mount, which has an overlay, while the guard exchanges what is below that.

    The new shards are put into the question. Raises OverlayUnusable, OverlayBusy: nothing has happened.
    """
    from wdsfs.kernel.overlayfs import frozen
    from wdsfs.overlay.overlay_directory import OverlayDirectory
    from wdsfs.overlay.overlay_shards import check_set

    over = wanted.overlay
    if over is None:
        raise MountError(f"{guard.mountpoint}: has an overlay, and its command has none; please report this")
    place = OverlayDirectory(over.directory)
    check_set(place, over.shards, over.view, over.merge)
    question["shards"] = [[os.fsdecode(one.path), os.fsdecode(one.name)] for one in over.shards]
    with frozen(guard.mountpoint, place):
        yield


def _refuse_old_image(guard: Registration) -> None:
    """Raise MountError for an image that is mounted already, and is not of the shards that are there now."""
    replaced = guard.replaced()
    if replaced:
        raise MountError(
            f"{guard.image}: is older than {several(replaced)}; make it anew with `wdsfs image`, and refresh again"
        )
