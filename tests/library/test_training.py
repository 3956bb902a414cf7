"""Training over `wdsfs.Shuffle`: stopped and resumed by torchrun, and over shards that are replaced."""

from __future__ import annotations

import collections
import json
import os
from pathlib import Path

import pytest

import wdsfs
from tests.conftest import ROOT, Program
from tests.library.conftest import expected, shard
from tests.peers import SCRIPTS, need_tool, run_python


@pytest.mark.parametrize(
    ("module", "script", "more"),
    [
        ("torch", ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node={}", "trained.py"), 3),
        ("lightning", ("lightning_loop.py",), 1),
    ],
)
def test_an_epoch_goes_on_with_other_ranks(
    program: Program, module: str, script: tuple[str, ...], more: int
) -> None:
    """Two processes, then more or fewer: in all they have each sample once, but for one that fills a batch up."""
    need_tool(module)
    for number in range(3):
        (program.home / f"t-{number}.tar").write_bytes(shard(number, 17))
    epochs: dict[int, list[str]] = collections.defaultdict(list)
    for run, (ranks, stop) in enumerate([(2, 3), (more, 0)]):
        job = json.dumps({"run": run, "shards": "t-{0..2}.tar", "ranks": ranks, "stop": stop})
        *words, name = (word.format(ranks) for word in script)
        run_python(program, *words, SCRIPTS / name, job, PYTHONPATH=str(ROOT))
        for rank in range(ranks):
            for epoch, keys in enumerate(json.loads((program.home / f"{run}-{rank}.keys").read_text())):
                epochs[epoch] += keys
                assert stop == 0 or len(keys) == stop * 3
    everything = {f"d{at % 2}/k{number}-{at}" for number in range(3) for at in range(17)}
    for keys in epochs.values():
        assert set(keys) == everything
        assert len(keys) < len(everything) + 3
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("in_place", [False, True])
def test_shards_that_are_replaced_in_an_epoch(shards: str, tmp_path: Path, in_place: bool) -> None:
    """Every sample is that of the set that was opened, or its shard is refused."""
    samples, refused = expected(), set()
    with wdsfs.samples(shards) as train:
        for step, numbers in enumerate(wdsfs.Shuffle(train, seed=2, batch_size=1)):
            if step == 4:
                path = tmp_path / "t-1.tar"
                content = path.read_bytes().replace(b"1:", b"7:")
                place = path if in_place else tmp_path / "another"
                place.write_bytes(content)
                os.replace(place, path)
            try:
                assert train[numbers] == [samples[numbers[0]]]
            except wdsfs.StaleShard:
                refused.add((step >= 4, samples[numbers[0]]["__shard__"]))
    assert refused == {(True, "t-1")}
