"""What a mount says of itself: the answer to `wdsfs status`, and the same as a text for people and for Prometheus.

The one home of that report. It is made in a worker (for `.wdsfs/status.json`) or in a child of the supervisor (for
the control socket), from the index and from what is on the board, so that both say the same.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from wdsfs.dataset.shard_set import ShardSet
from wdsfs.dataset.tree import Totals
from wdsfs.status.counters import Board

DAMAGED_MAX = 100  # shards whose damage is told one by one; the others are counted
LABEL_MAX = 1000  # bytes of a mount point, its end, that tell it from others


class _Metric(NamedTuple):
    """A row of the metrics; the value is a number, or numbers by kind."""

    name: str
    type: str
    told: str
    value: Callable[[dict[str, Any]], Any]


# Base units and endings as the conventions of Prometheus have them.
_METRICS = (
    _Metric("uptime_seconds", "gauge", "Time since the mount began.", itemgetter("uptime_seconds")),
    _Metric("requests_total", "counter", "Requests of the kernel by kind.", itemgetter("requests")),
    _Metric("read_bytes_total", "counter", "Bytes of files that the kernel has read.", itemgetter("bytes_read")),
    _Metric("errors_total", "counter", "Requests that failed, missing names apart.", itemgetter("failures")),
    _Metric("worker_restarts_total", "counter", "Workers that were replaced.", itemgetter("restarts")),
    _Metric("workers", "gauge", "Processes that serve.", lambda report: len(report["processes"]) - 1),
    _Metric("memory_bytes", "gauge", "Memory that no file backs, all processes.", itemgetter("memory_bytes")),
    _Metric("open_shards", "gauge", "Shards open, counted in each worker.", itemgetter("open_files")),
    _Metric("shards", "gauge", "Shards of the set.", itemgetter("shards")),
    _Metric("indexed_shards", "gauge", "Shards that are indexed.", itemgetter("indexed")),
    _Metric("damaged_shards", "gauge", "Indexed shards that are not whole.", itemgetter("damaged_count")),
    _Metric("samples", "gauge", "Samples of the indexed shards.", itemgetter("samples")),
    _Metric("members", "gauge", "Members of the indexed shards.", itemgetter("members")),
    _Metric("content_bytes", "gauge", "Bytes of all members of the indexed shards.", itemgetter("bytes")),
)


def gather(lower: ShardSet, totals: Callable[[], Totals], board: Board, started: float) -> dict[str, Any]:
    """What the index says of the set now, and what the processes of the mount have counted.

    `started` is when the mount began (seconds since the epoch). Looks at every shard.
    """
    lower.look_at_all()  # what the totals are of is what the shards are now
    found = totals()
    processes = board.processes
    helpers = [board.helper] if board.helper else []
    damaged = [{"shard": path, "problem": text} for path, text in itertools.islice(lower.damaged(), DAMAGED_MAX)]
    return {
        "shards": found.shards,
        "indexed": found.indexed,
        "samples": found.samples,
        "members": found.members,
        "bytes": found.bytes,
        "damaged": damaged,
        "damaged_count": max(found.damaged, len(damaged)),  # joined shards are in the list only
        "uptime_seconds": time.time() - started,
        "processes": processes,
        "restarts": board.restarts,
        "memory_bytes": sum(map(anonymous_bytes, [*processes, *helpers])),
        "open_files": board.open_files,
        "requests": board.counts(),
        "bytes_read": board.bytes_read,
        "failures": board.failures,
        "index": str(lower.index.directory),
        "notices": lower.index.notices,
    }


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that no file backs, what it shares divided by those who share it. 0 when it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss_Anon:"):
                return int(line.split()[1]) * 1024
    return 0


def as_json(report: dict[str, Any], most: int) -> bytes:
    """A report as a text of up to `most` bytes: of whatever is too long for that, the beginning."""
    while True:
        # What is no UTF-8 in a path is a lone surrogate here, and becomes an escape of JSON.
        text = json.dumps(report, indent=2, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        if len(text) <= most:
            return text
        cuttable = [key for key, value in report.items() if isinstance(value, list | str)]
        longest = max(cuttable, key=lambda key: len(json.dumps(report[key])))
        report = {**report, longest: report[longest][: len(report[longest]) // 2]}


def as_metrics(report: dict[str, Any]) -> bytes:
    """A report in the text format of Prometheus, version 0.0.4.

    Every line has the mount point as a label, so that the files of several mounts can be put together.
    """
    mount = f'mountpoint="{_label(report["mountpoint"])}"'
    return "".join(itertools.chain.from_iterable(_lines(one, mount, report) for one in _METRICS)).encode()


def _lines(one: _Metric, mount: str, report: dict[str, Any]) -> Iterator[str]:
    yield f"# HELP wdsfs_{one.name} {one.told}\n# TYPE wdsfs_{one.name} {one.type}\n"
    value = one.value(report)
    by_labels = {mount: value}
    if isinstance(value, dict):
        by_labels = {f'{mount},kind="{kind}"': count for kind, count in value.items()}
    for labels, number in by_labels.items():
        yield f"wdsfs_{one.name}{{{labels}}} {number}\n"


def _label(text: str) -> str:
    """The value of a label: UTF-8 whatever the path is; backslashes, quotes and line feeds escaped."""
    readable = text.encode("utf-8", "backslashreplace")[-LABEL_MAX:].decode("utf-8", "ignore")
    return readable.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
