"""What a mount says of its list of shards, in shared memory."""

from __future__ import annotations

from typing import Any

from wdsfs.mount.reports import LEFT_OUT_MAX, SetState


def state(count: int, why: str = "x", error: str = "") -> dict[str, Any]:
    left_out = [{"shard": f"/{number}.tar", "why": why} for number in range(count)]
    counts = {"added": 1, "removed": 2, "left_out_count": count}
    return {"follow": 5.0, "looked": 1.5, "left_out": left_out, **counts, "error": error, "keys": ""}


def test_a_written_state_is_read_back() -> None:
    shared = SetState(5.0)
    assert (shared.read()["follow"], shared.read()["looked"]) == (5.0, None)
    shared.write(state(3))
    assert shared.read() == state(3)
    shared.write(state(0))
    assert shared.read() == state(0)


def test_only_as_many_are_named_as_there_is_room_for() -> None:
    shared = SetState()
    shared.write(state(1000))
    found = shared.read()
    assert (len(found["left_out"]), found["left_out_count"]) == (LEFT_OUT_MAX, 1000)
    shared.write(state(1000, "long" * 1000, "e" * 100_000))
    found = shared.read()
    assert 0 < len(found["left_out"]) < LEFT_OUT_MAX
    assert found["left_out_count"] == 1000
    assert set(found["error"]) == {"e"}
