"""`wdsfs pack SHARDS`: samples of shards, all or those of a list, copied as they are into new shards."""

from __future__ import annotations

import json
import os
import signal
import sys
import tarfile
import threading
from pathlib import Path

import pytest

from tests import sets, tars
from tests.conftest import Program
from tests.packing.test_view_shards import members
from tests.processes import PATIENCE, Process, wait_until
from tests.tree.test_view_record import a_view, member
from wdsfs.packing.file_source import PackOptions
from wdsfs.packing.plan import Output
from wdsfs.packing.shard_writer import ShardWriter
from wdsfs.packing.view_source import ViewPack
from wdsfs.tree.composition import Composition, columns_of

STOPPING = """
import itertools, signal
from wdsfs.cli.main import main
from wdsfs.packing.view_source import ViewPack
original, calls = ViewPack._runner, itertools.count()
def runner(self, steps):
    while next(calls) >= 2:
        signal.pause()
    return original(self, steps)
ViewPack._runner = runner
main(prog_name="wdsfs")
"""


def sample(key: bytes, *columns: bytes) -> list[bytes]:
    return [member(b"%s.%s" % (key, column), key + column) for column in columns]


def a_set(home: Path) -> dict[str, list[bytes]]:
    """The members of samples as they are in the shards, with odd headers, strays in between."""
    raw: dict[str, list[bytes]] = {}
    for number in range(3):
        parts: list[bytes] = [member(b"README", b"no sample")]
        for nth in range(5):
            key = b"d/%d-%d" % (number, nth)
            own = sample(key, b"txt", b"cls")
            if nth == 3:  # PAX, with keywords that nobody knows
                own[0] = tars.pax({b"path": key + b".txt", b"VENDOR.note": b"x" * 700}) + tars.member(
                    b"y", b"z" * 900
                )
            raw[key.decode()] = own
            parts += [*own, member(b"stray%d" % nth, b"")]
        (home / f"s{number}.tar").write_bytes(tars.tar(*parts))
    return raw


def test_listed_samples_are_copied_byte_by_byte(program: Program) -> None:
    raw = a_set(program.home)
    listed = ["d/2-3", "d/0-1", "s1/d/1-3", "d/0-2"]
    program.write("good.txt", "\n".join(listed).encode())
    shown = [("d/0-1", "d/0-1txt"), ("d/0-2", "d/0-2txt"), ("d/1-3", "z" * 80)]
    for options in (["--columns", "cls", "--columns", "txt"], []):
        done = program.run("pack", "--keys", "good.txt", *options, "s{0..2}.tar", "-o", "x.tar", "-n", "--json")
        rows = json.loads(done.stdout)["first_samples"]
        assert [(row["key"], row["value"]) for row in rows if row["column"] == "txt"] == shown
    done = program.run("pack", "--keys", "good.txt", "s{0..2}.tar", "-o", "good-%d.tar")
    assert b"4 samples" in done.stdout
    assert b"left out: 18 members in no sample" in done.stdout
    kept = [part for key in ("d/0-1", "d/0-2", "d/1-3", "d/2-3") for part in raw[key]]
    assert (program.home / "good-0.tar").read_bytes() == tars.tar(*kept)
    # The same shard by shard, and without a list, all.
    program.run("pack", "--keep-shards", "--keys", "good.txt", "s{0..2}.tar", "-o", "c-%d.tar")
    assert (program.home / "c-1.tar").read_bytes() == tars.tar(*raw["d/1-3"])
    program.run("pack", "s{0..2}.tar", "-o", "all.tar")
    assert (program.home / "all.tar").read_bytes() == tars.tar(*(part for own in raw.values() for part in own))


