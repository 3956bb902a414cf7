"""The samples of trees of files: their layout, grouping, names in the tar, order and splits.

The layouts are the layouts of a mount, so the tree of a mount can be packed again:

- files: `images/image194.left.jpg`, as `tar x` leaves it; the key is the path up to the first dot of the name.
- samples: `images/image194/left.jpg`, a directory for each sample; with full names, `image194/image194.left.jpg`.
- classes: `cat/image194.jpg`, as ImageFolder has it: files, whose first directory is their class.

Semantics decision: a sample of the packed set has exactly the files that `names.split` assigns to it. `pack`
refuses a file that would be in no sample, or in a different sample; with `leave_out` it leaves the file out.

Order and splits depend only on the keys. So they are the same on every machine, in every version of Python, and
for any order of the files.
"""

from __future__ import annotations

import hashlib
import math
import os
import shlex
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from wdsfs import names
from wdsfs.door.shard_door import DOOR
from wdsfs.errors import CommitError, UsageError, and_others, several
from wdsfs.names import Reading
from wdsfs.packing import reasons
from wdsfs.packing.file_table import FileTable, FoundDirectory, LeftOut
from wdsfs.packing.plan import Numbers
from wdsfs.tree.label_files import KIND_OF_SUFFIX, ORDER, fingerprints_of, label_files, text_of_files
from wdsfs.tree.label_table import missing_text, open_key_list, refuse_shared

AUTO, FILES, SAMPLES, CLASSES = "auto", "files", "samples", "classes"


class Layout(NamedTuple):
    """A layout; `full`: in `samples`, the names of files begin with that of their sample.

    `by_split`: each directory at the top is a split; in `classes` the directories in it are the classes.
    `last_dot` is that of `names.Reading`.
    """

    name: str
    full: bool = False
    by_split: bool = False
    last_dot: bool = False

    @property
    def text(self) -> str:
        """Return the layout in words, for messages."""
        return _TEXTS[self.name] + (", named in full" if self.full else "")

    def class_of(self, directory: FoundDirectory) -> bytes:
        """Return the directory that would be the class of files in this directory; empty if there is none."""
        parts = directory.path.split(b"/", 2)
        return parts[self.by_split] if len(parts) > self.by_split else b""


_TEXTS = {
    FILES: "files (key.ext)",
    SAMPLES: "samples (a directory for each sample)",
    CLASSES: "classes (a directory for each class)",
}


class _Looks(NamedTuple):
    """Properties of the names in a directory, from which its layout is guessed. Hidden files do not count.

    `bare` is the first name without a dot, as columns have in the directory of a sample, `dotted` the first one
    with a dot. `full`: all names begin with the name of the directory. `media`: one file or more is an image, a
    sound or a film. `alone`: each file is either a table, or such a medium and the only file of its key.
    """

    path: bytes
    bare: bytes | None
    dotted: bytes | None
    full: bool
    alone: bool
    media: bool


def layout_of(table: FileTable, name: str, *, by_split: bool = False, last_dot: bool = False) -> Layout:
    """Return the layout of this name, or for AUTO the layout of the files.

    Raises CommitError if the files could mean several layouts, or if there are no files. Raises UsageError if the
    files should be in splits and are not, or if names should have keys and do not.
    """
    if not len(table):
        raise CommitError(f"there is no file to pack in {' or '.join(map(os.fsdecode, table.roots))}")
    if by_split:
        _expect_splits(table)
    if name in (FILES, CLASSES):
        return Layout(name, by_split=by_split, last_dot=last_dot)
    looks = [_looks(table, directory, last_dot=last_dot) for directory in table.directories]
    deep = [look for look in looks if look.path]
    full = bool(deep) and all(look.full for look in deep)
    layout = Layout(SAMPLES, full) if name == SAMPLES else _detected(table, looks, full, by_split=by_split)
    if layout.name == SAMPLES and last_dot:
        raise UsageError(
            f"--key-ends last-dot is for files called key.ext, and these are {layout.text}: choose --layout files"
        )
    return layout._replace(by_split=by_split, last_dot=last_dot)


