"""An upper in use: opens it, checks that its file system supports an overlay, and holds the parts that change it.

Every change is one atomic system call, after preparations in work/ (`overlay/new_entries.py`,
`overlay/name_changes.py`, `overlay/whiteouts.py`, `overlay/upper_contents.py`). So a stop at any call leaves the
upper as it was or with the whole change, and temporary files in work/ that the next start removes. The names in
memory (`upper_format.UpperNode`) change when the last call has succeeded, so an error leaves them true.

What is hidden, copied up or made opaque is decided in `overlay/writable_tree.py`. One thread.
"""

from __future__ import annotations

import errno
import os

from wdsfs.errors import OverlayUnusable
from wdsfs.overlay.durability import Durability
from wdsfs.overlay.name_changes import NameChanges
from wdsfs.overlay.new_entries import NewEntries
from wdsfs.overlay.orphans import Orphans
from wdsfs.overlay.overlay_directory import OverlayDirectory, load_upper
from wdsfs.overlay.staging import Staging
from wdsfs.overlay.system_calls import EXCHANGE, SystemCalls
from wdsfs.overlay.upper_attributes import AttributeRules
from wdsfs.overlay.upper_contents import UpperContents
from wdsfs.overlay.upper_descriptors import DESCRIPTORS, Descriptors
from wdsfs.overlay.upper_format import DIRECTORY, OPEN_DIRECTORY, ORIGIN, UpperNode
from wdsfs.overlay.upper_parts import UpperParts
from wdsfs.overlay.whiteouts import DISK_FULL, PROTOTYPE, Whiteouts
from wdsfs.storage.durable import Disk


class UpperDirectory:
    """The upper of an overlay, for one process at a time: the caller has it on `overlay_directory.hold`.

    `top` is the node of its top directory; the other attributes are the parts, each for one kind of call.

    `inherited`: a worker before this one has died, and the kernel still knows the inode numbers that it gave out;
    so orphans stay. `owner` (uid, gid) is that of the top directory if it has to be made. Raises OverlayUnusable,
    OSErrors.
    """

    def __init__(
        self,
        place: OverlayDirectory,
        owner: tuple[int, int] | None = None,
        inherited: bool = False,
        calls: SystemCalls | None = None,
        descriptors: int = DESCRIPTORS,
    ) -> None:
        self.place = place
        self.calls = calls = SystemCalls() if calls is None else calls
        self.read_only = self._make_directories(owner)
        self.descriptors = Descriptors(descriptors)
        try:
            self._top = os.open(place.upper, OPEN_DIRECTORY)
            unread = UpperNode(DIRECTORY, 0, None, b"")
            self.descriptors.pin(unread, self._top)
            work, orphans = self._open_work()
            self.staging = staging = Staging(work, calls)
            self.orphans = Orphans(orphans, self.descriptors, staging)
            if orphans >= 0:
                self.descriptors.pin(self.orphans.top, orphans)
            self.attributes = AttributeRules(self.descriptors, staging, calls)
            self.whiteouts = Whiteouts(self.descriptors, staging, calls)
            parts = UpperParts(self.descriptors, staging, self.attributes, self.whiteouts, self.orphans, calls)
            self.entries, self.names = NewEntries(parts), NameChanges(parts)
            self.contents = UpperContents(self.descriptors, self.attributes, calls)
            self.durability = Durability(self.descriptors, self.orphans, calls)
            if not self.read_only:
                self._start(inherited)
            self.top = load_upper(place, self._top)
            self.descriptors.pin_instead(self.top, unread)
            if not self.read_only:
                self.whiteouts.settle(self.top)
        except BaseException:
            self.descriptors.close()
            raise

    def _make_directories(self, owner: tuple[int, int] | None) -> bool:
        """Make the directories that are missing in DIR; returns True if the file system is read-only."""
        place = self.place
        if place.is_bare:
            raise OverlayUnusable(
                f"{place.path} is not empty and no overlay of wdsfs; an upper directory that the kernel's "
                f"overlayfs wrote can be given to diff and commit, not be mounted"
            )
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

    def _open_work(self) -> tuple[int, int]:
        """Descriptors of work/ and work/orphans, -1 for one that a read-only file system has not."""
        work = orphans = -1
        try:
            work = os.open(self.place.work, OPEN_DIRECTORY)
            self.descriptors.pin(UpperNode(DIRECTORY, 0, None, b"work"), work)
            orphans = os.open(b"orphans", OPEN_DIRECTORY, dir_fd=work)
        except OSError:
            if not self.read_only:
                raise
        return work, orphans

    def _start(self, inherited: bool) -> None:
        self.staging.clear()
        self.orphans.load(inherited)
        self.whiteouts.find_prototype()
        if not inherited:
            self._probe()

    def _probe(self) -> None:
        """Raise OverlayUnusable if the file system cannot hold an overlay."""
        name, other = self.staging.temporary(), self.staging.temporary()
        needed = "attributes in the namespace 'user'"
        try:
            fd = self.calls.create(name, os.O_RDWR, 0o600, self.staging.directory)
            try:
                self.calls.setxattr(fd, ORIGIN, b"0:0")
            finally:
                os.close(fd)
            needed = "hard links, or the exchange of two names"
            self.calls.link(PROTOTYPE, self.staging.directory, other, self.staging.directory)
            self.calls.rename(name, self.staging.directory, other, self.staging.directory, EXCHANGE)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise OverlayUnusable(
                    f"the file system of {self.place.path} cannot take an overlay: it lacks {needed} "
                    f"({error.strerror})"
                ) from None
        finally:
            self.staging.throw_away(name, self.staging.directory)
            self.staging.throw_away(other, self.staging.directory)

    def close(self, clean: bool = False) -> None:
        """Close every descriptor.

        At a `clean` end (the kernel knows no inode any more) orphans are removed, and everything is synced to
        disk. Raises OSErrors.
        """
        try:
            if clean and not self.read_only:
                self.orphans.remove_all()
                self.calls.syncfs(self._top)
        finally:
            self.descriptors.close()

    def statvfs(self) -> os.statvfs_result:
        """Size and free space of its file system."""
        return os.fstatvfs(self._top)
