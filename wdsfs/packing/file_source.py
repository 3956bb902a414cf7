"""A tree of files as a source of new shards: plans which samples go into each, by count, size and split.

The same files and options give the same plan, so a command that is repeated finds its own shards again. A set may
have 100 million files, so no Python object of a file is kept.
"""

from __future__ import annotations

import itertools
import json
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdsfs.cluster_workers import Workers
from wdsfs.errors import CommitError, UsageError, counted, several
from wdsfs.names import bytes_of, lower_case, partition, raw_key, without_dots
from wdsfs.packing import file_samples, reasons
from wdsfs.packing.file_table import LeftOut, WalkRules, walk
from wdsfs.packing.plan import (
    MAXSIZE,
    NEW,
    NewMember,
    Numbers,
    Output,
    Piece,
    PlainBytes,
    Plan,
    ShownSamples,
    Step,
    Targets,
    Zeros,
    namer,
    refuse_below,
    refuse_output,
    rolled,
)
from wdsfs.packing.runner import Runner
from wdsfs.packing.sample_tables import AT_ONCE, Added, SampleTables
from wdsfs.packing.shard_writer import Files
from wdsfs.tar import headers
from wdsfs.tar.headers import BLOCK
from wdsfs.tree.companions import class_names_in, read_class_names
from wdsfs.tree.composition import Column

# Less work than this is finished here before other processes have started.
ALONE_FILES, ALONE_BYTES = 4_000, 64 << 20

# Samples in a shard. Not the 100,000 of webdataset's ShardWriter: a loader wants more shards than it has workers,
# also of a set of small files.
MAXCOUNT = 10_000

AS_NUMBER, AS_NAME, AS_NONE = "number", "name", "none"
SPLIT_FIELD = "{split}"
CLASSES_NAME = b"classes"

LISTED_FILES_MAX = 10  # files left out that an error names


@dataclass(frozen=True, slots=True)
class PackOptions:
    """Options of the command line.

    `output` names the new shards: `%06d` or braces for the number, `{split}` for the split: of `splits`, or if
    there are none, the directory at the top that the files are in. `class_as` is the
    content of the column of the class: AS_NUMBER, AS_NAME, or AS_NONE for no such column. `class_names` is a file
    of classes by number. `shuffle` is a seed, `order` a file of keys. `mtime` (seconds) is the time of all
    members. `leave_out`: go ahead without files that cannot be packed. Of SHARDS, `keep_shards` makes a new shard
    of each one, and `sort` puts the samples of each in the order of their keys. `tables` are files with a row for
    each sample, of which `columns` become members, or all columns. `last_dot` (of files) is that of
    `names.Reading`.
    """

    output: str
    layout: str = file_samples.AUTO
    class_as: str = AS_NUMBER
    class_column: str = "cls"
    class_names: str | None = None
    shuffle: str | None = None
    order: str | None = None
    splits: tuple[file_samples.Split, ...] = ()
    maxcount: int = MAXCOUNT
    maxsize: float = MAXSIZE
    mtime: int | None = None
    leave_out: bool = False
    sort: bool = False
    keep_shards: bool = False
    walk: WalkRules = field(default_factory=WalkRules)
    tables: tuple[str, ...] = ()
    columns: tuple[Column, ...] = ()
    last_dot: bool = False

    def check(self, *, of_files: bool = True) -> PackOptions:
        """Return the same. Raises UsageError for options that do not go together, and names no shard can have."""
        column = os.fsencode(self.class_column)
        odd = column.startswith(b".") or b"/" in column or b"\0" in column
        if not column or odd or reasons.misread(b"sample", column) is not None:
            raise UsageError(f"--class-column {self.class_column!r} is not an extension: write for example cls")
        if self.shuffle is not None and self.order is not None:
            raise UsageError("--shuffle and --order exclude each other: both say in which order the samples are")
        is_ordered = self.shuffle is not None or self.order is not None or bool(self.splits)
        if self.sort and is_ordered:
            raise UsageError("--sort sorts the samples of each shard: it excludes --shuffle, --order and --split")
        if self.keep_shards and (is_ordered or (self.maxcount, self.maxsize) != (MAXCOUNT, MAXSIZE)):
            raise UsageError(
                "--keep-shards makes a new shard of each one: no --maxcount, --maxsize, --shuffle, --order "
                "and --split"
            )
        if (self.splits and SPLIT_FIELD not in self.output) or (not of_files and self.by_folder):
            raise UsageError(
                "--split and {split} in --output belong together: --split train=0.9 --split val=0.1 "
                "-o 'out/{split}-%06d.tar'"
            )
        if self.class_as == AS_NONE and self.class_names is not None:
            raise UsageError("--class-names is for the column of the classes, which --class-as none leaves out")
        if of_files and self.columns and not self.tables:
            raise UsageError("--columns chooses columns of SHARDS, or of --table FILE: name the table")
        for split in [split.name for split in self.splits] or ["train"]:
            refuse_output(self.output.replace(SPLIT_FIELD, split))
        return self

    @property
    def by_folder(self) -> bool:
        """True if each directory at the top is a split."""
        return SPLIT_FIELD in self.output and not self.splits

    def name_of(self, split: str) -> Callable[[int], bytes]:
        """Return the paths of the new shards of a split by number. Raises UsageError."""
        return namer(self.output.replace(SPLIT_FIELD, split))

    @property
    def names(self) -> list[Callable[[int], bytes]]:
        """Return the paths of new shards by number, for each split, or for the whole set. Raises UsageError."""
        return [self.name_of(split.name) for split in self.splits] or [self.name_of("")]


