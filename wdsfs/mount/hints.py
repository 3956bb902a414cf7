"""Hints, printed at a mount, about names and classes that loaders of directories would silently misread."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence

from wdsfs.errors import ShardError
from wdsfs.index.record import Record
from wdsfs.names import MEDIA, DottedNames
from wdsfs.tree.classes import folders_of, misnumbered, numbers_of
from wdsfs.tree.companions import read_class_names
from wdsfs.tree.indexing import NotIndexed
from wdsfs.tree.set_options import TreeOptions
from wdsfs.tree.shard_set import ShardSet

_SHARDS_READ = 3
_SHARDS_COUNTED = 1000  # nearly always the summary of the first shard decides


def hints(below: ShardSet, tree: TreeOptions, writable: bool) -> Sequence[str]:
    """Return hints for a mount of this set; none if loaders find all files, or the shards are not indexed.

    A `writable` mount is for editing and gets no hints about loaders.
    """
    outside = _members_outside(below)
    if outside and tree.layout != "files":
        return ("no member of the set is in a sample: --layout files shows them, `wdsfs check` shows the reason",)
    if outside == 0 and not writable:  # a user may be about to fill a writable mount
        return ("the mount shows nothing, because the shards have no members: `wdsfs check` says more",)
    if writable:
        return ()
    of_classes = tree.layout == "classes"
    hint = _class_hint(below, tree.composition.class_names) if of_classes else _suffix_hint(below, tree)
    layout = () if hint is None else (hint, "`wdsfs help layouts` shows the layout for each loader")
    return (*(() if tree.layout == "files" or below.shards[0].reading.last_dot else _dots_hint(below)), *layout)


def _first_records(below: ShardSet) -> Iterator[tuple[int, Record, Sequence[bytes]]]:
    """Yield the number, the record and the extensions of each of the first shards that are indexed."""
    for number in range(min(len(below), _SHARDS_READ)):
        with contextlib.suppress(ShardError, NotIndexed):
            record = below.record(number)
            yield number, record, record.extension_name.of(range(len(record.extension_name)))


def _dots_hint(below: ShardSet) -> Iterator[str]:
    """Yield a hint if keys end at dots within names, so that parts of the names become columns."""
    for number, record, extensions in _first_records(below):
        if any(b"." in extension for extension in extensions):
            dotted, counts = DottedNames(), Counter(record.array("member.ext").tolist())
            for position, extension in enumerate(extensions):
                if b"." in extension:
                    dotted.add(extension, extension, members=counts[position])
            if dotted.count(record.samples):
                path = below.path_text(number)
                yield (
                    f"{path}: keys end at the first dot, so columns are parts of names: type --key-ends last-dot; "
                    f"wdsfs check {path} says more"
                )
                return


def _members_outside(below: ShardSet) -> int | None:
    """Return the number of members of the first shards; None if there is a sample, or a shard is not indexed."""
    members = 0
    for number in range(min(len(below), _SHARDS_COUNTED)):
        try:
            summary = below.summary(number)
        except (ShardError, NotIndexed):
            return None
        if summary.samples:
            return None
        members += summary.members
    return members


def _suffix_hint(below: ShardSet, tree: TreeOptions) -> str | None:
    """Return a hint for a set of images or sound with file names such as `jpg`, which loaders do not find.

    None if the first shards have no such file, or are not indexed.
    """
    if tree.layout != "samples" or tree.names == "full":
        return None
    for _, _, extensions in _first_records(below):
        for extension in extensions:
            suffix = extension.lower().rpartition(b".")[2]
            if suffix in MEDIA:
                # --layout classes refuses a set without classes.
                other = "--layout classes" if b"cls" in extensions else "--layout files"
                return f"loaders that look for *.{suffix.decode()} need --names full or {other}"
    return None


def _class_hint(below: ShardSet, class_names: str | None) -> str | None:
    """Return a hint if loaders that count directories would give numbered classes other numbers.

    None while a shard is not indexed.
    """
    try:
        named = None if class_names is None else numbers_of(read_class_names(class_names))
        labels = misnumbered(folders_of(below), named)
    except (NotIndexed, ShardError):
        return None
    return f"ImageFolder gives {labels}" if labels else None
