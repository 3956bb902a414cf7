"""The command `mount`: its options, and what is said of arguments that are missing or misplaced.

What it does is `mount/session.py`.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from wdsfs.cli.console import (
    build_index,
    index_options,
    index_tree_option,
    jobs_of,
    make_view,
    path_of,
    set_options,
    soundness_options,
    suffix_hint,
    tree_options,
    view_of,
)
from wdsfs.errors import UsageError
from wdsfs.names import SHARD_SUFFIXES

if TYPE_CHECKING:
    from wdsfs.dataset.shard_set import ShardSet
    from wdsfs.index.store import Index
    from wdsfs.interop.soundness import Tolerance
    from wdsfs.spec.expand import Selection, Shard
    from wdsfs.views.composition import Composition


@click.command()
@click.argument("shards", metavar="SHARDS...", nargs=-1)
@set_options
@click.argument("mountpoint", metavar="MOUNTPOINT", required=False)
@tree_options
@index_tree_option
@soundness_options
@click.option("-f", "--foreground", is_flag=True, help="Stay in front and log to the terminal.")
@click.option("-r", "--read-only", is_flag=True, help="The same as -o ro: an overlay is shown, not changed.")
@click.option(
    "-o",
    "options",
    multiple=True,
    metavar="OPT,...",
    help="Mount options: ro, allow_other, uid=, gid=, umask=, fsname=, auto_unmount, nonempty, ...",
)
@click.option(
    "--workers",
    type=click.IntRange(1, 16),
    help="Processes that serve; no effect with --overlay, where it is one.  [default: one per core, 2 to 8]",
)
@click.option(
    "--spin",
    type=click.IntRange(0, 1000),
    default=50,
    show_default=True,
    metavar="MICROSECONDS",
    help="How long a worker looks for the next request before it sleeps: speed for processor time.",
)
@click.option(
    "--readahead",
    type=click.IntRange(4, 16384),
    default=256,
    show_default=True,
    metavar="KIB",
    help="How much of a large file the kernel asks for at a time; only root can change its 128 KiB.",
)
@click.option(
    "--overlay",
    type=click.Path(file_okay=False),
    metavar="DIR",
    help="Make the tree writable; all changes go to DIR. See also `wdsfs diff` and `wdsfs commit`.",
)
@click.option("--lazy", is_flag=True, help="Mount at once; index each shard when it is first used.")
@index_options
def mount(
    shards: tuple[str, ...],
    selection: Selection,
    mountpoint: str | None,
    layout: str,
    names: str,
    merge: bool,
    index_tree: bool,
    foreground: bool,
    read_only: bool,
    options: tuple[str, ...],
    workers: int | None,
    spin: int,
    readahead: int,
    overlay: str | None,
    lazy: bool,
    index_dir: str | None,
    jobs: int | None,
    quiet: bool,
    composition: Composition,
    tolerance: Tolerance,
) -> None:
    """Mount SHARDS at MOUNTPOINT, read-only unless with --overlay. Returns when the tree is usable.

    \b
    Examples:
      wdsfs mount 'train-{000000..000999}.tar' /mnt/train
      wdsfs mount --layout files -o allow_other shards/ /mnt/train
      wdsfs mount --names full --merge 'a-{0..9}.tar' 'b-*.tar' /mnt/all
      wdsfs mount --layout classes --class-names names.txt 'train-{000..099}.tar' /mnt/train
      wdsfs mount --columns 'jpg;png' --columns cls --associate labels.csv shards/ /mnt/train
    """
    from wdsfs.index.process_pool import default_jobs
    from wdsfs.mount import daemon
    from wdsfs.mount import options as options_module
    from wdsfs.mount import session as mounting

    _refuse_own_options(options)
    if mountpoint is None or not shards:
        raise _incomplete(mountpoint)
    if not mountpoint:
        raise UsageError("the MOUNTPOINT is empty")
    wanted = options_module.MountOptions(
        specs=list(shards),
        selection=selection._replace(allow_missing=tolerance.allow_missing),
        mountpoint=mountpoint,
        view=view_of(layout, names, index_tree, tolerance.allow_missing),
        tolerance=tolerance,
        merge=merge,
        composition=composition,
        index_dir=path_of(index_dir),
        jobs=jobs_of(jobs),
        lazy=lazy,
        overlay=path_of(overlay),
        workers=workers or max(2, min(default_jobs(), 8)),
        spin=spin / 1e6,
        readahead=readahead << 10,
        options=[*options, *["ro"] * read_only],
        foreground=foreground,
    )

    def indexer(index: Index, stale: Sequence[Shard], jobs: int) -> dict[bytes, str]:
        return build_index(index, stale, jobs, quiet)

    def composer(below: ShardSet) -> dict[bytes, str]:
        return make_view(below, quiet)

    def adviser(below: ShardSet) -> str | None:
        return None if quiet else suffix_hint(below, wanted.view, overlay is not None)

    front = mounting.Front(indexer, composer, adviser)
    if foreground:
        code = daemon.guarded(
            lambda: mounting.run(wanted, front, lambda: None, lambda: daemon.notify_systemd("READY=1"))
        )
    else:
        code = daemon.in_background(wanted, front)
    sys.exit(code)


def _refuse_own_options(options: Sequence[str]) -> None:
    """Raises UsageError for `-o layout=files`, which only mount(8) takes, and for `-o layot=files`."""
    from wdsfs.mount.options import known_options
    from wdsfs.names import closest

    own = {name[2:] for param in mount.params for name in param.opts if name.startswith("--")}
    known = {name.rstrip("=") for name in known_options()}
    for option in ",".join(options).split(","):
        name, equals, value = option.partition("=")
        dashed = name.replace("_", "-")
        if dashed in own:
            typed = f"--{dashed}" + (f" {shlex.quote(value)}" if equals else "")
            raise UsageError(f"-o {option}: it is an option of its own here: {typed}")
        meant = closest(dashed, sorted(own | known)) if name not in known else None
        if meant in own:
            raise UsageError(f"-o {option}: no such option; did you mean --{meant}?")


def _incomplete(given: str | None) -> UsageError:
    """What to say of `wdsfs mount` with one argument, or with none."""
    from wdsfs.spec.expand import names_a_shard

    if given is None:
        return UsageError("mount needs SHARDS and a MOUNTPOINT: wdsfs mount SHARDS... MOUNTPOINT")
    quoted = shlex.quote(given)
    if given.endswith(tuple(map(os.fsdecode, SHARD_SUFFIXES))) or names_a_shard(given):
        return UsageError(f"the MOUNTPOINT is missing, an empty directory: wdsfs mount {quoted} MOUNTPOINT")
    return UsageError(f"SHARDS are missing, only a MOUNTPOINT is given: wdsfs mount SHARDS... {quoted}")
