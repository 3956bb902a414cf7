"""The work of the wing `remote` for the door: the interfaces of remote shards, and the data between them.

The rooms above use these names only. The classes that implement them are in the wing, which may be missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from wdsfs.door.pins import Listing, Pin
from wdsfs.door.urls import Url
from wdsfs.errors import ShardError
from wdsfs.shards import Fingerprint

if TYPE_CHECKING:
    from wdsfs.cache.cache_directory import CacheEntry


class Presumption(NamedTuple):
    """The objects in a list of shards: its rows by path, and the pin in a row."""

    rows: Mapping[bytes, int]
    pin: Callable[[int], Pin]


class FetchResult(NamedTuple):
    """The outcome of fetching shards: bytes in all, bytes fetched now, bytes that were in the cache before.

    `failed` has the reasons, by path, for shards that were not fetched.
    """

    size: int
    fetched: int
    there: int
    failed: dict[bytes, ShardError]


class CachedEntry(NamedTuple):
    """An object in the cache, as `wdsfs cache` shows it."""

    shown: str
    pin: Pin
    used: float  # seconds since the epoch
    bytes: int  # of the object that are here
    files: CacheEntry

    @property
    def complete(self) -> bool:
        return self.bytes == self.pin.size


class OpenObject(Protocol):
    """An open remote shard, a `source.TarReader`: all of its bytes are of the same object."""

    size: int
    counted_as: str  # the store as which its traffic is counted
    following: tuple[Url, Pin] | None  # the next object of the set, where passes continue

    @property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of the object, which never changes."""

    @property
    def failure(self) -> str:
        """Text that says how the command failed that wrote this shard; "" if it did not fail."""

    def pread(self, size: int, offset: int, /) -> bytes:
        """Return up to `size` bytes at byte `offset`; none only at the end. Raises ShardError."""

    def read_cached(self, size: int, offset: int) -> memoryview | None:
        """Return bytes from the cache, valid until the next call of this thread.

        None if some are missing, or the read would have to wait for a disk.
        """

    def is_cached(self, begin: int, end: int) -> bool:
        """Return True if a range is in the cache, from where `pread` brings it without the network."""

    def whole(self) -> int:
        """Return a file with all bytes of the object, open until `close`. Raises ShardError, OSError."""

    def will_need(self, begin: int, end: int, *, in_parallel: bool = True) -> None:
        """Announce that this range will be read soon. `in_parallel`: by several requests, if it is long."""

    def stream(self) -> None:
        """Announce that everything from here on will be read, in order."""

    def hand_over(self, unique: int, begin: int, end: int, spans: Sequence[tuple[int, int]] = ()) -> None:
        """Hand a READ of the kernel to the fetcher, which answers it and fetches the sample that it belongs to.

        Raises Unreachable.
        """

    def close(self) -> None:
        """Close the object. Can be repeated."""


class FetcherLink(Protocol):
    """The fetcher of a mount, for the process that keeps it running and for the workers that hand it requests."""

    @property
    def alarm_words(self) -> memoryview[int]:
        """Memory that the fetcher shares; the first word counts the objects that were found changed."""

    def ensure(self) -> None:
        """Start a fetcher unless there is one. Raises OSError."""

    def promise_restart(self) -> None:
        """Promise, before the first fork, that this process will call `ensure` when one of its children ends."""

    def interrupt(self, unique: int) -> None:
        """Tell the fetcher that the client of a request, which may have been handed over, no longer waits."""


class CachedObjects(Protocol):
    """The remote shards in the cache, for `wdsfs cache`. All methods raise OSError."""

    directory: Path

    def usage(self, prefix: str = "") -> Iterator[CachedEntry]:
        """Yield the objects whose URL begins with `prefix`, the longest unused one first."""

    def clear(self, prefix: str) -> list[CachedEntry]:
        """Remove the objects whose URL begins with `prefix`; return the removed ones."""

    def verify(self, prefix: str = "") -> Iterator[tuple[CachedEntry, int]]:
        """Compare the cached bytes with their checksums; yield each object, and its damaged bytes, now dropped."""


