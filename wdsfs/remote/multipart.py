"""Uploads in parts, of objects that are too large for one request; the request that joins them has a condition.

obstore (0.12) makes such uploads without a condition, and gives no access to their steps. So a part is a PUT by
obstore to an address that it has signed, and urllib makes the few small requests that begin, join and abort. Only
the fetcher may import this.

Readers see nothing before the parts are joined. Parts that a kill leaves take room in the store: in S3 until the
upload is aborted, in Azure for a week.
"""

from __future__ import annotations

import base64
import hashlib
import html
import os
import re
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple
from urllib.parse import quote

import obstore

from wdsfs.door.urls import Url
from wdsfs.errors import ObjectChanged, ObjectExists, ShardError
from wdsfs.remote import answers, store_clients
from wdsfs.remote.retries import Transient, blocking
from wdsfs.remote.store_clients import Method, Options
from wdsfs.remote.web_fallback import Answer, send

# The most bytes that Azure accepts in one request; S3 accepts 5 GiB, Google's store whole objects of any size.
WHOLE_MAX = 5_000 << 20
PART = 64 << 20  # bytes, at least, unless the option `part_size` says otherwise
PARTS = 9_000  # at most; S3 has 10,000
AT_ONCE = 4
SMALL_SECONDS = 60.0  # for a request that begins or aborts an upload
_SIGNED_FOR = timedelta(hours=12)
_PARTED = frozenset({"s3", "ais", "az"})
_ID = re.compile(rb"<UploadId>([^<]+)</UploadId>")
_ETAG = re.compile(rb"<ETag>([^<]+)</ETag>")


def part_size(url: Url, size: int, options: Options) -> int | None:
    """Return the size of the parts (bytes) for an object of `size` bytes; None if it is sent in one request."""
    if url.scheme not in _PARTED:
        return None
    chosen = int(float(options.get("part_size", 0)))
    if size <= (chosen or WHOLE_MAX):
        return None
    return max(chosen or PART, -(-size // PARTS))


def digest(content: memoryview, size: int | None) -> str:
    """Return the ETag that S3 gives to this content if it comes in parts of `size` bytes, or in one (None)."""
    if size is None:
        return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'
    starts = range(0, len(content), size)
    sums = [hashlib.md5(content[start : start + size], usedforsecurity=False).digest() for start in starts]
    return f'"{hashlib.md5(b"".join(sums), usedforsecurity=False).hexdigest()}-{len(sums)}"'


class Upload(NamedTuple):
    """An upload in parts that has begun; `id` is that of the store, or the start of the names of its blocks."""

    url: Url
    options: Options
    id: str

    @classmethod
    async def begin(cls, url: Url, options: Options) -> Upload:
        """Begin an upload. Raises ShardError, Transient."""
        if url.scheme == "az":
            return cls(url, options, os.urandom(8).hex())
        status, _, body = await _ask(url, options, "POST", "uploads=", {}, b"", SMALL_SECONDS)
        upload = _ID.search(body)
        if status != 200 or upload is None:
            raise _failure(url, status, body)
        return cls(url, options, html.unescape(upload[1].decode()))

    async def put(self, number: int, content: memoryview, seconds: float) -> str:
        """Send a part, the first is 0; return its ETag, which Azure does not give. Raises as obstore does."""
        query = f"partNumber={number + 1}&uploadId={quote(self.id, safe='')}"
        if self.url.scheme == "az":
            query = f"comp=block&blockid={quote(self._block(number), safe='')}"
        address, headers = await blocking(partial(_signed, self.url, self.options, "PUT", query), SMALL_SECONDS)
        options = {**self.options, "timeout": str(seconds), "total_time": str(seconds)}
        client = store_clients.web_store(address, options, headers)
        done = await obstore.put_async(client, "", content, use_multipart=False)
        return done["e_tag"] or ""

    async def join(self, etags: Sequence[str], condition: dict[str, str], seconds: float) -> str:
        """Make an object of the parts, on this condition; return its ETag. Raises ShardError, Transient."""
        if self.url.scheme == "az":
            names = "".join(f"<Uncommitted>{self._block(number)}</Uncommitted>" for number in range(len(etags)))
            text = f'<?xml version="1.0" encoding="utf-8"?><BlockList>{names}</BlockList>'
            method: Method = "PUT"
            query = "comp=blocklist"
        else:
            parts = (
                f"<Part><PartNumber>{number}</PartNumber><ETag>{html.escape(etag)}</ETag></Part>"
                for number, etag in enumerate(etags, 1)
            )
            text = f"<CompleteMultipartUpload>{''.join(parts)}</CompleteMultipartUpload>"
            method, query = "POST", f"uploadId={quote(self.id, safe='')}"
        headers = {**condition, "Content-Type": "application/xml"}
        status, named, body = await _ask(self.url, self.options, method, query, headers, text.encode(), seconds)
        if status == 412 and "If-None-Match" in condition:
            status = 409
        tag = _ETAG.search(body)
        if status not in (200, 201) or b"<Error>" in body:  # S3 may say 200 before it knows
            raise _failure(self.url, status, body)
        etag = html.unescape(tag[1].decode("latin-1")) if tag else named.get("etag", "")
        return answers.etag_of({"e_tag": etag})

    async def abort(self) -> None:
        """Tell the store to drop the parts. Azure does so by itself after a week. Raises ShardError, Transient."""
        if self.url.scheme != "az":
            query = f"uploadId={quote(self.id, safe='')}"
            status, _, body = await _ask(self.url, self.options, "DELETE", query, {}, b"", SMALL_SECONDS)
            if status not in (200, 204, 404):
                raise _failure(self.url, status, body)

    def _block(self, number: int) -> str:
        return base64.b64encode(f"{self.id}{number:08}".encode()).decode()


async def _ask(
    url: Url, options: Options, method: Method, query: str, headers: dict[str, str], body: bytes, seconds: float
) -> Answer:
    def work() -> Answer:
        address, access = _signed(url, options, method, query)
        return send(url, options, address, {**access, **headers}, method, body, seconds)

    return await blocking(work, seconds)


def _failure(url: Url, status: int, body: bytes) -> ShardError | Transient:
    text = body.decode("latin-1")
    if status == 412:
        return answers.condition_failed(url)
    if status == 409:
        return ObjectExists(f"{url}: exists already")
    if status == 404:
        return ObjectChanged(
            f"{url}: its upload in parts was aborted by another program, or its bucket is removed"
        )
    return answers.of_status(500 if status < 300 else status, text, url)


def _signed(url: Url, options: Options, method: Method, query: str) -> tuple[str, dict[str, str]]:
    """Return an address at which a request may be made, its signature in it, and the headers for it.

    May wait for servers that give credentials. Raises ShardError, Transient.
    """
    try:
        return store_clients.signed(url, options, method, query, _SIGNED_FOR)
    except answers.OBSTORE_ERRORS as error:
        raise answers.failure(error, url) from None
