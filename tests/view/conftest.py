"""One browser for all tests of a process, one server for all that only look."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import Program
from tests.view.viewing import Browser, Viewer, a_browser, a_shard, viewing


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with a_browser() as found:
        yield found


@pytest.fixture(scope="session")
def looking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    """A server of three shards with 120 samples, that changes nothing."""
    program = Program(tmp_path_factory.mktemp("looking"))
    for number in range(3):
        program.write(f"train-{number:06d}.tar", a_shard(number))
    with viewing(program, "train-{000000..000002}.tar") as found:
        yield found
