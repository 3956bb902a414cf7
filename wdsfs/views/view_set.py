"""The lower of a view: records that were derived from those of the shards (`view_record.py`), and their content.

Below it are plain lowers, one of the shards themselves and one of each set that is joined. A derived record says
which member of which shard a file is, so whatever is true of reading a plain mount is true here.

A derived record is valid as long as all is as it was that it was made of: the fingerprint that it is filed under
is that of the shard, mixed with those of all companions: label files, class names, joined shards. So a changed
label file shows as a changed shard does.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdsfs.dataset import content as content_module
from wdsfs.dataset import freshness, shard_set
from wdsfs.dataset.content import Content, Held
from wdsfs.dataset.freshness import GONE, Fingerprint
from wdsfs.dataset.generations import Generations
from wdsfs.dataset.indexing import NotIndexed
from wdsfs.dataset.open_files import ShardFile
from wdsfs.dataset.shard_access import Access
from wdsfs.dataset.shard_set import ShardSet
from wdsfs.errors import MissingShard, ShardError, StaleShard, UnreadableShard, UsageError, ViewError
from wdsfs.index.record import STRAY, Record, equal_range
from wdsfs.index.record_of_file import PATIENCE_SECONDS, wait_for_tick
from wdsfs.index.set_tables import PathUnion
from wdsfs.index.store import COMMIT_BYTES, COMMIT_SECONDS, Index
from wdsfs.names import plain_key
from wdsfs.reading import PLAIN, Reading
from wdsfs.spec.expand import Shard, expand
from wdsfs.tar import member_codecs
from wdsfs.views import label_files
from wdsfs.views.composition import Composition, read_class_names
from wdsfs.views.decode import UNDECODED
from wdsfs.views.draft import DECODED, MISSING, NOTHING, OWN, SHARD, TWICE, ContentSource, Surroundings
from wdsfs.views.label_files import LabelFile, label_file
from wdsfs.views.view_record import compose, digits_wanted, refusal, refuse

log = logging.getLogger(__name__)

DECODED_BYTES = member_codecs.DECODED_MAX  # of decoded members that a process keeps
LOOK_SHARE = 50  # a look at all companions is believed for so many times what it took, and a second at least


class Companions:
    """What else goes into a view, by the options: sets of shards, label files, names of classes.

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
        """Those of all sets that are joined."""
        return [one for shards in self.joined for one in shards]

    @property
    def files(self) -> list[bytes]:
        """All files that are read, with those that may come beside them."""
        return [one.path for one in self.shards] + self._others

    @property
    def names(self) -> list[bytes]:
        """What tells all of these, and how they are read, from others."""
        return [one.key for one in self.shards] + self._others

    @property
    def _others(self) -> list[bytes]:
        found = [path for file in self.labels for path in file.parts]
        return found + ([os.fsencode(self.class_names)] if self.class_names is not None else [])


def is_view(shards: Sequence[Shard], wanted: Composition) -> bool:
    """Whether these shards, shown so, take derived records."""
    return not wanted.is_plain or any(one.without for one in shards)


def open_set(
    shards: Sequence[Shard],
    index: Index,
    wanted: Composition,
    companions: Companions,
    descriptors: int = 256,
    tags: Generations | None = None,
    access: Access | None = None,
) -> ShardSet:
    """The lower for these options, derived if need be."""
    if not is_view(shards, wanted):
        return ShardSet(shards, index, descriptors, tags, access)
    return ViewSet(shards, index, wanted, companions, descriptors, tags, access)


