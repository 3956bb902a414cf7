"""Filters of samples, by key, shard, class, columns and values in files; and searches for what passes them.

All conditions but values are answered by the records: a mask over the entries of one shard at a time, made with
NumPy and cached for the last few shards. Values need the bytes of a column of each sample that has passed the
masks. So a search stops after a while, and returns its result so far and where to continue; the page asks again.
"""

from __future__ import annotations

import bisect
import fnmatch
import itertools
import json
import logging
import random
import re
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlencode

import numpy as np
from numpy.typing import NDArray

from wdsfs.errors import MALFORMED, NoSuchEntry, StaleShard, UsageError, WdsfsError, counted
from wdsfs.index.record import STRAY, Record
from wdsfs.names import readable
from wdsfs.pages.library import Sample, Snapshot
from wdsfs.pages.preview import Source

log = logging.getLogger("wdsfs")

SECONDS = 1.0  # how long a search goes on before it answers with its result so far
VALUE_MAX = 256 << 10  # bytes of a file that is read for a value; what is larger does not match
LINES = 10_000  # keys of a list that are made at a time
MASKS_MAX = 8  # shards whose mask is cached
_WORDS = {"q": "key", "has": "with column", "lacks": "without"}
FIELDS = ("q", "shard", "class", "has", "lacks", "column", "field", "value")


@dataclass(frozen=True, slots=True)
class Filter:
    """The conditions of a search; empty strings are no condition. A sample has to meet all of them.

    `q` is a part of the key; `shard` a name or pattern of the shell; `class_` the start of the key, a directory;
    `has` and `lacks` are columns, with commas between them; the file `column` has the value `value`, or its JSON
    has it at `field` (names with dots between them). `*` in a value stands for anything.
    """

    q: bytes = b""
    shard: bytes = b""
    class_: bytes = b""
    has: bytes = b""
    lacks: bytes = b""
    column: bytes = b""
    field: str = ""
    value: str = ""

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Filter:
        """Return the filter in the fields of a form."""
        texts = [query.get(name, "").strip() for name in FIELDS]
        q, shard, class_, has, lacks, column = (text.encode("utf-8", "surrogateescape") for text in texts[:-2])
        return cls(q, shard, class_.strip(b"/"), has, lacks, column, *texts[-2:])

    def fields(self) -> dict[str, str]:
        """Return the fields of a form from which `of` makes this filter."""
        raw = (self.q, self.shard, self.class_, self.has, self.lacks, self.column)
        texts = [value.decode("utf-8", "surrogateescape") for value in raw] + [self.field, self.value]
        return {name: text for name, text in zip(FIELDS, texts, strict=True) if text}

    def query(self, **more: object) -> str:
        """Return the filter as the query of an address."""
        fields = {**self.fields(), **{name: str(value) for name, value in more.items()}}
        return urlencode(fields, errors="surrogateescape")

    @property
    def text(self) -> str:
        """The filter in words."""
        return ", ".join(f"{_WORDS.get(name, name)} {value}" for name, value in self.fields().items())

    def needs(self, columns: Iterable[bytes]) -> bool:
        """Return True if only samples with one of these columns pass."""
        return not (_listed(self.has) | {self.column}).isdisjoint(columns)

    def __bool__(self) -> bool:
        return self != Filter()

    def takes_shard(self, name: bytes) -> bool:
        """Return True if samples of the shard with this name may pass. A name with `[` also stands for itself."""
        return not self.shard or name == self.shard or fnmatch.fnmatchcase(name, self.shard)

    def takes(self, sample: Sample) -> bool:
        """Return True if a sample that no record has passes, but for the value in its file."""
        shard, _, key = sample.path.partition(b"/")
        has, lacks = _listed(self.has) | {self.column} - {b""}, _listed(self.lacks)
        return (
            self.takes_shard(shard)
            and self.q in key
            and (not self.class_ or key.startswith(self.class_ + b"/"))
            and has.issubset(sample.columns)
            and lacks.isdisjoint(sample.columns)
        )

    def mask(self, record: Record) -> NDArray[np.bool_]:
        """Return a mask of the entries of a record that are samples and meet all conditions but the value."""
        passed: NDArray[np.bool_] = (record.array("entry.flags") & STRAY) == 0
        if not record.members:
            return passed
        if self.q:
            passed &= _keys_with(record, self.q)
        if self.class_:
            passed &= _entries_below(record, self.class_)
        for name in _listed(self.has) | {self.column} - {b""}:
            passed &= _with_column(record, name)
        for name in _listed(self.lacks):
            passed &= ~_with_column(record, name)
        return passed

    def matches(self, data: bytes) -> bool:
        """Return True if the content of the column has the value."""
        if not self.field:
            return _same(data.decode("utf-8", "replace").strip(), self.value)
        try:
            value: Any = json.loads(data)
            for step in self.field.split("."):
                value = value[int(step)] if isinstance(value, list) else value[step]
        except MALFORMED:
            return False
        if isinstance(value, list) and not any(isinstance(item, dict | list) for item in value):
            return any(_same(_text_of(item), self.value) for item in value)
        return _same(_text_of(value), self.value)


