"""The cache on a file system of several nodes: each range fetched once, and no lock that a dead node keeps.

On this machine's disk with the locks that NFS makes of flock(2); and on NFS itself, mounted at two places that
share no cache of the kernel's (`nosharecache`), where WDSFS_TEST_NFS names these (`A:B`).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import Process, wait_until
from tests.remote.node import RANGES
from wdsfs.cache.cache_directory import TABLE

ROUND = RANGES // 4  # ranges that each node reads before it waits for the other
NFS = os.environ.get("WDSFS_TEST_NFS", "")
PLACES = ["local", "as_nfs", pytest.param("nfs", marks=pytest.mark.skipif(not NFS, reason="WDSFS_TEST_NFS"))]


class Node:
    """A process of a node (`tests/remote/node.py`)."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.kill = process.kill
        self._calls, self._answers = process.stdin, process.stdout

    def ask(self, *call: object) -> None:
        self._calls.write(json.dumps(call) + "\n")
        self._calls.flush()

    def answer(self) -> Any:
        line = self._answers.readline()
        assert line, "the node has failed"
        return json.loads(line)

    def __call__(self, *call: object) -> Any:
        self.ask(*call)
        return self.answer()


@pytest.fixture(params=PLACES)
def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    """Two nodes that have one cache."""
    with contextlib.ExitStack() as stack:
        places = [tmp_path, tmp_path]
        if request.param == "nfs":
            first, second = map(Path, NFS.split(":"))
            name = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=first))).name
            places = [first / name, second / name]
        yield tuple(stack.enter_context(_node(place, request.param)) for place in places)


@contextlib.contextmanager
def _node(directory: Path, kind: str) -> Iterator[Node]:
    command = [sys.executable, "-m", "tests.remote.node", str(directory / "cache"), kind]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with Process(command, cwd=Path(__file__).parents[2], **pipes) as process:
        yield Node(process)
        process.kill()


def test_each_range_is_fetched_once(nodes: tuple[Node, Node]) -> None:
    fetched: list[list[int]] = [[], []]
    for first in range(0, RANGES, ROUND):
        for seed, node in enumerate(nodes):
            node.ask("fetch", seed, first, ROUND)
        for numbers, node in zip(fetched, nodes, strict=True):
            numbers += node.answer()
    assert sorted(fetched[0] + fetched[1]) == list(range(RANGES))
    assert all(fetched)
    assert all(node("fetch", 0, 0, RANGES) == [] for node in nodes)


def test_a_node_that_dies_keeps_no_lock(nodes: tuple[Node, Node]) -> None:
    dying, node = nodes
    assert dying("claim", 0, 1 << 16)
    assert not node("claim", 0, 1 << 16)
    assert node("claim", 1 << 16, 1 << 17)
    dying.kill()
    wait_until(lambda: node("claim", 0, 1 << 16), "the claim of the dead node")


def test_objects_are_opened_and_removed_while_ranges_are_claimed(nodes: tuple[Node, Node]) -> None:
    fetching, node = nodes
    assert fetching("claim", 0, 1 << 16)
    assert node("open")
    assert node("remove", TABLE)
    assert node("open")
    assert node("claim", 0, 1 << 16)  # of the new object of this name


def test_a_whole_file_is_made_once_and_stays_while_it_is_open(nodes: tuple[Node, Node]) -> None:
    for node in nodes:
        node.ask("make")
    assert sorted(node.answer() for node in nodes) == [False, True]
    reader, node = nodes
    assert reader("open_file")
    assert not node("remove", "tar")
    reader("close_files")
    assert node("remove", "tar")
    assert not node("open_file")


def test_the_room_is_counted_once(nodes: tuple[Node, Node]) -> None:
    for node in nodes:
        node.ask("reserve", 8 << 20, 50)  # more than a process takes in advance
    last = max(node.answer() for node in nodes)
    assert last == nodes[0]("reserve", 0, 0)
    assert 100 * (8 << 20) <= last <= 100 * (8 << 20) + 2 * (4 << 20)
