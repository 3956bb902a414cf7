"""The FUSE adapter with a fake tree and no kernel: what it answers, counts and logs.

Requests are put together and answers taken apart by `wire`, which knows nothing of `wdsfs.fuse.protocol`.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import wire
from wdsfs import errors, log_lines
from wdsfs.errors import (
    CorruptShard,
    EntryError,
    NoSuchAttribute,
    NoSuchEntry,
    StaleShard,
    UnreadableShard,
    WdsfsError,
)
from wdsfs.fuse import read_ops
from wdsfs.fuse.counters import DEADLY, DEADLY_NS, Board
from wdsfs.fuse.protocol import Request
from wdsfs.fuse.read_ops import ReadOperations
from wdsfs.inodes import ROOT
from wdsfs.tree import content
from wdsfs.tree.content import Content
from wdsfs.tree.indexing import ATTEMPTS_MAX, NotIndexed
from wdsfs.tree.set_options import Owner
from wdsfs.tree.tree import Entry, Node, Totals

FILE, DIRECTORY, LINK = stat.S_IFREG | 0o444, stat.S_IFDIR | 0o555, stat.S_IFLNK | 0o777
TIME_NS = 1_500_000_000_000_000_001
FILE_OF: Any = None  # no handler looks at it


class FakeLower:
    def __init__(self) -> None:
        self.indexed: list[int] = []
        self.try_index: Callable[[int], None] = self.indexed.append
        self.tidied = self.distrusted = 0

    def path_text(self, number: int) -> str:
        return f"shard {number}"

    def tidy(self) -> None:
        self.tidied += 1

    def distrust(self) -> None:
        self.distrusted += 1


class FakeTree:
    """Says the same of every inode; `raises` are raised first, one by one, by whatever is asked."""

    merged = False

    def __init__(self) -> None:
        self.lower: Any = FakeLower()
        self.raises: list[Exception] = []
        self.node = Node(7, FILE, 1, 1000, TIME_NS)
        self.entries: list[Entry | Exception] = []
        self.asked: list[tuple[Any, ...]] = []
        self.on_asked: Callable[[], None] = lambda: None
        self.says: dict[str, Callable[..., Any]] = {
            "getattr": lambda inode: self.node._replace(inode=inode),
            "lookup": lambda parent, name: self.node,
            "parent": lambda inode: inode - 1,
            "readlink": lambda inode: b"target",
            "xattrs": lambda inode: [b"user.x", b"user.yy"],
            "getxattr": lambda inode, name: b"value",
            "content": lambda inode: Content(FILE_OF, 512, 1000, None),
            "totals": lambda: Totals(3, 2, 10, 20, 5000, 1),
            "listing": self._entries,
        }

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def answer(*question: Any) -> Any:
            self.asked.append((name, *question))
            self.on_asked()
            if self.raises:
                raise self.raises.pop(0)
            return self.says[name](*question)

        return answer

    def _entries(self, inode: int, after: int) -> Iterator[Entry]:
        for entry in self.entries:
            if isinstance(entry, Exception):
                raise entry
            if entry.cursor > after:
                yield entry

    def run(self, inode: int, after: int, most: int) -> None:
        """Nothing is alike here."""


@pytest.fixture
def tree() -> FakeTree:
    return FakeTree()


@pytest.fixture
def operations(tree: FakeTree, monkeypatch: pytest.MonkeyPatch) -> ReadOperations:
    """Contents can be read, all of them from the page cache."""

    def read_cached(content: Content, offset: int, size: int) -> memoryview:
        return memoryview(bytes(max(min(size, content.size - offset), 0)))

    monkeypatch.setattr(content, "read_cached", read_cached)
    board = Board()
    made = ReadOperations(Owner(12, 34), board)
    made.attach(tree, board.slot(1))  # type: ignore[arg-type]
    return made


REQUESTS: dict[str, bytes] = {
    "lookup": wire.lookup(2, b"name"),
    "lookup of .": wire.lookup(2, b"."),
    "lookup of ..": wire.lookup(2, b".."),
    "getattr": wire.getattr(2),
    "readlink": wire.message("READLINK", 2),
    "statfs": wire.message("STATFS", 1),
    "getxattr": wire.getxattr(2, b"user.x", 100),
    "listxattr": wire.listxattr(2, 100),
    "readdir": wire.read(2, 0, 4096, "READDIR"),
    "readdirplus": wire.read(2, 0, 4096, "READDIRPLUS"),
    "read": wire.read(2, 0, 4096),
}
every_request = pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
FORGETS: dict[str, bytes] = {
    "forget": wire.message("FORGET", 7, wire.FORGET_IN.pack(3)),
    "batch_forget": wire.message(
        "BATCH_FORGET", 0, wire.BATCH_FORGET_IN.pack(2, 0) + 2 * wire.FORGET_ONE.pack((1 << 64) - 1, 1 << 63)
    ),
    "batch_forget of nothing": wire.message("BATCH_FORGET", 0, wire.BATCH_FORGET_IN.pack(0, 0)),
    "interrupt": wire.message("INTERRUPT", 0, wire.INTERRUPT_IN.pack(4)),
}
every_forget = pytest.mark.parametrize("request_", FORGETS.values(), ids=FORGETS)


def answer(operations: ReadOperations, message: bytes) -> object:
    """The reply to a message of the kernel."""
    return operations.answer(Request(memoryview(message)))


def bytes_of(operations: ReadOperations, request: bytes) -> bytes:
    """A reply that is neither an error nor missing."""
    found = answer(operations, request)
    assert isinstance(found, bytes | memoryview), found
    return bytes(found)


def entry_of(operations: ReadOperations, parent: int, name: bytes) -> Any:
    return wire.ENTRY_OUT.whole(bytes_of(operations, wire.lookup(parent, name)))


def attributes_of(operations: ReadOperations, inode: int) -> Any:
    return wire.ATTR_OUT.whole(bytes_of(operations, wire.getattr(inode)))


def all_errors(top: type[WdsfsError] = WdsfsError) -> Iterator[type[WdsfsError]]:
    for one in top.__subclasses__():
        if one.__module__ == errors.__name__:  # what a module keeps for itself has the errno of its base
            yield one
            yield from all_errors(one)


# --- errors ------------------------------------------------------------------------------------------------


@every_request
def test_whatever_goes_wrong_becomes_an_errno(operations: ReadOperations, tree: FakeTree, request_: bytes) -> None:
    """Anything that came out of `answer` would end the worker."""
    surprises = [RuntimeError("boo"), KeyError("k"), MemoryError(), AssertionError(), RecursionError(), EOFError()]
    for surprise in surprises:
        tree.raises = [surprise]
        assert answer(operations, request_) == errno.EIO
    assert operations.board.failures == len(surprises)
    assert operations.slot.busy_seconds == 0
    bytes_of(operations, request_)  # and the next request is answered


ERRNOS = {
    name: number
    for number, names in {
        errno.EIO: (
            "CacheFull CommitError CorruptShard DecodeError EntryError ExecutorUnusable ExportError ImageError "
            "IndexUnusable MissingObject MissingShard MountError NoRanges NotATar ObjectExists "
            "OverlayUnusable ShardError Unreachable UnreadableShard ViewError"
        ),
        errno.EXDEV: "CrossDevice",
        errno.EACCES: "DeniedObject RefusedShard",
        errno.EEXIST: "EntryExists",
        errno.EINTR: "Interrupted",
        errno.EINVAL: "InvalidRequest NoMatch NotInstalled SpecError UsageError",
        errno.EISDIR: "IsADirectory",
        errno.ENAMETOOLONG: "NameTooLong",
        errno.ENODATA: "NoSuchAttribute",
        errno.ENOENT: "NoSuchEntry",
        errno.ENOTDIR: "NotADirectory",
        errno.ENOTEMPTY: "NotEmpty",
        errno.EPERM: "NotPermitted",
        errno.ESTALE: "ObjectChanged StaleEntry StaleMount StaleShard",
        errno.EBUSY: "OverlayBusy",
        errno.EROFS: "ReadOnly",
        errno.ENOTSUP: "Unsupported",
    }.items()
    for name in names.split()
}


@pytest.mark.parametrize("kind", sorted(set(all_errors()), key=str))
def test_each_of_our_errors_has_its_errno(
    operations: ReadOperations, tree: FakeTree, kind: type[WdsfsError]
) -> None:
    tree.raises = [kind("message")]
    assert answer(operations, wire.getattr(1)) == ERRNOS[kind.__name__]
    of_client = issubclass(kind, EntryError | errors.Interrupted)
    assert operations.board.failures == (0 if of_client else 1), "a refusal is none"
    assert tree.lower.distrusted == issubclass(kind, StaleShard), "all shards are looked at again"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.EACCES, None])
def test_the_errno_of_the_system_is_passed_on(
    operations: ReadOperations, tree: FakeTree, number: int | None
) -> None:
    tree.raises = [OSError("no number") if number is None else OSError(number, os.strerror(number))]
    assert answer(operations, wire.read(1, 0, 10)) == (number or errno.EIO)
    assert operations.board.failures == 1


def test_a_shard_is_never_missing_as_an_entry_is() -> None:
    """A tool would take ENOENT for "no such sample" and go on with a smaller set."""
    assert {kind.errno for kind in all_errors(errors.ShardError)} == {errno.EIO, errno.ESTALE, errno.EACCES}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    opcode=st.sampled_from(sorted(wire.OPCODES.values())) | st.integers(0, (1 << 32) - 1),
    node=st.integers(0, (1 << 64) - 1),
    body=st.binary(max_size=100) | st.builds(wire.READ_IN.pack, *[st.integers(0, 1 << 20)] * 7),
)
def test_any_request_is_answered(operations: ReadOperations, opcode: int, node: int, body: bytes) -> None:
    """Cut, too long or made of nothing: it costs itself, nothing else."""
    found = answer(operations, wire.message(opcode, node, body))
    if isinstance(found, int):
        assert found in errno.errorcode
    elif found is None:
        assert opcode in (wire.OPCODES["FORGET"], wire.OPCODES["BATCH_FORGET"], wire.OPCODES["INTERRUPT"])
    else:
        assert isinstance(found, bytes | memoryview)
    assert operations.slot.request is None


# --- opcodes that are not handled, or hardly ----------------------------------------------------------------

HANDLED = {
    *("LOOKUP", "FORGET", "GETATTR", "READLINK", "READ", "STATFS", "GETXATTR", "LISTXATTR", "READDIR"),
    *("RELEASEDIR", "INTERRUPT", "BATCH_FORGET", "READDIRPLUS"),
}


@pytest.mark.parametrize("opcode", [*sorted(wire.OPCODES.keys() - HANDLED), 0, 7, 19, 53, 4096, (1 << 32) - 1])
def test_what_is_not_known_is_enosys(operations: ReadOperations, tree: FakeTree, opcode: str | int) -> None:
    """Which OPEN, OPENDIR, FLUSH and ACCESS take for: it goes well, and need not be asked again."""
    assert answer(operations, wire.message(opcode, 2, bytes(48))) == errno.ENOSYS
    assert tree.asked == []
    assert operations.board.failures == 0
    assert operations.board.counts() == {"other": 1}


def test_in_one_tree_the_kernel_keeps_no_listings(operations: ReadOperations, tree: FakeTree) -> None:
    """There a directory keeps its inode number when a shard changes. It is opened, with no flag."""
    tree.merged = True
    opened = wire.OPEN_OUT.whole(bytes_of(operations, wire.message("OPENDIR", 2, bytes(8))))
    assert opened == (0, 0, 0)
    assert bytes_of(operations, wire.message("RELEASEDIR", 2, bytes(24))) == b""
    assert answer(operations, wire.message("OPEN", 2, bytes(8))) == errno.ENOSYS


@every_forget
def test_what_wants_no_answer_gets_none(operations: ReadOperations, tree: FakeTree, request_: bytes) -> None:
    assert answer(operations, request_) is None
    assert tree.asked == []
    assert operations.board.failures == 0
    assert operations.slot.busy_seconds == 0


def test_a_worker_in_quarantine_refuses_everything(operations: ReadOperations, tree: FakeTree) -> None:
    operations.refuse(operations.board.slot(9))
    for request in (*REQUESTS.values(), wire.message("OPEN", 2, bytes(8)), wire.message("DESTROY", 0)):
        assert answer(operations, request) == errno.EIO
    for request in FORGETS.values():
        assert answer(operations, request) is None
    assert tree.asked == []
    assert tree.lower.tidied == 0
    assert sum(operations.board.counts().values()) == len(REQUESTS) + 2 + len(FORGETS)


# --- requests that workers have died of ---------------------------------------------------------------------


def number_of(operations: ReadOperations, tree: FakeTree, request: bytes) -> int:
    """Return the board's key of a request, as the supervisor finds it after a death."""
    seen: list[int | None] = []
    tree.on_asked = lambda: seen.append(operations.slot.request)
    answer(operations, request)
    tree.on_asked = lambda: None
    assert operations.slot.request is None
    (number,) = set(seen)
    assert number is not None
    return number


