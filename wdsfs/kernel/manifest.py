"""What an image says of its shards: a manifest behind its last block, which the kernel never looks at.

The manifest is JSON, followed by a footer of 24 bytes: the size of the JSON, its CRC-32, and a magic number. It
has the path, size and mtime of each device, in the order of the device table. The path of a shard below the *base*
of the image is relative to it; the base is the directory of the image unless another one is given.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from typing import Any, NamedTuple

from wdsfs.errors import MALFORMED, MountError
from wdsfs.kernel import erofs
from wdsfs.storage.held_files import HeldFile

FORMAT = 2
_FOOTER = struct.Struct("<QI4x8s")
_MAGIC = b"wdsfs-i\n"
_SIZE_MAX = 1 << 28  # bytes of JSON; a million shards take a hundred megabytes


class Device(NamedTuple):
    """A shard of an image: its path, size (bytes) and mtime (ns) when the image was made.

    `copy` is what the kernel reads in its place, of a shard that is no plain tar of this machine.
    """

    path: str
    size: int
    mtime_ns: int
    copy: HeldFile | None = None

    def shard(self, base: str) -> str:
        """The absolute path of the shard, in an image whose relative ones are below `base`; or its URL."""
        is_url = "://" in self.path  # which no path has here: they are without empty parts
        return self.path if is_url else os.path.normpath(os.path.join(base, self.path))


class ImageSet(NamedTuple):
    """The set that an image was made of, for those who open it by the index.

    `shards` are the names of the shards at the top of the tree; they are the first devices, in this order.
    `without` are the keys of the samples that are left out, by these names. `reading` is how all are read, as
    options. `labels` are the files that the options name besides shards; one that was not there has no size.
    Relative paths in the options are below `directory`, which is relative to the base.
    """

    shards: list[str]
    reading: dict[str, bool]
    without: dict[str, list[str]]
    labels: list[Device]
    directory: str


class Manifest(NamedTuple):
    """The shards of an image, and how it shows them: the options as text, and the oldest kernel it is for.

    `key` is what it is known by if it was made for a mount (`kept.py`).
    """

    devices: list[Device]
    layout: str
    names: str
    merge: bool
    index_tree: bool
    composition: str
    since: str
    set: ImageSet
    key: str = ""

    def base(self, image: str | bytes) -> str:
        """The directory that paths are relative to, if shards are where they were beside the image at this path.

        In an image that was made for a mount it is the root directory.
        """
        return "/" if self.key else os.fsdecode(os.path.dirname(image))

    def paths(self, image: str | bytes) -> list[str]:
        """The paths of all shards, if they are where they were beside the image at the path `image`."""
        base = self.base(image)
        return [one.shard(base) for one in self.devices]

    def encoded(self) -> bytes:
        """The bytes behind the last block of an image."""
        devices = [_fields(one) for one in self.devices]
        shown = {**self.set._asdict(), "labels": list(map(_fields, self.set.labels))}
        fields = {"format": FORMAT, **self._asdict(), "devices": devices, "set": shown}
        text = json.dumps(fields, separators=(",", ":")).encode()
        return text + _FOOTER.pack(len(text), zlib.crc32(text), _MAGIC)


def is_image(path: str | bytes) -> bool:
    """True if this file is an image that wdsfs has made, whole or not."""
    try:
        with open(path, "rb", opener=_open_plainly) as file:
            file.seek(erofs.SUPER_OFFSET)
            return erofs.is_ours(file.read(erofs.SUPER_SIZE))
    except OSError:
        return False


def _open_plainly(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not block


def read(path: str | bytes) -> Manifest:
    """The manifest of an image. Raises MountError if it has none, or a damaged one."""
    name = os.fsdecode(path)
    try:
        with open(path, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(end - _FOOTER.size, 0))
            footer = file.read()
            size, checksum, magic = _FOOTER.unpack(footer) if len(footer) == _FOOTER.size else (0, 0, b"")
            text = b""
            if magic == _MAGIC and size <= min(end - _FOOTER.size, _SIZE_MAX):
                file.seek(end - _FOOTER.size - size)
                text = file.read(size)
    except OSError as error:
        raise MountError(f"{name}: {error.strerror}") from None
    if not text or zlib.crc32(text) != checksum:
        raise MountError(f"{name}: the image is not whole; make it anew with: wdsfs image")
    try:
        found: dict[str, Any] = json.loads(text)
        if found.pop("format") != FORMAT:
            raise MountError(f"{name}: an image of another version of wdsfs; make it anew with: wdsfs image")
        of_set, devices = found.pop("set"), found.pop("devices")
        return Manifest(
            **found,
            devices=[_device(**one) for one in devices],
            set=_set(**of_set),
        )
    except MALFORMED:  # somebody else's work
        raise MountError(f"{name}: the image was not made by wdsfs") from None


def _fields(device: Device) -> dict[str, Any]:
    return {name: value for name, value in device._asdict().items() if value is not None}


def _device(copy: list[Any] | None = None, **rest: Any) -> Device:
    return Device(**rest, copy=None if copy is None else HeldFile(*copy))


def _set(labels: list[Any], **rest: Any) -> ImageSet:
    return ImageSet(**rest, labels=[_device(**one) for one in labels])


def stored_path(path: bytes, base: bytes) -> str:
    """A path of a shard as the manifest has it."""
    path, base = os.path.abspath(path), os.path.abspath(base)
    below = base.rstrip(b"/") + b"/"
    return os.fsdecode(path.removeprefix(below) if path.startswith(below) else path)
