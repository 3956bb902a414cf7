"""New shards as units of work of a cluster: workers write and verify them, the driver publishes them.

A worker writes a new file for each attempt. So an attempt that was given up, whose worker has only lost the
network and still writes, does not write into the file of the next one. A worker writes only while the placeholder
exists that the driver has made in the same directory: it shows that both see this directory, and that the command
still waits. The driver, which holds the overlay and the journal, checks the file and the sources, and renames the
file. Objects are sent by the workers, with conditional requests.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from wdsfs.cluster_workers import Workers
from wdsfs.door.shard_door import DOOR
from wdsfs.door.urls import is_remote
from wdsfs.durable import Disk, named, temporary_of, write_whole
from wdsfs.errors import CommitError, ShardError, StaleShard
from wdsfs.index.process_pool import seen_here
from wdsfs.index.spread import Job, SeenShard, agree, here, spread
from wdsfs.packing.plan import Output, SourceShard, Step
from wdsfs.packing.shard_writer import Contents, ObjectOutputs, ShardWriter
from wdsfs.shards import Fingerprint

_ATTEMPT = re.compile(rb"\.tmp\.[0-9a-f]{8}$")


class Publication(NamedTuple):
    """The file that a new one replaces, and a function that gets the finished file before it is renamed."""

    replaces: os.stat_result | None = None
    before: Callable[[os.stat_result], None] = lambda _: None


class ObjectNote(NamedTuple):
    """The file in which a commit in place notes the bytes that it sends for an object, and what that replaces."""

    log: bytes = b""
    commit: str = ""
    replaces: Fingerprint | None = None


class OutputUnit(NamedTuple):
    """A shard to be written. `sources` are those of its ranges, as the driver sees them.

    `note` is of an object of a commit in place; without it the object is a new one.
    """

    output: Output
    sources: Mapping[int, SeenShard]
    contents: Contents
    note: ObjectNote = ObjectNote()


# --- the driver ----------------------------------------------------------------------------------------------


class ClusterRun:
    """Writes outputs of a plan by `workers`, which read new members as `contents` says.

    `sources` are those of the plan; `on_bytes` is called with the bytes of each finished shard.
    """

    def __init__(
        self,
        workers: Workers,
        contents: Contents,
        sources: Mapping[int, SourceShard],
        disk: Disk,
        on_bytes: Callable[[int], None],
    ) -> None:
        self.workers, self._contents, self._sources = workers, contents, sources
        self._disk, self._on_bytes = disk, on_bytes
        self._placeholders: dict[bytes, int] = {}  # by target: descriptors

    @property
    def together(self) -> int:
        """Return the number of shards that may be written at the same time."""
        return self.workers.engine.width() or self.workers.in_flight()

    def each(
        self,
        steps: Sequence[Step],
        prepare: Callable[[Step], None],
        publication: Callable[[Step], Publication] = lambda _: Publication(),
        note: Callable[[Step], ObjectNote] = lambda _: ObjectNote(),
    ) -> None:
        """Write the shards of these steps; each is prepared just before it is written.

        Raises CommitError, ShardErrors, OSErrors, ExecutorUnusable.
        """

        def unit_of(step: Step) -> OutputUnit:
            prepare(step)
            output = step.output
            numbers = output.sources if self._sources else ()
            unit = OutputUnit(output, {number: self._unchanged(number) for number in numbers}, self._contents)
            if step.is_remote:
                return unit._replace(note=note(step))
            self._hold(output.target)
            return unit

        job = Job(write, unit_of, lambda step: os.fsdecode(step.target))
        try:
            for step, result in spread(self.workers, job, steps):
                if isinstance(result, ShardError):
                    raise result
                step.output.places = None
                self._on_bytes(step.output.length)
                if step.is_remote:
                    DOOR.look_again(step.target)  # what this machine knew about the object is out of date
                    self._on_bytes(step.output.length)  # the bytes sent
                else:
                    self._publish(step.output, result, publication(step))
        finally:
            for target in list(self._placeholders):
                with contextlib.suppress(OSError):
                    self._release(target)

    def _unchanged(self, number: int) -> SeenShard:
        """Return a source, checked to be unchanged since the plan was made. Raises StaleShard."""
        source = self._sources[number]
        seen = seen_here(source.path)
        if seen.fingerprint != source.fingerprint:
            raise changed_since_planned(source.path)
        return seen

    def _hold(self, target: bytes) -> None:
        """Make the placeholder of a shard, which also keeps other commands away from it."""
        placeholder = temporary_of(target)
        with named(target):
            fd = self._disk.open_temporary(placeholder)
            self._placeholders[target] = fd
            self._remove_attempts(placeholder)

    def _release(self, target: bytes) -> None:
        """Remove the placeholder of a shard and the files of attempts that were given up."""
        fd = self._placeholders.pop(target)
        try:
            self._disk.remove(temporary_of(target))
            self._remove_attempts(temporary_of(target))
        finally:
            os.close(fd)

    def _remove_attempts(self, placeholder: bytes) -> None:
        for path in glob.glob(glob.escape(placeholder) + b"." + b"[0-9a-f]" * 8):
            with contextlib.suppress(FileNotFoundError):
                self._disk.remove(path)

    def _publish(self, output: Output, path: bytes, publication: Publication) -> None:
        """Give a file that a worker has written its name. Raises CommitError, StaleShard, OSErrors."""
        replaces, before = publication
        with named(output.target):
            fd = self._open(output, path)
            try:
                self._disk.set_owner(fd, replaces or os.fstat(self._placeholders[output.target]))
                self._disk.sync(fd)
                for number in output.sources if self._sources else ():
                    source = self._sources[number]
                    if not is_remote(source.path) and DOOR.look(source.path) != source.fingerprint:
                        raise changed_since_planned(source.path)
                before(os.fstat(fd))
                if replaces is None and os.path.lexists(output.target):
                    raise CommitError(f"{os.fsdecode(output.target)} exists already")
                self._disk.rename(path, output.target)
            finally:
                os.close(fd)
            self._release(output.target)
            self._disk.sync_directory(os.path.dirname(output.target))

    def _open(self, output: Output, path: bytes) -> int:
        target = os.fsdecode(output.target)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise CommitError(
                f"{target}: this machine does not see {os.fsdecode(path)}, which a worker has written: put the "
                "new shards on a file system that all machines share"
            ) from None
        size = os.fstat(fd).st_size
        if size != output.length:
            os.close(fd)
            text = f"a worker has written {output.length:,} bytes, and this machine sees {size:,}"
            raise CommitError(f"{target}: {text}; repeat the command")
        return fd


def remove_attempts(targets: Iterable[bytes]) -> None:
    """Remove temporary files of these shards that workers of a killed command left behind."""
    expected: dict[bytes, set[bytes]] = {}
    for target in targets:
        expected.setdefault(os.path.dirname(target), set()).add(os.path.basename(temporary_of(target)))
    for directory, placeholders in expected.items():
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries if _ATTEMPT.search(entry.name)]
        for name in names:
            placeholder = name.rpartition(b".")[0]
            if placeholder in placeholders and not os.path.exists(os.path.join(directory, placeholder)):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(directory, name))


def changed_since_planned(path: bytes) -> StaleShard:
    """Return the error for a source that is another file than when the shards were planned."""
    return StaleShard(f"{os.fsdecode(path)} has changed since the commit was planned; start again")


# --- a worker ------------------------------------------------------------------------------------------------


def write(unit: OutputUnit) -> bytes:
    """Write and verify a shard as a file beside its target, and return the name of the file; or send an object.

    Raises CommitError, ShardErrors.
    """
    sources = {number: SourceShard(seen.path, agree(seen)) for number, seen in unit.sources.items()}
    writer = ShardWriter(sources, unit.contents)
    with _disk_errors(unit.output.target):
        if is_remote(unit.output.target):
            _send(writer, unit)
            return b""
        return _write_attempt(writer, unit.output)


def _write_attempt(writer: ShardWriter, output: Output) -> bytes:
    placeholder = temporary_of(output.target)
    if not os.path.exists(placeholder):
        text = f"{here()} does not see {os.fsdecode(placeholder)}, which the commit has made"
        raise CommitError(f"{text}: put the new shards on a file system that all machines share")
    path = placeholder + b"." + secrets.token_hex(4).encode()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        writer.fill(fd, output, sync=True)
        if not os.path.exists(placeholder):
            raise CommitError(f"{os.fsdecode(output.target)}: the commit has ended before this shard was written")
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    finally:
        os.close(fd)
    return path


def _send(writer: ShardWriter, unit: OutputUnit) -> None:
    """Write a shard and send it to its store; idempotent."""
    output, note = unit.output, unit.note
    objects = ObjectOutputs(writer, lambda _: None)
    objects.look([output.target])
    if not note.log:
        if not (objects.exists(output.target) and objects.is_done(output)):
            objects.publish(output)
        return
    if objects.exists(output.target) and _is_sent(objects, output, note):
        return

    def log(size: int, digest: str) -> None:
        line = {"target": os.fsdecode(output.target), "object": [size, digest], "commit": note.commit}
        write_whole(note.log, json.dumps(line).encode())

    objects.replace(output, note.replaces, log)


def _is_sent(objects: ObjectOutputs, output: Output, note: ObjectNote) -> bool:
    """Return True if an attempt whose worker has died has sent the object."""
    try:
        with open(note.log, "rb") as file:
            line = json.load(file)
    except FileNotFoundError:
        return False
    return line["commit"] == note.commit and objects.is_written(output.target, *line["object"])


@contextlib.contextmanager
def _disk_errors(target: bytes) -> Iterator[None]:
    """Turn OSErrors of a block into CommitErrors that name the file and the worker."""
    try:
        with named(target):
            yield
    except OSError as error:
        where = os.fsdecode(error.filename) if error.filename is not None else os.fsdecode(target)
        text = f"{here()} cannot read or write it ({error.strerror}): all machines need it under the same path"
        raise CommitError(f"{where}: {text}; mend that, then repeat the command") from None