def _listed(names: bytes) -> set[bytes]:
    """Return the columns in a text with commas between them."""
    return {name.strip() for name in names.split(b",")} - {b""}


def _text_of(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _same(text: str, value: str) -> bool:
    if "*" in value:
        return _is_like(text, value.split("*"))
    if text == value:
        return True
    try:
        return float(text) == float(value)
    except ValueError:
        return False


def _is_like(text: str, parts: list[str]) -> bool:
    """Return True if these parts follow each other in a text, the first at its beginning, the last at its end.

    Each part is taken where it comes first, so the time is linear. A regular expression would try all places of
    all parts.
    """
    first, *inner, last = parts
    at, end = len(first), len(text) - len(last)
    if at > end or not text.startswith(first) or not text.endswith(last):
        return False
    for part in inner:
        place = text.find(part, at, end)
        if place < 0:
            return False
        at = place + len(part)
    return True


def _keys_with(record: Record, part: bytes) -> NDArray[np.bool_]:
    """Return the entries whose key contains this.

    All names of a shard are one string, which is searched at once; hits across the border of two names do not
    count. A part with a slash may also end in the name of a folder, and the folder's whole path counts.
    """
    passed = np.zeros(record.entries, np.bool_)
    folder_part, slash, name_part = part.rpartition(b"/")
    if not slash:
        text, starts = record.entry_name.text, np.asarray(record.entry_name.starts)
        at = _places_in(text, part)
        entries = np.searchsorted(starts, at, "right") - 1
        inside = at + len(part) <= starts[entries + 1]
        passed[entries[inside]] = True
        for place in at[~inside].tolist():  # it may have hidden hits that begin inside of it
            rest = text[place + 1 : place + 2 * len(part)]
            for match in re.finditer(b"(?=" + re.escape(part) + b")", rest):
                begin = place + 1 + match.start()
                entry = bisect.bisect_right(record.entry_name.starts, begin) - 1
                passed[entry] |= begin + len(part) <= starts[entry + 1]
    for folder in range(1, record.folders):
        entries_in = record.folder_entries(folder)
        path = record.folder_path(folder) if entries_in else b""
        if part in path:
            passed[entries_in.start : entries_in.stop] = True
        elif slash and path.endswith(folder_part):
            for entry in entries_in:
                passed[entry] |= record.entry_name[entry].startswith(name_part)
    return passed


def _places_in(text: memoryview, part: bytes) -> NDArray[np.int64]:
    """Return where a part begins in a text; a hit inside of another hit does not count."""
    return np.fromiter((match.start() for match in re.finditer(re.escape(part), text)), np.int64)


def _entries_below(record: Record, folder: bytes) -> NDArray[np.bool_]:
    passed = np.zeros(record.entries, np.bool_)
    for number in range(1, record.folders):
        path = record.folder_path(number)
        if path == folder or path.startswith(folder + b"/"):
            entries = record.folder_entries(number)
            passed[entries.start : entries.stop] = True
    return passed


def _with_column(record: Record, name: bytes) -> NDArray[np.bool_]:
    """Return the entries with a column of this name."""
    numbers = [at for at in range(len(record.extension_name)) if record.extension_name[at] == name]
    members = np.flatnonzero(np.isin(record.array("member.ext"), numbers))
    passed = np.zeros(record.entries, np.bool_)
    passed[np.searchsorted(record.array("entry.member").astype(np.int64), members, "right") - 1] = True
    return passed


class Result(NamedTuple):
    """The samples of a search so far. `after`: where to continue, None at the end.

    `progress` is the part of the set that is done, `unread` how many files could not be read for their values.
    """

    samples: list[Sample]
    after: int | None
    progress: float
    unread: int


class Search:
    """Searches in snapshots of a library. Usable by several threads.

    `source_of` opens the file at a path. `new` returns the samples that only an overlay has: here they have the
    numbers after the last of the set.
    """

    def __init__(
        self,
        source_of: Callable[[Snapshot, bytes], Source],
        new: Callable[[], Sequence[Sample]] = lambda: (),
    ) -> None:
        self._source_of, self.new = source_of, new
        self._masks: OrderedDict[tuple[Filter, tuple[int, int, int]], NDArray[np.uint32]] = OrderedDict()
        self._lock = threading.Lock()  # over the masks
        self._columns: set[bytes] = set()  # some of the columns of the set

    def find(self, filter_: Filter, now: Snapshot, after: int | None, count: int, pace: Pace) -> Result:
        """Return up to `count` samples from the one numbered `after` on, in the order of the set.

        Without `after`, those whose key is exactly `filter_.q` come first, and not once more in their places.
        """
        query = _Query(self, filter_, now, pace)
        samples = query.exact(count) if filter_.q and after is None else []
        steps = ((at, at if is_candidate else None) for at, is_candidate in query.candidates(after or 0))
        return query.collected(samples, steps, count, now.total + len(query.new))

    def next(self, filter_: Filter, now: Snapshot, number: int, back: bool, pace: Pace) -> Result:
        """Return the first sample after that number that passes, or with `back` the last one before it.

        `after` is the last number that was looked at: where to continue, None at the end.
        """
        query = _Query(self, filter_, now, pace)
        total = max(now.total, 1)
        for at, is_candidate in query.candidates_before(number) if back else query.candidates(number + 1):
            if is_candidate and (sample := query.passed(at)) is not None:
                return Result([sample], at, at / total, query.unread)
            pace.steps += 1
            if pace.is_over:
                last = at if is_candidate or back else at - 1
                return Result([], last, (total - at if back else at) / total, query.unread)
        return Result([], None, 1.0, query.unread)

    def draw(self, filter_: Filter, now: Snapshot, seed: int, after: int, count: int, pace: Pace) -> Result:
        """Return up to `count` samples in the random order of the seed, from the place `after` in that on."""
        query = _Query(self, filter_, now, pace)
        total = now.total + len(query.new)
        steps = ((at, number if query.is_candidate(number) else None) for at, number in draws(total, seed, after))
        return query.collected([], steps, count, draws_of(total))

    def listed(self, filter_: Filter, now: Snapshot, after: int, pace: Pace) -> tuple[bytes, int | None]:
        """Return lines SHARD/KEY for `--keys` of samples that pass, from number `after` on, and where to continue.

        None at the end. Raises UsageError for a key with a line end, ShardErrors.
        """
        query, following = _Query(self, filter_, now, pace), None
        numbers: list[int] = []
        for at, is_candidate in itertools.takewhile(lambda step: step[0] < now.total, query.candidates(after)):
            if pace.is_over or len(numbers) == LINES:
                following = at
                break
            if is_candidate and (not filter_.column or query.passed(at) is not None):
                numbers.append(at)
            pace.steps += 1
        if query.unread:
            log.warning("%s could not be read, and are not in the list", counted(query.unread, "file"))
        lines = []
        for shard, some in itertools.groupby(numbers, now.shard_of):
            name, first = now.shards[shard].name, now.first_of(shard)
            for key in now.keys(shard, [number - first for number in some]):
                if not {10, 13, 0}.isdisjoint(key):
                    raise UsageError(
                        f"{readable(name + b'/' + key)}: a list cannot have this key, which has a line end"
                    )
                lines.append(b"%s/%s\n" % (name, key))
        return b"".join(lines), following

    def unknown(self, filter_: Filter, now: Snapshot, pace: Pace) -> Unknown | None:
        """Return the columns of a filter that no sample has; None if there are none, or it takes too long."""
        missing = (_listed(filter_.has) | _listed(filter_.lacks) | {filter_.column} - {b""}) - self._columns
        if not missing:
            return None
        known: set[bytes] = set()
        for sample in self.new():
            known.update(sample.columns)
        for shard in now.readable:
            if pace.is_over or missing <= known:
                break
            pace.steps += 1
            known |= now.record(
                shard, lambda record: set(record.extension_name.of(range(len(record.extension_name))))
            )
        self._columns |= missing & known
        missing -= known
        return Unknown(sorted(missing), sorted(known)) if missing and not pace.is_over else None

    def places(self, filter_: Filter, now: Snapshot, shard: int) -> NDArray[np.uint32]:
        """Return the places in the order of a shard of the samples that pass its record. Raises ShardErrors."""
        if not filter_.takes_shard(now.shards[shard].name):
            return np.zeros(0, np.uint32)
        key = filter_, now.version_of(shard)
        with self._lock:
            places = self._masks.get(key)
        if places is None:
            order = np.asarray(now.order(shard))
            places = np.flatnonzero(now.record(shard, filter_.mask)[order]).astype(np.uint32)
            with self._lock:
                self._masks[key] = places
                while len(self._masks) > MASKS_MAX:
                    self._masks.popitem(last=False)
        return places

    def passes(self, filter_: Filter, now: Snapshot, sample: Sample) -> bool:
        """Return True if the file of a sample has the value. Raises WdsfsError, OSError if it cannot be read."""
        name = sample.names[sample.columns.index(filter_.column)]
        source = self._source_of(now, sample.path + b"/" + name)
        return source.size <= VALUE_MAX and filter_.matches(source.read(0, source.size))


class Unknown(NamedTuple):
    """Columns that a filter names and no sample has, and the first of those that there are."""

    missing: list[bytes]
    known: list[bytes]


class _Query:
    """One search in one snapshot."""

    def __init__(self, search: Search, filter_: Filter, now: Snapshot, pace: Pace) -> None:
        self._search, self._filter, self._now, self._pace = search, filter_, now, pace
        self.new = search.new()
        self.unread = 0

    def candidates(self, at: int) -> Iterator[tuple[int, bool]]:
        """Yield the numbers, from `at` on, of samples that pass but for their values, each with True.

        With False the number at which the next shard begins.
        """
        now = self._now
        while at < now.total:
            shard = now.shard_of(at)
            first, places = now.first_of(shard), self._places(shard)
            for place in places[int(np.searchsorted(places, at - first)) :].tolist():
                yield first + place, True
            at = now.first_of(shard + 1)
            if at < now.total or self.new:
                yield at, False
        for number in range(max(at, now.total), now.total + len(self.new)):
            if self._filter.takes(self.new[number - now.total]):
                yield number, True

    def candidates_before(self, at: int) -> Iterator[tuple[int, bool]]:
        """Yield as `candidates`, backwards from the number before `at`."""
        now, at = self._now, min(at, self._now.total)
        while at > 0:
            shard = now.shard_of(at - 1)
            first, places = now.first_of(shard), self._places(shard)
            for place in reversed(places[: int(np.searchsorted(places, at - first))].tolist()):
                yield first + place, True
            at = first
            yield at, False

    def collected(
        self, samples: list[Sample], steps: Iterable[tuple[int, int | None]], count: int, places: int
    ) -> Result:
        """Return these samples and further ones, up to `count`.

        Each step has its place, and the number of a candidate or None; there are `places` places.
        """
        there = {sample.number for sample in samples}
        for at, number in steps:
            if self._pace.is_over or (number is not None and len(samples) == count):
                return Result(samples, at, at / places, self.unread)
            try:
                sample = None if number is None or number in there else self.passed(number)
            except StaleShard:
                if not (self._filter.column and self._pace.steps):
                    raise
                return Result(samples, at, at / places, self.unread)  # to go on in a newer snapshot
            self._pace.steps += 1
            samples += [] if sample is None else [sample]
        return Result(samples, None, 1.0, self.unread)

    def is_candidate(self, number: int) -> bool:
        """Return True if the sample with this number passes but for its value."""
        if not self._filter:
            return True
        if number >= self._now.total:
            return self._filter.takes(self.new[number - self._now.total])
        shard = self._now.shard_of(number)
        return _holds(self._places(shard), number - self._now.first_of(shard))

    def passed(self, number: int) -> Sample | None:
        """Return the sample of a candidate; None if it has another value, or its file cannot be read."""
        total = self._now.total
        sample = self._now.sample(number) if number < total else self.new[number - total]
        if not self._filter.column:
            return sample
        try:
            return sample if self._search.passes(self._filter, self._now, sample) else None
        except StaleShard:  # the numbers are of another content
            raise
        except NoSuchEntry:  # removed in the overlay
            return None
        except (WdsfsError, OSError):
            self.unread += 1
            return None

    def exact(self, count: int) -> list[Sample]:
        """Return the samples with exactly this key, found at once, however many others there are."""
        samples: list[Sample] = []
        crc = zlib.crc32(self._filter.q)
        for shard in self._now.readable:
            if self._pace.is_over or len(samples) >= count:
                break
            self._pace.steps += 1
            if self._filter.takes_shard(self._now.shards[shard].name):
                samples += [
                    sample for number in self._named(shard, crc) if (sample := self.passed(number)) is not None
                ]
        return samples[:count]

    def _named(self, shard: int, crc: int) -> list[int]:
        """Return the numbers of the samples of a shard with exactly this key that pass its record.

        Raises ShardErrors.
        """
        now = self._now
        entries = now.record(shard, lambda record: list(record.find_samples(self._filter.q, crc)))
        numbers = [now.number_of(shard, entry) for entry in entries]
        return [number for number in numbers if number is not None and self.is_candidate(number)]

    def _places(self, shard: int) -> NDArray[np.uint32]:
        return self._search.places(self._filter, self._now, shard)


class Pace:
    """The time of an answer. `is_gone` returns True when nobody waits for it any more."""

    def __init__(self, is_gone: Callable[[], bool] = lambda: False) -> None:
        self.steps = 0  # that were done: at least one, so that each answer makes progress
        self._is_gone, self._began = is_gone, time.monotonic()

    @property
    def is_over(self) -> bool:
        """True if the answer has to end with its result so far."""
        return self.steps > 0 and (time.monotonic() - self._began > SECONDS or self._is_gone())


def _holds(places: NDArray[np.uint32], place: int) -> bool:
    at = int(np.searchsorted(places, place))
    return at < len(places) and int(places[at]) == place


def draws(total: int, seed: int, after: int = 0) -> Iterator[tuple[int, int]]:
    """Yield every number below `total` once, in an order that looks random, each with its place; from a place on.

    A permutation of the next power of four in four rounds over its two halves; those from `total` on are left out.
    It needs no memory for the numbers drawn before, and any place is found at once.
    """
    half = _half(total)
    low = (1 << half) - 1
    keys = [random.Random(f"{seed} {at}").getrandbits(64) | 1 for at in range(4)]
    for place in range(after, 1 << 2 * half):
        left, right = place >> half, place & low
        for key in keys:
            mixed = (right * key + (key >> 32)) & 0xFFFFFFFFFFFFFFFF
            mixed ^= mixed >> 29
            left, right = right, left ^ (mixed * 0x9E3779B97F4A7C15 >> 40 & low)
        number = left << half | right
        if number < total:
            yield place, number


def draws_of(total: int) -> int:
    """Return the number of places in the order of `draws`."""
    return 1 << 2 * _half(total)


def _half(total: int) -> int:
    """Return the bits of a half of a number."""
    return max((max(total - 1, 1).bit_length() + 1) // 2, 1)
