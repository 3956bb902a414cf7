"""A plan of new shards: the names and pieces of the shards, and the state of the sources at the planning.

A plan is complete before the first byte is written. The sources (`overlay_commit.py`, `view_source.py`,
`file_source.py`) make the plan, `runner.py` and `replacement.py` carry it out. Each source compares the samples
that a reader would find in a shard with the samples of the plan (`ShownSamples`). So an unknown rule of a reader
gives an error, never a smaller set.
"""

from __future__ import annotations

import codecs
import itertools
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from wdsfs import names, trust
from wdsfs.door import urls
from wdsfs.door.urls import is_remote
from wdsfs.errors import CommitError, UsageError, counted
from wdsfs.index.member_draft import Folders, TooManyFolders, folders_max
from wdsfs.index.record import STRAY
from wdsfs.names import SHARD_SUFFIXES, suffix_of
from wdsfs.shards import Fingerprint
from wdsfs.spec.spec_words import expand_braces, has_braces
from wdsfs.tar import headers
from wdsfs.tree import content
from wdsfs.tree.indexing import indexed
from wdsfs.tree.shard_set import ShardSet

MAXCOUNT, MAXSIZE = 100_000, 3e9  # of a new shard, ShardWriter's defaults: samples, bytes of content

FIRST_MEMBERS = 1000  # of the first shard, that a command reports
SAMPLES_SHOWN, VALUE_SHOWN = 3, 80  # by --dry-run: samples, and bytes of each value
COPY, LINK, REWRITE, NEW = "copy", "link", "rewrite", "new"

Numbers = NDArray[np.int64]
Placed = TypeVar("Placed")


# --- pieces --------------------------------------------------------------------------------------------------


class CopiedRange(NamedTuple):
    """A raw range, `start` to `end`, of a source shard (its number in the set): whole members with all headers."""

    shard: int
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


class GlobalHeader(CopiedRange):
    """A range that is a global PAX header. Exists only until `joined` turns it into a plain range."""

    __slots__ = ()


class NewMember(NamedTuple):
    """A member with the content of a file, or with `content`.

    `path` is the path of the file in its source; `size` (bytes) and `mtime_ns` are from the planning.
    `common` are the keywords of the global PAX headers in front of the member. `seconds` is the time in its
    header, if that is not the time of the file.
    """

    name: bytes
    path: bytes
    size: int
    mtime_ns: int
    common: tuple[bytes, ...] = ()
    content: bytes | None = None
    seconds: int | None = None

    @property
    def header(self) -> bytes:
        """The headers of the file in the tar."""
        return headers.encode(self.name, self.size, self.mtime, self.common)

    @property
    def mtime(self) -> int:
        """Whole seconds, as a tar header has them."""
        return self.mtime_ns // 10**9 if self.seconds is None else self.seconds

    @property
    def length(self) -> int:
        """Bytes in the tar, with headers and padding."""
        return len(self.header) + self.size + headers.padding(self.size)


class Zeros(NamedTuple):
    """Padding that a source shard lacks, or an end mark."""

    length: int

    @property
    def content(self) -> bytes:
        return bytes(self.length)


class PlainBytes(NamedTuple):
    """All of a small file that is written beside the shards."""

    content: bytes

    @property
    def length(self) -> int:
        return len(self.content)


Piece = CopiedRange | NewMember | Zeros | PlainBytes


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the same bytes in as few pieces as possible."""
    result: list[Piece] = []
    for piece in pieces:
        last = result[-1] if result else None
        if not piece.length:
            continue
        if (
            isinstance(piece, CopiedRange)
            and isinstance(last, CopiedRange)
            and (last.shard, last.end) == piece[:2]
        ):
            result[-1] = CopiedRange(piece.shard, last.start, piece.end)
        else:
            result.append(CopiedRange(*piece) if isinstance(piece, CopiedRange) else piece)
    return result


def without_last_globals(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces of a shard before its end mark, without the global headers after its last member.

    Semantics decision: the new shard leaves these headers out. They apply to no member, and tarfile (so also
    webdataset) raises ReadError if no member follows them.
    """
    left = list(pieces)
    while left and (isinstance(left[-1], GlobalHeader) or not left[-1].length):
        left.pop()
    return left


