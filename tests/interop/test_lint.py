"""The lint: each kind of finding with its offset and member, what a set shows that one shard does not, limits."""

from __future__ import annotations

import io
import itertools
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from webdataset import tariterators

from tests import tars
from tests.tars import BLOCK, END, member, tar
from wdsfs.errors import MissingShard, UnreadableShard
from wdsfs.interop import lint as lint_module
from wdsfs.interop.judge import Judge
from wdsfs.interop.lint import EXAMPLES, KEPT, Lint, LintFinding, lint
from wdsfs.names import shown
from wdsfs.tar import scan


def write(directory: Path, content: bytes, name: str = "s.tar") -> bytes:
    path = directory / name
    path.write_bytes(content)
    return os.fsencode(path)


def findings(directory: Path, content: bytes) -> list[tuple[str, int, str]]:
    """Kind, offset and member of each finding in a shard."""
    return [one[:3] for one in lint(write(directory, content)).findings]


# --- one shard --------------------------------------------------------------------------------------------


def test_a_part_of_a_split_tar_is_no_damaged_download(tmp_path: Path) -> None:
    whole = tar(member(b"a.bin", bytes(range(256)) * 30), member(b"b.bin"))
    parts = [(f"s.tar.a{mark}", whole[begin : begin + 3000]) for mark, begin in (("a", 0), ("b", 3000))]
    paths = [write(tmp_path, content, name) for name, content in parts]
    for path in paths:
        (text,) = (one.text for one in lint(path).findings)
        assert f"pipe:cat {tmp_path}/s.tar.*" in text
        assert "download" not in text