def _detected(table: FileTable, looks: list[_Looks], full: bool, *, by_split: bool) -> Layout:
    deep = [look for look in looks if look.path]
    bare = next((os.fsdecode(look.bare) for look in deep if look.bare is not None), None)
    dotted = next((os.fsdecode(look.dotted) for look in looks if look.dotted is not None), "")
    at_top = any(look.dotted and not look.path for look in looks)
    if bare is None:
        if full and not at_top:
            return Layout(SAMPLES, True)
        if _are_classes(looks, above=1):
            if not by_split:
                _refuse_splits(table)
            # A single directory in each split (`images`) is hardly a class.
            elif len({look.path.rpartition(b"/")[2] for look in deep if b"/" in look.path}) > 1:
                return Layout(CLASSES)
        if _are_classes(looks, above=int(by_split)):
            example = next(os.fsdecode(look.dotted) for look in deep if look.dotted is not None)
            raise CommitError(
                f"{example}: its directory can be a class (--layout classes, which adds the column cls), or only "
                "a part of the key (--layout files): say which"
            )
        return Layout(FILES)
    if at_top or not all(look.bare for look in deep):
        raise CommitError(
            f"{bare} looks like a column in the directory of a sample, {dotted} like a file of the sample that "
            "its name begins with: say which with --layout files, samples or classes"
        )
    return Layout(SAMPLES, False)


def _are_classes(looks: list[_Looks], above: int = 0) -> bool:
    """Return True if all directories look like classes, `above` directories below the top.

    Files above the classes describe them: `captions.csv`, `README.txt`.
    """
    deep = [look for look in looks if look.path and look.path.count(b"/") >= above]
    if any(look.media for look in looks if not look.path or look.path.count(b"/") < above):
        return False
    return bool(deep) and all(look.path.count(b"/") == above and look.alone and look.media for look in deep)


def _looks(table: FileTable, directory: FoundDirectory, *, last_dot: bool) -> _Looks:
    above, start = table.path_of(directory) + b"/", directory.path.rpartition(b"/")[2] + b"."
    bare = dotted = None
    full, alone, media = True, True, False
    last = b""
    for name in table.names_in(directory):
        stem, dot, extension = names.partition(name, last_dot=last_dot)
        if not stem:
            continue
        if not dot:
            bare = bare or above + name
        else:
            dotted = dotted or above + name
        full = full and name.startswith(start)
        is_media = extension.lower() in names.MEDIA
        alone = alone and (_is_table(name) or (stem != last and is_media))
        last = stem
        media = media or extension.lower().rpartition(b".")[2] in names.MEDIA
    return _Looks(directory.path, bare, dotted, full and dotted is not None, alone and dotted is not None, media)


OUTSIDE = "is outside of a sample: in --layout samples its files are in a directory of its own"
OUTSIDE_CLASS = "is outside of a class: in --layout classes each class is a directory"
OUTSIDE_SPLIT = "is outside of a split: with {split} in --output each split is a directory"
OUTSIDE_TABLE = (
    "is a table, not a sample: --table FILE packs its columns with the samples, --exclude leaves it out"
)
MEETING_WITHOUT_DOTS = "would have the key of another sample, with _ for the dots: rename one of them"
TABLES = frozenset(map(os.fsencode, (suffix[1:] for suffix in KIND_OF_SUFFIX if suffix not in (".json", ".npy"))))

# Names of directories that are parts of a data set, and hardly ever classes.
SPLIT_NAMES = frozenset(b"train training val valid validation dev test testing eval".split())

NO_CLASS = -1


