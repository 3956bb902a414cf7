"""FUSE requests that only read (lookup, listing, read): calls a tree, and turns its answers into replies.

There is no policy here: a tree (`tree/tree.py`) decides which names exist and how they look. Handlers leave errors
to `Operations.answer`, which maps every exception to an errno, so that no error in a request ends the worker.

Files and directories are never opened here: OPEN and OPENDIR are answered once, with ENOSYS. From then on the
kernel opens by itself, keeps cached content and listings for the next open, and names the inode in each READ. A
worker serves one request at a time. Slow work (bytes that are not in the page cache, a shard that has to be
indexed) is done inside `slowly`: the supervisor may start further workers meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from wdsfs import waits
from wdsfs.errors import EntryError, Interrupted, NoSuchEntry, ShardError, StaleShard, WdsfsError
from wdsfs.fuse import protocol
from wdsfs.fuse.counters import KINDS, Board, Slot
from wdsfs.fuse.fuse_device import Handler, Reply
from wdsfs.fuse.lister import FLAG as LISTER_FLAG
from wdsfs.fuse.protocol import Attributes, CommonAttributes, Request
from wdsfs.inodes import FOLDER, NOT_HIDDEN, ROOT, SAMPLE, kind_of
from wdsfs.log_lines import LoggedMessages
from wdsfs.names import HIDDEN_DIRECTORY, NAME_MAX
from wdsfs.tree import content as content_module
from wdsfs.tree.content import Content
from wdsfs.tree.indexing import Attempts, NotIndexed
from wdsfs.tree.set_options import Owner
from wdsfs.tree.tree import Entry, LowerTree, Node, Tree

if TYPE_CHECKING:
    from wdsfs.door.remote_side import FetcherLink

log = logging.getLogger(__name__)

# Shards rarely change, so the kernel may cache names and attributes for long. When a shard does change, its inode
# numbers get ESTALE, and the kernel looks up the entries of the top, which lead to them, again: within a
# millisecond where inotify reports the change (`mount/followed_set.py`), else after CHANGE_SECONDS.
TIMEOUT_SECONDS = 3600
CHANGE_SECONDS = 1
# While the kernel has the attributes of the mount point cached, stat of a dead mount succeeds, and a script takes
# the mount for alive. A short time costs one GETATTR a second.
ROOT_SECONDS = 1
BLOCK_SIZE = 128 << 10  # what stat recommends for reads
FRAGMENT = 512  # bytes; the unit of `df` and of stat's blocks

# Flags of INIT for a read-only mount, and how many readahead requests the kernel may send at a time.
FLAGS = (
    (protocol.ASYNC_READ | protocol.EXPORT_SUPPORT | protocol.BIG_WRITES | protocol.DO_READDIRPLUS)
    | (protocol.PARALLEL_DIROPS | protocol.MAX_PAGES | protocol.CACHE_SYMLINKS | protocol.EXPLICIT_INVAL_DATA)
    | protocol.INIT_EXT
)
# When more than three quarters of these are in flight, the kernel stops reading ahead, and sends more, smaller
# requests. Requests that are handed over wait for the network, so there have to be more of them.
BACKGROUND, BACKGROUND_REMOTE = 64, 1024

_OTHER = KINDS.index("other")
_HASHED = 1200  # bytes of a body that are compared to recognise a request: the whole body, except of a WRITE
_WITHOUT_REPLY = frozenset((protocol.FORGET, protocol.BATCH_FORGET, protocol.INTERRUPT))

TreeKind = TypeVar("TreeKind", bound=Tree)


class HiddenHandlers(Protocol):
    """Answers requests for inodes of the hidden directory; see `hidden_directory.HiddenDirectoryOperations`."""

    def show(self, tree: Tree, slot: Slot, crowded: Callable[[], None]) -> None:
        """Describe the set of this tree from now on; otherwise as `Operations.attach`."""

    def handler_of(self, opcode: int, usual: Handler) -> Handler:
        """Return the handler for an opcode; `usual` is the handler for all other inodes."""

    def enter(self, timeout: int) -> bytes:
        """Return the reply to a LOOKUP of the hidden directory, cached for `timeout` seconds."""


class Operations(ABC, Generic[TreeKind]):
    """Answers the requests that read, from a tree of one kind. A subclass decides how it reads files.

    An instance is made before the workers are forked; each worker then calls `attach`, and `crowded` before it
    waits for a disk. `change_seconds` is how long the kernel may cache names that lead to a shard that may change.
    """

    tree: TreeKind
    hidden: HiddenHandlers | None = None
    # Answers reads of remote shards in the place of a worker. None where a worker has to wait for the bytes,
    # because the kernel would not send requests again that a fetcher had when it died.
    fetcher: FetcherLink | None = None
    alone = False  # True where no second worker may serve
    # For INIT: flags, bytes of the largest WRITE. Bytes of the largest request.
    flags, write_max, room = FLAGS, protocol.PAGE, protocol.REQUEST_MIN

    def __init__(self, owner: Owner, board: Board) -> None:
        self.owner = owner
        self.board = board
        self.counts_hits = bool(board.hits)
        self.slot: Slot = board.slot(0)
        self.change_seconds = CHANGE_SECONDS
        self.refusing = False
        self._logged = LoggedMessages()
        self._looked_up: Callable[[int], None] | None = None  # called for each lookup that a listing implies
        self._crowded: Callable[[], None] = lambda: None
        self.notify: Callable[[bytes], object] = lambda note: None  # sends a notification to the kernel
        self._handlers: dict[int, tuple[int, Handler]] = {
            opcode: (KINDS.index(kind), handler)
            for opcode, kind, handler in (
                (protocol.LOOKUP, "lookup", self.lookup),
                (protocol.GETATTR, "getattr", self.getattr),
                (protocol.READLINK, "readlink", self.readlink),
                (protocol.READ, "read", self.read),
                (protocol.OPENDIR, "other", self.opendir),
                (protocol.READDIR, "readdir", self.readdir),
                (protocol.READDIRPLUS, "readdir", self.readdirplus),
                (protocol.STATFS, "statfs", self.statfs),
                (protocol.GETXATTR, "getxattr", self.getxattr),
                (protocol.LISTXATTR, "listxattr", self.listxattr),
                (protocol.FORGET, "forget", _nothing),
                (protocol.BATCH_FORGET, "forget", _nothing),
                (protocol.INTERRUPT, "other", self.interrupt),
                (protocol.RELEASEDIR, "other", lambda request: b""),
            )
        }
        self._unknown: tuple[int, Handler] = _OTHER, not_implemented

    def attach(self, tree: TreeKind, slot: Slot, crowded: Callable[[], None] = lambda: None) -> None:
        """Serve this tree from now on, and count requests in this slot."""
        self.tree = tree
        self.tree.lower.slowly = self.slowly
        self.slot, self._crowded = slot, crowded
        waits.begins = self._wait_begins
        if self.hidden is not None:
            self.hidden.show(tree, slot, crowded)

    def refuse(self, slot: Slot) -> None:
        """Answer everything with EIO from now on, and touch nothing."""
        self.refusing, self.slot = True, slot

    def answer(self, request: Request) -> Reply:
        """Return the reply to a request. Raises nothing."""
        opcode, node = request.opcode, request.node
        kind, handler = self._handlers.get(opcode, self._unknown)
        if not node & NOT_HIDDEN and node > ROOT and self.hidden is not None:
            handler = self.hidden.handler_of(opcode, handler)
        body = request.body if len(request.body) <= _HASHED else request.body[:_HASHED]
        suspect = hash((opcode, node, body.tobytes()))
        slot = self.slot
        slot.begin(kind, suspect)
        waits.client = request.pid
        watching = self.board.watching
        try:
            if self.refusing or (watching and self.board.is_deadly(suspect)):
                return None if opcode in _WITHOUT_REPLY else errno.EIO
            attempts: Attempts | None = None
            while True:
                self.tree.lower.tidy()
                try:
                    return handler(request)
                except NotIndexed as wanted:
                    attempts = attempts or Attempts()
                    attempts.index(wanted)
        except Exception as error:  # of any class: the mount must go on
            return self.errno_of(KINDS[kind], error)
        finally:
            waits.client = 0
            if slot.waiting:
                slot.wait(False)
            slot.end()
            if watching:
                self.board.absolve(suspect)

    def after_reply(self) -> None:
        """Do nothing, as the mount is read-only; called when the reply to a request has been sent."""

    # --- errors

    def errno_of(self, name: str, error: Exception) -> int:
        """Return the errno for an exception; logs errors that a person should know about."""
        if isinstance(error, EntryError | Interrupted):  # an error of the caller: nothing is wrong here
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
        """Log a message, but not again and again."""
        if self._logged.add(message):
            log.log(logging.ERROR if surprise else logging.WARNING, "%s", message, exc_info=surprise)

    # --- slow requests

    @contextlib.contextmanager
    def slowly(self) -> Iterator[None]:
        """Mark a blocking section (re-entrant): the supervisor may start further workers meanwhile."""
        if self.slot.waiting:
            yield
            return
        self.slot.wait(True)
        self._crowded()
        try:
            yield
        finally:
            self.slot.wait(False)

    def _wait_begins(self) -> None:
        """Note, like `slowly`, that the request waits for a server or a process, until the request ends."""
        if not self.slot.waiting:
            self.slot.wait(True)
            self._crowded()

    # --- names and attributes

    def _attributes(self, node: Node) -> Attributes:
        inode, mode, links, size, mtime_ns = node[:5]
        seconds, ns = divmod(mtime_ns, 1_000_000_000)
        return (
            *(inode, size, (size + FRAGMENT - 1) // FRAGMENT, seconds, seconds, seconds, ns, ns, ns),
            *self._common_attributes(mode, links),
        )

    def _common_attributes(self, mode: int, links: int) -> CommonAttributes:
        owner = self.owner
        return mode & ~owner.umask, links, owner.uid, owner.gid, 0, BLOCK_SIZE, 0

    def _entry(self, node: Node, timeout: int) -> bytes:
        return protocol.entry(timeout, attributes_timeout(node.inode), self._attributes(node))

    def _entry_timeout(self, parent: int) -> int:
        return self.change_seconds if parent == ROOT else TIMEOUT_SECONDS

    def lookup(self, request: Request) -> Reply:
        parent, name = request.node, protocol.name_of(request.body)
        if len(name) > NAME_MAX:  # the kernel passes on up to 1,024 bytes
            return errno.ENAMETOOLONG
        if name in (b".", b".."):
            inode = parent if name == b"." else self.tree.parent(parent)
            return self._entry(self.tree.getattr(inode), TIMEOUT_SECONDS)
        timeout = self._entry_timeout(parent)
        try:
            return self._entry(self.tree.lookup(parent, name), timeout)
        except (NoSuchEntry, ShardError) as error:
            # Also when a merged tree cannot be read completely: files of the hidden directory tell the problem.
            if parent == ROOT and name == HIDDEN_DIRECTORY and self.hidden is not None:
                return self.hidden.enter(timeout)
            if isinstance(error, ShardError):
                raise
            # Cached, too: loaders probe for files that do not exist. In a merged tree a changed shard may add the
            # name anywhere.
            return protocol.no_entry(self.change_seconds if self.tree.merged else timeout)

    def getattr(self, request: Request) -> Reply:
        inode = request.node
        return protocol.attributes(attributes_timeout(inode), self._attributes(self.tree.getattr(inode)))

    def readlink(self, request: Request) -> Reply:
        return self.tree.readlink(request.node)

    def statfs(self, request: Request) -> Reply:
        with self.slowly():  # looks at every shard
            totals = self.tree.totals()
        blocks = (totals.bytes + FRAGMENT - 1) // FRAGMENT
        return protocol.statfs(blocks, totals.members, BLOCK_SIZE, FRAGMENT, NAME_MAX)

    def getxattr(self, request: Request) -> Reply:
        room, name = protocol.xattr_of(request.body)
        return _fitting(self.tree.getxattr(request.node, name), room)

    def listxattr(self, request: Request) -> Reply:
        room, _ = protocol.xattr_of(request.body)
        return _fitting(b"".join(name + b"\0" for name in self.tree.xattrs(request.node)), room)

    # --- directories and files

    def opendir(self, request: Request) -> Reply:
        """Let the kernel cache listings; in a merged tree only of samples, because other directories change."""
        return protocol.opendir_reply(caches=kind_of(request.node) == SAMPLE) if self.tree.merged else errno.ENOSYS

    def _run(self, inode: int, after: int, room: int) -> bytes | None:
        """Return all lines after a cursor that fit into `room` bytes; None if they have to be made one by one."""
        return None

    def readdirplus(self, request: Request) -> Reply:
        run = self._run(request.node, *protocol.read_of(request.body))
        if run is not None:
            return run
        timeout, pack, attributes = self._entry_timeout(request.node), protocol.line_plus, self._attributes
        return self._list(
            request,
            lambda entry: pack(entry.name, entry.cursor, timeout, TIMEOUT_SECONDS, attributes(entry.node)),
            is_lookup=True,
        )

    def readdir(self, request: Request) -> Reply:
        return self._list(
            request, lambda entry: protocol.line(entry.name, entry.cursor, entry.node.inode, entry.node.mode)
        )

    def _list(self, request: Request, pack: Callable[[Entry], bytes], *, is_lookup: bool = False) -> bytes:
        """Return as many lines as fit. With `is_lookup` the kernel looks up each name by its line."""
        inode = request.node
        after, room = protocol.read_of(request.body)
        lines: list[bytes] = []
        tries_run = is_lookup  # once: samples and files may be of one kind
        try:
            for entry in self.tree.listing(inode, after):
                line = pack(entry)
                room -= len(line)
                if room < 0:
                    break
                lines.append(line)
                if is_lookup and self._looked_up is not None and entry.name not in (b".", b".."):
                    self._looked_up(entry.node.inode)
                if tries_run and kind_of(entry.cursor) > FOLDER:
                    tries_run, run = False, self._run(inode, entry.cursor, room)
                    if run is not None:
                        lines.append(run)
                        break
        except Exception:
            # Send the lines that there are. The kernel asks again from their end, and that request, which has no
            # lines, returns the error.
            if not lines:
                raise
        return b"".join(lines)

    @abstractmethod
    def read(self, request: Request) -> Reply:
        """Return the bytes of a file."""

    def _read(self, request: Request, content: Content) -> bytes | memoryview | None:
        offset, size = protocol.read_of(request.body)
        data: bytes | memoryview | None = content_module.read_cached(content, offset, size)
        is_hit = data is not None
        if data is None:
            may_be_far = self.fetcher is not None or self.counts_hits
            far = content_module.remote_range(content, offset, size) if may_be_far else None
            is_hit = far is not None and far.tar.is_cached(far.begin, far.end)
            if far is not None and not is_hit and self.fetcher is not None:
                far.tar.hand_over(request.unique, far.begin, far.end, far.sample)
                self.slot.read(far.end - far.begin)
                return None
            with self.slowly():
                data = content_module.read(content, offset, size)
        if is_hit and self.counts_hits and (remote := content.file.remote) is not None:
            self.slot.hit(remote.counted_as, len(data))
        self.slot.read(len(data))
        return data

    def interrupt(self, request: Request) -> None:
        """Note that a client no longer waits for a request that was handed over.

        All other requests are answered before the next one is received.
        """
        if self.fetcher is not None:
            self.fetcher.interrupt(protocol.number_of(request.body))


class ReadOperations(Operations[LowerTree]):
    """Answers the requests of a read-only mount."""

    _ahead: tuple[int, int] | None = None  # the call of the pusher that is due after the reply

    def _run(self, inode: int, after: int, room: int) -> bytes | None:
        run = self.tree.run(inode, after, room // protocol.LINE_MIN)
        if run is None:
            return None
        if not run.names:  # the end of a sample: it is asked for as often as samples are listed
            return b""
        first = protocol.self_and_parent(inode, run.parent) if run.parent else b""
        common = self._common_attributes(run.mode, run.links)
        return first + protocol.lines_plus(run, common, TIMEOUT_SECONDS, room - len(first))

    def read(self, request: Request) -> Reply:
        reply = self._read(request, self.tree.content(request.node))
        self._note(request)
        return reply

    def readdirplus(self, request: Request) -> Reply:
        reply = super().readdirplus(request)
        if reply and kind_of(request.node) == SAMPLE and not protocol.flags_of(request.body) & LISTER_FLAG:
            self._note(request)
        return reply

    def _note(self, request: Request) -> None:
        passes = self.board.passes
        if passes is not None and (distance := passes.note(request.node, request.pid)):
            self._ahead = request.node, distance

    def after_reply(self) -> None:
        """Call the pusher for a pass."""
        if self._ahead is not None and self.board.passes is not None:
            self.board.passes.call(*self._ahead)
            self._ahead = None


def attributes_timeout(inode: int) -> int:
    """Return the time (s) for which the kernel may cache the attributes of an inode."""
    return ROOT_SECONDS if inode == ROOT else TIMEOUT_SECONDS


def _fitting(value: bytes, room: int) -> bytes | int:
    """Return the reply to GETXATTR or LISTXATTR.

    The size of the value if no room is given, else the value if it fits.
    """
    if not room:
        return protocol.size_reply(len(value))
    return value if len(value) <= room else errno.ERANGE


def _nothing(request: Request) -> None:
    """Send no reply, because these requests expect none. An inode has no state here, so FORGET has no work."""


def not_implemented(request: Request) -> int:
    """Reply that this opcode is not handled, so that the kernel does not send it again.

    After OPEN, OPENDIR, FLUSH and ACCESS it does the work itself.
    """
    return errno.ENOSYS
