"""docs/reference/platforms.md: its versions are those that the program decides by."""

from __future__ import annotations

import itertools
import os
import platform
import re

import pytest

from tests.conftest import ROOT
from wdsfs import host
from wdsfs.kernel import erofs_mount
from wdsfs.kernel.erofs_header import OLDEST_KERNEL

PAGE = (ROOT / "docs/reference/platforms.md").read_text()
KNOWN = {"tested", "tried", "by stand-in", "by its documents", "never tried"}


def rows(title: str) -> list[list[str]]:
    table = PAGE.partition(f"\n## {title}\n")[2].strip().partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def first(column: int, word: str) -> tuple[int, ...]:
    """Return the oldest version of which a column of the table says so."""
    return min(
        host.kernel_version(row[0].partition(" to ")[0])
        for row in rows("Linux")
        if row[0][0].isdigit() and row[column].startswith(word)
    )


def test_versions_of_linux_are_those_of_the_program() -> None:
    assert first(3, "yes") == OLDEST_KERNEL
    assert first(3, "yes, shards as files") == erofs_mount.FILES_SINCE
    assert first(2, "yes") == (6, 9)  # FUSE_NOTIFY_RESEND


def test_every_row_says_how_it_is_known() -> None:
    for title in ("Linux", "Around it", "Containers"):
        for row in rows(title):
            assert any(word in row[-1] for word in KNOWN), row
    assert re.search(r"^\| Python (.*) \| yes \| tested \|$", PAGE, re.MULTILINE)


@pytest.mark.skipif("WDSFS_REQUIRE_FUSE" not in os.environ, reason="this machine runs no continuous integration")
def test_what_runs_the_tests_is_known() -> None:
    """Where continuous integration passes, no row says that nobody has tried it."""
    linux = host.kernel_version()[:2]
    around = {row[0]: row[-1] for row in rows("Around it")}
    python = platform.python_version().rpartition(".")[0]
    names = [name for name in around if name.startswith("Python") and re.search(rf"\b{re.escape(python)}\b", name)]
    assert names, python
    for name in (*names, platform.machine()):
        assert around[name] != "never tried", name
    newest = max(host.kernel_version(word) for row in rows("Linux") for word in re.findall(r"\d+\.\d+", row[0]))
    assert linux <= newest, "a row for this Linux"


def test_no_row_of_a_version_overlaps_another() -> None:
    """Each Linux from 4.18 on has one row, but for those of one distribution."""
    ranges = [row[0].replace(" otherwise", "").split(" to ") for row in rows("Linux") if row[0][0].isdigit()]
    bounds = [(host.kernel_version(words[0])[:2], host.kernel_version(words[-1])[:2]) for words in ranges]
    whole = [(low, high) for low, high in bounds if (low, high) != ((6, 1), (6, 1))]
    assert all(low <= high for low, high in whole)
    assert all(below[1] < above[0] for above, below in itertools.pairwise(whole))
