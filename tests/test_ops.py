"""The FUSE adapter with a fake tree and no kernel: what it answers, counts and logs."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyfuse3
import pytest
from pyfuse3 import FUSEError

from wdsfs import errors, lower, ops
from wdsfs.board import Board
from wdsfs.errors import CorruptShard, NoSuchAttribute, NoSuchEntry, StaleShard, UnreadableShard, WdsfsError
from wdsfs.inodes import ROOT
from wdsfs.lower import Content, NotIndexed
from wdsfs.ops import Operations, Owner
from wdsfs.tree import Entry, Node, Totals

FILE, DIRECTORY = stat.S_IFREG | 0o444, stat.S_IFDIR | 0o555
CONTEXT: Any = None  # the handlers do not look at it
TOKEN: Any = object()


@dataclass
class FakeLower:
    indexed: list[int] = field(default_factory=list)
    tidied: int = 0
    distrusted: int = 0
    index_now: Callable[[int], None] = lambda number: None

    def __post_init__(self) -> None:
        self.index_now = self.indexed.append

    def tidy(self) -> None:
        self.tidied += 1

    def distrust(self) -> None:
        self.distrusted += 1


class FakeTree:
    """Says the same of every inode; `raises` are raised first, one by one, by whatever is asked."""

    merged = False

    def __init__(self) -> None:
        self.lower = FakeLower()
        self.raises: list[Exception] = []
        self.node = Node(7, FILE, 1, 1000, 1_500_000_000_000_000_001)
        self.entries: list[Entry | Exception] = []
        self.asked: list[tuple[Any, ...]] = []
        self.size = 1000

    def _say(self, *question: Any) -> None:
        self.asked.append(question)
        if self.raises:
            raise self.raises.pop(0)

    def getattr(self, inode: int) -> Node:
        self._say("getattr", inode)
        return self.node._replace(inode=inode)

    def lookup(self, parent: int, name: bytes) -> Node:
        self._say("lookup", parent, name)
        return self.node

    def parent(self, inode: int) -> int:
        self._say("parent", inode)
        return inode - 1

    def readlink(self, inode: int) -> bytes:
        self._say("readlink", inode)
        return b"target"

    def xattrs(self, inode: int) -> list[bytes]:
        self._say("xattrs", inode)
        return [b"user.x"]

    def getxattr(self, inode: int, name: bytes) -> bytes:
        self._say("getxattr", inode, name)
        return b"value"

    def open_directory(self, inode: int) -> None:
        self._say("open_directory", inode)

    def listing(self, inode: int, after: int) -> Iterator[Entry]:
        self._say("listing", inode, after)
        for entry in self.entries:
            if isinstance(entry, Exception):
                raise entry
            if entry.cursor > after:
                yield entry

    def content(self, inode: int) -> Content:
        self._say("content", inode)
        return Content(-1, b"/a.tar", (1, 2, 3), 512, self.size, None)

    def totals(self) -> Totals:
        self._say("totals")
        return Totals(3, 2, 10, 20, 5000, 1)


@pytest.fixture
def tree() -> FakeTree:
    return FakeTree()


@pytest.fixture
def operations(tree: FakeTree, monkeypatch: pytest.MonkeyPatch) -> Operations:
    """Contents can be read, all of them from the page cache, and nothing is pushed anywhere."""
    monkeypatch.setattr(
        lower, "read_cached", lambda content, offset, size: bytes(min(size, content.size - offset))
    )
    monkeypatch.setattr(lower, "check_unchanged", lambda content: None)
    monkeypatch.setattr(pyfuse3, "notify_store", lambda inode, offset, data: None)
    board = Board()
    made = Operations(Owner(12, 34), board)
    made.attach(tree, board.slot(1))  # type: ignore[arg-type]
    return made


HANDLERS: dict[str, Callable[[Operations], Any]] = {
    "lookup": lambda o: o.lookup(1, b"name", CONTEXT),
    "lookup of .": lambda o: o.lookup(1, b".", CONTEXT),
    "lookup of ..": lambda o: o.lookup(1, b"..", CONTEXT),
    "getattr": lambda o: o.getattr(1, CONTEXT),
    "readlink": lambda o: o.readlink(1, CONTEXT),
    "statfs": lambda o: o.statfs(CONTEXT),
    "getxattr": lambda o: o.getxattr(1, b"user.x", CONTEXT),
    "listxattr": lambda o: o.listxattr(1, CONTEXT),
    "opendir": lambda o: o.opendir(1, CONTEXT),
    "readdir": lambda o: o.readdir(1, 0, TOKEN),
    "open": lambda o: o.open(1, os.O_RDONLY, CONTEXT),
    "read": lambda o: o.read(1, 0, 4096),
}
every_handler = pytest.mark.parametrize("handler", HANDLERS.values(), ids=HANDLERS)


def all_errors(top: type[WdsfsError] = WdsfsError) -> Iterator[type[WdsfsError]]:
    for one in top.__subclasses__():
        yield one
        yield from all_errors(one)


# --- errors ------------------------------------------------------------------------------------------------


@every_handler
async def test_whatever_goes_wrong_becomes_an_errno(
    operations: Operations, tree: FakeTree, handler: Callable[[Operations], Any]
) -> None:
    """Anything but FUSEError would end the worker."""
    surprises = [RuntimeError("boo"), KeyError("k"), MemoryError(), AssertionError(), RecursionError(), EOFError()]
    for surprise in surprises:
        tree.raises = [surprise]
        with pytest.raises(FUSEError, check=lambda error: error.errno == errno.EIO):
            await handler(operations)
    assert operations.board.failures == len(surprises)
    await handler(operations)  # and the next request is answered


@pytest.mark.parametrize("kind", sorted(set(all_errors()), key=lambda kind: kind.__name__))
async def test_each_of_our_errors_has_its_errno(
    operations: Operations, tree: FakeTree, kind: type[WdsfsError]
) -> None:
    tree.raises = [kind("message")]
    with pytest.raises(FUSEError, check=lambda error: error.errno == kind.errno):
        await operations.getattr(1, CONTEXT)
    assert operations.board.failures == (0 if kind in (NoSuchEntry, NoSuchAttribute) else 1)


@pytest.mark.parametrize(("given", "expected"), [(errno.ENOSPC, errno.ENOSPC), (errno.EMFILE, errno.EMFILE)])
async def test_the_errno_of_the_system_is_passed_on(
    operations: Operations, tree: FakeTree, given: int, expected: int
) -> None:
    tree.raises = [OSError(given, os.strerror(given))]
    with pytest.raises(FUSEError, check=lambda error: error.errno == expected):
        await operations.read(1, 0, 10)


async def test_an_error_of_the_system_without_number_is_eio(operations: Operations, tree: FakeTree) -> None:
    tree.raises = [OSError("no number")]
    with pytest.raises(FUSEError, check=lambda error: error.errno == errno.EIO):
        await operations.read(1, 0, 10)


def test_a_shard_is_never_missing_as_an_entry_is() -> None:
    """A tool would take ENOENT for "no such sample" and go on with a smaller set."""
    assert {kind.errno for kind in all_errors(errors.ShardError)} == {errno.EIO, errno.ESTALE}


async def test_what_is_said_to_the_kernel_goes_through(operations: Operations, tree: FakeTree) -> None:
    tree.raises = [FUSEError(errno.EBUSY)]
    with pytest.raises(FUSEError, check=lambda error: error.errno == errno.EBUSY):
        await operations.getattr(1, CONTEXT)


async def test_a_worker_in_quarantine_refuses_everything(operations: Operations, tree: FakeTree) -> None:
    operations.refuse(operations.slot)
    for handler in HANDLERS.values():
        with pytest.raises(FUSEError, check=lambda error: error.errno == errno.EIO):
            await handler(operations)
    await operations.forget([(7, 1)])
    assert tree.asked == []


# --- the log -----------------------------------------------------------------------------------------------


async def fail(operations: Operations, tree: FakeTree, error: Exception) -> None:
    tree.raises = [error]
    with pytest.raises(FUSEError):
        await operations.getattr(1, CONTEXT)


async def test_the_log_is_not_flooded(
    operations: Operations, tree: FakeTree, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same message comes once, and again after a while; a different one at once."""
    clock = [1000.0]
    monkeypatch.setattr(ops.time, "monotonic", lambda: clock[0])
    for _ in range(100):
        await fail(operations, tree, CorruptShard("a.tar is cut"))
    await fail(operations, tree, CorruptShard("b.tar is cut"))
    assert caplog.messages == ["a.tar is cut", "b.tar is cut"]
    assert operations.board.failures == 101
    clock[0] += ops.QUIET_SECONDS
    await fail(operations, tree, CorruptShard("a.tar is cut"))
    assert caplog.messages[2:] == ["a.tar is cut"]


