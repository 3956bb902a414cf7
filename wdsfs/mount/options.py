"""The options of a mount, and those of `-o` parsed.

Options that cannot go together are refused before anything is done. The content of shards is not looked at here.
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
from wdsfs.spec import objects
from wdsfs.spec.expand import Selection, Shard, refuse_left_out
from wdsfs.status import control
from wdsfs.views.composition import Composition
from wdsfs.views.view_set import is_view

ID_MAX = (1 << 32) - 2  # the last number means "no user" to the kernel


# Options of `-o` that libfuse or the kernel understands. Anything else is refused as a typing error.
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
    """The options of `-o`, parsed."""

    fuse: set[str] = field(default_factory=set)
    owner: Owner = field(default_factory=lambda: Owner(os.getuid(), os.getgid()))
    nonempty: bool = False


@dataclass(slots=True)
class MountOptions:
    """The options of a mount."""

    specs: list[str]
    mountpoint: str
    view: View = field(default_factory=View)
    merge: bool = False
    selection: Selection = field(default_factory=Selection)
    composition: Composition = field(default_factory=Composition)
    tolerance: Tolerance = field(default_factory=Tolerance)
    index_dir: Path | None = None
    lazy: bool = False
    overlay: Path | None = None
    new: bool = False  # a set that begins empty, without `specs`
    follow: float | None = None  # how often SHARDS are looked at again (s); None: the set is fixed
    workers: int = 2
    spin: float = SPIN_SECONDS  # seconds
    readahead: int = 256 << 10  # bytes
    options: list[str] = field(default_factory=list)
    foreground: bool = False
    log: Path | None = None  # of a mount in the background; chosen by `run`

    def __post_init__(self) -> None:
        self.mountpoint = control.canonical(self.mountpoint)
        self.merge = is_merged(self.view, self.merge)
        if self.follow is not None and self.fixed_because is not None:
            raise UsageError(f"--follow: {self.fixed_because}")

    @property
    def fixed_because(self) -> str | None:
        """Why the set of this mount cannot be looked at again; None if it can."""
        if self.overlay is not None:
            return (
                "a mount with --overlay has a fixed set, because its changes belong to the names of the shards: "
                "unmount it, and mount it again"
            )
        if self.selection.slice is not None:
            return (
                "a part of a set (--shard-id) is fixed: ranks look at different times, so a new shard could be in "
                "two parts, or in none. Mount the whole set, and have the loader divide it"
            )
        if any(part.removeprefix("@") == objects.STDIN for one in self.specs for part in objects.parts(one)):
            return "the standard input cannot be read again"
        return None


def parse_options(options: Sequence[str], writable: bool = False) -> FuseOptions:
    """Parse `-o` options. Raises UsageError for an unknown one."""
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
    """Return all options of `-o`; one with a value ends in `=`."""
    return {*_FLAGS} | {f"{name}=" for name in _VALUES | {"uid", "gid", "umask"}}


def _split(options: Sequence[str]) -> list[str]:
    """Single options; a comma after a backslash belongs to a value, as for libfuse."""
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


def refuse_view(shards: Sequence[Shard], view: View, composition: Composition) -> None:
    """Raise UsageError for options that cannot go with an overlay."""
    refuse_left_out(shards, "--overlay is for whole shards")
    if is_view(shards, composition):
        raise UsageError(
            "--overlay takes shards as they are: what a view leaves out or adds could not be committed. Mount "
            "without --overlay, or without the options of the view; `wdsfs commit` with them writes new shards"
        )
    if view.index_tree:
        raise UsageError(
            "--index-tree is for read-only mounts, because changes would give samples other numbers; leave out "
            "--index-tree, or --overlay"
        )
