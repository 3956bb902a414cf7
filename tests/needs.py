"""Marks of tests by what they need from the machine: `fuse`, `root` and `tools`.

`pytest -m "not fuse"` is for a machine without /dev/fuse, `-m tools` for tests with programs of others. A test
gets `fuse` and `tools` by the helpers that it calls, itself or through fixtures and functions of `tests`. `root`
is set by hand: such a test is skipped for other users.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import pytest

HELPERS = {"need_fuse": "fuse", "mounted": "fuse", "need_tool": "tools", "need_server": "tools"}


def mark(items: list[pytest.Item]) -> None:
    """Give all tests their marks, and skip those for root where this user is another one."""
    known: dict[Any, set[str]] = {}
    for item in items:
        if isinstance(item, pytest.Function):
            for name in _marks(item, known):
                item.add_marker(name)
        if os.geteuid() != 0 and item.get_closest_marker("root"):
            item.add_marker(pytest.mark.skip(reason="takes root"))


def _marks(item: pytest.Function, known: dict[Any, set[str]]) -> set[str]:
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    functions = [item.function, *(definitions[-1].func for definitions in fixtures)]
    return set[str]().union(*(_marks_of(function, known) for function in functions))


def _marks_of(function: Callable[..., object], known: dict[Any, set[str]]) -> set[str]:
    """Return the marks for a function: those of the helpers that it names, and of what it calls in `tests`."""
    function = getattr(function, "__wrapped__", function)
    code, scope = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    if code is None or not str(scope.get("__name__")).startswith("tests"):
        return set()
    if function in known:
        return known[function]
    marks = known[function] = set()
    for name in _names(code):
        if name in HELPERS:
            marks.add(HELPERS[name])
        elif callable(scope.get(name)) and not isinstance(scope[name], type):
            marks |= _marks_of(scope[name], known)
    return marks


def _names(code: CodeType) -> Iterator[str]:
    """Yield the global names and the attributes that a function uses, also in the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
