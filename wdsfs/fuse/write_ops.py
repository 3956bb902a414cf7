"""The FUSE adapter of a writable mount: what `read_ops.py` answers, and the requests that change something.

No policy here either: what a change means is decided in `overlay/writable_tree.py`. One worker serves a writable
mount. A request that was handed out again after the death of a worker is told to the tree's journal as such, since
it may have been done already.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Callable

from wdsfs.dataset.tree import Node, text_of
from wdsfs.errors import NoSuchEntry, ReadOnly
from wdsfs.fuse import protocol
from wdsfs.fuse.protocol import NOW, Attributes
from wdsfs.fuse.read_ops import FLAGS as READ_FLAGS
from wdsfs.fuse.read_ops import TIMEOUT_SECONDS, Operations, Owner, Reply, attributes_timeout
from wdsfs.inodes import NOT_HIDDEN, ROOT
from wdsfs.overlay.writable_tree import AttributeChange, WritableTree
from wdsfs.status.counters import KINDS, Board
from wdsfs.status.dot_wdsfs import NAME as HIDDEN_NAME

log = logging.getLogger(__name__)

# An attribute of the top that only the daemon itself sets: its token, then the paths, with NUL bytes between them,
# of what is to be restored. A worker receives nothing but requests of the kernel. The token keeps programs of the
# same user from undoing changes when they copy attributes of another tree (`rsync -X`).
RESTORE = b"user.wdsfs.restore"

WRITE_MAX = 1 << 20  # bytes of one WRITE
ROOM = WRITE_MAX + protocol.PAGE  # of a request with them
FLAGS = READ_FLAGS | protocol.HANDLE_KILLPRIV_V2

# What may come before requests that are handed out again.
_OUT_OF_TURN = (protocol.FORGET, protocol.BATCH_FORGET, protocol.INTERRUPT)
# What the upper says to requests that ask for too much: nothing that its owner has to look after.
_NOT_TO_BE_HAD = frozenset(
    (
        *(errno.EFBIG, errno.EINVAL, errno.EPERM, errno.EACCES, errno.EEXIST),
        *(errno.E2BIG, errno.ERANGE, errno.EMLINK, errno.ENODATA),
    )
)


class WritableOperations(Operations[WritableTree]):
    """Answers the requests of a mount with an overlay. While `frozen` says so, who writes gets EBUSY.

    `later` takes notifications that the kernel can be sent only when no request is being answered: those of names
    wait for locks that whoever asks for something may hold. `token` is what a request to restore begins with;
    without one all are refused.
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
        self._caller = (0, 0)
        self._told = lambda inode: self.tree.remember(inode)
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
                (protocol.RENAME, lambda node, body: self.rename(node, body, False)),
                (protocol.RENAME2, lambda node, body: self.rename(node, body, True)),
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

    def answer(self, message: bytes) -> Reply:
        uid, gid, thread = protocol.caller_of(message)
        self._caller = uid, gid
        journal = self.tree.journal if not self.refusing else None
        if journal is not None:
            journal.requester, journal.resent = thread, protocol.is_resent(message)
            if not journal.resent and protocol.opcode_of(message) not in _OUT_OF_TURN:
                journal.settle()
        return super().answer(message)

    def answered(self) -> None:
        """The last answer has been sent."""
        if not self.refusing:
            self.tree.journal.clear()

    def errno_of(self, name: str, error: Exception) -> int:
        if isinstance(error, OSError) and error.errno in _NOT_TO_BE_HAD:
            log.debug("%s: %s", name, error)
            return error.errno
        return super().errno_of(name, error)

    def _unless_frozen(self, handler: Callable[[int, bytes], Reply]) -> Callable[[int, bytes], Reply]:
        return lambda node, body: errno.EBUSY if self._frozen() else handler(node, body)

    # --- what the kernel knows: of something new, how often it was told of it

    def _entry(self, node: Node, timeout: int) -> bytes:
        self.tree.remember(node.inode)
        return super()._entry(node, timeout)

    def forget(self, inode: int, body: bytes) -> None:
        self.tree.forget(inode, protocol.forget_of(body))

    def batch_forget(self, inode: int, body: bytes) -> None:
        for one, count in protocol.forgets_of(body):
            self.tree.forget(one, count)

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

    def setattr(self, inode: int, body: bytes) -> Reply:
        wanted = protocol.change_of(body)
        mode = wanted.mode
        if wanted.drop_privileges and mode is None:
            mode = self._dropped(inode)
        now = time.time_ns()
        node = self.tree.setattr(
            inode,
            AttributeChange(
                mode=mode,
                uid=wanted.uid,
                gid=wanted.gid,
                size=wanted.size,
                atime_ns=now if wanted.atime_ns == NOW else wanted.atime_ns,
                mtime_ns=now if wanted.mtime_ns == NOW else wanted.mtime_ns,
            ),
        )
        return protocol.attributes(attributes_timeout(inode), self._attributes(node))

    def statfs(self, inode: int, body: bytes) -> Reply:
        """What is free is what the upper's file system has; the shards count as full."""
        with self.slowly():
            totals = self.tree.totals()
        found = self.tree.upper.statvfs()
        return protocol.statfs(
            (totals.bytes + found.f_frsize - 1) // found.f_frsize + found.f_blocks,
            totals.members + found.f_files,
            found.f_bsize,
            found.f_frsize,
            found.f_namemax,
            (found.f_bfree, found.f_bavail, found.f_ffree),
        )

    def setxattr(self, inode: int, body: bytes) -> Reply:
        name, value, flags = protocol.setxattr_of(body)
        if name == RESTORE and inode == ROOT:
            return self._restore(value)
        self.tree.setxattr(inode, name, value, flags)
        return b""

    def _restore(self, value: bytes) -> Reply:
        is_daemon = self._token and value.startswith(self._token)
        if self._caller[0] != os.geteuid() or not is_daemon:  # who may write to the top may not do this
            return errno.EPERM
        with self.slowly():
            self.tree.restore(value[len(self._token) :].split(b"\0"), self._note)
        return b""

    def _note(self, inode: int, name: bytes) -> None:
        self._later(protocol.forget_entry(inode, name) if name else protocol.forget_content(inode))

    def removexattr(self, inode: int, body: bytes) -> Reply:
        self.tree.removexattr(inode, protocol.name_of(body))
        return b""

    # --- names

    def opendir(self, inode: int, body: bytes) -> Reply:
        return protocol.opened()

    @property
    def _owner_of_new(self) -> tuple[int, int] | None:
        return self._caller if self._may_chown else None

    def _refuse_hidden(self, parent: int, name: bytes) -> None:
        """Raises ReadOnly for a name in the hidden directory, and for its own unless the tree has one of its
        own."""
        if self.special is None:
            return
        at_top = parent == ROOT and name == HIDDEN_NAME
        if (at_top and not self._has(name)) or (not parent & NOT_HIDDEN and parent > ROOT):
            raise ReadOnly(f"{text_of(name)!r}: the directory {text_of(HIDDEN_NAME)} cannot be changed")

    def _has(self, name: bytes) -> bool:
        try:
            self.tree.lookup(ROOT, name)
        except NoSuchEntry:
            return False
        return True

    def mknod(self, parent: int, body: bytes) -> Reply:
        mode, device, name = protocol.mknod_of(body)
        self._refuse_hidden(parent, name)
        return self._entry(self.tree.mknod(parent, name, mode, device, self._owner_of_new), TIMEOUT_SECONDS)

    def mkdir(self, parent: int, body: bytes) -> Reply:
        mode, name = protocol.mkdir_of(body)
        self._refuse_hidden(parent, name)
        return self._entry(self.tree.mkdir(parent, name, mode, self._owner_of_new), TIMEOUT_SECONDS)

    def symlink(self, parent: int, body: bytes) -> Reply:
        name, target = protocol.symlink_of(body)
        self._refuse_hidden(parent, name)
        return self._entry(self.tree.symlink(parent, name, target, self._owner_of_new), TIMEOUT_SECONDS)

    def link(self, parent: int, body: bytes) -> Reply:
        inode, name = protocol.link_of(body)
        self._refuse_hidden(parent, name)
        self._refuse_hidden(inode, name)
        return self._entry(self.tree.link(inode, parent, name), TIMEOUT_SECONDS)

    def unlink(self, parent: int, body: bytes) -> Reply:
        name = protocol.name_of(body)
        self._refuse_hidden(parent, name)
        self.tree.unlink(parent, name)
        return b""

    def rmdir(self, parent: int, body: bytes) -> Reply:
        name = protocol.name_of(body)
        self._refuse_hidden(parent, name)
        self.tree.rmdir(parent, name)
        return b""

    def rename(self, parent: int, body: bytes, flagged: bool) -> Reply:
        name, new_parent, new_name, flags = protocol.rename_of(body, flagged)
        self._refuse_hidden(parent, name)
        self._refuse_hidden(new_parent, new_name)
        self.tree.rename(parent, name, new_parent, new_name, flags)
        return b""

    # --- content

    def read(self, inode: int, body: bytes) -> Reply:
        offset, size = protocol.read_of(body)
        content = self.tree.content(inode)
        if content is not None:
            return self._read(content, offset, size)
        data = self.tree.read(inode, offset, size)
        self.slot.read(len(data))
        return data

    def write(self, inode: int, body: bytes) -> Reply:
        offset, data, drop_privileges = protocol.write_of(body)
        mode = self._dropped(inode) if drop_privileges else None
        if mode is not None:
            self.tree.setattr(inode, AttributeChange(mode=mode))
            # After a write the kernel asks again for size and times, and keeps the mode that it knows. This
            # notification waits for no lock, so it can be sent while the writer waits for its answer.
            self.notify(protocol.forget_attributes(inode))
        return protocol.written(self.tree.write(inode, offset, data))

    def fsync(self, inode: int, body: bytes) -> Reply:
        with self.slowly():
            self.tree.fsync(inode, protocol.data_only(body))
        return b""

    def _dropped(self, inode: int) -> int | None:
        """The mode without setuid, and without setgid where that means a privilege and not a lock; None if that is
        the mode already: of a symbolic link it cannot be set."""
        mode = self.tree.getattr(inode).mode
        dropped = stat.S_ISUID | (stat.S_ISGID if mode & stat.S_IXGRP else 0)
        return mode & ~dropped if mode & dropped else None
