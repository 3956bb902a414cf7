"""The types of a record's sections, used in place: numbers, lists of byte strings, alias tables.

Nothing is decoded before it is used. `record_builder.py` packs the sections.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any, Generic, Literal, TypeVar

T = TypeVar("T")


class Columns(Mapping[str, memoryview]):
    """The sections of a record by name; a view of each is made when it is needed."""

    __slots__ = ("_layout", "_places", "_view")

    def __init__(self, view: memoryview, sections: list[tuple[str, str, int, int]]) -> None:
        names, kinds, offsets, sizes = zip(*sections, strict=True)
        self._view, self._layout = view, _layout(names, kinds)
        self._places = array("Q", [*offsets, *sizes])

    def __getitem__(self, name: str) -> memoryview:
        number, code = self._layout[name]
        offset, size = self._places[number], self._places[number + len(self._layout)]
        return self._view[offset : offset + size].cast(code)

    def __contains__(self, name: object) -> bool:
        return name in self._layout

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout)

    def __len__(self) -> int:
        return len(self._layout)


@lru_cache(64)
def _layout(names: tuple[str, ...], kinds: tuple[str, ...]) -> dict[str, tuple[int, _Code]]:
    """Return the number and the type code of each section, one table for all records that have the same."""
    return {name: (number, _CODES[kind]) for number, (name, kind) in enumerate(zip(names, kinds, strict=True))}


_Code = Literal["B", "H", "I", "Q", "q"]
_CODES: dict[str, _Code] = {"u1": "B", "<u2": "H", "<u4": "I", "<u8": "Q", "<i8": "q", "B": "B"}


class MadeOfColumns(Generic[T]):
    """An attribute of a record that is made of its columns at the first use, and noted in `made` there.

    Then the record itself has it, without a call, until it is deleted.
    """

    def __init__(self, make: Callable[[Columns], T]) -> None:
        self._make = make

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, record: Any, owner: type) -> T:
        value = record.__dict__[self._name] = self._make(record.column)
        record.made.append(self._name)
        return value


class PackedNames:
    """A packed list of byte strings."""

    __slots__ = ("starts", "text")

    def __init__(self, starts: memoryview, text: memoryview) -> None:
        self.starts, self.text = starts, text

    def __getitem__(self, number: int) -> bytes:
        return bytes(self.text[self.starts[number] : self.starts[number + 1]])

    def __len__(self) -> int:
        return len(self.starts) - 1

    def of(self, numbers: range) -> list[bytes]:
        """Return the strings with these neighbouring numbers; much faster than one by one."""
        if not numbers:
            return []
        starts = self.starts[numbers.start : numbers.stop + 1].tolist()
        base, text = starts[0], bytes(self.text[starts[0] : starts[-1]])
        return [text[start - base : end - base] for start, end in pairwise(starts)]


class AliasTable:
    """The alias table of one domain."""

    __slots__ = ("child", "hash", "name", "order", "parent")

    def __init__(self, column: Columns, prefix: str) -> None:
        self.child, self.parent = column[prefix + ".child"], column[prefix + ".parent"]
        self.name = PackedNames(column[prefix + ".name.start"], column[prefix + ".name"])
        self.hash, self.order = column[prefix + ".hash"], column[prefix + ".order"]

    def of(self, child: int) -> bytes | None:
        """Return the alias of a child, None if it has none."""
        at = bisect.bisect_left(self.child, child)
        return self.name[at] if at < len(self.child) and self.child[at] == child else None

    def all(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield each child with its parent and its name."""
        yield from zip(self.child, self.parent, self.name.of(range(len(self.name))), strict=True)

    def find(self, crc: int, parent: int, name: bytes) -> int | None:
        """Return the child of a directory with this alias, whose path has the CRC-32 `crc`."""
        rows = rows_with_sum(self.hash, self.order, crc, (parent, name), self._key)
        number = self.order[rows[0]] if rows else None
        if number is None or self.parent[number] != parent or self.name[number] != name:
            return None
        return self.child[number]

    def _key(self, number: int) -> tuple[int, bytes]:
        return self.parent[number], self.name[number]


def rows_with_sum(
    sums: memoryview,
    order: memoryview,
    crc: int,
    key: tuple[int, bytes],
    key_of: Callable[[int], tuple[int, bytes]],
) -> range:
    """Return the places in `order` with this sum, from the first on whose key (parent and name) is `key` or later.

    Nearly always one at most. Places of equal sums, of which a hostile shard has many, are in the order of keys.
    """
    rows = equal_range(sums, crc)
    if len(rows) < 2:
        return rows
    return rows[bisect.bisect_left(rows, key, key=lambda at: key_of(order[at])) :]


def equal_range(column: memoryview, value: int) -> range:
    """Return the places of this value in a sorted column."""
    first = bisect.bisect_left(column, value)
    if first == len(column) or column[first] != value:
        return range(0)
    if first + 1 == len(column) or column[first + 1] != value:  # nearly always
        return range(first, first + 1)
    return range(first, bisect.bisect_right(column, value, first + 2))


def view_of(section: str) -> Callable[[Columns], memoryview]:
    """Return a function that returns this section."""
    return lambda column: column[section]


def names_of(section: str) -> Callable[[Columns], PackedNames]:
    """Return a function that returns this section as a list of byte strings."""
    return lambda column: PackedNames(column[section + ".start"], column[section])
