"""The command `info`: counts of a set, and plots of them.

What is counted is in `tree/statistics.py` and `tree/distributions.py`, what is drawn in `plots/plots.py`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import click

from wdsfs.cli.opening import opened
from wdsfs.cli.options import (
    Opening,
    executor_opening_options,
    json_option,
    set_options,
    shards_argument,
    soundness_options,
)
from wdsfs.cli.output import contents_text, print_table, say, table_of, write_json
from wdsfs.errors import UsageError, bytes_text, counted
from wdsfs.names import shown

if TYPE_CHECKING:
    from wdsfs.spec.selection import Selection
    from wdsfs.tree.composition import Composition
    from wdsfs.tree.distributions import Distribution

log = logging.getLogger("wdsfs")


@click.command()
@shards_argument
@set_options
@json_option
@soundness_options
@executor_opening_options
@click.option(
    "--plot",
    "plot_file",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Write plots of sizes, shards and classes into a file, SVG or PNG by its suffix.",
)
@click.option(
    "--class-from",
    metavar="EXT[:FIELD]",
    help="The class in --plot: a column, or a field of a JSON column.  [default: the folder of the key]",
)
@click.option(
    "--class-names",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Names of the classes in --plot: one a line for 0, 1, 2 ..., or a JSON list or object.",
)
def info(
    shards: tuple[str, ...],
    selection: Selection,
    as_json: bool,
    opening: Opening,
    plot_file: str | None,
    class_from: str | None,
    class_names: str | None,
) -> None:
    """Count shards, samples, members and bytes, and the sizes of each extension.

    With --class-from the members with the classes are read, once; the index keeps what they say.

    \b
    Example:
      wdsfs info 'train-{000000..000999}.tar'
      wdsfs info --plot train.svg --class-from cls 'train-{000000..000999}.tar'
    """
    from wdsfs.tree.distributions import Distribution, count_classes
    from wdsfs.tree.statistics import gather

    composition = _composition(plot_file, class_from, class_names)
    plotted = Distribution() if plot_file is not None else None
    with opened(shards, selection, opening, composition, whole=True) as below:
        report = gather(below.plain if class_from else below, plotted)
        if plotted is not None and class_from:
            count_classes(plotted, below, class_from)
    if plotted is not None and plot_file is not None:
        _write_plots(plotted, plot_file)
        if not opening.quiet:
            log.info("the plots are in %s", plot_file)
    if as_json:
        write_json(report)
        return
    say(
        f"{contents_text(report['shards'], report['samples'], report['members'])}, "
        f"{bytes_text(report['bytes'])} of content in {bytes_text(report['shard_bytes'])} of shards"
    )
    if report["damaged"]:
        verb = "is" if report["damaged"] == 1 else "are"
        say(f"{counted(report['damaged'], 'shard')} {verb} damaged; see: wdsfs check")
    if report["apart"] or report["joined"]:
        told = f"{counted(report['apart'], 'sample')} with members that lie apart"
        say(f"{told}, {counted(report['joined'], 'shard')} of several tars; a commit puts that right")
    table = table_of("extension", "files", "bytes", "smallest", "median", "90 %", "largest")
    for row in report["extensions"]:
        sizes = [row[key] for key in ("bytes", "min", "median", "p90", "max")]
        table.add_row(shown(row["extension"]) or "(none)", f"{row['count']:,}", *map(bytes_text, sizes))
    print_table(table)
    if report["more_extensions"]:
        say(f"and {counted(report['more_extensions'], 'more extension')}")


def _composition(plot_file: str | None, class_from: str | None, class_names: str | None) -> Composition:
    """The view whose folders are the classes, or the plain one. Raises UsageError."""
    from wdsfs.tree.composition import SKIP, Column, Composition, class_source

    if plot_file is not None:
        _refuse_plot(plot_file)
    elif class_from or class_names:
        raise UsageError("--class-from and --class-names say what --plot FILE counts")
    if class_names and not class_from:
        raise UsageError("--class-names needs --class-from: the column that has the numbers of the classes")
    if not class_from:
        return Composition()
    extension, field = class_source(class_from)
    # The column alone: a folder then has as many samples as the class, also where a sample has no other file.
    return Composition(
        columns=(Column((extension,)),),
        missing=SKIP,
        duplicates=SKIP,
        classes=True,
        class_from=extension,
        class_field=field,
        class_names=class_names,
        class_digits=0,
    )


def _refuse_plot(plot_file: str) -> None:
    """Raise UsageError, before the set is opened, if nothing can be drawn into this file."""
    from wdsfs.pages.plots import FORMATS, need_matplotlib

    if _suffix_of(plot_file) not in FORMATS:
        suffixes = " or ".join(f".{suffix}" for suffix in FORMATS)
        raise UsageError(f"--plot {plot_file}: name a file that ends in {suffixes}")
    need_matplotlib()


def _write_plots(counts: Distribution, plot_file: str) -> None:
    """Write all charts into one file. Raises UsageError if it cannot be written."""
    from wdsfs.pages.plots import drawn, plots_of

    picture = drawn(plots_of(counts), _suffix_of(plot_file))
    try:
        with open(plot_file, "wb") as file:
            file.write(picture)
    except OSError as error:
        raise UsageError(f"--plot {plot_file}: {error.strerror}") from None


def _suffix_of(plot_file: str) -> str:
    return plot_file.lower().rpartition(".")[2]
