"""What was measured: kept, compared with the figures to reach, and shown as tables, JSON, Markdown and plots.

A time is shown with its ratio to wdsfs: x2.0 took twice as long as wdsfs, also where the table has rates.
"""

from __future__ import annotations

import importlib
import json
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
RATES = {"MB/s", "images/s", "reads/s"}  # more is better
TIMES = {"us/file", "us/sample", "us/read", "us/member", "s", "ms"}  # less is better
OWN = "wdsfs"
FIRST = [OWN, "wdsfs-nospin", "wdsfs, 2 processes"]
COLOURS = {
    "wdsfs": "#1b6ca8",
    "wdsfs-nospin": "#6aa5cf",
    "wdsfs-image": "#1f9e89",
    "squashfuse_ll": "#c98a1b",
    "squashfuse_ll-raw": "#e3bd76",
    "ratarmount": "#b5483a",
    "energon": "#8a5aa8",
    "erofs": "#4d8f4d",
    "erofs-files": "#86b586",
    "squashfs": "#a8741b",
    "fuse-overlayfs": "#7a6a4f",
    "overlayfs": "#9c8b6f",
    "extracted": "#777777",
    "cat": "#444444",
    "webdataset": "#2a9d8f",
}


class Case(NamedTuple):
    workload: str
    case: str
    unit: str


class Results:
    """The values of every case and system, in the order of their coming; `group` is what was asked for, if one."""

    def __init__(self, group: str = "") -> None:
        self.group = group
        self.values: dict[Case, dict[str, list[float]]] = {}
        self.about: dict[str, Any] = {}
        self.missing: dict[str, str] = {}
        self.failures: list[tuple[str, str, str]] = []
        self.notes: list[str] = []

    def add(self, case: Case, system: str, value: float) -> None:
        self.values.setdefault(case, {}).setdefault(system, []).append(value)

    def absent(self, what: str, why: str) -> None:
        self.missing[what] = why

    def failed(self, workload: str, system: str, why: str) -> None:
        self.failures.append((workload, system, why))

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def median(self, workload: str, case: str, system: str) -> float | None:
        for found, systems in self.values.items():
            if found[:2] == (workload, case) and systems.get(system):
                return statistics.median(systems[system])
        return None

    def time(self, workload: str, case: str, system: str) -> float | None:
        """The median as a time, whatever its unit."""
        for found, systems in self.values.items():
            if found[:2] == (workload, case) and systems.get(system):
                median = statistics.median(systems[system])
                return 1 / median if found.unit in RATES else median
        return None

    def workloads(self) -> list[str]:
        return list(dict.fromkeys(case.workload for case in self.values))

    def to_json(self) -> dict[str, Any]:
        return {
            "about": self.about,
            "figures": [judged._asdict() for judged in judge(self)],
            "results": [
                {**case._asdict(), "system": system, "median": statistics.median(values), "values": values}
                for case, systems in self.values.items()
                for system, values in systems.items()
            ],
            "absent": self.missing,
            "failures": self.failures,
            "notes": self.notes,
        }

    def take(self, saved: dict[str, Any]) -> None:
        """Add what a saved run has; what both have is taken from it."""
        self.about.update(saved["about"])
        for row in saved["results"]:
            case = Case(row["workload"], row["case"], row["unit"])
            self.values.setdefault(case, {})[row["system"]] = row["values"]
        self.missing.update(saved["absent"])
        self.failures += [(workload, system, why) for workload, system, why in saved["failures"]]
        for note in saved["notes"]:
            self.note(note)


# --- the figures to reach ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """Something to reach: `measure` gives what was measured, None where that is not known."""

    name: str
    against: str
    bound: float
    measure: Callable[[Results], float | None]


class Judged(NamedTuple):
    name: str
    against: str
    bound: float
    measured: float | None
    met: bool | None


VARIANTS = [f"{clients}, {order}" for clients in ("1 client", "4 clients") for order in ("sequential", "shuffled")]


