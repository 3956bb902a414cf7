"""The numbers that loaders give to the directories of classes, compared with the numbers that the classes are.

Loaders of folders (ImageFolder, `imagefolder`, DALI's `readers.file`) give the sorted names of the directories the
labels 0, 1, 2 ... Padding (`classes.py`) makes that order the one of the numbers. But names that stand for numbers
sort by the alphabet, and where a class has no sample, the classes after it get lower labels: without an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wdsfs.tree.shard_set import ShardSet

_MOST = 1_000_000  # classes; more are no classes but something like names of samples


def folders_of(shards: ShardSet) -> Iterator[bytes]:
    """Yield the classes of each shard, those of several shards repeatedly. Raises NotIndexed, ShardErrors."""
    for number in shards.numbers:
        record = shards.record(number)
        for folder in record.child_folders(0):
            yield record.folder_name[folder]


def numbers_of(class_names: Mapping[str, str]) -> dict[bytes, int]:
    """Return the number of each class that --class-names names, by its directory; empty if not all have one."""
    if not all(key.isascii() and key.isdigit() for key in class_names):
        return {}
    folders = {
        name.replace("/", "--").encode("utf-8", "surrogatepass"): int(key) for key, name in class_names.items()
    }
    return folders if len(folders) == len(class_names) else {}


def misnumbered(folders: Iterable[bytes], named: Mapping[bytes, int] | None = None) -> str | None:
    """Return which class gets a label that is not its number, the first of them, and why.

    `named` has the numbers of classes with names; without it the directories are called by the numbers. None if
    all get their numbers, and if not all classes have numbers: then nobody expects certain labels.
    """
    numbers: dict[bytes, int] = {}
    for folder in folders:
        number = (int(folder) if folder.isdigit() else None) if named is None else named.get(folder)
        if number is None or len(numbers) > _MOST:
            return None
        numbers[folder] = number
    complete = sorted(numbers.values()) == list(range(len(numbers)))
    why = "they sort as text" if complete else "a class has no sample"
    for label, folder in enumerate(sorted(numbers)):
        if label != numbers[folder]:
            shown = folder.decode("utf-8", "surrogateescape")
            which = shown if named is None else f"{numbers[folder]}, {shown},"
            return f"class {which} as {label}: {why}"
    return None
