"""Reading ahead by paths, for loaders over a mount."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from wdsfs.source import begin_reading


def prefetch(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> None:
    """Begin to read these files, so that they are in memory when a loader opens them; do not wait.

    ::

        wdsfs.prefetch(path for path, label in next_batch)

    Meant for files of a mount whose shards are in a store or on a slow disk: all files of a batch are fetched at
    the same time. The bytes go to the page cache, which all processes share. It is only a hint: a file that cannot
    be read raises nothing here, but where it is opened.
    """
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would wait for its writer
            try:
                begin_reading(file, 0, os.fstat(file).st_size)
            finally:
                os.close(file)
