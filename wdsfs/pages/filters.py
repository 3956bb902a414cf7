"""Filters of samples as the fields of an address: keys, shards, folders, and conditions on columns."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlencode

from wdsfs.errors import UsageError, several

CONDITIONS_MAX = 30
OPERATORS = {
    "=": "is",
    "!=": "is not",
    "<": "<",
    "<=": "≤",
    ">": ">",
    ">=": "≥",
    "range": "in",
    "~": "contains",
    "in": "is one of",
    "present": "is there",
    "missing": "is missing",
}
_WORDS = {"q": "key", "shard": "shard", "class_": "folder", "has": "with column", "lacks": "without"}
_FIELDS = ("q", "shard", "class", "has", "lacks")


class Condition(NamedTuple):
    """A condition on a column, which is named as in the table of `wdsfs table`; `op` is one of OPERATORS.

    `range` has the value `a..b`: from `a` on, and less than `b`. In the value of `=`, `*` stands for any text.
    """

    column: str
    op: str
    value: str = ""

    @property
    def text(self) -> str:
        """The condition in words."""
        value = self.value.replace("..", " to ") if self.op == "range" else self.value
        return f"{self.column} {OPERATORS[self.op]} {value}".rstrip()


@dataclass(frozen=True, slots=True)
class Filter:
    """The conditions of a search, and the order of its result; empty ones are none. A sample has to meet all.

    `q` is a part of the key. `shard` is a name or pattern of the shell. `class_` is the start of the key, a
    directory. `has` and `lacks` are columns, with commas between them. `order` is a column; empty: the order of
    the set.
    """

    q: bytes = b""
    shard: bytes = b""
    class_: bytes = b""
    has: bytes = b""
    lacks: bytes = b""
    conditions: tuple[Condition, ...] = ()
    order: str = ""
    down: bool = False

    @classmethod
    def of(cls, pairs: Sequence[tuple[str, str]]) -> Filter:
        """Return the filter in the fields of a form. Raises UsageError."""
        first = dict(reversed(pairs))
        q, shard, class_, has, lacks = (
            first.get(name, "").strip().encode("utf-8", "surrogateescape") for name in _FIELDS
        )
        order = first.get("order", "").strip()
        conditions = _conditions_in(pairs, first)
        return cls(q, shard, class_.strip(b"/"), has, lacks, conditions, order, bool(order and first.get("down")))

    def fields(self) -> list[tuple[str, str]]:
        """Return the fields of a form from which `of` makes this filter."""
        raw = zip(_FIELDS, (self.q, self.shard, self.class_, self.has, self.lacks), strict=True)
        fields = [(name, value.decode("utf-8", "surrogateescape")) for name, value in raw if value]
        for condition in self.conditions:
            fields += zip(("column", "is", "value"), condition, strict=True)
        fields += [("order", self.order)] if self.order else []
        return fields + ([("down", "1")] if self.down else [])

    def query(self, **more: object) -> str:
        """Return the filter as the query of an address."""
        fields = [*self.fields(), *((name, str(value)) for name, value in more.items())]
        return urlencode(fields, errors="surrogateescape")

    @property
    def text(self) -> str:
        """The filter in words."""
        return ", ".join(text for text, _ in self.parts())

    def parts(self) -> list[tuple[str, Filter]]:
        """Return the conditions and the order in words, each with the filter without it."""
        parts = []
        for name, word in _WORDS.items():
            value: bytes = getattr(self, name)
            if value:
                text = f"{word} {value.decode('utf-8', 'surrogateescape')}"
                without: dict[str, Any] = {name: b""}
                parts.append((text, dataclasses.replace(self, **without)))
        parts += [(condition.text, self.minus(condition)) for condition in self.conditions]
        if self.order:
            parts.append((f"by {self.order}{', largest first' * self.down}", self.ordered("")))
        return parts

    def plus(self, condition: Condition) -> Filter:
        """Return the filter with one more condition, which replaces others of its column."""
        others = (other for other in self.conditions if other.column != condition.column)
        return dataclasses.replace(self, conditions=(*others, condition))

    def minus(self, condition: Condition) -> Filter:
        """Return the filter without a condition."""
        others = (other for other in self.conditions if other != condition)
        return dataclasses.replace(self, conditions=tuple(others))

    def ordered(self, column: str, *, down: bool = False) -> Filter:
        """Return the filter in another order."""
        return dataclasses.replace(self, order=column, down=down)

    def __bool__(self) -> bool:
        return self != Filter()

    def takes_shard(self, name: bytes) -> bool:
        """Return True if samples of the shard with this name may pass. A name with `[` also stands for itself."""
        return not self.shard or name == self.shard or fnmatch.fnmatchcase(name, self.shard)


def names_in(names: bytes) -> set[str]:
    """Return the columns in a text with commas between them."""
    return {name.strip() for name in names.decode("utf-8", "backslashreplace").split(",")} - {""}


def _conditions_in(pairs: Sequence[tuple[str, str]], first: dict[str, str]) -> tuple[Condition, ...]:
    """Return the conditions in the fields of a form, whose rows are three fields each. Raises UsageError.

    An address may have one column with `field`, a name in its JSON, and no `is`.
    """
    columns, words, values = (
        [text for name, text in pairs if name == field] for field in ("column", "is", "value")
    )
    if any(value.strip() for value in values) and not any(column.strip() for column in columns):
        raise UsageError("To search for a value, type the name of its column, too.")
    field = first.get("field", "").strip()
    rows = []
    for at, column in enumerate(columns):
        op = words[at] if at < len(words) else "="
        value = values[at].strip() if at < len(values) else ""
        if op not in OPERATORS:
            raise UsageError(f"{op}: is no operator; there are {several(list(OPERATORS), len(OPERATORS))}")
        if column.strip() and not (op == "=" and not value and at >= len(words)):
            rows.append(Condition(".".join(filter(None, (column.strip(), field))), op, value))
    if len(rows) > CONDITIONS_MAX:
        raise UsageError(f"the address has {len(rows)} conditions; at most {CONDITIONS_MAX} are allowed")
    return tuple(dict.fromkeys(rows))
