"""The companions of a view: the files beside its shards on which it depends, and whether one has changed.

A record of a view is valid as long as its shard and all companions (label files, joined shards, names of classes,
a list of keys) are unchanged.
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
from wdsfs.shards import GONE, Fingerprint, Shard, lasting_number
from wdsfs.spec.expand import expand
from wdsfs.tree import freshness, shard_set
from wdsfs.tree.class_names import read_class_names
from wdsfs.tree.composition import Composition
from wdsfs.tree.freshness import Generations
from wdsfs.tree.label_files import LIST, LabelFile, label_file
from wdsfs.tree.shard_access import Access

log = logging.getLogger(__name__)

LOOK_SHARE = 50  # a check of all companions is valid for this many times its duration, and at least for a second


class Companions:
    """The companions of a view: joined sets of shards, label files, a list of keys, names of classes.

    Raises what `expand.expand` raises, UsageError.
    """

    def __init__(self, composition: Composition, reading: Reading = PLAIN) -> None:
        # Semantics decision: joined shards are read as those of the set are.
        self.joined: list[list[Shard]] = [expand([spec], reading=reading) for spec in composition.join]
        self.labels: list[LabelFile] = [label_file(text) for text in composition.associate]
        self.keys = None if composition.keys is None else label_file(composition.keys, LIST)
        self.class_names = None if composition.class_names is None else os.path.abspath(composition.class_names)
        if self.class_names is not None:
            read_class_names(self.class_names)

    @property
    def shards(self) -> list[Shard]:
        """The shards of all joined sets."""
        return [shard for shards in self.joined for shard in shards]

    @property
    def files(self) -> list[bytes]:
        """The paths of all files that are read, and of those that may appear beside them."""
        return [shard.path for shard in self.shards] + self.others

    @property
    def digest(self) -> bytes:
        """16 bytes that differ for other companions, or the same ones read in another way."""
        parts = [shard.key for shard in self.shards] + self.others
        parts += [repr(file[1:]).encode() for file in self.tables]
        parts += [repr(sorted(shard.without)).encode() for shard in self.shards]
        return hashlib.blake2b(b"\0".join(parts), digest_size=16).digest()

    @property
    def tables(self) -> list[LabelFile]:
        """The label files and the list of keys."""
        return self.labels + ([] if self.keys is None else [self.keys])

    @property
    def others(self) -> list[bytes]:
        """The paths of those that are no shards."""
        paths = [path for file in self.tables for path in file.parts]
        return paths + ([os.fsencode(self.class_names)] if self.class_names is not None else [])


class CompanionWatch:
    """Checks the companions for changes, as often as the shards of the set are checked.

    `slowly` is entered while very many of them are checked.
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
        self._seen_until, self._seen_alarms = -1.0, -1  # the end of the last check's validity: seconds, alarms
        self._last = self._change = 0  # the last number, and how it changed then
        self._back = False  # the look before failed
        self._logged: int | ShardError = 0  # the result of which a change was logged

    def number(self) -> int:
        """Return 64 bits that change with any companion. Raises MissingShard, UnreadableShard."""
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
                packed = b"".join(fingerprint.packed for fingerprint in self._fingerprints())
        except ShardError as error:  # kept like any other result: every shard of the set asks
            self._seen = error
            return
        self._back = isinstance(self._seen, ShardError)
        self._seen = _digest(packed)
        if self._seen != self._last:
            self._change = self._seen ^ self._last
            self._last = self._seen

    def explains(self, before: Fingerprint, now: Fingerprint) -> bool:
        """Return True if the change of a shard's fingerprint is only that of the companions."""
        change = now.size - before.size, now.mtime_ns - before.mtime_ns, now.identity ^ before.identity
        return change == (0, 0, self._change) or (before == GONE and self._back)

    def log_change(self) -> None:
        """Log that companions have changed, once for each change."""
        if self._logged != self._seen:
            self._logged = self._seen
            log.warning("label files, joined shards or lists have changed; files that were open get ESTALE")

    def _fingerprints(self) -> list[Fingerprint]:
        fingerprints = [self._access.look(shard.path) for shard in self._companions.shards]
        fingerprints += [self.fingerprint_of(file) for file in self._companions.tables]
        if self._companions.class_names is not None:
            fingerprints.append(self._look_beside(os.fsencode(self._companions.class_names)))
        return fingerprints

    def _look_beside(self, path: bytes) -> Fingerprint:
        try:
            return self._access.look(path)
        except MissingShard:
            raise MissingShard(f"{os.fsdecode(path)}: the file is gone") from None

    def fingerprint_of(self, file: LabelFile) -> Fingerprint:
        """Return the fingerprint of a label file now, mixed with those of the files that SQLite keeps beside it.

        Raises MissingShard, UnreadableShard.
        """
        fingerprint = self._look_beside(file.path)
        for path in file.parts[1:]:
            try:
                beside = os.stat(path)
            except OSError:
                continue
            # An empty file means the same as none. The ctime is not used: SQLite sets it when it opens a file to
            # read.
            if not beside.st_size:
                continue
            packed = Fingerprint(beside.st_size, beside.st_mtime_ns, lasting_number(beside)).packed
            fingerprint = fingerprint.mixed_with(_digest(packed))
        return fingerprint


def _digest(packed: bytes) -> int:
    """Return 64 bits that stand for these bytes."""
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
