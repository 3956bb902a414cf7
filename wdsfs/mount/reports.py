"""The report of a mount by FUSE: for `wdsfs status`, and as texts for people and for Prometheus.

A worker makes the report for `.wdsfs/status.json`, a child of the supervisor for the control socket. Both use the
index, the counters on the board, the fetcher's state, and the supervisor's notes about the list of shards. So both
reports are the same. The processes of a mount share texts by a `TextRing`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from wdsfs import mount_registry, names
from wdsfs.door.shard_door import DOOR
from wdsfs.fuse.counters import Board
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.tree import Totals

ERROR_MAX = 2000  # characters
LEFT_OUT_MAX = 100  # shards with their names; the report counts the others
_STATE_MAX = 16 << 10  # bytes of JSON; a report has room for 64 KiB in all

# The number of snapshots, and the bytes for each. Unused bytes take no memory.
SNAPSHOTS, _ROOM = 256, 64 << 10
_LAST, _SNAPSHOT_HEAD = struct.Struct("<Q"), struct.Struct("<QIIq")  # number, bytes, CRC-32, ns since the epoch
TEXT_MAX = _ROOM - _SNAPSHOT_HEAD.size


class Text(NamedTuple):
    """The content of a file, and its mtime (ns since the epoch)."""

    content: bytes
    mtime_ns: int


class TextRing:
    """The latest texts of all processes of a mount, by number; each process can read each text.

    A file in memory, made before the mount forks its workers. Numbers begin with 1 and are never used again. If a
    process is killed while it writes a text, the text has no number yet.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("wdsfs-snapshots")

    def put(self, text: bytes) -> int:
        """Keep a text of up to TEXT_MAX bytes, evict the oldest text, and return the number."""
        fcntl.lockf(self._file, fcntl.LOCK_EX)  # the kernel unlocks it when this process dies
        try:
            number = self.last() + 1
            head = _SNAPSHOT_HEAD.pack(number, len(text), zlib.crc32(text), time.time_ns())
            if os.pwrite(self._file, head + text, _snapshot_offset(number)) < len(head) + len(text):
                raise OSError(errno.ENOSPC, "no memory for a report")  # the one before stays the latest
            os.pwrite(self._file, _LAST.pack(number), 0)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
        return number

    def get(self, number: int) -> Text | None:
        """Return the text of this number; None if it has been evicted, or never existed."""
        slot = os.pread(self._file, _SNAPSHOT_HEAD.size + TEXT_MAX, _snapshot_offset(number))
        if len(slot) < _SNAPSHOT_HEAD.size:
            return None
        stored, length, crc, taken_ns = _SNAPSHOT_HEAD.unpack_from(slot)
        text = slot[_SNAPSHOT_HEAD.size : _SNAPSHOT_HEAD.size + length]
        # Read without the lock: a text that another worker replaces meanwhile has another number or checksum.
        return Text(text, taken_ns) if number and (stored, crc) == (number, zlib.crc32(text)) else None

    def last(self) -> int:
        """Return the latest number; 0 before the first text."""
        last: int = _LAST.unpack(os.pread(self._file, _LAST.size, 0).ljust(_LAST.size, b"\0"))[0]
        return last


def _snapshot_offset(number: int) -> int:
    return mmap.PAGESIZE + number % SNAPSHOTS * _ROOM


