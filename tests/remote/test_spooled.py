"""Shards that come from commands, by the real fetcher and real commands."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import Process, wait_until
from tests.remote.stores import content
from tests.web_server import BORN, Fault, WebServer
from wdsfs.door import urls
from wdsfs.door.pins import Pin
from wdsfs.door.urls import Url
from wdsfs.errors import Unreachable, UnreadableShard
from wdsfs.remote.client import FetcherClient
from wdsfs.remote.object_cache import ObjectCache

SIZE = 10_000_123
DATA = content(SIZE)


class Here:
    """A directory with `x.tar`, in which commands run, and which counts their runs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.cache = ObjectCache(directory / "cache", 1 << 30)
        self.log = directory / "log"
        self.made: list[FetcherClient] = []
        (directory / "x.tar").write_bytes(DATA)

    def remote(self, limit: int = 1 << 30) -> FetcherClient:
        self.cache = ObjectCache(self.directory / "cache", limit)
        self.made.append(FetcherClient((), self.cache, log=self.log))
        return self.made[-1]

    def counted(self, command: str) -> Url:
        return urls.program(f"echo >> runs; {command}", str(self.directory))

    @property
    def runs(self) -> int:
        return len((self.directory / "runs").read_text())


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    found = Here(tmp_path)
    yield found
    for one in found.made:
        one.close()


def pinned(remote: FetcherClient, url: Url) -> Pin:
    [pin] = remote.stat([url])
    if isinstance(pin, Exception):
        raise pin
    return pin


def test_output_stays_as_long_as_it_is_used(here: Here) -> None:
    """The command is run once: whoever clears the cache leaves its output alone, until nobody reads it."""
    remote, url = here.remote(), here.counted("cat x.tar")
    pin = pinned(remote, url)
    assert here.cache.clear("") == []
    with contextlib.closing(remote.open(url, pin)) as tar:
        assert tar.pread(1000, 1 << 20) == DATA[1 << 20 :][:1000]
    assert pinned(remote, url) == pin
    assert here.runs == 1
    remote.close()
    assert [entry.shown for entry in here.cache.clear("")] == [url.shown]


def test_output_that_is_lost_is_not_made_again(here: Here) -> None:
    remote, url = here.remote(), here.counted("cat x.tar")
    pin = pinned(remote, url)
    for file in here.cache.directory.glob("*.*a*"):  # by hand: data and table
        file.unlink()
    with (
        contextlib.closing(remote.open(url, pin)) as tar,
        pytest.raises(UnreadableShard, match="can be read only once"),
    ):
        tar.pread(10, 0)
    assert here.runs == 1


def test_equal_output_is_the_same_object(here: Here) -> None:
    url = here.counted("cat x.tar")
    assert pinned(here.remote(), url) == pinned(here.remote(), url)
    assert here.runs == 2


@pytest.mark.parametrize(
    ("command", "size", "ending"),
    [
        ("cat x.tar", SIZE, ""),
        ("false", 0, "exit code 1"),
        (":", 0, ""),
        ("head -c 100000 x.tar; exit 7", 100_000, "exit code 7"),
        ("head -c 100000 x.tar; kill -9 $$", 100_000, "signal 9"),
        ("echo no >&2; echo it is >&2; exit 127", 0, "exit code 127: it is"),
        ("false || true", 0, ""),
    ],
)
def test_how_a_command_ends_is_in_its_pin(here: Here, command: str, size: int, ending: str) -> None:
    """What has come is an object in any case."""
    remote, url = here.remote(), here.counted(command)
    pin = pinned(remote, url)
    assert (pin.size, pin.version, pin.is_weak, here.runs) == (size, ending, False, 1)
    with contextlib.closing(remote.open(url, pin)) as tar:
        assert tar.pread(SIZE, 0) == DATA[:size]
    remote.close()
    assert (f"the command ended with {ending}," in here.log.read_text()) == bool(ending)


def test_what_a_command_says_is_logged_and_what_it_is_told_is_not(here: Here) -> None:
    remote = here.remote()
    url = here.counted("TOKEN=geheim; echo oh no >&2; cat x.tar")
    pinned(remote, url)
    remote.close()
    said = here.log.read_text()
    assert f"{url.shown} says: oh no" in said
    assert "geheim" not in said
    here.log.unlink()
    remote = here.remote()
    assert pinned(remote, here.counted("seq 200000 >&2; cat x.tar")).size == SIZE  # it is not held up
    remote.close()
    assert len(here.log.read_text().splitlines()) == 100


