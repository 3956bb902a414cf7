"""Listings of S3 page by page, where there are names that obstore refuses: `a//b`, `a/../b`, control characters.

One such name makes obstore (0.12) refuse a whole listing, also where it belongs to no shard. Here these names are
left out, with a warning if one looks like a shard. As in `multipart.py`, obstore signs an address, and urllib asks
there. Only the fetcher may import this.
"""

from __future__ import annotations

import contextlib
import logging
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from urllib.parse import unquote_plus, urlencode
from xml.etree import ElementTree

from wdsfs import names
from wdsfs.door.urls import Url, parse
from wdsfs.errors import SpecError
from wdsfs.remote import answers, store_clients
from wdsfs.remote.retries import Transient
from wdsfs.remote.store_clients import Options
from wdsfs.remote.web_fallback import send

log = logging.getLogger(__name__)

SCHEMES = frozenset({"s3", "ais"})
PAGE_MAX = 8 << 20  # bytes: 1,000 keys of 1,024 bytes, each byte as three characters, and their ETags
_SIGNED_FOR = timedelta(minutes=15)
_SUFFIXES = tuple(suffix.decode() for suffix in names.SHARD_SUFFIXES)


class Page(NamedTuple):
    """A part of a listing: objects as obstore describes them, keys of folders, and the token of the next page."""

    objects: list[dict[str, Any]]
    folders: list[str]
    following: str


def page(prefix: Url, options: Options, seconds: float, token: str, *, deep: bool) -> Page:
    """Return a page of the objects in the directory of `prefix`, or of all below it (`deep`).

    Without `token` the first one. Waits for its store. Raises ShardError, Transient.
    """
    query = {"encoding-type": "url", "list-type": "2", "prefix": prefix.key[: prefix.key.rfind("/") + 1]}
    query |= {} if deep else {"delimiter": "/"}
    query |= {"continuation-token": token} if token else {}
    bucket = prefix._replace(key="")
    try:
        address, headers = store_clients.signed(
            bucket, options, "GET", urlencode(sorted(query.items())), _SIGNED_FOR
        )
    except answers.OBSTORE_ERRORS as error:
        raise answers.failure(error, prefix) from None
    status, _, body = send(prefix, options, address, headers, "GET", None, seconds, PAGE_MAX)
    if status != 200:
        raise answers.of_status(status, body.decode("latin-1"), prefix)
    try:
        return _parsed(prefix, ElementTree.fromstring(body))
    except (ElementTree.ParseError, ValueError):
        raise Transient("its store gives a listing that is not understood", attempts=1) from None


def _parsed(prefix: Url, top: ElementTree.Element) -> Page:
    """Return the page in an answer of S3. Raises ValueError."""
    space = top.tag[: top.tag.rfind("}") + 1]  # "{http://...}", as far as the store gives one
    is_encoded = top.findtext(f"{space}EncodingType") == "url"

    def key_of(element: ElementTree.Element, name: str) -> str:
        text = element.findtext(f"{space}{name}", "")
        return unquote_plus(text) if is_encoded else text

    objects, odd = list[dict[str, Any]](), list[str]()
    for element in top.iterfind(f"{space}Contents"):
        key = key_of(element, "Key")
        if _is_readable(prefix, key):
            objects.append(_meta(key, space, element))
        elif key.endswith(_SUFFIXES):
            odd.append(key)
    if odd:
        named = f"{odd[0]!r}" + (f" and {len(odd) - 1:,} more" if len(odd) > 1 else "")
        log.warning(
            "%s: a name with an empty part, '.', '..' or a control character is no shard: %s", prefix, named
        )
    folders = [key_of(element, "Prefix") for element in top.iterfind(f"{space}CommonPrefixes")]
    is_cut = top.findtext(f"{space}IsTruncated") == "true"
    following = top.findtext(f"{space}NextContinuationToken", "") if is_cut else ""
    return Page(objects, [key for key in folders if _is_readable(prefix, key)], following)


def _is_readable(prefix: Url, key: str) -> bool:
    """Return True for the key of an object that can be named, and so read."""
    with contextlib.suppress(SpecError):
        return parse(f"{prefix.store}/{key}").key == key
    return False


def _meta(key: str, space: str, element: ElementTree.Element) -> dict[str, Any]:
    return {
        "path": key,
        "size": int(element.findtext(f"{space}Size", "")),
        "last_modified": datetime.fromisoformat(element.findtext(f"{space}LastModified", "")),
        "e_tag": element.findtext(f"{space}ETag"),
    }
