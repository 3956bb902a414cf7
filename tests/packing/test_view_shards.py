"""`wdsfs pack SHARDS` with the options of a view: the new shards have what a mount would show."""

from __future__ import annotations

import json
import re
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests import sets, tars
from tests.conftest import Program
from tests.packing.conftest import FakeS3
from tests.servers import BUCKET
from tests.thorough import examples
from tests.tree.test_fields import COLUMNS, FIELDS, samples_of
from tests.tree.test_view_record import BROKEN, Sample, a_view, as_lines, member, shown, write
from wdsfs.errors import CommitError, UsageError
from wdsfs.packing.file_source import PackOptions
from wdsfs.packing.view_source import ViewPack
from wdsfs.tree.composition import EMPTY, SKIP, Composition, columns_of, fields_of, refuse_equal_names

OPTIONS = ("--columns", "img=jpg;png", "--field", "caption.txt=json:caption")
KEEP = (*OPTIONS, "--keep-shards")


def members(path: Path) -> list[tuple[str, bytes]]:
    """The members of a shard, as Python's tarfile reads it."""
    with tarfile.open(path) as archive:
        found = []
        for one in archive:
            stream = archive.extractfile(one)
            assert stream is not None
            found.append((one.name, stream.read()))
        return found


def a_set(home: Path) -> None:
    for number in range(3):
        samples: list[Sample] = []
        for nth in range(number):  # the first shard has none
            caption = json.dumps({"caption": f"{number}-{nth}", "n": nth}).encode()
            samples.append((b"z/%d" % (9 - nth), [(b"json", caption), (b"png", b"P"), (b"jpg", b"J%d" % nth)]))
        write(home / f"s{number}.tar", samples, member(b"README", b"no sample"))


def test_what_a_mount_shows_is_in_the_new_shards(program: Program) -> None:
    a_set(program.home)
    planned = program.json("pack", *KEEP, "-n", "-o", "new/%d.tar", "s{0..2}.tar")
    assert not (program.home / "new").exists()
    done = program.run("pack", *KEEP, "-o", "new/%d.tar", "s{0..2}.tar")
    assert b"3 samples" in done.stdout
    assert b"left out: 3 members in no sample" in done.stdout
    assert sorted(path.name for path in (program.home / "new").iterdir()) == ["0.tar", "1.tar"]
    assert [row["bytes"] for row in planned["shards"]] == [
        (program.home / f"new/{n}.tar").stat().st_size for n in range(2)
    ]
    # In the order of the tar.
    assert members(program.home / "new/1.tar") == [
        *(("z/9.img", b"J0"), ("z/9.caption.txt", b"2-0")),
        *(("z/8.img", b"J1"), ("z/8.caption.txt", b"2-1")),
    ]
    shown = program.run("ls", "-R", "--layout", "files", "--merge", *OPTIONS, "s{0..2}.tar").stdout
    made = program.run("ls", "-R", "--layout", "files", "--merge", "new/{0..1}.tar").stdout
    assert re.sub(rb"~\w+", b"", shown) == re.sub(rb"~\w+", b"", made)


def test_a_command_that_is_repeated_keeps_what_is_there(program: Program) -> None:
    a_set(program.home)
    command = ("pack", *KEEP, "-o", "new/%d.tar", "s{0..2}.tar")
    program.run(*command)
    first, second = (program.home / f"new/{number}.tar" for number in range(2))
    before = first.read_bytes(), second.read_bytes(), second.stat().st_ino
    first.unlink()
    assert program.json(*command)["written"] == 1
    assert (first.read_bytes(), second.read_bytes(), second.stat().st_ino) == before
    first.write_bytes(b"something else")
    assert "new/0.tar exists already with other content" in program.refused(*command, code=7)


def test_samples_are_split_up_anew_and_sorted(program: Program) -> None:
    a_set(program.home)
    command = ("pack", *OPTIONS, "--sort", "--maxcount", "2", "-o", "new/%d.tar")
    program.run(*command, "s{0..2}.tar")
    names = [[name for name, _ in members(program.home / f"new/{n}.tar")] for n in range(2)]
    # A sample of the same key as the one before it begins another shard.
    assert names == [
        ["z/9.img", "z/9.caption.txt", "z/8.img", "z/8.caption.txt"],
        ["z/9.img", "z/9.caption.txt"],
    ]


def test_joined_and_labelled_columns_are_packed(program: Program) -> None:
    write(program.home / "s.tar", [(b"k", [(b"txt", b"text"), (b"big", bytes(3 << 20))])])
    write(program.home / "j.tar", [(b"k", [(b"depth", b"D")])])
    as_lines(program.home / "l.jsonl", [{"key": "k", "label": 7}])
    options = ("--join", "j.tar", "--associate", "l.jsonl", "--columns", "text=txt")
    more = ("--columns", "depth", "--columns", "label", "--columns", "big")
    program.run("pack", *options, *more, "-o", "new.tar", "s.tar")
    found = dict(members(program.home / "new.tar"))
    assert found == {"k.big": bytes(3 << 20), "k.text": b"text", "k.depth": b"D", "k.label": b"7"}


CASE, UMLAUT = ((b"jpg", b"J"), (b"PNG", b"P")), (("é".encode(), b"J"), ("É".encode(), b"P"))


