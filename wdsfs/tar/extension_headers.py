"""PAX and GNU extension headers, which set fields of the member that follows them."""

from __future__ import annotations

from dataclasses import dataclass, field

from wdsfs.tar.headers import GNU_LINK, GNU_NAME
from wdsfs.tar.problems import Damage

# Semantics decision: bytes of a name or of a link's target, as many as the kernel takes, and folders of a name.
NAME_MAX, DEPTH_MAX = 4095, 256


@dataclass(slots=True)
class Extended:
    """The fields that extension headers set for the next member. `records` are PAX records not applied yet."""

    name: bytes | None = None
    link: bytes | None = None
    size: int | None = None
    mtime: int | None = None
    records: list[tuple[bytes, bytes]] = field(default_factory=list)

    def add(self, kind: int, body: bytes, head: int) -> None:
        """Take in the body of one extension header. Raises Damage, for the member with the head at `head`."""
        if kind == GNU_NAME:
            self.name = body.split(b"\0", 1)[0]
        elif kind == GNU_LINK:
            self.link = body.split(b"\0", 1)[0]
        else:
            self.records += pax_records(body, head)

    def apply(self, records: list[tuple[bytes, bytes]], start: int) -> None:
        """Apply PAX records in their order. Raises Damage, for the extension header at `start`.

        An empty value cancels what was set before it, so that the member's own header counts, as in POSIX.
        """
        sparse_name = None
        for key, value in records:
            if key == b"mtime":
                self.mtime = _nanoseconds(value)
            elif key == b"path":
                self.name = value.rstrip(b"/") or None
            elif key == b"GNU.sparse.name":
                sparse_name = value
            elif key == b"linkpath":
                self.link = value or None
            elif key == b"size":
                try:
                    self.size = int(value) if value else None
                except ValueError:
                    text = f"damaged PAX value for {key!r} in the extension header at offset {start}"
                    raise Damage(start, "damaged", text) from None
        if sparse_name:  # "path" is a made-up name then, for readers that do not know sparse files
            self.name = sparse_name


def unusable(extended: Extended) -> str | None:
    """Return why a name or target is beyond all bounds; None if none is. (Those of a header block never are.)"""
    for text, what in ((extended.name, "name"), (extended.link, "target")):
        if text is not None and len(text) > NAME_MAX:
            return f"its {what} has {len(text):,} bytes, and {NAME_MAX:,} is the most"
    folders = 0 if extended.name is None else extended.name.count(b"/")
    return f"its name has {folders:,} folders, and {DEPTH_MAX} is the most" if folders > DEPTH_MAX else None


def own_name(header: bytes, extended: Extended | None) -> bytes:
    """The name of a member, without the prefix that a ustar header may have."""
    if extended is not None and extended.name is not None:
        return extended.name
    return header[:100].split(b"\0", 1)[0]


def pax_records(body: bytes, position: int) -> list[tuple[bytes, bytes]]:
    """Return the `length key=value` records of a PAX header, in order (keys repeat in the sparse format 0.0).

    Raises Damage for the header that ends at `position`.
    """
    records, start = [], 0
    while start < len(body) and body[start]:
        space = body.find(b" ", start, start + 20)
        digits = body[start:space]
        end = start + int(digits) if space > 0 and digits.isdigit() else -1
        key, equals, value = body[space + 1 : end - 1].partition(b"=")
        if not space < end <= len(body) or not equals or body[end - 1] != 10:
            text = f"damaged PAX record in the extension header that ends at offset {position}"
            raise Damage(position, "damaged", text)
        records.append((key, value))
        start = end
    return records


def _nanoseconds(value: bytes) -> int | None:
    """Return decimal seconds in ns, rounded towards 0; None if the value is not a number.

    A wrong time is no reason to give up the member.
    """
    whole, _, fraction = value.partition(b".")
    try:
        if b"e" in value:  # as Python writes what is close to 0
            ns = int(float(value) * 10**9)
        else:
            ns = int((fraction + b"000000000")[:9])
            seconds = int(whole or (b"0" if fraction else b""))
            ns = seconds * 10**9 + (-ns if whole.startswith(b"-") else ns)
    except (ValueError, OverflowError):
        return None
    return max(min(ns, (1 << 63) - 1), -(1 << 63))
