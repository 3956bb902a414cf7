"""Shards that are replaced, shrink, grow and go while pages are made: each page is of one snapshot of the set."""

from __future__ import annotations

import contextlib
import http.client
import random
import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tars
from tests.conftest import Program, open_the_way
from tests.kernel.mounts import need_erofs
from tests.pages.viewing import Viewer, picture, viewing
from tests.processes import PATIENCE
from tests.thorough import THOROUGH
from tests.tree.test_shard_tree import a_tree
from wdsfs.errors import MissingShard, StaleShard
from wdsfs.pages.shown_set import Snapshot, Snapshots
from wdsfs.tree.tree import LowerTree, View

NAMES = ("t-0", "t-1", "t-2", "t-3")
COUNTS = (0, 1, 5, 40, 90)  # samples of a shard
REQUESTS, CLIENTS = 25 * THOROUGH, 4  # for each client
REQUESTS_OF_A_ROUND = 3  # that are answered before the writer changes another shard
PAGES = (
    "/?at={n}",
    "/?q=s0{m}",
    "/?has=png&shard={name}&at={n}",
    "/?column=cls&value={m}",
    "/random?seed={n}&has=txt",
    "/go?number={n}",
    "/next?number={n}&has=txt",
    "/problems",
)


def a_shard(count: int, number: int = 0) -> bytes:
    members = []
    for at in range(count):
        key = b"%s/s%03d" % ((b"cat", b"dog")[at % 2], at)
        members += [tars.member(key + b".png", picture(number, (16, 12)))] if at % 3 else []
        members += [tars.member(key + b".cls", b"%d" % (at % 7)), tars.member(key + b".json", b'{"a": %d}' % at)]
        members += [tars.member(key + b".txt", b"text %d" % number)] if at % 4 else []
    return tars.tar(*members)


@pytest.fixture
def tree() -> Iterator[LowerTree]:
    with a_tree([a_shard(20), a_shard(20)], View()) as found:
        yield found


def replace(tree: LowerTree, shard: int, content: bytes | None) -> None:
    """Give a shard other content, or remove it; the set looks at its shards before it is asked again."""
    path = Path(tree.lower.path_text(shard))
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    tree.lower.distrust()


def numbers(now: Snapshot) -> list[int]:
    return [now.sample(number).number for number in range(now.total)]


@pytest.mark.parametrize("count", [0, 3, 50])
def test_a_snapshot_stays_what_it_is(tree: LowerTree, count: int) -> None:
    snapshots = Snapshots(tree)
    with snapshots.snapshot() as now:
        assert numbers(now) == list(range(40))
        path = now.sample(19).path
        replace(tree, 0, a_shard(count, 1))
        for question in (lambda: now.sample(19), lambda: now.files(path), lambda: now.number_at(path)):
            with pytest.raises(StaleShard):
                question()
        assert (now.total, now.first_of(1), now.sample(39).number) == (40, 20, 39)
    assert snapshots.answer(numbers) == list(range(count + 20))


@pytest.mark.parametrize(("changes", "totals"), [(1, [40, 24]), (9, [40, 24, 25])])
def test_an_answer_is_made_again_of_a_newer_snapshot(tree: LowerTree, changes: int, totals: list[int]) -> None:
    """It is an error if a shard changes each time."""
    snapshots, asked = Snapshots(tree), []

    def question(now: Snapshot) -> list[int]:
        asked.append(now.total)
        if len(asked) <= changes:
            replace(tree, 0, a_shard(3 + len(asked), 1))
        return numbers(now)

    with pytest.raises(StaleShard) if changes > 1 else contextlib.nullcontext():
        assert snapshots.answer(question) == list(range(24))
    assert asked == totals


def test_a_shard_that_goes_and_comes_again(tree: LowerTree) -> None:
    snapshots = Snapshots(tree)
    with snapshots.snapshot() as now:
        replace(tree, 0, None)
        with pytest.raises(MissingShard):
            now.sample(0)
    assert snapshots.answer(numbers) == list(range(20))
    Path(tree.lower.path_text(0)).write_bytes(a_shard(7))
    tree.lower.distrust()
    assert snapshots.answer(lambda now: now.sample(now.total - 1).number) == 19
    with snapshots.snapshot() as now, contextlib.suppress(StaleShard):
        now.files(b"s0/cat/s000")
    assert snapshots.answer(numbers) == list(range(27))


