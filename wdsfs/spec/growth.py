"""Compares the lists of a set that grows: shards that have come, gone or come back; names and numbers them.

The list is append-only. A shard keeps its number and its name as long as the mount exists, and the number of a
lost shard is given to no other. Plain functions over lists; `mount/followed_set.py` looks and decides.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from wdsfs.door.urls import is_remote
from wdsfs.errors import several
from wdsfs.shards import Shard
from wdsfs.spec.expand import free_name


class Difference(NamedTuple):
    """A difference of two lists: the numbers of lost shards, and candidates that are new or back."""

    gone: list[int]
    candidates: list[Shard]


class Change(NamedTuple):
    """The changes of a set: lost shards, with their samples; numbers of shards that are back; new ones."""

    gone: Mapping[int, int]
    back: Sequence[int]
    new: Sequence[Shard]

    def __bool__(self) -> bool:
        return bool(self.gone or self.back or self.new)


def compare(known: Sequence[Shard], shards: Sequence[Shard]) -> Difference:
    """Compare the list of shards with what SHARDS stand for now.

    Semantics decision: if other samples of a shard are left out than before, it counts as lost, with a new one.
    """
    now = {(shard.path, shard.without) for shard in shards}
    shown = {(shard.path, shard.without) for shard in known if shard.gone is None}
    gone = [
        number
        for number, shard in enumerate(known)
        if shard.gone is None and (shard.path, shard.without) not in now
    ]
    return Difference(gone, [shard for shard in shards if (shard.path, shard.without) not in shown])


def named(known: Sequence[Shard], candidates: Sequence[Shard]) -> list[Shard]:
    """Return the candidates with names that no shard has.

    Semantics decision: a new shard is called as it would be after a new mount, unless another shard is called so:
    that one keeps its name, and the new one gets `~2`. One that is back has the name that it had, if that is free.
    """
    taken = {shard.name for shard in known if shard.gone is None}
    before = {shard.path: shard.name for shard in known if shard.gone is not None}
    return [replace(shard, name=free_name(before.get(shard.path, shard.name), taken)) for shard in candidates]


def number_again(known: Sequence[Shard], shard: Shard, samples: int) -> int | None:
    """Return the number that a shard which has come back takes again, if there is one.

    Semantics decision: it does if it has as many samples as it had, so that no other sample gets another number.
    """
    what = shard.path, shard.without, shard.name, samples
    numbers = (
        number
        for number, candidate in enumerate(known)
        if (candidate.path, candidate.without, candidate.name, candidate.gone) == what
    )
    return next(numbers, None)


def changed(known: Sequence[Shard], change: Change) -> list[Shard]:
    """Return the list of shards after a change."""
    shards = list(known)
    for number, samples in change.gone.items():
        shards[number] = replace(shards[number], gone=samples)
    for number in change.back:
        shards[number] = replace(shards[number], gone=None)
    return [*shards, *change.new]


def out_of_reach(known: Sequence[Shard], gone: Iterable[int]) -> tuple[list[int], str]:
    """Return the shards of `gone` that are only out of reach, and why.

    Semantics decision: a directory that is empty, or that cannot be listed, is what a file system leaves that is
    not mounted. So its shards do not count as removed. If the directory itself is gone, they do.
    """
    places: dict[bytes, list[int]] = {}
    for number in gone:
        if not is_remote(known[number].path):
            places.setdefault(os.path.dirname(known[number].path), []).append(number)
    unreachable = {directory: numbers for directory, numbers in places.items() if _is_out_of_reach(directory)}
    if not unreachable:
        return [], ""
    where = several([os.fsdecode(directory) for directory in unreachable])
    numbers = sorted(number for some in unreachable.values() for number in some)
    return numbers, f"{where}: empty or not readable, so its shards do not count as removed"


def _is_out_of_reach(directory: bytes) -> bool:
    try:
        with os.scandir(directory) as entries:
            return next(entries, None) is None
    except FileNotFoundError:
        return False
    except OSError:
        return True
