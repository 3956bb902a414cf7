"""Errors and pins for the answers of stores: obstore's results become pins, its errors become those of wdsfs.

obstore's messages contain whole URLs, signatures included, and bodies of answers. Only a status, and an error code
of letters and digits, are taken from them.

The ETags of two kinds of web servers mislead (`ETags`). Several machines behind one address each have an ETag of
their own for the same object: then only size and Last-Modified tell if it was replaced. Others refuse If-Match
although the ETag is right: then no condition is sent, and only the answers are compared. An object that was really
replaced never gets its old ETag back with the same size and time. So an ETag that comes back after another one
proves that each machine of its server has an ETag of its own.
"""

from __future__ import annotations

import errno
import logging
import re
import socket
from collections import OrderedDict
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from obstore import exceptions

from wdsfs.door.pins import Pin
from wdsfs.door.urls import WEB, Url
from wdsfs.errors import (
    DeniedObject,
    MissingObject,
    NoRanges,
    ObjectChanged,
    ObjectExists,
    ShardError,
    Unreachable,
)
from wdsfs.remote.retries import Transient

OBSTORE_ERRORS = (exceptions.BaseError, OSError, ValueError)
_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,60})</Code>")
_KIND = re.compile(r"HttpError \{\s+kind: ([A-Za-z]+)")
_METADATA = ("169.254.", "metadata.google.internal", "fd00:ec2::254")
_EXPIRED = frozenset({"ExpiredToken", "RequestTimeTooSkewed", "InvalidToken", "TokenRefreshRequired"})

# Words in the texts of obstore's errors that another attempt cannot mend, and what to tell the user.
_LASTING = {
    "TooManyRedirects": "its server redirects in a circle",
    "BadScheme": "its server redirects from https to http, which is not followed",
    "TooLarge": "its server sends headers that are too large: over 100, or over 400 KiB",
}

_AUTHORITY = "CaUsedAsEndEntity"
_OF_AUTHORITY = (
    "the certificate of its server is that of an authority (CA:TRUE), which is for signing others; make another "
    "for the server and for certificates=: openssl req -x509 -newkey rsa:2048 -nodes -days 365 -keyout key.pem "
    "-out certificate.pem -subj /CN=HOST -addext subjectAltName=DNS:HOST "
    "-addext basicConstraints=critical,CA:FALSE . Or have no certificate of this server checked: --store-option "
)

_ODD_NAME = (
    "it cannot be listed: a name below it has an empty part (//), '.', '..' or a control character: rename that "
    "object, or write out the names of the shards with braces"
)
_NO_NETWORK = (
    "its server cannot be connected to: no network is allowed here (RestrictAddressFamilies= of the unit?)"
)

THROTTLING = frozenset({429, 503})
_TRANSIENT = THROTTLING | {408, 425, 500, 502, 504}
_WRONG_RANGE = ("UnexpectedRange", "ParseContentRange", "NoContentRange", "InvalidRange")
_WRONG_HEADERS = ("MissingLastModified", "MissingEtag", "InvalidContentLength")
_LATE = ("timed out", "TimedOut", "deadline has elapsed")  # in place of a refusal
LONGEST_WAIT = 366 * 86400.0  # seconds, longer than any reader waits
_WRONG_ANSWERS = 3  # attempts: a balancer may have one bad server among several, so more attempts do not help


class OtherAnswer(Transient):
    """An answer that obstore refuses, but that may be right: of another range, or in chunks, without a length.

    A server that answers so again counts as one that ignores Range: the object is fetched whole.
    """


class ConditionFailed(ObjectChanged):
    """A store says that the condition of a request does not hold, so that the object was replaced."""


class OddName(Exception):
    """A key in a listing that obstore refuses, and with it the listing. It never leaves this room."""


def failure(error: Exception, url: Url) -> ShardError | Transient | OddName:
    """Return the error of wdsfs for an error of obstore about the object at this URL."""
    text = str(error)
    status = _STATUS.search(text)
    if isinstance(error, FileNotFoundError) and not (status and status[1] == "405"):  # the same to obstore
        return MissingObject(f"{url}: there is no such object")
    if isinstance(error, exceptions.AlreadyExistsError):
        return ObjectExists(f"{url}: exists already")
    if isinstance(error, exceptions.PreconditionError):
        return ConditionFailed(f"{url}: it has been replaced")
    if isinstance(error, exceptions.NotSupportedError):
        return whole_only(url)
    if isinstance(error, exceptions.InvalidPathError):
        return OddName(_ODD_NAME)
    if any(place in text for place in _METADATA):
        return DeniedObject(
            f"{url}: no credentials are found: set those of this kind of store, or for a public one "
            f"--store-option {url.store}:anonymous=true"
        )
    if isinstance(error, ValueError):
        return Unreachable(f"{url}: this name of an object, or an option of its store, cannot be used")
    return of_status(int(status[1]), text, url) if status else _of_connection(text, url)


