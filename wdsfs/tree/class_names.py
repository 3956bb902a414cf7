"""Names of classes: the file that gives them (`--class-names`), and the labels that loaders give to their folders.

Loaders of folders (ImageFolder, `imagefolder`, DALI's `readers.file`) give the sorted names of the directories the
labels 0, 1, 2 ... Padding numbers with zeros makes that order the one of the numbers. But names that stand for
numbers sort by the alphabet, and where a class has no sample, the classes after it get lower labels: without an
error.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from wdsfs.errors import UsageError
from wdsfs.names import bytes_of, text_of
from wdsfs.source import open_stream

if TYPE_CHECKING:
    from wdsfs.tree.shard_set import ShardSet

# Semantics decision: white space around a class is that of ASCII, in texts as in bytes; the rest is its name.
WHITE_SPACE = " \t\n\r\v\f"
CLASSES_MAX = 1_000_000  # classes; with more the values are not classes, but something like names of samples


def read_class_names(path: str) -> dict[str, str]:
    """Return the names of classes by their labels in samples.

    The file has a line for each number from 0 on, or is a JSON list or object. Raises UsageError.
    """
    try:
        with open_stream(path) as file:
            names = class_names_in(file.read())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--class-names {path}: {getattr(error, 'strerror', None) or error}") from None
    pairs = enumerate(names) if isinstance(names, list) else names.items()
    named = {str(key): value for key, value in pairs}
    if not named:
        raise UsageError(f"--class-names {path}: names no class")
    for key, value in named.items():
        if not isinstance(value, str):
            raise UsageError(f"--class-names {path}: the name of class {key} is not text")
    if isinstance(names, list):
        _refuse_twice(path, named)
    return named


def class_names_in(data: bytes) -> Any:
    """Return the names in a file of classes: its JSON, or a list. Raises ValueError, RecursionError."""
    text = data.decode("utf-8-sig")
    if text.lstrip(WHITE_SPACE)[:1] in ("[", "{"):
        return json.loads(text)
    # Not `splitlines`: a form feed, NEL or U+2028 in a name would shift the numbers of all names after it.
    return [line.strip(WHITE_SPACE) for line in io.StringIO(text, newline=None)]


def _refuse_twice(path: str, named: dict[str, str]) -> None:
    """Raise UsageError if a list gives two classes the same name: hardly anybody wants to mix them."""
    first: dict[str, str] = {}
    for number, name in named.items():
        if name and first.setdefault(name, number) != number:
            raise UsageError(
                f"--class-names {path}: classes {first[name]} and {number} are both called {name!r} and would be "
                "one folder; give them different names, or use a JSON object to have them in one"
            )


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
    folders = {bytes_of(name.replace("/", "--")): int(key) for key, name in class_names.items()}
    return folders if len(folders) == len(class_names) else {}


def misnumbered(folders: Iterable[bytes], named: Mapping[bytes, int] | None = None) -> str | None:
    """Return the first class that gets a label which is not its number, and why.

    `named` has the numbers of classes with names; without it the names of the directories are the numbers. Returns
    None if all classes get their numbers, and also if some have none: then nobody expects certain labels.
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
            which = text_of(folder) if named is None else f"{numbers[folder]}, {text_of(folder)},"
            return f"class {which} as {label}: {why}"
    return None
