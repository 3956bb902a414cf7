"""What the tests of the overlay share: a set of samples, and a writable tree over it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.overlay.test_model import SETS
from tests.writables import Mount, a_set, mounted
from wdsfs.tree.tree import LowerTree


@pytest.fixture(scope="module")
def samples() -> Iterator[LowerTree]:
    with a_set(*SETS["samples"]) as tree:
        yield tree


@pytest.fixture
def mount(samples: LowerTree) -> Iterator[Mount]:
    with mounted(samples) as mount:
        yield mount
