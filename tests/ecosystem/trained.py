"""Takes some batches of an epoch on each rank that torchrun starts, and goes on where the last run stopped.

The job is a JSON: the shards, and after how many batches to stop (0: after the next epoch). Each rank writes the
keys of its epochs to a file.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed
from torch.utils.data import DataLoader

import wdsfs


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.distributed.init_process_group("gloo")
    train = wdsfs.samples(job["shards"])
    order = wdsfs.Shuffle(train, seed=1, batch_size=3)
    workers: Any = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "spawn"}
    loader = DataLoader(train, batch_sampler=order, collate_fn=list, **workers)
    if os.path.exists("place"):
        order.load_state_dict(torch.load("place"))
    epochs: list[list[str]] = []
    for _ in range(1 if job["stop"] else 2):
        epochs.append([])
        for step, batch in enumerate(loader, 1):
            epochs[-1] += [sample["__key__"] for sample in batch]
            torch.distributed.all_reduce(torch.tensor([len(batch)]))  # it ends only if all ranks have a batch
            if step == job["stop"]:
                break
    state = order.state_dict(delivered=step)
    rank = torch.distributed.get_rank()
    with open(f"{job['run']}-{rank}.keys", "w") as file:
        json.dump(epochs, file)
    torch.distributed.barrier()
    if rank == 0:
        torch.save(state, "place")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
