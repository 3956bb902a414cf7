"""Index it, then ask again: how often, and what ends it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from wdsfs.errors import UnreadableShard
from wdsfs.tree.shard_set import ATTEMPTS_MAX, NotIndexed, indexed


@dataclass(eq=False)
class Shards:
    """A set whose shards were indexed in this order."""

    name: str
    attempts: list[int] = field(default_factory=list)

    def path_text(self, number: int) -> str:
        return f"{self.name}-{number}.tar"

    def index_now(self, number: int) -> None:
        raise AssertionError("a question may be about other shards only")

    def try_index(self, number: int) -> None:
        self.attempts.append(number)


def test_each_shard_of_each_set_may_change_some_times() -> None:
    """A view asks two sets, whose shards have the same numbers."""
    one, other = Shards("one"), Shards("other")
    wanted = [NotIndexed(shards, number) for shards in (one, other) for number in (0, 1)] * ATTEMPTS_MAX

    def question(answer: str) -> str:
        if wanted:
            raise wanted.pop()
        return answer

    assert indexed(question, "found") == "found"
    assert sorted(one.attempts) == sorted(other.attempts) == [0] * ATTEMPTS_MAX + [1] * ATTEMPTS_MAX


def test_a_question_ends_whose_shard_changes_each_time_it_is_indexed() -> None:
    shards = Shards("train")

    def question() -> None:
        raise NotIndexed(shards, 7)

    with pytest.raises(UnreadableShard, match=r"^train-7\.tar: changes each time it is indexed; try again"):
        indexed(question)
    assert shards.attempts == [7] * ATTEMPTS_MAX
