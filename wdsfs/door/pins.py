"""Pins: the known facts about the object at a URL, so that another object in its place is noticed."""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime
from typing import NamedTuple

from wdsfs.door.urls import Url
from wdsfs.shards import Fingerprint

NO_LENGTH = -1  # in place of the size of an object
SPOOLED = '"spooled-'  # the beginning of ETags that are made from the bytes of objects (`spooled.py`)
_PRINTABLE = re.compile(r"[\x20-\x7e]+")


class Pin(NamedTuple):
    """The identity of an object; each text is "" and the time 0 where the store has none."""

    size: int  # bytes; NO_LENGTH for an answer that does not say it
    mtime_ns: int  # Last-Modified
    etag: str  # with its quotes, and W/ if it is a weak one
    version: str  # version of S3, generation of GCS, commit of a hub

    @property
    def strong_etag(self) -> str:
        """The ETag if it stands for each byte; "" for a weak one, with which If-Match never succeeds."""
        return "" if self.etag.startswith("W/") else self.etag

    @property
    def is_weak(self) -> bool:
        """True if only size and Last-Modified (perhaps a weak ETag) distinguish this object from a later one."""
        return not (self.strong_etag or self.version)

    @property
    def is_blind(self) -> bool:
        """True if at most its size distinguishes this object from another one: all of it has to be fetched."""
        return self.has_no_length or not (self.etag or self.version or self.mtime_ns)

    @property
    def has_no_length(self) -> bool:
        """True if its server does not say how large the object is."""
        return self.size == NO_LENGTH

    @property
    def is_spooled(self) -> bool:
        """True if its store knows no version and no size, so that it is served from the cache only."""
        return self.etag.startswith(SPOOLED)

    @property
    def condition(self) -> dict[str, str]:
        """The header, if there is one, that makes a store refuse a request if the object has been replaced."""
        if _PRINTABLE.fullmatch(self.strong_etag):
            return {"If-Match": self.strong_etag}
        from email.utils import format_datetime  # late: it takes a tenth of the start of a small command

        when = datetime.fromtimestamp(self.mtime_ns // 10**9, UTC)
        return {"If-Unmodified-Since": format_datetime(when, usegmt=True)} if self.mtime_ns else {}

    def fingerprint(self, shown: str) -> Fingerprint:
        """Return the fingerprint of the object at this URL (as it is shown)."""
        text = "\0".join((shown, self.etag, self.version)).encode(errors="surrogateescape")
        identity = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
        return Fingerprint(self.size, self.mtime_ns, identity)

    def difference(self, now: Pin) -> str | None:
        """Return how the pin of an answer, `now`, differs, so that it is of another object; None if it does not.

        An answer may lack fields of the pin (some servers send no ETag with a part), but not all of them: an
        answer that cannot be compared counts as another object.
        """
        if self.size != now.size:
            return f"it has {now.size:,} bytes instead of {self.size:,}"
        facts = [
            ("version", self.version, now.version),
            ("ETag", self.etag, now.etag),
            ("Last-Modified", self.mtime_ns, now.mtime_ns),
        ]
        shared = [(name, ours, theirs) for name, ours, theirs in facts if ours and theirs]
        for name, ours, theirs in shared:
            if ours != theirs:
                return f"it has another {name}"
            if name == "version" or ours == self.strong_etag:
                return None  # servers of one cluster may have different times for the same bytes
        if not shared and any(ours for _, ours, _ in facts):
            return "the answer has neither version nor ETag nor Last-Modified"
        return None


class Listing(NamedTuple):
    """The objects below a prefix by key, and its folders: keys that end in a slash. A deep one has no folders."""

    objects: list[tuple[Url, Pin]]
    folders: list[str]
