"""Content that is in the kernel before it is asked for: what a pass costs, and what may happen meanwhile."""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import random
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import pytest

from tests import sets, tars
from tests.conftest import Mounted, Program, drop_pages
from tests.fuse.test_supervisor import OLD_KERNEL, Patched, kill, loops, patched
from tests.mount.test_stale import overwrite, replace, rewrite, unless_gone
from tests.processes import PATIENCE, Process, wait_until
from tests.thorough import THOROUGH
from tests.web_server import Fault, WebServer
from wdsfs import mount_table
from wdsfs.errors import MountError, StaleShard
from wdsfs.fuse.lister import PROCESSES, TURN, Lister, SampleDirectory
from wdsfs.fuse.page_cache import PageCache
from wdsfs.fuse.pass_notes import PassNotes
from wdsfs.fuse.pusher import FAILURES_MAX, Pusher
from wdsfs.index.store import open_index
from wdsfs.inodes import ROOT
from wdsfs.mount import live_mount
from wdsfs.mount.live_mount import FuseMount
from wdsfs.mount_registry import children
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.shard_tree import ShardTree
from wdsfs.tree.tree import View

__all__ = ["patched"]

SAMPLES = 150
SIZES = {"a": 5000, "b": 70_001, "c": 3}
FILES = SAMPLES * len(SIZES)
LAST = 1 + 5 * THOROUGH  # generation of a shard that changes


def content(name: str, size: int, generation: int) -> bytes:
    """Every byte tells the generation; the first ones tell the name."""
    return (name.encode() + b"-")[:size].ljust(size, bytes([generation]))


def shard(generation: int = 1, first: int = 0) -> bytes:
    """Samples of three files. The names and sizes are those of every generation, their places are not: old places
    in new content give other bytes than those of any generation."""
    members = [tars.member(b"padding", bytes(generation * 1000))]
    for number in range(first, first + SAMPLES):
        for extension, size in SIZES.items():
            name = f"{number:04d}.{extension}"
            members.append(tars.member(name.encode(), content(name, size, generation)))
    return tars.tar(*members)


@contextlib.contextmanager
def a_mount(program: Program, *options: str, count: int = 1, ends_itself: bool = False) -> Iterator[Mounted]:
    """A mount of `s.tar`, or of several shards, `0.tar` and so on."""
    names = ["s.tar"] if count == 1 else [f"{number}.tar" for number in range(count)]
    for number, name in enumerate(names):
        program.write(name, shard(first=number * SAMPLES))
    with program.mounted(*options, *names, ends_itself=ends_itself) as mounted:
        yield mounted


def key_of(path: Path) -> str:
    """The name of the member that a path stands for, in every layout."""
    return path.name.removeprefix("s--") if "." in path.name else f"{path.parent.name}.{path.name}"


def is_right(path: Path, data: bytes, generations: tuple[int, ...] = (1,)) -> bool:
    name = key_of(path)
    return data in [content(name, SIZES[name[-1]], generation) for generation in generations]


def paths_of(mounted: Mounted) -> list[Path]:
    """All files in the order of the listing, which is that of the tar; the kernel knows all inodes then."""
    paths = []
    for folder, _, names in os.walk(mounted.path):
        paths += [Path(folder, name) for name in names if name != "padding"]
    for path in paths:
        path.stat()
    return paths


def read(path: Path) -> bytes:
    """Read without pages that were there before, and leave none."""
    with path.open("rb", buffering=0) as file:
        data = file.readall()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return data


def look(path: Path) -> None:
    assert is_right(path, read(path))


def cost(mounted: Mounted, paths: list[Path]) -> int:
    """The READs of one pass over files whose pages are dropped first."""
    for path in paths:
        with path.open("rb", buffering=0) as file:
            drop_pages(file.fileno())
    before = mounted.status()["requests"].get("read", 0)
    for path in paths:
        assert is_right(path, path.read_bytes())
    return int(mounted.status()["requests"]["read"] - before)


# --- what a pass costs