@pytest.mark.parametrize(("etag", "modified"), [('"1"', BORN), ('"1"', None), (None, BORN), (None, None)])
def test_an_answer_without_a_length_is_fetched_whole(
    here: Here, web: WebServer, etag: str | None, modified: int | None
) -> None:
    """Once, as long as its server names the same object; again after the cache has lost it."""
    served = web.put("/x.tar", DATA, etag=etag, modified=modified, ranges=False)
    served.always = Fault(chunked=True)
    remote, url = here.remote(), urls.parse(f"{web.url}/x.tar")
    pin = pinned(remote, url)
    assert pin.size == SIZE
    with contextlib.closing(remote.open(url, pin)) as tar:
        assert tar.pread(1000, 5_000_000) == DATA[5_000_000:][:1000]
    here.cache.keep_pin(url.shown, pin)
    requests = len(web.gets())
    assert pinned(here.remote(), url) == pin
    assert len(web.gets()) == 2 * requests - 1  # all but the one for the whole
    assert len(here.cache.clear("")) == 1
    with contextlib.closing(here.remote().open(url, pin)) as tar:
        assert tar.pread(1000, 5_000_000) == DATA[5_000_000:][:1000]
    served.content, served.etag = DATA[::-1], etag and '"2"'
    served.modified = modified and BORN + 1
    if etag or modified:
        assert pinned(remote, url) not in (pin, pin._replace(size=SIZE))
    else:
        assert pinned(remote, url) == pin  # nobody can know


@pytest.mark.parametrize("cut", [0, 5_000])
def test_an_answer_without_a_length_that_is_cut_is_no_shard(here: Here, web: WebServer, cut: int) -> None:
    web.put("/x.tar", DATA, ranges=False).always = Fault(chunked=True, torn=True, cut=cut)
    with pytest.raises(Unreachable, match=r"/x\.tar: the connection to its server broke"):
        pinned(here.remote(), urls.parse(f"{web.url}/x.tar"))


def test_output_larger_than_the_cache(here: Here) -> None:
    """Nothing goes for what cannot be kept, and the command does not go on."""
    remote = here.remote(limit=8 << 20)
    small = here.counted("head -c 5000000 x.tar")
    pinned(remote, small)
    with pytest.raises(UnreadableShard, match="--cache-size"):
        pinned(remote, here.counted("cat x.tar; sleep 1000"))
    assert [entry.shown for entry in here.cache.usage()] == [small.shown]


def test_others_go_for_output_however_recently_they_were_used(here: Here) -> None:
    """... but not other output that is in use: that could not come again."""
    remote = here.remote(limit=8 << 20)
    with contextlib.closing(here.cache.open("s3://b/x.tar", Pin(6_000_000, 0, '"x"', ""))) as other:
        assert other.put(0, DATA[:6_000_000])
    parts = [here.counted(f"tail -c +{start} x.tar | head -c 3000000") for start in (1, 3_000_001, 6_000_001)]
    pins = [pinned(remote, url) for url in parts[:2]]
    with pytest.raises(UnreadableShard, match="the rest of the cache is in use: give the cache more"):
        pinned(remote, parts[2])
    for number, (url, pin) in enumerate(zip(parts[:2], pins, strict=True)):
        with contextlib.closing(remote.open(url, pin)) as tar:
            assert tar.pread(3_000_000, 0) == DATA[number * 3_000_000 :][:3_000_000]
    assert sum(entry.files.bytes for entry in here.cache.usage()) <= 8 << 20


def test_a_disk_that_is_full_and_a_directory_that_is_gone(here: Here) -> None:
    """No directory can be made for the cache: the shard cannot be read, which is said."""
    remote = here.remote()
    with pytest.raises(UnreadableShard, match=r"cannot be run in .*gone.*No such file"):
        pinned(remote, urls.program("cat x.tar", str(here.directory / "gone")))
    remote.ensure()
    here.cache.directory.write_text("")
    with pytest.raises(UnreadableShard, match="cannot be kept in the cache"):
        pinned(remote, here.counted("cat x.tar"))


def test_a_fetcher_that_is_killed_while_a_command_runs(here: Here) -> None:
    """The next one runs it again."""
    remote = here.remote()
    url = here.counted("head -c 5000 x.tar; until [ -e go-on ]; do sleep 0.05; done; tail -c +5001 x.tar")
    found: list[Pin] = []
    thread = threading.Thread(target=lambda: found.append(pinned(remote, url)))
    thread.start()
    wait_until(lambda: (here.directory / "runs").exists() and here.runs == 1, "the command")
    os.kill(remote.fetcher, signal.SIGKILL)
    wait_until(lambda: here.runs == 2, "the second run")
    (here.directory / "go-on").touch()
    thread.join()
    with contextlib.closing(remote.open(url, found[0])) as tar:
        assert tar.pread(SIZE, 0) == DATA


def test_a_command_ends_when_nobody_waits_for_it(here: Here) -> None:
    """Nor the fetcher: the process that has asked is killed."""
    program = "import sys; from wdsfs.spec.expand import expand; expand(sys.argv[1:])"
    spec = "pipe:echo $$ > shell; sleep 1000; echo"
    environment = {**os.environ, "WDSFS_CACHE_DIR": str(here.directory / "cache")}
    shell = here.directory / "shell"
    with Process([sys.executable, "-c", program, spec], cwd=here.directory, env=environment) as asking:
        wait_until(lambda: shell.exists() and shell.read_text().endswith("\n"), "the command")
        asking.kill()
    wait_until(lambda: _has_ended(int(shell.read_text())), "the end of the command")


def _has_ended(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