def of_status(status: int, text: str, url: Url) -> ShardError | Transient:
    """Return the error of wdsfs for a status of HTTP; `text` has the body of the answer."""
    code = _CODE.search(text)
    said = f"{status} {code[1]}" if code else str(status)
    if status in _TRANSIENT:
        return Transient(f"its store answers {said}", throttled=status in THROTTLING)
    if status in (401, 403) or (status == 400 and code and code[1] in _EXPIRED):
        return DeniedObject(f"{url}: its store refuses it ({said}): check the credentials, and what they allow")
    if status == 410:
        return MissingObject(f"{url}: there is no such object any more")
    if status == 416:
        return ObjectChanged(f"{url}: it has become shorter")
    return Unreachable(f"{url}: its store answers {said}")


def untrusted(url: Url) -> Unreachable:
    """Return the error for a certificate that is not trusted."""
    return Unreachable(
        f"{url}: the certificate of its server is not trusted: --store-option {url.store}:certificates=FILE"
    )


def require_same(url: Url, pin: Pin, now: Pin) -> None:
    """Raise ObjectChanged if an answer, `now`, is of another object than the pinned one."""
    change = pin.difference(now)
    if change:
        raise ObjectChanged(f"{url}: it has been replaced: {change}")


def require_size(url: Url, size: int, now: int) -> None:
    """Raise ObjectChanged if an object does not have the size (bytes) that it had."""
    if size != now:
        raise ObjectChanged(f"{url}: it has {now:,} bytes instead of {size:,}")


def whole_only(url: Url) -> NoRanges:
    """Return the error for a server that ignores Range."""
    return NoRanges(f"{url}: its server sends whole objects only")


def no_length(url: Url) -> Unreachable:
    """Return the error for an answer without the size of the object."""
    return Unreachable(f"{url}: its server does not say how large it is")


def _of_connection(text: str, url: Url) -> ShardError | Transient:
    if any(word in text for word in _WRONG_RANGE):
        wrong = "its server answers with another range than was asked for"
        return OtherAnswer(wrong, attempts=_WRONG_ANSWERS, instead=whole_only(url))
    if "MissingContentLength" in text:
        return OtherAnswer("its server does not say how large it is", attempts=1, instead=whole_only(url))
    if _AUTHORITY in text:
        return Unreachable(f"{url}: {_OF_AUTHORITY}{url.store}:allow_invalid_certificates=true")
    lasting = next((reason for word, reason in _LASTING.items() if word in text), None)
    if lasting is not None:
        return Unreachable(f"{url}: {lasting}")
    if "BareRedirect" in text and url.scheme in WEB:
        return Unreachable(f"{url}: its server redirects, but does not say where to")
    if "BareRedirect" in text:
        return Unreachable(
            f"{url}: its store redirects to nowhere: set the right region, --store-option {url.store}:region=..."
        )
    if "certificate" in text.lower():
        return untrusted(url)
    if "Parse(" in text:
        return Transient("its server sends something that is no answer of HTTP", attempts=_WRONG_ANSWERS)
    kind = _KIND.search(text)
    if kind and kind[1] == "Timeout":
        return Transient("its server does not answer", silent=True)
    if kind and kind[1] == "Connect" and _is_without_network():
        return Transient(_NO_NETWORK, refused=True)
    if kind and kind[1] == "Connect":
        late = any(word in text for word in _LATE)
        unknown = "the name of its server is not known" if "dns error" in text else ""
        return Transient(unknown or "its server cannot be connected to", silent=late, refused=not late)
    if kind:
        return Transient("the connection to its server broke")
    if any(word in text for word in _WRONG_HEADERS):
        return no_length(url)
    return Transient("its store gives an answer that is not understood", attempts=_WRONG_ANSWERS)


