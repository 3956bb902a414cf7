"""The pusher of a mount: a process that fills the kernel's caches ahead of passes.

It answers no request, so it may wait for the lock of a page that a READ in flight holds (FUSE_NOTIFY_STORE): two
workers that store into each other's pages would wait forever. If the pusher is killed, only speed is lost.

The pusher stores a pass in windows of files. It leaves out one file in the middle of each window, the tripwire.
The READ for the tripwire shows that the reader continues, and the pusher stores the next window while the reader
reads the second half. So a pass costs one request for each window. Windows grow as long as the reader reaches
tripwires.

If a client lists one sample after the other, the lister (`lister.py`) lists windows of samples in the same way.
The kernel accepts content only for files that it knows, and it knows the files of a sample after a listing. So if
a client also reads the files, the pusher stores them as soon as their samples are listed.
"""

from __future__ import annotations

import logging
import math
import os
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from wdsfs.errors import StaleShard, WdsfsError
from wdsfs.fuse.child_process import HelperProcess
from wdsfs.fuse.fuse_device import clone_device
from wdsfs.fuse.lister import Lister, SampleDirectory
from wdsfs.fuse.page_cache import Ended, Members, PageCache, Stored
from wdsfs.fuse.pass_notes import PATIENCE_MAX, REACH_MAX, REGION_BITS, PassNotes
from wdsfs.inodes import MEMBER, SAMPLE, index_of, kind_of, pack, position, unpack
from wdsfs.tree.indexing import NotIndexed
from wdsfs.tree.tree import LowerTree

log = logging.getLogger(__name__)

IDLE_SECONDS = 10.0  # without a call; then the process ends, and its memory is free
WINDOW_FIRST, WINDOW_MAX = 8, 64  # files
WINDOW_SAMPLES = 96  # more than `lister.MARGIN`
WINDOW_BYTES = 8 << 20
WIRE_EACH = REACH_MAX // 2  # inode numbers, where files of samples are stored
# Files from where a reader is to the next that are stored. It reads those itself meanwhile. With 1 it waited for
# the file that was being stored, and 200 kB took 125 us instead of 104 (3 kB and 76 kB: no difference).
NEAR = 3
PASSES_MAX = 64  # at a time
AHEAD_MAX = WINDOW_MAX * REACH_MAX  # inode numbers from a reader to the files of a sample that is listed ahead

FAILURES_MAX = 5  # after which nothing is pushed any more
_NOTHING_PUSHED = "nothing is pushed ahead of readers: %s"


@dataclass(slots=True, eq=False)
class Pass:
    """A sequential reader: its last inode, the step between its files, and the pages that are stored for it.

    Files with inode numbers up to `end` are stored, except tripwires; `wire` is the next tripwire, 0 without one.
    For a client that lists samples, read "samples" for files, and "listed" for stored.
    """

    last: int
    step: int
    end: int
    wire: int = 0
    window: int = WINDOW_FIRST  # files, or samples
    windows: int = 0  # windows whose tripwire the reader has reached
    files: int = 0  # files that the reader has not passed, and their bytes
    bytes: int = 0


