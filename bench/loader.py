"""Epochs of a loader, in a process of its own; prints what they took as JSON.

    python -m bench.loader WORK EPOCHS WAY PLACE...

WAY is one of WAYS, over shards; the way `files` is over a directory with a folder for each class. WORK is
`bytes` (the batches are bytes with checksums), `pixels` (JPEGs are decoded), `train` (and a network learns from
each batch, on the GPU if there is one; as many workers as cores, 16 at most), `read` (samples are read by this
process alone, in batches), `resume` (the first batch after a resumption in the middle, and no epoch) or `make`,
which writes the shards in the way's own format and measures nothing.

All ways make the same batches of the same samples, in random order, by four workers. The modules that they need
are optional, so they are imported by name.
"""

from __future__ import annotations

import importlib
import io
import itertools
import json
import os
import random
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.ecosystem import with_torchvision

BATCH = 32
COLUMNS = ("jpg", "cls")
EXTENSIONS = (".jpg", ".jpeg", ".png")
BUFFER = 1000  # samples of a shuffle buffer, as the manuals of the peers have it
CHUNK = 64 << 20  # bytes of a file in a format of a peer, about the size of a shard

image: Any = importlib.import_module("PIL.Image")
numpy: Any = importlib.import_module("numpy")
torch: Any = importlib.import_module("torch")

Sample = dict[str, Any]


class Batch(NamedTuple):
    """What a network would take, and a number that is equal for all ways to read the same samples."""

    images: Any
    labels: Any
    total: int


def batch_of_bytes(samples: Iterable[Sample]) -> Batch:
    """The bytes of all images as one tensor; checksums of all columns."""
    rows = [[content(sample, column) for column in COLUMNS] for sample in samples]
    images = torch.frombuffer(bytearray(b"".join(row[0] for row in rows)), dtype=torch.uint8)
    labels = torch.tensor([int(row[1]) for row in rows])
    return Batch(images, labels, sum(zlib.crc32(column) for row in rows for column in row))


def batch_of_pixels(samples: Iterable[Sample]) -> Batch:
    """The middle 224 pixels of all images, as floats; the sum over all pixels."""
    pictures, labels, total = [], [], 0
    for sample in samples:
        picture = sample["picture"] if "picture" in sample else decoded(io.BytesIO(content(sample, "jpg")))
        left, top = (picture.width - 224) // 2, (picture.height - 224) // 2
        part = numpy.asarray(picture.crop((left, top, left + 224, top + 224)))
        pictures.append(torch.from_numpy(part.transpose(2, 0, 1).copy()).float().div_(255))
        labels.append(int(content(sample, "cls")))
        total += int(numpy.asarray(picture).sum(dtype=numpy.int64))
    return Batch(torch.stack(pictures), torch.tensor(labels), total)


def content(sample: Sample, column: str) -> bytes:
    """Of wids the columns have a dot in front, and are streams; litdata gives views of memory."""
    value = sample[column] if column in sample else sample[f".{column}"]
    return bytes(value.read() if hasattr(value, "read") else value)


def decoded(file: Any) -> Any:
    return image.open(file).convert("RGB")


# --- the ways: each gives batches by a DataLoader ----------------------------------------------------------------


class Files:
    """Images by path, classes by folder: what torchvision's ImageFolder does."""

    def __init__(self, root: str) -> None:
        self.items: list[tuple[str, bytes]] = []
        for directory, folders, names in os.walk(root):
            folders.sort()
            label = os.path.basename(directory)[1:].encode()
            self.items += [(f"{directory}/{name}", label) for name in sorted(names) if name.endswith(EXTENSIONS)]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Sample:
        path, label = self.items[number]
        with open(path, "rb") as file:  # as data sets do, though it asks the mount whether this is a terminal
            return {"picture": decoded(file), "cls": label}