class _UnionWanted(Exception):
    """The keys of a whole joined set (by its number) are needed."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _BaseWanted(Exception):
    """A shard of one of the lowers below has to be indexed first."""

    def __init__(self, below: ShardSet, number: int) -> None:
        super().__init__(number)
        self.below, self.number = below, number

    def index(self) -> None:
        self.below.index_now(self.number)


class ViewSet(ShardSet):
    """As `ShardSet`, of a view. `plain` is the lower of the shards as they are."""

    def __init__(
        self,
        shards: Sequence[Shard],
        index: Index,
        wanted: Composition,
        companions: Companions,
        descriptors: int = 256,
        tags: Generations | None = None,
        access: Access | None = None,
    ) -> None:
        super().__init__(shards, index, descriptors, tags, access)
        self.companions = companions
        # The digits of classes that are numbers are found out by `make`, unless the options say them.
        self._finds_digits = wanted.classes and wanted.class_digits is None
        self.wanted = replace(wanted, class_digits=1) if self._finds_digits else wanted
        # What the options leave alone has the record that it has, under the name that it has.
        self._alone = [wanted.is_plain and not one.without for one in shards]
        parts = [*companions.names, *(repr(file.table).encode() for file in companions.labels)]
        parts += [repr(sorted(one.without)).encode() for one in companions.shards]
        self._common = hashlib.blake2b(b"\0".join(parts), digest_size=16).digest()
        self._keys = self._view_keys()
        each = max(1, descriptors // (1 + len(companions.joined)))
        self.plain = ShardSet(shards, index, each, access=access)
        self.joined = [ShardSet(joined, index, each, access=access) for joined in companions.joined]
        self._lowers = [self.plain, *self.joined]
        self._places = {
            one.path: (below, number)
            for below in reversed(self._lowers)
            for number, one in enumerate(below.shards)
        }
        for below in self._lowers:
            below.on_files = lambda _: self.on_files(sum(one.open_files for one in self._lowers))
            below.slowly = lambda: self.slowly()
        self._many = len(companions.files) > shard_set.MANY
        self._files_seen: int | ShardError = 0
        self._files_last = self._files_change = 0  # the number as it was seen last, and how it changed then
        self._files_told: int | ShardError = 0
        self._files_back = False  # they could not be read before
        self._seen_until, self._seen_alarms = -1.0, -1
        self._label_files: dict[bytes, ShardFile] = {}
        self._decoded: OrderedDict[tuple[int, int, int], bytes] = OrderedDict()
        self._decoded_bytes = 0
        self._unions: dict[int, tuple[int, PathUnion]] = {}
        self.unmade: dict[bytes, str] = {}  # shards, by path, that `make` has not made a record of, and why
        self._missing: list[_BaseWanted] = []  # found not to be indexed while something was read

    @property
    def sources(self) -> list[ShardSet]:
        return self._lowers

    def partner(self, which: int, number: int) -> int | None:
        """The shard of a joined set that stands beside the one with this number: of sets with as many shards."""
        at, count = self.shards[number].place or (number, len(self))
        return at if len(self.companions.joined[which]) == count else None

    def _view_keys(self) -> list[bytes]:
        """Under which the index has the records of this view."""
        return [
            one.key
            if alone
            else one.key + b"\0" + self.wanted.digest(one.without, one.name, self._common + self._beside(at))
            for at, (one, alone) in enumerate(zip(self.shards, self._alone, strict=True))
        ]

    def _beside(self, number: int) -> bytes:
        """What tells a view of this shard from those in other sets, where other shards stand beside it."""
        return repr([self.partner(which, number) for which in range(len(self.companions.joined))]).encode()

    # --- what a shard is now

    def _stat(self, number: int) -> Fingerprint:
        found = super()._stat(number)
        if self._alone[number]:
            return found
        size, mtime_ns, identity = found
        return size, mtime_ns, identity ^ self._companions()

    def _tell_change(self, number: int, before: Fingerprint, now: Fingerprint) -> None:
        """As `ShardSet`; of a change of companions, which all shards have, once."""
        change = now[0] - before[0], now[1] - before[1], now[2] ^ before[2]
        common = change == (0, 0, self._files_change) or (before == GONE and self._files_back)
        if self._alone[number] or not common:
            super()._tell_change(number, before, now)
        elif self._files_told != self._files_seen:
            self._files_told = self._files_seen
            log.warning("what the shards are shown with has changed; what was open from them gets ESTALE")

    def _companions(self) -> int:
        """A number that changes with any companion. Raises MissingShard, UnreadableShard."""
        now = time.monotonic()
        if now > self._seen_until or self._seen_alarms != self._tags.alarms:
            self._seen_alarms = self._tags.alarms
            try:
                with self.slowly() if self._many else nullcontext():
                    packed = b"".join(struct.pack("<QqQ", *stamp) for stamp in self._stamps())
            except ShardError as error:  # kept like any other answer: every shard of the set asks
                self._files_seen = error
            else:
                self._files_back = isinstance(self._files_seen, ShardError)
                self._files_seen = int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
                if self._files_seen != self._files_last:
                    self._files_change = self._files_seen ^ self._files_last
                    self._files_last = self._files_seen
            took = time.monotonic() - now
            self._seen_until = now + max(freshness.FRESH_SECONDS, LOOK_SHARE * took)
        if isinstance(self._files_seen, ShardError):
            raise type(self._files_seen)(*self._files_seen.args)
        return self._files_seen

    def _stamps(self) -> list[Fingerprint]:
        found = [self.access.look(one.path) for one in self.companions.shards]
        found += [self._stamp_of(file) for file in self.companions.labels]
        if self.companions.class_names is not None:
            found.append(self._look_beside(os.fsencode(self.companions.class_names)))
        return found

    def _look_beside(self, path: bytes) -> Fingerprint:
        try:
            return self.access.look(path)
        except MissingShard:
            raise MissingShard(f"{os.fsdecode(path)}: the file is gone") from None

    def _stamp_of(self, file: LabelFile) -> Fingerprint:
        """The fingerprint of a label file, with that of what SQLite keeps beside it mixed in."""
        size, mtime_ns, identity = self._look_beside(file.path)
        for path in file.parts[1:]:
            try:
                beside = os.stat(path)
            except OSError:
                continue
            # An empty one says as much as none. Not the ctime: SQLite sets it when it opens one to read.
            if not beside.st_size:
                continue
            packed = struct.pack("<QqQ", beside.st_size, beside.st_mtime_ns, beside.st_ino)
            identity ^= int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
        return size, mtime_ns, identity

    def distrust(self) -> None:
        super().distrust()
        for below in self._lowers:
            below.distrust()

    def record(self, number: int, tag: int | None = None) -> Record:
        """As `ShardSet.record`. Raises also ViewError, when the options refuse what the shard holds."""
        found = super().record(number, tag)
        text = refusal(found)
        if text is not None:
            raise ViewError(text)
        return found

    def _indexed_fingerprint(self, number: int) -> Fingerprint:
        found = super()._indexed_fingerprint(number)
        try:
            if found != GONE and self.summary(number).problems:
                self.record(number)  # none, as far as others are concerned, if it was refused
        except ShardError:
            return GONE
        return found

    # --- making records

    def index_now(self, number: int) -> None:
        while self._missing:
            self._missing.pop().index()
        # Whoever asks for it there has nobody else to index it.
        self.plain.with_index(lambda: self.plain.record(number))
        super().index_now(number)

    def build(self, number: int) -> bytes:
        """The derived record of a shard as everything is now; what it is made of is indexed first."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            for below in self._lowers:
                below.distrust()
            before = self._stat(number)
            try:
                try:
                    data = self._build(number, before)
                except ViewError as error:  # a label file that cannot be used
                    data = refuse(str(error), before)
            except _BaseWanted as wanted:
                wanted.index()
                continue
            except _UnionWanted as wanted:
                self._load_union(wanted.number)
                continue
            except StaleShard:
                if time.monotonic() > deadline:
                    raise
                continue
            # What is newer than this look is filed under the older fingerprint, and so is not taken for right.
            if self._stat(number) == before:
                return data
            if time.monotonic() > deadline:
                text = "it, or what it is shown with, is being written; try again when that is finished"
                raise UnreadableShard(f"{self.path_text(number)}: {text}")

    def _build(self, number: int, fingerprint: Fingerprint) -> bytes:
        if self._alone[number]:
            return self.plain.build(number)
        names = self.companions.class_names
        for path in [file.path for file in self.companions.labels] + ([names] if names is not None else []):
            with suppress(OSError):  # whoever reads it says so
                wait_for_tick(os.stat(path))
        one = self.shards[number]
        with ExitStack() as stack:
            tables = [
                stack.enter_context(
                    label_files.opened(file, self._stamp_of(file), self.index.label_tables, self.access.open)
                )
                for file in self.companions.labels
            ]
            source = ContentSource(one.path, one.name, _record(self.plain, number), one.without)
            around = Surroundings(
                [_Joined(self, which, number) for which in range(len(self.joined))],
                tables,
                None if names is None else self._class_names(names),
                self._read,
            )
            return compose(self.wanted, source, around, fingerprint)

    def settled(self, number: int) -> bool:
        try:
            return super().settled(number)
        except ViewError:
            # Another process has found that it is refused, which only whoever asks for this shard is to hear: in a
            # merged tree that may be nobody.
            self.generation += 1
            return True

    def _tell_damage(self, number: int, made: Record) -> None:
        text = refusal(made)
        if text is not None:  # nobody asked for this shard when the mount began, or it has changed
            log.error("nothing is shown of this shard: %s", text)
        # What is wrong with the shard itself was said when it was indexed.
        texts = [problem.text for problem in made.problems if problem.kind == UNDECODED]
        if texts:
            more = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
            log.warning("%s: %s%s", self.path_text(number), texts[0], more)

    def _class_names(self, path: str) -> dict[str, str]:
        try:
            return read_class_names(path)
        except UsageError as error:  # it was good when the mount began
            raise ViewError(str(error)) from None

    def _read(self, path: bytes, member: int) -> bytes:
        below, number = self._places[path]
        content = _of_base(below, number, member)
        return content_module.read(content, 0, content.size)

    def _load_union(self, which: int) -> None:
        """The keys of a whole joined set. Raises ShardError where a shard of it cannot be read."""
        below = self.joined[which]
        for number in range(len(below)):
            below.with_index(partial(below.record, number))
        self._unions[which] = self._companions(), below.with_index(lambda: below.union(below.record))

    def union_of(self, which: int) -> PathUnion:
        """The keys of a joined set as it is now. Raises _UnionWanted."""
        found = self._unions.get(which)
        if found is None or found[0] != self._companions():
            raise _UnionWanted(which)
        return found[1]

    def make(self, on_done: Callable[[int], None] = lambda _: None) -> str | None:
        """Derive what has to be derived, up to the first shard that is refused; returns why, if there is one.

        With classes it also finds how many digits the longest number among them has: until all fit, the shards
        so far are derived again, with more digits. They are few, since most numbers of a set have as many as the
        longest. What was derived with fewer is kept, so that the next mount of the same shards derives nothing.

        What cannot be read is left out, and stands in `unmade`.

        `on_done` hears how many shards are done. Raises MissingShard, UnreadableShard for what the shards are to
        be shown with.
        """
        self._companions()
        while True:
            refused = self._make_all(on_done)
            digits = 0 if refused is None else digits_wanted(refused)
            if not (digits and self._finds_digits):
                return None if refused is None else refusal(refused)
            self.wanted = replace(self.wanted, class_digits=digits)
            self._keys = self._view_keys()
            self._drop_records()

    def _make_all(self, on_done: Callable[[int], None]) -> Record | None:
        """Derive what has to be derived, up to the first shard that is refused; returns its record."""
        pending: list[tuple[bytes, bytes]] = []
        refused: Record | None = None
        self.unmade.clear()
        since, size = time.monotonic(), 0
        for number in range(len(self)):
            made: Record | None = None
            try:
                try:
                    if self.summary(number).problems:
                        made = super().record(number)  # it may say that the shard was refused
                except NotIndexed:
                    data = self.build(number)
                    made = Record(data, verify=False)
                    pending.append((self._keys[number], data))
                    size += len(data)
            except ShardError as error:
                self.unmade[self.shards[number].path] = str(error)
            if made is not None and refusal(made) is not None:
                refused = made
                break
            on_done(number + 1)
            if pending and (time.monotonic() - since > COMMIT_SECONDS or size > COMMIT_BYTES):
                self._store(pending)
                since, size = time.monotonic(), 0
        self._store(pending)
        return refused

    def _store(self, pending: list[tuple[bytes, bytes]]) -> None:
        if pending:
            self.index.store(pending)
            pending.clear()

    def damaged(self) -> Iterator[tuple[str, str]]:
        """As `ShardSet.damaged`, with the shards that are joined: what they lack is missing here."""
        yield from self._with_joined(super().damaged(), ShardSet.damaged)

    def known_damage(self) -> Iterator[tuple[str, str]]:
        yield from self._with_joined(super().known_damage(), ShardSet.known_damage)

    def _with_joined(
        self, own: Iterator[tuple[str, str]], ask: Callable[[ShardSet], Iterator[tuple[str, str]]]
    ) -> Iterator[tuple[str, str]]:
        told = {self.path_text(number) for number in range(len(self))}
        yield from own
        for below in self.joined:
            for path, text in ask(below):
                if path not in told:
                    told.add(path)
                    yield path, text

    # --- content

    def origin(self, number: int, member: int) -> tuple[ShardSet, int, int] | None:
        """As `ShardSet.origin`; that shard is indexed. Raises what `content` raises."""
        record = self.record(number)
        if record.view is None:
            return self.plain, number, member
        place, row = record.address(member)
        if record.view["places"][place]["kind"] == DECODED:
            place, row = _packed_address(record, row)
        if record.view["places"][place]["kind"] != SHARD:
            return None
        below, base = self._base(record, number, place)
        try:
            _record(below, base)
        except _BaseWanted as wanted:
            self._missing.append(wanted)
            raise NotIndexed(number) from None
        return below, base, row

    def content(self, number: int, tag: int, member: int) -> Content:
        try:
            record = self.record(number, tag)
            if record.view is None:
                return self._shard_content(record, number, OWN, member)
            place, row = record.address(member)
            return self._content(record, number, tag, place, row, member)
        except _BaseWanted as wanted:
            self._missing.append(wanted)
            raise NotIndexed(number) from None

    def _content(self, record: Record, number: int, tag: int, place: int, row: int, member: int) -> Content:
        assert record.view is not None
        about = record.view["places"][place]
        if about["kind"] == SHARD:
            return self._shard_content(record, number, place, row)
        size = record.size_and_time(member)[0]
        if about["kind"] == DECODED:
            raw = self._content(record, number, tag, *_packed_address(record, row), member)
            data = self._decoded.get((number, tag, row))
            if data is not None:
                self._decoded.move_to_end((number, tag, row))
            load = partial(self._load_decoded, (number, tag, row), raw, record.column["decoded.codec"][row], size)
            return Content(raw.file, 0, size, (), Held(load, data))
        if about["kind"] == NOTHING:
            file = _of_base(self.plain, number, 0).file
            return Content(file, 0, 0, (), Held(bytes, b""))
        return Content(self._label_file(about), 0, size, (), Held(bytes, record.names_in("values")[row]))

    def _base(self, record: Record, number: int, place: int) -> tuple[ShardSet, int]:
        """The lower and the number of the shard that is a place of this record. Raises StaleShard."""
        below, base, made_of = self.plain, number, record.fingerprint
        if record.view is not None:
            about = record.view["places"][place]
            made_of = about["fingerprint"]
            if place != OWN:
                below, base = self._places[about["path"].encode("utf-8", "surrogateescape")]
        # Their members are numbered by the record that this one was derived from, and by no other. The lower there
        # may not have looked since this record was made, perhaps by another process.
        if list(below.fingerprint(base)) != made_of:
            below.distrust()
        if list(below.fingerprint(base)) != made_of:
            raise StaleShard(f"{below.path_text(base)} has changed since this was opened")
        return below, base

    def _shard_content(self, record: Record, number: int, place: int, member: int) -> Content:
        below, base = self._base(record, number, place)
        try:
            return _of_base(below, base, member)
        except StaleShard:
            # It may have other content with the times that it had: then nothing else tells.
            self._reconsider(number)
            raise

    def _label_file(self, about: dict[str, Any]) -> ShardFile:
        """The label file that a value comes from, as it was then. Raises ShardError."""
        path = about["path"].encode("utf-8", "surrogateescape")
        file = self._label_files.get(path)
        if file is not None and list(file.fingerprint) == about["fingerprint"]:
            return file
        known = next(one for one in self.companions.labels if one.path == path)
        if list(self._stamp_of(known)) != about["fingerprint"]:
            raise StaleShard(f"{os.fsdecode(path)} has changed since this was opened")
        fd = self.access.open(path)
        size, mtime_ns, identity = about["fingerprint"]
        fresh = ShardFile(fd, fd, path, (size, mtime_ns, identity), os.fstat(fd).st_ctime_ns)
        if list(self._stamp_of(known)) != about["fingerprint"]:
            fresh.close()
            raise StaleShard(f"{os.fsdecode(path)} has changed since this was opened")
        if file is not None:
            file.close()
        self._label_files[path] = fresh
        return fresh

    def _load_decoded(self, key: tuple[int, int, int], raw: Content, codec: int, size: int) -> bytes:
        data = member_codecs.decode(codec, content_module.read(raw, 0, raw.size))
        if len(data) != size:
            raise StaleShard(f"{os.fsdecode(raw.file.path)} has changed since this was opened")
        if key not in self._decoded:
            self._decoded[key] = data
            self._decoded_bytes += len(data)
        while self._decoded_bytes > DECODED_BYTES:
            self._decoded_bytes -= len(self._decoded.popitem(last=False)[1])
        return data

    def release(self) -> None:
        for file in self._label_files.values():
            file.close()
        self._label_files.clear()
        for below in self._lowers:
            below.release()
        super().release()


