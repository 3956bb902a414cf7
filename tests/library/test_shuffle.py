"""`wdsfs.Shuffle` and `wdsfs.Mix`: each sample once, on any ranks, from any place, in an order that stays."""

from __future__ import annotations

import collections
import hashlib
import io
import itertools
import json
import pickle
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

import wdsfs
from tests import tars
from tests.bounded import bounded
from tests.conftest import ROOT, Program, need_fuse
from tests.library.conftest import expected, shard
from tests.peers import SCRIPTS, need_tool, run_python
from tests.thorough import examples
from wdsfs.library import shuffle
from wdsfs.tree import sample_order

LARGE = range(10_000_000)


@pytest.fixture(autouse=True)
def _ranges_of_64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `range(n)` stand for a set whose ranges have 64 samples."""
    monkeypatch.setattr(shuffle, "PLAIN_RANGE", 64)


def samples_of(batches: Iterator[Any]) -> list[int]:
    return [number for batch in batches for number in (batch if isinstance(batch, list) else [batch])]


def trained(data: Any, options: dict[str, Any], parts: Sequence[tuple[int, int]]) -> list[int]:
    """The samples that all ranks take: some batches on each number of ranks, and the rest on the last one."""
    state: dict[str, Any] | None = None
    taken: list[int] = []
    for world_size, batches in [*parts[:-1], (parts[-1][0], None)]:
        orders = [wdsfs.Shuffle(data, rank=rank, world_size=world_size, **options) for rank in range(world_size)]
        for order in orders:
            if state is not None:
                order.load_state_dict(state)
                order.set_epoch(order.epoch)  # of which nothing may be left
        fewest = min(order.remaining for order in orders)
        for order in orders:
            iterator = iter(order)
            taken += samples_of(itertools.islice(iterator, None if batches is None else min(batches, fewest)))
        if batches is not None:
            state = json.loads(json.dumps(orders[-1].state_dict()))
    return taken


PARTS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 12)), min_size=1, max_size=4)


@examples(80)
@example(count=5, batch_size=None, parts=[(6, 0)], kind="pad", open_ranges=1)  # fewer samples than ranks
@example(count=1000, batch_size=7, parts=[(1, 3), (6, 9), (1, 1)], kind="exact", open_ranges=1)
@given(
    count=st.integers(0, 2000),
    batch_size=st.one_of(st.none(), st.integers(1, 40)),
    parts=PARTS,
    kind=st.sampled_from(["pad", "exact", "drop"]),
    open_ranges=st.integers(1, 4),
)
def test_each_sample_comes_once(
    count: int, batch_size: int | None, parts: list[tuple[int, int]], kind: str, open_ranges: int
) -> None:
    """Of any set, on any numbers of ranks, one after the other in the same epoch."""
    options = {"seed": count, "batch_size": batch_size, "open_ranges": open_ranges}
    taken = trained(range(count), {**options, "pad": kind == "pad", "drop_last": kind == "drop"}, parts)
    assert set(taken) <= set(range(count))
    repeated = len(taken) - len(set(taken))
    if kind == "drop":
        assert repeated == 0
        assert count - len(taken) < parts[-1][0] * (batch_size or 1)
    else:
        assert set(taken) == set(range(count))
        assert repeated < (max(world_size for world_size, _ in parts) if kind == "pad" else 1)


@examples(40)
@given(
    count=st.integers(0, 500),
    batch_size=st.one_of(st.none(), st.integers(1, 40)),
    world_size=st.integers(1, 9),
    options=st.sampled_from([{}, {"pad": False}, {"drop_last": True}]),
)
def test_lengths_are_known_before(
    count: int, batch_size: int | None, world_size: int, options: dict[str, bool]
) -> None:
    orders = [
        wdsfs.Shuffle(range(count), rank=rank, world_size=world_size, batch_size=batch_size, **options)
        for rank in range(world_size)
    ]
    batches = [list(order) for order in orders]
    assert [len(order) for order in orders] == [len(own) for own in batches]
    if not options.get("pad", True):
        return
    sizes = {tuple(len(batch) if batch_size else 1 for batch in own) for own in batches}
    assert len(sizes) == 1, "ranks take batches of equal sizes"
    if batch_size and "drop_last" in options:
        assert set(*sizes) <= {batch_size}


def test_without_padding_the_last_rank_has_the_state_of_the_end() -> None:
    """No other rank takes more samples: after its state nothing is left."""
    for count, batch_size in itertools.product(range(9, 17), (None, 1, 3)):
        options: dict[str, Any] = {"world_size": 4, "batch_size": batch_size, "pad": False}
        orders = [wdsfs.Shuffle(range(count), rank=rank, **options) for rank in range(4)]
        taken = [number for order in orders for number in samples_of(iter(order))]
        assert sorted(taken) == list(range(count))
        for order in orders:
            order.load_state_dict(orders[-1].state_dict())
            assert order.remaining == 0


@examples(40)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    weights=st.lists(st.integers(1, 9), min_size=4, max_size=4),
    parts=PARTS,
    length=st.integers(1, 3000),
)
def test_a_mix_has_exact_shares(
    sizes: list[int], weights: list[int], parts: list[tuple[int, int]], length: int
) -> None:
    """In all that a rank takes from the beginning; no sample of a set comes again before all have come."""
    weights = weights[: len(sizes)]
    mix = wdsfs.Mix(zip(map(range, sizes), weights, strict=True), length=length)
    ends = [*itertools.accumulate(sizes)]
    order = wdsfs.Shuffle(mix, seed=1, rank=0, world_size=parts[0][0], open_ranges=2)
    owners = np.searchsorted(ends, samples_of(iter(order)), "right")
    for owner, weight in enumerate(weights):
        exact = np.arange(len(owners) + 1) * weight / sum(weights)
        given_ = np.concatenate(([0], np.cumsum(owners == owner)))
        assert np.abs(given_ - exact).max() <= len(sizes) / 2 + 0.5
    options = {"seed": 2, "batch_size": 3, "open_ranges": 1}
    taken = trained(mix, options, parts)
    assert 0 <= len(taken) - length < max(world_size for world_size, _ in parts), "the padding"
    counts = collections.Counter(trained(mix, options, [(1, batches) for _, batches in parts]))
    for owner, size in enumerate(sizes):
        own = [counts[number] for number in range(ends[owner] - size, ends[owner])]
        assert max(own) - min(own) <= 1


@pytest.mark.parametrize("options", [{}, {"pad": False}, {"drop_last": True}], ids=str)
def test_a_pass_through_a_set_of_a_mix_repeats_fewer_samples_than_ranks(options: dict[str, bool]) -> None:
    """A pass ends on all ranks at the same time, though some have a sample less."""
    mix, ranks = wdsfs.Mix([(range(1000), 3), (range(100), 1)]), 8
    counts: collections.Counter[int] = collections.Counter()
    for rank in range(ranks):
        counts.update(wdsfs.Shuffle(mix, rank=rank, world_size=ranks, **options))
    passes = -(-sum(counts[number] for number in range(1000, 1100)) // 104)
    for first, size, most in ((0, 1000, 1), (1000, 100, passes)):
        own = [counts[number] for number in range(first, first + size)]
        assert sum(max(count - most, 0) for count in own) < ranks * most
        assert min(own) >= most - 1


def hashed(order: wdsfs.Shuffle) -> str:
    return hashlib.sha256(np.array(samples_of(iter(order))).astype("<i8").tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("cell", [1, sample_order.CELL_MIN])
def test_an_order_never_changes(cell: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints name places in it: these values must stay in each later version."""
    monkeypatch.setattr(sample_order, "CELL_MIN", cell)
    resumed = wdsfs.Shuffle(range(100_000), seed=3, rank=2, world_size=5, batch_size=64, open_ranges=10)
    resumed.load_state_dict(
        {
            "format": 1,
            "seed": 3,
            "epoch": 4,
            "ranges": resumed.state_dict()["ranges"],
            "stages": [[3, 10, 64 * 100], [5, 20, 64 * 7]],
        }
    )
    mix = wdsfs.Mix([(range(60_000), 1), (range(6000), 0.5), (range(7), 0.01)])
    orders = {
        "one rank": wdsfs.Shuffle(range(100_000), seed=1, open_ranges=10),
        "ranks": wdsfs.Shuffle(range(100_001), seed=2**63, rank=3, world_size=4, batch_size=10, open_ranges=10),
        "complete": wdsfs.Shuffle(range(1000), rank=1, world_size=2),
        "resumed": resumed,
        "mix": wdsfs.Shuffle(mix, seed=5, rank=1, world_size=2, batch_size=4, open_ranges=20),
    }
    assert {name: hashed(order) for name, order in orders.items()} == {
        "complete": "a323a09da8fae295",
        "mix": "5b57d0c3caebf96a",
        "one rank": "86831ca17f3a089a",
        "ranks": "bed2602b1ec676fe",
        "resumed": "ff785a4a34a10c69",
    }
    bounds = sample_order.RANGES_MAX, sample_order.COMPLETE_MAX, shuffle.RANGE_BYTES, shuffle.OPEN_RANGES
    assert bounds == (1 << 20, 1 << 20, 4 << 20, 100)
    counts, sizes = [0, 3, 5000, 1, 2_000], [512, 9 << 20, 20 << 20, 1, 1]
    assert sample_order.cut(counts, sizes, 4 << 20).starts.tolist() == [
        *(0, 1, 2),  # ranges have at least a sample
        *(3, 1003, 2003, 3003, 4003),
        *(5003, 5004, 6004),  # and at most 1,024
    ]


