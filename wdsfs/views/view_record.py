"""Views made of records: some columns only, columns of other shards and of label files, folders by class.

What a shard shows in such a view is worked out once, into a second record of the same format, by `compose`: a
function of the shard's own record, of the records and values that it is joined with, and of the options. So
trees, listings and the index serve a view as they serve a shard.

A member of a derived record has, in the place of its offset, an *address*: the number of a place and a number
there. Place 0 is the shard itself; the others are in the record's directory (`view`). What the number means
follows from the place's kind:

| kind    | the bytes are | the number is |
|---------|---------------|---------------|
| shard   | a member of a shard | that of the member in the shard's own record |
| values  | a value of a label file | its row in the section `values` of the record |
| decoded | a member, decompressed | the row in the sections `decoded.from` (its address) and `decoded.codec` |
| empty   | none: a file that stands for a missing column | 0 |

The order in which the options work: samples that are left out, join, decode, associate, columns, classes.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from wdsfs import names
from wdsfs.errors import CorruptShard, UsageError, ViewError
from wdsfs.index.record import LINK, STRAY, Record
from wdsfs.index.record_builder import PROBLEMS_MAX, DerivedMembers, derive
from wdsfs.tar import member_codecs, scan

FORMAT = 3  # of what is derived: goes up when the same options give something else
ERROR, SKIP, EMPTY = "error", "skip", "empty"
SHARD, VALUES, DECODED, NOTHING = "shard", "values", "decoded", "empty"
MISSING, TWICE = -1, -2  # in the place of a shard's number: the key is nowhere, or more than once
UNDECODED = "not decoded"  # the kind of a problem
OWN = 0  # the place of the shard itself
_SHIFT = 40  # bits of the number in an address while a record is made; a stored one has as few as will do
_STEM_MAX = 200  # bytes of a file's name before its extension, in the classes layout
CLASS_DIGITS_MAX = 18  # of a class that counts as a number
_NUMBER = re.compile(rb"([+-]?)([0-9]{1,%d})" % CLASS_DIGITS_MAX)
COLUMNS_NAMED = 20  # columns that a message names
_WAY_OUT = "--missing skip leaves such samples out, --missing empty shows them without"
_TWICE_OUT = "--duplicates skip leaves such samples out, --duplicates empty shows them without"


@dataclass(frozen=True, slots=True)
class Composition:
    """The options of a view.

    Each of `columns` is the alternatives of one output, as extensions. `join` are specs of shard sets, `associate`
    and `class_names` paths of files. `class_from` is an extension, `class_field` the path to a field of its JSON.
    Classes that are whole numbers are shown with `class_digits` digits, 0: as they are, None: with as many as the
    longest of the set has, which takes a look at all shards (`view_set.py`).
    """

    columns: tuple[tuple[bytes, ...], ...] = ()
    ignore_case: bool = False
    missing: str = ERROR
    duplicates: str = ERROR
    join: tuple[str, ...] = ()
    associate: tuple[str, ...] = ()
    decode: bool = False
    classes: bool = False
    class_from: bytes = b"cls"
    class_field: str = ""
    class_names: str | None = None
    class_digits: int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether a shard that nothing is left out of is shown as it is."""
        changes = self.columns or self.ignore_case or self.join or self.associate or self.decode or self.classes
        return not changes

    @property
    def text(self) -> str:
        """The options as they are typed."""
        words: list[str] = []
        for alternatives in self.columns:
            words += ["--columns", _text(b";".join(alternatives))]
        words += ["--ignore-case"] * self.ignore_case
        words += [word for spec in self.join for word in ("--join", spec)]
        words += [word for path in self.associate for word in ("--associate", path)]
        words += ["--decode-members"] * self.decode
        if self.classes:
            words += [
                "--class-from",
                _text(self.class_from) + (f":{self.class_field}" if self.class_field else ""),
            ]
            words += ["--class-names", self.class_names] if self.class_names else []
            words += ["--class-digits", str(self.class_digits)] if self.class_digits is not None else []
        words += ["--missing", self.missing] if self.missing != ERROR else []
        words += ["--duplicates", self.duplicates] if self.duplicates != ERROR else []
        return shlex.join(words)

    def codec_of(self, extension: bytes) -> tuple[int, bytes] | None:
        """As `member_codecs.codec_of`, in any letter case if that does not count."""
        return member_codecs.codec_of(extension.lower() if self.ignore_case else extension)

    def wants(self, extension: bytes) -> bool:
        """Whether any option looks at members with this extension."""
        if not self.columns:
            return True
        decoded = self.codec_of(extension) if self.decode else None
        if decoded is not None and self.wants(decoded[1]):
            return True
        named = {one for alternatives in self.columns for one in alternatives}
        if self.classes:
            named.add(self.class_from)
        return extension in named or (self.ignore_case and extension.lower() in {one.lower() for one in named})

    def digest(self, left_out: frozenset[bytes], name: bytes, companions: bytes) -> bytes:
        """16 bytes that tell what this makes of a shard from what others make of it.

        `left_out` are keys, `name` is what the shard is called in the mount: both are part of what is shown.
        `companions` tells which files the options name.
        """
        told = repr((FORMAT, self, sorted(left_out), name if self.classes else b"", companions))
        return hashlib.blake2b(told.encode(), digest_size=16).digest()


