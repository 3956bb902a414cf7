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

from wdsfs.errors import MALFORMED, StaleShard, UsageError, WdsfsError, counted
from wdsfs.index.record import STRAY, Record
from wdsfs.names import readable
from wdsfs.pages.shown_set import Sample, Snapshot

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
        return not (_names_in(self.has) | {self.column}).isdisjoint(columns)

    def __bool__(self) -> bool:
        return self != Filter()

    def takes_shard(self, name: bytes) -> bool:
        """Return True if samples of the shard with this name may pass. A name with `[` also stands for itself."""
        return not self.shard or name == self.shard or fnmatch.fnmatchcase(name, self.shard)

    def mask(self, record: Record) -> NDArray[np.bool_]:
        """Return a mask of the entries of a record that are samples and meet all conditions but the value."""
        passed: NDArray[np.bool_] = (record.array("entry.flags") & STRAY) == 0
        if not record.members:
            return passed
        if self.q:
            passed &= _keys_with(record, self.q)
        if self.class_:
            passed &= _entries_below(record, self.class_)
        for name in _names_in(self.has) | {self.column} - {b""}:
            passed &= _with_column(record, name)
        for name in _names_in(self.lacks):
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


def _names_in(names: bytes) -> set[bytes]:
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


class SearchResult(NamedTuple):
    """The samples of a search so far. `after`: the place to continue at, None at the end.

    `progress` is the part of the set that is done, `unread` how many files could not be read for their values.
    """

    samples: list[Sample]
    after: int | None
    progress: float
    unread: int


class Pace:
    """The time of an answer. `is_gone` returns True when nobody waits for it any more."""

    def __init__(self, is_gone: Callable[[], bool] = lambda: False) -> None:
        self.steps = 0  # that were done: at least one, so that each answer makes progress
        self._is_gone, self._began = is_gone, time.monotonic()

    @property
    def is_over(self) -> bool:
        """True if the answer has to end with its result so far."""
        return self.steps > 0 and (time.monotonic() - self._began > SECONDS or self._is_gone())


class Masks:
    """The samples that pass the records of shards, cached for the last few shards. Usable by several threads."""

    def __init__(self) -> None:
        self._masks: OrderedDict[tuple[Filter, tuple[int, int, int]], NDArray[np.uint32]] = OrderedDict()
        self._lock = threading.Lock()

    def passing(self, filter_: Filter, now: Snapshot, shard: int) -> NDArray[np.uint32]:
        """Return the places, in the order of a shard, of the samples that pass its record. Raises ShardErrors."""
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


# A place of a search, and the number of a sample that passes the records; None if there is nothing to look at.
Step = tuple[int, int | None]


