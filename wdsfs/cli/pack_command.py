"""The command `pack`: makes shards of directories of files."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from wdsfs.cli import completion, index_commands, options, output
from wdsfs.cli.output import bytes_bar, note_uneven, say, uneven_text, write_json
from wdsfs.cli.process import disk_errors, ended_in_order, when_interrupted
from wdsfs.errors import ExportError

if TYPE_CHECKING:
    from wdsfs.packing.file_source import FilePlan, PackOptions
    from wdsfs.packing.plan import Step
    from wdsfs.tree.options import Opening

log = logging.getLogger("wdsfs")


class Packed(NamedTuple):
    """The options of `pack`; `options` are those that the plan depends on."""

    options: PackOptions
    exports: tuple[str, ...]
    space_check: bool
    dry_run: bool
    as_json: bool


def _packed(
    exports: tuple[str, ...],
    space_check: bool,
    dry_run: bool,
    as_json: bool,
    splits: tuple[str, ...],
    follow_links: bool,
    with_leavings: bool,
    **given: Any,
) -> Packed:
    from wdsfs.packing.file_samples import parse_splits
    from wdsfs.packing.file_source import PackOptions
    from wdsfs.packing.file_table import WalkRules

    typed = {name: value for name, value in given.items() if value is not None}
    rules = WalkRules(follow_links, with_leavings)
    chosen = PackOptions(splits=tuple(parse_splits(splits)), walk=rules, **typed).check()
    return Packed(chosen, exports, space_check, dry_run, as_json)


packed_options = options.handing_over(
    "packed",
    _packed,
    {
        "output": click.option(
            "-o",
            "--output",
            metavar="PATTERN",
            shell_complete=completion.paths,
            required=True,
            help="Names of the shards: 'out/set-%06d.tar' or braces, with {split} for --split; also 's3://...', "
            "gs, az, ais.",
        ),
        "layout": click.option(
            "--layout",
            type=click.Choice(["auto", "files", "samples", "classes"]),
            default="auto",
            show_default=True,
            help="files: key.ext; samples: a directory for each sample; classes: one for each class "
            "(ImageFolder); auto: what it looks like, or an error.",
        ),
        "class_as": click.option(
            "--class-as",
            type=click.Choice(["number", "name", "none"]),
            help="What --layout classes writes to the column of the class: its number in the order of names, "
            "which go to classes.txt beside the shards; its name; or no column.  [default: number]",
        ),
        "class_column": click.option(
            "--class-column", metavar="EXT", help="The extension of that column.  [default: cls]"
        ),
        "class_names": click.option(
            "--class-names",
            type=click.Path(dir_okay=False),
            metavar="FILE",
            help="Take the numbers of the classes from here: one name a line for 0, 1, 2 ..., or a JSON list or "
            "object.",
        ),
        "shuffle": click.option(
            "--shuffle",
            metavar="SEED",
            help="Shuffle the samples: any text; the same gives the same order everywhere.  [default: by name]",
        ),
        "order": click.option(
            "--order",
            type=click.Path(dir_okay=False),
            metavar="FILE",
            help="The samples in the order of the keys in FILE, one a line, or with a NUL after each.",
        ),
        "splits": click.option(
            "--split",
            "splits",
            multiple=True,
            metavar="NAME=FRACTION",
            help="Put this fraction of the samples (of each class) into shards with this name for {split}: "
            "--split train=0.9 --split val=0.1.",
        ),
        "maxcount": click.option(
            "--maxcount", type=click.IntRange(1), help="Samples in a shard.  [default: 10000]"
        ),
        "maxsize": click.option(
            "--maxsize",
            type=options.AtLeastOne(),
            metavar="BYTES",
            help="Bytes of content in a shard, after which the next one begins.  [default: 3e9]",
        ),
        "mtime": click.option(
            "--mtime",
            type=int,
            metavar="SECONDS",
            help="Give all members this time, so that copies of a tree give the same bytes.  [default: that of "
            "each file]",
        ),
        "follow_links": options.flag("--follow-links", "Pack what symbolic links lead to, wherever it is."),
        "leave_out": options.leave_out_option,
        "with_leavings": options.flag(
            "--with-leavings", "Also pack what programs have left behind (`1.cls~`, `Thumbs.db`)."
        ),
        "exports": index_commands.export_option,
        "space_check": options.space_check_option("Go ahead where the file system seems too full."),
        "dry_run": options.dry_run_option,
        "as_json": options.json_option,
    },
)


@click.command()
@click.argument("directories", metavar="DIRECTORY...", nargs=-1, required=True, type=options.Directory())
@packed_options
@options.opening_options_with(
    "Shards that are written at a time, each by a process.", executor=True, tolerance=False
)
def pack(directories: tuple[str, ...], packed: Packed, opening: Opening) -> None:
    """Pack the files in each DIRECTORY into new shards.

    Keys are paths below DIRECTORY. What cannot be packed is named, and nothing is written, or with --leave-out it
    is left out. A command that was stopped goes on when it is repeated. The same files give the same bytes.

    \b
    Examples:
      wdsfs pack images/ -o 'set-%06d.tar'
      wdsfs pack --layout classes ImageNet/train -o 'train/%06d.tar' --shuffle 1
      wdsfs pack --split train=0.9 --split val=0.1 images/ -o 'out/{split}-%06d.tar'
      wdsfs pack --layout samples /mnt/train/* -o 's3://bucket/new/train-%06d.tar'
    """
    from wdsfs.packing.file_source import make_plan, pack_files
    from wdsfs.packing.plan import Step, member_names
    from wdsfs.spec.expand import expand

    since, done = time.monotonic(), list[Step]()
    with ended_in_order():
        with disk_errors():
            plan = make_plan(directories, packed.options)
        output.refuse_exports([step.target for step in plan.steps], packed.exports)
        if packed.options.layout == "auto" and not packed.as_json and not opening.quiet:
            log.info("taken for %s; --layout says it otherwise", plan.layout.text)
        if not packed.dry_run:
            label = "packing and sending" if plan.sent else "packing"
            with (
                bytes_bar(label, plan.length + plan.sent, opening.quiet) as on_bytes,
                disk_errors(),
                when_interrupted(output.STOPPED),
            ):
                done = pack_files(plan, opening.jobs, on_bytes, packed.space_check, opening.workers)
    _show(plan, done, packed, time.monotonic() - since)
    first = plan.steps[0].output
    note_uneven(uneven_text(first.target, member_names(first)), opening.quiet)
    if packed.exports and not packed.dry_run:
        shards = expand([step.target for step in plan.steps])
        if index_commands.after_commit(shards, packed.exports, False, opening):
            sys.exit(ExportError.exit_code)


def _show(plan: FilePlan, done: Sequence[Step], packed: Packed, seconds: float) -> None:
    """Print the shards that are planned, or that were written, and in how many seconds."""
    if packed.as_json:
        report = _facts(plan)
        if not packed.dry_run:
            report |= {"written": len(done), "seconds": round(seconds, 3)}
        write_json(report)
        return
    if packed.dry_run:
        output.print_steps(plan.steps)
    output.say_left_out(plan)
    if plan.losses.summary:
        say(f"left out: {plan.losses.summary}")
    if not packed.dry_run:
        output.say_done(plan, done, seconds)
        for file in plan.beside:
            say(f"classes: {os.fsdecode(file.target)}")


def _facts(plan: FilePlan) -> dict[str, Any]:
    rows = [step.as_json() for step in plan.steps]
    for row, split in zip(rows, plan.splits, strict=True):
        row |= {"split": split} if split else {}
    return {
        "layout": plan.layout.name,
        "shards": rows,
        "classes": next((os.fsdecode(file.target) for file in plan.beside), None),
        "left_out": [remark.as_json() for remark in plan.left_out],
        "left_out_count": plan.losses.unpackable_count + plan.losses.leavings_count,
    }