@pytest.mark.parametrize(
    ("key", "columns", "options", "text"),
    [
        (b"a", [(b"jpg", b"J"), (b"json", b"{")], OPTIONS, "a.json: is not JSON"),
        (b"a", CASE, ("--columns", "png=jpg", "--columns", "PNG"), "a.PNG cannot be packed: differs from another"),
        (b"a", CASE, ("--columns", "__key__=jpg"), "a.__key__ cannot be packed: readers use this name"),
        (b"a", UMLAUT, ("--columns", "é", "--columns", "É=É"), "only in letter case"),
        (b"x" * 4000, [(b"jpg", b"J")], ("--columns", f"{'n' * 100}=jpg"), "the limit is 4,095"),
        (b"a", CASE, ("--columns", "jpg", "-o", "s.tar"), "s.tar is one of the shards"),
    ],
)
def test_what_cannot_be_packed_is_refused_before_anything_is_written(
    program: Program, key: bytes, columns: Sequence[tuple[bytes, bytes]], options: tuple[str, ...], text: str
) -> None:
    write(program.home / "s.tar", [(key, list(columns))])
    assert text in program.run("pack", "-o", "new/%d.tar", *options, "s.tar", code=7).stderr.decode()
    assert not (program.home / "new").exists()


def test_samples_of_one_key_with_another_left_out_between_them_are_refused(program: Program) -> None:
    twice = [member(b"k.jpg", b"1"), member(b"x.txt", b"2"), member(b"k.jpg", b"3")]
    program.write("twice.tar", tars.tar(*twice))
    command = ("pack", "--keep-shards", "--columns", "img=jpg", "--missing", "skip", "-o", "n.tar", "twice.tar")
    assert "the key 'k' occurs twice in a row" in program.refused(*command, code=7)
    assert not (program.home / "n.tar").exists()


def test_a_mount_is_named_by_its_shards(program: Program) -> None:
    a_set(program.home)
    with program.mounted("s1.tar", *OPTIONS) as mounted:
        assert "SHARDS" in program.refused("pack", *OPTIONS, "-o", "n.tar", mounted.path, code=2)
        advice = "wdsfs pack --columns 'img=jpg;png' --field caption.txt=json:caption -o PATTERN SHARDS"
        assert advice in program.refused("commit", "-o", "n.tar", mounted.path, code=5)
        refused = program.refused("commit", "--columns", "jpg", "-o", "n.tar", mounted.path, code=2)
        assert "wdsfs pack --columns" in refused


def test_parts_of_a_set_and_shards_that_are_missing(program: Program) -> None:
    a_set(program.home)
    done = program.json(
        "pack", *KEEP, "--shard-id", "1", "--num-shards", "2", "-o", "p-%d.tar", "s{0..2}.tar", "--json"
    )
    assert [row["samples"] for row in done["shards"]] == [1]
    assert "1 of 4 shards are missing" in program.refused("pack", *KEEP, "-o", "n-%d.tar", "s{0..3}.tar", code=3)
    done = program.json("pack", *KEEP, "--allow-missing", "-o", "n-%d.tar", "s{0..3}.tar", "--json")
    assert [row["samples"] for row in done["shards"]] == [1, 2]
    assert "shards are missing" in program.refused(
        "pack", *KEEP, "--strict", "-o", "m-%d.tar", "s{0..3}.tar", code=3
    )


@pytest.mark.parametrize("option", ["--maxcount=3", "--keys=k"])
def test_commit_refuses_options_that_pack_has(program: Program, option: str) -> None:
    a_set(program.home)
    overlay = ("--overlay", program.directory("o"), option, "-o", "n-%d.tar", "s1.tar")
    assert option.partition("=")[0] in program.refused("commit", *overlay, code=2)
    assert "wdsfs pack" in program.refused("commit", "-o", "n-%d.tar", "s1.tar", "s2.tar", code=2)


def test_new_shards_may_be_objects(program: Program, s3: FakeS3) -> None:
    a_set(program.home)
    program.environment.update(s3.environment)
    command = ("pack", *KEEP, "-o", f"s3://{BUCKET}/new/%d.tar", "s{0..2}.tar", "--json")
    assert program.json(*command)["written"] == 2
    program.run("pack", *KEEP, "-o", "here/%d.tar", "s{0..2}.tar")
    for number in range(2):
        assert s3.objects[f"new/{number}.tar"] == (program.home / f"here/{number}.tar").read_bytes()
    assert program.json(*command)["written"] == 0


@examples(40)
@given(samples_of(), COLUMNS, FIELDS, st.sampled_from([SKIP, EMPTY]), st.booleans())
def test_new_shards_show_what_the_view_shows(
    samples: list[Sample], columns: list[str], fields: list[str], missing: str, resplit: bool
) -> None:
    try:
        wanted = Composition(
            columns=columns_of(columns), fields=fields_of(fields), missing=missing, duplicates=SKIP
        )
        refuse_equal_names(wanted.columns, wanted.fields)
    except UsageError:
        return
    assume(not wanted.is_plain)
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        shard = write(home / "s.tar", samples)
        options = PackOptions(f"{directory}/new-%d.tar", **({"maxcount": 1} if resplit else {"keep_shards": True}))
        with a_view(home, [shard], wanted) as below:
            expected = shown(below, 0)
            made = ViewPack(below, options)
            is_broken = any(data == BROKEN for _, columns in expected for _, data in columns)
            clashes = any(len({name.lower() for name, _ in columns}) < len(columns) for _, columns in expected)
            if not expected or is_broken or clashes:
                with pytest.raises(CommitError):
                    made.run(write=True)
                assert not list(home.glob("new-*"))
                return
            made.run(write=True)
        new = [sets.at(path) for path in sorted(home.glob("new-*.tar"))]
        assert len(new) == (len(expected) if resplit else 1)
        found = []
        for one in new:
            with a_view(home, [one], Composition()) as below:
                found += shown(below, 0)
        assert found == expected