def test_the_order_of_a_list_a_shuffle_and_splits(program: Program) -> None:
    raw = a_set(program.home)
    listed = ["d/2-3", "s0/d/0-1", "d/1-3", "d/0-2"]
    program.write("good.txt", "\n".join(listed).encode())
    arguments = ("pack", "--keys", "good.txt", "s{0..2}.tar", "-o")
    program.run(*arguments, "o-%d.tar", "--order", "good.txt", "--maxcount", "3")
    keys = ["d/2-3", "d/0-1", "d/1-3", "d/0-2"]
    assert (program.home / "o-0.tar").read_bytes() == tars.tar(*(part for key in keys[:3] for part in raw[key]))
    assert (program.home / "o-1.tar").read_bytes() == tars.tar(*raw["d/0-2"])
    text = program.refused("pack", "--order", "good.txt", "s{0..2}.tar", "-o", "p-%d.tar", code=7)
    assert "11 samples, the first 'd/0-0': is not in the list of --order" in text
    program.run("pack", "--leave-out", "--order", "good.txt", "s{0..2}.tar", "-o", "p-%d.tar", "--maxcount", "3")
    assert (program.home / "p-0.tar").read_bytes() == (program.home / "o-0.tar").read_bytes()
    # Shuffled and split as files with these keys are.
    for key in raw:
        program.write(f"files/{key}.txt", b"x")
    options = ("--shuffle", "7", "--split", "a=0.6", "--split", "b=0.4", "-o")
    program.run("pack", "s{0..2}.tar", *options, "new/{split}-%d.tar")
    program.run("pack", "files", *options, "old/{split}-%d.tar")
    for split in "ab":
        new, old = (members(program.home / f"{place}/{split}-0.tar") for place in ("new", "old"))
        assert [name for name, _ in new if name.endswith(".txt")] == [name for name, _ in old]


def test_samples_below_a_global_header_get_headers_of_their_own(program: Program) -> None:
    """What it says of them is not lost. Hard links are in no sample."""
    shard = [tars.pax({b"mtime": b"99"}, kind=b"g"), *sample(b"a", b"txt"), *sample(b"b", b"txt")]
    (program.home / "global.tar").write_bytes(tars.tar(*shard))
    links = [*sample(b"a", b"txt"), tars.member(b"a.copy", kind=b"1", link=b"a.txt")]
    (program.home / "links.tar").write_bytes(tars.tar(*links))
    program.write("k", b"a")
    program.run("pack", "--keys", "k", "{global,links}.tar", "-o", "new-%d.tar")
    with tarfile.open(program.home / "new-0.tar") as archive:
        assert [(member.name, member.mtime) for member in archive] == [("a.txt", 99)]
    assert (program.home / "new-1.tar").read_bytes() == tars.tar(links[0])  # another one: it has the same key


@pytest.mark.parametrize(("columns", "together"), [([], 3), (["t=txt"], 1)])
def test_several_shards_are_written_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: list[str], together: int
) -> None:
    """New members are read by the thread that reads the set, so shards that have some are written one by one."""
    a_set(tmp_path)
    barrier, publish = threading.Barrier(together), ShardWriter.publish

    def publish_together(writer: ShardWriter, output: Output) -> None:
        barrier.wait(PATIENCE)
        publish(writer, output)

    monkeypatch.setattr(ShardWriter, "publish", publish_together)
    shards, wanted = [sets.at(tmp_path / f"s{n}.tar") for n in range(3)], Composition(columns=columns_of(columns))
    with a_view(tmp_path, shards, wanted) as below:
        made = ViewPack(below, PackOptions(f"{tmp_path}/n-%d.tar", keep_shards=True), jobs=3)
        made.run(write=True)
    assert [len(members(tmp_path / f"n-{n}.tar")) for n in range(3)] == [5 if columns else 10] * 3
    assert [os.path.basename(step.target) for step in made.done] == [b"n-0.tar", b"n-1.tar", b"n-2.tar"]


def test_a_pack_of_shards_that_is_killed_goes_on(program: Program) -> None:
    a_set(program.home)
    program.write("good.txt", b"\n".join(b"d/%d-%d" % (n, k) for n in range(3) for k in range(5)))
    arguments = ("pack", "--keys", "good.txt", "--maxcount", "3", "s{0..2}.tar", "-o")
    program.run(*arguments, "whole/%03d.tar")
    command = [sys.executable, "-c", STOPPING, *arguments, "out/%03d.tar", "-j", "1"]
    with Process(command, cwd=program.home, env=program.environment) as process:
        second = program.home / "out/001.tar"
        wait_until(lambda: second.exists() or process.poll() is not None, "the second shard")
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert program.json(*arguments, "out/%03d.tar", "--json")["written"] == 3
    new, whole = (
        {path.name: path.read_bytes() for path in (program.home / place).iterdir()} for place in ("out", "whole")
    )
    assert new == whole
    assert len(whole) == 5


