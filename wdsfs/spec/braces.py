"""Brace expressions: `train-{000000..000099}.tar`, as the webdataset library and a shell have them.

The braceexpand library does the work, which is what webdataset and Energon use. It expands a range into memory
before it yields the first word, so the number of words has to be known first: the functions below follow its
grammar to count them, and a test compares the two.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import accumulate

from braceexpand import braceexpand

from wdsfs.errors import SpecError

MAX_DEPTH = 32  # braces in braces: each level is read once more
MAX_WORDS = 10_000_000  # more is a typing error, and the strings alone would take gigabytes

_BRACE = re.compile(r"[{}]")
# As braceexpand has them: "$" also matches before a newline at the end.
_INT_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?$")
_CHAR_RANGE = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.-?(\d+))?$")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"  # the order of braceexpand's ranges


def are_in(text: str) -> bool:
    """Return True if the text has a brace."""
    return _BRACE.search(text) is not None


def expand(text: str) -> Iterator[str]:
    """Return the words of a brace expression; for a text without braces the text itself.

    Raises SpecError when the braces are unbalanced or nested too deeply, or name more than MAX_WORDS.
    """
    # Without braces a backslash is just a character of the name.
    if not are_in(text):
        return iter((text,))
    if _depth(text) > MAX_DEPTH:
        raise SpecError(f"the braces of {text[:60]!r}... are nested too deeply: the limit is {MAX_DEPTH} levels")
    try:
        if _expansions(text) > MAX_WORDS:
            raise SpecError(f"{text[:200]!r} names more than {MAX_WORDS:,} shards: check the range")
        words: Iterator[str] = braceexpand(text)
        return words
    except ValueError:  # braceexpand.UnbalancedBracesError is one, but is not in its type hints
        raise SpecError(
            rf"unbalanced braces in {text[:200]!r}: close them, or write \{{ and \}} for braces in the name"
        ) from None


def _depth(text: str) -> int:
    """Return how many braces are open at most."""
    steps = ((character == "{") - (character == "}") for _, character in _unescaped(text))
    return max(accumulate(steps), default=0)


def _expansions(text: str) -> int:
    """Return the number of words that `text` expands to. Raises ValueError for unbalanced braces."""
    return math.prod(_expression_count(expression) for expression in _expressions(text))


def _expressions(text: str) -> Iterator[str]:
    """Yield the text inside each of the outermost braces."""
    depth = start = 0
    for position, character in _unescaped(text):
        if character == "{":
            start = position + 1 if depth == 0 else start
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                yield text[start:position]
    if depth:
        raise ValueError("unbalanced braces")


def _expression_count(expression: str) -> int:
    if match := _INT_RANGE.match(expression):
        return _range_count(_int(match[1]), _int(match[2]), _int(match[3] or "1"))
    if match := _CHAR_RANGE.match(expression):
        return _range_count(_LETTERS.index(match[1]), _LETTERS.index(match[2]), _int(match[3] or "1"))
    return sum(_expansions(item) for item in _items(expression))


def _range_count(start: int, end: int, step: int) -> int:
    return abs(end - start) // (step or 1) + 1


def _int(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:  # Python reads at most 4,300 digits
        raise SpecError(f"the number {digits[:20]}... of a range is too large") from None


def _items(expression: str) -> Iterator[str]:
    """Split `a,b{c,d}` into `a`, `b{c,d}`; an expression without a comma is a single item."""
    depth = start = 0
    for position, character in _unescaped(expression):
        depth += (character == "{") - (character == "}")
        if character == "," and depth == 0:
            yield expression[start:position]
            start = position + 1
    yield expression[start:]


def _unescaped(text: str) -> Iterator[tuple[int, str]]:
    position = 0
    while position < len(text):
        if text[position] == "\\":
            position += 1
        else:
            yield position, text[position]
        position += 1
