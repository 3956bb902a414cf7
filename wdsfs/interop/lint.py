"""The lint of a shard: odd and damaged samples, and misfits in indexes of other tools beside it.

`lint` reads the headers of a shard, not the index, so the shard is known to be readable now; `lint_record` uses
its record. `judge.py` has the findings in a whole set.
"""

from __future__ import annotations

import functools
import hashlib
import os
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdsfs import names
from wdsfs.errors import StaleShard, UnreadableShard
from wdsfs.index.record import KINDS, STRAY, Record
from wdsfs.index.record_of_file import ToScan, opened_to_scan
from wdsfs.interop import dali, energon
from wdsfs.names import PLAIN, Reading
from wdsfs.source import TarBytes, open_beside
from wdsfs.tar import headers, scan, streams
from wdsfs.tar.columns import Chunk
from wdsfs.tar.problems import HARMLESS, NO_TAR, Problem, Problems

EXAMPLES = 100  # findings of one kind in one shard that are listed; further ones are counted
KEPT = 1000  # samples of a shard that are remembered in case they lack an extension that others have
FIRST_SAMPLES = 5  # NUM_EXAMPLES_FOR_FEATURES_INFERENCE of Hugging Face's `datasets`
UNEVEN = "uneven columns"  # a kind
EXTRA, LATE, EMPTY, UNREADABLE = "extra column", "late column", "empty member", "unreadable"  # kinds
NOTES = frozenset(("directory", "meta", "unextractable", UNEVEN, EXTRA))  # kinds that webdataset does not mind


class LintFinding(NamedTuple):
    """One line of the report. `offset` is the byte where the member's first header is, -1 for a whole shard."""

    kind: str
    offset: int
    member: str
    text: str

    @property
    def is_note(self) -> bool:
        """True if webdataset reads it without trouble."""
        return self.kind in NOTES

    def line(self, path: str) -> str:
        """Return the line of a report on the shard at `path`."""
        where = f"{path}:{self.offset}" if self.offset >= 0 else path
        return ": ".join(filter(None, (where, self.member, f"[{self.kind}] {self.text}")))


class FirstSample(NamedTuple):
    """A sample at the start of a shard: where its first header is (bytes), its key, and its extensions."""

    offset: int
    key: str
    extensions: frozenset[bytes]


@dataclass(slots=True)
class Column:
    """Counts for one column of a shard: its members, those of 0 bytes, and some of the latter (offset, name)."""

    members: int = 0
    empty: int = 0
    examples: list[tuple[int, str]] = field(default_factory=list)

    def add(self, name: bytes, offset: int, size: int) -> None:
        """Count a member of `size` bytes."""
        self.members += 1
        self.empty += not size
        if not size and len(self.examples) < EXAMPLES:
            self.examples.append((offset, escaped(name)))


