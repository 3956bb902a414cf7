"""The directories that an expansion of SHARDS listed, and the files that it read.

A mount that follows its set watches these directories, and checks who can write these files. The parts of this
room note what they use; without `noted` around it, an expansion notes nothing.
"""

import contextlib
import glob
import os
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(slots=True)
class Dependencies:
    """Local directories that new shards may appear in, and files that name shards, as paths or URLs.

    Relative paths are below the working directory of that moment.
    """

    directories: set[str] = field(default_factory=set)
    files: set[str] = field(default_factory=set)

    def absolute(self) -> list[str]:
        """Return the absolute paths of all directories to watch, also those of the local files."""
        beside = {os.path.dirname(path) for path in self.files if "://" not in path and path != "-"}
        return sorted({os.path.abspath(path) for path in (*self.directories, *beside)})


_current: ContextVar[Dependencies | None] = ContextVar("dependencies", default=None)


@contextlib.contextmanager
def noted() -> Iterator[Dependencies]:
    """Note the dependencies of expansions in the block."""
    dependencies = Dependencies()
    token = _current.set(dependencies)
    try:
        yield dependencies
    finally:
        _current.reset(token)


def note_file(path: str) -> None:
    """Note a file that names shards."""
    if (dependencies := _current.get()) is not None:
        dependencies.files.add(path)


def note_directory(path: str) -> None:
    """Note a directory in which a shard was looked for; empty for the working directory."""
    if (dependencies := _current.get()) is not None:
        dependencies.directories.add(path or ".")


def note_glob(pattern: str) -> None:
    """Note the directories in which something new could match a pattern."""
    dependencies = _current.get()
    while dependencies is not None and glob.has_magic(pattern):
        pattern = os.path.dirname(pattern)
        # With a slash at its end a pattern matches directories only.
        where = glob.iglob(pattern + "/", recursive=True) if glob.has_magic(pattern) else [pattern]
        dependencies.directories.update(directory or "." for directory in where)
