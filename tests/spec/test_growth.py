"""A list of shards that is looked at again: names and numbers stay, what comes is appended, what goes is noted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wdsfs.errors import MissingShard, SpecError
from wdsfs.shards import Shard
from wdsfs.spec import growth
from wdsfs.spec.dependencies import noted
from wdsfs.spec.expand import expand, expand_again
from wdsfs.spec.growth import Change


def at(
    path: str, name: str | None = None, gone: int | None = None, without: frozenset[bytes] = frozenset()
) -> Shard:
    shown = os.path.basename(path) if name is None else name
    return Shard(path.encode(), shown.encode(), without, gone=gone)


# --- looking again -----------------------------------------------------------------------------------------


def test_what_is_missing_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "b.tar").touch()
    spec = str(tmp_path / "{a,b}.tar")
    assert [shard.name for shard in expand_again([spec])] == [b"b"]
    with pytest.raises(MissingShard, match="1 of 2"):
        expand([spec])
    (tmp_path / "b.tar").unlink()
    with pytest.raises(MissingShard, match="2 of 2"):
        expand_again([spec])
    with pytest.raises(SpecError, match="holds no shard"):
        expand_again([str(tmp_path)])


def test_what_a_set_depends_on(tmp_path: Path) -> None:
    """Whatever a change of the set can come from is noted, and only while somebody wants to know."""
    for name in ("d/x.tar", "g/1/x.tar", "g/2/x.tar", "l/x.tar", "b/x.tar"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "g/none").mkdir()
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists/a.txt").write_text(f"{tmp_path}/l/x.tar\n")
    specs = [f"{tmp_path}/{one}" for one in ("d", "g/*/x.tar", "b/{x,y}.tar")] + [f"@{tmp_path}/lists/a.txt"]
    with noted() as used:
        expand_again(specs)
    wanted = {str(tmp_path / name) for name in ("d", "g", "g/1", "g/2", "g/none", "b", "lists", "l")}
    assert wanted <= set(used.absolute()) <= wanted | {str(tmp_path)}
    assert used.files == {f"{tmp_path}/lists/a.txt"}
    before = set(used.directories)
    expand_again([str(tmp_path / "b/x.tar")])
    assert used.directories == before


# --- the list ----------------------------------------------------------------------------------------------


def test_what_has_come_and_gone() -> None:
    known = [at("/a"), at("/b"), at("/c", gone=5)]
    assert growth.compare(known, [at("/d"), at("/a"), at("/c")]) == ([1], [at("/d"), at("/c")])
    assert growth.compare(known, [at("/b"), at("/a")]) == ([], [])
    other = at("/a", without=frozenset([b"k"]))  # other samples are left out: another shard
    assert growth.compare([at("/a")], [other]) == ([0], [other])


def test_no_name_changes() -> None:
    known = [at("/1/x"), at("/1/y", gone=2)]
    named = growth.named(known, [at("/2/x"), at("/2/y", "x"), at("/1/y", "longer--y"), at("/2/z", "y")])
    assert [one.name for one in named] == [b"x~2", b"x~3", b"y", b"y~2"]


def test_a_shard_takes_its_number_again_if_no_other_number_changes() -> None:
    known = [at("/a"), at("/b", gone=3), at("/b", gone=4)]
    assert [growth.number_again(known, at("/b"), samples) for samples in (3, 4, 5)] == [1, 2, None]
    assert growth.number_again(known, at("/b", "other"), 3) is None
    assert growth.number_again(known, at("/a"), 0) is None


@given(st.lists(st.sets(st.sampled_from("abcdef")), max_size=8))
def test_numbers_and_names_stay(looks: list[set[str]]) -> None:
    """Whatever comes and goes: a number stands for one path and name for ever, and what was found is shown."""
    shards: list[Shard] = []
    ever: dict[int, tuple[bytes, bytes]] = {}
    for look in looks:
        gone, candidates = growth.compare(shards, [at(f"/{name}") for name in sorted(look)])
        left = growth.changed(shards, Change(dict.fromkeys(gone, 3), (), ()))
        back, new = [], []
        for one in growth.named(left, candidates):
            number = growth.number_again(left, one, 3)
            if number is None:
                new.append(one)
            else:
                back.append(number)
        shards = growth.changed(shards, Change(dict.fromkeys(gone, 3), back, new))
        assert {one.path.decode()[1:] for one in shards if one.gone is None} == look
        for number, one in enumerate(shards):
            assert ever.setdefault(number, (one.path, one.name)) == (one.path, one.name)
    assert len(ever) <= 6  # each takes its own number again


def test_shards_out_of_reach_are_not_gone(tmp_path: Path) -> None:
    """An empty directory is what an unmounted file system leaves; one that is gone took its shards along."""
    for name in ("empty", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "other/file").touch()
    known = [at(f"{tmp_path}/{name}/x.tar") for name in ("empty", "gone", "other")] + [at("s3://b/x.tar")]
    kept, why = growth.out_of_reach(known, range(4))
    assert kept == [0]
    assert why == f"{tmp_path}/empty: empty or not readable, so its shards do not count as removed"
    assert growth.out_of_reach(known, [1, 2, 3]) == ([], "")