# --- over HTTP


class _Client(threading.Thread):
    """Asks for pages, and for what they lead to. `statuses` counts the answers, `failed` are those of 500."""

    def __init__(self, viewer: Viewer, seed: int, answered: threading.Semaphore) -> None:
        super().__init__()
        self._answered = answered
        self._viewer, self._random, self._links = viewer, random.Random(seed), ["/"]
        self.statuses: Counter[int] = Counter()
        self.failed: list[str] = []

    def run(self) -> None:
        for _ in range(REQUESTS):
            path = self._path()
            try:
                answer = self._viewer.ask(path)
            except http.client.IncompleteRead:  # a download that was cut off, so that nobody takes it for whole
                continue
            finally:
                self._answered.release()
            self.statuses[answer.status] += 1
            self.failed += [path] if answer.status == 500 else []
            if answer.headers.get("content-type", "").startswith("text/html"):
                links = re.findall(rb'(?:href|src|data-snippet|data-preview)="(/[^"]*)"', answer.body)
                further = [link.decode().replace("&amp;", "&") for link in links if link != b"/plots"]
                self._links = (self._links + further)[-100:]

    def _path(self) -> str:
        if self._random.random() < 0.01:
            return "/plots"  # a second or more to draw for each state of the set
        if self._random.random() < 0.4:
            return self._random.choice(self._links)
        n, m = self._random.randrange(300), self._random.randrange(9)
        return self._random.choice(PAGES).format(n=n, m=m, name=self._random.choice(NAMES))


def write_until(
    ended: threading.Event, program: Program, refresh: list[Path], answered: threading.Semaphore
) -> None:
    """Replace shards, and remove some: one while a few requests are answered."""
    chance = random.Random(7)
    while not ended.is_set():
        path = program.home / f"set/{chance.choice(NAMES)}.tar"
        if chance.random() < 0.15:
            path.unlink(missing_ok=True)
        else:
            program.write("new", a_shard(chance.choice(COUNTS), chance.randrange(9))).rename(path)
        for mountpoint in refresh:
            program.run("refresh", mountpoint, code=None)  # a set without any shard is refused
        for _ in range(REQUESTS_OF_A_ROUND):
            answered.acquire(timeout=PATIENCE)


@pytest.mark.parametrize("kind", ["shards", "fuse", "fuse with columns", "kernel"])
def test_no_page_fails_beside_a_writer(program: Program, kind: str) -> None:
    for number, name in enumerate(NAMES):
        program.write(f"set/{name}.tar", a_shard(40, number))
    with contextlib.ExitStack() as stack:
        source, refresh = program.home / "set", []
        if kind != "shards":
            source = program.mountpoint
            words = ["--field", "c.txt=json:a"] if kind == "fuse with columns" else []
            if kind == "kernel":
                need_erofs()
                words = ["--engine", "kernel"]
            open_the_way(source)
            program.run("mount", "-q", *words, "set", source)
            stack.callback(program.run, "umount", source)
            refresh = [] if kind == "kernel" else [source]
        viewer = stack.enter_context(viewing(program, source))
        ended, answered = threading.Event(), threading.Semaphore(0)
        writer = threading.Thread(target=write_until, args=(ended, program, refresh, answered))
        clients = [_Client(viewer, seed, answered) for seed in range(CLIENTS)]
        for thread in (writer, *clients):
            thread.start()
        for client in clients:
            client.join()
        ended.set()
        answered.release(REQUESTS_OF_A_ROUND)
        writer.join()
        assert [path for client in clients for path in client.failed] == []
        statuses: Counter[int] = sum((client.statuses for client in clients), Counter())
        assert statuses[200] > statuses.total() / 2
        assert viewer.ask("/").status == 200
