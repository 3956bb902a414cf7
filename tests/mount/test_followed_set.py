"""Mounts whose sets grow and shrink: real directories, lists and stores, readers, processes that are killed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests import servers, sets, tars
from tests.conftest import Mounted, Program
from tests.processes import PATIENCE, wait_until
from tests.servers import BUCKET, Server
from tests.web_server import WebServer
from wdsfs.errors import UsageError
from wdsfs.mount.mount_options import MountOptions, Serving
from wdsfs.spec.expand import Slice
from wdsfs.tree.set_options import Selection

ROUNDS = int(os.environ.get("WDSFS_EDITS", "4"))
SAMPLES = 3
SIZE = 5000
LEFT = (errno.ENOENT, errno.ESTALE, errno.EIO, errno.ENOTDIR)  # of a shard that is being replaced or taken out


def content(name: str, generation: int, samples: int = SAMPLES) -> bytes:
    """A shard of which every file says whose it is, to its end."""
    members = (
        tars.member(f"{name}-{sample}.txt".encode(), text_of(name, generation, sample))
        for sample in range(samples)
    )
    return tars.tar(*members)


def text_of(name: str, generation: int, sample: int) -> bytes:
    line = f"{name} {generation} {sample}\n".encode()
    return line * (SIZE // len(line))


def put(directory: Path, name: str, data: bytes) -> None:
    """As a careful writer does: whole, or not at all."""
    new = directory / f".{name}"
    new.write_bytes(data)
    new.rename(directory / f"{name}.tar")


class Model:
    """A directory of shards, and what mounts of it have to show."""

    def __init__(self, directory: Path, seed: int = 1) -> None:
        self.directory, self.random = directory, random.Random(seed)
        self.shards: dict[str, int] = {}
        self.generation = 0
        directory.mkdir()

    def add(self, name: str) -> None:
        self.generation += 1
        self.shards[name] = self.generation
        put(self.directory, name, content(name, self.generation))

    def remove(self, name: str) -> None:
        del self.shards[name]
        (self.directory / f"{name}.tar").unlink()

    def step(self) -> None:
        """Add, replace and remove some."""
        for name in self.random.sample("abcdefghijkl", self.random.randint(1, 3)):
            if name in self.shards and len(self.shards) > 2 and self.random.random() < 0.6:
                self.remove(name)
            else:
                self.add(name)

    def files(self, shape: str) -> dict[str, bytes]:
        """The files of a mount; `shape` makes a path of shard and sample."""
        return {
            shape.format(name=name, sample=sample): text_of(name, generation, sample)
            for name, generation in self.shards.items()
            for sample in range(SAMPLES)
        }


def files(mountpoint: Path) -> dict[str, bytes]:
    """All files of a mount; empty while one cannot be read."""
    found = {}
    try:
        for top, directories, names in os.walk(mountpoint, onerror=_raise):
            directories[:] = [name for name in directories if name != "by-index"]
            for name in names:
                path = Path(top, name)
                found[str(path.relative_to(mountpoint))] = path.read_bytes()
    except OSError as error:
        if error.errno not in LEFT:
            raise
        return {}
    return found


def _raise(error: OSError) -> None:
    raise error


class Readers:
    """Threads that read whatever a mount shows, and find no byte that no writer has written."""

    def __init__(self, *mounts: Path) -> None:
        self.wrong: list[str] = []
        self.read = 0
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(one,)) for one in mounts]

    def __enter__(self) -> Readers:
        for one in self._threads:
            one.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for one in self._threads:
            one.join()

    def _run(self, mountpoint: Path) -> None:
        while not self._over.is_set():
            for path, data in files(mountpoint).items():
                self.read += 1
                name, sample = re.findall(r"([a-l])-(\d)", path)[-1]
                line = data[: data.find(b"\n") + 1]
                if not re.fullmatch(rb"%s \d+ %s\n" % (name.encode(), sample.encode()), line) or data != line * (
                    SIZE // len(line)
                ):
                    self.wrong.append(f"{path}: {data[:40]!r}")


def links(mountpoint: Path) -> dict[str, str]:
    """Where the links by number lead; empty while one cannot be read."""
    folder = mountpoint / "by-index/000/000"
    try:
        return {name: os.readlink(folder / name) for name in os.listdir(folder)}
    except OSError as error:
        if error.errno not in LEFT:
            raise
        return {}


@pytest.mark.timeout(5 * PATIENCE + 30 * ROUNDS)
def test_two_mounts_follow_one_directory(program: Program) -> None:
    """Shards come, are replaced and go, and processes are killed: both mounts show what is there, byte for byte.

    No number is ever given to another sample.
    """
    model = Model(program.home / "shards")
    for name in "abc":
        model.add(name)
    other = program.directory("other")
    merged = ("--merge", "--index-tree", "--names=full")
    with (
        program.mounted("--follow", model.directory) as plain,
        program.mounted("--follow=1", *merged, model.directory, at=other) as numbered,
        Readers(plain.path, numbered.path) as readers,
    ):
        for mounted in (plain, numbered):
            mounted.allow_log(
                *(
                    "has changed",
                    "is gone",
                    "was killed|killed by",
                    "ESTALE",
                    "cannot be read",
                    "still shows the same shards",
                ),
                *("is not shown", "has other content", "No such file", "names in the merged tree"),
            )
        numbers: dict[str, str] = {}
        for number in range(ROUNDS):
            model.step()
            if number % 2:
                _kill_one(plain if number % 4 == 1 else numbered, model.random)
            for mounted, shape in ((plain, "{name}/{name}-{sample}/txt"), (numbered, NUMBERED_FILE)):
                wanted = model.files(shape)
                wait_until(lambda m=mounted, w=wanted: files(m.path) == w, f"round {number} at {mounted.path}")
            keys = {f"{name}-{sample}" for name in model.shards for sample in range(SAMPLES)}
            found: dict[str, str] = {}

            def linked(wanted: set[str] = keys, found: dict[str, str] = found) -> bool:
                found.clear()
                found.update(links(numbered.path))
                return {os.path.basename(target) for target in found.values()} == wanted

            wait_until(linked, f"links in round {number}")
            assert all(numbers.setdefault(name, target) == target for name, target in found.items())
        assert readers.wrong == []
        assert readers.read
        # What is missing is as good as gone before a look has taken it out.
        wait_until(lambda: numbered.status()["shards"] == len(model.shards), "shards to be taken out")
        assert numbered.status()["set"]["follow"] == 1


NUMBERED_FILE = "{name}-{sample}/{name}-{sample}.txt"


def _kill_one(mounted: Mounted, chance: random.Random) -> None:
    """Kill a worker, or the process that watches, or the one that looks, which may have ended meanwhile."""
    below = sorted(pid for pid in mounted.processes() if pid != mounted.pid)
    if below:
        with contextlib.suppress(ProcessLookupError):
            os.kill(chance.choice(below), signal.SIGKILL)


def test_refresh_of_a_fixed_set(program: Program) -> None:
    model = Model(program.home / "shards")
    for name in "ab":
        model.add(name)
    with program.mounted("shards") as mounted:
        model.add("c")
        model.remove("a")
        (model.directory / "l.tar").write_bytes(content("l", 1)[:-1024])  # it has no end yet
        mounted.allow_log("is gone")
        assert sorted(os.listdir(mounted.path)) == ["a", "b"]
        shown = program.run("status", mounted.path).stdout.decode()
        assert "fixed; `wdsfs refresh` shows new shards" in shown
        answer = program.json("refresh", mounted.path)
        assert answer == {
            "added": [{"name": "c", "shard": str(model.directory / "c.tar")}],
            "removed": [{"name": "a", "shard": str(model.directory / "a.tar")}],
            "left_out": [{"shard": str(model.directory / "l.tar"), "why": answer["left_out"][0]["why"]}],
            "shards": 2,
            "kept": "",
            "error": "",
        }
        assert "may be writing it" in answer["left_out"][0]["why"]
        assert files(mounted.path) == model.files("{name}/{name}-{sample}/txt")
        state = json.loads((mounted.path / ".wdsfs/status.json").read_text())["set"]
        assert (state["added"], state["removed"], state["left_out_count"]) == (1, 1, 1)
        assert "wdsfs_shards_removed_total" in (mounted.path / ".wdsfs/metrics").read_text()
        (model.directory / "l.tar").unlink()
        model.add("a")
        done = program.run("refresh", mounted.path)
        assert done.stdout.decode().splitlines() == [
            f"+ a  {model.directory}/a.tar",
            "3 shards: 1 added, 0 removed",
        ]
        assert mounted.status()["restarts"] == 0  # no worker has died
        for name in list(model.shards):
            model.remove(name)
        assert "holds no shard" in program.refused("refresh", mounted.path, code=5)
        assert sorted(os.listdir(mounted.path)) == ["a", "b", "c"]
        mounted.expect_log("the mount still shows the same shards: the directory 'shards' holds no shard")
    message = program.refused("refresh", mounted.path, code=5)
    assert "no mount of wdsfs is there" in message


def test_a_shard_that_looks_like_a_command_is_none_when_it_is_gone(program: Program) -> None:
    """Its author removes it, and waits for the next look at SHARDS."""
    names = ["a.tar", "pipe:touch PWNED;: .tar", "p{i,i}pe:touch PWNED;: .tar", "x::pipe:touch PWNED;: .tar"]
    for number, name in enumerate(names):
        program.write(name, sets.content(number))
    with program.mounted("--allow-missing", *names) as mounted:
        mounted.allow_log("is gone")
        assert len([name for name in os.listdir(mounted.path) if name != ".wdsfs"]) == len(names)
        for name in names[1:]:
            (program.home / name).unlink()
        assert len(program.json("refresh", mounted.path)["removed"]) == len(names) - 1
        assert [name for name in os.listdir(mounted.path) if name != ".wdsfs"] == ["a"]
    assert not (program.home / "PWNED").exists()


def test_a_set_that_cannot_be_looked_at_again(program: Program) -> None:
    sets.make(program.home / "shards", 2)
    part = Selection(slice=Slice(0, 2))
    refused: tuple[tuple[str, dict[str, Any]], ...] = (
        ("--overlay", {"serving": Serving(overlay="o", follow=1.0)}),
        ("--shard-id", {"selection": part}),
        ("standard input", {"specs": ["a.tar::@-"]}),
    )
    for why, options in refused:
        with pytest.raises(UsageError, match=why):
            MountOptions(**{"specs": ["x"], "mountpoint": "m", "serving": Serving(follow=1.0), **options})
    with program.mounted("--overlay", program.home / "o", "shards") as mounted:
        assert "unmount it, and mount it again" in program.refused("refresh", mounted.path, code=5)


def test_a_list_at_a_url_is_read_again_when_it_has_changed(web_program: Program) -> None:
    with WebServer().running() as server:
        for name in "ab":
            server.put(f"/{name}.tar", content(name, 1), etag=f'"{name}"')
        server.put("/list.txt", b"a.tar\n", etag='"1"')
        with web_program.mounted(f"@{server.url}/list.txt") as mounted:
            assert files(mounted.path).keys() == {f"a/a-{sample}/txt" for sample in range(SAMPLES)}
            server.put("/list.txt", b"b.tar\na.tar\n", etag='"2"')
            answer = web_program.json("refresh", mounted.path)
            assert [one["name"] for one in answer["added"]] == ["b"]
            assert (mounted.path / "b/b-2/txt").read_bytes() == text_of("b", 1, 2)
            server.requests.clear()
            assert web_program.json("refresh", mounted.path)["added"] == []
            assert [request.method for request in server.requests if request.path == "/list.txt"] == ["HEAD"]


def test_the_prefix_of_a_store_is_followed(program: Program, seaweedfs: Server) -> None:
    write, remove = servers.writing(seaweedfs, "s3")
    place = f"grown-{os.getpid()}"
    write(f"{place}/a.tar", content("a", 1))
    lines = [f'[store."s3://{BUCKET}"]', *(f'{name} = "{value}"' for name, value in seaweedfs.options.items())]
    program.write(".config/wdsfs/config.toml", "\n".join(lines).encode()).chmod(0o600)
    with program.mounted("--follow=1", f"s3://{BUCKET}/{place}/") as mounted:
        mounted.allow_log("is gone|no such object|missing|ESTALE")
        write(f"{place}/b.tar", content("b", 1))
        wait_until(lambda: sorted(os.listdir(mounted.path)) == ["a", "b"], "a new object")
        assert (mounted.path / "b/b-1/txt").read_bytes() == text_of("b", 1, 1)
        remove(f"{place}/a.tar")
        wait_until(lambda: sorted(os.listdir(mounted.path)) == ["b"], "an object to go")
