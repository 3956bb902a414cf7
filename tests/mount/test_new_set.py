"""A set that begins empty: `mount --overlay DIR --new`, and the shards that a commit makes of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import tars
from tests.conftest import InProcess, Program, need_fuse

OVERLAY = ("--overlay", "edits")


@pytest.fixture
def program(in_process: InProcess) -> InProcess:
    return in_process


def test_shards_of_a_set_that_begins_empty(program: Program) -> None:
    """Made with ordinary tools; also after the set was mounted again, and without a mount."""
    need_fuse()
    with program.mounted(*OVERLAY, "--new") as mounted:
        assert os.listdir(mounted.path) == []
        (mounted.path / "train/cats/a").mkdir(parents=True)
        (mounted.path / "train/cats/a/jpg").write_bytes(b"A")
        (mounted.path / "train/cats/a/cls").write_bytes(b"0")
        (mounted.path / "val/b").mkdir(parents=True)
        program.tool("cp", mounted.path / "train/cats/a/jpg", mounted.path / "val/b")
        assert mounted.status()["specs"] == []
    with program.mounted(*OVERLAY, "--new") as mounted:
        assert (mounted.path / "val/b/jpg").read_bytes() == b"A"
        lines = program.run("diff", mounted.path).stdout.decode().splitlines()
        assert lines == ["added    train/cats/a", "added    val/b"]
        assert "no shards to put new ones beside" in program.refused("commit", "--in-place", mounted.path, code=2)
        program.run("commit", "-o", "out/s-%d.tar", "--export", "dali", mounted.path)
    assert sorted(os.listdir(program.home / "out")) == ["s-0.idx", "s-0.tar", "s-1.idx", "s-1.tar"]
    found = [tars.by_webdataset((program.home / f"out/s-{number}.tar").read_bytes()) for number in (0, 1)]
    assert found == [[{"__key__": "cats/a", "cls": b"0", "jpg": b"A"}], [{"__key__": "b", "jpg": b"A"}]]


def test_a_sample_of_many_images_in_a_set_that_begins_empty(program: Program) -> None:
    """It may be a copied folder, but no shard says what columns are usual."""
    need_fuse()
    with program.mounted(*OVERLAY, "--new") as mounted:
        (mounted.path / "train/cat").mkdir(parents=True)
        for number in range(20):
            (mounted.path / f"train/cat/{number}.jpg").write_bytes(b"")
        lines = program.run("diff", mounted.path).stdout.decode().splitlines()
        assert [line.split(":")[0] for line in lines] == ["added    train/cat", "note"]
        program.run("commit", "-o", "s-%d.tar", mounted.path)
    assert len(tars.by_webdataset((program.home / "s-0.tar").read_bytes())[0]) == 21


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mount", "--new", "mnt"), "--new needs --overlay DIR"),
        (("mount", *OVERLAY, "--new", "s.tar", "mnt"), "leave out s.tar"),
        (("mount", *OVERLAY, "--new"), "the MOUNTPOINT is missing"),
        (("mount", *OVERLAY, "--new", "--ignore-zeros", "mnt"), "--ignore-zeros is for SHARDS"),
        (("diff", *OVERLAY), "name the SHARDS of the overlay"),
        (("diff",), "name one MOUNTPOINT"),
    ],
)
def test_options_that_a_new_set_excludes(program: Program, arguments: tuple[str, ...], message: str) -> None:
    Path(program.home, "edits").mkdir()
    assert message in program.refused(*arguments, code=2)
