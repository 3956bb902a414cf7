"""The FUSE wire format: against byte strings written down here, and against `wire`, which was written by itself.

The byte strings are what a little-endian machine sees of include/uapi/linux/fuse.h.
"""

from __future__ import annotations

import stat

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import wire
from wdsfs.fuse import protocol
from wdsfs.fuse.protocol import Attributes, Kernel, Request
from wdsfs.tree.tree import AT_PARENT, AT_SELF, ListingRun

NUMBER = st.integers(0, (1 << 64) - 1)
SMALL = st.integers(0, (1 << 32) - 1)
NAME = st.binary(min_size=1, max_size=255).filter(lambda name: b"/" not in name and b"\0" not in name)

# Every field another number, so that none can be taken for its neighbour.
SOME: Attributes = (7, 1000, 2, 11, 12, -2, 21, 22, 23, stat.S_IFREG | 0o444, 1, 12, 34, 0, 4096, 0)
SOME_BYTES = bytes.fromhex(
    "0700000000000000 e803000000000000 0200000000000000"  # ino, size, blocks
    "0b00000000000000 0c00000000000000 feffffffffffffff"  # atime, mtime, ctime
    "15000000 16000000 17000000"  # and their nanoseconds
    "24810000 01000000 0c000000 22000000"  # mode, nlink, uid, gid
    "00000000 00100000 00000000"  # rdev, blksize, flags
)


# --- requests ----------------------------------------------------------------------------------------------


def test_a_request_is_taken_apart() -> None:
    message = bytes.fromhex(
        "2d000000 01000000 efcdab8967452341 0807060504030201"  # length, opcode, unique, nodeid
        "e8030000 e9030000 67120000 0000 0000"  # uid, gid, pid, length of extensions, padding
        "6e616d6500"
    )
    assert protocol.HEADER_SIZE == 40
    request = Request(memoryview(message))
    assert (request.opcode, request.unique, request.node) == (1, 0x4123456789ABCDEF, 0x0102030405060708)
    assert (request.uid, request.gid, request.pid) == (1000, 1001, 0x1267)
    assert not request.is_resent
    assert Request(memoryview(message[:15] + b"\x81" + message[16:])).is_resent
    assert bytes(request.body) == b"name\0"
    assert protocol.name_of(request.body) == b"name"


def test_the_data_of_a_write_are_not_copied() -> None:
    message = bytearray(wire.message("WRITE", 7, wire.WRITE_IN.pack(1, 4096, 4, 0, 0, 0, 0) + b"data"))
    offset, data, _ = protocol.write_of(Request(memoryview(message)).body)
    assert (offset, bytes(data)) == (4096, b"data")
    assert data.obj is message


def test_opcodes_have_the_numbers_of_the_kernel() -> None:
    ours = {name: getattr(protocol, name) for name in wire.OPCODES if hasattr(protocol, name)}
    assert ours.items() <= wire.OPCODES.items()
    assert len(ours) > 30


@given(NUMBER, NUMBER, SMALL, NAME)
def test_what_is_asked_for(handle: int, offset: int, size: int, name: bytes) -> None:
    assert protocol.read_of(memoryview(wire.READ_IN.pack(handle, offset, size, 1, 2, 3, 4))) == (offset, size)
    assert protocol.xattr_of(memoryview(wire.GETXATTR_IN.pack(size, 0) + name + b"\0")) == (size, name)
    assert protocol.xattr_of(memoryview(wire.GETXATTR_IN.pack(size, 0)))[0] == size  # LISTXATTR names none


# --- answers -----------------------------------------------------------------------------------------------


def test_the_head_of_an_answer() -> None:
    assert protocol.header(0x0123456789ABCDEF, 4) == bytes.fromhex("14000000 00000000 efcdab8967452301")
    assert protocol.header(1, 0, 2) == bytes.fromhex("10000000 feffffff 0100000000000000")


def test_what_stat_says() -> None:
    assert protocol.attributes(3600, SOME) == bytes.fromhex("100e000000000000 00000000 00000000") + SOME_BYTES


