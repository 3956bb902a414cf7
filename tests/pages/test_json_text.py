"""Setting a field of a JSON text: all else stays as it is written."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wdsfs.errors import UsageError
from wdsfs.pages.json_text import set_field

ODD = '{"a": 1.10, "b":1e400 ,"c" : [0.1000000000000000055, -0], "d": "\\ud83d", "d": 2, "n": NaN}\n'


@pytest.mark.parametrize(
    ("text", "field", "value", "expected"),
    [
        (ODD, "c.1", "true", ODD.replace("-0", "true")),
        (ODD, "b", "2.50", ODD.replace("1e400", "2.50")),
        (ODD, "a", " cat ", ODD.replace("1.10", '" cat "')),
        (ODD, "new", "1", ODD.replace("NaN", 'NaN, "new": 1')),
        ('{"a":1,"b":{}}', "b.c", "x", '{"a":1,"b":{"c": "x"}}'),
        ('{"a":1,"b":{}}', "c", "[1, 2]", '{"a":1,"b":{},"c":[1, 2]}'),
        ('{\n\t"a": {\n\t\t"b": 1\n\t}\n}', "a.c", "2", '{\n\t"a": {\n\t\t"b": 1,\n\t\t"c": 2\n\t}\n}'),
        ('{\r\n  "a": 1\r\n}\r\n', "b", "2", '{\r\n  "a": 1,\r\n  "b": 2\r\n}\r\n'),
        (" [1, [2, 3]] ", "1.0", '"ü"', ' [1, ["ü", 3]] '),
        ("{ }", "a", "NaN", '{"a": "NaN"}'),
    ],
)
def test_only_the_field_changes(text: str, field: str, value: str, expected: str) -> None:
    assert set_field(text, field, value) == expected


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (ODD, "d"),  # which of the two?
        (ODD, "a.b"),
        (ODD, "c.2"),
        (ODD, "c.x"),
        (ODD, "c.-1"),
        ("[1]", "1"),
        ("1", "a"),
        ("", "a"),
        ("{", "a"),
        ("[" * 100_000, "0"),
    ],
)
def test_what_cannot_be_set_is_refused(text: str, field: str) -> None:
    with pytest.raises(UsageError):
        set_field(text, field, "1")


_NAMES = st.text(alphabet='ab"\\ü,:{}', min_size=1, max_size=3)
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(_NAMES, _VALUES, max_size=4), _NAMES, _VALUES, st.sampled_from([None, 1, 4]))
def test_what_is_set_is_there(found: dict[str, object], name: str, value: object, indent: int | None) -> None:
    text = json.dumps(found, indent=indent)
    assert json.loads(set_field(text, name, json.dumps(value))) == {**found, name: value}
