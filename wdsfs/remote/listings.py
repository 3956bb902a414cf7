"""Listings of buckets: by obstore, and of S3 page by page where there are names that obstore refuses.

Such names are `a//b`, `a/../b`, and those with control characters. One makes obstore (0.12) refuse a whole
listing, also where it belongs to no shard. Here these names are left out, with a warning if one looks like a
shard: obstore signs an address, and urllib asks there.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import unquote_plus, urlencode
from xml.etree import ElementTree

import obstore
from obstore.store import ObjectStore

from wdsfs import names
from wdsfs.door.pins import Listing
from wdsfs.door.urls import Url, parse
from wdsfs.errors import SpecError, Unreachable
from wdsfs.remote import answers, store_clients
from wdsfs.remote.answers import OddName
from wdsfs.remote.retries import Transient, blocking
from wdsfs.remote.store_clients import Options
from wdsfs.remote.store_requests import StoreRequests

log = logging.getLogger(__name__)

PAGED = frozenset({"s3", "ais"})  # schemes whose listings can be read page by page
LISTED = 512 << 10  # bytes of a page of a listing by obstore, at most
PAGES_PATIENCE = 4  # times `total_time`: the limit for a listing whose pages come in one call
PAGE_MAX = 8 << 20  # bytes: 1,000 keys of 1,024 bytes, each byte as three characters, and their ETags
_SIGNED_FOR = timedelta(minutes=15)
_SUFFIXES = tuple(suffix.decode() for suffix in names.SHARD_SUFFIXES)


async def list_bucket(requests: StoreRequests, prefix: Url, *, deep: bool) -> Listing:
    """Return the objects of a bucket as `StoreReader.list`. Raises ShardError."""
    client, _ = await requests.client(prefix)
    list_once = _list_deep if deep else _list_directory
    try:
        return await requests.look(prefix, lambda: list_once(requests, prefix, client))
    except OddName as error:  # some key below it, perhaps of no shard
        if prefix.scheme not in PAGED:
            raise Unreachable(f"{prefix}: {error}") from None
    return await list_by_pages(requests, prefix, deep=deep)


async def _list_deep(requests: StoreRequests, prefix: Url, client: ObjectStore) -> Listing:
    objects = []
    listing = obstore.list(client, _directory(prefix) or None, chunk_size=1000)
    while (some := await requests.answer_of(prefix, next_of(listing), LISTED)) is not None:
        objects += some
    return _listing(prefix, objects, [])


async def _list_directory(requests: StoreRequests, prefix: Url, client: ObjectStore) -> Listing:
    request = obstore.list_with_delimiter_async(client, _directory(prefix) or None)
    # One call for all pages: it returns nothing before the last one has come.
    seconds = PAGES_PATIENCE * requests.route(prefix).pace.total
    answer = await requests.answer_of(prefix, request, seconds=seconds)
    return _listing(prefix, answer["objects"], [f"{path}/" for path in answer["common_prefixes"]])


async def list_by_pages(requests: StoreRequests, prefix: Url, *, deep: bool) -> Listing:
    """Return the same, without the names that cannot be read, by requests for its pages. Raises ShardError."""
    route = requests.route(prefix)
    seconds = route.pace.seconds(LISTED)
    objects, folders, token = list[Any](), list[str](), ""
    while True:
        ask = partial(_page, prefix, route.options, seconds, token, deep=deep)
        page = await requests.look(prefix, lambda ask=ask: blocking(ask, seconds))  # type: ignore[misc]
        objects += page.objects
        folders += page.folders
        if not page.following or page.following == token:
            return _listing(prefix, objects, folders)
        token = page.following


async def next_of(pieces: Any) -> Any:
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


# --- page by page --------------------------------------------------------------------------------------------


class Page(NamedTuple):
    """A part of a listing: objects as obstore describes them, keys of folders, and the token of the next page."""

    objects: list[dict[str, Any]]
    folders: list[str]
    following: str


def _page(prefix: Url, options: Options, seconds: float, token: str, *, deep: bool) -> Page:
    """Return a page of the objects in the directory of `prefix`, or of all below it (`deep`).

    Without `token` the first one. Waits for its store. Raises ShardError, Transient.
    """
    query = {"encoding-type": "url", "list-type": "2", "prefix": prefix.key[: prefix.key.rfind("/") + 1]}
    query |= {} if deep else {"delimiter": "/"}
    query |= {"continuation-token": token} if token else {}
    bucket = prefix._replace(key="")
    try:
        address, headers = store_clients.signed(bucket, options, urlencode(sorted(query.items())), _SIGNED_FOR)
    except answers.OBSTORE_ERRORS as error:
        raise answers.failure(error, prefix) from None
    status, body = store_clients.get_by_urllib(prefix, options, address, headers, seconds, PAGE_MAX)
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
