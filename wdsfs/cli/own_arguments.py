"""Secrets in the arguments of this process, which every user of the machine can see.

`ps` and /proc/PID/cmdline show the memory where the kernel has put the arguments. URLs and the
commands of `pipe:` are overwritten there, so that a daemon does not show for months how they are signed. Only the
first moments of a command show it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence

# A command (`pipe:`); USER:PASSWORD of a URL, and its query.
_SECRETS = re.compile(rb"(?:(?<=^pipe:)|(?<=[:=]pipe:)).+|(?<=://)[^/]*(?=@)|(?<=\?).*", re.DOTALL)
_MAY_HAVE = re.compile(rb"://|pipe:")
_ARG_START = 48  # field of /proc/PID/stat, counted from 1: proc_pid_stat(5)


def may_have_secrets(arguments: Sequence[str]) -> bool:
    """True if some of these may be a secret: they are not to be kept anywhere."""
    return any(
        one.partition("=")[0] == "--store-option" or _SECRETS.search(os.fsencode(one)) is not None
        for one in arguments
        if one.startswith("--store-option") or _MAY_HAVE.search(os.fsencode(one))
    )


def hide_secrets() -> None:
    """Overwrite the secrets of URLs in the arguments of this process, byte for byte, so that nothing moves."""
    with contextlib.suppress(OSError):  # without /proc nobody sees them
        with open("/proc/self/cmdline", "rb") as file:
            shown = file.read()
        hidden = b"\0".join(
            _SECRETS.sub(_stars, one) if _MAY_HAVE.search(one) else one for one in shown.split(b"\0")
        )
        if hidden != shown:
            _overwrite(shown, hidden)


def _stars(secret: re.Match[bytes]) -> bytes:
    return b"*" * len(secret[0])


def _overwrite(shown: bytes, hidden: bytes) -> None:
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()  # from the third on: the second may contain spaces
    start = int(fields[_ARG_START - 3])
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        if os.pread(memory.fileno(), len(shown), start) == shown:
            os.pwrite(memory.fileno(), hidden, start)
