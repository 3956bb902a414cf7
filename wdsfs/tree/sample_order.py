"""The order of an epoch: each sample once, mixed with the samples of other ranges, each range read in one go.

A set is cut into ranges of neighbouring samples. Their permutation is dealt to the ranks, so that ranks share no
range, and each rank draws from some dozens of ranges at a time: a sample's key is a random number in a window
around its range, and a rank takes its samples by their keys. Any place of an epoch is therefore computed from the
ranges around it alone.

An order is a format: checkpoints name places in it, so it must never change. It follows from SplitMix64 and
BLAKE2b, in integers, and from no generator whose stream another version of a library may change.
"""

from __future__ import annotations

import hashlib
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
Step: TypeAlias = list[int] | Range  # the samples that come next, or a range whose samples will come soon


class Ranges(NamedTuple):
    """The samples that are left of an epoch, in ranges.

    A range has `sizes` places from `starts` on. A place below `total`, the samples of the set, is a sample; any
    other is a place in `extra`, the samples that are left of ranges that were open.
    """

    total: int
    starts: Numbers
    sizes: Numbers
    extra: Numbers

    def ranges(self, which: slice) -> Iterator[Range]:
        """Return some ranges, as the first and the last place of each."""
        starts = self.starts[which]
        return zip(starts.tolist(), (starts + self.sizes[which]).tolist(), strict=True)

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
    at = np.arange(len(shard)) - (np.cumsum(ranges) - ranges)[shard]
    first, size, parts = (np.cumsum(samples) - samples)[shard], samples[shard], ranges[shard]
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
        """Return what is left when each rank has taken its first `taken` samples."""
        parts = [Lane(self, rank).rest(taken) for rank in range(self.world_size)]
        starts, sizes, extra, groups = (np.concatenate(column) for column in zip(*parts, strict=True))
        total, before = self.ranges.total, self.ranges.extra
        starts = np.concatenate((starts, total + len(before) + np.cumsum(groups) - groups))
        return Ranges(total, starts, np.concatenate((sizes, groups)), np.concatenate((before, extra)))


class _Drawn(NamedTuple):
    """Samples of some ranges by their keys; all samples of the `base` samples before have lower keys."""

    base: int
    keys: Numbers
    samples: Numbers
    owners: Numbers  # the ranges that have the samples

    def place(self, key: int) -> int:
        """Return the place of the first sample with this key or a higher one."""
        return int(np.searchsorted(self.keys, key << TIE_BITS))