@dataclass(frozen=True, slots=True)
class FileColumns:
    """The pieces of a shard, as columns and not as objects, because columns are made and sent quickly.

    `directories` are absolute paths; `prefixes` stand in front of the names of their files in the tar. The columns
    have a row for each file: its name (with a NUL between any two), the number of its directory, its size in
    bytes, its mtime in ns. `seconds` is the time of all members; None: each has its own. `starts` has the first
    file of each sample, `added` the further members of each sample (empty if no sample gets any). `last_dot`: keys
    may have dots.
    """

    directories: tuple[bytes, ...]
    prefixes: tuple[bytes, ...]
    names: bytes
    directory_of: array[int]
    sizes: array[int]
    times_ns: array[int]
    starts: array[int]
    added: Sequence[Added] = ()
    seconds: int | None = None
    last_dot: bool = False

    def __iter__(self) -> Iterator[Piece]:
        yield from self._with_added() if self.added else self._files()
        yield Zeros(len(headers.END))

    def _files(self) -> Iterator[NewMember]:
        names = self.names.split(b"\0")
        prefixes, above = self.prefixes, [path + b"/" for path in self.directories]
        written = map(_without_dots, names) if self.last_dot else names
        return map(
            NewMember,
            [prefixes[at] + name for at, name in zip(self.directory_of, written, strict=False)],
            [above[at] + name for at, name in zip(self.directory_of, names, strict=False)],
            self.sizes,
            self.times_ns,
            itertools.repeat(()),
            itertools.repeat(None),
            itertools.repeat(self.seconds),
        )

    def _with_added(self) -> Iterator[NewMember]:
        files = list(self._files())
        stops = itertools.chain(self.starts[1:], [len(files)])
        for start, stop, added in zip(self.starts, stops, self.added, strict=True):
            first = files[start]
            key = raw_key(first.name) or b""  # written keys have no dots
            # Each at its place among the names, with the time of the sample.
            new = (
                NewMember(key + b"." + extension, b"", len(content), first.mtime_ns, (), content, self.seconds)
                for extension, content in added
            )
            yield from sorted([*files[start:stop], *new], key=itemgetter(0))


def _without_dots(name: bytes) -> bytes:
    stem, dot, extension = partition(name, last_dot=True)
    return without_dots(stem) + dot + extension


class PlannedFiles:
    """The pieces of a planned shard, of these samples. Their columns are made when they are written, or sent."""

    def __init__(self, plan: FilePlan, samples: Numbers) -> None:
        self._plan, self._samples = plan, samples

    def __iter__(self) -> Iterator[Piece]:
        return iter(self._columns())

    def __reduce__(self) -> tuple[type[FileColumns], tuple[Any, ...]]:
        columns = self._columns()
        return FileColumns, tuple(getattr(columns, column.name) for column in fields(columns))

    def _columns(self) -> FileColumns:
        samples, table, options = self._plan.samples, self._plan.samples.table, self._plan.options
        rows, starts = samples.rows_of(self._samples)
        directories, directory_of = np.unique(samples.directory_of[self._samples], return_inverse=True)
        counts = np.diff(np.append(starts, len(rows)))
        return FileColumns(
            tuple(table.path_of(table.directories[number]) for number in directories.tolist()),
            tuple(map(samples.prefix, directories.tolist())),
            table.names_of(rows),
            array("i", np.repeat(directory_of.astype(np.int32), counts).tobytes()),
            array("q", np.frombuffer(table.sizes, np.int64)[rows].tobytes()),
            array("q", np.frombuffer(table.times_ns, np.int64)[rows].tobytes()),
            array("q", starts.tobytes()),
            self._plan.added_to(self._samples),
            options.mtime,
            options.last_dot,
        )


