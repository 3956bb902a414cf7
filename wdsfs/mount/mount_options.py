"""The options of a mount as plain values: the set, its view, how it is opened and served, and `-o`.

Light to import. The module refuses options that cannot be combined, before any work. It reads no shards.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from wdsfs.door import urls
from wdsfs.errors import UsageError
from wdsfs.host import default_jobs
from wdsfs.mount_registry import FUSE, KERNEL, canonical
from wdsfs.names import meant, text_of
from wdsfs.spec import objects
from wdsfs.tree.set_options import Opening, Owner, Selection, TreeOptions

if TYPE_CHECKING:
    from wdsfs.shards import Shard
    from wdsfs.tree.tree import View

AUTO = "auto"  # the kernel if it can serve the set, else FUSE
ENGINES = (FUSE, KERNEL, AUTO)
OFF = "off"
ID_MAX = (1 << 32) - 2  # to the kernel, the next number means "no user"
# Options of `-o` for libfuse or the kernel. Any other option is refused as a typing error.
_FLAGS = frozenset(
    (
        *("ro", "allow_other", "allow_root", "auto_unmount", "default_permissions", "nonempty"),
        *("dev", "nodev", "suid", "nosuid", "exec", "noexec", "sync", "async", "dirsync"),
        *("atime", "noatime"),
    )
)
_VALUES = frozenset(["fsname", "subtype", "context", "fscontext", "defcontext", "rootcontext"])


class Serving(NamedTuple):
    """The options for making and serving a mount.

    `options` are the values of `-o`. `overlay` is a directory; with `new` the set begins empty. With `lazy` the
    first use of a shard indexes it. `follow` is the interval (s) between looks at SHARDS, None for a fixed set.

    `workers` is the number of FUSE processes, None for the default. `spin` (microseconds) is the time for which a
    worker polls for the next request. `readahead` (KiB) is a setting of the kernel. Unless `push` is OFF, workers
    put content into the page cache ahead of sequential readers. `trust_shards` lets the kernel's engine accept
    shards with other times and shards on network file systems.
    """

    engine: str = FUSE
    trust_shards: bool = False
    foreground: bool = False
    read_only: bool = False
    options: Sequence[str] = ()
    workers: int | None = None
    spin: int = 50
    readahead: int = 256
    push: str = AUTO
    overlay: str | None = None
    new: bool = False
    lazy: bool = False
    follow: float | None = None


@dataclass(frozen=True, slots=True)
class MountOptions:
    """The options of a mount: SHARDS, the mount point, the view, and how the set is opened and served.

    `removes_mountpoint`: the end of the mount removes the directory of the mount point.
    """

    specs: Sequence[str]
    mountpoint: str
    tree: TreeOptions = field(default_factory=TreeOptions)
    selection: Selection = field(default_factory=Selection)
    opening: Opening = field(default_factory=Opening)
    serving: Serving = field(default_factory=Serving)
    removes_mountpoint: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "mountpoint", canonical(self.mountpoint))
        selection = self.selection._replace(allow_missing=self.opening.tolerance.allow_missing)
        object.__setattr__(self, "selection", selection)
        if self.serving.follow is not None and self.fixed_because is not None:
            leave_out = "; leave out --follow, or --overlay" if self.overlay is not None else ""
            raise UsageError(f"--follow: {self.fixed_because}{leave_out}")

    @property
    def view(self) -> View:
        """The layout for the trees. Raises UsageError for options that cannot be combined."""
        return self.tree.view(partial=self.opening.tolerance.allow_missing)

    @property
    def merge(self) -> bool:
        """True if the mount shows one tree over all shards."""
        return self.view.merged

    @property
    def puts_off(self) -> bool:
        """True if the first use of a shard indexes it: no option here needs all shards at once."""
        whole = self.merge or self.tree.index_tree or self.opening.tolerance.strict
        return self.serving.lazy and not whole

    @property
    def overlay(self) -> Path | None:
        return Path(self.serving.overlay) if self.serving.overlay else None

    @property
    def dash_o(self) -> list[str]:
        """The options of `-o`, with `ro` for --read-only."""
        return [*self.serving.options, *["ro"] * self.serving.read_only]

    @property
    def workers(self) -> int:
        """The number of FUSE processes."""
        return self.serving.workers or max(2, min(default_jobs(), 8))

    @property
    def fixed_because(self) -> str | None:
        """The reason why the set of this mount is fixed; None if the mount can look for new shards."""
        if self.serving.overlay is not None:
            return "a mount with --overlay has a fixed set, because its changes belong to the names of the shards"
        if self.selection.slice is not None:
            return (
                "a part of a set (--shard-id) is fixed: ranks look at different times, so a new shard could be in "
                "two parts, or in none. Mount the whole set, and let the loader divide it"
            )
        if any(part.removeprefix("@") == urls.STDIN for spec in self.specs for part in objects.parts(spec)):
            return "the standard input cannot be read again"
        return None


def refuse_view(shards: Sequence[Shard], tree: TreeOptions) -> None:
    """Raise UsageError for options that cannot be combined with an overlay."""
    from wdsfs.spec.expand import refuse_left_out
    from wdsfs.tree.view_set import is_view

    refuse_left_out(shards, "--overlay is for whole shards")
    if tree.composition.classes:
        column = text_of(tree.composition.class_from)
        raise UsageError(
            f"--overlay cannot be combined with --layout classes: leave it out, and write SHARD/KEY/{column}"
        )
    if is_view(shards, tree.composition):
        raise UsageError(
            "--overlay cannot be combined with --keys, --columns, --associate or other options that change the "
            "view: leave out one of the two; `wdsfs pack` with these options makes new shards"
        )
    if tree.index_tree:
        raise UsageError(
            "--overlay cannot be combined with --index-tree, because changes would give samples other numbers: "
            "leave out one of the two"
        )


# --- the options of -o


@dataclass(slots=True)
class FuseOptions:
    """The options of `-o`, parsed."""

    fuse: set[str] = field(default_factory=set)
    owner: Owner = field(default_factory=lambda: Owner(os.getuid(), os.getgid()))
    nonempty: bool = False


def parse_options(options: Sequence[str], *, writable: bool = False) -> FuseOptions:
    """Parse `-o` options. Raises UsageError for an unknown option."""
    parsed = FuseOptions()
    owner = parsed.owner._asdict()
    for option in split_options(options):
        name, equals, value = option.partition("=")
        if name == "remount" or (name == "rw" and not writable):
            raise UsageError(f"-o {name}: this mount is read-only; --overlay DIR makes a writable one")
        if name == "rw":
            continue
        if name in owner and equals:
            owner[name] = _parse_number(option, value, *((8, 0o777) if name == "umask" else (10, ID_MAX)))
        elif option == "nonempty":
            parsed.nonempty = True
        elif option in _FLAGS or (equals and name in _VALUES):
            parsed.fuse.add(option)
        else:
            known = sorted(known_options())
            raise UsageError(f"-o {option}: no such option{meant(name, known)}; options: {', '.join(known)}")
    parsed.owner = Owner(**owner)
    return parsed


def known_options() -> set[str]:
    """Return the names of all options of `-o`; the name of an option with a value ends in `=`."""
    return {*_FLAGS} | {f"{name}=" for name in (*_VALUES, *Owner._fields)}


def split_options(options: Sequence[str]) -> list[str]:
    """Return the single options of all `-o`, each of which may have several.

    As for libfuse and mount(8), a comma after a backslash or in double quotes belongs to a value. In the result
    this comma has a backslash. Raises UsageError for quotes without an end.
    """
    single, current = [], ""
    quoted = escaped = False
    for character in ",".join(options):
        if character == "," and not quoted and not escaped:
            single.append(current)
            current = ""
        else:
            current += "\\," if character == "," and not escaped else character
        quoted ^= character == '"' and not escaped
        escaped = character == "\\" and not escaped
    if quoted:
        raise UsageError(f'-o {current}: a double quote has no end; write a quote in a value as \\"')
    return [option for option in (*single, current) if option]


def _parse_number(option: str, value: str, base: int, largest: int) -> int:
    try:
        number = int(value, base)
    except ValueError:
        number = -1
    if not 0 <= number <= largest:
        kind = f"an octal number up to {largest:o}" if base == 8 else f"a number up to {largest}"
        raise UsageError(f"-o {option}: type {kind}")
    return number
