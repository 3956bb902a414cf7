"""The order of training: samplers for any DataLoader, which know their length and resume anywhere.

The order itself is computed by `tree/sample_order.py`. PyTorch is not needed, and not imported.
"""

from __future__ import annotations

import itertools
import math
import operator
import os
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

from wdsfs.errors import UsageError
from wdsfs.library.samples import Samples
from wdsfs.tree.sample_order import Ranges, Stage, Step, cut, digest_of, picked, picks_after, steps_after

FORMAT = 1  # of states
OPEN_RANGES, RANGE_BYTES = 100, 4 << 20
# Of data sets that are not ours, where neighbours need not lie side by side: the samples of a range, how many
# ranges (as a power of two) a large set has, and how many are open.
PLAIN_RANGE, PLAIN_BITS, PLAIN_OPEN_RANGES = 1, 19, 1 << 10
COUNT_MAX = 1 << 48
LIMITS = {"seed": 1 << 64, "world_size": 1 << 16, "rank": 1 << 16, "batch_size": 1 << 24, "open_ranges": 1 << 16}
LIMITS["len(samples)"] = 1 << 34  # larger products of keys would overflow
PART_MIN = 8  # ranges of a set of a mix that are open
SETS_MAX, STAGES_MAX = 1 << 8, 1 << 10


