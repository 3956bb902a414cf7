"""The command `pack`: makes new shards of directories of files, or of the samples of other shards."""

from __future__ import annotations

import itertools
import logging
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from wdsfs.cli import interop_commands, output
from wdsfs.cli.opening_options import opening_options_with
from wdsfs.cli.option_kinds import (
    DETAILS,
    RARE,
    Bytes,
    Command,
    Decorator,
    LayoutName,
    dry_run_option,
    flag,
    gather_options,
    group_in_section,
    json_option,
    leave_out_option,
    offer_paths,
    refuse_typed,
    space_check_option,
)
from wdsfs.cli.output import bytes_bar, note_uneven, say, shards_bar, write_json
from wdsfs.cli.process import disk_errors, ended_in_order, when_interrupted
from wdsfs.cli.view_options import composition_options, list_file, set_options_without_split
from wdsfs.errors import ExportError, UsageError, counted, several

if TYPE_CHECKING:
    from wdsfs.packing.file_source import PackOptions
    from wdsfs.packing.plan import Plan, PlannedMember, Step
    from wdsfs.tree.composition import Composition
    from wdsfs.tree.set_options import Opening, Selection

log = logging.getLogger("wdsfs")


class Packed(NamedTuple):
    """The options of `pack`. The plan depends on `options`, the rest concerns this command only.

    `split` is the split of an Energon dataset to pack, or "".
    """

    options: PackOptions
    split: str
    exports: tuple[str, ...]
    space_check: bool
    dry_run: bool
    as_json: bool


def _pack_options(
    exports: tuple[str, ...],
    space_check: bool,
    dry_run: bool,
    as_json: bool,
    splits: tuple[str, ...],
    follow_links: bool,
    with_leavings: bool,
    exclude: tuple[str, ...],
    **given: Any,
) -> Packed:
    from wdsfs.packing.file_samples import parse_splits
    from wdsfs.packing.file_source import PackOptions
    from wdsfs.packing.file_table import WalkRules

    typed = {name: value for name, value in given.items() if value is not None}
    rules = WalkRules(follow_links, with_leavings, exclude)
    split = splits[0] if len(splits) == 1 and "=" not in splits[0] else ""
    made = () if split else tuple(parse_splits(splits))
    chosen = PackOptions(splits=made, walk=rules, **typed).check()
    return Packed(chosen, split, exports, space_check, dry_run, as_json)


