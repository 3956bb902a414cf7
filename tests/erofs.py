"""A reader of EROFS images for the tests, written from the kernel's description of the format: nothing of wdsfs.

Checks on the way what the kernel relies on: names in order, `.` and `..`, what is inline within one block, no two
things at one place.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

BLOCK = 512
_TYPES = {1: stat.S_IFREG, 2: stat.S_IFDIR, 7: stat.S_IFLNK}


class Inode(NamedTuple):
    """An inode: times in ns; `content` is where its bytes are, as the format numbers it."""

    nid: int
    mode: int
    links: int
    size: int
    mtime_ns: int
    uid: int
    gid: int
    content: int
    address: int
    end: int  # where the inode itself ends (bytes)


class Unreadable(Exception):
    """Reading fails: the device does not exist."""


class ErofsImage:
    """An image over these devices. `compact_times` is False for a kernel before 6.15."""

    def __init__(self, path: Path, devices: Sequence[Path], compact_times: bool = True) -> None:
        self.data, self.devices, self.compact_times = path.read_bytes(), devices, compact_times
        head = struct.unpack_from("<IIIBBHQQIIII16s16sIHHHBBIQ", self.data, 1024)
        self.root, self.inodes, self.epoch, self.nanoseconds, self.blocks, meta = head[5:11]
        assert head[0] == 0xE0F5E1E2
        assert (head[3], head[14], head[18]) == (9, 4 | 8, 0)
        assert (self.root < 1 << 16, head[16], head[17]) == (True, len(devices), 9)
        self.meta = meta * BLOCK
        self.used: dict[int, str] = {}  # 32 bytes each
        table = [struct.unpack_from("<64sII56x", self.data, 1152 + 128 * n) for n in range(len(devices))]
        assert [size for _, size, _ in table] == [-(-one.stat().st_size // BLOCK) for one in devices]
        assert self.meta >= 1152 + 128 * len(devices)

    def inode(self, nid: int) -> Inode:
        at = self.meta + nid * 32
        (form,) = struct.unpack_from("<H", self.data, at)
        content = form >> 1 & 7
        assert form >> 4 == 0
        assert content in (0, 2, 4)
        if form & 1:
            fields = struct.unpack_from("<HHHHQIIIIQII16x", self.data, at)
            _, _, mode, _, size, address, _, uid, gid, seconds, nanoseconds, links = fields
            mtime_ns = (seconds - (seconds >> 63 << 64)) * 10**9 + nanoseconds
            return Inode(nid, mode, links, size, mtime_ns, uid, gid, content, address, at + 64)
        fields = struct.unpack_from("<HHHHIIIIHH4x", self.data, at)
        _, _, mode, links, size, later, address, _, uid, gid = fields
        mtime_ns = (self.epoch + later * self.compact_times) * 10**9 + self.nanoseconds
        return Inode(nid, mode, links, size, mtime_ns, uid, gid, content, address, at + 32)

    def read(self, one: Inode) -> bytes:
        if one.content == 4:
            return b"".join(self._chunks(one))
        whole = one.size // BLOCK * BLOCK if one.content == 2 else one.size
        found = self._block(one.address, whole) if whole else b""
        if one.content == 2:
            rest = one.size - whole
            assert one.end // BLOCK == (one.end + rest - 1) // BLOCK, "inline content crosses a block"
            found += self.data[one.end : one.end + rest]
        assert len(found) == one.size
        return found

    def _block(self, number: int, size: int) -> bytes:
        assert number + -(-size // BLOCK) <= self.blocks
        return self.data[number * BLOCK : number * BLOCK + size]

    def _chunks(self, one: Inode) -> Iterator[bytes]:
        assert one.address & ~0x3F == 0
        assert one.address & 0x20
        chunk = BLOCK << (one.address & 0x1F)
        mask = (1 << len(self.devices).bit_length()) - 1
        for nth in range(-(-one.size // chunk)):
            _, device, block = struct.unpack_from("<HHI", self.data, one.end + 8 * nth)
            size = min(chunk, one.size - nth * chunk)
            if block == 0xFFFFFFFF:
                yield bytes(size)
            elif not device:
                yield self._block(block, size)
            elif not 0 < device & mask <= len(self.devices):
                raise Unreadable
            else:
                with self.devices[device - 1].open("rb") as file:
                    found = os.pread(file.fileno(), size, block * BLOCK)
                assert len(found) == size
                assert (block + -(-size // BLOCK)) * BLOCK <= self.devices[device - 1].stat().st_size
                yield found

    def listing(self, directory: Inode) -> dict[bytes, tuple[int, int]]:
        """The names of a directory, with the inode number and the type of each."""
        raw, found = self.read(directory), dict[bytes, tuple[int, int]]()
        for start in range(0, len(raw), BLOCK):
            block = raw[start : start + BLOCK]
            count = struct.unpack_from("<QH", block)[1] // 12
            assert count
            entries = [struct.unpack_from("<QHBB", block, 12 * n) for n in range(count)]
            ends = [entry[1] for entry in entries[1:]] + [len(block)]
            for (nid, offset, kind, _), end in zip(entries, ends, strict=True):
                name = block[offset:end].rstrip(b"\0") if end == len(block) else block[offset:end]
                assert name
                assert name not in found
                found[name] = nid, _TYPES[kind]
        assert list(found) == sorted(found)
        assert found[b"."] == (directory.nid, stat.S_IFDIR)
        return found

    def walk(self) -> Iterator[tuple[bytes, Inode]]:
        """Path and inode of everything, the top first."""
        stack = [(b"", self.root, self.root)]
        while stack:
            path, nid, parent = stack.pop()
            one = self.inode(nid)
            yield path, one
            if stat.S_ISDIR(one.mode):
                listing = self.listing(one)
                assert listing[b".."] == (parent, stat.S_IFDIR)
                for name, (child, kind) in listing.items():
                    if name not in (b".", b".."):
                        assert stat.S_IFMT(self.inode(child).mode) == kind
                        stack.append((path + b"/" + name, child, nid))
