"""Trains by Lightning in the order of `wdsfs.Shuffle`, and goes on from its checkpoint where there is one.

The job is a JSON: the shards, how many ranks Lightning starts, and after how many steps to stop (0:
after the next epoch). Each rank writes the keys of its epochs to a file.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from with_torchvision import make_importable

make_importable()  # for the imports below; ranks import this file anew
# ruff: noqa: E402
import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from torchdata.stateful_dataloader import StatefulDataLoader

import wdsfs

CHECKPOINT = "place.ckpt"


class Model(lightning.LightningModule):
    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__()
        self.job, self.weight, self.epochs = job, torch.nn.Parameter(torch.ones(1)), dict[int, list[str]]()

    def train_dataloader(self) -> Any:
        train = wdsfs.samples(self.job["shards"])
        order = wdsfs.Shuffle(train, seed=1, batch_size=3)
        workers: Any = {"num_workers": 1, "persistent_workers": True}
        return StatefulDataLoader(train, batch_sampler=order, collate_fn=list, **workers)

    def training_step(self, batch: list[dict[str, Any]]) -> Any:
        self.epochs.setdefault(self.current_epoch, []).extend(sample["__key__"] for sample in batch)
        return self.weight.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters())


def main() -> None:
    job = json.loads(sys.argv[1])
    model = Model(job)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=job["ranks"],
        strategy="ddp",
        max_epochs=2,
        max_steps=job["stop"] or -1,
        plugins=[LightningEnvironment()],  # no look for clusters, MPI among them
        use_distributed_sampler=False,
        logger=False,
        callbacks=[ModelCheckpoint(".", "place", every_n_train_steps=1, enable_version_counter=False)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, ckpt_path=CHECKPOINT if os.path.exists(CHECKPOINT) else None, weights_only=False)
    Path(f"{job['run']}-{trainer.global_rank}.keys").write_text(json.dumps(list(model.epochs.values())))


if __name__ == "__main__":
    main()
