"""Hostile members: they cost a worker no more than its limits, and the page a sentence."""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import os
import resource
import signal
import struct
import threading
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.pages.conftest import MEMORY, Bytes
from tests.processes import PATIENCE, wait_until
from wdsfs.pages.preview import CARD, Preview
from wdsfs.pages.previewer import Limits, Previewer

LIBRARIES = 150 << 20  # bytes that a worker takes at most in memory before it has decoded anything


def most_memory(pid: int) -> int:
    """The most memory that a process has had at any time (bytes)."""
    found = Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]
    return int(found) << 10


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int) -> bytes:
    """A PNG of zeros in grey; only its first million bytes are there."""
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1_000_000)))


def npz(size: int) -> bytes:
    """An npz file with an array of so many zeros, which take a thousandth of that."""
    target = io.BytesIO()
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": (size,)})
    with (
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("a.npy", "w", force_zip64=True) as member,
    ):
        member.write(head.getvalue())
        for _ in range(size >> 20):
            member.write(bytes(1 << 20))
    return target.getvalue()


def huge_npy() -> bytes:
    target = io.BytesIO()
    shape = (1_000_000_000, 1_000_000_000)
    np.lib.format.write_array_header_1_0(target, {"descr": "<f8", "fortran_order": False, "shape": shape})
    return target.getvalue() + bytes(100_000)


def tiff_of_strips() -> bytes:
    """A TIFF whose header claims 60,000 x 60,000 pixels in one strip."""
    target = io.BytesIO()
    Image.new("L", (8, 8)).save(target, "TIFF")
    data = bytearray(target.getvalue())
    at = struct.unpack_from("<I", data, 4)[0]
    for number in range(struct.unpack_from("<H", data, at)[0]):
        entry = at + 2 + 12 * number
        if struct.unpack_from("<H", data, entry)[0] in (256, 257, 278):
            struct.pack_into("<HII", data, entry + 2, 4, 1, 60_000)
    return bytes(data)