def test_what_a_lookup_says() -> None:
    head = bytes.fromhex(
        "0700000000000000 0000000000000000"  # nodeid, generation
        "0100000000000000 100e000000000000 00000000 00000000"  # seconds, and their nanoseconds
    )
    assert protocol.entry(1, 3600, SOME) == head + SOME_BYTES
    assert protocol.no_entry(1) == bytes(16) + bytes.fromhex("0100000000000000") + bytes(104)


def test_short_answers() -> None:
    assert protocol.opendir_reply() == bytes(16)
    # FOPEN_KEEP_CACHE, FOPEN_CACHE_DIR
    assert protocol.opendir_reply(caches=True) == bytes(8) + bytes([2 | 8]) + bytes(7)
    assert protocol.size_reply(258) == bytes.fromhex("02010000 00000000")


@given(NUMBER, NUMBER, SMALL, SMALL, SMALL)
def test_a_full_file_system(blocks: int, files: int, block_size: int, fragment: int, name_max: int) -> None:
    found = wire.KSTATFS.whole(protocol.statfs(blocks, files, block_size, fragment, name_max))
    assert found[:9] == (blocks, 0, 0, files, 0, block_size, name_max, fragment, 0)
    assert set(found[9:]) == {0}


# --- lines of a listing ------------------------------------------------------------------------------------


def test_a_line() -> None:
    expected = bytes.fromhex(
        "0700000000000000 2a00000000000000 05000000 08000000"  # ino, off, length of the name, DT_REG
        "612e747874 000000"  # a.txt
    )
    assert protocol.line(b"a.txt", 42, 7, stat.S_IFREG | 0o444) == expected
    assert protocol.line_plus(b"a.txt", 42, 1, 3600, SOME) == protocol.entry(1, 3600, SOME) + expected


def test_a_directory_and_its_parent_are_lines_without_attributes() -> None:
    lines = wire.lines(protocol.self_and_parent(7, 1), plus=True)
    told = [(line.name, line.inode, line.cursor, line.type, line.entry.nodeid) for line in lines]
    assert told == [(b".", 7, AT_SELF, 4, 0), (b"..", 1, AT_PARENT, 4, 0)]


@pytest.mark.parametrize(
    ("name", "node"), [(b".", 0), (b"..", 0), (b"...", 7), (b".x", 7), (b"x.", 7), (b". ", 7), (b"x", 7)]
)
def test_what_the_kernel_would_never_forget_is_no_lookup(name: bytes, node: int) -> None:
    (line,) = wire.lines(protocol.line_plus(name, 1, 0, 0, SOME), plus=True)
    assert (line.entry.nodeid, line.entry.ino, line.inode) == (node, 7, 7)


# --- the start of a session --------------------------------------------------------------------------------

EXT = 1 << 30  # FUSE_INIT_EXT: there are flags above 32 bits


def hello(major: int = 7, minor: int = 38, flags: int = 0, **more: int) -> memoryview:
    values = {"major": major, "minor": minor, "flags": flags & 0xFFFFFFFF, "flags2": flags >> 32}
    return memoryview(wire.INIT_IN.pack(**{**values, "max_readahead": 131072, **more}))


def test_what_the_kernel_says() -> None:
    body = bytes.fromhex("07000000 2d000000 00000200 fbffff73 efbeadde") + bytes(44)
    assert protocol.kernel_of(memoryview(body)) == Kernel(45, 0xDEADBEEF73FFFFFB, 0x20000)


@pytest.mark.parametrize(("major", "minor"), [(7, 30), (7, 0), (6, 99), (8, 0), (0, 0)])
def test_a_protocol_that_is_not_ours(major: int, minor: int) -> None:
    with pytest.raises(ValueError, match=rf"FUSE {major}\.{minor}; 7\.31 "):
        protocol.kernel_of(hello(major, minor))


def test_an_old_kernel_says_less() -> None:
    """Before 7.36 there were four words, and a kernel without FUSE_INIT_EXT leaves the words after them unset."""
    assert protocol.kernel_of(hello(minor=31, flags=0x1)[:16]) == Kernel(31, 1, 131072)
    assert protocol.kernel_of(hello(minor=38, flags=1 << 39 | 1)) == Kernel(38, 1, 131072)