_COMMON: dict[str, Decorator[Any]] = {
    "output": click.option(
        "-o",
        "--output",
        metavar="PATTERN",
        shell_complete=offer_paths,
        required=True,
        help="Names of the shards: 'out/set-%06d.tar', 's3://...' (gs, az, ais), or braces; {split} for --split.",
    ),
    "layout": click.option(
        "--layout",
        type=LayoutName(["auto", "files", "samples", "classes"]),
        default="auto",
        show_default=True,
        help="Layout of DIRECTORY. files: key.ext; samples: a directory for each sample; classes: a directory for "
        "each class (ImageFolder); auto: recognize it.",
    ),
    "tables": click.option(
        "--table",
        "tables",
        multiple=True,
        metavar="FILE[:COLUMN]",
        shell_complete=offer_paths,
        help="Add the values of each row of FILE to the sample that its COLUMN names: caption becomes "
        "KEY.caption; --columns txt=caption chooses and renames; repeatable.",
    ),
    "shuffle": click.option(
        "--shuffle",
        metavar="SEED",
        help="Shuffle the samples. SEED is any text; the same SEED gives the same order.  [default: by name]",
    ),
    "splits": click.option(
        "--split",
        "splits",
        multiple=True,
        metavar="NAME=FRACTION",
        help="Put this fraction of the samples (of each class) into the shards of split NAME: --split train=0.9 "
        "--split val=0.1. NAME alone chooses that split of an Energon dataset. Without --split, {split} is the "
        "folder (train, val ...) below DIRECTORY.",
    ),
    "maxcount": click.option(
        "--maxcount", type=click.IntRange(1), metavar="N", help="Most samples in a shard.  [default: 10000]"
    ),
    "maxsize": click.option(
        "--maxsize",
        type=Bytes(),
        metavar="BYTES",
        help="Begin the next shard after this many bytes of content: 500MB, 1GiB.  [default: 3e9]",
    ),
    "dry_run": dry_run_option,
    "as_json": json_option,
}
_CLASSES: dict[str, Decorator[Any]] = {
    "class_as": click.option(
        "--class-as",
        type=click.Choice(["number", "name", "none"]),
        help="How --layout classes writes the class of a sample. number: its position in the order of names, "
        "which go to classes.txt beside the shards; name: its name; none: not at all.  [default: number]",
    ),
    "class_column": click.option(
        "--class-column", metavar="EXT", help="The column for the class.  [default: cls]"
    ),
    "class_names": click.option(
        "--class-names",
        type=click.Path(dir_okay=False),
        metavar="FILE",
        help="Read the numbers of the classes from FILE: one name a line for 0, 1, 2 ..., or a JSON list or "
        "object.",
    ),
}
_RARE: dict[str, Decorator[Any]] = {
    "order": click.option(
        "--order",
        metavar="FILE[:COLUMN]",
        multiple=True,
        callback=list_file,
        shell_complete=offer_paths,
        help="Write the samples in the order of the keys in FILE, a list as for --keys.",
    ),
    "sort": flag("--sort", "Sort the samples of each of SHARDS by key."),
    "keep_shards": flag("--keep-shards", "Write one new shard for each of SHARDS."),
    "mtime": click.option(
        "--mtime",
        type=int,
        metavar="SECONDS",
        help="Give all members this time, so that copies of a directory give equal shards.  [default: the time "
        "of each file]",
    ),
    "follow_links": flag("--follow-links", "Pack the targets of symbolic links, wherever they are."),
    "leave_out": leave_out_option,
    "with_leavings": flag("--with-leavings", "Also pack leftovers of programs (`1.cls~`, `Thumbs.db`)."),
    "exclude": click.option(
        "--exclude",
        multiple=True,
        metavar="PATTERN",
        help="Leave out the files and directories with this name or path below DIRECTORY: '*.log', raw; "
        "repeatable.",
    ),
    "exports": interop_commands.export_option,
    "space_check": space_check_option("Write even if the file system seems too full."),
}
packed_options = gather_options(
    "packed",
    _pack_options,
    {**_COMMON, **group_in_section(DETAILS, _CLASSES), **group_in_section(RARE, _RARE)},
)

_OF_SHARDS = (
    "field ignore_case missing duplicates join associate keys shard_id num_shards ignore_zeros group_by_key"
)
_NOT_FOR_FILES = {
    **dict.fromkeys([*_OF_SHARDS.split(), "base", "allow_missing", "strict"], "it is for SHARDS"),
    **dict.fromkeys(("sort", "keep_shards"), "it is for SHARDS; files are packed by name"),
}
_NOT_FOR_SHARDS = {
    **dict.fromkeys(_CLASSES, "the class is a column of the shards"),
    "layout": "wdsfs knows the layout of shards",
    "mtime": "members keep their headers",
    "follow_links": "wdsfs follows no links in shards",
    "with_leavings": "wdsfs packs all members of samples",
    "exclude": "choose by --columns and --keys",
    "tables": "--associate FILE adds its columns",
    "executor": "this process packs shards",
}


class Made(NamedTuple):
    """New shards, planned or written: their plan, the steps that this command did, and the facts for the report.

    `first` are members at the start of the first shard, `shown` the rows of --dry-run about them.
    """

    plan: Plan
    done: Sequence[Step]
    facts: dict[str, Any]
    left_out: str
    first: Sequence[PlannedMember]
    shown: Sequence[dict[str, Any]]
    classes: Sequence[str] = ()


