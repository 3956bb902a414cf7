"""Checks a record that others have made: it cannot lead outside, run in a circle, or claim more than it has bytes.

A checksum finds damage, not intent: the writer of a portable index can make a right checksum for any bytes. A
record that passes here may still be wrong, as a wrong tar may be. A question to it may then get a wrong answer
about the same shard, or an exception, which a mount answers with EIO. Whether a record is true of its shard is for
`index/portable.py` to check.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdsfs.errors import MALFORMED
from wdsfs.index.record import Record
from wdsfs.tar.headers import BLOCK, DEPTH_MAX

_PLACE_MAX = 1 << 62  # bytes: of an offset, and of a size that is added to it
_BLOCK_MAX = _PLACE_MAX // BLOCK // 4
_NAMES = {b"", b".", b".."}  # no file can have these names


class UnsoundRecord(ValueError):
    """A record that cannot be used; the text says why."""


def checked_record(buffer: Any) -> Record:
    """Return a record of another user, in place, after all checks. Raises UnsoundRecord."""
    try:
        record = Record(buffer)
        _check_directory(record)
        _check_folders(record)
        _check_columns(record)
        _check_names(record)
        _check_sparse(record)
    except UnsoundRecord:
        raise
    except (*MALFORMED, OverflowError) as error:
        raise UnsoundRecord(f"it is not a record ({error})") from None
    return record


def _require(holds: object, what: str) -> None:
    if not holds:
        raise UnsoundRecord(f"its {what} cannot be right")


def _check_directory(record: Record) -> None:
    counts = [record.folders, record.entries, record.members, record.samples, record.end_marks, record.apart]
    numbers = [*counts, record.problem_count, record.unshown_count, *record.ends]
    _require(all(type(number) is int and 0 <= number < _PLACE_MAX for number in numbers), "counts")
    _require(record.folders > 0 and record.samples <= record.entries and len(record.ends) == 2, "counts")
    _require(record.view is None and isinstance(record.compression, str | None), "kind")
    problems = (*record.problems, *record.unshown)
    _require(all(tuple(map(type, problem)) == (int, str, str) for problem in problems), "problems")


def _numbers(record: Record, section: str, count: int, limit: int) -> NDArray[np.int64]:
    """Return a section of `count` numbers, each below `limit`. Raises UnsoundRecord if it is another."""
    numbers = np.asarray(record.column[section])
    inside = not len(numbers) or (int(numbers.min()) >= 0 and int(numbers.max()) < limit)
    _require(len(numbers) == count and inside, section)
    return numbers.astype(np.int64)


def _starts(
    record: Record, section: str, count: int, last: int, *, first: int = 0, step: int = 0
) -> NDArray[np.int64]:
    """Return a section that says where the parts of another one begin, each `step` or more long."""
    starts = _numbers(record, section, count, last + 1)
    _require(starts[0] == first and starts[-1] == last and (np.diff(starts) >= step).all(), section)
    return starts


def _check_folders(record: Record) -> None:
    count = record.folders
    parents = _numbers(record, "folder.parent", count, count)
    children = _starts(record, "folder.child", count + 1, count, first=1)
    _require((np.repeat(np.arange(count), np.diff(children)) == parents[1:]).all(), "folder.child")
    _starts(record, "folder.entry", count + 1, record.entries)
    above = np.arange(count)
    for _ in range(DEPTH_MAX):  # paths, which are made for each folder, would grow with the square of the depth
        above = parents[above] if above.any() else above
    _require(not above.any(), "folder.parent")


def _check_columns(record: Record) -> None:
    """Check the sections with a number for each folder, entry or member."""
    for kind, count, names in (("folder", record.folders, ("prefix",)), ("entry", record.entries, ())):
        for name in ("flags", "hash", *names):
            _numbers(record, f"{kind}.{name}", count, 1 << 32)
        _numbers(record, f"{kind}.order", count, count)
    _starts(record, "entry.member", record.entries + 1, record.members, step=1)
    for section, limit in (("head", _BLOCK_MAX), ("body", _BLOCK_MAX), ("size", _PLACE_MAX)):
        _numbers(record, f"member.{section}", record.members, limit)
    _numbers(record, "member.ext", record.members, max(len(record.extension_name), 1))
    _require(len(record.column["member.mtime"]) in (1, record.members), "member.mtime")


def _check_names(record: Record) -> None:
    names = {"folder.name": record.folders, "entry.name": record.entries, "ext.name": len(record.extension_name)}
    for section, count in names.items():
        _require(ord("/") not in _text(record, section, count), section)
    if "symlink.member" in record.column:
        _text(record, "symlink.target", len(record.column["symlink.member"]))
    for domain, table in enumerate(record.aliases):
        if table is not None:
            count = len(table.child)
            for section, limit in (("parent", 1 << 32), ("hash", 1 << 32), ("order", count)):
                _numbers(record, f"alias{domain}.{section}", count, limit)
            text = _text(record, f"alias{domain}.name", count)
            odd = _NAMES.intersection(table.name.of(range(count)))
            _require(ord("/") not in text and 0 not in text and not odd, "aliases")


def _text(record: Record, section: str, count: int) -> NDArray[np.uint8]:
    """Return the text of a list of this many names."""
    text = np.asarray(record.column[section])
    _require(text.dtype == np.uint8, section)
    _starts(record, section + ".start", count + 1, len(text))
    return text


def _check_sparse(record: Record) -> None:
    """Check that the parts of each member do not overlap, end inside it, and are stored one after the other."""
    if "sparse.member" not in record.column:
        return
    count, parts = len(record.column["sparse.member"]), len(record.column["sparse.offset"])
    members = _numbers(record, "sparse.member", count, record.members)
    owner = np.repeat(members, np.diff(_starts(record, "sparse.start", count + 1, parts)))
    offsets, sizes, places = (
        _numbers(record, f"sparse.{name}", parts, _PLACE_MAX) for name in ("offset", "size", "place")
    )
    following = owner[1:] == owner[:-1]
    apart = offsets[1:] >= offsets[:-1] + sizes[:-1]
    expected = np.where(following, places[:-1] + sizes[:-1], 0)
    _require(
        (apart | ~following).all() and not places[:1].any() and (places[1:] == expected).all(), "sparse.place"
    )
    _require((offsets + sizes <= record.array("member.size")[owner].astype(np.int64)).all(), "sparse.offset")
