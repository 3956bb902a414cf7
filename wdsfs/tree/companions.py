"""The parts of a view beside its shards: joined sets, label files, lists, class names; and if one has changed.

A record of a view is valid as long as its shard and all companions (label files, joined shards, names of classes,
a list of keys) are unchanged. Samples of joined sets are found by key, first in the shard beside, then in the
whole set.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdsfs.errors import MissingShard, ShardError, UsageError
from wdsfs.index.record import STRAY, Record
from wdsfs.names import PLAIN, Reading, plain_key
from wdsfs.shards import GONE, Fingerprint, Shard
from wdsfs.source import open_stream
from wdsfs.spec.expand import expand
from wdsfs.tree import freshness, shard_set
from wdsfs.tree.composition import Composition
from wdsfs.tree.freshness import Generations
from wdsfs.tree.indexing import indexed
from wdsfs.tree.label_files import LABELS, LIST, LabelFiles, fingerprints_of, label_files
from wdsfs.tree.path_table import KeyTable
from wdsfs.tree.shard_access import Access
from wdsfs.tree.shard_set import ShardSet

log = logging.getLogger(__name__)

LOOK_SHARE = 50  # a check of all companions is valid for this many times its duration, and at least for a second
# Semantics decision: white space around a class is that of ASCII, in texts as in bytes; the rest is its name.
WHITE_SPACE = " \t\n\r\v\f"
MISSING, TWICE = -1, -2  # instead of a shard's number: no shard has the key, or it occurs more than once
KEYS = b"k"  # the table of the keys of a set, in the index


class Companions:
    """The companions of a view: joined sets of shards, label files, a list of keys, names of classes.

    Raises what `expand.expand` raises, UsageError.
    """

    def __init__(self, composition: Composition, reading: Reading = PLAIN) -> None:
        # Semantics decision: joined shards are read as those of the set are.
        self.joined: list[list[Shard]] = [expand([spec], reading=reading) for spec in composition.join]
        self.labels = [label_files(text, LABELS, reading) for text in composition.associate]
        self.keys = None if composition.keys is None else label_files(composition.keys, LIST, reading)
        self.class_names = None if composition.class_names is None else os.path.abspath(composition.class_names)
        if self.class_names is not None:
            read_class_names(self.class_names)

    @property
    def shards(self) -> list[Shard]:
        """The shards of all joined sets."""
        return [shard for shards in self.joined for shard in shards]

    @property
    def files(self) -> list[bytes]:
        """The paths of all files that are read, and of files that may appear beside them."""
        return [shard.path for shard in self.shards] + self.others

    @property
    def digest(self) -> bytes:
        """16 bytes that differ for other companions, and for the same ones read in another way."""
        parts = [shard.key for shard in self.shards] + self.others
        parts += [repr(file[1:]).encode() for file in self.tables]
        parts += [repr(sorted(shard.without)).encode() for shard in self.shards]
        return hashlib.blake2b(b"\0".join(parts), digest_size=16).digest()

    @property
    def tables(self) -> LabelFiles:
        """The label files, and those of the list of keys."""
        return sum(self.labels, ()) + (self.keys or ())

    @property
    def others(self) -> list[bytes]:
        """The paths of the companions that are no shards."""
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
            log.warning("tables, joined shards or lists have changed; files that were open get ESTALE")

    def _fingerprints(self) -> list[Fingerprint]:
        fingerprints = [self._access.look(shard.path) for shard in self._companions.shards]
        fingerprints += self.fingerprints_of(self._companions.tables)
        if self._companions.class_names is not None:
            fingerprints.append(self._look_beside(os.fsencode(self._companions.class_names)))
        return fingerprints

    def _look_beside(self, path: bytes) -> Fingerprint:
        try:
            return self._access.look(path)
        except MissingShard:
            raise MissingShard(f"{os.fsdecode(path)}: the file is gone") from None

    def fingerprints_of(self, files: LabelFiles) -> tuple[Fingerprint, ...]:
        """Return the fingerprints of label files now. Raises MissingShard, UnreadableShard."""
        return fingerprints_of(files, self._look_beside)


def _digest(packed: bytes) -> int:
    """Return 64 bits that stand for these bytes."""
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


class KeysMissing(Exception):
    """The keys of a whole joined set are needed: to be loaded by `JoinedSet.load`."""

    def __init__(self, joined: JoinedSet) -> None:
        super().__init__()
        self.joined = joined


class JoinedSet:
    """The set `lower`, joined with a view of `shards`. `version` is a number that changes with any companion."""

    def __init__(self, shards: Sequence[Shard], lower: ShardSet, version: Callable[[], int]) -> None:
        self._shards, self.lower, self._version = shards, lower, version
        self._loaded, self._table = -1, b""  # the version of the table of keys, and its key

    def partner(self, number: int) -> int | None:
        """Return the shard here with the same number as a shard of the view, if both sets have as many shards."""
        at, count = self._shards[number].place or (number, len(self._shards))
        return at if len(self.lower) == count else None

    def load(self) -> None:
        """Load the keys of the whole set; index shards that are not indexed. Raises ShardError."""
        numbers, record = range(len(self.lower)), self.lower.record
        for number in numbers:
            indexed(record, number)
        self._table = indexed(self.lower.keep_table, KEYS, lambda: KeyTable.build(map(record, numbers)))
        self._loaded = self._version()

    def _keys(self) -> KeyTable:
        """Return the keys of the present set. Raises KeysMissing."""
        if self._loaded != self._version():
            raise KeysMissing(self)
        return KeyTable.parse(self.lower.index.table(self._table))

    def _excluded(self, number: int) -> set[bytes]:
        """Return the keys that the split file of a joined data set leaves out of one of its shards."""
        return {plain_key(key) for key in self.lower.shards[number].without}

    def find(self, number: int, keys: list[bytes]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return for each key of a shard of the view the shard here (or MISSING, TWICE), and the entry."""
        shards = np.full(len(keys), MISSING, np.int64)
        entries = np.full(len(keys), MISSING, np.int64)
        # Sets that were made together pair shard by shard; a key that the shard beside this one lacks is searched
        # for in the whole set.
        beside = self.partner(number)
        if beside is not None:
            samples, twice = _samples_of(self.lower.record(beside))
            excluded = self._excluded(beside)
            for at, key in enumerate(keys):
                entry = samples.get(key)
                if entry is not None and key not in excluded:
                    shards[at], entries[at] = (TWICE if key in twice else beside), entry
        left = np.flatnonzero(shards == MISSING).tolist()
        if left:
            self._find_anywhere(keys, left, shards, entries)
        return shards, entries

    def _find_anywhere(
        self, keys: list[bytes], left: list[int], shards: NDArray[np.int64], entries: NDArray[np.int64]
    ) -> None:
        table = self._keys()
        excluded = [self._excluded(number) for number in range(len(self.lower))]
        for at in left:
            crc = zlib.crc32(keys[at])
            places = [
                (number, entry)
                for number in table.candidates(crc)
                if keys[at] not in excluded[number]
                for entry in self.lower.record(number).find_samples(keys[at], crc)
            ]
            if places:
                shards[at], entries[at] = places[0] if len(places) == 1 else (TWICE, places[0][1])


