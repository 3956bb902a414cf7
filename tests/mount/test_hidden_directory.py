"""The hidden directory `.wdsfs`: what is in it, that each text is whole, and that nobody trips over it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from tests import sets, tars, wire
from tests.conftest import Program, fails
from tests.ground.test_mount_registry import a_registration
from wdsfs import inodes
from wdsfs.fuse.counters import KINDS, Board
from wdsfs.fuse.protocol import Request
from wdsfs.fuse.read_ops import Operations, ReadOperations
from wdsfs.fuse.write_ops import WritableOperations
from wdsfs.index.store import open_index
from wdsfs.inodes import HIDDEN, ROOT, UP, pack_extra
from wdsfs.mount import hidden_directory, reports
from wdsfs.mount.hidden_directory import HiddenDirectory, HiddenDirectoryOperations
from wdsfs.mount.reports import SNAPSHOTS, TEXT_MAX, TextRing
from wdsfs.overlay.overlay_directory import OverlayDirectory
from wdsfs.overlay.upper_directory import UpperDirectory
from wdsfs.overlay.writable_tree import WritableTree
from wdsfs.tree.merged_tree import make_tree
from wdsfs.tree.set_options import Owner
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.tree import View

DAEMON = replace(a_registration('/mnt/a "b"\\c\n\udcff'), specs=["s.tar"], started=1.5e9, start_ticks=0)
READ_MAX = 1 << 20
LAST_HIDDEN = 7  # of the types of extras that the bits of NOT_HIDDEN leave to the hidden directory


class Worker:
    """The answers of a worker of a mount, by path and by inode."""

    def __init__(self, operations: Operations[Any]) -> None:
        self.operations = operations
        self.tree: Any = operations.tree

    def bytes_of(self, request: bytes) -> bytes:
        answer = self.error(request)
        assert isinstance(answer, bytes | memoryview), answer
        return bytes(answer)

    def error(self, request: bytes) -> object:
        return self.operations.answer(Request(memoryview(request)))

    def lookup(self, path: bytes) -> Any:
        found, parent = None, ROOT
        for name in path.split(b"/"):
            found = wire.ENTRY_OUT.whole(self.bytes_of(wire.lookup(parent, name)))
            parent = found.nodeid
        return found

    def read(self, inode: int, step: int = READ_MAX) -> bytes:
        """As the kernel does: not beyond the size."""
        size = wire.ATTR_OUT.whole(self.bytes_of(wire.getattr(inode))).size
        parts = [self.bytes_of(wire.read(inode, at, min(step, size - at))) for at in range(0, size, step)]
        return b"".join(parts)

    def cat(self, path: bytes) -> bytes:
        found = self.lookup(path)
        text = self.read(found.nodeid)
        assert len(text) == found.size
        return text

    def names(self, path: bytes, opcode: str = "READDIR") -> list[wire.Line]:
        inode = self.lookup(path).nodeid if path else ROOT
        found: list[wire.Line] = []
        while True:
            after = found[-1].cursor if found else 0
            more = wire.lines(self.bytes_of(wire.read(inode, after, 400, opcode)), opcode == "READDIRPLUS")
            if not more:
                return found
            found += more


class Mount:
    """A set with its shared memory, and as many workers as one wants."""

    def __init__(self, home: Path, shards: list[bytes], indexed: bool = True) -> None:
        home.mkdir(exist_ok=True)
        self.home = home
        self.shards = []
        for number, content in enumerate(shards):
            path = home / f"s{number}.tar"
            path.write_bytes(content)
            self.shards.append(sets.at(path))
        self.index = open_index(home / "index")
        if indexed:
            self.index.refresh(self.shards)
        self.board, self.snapshots = Board(), TextRing()
        self.board.supervise(os.getpid())
        self.lowers: list[ShardSet] = []

    def worker(self, view: View | None = None, merge: bool = False, overlay: Path | None = None) -> Worker:
        # The index in one process is opened once; its workers are made one after the other.
        below = ShardSet(self.shards, self.index, tags=self.lowers[0].generations if self.lowers else None)
        self.lowers.append(below)
        tree: Any = make_tree(below, replace(view or View(), merge=merge))
        kind: type[Operations[Any]] = ReadOperations
        if overlay is not None:
            tree, kind = WritableTree(tree, UpperDirectory(OverlayDirectory(overlay))), WritableOperations
        tree.prepare()
        operations = kind(Owner(12, 34, 0o027), self.board)
        operations.hidden = HiddenDirectoryOperations(
            operations.owner, self.board, HiddenDirectory(DAEMON, self.board, self.snapshots)
        )
        operations.attach(tree, self.board.slot(len(self.lowers)))
        return Worker(operations)

    def close(self) -> None:
        for below in self.lowers:
            for file in below._files.files.values():
                assert isinstance(file.shard, int)
                os.close(file.shard)
        self.index.close()


@contextlib.contextmanager
def a_mount(home: Path, shards: list[bytes], indexed: bool = True) -> Iterator[Mount]:
    made = Mount(home, shards, indexed)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Three shards, the last of them cut off in a member's content."""
    cut = sets.content(2)[: 512 * 5 + 1]
    with a_mount(tmp_path / "set", [sets.content(0), sets.content(1), cut]) as made:
        yield made