@dataclass(slots=True)
class Lint:
    """The findings in one shard, and its counts for those in the whole set."""

    findings: list[LintFinding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    samples: int = 0
    members: int = 0
    # By set of extensions: how many samples have exactly these, and the first of them (offset, key).
    patterns: dict[frozenset[bytes], int] = field(default_factory=dict)
    examples: dict[frozenset[bytes], list[tuple[int, str]]] = field(default_factory=dict)
    # 64-bit digests of the shard's keys and where each is first seen: for keys that several shards have.
    keys: array[int] = field(default_factory=lambda: array("Q"))
    offsets: array[int] = field(default_factory=lambda: array("q"))
    first: list[FirstSample] = field(default_factory=list)  # a few samples at its start
    columns: dict[bytes, Column] = field(default_factory=dict)

    def add(self, kind: str, offset: int, member: str, text: str) -> None:
        """Count a finding. List it if it is one of the first of its kind."""
        self.counts[kind] += 1
        if self.counts[kind] <= EXAMPLES:
            self.findings.append(LintFinding(kind, offset, member, text))

    def add_problems(self, problems: Sequence[Problem], count: int, last: tuple[int, bytes] = (-1, b"")) -> None:
        """Add the problems of a shard, `count` in all; `last` has the head and the name of its last member."""
        for problem in problems:
            member = escaped(last[1]) if problem.offset == last[0] else ""
            self.add(problem.kind, problem.offset, member, problem.text)
        if count > len(problems):
            self.add(problems[0].kind, -1, "", f"and {count - len(problems)} more problems")


def escaped(name: bytes) -> str:
    """Return a name as text, with bytes that are not UTF-8 escaped."""
    return name.decode("utf-8", "backslashreplace")


PATTERNS = 10_000  # different sets of extensions that are counted in one shard
COLUMNS = 10_000  # columns of a shard whose members are counted
HIDDEN = "in no sample: its name starts with a dot"
HIDDEN_IN_FOLDER = (
    HIDDEN + "; webdataset and Energon take it for a member of another sample, which splits the sample around it: "
    "`wdsfs pack SHARDS` leaves it out"
)
FILE_AND_FOLDER = "tar cannot extract it: it is a file, and other members need a directory of this name"


def lint(path: bytes, reading: Reading = PLAIN, together: int = 1) -> Lint:
    """Check a shard; `together` remote shards are read at a time. Raises MissingShard, UnreadableShard.

    Data after an end mark and split samples are findings whatever `reading` is: other tools have no such options.
    """
    findings = Lint()
    try:
        with opened_to_scan(path, together) as opened:
            _lint_opened(opened, path, reading, findings)
    except StaleShard as error:
        raise UnreadableShard(f"{error}; try again when it is finished") from None
    except OSError as error:
        raise UnreadableShard(f"{os.fsdecode(path)}: {error.strerror}") from None
    return findings


def _lint_opened(opened: ToScan, path: bytes, reading: Reading, findings: Lint) -> None:
    tar, problem, kind = opened.content
    if kind is not None and path.endswith(b".tar"):
        text = f"is called .tar, but {kind}-compressed: webdataset reads it; DALI, Energon and wids do not"
        findings.add("compressed", -1, "", text)
    reader, marks = _ShardLinter(findings, reading), reading.marks()
    problems = Problems([] if problem is None else [problem])
    for chunk in scan.scan(opened.reader, problems, marks=marks):
        reader.read(chunk)
    reader.end()
    reader.find_clashes(tar)
    if not findings.samples and all(problem.kind in HARMLESS for problem in problems.listed()):
        findings.add("no samples", -1, "", _no_samples_text(findings.members))
    if marks:
        findings.add("behind end mark", marks[0], "", _joined_text(len(marks)))
    findings.add_problems(_with_way_out(problems.listed(), path), len(problems), reader.last)
    if tar is opened.shard and isinstance(tar, int):
        for side, misfit in _side_indexes(path, tar, reading):
            findings.add("wrong index", -1, "", f"{os.fsdecode(side)}: {misfit}")


def _with_way_out(problems: list[Problem], path: bytes) -> list[Problem]:
    """Return the problems of a shard; for one of the parts of a split tar they say so."""
    damage = [problem for problem in problems if problem.kind not in HARMLESS]
    part = streams.split_tar(os.fsdecode(path)) if damage else ""
    if not part:
        return problems
    texts = {problem: part if problem.kind in NO_TAR else f"{problem.text}; {part}" for problem in damage}
    return [problem._replace(text=texts.get(problem, problem.text)) for problem in problems]


def _no_samples_text(members: int) -> str:
    if members:
        return "no member is in a sample: only --layout files shows the members"
    return "has no member, only zeros: it was packed from nothing, or its download failed"


def _joined_text(marks: int) -> str:
    more = f" and {marks - 1:,} more end marks" if marks > 1 else ""
    return f"another tar follows the end-of-archive mark{more}; readers stop here without --ignore-zeros"


def _split_sample_text(first: int, *, gathered: bool = False) -> str:
    text = f"the sample has members at offset {first} already: they are not side by side"
    return text if gathered else f"{text}; --group-by-key shows them together"


def lint_record(record: Record) -> Lint:
    """Check the record of a shard: damage, split samples, and the extensions of samples."""
    findings = Lint(samples=record.samples, members=record.members)
    findings.add_problems(record.problems, record.problem_count)
    starts = record.array("entry.member").astype(np.int64)
    samples = np.flatnonzero((record.array("entry.flags") & STRAY) == 0)
    _find_split_samples(record, samples, starts, findings)
    _find_patterns(record, samples, starts, findings)
    return findings


def _find_split_samples(
    record: Record, samples: NDArray[np.int64], starts: NDArray[np.int64], findings: Lint
) -> None:
    paths = record.paths()
    first: dict[bytes, int] = {}
    for entry in samples[np.argsort(starts[samples], kind="stable")].tolist():
        before = first.setdefault(paths[entry], entry)
        if before != entry:
            offsets = [record.member(int(starts[twin])).head for twin in (before, entry)]
            findings.add("split sample", offsets[1], escaped(paths[entry]), _split_sample_text(offsets[0]))


def _find_patterns(record: Record, samples: NDArray[np.int64], starts: NDArray[np.int64], findings: Lint) -> None:
    """Count samples by the set of their extensions."""
    extensions = [record.extension_name[number] for number in range(len(record.extension_name))]
    numbers, counts = record.array("member.ext").astype(np.int64), starts[samples + 1] - starts[samples]
    room = KEPT
    for count in np.unique(counts).tolist():
        alike = samples[counts == count]
        rows = np.sort(numbers[starts[alike][:, None] + np.arange(count)], axis=1)
        whole = np.ascontiguousarray(rows).view(np.dtype((np.void, rows.itemsize * count))).reshape(-1)
        _, first, which, times = np.unique(whole, return_index=True, return_inverse=True, return_counts=True)
        order, ends = np.argsort(which, kind="stable"), np.cumsum(times)
        for kind in np.argsort(-times, kind="stable")[: PATTERNS - len(findings.patterns)].tolist():
            pattern, number = frozenset(extensions[column] for column in rows[first[kind]]), int(times[kind])
            findings.patterns[pattern] = findings.patterns.get(pattern, 0) + number
            examples = findings.examples.setdefault(pattern, [])
            listed = order[ends[kind] - number : ends[kind]][: min(EXAMPLES - len(examples), room)]
            room -= len(listed)
            for entry in alike[listed].tolist():
                examples.append((record.member(int(starts[entry])).head, escaped(record.entry_path(entry))))


def _side_indexes(path: bytes, fd: int, reading: Reading) -> Iterator[tuple[bytes, str]]:
    """Yield the indexes of other tools beside a shard that do not fit it, and why."""
    dali_misfit = functools.partial(dali.dali_misfit, reading=reading)
    sides = ((dali.dali_path(path), dali_misfit), (energon.energon_path(path), energon.misfit))
    for side, misfit in sides:
        try:
            file = open_beside(side)  # closed below; errors of reading the shard are not those of the index
        except FileNotFoundError:
            continue
        except OSError as error:
            yield side, f"it cannot be read: {error.strerror}"
            continue
        with file:
            text = misfit(fd, file)
        if text is not None:
            yield side, text


class _ShardLinter:
    """Groups members into samples as a reader of the format does, and adds findings on the way."""

    def __init__(self, findings: Lint, reading: Reading = PLAIN) -> None:
        self.findings, self.reading = findings, reading
        # Where members that lie apart are one sample: offset, key and extensions of each, by the key's digest.
        self.gathered: dict[int, tuple[int, bytes, set[bytes]]] | None = {} if reading.group_by_key else None
        self.key: bytes | None = None
        self.offset = 0
        self.extensions: set[bytes] = set()
        self.lowered: set[bytes] = set()
        self.last = (-1, b"")  # offset and name of the member read last
        self.seen: dict[int, int] = {}
        self.example_count = 0
        self.folder = b""  # of the member read last, with its last slash
        self.folders: set[int] = set()  # hashes of all folders
        self.dotted: set[bytes] = set()  # folders which may also be the names of columns
        self.strays: dict[bytes, int] = {}  # files in no sample, with their offsets
        self.dotted_names = names.DottedNames()

    def read(self, chunk: Chunk) -> None:
        """Check the members of a chunk."""
        columns = (chunk.names, chunk.types.tolist(), chunk.heads.tolist(), chunk.sizes.tolist())
        for name, kind, offset, size in zip(*columns, strict=True):
            if not name.startswith(self.folder) or b"/" in name[len(self.folder) :]:
                self._enter(name)
            if len(name) > names.NAME_MAX or b".." in name or b"\0" in name:
                self._extractable(name, offset)
            split = names.split(name, last_dot=self.reading.last_dot) if kind == headers.REGULAR else None
            if split is None:
                self._stray(name, kind, offset)
            else:
                self._member(name, split.extension, offset)
                self._column(name, split.extension, offset, size)
        self.findings.members += len(chunk.names)
        self.last = int(chunk.heads[-1]), chunk.names[-1]

    def _extractable(self, name: bytes, offset: int) -> None:
        why = names.unextractable(name)
        if why is not None:
            self.findings.add("unextractable", offset, escaped(name), f"tar cannot extract it: {why}")

    def _enter(self, name: bytes) -> None:
        """Take note of the folders that a member lies in."""
        self.folder, _ = names.split_folder(name)
        end = len(self.folder) - 1
        while end > 0 and hash(name[:end]) not in self.folders:
            folder = name[:end]
            self.folders.add(hash(folder))
            if b"." in names.split_folder(folder)[1]:
                self.dotted.add(folder)
            end = name.rfind(b"/", 0, end)

    def find_clashes(self, source: TarBytes) -> None:
        """Find files with the names of folders. For names of columns headers are read again, which is rare."""
        clashes = [(offset, name) for name, offset in self.strays.items() if hash(name) in self.folders]
        splits = filter(None, (names.split(name, last_dot=self.reading.last_dot) for name in self.dotted))
        if any(_digest(sample.folder + sample.stem) in self.seen for sample in splits):
            for chunk in scan.scan(source, Problems(), marks=self.reading.marks()):
                rows = zip(chunk.heads.tolist(), chunk.names, chunk.types.tolist(), strict=True)
                clashes += [
                    (at, name) for at, name, kind in rows if kind == headers.REGULAR and name in self.dotted
                ]
        for offset, name in sorted(set(clashes)):
            self.findings.add("unextractable", offset, escaped(name), FILE_AND_FOLDER)

    def _stray(self, name: bytes, kind: int, offset: int) -> None:
        text = escaped(name)
        if kind == headers.REGULAR:
            self.strays[name] = offset
        if kind != headers.REGULAR:
            what = KINDS.get(kind, f"member of unknown type {chr(kind)!r}")
            label = "directory" if kind == headers.DIRECTORY else "not in a sample"
            self.findings.add(label, offset, text, f"a {what} is in no sample")
        elif names.is_meta(name):
            self.findings.add("meta", offset, text, "a __name__ member belongs to the set, not to a sample")
        else:
            folder, base = names.split_folder(name)
            why = "in no sample: its name has no extension"
            if base.startswith(b"."):
                why = HIDDEN_IN_FOLDER if folder else HIDDEN
            self.findings.add("not in a sample", offset, text, why)

    def _member(self, name: bytes, extension: bytes, offset: int) -> None:
        key = name[: len(name) - len(extension) - 1]
        if key != self.key:
            self.end_sample()
            self.key, self.offset = key, offset
            self._key(key, offset)
        if extension in self.extensions:
            text = f"the extension {escaped(extension)!r} occurs twice in the sample; webdataset refuses it"
            self.findings.add("duplicate extension", offset, escaped(name), text)
        elif names.lower_case(extension) in self.lowered:
            text = "two extensions of the sample differ in letter case only; webdataset refuses it"
            self.findings.add("duplicate extension", offset, escaped(name), text)
        if names.lower_case(extension) in names.RESERVED:
            text = f"webdataset uses {escaped(extension)!r} itself and refuses such a column"
            self.findings.add("reserved extension", offset, escaped(name), text)
        self.extensions.add(extension)
        self.lowered.add(names.lower_case(extension))
        if _is_odd(extension) or (not names.are_plain([name]) and any(map(_is_odd, _shown_components(name)))):
            self.findings.add(
                "odd name", offset, escaped(name), "the name cannot be a file name; an escaped name is shown"
            )

    def _column(self, name: bytes, extension: bytes, offset: int, size: int) -> None:
        """Count a member of a column, and look for dots and bytes in its name that other readers trip over."""
        columns = self.findings.columns
        column = columns.get(extension)
        if column is None and len(columns) < COLUMNS:
            column = columns[extension] = Column()
        if column is not None:
            column.add(name, offset, size)
        if b"." in extension and not self.reading.last_dot:
            self.dotted_names.add(name, extension, offset)
        if not name.isascii() and not names.is_utf8(name):
            text = "the name is not UTF-8: Hugging Face datasets and Energon cannot store it; rename the file"
            self.findings.add("not UTF-8", offset, escaped(name), text)

    def _key(self, key: bytes, offset: int) -> None:
        digest = _digest(key)
        first = self.seen.setdefault(digest, offset)
        if first == offset:
            self.findings.keys.append(digest)
            self.findings.offsets.append(offset)
        else:
            text = _split_sample_text(first, gathered=self.gathered is not None)
            self.findings.add("split sample", offset, escaped(key), text)
        if self.gathered is not None:
            self.offset, _, self.extensions = self.gathered.setdefault(digest, (offset, key, self.extensions))
            self.lowered = set(map(names.lower_case, self.extensions))

    def end_sample(self) -> None:
        """Count the current sample."""
        if self.key is None:
            return
        if len(self.findings.first) < FIRST_SAMPLES:
            self.findings.first.append(FirstSample(self.offset, escaped(self.key), frozenset(self.extensions)))
        if self.gathered is None:
            self._count(self.offset, self.key, self.extensions)
        self.key, self.extensions, self.lowered = None, set(), set()

    def end(self) -> None:
        """Count the last samples, after the last member."""
        self.end_sample()
        for sample in (self.gathered or {}).values():
            self._count(*sample)
        text = self.dotted_names.text(self.findings.samples)
        if text:
            self.findings.add("dotted name", self.dotted_names.place, escaped(self.dotted_names.name), text)

    def _count(self, offset: int, key: bytes, extensions: set[bytes]) -> None:
        self.findings.samples += 1
        pattern = frozenset(extensions)
        if pattern in self.findings.patterns or len(self.findings.patterns) < PATTERNS:
            self.findings.patterns[pattern] = self.findings.patterns.get(pattern, 0) + 1
            examples = self.findings.examples.setdefault(pattern, [])
            if len(examples) < EXAMPLES and self.example_count < KEPT:
                examples.append((offset, escaped(key)))
                self.example_count += 1


@functools.lru_cache(1024)
def _is_odd(component: bytes) -> bool:
    return names.escape(component) != component


def _shown_components(name: bytes) -> list[bytes]:
    folder, base = names.split_folder(name)
    return [*names.folder_components(folder), base]


def _digest(key: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
