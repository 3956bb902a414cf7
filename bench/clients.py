"""The processes that read and write while the clock runs.

A client is forked before the clock and given jobs. For each it first prepares what would cost time (buffers,
slices of them), then waits for the word to go, then does nothing but the calls that are measured, and only then
looks at what it has got. The time of a job is that from the first client's start to the last one's end, by their
own clocks. The benchmark itself never touches a mount: one that hangs costs a client and a time limit.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import random
import select
import signal
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, Protocol

from bench.data import strided_sum

PIECE = 1 << 20  # a large file is read in pieces of this many bytes


class File(NamedTuple):
    """A path with what is to be found there."""

    path: str
    size: int
    crc: int
    total: int = 0


@dataclass
class Outcome:
    """What a job has read, and what was wrong with it."""

    count: int = 0
    bytes: int = 0
    wrong: int = 0
    facts: dict[str, float] = field(default_factory=dict)


class Job(Protocol):
    def prepare(self) -> None:
        """Everything that must not cost time later."""

    def run(self) -> None:
        """What is measured."""

    def check(self) -> Outcome:
        """What it has read."""


def _buffer(size: int) -> memoryview:
    """Memory that is there: each of its pages has been written to."""
    return memoryview(bytearray(b"\1") * max(size, 1))


class ReadFiles:
    """Open, read and close each file; every byte is kept and compared afterwards."""

    def __init__(self, files: Sequence[File]) -> None:
        self.files = files

    def prepare(self) -> None:
        room = _buffer(sum(file.size + 1 for file in self.files))
        self.work = []
        at = 0
        for file in self.files:  # one byte more than there should be: the end of the file is seen in one call
            self.work.append((file.path, [room[at : at + file.size + 1]]))
            at += file.size + 1
        self.got = [0] * len(self.work)

    def run(self) -> None:
        open_, readv, close, flags = os.open, os.readv, os.close, os.O_RDONLY
        got = self.got
        for number, (path, part) in enumerate(self.work):
            fd = open_(path, flags)
            got[number] = readv(fd, part)
            close(fd)

    def check(self) -> Outcome:
        outcome = Outcome(len(self.files), sum(self.got))
        for file, got, (_, (part,)) in zip(self.files, self.got, self.work, strict=True):
            outcome.wrong += got != file.size or zlib.crc32(part[:got]) != file.crc
        return outcome


class WriteFiles:
    """Open, write and close each file: new ones in a directory that is made before the clock runs or, without
    one, files that are there, which are emptied as they are opened."""

    def __init__(self, files: Sequence[tuple[str, bytes]], directory: str = "") -> None:
        self.files, self.directory = files, directory

    def prepare(self) -> None:
        if self.directory:
            os.mkdir(self.directory)
        self.written = [0] * len(self.files)

    def run(self) -> None:
        open_, write, close, written = os.open, os.write, os.close, self.written
        flags = os.O_WRONLY | (os.O_CREAT | os.O_EXCL if self.directory else os.O_TRUNC)
        for number, (path, content) in enumerate(self.files):
            fd = open_(path, flags, 0o644)
            written[number] = write(fd, content)
            close(fd)

    def check(self) -> Outcome:
        outcome = Outcome(len(self.files), sum(self.written))
        outcome.wrong = sum(
            got != len(content) for got, (_, content) in zip(self.written, self.files, strict=True)
        )
        return outcome


class WriteStream:
    """Write one new file from start to end, in pieces of which no two are equal; `crc` is among the facts."""

    def __init__(self, path: str, size: int) -> None:
        self.path, self.size = path, size

    def prepare(self) -> None:
        self.room = memoryview(bytearray(random.Random(0).randbytes(PIECE)))
        self.bytes = 0

    def _pieces(self) -> Iterator[memoryview]:
        for at in range(0, self.size, PIECE):
            self.room[:8] = at.to_bytes(8, "little")
            yield self.room[: self.size - at]

    def run(self) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        for piece in self._pieces():
            self.bytes += os.write(fd, piece)
        os.close(fd)

    def check(self) -> Outcome:
        crc = 0
        for piece in self._pieces():
            crc = zlib.crc32(piece, crc)
        return Outcome(1, self.bytes, int(self.bytes != self.size), facts={"crc": crc})


class StatFiles:
    def __init__(self, files: Sequence[File]) -> None:
        self.paths = [file.path for file in files]
        self.sizes = [file.size for file in files]

    def prepare(self) -> None:
        self.got: list[os.stat_result] = []

    def run(self) -> None:
        stat, keep = os.stat, self.got.append
        for path in self.paths:
            keep(stat(path))

    def check(self) -> Outcome:
        wrong = sum(got.st_size != size for got, size in zip(self.got, self.sizes, strict=True))
        return Outcome(len(self.got), 0, wrong)


class ListDirectories:
    """What a loader does first: list directories, with the kind of each entry."""

    def __init__(self, directories: Sequence[str], expected: int) -> None:
        self.directories, self.expected = directories, expected

    def prepare(self) -> None:
        self.count = 0

    def run(self) -> None:
        for directory in self.directories:
            with os.scandir(directory) as entries:
                self.count += sum(entry.is_file() for entry in entries)

    def check(self) -> Outcome:
        return Outcome(self.count, 0, abs(self.expected - self.count))


class StatRoot:
    """The least that one can ask of a mount: is it there?"""

    def __init__(self, path: str) -> None:
        self.path = path

    def prepare(self) -> None:
        pass

    def run(self) -> None:
        os.stat(self.path)

    def check(self) -> Outcome:
        return Outcome(1)


class ListTop:
    """The first look into a mount."""

    def __init__(self, path: str) -> None:
        self.path = path

    def prepare(self) -> None:
        self.count = 0

    def run(self) -> None:
        self.count = len(os.listdir(self.path))

    def check(self) -> Outcome:
        return Outcome(self.count, 0, int(not self.count))


class Stream:
    """Read files from start to end, in pieces; a few bytes of every page are summed."""

    def __init__(self, files: Sequence[File], piece: int = PIECE) -> None:
        self.files, self.piece = files, piece

    def prepare(self) -> None:
        self.room = _buffer(self.piece)
        self.sums: list[int] = []
        self.bytes = 0

    def run(self) -> None:
        for file in self.files:
            fd = os.open(file.path, os.O_RDONLY)
            total, got = 0, self.piece
            while got == self.piece:
                got = _fill(fd, self.room)
                total += strided_sum(self.room[:got])
                self.bytes += got
            os.close(fd)
            self.sums.append(total & (1 << 64) - 1)

    def check(self) -> Outcome:
        wrong = sum(total != file.total for total, file in zip(self.sums, self.files, strict=True))
        return Outcome(len(self.sums), self.bytes, wrong)


def _fill(fd: int, room: memoryview) -> int:
    """Read until the room is full or the file ends; returns the bytes read."""
    got = os.readv(fd, [room])
    while 0 < got < len(room) and (more := os.readv(fd, [room[got:]])):
        got += more
    return got


class ReadAll:
    """Read files and compare every byte. Not for measuring."""

    def __init__(self, files: Sequence[File]) -> None:
        self.files = files
        self.outcome = Outcome()

    def prepare(self) -> None:
        self.room = _buffer(PIECE)

    def run(self) -> None:
        for file in self.files:
            fd = os.open(file.path, os.O_RDONLY)
            crc = size = 0
            while got := os.readv(fd, [self.room]):
                crc = zlib.crc32(self.room[:got], crc)
                size += got
            os.close(fd)
            self.outcome.count += 1
            self.outcome.bytes += size
            self.outcome.wrong += (crc, size) != (file.crc, file.size)

    def check(self) -> Outcome:
        return self.outcome


# --- the processes -------------------------------------------------------------------------------------------


class ClientsFailed(Exception):
    """A client died, hung, or met an error where it must not."""


@dataclass(frozen=True)
class Measured:
    seconds: float
    started: float  # by the monotonic clock
    ended: float
    outcomes: list[Outcome]

    @property
    def count(self) -> int:
        return sum(outcome.count for outcome in self.outcomes)

    @property
    def bytes(self) -> int:
        return sum(outcome.bytes for outcome in self.outcomes)


class Clients:
    """Processes, each with its own list of jobs; `go` runs the next job of all of them at once."""

    def __init__(self, jobs: Sequence[Sequence[Job]], limit: float) -> None:
        self._jobs, self._limit = jobs, limit
        self._all: list[tuple[int, int, int]] = []  # process, where to write to it, where to read from it

    def __enter__(self) -> Clients:
        gc.collect()
        gc.freeze()
        for own in self._jobs:
            to_read, to_write = os.pipe()
            from_read, from_write = os.pipe()
            pid = os.fork()
            if not pid:
                for _, write, read in self._all:
                    os.close(write)
                    os.close(read)
                os.close(to_write)
                os.close(from_read)
                _serve(own, to_read, from_write)
            os.close(to_read)
            os.close(from_write)
            self._all.append((pid, to_write, from_read))
        gc.unfreeze()
        return self

    def __exit__(self, *how: object) -> None:
        for pid, write, read in self._all:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.close(write)
            os.close(read)
        for pid, _, _ in self._all:
            _reap(pid)

    def go(self) -> Measured:
        """Run the next job of each client. Raises ClientsFailed if one fails or has met wrong bytes."""
        for _, _, read in self._all:
            self._receive(read)  # each is ready
        for _, write, _ in self._all:
            os.write(write, b"!")
        answers = [self._receive(read) for _, _, read in self._all]
        started = min(answer[0] for answer in answers) / 1e9
        ended = max(answer[1] for answer in answers) / 1e9
        measured = Measured(ended - started, started, ended, [answer[2] for answer in answers])
        wrong = sum(outcome.wrong for outcome in measured.outcomes)
        if wrong:
            raise ClientsFailed(f"{wrong} of {measured.count} results are not what they should be")
        return measured

    def _receive(self, fd: int) -> Any:
        parts = bytearray()
        end = time.monotonic() + self._limit
        wanted = 8
        while len(parts) < wanted:
            if not select.select([fd], [], [], max(0.0, end - time.monotonic()))[0]:
                raise ClientsFailed(f"no answer within {self._limit:.0f} s")
            piece = os.read(fd, wanted - len(parts))
            if not piece:
                raise ClientsFailed("a client died")
            parts += piece
            if len(parts) == 8 == wanted:
                wanted = 8 + int.from_bytes(parts, "little")
        answer = pickle.loads(parts[8:])
        if isinstance(answer, str):
            raise ClientsFailed(answer)
        return answer


def _reap(pid: int, seconds: float = 5.0) -> None:
    """Wait for a killed client. One that is stuck in a mount ends when that is gone, and is left to init."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(ChildProcessError):
            if not os.waitpid(pid, os.WNOHANG)[0]:
                time.sleep(0.005)
                continue
        return


def _serve(jobs: Sequence[Job], orders: int, answers: int) -> NoReturn:
    """A client's life; it ends with the pipe from its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.disable()
    code = 0
    try:
        for job in jobs:
            try:
                job.prepare()
                _answer(answers, None)
                if not os.read(orders, 1):
                    break
                start = time.monotonic_ns()
                job.run()
                end = time.monotonic_ns()
                _answer(answers, (start, end, job.check()))
            except Exception as error:
                _answer(answers, f"{type(job).__name__}: {error}")
                break
    except BaseException:
        code = 1
    finally:
        os._exit(code)


def _answer(fd: int, answer: object) -> None:
    data = pickle.dumps(answer)
    message = len(data).to_bytes(8, "little") + data
    while message:
        message = message[os.write(fd, message) :]


def shares(items: Sequence[Any], clients: int) -> Iterator[Sequence[Any]]:
    """The items in as many pieces as there are clients."""
    for number in range(clients):
        yield items[len(items) * number // clients : len(items) * (number + 1) // clients]