# --- names and attributes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("layout", ["samples", "files"])
def test_the_hidden_directory_is_found_and_never_listed(mount: Mount, layout: str, merge: bool) -> None:
    worker = mount.worker(View(layout), merge)
    assert worker.error(wire.lookup(ROOT, b".wdsfs2")) != 0
    found = worker.lookup(b".wdsfs")
    assert (found.mode, found.uid, found.gid) == (stat.S_IFDIR | 0o550, 12, 34), "less the umask"
    for opcode in ("READDIR", "READDIRPLUS"):
        assert hidden_directory.NAME not in [line.name for line in worker.names(b"", opcode)]
        files = worker.names(b".wdsfs", opcode)
        assert [line.name for line in files] == [b".", b"..", *hidden_directory._FILES]
        assert [line.type for line in files] == [4, 4, 8, 8, 8]
        if opcode == "READDIRPLUS":
            assert not any(line.entry.nodeid for line in files), "the kernel gets no inode"
    for name in (b"status.json", b"problems.txt"):
        one = worker.lookup(b".wdsfs/" + name)
        assert (one.mode, one.nlink, one.entry_valid) == (stat.S_IFREG | 0o440, 1, 0)
        assert one.attr_valid > 0, "the text of an inode never changes"
    up = wire.ENTRY_OUT.whole(worker.bytes_of(wire.lookup(found.nodeid, b"..")))
    assert up.nodeid == ROOT
    absent = wire.ENTRY_OUT.whole(worker.bytes_of(wire.lookup(found.nodeid, b"absent")))
    assert (absent.nodeid, absent.entry_valid) == (0, 0)
    status = worker.lookup(b".wdsfs/status.json").nodeid
    assert worker.error(wire.lookup(status, b"x")) == errno.ENOTDIR
    assert worker.error(wire.read(status, 0, 400, "READDIR")) == errno.ENOTDIR
    assert worker.error(wire.read(found.nodeid, 0, 400)) == errno.EISDIR
    assert worker.error(wire.getxattr(status, b"user.wdsfs.shard", 99)) == errno.ENODATA
    assert worker.bytes_of(wire.listxattr(status, 99)) == b""
    assert len(worker.bytes_of(wire.message("STATFS", status))) == 80
    assert worker.operations.board.failures == 0


@pytest.mark.parametrize("writable", [False, True])
def test_the_hidden_directory_is_there_when_a_merged_tree_cannot_be_read(tmp_path: Path, writable: bool) -> None:
    """Its texts say which shard is to blame."""
    with a_mount(tmp_path / "set", [sets.content(0), sets.content(1)]) as made:
        (made.home / "s1.tar").unlink()
        (made.home / "ov").mkdir()
        worker = made.worker(merge=True, overlay=made.home / "ov" if writable else None)
        assert worker.error(wire.lookup(ROOT, b"absent")) == errno.EIO
        status = worker.lookup(b".wdsfs/status.json").nodeid
        assert json.loads(worker.read(status))
        assert b"s1.tar" in worker.read(worker.lookup(b".wdsfs/problems.txt").nodeid)