async def test_a_surprise_is_told_once_with_its_traceback(
    operations: Operations, tree: FakeTree, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(100):
        await fail(operations, tree, ZeroDivisionError("surprise"))
    (record,) = caplog.records
    assert (record.levelno, bool(record.exc_info)) == (logging.ERROR, True)
    assert "getattr" in record.message
    assert "surprise" in record.message


async def test_what_is_remembered_of_messages_is_bounded(
    operations: Operations, tree: FakeTree, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3 * ops.QUIET_MAX):
        await fail(operations, tree, CorruptShard(f"{number}.tar is cut"))
    assert len(operations._said) <= ops.QUIET_MAX
    assert len(caplog.messages) == 3 * ops.QUIET_MAX


async def test_what_is_normal_is_not_logged(
    operations: Operations, tree: FakeTree, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tree.raises = [NoSuchEntry("no"), NoSuchAttribute("no")]
    await operations.lookup(1, b"name", CONTEXT)
    with pytest.raises(FUSEError, check=lambda error: error.errno == errno.ENODATA):
        await operations.getxattr(1, b"user.y", CONTEXT)
    assert caplog.messages == []


# --- shards that are not indexed ---------------------------------------------------------------------------


@every_handler
async def test_what_is_not_indexed_is_indexed_first(
    operations: Operations, tree: FakeTree, handler: Callable[[Operations], Any]
) -> None:
    """Again and again, if need be; then the question is asked anew, with an index that was tidied."""
    called: list[bool] = []
    operations._crowded = lambda: called.append(operations.slot.waiting)
    tree.raises = [NotIndexed(3), NotIndexed(5), NotIndexed(3)]
    await handler(operations)
    assert tree.lower.indexed == [3, 5, 3]
    assert tree.lower.tidied == 4
    assert set(called) == {True}, "others must serve meanwhile"
    assert len(called) >= 3
    assert not operations.slot.waiting
    assert operations.board.failures == 0


async def test_a_shard_that_cannot_be_indexed_is_eio(operations: Operations, tree: FakeTree) -> None:
    def index_now(number: int) -> None:
        raise UnreadableShard(f"{number}: Permission denied")

    tree.lower.index_now = index_now
    tree.raises = [NotIndexed(3)]
    with pytest.raises(FUSEError, check=lambda error: error.errno == errno.EIO):
        await operations.getattr(1, CONTEXT)
    assert not operations.slot.waiting


# --- attributes and names ----------------------------------------------------------------------------------


async def test_attributes(operations: Operations, tree: FakeTree) -> None:
    found = await operations.getattr(9, CONTEXT)
    assert (found.st_ino, found.st_mode, found.st_nlink, found.st_size, found.st_blocks) == (9, FILE, 1, 1000, 2)
    assert (found.st_uid, found.st_gid, found.st_blksize) == (12, 34, 128 << 10)
    assert found.st_mtime_ns == found.st_atime_ns == found.st_ctime_ns == 1_500_000_000_000_000_001
    assert found.attr_timeout == found.entry_timeout == ops.TIMEOUT_SECONDS
    operations.owner = Owner(1, 2, 0o027)
    assert (await operations.getattr(9, CONTEXT)).st_mode == stat.S_IFREG | 0o440


async def test_the_mount_point_is_asked_for_again(operations: Operations) -> None:
    """Else it would be there, to all appearances, when the mount is dead."""
    assert (await operations.getattr(ROOT, CONTEXT)).attr_timeout <= 1
    assert (await operations.lookup(ROOT, b".", CONTEXT)).attr_timeout <= 1


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, (1 << 63) - 1])
async def test_blocks_are_those_of_the_size(operations: Operations, tree: FakeTree, size: int) -> None:
    tree.node = tree.node._replace(size=size)
    found = await operations.getattr(9, CONTEXT)
    assert (found.st_size, found.st_blocks) == (size, -(-size // 512))


async def test_a_missing_name_is_remembered_by_the_kernel(operations: Operations, tree: FakeTree) -> None:
    tree.raises = [NoSuchEntry("no")]
    found = await operations.lookup(99, b"name", CONTEXT)
    assert (found.st_ino, found.entry_timeout) == (0, ops.TIMEOUT_SECONDS)


async def test_what_a_changed_shard_would_alter_is_asked_for_again(operations: Operations, tree: FakeTree) -> None:
    """The directory of a shard, below which a change alters everything; in a merged tree only absent names."""
    assert (await operations.lookup(ROOT, b"name", CONTEXT)).entry_timeout == ops.CHANGE_SECONDS
    assert (await operations.lookup(99, b"name", CONTEXT)).entry_timeout == ops.TIMEOUT_SECONDS
    tree.merged = True
    assert (await operations.lookup(ROOT, b"name", CONTEXT)).entry_timeout == ops.TIMEOUT_SECONDS
    tree.raises = [NoSuchEntry("no")]
    assert (await operations.lookup(99, b"name", CONTEXT)).entry_timeout == ops.CHANGE_SECONDS


async def test_something_stale_makes_all_look_again(operations: Operations, tree: FakeTree) -> None:
    tree.raises = [StaleShard("changed")]
    with pytest.raises(FUSEError, check=lambda error: error.errno == errno.ESTALE):
        await operations.getattr(99, CONTEXT)
    assert tree.lower.distrusted == 1


async def test_names_that_are_too_long(operations: Operations, tree: FakeTree) -> None:
    await operations.lookup(1, b"x" * 255, CONTEXT)
    with pytest.raises(FUSEError, check=lambda error: error.errno == errno.ENAMETOOLONG):
        await operations.lookup(1, b"x" * 256, CONTEXT)


async def test_dot_and_dot_dot(operations: Operations, tree: FakeTree) -> None:
    assert (await operations.lookup(5, b".", CONTEXT)).st_ino == 5
    assert (await operations.lookup(5, b"..", CONTEXT)).st_ino == 4


async def test_statfs(operations: Operations) -> None:
    found = await operations.statfs(CONTEXT)
    assert (found.f_blocks * found.f_frsize, found.f_files, found.f_namemax) == (5120, 20, 255)
    assert found.f_bfree == found.f_bavail == found.f_ffree == found.f_favail == 0


# --- listings ----------------------------------------------------------------------------------------------


@pytest.fixture
def replies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, int, int]]:
    """What readdir has put into the kernel's buffer; each takes four."""
    given: list[tuple[bytes, int, int]] = []

    def readdir_reply(token: object, name: bytes, entry: pyfuse3.EntryAttributes, cursor: int) -> bool:
        assert token is TOKEN
        if len(given) == 4:
            return False
        given.append((name, entry.st_ino, cursor))
        return True

    monkeypatch.setattr(pyfuse3, "readdir_reply", readdir_reply)
    return given


