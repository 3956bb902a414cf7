"""The hidden directory `.wdsfs` in the top of a mount: reports of the mount, and indexes for other tools.

It can be opened by name and is never listed, so no loader walks into it. The mount's own operations
(`fuse/read_ops.py`) pass requests for its inodes to those here.

| name | inode (an *extra*, see `inodes.py`) | text |
|---|---|---|
| `status.json`, `metrics` | the number of a snapshot | of the moment when the name was looked up |
| `shards.json`, `problems.txt` | a checksum of the text | of what the shards are now |
| `dali/<shard>.idx` | the shard's number and a checksum of its fingerprint | of the shard's record |

The kernel sends no OPEN, any worker answers any READ, and the kernel reads no byte after the size that it has
cached. So an inode number stands for one text and no other as long as the mount exists: a reader gets one whole
text from any workers. A text that cannot be made again (an evicted snapshot, a set that has changed) gets ESTALE;
the kernel then looks the name up again.

Some of this takes long: indexing a shard, exporting the index of a large one, checking each of many shards. The
worker does this inside `Operations.slowly`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import mmap
import os
import stat
import struct
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

from wdsfs import errors, inodes, names
from wdsfs.fuse import protocol
from wdsfs.fuse.counters import Board, Slot
from wdsfs.fuse.protocol import Request
from wdsfs.fuse.read_ops import Handler, Operations, Reply, not_implemented
from wdsfs.index.record import Record
from wdsfs.inodes import DALI, DALI_INDEX, HIDDEN, METRICS, PROBLEMS, ROOT, SHARDS, STATUS, pack_extra
from wdsfs.interop import dali, wids
from wdsfs.mount import reports
from wdsfs.mount.reports import SetState
from wdsfs.mount_registry import RUNNING, UNSUPERVISED, Registration
from wdsfs.names import text_of
from wdsfs.tree.indexing import indexed
from wdsfs.tree.set_options import Owner
from wdsfs.tree.shard_set import MANY
from wdsfs.tree.tree import AT_PARENT, AT_SELF, DIRECTORY_MODE, Entry, Node, Totals, Tree

NAME = names.HIDDEN_DIRECTORY
KEPT_BYTES = 32 << 20  # of texts that a worker caches; the last one is always cached

_FILE_MODE = stat.S_IFREG | 0o444
_SHARD_BITS = 20
_INDEX = b".idx"
_FILES = {b"status.json": STATUS, b"metrics": METRICS, b"shards.json": SHARDS, b"problems.txt": PROBLEMS}
_FIRST = AT_PARENT + 1  # the cursor of the first child

# Texts that are kept: how many at a time, and how long each may be (bytes). What is not used takes no memory.
SNAPSHOTS, _ROOM = 256, 64 << 10
_LAST, _HEAD = struct.Struct("<Q"), struct.Struct("<QIIq")  # number, bytes, CRC-32, ns since the epoch
TEXT_MAX = _ROOM - _HEAD.size


class Text(NamedTuple):
    """The content of a file, and its mtime (ns since the epoch)."""

    content: bytes
    mtime_ns: int


class TextRing:
    """The latest texts of the workers of a mount, by number; each worker can serve those of the others.

    A status text differs from moment to moment and from worker to worker. A reader has to get one text to its end,
    though any worker may serve any part of it. So looking its name up keeps the text of that moment, under a
    number that is part of the inode number.

    A file in memory, made before the workers are forked. Numbers begin with 1 and are never used again. A text
    that is being written when its process is killed has no number yet.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("wdsfs-snapshots")

    def put(self, text: bytes) -> int:
        """Keep a text of up to TEXT_MAX bytes, and evict the oldest; returns its number."""
        with self._locked():
            number = self._last() + 1
            now = time.time_ns()
            head = _HEAD.pack(number, len(text), zlib.crc32(text), now)
            os.pwrite(self._file, head + text, _place_of(number))
            os.pwrite(self._file, _LAST.pack(number), 0)
        return number

    def get(self, number: int) -> Text | None:
        """Return the text of this number; None if it has been evicted, or never existed."""
        slot = os.pread(self._file, _HEAD.size + TEXT_MAX, _place_of(number))
        if len(slot) < _HEAD.size:
            return None
        stored, length, crc, taken_ns = _HEAD.unpack_from(slot)
        text = slot[_HEAD.size : _HEAD.size + length]
        # Read without the lock: what is being replaced meanwhile has another number, or another sum.
        return Text(text, taken_ns) if number and (stored, crc) == (number, zlib.crc32(text)) else None

    def _last(self) -> int:
        last: int = _LAST.unpack(os.pread(self._file, _LAST.size, 0).ljust(_LAST.size, b"\0"))[0]
        return last

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._file, fcntl.LOCK_EX)  # let go of by the kernel when this process dies
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)


