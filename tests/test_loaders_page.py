"""docs/how-to/loaders.md: every page is typed in, with the tool that it is about.

The pages start from the shards that the first one writes.
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
from tests.peers import DALI, LONG_PATIENCE, TOOLS, environment_of, need_tool
from tests.typed import files_of, steps_of, type_in

_TEXT = (ROOT / "docs/how-to/loaders.md").read_text()
PAGES = {page.partition("\n")[0]: page for page in re.split(r"^## ", _TEXT, flags=re.MULTILINE)[1:]}
FIRST = "The set of these pages"

pytestmark = pytest.mark.timeout(2 * LONG_PATIENCE)  # the first of them makes the set, too

HERE = (sys.executable,)
PEERS = (str(TOOLS / "bin" / "python"),)
RUN_BY = {
    FIRST: HERE,
    "webdataset": HERE,
    "Hugging Face datasets": PEERS,
    "Megatron-Energon": PEERS,
    "DALI": (str(DALI / "bin" / "python"),),
    "wids": PEERS,
    "GNU tar and img2dataset": HERE,
    "ls, grep and rsync": HERE,
}
NEEDS = {
    "Hugging Face datasets": "datasets",
    "Megatron-Energon": "megatron.energon",
    "DALI": "nvidia.dali",
    "wids": "wids",
}


def type_page(program: Program, title: str, data: Path) -> None:
    program.environment = environment_of(program)
    start = f'python() {{ {shlex.join(RUN_BY[title])} "$@"; }}\nPATH=$PATH:{shlex.quote(str(TOOLS / "bin"))}'
    places = {"/mnt/train": program.mountpoint, "/data": data}
    type_in(program, PAGES[title], places, start, merge_errors=False)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the set that the first page writes, which tests that page."""
    program = Program(tmp_path_factory.mktemp("recipes"))
    data = program.directory("data")
    type_page(program, FIRST, data)
    return sorted(data.glob("*.tar"))


@pytest.mark.parametrize(
    "title",
    [pytest.param(title, marks=pytest.mark.dali if title == "DALI" else ()) for title in PAGES if title != FIRST],
)
def test_a_page_can_be_typed(program: Program, shards: list[Path], title: str) -> None:
    """One of them after another in the same directory: each has names of its own for what it leaves there."""
    need_fuse()
    if title in NEEDS:
        need_tool(NEEDS[title], DALI if title == "DALI" else TOOLS)
    data = program.directory("data")
    for shard in shards:
        shutil.copy(shard, data)
    if title == "Megatron-Energon":
        type_page(program, "webdataset", data)
    type_page(program, title, data)
    assert not os.path.ismount(program.mountpoint), "the page does not unmount"


def test_every_tool_has_a_page_that_does_something() -> None:
    assert set(PAGES) == set(RUN_BY)
    for title, page in PAGES.items():
        assert len(steps_of(page)) >= 2, title
        assert all(any(name in step.command for step in steps_of(page)) for name in files_of(page)), title
