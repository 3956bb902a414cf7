"""A record of a view in the making: the samples of a shard, their members as columns, and what the steps share.

The steps are functions over a `Draft`, in `view_record.py` and `classes.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdsfs.errors import ViewError, and_others, several
from wdsfs.index.record import LINK, STRAY, Record
from wdsfs.names import lower_case, text_of
from wdsfs.shards import Fingerprint, Shard
from wdsfs.tar.problems import Problem
from wdsfs.tree import json_fields
from wdsfs.tree.companions import JoinedSet
from wdsfs.tree.composition import ERROR, SKIP, Composition
from wdsfs.tree.label_table import KeyList, OpenLabels
from wdsfs.tree.view_content import FIELD, SHARD, VALUES

SHIFT = 40  # bits of the number in an address while a record is made; a stored one has as few as possible
COLUMNS_NAMED = 20  # columns that a message names
MISSING_WAY_OUT = "--missing skip leaves such samples out, --missing empty shows them without"
MISSING_COLUMN_WAY_OUT = "--missing skip leaves such samples out, --missing empty shows an empty file"
TWICE_WAY_OUT = "--duplicates skip leaves such samples out, --duplicates empty shows them without"
# Of columns that are added from elsewhere. Samples keep the columns that they have in the shards.
AS_THEY_ARE = "--missing skip leaves such samples out, --missing empty keeps them as they are"
TWICE_AS_THEY_ARE = "--duplicates skip leaves such samples out, --duplicates empty keeps them as they are"


@dataclass(slots=True)
class Rows:
    """Members as columns; `entry` counts samples and strays."""

    entry: NDArray[np.int64]
    extension: NDArray[np.int64]
    address: NDArray[np.int64]
    size: NDArray[np.int64]
    mtime: NDArray[np.int64]

    def take(self, which: NDArray[Any]) -> Rows:
        """Return the rows that a mask or numbers choose."""
        return Rows(*(column[which] for column in self.columns()))

    def columns(self) -> tuple[NDArray[np.int64], ...]:
        """Return the columns in the order of the fields."""
        return self.entry, self.extension, self.address, self.size, self.mtime

    def plus(self, other: Rows) -> Rows:
        """Return these rows and others, each after those of the same entry."""
        together = Rows(*(np.concatenate(pair) for pair in zip(self.columns(), other.columns(), strict=True)))
        return together.take(np.argsort(together.entry, kind="stable"))


def rows_of(lines: Sequence[tuple[int, int, int, int, int]]) -> Rows:
    """Return members, given as rows in the order of the fields, as columns."""
    table = np.array(lines, dtype=np.int64).reshape(-1, 5)
    return Rows(*(np.ascontiguousarray(table[:, column]) for column in range(5)))


@dataclass(slots=True)
class Values:
    """The values of label files that a record holds, each once."""

    texts: list[bytes] = field(default_factory=list)
    numbers: dict[bytes, int] = field(default_factory=dict)

    def number(self, text: bytes) -> int:
        """Return the number of a value, which is added if it is new."""
        number = self.numbers.get(text)
        if number is None:
            number = self.numbers[text] = len(self.texts)
            self.texts.append(text)
        return number


@dataclass(frozen=True, slots=True)
class Ingredients:
    """The ingredients of a record in a view: the shard with its number and record, and companions.

    `read` returns the bytes of a member, by the path of its shard and its number there, or raises ShardError.
    """

    shard: Shard
    number: int
    record: Record
    joined: Sequence[JoinedSet]
    labels: Sequence[OpenLabels]
    keys: KeyList | None
    class_names: dict[str, str] | None
    read: Callable[[bytes, int], bytes]


class Draft:
    """The record of a shard in the making.

    `paths`, `strays` and `classes` have an element for each entry, `rows` one for each member. Steps change them
    in place, and keep `places`, `values`, `fields` (address of the JSON), `used` (how samples use tables)
    and `if_shown` (problems of members by their address, if these are shown) for the record.
    """

    def __init__(self, options: Composition, source: Ingredients) -> None:
        self.options, self.source, self.path = options, source, source.shard.path
        record = self.record = source.record
        self.paths = record.paths()
        flags = np.array(record.entry_flags, np.uint8)
        self.strays = (flags & STRAY) != 0
        starts = np.asarray(record.entry_member).astype(np.int64)
        counts = starts[1:] - starts[:-1]
        # A shard with strays only has no extensions, and the extension of a stray is empty.
        self.extensions = [record.extension_name[number] for number in range(len(record.extension_name))] or [b""]
        self.numbers = {extension: number for number, extension in enumerate(self.extensions)}
        members = np.arange(record.members, dtype=np.int64)
        self.rows = Rows(
            np.repeat(np.arange(record.entries, dtype=np.int64), counts),
            record.array("member.ext").astype(np.int64),
            members,
            record.sizes(range(record.members)).astype(np.int64),
            record.mtimes_ns(range(record.members)),
        )
        self.links: dict[int, bytes] = {}
        self._resolve_links(flags)
        self.places: list[dict[str, Any]] = [self.shard_place(self.path, record)]
        self.shard_places: dict[bytes, int] = {}
        self.values = Values()
        self.fields: list[int] = []
        self.used: dict[str, NDArray[np.int64]] = {}
        self.if_shown: dict[int, Problem] = {}
        self.classes: list[bytes | None] = [None] * len(self.paths)

    def _resolve_links(self, flags: NDArray[np.uint8]) -> None:
        """Turn each hard link into a file; leave out links that dangle."""
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

    def same(self) -> NDArray[np.int64]:
        """Return for each extension the number of the first equal one, with --ignore-case in any letter case."""
        first: dict[bytes, int] = {}
        fold = lower_case if self.options.ignore_case else bytes
        return np.array(
            [first.setdefault(fold(extension), at) for at, extension in enumerate(self.extensions)], np.int64
        )

    def codes(self, rows: Rows) -> NDArray[np.int64]:
        """Return for each member a number that stands for its entry and extension."""
        return rows.entry << 32 | self.same()[rows.extension]

    def samples(self) -> NDArray[np.int64]:
        """Return the entries that are samples, not strays."""
        return np.flatnonzero(~self.strays)

    def number_of(self, extension: bytes) -> int:
        """Return the number of an extension, which is added if it is new."""
        number = self.numbers.get(extension)
        if number is None:
            number = self.numbers[extension] = len(self.extensions)
            self.extensions.append(extension)
        return number

    def columns(self) -> list[bytes]:
        """Return the extensions that members have now."""
        return [text for number in np.unique(self.rows.extension).tolist() if (text := self.extensions[number])]

    def columns_there(self) -> str:
        """Return a text that names the columns of the shard, for a message about one that it lacks."""
        there = self.columns()
        names = several([repr(text_of(extension)) for extension in there], COLUMNS_NAMED)
        return f"the shard has the columns {names}" if there else "the shard has no columns"

    def matching(self, extension: bytes) -> list[int]:
        """Return the numbers of the extensions that match this one; with --ignore-case letter case is ignored."""
        folded = lower_case(extension)
        return [
            number
            for number, text in enumerate(self.extensions)
            if text == extension or (self.options.ignore_case and lower_case(text) == folded)
        ]

    def rename(self, renamed: dict[int, bytes]) -> None:
        """Show the extensions with these numbers under other names."""
        numbers = np.arange(len(self.extensions))
        for number, extension in renamed.items():
            numbers[number] = self.number_of(extension)
        self.rows.extension = numbers[self.rows.extension]

    def keep(self, is_kept: NDArray[np.bool_]) -> None:
        """Keep only these entries, with their members."""
        if is_kept.all():
            return
        self.rows = self.rows.take(is_kept[self.rows.entry])
        self.rows.entry = (np.cumsum(is_kept) - 1)[self.rows.entry]
        self.paths = [path for path, keep in zip(self.paths, is_kept.tolist(), strict=True) if keep]
        self.classes = [label for label, keep in zip(self.classes, is_kept.tolist(), strict=True) if keep]
        self.strays = self.strays[is_kept]

    def judged(self, policy: str, bad: NDArray[np.int64], what: str, way_out: str) -> NDArray[np.bool_]:
        """Return a mask of the entries that stay when `bad` ones are treated by a policy. Raises ViewError.

        The policy is that of `--missing` or `--duplicates`.
        """
        is_kept = np.ones(len(self.paths), bool)
        if len(bad) and policy == ERROR:
            key = text_of(self.paths[bad[0]])
            sample = f"{text_of(self.path)}: sample {key!r}"
            raise ViewError(f"{sample} {what}{and_others(len(bad))}; {way_out}")
        if policy == SKIP:
            is_kept[bad] = False
        return is_kept

    def place(self, kind: str, path: bytes, fingerprint: Fingerprint | tuple[()]) -> int:
        """Add a place of bytes, with the fingerprint of its file if it has one; return its number."""
        self.places.append({"kind": kind, "path": text_of(path), "fingerprint": fingerprint})
        return len(self.places) - 1

    @staticmethod
    def shard_place(path: bytes, record: Record) -> dict[str, Any]:
        """Return the place of a shard, for a derived record."""
        return {"kind": SHARD, "path": text_of(path), "fingerprint": record.fingerprint}

    def read(self, address: int) -> bytes:
        """Return the bytes of the member at `address`. Raises ShardErrors."""
        place, number = self.places[address >> SHIFT], address & (1 << SHIFT) - 1
        if place["kind"] == VALUES:
            return self.values.texts[number]
        if place["kind"] == FIELD:
            document = json_fields.parse(self.read(self.fields[number]))
            return json_fields.content_at(document, place["field"]) or b""
        return self.source.read(place["path"].encode("utf-8", "surrogateescape"), number)
