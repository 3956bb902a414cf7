"""The tutorials, and loaders, layouts and captions of docs/how-to, typed in with the tools that they are about.

Pictures of trees are compared with real mounts. The sections of a how-to start from the shards that its first one
makes, and come one after another in the same directory.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, Program, need_fuse
from tests.peers import DALI, LONG_PATIENCE, SCRIPTS, TOOLS, environment_of, need_tool
from tests.typed import files_of, steps_of, type_in

TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.md"))
HOW_TO = ROOT / "docs/how-to"
PAGES = {"loaders": ["loaders"], "layouts": ["layouts", "captions"]}  # those of a set, the first of which makes it
TEXTS = {name: "".join((HOW_TO / f"{page}.md").read_text() for page in pages) for name, pages in PAGES.items()}
SECTIONS = {
    name: {one.partition("\n")[0]: one for one in re.split(r"^## ", text, flags=re.MULTILINE)[1:]}
    for name, text in TEXTS.items()
}
FIRST = {name: next(iter(sections)) for name, sections in SECTIONS.items()}
REST = [(name, title) for name in SECTIONS for title in SECTIONS[name] if title != FIRST[name]]

PEERS = (str(TOOLS / "bin" / "python"),)
WITH_TORCHVISION = (*PEERS, str(SCRIPTS / "with_torchvision.py"))
OF_DALI = (str(DALI / "bin" / "python"),)
# What runs the Python of a section, and what has to be there for it; all others need nothing but Python.
RUN_BY = {
    "Hugging Face datasets": (PEERS, "datasets"),
    "Megatron-Energon": (PEERS, "megatron.energon"),
    "DALI": (OF_DALI, "nvidia.dali"),
    "wids": (PEERS, "wids"),
    "A Dataset of your own": (PEERS, "torch"),
    "ImageFolder": (WITH_TORCHVISION, "torchvision"),
    "Hugging Face imagefolder": (PEERS, "datasets"),
    "Which number a class gets": (WITH_TORCHVISION, "torchvision"),
}

pytestmark = pytest.mark.timeout(2 * LONG_PATIENCE)  # the first section of a page makes the set, too


def type_section(program: Program, name: str, title: str, data: Path) -> None:
    python, _ = RUN_BY.get(title, ((sys.executable,), ""))
    program.environment = environment_of(program)
    # Of layouts, hints are on standard error, and are shown with the answers; what libraries say there is not.
    quiet = "2>/dev/null" if name == "layouts" else ""
    start = f'python() {{ {shlex.join(python)} "$@" {quiet}; }}\nPATH=$PATH:{shlex.quote(str(TOOLS / "bin"))}'
    places = {"/mnt/pets" if name == "layouts" else "/mnt/train": program.mountpoint, "/data": data}
    type_in(program, SECTIONS[name][title], places, start, merge_errors=name == "layouts")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """The sets that the first sections make, and the speech of a later one."""
    made = {}
    for name in SECTIONS:
        program = Program(tmp_path_factory.mktemp(name))
        data = program.directory("data")
        type_section(program, name, FIRST[name], data)
        for speech in re.findall(r"`make_speech.py`.*?```python\n(.*?)```", TEXTS[name], re.DOTALL):
            program.tool(sys.executable, "-c", speech, cwd=data)
        made[name] = sorted(data.glob("*.tar"))
    return made


@pytest.mark.parametrize(
    ("name", "title"),
    [pytest.param(*one, marks=pytest.mark.dali if one[1] == "DALI" else ()) for one in REST],
)
def test_a_section_can_be_typed(program: Program, shards: dict[str, list[Path]], name: str, title: str) -> None:
    need_fuse()
    if title in RUN_BY:
        need_tool(RUN_BY[title][1], DALI if title == "DALI" else TOOLS)
    data = program.directory("data")
    for shard in shards[name]:
        shutil.copy(shard, data)
    type_section(program, name, title, data)
    assert not os.path.ismount(program.mountpoint), "the section does not unmount"


def test_every_tool_has_a_section_that_does_something_and_every_layout_a_picture() -> None:
    assert set(RUN_BY) < {title for sections in SECTIONS.values() for title in sections}
    for title, text in SECTIONS["loaders"].items():
        assert len(steps_of(text)) >= 2, title
        assert all(any(name in step.command for step in steps_of(text)) for name in files_of(text)), title
    pages = [steps_of(text) for text in SECTIONS["layouts"].values()]
    pictured = [
        before.command
        for steps in pages
        for before, step in itertools.pairwise(steps)
        if step.command.startswith("tree ")
    ]
    for option in ("mount 'pets", "full", "classes", "files", "--merge", "--index-tree", "--field", "--columns"):
        assert any(option in command for command in pictured), option
    assert all("└── " in step.answer for steps in pages for step in steps if step.command.startswith("tree "))


def test_the_program_shows_the_page_of_layouts(program: Program) -> None:
    assert program.run("help", "layouts").stdout == (HOW_TO / "layouts.md").read_bytes()
    assert b"`wdsfs help layouts`" in program.run("mount", "--help").stdout


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_can_be_typed(program: Program, page: Path) -> None:
    need_fuse()
    text = page.read_text()
    assert len(steps_of(text)) > 10
    home = program.directory("data")
    program.environment = environment_of(program)
    try:
        type_in(program, text, {"/data": home}, f'python() {{ {shlex.quote(sys.executable)} "$@"; }}')
        assert not os.path.ismount(home / "mnt"), "the page does not unmount"
    finally:
        if os.path.ismount(home / "mnt"):
            program.run("umount", "--lazy", home / "mnt", code=None)
