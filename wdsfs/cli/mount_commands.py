"""The commands `mount` and `image`: their options, and errors for missing and misplaced arguments.

`mount/start.py` makes a mount, `kernel/image.py` an image.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from wdsfs.cli.opening_options import opening_options
from wdsfs.cli.option_kinds import (
    RARE,
    SERVING,
    SET,
    AtLeastOne,
    Command,
    Decorator,
    Directory,
    flag,
    gather_options,
    group_in_section,
    in_section,
    json_option,
    offer_directories,
    offer_paths,
    shards_argument,
    typed_params,
)
from wdsfs.cli.output import say, write_json
from wdsfs.cli.view_options import numbered_tree_options, set_options, set_options_without_base, tree_options
from wdsfs.errors import MountError, UsageError, bytes_text, counted
from wdsfs.mount.mount_options import AUTO, ENGINES, OFF, MountOptions, Serving
from wdsfs.mount_registry import FUSE
from wdsfs.names import suffix_of, without_suffix
from wdsfs.spec.objects import SHARD_SUFFIXES

if TYPE_CHECKING:
    from wdsfs.tree.set_options import Opening, Owner, Selection, TreeOptions

log = logging.getLogger("wdsfs")

FOLLOW, FOLLOW_SECONDS = "--follow", 60.0


class MountCommand(Command):
    """The command `mount`: `--follow` without a value does not take the next argument as its value."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        given = [f"{FOLLOW}={FOLLOW_SECONDS:g}" if word == FOLLOW else word for word in args[:end]]
        return super().parse_args(ctx, given + args[end:])


_COMMON: dict[str, Decorator[Any]] = {
    "overlay": click.option(
        "--overlay",
        type=Directory(),
        metavar="DIR",
        help="Make the tree writable. All changes go to DIR; `wdsfs commit` writes them into shards.",
    ),
    "follow": click.option(
        FOLLOW,
        type=AtLeastOne(),
        metavar="[=SECONDS]",
        help="Show new shards and hide removed shards: at once after a local change, and every SECONDS "
        f"({FOLLOW_SECONDS:g} if not given).",
    ),
    "options": click.option(
        "-o",
        "options",
        multiple=True,
        metavar="OPT,...",
        help="Mount options: ro, allow_other, uid=, gid=, umask=, fsname=, auto_unmount, nonempty, ...",
    ),
}
_NEW = flag("--new", "Begin an empty set: with --overlay, without SHARDS. `wdsfs commit` writes its shards.")
_SERVING: dict[str, Decorator[Any]] = {
    "lazy": flag("--lazy", "Mount at once, and index each shard when a program first uses it."),
    "engine": click.option(
        "--engine",
        type=click.Choice(ENGINES),
        default=FUSE,
        show_default=True,
        help="fuse: a daemon serves the mount; kernel: the kernel serves it (plain local shards, read-only, for "
        "root); auto: the kernel if it can, else a daemon.",
    ),
    "trust_shards": flag(
        "--trust-shards",
        "With the engine kernel: accept shards on network file systems, and shards whose times differ from the "
        "times in the image, such as copies.",
    ),
    "foreground": flag("-f", "--foreground", "Stay in the foreground and log to the terminal."),
    "read_only": flag("-r", "--read-only", "Show an overlay without allowing changes, as with -o ro."),
    "workers": click.option(
        "--workers",
        type=click.IntRange(1, 16),
        metavar="N",
        help="Number of processes that serve the mount; with --overlay always one.  [default: one per core, 2 to "
        "8]",
    ),
    "spin": click.option(
        "--spin",
        type=click.IntRange(0, 1000),
        default=50,
        show_default=True,
        metavar="MICROSECONDS",
        help="Time for which a worker polls for the next request before it sleeps. More is faster and takes more "
        "processor time.",
    ),
    "readahead": click.option(
        "--readahead",
        type=click.IntRange(4, 16384),
        default=256,
        show_default=True,
        metavar="KIB",
        help="Part of a large file that the kernel reads ahead; always 128 for users other than root.",
    ),
    "push": click.option(
        "--push",
        type=click.Choice([AUTO, OFF]),
        default=AUTO,
        show_default=True,
        help="Put the next files into the page cache for readers that read in order.",
    ),
}
serving_options = gather_options(
    "serving", Serving, {**_COMMON, "new": in_section(SET, _NEW), **group_in_section(SERVING, _SERVING)}
)


