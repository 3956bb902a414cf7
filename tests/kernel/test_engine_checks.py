"""The checks of `wdsfs doctor` for the kernel engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Program
from wdsfs.kernel.engine_checks import check_engine


@pytest.mark.parametrize(
    ("version", "has_erofs", "has_loops", "user", "level", "text"),
    [
        ((6, 18, 1), True, False, 0, "ok", "EROFS, shards as files"),
        ((6, 18), True, True, 1000, "ok", "EROFS, shards as files; only for root"),
        ((6, 8), True, True, 0, "ok", "EROFS, shards as loop devices"),
        ((6, 8), True, False, 0, "warn", "before Linux 6.12"),
        ((5, 10), True, True, 0, "ok", "needs Linux 5.16 or later; this is 5.10"),
        ((6, 18), False, True, 0, "warn", "this kernel has no EROFS"),
    ],
)
def test_doctor_checks_the_requirements_of_the_engine(
    version: tuple[int, ...],
    has_erofs: bool,
    has_loops: bool,
    user: int,
    level: str,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no modprobe
    systems, loops = tmp_path / "filesystems", tmp_path / "loop-control"
    systems.write_text("nodev\tproc\n\text4\n" + "\terofs\n" * has_erofs)
    if has_loops:
        loops.touch()
    found = check_engine(version, str(systems), str(loops), user)
    assert (found.level, text in found.detail) == (level, True), found
    assert bool(found.remedy) == (level == "warn")


def test_doctor_reports_the_engine(program: Program) -> None:
    assert "kernel engine" in [one["name"] for one in program.json("doctor")]
    done = program.run("doctor", "--shards", program.home, code=2)
    assert b"--engine auto" in done.stderr
