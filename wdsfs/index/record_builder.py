"""Builds the record of a shard: scans its bytes, and packs the members and names into sections. Pure.

The content of a record is described at the head of `record.py`, its bytes in docs/reference/formats.md: sections,
each an array or a list of names, behind a directory. `build` reads the members into a draft (`member_draft.py`),
resolves hard links, puts all into the order of the record and finds its aliases (`record_order.py`), and packs the
sections. `derive` does the same for members that lie in other shards.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdsfs.errors import CorruptShard, StaleMount
from wdsfs.index import member_draft
from wdsfs.index.member_draft import DerivedMembers, Folders, MemberDraft
from wdsfs.index.record import HAS_SAMPLES, MAGIC, RECORD, STRAY, Record, ends_checksum
from wdsfs.index.record_order import Alias, OrderedDraft, find_aliases
from wdsfs.inodes import FOLDER, INDEX_MAX, index_of, kind_of
from wdsfs.names import PLAIN, Reading
from wdsfs.shards import Fingerprint
from wdsfs.source import TarBytes, size_of
from wdsfs.tar import headers, scan
from wdsfs.tar.problems import Problem, Problems


class Sections:
    """The sections of a record, in the order in which they are put."""

    def __init__(self) -> None:
        self._parts: list[tuple[str, str, bytes]] = []

    def put(self, name: str, values: Any, dtype: str) -> None:
        """Add a section of numbers."""
        self._parts.append((name, dtype, np.ascontiguousarray(values, dtype=dtype).tobytes()))

    def put_narrow(self, name: str, values: NDArray[Any]) -> None:
        """Add a section of unsigned numbers, of the smallest type that holds them all."""
        top = int(values.max()) if len(values) else 0
        dtype = "u1" if top < 1 << 8 else "<u2" if top < 1 << 16 else "<u4" if top < 1 << 32 else "<u8"
        self.put(name, values, dtype)

    def put_names(self, name: str, values: Iterable[bytes]) -> None:
        """Add a list of byte strings: where each starts (one more for the end) and all of them joined."""
        values = list(values)
        starts = np.zeros(len(values) + 1, dtype=np.int64)
        np.cumsum(np.fromiter(map(len, values), np.int64, len(values)), out=starts[1:])
        self.put_narrow(name + ".start", starts)
        self._parts.append((name, "B", b"".join(values)))

    def put_hash(
        self, name: str, sums: NDArray[Any], parents: Sequence[int] | NDArray[Any], names: Sequence[bytes]
    ) -> None:
        """Add sorted checksums, and of each the row that it belongs to.

        Rows with equal sums are in the order of their parents and names: anybody can make names of equal sums.
        """
        order = np.argsort(sums, kind="stable")
        edges = np.flatnonzero(np.diff(sums[order], prepend=-1, append=-1))
        for at in np.flatnonzero(np.diff(edges) > 1).tolist():
            rows = slice(edges[at], edges[at + 1])
            order[rows] = sorted(order[rows].tolist(), key=lambda row: (parents[row], names[row]))
        self.put(name + ".hash", sums[order], "<u4")
        self.put(name + ".order", order, "<u4")

    def put_times(self, name: str, mtimes: NDArray[np.int64]) -> None:
        """Add times (ns): equal ones as one value, whole seconds in 4 bytes where they fit, else 8 bytes each."""
        if len(mtimes) and (mtimes == mtimes[0]).all():
            self.put(name, mtimes[:1], "<i8")
            return
        seconds = mtimes // 10**9
        if len(mtimes) and (seconds * 10**9 == mtimes).all() and seconds.min() >= 0 and seconds.max() < 1 << 32:
            self.put(name, seconds, "<u4")
        else:
            self.put(name, mtimes, "<i8")

    def to_bytes(self, directory: dict[str, Any]) -> bytes:
        """Return the whole record.

        Magic, checksum, length of the directory, the directory (JSON), the sections.
        """
        offset, table = 0, []
        parts: list[bytes] = []
        for name, dtype, data in self._parts:
            table.append([name, dtype, offset, len(data)])
            padding = -len(data) % 8
            parts += [data, bytes(padding)]
            offset += len(data) + padding
        return _pack_parts({**directory, "sections": table}, parts)


def restamped(data: bytes | memoryview, fingerprint: Fingerprint, *, moved: bool = False) -> bytes:
    """Return a sound record with another fingerprint; `moved` as in `Record`."""
    end = 20 + int.from_bytes(data[16:20], "little")
    directory = json.loads(bytes(data[20:end]))
    directory.pop("moved", None)
    directory["fingerprint"] = list(fingerprint)
    if moved:
        directory["moved"] = True
    return _pack_parts(directory, [bytes(data[end:])])


def _pack_parts(directory: dict[str, Any], parts: Iterable[bytes]) -> bytes:
    text = json.dumps(directory, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 4) % 8)
    body = b"".join([len(text).to_bytes(4, "little"), text, *parts])
    return MAGIC + zlib.crc32(body).to_bytes(8, "little") + body


def adopted(data: bytes, fingerprint: Fingerprint) -> bytes:
    """Return a record that another machine has made, under the fingerprint that the shard has on this one.

    Raises StaleMount if it is of a shard of another size or time.
    """
    try:
        theirs = Record(data).fingerprint
    except (ValueError, KeyError, TypeError) as error:
        raise StaleMount(f"a worker has sent a malformed record: {error}") from None
    if theirs == fingerprint:
        return data
    if theirs[:2] != fingerprint[:2]:
        raise StaleMount("the shard has changed while a worker read it; try again when it is finished")
    return restamped(data, fingerprint)


def build(
    fd: TarBytes,
    fingerprint: Fingerprint,
    problem: Problem | None = None,
    reading: Reading = PLAIN,
    compression: str | None = None,
) -> bytes:
    """Return the record of the shard whose tar is `fd`, with the options `reading`.

    `fingerprint` is that of the file before it was read, `problem` a problem that is known already, `compression`
    that of the file; all three are stored. A damaged shard gives a record of the intact part, with the damage in
    `Record.problems`. Raises OSError when the file cannot be read, CorruptShard when it has more members than a
    record can number.
    """
    problems = Problems([] if problem is None else [problem])
    draft = MemberDraft(group_by_key=reading.group_by_key, size=size_of(fd))
    marks = reading.marks()
    for chunk in scan.scan(fd, problems, marks=marks):
        damage = draft.add(chunk)
        if damage is not None:
            problems.append(damage)
            break
        _check_count(len(draft.member_entry))
    about: dict[str, Any] = {
        "fingerprint": fingerprint,
        "ends": [draft.last_head, ends_checksum(fd, draft.last_head)],
    }
    if compression is not None:
        about["compression"] = compression
    if marks:
        about["end_marks"] = len(marks)
    if draft.apart:
        about["apart"] = len(draft.apart)
    sections = Sections()
    directory = _pack(draft, problems, sections)
    return sections.to_bytes({**directory, **about})


def derive(source: DerivedMembers, fingerprint: Fingerprint, view: dict[str, Any]) -> bytes:
    """Return a record of `source`, with `view` in its directory.

    Raises CorruptShard when it has more members than a record can number.
    """
    _check_count(len(source.entry))
    draft = MemberDraft()
    draft.take(source)
    sections = Sections()
    directory = _pack(draft, Problems(source.problems), sections)
    directory["problem_count"] += source.problems_more
    for name, values in source.lists.items():
        sections.put_names(name, values)
    for name, numbers in source.numbers.items():
        sections.put(name, numbers, "<i8")
    return sections.to_bytes({**directory, "fingerprint": fingerprint, "ends": [0, 0], "view": view})


def _check_count(members: int) -> None:
    if members > INDEX_MAX:
        raise CorruptShard(f"more than {INDEX_MAX:,} members in one shard; split it")


def _pack(draft: MemberDraft, problems: Problems, sections: Sections) -> dict[str, Any]:
    """Put all sections of a draft; return the entries of the record's directory.

    docs/reference/formats.md lists the sections. Their order counts: `Record.checksum`, which commits keep,
    depends on it.
    """
    columns = draft.columns_joined()
    targets = member_draft.resolve(draft, columns, problems)
    ordered = OrderedDraft(draft)
    _put_folders(sections, ordered, draft.folders)
    _put_entries(sections, ordered)
    links = {int(ordered.new_member[row]): int(ordered.new_member[to]) for row, to in targets.items()}
    _put_links(sections, links)
    _put_members(sections, ordered, columns)
    _put_symlinks(sections, ordered, draft)
    _put_sparse(sections, ordered, draft)
    dangling = {int(ordered.new_member[link.row]) for link in draft.links if link.row not in targets}
    for domain, aliases in find_aliases(ordered, dangling).items():
        if aliases:
            _put_aliases(sections, f"alias{domain}", aliases, ordered)
    return {
        "format": RECORD.version,
        "folders": len(ordered.folder_names),
        "entries": len(ordered.entry_names),
        "members": len(ordered.member_entry),
        "samples": int(((ordered.entry_flags & STRAY) == 0).sum()),
        "all_sampled": bool((ordered.folder_flags[1:] & HAS_SAMPLES).all()),
        "links": bool(draft.links),
        "all_listed": not ordered.entry_flags.any(),
        "problems": problems.listed(),
        "problem_count": len(problems),
        "unshown": draft.unshown,
        "unshown_count": draft.unshown_count,
    }


def _put_folders(sections: Sections, ordered: OrderedDraft, folders: Folders) -> None:
    count = len(ordered.folder_names)
    # Children are side by side, so where those of a folder start follows from how many the folders before it have.
    children = np.bincount(ordered.folder_parents[1:], minlength=count)
    sections.put("folder.parent", ordered.folder_parents, "<u4")
    sections.put("folder.child", 1 + np.concatenate(([0], np.cumsum(children))), "<u4")
    sections.put("folder.entry", np.searchsorted(ordered.entry_folder, np.arange(count + 1)), "<u4")
    sections.put("folder.prefix", ordered.folder_prefixes, "<u4")
    sections.put_names("folder.name", ordered.folder_names)
    sections.put_hash("folder", ordered.folder_sums, ordered.folder_parents, ordered.folder_names)
    if folders.mtimes:
        mtimes = np.full(count, np.iinfo(np.int64).min)
        mtimes[ordered.new_folder[list(folders.mtimes)]] = list(folders.mtimes.values())
        sections.put("folder.mtime", mtimes, "<i8")


def _put_entries(sections: Sections, ordered: OrderedDraft) -> None:
    starts = np.searchsorted(ordered.member_entry, np.arange(len(ordered.entry_names) + 1))
    sections.put_names("entry.name", ordered.entry_names)
    sections.put("entry.member", starts, "<u4")
    sections.put_hash("entry", ordered.entry_crc, ordered.entry_folder, ordered.entry_names)
    sections.put("entry.flags", ordered.entry_flags, "u1")
    sections.put("folder.flags", ordered.folder_flags, "u1")


def _put_links(sections: Sections, links: dict[int, int]) -> None:
    """Put the hard links: which member each stands for, and how many names a member with links has."""
    if links:
        rows = sorted(links)
        sections.put("link.member", rows, "<u4")
        sections.put("link.target", [links[row] for row in rows], "<u4")
        linked, counts = np.unique(list(links.values()), return_counts=True)
        sections.put("linked.member", linked, "<u4")
        sections.put("linked.count", counts + 1, "<u4")


def _put_members(sections: Sections, ordered: OrderedDraft, columns: dict[str, NDArray[np.int64]]) -> None:
    head, data, size, mtime = (columns[name][ordered.member_order] for name in ("head", "data", "size", "mtime"))
    sections.put_narrow("member.head", head // headers.BLOCK)
    sections.put_narrow("member.body", (data - head) // headers.BLOCK)
    sections.put_narrow("member.size", size)
    sections.put_times("member.mtime", mtime)
    sections.put_narrow("member.ext", ordered.member_extension)
    sections.put_names("ext.name", ordered.extensions)


def _put_symlinks(sections: Sections, ordered: OrderedDraft, draft: MemberDraft) -> None:
    symlinks = sorted((int(ordered.new_member[row]), target) for row, target in draft.symlinks.items())
    if symlinks:
        sections.put("symlink.member", [row for row, _ in symlinks], "<u4")
        sections.put_names("symlink.target", [target for _, target in symlinks])


def _put_sparse(sections: Sections, ordered: OrderedDraft, draft: MemberDraft) -> None:
    sparse = {int(ordered.new_member[row]): segments for row, segments in draft.sparse.items()}
    if sparse:
        rows = sorted(sparse)
        starts = np.cumsum([0, *(len(sparse[row]) for row in rows)])
        offsets, sizes = np.concatenate([sparse[row] for row in rows]).T
        ends = np.concatenate(([0], np.cumsum(sizes)))
        sections.put("sparse.member", rows, "<u4")
        sections.put("sparse.start", starts, "<u4")
        sections.put("sparse.offset", offsets, "<i8")
        sections.put("sparse.size", sizes, "<i8")
        sections.put("sparse.place", ends[:-1] - np.repeat(ends[starts[:-1]], np.diff(starts)), "<i8")


def _put_aliases(sections: Sections, name: str, aliases: list[Alias], ordered: OrderedDraft) -> None:
    sections.put(name + ".child", [alias.child for alias in aliases], "<u4")
    parents, shown = [alias.parent for alias in aliases], [alias.name for alias in aliases]
    sections.put(name + ".parent", parents, "<u4")
    sections.put_names(name + ".name", shown)
    sums = [zlib.crc32(alias.name, _prefix(ordered, alias.parent)) for alias in aliases]
    sections.put_hash(name, np.array(sums, dtype=np.uint32), parents, shown)


def _prefix(ordered: OrderedDraft, where: int) -> int:
    """Return the checksum of the path of a directory and the slash after it."""
    if kind_of(where) == FOLDER:
        return ordered.folder_prefixes[index_of(where)]
    return zlib.crc32(b"/", int(ordered.entry_crc[index_of(where)]))