class FilePlan(Plan):
    """The plan of shards of `samples`. `labels` is the content of the column of the class, by class.

    `splits` has the split of each shard, "" if there are none. `losses` are all files that are in no shard.
    """

    def __init__(
        self,
        samples: file_samples.Samples,
        options: PackOptions,
        labels: Sequence[bytes],
        losses: LeftOut,
        tables: SampleTables,
    ) -> None:
        super().__init__(left_out=losses.named)
        self.samples, self.options, self.labels, self.losses = samples, options, labels, losses
        self.tables = tables
        self.splits: list[str] = []

    @property
    def layout(self) -> file_samples.Layout:
        return self.samples.layout

    @property
    def remarks(self) -> list[str]:
        """Return what users and readers of the new set may not expect, a line each."""
        unused = [text for text in self.options.walk.exclude if not self.losses.excluded[text]]
        lines = [f"--exclude {text}: no file has this name, or path below DIRECTORY" for text in unused]
        return [*lines, *self.tables.remarks, *file_samples.remarks(self.samples)]

    @property
    def guesses(self) -> list[str]:
        """Return the guesses, a line each, with the option that decides otherwise."""
        options = self.options
        lines = list(self.tables.guesses)
        if options.layout == file_samples.AUTO:
            is_numbered = self.labels and options.class_as == AS_NUMBER
            label = f", {options.class_column} has their numbers (--class-as)" if is_numbered else ""
            lines.append(f"packed as {self.layout.text}{label}; if that is wrong, use --layout")
        if options.by_folder:
            folders = several(list(dict.fromkeys(self.splits)))
            otherwise = "--split NAME=FRACTION divides the samples by chance instead"
            lines.append(f"each folder becomes a split ({folders}); {otherwise}")
        return lines

    def added_to(self, samples: Numbers) -> list[Added]:
        """Return the members that each of these samples gets beside its files; an empty list if none gets any."""
        column = os.fsencode(self.options.class_column)
        members: list[Added] = [((column, label),) for label in self.labels]
        added = [members[label] for label in self.samples.class_of[samples].tolist()] if members else []
        if not self.tables.extensions:
            return added
        rows = self.tables.members_of([*map(self.samples.key, samples.tolist())])
        return [(*label, *row) for label, row in zip(added or itertools.repeat(()), rows, strict=False)]

    def mtime_of(self, mtime_ns: int) -> int:
        """Return the time that a member has in its header, in seconds."""
        return mtime_ns // 10**9 if self.options.mtime is None else self.options.mtime


def pack_files(
    plan: FilePlan,
    jobs: int = 1,
    on_bytes: Callable[[int], None] = lambda _: None,
    workers: Workers | None = None,
    *,
    space_check: bool = True,
) -> list[Step]:
    """Write the shards of a plan that are not there yet, and return them. Raises as `Runner.write`."""
    small = plan.length < ALONE_BYTES and len(plan.samples.rows) < ALONE_FILES
    runner = Runner(
        plan,
        Files(follow_links=plan.options.walk.follow_links),
        jobs=jobs,
        on_bytes=on_bytes,
        processes=1 if small else jobs,
        workers=workers,
        space_check=space_check,
    )
    return runner.write()


