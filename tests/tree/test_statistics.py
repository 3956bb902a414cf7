"""The statistics of a shard set against a count in plain Python and NumPy over what tarfile sees."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

import numpy as np

from tests import sets, tars
from tests.tree.test_shard_set import a_lower
from wdsfs.index import store
from wdsfs.shards import Shard
from wdsfs.tree import statistics


def write(directory: Path, *contents: bytes) -> list[Shard]:
    shards = []
    for number, content in enumerate(contents):
        path = directory / f"s{number}.tar"
        path.write_bytes(content)
        shards.append(sets.at(path))
    return shards


def test_totals_and_counts_equal_a_count_by_hand(tmp_path: Path) -> None:
    choose = random.Random(5)
    sizes: defaultdict[str, list[int]] = defaultdict(list)
    contents, samples = [], []
    for _ in range(4):
        members = [tars.member(b"a/stray", b"1234")]
        samples.append(choose.randrange(40))
        for sample in range(samples[-1]):
            folder = choose.choice([b"", b"dog/", b"cat/", b"cat/black/"])
            for extension in choose.sample(["jpg", "cls", "json", "seg.png"], choose.randrange(1, 5)):
                size = choose.choice([0, 1, 2, 511, 512, choose.randrange(300), choose.randrange(5000)])
                sizes[extension].append(size)
                members.append(tars.member(b"%s%d.%s" % (folder, sample, extension.encode()), bytes(size)))
        contents.append(tars.tar(*members))
    with a_lower(tmp_path, write(tmp_path, *contents)) as below:
        report = statistics.gather(below)
    rows = [tuple(row.values()) for row in report.pop("extensions")]
    assert report == {
        **dict.fromkeys(("damaged", "apart", "joined", "more_extensions"), 0),
        "shards": 4,
        "samples": sum(samples),
        "members": sum(map(len, sizes.values())) + 4,
        "in_no_sample": 4,
        "bytes": sum(map(sum, sizes.values())) + 16,
        "shard_bytes": sum(map(len, contents)),
    }
    for (*row, median, p90, largest), (extension, some) in zip(
        rows, sorted(sizes.items(), key=lambda item: (-len(item[1]), item[0])), strict=True
    ):
        assert (*row, largest) == (extension, len(some), sum(some), min(some), max(some))
        assert [median, p90] == np.quantile(some, [0.5, 0.9], method="nearest").tolist()


def test_names_that_are_no_utf8_and_sizes_beyond_32_bits(tmp_path: Path) -> None:
    path = tmp_path / "large.tar"
    tars.write_large(path)
    shards = [sets.at(path), *write(tmp_path, tars.tar(tars.member(b"a.\xff", b"x")))]
    with a_lower(tmp_path, shards) as below:
        report = statistics.gather(below)
    rows = {row["extension"]: row for row in report["extensions"]}
    assert rows["\\xff"]["count"] == 1
    assert rows["bin"]["median"] == rows["bin"]["max"] == rows["bin"]["bytes"] == 9 << 30
    assert report["bytes"] == (9 << 30) + 3 + 1


def test_shards_that_are_missing_damaged_or_changed(tmp_path: Path) -> None:
    contents = [sets.content(number) for number in range(4)]
    shards = write(tmp_path, *contents)
    with a_lower(tmp_path, shards) as below:
        sets.path_of(shards[0]).unlink()
        sets.path_of(shards[1]).write_bytes(contents[1][:1000])
        sets.path_of(shards[2]).write_bytes(sets.content(2, samples=7))
        report = statistics.gather(below)
    assert (report["shards"], report["damaged"]) == (4, 2)
    assert report["samples"] == 1 + 7 + 3


def test_a_record_that_was_damaged_is_built_again(tmp_path: Path) -> None:
    shards = write(tmp_path, sets.content(1))
    with a_lower(tmp_path, shards) as below:
        key = b"r" + store._digest(shards[0].path)
        below.index._write([(key, b"nonsense")])
        assert statistics.gather(below)["samples"] == 3
