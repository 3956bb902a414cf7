"""Finds sets that the webdataset loader of Hugging Face's `datasets` refuses.

It takes the columns of a set from its first samples, and raises ValueError if these differ in their columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

SAMPLES = 5  # NUM_EXAMPLES_FOR_FEATURES_INFERENCE of `datasets`
KIND = "uneven columns"  # of the finding


class FirstSample(NamedTuple):
    """A sample at the start of a shard: where its first header is (bytes), its key, and its extensions."""

    offset: int
    key: str
    extensions: frozenset[bytes]


class Uneven(NamedTuple):
    """The first sample whose columns are not those of the first one, and a text that says so."""

    sample: FirstSample
    text: str


def uneven(first: Sequence[FirstSample]) -> Uneven | None:
    """Return where the first samples of a set differ in their columns; None if they are alike.

    `first` are the first `SAMPLES` of its first shard, or all that this has.
    """
    for sample in first[1:SAMPLES]:
        if sample.extensions != first[0].extensions:
            here, there = _list(sample.extensions), _list(first[0].extensions)
            text = (
                f"has the columns {here}, the first sample {first[0].key} has {there}: "
                f"Hugging Face datasets refuses a set whose first {SAMPLES} samples differ in their columns"
            )
            return Uneven(sample, text)
    return None


def _list(extensions: Iterable[bytes]) -> str:
    return ", ".join(one.decode("utf-8", "backslashreplace") for one in sorted(extensions))


def first_samples(members: Iterable[tuple[bytes, bytes]]) -> list[FirstSample]:
    """Return the first samples of these members, given as key and extension, in the order of the tar."""
    found: list[tuple[bytes, set[bytes]]] = []
    for key, extension in members:
        if not found or found[-1][0] != key:
            if len(found) == SAMPLES:
                break
            found.append((key, set()))
        found[-1][1].add(extension)
    return [FirstSample(-1, key.decode("utf-8", "backslashreplace"), frozenset(own)) for key, own in found]
