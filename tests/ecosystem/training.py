"""Trains by PyTorch's DataLoader in the order of `wdsfs.Shuffle`, and prints the keys of the samples.

`{"shards": SHARDS, "start": "fork", "persistent": true}` takes two epochs with two workers that start so. With
`"again": true` the second one is that of a new loader, which has the state of the first. With `"replaced": PATH`
that shard is replaced after the first batch, and the output is the errors of both epochs. With `"ranks": [2, 4]`
each of two ranks is killed in the middle of an epoch, and four ranks take the rest. With `"stateful": true` the
loader is the StatefulDataLoader of torchdata, otherwise one that is told what was delivered.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from torch.utils.data import DataLoader

import wdsfs

BATCH_SIZE, BATCHES = 2, 2  # that are taken before a rank is killed


def keys(batch: list[dict[str, Any]]) -> list[str]:
    return [sample["__key__"] for sample in batch]


def loader_of(job: dict[str, Any], rank: int = 0, world_size: int = 1) -> tuple[wdsfs.Shuffle, Any]:
    samples = wdsfs.samples(job["shards"])
    order = wdsfs.Shuffle(samples, seed=5, rank=rank, world_size=world_size, batch_size=BATCH_SIZE)
    options: dict[str, Any] = {
        "num_workers": 1 if job.get("start") == "spawn" else 2,  # each imports PyTorch then
        "collate_fn": keys,
        "multiprocessing_context": job.get("start", "fork"),
    }
    options |= {"persistent_workers": job.get("persistent", False), "batch_sampler": order}
    if job.get("stateful"):
        from torchdata.stateful_dataloader import StatefulDataLoader

        return order, StatefulDataLoader(samples, **options)
    return order, DataLoader(samples, **options)


def train_and_die(job: dict[str, Any], rank: int) -> None:
    """Take some batches, write them and the state after each, and be killed."""
    order, loader = loader_of(job, rank, job["ranks"][0])
    taken: list[str] = []
    for number, batch in enumerate(loader, 1):
        taken += batch
        state = loader.state_dict() if job.get("stateful") else order.state_dict(delivered=number)
        Path(f"state-{rank}").write_text(json.dumps([taken, state]))
        if number == BATCHES:
            os.kill(os.getpid(), signal.SIGKILL)


def resumed(job: dict[str, Any]) -> list[str]:
    """All keys that the ranks take before and after they are killed."""
    taken: list[str] = []
    before, after = job["ranks"]
    for rank in range(before):
        process = multiprocessing.get_context("fork").Process(target=train_and_die, args=(job, rank))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        batches, state = json.loads(Path(f"state-{rank}").read_text())
        taken += batches
    for rank in range(after):
        order, loader = loader_of(job, rank, after)
        (loader if job.get("stateful") else order).load_state_dict(state)
        taken += [key for batch in loader for key in batch]
    return taken


def trained(job: dict[str, Any]) -> list[list[list[str]]]:
    order, loader = loader_of(job)
    epochs = [list(loader)]
    if job.get("again"):
        state = loader.state_dict() if job.get("stateful") else order.state_dict(delivered=len(loader))
        order, loader = loader_of(job)
        (loader if job.get("stateful") else order).load_state_dict(state)
    epochs.append(list(loader))
    assert {len(epoch) for epoch in epochs} == {len(loader)}
    return epochs


def refused(job: dict[str, Any]) -> list[str]:
    """The errors after a shard is replaced: of workers that run, and of new ones."""
    _, loader = loader_of(job)
    errors = []
    for epoch in range(2):
        try:
            for number, _ in enumerate(loader):
                if (epoch, number) == (0, 0):
                    shutil.copy(job["replaced"], "another")
                    os.replace("another", job["replaced"])
        except wdsfs.StaleShard as error:
            errors.append(str(error))
    return errors


if __name__ == "__main__":
    ways = {"ranks": resumed, "replaced": refused}
    jobs = json.loads(sys.argv[1])
    print(json.dumps([next((ways[word] for word in ways if word in job), trained)(job) for job in jobs]))
