"""Requests to stores: heads, lists, ranges, uploads and copies, each answer checked against the pin.

It uses asyncio, and threads for short ranges. Only the fetcher may import this: a child of a process that has used
obstore hangs, and one in ten that has used its asyncio aborts when it ends (0.12.1), so it ends by `os._exit`.

What a store does, and what the caller of `get` gets:

=====================================  =======================================================================
the object was replaced                ObjectChanged (ESTALE): by If-Match (412), else by the answer's ETag
the object is gone (404, 410)          `head`: MissingObject; `get`: ObjectChanged
it has become shorter (416)            ObjectChanged
it has no ETag, or a weak one          pinned by size and Last-Modified (`Pin.is_weak`: callers warn)
its ETags come and go (web servers)    likewise (`etags.py`)
it has neither ETag nor Last-Modified  `Pin.is_blind`: one whole answer is kept (`spooled.py`)
it has no length, and Range is ignored `Pin.has_no_length`: likewise (web servers)
If-Match is refused wrongly (web)      no condition is sent any more; as where it is ignored
If-Match is ignored                    nothing else: every answer is compared with the pin before its body is read
an answer has nothing to compare       ObjectChanged
Range is ignored (200 for 206)         NoRanges: `get_all` reads such an object, from its first byte
Content-Range is nonsense              asked again, in all 3 times; then Unreachable (EIO)
a wider or narrower range, in chunks   taken, by `web_fallback.py` (web servers only), and by it alone for a minute
a certificate of an authority          likewise, if `certificates` names it; from buckets Unreachable
Content-Range has another size         ObjectChanged
the body is cut, or too short          asked again, for the rest of a long range
redirects                              followed, Authorization only to the same host, never from https to http
redirects without a place (S3)         Unreachable: the region is wrong
a signed URL has expired               DeniedObject (EACCES), with the time at which it has
401, 403                               DeniedObject, after another look for credentials, at most once a minute
429, 503                               asked again after Retry-After or a while; half as many requests at once
... with a longer Retry-After          Unreachable at once, for that object, which is asked for again after 5 s
an answer slower than `lowest_rate`    counts as none, by `settings.Pace`
408, 425, 500, 502, 504, broken,       asked again after a while (full jitter)
no connection, no answer (`timeout`)
... for longer than `total_time`       Unreachable
other answers                          Unreachable at once
=====================================  =======================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import mmap
import os
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import obstore
from obstore import exceptions
from obstore.store import ObjectStore

from wdsfs.door import urls
from wdsfs.door.pins import Listing, Pin
from wdsfs.door.urls import WEB, Url
from wdsfs.errors import (
    DeniedObject,
    MissingObject,
    NoRanges,
    ObjectChanged,
    ObjectExists,
    ShardError,
    Unreachable,
    UnreadableShard,
)
from wdsfs.remote import answers, listing_pages, multipart, settings, store_clients
from wdsfs.remote.answers import (
    ConditionFailed,
    OddName,
    OtherAnswer,
    OtherServer,
    Transfer,
    require_same,
    require_size,
)
from wdsfs.remote.etags import ETags
from wdsfs.remote.hub import Hub
from wdsfs.remote.multipart import Upload
from wdsfs.remote.object_cache import ObjectCache
from wdsfs.remote.parts import Buffer, Take, Threads
from wdsfs.remote.retries import Clock, Counters, Limit, Patience, Traffic, Transient, again, blocking
from wdsfs.remote.settings import Pace, Settings
from wdsfs.remote.spooled import SpooledObjects
from wdsfs.remote.web_fallback import WebFallback

if TYPE_CHECKING:  # obstore has these for checkers only
    from obstore import GetOptions, GetResult, PutMode

Result = TypeVar("Result")

# That are kept. Each takes 5 ms to make, and 0.1 MB. Signed URLs need one each, with connections of its own.
CLIENTS = 256
ROUTES = 4096  # that are remembered, one for each object
REQUESTS = 128  # at once to a store, at most
THREADS = 32  # for short ranges: their requests cost a third of those by asyncio, which the other ones go by
QUICK = (
    16e6  # bytes a second; a range that comes faster is taken as a whole: each piece is a copy, and wakes threads
)
PIECE = 256 << 10  # that is taken at a time, at least (bytes); of a long range more
PIECES = 8  # that a long range comes in
_PROGRESS = 16 << 20  # bytes that a whole body that is asked for again has to go further
REFUSED = 2  # attempts to learn what is there, if connections are refused
DOWN_SECONDS = 5.0  # how long a store that does not answer is not asked again
_RENEW = 60.0  # seconds until a client whose requests are refused is made again
_FRUITLESS = 3  # times in a row that it may not
ASKED_AGAIN = 8  # requests that check the word of a web server that an object was replaced
READ_BACK, READ_BACK_AT_ONCE = 8 << 20, 4  # bytes of what was sent that are read back at a time; pieces at once
LISTED = 512 << 10  # bytes of a page of a listing, at most
PAGES_PATIENCE = 4  # times `total_time`: the limit for a listing whose pages come in one call
ABORT_SECONDS = 5.0  # how long the end of the process waits for uploads that are being aborted


class _Route(NamedTuple):
    """Options, place and limits of requests for a URL; made once, because that takes as long as a request."""

    options: dict[str, str]
    place: tuple[object, ...]  # that has a client of its own
    path: str  # in that place
    pace: Pace
    patience: Patience
    limit: Limit
    traffic: Traffic


class Stores:
    """All stores, as one process talks to them."""

    def __init__(
        self,
        chosen: Settings,
        counters: Counters,
        clock: Clock | None = None,
        cache: ObjectCache | None = None,
    ) -> None:
        self._settings = chosen
        self._cache = cache
        self._spooled = SpooledObjects(cache)
        self._uploads: set[asyncio.Task[Any]] = set()  # in parts
        self._counters = counters
        self._clock = clock or Clock()
        self._clients: OrderedDict[tuple[object, ...], tuple[ObjectStore, float]] = OrderedDict()
        self._making = asyncio.Lock()
        self._limits: dict[str, Limit] = {}
        # By store: until when it is not asked, and why. By object: until when its store asks to wait.
        self._down: dict[str, tuple[float, str]] = {}
        self._pauses: OrderedDict[Url, tuple[float, str]] = OrderedDict()
        self._etags = ETags()
        self._fallback = WebFallback(self._clock, self._etags)
        self._threads = Threads(THREADS)
        self._route = lru_cache(ROUTES)(self._new_route)
        self._hub = Hub(self._clock, time.time)

    # --- what is there

    async def head(self, url: Url) -> Pin:
        """Return the pin of the object that is at a URL now; a command is run to get it. Raises ShardError."""
        if url.is_program:
            return await self._spooled.output(url)
        if url.scheme == "hf":
            return await self._look(url, lambda: self._hub.head(url, self._options(url)))
        if url.scheme not in WEB:
            return await self._look(url, lambda: self._head(url))
        pin = self._trusted(url, await self._look(url, lambda: self._head_of_web(url)))
        return await self._spooled.pin(url, pin, partial(self.get_all, url)) if pin.is_blind else pin

    def _trusted(self, url: Url, now: Pin) -> Pin:
        """Return the pin in an answer, as far as it can be relied on.

        Semantics decision: an object that was pinned without an ETag stays so until its size or time changes: an
        earlier process has noticed that its server has several.
        """
        known = None if self._cache is None else self._cache.pin_of(url.shown)
        if now.etag and now.mtime_ns and known is not None and known[0] == now._replace(etag=""):
            self._etags.note_machines(url)
        self._etags.note(url, now)
        return self._etags.trusted(url, now)

    async def _head(self, url: Url) -> Pin:
        client, path = await self._client(url)
        return answers.pin_of(await self._answer_of(url, obstore.head_async(client, path)))

    async def _head_of_web(self, url: Url) -> Pin:
        """Ask by HEAD, or if that is refused, take the head of an answer to GET: a signature is for one method."""
        if not urls.is_signed(url):
            try:
                return await self._head(url)
            except (DeniedObject, Unreachable, OtherAnswer):
                pass
        try:
            return await self._head_by_get(url)
        except OtherAnswer:
            return await self._fallback.head(url, self._options(url))

    async def _head_by_get(self, url: Url) -> Pin:
        client, path = await self._client(url)
        try:
            answer = await self._answer_of(url, obstore.get_async(client, path, options={"range": (0, 1)}))
        except (NoRanges, ObjectChanged):  # whole objects only, or not even one byte
            answer = await self._answer_of(url, obstore.get_async(client, path))
        return answers.pin_of(answer.meta)

    async def list(self, prefix: Url, *, deep: bool) -> Listing:
        """Return the objects whose key starts with that of `prefix`, by key. Raises ShardError.

        Unless `deep`, only those in the directory of the prefix, and its folders: one request for 1,000 of both,
        however much lies below.
        """
        if prefix.scheme in WEB:
            raise Unreachable(f"{prefix}: a web server does not list: write out the names, with braces")
        if prefix.scheme == "hf":
            return await self._look(prefix, lambda: self._hub.list(prefix, self._options(prefix), deep=deep))
        client, _ = await self._client(prefix)
        by_obstore = self._list_deep if deep else self._list_directory
        try:
            return await self._look(prefix, lambda: by_obstore(prefix, client))
        except OddName as error:  # some key below it, perhaps of no shard
            if prefix.scheme not in listing_pages.SCHEMES:
                raise Unreachable(f"{prefix}: {error}") from None
        return await self._list_by_pages(prefix, deep)

    async def _list_deep(self, prefix: Url, client: ObjectStore) -> Listing:
        objects = []
        listing = obstore.list(client, _directory(prefix) or None, chunk_size=1000)
        while (some := await self._answer_of(prefix, _next(listing), LISTED)) is not None:
            objects += some
        return _listing(prefix, objects, [])

    async def _list_directory(self, prefix: Url, client: ObjectStore) -> Listing:
        request = obstore.list_with_delimiter_async(client, _directory(prefix) or None)
        # One call for all pages: it returns nothing before the last one has come.
        answer = await self._answer_of(prefix, request, seconds=PAGES_PATIENCE * self._route(prefix).pace.total)
        return _listing(prefix, answer["objects"], [f"{path}/" for path in answer["common_prefixes"]])

    async def _list_by_pages(self, prefix: Url, deep: bool) -> Listing:
        options, seconds = self._options(prefix), self._route(prefix).pace.seconds(LISTED)
        objects, folders, token = list[Any](), list[str](), ""
        while True:
            ask = partial(listing_pages.page, prefix, options, seconds, token, deep=deep)
            page = await self._look(prefix, lambda ask=ask: blocking(ask, seconds))  # type: ignore[misc]
            objects += page.objects
            folders += page.folders
            if not page.following or page.following == token:
                return _listing(prefix, objects, folders)
            token = page.following

    # --- what is in it

    async def fetch(self, url: Url, pin: Pin, begin: int, end: int, take: Take) -> None:
        """Pass bytes `begin` to `end` (not included) of the pinned object to `take` as they come.

        Raises ShardError.
        """
        if url.is_program or pin.is_spooled:
            take(begin, await self._spooled.read(url, pin, begin, end, partial(self.get_all, url)))
        elif begin < end:
            transfer = Transfer(url, pin, begin, end, take)
            await self._unless_misled(url, pin, lambda: self._rest_of(transfer))

    async def _unless_misled(self, url: Url, pin: Pin, attempt: Callable[[], Awaitable[Result]]) -> Result:
        """Repeat a request for the pinned object as `_again`; once more if its condition was refused wrongly."""
        try:
            return await self._again(url, attempt)
        except ObjectChanged as error:
            is_there = url.scheme in WEB and await self._is_there(url, pin)
            if not (is_there and isinstance(error, ConditionFailed) and self._etags.note_refusal(url)):
                raise
        return await self._again(url, attempt)

    async def _is_there(self, url: Url, pin: Pin) -> bool:
        """Ask for an object some more times; return True if it is the pinned one each time.

        If its ETags alternate meanwhile, `head` returns a pin without an ETag from then on, which callers notice.
        """
        is_same = True
        for _ in range(ASKED_AGAIN):
            if self._etags.are_of_machines(url):
                return False
            try:
                now = await self._look(url, lambda: self._head_by_others(url))
            except ShardError:  # it is gone
                return False
            if (now.size, now.mtime_ns) != (pin.size, pin.mtime_ns):
                return False
            self._etags.note(url, pin, is_now=False)
            self._etags.note(url, now)
            is_same = is_same and now.etag == pin.etag
        return is_same

    async def _head_by_others(self, url: Url) -> Pin:
        """Ask for an object by a new connection, which may lead to another machine."""
        try:
            return await self._fallback.head(url, self._options(url))
        except (ShardError, Transient):  # for example a redirect, which is not followed there
            return await self._head_by_get(url)

    def latency(self, url: Url) -> float:
        """Return the seconds in which a store begins to answer, 0 before its first answer."""
        return self._route(url).limit.latency

    async def get(self, url: Url, pin: Pin, begin: int, end: int) -> bytes:
        """Return the same bytes. Raises ShardError."""
        pieces: list[Buffer] = []
        await self.fetch(url, pin, begin, end, lambda _, data: pieces.append(data))
        return b"".join(pieces)

    async def _rest_of(self, transfer: Transfer) -> None:
        """Make one request for the missing rest of a range."""
        url, before = transfer.url, transfer.at
        try:
            if self._fallback.is_due(url):
                await self._fallback.fetch(transfer, self._options(url))
            else:
                await self._by_obstore(transfer)
            transfer.check()
        except OtherAnswer as error:
            if url.scheme not in WEB:
                raise
            if isinstance(error, OtherServer):
                self._fallback.ask_from_now(url)
            self._route(url).traffic.retries += 1
            await self._fallback.fetch(transfer, self._options(url))
        finally:
            self._route(url).traffic.bytes += transfer.at - before

    async def _by_obstore(self, transfer: Transfer) -> None:
        url, size = transfer.url, transfer.end - transfer.at
        if transfer.is_short and url.scheme != "hf" and self._threads.is_free:
            await self._by_thread(transfer, size)
            return
        limit, since = self._route(url).limit, self._clock.now()
        answer = await self._opened(url, transfer.pin, {"range": (transfer.at, transfer.end)})
        limit.answered(self._clock.now() - since)
        if transfer.is_short:
            transfer.add(await self._answer_of(url, answer.bytes_async(), size))
            return
        since, is_quick = self._clock.now(), False
        try:
            if limit.is_quick:
                transfer.add(await self._answer_of(url, answer.bytes_async(), size))
            else:
                least = max(PIECE, size // PIECES)
                pieces = answer.stream(min_chunk_size=least)
                while (piece := await self._answer_of(url, _next(pieces), least)) is not None:
                    transfer.add(piece)
            is_quick = size > QUICK * (self._clock.now() - since)
        finally:
            limit.is_quick = is_quick  # after a break in pieces: only the rest has to be requested again

    async def _by_thread(self, transfer: Transfer, size: int) -> None:
        """Take a short range as a whole, in a thread."""
        url, pin = transfer.url, transfer.pin
        client, path = await self._client(url)
        options = self._conditional(url, pin, {"range": (transfer.at, transfer.end)})
        limit, since = self._route(url).limit, self._clock.now()

        def fetch() -> Any:
            answer = obstore.get(client, path, options=options)
            limit.answered(self._clock.now() - since)
            self._etags.require_same(url, pin, answers.pin_of(answer.meta))
            return answer.bytes()

        try:
            transfer.add(await self._answer_of(url, self._threads.call(fetch), size))
        except MissingObject:
            raise ObjectChanged(f"{url}: it is gone") from None

    async def get_all(self, url: Url, pin: Pin) -> AsyncIterator[memoryview]:
        """Yield the pinned object from its first byte on, for servers that ignore Range. Raises ShardError.

        After a cut answer the object is requested again from its start, as long as each answer has more bytes. An
        object without a known length is the body of one answer.
        """
        if pin.has_no_length:
            async for piece in self._fallback.whole(url, self._options(url)):
                self._counters.of(url.store).bytes += len(piece)
                yield memoryview(piece)
            return
        done, fruitless, broken = 0, 0, ""
        while done < pin.size:
            if fruitless > _FRUITLESS:
                raise Unreachable(f"{url}: {broken}, again and again before byte {done + 1:,} of {pin.size:,}")
            start, at = done, 0
            answer = await self._unless_misled(url, pin, lambda: self._opened(url, pin, {}))
            pieces = answer.stream(min_chunk_size=PIECE)
            try:
                while (piece := await self._answer_of(url, _next(pieces), PIECE)) is not None:
                    new = memoryview(piece)[max(done - at, 0) :]
                    at += len(piece)
                    done += len(new)
                    self._counters.of(url.store).bytes += len(piece)
                    if new:
                        yield new
                broken = "its server sends less than it says"
                if pin.is_blind and done < pin.size:
                    raise Transient(broken)
            except Transient as error:
                broken = str(error)
                if pin.is_blind:  # another answer may be of another object
                    raise Unreachable(f"{url}: {broken}, after {done:,} of {pin.size:,} bytes") from None
                self._counters.of(url.store).retries += 1
            fruitless = fruitless + 1 if done - start < _PROGRESS else 0

    async def _opened(self, url: Url, pin: Pin, options: GetOptions) -> GetResult:
        """Return the answer to a conditional request, its head checked. Raises ShardError, Transient."""
        if url.scheme == "hf":
            return await self._opened_at_hub(url, pin, options)
        client, path = await self._client(url)
        options = self._conditional(url, pin, options)
        try:
            answer = await self._answer_of(url, obstore.get_async(client, path, options=options))
        except MissingObject:
            raise ObjectChanged(f"{url}: it is gone") from None
        self._etags.require_same(url, pin, answers.pin_of(answer.meta))
        return answer

    def _conditional(self, url: Url, pin: Pin, options: GetOptions) -> GetOptions:
        """Return the options of a request that a store answers only for the pinned object."""
        condition = self._etags.condition(url, pin)
        if "If-Match" in condition:
            options["if_match"] = condition["If-Match"]
        elif condition:
            options["if_unmodified_since"] = datetime.fromtimestamp(pin.mtime_ns // 10**9, UTC)
        return options

    async def _opened_at_hub(self, url: Url, pin: Pin, options: GetOptions) -> GetResult:
        """Open a file of a commit, which never changes: only its size is compared, for another server sends it."""
        known = self._hub.knows(url, pin)
        place, headers = await self._hub.location(url, pin, self._options(url))
        client = await self._client_at(
            url, (place,), lambda: store_clients.web_store(place, self._options(url), headers)
        )
        try:
            answer = await self._answer_of(url, obstore.get_async(client, "", options=options))
        except (DeniedObject, MissingObject):
            self._hub.forget(url, pin)
            if not known:
                raise
            # It was signed for a while only.
            raise Transient("the hub has withdrawn a place for downloads") from None
        require_size(url, pin.size, answer.meta["size"])
        return answer

    # --- into it
    #
    # Each object is sent by one conditional PUT, from a mapping of its file, so that it takes no memory. Several
    # objects at a time use the line as well as several parts of one, and an upload that breaks leaves nothing.
    # What is too large for one request goes in parts (`multipart.py`), which one conditional request joins.
    #
    # S3 compares what arrives with the SHA-256 in the signature of the request. Afterwards the ETag is compared
    # with the MD5 of the file (0.4 GB/s), or that of its parts, which it is in S3 (but for SSE-KMS and SSE-C) and
    # in Google's store. Where it differs, as always in Azure, the object is read back: the only proof there.

    async def upload(self, url: Url, file: str, replaces: Pin | None) -> Pin:
        """Put a file into a store, in the place of the pinned object or of none; return the pin of the new one.

        An object with the same content counts as this one: an answer may have been lost. Raises ShardError, of
        which ObjectExists and ObjectChanged say that another object is there; OSError of the file.
        """
        content = _mapped(file)
        size = multipart.part_size(url, len(content), self._options(url))
        digest = await asyncio.to_thread(multipart.digest, memoryview(content), size)
        seconds, etag = self._sending(url, len(content)), ""
        try:
            if size is None:
                etag = await self._again(url, lambda: self._put(url, content, replaces, seconds), seconds)
            else:
                etag = await self._put_parts(url, memoryview(content), size, replaces)
        except (ObjectExists, ObjectChanged) as error:
            refusal = error
        try:
            pin = await self.head(url)
        except MissingObject:
            if not etag:
                raise refusal from None
            raise ObjectChanged(f"{url}: another program has removed it right after it was written") from None
        if etag and pin.etag != etag:
            raise ObjectChanged(f"{url}: another program has replaced it right after it was written")
        if pin.size == len(content) and (pin.etag == digest or await self._has(url, pin, content)):
            return pin
        if not etag:
            raise refusal
        raise UnreadableShard(
            f"{url}: the store has other bytes than were sent; remove it, and repeat the command"
        )

    async def _put(self, url: Url, content: mmap.mmap, replaces: Pin | None, seconds: float) -> str:
        """Make one attempt at that; return the ETag. Its answer may be lost."""
        client, path = await self._client(url, seconds)
        mode: PutMode = "create"
        if replaces is not None:
            meta = await self._answer_of(url, obstore.head_async(client, path))
            require_same(url, replaces, answers.pin_of(meta))
            mode = {"e_tag": meta["e_tag"]}
            if meta["version"]:  # by which Google's store knows it
                mode["version"] = meta["version"]
        sent = obstore.put_async(client, path, content, mode=mode, use_multipart=False)
        return answers.etag_of(await self._answer_of(url, sent, seconds=seconds))

    async def _put_parts(self, url: Url, content: memoryview, size: int, replaces: Pin | None) -> str:
        """Send an object in parts of `size` bytes, as `_put`; return its ETag.

        After a failure nothing is left in the store. After a kill the next upload to this URL aborts this one.
        """
        options, seconds = self._options(url), self._sending(url, size)
        condition = {"If-None-Match": "*"}
        if replaces is not None:
            now = await self.head(url)
            require_same(url, replaces, now)
            condition = {"If-Match": now.etag}
        await self._abort(url, None if self._cache is None else self._cache.upload_to(url.shown))
        upload = await self._again(url, lambda: Upload.begin(url, options))
        task = asyncio.current_task()
        assert task is not None
        self._uploads.add(task)
        try:
            self._note_upload(url, upload.id)
            etags = await self._parts(upload, content, size, seconds)
            joining = self._sending(url, len(content))
            etag = await self._again(url, lambda: upload.join(etags, condition, joining), joining)
        except BaseException:
            await self._abort(url, upload.id)
            raise
        finally:
            self._uploads.discard(task)
        self._note_upload(url, None)
        return etag

    async def _parts(self, upload: Upload, content: memoryview, size: int, seconds: float) -> Sequence[str]:
        """Send all parts, a few at a time; return their ETags."""
        slots = asyncio.Semaphore(multipart.AT_ONCE)

        async def send(number: int) -> str:
            piece = content[number * size : (number + 1) * size]
            async with slots:
                sending = partial(upload.put, number, piece, seconds)
                return await self._again(
                    upload.url, lambda: self._answer_of(upload.url, sending(), seconds=seconds), seconds
                )

        tasks: list[asyncio.Task[str]] = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks += [group.create_task(send(number)) for number in range(-(-len(content) // size))]
        except ExceptionGroup as error:
            raise error.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _abort(self, url: Url, upload: str | None) -> None:
        """Tell the store to drop the parts of an upload, if there is one. If it does not, a note stays."""
        if upload is not None:
            with contextlib.suppress(ShardError):
                await self._again(url, Upload(url, self._options(url), upload).abort)
                self._note_upload(url, None)

    def _note_upload(self, url: Url, upload: str | None) -> None:
        if self._cache is not None:
            with contextlib.suppress(OSError):
                self._cache.keep_upload(url.shown, upload)

    async def _has(self, url: Url, pin: Pin, content: mmap.mmap) -> bool:
        """Read an object back; return True if it has this content."""

        async def has_piece(start: int) -> bool:
            end = min(start + READ_BACK, pin.size)
            with memoryview(content) as view, view[start:end] as piece:
                return await self.get(url, pin, start, end) == piece

        for begin in range(0, pin.size, READ_BACK * READ_BACK_AT_ONCE):
            starts = range(begin, min(begin + READ_BACK * READ_BACK_AT_ONCE, pin.size), READ_BACK)
            if not all(await asyncio.gather(*map(has_piece, starts))):
                return False
        return True

    async def copy(self, url: Url, pin: Pin, target: Url) -> Pin:
        """Copy the pinned object, by its store, to a place in its bucket where there is none; return the new pin.

        The copy has no condition on its source, so that is compared before and after. Raises ShardError:
        ObjectExists; NoRanges if the store does not do that.
        """
        if url.scheme in ("s3", "ais") and pin.size > multipart.WHOLE_MAX:
            raise NoRanges(f"{url}: is too large for its store to copy at once")
        require_same(url, pin, await self.head(url))
        seconds = self._sending(target, pin.size)

        async def attempt() -> None:
            client, _ = await self._client(target, seconds)
            copied = obstore.copy_async(client, url.key, target.key, overwrite=False)
            await self._answer_of(target, copied, seconds=seconds)

        await self._again(target, attempt, seconds)
        try:
            require_same(url, pin, await self.head(url))
            copied = await self.head(target)
            require_size(target, pin.size, copied.size)
        except (ObjectChanged, MissingObject) as error:
            text = f"{target} may be a copy of another object ({error}): remove it, and repeat the command"
            raise UnreadableShard(text) from None
        return copied

    def _sending(self, url: Url, size: int) -> float:
        """Return the seconds that a request may take whose answer comes after `size` bytes are sent or copied."""
        pace = settings.pace(self._options(url), settings.LOWEST_RATE_OF_UPLOADS)
        # Few timeouts, as each needs a client of its own.
        return pace.silence + 2.0 ** math.ceil(math.log2(1 + size / pace.rate))

    async def end(self) -> None:
        """End the commands that still run, and abort uploads in parts."""
        self._spooled.end()
        for task in self._uploads:
            if not task.cancelling():
                task.cancel()
        if self._uploads:
            await asyncio.wait(self._uploads, timeout=ABORT_SECONDS)

    # --- for `doctor`

    async def describe(self, url: Url) -> dict[str, Any]:
        """Return a report about a URL: reachable, credentials (their kind), ranges, conditions.

        None: not known.
        """
        report: dict[str, Any] = dict.fromkeys(("reachable", "credentials", "ranges", "conditions", "error"))
        if url.is_program:
            return {"error": f"{url}: is a program"}
        try:
            report["credentials"] = store_clients.access(url, self._options(url)).kind
            if not url.key or url.key.endswith("/"):
                below = await self.list(url, deep=False)
                report["objects"] = len(below.objects) + len(below.folders)
            else:
                pin = await self.head(url)
                report.update(size=pin.size, pinned=not pin.is_weak, reachable=True)
                report["ranges"] = await self._has_ranges(url, pin)
                report["conditions"] = await self._has_conditions(url)
            report["reachable"] = True
        except ShardError as error:
            report["error"] = str(error)
            report["reachable"] = bool(report["reachable"])
        return report

    async def _has_ranges(self, url: Url, pin: Pin) -> bool:
        with contextlib.suppress(NoRanges):
            await self.get(url, pin, 0, min(pin.size, 1))
            return True
        return False

    async def _has_conditions(self, url: Url) -> bool | None:
        """Return True if the store refuses a condition that cannot hold; None for the hub, which has commits."""
        if url.scheme == "hf":
            return None
        client, path = await self._client(url)
        options: GetOptions = {"if_match": '"no-such"'}
        with contextlib.suppress(ObjectChanged):
            await self._again(url, lambda: self._answer_of(url, obstore.get_async(client, path, options=options)))
            return False
        return True

    # --- asking

    def _new_route(self, url: Url) -> _Route:
        options = self._settings.options(url)
        location, path = store_clients.place(url)
        place = location, url.user, *sorted(options.items())
        pace = settings.pace(options)
        if url.store not in self._limits:
            self._limits[url.store] = Limit(int(float(options.get("requests", REQUESTS))), self._clock)
        limit, traffic = self._limits[url.store], self._counters.of(url.store)
        return _Route(options, place, path, pace, Patience(pace.total), limit, traffic)

    def _options(self, url: Url) -> dict[str, str]:
        return self._route(url).options

    async def _client(self, url: Url, seconds: float = 0) -> tuple[ObjectStore, str]:
        """Return a client for this URL, and the path of the object in it. Raises Unreachable.

        With `seconds`, one for requests that may take so long.
        """
        route = self._route(url)
        options, key = route.options, route.place
        if seconds:
            options = {**options, "timeout": str(seconds), "total_time": str(seconds)}
            key = seconds, *key
        return await self._client_at(url, key, lambda: store_clients.make(url, options)), route.path

    async def _client_at(self, url: Url, key: tuple[object, ...], make: Callable[[], ObjectStore]) -> ObjectStore:
        client = self._clients.get(key)
        if client is None:
            async with self._making:  # of many requests for a new place, one makes the client
                client = self._clients.get(key) or (await self._made(url, make), self._clock.now())
                self._clients[key] = client
            while len(self._clients) > CLIENTS:
                self._clients.popitem(last=False)
        else:
            self._clients.move_to_end(key)
        return client[0]

    async def _made(self, url: Url, make: Callable[[], ObjectStore]) -> ObjectStore:
        try:
            return await asyncio.to_thread(make)
        except OSError as error:
            raise Unreachable(f"{url}: the file of its certificates cannot be read: {error.strerror}") from None
        except (exceptions.BaseError, ValueError):
            pass  # its text may have secrets
        raise Unreachable(f"{url}: the options of this store, or its variables in the environment, cannot be used")

    def _outdated(self, url: Url) -> bool:
        """Drop clients that were made a while ago, since credentials may have changed; return True if one was.

        A place has one for reading, and one for each size of uploads.
        """
        place, latest = self._route(url).place, self._clock.now() - _RENEW
        outdated = [
            key for key, (_, made) in self._clients.items() if key[-len(place) :] == place and made < latest
        ]
        for key in outdated:
            del self._clients[key]
        return bool(outdated)

    async def _look(self, url: Url, attempt: Callable[[], Awaitable[Result]]) -> Result:
        """Repeat a request for metadata as `_again`; cached objects do not depend on these requests.

        A refused connection counts at once, and thousands of shards do not wait, one after the other, for a store
        that is down. Raises ShardError.
        """

        async def ask() -> Result:
            until, reason = self._down.get(url.store, (0.0, ""))
            if self._clock.now() < until:
                raise Unreachable(f"{url}: {reason}")
            return await attempt()

        return await self._again(url, ask, refused=REFUSED)

    async def _again(
        self,
        url: Url,
        attempt: Callable[[], Awaitable[Result]],
        seconds: float = 0,
        refused: int | None = None,
    ) -> Result:
        """Return the result of the first attempt that succeeds. Raises ShardError.

        Each may take `seconds`; there are no more than `refused` if connections are refused.
        """
        route = self._route(url)
        patience = route.patience._replace(total=route.patience.total + seconds, refused=refused)
        failed: ShardError
        if self._pauses and url in self._pauses and self._clock.now() < self._pauses[url][0]:
            raise Unreachable(f"{url}: {self._pauses[url][1]}")
        try:
            result = await again(attempt, route.limit, patience, self._clock, route.traffic)
            self._down.pop(url.store, None)
            if self._pauses:
                self._pauses.pop(url, None)
            return result
        except Transient as error:
            if error.wait is not None and error.wait > patience.total:
                raise self._to_wait(url, error, error.wait) from None
            at_once = error.attempts is not None or (error.refused and refused is not None)
            reason = f"{error}" if at_once else f"{error}; this was tried for up to {patience.total:g} s"
            if error.refused or error.silent:
                self._down[url.store] = self._clock.now() + DOWN_SECONDS, reason
            failed = Unreachable(f"{url}: {reason}")
        except DeniedObject as error:
            failed = _expired(url) or error
        if isinstance(failed, DeniedObject) and self._outdated(url):
            return await self._again(url, attempt, seconds, refused)
        raise failed

    def _to_wait(self, url: Url, error: Transient, seconds: float) -> Unreachable:
        """Note, for an object, a Retry-After that is longer than a reader waits; return its error.

        Requests for other objects, and for this one after a while, are sent all the same: the store may answer
        them.
        """
        until = time.time() + seconds
        reason = f"{error}, and asks to wait until {datetime.fromtimestamp(until):%Y-%m-%d %H:%M:%S}"
        self._pauses[url] = self._clock.now() + DOWN_SECONDS, reason
        if len(self._pauses) > ROUTES:
            self._pauses.popitem(last=False)
        self._route(url).traffic.told_until = until
        return Unreachable(f"{url}: {reason}")

    async def _answer_of(
        self, url: Url, answer: Awaitable[Result], size: int = 0, seconds: float | None = None
    ) -> Result:
        """Return the answer of obstore; replace its errors, which contain secrets. Raises ShardError, Transient.

        The answer may take as long as the pace of the store allows for `size` bytes, or these `seconds`.
        """
        try:
            async with asyncio.timeout(self._route(url).pace.seconds(size) if seconds is None else seconds):
                return await answer
        except TimeoutError:
            raise Transient("its server does not answer, or too slowly", silent=True) from None
        except answers.OBSTORE_ERRORS as error:
            failed = answers.failure(error, url)
        if isinstance(failed, Transient) and failed.throttled and url.scheme in WEB:
            failed.wait = await self._fallback.how_long(url, self._options(url))
        raise failed


def _mapped(file: str) -> mmap.mmap:
    """Return the content of a file, without reading it into memory. Raises OSError.

    Not to be closed: a request that is cancelled may still hold it; it ends with its last user.
    """
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    finally:
        os.close(fd)


async def _next(pieces: Any) -> Any:
    """Return the next of an asynchronous iterator of obstore; None at its end."""
    async for piece in pieces:
        return piece
    return None


def _directory(prefix: Url) -> str:
    """Return the directory that a prefix is in: obstore lists whole directories only."""
    return prefix.key.rpartition("/")[0]


def _listing(prefix: Url, metas: Sequence[Mapping[str, Any]], folders: Sequence[str]) -> Listing:
    """Return the objects and folders whose key starts with that of `prefix`, in order."""
    objects = [
        (prefix._replace(key=meta["path"]), answers.pin_of(meta))
        for meta in metas
        if meta["path"].startswith(prefix.key)
    ]
    return Listing(sorted(objects), sorted(key for key in folders if key.startswith(prefix.key)))


def _expired(url: Url) -> DeniedObject | None:
    """Return the error for a URL whose signature has expired; None for any other."""
    end = urls.expiry(url)
    if end is None or end > time.time():
        return None
    when = datetime.fromtimestamp(end, UTC).isoformat(" ", "seconds")
    return DeniedObject(f"{url}: the signature in this URL ended at {when}: give a newly signed one")