class Samples:
    """The samples of trees, by number, in the order of the walk.

    `sizes` are bytes of content. `classes` are the names of all classes, sorted. Of each sample `class_of` has the
    class (NO_CLASS outside of the layout classes), `directory_of` the number of the directory of its files, and
    `starts` the first place in `rows`, which has the rows of all files. `dotted_names` tells whether dots in names
    have cut keys.
    """

    def __init__(self, table: FileTable, layout: Layout, classes: list[bytes]) -> None:
        self.table, self.layout, self.classes = table, layout, classes
        self.dotted_names = names.DottedNames()
        self.tables = array("q")  # numbers of samples that have a table
        self._rows, self._starts = array("q"), array("q")
        self._directories, self._classes = array("i"), array("i")

    def __len__(self) -> int:
        return len(self._directories)

    def begin(self, directory: int, label: int) -> None:
        """Begin a sample, whose files are in this directory."""
        self._starts.append(len(self._rows))
        self._directories.append(directory)
        self._classes.append(label)

    def add(self, row: int) -> None:
        """Add a file to the sample that was begun last."""
        self._rows.append(row)

    def finish(self) -> None:
        """Turn the samples into columns, without a copy; called after the last one was added."""
        self._starts.append(len(self._rows))
        self.rows, self.starts = np.frombuffer(self._rows, np.int64), np.frombuffer(self._starts, np.int64)
        self.class_of = np.frombuffer(self._classes, np.int32)
        self.directory_of = np.frombuffer(self._directories, np.int32)
        self.sizes = np.zeros(0, np.int64)
        if len(self):
            self.sizes = np.add.reduceat(np.frombuffer(self.table.sizes, np.int64)[self.rows], self.starts[:-1])

    def directory(self, sample: int) -> FoundDirectory:
        """Return the directory of the files of a sample."""
        return self.table.directories[self._directories[sample]]

    def key(self, sample: int) -> bytes:
        """Return the key of a sample. With `last_dot` it may have dots, which the key in the tar does not have."""
        directory = self.directory(sample)
        if self.layout.name == SAMPLES:
            return directory.path
        name = self.table.name(self._rows[self._starts[sample]])
        return directory.prefix + names.partition(name, last_dot=self.layout.last_dot)[0]

    def prefix(self, directory: int) -> bytes:
        """Return the beginning of names in the tar for files of this directory, before the name of the file."""
        place = self.table.directories[directory]
        if self.layout.name != SAMPLES:
            return place.prefix
        return names.split_folder(place.path)[0] if self.layout.full else place.path + b"."

    def rows_of(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows of the files of these samples, in order, and where among them each sample starts."""
        counts = self.starts[numbers + 1] - self.starts[numbers]
        starts = np.cumsum(counts) - counts
        within = np.arange(int(counts.sum())) - np.repeat(starts, counts)
        return self.rows[np.repeat(self.starts[numbers], counts) + within], starts


def group(table: FileTable, layout: Layout, left_out: LeftOut, added: Mapping[bytes, str]) -> Samples:
    """Return the samples; files of none go to `left_out`.

    `added` are the extensions, in lower case, that a sample may get beside its files, each with the option that
    renames it. Raises CommitError for two samples of one key, for a sample that has such an extension already, and
    for classes that are splits.
    """
    if layout.name == CLASSES and not layout.by_split:
        _refuse_splits(table)
    samples = _Grouping(table, layout, left_out, added).run()
    if len(table.roots) > 1:
        _refuse_equal_keys(samples)
    return samples


class _Grouping:
    def __init__(self, table: FileTable, layout: Layout, left_out: LeftOut, added: Mapping[bytes, str]) -> None:
        self.table, self.layout, self.left_out, self.added = table, layout, left_out, added
        self.longest = max(added, key=len, default=None)
        classes = set(map(layout.class_of, table.directories)) - {b""}
        self.samples = Samples(table, layout, sorted(classes) if layout.name == CLASSES else [])

    def run(self) -> Samples:
        labels = {name: number for number, name in enumerate(self.samples.classes)}
        for number, directory in enumerate(self.table.directories):
            if self.layout.name == SAMPLES:
                self._sample_directory(number, directory)
            else:
                self._files(number, directory, labels.get(self.layout.class_of(directory), NO_CLASS))
        self.samples.finish()
        return self.samples

    def _refuse(self, directory: FoundDirectory, name: bytes, reason: str) -> None:
        self.left_out.refuse(self.table.path_of(directory) + b"/" + name, reason)

    def _sample_directory(self, number: int, directory: FoundDirectory) -> None:
        """Take the files of a directory as one sample."""
        key = directory.path
        start = names.split_folder(key)[1] + b"." if self.layout.full else b""
        begun, taken = False, set[bytes]()
        for row, name in enumerate(self.table.names_in(directory), directory.first):
            extension = name[len(start) :]
            reason = None if key else _outside(name, OUTSIDE)
            if reason is None and not name.startswith(start):
                reason = reasons.OTHER_STEM
            if not begun and self.longest is not None:
                reason = reason or reasons.misread(key, self.longest)
            reason = reason or reasons.obstacle(key, extension, taken)
            if reason is not None:
                self._refuse(directory, name, reason)
                continue
            if not begun:
                self.samples.begin(number, NO_CLASS)
                begun = True
            if not self.added.keys().isdisjoint(taken):
                self._refuse_column(directory, name, names.lower_case(extension))
            self.samples.add(row)

    def _files(self, number: int, directory: FoundDirectory, label: int) -> None:
        """Take the files of a directory as samples, grouped by the beginnings of their names."""
        outside = OUTSIDE_SPLIT if self.layout.by_split and not directory.path else ""
        if self.layout.name == CLASSES and label == NO_CLASS:
            outside = outside or OUTSIDE_CLASS
        last, taken, prefix = None, set[bytes](), directory.prefix
        last_key = None  # in the tar; two samples with one are neighbours
        for row, name, stem, dot, extension in self._by_sample(directory):
            key = prefix + (names.without_dots(stem) if self.layout.last_dot else stem)
            if stem != last:
                taken = set()
            reason = _outside(name, outside) if outside else None
            reason = reason or (None if dot else reasons.NO_EXTENSION)
            if stem != last and key == last_key:
                reason = reason or MEETING_WITHOUT_DOTS
            reason = reason or reasons.obstacle(key, extension, taken)
            if stem != last and self.longest is not None:
                reason = reason or reasons.misread(key, self.longest)
            if reason is not None:
                self._refuse(directory, name, reason)
                continue
            if stem != last:
                self.samples.begin(number, label)
                last, last_key = stem, key
            if b"." in extension and not self.layout.last_dot:
                self.samples.dotted_names.add(prefix + name, extension)
            if extension.lower() in TABLES:
                self.samples.tables.append(len(self.samples) - 1)
            if not self.added.keys().isdisjoint(taken):
                self._refuse_column(directory, name, names.lower_case(extension))
            self.samples.add(row)

    def _by_sample(self, directory: FoundDirectory) -> Iterable[tuple[int, bytes, bytes, bytes, bytes]]:
        """Return row, name and the parts of the name of all files, the files of a sample side by side."""
        there = enumerate(self.table.names_in(directory), directory.first)
        if not self.layout.last_dot:
            return ((row, name, *name.partition(b".")) for row, name in there)
        files = ((row, name, *names.partition(name, last_dot=True)) for row, name in there)
        return sorted(files, key=lambda file: (names.without_dots(file[2]), *file[2:]))

    def _refuse_column(self, directory: FoundDirectory, name: bytes, column: bytes) -> None:
        where = os.fsdecode(self.table.path_of(directory) + b"/" + name)
        raise CommitError(
            f"{where} is the column {os.fsdecode(column)} of its sample, and pack would add one of that "
            f"name: rename the added one with {self.added[column]}"
        )


def _outside(name: bytes, text: str) -> str:
    """Return why a file is outside of all samples: this text, unless it is a table."""
    return OUTSIDE_TABLE if _is_table(name) else text


def _is_table(name: bytes) -> bool:
    return name.lower().rpartition(b".")[2] in TABLES


def _refuse_splits(table: FileTable) -> None:
    """Raise CommitError if the directories that would be classes are splits, with the classes below."""
    below = [
        directory
        for directory in table.directories
        if directory.path and not all(map(_is_table, table.names_in(directory)))
    ]
    are_splits = all(_top_of(directory).lower() in SPLIT_NAMES for directory in below)
    if below and are_splits and all(b"/" in directory.path for directory in below):
        root = os.fsdecode(table.roots[below[0].root])
        raise CommitError(
            f"{root}/{os.fsdecode(_top_of(below[0]))} looks like a split, whose directories are the classes: "
            f"`wdsfs pack {shlex.quote(root)} -o 'out/{{split}}-%06d.tar'` packs each split into its own shards, "
            "with one numbering of the classes; --layout files packs all as one set without classes"
        )


def are_splits(directories: Sequence[str]) -> bool:
    """Return True if these are several directories, and each has the name of a split."""
    named = (os.fsencode(os.path.basename(os.path.abspath(path))).lower() in SPLIT_NAMES for path in directories)
    return len(directories) > 1 and all(named)


def _expect_splits(table: FileTable) -> None:
    """Raise UsageError unless all directories at the top are splits by their names."""
    tops = {(directory.root, _top_of(directory)) for directory in table.directories if directory.path}
    for root, top in sorted(tops) or [(0, b"")]:
        if top.lower() not in SPLIT_NAMES:
            where = os.fsdecode(os.path.join(table.roots[root], top))
            raise UsageError(
                f"{where} is no split (train, val, test ...), as {{split}} in --output needs it: name the folder "
                "above the splits, leave others out with --exclude, or type fractions, such as --split train=0.9"
            )


def folder_splits(samples: Samples, order: Numbers) -> dict[str, Numbers]:
    """Return the samples of each directory at the top, by its name, in their order."""
    tops = [os.fsdecode(_top_of(directory)) for directory in samples.table.directories]
    names, numbers = np.unique(tops, return_inverse=True)
    place = numbers[samples.directory_of[order]]
    return {str(names[at]): order[place == at] for at in np.unique(place).tolist()}


def _top_of(directory: FoundDirectory) -> bytes:
    return directory.path.partition(b"/")[0]


def _refuse_equal_keys(samples: Samples) -> None:
    """Raise CommitError if two samples, which are then in different trees, have the same key in the tar."""
    keys = (names.without_dots(samples.key(number)) for number in range(len(samples)))
    sums: NDArray[np.uint64] = np.fromiter(map(xxhash.xxh3_64_intdigest, keys), np.uint64, len(samples))
    order = np.argsort(sums, kind="stable")
    again = np.flatnonzero(sums[order][1:] == sums[order][:-1])
    for at in again.tolist():
        first, second = int(order[at]), int(order[at + 1])
        key = names.without_dots(samples.key(first))
        if key == names.without_dots(samples.key(second)):
            places = [samples.table.path_of(samples.directory(number)) for number in (first, second)]
            where = " and ".join(map(os.fsdecode, places))
            way_out = "pack the directory above them, so that the names of both are parts of the keys"
            if samples.layout.name == CLASSES:  # above them these would be classes
                way_out = "pack each by itself, and the others with --class-names and the classes.txt of the first"
            if are_splits([*map(os.fsdecode, samples.table.roots)]) and not samples.layout.by_split:
                way_out = "{split} in --output packs each split into its own shards"
            raise CommitError(f"the key {os.fsdecode(key)!r} occurs twice, in {where}: {way_out}")


# --- remarks -------------------------------------------------------------------------------------------------


def remarks(samples: Samples) -> Iterator[str]:
    """Yield remarks about the new set that its readers may not expect, a line each."""
    dotted = samples.dotted_names.text(len(samples))
    if dotted:
        yield f"{os.fsdecode(samples.dotted_names.name)}: {dotted}"
    alone = [number for number in samples.tables if samples.starts[number + 1] - samples.starts[number] == 1]
    if alone and 2 * len(alone) < len(samples):
        first = samples.starts[alone[0]]
        table = os.fsdecode(samples.directory(alone[0]).prefix + samples.table.name(samples.rows[first]))
        yield (
            f"{table}: a table is packed as a sample of its own{and_others(len(alone))}; if it describes the "
            "samples, --table FILE packs its columns with them, and --exclude leaves it out"
        )
    roots = list(map(os.fsdecode, map(os.path.basename, samples.table.roots)))
    if not samples.layout.by_split and are_splits(roots):
        yield f"{several(roots)} become one set: {{split}} in --output keeps them apart"
    inner = _equal_directories(samples)
    if inner:
        yield (
            f"all classes have the directories {several(inner)}: if these are the classes, pack each directory "
            "above them by itself"
        )


def _equal_directories(samples: Samples) -> list[str]:
    """Return the directories that all classes share, if they are several and no class has files beside them."""
    below: dict[bytes, set[bytes]] = {}
    layout = samples.layout
    for directory in samples.table.directories if layout.name == CLASSES and not layout.by_split else ():
        top, _, path = directory.path.partition(b"/")
        if top:
            below.setdefault(top, set()).add(path.partition(b"/")[0])
    shared = set[bytes].intersection(*below.values()) if len(below) > 1 else set()
    has_files = any(b"" in directories for directories in below.values())
    return sorted(map(os.fsdecode, shared)) if len(shared) > 1 and not has_files else []


# --- order and splits ------------------------------------------------------------------------------

NOT_LISTED = "its key is not in the list of --order"

_KEYS_AT_ONCE = 100_000  # that are looked up in a list

# These give a key independent numbers for its order and for its split.
_SHUFFLE, _SPLIT = b"wdsfs shuffle", b"wdsfs split"


class Split(NamedTuple):
    """A split: its name, and the fraction of the samples that it gets."""

    name: str
    fraction: float


def parse_splits(texts: Sequence[str]) -> list[Split]:
    """Return the splits of `NAME=FRACTION` texts. Raises UsageError, also if the fractions do not add up to 1."""
    splits = []
    for text in texts:
        name, equals, number = text.partition("=")
        try:
            fraction = float(number)
        except ValueError:
            fraction = math.nan
        if not (name and equals and 0 < fraction <= 1) or "/" in name or "%" in name:
            raise UsageError(f"--split {text}: write NAME=FRACTION, for example train=0.9")
        splits.append(Split(name, fraction))
    names = [split.name for split in splits]
    if len(set(names)) < len(names):
        raise UsageError(f"--split: {several(sorted(names))}: each split has a name of its own")
    total = math.fsum(split.fraction for split in splits)
    if splits and abs(total - 1) > 1e-6:
        raise UsageError(f"--split: the fractions are {total:g} together: they have to be 1, to lose no sample")
    return splits


def order_of(samples: Samples, seed: str | None, file: str | None, left_out: LeftOut) -> Numbers:
    """Return the numbers of the samples in the order of the set: by name, shuffled, or as a file lists the keys.

    Samples that are not listed go to `left_out`. Raises UsageError for one that has keys of no sample, ViewError
    and ShardErrors for one that cannot be read.
    """
    if file is None:
        return shuffled(samples, seed)
    starts = range(0, len(samples), _KEYS_AT_ONCE)
    parts = (range(start, min(start + _KEYS_AT_ONCE, len(samples))) for start in starts)
    reading = Reading(last_dot=samples.layout.last_dot)
    order, others, wrong = listed(file, reading, ((b"", [*map(samples.key, part)]) for part in parts))
    if wrong:
        raise UsageError(f"--order {wrong}")
    for number in others.tolist():
        left_out.refuse(samples.key(number), NOT_LISTED)
    return order


class Keyed(Protocol):
    """Samples by number, each with its key and class."""

    @property
    def class_of(self) -> NDArray[np.int32]: ...

    def __len__(self) -> int: ...

    def key(self, sample: int) -> bytes: ...


def shuffled(samples: Keyed, seed: str | None) -> Numbers:
    """Return the numbers of the samples in the order of a seed; without a seed in their own order."""
    if seed is None:
        return np.arange(len(samples), dtype=np.int64)
    # Equal numbers keep the order by name.
    return np.argsort(_hashed(samples, _SHUFFLE + b" " + os.fsencode(seed)), kind="stable").astype(np.int64)


def split_of(samples: Keyed, order: Numbers, splits: Sequence[Split]) -> list[Numbers]:
    """Return the samples of each split, in their order. Raises CommitError for a split without samples.

    In each class, or in the whole set if there are no classes, a split gets its fraction of the samples, rounded
    by less than one sample. Samples with the lowest hashes of the key belong to the first split. The seed of a
    shuffle does not change the splits: after another shuffle, no sample has moved from the test split to training.
    """
    place = np.zeros(len(samples), np.int64)
    hashed = _hashed(samples, _SPLIT)
    bounds = np.cumsum([split.fraction for split in splits])
    bounds[-1] = 1
    for label in np.unique(samples.class_of[order]):
        members = order[samples.class_of[order] == label]
        ranked = members[np.lexsort((members, hashed[members]))]
        ends = np.floor(bounds * len(ranked) + 0.5).astype(np.int64)
        place[ranked] = np.searchsorted(ends, np.arange(len(ranked)), side="right")
    parts = [order[place[order] == number] for number in range(len(splits))]
    for split, numbers in zip(splits, parts, strict=True):
        if not len(numbers):
            raise CommitError(
                f"--split {split.name}={split.fraction:g}: that is less than one of {len(order)} samples"
            )
    return parts


def _hashed(samples: Keyed, salt: bytes) -> NDArray[np.uint64]:
    """Return a number for each sample, computed from its key and the salt."""
    salted, sums = hashlib.blake2b(salt + b"\0", digest_size=8), bytearray()
    for number in range(len(samples)):
        key_sum = salted.copy()
        key_sum.update(samples.key(number))
        sums += key_sum.digest()
    return np.frombuffer(sums, ">u8").astype(np.uint64)


def listed(
    text: str, reading: Reading, shards: Iterable[tuple[bytes, Sequence[bytes]]]
) -> tuple[Numbers, Numbers, str]:
    """Return the samples that a file lists, in its order, and the others; and a text about keys of no sample.

    `shards` has names of shards, and the keys of the next samples there. Raises as `open_key_list`, UsageError.
    """
    files = label_files(text, ORDER, reading)
    with open_key_list(files, fingerprints_of(files, DOOR.look)) as table:
        pairs = [table.find(shard, keys) for shard, keys in shards]
        uses = [used for _, used in pairs]
        refuse_shared(table, uses)
        missing = table.missing(uses)
        wrong = f"{text_of_files(files)}: {missing_text(missing, 'key', uses)}" if missing.number else ""
    place = np.concatenate([np.zeros(0, np.int64), *(some for some, _ in pairs)])
    return np.argsort(place, kind="stable")[np.count_nonzero(place < 0) :], np.flatnonzero(place < 0), wrong
