"""The counts that plots are drawn from, against a count by hand of what was written."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from tests import tars
from tests.tree.test_statistics import lower_of, write
from wdsfs.tree import statistics
from wdsfs.tree.statistics import UNREADABLE, distribution_of


def test_counts_equal_a_count_by_hand(tmp_path: Path) -> None:
    choose = random.Random(7)
    sizes: Counter[tuple[bytes, int]] = Counter()
    classes: Counter[bytes] = Counter()
    contents, samples, in_no_class = [], [], 0
    for _ in range(3):
        members, count = [tars.member(b"a/stray", b"12345")], choose.randrange(1, 30)
        for sample in range(count):
            folder = choose.choice([b"", b"dog/", b"cat/", b"cat/black/"])
            classes[folder[:-1]] += bool(folder)
            in_no_class += not folder
            for extension in choose.sample([b"jpg", b"cls", b"seg.png"], choose.randrange(1, 4)):
                size = choose.choice([0, 1, 2, 511, 512, choose.randrange(5000)])
                sizes[extension, size.bit_length()] += 1
                members.append(tars.member(b"%s%d.%s" % (folder, sample, extension), bytes(size)))
        samples.append(count)
        contents.append(tars.tar(*members))
    with lower_of(tmp_path, write(tmp_path, *contents)) as below:
        found = distribution_of(below)
    counted = {
        (name, bit): n for name, counts in found.sizes.items() for bit, n in enumerate(counts.tolist()) if n
    }
    assert counted == sizes
    assert found.samples.tolist() == samples
    assert found.classes == +classes
    assert (found.in_no_class, found.samples_left, found.columns_left) == (in_no_class, 0, 0)


def test_empty_and_unreadable_shards_have_their_place(tmp_path: Path) -> None:
    shards = write(tmp_path, tars.END, tars.tar(tars.member(b"a.txt", b"1")), tars.END)
    with lower_of(tmp_path, shards) as below:
        (tmp_path / "s0.tar").unlink()
        found = distribution_of(below)
    assert found.samples.tolist() == [UNREADABLE, 1, 0]


def test_columns_and_classes_beyond_the_limits_are_counted_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "CLASSES_MAX", 3)
    monkeypatch.setattr(statistics, "COLUMNS_MAX", 4)
    members = [tars.member(b"c%d/%d.e%d" % (n, n, n), b"1") for n in range(10)]
    with lower_of(tmp_path, write(tmp_path, tars.tar(*members))) as below:
        found = distribution_of(below)
    assert (len(found.classes), found.samples_left) == (3, 7)
    assert (len(found.sizes), found.columns_left) == (4, 6)
