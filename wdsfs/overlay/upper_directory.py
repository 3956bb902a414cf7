"""Opens an upper, checks that its file system supports an overlay, and holds the parts that change it.

The names in memory (`upper_format.UpperNode`) change when the last system call of a change has succeeded.
`overlay/writable_tree.py` decides what is hidden, copied up or made opaque. Single-threaded.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from wdsfs.durable import Disk
from wdsfs.errors import OverlayUnusable
from wdsfs.overlay import upper_format
from wdsfs.overlay.overlay_directory import OverlayDirectory
from wdsfs.overlay.upper_changes import UpperChanges
from wdsfs.overlay.upper_files import DESCRIPTORS, EXCHANGE, SystemCalls, UpperFiles
from wdsfs.overlay.whiteouts import DISK_FULL, Whiteouts
from wdsfs.overlay.work_directory import Orphans, WorkDirectory


class UpperDirectory:
    """The upper of an overlay, for one process at a time: the caller has the lock of `overlay_directory.hold`.

    `top` is the node of its top directory; the other attributes are the parts, each for one kind of call.

    `inherited`: an earlier worker has died, and the kernel still knows inode numbers from it, so orphans stay.
    `owner` (uid, gid) is that of the top directory if it has to be made. Raises OverlayUnusable, OSErrors.
    """

    def __init__(
        self,
        place: OverlayDirectory,
        owner: tuple[int, int] | None = None,
        calls: SystemCalls | None = None,
        descriptors: int = DESCRIPTORS,
        *,
        inherited: bool = False,
    ) -> None:
        self.place = place
        self.inherited = inherited
        self.read_only = self._make_directories(owner)
        self.files = UpperFiles(SystemCalls() if calls is None else calls, descriptors)
        self.top = load_upper(place)
        try:
            self._fd = os.open(place.upper, upper_format.OPEN_DIRECTORY)
            self.files.pin(self.top, self._fd)
            work = self._pinned(place.work, upper_format.UpperNode(upper_format.DIRECTORY, 0, None, b"work"))
            self.work = WorkDirectory(work, self.files.calls)
            self.orphans = Orphans(self.files, self.work)
            self._pinned(place.work / "orphans", self.orphans.top)
            self.whiteouts = Whiteouts(self.files, self.work)
            self.changes = UpperChanges(self.files, self.work, self.whiteouts, self.orphans)
            if not self.read_only:
                self.work.start()
                self.whiteouts.start()
                self.orphans.start(inherited)
                if not inherited:
                    self._check_filesystem()
                self.whiteouts.remove_needless(self.top)
        except BaseException:
            self.files.close()
            raise

    def _make_directories(self, owner: tuple[int, int] | None) -> bool:
        """Make the directories that are missing in DIR; returns True if the file system is read-only."""
        place = self.place
        try:
            new = not place.upper.is_dir()
            for path, mode in ((place.upper, 0o755), (place.work, 0o700), (place.work / "orphans", 0o700)):
                if not path.is_dir():
                    path.mkdir(mode, parents=True)
                    path.chmod(mode)  # independent of the umask
            if new and owner is not None and os.geteuid() == 0:
                os.chown(place.upper, *owner)
            if new:
                Disk().sync_directory(os.fsencode(place.path))
        except OSError as error:
            if error.errno == errno.EROFS and place.upper.is_dir():
                return True
            raise OverlayUnusable(f"{place.path} cannot be used as an overlay: {error.strerror}") from error
        return bool(os.statvfs(place.upper).f_flag & os.ST_RDONLY)

    def _pinned(self, path: Path, node: upper_format.UpperNode) -> int:
        """Return a pinned descriptor of a directory; -1 if it is missing on a read-only file system."""
        try:
            fd = os.open(path, upper_format.OPEN_DIRECTORY)
        except OSError:
            if not self.read_only:
                raise
            return -1
        self.files.pin(node, fd)
        return fd

    def _check_filesystem(self) -> None:
        """Raise OverlayUnusable if the file system cannot hold an overlay."""
        work, calls = self.work, self.files.calls
        needed = "attributes in the namespace 'user'"
        try:
            with work.prepared() as name, work.prepared() as other:
                work.make_file(name, upper_format.ORIGIN, b"0:0")
                needed = "hard links, or the exchange of two names"
                self.whiteouts.link(other, work.fd)
                calls.rename(name, work.fd, other, work.fd, EXCHANGE)
                needed = "one device number for files and directories"  # an overlayfs over two disks has two
                if os.stat(other, dir_fd=work.fd).st_dev != os.fstat(self._fd).st_dev:
                    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
                with contextlib.suppress(FileNotFoundError):  # EXDEV would come before the name is looked up
                    calls.rename(b"#none", work.fd, b"#none", self._fd)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise OverlayUnusable(
                    f"the file system of {self.place.path} cannot take an overlay: it lacks {needed} "
                    f"({error.strerror}); name a directory on another one, such as ext4, xfs, btrfs or tmpfs"
                ) from None
        work.throw_away(name)
        work.throw_away(other)

    def close(self, *, clean: bool = False) -> None:
        """Close every descriptor.

        At a `clean` end (the kernel knows no inode any more) orphans are removed, and everything is synced to
        disk. Raises OSErrors.
        """
        try:
            if clean and not self.read_only:
                self.orphans.remove_all()
                self.files.calls.syncfs(self._fd)
        finally:
            self.files.close()

    def statvfs(self) -> os.statvfs_result:
        """Return size and free space of its file system."""
        return os.fstatvfs(self._fd)


def load_upper(place: OverlayDirectory) -> upper_format.UpperNode:
    """Return the names in the upper of an overlay; none if it has no upper yet. Raises as `load_names`."""
    with open_upper(place) as directory:
        return upper_format.empty() if directory < 0 else upper_format.load_names(directory)


@contextlib.contextmanager
def open_upper(place: OverlayDirectory) -> Iterator[int]:
    """Open the upper of an overlay; the descriptor is -1 if it has none yet."""
    if not place.upper.is_dir():
        yield -1
        return
    directory = os.open(place.upper, upper_format.OPEN_DIRECTORY)
    try:
        yield directory
    finally:
        os.close(directory)
