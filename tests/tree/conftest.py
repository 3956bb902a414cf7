"""What all tests of the room share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path) -> Iterator[None]:
    """Keep tables of label files out of the cache of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WDSFS_CACHE_DIR", str(tmp_path / "cache"))
        yield
