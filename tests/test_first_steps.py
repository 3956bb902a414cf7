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


def test_the_comparison_is_that_of_the_last_run() -> None:
    run = sorted((ROOT / "bench/results").glob("*.md"))[-1].with_suffix(".json")
    results = report.Results()
    results.take(json.loads(run.read_text()))
    assert readme.comparison(results) in _TEXT
    assert readme.chart(results) == (ROOT / "docs/images/figures.svg").read_text()
    assert f"run of {results.about['date']}]" in _TEXT


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
        "Also in this run: by the webdataset library 626 images/s.",
    ]
    texts = [element.text for element in ElementTree.fromstring(readme.chart(results)).iter(f"{SVG}text")]
    assert {"50.2", "390", "800", "626"} < set(texts)
    assert readme.chart(report.Results()) == ""


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