class PassTable:
    """The passes of one kind, readers of files or clients that list samples; `notes` are those of the workers.

    The first window of a pass has `first` files or samples, a later one up to `most`.
    """

    def __init__(self, notes: PassNotes, first: int, most: int) -> None:
        self._notes, self._first, self._most = notes, first, most
        self._passes: list[Pass] = []  # the latest call, or nearly so, was for the last one

    def __iter__(self) -> Iterator[Pass]:
        return iter(self._passes)

    def has_ahead(self, inode: int) -> bool:
        """Return True if this file or sample is between a pass and its tripwire.

        First end the passes whose windows reach it and that have no tripwire from here on: their clients have
        stopped, or are elsewhere.
        """
        self._passes = [going for going in self._passes if not max(going.last, going.wire) < inode <= going.end]
        return any(going.last <= inode <= going.wire for going in self._passes)

    def come_to(self, inode: int, distance: int) -> Pass:
        """Advance the pass that has reached this file or sample, and return it; begin a new pass if there is none.

        `distance` is how many inode numbers it is from the one before.
        """
        for going in reversed(self._passes):
            if going.last < inode <= going.end + REACH_MAX:
                break
        else:
            going = Pass(inode - distance, distance, inode, window=self._first)
            self._passes.append(going)
            if len(self._passes) > PASSES_MAX and not self._passes.pop(0).windows:
                self._notes.doubt()
        self._passes.remove(going)
        self._passes.append(going)
        going.step = math.gcd(going.step, inode - going.last)
        going.last = inode
        if going.wire and inode >= going.wire:
            self._pass_wire(going)
        return going

    def _pass_wire(self, going: Pass) -> None:
        """Make the next window larger, because the reader has reached the tripwire."""
        self._notes.passed(going.files, going.bytes)
        self._notes.trust()
        going.windows, going.wire, going.files, going.bytes = going.windows + 1, 0, 0, 0
        going.window = max(self._first, min(2 * going.window, self._most, REACH_MAX // going.step))


class Pusher:
    """Stores the next files of passes over a tree by a FUSE descriptor; has the next samples listed."""

    def __init__(self, device: int, tree: LowerTree, passes: PassNotes, lister: Lister | None) -> None:
        self.tree, self.notes = tree, passes
        self.pages, self.lister = PageCache(device, tree), lister
        self.readers = PassTable(passes, WINDOW_FIRST, WINDOW_MAX)
        self.listings = PassTable(passes, WINDOW_SAMPLES, WINDOW_SAMPLES)

    def run(self, life: int) -> None:
        """Serve calls until there is none for some time, or the mount is gone: `life` is a pipe that ends then.

        The FUSE descriptor is not polled: that would wake this process at every request. Raises OSError.
        """
        while events := self._wait(life):
            if life in events:
                return
            self.tree.lower.tidy()
            try:
                # The last call of each region: the reader has already passed the places of earlier calls. A sample
                # comes before files of its shard: else a READ would end the listing that it follows.
                latest = {inode >> REGION_BITS: (inode, distance) for inode, distance in self.notes.take()}
                for inode, distance in sorted(latest.values()):
                    with self._forgiving(inode):
                        self.go_on(inode, distance)
                for descriptor in events - {self.notes.calls}:
                    self._take_answer(descriptor)
                if self.lister is not None and not self.lister.is_whole:
                    return  # the next pusher has others
            except Ended as end:
                if end.unable:
                    log.info("the kernel takes no content ahead of readers")
                    self.notes.turn_off()
                return

    def _wait(self, life: int) -> set[int]:
        """Return the descriptors at which something has happened, none after some time."""
        poll = select.poll()
        poll.register(life, 0)
        for descriptor in (self.notes.calls, *(self.lister.busy if self.lister else ())):
            poll.register(descriptor, select.POLLIN)
        return {descriptor for descriptor, _ in poll.poll(IDLE_SECONDS * 1000)}

    @contextmanager
    def _forgiving(self, inode: int) -> Iterator[None]:
        """Leave the pass at this inode for a while, after an error. Its reader gets the errors of its files."""
        try:
            try:
                yield
            except NotIndexed as wanted:
                if not wanted.shards.was_indexed_elsewhere(wanted.number):  # else a worker has indexed it
                    raise
        except (WdsfsError, NotIndexed) as error:
            log.debug("nothing is pushed: %s", error)
            self.notes.postpone(inode)
            if isinstance(error, StaleShard):
                self.tree.lower.distrust()

    def go_on(self, inode: int, distance: int) -> None:
        """Store the files after `inode`, which was read; the READ before it was `distance` inode numbers back.

        Have the samples after it listed, if it is a sample that was listed.
        """
        is_listing = kind_of(inode) == SAMPLE
        going = (self.listings if is_listing else self.readers).come_to(inode, distance)
        # The one after it is being asked for while this is done.
        first = max(inode + 2 * going.step, going.end)
        first += (inode - first) % going.step
        if first - inode > going.window * going.step:  # a late call
            return
        inodes = range(first, first + going.window * going.step, going.step)
        goes_on = self._list(inodes, going) if is_listing else self._is_listed(inode) or self._store(inodes, going)
        if not goes_on:
            # A pass that has gone on goes on again soon: names are listed late, or too many samples wait for that.
            self.notes.postpone(inode, WINDOW_MAX if going.windows else PATIENCE_MAX)

    def _list(self, inodes: range, going: Pass) -> bool:
        """Have samples listed for a pass; returns False if there are none. Raises what `Lister.samples` does."""
        if self.lister is None or not (samples := self.lister.samples(inodes)):
            going.wire = 0  # at the end of the shard the client reaches no further tripwire
            return False
        end, wire = samples[-1].inode + 1, samples.pop(len(samples) // 2).inode
        if not self.lister.begin(samples):
            return False
        going.end, going.wire = end, wire
        return True

    def _is_listed(self, inode: int) -> bool:
        """Return True if samples are listed from the sample of this file on: `_store_listed` stores files."""
        if self.lister is None:
            return False
        tag, number, where = unpack(inode)
        entry = self.tree.lower.record(number, tag).entry_of(index_of(where))
        sample = pack(tag, number, position(SAMPLE, entry))
        return self.listings.has_ahead(sample)

    def _take_answer(self, descriptor: int) -> None:
        """Store the files of samples that were listed, if a client reads files before them. Raises Ended."""
        if self.lister is not None and (samples := self.lister.answer(descriptor)):
            with self._forgiving(samples[0].inode):
                self._store_listed(samples)

    def _store_listed(self, samples: Sequence[SampleDirectory]) -> None:
        tag, number, _ = unpack(samples[0].inode)
        record, base = self.tree.lower.record(number, tag), pack(tag, number, position(MEMBER, 0))
        first, last = (record.entry_members(index_of(samples[at].inode)) for at in (0, -1))
        going = self._reader_before(base, base + first.start, base + last.stop)
        if going is None or going.bytes > 2 * WINDOW_BYTES:
            return
        ranges = [record.entry_members(index_of(sample.inode)) for sample in samples]
        inodes = [base + member for members in ranges for member in members]
        chosen = [inode for inode in inodes if (inode - going.last) % going.step == 0]
        members = self.pages.members(chosen, WINDOW_BYTES)
        # As many tripwires as keep the reader recognised; one of them at a time tells what it has gone past.
        steps = pairwise([going.end - 1, *members.inodes])
        wires = [at for at, (last, inode) in enumerate(steps) if inode // WIRE_EACH > last // WIRE_EACH]
        self._put(members, going, wires)

    def _reader_before(self, base: int, begin: int, end: int) -> Pass | None:
        """Return the reader that comes first to the files from `begin` to `end`, of the shard of file `base`."""
        near = (going for going in self.readers if max(base, begin - AHEAD_MAX) <= going.last < end)
        return max(near, key=lambda going: going.last, default=None)

    def _store(self, inodes: range, going: Pass) -> bool:
        """Store files for a pass; returns False if the kernel takes none. Raises what `PageCache.store` does."""
        members = self.pages.members(inodes, WINDOW_BYTES)
        going.wire, middle = 0, len(members.inodes) // 2
        stored = self._put(members, going, [middle] if middle else [])
        return stored.files > 0 or (not stored.refused and bool(members.inodes))

    def _put(self, members: Members, going: Pass, wires: Sequence[int]) -> Stored:
        """Store files for a pass, but for those in the rows `wires`."""
        if wires:
            going.wire = going.wire or members.inodes[wires[0]]
        for at in reversed(wires):
            members = members.without(at)
        stored = self.pages.store(members, lambda: self._front(going))
        going.files, going.bytes = going.files + stored.files, going.bytes + stored.bytes
        if stored.files:
            going.end = max(going.end, stored.last + 1)
        self.notes.stored(stored.files, stored.bytes)
        return stored

    def _front(self, going: Pass) -> int:
        """Return the last file that the reader asks for before it can be stored; 0 if that is not known."""
        last = self.notes.last(going.last)
        is_near = 0 <= last - going.last <= REACH_MAX
        return last + NEAR * going.step if is_near else 0


# --- its process


class PushedMount(NamedTuple):
    """A mount as the pusher gets it.

    `device` is the FUSE descriptor of the supervisor. `place` is the mount point and the device number of the
    mount, None if it is unknown. `life` is the reading end of a pipe whose writers are the processes that serve.
    `refuse` answers all requests at a descriptor with EIO.
    """

    device: int
    place: tuple[str, int] | None
    life: int
    refuse: Callable[[int], None]


class PusherProcess(HelperProcess):
    """The pusher of a mount, of which the workers' notes are `passes`."""

    def __init__(self, passes: PassNotes) -> None:
        super().__init__("the process that pushes content ahead of readers")
        self.passes = passes
        self._failures = 0

    def fork(self, work: Callable[[], int]) -> None:
        """Fork the process. Without memory for it nothing happens: the calls stay, so the next one tries again."""
        try:
            super().fork(work)
        except OSError as error:
            log.error(_NOTHING_PUSHED, error.strerror)
            return
        self.passes.pusher = self.pid

    def reap(self) -> int | None:
        """Collect the process if it has ended. After some failures in a row, stop pushing."""
        code = super().reap()
        self.passes.pusher = self.pid
        if code is not None and code > 0:  # it has said why
            self._failures += 1
            if self._failures == FAILURES_MAX:
                log.error("nothing is pushed ahead of readers any more, until the next mount")
                self.passes.turn_off()
        return code


def push_ahead(mount: PushedMount, tree: LowerTree, passes: PassNotes) -> int:
    """Push content ahead of readers until no pass calls for it; return the exit code of the process."""
    device = _own_device(mount.device)
    try:
        lister = _lister(mount, device, tree, passes)
    except OSError as error:  # no memory, too many processes: the next pusher tries again
        log.error(_NOTHING_PUSHED, error.strerror)
        return 0
    threading.Thread(target=_outlive, args=(mount, device), daemon=True).start()
    Pusher(device, tree, passes, lister).run(mount.life)
    return 0


def _own_device(shared: int) -> int:
    """Return a descriptor for the pusher alone, and close the shared one; the shared one if there can be no other.

    So if all other processes are killed, the kernel ends a READ even if the pusher waits for its page.
    """
    try:
        device = clone_device(shared)
    except OSError:
        return shared
    os.close(shared)
    return device


def _lister(mount: PushedMount, device: int, tree: LowerTree, passes: PassNotes) -> Lister | None:
    """Return the lister of samples ahead of clients; None where that is not possible. Raises OSError.

    Without samples there is nothing to list. With the shared descriptor the lister would keep the mount alive, and
    wait for a listing that no process can answer.
    """
    if mount.place is None or device == mount.device or tree.files_layout:
        return None
    return Lister(tree, passes, *mount.place, release=lambda: os.close(device))


def _outlive(mount: PushedMount, device: int) -> None:
    """Refuse requests once all other processes are gone, in a thread of the pusher.

    The pusher may wait uninterruptibly for a READ that no worker has received. The descriptor of the pusher would
    then keep the mount, and so that READ, forever.
    """
    select.select([mount.life], [], [])
    mount.refuse(device)
