"""An epoch over shards in random order by four workers of a PyTorch DataLoader; prints what it took as JSON.

    python -m bench.remote_epoch files SEED MOUNTPOINT      files by their names, of one shard after the other
    python -m bench.remote_epoch webdataset SEED URL ...    the webdataset library's own streaming

A process of its own. Both make the same batches of the same bytes, and decode no image: what is left is the way
of the bytes. The modules that this needs are optional, so they are imported by name.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import time
import zlib
from collections.abc import Iterator
from typing import Any

BATCH, WORKERS = 32, 4
EXTENSIONS = ("jpg", "json", "cls")

torch: Any = importlib.import_module("torch")


class Files(torch.utils.data.IterableDataset):  # type: ignore[misc]  # torch is optional
    """The samples of a mount with `--layout files`: each worker takes shards of its own, and lists each once."""

    def __init__(self, root: str, seed: int) -> None:
        self.shards = sorted(f"{root}/{name}" for name in os.listdir(root))
        random.Random(seed).shuffle(self.shards)

    def __iter__(self) -> Iterator[dict[str, bytes]]:
        worker = torch.utils.data.get_worker_info()
        for shard in self.shards[worker.id :: worker.num_workers]:
            for key in sorted({name.partition(".")[0] for name in os.listdir(shard)}):
                yield {extension: _content(f"{shard}/{key}.{extension}") for extension in EXTENSIONS}


def _content(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


def shards(urls: list[str], seed: int) -> Any:
    webdataset = importlib.import_module("webdataset")
    split = webdataset.split_by_worker
    return webdataset.WebDataset(urls, shardshuffle=len(urls), seed=seed, workersplitter=split, empty_check=False)


def batch(samples: list[dict[str, Any]]) -> tuple[Any, int]:
    """The bytes of all images as one tensor, and the sum of all checksums."""
    images = torch.frombuffer(bytearray(b"".join(sample["jpg"] for sample in samples)), dtype=torch.uint8)
    return images, sum(zlib.crc32(sample[extension]) for sample in samples for extension in EXTENSIONS)


def main() -> None:
    kind, seed, *places = sys.argv[1:]
    torch.set_num_threads(1)
    data = Files(places[0], int(seed)) if kind == "files" else shards(places, int(seed))
    since = time.perf_counter()
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, num_workers=WORKERS, collate_fn=batch)
    total = sum(number for _, number in loader)
    print(json.dumps({"seconds": time.perf_counter() - since, "sum": total}))


if __name__ == "__main__":
    main()
