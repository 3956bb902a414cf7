"""Files and directories that are whole and on disk, while other processes make them, too."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from wdsfs.durable import Disk, make_directories


class Raced(Disk):
    """A disk on which another process makes each directory first, or what `first` makes."""

    def __init__(self, first: Callable[[bytes], object] = os.mkdir) -> None:
        self.first, self.synced = first, set[bytes]()

    def make_directory(self, path: bytes) -> None:
        self.first(path)
        super().make_directory(path)

    def sync_directory(self, path: bytes) -> None:
        super().sync_directory(path)
        self.synced.add(path)


def test_directories_that_another_process_makes_at_the_same_time(tmp_path: Path) -> None:
    """They are on disk as well: the other process may not have synced them yet."""
    disk, top = Raced(), os.fsencode(tmp_path)
    make_directories(disk, top + b"/a/b/c")
    assert (tmp_path / "a/b/c").is_dir()
    assert disk.synced == {top, top + b"/a", top + b"/a/b"}


def test_a_file_that_another_process_makes_is_no_directory(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError) as caught:
        make_directories(Raced(lambda path: Path(os.fsdecode(path)).touch()), os.fsencode(tmp_path / "a/b"))
    assert caught.value.filename == os.fsencode(tmp_path / "a")
