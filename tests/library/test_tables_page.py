"""docs/how-to/tables.md, typed in: DuckDB, pandas and polars choose what plain Python over the shards chooses."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tarfile

import numpy as np
import pyarrow.parquet
import pytest

from tests import tars
from tests.conftest import ROOT, Program, need_fuse
from tests.peers import LONG_PATIENCE, TOOLS, environment_of, need_tool

PAGE = (ROOT / "docs/how-to/tables.md").read_text()
BLOCKS = re.findall(r"^```(?:sh|python)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
BRACES, SHARDS = "train-{000000..000999}.tar", "train-{000000..000002}.tar"
UIDS = [f"{number * 12345678901234567890:032x}" for number in range(60)]
TYPED_BY = {"duckdb -c": "duckdb", "import pandas": "pandas", "import polars": "polars", "uids.npy": "pandas"}

pytestmark = pytest.mark.timeout(2 * LONG_PATIENCE)


@pytest.fixture
def typed(program: Program) -> Program:
    """The set of the page and its table, in the home of the program."""
    for shard in range(3):
        members = []
        for number in range(shard * 20, shard * 20 + 20):
            about = {"aesthetic": number % 11, "uid": UIDS[number]} if number % 7 else {"uid": UIDS[number]}
            caption = b"a %s on a mat" % (b"cat", b"dog")[number % 2]
            files = {
                "jpg": b"x" * number,
                "json": json.dumps(about).encode(),
                **({"txt": caption} if number % 5 else {}),
            }
            members += [tars.member(b"%04d.%s" % (number, name.encode()), data) for name, data in files.items()]
        program.write(f"train-{shard:06d}.tar", tars.tar(*members))
    uids = [(int(uid[:16], 16), int(uid[16:], 16)) for uid in UIDS[10:40:3]]
    np.save(program.home / "uids.npy", np.array(uids, "u8,u8"))
    _type(program, next(text for text in BLOCKS if text.startswith("wdsfs table")))
    return program


def _type(program: Program, text: str, python: str = sys.executable) -> None:
    """Run lines of the page: commands, or Python."""
    if not text.startswith(("wdsfs", "duckdb")):
        command = [python, "-c", text]
    else:
        wdsfs = f'wdsfs() {{ {shlex.join(map(os.fsdecode, program.command()))} "$@"; }}'
        duckdb = f"duckdb() {{ {shlex.quote(python)} -c 'import duckdb, sys; duckdb.sql(sys.argv[2])' \"$@\"; }}"
        here = text.replace(BRACES, SHARDS).replace("/mnt/good", shlex.quote(str(program.mountpoint)))
        command = ["bash", "-c", "\n".join((wdsfs, duckdb, "set -e", here))]
    done = subprocess.run(
        command,
        env=environment_of(program),
        cwd=program.home,
        capture_output=True,
        timeout=LONG_PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()


def _by_hand(program: Program) -> dict[str, list[str]]:
    """The keys that each block has to choose, without wdsfs."""
    chosen, uids = [], []
    for shard in range(3):
        with tarfile.open(program.home / f"train-{shard:06d}.tar") as tar:
            files = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
        for key in dict.fromkeys(name.partition(".")[0] for name in files):
            about = json.loads(files[f"{key}.json"])
            if about.get("aesthetic", 0) > 5 and b"cat" in files.get(f"{key}.txt", b""):
                chosen.append(key)
            if about["uid"] in UIDS[10:40:3]:
                uids.append(key)
    assert len(chosen) > 5
    return {"uids.npy": uids, **dict.fromkeys(("duckdb -c", "import pandas", "import polars"), chosen)}


@pytest.mark.parametrize(("begin", "tool"), TYPED_BY.items(), ids=str)
def test_what_each_tool_chooses(typed: Program, begin: str, tool: str) -> None:
    need_tool(tool)
    _type(typed, next(text for text in BLOCKS if begin in text), str(TOOLS / "bin/python"))
    expected = _by_hand(typed)[begin]
    assert pyarrow.parquet.read_table(typed.home / "good.parquet")["__key__"].to_pylist() == expected
    shown = typed.run("ls", "-R", "--layout", "files", "--keys", "good.parquet", SHARDS).stdout.decode().split()
    assert [name.partition(".")[0].rpartition("/")[2] for name in shown if name.endswith("json")] == expected


def test_the_ways_back(typed: Program) -> None:
    need_fuse()
    pyarrow.parquet.write_table(pyarrow.table({"__key__": ["0003", "0041"]}), typed.home / "good.parquet")
    (block,) = (text for text in BLOCKS if text.startswith("wdsfs mount"))
    mount, pack, view = block.splitlines()
    assert view.startswith("wdsfs view --keys good.parquet ")
    try:
        _type(typed, mount)
        assert sorted(path.name for path in typed.mountpoint.glob("*/*")) == ["0003", "0041"]
    finally:
        typed.run("umount", typed.mountpoint, code=None)
    _type(typed, pack)
    with tarfile.open(typed.home / "good-000000.tar") as tar:
        assert {name.partition(".")[0] for name in tar.getnames()} == {"0003", "0041"}
    call = 'wdsfs.samples(SHARDS, keys="good.parquet")'
    assert call in PAGE
    keys = f"[sample['__key__'] for sample in {call.replace('SHARDS', repr(SHARDS))}]"
    _type(typed, f"import wdsfs; assert {keys} == ['0003', '0041']")
