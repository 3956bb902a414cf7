"""`wdsfs.samples`: numbers, keys, options, threads, forks, pickles, changes of shards."""

from __future__ import annotations

import gzip
import lzma
import multiprocessing
import os
import pickle
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow
import pytest

import wdsfs
from tests import tars
from tests.conftest import descriptors
from tests.library.conftest import columns, expected, indexed_only, shard
from tests.processes import PATIENCE, answer_of_child, wait_until
from tests.web_server import WebServer
from wdsfs import host
from wdsfs.index import index_directory
from wdsfs.library import files, opened_set
from wdsfs.library import samples as samples_module
from wdsfs.library.opened_set import OpenedSet
from wdsfs.tar.seekable import SeekReader
from wdsfs.tree import content, sample_reader
from wdsfs.tree.companions import KEYS
from wdsfs.tree.path_table import KeyTable
from wdsfs.tree.view_set import ViewSet

EXPECTED = expected()


@pytest.fixture
def samples(shards: str) -> Iterator[wdsfs.Samples]:
    with wdsfs.samples(shards) as samples:
        yield samples


def test_numbers_slices_and_lists(samples: wdsfs.Samples) -> None:
    assert isinstance(samples, Sequence)
    assert len(samples) == 12
    assert [samples[number] for number in range(12)] == EXPECTED == list(samples)
    assert samples[-1] == EXPECTED[-1]
    assert samples[3:9:2] == EXPECTED[3:9:2]
    assert samples[[7, 0, -1, 7]] == [EXPECTED[at] for at in (7, 0, -1, 7)] == samples.__getitems__([7, 0, -1, 7])
    assert samples[[]] == []
    assert list(samples[0]) == ["__key__", "__shard__", "jpg", "cls", "json"]  # in the order of the tar


def test_what_is_a_number(samples: wdsfs.Samples) -> None:
    """Those of NumPy are; booleans and keys are none."""
    assert samples[np.uint8(3)] == EXPECTED[3] == samples[np.int64(-9)]
    assert samples[np.array([3, -1])] == [EXPECTED[3], EXPECTED[-1]] == samples[range(3, 12, 8)]
    booleans = (True, [True, False], [np.True_], np.array([False] * 12))
    for wrong, error, text in (
        *((number, IndexError, "the set has 12") for number in (12, -13, [0, 12])),
        *((key, TypeError, "call by_key") for key in ("k", "", b"k")),
        *((value, TypeError, r"samples have numbers|as an integer") for value in booleans),
    ):
        with pytest.raises(error, match=text):
            samples[wrong]  # type: ignore[index]


