"""Hearing of changes: real files and inotify, and a socket in the place of the FUSE descriptor."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from tests import sets, wire
from tests.processes import PATIENCE
from wdsfs.errors import Unreachable
from wdsfs.mount import followed_set
from wdsfs.mount.followed_set import Growth, Watch
from wdsfs.shards import Shard
from wdsfs.spec import objects
from wdsfs.tree.freshness import Generations

MARK = "zz-mark.tar"


@pytest.fixture
def device() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A socket in place of the FUSE descriptor, and the kernel's end of it; each notification is one message."""
    ours, kernels = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, kernels:
        kernels.settimeout(PATIENCE)
        yield ours, kernels


class Heard:
    """A watch over shards, and one more which marks that everything before it has been heard."""

    def __init__(self, home: Path, shards: list[Shard], look: bool = False) -> None:
        self.mark = home / MARK
        self.mark.write_bytes(b"")
        self.life, self.alive = os.pipe()
        self.shards = [*shards, sets.at(self.mark)]
        self.watch = Watch(self.shards, look=look)

    def close(self) -> None:
        self.watch._notify.close()
        self.end()
        os.close(self.life)

    def end(self) -> None:
        """No process serves the mount any more."""
        if self.alive >= 0:
            os.close(self.alive)
            self.alive = -1

    def numbers(self) -> set[int]:
        """The shards that something has happened to since the last call."""
        os.utime(self.mark)
        marked = len(self.shards) - 1
        found: set[int] = set()
        while marked not in found:
            changed = self.watch.wait(self.life)
            assert changed is not None
            found |= changed
        return found - {marked}


Listen = Callable[..., Heard]


@pytest.fixture
def listen(tmp_path: Path) -> Iterator[Listen]:
    """Makes a watch over the shards at these paths."""
    made: list[Heard] = []

    def listen(*paths: Path, look: bool = False) -> Heard:
        made.append(Heard(tmp_path, [sets.at(path) for path in paths], look))
        return made[-1]

    yield listen
    for one in made:
        one.close()


@pytest.fixture
def heard(tmp_path: Path, listen: Listen) -> Heard:
    """A watch over a.tar and b.tar."""
    paths = [tmp_path / f"{name}.tar" for name in "ab"]
    for path in paths:
        path.write_bytes(b"old")
    return listen(*paths)


# --- what is heard -----------------------------------------------------------------------------------------


def overwrite(path: Path) -> None:
    with path.open("r+b", buffering=0) as file:
        file.write(b"new")


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"new")


def retarget(link: Path, target: str) -> None:
    """In one step, as `ln -sfT` does."""
    new = link.with_name("new link")
    new.symlink_to(target)
    new.rename(link)


