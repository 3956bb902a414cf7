"""Whole files into stores: as a new object, or in the place of one that is known; and copies inside of a store.
Nothing is ever half there.

Each object is sent by one conditional PUT, from a mapping of its file, so that it takes no memory: multipart
uploads have no condition in obstore (0.12), and without one somebody else's object could be overwritten. Several
objects at a time use the line as well as several parts of one. An upload that breaks leaves nothing.

S3 compares what arrives with the SHA-256 in the signature of the request. Afterwards the ETag is compared with the
MD5 of the file (0.4 GB/s), which it is in S3 (but for SSE-KMS and SSE-C) and in Google's store. Where it differs,
as always in Azure, the object is read back, which is the only proof there.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import mmap
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from wdsfs.errors import MissingObject, ObjectChanged, ObjectExists, UnreadableShard
from wdsfs.remote.urls import Pin, Url

if TYPE_CHECKING:
    from wdsfs.remote.stores import Stores

PIECE = 8 << 20  # bytes that are read back at a time
PIECES = 4  # of them at once


async def upload(stores: Stores, url: Url, file: str, replaces: Pin | None) -> Pin:
    """Put a file into a store, in the place of the pinned object or of none; returns the pin of the new one.

    An object with the same content counts as this one: an answer may have been lost. Raises ShardError, of which
    ObjectExists and ObjectChanged say that another object is there; OSError of the file.
    """
    with _mapped(file) as content:
        digest = await asyncio.to_thread(lambda: hashlib.md5(content, usedforsecurity=False).hexdigest())
        etag = ""
        try:
            etag = await stores.put(url, content, replaces)
        except (ObjectExists, ObjectChanged) as error:
            refused = error
        try:
            pin = await stores.head(url)
        except MissingObject:
            if not etag:
                raise refused from None
            raise ObjectChanged(f"{url}: somebody else has removed it right after it was written") from None
        if etag and pin.etag != etag:
            raise ObjectChanged(f"{url}: somebody else has replaced it right after it was written")
        if await _is_same(stores, url, pin, content, digest):
            return pin
        if not etag:
            raise refused
    raise UnreadableShard(f"{url}: what the store has is not what was sent; remove it, and repeat the command")


async def copy(stores: Stores, url: Url, pin: Pin, target: Url) -> Pin:
    """Have a store copy the pinned object to a place in its bucket where there is none; returns the pin there.

    The copy has no condition on its source, so that is compared before and after. Raises ShardError.
    """
    await _require(stores, url, pin)
    await stores.copy(url, pin.size, target)
    try:
        await _require(stores, url, pin)
        copied = await stores.head(target)
        if copied.size != pin.size:
            raise ObjectChanged(f"{target}: it has {copied.size:,} bytes instead of {pin.size:,}")
    except (ObjectChanged, MissingObject) as error:
        text = f"{target} may be a copy of something else ({error}): remove it, and repeat the command"
        raise UnreadableShard(text) from None
    return copied


async def _require(stores: Stores, url: Url, pin: Pin) -> None:
    """Raise ObjectChanged if there is another object than the pinned one."""
    changed = pin.difference(await stores.head(url))
    if changed:
        raise ObjectChanged(f"{url}: it has been replaced: {changed}")


async def _is_same(stores: Stores, url: Url, pin: Pin, content: mmap.mmap, digest: str) -> bool:
    """Return True if an object has this content, whose MD5 is `digest`."""
    if pin.size != len(content):
        return False
    if pin.etag == f'"{digest}"':
        return True
    for begin in range(0, pin.size, PIECE * PIECES):
        starts = range(begin, min(begin + PIECE * PIECES, pin.size), PIECE)
        same = await asyncio.gather(*(_is_same_piece(stores, url, pin, content, start) for start in starts))
        if not all(same):
            return False
    return True


async def _is_same_piece(stores: Stores, url: Url, pin: Pin, content: mmap.mmap, start: int) -> bool:
    end = min(start + PIECE, pin.size)
    with memoryview(content) as view, view[start:end] as piece:
        return await stores.get(url, pin, start, end) == piece


@contextlib.contextmanager
def _mapped(file: str) -> Iterator[mmap.mmap]:
    """Yield the content of a file, without reading it into memory. Raises OSError."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        content = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    yield content  # not closed: a request that is cancelled may still hold it; it ends with its last user
