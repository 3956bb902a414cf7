"""A mount as a process: in the background, with a log and an exit code, known to systemd.

`fork` comes first, so that the process that the user started can wait until the tree is usable. `fuse_session.py`
(FUSE) and `guard.py` (kernel) have the work of the daemon.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import select
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from wdsfs import host, shared_settings, trust
from wdsfs.door.urls import is_url
from wdsfs.errors import WdsfsError
from wdsfs.log_lines import TerminalFormatter
from wdsfs.mount_registry import file_of
from wdsfs.shared_settings import setting

log = logging.getLogger(__name__)

LEFT, READY, GONE = b"-", b"+", b"."  # from the daemon to the process that waits for it
Leave = Callable[[Path | None], None]
ALIVE_SECONDS = 0.2  # interval at which that process checks that the daemon still runs
# Variables with paths. Processes of a mount read them later: libraries in the fetcher, which may be restarted,
# read the variables of stores.
PATH_VARIABLES = (
    *("HOME", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"),
    *("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "AWS_CA_BUNDLE"),
    *("REQUESTS_CA_BUNDLE", "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT"),
    *("GOOGLE_SERVICE_ACCOUNT_PATH", "AZURE_FEDERATED_TOKEN_FILE", "HF_HOME", "HF_TOKEN_PATH"),
)
PATH_SETTINGS = ("INDEX_DIR", "CACHE_DIR", "INDEX_FILE")
_SEPARATORS = {"SSL_CERT_DIR": os.pathsep, "INDEX_FILE": "\n"}  # of several paths
LOG_BYTES = 4 << 20  # from this size on a mount begins a new log and keeps the old one


def log_path(mountpoint: str) -> Path:
    """Return the log file of a mount in the background, whether or not it can be written."""
    return file_of(mountpoint, ".log", host.state_dir())


def open_log(mountpoint: str) -> Path | None:
    """Return a writable log file for a mount in the background, or None. A long old log is renamed."""
    for path in (log_path(mountpoint), file_of(mountpoint, ".log")):
        try:
            trust.directory(path.parent, create=True, tighten=True)
            if path.exists() and path.stat().st_size > LOG_BYTES:
                path.replace(path.with_suffix(".log.old"))
            fd = trust.open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.fchmod(fd, 0o600)  # the log has names of samples; an older version let all users read it
            os.close(fd)
        except OSError as error:
            log.warning("cannot write a log in %s: %s", path.parent, error.strerror)
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


def fork(mountpoint: str, action: Callable[[Leave, Callable[[], None]], None]) -> int:
    """Run `action` in a daemon; returns 0 once it is ready, else the daemon's exit code.

    `action` gets two functions: the first leaves the terminal for a log file, the second reports that the mount is
    usable. Until the daemon leaves the terminal, it shows progress and errors there, and gets interrupts.
    REQUIRES: no thread has been started.
    """
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid:
        os.close(sender)
        return _wait_for(pid, receiver, log_path(mountpoint))
    os.close(receiver)
    code = 1
    try:
        code = guarded(lambda: action(lambda file: _leave_terminal(file, sender), lambda: _report(sender, READY)))
    finally:
        _report(sender, GONE)
        os._exit(code)


def guarded(action: Callable[[], None]) -> int:
    """Run `action`; return its exit code, and log its error."""
    try:
        action()
    except WdsfsError as error:
        log.error("%s", error)
        return error.exit_code
    except KeyboardInterrupt:
        log.error("interrupted; the index keeps the shards read so far")
        return 130
    except BaseException:
        log.exception("wdsfs failed; please report this")
        return 1
    return 0


def _wait_for(pid: int, receiver: int, log_file: Path) -> int:
    heard, status = b"", 0
    while READY not in heard:
        try:
            # The end of the pipe tells nothing: the daemon's workers inherit it, and may outlive the daemon.
            if select.select([receiver], [], [], ALIVE_SECONDS)[0]:
                word = os.read(receiver, 16)
                heard += word or GONE  # the daemon was killed, and no other process has the pipe
            elif os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                break
        except KeyboardInterrupt:  # the daemon gets the interrupt, too, and ends in good order
            continue
        if heard.endswith(GONE):
            break
    if READY in heard:
        return 0
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if LEFT in heard:  # its message is in the log
        log.error("the daemon ended before the mount was usable; see %s", log_file)
    elif code < 0:  # a killed daemon has no message
        log.error("a signal ended the daemon before the mount was usable: %s", signal.strsignal(-code))
    return code if code > 0 else 1


def _report(sender: int, word: bytes) -> None:
    """Report the progress of the daemon to the waiting process."""
    with contextlib.suppress(BrokenPipeError):  # that process has ended
        os.write(sender, word)


def _leave_terminal(log_file: Path | None, sender: int) -> None:
    """Continue in the background, with the log in a file."""
    _report(sender, LEFT)
    log_to_file(log_file)
    os.setsid()
    _make_paths_absolute()
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)


def _make_paths_absolute() -> None:
    """Make relative paths in variables and settings absolute, for all processes of the mount."""
    for name in PATH_VARIABLES:
        if value := os.environ.get(name):
            os.environ[name] = _anchored(value, _SEPARATORS.get(name))
    for name in PATH_SETTINGS:
        if value := setting(name):
            shared_settings.choose(name, _anchored(value, _SEPARATORS.get(name)))


def _anchored(text: str, separator: str | None) -> str:
    paths = text.split(separator) if separator else [text]
    return (separator or "").join(
        path if not path or path.startswith("~") or is_url(path) else os.path.abspath(path) for path in paths
    )


def notify_systemd(message: str) -> None:
    """Notify the service manager, if it has set NOTIFY_SOCKET (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as client:
            client.connect(address)
            client.sendall(message.encode())
    except OSError as error:  # the mount works all the same
        log.warning("the service manager could not be notified (NOTIFY_SOCKET=%s): %s", address, error)
