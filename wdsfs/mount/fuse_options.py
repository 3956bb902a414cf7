"""The options of `-o`, parsed: those that libfuse or the kernel understands, and the owner of what is shown."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from wdsfs import names
from wdsfs.errors import UsageError
from wdsfs.owner import Owner

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
