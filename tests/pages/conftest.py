"""One browser for all tests of a process, one server for all that only look; files for previews: any bytes, read
as a server reads them, with a count of the requests."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Program
from tests.pages.viewing import Browser, Viewer, a_browser, a_shard, viewing
from wdsfs.pages.previewer import Limits, Previewer

MEMORY = 256 << 20  # bytes that a worker may need above its libraries


class Bytes:
    """A source of these bytes; with `size` it claims to be so large, and repeats them."""

    def __init__(self, data: bytes, size: int | None = None, key: Hashable = None) -> None:
        self._data, self.key = data, key
        self.size = len(data) if size is None else size
        self.reads = self.bytes_read = 0
        self.before_read: Callable[[int], object] = lambda offset: None

    def read(self, offset: int, length: int) -> bytes:
        self.before_read(offset)
        self.reads += 1
        length = max(min(length, self.size - offset), 0)
        self.bytes_read += length
        if self.size <= len(self._data):
            return self._data[offset : offset + length]
        start = offset % len(self._data)
        return (self._data * (length // len(self._data) + 2))[start : start + length]


@pytest.fixture(scope="module")
def previewer() -> Iterator[Previewer]:
    """One worker, so that it is known which one decodes."""
    found = Previewer(workers=1, limits=Limits(memory=MEMORY, seconds=20))
    yield found
    pids = found.workers
    found.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with a_browser() as found:
        yield found


@pytest.fixture(scope="session")
def looking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    """A server of three shards with 120 samples, that changes nothing."""
    program = Program(tmp_path_factory.mktemp("looking"))
    for number in range(3):
        program.write(f"train-{number:06d}.tar", a_shard(number))
    with viewing(program, "train-{000000..000002}.tar") as found:
        yield found
