"""Checks that the file systems have room for the new shards of a commit."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from wdsfs.errors import CommitError, bytes_text
from wdsfs.packing.steps import Step


def refuse_without_space(steps: Sequence[Step], jobs: int) -> None:
    """Raise CommitError if a file system lacks the bytes that these steps need at one time, `jobs` at once.

    New shards are whole before the old ones are removed. Savings by reflinks and compression are not counted; old
    shards that have other links are.
    """
    grows: Counter[int] = Counter()
    copies: dict[int, list[int]] = {}
    directories: dict[int, bytes] = {}
    for step in steps:
        directory = _existing(os.path.dirname(step.output.target))
        device = os.stat(directory).st_dev
        directories.setdefault(device, directory)
        old, new = _freed_by(step), step.output.length
        grows[device] += max(new - old, 0)
        copies.setdefault(device, []).append(min(new, old))
    for device, directory in directories.items():
        needed = grows[device] + sum(sorted(copies[device], reverse=True)[:jobs])
        found = os.statvfs(directory)
        free = (found.f_bavail if os.geteuid() else found.f_bfree) * found.f_frsize
        if found.f_blocks and needed > free:
            fewer = f", write fewer shards at a time (--jobs, now {jobs})" if jobs > 1 and len(steps) > 1 else ""
            raise CommitError(
                f"{os.fsdecode(directory)}: the new shards need {bytes_text(needed)} on this file system, since "
                f"they are written beside the old ones, and {bytes_text(free)} are free: make room{fewer}, or use "
                "--no-space-check"
            )


def _freed_by(step: Step) -> int:
    """Return the bytes that are freed when a step replaces its target."""
    try:
        found = os.stat(step.output.target)
    except FileNotFoundError:
        return 0
    return found.st_size if found.st_nlink == 1 else 0


def _existing(directory: bytes) -> bytes:
    while not os.path.isdir(directory):
        directory = os.path.dirname(directory)
    return directory
