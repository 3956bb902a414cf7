"""Changed bytes of everything that others may have made: a result or a clear error, in bounded memory and time.

A target is one function: it makes files that are right, and returns them with a function that reads changed ones.
`WDSFS_THOROUGH=1000 .venv/bin/pytest tests/test_fuzz.py -k tar` searches one for hours. A run has a process of its
own, of which the kernel limits memory and time of a processor (`tests/bounded.py`): only what grows with a number
that the input claims, or has no end, reaches them.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import json
import lzma
import os
import socket
import sqlite3
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests import sets, tars
from tests.bounded import SECONDS, bounded
from tests.remote import apart
from tests.sets import at as shard_at
from tests.tars import Case
from tests.thorough import THOROUGH
from wdsfs.door.pins import Pin
from wdsfs.door.shard_door import DOOR
from wdsfs.errors import MALFORMED, WdsfsError
from wdsfs.index import record_check, record_of_file
from wdsfs.index.portable import PortableIndex
from wdsfs.index.portable_writer import checked_target, write_index
from wdsfs.index.record import Record
from wdsfs.index.store import Needed, open_index
from wdsfs.interop.lint import lint
from wdsfs.kernel import manifest
from wdsfs.kernel.manifest import Device, ImageSet, Manifest
from wdsfs.overlay.overlay_directory import OverlayDirectory, OverlaySettings, ShardSeen, read_settings
from wdsfs.overlay.overlay_shards import read_outputs
from wdsfs.packing.plan import CopiedRange, NewMember, Output, Piece, Plan, SourceShard, Step, Zeros
from wdsfs.packing.replacement import plan_to_json, read_plan
from wdsfs.shards import Fingerprint
from wdsfs.spec import portable_head, spec_words
from wdsfs.spec.expand import expand
from wdsfs.tree import content as content_module
from wdsfs.tree import json_fields, label_files, shown_names
from wdsfs.tree.companions import read_class_names
from wdsfs.tree.label_files import LabelSource
from wdsfs.tree.label_rows import read_keys
from wdsfs.tree.label_table import open_labels
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.shown_names import ShownNames
from wdsfs.tree.tree import View
from wdsfs.wings import zstd

LARGEST = 1 << 17  # bytes of an input: much less than what it may take

Read = Callable[[bytes], object]
Target = Callable[[Path], tuple[Sequence[bytes], Read]]


class _Fuzzed(NamedTuple):
    make: Target
    examples: int


TARGETS: dict[str, _Fuzzed] = {}


def target(examples: int) -> Callable[[Target], Target]:
    """Add a target to `TARGETS`, with the number of examples of a run."""

    def add(make: Target) -> Target:
        TARGETS[make.__name__] = _Fuzzed(make, examples)
        return make

    return add


# --- changes

ODD = (
    *(b"\0", b"\xff" * 8, b"\0" * 512, b"\x80" + b"\xff" * 11, b"77777777777\0", b"9" * 19, b"9" * 5000, b"-1"),
    *(b"[" * 3000, b"{" * 3000, b'{"a":' * 2000, b"{a,b}" * 20, b"1e999", b"null", b"\xed\xa0\x80", b"../" * 400),
    *(b"\n", b"\r\n\r\n", b'"', b"::", b"*" * 100, b"${HOME}", b"Retry-After: 1000000000\r\n", b"65535", b"&a *a"),
)


@st.composite
def changed(draw: st.DrawFn, seeds: Sequence[bytes]) -> bytes:
    """One of these, with up to six changes."""
    content = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(0, 6))):
        start = draw(st.integers(0, len(content)))
        end = min(start + draw(st.integers(0, 1) | st.integers(0, 600)), len(content))
        piece = draw(st.sampled_from(ODD) | st.binary(max_size=12) | st.just(b""))
        if draw(st.booleans()) and start < end:
            most = max(LARGEST // (end - start), 1)
            piece = content[start:end] * draw(st.integers(1, 3) | st.integers(1, min(most, 5000)))
        elif draw(st.booleans()):
            end = min(start + len(piece), len(content))  # what is behind stays in its place
        content = content[:start] + piece + content[end:]
    return content[:LARGEST]


def search(name: str, directory: Path) -> None:
    """Read changed inputs of a target. Raises what is no WdsfsError."""
    seeds, read = TARGETS[name].make(directory)

    @settings(
        max_examples=TARGETS[name].examples * THOROUGH,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from(seeds) | changed(seeds))
    def run(content: bytes) -> None:
        with contextlib.suppress(WdsfsError):
            read(content)

    run()


# --- targets


def _written(path: Path, content: bytes) -> Path:
    """A new file of this path: nobody takes it for the one before."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    return path


