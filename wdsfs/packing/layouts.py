"""How the files of a tree are laid out: what is a sample, and what its members are called.

- files: `images/image194.left.jpg`, as `tar x` leaves it; the key is the path up to the first dot of the name.
- samples: `images/image194/left.jpg`, a directory for each sample; with full names, `image194/image194.left.jpg`.
- classes: `cat/image194.jpg`, as ImageFolder has it: files, whose first directory is their class.

These are the layouts that a mount shows, so what a mount shows can be packed again.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from wdsfs import names
from wdsfs.errors import CommitError
from wdsfs.packing.file_table import FileTable, FoundDirectory

AUTO, FILES, SAMPLES, CLASSES = "auto", "files", "samples", "classes"

_WAY_OUT = "say which with --layout files, samples or classes"


class Layout(NamedTuple):
    """A layout; `full`: in `samples`, the names of files begin with that of their sample."""

    name: str
    full: bool = False

    @property
    def text(self) -> str:
        """For messages: what was taken for what."""
        return _TEXTS[self.name] + (", named in full" if self.full else "")


_TEXTS = {
    FILES: "files (key.ext)",
    SAMPLES: "samples (a directory for each sample)",
    CLASSES: "classes (a directory for each class)",
}


class _Looks(NamedTuple):
    """What the files of a directory look like. Hidden files do not count.

    `bare` names have no dot, as columns in the directory of a sample; `dotted` ones have one. `full`: all begin
    with the name of the directory. `alone`: each is an image, sound or film that is the only file of its key.
    """

    bare: bytes | None
    dotted: bytes | None
    full: bool
    alone: bool


def layout_of(table: FileTable, wanted: str) -> Layout:
    """Return the layout that is wanted, or for AUTO the one that the files have.

    Raises CommitError where they could mean several things, or there are none.
    """
    if not len(table):
        raise CommitError(f"there is no file to pack in {' or '.join(map(os.fsdecode, table.roots))}")
    if wanted in (FILES, CLASSES):
        return Layout(wanted)
    looks = [_looks(directory, table.names_in(directory)) for directory in table.directories]
    deep = [one for one, where in zip(looks, table.directories, strict=True) if where.path]
    full = bool(deep) and all(one.full for one in deep)
    if wanted == SAMPLES:
        return Layout(SAMPLES, full)
    return _detected(table, looks, full)


def _detected(table: FileTable, looks: list[_Looks], full: bool) -> Layout:
    bare = _first(table, [one.bare if where.path else None for one, where in _pairs(table, looks)])
    dotted = _first(table, [one.dotted for one in looks])
    at_top = any(one.dotted and not where.path for one, where in _pairs(table, looks))
    if bare is None:
        if full and not at_top:
            return Layout(SAMPLES, True)
        if _like_classes(table, looks):
            raise CommitError(
                f"{os.fsdecode(dotted or b'')}: its directory can be a class (--layout classes, which adds the "
                "column cls), or only a part of the key (--layout files): say which"
            )
        return Layout(FILES)
    if at_top or not all(one.bare for one, where in _pairs(table, looks) if where.path):
        raise CommitError(
            f"{os.fsdecode(bare)} looks like a column in the directory of a sample, "
            f"{os.fsdecode(dotted or b'')} like a file of the sample that its name begins with: {_WAY_OUT}"
        )
    return Layout(SAMPLES, False)


def _pairs(table: FileTable, looks: list[_Looks]) -> list[tuple[_Looks, FoundDirectory]]:
    return list(zip(looks, table.directories, strict=True))


def _first(table: FileTable, found: list[bytes | None]) -> bytes | None:
    """The path of the first of these names, one of each directory."""
    for name, where in zip(found, table.directories, strict=True):
        if name is not None:
            return table.path_of(where) + b"/" + name
    return None


def _like_classes(table: FileTable, looks: list[_Looks]) -> bool:
    below_top = all(where.path and b"/" not in where.path for where in table.directories)
    return below_top and all(one.alone for one in looks)


def _looks(directory: FoundDirectory, found: list[bytes]) -> _Looks:
    start = directory.path.rpartition(b"/")[2] + b"."
    bare = dotted = None
    full = alone = True
    last = b""
    for name in found:
        stem, dot, extension = name.partition(b".")
        if not stem:
            continue
        if not dot:
            bare = bare or name
        else:
            dotted = dotted or name
        full = full and name.startswith(start)
        alone = alone and stem != last and extension.lower() in names.MEDIA
        last = stem
    return _Looks(bare, dotted, full and dotted is not None, alone and dotted is not None)
