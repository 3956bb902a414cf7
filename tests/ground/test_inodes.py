"""The inode number: what is put in comes out, and nothing meets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wdsfs import inodes
from wdsfs.inodes import FOLDER, INDEX_MAX, MEMBER, ROOT, SAMPLE, SHARD_MAX, TAG_MAX

tags, shards, indexes = (st.integers(0, top) for top in (TAG_MAX, SHARD_MAX, INDEX_MAX))
kinds = st.sampled_from([FOLDER, SAMPLE, MEMBER])
parts = st.tuples(tags, shards, kinds, indexes)


def number(tag: int, shard: int, kind: int, index: int) -> int:
    return inodes.pack(tag, shard, inodes.position(kind, index))


@given(parts)
def test_parts_come_back(given_parts: tuple[int, int, int, int]) -> None:
    tag, shard, kind, index = given_parts
    inode = number(*given_parts)
    assert inodes.unpack(inode) == (tag, shard, inodes.position(kind, index))
    for where in (inode, inodes.position(kind, index)):
        assert (inodes.kind_of(where), inodes.index_of(where)) == (kind, index)


@given(parts, parts)
def test_numbers_are_unique(one: tuple[int, int, int, int], other: tuple[int, int, int, int]) -> None:
    """No two files have the same number; none has the root's, or one of those kept for an overlay."""
    assert (number(*one) == number(*other)) == (one == other)
    assert ROOT < number(*one) < 1 << 62


def test_the_ends_of_the_range() -> None:
    assert number(TAG_MAX, SHARD_MAX, MEMBER, INDEX_MAX) == (1 << 62) - 1
    assert number(0, 0, FOLDER, 0) == 1 << 30
    assert inodes.unpack(ROOT) == (0, 0, ROOT)
    assert inodes.kind_of(ROOT) == 0
