"""Which samples a page is to show: by key, shard, class, columns, and values in their files.

All but values are answered by the records: a mask over the entries of one shard at a time, made with NumPy and
kept for the last few shards. Values need the bytes of a column of each sample that has passed the masks. So a
search stops after a while, and returns what it has found and where to continue.
"""

from __future__ import annotations

import bisect
import fnmatch
import json
import random
import re
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlencode

import numpy as np
from numpy.typing import NDArray

from wdsfs.errors import ShardError, WdsfsError
from wdsfs.index.record import STRAY, Record
from wdsfs.previews.preview import Source
from wdsfs.view.library import Library, Sample

SECONDS = 1.0  # how long a search goes on before it answers with what it has found
READS_MAX = 200  # files that one answer reads for values
READS_MIN, READS_SECONDS = 20, 10.0  # and at least so many, unless that takes so long
VALUE_MAX = 256 << 10  # bytes of a file that is read for a value; what is larger does not match
MASKS_MAX = 8  # shards whose mask is kept
DRAWS_MAX = 20_000  # numbers that one answer of a random sample draws
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
        """The filter that the fields of a form ask for."""
        text = {name: query.get(name, "").strip() for name in FIELDS}
        raw = {name: text[name].encode("utf-8", "surrogateescape") for name in FIELDS}
        return cls(
            raw["q"],
            raw["shard"],
            raw["class"].strip(b"/"),
            raw["has"],
            raw["lacks"],
            raw["column"],
            text["field"],
            text["value"],
        )

    def fields(self) -> dict[str, str]:
        """The fields of a form from which `of` makes this filter."""
        raw = (self.q, self.shard, self.class_, self.has, self.lacks, self.column)
        texts = [one.decode("utf-8", "surrogateescape") for one in raw] + [self.field, self.value]
        return {name: text for name, text in zip(FIELDS, texts, strict=True) if text}

    def query(self, **more: object) -> str:
        """The filter as the query of an address."""
        fields = {**self.fields(), **{name: str(value) for name, value in more.items()}}
        return urlencode(fields, errors="surrogateescape")

    @property
    def reads(self) -> bool:
        """True if files have to be read."""
        return bool(self.column)

    def __bool__(self) -> bool:
        return self != Filter()

    def takes_shard(self, name: bytes) -> bool:
        """True if samples of the shard with this name are wanted. A name is itself, also one with `[` in it."""
        return not self.shard or name == self.shard or fnmatch.fnmatchcase(name, self.shard)

    def takes(self, sample: Sample) -> bool:
        """True if a sample that no record has passes, but for the value in its file."""
        shard, _, key = sample.path.partition(b"/")
        has, lacks = _listed(self.has), _listed(self.lacks)
        return (
            self.takes_shard(shard)
            and self.q in key
            and (not self.class_ or key.startswith(self.class_ + b"/"))
            and has.issubset(sample.columns)
            and lacks.isdisjoint(sample.columns)
            and (not self.column or self.column in sample.columns)
        )

    def mask(self, record: Record) -> NDArray[np.bool_]:
        """Which entries of a record are samples that meet the conditions that need no file."""
        passed: NDArray[np.bool_] = (record.array("entry.flags") & STRAY) == 0
        if not record.members:
            return passed
        if self.q:
            passed &= _keys_with(record, self.q)
        if self.class_:
            passed &= _entries_below(record, self.class_)
        for names, there in ((self.has, True), (self.lacks, False)):
            for name in _listed(names):
                passed &= _with_column(record, name) == there
        if self.column:
            passed &= _with_column(record, self.column)
        return passed

    def matches(self, data: bytes) -> bool:
        """True if the content of the column has the value."""
        if not self.field:
            return _same(data.decode("utf-8", "replace").strip(), self.value)
        try:
            found: Any = json.loads(data)
            for step in self.field.split("."):
                found = found[int(step)] if isinstance(found, list) else found[step]
        except (ValueError, LookupError, TypeError, RecursionError):
            return False
        if isinstance(found, list) and not any(isinstance(one, dict | list) for one in found):
            return any(_same(_text_of(one), self.value) for one in found)
        return _same(_text_of(found), self.value)


def _listed(names: bytes) -> set[bytes]:
    """Columns that are typed with commas between them."""
    return {one.strip() for one in names.split(b",")} - {b""}