class Search:
    """One search in one snapshot, for one answer.

    A method that yields steps decides the order in which samples are looked at; `passing` looks at them.
    """

    def __init__(self, masks: Masks, filter_: Filter, now: Snapshot, pace: Pace) -> None:
        self._masks, self._filter, self._now, self._pace = masks, filter_, now, pace
        self.unread = 0  # files that could not be read for their values
        self.after: int | None = None  # the place to continue at

    # --- what is looked at, in which order

    def forwards(self, at: int) -> Iterator[Step]:
        """Yield the candidates from the number `at` on; a place is a number, and each shard begins a step."""
        now = self._now
        while at < now.total:
            shard = now.shard_of(at)
            first, places = now.first_of(shard), self._candidates(shard)
            for place in places[int(np.searchsorted(places, at - first)) :].tolist():
                yield first + place, first + place
            at = now.first_of(shard + 1)
            if at < now.total:
                yield at, None

    def backwards(self, at: int) -> Iterator[Step]:
        """Yield the candidates from the number `at` down."""
        now, end = self._now, min(at + 1, self._now.total)
        while end > 0:
            shard = now.shard_of(end - 1)
            first, places = now.first_of(shard), self._candidates(shard)
            for place in reversed(places[: int(np.searchsorted(places, end - first))].tolist()):
                yield first + place, first + place
            end = first
            if end:
                yield end - 1, None

    def drawn(self, seed: int, at: int) -> Iterator[Step]:
        """Yield the candidates in the random order of the seed, from the place `at` of that order on."""
        for place, number in draws(self._now.total, seed, at):
            yield place, number if self._is_candidate(number) else None

    def exact(self, count: int) -> list[Sample]:
        """Return the samples with exactly the key of the filter, found at once, however many others there are."""
        now, samples = self._now, list[Sample]()
        crc = zlib.crc32(self._filter.q)
        for shard in now.readable:
            if self._pace.is_over or len(samples) >= count:
                break
            self._pace.steps += 1
            if self._filter.takes_shard(now.shards[shard].name):
                numbers = filter(self._is_candidate, self._numbers_of_key(shard, crc))
                samples += [now.sample(number) for number in numbers if self._has_value(number)]
        return samples[:count]

    def _numbers_of_key(self, shard: int, crc: int) -> list[int]:
        """Return the numbers of the samples of a shard with exactly the key of the filter. Raises ShardErrors."""
        now = self._now
        entries = now.record(shard, lambda record: list(record.find_samples(self._filter.q, crc)))
        numbers = [now.number_of(shard, entry) for entry in entries]
        return [number for number in numbers if number is not None]

    def _candidates(self, shard: int) -> NDArray[np.uint32]:
        return self._masks.passing(self._filter, self._now, shard)

    def _is_candidate(self, number: int) -> bool:
        """Return True if the sample with this number passes but for its value."""
        if not self._filter:
            return True
        shard = self._now.shard_of(number)
        places, place = self._candidates(shard), number - self._now.first_of(shard)
        at = int(np.searchsorted(places, place))
        return at < len(places) and int(places[at]) == place

    # --- what passes

    def passing(self, steps: Iterable[Step], count: int) -> Iterator[int]:
        """Yield the numbers of up to `count` samples that pass; `after` then says where to continue.

        It ends earlier when the time of the answer is over. Raises StaleShard: the numbers are of another content.
        """
        for place, number in steps:
            self.after = place
            if self._pace.is_over or (number is not None and not count):
                return
            if number is not None and self._has_value(number):
                count -= 1
                yield number
            self._pace.steps += 1
        self.after = None

    def _has_value(self, number: int) -> bool:
        """Return True if a candidate has the value. Raises StaleShard; counts files that cannot be read."""
        column = self._filter.column
        if not column:
            return True
        sample = self._now.sample(number)
        try:
            source = self._now.source(sample.path + b"/" + sample.names[sample.columns.index(column)])
            return source.size <= VALUE_MAX and self._filter.matches(source.read(0, source.size))
        except StaleShard:
            raise
        except (WdsfsError, OSError):
            self.unread += 1
            return False

    # --- results

    def collect(self, steps: Iterable[Step], count: int, begun: Sequence[Sample] = ()) -> list[Sample]:
        """Return up to `count` samples: those of `begun`, and those of the steps that pass."""
        samples = list(begun)
        there = {sample.number for sample in samples}
        further = ((place, None if number in there else number) for place, number in steps)
        try:
            for number in self.passing(further, count - len(samples)):
                samples.append(self._now.sample(number))
        except StaleShard:
            if not (self._filter.column and self._pace.steps):
                raise
            # A search for a value goes on in a newer snapshot.
        return samples

    def find(self, at: int | None, count: int) -> SearchResult:
        """Return up to `count` samples from the one numbered `at` on, in the order of the set.

        Without `at`, those whose key is exactly `filter.q` come first, and not once more in their places.
        """
        begun = self.exact(count) if self._filter.q and at is None else []
        samples = self.collect(self.forwards(at or 0), count, begun)
        return self._result(samples, (self.after or 0) / max(self._now.total, 1))

    def next(self, at: int, *, back: bool) -> SearchResult:
        """Return the first sample from that number on that passes, or with `back` the last one up to it."""
        total = max(self._now.total, 1)
        numbers = self.passing(self.backwards(at) if back else self.forwards(at), 1)
        samples = [self._now.sample(number) for number in itertools.islice(numbers, 1)]
        done = self.after or 0
        return self._result(samples, (total - done if back else done) / total)

    def draw(self, seed: int, at: int, count: int) -> SearchResult:
        """Return up to `count` samples in the random order of the seed, from the place `at` in that on."""
        samples = self.collect(self.drawn(seed, at), count)
        return self._result(samples, (self.after or 0) / draws_of(self._now.total))

    def _result(self, samples: list[Sample], progress: float) -> SearchResult:
        return SearchResult(samples, self.after, 1.0 if self.after is None else progress, self.unread)

    def key_lines(self, at: int) -> bytes:
        """Return lines SHARD/KEY for `--keys` of samples that pass, from number `at` on; `after` goes on.

        Raises UsageError for a key with a line end, ShardErrors.
        """
        now = self._now
        numbers = list(self.passing(self.forwards(at), LINES))
        if self.unread:
            log.warning("%s could not be read, and are not in the list", counted(self.unread, "file"))
        lines = []
        for shard, some in itertools.groupby(numbers, now.shard_of):
            name, first = now.shards[shard].name, now.first_of(shard)
            for key in now.keys(shard, [number - first for number in some]):
                if not {10, 13, 0}.isdisjoint(key):
                    text = readable(name + b"/" + key)
                    raise UsageError(f"{text}: a list cannot have this key, which has a line end")
                lines.append(b"%s/%s\n" % (name, key))
        return b"".join(lines)


class UnknownColumns(NamedTuple):
    """Columns that a filter names and no sample has, and the columns that there are."""

    missing: list[bytes]
    known: list[bytes]


def unknown_columns(filter_: Filter, now: Snapshot, pace: Pace) -> UnknownColumns | None:
    """Return the columns of a filter that no sample has; None if there are none, or it takes too long."""
    missing = _names_in(filter_.has) | _names_in(filter_.lacks) | {filter_.column} - {b""}
    known: set[bytes] = set()
    for shard in now.readable:
        if pace.is_over or missing <= known:
            return None
        pace.steps += 1
        known |= now.record(shard, lambda record: set(record.extension_name.of(range(len(record.extension_name)))))
    missing -= known
    return UnknownColumns(sorted(missing), sorted(known)) if missing else None


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
