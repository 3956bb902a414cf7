"""The sources of a view (shards, joined sets, label files): the content in them, and if one has changed.

A record of a view says which member of which shard a file is. That shard is read through its plain set, so all
guarantees of a plain mount hold for a view, too. The record is valid as long as the shard and all its companions
(label files, joined shards, names of classes, a list of keys) are unchanged (`CompanionWatch`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdsfs.errors import CorruptShard, MissingShard, ShardError, StaleShard
from wdsfs.index.record import STRAY, Record
from wdsfs.names import PLAIN, Reading, plain_key
from wdsfs.shards import GONE, Fingerprint, Shard, lasting_number
from wdsfs.spec.expand import expand
from wdsfs.tar.sparse import NO_EXTENTS
from wdsfs.tree import content as content_module
from wdsfs.tree import freshness, json_fields, shard_set
from wdsfs.tree.class_names import read_class_names
from wdsfs.tree.composition import Composition
from wdsfs.tree.content import HELD, IN_DATA, NO_DATA, Content, ContentColumns, Held
from wdsfs.tree.freshness import Generations
from wdsfs.tree.indexing import indexed
from wdsfs.tree.label_files import LIST, LabelFile, label_file
from wdsfs.tree.open_shards import ShardFile
from wdsfs.tree.path_table import KeyTable
from wdsfs.tree.shard_access import Access
from wdsfs.tree.shard_set import ShardSet

log = logging.getLogger(__name__)

SHARD, VALUES, FIELD, NOTHING = "shard", "values", "field", "empty"  # kinds of a place
MISSING, TWICE = -1, -2  # instead of a shard's number: no shard has the key, or it occurs more than once
OWN = 0  # the place of the shard itself
KEYS = b"k"  # the table of the keys of a set, in the index
LOOK_SHARE = 50  # a check of all companions is valid for this many times its duration, and at least for a second
FIELDS_BYTES = 64 << 20  # of files of fields that a process keeps
_MADE_OF = {
    FIELD: "field.from"
}  # kinds of places whose members are made of others, and the section that says of which
_Key = tuple[int, int, int, int]  # shard, tag, place, row


# --- samples of joined sets by key: first in the shard beside, then in the whole set


class KeysMissing(Exception):
    """The keys of a whole joined set are needed: to be loaded by `JoinedSet.load`."""

    def __init__(self, joined: JoinedSet) -> None:
        super().__init__()
        self.joined = joined


class JoinedSet:
    """The set `lower`, joined with a view of `shards`. `version` is a number that changes with any companion."""

    def __init__(self, shards: Sequence[Shard], lower: ShardSet, version: Callable[[], int]) -> None:
        self._shards, self.lower, self._version = shards, lower, version
        self._loaded, self._table = -1, b""  # the version of which the table of keys is, and its key

    def partner(self, number: int) -> int | None:
        """Return the shard here with the same number as a shard of the view, if both sets have as many shards."""
        at, count = self._shards[number].place or (number, len(self._shards))
        return at if len(self.lower) == count else None

    def load(self) -> None:
        """Load the keys of the whole set, indexing what is not indexed. Raises ShardError."""
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


def content_of(source: ShardSet, number: int, member: int) -> Content:
    """Return the content as `ShardSet.content`, in the present shard."""
    return source.content(number, source.tag(number), member)


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


class DerivedContent:
    """Finds the content of members of derived records; keeps label files open, and an LRU of fields.

    `sources` are the sets that the view is made of, the plain one first; a shard of several is that of the first.
    `reconsider` is called with the number of a shard whose record may be wrong although its fingerprint is right.
    """

    def __init__(
        self,
        sources: Sequence[ShardSet],
        labels: list[LabelFile],
        watch: CompanionWatch,
        access: Access,
        reconsider: Callable[[int], None],
    ) -> None:
        self._plain, self._watch, self._access, self._reconsider = sources[0], watch, access, reconsider
        self._places = {
            shard.path: (source, number)
            for source in reversed(sources)
            for number, shard in enumerate(source.shards)
        }
        self._labels = {file.path: file for file in labels}
        self._label_files: dict[bytes, ShardFile] = {}
        self._made: OrderedDict[_Key, bytes] = OrderedDict()
        self._made_bytes = 0

    def of(self, record: Record, number: int, tag: int, member: int) -> Content:
        """Return the content of a member of a shard of the view.

        Raises what `ShardSet.content` raises.
        """
        if record.view is None:
            return self._in_shard(record, number, OWN, member)
        place, row = record.address(member)
        return self._at(record, number, tag, place, row, member)

    def columns(self, record: Record, number: int) -> ContentColumns:
        """Return the content of all members at once, as `of`. Raises what `of` raises."""
        if record.view is None:
            return self._columns_of_shard(record, number, OWN)
        address, shift = record.array("member.head").astype(np.int64), record.view["shift"]
        place, row = address >> shift, address & (1 << shift) - 1
        order = np.argsort(place, kind="stable")
        file, start = np.full(record.members, HELD, np.int64), np.zeros(record.members, np.int64)
        paths, data = list[bytes](), NO_DATA
        ends = np.cumsum(np.bincount(place, minlength=len(record.view["places"]))).tolist()
        for at, (about, begin, end) in enumerate(zip(record.view["places"], [0, *ends], ends, strict=False)):
            its = order[begin:end]
            if not len(its):
                continue
            if about["kind"] == SHARD:
                columns = self._columns_of_shard(record, number, at)
                file[its], start[its] = columns.file[row[its]], columns.start[row[its]]
                file[its] += np.where(file[its] < 0, 0, len(paths))
                paths += columns.paths
            elif about["kind"] == VALUES:
                self._label_file(about)
                file[its], start[its] = IN_DATA, record.array("values.start")[row[its]]
                data = record.array("values")
            elif about["kind"] == NOTHING:
                file[its] = IN_DATA
        return ContentColumns(paths, file, start, data)

    def _columns_of_shard(self, record: Record, number: int, place: int) -> ContentColumns:
        source, base = self._source(record, number, place)
        return source.content_columns(base)

    def origin(self, record: Record, number: int, member: int) -> tuple[ShardSet, int, int] | None:
        """Return the set, shard and member that a member of the view comes from; None if it is in no shard.

        That shard is indexed. Raises StaleShard, and what `ShardSet.record` raises.
        """
        if record.view is None:
            return self._plain, number, member
        place, row = record.address(member)
        while (section := _MADE_OF.get(record.view["places"][place]["kind"])) is not None:
            place, row = _packed_address(record, section, row)
        if record.view["places"][place]["kind"] != SHARD:
            return None
        source, base, _ = self._source_record(record, number, place)
        return source, base, row

    def plain_of(self, record: Record, number: int) -> Record:
        """Return the record of the shard that a record is made of. Raises what `origin` raises."""
        return self._source_record(record, number, OWN)[2]

    def _source_record(self, record: Record, number: int, place: int) -> tuple[ShardSet, int, Record]:
        """Return the source as `_source`, with the record of that shard."""
        source, base = self._source(record, number, place)
        before = source.tag(base)
        return source, base, source.record(base, before)

    def read_member(self, path: bytes, member: int) -> bytes:
        """Return the whole content of a member of the shard at `path`. Raises NotIndexed, ShardError."""
        source, number = self._places[path]
        content = content_of(source, number, member)
        return content_module.read(content, 0, content.size)

    def _at(self, record: Record, number: int, tag: int, place: int, row: int, member: int) -> Content:
        assert record.view is not None
        about = record.view["places"][place]
        if about["kind"] == SHARD:
            return self._in_shard(record, number, place, row)
        size = record.size_and_time(member)[0]
        if about["kind"] in _MADE_OF:
            key = (number, tag, place, row)
            data = self._made.get(key)
            if data is not None:
                self._made.move_to_end(key)
            file, load = self._loader(record, number, place, row)
            held = Held(partial(self._make, key, file, load, record, member), data)
            return Content(file, 0, size, NO_EXTENTS, held)
        if about["kind"] == NOTHING:
            file = content_of(self._plain, number, 0).file
            return Content(file, 0, 0, NO_EXTENTS, Held(bytes, b""))
        return Content(self._label_file(about), 0, size, NO_EXTENTS, Held(bytes, record.names_in("values")[row]))

    def _loader(
        self, record: Record, number: int, place: int, row: int, limited: bool = False
    ) -> tuple[ShardFile, Callable[[], bytes]]:
        """Return the file of the bytes at an address, and a function that returns the bytes. Raises as `of`.

        The function raises CorruptShard for what is not JSON, or, if `limited`, is too long.
        """
        assert record.view is not None
        about = record.view["places"][place]
        section = _MADE_OF.get(about["kind"])
        if section is None and about["kind"] == SHARD:
            raw = self._in_shard(record, number, place, row)
            return raw.file, partial(_whole, raw, limited)
        if section is None:
            return self._label_file(about), partial(record.names_in("values").__getitem__, row)
        address = _packed_address(record, section, row)
        file, below = self._loader(record, number, *address, limited=about["kind"] == FIELD)
        return file, partial(_field, about["field"], below)

    def _source(self, record: Record, number: int, place: int) -> tuple[ShardSet, int]:
        """Return the plain set of a place of this record, and the shard's number there. Raises StaleShard."""
        source, base = self._plain, number
        made_of: tuple[int, ...] = record.fingerprint
        if record.view is not None:
            about = record.view["places"][place]
            made_of = tuple(about["fingerprint"])
            if place != OWN:
                source, base = self._places[_path_of(about)]
        # The address of a member is valid only in the record that this one was derived from. The source set may
        # not have been checked since this record was made, perhaps by another process.
        if source.fingerprint(base) != made_of:
            source.distrust()
        if source.fingerprint(base) != made_of:
            raise StaleShard(f"{source.path_text(base)} has changed since this was opened")
        return source, base

    def _in_shard(self, record: Record, number: int, place: int, member: int) -> Content:
        source, base = self._source(record, number, place)
        try:
            return content_of(source, base, member)
        except StaleShard:
            # The shard may have other content and its old times: then nothing else shows the change.
            self._reconsider(number)
            raise

    def _label_file(self, about: dict[str, Any]) -> ShardFile:
        """Return the label file that a value comes from, if it is unchanged since. Raises ShardError."""
        path, made_of = _path_of(about), tuple(about["fingerprint"])
        file = self._label_files.get(path)
        if file is not None and file.fingerprint == made_of:
            return file
        self._check_label_file(path, made_of)
        fd = self._access.open(path)
        ctime_ns = os.fstat(fd).st_ctime_ns if isinstance(fd, int) else 0
        fresh = ShardFile(fd, fd, path, Fingerprint(*made_of), ctime_ns)
        try:
            self._check_label_file(path, made_of)
        except ShardError:
            fresh.close()
            raise
        if file is not None:
            file.close()
        self._label_files[path] = fresh
        return fresh

    def _check_label_file(self, path: bytes, made_of: tuple[int, ...]) -> None:
        if self._watch.fingerprint_of(self._labels[path]) != made_of:
            raise StaleShard(f"{os.fsdecode(path)} has changed since this was opened")

    def _make(self, key: _Key, file: ShardFile, load: Callable[[], bytes], record: Record, member: int) -> bytes:
        try:
            data = load()
        except CorruptShard as error:
            name = record.entry_path(record.entry_of(member)) + b"." + record.extension(member)
            raise CorruptShard(f"{os.fsdecode(name)}: {error}") from None
        if len(data) != record.size_and_time(member)[0]:
            raise StaleShard(f"{os.fsdecode(file.path)} has changed since this was opened")
        if key not in self._made:
            self._made[key] = data
            self._made_bytes += len(data)
        while self._made_bytes > FIELDS_BYTES:
            self._made_bytes -= len(self._made.popitem(last=False)[1])
        return data

    def release(self) -> None:
        """Close the label files."""
        for file in self._label_files.values():
            file.close()
        self._label_files.clear()


def _path_of(about: dict[str, Any]) -> bytes:
    path: str = about["path"]
    return path.encode("utf-8", "surrogateescape")


def _packed_address(record: Record, section: str, row: int) -> tuple[int, int]:
    """Return the address of the member that a member in this section is made of."""
    assert record.view is not None
    shift, address = record.view["shift"], record.column[section][row]
    return address >> shift, address & (1 << shift) - 1


def _whole(raw: Content, limited: bool) -> bytes:
    if limited:
        json_fields.refuse_size(raw.size)
    return content_module.read(raw, 0, raw.size)


def _field(path: str, load: Callable[[], bytes]) -> bytes:
    return json_fields.content_at(json_fields.parse(load()), path) or b""
