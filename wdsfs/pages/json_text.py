"""Sets one field in a JSON text, and leaves all else as it is written: order, spacing, numbers.

Parsed and written again, a text would lose what its values do not keep: `1.10`, `1e400`, digits beyond a float.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

from wdsfs.errors import UsageError

_decode = json.JSONDecoder().raw_decode
_BLANKS = re.compile("[ \t\n\r]*")


class _Item(NamedTuple):
    """One value of an object or a list: its name, or its number as text, and where it is in the text."""

    name: str
    start: int  # of the name, or of the value
    begin: int  # of the value
    end: int


def set_field(text: str, field: str, value: str) -> str:
    """The JSON `text` with another value of a field; names with dots between them, a number for a list.

    `value` is JSON, which is written as it is, or else taken as a string. A name that an object lacks is added to
    it. Raises UsageError.
    """
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"this is no JSON: {error}") from None
    *way, last = field.split(".")
    at = _after_blanks(text, 0)
    for step in way:
        at = _named(_items(text, at), step, field).begin
    items = list(_items(text, at))
    if text[at] == "{" and not any(item.name == last for item in items):
        return _with_new(text, at, items, last, _written(value))
    found = _named(items, last, field)
    return text[: found.begin] + _written(value) + text[found.end :]


def _written(value: str) -> str:
    """What is written for a value that somebody has typed."""
    try:
        json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)
    return value.strip()


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")  # although Python reads it


def _after_blanks(text: str, at: int) -> int:
    found = _BLANKS.match(text, at)
    return found.end() if found else at


def _named(items: Iterator[_Item] | list[_Item], name: str, field: str) -> _Item:
    """The item of this name. Raises UsageError if there is none, or several."""
    found = [item for item in items if item.name == name]
    if not found:
        raise UsageError(f"there is no place for a field {field!r}")
    if len(found) > 1:
        raise UsageError(f"{name!r} comes {len(found)} times in the same object: edit the text")
    return found[0]


def _items(text: str, at: int) -> Iterator[_Item]:
    """What is in the object or list that begins here; nothing for any other value. REQUIRES: the text is JSON."""
    if text[at] not in "{[":
        return
    is_object, number = text[at] == "{", 0
    at = _after_blanks(text, at + 1)
    while text[at] not in "}]":
        start, name = at, str(number)
        if is_object:
            name, at = _decode(text, at)
            at = _after_blanks(text, _after_blanks(text, at) + 1)  # the colon
        _, end = _decode(text, at)
        yield _Item(name, start, at, end)
        at, number = _after_blanks(text, end), number + 1
        if text[at] == ",":
            at = _after_blanks(text, at + 1)


def _with_new(text: str, at: int, items: list[_Item], name: str, value: str) -> str:
    """The text with one more name in the object at a place, spaced as the others."""
    written = json.dumps(name, ensure_ascii=False)
    if not items:
        return text[: at + 1] + f"{written}: {value}" + text[_after_blanks(text, at + 1) :]
    first, last = items[0], items[-1]
    colon = ": " if text[first.begin - 1].isspace() else ":"
    blanks = text[at + 1 : first.start] or (" " if colon == ": " else "")
    return f"{text[: last.end]},{blanks}{written}{colon}{value}{text[last.end :]}"