def make_plan(directories: Sequence[str], options: PackOptions) -> FilePlan:
    """Plan a set of the files in these directories. Writes nothing.

    Raises UsageError for options that do not go together, CommitError if something cannot be packed.
    """
    options.check()
    left_out = LeftOut()
    with_names = options.by_folder and file_samples.are_splits(directories)
    tops = [os.path.dirname(os.path.abspath(path)) for path in directories] if with_names else directories
    tables = SampleTables(options.tables, options.columns, tops, with_keys=options.last_dot)
    table = walk(directories, options.walk._replace(tables=tables.paths), left_out, with_names=with_names)
    if not len(table):
        _refuse_losses(left_out, options)
    layout = file_samples.layout_of(table, options.layout, by_split=options.by_folder, last_dot=options.last_dot)
    samples = file_samples.group(table, layout, left_out, _added_columns(layout, options, tables))
    order = file_samples.order_of(samples, options.shuffle, options.order, left_out)
    _refuse_losses(left_out, options)
    if not len(order):
        raise CommitError(f"there is no sample to pack in {', '.join(directories)}, {layout.text}")
    tables.measure(samples)
    samples.sizes = samples.sizes + tables.sizes
    plan = FilePlan(samples, options, _labels(samples, options), left_out, tables)
    _distribute(plan, order)
    _refuse_clashes(plan)
    _account(plan)
    classes = _classes_file(plan)
    plan.beside += [] if classes is None else [classes]
    return plan


def _added_columns(layout: file_samples.Layout, options: PackOptions, tables: SampleTables) -> dict[bytes, str]:
    """Return the extensions that samples may get, in lower case, and what renames each. Raises UsageError."""
    added = dict(tables.extensions)
    if layout.name == file_samples.CLASSES and options.class_as != AS_NONE:
        column = lower_case(os.fsencode(options.class_column))
        if column in added:
            text = f"--class-column {options.class_column}: another column that pack adds has this name"
            raise UsageError(f"{text}: rename one, the other with {added[column]}, or use --class-as none")
        added[column] = "--class-column NAME, or use --class-as none"
    return added


def _refuse_losses(left_out: LeftOut, options: PackOptions) -> None:
    if left_out.unpackable_count and not options.leave_out:
        raise CommitError(
            f"{counted(left_out.unpackable_count, 'file')} cannot be packed:",
            *_listing(left_out),
            "--leave-out packs all others",
        )


def _listing(left_out: LeftOut) -> list[str]:
    lines = [f"  {os.fsdecode(remark.path)}: {remark.reason}" for remark in left_out.unpackable[:LISTED_FILES_MAX]]
    more = left_out.unpackable_count - len(lines)
    return lines + ([f"  ... and {more} more"] if more else [])


# --- classes -------------------------------------------------------------------------------------------------


def _labels(samples: file_samples.Samples, options: PackOptions) -> list[bytes]:
    """Return the content of the column of the class, by class. Raises UsageError, CommitError."""
    if samples.layout.name != file_samples.CLASSES:
        if options.class_names is not None:
            raise UsageError(f"--class-names is for --layout classes, and these are {samples.layout.text}")
        return []
    if options.class_as == AS_NONE:
        return []
    if options.class_as == AS_NAME and options.class_names is None:
        return samples.classes
    numbers = {name: b"%d" % number for number, name in enumerate(samples.classes)}
    if options.class_names is not None:
        given = read_class_names(options.class_names)
        numbers = {bytes_of(name): bytes_of(label) for label, name in given.items()}
    unknown = [name for name in samples.classes if name not in numbers]
    if unknown:
        raise CommitError(f"--class-names {options.class_names} has no class {os.fsdecode(unknown[0])!r}")
    return samples.classes if options.class_as == AS_NAME else [numbers[name] for name in samples.classes]


def _classes_file(plan: FilePlan) -> Step | None:
    options = plan.options
    if not plan.labels or options.class_as != AS_NUMBER or options.class_names is not None:
        return None
    texts = [name.decode("utf-8", "surrogateescape") for name in plan.samples.classes]
    # Most tools read a list of lines, but such a list cannot hold all names.
    suffix, content = b".txt", b"".join(name + b"\n" for name in plan.samples.classes)
    try:
        plain = class_names_in(content) == texts
    except (ValueError, RecursionError):  # not UTF-8; or like JSON
        plain = False
    if not plain:
        suffix, content = b".json", json.dumps(texts, indent=1).encode()
    # Not `commonpath`: that takes `s3://` for a path.
    parts = zip(*(os.path.dirname(step.target).split(b"/") for step in plan.steps), strict=False)
    common = [some[0] for some in itertools.takewhile(lambda some: len(set(some)) == 1, parts)]
    output = Output(b"/".join([*common, CLASSES_NAME + suffix]), [PlainBytes(content)])
    return Step(output, NEW, None, 0)


# --- samples to shards -----------------------------------------------------------------------------------------