def _times(
    workload: str, case: str, other: str, other_case: str = "", own: str = OWN, other_workload: str = ""
) -> Callable[[Results], float | None]:
    """The time of wdsfs over that of the other."""

    def measure(results: Results) -> float | None:
        mine = results.time(workload, case, own)
        theirs = results.time(other_workload or workload, other_case or case, other)
        return mine / theirs if mine is not None and theirs else None

    return measure


def _times_fastest(workload: str, case: str, others: Sequence[str]) -> Callable[[Results], float | None]:
    """The time of wdsfs over that of the fastest of the others. Of those, one that failed is not the fastest, and
    without one that was not tried nothing is known."""

    def measure(results: Results) -> float | None:
        mine = results.time(workload, case, OWN)
        failed = {system for failed_in, system, _ in results.failures if failed_in == workload}
        times = {other: results.time(workload, case, other) for other in others}
        if mine is None or any(time is None and other not in failed for other, time in times.items()):
            return None
        return max((mine / time for time in times.values() if time), default=None)

    return measure


def _plain(workload: str, case: str, own: str = OWN) -> Callable[[Results], float | None]:
    return lambda results: results.median(workload, case, own)


def _at_least(workload: str, case: str, rate: float) -> Callable[[Results], float | None]:
    """What is to be reached over what was measured."""
    return lambda results: rate / found if (found := results.median(workload, case, OWN)) else None


def _largest(workload: str, own: str) -> Callable[[Results], float | None]:
    """What was measured for the last case of a workload, which is the one with the most data."""

    def measure(results: Results) -> float | None:
        cases = [case.case for case in results.values if case.workload == workload]
        return results.median(workload, cases[-1], own) if cases else None

    return measure


def _memory(results: Results) -> float | None:
    cases = [case.case for case in results.values if case.workload == "memory"]
    values = [value for case in cases if (value := results.median("memory", case, OWN)) is not None]
    return values[-1] / values[0] if len(values) > 1 else None


def _small_files() -> list[Figure]:
    figures = []
    for workload in ("first read", "paths never listed"):
        for variant in VARIANTS:
            one = variant.startswith("1 ")
            bounds: list[tuple[str, float]] = [
                *((name, 0.45 if one else 0.5) for name in ("squashfuse_ll", "squashfuse_ll-raw")),
                ("ratarmount", 0.22 if one else 0.3),
            ]
            if not one:
                bounds.append(("erofs", 1.3))
            figures += [
                Figure(f"{workload}, {variant}", name, bound, _times(workload, variant, name))
                for name, bound in bounds
                if (workload, variant) != ("paths never listed", "4 clients, sequential")
            ]
    return figures


def _portable() -> list[Figure]:
    """A portable index of 10,000 shards, and a set that grows."""
    where = "portable index"
    return [
        Figure(f"{where}, mount, local", "s", 0.5, _plain(where, "mount, 10,000 shards, local")),
        Figure(f"{where}, mount, in a store", "s", 1.0, _plain(where, "mount, 10,000 shards, in a store")),
        *(
            Figure(
                f"{where}, mount, in a store, {what}",
                unit,
                bound,
                _plain(where, f"mount, {what} of all processes"),
            )
            for what, unit, bound in (("processor time", "s", 0.3), ("memory", "MiB", 60))
        ),
        Figure(f"{where}, first look into a shard", "requests", 2.0, _plain(where, "first look, requests")),
        Figure("a new shard, seen", "s", 1.0, _plain("a new shard", "seen among 1,000 shards")),
    ]


