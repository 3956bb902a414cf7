"""Checks a record that others have made: its sections fit together, and nothing in it leads outside.

A checksum finds damage, not intent: the writer of a portable index can make a right checksum for any bytes. No
method of a record that passes here fails, loops or takes more memory than the record has bytes. Whether it is true
of its shard is for `index/portable.py` to check.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdsfs.errors import MALFORMED
from wdsfs.index.record import BY_EXTENSION, BY_NAME, FILES, STRAY, Record
from wdsfs.inodes import FOLDER, MEMBER, SAMPLE, index_of, kind_of
from wdsfs.tar.headers import BLOCK, DEPTH_MAX

_PLACE_MAX = 1 << 62  # bytes: of an offset, and of what is added to it
_BOOLEANS = ("all_sampled", "all_listed", "has_links")


class UnsoundRecord(ValueError):
    """A record that cannot be used; the text says why."""


def opened(buffer: Any) -> Record:
    """Return a record of another user, in place, after all checks. Raises UnsoundRecord."""
    try:
        record = Record(buffer)
        _check_directory(record)
        _check_folders(record)
        _check_entries(record)
        _check_members(record)
        _check_links(record)
        _check_sparse(record)
        _check_aliases(record)
    except UnsoundRecord:
        raise
    except (*MALFORMED, OverflowError) as error:
        raise UnsoundRecord(f"it is not a record ({error})") from None
    return record


def _require(holds: object, what: str) -> None:
    if not holds:
        raise UnsoundRecord(f"its {what} cannot be right")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 40


def _check_directory(record: Record) -> None:
    counts = (record.folders, record.entries, record.members, record.samples, record.end_marks, record.apart)
    _require(all(map(_is_count, (*counts, record.problem_count, record.unshown_count))), "counts")
    _require(record.folders > 0, "folders")
    _require(record.view is None, "kind")
    _require(record.compression is None or type(record.compression) is str, "compression")
    _require(all(type(getattr(record, name)) is bool for name in _BOOLEANS), "directory")
    ends = record.ends
    _require(type(ends) is list and len(ends) == 2 and all(type(item) is int for item in ends), "ends")
    _require(0 <= ends[0] < _PLACE_MAX and 0 <= ends[1] < 1 << 32, "ends")
    for problems in (record.problems, record.unshown):
        types = [tuple(map(type, item)) for item in problems]
        _require(all(item == (int, str, str) for item in types), "problems")
    for count, listed in ((record.problem_count, record.problems), (record.unshown_count, record.unshown)):
        _require(len(listed) <= count and bool(listed) == bool(count), "problems")


class _Names(NamedTuple):
    number: int
    text: NDArray[Any]


def _column(record: Record, name: str, count: int | None, codes: str) -> NDArray[Any]:
    """Return a section of numbers, after a check of its count and type."""
    view = record.column[name]
    _require(view.format in codes and count in (None, len(view)), name)
    return np.asarray(view)


def _narrow(record: Record, name: str, count: int) -> NDArray[np.uint64]:
    return _column(record, name, count, "BHIQ").astype(np.uint64)


def _starts(column: NDArray[Any], last: int, name: str) -> NDArray[np.int64]:
    """Return a section that says where the parts of another one begin, and where the last ends."""
    starts = column.astype(np.uint64)
    _require(len(starts) and starts[0] == 0 and starts[-1] == last and (starts[1:] >= starts[:-1]).all(), name)
    return starts.astype(np.int64)


def _names(record: Record, name: str, count: int | None) -> _Names:
    text = _column(record, name, None, "B")
    starts = _column(record, name + ".start", None if count is None else count + 1, "BHIQ")
    _starts(starts, len(text), name)
    return _Names(len(starts) - 1, text)


def _check_plain_names(names: _Names, what: str) -> None:
    _require(not (names.text == ord("/")).any(), what)


def _check_sums(record: Record, prefix: str, count: int) -> None:
    """Check that checksums are sorted, and that rows are a permutation."""
    sums = _column(record, prefix + ".hash", count, "I")
    _require((sums[1:] >= sums[:-1]).all(), prefix + ".hash")
    order = _column(record, prefix + ".order", count, "I")
    _require((np.sort(order) == np.arange(count)).all(), prefix + ".order")


def _check_folders(record: Record) -> None:
    count = record.folders
    parents = _column(record, "folder.parent", count, "I").astype(np.int64)
    _require(parents[0] == 0 and (parents[1:] < np.arange(1, count)).all(), "folder.parent")
    children = _column(record, "folder.child", count + 1, "I").astype(np.int64)
    _require(children[0] == 1, "folder.child")
    _starts(children - 1, count - 1, "folder.child")
    _require((np.repeat(np.arange(count), np.diff(children)) == parents[1:]).all(), "folder.child")
    above = np.arange(count)
    for _ in range(DEPTH_MAX):  # paths, which are made for each folder, would grow with the square of the depth
        if above.any():
            above = parents[above]
    _require(not above.any(), "folder.parent")
    _starts(_column(record, "folder.entry", count + 1, "I"), record.entries, "folder.entry")
    _column(record, "folder.prefix", count, "I")
    _column(record, "folder.flags", count, "B")
    _check_plain_names(_names(record, "folder.name", count), "folder.name")
    _check_sums(record, "folder", count)
    if "folder.mtime" in record.column:
        _column(record, "folder.mtime", count, "q")


def _check_entries(record: Record) -> None:
    count = record.entries
    _check_plain_names(_names(record, "entry.name", count), "entry.name")
    flags = _column(record, "entry.flags", count, "B")
    stray = flags & STRAY != 0
    _require(int((~stray).sum()) == record.samples, "entry.flags")
    _require(not (record.all_listed and flags.any()), "entry.flags")
    _check_sums(record, "entry", count)
    starts = _starts(_column(record, "entry.member", count + 1, "I"), record.members, "entry.member")
    sizes = np.diff(starts)
    _require((sizes >= 1).all() and (sizes[stray] == 1).all(), "entry.member")


def _check_members(record: Record) -> None:
    count = record.members
    heads, bodies, sizes = (_narrow(record, f"member.{name}", count) for name in ("head", "body", "size"))
    limit = np.uint64(_PLACE_MAX // BLOCK // 4)
    _require((heads < limit).all() and (bodies < limit).all(), "member.head")
    _require((sizes < np.uint64(_PLACE_MAX)).all(), "member.size")
    times = _column(record, "member.mtime", None, "Iq")
    one_for_all = len(times) == 1 and times.dtype.itemsize == 8
    _require(len(times) == count or one_for_all, "member.mtime")
    extensions = _names(record, "ext.name", None)
    _check_plain_names(extensions, "ext.name")
    numbers = _narrow(record, "member.ext", count)
    _require((numbers < np.uint64(max(extensions.number, 1))).all(), "member.ext")
    _require(extensions.number or not record.samples, "ext.name")


def _ascending(record: Record, name: str) -> NDArray[Any]:
    """Return the members that a section is about, in order."""
    members = _column(record, name, None, "I")
    _require((members[1:] > members[:-1]).all() and (members < record.members).all(), name)
    return members


def _check_links(record: Record) -> None:
    if "symlink.member" in record.column:
        _names(record, "symlink.target", len(_ascending(record, "symlink.member")))
    if "link.member" in record.column:
        count = len(_ascending(record, "link.member"))
        _require((_column(record, "link.target", count, "I") < record.members).all(), "link.target")
    if "linked.member" in record.column:
        _column(record, "linked.count", len(_ascending(record, "linked.member")), "I")


def _check_sparse(record: Record) -> None:
    if "sparse.member" not in record.column:
        return
    members = _ascending(record, "sparse.member")
    offsets = _column(record, "sparse.offset", None, "q")
    sizes, places = (_column(record, f"sparse.{name}", len(offsets), "q") for name in ("size", "place"))
    starts = _column(record, "sparse.start", len(members) + 1, "I")
    bounds = _starts(starts, len(offsets), "sparse.start")
    for column in (offsets, sizes, places):
        _require((column >= 0).all() and (column < _PLACE_MAX).all(), "sparse.offset")
    ends, following = offsets + sizes, places + sizes
    for member, first, last in zip(members.tolist(), bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        if last > first:
            fit = (offsets[first + 1 : last] >= ends[first : last - 1]).all()
            _require(fit and ends[last - 1] <= record.extent(member)[1], "sparse.offset")
            one_after_the_other = (places[first + 1 : last] == following[first : last - 1]).all()
            _require(places[first] == 0 and one_after_the_other, "sparse.place")


def _check_aliases(record: Record) -> None:
    limits = {FOLDER: record.folders, SAMPLE: record.entries, MEMBER: record.members}
    for domain in (BY_EXTENSION, BY_NAME, FILES):
        prefix = f"alias{domain}"
        if prefix + ".child" not in record.column:
            continue
        children = _column(record, prefix + ".child", None, "I")
        _require((children[1:] > children[:-1]).all(), prefix + ".child")
        parents = _column(record, prefix + ".parent", len(children), "I")
        for number in (*children.tolist(), *parents.tolist()):
            _require(index_of(number) < limits.get(kind_of(number), 0), prefix)
        _check_plain_names(_names(record, prefix + ".name", len(children)), prefix + ".name")
        _check_sums(record, prefix, len(children))
