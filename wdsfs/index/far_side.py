"""The worker's side of a cluster: runs a batch of units with the options of the command that sent it.

A worker is any process of the engine: it may serve other commands, of other options, before and at the same time.
So the shared settings of the command come with each batch, and batches of different settings wait for each other.
Nothing here is known of the engine.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import socket
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from wdsfs import __version__, shared_settings
from wdsfs.door.shard_door import DOOR
from wdsfs.door.urls import Url, is_remote
from wdsfs.errors import ExecutorUnusable, MissingShard, StaleMount, UnreadableShard, WdsfsError
from wdsfs.shards import Fingerprint
from wdsfs.shared_settings import setting

# Options that all processes of a command share. No secret is among them: `--store-option` takes
# none, and configuration files and credentials are read where the work is done.
_OPTIONS = ("STORE_OPTIONS", "ALLOW_PIPE", "TRUST", "CACHE_SIZE", "FETCH_MEMORY", "UNPACK", "UNPACK_MEMORY")
_PLACES = ("INDEX_DIR", "CACHE_DIR")  # a worker that has its own keeps it
_OWN_PLACES = frozenset(filter(setting, _PLACES))


class Batch:
    """Units for a function. Its repr, which engines write to their logs, shows no unit: one may hold secrets."""

    __slots__ = ("environment", "function", "units", "version")

    def __init__(
        self, function: Callable[[Any], Any], units: Sequence[Any], environment: Mapping[str, str | None]
    ) -> None:
        self.version, self.environment = version(), environment
        self.function, self.units = function, units

    def __repr__(self) -> str:
        return f"<{len(self.units)} units of wdsfs>"


class Outcome(NamedTuple):
    """Outcome of a unit: its result, or the error that the function raised, and the time it took (seconds)."""

    result: Any
    error: Exception | None
    seconds: float


class SeenShard(NamedTuple):
    """A shard as the driver sees it; `url` is its address if the path leaves out a part of that."""

    path: bytes
    fingerprint: Fingerprint
    url: Url | None = None

    def is_same(self, other: Fingerprint) -> bool:
        """Return True if another machine sees the same content.

        Inode and ctime belong to a machine, ETags to all.
        """
        return self.fingerprint == other if is_remote(self.path) else self.fingerprint[:2] == other[:2]


def options() -> dict[str, str | None]:
    """Return the settings of this command that its workers need, None for one that is not set."""
    return {name: setting(name) or None for name in (*_OPTIONS, *_PLACES)}


def run(batch: Batch) -> list[Outcome]:
    """Work at the units of a batch, one after another. Raises ExecutorUnusable."""
    if batch.version != version():
        raise ExecutorUnusable(
            f"{here()} has wdsfs {version()}, and this command {batch.version}: install the same version there, "
            "and start the workers again"
        )
    with _options.held(batch.environment):
        return [_outcome(batch.function, unit) for unit in batch.units]


@functools.cache
def version() -> str:
    """Return the version of wdsfs in this process, with a checksum of its sources."""
    total = 0
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        total = zlib.crc32(file.read_bytes(), total)
    return f"{__version__}+{total:08x}"


def here() -> str:
    """Return the name of this worker, for messages."""
    return f"the worker on {socket.gethostname()}"


def on_shard(unit: tuple[Callable[[Any], Any], SeenShard, Any]) -> Any:
    """Call a function with its argument if this worker sees the shard that the driver sees.

    Raises StaleMount, UnreadableShard, and what the function raises.
    """
    function, seen, argument = unit
    agree(seen)
    return function(argument)


def agree(seen: SeenShard) -> Fingerprint:
    """Check that this worker sees the driver's shard; return its fingerprint here.

    Raises StaleMount, UnreadableShard.
    """
    if seen.url is not None:
        DOOR.remote.path_of(seen.url)
    shown = os.fsdecode(seen.path)
    try:
        now = DOOR.look(seen.path)
        if not seen.is_same(now):
            now = DOOR.look_again(seen.path)  # what this machine knows of an object may be old
    except MissingShard as error:
        if is_remote(seen.path):
            raise
        raise UnreadableShard(f"{shown}: {here()} has no such file: workers need the same paths") from error
    if not seen.is_same(now):
        raise StaleMount(
            f"{shown}: {here()} sees another file ({now.size:,} bytes, this machine {seen.fingerprint.size:,}; "
            "or another time): check that it has the same file system mounted, and not a stale copy"
        )
    return now


def _outcome(function: Callable[[Any], Any], unit: Any) -> Outcome:
    since = time.perf_counter()
    try:
        result, error = function(unit), None
    except Exception as raised:
        result, error = None, _portable(raised)
    return Outcome(result, error, time.perf_counter() - since)


def _portable(error: Exception) -> Exception:
    """Return an error that can be pickled; of a bug also where it was raised."""
    if not isinstance(error, WdsfsError):
        error.add_note(f"on {here()}:\n" + "".join(traceback.format_exception(error)))
    error.__cause__ = error.__context__ = None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an exception of any library, with any constructor
        return RuntimeError("".join(traceback.format_exception(error)))
    return error


class _Options:
    """The options of the batches in work; batches with other options wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._users = 0
        self._now: Mapping[str, str | None] = {}

    @contextlib.contextmanager
    def held(self, environment: Mapping[str, str | None]) -> Iterator[None]:
        """Apply these options for the block."""
        with self._changed:
            self._changed.wait_for(lambda: not self._users or self._now == environment)
            if self._now != environment:
                self._apply(environment)
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    def _apply(self, environment: Mapping[str, str | None]) -> None:
        changed = False
        for name, value in environment.items():
            if setting(name) == (value or "") or name in _OWN_PLACES or (value is None and name in _PLACES):
                continue
            changed = True
            shared_settings.choose(name, value or "")
        self._now = environment
        if changed:
            DOOR.close()  # its fetcher has the earlier options


_options = _Options()