def test_a_name_of_the_data_wins_over_the_hidden_directory(tmp_path: Path) -> None:
    data = tars.tar(tars.member(b".wdsfs/a.txt", b"data"))
    with a_mount(tmp_path / "set", [data]) as made:
        worker = made.worker(merge=True)
        found = worker.lookup(b".wdsfs")
        assert inodes.unpack_extra(found.nodeid) == (0, 0)
        assert worker.lookup(b".wdsfs/a/txt").size == 4
        assert hidden_directory.NAME in [line.name for line in worker.names(b"")]
        assert wire.ENTRY_OUT.whole(worker.bytes_of(wire.lookup(found.nodeid, b"status.json"))).nodeid == 0


@given(what=st.integers(0, 15), number=st.integers(0, (1 << 56) - 1), up=st.sampled_from([0, 0, 0, UP, 1 << 63]))
def test_a_forged_inode_is_stale(what: int, number: int, up: int, forged: Worker) -> None:
    """Any number gives an errno, never the text of another file."""
    inode = pack_extra(what, number) | up
    if inode <= ROOT or inode == pack_extra(HIDDEN):
        return
    no_file = up == UP or what > LAST_HIDDEN
    expected = (errno.ENOENT, errno.EISDIR) if no_file else (errno.ESTALE, errno.ENOTDIR)
    for request in (
        wire.getattr(inode),
        wire.lookup(inode, b"x"),
        wire.read(inode, 0, 100),
        wire.read(inode, 0, 100, "READDIRPLUS"),
    ):
        answer = forged.error(request)
        if isinstance(answer, bytes) and no_file:  # how a LOOKUP is told that there is no such name
            answer = errno.ENOENT if wire.ENTRY_OUT.whole(answer).nodeid == 0 else answer
        assert answer in expected


@pytest.fixture(scope="module")
def forged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with a_mount(tmp_path_factory.mktemp("forged"), [sets.content(0)]) as made:
        yield made.worker()


# --- what changes from one moment to the next --------------------------------------------------------------


def test_each_lookup_gets_a_snapshot_that_all_workers_share(mount: Mount) -> None:
    first, second = mount.worker(), mount.worker()
    one = first.lookup(b".wdsfs/status.json")
    first.lookup(b"s0")
    another = second.lookup(b".wdsfs/status.json")
    assert one.nodeid != another.nodeid
    texts = [{worker.read(inode, 100) for worker in (first, second)} for inode in (one.nodeid, another.nodeid)]
    assert [len(found) for found in texts] == [1, 1], "the same from each"
    before, after = (json.loads(found.pop())["requests"]["lookup"] for found in texts)
    assert after > before
    metrics = first.lookup(b".wdsfs/metrics").nodeid
    assert metrics not in (one.nodeid, another.nodeid)
    for _ in range(SNAPSHOTS - 3):
        second.lookup(b".wdsfs/metrics")
    assert first.read(one.nodeid), "still there"
    second.lookup(b".wdsfs/metrics")
    for request in (wire.read(one.nodeid, 0, 100), wire.getattr(one.nodeid)):
        assert first.error(request) == errno.ESTALE
    assert first.read(another.nodeid)
    assert mount.board.failures == 0, "nothing is wrong with that"


