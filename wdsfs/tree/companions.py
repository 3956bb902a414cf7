"""The companions of a view: which files it depends on besides the shards, and whether one has changed.

A label file, the shards of a joined set, the names of classes. A derived record is valid as long as the shard
and all companions are as they were: the fingerprint under which it is stored is that of the shard mixed with
`CompanionWatch.number`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from wdsfs.errors import MissingShard, ShardError
from wdsfs.names import PLAIN, Reading
from wdsfs.spec.expand import Shard, expand
from wdsfs.storage.identity import GONE, Fingerprint
from wdsfs.tree import freshness, shard_set
from wdsfs.tree.composition import Composition, read_class_names
from wdsfs.tree.generations import Generations
from wdsfs.tree.label_files import LabelFile, label_file
from wdsfs.tree.shard_access import Access

log = logging.getLogger(__name__)

LOOK_SHARE = 50  # a look at all companions is believed for so many times its duration, and for a second at least


class Companions:
    """The companions by the options of a view: joined sets of shards, label files, names of classes.

    Raises what `expand.expand` raises, UsageError.
    """

    def __init__(self, wanted: Composition, reading: Reading = PLAIN) -> None:
        # Semantics decision: joined shards are read as those of the set are.
        self.joined: list[list[Shard]] = [expand([spec], reading=reading) for spec in wanted.join]
        self.labels: list[LabelFile] = [label_file(text) for text in wanted.associate]
        self.class_names = None if wanted.class_names is None else os.path.abspath(wanted.class_names)
        if self.class_names is not None:
            read_class_names(self.class_names)

    @property
    def shards(self) -> list[Shard]:
        """The shards of all joined sets."""
        return [one for shards in self.joined for one in shards]

    @property
    def files(self) -> list[bytes]:
        """The paths of all files that are read, and of those that may appear beside them."""
        return [one.path for one in self.shards] + self.others

    @property
    def digest(self) -> bytes:
        """16 bytes that differ for other companions, or the same ones read in another way."""
        parts = [one.key for one in self.shards] + self.others
        parts += [repr(file.table).encode() for file in self.labels]
        parts += [repr(sorted(one.without)).encode() for one in self.shards]
        return hashlib.blake2b(b"\0".join(parts), digest_size=16).digest()

    @property
    def others(self) -> list[bytes]:
        """The paths of those that are no shards."""
        found = [path for file in self.labels for path in file.parts]
        return found + ([os.fsencode(self.class_names)] if self.class_names is not None else [])


class CompanionWatch:
    """Looks at the companions, as often as the shards of the set are looked at.

    `slowly` is entered around a look at very many of them.
    """

    def __init__(
        self,
        companions: Companions,
        access: Access,
        tags: Generations,
        slowly: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._companions, self._access, self._tags = companions, access, tags
        self._slowly = slowly if len(companions.files) > shard_set.MANY else nullcontext
        self._seen: int | ShardError = 0  # the result of the last look
        self._seen_until, self._seen_alarms = -1.0, -1  # how long it is believed: monotonic seconds, alarms
        self._last = self._change = 0  # the last number, and how it changed then
        self._back = False  # the look before failed
        self._logged: int | ShardError = 0  # the result of which a change was logged

    def number(self) -> int:
        """64 bits that change with any companion. Raises MissingShard, UnreadableShard."""
        now = time.monotonic()
        if now > self._seen_until or self._seen_alarms != self._tags.alarms:
            self._seen_alarms = self._tags.alarms
            self._look()
            took = time.monotonic() - now
            self._seen_until = now + max(freshness.FRESH_SECONDS, LOOK_SHARE * took)
        if isinstance(self._seen, ShardError):
            raise type(self._seen)(*self._seen.args)
        return self._seen

    def _look(self) -> None:
        try:
            with self._slowly():
                packed = b"".join(one.packed for one in self._fingerprints())
        except ShardError as error:  # kept like any other result: every shard of the set asks
            self._seen = error
            return
        self._back = isinstance(self._seen, ShardError)
        self._seen = _digest(packed)
        if self._seen != self._last:
            self._change = self._seen ^ self._last
            self._last = self._seen

    def explains(self, before: Fingerprint, now: Fingerprint) -> bool:
        """True if the change of a shard's fingerprint is only that of the companions."""
        change = now.size - before.size, now.mtime_ns - before.mtime_ns, now.identity ^ before.identity
        return change == (0, 0, self._change) or (before == GONE and self._back)

    def log_change(self) -> None:
        """Log that companions have changed, once for each change."""
        if self._logged != self._seen:
            self._logged = self._seen
            log.warning("what the shards are shown with has changed; what was open from them gets ESTALE")

    def _fingerprints(self) -> list[Fingerprint]:
        found = [self._access.look(one.path) for one in self._companions.shards]
        found += [self.fingerprint_of(file) for file in self._companions.labels]
        if self._companions.class_names is not None:
            found.append(self._look_beside(os.fsencode(self._companions.class_names)))
        return found

    def _look_beside(self, path: bytes) -> Fingerprint:
        try:
            return self._access.look(path)
        except MissingShard:
            raise MissingShard(f"{os.fsdecode(path)}: the file is gone") from None

    def fingerprint_of(self, file: LabelFile) -> Fingerprint:
        """The fingerprint of a label file now, mixed with those of the files that SQLite keeps beside it.

        Raises MissingShard, UnreadableShard.
        """
        found = self._look_beside(file.path)
        for path in file.parts[1:]:
            try:
                beside = os.stat(path)
            except OSError:
                continue
            # An empty one means the same as none. Not the ctime: SQLite sets it when it opens one to read.
            if not beside.st_size:
                continue
            packed = Fingerprint(beside.st_size, beside.st_mtime_ns, beside.st_ino).packed
            found = found.mixed_with(_digest(packed))
        return found


def _digest(packed: bytes) -> int:
    """64 bits that stand for these bytes."""
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
