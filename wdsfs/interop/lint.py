"""The lint of `wdsfs check` and `--strict`: odd and damaged samples, and misfits in indexes beside the shards.

`lint` reads the headers of a shard, not the index, so the shard is known to be readable now; `lint_record` uses
its record. `Judge` adds findings about the set as a whole. docs/reference/semantics.md lists the kinds.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import stat
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdsfs import names
from wdsfs.cluster_workers import Workers
from wdsfs.door.shard_door import DOOR
from wdsfs.errors import ShardError, StaleShard, UnreadableShard, counted, several
from wdsfs.index import process_pool, record_of_file
from wdsfs.index.record import KINDS, STRAY, Record
from wdsfs.interop import dali, energon
from wdsfs.names import PLAIN, Reading
from wdsfs.shards import Shard
from wdsfs.storage import source
from wdsfs.storage.source import TarBytes, open_beside
from wdsfs.tar import compressed, headers, scan, streams
from wdsfs.tar.columns import Chunk
from wdsfs.tar.problems import BROKEN_FIELD, HARMLESS, NO_TAR, Problem, Problems
from wdsfs.tree.draft import COLUMNS_NAMED
from wdsfs.tree.indexing import indexed
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.view_set import ViewSet

EXAMPLES = 100  # findings of one kind in one shard that are listed; further ones are counted
KEPT = 1000  # samples of a shard that are remembered in case they lack an extension that others have
PATTERNS = 10_000  # different sets of extensions that are counted in one shard
COLUMNS = 10_000  # columns of a shard whose members are counted
FIRST_SAMPLES = 5  # NUM_EXAMPLES_FOR_FEATURES_INFERENCE of Hugging Face's `datasets`
UNEVEN = "uneven columns"  # a kind
EXTRA, LATE, EMPTY, UNREADABLE = "extra column", "late column", "empty member", "unreadable"  # kinds
NOTES = frozenset(("directory", "meta", "unextractable", UNEVEN, EXTRA))  # kinds that webdataset does not mind
# Semantics decision: an empty text, such as a caption, is a text. An empty image, label or JSON stops its decoder.
MAY_BE_EMPTY = frozenset((b"txt", b"text", b"transcript", b"caption"))
HIDDEN = "in no sample: its name starts with a dot"
HIDDEN_IN_FOLDER = (
    HIDDEN + "; webdataset and Energon take it for a member of another sample, which splits the sample around it: "
    "`wdsfs pack SHARDS` leaves it out"
)
FILE_AND_FOLDER = "tar cannot extract it: it is a file, and other members need a directory of this name"


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


def uneven(first: Sequence[FirstSample]) -> LintFinding | None:
    """Return where the first samples of a set differ in their columns; None if they are alike.

    `first` are the first `FIRST_SAMPLES` of its first shard, or all if it has fewer. The webdataset loader of
    Hugging Face's `datasets` takes the columns of a set from these, and raises ValueError if they differ.
    """
    for sample in first[1:FIRST_SAMPLES]:
        if sample.extensions != first[0].extensions:
            here, there = (_listed(own.extensions) for own in (sample, first[0]))
            text = (
                f"has the columns {here}, the first sample {first[0].key} has {there}: "
                f"Hugging Face datasets refuses a set whose first {FIRST_SAMPLES} samples differ in their columns"
            )
            return LintFinding(UNEVEN, sample.offset, sample.key, text)
    return None


def first_samples(members: Iterable[tuple[bytes, bytes]]) -> list[FirstSample]:
    """Return the first samples of these members, given as key and extension, in the order of the tar."""
    grouped: list[tuple[bytes, set[bytes]]] = []
    for key, extension in members:
        if not grouped or grouped[-1][0] != key:
            if len(grouped) == FIRST_SAMPLES:
                break
            grouped.append((key, set()))
        grouped[-1][1].add(extension)
    return [FirstSample(-1, text_of(key), frozenset(extensions)) for key, extensions in grouped]


def _listed(extensions: Iterable[bytes]) -> str:
    """Return columns for a message, the first of many, each cut."""
    return several([names.readable(extension[:80]) for extension in sorted(extensions)], COLUMNS_NAMED)


@dataclass(slots=True)
class Column:
    """Counts for one column of a shard: its members, those of 0 bytes, and some of the latter (offset, name)."""

    members: int = 0
    empty: int = 0
    examples: list[tuple[int, str]] = field(default_factory=list)

    def add_empty(self, name: bytes, offset: int) -> None:
        """Count a member of 0 bytes."""
        self.empty += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append((offset, text_of(name)))


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
        """Count a finding; it is listed if it is one of the first of its kind."""
        self.counts[kind] += 1
        if self.counts[kind] <= EXAMPLES:
            self.findings.append(LintFinding(kind, offset, member, text))

    def add_problems(self, problems: Sequence[Problem], count: int, last: tuple[int, bytes] = (-1, b"")) -> None:
        """Add the problems of a shard, `count` in all; `last` has the head and the name of its last member."""
        for problem in problems:
            member = text_of(last[1]) if problem.offset == last[0] else ""
            self.add(problem.kind, problem.offset, member, problem.text)
        if count > len(problems):
            self.add(problems[0].kind, -1, "", f"and {count - len(problems)} more problems")


def lint(path: bytes, reading: Reading = PLAIN, together: int = 1) -> Lint:
    """Check a shard; `together` remote shards are read at a time. Raises MissingShard, UnreadableShard.

    Data after an end mark and split samples are findings whatever `reading` is: other tools have no such options.
    """
    findings = Lint()
    shard = DOOR.open_shard(path)
    try:
        if isinstance(shard, int) and not stat.S_ISREG(os.fstat(shard).st_mode):
            raise UnreadableShard(f"{os.fsdecode(path)}: is not a regular file")
        record_of_file.begin(shard)
        reader = _ShardLinter(findings, reading)
        with compressed.opened(shard, path) as (tar, problem, kind):
            if kind is not None and path.endswith(b".tar"):
                text = f"is called .tar, but {kind}-compressed: webdataset reads it; DALI, Energon and wids do not"
                findings.add("compressed", -1, "", text)
            problems = Problems([] if problem is None else [problem])
            marks = reading.marks()
            for chunk in scan.scan(record_of_file.reader_of(shard, tar, together), problems, marks=marks):
                reader.read(chunk)
            reader.end()
            reader.find_clashes(tar)
            if not findings.samples and all(problem.kind in HARMLESS for problem in problems.listed()):
                findings.add("no samples", -1, "", _no_samples_text(findings.members))
        if marks:
            findings.add("behind end mark", marks[0], "", _joined_text(len(marks)))
        findings.add_problems(_with_way_out(problems.listed(), path), len(problems), reader.last)
        fd = shard if isinstance(shard, int) and tar is shard else None
        for side, text in () if fd is None else _side_indexes(path, fd, reading):
            findings.add("wrong index", -1, "", f"{os.fsdecode(side)}: {text}")
    except StaleShard as error:
        raise UnreadableShard(f"{error}; try again when it is finished") from None
    except OSError as error:
        raise UnreadableShard(f"{os.fsdecode(path)}: {error.strerror}") from None
    finally:
        source.close(shard)
    return findings


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


def _split_sample_text(first: int, gathered: bool = False) -> str:
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
            findings.add("split sample", offsets[1], text_of(paths[entry]), _split_sample_text(offsets[0]))


def _find_patterns(record: Record, samples: NDArray[np.int64], starts: NDArray[np.int64], findings: Lint) -> None:
    """Count samples by the set of their extensions."""
    extensions = [record.extension_name[number] for number in range(len(record.extension_name))]
    numbers, counts = record.array("member.ext").astype(np.int64), starts[samples + 1] - starts[samples]
    for count in np.unique(counts).tolist():
        alike = samples[counts == count]
        rows = np.sort(numbers[starts[alike][:, None] + np.arange(count)], axis=1)
        kinds, which, times = np.unique(rows, axis=0, return_inverse=True, return_counts=True)
        for kind, (row, number) in enumerate(zip(kinds.tolist(), times.tolist(), strict=True)):
            pattern = frozenset(extensions[column] for column in row)
            findings.patterns[pattern] = findings.patterns.get(pattern, 0) + number
            examples = findings.examples.setdefault(pattern, [])
            for entry in alike[np.flatnonzero(which.reshape(-1) == kind)[: EXAMPLES - len(examples)]].tolist():
                examples.append((record.member(int(starts[entry])).head, text_of(record.entry_path(entry))))


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
            split = names.split(name) if kind == headers.REGULAR else None
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
            self.findings.add("unextractable", offset, text_of(name), f"tar cannot extract it: {why}")

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
        splits = filter(None, map(names.split, self.dotted))
        if any(_digest(sample.folder + sample.stem) in self.seen for sample in splits):
            for chunk in scan.scan(source, Problems(), marks=self.reading.marks()):
                rows = zip(chunk.heads.tolist(), chunk.names, chunk.types.tolist(), strict=True)
                clashes += [
                    (at, name) for at, name, kind in rows if kind == headers.REGULAR and name in self.dotted
                ]
        for offset, name in sorted(set(clashes)):
            self.findings.add("unextractable", offset, text_of(name), FILE_AND_FOLDER)

    def _stray(self, name: bytes, kind: int, offset: int) -> None:
        text = text_of(name)
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
            text = f"the extension {text_of(extension)!r} occurs twice in the sample; webdataset refuses it"
            self.findings.add("duplicate extension", offset, text_of(name), text)
        elif names.lower_case(extension) in self.lowered:
            text = "two extensions of the sample differ in letter case only; webdataset refuses it"
            self.findings.add("duplicate extension", offset, text_of(name), text)
        if names.lower_case(extension) in names.RESERVED:
            text = f"webdataset uses {text_of(extension)!r} itself and refuses such a column"
            self.findings.add("reserved extension", offset, text_of(name), text)
        self.extensions.add(extension)
        self.lowered.add(names.lower_case(extension))
        if _is_odd(extension) or (not names.are_plain([name]) and any(map(_is_odd, _shown_components(name)))):
            self.findings.add(
                "odd name", offset, text_of(name), "the name cannot be a file name; an escaped name is shown"
            )

    def _column(self, name: bytes, extension: bytes, offset: int, size: int) -> None:
        """Count a member of a column, and look for dots and bytes in its name that other readers trip over."""
        columns = self.findings.columns
        column = columns.get(extension)
        if column is None and len(columns) < COLUMNS:
            column = columns[extension] = Column()
        if column is not None:
            column.members += 1
            if not size:
                column.add_empty(name, offset)
        if b"." in extension:
            self.dotted_names.add(name, extension, offset)
        if not name.isascii() and not names.is_utf8(name):
            text = "the name is not UTF-8: Hugging Face datasets and Energon cannot store it; rename the file"
            self.findings.add("not UTF-8", offset, text_of(name), text)

    def _key(self, key: bytes, offset: int) -> None:
        digest = _digest(key)
        first = self.seen.setdefault(digest, offset)
        if first == offset:
            self.findings.keys.append(digest)
            self.findings.offsets.append(offset)
        else:
            text = _split_sample_text(first, gathered=self.gathered is not None)
            self.findings.add("split sample", offset, text_of(key), text)
        if self.gathered is not None:
            self.offset, _, self.extensions = self.gathered.setdefault(digest, (offset, key, self.extensions))
            self.lowered = set(map(names.lower_case, self.extensions))

    def end_sample(self) -> None:
        """Count the current sample."""
        if self.key is None:
            return
        if len(self.findings.first) < FIRST_SAMPLES:
            self.findings.first.append(FirstSample(self.offset, text_of(self.key), frozenset(self.extensions)))
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
            self.findings.add("dotted name", self.dotted_names.place, text_of(self.dotted_names.name), text)

    def _count(self, offset: int, key: bytes, extensions: set[bytes]) -> None:
        self.findings.samples += 1
        pattern = frozenset(extensions)
        if pattern in self.findings.patterns or len(self.findings.patterns) < PATTERNS:
            self.findings.patterns[pattern] = self.findings.patterns.get(pattern, 0) + 1
            examples = self.findings.examples.setdefault(pattern, [])
            if len(examples) < EXAMPLES and self.example_count < KEPT:
                examples.append((offset, text_of(key)))
                self.example_count += 1


class Judge:
    """Findings about the shards of a set together."""

    def __init__(self) -> None:
        self.samples = 0
        self.members = 0
        self.extensions: Counter[bytes] = Counter()
        self._shards: list[tuple[str, Lint]] = []

    def findings(
        self, shards: Sequence[Shard], reading: Reading, jobs: int, workers: Workers | None
    ) -> Iterator[tuple[str, LintFinding]]:
        """Check all shards of a set, by several processes; yield the findings with the path of their shard."""
        look = functools.partial(lint, reading=reading, together=process_pool.together(shards, workers))
        for shard, result in process_pool.each(look, shards, jobs, workers):
            path = os.fsdecode(shard.path)
            if isinstance(result, ShardError):
                yield path, LintFinding(UNREADABLE, -1, "", str(result))
            else:
                yield from ((path, finding) for finding in self.add(path, result, shard.miscount(result.samples)))
        yield from (*self.shared_keys(), *self.missing(), *self.uneven(), *self.late(), *self.empty())

    def add(self, path: str, shard: Lint, miscount: str = "") -> Iterator[LintFinding]:
        """Add a shard; yield its findings. `miscount` is the text about an unexpected number of samples."""
        if miscount:
            yield LintFinding("sample count", -1, "", miscount)
        self.samples += shard.samples
        self.members += shard.members
        for pattern, count in shard.patterns.items():
            for extension in pattern:
                self.extensions[extension] += count
        yield from shard.findings
        for kind, count in shard.counts.items():
            if count > EXAMPLES:
                yield LintFinding(kind, -1, "", f"and {count - EXAMPLES} more of this kind")
        shard.findings.clear()  # yielded; the rest is needed for findings over the whole set
        self._shards.append((path, shard))

    def shared_keys(self) -> Iterator[tuple[str, LintFinding]]:
        """Yield for each shard the earlier shards (by path) that have some of its keys.

        Equal digests count as equal keys.
        """
        if not self._shards:
            return
        self._shards.sort(key=lambda shard: shard[0])  # they come in the order in which they were read
        keys = np.concatenate([np.frombuffer(shard.keys, np.uint64) for _, shard in self._shards])
        offsets = np.concatenate([np.frombuffer(shard.offsets, np.int64) for _, shard in self._shards])
        counts = [len(shard.keys) for _, shard in self._shards]
        owners = np.repeat(np.arange(len(counts), dtype=np.uint32), counts)
        order = np.argsort(keys, kind="stable")
        same = np.flatnonzero(keys[order][1:] == keys[order][:-1])
        later, earlier = order[same + 1], order[same]
        pairs: dict[tuple[int, int], tuple[int, int]] = {}
        for later_shard, earlier_shard, offset in zip(
            owners[later].tolist(), owners[earlier].tolist(), offsets[later].tolist(), strict=True
        ):
            count, first = pairs.get((later_shard, earlier_shard), (0, offset))
            pairs[later_shard, earlier_shard] = count + 1, min(first, offset)
        for (later_shard, earlier_shard), (count, first) in sorted(pairs.items()):
            text = f"{count} of its keys are also in {self._shards[earlier_shard][0]}; here is the first"
            yield self._shards[later_shard][0], LintFinding("shared key", first, "", text)

    def uneven(self) -> Iterator[tuple[str, LintFinding]]:
        """Yield a note if Hugging Face's loader would refuse the set; it looks at the first shard with samples."""
        self._shards.sort(key=lambda shard: shard[0])
        path, first = next(((path, shard.first) for path, shard in self._shards if shard.first), ("", []))
        finding = uneven(first)
        if finding is not None:
            yield path, finding

    def late(self) -> Iterator[tuple[str, LintFinding]]:
        """Yield the columns that the first samples of the set lack, which Hugging Face's loader drops.

        It is a finding where a sample with such a column lacks one of the first, which the loader fills with None.
        """
        counts, places = self._late_columns()
        for extension, kind in itertools.islice(counts, EXAMPLES):
            path, offset, key = places[extension, kind]
            yield path, LintFinding(kind, offset, key, _late_text(extension, counts[extension, kind], kind))
        rest = [kind for _, kind in itertools.islice(counts, EXAMPLES, None)]
        if rest:
            kind = LATE if LATE in rest else EXTRA
            yield self._shards[0][0], LintFinding(kind, -1, "", f"and {len(rest)} more columns")

    def _late_columns(self) -> tuple[Counter[tuple[bytes, str]], dict[tuple[bytes, str], tuple[str, int, str]]]:
        """Return for each such column, by its kind, the number of samples that have it, and the first of them."""
        self._shards.sort(key=lambda shard: shard[0])
        first = next((shard.first for _, shard in self._shards if shard.first), [])
        known = {names.lower_case(extension) for sample in first for extension in sample.extensions}
        counts = Counter[tuple[bytes, str]]()
        places: dict[tuple[bytes, str], tuple[str, int, str]] = {}
        for path, shard in self._shards:
            for pattern, count in shard.patterns.items():
                lowered = {extension: names.lower_case(extension) for extension in pattern}
                kind = LATE if known.difference(lowered.values()) else EXTRA
                for extension in pattern:
                    if lowered[extension] not in known:
                        counts[extension, kind] += count
                        places.setdefault((extension, kind), (path, *(shard.examples[pattern] or [(-1, "")])[0]))
        return counts, places

    def empty(self) -> Iterator[tuple[str, LintFinding]]:
        """Yield members of 0 bytes in columns of which most members have content, by shard."""
        members, empty = Counter[bytes](), Counter[bytes]()
        for _, shard in self._shards:
            for extension, column in shard.columns.items():
                members[extension] += column.members
                empty[extension] += column.empty
        usual = {extension for extension, count in members.items() if 2 * empty[extension] < count}
        usual -= {extension for extension in usual if extension.lower().rpartition(b".")[2] in MAY_BE_EMPTY}
        for path, shard in self._shards:
            columns = [column for extension, column in shard.columns.items() if extension in usual]
            examples = sorted(example for column in columns for example in column.examples)[:EXAMPLES]
            rest = sum(column.empty for column in columns) - len(examples)
            text = "has 0 bytes, and most members of its column have content"
            yield from ((path, LintFinding(EMPTY, offset, name, text)) for offset, name in examples)
            if rest:
                yield path, LintFinding(EMPTY, -1, "", f"and {rest} more of this kind")

    def missing(self) -> Iterator[tuple[str, LintFinding]]:
        """Yield the samples without an extension that more than half of all samples have, by shard."""
        self._shards.sort(key=lambda shard: shard[0])
        usual = {extension for extension, count in self.extensions.items() if 2 * count > self.samples}
        for path, shard in self._shards:
            listed = rest = 0
            for pattern, count in shard.patterns.items():
                absent = usual - pattern
                if not absent:
                    continue
                text = _absent_text(absent, pattern)
                examples = shard.examples[pattern][: EXAMPLES - listed]
                listed += len(examples)
                rest += count - len(examples)
                for offset, key in examples:
                    yield path, LintFinding("missing extension", offset, key, text)
            if rest:
                text = f"and {rest} more samples that lack an extension that most others have"
                yield path, LintFinding("missing extension", -1, "", text)


