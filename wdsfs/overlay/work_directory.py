"""The directory work/ beside an upper: unfinished files, and orphans.

Temporary names start with "#". A process that is killed leaves them; the next start removes them.

An *orphan* is a file or directory without a name whose inode number the kernel still knows. Its number must not be
used for another file. So it is moved to work/orphans/<inode>. There its content stays readable, also for the next
worker, and its number stays in use, until the kernel has forgotten it or until the next mount.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from wdsfs.overlay import upper_format
from wdsfs.overlay.upper_files import SystemCalls, UpperFiles


class WorkDirectory:
    """Temporary names in work/. `fd` is its descriptor, -1 on a read-only file system, where nothing is made."""

    def __init__(self, fd: int, calls: SystemCalls) -> None:
        self.fd = fd
        self.calls = calls
        self._temporaries = 0

    def start(self) -> None:
        """Remove temporary files of former processes."""
        for name in map(os.fsencode, os.listdir(self.fd)):
            if name.startswith(b"#"):
                self.throw_away(name)

    @contextlib.contextmanager
    def prepared(self) -> Iterator[bytes]:
        """Yield a temporary name in work/; when the block fails, the file of this name is removed."""
        self._temporaries += 1
        name = b"#%d-%x" % (os.getpid(), self._temporaries)
        try:
            yield name
        except BaseException:
            self.throw_away(name)
            raise

    def throw_away(self, name: bytes, directory: int = -1) -> None:
        """Remove a file, or a directory with nothing but whiteouts in it, from work/ or another directory.

        Errors are ignored: the next start tries again.
        """
        directory = self.fd if directory < 0 else directory
        with contextlib.suppress(OSError):
            try:
                self.calls.unlink(name, directory)
                return
            except IsADirectoryError:
                fd = os.open(name, upper_format.OPEN_DIRECTORY, dir_fd=directory)
            try:
                for entry in os.listdir(fd):
                    self.calls.unlink(os.fsencode(entry), fd)
            finally:
                os.close(fd)
            self.calls.rmdir(name, directory)

    def make_file(self, name: bytes, attribute: str, value: bytes) -> None:
        """Make an empty file in work/ with one attribute."""
        fd = self.calls.create(name, os.O_RDWR, 0o600, self.fd)
        try:
            self.calls.setxattr(fd, attribute, value)
        finally:
            os.close(fd)


class Orphans:
    """The orphans of an upper: the children of `top`, which stands for work/orphans."""

    def __init__(self, files: UpperFiles, work: WorkDirectory) -> None:
        self.top = upper_format.UpperNode(upper_format.DIRECTORY, upper_format.ORPHANAGE, None, b"orphans")
        self.files = files
        self.work = work

    @property
    def fd(self) -> int:
        """A descriptor of work/orphans."""
        return self.files.directory(self.top)

    def start(self, inherited: bool) -> None:
        """Find the orphans of former processes; keep them if `inherited`, as the kernel may know them."""
        self.top.children = upper_format.load_names(self.fd).children
        for name, node in list(self.top.children.items()):
            if inherited and node.kind != upper_format.WHITEOUT:
                node.parent, node.inode = self.top, _number(name)
            else:
                del self.top.children[name]
                self.throw_away(name)

    def throw_away(self, name: bytes) -> None:
        """Remove the file of this name in work/orphans, if that is possible."""
        self.work.throw_away(name, self.fd)

    def remove_all(self) -> None:
        """Remove all, when the kernel knows no inode number any more."""
        for name in list(self.top.children):
            self.throw_away(name)

    def adopt(self, node: upper_format.UpperNode) -> None:
        """Note in memory that a node has been moved to work/orphans."""
        node.parent, node.name = self.top, orphan_name(node)
        self.top.children[node.name] = node

    def destroy(self, node: upper_format.UpperNode) -> None:
        """Remove an orphan that the kernel has forgotten. Raises nothing."""
        self.files.drop(node)
        self.throw_away(node.name)
        self.top.children.pop(node.name, None)
        node.parent = None


def orphan_name(node: upper_format.UpperNode) -> bytes:
    """Return the name of a node in work/orphans."""
    return b"%x" % node.inode


def _number(name: bytes) -> int:
    try:
        return int(name, 16)
    except ValueError:
        return 0
