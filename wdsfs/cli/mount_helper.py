"""`mount -t wdsfs` and lines in /etc/fstab: the mount helper that mount(8) calls as /sbin/mount.wdsfs.

A line such as

    /data/train-{000000..000099}.tar  /mnt/train  wdsfs  ro,allow_other,layout=files  0  0

makes mount(8) run `/sbin/mount.wdsfs SPEC MOUNTPOINT [-sfnv] [-N NAMESPACE] [-o OPTIONS] [-t TYPE]`. This module
translates the arguments into a call of `wdsfs mount`. SPEC is an argument of `wdsfs mount`; `::` joins several
arguments, and a space is `\\040` in fstab. Options of `wdsfs mount` stand in the option field without dashes.
mount(8) looks for helpers only in /sbin. No Python installer writes there, so the administrator makes a link from
there to the installed `mount.wdsfs` (docs/how-to/boot.md).
"""

from __future__ import annotations

import functools
import getopt
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import click

from wdsfs import names
from wdsfs.errors import UsageError
from wdsfs.spec import objects

USAGE = "usage: mount.wdsfs SHARDS[::SHARDS...] MOUNTPOINT [-sfnv] [-o OPTION,...]"

# Options for mount(8), systemd or people. mount(8) adds "rw" wherever there is no "ro". The last two lines are for
# the kernel, on writable file systems.
_NOT_FOR_US = frozenset(
    (
        *("auto", "noauto", "defaults", "fail", "nofail", "_netdev", "rw"),
        *("user", "nouser", "users", "nousers", "owner", "noowner", "group", "nogroup"),
        *("atime", "noatime", "diratime", "nodiratime", "relatime", "norelatime", "strictatime"),
        *("nostrictatime", "lazytime", "nolazytime", "iversion", "noiversion", "mand", "nomand"),
        *("silent", "loud"),
    )
)
_FOR_TERMINALS = ("foreground", "quiet", "read-only")  # the last is "ro" here
_NOT_FOR_US_EITHER = ("x-", "X-", "comment=", "user=", "helper=", "uhelper=")  # starts of options

LONGEST_SOURCE = 1000  # characters; mount(2) takes less than a page


@functools.cache
def own_options() -> Mapping[str, click.Option]:
    """Return the options of `wdsfs mount` by their names in fstab, where "_" is the same as "-"."""
    from wdsfs.cli.mount_commands import mount

    options = [param for param in mount.params if isinstance(param, click.Option)]
    named = {name[2:]: option for option in options for name in option.opts if name.startswith("--")}
    return {name: option for name, option in named.items() if name not in _FOR_TERMINALS}


class Call(NamedTuple):
    """The arguments of `wdsfs`; `fake`: check them only (`mount -f`)."""

    arguments: list[str]
    fake: bool