TWO = tar(member(b"a.x", bytes(600)), member(b"b.x", bytes(600)))  # each is three blocks
WITH_DIRECTORIES = [member(b"d/", b"", tars.DIRECTORY), member(b"__meta__"), member(b"__m__/a.json")]
CONTENTS: dict[str, tuple[bytes, list[tuple[str, int, str]]]] = {
    "clean": (tar(*(member(b"d/%d.%b" % (n, ext)) for n in range(300) for ext in (b"jpg", b"seg.png"))), []),
    "of the library": (tars.with_webdataset([{"__key__": f"a/{n:03}", "txt": b"x"} for n in range(20)]), []),
    "many extensions": (tar(*(member(b"a.%d" % number) for number in range(10_000))), []),
    "notes": (
        tar(*WITH_DIRECTORIES, member(b"d/a.x")),
        [("directory", 0, "d"), ("meta", BLOCK, "__meta__"), ("meta", 2 * BLOCK, "__m__/a.json")],
    ),
    "split": (
        tar(*map(member, [b"a.x", b"b.x", b"a.y", b"c.x", b"a.z"])),
        [("split sample", 2 * BLOCK, "a"), ("split sample", 4 * BLOCK, "a")],
    ),
    "twice": (tar(*map(member, [b"a.x", b"a.y", b"a.x"])), [("duplicate extension", 2 * BLOCK, "a.x")]),
    "letter case": (tar(*map(member, [b"a.x", b"a.y", b"a.X"])), [("duplicate extension", 2 * BLOCK, "a.X")]),
    "other letters": (
        tar(*map(member, ["a.é".encode(), "a.É".encode()])),
        [("duplicate extension", BLOCK, "a.É")],
    ),
    "cut in the first header": (TWO[:100], [("not a tar", 0, "")]),
    "cut at the end of its digits": (TWO[:300], [("truncated", 0, "")]),
    "cut in a header": (TWO[: 3 * BLOCK + 100], [("truncated", 3 * BLOCK, "")]),
    "cut in a content": (TWO[: 2 * BLOCK], [("truncated", 0, "a.x")]),
    "cut in the last content": (TWO[: 4 * BLOCK + 1], [("truncated", 3 * BLOCK, "b.x")]),
    "cut between members": (TWO[: 3 * BLOCK], [("no end mark", 3 * BLOCK, "")]),
    "empty": (b"", [("empty", 0, "")]),
    "damaged": (TWO[: 3 * BLOCK] + b"c" + TWO[3 * BLOCK + 1 :], [("damaged", 3 * BLOCK, "")]),
    "text": (b"just text" * 1000, [("not a tar", 0, "")]),
    "joined": (TWO + TWO, [("behind end mark", len(TWO), "")]),
    "zeros": (bytes(100 * BLOCK), [("no samples", -1, "")]),
    "no sample": (tar(member(b"IM-0001")), [("not in a sample", 0, "IM-0001"), ("no samples", -1, "")]),
    "dots": (
        tar(member(b"a.jpg"), *(member(b"d/1.2.840.%d.dcm" % number) for number in range(5))),
        [("dotted name", BLOCK, "d/1.2.840.0.dcm")],
    ),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_a_shard(tmp_path: Path, name: str) -> None:
    content, expected = CONTENTS[name]
    found = lint(write(tmp_path, content))
    assert [one[:3] for one in found.findings] == expected
    assert all(one.is_note == (one.kind in ("directory", "meta")) for one in found.findings)


def test_counts_of_a_shard(tmp_path: Path) -> None:
    found = lint(write(tmp_path, CONTENTS["clean"][0]))
    assert (found.samples, found.members) == (300, 600)
    assert found.patterns == {frozenset([b"jpg", b"seg.png"]): 300}
    found = lint(write(tmp_path, CONTENTS["split"][0]))
    assert (found.samples, len(found.keys)) == (5, 3)
    assert "offset 0 " in found.findings[0].text


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        (b"README", tars.FILE, "no extension"),
        (b"d/LICENSE", tars.FILE, "no extension"),
        (b"d/.hidden.txt", tars.FILE, "starts with a dot"),
        (b"l.txt", tars.SYMLINK, "symbolic link"),
        (b"l.txt", tars.HARD_LINK, "hard link"),
        (b"l.txt", tars.FIFO, "fifo"),
        (b"l.txt", tars.CHARACTER, "character device"),
        (b"l.txt", tars.BLOCK_DEVICE, "block device"),
        (b"l.txt", b"V", "volume label"),
        (b"l.txt", b"M", "another volume"),
        (b"l.txt", b"Z", "unknown type 'Z'"),
    ],
)
def test_members_in_no_sample(tmp_path: Path, name: bytes, kind: bytes, text: str) -> None:
    content = tar(member(b"a.txt", b"x"), member(name, b"", kind, link=b"a.txt"), member(b"a.cls"))
    found = lint(write(tmp_path, content))
    [one] = found.findings
    assert one[:3] == ("not in a sample", 2 * BLOCK, name.decode())
    assert text in one.text
    assert not one.is_note
    assert found.samples == 1  # it does not end the sample around it


@pytest.mark.parametrize("name", [b"d/._a.txt", b"._a.txt", b".DS_Store", b"d/.DS_Store"])
def test_a_hidden_member_that_splits_samples_of_other_readers(tmp_path: Path, name: bytes) -> None:
    content = tar(member(b"d/a.txt", b"x"), member(name), member(b"d/a.cls"))
    [one] = lint(write(tmp_path, content)).findings
    assert ("webdataset" in one.text) == ("wdsfs pack" in one.text) == (len(tars.by_webdataset(content, True)) > 1)


@pytest.mark.parametrize("extension", [b"__key__", b"__url__", b"__local_path__", b"__KEY__"])
def test_a_column_that_webdataset_keeps_for_itself(tmp_path: Path, extension: bytes) -> None:
    content = tar(member(b"a.txt", b"1"), member(b"a." + extension, b"2"))
    assert findings(tmp_path, content) == [("reserved extension", 2 * BLOCK, (b"a." + extension).decode())]
    files = tariterators.tar_file_iterator(io.BytesIO(content))
    with pytest.raises(ValueError, match="duplicate file name"):
        list(tariterators.group_by_keys({**file, "__url__": "u", "__local_path__": "p"} for file in files))


