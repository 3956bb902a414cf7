"""The order of an epoch: each sample once, mixed with the samples of other ranges, each range read in one go.

A set is cut into ranges of neighbouring samples. Their permutation is dealt to the ranks, so that ranks share no
range, and each rank draws from some dozens of ranges at a time: the keys of a range's samples are numbers in a
window around it, at random gaps, and a rank takes its samples by their keys. Any place of an epoch is therefore
computed from the ranges around it alone.

An order is a format: checkpoints name places in it, so it must never change. It follows from SplitMix64 and
BLAKE2b, in integers, and from no generator whose stream another version of a library may change.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

RANGES_MAX = 1 << 20  # of a set; a range of a larger set has several samples, whatever their sizes
RANGE_SAMPLES_MAX = 1024
COMPLETE_MAX = 1 << 20  # samples of a set that is shuffled without ranges when its ranges would all be open
AHEAD = 16  # a range is announced a sixteenth of the window before its first sample can come
CELL_MIN = 1 << 12  # samples that are drawn at a time
TIE_BITS = 20  # random bits below a key, which order the samples of the same key

Numbers: TypeAlias = Any  # an array of NumPy, whose types are not ours to check: 64-bit integers
Range: TypeAlias = tuple[int, int]  # the first sample, and the number after the last one
Step: TypeAlias = tuple[list[int], Range | None]  # the samples that come next, and a range to announce then


class Ranges(NamedTuple):
    """The samples that are left of an epoch, in ranges.

    A range has `sizes` places from `starts` on. A place below `total`, the samples of the set, is a sample; any
    other is a place in `extra`, the samples that are left of ranges that were open.
    """

    total: int
    starts: Numbers
    sizes: Numbers
    extra: Numbers

    def samples(self, places: Numbers) -> Numbers:
        """Return the samples at these places."""
        if not len(self.extra):
            return places
        return np.where(places < self.total, places, self.extra[np.maximum(places - self.total, 0)])


def cut(counts: Sequence[int], sizes: Sequence[int], range_bytes: int) -> Ranges:
    """Cut shards with these counts of samples and sizes in bytes into ranges of about `range_bytes`."""
    samples, length = np.asarray(counts, np.int64), np.asarray(sizes, np.int64)
    total = int(samples.sum())
    fewest, most = -(-samples // RANGE_SAMPLES_MAX), -(-samples // (total // RANGES_MAX + 1))
    ranges = np.minimum(np.maximum(np.maximum(-(-length // range_bytes), fewest), 1), most)
    shard = np.repeat(np.arange(len(samples)), ranges)
    first, size, parts = _before(samples)[shard], samples[shard], ranges[shard]
    at = np.arange(len(shard)) - _before(ranges)[shard]
    # `q * at + r * at // parts` is `size * at // parts`, without a product that could overflow.
    starts = first + size // parts * at + size % parts * at // parts
    return Ranges(total, starts, np.diff(np.append(starts, total)), np.empty(0, np.int64))


def digest_of(sets: Sequence[Ranges], *words: object) -> str:
    """Return a hash of all that a place in an epoch depends on, which is the same wherever sets are cut alike."""
    digest = hashlib.blake2b(repr(words).encode(), digest_size=16)
    for ranges in sets:
        digest.update(np.append(ranges.starts, ranges.total).astype("<i8").tobytes())
    return digest.hexdigest()


def random_bits(numbers: Numbers, key: int) -> Numbers:
    """Return 64 random bits for each number: SplitMix64 from the state `key`."""
    bits = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def key_of(*words: object) -> int:
    """Return the state of a generator, from the words that name its use."""
    text = "\0".join(map(str, ("wdsfs order 1", *words)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Stage(NamedTuple):
    """A run through a part of an epoch: each of `world_size` ranks took `taken` samples."""

    world_size: int
    open_ranges: int  # ranges from which a rank draws at a time
    taken: int


class Order:
    """The order in which `world_size` ranks take ranges, each drawing from `open_ranges` at a time.

    `words` name the seed, the epoch and whatever else tells this order from others.
    """

    def __init__(self, ranges: Ranges, words: Sequence[object], world_size: int, open_ranges: int) -> None:
        self.ranges, self.world_size, self.count = ranges, world_size, int(ranges.sizes.sum())
        self.most = -(-self.count // world_size)  # samples of the ranks that have most
        self.window = open_ranges * -(-self.count // max(len(ranges.starts), 1))
        self.is_complete = self.count <= min(self.window * world_size, COMPLETE_MAX)
        self.key = key_of(*words, "samples")
        starts, sizes = ranges.starts, ranges.sizes
        if self.is_complete:
            starts, sizes = _places(starts, sizes), np.ones(self.count, np.int64)
        order = np.argsort(random_bits(np.arange(len(starts)), key_of(*words, "ranges")), kind="stable")
        self.starts, self.sizes = starts[order], sizes[order]
        self.ends = np.cumsum(self.sizes)

    def rest(self, taken: int) -> Ranges:
        """Return what is left when each rank has taken its first `taken` samples, fewer than `most`."""
        lanes = [Lane(self, rank) for rank in range(self.world_size)]
        parts = [lane.rest(taken) for lane in lanes if taken < lane.size]
        starts, sizes, extra, groups = (np.concatenate(column) for column in zip(*parts, strict=True))
        total, before = self.ranges.total, self.ranges.extra
        starts = np.concatenate((starts, total + len(before) + _before(groups)))
        return Ranges(total, starts, np.concatenate((sizes, groups)), np.concatenate((before, extra)))


class Lane:
    """The part of an order that a rank takes: `size` samples, at most one less than `Order.most`."""

    def __init__(self, order: Order, rank: int) -> None:
        self._order, self._rank = order, rank
        first, stop = (order.count * at // order.world_size for at in (rank, rank + 1))
        self.size = stop - first
        begin, end = np.searchsorted(order.ends, (first, stop - 1), "right")
        own = slice(begin, end + 1)  # the neighbours may have parts of the first range and of the last one
        before = order.ends[own] - order.sizes[own] - first
        self._before, self._starts = np.maximum(before, 0), order.starts[own] - np.minimum(before, 0)
        self._sizes = np.minimum(order.ends[own], stop) - first - self._before
        self._window = max(min(order.window, self.size), 1)
        low = self._before + self._sizes // 2 - self._window // 2
        self._low = np.maximum(low, 0)
        self._spans = np.minimum(low + self._window, self.size) - self._low

    def steps(self, taken: int) -> Iterator[Step]:
        """Yield the samples after the first `taken` ones. A rank that has fewer than others gets one more."""
        if taken < self.size:
            yield from self._own_steps(taken)
        if max(taken, self.size) < self._order.most:
            starts = self._order.starts
            yield self._order.ranges.samples(starts[[self._rank % len(starts)]]).tolist(), None

    def _own_steps(self, taken: int) -> Iterator[Step]:
        starts, stops, opens = self._announcements()
        stop, keys, samples, _ = self._find(taken)
        lead = self._window + self._window // AHEAD
        begin = int(np.searchsorted(opens, (int(keys[0]) >> TIE_BITS) - lead, "right"))
        while True:
            count, end = int(np.searchsorted(keys, stop << TIE_BITS)), int(np.searchsorted(opens, stop))
            places = np.searchsorted(keys, opens[begin:end] << TIE_BITS).tolist()
            numbers, at = samples[:count].tolist(), 0
            for place, *range_ in zip(places, starts[begin:end].tolist(), stops[begin:end].tolist(), strict=True):
                yield numbers[at:place], (range_[0], range_[1])
                at = place
            yield numbers[at:], None
            taken += count
            if taken >= self.size:
                return
            begin, first, stop = end, stop, stop + max(self._window, CELL_MIN)
            keys, samples, _ = self._draw(taken, first, stop)

    def _announcements(self) -> tuple[Numbers, Numbers, Numbers]:
        """Return the ranges to announce: first samples, ends, and before which keys this should be."""
        starts, sizes, opens = self._starts, self._sizes, self._low - self._window // AHEAD
        if self._order.is_complete:  # its ranges have a sample each; all ranges of the set are open
            own, set_ = slice(self._rank, None, self._order.world_size), self._order.ranges
            starts, sizes = set_.starts[own], set_.sizes[own]
            opens = np.zeros(len(starts), np.int64)
        is_whole = starts < self._order.ranges.total
        return starts[is_whole], (starts + sizes)[is_whole], opens[is_whole]

    def rest(self, taken: int) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Return what follows the first `taken` samples, fewer than `size`.

        The starts and sizes of whole ranges, the samples of others by their ranges, and how many each has.
        """
        _, keys, samples, owners = self._find(taken)
        end = int(np.searchsorted(self._low, int(keys[0]) >> TIE_BITS, "right"))  # later ones are whole
        samples, owners = samples[owners < end], owners[owners < end]
        groups = np.unique(owners, return_counts=True)[1]
        return self._starts[end:], self._sizes[end:], samples[np.lexsort((samples, owners))], groups

    def _find(self, taken: int) -> tuple[int, Numbers, Numbers, Numbers]:
        """Draw the samples after the first `taken` ones; return the key before which none is missing, too."""
        # Each range has as many samples before it as the middle of its window says: key and place differ by this.
        reach = (self._window + int(self._sizes.max())) // 2 + 1
        return taken + reach, *self._draw(taken, taken - reach, taken + reach)

    def _draw(self, taken: int, first: int, stop: int) -> tuple[Numbers, Numbers, Numbers]:
        """Draw all ranges that have keys from `first` to before `stop`.

        Return the keys after the first `taken` samples, in order, with the samples and the ranges that have them.
        """
        begin = int(np.searchsorted(self._low, first - self._window, "right"))
        end = int(np.searchsorted(self._low, stop))
        sizes = self._sizes[begin:end]
        owners = np.repeat(np.arange(begin, end), sizes)
        samples = self._order.ranges.samples(_places(self._starts[begin:end], sizes))
        bits = random_bits(samples, self._order.key).astype(np.int64)
        # In a random order within each range.
        samples = samples[np.argsort(owners - begin << 28 | bits >> 36 & (1 << 28) - 1, kind="stable")]
        keys = self._keys(slice(begin, end), bits)
        order = np.argsort(keys, kind="stable")[taken - int(self._before[begin]) :]
        return keys[order], samples[order], owners[order]

    def _keys(self, own: slice, bits: Numbers) -> Numbers:
        """Return the keys for the samples of these ranges.

        A range has its keys all over its window, at gaps of 5/8 to 11/8 of their mean. So a batch seldom has two
        samples of a range, and which ranges meet in a batch does not tell which will meet some batches later.
        """
        sizes = self._sizes[own]
        gaps = (bits & 0xFFFF) * 3 + (5 << 15)
        ends, last = np.cumsum(gaps), np.cumsum(sizes) - 1
        totals = np.diff(ends[last], prepend=0)
        # The gaps lie on a circle, and the window begins anywhere in the last one.
        begins = ends[last] - totals - (gaps[last] * (bits[last] >> 16 & 0xFFFF) >> 16)
        columns = (self._low[own], self._spans[own], begins, totals)
        lows, spans, begins, totals = (np.repeat(column, sizes) for column in columns)
        # Products stay below 2**63: sets have fewer than 2**34 samples, and fewer than 2**16 ranges are open.
        return lows + (ends - gaps - begins) * spans // totals << TIE_BITS | bits >> 16 & (1 << TIE_BITS) - 1


