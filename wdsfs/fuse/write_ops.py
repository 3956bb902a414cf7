"""FUSE requests that change something (create, write, rename), besides the requests that `read_ops.py` answers.

No policy is here either: `overlay/writable_tree.py` decides what a change means. One worker serves a writable
mount. The tree's journal learns which requests the kernel has sent again after the death of a worker: such a
request may have been carried out already.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Callable

from wdsfs.errors import NoSuchEntry, ReadOnly
from wdsfs.fuse import protocol
from wdsfs.fuse.counters import KINDS, Board
from wdsfs.fuse.fuse_device import Handler, Reply
from wdsfs.fuse.protocol import Attributes, Request
from wdsfs.fuse.read_ops import FLAGS as READ_FLAGS
from wdsfs.fuse.read_ops import TIMEOUT_SECONDS, Operations, attributes_timeout
from wdsfs.inodes import NOT_HIDDEN, ROOT
from wdsfs.names import HIDDEN_DIRECTORY, text_of
from wdsfs.overlay.writable_tree import AttributeChange, WritableTree
from wdsfs.tree.set_options import Owner
from wdsfs.tree.tree import Node

log = logging.getLogger(__name__)

# An attribute of the top that only the daemon itself sets: its token, then the paths to restore, separated by NUL
# bytes. An attribute, because a worker receives nothing but requests of the kernel. The token keeps programs of
# the same user from undoing changes when they copy attributes of another tree (`rsync -X`).
RESTORE = b"user.wdsfs.restore"

WRITE_MAX = 1 << 20  # bytes of one WRITE
ROOM = WRITE_MAX + protocol.PAGE  # bytes of the largest request
FLAGS = READ_FLAGS | protocol.HANDLE_KILLPRIV_V2

# Requests that the kernel may send before the ones that it sends again.
_OUT_OF_TURN = (protocol.FORGET, protocol.BATCH_FORGET, protocol.INTERRUPT)
# Errors of the upper that the caller caused. They are no fault of the mount, so its owner need not know.
_CALLERS_ERRORS = frozenset(
    (
        *(errno.EFBIG, errno.EINVAL, errno.EPERM, errno.EACCES, errno.EEXIST),
        *(errno.E2BIG, errno.ERANGE, errno.EMLINK, errno.ENODATA),
    )
)


class WritableOperations(Operations[WritableTree]):
    """Answers the requests of a mount with an overlay. While `frozen` returns True, changes get EBUSY.

    `later` takes notifications that can be sent to the kernel only between requests: those about names wait for
    locks that the caller of the current request may hold. `token` is the start of a valid request to restore;
    without a token all such requests are refused.
    """

    alone = True
    flags, write_max, room = FLAGS, WRITE_MAX, ROOM

    def __init__(
        self,
        owner: Owner,
        board: Board,
        frozen: Callable[[], bool] = lambda: False,
        later: Callable[[bytes], None] = lambda note: None,
        token: bytes = b"",
    ) -> None:
        super().__init__(owner, board)
        self._frozen, self._later, self._token = frozen, later, token
        self._may_chown = os.geteuid() == 0
        self._looked_up = lambda inode: self.tree.remember(inode)
        change = KINDS.index("change")
        self._handlers |= {
            opcode: (change, self._unless_frozen(handler))
            for opcode, handler in (
                (protocol.SETATTR, self.setattr),
                (protocol.MKNOD, self.mknod),
                (protocol.MKDIR, self.mkdir),
                (protocol.SYMLINK, self.symlink),
                (protocol.LINK, self.link),
                (protocol.UNLINK, self.unlink),
                (protocol.RMDIR, self.rmdir),
                (protocol.RENAME, self.rename),
                (protocol.RENAME2, self.rename),
                (protocol.SETXATTR, self.setxattr),
                (protocol.REMOVEXATTR, self.removexattr),
            )
        }
        self._handlers |= {
            protocol.WRITE: (KINDS.index("write"), self._unless_frozen(self.write)),
            protocol.FSYNC: (change, self.fsync),
            protocol.FSYNCDIR: (change, self.fsync),
            protocol.FORGET: (KINDS.index("forget"), self.forget),
            protocol.BATCH_FORGET: (KINDS.index("forget"), self.batch_forget),
        }

    def answer(self, request: Request) -> Reply:
        if not self.refusing:
            journal = self.tree.journal
            journal.requester, journal.resent = request.pid, request.is_resent
            if not journal.resent and request.opcode not in _OUT_OF_TURN:
                journal.drop_previous()
        return super().answer(request)

    def after_reply(self) -> None:
        """Clear the journal: its change is done, and the requester has the reply."""
        if not self.refusing:
            self.tree.journal.clear()

    def errno_of(self, name: str, error: Exception) -> int:
        if isinstance(error, OSError) and error.errno in _CALLERS_ERRORS:
            log.debug("%s: %s", name, error)
            return error.errno
        return super().errno_of(name, error)

    def _unless_frozen(self, handler: Handler) -> Handler:
        return lambda request: errno.EBUSY if self._frozen() else handler(request)

    # --- lookup counts

    def _entry(self, node: Node, timeout: int) -> bytes:
        self.tree.remember(node.inode)
        return super()._entry(node, timeout)

    def forget(self, request: Request) -> None:
        self.tree.forget(request.node, protocol.lookups_of(request.body))

    def batch_forget(self, request: Request) -> None:
        for inode, count in protocol.forgets_of(request.body):
            self.tree.forget(inode, count)

    # --- attributes

    def _attributes(self, node: Node) -> Attributes:
        status = node.upper
        if status is None:
            return super()._attributes(node)
        times = [divmod(ns, 10**9) for ns in (status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns)]
        (atime, atime_ns), (mtime, mtime_ns), (ctime, ctime_ns) = times
        return (
            *(node.inode, node.size, status.st_blocks, atime, mtime, ctime, atime_ns, mtime_ns, ctime_ns),
            *(node.mode, node.links, status.st_uid, status.st_gid, status.st_rdev, status.st_blksize, 0),
        )

    def setattr(self, request: Request) -> Reply:
        inode, (values, drop_privileges) = request.node, protocol.change_of(request.body, time.time_ns())
        change = AttributeChange(*values)
        if drop_privileges and change.mode is None:
            change = change._replace(mode=self._dropped(inode))
        node = self.tree.setattr(inode, change)
        return protocol.attributes(attributes_timeout(inode), self._attributes(node))

    def statfs(self, request: Request) -> Reply:
        """Free space is that of the upper's file system; the shards count as full."""
        with self.slowly():
            totals = self.tree.totals()
        figures = self.tree.upper.statvfs()
        return protocol.statfs(
            (totals.bytes + figures.f_frsize - 1) // figures.f_frsize + figures.f_blocks,
            totals.members + figures.f_files,
            figures.f_bsize,
            figures.f_frsize,
            figures.f_namemax,
            (figures.f_bfree, figures.f_bavail, figures.f_ffree),
        )

    def setxattr(self, request: Request) -> Reply:
        name, value, flags = protocol.setxattr_of(request.body)
        if name == RESTORE and request.node == ROOT:
            return self._restore(request.uid, value)
        self.tree.setxattr(request.node, name, value, flags)
        return b""

    def _restore(self, uid: int, value: bytes) -> Reply:
        is_daemon = self._token and value.startswith(self._token)
        if uid != os.geteuid() or not is_daemon:  # the right to write to the top is not enough
            return errno.EPERM
        with self.slowly():
            self.tree.restore(value[len(self._token) :].split(b"\0"), self._note)
        return b""

    def _note(self, inode: int, name: bytes) -> None:
        self._later(protocol.forget_entry(inode, name) if name else protocol.forget_content(inode))

    def removexattr(self, request: Request) -> Reply:
        self.tree.removexattr(request.node, protocol.name_of(request.body))
        return b""

    # --- names

    def opendir(self, request: Request) -> Reply:
        return protocol.opendir_reply()

    def _owner_of_new(self, request: Request) -> tuple[int, int] | None:
        return (request.uid, request.gid) if self._may_chown else None

    def _refuse_hidden(self, parent: int, name: bytes) -> None:
        """Raise ReadOnly for the hidden directory, unless the tree has its name, and for names in it."""
        if self.hidden is None:
            return
        at_top = parent == ROOT and name == HIDDEN_DIRECTORY
        if (at_top and not self._has(name)) or (not parent & NOT_HIDDEN and parent > ROOT):
            raise ReadOnly(f"{text_of(name)!r}: the directory {text_of(HIDDEN_DIRECTORY)} cannot be changed")

    def _has(self, name: bytes) -> bool:
        try:
            self.tree.lookup(ROOT, name)
        except NoSuchEntry:
            return False
        return True

    def mknod(self, request: Request) -> Reply:
        parent, owner = request.node, self._owner_of_new(request)
        mode, device, name = protocol.mknod_of(request.body)
        self._refuse_hidden(parent, name)
        return self._entry(self.tree.mknod(parent, name, mode, device, owner), TIMEOUT_SECONDS)

    def mkdir(self, request: Request) -> Reply:
        parent, owner = request.node, self._owner_of_new(request)
        mode, name = protocol.mkdir_of(request.body)
        self._refuse_hidden(parent, name)
        return self._entry(self.tree.mkdir(parent, name, mode, owner), TIMEOUT_SECONDS)

    def symlink(self, request: Request) -> Reply:
        parent, owner = request.node, self._owner_of_new(request)
        name, target = protocol.symlink_of(request.body)
        self._refuse_hidden(parent, name)
        return self._entry(self.tree.symlink(parent, name, target, owner), TIMEOUT_SECONDS)

    def link(self, request: Request) -> Reply:
        parent = request.node
        inode, name = protocol.link_of(request.body)
        self._refuse_hidden(parent, name)
        self._refuse_hidden(inode, name)
        return self._entry(self.tree.link(inode, parent, name), TIMEOUT_SECONDS)

    def unlink(self, request: Request) -> Reply:
        parent, name = request.node, protocol.name_of(request.body)
        self._refuse_hidden(parent, name)
        self.tree.unlink(parent, name)
        return b""

    def rmdir(self, request: Request) -> Reply:
        parent, name = request.node, protocol.name_of(request.body)
        self._refuse_hidden(parent, name)
        self.tree.rmdir(parent, name)
        return b""

    def rename(self, request: Request) -> Reply:
        parent, flagged = request.node, request.opcode == protocol.RENAME2
        name, new_parent, new_name, flags = protocol.rename_of(request.body, flagged)
        self._refuse_hidden(parent, name)
        self._refuse_hidden(new_parent, new_name)
        self.tree.rename(parent, name, new_parent, new_name, flags)
        return b""

    # --- content

    def read(self, request: Request) -> Reply:
        inode = request.node
        offset, size = protocol.read_of(request.body)
        content = self.tree.content(inode)
        if content is not None:
            return self._read(request, content)
        data = self.tree.read(inode, offset, size)
        self.slot.read(len(data))
        return data

    def write(self, request: Request) -> Reply:
        inode = request.node
        offset, data, drop_privileges = protocol.write_of(request.body)
        mode = self._dropped(inode) if drop_privileges else None
        if mode is not None:
            self.tree.setattr(inode, AttributeChange(mode=mode))
            # After a write the kernel asks again for size and times, but keeps the mode that it has cached. This
            # notification waits for no lock, so it can be sent while the writer waits for its reply.
            self.notify(protocol.forget_attributes(inode))
        return protocol.size_reply(self.tree.write(inode, offset, data))

    def fsync(self, request: Request) -> Reply:
        with self.slowly():
            self.tree.fsync(request.node, only_data=protocol.data_only(request.body))
        return b""

    def _dropped(self, inode: int) -> int | None:
        """Return the mode without setuid, and without setgid unless that stands for mandatory locking.

        None if the mode stays the same: that of a symbolic link cannot be set.
        """
        mode = self.tree.getattr(inode).mode
        dropped = stat.S_ISUID | (stat.S_ISGID if mode & stat.S_IXGRP else 0)
        return mode & ~dropped if mode & dropped else None