class Mix(Sequence[Any]):
    """Several sets as one data set, in which each has a share by its weight; `Shuffle` draws the shares.

    ::

        mix = wdsfs.Mix({photos: 3, drawings: 1})
        loader = DataLoader(mix, batch_sampler=wdsfs.Shuffle(mix, seed=0, batch_size=64))

    `weights` is a mapping of sets to positive numbers, or pairs of them. Numbers of samples count through the sets
    in their order. An epoch has `length` samples, by default as many as all sets together. A set gives all its
    samples before it gives one twice, except a few, fewer than there are ranks. Raises UsageError.
    """

    def __init__(
        self, weights: Mapping[Any, float] | Iterable[tuple[Any, float]], *, length: int | None = None
    ) -> None:
        pairs = list(weights.items() if isinstance(weights, Mapping) else weights)
        if not 0 < len(pairs) <= SETS_MAX:
            raise UsageError(f"a mix of {len(pairs):,} sets: has 1 to {SETS_MAX:,}")
        self.sets = [samples for samples, _ in pairs]
        total = sum(float(weight) for _, weight in pairs)
        for number, (samples, weight) in enumerate(pairs):
            if not (weight > 0 and math.isfinite(total)):
                raise UsageError(f"set {number} of the mix has the weight {weight!r}: give a positive number")
            if isinstance(samples, Mix) or not (len(samples) or (len(pairs) == 1 and length is None)):
                raise UsageError(f"set {number} of the mix is a mix, or has no samples: leave it out")
        self.weights = [float(weight) / total for _, weight in pairs]
        self.firsts = list(itertools.accumulate(map(len, self.sets), initial=0))
        self.length = len(self) if length is None else _number("length", length, 1)

    def __len__(self) -> int:
        return self.firsts[-1]

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return self.__getitems__(range(len(self))[number])
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Return many samples, in the order of the numbers. Each set is asked once. Raises IndexError."""
        span = range(len(self))
        places = [(bisect_right(self.firsts, span[number]) - 1, span[number]) for number in numbers]
        samples: dict[int, Iterator[Any]] = {}
        for owner in sorted({owner for owner, _ in places}):
            own = [number - self.firsts[owner] for at, number in places if at == owner]
            several = getattr(self.sets[owner], "__getitems__", None)
            samples[owner] = iter(several(own) if several else map(self.sets[owner].__getitem__, own))
        return [next(samples[owner]) for owner, _ in places]


class Shuffle:
    """The order of an epoch, as `batch_sampler=` of a DataLoader; without `batch_size`, as its `sampler=`.

    ::

        order = wdsfs.Shuffle(train, seed=0, batch_size=64)
        loader = DataLoader(train, batch_sampler=order, num_workers=8, collate_fn=decoded)

    Each epoch has each sample once, in another order. The order follows from `seed`, the epoch, the samples and
    sizes of the shards, and the options. `samples` is that of `wdsfs.samples`, a `Mix`, or any other data set.

    `rank` of `world_size` takes its own part. The default is that of `torch.distributed` if it is initialized, or
    else RANK and WORLD_SIZE of the environment. All ranks get as many samples: some get one again (`pad`), or the
    samples that fill no batch of all ranks are left out (`drop_last`). With `pad=False` parts and last batches
    differ by a sample.

    Shards are read in ranges of about `range_bytes`, from `open_ranges` of which (100) a rank draws at a time; any
    other data set is shuffled completely. Each iteration is the next epoch, unless `set_epoch` says which. Raises
    UsageError for values out of bounds.
    """

    def __init__(
        self,
        samples: Sized,
        *,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        batch_size: int | None = None,
        drop_last: bool = False,
        pad: bool = True,
        open_ranges: int | None = None,
        range_bytes: int = RANGE_BYTES,
    ) -> None:
        own_rank, ranks = _own_rank()
        self.world_size = _number("world_size", ranks if world_size is None else world_size, 1)
        if rank is None and own_rank is None and self.world_size > 1:
            raise UsageError(f"there are {self.world_size} ranks, but RANK is not set: give rank=")
        self.rank = _number("rank", own_rank or 0 if rank is None else rank)
        if self.rank >= self.world_size:
            raise UsageError(f"rank={self.rank}: ranks count from 0, and world_size is {self.world_size}")
        self.batch_size = None if batch_size is None else _number("batch_size", batch_size, 1)
        self.seed, self._drop_last, self._pad = _number("seed", seed), drop_last, pad
        self._mix = samples if isinstance(samples, Mix) else Mix([(samples, 1)])
        if open_ranges is None:
            is_ours = any(isinstance(set_, Samples) for set_ in self._mix.sets)
            open_ranges = OPEN_RANGES if is_ours else PLAIN_OPEN_RANGES
        self.open_ranges = _number("open_ranges", open_ranges, 1)
        self._ranges = [_ranges_of(set_, _number("range_bytes", range_bytes, 1)) for set_ in self._mix.sets]
        _number("len(samples)", len(self._mix))
        self._digest = digest_of(self._ranges, self._mix.length, self._mix.weights)
        self._place([], 0)

    def _place(self, stages: list[Stage], epoch: int) -> None:
        """Begin the next iteration after these stages of an epoch."""
        if not stages or stages[-1][:2] != (self.world_size, self.open_ranges):
            stages = [*stages, Stage(self.world_size, self.open_ranges, 0)]
        self.epoch, self._stages, self._first = epoch, stages, stages[-1].taken
        self._begun = self._is_chosen = False

    def set_epoch(self, epoch: int) -> None:
        """Make this the epoch of the next iteration. A place in it that was loaded before stays."""
        _number("epoch", epoch)
        if self._begun or epoch != self.epoch:
            self._place([], epoch)
        self._is_chosen = True

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        return -(-self._left() // (self.batch_size or 1))

    @property
    def remaining(self) -> int:
        """The batches that are left of the epoch: after `load_state_dict` fewer than `len`."""
        return -(-self._left(*self._stages) // (self.batch_size or 1))

    def _left(self, *stages: Stage) -> int:
        """Return how many samples this rank has left of an epoch after these stages; the last goes on."""
        samples = max(self._mix.length - _consumed(stages[:-1]), 0)
        ranks, size = self.world_size, self.batch_size or 1
        share = -(-samples // ranks)
        if self._drop_last:
            share = samples // (ranks * size) * size
        elif not self._pad:
            share = samples * (self.rank + 1) // ranks - samples * self.rank // ranks
        return max(share - sum(stage.taken for stage in stages[-1:]), 0)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the epoch, lists of numbers; numbers if there is no batch size."""
        least = self.world_size * (self.batch_size or 1) if self._drop_last else 1
        is_over = self._mix.length - _consumed(self._stages) < least and not (self._begun or self._is_chosen)
        self._begun |= is_over  # the state that was loaded is of the end of an epoch: begin the next epoch
        batches = self._iterate()
        # After such a state StatefulDataLoader drops an iteration, and asks for another.
        return _Batches(batches, iter(()) if is_over else batches)

    def _iterate(self) -> Iterator[Any]:
        if self._begun:
            self._place([], self.epoch + 1)
        self._begun, self._is_chosen = True, False
        stages, taken = self._stages, self._first
        numbers = itertools.islice(self._numbers(), self._left(*stages))
        while batch := list(itertools.islice(numbers, self.batch_size or 1)):
            taken += len(batch)
            stages[-1] = stages[-1]._replace(taken=taken)
            yield batch[0] if self.batch_size is None else batch

    def _numbers(self) -> Iterator[int]:
        """Yield the numbers of samples from the place in the epoch on, without an end."""
        given = [picked(self._mix.weights, stage.taken) for stage in self._stages]
        sets = []
        for owner, weight in enumerate(self._mix.weights):
            stages = [
                Stage(ranks, min(ranges, max(PART_MIN, math.ceil(ranges * weight))), counts[owner])
                for (ranks, ranges, _), counts in zip(self._stages, given, strict=True)
            ]
            words = (self.seed, self.epoch, owner)
            steps = steps_after(self._ranges[owner], words, stages, self.rank)
            sets.append(itertools.chain.from_iterable(self._announcing(owner, steps)))
        if len(sets) == 1:
            return sets[0]
        return (next(sets[owner]) for owner in picks_after(self._mix.weights, self._first))

    def _announcing(self, owner: int, steps: Iterator[Step]) -> Iterator[Iterable[int]]:
        """Yield the numbers of samples of a set, some at a time. Tell the set its next ranges on the way."""
        will_read, first = getattr(self._mix.sets[owner], "will_read", None), self._mix.firsts[owner]
        for numbers, range_ in steps:
            yield map(first.__add__, numbers) if first else numbers
            if range_ is not None and will_read is not None:
                will_read(*range_)

    def state_dict(self, delivered: int | None = None) -> dict[str, Any]:
        """Return the place in the epoch, as plain numbers; any rank's is that of all ranks.

        With `pad=False` take that of the last rank, which may have a sample more. A DataLoader asks for batches
        before it delivers them. torchdata's StatefulDataLoader allows for that by itself; with any other say how
        many batches its loop has `delivered` since it began.
        """
        last = self._stages[-1]
        if delivered is not None:
            taken = self._first + _number("delivered", delivered) * (self.batch_size or 1)
            last = last._replace(taken=min(taken, last.taken))
        stages = [*self._stages[:-1], last]
        place = {"epoch": self.epoch, "consumed": min(_consumed(stages), self._mix.length)}
        rows = [list(stage) for stage in stages]
        return {"format": FORMAT, "seed": self.seed, **place, "ranges": self._digest, "stages": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken, on as many ranks as there are now; the seed is that of the state.

        Raises UsageError if the state is of a set with other numbers of samples or ranges.
        """
        try:
            rows = [zip(Stage._fields, row, (1, 1, 0), strict=True) for row in state["stages"]]
            stages = [Stage(*itertools.starmap(_number, row)) for row in rows]
            is_known = state["format"] == FORMAT and len(stages) <= STAGES_MAX
            seed, epoch = (_number(name, state[name]) for name in ("seed", "epoch"))
        except (KeyError, TypeError, ValueError):
            is_known = False
        if not is_known:
            raise UsageError("this is no state of a wdsfs.Shuffle, or one of a later version of wdsfs")
        if state.get("ranges") != self._digest:
            raise UsageError("the state is of another set: open the same shards with the same range_bytes")
        self.seed = seed
        self._place([stage for stage in stages if stage.taken], epoch)


class _Batches(Iterator[Any]):
    """The batches of an iteration. Only torchdata's StatefulDataLoader loads a state into it."""

    def __init__(self, batches: Iterator[Any], batches_if_loaded: Iterator[Any]) -> None:
        self._batches, self._batches_if_loaded = batches, batches_if_loaded

    def __next__(self) -> Any:
        return next(self._batches)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, _: object) -> None:
        self._batches = self._batches_if_loaded