def steps_after(ranges: Ranges, words: Sequence[object], stages: Sequence[Stage], rank: int) -> Iterator[Step]:
    """Yield the samples after these stages: the rest of a pass through a set, then one pass after the other."""
    left, number = ranges, 0
    for at, (world_size, open_ranges, taken) in enumerate(stages):
        order = Order(left, (*words, number, at), world_size, open_ranges)
        if taken >= order.most:
            passes, taken = divmod(taken - order.most, -(-ranges.total // world_size))
            number += 1 + passes
            order = Order(ranges, (*words, number, at), world_size, open_ranges)
        left = order.rest(taken) if at < len(stages) - 1 else left
    while True:
        yield from Lane(order, rank).steps(taken)
        number, taken = number + 1, 0
        order = Order(ranges, (*words, number, at), world_size, open_ranges)


def picked(weights: Sequence[float], taken: int) -> list[int]:
    """Return how many of the first `taken` samples of a mix each set has given."""
    counts = [max(int(weight * taken) - len(weights), 0) for weight in weights]  # surely among the first
    more = Counter(itertools.islice(_picks(weights, counts), taken - sum(counts)))
    return [count + more[owner] for owner, count in enumerate(counts)]


def picks_after(weights: Sequence[float], taken: int) -> Iterator[int]:
    """Yield the set of each sample of a mix after the first `taken`. The sum of the weights is 1."""
    return _picks(weights, picked(weights, taken))


def _picks(weights: Sequence[float], counts: Sequence[int]) -> Iterator[int]:
    """Yield the sets of the next samples after each has given `counts`. Sample i is due at (i + 1/2) / weight."""

    def dues(owner: int) -> Iterator[tuple[float, int]]:
        return (((at + 0.5) / weights[owner], owner) for at in itertools.count(counts[owner]))

    return (owner for _, owner in heapq.merge(*map(dues, range(len(weights)))))


def _before(sizes: Numbers) -> Numbers:
    """Return how many places come before each range."""
    return np.cumsum(sizes) - sizes


def _places(starts: Numbers, sizes: Numbers) -> Numbers:
    """Return the places of ranges, one range after the other."""
    return np.repeat(starts - _before(sizes), sizes) + np.arange(int(sizes.sum()))