def _summed(content: bytes) -> bytes:
    """A tar whose changed headers have the right checksums, so that they are not just damaged."""
    data = bytearray(content)
    for start in range(0, len(data) - 511, 512):
        if data[start + 257 : start + 262] == b"ustar":
            data[start + 148 : start + 156] = b" " * 8
            data[start + 148 : start + 156] = b"%06o\0 " % sum(data[start : start + 512])
    return bytes(data)


@target(examples=100)
def tar(directory: Path) -> tuple[Sequence[bytes], Read]:
    def read(content: bytes) -> None:
        shard = shard_at(_written(directory / "s.tar", _summed(content)))
        with contextlib.closing(ShardSet([shard], open_index(directory / "index"))) as below:
            below.index_now(0)
            record = below.record(0)
            for member in range(min(record.members, 100)):
                record.entry_path(record.entry_of(member))
                with contextlib.suppress(WdsfsError):
                    content_module.read(below.content(0, below.tag(0), member), 0, 1 << 16)
        lint(shard.path)

    cases = [case.build() if callable(case.build) else case.build for case in tars.ODD.values()]
    return [case for case in cases if len(case) < LARGEST], read


_COMPRESSED = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress, "zstd": zstd().compress}


@target(examples=60)
def compressed_tar(directory: Path) -> tuple[Sequence[bytes], Read]:
    os.environ["WDSFS_CACHE_DIR"] = str(directory / "cache")
    plain = sets.content(0)

    def read(content: bytes) -> None:
        Record(record_of_file.build_file(os.fsencode(_written(directory / "s.tar", content))))

    return [pack(plain) + pack(plain) for pack in _COMPRESSED.values()], read


@target(examples=100)
def portable_index(directory: Path) -> tuple[Sequence[bytes], Read]:
    shards = sets.make(directory, 3)
    index = open_index(directory / "index")
    index.refresh([one for one, _ in index.stale(shards, Needed.PROVABLE)], needed=Needed.PROVABLE)
    write_index(index, shards, checked_target(str(directory / "set.wdsidx")))
    index.close()

    def read(content: bytes) -> None:
        found = portable_head.load_index(str(_written(directory / "x.wdsidx", content)))
        opened = PortableIndex(found, found.rows())
        for number in range(len(found)):
            for record in (opened.in_place(number), opened.read(number)):
                if record is not None:
                    sets.listing(record if isinstance(record, Record) else Record(record))

    return [(directory / "set.wdsidx").read_bytes()], read


@target(examples=100)
def record(directory: Path) -> tuple[Sequence[bytes], Read]:
    """Records whose checksums are right: whoever writes a portable index can make them so."""

    def read(content: bytes) -> None:
        body = content[16:]
        try:
            found = record_check.checked_record(content[:8] + zlib.crc32(body).to_bytes(8, "little") + body)
        except record_check.UnsoundRecord:
            return
        for question in questions(found):
            with contextlib.suppress(*MALFORMED, OverflowError, AssertionError):  # EIO in a mount
                question()

    cases = [case for case in map(Case.tar, tars.ODD.values()) if len(case) < LARGEST]
    paths = [os.fsencode(_written(directory / f"{number}.tar", case)) for number, case in enumerate(cases)]
    return [data for data in map(record_of_file.build_file, paths) if len(data) < LARGEST], read


def questions(found: Record) -> list[Callable[[], object]]:
    """What a mount asks of a record, by name and by number."""
    views = [ShownNames(View("samples")), ShownNames(View("samples", "full")), ShownNames(View("files"))]
    members, entries, folders = range(found.members), range(found.entries), range(found.folders)
    return [
        lambda: sets.listing(found),
        lambda: (found.paths(), found.counts(), found.file_names(members), found.samples_in_order()),
        lambda: [(found.folder_path(one), found.twin_sample(one), found.folder_mtime_ns(one)) for one in folders],
        lambda: [(found.folder_of(one), found.twin_folder(one)) for one in entries],
        lambda: [(found.symlink(one), found.extents(one), found.link_target(one)) for one in members],
        lambda: found.find_path(b"d1/e"),
        *(lambda shown=shown: shown_names.names_of(found, shown) for shown in views),
    ]


@target(examples=100)
def image_manifest(directory: Path) -> tuple[Sequence[bytes], Read]:
    devices = [Device("s.tar", 5, 7), Device("s3://b/s.tar", 5, 7)]
    of_set = ImageSet(["s"], {"ignore_zeros": False, "group_by_key": False}, {"s": ["a"]}, [], ".")
    right = Manifest(devices, "samples", "short", False, False, "", "now", of_set).encoded()

    def read(content: bytes) -> None:
        footer = manifest._FOOTER.pack(len(content), zlib.crc32(content), manifest._FOOTER_MAGIC)
        path = str(_written(directory / "x.erofs", content + footer))
        manifest.read_manifest(path).paths(path)

    return [right[: -manifest._FOOTER.size]], read