def blame(operations: ReadOperations, number: int, times: int = DEADLY) -> None:
    for death in range(times):
        assert operations.board.blame(number) == death + 1


@every_request
def test_a_deadly_request_is_refused_and_no_other(
    operations: ReadOperations, tree: FakeTree, request_: bytes
) -> None:
    blame(operations, number_of(operations, tree, request_))
    tree.asked.clear()
    for _ in range(3):
        assert answer(operations, request_) == errno.EIO
    assert tree.asked == []
    for other in REQUESTS.values():
        if other != request_:
            bytes_of(operations, other)


DIFFERENT = {
    "offset": (wire.read(2, 0, 4096), wire.read(2, 4096, 4096)),
    "size": (wire.read(2, 0, 4096), wire.read(2, 0, 8192)),
    "inode": (wire.read(2, 0, 4096), wire.read(3, 0, 4096)),
    "opcode": (wire.read(2, 0, 4096, "READDIR"), wire.read(2, 0, 4096, "READDIRPLUS")),
    "name": (wire.lookup(2, b"a"), wire.lookup(2, b"b")),
    "end of a long name": (wire.lookup(2, b"x" * 254 + b"a"), wire.lookup(2, b"x" * 254 + b"b")),
}


@pytest.mark.parametrize(("deadly", "other"), DIFFERENT.values(), ids=DIFFERENT)
def test_what_differs_anywhere_is_another_request(
    operations: ReadOperations, tree: FakeTree, deadly: bytes, other: bytes
) -> None:
    """Not under which number: the kernel hands it out as it was, but the next who asks has another one."""
    blame(operations, number_of(operations, tree, deadly))
    assert answer(operations, deadly) == errno.EIO
    assert answer(operations, deadly[:8] + bytes([9] * 8) + deadly[16:]) == errno.EIO
    bytes_of(operations, other)


