"""Optional libraries, those of the extras of wdsfs (`view`, `compressed` ...), and what to type for them."""

from __future__ import annotations

import importlib
from typing import Any

from wdsfs.errors import UsageError


def install_command(extra: str) -> str:
    """Return what to type for the libraries of an extra, for a message.

    It names the checkout: wdsfs is on no package index that pip would look at.
    """
    return f"pip install '.[{extra}]' in a checkout of wdsfs; with pipx or uv as docs/how-to/extras.md says"


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