class Loaders:
    """The loader of each way, with a number of workers and a function that makes a batch of samples."""

    def __init__(self, workers: int, batch: Callable[[Iterable[Sample]], Batch]) -> None:
        self.workers, self.batch = workers, batch

    def _torch(self, data: Any, **options: Any) -> Any:
        return torch.utils.data.DataLoader(data, num_workers=self.workers, collate_fn=self.batch, **options)

    def files(self, places: list[str]) -> Any:
        return self._torch(Files(places[0]), batch_size=BATCH, shuffle=True)

    def samples(self, shards: list[str]) -> Any:
        return self._torch(importlib.import_module("wdsfs").samples(shards), batch_size=BATCH, shuffle=True)

    def shuffle(self, shards: list[str]) -> Any:
        wdsfs = importlib.import_module("wdsfs")
        samples = wdsfs.samples(shards)
        return self._torch(samples, batch_sampler=wdsfs.Shuffle(samples, batch_size=BATCH))

    def webdataset(self, shards: list[str]) -> Any:
        webdataset = importlib.import_module("webdataset")
        urls = [f"pipe:curl -s {shard}" if "://" in shard else shard for shard in shards]
        split = webdataset.split_by_worker
        data = webdataset.WebDataset(urls, shardshuffle=len(urls), workersplitter=split, empty_check=False)
        data = data.shuffle(BUFFER).batched(BATCH, collation_fn=self.batch)
        return webdataset.WebLoader(data, batch_size=None, num_workers=self.workers)

    def wids(self, shards: list[str]) -> Any:
        """In the order of its own sampler, which goes through one shard after the other."""
        wids = importlib.import_module("wids")
        samples = wids.ShardListDataset(str(Path(shards[0]).parent / "index.json"), keep=True, transformations=[])
        order = wids.ChunkedSampler(samples, chunksize=BUFFER, shuffle=True)
        return self._torch(samples, batch_size=BATCH, sampler=order)

    def mosaic(self, shards: list[str]) -> Any:
        streaming = importlib.import_module("streaming")
        place = str(own_format("mosaic", shards))
        data = streaming.StreamingDataset(local=place, shuffle=True, shuffle_algo="py1e", batch_size=BATCH)
        return self._torch(data, batch_size=BATCH)

    def litdata(self, shards: list[str]) -> Any:
        litdata = importlib.import_module("litdata")
        data = litdata.StreamingDataset(str(own_format("litdata", shards)), shuffle=True)
        return litdata.StreamingDataLoader(
            data, batch_size=BATCH, num_workers=self.workers, collate_fn=self.batch, shuffle=True
        )

    def energon(self, shards: list[str]) -> Any:
        energon: Any = importlib.import_module("megatron.energon")
        batch = self.batch

        @energon.edataclass
        class Raw(energon.Sample):  # type: ignore[misc]  # optional
            columns: Sample

        @energon.stateless  # type: ignore[untyped-decorator]
        def cook(sample: Sample) -> Any:
            return Raw(**energon.basic_sample_keys(sample), columns={name: sample[name] for name in COLUMNS})

        class Encoder(energon.DefaultTaskEncoder):  # type: ignore[misc]
            decoder = None
            cookers = (energon.Cooker(cook),)

            def batch(self, samples: list[Any]) -> Batch:
                return batch(sample.columns for sample in samples)

        data = energon.get_train_dataset(
            str(own_format("energon", shards)),
            worker_config=energon.WorkerConfig(rank=0, world_size=1, num_workers=self.workers),
            batch_size=BATCH,
            shuffle_buffer_size=BUFFER,
            max_samples_per_sequence=100,
            task_encoder=Encoder(),
            repeat=False,
        )
        return energon.get_savable_loader(data)

    def nothing(self, shards: list[str]) -> Iterable[Batch]:
        """The first batch of the samples, as often as there are batches: what is left without a loader."""
        samples = importlib.import_module("wdsfs").samples(shards)
        first = self.batch(samples[: min(BATCH, len(samples))])
        sizes = [min(BATCH, left) for left in range(len(samples), 0, -BATCH)]
        return [Batch(first.images[:size], first.labels[:size], first.total) for size in sizes]


# --- formats of the peers ----------------------------------------------------------------------------------------


def own_format(way: str, shards: list[str]) -> Path:
    """The directory with the shards in the format of this way."""
    return Path(shards[0]).parent.parent / way


def columns_of(samples: Iterable[Sample]) -> Iterator[Sample]:
    return ({name: sample[name] for name in COLUMNS} for sample in samples)


