"""The command `table`: writes a table of a set, a row a sample."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import click

from wdsfs import wings
from wdsfs.cli.opening_options import opening_options_with
from wdsfs.cli.option_kinds import Command, flag, shards_argument
from wdsfs.cli.output import say
from wdsfs.cli.process import ended_in_order
from wdsfs.cli.view_options import composition_options, set_options
from wdsfs.errors import counted

if TYPE_CHECKING:
    from wdsfs.tree.composition import Composition
    from wdsfs.tree.set_options import Opening, Selection

log = logging.getLogger("wdsfs")


@click.command(cls=Command)
@shards_argument
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    required=True,
    type=click.Path(dir_okay=False),
    help="The file of the table: .parquet, .csv or .jsonl. wdsfs replaces an older file of that name.",
)
@flag("--sizes", "Write only keys and sizes, from the index: wdsfs reads no shard.")
@set_options
@composition_options
@opening_options_with("Number of processes that read shards.", executor=True)
def table(
    shards: tuple[str, ...],
    output: str,
    sizes: bool,
    selection: Selection,
    composition: Composition,
    opening: Opening,
) -> None:
    """Write a table of SHARDS: a row for each sample.

    Choose rows with any tool, and give their keys to --keys.

    \b
    Examples:
      wdsfs table 'train-{000000..000999}.tar' -o train.parquet
      duckdb -c "COPY (SELECT __key__ FROM 'train.parquet' WHERE cls = 7) TO 'seven.csv'"
      wdsfs mount --keys seven.csv 'train-{000000..000999}.tar' /mnt/seven
    \f

    The columns are: __key__, __shard__, __number__ in the set; bytes.EXT, the size of each column; the values of
    classes and small texts (cls, txt ...); the fields of JSON, as json.NAME. The cache keeps the values, so the
    next table reads new shards only.
    """
    wings.need_tables()
    from wdsfs.tree.opening import open_typed_set
    from wdsfs.tree.set_table import SetTable
    from wdsfs.tree.table_files import check_name, write_table

    check_name(output)
    with ended_in_order(), open_typed_set(shards, selection, opening, composition, whole=True) as lower:
        made = SetTable(lower, composition, opening, with_values=not sizes)
        write_table(output, made.schema, made.parts())
    left = made.left
    if left.unreadable:
        log.warning("%s without a value, the first: %s", counted(left.unreadable, "file"), left.example)
    if left.cut:
        log.warning("%s cut after 1,024 bytes", counted(left.cut, "value"))
    if left.excess:
        log.warning(
            "%s left out: a shard has up to 200 columns and 2 GiB of values", counted(left.excess, "value")
        )
    say(f"{counted(made.rows, 'sample')}, {counted(len(made.schema), 'column')} in {output}", err=True)
