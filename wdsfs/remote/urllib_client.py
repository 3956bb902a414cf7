"""Requests by urllib for the answers of servers that obstore (0.12) refuses, or does not show as a whole.

obstore refuses an answer in chunks, without a length, also if it is a page of a listing at a signed address. And
it does not give the headers of an error: Retry-After is asked for here. All functions wait, so callers use threads
(`retries.blocking`). Each request has a connection of its own. Redirects are not followed.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from wdsfs.door.pins import NO_LENGTH, Pin
from wdsfs.door.urls import Url
from wdsfs.errors import MissingObject, ShardError
from wdsfs.remote import answers
from wdsfs.remote.retries import Transient
from wdsfs.remote.settings import pace
from wdsfs.remote.store_clients import USER_AGENT, Options, access

HEAD_MAX = 64 << 10  # bytes of the answer to a request whose headers count
_NO_ANSWER = (OSError, ValueError, http.client.HTTPException)  # of urllib, at any moment of an answer
_RANGE = re.compile(r"bytes \d{1,19}-\d{1,19}/(\d{1,19})")


def get(
    url: Url, options: Options, address: str, headers: dict[str, str], seconds: float, most: int
) -> tuple[int, bytes]:
    """Return status and body, up to `most` bytes, of the answer at an address that is signed for an object.

    Raises Transient, Unreachable.
    """
    with _translated(url), _open_address(address, options, headers, seconds) as answer:
        return answer.status, _next_bytes(answer, most, seconds)


def head(url: Url, options: Options, seconds: float) -> Pin:
    """Return the pin of the object that is at a URL now. Raises ShardError, Transient."""
    with _translated(url), _open_object(url, options, {"Range": "bytes=0-0"}, pace(options).silence) as answer:
        body = _next_bytes(answer, HEAD_MAX, seconds)
    if answer.status not in (200, 206):
        raise _refusal(url, answer.status, body)
    content = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    size = content[1] if content else answer.headers.get("Content-Length") if answer.status == 200 else ""
    if size is None:
        return _pin_of(answer.headers, NO_LENGTH)
    if not size.isdecimal():
        raise answers.no_length(url)
    return _pin_of(answer.headers, int(size))


def open_whole(url: Url, options: Options) -> tuple[Pin, Any]:
    """Return the answer to a request for a whole object: its pin, and its body to be closed.

    Raises ShardError, Transient.
    """
    with _translated(url):
        answer = _open_object(url, options, {}, pace(options).silence)
    if answer.status != 200:
        with answer, _translated(url):
            raise _refusal(url, answer.status, answer.read(HEAD_MAX))
    return _pin_of(answer.headers, NO_LENGTH), answer


def next_piece(url: Url, body: Any, most: int, seconds: float) -> bytes:
    """Return the next bytes of an answer, none at its end. Raises Transient, Unreachable."""
    with _translated(url):
        return _next_bytes(body, most, seconds)


def retry_after(url: Url, options: Options, seconds: float) -> float | None:
    """Return the Retry-After of the answer to a question for one byte; None when there is none (any more)."""
    try:
        with _open_object(url, options, {"Range": "bytes=0-0"}, seconds) as answer:
            text = answer.headers.get("Retry-After", "") if answer.status in answers.THROTTLING else ""
    except _NO_ANSWER:
        return None
    return answers.seconds_of(text, time.time())


@contextlib.contextmanager
def _translated(url: Url) -> Iterator[None]:
    """Turn errors of urllib into Transient and Unreachable."""
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


def _open_object(url: Url, options: Options, headers: dict[str, str], timeout: float) -> Any:
    """Return the answer to GET, open, whatever its status. Raises OSError, ValueError, HTTPException."""
    target = f"{url.store}/{url.path}" + (f"?{url.query}" if url.query else "")
    return _open_address(target, options, {**access(url, options).headers, **headers}, timeout)


def _open_address(target: str, options: Options, headers: dict[str, str], timeout: float) -> Any:
    """Return the answer to a GET at any place, as `_open_object`."""
    context = ssl.create_default_context()
    if "certificates" in options:
        context.load_verify_locations(options["certificates"])
    if options.get("allow_invalid_certificates") == "true":
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    opener = urllib.request.build_opener(_Stay, urllib.request.HTTPSHandler(context=context))
    request = urllib.request.Request(target, headers={**headers, "User-Agent": USER_AGENT})
    try:
        return opener.open(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        return error


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


def _refusal(url: Url, status: int, body: bytes) -> ShardError | Transient:
    """Return the error for an answer that has no bytes of an object."""
    if status in (404, 410):
        return MissingObject(f"{url}: there is no such object")
    return answers.of_status(status, body.decode("latin-1"), url)


def _pin_of(headers: Mapping[str, str], size: int) -> Pin:
    etag = answers.etag_of({"e_tag": headers.get("ETag")})
    return Pin(size, _time_ns(headers.get("Last-Modified", "")), etag, "")


def _time_ns(text: str) -> int:
    """Return the time of a Last-Modified; 0 without one."""
    try:
        return int(parsedate_to_datetime(text).timestamp()) * 10**9
    except (ValueError, OverflowError):  # OverflowError: a very long number in the place of a day
        return 0