@pytest.mark.parametrize(
    ("clash", "offset"),
    [
        ([b"../a.txt"], 0),
        ([b"b.txt", b"d/../a.txt"], 1),
        ([b"k" * 252 + b".txt"], 0),
        ([b"README", b"README/a.txt"], 0),
        ([b"d/README/a.txt", b"b.txt", b"d/README"], 2),
        ([b"a.b", b"c.txt", b"a.b/c.txt"], 0),
        ([b"d/a.b/x/c.txt", b"d/a.b"], 1),
        ([b"a.b/c.txt", b"a.c", b"a/b.txt", b"c.b/c.txt"], None),
    ],
)
def test_what_tar_cannot_extract(tmp_path: Path, clash: list[bytes], offset: int | None) -> None:
    """A note: readers of samples do not mind. GNU tar itself says whether there is one."""
    content = tar(*(member(name) if len(name) <= 100 else tars.gnu_long(name) + member(b"x") for name in clash))
    found = [one for one in lint(write(tmp_path, content)).findings if one.kind == "unextractable"]
    assert all(one.is_note for one in found)
    assert [one.offset for one in found] == ([] if offset is None else [offset * BLOCK])
    (tmp_path / "x").mkdir()
    command: list[str | Path] = ["tar", "-C", tmp_path / "x", "-xf", tmp_path / "s.tar"]
    assert bool(found) == bool(subprocess.run(command, capture_output=True, check=False).returncode)


NAMES = {
    "odd name": [*b"/abs/a.x ../a.x d//a.x d/./a.x a. a.. a.% %/a.x nul\x00.x".split(), b"n" * 260 + b".x"],
    "": [b"./a.x", b"a b.x", b"100%.x", b"a\nb.x", "ä.x".encode()],
    "not UTF-8": [b"\xff.x"],
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_a_name(tmp_path: Path, kind: str, name: bytes) -> None:
    content = tar(tars.pax({b"path": name}) + member(b"x"))
    odd = [one for one in lint(write(tmp_path, content)).findings if not one.is_note]
    assert [one[:2] for one in odd] == ([(kind, 0)] if kind else [])
    shown = "\\xff.x" if name == b"\xff.x" else name.decode()
    assert [one.member for one in odd] == [shown for _ in odd]


def test_a_global_header_that_no_member_follows(tmp_path: Path) -> None:
    comment = tars.pax({b"comment": b"x"}, b"g")
    content = tar(comment, member(b"a.x"), comment, comment)
    with pytest.raises(tarfile.ReadError):
        tars.by_webdataset(content)
    assert findings(tmp_path, content) == [("trailing header", len(comment) + BLOCK, "")]
    assert findings(tmp_path, tar(comment)) == [("no samples", -1, ""), ("trailing header", 0, "")]
    assert findings(tmp_path, tar(comment, member(b"a.x"))) == []
    for header in (tars.pax({b"path": b"b.x"}), tars.gnu_long(b"b.x", b"L"), tars.gnu_long(b"b.x", b"K")):
        with pytest.raises(tarfile.ReadError):
            tars.by_webdataset(tar(member(b"a.x"), header))
        assert findings(tmp_path, tar(member(b"a.x"), header)) == [("damaged", BLOCK, "")]


def test_every_odd_tar_has_findings_of_its_problems(tmp_path: Path) -> None:
    """... and none brings the lint down. A dangling hard link is just in no sample here."""
    for name, case in tars.ODD.items():
        path = tmp_path / "odd.tar"
        case.write(path)
        kinds = {one.kind for one in lint(os.fsencode(path)).findings}
        assert set(case.problems) - {"dangling link"} <= kinds, name


@given(st.lists(st.binary(min_size=1, max_size=12).filter(lambda name: b"\0" not in name), max_size=12))
@settings(max_examples=200, deadline=None)
def test_findings_are_text_on_one_line(names: list[bytes]) -> None:
    found = Lint()
    reader = lint_module._ShardLinter(found)
    with tars.opened(tar(*map(member, names))) as fd:
        for chunk in scan.scan(fd, []):
            reader.read(chunk)
    reader.end_sample()
    for one in found.findings:
        assert shown(one.line("a.tar")).isprintable()  # as it is written; the name itself is exact
        (one.member + one.text).encode()


def test_shards_that_cannot_be_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.tar")
    with pytest.raises(MissingShard, match=r"nothing\.tar: there is no such shard"):
        lint(os.fsencode(tmp_path / "nothing.tar"))
    for path in (tmp_path, tmp_path / "pipe.tar"):
        with pytest.raises(UnreadableShard, match=str(path)):
            lint(os.fsencode(path))


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    lint(write(tmp_path, tar(member(b"a.x"))))
    with pytest.raises(UnreadableShard):
        lint(os.fsencode(tmp_path))
    assert len(os.listdir("/proc/self/fd")) == before


# --- limits -----------------------------------------------------------------------------------------------


def test_only_so_many_findings_of_a_kind_are_told_one_by_one(tmp_path: Path) -> None:
    names = [b"stray%d" % number for number in range(EXAMPLES + 7)] + [b"a.x", b"a.x"]
    found = lint(write(tmp_path, tar(*map(member, names))))
    assert found.counts == {"not in a sample": EXAMPLES + 7, "duplicate extension": 1}
    told = list(Judge().add("s", found))
    assert len(told) == EXAMPLES + 2
    assert told[-1] == LintFinding("not in a sample", -1, "", "and 7 more of this kind")


def test_only_so_many_samples_without_an_extension_are_told_one_by_one(tmp_path: Path) -> None:
    names = []
    for number in range(3000):
        # Nearly every sample has another set of extensions, and lacks one of the usual two.
        names += [b"%d.%b" % (number, ext) for ext in ([b"jpg", b"cls"] if number % 3 else [b"jpg"])]
        names.append(b"%d.x%d" % (number, number))
    judge = Judge()
    found = lint(write(tmp_path, tar(*map(member, names))))
    assert sum(map(len, found.examples.values())) <= KEPT
    assert list(judge.add("s", found)) == []
    told = [one for _, one in judge.missing()]
    assert len(told) == EXAMPLES + 1
    assert all(one.text == "has no cls" for one in told[:-1])
    assert told[-1].offset == -1
    assert f"and {1000 - EXAMPLES} more samples" in told[-1].text


def test_only_so_many_sets_of_extensions_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lint_module, "PATTERNS", 5)
    found = lint(write(tmp_path, tar(*(member(b"%d.%d" % (n, n)) for n in range(20)))))
    assert len(found.patterns) == 5
    assert found.samples == 20


