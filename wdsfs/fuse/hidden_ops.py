"""The requests about the hidden directory `.wdsfs` and its files.

What is in the directory is decided by `status/dot_wdsfs.py`. The mount's own operations (`read_ops.py`) pass
requests for these inodes to the handlers here.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

from wdsfs.fuse import protocol
from wdsfs.fuse.protocol import Request
from wdsfs.fuse.read_ops import Handler, Operations, Reply, not_implemented
from wdsfs.inodes import ROOT
from wdsfs.owner import Owner
from wdsfs.status.counters import Board, Slot
from wdsfs.status.dot_wdsfs import NAME, HiddenDirectory
from wdsfs.tree.tree import Tree

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
        """Describe the set of this tree from now on; otherwise as `attach`."""
        self.tree.attach(tree, self.slowly)
        self.slot, self._crowded = slot, crowded

    def handler_of(self, opcode: int, usual: Handler) -> Handler:
        """The handler for an opcode; `usual` is the handler for all other inodes. Changes get EROFS."""
        if opcode in _AS_USUAL or usual is not_implemented:
            return usual
        found = self._handlers.get(opcode)
        return _read_only if found is None else found[1]

    def enter(self, timeout: int) -> bytes:
        """The reply to a LOOKUP of the directory itself, which the kernel may cache for `timeout` seconds."""
        return self._entry(self.tree.lookup(ROOT, NAME), timeout)

    def _entry_timeout(self, parent: int) -> int:
        return 0

    def readdirplus(self, request: Request) -> Reply:
        """Names and types only: for attributes the kernel has to look a name up."""
        pack, attributes = protocol.line_plus, self._attributes
        return self._list(
            request, lambda entry: pack(entry.name, entry.cursor, 0, 0, attributes(entry.node), is_lookup=False)
        )

    def read(self, request: Request) -> Reply:
        offset, size = protocol.read_of(request.body)
        return self.tree.text(request.node).content[offset : offset + size]


def _read_only(request: Request) -> int:
    """The hidden directory cannot be changed."""
    return errno.EROFS
