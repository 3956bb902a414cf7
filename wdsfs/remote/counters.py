"""Counts requests and bytes of each store, for `status`, metrics and tests."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Traffic:
    """The traffic with one store."""

    requests: int = 0
    bytes: int = 0  # of content that was fetched
    retries: int = 0
    throttled: int = 0  # answers that asked for fewer requests (429, 503)
    failures: int = 0  # requests that were given up
    offline_since: float | None = None  # since when all are (seconds since the epoch); None: it answers
    told_until: float | None = None  # until when it wants no requests for some object (seconds since the epoch)
    reads: int = 0  # of clients, and of the kernel
    hits: int = 0  # of these, those for which nothing had to be waited for
    used: int = 0  # bytes that were read


class Counters:
    """The traffic of a process by store (as `Url.store` has it: no secret is in it)."""

    def __init__(self) -> None:
        self._stores: defaultdict[str, Traffic] = defaultdict(Traffic)

    def of(self, store: str) -> Traffic:
        return self._stores[store]

    def report(self) -> dict[str, dict[str, Any]]:
        return {store: asdict(traffic) for store, traffic in self._stores.items()}
