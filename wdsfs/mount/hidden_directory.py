"""The hidden directory `.wdsfs` in the top of a mount: reports of the mount.

Programs open it by name. No listing shows it, so no loader walks into it. The mount's own operations
(`fuse/read_ops.py`) pass requests for its inodes to the operations here. Its files are `status.json`, `metrics`
and `problems.txt`.

The kernel sends no OPEN, any worker answers any READ, and the kernel reads no byte after the size that it has
cached. So a lookup of a name keeps the text of that moment as a snapshot. The number of the snapshot is part of
the inode number (an *extra*, see `inodes.py`): a reader gets one whole text from any workers. A read of an evicted
snapshot gets ESTALE, and the kernel looks the name up again.

A look at each of many shards takes long. The worker does it inside `Operations.slowly`.
"""

from __future__ import annotations

import contextlib
import errno
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from wdsfs import errors, inodes, names
from wdsfs.fuse import protocol
from wdsfs.fuse.counters import Board, Slot
from wdsfs.fuse.fuse_device import Handler, Reply
from wdsfs.fuse.protocol import Request
from wdsfs.fuse.read_ops import Operations, not_implemented
from wdsfs.inodes import HIDDEN, METRICS, PROBLEMS, ROOT, STATUS, pack_extra
from wdsfs.mount import reports
from wdsfs.mount.reports import TEXT_MAX, SetState, Text, TextRing
from wdsfs.mount_registry import RUNNING, UNSUPERVISED, Registration
from wdsfs.names import text_of
from wdsfs.tree.set_options import Owner
from wdsfs.tree.shard_set import MANY
from wdsfs.tree.tree import AT_SELF, DIRECTORY_MODE, Entry, Node, Totals, Tree

NAME = names.HIDDEN_DIRECTORY
_FILE_MODE = stat.S_IFREG | 0o444
_FILES = {b"status.json": STATUS, b"metrics": METRICS, b"problems.txt": PROBLEMS}
_COUNT_ROOM = 64  # bytes for the last line of `problems.txt`


class HiddenDirectory:
    """The hidden directory, a tree (`tree/tree.py`) of its own inodes only; any other inode gets StaleEntry.

    Made before the workers are forked; each then calls `attach`. `half_done` returns True if a commit in place was
    interrupted.
    """

    merged = False  # even in a merged tree the kernel does not keep this directory

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

    def attach(self, tree: Tree, slowly: Callable[[], AbstractContextManager[None]]) -> None:
        """Serve texts about the set of this tree from now on; `slowly` is entered around work that takes long."""
        self.tree, self.lower, self._slowly = tree, tree.lower, slowly

    # --- the entries

    def lookup(self, parent: int, name: bytes) -> Node:
        """Return the child `name` of the hidden directory, or of the top.

        Raises NoSuchEntry, NotADirectory.
        """
        if parent == ROOT and name == NAME:
            return self.getattr(pack_extra(HIDDEN))
        self._refuse_file(parent)
        if name not in _FILES:
            raise errors.NoSuchEntry(f"no {text_of(name)!r} in {text_of(NAME)}")
        with self._slowly() if len(self.lower) > MANY else contextlib.nullcontext():
            text = self._text_of(_FILES[name])
        return self.getattr(pack_extra(_FILES[name], self._snapshots.put(text)))

    def getattr(self, inode: int) -> Node:
        """Return the attributes of a node. Raises StaleEntry."""
        if inode == ROOT:
            return self.tree.getattr(ROOT)
        if self._what(inode) == HIDDEN:
            return Node(inode, DIRECTORY_MODE, 2, 0, int(self.daemon.started) * 10**9)
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
        return ROOT if self._what(inode) == HIDDEN else pack_extra(HIDDEN)

    def listing(self, inode: int, after: int = 0) -> Iterator[Entry]:
        """Yield the children of the directory after the cursor `after`, with only their inode numbers and types.

        Listing makes no texts.
        """
        self._refuse_file(inode)
        children = [(b".", inode, DIRECTORY_MODE), (b"..", ROOT, DIRECTORY_MODE)]
        children += [(name, pack_extra(what), _FILE_MODE) for name, what in _FILES.items()]
        for cursor, (name, child, mode) in enumerate(children, AT_SELF):
            if cursor > after:
                yield Entry(name, Node(child, mode, 1, 0, 0), cursor)

    def xattrs(self, inode: int) -> list[bytes]:
        """Return no names: nothing here has extended attributes."""
        return []

    def getxattr(self, inode: int, name: bytes) -> bytes:
        """Raise NoSuchAttribute."""
        raise errors.NoSuchAttribute(f"no attribute {text_of(name)}")

    def _what(self, inode: int) -> int:
        """Return the type of one of these inodes. Raises StaleEntry for any other."""
        what, number = inodes.unpack_extra(inode)
        if not HIDDEN <= what <= PROBLEMS or (what == HIDDEN and number):
            raise errors.StaleEntry(f"no inode {inode}")
        return what

    def _refuse_file(self, inode: int) -> None:
        if self._what(inode) != HIDDEN:
            raise errors.NotADirectory(f"inode {inode} is a file")

    # --- the texts

    def text(self, inode: int) -> Text:
        """Return the text of a file. Raises IsADirectory, StaleEntry."""
        if self._what(inode) == HIDDEN:
            raise errors.IsADirectory(f"inode {inode} is a directory")
        _, number = inodes.unpack_extra(inode)
        text = self._snapshots.get(number)
        if text is None:
            raise errors.StaleEntry(f"the snapshot {number} has been replaced by later ones")
        return text

    def _text_of(self, what: int) -> bytes:
        """Return the text of a file as of now, of at most TEXT_MAX bytes."""
        if what == PROBLEMS:
            return self._problems()
        if what == STATUS:
            return reports.as_json(self._report(), TEXT_MAX)
        text = reports.as_metrics(self._report())  # with many stores: as many whole lines as fit
        return text if len(text) <= TEXT_MAX else text[: text.rindex(b"\n", 0, TEXT_MAX) + 1]

    def _report(self) -> dict[str, object]:
        state = RUNNING if self.daemon.alive else UNSUPERVISED
        report = reports.gather(self.lower, self.tree.totals, self.board, self.daemon.started)
        report["set"] = self._state.read()
        return {**self.daemon.as_json(), "state": state, **report, "unfinished_commit": self._half_done()}

    def _problems(self) -> bytes:
        """Return a line for each damaged shard that is indexed. The last line counts the shards without room."""
        lines, size, rest = list[bytes](), 0, 0
        for path, problem in self.lower.damaged():
            line = f"{names.shown(f'{path}: {problem}')}\n".encode("utf-8", "surrogateescape")
            size += len(line)
            if size > TEXT_MAX - _COUNT_ROOM:
                rest += 1
            else:
                lines.append(line)
        return b"".join(lines) + (b"and %d more; see: wdsfs check\n" % rest if rest else b"")


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

    The kernel caches none of their names, so each lookup makes a new text. The text of an inode never changes.
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
        """Return names and types only. For attributes the kernel must look the name up."""
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
