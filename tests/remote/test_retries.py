"""Retries and the limit of requests at once, under a clock of the test."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable

import pytest

from tests.remote.clocks import JumpingClock
from wdsfs.remote.retries import Limit, Patience, Traffic, Transient, again, blocking


def failing(*failures: Exception) -> Callable[[], Awaitable[str]]:
    """An attempt that fails in these ways, one after the other, and then succeeds."""
    left = list(failures)

    async def attempt() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return attempt


def persist(
    attempt: Callable[[], Awaitable[str]], clock: JumpingClock, patience: Patience, limit: Limit
) -> Traffic:
    traffic = Traffic()
    assert asyncio.run(again(attempt, limit, patience, clock, traffic)) == "done"
    return traffic


def test_waits_double_up_to_the_longest_and_are_a_matter_of_chance() -> None:
    for luck in (1.0, 0.25, 0.0):
        clock = JumpingClock(luck)
        traffic = persist(failing(*[Transient("x")] * 6), clock, Patience(60, 1, 8), Limit(4, clock))
        assert clock.waits == [wait * luck for wait in (1, 2, 4, 8, 8, 8)]
        assert (traffic.requests, traffic.retries, traffic.failures) == (7, 6, 0)


def test_a_store_is_offline_from_the_first_failure_to_the_next_success() -> None:
    clock, traffic = JumpingClock(), Traffic()
    limit, patience = Limit(4, clock), Patience(10, 1, 8)
    assert traffic.offline_since is None
    before = time.time()
    for _ in range(2):
        with pytest.raises(Transient):
            asyncio.run(again(failing(*[Transient("x")] * 9), limit, patience, clock, traffic))
        since = traffic.offline_since
        assert since is not None
        assert before - 10 <= since < time.time()
    assert since == traffic.offline_since
    asyncio.run(again(failing(), limit, patience, clock, traffic))
    assert traffic.offline_since is None
    assert (traffic.failures, traffic.reads) == (2, 0)


def test_a_wait_that_the_store_asks_for_holds_back_every_request_to_it() -> None:
    clock = JumpingClock(0.0)
    limit = Limit(8, clock)
    persist(failing(Transient("429", throttled=True, wait=7.0)), clock, Patience(), limit)
    assert clock.time == 107.0
    limit.throttled(5.0)
    persist(failing(), clock, Patience(), limit)
    assert clock.time == 112.0


@pytest.mark.parametrize(
    ("failure", "attempts"),
    [
        (Transient("x"), 4),
        (Transient("x", wait=100.0), 1),
        (Transient("x", attempts=2), 2),
        (Transient("x", refused=True), 3),
    ],
)
def test_the_reader_gets_the_failure_when_time_is_up(failure: Transient, attempts: int) -> None:
    clock = JumpingClock()
    traffic, patience = Traffic(), Patience(10, first=1, longest=60, refused=3)
    with pytest.raises(Transient) as caught:
        asyncio.run(again(failing(*[failure] * 99), Limit(4, clock), patience, clock, traffic))
    assert caught.value is failure
    assert (traffic.requests, traffic.failures) == (attempts, 1)
    assert clock.time <= 110.0


def test_no_attempt_is_begun_that_a_silent_server_would_draw_out() -> None:
    clock, traffic = JumpingClock(), Traffic()

    async def silence() -> str:
        await clock.sleep(20)
        raise Transient("x", silent=True)

    with pytest.raises(Transient):
        asyncio.run(again(silence, Limit(4, clock), Patience(60, 0.1, 1), clock, traffic))
    assert traffic.requests == 2
    assert clock.time <= 160


def test_other_errors_are_final_and_give_their_place_back() -> None:
    clock = JumpingClock()
    limit = Limit(1, clock)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(again(failing(ZeroDivisionError()), limit, Patience(), clock, Traffic()))
    assert limit.under_way == 0


def test_the_limit_halves_once_a_second_and_grows_by_one_in_each_round() -> None:
    clock = JumpingClock()
    limit = Limit(64, clock)
    for _ in range(10):
        limit.throttled(None)
    assert limit.allowed == 32
    clock.time += 1
    limit.throttled(None)
    assert limit.allowed == 16
    for _ in range(17):
        limit.succeeded()
    assert 16.9 < limit.allowed <= 17.1
    for _ in range(10_000):
        limit.succeeded()
    assert limit.allowed == 64
    for _ in range(99):
        clock.time += 1
        limit.throttled(None)
    assert limit.allowed == 1


def test_no_more_are_under_way_than_allowed_and_all_get_their_turn() -> None:
    clock = JumpingClock()
    limit = Limit(3, clock)
    order: list[int] = []
    most = 0

    async def one(number: int) -> None:
        nonlocal most
        await limit.enter()
        order.append(number)
        most = max(most, limit.under_way)
        await asyncio.sleep(0)
        limit.leave()

    async def many() -> None:
        await asyncio.gather(*(one(number) for number in range(20)))

    asyncio.run(many())
    assert most == 3
    assert order == list(range(20))
    assert limit.under_way == 0


def test_a_wait_that_ends_after_the_patience_of_a_request_does_not_hold_it_back() -> None:
    clock = JumpingClock(0.0)
    limit = Limit(8, clock)
    with pytest.raises(Transient):
        persist(failing(Transient("429", throttled=True, wait=3600.0)), clock, Patience(), limit)
    persist(failing(), clock, Patience(), limit)
    limit.throttled(50.0)
    persist(failing(), clock, Patience(total=10), limit)
    assert clock.waits == []
    persist(failing(Transient("x")), clock, Patience(), limit)
    assert clock.waits == [50.0, 0.0]


def test_a_request_that_gets_no_place_is_given_up_with_those_before_it() -> None:
    """But for as long as one of them succeeds now and then."""
    clock, traffic = JumpingClock(), Traffic()
    limit = Limit(1, clock)

    async def run() -> None:
        await limit.enter()
        waiting = [asyncio.create_task(limit.enter(0.1)) for _ in range(3)]
        given_up = again(failing(), limit, Patience(total=0.1), clock, traffic)
        limit.succeeded()  # before they wait
        with pytest.raises(Transient, match="none of the requests before"):
            await given_up
        await asyncio.wait(waiting)
        assert all(task.exception() for task in waiting)
        waiting = [asyncio.create_task(limit.enter(0.1)) for _ in range(3)]
        for _ in range(5):
            await asyncio.sleep(0.05)
            clock.time += 1
            limit.succeeded()
        assert not any(task.done() for task in waiting)
        limit.leave()
        await waiting[0]

    asyncio.run(run())
    assert traffic.failures == 1


def test_a_request_that_is_cancelled_while_it_waits_keeps_no_place() -> None:
    limit = Limit(1, JumpingClock())

    async def run() -> None:
        await limit.enter()
        waiting = [asyncio.create_task(limit.enter()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        limit.leave()  # gives the place to the second
        waiting[1].cancel()  # which has not taken it up yet
        await asyncio.wait(waiting)
        assert [task.cancelled() for task in waiting] == [True, True, False]
        limit.leave()

    asyncio.run(run())
    assert limit.under_way == 0


def test_a_blocking_call_that_ends_when_it_is_cancelled_is_cancelled() -> None:
    """Else a limit of time around many such calls is lost, and they go on for ever."""

    async def cancel_at_the_end() -> None:
        ended = threading.Event()
        task = asyncio.ensure_future(blocking(ended.set, 60))
        await asyncio.sleep(0)
        assert ended.wait(60)  # the loop stands still, and learns of both at once
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    for _ in range(300):
        asyncio.run(cancel_at_the_end())


def test_the_latency_of_a_store_is_that_of_its_quick_answers() -> None:
    limit = Limit(4, JumpingClock())
    assert limit.latency == 0
    for seconds in (0.02, 0.5, 0.021, 0.5):
        limit.answered(seconds)
    assert 0.02 <= limit.latency < 0.06