def columns_of(texts: Sequence[str]) -> tuple[tuple[bytes, ...], ...]:
    """The outputs that `--columns` names, in DALI's syntax: alternatives are divided by `;`. Raises UsageError."""
    found = []
    for text in texts:
        alternatives = tuple(one.encode("utf-8", "surrogateescape") for one in text.split(";"))
        if any(not one or b"/" in one for one in alternatives):
            raise UsageError(f"--columns {text!r}: an extension is empty or has a slash; write 'jpg;png'")
        found.append(alternatives)
    return tuple(found)


def class_source(text: str) -> tuple[bytes, str]:
    """The extension and the field of `--class-from EXT[:FIELD]`. Raises UsageError."""
    extension, colon, fields = text.partition(":")
    if not extension or (colon and not all(fields.split("."))):
        raise UsageError(f"--class-from {text!r}: write an extension, or an extension and a field: json:label")
    return extension.encode("utf-8", "surrogateescape"), fields


def read_class_names(path: str) -> dict[str, str]:
    """The names of classes by what samples call them: a line for each number from 0 on, or JSON: a list or an
    object. Raises UsageError."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--class-names {path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        found = json.loads(text) if text.lstrip()[:1] in ("[", "{") else list(map(str.strip, text.splitlines()))
    except ValueError as error:
        raise UsageError(f"--class-names {path}: {error}") from None
    pairs = enumerate(found) if isinstance(found, list) else found.items()
    named = {str(key): value for key, value in pairs}
    if not named:
        raise UsageError(f"--class-names {path}: names no class")
    for key, value in named.items():
        if not isinstance(value, str):
            raise UsageError(f"--class-names {path}: the name of class {key} is no text")
    if isinstance(found, list):
        _refuse_twice(path, named)
    return named


def _refuse_twice(path: str, named: dict[str, str]) -> None:
    """Raises UsageError where a list gives two classes one name: there, nobody means to have them together."""
    first: dict[str, str] = {}
    for number, name in named.items():
        if name and first.setdefault(name, number) != number:
            raise UsageError(
                f"--class-names {path}: classes {first[name]} and {number} are both called {name!r} and would be "
                "one folder; give them different names, or use a JSON object to have them in one"
            )


# --- what a shard is put together with ---------------------------------------------------------------------


class ContentSource(NamedTuple):
    """A shard, as it is: its path, its name in the mount, its record, and keys of samples to leave out."""

    path: bytes
    name: bytes
    record: Record
    left_out: frozenset[bytes] = frozenset()


class JoinedSet(Protocol):
    """A parallel set of shards."""

    def find(self, keys: list[bytes]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each key the number of the shard that has it, MISSING or TWICE, and the sample's entry there."""

    def record(self, number: int) -> Record: ...

    def path(self, number: int) -> bytes: ...


class Labels(Protocol):
    """A label file: small columns by key."""

    path: bytes
    fingerprint: tuple[int, int, int]

    def find(self, keys: Sequence[bytes]) -> dict[bytes, list[dict[bytes, bytes]]]:
        """The rows of each key that there are: values by extension."""


class Surroundings(NamedTuple):
    """Everything but the shard that a view of it is made of.

    `read` gives the bytes of a member, by the path of its shard and its number there; it raises ShardError.
    """

    joined: Sequence[JoinedSet] = ()
    labels: Sequence[Labels] = ()
    class_names: dict[str, str] | None = None
    read: Callable[[bytes, int], bytes] = lambda path, member: b""