@target(examples=40)
def shard_lists(directory: Path) -> tuple[Sequence[bytes], Read]:
    """Lists of other tools: wids, webdataset's and Energon's YAML, lists of specs, and brace expressions."""
    for number in range(3):
        _written(directory / f"s-{number}.tar", sets.content(number))
    wids = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": [{"url": "s-0.tar", "nsamples": 3}]}
    meta = directory / "energon" / ".nv-meta"
    meta.mkdir(parents=True)
    _written(directory / "energon" / "s-0.tar", sets.content(0))
    right = {
        "x.json": json.dumps(wids).encode(),
        "x.yaml": b"prefix: ./\ndatasets:\n  - name: a\n    shards: s-{0..2}.tar\n",
        "x.txt": b"s-{0..1}.tar\n# more\ns-2.tar::s-0.tar\n",
        "energon/.nv-meta/split.yaml": b"split_parts:\n  train: [s-0.tar]\n  val: []\nexclude: ['s-0.tar/x']\n",
    }
    os.chdir(directory)
    # In this process of its own: the documented ten million take 30 s of a processor for each expression.
    spec_words.MAX_SHARDS = 100_000

    def read(content: bytes) -> None:
        for name in right:
            _written(directory / name, content)
        _written(meta / ".info.json", b'{"shard_counts": {"s-0.tar": 3}}')
        for spec in ("x.json", "x.yaml", "@x.txt", "energon", content[:2000].decode("utf-8", "replace")):
            with contextlib.suppress(WdsfsError):
                if "pipe:" not in spec:
                    expand([spec], allow_missing=True)

    return [*right.values(), b"s-{000..002}.tar", b"s-{0,{1,2}}.tar::s-[0-2].tar"], read


def _labels(directory: Path, name: str) -> Read:
    def read(content: bytes) -> None:
        (file,) = label_files.label_files(str(_written(directory / name, content)))
        with open_labels((file,), (Fingerprint.at(file.path),)) as labels:
            labels.find([b"a", b"b"])

    return read


@target(examples=100)
def labels_of_csv(directory: Path) -> tuple[Sequence[bytes], Read]:
    return [b'key,x,y\na,1,"t\nu"\nb,2,\n', b"__key__,x\r\na,1\r\n"], _labels(directory, "l.csv")


@target(examples=100)
def labels_of_json(directory: Path) -> tuple[Sequence[bytes], Read]:
    return [b'{"key": "a", "x": [1, {"y": null}]}\n{"key": "b", "z": "\\u00e9"}\n'], _labels(directory, "l.jsonl")


@target(examples=100)
def labels_of_json_lists(directory: Path) -> tuple[Sequence[bytes], Read]:
    seed = b'[{"key": "a", "x": [1]},\n {"key": 1, "data": {"image": "b"}, "z": "\\u00e9"}]'
    return [seed], _labels(directory, "l.json")


@target(examples=100)
def labels_of_parquet(directory: Path) -> tuple[Sequence[bytes], Read]:
    return [_packed(directory, "parquet", "write_table")], _labels(directory, "l.parquet")


@target(examples=100)
def labels_of_arrow(directory: Path) -> tuple[Sequence[bytes], Read]:
    return [_packed(directory, "feather", "write_feather")], _labels(directory, "l.arrow")


def _packed(directory: Path, module: str, write: str) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    image = {"bytes": b"x", "path": "p"}
    rows = [{"key": f"k{n}", "x": n / 2, "y": "t" * n, "z": [n], "image": image} for n in range(9)]
    write_table = getattr(pytest.importorskip(f"pyarrow.{module}"), write)
    write_table(pyarrow.Table.from_pylist(rows), str(directory / "seed"))
    return (directory / "seed").read_bytes()


@target(examples=100)
def keys_of_arrays(directory: Path) -> tuple[Sequence[bytes], Read]:
    def read(content: bytes) -> None:
        (file,) = label_files.label_files(str(_written(directory / "k.npy", content)), label_files.LIST)
        list(read_keys(LabelSource(file, DOOR.open_shard)))

    seeds = [np.array(["a", "b"]), np.array([1, 2]), np.array([(1, 2)], np.dtype("u8,u8"))]
    return [_saved(directory / "seed.npy", array) for array in seeds], read


def _saved(path: Path, array: Any) -> bytes:
    np.save(path, array)
    return path.read_bytes()


