"""The command `where`: from which shard, member and byte the files of a mount come."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from wdsfs.cli import completion
from wdsfs.cli.options import json_option
from wdsfs.cli.output import complain, print_block, write_json
from wdsfs.errors import bytes_text

if TYPE_CHECKING:
    from wdsfs.mount.where import Origin


@click.command()
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, shell_complete=completion.paths)
@json_option
def where(paths: tuple[str, ...], as_json: bool) -> None:
    """Say where PATHs in a mount come from: shard, member, key, byte; in the shards, or in an overlay.

    For mounts of both engines, also of an image by mount(8). Directories have a shard, and the key if they are a
    sample's.

    \b
    Examples:
      wdsfs where /mnt/train/train-000017/images/image194/jpg
      wdsfs where --json /mnt/train/train-000017/*
    """
    from wdsfs.mount.where import NoOrigin, origins

    found = origins(paths)
    if as_json:
        rows = [
            {"path": one.path, "error": str(one.error)} if isinstance(one, NoOrigin) else asdict(one)
            for one in found
        ]
        write_json(rows)
    for one in found:
        if isinstance(one, NoOrigin):
            complain(f"{one.error}")
        elif not as_json:
            print_block(_head(one), _rows(one))
    failed = [one.error.exit_code for one in found if isinstance(one, NoOrigin)]
    if failed:
        sys.exit(failed[0])


def _head(one: Origin) -> str:
    what = {"sample": "a sample", "link": "a symbolic link"}.get(one.kind, f"a {one.kind}")
    text = f"{one.path}: {what}, served by {'FUSE' if one.engine == 'fuse' else 'the kernel'}"
    return text + {"upper": ", changed in the overlay", "lower": ", not changed"}.get(one.layer or "", "")


def _rows(one: Origin) -> list[tuple[str, str]]:
    rows = []
    if one.shard is not None:
        rows.append(("shard", one.shard + (" (compressed)" if one.compressed else "")))
    elif one.path != one.mountpoint and not one.stored:
        rows.append(("shard", "not one alone, or not known"))
    if one.url is not None:
        rows.append(("place", "elsewhere: the shard is at that URL"))
    if one.replaced:
        rows.append(("replaced", "that is another file now; the mount shows the one that was there"))
    rows += [(name, value) for name, value in (("member", one.member), ("key", one.key)) if value is not None]
    if one.stored:
        rows.append(("stored", f"in the image {one.image}: a label, or what is made of members"))
    if one.offset is not None:
        unpacked = ", of the unpacked tar" if one.compressed else ""
        rows.append(("offset", f"{one.offset:,}{unpacked}"))
    if one.size is not None:
        rows.append(
            ("size", bytes_text(one.size) if one.size < 1024 else f"{one.size:,} B ({bytes_text(one.size)})")
        )
    if one.upper is not None:
        rows.append(("upper", one.upper))
    if one.image is not None and not one.stored:
        rows.append(("image", os.fspath(one.image)))
    return rows
