"""The command `status`: what is mounted, a block of lines for each mount; root sees those of others, too.

What a daemon says of itself is made in `status/status_report.py`. Of the mounts of others only what the kernel
says is believed: their runtime directories, sockets and files are theirs, and root looks into none of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import click

from wdsfs.cli.console import json_option
from wdsfs.cli.output import bytes_text, print_block
from wdsfs.errors import MountError, counted, several
from wdsfs.trust import user_name

MOUNTED = "mounted"  # the state of a mount of another user: nobody was asked
SPECS_MAX, PROBLEMS_MAX = 5, 3  # of a mount among others

# For what the daemon of another version does not tell: it may have been started before an upgrade.
_UNTOLD: dict[str, Any] = {
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
@click.argument("mountpoint", required=False)
@json_option
def status(mountpoint: str | None, as_json: bool) -> None:
    """Show every wdsfs mount of this user, or one of them in full.

    Root also sees the mounts of others, as far as the kernel knows of them.

    \b
    Examples:
      wdsfs status /mnt/train
      wdsfs status --json
    """
    from wdsfs.status import control

    reports = [*map(_report, control.daemons()), *map(_foreign_report, control.foreign())]
    if mountpoint is not None:
        wanted = control.canonical(mountpoint)
        reports = [one for one in reports if one["mountpoint"] == wanted]
        if not reports:
            raise MountError(f"{wanted}: no mount of yours is there; see: wdsfs status")
    if as_json:
        click.echo(json.dumps(reports))
    elif not reports:
        click.echo("no wdsfs mounts")
    for report in [] if as_json else reports:
        told = {**_UNTOLD, **report}
        rows = _foreign_rows(told) if told["state"] == MOUNTED else _rows(told, mountpoint is not None)
        print_block(_head(told), rows)
    if any(report["state"] == control.UNSUPERVISED for report in reports):
        click.echo("without its supervisor a mount works until its workers die; mount it again soon", err=True)
    if any(report["state"] == control.DEAD for report in reports):
        click.echo("a dead mount is cleared with: wdsfs umount MOUNTPOINT", err=True)


def _report(daemon: Any) -> dict[str, Any]:
    from wdsfs.commit.replace_in_place import is_half_done
    from wdsfs.status import control

    answer = control.ask(daemon) if daemon.alive else None
    state = control.RUNNING if answer else control.state_without_answer(daemon)
    own = {"user": user_name(os.geteuid()), "unfinished_commit": is_half_done(daemon.overlay)}
    return {**control.report(daemon, state, answer), **own, "mode": _mode(daemon.mountpoint, daemon.overlay)}


def _foreign_report(found: Any) -> dict[str, Any]:
    source = os.fsdecode(found.source).removeprefix("wdsfs#")
    return {
        "mountpoint": os.fsdecode(found.path),
        "state": MOUNTED,
        "user": user_name(found.user),
        "specs": [source],
        "mode": "ro" if "ro" in found.options else "rw",
    }


def _mode(mountpoint: str, overlay: str | None) -> str:
    """Whether it can be written: with an overlay, if the kernel was not told otherwise (`-o ro`)."""
    from wdsfs import host

    mounted = host.mounted_at(mountpoint)
    return "ro" if not overlay or (mounted is not None and "ro" in mounted.options) else "rw"


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
        ("shards", " ".join(report["specs"])),
        ("more", f"its daemon is not asked, because it belongs to {user}: that user's `wdsfs status` says more"),
    ]


def _rows(report: dict[str, Any], in_full: bool) -> list[tuple[str, str]]:
    rows = [("shards", _shards(report, in_full)), ("layout", _layout(report))]
    if report["composition"]:
        rows.append(("view", report["composition"]))
    if report["overlay"]:
        rows.append(("overlay", report["overlay"]))
    if report["unfinished_commit"]:
        rows.append(("commit", "one in place was stopped half-way; finish it: repeat that commit"))
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
    return rows + (_load_in_full(report) if in_full else _load(report)) + _wrong(report, in_full)


def _shards(report: dict[str, Any], in_full: bool) -> str:
    """SHARDS as they were typed, and the directory that relative ones are of."""
    specs: Sequence[str] = report["specs"]
    text = " ".join([*report["selection"], *specs])
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
    ]


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
