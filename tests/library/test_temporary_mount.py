"""`wdsfs.mount`: a mount for the time of a block, its options and errors, and its end, whatever ends the block."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import wdsfs
from tests.conftest import need_fuse
from tests.library.conftest import columns
from tests.processes import PATIENCE
from wdsfs import mount_table


@pytest.fixture(autouse=True)
def _places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_fuse()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))


def nothing_is_left() -> bool:
    return not [name for name in os.listdir("temporary") if not name.startswith("wdsfs-index-")]


def test_a_block_has_the_tree_and_its_end_ends_the_mount(shards: str) -> None:
    with wdsfs.mount(shards) as path:
        assert sorted(os.listdir(path)) == ["t-0", "t-1", "t-2"]
        assert (path / "t-1/d0/k1-2/jpg").read_bytes() == columns(1, 2)["jpg"]
        with pytest.raises(OSError, match="Read-only"):
            (path / "new").mkdir()
    assert not path.exists()
    assert nothing_is_left()


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"merge": True, "layout": "files", "columns": ["cls"], "keys": ["d0/k0-0"]}, ["d0/k0-0.cls"]),
        (
            {"names": "full", "columns": ("cls", "n=json"), "keys": "keys.txt", "merge": None, "jobs": 1},
            ["t-1/d1/k1-1/k1-1.cls", "t-1/d1/k1-1/k1-1.n"],
        ),
        (
            {"layout": "classes", "shard_id": 2, "num_shards": 3, "columns": {b"cls"}, "options": "ro,fsname=x"},
            ["0/t-2--d0--k2-0.cls", "0/t-2--d1--k2-3.cls", "1/t-2--d1--k2-1.cls", "2/t-2--d0--k2-2.cls"],
        ),
    ],
)
def test_options_are_those_of_the_command(shards: str, options: dict[str, Any], shown: list[str]) -> None:
    Path("keys.txt").write_text("d1/k1-1\n")
    with wdsfs.mount(shards, **options) as path:
        files = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
    assert files == shown


def test_changes_go_to_an_overlay(shards: str, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    for round_, before in enumerate((columns(0, 0)["cls"], b"0")):
        with wdsfs.mount([shards], at=("here", b"here")[round_], overlay=Path("edits")) as path:
            assert path == tmp_path / "here"
            assert (path / "t-0/d0/k0-0/cls").read_bytes() == before
            (path / "t-0/d0/k0-0/cls").write_bytes(b"%d" % round_)
    assert os.listdir("here") == []


@pytest.mark.parametrize(
    ("shards_", "options", "error", "text"),
    [
        ("t-{0..5}.tar", {}, wdsfs.ShardError, "3 of 6 shards are missing"),
        ("t-{0..2}.tar", {"layot": "files"}, wdsfs.UsageError, "No such option .layot"),
        ("t-{0..2}.tar", {"layout": "x"}, wdsfs.UsageError, "'x' is not one of"),
        ("t-{0..2}.tar", {"columns": "png"}, wdsfs.ShardError, "has no column 'png'"),
        ("t-{0..2}.tar", {"keys": ["nothing"]}, wdsfs.ShardError, "^keys: none of its keys"),
        ("t-{0..2}.tar", {"at": "missing"}, wdsfs.WdsfsError, "missing: no such directory"),
        ("t-{0..2}.tar", {"at": "/proc"}, wdsfs.WdsfsError, "mounted there already"),
        ("t-{0..2}.tar", {"foreground": True}, wdsfs.UsageError, "leave it out"),
        ("--help", {}, wdsfs.WdsfsError, "no such"),
    ],
)  # fmt: skip
def test_errors_are_exceptions(
    shards: str, shards_: str, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text), wdsfs.mount(shards_, **options):
        pytest.fail("it is mounted")
    assert nothing_is_left()


def test_warnings_go_to_the_log(shards: str, caplog: pytest.LogCaptureFixture) -> None:
    with wdsfs.mount(shards, keys=["d0/k0-0", "nothing"], merge=True):
        assert "keys: 1 of its 2 keys is not in the set: 'nothing'" in caplog.text


@pytest.mark.parametrize("end", [KeyError, KeyboardInterrupt, SystemExit])
def test_an_exception_ends_the_mount_too(shards: str, end: type[BaseException]) -> None:
    with pytest.raises(end), wdsfs.mount(shards) as path:
        raise end
    assert not path.exists()


def test_files_that_are_open_stay_readable(shards: str, caplog: pytest.LogCaptureFixture) -> None:
    with wdsfs.mount(shards) as path:
        file = (path / "t-0/d0/k0-0/jpg").open("rb", buffering=0)
    assert not path.exists()
    assert "files are still open" in caplog.text
    with file:
        assert file.read() == columns(0, 0)["jpg"]


def test_an_interrupt_while_it_is_made_leaves_nothing(shards: str, tmp_path: Path) -> None:
    """The command is stopped just before it would mount, and gets the interrupt that this process gets."""
    script = (
        "import sys, os, signal, subprocess, wdsfs\n"
        "wait = subprocess.Popen.wait\n"
        "def interrupted(self, *given):\n"
        "    subprocess.Popen.wait = wait\n"
        "    raise KeyboardInterrupt\n"
        "subprocess.Popen.wait = interrupted\n"
        f"with wdsfs.mount({shards!r}, at='here'): pass\n"
    )
    (tmp_path / "here").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, "KeyboardInterrupt" in done.stderr) == (-signal.SIGINT, True), done.stderr
    assert mount_table.mounted_at(tmp_path / "here") is None
