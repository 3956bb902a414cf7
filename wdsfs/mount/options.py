"""What to mount, where and how: the options of a mount, and those of `-o` taken apart.

Says what cannot go together before anything is done. What the shards hold is not looked at here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wdsfs import names
from wdsfs.dataset.merged_tree import is_merged
from wdsfs.dataset.tree import View
from wdsfs.errors import UsageError
from wdsfs.fuse.read_ops import Owner
from wdsfs.fuse.worker import SPIN_SECONDS
from wdsfs.interop.soundness import Tolerance
from wdsfs.spec.expand import Selection, Shard, refuse_left_out
from wdsfs.status import control
from wdsfs.views.composition import Composition
from wdsfs.views.view_set import is_view

ID_MAX = (1 << 32) - 2  # the kernel takes the last number for "nobody at all"


# Options of `-o` that libfuse or the kernel understands. Anything else is a typing error and is said to be one.
_FLAGS = frozenset(
    (
        *("ro", "allow_other", "allow_root", "auto_unmount", "default_permissions", "nonempty"),
        *("dev", "nodev", "suid", "nosuid", "exec", "noexec", "sync", "async", "dirsync"),
        *("atime", "noatime"),
    )
)
_VALUES = frozenset(["fsname", "subtype", "context", "fscontext", "defcontext", "rootcontext"])


@dataclass(slots=True)
class FuseOptions:
    """The options of `-o`, taken apart."""

    fuse: set[str] = field(default_factory=set)
    owner: Owner = field(default_factory=lambda: Owner(os.getuid(), os.getgid()))
    nonempty: bool = False


@dataclass(slots=True)
class MountOptions:
    """What to mount, where and how."""

    specs: list[str]
    mountpoint: str
    view: View = field(default_factory=View)
    merge: bool = False
    selection: Selection = field(default_factory=Selection)
    composition: Composition = field(default_factory=Composition)
    tolerance: Tolerance = field(default_factory=Tolerance)
    index_dir: Path | None = None
    jobs: int = 1
    lazy: bool = False
    overlay: Path | None = None
    workers: int = 2
    spin: float = SPIN_SECONDS  # seconds
    readahead: int = 256 << 10  # bytes
    options: list[str] = field(default_factory=list)
    foreground: bool = False
    log: Path | None = None  # of a mount in the background; chosen by `run`

    def __post_init__(self) -> None:
        self.mountpoint = control.canonical(self.mountpoint)
        self.merge = is_merged(self.view, self.merge)


def parse_options(options: Sequence[str], writable: bool = False) -> FuseOptions:
    """Take `-o` options apart. Raises UsageError for one that nobody knows."""
    parsed = FuseOptions()
    uid, gid, umask = parsed.owner.uid, parsed.owner.gid, 0
    for option in _split(options):
        name, equals, value = option.partition("=")
        if name == "remount" or (name == "rw" and not writable):
            raise UsageError(f"-o {name}: this mount is read-only; --overlay DIR makes one that can be written")
        if name == "rw":
            continue
        if name in ("uid", "gid", "umask") and equals:
            number = _number(option, value, *((8, 0o777) if name == "umask" else (10, ID_MAX)))
            uid, gid, umask = (
                number if name == "uid" else uid,
                number if name == "gid" else gid,
                number if name == "umask" else umask,
            )
        elif option == "nonempty":
            parsed.nonempty = True
        elif option in _FLAGS or (equals and name in _VALUES):
            parsed.fuse.add(option)
        else:
            known = sorted(known_options())
            raise UsageError(
                f"-o {option}: no such option; known are {', '.join(known)}{names.meant(name, known)}"
            )
    parsed.owner = Owner(uid, gid, umask)
    return parsed


def known_options() -> set[str]:
    """What `-o` takes; an option with a value ends in `=`."""
    return {*_FLAGS} | {f"{name}=" for name in _VALUES | {"uid", "gid", "umask"}}


def _split(options: Sequence[str]) -> list[str]:
    """Single options; a comma behind a backslash belongs to a value, as for libfuse."""
    found, current, escaped = [], "", False
    for character in ",".join(options) + ",":
        if character == "," and not escaped:
            if current:
                found.append(current)
            current = ""
        else:
            current += character
        escaped = character == "\\" and not escaped
    return found


def _number(option: str, value: str, base: int, largest: int) -> int:
    try:
        number = int(value, base)
    except ValueError:
        number = -1
    if not 0 <= number <= largest:
        kind = f"an octal number up to {largest:o}" if base == 8 else f"a number up to {largest}"
        raise UsageError(f"-o {option}: {kind} is needed")
    return number


def refuse_view(mount: MountOptions, shards: Sequence[Shard]) -> None:
    """Raises UsageError for what cannot go with an overlay."""
    refuse_left_out(shards, "--overlay is for whole shards")
    if is_view(shards, mount.composition):
        raise UsageError(
            "--overlay takes shards as they are: what a view leaves out or adds could not be committed. Mount "
            "without --overlay, or without the options of the view"
        )
    if mount.view.index_tree:
        raise UsageError(
            "--index-tree is for read-only mounts, because changes would give samples other numbers; leave out "
            "--index-tree, or --overlay"
        )