def _remote() -> list[Figure]:
    """Shards behind 20 ms to the first byte and 80 MB/s for each connection."""
    where, cold, pipe = "remote shards", "in order", "webdataset pipe:curl"
    return [
        Figure(f"{where}, {cold}", "400 MB/s", 1.0, _at_least(where, cold, 400)),
        *(
            Figure(f"{where}, {cold}", other, bound, _times(where, cold, other))
            for other, bound in (("rclone", 0.2), (pipe, 0.2), ("ratarmount", 0.1))
        ),
        Figure(f"{where}, random, a read", "ms", 25.0, _plain(where, "random, a read")),
        Figure(f"{where}, random, 64 readers", "3,000 reads/s", 1.0, _at_least(where, "random, 64 readers", 3000)),
        Figure(f"{where}, random", "bytes used", 1.2, _plain(where, "random, bytes fetched / used")),
        Figure(f"{where}, whole samples", "requests", 1.05, _plain(where, "whole samples, requests a sample")),
        *(
            Figure(
                f"{where}, {order}, cached",
                "a local shard",
                1.05,
                _times(where, f"{order}, cached", OWN, f"{order}, local shard"),
            )
            for order in ("in order", "random")
        ),
        Figure(f"{where}, index alone", "s", 0.3, _plain(where, "index alone")),
        *(
            Figure(
                f"{where}, memory under mixed load", against, bound, _plain(where, f"mixed load, memory, {case}")
            )
            for case, against, bound in (
                ("last quarter / second", "some minutes before", 1.1),
                ("last quarter", "MiB", 321),
            )
        ),
        Figure(f"{where}, training loop", pipe, 1.0, _times(where, "training loop, first epoch", pipe)),
        *_remote_order(),
    ]


def _remote_order() -> list[Figure]:
    """Shards where little but latency is a limit, and a server without any."""
    where, pipe, limit = "remote shards in order, no limit but latency", "webdataset pipe:curl", 400
    figures = []
    for case, times in (("one shard", 2.0), ("six shards", 1 / 0.6)):
        limited, spent = f"{case}, 80 MB/s a connection", f"{case}, processor time for 1 GB"
        figures += [
            Figure(f"remote shards, in order, {case}", "curl", times, _times(where, case, "curl")),
            Figure(f"remote shards, in order, {case}", pipe, 1.0, _times(where, case, pipe)),
            Figure(f"remote shards, in order, {limited}", f"{limit} MB/s", 1.0, _at_least(where, limited, limit)),
            Figure(f"remote shards, in order, {spent}", "s", 2.5, _plain(where, spent)),
        ]
    where, many = "http and https, no latency", "random, 64 readers"
    figures.append(
        Figure("https, in order", "http", 1.25, _times(where, "https, in order", OWN, "http, in order")),
    )
    for scheme, rate in (("http", 3000), ("https", 1500)):
        case = f"{scheme}, {many}"
        figures += [
            Figure(case, f"{rate:,} reads/s", 1.0, _at_least(where, case, rate)),
            Figure(case, "requests a read", 1.05, _plain(where, f"{case}, requests a read")),
            Figure(case, "bytes used", 1.1, _plain(where, f"{case}, bytes fetched / used")),
        ]
    return figures


def _in_order() -> list[Figure]:
    """Passes in order, local and remote, and what was to become cheaper with them."""
    return [
        *(
            Figure(f"passes in order, {work}", "extracted", bound, _times("passes in order", work, "extracted"))
            for work, bound in (
                ("200 kB in order", 1.8),
                ("photos in order", 2.0),
                ("3 kB in order", 2.2),
                ("photos, cp -r", 1.5),
                ("photos, tar cf", 1.5),
                ("texts, grep -r", 3.0),
            )
        ),
        *(
            Figure(
                f"passes in order, {case}", "push off", bound, _times("passes in order", case, "wdsfs, push off")
            )
            for case, bound in (
                ("photos, whole samples at random", 0.75),
                ("3 kB at random", 1.0),
                ("3 kB at random, processor time", 1.0),
            )
        ),
        *(
            Figure(
                "whole set in order, cold disk",
                other,
                bound,
                _times("whole set in order", "files of 100 kB, cold disk", other),
            )
            for other, bound in (("cat", 1.15), ("extracted", 0.5))
        ),
        *_remote(),
        *_portable(),
        Figure("packing a tree, processor time", "tar", 1.5, _times("packing a tree", "processor time", "tar")),
    ]