# Options of the mount of an image. All others are about the content of the image, or about a daemon.
_FOR_IMAGES = {
    *("shards", "mountpoint", "base", "trust_shards", "wdsfs_trust", "options", "read_only", "quiet"),
    *("foreground", "engine"),
}


@click.command(cls=MountCommand)
@click.argument("shards", metavar="SHARDS...", nargs=-1, shell_complete=offer_paths)
@set_options
@click.argument("mountpoint", metavar="MOUNTPOINT", required=False, shell_complete=offer_directories)
@numbered_tree_options
@serving_options
@opening_options
def mount(
    shards: tuple[str, ...],
    selection: Selection,
    mountpoint: str | None,
    tree: TreeOptions,
    serving: Serving,
    opening: Opening,
) -> None:
    """Mount SHARDS at MOUNTPOINT, read-only unless with --overlay. Returns when the tree is usable.

    `wdsfs umount MOUNTPOINT` ends the mount. `wdsfs help layouts` shows a picture of each layout, and says which
    loader reads it.

    \b
    Examples:
      wdsfs mount 'train-{000000..000999}.tar' /mnt/train
      wdsfs mount --layout classes --columns 'jpg;png' shards/ /mnt/train
      wdsfs mount --overlay edits 's3://bucket/train-{000..099}.tar' mnt
    \f

    A single shard, `x.tar`, needs no MOUNTPOINT: wdsfs mounts it at `./x`. If that directory does not exist,
    wdsfs makes it, and removes it at the unmount.

    For an image of `wdsfs image` the kernel serves the mount; only root can mount it.

    \b
    More examples:
      wdsfs mount --layout files -o allow_other shards/ /mnt/train
      wdsfs mount --follow shards/ /mnt/train
      wdsfs mount --names full --merge 'a-{0..9}.tar' 'b-*.tar' /mnt/all
      wdsfs mount --layout classes --class-names names.txt 'train-{000..099}.tar' /mnt/train
      wdsfs mount --columns 'jpg;png' --columns cls --associate labels.csv shards/ /mnt/train
      wdsfs mount train.erofs /mnt/train
      wdsfs mount --overlay edits --new /mnt/new
    """
    from wdsfs.mount.start import is_of_image
    from wdsfs.spec.spec_words import settled

    _refuse_own_options(serving.options)
    own = None if shards or serving.new or mountpoint is None else _own_directory(mountpoint)
    if own is not None and mountpoint is not None:
        shards, mountpoint = (mountpoint,), own
    mountpoint = _mountpoint(shards, mountpoint, selection, serving)
    if is_of_image(shards):
        _refuse_options_of_shards(serving)
    elif serving.trust_shards and serving.engine == FUSE:
        raise UsageError("--trust-shards is for images of `wdsfs image`, and for --engine kernel")
    else:
        shards = tuple(map(settled, shards))  # the daemon expands them again
    chosen = MountOptions(shards, mountpoint, tree, selection, opening, serving)
    sys.exit(_start(chosen, makes_directory=own is not None))


def _own_directory(shard: str) -> str | None:
    """Return the directory `x` at which `wdsfs mount x.tar` mounts; None if the word is no file of a shard.

    Semantics decision: as with ratarmount, a single shard needs no MOUNTPOINT. The mount makes the directory in
    the working directory, where a user looks next. The daemon removes a directory that the mount has made.
    """
    name = os.path.basename(os.fsdecode(without_suffix(os.fsencode(shard))))
    is_shard = suffix_of(os.fsencode(shard)) and os.path.isfile(shard)
    return name if is_shard and name not in ("", ".", "..") else None