def test_a_key_that_several_shards_have(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.tar").write_bytes(tars.tar(tars.member(b"k.txt", name.encode())))
    with wdsfs.samples(["a.tar", tmp_path / "b.tar"]) as samples:
        assert samples.by_key("b/k")["txt"] == b"b"
        with pytest.raises(wdsfs.UsageError, match="number 0, in a: name the shard before the key, SHARD/KEY"):
            samples.by_key("k")
    twice = [tars.member(name, name) for name in (b"k.txt", b"l.txt", b"k.txt")]
    (tmp_path / "a.tar").write_bytes(tars.tar(*twice))
    with (
        wdsfs.samples("a.tar") as samples,
        pytest.raises(wdsfs.UsageError, match=r"^2 samples .* 0, in a: use their numbers"),
    ):
        samples.by_key("a/k")


def test_a_column_cannot_hide_the_key(tmp_path: Path) -> None:
    (tmp_path / "s.tar").write_bytes(tars.tar(*(tars.member(name, b"x") for name in (b"a.__key__", b"a.cls"))))
    with wdsfs.samples("s.tar") as samples:
        assert samples[0] == {"__key__": "a", "__shard__": "s", "__key__~2": b"x", "cls": b"x"}
    for options in ({"columns": "__shard__=cls"}, {"field": ["__key__=json:n"]}):
        with pytest.raises(wdsfs.UsageError, match="take another name"):
            wdsfs.samples("s.tar", **options)


def test_keys(samples: wdsfs.Samples, shards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of them that is kept is used again; one that is gone with the index, after damage, is made again."""
    assert list(samples.keys()) == [sample["__key__"] for sample in EXPECTED]
    assert samples.by_key("d1/k2-3") == EXPECTED[-1] == samples.by_key("t-2/d1/k2-3")
    for unknown in ("d1/k9-3", "t-1/d1/k2-3", "t-9/d1/k2-3", "", "\ud800"):
        with pytest.raises(wdsfs.NoSuchEntry, match="no sample has the key"):
            samples.by_key(unknown)
    samples._set.lower.drop_tables([KEYS])
    assert samples.by_key("d1/k2-3") == EXPECTED[11]
    monkeypatch.setattr(KeyTable, "build", lambda _: pytest.fail("it is made again"))
    with wdsfs.samples(shards) as again:
        assert again.by_key("d0/k1-0") == EXPECTED[4]


def test_options_have_the_words_and_errors_of_the_mount(shards: str, tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("key,age\n" + "".join(f"{s['__key__']},7\n" for s in EXPECTED))
    options: dict[str, Any] = {"columns": ["img=jpg", "age", "n.txt"], "field": "n.txt=json:n"}
    with wdsfs.samples(shards, associate="labels.csv", shard_id=1, num_shards=3, **options) as samples:
        assert len(samples) == 4
        assert samples[2] == {
            "__key__": "d0/k1-2",
            "__shard__": "t-1",
            "img": columns(1, 2)["jpg"],
            "age": b"7",
            "n.txt": b"2",
        }
        assert samples.by_key("d0/k1-2") == samples[2]
    with pytest.raises(wdsfs.UsageError, match=r"^shard_id and num_shards belong together"):
        wdsfs.samples(shards, shard_id=1)
    with pytest.raises(wdsfs.UsageError, match="missing='no': is one of error, skip, empty"):
        wdsfs.samples(shards, missing="no")
    for wrong, text in (
        ({"jobs": 0}, "at least one process"),
        ({"keys": ""}, "^keys.*name the file"),
        ({"keys": "."}, "is a directory"),
        ({"class_names": ["cat", "dog"]}, "class_names=.*: give the path of a file"),
        ({"keys": "/dev/null"}, "is no file that can be read again"),
        ({"columns": "\ud800"}, "UTF-8"),
    ):
        with pytest.raises(wdsfs.UsageError, match=text):
            wdsfs.samples(shards, **wrong)
    with pytest.raises(wdsfs.ViewError, match="'png'"):
        wdsfs.samples(shards, columns=["png"])
    for name in ("colums", "layout", "whole"):
        unknown: Any = {name: "classes"}
        hint = r"; did you mean columns\?" if name == "colums" else "$"
        with pytest.raises(TypeError, match=f"there is no option '{name}'{hint}"):
            wdsfs.samples(shards, **unknown)
    with pytest.raises(wdsfs.MissingShard):
        wdsfs.samples("t-{0..5}.tar")
    with wdsfs.samples("t-{0..5}.tar", allow_missing=True) as samples:
        assert len(samples) == 12


LISTED = ["t-2/d1/k2-3", "d0/k0-2", "d0/k0-2", "d9/nothing"]


@pytest.mark.parametrize(
    "keys",
    [
        LISTED,
        tuple(key.encode() for key in LISTED),
        {*LISTED},
        (key for key in LISTED),
        np.array(LISTED),
        np.array(LISTED, "S"),
        pyarrow.chunked_array([LISTED[:1], LISTED[1:]]),
    ],
    ids=["list", "bytes", "set", "generator", "texts of NumPy", "bytes of NumPy", "pyarrow"],
)
def test_keys_in_memory_choose(shards: str, keys: Any, caplog: pytest.LogCaptureFixture) -> None:
    """As those of a file: in the order of the set, and a key of no sample is said; also in other processes."""
    with wdsfs.samples(shards, keys=keys) as samples:
        assert list(samples) == [EXPECTED[2], EXPECTED[11]]
        assert [*map(samples.by_key, samples.keys())] == list(samples)
        with pytest.raises(wdsfs.NoSuchEntry):
            samples.by_key("d0/k0-0")
        assert "1 of its 4 keys is not in the set: 'd9/nothing'" in caplog.text.replace("of its 3", "of its 4")
        with pickle.loads(pickle.dumps(samples)) as same:
            assert list(same) == list(samples)
        with wdsfs.tree(shards, keys=LISTED, layout="files") as tree:
            assert tree.listdir("t-1") == []
    assert wdsfs.table(shards, keys=["d0/k0-2"])["__key__"].to_pylist() == ["d0/k0-2"]


def test_the_records_of_equal_keys_are_used_again(shards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wdsfs.samples(shards, keys=LISTED).close()
    monkeypatch.setattr(ViewSet, "build", lambda *_: pytest.fail("a record is made again"))
    with wdsfs.samples(shards, keys=LISTED) as samples:
        assert len(samples) == 2
        wdsfs.samples(shards, keys=LISTED).close()
        assert samples[1] == EXPECTED[11]


@pytest.mark.parametrize(
    ("keys", "error", "text"),
    [
        ([], wdsfs.ViewError, "keys: lists no key"),
        (5, wdsfs.UsageError, "keys=5: give a list or a column"),
        (b"d0/k0-2", wdsfs.UsageError, "keys=b'd0/k0-2': give"),
        (np.array([["a"]]), wdsfs.UsageError, "give a list or a column"),
        (["a", 7], wdsfs.UsageError, r"keys\[1\]=7: a key is a text or bytes"),
        (["a", None], wdsfs.UsageError, r"keys\[1\]=None: a key is"),
        (pyarrow.table({"a": ["b"]}), wdsfs.UsageError, "give a list or a column|a key is"),
        (["d0/k0-2\0d0/k0-1"], wdsfs.UsageError, "a key has a NUL"),
        (["\ud800"], wdsfs.UsageError, "is not UTF-8"),
        (["k" * (2 << 20)], wdsfs.UsageError, "longer than 1 MiB"),
        (["nothing"], wdsfs.ViewError, "^keys: none of its keys is in the set"),
    ],
)
def test_what_is_no_list_of_keys(shards: str, keys: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        wdsfs.samples(shards, keys=keys)


@pytest.mark.parametrize("view", [{}, {"columns": ["cls", "jpg"]}], ids=["plain", "columns"])
def test_a_sample_takes_one_read(shards: str, monkeypatch: pytest.MonkeyPatch, view: dict[str, Any]) -> None:
    reads: list[int] = []
    preadv = os.preadv
    with wdsfs.samples(shards, **view) as samples:
        assert samples[5]  # opens the shard
        monkeypatch.setattr(os, "preadv", lambda *given: reads.append(given[2]) or preadv(*given))
        monkeypatch.setattr(content, "read", lambda *_: pytest.fail("another read"))
        assert samples[6]["jpg"] == columns(1, 2)["jpg"]
    assert len(reads) == 1


def test_many_are_read_in_the_order_of_the_shards(samples: wdsfs.Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int] = []
    sample = sample_reader.SampleReader.sample
    monkeypatch.setattr(
        sample_reader.SampleReader, "sample", lambda self, at, **how: numbers.append(at) or sample(self, at, **how)
    )
    assert [one["__key__"] for one in samples[[9, 2, 11, 2]]] == [EXPECTED[at]["__key__"] for at in (9, 2, 11, 2)]
    assert numbers == [2, 2, 9, 11]


def test_columns_far_apart_and_out_of_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the columns that are shown lie 300 kB: each is read by itself, as what a disk has to bring."""
    members = {b"k.a": b"A" * 10, b"k.big": bytes(300_000), b"k.z": b"Z" * 10}
    (tmp_path / "s.tar").write_bytes(tars.tar(*(tars.member(*pair) for pair in members.items())))
    sizes: list[int] = []
    read = content.read
    monkeypatch.setattr(content, "read", lambda *given: sizes.append(given[2]) or read(*given))
    with wdsfs.samples("s.tar", columns=["a", "z"]) as samples:
        assert (samples[0]["a"], samples[0]["z"]) == (b"A" * 10, b"Z" * 10)
        assert sizes == [10, 10] * 2
    sizes.clear()

    def nothing_cached(*_: object) -> int:
        raise BlockingIOError

    monkeypatch.setattr(os, "preadv", nothing_cached)
    with wdsfs.samples("s.tar") as samples:
        assert samples[0]["big"] == bytes(300_000)
    assert len(sizes) == 1


@pytest.mark.parametrize("name", sorted(tars.ODD))
def test_every_odd_tar_gives_what_its_tree_shows(tmp_path: Path, name: str) -> None:
    """Sparse members, links, columns twice, odd names, damage: the same bytes, or the same error."""
    tars.ODD[name].write(tmp_path / "s.tar")

    def given() -> list[bytes]:
        with wdsfs.samples("s.tar") as samples:
            return [value for sample in samples for value in sample.values() if isinstance(value, bytes)]

    def shown() -> list[bytes]:
        with wdsfs.tree("s.tar") as tree:
            if not tree.exists("s"):
                tree.listdir("s")
            return [tree.read(f"{path}/{name}") for path, _, names in tree.walk() for name in names]

    assert _outcome(given) == _outcome(shown)


def _outcome(question: Callable[[], list[bytes]]) -> object:
    try:
        return sorted(question())
    except wdsfs.WdsfsError as error:
        return type(error), str(error)


@pytest.mark.parametrize("unpack", ["always", "never"])
def test_compressed_shards(tmp_path: Path, unpack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDSFS_UNPACK", unpack)
    for number in range(3):
        (tmp_path / f"t-{number}.tar.gz").write_bytes(gzip.compress(shard(number)))
    with wdsfs.samples("t-{0..2}.tar.gz") as samples:
        assert [{**sample, "__shard__": sample["__shard__"][:3]} for sample in samples] == EXPECTED


# --- changes


def test_a_shard_that_changes_raises(shards: str, tmp_path: Path) -> None:
    with wdsfs.samples(shards) as samples:
        assert samples[5] == EXPECTED[5]
        with (tmp_path / "t-1.tar").open("r+b") as file:
            file.seek(600)
            file.write(b"other")
        (tmp_path / "new").write_bytes(shard(7))
        (tmp_path / "new").rename(tmp_path / "t-2.tar")
        for number in (4, 5, 8, 11):
            for _ in range(2):
                with pytest.raises(wdsfs.StaleShard, match=r"t-[12]\.tar has changed"):
                    samples[number]
        assert samples[3] == EXPECTED[3]
    with wdsfs.samples(shards) as samples:
        assert samples[8]["__key__"] == "d0/k7-0"


def test_a_change_during_a_read_is_no_mix(samples: wdsfs.Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    assert samples[0]
    preadv = os.preadv

    def changed_meanwhile(*given: Any) -> int:
        got = preadv(*given)
        with Path("t-0.tar").open("r+b") as file:
            file.write(b"x")
        return got

    monkeypatch.setattr(os, "preadv", changed_meanwhile)
    with pytest.raises(wdsfs.StaleShard):
        samples[1]


def test_a_label_file_that_changes_raises(shards: str, tmp_path: Path) -> None:
    labels = tmp_path / "labels.csv"
    labels.write_text("key,age\nd0/k0-0,7\n")
    with wdsfs.samples(shards, associate=str(labels), missing="skip") as samples:
        assert (len(samples), samples[0]["age"]) == (1, b"7")
        labels.write_text("key,age\nd0/k0-0,8\n")
        with pytest.raises(wdsfs.StaleShard):
            samples[0]


# --- threads, forks, other processes


def test_threads(samples: wdsfs.Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    """One descriptor for three shards: each thread closes what the others read."""
    with wdsfs.samples("t-{0..2}.tar", columns=["json", "jpg"]) as view:
        for some in (samples, view):
            for source in some._set.lower.sources:
                monkeypatch.setattr(source._files, "_most", 1)
        numbers = random.Random(1).choices(range(12), k=2000)
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(samples.__getitem__, numbers)) == [EXPECTED[at] for at in numbers]
            keys = list(pool.map(lambda at: (view[at]["__key__"], view[at]["jpg"]), numbers))
        assert keys == [(EXPECTED[at]["__key__"], EXPECTED[at]["jpg"]) for at in numbers]


def test_forks(samples: wdsfs.Samples, shards: str) -> None:
    """Children and the parent read and index at the same time: each opens the index for itself."""
    with wdsfs.samples(shards, columns=["jpg"]) as view:
        assert (samples[0], view[0]["jpg"]) == (EXPECTED[0], EXPECTED[0]["jpg"])
        for _ in range(3):
            assert answer_of_child(lambda: (samples[7], view[7]["jpg"])) == (EXPECTED[7], EXPECTED[7]["jpg"])
            assert answer_of_child(lambda: answer_of_child(lambda: samples.by_key("d1/k2-3"))) == EXPECTED[11]
            assert samples[8] == EXPECTED[8]
        assert answer_of_child(lambda: [wdsfs.samples(shards)[1], samples.close()][0]) == EXPECTED[1]
        assert (samples[3], view[3]["jpg"]) == (EXPECTED[3], EXPECTED[3]["jpg"])


def _is_free(lock: threading.RLock) -> bool:
    """Return True if another thread could take the lock now."""
    free = list[bool]()

    def look() -> None:
        free.append(lock.acquire(blocking=False))
        if free[0]:
            lock.release()

    # No pool: before a fork Python locks all pools, and a thread that waits here for the fork would wait for ever.
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return free[0]


@pytest.mark.parametrize(
    ("module", "part", "open_set"),
    [(samples_module, "SampleReader", wdsfs.samples), (files, "make_numbered", wdsfs.tree)],
)
def test_no_fork_closes_the_index_while_a_set_is_opened(
    shards: str, monkeypatch: pytest.MonkeyPatch, module: ModuleType, part: str, open_set: Callable[[str], Any]
) -> None:
    """What opening asks of the index comes from a map, which a fork in another thread would take away."""
    plain, free = getattr(module, part), list[bool]()

    def noted(*args: Any) -> Any:
        free.extend(_is_free(set_.lock) for set_ in opened_set._sets)
        return plain(*args)

    monkeypatch.setattr(module, part, noted)
    with open_set(shards):
        assert free == [False]


def test_all_sets_are_locked_before_a_fork_closes_the_index_that_they_share(
    shards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may be reading the map of the index for a set that is not locked yet."""
    free: list[bool] = []
    with wdsfs.samples(shards) as first, wdsfs.tree(shards) as second:

        def suspend(_: OpenedSet) -> None:
            free.extend(_is_free(set_.lock) for set_ in (first._set, second._set))

        with monkeypatch.context() as patch:
            patch.setattr(OpenedSet, "suspend", suspend)
            opened_set._before_fork()
            opened_set._after_fork()
    assert free == [False] * 4


@pytest.fixture
def in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[wdsfs.Samples]:
    """A set that is read in place, from a compressed shard with several seek points."""
    tar = shard(0, 40)
    middle = len(tar) // 2
    (tmp_path / "t-0.tar.xz").write_bytes(lzma.compress(tar[:middle]) + lzma.compress(tar[middle:]))
    monkeypatch.setenv("WDSFS_UNPACK", "never")
    with wdsfs.samples("t-0.tar.xz") as samples:
        yield samples


def _content(number: int) -> bytes:
    return columns(0, number)["jpg"]


def test_a_fork_shares_no_place_in_a_compressed_shard(in_blocks: wdsfs.Samples) -> None:
    for number in range(0, 40, 4):
        assert in_blocks[number]["jpg"] == _content(number)
        assert answer_of_child(lambda: in_blocks[39]["jpg"]) == _content(39)
        assert in_blocks[number + 1]["jpg"] == _content(number + 1)


def test_a_fork_while_another_thread_unpacks(in_blocks: wdsfs.Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child could wait for ever for a lock of that thread, or for a thread of the library."""
    assert in_blocks[0]["jpg"] == _content(0)
    [file] = in_blocks._set.lower.plain._files.files.values()
    assert isinstance(file.source, SeekReader)
    read, begun = file.source._raw.read, threading.Event()

    def read_slowly(size: int) -> Any:
        begun.set()
        wait_until(lambda: not _is_free(in_blocks._set.lock), "the fork")
        return read(size)

    monkeypatch.setattr(file.source._raw, "read", read_slowly)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(content.read, content.Content(file, 512, 100, None), 0, 100)
        assert begun.wait(PATIENCE)
        assert answer_of_child(lambda: in_blocks[1]["jpg"]) == _content(1)
        assert len(answer.result()) == 100


def test_a_fork_with_an_index_that_is_only_temporary(shards: str, tmp_path: Path) -> None:
    """The child neither deletes it nor needs it."""
    (tmp_path / "no-directory").write_text("")
    with wdsfs.samples(shards, index_dir=tmp_path / "no-directory") as samples:
        place = samples._set.lower.index.directory
        assert place.exists()
        assert answer_of_child(lambda: [samples[7], samples.close()][0]) == EXPECTED[7]
        assert place.exists()
        assert samples[0] == EXPECTED[0]
    assert not place.exists()


def test_after_a_fork_threads_of_several_sets_open_the_index_once(
    shards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB refuses to open it twice, and all that is in it would be made again in a temporary one."""
    opened: list[object] = []
    open_at, both = index_directory._open_at, threading.Barrier(2)

    def noted(*args: Any) -> Any:
        opened.append(args)
        return open_at(*args)

    monkeypatch.setattr(index_directory, "_open_at", noted)
    with wdsfs.samples(shards) as first, wdsfs.tree(shards) as second, ThreadPoolExecutor(2) as pool:

        def ask(set_: OpenedSet) -> bool:
            both.wait(10)
            with set_.lock:
                return set_.lower.index._home.env is None

        for _ in range(50):
            opened.clear()
            assert answer_of_child(lambda: 1) == 1
            assert list(pool.map(ask, (first._set, second._set))) == [False, False]
            assert len(opened) == 1
        assert not first._set.lower.index.temporary


@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_workers(samples: wdsfs.Samples, start: str) -> None:
    with multiprocessing.get_context(start).Pool(2) as pool:
        assert pool.map(samples.__getitem__, range(12)) == EXPECTED
    assert samples[0] == EXPECTED[0]


def test_a_pickle_is_small_and_notices_another_set(samples: wdsfs.Samples) -> None:
    pickled = pickle.dumps(samples)
    assert len(pickled) < 500
    with pickle.loads(pickled) as same:
        assert same[5] == EXPECTED[5]
        assert samples[5] == EXPECTED[5]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir("/")
        with pickle.loads(pickled) as same:
            assert same[5] == EXPECTED[5]
    Path("t-1.tar").write_bytes(shard(1, 5))
    other = pickle.loads(pickled)
    lengths = set()
    for ask in (lambda: other[0], lambda: other[0], lambda: other[:2], lambda: pickle.dumps(other)):
        with pytest.raises(wdsfs.StaleShard, match="has changed since it was sent") as raised:
            ask()
        lengths.add(len(raised.traceback))
    assert max(lengths) < 6, "the error keeps no frames of its earlier raises"
    other.close()
    Path("t-1.tar").unlink()
    with pickle.loads(pickled) as other, pytest.raises(wdsfs.MissingShard, match=r"t-1\.tar"):
        [sample for number, sample in enumerate(other) if number == len(other) - 1]


def test_the_message_of_an_error_is_its_text() -> None:
    """Also of one that PyTorch has raised again in the process of the loop."""
    for error in (wdsfs.StaleShard("first", "second"), wdsfs.StaleShard(message="first\nsecond")):
        assert (error.args, error.message, str(error)) == (("first", "second"), *2 * ("first\nsecond",))


@pytest.mark.parametrize(
    "spec", ["t-{0..2}.tar", "t-?.tar", ".", "./t-0.tar::t-1.tar", "sub/../t-2.tar", "@list.txt", "q{1}.tar"]
)
def test_a_pickle_means_the_same_in_another_directory(shards: str, tmp_path: Path, spec: str) -> None:
    """Also where the name of the directory is full of signs that a spec may have."""
    here = tmp_path / "a{b,c} [x]*" / ("@h" if spec.startswith("@") else "f::g")
    here.mkdir(parents=True)
    for number in range(3):
        (here / f"t-{number}.tar").write_bytes(shard(number))
    (here / "q{1}.tar").write_bytes(shard(1)) if "q" in spec else None
    (here / "list.txt").write_text("t-0.tar\nt-2.tar\n")
    (here / "sub").mkdir()
    (here / "keys.txt").write_text("d0/k0-2\nd0/k1-2\nd0/k2-2\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        with wdsfs.samples(spec, keys="keys.txt") as samples:
            sent = pickle.dumps(samples)
            patch.chdir("/")
            with pickle.loads(sent) as same:
                assert [*same] == [*samples] != []


def test_what_is_closed_answers_nothing(shards: str) -> None:
    """Nor does its reader, for which threads may wait: the map of the index is gone when they get the lock."""
    samples = wdsfs.samples(shards)
    begun, reader = iter(samples), samples._reader
    assert (reader.sample(0), reader.keys(0)[0], reader.find("d1/k2-3")) == (EXPECTED[0], "d0/k0-0", [11])
    samples.close()
    for question in (
        *(lambda: samples[0], lambda: samples.by_key("k"), lambda: [*samples], lambda: [*samples.keys()]),
        *(lambda: next(begun), lambda: pickle.dumps(samples)),
        *(lambda: reader.sample(0), lambda: reader.keys(0), lambda: reader.find("d1/k2-3")),
    ):
        with pytest.raises(wdsfs.UsageError, match="this is closed"):
            question()
    samples.close()


def test_sets_share_an_index_that_stays_open_until_all_are_closed(samples: wdsfs.Samples, shards: str) -> None:
    """Also one that is opened after a fork."""
    assert answer_of_child(lambda: samples[0]) == EXPECTED[0]
    second = wdsfs.samples("t-0.tar")
    assert (second[0], samples[0]) == (EXPECTED[0], EXPECTED[0])
    assert [some._set.lower.index.temporary for some in (samples, second)] == [False, False]
    samples.close()
    assert second[1] == EXPECTED[1]
    second.close()
    with wdsfs.samples(shards) as third:
        assert not third._set.lower.index.temporary


# --- remote shards


def test_remote_samples_take_one_request_each(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read at random by threads, and as a list."""
    big = {at: tars.member(b"k%02d.bin" % at, b"%02d" % at * 200_000) for at in range(24)}
    web.put("/s.tar", tars.tar(*(big[at] + tars.member(b"k%02d.cls" % at, b"%d" % at) for at in big)))
    with indexed_only(f"{web.url}/s.tar", monkeypatch) as samples:
        web.requests.clear()
        with ThreadPoolExecutor(8) as pool:
            read = list(pool.map(samples.__getitem__, range(0, 24, 4)))
        assert [sample["cls"] for sample in read] == [b"%d" % at for at in range(0, 24, 4)]
        assert len(web.gets()) == 6
        assert [sample["bin"][:2] for sample in samples[[14, 2, 6]]] == [b"14", b"02", b"06"]
        assert len(web.gets()) == 9


def test_remote_shards_take_no_more_than_their_part_of_the_descriptors(
    web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has two in the cache: its bytes, and the table of them."""
    monkeypatch.setattr(host, "file_limit", lambda: 8)
    for number in range(6):
        web.put(f"/s-{number}.tar", shard(number))
    with wdsfs.samples(f"{web.url}/s-{{0..5}}.tar") as samples:
        before = len(descriptors())
        for number in range(0, 24, 4):
            assert samples[number]["jpg"] == columns(number // 4, 0)["jpg"]
            assert len(descriptors()) <= before + 4


def test_a_remote_shard_that_changes_raises(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    web.put("/s.tar", shard(0, 600))
    with indexed_only(f"{web.url}/s.tar", monkeypatch) as samples:
        assert samples[0] == {**EXPECTED[0], "__shard__": "s"}
        web.put("/s.tar", shard(3, 600), etag='"2"')
        with pytest.raises(wdsfs.StaleShard):
            samples[400]


# --- the library in a program


def run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60, env=os.environ
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_it_writes_nothing_and_reports_progress_and_logs(tmp_path: Path) -> None:
    whole = shard(0)
    (tmp_path / "a.tar").write_bytes(whole[:-3000])
    (tmp_path / "b.tar").write_bytes(shard(1))
    assert run("import wdsfs; print(len(wdsfs.samples(['a.tar', 'b.tar'])))") == "8\n"
    report: list[tuple[str, int, int]] = []
    wdsfs.samples(["b.tar"], index_dir="other", progress=lambda *given: report.append(given)).close()
    assert report == [("indexing", 1, 1)]
    logged = run(
        "import wdsfs, logging, sys; logging.basicConfig(stream=sys.stdout); wdsfs.samples(['a.tar', 'b.tar'])"
    )
    assert "WARNING:wdsfs:" in logged
    assert "a.tar" in logged


def test_importing_is_cheap_and_public_names_are_these() -> None:
    script = "import sys; before = set(sys.modules); import wdsfs; print(*sorted(set(sys.modules) - before))"
    loaded = run(script).split()
    assert [name for name in loaded if name.startswith("wdsfs")] == ["wdsfs"]
    assert len(loaded) < 40  # of which typing and importlib bring most, where nothing else has loaded these
    slow = {"numpy", "lmdb", "logging", "fsspec", "pyfuse3"}
    assert not slow & set(loaded)
    assert not (slow - {"logging"}) & set(run(script.replace("wdsfs;", "wdsfs; wdsfs.prefetch(());")).split())
    assert wdsfs.__all__ == [
        *("CorruptShard", "DecodeError", "EntryError", "MissingShard", "Mix", "NoSuchEntry", "Samples"),
        *("ShardError", "Shuffle", "SpecError", "StaleShard", "Tree", "UnreadableShard", "UsageError"),
        *("ViewError", "WdsfsError", "decode", "mount", "prefetch", "samples", "table", "tree"),
    ]
    assert dir(wdsfs) == sorted([*wdsfs.__all__, "__version__"])
    for name in wdsfs.__all__:
        assert getattr(wdsfs, name).__doc__ or issubclass(getattr(wdsfs, name), wdsfs.WdsfsError)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        wdsfs.nothing  # noqa: B018


def test_the_end_of_a_program_closes_samples_while_all_modules_are_there(shards: str) -> None:
    """Else the interpreter would, when modules are gone, and print what fails."""
    code = """import atexit
def ask():
    try:
        samples[0]
    except wdsfs.UsageError as error:
        print(error)
atexit.register(ask)
import wdsfs
samples = wdsfs.samples("t-{0..2}.tar")
print(samples, samples[3]["cls"])
"""
    assert run(code) == "<wdsfs.samples: 12 in 3 shards> b'0'\nthis is closed; open it again\n"
