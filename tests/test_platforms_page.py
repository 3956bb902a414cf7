"""docs/reference/platforms.md: its versions are those that the program decides by."""

from __future__ import annotations

import re

from tests.conftest import ROOT
from wdsfs import host
from wdsfs.kernel import erofs_mount
from wdsfs.kernel.erofs import OLDEST_KERNEL

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
    assert first(4, "yes") == erofs_mount.OVERTAKING_SINCE
    assert first(2, "yes") == (6, 9)  # FUSE_NOTIFY_RESEND


def test_every_row_says_how_it_is_known() -> None:
    for title in ("Linux", "Around it", "Containers"):
        for row in rows(title):
            assert any(word in row[-1] for word in KNOWN), row
    assert re.search(r"^\| Python (.*) \| yes \| tested \|$", PAGE, re.MULTILINE)
