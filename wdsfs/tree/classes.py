"""Classes of samples: the step of a view that makes folders of them, and the labels that loaders give to these.

Loaders of folders (ImageFolder, `imagefolder`, DALI's `readers.file`) give the sorted names of the directories the
labels 0, 1, 2 ... Numbers padded with zeros sort as numbers. But names that stand for numbers sort by the
alphabet. If a class has no sample, the classes after it get lower labels. Loaders report no error in these cases.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from wdsfs import names
from wdsfs.errors import CorruptShard, ViewError
from wdsfs.names import bytes_of, text_of
from wdsfs.tree import json_fields
from wdsfs.tree.companions import WHITE_SPACE
from wdsfs.tree.composition import ERROR
from wdsfs.tree.draft import MISSING_WAY_OUT, Draft

if TYPE_CHECKING:
    from wdsfs.tree.shard_set import ShardSet

CLASSES_MAX = 1_000_000  # most classes: with more, the values are rather names of samples
CLASS_DIGITS_MAX = 18  # of a class that counts as a number
_STEM_MAX = 200  # most bytes of a file's name before its extension, in the classes layout
_NUMBER = re.compile(rb"([+-]?)([0-9]{1,%d})" % CLASS_DIGITS_MAX)


def folders_of(shards: ShardSet) -> Iterator[bytes]:
    """Yield the classes of each shard; a class of several shards is repeated. Raises NotIndexed, ShardErrors."""
    for number in shards.numbers:
        record = shards.record(number)
        for folder in record.child_folders(0):
            yield record.folder_name[folder]


def numbers_of(class_names: Mapping[str, str]) -> dict[bytes, int]:
    """Return the number of each class that --class-names names, by its directory; empty if not all have one."""
    if not all(key.isascii() and key.isdigit() for key in class_names):
        return {}
    folders = {bytes_of(name.replace("/", "--")): int(key) for key, name in class_names.items()}
    return folders if len(folders) == len(class_names) else {}


def misnumbered(folders: Iterable[bytes], named: Mapping[bytes, int] | None = None) -> str | None:
    """Return the first class whose label differs from its number, and the reason.

    `named` has the numbers of classes with names; without it the names of the directories are the numbers. Returns
    None if all classes get their numbers. Also returns None if a class has no number: then no label is expected.
    """
    numbers: dict[bytes, int] = {}
    for folder in folders:
        number = (int(folder) if folder.isdigit() else None) if named is None else named.get(folder)
        if number is None or len(numbers) > CLASSES_MAX:
            return None
        numbers[folder] = number
    complete = sorted(numbers.values()) == list(range(len(numbers)))
    why = "they sort as text" if complete else "a class has no sample"
    for label, folder in enumerate(sorted(numbers)):
        if label != numbers[folder]:
            which = text_of(folder) if named is None else f"{numbers[folder]} ({text_of(folder)})"
            return f"class {which} the label {label}: {why}"
    return None


# -- the step of a view that makes folders of classes ----------------------------------------------------------


class LongNumber(ViewError):
    """A class needs more `digits` than the shown classes have."""

    def __init__(self, text: str, digits: int) -> None:
        super().__init__(text)
        self.digits = digits


def find_classes(draft: Draft) -> None:
    """Find the class of each entry, before columns are chosen."""
    at = np.flatnonzero(_class_members(draft))
    entries, first = np.unique(draft.rows.entry[at], return_index=True)
    classes = draft.classes
    # In the order of the shard, so that the disk is read in one pass.
    for entry, row in sorted(zip(entries.tolist(), at[first].tolist(), strict=True), key=lambda pair: pair[1]):
        try:
            data = draft.read(int(draft.rows.address[row]))
        except CorruptShard:  # the shard is cut off here, which is one of its problems
            continue
        classes[entry] = _class(draft, entry, data)
    missing = np.array([entry for entry, label in enumerate(classes) if label is None], int)
    where = text_of(draft.options.class_from)
    where += f" with the field {draft.options.class_field}" if draft.options.class_field else ""
    if draft.options.class_digits != 0:
        _pad_numbers(draft, draft.options.class_digits or 1)
    way_out = MISSING_WAY_OUT
    if len(missing) == len(classes):  # no sample has it: the column may have another name
        way_out = f"{draft.columns_there()}; --class-from names the one with the class; {MISSING_WAY_OUT}"
    draft.keep(draft.judged(draft.options.missing, missing, f"has no class: no {where}", way_out))


def _class_members(draft: Draft) -> NDArray[np.bool_]:
    return np.isin(draft.rows.extension, draft.matching(draft.options.class_from))


def _pad_numbers(draft: Draft, digits: int) -> None:
    """Show whole numbers as classes with this number of digits. Raises LongNumber for a longer number."""
    # Semantics decision: loaders number the sorted names of the folders, and 10 sorts before 2. So all numbers
    # of a set have one width. `7`, `07` and `+7` are one class, as for readers that decode `cls`.
    numbers = {
        label: match for label in dict.fromkeys(draft.classes) if (match := _NUMBER.fullmatch(label or b""))
    }
    longest = max(numbers, key=lambda label: len(numbers[label][2]), default=None)
    if longest is None:
        return
    needed = len(numbers[longest][2])
    if needed > digits:
        key, shown = text_of(draft.paths[draft.classes.index(longest)]), text_of(longest)
        raise LongNumber(
            f"{text_of(draft.path)}: sample {key!r} has the class {shown}, and classes are shown with "
            f"{digits} digit{'s' * (digits > 1)}; mount again, or repeat the command, without --class-digits "
            f"or with --class-digits {needed}",
            needed,
        )
    padded = {label: _padded(match[1], match[2], digits) for label, match in numbers.items()}
    draft.classes = [label if label is None else padded.get(label, label) for label in draft.classes]


def _padded(sign: bytes, digits: bytes, width: int) -> bytes:
    return (b"-" if sign == b"-" and digits.strip(b"0") else b"") + digits.zfill(width)


def _class(draft: Draft, entry: int, data: bytes) -> bytes | None:
    """Return the folder of a sample; None when it has no class."""
    label = data.strip()
    if draft.options.class_field:
        text = _class_in_json(draft, entry, data)
        if text is None:
            return None
        label = bytes_of(text)
    if draft.source.class_names is not None:
        named = draft.source.class_names.get(label.decode("utf-8", "surrogateescape"))
        if named is None:
            if draft.options.missing == ERROR:
                _bad_class(draft, entry, f"has the class {text_of(label)!r}, which --class-names does not name")
            return None
        label = bytes_of(named)
    # Semantics decision: a class is one folder, so a slash in its name becomes `--`, as in keys. A value that is
    # no valid name of a folder is no class.
    label = label.replace(b"/", b"--")
    return None if label in (b"", b".", b"..") else label


def _class_in_json(draft: Draft, entry: int, data: bytes) -> str | None:
    name = f"{text_of(draft.options.class_from)}:{draft.options.class_field}"
    try:
        document = json_fields.parse(data)
    except CorruptShard as error:
        if draft.options.missing == ERROR:
            _bad_class(draft, entry, f"has no class: {name} cannot be read: it {error}")
        return None
    value = json_fields.find(document, json_fields.parse_path(draft.options.class_field))
    if isinstance(value, str):
        return value.strip(WHITE_SPACE)
    return json.dumps(value) if isinstance(value, int) else None  # a whole number, true or false


def _bad_class(draft: Draft, entry: int, what: str) -> None:
    draft.judged(ERROR, np.array([entry]), what, MISSING_WAY_OUT)


def into_classes(draft: Draft) -> None:
    """Put each sample into the folder of its class, under a name of one component."""
    if not draft.options.columns and not draft.options.class_field:  # the folder has the class: no file is needed
        draft.rows = draft.rows.take(~_class_members(draft))
    # Semantics decision: the shard's name is in front. Keys repeat from shard to shard in many sets. A number
    # after a file's name (`a.jpg~2`) would hide it from loaders that go by the suffix. A number for each file
    # could pair the image of one sample with the text of another.
    prefix = _flat(draft.source.shard.name) + b"--"
    taken: dict[bytes, int] = {}  # the last number tried for each path
    paths = []
    for path, label in zip(draft.paths, draft.classes, strict=True):
        # Without a class (`--missing empty`): the folder with the empty name, which `names` shows as `%`.
        folder = (label or b"") + b"/"
        # A name that was cut as a whole would lose the suffix that loaders go by.
        stem = names.shorten(prefix + _flat(path), _STEM_MAX)
        plain = shown = folder + stem
        while shown in taken:
            taken[plain] += 1
            shown = folder + names.numbered(stem, taken[plain])
        taken[shown] = 1
        paths.append(shown)
    draft.paths = paths


def _flat(path: bytes) -> bytes:
    """Return a path as one component without a dot, because the dot is where a file's extension begins."""
    return path.replace(b"/", b"--").replace(b".", b"_")