@target(examples=100)
def labels_of_sqlite(directory: Path) -> tuple[Sequence[bytes], Read]:
    path = directory / "seed.db"
    for statements in ("PRAGMA page_size = 512", "CREATE TABLE t (key PRIMARY KEY, x, y)"):
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.execute(statements)
            db.commit()
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.executemany("INSERT INTO t VALUES (?, ?, ?)", [(f"k{n}", n, "x" * (n * 9)) for n in range(90)])
        db.commit()
    return [path.read_bytes()], _labels(directory, "l.sqlite")


@target(examples=100)
def json_of_members(directory: Path) -> tuple[Sequence[bytes], Read]:
    def read(content: bytes) -> None:
        document = json_fields.parse(content)
        for path in ("label", "meta.label", "texts[0]", '["a.b"]'):
            json_fields.content_at(document, path)

    return [b'{"label": 3, "meta": {"label": 0.5}, "texts": ["a"], "a.b": true}'], read


@target(examples=100)
def overlay_files(directory: Path) -> tuple[Sequence[bytes], Read]:
    """Its settings, the outputs of a commit and the journal of one: of a directory that comes from elsewhere."""
    [shard] = sets.make(directory, 1)
    place = OverlayDirectory(directory / "overlay")
    place.work.mkdir(parents=True)
    seen = Fingerprint.at(shard.path)
    pieces: list[Piece] = [CopiedRange(0, 0, 512), Zeros(1024), NewMember(b"a.txt", b"s/a/txt", 1, 2, (b"mtime",))]
    plan = Plan()
    plan.sources[0] = SourceShard(shard.path, seen, "x")
    plan.steps.append(Step(Output(shard.path, pieces), "rewrite", 0, 3))
    settings = OverlaySettings("samples", "short", False, (ShardSeen(b"s", shard.path, seen),))
    outputs = {"path": "s.tar", "size": 1, "output": "o", "sample": [1, 2], "etag": ""}
    below = ShardSet([shard], open_index(directory / "index"))

    def read(content: bytes) -> None:
        for path in (place.settings, place.outputs, place.work / "commit.json"):
            _written(path, content)
        for reader in (read_settings, read_outputs, lambda place: read_plan(place, below)):
            with contextlib.suppress(WdsfsError):
                reader(place)

    return [plan_to_json(plan), settings.to_json(), json.dumps({"version": 2, "shards": [outputs]}).encode()], read


@target(examples=100)
def class_names(directory: Path) -> tuple[Sequence[bytes], Read]:
    def read(content: bytes) -> None:
        read_class_names(str(_written(directory / "names", content)))

    return [b"cat\ndog\n", b'["cat", "dog"]', b'{"0": "cat", "1": "dog"}'], read


@target(examples=40)
def http_answers(directory: Path) -> tuple[Sequence[bytes], Read]:
    """By the reader of plain HTTP, and where that leaves it to obstore, by this."""
    body = bytes(range(100))
    headers = b'ETag: "1"\r\nLast-Modified: Mon, 01 Jan 2024 00:00:00 GMT\r\n'
    right = [
        b"HTTP/1.1 206 Partial Content\r\nContent-Length: 100\r\nContent-Range: bytes 0-99/1000\r\n" + headers,
        b"HTTP/1.1 206 OK\r\nTransfer-Encoding: chunked\r\nContent-Range: bytes 0-99/1000\r\n" + headers,
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n" + headers,
        b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 3\r\nContent-Length: 100\r\n" + headers,
        b"HTTP/1.1 302 Found\r\nLocation: /a.tar\r\nContent-Length: 100\r\n" + headers,
    ]
    server = _RawServer()
    running = apart.running(directory / "log", dict(os.environ))
    stores = running.__enter__()  # it ends with this process
    url = f"http://127.0.0.1:{server.port}/a.tar"

    def read(content: bytes, _: object = running) -> None:
        server.answer = content
        with contextlib.suppress(WdsfsError):
            stores.head(url)
        found = stores.get(url, Pin(1000, 1_704_067_200 * 10**9, '"1"', ""), 0, 100)
        assert len(found) == 100

    return [one + b"\r\n" + body for one in right], read


class _RawServer:
    """Answers each request with the same bytes, and closes the connection."""

    def __init__(self) -> None:
        self.answer = b""
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listening.accept()
            with connection, contextlib.suppress(OSError):
                request = b""
                while b"\r\n\r\n" not in request and (part := connection.recv(1 << 16)):
                    request += part
                connection.sendall(self.answer)


# --- the test


@pytest.mark.timeout(0)  # a search by hand takes hours; the limit is that of the processor
@pytest.mark.parametrize("name", TARGETS)
def test_a_result_or_a_clear_error(name: str, tmp_path: Path) -> None:
    bounded(lambda: search(name, tmp_path), seconds=SECONDS * THOROUGH)  # it takes a few
