"""slurm/train.sh: the job, run with programs that play Slurm and torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, Program, need_fuse
from tests.peers import LONG_PATIENCE
from tests.processes import finished
from tests.test_remote_page import SHARDS, Place, place, s3

__all__ = ["place"]  # a fixture
SCRIPT = ROOT / "slurm" / "train.sh"


def play(bin_: Path, name: str, text: str) -> None:
    (bin_ / name).write_text(f"#!/bin/bash\n{text}\n")
    (bin_ / name).chmod(0o755)


def run(program: Program, shards: str) -> subprocess.CompletedProcess[str]:
    """Run the job on this machine: the program that trains prints what it reads of one sample."""
    bin_ = program.directory("bin")
    play(bin_, "wdsfs", f'exec {sys.executable} -m wdsfs "$@"')
    play(bin_, "srun", 'exec "$@"')
    play(
        bin_, "torchrun", '[ "$1 $3" = "--nproc-per-node=gpu --data" ] && echo "$2" && cat "$4"/train-000001/a/txt'
    )
    temporary = program.directory("node")
    environment = {**program.environment, "PATH": f"{bin_}:{os.environ['PATH']}", "TMPDIR": str(temporary)}
    given = {"env": {**environment, "SLURM_CPUS_PER_TASK": "2"}, "cwd": program.home, "timeout": LONG_PATIENCE}
    done = finished("bash", SCRIPT, shards, "train.py", **given, code=None)
    assert not list(temporary.glob("tmp.*")), f"the job leaves its directory: {done.stderr}"
    return done


@pytest.mark.parametrize(("store", "shards"), [(None, "train"), ("seaweedfs", "s3://bucket/train/")])
def test_a_job_mounts_trains_and_unmounts(
    store: str | None, shards: str, place: Place, request: pytest.FixtureRequest
) -> None:
    need_fuse()
    if store is None:
        directory = place.program.directory("train")
        for name, content in SHARDS.items():
            (directory / Path(name).name).write_bytes(content)
    else:
        s3(place, request.getfixturevalue(store))
    done = run(place.program, shards)
    assert (done.returncode, done.stdout) == (0, "train.py\ncontent of a"), done.stderr


def test_a_job_without_a_set_ends_with_an_error(program: Program) -> None:
    done = run(program, "nothing.tar")
    assert done.returncode == 3
    assert "nothing.tar" in done.stderr
    assert not done.stdout


def test_the_page_has_what_the_job_does() -> None:
    page = (ROOT / "docs/how-to/slurm.md").read_text()
    (block,) = re.findall(r"^```sh\n(tmp=.*?)^```$", page, re.MULTILINE | re.DOTALL)
    inner = re.search(r"^srun bash -c '\n(.*?)^'$", SCRIPT.read_text(), re.MULTILINE | re.DOTALL)
    assert inner is not None
    assert [line.strip() for line in block.splitlines()] == [line.strip() for line in inner[1].splitlines()]