def test_status_and_metrics_say_the_same(mount: Mount) -> None:
    worker = mount.worker()
    for name in (b"s0", b"s1"):
        worker.lookup(name)
    mount.board.replaced(3)
    mount.board.slot(1).failed()
    mount.board.slot(1).read(12345)
    metrics = worker.cat(b".wdsfs/metrics").decode()
    told = json.loads(worker.cat(b".wdsfs/status.json"))
    families = {family.name: family for family in text_string_to_metric_families(metrics)}
    assert all(name.startswith("wdsfs_") and family.documentation for name, family in families.items())
    samples = [sample for family in families.values() for sample in family.samples]
    assert {sample.labels["mountpoint"] for sample in samples} == {'/mnt/a "b"\\c\\n\\udcff'}
    value = {name.removeprefix("wdsfs_"): one.samples[0].value for name, one in families.items() if one.samples}
    expected = {
        **{name: told[name] for name in ("shards", "samples", "members")},
        "indexed_shards": 3,
        "damaged_shards": 1,
        "content_bytes": told["bytes"],
        "read_bytes": 12345,
        "errors": 1,
        "worker_restarts": told["restarts"],
        "open_shards": 0,
        "workers": 0,
        "followed": 0,
        "look_failed": 0,
    }
    assert value.items() >= expected.items()
    assert (told["restarts"], told["set"]["follow"]) == (3, None)
    assert value["memory_bytes"] > 1 << 20
    assert value["uptime_seconds"] > 0
    kinds = {sample.labels["kind"]: sample.value for sample in families["wdsfs_requests"].samples}
    assert kinds["lookup"] >= 4
    counters = {name.removeprefix("wdsfs_") for name, family in families.items() if family.type == "counter"}
    assert counters == {*["requests", "read_bytes", "errors", "worker_restarts", "shards_added", "shards_removed"]}
    assert told["mountpoint"] == DAEMON.mountpoint
    assert told["state"] == "without supervisor", "its process is another one"
    assert [one["shard"] for one in told["damaged"]] == [str(mount.home / "s2.tar")]


def test_a_report_has_room(tmp_path: Path) -> None:
    """Of lists that are too long there is the beginning, and the count."""
    broken = [b"x" * 600 for _ in range(reports.DAMAGED_MAX + 5)]
    with a_mount(tmp_path / "set", [*broken, sets.content(0)]) as made:
        worker = made.worker()
        told = json.loads(worker.cat(b".wdsfs/status.json"))
        assert len(told["damaged"]) == reports.DAMAGED_MAX
        assert told["damaged_count"] == len(broken)
        lines = worker.cat(b".wdsfs/problems.txt").splitlines()
        assert len(lines) == len(broken), "all of them"
        assert lines[3].startswith(os.fsencode(made.home / "s3.tar") + b": ")
    for odd in ("\udcff" * 9000, "ä\n" * 9000):
        long = {"specs": ["a" * 300] * 5000, "log": odd, "shards": 7, "requests": {}}
        text = reports.as_json(long, TEXT_MAX)
        assert TEXT_MAX // 4 < len(text) <= TEXT_MAX
        found = json.loads(text)
        assert (found["shards"], found["requests"]) == (7, {})
        assert odd.startswith(found["log"])
    for odd in ('\udcff"\n', "\u6570", "\\"):
        everything = {**told, "mountpoint": odd * 5000, "requests": dict.fromkeys(KINDS, 10**15)}
        text = reports.as_metrics(everything)
        assert len(text) <= TEXT_MAX
        assert list(text_string_to_metric_families(text.decode()))


# --- what the shards are -----------------------------------------------------------------------------------


