"""The FUSE adapter: translates requests into calls of the tree, and answers.

No policy: what exists and how it looks is decided in `tree.py`. Handlers leave errors to the one decorator
`replies`, which maps every exception to an errno, because anything but FUSEError would end pyfuse3's main loop
and with it the worker.

The handlers are coroutines because pyfuse3 wants that, but they never wait by `await`: a worker serves one
request at a time. What may take long (bytes that are not in the page cache, a shard that has to be indexed)
happens inside `slowly`, which lets the supervisor see to it that others serve meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import pyfuse3
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, ReaddirToken, RequestContext, StatvfsData

from wdsfs import lower
from wdsfs.board import KINDS, Board, Slot
from wdsfs.errors import CorruptShard, NoSuchAttribute, NoSuchEntry, StaleShard, UnreadableShard, WdsfsError
from wdsfs.inodes import ROOT
from wdsfs.lower import Content, NotIndexed
from wdsfs.names import NAME_MAX
from wdsfs.tree import Node, Tree

log = logging.getLogger(__name__)

# Shards do not change, so the kernel may keep what it knows. When one does, its inode numbers are no longer
# answered (ESTALE), which makes the kernel ask for the whole path again, whatever it had kept. Only what it
# answers without asking must not be kept for so long: that a name is not there. So the entry of a shard's
# directory is asked for again after some seconds, and a changed shard has another inode then.
TIMEOUT_SECONDS = 3600.0
CHANGE_SECONDS = 5.0
# What the kernel has kept of the mount point it also tells when the mount is dead: a script that looks with stat
# would find it in order. One question a second is what that costs.
ROOT_SECONDS = 1.0
BLOCK_SIZE = 128 << 10  # what stat recommends for reads: the largest request of the kernel
PUSH_BYTES = 128 << 10  # files up to this size are pushed into the page cache at their first open
QUIET_SECONDS = 30.0  # a message is logged once in this time
QUIET_MAX = 1000  # different messages remembered

_FORGET, _RELEASE, _RELEASEDIR = map(KINDS.index, ("forget", "release", "releasedir"))

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Owner:
    """Who the files belong to, and what the modes 0444 and 0555 are masked with."""

    uid: int
    gid: int
    umask: int = 0


def replies(
    handler: Callable[Concatenate[Operations, Arguments], Awaitable[Answer]],
) -> Callable[Concatenate[Operations, Arguments], Coroutine[Any, Any, Answer]]:
    """Make a handler raise FUSEError only, index what it finds not indexed, and count it."""
    kind = KINDS.index(handler.__name__) if handler.__name__ in KINDS else KINDS.index("other")

    @functools.wraps(handler)
    async def reply(self: Operations, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
        self.slot.begin(kind)
        try:
            while True:
                if self.refusing:
                    raise FUSEError(errno.EIO)
                self.tree.lower.tidy()
                try:
                    return await handler(self, *args, **kwargs)
                except NotIndexed as wanted:
                    self._index(wanted.number)
        except FUSEError:
            raise
        except Exception as error:  # whatever it is, the mount goes on: see the head of this module
            raise FUSEError(self.errno_of(handler.__name__, error)) from error
        finally:
            self.slot.end()

    return reply


class Operations(pyfuse3.Operations):
    """Answers the requests of a read-only mount.

    Made before the workers are forked; each then calls `attach`. `crowded` is called when this worker is about
    to wait for a disk.
    """

    supports_dot_lookup = True
    enable_writeback_cache = False
    tree: Tree

    def __init__(self, owner: Owner, board: Board) -> None:
        super().__init__()
        self.owner = owner
        self.board = board
        self.slot: Slot = board.slot(0)
        self.started = False
        self.refusing = False
        self._said: dict[str, float] = {}
        self._crowded: Callable[[], None] = lambda: None

    def init(self) -> None:
        self.started = True

    def attach(self, tree: Tree, slot: Slot, crowded: Callable[[], None] = lambda: None) -> None:
        """Serve this tree from now on, and count in this slot."""
        self.tree, self.slot, self._crowded = tree, slot, crowded

    def refuse(self, slot: Slot) -> None:
        """Answer everything with EIO from now on, and touch nothing."""
        self.refusing, self.slot = True, slot

    # --- errors

    def errno_of(self, name: str, error: Exception) -> int:
        """The errno for an exception; logs what a person should know of."""
        if isinstance(error, (NoSuchEntry, NoSuchAttribute)):
            log.debug("%s: %s", name, error)
            return error.errno
        self.slot.failed()
        if isinstance(error, StaleShard):
            self.tree.lower.distrust()
        if isinstance(error, WdsfsError):
            self._say(f"{error}")
            return error.errno
        if isinstance(error, OSError) and error.errno:
            self._say(f"{name}: {error}")
            return error.errno
        self._say(f"{name} failed with {error!r}; the request gets EIO, the mount goes on", error)
        return errno.EIO

    def _say(self, message: str, surprise: Exception | None = None) -> None:
        """Log a message, but not again and again: a loader asks a broken shard for every file in it."""
        now = time.monotonic()
        if now - self._said.get(message, -QUIET_SECONDS) < QUIET_SECONDS:
            return
        if len(self._said) >= QUIET_MAX:
            self._said.clear()
        self._said[message] = now
        log.log(logging.ERROR if surprise else logging.WARNING, "%s", message, exc_info=surprise)

    # --- what takes long

    @contextlib.contextmanager
    def slowly(self) -> Iterator[None]:
        """Whatever happens in here may take long; others serve meanwhile."""
        self.slot.wait(True)
        self._crowded()
        try:
            yield
        finally:
            self.slot.wait(False)

    def _index(self, number: int) -> None:
        with self.slowly():
            self.tree.lower.index_now(number)

    def _read(self, content: Content, offset: int, size: int) -> bytes:
        data = lower.read_cached(content, offset, size)
        if data is None:
            with self.slowly():
                data = lower.read(content, offset, size)
        return data

    def _push(self, inode: int, content: Content) -> None:
        """Put the whole content of a small file into the kernel's page cache: its reads never come here.

        Only at the first open since the kernel got to know the file: a store waits for pages that a read in
        flight has locked, and that read may be waiting for this worker.
        """
        try:
            data = self._read(content, 0, content.size)
            if len(data) < content.size:
                return
            pyfuse3.notify_store(inode, 0, data)
        except (CorruptShard, UnreadableShard, OSError) as error:  # the read that follows will say so
            log.debug("not pushed: %s", error)
            return
        self.slot.pushed(len(data))

    # --- names and attributes

    def _attributes(self, node: Node, timeout: float = TIMEOUT_SECONDS) -> EntryAttributes:
        entry = EntryAttributes()
        entry.st_ino = node.inode
        entry.generation = 0
        entry.entry_timeout = timeout
        entry.attr_timeout = ROOT_SECONDS if node.inode == ROOT else TIMEOUT_SECONDS
        entry.st_mode = node.mode & ~self.owner.umask
        entry.st_nlink = node.links
        entry.st_uid, entry.st_gid = self.owner.uid, self.owner.gid
        entry.st_size = node.size
        entry.st_blksize = BLOCK_SIZE
        entry.st_blocks = (node.size + 511) // 512
        entry.st_atime_ns = entry.st_ctime_ns = entry.st_mtime_ns = node.mtime_ns
        return entry

    def _entry_timeout(self, parent: int) -> float:
        return CHANGE_SECONDS if parent == ROOT and not self.tree.merged else TIMEOUT_SECONDS

    @replies
    async def lookup(self, parent_inode: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        if len(name) > NAME_MAX:  # the kernel passes on up to 1,024 bytes
            raise FUSEError(errno.ENAMETOOLONG)
        if name == b".":
            return self._attributes(self.tree.getattr(parent_inode))
        if name == b"..":
            return self._attributes(self.tree.getattr(self.tree.parent(parent_inode)))
        try:
            return self._attributes(self.tree.lookup(parent_inode, name), self._entry_timeout(parent_inode))
        except NoSuchEntry:
            # Inode 0 says "no such entry, and remember it": loaders probe for files that are not there.
            missing = EntryAttributes()
            missing.st_ino = 0
            missing.entry_timeout = CHANGE_SECONDS if self.tree.merged else self._entry_timeout(parent_inode)
            return missing

    @replies
    async def getattr(self, inode: int, ctx: RequestContext) -> EntryAttributes:
        return self._attributes(self.tree.getattr(inode))

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        """The kernel has dropped these with all their pages. Must not raise."""
        self.slot.begin(_FORGET)
        for inode, _ in inode_list:
            self.board.forget(inode)
        self.slot.end()

    @replies
    async def readlink(self, inode: int, ctx: RequestContext) -> bytes:
        return self.tree.readlink(inode)

    @replies
    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        with self.slowly():  # looks at every shard
            totals = self.tree.totals()
        data = StatvfsData()
        data.f_bsize = BLOCK_SIZE
        data.f_frsize = 512
        data.f_blocks = (totals.bytes + 511) // 512
        data.f_bfree = data.f_bavail = data.f_ffree = data.f_favail = 0
        data.f_files = totals.members
        data.f_namemax = NAME_MAX
        return data

    @replies
    async def getxattr(self, inode: int, name: bytes, ctx: RequestContext) -> bytes:
        return self.tree.getxattr(inode, name)

    @replies
    async def listxattr(self, inode: int, ctx: RequestContext) -> list[bytes]:
        return self.tree.xattrs(inode)

    # --- directories and files; a handle is the inode number, so any process can serve it

    @replies
    async def opendir(self, inode: int, ctx: RequestContext) -> int:
        self.tree.open_directory(inode)
        return inode

    @replies
    async def readdir(self, fh: int, start_id: int, token: ReaddirToken) -> None:
        some, timeout = False, self._entry_timeout(fh)
        try:
            for entry in self.tree.listing(fh, start_id):
                attributes = self._attributes(entry.node, timeout)
                if not pyfuse3.readdir_reply(token, entry.name, attributes, entry.cursor):
                    break
                some = True
        except Exception:
            # What the token holds cannot be taken back, and beginning anew would list it twice. So it is sent;
            # the kernel goes on behind it, and that call meets the error with empty hands.
            if not some:
                raise

    async def releasedir(self, fh: int) -> None:
        self.slot.begin(_RELEASEDIR)
        self.slot.end()

    @replies
    async def open(self, inode: int, flags: int, ctx: RequestContext) -> FileInfo:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise FUSEError(errno.EROFS)
        content = self.tree.content(inode)
        if 0 < content.size <= PUSH_BYTES and self.board.claim_push(inode):
            self._push(inode, content)
        else:
            lower.check_unchanged(content)  # the kernel may answer the reads from what it has
        return FileInfo(fh=inode, keep_cache=True)

    @replies
    async def read(self, fh: int, off: int, size: int) -> bytes:
        data = self._read(self.tree.content(fh), off, size)
        self.slot.read(len(data))
        return data

    async def release(self, fh: int) -> None:
        self.slot.begin(_RELEASE)
        self.slot.end()

    async def flush(self, fh: int) -> None:
        """Answered once: ENOSYS tells the kernel not to ask at every close."""
        raise FUSEError(errno.ENOSYS)

    async def access(self, inode: int, mode: int, ctx: RequestContext) -> bool:
        """Not asked under `default_permissions`; where it is, the kernel's own check is enough."""
        raise FUSEError(errno.ENOSYS)
