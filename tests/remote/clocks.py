"""A clock that jumps where others wait."""

from __future__ import annotations

import asyncio

from wdsfs.remote.retries import Clock


class JumpingClock(Clock):
    """Each wait takes no time but moves the clock. Chance is always the same."""

    def __init__(self, chance: float = 1.0) -> None:
        self.time = 100.0
        self.waits: list[float] = []
        self.luck = chance

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.time += seconds
        await asyncio.sleep(0)

    def chance(self) -> float:
        return self.luck