def _late_text(extension: bytes, samples: int, kind: str) -> str:
    fills = ", and fills the columns that these samples lack with None" if kind == LATE else ""
    have = f"the column {_listed([extension])} is in {counted(samples, 'sample')} of the set, first in this one"
    return f"{have}; none of the first {FIRST_SAMPLES} samples has it: Hugging Face datasets drops it{fills}"


def _absent_text(absent: Iterable[bytes], there: Iterable[bytes]) -> str:
    """Return which extensions a sample lacks, with those in another letter case, which webdataset accepts."""
    cases = {names.lower_case(extension): extension for extension in there}
    parts = []
    for extension in sorted(absent):
        other = cases.get(names.lower_case(extension))
        more = "" if other is None else f", but {text_of(other)} (the same to webdataset, not to others)"
        parts.append(text_of(extension) + more)
    return "has no " + several(parts, COLUMNS_NAMED)


@functools.lru_cache(1024)
def _is_odd(component: bytes) -> bool:
    return names.escape(component) != component


def _shown_components(name: bytes) -> list[bytes]:
    folder, base = names.split_folder(name)
    return [*names.folder_components(folder), base]


def _digest(key: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


def text_of(name: bytes) -> str:
    """Return a name as text, with bytes that are not UTF-8 escaped."""
    return name.decode("utf-8", "backslashreplace")


def findings_of_set(below: ShardSet, unreadable: Iterable[bytes]) -> Iterator[str]:
    """Yield the findings in an open set, for `--strict`.

    These are damage, split samples and missing columns, as records show them, and members that a view cannot make.
    `unreadable` are the paths of shards that are left out.
    """
    judge, known = Judge(), set(unreadable)
    for lower in below.sources:
        for number, shard in enumerate(lower.shards):
            if shard.path in known:
                continue
            known.add(shard.path)
            path = os.fsdecode(shard.path)
            try:
                findings = lint_record(indexed(lower.record, number))
            except ShardError as error:
                yield str(error)
                continue
            yield from (finding.line(path) for finding in judge.add(path, findings))
    yield from (finding.line(path) for path, finding in judge.missing())
    if isinstance(below, ViewSet):
        missing = below.keys_missing()
        yield from [] if missing is None else [missing]
        yield from _findings_of_view(below)


def _findings_of_view(below: ShardSet) -> Iterator[str]:
    for number in below.numbers:
        with suppress(ShardError):  # reported already, of its source shard
            record, path = indexed(below.record, number), below.path_text(number)
            of_view = [problem for problem in record.problems if problem.kind == BROKEN_FIELD]
            yield from (
                LintFinding(problem.kind, problem.offset, "", problem.text).line(path) for problem in of_view
            )
            further = record.problem_count - len(record.problems)
            if of_view and further:
                yield LintFinding(of_view[0].kind, -1, "", f"and {further:,} more problems").line(path)
