"""docs/how-to/layouts.md: each section is typed in, its pictures are compared with real mounts, and its loaders
are run.

The sections start from the shards that the first one makes.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, Program, need_fuse
from tests.peers import DALI, LONG_PATIENCE, SCRIPTS, TOOLS, environment_of, need_tool
from tests.typed import steps_of, type_in

_TEXT = (ROOT / "docs/how-to/layouts.md").read_text()
SECTIONS = {one.partition("\n")[0]: one for one in re.split(r"^## ", _TEXT, flags=re.MULTILINE)[1:]}
FIRST = "The set of this page"

pytestmark = pytest.mark.timeout(2 * LONG_PATIENCE)  # the first of them makes the set, too

PEERS = (str(TOOLS / "bin" / "python"),)
WITH_TORCHVISION = (*PEERS, str(SCRIPTS / "with_torchvision.py"))
# What runs the loader of a section, and what has to be there for it; all others need nothing but Python.
LOADERS = {
    "A Dataset of your own": (PEERS, "torch"),
    "ImageFolder": (WITH_TORCHVISION, "torchvision"),
    "Hugging Face imagefolder": (PEERS, "datasets"),
    "DALI file reader": ((str(DALI / "bin" / "python"),), "nvidia.dali"),
    "Which number has a class": (WITH_TORCHVISION, "torchvision"),
}


def type_section(program: Program, title: str, data: Path) -> None:
    python, _ = LOADERS.get(title, ((sys.executable,), ""))
    program.environment = {**environment_of(program), "LC_ALL": "C.UTF-8"}
    # Hints are on standard error, and are shown with the answers; what Python libraries say there is not.
    start = f'python() {{ {shlex.join(python)} "$@" 2>/dev/null; }}'
    type_in(program, SECTIONS[title], {"/mnt/pets": program.mountpoint, "/data": data}, start)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the set that the first section makes, and the speech of a later one."""
    program = Program(tmp_path_factory.mktemp("layouts"))
    data = program.directory("data")
    type_section(program, FIRST, data)
    (speech,) = re.findall(r"`make_speech.py`.*?```python\n(.*?)```", _TEXT, re.DOTALL)
    program.tool(sys.executable, "-c", speech, cwd=data)
    return sorted(data.glob("*.tar"))


@pytest.mark.parametrize(
    "title",
    [
        pytest.param(title, marks=pytest.mark.dali if title.startswith("DALI") else ())
        for title in SECTIONS
        if title != FIRST
    ],
)
def test_a_section_can_be_typed(program: Program, shards: list[Path], title: str) -> None:
    need_fuse()
    if title in LOADERS:
        need_tool(LOADERS[title][1], DALI if title.startswith("DALI") else TOOLS)
    data = program.directory("data")
    for shard in shards:
        shutil.copy(shard, data)
    type_section(program, title, data)
    assert not os.path.ismount(program.mountpoint), "the section does not unmount"


def test_every_layout_has_a_picture_and_every_loader_its_code() -> None:
    assert set(LOADERS) < set(SECTIONS)
    pictured = [
        before.command
        for page in SECTIONS.values()
        for before, step in zip(steps_of(page), steps_of(page)[1:], strict=False)
        if step.command.startswith("tree ")
    ]
    for option in ("mount 'pets", "full", "classes", "files", "--merge", "--index-tree", "--field", "--columns"):
        assert any(option in command for command in pictured), option
    pictures = [step for page in SECTIONS.values() for step in steps_of(page) if step.command.startswith("tree ")]
    assert all("└── " in picture.answer for picture in pictures)


def test_the_program_shows_the_page(program: Program) -> None:
    assert program.run("help", "layouts").stdout.decode() == _TEXT
    help_of_mount = program.run("mount", "--help").stdout
    assert b"`wdsfs help layouts`" in help_of_mount
