"""What is measured on: sets of shards whose content is known to the byte.

A set is written when a workload first asks for it. Contents are random bytes or JPEGs, so that no file system
gains by compressing them. With a directory to keep things in, a set of the same sizes is used again.
"""

from __future__ import annotations

import base64
import importlib
import io
import json
import os
import pickle
import shutil
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

BLOCK = 512
STRIDE = 4096  # of a large file, eight bytes in this many are summed while the clock runs
TIME = 1_700_000_000


@dataclass(frozen=True)
class Sizes:
    """How much is written; the options of the command line."""

    small_samples: int = 1000  # in each of two shards, three files a sample
    tree_files: int = 30_000
    medium_mib: int = 384
    large_mib: int = 256
    images: int = 800
    training: int = 25_600
    pairs: int = 10_000
    photos: int = 2000
    remote_members: int = 1215
    index_members: int = 360_000
    mount_shards: int = 1000
    memory_samples: int = 200_000
    create_files: int = 5000
    rewrite_files: int = 1000
    stream_mb: int = 500
    commit_mib: int = 1024


TINY = Sizes(
    small_samples=50,
    tree_files=2000,
    medium_mib=16,
    large_mib=16,
    images=64,
    training=640,
    pairs=200,
    photos=100,
    remote_members=120,
    index_members=48_000,
    mount_shards=20,
    memory_samples=40_000,
    create_files=200,
    rewrite_files=60,
    stream_mb=10,
    commit_mib=32,
)
LARGE_MEMORY_SAMPLES = 10_000_000
MEMORY_SHARD = 10_000  # samples in a shard of the set that memory is measured on


class Member(NamedTuple):
    """A file in a shard. `total` is the sum of eight bytes in each `STRIDE` bytes, `crc` that of everything."""

    name: str
    offset: int
    size: int
    crc: int
    total: int


@dataclass
class Shard:
    path: Path
    members: list[Member] = field(default_factory=list)

    @property
    def stem(self) -> str:
        return self.path.stem


@dataclass
class Set:
    """Shards of one kind. `members` are empty where nobody reads them; the counts are right all the same."""

    name: str
    directory: Path
    shards: list[Shard] = field(default_factory=list)
    count: int = 0  # of members
    name_bytes: int = 0  # of the names up to their extension, each counted once in a sample

    @property
    def paths(self) -> list[Path]:
        return [shard.path for shard in self.shards]

    @property
    def flat(self) -> bool:
        """Whether no member lies in a folder."""
        return all("/" not in shard.members[0].name for shard in self.shards if shard.members)

    def members(self) -> list[tuple[Shard, Member]]:
        """Every member with its shard, in the order of the tars."""
        return [(shard, member) for shard in self.shards for member in shard.members]

    def folders(self) -> list[tuple[Shard, str]]:
        """Every directory that holds members, with its shard; "" is the top."""
        return [
            (shard, folder)
            for shard in self.shards
            for folder in dict.fromkeys(member.name.rpartition("/")[0] for member in shard.members)
        ]


