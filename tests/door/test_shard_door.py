"""`wdsfs/door/shard_door.py`: files are opened here, and the wing is loaded for URLs only."""

import os
import sys
import threading
from pathlib import Path

import pytest

from tests.processes import finished
from wdsfs import source, wings
from wdsfs.door.pins import Pin
from wdsfs.door.remote_side import Presumption
from wdsfs.door.shard_door import Door, failure_of, fingerprint_of
from wdsfs.door.urls import parse
from wdsfs.errors import MissingShard, NotInstalled
from wdsfs.shards import Fingerprint

URL = b"s3://bucket/a.tar"
PIN = Pin(10, 0, '"1"', "")


@pytest.fixture
def door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Door:
    monkeypatch.setenv("WDSFS_CACHE_DIR", str(tmp_path / "cache"))
    return Door()


def test_files_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wings, "load", lambda *_: pytest.fail("the wing was loaded"))
    door, file = Door(), tmp_path / "a.tar"
    file.write_bytes(b"0123456789")
    path = os.fsencode(file)
    now = Fingerprint.at(path)
    assert door.look(path) == door.look_again(path) == now
    assert door.read_range(path, 4, 3) == (b"3456", now)
    shard = door.open_shard(path)
    assert isinstance(shard, int)
    assert (fingerprint_of(shard), failure_of(shard)) == (now, "")
    door.note_order(shard, URL)
    source.close(shard)
    assert door.known_objects() == []
    assert not door.is_presumed(path)
    assert door.presumed_pin(path) is None
    door.close()
    with pytest.raises(MissingShard):
        door.look(path + b"x")


@pytest.mark.parametrize("ask", [Door.look, Door.look_again, Door.open_shard])
def test_a_url_without_the_wing(ask: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wdsfs.remote", None)
    assert callable(ask)
    with pytest.raises(NotInstalled, match=r"wdsfs\.remote is not installed"):
        ask(Door(), URL)


def test_what_is_known_of_a_url_is_told_without_its_store(door: Door) -> None:
    assert door.remote.note_pin(parse(URL.decode()), PIN) == URL
    assert door.look(URL) == PIN.fingerprint(URL.decode())
    assert door.known_objects() == [URL]
    door.close()
    assert door.known_objects() == []


def test_a_list_tells_a_pin_until_something_else_does(door: Door) -> None:
    door.remote.presume("list", Presumption({URL: 0}, lambda row: PIN))
    assert (door.is_presumed(URL), door.presumed_pin(URL)) == (True, PIN)
    later = Pin(10, 0, '"2"', "")
    door.remote.note_pin(parse(URL.decode()), later)
    assert (door.is_presumed(URL), door.presumed_pin(URL)) == (False, PIN)
    assert door.look(URL) == later.fingerprint(URL.decode())


def test_threads_that_ask_at_once_have_the_same_urls(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """A URL with a secret that one thread has noted is known to the other."""
    real, arrived = wings.load, threading.Barrier(2, timeout=60)

    def load(wing: str, module: str) -> object:
        arrived.wait()
        return real(wing, module)

    monkeypatch.setattr(wings, "load", load)
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(door.remote)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert found[0] is door.remote
    assert found[1] is door.remote


def test_a_child_knows_what_its_parent_has_noted(door: Door) -> None:
    path = door.remote.path_of(parse("https://host/a.tar?signature=hush"))
    child = os.fork()
    if not child:
        os._exit(0 if door.remote.url_of(path).query == "signature=hush" else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_the_door_loads_little() -> None:
    code = "import sys; import wdsfs.door.shard_door; print(*sys.modules)"
    loaded = finished(sys.executable, "-c", code).stdout.split()
    assert not {"wdsfs.remote", "wdsfs.door.remote_side", "email.utils", "numpy"} & set(loaded)
