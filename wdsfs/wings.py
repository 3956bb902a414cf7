"""The wings: rooms that an installation may leave out, and so are the libraries of extras. The rest needs neither.

`load` returns the package of a wing, or a module in it. Call `load` at the one place that reaches the wing, just
before a late import. A room that lies below the wing uses the module that `load` returns.
Nothing else may import a wing.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any

from wdsfs.errors import NotInstalled, UsageError

# The work that needs each wing.
WINGS = {
    "remote": "shards at URLs and the output of commands cannot be read",
    "kernel": "the kernel cannot serve a mount, and no image can be made",
    "pages": "`wdsfs view` has no pages to show",
    "library": "there are no `wdsfs.samples`, `wdsfs.table` and `wdsfs.tree`",
    "interop": "indexes for other tools cannot be written, nor shards be checked",
    "executors": "`--executor` has no workers to give",
}


def load(wing: str, module: str = "") -> ModuleType:
    """Return `wdsfs.WING`, or the module of this name in it. Raises NotInstalled."""
    name = f"wdsfs.{wing}"
    try:
        package = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:  # the wing is here, and something that it needs is not
            raise
        package = None
    if package is None or package.__file__ is None:  # a directory without modules is taken for a package
        raise NotInstalled(f"{name} is not installed: {WINGS[wing]}")
    return importlib.import_module(f"{name}.{module}") if module else package


def is_installed(wing: str) -> bool:
    """Return True if `load` finds the wing."""
    try:
        load(wing)
    except NotInstalled:
        return False
    return True


# --- optional libraries, those of the extras


def install_command(extra: str) -> str:
    """Return what to type for the libraries of an extra, for a message.

    It names the checkout: wdsfs is on no package index that pip would look at.
    """
    return f"pip install '.[{extra}]' in a checkout of wdsfs; with pipx or uv as docs/how-to/extras.md says"


def need_tables() -> None:
    """Raise UsageError where the library of tables is missing."""
    if importlib.util.find_spec("pyarrow") is None:
        raise UsageError(f"tables need pyarrow; type: {install_command('parquet')}")


def zstd() -> Any:
    """Import zstd of Python 3.14, or the same for earlier ones. Raises UsageError."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise UsageError(
        f"before Python 3.14, zstd needs the package backports.zstd; type: {install_command('compressed')}"
    )
