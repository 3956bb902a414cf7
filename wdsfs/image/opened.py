"""The shards of an image as open files, checked: they are what the image was made over."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from typing import NamedTuple

from wdsfs.errors import MissingShard, MountError, StaleShard, UnreadableShard, several
from wdsfs.image.manifest import Device, Manifest


class OpenDevice(NamedTuple):
    """A shard of an image: its path on this machine, and its descriptor."""

    path: bytes
    fd: int


def open_devices(manifest: Manifest, base: bytes, trusting: bool) -> list[OpenDevice]:
    """Open the shards of an image, relative paths below `base`; the caller closes them.

    A shard has to have the size and the time that it had. `trusting`: the size alone, for copies that have got
    other times. Raises MissingShard, UnreadableShard, StaleShard, MountError.
    """
    found: list[OpenDevice] = []
    try:
        for device in manifest.devices:
            path = os.path.join(base, os.fsencode(device.path))
            found.append(OpenDevice(path, _open(path)))
        check_devices(found, manifest, trusting)
    except BaseException:
        close_devices(found)
        raise
    return found


def check_devices(devices: Sequence[OpenDevice], manifest: Manifest, trusting: bool) -> None:
    """Raise StaleShard unless these are the shards of the image, as `open_devices` has it."""
    pairs = zip(devices, manifest.devices, strict=True)
    changed = [os.fsdecode(one.path) for one, device in pairs if not _is_same(one.fd, device, trusting)]
    if changed:
        hint = "" if trusting else "; or, if they are copies of the same shards, mount with --trust-shards"
        raise StaleShard(
            f"not as they were when the image was made: {several(changed)}; make the image anew with: wdsfs "
            f"image{hint}"
        )


def close_devices(devices: Sequence[OpenDevice]) -> None:
    """Close them all."""
    for one in devices:
        os.close(one.fd)


def _open(path: bytes) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise MissingShard(
            f"{os.fsdecode(path)}: there is no such shard; --base DIR says where the shards of an image are"
        ) from None
    except OSError as error:
        raise UnreadableShard(f"{os.fsdecode(path)}: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise MountError(f"{os.fsdecode(path)}: is no regular file")
    return fd


def _is_same(fd: int, device: Device, trusting: bool) -> bool:
    found = os.fstat(fd)
    return found.st_size == device.size and (trusting or found.st_mtime_ns == device.mtime_ns)
