"""Remote shards by path, as the door asks for them: look, list, open, fetch, send and copy.

One object holds what a process and its forked children share: the connection to the fetcher, the secrets of the
URLs that were typed, and the pins that are known. All processes of a mount or a command have to agree on options,
so these are shared settings: `STORE_OPTIONS` (words as in a shell), `FETCH_MEMORY`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from wdsfs.door.pins import Listing, Pin
from wdsfs.door.remote_side import FetchResult, OpenObject, Presumption, RemoteSide
from wdsfs.door.urls import BUCKETS, PIPE, Url, is_output, parse
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
from wdsfs.remote import object_cache, settings, spooled
from wdsfs.remote.cached_object import CachedObject
from wdsfs.remote.client import MEMORY, FetcherClient, RemoteTar
from wdsfs.remote.object_cache import ObjectCache
from wdsfs.shared_settings import setting

REFUSED_SECONDS = 5.0  # how long the answer of a store that an object is missing or refused stays valid

log = logging.getLogger(__name__)

REPLACED_MAX = 3  # times that a shard is replaced while it is fetched
COPIED_BYTES = 8 << 20  # that are copied into the cache at a time


def remote_side() -> RemoteSide:
    """Return the remote shards of this process, for the door."""
    return RemoteShards()


class RemoteShards:
    """Remote shards by path; see `RemoteSide`."""

    def __init__(self) -> None:
        # The last known pins, by path: all of this process, also pins that the cache cannot keep.
        self._pins: dict[bytes, Pin | None] = {}
        self._presumptions: dict[str, Presumption] = {}  # by list: they count where nothing else is known
        self._refused: dict[bytes, tuple[float, ShardError]] = {}  # until when (monotonic), which error
        self._urls: dict[bytes, Url] = {}  # by path: URLs with parts that the path does not show
        self._link: FetcherClient | None = None
        self._stdin: bytes | None = None  # the path of the standard input, once it is read
        # Objects that cannot be fetched again: open and held until all processes have ended.
        self._held: list[CachedObject] = []
        self._warned: set[str] = set()

    # --- the fetcher

    @property
    def link(self) -> FetcherClient:
        """The connection to the fetcher. Raises UsageError for settings that cannot be used."""
        if self._link is None:
            self._link = self._connect(None, None)
        return self._link

    def attach(self, device: int, log_file: Path | None, first: bytes) -> FetcherClient:
        if self._link is not None:
            self._link.close()
        self._link = self._connect(device, log_file, self.url_of(first))
        return self._link

    def _connect(self, device: int | None, log_file: Path | None, first: Url | None = None) -> FetcherClient:
        sections = settings.load_settings(settings.arguments_of_environment()).sections
        memory = parse_size(setting("FETCH_MEMORY") or str(MEMORY))
        return FetcherClient(sections, self._cache, memory=memory, device=device, log=log_file, first=first)

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        while self._held:
            self._held.pop().close()

    @cached_property
    def _cache(self) -> ObjectCache:
        """The cache. It is opened late: options of the command may still say where it is."""
        return object_cache.cache()

    def cached_objects(self) -> ObjectCache:
        return object_cache.cache()

    def fetcher_state(self) -> dict[str, Any]:
        cache = self._cache
        report: dict[str, Any] = {"stores": {}, "fetcher": self.link.fetcher, "cache": str(cache.directory)}
        with contextlib.suppress(OSError):
            report["cache_bytes"], report["cache_limit"] = cache.room.state()
        with contextlib.suppress(Unreachable):
            report |= self.link.stats()
        return report

    # --- URLs

    def path_of(self, url: Url) -> bytes:
        path = os.fsencode(url.shown)
        if url.query or url.user or url.is_program:
            self._urls[path] = url
        return path

    def url_of(self, path: bytes) -> Url:
        url = self._urls.get(path)
        if url is None and is_output(path):
            raise _unknown_command(path)
        return url or parse(os.fsdecode(path))

    def standard_input(self) -> bytes:
        """See `RemoteSide`.

        The path contains the hash of the content, so that no other process has another shard with the same path.
        """
        if self._stdin is None:
            self._stdin = self._spool_standard_input()
        return self._stdin

    def _spool_standard_input(self) -> bytes:
        shown = "the standard input"
        with open(0, "rb", closefd=False) as file:
            spool = spooled.spool(self._cache, shown, file)
        with spool.file:
            if not spool.size:
                raise UnreadableShard(f"{shown} is empty, but it has to be a shard")
            pin = spool.pin()
            url = Url(f"{PIPE}stdin-{spool.digest}", "stdin")
            spooled.keep(self._cache, url.shown, pin, spool).close()
        return self.note_pin(url, pin)

    def store_arguments(self) -> list[str]:
        return settings.arguments_of_environment()

    def text_of_store_arguments(self, arguments: Sequence[str]) -> str:
        return settings.text_of_arguments(arguments)

    # --- pins

    def known_paths(self) -> list[bytes]:
        return [path for path, pin in self._pins.items() if pin is not None]

    def presume(self, source: str, presumption: Presumption) -> None:
        self._presumptions[source] = presumption

    def is_presumed(self, path: bytes) -> bool:
        return path not in self._pins and any(path in known.rows for known in self._presumptions.values())

    def presumed_pin(self, path: bytes) -> Pin | None:
        for known in self._presumptions.values():
            if path in known.rows:
                return known.pin(known.rows[path])
        return None

    def _known_pin(self, path: bytes) -> Pin | None:
        """Return the last known pin; None without one, or if the store has said that the object is gone."""
        if path not in self._pins and (pin := self.presumed_pin(path)) is not None:
            self._pins[path] = pin
        return self._cache.pin_of(os.fsdecode(path), self._pins.get(path))

    def _forget_pin(self, path: bytes) -> None:
        """Note that a store does not have an object any more: its bytes in the cache are not served."""
        self._pins[path] = None
        with contextlib.suppress(OSError):
            self._cache.drop_pin(os.fsdecode(path))

    def note_pin(self, url: Url, pin: Pin) -> bytes:
        path = self.path_of(url)
        self._note(path, pin)
        return path

    def pin_of(self, path: bytes) -> Pin:
        pin = self._known_pin(path)
        if pin is not None:
            return pin
        until, error = self._refused.get(path, (0.0, None))
        if error is not None and time.monotonic() < until:  # not asked for each use of the shard
            raise type(error)(f"{error}")
        return self.pin_now(path)

    def pin_now(self, path: bytes) -> Pin:
        answer = self.stat([path])[0]
        if isinstance(answer, Pin):
            return answer
        raise answer

    def stat(self, paths: Sequence[bytes]) -> list[Pin | ShardError]:
        to_ask = [path for path in paths if not is_output(path) or self._can_run(path)]
        answers = dict(zip(to_ask, self._ask(to_ask), strict=True)) if to_ask else {}
        return [answers[path] if path in answers else self._pin_of_output(path) for path in paths]

    def _can_run(self, path: bytes) -> bool:
        """Return True for a command that this process may still run: it has been given, and has no output yet."""
        return path in self._urls and not self._pins.get(path)

    def _pin_of_output(self, path: bytes) -> Pin | ShardError:
        """Return the pin of the output of a command that has been run, or why there is none."""
        return self._known_pin(path) or self._pins.get(path) or _unknown_command(path)

    def _ask(self, paths: Sequence[bytes]) -> list[Pin | ShardError]:
        """Ask the stores, and note their answers."""
        answers = self.link.stat([self.url_of(path) for path in paths])
        return [self._learn(path, answer) for path, answer in zip(paths, answers, strict=True)]

    def _learn(self, path: bytes, answer: Pin | Exception) -> Pin | ShardError:
        """Note the answer of a store; return the pin or ShardError that counts now. Raises other errors."""
        if isinstance(answer, Pin):
            self._note(path, answer)
        elif isinstance(answer, Unreachable) and (known := self._known_pin(path)) is not None:
            store, reason = self.url_of(path).store, str(answer).removeprefix(f"{os.fsdecode(path)}: ")
            self._warn(f"{store}: {reason}; reading its shards from the cache")
            return known
        elif isinstance(answer, ShardError):
            self._refused[path] = time.monotonic() + REFUSED_SECONDS, answer
            if isinstance(answer, MissingObject):
                self._forget_pin(path)
        else:
            raise answer
        return answer

    def _note(self, path: bytes, pin: Pin) -> None:
        if pin.is_weak or pin.is_spooled:
            self._warn(f"{self.url_of(path).store}: {_weakness(pin)}")
        self._pins[path] = pin
        with contextlib.suppress(OSError):  # a full disk: this process still knows the pin
            self._cache.keep_pin(os.fsdecode(path), pin)
        if is_output(path):
            with contextlib.suppress(OSError):  # without such locks the object stays as long as there is room
                self._held.append(self._cache.open(os.fsdecode(path), pin))
                self._held[-1].hold()

    def _warn(self, text: str) -> None:
        """Log a warning, once."""
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s", text)

    def existing_objects(self, paths: Sequence[bytes]) -> dict[bytes, Pin]:
        pins = {}
        for path, answer in zip(paths, self.link.stat([self.url_of(path) for path in paths]), strict=True):
            if isinstance(answer, Pin):
                pins[path] = answer
                self._note(path, answer)
            elif not isinstance(answer, MissingObject):
                raise answer
        return pins

    def list_objects(self, prefix: Url, *, deep: bool) -> Listing:
        return self.link.list(prefix, deep=deep)

    def describe_store(self, url: Url) -> dict[str, Any]:
        return self.link.describe(url)

    # --- bytes

    def open(self, path: bytes) -> RemoteTar:
        return self.link.open(self.url_of(path), self.pin_of(path))

    def note_order(self, shard: OpenObject, following: bytes) -> None:
        pin = self._known_pin(following)
        if pin is not None:
            with contextlib.suppress(ShardError):  # whoever reads it meets the same
                shard.following = self.url_of(following), pin

    def fetch(self, path: bytes, progress: Callable[[int], None]) -> Pin:
        """Bring a remote shard into the cache as a whole; return its pin.

        `progress` gets the number of bytes that are in the cache. If the shard is replaced meanwhile, the new
        object is fetched. Raises ShardError.
        """
        for _ in range(REPLACED_MAX):
            with contextlib.suppress(ObjectChanged):
                return self._fetch_object(path, progress)
        return self._fetch_object(path, progress)

    def _fetch_object(self, path: bytes, progress: Callable[[int], None]) -> Pin:
        """Fetch the object that is known at a path. Raises ObjectChanged; then another one is known."""
        url, pin = self.url_of(path), self.pin_of(path)
        try:
            self.link.fetch(url, pin, progress)
        except ObjectChanged:
            self.pin_now(path)
            raise
        finally:
            self.link.release(url, pin)
        return pin

    def fetch_counted(self, path: bytes) -> tuple[int, int]:
        here: list[int] = []
        pin = self.fetch(path, here.append)
        return pin.size, here[0] if here else pin.size

    def fetch_all(self, paths: Sequence[bytes], jobs: int, advance: Callable[[int], None]) -> FetchResult:
        from concurrent.futures import as_completed

        from wdsfs.daemon_threads import DaemonThreads

        there: dict[bytes, int] = {}  # bytes that were in the cache at the start
        here: dict[bytes, int] = {}  # bytes that are in the cache

        def progress(path: bytes, size: int) -> None:
            there.setdefault(path, size)
            advance(size - here.get(path, 0))
            here[path] = size

        before, size, failed = self._bytes_from_stores(), 0, dict[bytes, ShardError]()
        threads = DaemonThreads(min(jobs, len(paths)))
        fetching = {threads.submit(self.fetch, path, partial(progress, path)): path for path in paths}
        threads.shutdown()
        for done in as_completed(fetching):
            try:
                size += done.result().size
            except ShardError as error:
                failed[fetching[done]] = error
        # Of a fetcher that has died, nothing is known.
        return FetchResult(size, max(self._bytes_from_stores() - before, 0), sum(there.values()), failed)

    def _bytes_from_stores(self) -> int:
        """Return the bytes of content that stores have sent so far."""
        return sum(traffic["bytes"] for traffic in self.link.stats()["stores"].values())

    # --- sending

    def upload(self, path: bytes, fd: int, replaces: Pin | None, goes_on: Callable[[], None]) -> Pin:
        """See `RemoteSide`.

        A file that replaces an object is also put into the cache, if there is room: mounts of the old one will
        read it.
        """
        pin = self.link.upload(self.url_of(path), f"/proc/{os.getpid()}/fd/{fd}", replaces, goes_on)
        self._note(path, pin)
        if replaces is not None:
            with contextlib.suppress(OSError):
                self._put_into_cache(path, pin, fd)
        return pin

    def _put_into_cache(self, path: bytes, pin: Pin, fd: int) -> None:
        with contextlib.closing(self._cache.open(os.fsdecode(path), pin)) as cached:
            at = 0
            while (data := os.pread(fd, COPIED_BYTES, at)) and cached.put(at, data):
                at += len(data)

    def copy(self, source: bytes, target: bytes, goes_on: Callable[[], None]) -> bool:
        url, place = self.url_of(source), self.url_of(target)
        if url.store != place.store or url.scheme not in BUCKETS:
            return False
        try:
            self._note(target, self.link.copy(url, self.pin_of(source), place, goes_on))
        except (NoRanges, MissingObject, DeniedObject, ObjectExists, Unreachable):
            return False
        return True

    def staging_directory(self) -> Path:
        """See `RemoteSide`: the directory is that of the cache."""
        directory = self._cache.directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return directory


def _unknown_command(path: bytes) -> UnreadableShard:
    return UnreadableShard(f"{os.fsdecode(path)}: only the process that was given its command can run it")


def _weakness(pin: Pin) -> str:
    """Return a warning about changes that an object without a strong ETag cannot show, and how it is read then."""
    if not pin.is_spooled:
        return "gives no ETag for all requests: a change of a shard is seen only by its size or its time (seconds)"
    if pin.version:
        return "does not say how large its objects are: each shard is fetched as a whole"
    return (
        "gives neither ETag nor Last-Modified: each shard is fetched as a whole, and one that is replaced by "
        "another of the same size is read as it was, until `wdsfs cache --clear`"
    )
