"""What was measured: kept, and shown as tables, JSON and Markdown.

A time is shown with its ratio to wdsfs: x2.0 took twice as long as wdsfs, also where the table has rates.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

RATES = {"MB/s", "images/s", "reads/s"}  # more is better
TIMES = {"us/file", "us/sample", "us/read", "us/member", "s", "ms"}  # less is better
OWN = "wdsfs"
FIRST = [OWN, "wdsfs-base", "wdsfs, 2 processes"]


class Case(NamedTuple):
    workload: str
    case: str
    unit: str


class Results:
    """The values of every case and system, in the order of their coming."""

    def __init__(self) -> None:
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


# --- tables --------------------------------------------------------------------------------------------------


def figure(value: float) -> str:
    """A value with three digits or, from 100 on, all of them."""
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _cell(results: Results, case: Case, system: str) -> str:
    median = results.median(case.workload, case.case, system)
    if median is None:
        return ""
    text = figure(median)
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


def show(results: Results, console: Console) -> None:
    for title, columns, rows in tables(results):
        _print(console, title, columns, rows)
    for line in _remarks(results):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _print(console: Console, title: str, columns: list[str], rows: list[list[str]]) -> None:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if not number else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _remarks(results: Results) -> list[str]:
    lines = [f"absent: {what}: {why}" for what, why in results.missing.items()]
    lines += [f"failed: {workload}: {system}: {why}" for workload, system, why in results.failures]
    return lines + [f"note: {note}" for note in results.notes]


def markdown(results: Results) -> str:
    about = results.about
    versions = ", ".join(f"{name} {version}".strip() for name, version in about.get("versions", {}).items())
    lines = [f"Run of {about.get('date', '')}, {about.get('machine', '')}. {versions}.", ""]
    for title, columns, rows in tables(results):
        lines += [f"**{title[0].upper()}{title[1:]}**", "", *_markdown_table(columns, rows), ""]
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