def test_an_epoch_of_10_million_takes_little() -> None:
    """Of memory: less than 25 bytes a sample; the first batch after a resumption on more ranks, too."""
    order = wdsfs.Shuffle(LARGE, batch_size=1000, open_ranges=100)
    state = {**order.state_dict(), "stages": [[8, 100, 600_000]]}

    def run() -> tuple[int, list[int]]:
        resumed = wdsfs.Shuffle(LARGE, rank=5, world_size=64, batch_size=1000, open_ranges=100)
        resumed.load_state_dict(state)
        return sum(len(batch) for batch in order), next(iter(resumed))

    count, batch = bounded(run, memory=160 << 20)
    assert count == len(LARGE)
    assert len(set(batch)) == 1000


class Recorded(wdsfs.Samples):
    """Samples that note what is announced."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.announced: list[tuple[int, int]] = []

    def will_read(self, first: int, stop: int) -> None:
        self.announced.append((first, stop))


@pytest.mark.parametrize("resumed", [0, 1000])
def test_ranges_are_announced_once_and_before_they_are_read(tmp_path: Path, resumed: int) -> None:
    """By the rank that reads them: those that are open, and some that come soon."""
    for number in range(20):
        names = (b"%d.txt" % at for at in range(200))
        (tmp_path / f"t-{number}.tar").write_bytes(tars.tar(*(tars.member(name, b"x" * 400) for name in names)))
    everything: list[tuple[int, int]] = []
    at_once: list[tuple[int, int]] = []
    with Recorded("t-{0..19}.tar") as samples:
        for rank in range(2):
            order = wdsfs.Shuffle(samples, rank=rank, world_size=2, open_ranges=10, range_bytes=20 << 10)
            order.load_state_dict({**order.state_dict(), "stages": [[2, 10, resumed]]})
            samples.announced.clear()
            read: set[int] = set()
            for number in order:
                read.add(number)
                ahead = [range_ for range_ in samples.announced if not read.intersection(range(*range_))]
                assert any(first <= number < stop for first, stop in samples.announced)
                assert len(ahead) <= 10
                unfinished = [range_ for range_ in samples.announced if not read.issuperset(range(*range_))]
                assert resumed or len(unfinished) <= 12
            for first, stop in samples.announced:
                assert first // 200 == (stop - 1) // 200, "a range is in one shard"
                assert 0 < stop - first <= 20
            everything += samples.announced
            if not resumed:  # as many as fit: all at once, and each rank others
                samples.announced.clear()
                next(iter(wdsfs.Shuffle(samples, rank=rank, world_size=2, open_ranges=200, range_bytes=20 << 10)))
                at_once += samples.announced
    for ranges in (everything, at_once):
        assert len(ranges) == len(set(ranges))
        if not resumed:
            assert sorted(number for range_ in ranges for number in range(*range_)) == list(range(4000))


def quality(order: Any) -> tuple[float, float, float]:
    """How well an order mixes, in batches of 64 of shards of 1,000 samples: the shards of a batch, its samples of
    one shard, and the distance of samples that are neighbours in the set, as a share of the epoch."""
    batches = (order[: len(order) // 64 * 64] // 1000).reshape(-1, 64)
    shards = np.mean([len(np.unique(batch)) for batch in batches])
    most = np.mean([np.bincount(batch).max() for batch in batches])
    return float(shards), float(most), np.abs(np.diff(np.argsort(order))).mean() / len(order)


@pytest.mark.parametrize(("count", "distance"), [(5000, 0.33), (400_000, 6400 / 400_000)])
def test_batches_are_mixed_like_those_of_a_full_shuffle(count: int, distance: float) -> None:
    """A small set is shuffled completely. In any other the samples of a range come one soon after the other."""
    order, full = np.array(list(wdsfs.Shuffle(range(count), open_ranges=100))), np.random.default_rng(0)
    shards, most, distance_ = quality(order)
    shards_of_full, most_of_full, _ = quality(full.permutation(count))
    assert abs(np.corrcoef(order, np.arange(count))[0, 1]) < 0.06
    assert shards > 0.99 * shards_of_full
    assert most < 1.02 * most_of_full
    assert distance_ > 0.45 * distance


def test_ranges_that_meet_in_a_batch_part_again() -> None:
    """Pairs of open ranges share as many batches, more or less, as if the samples of 50 batches were shuffled."""
    order, random = np.array(list(wdsfs.Shuffle(range(400_000), open_ranges=100))), np.random.default_rng(0)
    spreads: list[list[float]] = [[], []]
    for batches in np.split(order[64 * 100 : 64 * 3100] // 64, 60):
        open_ = np.intersect1d(batches[:200], batches[-200:])
        for spread, ranges in zip(spreads, (batches, random.permutation(batches)), strict=True):
            is_in = np.array([(ranges.reshape(-1, 64) == range_).any(axis=1) for range_ in open_], int)
            spread.append(float(np.std((is_in @ is_in.T)[np.triu_indices(len(open_), 1)])))
    assert np.mean(spreads[0]) < 1.05 * np.mean(spreads[1])


def test_data_sets_of_others_are_shuffled_completely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    shards, _, distance = quality(np.array(list(wdsfs.Shuffle(range(50_000)))))
    assert (round(distance, 2), round(shards)) == (0.33, 36)
    order = wdsfs.Shuffle(LARGE, batch_size=64)
    order.load_state_dict({**order.state_dict(), "stages": [[2, 1 << 10, 2_000_000]]})
    assert len({number // 5000 for number in next(iter(order))}) > 55


def test_epochs_follow_each_other_or_are_chosen() -> None:
    order = wdsfs.Shuffle(range(50), seed=4, batch_size=8)
    epochs = [list(order) for _ in range(3)]
    assert len({str(epoch) for epoch in epochs}) == 3
    assert order.epoch == 2
    next(iter(order))  # an epoch that is broken off is over, too
    assert list(order) != epochs[2]
    assert order.epoch == 4
    order.set_epoch(1)
    assert list(order) == epochs[1]
    order.set_epoch(1)
    assert list(order) == epochs[1]
    assert list(order) == epochs[2]
    assert list(wdsfs.Shuffle(range(50), seed=5, batch_size=8)) != epochs[0]


def test_a_state_is_a_place_in_an_epoch() -> None:
    """Of what a loop had, not of what its loader had asked for; `set_epoch` of the same epoch keeps it."""
    order = wdsfs.Shuffle(range(50), seed=4, batch_size=8)
    first, second = list(order), list(order)
    order.set_epoch(0)
    iterator = iter(order)
    for _ in range(4):
        next(iterator)
    asked, delivered = order.state_dict(), order.state_dict(delivered=2)
    assert (asked["consumed"], delivered["consumed"]) == (32, 16)
    again = pickle.loads(pickle.dumps(wdsfs.Shuffle(range(50), batch_size=8)))
    again.load_state_dict(delivered)
    assert (again.remaining, len(again), again.epoch) == (5, 7, 0)
    again.set_epoch(0)
    third = iter(again)
    assert next(third) == first[2]
    assert again.state_dict(delivered=1)["consumed"] == 24
    assert list(third) == first[3:]
    ended = again.state_dict()
    assert ended["consumed"] == 50
    for is_chosen in (False, True):
        again.load_state_dict(ended)
        if is_chosen:
            again.set_epoch(0)
            assert list(again) == [], "the rest of the epoch"
        assert list(again) == second


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rank": 2, "world_size": 2}, "rank=2: ranks count from 0, and world_size is 2"),
        ({"world_size": 0}, "world_size=0: give a whole number from 1 to 65,535"),
        ({"batch_size": 2.5}, "batch_size=2.5: give a whole number from 1"),
        ({"seed": -1}, "seed=-1: give"),
        ({"open_ranges": 1 << 40}, "open_ranges="),
        ({"range_bytes": 0}, "range_bytes=0: give"),
        ({"samples": range(1 << 34)}, r"len\(samples\)=17179869184: give"),
    ],
)
def test_an_option_that_is_no_such_number(options: dict[str, Any], text: str) -> None:
    with pytest.raises(wdsfs.UsageError, match=text):
        wdsfs.Shuffle(**{"samples": range(10), **options})


def test_ranks_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert list(wdsfs.Shuffle(range(9))) == list(wdsfs.Shuffle(range(9), rank=1, world_size=2))
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(wdsfs.UsageError, match="world_size='two': give a whole number"):
        wdsfs.Shuffle(range(9))
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(wdsfs.UsageError, match="there are 2 ranks, but RANK is not set: give rank="):
        wdsfs.Shuffle(range(9))


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"stages": 7},
        {"stages": [[1]]},
        {"stages": [[1, 100, "x"]]},
        {"stages": [[1, 100, 1]] * 2000},
        {"stages": [[1 << 20, 100, 1]]},
        {"seed": None},
        {"epoch": -1},
        {"ranges": "0"},
        None,
    ],
)
def test_a_state_that_is_none(change: dict[str, Any] | None) -> None:
    order = wdsfs.Shuffle(range(50))
    state = {} if change is None else {**order.state_dict(), **change}
    with pytest.raises(wdsfs.UsageError):
        order.load_state_dict(state)
    assert len(list(order)) == 50
    assert order.epoch == 0


def test_a_state_of_another_set(shards: str, tmp_path: Path) -> None:
    with wdsfs.samples(shards) as samples, wdsfs.samples("t-{0..1}.tar") as fewer:
        state = wdsfs.Shuffle(samples).state_dict()
        for order in (wdsfs.Shuffle(fewer), wdsfs.Shuffle(samples, range_bytes=1), wdsfs.Shuffle(range(12))):
            with pytest.raises(wdsfs.UsageError, match="open the same shards with the same range_bytes"):
                order.load_state_dict(state)
        for number in range(3):  # as many samples: their content is not compared
            (tmp_path / f"u-{number}.tar").write_bytes(shard(number + 5))
        with wdsfs.samples("u-{0..2}.tar") as others:
            wdsfs.Shuffle(others).load_state_dict(state)


def test_a_mix_is_a_data_set(shards: str) -> None:
    samples = expected()
    with wdsfs.samples(shards) as set_:
        mix = wdsfs.Mix([(set_, 3), (list("abc"), 1)])
        assert len(mix) == 15
        assert [mix[number] for number in (0, -1, 12)] == [samples[0], "c", "a"]
        assert mix[10:14] == [*samples[10:], "a", "b"]
        assert mix.__getitems__([14, 3, 12, 3]) == ["c", samples[3], "a", samples[3]]
        with pytest.raises(IndexError):
            mix[15]
        assert len({str(mix[number]) for number in wdsfs.Shuffle(mix, batch_size=None)}) > 10
        wrong: list[Any] = [
            [],
            [(set_, 0)],
            [(set_, float("nan"))],
            [([], 1), (set_, 1)],
            {mix: 1},
            [(set_, 1)] * 300,
        ]
        for weights in (*wrong, [(set_, 1)] * 300):
            with pytest.raises(wdsfs.UsageError, match="mix"):
                wdsfs.Mix(weights)


def test_the_page_can_be_typed(program: Program) -> None:
    need_tool("torchvision")
    need_fuse()
    page = (ROOT / "docs/how-to/train.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    Image.new("L", (1, 1)).save(picture := io.BytesIO(), "PNG")
    for number in range(3):
        files = [("cls", b"1"), ("png", picture.getvalue()), ("txt", b"1")]
        members = [
            tars.member(f"k{4 * number + at}.{name}".encode(), content)
            for at in range(4)
            for name, content in files
        ]
        (program.home / f"train-{number}.tar").write_bytes(tars.tar(*members))
    (program.home / "page.py").write_text("\n".join(blocks))
    printed = run_python(program, SCRIPTS / "with_torchvision.py", "page.py", PYTHONPATH=str(ROOT)).splitlines()
    assert printed[-3:] == ["4 pictures"] * 3
    lines = [(line.partition("[")[0], re.findall(r"'(k\d+)'", line)) for line in printed[:-3]]
    assert [start for start, _ in lines] == ["0 "] * 3 + ["1 "] * 3 + ["0 2 batches are left"] + [""] * 6
    epochs = [[key for _, keys in lines[at : at + 3] for key in keys] for at in (0, 3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(f"k{number}" for number in range(12))
    assert lines[7][1] + lines[8][1] == epochs[0][8:], "what was left"
    assert sorted(collections.Counter(key for _, keys in lines[9:] for key in keys).values())[-4:] == [2, 2, 2, 2]