IMAGE = "wdsfs-image"


def _by_kernel() -> list[Figure]:
    """What the kernel serves, against FUSE and the best that there is on a local disk."""
    against = [
        *(("walk", "find, samples layout", other, bound) for other, bound in ((OWN, 0.25), ("extracted", 5.0))),
        *(
            ("first read", variant, other, bound)
            for variant in VARIANTS
            for other, bound in ((OWN, 0.5), ("extracted", 2.0))
        ),
        *(("large files", case, "erofs-files", 1.1) for case in ("warm", "warm, again")),
        ("random 4 KiB", "4 clients", "erofs-files", 1.1),
        ("whole set in order", "files of 100 kB, cold disk", "extracted", 0.5),
        ("training loader", "first epoch", "extracted", 1.03),
        *(("writing", case, "overlayfs", 1.2) for case in ("new files", "files of the shards")),
    ]
    return [
        *(
            Figure(f"image, {where}, {case}", other, bound, _times(where, case, other, own=IMAGE))
            for where, case, other, bound in against
        ),
        *(
            Figure(f"{where}, {layout}", unit, bound, _plain(where, layout, IMAGE))
            for layout in ("samples", "files")
            for where, unit, bound in (("image", "us a member", 1.5), ("image size", "bytes a member", 120.0))
        ),
        Figure("image, mount of 1,000 shards", "s", 0.2, _largest("mount time", IMAGE)),
    ]


FIGURES = [
    *_small_files(),
    *(
        Figure(
            f"second read, {variant}",
            "the first",
            0.7,
            _times("second read", variant, OWN, "", OWN, "first read"),
        )
        for variant in VARIANTS
        if variant.startswith("1 ")
    ),
    *(
        Figure(
            f"whole samples, {case}",
            "the files layout",
            bound,
            _times("whole samples", case, OWN, "files layout, known paths"),
        )
        for case, bound in (("known paths", 1.3), ("each sample listed first", 2.0))
    ),
    Figure("stat after a listing", "extracted", 1.2, _times("stat", "1 client, after a listing", "extracted")),
    Figure("walk (find)", "extracted", 3.0, _times("walk", "find", "extracted")),
    Figure("large files, warm", "ratarmount", 1 / 1.5, _times("large files", "warm", "ratarmount")),
    *(
        Figure(f"indexing, members of {size}", against, bound, _times("indexing", f"members of {size}", against))
        for size in ("3 kB", "100 kB")
        for against, bound in (("tar tf", 3.0), ("ratarmount", 0.1))
    ),
    *(
        Figure(
            f"indexing with two processes, {size}",
            "one",
            0.6,
            _times("indexing", f"members of {size}", OWN, own="wdsfs, 2 processes"),
        )
        for size in ("3 kB", "100 kB")
    ),
    Figure("index besides names", "bytes a member", 40.0, _plain("index size", "besides names")),
    Figure(
        "one tree over 10,000 shards, equal keys, listing",
        "us a name",
        50,
        _plain("one tree over all shards", "listing, 10,000 shards"),
    ),
    Figure("memory after a walk", "a set of 10,000 samples", 1.1, _memory),
    *(
        Figure(f"training loader, {case}", "extracted", 1.1, _times("training loader", case, "extracted"))
        for case in ("first epoch", "second epoch")
    ),
    *(
        Figure(
            f"writing, {case}",
            "the faster of fuse-overlayfs and ratarmount",
            0.5,
            _times_fastest("writing", case, ("fuse-overlayfs", "ratarmount")),
        )
        for case in ("new files", "files of the shards", "stream")
    ),
    *(
        Figure(
            "commit, 1 % of the samples changed", other, 1.3, _times("commit", "1 % of the samples changed", other)
        )
        for other in ("cp", "cp and sync")
    ),
    *_in_order(),
    *(
        Figure(f"samples from Python, {case}", other, bound, _times("samples from Python", case, other))
        for case, others in (
            ("one client", {"wids": 0.6, "extracted": 0.34}),
            ("DataLoader, second epoch", {"wids": 0.8, "wdsfs mount": 1.0, "extracted": 1.0}),
        )
        for other, bound in others.items()
    ),
    *_by_kernel(),
    Figure("workers killed", "errors", 0.0, _plain("survival", "errors")),
    Figure("workers killed", "wrong contents", 0.0, _plain("survival", "wrong contents")),
    Figure("workers killed", "longest wait in s", 0.25, _plain("survival", "longest wait")),
]


