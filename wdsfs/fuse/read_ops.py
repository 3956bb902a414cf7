"""The FUSE adapter: translates requests into calls of the tree, and answers.

No policy: what exists and how it looks is decided by a tree (`dataset/tree.py`). Handlers leave errors to
`Operations.answer`, which maps every exception to an errno: whatever happens at a request, the worker goes on.

Files and directories are never opened, as far as this end is concerned: OPEN and OPENDIR are answered once, with
ENOSYS, and from then on the kernel opens by itself, keeps what it has read of a file or directory for the next
opener, and names the inode in each READ. A worker serves one request at a time. What may take long (bytes that are
not in the page cache, a shard that has to be indexed) happens inside `slowly`, which lets the supervisor see to it
that others serve meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from wdsfs.dataset import content as content_module
from wdsfs.dataset.content import Content
from wdsfs.dataset.indexing import NotIndexed
from wdsfs.dataset.tree import Entry, LowerTree, Node, Tree
from wdsfs.errors import EntryError, NoSuchEntry, ShardError, StaleShard, WdsfsError
from wdsfs.fuse import protocol
from wdsfs.fuse.protocol import Attributes
from wdsfs.inodes import FOLDER, NOT_HIDDEN, ROOT, kind_of
from wdsfs.names import NAME_MAX
from wdsfs.status.counters import KINDS, Board, Slot
from wdsfs.status.dot_wdsfs import NAME as HIDDEN_NAME
from wdsfs.status.dot_wdsfs import HiddenDirectory

log = logging.getLogger(__name__)

# Shards do not change, so the kernel may keep what it knows. When one does, its inode numbers are no longer
# answered (ESTALE), and the entries of the top, which lead to them, are asked for again: within a millisecond
# where the change is heard of (`mount/watch.py`), and in any case after this time.
TIMEOUT_SECONDS = 3600
CHANGE_SECONDS = 1
# What the kernel has kept of the mount point it also tells when the mount is dead: a script that looks with stat
# would find it in order. One question a second is what that costs.
ROOT_SECONDS = 1
BLOCK_SIZE = 128 << 10  # what stat recommends for reads
FRAGMENT = 512  # bytes; the unit of `df` and of stat's blocks
QUIET_SECONDS = 30.0  # a message is logged once in this time
QUIET_MAX = 1000  # different messages remembered

# What the kernel may do with a read-only mount: the flags of INIT, and how many requests of readahead at a time.
FLAGS = (
    (protocol.ASYNC_READ | protocol.EXPORT_SUPPORT | protocol.BIG_WRITES | protocol.DO_READDIRPLUS)
    | (protocol.PARALLEL_DIROPS | protocol.MAX_PAGES | protocol.CACHE_SYMLINKS | protocol.EXPLICIT_INVAL_DATA)
    | protocol.INIT_EXT
)
BACKGROUND = 64

_OTHER = KINDS.index("other")
_TELLING = 1200  # bytes of a request behind its header that tell it from others: all of it, but for a WRITE

Reply = bytes | memoryview | int | None
Handler = Callable[[int, bytes], Reply]
TreeKind = TypeVar("TreeKind", bound=Tree)


@dataclass(frozen=True, slots=True)
class Owner:
    """Who the files belong to, and what the modes 0444 and 0555 are masked with."""

    uid: int
    gid: int
    umask: int = 0


class Operations(ABC, Generic[TreeKind]):
    """Answers the requests that read, from a tree of one kind; how its files are read is for the subclass.

    Made before the workers are forked; each then calls `attach`. `crowded` is called when this worker is about
    to wait for a disk. `change_seconds` is how long the kernel may keep what leads to a shard that may change.
    """

    tree: TreeKind
    special: HiddenDirectoryOperations | None = None  # answers for the hidden directory, if there is one
    alone = False  # whether one worker serves, and never more
    flags, write_max, room = (
        FLAGS,
        protocol.PAGE,
        protocol.REQUEST_MIN,
    )  # what the kernel is told, and its requests

    def __init__(self, owner: Owner, board: Board) -> None:
        self.owner = owner
        self.board = board
        self.slot: Slot = board.slot(0)
        self.change_seconds = CHANGE_SECONDS
        self.refusing = False
        self._said: dict[str, float] = {}
        self._told: Callable[[int], None] | None = None  # hears which inodes a listing lets the kernel know
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
                (protocol.INTERRUPT, "other", _nothing),
                (protocol.RELEASEDIR, "other", _done),
            )
        }

    def attach(self, tree: TreeKind, slot: Slot, crowded: Callable[[], None] = lambda: None) -> None:
        """Serve this tree from now on, and count in this slot."""
        self.tree = tree
        self.tree.lower.slowly = self.slowly
        self.slot, self._crowded = slot, crowded
        if self.special is not None:
            self.special.show(tree, slot, crowded)

    def refuse(self, slot: Slot) -> None:
        """Answer everything with EIO from now on, and touch nothing."""
        self.refusing, self.slot = True, slot

    def answer(self, message: bytes) -> Reply:
        """The answer to a request: bytes, an errno, or None if it wants none. Raises nothing."""
        opcode, _, node, body = protocol.take_apart(message)
        kind, handler = self._handlers.get(opcode, (_OTHER, _unknown))
        if not node & NOT_HIDDEN and node > ROOT and self.special is not None:
            handler = self.special.handler_of(opcode, handler)
        request = hash((opcode, node, body[:_TELLING]))
        slot = self.slot
        slot.begin(kind, request)
        watching = self.board.watching
        try:
            if self.refusing or (watching and self.board.is_deadly(request)):
                return None if handler is _nothing else errno.EIO
            while True:
                self.tree.lower.tidy()
                try:
                    return handler(node, body)
                except NotIndexed as wanted:
                    self._index(wanted.number)
        except Exception as error:  # whatever it is, the mount goes on: see the head of this module
            return self.errno_of(KINDS[kind], error)
        finally:
            slot.end()
            if watching:
                self.board.absolve(request)

    def answered(self) -> None:
        """The last answer has been sent."""

    # --- errors

    def errno_of(self, name: str, error: Exception) -> int:
        """The errno for an exception; logs what a person should know of."""
        if isinstance(error, EntryError):  # of what was asked, nothing is wrong here
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
        """Whatever happens in here may take long; others serve meanwhile. One may lie inside of another."""
        if self.slot.waiting:
            yield
            return
        self.slot.wait(True)
        self._crowded()
        try:
            yield
        finally:
            self.slot.wait(False)

    def _index(self, number: int) -> None:
        with self.slowly():
            self.tree.lower.try_index(number)

    # --- names and attributes

    def _attributes(self, node: Node) -> Attributes:
        inode, mode, links, size, mtime_ns = node[:5]
        seconds, ns = divmod(mtime_ns, 1_000_000_000)
        owner = self.owner
        return (
            *(inode, size, (size + FRAGMENT - 1) // FRAGMENT, seconds, seconds, seconds, ns, ns, ns),
            *(mode & ~owner.umask, links, owner.uid, owner.gid, 0, BLOCK_SIZE, 0),
        )

    def _entry(self, node: Node, timeout: int) -> bytes:
        return protocol.entry(timeout, attributes_timeout(node.inode), self._attributes(node))

    def _entry_timeout(self, parent: int) -> int:
        return self.change_seconds if parent == ROOT else TIMEOUT_SECONDS

    def lookup(self, parent: int, body: bytes) -> Reply:
        name = protocol.name_of(body)
        if len(name) > NAME_MAX:  # the kernel passes on up to 1,024 bytes
            return errno.ENAMETOOLONG
        if name == b".":
            return self._entry(self.tree.getattr(parent), TIMEOUT_SECONDS)
        if name == b"..":
            return self._entry(self.tree.getattr(self.tree.parent(parent)), TIMEOUT_SECONDS)
        timeout = self._entry_timeout(parent)
        try:
            return self._entry(self.tree.lookup(parent, name), timeout)
        except (NoSuchEntry, ShardError) as error:
            # Also when one tree over all shards cannot be read in full: what is wrong is said in there.
            if parent == ROOT and name == HIDDEN_NAME and self.special is not None:
                return self.special.enter(timeout)
            if isinstance(error, ShardError):
                raise
            # Remembered, too: loaders probe for files that are not there. In one tree over all shards the name may
            # turn up in any of them.
            return protocol.no_entry(self.change_seconds if self.tree.merged else timeout)

    def getattr(self, inode: int, body: bytes) -> Reply:
        return protocol.attributes(attributes_timeout(inode), self._attributes(self.tree.getattr(inode)))

    def readlink(self, inode: int, body: bytes) -> Reply:
        return self.tree.readlink(inode)

    def statfs(self, inode: int, body: bytes) -> Reply:
        with self.slowly():  # looks at every shard
            totals = self.tree.totals()
        blocks = (totals.bytes + FRAGMENT - 1) // FRAGMENT
        return protocol.statfs(blocks, totals.members, BLOCK_SIZE, FRAGMENT, NAME_MAX)

    def getxattr(self, inode: int, body: bytes) -> Reply:
        room, name = protocol.xattr_of(body)
        return _fitting(self.tree.getxattr(inode, name), room)

    def listxattr(self, inode: int, body: bytes) -> Reply:
        room, _ = protocol.xattr_of(body)
        return _fitting(b"".join(name + b"\0" for name in self.tree.xattrs(inode)), room)

    # --- directories and files

    def opendir(self, inode: int, body: bytes) -> Reply:
        """The kernel keeps listings; not in one tree over all shards: its directories change and stay the same."""
        return protocol.opened() if self.tree.merged else errno.ENOSYS

    def _run(self, inode: int, after: int, room: int) -> bytes | None:
        """All lines after the cursor `after` that READDIRPLUS has room for, made at once; None: one by one."""
        return None

    def readdirplus(self, inode: int, body: bytes) -> Reply:
        timeout, pack, attributes = self._entry_timeout(inode), protocol.line_plus, self._attributes
        return self._list(
            inode,
            body,
            lambda entry: pack(entry.name, entry.cursor, timeout, TIMEOUT_SECONDS, attributes(entry.node)),
            self._told,
            self._run,
        )

    def readdir(self, inode: int, body: bytes) -> Reply:
        return self._list(
            inode, body, lambda entry: protocol.line(entry.name, entry.cursor, entry.node.inode, entry.node.mode)
        )

    def _list(
        self,
        inode: int,
        body: bytes,
        pack: Callable[[Entry], bytes],
        told: Callable[[int], None] | None = None,
        rest: Callable[[int, int, int], bytes | None] = lambda inode, after, room: None,
    ) -> bytes:
        """The lines that there is room for. `rest` makes those behind a cursor in one go, if it can."""
        after, room = protocol.read_of(body)
        lines: list[bytes] = []
        tried = False
        try:
            found = rest(inode, after, room)
            if found is not None:
                return found
            for entry in self.tree.listing(inode, after):
                line = pack(entry)
                room -= len(line)
                if room < 0:
                    break
                lines.append(line)
                if told is not None and entry.name not in (b".", b".."):
                    told(entry.node.inode)
                if not tried and kind_of(entry.cursor) > FOLDER:  # the first behind those that are not alike
                    tried, found = True, rest(inode, entry.cursor, room)
                    if found is not None:
                        lines.append(found)
                        break
        except Exception:
            # What is listed already is sent, since the kernel goes on behind it; that call meets the error with
            # empty hands.
            if not lines:
                raise
        return b"".join(lines)

    @abstractmethod
    def read(self, inode: int, body: bytes) -> Reply:
        """The bytes of a file."""

    def _read(self, content: Content, offset: int, size: int) -> bytes | memoryview:
        data: bytes | memoryview | None = content_module.read_cached(content, offset, size)
        if data is None:
            with self.slowly():
                data = content_module.read(content, offset, size)
        self.slot.read(len(data))
        return data


class ReadOperations(Operations[LowerTree]):
    """Answers the requests of a read-only mount."""

    def _run(self, inode: int, after: int, room: int) -> bytes | None:
        run = self.tree.run(inode, after, room // protocol.LINE_MIN)
        if run is None:
            return None
        return protocol.lines_plus(
            *(run.names, run.sizes, run.mtimes_ns, run.inode, run.cursor),
            self._attributes(Node(run.inode, run.mode, run.links, 0, 0)),
            *(TIMEOUT_SECONDS, TIMEOUT_SECONDS, room),
        )

    def read(self, inode: int, body: bytes) -> Reply:
        offset, size = protocol.read_of(body)
        return self._read(self.tree.content(inode), offset, size)


# Requests that are answered for the hidden directory as for any other inode: nothing in them is about what it
# holds.
_AS_USUAL = frozenset(
    (
        *(protocol.OPENDIR, protocol.RELEASEDIR, protocol.STATFS, protocol.FSYNC, protocol.FSYNCDIR),
        *(protocol.FORGET, protocol.BATCH_FORGET, protocol.INTERRUPT),
    )
)


class HiddenDirectoryOperations(Operations[HiddenDirectory]):
    """Answers the requests about the hidden directory and what is in it, in the place of the mount's own
    operations.

    The kernel keeps no name of them: the next look is to find the text of that moment. What it knows of an inode
    never changes.
    """

    def __init__(self, owner: Owner, board: Board, tree: HiddenDirectory) -> None:
        super().__init__(owner, board)
        self.tree = tree
        for opcode in _AS_USUAL & self._handlers.keys():
            del self._handlers[opcode]

    def show(self, tree: Tree, slot: Slot, crowded: Callable[[], None]) -> None:
        """Tell of the set that this tree shows; otherwise as `attach`."""
        self.tree.attach(tree, self.slowly)
        self.slot, self._crowded = slot, crowded

    def handler_of(self, opcode: int, usual: Handler) -> Handler:
        """What answers a request for which other inodes have the handler `usual`. Whoever wants a change gets
        EROFS."""
        if opcode in _AS_USUAL or usual is _unknown:
            return usual
        return self._handlers.get(opcode, (_OTHER, _read_only))[1]

    def enter(self, timeout: int) -> bytes:
        """The answer to a LOOKUP of the directory itself, which the kernel may keep so long (s)."""
        return self._entry(self.tree.lookup(ROOT, HIDDEN_NAME), timeout)

    def _entry_timeout(self, parent: int) -> int:
        return 0

    def readdirplus(self, inode: int, body: bytes) -> Reply:
        """Names and types only: to know more, the kernel has to look a name up."""
        pack, attributes = protocol.line_plus, self._attributes
        return self._list(
            inode, body, lambda entry: pack(entry.name, entry.cursor, 0, 0, attributes(entry.node), told=False)
        )

    def read(self, inode: int, body: bytes) -> Reply:
        offset, size = protocol.read_of(body)
        return self.tree.text(inode).content[offset : offset + size]


def attributes_timeout(inode: int) -> int:
    """How long (s) the kernel may keep what stat says of an inode."""
    return ROOT_SECONDS if inode == ROOT else TIMEOUT_SECONDS


def _fitting(value: bytes, room: int) -> bytes | int:
    """The answer to a question for extended attributes: how much room is needed, or the value if it fits."""
    if not room:
        return protocol.xattr_size(len(value))
    return value if len(value) <= room else errno.ERANGE


def _nothing(node: int, body: bytes) -> None:
    """For what wants no answer. Nothing is remembered of an inode, so there is nothing to forget."""


def _done(node: int, body: bytes) -> bytes:
    """Done, and nothing to say of it."""
    return b""


def _read_only(node: int, body: bytes) -> int:
    """Nobody can change this."""
    return errno.EROFS


def _unknown(node: int, body: bytes) -> int:
    """Says once and for all that there is no such operation. For OPEN, OPENDIR, FLUSH and ACCESS that means: do it
    yourself."""
    return errno.ENOSYS
