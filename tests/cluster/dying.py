"""Work that kills its worker once, for the tests with real clusters. The first attempt leaves a note."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from wdsfs.index import record_of_file
from wdsfs.packing import cluster_run
from wdsfs.packing.output_units import OutputUnit


def die_once(note: bytes) -> None:
    try:
        Path(os.fsdecode(note)).touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def build_file(path: bytes, **options: Any) -> bytes:
    """As `record_of_file.build_file`; the worker that builds the record of s3.tar dies."""
    record = record_of_file.build_file(path, **options)
    if path.endswith(b"/s3.tar"):
        die_once(path + b".died")
    return record


def write(task: tuple[bool, OutputUnit]) -> bytes:
    """As `cluster_run.write`; the worker that has written 3.tar or replaced s3.tar dies before it says so."""
    written = cluster_run.write(task)
    if task[1].output.target.endswith(b"3.tar"):
        die_once(task[1].upper + b".died")
    return written
