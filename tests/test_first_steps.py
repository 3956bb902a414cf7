"""README: what it says under "First steps", typed in as a new user does, and what it promises of itself."""

from __future__ import annotations

import json
import os
import re
from xml.etree import ElementTree

import pytest

from bench import readme, report
from tests.conftest import ROOT, Program, need_fuse
from tests.peers import LONG_PATIENCE, environment_of
from tests.typed import steps_of, type_in

_TEXT = (ROOT / "README.md").read_text()
SECTIONS = {section.partition("\n")[0]: section for section in re.split(r"^## ", _TEXT, flags=re.MULTILINE)[1:]}
STEPS = SECTIONS["First steps"]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.timeout(2 * LONG_PATIENCE)
def test_first_steps_can_be_typed_from_the_readme_alone(program: Program) -> None:
    need_fuse()
    home = program.directory("data")
    program.environment = {**environment_of(program), "LC_ALL": "C.UTF-8"}
    place = home / "mnt"
    try:
        type_in(program, STEPS, {"/data": home})
        assert not os.path.ismount(place), "the steps do not unmount"
    finally:
        if os.path.ismount(place):
            program.run("umount", "--lazy", place, code=None)
    assert (home / "new" / "pets-1.tar").read_bytes() != (home / "pets-1.tar").read_bytes()


def test_first_steps_are_ten_lines_that_make_mount_change_commit_and_unmount() -> None:
    commands = [step.command for step in steps_of(STEPS)]
    assert len(commands) == 10
    verbs = [command.split()[1] for command in commands if command.startswith("wdsfs ")]
    assert verbs == ["pack", "mount", "diff", "commit", "umount"]


def test_the_readme_is_short() -> None:
    """What is said in full is on a page of its own."""
    assert len(_TEXT.splitlines()) <= 120


# Rows and columns of the comparison as the report of the last run calls them.
PEERS = {
    "wdsfs": "wdsfs",
    "unpack the tars": "extracted",
    "webdataset library": "webdataset",
    "ratarmount": "ratarmount",
    "squashfs": "squashfuse_ll-raw",
    "`energon mount`": "energon",
    "mountpoint-s3": "mountpoint-s3",
}
MEASURES = {
    "first read": ("First read (us/file)", "1 client, sequential"),
    "second read": ("Second read (us/file)", "1 client, sequential"),
    "`find`": ("Walk (us/file)", "find"),
    "training": ("Training loader (images/s)", "first epoch"),
}


def test_figures_of_the_comparison_are_those_of_the_last_run() -> None:
    head, _, *rows = [cells(line) for line in SECTIONS["Instead of wdsfs"].splitlines() if line.startswith("|")]
    assert [row[0].rstrip(" ¹") for row in rows] == list(PEERS)
    page = sorted((ROOT / "bench/results").glob("*.md"))[-1].read_text()
    for column, (title, line) in MEASURES.items():
        measured = last_run(page, title, line)
        for row, system in zip(rows, PEERS.values(), strict=True):
            assert row[head.index(column)] == measured.get(system, ""), (row[0], column)
    (day,) = re.findall(r"^Run of (\d{4}-\d\d-\d\d),", page, re.MULTILINE)
    assert f"run of {day}]" in _TEXT


def test_the_comparison_has_no_holes_and_the_chart_shows_each_figure() -> None:
    results = report.Results()
    measured = {"wdsfs": (50.2, 6, 5, 800), "extracted": (5, 5, 1, 960), "webdataset": (None, None, None, 626)}
    for system, values in {**measured, "ratarmount": (390, 429, 3.87, None)}.items():
        for measure, value in zip(readme.COLUMNS.values(), values, strict=True):
            if value is not None:
                results.add(report.Case(measure.workload, measure.case, ""), system, value)
    assert readme.comparison(results).splitlines() == [
        "| | first read, µs a file | second read, µs a file | `find`, µs a file | training, images/s |",
        "|---|---:|---:|---:|---:|",
        "| wdsfs | 50.2 | 6 | 5 | 800 |",
        "| unpacked tars | 5 | 5 | 1 | 960 |",
        "",
        "In the same run the webdataset library trained with 626 images/s.",
    ]
    texts = [element.text for element in ElementTree.fromstring(readme.chart(results)).iter(f"{SVG}text")]
    assert {"50.2", "390", "800", "626"} < set(texts)
    assert readme.chart(report.Results()) == ""


def last_run(page: str, title: str, line: str) -> dict[str, str]:
    """Return the figure of each system in a line of a table of the last run, without the ratios."""
    table = page.partition(f"**{title}**\n")[2].strip().partition("\n\n")[0].splitlines()
    head, *rows = [cells(row) for row in table]
    (figures,) = [row for row in rows if row[0] == line]
    return {system: figure.partition(" (")[0] for system, figure in zip(head[1:], figures[1:], strict=True)}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def test_the_recording_shows_the_first_steps() -> None:
    """`python .ci/recording.py` writes it; times and places of an answer do not count."""
    recording = (ROOT / "docs/images/session.cast").read_text().splitlines()
    assert json.loads(recording[0])["version"] == 2
    shown = "".join(json.loads(line)[2] for line in recording[1:])
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown).replace("\r\n", "\n")
    typed = "".join(f"$ {step.command}\n{step.answer}" for step in steps_of(STEPS))

    def without_times(text: str) -> list[str]:
        return re.sub(r"in [\d.]+ s$", "", text, flags=re.MULTILINE).split()

    assert without_times(plain) == without_times(typed)