@pytest.mark.parametrize("options", [("--keys", "keys"), ("--shuffle", "1"), ("--order", "keys"), ()])
def test_a_shard_without_its_last_padding(program: Program, options: tuple[str, ...]) -> None:
    for number in range(2):
        shard = tars.tar(*sample(b"%d" % number, b"cls", b"txt"), end=b"")
        (program.home / f"s{number}.tar").write_bytes(shard.rstrip(b"\0"))
    program.write("keys", b"1\n0\n")
    program.run("pack", *options, "s{0..1}.tar", "-o", "n.tar")
    content = (program.home / "n.tar").read_bytes()
    assert sorted(tars.by_webdataset(content), key=lambda one: str(one["__key__"])) == [
        {"__key__": key, "cls": f"{key}cls".encode(), "txt": f"{key}txt".encode()} for key in "01"
    ]


def test_sparse_members_are_copied_as_they_are(program: Program) -> None:
    sparse = tars.old_sparse(b"a.bin", [(512, b"x" * 512), (2048, b"y" * 100)], 4000)
    shard = tars.tar(sparse, tars.member(b"a.txt", b"t"), *sample(b"b", b"txt"))
    (program.home / "s.tar").write_bytes(shard)
    program.write("keys", b"b\na\n")
    program.run("pack", "--order", "keys", "s.tar", "-o", "n.tar")
    text, own = sample(b"b", b"txt")[0], [sparse, tars.member(b"a.txt", b"t")]
    assert (program.home / "n.tar").read_bytes() == tars.tar(text, *own)


def test_shards_are_told_from_files(program: Program) -> None:
    a_set(program.home)
    for place in ("shards", "mixed", "files"):
        (program.home / place).mkdir()
    for place in ("shards", "mixed"):
        os.link(program.home / "s0.tar", program.home / place / "s0.tar")
    for name in ("shards/s0.idx", "shards/shardindex.json", "shards/.DS_Store", "mixed/a.jpg", "files/a.jpg"):
        program.write(name, b"{}")
    assert program.json("pack", "shards", "-o", "n/a.tar", "-n", "--json")["layout"] == "shards"
    assert program.json("pack", "files", "-o", "n/b.tar", "-n", "--json")["layout"] == "files"
    text = program.refused("pack", "mixed", "-o", "n/c.tar", code=2)
    assert "mixed: has shards (s0.tar) and other files (a.jpg): name the shards, such as 'mixed/*.tar'" in text
    facts = program.json("pack", "--layout", "files", "mixed", "-o", "n/c.tar", "-n", "--json")
    assert [row["samples"] for row in facts["shards"]] == [2]
    assert "type a command for each" in program.refused("pack", "s0.tar", "files", "-o", "n/d.tar", code=2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("s0.tar --mtime 0", "--mtime cannot be used with SHARDS"),
        ("s0.tar --layout files", "--layout cannot be used with SHARDS"),
        ("s0.tar --executor mpi", "--executor cannot be used with SHARDS"),
        ("files --keys k", "--keys cannot be used with directories of files"),
        ("only -o only/n-%d.tar", "which is packed"),
        ("s0.tar -o s0.tar", "s0.tar is one of the shards"),
        ("s0.tar --keys none", "no such file"),
        ("s9.tar", "'s9.tar'"),
        ("s0.tar --sort --shuffle 1", "--sort"),
        ("s0.tar --keep-shards --maxcount 3", "--keep-shards"),
        ("s0.tar --keep-shards --order k", "--keep-shards"),
        ("s0.tar --split a", "has no splits"),
        ("s0.tar --split a --split b", "--split a: write NAME=FRACTION"),
    ],
)
def test_what_cannot_be_meant(program: Program, arguments: str, text: str) -> None:
    a_set(program.home)
    program.write("files/a.jpg", b"")
    program.write("k", b"a")
    (program.home / "only").mkdir()
    os.link(program.home / "s0.tar", program.home / "only/s0.tar")
    done = program.run("pack", "-o", "n.tar", *arguments.split(), code=None)
    assert done.returncode
    assert text in done.stderr.decode()


def test_a_shard_after_the_last_is_an_error(program: Program) -> None:
    """It would be taken for one of the new set; what is written stays."""
    a_set(program.home)
    program.write("new-1.tar", b"of another set")
    assert "but this set has fewer shards" in program.refused(
        "pack", "-j", "1", "s0.tar", "-o", "new-%d.tar", code=7
    )
    with tarfile.open(program.home / "new-0.tar") as archive:
        assert len(archive.getnames()) == 10
