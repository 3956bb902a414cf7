"""An image and its shards as open files, checked: the shards are what the image was made over."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from typing import NamedTuple

from wdsfs import trust
from wdsfs.errors import MissingShard, MountError, StaleShard, UnreadableShard, several
from wdsfs.image.manifest import Device, Manifest


class OpenDevice(NamedTuple):
    """A shard of an image, or the image: its path on this machine, and its descriptor."""

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


def open_image(path: str) -> OpenDevice:
    """Open an image that other users can neither write nor replace; the caller closes it. Raises MountError.

    Semantics decision: the kernel believes what an image says, and an image says which files of this machine are
    shown. A user who has typed `sudo` is trusted with that, for it could be done in any case.
    """
    user = os.environ.get("SUDO_UID", "")
    try:
        trust.content(path, int(user) if user.isdecimal() else None)
        return OpenDevice(os.fsencode(path), os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except trust.Untrusted as error:
        raise MountError(f"{path}: can show any file, so it has to be in safe hands: {error.strerror}") from None
    except OSError as error:
        raise MountError(f"{path}: {error.strerror}") from None


def check_image(image: OpenDevice) -> None:
    """Raise StaleShard if another file is at the path of an image by now: the kernel may have opened that one."""
    try:
        is_same = os.path.samestat(os.fstat(image.fd), os.stat(image.path))
    except OSError:
        is_same = False
    if not is_same:
        raise StaleShard(f"{os.fsdecode(image.path)}: was replaced meanwhile; type the command again")


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
