"""Which object it is: what a store says of it that is different for any other content at the same URL."""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import NamedTuple

from wdsfs.storage.identity import Fingerprint

SPOOLED = '"spooled-'  # how the ETags begin that we make of the bytes of objects (`spooled_objects.py`)
_PRINTABLE = re.compile(r"[\x20-\x7e]+")


class Pin(NamedTuple):
    """The identity of an object; each text is "" and the time 0 where the store has none."""

    size: int  # bytes
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
        """True if nothing but its size distinguishes this object from another one."""
        return not (self.etag or self.version or self.mtime_ns)

    @property
    def is_spooled(self) -> bool:
        """True if its store says nothing of it, so that it comes from the cache only."""
        return self.etag.startswith(SPOOLED)

    @property
    def condition(self) -> dict[str, str]:
        """The header with which a request is refused when the object is another one by now, if there is one."""
        if _PRINTABLE.fullmatch(self.strong_etag):
            return {"If-Match": self.strong_etag}
        when = datetime.fromtimestamp(self.mtime_ns // 10**9, UTC)
        return {"If-Unmodified-Since": format_datetime(when, usegmt=True)} if self.mtime_ns else {}

    def fingerprint(self, shown: str) -> Fingerprint:
        """The fingerprint of the object at this URL (as it is shown)."""
        text = "\0".join((shown, self.etag, self.version)).encode(errors="surrogateescape")
        identity = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
        return Fingerprint(self.size, self.mtime_ns, identity)

    def difference(self, now: Pin) -> str | None:
        """In what an answer of the store, `now`, is of another object; None when it is of this one.

        An answer may lack what the pin has (some servers send no ETag with a part), but not everything: one that
        cannot be compared counts as another object.
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
