"""The command `status`: what is mounted, a block of lines for each mount; root sees those of others, too.

What a daemon says of itself is made in `mount/reports.py`. Of the mounts of others only what the kernel
says is believed: their runtime directories, sockets and files are theirs, and root looks into none of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import click

from wdsfs.cli import completion
from wdsfs.cli.options import json_option
from wdsfs.cli.output import print_block, say, write_json
from wdsfs.errors import bytes_text, counted, several

MOUNTED = "mounted"  # the state of a mount of another user: its daemon was not asked
KERNEL = "served by the kernel"  # the state of a mount of an image, which has no daemon
_HALF_DONE = ("commit", "one in place was stopped half-way; finish it: repeat that commit")
SPECS_MAX, PROBLEMS_MAX = 5, 3  # of a mount among others

# For what the daemon of another version does not report: it may have been started before an upgrade.
_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("shards", "indexed", "samples", "members", "bytes", "bytes_read"), 0),
    **dict.fromkeys(("uptime_seconds", "memory_bytes", "restarts", "open_files", "failures"), 0),
    "damaged_count": 0,
    "index": "",
    "composition": "",
    "processes": [],
    "damaged": [],
    "notices": [],
    "requests": {},
}


@click.command()
@click.argument("mountpoint", required=False, shell_complete=completion.mount_points)
@json_option
def status(mountpoint: str | None, as_json: bool) -> None:
    """Show every wdsfs mount of this user, or one of them in full.

    Root also sees the mounts of others, as far as the kernel knows of them.

    \b
    Examples:
      wdsfs status /mnt/train
      wdsfs status --json
    """
    from wdsfs import mount_registry
    from wdsfs.mount import search

    # Of one that is named nothing is asked of the others, which may take their time to answer.
    mounts = search.live_mounts() if mountpoint is None else [search.named(mountpoint)]
    reports = [mount.report() for mount in mounts]
    if as_json:
        write_json(reports)
    elif not reports:
        say("no wdsfs mounts")
    for report in [] if as_json else reports:
        full = {**_DEFAULTS, **report}
        if full["state"] == KERNEL:
            rows = _image_rows(full, mountpoint is not None)
        else:
            rows = _foreign_rows(full) if full["state"] == MOUNTED else _rows(full, mountpoint is not None)
        print_block(_head(full), rows)
    if any(report["state"] == mount_registry.UNSUPERVISED for report in reports):
        say("without its supervisor a mount ends with its workers: unmount and mount it soon", err=True)
    if any(report["state"] == mount_registry.DEAD for report in reports):
        say("a dead mount is cleared with: wdsfs umount MOUNTPOINT", err=True)


# --- showing -----------------------------------------------------------------------------------------------


def _head(report: dict[str, Any]) -> str:
    words = [report["state"], {"ro": "read-only", "rw": "read-write"}[report["mode"]]]
    if report["state"] == MOUNTED:
        words.append(f"by {report['user']}")
    elif report["uptime_seconds"]:
        words.append(f"for {_duration(report['uptime_seconds'])}")
    return f"{report['mountpoint']}: {', '.join(words)}"


def _foreign_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    user = report["user"]
    return [
        ("shards", " ".join(report["specs"]) or "none: a new set"),
        ("more", f"its daemon is not asked, because it belongs to {user}: that user's `wdsfs status` says more"),
    ]


def _image_rows(report: dict[str, Any], in_full: bool) -> list[tuple[str, str]]:
    rows = [("image", report["specs"][0])]
    if report["overlay"]:
        rows.append(("overlay", report["overlay"]))
    if report["unfinished_commit"]:
        rows.append(_HALF_DONE)
    if report["layout"]:
        rows.append(("layout", _layout(report)))
    if report["composition"]:
        rows.append(("view", report["composition"]))
    if report["shards"]:
        rows.append(("content", f"{counted(report['shards'], 'shard')}, {bytes_text(report['bytes'])}"))
    if report.get("copies"):
        rows.append(("copies", _copies(report)))
    if in_full and report["shards"]:
        rows.append(("shards", several(report["files"], SPECS_MAX)))
    if report.get("pid") and in_full:
        rows += [("guard", f"process {report['pid']}"), ("log", report["log"] or "the terminal")]
    if report.get("replaced"):
        text = several(report["replaced"], SPECS_MAX)
        rows.append(("replaced", f"{text}; the old content is shown until: wdsfs refresh {report['mountpoint']}"))
    return rows + [("notice", text) for text in report["notices"]]


def _copies(report: dict[str, Any]) -> str:
    """What the kernel reads in the place of shards that are no plain tars of this machine."""
    taken = bytes_text(report["copies_bytes"])
    return f"of {counted(report['copies'], 'shard')}, {taken}, which stay in the cache as long as it is mounted"


def _rows(report: dict[str, Any], in_full: bool) -> list[tuple[str, str]]:
    rows = [("shards", _shards(report, in_full)), ("layout", _layout(report))]
    if report["composition"]:
        rows.append(("view", report["composition"]))
    if report["overlay"]:
        rows.append(("overlay", report["overlay"]))
    if "set" in report:
        is_fixed = report["overlay"] or "--shard-id" in report["selection"]
        rows += [("set", "fixed")] if is_fixed else _set(report["set"], in_full)
    if report["unfinished_commit"]:
        rows.append(_HALF_DONE)
    if in_full:
        rows += [("process", str(report["pid"])), ("log", report["log"] or "the terminal")]
    if report["state"] != "running":
        return rows
    content = (
        f"{counted(report['shards'], 'shard')} ({report['indexed']:,} indexed), {report['samples']:,} samples"
    )
    if in_full:
        content += f", {report['members']:,} members, {bytes_text(report['bytes'])}"
    rows.append(("content", content))
    load = _load_in_full(report) if in_full else _load(report)
    return rows + load + _offline(report) + _wrong(report, in_full)


def _set(state: dict[str, Any], in_full: bool) -> list[tuple[str, str]]:
    """How the list of shards may change, and what was found when it was looked at last."""
    text = "fixed: `wdsfs refresh` looks at the shards again"
    if state["follow"] is not None:
        text = f"looked at again after changes, and every {state['follow']:g} s"
    if state["looked"] is not None:
        text += f"; last at {_when(state['looked'])}, {state['added']:,} added, {state['removed']:,} removed"
    rows = [("set", text)]
    listed = state["left_out"] if in_full else state["left_out"][:PROBLEMS_MAX]
    rows += [("not shown", f"{one['shard']}: {one['why']}") for one in listed]
    if state["left_out_count"] > len(listed):
        rows.append(("not shown", f"{state['left_out_count']:,} in all"))
    return rows + ([("last look", state["error"])] if state["error"] else [])


def _shards(report: dict[str, Any], in_full: bool) -> str:
    """SHARDS as they were typed, and the directory that relative ones are of."""
    specs: Sequence[str] = report["specs"]
    text = " ".join([*report["selection"], *specs]) or "none: a new set"
    if not in_full and len(specs) > SPECS_MAX:
        text = " ".join([*report["selection"], several(specs, SPECS_MAX)])
    relative = any(not part.lstrip("@").startswith(("/", "~", "$")) for one in specs for part in one.split("::"))
    return f"{text} (in {report['directory']})" if relative and report.get("directory") else text


def _load(report: dict[str, Any]) -> list[tuple[str, str]]:
    requests = counted(sum(report["requests"].values()), "request")
    return [("load", f"{bytes_text(report['memory_bytes'])} of memory, {requests}, {_read(report)}")]


def _load_in_full(report: dict[str, Any]) -> list[tuple[str, str]]:
    processes = f"{len(report['processes'])} processes, {report['restarts']} workers replaced"
    requests = sorted(report["requests"].items(), key=lambda item: -item[1])
    return [
        ("index", report["index"]),
        ("memory", f"{bytes_text(report['memory_bytes'])} of its own in {processes}"),
        ("open", f"{counted(report['open_files'], 'shard')}, counted in each worker"),
        ("requests", ", ".join(f"{count:,} {name}" for name, count in requests) or "none"),
        ("bytes", _read(report)),
        ("failures", counted(report["failures"], "request")),
        *_remote(report),
    ]


def _remote(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The traffic with each store, and the cache; nothing of a mount without remote shards."""
    if "remote" not in report:
        return []
    remote = report["remote"]
    cache = remote["cache"]
    rows = [("store", f"{one['store']}: {_traffic(one)}") for one in remote["stores"]]
    room = f"{bytes_text(cache['bytes'])} of {bytes_text(cache['limit'])}, shared by all mounts"
    return [*rows, ("cache", f"{room}, in {cache['directory']}")]


