"""wdsfs: WebDataset shards as directories that a mount shows, and as a library without a mount.

The names in `__all__` are public, nothing else of the package is. They are loaded at their first use. Slow imports
do not belong here: an interrupt gives a traceback until `__main__` runs, which Python imports after this.

Beside the rooms (packages) lie the modules of the ground, which every room may use. Errors and formats:
`errors.py` (each error with its errno and exit code), `formats.py`. Shards: `names.py` splits names into key and
extension, escapes odd names, and knows names that programs leave. `shards.py` tells whether a file is the same.
`inodes.py` has the layout of the inode number. Bytes: a shard is read through a `TarBytes` (`source.py`); a
durable file (`durable.py`) is whole after a crash, or not there at all. The machine: `host.py` (its limits, and
where our directories go), `mount_table.py` (the kernel's mounts), `mount_users.py` (processes that keep one busy),
`mount_registry.py` (live mounts), `trust.py` (users that may have written a path), `waits.py`, `log_lines.py`.
Commands and their processes: `shared_settings.py`, `daemon_threads.py`, `wings.py` (rooms and libraries that may
be missing), `cluster_workers.py`, for which `executors.py` opens an engine.
"""

from __future__ import annotations

import sys
from types import ModuleType

TYPE_CHECKING = False  # of `typing`, whose import takes 10 ms
if TYPE_CHECKING:
    from typing import Any

    from wdsfs.errors import (
        CorruptShard,
        DecodeError,
        EntryError,
        MissingShard,
        NoSuchEntry,
        ShardError,
        SpecError,
        StaleShard,
        UnreadableShard,
        UsageError,
        ViewError,
        WdsfsError,
    )
    from wdsfs.library.files import Tree, tree
    from wdsfs.library.prefetch import prefetch
    from wdsfs.library.samples import Samples, decode, samples, table
    from wdsfs.library.shuffle import Mix, Shuffle
    from wdsfs.library.temporary_mount import mount

__version__ = "1.0.0rc1"
__all__ = [
    "CorruptShard",
    "DecodeError",
    "EntryError",
    "MissingShard",
    "Mix",
    "NoSuchEntry",
    "Samples",
    "ShardError",
    "Shuffle",
    "SpecError",
    "StaleShard",
    "Tree",
    "UnreadableShard",
    "UsageError",
    "ViewError",
    "WdsfsError",
    "decode",
    "mount",
    "prefetch",
    "samples",
    "table",
    "tree",
]

_OF_LIBRARY = {
    **dict.fromkeys(("Samples", "decode", "samples", "table"), "samples"),
    **dict.fromkeys(("Tree", "tree"), "files"),
    "mount": "temporary_mount",
    "prefetch": "prefetch",
    **dict.fromkeys(("Mix", "Shuffle"), "shuffle"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'wdsfs' has no attribute {name!r}")
    from wdsfs import errors, wings

    if name not in _OF_LIBRARY:
        return getattr(errors, name)
    try:
        return getattr(wings.load("library", _OF_LIBRARY[name]), name)
    except errors.NotInstalled as error:
        raise ImportError(str(error)) from None


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def _function(name: str) -> Any:
    """Return a public function that has the name of a room: importing the room does not hide the function."""
    return property(lambda _: __getattr__(name), lambda _, room: None)


class _Package(ModuleType):
    """The package, with its functions that have names of rooms."""

    mount, tree = _function("mount"), _function("tree")


sys.modules[__name__].__class__ = _Package
