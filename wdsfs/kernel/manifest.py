"""The manifest of an image file: its shards, options and identity; and where that image is mounted.

The manifest is JSON behind the last block, where the kernel does not look, followed by a footer of 24 bytes: the
size of the JSON, its CRC-32, and a magic number. It has the path, size and mtime of each device, in the order of
the device table. The path of a shard below the *base* of the image is relative to it; the base is the directory of
the image unless another one is given.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from typing import Any, NamedTuple

from wdsfs import host
from wdsfs.errors import MALFORMED, MountError
from wdsfs.formats import Format, OtherVersion
from wdsfs.kernel import erofs_header
from wdsfs.mount_table import MountPoint
from wdsfs.tree.set_options import Owner

IMAGE = Format("an image", (3,), "make it again with `wdsfs image`, or use the wdsfs that wrote it")
_FOOTER = struct.Struct("<QI4x8s")
_FOOTER_MAGIC = b"wdsfs-i\n"
_SIZE_MAX = 1 << 28  # bytes of JSON; a million shards take a hundred megabytes
# The reason for refusing an image of an earlier release whose devices are copies of shards in the cache.
_OF_COPIES = (
    "is over copies of compressed or remote shards, which FUSE serves now; unmount it, and mount the shards "
    "themselves: wdsfs mount SHARDS... MOUNTPOINT"
)
_SHOWN_SINCE = (6, 12)  # kernels whose statfs shows the identity of an image


class ImageOptions(NamedTuple):
    """The options of an image.

    `owner` has owner and umask of all files of the image. Paths of shards below `base` are relative to `base`
    (None: all are absolute). `since` is the oldest kernel that can mount the image. `composition` is the text of
    the options of a view. Relative paths in it begin in `directory`. Only the owner can enter a `private` image.
    `key` is the key of an image in the cache, and distinguishes files of the same size and time.
    """

    owner: Owner
    base: bytes | None
    since: tuple[int, int]
    merge: bool
    composition: str
    private: bool = False
    directory: bytes | None = None
    key: str = ""


class Device(NamedTuple):
    """A shard of an image: its path, size (bytes) and mtime (ns) when the image was made."""

    path: str
    size: int
    mtime_ns: int

    def shard(self, base: str) -> str:
        """Return the absolute path (a relative one is below `base`), or the URL of a label file."""
        is_url = "://" in self.path  # no path has one here: paths are without empty parts
        return self.path if is_url else os.path.normpath(os.path.join(base, self.path))


class ImageSet(NamedTuple):
    """The set of an image, for programs that open the set by the index.

    `shards` are the names of the shards at the top of the tree, which are the first devices, in this order.
    `without` are the keys of the left-out samples, by name of the shard. `reading` has the options by which all
    shards are read. `labels` are the files that the options name besides shards; a missing file has no size.
    Relative paths in the options are below `directory`, which may be relative to the base.
    """

    shards: list[str]
    reading: dict[str, bool]
    without: dict[str, list[str]]
    labels: list[Device]
    directory: str


class Manifest(NamedTuple):
    """The shards of an image, and how it shows them: the options as text, and the oldest kernel it is for.

    Only images of earlier releases have links by number (`index_tree`).
    """

    devices: list[Device]
    layout: str
    names: str
    merge: bool
    index_tree: bool
    composition: str
    since: str
    set: ImageSet

    def options(self) -> dict[str, Any]:
        """Return the form in which the image shows its set, in the words of reports and registrations."""
        return {name: getattr(self, name) for name in ("layout", "names", "merge", "index_tree", "composition")}

    def paths(self, image: str | bytes) -> list[str]:
        """Return the paths of all shards, if they still have the same places relative to the image at `image`."""
        return [device.shard(os.fsdecode(os.path.dirname(image))) for device in self.devices]

    def encoded(self) -> bytes:
        """Return the bytes behind the last block of an image."""
        devices = [device._asdict() for device in self.devices]
        shown = {**self.set._asdict(), "labels": [label._asdict() for label in self.set.labels]}
        fields = {"format": IMAGE.version, **self._asdict(), "devices": devices, "set": shown}
        text = json.dumps(fields, separators=(",", ":")).encode()
        return text + _FOOTER.pack(len(text), zlib.crc32(text), _FOOTER_MAGIC)


def read_manifest(path: str | bytes) -> Manifest:
    """Return the manifest of an image. Raises MountError if it has none, or one that cannot be used."""
    name = os.fsdecode(path)
    try:
        with open(path, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(end - _FOOTER.size, 0))
            footer = file.read()
            size, checksum, magic = _FOOTER.unpack(footer) if len(footer) == _FOOTER.size else (0, 0, b"")
            text = b""
            if magic == _FOOTER_MAGIC and size <= min(end - _FOOTER.size, _SIZE_MAX):
                file.seek(end - _FOOTER.size - size)
                text = file.read(size)
    except OSError as error:
        raise MountError(f"{name}: {error.strerror}") from None
    if not text or zlib.crc32(text) != checksum:
        raise MountError(f"{name}: the image is incomplete; make it again with: wdsfs image")
    try:
        fields: dict[str, Any] = json.loads(text)
        IMAGE.check(fields.pop("format"))
        rows, shown = fields.pop("devices"), fields.pop("set")
        if any("copy" in row for row in rows):
            raise MountError(f"{name}: {_OF_COPIES}")
        labels = [Device(**row) for row in shown.pop("labels")]
        return Manifest(**fields, devices=[Device(**row) for row in rows], set=ImageSet(**shown, labels=labels))
    except OtherVersion as error:
        raise MountError(f"{name} {error}") from None
    except MALFORMED:  # not written by wdsfs
        raise MountError(f"{name}: the image was not made by wdsfs") from None


def stored_path(path: bytes, base: bytes | None) -> str:
    """Return a path of a shard as the manifest has it."""
    path = os.path.abspath(path)
    return os.fsdecode(path if base is None else path.removeprefix(os.path.abspath(base).rstrip(b"/") + b"/"))


# --- images and their mounts


def is_image(path: str | bytes) -> bool:
    """Return True if this file is an image that wdsfs has made, whole or not."""
    try:
        return _identity(path) is not None
    except OSError:
        return False


def identity_of(image: str | bytes) -> str:
    """Return the identity of an image, in hexadecimal digits: the same for the same shards and options.

    Raises MountError, OSError.
    """
    identity = _identity(image)
    if identity is None:
        raise MountError(f"{os.fsdecode(image)}: is not an image of wdsfs")
    return identity.hex()


def _identity(path: str | bytes) -> bytes | None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not block
    try:
        return erofs_header.identity(os.pread(fd, erofs_header.SUPER_SIZE, erofs_header.SUPER_OFFSET))
    finally:
        os.close(fd)


def is_mounted_at(identity: str, mountpoint: str) -> bool | None:
    """Return True if the image with this identity is mounted at this path; None where the kernel hides that."""
    if host.kernel_version() < _SHOWN_SINCE:
        return None
    raw = bytes.fromhex(identity)
    number = int.from_bytes(raw[:8], "little") ^ int.from_bytes(raw[8:], "little")
    return os.statvfs(mountpoint).f_fsid == number


def image_of(mount: MountPoint) -> bytes | None:
    """Return the path of the image of a mount, which an earlier release may have put below an overlay.

    None if that is not an image of wdsfs.
    """
    if mount.fstype not in ("erofs", "overlay"):
        return None
    path = mount.source
    if path.startswith(b"/dev/loop"):
        try:
            with open(b"/sys/block/" + os.path.basename(path) + b"/loop/backing_file", "rb") as file:
                path = file.read().removesuffix(b"\n")
        except OSError:
            return None
    return path if path.startswith(b"/") and is_image(path) else None  # those of others are called "overlay"