def entries(count: int) -> list[Entry | Exception]:
    return [Entry(b"%d" % n, Node(100 + n, DIRECTORY, 2, 0, 0), 10 * n + 1) for n in range(count)]


async def test_a_listing_goes_on_where_the_buffer_was_full(
    operations: Operations, tree: FakeTree, replies: list[tuple[bytes, int, int]]
) -> None:
    tree.entries = entries(10)
    found, after = [], 0
    while True:
        await operations.readdir(1, after, TOKEN)
        if not replies:
            break
        found += replies
        after = replies[-1][2]
        replies.clear()
    assert found == [(b"%d" % n, 100 + n, 10 * n + 1) for n in range(10)]


@pytest.mark.parametrize("error", [NotIndexed(3), StaleShard("changed"), RuntimeError("surprise")])
async def test_an_error_inside_a_listing(
    operations: Operations, tree: FakeTree, replies: list[tuple[bytes, int, int]], error: Exception
) -> None:
    """What is in the buffer is sent, once; the call behind it meets the error."""
    tree.entries = [*entries(2), error]
    await operations.readdir(1, 0, TOKEN)
    assert [name for name, _, _ in replies] == [b"0", b"1"]
    assert operations.board.failures == 0
    replies.clear()
    if isinstance(error, NotIndexed):
        tree.lower.index_now = lambda number: tree.entries.__setitem__(slice(None), entries(3))
        await operations.readdir(1, 11, TOKEN)
        assert [name for name, _, _ in replies] == [b"2"]
    else:
        with pytest.raises(FUSEError):
            await operations.readdir(1, 11, TOKEN)
        assert replies == []


