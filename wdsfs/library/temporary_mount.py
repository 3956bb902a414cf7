"""A mount for the time of a block: made by the command `wdsfs mount` in a process of its own, and ended here."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from wdsfs import errors, mount_table
from wdsfs.library.key_lists import SHOWN, file_of_keys
from wdsfs.library.opened_set import Keys, Shards, named_here, texts
from wdsfs.mount.mount_search import require_mount

log = logging.getLogger("wdsfs")

_START = "import sys; n = int(sys.argv[1]) + 2; sys.path[:] = sys.argv[2:n]; del sys.argv[1:n]; "
_START += "from wdsfs.__main__ import main; main()"
_NAME = "wdsfs: "  # in front of each message of the command
_ERRORS = {
    kind.exit_code: kind
    for kind in (
        *(errors.UsageError, errors.ShardError, errors.IndexUnusable, errors.MountError, errors.EntryError),
        *(errors.CommitError, errors.OverlayUnusable),
    )
}


@contextlib.contextmanager
def mount(
    shards: Shards, *, at: str | bytes | os.PathLike[str] | None = None, keys: Keys | None = None, **options: Any
) -> Iterator[Path]:
    """Mount SHARDS for the time of a `with` block, and provide the path of the tree.

    ::

        with wdsfs.mount("train-{000000..000999}.tar", layout="classes") as path:
            torchvision.datasets.ImageFolder(path)

    The mount point is the empty directory `at`, by default a temporary one. Options are those of `wdsfs mount`,
    with `_` in place of `-`: `merge=True`, `columns=["jpg", "cls"]`, `options="allow_other"` for `-o`; `keys` as
    in `wdsfs.samples`. The end of the block, also by an exception, ends the mount; if files are still open, it
    serves them until they are closed. If this process is killed, the mount stays: `wdsfs umount` ends it. Warnings
    go to the logger `wdsfs`. Raises WdsfsError.
    """
    if options.get("foreground"):
        raise errors.UsageError("foreground: the block has to begin; leave it out")
    with contextlib.ExitStack() as stack:
        if keys is not None:
            options["keys"] = stack.enter_context(file_of_keys(keys))
        place = os.path.abspath(stack.enter_context(_directory()) if at is None else os.fsdecode(at))
        if mount_table.mounted_at(place) is not None:
            raise errors.MountError(f"{place}: something is mounted there already")
        stack.callback(_end, place)
        words = ["mount", "--quiet", *_words(options), "--", *texts(shards), place]
        listed = "" if keys is None or isinstance(keys, str | os.PathLike) else options["keys"]
        _run(words, lambda text: named_here(text.replace(listed, SHOWN) if listed else text, options))
        yield Path(place)


@contextlib.contextmanager
def _directory() -> Iterator[str]:
    """Provide an empty directory. It is removed as such: what a mount shows there must not be deleted with it."""
    place = tempfile.mkdtemp(prefix="wdsfs-")
    try:
        yield place
    finally:
        os.rmdir(place)


def _words(options: dict[str, Any]) -> Iterator[str]:
    """Yield the options as they are typed."""
    for name, value in options.items():
        several = isinstance(value, Iterable) and not isinstance(value, str | bytes)
        for item in value if several else [value]:
            option = "-o" if name == "options" else f"--{name.replace('_', '-')}"
            text = os.fsdecode(item) if isinstance(item, bytes) else str(item)
            if item is True:
                yield option
            elif item is not None and item is not False:
                yield from (option, text) if name == "options" else (f"{option}={text}",)


def _run(words: Sequence[str], translate: Callable[[str], str]) -> None:
    """Run a command of wdsfs; `translate` changes its messages. Raises the WdsfsError for its exit code."""
    command = [sys.executable, "-P", "-c", _START, str(len(sys.path)), *sys.path, *words]
    # No pipe, which a daemon could hold open, and a group of its own, so that an interrupt ends it once.
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, process_group=0
        )
        try:
            code = process.wait()
        except BaseException:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
        messages = list(map(translate, _messages(said)))
    if code:
        text = next((text for text in reversed(messages) if not text.startswith("warning: ")), f"exit code {code}")
        raise _ERRORS.get(code, errors.MountError)(text)
    for message in messages:
        log.warning("%s", message.removeprefix("warning: "))


def _messages(said: IO[bytes]) -> list[str]:
    said.seek(0)
    lines = said.read().decode("utf-8", "replace").splitlines()
    return [line.removeprefix(_NAME) for line in lines if line.startswith(_NAME)]


def _end(place: str) -> None:
    """End the mount at a place, if there is one; with files that are still open, it ends when they are closed."""
    if mount_table.mounted_at(place) is None:
        return
    mounted = require_mount(place)
    try:
        mounted.end()
    except errors.MountError:
        log.warning("%s: files are still open; the mount ends when they are closed", place)
        mounted.end(lazy=True)
