"""JSON, laid out: every value as it is written, up to the length that a page can take."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from wdsfs.errors import counted
from wdsfs.pages.plain import decoded, error_text, readable, text_preview
from wdsfs.pages.preview import JSON, Detail, Preview

PARSED_MAX = 4 << 20  # bytes; of more only the beginning is shown, as text
DEPTH_MAX = 16  # levels that are shown
ITEMS_MAX = 200  # of a list or an object that are shown
STRING_MAX = 4000  # characters of a text in it
_WRITTEN = 50  # bytes of JSON lines that are read for each character that is shown
LINES_MAX = 1000  # of JSON lines that are looked at


class _Literal(str):
    """A number as it is written: a float could have another value."""

    __slots__ = ()


class _Pairs(list[tuple[str, Any]]):
    """The members of an object, also those whose name comes twice."""


def decode_json(file: BinaryIO, size: int, detail: Detail) -> Preview:
    """A JSON document; one that is too large, or is not JSON, as text."""
    if size > PARSED_MAX:
        data = file.read(detail.characters * 4)
        return text_preview(data, size, detail)._replace(
            kind=JSON, problem=f"More than {PARSED_MAX >> 20} MiB: the beginning is shown as it is written."
        )
    data = file.read(size)
    try:
        value = _parsed(decoded(data, True)[0])
    except (ValueError, RecursionError) as error:
        return text_preview(data, size, detail)._replace(problem=f"It is not shown as JSON: {error_text(error)}.")
    text, is_cut = _laid_out([value], detail.characters, wide=True)
    return Preview(JSON, _summary(value), text=text, is_cut=is_cut)


def decode_lines(file: BinaryIO, size: int, detail: Detail) -> Preview:
    """JSON lines: a document in each line, as far as they fit."""
    data = file.read(min(size, PARSED_MAX, detail.characters * _WRITTEN))
    lines = decoded(data, len(data) >= size)[0].removesuffix("\n").split("\n")  # not U+2028: a text may have it
    if len(data) < size and len(lines) > 1:
        lines.pop()  # perhaps cut
    values = []
    try:
        for line in lines[:LINES_MAX]:
            if line.strip():
                values.append(_parsed(line))
    except (ValueError, RecursionError) as error:
        problem = f"It is not shown as JSON, because of line {len(values) + 1:,}: {error_text(error)}."
        return text_preview(data, size, detail)._replace(problem=problem)
    text, is_cut = _laid_out(values, detail.characters, wide=False)
    is_cut = is_cut or len(data) < size or len(lines) > LINES_MAX
    summary = "the beginning" if len(data) < size else counted(len(lines), "line")
    return Preview(JSON, summary, text=text, is_cut=is_cut)


def _parsed(text: str) -> Any:
    return json.loads(
        text, parse_int=_Literal, parse_float=_Literal, parse_constant=_Literal, object_pairs_hook=_Pairs
    )


def _summary(value: Any) -> str:
    if isinstance(value, _Pairs):
        return f"an object of {counted(len(value), 'field')}"
    return f"a list of {counted(len(value), 'item')}" if isinstance(value, list) else "a value"


def _laid_out(values: list[Any], most: int, wide: bool) -> tuple[str, bool]:
    """The documents as text, and True if something is left out. `wide`: a line for each item."""
    parts: list[str] = []
    length = 0
    writer = _Writer(wide)
    for number, value in enumerate(values):
        for part in writer.pieces(value, 0) if not number else _after("\n", writer.pieces(value, 0)):
            parts.append(part)
            length += len(part)
            if length > most:
                return "".join(parts)[:most], True
    return "".join(parts), writer.has_left_out


def _after(first: str, pieces: Iterator[str]) -> Iterator[str]:
    yield first
    yield from pieces


class _Writer:
    """Writes values piece by piece, so that the reader can stop."""

    def __init__(self, wide: bool) -> None:
        self._wide = wide
        self.has_left_out = False

    def pieces(self, value: Any, depth: int) -> Iterator[str]:
        if isinstance(value, _Literal):
            yield str(value)
        elif isinstance(value, str):
            yield self._string(value)
        elif isinstance(value, _Pairs):
            items = ((f"{self._string(name)}: ", item) for name, item in value)
            yield from self._container("{", "}", items, len(value), depth)
        elif isinstance(value, list):
            yield from self._container("[", "]", (("", item) for item in value), len(value), depth)
        else:
            yield json.dumps(value)

    def _container(
        self, opening: str, closing: str, items: Iterator[tuple[str, Any]], count: int, depth: int
    ) -> Iterator[str]:
        if not count:
            yield opening + closing
            return
        if depth >= DEPTH_MAX:
            self.has_left_out = True
            yield f"{opening} … {count:,} inside {closing}"
            return
        indent = "\n" + "  " * (depth + 1) if self._wide else ""
        yield opening
        for number, (name, item) in enumerate(items):
            if number == ITEMS_MAX:
                self.has_left_out = True
                yield f",{indent or ' '}… {count - number:,} more"
                break
            yield ("" if not number else "," if self._wide else ", ") + indent + name
            yield from self.pieces(item, depth + 1)
        yield ("\n" + "  " * depth if self._wide else "") + closing

    def _string(self, text: str) -> str:
        if len(text) > STRING_MAX:
            self.has_left_out = True
            return (
                json.dumps(readable(text[:STRING_MAX]), ensure_ascii=False) + f" … {len(text) - STRING_MAX:,} more"
            )
        return readable(json.dumps(text, ensure_ascii=False))