def _distribute(plan: FilePlan, order: Numbers) -> None:
    """Make the shards of the plan."""
    options = plan.options
    sizes, lengths = plan.samples.sizes, _lengths(plan)
    for title, numbers in _splits(plan, order).items():
        name, count = options.name_of(title), 0
        stop = 0
        # Only counted: a set may have 100 million samples.
        sized = zip(itertools.repeat(None), sizes[numbers].tolist(), itertools.repeat(None), strict=False)
        for count, some in enumerate(rolled(sized, options.maxcount, options.maxsize), 1):
            placed, stop = numbers[stop : stop + len(some)], stop + len(some)
            length = int(lengths[placed].sum()) + len(headers.END)
            output = Output(name(count - 1), PlannedFiles(plan, placed), None, length)
            plan.steps.append(Step(output, NEW, None, len(placed)))
            plan.splits.append(title)
        if "%" in options.output:
            plan.beyond.append(name(count))


def _splits(plan: FilePlan, order: Numbers) -> dict[str, Numbers]:
    """Return the samples of each split by its name, "" if there are none. Raises CommitError."""
    splits = plan.options.splits
    if plan.options.by_folder:
        return file_samples.folder_splits(plan.samples, order)
    parts = file_samples.split_of(plan.samples, order, splits) if splits else [order]
    return dict(zip([split.name for split in splits] or [""], parts, strict=True))


def _account(plan: FilePlan) -> None:
    """Compare each planned shard with what a reader finds in it. Raises CommitError."""
    for step in plan.steps:
        shown = ShownSamples(step)
        for piece in step.output.pieces:
            if isinstance(piece, NewMember):
                shown.add_member(piece.name)
        shown.compare()


def _lengths(plan: FilePlan) -> Numbers:
    """Return how many bytes of a tar each sample takes."""
    samples, table = plan.samples, plan.samples.table
    lengths = _in_blocks(np.frombuffer(table.sizes, np.int64))
    long = _long_headers(plan)
    for number in np.flatnonzero(long).tolist():
        directory, prefix = table.directories[number], samples.prefix(number)
        for row in range(directory.first, directory.stop):
            time = plan.mtime_of(table.times_ns[row])
            lengths[row] += len(headers.encode(prefix + table.name(row), table.sizes[row], time)) - BLOCK
    totals: Numbers = np.add.reduceat(lengths[samples.rows], samples.starts[:-1]) + plan.tables.lengths
    if plan.labels:
        totals += _in_blocks(np.array([len(label) for label in plan.labels], np.int64))[samples.class_of]
    numbers = np.flatnonzero(long[samples.directory_of])
    for some in np.split(numbers, range(AT_ONCE, len(numbers), AT_ONCE)):
        for sample, added in zip(some.tolist(), plan.added_to(some), strict=False):
            key, first = samples.key(sample), int(samples.rows[samples.starts[sample]])
            time = plan.mtime_of(table.times_ns[first])
            for extension, content in added:
                totals[sample] += len(headers.encode(key + b"." + extension, len(content), time)) - BLOCK
    return totals


def _in_blocks(sizes: Numbers) -> Numbers:
    """Return how many bytes members of these sizes take, with a header of one block."""
    return BLOCK + (sizes + BLOCK - 1) // BLOCK * BLOCK


def _long_headers(plan: FilePlan) -> NDArray[np.bool_]:
    """Return which directories have files whose headers may take more than a block."""
    samples, table = plan.samples, plan.samples.table
    seconds = np.frombuffer(table.times_ns, np.int64) // 10**9
    if plan.options.mtime is not None:
        seconds = np.full(1, plan.options.mtime, np.int64)
    odd = bool(((seconds < 0) | (seconds > headers.OCTAL_MAX)).any())
    odd = odd or bool((np.frombuffer(table.sizes, np.int64) > headers.OCTAL_MAX).any())
    column = 1 + max(map(len, (os.fsencode(plan.options.class_column), *plan.tables.extensions)))
    result = np.full(len(table.directories), odd)
    for number, directory in enumerate(table.directories):
        longest = max(map(len, table.names_in(directory))) + column
        result[number] |= len(samples.prefix(number)) + longest > headers.NAME_BYTES
    return result


def _refuse_clashes(plan: FilePlan) -> None:
    """Raise CommitError if two shards have one name, UsageError if one would be among the packed files."""
    targets = Targets()
    for step in plan.steps:
        targets.add(step.target)
    for root in map(os.fsdecode, plan.samples.table.roots):
        refuse_below(plan, root, f"{root}, which is packed")
