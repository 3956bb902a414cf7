"""docs/reference/commands.md: it is what `.ci/commands.py` makes of `--help`."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import ROOT


def test_the_page_is_what_help_says() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / ".ci/commands.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
