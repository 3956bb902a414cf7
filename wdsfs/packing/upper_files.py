"""Opens files of an upper by their paths below it."""

from __future__ import annotations

import os

from wdsfs.overlay.upper_format import OPEN_DIRECTORY


class Files:
    """Opens files of an upper by their paths below it."""

    def __init__(self, directory: int) -> None:
        self.directory = directory

    def __call__(self, path: bytes) -> int:
        """Open a regular file. Raises OSErrors."""
        fd = os.open(".", OPEN_DIRECTORY, dir_fd=self.directory)
        *way, name = path.split(b"/")
        try:
            for step in way:  # one by one: a path may be longer than PATH_MAX
                above, fd = fd, os.open(step, OPEN_DIRECTORY, dir_fd=fd)
                os.close(above)
            return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=fd)
        finally:
            os.close(fd)