def test_the_answer_to_the_kernel() -> None:
    answer = wire.INIT_OUT.whole(
        protocol.init_reply(Kernel(45, 0b1111 | EXT | 1 << 40, 131072), 0b11010 | 3 << 40, 64)
    )
    assert (answer.major, answer.minor, answer.max_readahead) == (7, protocol.MINOR, 131072)
    assert (answer.flags, answer.flags2) == (0b1010, 1 << 8), "no more than wanted, no more than there is"
    assert (answer.max_background, answer.congestion_threshold) == (64, 48)
    assert (answer.max_write, answer.time_gran, answer.max_pages) == (4096, 1, 256)
    assert set(answer[9:10] + answer[11:]) == {0}
    assert wire.INIT_OUT.whole(protocol.init_reply(Kernel(31, 0, 0), 0, 12, 1 << 20)).minor == 31


def test_flags_are_those_of_the_kernel() -> None:
    bits = (
        "ASYNC_READ=0 EXPORT_SUPPORT=4 BIG_WRITES=5 DO_READDIRPLUS=13 PARALLEL_DIROPS=18 MAX_PAGES=22 "
        "CACHE_SYMLINKS=23 EXPLICIT_INVAL_DATA=25 INIT_EXT=30"
    )
    for name, _, bit in (one.partition("=") for one in bits.split()):
        assert getattr(protocol, name) == 1 << int(bit), name


# --- notifications -----------------------------------------------------------------------------------------


def test_notifications() -> None:
    """The code is where an answer has its error, and no request has the number 0."""
    assert protocol.resend() == bytes.fromhex("10000000 07000000 0000000000000000")
    assert protocol.forget_all() == bytes.fromhex("10000000 08000000 0000000000000000")
    assert protocol.forget_attributes(7) == bytes.fromhex(
        "28000000 02000000 0000000000000000 0700000000000000 ffffffffffffffff 0000000000000000"
    )
    assert protocol.forget_content(7)[24:] == bytes(16)
    assert protocol.forget_entry(1, b"a.tar") == bytes.fromhex(
        "26000000 03000000 0000000000000000"  # length, FUSE_NOTIFY_INVAL_ENTRY
        "0100000000000000 05000000 00000000"  # parent, length of the name without its end, flags
        "612e74617200"
    )


@given(
    st.lists(
        st.tuples(
            st.binary(min_size=1, max_size=255).filter(lambda n: b"\0" not in n and n not in (b".", b"..")),
            st.integers(0, 1 << 40) | st.integers(0, 255),
        )
    ),
    st.sampled_from([1, protocol.FEW + 1]),
    st.integers(-(1 << 60), 1 << 60),
    st.integers(0, 20_000),
)
def test_lines_in_columns_are_lines(files: list[tuple[bytes, int]], copies: int, mtime_ns: int, room: int) -> None:
    """Lines made for many files at once are those made for each one, as far as there is room.

    A column of a record is as narrow as its numbers allow.
    """
    files *= copies  # with many lines they are made in arrays
    names, sizes = [name for name, _ in files], np.array([size for _, size in files], np.int64)
    sizes = sizes.astype(np.min_scalar_type(sizes.max(initial=0)))
    times = np.full(len(files), mtime_ns) + np.arange(len(files))
    common = (0o100444, 1, 12, 34, 0, 4096, 0)
    expected = b""
    for at, (name, size) in enumerate(files):
        seconds, ns = divmod(mtime_ns + at, 10**9)
        attributes = (7 + at, size, (size + 511) // 512, *(seconds,) * 3, *(ns,) * 3, *common)
        line = protocol.line_plus(name, 100 + at, 3600, 3600, attributes)
        if len(expected) + len(line) > room:
            break
        expected += line
    run = ListingRun(names, 7, 100, 0, 0, sizes, times)
    assert protocol.lines_plus(run, common, 3600, room) == expected
