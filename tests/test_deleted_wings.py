"""Wings come off: the package without one of them mounts, edits, commits, and says what is missing.

The package is copied, one wing is deleted from the copy, and new interpreters run the copy.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import sets
from tests.conftest import Program
from tests.processes import finished

PACKAGE = Path(__file__).parent.parent / "wdsfs"

# A statement that needs the wing `library`, and prints the error as the program does.
ASK_LIBRARY = """
try:
    from wdsfs import samples
except ImportError as error:
    raise SystemExit(f"wdsfs: {error}")
"""
# The file or directory of each wing, and what an interpreter is told so that it needs the wing.
WINGS: dict[str, tuple[str, list[str]]] = {
    "remote": ("remote", ["-m", "wdsfs", "ls", "s3://bucket/a.tar"]),
    "kernel": ("kernel", ["-m", "wdsfs", "mount", "--engine", "kernel", "a.tar", "mnt"]),
    "pages": ("pages", ["-m", "wdsfs", "view", "a.tar"]),
    "library": ("library", ["-c", ASK_LIBRARY]),
    "interop": ("interop", ["-m", "wdsfs", "check", "a.tar"]),
    "executors": ("executors.py", ["-m", "wdsfs", "index", "--executor", "ray", "a.tar"]),
}

SHOW_ALL_HELP = """
import wdsfs
from wdsfs.cli.main import GROUPS, main
for names in ([], *([name] for group in GROUPS.values() for name in group)):
    main.main([*names, "--help"], prog_name="wdsfs", standalone_mode=False)
print(wdsfs.__file__)
"""


def take_off(program: Program, wing: str) -> None:
    """Have `program` run a copy of the package without a wing, beside a shard."""
    copy = program.directory("copy") / "wdsfs"
    shutil.copytree(PACKAGE, copy)  # with the compiled modules, which stay valid: times are copied
    place, _ = WINGS[wing]
    lost = copy / place
    if lost.is_dir():
        shutil.rmtree(lost)
    else:
        lost.unlink()
    program.environment["PYTHONPATH"] = str(copy.parent)
    (program.home / "a.tar").write_bytes(sets.content(1))


@pytest.mark.parametrize("wing", WINGS)
def test_the_rest_works_without_a_wing(program: Program, wing: str) -> None:
    """What needs the wing says, in one line, that it is not installed."""
    take_off(program, wing)
    here: dict[str, Any] = {"env": program.environment, "cwd": program.home}
    shown = finished(sys.executable, "-c", SHOW_ALL_HELP, **here).stdout
    assert shown.splitlines()[-1].startswith(str(program.home))

    program.run("index", "a.tar")
    with program.mounted("--overlay", "edits", "a.tar") as mounted:
        sample = mounted.path / "a" / "d0" / "1-0"
        assert (sample / "txt").read_bytes() == b"1"
        (sample / "txt").write_bytes(b"changed")
        program.run("commit", mounted.path, "-o", "new-%06d.tar")
    program.run("pack", "new-000000.tar", "-o", "packed-%06d.tar")
    assert program.run("cat", "packed-000000.tar", "packed-000000/d0/1-0/txt").stdout == b"changed"

    done = finished(sys.executable, *WINGS[wing][1], **here, code=None)
    [line] = done.stderr.splitlines()
    assert line.startswith("wdsfs: "), line
    assert "not installed" in line
    assert done.returncode in (1, 2)
