"""Asks web servers by urllib, in threads, where obstore refuses answers that may be right.

Such an answer has more or less than the requested range, or comes in chunks without a length, or its server shows
the certificate of an authority, which curl accepts, too. A server that throttles is also asked here how long to
wait: obstore does not give the headers of an answer that is an error. Redirects are not followed.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import re
import ssl
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from email.utils import parsedate_to_datetime
from functools import lru_cache, partial
from typing import Any

from wdsfs.door.pins import NO_LENGTH, Pin
from wdsfs.door.urls import Url
from wdsfs.errors import MissingObject, ObjectChanged, Unreachable
from wdsfs.remote import answers
from wdsfs.remote.etags import ETags
from wdsfs.remote.retries import Clock, Transient, blocking
from wdsfs.remote.settings import pace
from wdsfs.remote.store_clients import USER_AGENT, Options, access

SECONDS = 60.0  # how long requests to a server are made here after such an answer
PIECE = 1 << 20  # bytes of a range that are asked for at a time
WIDER = 1 << 20  # bytes before a range that are taken, too, if a server sends them
HEAD_MAX = 64 << 10  # bytes of the answer to a request whose headers count
ANSWER_MAX = 1 << 20  # bytes of the answer to a small request
HOW_LONG_SECONDS = 10.0  # limit for a request that only asks for Retry-After
_NO_ANSWER = (OSError, ValueError, http.client.HTTPException)  # of urllib, at any moment of an answer
_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})")
Answer = tuple[int, dict[str, str], bytes]  # status, headers with names in lower case, body


class WebFallback:
    """The servers that are asked here, by `Url.store`."""

    def __init__(self, clock: Clock, etags: ETags) -> None:
        self._clock, self._etags = clock, etags
        self._until: dict[str, float] = {}
        self._asking: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def is_due(self, url: Url) -> bool:
        """Return True if a server has lately given answers that obstore refuses."""
        return bool(self._until) and self._until.get(url.store, 0.0) > self._clock.now()

    def ask_from_now(self, url: Url) -> None:
        """Route requests for a server to this module for a while."""
        self._until[url.store] = self._clock.now() + SECONDS

    async def head(self, url: Url, options: Options) -> Pin:
        """Return the pin of the object that is at a URL now. Raises ShardError, Transient."""
        return _head_of(url, await self._ask(url, options, 0, 1, {}, HEAD_MAX))

    async def whole(self, url: Url, options: Options) -> AsyncIterator[bytes]:
        """Yield the bytes of one answer, whose length its server does not say. Raises ShardError."""
        limits, size = pace(options), 0
        try:
            body = await blocking(partial(_body, url, options), limits.seconds(0))
            with contextlib.closing(body):
                seconds = limits.seconds(PIECE)
                while piece := await blocking(partial(_piece, url, body, seconds), seconds):
                    size += len(piece)
                    yield piece
        except Transient as error:
            raise Unreachable(f"{url}: {error}, after {size:,} bytes") from None

    async def fetch(self, transfer: answers.Transfer, options: Options) -> None:
        """Fetch the missing part of a range. Raises ShardError, Transient.

        It takes as many requests as needed, within the pace of the store: one byte per answer would be too slow.
        """
        while transfer.at < transfer.end:
            end = min(transfer.end, transfer.at + PIECE)
            try:
                async with asyncio.timeout(pace(options).seconds(end - transfer.at)):
                    while transfer.at < end:
                        await self._fetch_some(transfer, end, options)
            except TimeoutError:
                raise Transient("its server answers with too little at a time", silent=True) from None

    async def _fetch_some(self, transfer: answers.Transfer, end: int, options: Options) -> None:
        url, pin, at = transfer.url, transfer.pin, transfer.at
        most = end - at + WIDER
        answer = await self._ask(url, options, at, end, self._etags.condition(url, pin), most)
        begin, stop, now = _range_of(url, answer)
        self._etags.require_same(url, pin, now)
        _, headers, body = answer
        length = headers.get("content-length", f"{stop - begin}")
        if not begin <= at < stop or at - begin > WIDER or length != f"{stop - begin}":
            raise answers.wrong_range()
        if len(body) < min(stop - begin, most):
            raise Transient("its server sends less than it says")
        if (begin, stop) != (at, end) or "content-length" not in headers:
            self.ask_from_now(url)
        transfer.add(body[at - begin : stop - begin])

    async def how_long(self, url: Url, options: Options) -> float | None:
        """Return the seconds that a server asks to wait. Of many requests that it refuses, only one asks."""
        if self._asking[url.store].locked():
            return None
        async with self._asking[url.store]:
            with contextlib.suppress(Transient):
                return await blocking(partial(_retry_after, url, options), HOW_LONG_SECONDS)
        return None

    async def _ask(
        self, url: Url, options: Options, begin: int, end: int, condition: dict[str, str], most: int
    ) -> Answer:
        seconds = pace(options).seconds(most)
        headers = {**condition, "Range": f"bytes={begin}-{end - 1}"}
        return await blocking(partial(_read, url, options, headers, most, seconds), seconds)


# --- in threads ----------------------------------------------------------------------------------------------


def send(
    url: Url,
    options: Options,
    address: str,
    headers: dict[str, str],
    method: str,
    body: bytes | None,
    seconds: float,
    most: int = ANSWER_MAX,
) -> Answer:
    """Return the answer, of at most `most` bytes, to a request about an object, at an address that is signed.

    Raises Transient, Unreachable.
    """
    with _errors(url), _open(address, options, headers, seconds, method, body) as answer:
        return (
            answer.status,
            {name.lower(): text for name, text in answer.headers.items()},
            _next_bytes(answer, most, seconds),
        )


@contextlib.contextmanager
def _errors(url: Url) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise Transient("its server does not answer", silent=True) from None
    except _NO_ANSWER as error:
        if isinstance(getattr(error, "reason", None), ssl.SSLCertVerificationError):
            raise answers.untrusted(url) from None
        raise Transient("the connection to its server broke") from None


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Refuse to follow: the headers for the first place are not for another."""


