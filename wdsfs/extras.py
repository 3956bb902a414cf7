"""Optional libraries, those of the extras of wdsfs (`view`, `compressed` ...): the command that installs them.

wdsfs is on no package index that pip would look at, so the answer depends on how it was installed: by pip, pipx or
uv, from a checkout, a repository or a file. The metadata of the installed distribution says that (PEP 376's
INSTALLER, PEP 610's direct_url.json).
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from wdsfs.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import Distribution

NAME = "wdsfs"
_OWN_EXTRAS = re.compile(rf"{NAME}\[(.*)\]")


def install_command(extra: str, distribution: Distribution | None = None, prefix: str = sys.prefix) -> str:
    """Return the command that adds the libraries of this extra to this installation of wdsfs.

    `distribution` and `prefix` are those of the running program.
    """
    distribution = distribution or _installed()
    if distribution is None:  # it runs from a checkout that is not installed
        return f"{_pip(prefix, '')} {_quoted(_checkout(), extra)}"
    source = _source(distribution, extra)
    if os.path.exists(os.path.join(prefix, "pipx_metadata.json")):
        if source:
            return f"{_sudo(prefix)}pipx install --force {source}"
        return f"{_sudo(prefix)}pipx inject {NAME} {_libraries(distribution, extra)}"
    installer = (distribution.read_text("INSTALLER") or "").strip()
    return f"{_pip(prefix, installer)} {source or _libraries(distribution, extra)}"


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


def _installed() -> Distribution | None:
    """Return the distribution that this program is of.

    A checkout in the import path has metadata that say less.
    """
    import importlib.metadata  # late: it takes 20 ms, and most processes have no use for it

    distributions = list(importlib.metadata.distributions(name=NAME))
    return next(
        (distribution for distribution in distributions if distribution.read_text("INSTALLER")),
        distributions[0] if distributions else None,
    )


def _checkout() -> str:
    return os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def _quoted(path: str, extra: str) -> str:
    return shlex.quote(f"{path}[{extra}]")


def _source(distribution: Distribution, extra: str) -> str:
    """Return the origin of the installation with the extra, as pip takes it; "" for an index or a lost path."""
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    url = origin.get("url", "")
    if url.startswith("file:"):
        path = unquote(urlsplit(url).path)
        editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
        return editable + _quoted(path, extra) if os.path.exists(path) else ""
    if "vcs_info" in origin:
        url = f"{origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
    return shlex.quote(f"{NAME}[{extra}] @ {url}") if url else ""


def _libraries(distribution: Distribution, extra: str) -> str:
    return " ".join(map(shlex.quote, _requirements(distribution, extra)))


def _requirements(distribution: Distribution, extra: str) -> Iterator[str]:
    """Yield what an extra requires."""
    is_of = f'extra == "{extra}"'
    for line in distribution.requires or ():
        requirement, _, marker = (part.strip() for part in line.replace("'", '"').partition(";"))
        own = _OWN_EXTRAS.fullmatch(requirement)
        if not marker.endswith(is_of):
            continue
        if own:
            for name in own[1].split(","):
                yield from _requirements(distribution, name)
            continue
        condition = marker.removesuffix(is_of).strip().removesuffix("and").strip()
        yield f"{requirement}; {condition}" if condition else requirement


def _pip(prefix: str, installer: str) -> str:
    """Return the command `pip install` for the environment at `prefix`."""
    python = os.path.join(prefix, "bin", os.path.basename(sys.executable))
    if installer == "uv":
        return f"{_sudo(prefix)}uv pip install --python {shlex.quote(python)}"
    program = os.path.join(prefix, "bin", "pip")
    if os.path.exists(program):
        return f"{_sudo(prefix)}{shlex.quote(program)} install"
    return f"{_sudo(prefix)}{shlex.quote(python)} -m pip install"


def _sudo(prefix: str) -> str:
    return "" if os.access(prefix, os.W_OK) else "sudo "
