"""The log of a daemon: the file, its format, and tracebacks of crashes."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
from pathlib import Path

from wdsfs import host, trust
from wdsfs.log_lines import TerminalFormatter
from wdsfs.mount_registry import file_of

log = logging.getLogger(__name__)

LOG_BYTES = 4 << 20  # a mount that finds a longer log starts a new one and keeps the old


def log_path(mountpoint: str) -> Path:
    """Where the process of a mount logs in the background, if that can be written."""
    return file_of(mountpoint, ".log", host.state_dir())


def open_log(mountpoint: str) -> Path | None:
    """The file that a mount in the background logs to, where one can be written; a long old one is put aside."""
    for path in (log_path(mountpoint), file_of(mountpoint, ".log")):
        try:
            trust.directory(path.parent, create=True, tighten=True)
            if path.exists() and path.stat().st_size > LOG_BYTES:
                path.replace(path.with_suffix(".log.old"))
            fd = trust.open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.fchmod(fd, 0o600)  # names of samples are in it, and an older version made it for all
            os.close(fd)
        except OSError as error:
            log.warning("no log can be kept in %s: %s", path.parent, error.strerror)
        else:
            return path
    return None


def log_to_file(path: Path | None) -> None:
    """Send the log of this process to a file, with tracebacks of crashes and, on SIGUSR1, of all threads."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    fd = os.open(os.devnull, flags) if path is None else trust.open_file(path, flags)
    # Not rotated while the mount runs: the crash handlers below keep writing to this one file.
    stream = os.fdopen(fd, "a", buffering=1, encoding="utf-8", errors="backslashreplace")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TerminalFormatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    faulthandler.enable(stream)
    faulthandler.register(signal.SIGUSR1, stream, all_threads=True)