def rolled(
    samples: Iterable[tuple[Placed, int, bytes | None]], maxcount: int, maxsize: float
) -> Iterator[list[Placed]]:
    """Yield the samples of each new shard, in order; each comes with its bytes of content, and its key.

    As in ShardWriter, a full shard is noticed before a sample is written. Two adjacent samples of one key would be
    read as one, so the second sample starts a new shard. None stands for a key that differs from the key before.
    """
    placed: list[Placed] = []
    filled, last = 0, None
    for sample, size, key in samples:
        if placed and (len(placed) >= maxcount or filled >= maxsize or (key is not None and key == last)):
            yield placed
            placed, filled = [], 0
        placed.append(sample)
        filled += size
        last = key
    if placed:
        yield placed


# --- outputs -------------------------------------------------------------------------------------------------


class MemberPlaces(NamedTuple):
    """The members of a source shard, in the order of the tar.

    `heads` and `ends` are the first byte of a member's headers and the byte after its padding, `sizes` those of
    the content.
    """

    heads: Numbers
    ends: Numbers
    sizes: Numbers

    def within(self, ranges: Sequence[CopiedRange]) -> MemberPlaces:
        """Return the members in these ranges of the shard. In a shuffled set these are few of each shard."""
        starts, ends = np.array([(piece.start, piece.end) for piece in ranges], np.int64).reshape(-1, 2).T
        steps = np.zeros(len(self.heads) + 1, np.int64)
        np.add.at(steps, np.searchsorted(self.heads, starts), 1)
        np.add.at(steps, np.searchsorted(self.heads, ends), -1)
        rows = np.flatnonzero(np.cumsum(steps[:-1]))
        return MemberPlaces(self.heads[rows], self.ends[rows], self.sizes[rows])


@dataclass(slots=True)
class Output:
    """A shard to be written: its path, its pieces in order, and its bytes.

    `places` are the places of the members in its copied ranges, by source shard, for the verification; None for a
    copy of a whole shard.
    """

    target: bytes
    pieces: Iterable[Piece]
    places: Mapping[int, MemberPlaces] | None = None
    length: int = -1

    def __post_init__(self) -> None:
        if self.length < 0:
            self.length = sum(piece.length for piece in self.pieces)

    @property
    def sources(self) -> set[int]:
        """Return the numbers of the shards that ranges are copied from."""
        return set(self.ranges)

    @property
    def ranges(self) -> dict[int, list[CopiedRange]]:
        """Return the ranges that are copied, by the number of their shard."""
        ranges: dict[int, list[CopiedRange]] = {}
        for piece in self.pieces:
            if isinstance(piece, CopiedRange):
                ranges.setdefault(piece.shard, []).append(piece)
        return ranges

    @property
    def first_change(self) -> int:
        """Return the offset of the first byte that may differ from a source shard; all before it is copied."""
        at, source = 0, None
        for piece in self.pieces:
            if not isinstance(piece, CopiedRange) or piece.start != at or source not in (None, piece.shard):
                break
            at, source = piece.end, piece.shard
        return at


class PlannedMember(NamedTuple):
    """A member of a sample in a shard to be written: `size` is in bytes, `start` yields its content."""

    key: bytes
    extension: bytes
    size: int
    start: Callable[[], Iterable[bytes]]


def planned_members(
    output: Output, lower: ShardSet | None = None, read: Callable[[NewMember], Iterable[bytes]] = lambda _: ()
) -> Iterator[PlannedMember]:
    """Yield the members of samples in a shard to be written, in the order of the tar.

    `lower` has the source shards, if there are any; `read` reads new members.
    """
    for piece in output.pieces:
        if isinstance(piece, NewMember):
            split = names.split(piece.name)
            if split is not None:
                key = split.folder + split.stem
                yield PlannedMember(key, split.extension, piece.size, partial(read, piece))
        elif isinstance(piece, CopiedRange) and lower is not None:
            yield from _copied_members(lower.plain, piece)


def _copied_members(plain: ShardSet, piece: CopiedRange) -> Iterator[PlannedMember]:
    record = indexed(plain.record, piece.shard)
    heads = record.array("member.head").astype(np.int64) * headers.BLOCK
    rows = np.flatnonzero((heads >= piece.start) & (heads < piece.end))
    for member in rows[np.argsort(heads[rows])].tolist():
        entry = record.entry_of(member)
        if not record.entry_flags[entry] & STRAY:
            extension = record.extension_name[record.array("member.ext")[member]]
            size, start = int(record.array("member.size")[member]), partial(_copied_start, plain, piece, member)
            yield PlannedMember(record.entry_path(entry), extension, size, start)


def _copied_start(plain: ShardSet, piece: CopiedRange, member: int) -> Iterator[bytes]:
    yield content.read(indexed(plain.content, piece.shard, plain.tag(piece.shard), member), 0, VALUE_SHOWN)