def _start(chosen: MountOptions, *, makes_directory: bool) -> int:
    """Mount, and return the exit code. `makes_directory`: make the mount point if it does not exist.

    Raises WdsfsError.
    """
    from wdsfs.mount.start import start_mount

    place, code = chosen.mountpoint, 1
    if makes_directory:
        chosen = replace(chosen, removes_mountpoint=_make_mountpoint(place))
    try:
        code = start_mount(chosen)
    finally:
        if code and chosen.removes_mountpoint:
            with contextlib.suppress(OSError):  # the daemon has removed it
                os.rmdir(place)
    if makes_directory and not (code or chosen.opening.quiet or chosen.serving.foreground):
        log.info("mounted at %s; end the mount with: wdsfs umount %s", place, shlex.quote(place))
    return code


def _make_mountpoint(place: str) -> bool:
    """Make the mount point; return False if the path exists. Raises MountError."""
    try:
        os.mkdir(place)
    except FileExistsError:
        return False
    except OSError as error:
        raise MountError(f"{place}: cannot be made: {error.strerror}; name a MOUNTPOINT") from None
    return True


def _mountpoint(shards: Sequence[str], mountpoint: str | None, selection: Selection, serving: Serving) -> str:
    """Return the mount point. Raises UsageError for missing arguments, and for arguments that --new refuses."""
    if serving.new:
        _check_new(shards, selection, serving)
    elif mountpoint is None or not shards:
        raise _incomplete(mountpoint)
    if not mountpoint:
        raise UsageError("the MOUNTPOINT is missing" if mountpoint is None else "the MOUNTPOINT is empty")
    if _are_swapped(shards, mountpoint):
        raise UsageError(
            f"the MOUNTPOINT comes last: wdsfs mount {shlex.quote(mountpoint)} {shlex.quote(shards[0])}"
        )
    if mountpoint.endswith(SHARD_SUFFIXES) and os.path.isfile(mountpoint):
        # The shell has expanded a glob: its last shard stands in the place of the mount point.
        raise UsageError(
            f"the MOUNTPOINT is missing: {mountpoint} is a shard. Name an empty directory last: "
            "wdsfs mount SHARDS... MOUNTPOINT"
        )
    return mountpoint


def _are_swapped(shards: Sequence[str], mountpoint: str) -> bool:
    """Return True if the arguments are a directory without shards, then shards."""
    from wdsfs.spec.existence import names_a_shard

    is_directory = len(shards) == 1 and os.path.isdir(shards[0])
    return is_directory and names_a_shard(mountpoint) and not names_a_shard(shards[0])


def _refuse_options_of_shards(serving: Serving) -> None:
    """Raise UsageError for options that the mount of an image refuses."""
    typed = {str(param.name): param.opts[0] for param in typed_params()}
    for name, option in typed.items():
        if name not in _FOR_IMAGES:
            raise UsageError(
                f"{option} cannot be used with an image; the command that makes the image may have it: "
                "wdsfs image --help-all"
            )
    if serving.engine == FUSE and "engine" in typed:
        raise UsageError("--engine fuse cannot mount an image: mount its shards instead")


def _check_new(shards: Sequence[str], selection: Selection, serving: Serving) -> None:
    """Raise UsageError for options that cannot be combined with --new."""
    if serving.overlay is None:
        raise UsageError("--new needs --overlay DIR, the directory for new samples until `wdsfs commit`")
    if shards:
        raise UsageError(
            f"--new begins an empty set: leave out {shards[0]}, or leave out --new to add samples to its set"
        )
    if selection.arguments:
        raise UsageError(f"{selection.arguments[0]} is for SHARDS, and --new begins a set without any")