def _samples_of(record: Record) -> tuple[dict[bytes, int], set[bytes]]:
    """Return the samples of a shard by key, and the keys that it has more than once."""
    samples: dict[bytes, int] = {}
    twice: set[bytes] = set()
    for entry, (path, flags) in enumerate(zip(record.paths(), record.entry_flags, strict=True)):
        if not flags & STRAY:
            if path in samples:
                twice.add(path)
            samples[path] = entry
    return samples, twice


# -- names of classes ------------------------------------------------------------------------------------------


def read_class_names(path: str) -> dict[str, str]:
    """Return the names of classes by their labels in samples.

    The file has a line for each number from 0 on, or is a JSON list or object. Raises UsageError.
    """
    try:
        with open_stream(path) as file:
            given = class_names_in(file.read())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--class-names {path}: {getattr(error, 'strerror', None) or error}") from None
    pairs = enumerate(given) if isinstance(given, list) else given.items()
    named = {str(key): value for key, value in pairs}
    if not named:
        raise UsageError(f"--class-names {path}: names no class")
    for key, value in named.items():
        if not isinstance(value, str):
            raise UsageError(f"--class-names {path}: the name of class {key} is not text")
    if isinstance(given, list):
        _refuse_twice(path, named)
    return named


def class_names_in(data: bytes) -> Any:
    """Return the names in a file of classes: its JSON, or a list. Raises ValueError, RecursionError."""
    text = data.decode("utf-8-sig")
    if text.lstrip(WHITE_SPACE)[:1] in ("[", "{"):
        return json.loads(text)
    # Not `splitlines`: a form feed, NEL or U+2028 in a name would shift the numbers of all names after it.
    return [line.strip(WHITE_SPACE) for line in io.StringIO(text, newline=None)]


def _refuse_twice(path: str, named: dict[str, str]) -> None:
    """Raise UsageError if a list gives two classes the same name: hardly anybody wants to mix them."""
    first: dict[str, str] = {}
    for number, name in named.items():
        if name and first.setdefault(name, number) != number:
            raise UsageError(
                f"--class-names {path}: classes {first[name]} and {number} are both called {name!r} and would be "
                "one folder; give them different names, or use a JSON object to have them in one"
            )