def compose(wanted: Composition, source: ContentSource, around: Surroundings, fingerprint: Sequence[int]) -> bytes:
    """The record of what a shard shows under these options.

    Where the options refuse a sample (`--missing error`), the record is empty and says so: `refusal`. Raises what
    the surroundings raise.
    """
    composer = _Composer(wanted, source, around)
    try:
        return composer.to_bytes(fingerprint)
    except _LongNumber as error:
        return refuse(str(error), fingerprint, error.digits)
    except ViewError as error:
        return refuse(str(error), fingerprint)


class _LongNumber(ViewError):
    """A class has more `digits` than classes are shown with."""

    def __init__(self, text: str, digits: int) -> None:
        super().__init__(text)
        self.digits = digits


def refuse(text: str, fingerprint: Sequence[int], digits: int = 0) -> bytes:
    """The record of a shard of which nothing is shown, for this reason; `digits`: that many would mend it."""
    nothing, problems = np.zeros(0, np.int64), [scan.Problem(0, "refused", text)]
    empty = DerivedMembers(
        [], nothing.astype(bool), nothing, nothing, [], nothing, nothing, nothing, problems=problems
    )
    return derive(empty, fingerprint, {"shift": 1, "places": [], "refused": text, "digits": digits})


def refusal(record: Record) -> str | None:
    """Why a derived record shows nothing, if it was refused."""
    return None if record.view is None else record.view.get("refused")


def digits_wanted(record: Record) -> int:
    """How many digits the classes of a shard need that was refused for want of them; else 0."""
    return 0 if record.view is None else int(record.view.get("digits", 0))


@dataclass(slots=True)
class _Rows:
    """Members as columns; `entry` counts samples and strays."""

    entry: NDArray[np.int64]
    extension: NDArray[np.int64]
    address: NDArray[np.int64]
    size: NDArray[np.int64]
    mtime: NDArray[np.int64]

    def take(self, which: NDArray[Any]) -> _Rows:
        """Some of these, by a mask or by numbers."""
        return _Rows(*(column[which] for column in self.columns()))

    def columns(self) -> tuple[NDArray[np.int64], ...]:
        return self.entry, self.extension, self.address, self.size, self.mtime

    def plus(self, other: _Rows) -> _Rows:
        """These, and behind those of the same entry the others."""
        together = _Rows(*(np.concatenate(pair) for pair in zip(self.columns(), other.columns(), strict=True)))
        return together.take(np.argsort(together.entry, kind="stable"))


def _rows(found: Sequence[tuple[int, int, int, int, int]]) -> _Rows:
    table = np.array(found, dtype=np.int64).reshape(-1, 5)
    return _Rows(*(np.ascontiguousarray(table[:, column]) for column in range(5)))


@dataclass(slots=True)
class _Values:
    """The values of label files that a record holds, each once."""

    texts: list[bytes] = field(default_factory=list)
    numbers: dict[bytes, int] = field(default_factory=dict)

    def number(self, text: bytes) -> int:
        found = self.numbers.get(text)
        if found is None:
            found = self.numbers[text] = len(self.texts)
            self.texts.append(text)
        return found