def _read(url: Url, options: Options, headers: dict[str, str], most: int, seconds: float) -> Answer:
    """Return the answer to GET, with up to `most` bytes of its body. Raises Transient, Unreachable."""
    with _errors(url), _opened(url, options, headers, pace(options).silence) as answer:
        body = _next_bytes(answer, most, seconds)
    named = {} if answer.status >= 300 else answer.headers
    return answer.status, {name.lower(): value for name, value in named.items()}, body


def _next_bytes(answer: Any, most: int, seconds: float) -> bytes:
    """Return the next bytes of an answer, up to `most`, or up to its end.

    Raises TimeoutError after `seconds`, also while bytes come one by one: there are few threads.
    """
    body, late = bytearray(), time.monotonic() + seconds
    while len(body) < most and (piece := answer.read1(most - len(body))):
        body += piece
        if time.monotonic() > late:
            raise TimeoutError
    return bytes(body)


def _body(url: Url, options: Options) -> Any:
    """Return the answer to a request for a whole object. Raises ShardError, Transient."""
    with _errors(url):
        answer = _opened(url, options, {}, pace(options).silence)
    if answer.status != 200:
        with answer, _errors(url):
            raise answers.of_status(answer.status, answer.read(HEAD_MAX).decode("latin-1"), url)
    return answer


def _piece(url: Url, body: Any, seconds: float) -> bytes:
    """Return the next bytes of an answer, none at its end. Raises Transient, Unreachable."""
    with _errors(url):
        return _next_bytes(body, PIECE, seconds)


def _retry_after(url: Url, options: Options) -> float | None:
    """Return the Retry-After of the answer to a question for one byte; None when there is none (any more)."""
    try:
        with _opened(url, options, {"Range": "bytes=0-0"}, HOW_LONG_SECONDS) as answer:
            text = answer.headers.get("Retry-After", "") if answer.status in answers.THROTTLING else ""
    except _NO_ANSWER:
        return None
    return answers.seconds_of(text, time.time())


def _opened(url: Url, options: Options, headers: dict[str, str], timeout: float) -> Any:
    """Return the answer to GET, open, whatever its status. Raises OSError, ValueError, HTTPException."""
    target = f"{url.store}/{url.path}" + (f"?{url.query}" if url.query else "")
    return _open(target, options, {**access(url, options).headers, **headers}, timeout)


def _open(
    target: str,
    options: Options,
    headers: dict[str, str],
    timeout: float,
    method: str = "GET",
    body: bytes | None = None,
) -> Any:
    """Return the answer to a request, open, whatever its status. Raises OSError, ValueError, HTTPException."""
    context = ssl.create_default_context()
    if "certificates" in options:
        context.load_verify_locations(options["certificates"])
    opener = urllib.request.build_opener(_Stay, urllib.request.HTTPSHandler(context=context))
    request = urllib.request.Request(target, body, {**headers, "User-Agent": USER_AGENT}, method=method)
    try:
        return opener.open(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        return error


# --- what an answer says -------------------------------------------------------------------------------------


def _range_of(url: Url, answer: Answer) -> tuple[int, int, Pin]:
    """Return begin and end of the range that an answer has, and of which object. Raises ShardError, Transient."""
    status, headers, body = answer
    if status == 206:
        content = _RANGE.fullmatch(headers.get("content-range", ""))
        if content is None:
            raise answers.wrong_range()
        return int(content[1]), int(content[2]) + 1, _pin_of(headers, int(content[3]))
    if status == 200:
        raise answers.whole_only(url)
    if status == 412:
        raise answers.condition_failed(url)
    if status in (404, 410):
        raise ObjectChanged(f"{url}: it is gone")
    raise answers.of_status(status, body.decode("latin-1"), url)


def _head_of(url: Url, answer: Answer) -> Pin:
    """Return the pin of the object of which an answer has the first byte, or all. Raises ShardError, Transient."""
    status, headers, body = answer
    if status in (404, 410):
        raise MissingObject(f"{url}: there is no such object")
    if status not in (200, 206):
        raise answers.of_status(status, body.decode("latin-1"), url)
    content = _RANGE.fullmatch(headers.get("content-range", ""))
    size = content[3] if content is not None else headers.get("content-length", "") if status == 200 else ""
    if not size and status == 200:
        return _pin_of(headers, NO_LENGTH)
    if not size.isdecimal():
        raise answers.no_length(url)
    return _pin_of(headers, int(size))


def _pin_of(headers: Mapping[str, str], size: int) -> Pin:
    return Pin(
        size, _time_ns(headers.get("last-modified", "")), answers.etag_of({"e_tag": headers.get("etag")}), ""
    )


@lru_cache(4096)
def _time_ns(text: str) -> int:
    """Return the time of a Last-Modified; 0 without one."""
    try:
        return int(parsedate_to_datetime(text).timestamp()) * 10**9
    except (ValueError, OverflowError):  # OverflowError: a very long number in the place of a day
        return 0