def test_the_problems_follow_the_set(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that is gone is one; those without room are counted."""
    first, second = mount.worker(), mount.worker()
    before = first.lookup(b".wdsfs/problems.txt").nodeid
    (mount.home / "s1.tar").unlink()
    first.operations.tree.lower.distrust()
    both = first.cat(b".wdsfs/problems.txt").splitlines(keepends=True)
    assert [b"s1.tar" in line for line in both] == [True, False]
    assert json.loads(first.cat(b".wdsfs/status.json"))["damaged_count"] == 2
    with monkeypatch.context() as patch:
        patch.setattr(hidden_directory, "TEXT_MAX", len(both[0]) + 64)
        assert first.cat(b".wdsfs/problems.txt") == both[0] + b"and 1 more; see: wdsfs check\n"
    for number in (1, 2):
        (mount.home / f"s{number}.tar").write_bytes(sets.content(number))
    first.operations.tree.lower.distrust()
    assert second.read(before).startswith(os.fsencode(mount.home / "s2.tar") + b": "), "as it was looked up"
    assert first.cat(b".wdsfs/problems.txt") == b""


def test_metrics_without_room_end_with_a_line(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of many stores, say; the snapshot after them is whole, too."""
    worker = mount.worker()
    monkeypatch.setattr(reports, "as_metrics", lambda _: b"wdsfs_some_metric 1\n" * 5000)
    assert worker.cat(b".wdsfs/metrics") == b"wdsfs_some_metric 1\n" * (TEXT_MAX // 20)
    assert worker.cat(b".wdsfs/problems.txt")


# --- changes -----------------------------------------------------------------------------------------------


def test_the_hidden_directory_cannot_be_changed(mount: Mount, tmp_path: Path) -> None:
    worker = mount.worker(overlay=tmp_path / "edits")
    (tmp_path / "edits").mkdir(exist_ok=True)
    hidden, status = worker.lookup(b".wdsfs").nodeid, worker.lookup(b".wdsfs/status.json").nodeid
    data = worker.lookup(b"s0").nodeid
    to_hidden, to_data, to_top = (inode.to_bytes(8, "little") for inode in (hidden, data, ROOT))
    requests: list[tuple[str, int, bytes]] = [
        *(
            (name, at, bytes(head) + new + (b"\0" if head else b"\0target\0"))
            for name, head in (("MKNOD", 16), ("MKDIR", 8), ("SYMLINK", 0))
            for at, new in ((hidden, b"x"), (ROOT, b".wdsfs"))
        ),
        ("LINK", data, status.to_bytes(8, "little") + b"x\0"),
        ("LINK", hidden, to_data + b"x\0"),
        *(("UNLINK", hidden, b"status.json\0"), ("RMDIR", hidden, b"metrics\0"), ("RMDIR", ROOT, b".wdsfs\0")),
        ("RENAME", hidden, to_hidden + b"x\0y\0"),
        ("RENAME", hidden, to_data + b"metrics\0y\0"),
        ("RENAME2", data, to_hidden + bytes(8) + b"x\0y\0"),
        *(("RENAME", ROOT, to_top + names) for names in (b".wdsfs\0y\0", b"s0\0.wdsfs\0")),
        *(("SETATTR", status, bytes(88)), ("WRITE", status, bytes(44))),
        *(("SETXATTR", status, bytes(8) + b"user.x\0v"), ("REMOVEXATTR", status, b"user.x\0")),
    ]
    for request in requests:
        assert worker.error(wire.message(*request)) == errno.EROFS, request
    assert worker.error(wire.message("FSYNC", status, bytes(16))) == b""
    assert worker.error(wire.message("FORGET", status, bytes(8))) is None
    for name in ("OPEN", "FLUSH", "ACCESS"):
        assert worker.error(wire.message(name, status, bytes(24))) == errno.ENOSYS, "as for any other file"
    assert wire.OPEN_OUT.whole(worker.bytes_of(wire.message("OPENDIR", hidden, bytes(8)))).fh == 0
    assert worker.cat(b".wdsfs/status.json")
    # Another name of the top is nobody's business.
    assert worker.error(wire.message("MKDIR", ROOT, bytes(8) + b".wdsfs2\0")) not in (errno.EROFS, errno.EIO)


def test_a_name_of_the_overlay_wins(mount: Mount, tmp_path: Path) -> None:
    """Made by the kernel's overlayfs, say. It can be changed like anything else, and removed."""
    mount.worker(overlay=tmp_path / "edits")
    (tmp_path / "edits" / "upper" / ".wdsfs").mkdir()
    worker = mount.worker(overlay=tmp_path / "edits")
    assert worker.lookup(b".wdsfs").nodeid & UP
    assert worker.error(wire.message("RMDIR", ROOT, b".wdsfs\0")) == b""
    assert worker.lookup(b".wdsfs").nodeid == pack_extra(HIDDEN)
    assert worker.error(wire.message("MKDIR", ROOT, bytes(8) + b".wdsfs\0")) == errno.EROFS


# --- snapshots ---------------------------------------------------------------------------------------------

KEEP_PUTTING = """
import os, sys
from wdsfs.mount.reports import TextRing
snapshots = TextRing()
children = []
for one in range(4):
    pid = os.fork()
    if not pid:
        while True:
            text = b"%d" % one * 60000
            number = snapshots.put(text)
            got = snapshots.get(number)
            assert got is None or got.content == text
    children.append(pid)
seen = 0
for victim in children:
    while snapshots.last() < seen + 300:
        number = snapshots.last()
        got = snapshots.get(number) if number else None
        assert got is None or (len(set(got.content)) == 1 and len(got.content) == 60000)
    seen = snapshots.last()
    os.kill(victim, 9)
    os.waitpid(victim, 0)
print(snapshots.put(b"end") == snapshots.last(), snapshots.get(snapshots.last()).content)
"""


def test_snapshots_of_processes_that_are_killed() -> None:
    """Nobody waits for a dead process, no number is given twice, and what is got is whole."""
    assert sets.run(KEEP_PUTTING) == "True b'end'\n"
    snapshots = TextRing()
    assert [snapshots.get(number) for number in (0, 1, SNAPSHOTS, 1 << 55)] == [None] * 4
    assert snapshots.put(b"text") == 1
    assert [snapshots.get(1 + turn * SNAPSHOTS) for turn in (1, 2)] == [None, None]


# --- real mounts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writable", [False, True])
def test_unmodified_tools_and_the_hidden_directory(program: Program, writable: bool) -> None:
    program.write("s-0.tar", sets.content(0))
    program.write("s-1.tar", sets.content(1)[: 512 * 5 + 1])
    moving = dict.fromkeys(("uptime_seconds", "memory_bytes", "requests", "processes", "open_files"))
    overlay = ("--overlay", "edits") if writable else ()
    with program.mounted("-o", "umask=022", "--workers", "3", *overlay, "s-{0,1}.tar") as mounted:
        mounted.expect_log(r"s-1.tar: .*; see: wdsfs check")
        hidden = mounted.path / ".wdsfs"
        assert sorted(os.listdir(mounted.path)) == ["s-0", "s-1"]
        told = json.loads((hidden / "status.json").read_text())
        assert told | moving == mounted.status() | moving
        assert (told["state"], told["overlay"]) == ("running", str(program.home / "edits") if writable else None)
        assert len(told["processes"]) == (2 if writable else 4)
        tool = program.tool
        assert b"metrics" in tool("ls", "-la", hidden)
        assert len(tool("find", hidden, "-type", "f").splitlines()) == 3
        assert b"s-1.tar: " in tool("cat", hidden / "problems.txt")
        assert int(tool("du", "-sb", hidden).split()[0]) > 1000
        assert len([*text_string_to_metric_families(tool("cat", hidden / "metrics").decode())]) > 10
        copy = program.directory("copy")
        tool("cp", "-a", f"{mounted.path}/.", copy, code=None)
        assert sorted(os.listdir(copy)) == ["s-0", "s-1"]
        assert os.listxattr(hidden / "metrics") == []
        with (hidden / "metrics").open("rb") as opened:
            before = opened.read(100)
            (mounted.path / "s-0/d0/0-0/txt").read_bytes()
            assert (hidden / "metrics").read_bytes() != before
            opened.seek(0)
            assert opened.read(100) == before, "one text as long as it is open"
        if writable:
            (mounted.path / "new").mkdir()
        for change in (
            *((hidden / "new").touch, (hidden / "x").mkdir, hidden.mkdir, hidden.rmdir),
            lambda: (hidden / "metrics").write_bytes(b"x"),
            lambda: os.rename(mounted.path / "s-0/d0/0-0/txt", hidden / "txt"),
            lambda: os.rename(mounted.path / ("new" if writable else "s-0"), hidden),
        ):
            with fails(errno.EROFS, errno.EACCES, errno.EEXIST, errno.EBUSY):
                change()
        assert not (program.home / "edits/upper/.wdsfs").exists()
        if not writable:
            mounted.expect_log("worker [0-9]+ ended")
            for pid in told["processes"][1:]:
                os.kill(pid, signal.SIGKILL)
            assert json.loads((hidden / "status.json").read_text())["restarts"] > 0
