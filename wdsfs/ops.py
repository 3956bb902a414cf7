"""The FUSE adapter: translates requests into calls of the tree, and answers.

No policy: what exists and how it looks is decided in `tree.py`. Handlers leave errors to the one decorator
`replies`, which maps every exception to an errno, because anything but FUSEError would end pyfuse3's main loop
and with it the mount.

A handler runs from start to end without an await wherever the tree is concerned, so requests never see each
other half done. What may take long happens in a thread: indexing a shard that needs it, and reads of bytes
that are not in the page cache.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, ReaddirToken, RequestContext, StatvfsData

from wdsfs import lower
from wdsfs.errors import NoSuchAttribute, NoSuchEntry, WdsfsError
from wdsfs.lower import Content, NotIndexed
from wdsfs.names import NAME_MAX
from wdsfs.tree import Node, Tree

log = logging.getLogger(__name__)

# Shards do not change, so the kernel may keep what it knows. When one does, its inode numbers are no longer
# answered (ESTALE), which makes the kernel ask for the whole path again, whatever it had kept.
TIMEOUT_SECONDS = 3600.0
BLOCK_SIZE = 128 << 10  # what stat recommends for reads: the largest request of the kernel
SLOW_READERS = 16  # threads that may wait for a disk
QUIET_SECONDS = 30.0  # a message is logged once in this time
QUIET_MAX = 1000  # different messages remembered

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
    name = handler.__name__

    @functools.wraps(handler)
    async def reply(self: Operations, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
        self.counts[name] += 1
        try:
            while True:
                self.tree.lower.tidy()
                try:
                    return await handler(self, *args, **kwargs)
                except NotIndexed as wanted:
                    await self.index_shard(wanted.number)
        except FUSEError:
            raise
        except Exception as error:  # whatever it is, the mount goes on: see the head of this module
            raise FUSEError(self.errno_of(name, error)) from error

    return reply


class Operations(pyfuse3.Operations):
    """Answers the requests of a read-only mount of `tree`."""

    supports_dot_lookup = True
    enable_writeback_cache = False

    def __init__(self, tree: Tree, owner: Owner, on_init: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.tree = tree
        self.owner = owner
        self.counts: Counter[str] = Counter()
        self.bytes_read = 0
        self.failures = 0
        self.recent_errors: deque[str] = deque(maxlen=20)
        self._on_init = on_init
        self._said: dict[str, float] = {}
        self._indexing: dict[int, trio.Event] = {}
        self._slow = trio.CapacityLimiter(SLOW_READERS)

    def init(self) -> None:
        self._on_init()

    # --- errors

    def errno_of(self, name: str, error: Exception) -> int:
        """The errno for an exception; logs what a person should know of."""
        if isinstance(error, (NoSuchEntry, NoSuchAttribute)):
            log.debug("%s: %s", name, error)
            return error.errno
        self.failures += 1
        if isinstance(error, WdsfsError):
            self._say(logging.WARNING, f"{error}")
            return error.errno
        if isinstance(error, OSError) and error.errno:
            self._say(logging.WARNING, f"{name}: {error}")
            return error.errno
        self._say(logging.ERROR, f"{name} failed with {error!r}; the request gets EIO, the mount goes on", error)
        return errno.EIO

    def _say(self, level: int, message: str, error: Exception | None = None) -> None:
        """Log a message, but not again and again: a loader asks a broken shard for every file in it."""
        now = time.monotonic()
        if now - self._said.get(message, -QUIET_SECONDS) < QUIET_SECONDS:
            return
        if len(self._said) >= QUIET_MAX:
            self._said.clear()
        self._said[message] = now
        self.recent_errors.append(message)
        log.log(level, "%s", message, exc_info=error)

    # --- what must not hold up other requests

    async def index_shard(self, number: int) -> None:
        """Index a shard in a thread; requests for it wait, all others go on."""
        running = self._indexing.get(number)
        if running is not None:
            await running.wait()
            return
        below = self.tree.lower
        if below.settled(number):
            return
        self._indexing[number] = trio.Event()
        try:
            log.info("indexing %s", below.path_text(number))
            data = await trio.to_thread.run_sync(below.build, number)
            below.install(number, data)
        finally:
            self._indexing.pop(number).set()

    async def _read(self, content: Content, offset: int, size: int) -> bytes:
        data = lower.read_cached(content, offset, size)
        if data is not None:
            return data
        # The lower may close its descriptor while the thread waits for the disk.
        content.fd = os.dup(content.fd)
        try:
            return await trio.to_thread.run_sync(lower.read, content, offset, size, limiter=self._slow)
        finally:
            os.close(content.fd)

    # --- names and attributes

    def _attributes(self, node: Node) -> EntryAttributes:
        entry = EntryAttributes()
        entry.st_ino = node.inode
        entry.generation = 0
        entry.entry_timeout = entry.attr_timeout = TIMEOUT_SECONDS
        entry.st_mode = node.mode & ~self.owner.umask
        entry.st_nlink = node.links
        entry.st_uid, entry.st_gid = self.owner.uid, self.owner.gid
        entry.st_size = node.size
        entry.st_blksize = BLOCK_SIZE
        entry.st_blocks = (node.size + 511) // 512
        entry.st_atime_ns = entry.st_ctime_ns = entry.st_mtime_ns = node.mtime_ns
        return entry

    @replies
    async def lookup(self, parent_inode: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        if len(name) > NAME_MAX:  # the kernel passes on up to 1,024 bytes
            raise FUSEError(errno.ENAMETOOLONG)
        if name == b".":
            return self._attributes(self.tree.getattr(parent_inode))
        if name == b"..":
            return self._attributes(self.tree.getattr(self.tree.parent(parent_inode)))
        try:
            return self._attributes(self.tree.lookup(parent_inode, name))
        except NoSuchEntry:
            # Inode 0 says "no such entry, and remember it": loaders probe for files that are not there.
            missing = EntryAttributes()
            missing.st_ino = 0
            missing.entry_timeout = TIMEOUT_SECONDS
            return missing

    @replies
    async def getattr(self, inode: int, ctx: RequestContext) -> EntryAttributes:
        return self._attributes(self.tree.getattr(inode))

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        """Nothing is remembered, so nothing is forgotten. Must not raise."""

    @replies
    async def readlink(self, inode: int, ctx: RequestContext) -> bytes:
        return self.tree.readlink(inode)

    @replies
    async def statfs(self, ctx: RequestContext) -> StatvfsData:
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
        some = False
        try:
            for entry in self.tree.listing(fh, start_id):
                if not pyfuse3.readdir_reply(token, entry.name, self._attributes(entry.node), entry.cursor):
                    break
                some = True
        except Exception:
            # What the token holds cannot be taken back, and beginning anew would list it twice. So it is sent;
            # the kernel goes on behind it, and that call meets the error with empty hands.
            if not some:
                raise

    async def releasedir(self, fh: int) -> None:
        self.counts["releasedir"] += 1

    @replies
    async def open(self, inode: int, flags: int, ctx: RequestContext) -> FileInfo:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise FUSEError(errno.EROFS)
        lower.check_unchanged(self.tree.content(inode))
        return FileInfo(fh=inode, keep_cache=True)

    @replies
    async def read(self, fh: int, off: int, size: int) -> bytes:
        data = await self._read(self.tree.content(fh), off, size)
        self.bytes_read += len(data)
        return data

    async def release(self, fh: int) -> None:
        self.counts["release"] += 1

    async def flush(self, fh: int) -> None:
        """Answered once: ENOSYS tells the kernel not to ask at every close."""
        raise FUSEError(errno.ENOSYS)

    async def access(self, inode: int, mode: int, ctx: RequestContext) -> bool:
        """Not asked under `default_permissions`; where it is, the kernel's own check is enough."""
        raise FUSEError(errno.ENOSYS)