def _place_of(number: int) -> int:
    return mmap.PAGESIZE + number % SNAPSHOTS * _ROOM


class HiddenDirectory:
    """The hidden directory, a tree (`tree/tree.py`) of its own inodes only; any other inode gets StaleEntry.

    Made before the workers are forked; each then calls `attach`. `half_done` returns True if a commit in place was
    interrupted.
    """

    merged = False  # its directories are not kept by the kernel in a merged tree, nor need they be

    def __init__(
        self,
        daemon: Registration,
        board: Board,
        snapshots: TextRing,
        state: SetState | None = None,
        half_done: Callable[[], bool] = lambda: False,
    ) -> None:
        self.daemon, self.board, self._half_done = daemon, board, half_done
        self._snapshots, self._state = snapshots, state or SetState()
        self._texts: OrderedDict[int, Text] = OrderedDict()
        self._kept_bytes = 0

    def attach(self, tree: Tree, slowly: Callable[[], AbstractContextManager[None]]) -> None:
        """Serve texts about the set of this tree from now on; `slowly` is entered around work that takes long."""
        self.tree, self.lower, self._slowly = tree, tree.lower, slowly
        # Other tools read the shards as they are, whatever is shown of them.
        self.plain = tree.lower.plain

    # --- what there is

    def lookup(self, parent: int, name: bytes) -> Node:
        """Return the child `name` of one of these directories, or of the top.

        Raises NoSuchEntry, NotADirectory.
        """
        if parent == ROOT and name == NAME:
            return self.getattr(pack_extra(HIDDEN))
        what, _ = self._open(parent)
        if what == DALI:
            return self._node(self._inode_of_index(name))
        if what != HIDDEN:
            raise errors.NotADirectory(f"{text_of(name)!r}: its parent is a file")
        if name == b"dali":
            return self.getattr(pack_extra(DALI))
        if name not in _FILES:
            raise errors.NoSuchEntry(f"no {text_of(name)!r} in {text_of(NAME)}")
        return self._node(self._make(_FILES[name]))

    def getattr(self, inode: int) -> Node:
        """Return the attributes of a node. Raises StaleEntry."""
        if inode == ROOT:
            return self.tree.getattr(ROOT)
        what, _ = self._open(inode)
        if what not in (HIDDEN, DALI):
            return self._node(inode)
        links = 3 if what == HIDDEN else 2
        return Node(inode, DIRECTORY_MODE, links, 0, int(self.daemon.started) * 10**9)

    def _node(self, inode: int) -> Node:
        text = self.text(inode)
        return Node(inode, _FILE_MODE, 1, len(text.content), text.mtime_ns)

    def readlink(self, inode: int) -> bytes:
        """Raise InvalidRequest: there are no links here."""
        raise errors.InvalidRequest(f"inode {inode} is not a symbolic link")

    def totals(self) -> Totals:
        """Return the totals of the set."""
        return self.tree.totals()

    def parent(self, inode: int) -> int:
        """Return the inode of the directory that holds this one."""
        what, _ = self._open(inode)
        return ROOT if what == HIDDEN else pack_extra(HIDDEN)

    def listing(self, inode: int, after: int = 0) -> Iterator[Entry]:
        """Yield the children of a directory after the cursor `after`, with only their inode numbers and types.

        Listing makes no texts: of a hundred thousand shards that would take an hour.
        """
        what, _ = self._open(inode)
        if what not in (HIDDEN, DALI):
            raise errors.NotADirectory(f"inode {inode} is a file")
        if after < AT_SELF:
            yield Entry(b".", _typed(inode, DIRECTORY_MODE), AT_SELF)
        if after < AT_PARENT:
            yield Entry(b"..", _typed(self.parent(inode), DIRECTORY_MODE), AT_PARENT)
        first = max(after - _FIRST + 1, 0)
        if what == DALI:
            for number in (number for number in self.lower.numbers if number >= first):
                name = _index_name(self.lower.shards[number].name)
                yield Entry(name, _typed(pack_extra(DALI_INDEX, number), _FILE_MODE), number + _FIRST)
            return
        children = [(b"dali", DALI, DIRECTORY_MODE), *((name, what, _FILE_MODE) for name, what in _FILES.items())]
        for at, (name, child, mode) in list(enumerate(children))[first:]:
            yield Entry(name, _typed(pack_extra(child), mode), at + _FIRST)

    def xattrs(self, inode: int) -> list[bytes]:
        """Return no names: nothing here has extended attributes."""
        return []

    def getxattr(self, inode: int, name: bytes) -> bytes:
        """Raise NoSuchAttribute."""
        raise errors.NoSuchAttribute(f"no attribute {text_of(name)}")

    def _open(self, inode: int) -> tuple[int, int]:
        what, number = inodes.unpack_extra(inode)
        if not HIDDEN <= what <= DALI_INDEX or (what in (HIDDEN, DALI) and number):
            raise errors.StaleEntry(f"no inode {inode}")
        return what, number

    # --- the texts

    def text(self, inode: int) -> Text:
        """Return the text of a file. Raises IsADirectory, StaleEntry, ShardErrors, ExportError."""
        what, number = self._open(inode)
        if what in (HIDDEN, DALI):
            raise errors.IsADirectory(f"inode {inode} is a directory")
        if what in (STATUS, METRICS):
            text = self._snapshots.get(number)
            if text is None:
                raise errors.StaleEntry(f"the snapshot {number} has been replaced by later ones")
            return text
        if what == DALI_INDEX:
            return self._dali_index(inode, number)
        if inode not in self._texts and self._make(what) != inode:
            raise errors.StaleEntry("the set has changed since this was looked up")
        return self._cached(inode)

    def _make(self, what: int) -> int:
        """Make a new text of a file that is about all shards; return its inode."""
        with self._slowly() if len(self.lower) > MANY else contextlib.nullcontext():
            return self._make_now(what)

    def _make_now(self, what: int) -> int:
        if what in (STATUS, METRICS):
            report = self._report()
            text = reports.as_json(report, TEXT_MAX) if what == STATUS else reports.as_metrics(report)
            return pack_extra(what, self._snapshots.put(text))
        text = self._wids_index() if what == SHARDS else self._problems()
        mtime_ns = max(map(self._mtime_ns, self.lower.numbers), default=0)
        inode = pack_extra(what, int.from_bytes(hashlib.blake2b(text, digest_size=7).digest()))
        self._keep(inode, Text(text, mtime_ns))
        return inode

    def _keep(self, inode: int, text: Text) -> None:
        replaced = self._texts.pop(inode, None)
        self._kept_bytes += len(text.content) - (len(replaced.content) if replaced else 0)
        self._texts[inode] = text
        while self._kept_bytes > KEPT_BYTES and len(self._texts) > 1:
            self._kept_bytes -= len(self._texts.popitem(last=False)[1].content)

    def _cached(self, inode: int) -> Text:
        self._texts.move_to_end(inode)
        return self._texts[inode]

    def _report(self) -> dict[str, object]:
        state = RUNNING if self.daemon.alive else UNSUPERVISED
        report = reports.gather(self.lower, self.tree.totals, self.board, self.daemon.started)
        report["set"] = self._state.read()
        return {**self.daemon.as_json(), "state": state, **report, "unfinished_commit": self._half_done()}

    def _problems(self) -> bytes:
        """Return a line for each shard that is not whole, as far as they are indexed."""
        rows = (names.shown(f"{path}: {problem}") for path, problem in self.lower.damaged())
        return "".join(f"{row}\n" for row in rows).encode("utf-8", "surrogateescape")

    def _wids_index(self) -> bytes:
        """Return the index for wids. Raises ShardErrors, ExportError if a shard is missing from it."""
        rows = []
        for number in self.lower.numbers:
            summary = indexed(self.plain.summary, number)
            if not self.plain.shards[number].reading.is_plain:
                self._refuse_irregular(number)
            # An absolute path: the reader takes others from the directory of the index.
            path = self.lower.path_text(number)
            rows.append(wids.WidsShard(path, summary.samples, summary.size))
        return wids.wids_index(rows)

    def _refuse_irregular(self, number: int) -> None:
        try:
            dali.refuse_irregular(indexed(self.plain.record, number), "wids")
        except errors.ExportError as error:
            raise errors.ExportError(f"{self.plain.path_text(number)}: {error}") from None

    def _mtime_ns(self, number: int) -> int:
        with contextlib.suppress(errors.ShardError):
            return self.lower.fingerprint(number).mtime_ns
        return 0

    # --- indexes for DALI

    @functools.cached_property
    def _numbers(self) -> dict[bytes, int]:
        return {_index_name(self.lower.shards[number].name): number for number in self.lower.numbers}

    def _inode_of_index(self, name: bytes) -> int:
        number = self._numbers.get(name)
        if number is None:
            raise errors.NoSuchEntry(f"no shard has the index {text_of(name)!r}")
        return self._inode_of_record(number, indexed(self.plain.record, number))

    @staticmethod
    def _inode_of_record(number: int, record: Record) -> int:
        return pack_extra(DALI_INDEX, record.fingerprint.sum << _SHARD_BITS | number)

    def _dali_index(self, inode: int, packed: int) -> Text:
        number = packed & inodes.SHARD_MAX
        if number >= len(self.plain):
            raise errors.StaleEntry(f"no inode {inode}")
        record = indexed(self.plain.record, number)
        if self._inode_of_record(number, record) != inode:
            self.plain.distrust()  # another process may have seen a change that this one has not looked for yet
            record = indexed(self.plain.record, number)
        if self._inode_of_record(number, record) != inode:
            raise errors.StaleEntry(f"{self.plain.path_text(number)} has changed since its index was looked up")
        if inode not in self._texts:
            try:
                with self._slowly():
                    if self.plain.is_compressed(number):
                        raise errors.ExportError("it is compressed, and DALI reads plain tars only")
                    text = b"".join(dali.dali_index(record))
            except errors.ExportError as error:
                raise errors.ExportError(f"{self.plain.path_text(number)}: {error}") from None
            self._keep(inode, Text(text, record.fingerprint.mtime_ns))
        return self._cached(inode)


