"""Uploads to stores, and copies within one, each on the condition that nobody else has written there meanwhile.

Each object is sent by one conditional PUT, from a mapping of its file, so that it takes no memory. Several objects
at a time use the line as well as several parts of one, and an upload that breaks leaves nothing. An object that is
too large for one request goes in parts. For parts obstore (0.12) has no condition: the place is checked before the
first part and before the last one, and the ETag afterwards. An object that another program writes there while the
last parts are on their way is replaced.

S3 compares the content with the SHA-256 in the signature of the request. Afterwards the ETag is compared with the
MD5 of the file (0.4 GB/s), or that of its parts, which it is in S3 (but for SSE-KMS and SSE-C) and in Google's
store. Where it differs, as always in Azure, the object is read back: the only proof there.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import mmap
import os
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import obstore
from obstore.store import ObjectStore

from wdsfs.door.pins import Pin
from wdsfs.door.urls import Url
from wdsfs.errors import MissingObject, NoRanges, ObjectChanged, ObjectExists, UnreadableShard
from wdsfs.remote import answers, settings
from wdsfs.remote.answers import require_same, require_size
from wdsfs.remote.store_reader import StoreReader
from wdsfs.remote.store_requests import StoreRequests

if TYPE_CHECKING:  # obstore has these for checkers only
    from obstore import PutMode, PutResult

# The most bytes that Azure accepts in one request; S3 accepts 5 GiB, Google's store whole objects of any size.
WHOLE_MAX = 5_000 << 20
PART = 64 << 20  # bytes, at least, unless the option `part_size` says otherwise
PARTS = 9_000  # at most; S3 has 10,000
PARTS_AT_ONCE = 4
PART_RETRIES = 10  # of a part, by obstore: a whole upload is not repeated for one of its parts
READ_BACK, READ_BACK_AT_ONCE = 8 << 20, 4  # bytes of a sent object that are read back at a time; pieces at once
ABORT_SECONDS = 5.0  # how long the end of the process waits for uploads that are being aborted
_IN_PARTS = frozenset({"s3", "ais", "az"})


class StoreSender:
    """Writes objects of all stores for one process."""

    def __init__(self, requests: StoreRequests, reader: StoreReader) -> None:
        self._requests, self._reader = requests, reader
        self._in_parts: set[asyncio.Future[PutResult]] = set()  # uploads that obstore is at

    async def upload(self, url: Url, file: str, replaces: Pin | None) -> Pin:
        """Put a file into a store, in the place of the pinned object or of none; return the pin of the new one.

        An object with the same content counts as this one: an answer may have been lost. Raises ShardError, of
        which ObjectExists and ObjectChanged say that another object is there; OSError of the file.
        """
        content = _mapped(file)
        part = part_size(url, len(content), self._requests.options(url))
        digest = await asyncio.to_thread(digest_of, memoryview(content), part)
        refusal, etag = None, ""
        try:
            etag = await self._send(url, content, part, replaces)
        except (ObjectExists, ObjectChanged, MissingObject) as error:
            refusal = error
        try:
            pin = await self._reader.head(url)
        except MissingObject:
            text = f"{url}: another program has removed it right after it was written"
            raise refusal or ObjectChanged(text) from None
        if refusal is None and pin.etag != etag:
            raise ObjectChanged(f"{url}: another program has replaced it right after it was written")
        if pin.size == len(content) and (pin.etag == digest or await self._has(url, pin, content)):
            return pin
        raise refusal or UnreadableShard(
            f"{url}: the store has other bytes than were sent; remove it, and repeat the command"
        )

    async def _send(self, url: Url, content: mmap.mmap, part: int | None, replaces: Pin | None) -> str:
        """Send an object, in parts of `part` bytes if there is such a size; return its ETag.

        An answer may be lost.
        """
        seconds = self._seconds(url, len(content))

        async def attempt() -> str:
            if part is None:
                sent = await self._put(url, content, replaces, seconds)
            else:
                sent = await self._put_parts(url, memoryview(content), part, replaces, seconds)
            return answers.etag_of(sent)

        return await self._requests.repeat(url, attempt, seconds)

    async def _put(self, url: Url, content: mmap.mmap, replaces: Pin | None, seconds: float) -> PutResult:
        client, path = await self._requests.client(url, seconds)
        mode: PutMode = "create"
        if replaces is not None:
            meta = await self._require_place(url, client, path, replaces)
            assert meta is not None
            mode = {"e_tag": meta["e_tag"]}
            if meta["version"]:  # by which Google's store knows it
                mode["version"] = meta["version"]
        sent = obstore.put_async(client, path, content, mode=mode, use_multipart=False)
        return await self._requests.answer_of(url, sent, seconds=seconds)

    async def _put_parts(
        self, url: Url, content: memoryview, size: int, replaces: Pin | None, seconds: float
    ) -> PutResult:
        """Send an object in parts. After a failure obstore drops sent parts; after a kill the store keeps them."""
        client, path = await self._requests.client(url, self._seconds(url, size), PART_RETRIES)
        await self._require_place(url, client, path, replaces)
        is_given_up = False

        async def parts() -> AsyncIterator[memoryview]:
            for begin in range(0, len(content), size):
                if is_given_up:  # only an error has obstore drop the parts
                    raise ObjectChanged(f"{url}: its upload is given up")
                if begin + size >= len(content):
                    await self._require_place(url, client, path, replaces)
                yield content[begin : begin + size]

        sending = asyncio.ensure_future(
            obstore.put_async(
                client, path, parts(), use_multipart=True, chunk_size=size, max_concurrency=PARTS_AT_ONCE
            )
        )
        self._in_parts.add(sending)
        sending.add_done_callback(self._end_parts)
        try:
            return await self._requests.answer_of(url, asyncio.shield(sending), seconds=seconds)
        finally:
            is_given_up = True

    def _end_parts(self, sending: asyncio.Future[PutResult]) -> None:
        self._in_parts.discard(sending)
        if not sending.cancelled():
            sending.exception()  # which nobody may wait for any more

    async def _require_place(self, url: Url, client: ObjectStore, path: str, replaces: Pin | None) -> Any:
        """Return obstore's metadata of the object that will be replaced. Raises ObjectExists, ObjectChanged."""
        try:
            meta = await self._requests.answer_of(url, obstore.head_async(client, path))
        except MissingObject:
            if replaces is None:
                return None
            raise ObjectChanged(f"{url}: it is gone") from None
        if replaces is None:
            raise ObjectExists(f"{url}: exists already")
        require_same(url, replaces, answers.pin_of(meta))
        return meta

    async def _has(self, url: Url, pin: Pin, content: mmap.mmap) -> bool:
        """Read an object back; return True if it has this content."""

        async def has_piece(start: int) -> bool:
            end = min(start + READ_BACK, pin.size)
            with memoryview(content) as view, view[start:end] as piece:
                return await self._reader.get(url, pin, start, end) == piece

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
        if url.scheme in ("s3", "ais") and pin.size > WHOLE_MAX:
            raise NoRanges(f"{url}: is too large for its store to copy at once")
        require_same(url, pin, await self._reader.head(url))
        seconds = self._seconds(target, pin.size)

        async def attempt() -> None:
            client, _ = await self._requests.client(target, seconds)
            copied = obstore.copy_async(client, url.key, target.key, overwrite=False)
            await self._requests.answer_of(target, copied, seconds=seconds)

        await self._requests.repeat(target, attempt, seconds)
        try:
            require_same(url, pin, await self._reader.head(url))
            copied = await self._reader.head(target)
            require_size(target, pin.size, copied.size)
        except (ObjectChanged, MissingObject) as error:
            text = f"{target} may be a copy of another object ({error}): remove it, and repeat the command"
            raise UnreadableShard(text) from None
        return copied

    def _seconds(self, url: Url, size: int) -> float:
        """Return the seconds that a request may take whose answer comes after `size` bytes are sent or copied."""
        pace = settings.pace(self._requests.options(url), settings.LOWEST_RATE_OF_UPLOADS)
        # Few timeouts, as each needs a client of its own.
        return pace.silence + 2.0 ** math.ceil(math.log2(1 + size / pace.rate))

    async def end(self) -> None:
        """Wait a while for obstore to drop the parts of uploads that were given up."""
        if self._in_parts:
            await asyncio.wait(self._in_parts, timeout=ABORT_SECONDS)


def part_size(url: Url, size: int, options: dict[str, str]) -> int | None:
    """Return the size of the parts (bytes) for an object of `size` bytes; None if it is sent in one request."""
    if url.scheme not in _IN_PARTS:
        return None
    chosen = int(float(options.get("part_size", 0)))
    if size <= (chosen or WHOLE_MAX):
        return None
    return max(chosen or PART, -(-size // PARTS))


def digest_of(content: memoryview, part: int | None) -> str:
    """Return the ETag that S3 gives to this content if it comes in parts of `part` bytes, or in one (None)."""
    if part is None:
        return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'
    starts = range(0, len(content), part)
    sums = [hashlib.md5(content[start : start + part], usedforsecurity=False).digest() for start in starts]
    return f'"{hashlib.md5(b"".join(sums), usedforsecurity=False).hexdigest()}-{len(sums)}"'


def _mapped(file: str) -> mmap.mmap:
    """Return the content of a file, without reading it into memory. Raises OSError.

    Not to be closed: a request that is cancelled may still hold it, and the last user ends it.
    """
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