def _traffic(one: dict[str, Any]) -> str:
    words = [
        f"{counted(one['requests'], 'request')}, {bytes_text(one['fetched_bytes'])} fetched",
        f"{bytes_text(one['used_bytes'])} used by {counted(one['reads'], 'read')} ({one['hits']:,} cache hits)",
        f"{one['in_flight']:,} in flight, {one['queued']:,} queued",
        f"{one['retries']:,} retries, {one['throttled']:,} throttled, {counted(one['failures'], 'failure')}",
    ]
    if (one["told_until"] or 0.0) > time.time():
        words.append(f"told to wait until {_when(one['told_until'])}")
    return "; ".join(words)


def _offline(report: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (
            "offline",
            f"{one['store']} since {_when(one['offline_since'])}: only what is in the cache is served",
        )
        for one in report.get("remote", {}).get("stores", ())
        if one["offline_since"] is not None
    ]


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _read(report: dict[str, Any]) -> str:
    return f"{bytes_text(report['bytes_read'])} read"


def _wrong(report: dict[str, Any], in_full: bool) -> list[tuple[str, str]]:
    listed = report["damaged"] if in_full else report["damaged"][:PROBLEMS_MAX]
    rows = [("damaged", f"{one['shard']}: {one['problem']}") for one in listed]
    if report["damaged_count"] > len(listed):
        rows.append(("damaged", f"{report['damaged_count']:,} in all; see .wdsfs/problems.txt in the mount"))
    return rows + [("notice", text) for text in report["notices"] if in_full]


def _layout(report: dict[str, Any]) -> str:
    more = {
        ", full names": report["names"] == "full",
        ", merged": report["merge"],
        ", numbered": report["index_tree"],
    }
    layout: str = report["layout"]
    return layout + "".join(text for text, so in more.items() if so)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}d {hours:02}:{minutes:02}:{rest:02}" if days else f"{hours}:{minutes:02}:{rest:02}"
