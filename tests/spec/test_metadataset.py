"""Energon's metadatasets stand for the shards of their parts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.conftest import Program
from tests.spec.test_shard_lists import error_of, listed, write
from tests.tree.test_view_record import write as write_shard
from wdsfs.spec import energon_dataset
from wdsfs.spec.energon_dataset import DatasetPart, parts_of

SPLITS = {"train": ["0.tar", "1.tar"], "val": ["2.tar"], "test": []}
HEAD = "__module__: megatron.energon\n__class__: MetadatasetV2\n"
BLEND = (
    HEAD
    + """
splits:
  train:
    blend:
      - path: ./coco
        weight: 5
        subflavors: {a: 1}
      - path: ../sets/more/coyo
        weight: 0.5
        split_part: val
      - join:
          text: {path: text}
          audio: {path: %s/audio, nonmatch: skip}
        joiner: {__module__: x, __class__: y}
  val:
    blend_epochized:
      - {path: coco, repetitions: 3}
      - path: coco
        split_part: train
  test:
    path: text
    split_part: val
"""
)


@pytest.fixture
def sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("coco", "more/coyo", "text", "audio"):
        counts = {shard: 1 for shards in SPLITS.values() for shard in shards}
        write(f"sets/{name}/.nv-meta/.info.json", {"shard_counts": counts})
        write(f"sets/{name}/.nv-meta/split.yaml", json.dumps({"split_parts": SPLITS, "exclude": []}))
        write(
            f"sets/{name}/.nv-meta/mine.yaml",
            json.dumps({"split_parts": {"train": ["2.tar"]}, "exclude": ["2.tar/k"]}),
        )
        for shard in counts:
            write_shard(Path(f"sets/{name}/{shard}"), [(f"{name}{shard[0]}".encode(), [(b"txt", b"x")])])


def shards(*names: str) -> list[str]:
    return [f"sets/{name}.tar" for name in names]


@pytest.mark.usefixtures("sets")
def test_blends_and_joins_stand_for_the_shards_of_their_parts() -> None:
    write("sets/meta.yaml", BLEND % os.path.abspath("sets"))
    train = shards("coco/0", "coco/1", "more/coyo/2", "text/0", "text/1", "audio/0", "audio/1")
    assert listed("sets/meta.yaml", split="train") == train
    # A shard that several parts name is there once.
    assert listed("sets/meta.yaml", split="val") == shards("coco/2", "coco/0", "coco/1")
    assert listed("sets/meta.yaml") == [*train, *shards("coco/2", "text/2")]
    assert "no split is called 'x'; there are: 'train', 'val', 'test'" in error_of("sets/meta.yaml", split="x")
    assert listed("sets/meta.yaml", "sets/coco/.nv-meta/mine.yaml", split="train") == [*train, *shards("coco/2")]


@pytest.mark.usefixtures("sets")
def test_metadatasets_in_each_other_and_older_ones() -> None:
    write("sets/inner.yaml", "splits: {train: {datasets: [{path: text, weight: 2}, {path: coco}]}}")
    write(
        "outer.yaml", HEAD + "splits: {train: {blend: [{path: sets/inner.yaml, weight: 3}, {path: sets/audio}]}}"
    )
    assert listed("outer.yaml") == shards("text/0", "text/1", "coco/0", "coco/1", "audio/0", "audio/1")
    here = os.path.realpath("sets")
    weights = [(part.path, part.weight) for part in parts_of(os.path.abspath("outer.yaml"), "train")]
    assert [(os.path.realpath(path), weight) for path, weight in weights] == [
        (f"{here}/text", "3 x 2"),
        (f"{here}/coco", "3 x 1"),
        (f"{here}/audio", "1"),
    ]


@pytest.mark.usefixtures("sets")
def test_a_split_file_of_its_own_and_what_is_not_followed(caplog: pytest.LogCaptureFixture) -> None:
    write("m.yaml", "splits: {train: {path: sets/coco, split_config: mine.yaml, subset: {range: [0%, 50%]}}}")
    from wdsfs.spec.expand import expand

    [shard] = expand(["m.yaml"])
    assert shard.path.endswith(b"sets/coco/2.tar")
    assert shard.without == {b"k"}
    assert "m.yaml:1: splits.train: the subset is not followed" in caplog.text
    assert parts_of("m.yaml", None)[0][1:-1] == ("train", "sets/coco/.nv-meta/mine.yaml", "train", "1")


WRONG = {
    "splits: {}": "names no datasets",
    "splits: [1]": "m.yaml:1: splits: an object is needed, not a list",
    "splits: {train: x}": "an object is needed",
    "splits: {train: {}}": "'path' is missing",
    "splits: {train: {blend: {path: a}}}": "a list is needed",
    "splits: {train: {blend: [{path: sets/coco, weight: x}]}}": "the weight is not a number from 0 on: 'x'",
    "splits: {train: {blend: [{path: sets/coco, weight: -1}]}}": "the weight is not a number",
    "splits: {train: {blend: [{path: sets/coco, weight: .inf}]}}": "the weight is not a number",
    "splits: {train: {path: sets/none}}": "m.yaml:1: splits.train: 'sets/none/.nv-meta' has no .info.json",
    "splits: {train: {path: x.jsonl}}": "a JSONL dataset of Energon has no shards",
    "splits: {train: {path: m.yaml}}": "includes itself",
    "splits: {train: &all {blend: [*all]}}": "nested more than 100 deep",
    "splits: {train: {path: other.yaml}}": "is not a metadataset",
    "splits: {none: {path: sets/coco}}": "no split is called 'none'",
    "splits: {train: {path: sets/coco, split_config: ../../x.yaml}}": "is not the name of a split file",
    "splits: {train: {path: 'pipe:touch x'}}": "command",
    "splits: {train: {join: [{path: [a]}]}}": "a text is needed",
    "splits: {train: {blend: []}}": "m.yaml:1: splits.train.blend: is empty: it names no dataset",
    "splits: {train: {join: {}}}": "m.yaml:1: splits.train.join: is empty",
    "splits: {train: {path: inner.yaml}}": "inner.yaml:1: splits.train.datasets: is empty",
    "splits: {train: {blend: [{path: sets/coco}], blend_epochized: [{path: sets/text}]}}": (
        "m.yaml:1: splits.train: has 'blend' and 'blend_epochized', of which Energon reads one"
    ),
    "splits: {train: {path: sets/coco, join: [{path: sets/text}]}}": "has 'join' and 'path'",
    "splits: {train: {blend: [{path: sets/coco, split_part: x}]}}": (
        "m.yaml:1: splits.train.blend[0]: sets/coco/.nv-meta/split.yaml:1: split_parts: no split is"
    ),
}


@pytest.mark.usefixtures("sets")
@pytest.mark.parametrize("content", WRONG)
def test_a_metadataset_that_is_wrong(content: str) -> None:
    write("other.yaml", "datasets: []")
    write("inner.yaml", "splits: {train: {datasets: []}}")
    write("m.yaml", content)
    assert WRONG[content] in error_of("m.yaml")


@pytest.mark.usefixtures("sets")
def test_aliases_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a few lines can name any number of parts."""
    monkeypatch.setattr(energon_dataset, "PARTS_MAX", 1000)
    many = ", ".join(["*a"] * 40)
    joins = ", ".join(["*b"] * 40)
    write("m.yaml", f"x: [&a {{path: sets/coco}}, &b {{join: [{many}]}}]\nsplits: {{train: {{blend: [{joins}]}}}}")
    assert "too many parts: the limit is 1,000" in error_of("m.yaml")
    monkeypatch.setattr(energon_dataset, "PARTS_MAX", 100_000)
    assert listed("m.yaml") == shards("coco/0", "coco/1")


@pytest.mark.usefixtures("sets")
def test_info_shows_the_weights(program: Program) -> None:
    write("sets/meta.yaml", BLEND % os.path.abspath("sets"))
    path = os.path.abspath("sets/meta.yaml")
    rows = program.json("info", "--json", "--split", "train", path)["parts"]
    assert [(os.path.basename(row["dataset"]), row["part"], row["weight"]) for row in rows] == [
        ("coco", "train", "5"),
        ("coyo", "val", "0.5"),
        ("text", "train", "1"),
        ("audio", "train", "1"),
    ]
    assert b"3 repetitions" in program.run("info", "--split", "val", path).stdout
    assert program.run("ls", "--split", "test", path).stdout == b"2/\n"
    assert isinstance(parts_of(path, "test")[0], DatasetPart)