def _typed(inode: int, mode: int) -> Node:
    return Node(inode, mode, 1, 0, 0)


def _index_name(shard: bytes) -> bytes:
    return names.shorten(shard, names.NAME_MAX - len(_INDEX)) + _INDEX


# Requests that get the same reply for the hidden directory as for any other inode: they do not depend on its
# content.
_AS_USUAL = frozenset(
    (
        *(protocol.OPENDIR, protocol.RELEASEDIR, protocol.STATFS, protocol.FSYNC, protocol.FSYNCDIR),
        *(protocol.FORGET, protocol.BATCH_FORGET, protocol.INTERRUPT),
    )
)


class HiddenDirectoryOperations(Operations[HiddenDirectory]):
    """Answers the requests about the hidden directory and its files, instead of the mount's own operations.

    The kernel caches none of their names: each lookup finds the text of that moment. The text of an inode never
    changes.
    """

    def __init__(self, owner: Owner, board: Board, tree: HiddenDirectory) -> None:
        super().__init__(owner, board)
        self.tree = tree
        for opcode in _AS_USUAL & self._handlers.keys():
            del self._handlers[opcode]

    def show(self, tree: Tree, slot: Slot, crowded: Callable[[], None]) -> None:
        """Describe the set of this tree from now on."""
        self.tree.attach(tree, self.slowly)
        self.slot, self._crowded = slot, crowded

    def handler_of(self, opcode: int, usual: Handler) -> Handler:
        """Return the handler for an opcode; `usual` is the handler for all other inodes. Changes get EROFS."""
        if opcode in _AS_USUAL or usual is not_implemented:
            return usual
        handler = self._handlers.get(opcode)
        return _read_only if handler is None else handler[1]

    def enter(self, timeout: int) -> bytes:
        """Return the reply to a LOOKUP of the directory itself, cached for `timeout` seconds."""
        return self._entry(self.tree.lookup(ROOT, NAME), timeout)

    def _entry_timeout(self, parent: int) -> int:
        return 0

    def readdirplus(self, request: Request) -> Reply:
        """Return names and types only: for attributes the kernel has to look a name up."""
        pack, attributes = protocol.line_plus, self._attributes
        return self._list(
            request, lambda entry: pack(entry.name, entry.cursor, 0, 0, attributes(entry.node), is_lookup=False)
        )

    def read(self, request: Request) -> Reply:
        offset, size = protocol.read_of(request.body)
        return self.tree.text(request.node).content[offset : offset + size]


def _read_only(request: Request) -> int:
    """Refuse a change."""
    return errno.EROFS