def make_mosaic(shards: list[str], place: Path) -> None:
    streaming = importlib.import_module("streaming")
    kinds = dict.fromkeys(COLUMNS, "bytes")
    with streaming.MDSWriter(out=str(place), columns=kinds, size_limit=CHUNK) as writer:
        for sample in columns_of(importlib.import_module("wdsfs").samples(shards)):
            writer.write(sample)


def litdata_samples(shard: str) -> Iterator[Sample]:
    yield from columns_of(importlib.import_module("wdsfs").samples([shard]))


def make_litdata(shards: list[str], place: Path) -> None:
    litdata = importlib.import_module("litdata")
    litdata.optimize(litdata_samples, shards, str(place), chunk_bytes=CHUNK, num_workers=2)


def make_energon(shards: list[str], place: Path) -> None:
    """Beside links to the shards its index, and a file that describes the samples."""
    place.mkdir()
    for shard in shards:
        os.link(shard, place / Path(shard).name)
    options = ["--non-interactive", "--no-progress", "--split-ratio", "1,0,0", "--sample-type", "CrudeWebdataset"]
    program = Path(sys.executable).parent / "energon"
    subprocess.run([program, "prepare", place, *options], check=True, stdout=subprocess.DEVNULL)


FORMATS: dict[str, Callable[[list[str], Path], None]] = {
    "mosaic": make_mosaic,
    "litdata": make_litdata,
    "energon": make_energon,
}


# --- what is measured --------------------------------------------------------------------------------------------


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


def epoch(batches: Iterable[Batch], learn: Callable[[Any, Any], None] | None) -> tuple[float, int, int]:
    """Seconds, samples, and the sum of what the batches count."""
    since = time.perf_counter()
    count = total = 0
    for images, labels, number in batches:
        if learn:
            learn(images, labels)
        count += len(labels)
        total += number
    if learn and torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - since, count, total


def read(way: str, shards: list[str]) -> Iterable[Batch]:
    """The batches of this process: nothing is made of the samples."""
    wdsfs = importlib.import_module("wdsfs")
    samples = wdsfs.samples(shards)
    anywhere = random.Random(0).sample(range(len(samples)), len(samples))
    cut = [anywhere[first : first + BATCH] for first in range(0, len(samples), BATCH)]
    order = wdsfs.Shuffle(samples, batch_size=BATCH) if way == "shuffle" else cut

    class Epoch:
        def __iter__(self) -> Iterator[Batch]:
            return (Batch(None, samples[numbers], 0) for numbers in order)

    return Epoch()


def resume(shards: list[str]) -> float:
    """Seconds from the opening of the set to the first batch, in the middle of an epoch."""
    wdsfs = importlib.import_module("wdsfs")
    state = wdsfs.Shuffle(wdsfs.samples(shards), batch_size=BATCH).state_dict()
    samples = wdsfs.samples(shards)
    state["stages"][-1][-1] = len(samples) // 2
    samples.close()
    since = time.perf_counter()
    samples = wdsfs.samples(shards)
    order = wdsfs.Shuffle(samples, batch_size=BATCH)
    order.load_state_dict(state)
    assert len(samples[next(iter(order))]) == BATCH
    return time.perf_counter() - since


def main() -> None:
    work, epochs, way, *places = sys.argv[1:]
    torch.set_num_threads(1)
    if way == "mosaic":
        with_torchvision.make_importable()
    if work == "make":
        FORMATS[way](places, own_format(way, places))
        return
    if work == "resume":
        print(json.dumps({"seconds": [resume(places)]}))
        return
    workers = min(os.cpu_count() or 1, 16) if work == "train" else 4
    loaders = Loaders(workers, batch_of_bytes if work == "bytes" else batch_of_pixels)
    batches = read(way, places) if work == "read" else getattr(loaders, way)(places)
    learn = training() if work == "train" else None
    seconds, counts, sums = zip(*(epoch(batches, learn) for _ in range(int(epochs))), strict=True)
    if len(set(sums)) > 1:
        sys.exit("the epochs have different sums")
    print(json.dumps({"seconds": seconds, "counts": counts, "total": sums[0]}))


if __name__ == "__main__":
    main()
