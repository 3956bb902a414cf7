"""Work that kills its worker once, for the tests with real clusters. The first attempt leaves a note."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from wdsfs.index import record_of_file
from wdsfs.packing import cluster_units
from wdsfs.packing.cluster_units import OutputUnit
from wdsfs.packing.shard_writer import Files


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


def write(unit: OutputUnit) -> bytes:
    """As `cluster_units.write`; the worker that has written 3.tar or replaced s3.tar dies before it says so."""
    written = cluster_units.write(unit)
    if unit.output.target.endswith(b"3.tar"):
        assert isinstance(unit.contents, Files)
        die_once(unit.contents.top + b".died")
    return written
