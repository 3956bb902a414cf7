"""Operations on shards by path, local or in a store: look (fingerprint), open, fetch, send, copy.

The path of a file is absolute, that of a remote shard is its URL without secrets. An open shard is a descriptor of
the file, or a `RemoteTar`. A file may be changed while it is open, which its fingerprint shows; all bytes of a
`RemoteTar` always belong to the same object.

This module holds the connection of the processes to the fetcher, and the secrets of the URLs that were typed: all
rooms above pass paths. Options are in the environment, because all processes of a mount or a command have to
agree: `WDSFS_STORE_OPTIONS` (words as in a shell), `WDSFS_FETCH_MEMORY`.

The rest of the room is imported late: loading it takes as long as the rest of a small command, and most sets have
no URL.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from wdsfs.door.pins import Listing, Pin
from wdsfs.door.urls import BUCKETS, PIPE, Url, is_output, is_remote, parse
from wdsfs.errors import (
    DeniedObject,
    MissingObject,
    NoRanges,
    ObjectChanged,
    ObjectExists,
    ShardError,
    Unreachable,
    UnreadableShard,
    parse_size,
)
from wdsfs.shards import Fingerprint
from wdsfs.storage import source

if TYPE_CHECKING:
    from wdsfs.remote.cached_object import CachedObject
    from wdsfs.remote.client import Remote, RemoteTar
    from wdsfs.remote.object_cache import ObjectCache

OpenShard: TypeAlias = "int | RemoteTar"


class Presumption(NamedTuple):
    """The objects in a list of shards: its rows by path, and the pin in a row."""

    rows: Mapping[bytes, int]
    pin: Callable[[int], Pin]


log = logging.getLogger(__name__)

REPLACED_MAX = 3  # times that a shard is replaced while it is fetched
PIECE = 8 << 20  # bytes that are copied at a time
REFUSED_SECONDS = 5.0  # how long the answer of a store that an object is missing or refused stays valid

_urls: dict[bytes, Url] = {}  # by path: URLs with parts that the path does not show
_pins: dict[bytes, Pin | None] = {}  # by path: pins that this process knows and the cache cannot keep
_presumptions: dict[str, Presumption] = {}  # by list: what counts of shards of which nothing else is known
_refused: dict[bytes, tuple[float, ShardError]] = {}  # by path: until when (monotonic) this error is its answer
_remote: Remote | None = None
_held: list[
    CachedObject
] = []  # objects that cannot be fetched again: open and held until all processes have ended
_said: set[str] = set()  # warnings that were given already


@lru_cache(maxsize=1)
def _cache() -> ObjectCache:
    from wdsfs.remote import object_cache

    return object_cache.cache()


def remote() -> Remote:
    """Return the connection to the fetcher. Raises UsageError for settings that cannot be used."""
    global _remote
    if _remote is None:
        _remote = _connect(None, None)
    return _remote


def attach(device: int, log_file: Path | None) -> Remote:
    """Start a fetcher that also answers requests of the kernel: those at the descriptor `device`.

    REQUIRES: the processes of a mount are not forked yet, and no shard is open. Raises UsageError.
    """
    global _remote
    if _remote is not None:
        _remote.close()
    _remote = _connect(device, log_file)
    return _remote


def _connect(device: int | None, log_file: Path | None) -> Remote:
    from wdsfs.remote import settings
    from wdsfs.remote.client import Remote
    from wdsfs.remote.launcher import MEMORY

    cache, sections = _cache(), settings.load(settings.arguments_of_environment()).sections
    memory = parse_size(os.environ.get("WDSFS_FETCH_MEMORY", str(MEMORY)))
    place = cache.directory, cache.limit
    return Remote(sections, place, cache, memory=memory, device=device, log=log_file)


def state() -> dict[str, Any]:
    """Return the statistics of the fetcher (`Fetcher.stats`), its pid, and how full the cache is.

    Facts that are not available at the moment are left out.
    """
    cache, connection = _cache(), remote()
    report: dict[str, Any] = {"stores": {}, "fetcher": connection.fetcher, "cache": str(cache.directory)}
    with contextlib.suppress(OSError):
        report["cache_bytes"], report["cache_limit"] = cache.room.state()
    with contextlib.suppress(Unreachable):
        report |= connection.stats()
    return report


def close() -> None:
    """End the connection to the fetcher, and forget all pins and URLs; the next use connects again."""
    global _remote
    if _remote is not None:
        _remote.close()
        _remote = None
    while _held:
        _held.pop().close()
    for known in (_cache, standard_input):
        known.cache_clear()
    for memory in (_urls, _pins, _presumptions, _refused, _said):
        memory.clear()


def path_of(url: Url) -> bytes:
    """Return the path of the shard at a URL. Parts of the URL that it does not show are kept for this process."""
    path = os.fsencode(url.shown)
    if url.query or url.user or url.is_program:
        _urls[path] = url
    return path


def url_of(path: bytes) -> Url:
    """Return the URL of a remote shard, with the secrets that this process knows.

    Raises SpecError; UnreadableShard for a command that only another process knows.
    """
    url = _urls.get(path)
    if url is None and is_output(path):
        raise _unknown(path)
    return url or parse(os.fsdecode(path))


@lru_cache(maxsize=1)
def standard_input() -> bytes:
    """Read the standard input into the cache once, and return its path as a shard. Raises ShardError.

    Its path contains the hash of the content, so that no other process has another shard with the same path.
    """
    from wdsfs.remote import spooled

    shown = "the standard input"
    with open(0, "rb", closefd=False) as file:
        spool = spooled.spool(_cache(), shown, file)
    with spool.file:
        if not spool.size:
            raise UnreadableShard(f"{shown} is empty; it has to be a shard")
        pin = spool.pin()
        url = Url(f"{PIPE}stdin-{spool.digest}", "stdin")
        spooled.keep(_cache(), url.shown, pin, spool).close()
    path = path_of(url)
    _keep(path, pin)
    return path


def _made(path: bytes) -> Pin | ShardError:
    """Return the pin of the output of a command that has been run, or why there is none."""
    return known_pin(path) or _pins.get(path) or _unknown(path)


def _unknown(path: bytes) -> UnreadableShard:
    return UnreadableShard(f"{os.fsdecode(path)}: only the process that was given its command can run it")


def stat(paths: Sequence[bytes]) -> list[Pin | ShardError]:
    """Ask the stores for the present pin of each shard; return it, or the error.

    If a store cannot be reached, the last known pin counts: cached objects are served offline, too.
    """
    to_ask = [path for path in paths if not is_output(path) or (path in _urls and not _pins.get(path))]
    answers = dict(zip(to_ask, _stat(to_ask), strict=True)) if to_ask else {}
    return [answers[path] if path in answers else _made(path) for path in paths]


def _stat(paths: Sequence[bytes]) -> list[Pin | ShardError]:
    outcomes: list[Pin | ShardError] = []
    for path, answer in zip(paths, remote().stat([url_of(path) for path in paths]), strict=True):
        if isinstance(answer, Unreachable) and (known := known_pin(path)) is not None:
            store, reason = url_of(path).store, str(answer).removeprefix(f"{os.fsdecode(path)}: ")
            _say(f"{store}: {reason}; its shards are read from the cache")
            answer = known
        elif isinstance(answer, Pin):
            _keep(path, answer)
        elif isinstance(answer, ShardError):
            _refused[path] = time.monotonic() + REFUSED_SECONDS, answer
            if isinstance(answer, MissingObject):
                _forget(path)
        else:
            raise answer
        outcomes.append(answer)
    return outcomes


def listed(prefix: Url, *, deep: bool) -> Listing:
    """Return the objects whose key starts with that of `prefix`; see `Stores.list`. Raises ShardError.

    Their pins are not noted, because most of them may not be shards.
    """
    return remote().list(prefix, deep=deep)


def keep(url: Url, pin: Pin) -> bytes:
    """Note the pin of an object that a listing shows; return its path."""
    path = path_of(url)
    _keep(path, pin)
    return path


def presume(source: str, presumption: Presumption) -> None:
    """Assume that remote shards are the objects of the list `source` until their stores are asked.

    The latest list of this name counts.
    """
    _presumptions[source] = presumption


def is_presumed(path: bytes) -> bool:
    """Return True for a remote shard of which this process knows only the row in a list."""
    return path not in _pins and any(path in known.rows for known in _presumptions.values())


def presumed(path: bytes) -> Pin | None:
    """Return the pin of a remote shard in the list that names it; None without such a list."""
    for known in _presumptions.values():
        if path in known.rows:
            return known.pin(known.rows[path])
    return None


def known() -> list[bytes]:
    """Return the paths of the objects whose pins this process knows."""
    return [path for path, pin in _pins.items() if pin is not None]


def look(path: bytes) -> Fingerprint:
    """Return the fingerprint of a shard now; of a remote one the last that its store told. Raises ShardError."""
    if not is_remote(path):
        return Fingerprint.at(path)
    return pin_of(path).fingerprint(os.fsdecode(path))


def pin_of(path: bytes) -> Pin:
    """Return the pin of a remote shard that its store told last. Raises ShardError."""
    known = known_pin(path)
    if known is not None:
        return known
    until, error = _refused.get(path, (0.0, None))
    if error is not None and time.monotonic() < until:
        raise type(error)(f"{error}")
    return _pin_now(path)


def look_again(path: bytes) -> Fingerprint:
    """Return the fingerprint as `look` does, but always ask the store of a remote shard. Raises ShardError."""
    if not is_remote(path):
        return Fingerprint.at(path)
    return _pin_now(path).fingerprint(os.fsdecode(path))


def open_shard(path: bytes) -> OpenShard:
    """Open a shard; `source.close` closes it. Raises ShardError."""
    if not is_remote(path):
        return source.open_shard(path)
    return open_object(path)


def open_object(path: bytes) -> RemoteTar:
    """Open a remote shard. Raises ShardError."""
    return remote().open(url_of(path), pin_of(path))


def note_order(shard: OpenShard, following: bytes) -> None:
    """Note the shard that follows an open one in the set: passes over remote shards continue there."""
    pin = None if isinstance(shard, int) or not is_remote(following) else known_pin(following)
    if pin is not None and not isinstance(shard, int):
        with contextlib.suppress(ShardError):  # whoever reads it meets the same
            shard.following = url_of(following), pin


def fingerprint_of(shard: OpenShard) -> Fingerprint:
    """Return the fingerprint of an open shard now. Raises OSError."""
    return Fingerprint.of(os.fstat(shard)) if isinstance(shard, int) else shard.fingerprint


def read_range(path: bytes, size: int, offset: int) -> tuple[bytes, Fingerprint]:
    """Read up to `size` bytes of a file or object at byte `offset`; return them with its fingerprint of before.

    Raises ShardError, OSError.
    """
    shard = open_shard(path)
    try:
        now = fingerprint_of(shard)
        return source.pread(shard, size, offset), now
    finally:
        source.close(shard)


def failure_of(shard: OpenShard) -> str:
    """Return how the command failed that has written an open shard; "" for all other shards."""
    return "" if isinstance(shard, int) else shard.failure


def fetch(path: bytes, progress: Callable[[int, int], None] = lambda here, size: None) -> Pin:
    """Bring a remote shard into the cache as a whole; return its pin.

    `progress` gets the number of bytes that are in the cache, and the size. If the shard is replaced meanwhile,
    the new object is fetched. Raises ShardError.
    """
    for _ in range(REPLACED_MAX):
        with contextlib.suppress(ObjectChanged):
            return _fetched(path, progress)
    return _fetched(path, progress)


class FetchResult(NamedTuple):
    """The outcome of fetching shards: bytes in all, bytes fetched now, bytes that were in the cache before.

    `failed` has the reasons, by path, for shards that were not fetched.
    """

    size: int
    fetched: int
    there: int
    failed: dict[bytes, ShardError]


def fetch_all(paths: Sequence[bytes], jobs: int, advance: Callable[[int], None]) -> FetchResult:
    """Bring remote shards into the cache, `jobs` at a time; `advance` gets the number of arriving bytes.

    The threads do not delay the end of the program when it is interrupted. Raises WdsfsError.
    """
    from concurrent.futures import as_completed

    from wdsfs.executors import DaemonThreads

    there: dict[bytes, int] = {}  # bytes that were in the cache at the start
    here: dict[bytes, int] = {}  # bytes that are in the cache

    def progress(path: bytes, size: int, _: int) -> None:
        there.setdefault(path, size)
        advance(size - here.get(path, 0))
        here[path] = size

    before, size, failed = _bytes_from_stores(), 0, dict[bytes, ShardError]()
    threads = DaemonThreads(min(jobs, len(paths)))
    fetching = {threads.submit(fetch, path, partial(progress, path)): path for path in paths}
    threads.shutdown()
    for done in as_completed(fetching):
        try:
            size += done.result().size
        except ShardError as error:
            failed[fetching[done]] = error
    # Of a fetcher that has died, nothing is known.
    return FetchResult(size, max(_bytes_from_stores() - before, 0), sum(there.values()), failed)


def _bytes_from_stores() -> int:
    """Return the bytes of content that stores have sent so far."""
    return sum(traffic["bytes"] for traffic in remote().stats()["stores"].values())


def fetch_counted(path: bytes) -> tuple[int, int]:
    """Fetch as `fetch`; return the size of the shard, and how many of its bytes were in the cache before."""
    there: list[int] = []
    pin = fetch(path, lambda here, _: there.append(here) if not there else None)
    return pin.size, there[0] if there else pin.size


def _fetched(path: bytes, progress: Callable[[int, int], None]) -> Pin:
    url, pin = url_of(path), pin_of(path)
    try:
        remote().fetch(url, pin, lambda here: progress(here, pin.size))
    except ObjectChanged:
        _pin_now(path)
        raise
    finally:
        remote().closed(url, pin)
    return pin


def existing(paths: Sequence[bytes]) -> dict[bytes, Pin]:
    """Ask the stores which of these objects are there. Raises ShardError, also if a store cannot be reached."""
    pins = {}
    for path, answer in zip(paths, remote().stat([url_of(path) for path in paths]), strict=True):
        if isinstance(answer, Pin):
            pins[path] = answer
            _keep(path, answer)
        elif not isinstance(answer, MissingObject):
            raise answer
    return pins


def upload(path: bytes, fd: int, replaces: Pin | None, goes_on: Callable[[], None]) -> Pin:
    """Put an open file of this process into a store; see `client.Remote.upload`.

    A file that replaces an object is also put into the cache, if there is room: mounts of the old one will read
    it.
    """
    pin = remote().upload(url_of(path), f"/proc/{os.getpid()}/fd/{fd}", replaces, goes_on)
    _keep(path, pin)
    if replaces is not None:
        with contextlib.suppress(OSError), contextlib.closing(_cache().open(os.fsdecode(path), pin)) as cached:
            at = 0
            while (piece := os.pread(fd, PIECE, at)) and cached.put(at, piece):
                at += len(piece)
    return pin


def copy(source: bytes, target: bytes, goes_on: Callable[[], None]) -> bool:
    """Let a store copy a shard to a place in the same bucket that has no object; see `client.Remote.copy`.

    Returns False if the store cannot or may not do that: then the shard has to be sent. Also if an object is
    there: sending compares it, as it may be the same if an answer was lost. Raises ShardError; ObjectChanged means
    that the source was replaced.
    """
    url, place = url_of(source), url_of(target)
    if url.store != place.store or url.scheme not in BUCKETS:
        return False
    try:
        _keep(target, remote().copy(url, pin_of(source), place, goes_on))
    except (NoRanges, MissingObject, DeniedObject, ObjectExists, Unreachable):
        return False
    return True


def staging() -> Path:
    """Make and return the directory for files that are sent to a store: that of the cache. Raises OSError."""
    directory = _cache().directory
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def _pin_now(path: bytes) -> Pin:
    answer = stat([path])[0]
    if isinstance(answer, Pin):
        return answer
    raise answer


def known_pin(path: bytes) -> Pin | None:
    """Return the last known pin of a remote shard, None if there is none; its store is not asked."""
    if path not in _pins and (pin := presumed(path)) is not None:
        _pins[path] = pin
    return _cache().pin_or(os.fsdecode(path), _pins.get(path))


def _keep(path: bytes, pin: Pin) -> None:
    if pin.is_weak or pin.is_spooled:
        _say(f"{url_of(path).store}: {_weakness(pin)}")
    _pins[path] = pin
    with contextlib.suppress(OSError):  # a full disk: this process still knows the pin
        _cache().keep_pin(os.fsdecode(path), pin)
    if is_output(path):
        with contextlib.suppress(OSError):  # without such locks the object stays as long as there is room
            _held.append(_cache().open(os.fsdecode(path), pin))
            _held[-1].hold()


def _forget(path: bytes) -> None:
    """Note that a store does not have an object any more: its bytes in the cache are not served."""
    _pins[path] = None
    with contextlib.suppress(OSError):
        _cache().drop_pin(os.fsdecode(path))


def _weakness(pin: Pin) -> str:
    """Return a warning about changes that an object without a strong ETag cannot show, and what is done then."""
    if not pin.is_spooled:
        return "gives no ETag for all requests: a change of a shard is seen only by its size or its time (seconds)"
    if pin.version:
        return "does not say how large its objects are: each shard is fetched as a whole"
    return (
        "gives neither ETag nor Last-Modified: each shard is fetched as a whole, and one that is replaced by "
        "another of the same size is read as it was, until `wdsfs cache --clear`"
    )


def _say(text: str) -> None:
    if text not in _said:
        _said.add(text)
        log.warning("%s", text)
