"""Settings that all processes of a command share: the value of an option, else of the variable WDSFS_NAME.

The value of an option is kept here and not put into the environment, which the programs of the user inherit. A
forked process has it by itself. A new process of wdsfs gets it as variables, a worker of a cluster with its work.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_PREFIX = "WDSFS_"
_chosen: dict[str, str] = {}  # by options, by the name of the setting


def setting(name: str) -> str:
    """Return the value of a setting, such as that of "CACHE_SIZE"; "" if it was not given."""
    value = _chosen.get(name)
    return os.environ.get(_PREFIX + name, "") if value is None else value


def choose(name: str, value: str) -> None:
    """Give a setting a value for this process and its children; "" is none, whatever the variable says."""
    _chosen[name] = value


@contextlib.contextmanager
def chosen(name: str, value: str) -> Iterator[None]:
    """Give a setting a value for the length of the block."""
    before = _chosen.get(name)
    choose(name, value)
    try:
        yield
    finally:
        if before is None:
            _chosen.pop(name, None)
        else:
            choose(name, before)


def variables() -> dict[str, str]:
    """Return the variables by which a new process of wdsfs gets the values of options."""
    return {_PREFIX + name: value for name, value in _chosen.items()}
