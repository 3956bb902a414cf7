"""Other people's tools: where `make tools` and `make dali` have put them, and how a test runs them.

They run as programs of environments of their own, as they do for users: nothing of them gets into the process of
the tests. Libraries are run by the scripts in `ecosystem/`, which take jobs and print results as JSON.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, Program
from tests.processes import PATIENCE, finished

REQUIRED = bool(os.environ.get("WDSFS_REQUIRE_TOOLS"))
TOOLS, DALI = ROOT / "build" / "tools-venv", ROOT / "build" / "dali-venv"
SCRIPTS = Path(__file__).parent / "ecosystem"
# Of a script, or of all commands of a page: PyTorch and its like are a gigabyte that the disk may have to bring,
# and a page imports them several times. On a machine with a load of 20 pages have taken more than a minute.
LONG_PATIENCE = 5 * PATIENCE
_ONES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_DATASETS_DISABLE_PROGRESS_BARS", "OMP_NUM_THREADS")
QUIET = dict.fromkeys(_ONES, "1")


def need_tool(module: str, venv: Path = TOOLS) -> None:
    """Skip the test where this module is not installed, or fail where WDSFS_REQUIRE_TOOLS says it has to be."""
    if any(venv.glob(f"lib/python3*/site-packages/{module.replace('.', '/')}")):
        return
    task = venv.name.removesuffix("-venv")
    missing = f"{module} is not in {venv.relative_to(ROOT)}; what to type, and to read: make {task}"
    if REQUIRED:
        pytest.fail(f"{missing}, for WDSFS_REQUIRE_TOOLS is set")
    pytest.skip(missing)


def environment_of(program: Program) -> dict[str, str]:
    """Without a network, and with every cache in the home of the test."""
    return {**program.environment, **QUIET, "WIDS_CACHE": str(program.home / "wids")}


def run_script(program: Program, name: str, jobs: object, venv: Path = TOOLS) -> Any:
    """Return the output of `ecosystem/NAME.py` for these jobs."""
    return json.loads(run_python(program, SCRIPTS / f"{name}.py", json.dumps(jobs, default=str), venv=venv))


def run_python(program: Program, *words: str | Path, venv: Path = TOOLS, **variables: str) -> str:
    """Return the output of Python with these arguments, in the home of the test and with further variables."""
    place = {**environment_of(program), **variables}
    command = venv / "bin" / "python", *words
    return str(finished(*command, env=place, cwd=program.home, timeout=LONG_PATIENCE).stdout)
