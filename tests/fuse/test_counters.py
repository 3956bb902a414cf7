"""The memory that the processes of a mount share: counters, requests at which workers have died, passes."""

from __future__ import annotations

import itertools
import os
import signal
import time

import pytest

from wdsfs.fuse import counters as boards
from wdsfs.fuse.counters import DEADLY, Board


def test_counters_survive_the_worker_that_counted() -> None:
    board = Board()
    slot = board.slot(3)
    slot.begin(boards.KINDS.index("read"))
    slot.read(17)
    assert slot.busy_seconds >= 0
    slot.wait(True)
    assert (board.waiting, slot.busy_seconds) == (1, 0.0)
    slot.reset()
    slot.end()
    board.slot(4).begin(boards.KINDS.index("read"))
    assert board.counts() == {"read": 2}
    assert (board.bytes_read, board.waiting, board.done) == (17, 0, 1)


def test_only_a_worker_that_came_after_the_last_death_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others were killed together with the one that had the request first."""
    clock = itertools.count(10**15)
    monkeypatch.setattr(time, "monotonic_ns", lambda: next(clock))
    board, before = Board(), next(clock)
    assert [board.blame(17, before) for _ in range(DEADLY + 1)] == [1] + [0] * DEADLY
    assert [board.blame(17, next(clock)) for _ in range(2)] == [2, DEADLY]
    assert board.is_deadly(17)


@pytest.mark.parametrize("request_", [0, 1, -1, (1 << 63) - 1, -(1 << 63)])
def test_any_number_can_be_a_request(request_: int) -> None:
    """They are what `hash` gives."""
    board = Board()
    for _ in range(DEADLY):
        assert not board.is_deadly(request_)
        board.blame(request_)
    assert board.is_deadly(request_)
    slot = board.slot(0)
    slot.begin(0, request_)
    assert slot.request == request_
    slot.end()
    assert slot.request is None


def test_what_is_known_of_deaths_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest are kept; which number a request has does not matter."""
    clock = itertools.count(10**15)
    monkeypatch.setattr(time, "monotonic_ns", lambda: next(clock))
    board = Board()
    for request in range(100):
        for _ in range(DEADLY):
            board.blame(request)
    deadly = {request for request in range(100) if board.is_deadly(request)}
    assert deadly == set(range(100 - len(deadly), 100))
    assert len(deadly) >= 8


def test_what_a_worker_died_of_is_known_behind_its_death() -> None:
    board = Board()
    pid = os.fork()
    if not pid:
        board.slot(0).failed()
        board.slot(5).begin(boards.KINDS.index("read"), 4711)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert (board.slot(5).request, board.failures) == (4711, 1)
    board.slot(5).reset()
    assert board.slot(5).request is None
    pid = os.fork()
    if not pid:
        os._exit(0 if board.blame(4711) == 1 and board.watching else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert board.watching, "all processes know"
