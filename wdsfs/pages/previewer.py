"""Previews of files, for a page that shows them: found in a cache, or made; safe for hostile bytes."""

from __future__ import annotations

import importlib.util
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

from wdsfs.errors import UsageError
from wdsfs.extras import install_command
from wdsfs.pages import plain
from wdsfs.pages.kinds import DRAWN_VIDEO, HEAD, PLAYERS, PYAV, Content, content_of
from wdsfs.pages.pool import Limits, Pool, Undecoded, Work
from wdsfs.pages.preview import AUDIO, CARD, VIDEO, WHOLE, Detail, Picture, Preview, Source

WORKERS = 2  # processes that decode
CACHE_BYTES = 32 << 20  # of previews that are kept
NEEDED = ("PIL", "tinytag")  # libraries of the extra `view` that workers use
_PLAIN: dict[str, Callable[[bytes, int, Content, Detail], Preview]] = {
    "text": lambda data, size, content, detail: plain.text_preview(data, size, detail, content.extension),
    "label": lambda data, size, content, detail: plain.label_preview(data, size, detail),
    "hex": lambda data, size, content, detail: plain.hex_preview(data, size),
    "pdf": lambda data, size, content, detail: plain.pdf_preview(data, size),
}
_HEAD = 256 << 10  # first bytes that a worker gets at once; most members are smaller


def missing_libraries() -> list[str]:
    """The libraries of the extra `view` that previews need and that are not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def draws_videos() -> bool:
    """True if there are pictures of videos: the extra `video` is installed."""
    return importlib.util.find_spec(PYAV) is not None


class Previewer:
    """Makes previews, several at a time. Safe for threads. Workers are started when they are first needed.

    No content makes it raise: what cannot be shown gives a Preview with a `problem`. Raises UsageError where a
    library is missing that decoding needs.
    """

    def __init__(
        self, workers: int = WORKERS, limits: Limits | None = None, cache_bytes: int = CACHE_BYTES
    ) -> None:
        if missing_libraries():
            raise UsageError(f"previews need more libraries; type: {install_command('view')}")
        limits = limits or Limits()
        self._pool = Pool(workers, (), limits)
        self._for_parquet = Pool(1, ("pyarrow",), limits)
        self._for_videos = Pool(1, (PYAV,), limits)
        self._cache = _Cache(cache_bytes)

    def preview(self, name: str, source: Source, detail: Detail = WHOLE) -> Preview:
        """The preview of a file with this name or extension. Raises NoDecoder, and what `source.read` raises."""
        key = None if source.key is None else (source.key, name, source.size, detail)
        found = self._cache.get(key)
        if found is None:
            found = self._made(name, source, detail)
            self._cache.put(key, found)
        return found

    def thumbnail(self, name: str, source: Source, side: int = CARD.edge) -> Picture | None:
        """A picture with edges of at most `side` pixels; None if this file has none. Raises as `preview`."""
        pictures = self.preview(name, source, CARD._replace(edge=side)).pictures
        return pictures[0] if pictures else None

    def _made(self, name: str, source: Source, detail: Detail) -> Preview:
        head = _read(source, b"", HEAD)
        content = content_of(name, head)
        make = _PLAIN.get(content.decoder if source.size else "hex")
        if make is not None:
            return make(_read(source, head, plain.bytes_needed(detail)), source.size, content, detail)
        return self._decoded(name, source, content, head, detail)

    def _decoded(self, name: str, source: Source, content: Content, head: bytes, detail: Detail) -> Preview:
        pool, decoder = self._pool, content.decoder
        if decoder == "video" and draws_videos():
            pool, decoder = self._for_videos, DRAWN_VIDEO
        if decoder == "parquet":
            if importlib.util.find_spec("pyarrow") is None:
                note = f"To see it as a table, install pyarrow: {install_command('parquet')}"
                return plain.hex_preview(head, source.size, note)
            pool = self._for_parquet
        else:
            head = _read(source, head, _HEAD)
        known = content_of(name, b"").extension == content.extension
        work = Work(decoder, name if known else content.extension, source.size, head, source.read, detail)
        try:
            return pool.decode(work)
        except Undecoded as error:
            return _undecoded(content, head, source.size, str(error))

    @property
    def workers(self) -> list[int]:
        """The process numbers of the workers that there are now."""
        return [*self._pool.pids, *self._for_parquet.pids, *self._for_videos.pids]

    def close(self) -> None:
        """End the workers; previews that are being made are given up."""
        self._pool.close()
        self._for_parquet.close()
        self._for_videos.close()


def _read(source: Source, head: bytes, length: int) -> bytes:
    """The first bytes of a file, of which `head` are known."""
    length = min(length, source.size)
    return head + source.read(len(head), length - len(head)) if length > len(head) else head


def _undecoded(content: Content, head: bytes, size: int, problem: str) -> Preview:
    """What is shown of a file that could not be decoded: a browser may still play it."""
    player = PLAYERS.get(content.extension, "")
    if not player:
        return plain.hex_preview(head, size, problem)
    return Preview(AUDIO if player.startswith("audio/") else VIDEO, problem=problem, media_type=player)


class _Cache:
    """The previews that were used last, up to so many bytes."""

    def __init__(self, most: int) -> None:
        self._most, self._bytes = most, 0
        self._kept: OrderedDict[Hashable, Preview] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Preview | None:
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    def put(self, key: Hashable, preview: Preview) -> None:
        if key is None or preview.weight > self._most:
            return
        with self._lock:
            if key in self._kept:
                return
            self._kept[key] = preview
            self._bytes += preview.weight
            while self._bytes > self._most:
                _, dropped = self._kept.popitem(last=False)
                self._bytes -= dropped.weight
