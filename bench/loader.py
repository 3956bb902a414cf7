"""Two epochs of an image loader, in a process of its own; prints what it took as JSON.

    python -m bench.loader files DIRECTORY         an ordinary data set of files, a folder for each class
    python -m bench.loader webdataset SHARD ...    the webdataset library's own pipeline over the shards

Both decode the same JPEGs with Pillow in four worker processes and put the same batches together, in random order.
The modules that this needs are optional, so they are imported by name.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any

BATCH, WORKERS = 32, 4
EXTENSIONS = (".jpg", ".jpeg", ".png")

torch: Any = importlib.import_module("torch")
image: Any = importlib.import_module("PIL.Image")
numpy: Any = importlib.import_module("numpy")


class Files:
    """Images by path, classes by folder: what torchvision's ImageFolder does."""

    def __init__(self, root: str) -> None:
        self.items: list[tuple[str, int]] = []
        for directory, folders, names in os.walk(root):
            folders.sort()
            label = os.path.basename(directory)
            own = [f"{directory}/{name}" for name in sorted(names) if name.endswith(EXTENSIONS)]
            self.items += [(path, int(label[1:])) for path in own]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> tuple[Any, int, int]:
        path, label = self.items[number]
        with open(path, "rb") as file:  # as data sets do, though it asks the mount whether this is a terminal
            picture = image.open(file).convert("RGB")
        return tensor(picture), label, total(picture)


def tensor(picture: Any) -> Any:
    """The middle 224 pixels, as floats."""
    left, top = (picture.width - 224) // 2, (picture.height - 224) // 2
    part = numpy.asarray(picture.crop((left, top, left + 224, top + 224)))
    return torch.from_numpy(part.transpose(2, 0, 1).copy()).float().div_(255)


def total(picture: Any) -> int:
    """The sum over all pixels: equal for all ways to read the same images."""
    return int(numpy.asarray(picture).sum(dtype=numpy.int64))


def from_sample(sample: tuple[Any, Any]) -> tuple[Any, int, int]:
    picture, label = sample
    return tensor(picture), int(label), total(picture)


def over_files(root: str) -> Any:
    return torch.utils.data.DataLoader(Files(root), batch_size=BATCH, num_workers=WORKERS, shuffle=True)


def over_shards(shards: list[str]) -> Any:
    webdataset = importlib.import_module("webdataset")
    split = webdataset.split_by_worker
    data = webdataset.WebDataset(shards, shardshuffle=len(shards), workersplitter=split, empty_check=False)
    data = data.shuffle(500).decode("pilrgb").to_tuple("jpg", "cls").map(from_sample).batched(BATCH)
    return webdataset.WebLoader(data, batch_size=None, num_workers=WORKERS)


def main() -> None:
    kind, *places = sys.argv[1:]
    torch.set_num_threads(1)
    batches = over_files(places[0]) if kind == "files" else over_shards(places)
    seconds, counts, sums = [], [], []
    for _ in range(2):
        since = time.perf_counter()
        count = pixels = 0
        for pictures, _labels, numbers in batches:
            count += len(pictures)
            pixels += int(sum(int(number) for number in numbers))
        seconds.append(time.perf_counter() - since)
        counts.append(count)
        sums.append(pixels)
    if sums[0] != sums[1]:
        sys.exit("the two epochs have different sums")
    print(json.dumps({"seconds": seconds, "images": counts, "total": sums[0]}))


if __name__ == "__main__":
    main()
