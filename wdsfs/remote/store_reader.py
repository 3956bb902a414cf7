"""Heads, ranges and whole objects of stores, each answer checked against the pin.

What a store does, and what the caller of `fetch` gets; `store_requests.py` has the rest:

=====================================  =======================================================================
the object was replaced                ObjectChanged (ESTALE): by If-Match (412), else by the answer's ETag
the object is gone (404, 410)          `head`: MissingObject; `fetch`: ObjectChanged
it has become shorter (416)            ObjectChanged
it has no ETag, or a weak one          pinned by size and Last-Modified (`Pin.is_weak`: callers warn)
its ETags come and go (web servers)    likewise (`answers.ETags`)
it has neither ETag nor Last-Modified  `Pin.is_blind`: one whole answer is kept (`spooled.py`)
it has no length, and Range is ignored `Pin.has_no_length`: likewise (web servers)
If-Match is refused wrongly (web)      no condition is sent any more; as where it is ignored
If-Match is ignored                    nothing else: every answer is compared with the pin before its body is read
an answer has nothing to compare       ObjectChanged
Content-Range has another size         ObjectChanged
Range is ignored (200 for 206)         NoRanges: `get_all` reads such an object, from its first byte
another range, nonsense, in chunks     asked again, in all 3 times (in chunks once); then NoRanges
the body is cut, or too short          asked again, for the rest of a long range
=====================================  =======================================================================
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import obstore

from wdsfs.door.pins import Listing, Pin
from wdsfs.door.urls import WEB, Url, is_signed
from wdsfs.errors import DeniedObject, MissingObject, NoRanges, ObjectChanged, ShardError, Unreachable
from wdsfs.remote import answers, listings, store_clients
from wdsfs.remote.answers import ConditionFailed, ETags, OtherAnswer, require_size
from wdsfs.remote.hub import Hub
from wdsfs.remote.object_cache import ObjectCache
from wdsfs.remote.parts import SHORT, Buffer, Take
from wdsfs.remote.retries import Result, Threads, Transient, blocking
from wdsfs.remote.spooled import SpooledObjects
from wdsfs.remote.store_requests import StoreRequests

if TYPE_CHECKING:  # obstore has these for checkers only
    from obstore import GetOptions, GetResult


THREADS = 32  # for short ranges: their requests cost a third of those by asyncio, which the other ones go by
QUICK = 16e6  # bytes a second; a range that comes faster comes as a whole: each piece is a copy, and wakes threads
STREAMED = 256 << 10  # bytes of an answer that are taken at a time, at least; of a long range more
STREAMED_PIECES = 8  # that a long range comes in
CHUNKED = 1 << 20  # bytes that are taken at a time of an answer in chunks
_PROGRESS = 16 << 20  # bytes that a whole body that is asked for again has to go further
_FRUITLESS = 3  # times in a row that it may not
ASKED_AGAIN = 8  # requests that check the word of a web server that an object was replaced


class Transfer:
    """A range on its way: after an answer that was cut, the next request is for the missing rest."""

    def __init__(self, url: Url, pin: Pin, begin: int, end: int, take: Take) -> None:
        self.url, self.pin = url, pin
        self.at, self.end = begin, end
        self.is_short = end - begin <= SHORT
        self._take = take

    @property
    def size(self) -> int:
        """The bytes that are missing."""
        return self.end - self.at

    def add(self, piece: Any) -> None:
        data = memoryview(piece)[: self.size]
        self._take(self.at, data)
        self.at += len(data)


class StoreReader:
    """The objects of all stores, as one process reads them."""

    def __init__(self, requests: StoreRequests, cache: ObjectCache | None = None) -> None:
        self._requests = requests
        self._cache = cache
        self._spooled = SpooledObjects(cache)
        self._etags = ETags()
        self._threads = Threads(THREADS)
        self._hub = Hub(requests.clock, time.time)

    def end(self) -> None:
        """End the commands that still run."""
        self._spooled.end()

    # --- pins and lists

    async def head(self, url: Url) -> Pin:
        """Return the pin of the object that is at a URL now; a command is run to get it. Raises ShardError."""
        if url.is_program:
            return await self._spooled.output(url)
        look = self._requests.look
        if url.scheme == "hf":
            return await look(url, lambda: self._hub.head(url, self._requests.options(url)))
        if url.scheme not in WEB:
            return await look(url, lambda: self._head(url))
        pin = self._trusted(url, await look(url, lambda: self._head_of_web(url)))
        return await self._spooled.pin(url, pin, partial(self.get_all, url)) if pin.is_blind else pin

    def _trusted(self, url: Url, now: Pin) -> Pin:
        """Return the pin in an answer, as far as it can be relied on.

        Semantics decision: an object that was pinned without an ETag stays so until its size or time changes: an
        earlier process has noticed that its server has several.
        """
        self._etags.note(url, now)
        known = None if self._cache is None else self._cache.pin_of(url.shown)
        if now.etag and now.mtime_ns and known is not None and known == now._replace(etag=""):
            return known
        return self._etags.trusted(url, now)

    async def _head(self, url: Url) -> Pin:
        client, path = await self._requests.client(url)
        return answers.pin_of(await self._requests.answer_of(url, obstore.head_async(client, path)))

    async def _head_of_web(self, url: Url) -> Pin:
        """Ask by HEAD, or if that is refused, take the head of an answer to GET: a signature is for one method."""
        if not is_signed(url):
            with contextlib.suppress(DeniedObject, Unreachable, OtherAnswer):
                return await self._head(url)
        try:
            return await self._head_by_get(url)
        except OtherAnswer:
            return await self._head_by_urllib(url)

    async def _head_by_get(self, url: Url) -> Pin:
        client, path = await self._requests.client(url)
        ask = self._requests.answer_of
        try:
            answer = await ask(url, obstore.get_async(client, path, options={"range": (0, 1)}))
        except (NoRanges, ObjectChanged):  # whole objects only, or not even one byte
            answer = await ask(url, obstore.get_async(client, path))
        return answers.pin_of(answer.meta)

    async def _head_by_urllib(self, url: Url) -> Pin:
        """Ask for an object by a new connection, which may lead to another machine."""
        seconds = self._requests.route(url).pace.seconds(store_clients.HEAD_MAX)
        return await blocking(
            partial(store_clients.head_by_urllib, url, self._requests.options(url), seconds), seconds
        )

    async def list(self, prefix: Url, *, deep: bool) -> Listing:
        """Return the objects whose key starts with that of `prefix`, by key. Raises ShardError.

        Unless `deep`, only those in the directory of the prefix, and its folders: one request for 1,000 of both,
        however much lies below.
        """
        if prefix.scheme in WEB:
            raise Unreachable(f"{prefix}: a web server does not list: write out the names, with braces")
        if prefix.scheme == "hf":
            options = self._requests.options(prefix)
            return await self._requests.look(prefix, lambda: self._hub.list(prefix, options, deep=deep))
        return await listings.list_bucket(self._requests, prefix, deep=deep)

    # --- content

    def latency(self, url: Url) -> float:
        """Return the seconds in which a store begins to answer, 0 before its first answer."""
        return self._requests.route(url).limit.latency

    async def get(self, url: Url, pin: Pin, begin: int, end: int) -> bytes:
        """Return bytes `begin` to `end` (not included) of the pinned object. Raises ShardError."""
        pieces: list[Buffer] = []
        await self.fetch(url, pin, begin, end, lambda _, data: pieces.append(data))
        return b"".join(pieces)

    async def fetch(self, url: Url, pin: Pin, begin: int, end: int, take: Take) -> None:
        """Pass bytes `begin` to `end` (not included) of the pinned object to `take` as they come.

        Raises ShardError.
        """
        if url.is_program or pin.is_spooled:
            take(begin, await self._spooled.read(url, pin, begin, end, partial(self.get_all, url)))
        elif begin < end:
            transfer = Transfer(url, pin, begin, end, take)
            await self._unless_misled(url, pin, lambda: self._fetch_rest(transfer))

    async def _unless_misled(self, url: Url, pin: Pin, attempt: Callable[[], Awaitable[Result]]) -> Result:
        """Repeat a request for the pinned object; once more if its condition was refused wrongly."""
        try:
            return await self._requests.repeat(url, attempt)
        except ObjectChanged as error:
            is_there = url.scheme in WEB and await self._is_there(url, pin)
            if not (is_there and isinstance(error, ConditionFailed) and self._etags.note_refusal(url)):
                raise
        return await self._requests.repeat(url, attempt)

    async def _is_there(self, url: Url, pin: Pin) -> bool:
        """Ask for an object some more times; return True if it is the pinned one each time.

        If its ETags alternate meanwhile, `head` returns a pin without an ETag from then on, which callers notice.
        """
        is_same = True
        for _ in range(ASKED_AGAIN):
            if self._etags.are_of_machines(url):
                return False
            try:
                now = await self._requests.look(url, lambda: self._head_by_others(url))
            except ShardError:  # it is gone
                return False
            if (now.size, now.mtime_ns) != (pin.size, pin.mtime_ns):
                return False
            self._etags.note(url, pin, is_now=False)
            self._etags.note(url, now)
            is_same = is_same and now.etag == pin.etag
        return is_same

    async def _head_by_others(self, url: Url) -> Pin:
        try:
            return await self._head_by_urllib(url)
        except (ShardError, Transient):  # for example a redirect, which is not followed there
            return await self._head_by_get(url)

    async def _fetch_rest(self, transfer: Transfer) -> None:
        """Make one request for the missing rest of a range. Raises ShardError, Transient."""
        url, before = transfer.url, transfer.at
        try:
            if transfer.is_short and url.scheme != "hf" and self._threads.is_free:
                await self._fetch_by_thread(transfer)
            else:
                await self._fetch_by_asyncio(transfer)
            if transfer.size:
                raise Transient("its server sends less than it says")
        finally:
            self._requests.route(url).traffic.bytes += transfer.at - before

    async def _fetch_by_asyncio(self, transfer: Transfer) -> None:
        url, size = transfer.url, transfer.size
        limit, clock, answer_of = self._requests.route(url).limit, self._requests.clock, self._requests.answer_of
        since = clock.now()
        answer = await self._open(url, transfer.pin, {"range": (transfer.at, transfer.end)})
        limit.answered(clock.now() - since)
        if transfer.is_short:
            transfer.add(await answer_of(url, answer.bytes_async(), size))
            return
        since, is_quick = clock.now(), False
        try:
            if limit.is_quick:
                transfer.add(await answer_of(url, answer.bytes_async(), size))
            else:
                least = max(STREAMED, size // STREAMED_PIECES)
                pieces = answer.stream(min_chunk_size=least)
                while (piece := await answer_of(url, listings.next_of(pieces), least)) is not None:
                    transfer.add(piece)
            is_quick = size > QUICK * (clock.now() - since)
        finally:
            limit.is_quick = is_quick  # after a break in pieces: only the rest has to be requested again

    async def _fetch_by_thread(self, transfer: Transfer) -> None:
        """Take a short range as a whole, in a thread."""
        url, pin, size = transfer.url, transfer.pin, transfer.size
        client, path = await self._requests.client(url)
        options = self._conditional(url, pin, {"range": (transfer.at, transfer.end)})
        limit, clock = self._requests.route(url).limit, self._requests.clock
        since = clock.now()

        def fetch() -> Any:
            answer = obstore.get(client, path, options=options)
            limit.answered(clock.now() - since)
            self._etags.require_same(url, pin, answers.pin_of(answer.meta))
            return answer.bytes()

        try:
            transfer.add(await self._requests.answer_of(url, self._threads.call(fetch), size))
        except MissingObject:
            raise ObjectChanged(f"{url}: it is gone") from None

    async def get_all(self, url: Url, pin: Pin) -> AsyncIterator[Buffer]:
        """Yield the pinned object from its first byte on, for servers that ignore Range. Raises ShardError.

        After a cut answer the object is requested again from its start, as long as each answer has more bytes.
        """
        done, fruitless, broken = 0, 0, ""
        while done < pin.size or pin.is_blind:
            if fruitless > _FRUITLESS:
                raise Unreachable(f"{url}: {broken}, again and again before byte {done + 1:,} of {pin.size:,}")
            start, at = done, 0
            try:
                async for piece in self._answer_with_all(url, pin):
                    new = memoryview(piece)[max(done - at, 0) :]
                    at += len(piece)
                    done += len(new)
                    if new:
                        yield new
                if done >= pin.size:
                    return
                raise Transient("its server sends less than it says")
            except Transient as error:
                broken = str(error)
            if pin.is_blind:  # another answer may be of another object
                raise Unreachable(f"{url}: {broken}, after {done:,} bytes")
            self._requests.route(url).traffic.retries += 1
            fruitless = fruitless + 1 if done - start < _PROGRESS else 0

    async def _answer_with_all(self, url: Url, pin: Pin) -> AsyncIterator[Buffer]:
        """Yield the body of one answer to a request for all of an object. Raises ShardError, Transient."""
        size, traffic = 0, self._requests.route(url).traffic
        answer = None
        if not pin.has_no_length:
            answer = await self._unless_misled(url, pin, lambda: self._open_all(url, pin))
        pieces = self._chunks_of(url, pin) if answer is None else self._pieces_of(url, answer)
        async for piece in pieces:
            size += len(piece)
            traffic.bytes += len(piece)
            if not pin.has_no_length and size > pin.size:
                raise ObjectChanged(f"{url}: it has more than {pin.size:,} bytes")
            yield piece

    async def _open_all(self, url: Url, pin: Pin) -> GetResult | None:
        """Return the answer to a request for all of an object; None if it comes in chunks, without a length."""
        try:
            return await self._open(url, pin, {})
        except OtherAnswer:
            if url.scheme in WEB:
                return None
            raise answers.no_length(url) from None

    async def _pieces_of(self, url: Url, answer: GetResult) -> AsyncIterator[Buffer]:
        pieces = answer.stream(min_chunk_size=STREAMED)
        while (piece := await self._requests.answer_of(url, listings.next_of(pieces), STREAMED)) is not None:
            yield piece

    async def _chunks_of(self, url: Url, pin: Pin) -> AsyncIterator[Buffer]:
        """Yield the body of an answer that comes in chunks."""
        options, pace = self._requests.options(url), self._requests.route(url).pace
        open_answer = partial(store_clients.open_whole, url, options)
        now, body = await self._requests.repeat(url, lambda: blocking(open_answer, pace.seconds(0)))
        with contextlib.closing(body):
            if not pin.is_blind:
                self._etags.require_same(url, pin, now._replace(size=pin.size))
            seconds = pace.seconds(CHUNKED)
            next_piece = partial(store_clients.next_piece, url, body, CHUNKED, seconds)
            while piece := await blocking(next_piece, seconds):
                yield piece

    async def _open(self, url: Url, pin: Pin, options: GetOptions) -> GetResult:
        """Return the answer to a conditional request, its head checked. Raises ShardError, Transient."""
        if url.scheme == "hf":
            return await self._open_at_hub(url, pin, options)
        client, path = await self._requests.client(url)
        options = self._conditional(url, pin, options)
        try:
            answer = await self._requests.answer_of(url, obstore.get_async(client, path, options=options))
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

    async def _open_at_hub(self, url: Url, pin: Pin, options: GetOptions) -> GetResult:
        """Open a file of a commit, which never changes: only its size is compared, for another server sends it."""
        known, ours = self._hub.knows(url, pin), self._requests.options(url)
        place, headers = await self._hub.location(url, pin, ours)
        client = await self._requests.client_at(
            url, (place,), lambda: store_clients.web_store(place, ours, headers)
        )
        try:
            answer = await self._requests.answer_of(url, obstore.get_async(client, "", options=options))
        except (DeniedObject, MissingObject):
            self._hub.forget(url, pin)
            if not known:
                raise
            # It was signed for a while only.
            raise Transient("the hub has withdrawn a place for downloads") from None
        require_size(url, pin.size, answer.meta["size"])
        return answer

    # --- for `doctor`

    async def describe(self, url: Url) -> dict[str, Any]:
        """Return a report about a URL: reachable, credentials (their kind), ranges, conditions.

        None: not known.
        """
        report: dict[str, Any] = dict.fromkeys(("reachable", "credentials", "ranges", "conditions", "error"))
        if url.is_program:
            return {"error": f"{url}: is a program"}
        try:
            report["credentials"] = store_clients.access(url, self._requests.options(url)).kind
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
        client, path = await self._requests.client(url)
        options: GetOptions = {"if_match": '"no-such"'}
        ask = self._requests.answer_of
        with contextlib.suppress(ObjectChanged):
            await self._requests.repeat(url, lambda: ask(url, obstore.get_async(client, path, options=options)))
            return False
        return True
