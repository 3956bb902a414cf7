"""The process of a command: signals and interrupts, standard streams, and secrets hidden in its arguments.

`ps` and /proc/PID/cmdline show the memory with the arguments. wdsfs overwrites URLs and the commands of `pipe:`
there, so that no daemon shows their signatures for months.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from types import FrameType

import click

from wdsfs.errors import CommitError

INTERRUPTED = "wdsfs.interrupted"  # in the context's `meta`: the text after "interrupted"

# A command (`pipe:`); USER:PASSWORD of a URL, and its query.
_SECRETS = re.compile(rb"(?:(?<=^pipe:)|(?<=[:=]pipe:)).+|(?<=://)[^/]*(?=@)|(?<=\?).*", re.DOTALL)
_MAY_HAVE = re.compile(rb"://|pipe:")
AGAIN_SECONDS = 0.01  # from a lost or delayed interrupt to the next try
_ARG_START = 48  # field of /proc/PID/stat, counted from 1: proc_pid_stat(5)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt for an interrupt in the block; outside, it ends the program (`__main__`)."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_DFL:
        yield
        return
    before = signal.signal(signal.SIGALRM, _interrupt)
    sys.unraisablehook = _try_again
    try:
        signal.signal(signal.SIGINT, _interrupt)
        yield
        if signal.getitimer(signal.ITIMER_REAL)[0]:  # the block has ended before the next try
            raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = sys.__unraisablehook__


def _try_again(lost: sys.UnraisableHookArgs) -> None:
    """Interrupt again soon if Python has dropped the interrupt, for example in a callback of a weak reference."""
    if lost.exc_type is KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
    else:
        sys.__unraisablehook__(lost)


def _interrupt(_: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, or try again soon while Python imports a module.

    A callback of the import lock may lose an exception in the middle of an import. Or the exception changes: to
    RuntimeError in a class with `__set_name__`, to ImportError in NumPy.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
            return
        frame = frame.f_back
    raise KeyboardInterrupt


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """End the block with an exception on SIGTERM and SIGHUP, so that it removes unfinished files.

    The exit code is the code that a shell shows for a process killed by the signal.
    """

    def stop(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is signal.SIG_DFL:  # else the signal is ignored, as with nohup
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def when_interrupted(text: str) -> Iterator[None]:
    """Print this text after the word "interrupted" if the block is interrupted."""
    meta = click.get_current_context().meta
    before, meta[INTERRUPTED] = meta.get(INTERRUPTED, ""), text
    yield
    meta[INTERRUPTED] = before  # not after an exception, which may be the interrupt


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    """Turn OSErrors of the block into CommitErrors, except the BrokenPipeError of `wdsfs ... | head`."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CommitError(f"{failure_of(error)}; repair this, then repeat the command") from None


def failure_of(error: OSError) -> str:
    """Return the file of an error, or the failed call if the error has no file, and the reason."""
    if error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    call = traceback.extract_tb(error.__traceback__)[-1]
    return f"{error.strerror or error}, at `{call.line}` ({os.path.basename(call.filename)}, line {call.lineno})"


def prepare_streams() -> None:
    """Open closed standard streams, and let standard output accept paths of any bytes."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: the next opened file would get its number, and the output
            os.open(os.devnull, os.O_RDWR)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")


def hide_secrets() -> None:
    """Overwrite the secrets in the arguments of this process, byte for byte, so that the length stays the same."""
    with contextlib.suppress(OSError):  # without /proc no other process sees the arguments
        with open("/proc/self/cmdline", "rb") as file:
            shown = file.read()
        hidden = b"\0".join(
            _SECRETS.sub(_stars, part) if _MAY_HAVE.search(part) else part for part in shown.split(b"\0")
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
