"""The commands about live mounts: `status`, `where`, `refresh`, `umount`.

The room `mount` decides what a mount reports and does. Root also sees mounts of other users; of these, a command
believes only the kernel.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from wdsfs.cli.option_kinds import Command, json_option, offer_mounts, offer_paths
from wdsfs.cli.output import complain, print_block, say, write_json
from wdsfs.errors import UsageError, bytes_text, counted, several
from wdsfs.mount_registry import DEAD, FOREIGN, RUNNING, UNSUPERVISED

if TYPE_CHECKING:
    from wdsfs.mount.where import NoOrigin, Origin

log = logging.getLogger("wdsfs")

_HALF_DONE = ("commit", "a commit in place was stopped half-way: repeat it")
SPECS_MAX, PROBLEMS_MAX = 5, 3  # of a mount among others

# Values of fields that the daemon does not report, if it was started before an upgrade.
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


@click.command(cls=Command)
@click.argument("mountpoints", metavar="MOUNTPOINT...", nargs=-1, shell_complete=offer_mounts)
@click.option("-a", "--all", "everything", is_flag=True, help="End all mounts that `wdsfs status` shows as yours.")
@click.option("-l", "--lazy", is_flag=True, help="Detach the mount now; end it when no program uses it any more.")
def umount(mountpoints: tuple[str, ...], everything: bool, lazy: bool) -> None:
    """End the mount at MOUNTPOINT, even a dead mount. Returns when its daemon has ended.

    `wdsfs unmount` is the same command.

    \b
    Examples:
      wdsfs umount /mnt/train
      wdsfs umount --all
    """
    from wdsfs.errors import MountError
    from wdsfs.mount import mount_search
    from wdsfs.mount_registry import canonical

    if everything == bool(mountpoints):
        raise UsageError("name a MOUNTPOINT, or --all" if not everything else "--all takes no MOUNTPOINT")
    if everything:
        mountpoints = tuple(mount.mountpoint for mount in mount_search.ending_order())
        if not mountpoints:
            say("no wdsfs mounts")
    # If you type the command in the mount, this process must not keep the mount busy.
    mountpoints = tuple(map(canonical, mountpoints))
    os.chdir("/")
    code = 0
    for mountpoint in mountpoints:
        try:
            mount_search.require_mount(mountpoint).end(lazy=lazy)
        except MountError as error:  # the loop still ends the other mounts
            log.error("%s", error)
            code = error.exit_code
        else:
            if everything:
                say(mountpoint)
    sys.exit(code)


@click.command(cls=Command)
@click.argument("mountpoint", shell_complete=offer_mounts)
@json_option
def refresh(mountpoint: str, as_json: bool) -> None:
    """Show new shards in the mount at MOUNTPOINT, and hide removed shards. Returns when the mount shows them.

    A mount with --follow does the same by itself. For a mount that the kernel serves, unmount and mount again.

    \b
    Examples:
      wdsfs refresh /mnt/train
      wdsfs refresh --json /mnt/train
    """
    from wdsfs.mount import mount_search

    answer = mount_search.require_mount(mountpoint).refresh()
    if as_json:
        write_json(answer)
        return
    for sign, key in (("+", "added"), ("-", "removed")):
        for shard in answer[key]:
            say(f"{sign} {shard['name']}  {shard['shard']}")
    for shard in answer["left_out"]:
        say(f"not shown: {shard['shard']}: {shard['why']}", err=True)
    if answer["kept"]:
        say(f"kept: {answer['kept']}", err=True)
    changes = f"{len(answer['added']):,} added, {len(answer['removed']):,} removed"
    say(f"{counted(answer['shards'], 'shard')}: {changes}")


@click.command(cls=Command)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, shell_complete=offer_paths)
@json_option
def where(paths: tuple[str, ...], as_json: bool) -> None:
    """Show the origin of each PATH in a mount: shard, member, key and byte, or the file in the overlay.

    `where` works for mounts of both engines, also for an image mounted by mount(8). For a directory it shows the
    shard; for a sample also the key.

    \b
    Examples:
      wdsfs where /mnt/train/train-000017/images/image194/jpg
      wdsfs where --json /mnt/train/train-000017/*
    """
    from wdsfs.mount.where import NoOrigin, origins

    answers = origins(paths)
    failures = [answer for answer in answers if isinstance(answer, NoOrigin)]
    if as_json:
        write_json([_where_json(answer) for answer in answers])
    for answer in answers:
        if isinstance(answer, NoOrigin):
            complain(str(answer.error))
        elif not as_json:
            print_block(_where_head(answer), _where_rows(answer))
    if failures:
        sys.exit(failures[0].error.exit_code)


def _where_json(answer: Origin | NoOrigin) -> dict[str, Any]:
    row = asdict(answer)
    return {**row, "error": str(row["error"])} if "error" in row else row


def _where_head(origin: Origin) -> str:
    what = {"sample": "a sample", "link": "a symbolic link"}.get(origin.kind, f"a {origin.kind}")
    text = f"{origin.path}: {what}, served by {'FUSE' if origin.engine == 'fuse' else 'the kernel'}"
    return text + {"upper": ", changed in the overlay", "lower": ", not changed"}.get(origin.layer or "", "")


def _where_rows(origin: Origin) -> list[tuple[str, str]]:
    rows = []
    if origin.shard is not None:
        rows.append(("shard", origin.shard + (" (compressed)" if origin.compressed else "")))
    elif origin.path != origin.mountpoint:
        rows.append(("shard", "several"))
    if origin.url is not None:
        rows.append(("place", "the shard is at that URL"))
    rows += [
        (name, value) for name, value in (("member", origin.member), ("key", origin.key)) if value is not None
    ]
    if origin.offset is not None:
        unpacked = ", of the unpacked tar" if origin.compressed else ""
        rows.append(("offset", f"{origin.offset:,}{unpacked}"))
    if origin.size is not None:
        exact = f"{origin.size:,} B ({bytes_text(origin.size)})"
        rows.append(("size", bytes_text(origin.size) if origin.size < 1024 else exact))
    return rows + ([("upper", origin.upper)] if origin.upper is not None else [])


# --- status ------------------------------------------------------------------------------------------------


@click.command(cls=Command)
@click.argument("mountpoint", required=False, shell_complete=offer_mounts)
@json_option
def status(mountpoint: str | None, as_json: bool) -> None:
    """Show all your wdsfs mounts, or the mount at MOUNTPOINT in full.

    `status` also lists mounts of other users that you can read, with the facts that the kernel knows. Root sees
    all mounts.

    \b
    Examples:
      wdsfs status /mnt/train
      wdsfs status --json
    """
    from wdsfs.mount import mount_search

    # With a MOUNTPOINT, ask no other mount, which may answer slowly.
    mounts = mount_search.live_mounts() if mountpoint is None else [mount_search.require_mount(mountpoint)]
    reports = [mount.report() for mount in mounts]
    if as_json:
        write_json(reports)
    elif not reports:
        say("no wdsfs mounts")
    for report in [] if as_json else reports:
        full = {**_DEFAULTS, **report} if report["state"] == RUNNING else report
        print_block(_head(full), _status_rows(full, mountpoint is not None))
    if any(report["state"] == UNSUPERVISED for report in reports):
        say("without its supervisor a mount ends with its workers: unmount and mount it soon", err=True)
    if any(report["state"] == DEAD for report in reports):
        say("clear a dead mount with: wdsfs umount MOUNTPOINT", err=True)


def _head(report: dict[str, Any]) -> str:
    words = [report["state"], {"ro": "read-only", "rw": "read-write"}[report["mode"]]]
    if report["state"] == FOREIGN:
        words.append(f"by {report['user']}")
    if report.get("uptime_seconds"):
        words.append(f"for {_duration(report['uptime_seconds'])}")
    return f"{report['mountpoint']}: {', '.join(words)}"


def _status_rows(report: dict[str, Any], in_full: bool) -> list[tuple[str, str]]:
    """Return the rows about a mount, from the report of its process or image."""
    rows = [("image", report["image"])] if "image" in report else [("shards", _shards(report, in_full))]
    if report.get("layout"):
        rows.append(("layout", _layout(report)))
    rows += [
        (label, report[key]) for label, key in (("view", "composition"), ("overlay", "overlay")) if report.get(key)
    ]
    if "set" in report:
        is_fixed = report["overlay"] or "--shard-id" in report["selection"]
        rows += [("set", "fixed")] if is_fixed else _set(report["set"], in_full)
    if report.get("unfinished_commit"):
        rows.append(_HALF_DONE)
    if in_full and report.get("pid"):
        rows += [("process", str(report["pid"])), ("log", report["log"] or "the terminal")]
    rows += _content(report, in_full)
    if "requests" in report:
        rows += (
            (_load_in_full(report) if in_full else _load_row(report)) + _offline(report) + _wrong(report, in_full)
        )
    if report.get("replaced"):
        text = several(report["replaced"], SPECS_MAX)
        command = f"wdsfs umount {shlex.quote(report['mountpoint'])}"
        rows.append(("replaced", f"{text}; to show the new content: {command}, and mount it again"))
    notices = report.get("notices", ()) if in_full or "requests" not in report else ()
    return rows + [("notice", text) for text in notices]


def _content(report: dict[str, Any], in_full: bool) -> list[tuple[str, str]]:
    """Return the size of the set, or no row if the report does not have it."""
    if not report.get("shards"):
        return []
    text = counted(report["shards"], "shard")
    if "samples" in report:
        text += f" ({report['indexed']:,} indexed), {report['samples']:,} samples"
        text += f", {report['members']:,} members" if in_full else ""
    if in_full or "samples" not in report:
        text += f", {bytes_text(report['bytes'])}"
    rows = [("content", text)]
    return rows + ([("shards", several(report["files"], SPECS_MAX))] if in_full and "files" in report else [])


def _set(state: dict[str, Any], in_full: bool) -> list[tuple[str, str]]:
    """Return how the list of shards may change, and the result of the last look."""
    text = "fixed; `wdsfs refresh` shows new shards"
    if state["follow"] is not None:
        text = f"looks for new shards after changes, and every {state['follow']:g} s"
    if state["looked"] is not None:
        text += f"; last at {_when(state['looked'])}, {state['added']:,} added, {state['removed']:,} removed"
    rows = [("set", text)]
    listed = state["left_out"] if in_full else state["left_out"][:PROBLEMS_MAX]
    rows += [("not shown", f"{shard['shard']}: {shard['why']}") for shard in listed]
    if state["left_out_count"] > len(listed):
        rows.append(("not shown", f"{state['left_out_count']:,} in all"))
    return rows + ([("last look", state["error"])] if state["error"] else [])


def _shards(report: dict[str, Any], in_full: bool) -> str:
    """Return SHARDS as typed, and the directory of relative paths."""
    specs: Sequence[str] = report["specs"]
    selection = report.get("selection", ())  # unknown for a mount of another user
    text = " ".join([*selection, *specs]) or "none: a new set"
    if not in_full and len(specs) > SPECS_MAX:
        text = " ".join([*selection, several(specs, SPECS_MAX)])
    relative = any(not part.lstrip("@").startswith(("/", "~", "$")) for spec in specs for part in spec.split("::"))
    return f"{text} (in {report['directory']})" if relative and report.get("directory") else text


def _load_row(report: dict[str, Any]) -> list[tuple[str, str]]:
    requests = counted(sum(report["requests"].values()), "request")
    return [("load", f"{bytes_text(report['memory_bytes'])} of memory, {requests}, {_bytes_read_text(report)}")]


def _load_in_full(report: dict[str, Any]) -> list[tuple[str, str]]:
    requests = sorted(report["requests"].items(), key=lambda item: -item[1])
    return [
        ("index", report["index"]),
        ("memory", f"{bytes_text(report['memory_bytes'])} of its own in all processes"),
        ("workers", f"{max(len(report['processes']) - 1, 0)}, {report['restarts']} replaced"),
        ("open", f"{counted(report['open_files'], 'shard')}, counted in each worker"),
        ("requests", ", ".join(f"{count:,} {name}" for name, count in requests) or "none"),
        ("bytes", _bytes_read_text(report)),
        ("failures", counted(report["failures"], "request")),
        *_remote(report),
    ]


def _remote(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return rows for each store and for the cache; no rows for a mount without remote shards."""
    if "remote" not in report:
        return []
    remote = report["remote"]
    cache = remote["cache"]
    rows = [("store", f"{store['store']}: {_traffic(store)}") for store in remote["stores"]]
    room = f"{bytes_text(cache['bytes'])} of {bytes_text(cache['limit'])}, shared by all mounts"
    return [*rows, ("cache", f"{room}, in {cache['directory']}")]


def _traffic(store: dict[str, Any]) -> str:
    words = [
        f"{counted(store['requests'], 'request')}, {bytes_text(store['fetched_bytes'])} fetched",
        f"{bytes_text(store['used_bytes'])} used by {counted(store['reads'], 'read')}"
        f" ({store['hits']:,} cache hits)",
        f"{store['in_flight']:,} in flight, {store['queued']:,} queued",
        f"{store['retries']:,} retries, {store['throttled']:,} throttled, {counted(store['failures'], 'failure')}",
    ]
    if (store["told_until"] or 0.0) > time.time():
        words.append(f"asks to wait until {_when(store['told_until'])}")
    return "; ".join(words)


def _offline(report: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("offline", f"{store['store']} since {_when(store['offline_since'])}: the mount serves cached bytes only")
        for store in report.get("remote", {}).get("stores", ())
        if store["offline_since"] is not None
    ]


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _bytes_read_text(report: dict[str, Any]) -> str:
    text, pushed = f"{bytes_text(report['bytes_read'])} read", report.get("pushed")
    if pushed is None:
        return text
    if pushed["listed"]:
        text += f"; {counted(pushed['listed'], 'sample')} listed ahead"
    if not pushed["files"]:
        return text
    ahead = f"{counted(pushed['files'], 'file')} ({bytes_text(pushed['bytes'])}) pushed ahead of readers"
    # Not of the last window of each pass, for which no counter says that its files were read.
    return f"{text}; {ahead}; readers used at least {pushed['passed_bytes'] / pushed['bytes']:.0%} of these bytes"


def _wrong(report: dict[str, Any], in_full: bool) -> list[tuple[str, str]]:
    listed = report["damaged"] if in_full else report["damaged"][:PROBLEMS_MAX]
    rows = [("damaged", f"{shard['shard']}: {shard['problem']}") for shard in listed]
    if report["damaged_count"] > len(listed):
        rows.append(("damaged", f"{report['damaged_count']:,} in all; see .wdsfs/problems.txt in the mount"))
    return rows


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
