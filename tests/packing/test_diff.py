"""The changes of an overlay, in samples: uppers made by hand over trees of every kind."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests import tars
from tests.uppers import NO_RULES, OPAQUE, WHITEOUT, a_tree, find, write_upper
from wdsfs.packing import reasons
from wdsfs.packing.diff import ChangedSample, Changes
from wdsfs.packing.plan import Remark
from wdsfs.packing.upper_walk import Rules
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.tree import View

FIRST = tars.tar(
    tars.member(b"d/", kind=tars.DIRECTORY),
    tars.member(b"d/a.cls", b"1"),
    tars.member(b"d/a.jpg", b"A"),
    tars.member(b"README", b"read me"),
    tars.member(b"d/b.cls", b"2"),
    tars.member(b"d/b.jpg", b"B"),
    tars.member(b"c.txt", b"c"),
)
SECOND = tars.tar(tars.member(b"e.txt", b"e"), tars.member(b"d/f.txt", b"f"))


def found(
    home: Path,
    upper: Mapping[Any, Any],
    *shards: bytes,
    layout: str = "samples",
    names: str = "ext",
    merge: bool = False,
    rules: Rules = NO_RULES,
) -> Changes:
    write_upper(home / "upper", upper)
    with a_tree(home, list(shards or (FIRST, SECOND)), View(layout, names), merge) as tree:
        return find(tree, home / "upper", rules)


def told(result: Changes) -> list[tuple[Any, ...]]:
    """The samples without the columns that are empty at the end."""
    rows = []
    for sample in [*result.samples, *result.others]:
        row = list(sample)
        while not row[-1]:
            row.pop()
        rows.append(tuple(row))
    return rows


def names_of(result: Changes, number: int) -> list[tuple[int, list[bytes]]]:
    return [(member, [one.name for one in new]) for member, new in result.shards[number].members.items()]


def test_nothing(tmp_path: Path) -> None:
    assert found(tmp_path, {}) == Changes()
    assert found(tmp_path, {"s0": {"d": {"a": {}}}}) == Changes()


FILES: dict[str, Any] = {"layout": "files"}
LINKED = tars.tar(
    tars.member(b"a.txt", b"a"),
    tars.member(b"l", kind=tars.HARD_LINK, link=b"a.txt"),
    tars.member(b"s.txt", kind=tars.SYMLINK, link=b"a.txt"),
    tars.B,
)


@pytest.mark.parametrize(
    ("upper", "options", "samples"),
    [
        pytest.param(
            {"s0": {"d": WHITEOUT}, "s1": WHITEOUT},
            {},
            [
                ("removed", b"s0/d/a", (), (), (b"cls", b"jpg")),
                ("removed", b"s0/d/b", (), (), (b"cls", b"jpg")),
                ("removed", b"s1/e", (), (), (b"txt",)),
                ("removed", b"s1/d/f", (), (), (b"txt",)),
            ],
            id="directories",
        ),
        pytest.param(
            {"s0": {"d": {"a": {"cls": WHITEOUT, "jpg": WHITEOUT}}}},
            {},
            [("removed", b"s0/d/a", (), (), (b"cls", b"jpg"))],
            id="all files",
        ),
        pytest.param(  # as after `rm -r` and `mkdir`: what has the name of a member takes its place
            {"s0": {"d": {OPAQUE: True, "a": {OPAQUE: True, "jpg": b"new", "txt": b"t"}}}},
            {},
            [
                ("changed", b"s0/d/a", (b"txt",), (b"jpg",), (b"cls",)),
                ("removed", b"s0/d/b", (), (), (b"cls", b"jpg")),
            ],
            id="opaque",
        ),
        pytest.param(
            {"s0": {"d": {"a": {"a.jpg": b"new", "a.x.txt": b""}, "n": {"n.txt": b""}}}},
            {"names": "full"},
            [("changed", b"s0/d/a", (b"x.txt",), (b"jpg",)), ("added", b"s0/d/n", (b"txt",))],
            id="full names",
        ),
        pytest.param(
            {
                "s0": {
                    "d": {"a.jpg": b"new", "a.txt": b"", "b.jpg": WHITEOUT, "n.cls": b"", "n.jpg": b""},
                    "README": b"changed",
                    "top.txt": b"",
                },
                "more": {"x.txt": b""},
            },
            FILES,
            [
                ("changed", b"s0/d/a", (b"txt",), (b"jpg",)),
                ("changed", b"s0/d/b", (), (), (b"jpg",)),
                ("added", b"s0/d/n", (b"cls", b"jpg")),
                ("added", b"s0/top", (b"txt",)),
                ("added", b"more/x", (b"txt",)),
                ("changed", b"s0/README"),
            ],
            id="files",
        ),
        pytest.param(
            {"d": {"f.cls": b"", "f.txt": WHITEOUT, "a.txt": b""}, "n.txt": b""},
            {"layout": "files", "merge": True},
            [
                ("changed", b"d/a", (b"txt",)),
                ("changed", b"d/f", (b"cls",), (), (b"txt",)),
                ("added", b"n", (b"txt",)),
            ],
            id="merged files",
        ),
        pytest.param(
            {"d": WHITEOUT},
            {"merge": True},
            [
                ("removed", b"d/a", (), (), (b"cls", b"jpg")),
                ("removed", b"d/b", (), (), (b"cls", b"jpg")),
                ("removed", b"d/f", (), (), (b"txt",)),
            ],
            id="a folder of all shards",
        ),
        pytest.param(
            {"a~s1": {"txt": b"new"}},
            {"merge": True, "shards": (tars.tar(tars.A), tars.tar(tars.A))},
            [("changed", b"a~s1", (), (b"txt",))],
            id="a second sample of a name",
        ),
        pytest.param(
            {"s0": {"b.txt": b"new", "s.txt": WHITEOUT}},
            {**FILES, "shards": (LINKED,)},
            [("changed", b"s0/b", (), (b"txt",)), ("removed", b"s0/s.txt")],
            id="beside hard links",
        ),
        pytest.param(
            {"s0": {"s.txt": b"new"}},
            {**FILES, "shards": (LINKED,)},
            [("added", b"s0/s", (b"txt",)), ("removed", b"s0/s.txt")],
            id="a file in place of a symbolic link",
        ),
    ],
)
def test_samples(
    upper: dict[Any, Any], options: dict[str, Any], samples: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    options = dict(options)
    result = found(tmp_path, upper, *options.pop("shards", ()), **options)
    assert told(result) == samples
    assert not result.unpackable + result.conflicts


def test_new_samples(tmp_path: Path) -> None:
    upper = {
        "s0": {"z": {"txt": b"z"}, "d": {"n": {"jpg": b"j", "cls": b"c"}}},
        "more": {"x": {"y": {"txt": b""}}},
    }
    result = found(tmp_path, upper)
    assert told(result) == [
        ("added", b"s0/d/n", (b"cls", b"jpg")),
        ("added", b"s0/z", (b"txt",)),
        ("added", b"more/x/y", (b"txt",)),
    ]
    assert [sample.key for sample in result.shards[0].appended] == [b"d/n", b"z"]
    assert [new.name for new in result.shards[0].appended[0].members] == [b"d/n.cls", b"d/n.jpg"]
    assert [(top, [one.key for one in samples]) for top, samples in result.further.items()] == [
        (b"more", [b"x/y"])
    ]


def test_a_file_that_is_what_the_shard_has_is_no_change(tmp_path: Path) -> None:
    """As after a `chmod`, or when an editor saved the same again."""
    write_upper(tmp_path / "upper", {"s0": {"d": {"a": {OPAQUE: True, "jpg": b"A", "cls": b"1"}}}})
    for name in ("jpg", "cls"):
        os.utime(tmp_path / "upper/s0/d/a" / name, ns=(0, 10**9 + 5))
    paths = (b"s0/d/a/cls", b"s0/d/a/jpg")
    assert found(tmp_path, {}) == Changes(notes=[Remark(path, reasons.SAME) for path in paths])


def test_a_file_with_another_time(tmp_path: Path) -> None:
    """As after `rsync` without `-t`, or `touch`."""
    upper = {"s0": {"d": {"a": {"cls": b"1"}, "b": {"cls": b"2", "jpg": b"new"}}}}
    result = found(tmp_path, upper)
    assert result.samples == [
        ChangedSample("time only", b"s0/d/a", times=(b"cls",)),
        ChangedSample("changed", b"s0/d/b", changed=(b"jpg",), times=(b"cls",)),
    ]
    assert sum(len(news) for news in result.shards[0].members.values()) == 3
    result = found(tmp_path, {}, rules=Rules(ignore_times=True))
    assert result.samples == [ChangedSample("changed", b"s0/d/b", changed=(b"jpg",))]
    assert [one.path for one in result.notes if one.reason == reasons.TIME_IGNORED] == [
        b"s0/d/a/cls",
        b"s0/d/b/cls",
    ]
    assert sum(len(news) for news in result.shards[0].members.values()) == 1


def test_a_member_of_no_sample_with_another_time(tmp_path: Path) -> None:
    result = found(tmp_path, {"s0": {"README": b"read me"}}, layout="files")
    assert result.others == [ChangedSample("time only", b"s0/README")]


# --- files that programs leave -------------------------------------------------------------------------------

LEFT = [
    "txt~",
    ".txt.swp",
    ".txt.swx",
    "#txt#",
    ".DS_Store",
    "._jpg",
    "Thumbs.db",
    "desktop.ini",
    ".directory",
    "4913",
]
LEFT += [".fuse_hidden0000000100000001", ".nfs000000000000a1b2", ".jpg.Ab3dE6", ".~lock.csv#", ".goutputstream-X1"]


def test_what_programs_leave_behind(tmp_path: Path) -> None:
    """No column of a sample; nor does it make a sample of a directory."""
    sample = {**dict.fromkeys(LEFT, b""), "txt": b"", ".#txt": "user@host.1"}
    upper = {"s0": {"d": {"a": sample}, "n": {".DS_Store": b""}}, "Thumbs.db": b""}
    result = found(tmp_path, upper)
    assert told(result) == [("changed", b"s0/d/a", (b"txt",))]
    assert not result.unpackable + result.conflicts + result.notes
    paths = ["Thumbs.db", "s0/n/.DS_Store", "s0/d/a/.#txt", *(f"s0/d/a/{name}" for name in LEFT)]
    assert result.leavings == sorted(Remark(os.fsencode(path), reasons.LEAVING) for path in paths)
    result = found(tmp_path, {}, rules=Rules(with_leavings=True))
    assert result.leavings == []
    assert [one.path for one in result.unpackable] == [b"Thumbs.db", b"s0/d/a/.#txt"]
    assert b"txt~" in result.samples[0].added


@pytest.mark.parametrize("name", [".x.sha256", ".x.tensor", ".x.SHA256", ".x.Tensor"])
def test_an_extension_that_is_no_temporary_name_of_rsync(name: str, tmp_path: Path) -> None:
    result = found(tmp_path, {"s0": {"d": {"a": {name: b""}}}})
    assert result.leavings == []
    assert told(result) == [("changed", b"s0/d/a", (name.encode(),))]


def test_directories_that_programs_leave_behind(tmp_path: Path) -> None:
    upper = {"s0": {"d": {"a": {".ipynb_checkpoints": {"txt": b""}}}}, ".Trash-0": {"files": {"x": {"txt": b""}}}}
    result = found(tmp_path, upper)
    assert [one.path for one in result.leavings] == [b".Trash-0/files/x/txt", b"s0/d/a/.ipynb_checkpoints/txt"]
    assert not result.samples + result.unpackable


@pytest.mark.parametrize("layout", ["samples", "files"])
@pytest.mark.parametrize(("was", "left"), [("txt~", False), ("txt", True)])
def test_a_column_that_is_called_so_in_its_shard(was: str, left: bool, layout: str, tmp_path: Path) -> None:
    """It stays one when it is written and when its sample is renamed. But `txt~` may be the `txt` of the shard,
    which an editor has put there."""
    shard = tars.tar(*(tars.member(b"k." + one, b"A") for one in (b"jpg", b"txt", b"txt~")))
    files = {"z.jpg": b"A", "z.txt~": b"A", "k.jpg": WHITEOUT, "k.txt": WHITEOUT, "k.txt~": WHITEOUT}
    sample = {OPAQUE: True, "jpg": b"A", "txt~": b"A"}
    assert found(tmp_path, {"s0": {"k.txt~": b"new"} if layout == "files" else {"k": {"txt~": b"new"}}}, shard,
                 layout=layout).samples == [ChangedSample("changed", b"s0/k", (), (b"txt~",))]  # fmt: skip
    for path in sorted((tmp_path / "upper/s0").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    write_upper(tmp_path / "upper", {"s0": files if layout == "files" else {"k": WHITEOUT, "z": sample}})
    separator = "." if layout == "files" else "/"
    with a_tree(tmp_path, [shard], View(layout)) as tree:
        checksum = tree.lower.fingerprint(0).sum
        for new, old in (("jpg", "jpg"), ("txt~", was)):
            value = b"%d:%x" % (tree.resolve(f"s0/k{separator}{old}".encode()).inode, checksum)
            os.setxattr(tmp_path / f"upper/s0/z{separator}{new}", "user.wdsfs.origin", value)
    result = found(tmp_path, {}, shard, layout=layout)
    assert [one.path for one in result.leavings] == [f"s0/z{separator}txt~".encode()] * left


def test_new_files_of_a_merged_set_look_into_each_shard_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = [tars.tar(tars.member(b"d/%d.txt" % number), tars.member(b"d/k.txt")) for number in range(12)]
    upper = {"d": {f"{number}.cls": b"" for number in range(2, 30)}, "k.txt": b"", "e": {"2.cls": b""}}
    record = Mock(side_effect=ShardSet.record)
    monkeypatch.setattr(ShardSet, "record", lambda *arguments: record(*arguments))
    result = found(tmp_path, upper, *shards, layout="files", merge=True)
    assert [sample.path for sample in result.samples if sample.kind == "changed"] == [
        b"d/%d" % number for number in range(2, 12)
    ]
    assert [sample.kind for sample in result.samples].count("added") == 18 + 2
    assert record.call_count < len(shards) * 29


# --- extensions that readers take for one ------------------------------------------------------------------


CASES = tars.tar(*(tars.member(b"k." + one, b"A") for one in (b"jpg", b"JPG", b"cls")))


@pytest.mark.parametrize(
    ("upper", "shards", "left_out", "samples"),
    [
        (
            {"s0": {"d": {"a": {"JPG": b"", "Cls": b"", "cls": WHITEOUT}, "b": {"CLS": b""}}}},
            (),
            [b"s0/d/a/JPG", b"s0/d/b/CLS"],
            [("changed", b"s0/d/a", (b"Cls",), (), (b"cls",))],
        ),
        (
            {"s0": {"n": {"txt": b"", "TXT": b"", "seg.Png": b"", "seg.png": b""}}},
            (),
            [b"s0/n/seg.png", b"s0/n/txt"],
            [("added", b"s0/n", (b"TXT", b"seg.Png"))],
        ),
        ({"s0": {"k": {"jpg": b"new"}}}, (CASES,), [], [("changed", b"s0/k", (), (b"jpg",))]),  # it stays
        (
            {"s0": {"k": {"cls": WHITEOUT, "Jpg": b""}}},
            (CASES,),
            [b"s0/k/Jpg"],
            [("changed", b"s0/k", (), (), (b"cls",))],
        ),
    ],
)
def test_new_extensions_that_differ_only_in_case_are_left_out(
    upper: dict[Any, Any],
    shards: tuple[bytes, ...],
    left_out: list[bytes],
    samples: list[tuple[Any, ...]],
    tmp_path: Path,
) -> None:
    result = found(tmp_path, upper, *shards)
    assert result.unpackable == [Remark(path, reasons.ONLY_CASE) for path in left_out]
    assert told(result) == samples


def test_a_renamed_sample_keeps_extensions_that_differ_in_case(tmp_path: Path) -> None:
    upper = {"s0": {"k": WHITEOUT, "z": {OPAQUE: True, "jpg": b"A", "JPG": b"A", "Cls": b"", "cls": b""}}}
    write_upper(tmp_path / "upper", upper)
    with a_tree(tmp_path, [CASES], View()) as tree:
        inode, checksum = tree.resolve(b"s0/k").inode, tree.lower.fingerprint(0).sum
    os.setxattr(tmp_path / "upper/s0/z", "user.wdsfs.origin", b"%d:%x" % (inode, checksum))
    result = found(tmp_path, {}, CASES)
    assert [sample.kind for sample in result.samples] == ["renamed"]
    assert result.unpackable == [Remark(b"s0/z/Cls", reasons.ONLY_CASE)]


def test_a_file_in_place_of_a_directory_and_the_other_way_round(tmp_path: Path) -> None:
    result = found(tmp_path, {"s0": {"d": {"a": {"jpg": {"left": b"l"}}, "b": b"file"}}})
    assert told(result) == [
        ("changed", b"s0/d/a", (), (), (b"jpg",)),
        ("removed", b"s0/d/b", (), (), (b"cls", b"jpg")),
        ("added", b"s0/d", (b"b",)),
        ("added", b"s0/d/a/jpg", (b"left",)),
    ]
    assert [sample.key for sample in result.shards[0].appended] == [b"d", b"d/a/jpg"]


def test_odd_names(tmp_path: Path) -> None:
    """Aliases and escapes stand for what the tar has; new names become what is shown under them again."""
    odd = tars.tar(
        tars.member(b"./k.jpg", b"1"),
        tars.member(b"./k.jpg", b"2"),
        tars.member(b"m.txt", b""),
        tars.member(b"./k.jpg", b"3"),
        tars.member(b"../up.", b"x"),
        tars.member(b"/abs/a.txt", b"y"),
        tars.gnu_long(b"x" * 300 + b".txt"),
        tars.member(b"x", b"long"),
    )
    write_upper(
        tmp_path / "upper",
        {
            "s0": {
                "k": {"jpg~2": b"two", "txt": b"new"},
                "k~2": {"jpg": b"three"},
                "%2E%2E": {"up": {"%": b"X"}, "100%": {"txt": b""}},
                "%": {"abs": {"b": {"txt": b"y"}}},
            }
        },
    )
    with a_tree(tmp_path, [odd], View()) as tree:
        [long] = [e.name for e in tree.listing(tree.resolve(b"s0").inode) if e.name.startswith(b"xxx")]
        write_upper(tmp_path / "upper", {"s0": {os.fsdecode(long): {"txt": b"L", "cls": b""}}})
        result = find(tree, tmp_path / "upper")
    replaced = {new.name for news in result.shards[0].members.values() for new in news}
    assert replaced == {b"./k.jpg", b"../up.", b"x" * 300 + b".txt"}
    assert sum(len(news) for news in result.shards[0].members.values()) == 4
    following = [[new.name for new in news] for news in result.shards[0].following.values()]
    assert sorted(following) == [[b"./k.txt"], [b"x" * 300 + b".cls"]]
    assert [sample.key for sample in result.shards[0].appended] == [b"../100%", b"/abs/b"]
    assert not result.unpackable + result.conflicts


def nested(depth: int, inner: dict[str, Any]) -> dict[str, Any]:
    """Directories in directories, `depth` of them."""
    for _ in range(depth):
        inner = {"d": inner}
    return inner


DEEP = f"{reasons.TOO_LONG}: its name has 257 folders, and the limit is 256"


def test_a_name_up_to_the_limit_of_readers_can_be_packed(tmp_path: Path) -> None:
    assert not found(tmp_path, {"s0": nested(257, {"txt": b""})}).unpackable


@pytest.mark.parametrize(
    ("upper", "options", "path", "reason"),
    [
        ({"file": b""}, {}, b"file", reasons.OUTSIDE),
        ({"s0": {"file": b""}}, {}, b"s0/file", reasons.OUTSIDE),
        ({"new": {"file": b""}}, {}, b"new/file", reasons.OUTSIDE),
        ({"s0": {"d": {"a": {"link": "jpg"}}}}, {}, b"s0/d/a/link", reasons.SYMBOLIC),
        ({"s0": {"d": {"a": {"jpg": "cls"}}}}, {}, b"s0/d/a/jpg", reasons.SYMBOLIC),
        ({"s0": {"d": {"a": {"pipe": os.mkfifo}}}}, {}, b"s0/d/a/pipe", reasons.SPECIAL),
        ({"s0": {"a.b": {"txt": b""}}}, {}, b"s0/a.b/txt", reasons.DOTTED_KEY),
        ({"s0": {".a": {"txt": b""}}}, {}, b"s0/.a/txt", reasons.HIDDEN),
        ({"s0": {"__m__": {"a": {"txt": b""}}}}, {}, b"s0/__m__/a/txt", reasons.META),
        ({"s0": {"d": {"a": {"__key__": b""}}}}, {}, b"s0/d/a/__key__", reasons.RESERVED_COLUMN),
        ({"s0": {"n": {"__URL__": b""}}}, {}, b"s0/n/__URL__", reasons.RESERVED_COLUMN),
        ({"s0": {"n": {"__local_path__": b""}}}, {}, b"s0/n/__local_path__", reasons.RESERVED_COLUMN),
        ({"s0": {"%2E": {"a": {"txt": b""}}}}, {}, b"s0/%2E/a/txt", reasons.ODD_FOLDER),
        ({"s0": nested(258, {"txt": b""})}, {}, b"s0/" + b"d/" * 258 + b"txt", DEEP),
        ({"new": nested(258, {"txt": b""})}, {}, b"new/" + b"d/" * 258 + b"txt", DEEP),
        ({"s0": nested(257, {"a.txt": b""})}, FILES, b"s0/" + b"d/" * 257 + b"a.txt", DEEP),
        ({"s0": {"n": {"é": b"", "É": b""}}}, {}, "s0/n/é".encode(), reasons.ONLY_CASE),
        ({"s0": {"d": {"a": {"noext": b""}}}}, {"names": "full"}, b"s0/d/a/noext", reasons.NO_EXTENSION),
        ({"s0": {"d": {"a": {"b.jpg": b""}}}}, {"names": "full"}, b"s0/d/a/b.jpg", reasons.OTHER_STEM),
        ({"s0": {"d": {"a": {".hidden": b""}}}}, {"names": "full"}, b"s0/d/a/.hidden", reasons.OTHER_STEM),
        ({"x.txt": b""}, FILES, b"x.txt", reasons.OUTSIDE_FILES),
        ({"s0": {"LICENSE": b""}}, FILES, b"s0/LICENSE", reasons.NO_EXTENSION),
        ({"s0": {"d": {".hidden": b""}}}, FILES, b"s0/d/.hidden", reasons.HIDDEN),
        ({"s0": {"__m__": {"a.txt": b""}}}, FILES, b"s0/__m__/a.txt", reasons.META),
        ({"s0": {"d": {"a.JPG": b""}}}, FILES, b"s0/d/a.JPG", reasons.ONLY_CASE),
        ({"x": b""}, {"merge": True}, b"x", reasons.OUTSIDE_MERGED),
    ],
)
def test_what_cannot_be_packed(
    upper: dict[Any, Any], options: dict[str, Any], path: bytes, reason: str, tmp_path: Path
) -> None:
    result = found(tmp_path, upper, **options)
    assert result.unpackable == [Remark(path, reason)]


@pytest.mark.parametrize(
    ("upper", "options", "path", "shown"),
    [
        ({"s0": {"d": {"a": {"%2E": b"", "x%2E": b""}}}}, {}, b"s0/d/a/x%2E", "x%252E"),
        ({"s0": {"d": {"K.%2E": b"", "K.%": b""}}}, FILES, b"s0/d/K.%2E", "K.%252E"),
        ({"new": {"k%25": {"txt": b""}}}, {}, b"new/k%25", "k%2525"),
    ],
)
def test_a_name_that_comes_back_in_another_form_has_a_note(
    tmp_path: Path, upper: dict[Any, Any], options: dict[str, Any], path: bytes, shown: str
) -> None:
    result = found(tmp_path, upper, **options)
    assert result.notes == [Remark(path, f"{reasons.ESCAPED} {shown}")]


IMAGES = {f"{number}.jpg": b"" for number in range(20)}


FEW, PLAIN = {"jpg": b"", "cls": b"", "en.txt": b""}, {str(number): b"" for number in range(20)}


@pytest.mark.parametrize("files", [IMAGES, FEW, PLAIN])
def test_a_copied_folder_is_one_sample(tmp_path: Path, files: dict[str, bytes]) -> None:
    result = found(tmp_path, {"s0": {"cat": files}, "new": {"dog": files}})
    noted = [remark.path for remark in result.notes if remark.reason == reasons.FOLDER]
    assert noted == ([b"new/dog", b"s0/cat"] if files is IMAGES else [])
    frames = tars.tar(*(tars.member(b"a.%b" % name.encode()) for name in IMAGES))
    (tmp_path / "frames").mkdir()
    assert not found(tmp_path / "frames", {"s0": {"cat": files}, "new": {"dog": files}}, frames).notes


def test_notes(tmp_path: Path) -> None:
    result = found(tmp_path, {"s0": {"empty": {}, "nothing": WHITEOUT}, "top": {"sub": {}}})
    assert not result.unpackable + result.conflicts
    assert result.notes == [
        Remark(b"s0/empty", reasons.EMPTY_DIRECTORY),
        Remark(b"s0/nothing", reasons.DANGLING),
        Remark(b"top/sub", reasons.EMPTY_DIRECTORY),
    ]


LONG = "k" * 250


@pytest.mark.parametrize(
    ("upper", "path", "reason"),
    [
        ({"s0": {"%2E%2E": {"a": {"txt": b""}}}}, "s0/%2E%2E/a/txt", "`..` is part of it"),
        ({"s0": {LONG: {"jpgjpg": b""}}}, f"s0/{LONG}/jpgjpg", "it is too long for a file system"),
    ],
)
def test_names_that_tar_cannot_extract(upper: dict[Any, Any], path: str, reason: str, tmp_path: Path) -> None:
    result = found(tmp_path, upper)
    assert result.notes == [Remark(path.encode(), f"{reasons.UNEXTRACTABLE}: {reason}")]
    assert not result.unpackable + result.conflicts


FOLDER = tars.tar(tars.member(b"h.b/c.txt", b""), tars.B)


@pytest.mark.parametrize(
    ("upper", "path"),
    [
        ({"s0": {"README": {"x": {"txt": b""}}}}, "s0/README/x/txt"),  # a member of no sample, which is not shown
        ({"s0": {"c.txt": {"x": {"txt": b""}}}}, "s0/c.txt/x/txt"),
        ({"s0": {"d": {"a.jpg": {"x": {"txt": b""}}}}}, "s0/d/a.jpg/x/txt"),
        ({"s0": {"c": {"txt": WHITEOUT, "x": b""}, "c.txt": {"x": {"txt": b""}}}}, None),
        ({"s0": {"c": {"txt": b"new"}, "c.txt": {"x": {"txt": b""}}}}, "s0/c.txt/x/txt"),
        ({"more": {"n": {"txt": b""}, "n.txt": {"x": {"txt": b""}}}}, "more/n.txt/x/txt"),
        ({"s0": {"h": {"b": b""}}}, "s0/h/b"),  # where the shard has a directory
    ],
)
def test_a_file_where_another_member_needs_a_directory(
    upper: dict[Any, Any], path: str | None, tmp_path: Path
) -> None:
    result = found(tmp_path, upper, *([FIRST, SECOND] if "h" not in upper.get("s0", ()) else [FOLDER]))
    paths = {remark.path for remark in result.notes if remark.reason == reasons.FILE_AND_FOLDER}
    assert os.fsencode(path) in paths if path else not paths


@pytest.mark.parametrize(
    "upper",
    [
        {"a": WHITEOUT, "z": {OPAQUE: True, "a.jpg": b"A", "a.cls": b"1"}},
        {"a": WHITEOUT, "b": {OPAQUE: True, "a.jpg": b"A", "a.cls": b"1"}},
        {"z": {"a.jpg": b"A", "a.cls": b"1"}},
    ],
    ids=["mv a z", "rm -r b; mv a b", "cp -r a z"],
)
def test_a_sample_renamed_without_its_files_is_never_left_out(upper: dict[Any, Any], tmp_path: Path) -> None:
    result = found(tmp_path, {"s0": {"d": upper}}, names="full")
    assert [one.reason for one in result.conflicts] == [reasons.OLD_STEM] * 2
    assert not result.unpackable


# --- links -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.txt", "l"])
@pytest.mark.parametrize("what", [WHITEOUT, b"new"])
def test_hard_links_are_not_changed(name: str, what: object, tmp_path: Path) -> None:
    """To take one name away would take the content from the other."""
    result = found(tmp_path, {"s0": {name: what}}, LINKED, layout="files")
    assert Remark(b"s0/" + name.encode(), reasons.LINKED) in result.conflicts


@pytest.mark.parametrize("layout", ["files", "samples"])
def test_a_file_with_hard_links_gets_other_content(layout: str, tmp_path: Path) -> None:
    """All names of it, as a writable mount copies them up: links in the tar are links of the new member then."""
    write_upper(tmp_path / "upper", {"s0": {"a.txt": b"new"} if layout == "files" else {"a": {"txt": b"new"}}})
    if layout == "files":
        os.link(tmp_path / "upper/s0/a.txt", tmp_path / "upper/s0/l")
    result = found(tmp_path, {}, LINKED, layout=layout)
    assert told(result) == [("changed", b"s0/a", (), (b"txt",))]
    assert not result.unpackable + result.conflicts


def test_the_name_of_a_sample_with_hard_links(tmp_path: Path) -> None:
    """In any order of its links."""
    shard = tars.tar(
        tars.member(b"h/b.txt", b"b"), tars.member(b"h/a.link", kind=tars.HARD_LINK, link=b"h/b.txt"), tars.B
    )
    write_upper(tmp_path / "upper", {"s0": {"h": {"a.link": b"new"}}})
    os.link(tmp_path / "upper/s0/h/a.link", tmp_path / "upper/s0/h/b.txt")
    result = found(tmp_path, {}, shard, layout="files")
    assert told(result) == [("changed", b"s0/h/b", (), (b"txt",))]
    assert not result.conflicts


def test_the_same_symbolic_link_again(tmp_path: Path) -> None:
    assert found(tmp_path, {"s0": {"s.txt": "a.txt"}}, LINKED, layout="files") == Changes()


def test_a_hard_link_that_was_broken(tmp_path: Path) -> None:
    """Two names have new content, and the third one is another file: as a link it would get their content, too."""
    shard = tars.tar(tars.A, *(tars.member(name, kind=tars.HARD_LINK, link=b"a.txt") for name in (b"l", b"m")))
    write_upper(tmp_path / "upper", {"s0": {"a.txt": b"new", "m": b"A"}})
    for name in ("l", "n.txt"):
        os.link(tmp_path / "upper/s0/a.txt", tmp_path / "upper/s0" / name)
    with a_tree(tmp_path, [shard], View("files")) as tree:
        mtime_ns, content = tree.resolve(b"s0/a.txt").mtime_ns, tars.by_webdataset(tars.tar(tars.A))[0]["txt"]
    (tmp_path / "upper/s0/m").write_bytes(content)
    os.utime(tmp_path / "upper/s0/m", ns=(0, mtime_ns))
    result = found(tmp_path, {}, shard, layout="files")
    assert result.conflicts == [Remark(b"s0/a.txt", reasons.LINKED)]


# --- one tree over all shards ------------------------------------------------------------------------------


def test_merged(tmp_path: Path) -> None:
    upper = {"d": {"a": {"txt": b""}, "f": {"txt": b"new"}, "n": {"cls": b""}}, "e": WHITEOUT, "top": {"x": b""}}
    result = found(tmp_path, upper, merge=True)
    assert told(result) == [
        ("changed", b"d/a", (b"txt",)),
        ("removed", b"e", (), (), (b"txt",)),
        ("changed", b"d/f", (), (b"txt",)),
        ("added", b"d/n", (b"cls",)),
        ("added", b"top", (b"x",)),
    ]
    assert [one.key for one in result.further[b""]] == [b"d/n", b"top"]


def test_a_sample_that_shares_its_directory_with_a_folder(tmp_path: Path) -> None:
    shard = tars.tar(tars.member(b"a.jpg", b"1"), tars.member(b"a/b.jpg", b"2"))
    for merge in (False, True):
        home = tmp_path / str(merge)
        home.mkdir()
        directory = {"a": {"jpg": b"new", "cls": b"", "b": {"jpg": WHITEOUT}}}
        result = found(home, directory if merge else {"s0": directory}, shard, merge=merge)
        prefix = b"" if merge else b"s0/"
        assert told(result) == [
            ("changed", prefix + b"a", (b"cls",), (b"jpg",)),
            ("removed", prefix + b"a/b", (), (), (b"jpg",)),
        ]


def test_a_column_whose_name_was_shown_with_a_number(tmp_path: Path) -> None:
    """`b~2` beside the directory `b`: with that gone, a new file `b` would be the same column again."""
    shard = tars.tar(tars.member(b"a.b", b"1"), tars.member(b"a/b.jpg", b"2"))
    result = found(tmp_path, {"s0": {"a": {"b": b"new"}}}, shard)
    assert result.conflicts == [Remark(b"s0/a/b", reasons.TWICE)]
    write_upper(tmp_path / "upper", {"s0": {"a": {"b~2": WHITEOUT}}})
    assert not found(tmp_path, {}, shard).conflicts


# --- renamed samples ---------------------------------------------------------------------------------------


def rename(home: Path, view: View, source: bytes, target: Path, files: list[str]) -> None:
    """A renamed sample as the writable mount leaves it: its files copied up, with their origins."""
    with a_tree(home, [FIRST, SECOND], view) as tree:
        for file in files:
            path = target / file
            path.parent.mkdir(parents=True, exist_ok=True)
            old = source + (b"." if view.layout == "files" else b"/") + file.rpartition(".")[2].encode()
            node = tree.resolve(old)
            path.write_bytes(b"A")
            os.utime(path, ns=(0, node.mtime_ns))
            checksum = tree.lower.fingerprint(0).sum
            os.setxattr(path, "user.wdsfs.origin", b"%d:%x" % (node.inode, checksum))
        if view.layout == "samples":
            inode = tree.resolve(source).inode
            os.setxattr(target, "user.wdsfs.origin", b"%d:%x" % (inode, checksum))


def test_a_renamed_sample_stays_where_it_was(tmp_path: Path) -> None:
    write_upper(tmp_path / "upper", {"s0": {"d": {"a": WHITEOUT}}})
    rename(tmp_path, View(), b"s0/d/a", tmp_path / "upper/s0/d/z", ["jpg", "cls"])
    (tmp_path / "upper/s0/d/z/txt").write_bytes(b"")
    os.utime(tmp_path / "upper/s0/d/z/jpg", (9, 9))
    result = found(tmp_path, {})
    assert told(result) == [("renamed", b"s0/d/z", (b"txt",), (b"cls",), (), b"s0/d/a", (b"jpg",))]
    assert list(result.shards[0].following) == [max(result.shards[0].members)]
    assert not result.shards[0].appended
    news = [new.name for news in result.shards[0].members.values() for new in news]
    assert news == [b"d/z.cls", b"d/z.jpg"]
    assert [new.name for news in result.shards[0].following.values() for new in news] == [b"d/z.txt"]


def test_a_sample_renamed_into_another_shard(tmp_path: Path) -> None:
    write_upper(tmp_path / "upper", {"s0": {"d": {"a": WHITEOUT}}})
    rename(tmp_path, View(), b"s0/d/a", tmp_path / "upper/s1/z", ["jpg"])
    result = found(tmp_path, {})
    assert told(result) == [("renamed", b"s1/z", (), (), (b"cls",), b"s0/d/a")]
    assert [sample.key for sample in result.shards[1].appended] == [b"z"]
    assert list(result.shards[0].members.values()) == [(), ()]


STRAYS = tars.tar(tars.member(b"README", b"r"), tars.member(b".x.jpg", b"x"), tars.A)


@pytest.mark.parametrize(("stray", "new"), [("README", "c.txt"), (".x.jpg", "b.jpg")])
@pytest.mark.parametrize("shard", ["s0", "s1"])
def test_a_member_of_no_sample_renamed_to_a_proper_name(stray: str, new: str, shard: str, tmp_path: Path) -> None:
    """It goes where it was, and is a new sample: there is no place among the samples that it could keep."""
    write_upper(tmp_path / "upper", {"s0": {stray: WHITEOUT}})
    write_upper(tmp_path / "upper", {shard: {new: b"content"}})
    with a_tree(tmp_path, [STRAYS, SECOND], View("files")) as tree:
        inode, checksum = tree.resolve(f"s0/{stray}".encode()).inode, tree.lower.fingerprint(0).sum
    os.setxattr(tmp_path / "upper" / shard / new, "user.wdsfs.origin", b"%d:%x" % (inode, checksum))
    result = found(tmp_path, {}, STRAYS, SECOND, layout="files")
    stem, extension = new.encode().split(b".")
    assert result.samples == [ChangedSample("added", shard.encode() + b"/" + stem, (extension,))]
    assert result.others == [ChangedSample("removed", b"s0/" + stray.encode())]
    assert [one.key for one in result.shards[int(shard[1])].appended] == [stem]


@pytest.mark.parametrize("origin", [b"1:0", b"nonsense", b"4611686018427387904:0", b"%d:0" % (99 << 32 | 5 << 30)])
def test_an_origin_that_means_nothing(origin: bytes, tmp_path: Path) -> None:
    write_upper(tmp_path / "upper", {"s0": {"d": {"a": WHITEOUT, "z": {"jpg": b""}}}})
    os.setxattr(tmp_path / "upper/s0/d/z/jpg", "user.wdsfs.origin", origin)
    os.setxattr(tmp_path / "upper/s0/d/z", "user.wdsfs.origin", origin)
    assert [one.kind for one in found(tmp_path, {}).samples] == ["removed", "added"]


# --- samples that would meet -------------------------------------------------------------------------------


def test_two_samples_of_one_key_do_not_become_one(tmp_path: Path) -> None:
    shard = tars.tar(tars.member(b"k.jpg", b"1"), tars.member(b"m.txt", b""), tars.member(b"k.cls", b"2"))
    result = found(tmp_path, {"s0": {"m": WHITEOUT}}, shard)
    assert [one.reason for one in result.conflicts] == [reasons.MEETING]


def test_samples_of_one_key_apart(tmp_path: Path) -> None:
    shard = tars.tar(tars.member(b"k.jpg", b"1"), tars.B, tars.A, tars.member(b"k.cls", b"2"))
    result = found(tmp_path, {"s0": {"a": WHITEOUT, "k": {"txt": b""}}}, shard)
    assert not result.unpackable + result.conflicts
