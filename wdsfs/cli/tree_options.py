"""Options of how a set is shown: its layout, and what a view makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import click

from wdsfs.cli import completion
from wdsfs.cli.options import Decorator, handing_over

if TYPE_CHECKING:
    from wdsfs.tree.composition import Composition
    from wdsfs.tree.options import TreeOptions


class ViewOptions(NamedTuple):
    """The options of a mount that can be written: shards are shown as they are."""

    layout: str
    names: str
    merge: bool


def _composition(layout: str = "samples", **typed: Any) -> Composition:
    from wdsfs.tree.options import OF_CLASSES, composition_of

    return composition_of(layout, **{**dict.fromkeys(OF_CLASSES), **typed})


def _tree(layout: str, names: str, merge: bool, index_tree: bool = False, **composed: Any) -> TreeOptions:
    from wdsfs.tree.options import TreeOptions, composition_of

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
            type=click.Choice(layouts),
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
        "merge": click.option(
            "--merge",
            is_flag=True,
            help="One tree over all shards. A second file of a name is shown as NAME~2.",
        ),
    }


_POLICY = click.Choice(["error", "skip", "empty"])

_COMPOSITION: dict[str, Decorator[Any]] = {
    "class_from": click.option(
        "--class-from",
        metavar="EXT[:FIELD]",
        help="Where --layout classes finds the class: a column, or a field of a JSON column.  [default: cls]",
    ),
    "class_names": click.option(
        "--class-names",
        type=click.Path(dir_okay=False),
        metavar="FILE",
        help="Names of the classes: one a line for 0, 1, 2 ..., or a JSON list or object.",
    ),
    "class_digits": click.option(
        "--class-digits",
        type=click.IntRange(0, 18),
        metavar="N",
        help="Show classes that are whole numbers with N digits, to sort as numbers do; 0: as they are. "
        " [default: as many as the longest has]",
    ),
    "columns": click.option(
        "--columns",
        multiple=True,
        metavar="[NAME=]EXT;EXT...",
        help="Show only these: one file for each --columns, the first in the tar of its alternatives; with a "
        "NAME, the first in the order of typing.",
    ),
    "field": click.option(
        "--field",
        multiple=True,
        metavar="NAME=EXT:FIELD",
        help="Make a file of a field of a JSON column, such as caption.txt=json:caption; FIELD may be a.b[0].",
    ),
    "ignore_case": click.option("--ignore-case", is_flag=True, help="Let --columns match in any letter case."),
    "missing": click.option(
        "--missing",
        type=_POLICY,
        default="error",
        show_default=True,
        help="A sample lacks a column, key or class: refuse, leave it out, or show an empty file.",
    ),
    "duplicates": click.option(
        "--duplicates",
        type=_POLICY,
        default="error",
        show_default=True,
        help="A key or column is there twice: refuse, leave the sample out, or show it without.",
    ),
    "join": click.option(
        "--join",
        multiple=True,
        metavar="SHARDS",
        shell_complete=completion.paths,
        help="Add the columns of the samples with the same keys in these shards.",
    ),
    "associate": click.option(
        "--associate",
        multiple=True,
        metavar="FILE",
        shell_complete=completion.paths,
        help="Add columns from FILE (.sqlite[:TABLE], .csv, .tsv, .jsonl) by key, over those in the shards.",
    ),
    "decode_members": click.option(
        "--decode-members",
        is_flag=True,
        help="Show members such as x.json.gz also decoded, as x.json (gz, bz2, xz, zst).",
    ),
}

_INDEX_TREE = click.option(
    "--index-tree",
    is_flag=True,
    help="Also by-index/000/000/000123: a link to each sample by its number in the set, from 0.",
)


view_options = handing_over("view", ViewOptions, _view_group("samples", "files"))

# Of a command that shows no tree, and so has no layout.
composition_options = handing_over(
    "composition",
    _composition,
    {name: option for name, option in _COMPOSITION.items() if not name.startswith("class_")},
)

_TREE = {**_view_group("samples", "files", "classes"), **_COMPOSITION}

tree_options = handing_over("tree", _tree, _TREE)
numbered_tree_options = handing_over("tree", _tree, {**_TREE, "index_tree": _INDEX_TREE})