def _ranges_of(samples: Any, range_bytes: int) -> Ranges:
    if isinstance(samples, Samples):
        reader = samples._reader
        counts = [len(reader.numbers(shard)) for shard in range(reader.shards)]
        return cut(counts, reader.shard_sizes, range_bytes)
    count = len(samples)
    return cut([count], [-(-count // max(PLAIN_RANGE, count >> PLAIN_BITS))], 1)


def _own_rank() -> tuple[Any, Any]:
    """Return the rank of this process, if it is known, and the number of ranks.

    Lightning sets no RANK, but has initialized torch.distributed when it asks for its loader.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return os.environ.get("RANK") or None, os.environ.get("WORLD_SIZE") or 1


def _consumed(stages: Sequence[Stage]) -> int:
    return sum(stage.world_size * stage.taken for stage in stages)


def _number(name: str, value: Any, least: int = 0) -> int:
    """Return an option that is a whole number. Raises UsageError if it is none, or out of bounds."""
    most = LIMITS.get(name, COUNT_MAX)
    try:
        number = int(value) if isinstance(value, str) else operator.index(value)  # a text: of the environment
    except (TypeError, ValueError):
        number = -1
    if not least <= number < most:
        raise UsageError(f"{name}={value!r:.40}: give a whole number from {least} to {most - 1:,}")
    return number