def _text_of(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _same(text: str, wanted: str) -> bool:
    if "*" in wanted:
        return _is_like(text, wanted.split("*"))
    if text == wanted:
        return True
    try:
        return float(text) == float(wanted)
    except ValueError:
        return False


def _is_like(text: str, parts: list[str]) -> bool:
    """True if these parts follow each other in a text, the first at its beginning, the last at its end.

    Each part is taken where it comes first, so this takes no longer than a few looks at the text. A regular
    expression would try all places of all parts.
    """
    first, *inner, last = parts
    at, end = len(first), len(text) - len(last)
    if at > end or not text.startswith(first) or not text.endswith(last):
        return False
    for part in inner:
        found = text.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


def _keys_with(record: Record, part: bytes) -> NDArray[np.bool_]:
    """The entries whose key contains this.

    All names of a shard are one string, which is searched at once; hits across the border of two names do not
    count. A part with a slash may also end in the name of a folder, and the folder's whole path counts.
    """
    found = np.zeros(record.entries, np.bool_)
    folder_part, slash, name_part = part.rpartition(b"/")
    if not slash:
        starts = np.asarray(record.entry_name.starts)
        at = _places_in(record.entry_name.text, part)
        entries = np.searchsorted(starts, at, "right") - 1
        inside = at + len(part) <= starts[entries + 1]
        found[entries[inside]] = True
        for place in at[~inside].tolist():  # it may have hidden hits that begin inside of it
            for match in re.finditer(
                b"(?=" + re.escape(part) + b")", record.entry_name.text[place + 1 : place + 2 * len(part)]
            ):
                entry = bisect.bisect_right(record.entry_name.starts, place + 1 + match.start()) - 1
                found[entry] |= place + 1 + match.start() + len(part) <= record.entry_name.starts[entry + 1]
    for folder in range(1, record.folders):
        entries_in = record.folder_entries(folder)
        path = record.folder_path(folder) if entries_in else b""
        if part in path:
            found[entries_in.start : entries_in.stop] = True
        elif slash and path.endswith(folder_part):
            for entry in entries_in:
                found[entry] |= record.entry_name[entry].startswith(name_part)
    return found


def _places_in(text: memoryview, part: bytes) -> NDArray[np.int64]:
    """Where a part begins in a text; a hit inside of another hit does not count."""
    return np.fromiter((match.start() for match in re.finditer(re.escape(part), text)), np.int64)


def _entries_below(record: Record, folder: bytes) -> NDArray[np.bool_]:
    found = np.zeros(record.entries, np.bool_)
    for number in range(1, record.folders):
        path = record.folder_path(number)
        if path == folder or path.startswith(folder + b"/"):
            entries = record.folder_entries(number)
            found[entries.start : entries.stop] = True
    return found


def _with_column(record: Record, name: bytes) -> NDArray[np.bool_]:
    """The entries with a column of this name."""
    numbers = [at for at in range(len(record.extension_name)) if record.extension_name[at] == name]
    members = np.flatnonzero(np.isin(record.array("member.ext"), numbers))
    found = np.zeros(record.entries, np.bool_)
    found[np.searchsorted(record.array("entry.member").astype(np.int64), members, "right") - 1] = True
    return found


class Found(NamedTuple):
    """What a search has found. `after`: where to continue, None at the end; `looked`: samples looked at."""

    samples: list[Sample]
    after: int | None
    looked: int
    broken: list[str]  # shards that could not be searched, and why


class Search:
    """Searches in one library. Usable by several threads.

    `source_of` opens the file at a path, as it is now. `new` returns the samples that only an overlay has: here
    they have the numbers after the last of the set.
    """

    def __init__(
        self,
        library: Library,
        source_of: Callable[[bytes], Source],
        new: Callable[[], Sequence[Sample]] = lambda: (),
    ) -> None:
        self.library, self._source_of, self.new = library, source_of, new
        self._masks: OrderedDict[tuple[Filter, int, tuple[int, int]], NDArray[np.uint32]] = OrderedDict()

    def find(self, wanted: Filter, after: int | None, count: int) -> Found:
        """Up to `count` samples from the one numbered `after` on, in the order of the set.

        Without `after`, those whose key is exactly what is looked for come first, and once more in their places.
        """
        pace = _Pace()
        samples: list[Sample] = []
        broken: list[str] = []
        library = self.library
        total = library.total
        if wanted.q and after is None:
            samples += self._exact(wanted, count, pace)
        at = after = after or 0
        exact = {sample.number for sample in samples}
        while at < total:
            shard = library.shard_of(at)
            first, end = library.first_of(shard), library.first_of(shard + 1)
            try:
                places = self._places(wanted, shard)
            except ShardError as error:
                broken.append(str(error))
                at = end
                continue
            begin = int(np.searchsorted(places, at - first))
            for place in places[begin:].tolist():
                # Without reads this is quick. With them each answer goes on by one read at least.
                if len(samples) == count or (pace.reads and pace.is_over):
                    return Found(samples, first + place, first + place - after, broken)
                sample = library.sample(first + place)
                if sample.number not in exact and self._passes(wanted, sample, pace):
                    samples.append(sample)
            at = end
            if at < total and (pace.is_over or len(samples) == count):
                return Found(samples, at, at - after, broken)
        return self._find_new(wanted, Found(samples, None, max(total - after, 0), broken), after, count, pace)

    def _find_new(self, wanted: Filter, found: Found, after: int, count: int, pace: _Pace) -> Found:
        """What was found in the set, and behind it the new samples that pass."""
        new, total = self.new(), self.library.total
        begin = max(after, total)
        for at, sample in enumerate(new[begin - total :], begin):
            if len(found.samples) == count or (pace.reads and pace.is_over):
                return found._replace(after=at, looked=at - after)
            if wanted.takes(sample) and self._passes(wanted, sample, pace):
                found.samples.append(sample)
        return found._replace(looked=max(total + len(new) - after, 0))

    def _exact(self, wanted: Filter, count: int, pace: _Pace) -> list[Sample]:
        """The samples with exactly this key, which the index finds at once, however many others there are."""
        found: list[Sample] = []
        crc = zlib.crc32(wanted.q)
        for shard, name in enumerate(self.library.shard_names):
            if pace.is_over or len(found) >= count:
                break
            if not wanted.takes_shard(name):
                continue
            with suppress(ShardError):
                # Not in one question: what `_passes` reads may be slow, and others wait for the end of a question.
                named = self._named(wanted, shard, crc)
                found += [sample for sample in named if self._passes(wanted, sample, pace)]
        return found[:count]

    def _named(self, wanted: Filter, shard: int, crc: int) -> list[Sample]:
        """The samples of a shard with exactly this key that pass its record. Raises ShardErrors."""
        library, found = self.library, []
        with library.asking():
            for entry in library.record(shard, lambda record: list(record.find_samples(wanted.q, crc))):
                number = library.number_of(shard, entry)
                if number is not None and _holds(self._places(wanted, shard), number - library.first_of(shard)):
                    found.append(library.sample(number))
        return found

    def draw(self, wanted: Filter, seed: int, after: int, count: int) -> Found:
        """Up to `count` samples in a random order that the seed decides, from the place `after` in it on."""
        pace = _Pace()
        samples: list[Sample] = []
        broken: list[str] = []
        total, new = self.library.total, self.new()
        for at, number in draws(total + len(new), seed, after):
            if len(samples) == count or (at > after and pace.is_over) or at - after >= DRAWS_MAX:
                return Found(samples, at, at - after, broken)
            if number >= total:
                sample = new[number - total]
                samples += [sample] if wanted.takes(sample) and self._passes(wanted, sample, pace) else []
                continue
            shard = self.library.shard_of(number)
            try:
                places = self._places(wanted, shard) if wanted else None
                place = number - self.library.first_of(shard)
                if places is not None and not _holds(places, place):
                    continue
                sample = self.library.sample(number)
            except ShardError as error:
                broken.append(str(error))
                continue
            if self._passes(wanted, sample, pace):
                samples.append(sample)
        return Found(samples, None, max(total + len(new) - after, 0), broken)

    def _places(self, wanted: Filter, shard: int) -> NDArray[np.uint32]:
        """The places in the order of a shard of the samples that pass its record. Raises ShardErrors."""
        library = self.library
        with library.asking():
            key = wanted, shard, library.version
            found = self._masks.get(key)
            if found is None:
                if wanted.takes_shard(library.shard_names[shard]):
                    order = np.asarray(library.order(shard))
                    mask = library.record(shard, wanted.mask)
                    found = np.flatnonzero(mask[order]).astype(np.uint32)
                else:
                    found = np.zeros(0, np.uint32)
                self._masks[key] = found
                while len(self._masks) > MASKS_MAX:
                    self._masks.popitem(last=False)
            return found

    def _passes(self, wanted: Filter, sample: Sample, pace: _Pace) -> bool:
        if not wanted.reads:
            return True
        pace.reads += 1
        try:
            name = sample.names[sample.columns.index(wanted.column)]
            source = self._source_of(sample.path + b"/" + name)
            return source.size <= VALUE_MAX and wanted.matches(source.read(0, source.size))
        except (WdsfsError, OSError):  # removed, or not readable: no match
            return False


class _Pace:
    """The limits of one answer: time and files read."""

    def __init__(self) -> None:
        self.reads = 0
        self._began = time.monotonic()

    @property
    def is_over(self) -> bool:
        seconds = READS_SECONDS if 0 < self.reads < READS_MIN else SECONDS
        return self.reads >= READS_MAX or time.monotonic() - self._began > seconds


def _holds(places: NDArray[np.uint32], place: int) -> bool:
    at = int(np.searchsorted(places, place))
    return at < len(places) and int(places[at]) == place


def draws(total: int, seed: int, after: int = 0) -> Iterator[tuple[int, int]]:
    """Every number below `total` once, in an order that looks random, each with its place; from a place on.

    A permutation of the next power of four in four rounds over its two halves, without what is not below `total`.
    So the places of some are left out, no memory is needed for those drawn before, and any place is found at once.
    """
    half = max((max(total - 1, 1).bit_length() + 1) // 2, 1)
    low = (1 << half) - 1
    keys = [random.Random(f"{seed} {at}").getrandbits(64) | 1 for at in range(4)]
    for place in range(after, 1 << 2 * half):
        left, right = place >> half, place & low
        for key in keys:
            mixed = (right * key + (key >> 32)) & 0xFFFFFFFFFFFFFFFF
            mixed ^= mixed >> 29
            left, right = right, left ^ (mixed * 0x9E3779B97F4A7C15 >> 40 & low)
        found = left << half | right
        if found < total:
            yield place, found
