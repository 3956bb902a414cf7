"""Two epochs of an image loader, in a process of its own; prints what it took as JSON.

    python -m bench.loader [--train] files DIRECTORY         an ordinary data set of files, a folder for each class
    python -m bench.loader [--train] webdataset SHARD ...    the webdataset library's own pipeline over the shards
    python -m bench.loader [--train] WAY SHARD ...           one of WAYS: of wdsfs, wids and mosaic, and no loader

All decode the same JPEGs with Pillow in four worker processes and put the same batches together, in random order.
With --train there are as many workers as cores (16 at most), and a network learns from each batch, on the GPU if
there is one. The modules that this needs are optional, so they are imported by name.
"""

from __future__ import annotations

import importlib
import io
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BATCH = 32
TRAINS = "--train" in sys.argv
WORKERS = min(os.cpu_count() or 1, 16) if TRAINS else 4
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


class Pictures:
    """The images and classes of samples, whose columns are bytes (wdsfs, mosaic) or streams (wids)."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> tuple[Any, int, int]:
        sample = self.samples[number]
        jpg, label = (sample.get(name) or sample[f".{name}"].read() for name in ("jpg", "cls"))
        return from_sample((image.open(io.BytesIO(jpg)).convert("RGB"), label))


def over_samples(shards: list[str]) -> Any:
    samples = importlib.import_module("wdsfs").samples(shards)
    return torch.utils.data.DataLoader(Pictures(samples), BATCH, num_workers=WORKERS, shuffle=True)


def over_shuffle(shards: list[str]) -> Any:
    wdsfs = importlib.import_module("wdsfs")
    samples = wdsfs.samples(shards)
    order = wdsfs.Shuffle(samples, batch_size=BATCH)
    return torch.utils.data.DataLoader(Pictures(samples), batch_sampler=order, num_workers=WORKERS)


def over_wids(shards: list[str]) -> Any:
    index = str(Path(shards[0]).parent / "index.json")
    samples = importlib.import_module("wids").ShardListDataset(index, keep=True, transformations=[])
    return torch.utils.data.DataLoader(Pictures(samples), BATCH, num_workers=WORKERS, shuffle=True)


def over_mosaic(shards: list[str]) -> Any:
    streaming = importlib.import_module("streaming")
    place = Path(shards[0]).parent / "mosaic"
    if not place.exists():
        with streaming.MDSWriter(out=str(place), columns={"jpg": "bytes", "cls": "bytes"}) as writer:
            for sample in importlib.import_module("wdsfs").samples(shards):
                writer.write({name: sample[name] for name in ("jpg", "cls")})
    samples = streaming.StreamingDataset(local=str(place), shuffle=True, batch_size=BATCH)

    class Streamed(torch.utils.data.IterableDataset):  # type: ignore[misc]  # torch is optional
        def __iter__(self) -> Iterator[tuple[Any, int, int]]:
            return (Pictures([sample])[0] for sample in samples)

    return torch.utils.data.DataLoader(Streamed(), BATCH, num_workers=WORKERS)


class Nothing:
    """The first batch of the samples, as often as there are batches: what the network takes without a loader."""

    def __init__(self, shards: list[str]) -> None:
        samples = importlib.import_module("wdsfs").samples(shards)
        self.count, pictures = len(samples), Pictures(samples)
        self.batch = torch.utils.data.default_collate(
            [pictures[number] for number in range(min(BATCH, self.count))]
        )

    def __iter__(self) -> Iterator[Any]:
        for left in range(self.count, 0, -BATCH):
            yield [part[:left] for part in self.batch]


WAYS: dict[str, Callable[[list[str]], Any]] = {
    "no loader": Nothing,
    "samples": over_samples,
    "Shuffle": over_shuffle,
    "wids": over_wids,
    "webdataset": over_shards,
    "mosaic": over_mosaic,
}


def training() -> Callable[[Any, Any], None]:
    """Make a network of convolutions; the function that has it learn from a batch."""
    nn, device = torch.nn, "cuda" if torch.cuda.is_available() else "cpu"
    sizes = [3, 64, 128, 256, 512] if device == "cuda" else [3, 8, 16]
    layers = [(nn.Conv2d(a, b, 5, 2), nn.BatchNorm2d(b), nn.ReLU()) for a, b in itertools.pairwise(sizes)]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(sizes[-1], 1000))
    network = nn.Sequential(*itertools.chain(*layers), *head).to(device)
    optimizer = torch.optim.SGD(network.parameters(), 0.01)

    def learn(pictures: Any, labels: Any) -> None:
        loss = nn.functional.cross_entropy(network(pictures.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return learn


def main() -> None:
    kind, *places = (word for word in sys.argv[1:] if word != "--train")
    torch.set_num_threads(1)
    learn = training() if TRAINS else lambda pictures, labels: None
    batches = over_files(places[0]) if kind == "files" else WAYS[kind](places)
    seconds, counts, sums = [], [], []
    for _ in range(2):
        since = time.perf_counter()
        count = pixels = 0
        for pictures, labels, numbers in batches:
            learn(pictures, labels)
            count += len(pictures)
            pixels += int(sum(int(number) for number in numbers))
        if TRAINS and torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - since)
        counts.append(count)
        sums.append(pixels)
    if sums[0] != sums[1]:
        sys.exit("the two epochs have different sums")
    print(json.dumps({"seconds": seconds, "images": counts, "total": sums[0]}))


if __name__ == "__main__":
    main()
