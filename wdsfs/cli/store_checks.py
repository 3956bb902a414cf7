"""The checks of `wdsfs doctor URL`: if shards can be read from there, how well, and what to type if not.

What is known of the place is asked for in `remote/stores.py`; here it becomes findings like those of the machine
(`mount/doctor.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from wdsfs.errors import bytes_text, counted
from wdsfs.host import MachineFinding
from wdsfs.remote.urls import BUCKETS, Url

_SPELLING = "check how it is spelt; the keys of a bucket are case-sensitive"
_ADDRESS = "check the address, the network and the proxy (https_proxy)"


def findings_of(url: Url, facts: dict[str, Any]) -> Iterator[MachineFinding]:
    """Yield the findings about a URL of which `Stores.describe` gives these facts."""
    yield _reached(url, facts)
    if facts["credentials"] is not None:
        yield MachineFinding("credentials", "ok", facts["credentials"])
    if facts["ranges"] is not None:
        yield _ranges(facts["ranges"])
    if facts["conditions"] is not None:
        works = "work: what has been replaced is not sent"
        ignored = "ignored by its server; each answer is compared with what the object was"
        yield MachineFinding("conditions", "ok", works if facts["conditions"] else ignored)
    if facts.get("pinned") is False:
        yield MachineFinding(
            "changes",
            "warn",
            "its server gives no ETag: a change is seen only by the size, or by the time in seconds",
            "give a shard a new name when its content changes",
        )


def _reached(url: Url, facts: dict[str, Any]) -> MachineFinding:
    if facts["error"] is not None:
        what, _, remedy = facts["error"].removeprefix(f"{url.shown}: ").partition(": ")
        if not remedy:
            remedy = _SPELLING if "no such object" in what else _address(url)
        prefix = "it is there, but " if facts["reachable"] else ""
        return MachineFinding(url.shown, "fail", prefix + what, remedy)
    if "objects" not in facts:
        return MachineFinding(url.shown, "ok", f"can be reached, {bytes_text(facts['size'])}")
    if not facts["objects"]:
        return MachineFinding(url.shown, "warn", "can be reached, but no object is below it", _SPELLING)
    return MachineFinding(url.shown, "ok", f"can be reached, {counted(facts['objects'], 'object')} below it")


def _address(url: Url) -> str:
    if url.scheme in BUCKETS:
        return f"{_ADDRESS}; for a store of your own: --store-option {url.store}:endpoint=https://..."
    return _ADDRESS


def _ranges(work: bool) -> MachineFinding:
    if work:
        return MachineFinding("ranges", "ok", "work: a read fetches what it needs")
    return MachineFinding(
        "ranges",
        "warn",
        "its server sends whole objects only: each shard is fetched as a whole when it is first read",
        "fetch shards ahead of time (wdsfs fetch), with enough room for them in the cache (--cache-size)",
    )