@click.command(cls=Command)
@click.argument("sources", metavar="DIRECTORY...|SHARDS...", nargs=-1, required=True, shell_complete=offer_paths)
@packed_options
@set_options_without_split
@composition_options
@opening_options_with("Number of shards written at a time.", executor=True)
def pack(
    sources: tuple[str, ...], packed: Packed, selection: Selection, composition: Composition, opening: Opening
) -> None:
    """Pack the files in each DIRECTORY, or the samples of SHARDS, into new shards.

    Keys are paths below DIRECTORY. If wdsfs cannot pack a file, it names the file and writes nothing.

    \b
    Examples:
      wdsfs pack --layout classes --shuffle 1 ImageNet/train -o 'train/%06d.tar'
      wdsfs pack --table captions.csv --columns txt=caption images/ -o 'set-%06d.tar'
      wdsfs pack --keys good.txt 'train-{000000..000999}.tar' -o 'good-%06d.tar'
    \f

    With --leave-out, wdsfs packs the other files. If you stop the command, repeat it: it continues. The same files
    give the same bytes.

    From SHARDS, `pack` writes the samples that a mount with the same options shows (--columns, --field, --join
    ...). Samples that you only choose (--keys) are copied unchanged. A directory counts as SHARDS if it contains
    shards, and beside them only files about shards.

    \b
    More examples:
      wdsfs pack images/ -o 'set-%06d.tar'
      wdsfs pack photos -o 'out/{split}-%06d.tar'
      wdsfs pack --split train=0.9 --split val=0.1 images/ -o 'out/{split}-%06d.tar'
      wdsfs pack --layout samples /mnt/train/* -o 's3://bucket/new/train-%06d.tar'
      wdsfs pack --columns 'img=jpg;png' --field caption.txt=json:caption 'train-*.tar' -o 'new/%06d.tar'
      wdsfs pack --keep-shards --group-by-key 'train-*.tar' -o 'new/%06d.tar'
    """
    from wdsfs.spec.expand import expand

    since = time.monotonic()
    if not composition.is_plain and not packed.options.tables:
        _refuse_mount(sources)
    with ended_in_order():
        if _are_files(sources, packed.options.layout):
            options = replace(packed.options, columns=composition.columns, last_dot=selection.reading.last_dot)
            made = _pack_files(sources, packed._replace(options=options), opening)
        else:
            made = _pack_shards(
                sources, packed, selection._replace(split=packed.split or None), composition, opening
            )
    _report_pack(made, packed, time.monotonic() - since)
    note_uneven(interop_commands.uneven_text(made.plan.steps[0].target, made.first), opening.quiet)
    if packed.exports and not packed.dry_run:
        shards = expand([step.target for step in made.plan.steps])
        if interop_commands.after_commit(shards, False, opening):
            sys.exit(ExportError.exit_code)


def _are_files(sources: Sequence[str], layout: str) -> bool:
    """Return True for directories of files, False for SHARDS. Raises UsageError for both or a table, SpecError."""
    from wdsfs.spec.existence import holds_files

    for table in sources:
        if table.lower().endswith((".csv", ".tsv", ".json", ".jsonl", ".parquet")) and os.path.isfile(table):
            raise UsageError(f"{table} is a table: name it by --table {shlex.quote(table)}, after DIRECTORY")
    are_files = {os.path.isdir(source) if layout != "auto" else holds_files(source) for source in sources}
    if len(are_files) > 1:
        raise UsageError("one command packs either directories of files or SHARDS: type a command for each")
    return are_files.pop()


def _pack_files(directories: Sequence[str], packed: Packed, opening: Opening) -> Made:
    from wdsfs.packing.file_source import make_plan, pack_files
    from wdsfs.packing.plan import FIRST_MEMBERS, Step, planned_members, shown_values
    from wdsfs.packing.shard_writer import Files

    refuse_typed(_NOT_FOR_FILES, "directories of files")
    if packed.split:
        raise UsageError(f"--split {packed.split}: type NAME=FRACTION, for example train=0.9")
    done = list[Step]()
    with disk_errors():
        plan = make_plan(directories, packed.options)
    output.refuse_exports([step.target for step in plan.steps], packed.exports)
    for guess in () if packed.as_json or opening.quiet else plan.guesses:
        log.info("%s", guess)
    for remark in plan.remarks:
        log.warning("%s", remark)
    if not packed.dry_run:
        label = "packing and sending" if plan.sent else "packing"
        with (
            bytes_bar(label, plan.length + plan.sent, opening.quiet) as on_bytes,
            disk_errors(),
            when_interrupted(output.STOPPED),
        ):
            done = pack_files(plan, opening.jobs, on_bytes, opening.workers, space_check=packed.space_check)
    with Files(follow_links=packed.options.walk.follow_links).opened() as read, disk_errors():
        first = [*itertools.islice(planned_members(plan.steps[0].output, read=read), FIRST_MEMBERS)]
        shown = shown_values(first) if packed.dry_run else []
    facts = {**_facts(plan, plan.splits), "layout": plan.layout.name}
    losses = plan.losses
    facts["left_out_count"] = losses.unpackable_count + losses.leavings_count + losses.excluded.total()
    return Made(plan, done, facts, plan.losses.summary, first, shown, [*map(os.fsdecode, plan.samples.classes)])