def shown_values(members: Iterable[PlannedMember]) -> list[dict[str, Any]]:
    """Return what a command shows of the first samples: key, column, bytes, and the beginning of a text.

    Raises CommitError, ShardErrors, OSErrors.
    """
    keys, rows = set[bytes](), list[dict[str, Any]]()
    for member in members:
        keys.add(member.key)
        if len(keys) > SAMPLES_SHOWN:
            break
        key, column = names.readable(member.key), names.readable(member.extension)
        rows.append({"key": key, "column": column, "bytes": member.size, "value": _text_of(member)})
    return rows


def _text_of(member: PlannedMember) -> str | None:
    """Return the beginning of a text; None for other content."""
    if member.extension.lower().rpartition(b".")[2] in names.MEDIA:
        return None
    data = next(iter(member.start()), b"")[:VALUE_SHOWN]
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data)  # the last sign may be cut off
    except UnicodeDecodeError:
        return None
    return None if b"\0" in data else names.readable(data)


class Remark(NamedTuple):
    """A path below the upper or in a tree, and a remark about it."""

    path: bytes
    reason: str

    def as_json(self) -> dict[str, str]:
        """Return the remark as `--json` shows it."""
        return {"path": os.fsdecode(self.path), "reason": self.reason}


class SourceShard(NamedTuple):
    """A source shard at the time of the planning. `checksum` is the checksum of its record, "" if unknown."""

    path: bytes
    fingerprint: Fingerprint
    checksum: str = ""


class Step(NamedTuple):
    """One shard of a plan: the action (COPY, LINK, REWRITE, NEW), and the number of samples.

    `number` is the source shard; None if there are several, or none.
    """

    output: Output
    action: str
    number: int | None
    samples: int

    @property
    def target(self) -> bytes:
        return self.output.target

    @property
    def is_remote(self) -> bool:
        """True if the shard goes to a store."""
        return is_remote(self.output.target)

    def as_json(self) -> dict[str, Any]:
        """Return the shard as `--json` shows it."""
        size = self.output.length
        return {"shard": os.fsdecode(self.target), "action": self.action, "samples": self.samples, "bytes": size}