LAYOUTS = {
    "files": ("--layout", "files"),
    "samples": (),
    "one tree": ("--merge",),
    "full names": ("--names", "full"),
    "classes": ("--layout", "classes", "--class-from", "c"),
    "a copy of a compressed shard": ("--unpack", "always"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pass_costs_a_request_for_many_files(program: Program, layout: str) -> None:
    content = gzip.compress(shard(), 1) if "copy" in layout else shard()
    with program.mounted(*LAYOUTS[layout], program.write("s.tar", content)) as mounted:
        paths = paths_of(mounted)
        assert len(paths) > FILES // 2
        # The pusher may have to wait for a processor: then a pass costs more.
        wait_until(lambda: cost(mounted, paths) < len(paths) // 2, "a pass that was pushed")
        # A window is counted when it is stored, and its reader may be quicker.
        wait_until(lambda: mounted.status()["pushed"]["files"] >= len(paths) // 2, "the count of files")
        pushed = mounted.status()["pushed"]
        assert 0 < pushed["passed_bytes"] <= pushed["bytes"]
        assert "pushed ahead of readers" in program.run("status", mounted.path).stdout.decode()


def test_passes_over_several_shards_at_a_time(program: Program) -> None:
    """As the processes of a loader read, each a shard of its own."""
    with a_mount(program, "--layout", "files", count=4) as mounted:
        paths = paths_of(mounted)
        in_turn = [path for at in range(FILES) for path in paths[at::FILES]]
        assert len({path.parent for path in in_turn[:4]}) == 4
        wait_until(lambda: cost(mounted, in_turn) < len(paths) // 2, "passes that were pushed")


def test_a_pass_over_a_remote_shard(web_program: Program) -> None:
    with WebServer().running() as web:
        web.put("/s.tar", shard(), etag='"s"')
        with web_program.mounted("--layout", "files", f"{web.url}/s.tar") as mounted:
            paths = paths_of(mounted)
            wait_until(lambda: cost(mounted, paths) < FILES // 2, "a pass that was pushed")
            wait_until(lambda: mounted.status()["pushed"]["files"] >= FILES // 2, "the count of files")


def test_without_push_each_file_costs_a_request(program: Program) -> None:
    with a_mount(program, "--push", "off") as mounted:
        assert cost(mounted, paths_of(mounted)) >= FILES
        assert "pushed" not in mounted.status()


def test_files_at_random_are_not_pushed(program: Program) -> None:
    with a_mount(program, "--layout", "files") as mounted:
        paths = paths_of(mounted)
        # From both ends: never forwards by a few files.
        order = [number for pair in zip(range(FILES - 1, 300, -1), range(300), strict=False) for number in pair]
        assert cost(mounted, [paths[number] for number in order]) >= len(order)
        assert mounted.status()["pushed"]["files"] == 0


@pytest.mark.parametrize(("more", "reads"), [((), 300), ((64,), 64)])
def test_a_pass_that_is_postponed_calls_again(more: tuple[int, ...], reads: int) -> None:
    """After twice as many reads in a row; after some if it has gone on before."""
    passes, first = PassNotes(), 1 << 20
    for inode in range(first, first + 301):
        passes.note(inode, 0)
    passes.postpone(inode, *more)
    assert next(count for count in range(1, 1000) if passes.note(inode + count, 0)) == reads


def test_what_is_pushed_for_readers_who_stop_is_bounded(program: Program) -> None:
    """Neighbours far apart, then runs in order that end: each wrong guess delays the next one."""
    count, chosen = 30_000, random.Random(5)
    program.write(
        "s.tar", tars.tar(*(tars.member(b"%05d.a" % number, b"%05d" % number) for number in range(count)))
    )
    with program.mounted("--layout", "files", "s.tar") as mounted:
        names = [os.fspath(path) for path in sorted(paths_of(mounted))]

        def reads(runs: int, longest: int) -> tuple[int, int]:
            """Read runs of neighbours; returns how many files were read, and pushed in vain so far."""
            done = 0
            for _ in range(runs):
                begin = chosen.randrange(count - longest)
                for number in range(begin, begin + chosen.randint(2, longest)):
                    assert Path(names[number]).read_bytes() == b"%05d" % number
                    done += 1
            pushed = mounted.status()["pushed"]
            return done, pushed["files"] - pushed["passed_files"]

        for longest in (2, 6):
            done, unread = reads(1500, longest)
            assert unread < done // 4


def test_status_and_metrics_say_what_was_pushed(program: Program) -> None:
    with a_mount(program, "--layout", "files") as mounted:
        paths = paths_of(mounted)
        wait_until(lambda: cost(mounted, paths) < FILES // 2, "a pass that was pushed")
        names = ("files", "bytes", "passed_files", "passed_bytes")
        pushed: dict[str, int] = {}

        def agree() -> bool:
            text, told = (mounted.path / ".wdsfs/metrics").read_text(), mounted.status()["pushed"]
            found = dict(re.findall(r"^wdsfs_(\w+){.*} (\d+)$", text, re.MULTILINE))
            pushed.update({name: int(found[f"pushed_{name}_total"]) for name in names})
            pushed["listed"] = int(found["listed_ahead_total"])
            return all(pushed[name] == told[name] for name in pushed)

        wait_until(agree, "counts that agree")  # the pusher may still be at work
        assert 0 < pushed["passed_files"] <= pushed["files"]
        assert 0 < pushed["passed_bytes"] <= pushed["bytes"]


def test_what_is_edited_is_not_pushed(program: Program) -> None:
    """An inode that was copied up must not get the content of the shard: with an overlay nothing is pushed."""
    with a_mount(program, "--overlay", "edits") as mounted:
        paths = paths_of(mounted)
        paths[100].write_bytes(b"mine")
        for path in paths:
            assert path.read_bytes() == b"mine" if path == paths[100] else is_right(path, path.read_bytes())
        assert "pushed" not in mounted.status()


# --- samples


def walk(mounted: Mounted, name: str = "s") -> Iterator[int]:
    """List the samples of a shard in order and read their files. Yields the number of files, sample by sample."""
    folder, files = mounted.path / name, 0
    for key in sorted(os.listdir(folder)):
        if key != "padding":
            for path in (folder / key).iterdir():
                assert is_right(path, path.read_bytes())
                files += 1
            yield files


@pytest.mark.parametrize("layout", [(), ("--columns", "c", "--columns", "a")], ids="-".join)
def test_files_of_samples_are_pushed_when_these_were_listed(program: Program, layout: tuple[str, ...]) -> None:
    """As `cp -r` and `grep -r` read: the kernel does not know the files before."""
    with a_mount(program, *layout, count=5) as mounted:
        shards, files = map(str, range(5)), 0

        def is_pushed() -> object:
            nonlocal files
            for read in walk(mounted, next(shards)):
                if read % 2 == 0:
                    mounted.status()  # meanwhile there is time to list and to push
            files += read
            report = mounted.status()
            return (
                report["requests"]["read"] < files // 2
                and report["pushed"]["listed"] > files // read * SAMPLES // 2
                and report["pushed"]["files"] > files // 2
                and report["pushed"]["passed_files"] > 0
            )

        # The pusher may have to wait for a processor: then it comes late in a shard.
        wait_until(is_pushed, "files of listed samples that are pushed")


@pytest.mark.parametrize("killed", [1, PROCESSES])
def test_listers_that_are_killed(program: Program, killed: int) -> None:
    """That costs nothing but speed for a second: there are others while the pass goes on."""
    with a_mount(program, count=10) as mounted:
        samples = chain.from_iterable(walk(mounted, str(number)) for number in range(10))
        wait_until(lambda: next(samples) and len(children(pusher_of(mounted))) == PROCESSES, "processes that list")
        listers = children(pusher := pusher_of(mounted))
        for pid in listers[:killed]:
            kill(pid)
        wait_until(lambda: next(samples) and pusher_of(mounted) not in (0, pusher), "another pusher")
        before = mounted.status()["pushed"]["listed"]
        wait_until(lambda: next(samples) and mounted.status()["pushed"]["listed"] > before, "others that list")
        assert mounted.status()["restarts"] == 0
        wait_until(lambda: all(state_of(pid) in ("", "Z") for pid in listers), "their end")


def test_listers_that_are_stopped_end_with_the_mount(patched: Patched) -> None:
    """Even in the middle of a listing, in which they have a directory of the mount open."""
    patched.patch = "from wdsfs.fuse import pusher\npusher.IDLE_SECONDS = 0.5"
    with a_mount(patched) as mounted:
        listers = list[int]()
        for _ in walk(mounted):
            if not listers and len(pids := children(pusher_of(mounted))) == PROCESSES:  # else it is forking them
                listers = pids
                for pid in listers:
                    kill(pid, signal.SIGSTOP)
        assert len(listers) == PROCESSES
    wait_until(lambda: all(state_of(pid) in ("", "Z") for pid in listers), "their end")


@pytest.mark.parametrize(
    ("calls", "reads"),
    [((6, 8, 56), (60,)), ((6,), (20, 60, 20)), ((12, 33, 32, 34, 60), (40, 140, 40))],
    ids=["to the end", "not to the tripwire", "with calls that overtake each other"],
)
def test_files_are_pushed_after_their_samples_were_listed(
    program: Program, calls: tuple[int, ...], reads: tuple[int, ...]
) -> None:
    """After the client that lists, at the latest in the second pass. A file stands for the kernel here."""
    with (
        a_mount(program) as mounted,
        (program.home / "kernel").open("wb") as kernel,
        lister_of(mounted, os.stat(mounted.path).st_dev) as (lister, samples),
    ):
        pusher = Pusher(kernel.fileno(), lister.tree, lister.passes, lister)
        for number in calls:
            pusher.go_on(samples[number].inode, 1)
        for number in reads:
            before = lister.passes.pushed.files
            pusher.go_on(next(iter(lister.tree.listing(samples[number].inode, 2))).node.inode, 1)
        assert lister.passes.pushed.files > before


def test_samples_at_random_are_not_listed(program: Program) -> None:
    with a_mount(program) as mounted:
        names = [name for name in os.listdir(mounted.path / "s") if name != "padding"]
        for pair in zip(names[:0:-1], names[: SAMPLES // 2], strict=False):
            for name in pair:
                os.listdir(mounted.path / "s" / name)
        assert mounted.status()["pushed"]["listed"] == 0


@contextlib.contextmanager
def lister_of(mounted: Mounted, device: int) -> Iterator[tuple[Lister, list[SampleDirectory]]]:
    """A lister of a mount of `s.tar`, and its samples."""
    index, shards = open_index(mounted.program.home / "index"), [sets.at(mounted.program.home / "s.tar")]
    index.refresh(shards)
    tree = ShardTree(ShardSet(shards, index), View())
    top = tree.lookup(ROOT, b"s").inode
    first = next(entry.node.inode for entry in tree.listing(top) if entry.name == b"0000")
    lister = Lister(tree, PassNotes(), os.fspath(mounted.path), device, release=lambda: None)
    try:
        yield lister, lister.samples(range(first, first + 1000))
    finally:  # else its processes keep the mount busy
        lister.close()
        tree.close(clean=True)


def listed(lister: Lister, samples: list[SampleDirectory]) -> list[list[SampleDirectory]]:
    """Have samples listed; returns those that were, by turns, in order."""
    turns = []
    assert lister.begin(samples)
    while lister.busy:
        (descriptor, *_), _, _ = select.select(lister.busy, [], [], PATIENCE)
        turns.append(lister.answer(descriptor))
    return sorted(turns)


def test_a_listed_sample_costs_no_request(program: Program) -> None:
    with a_mount(program) as mounted:
        device = os.stat(mounted.path).st_dev
        with lister_of(mounted, device) as (lister, samples):
            assert [sample.path for sample in samples] == [b"s/%04d" % number for number in range(SAMPLES)]
            assert list(chain(*listed(lister, samples))) == samples
        before = mounted.status()["requests"]["readdir"]
        for sample in samples:
            assert sorted(os.listdir(os.fsencode(mounted.path) + b"/" + sample.path)) == [b"a", b"b", b"c"]
        assert mounted.status()["requests"]["readdir"] == before
        assert mounted.status()["pushed"]["listed"] == 0  # a lister is no client in order


def test_samples_whose_paths_are_long_are_listed_all(program: Program) -> None:
    with a_mount(program) as mounted:
        with lister_of(mounted, os.stat(mounted.path).st_dev) as (lister, samples):
            deep = [sample._replace(path=b"./" * 2044 + sample.path) for sample in samples[:TURN]]
            assert list(chain(*listed(lister, deep))) == deep
        before = mounted.status()["requests"]["readdir"]
        for sample in samples[:TURN]:
            os.listdir(os.fsencode(mounted.path) + b"/" + sample.path)
        assert mounted.status()["requests"]["readdir"] == before


def test_samples_of_two_passes_are_listed_apart(program: Program) -> None:
    """What follows a listing is stored by the places of one shard."""
    with a_mount(program) as mounted:
        with lister_of(mounted, os.stat(mounted.path).st_dev) as (lister, samples):
            other = [SampleDirectory(sample.inode + (1 << 32), sample.path) for sample in samples[:3]]
            turns = listed(lister, [*samples[:3], *other, *samples[100:103]])
        assert turns == sorted([samples[:3], other, samples[100:103]])


def test_nothing_is_listed_for_a_client_that_has_ended(program: Program) -> None:
    """Else the mount would be busy: `tar cf - mnt | head; fusermount3 -u mnt`."""
    with a_mount(program) as mounted:
        with Process(["true"]) as ended:
            ended.wait()
        before = mounted.status()["requests"].get("readdir", 0)
        with lister_of(mounted, os.stat(mounted.path).st_dev) as (lister, samples):
            lister.passes.note(samples[0].inode, ended.pid)
            assert listed(lister, samples) == []
            assert mounted.status()["requests"].get("readdir", 0) == before
            lister.passes.note(samples[0].inode, os.getpid())
            assert list(chain(*listed(lister, samples[100:]))) == samples[100:]


def test_nothing_is_listed_where_something_else_is_mounted(program: Program) -> None:
    with a_mount(program) as mounted:
        before = mounted.status()["requests"].get("readdir", 0)
        with lister_of(mounted, 1) as (lister, samples):
            assert list(chain(*listed(lister, samples))) == []
        assert mounted.status()["requests"].get("readdir", 0) == before


def test_umount_waits_for_a_listing(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    program.write("s.tar", shard(4))
    with program.mounted("s.tar", ends_itself=True) as mounted:
        listing = os.open(mounted.path, os.O_RDONLY)
        unmount, attempts = mount_table.unmount, []

        def attempt(mountpoint: str, *, lazy: bool) -> None:
            attempts.append(lazy)
            if len(attempts) == 3:
                os.close(listing)
            unmount(mountpoint, lazy=lazy)

        monkeypatch.setattr(mount_table, "unmount", attempt)
        FuseMount(str(mounted.path), None).end()
        assert attempts == [False] * 3


@pytest.mark.parametrize("text", ["entry for /mnt/is busy not found in /etc/mtab", "mount: /busy: not permitted"])
def test_umount_takes_no_name_of_a_mount_point_for_the_reason(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    done = subprocess.CompletedProcess[str]([], 1, "", f"fusermount3: {text}")
    monkeypatch.setattr(subprocess, "run", lambda *_, **_options: done)
    with pytest.raises(MountError, match=text):
        live_mount._unmounted("/mnt/busybox", lazy=False)


OTHER_KERNEL = "from wdsfs.fuse import protocol\nprotocol._STORE = 77"


def test_a_kernel_that_does_not_know_the_message(patched: Patched) -> None:
    patched.patch = OTHER_KERNEL
    with a_mount(patched) as mounted:
        paths = paths_of(mounted)
        assert cost(mounted, paths) >= FILES
        assert cost(mounted, paths) >= FILES
        assert mounted.status()["pushed"]["files"] == 0


# --- what may happen in the middle of a pass


def passes(
    paths: list[Path], look: Callable[[Path], None] = look, readers: int = 3
) -> contextlib.AbstractContextManager[None]:
    """As long as the block lasts, readers go over the files in order, again and again; `look` reads one."""

    def go(first: int) -> None:
        for path in paths[first:]:
            look(path)

    return loops(*(partial(go, number * 40) for number in range(readers)))


@pytest.mark.parametrize("change", [replace, rewrite, overwrite], ids=lambda change: change.__name__)
def test_a_shard_that_changes_in_the_middle_of_passes(
    program: Program, change: Callable[[Path, bytes], None]
) -> None:
    """Whoever reads gets a file of one generation, or an error."""
    generations, reads = [1], [0]

    def look(path: Path) -> None:
        data = unless_gone(lambda: read(path), errno.ENOENT)
        if data is not None:
            assert is_right(path, data, tuple(generations)), (path, data[:20], set(data[8:]))
            reads[0] += 1

    with a_mount(program, "--layout", "files") as mounted:
        mounted.allow_log(r"s\.tar", "Stale", "ends")
        paths = paths_of(mounted)
        with passes(paths, look):
            for generation in range(2, LAST + 1):
                before = reads[0]
                generations.append(generation)
                change(program.home / "s.tar", shard(generation))
                wait_until(lambda before=before: reads[0] > before + FILES, "readers that go on")
        wait_until(lambda: is_right(paths[0], paths[0].read_bytes(), (LAST,)), "the last content")
        for path in paths:
            assert is_right(path, path.read_bytes(), (LAST,))


def test_a_shard_that_is_cut_in_the_middle_of_passes(program: Program) -> None:

    def look(path: Path) -> None:
        data = unless_gone(lambda: read(path), errno.ENOENT)
        assert data is None or is_right(path, data)

    with a_mount(program, "--layout", "files") as mounted:
        mounted.allow_log(r"s\.tar", "Stale", "ends")
        with passes(paths_of(mounted), look):
            wait_until(lambda: mounted.status()["pushed"]["files"] > FILES, "passes that are pushed")
            file = program.home / "s.tar"
            os.truncate(file, file.stat().st_size // 3)
            wait_until(lambda: mounted.status()["damaged"], "the damage")


def pusher_of(mounted: Mounted) -> int:
    return int(mounted.status()["pushed"]["pusher"])


def test_a_pusher_that_is_killed_again_and_again(program: Program) -> None:
    """Readers do not notice; it is replaced while passes go on."""
    with a_mount(program, "--layout", "files") as mounted:
        with passes(paths_of(mounted)):
            for _ in range(4):
                wait_until(lambda: pusher_of(mounted), "a pusher")
                victim = pusher_of(mounted)
                kill(victim)
                wait_until(lambda victim=victim: pusher_of(mounted) != victim, "its end")
        assert mounted.status()["restarts"] == 0


DEFECTS = """
import os
from wdsfs.fuse import pusher, supervisor
supervisor.PUSHER_SECONDS = 0.01
right = pusher.Pusher.go_on
def wrong(self, *arguments):
    for number in range({times}):
        try:
            os.mkdir(f"{home}/failure-{{number}}")
        except FileExistsError:
            continue
        raise RuntimeError("a defect")
    right(self, *arguments)
pusher.Pusher.go_on = wrong
"""


@pytest.mark.parametrize("times", [1, FAILURES_MAX])
def test_a_pusher_that_fails(patched: Patched, times: int) -> None:
    """It is replaced; if it fails again and again, readers go on without it."""
    patched.patch = DEFECTS.format(times=times, home=patched.home)
    with a_mount(patched, "--layout", "files") as mounted:
        mounted.allow_log("ahead of readers")
        mounted.allow_log("a defect")
        with passes(paths_of(mounted)):
            wait_until((patched.home / f"failure-{times - 1}").exists, "the last failure")
            if times < FAILURES_MAX:
                wait_until(lambda: mounted.status()["pushed"]["files"], "files that are pushed")
            else:
                mounted.wait_for_log("any more")
                assert mounted.status()["pushed"]["files"] == 0


def workers_beside_pusher(mounted: Mounted) -> list[int]:
    report = mounted.status()
    return [pid for pid in report["processes"] if pid not in (mounted.pid, report["pushed"]["pusher"])]


def test_workers_that_are_killed_in_passes(program: Program) -> None:
    with a_mount(program, "--layout", "files") as mounted:
        mounted.allow_log("killed by SIGKILL")
        with passes(paths_of(mounted)):
            for round_ in range(5 * THOROUGH):
                wait_until(lambda: mounted.status()["pushed"]["files"], "content that was pushed")
                done = sum(mounted.status()["requests"].values())
                kill(random.Random(round_).choice(workers_beside_pusher(mounted)))
                wait_until(lambda done=done: sum(mounted.status()["requests"].values()) > done + 100, "answers")


def test_without_resend_a_killed_worker_costs_a_pass_one_request(patched: Patched) -> None:
    """On kernels before 6.9: a reader may lose the request that the worker had received, and no other."""
    patched.patch = OLD_KERNEL
    lost, kills = [], 5

    def look(path: Path) -> None:
        try:
            data = read(path)
        except ConnectionAbortedError:
            lost.append(path)
        else:
            assert is_right(path, data), path

    with a_mount(patched, "--layout", "files") as mounted:
        mounted.allow_log("killed by SIGKILL")
        with passes(paths_of(mounted), look):
            for number in range(kills):
                wait_until(lambda: mounted.status()["pushed"]["files"], "content that was pushed")
                before = mounted.status()["restarts"]
                kill(random.Random(number).choice(workers_beside_pusher(mounted)))
                wait_until(lambda before=before: mounted.status()["restarts"] > before, "another worker")
        assert len(lost) <= kills


def object_of(generation: int = 1, first: int = 0) -> bytes:
    """A shard of one size in every generation: only the ETag of its object tells them apart."""
    return shard(generation, first).ljust(12 << 20, b"\0")


@contextlib.contextmanager
def far(program: Program, shards: int) -> Iterator[tuple[WebServer, Mounted, list[Path]]]:
    """A mount of remote shards with an empty cache. The server sends no content until `hold` is set."""
    with WebServer().running() as web:
        for number in range(shards):
            web.put(f"/{number}.tar", object_of(first=number * SAMPLES), etag='"1"', only_gets=True)
        names = [f"{web.url}/{number}.tar" for number in range(shards)]
        with program.mounted("--layout", "files", *names) as mounted:
            paths = paths_of(mounted)
            program.run("cache", "--clear")
            web.hold.clear()
            yield web, mounted, paths


def wait_for_pushed_passes(mounted: Mounted) -> None:
    files = mounted.status()["pushed"]["files"]
    wait_until(lambda: mounted.status()["pushed"]["files"] > files + FILES, "content that is pushed")


def test_a_fetcher_that_is_killed_in_passes(web_program: Program) -> None:
    with far(web_program, 4) as (web, mounted, paths):
        asked = len(web.gets())
        with passes(paths):
            for round_ in range(3):
                if round_ == 2:
                    web.hold.set()
                    wait_until(lambda: mounted.status()["pushed"]["files"], "content that is pushed")
                else:
                    wait_until(lambda asked=asked: len(web.gets()) > asked, "requests under way")
                victim, asked = mounted.fetcher(), len(web.gets())
                kill(victim)
                wait_until(lambda victim=victim: mounted.fetcher() != victim, "another fetcher")
            wait_for_pushed_passes(mounted)
        assert mounted.status()["restarts"] == 0


def test_a_remote_shard_that_is_replaced_in_the_middle_of_passes(web_program: Program) -> None:
    """In the middle of an answer of the first generation, and then again and again while it is pushed."""
    generations = [1]

    def look(path: Path) -> None:
        data = unless_gone(lambda: read(path), errno.ENOENT, errno.EIO)
        if data is not None:
            assert is_right(path, data, tuple(generations)), (path, data[:20], set(data[8:]))

    with far(web_program, 1) as (web, mounted, paths):
        mounted.allow_log("has changed", "it has been replaced")

        def put_next() -> None:
            generations.append(generations[-1] + 1)
            web.put("/0.tar", object_of(generations[-1]), etag=f'"{generations[-1]}"')

        web.objects["/0.tar"].faults.append(Fault(meanwhile=put_next))  # so all other ranges are of the second
        web.hold.set()
        with passes(paths, look):
            wait_until(lambda: len(generations) > 1, "an answer of the first generation")
            for generation in range(2, 5 * THOROUGH):
                if generation > 2:
                    put_next()
                web_program.run("refresh", mounted.path)

                def is_new(generation: int = generation) -> bool:
                    data = unless_gone(lambda: read(paths[0]), errno.ENOENT, errno.EIO)
                    return data is not None and is_right(paths[0], data, (generation,))

                wait_until(is_new, "the new content")
                wait_for_pushed_passes(mounted)


READER = """
import os, sys
paths = sys.stdin.read().split()
while True:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.read(fd, 1 << 20)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
"""


def end(mounted: Mounted, number: signal.Signals) -> None:
    """End a mount by a signal to its daemon, or kill all of its processes at once."""
    if number == signal.SIGTERM:
        kill(mounted.pid, number)
        return
    mounted.allow_log("killed by SIGKILL")  # the supervisor may see a worker's death before its own
    for pid in sorted(mounted.processes(), key=lambda pid: pid != mounted.pid):
        kill(pid)  # the supervisor first: it would replace a worker, which serves without it, too


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("pushed", ["files", "listed"])
def test_a_mount_that_ends_in_the_middle_of_passes(program: Program, number: signal.Signals, pushed: str) -> None:
    """With SIGKILL all of its processes at once. No reader waits for ever, and nothing of the mount is left.

    The lister is a client of its own mount: it does not keep that alive, nor waits for it for ever.
    """
    is_listed = pushed == "listed"
    with (
        contextlib.ExitStack() as stack,
        a_mount(program, count=8 if is_listed else 1, ends_itself=True) as mounted,
    ):
        command: list[str | Path] = (
            ["grep", "-rc", "nothing", mounted.path] if is_listed else [sys.executable, "-c", READER]
        )
        paths = b"" if is_listed else b"\n".join(map(os.fsencode, paths_of(mounted)))
        readers = [subprocess.Popen(command, stdin=-1, stdout=-3, stderr=-3) for _ in range(1 if is_listed else 3)]
        for reader in readers:
            stack.callback(reader.kill)
            assert reader.stdin is not None
            with reader.stdin:
                reader.stdin.write(paths)
        wait_until(
            lambda: (
                mounted.status()["pushed"][pushed] > (0 if is_listed else FILES)
                or (is_listed and readers[0].poll() is not None)
            ),
            "passes that are pushed",
        )
        end(mounted, number)
        for reader in readers:
            assert reader.wait(PATIENCE) == 1 or is_listed  # an OSError
        if number == signal.SIGKILL:
            mounted.wait_for_exit()
            program.run("umount", mounted.path)


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """A control group whose processes may take so many bytes from now on, page cache included."""
    name = f"wdsfs-test-{os.getpid()}"
    limits = (
        Path("/sys/fs/cgroup", name, "memory.max"),
        Path("/sys/fs/cgroup/memory", name, "memory.limit_in_bytes"),
    )
    for file in limits:
        with contextlib.suppress(OSError):
            file.parent.mkdir()
            if file.exists():
                break
            file.parent.rmdir()
    else:
        pytest.skip("no control group for memory can be made here")
    try:
        file.write_text(str(limit))
        yield file.parent
    finally:
        wait_until(lambda: not (file.parent / "cgroup.procs").read_text(), "an empty group")
        file.parent.rmdir()


def times_full(group: Path) -> int:
    """How often the group had no room for a page, and pages had to go."""
    if (counter := group / "memory.failcnt").exists():
        return int(counter.read_text())
    return int(dict(line.split() for line in (group / "memory.events").read_text().splitlines())["max"])


@pytest.mark.root
def test_a_page_cache_under_pressure(program: Program) -> None:
    """There is room for half of what is read and pushed: pages go before anyone reads them."""
    with memory_group(24 << 20) as group, a_mount(program, "--layout", "files", count=4) as mounted:
        paths = paths_of(mounted)
        for pid in mounted.processes():
            (group / "cgroup.procs").write_text(str(pid))

        def is_full() -> bool:
            before = mounted.status()["pushed"]["files"], times_full(group)
            for path in paths:
                assert is_right(path, path.read_bytes())
            return mounted.status()["pushed"]["files"] > before[0] and times_full(group) > before[1]

        wait_until(is_full, "a pass that was pushed, in which pages had to go")
        assert mounted.status()["restarts"] == 0


# --- a READ that nobody has received


def stuck_pusher(
    mounted: Mounted, stack: contextlib.ExitStack
) -> tuple[list[int], int, list[subprocess.Popen[bytes]]]:
    """Stop the workers while the pusher waits for the page of a READ: returns workers, pusher and readers."""
    paths = paths_of(mounted)
    for path in paths[:8]:
        path.read_bytes()
    wait_until(lambda: pusher_of(mounted), "a pusher")
    pusher, pids = pusher_of(mounted), mounted.status()["processes"]
    # Opened before: a name in the root may have to be looked up again, and nobody answers that either.
    files = [stack.enter_context(path.open("rb", buffering=0)) for path in paths[208:218]]
    workers = [pid for pid in pids if pid not in (mounted.pid, pusher)]
    kill(pusher, signal.SIGSTOP)
    wait_until(lambda: state_of(pusher) == "T", "the pusher to stop")
    for path in paths[200:208]:  # its call waits in the pipe
        path.read_bytes()
    for pid in workers:
        stack.callback(kill, pid, signal.SIGCONT)
        kill(pid, signal.SIGSTOP)
    wait_until(lambda: all(state_of(pid) == "T" for pid in workers), "the workers to stop")
    readers = [subprocess.Popen("cat", stdin=file, stdout=-3, stderr=-3) for file in files]
    for file, reader in zip(files, readers, strict=True):
        file.close()
        stack.callback(reader.wait, PATIENCE)
    wait_until(lambda: all(state_of(reader.pid) == "D" for reader in readers), "the readers to wait")
    kill(pusher, signal.SIGCONT)
    wait_until(lambda: state_of(pusher) == "D", "the pusher to wait")
    return workers, pusher, readers


def state_of(pid: int) -> str:
    """The state of a process as the kernel has it; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return ""


@pytest.mark.parametrize("order", ["supervisor workers", "pusher supervisor workers", "SIGTERM", "workers"])
def test_a_pusher_that_waits_for_a_read_that_nobody_has_received(program: Program, order: str) -> None:
    """It cannot be killed then: yet the mount goes on, ends by itself, or is ended by `wdsfs umount`."""
    ends = order != "workers"
    with contextlib.ExitStack() as stack, a_mount(program, "--layout", "files", ends_itself=ends) as mounted:
        mounted.allow_log("killed by SIGKILL")
        workers, pusher, readers = stuck_pusher(mounted, stack)
        victims = {"supervisor": [mounted.pid], "workers": workers, "pusher": [pusher]}
        for pid in (
            [mounted.pid] if order == "SIGTERM" else [pid for name in order.split() for pid in victims[name]]
        ):
            kill(pid, signal.SIGTERM if order == "SIGTERM" else signal.SIGKILL)
        if order.startswith("pusher"):
            program.run("umount", mounted.path)
        for reader in readers:
            assert reader.wait(PATIENCE) == 0 or ends
        if ends:
            wait_until(lambda: state_of(pusher) in ("", "Z"), "the end of the pusher")
            program.run("umount", mounted.path, code=None)


def test_umount_of_a_daemon_that_is_there_and_does_not_answer(patched: Patched) -> None:
    """As one that is about to end: the end of the mount is refused, and waits for no answer."""
    patched.patch = "from wdsfs.mount import live_mount\nlive_mount._continue = lambda daemon: None"
    with contextlib.ExitStack() as stack, a_mount(patched, "--layout", "files") as mounted:
        workers, _pusher, readers = stuck_pusher(mounted, stack)
        assert b"is in use by cat" in patched.run("umount", mounted.path, code=5).stderr
        for worker in workers:
            kill(worker, signal.SIGCONT)
        assert [reader.wait(PATIENCE) for reader in readers] == [0] * len(readers)


# --- between reading and storing


@pytest.mark.parametrize("change", [replace, rewrite, overwrite], ids=lambda change: change.__name__)
def test_what_was_read_of_a_changed_shard_is_not_stored(
    tmp_path: Path, change: Callable[[Path, bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shard changes while its bytes are read: nothing reaches the kernel, for which a file stands here."""
    path = tmp_path / "s.tar"
    path.write_bytes(shard(1))
    index, shards = open_index(tmp_path / "index"), [sets.at(path)]
    index.refresh(shards)
    tree = ShardTree(ShardSet(shards, index), View("files"))
    first = next(
        entry.node.inode for entry in tree.listing(tree.lookup(ROOT, b"s").inode) if entry.name == b"0000.a"
    )
    kernel = os.open(tmp_path / "kernel", os.O_RDWR | os.O_CREAT)
    pages, original = PageCache(kernel, tree), os.preadv

    def preadv(fd: int, buffers: tuple[memoryview], begin: int) -> int:
        size = original(fd, buffers, begin)
        change(path, shard(2))
        return size

    members = pages.members(range(first, first + 6), 1 << 20)
    assert len(members.inodes) == 6
    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(StaleShard):
        pages.store(members, lambda: 0)
    assert os.fstat(kernel).st_size == 0
    monkeypatch.undo()
    os.close(kernel)
    tree.close(clean=True)