def _pack_shards(
    sources: Sequence[str], packed: Packed, selection: Selection, composition: Composition, opening: Opening
) -> Made:
    from wdsfs.packing.view_source import ViewPack
    from wdsfs.tree.opening import open_typed_set

    refuse_typed(_NOT_FOR_SHARDS, "SHARDS")
    packed.options.check(of_files=False)
    _refuse_own_directory(sources, packed)
    output.refuse_exports([name(0) for name in packed.options.names], packed.exports)
    tolerant = opening.tolerance.allow_missing
    with (
        open_typed_set(sources, selection, opening, composition, whole=True) as below,
        shards_bar("planning" if packed.dry_run else "packing", len(below), opening.quiet) as on_shard,
        disk_errors(),
        when_interrupted(output.STOPPED),
    ):
        made = ViewPack(below, packed.options, on_shard, opening.jobs, allow_missing=tolerant)
        made.run(write=not packed.dry_run)
    strays = f"{counted(made.left_out, 'member')} in no sample" if made.left_out else ""
    facts = {**_facts(made.plan, made.splits), "layout": "shards", "left_out_count": made.left_out}
    return Made(made.plan, made.done, facts, strays, made.first, made.shown)


def _refuse_mount(sources: Sequence[str]) -> None:
    """Raise UsageError for a mount in place of its SHARDS."""
    from wdsfs import mount_registry

    mounts = [source for source in sources if mount_registry.find_registration(source) is not None]
    if mounts:
        raise UsageError(f"{mounts[0]} is a mount: name its SHARDS, with the options of the mount")


def _refuse_own_directory(sources: Sequence[str], packed: Packed) -> None:
    """Raise UsageError for new shards in a packed directory: the next `pack` would also pack them."""
    for place in (os.path.dirname(os.path.realpath(name(0))) for name in packed.options.names):
        if any(os.path.realpath(os.fsencode(source)) == place for source in sources):
            raise UsageError(f"--output: the new shards would be in {os.fsdecode(place)}, which is packed")


def _report_pack(made: Made, packed: Packed, seconds: float) -> None:
    """Print the planned or written shards, and the time."""
    if packed.as_json:
        done = {"written": len(made.done), "seconds": round(seconds, 3)}
        write_json(made.facts | ({"first_samples": made.shown} if packed.dry_run else done))
        return
    if packed.dry_run:
        output.print_steps(made.plan.steps)
        _print_first(made.shown)
    output.say_left_out(made.plan)
    if made.left_out:
        say(f"left out: {made.left_out}")
    if not packed.dry_run:
        output.say_done(made.plan, made.done, seconds)
        for file in made.plan.beside:
            say(f"classes: {os.fsdecode(file.target)} ({several(made.classes, 5)})")


def _print_first(shown: Sequence[dict[str, Any]]) -> None:
    """Print the members of the first samples, with the start of each text."""
    table = output.table_of("first samples", "column", "bytes", "value")
    for member in shown:
        table.add_row(member["key"], member["column"], f"{member['bytes']:,}", member["value"] or "")
    output.print_table(table)


def _facts(plan: Plan, splits: Sequence[str]) -> dict[str, Any]:
    rows = [step.as_json() for step in plan.steps]
    for row, split in zip(rows, splits, strict=True):
        row |= {"split": split} if split else {}
    return {
        "shards": rows,
        "classes": next((os.fsdecode(file.target) for file in plan.beside), None),
        "left_out": [remark.as_json() for remark in plan.left_out],
    }
