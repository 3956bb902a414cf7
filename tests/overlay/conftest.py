"""What the tests of the overlay share: trees of every kind, and a writable tree over samples."""

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


@pytest.fixture(scope="module", params=SETS)
def tree(request: pytest.FixtureRequest) -> Iterator[LowerTree]:
    with a_set(*SETS[request.param]) as tree:
        yield tree


@pytest.fixture
def mount(samples: LowerTree) -> Iterator[Mount]:
    with mounted(samples) as mount:
        yield mount
