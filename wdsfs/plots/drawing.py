"""Shapes of a plot, and the same as SVG: for a page, whose colours it takes, or as a document of its own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

FONT_SIZE = 12  # pixels, as all measures
LETTER = 6.6  # about the width of a letter
# Roles of shapes, which colours are chosen by.
INK, BAR, SOFT, GRID, PAPER = "ink", "bar", "soft", "grid", "paper"

# A page may restyle these by the classes plot-ink, plot-bar ... of its style sheet.
_PAGE = {
    INK: 'fill="currentColor"',
    BAR: 'fill="var(--plot-bar, currentColor)"',
    SOFT: 'fill="var(--plot-bar, currentColor)" fill-opacity="0.4"',
    GRID: 'fill="currentColor" fill-opacity="0.2"',
    PAPER: 'fill="none"',
}
# Those of a document are plain attributes, which every program that reads SVG knows.
COLOURS = {INK: "#1f2328", BAR: "#2f6fb2", SOFT: "#acc5e0", GRID: "#d2d3d4", PAPER: "#ffffff"}
_DARK = {INK: "#e6e8eb", BAR: "#6cb0f5", SOFT: "#38567a", GRID: "#3b3f45", PAPER: "#16191d"}


_FORBIDDEN = re.compile("[^\t\n -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Box(NamedTuple):
    """A filled rectangle; `hint` is shown when it is pointed at."""

    x: float
    y: float
    width: float
    height: float
    role: str = BAR
    hint: str = ""


class Text(NamedTuple):
    """A line of text; `anchor` is the part of it that lies at `x`: start, middle or end. `y` is its base line."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    bold: bool = False


Shape = Box | Text


class Figure(NamedTuple):
    """Shapes in a rectangle. `label` says in words what can be seen."""

    width: int
    height: int
    shapes: Sequence[Shape]
    label: str


def stacked(figures: Sequence[Figure], gap: int = 24) -> Figure:
    """One below the other."""
    shapes: list[Shape] = []
    top = gap
    for figure in figures:
        shapes += (shape._replace(x=shape.x + gap, y=shape.y + top) for shape in figure.shapes)
        top += figure.height + gap
    width = max(figure.width for figure in figures) + 2 * gap
    return Figure(width, top, shapes, " ".join(figure.label for figure in figures))


def svg_of(figure: Figure) -> str:
    """An `<svg>` element for a page: no script, no style, no link; colours are those of the page."""
    return "\n".join(_lines(figure, _PAGE))


def document_of(figure: Figure) -> str:
    """An SVG document of its own, light or dark as the reader's system is."""
    dark = " ".join(f".plot-{role} {{ fill: {colour} }}" for role, colour in _DARK.items())
    style = f"<style>@media (prefers-color-scheme: dark) {{ {dark} }}</style>"
    paper = Box(0, 0, figure.width, figure.height, PAPER)
    fills = {role: f'fill="{colour}"' for role, colour in COLOURS.items()}
    head, *rest = _lines(figure._replace(shapes=[paper, *figure.shapes]), fills)
    return "\n".join(['<?xml version="1.0" encoding="UTF-8"?>', head, style, *rest, ""])


def _lines(figure: Figure, fills: Mapping[str, str]) -> Iterable[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {figure.width} {figure.height}" '
        f'width="{figure.width}" height="{figure.height}" role="img" aria-label={quoteattr(clean(figure.label))} '
        f'font-family="system-ui, sans-serif" font-size="{FONT_SIZE}">'
    )
    for shape in figure.shapes:
        yield _box(shape, fills) if isinstance(shape, Box) else _text(shape, fills[INK])
    yield "</svg>"


def _box(box: Box, fills: Mapping[str, str]) -> str:
    place = f'x="{box.x:.1f}" y="{box.y:.1f}" width="{max(box.width, 0):.1f}" height="{max(box.height, 0):.1f}"'
    head = f'<rect class="plot-{box.role}" {place} {fills[box.role]}'
    return f"{head}><title>{escape(clean(box.hint))}</title></rect>" if box.hint else f"{head}/>"


def _text(text: Text, fill: str) -> str:
    weight = ' font-weight="bold"' if text.bold else ""
    place = f'x="{text.x:.1f}" y="{text.y:.1f}" text-anchor="{text.anchor}"'
    return f'<text class="plot-ink" {place}{weight} {fill}>{escape(clean(text.text))}</text>'


def clean(text: str) -> str:
    """Text without the characters that XML forbids."""
    return _FORBIDDEN.sub("\ufffd", text)


def cut(text: str, letters: int) -> str:
    """A text of at most so many letters, the middle left out."""
    if len(text) <= letters:
        return text
    half = (letters - 1) // 2
    return f"{text[: letters - 1 - half]}…{text[-half:]}" if half else text[:letters]