CHANGES: dict[str, Callable[[Path], object]] = {
    "replace": lambda path: (path.with_name("new").write_bytes(b"new"), path.with_name("new").rename(path)),
    "rewrite": lambda path: path.write_bytes(b"new"),
    "overwrite": overwrite,
    "append": append,
    "cut": lambda path: os.truncate(path, 1),
    "chmod": lambda path: path.chmod(0o600),
    "touch": os.utime,
    "delete": Path.unlink,
    "move away": lambda path: path.rename(path.with_name("away")),
    "delete and make": lambda path: (path.unlink(), path.write_bytes(b"new")),
    "make a link": lambda path: (path.rename(path.with_name("other")), path.symlink_to("other")),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_heard(heard: Heard, change: Callable[[Path], object]) -> None:
    """Of the shard that it happens to, and of no other; also of one that comes back."""
    for number in (1, 0):
        path = sets.path_of(heard.shards[number])
        change(path)
        assert heard.numbers() == {number}
        path.unlink(missing_ok=True)
        path.write_bytes(b"back")
        assert heard.numbers() == {number}
    assert heard.numbers() == set()
    heard.end()  # nobody serves: to wait would keep a file system that answers nothing
    assert heard.watch.wait(heard.life) is None


def test_other_files_are_ignored(heard: Heard, tmp_path: Path) -> None:
    """Neither next to a shard nor with a name that is much the same; nor is reading."""
    for name in ("other.tar", "a.tar.part", ".a.tar", "A.tar", "a", "a.ta"):
        for change in ("rewrite", "append", "chmod", "touch", "delete"):
            CHANGES[change](tmp_path / name)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.tar").write_bytes(b"x")
    assert (tmp_path / "a.tar").read_bytes() == b"old"
    assert os.listdir(tmp_path)
    assert heard.numbers() == set()


def test_shards_in_several_directories(tmp_path: Path, listen: Listen) -> None:
    """The same name in another directory is another shard; names are bytes. Each directory takes one watch.

    A user may have 8,192 on a small machine; a set has thousands of shards.
    """
    paths = [tmp_path / directory / os.fsdecode(b"\xff \xc3\xa4.tar") for directory in ("x", "y")]
    for path in paths:
        path.parent.mkdir()
        path.write_bytes(b"old")
    heard = listen(*paths, *(sets.path_of(shard) for shard in sets.make(tmp_path / "x", 100, samples=1)))
    watches = Path(f"/proc/self/fdinfo/{heard.watch._notify.fd}").read_text().count("inotify wd:")
    assert watches == 3
    for number, path in enumerate(paths):
        CHANGES["replace"](path)
        assert heard.numbers() == {number}


def test_more_events_than_the_kernel_keeps(heard: Heard) -> None:
    """Then anything may have happened."""
    most = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    path = sets.path_of(heard.shards[0])
    for number in range(most + 10):  # equal events in a row are kept as one
        os.utime(heard.mark if number % 2 else path)
    changed = heard.watch.wait(heard.life)
    assert changed == {0, 1, 2}


# --- symbolic links ----------------------------------------------------------------------------------------


@pytest.fixture
def linked(tmp_path: Path, listen: Listen) -> Heard:
    """A watch over here/a.tar, a link to there/real.tar."""
    for name in ("here", "there", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "real.tar").write_bytes(name.encode())
    (tmp_path / "here" / "a.tar").symlink_to("../there/real.tar")
    return listen(tmp_path / "here" / "a.tar")


@pytest.mark.parametrize("change", [one for one in CHANGES if one != "make a link"])
def test_a_change_behind_a_link_is_heard(linked: Heard, tmp_path: Path, change: str) -> None:
    CHANGES[change](tmp_path / "there" / "real.tar")
    assert linked.numbers() == {0}


def test_a_link_that_leads_elsewhere_is_heard(linked: Heard, tmp_path: Path) -> None:
    retarget(tmp_path / "here" / "a.tar", "../elsewhere/real.tar")
    assert linked.numbers() == {0}
    (tmp_path / "elsewhere" / "real.tar.other").write_bytes(b"new")
    assert linked.numbers() == set()


UNHEARD: dict[str, tuple[str, Callable[[Path], object]]] = {
    "behind a new target": ("link/a.tar", lambda home: overwrite(home / "elsewhere/a.tar")),
    "a link on the way of a link": ("chain.tar", lambda home: retarget(home / "between", "elsewhere/a.tar")),
    # As a mounted volume of Kubernetes does it.
    "a directory that is a link": ("current/a.tar", lambda home: retarget(home / "current", "elsewhere")),
    "a directory is replaced": (
        "real/a.tar",
        lambda home: ((home / "real").rename(home / "old"), (home / "elsewhere").rename(home / "real")),
    ),
    "another name of the file": ("real/hard.tar", lambda home: overwrite(home / "elsewhere/hard.tar")),
}


@pytest.mark.parametrize("change", UNHEARD)
def test_changes_without_events_are_noticed_by_polling(
    tmp_path: Path, listen: Listen, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """One tree over all shards lets the kernel keep names for an hour, so nothing may be missed there."""
    monkeypatch.setattr(followed_set, "SCAN_SECONDS", 0.01)
    for name in ("real/a.tar", "elsewhere/a.tar", "elsewhere/hard.tar", "link"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).mkdir() if name == "link" else (tmp_path / name).write_bytes(name.encode())
    os.link(tmp_path / "elsewhere/hard.tar", tmp_path / "real/hard.tar")
    (tmp_path / "link/a.tar").symlink_to("../real/a.tar")
    (tmp_path / "between").symlink_to("real/a.tar")
    (tmp_path / "chain.tar").symlink_to("between")
    (tmp_path / "current").symlink_to("real")
    for path in ("real/a.tar", "elsewhere/a.tar", "elsewhere/hard.tar"):
        os.utime(tmp_path / path, (1, 1))  # a change within the same tick of the kernel's clock could not be seen
    place, make_change = UNHEARD[change]
    heard = listen(tmp_path / place, look=True)
    if change == "behind a new target":  # the change of the link is noticed, later changes at its target are not
        retarget(tmp_path / "link/a.tar", "../elsewhere/a.tar")
        assert 0 in (heard.watch.wait(heard.life) or ())
    make_change(tmp_path)
    assert heard.watch.wait(heard.life) == {0}


def test_a_busy_directory_does_not_keep_from_looking(
    tmp_path: Path, listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody writes a log next to the shards, all the time."""
    monkeypatch.setattr(followed_set, "SCAN_SECONDS", 0.1)
    for directory in ("real", "elsewhere"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "a.tar").write_bytes(b"old")
    (tmp_path / "current").symlink_to("real")
    heard = listen(tmp_path / "current" / "a.tar", look=True)
    read = heard.watch._read
    monkeypatch.setattr(heard.watch, "_read", lambda: (read(), (tmp_path / "real/log").write_bytes(b"x"))[0])
    retarget(tmp_path / "current", "elsewhere")
    (tmp_path / "real/log").write_bytes(b"x")
    assert heard.watch.wait(heard.life) == {0}


# --- notifications of the kernel --------------------------------------------------------------------------


@pytest.mark.parametrize("epochs", [True, False])
def test_the_kernel_is_told_to_ask_again(
    heard: Heard, device: tuple[socket.socket, socket.socket], epochs: bool
) -> None:
    """For everything; an older one is told the name in the top."""
    tags = Generations.at_mount(len(heard.shards))
    arguments = (heard.watch, device[0].fileno(), heard.life, tags, epochs)
    thread = threading.Thread(target=followed_set.follow, args=arguments, daemon=True)
    thread.start()
    for number, name in ((1, b"b"), (0, b"a")):
        before = tags.alarms
        os.utime(sets.path_of(heard.shards[number]))
        note = device[1].recv(4096)
        if epochs:
            assert wire.OUT_HEADER.whole(note) == (16, 8, 0)
        else:
            assert wire.OUT_HEADER.unpack(note) == (len(note), 3, 0)
            assert wire.INVAL_ENTRY.unpack(note, 16) == (1, 1, 0)
            assert note[32:] == name + b"\0"
        assert tags.alarms > before, "the processes of the mount know before the kernel does"
    heard.end()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "it must end with those who serve"


def test_a_shard_that_is_being_written_is_not_a_flood(
    heard: Heard, device: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes during the pause after a notification give one notification."""
    path, pauses = sets.path_of(heard.shards[0]), list[float]()

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 1:
            for _ in range(1000):
                append(path)
        else:
            heard.end()

    monkeypatch.setattr(time, "sleep", sleep)
    tags = Generations.at_mount(len(heard.shards))
    os.utime(path)
    followed_set.follow(heard.watch, device[0].fileno(), heard.life, tags, epochs=True)
    assert (pauses, tags.alarms) == ([followed_set.NOTE_SECONDS] * 2, 2)
    assert [len(device[1].recv(4096)) for _ in range(2)] == [16, 16]
    device[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        device[1].recv(4096)


def test_a_kernel_that_refuses_ends_nothing(
    heard: Heard, device: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not know the name, or the file system is just going."""
    told: list[bytes] = []

    def write(fd: int, note: bytes) -> int:
        told.append(note)
        os.utime(sets.path_of(heard.shards[0]))
        if len(told) == 3:
            heard.end()
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "write", write)
    os.utime(sets.path_of(heard.shards[0]))
    followed_set.follow(heard.watch, -1, heard.life, Generations.at_mount(3), epochs=False)
    assert len(told) == 3


# The descriptor is left to the collector: the process of a mount has one more until then.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_where_nothing_can_be_watched(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        Watch([sets.at(tmp_path / "nothing" / "a.tar")])
    gc.collect()


def test_stores_are_asked_once_in_less_than_a_minute_however_long_they_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And they are left alone for a while if they take longer."""
    now, slept, asked = 0.0, list[float](), list[float]()

    def ask_again(paths: list[str], start: int) -> int:
        nonlocal now
        asked.append(now)
        now += [0.0, 20.0, 80.0][len(asked) - 1]
        if len(asked) == 1:
            raise Unreachable("it does not answer")
        return start

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds
        if len(slept) == 4:
            raise InterruptedError

    monkeypatch.setattr(followed_set, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    monkeypatch.setattr(objects, "ask_again", ask_again)
    with pytest.raises(InterruptedError):
        followed_set._ask_stores([b"https://h/x.tar"])
    assert asked == [50.0, 100.0, 150.0]
    assert slept[3] == followed_set.ASK_PAUSE_SECONDS


def test_a_late_worker_of_a_new_list_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another change is shown while the kernel's caches are invalidated for the one before."""
    growth, scope, late = Growth.__new__(Growth), trio.CancelScope(), list[bool]()
    nothing: Any = SimpleNamespace(serves_earlier_set=False, shards=[])
    growth.supervisor, growth.served, growth._is_late = nothing, nothing, True
    monkeypatch.setattr(followed_set, "LATE_SECONDS", 0)

    async def invalidate(_: object) -> bool:
        late.append(growth._is_late)
        growth._is_late = True
        if len(late) > 1:
            scope.cancel()
        return True

    async def watch() -> None:
        with trio.fail_after(PATIENCE), scope:
            await growth._watch_late_workers()

    monkeypatch.setattr(growth, "_invalidate", invalidate)
    trio.run(watch)
    assert late == [False, False]
