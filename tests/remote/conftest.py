"""Servers of stores for the tests: real ones, started when the first test needs them, and one that misbehaves."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import PROXIES
from tests.remote import apart as apart_module
from tests.remote.apart import Apart
from tests.web_server import WebServer

# By which the programs of stores find what is not for the tests.
FOREIGN = ("AWS_", "AZURE_", "GOOGLE_", "HF_", "AIS_", "STORAGE_EMULATOR_HOST")


def clean_environment(home: Path) -> dict[str, str]:
    """The environment without credentials and proxies of whoever runs the tests, and with another home."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(FOREIGN) and name.lower() not in PROXIES
    }
    return {**kept, "HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "AWS_EC2_METADATA_DISABLED": "true"}


@pytest.fixture(scope="session")
def _apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    home = tmp_path_factory.mktemp("apart")
    with apart_module.running(home / "said", clean_environment(home)) as apart:
        yield apart


@pytest.fixture
def apart(_apart: Apart) -> Apart:
    """Stores in another process, without settings."""
    _apart.configure()
    return _apart


@pytest.fixture
def own_apart(tmp_path: Path) -> Callable[[dict[str, str]], contextlib.AbstractContextManager[Apart]]:
    """Starts stores in another process with these variables in its environment."""

    def start(variables: dict[str, str]) -> contextlib.AbstractContextManager[Apart]:
        return apart_module.running(tmp_path / "said", {**clean_environment(tmp_path), **variables})

    return start


@pytest.fixture
def other_web() -> Iterator[WebServer]:
    """Another one, at another place."""
    with WebServer().running() as server:
        yield server