def test_only_an_answer_to_the_request_itself_clears_it(operations: ReadOperations, tree: FakeTree) -> None:
    """Somebody may have killed the worker: two deaths are no proof. An error is an answer, too."""
    request = wire.getattr(9)
    number = number_of(operations, tree, request)
    for error in ([], [CorruptShard("cut")], []):
        blame(operations, number, DEADLY - 1)
        assert operations.board.watching
        tree.raises = list(error)
        assert (answer(operations, request) == errno.EIO) == bool(error)
        assert not operations.board.watching
    for death in range(DEADLY):
        assert operations.board.blame(number) == death + 1
        bytes_of(operations, wire.getattr(10))
    assert answer(operations, request) == errno.EIO


def test_a_deadly_request_is_tried_again_after_a_while(
    operations: ReadOperations, tree: FakeTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [10**15]
    monkeypatch.setattr(time, "monotonic_ns", lambda: clock[0])
    request = wire.getattr(9)
    number = number_of(operations, tree, request)
    blame(operations, number)
    clock[0] += DEADLY_NS - 1
    assert answer(operations, request) == errno.EIO, "a refusal must not clear it"
    clock[0] += 1
    bytes_of(operations, request)
    assert not operations.board.watching
    assert operations.board.blame(number) == 1


# --- the log -----------------------------------------------------------------------------------------------


def fail(operations: ReadOperations, tree: FakeTree, error: Exception) -> None:
    tree.raises = [error]
    assert isinstance(answer(operations, wire.getattr(1)), int)


def test_the_log_is_not_flooded(
    operations: ReadOperations, tree: FakeTree, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same message comes once, and again after a while; a different one at once. What is noted is bounded."""
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    for _ in range(100):
        fail(operations, tree, CorruptShard("a.tar is cut"))
    fail(operations, tree, CorruptShard("b.tar is cut"))
    assert caplog.messages == ["a.tar is cut", "b.tar is cut"]
    assert operations.board.failures == 101
    clock[0] += log_lines.QUIET_SECONDS
    fail(operations, tree, CorruptShard("a.tar is cut"))
    for number in range(3 * log_lines.QUIET_MAX):
        fail(operations, tree, CorruptShard(f"{number}.tar is cut"))
    assert caplog.messages[2] == "a.tar is cut"
    assert len(caplog.messages) == 3 + 3 * log_lines.QUIET_MAX
    assert len(operations._logged._logged) <= log_lines.QUIET_MAX


def test_a_surprise_is_told_once_with_its_traceback(
    operations: ReadOperations, tree: FakeTree, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(100):
        fail(operations, tree, ZeroDivisionError("surprise"))
    (record,) = caplog.records
    assert (record.levelno, bool(record.exc_info)) == (logging.ERROR, True)
    assert "getattr failed with ZeroDivisionError('surprise')" in record.message


def test_what_is_normal_is_not_logged(
    operations: ReadOperations, tree: FakeTree, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tree.raises = [NoSuchEntry("no"), NoSuchAttribute("no")]
    assert entry_of(operations, 1, b"name").nodeid == 0
    assert answer(operations, wire.getxattr(1, b"user.y", 100)) == errno.ENODATA
    answer(operations, wire.message("SYNCFS", 1))
    assert caplog.messages == []


# --- shards that are not indexed ---------------------------------------------------------------------------


@every_request
def test_what_is_not_indexed_is_indexed_first(operations: ReadOperations, tree: FakeTree, request_: bytes) -> None:
    """Again and again, if need be; then the question is asked anew, with an index that was tidied."""
    tree.raises = [NotIndexed(tree.lower, number) for number in (3, 5, 3)]
    bytes_of(operations, request_)
    assert (tree.lower.indexed, tree.lower.tidied) == ([3, 5, 3], 4)
    assert operations.board.failures == 0
    assert sum(operations.board.counts().values()) == 1


def test_a_shard_that_changes_each_time_it_is_indexed_is_eio(
    operations: ReadOperations, tree: FakeTree, caplog: pytest.LogCaptureFixture
) -> None:
    """A request ends. What is said names the shard, and shards of another set are counted apart."""
    lower = tree.lower
    other: Any = FakeLower()
    changes: list[Exception] = [NotIndexed(lower, 3) for _ in range(ATTEMPTS_MAX)]
    tree.raises = [*changes, *(NotIndexed(other, 3) for _ in range(ATTEMPTS_MAX)), NotIndexed(lower, 3)]
    assert answer(operations, wire.getattr(1)) == errno.EIO
    assert (lower.indexed, other.indexed) == ([3] * ATTEMPTS_MAX, [3] * ATTEMPTS_MAX)
    assert caplog.messages == ["shard 3: changes each time it is indexed; try again when it is finished"]
    tree.raises = changes  # the next request counts anew
    assert attributes_of(operations, 9).ino == 9


def test_one_long_wait_may_lie_inside_of_another(operations: ReadOperations) -> None:
    """To index a shard, one that is compressed may have to be unpacked: after that the work still takes long."""
    with operations.slowly():
        with operations.slowly():
            assert operations.slot.waiting
        assert operations.slot.waiting
    assert not operations.slot.waiting


def test_a_shard_that_cannot_be_indexed_is_eio(operations: ReadOperations, tree: FakeTree) -> None:
    def try_index(number: int) -> None:
        raise UnreadableShard(f"{number}: Permission denied")

    tree.lower.try_index = try_index
    tree.raises = [NotIndexed(tree.lower, 3)]
    assert answer(operations, wire.getattr(1)) == errno.EIO
    assert not operations.slot.waiting


# --- attributes and names ----------------------------------------------------------------------------------


def test_attributes(operations: ReadOperations) -> None:
    found = attributes_of(operations, 9)
    assert (found.ino, found.mode, found.nlink) == (9, FILE, 1)
    assert (found.uid, found.gid, found.blksize, found.rdev, found.flags) == (12, 34, 128 << 10, 0, 0)
    assert found.mtime == found.atime == found.ctime == 1_500_000_000
    assert found.mtimensec == found.atimensec == found.ctimensec == 1
    assert (found.attr_valid, found.attr_valid_nsec) == (read_ops.TIMEOUT_SECONDS, 0)
    operations.owner = Owner(1, 2, 0o027)
    assert attributes_of(operations, 9).mode == stat.S_IFREG | 0o440


@pytest.mark.parametrize("name", [b"name", b"\xff\xfe", "Ä".encode(), b"a b\n", b"...", b"x" * 255])
def test_a_name_that_is_found(operations: ReadOperations, tree: FakeTree, name: bytes) -> None:
    """Names are bytes."""
    found = entry_of(operations, 99, name)
    assert tree.asked == [("lookup", 99, name)]
    assert (found.nodeid, found.generation, found.ino, found.mode, found.size) == (7, 0, 7, FILE, 1000)
    assert (found.entry_valid, found.attr_valid) == (read_ops.TIMEOUT_SECONDS, read_ops.TIMEOUT_SECONDS)
    assert (found.entry_valid_nsec, found.attr_valid_nsec) == (0, 0)


@pytest.mark.parametrize(
    ("mtime_ns", "seconds", "ns"), [(0, 0, 0), (-1, -1, 999_999_999), (-(1 << 31) * 10**9, -(1 << 31), 0)]
)
@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, (1 << 63) - 1])
def test_sizes_and_times_before_1970(
    operations: ReadOperations, tree: FakeTree, mtime_ns: int, seconds: int, ns: int, size: int
) -> None:
    tree.node = tree.node._replace(mtime_ns=mtime_ns, size=size)
    found = attributes_of(operations, 9)
    assert found.mtime == found.ctime == seconds % (1 << 64)  # the kernel takes them for signed
    assert (found.mtimensec, found.size, found.blocks) == (ns, size, -(-size // 512))


def test_the_mount_point_is_asked_for_again(operations: ReadOperations) -> None:
    """Else it would be there, to all appearances, when the mount is dead."""
    assert attributes_of(operations, ROOT).attr_valid <= 1
    assert entry_of(operations, ROOT, b".").attr_valid <= 1


@pytest.mark.parametrize("merged", [False, True])
def test_what_a_changed_shard_would_alter_is_asked_for_again(
    operations: ReadOperations, tree: FakeTree, merged: bool
) -> None:
    """All names at the top; in one tree over all shards also absent names, in every directory. Within a second."""
    assert operations.change_seconds == read_ops.CHANGE_SECONDS <= 1
    tree.merged = merged
    operations.change_seconds = 2
    assert entry_of(operations, ROOT, b"name").entry_valid == 2
    assert entry_of(operations, 99, b"name").entry_valid == read_ops.TIMEOUT_SECONDS
    tree.raises = [NoSuchEntry("no")]
    assert entry_of(operations, ROOT, b"name").entry_valid == 2
    tree.raises = [NoSuchEntry("no")]
    found = entry_of(operations, 99, b"name")
    assert (found.nodeid, found.entry_valid) == (0, 2 if merged else read_ops.TIMEOUT_SECONDS)
    assert operations.board.failures == 0


def test_names_that_are_too_long(operations: ReadOperations, tree: FakeTree) -> None:
    """The kernel passes on up to 1,024 bytes."""
    for length in (256, 1024):
        assert answer(operations, wire.lookup(1, b"x" * length)) == errno.ENAMETOOLONG
    assert tree.asked == []
    assert operations.board.failures == 0


def test_dot_and_dot_dot(operations: ReadOperations) -> None:
    """Asked by a server of NFS."""
    assert entry_of(operations, 5, b".").nodeid == 5
    assert entry_of(operations, 5, b"..").nodeid == 4


def test_statfs(operations: ReadOperations) -> None:
    found = wire.KSTATFS.whole(bytes_of(operations, wire.message("STATFS", 1)))
    assert (found.blocks * found.frsize, found.files, found.namelen) == (5120, 20, 255)
    assert (found.bfree, found.bavail, found.ffree, found.padding) == (0, 0, 0, 0)
    assert found.bsize == 128 << 10
    assert set(found[-6:]) == {0}


# --- extended attributes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "value"),
    [
        pytest.param(lambda room: wire.getxattr(2, b"user.\xff", room), b"value", id="getxattr"),
        pytest.param(lambda room: wire.listxattr(2, room), b"user.x\0user.yy\0", id="listxattr"),
        pytest.param(lambda room: wire.getxattr(2, b"user.\xff", room), b"", id="empty"),
    ],
)
def test_room_for_an_attribute(
    operations: ReadOperations, tree: FakeTree, ask: Callable[[int], bytes], value: bytes
) -> None:
    """None is the question how much is needed."""
    tree.says["getxattr"] = lambda inode, name: value if (inode, name) == (2, b"user.\xff") else None
    assert wire.GETXATTR_OUT.whole(bytes_of(operations, ask(0))) == (len(value), 0)
    for room in range(1, len(value)):
        assert answer(operations, ask(room)) == errno.ERANGE
    for room in (len(value) or 1, 65536):
        assert bytes_of(operations, ask(room)) == value
    assert operations.board.failures == 0


# --- listings ----------------------------------------------------------------------------------------------

LISTINGS = ["READDIR", "READDIRPLUS"]
ROOM_MIN = 152 + 256  # for the longest line of all


def entries(count: int) -> list[Entry | Exception]:
    """With names of all lengths up to 255 bytes."""
    return [
        Entry(
            b"%d" % n + b"x" * (n * 7 % 250),
            Node(100 + n, (FILE, DIRECTORY, LINK)[n % 3], 1, n, TIME_NS),
            10 * n + 1,
        )
        for n in range(count)
    ]


def pages(operations: ReadOperations, opcode: str, room: int) -> list[list[wire.Line]]:
    """A directory as the kernel lists it; an answer without a line is the end."""
    found: list[list[wire.Line]] = []
    after = 0
    while True:
        listing = bytes_of(operations, wire.read(2, after, room, opcode))
        assert len(listing) <= room
        page = wire.lines(listing, plus=opcode == "READDIRPLUS")
        if not page:
            return found
        found.append(page)
        after = page[-1].cursor


@pytest.mark.parametrize("opcode", LISTINGS)
@pytest.mark.parametrize("room", [ROOM_MIN, 1000, 4096, 1 << 20])
def test_a_listing_goes_on_where_the_room_ended(
    operations: ReadOperations, tree: FakeTree, opcode: str, room: int
) -> None:
    assert pages(operations, opcode, room) == []
    tree.entries = entries(100)
    found = pages(operations, opcode, room)
    assert [(line.name, line.inode, line.cursor, line.type << 12) for page in found for line in page] == [
        (entry.name, entry.node.inode, entry.cursor, stat.S_IFMT(entry.node.mode))
        for entry in tree.entries
        if isinstance(entry, Entry)
    ]
    size = 24 + (128 if opcode == "READDIRPLUS" else 0) + 256
    assert all(sum(_length(line) for line in page) > room - size for page in found[:-1]), "room was left"


def _length(line: wire.Line) -> int:
    return 24 + (len(line.name) + 7) // 8 * 8 + (128 if line.entry else 0)


def test_a_listing_with_attributes_is_a_lookup_of_each(operations: ReadOperations, tree: FakeTree) -> None:
    tree.entries = entries(6)
    operations.change_seconds = 2
    listing = bytes_of(operations, wire.read(2, 0, 4096, "READDIRPLUS"))
    for line, entry in zip(wire.lines(listing, plus=True), tree.entries, strict=True):
        assert isinstance(entry, Entry)
        tree.node = entry.node
        assert line.entry == entry_of(operations, 99, entry.name)
    (first, *_) = wire.lines(bytes_of(operations, wire.read(ROOT, 0, 4096, "READDIRPLUS")), plus=True)
    assert (first.entry.entry_valid, first.entry.attr_valid) == (2, read_ops.TIMEOUT_SECONDS)


@pytest.mark.parametrize("opcode", LISTINGS)
@pytest.mark.parametrize("error", [None, StaleShard("changed"), RuntimeError("surprise")])
def test_an_error_inside_a_listing(
    operations: ReadOperations, tree: FakeTree, opcode: str, error: Exception | None
) -> None:
    """Entries listed so far are sent, once; the next request gets the error.

    None stands for a shard that is not indexed.
    """
    if error is None:
        error = NotIndexed(tree.lower, 3)
    plus = opcode == "READDIRPLUS"
    tree.entries = [*entries(2), error]
    found = wire.lines(bytes_of(operations, wire.read(2, 0, 4096, opcode)), plus)
    assert [(line.name, line.cursor) for line in found] == [(b"0", 1), (b"1" + b"x" * 7, 11)]
    assert operations.board.failures == 0
    rest = wire.read(2, 11, 4096, opcode)
    if isinstance(error, NotIndexed):
        tree.lower.try_index = lambda number: tree.entries.__setitem__(slice(None), entries(3))
        (line,) = wire.lines(bytes_of(operations, rest), plus)
        assert line.cursor == 21
    else:
        assert answer(operations, rest) == (errno.ESTALE if isinstance(error, StaleShard) else errno.EIO)


# --- files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("offset", "size", "expected"), [(0, 4096, 1000), (100, 50, 50), (990, 50, 10)])
def test_a_read_from_the_page_cache(
    operations: ReadOperations, tree: FakeTree, offset: int, size: int, expected: int
) -> None:
    operations._crowded = lambda: pytest.fail("nobody has to wait for this")
    assert bytes_of(operations, wire.read(7, offset, size)) == bytes(expected)
    assert tree.asked == [("content", 7)]
    assert operations.board.bytes_read == expected


def test_a_read_from_a_disk_lets_others_serve(operations: ReadOperations, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[tuple[bool, int, int]] = []

    def read(content: Content, offset: int, length: int) -> bytes:
        waited.append((operations.slot.waiting, offset, length))
        return b"x" * length

    monkeypatch.setattr(content, "read_cached", lambda *_: None)
    monkeypatch.setattr(content, "read", read)
    called: list[bool] = []
    operations._crowded = lambda: called.append(operations.slot.waiting)
    assert bytes_of(operations, wire.read(7, 20, 10)) == b"x" * 10
    assert waited == [(True, 20, 10)]
    assert called == [True]
    assert not operations.slot.waiting
    assert operations.board.bytes_read == 10


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_remote_read_from_the_disk_is_not_handed_over(
    tree: FakeTree, operations: ReadOperations, monkeypatch: pytest.MonkeyPatch, is_cached: bool
) -> None:
    """The worker waits for the disk, as with a local shard; the fetcher has other things to do."""
    handed: list[tuple[int, int]] = []
    tar = SimpleNamespace(
        counted_as="store",
        is_cached=lambda begin, end: is_cached,
        hand_over=lambda unique, begin, end, sample: handed.append((begin, end)),
    )
    wanted = Content(SimpleNamespace(remote=tar), 512, 100, None)  # type: ignore[arg-type]
    board = Board(["store"])
    remote = ReadOperations(Owner(12, 34), board)
    remote.attach(tree, board.slot(1))  # type: ignore[arg-type]
    remote.fetcher = SimpleNamespace()
    tree.says["content"] = lambda inode: wanted
    monkeypatch.setattr(content, "read_cached", lambda *_: None)
    monkeypatch.setattr(content, "read", lambda wanted, offset, length: b"x" * length)
    assert answer(remote, wire.read(7, 20, 10)) == (b"x" * 10 if is_cached else None)
    assert handed == ([] if is_cached else [(532, 542)])
    assert board.hits["store"] == ((1, 10) if is_cached else (0, 0))


def test_a_read_that_fails(operations: ReadOperations, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(content, "read_cached", lambda *_: None)
    monkeypatch.setattr(content, "read", fails)
    assert answer(operations, wire.read(7, 0, 10)) == errno.EMFILE
    assert not operations.slot.waiting
    assert (operations.board.failures, operations.board.bytes_read) == (1, 0)


# --- counters ----------------------------------------------------------------------------------------------


@every_request
def test_each_kind_of_request_is_counted(operations: ReadOperations, request_: bytes) -> None:
    (name,) = (name for name, one in REQUESTS.items() if one is request_)
    for _ in range(3):
        answer(operations, request_)
    assert operations.board.counts() == {name.split()[0].removesuffix("plus"): 3}
    assert (operations.board.done, operations.board.failures) == (3, 0)
    assert operations.slot.busy_seconds == 0
    assert operations.board.waiting == 0


def test_what_has_no_counter_of_its_own(operations: ReadOperations, tree: FakeTree) -> None:
    for request in FORGETS.values():
        answer(operations, request)
    tree.merged = True
    answer(operations, wire.message("OPENDIR", 2, bytes(8)))
    answer(operations, wire.message("RELEASEDIR", 2, bytes(24)))
    answer(operations, wire.message("SYNCFS", 1))
    assert operations.board.counts() == {"forget": 3, "other": 4}