def strided_sum(data: Any) -> int:
    """What can be compared of a large file without slowing its reader down."""
    whole = np.frombuffer(data, dtype=np.uint8)
    words = whole[: len(whole) - len(whole) % 8].view(np.uint64)
    return int(words[:: STRIDE // 8].sum(dtype=np.uint64))


# --- writing tars --------------------------------------------------------------------------------------------


def header(name: str, size: int) -> bytes:
    """A ustar header of a regular file."""
    block = b"".join(
        (
            name.encode().ljust(100, b"\0"),
            b"0000644\0",
            b"0000000\0" * 2,
            b"%011o\0" % size,
            b"%011o\0" % TIME,
            b" " * 8,
            b"0",
            bytes(100),
            b"ustar\x0000",
        )
    ).ljust(BLOCK, b"\0")
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


class _Tar:
    """Writes one shard; on leaving, what was written is on the disk, so that it can leave the page cache."""

    def __init__(self, path: Path, remember: bool = True) -> None:
        self.shard = Shard(path)
        self._remember = remember
        self._at = 0

    def __enter__(self) -> _Tar:
        self._file = self.shard.path.open("wb", buffering=1 << 20)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.write(bytes(2 * BLOCK))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def add(self, name: str, content: bytes) -> None:
        self._file.write(header(name, len(content)))
        self._file.write(content)
        self._file.write(bytes(-len(content) % BLOCK))
        if self._remember:
            at = self._at + BLOCK
            member = Member(name, at, len(content), zlib.crc32(content), strided_sum(content))
            self.shard.members.append(member)
        self._at += BLOCK + len(content) + -len(content) % BLOCK

    def add_hole(self, name: str, size: int) -> None:
        """A member that takes no room on the disk: for what reads headers only."""
        self._file.write(header(name, size))
        self._at += BLOCK + size + -size % BLOCK
        self._file.seek(self._at)


# --- the sets ------------------------------------------------------------------------------------------------


def _small(data: Set, sizes: Sizes) -> None:
    """Samples of three files of about 3 kB; the names have no folders, as one of the peers needs it."""
    random = np.random.default_rng(1)
    for number in range(2):
        with _Tar(data.directory / f"small-{number:06d}.tar") as tar:
            for sample in range(sizes.small_samples):
                key = f"img{number:03d}{sample:05d}"
                for extension in ("left.jpg", "right.jpg"):
                    tar.add(f"{key}.{extension}", random.bytes(int(random.integers(2000, 4001))))
                text = base64.b85encode(random.bytes(int(random.integers(1600, 3201)))).decode()
                tar.add(f"{key}.json", json.dumps({"text": text}).encode())
                data.name_bytes += len(key)
        data.shards.append(tar.shard)


def _tree(data: Set, sizes: Sizes) -> None:
    """Many tiny files in folders of 1,000."""
    for number in range(2):
        with _Tar(data.directory / f"tree-{number:06d}.tar") as tar:
            for file in range(sizes.tree_files // 2):
                key = f"n{file // 1000:05d}/s{number:03d}{file:08d}"
                tar.add(f"{key}.cls", b"%d\n" % (file % 1000))
                data.name_bytes += len(key)
        data.shards.append(tar.shard)


def _medium(data: Set, sizes: Sizes) -> None:
    """Files of 100 kB."""
    random = np.random.default_rng(2)
    for number in range(4):
        with _Tar(data.directory / f"medium-{number:06d}.tar") as tar:
            for sample in range(max(1, (sizes.medium_mib << 20) // 4 // 100_000)):
                tar.add(f"img{number:03d}{sample:05d}.jpg", random.bytes(int(random.integers(80_000, 120_001))))
        data.shards.append(tar.shard)


def _large(data: Set, sizes: Sizes) -> None:
    """Two large files in one shard."""
    random = np.random.default_rng(3)
    with _Tar(data.directory / "large-000000.tar") as tar:
        for name in ("film0.mp4", "film1.mp4"):
            tar.add(name, random.bytes(sizes.large_mib << 19))
    data.shards.append(tar.shard)


def _photographs(count: int, extent: int, quality: int) -> list[bytes]:
    """JPEGs of so many pixels square, cut from photographs."""
    image = importlib.import_module("PIL.Image")
    photographs = importlib.import_module("sklearn.datasets").load_sample_images().images
    random, made = np.random.default_rng(4), []
    for _ in range(count):
        pixels = photographs[int(random.integers(len(photographs)))]
        top, left = (int(random.integers(size - extent + 1)) for size in pixels.shape[:2])
        part = np.rot90(pixels[top : top + extent, left : left + extent], int(random.integers(4)))
        part = np.clip(part + random.normal(0, 4, part.shape), 0, 255).astype(np.uint8)
        out = io.BytesIO()
        image.fromarray(part).save(out, "JPEG", quality=quality)
        made.append(out.getvalue())
    return made


def _images(data: Set, sizes: Sizes) -> None:
    """JPEGs of 320 x 320 pixels in a folder for each of ten classes.

    More shards than the loader has workers: the webdataset library gives whole shards to them.
    """
    photographs = iter(_photographs(sizes.images // 8 * 8, 320, 90))
    for number in range(8):
        with _Tar(data.directory / f"images-{number:06d}.tar") as tar:
            for sample in range(sizes.images // 8):
                tar.add(f"c{sample % 10:02d}/img{number:03d}{sample:05d}.jpg", next(photographs))
                tar.add(f"c{sample % 10:02d}/img{number:03d}{sample:05d}.cls", b"%d" % (sample % 10))
        data.shards.append(tar.shard)
    write_wids_index(data)


def _training(data: Set, sizes: Sizes) -> None:
    """JPEGs of about 76 kB with a class, in shards of 61 MB: so many that not all ranges of an order are open."""
    photographs = _photographs(min(sizes.training, 640), 400, 94)
    for number in range(32):
        with _Tar(data.directory / f"training-{number:06d}.tar") as tar:
            for sample in range(number, sizes.training, 32):
                tar.add(f"{sample:08d}.jpg", photographs[sample * 7 % len(photographs)])
                tar.add(f"{sample:08d}.cls", b"%d" % (sample % 1000))
        data.shards.append(tar.shard)
    write_wids_index(data)


def write_wids_index(data: Set) -> None:
    """Write `index.json`, which wids needs. Samples have two columns."""
    shards = [{"url": str(shard.path), "nsamples": len(shard.members) // 2} for shard in data.shards]
    index = {"wids_version": 1, "name": "bench", "shardlist": shards}
    (data.directory / "index.json").write_text(json.dumps(index))


def _pairs(data: Set, sizes: Sizes) -> None:
    """Samples of 3 kB and a label, in ten shards."""
    random = np.random.default_rng(6)
    for number in range(10):
        with _Tar(data.directory / f"pairs-{number:06d}.tar") as tar:
            for sample in range(sizes.pairs // 10):
                key = f"{number:03d}{sample:06d}"
                tar.add(f"{key}.bin", random.bytes(3000))
                tar.add(f"{key}.cls", b"%d" % (sample % 10))
        data.shards.append(tar.shard)


def _photos(data: Set, sizes: Sizes) -> None:
    """Samples of a photograph's size, a caption and a label."""
    random = np.random.default_rng(7)
    with _Tar(data.directory / "photos-000000.tar") as tar:
        for sample in range(sizes.photos):
            for extension, size in (("jpg", 76_000), ("json", 400), ("cls", 3)):
                tar.add(f"{sample:06d}.{extension}", random.bytes(size))
    data.shards.append(tar.shard)


def _remote(count: int, part: int) -> Callable[[Set, Sizes], None]:
    def write(data: Set, sizes: Sizes) -> None:
        """Shards of members of 100 kB, as they are in stores."""
        random = np.random.default_rng(12)
        for number in range(count):
            with _Tar(data.directory / f"{data.name}-{number:06d}.tar") as tar:
                for member in range(sizes.remote_members // part):
                    tar.add(f"{number}{member:06d}.bin", random.bytes(100_000))
            data.shards.append(tar.shard)

    return write


def _commit(data: Set, sizes: Sizes) -> None:
    """Samples of a file of 100 kB, one of 1 kB and one of some bytes."""
    random = np.random.default_rng(5)
    for number in range(8):
        with _Tar(data.directory / f"commit-{number:06d}.tar") as tar:
            for sample in range(max(1, (sizes.commit_mib << 20) // 8 // 104_000)):
                key = f"img{number:03d}{sample:05d}"
                tar.add(f"{key}.jpg", random.bytes(int(random.integers(80_000, 120_001))))
                text = base64.b85encode(random.bytes(int(random.integers(400, 1201)))).decode()
                tar.add(f"{key}.json", json.dumps({"text": text}).encode())
                tar.add(f"{key}.cls", b"%d" % (sample % 1000))
        data.shards.append(tar.shard)


def _headers(size: int) -> Callable[[Set, Sizes], None]:
    def write(data: Set, sizes: Sizes) -> None:
        """Shards whose headers are read and nothing else: the contents are holes. Two, with four names each."""
        for number in range(2):
            first, *links = (data.directory / f"{data.name}-{number:03d}{link:03d}.tar" for link in range(4))
            with _Tar(first, remember=False) as tar:
                for sample in range(sizes.index_members // 8 // 3):
                    key = f"img{number:03d}{sample:07d}"
                    for extension in ("left.jpg", "right.jpg", "json"):
                        tar.add_hole(f"{key}.{extension}", size)
                    data.count += 4 * 3
                    data.name_bytes += 4 * len(key)
            for path in links:
                os.link(first, path)
            data.shards += map(Shard, [first, *links])

    return write


def _single(data: Set, sizes: Sizes) -> None:
    """One shard with one member: what programs need to start and to end."""
    with _Tar(data.directory / "single-000000.tar") as tar:
        tar.add("img00000000.jpg", b"single")
    data.shards.append(tar.shard)


def _links(data: Set, stem: str, shards: int, samples: int) -> None:
    """Many shards of tiny members: hard links to one tar, which take no room."""
    first = data.directory / f"{stem}-000000.tar"
    with _Tar(first, remember=False) as tar:
        for sample in range(samples):
            tar.add(f"s{sample:08d}.cls", b"%d\n" % (sample % 1000))
    for number in range(shards):
        path = data.directory / f"{stem}-{number:06d}.tar"
        if number:
            os.link(first, path)
        data.shards.append(Shard(path))
    data.count = shards * samples
    data.name_bytes = shards * samples * 9


WRITERS: dict[str, Callable[[Set, Sizes], None]] = {
    "small": _small,
    "tree": _tree,
    "medium": _medium,
    "large": _large,
    "images": _images,
    "training": _training,
    "pairs": _pairs,
    "photos": _photos,
    "remote": _remote(1, 1),
    "remote-several": _remote(6, 3),
    "commit": _commit,
    "headers3k": _headers(3000),
    "headers100k": _headers(100_000),
    "single": _single,
    "shards": lambda data, sizes: _links(data, "shard", sizes.mount_shards, 100),
    "millions": lambda data, sizes: _links(data, "millions", sizes.mount_shards, MEMORY_SHARD),
    "few": lambda data, _: _links(data, "few", 1, MEMORY_SHARD),
    "many": lambda data, sizes: _links(data, "many", max(2, sizes.memory_samples // MEMORY_SHARD), MEMORY_SHARD),
}


class Sets:
    """The sets of a run, each written when it is first asked for."""

    def __init__(self, home: Path, sizes: Sizes, say: Callable[[str], None]) -> None:
        self.home, self.sizes, self._say = home, sizes, say
        self._sets: dict[str, Set] = {}

    def get(self, name: str) -> Set:
        if name not in self._sets:
            self._sets[name] = self._kept(name) or self._written(name)
        return self._sets[name]

    def _key(self, name: str) -> dict[str, Any]:
        return {"version": 1, "name": name, **asdict(self.sizes)}

    def _kept(self, name: str) -> Set | None:
        try:
            key, data = pickle.loads((self.home / name / "set.pickle").read_bytes())
        except (OSError, ValueError, EOFError, pickle.UnpicklingError, AttributeError, ImportError):
            return None
        return data if key == self._key(name) and isinstance(data, Set) else None

    def _written(self, name: str) -> Set:
        self._say(f"writing the set {name!r}")
        top = self.home / name
        shutil.rmtree(top, ignore_errors=True)
        data = Set(name, top / "shards")
        data.directory.mkdir(parents=True)
        try:
            WRITERS[name](data, self.sizes)
        except BaseException:
            shutil.rmtree(top, ignore_errors=True)
            raise
        data.count = data.count or sum(len(shard.members) for shard in data.shards)
        (top / "set.pickle").write_bytes(pickle.dumps((self._key(name), data)))
        return data