class _Composer:
    """One shard on its way into a derived record."""

    def __init__(self, wanted: Composition, source: ContentSource, around: Surroundings) -> None:
        self.wanted, self.source, self.around = wanted, source, around
        record = self.record = source.record
        self.paths = record.paths()
        flags = np.array(record.entry_flags, np.uint8)
        self.strays = (flags & STRAY) != 0
        starts = np.asarray(record.entry_member).astype(np.int64)
        counts = starts[1:] - starts[:-1]
        self.extensions = [record.extension_name[number] for number in range(len(record.extension_name))]
        self.numbers = {extension: number for number, extension in enumerate(self.extensions)}
        members = np.arange(record.members, dtype=np.int64)
        self.rows = _Rows(
            np.repeat(np.arange(record.entries, dtype=np.int64), counts),
            record.array("member.ext").astype(np.int64),
            members,
            record.sizes(range(record.members)).astype(np.int64),
            record.mtimes_ns(range(record.members)),
        )
        self.links: dict[int, bytes] = {}
        self._settle_links(flags)
        self.places: list[dict[str, Any]] = [self._shard_place(source.path, record)]
        self.shard_places: dict[bytes, int] = {}
        self.values = _Values()
        self.decoded: list[tuple[int, int]] = []
        self.problems: list[scan.Problem] = []
        self.classes: list[bytes | None] = [None] * len(self.paths)

    def _settle_links(self, flags: NDArray[np.uint8]) -> None:
        """A hard link is a file of its own here; one that names nothing is none."""
        record = self.record
        if record.is_plain:
            return
        strays = np.flatnonzero(self.strays[self.rows.entry]).tolist()
        for member in strays:
            target = record.symlink(member)
            if target is not None:
                self.links[member] = target
        dangling = [
            member
            for member in strays
            if flags[self.rows.entry[member]] & LINK and record.link_target(member) is None
        ]
        self.rows = self.rows.take(~np.isin(self.rows.address, dangling))

    def to_bytes(self, fingerprint: Sequence[int]) -> bytes:
        self._leave_out()
        for joined in self.around.joined:
            self._join(joined)
        if self.wanted.decode:
            self._decode()
        for labels in self.around.labels:
            self._associate(labels)
        if self.wanted.classes:
            self._find_classes()
        if self.wanted.columns:
            self._select()
        elif self.wanted.ignore_case:
            # Semantics decision: in lower case, as the webdataset library reads them.
            self._rename({number: one.lower() for number, one in enumerate(self.extensions)})
        if self.wanted.classes:
            self._into_classes()
        self._keep(np.bincount(self.rows.entry, minlength=len(self.paths)) > 0)
        return derive(self._derived(), fingerprint, self._view())

    # --- parts that the steps below share

    def _same(self) -> NDArray[np.int64]:
        """For each extension the number of the first that is the same: with --ignore-case in any letter case."""
        first: dict[bytes, int] = {}
        fold = bytes.lower if self.wanted.ignore_case else bytes
        return np.array([first.setdefault(fold(one), at) for at, one in enumerate(self.extensions)], np.int64)

    def _codes(self, rows: _Rows) -> NDArray[np.int64]:
        """A number for each member that says its entry and extension."""
        return rows.entry << 32 | self._same()[rows.extension]

    def _samples(self) -> NDArray[np.int64]:
        return np.flatnonzero(~self.strays)

    def _number(self, extension: bytes) -> int:
        found = self.numbers.get(extension)
        if found is None:
            found = self.numbers[extension] = len(self.extensions)
            self.extensions.append(extension)
        return found

    def _rename(self, renamed: dict[int, bytes]) -> None:
        numbers = np.arange(len(self.extensions))
        for number, extension in renamed.items():
            numbers[number] = self._number(extension)
        self.rows.extension = numbers[self.rows.extension]

    def _keep(self, kept: NDArray[np.bool_]) -> None:
        """Only these entries, with their members."""
        if kept.all():
            return
        self.rows = self.rows.take(kept[self.rows.entry])
        self.rows.entry = (np.cumsum(kept) - 1)[self.rows.entry]
        self.paths = [path for path, keep in zip(self.paths, kept.tolist(), strict=True) if keep]
        self.classes = [one for one, keep in zip(self.classes, kept.tolist(), strict=True) if keep]
        self.strays = self.strays[kept]

    def _judged(self, policy: str, bad: NDArray[np.int64], what: str, way_out: str) -> NDArray[np.bool_]:
        """Which entries stay when these are bad, by `--missing` or `--duplicates`. Raises ViewError."""
        kept = np.ones(len(self.paths), bool)
        if len(bad) and policy == ERROR:
            key = _text(self.paths[bad[0]])
            more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
            raise ViewError(f"{_text(self.source.path)}: sample {key!r} {what}{more}; {way_out}")
        if policy == SKIP:
            kept[bad] = False
        return kept

    def _place(self, kind: str, path: bytes, fingerprint: Sequence[int]) -> int:
        self.places.append({"kind": kind, "path": _text(path), "fingerprint": list(fingerprint)})
        return len(self.places) - 1

    @staticmethod
    def _shard_place(path: bytes, record: Record) -> dict[str, Any]:
        return {"kind": SHARD, "path": _text(path), "fingerprint": record.fingerprint}

    # --- the steps

    def _leave_out(self) -> None:
        left_out = {names.plain_key(key) for key in self.source.left_out}
        pairs = zip(self.paths, self.strays.tolist(), strict=True)
        if left_out:
            self._keep(
                np.fromiter((stray or path not in left_out for path, stray in pairs), bool, len(self.paths))
            )
        if self.wanted.columns or self.wanted.classes:
            self._keep(~self.strays)

    def _join(self, joined: JoinedSet) -> None:
        samples = self._samples()
        shards, entries = joined.find([self.paths[number] for number in samples.tolist()])
        missing, twice = samples[shards == MISSING], samples[shards == TWICE]
        kept = self._judged(self.wanted.missing, missing, "is not in the set that is joined", _WAY_OUT)
        unique = self._judged(
            self.wanted.duplicates, twice, "is more than once in the set that is joined", _TWICE_OUT
        )
        found = [
            self._joined_rows(joined, number, samples[shards == number], entries[shards == number])
            for number in np.unique(shards[shards >= 0]).tolist()
        ]
        self._keep(self._add(found) & kept & unique)

    def _joined_rows(
        self, joined: JoinedSet, number: int, samples: NDArray[np.int64], entries: NDArray[np.int64]
    ) -> _Rows:
        """The members of these entries of a joined shard, as members of these samples."""
        record, path = joined.record(number), joined.path(number)
        place = self.shard_places.get(path)
        if place is None:
            place = self.shard_places[path] = len(self.places)
            self.places.append(self._shard_place(path, record))
        starts = np.asarray(record.entry_member).astype(np.int64)
        first, counts = starts[entries], starts[entries + 1] - starts[entries]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        members = np.repeat(first, counts) + within
        own = [record.extension_name[one] for one in range(len(record.extension_name))]
        wanted = np.array([self.wanted.wants(one) for one in own], bool)
        numbers = np.array([self._number(one) if self.wanted.wants(one) else -1 for one in own], np.int64)
        extension = record.array("member.ext")[members]
        return _Rows(
            np.repeat(samples, counts),
            numbers[extension],
            members | place << _SHIFT,
            np.asarray(record.array("member.size"))[members].astype(np.int64),
            record.mtimes_ns(members),
        ).take(wanted[extension])

    def _add(self, found: list[_Rows]) -> NDArray[np.bool_]:
        """Add joined members. A column that the sample has already is a duplicate; returns what to keep."""
        kept = np.ones(len(self.paths), bool)
        for rows in found:
            clash = np.isin(self._codes(rows), self._codes(self.rows))
            if clash.any():
                first = self.extensions[int(rows.extension[clash][0])]
                text = f"has the column {_text(first)!r} itself, and so has the set that is joined"
                kept &= self._judged(self.wanted.duplicates, np.unique(rows.entry[clash]), text, _TWICE_OUT)
                rows = rows.take(~clash)
            self.rows = self.rows.plus(rows)
        return kept

    def _decode(self) -> None:
        place = self._place(DECODED, b"", ())
        there = set(self._codes(self.rows).tolist())
        found = []
        for number, extension in enumerate(list(self.extensions)):
            known = self.wanted.codec_of(extension)
            if known is None or not self.wanted.wants(known[1]):
                continue
            codec, decoded = known[0], self._number(known[1])
            same = int(self._same()[decoded])
            for at in np.flatnonzero(self.rows.extension == number).tolist():
                entry, address = int(self.rows.entry[at]), int(self.rows.address[at])
                code = entry << 32 | same
                # Semantics decision: a member that is there as `x.json` wins over a decoded `x.json.gz`.
                if self.strays[entry] or code in there:
                    continue
                there.add(code)
                size = self._decoded_size(codec, address, entry, extension)
                if size is not None:
                    row = (entry, decoded, place << _SHIFT | len(self.decoded), size, int(self.rows.mtime[at]))
                    found.append(row)
                    self.decoded.append((address, codec))
        self.rows = self.rows.plus(_rows(found))

    def _decoded_size(self, codec: int, address: int, entry: int, extension: bytes) -> int | None:
        """How many bytes a member holds; None, and a problem, when it cannot be decoded."""
        try:
            return len(member_codecs.decode(codec, self._read(address)))
        except CorruptShard as error:
            name = _text(self.paths[entry] + b"." + extension)
            head = self.record.member(address).head if address >> _SHIFT == OWN else 0
            self.problems.append(scan.Problem(head, UNDECODED, f"{name}: {error}; it is shown as it is"))
            return None

    def _read(self, address: int) -> bytes:
        place, number = self.places[address >> _SHIFT], address & (1 << _SHIFT) - 1
        if place["kind"] == VALUES:
            return self.values.texts[number]
        if place["kind"] == DECODED:
            below, codec = self.decoded[number]
            return member_codecs.decode(codec, self._read(below))
        return self.around.read(place["path"].encode("utf-8", "surrogateescape"), number)

    def _associate(self, labels: Labels) -> None:
        samples = self._samples().tolist()
        known = labels.find([self.paths[number] for number in samples])
        place = self._place(VALUES, labels.path, labels.fingerprint)
        mtime = labels.fingerprint[1]
        missing, twice, found = [], [], []
        numbers: dict[bytes, int] = {}
        for entry in samples:
            lines = known.get(self.paths[entry])
            if lines is None:
                missing.append(entry)
            elif len(lines) > 1:
                twice.append(entry)
            else:
                for extension, value in lines[0].items():
                    number = numbers.get(extension)
                    if number is None:
                        number = numbers[extension] = (
                            self._number(extension) if self.wanted.wants(extension) else -1
                        )
                    if number >= 0:
                        row = self.values.number(value)
                        found.append((entry, number, place << _SHIFT | row, len(value), mtime))
        where = _text(labels.path)
        kept = self._judged(self.wanted.missing, np.array(missing, int), f"is not in {where}", _WAY_OUT)
        unique = self._judged(
            self.wanted.duplicates, np.array(twice, int), f"is more than once in {where}", _TWICE_OUT
        )
        rows = _rows(found)
        # Semantics decision: a label wins over the shard's own column, as in webdataset's `associate`.
        replaced = np.isin(self._codes(self.rows), self._codes(rows))
        own = self.rows.take(~replaced | self.strays[self.rows.entry])
        self.rows = own.plus(rows)
        self._keep(kept & unique)

    def _select(self) -> None:
        """Of each output's alternatives the first in the order of the tar, as DALI does."""
        rows, count = self.rows, len(self.paths)
        chosen = np.zeros(len(rows.entry), bool)
        shown = rows.extension.copy()
        kept = np.ones(count, bool)
        found = []
        empty = -1
        for alternatives in self.wanted.columns:
            typed = self._typed(alternatives)
            matches = np.isin(rows.extension, list(typed))
            entries, first = np.unique(rows.entry[matches], return_index=True)
            first = np.flatnonzero(matches)[first]
            fresh = first[~chosen[first]]
            chosen[fresh] = True
            names_ = np.arange(len(self.extensions))
            for number, name in typed.items():
                names_[number] = name
            shown[fresh] = names_[rows.extension[fresh]]
            missing = np.setdiff1d(np.arange(count), entries, assume_unique=True)
            text = f"has no column {_text(b';'.join(alternatives))!r}"
            way_out = _WAY_OUT
            if not len(entries):  # not one has it: it may be called otherwise
                way_out = f"{self._columns_hint(alternatives)}; {_WAY_OUT}"
            kept &= self._judged(self.wanted.missing, missing, text, way_out)
            if len(missing) and self.wanted.missing == EMPTY:
                empty = self._place(NOTHING, self.source.path, ()) if empty < 0 else empty
                name, mtime = self._number(alternatives[0]), self.record.fingerprint[1]
                found += [(entry, name, empty << _SHIFT, 0, mtime) for entry in missing.tolist()]
        rows.extension = shown
        self.rows = rows.take(chosen).plus(_rows(found))
        self._keep(kept)

    def _columns_hint(self, alternatives: tuple[bytes, ...]) -> str:
        """What may have been meant by a column that no sample of the shard has."""
        there = [one for one in self.extensions if one]
        more = f" and {len(there) - COLUMNS_NAMED} more" if len(there) > COLUMNS_NAMED else ""
        named = ", ".join(repr(_text(one)) for one in there[:COLUMNS_NAMED])
        hint = f"the shard has the columns {named}{more}" if there else "the shard has no columns"
        for one in alternatives:
            parts = one.split(b",")
            if len(parts) > 1 and all(part in there for part in parts):
                options = " ".join(f"--columns {_text(part)}" for part in parts)
                return f"{hint}; for several columns write {options}"
            if one.lstrip(b".*") in there:
                return f"{hint}; write --columns {_text(one.lstrip(b'.*'))}"
            if any(one.lower() == other.lower() for other in there):
                return f"{hint}; --ignore-case matches any letter case"
        return hint

    def _typed(self, alternatives: tuple[bytes, ...]) -> dict[int, int]:
        """The extensions that match one of these, with the one that each is shown as."""
        if not self.wanted.ignore_case:
            return {self.numbers[one]: self.numbers[one] for one in alternatives if one in self.numbers}
        lowered = {one.lower(): one for one in reversed(alternatives)}
        typed = {}
        for number, extension in enumerate(list(self.extensions)):
            name = extension if extension in alternatives else lowered.get(extension.lower())
            if name is not None:
                typed[number] = self._number(name)
        return typed

    # --- classes

    def _class_members(self) -> NDArray[np.bool_]:
        wanted = self.wanted.class_from
        typed = [
            number
            for number, one in enumerate(self.extensions)
            if one == wanted or (self.wanted.ignore_case and one.lower() == wanted.lower())
        ]
        return np.isin(self.rows.extension, typed)

    def _find_classes(self) -> None:
        """The class of each entry, before columns are chosen."""
        at = np.flatnonzero(self._class_members())
        entries, first = np.unique(self.rows.entry[at], return_index=True)
        found = self.classes
        # In the order of the shard, so that the disk is read in one pass.
        for entry, row in sorted(zip(entries.tolist(), at[first].tolist(), strict=True), key=lambda pair: pair[1]):
            try:
                data = self._read(int(self.rows.address[row]))
            except CorruptShard:  # cut off with the end of the shard, which its problems tell
                continue
            found[entry] = self._class(entry, data)
        missing = np.array([entry for entry, one in enumerate(found) if one is None], int)
        where = _text(self.wanted.class_from)
        where += f" with the field {self.wanted.class_field}" if self.wanted.class_field else ""
        if self.wanted.class_digits != 0:
            self._pad_numbers(self.wanted.class_digits or 1)
        self._keep(self._judged(self.wanted.missing, missing, f"has no class: no {where}", _WAY_OUT))

    def _pad_numbers(self, digits: int) -> None:
        """Show classes that are whole numbers with so many digits. Raises _LongNumber, never cuts one."""
        # Semantics decision: loaders number the sorted names of the folders, and 10 sorts before 2. So all numbers
        # of a set have one width. `7`, `07` and `+7` are one class, as for readers that decode `cls`.
        numbers = {one: match for one in dict.fromkeys(self.classes) if (match := _NUMBER.fullmatch(one or b""))}
        longest = max(numbers, key=lambda one: len(numbers[one][2]), default=None)
        if longest is None:
            return
        wanted = len(numbers[longest][2])
        if wanted > digits:
            key, shown = _text(self.paths[self.classes.index(longest)]), _text(longest)
            raise _LongNumber(
                f"{_text(self.source.path)}: sample {key!r} has the class {shown}, and classes are shown with "
                f"{digits} digit{'s' * (digits > 1)}; mount again; with --class-digits say {wanted}",
                wanted,
            )
        padded = {one: _padded(match[1], match[2], digits) for one, match in numbers.items()}
        self.classes = [one if one is None else padded.get(one, one) for one in self.classes]

    def _class(self, entry: int, data: bytes) -> bytes | None:
        """The folder of a sample; None when it has no class."""
        label = data.strip()
        if self.wanted.class_field:
            text = self._class_in_json(entry, data)
            if text is None:
                return None
            label = text.encode("utf-8", "surrogatepass")
        if self.around.class_names is not None:
            named = self.around.class_names.get(label.decode("utf-8", "surrogateescape"))
            if named is None:
                if self.wanted.missing == ERROR:
                    self._bad_class(entry, f"has the class {_text(label)!r}, which --class-names does not name")
                return None
            label = named.encode("utf-8", "surrogatepass")
        # Semantics decision: a class is one folder, so a slash in its name becomes `--`, as in keys; and what is
        # no name of a folder is no class.
        label = label.replace(b"/", b"--")
        return None if label in (b"", b".", b"..") else label

    def _class_in_json(self, entry: int, data: bytes) -> str | None:
        name = f"{_text(self.wanted.class_from)}:{self.wanted.class_field}"
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            if self.wanted.missing == ERROR:
                self._bad_class(entry, f"has no class: {name} cannot be read ({error})")
            return None
        for step in self.wanted.class_field.split("."):
            value = value.get(step) if isinstance(value, dict) else None
        if isinstance(value, str):
            return value.strip()
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else None

    def _bad_class(self, entry: int, what: str) -> None:
        self._judged(ERROR, np.array([entry]), what, _WAY_OUT)

    def _into_classes(self) -> None:
        """Let each sample be in the folder of its class, under a name of one component."""
        if not self.wanted.columns and not self.wanted.class_field:  # what the folder says need not lie in it
            self.rows = self.rows.take(~self._class_members())
        # Semantics decision: the shard's name is in front. Keys repeat from shard to shard in many sets; a number
        # behind a file's name (`a.jpg~2`) would hide it from loaders that go by the suffix, and one for each file
        # could pair the image of one sample with the text of another.
        prefix = _flat(self.source.name) + b"--"
        taken: set[bytes] = set()
        paths = []
        for path, label in zip(self.paths, self.classes, strict=True):
            # Without a class (`--missing empty`): the folder with the empty name, which `names` shows as `%`.
            folder = (label or b"") + b"/"
            # A name that was cut as a whole would lose the suffix that loaders go by.
            stem = names.shorten(prefix + _flat(path), _STEM_MAX)
            shown, number = stem, 1
            while folder + shown in taken:
                number += 1
                shown = names.numbered(stem, number)
            taken.add(folder + shown)
            paths.append(folder + shown)
        self.paths = paths

    # --- the end

    def _derived(self) -> DerivedMembers:
        rows, record = self.rows, self.record
        used, numbers = np.unique(rows.extension, return_inverse=True)
        links = {}
        if self.links:
            own = {address: at for at, address in enumerate(rows.address.tolist()) if address in self.links}
            links = {at: self.links[address] for address, at in own.items()}
        folders = {}
        if "folder.mtime" in record.column and not self.wanted.classes:
            times = {record.folder_path(n) + b"/": record.folder_mtime_ns(n) for n in range(1, record.folders)}
            folders = {path: time for path, time in times.items() if time is not None}
        problems = [*self.problems, *record.problems]
        return DerivedMembers(
            paths=self.paths,
            strays=self.strays,
            entry=rows.entry,
            extension=numbers.reshape(-1),
            extensions=[self.extensions[number] for number in used.tolist()] or [b""],
            addresses=self._packed(rows.address),
            sizes=rows.size,
            mtimes=rows.mtime,
            links=links,
            folders=folders,
            problems=problems[:PROBLEMS_MAX],
            problems_more=record.problem_count - len(record.problems) + len(problems[PROBLEMS_MAX:]),
            unshown=record.unshown,
            unshown_count=record.unshown_count,
            lists={"values": self.values.texts} if self.values.texts else {},
            numbers=self._decoded_columns(),
        )

    def _shift(self) -> int:
        largest = int((self.rows.address & (1 << _SHIFT) - 1).max()) if len(self.rows.address) else 0
        own = [address & (1 << _SHIFT) - 1 for address, _ in self.decoded]
        return max(1, max([largest, *own]).bit_length())

    def _packed(self, addresses: NDArray[np.int64]) -> NDArray[np.int64]:
        """Addresses with no more bits than they need."""
        return addresses >> _SHIFT << self._shift() | addresses & (1 << _SHIFT) - 1

    def _decoded_columns(self) -> dict[str, list[int]]:
        if not self.decoded:
            return {}
        raw = np.array([address for address, _ in self.decoded], np.int64)
        return {
            "decoded.from": self._packed(raw).tolist(),
            "decoded.codec": [codec for _, codec in self.decoded],
        }

    def _view(self) -> dict[str, Any]:
        return {"shift": self._shift(), "places": self.places}


def _padded(sign: bytes, digits: bytes, width: int) -> bytes:
    return (b"-" if sign == b"-" and digits.strip(b"0") else b"") + digits.zfill(width)


def _flat(path: bytes) -> bytes:
    """A path as one component without a dot, for the dot is where a file's extension begins."""
    return path.replace(b"/", b"--").replace(b".", b"_")


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")