@dataclass(slots=True)
class Plan:
    """All shards to write, in order, and the state of the sources at the planning.

    `left_out` are the files that are not written, with the reason. `beside` are small files beside the shards.
    `beyond` are names after the last shard, which must be free: a glob over the set would match such files, too.
    """

    steps: list[Step] = field(default_factory=list)
    sources: dict[int, SourceShard] = field(default_factory=dict)
    left_out: list[Remark] = field(default_factory=list)
    beside: list[Step] = field(default_factory=list)
    beyond: list[bytes] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Return the bytes that will be written."""
        return sum(step.output.length for step in self.steps if step.action != LINK)

    @property
    def sent(self) -> int:
        """Return the bytes among these that will go to a store."""
        return sum(step.output.length for step in self.steps if step.is_remote)


# --- what a reader finds -------------------------------------------------------------------------------------


class Key(NamedTuple):
    """The key of a sample: as a record has it, and a function that returns it as the tar has it."""

    plain: bytes
    raw: Callable[[], bytes]


class ShownSamples:
    """The samples that a reader finds in the shard of a step, added in the order of the tar.

    `lower` has the source shards, if there are any. Methods raise CommitError.
    """

    def __init__(self, step: Step, lower: ShardSet | None = None) -> None:
        self._step, self._lower = step, lower
        self._samples, self._last = 0, Key(b"", bytes)
        self._key: bytes | None = None  # of the member before, if that is a new one
        self._prefix: bytes | None = None  # with which a further name is known to have this key
        self._folders_most = 0  # an upper bound: a folder may count several times

    def add_member(self, name: bytes, *, in_sample: bool = True) -> None:
        """Add a new member."""
        prefix = self._prefix
        if (
            prefix
            and name.startswith(prefix)
            and b"/" not in name[len(prefix) :]
            and len(name) <= headers.NAME_MAX
        ):
            return  # a further member of the last sample, in its folder: most are
        why = headers.name_beyond_limit(name)
        key = names.raw_key(name)
        if why is None and in_sample and key is None:
            why = "it is in no sample"
        if why is not None:
            raise self._refusal(f"would leave out {names.readable(name)} ({why})")
        if key is None or key != self._key:
            self._folders_most += name.count(b"/")
        if key is not None and key != self._key:
            self._add(Key(names.plain_key(key), lambda: key))
            self._key = key
            # Of `__a.x` the extension decides if it belongs to the set (`__a.x__`).
            self._prefix = None if key.startswith(b"__") else key + b"."

    def add_copies(self, first: Key, last: Key, count: int = 1) -> None:
        """Add this number of samples that are copied side by side, of which the first may have begun before."""
        self._add(first)
        self._key = self._prefix = None
        self._samples += count - 1
        self._last = last

    def _add(self, key: Key) -> None:
        if key.plain != self._last.plain or key.raw() != self._last.raw():
            self._samples += 1
        self._last = key

    def compare(self) -> None:
        """Compare the samples with the plan. Raises CommitError if they differ."""
        if self._samples != self._step.samples:
            shown = counted(self._samples, "sample")
            raise self._refusal(f"would find {shown} in place of {self._step.samples:,}")
        self._refuse_folders()

    def _refuse_folders(self) -> None:
        output, lower = self._step.output, self._lower
        limit, most = folders_max(output.length), self._folders_most
        if lower is not None:
            most += sum(indexed(lower.plain.record, number).folders for number in output.sources)
        if most <= limit:
            return  # nearly always: all names are looked at otherwise
        folders = Folders(limit)
        try:
            for member in planned_members(output, lower):
                folders.number(names.split_folder(member.key)[0])
        except TooManyFolders:
            target = os.fsdecode(output.target)
            raise CommitError(
                f"{target}: readers take no more than {limit:,} folders in a shard of its size: put fewer samples "
                "into each shard (--maxcount), or use fewer folders in the keys"
            ) from None

    def _refusal(self, what: str) -> CommitError:
        return CommitError(
            f"{os.fsdecode(self._step.target) or 'a new shard'}: readers {what}, by an error of wdsfs: nothing "
            "was written; please report it"
        )


# --- names ---------------------------------------------------------------------------------------------------

_NUMBER = re.compile(r"%0?[0-9]{0,2}d")


def namer(pattern: str | None) -> Callable[[int], bytes]:
    """Return a function from a number, from 0 on, to the absolute path of that new shard. Raises UsageError."""
    if pattern is None:
        raise UsageError("--output is missing: it names the new shards, for example 'out/train-%06d.tar'")
    if has_braces(pattern):
        if "%" in pattern:
            raise UsageError(f"--output {pattern}: write the numbers like %06d or in braces, not both")
        return _named_one_by_one(pattern, list(expand_braces(pattern)))
    if "%" not in pattern:
        return _named_one_by_one(pattern, [pattern])
    if len(_NUMBER.findall(pattern)) != 1 or "%" in _NUMBER.sub("", pattern):
        raise UsageError(f"--output {pattern}: a number is written like %06d, and once")
    return lambda number: _absolute(pattern % number)


def refuse_output(pattern: str) -> None:
    """Raise UsageError for a pattern whose shards no mount of their directory would find."""
    target = namer(pattern)(0)
    refuse_compressed_name(target)
    # Semantics decision: a mount accepts a shard with such a name, given by hand, but wdsfs writes none.
    if not target.endswith((SHARD_SUFFIXES[0], SHARD_SUFFIXES[0].upper())):
        named = shlex.quote(f"{pattern}.tar")
        raise UsageError(f"--output {pattern}: loaders and mounts find shards by their suffix: write -o {named}")


def refuse_compressed_name(target: bytes) -> None:
    """Raise UsageError for a name under which readers would unpack the shard."""
    suffix = suffix_of(target.lower())
    if suffix not in (b"", b".tar"):
        text = f"shards are written as plain tars, and under a name in {suffix.decode()} readers would unpack them"
        raise UsageError(f"--output: {os.fsdecode(target)}: {text}; name them .tar and compress them afterwards")


def _named_one_by_one(pattern: str, names: list[str]) -> Callable[[int], bytes]:
    def name(number: int) -> bytes:
        if number >= len(names):
            many = "1 shard" if len(names) == 1 else f"{len(names)} shards"
            raise UsageError(f"--output {pattern} names {many}, and there are more to be written")
        return _absolute(names[number])

    return name


def _absolute(name: str) -> bytes:
    if urls.is_url(name):
        return _object(name)
    if os.path.basename(name) in ("", ".", "..") or os.path.isdir(name):
        example = shlex.quote(os.path.join(name, "train-%06d.tar"))
        raise UsageError(f"--output {name} is a directory: name the shards in it, for example {example}")
    return os.fsencode(os.path.abspath(name))


def _object(name: str) -> bytes:
    """Return the path of an object. Raises UsageError for places that objects cannot be written to."""
    url = urls.parse(name)
    if url.scheme not in urls.BUCKETS:
        places = ", ".join(f"{scheme}://" for scheme in sorted(urls.BUCKETS))
        raise UsageError(f"--output {url}: new shards go to files and to {places}, not to {url.scheme}://")
    if not url.key or url.key.endswith("/"):
        example = shlex.quote(f"{url.store}/{url.key}train-%06d.tar")
        raise UsageError(f"--output {url} is not an object: name the shards in it, for example {example}")
    return os.fsencode(url.shown)


def canonical(path: bytes) -> bytes:
    """Return the path of a shard without symbolic links; an object has none."""
    return path if is_remote(path) else os.path.realpath(path)


def continued(path: bytes) -> Iterator[bytes]:
    """Yield the names after this one: its last number counts up. Raises UsageError if it has none."""
    parts = re.fullmatch(rb"(.*?)(\d+)([^\d/]*)", path, re.DOTALL)
    if parts is None or b"/" in parts[3]:
        text = f"{os.fsdecode(path)} has no number to go on from: give --output for the new shards"
        raise UsageError(text)
    for number in itertools.count(int(parts[2]) + 1):
        yield parts[1] + b"%0*d" % (len(parts[2]), number) + parts[3]


class Targets:
    """The names of new shards: none twice, and none that `sources` have. `way_out` is the end of the message."""

    def __init__(self, sources: Iterable[bytes] = (), way_out: str = "choose another --output") -> None:
        self._sources, self._targets = set(map(canonical, sources)), set[bytes]()
        self._way_out = way_out

    def add(self, target: bytes, *, is_tar: bool = False) -> None:
        """Note a name. `is_tar`: readers already read its file as a tar. Raises CommitError, UsageError."""
        place = canonical(target)
        if place in self._targets:
            raise CommitError(f"{os.fsdecode(place)} would be written twice: {self._way_out}")
        if not is_tar:
            refuse_compressed_name(place)
        if place in self._sources:
            raise CommitError(f"{os.fsdecode(place)} is one of the shards: {self._way_out}")
        self._targets.add(place)


def refuse_beyond(target: bytes) -> None:
    """Raise CommitError for this file that has a name after the last shard of a set."""
    raise CommitError(
        f"{os.fsdecode(target)} exists, but this set has fewer shards: a glob over the set would match the file, "
        "too; remove it and those with higher numbers, or choose another --output"
    )


def refuse_below(plan: Plan, directory: str, what: str) -> None:
    """Raise UsageError for a new shard that would be in this directory, which is `what`."""
    top = os.path.realpath(os.fsencode(directory))
    replaced = {canonical(source.path) for source in plan.sources.values()}
    for target in (canonical(step.target) for step in plan.steps if not step.is_remote):
        if target not in replaced and os.path.commonpath([top, target]) == top:
            text = f"{os.fsdecode(target)} would be in {what}: name another directory with --output"
            raise UsageError(text)


# An object of git-annex; a name with a hash of 128 bits or more, whose first two digits may be a directory (DVC).
_BY_CONTENT = re.compile(rb"/annex/objects/|[0-9a-f]{2}/?[0-9a-f]{30}[^/]*\Z")


def refuse_foreign_link(path: bytes) -> None:
    """Raise CommitError for a shard that is reached by a link that other users can have made or changed.

    By such a link they could make this user write to a file of their choice.
    """
    place = canonical(path)
    if place == path or place == os.path.abspath(path) or trust.holds(path):
        return
    raise CommitError(
        f"{os.fsdecode(path)} is not replaced: a link leads from there to {os.fsdecode(place)}, and others can "
        "have made it; if the link is right, name that file instead, or trust the owner of the link: --trust"
    )


def refuse_shared_content(path: bytes) -> None:
    """Raise CommitError for a link to a file that is named by its content: other revisions share it.

    Semantics decision: such a file is never replaced: other revisions show it, and every later download takes it
    for the original. Nor is the link replaced: the tool that made it would take the new shard for the old content.
    A hard link needs no refusal: the other names of the file keep its content.
    """
    place = canonical(path)
    if os.path.basename(place) != os.path.basename(path) and _BY_CONTENT.search(place):
        link = shlex.quote(os.fsdecode(path))
        raise CommitError(
            f"{os.fsdecode(path)} is a link to {os.fsdecode(place)}, a file that is named by its content and that "
            "other revisions share, so it is not replaced: name new shards by --output, without --in-place, or "
            f'make this shard a file of its own first: cp --remove-destination "$(realpath {link})" {link}'
        )
