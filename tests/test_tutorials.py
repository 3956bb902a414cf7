"""docs/tutorials: each page is typed in as it stands, and leaves nothing mounted."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, Program, need_fuse
from tests.peers import LONG_PATIENCE, environment_of
from tests.typed import steps_of, type_in

PAGES = sorted((ROOT / "docs/tutorials").glob("*.md"))


@pytest.mark.timeout(2 * LONG_PATIENCE)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_can_be_typed(program: Program, page: Path) -> None:
    need_fuse()
    text = page.read_text()
    assert len(steps_of(text)) > 10
    home = program.directory("data")
    program.environment = {**environment_of(program), "LC_ALL": "C.UTF-8"}
    try:
        type_in(program, text, {"/data": home}, f'python() {{ {shlex.quote(sys.executable)} "$@"; }}')
        assert not os.path.ismount(home / "mnt"), "the page does not unmount"
    finally:
        if os.path.ismount(home / "mnt"):
            program.run("umount", "--lazy", home / "mnt", code=None)
