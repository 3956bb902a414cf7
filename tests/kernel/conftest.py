"""The program for tests of mounts by the kernel, which end with their test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Program
from tests.kernel.mounts import end_mount, need_erofs
from wdsfs import mount_table


@pytest.fixture
def program(program: Program) -> Iterator[Program]:
    need_erofs()
    yield program
    below = bytes(program.home) + b"/"
    left = [Path(os.fsdecode(one.path)) for one in mount_table.mounts() if one.path.startswith(below)]
    for path in (*reversed(left), program.mountpoint):
        end_mount(path)