class SetState:
    """The state of the list of shards. `follow` is the interval (s) between looks, None for a fixed set."""

    def __init__(self, follow: float | None = None) -> None:
        self._texts = TextRing()
        counts = dict.fromkeys(("added", "removed", "left_out_count"), 0)
        self.write({"follow": follow, "looked": None, "left_out": [], **counts, "error": ""})

    def write(self, state: dict[str, Any]) -> None:
        """Replace the state. It lists as many left-out shards as fit."""
        state = {**state, "error": state["error"][:ERROR_MAX], "left_out": state["left_out"][:LEFT_OUT_MAX]}
        while len(text := json.dumps(state).encode()) > _STATE_MAX and state["left_out"]:
            state["left_out"] = state["left_out"][: len(state["left_out"]) // 2]
        self._texts.put(text)

    def read(self) -> dict[str, Any]:
        """Return the current state."""
        while (text := self._texts.get(self._texts.last())) is None:
            pass  # other processes have replaced it 256 times in between
        state: dict[str, Any] = json.loads(text.content)
        return state


# Of a store, while its fetcher has nothing to report: names as in the report.
_NOTHING = dict.fromkeys(
    (
        *("requests", "fetched_bytes", "reads", "hits", "used_bytes"),
        *("queued", "in_flight", "retries", "throttled", "failures"),
    ),
    0,
)
_RENAMED = {"bytes": "fetched_bytes", "used": "used_bytes"}


def _remote_report(board: Board) -> dict[str, Any]:
    """Return the state of the fetcher, of the cache and of each store of a mount with remote shards."""
    state = DOOR.remote.fetcher_state()
    stores = []
    for store, hits in board.hits.items():
        counts = {_RENAMED.get(name, name): value for name, value in state["stores"].get(store, {}).items()}
        row = {"store": store, **_NOTHING, "offline_since": None, "told_until": None, **counts}
        row["reads"] += hits.reads
        row["hits"] += hits.reads
        row["used_bytes"] += hits.bytes
        stores.append(row)
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


def offline_seconds(store: dict[str, Any]) -> float:
    """Return the time (s) without an answer of a store of a report; 0 if it answers."""
    since = store["offline_since"]
    return 0.0 if since is None else max(time.time() - since, 0.0)


DAMAGED_MAX = 100  # shards with their damage; the report counts the others
LABEL_MAX = 1000  # bytes of the label: the end of the mount point


class _Metric(NamedTuple):
    """A row of the metrics; the value is a number, or a number for each value of `label`."""

    name: str
    type: str
    help: str
    value: Callable[[dict[str, Any]], Any]
    label: str = "kind"


# Base units and endings follow the conventions of Prometheus.
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


def _of_stores(value: Callable[[dict[str, Any]], float]) -> Callable[[dict[str, Any]], dict[str, float]]:
    return lambda report: {store["store"]: value(store) for store in report["remote"]["stores"]}


def _store_metric(name: str, kind: str, text: str, value: Callable[[dict[str, Any]], float]) -> _Metric:
    return _Metric(f"store_{name}", kind, text, _of_stores(value), "store")


def _cache_metric(name: str, text: str, value: Callable[[dict[str, Any]], float]) -> _Metric:
    return _Metric(name, "gauge", text, lambda report: value(report["remote"]))


def _set_metric(name: str, kind: str, text: str, value: Callable[[dict[str, Any]], float]) -> _Metric:
    return _Metric(name, kind, text, lambda report: value(report["set"]) + 0)  # a number, not True


def _push_metric(name: str, text: str, count: str) -> _Metric:
    return _Metric(f"{name}_total", "counter", text, lambda report: report["pushed"][count])


_PUSH_METRICS = (
    _push_metric("pushed_files", "Files put ahead of readers.", "files"),
    _push_metric("pushed_bytes", "Bytes put ahead of readers.", "bytes"),
    _push_metric("pushed_passed_files", "Files put ahead of readers that they have passed.", "passed_files"),
    _push_metric("pushed_passed_bytes", "Bytes put ahead of readers that they have passed.", "passed_bytes"),
    _push_metric("listed_ahead", "Samples listed ahead of clients.", "listed"),
)

# Of mounts: a report of a set alone has none of this.
_SET_METRICS = (
    _set_metric(
        "followed", "gauge", "1 if the shards are looked at again.", lambda own: own["follow"] is not None
    ),
    _set_metric(
        "last_look_seconds", "gauge", "Unix time of the last look at the shards.", lambda own: own["looked"] or 0
    ),
    _set_metric("look_failed", "gauge", "1 if the last look failed.", lambda own: bool(own["error"])),
    _set_metric("shards_added_total", "counter", "Shards that came.", itemgetter("added")),
    _set_metric("shards_removed_total", "counter", "Shards that went.", itemgetter("removed")),
    _set_metric("shards_left_out", "gauge", "New shards that are not shown.", itemgetter("left_out_count")),
)

# Of mounts that have remote shards.
_REMOTE_METRICS = (
    _store_metric("requests_total", "counter", "Requests to a store.", itemgetter("requests")),
    _store_metric("fetched_bytes_total", "counter", "Content fetched from a store.", itemgetter("fetched_bytes")),
    _store_metric("used_bytes_total", "counter", "Bytes read of a store's shards.", itemgetter("used_bytes")),
    _store_metric("reads_total", "counter", "Reads of a store's shards.", itemgetter("reads")),
    _store_metric("hits_total", "counter", "Reads that did not wait for the store.", itemgetter("hits")),
    _store_metric("retries_total", "counter", "Requests that were sent again.", itemgetter("retries")),
    _store_metric("throttled_total", "counter", "Answers that asked for fewer requests.", itemgetter("throttled")),
    _store_metric("failures_total", "counter", "Requests that were given up.", itemgetter("failures")),
    _store_metric("queued", "gauge", "Requests that wait for their turn.", itemgetter("queued")),
    _store_metric("in_flight", "gauge", "Requests that the store is working on.", itemgetter("in_flight")),
    _store_metric("offline_seconds", "gauge", "Time without an answer, 0 if it answers.", offline_seconds),
    _cache_metric("cache_bytes", "Room that the cache of remote shards takes.", lambda own: own["cache"]["bytes"]),
    _cache_metric("cache_limit_bytes", "Room that it may take.", lambda remote: remote["cache"]["limit"]),
    _cache_metric("fetch_memory_bytes", "Memory for bytes in transfer.", itemgetter("fetch_memory")),
)


def gather(lower: ShardSet, totals: Callable[[], Totals], board: Board, started: float) -> dict[str, Any]:
    """Return the totals of the set from the index, and the counters of the processes of the mount.

    `started` is the start of the mount (seconds since the epoch). The function looks at every shard. Only mounts
    with remote shards have "remote", and only mounts with a pusher have "pushed".
    """
    lower.look_at_all()  # so that the totals count the shards as they are now
    sums = totals()
    processes = board.processes
    remote = {"remote": _remote_report(board)} if board.hits else {}
    pusher = 0 if board.passes is None else board.passes.pusher
    pushed = {} if board.passes is None else {"pushed": {**board.passes.pushed._asdict(), "pusher": pusher}}
    fetchers = (state["fetcher"] for state in remote.values())
    helpers = [pid for pid in (board.helper, pusher, *mount_registry.children(pusher), *fetchers) if pid]
    damaged = [{"shard": path, "problem": text} for path, text in itertools.islice(lower.damaged(), DAMAGED_MAX)]
    return {
        "shards": sums.shards,
        "indexed": sums.indexed,
        "samples": sums.samples,
        "members": sums.members,
        "bytes": sums.bytes,
        "damaged": damaged,
        "damaged_count": len(damaged) if len(damaged) < DAMAGED_MAX else max(sums.damaged, DAMAGED_MAX),
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
        **pushed,
        **remote,
    }


def anonymous_bytes(pid: int) -> int:
    """Return a process's memory without files, with its share of shared pages; 0 if the process has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss_Anon:"):
                return int(line.split()[1]) * 1024
    return 0


def as_json(report: dict[str, Any], most: int) -> bytes:
    """Return a report as JSON of at most `most` bytes, with its longest lists and texts cut."""
    while True:
        # Bytes of a path that are not UTF-8 are lone surrogates here, and become escapes of JSON.
        text = json.dumps(report, indent=2, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        if len(text) <= most:
            return text
        cuttable = [key for key, value in report.items() if isinstance(value, list | str)]
        longest = max(cuttable, key=lambda key: len(json.dumps(report[key])))
        report = {**report, longest: report[longest][: len(report[longest]) // 2]}


def as_metrics(report: dict[str, Any]) -> bytes:
    """Return a report in the text format of Prometheus, version 0.0.4.

    Every line has the mount point as a label, so that you can join the files of several mounts.
    """
    mount = f'mountpoint="{_label(report["mountpoint"])}"'
    parts = ("set", _SET_METRICS), ("pushed", _PUSH_METRICS), ("remote", _REMOTE_METRICS)
    metrics = (*_METRICS, *(metric for part, rows in parts if part in report for metric in rows))
    return "".join(itertools.chain.from_iterable(_lines(metric, mount, report) for metric in metrics)).encode()


def _lines(metric: _Metric, mount: str, report: dict[str, Any]) -> Iterator[str]:
    yield f"# HELP wdsfs_{metric.name} {metric.help}\n# TYPE wdsfs_{metric.name} {metric.type}\n"
    value = metric.value(report)
    by_labels = {mount: value}
    if isinstance(value, dict):
        by_labels = {f'{mount},{metric.label}="{_label(kind)}"': count for kind, count in value.items()}
    for labels, number in by_labels.items():
        yield f"wdsfs_{metric.name}{{{labels}}} {number}\n"


def _label(text: str) -> str:
    """Return the value of a label: UTF-8 on one line, for any path, with escaped backslashes and quotes."""
    readable = names.shown(text).encode("utf-8", "backslashreplace")[-LABEL_MAX:].decode("utf-8", "ignore")
    return readable.replace("\\", "\\\\").replace('"', '\\"')