class Lane:
    """The part of an order that a rank takes: `size` samples, at most one less than `Order.most`.

    Keys are cut into cells, at least as long as the window, which are drawn one after the other. The order does
    not depend on them.
    """

    def __init__(self, order: Order, rank: int) -> None:
        self._order, self._rank = order, rank
        first, stop = (order.count * at // order.world_size for at in (rank, rank + 1))
        self.size = stop - first
        begin, end = (int(np.searchsorted(order.ends, at, "right")) for at in (first, stop - 1))
        parts = slice(begin, end + 1 if self.size else begin)
        self._starts, self._sizes = order.starts[parts].copy(), order.sizes[parts].copy()
        if self.size:  # the neighbours may have parts of the first range and of the last one
            after = int(order.ends[begin]) - first
            self._starts[0] += self._sizes[0] - after
            self._sizes[0] = after
            self._sizes[-1] -= int(order.ends[end]) - stop
        self._window = max(min(order.window, self.size), 1)
        self._cell = max(self._window, CELL_MIN)
        self._before = np.cumsum(self._sizes) - self._sizes
        low = self._before + self._sizes // 2 - self._window // 2
        self._low = np.maximum(low, 0)
        self._spans = np.minimum(low + self._window, self.size) - self._low

    def steps(self, taken: int) -> Iterator[Step]:
        """Yield what comes after the first `taken` samples. A rank that has fewer than others gets one more."""
        if taken < self.size:
            yield from self._own_steps(taken)
        if max(taken, self.size) < self._order.most:
            starts = self._order.starts
            yield self._order.ranges.samples(starts[[self._rank % len(starts)]]).tolist()

    def _own_steps(self, taken: int) -> Iterator[Step]:
        opens, whole = self._low - self._window // AHEAD, self._order.ranges
        if self._order.is_complete:
            own = whole.ranges(slice(self._rank, None, self._order.world_size))
            yield from (range_ for range_ in own if range_[0] < whole.total)
            opens = opens[:0]
        whole = whole._replace(starts=self._starts, sizes=self._sizes)
        cell, drawn = self._find(taken)
        key = int(drawn.keys[taken - drawn.base]) >> TIE_BITS
        begin = int(np.searchsorted(self._low[: len(opens)], key - self._window, "right"))
        while True:
            at, stop = taken - drawn.base, drawn.place((cell + 1) * self._cell)
            end = int(np.searchsorted(opens, (cell + 1) * self._cell))
            places = np.maximum(np.searchsorted(drawn.keys, opens[begin:end] << TIE_BITS), at).tolist()
            samples = drawn.samples.tolist()
            for place, range_ in zip(places, whole.ranges(slice(begin, end)), strict=True):
                yield samples[at:place]
                if range_[0] < whole.total:
                    yield range_
                at = place
            yield samples[at:stop]
            taken, begin, cell = drawn.base + stop, end, cell + 1
            if taken >= self.size:
                return
            drawn = self._draw(cell)

    def rest(self, taken: int) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Return what follows the first `taken` samples.

        The starts and sizes of whole ranges, the samples of others by their ranges, and how many each has.
        """
        if taken >= self.size:
            return (np.empty(0, np.int64),) * 4
        _, drawn = self._find(taken)
        at = taken - drawn.base
        end = int(np.searchsorted(self._low, int(drawn.keys[at]) >> TIE_BITS, "right"))  # later ones are whole
        is_left = drawn.owners[at:] < end
        samples, owners = drawn.samples[at:][is_left], drawn.owners[at:][is_left]
        groups = np.unique(owners, return_counts=True)[1]
        return self._starts[end:], self._sizes[end:], samples[np.lexsort((samples, owners))], groups

    def _find(self, taken: int) -> tuple[int, _Drawn]:
        """Return the cell with the sample after the first `taken`; cells have about as many samples as keys."""
        cell = taken // self._cell
        while True:
            drawn = self._draw(cell)
            at = taken - drawn.base
            if at < drawn.place(cell * self._cell):
                cell -= 1
            elif at >= drawn.place((cell + 1) * self._cell):
                cell += 1
            else:
                return cell, drawn

    def _draw(self, cell: int) -> _Drawn:
        """Draw the samples of all ranges that have some in a cell."""
        begin = int(np.searchsorted(self._low, cell * self._cell - self._window, "right"))
        end = int(np.searchsorted(self._low, (cell + 1) * self._cell))
        sizes = self._sizes[begin:end]
        samples = self._order.ranges.samples(_places(self._starts[begin:end], sizes))
        bits = random_bits(samples, self._order.key)
        spans = np.repeat(self._spans[begin:end], sizes).astype(np.uint64)
        offsets = ((bits >> np.uint64(32)) * spans >> np.uint64(32)).astype(np.int64)
        ties = (bits & np.uint64((1 << TIE_BITS) - 1)).astype(np.int64)
        keys = np.repeat(self._low[begin:end], sizes) + offsets << TIE_BITS | ties
        order = np.argsort(keys, kind="stable")
        base = int(self._before[begin]) if begin < len(self._before) else self.size
        owners = np.repeat(np.arange(begin, end), sizes)
        return _Drawn(base, keys[order], samples[order], owners[order])


def steps_after(ranges: Ranges, words: Sequence[object], stages: Sequence[Stage], rank: int) -> Iterator[Step]:
    """Yield what comes after these stages: the rest of a pass through a set, then one pass after the other."""
    left, number, words = ranges, 0, tuple(words)
    for at, stage in enumerate(stages):
        order, taken = Order(left, (*words, number, at), *stage[:2]), stage.taken
        if taken >= order.most:
            passes, taken = divmod(taken - order.most, -(-ranges.total // stage.world_size))
            number += 1 + passes
            order = Order(ranges, (*words, number, at), *stage[:2])
        left = order.rest(taken) if at < len(stages) - 1 else left
    while True:
        yield from Lane(order, rank).steps(taken)
        number, taken = number + 1, 0
        order = Order(ranges, (*words, number, len(stages) - 1), *stages[-1][:2])


def picked(weights: Sequence[float], taken: int) -> list[int]:
    """Return how many of the first `taken` samples of a mix each set has given."""
    exact = np.asarray(weights) * taken
    counts = np.maximum(exact.astype(np.int64) - len(weights), 0)  # surely among the first
    picks = _picks(weights, counts, taken - int(counts.sum()))
    return [int(count) for count in counts + np.bincount(picks, minlength=len(weights))]


def picks_after(weights: Sequence[float], taken: int) -> Iterator[int]:
    """Yield the set of each sample of a mix after the first `taken`. The sum of the weights is 1."""
    counts = np.array(picked(weights, taken))
    while True:
        picks = _picks(weights, counts, 4096)
        yield from picks.tolist()
        counts += np.bincount(picks, minlength=len(weights))


def _picks(weights: Sequence[float], counts: Numbers, length: int) -> Numbers:
    """Return the sets of the next samples after each has given `counts`. Sample i is due at (i + 1/2) / weight."""
    shares, sets = np.asarray(weights), np.arange(len(weights))
    owners = np.repeat(sets, (shares * (length + len(sets))).astype(np.int64) + len(sets) + 2)  # surely enough
    at = np.arange(len(owners)) - np.searchsorted(owners, sets)[owners] + counts[owners]
    return owners[np.argsort((at + 0.5) / shares[owners], kind="stable")[:length]]


def _places(starts: Numbers, sizes: Numbers) -> Numbers:
    """Return the places of ranges, one range after the other."""
    before = np.cumsum(sizes) - sizes
    return np.repeat(starts - before, sizes) + np.arange(int(sizes.sum()))
