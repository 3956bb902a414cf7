"""The samples that Megatron-Energon's loader brings, in its order: the SHA-256 of each part by key.

Jobs are `{"path": DIR, "split": NAME, "workers": N}`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    Sample,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    get_loader,
    get_val_dataset,
    stateless,
)


@edataclass
class Parts(Sample):
    digests: dict[str, str]


@stateless
def cook(sample: dict[str, Any]) -> Parts:
    parts = {name: content for name, content in sample.items() if not name.startswith("__")}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in parts.items()}
    return Parts(**basic_sample_keys(sample), digests=digests)


class Raw(DefaultTaskEncoder):
    decoder = None
    cookers = [Cooker(cook)]  # noqa: RUF012  (a class attribute is what the base class has)

    def batch(self, samples: list[Parts]) -> list[Parts]:
        return samples


def samples(path: str, split: str, workers: int) -> list[tuple[str, dict[str, str]]]:
    """Of one pass in order: as a validation set, whatever the split is called."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
    data = get_val_dataset(path, split_part=split, worker_config=config, batch_size=1, task_encoder=Raw())
    return [(one.__key__, one.digests) for batch in get_loader(data) for one in batch]


if __name__ == "__main__":
    print(json.dumps([samples(**job) for job in json.loads(sys.argv[1])]))
