"""What a mount reports of its remote shards: traffic with each store, and the cache.

Workers count the reads that they answer from the cache (`status/counters.py`), the fetcher counts all else. Its
counts begin anew when it is replaced.
"""

from __future__ import annotations

import time
from typing import Any

from wdsfs.remote import shard_paths
from wdsfs.status.counters import Board

# Of a store, while its fetcher has nothing to report: names as in the report.
_NOTHING = dict.fromkeys(
    (
        *("requests", "fetched_bytes", "reads", "hits", "used_bytes"),
        *("queued", "in_flight", "retries", "throttled", "failures"),
    ),
    0,
)
_RENAMED = {"bytes": "fetched_bytes", "used": "used_bytes"}


def gather(board: Board) -> dict[str, Any]:
    """The state of the fetcher, of the cache and of each store of a mount that has remote shards."""
    state = shard_paths.state()
    stores = []
    for store, hits in board.hits.items():
        found = {_RENAMED.get(name, name): value for name, value in state["stores"].get(store, {}).items()}
        one = {"store": store, **_NOTHING, "offline_since": None, "told_until": None, **found}
        one["reads"] += hits.reads
        one["hits"] += hits.reads
        one["used_bytes"] += hits.bytes
        stores.append(one)
    return {
        "stores": stores,
        "fetcher": state["fetcher"],
        "fetch_memory": state.get("memory", 0),
        "waiting": state.get("waiting", 0),
        "cache": {
            "directory": state["cache"],
            "bytes": state.get("cache_bytes", 0),
            "limit": state.get("cache_limit", 0),
        },
    }


def offline_seconds(one: dict[str, Any]) -> float:
    """For how long a store of a report cannot be reached; 0 if it answers."""
    since = one["offline_since"]
    return 0.0 if since is None else max(time.time() - since, 0.0)