WRONG_CALL, MOUNT_FAILURE = 1, 32  # exit codes of mount(8)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program mount.wdsfs, and return an exit code of mount(8).

    The code is 1 for wrong arguments, 32 for a failure.
    """
    arguments = sys.argv[1:] if argv is None else argv
    if "-h" in arguments or "--help" in arguments:
        print(USAGE)
        return 0
    try:
        call = translate(arguments)
    except UsageError as error:
        print(f"mount.wdsfs: {error}", file=sys.stderr)
        return WRONG_CALL
    if call.fake or _is_mounted(call.arguments):
        return 0
    from wdsfs.cli import main

    if "--allow-pipe" not in call.arguments:
        os.environ[f"WDSFS_{objects.ALLOW_PIPE}"] = objects.NEVER
    try:
        main.main(call.arguments, prog_name="wdsfs")
    except SystemExit as end:  # the way click ends
        return 0 if not end.code else WRONG_CALL if end.code == UsageError.exit_code else MOUNT_FAILURE
    return 0


def _is_mounted(arguments: Sequence[str]) -> bool:
    """Return True if the kernel serves this very mount, and its guard lives.

    `mount -a` skips the lines whose first field is in the mount table, which has the image instead.
    """
    if not any(argument.startswith("--engine=") for argument in arguments):
        return False
    from wdsfs.mount.start import is_guarded

    return is_guarded(arguments[arguments.index("--") + 1 : -1], arguments[-1])


def translate(argv: Sequence[str]) -> Call:
    """Return the call of `wdsfs mount` for the arguments of mount(8). Raises UsageError."""
    try:
        # Ignored: -s (be lenient), -n (no mtab), -v (log more), -N (done by mount(8)), -t.
        flags, places = getopt.gnu_getopt(list(argv), "sfnvrwN:o:t:")
    except getopt.GetoptError as error:
        raise UsageError(f"{error.msg}; {USAGE}") from None
    if len(places) != 2:
        raise UsageError(f"name shards and a mount point; {USAGE}")
    spec, mountpoint = places
    given = [option for flag, value in flags for option in _options_of(flag, value)]
    own = [_own(option) for option in given if _name(option) in own_options()]
    passed = [option for option in given if _name(option) not in own_options()]
    for option in passed:
        _refuse_misspelt(option)
    passed += _source_option(spec, passed)
    from wdsfs.spec.spec_words import settled  # late: most calls of mount(8) end before

    through = ["-o", ",".join(passed)] if passed else []
    # Each line in fstab has a first field: for a set that begins empty it is "none".
    specs = [] if "--new" in own and spec == "none" else [spec]
    return Call(["mount", *own, *through, "--", *map(settled, specs), mountpoint], fake=("-f", "") in flags)


def _refuse_misspelt(option: str) -> None:
    """Raise UsageError for an unknown option that is similar to an option of `wdsfs mount`."""
    from wdsfs.mount.mount_options import known_options

    known, name = {name.rstrip("=") for name in known_options()} | _NOT_FOR_US, option.partition("=")[0]
    meant = "" if name in known else names.meant(_name(option), sorted({*own_options()} | known))
    if meant:
        raise UsageError(f"-o {option}: no such option{meant}")


def _options_of(flag: str, value: str) -> Iterator[str]:
    """Yield the options in one flag that go to `wdsfs mount`. Raises UsageError."""
    if flag == "-r":
        yield "ro"
    if flag != "-o":
        return
    from wdsfs.mount.mount_options import split_options  # late: it is slow, and most calls of mount(8) end before

    for option in split_options([value]):
        if option == "remount":
            raise UsageError("wdsfs cannot remount: unmount, then mount with the new options")
        if option not in _NOT_FOR_US and not option.startswith(_NOT_FOR_US_EITHER):
            yield option


def _name(option: str) -> str:
    return option.partition("=")[0].replace("_", "-")


def _own(option: str) -> str:
    """Return the argument of `wdsfs mount` for one of its options. Raises UsageError."""
    name, (_, equals, value) = _name(option), option.partition("=")
    if own_options()[name].is_flag:
        if equals:
            raise UsageError(f"-o {name} takes no value")
        return f"--{name}"
    if name == "follow" and not equals:
        return f"--{name}"
    if not value:
        raise UsageError(f"-o {name} needs a value: {name}=...")
    return f"--{name}=" + re.sub(
        r'(\\[^,"])|\\([,"])|"', r"\1\2", value
    )  # exactly as split_options reads the value


def _source_option(spec: str, passed: Sequence[str]) -> list[str]:
    """Return the option with which the mount table shows SPEC exactly as fstab has it, if an option can hold it.

    By that `mount -a` recognizes the mount. pyfuse3 passes ASCII options only. A spec with other characters or
    with a secret gets the usual source; `mount -a` then fails with "mounted there already".
    """
    if "://" in spec and objects.without_secrets(spec) != spec:
        return []
    plain = spec.isascii() and spec.isprintable() and len(spec) <= LONGEST_SOURCE
    if not plain or any(option.startswith("fsname=") for option in passed):
        return []
    return ["fsname=" + re.sub(r'([\\,"])', r"\\\1", spec)]