# --- a set ------------------------------------------------------------------------------------------------


def judged(directory: Path, *contents: bytes) -> Judge:
    """Judge the shards `s0`, `s1` ..., read from the last to the first: the order does not matter."""
    judge = Judge()
    for number, content in reversed([*enumerate(contents)]):
        list(judge.add(f"s{number}", lint(write(directory, content))))
    return judge


@pytest.mark.parametrize(
    "contents",
    [
        [],
        [END],
        [END, b"", END],
        [tar(*(member(b"%d-%d.%b" % (s, n, e)) for n in range(5) for e in (b"a", b"b"))) for s in range(4)],
        [tar(*map(member, [b"a.x", b"b.x", b"a.x"]))],  # no key is shared with its own shard
        [tar(*map(member, [b"a.x", b"a.y", b"b.x"]))],  # just half of the samples have y
    ],
)
def test_a_set_without_findings(tmp_path: Path, contents: list[bytes]) -> None:
    judge = judged(tmp_path, *contents)
    assert [*judge.shared_keys(), *judge.missing()] == []


def test_keys_that_an_earlier_shard_has_too(tmp_path: Path) -> None:
    judge = judged(
        tmp_path,
        tar(*map(member, [b"a.x", b"b.x", b"c.x"])),
        tar(*map(member, [b"d.x", b"c.x", b"a.x"])),
        tar(*map(member, [b"e.x"])),
        tar(*map(member, [b"c.x", b"d.x", b"e.x"])),
    )
    told = [(shard, one.kind, one.offset, one.text.split(";")[0]) for shard, one in judge.shared_keys()]
    assert told == [
        ("s1", "shared key", BLOCK, "2 of its keys are also in s0"),
        ("s3", "shared key", 0, "2 of its keys are also in s1"),
        ("s3", "shared key", 2 * BLOCK, "1 of its keys are also in s2"),
    ]