BOMBS = {
    "png of 100,000 x 100,000": ("png", lambda: Bytes(png(100_000, 100_000)), "too many for a preview"),
    "bmp of 60,000 x 60,000": (
        "bmp",
        lambda: Bytes(b"BM" + struct.pack("<IIIIiiHH", 0, 0, 54, 40, 60_000, 60_000, 1, 24) + bytes(1000)),
        "too many for a preview",
    ),
    "tiff of 60,000 x 60,000": ("tif", lambda: Bytes(tiff_of_strips()), "too many for a preview"),
    "json of 10 GB": ("json", lambda: Bytes(b'{"a": 1}, ', 10_000_000_000), "the beginning is shown"),
    "json lines of 10 GB": ("jsonl", lambda: Bytes(b'{"a": [1, 2]}\n', 10_000_000_000), ""),
    "text of 10 GB": ("txt", lambda: Bytes(b"lorem ipsum ", 10_000_000_000), ""),
    "csv of 10 GB": ("csv", lambda: Bytes(b"a,b\n1,2\n", 10_000_000_000), ""),
    "csv of one line": ("csv", lambda: Bytes(b"lorem ipsum ", 10_000_000_000), ""),
    "sound of 10 GB": ("wav", lambda: Bytes(b"RIFF\xff\xff\xff\xffWAVEfmt ", 10_000_000_000), ""),
    "deep json": ("json", lambda: Bytes(b"[" * 1_000_000), "nested too deeply"),
    "npz of 512 MiB": ("npz", lambda: Bytes(npz(512 << 20)), ""),
    "npy of 8 EB": ("npy", lambda: Bytes(huge_npy()), "It is cut off"),
    "npy of 10 GB": ("npy", lambda: Bytes(huge_npy(), 10_000_000_000), "are read"),
    "csv.gz of 256 MiB": ("csv.gz", lambda: Bytes(gzip.compress(b"a,b\n" + b"1,22\n" * 53_000_000, 1)), ""),
    "json.gz of 256 MiB": ("json.gz", lambda: Bytes(gzip.compress(b"[" + b"1," * 128_000_000, 1)), ""),
    "movie of boxes": ("mp4", lambda: Bytes(struct.pack(">I4s", 8, b"free") * 100_000), ""),
    "movie of 10 GB": ("mp4", lambda: Bytes(struct.pack(">I4s", 16, b"free") + bytes(8), 10_000_000_000), ""),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_costs_no_more_than_its_limits(previewer: Previewer, bomb: str) -> None:
    extension, make, said = BOMBS[bomb]
    source = make()
    found = previewer.preview(extension, source)
    assert said in found.problem
    assert found.text or found.rows or found.kind in ("audio", "video")
    assert len(found.text) <= 110_000
    assert source.bytes_read <= 80 << 20
    for pid in previewer.workers:
        assert most_memory(pid) < LIBRARIES + MEMORY
    if "10 GB" in bomb:  # a card reads less
        source = make()
        assert len(previewer.preview(extension, source, CARD).text) <= 700
        assert source.bytes_read <= (17 << 20 if "npy" in bomb or "movie" in bomb else 2 << 20)
    assert previewer.preview("json", Bytes(b"[]")).text == "[]"


def test_a_picture_that_is_too_large_for_a_card(previewer: Previewer) -> None:
    size = 54 + 3 * 4000 * 2000
    head = b"BM" + struct.pack("<IIIIiiHHIIiiII", size, 0, 54, 40, 4000, 2000, 1, 24, 0, 0, 0, 0, 0, 0)
    data = head + bytes(3 * 4000 * 2000)
    assert "more than 16 MiB" in previewer.preview("bmp", Bytes(data), CARD).problem
    assert previewer.preview("bmp", Bytes(data)).kind == "image"


def test_a_member_that_needs_too_much_memory_is_refused_and_the_worker_replaced() -> None:
    """A list of a million empty lists: 4 MB of text, some 90 MB as values."""
    memory = 48 << 20
    limited = Previewer(workers=1, limits=Limits(memory=memory, seconds=7))
    try:
        assert limited.preview("json", Bytes(b"[1]")).kind == "json"
        [first] = limited.workers
        assert resource.prlimit(first, resource.RLIMIT_NOFILE) == (0, 0)
        assert resource.prlimit(first, resource.RLIMIT_FSIZE) == (0, 0)
        assert resource.prlimit(first, resource.RLIMIT_CPU)[0] < 7 + 60
        assert resource.prlimit(first, resource.RLIMIT_AS)[0] < memory + (1 << 30)
        source = Bytes(b"[" + b"[],[1]," * 500_000 + b"[]]")
        found = limited.preview("json", source)
        assert found.kind == "hex"
        assert "more memory than a preview may have" in found.problem
        assert limited.workers == []
        assert not Path(f"/proc/{first}").exists()
        assert limited.preview("json", Bytes(b"[1]")).kind == "json"
    finally:
        limited.close()


def test_a_large_picture_within_the_limits_is_shown(previewer: Previewer) -> None:
    target = io.BytesIO()
    Image.new("RGB", (6000, 8000)).save(target, "PNG", compress_level=1)
    found = previewer.preview("png", Bytes(target.getvalue()), CARD)
    assert found.summary.startswith("6,000 x 8,000")
    assert (found.pictures[0].width, found.pictures[0].height) == (192, 256)


@pytest.fixture
def impatient() -> Any:
    """A previewer that waits two seconds for an answer, once it has a worker."""
    found = Previewer(workers=1, limits=Limits(memory=MEMORY, patience=2))
    assert found.preview("json", Bytes(b"[]")).kind == "json"
    yield found
    found.close()


def struck(previewer: Previewer, number: signal.Signals) -> tuple[int, Preview]:
    """A preview whose worker gets a signal while it waits for more of the member: its number, what is shown."""
    [pid] = previewer.workers

    def strike(offset: int) -> None:
        if offset > 300_000:
            os.kill(pid, number)

    source = Bytes(png_noise(), key="struck")
    source.before_read = strike
    return pid, previewer.preview("png", source)


@functools.cache
def png_noise() -> bytes:
    """A picture that a worker has to ask for in parts."""
    target = io.BytesIO()
    Image.effect_noise((1200, 1200), 100).save(target, "PNG")
    assert target.tell() > 1_000_000
    return target.getvalue()


@pytest.mark.parametrize(
    ("number", "said"),
    [(signal.SIGSTOP, "takes more time"), (signal.SIGKILL, "was ended"), (signal.SIGXCPU, "was ended")],
)
def test_a_worker_that_hangs_or_dies_is_replaced(impatient: Previewer, number: signal.Signals, said: str) -> None:
    pid, found = struck(impatient, number)
    assert (found.kind, said in found.problem) == ("hex", True)
    assert not Path(f"/proc/{pid}").exists()
    assert impatient.preview("json", Bytes(b"[1]")).kind == "json"
    assert impatient.workers not in ([], [pid])
    # Nobody tries it again and again.
    again = Bytes(png_noise(), key="struck")
    assert impatient.preview("png", again) == found
    assert again.reads == 0


def test_a_worker_that_died_at_rest_is_replaced_unnoticed(impatient: Previewer) -> None:
    [pid] = impatient.workers
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: " Z " in Path(f"/proc/{pid}/stat").read_text(), "the worker's end")
    assert impatient.preview("json", Bytes(b"[1]")).kind == "json"
    assert impatient.workers != [pid]


def test_many_callers_share_the_workers() -> None:
    """Each gets the preview of its own file, also while others' workers die."""
    shared = Previewer(workers=2, limits=Limits(memory=MEMORY))
    files = [("json", b"[%d]" % number) for number in range(40)]
    files += [("png", png_noise() if number % 2 else png(100_000, 100_000)) for number in range(10)]

    def strike(offset: int) -> None:
        for pid in shared.workers[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def made(file: tuple[str, bytes]) -> Preview:
        source = Bytes(file[1])
        if len(file[1]) == len(png_noise()):
            source.before_read = lambda offset: strike(offset) if offset > 500_000 else None
        return shared.preview(file[0], source)

    try:
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(made, files))
        for number, preview in enumerate(found[:40]):
            assert preview.text == f"[\n  {number}\n]" or "was ended" in preview.problem
        assert all(preview.problem for preview in found[40::2])
        assert len(shared.workers) <= 2
    finally:
        shared.close()
    assert shared.workers == []


def test_closing_does_not_wait_for_a_decoder_that_hangs() -> None:
    hanging = Previewer(workers=1, limits=Limits(memory=MEMORY, patience=600))
    stopped = threading.Event()
    assert hanging.preview("json", Bytes(b"[]")).kind == "json"
    [pid] = hanging.workers

    def stop(offset: int) -> None:
        if offset > 300_000:
            os.kill(pid, signal.SIGSTOP)
            stopped.set()

    source = Bytes(png_noise())
    source.before_read = stop
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(hanging.preview, "png", source)
        assert stopped.wait(PATIENCE)
        hanging.close()
        assert "was ended" in waiting.result(PATIENCE).problem
    assert not Path(f"/proc/{pid}").exists()