def _refuse_own_options(dash_o: Sequence[str]) -> None:
    """Raise UsageError for `-o layout=files`, which only mount(8) takes, and for `-o layot=files`."""
    from wdsfs.mount.mount_options import known_options, split_options
    from wdsfs.names import closest

    own = {name[2:] for param in mount.params for name in param.opts if name.startswith("--")}
    known = {name.rstrip("=") for name in known_options()}
    for option in split_options(dash_o):
        name, equals, value = option.partition("=")
        dashed = name.replace("_", "-")
        if dashed in own:
            typed = f"--{dashed}" + (f" {shlex.quote(value)}" if equals else "")
            raise UsageError(f"-o {option}: type {typed} instead; -o is for mount options")
        meant = closest(dashed, sorted(own | known)) if name not in known else None
        if meant in own:
            raise UsageError(f"-o {option}: no such option; did you mean --{meant}?")


def _incomplete(given: str | None) -> UsageError:
    """Return the error for `wdsfs mount` with one argument, or with none."""
    from wdsfs.spec.existence import names_a_shard

    if given is None:
        return UsageError("mount needs SHARDS and a MOUNTPOINT: wdsfs mount SHARDS... MOUNTPOINT")
    quoted = shlex.quote(given)
    if given.endswith(SHARD_SUFFIXES) or names_a_shard(given):
        return UsageError(f"the MOUNTPOINT is missing; name an empty directory: wdsfs mount {quoted} MOUNTPOINT")
    return UsageError(f"SHARDS are missing: wdsfs mount SHARDS... {quoted}")


# --- image -------------------------------------------------------------------------------------------------

_ID_MAX = (1 << 32) - 2


def _owner(uid: int, gid: int, umask: str) -> Owner:
    """Return the owner and mode bits of the files of an image. Raises UsageError."""
    from wdsfs.tree.set_options import Owner

    try:
        bits = int(umask, 8)
    except ValueError:
        bits = -1
    if not 0 <= bits <= 0o777:
        raise UsageError(f"--umask {umask}: an octal number up to 777 is needed")
    return Owner(uid, gid, bits)


_owner_options = gather_options(
    "owner",
    _owner,
    group_in_section(
        RARE,
        {
            "uid": click.option(
                "--uid", type=click.IntRange(0, _ID_MAX), default=0, help="Owner of all files.  [default: root]"
            ),
            "gid": click.option(
                "--gid", type=click.IntRange(0, _ID_MAX), default=0, help="Group of all files.  [default: root]"
            ),
            "umask": click.option(
                "--umask", default="0", metavar="OCTAL", help="Bits to remove from the modes 0444 and 0555."
            ),
        },
    ),
)


@click.command(cls=Command)
@shards_argument
@set_options_without_base
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    required=True,
    shell_complete=offer_paths,
    help="The image, such as set.erofs.",
)
@tree_options
@click.option(
    "--base",
    type=Directory(),
    metavar="DIR",
    help="Store paths of shards below DIR relative to it.  [default: the directory of FILE]",
)
@_owner_options
@json_option
@opening_options
def image(
    shards: tuple[str, ...],
    selection: Selection,
    output: str,
    tree: TreeOptions,
    base: str | None,
    owner: Owner,
    as_json: bool,
    opening: Opening,
) -> None:
    """Write an image of SHARDS, an EROFS file system with the names: the kernel mounts it over the shards.

    The image has the tree of `wdsfs mount` with the same options. Do not change the shards: the image points into
    them. Only root can mount the image, which is faster than FUSE and needs no daemon.

    \b
    Examples:
      wdsfs image 'train-{000000..000999}.tar' -o train.erofs
      wdsfs mount train.erofs /mnt/train
    """
    from wdsfs.mount.engines import kernel_engine

    made, files = kernel_engine().write_image(shards, selection, tree, opening, output, base, owner)
    if as_json:
        write_json({"image": output, **made._asdict(), "files": files})
    else:
        shown = counted(len(set(files)), "shard")  # a shard may be a device twice
        say(f"{output}: {shown}, {counted(made.inodes, 'inode')}, {bytes_text(made.size)}")
