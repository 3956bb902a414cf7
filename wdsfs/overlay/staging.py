"""The directory work/: new files and directories are made in it and then moved into the upper by one rename.

Temporary names start with "#". A process that is killed leaves them; the next start removes them. The prototype
of whiteouts (`overlay/whiteouts.py`) and the orphans (`overlay/orphans.py`) lie there, too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from wdsfs.overlay.system_calls import SystemCalls
from wdsfs.overlay.upper_format import OPEN_DIRECTORY


class Staging:
    """Names in work/, of which `directory` is a descriptor (-1 on a read-only file system, where nothing is
    made)."""

    def __init__(self, directory: int, calls: SystemCalls) -> None:
        self.directory = directory
        self.calls = calls
        self._temporaries = 0

    def clear(self) -> None:
        """Remove temporary files of former processes."""
        for name in map(os.fsencode, os.listdir(self.directory)):
            if name.startswith(b"#"):
                self.throw_away(name, self.directory)

    def temporary(self) -> bytes:
        """A name that is not in use."""
        self._temporaries += 1
        return b"#%d-%x" % (os.getpid(), self._temporaries)

    @contextlib.contextmanager
    def prepared(self) -> Iterator[bytes]:
        """A temporary name in work/; when the block fails, what has this name is removed."""
        name = self.temporary()
        try:
            yield name
        except BaseException:
            self.throw_away(name, self.directory)
            raise

    def throw_away(self, name: bytes, directory: int) -> None:
        """Remove a file, or a directory with nothing but whiteouts in it. Errors are ignored: the next start
        tries again."""
        with contextlib.suppress(OSError):
            try:
                self.calls.unlink(name, directory)
                return
            except IsADirectoryError:
                fd = os.open(name, OPEN_DIRECTORY, dir_fd=directory)
            try:
                for entry in os.listdir(fd):
                    self.calls.unlink(os.fsencode(entry), fd)
            finally:
                os.close(fd)
            self.calls.rmdir(name, directory)