GROUPS = {"kernel": _by_kernel(), "in-order": _in_order()}  # the figures of workloads that are asked for together


def judge(results: Results) -> list[Judged]:
    judged = []
    for figure in GROUPS.get(results.group, FIGURES):
        measured = figure.measure(results)
        met = None if measured is None else measured <= figure.bound
        judged.append(Judged(figure.name, figure.against, figure.bound, measured, met))
    return judged


# --- tables --------------------------------------------------------------------------------------------------


def _number(value: float) -> str:
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _cell(results: Results, case: Case, system: str) -> str:
    median = results.median(case.workload, case.case, system)
    if median is None:
        return ""
    text = _number(median)
    own = results.time(case.workload, case.case, OWN)
    other = results.time(case.workload, case.case, system)
    if system != OWN and own and other and case.unit in RATES | TIMES:
        text += f" (x{other / own:.2f})"
    return text


def tables(results: Results) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, columns and rows of a table for each workload."""
    made = []
    for workload in results.workloads():
        cases = [case for case in results.values if case.workload == workload]
        seen = dict.fromkeys(system for case in cases for system in results.values[case])
        systems = [name for name in FIRST if name in seen] + [name for name in seen if name not in FIRST]
        units = {case.unit for case in cases}
        rows = [
            [
                case.case + (f", {case.unit}" if len(units) > 1 and case.unit else ""),
                *(_cell(results, case, system) for system in systems),
            ]
            for case in cases
        ]
        title = workload + (f" ({cases[0].unit})" if len(units) == 1 and cases[0].unit else "")
        made.append((title, ["", *systems], rows))
    return made


def _figure_rows(results: Results) -> list[list[str]]:
    words = {True: "yes", False: "no", None: "not measured"}
    return [
        [
            judged.name,
            judged.against,
            "" if judged.measured is None else f"{judged.measured:.3g}",
            f"{judged.bound:.3g}",
            words[judged.met],
        ]
        for judged in judge(results)
    ]


FIGURE_COLUMNS = ["work", "against", "measured", "at most", "met"]


def show(results: Results, console: Console) -> None:
    for title, columns, rows in tables(results):
        _print(console, title, columns, rows)
    rows = _figure_rows(results)
    measured = [row for row in rows if row[2]]
    _print(console, "figures to reach, as ratios of times", FIGURE_COLUMNS, measured)
    console.print(f"not measured: {len(rows) - len(measured)} other figures to reach", highlight=False)
    for line in _remarks(results):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _print(console: Console, title: str, columns: list[str], rows: list[list[str]]) -> None:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if not number else "right", overflow="fold")
    for row in rows:
        table.add_row(*row, style="red" if row[-1] == "no" else None)
    console.print(table)


def _remarks(results: Results) -> list[str]:
    lines = [f"absent: {what}: {why}" for what, why in results.missing.items()]
    lines += [f"failed: {workload}: {system}: {why}" for workload, system, why in results.failures]
    return lines + [f"note: {note}" for note in results.notes]


def markdown(results: Results, plots: Sequence[str] = ()) -> str:
    about = results.about
    versions = ", ".join(f"{name} {version}".strip() for name, version in about.get("versions", {}).items())
    lines = [f"Run of {about.get('date', '')}, {about.get('machine', '')}. {versions}.", ""]
    for plot in plots:
        lines += [f"![{plot_title(plot)}]({plot})", ""]
    for title, columns, rows in tables(results):
        lines += [f"**{title[0].upper()}{title[1:]}**", "", *_markdown_table(columns, rows), ""]
    lines += [
        "**Figures to reach, as ratios of times**",
        "",
        *_markdown_table(FIGURE_COLUMNS, _figure_rows(results)),
    ]
    remarks = _remarks(results)
    return "\n".join([*lines, *([""] if remarks else []), *(f"- {remark}" for remark in remarks)]) + "\n"


def _markdown_table(columns: list[str], rows: list[list[str]]) -> list[str]:
    rule = "|".join(["", "---", *["---:"] * (len(columns) - 1), ""])
    return [
        f"| {' | '.join(cells)} |" if number != 1 else rule for number, cells in enumerate([columns, [], *rows])
    ]


# --- files ---------------------------------------------------------------------------------------------------


def save(results: Results, directory: Path) -> Path:
    """Write the JSON and the Markdown of a run; an earlier run of the day is kept."""
    directory.mkdir(parents=True, exist_ok=True)
    date = results.about["date"]
    number = 1
    while (file := directory / f"{date}{'' if number == 1 else f'-{number}'}.json").exists():
        number += 1
    file.write_text(json.dumps(results.to_json(), indent=1) + "\n")
    file.with_suffix(".md").write_text(markdown(results))
    return file


def publish(results: Results, document: Path) -> None:
    """Put the tables between the two markers of a document, and the plots beside it."""
    text = document.read_text()
    pattern = re.compile(f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"{document} has no line {BEGIN} with {END} after it")
    table = f"{BEGIN}\n\n{markdown(results, draw(results, document.parent))}\n{END}"
    document.write_text(pattern.sub(lambda _: table, text))


# Title, workload, cases, and whether the scale is logarithmic.
PLOTS = {
    "performance-small.svg": (
        "Small files: us for open, read and close, on a fresh mount",
        "first read",
        VARIANTS,
        True,
    ),
    "performance-large.svg": ("Large files: MB/s", "large files", ["warm", "cold disk"], False),
    "performance-loader.svg": (
        "Training loader: images/s",
        "training loader",
        ["first epoch", "second epoch"],
        False,
    ),
}


def plot_title(name: str) -> str:
    return PLOTS[name][0]


def draw(results: Results, directory: Path) -> list[str]:
    """The plots that there are values for; returns their names. None without matplotlib."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        results.absent("plots", "no Python module matplotlib")
        return []
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "wdsfs", "font.size": 9, "axes.axisbelow": True})
    pyplot = importlib.import_module("matplotlib.pyplot")
    drawn = []
    for name, (title, workload, cases, logarithmic) in PLOTS.items():
        values = {case.case: systems for case, systems in results.values.items() if case.workload == workload}
        groups = [case for case in cases if case in values]
        if groups:
            _draw(pyplot, directory / name, title, {case: values[case] for case in groups}, logarithmic)
            drawn.append(name)
    return drawn


def _draw(
    pyplot: Any, file: Path, title: str, values: dict[str, dict[str, list[float]]], logarithmic: bool
) -> None:
    systems = list(dict.fromkeys(system for one in values.values() for system in one))
    figure, axes = pyplot.subplots(figsize=(8, 3.2), layout="constrained")
    width = 0.8 / len(systems)
    for number, system in enumerate(systems):
        there = [(at, one[system]) for at, one in enumerate(values.values()) if system in one]
        middles = [statistics.median(each) for _, each in there]
        below = [middle - min(each) for middle, (_, each) in zip(middles, there, strict=True)]
        above = [max(each) - middle for middle, (_, each) in zip(middles, there, strict=True)]
        places = [at + (number - (len(systems) - 1) / 2) * width for at, _ in there]
        error = {"elinewidth": 0.7, "ecolor": "#222222"}
        colour = COLOURS.get(system)
        axes.bar(places, middles, width, yerr=[below, above], color=colour, label=system, error_kw=error)
    if logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(range(len(values)), list(values))
    axes.set_title(title, loc="left")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)
