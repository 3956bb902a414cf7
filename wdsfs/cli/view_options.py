"""Options that choose the shards of a set, and options of the view: the tree and its columns."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from wdsfs.cli.option_kinds import (
    DETAILS,
    SET,
    SHOWN,
    Decorator,
    LayoutName,
    flag,
    gather_options,
    group_in_section,
    in_section,
    offer_directories,
    offer_paths,
)
from wdsfs.cli.process import ended_in_order
from wdsfs.errors import UsageError
from wdsfs.names import KEY_ENDS

if TYPE_CHECKING:
    from wdsfs.tree.composition import Composition
    from wdsfs.tree.set_options import Selection, TreeOptions

# --- the shards, and how to read them -------------------------------------------------------------------


def _selection(**typed: Any) -> Selection:
    from wdsfs.tree.set_options import selection_of

    return selection_of(**typed)


# Options that choose a part of a set, and options for reading its shards.
_PART: dict[str, Decorator[Any]] = {
    "split": click.option(
        "--split",
        metavar="NAME",
        help="Only split NAME (train, val ...) of a prepared Energon dataset, a directory with .nv-meta.",
    ),
    "shard_id": click.option(
        "--shard-id",
        type=click.IntRange(0),
        metavar="N",
        help="Only shards N, N+M, N+2M ... of the set: a part for each rank N, from 0.",
    ),
    "num_shards": click.option(
        "--num-shards", type=click.IntRange(1), metavar="M", help="Number of parts for --shard-id."
    ),
    "ignore_zeros": flag(
        "--ignore-zeros", "Read on after the end mark of a tar: for shards made of several tars by `cat`."
    ),
    "group_by_key": flag(
        "--group-by-key", "Group all members with the same key in a shard into one sample, even if they lie apart."
    ),
    "last_dot": click.option(
        "--key-ends",
        "last_dot",
        type=click.Choice(KEY_ENDS),
        default=KEY_ENDS[0],
        show_default=True,
        callback=lambda _ctx, _param, value: value == KEY_ENDS[1],
        help="The dot at which the key ends, for names such as 1.2.840.7.dcm or talk_11.708.flac.",
    ),
}
_BASE: dict[str, Decorator[Any]] = {
    "base": click.option(
        "--base",
        metavar="DIR|URL",
        shell_complete=offer_directories,
        help="The place of the shards of a portable index (.wdsidx) or an image.  [default: beside it]",
    )
}

# Of all commands that take SHARDS.
set_options = gather_options("selection", _selection, group_in_section(SET, {**_PART, **_BASE}))
set_options_without_base = gather_options("selection", _selection, group_in_section(SET, _PART))
# Of `pack`, whose own --split also makes splits.
set_options_without_split = gather_options(
    "selection",
    _selection,
    group_in_section(SET, {name: option for name, option in {**_PART, **_BASE}.items() if name != "split"}),
)

# --- the view of a set ---------------------------------------------------------------------------------------


def _composition(layout: str = "samples", **typed: Any) -> Composition:
    from wdsfs.tree.composition import OF_CLASSES, composition_of

    return composition_of(layout, **{**dict.fromkeys(OF_CLASSES), **typed})


def _plain_tree(**typed: Any) -> TreeOptions:
    from wdsfs.tree.set_options import TreeOptions

    return TreeOptions(**typed)


def _tree(layout: str, names: str, merge: bool, *, index_tree: bool = False, **composed: Any) -> TreeOptions:
    from wdsfs.tree.composition import composition_of
    from wdsfs.tree.set_options import TreeOptions

    return TreeOptions(layout, names, merge, index_tree, composition_of(layout, **composed))


_LAYOUTS = {
    "samples": "samples: a directory for each sample",
    "files": "files: the members as `tar x` writes them",
    "classes": "classes: a directory for each class",
}


def _view_group(*layouts: str) -> dict[str, Decorator[Any]]:
    return {
        "layout": click.option(
            "--layout",
            type=LayoutName(layouts),
            default="samples",
            show_default=True,
            help="; ".join(_LAYOUTS[layout] for layout in layouts) + ".",
        ),
        "names": click.option(
            "--names",
            type=click.Choice(["ext", "full"]),
            default="ext",
            show_default=True,
            help="Name the files of a sample `left.jpg` (ext) or `image194.left.jpg` (full).",
        ),
        "merge": flag("--merge", "Show one tree over all shards. A second file with the same name is NAME~SHARD."),
    }


_POLICY = click.Choice(["error", "skip", "empty"])


def list_file(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> str | None:
    """Return the file of a list of keys. A pipe is copied into a file for the time of this command.

    Raises UsageError for several options: they could mean all files, or only the last.
    """
    if len(values) > 1:
        option = param.opts[-1]
        raise UsageError(f"{option} twice: give all files to one {option}, as in {option} '{{a.txt,b.txt}}'")
    value = values[0] if values else None
    if value is None or (value not in ("", "-") and (not os.path.exists(value) or os.path.isfile(value))):
        return value
    from wdsfs.tree.label_files import refuse_empty
    from wdsfs.tree.label_rows import copy_list

    option = param.opts[-1]
    refuse_empty(value, option)
    if os.path.isdir(value):
        raise UsageError(f"{option} {value}: is a directory")
    if ctx.info_name in ("mount", "image"):
        raise UsageError(
            f"{option} {value}: a mount reads the list again after a change: write the list into a file"
        )
    import tempfile

    ctx.with_resource(ended_in_order())
    directory = tempfile.TemporaryDirectory(prefix="wdsfs-keys-")
    try:
        copy = copy_list(value, option, directory.name)
    except BaseException as error:  # also an interrupt: click closes no context while it reads the options
        directory.cleanup()
        if isinstance(error, OSError):
            raise UsageError(f"{option} {value}: {error.strerror}") from None
        raise
    ctx.with_resource(directory)
    return copy


keys_option: Decorator[Any] = click.option(
    "--keys",
    metavar="FILE[:COLUMN]",
    multiple=True,
    callback=list_file,
    shell_complete=offer_paths,
    help="Only the samples that FILE lists: KEY or SHARD/KEY in each line, or in COLUMN of a table, or .npy; "
    "`-`: the standard input.",
)

_COLUMNS: dict[str, Decorator[Any]] = {
    "keys": keys_option,
    "columns": click.option(
        "--columns",
        multiple=True,
        metavar="[NAME=]EXT;EXT...",
        help="Show only this column; repeatable. Of alternatives (jpg;png), a sample shows the first in the "
        "tar; with a NAME, the first as typed.",
    ),
    "associate": click.option(
        "--associate",
        multiple=True,
        metavar="FILE[:KEYCOLUMN]",
        shell_complete=offer_paths,
        help="Add columns (labels, captions) from FILE by key, or replace columns of the shards; repeatable. "
        "FILE: .csv, .tsv, .json, .jsonl, .parquet, .arrow, .sqlite[:TABLE[:KEYCOLUMN]], 'meta/*.parquet'.",
    ),
}
_DETAILS: dict[str, Decorator[Any]] = {
    "class_from": click.option(
        "--class-from",
        metavar="EXT[:FIELD]",
        help="The column, or the field of a JSON column, with the class for --layout classes.  [default: cls]",
    ),
    "class_names": click.option(
        "--class-names",
        type=click.Path(dir_okay=False),
        metavar="FILE",
        help="Read the names of the classes from FILE: one name a line for 0, 1, 2 ..., or a JSON list or object.",
    ),
    "class_digits": click.option(
        "--class-digits",
        type=click.IntRange(0, 18),
        metavar="N",
        help="Show numeric classes with N digits, so that they sort as numbers; 0: as written.  [default: the "
        "digits of the longest number]",
    ),
    "field": click.option(
        "--field",
        multiple=True,
        metavar="NAME=EXT:FIELD",
        help="Show a field of a JSON column as a file, as in caption.txt=json:caption or x=json:a.b[0]; "
        "repeatable.",
    ),
    "ignore_case": flag("--ignore-case", "Ignore the letter case of --columns."),
    "missing": click.option(
        "--missing",
        type=_POLICY,
        default="error",
        show_default=True,
        help="If a sample lacks a column, key or class: refuse the set (error), leave the sample out (skip), or "
        "show an empty file (empty).",
    ),
    "duplicates": click.option(
        "--duplicates",
        type=_POLICY,
        default="error",
        show_default=True,
        help="If a key or column occurs twice: refuse the set (error), leave the sample out (skip), or show it "
        "without these columns (empty).",
    ),
    "join": click.option(
        "--join",
        multiple=True,
        metavar="SHARDS",
        shell_complete=offer_paths,
        help="Add the columns that samples with the same key have in these SHARDS; repeatable.",
    ),
}
_COMPOSITION: dict[str, Decorator[Any]] = {
    **group_in_section(SHOWN, _COLUMNS),
    **group_in_section(DETAILS, _DETAILS),
}
_INDEX_TREE = flag(
    "--index-tree", "Also show by-index/000/000/000123: a link to each sample by its number in the set, from 0."
)


view_options = gather_options("tree", _plain_tree, group_in_section(SHOWN, _view_group("samples", "files")))

# Of a command that shows no tree: without a layout and its classes.
_FOR_COLUMNS = {name: option for name, option in _COMPOSITION.items() if not name.startswith("class_")}
composition_options = gather_options("composition", _composition, _FOR_COLUMNS)

class_names_option = _COMPOSITION["class_names"]

_TREE = {**group_in_section(SHOWN, _view_group("samples", "files", "classes")), **_COMPOSITION}

tree_options = gather_options("tree", _tree, _TREE)
numbered_tree_options = gather_options("tree", _tree, {**_TREE, "index_tree": in_section(DETAILS, _INDEX_TREE)})