class RemoteSide(Protocol):
    """All remote shards of this process, by path: the connection to the fetcher, pins, and URLs with secrets."""

    # --- URLs and pins

    def path_of(self, url: Url) -> bytes:
        """Return the path of the shard at a URL.

        This process remembers the parts of the URL that the path does not show.
        """

    def url_of(self, path: bytes) -> Url:
        """Return the URL of a remote shard, with the secrets that this process knows.

        Raises SpecError; UnreadableShard for a command that only another process knows.
        """

    def standard_input(self) -> bytes:
        """Read the standard input into the cache once, and return its path as a shard. Raises ShardError."""

    def pin_of(self, path: bytes) -> Pin:
        """Return the pin of a remote shard that its store told last. Raises ShardError."""

    def pin_now(self, path: bytes) -> Pin:
        """Ask the store of a remote shard for its present pin. Raises ShardError."""

    def known_paths(self) -> list[bytes]:
        """Return the paths of the objects whose pins this process knows."""

    def note_pin(self, url: Url, pin: Pin) -> bytes:
        """Note the pin of an object that a listing shows; return its path."""

    def presume(self, source: str, presumption: Presumption) -> None:
        """Assume that remote shards are the objects of the list `source` until their stores are asked.

        The latest list of this name counts.
        """

    def is_presumed(self, path: bytes) -> bool:
        """Return True for a remote shard of which this process knows only the row in a list."""

    def presumed_pin(self, path: bytes) -> Pin | None:
        """Return the pin of a remote shard in the list that names it; None without such a list."""

    # --- stores

    def stat(self, paths: Sequence[bytes]) -> list[Pin | ShardError]:
        """Ask the stores for the present pin of each shard; return it, or the error.

        If a store cannot be reached, the last known pin counts: cached objects are served offline, too.
        """

    def list_objects(self, prefix: Url, *, deep: bool) -> Listing:
        """Return the objects whose key starts with that of `prefix`. Raises ShardError.

        Their pins are not noted, because most of them may not be shards.
        """

    def existing_objects(self, paths: Sequence[bytes]) -> dict[bytes, Pin]:
        """Ask the stores which of these objects are there.

        Raises ShardError, also if a store cannot be reached.
        """

    def describe_store(self, url: Url) -> dict[str, Any]:
        """Return a report about a store, for people. Raises ShardError."""

    def store_arguments(self) -> list[str]:
        """Return the arguments of `--store-option` in WDSFS_STORE_OPTIONS. Raises UsageError."""

    def text_of_store_arguments(self, arguments: Sequence[str]) -> str:
        """Return arguments of `--store-option` as WDSFS_STORE_OPTIONS has them. Raises UsageError."""

    # --- bytes

    def open(self, path: bytes) -> OpenObject:
        """Open a remote shard. Raises ShardError."""

    def note_order(self, shard: OpenObject, following: bytes) -> None:
        """Note the shard that follows an open one in the set: passes over remote shards continue there."""

    def fetch_all(self, paths: Sequence[bytes], jobs: int, advance: Callable[[int], None]) -> FetchResult:
        """Bring remote shards into the cache, `jobs` at a time; `advance` gets the number of arriving bytes.

        The threads do not delay the end of the program when it is interrupted. Raises WdsfsError.
        """

    def fetch_counted(self, path: bytes) -> tuple[int, int]:
        """Bring a shard into the cache; return its size, and how many of its bytes were there before.

        Raises ShardError.
        """

    def upload(self, path: bytes, fd: int, replaces: Pin | None, goes_on: Callable[[], None]) -> Pin:
        """Put an open file of this process into a store, in the place of the pinned object or of none.

        `goes_on` is called twice a second, and may raise an exception: that ends the upload, which leaves nothing.
        Raises ShardError, of which ObjectExists and ObjectChanged say that another object is there.
        """

    def copy(self, source: bytes, target: bytes, goes_on: Callable[[], None]) -> bool:
        """Let a store copy a shard to a place in the same bucket that has no object; `goes_on` as for `upload`.

        Returns False if the store cannot or may not do that: then the shard has to be sent. Also if an object is
        there: sending compares it, as it may be the same if an answer was lost. Raises ShardError; ObjectChanged
        means that the source was replaced.
        """

    def staging_directory(self) -> Path:
        """Make and return the directory for files that are sent to a store. Raises OSError."""

    # --- the cache and the fetcher

    def cached_objects(self) -> CachedObjects:
        """Return the objects in the cache. Raises UsageError, IndexUnusable."""

    def fetcher_state(self) -> dict[str, Any]:
        """Return the statistics of the fetcher (`OpenObjects.stats`), its pid, and how full the cache is.

        Facts that are not available at the moment are left out.
        """

    def attach(self, device: int, log_file: Path | None, first: bytes) -> FetcherLink:
        """Start a fetcher that also answers requests of the kernel: those at the descriptor `device`.

        It prepares for requests to the store of the shard `first`.

        REQUIRES: the processes of a mount are not forked yet, and no shard is open. Raises UsageError.
        """

    def close(self) -> None:
        """End the connection to the fetcher. No object may be in use any more."""