def _is_without_network() -> bool:
    """Return True if this process may make no socket of the internet, as in a restricted unit of systemd."""
    try:
        socket.socket(socket.AF_INET).close()
    except OSError as error:
        return error.errno in (errno.EAFNOSUPPORT, errno.EPERM)
    return False


def pin_of(meta: Mapping[str, Any]) -> Pin:
    """Return the pin from obstore's metadata of an object.

    It has no version, and the time is in seconds: otherwise the pins of LIST and of HEAD would differ.
    """
    return Pin(meta["size"], int(meta["last_modified"].timestamp()) * 10**9, etag_of(meta), "")


def etag_of(meta: Mapping[str, Any]) -> str:
    """Return the ETag with its quotes, which LIST leaves out in some stores."""
    etag = meta["e_tag"] or ""
    return etag if not etag or etag.startswith(('"', 'W/"')) else f'"{etag}"'


def seconds_of(said: str, now: float) -> float | None:
    """Return the seconds that a Retry-After asks for, a number or a date; `now` in seconds of the Unix era.

    No more than `LONGEST_WAIT`, so that the time at which it ends can be written as a date.
    """
    if said.isdecimal():
        return min(float(said), LONGEST_WAIT)
    try:
        return min(max(0.0, parsedate_to_datetime(said).timestamp() - now), LONGEST_WAIT)
    except (ValueError, OverflowError):
        return None


log = logging.getLogger(__name__)

OBJECTS_MAX = 4096  # whose ETags are remembered
ETAGS_MAX = 64  # of one object


class ETags:
    """The ETags in the answers of web servers, as one process sees them. Usable by several threads."""

    def __init__(self) -> None:
        self._of_machines: set[str] = set()  # servers, as `Url.store`
        self._refusing: set[str] = set()  # servers
        self._seen: OrderedDict[Url, tuple[int, int, list[str]]] = OrderedDict()  # size, time, ETags in order

    def are_of_machines(self, url: Url) -> bool:
        """Return True if the machines of a server have different ETags for the same object."""
        return url.store in self._of_machines

    def trusted(self, url: Url, pin: Pin) -> Pin:
        """Return the pin, without its ETag where that proves nothing."""
        return pin._replace(etag="") if self.are_of_machines(url) and not pin.is_spooled else pin

    def condition(self, url: Url, pin: Pin) -> dict[str, str]:
        """Return the header, if there is one, that makes a server refuse a request for another object."""
        return {} if url.store in self._refusing else self._compared(url, pin).condition

    def require_same(self, url: Url, pin: Pin, now: Pin) -> None:
        """Raise ObjectChanged if an answer, `now`, is of another object than the pinned one."""
        if url.scheme in WEB and now.etag != pin.etag:
            self.note(url, pin, is_now=False)
            self.note(url, now)
        require_same(url, self._compared(url, pin), now)

    def _compared(self, url: Url, pin: Pin) -> Pin:
        """Return the pin with which answers are compared.

        An object without Last-Modified keeps its ETag until it is pinned again: its size alone proves less.
        """
        return self.trusted(url, pin) if pin.mtime_ns else pin

    def note(self, url: Url, pin: Pin, *, is_now: bool = True) -> None:
        """Note the ETag of an object: from an answer (`is_now`), or from an earlier pin."""
        size, mtime_ns, etags = self._seen.get(url, (-1, -1, []))
        if (size, mtime_ns) != (pin.size, pin.mtime_ns):
            if not is_now and etags:
                return
            etags = []
        if is_now and pin.etag in etags[:-1]:
            self.note_machines(url)
        if pin.etag not in etags:
            etags = [*etags, pin.etag] if is_now else [pin.etag, *etags]
        self._seen.pop(url, None)  # not `move_to_end`: another thread may drop it in between
        self._seen[url] = pin.size, pin.mtime_ns, etags[-ETAGS_MAX:]
        while len(self._seen) > OBJECTS_MAX:
            self._seen.popitem(last=False)

    def note_machines(self, url: Url) -> None:
        """Note that a server has several ETags for one object."""
        if url.store not in self._of_machines:
            self._of_machines.add(url.store)
            log.warning(
                "%s: has several ETags for one object: size and Last-Modified are compared instead", url.store
            )

    def note_refusal(self, url: Url) -> bool:
        """Note that a server refuses a condition that holds; return False if none was sent."""
        if url.store in self._refusing:
            return False
        self._refusing.add(url.store)
        log.warning("%s: refuses If-Match for objects that have not changed: its answers are compared", url.store)
        return True
