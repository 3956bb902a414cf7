"""Fields of JSON: parses paths to them, finds their values, and makes the bytes of a file of a value.

Pure functions, used for `--field`, `--class-from` and label files.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from wdsfs.errors import CorruptShard, UsageError

JSON_MAX = 8 << 20  # bytes of a document; parsed it takes up to 25 times as much memory
STEPS_MAX = 64  # of a path
ABSENT = object()  # instead of a value: the document has none there

# A name goes up to the next dot or bracket; any other key stands in brackets and quotes, as in JSON.
_STEP = re.compile(r"""(?:^|\.)([^.\[\]"]+)|\[(-?\d{1,9})\]|\[("(?:[^"\\]|\\.)*")\]""")


@lru_cache(maxsize=64)
def parse_path(text: str) -> tuple[str | int, ...]:
    """Return the steps of a path such as `a.b[0]` or `["a.b"].c`: keys and indexes. Raises UsageError."""
    steps: list[str | int] = []
    at = 0
    while at < len(text) and len(steps) < STEPS_MAX:
        step = _STEP.match(text, at)
        if step is None:
            break
        name, index, quoted = step.groups()
        try:
            steps.append(int(index) if index is not None else name if quoted is None else json.loads(quoted))
        except ValueError:
            break
        at = step.end()
    if at < len(text) or not steps:
        raise UsageError(
            f'{text!r} is not a path to a field of JSON: write label, meta.label, texts[0] or ["a.b"]'
        )
    return tuple(steps)


def parse(data: bytes) -> Any:
    """Return the document in a file. Raises CorruptShard if it is not JSON, or larger than JSON_MAX."""
    refuse_size(len(data))
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        why = str(error).partition("; use sys")[0]  # of a whole number of more than 4,300 digits
        raise CorruptShard(f"is not JSON ({why})") from None


def refuse_size(size: int) -> None:
    """Raise CorruptShard for a document with too many bytes to be parsed."""
    if size > JSON_MAX:
        raise CorruptShard(f"has {size:,} bytes, and JSON is parsed up to {JSON_MAX >> 20} MiB")


def find(document: Any, steps: tuple[str | int, ...]) -> Any:
    """Return the value at a path; ABSENT if there is none."""
    for step in steps:
        if isinstance(step, str):
            document = document.get(step, ABSENT) if isinstance(document, dict) else ABSENT
        elif isinstance(document, list) and -len(document) <= step < len(document):
            document = document[step]
        else:
            return ABSENT
        if document is ABSENT:
            break
    return document


def content_of(value: Any) -> bytes | None:
    """Return the content of a file of this value; None for no file. Raises CorruptShard if it cannot be text.

    Semantics decision: the same for fields of members and of label files. Texts are written without quotes and
    line end, numbers as Python writes them, lists, objects, `true` and `false` as JSON; `null` is no file. An
    image as Hugging Face's library has it in tables, {"bytes": ..., "path": ...}, is its bytes.
    """
    if isinstance(value, dict) and value.keys() == {"bytes", "path"} and isinstance(value["bytes"], bytes):
        value = value["bytes"]
    if value is None or value is ABSENT:
        return None
    if isinstance(value, bytes):
        return value
    try:
        if isinstance(value, str):
            text = value
        elif isinstance(value, float):
            text = repr(value)
        else:
            text = json.dumps(value, ensure_ascii=False, default=_text_in_json)
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise CorruptShard("holds half of a surrogate pair, which is not text") from None
    except RecursionError:
        raise CorruptShard("is nested too deeply") from None


def _text_in_json(value: Any) -> str:
    """Return the text of a value of a table that JSON does not have: a time, a decimal. Raises CorruptShard."""
    if isinstance(value, bytes):
        raise CorruptShard("holds bytes in a list or an object, which JSON cannot have")
    return str(value)


def content_at(document: Any, path: str) -> bytes | None:
    """Return the content of the file of the field at a path; None for no file. Raises CorruptShard."""
    try:
        return content_of(find(document, parse_path(path)))
    except CorruptShard as error:
        raise CorruptShard(f"the field {path} {error}") from None