class _Joined:
    """A joined set, as the shard with this number sees it: `draft.JoinedSet`."""

    def __init__(self, owner: ViewSet, which: int, number: int) -> None:
        self._owner, self._which, self._number = owner, which, number
        self._below = owner.joined[which]

    def path(self, number: int) -> bytes:
        return self._below.shards[number].path

    def record(self, number: int) -> Record:
        return _record(self._below, number)

    def _excluded(self, number: int) -> set[bytes]:
        """The keys that the split file of a joined data set leaves out of one of its shards."""
        return {plain_key(key) for key in self._below.shards[number].without}

    def find(self, keys: list[bytes]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        shards = np.full(len(keys), MISSING, np.int64)
        entries = np.full(len(keys), MISSING, np.int64)
        # Sets that were made together pair shard by shard; whatever the shard beside this one has not is looked
        # for everywhere.
        beside = self._owner.partner(self._which, self._number)
        if beside is not None:
            found, twice = _samples_of(self.record(beside))
            excluded = self._excluded(beside)
            for at, key in enumerate(keys):
                entry = found.get(key)
                if entry is not None and key not in excluded:
                    shards[at], entries[at] = (TWICE if key in twice else beside), entry
        left = np.flatnonzero(shards == MISSING).tolist()
        if left:
            self._find_anywhere(keys, left, shards, entries)
        return shards, entries

    def _find_anywhere(
        self, keys: list[bytes], left: list[int], shards: NDArray[np.int64], entries: NDArray[np.int64]
    ) -> None:
        sums, owners = self._owner.union_of(self._which).columns()[1]
        excluded = [self._excluded(number) for number in range(len(self._below))]
        for at in left:
            crc = zlib.crc32(keys[at])
            places = [
                (number, entry)
                for number in sorted({owners[one] for one in equal_range(sums, crc)})
                if keys[at] not in excluded[number]
                for entry in self.record(number).find_samples(keys[at], crc)
            ]
            if places:
                shards[at], entries[at] = places[0] if len(places) == 1 else (TWICE, places[0][1])


def _samples_of(record: Record) -> tuple[dict[bytes, int], set[bytes]]:
    """The samples of a shard by key, and the keys that are there more than once."""
    found: dict[bytes, int] = {}
    twice: set[bytes] = set()
    for entry, (path, flags) in enumerate(zip(record.paths(), record.entry_flags, strict=True)):
        if not flags & STRAY:
            if path in found:
                twice.add(path)
            found[path] = entry
    return found, twice


def _record(below: ShardSet, number: int) -> Record:
    try:
        return below.record(number)
    except NotIndexed:
        raise _BaseWanted(below, number) from None


def _of_base(below: ShardSet, number: int, member: int) -> Content:
    try:
        return below.content(number, below.tag(number), member)
    except NotIndexed:
        raise _BaseWanted(below, number) from None


def _packed_address(record: Record, row: int) -> tuple[int, int]:
    """The address that a decoded member is made of."""
    assert record.view is not None
    shift, address = record.view["shift"], record.column["decoded.from"][row]
    return address >> shift, address & (1 << shift) - 1
