"""An output shard as a unit of work of a cluster: what its worker does.

A worker writes and verifies; it publishes nothing that is a file. Each attempt has a file of its own, so one that
was given up (its worker lost the network, not its life) and the next one do not write into each other. The file is
made only while the placeholder is there that the driver has made in the same directory: it shows that both see the
same directory, and that the commit still waits for this. An object is sent from here, by a conditional request.

`packing/cluster_run.py` is the driver's part.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from wdsfs.cluster.far_side import SeenShard, agree, here
from wdsfs.errors import CommitError
from wdsfs.overlay.upper_format import OPEN_DIRECTORY
from wdsfs.packing.pieces import NewMember
from wdsfs.packing.shard_writer import ShardWriter
from wdsfs.packing.steps import Output, SourceShard
from wdsfs.packing.upper_files import Files
from wdsfs.storage.durable import named, temporary_of, write_whole
from wdsfs.storage.identity import Fingerprint

_ATTEMPT = re.compile(rb"\.tmp\.[0-9a-f]{8}$")


class OutputUnit(NamedTuple):
    """A shard to be written. `sources` are those of its ranges, as the driver sees them; `upper` is a directory.

    Of an object: `log` is the file that notes what is sent by the in-place commit `commit`, in the place of an
    object with the fingerprint `replaces`; without it the object is a new one.
    """

    output: Output
    sources: Mapping[int, SeenShard]
    upper: bytes
    log: bytes = b""
    commit: str = ""
    replaces: Fingerprint | None = None


def write_file(unit: OutputUnit) -> bytes:
    """Write and verify a shard; returns the name of the file, which lies beside the target.

    Raises CommitError, ShardErrors.
    """
    placeholder = temporary_of(unit.output.target)
    with _opened(unit) as writer, _disk_errors(unit.output.target):
        if not os.path.exists(placeholder):
            text = f"{here()} does not see {os.fsdecode(placeholder)}, which the commit has made"
            raise CommitError(f"{text}: the new shards have to be on a file system that all machines share")
        path = placeholder + b"." + secrets.token_hex(4).encode()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            writer.fill(fd, unit.output, sync=True)
            if not os.path.exists(placeholder):
                raise CommitError(f"{os.fsdecode(unit.output.target)}: the commit that wanted it has ended")
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        finally:
            os.close(fd)
    return path


def remove_attempts(targets: Iterable[bytes]) -> None:
    """Remove attempts at these shards for which no commit waits any more: it was killed, its workers not."""
    wanted: dict[bytes, set[bytes]] = {}
    for target in targets:
        wanted.setdefault(os.path.dirname(target), set()).add(os.path.basename(temporary_of(target)))
    for directory, placeholders in wanted.items():
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries if _ATTEMPT.search(entry.name)]
        for name in names:
            placeholder = name.rpartition(b".")[0]
            if placeholder in placeholders and not os.path.exists(os.path.join(directory, placeholder)):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(directory, name))


def write_object(unit: OutputUnit) -> bytes:
    """Write a shard and send it to its store; idempotent. Raises CommitError, ShardErrors."""
    from wdsfs.packing.object_outputs import ObjectOutputs  # late, as in `remote/shard_paths.py`

    with _opened(unit) as writer, _disk_errors(unit.output.target):
        objects = ObjectOutputs(writer, lambda _: None)
        objects.look([unit.output.target])
        if _is_sent(unit, objects.is_done, objects.is_written, objects.exists(unit.output.target)):
            return b""
        if not unit.log:
            objects.publish(unit.output)
            return b""

        def note(size: int, digest: str) -> None:
            line = {"target": os.fsdecode(unit.output.target), "object": [size, digest], "commit": unit.commit}
            write_whole(unit.log, json.dumps(line).encode())

        objects.replace(unit.output, unit.replaces, note)
    return b""


def _is_sent(
    unit: OutputUnit,
    is_done: Callable[[Output], bool],
    is_written: Callable[[bytes, int, str], bool],
    exists: bool,
) -> bool:
    """True if an attempt whose worker has died has sent the object."""
    if not exists:
        return False
    if not unit.log:
        return is_done(unit.output)
    try:
        with open(unit.log, "rb") as file:
            line = json.load(file)
    except FileNotFoundError:
        return False
    size, digest = line["object"]
    return line["commit"] == unit.commit and is_written(unit.output.target, size, digest)


@contextlib.contextmanager
def _opened(unit: OutputUnit) -> Iterator[ShardWriter]:
    """A writer over the sources as this machine sees them, and the overlay."""
    sources = {number: SourceShard(seen.path, agree(seen)) for number, seen in unit.sources.items()}
    directory = -1
    if any(isinstance(piece, NewMember) for piece in unit.output.pieces):
        try:
            directory = os.open(unit.upper, OPEN_DIRECTORY)
        except OSError as error:
            raise _not_shared(unit.upper, error) from None
    try:
        files = Files(directory)

        def open_file(path: bytes) -> int:
            try:
                return files(path)
            except FileNotFoundError as error:
                raise _not_shared(os.path.join(unit.upper, path), error) from None

        yield ShardWriter(sources, open_file)
    finally:
        if directory >= 0:
            os.close(directory)


def _not_shared(path: bytes, error: OSError) -> CommitError:
    return CommitError(
        f"{os.fsdecode(path)}: {here()} cannot read it ({error.strerror}): the overlay has to be on a file "
        "system that all machines share, under the same path"
    )


@contextlib.contextmanager
def _disk_errors(target: bytes) -> Iterator[None]:
    """A block whose OSErrors name the file and the worker, as CommitErrors."""
    try:
        with named(target):
            yield
    except OSError as error:
        where = os.fsdecode(error.filename) if error.filename is not None else os.fsdecode(target)
        raise CommitError(f"{where}: {error.strerror}, on {here()}; mend that, then repeat the command") from None
