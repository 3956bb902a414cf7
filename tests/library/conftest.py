"""What all tests of the library share: places of its own, and a set of three shards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import wdsfs
from tests import tars
from wdsfs.door.shard_door import DOOR

SHARDS = "t-{0..2}.tar"


@pytest.fixture(autouse=True)
def _own_places(tmp_path: Path) -> Iterator[None]:
    """Keep index and cache in the directory of the test, and work there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WDSFS_CACHE_DIR", str(tmp_path / "cache"))
        patch.setenv("WDSFS_INDEX_DIR", str(tmp_path / "index"))
        patch.delenv("http_proxy", raising=False)
        patch.delenv("HTTP_PROXY", raising=False)
        patch.chdir(tmp_path)
        yield
    DOOR.close()


def columns(shard: int, number: int) -> dict[str, bytes]:
    """The columns of a sample, as its shard has them."""
    return {"jpg": b"%d:%d|" % (shard, number) * 500, "cls": b"%d" % (number % 3), "json": b'{"n": %d}' % number}


def shard(number: int, samples: int = 4) -> bytes:
    return tars.tar(
        *(
            tars.member(f"d{at % 2}/k{number}-{at}.{name}".encode(), content)
            for at in range(samples)
            for name, content in columns(number, at).items()
        )
    )


@pytest.fixture
def shards(tmp_path: Path) -> str:
    """Write the set in the working directory; its spec."""
    for number in range(3):
        (tmp_path / f"t-{number}.tar").write_bytes(shard(number))
    return SHARDS


def expected() -> list[dict[str, object]]:
    """The samples of the set, as `wdsfs.samples` gives them."""
    return [
        {"__key__": f"d{at % 2}/k{number}-{at}", "__shard__": f"t-{number}", **columns(number, at)}
        for number in range(3)
        for at in range(4)
    ]


def indexed_only(spec: str, monkeypatch: pytest.MonkeyPatch) -> wdsfs.Samples:
    """Return samples whose shards are in the index, and of which no cache has a byte."""
    wdsfs.samples(spec).close()
    DOOR.close()
    monkeypatch.setenv("WDSFS_CACHE_DIR", "empty-cache")
    return wdsfs.samples(spec)
