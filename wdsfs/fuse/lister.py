"""Lists samples ahead of a client, so that the kernel has their listings in its cache.

The kernel caches a listing when a client has read it to its end; no message puts a listing into the cache. So the
lister is a client of its own mount. Its processes wait for workers, and no process waits for them. They list for
some milliseconds at a time, and only as long as the client lives. Without a detached mount an open directory keeps
the mount busy.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from wdsfs import host, mount_table
from wdsfs.fuse.child_process import start_child
from wdsfs.fuse.pass_notes import REGION_BITS, PassNotes
from wdsfs.inodes import POSITION, index_of, unpack
from wdsfs.tree.tree import LowerTree, folder_path

# Processes, not threads: these would take turns at the interpreter with what stores content (80 calls of futex(2)
# for each sample).
PROCESSES = 2
TURN = 16  # samples that a process lists for one message
# Samples from where a client is to the next that are listed. A client that has come up lists these itself, slowly:
# meanwhile the next ones are listed and pushed. With 8 it read most of their files before they were pushed.
MARGIN = 40
DUE_MAX = 256  # samples that wait for a process
# Of a descriptor of the lister. No other program opens a directory with O_DSYNC, and the kernel passes it on.
FLAG = os.O_DSYNC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | FLAG
_MESSAGE_MAX = TURN + 1 << 12  # bytes: an inode number, and paths of up to 4,095


class SampleDirectory(NamedTuple):
    """The directory of a sample: its inode number, and its path below the top of the mount."""

    inode: int
    path: bytes


class Lister:
    """Lists samples of a tree by its mount, which has this mount point and device number.

    `release` is called in each of its processes, to close descriptors that would keep the mount alive.
    """

    def __init__(
        self, tree: LowerTree, passes: PassNotes, mountpoint: str, device: int, release: Callable[[], None]
    ) -> None:
        self.tree, self.passes, self._mountpoint, self._device = tree, passes, mountpoint, device
        self._due: deque[SampleDirectory] = deque()
        self._at_work: dict[int, tuple[socket.socket, list[SampleDirectory]]] = {}
        self._idle: list[socket.socket] = []
        for _ in range(PROCESSES):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            work = partial(self._serve, theirs, (ours, *self._idle), release)
            start_child(work, "a process that lists samples ahead of clients")
            theirs.close()
            self._idle.append(ours)

    def close(self) -> None:
        """End the processes. They end with this one, too."""
        for connection in (*self._idle, *(connection for connection, _ in self._at_work.values())):
            connection.close()

    @property
    def is_whole(self) -> bool:
        """False once one of the processes has ended."""
        return len(self._idle) + len(self._at_work) == PROCESSES

    @property
    def busy(self) -> Iterable[int]:
        """The descriptors at which answers are awaited."""
        return self._at_work

    def samples(self, inodes: range) -> list[SampleDirectory]:
        """Return the directories of the samples among these inodes of one shard.

        Raises NotIndexed, ShardErrors.
        """
        tag, number, where = unpack(inodes[0])
        end = inodes[0] - index_of(where) + self.tree.lower.record(number, tag).entries
        folders: dict[int, bytes] = {}
        samples, names, first = [], list[bytes](), 0
        for inode in range(inodes.start, min(inodes.stop, end), inodes.step):
            if not 0 <= inode - first < len(names):
                parent, name = self.tree.places(inode)[0]
                if parent not in folders:
                    folders[parent] = folder_path(self.tree, parent)
                run = self.tree.run(parent, inode & POSITION, inodes.stop - inode)
                names, first = [name, *(run.names if run else ())], inode
                folder = folders[parent]
            samples.append(SampleDirectory(inode, folder + names[inode - first]))
        return samples

    def begin(self, samples: Iterable[SampleDirectory]) -> bool:
        """Have samples listed; returns False if too many are waiting already."""
        if len(self._due) > DUE_MAX:
            return False
        self._due.extend(samples)
        self._give()
        return True

    def answer(self, descriptor: int) -> list[SampleDirectory]:
        """Return the samples that the process at a descriptor of `busy` has listed, and give it more work."""
        connection, samples = self._at_work.pop(descriptor)
        try:
            is_done = bool(connection.recv(1))
        except OSError:
            is_done = False
        if not is_done:  # it was killed
            connection.close()
            return []
        self.passes.listed(len(samples))
        self._idle.append(connection)
        self._give()
        return samples

    def _give(self) -> None:
        while self._idle and (turn := self._turn()):
            connection = self._idle.pop()
            with contextlib.suppress(ConnectionError):  # it was killed
                connection.send(b"\0".join([b"%d" % turn[0].inode, *(sample.path for sample in turn)]))
            self._at_work[connection.fileno()] = connection, turn

    def _turn(self) -> list[SampleDirectory]:
        """Return the next samples of one pass, from the first that can be listed before the client reaches it."""
        turn = list[SampleDirectory]()
        while self._due and len(turn) < TURN:
            step = self._due[0].inode - turn[-1].inode if turn else 1
            if not 0 < step < 1 << REGION_BITS:  # it is of another pass, or another shard
                break
            sample = self._due.popleft()
            if sample.inode <= self.passes.last(sample.inode) + MARGIN:
                continue
            if turn or not self._has_ended(sample.inode):
                turn.append(sample)
        return turn

    def _has_ended(self, inode: int) -> bool:
        """Return True if the client of the pass at this sample has ended; one in a container counts as alive."""
        try:
            if client := self.passes.client(inode):
                os.kill(client, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False

    # --- the processes

    def _serve(
        self, connection: socket.socket, others: Iterable[socket.socket], release: Callable[[], None]
    ) -> int:
        """List the samples that the other end names, until it is closed, or the mount is gone; return 0."""
        host.end_with_parent()  # a stopped process would keep the mount alive by its open files
        release()
        for other in others:
            other.close()
        with contextlib.suppress(OSError):
            while message := connection.recv(_MESSAGE_MAX):
                first, *paths = message.split(b"\0")
                top = mount_table.detached(self._mountpoint)
                try:
                    if os.fstat(top).st_dev != self._device:  # something else is mounted there
                        break
                    if not self._has_ended(int(first)):
                        for path in paths:
                            _list(top, path)
                finally:
                    os.close(top)
                connection.send(b"\0")
        return 0


def _list(top: int, path: bytes) -> None:
    """Read a listing to its end. If this fails, leave the sample to the clients."""
    with contextlib.suppress(OSError):
        folder = os.open(path, _FOLDER, dir_fd=top)
        try:
            os.listdir(folder)
        finally:
            os.close(folder)
