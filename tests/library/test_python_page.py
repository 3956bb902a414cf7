"""docs/how-to/python.md: every block is typed in, with the tools that it is about, and where there is no FUSE."""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests import tars
from tests.conftest import ROOT, Program, need_fuse
from tests.peers import LONG_PATIENCE, TOOLS, environment_of, need_tool

PAGE = (ROOT / "docs/how-to/python.md").read_text()
BLOCKS = {
    title: re.findall(r"^```pycon\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for title, _, text in (part.partition("\n") for part in PAGE.split("\n## ")[1:])
}
NEEDS = {
    "PyTorch": ("torch",),
    "Tables": ("duckdb", "pandas"),
    "pandas, pyarrow, DuckDB, Hugging Face datasets": ("duckdb", "datasets", "pandas"),
}
# What the entry point of an installed wdsfs does.
REGISTER = "import fsspec; fsspec.register_implementation('wdsfs', 'wdsfs.library.fsspec_files.WdsfsFileSystem')"
ONLINE = {"HF_DATASETS_OFFLINE": "0", "HF_HUB_OFFLINE": "0"}  # to `datasets` other file systems are the network
NO_FUSE = 'mount -t tmpfs none /dev && exec "$@"'  # a namespace whose /dev has no device at all


def write_set(directory: Path) -> None:
    typed = re.findall(r"^    (.+)$", PAGE.partition("\n## Samples\n")[2].partition("\n```")[0], re.MULTILINE)
    wdsfs = f'wdsfs() {{ {shlex.quote(sys.executable)} -m wdsfs "$@"; }}'
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(["bash", "-ec", "\n".join([wdsfs, *typed])], cwd=directory, env=environment, check=True)
    table = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"x": [1, 2, 3]}), table)
    members = [tars.member(b"a.csv", b"x\n1\n2\n3\n"), tars.member(b"a.parquet", table.getvalue())]
    (directory / "tables.tar").write_bytes(tars.tar(*members))


def type_in(program: Program, titles: list[str], interpreter: str, *start: str) -> None:
    write_set(program.home)
    blocks = "\n".join(block for title in titles for block in BLOCKS[title])
    (program.home / "page.txt").write_text(blocks)
    done = subprocess.run(
        [*start, interpreter, "-m", "doctest", "-o", "ELLIPSIS", "-o", "IGNORE_EXCEPTION_DETAIL", "page.txt"],
        cwd=program.home,
        env={**environment_of(program), **ONLINE, "PYTHONPATH": f"{ROOT}:{program.home}"},
        capture_output=True,
        text=True,
        timeout=LONG_PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_every_block_is_typed_in() -> None:
    assert sum(map(len, BLOCKS.values())) == PAGE.count("\n```pycon") == 9 == PAGE.count("\n```") // 2
    assert NEEDS.keys() <= BLOCKS.keys()


@pytest.mark.parametrize("title", BLOCKS)
def test_a_chapter_can_be_typed_in(program: Program, title: str) -> None:
    if title.startswith("Paths"):
        need_fuse()
    for tool in NEEDS.get(title, ()):
        need_tool(tool)
    if title in NEEDS:
        (program.home / "sitecustomize.py").write_text(REGISTER)
    interpreter = str(TOOLS / "bin" / "python") if title in NEEDS else sys.executable
    type_in(program, list(dict.fromkeys(["Samples", title])), interpreter)


def test_without_the_device_of_fuse(program: Program) -> None:
    """As in a pod: a namespace of its own, in which /dev is empty."""
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    space = ["unshare", "--mount", "--propagation", "private", *as_root, "sh", "-c"]
    if subprocess.run([*space, f"{NO_FUSE}", "sh", "test", "!", "-e", "/dev/fuse"], check=False).returncode:
        assert os.geteuid() != 0, "root can make a namespace"
        pytest.skip("this user can make no namespace here")
    type_in(program, ["Samples", "Files"], sys.executable, *space, NO_FUSE, "sh")
