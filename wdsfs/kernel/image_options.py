"""The options of an image, apart from what makes it and takes long to load: a mount of a kept one needs them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from wdsfs.owner import Owner
from wdsfs.storage.held_files import HeldFile


class ImageOptions(NamedTuple):
    """How an image is made: owner and umask of everything in it, the directory that paths of shards are relative
    to, and the oldest kernel that it is for. `composition` is the text of the options of a view. Nobody but the
    owner can enter a `private` one. `key` is for the manifest. `writable`: for an overlay above it, with modes
    that let the owner write. `copies`, by path, are what the kernel is to read in the place of shards. Relative
    paths in `composition` are of `directory`."""

    owner: Owner
    base: bytes
    since: tuple[int, int]
    merge: bool
    composition: str
    private: bool = False
    key: str = ""
    writable: bool = False
    copies: Mapping[bytes, HeldFile] = MappingProxyType({})
    directory: bytes | None = None