# --- files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND, os.O_RDWR | os.O_CREAT])
async def test_a_file_cannot_be_opened_to_write(operations: Operations, tree: FakeTree, flags: int) -> None:
    with pytest.raises(FUSEError, check=lambda error: error.errno == errno.EROFS):
        await operations.open(7, flags, CONTEXT)
    assert tree.asked == []


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch, operations: Operations) -> list[tuple[int, bytes]]:
    stored: list[tuple[int, bytes]] = []
    monkeypatch.setattr(pyfuse3, "notify_store", lambda inode, offset, data: stored.append((inode, data)))
    return stored


async def test_a_small_file_is_pushed_once(operations: Operations, pushed: list[tuple[int, bytes]]) -> None:
    """Until the kernel has forgotten it; what it then reads again may have left the page cache."""
    opened = await operations.open(7, os.O_RDONLY, CONTEXT)
    assert opened.fh == 7
    assert opened.keep_cache
    await operations.open(7, os.O_RDONLY, CONTEXT)
    assert pushed == [(7, bytes(1000))]
    await operations.forget([(8, 1), (7, 3)])
    await operations.open(7, os.O_RDONLY | os.O_NOATIME, CONTEXT)
    assert len(pushed) == 2
    assert (operations.board.pushed, operations.board.bytes_pushed) == (2, 2000)