def test_samples_without_an_extension_that_most_others_have(tmp_path: Path) -> None:
    whole = [member(b"a%d.%b" % (number, ext)) for number in range(4) for ext in (b"jpg", b"cls")]
    judge = judged(
        tmp_path,
        tar(*whole, member(b"b.jpg")),
        tar(member(b"c.txt"), member(b"d.jpg"), member(b"d.cls"), member(b"d.txt")),
    )
    assert list(judge.missing()) == [
        ("s0", LintFinding("missing extension", 8 * BLOCK, "b", "has no cls")),
        ("s1", LintFinding("missing extension", 0, "c", "has no cls, jpg")),
    ]


def samples_of(first: int, *columns: bytes, content: bytes = b"1", count: int = 6) -> list[bytes]:
    return [member(b"%d.%b" % (first + n, column), content) for n in range(count) for column in columns]


def test_a_column_that_comes_later(tmp_path: Path) -> None:
    """Hugging Face's loader drops it; where another column is missing there, that is worse."""
    columns = [line.encode().split() for line in ("jpg é", "JPG É txt", "png é", "png é txt")]
    judge = judged(tmp_path, *(tar(*samples_of(10 * n, *some)) for n, some in enumerate(columns)))
    told = [(path, one.kind, one.offset, one.member, one.is_note) for path, one in judge.late()]
    assert told == [
        ("s1", "extra column", 0, "10", True),
        ("s2", "late column", 0, "20", False),
        ("s3", "late column", 0, "30", False),
    ]
    assert "the column png is in 12 samples of the set" in list(judge.late())[1][1].text


def test_late_columns_are_bounded(tmp_path: Path) -> None:
    many = [member(b"b.x%d" % number) for number in range(EXAMPLES + 7)]
    judge = judged(tmp_path, tar(*samples_of(0, b"jpg")), tar(*many))
    told = [one.text for _, one in judge.late()]
    assert len(told) == EXAMPLES + 1
    assert told[-1] == "and 7 more columns"
    judge = judged(tmp_path, tar(*samples_of(0, b"jpg")), tar(member(b"b.jpg"), *many))
    assert all(one.is_note for _, one in judge.late())


@pytest.mark.parametrize("count", [1, 3, EXAMPLES + 7])
def test_members_without_bytes_in_a_column_with_content(tmp_path: Path, count: int) -> None:
    whole = tar(*samples_of(0, b"jpg", b"cls", b"en.txt", count=150))
    empty = [samples_of(1000, column, content=b"", count=count) for column in (b"jpg", b"en.txt", b"nothing")]
    judge = judged(tmp_path, whole, tar(*itertools.chain(*empty)))
    told = [(path, one.kind, one.offset, one.member) for path, one in judge.empty()]
    assert told[0] == ("s1", "empty member", 0, "1000.jpg")
    assert len(told) == min(count, EXAMPLES + 1)


def test_messages_about_columns_are_short(tmp_path: Path) -> None:
    many = [member(b"a.%d%b" % (number, b"x" * 80)) for number in range(1000)]
    judge = judged(tmp_path, tar(*many, member(b"b.x")))
    judge.samples = 1  # so that each column is one of most samples
    texts = [one.text for _, one in (*judge.uneven(), *judge.missing())]
    assert len(texts) == 3
    assert max(map(len, texts)) < 4000


def test_an_extension_in_another_letter_case_is_named(tmp_path: Path) -> None:
    keys = [(b"a", b"jpg"), (b"b", b"jpg"), (b"c", b"JPG"), (b"d", b"png"), (b"e", b"jpg")]
    for most, expected in (
        (keys[:4], {}),  # two of four are not most
        (keys, {"c": "has no jpg, but JPG (the same to webdataset, not to others)", "d": "has no jpg"}),
    ):
        judge = judged(tmp_path, tar(*(member(key + b"." + one) for key, own in most for one in (own, b"cls"))))
        assert {finding.member: finding.text for _, finding in judge.missing()} == expected
