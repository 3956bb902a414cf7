"""Shard sets on disk for the tests of the index and what is built on it, and processes that work on them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests import tars
from tests.processes import Process, finished
from wdsfs.index.record import Record
from wdsfs.index.record_of_file import build_file
from wdsfs.index.store import Index, Summary, summary_of
from wdsfs.shards import Fingerprint, Shard

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def content(number: int, samples: int = 3, text: bytes = b"") -> bytes:
    """A tar whose members differ from those of every other number."""
    members = []
    for sample in range(samples):
        key = b"d%d/%d-%d" % (sample % 2, number, sample)
        members.append(tars.member(key + b".txt", b"%d" % number + text))
        members.append(tars.member(key + b".cls", b"%d" % sample, mtime=number + 1))
    return tars.tar(*members)


def make(directory: Path, count: int, samples: int = 3) -> list[Shard]:
    """Shards s0.tar, s1.tar ... in a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (directory / f"s{number}.tar").write_bytes(content(number, samples))
    return [at(directory / f"s{number}.tar") for number in range(count)]


def write_samples(path: Path, count: int, first: int = 0, name: bytes = b"%s.x") -> None:
    """A shard of this many samples, each an empty member; `name` has the place of the seven digits of a number."""
    header, place = np.frombuffer(tars.header(name % b"0000000"), np.uint8), name.index(b"%s")
    total = int(header[148:154].tobytes(), 8)
    with path.open("wb") as file:
        for begin in range(first, first + count, 100_000):
            numbers = np.arange(begin, min(begin + 100_000, first + count))[:, np.newaxis]
            digits = numbers // 10 ** np.arange(6, -1, -1) % 10
            sums = total + digits.sum(1, keepdims=True)
            blocks = np.tile(header, (len(numbers), 1))
            blocks[:, place : place + 7] += digits.astype(np.uint8)
            blocks[:, 148:154] = sums // 8 ** np.arange(5, -1, -1) % 8 + ord("0")
            file.write(blocks.tobytes())
        file.write(tars.END)


def at(path: Path | bytes) -> Shard:
    name = os.fsencode(path)
    return Shard(name, os.path.basename(name).removesuffix(b".tar"))


def path_of(shard: Shard) -> Path:
    return Path(os.fsdecode(shard.path))


def listing(record: Record) -> list[tuple[bytes, bytes, Any]]:
    """Everything that a record says of its members."""
    entries = [record.entry_of(member) for member in range(record.members)]
    return [
        (record.entry_path(entry), record.extension(member), record.member(member))
        for member, entry in enumerate(entries)
    ]


def right_summary(shard: Shard) -> Summary:
    return summary_of(Record(build_file(shard.path)))


def check(index: Index, shards: Sequence[Shard]) -> None:
    """The index knows exactly what is in these shards now."""
    assert list(index.stale(shards)) == []
    for one in shards:
        fresh = Record(build_file(one.path))
        kept = index.record(one.path, Fingerprint.at(one.path))
        assert index.summary(one.path) == right_summary(one)
        assert kept is not None
        assert listing(kept) == listing(fresh)
        assert [bytes(view) for view in kept.column.values()] == [bytes(view) for view in fresh.column.values()]


def start(code: str, *arguments: str | Path, **options: Any) -> subprocess.Popen[bytes]:
    """A Python process that runs `code` with these `sys.argv[1:]`."""
    command = [sys.executable, "-W", "error", "-c", code, *(str(argument) for argument in arguments)]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return Process(command, env=ENVIRONMENT, **{**streams, **options})


def run(code: str, *arguments: str | Path, wrapper: Sequence[str] = (), **options: Any) -> str:
    """Return the output of a Python process that runs `code`; it has to succeed and print no error."""
    command = [*wrapper, sys.executable, "-W", "error", "-c", code, *(str(argument) for argument in arguments)]
    done = finished(*command, env=ENVIRONMENT, **options)
    assert done.stderr == ""
    return str(done.stdout)


def in_own_mounts() -> list[str]:
    """Return words to put before a command, so that no other process sees what it mounts.

    It gets a copy of all mounts that there are. Those of tests that run at the same time are taken out of it: else
    they would go on after their unmount until the command ends, and their daemons with them.
    """
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", "--mount", "--propagation", "private", *as_root, "sh", "-c", _WITHOUT_OTHERS, "sh"]


_WITHOUT_OTHERS = r"""
    sed -En 's/^\S+ (\S+) (fuse[.]wdsfs|erofs) .*/\1/p' /proc/self/mounts | while read -r place; do
        umount --lazy "$(printf %b "$place")" 2>/dev/null
    done
    exec "$@"
"""
