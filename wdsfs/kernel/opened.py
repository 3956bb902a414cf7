"""An image and its shards as open files, checked: the shards are what the image was made over."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Sequence
from typing import NamedTuple

from wdsfs import trust
from wdsfs.errors import MissingShard, MountError, StaleShard, UnreadableShard, several
from wdsfs.kernel import copies
from wdsfs.kernel.manifest import Device, Manifest


class OpenDevice(NamedTuple):
    """A shard of an image, or the image: its path on this machine, a descriptor of what the kernel reads, and the
    path of that if it is a copy."""

    path: bytes
    fd: int
    copy: str = ""

    @property
    def file(self) -> bytes:
        """The path of what the kernel reads."""
        return os.fsencode(self.copy) or self.path


def open_devices(manifest: Manifest, base: bytes, trusting: bool) -> list[OpenDevice]:
    """Open the shards of an image, relative paths below `base`; the caller closes them.

    A shard has to have the size and the time that it had. `trusting`: the size alone, for copies that have got
    other times. What the kernel reads in the place of a shard has to be as it was made, of the shard that is there
    now. Raises MissingShard, UnreadableShard, StaleShard, MountError.
    """
    found: list[OpenDevice] = []
    try:
        for device in manifest.devices:
            found.append(_opened(device, os.fsdecode(base)))
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
    try:
        trust.content(path, trust.behind_sudo())
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
    changed = [os.fsdecode(one.path) for one, device in pairs if not _is_same(one, device, trusting)]
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


def _opened(device: Device, base: str) -> OpenDevice:
    path = device.shard(base)
    if device.copy is None:
        return OpenDevice(os.fsencode(path), _open(os.fsencode(path)))
    return OpenDevice(os.fsencode(path), _open_copy(path, device.copy.path), device.copy.path)


def _open_copy(shard: str, path: str) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise StaleShard(
            f"{shard}: its copy in the cache cannot be opened: {error.strerror}; repeat the command"
        ) from None
    _refuse_irregular(path, fd)
    with contextlib.suppress(BlockingIOError):  # eviction has locked it; the kernel holds it once it is mounted
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return fd


def _open(path: bytes) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise MissingShard(
            f"{os.fsdecode(path)}: there is no such shard; --base DIR says where the shards of an image are"
        ) from None
    except OSError as error:
        raise UnreadableShard(f"{os.fsdecode(path)}: {error.strerror}") from None
    _refuse_irregular(os.fsdecode(path), fd)
    try:
        refusal = trust.foreign_link(path, fd)
    except OSError as error:
        os.close(fd)
        raise UnreadableShard(f"{os.fsdecode(path)}: {error.strerror}") from None
    if refusal is not None:
        os.close(fd)
        raise MountError(refusal)
    return fd


def _refuse_irregular(path: str, fd: int) -> None:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise MountError(f"{path}: is no regular file")


def _is_same(one: OpenDevice, device: Device, trusting: bool) -> bool:
    if device.copy is not None:
        return copies.is_sound(one.fd, device.copy) and copies.is_of(os.fsdecode(one.path), one.copy)
    found = os.fstat(one.fd)
    return found.st_size == device.size and (trusting or found.st_mtime_ns == device.mtime_ns)
