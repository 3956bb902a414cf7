"""The order of the samples of a packed set, and which split each belongs to.

Both follow from the keys alone, so they are the same on every machine, in every version of Python, and whatever
the order of the files is.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdsfs.errors import CommitError, UsageError, several
from wdsfs.names import readable
from wdsfs.packing.file_table import LeftOut
from wdsfs.packing.samples import Samples

LINES_MAX = 1 << 20  # bytes: of a list of keys, what it may be longer than all keys together
NOT_LISTED = "its key is not in the list of --order"

Numbers = NDArray[np.int64]

# So that a key has independent numbers for its order and for its split.
_SHUFFLE, _SPLIT = b"wdsfs shuffle", b"wdsfs split"


class Split(NamedTuple):
    """A split: its name, and the fraction of the samples that it gets."""

    name: str
    fraction: float


def parse_splits(texts: Sequence[str]) -> list[Split]:
    """Return the splits of `NAME=FRACTION` texts. Raises UsageError, also if they are not the whole together."""
    found = []
    for text in texts:
        name, equals, number = text.partition("=")
        try:
            fraction = float(number)
        except ValueError:
            fraction = math.nan
        if not (name and equals and 0 < fraction <= 1) or "/" in name or "%" in name:
            raise UsageError(f"--split {text}: write NAME=FRACTION, for example train=0.9")
        found.append(Split(name, fraction))
    names = [one.name for one in found]
    if len(set(names)) < len(names):
        raise UsageError(f"--split: {several(sorted(names))}: each split has a name of its own")
    total = math.fsum(one.fraction for one in found)
    if found and abs(total - 1) > 1e-6:
        raise UsageError(f"--split: the fractions are {total:g} together: they have to be 1, to lose no sample")
    return found


def order_of(samples: Samples, seed: str | None, listed: str | None, left_out: LeftOut) -> Numbers:
    """Return the numbers of the samples in the order of the set: by name, shuffled, or as a file lists the keys.

    Samples that are not listed go to `left_out`. Raises UsageError for a list that cannot be read, or that has
    keys of no sample or a key twice.
    """
    if listed is not None:
        return _as_listed(samples, listed, left_out)
    if seed is None:
        return np.arange(len(samples), dtype=np.int64)
    # Equal numbers keep the order by name.
    return np.argsort(_hashed(samples, _SHUFFLE + b" " + os.fsencode(seed)), kind="stable").astype(np.int64)


def split_of(samples: Samples, order: Numbers, splits: Sequence[Split]) -> list[Numbers]:
    """Return the samples of each split, in their order. Raises CommitError for a split without samples.

    In each class, and in a set without classes as a whole, a split gets its fraction to less than one sample:
    samples with the lowest hash of the key are those of the first split. The seed of a shuffle has no part in
    that, so a set that is shuffled anew has no sample of its test split among those for training.
    """
    place = np.zeros(len(samples), np.int64)
    hashed = _hashed(samples, _SPLIT)
    bounds = np.cumsum([one.fraction for one in splits])
    bounds[-1] = 1
    for label in np.unique(samples.class_of[order]):
        members = order[samples.class_of[order] == label]
        ranked = members[np.lexsort((members, hashed[members]))]
        ends = np.floor(bounds * len(ranked) + 0.5).astype(np.int64)
        place[ranked] = np.searchsorted(ends, np.arange(len(ranked)), side="right")
    found = [order[place[order] == number] for number in range(len(splits))]
    for one, numbers in zip(splits, found, strict=True):
        if not len(numbers):
            raise CommitError(f"--split {one.name}={one.fraction:g}: of {len(order)} samples that is none")
    return found


def _hashed(samples: Samples, salt: bytes) -> NDArray[np.uint64]:
    """A number for each sample that follows from its key and the salt."""
    begun, found = hashlib.blake2b(salt + b"\0", digest_size=8), bytearray()
    for number in range(len(samples)):
        one = begun.copy()
        one.update(samples.key(number))
        found += one.digest()
    return np.frombuffer(found, ">u8").astype(np.uint64)


def _as_listed(samples: Samples, path: str, left_out: LeftOut) -> Numbers:
    longest = LINES_MAX + sum(len(samples.key(number)) + 2 for number in range(len(samples)))
    try:
        with open(path, "rb") as file:
            text = file.read(longest + 1)
    except OSError as error:
        raise UsageError(f"--order {path}: {error.strerror}") from None
    if len(text) > longest:
        raise UsageError(f"--order {path}: is longer than a list of all {len(samples):,} keys can be")
    # Keys may have newlines: a list with NULs is separated by these.
    lines = text.split(b"\0") if b"\0" in text else [line.removesuffix(b"\r") for line in text.split(b"\n")]
    keys = [key for key in lines if key]
    numbers = {samples.key(number): number for number in range(len(samples))}
    found = []
    for line, key in enumerate(keys, 1):
        number = numbers.pop(key, None)
        if number is None:
            what = "comes twice" if key in keys[: line - 1] else "is the key of no sample"
            raise UsageError(f"--order {path}: {readable(key)!r}, key {line} of the list, {what}")
        found.append(number)
    for key in numbers:
        left_out.refuse(key, NOT_LISTED)
    return np.array(found, np.int64)