@pytest.mark.parametrize("size", [0, ops.PUSH_BYTES + 1])
async def test_empty_and_large_files_are_not_pushed(
    operations: Operations, tree: FakeTree, pushed: list[tuple[int, bytes]], size: int
) -> None:
    tree.size = size
    await operations.open(7, os.O_RDONLY, CONTEXT)
    assert pushed == []


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (CorruptShard("cut"), None),
        (OSError(errno.ENOENT, "the kernel has forgotten it"), None),
        (StaleShard("changed"), errno.ESTALE),
        (UnreadableShard("gone"), None),
    ],
)
async def test_a_push_that_fails(
    operations: Operations, monkeypatch: pytest.MonkeyPatch, error: Exception, expected: int | None
) -> None:
    """What is cut can be opened, and read as far as it goes; what has changed cannot."""

    def read_cached(*_: object) -> bytes:
        raise error

    monkeypatch.setattr(lower, "read_cached", read_cached)
    if expected is None:
        assert (await operations.open(7, os.O_RDONLY, CONTEXT)).fh == 7
    else:
        with pytest.raises(FUSEError, check=lambda found: found.errno == expected):
            await operations.open(7, os.O_RDONLY, CONTEXT)
    assert operations.board.pushed == 0


async def test_a_file_that_is_not_pushed_is_checked(
    operations: Operations, tree: FakeTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may answer all its reads from the page cache: this is the last time to notice a change."""

    def check_unchanged(content: Content) -> None:
        raise StaleShard("changed")

    monkeypatch.setattr(lower, "check_unchanged", check_unchanged)
    tree.size = 1 << 30
    with pytest.raises(FUSEError, check=lambda error: error.errno == errno.ESTALE):
        await operations.open(7, os.O_RDONLY, CONTEXT)


async def test_a_read_from_a_disk_lets_others_serve(
    operations: Operations, tree: FakeTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[bool] = []

    def read(content: Content, offset: int, length: int) -> bytes:
        waited.append(operations.slot.waiting)
        return b"x" * length

    assert await operations.read(7, 100, 50) == bytes(50)
    monkeypatch.setattr(lower, "read_cached", lambda *_: None)
    monkeypatch.setattr(lower, "read", read)
    assert await operations.read(7, 0, 10) == b"x" * 10
    assert waited == [True]
    assert not operations.slot.waiting
    assert operations.board.bytes_read == 60


async def test_forget_never_raises(operations: Operations) -> None:
    await operations.forget([])
    await operations.forget([(0, 0), (1, 1), ((1 << 64) - 1, (1 << 64) - 1)])


async def test_requests_are_counted(operations: Operations) -> None:
    for _ in range(3):
        await operations.getattr(1, CONTEXT)
    await operations.release(7)
    await operations.releasedir(7)
    await operations.forget([(7, 1)])
    assert operations.board.counts() == {"getattr": 3, "release": 1, "releasedir": 1, "forget": 1}
    assert operations.slot.busy_seconds == 0
