"""The changes of an overlay, in samples: uppers made by hand over trees of every kind."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests import tars
from tests.uppers import NO_RULES, OPAQUE, WHITEOUT, a_tree, find, write_upper
from wdsfs.packing import reasons
from wdsfs.packing.diff import Changes
from wdsfs.packing.plan import NewMember, Remark
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
LINKED = tars.tar(
    tars.member(b"a.txt", b"a"),
    tars.member(b"l", kind=tars.HARD_LINK, link=b"a.txt"),
    tars.member(b"s.txt", kind=tars.SYMLINK, link=b"a.txt"),
    tars.B,
)
CASES = tars.tar(*(tars.member(b"k." + one, b"A") for one in (b"jpg", b"JPG", b"cls")))
FOLDER = tars.tar(tars.member(b"a.jpg", b"1"), tars.member(b"a/b.jpg", b"2"))

FILES: dict[str, Any] = {"layout": "files"}
MERGED: dict[str, Any] = {"merge": True}
FULL: dict[str, Any] = {"names": "full"}
LINKS: dict[str, Any] = {**FILES, "shards": (LINKED,)}


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


def told(result: Changes) -> str:
    """The samples, then the members of none: `changed s0/d/a +txt ~jpg -cls`; @ is for a time alone."""
    lines = []
    for kind, path, added, changed, removed, was, times in [*result.samples, *result.others]:
        columns = [*zip("+" * 9, added), *zip("~" * 9, changed), *zip("-" * 9, removed), *zip("@" * 9, times)]  # noqa: B905
        marks = [mark + os.fsdecode(column) for mark, column in columns]
        lines.append(" ".join([kind, *[os.fsdecode(was) + " >"] * bool(was), os.fsdecode(path), *marks]))
    return ", ".join(lines)


def keep_origins(
    home: Path, shards: list[bytes], view: View, origins: Mapping[str, str], *, times: bool = False
) -> None:
    """Note of files and directories of the upper what they were in the lower, as a writable mount does."""
    with a_tree(home, shards, view) as tree:
        for new, old in origins.items():
            node, path = tree.resolve(old.encode()), home / "upper" / new
            os.setxattr(path, "user.wdsfs.origin", b"%d:%x" % (node.inode, tree.lower.fingerprint(0).sum))
            if times:
                os.utime(path, ns=(0, node.mtime_ns))


def remarks(reason: str, *paths: str) -> list[Remark]:
    return [Remark(os.fsencode(path), reason) for path in paths]


def names_of(news: Iterable[tuple[NewMember, ...]]) -> list[bytes]:
    return [new.name for some in news for new in some]


def test_nothing(tmp_path: Path) -> None:
    assert found(tmp_path, {}) == Changes()
    assert found(tmp_path, {"s0": {"d": {"a": {}}}}) == Changes()
    (tmp_path / "links").mkdir()
    assert found(tmp_path / "links", {"s0": {"s.txt": "a.txt"}}, LINKED, **FILES) == Changes()


@pytest.mark.parametrize(
    ("upper", "options", "changes"),
    [
        (
            {"s0": {"d": WHITEOUT}, "s1": WHITEOUT},
            {},
            "removed s0/d/a -cls -jpg, removed s0/d/b -cls -jpg, removed s1/e -txt, removed s1/d/f -txt",
        ),
        ({"s0": {"d": {"a": {"cls": WHITEOUT, "jpg": WHITEOUT}}}}, {}, "removed s0/d/a -cls -jpg"),
        (  # as after `rm -r` and `mkdir`: what has the name of a member takes its place
            {"s0": {"d": {OPAQUE: True, "a": {OPAQUE: True, "jpg": b"new", "txt": b"t"}}}},
            {},
            "changed s0/d/a +txt ~jpg -cls, removed s0/d/b -cls -jpg",
        ),
        (
            {"s0": {"d": {"a": {"jpg": {"left": b"l"}}, "b": b"file"}}},
            {},
            "changed s0/d/a -jpg, removed s0/d/b -cls -jpg, added s0/d +b, added s0/d/a/jpg +left",
        ),
        (
            {"s0": {"d": {"a": {"a.jpg": b"new", "a.x.txt": b""}, "n": {"n.txt": b""}}}},
            FULL,
            "changed s0/d/a +x.txt ~jpg, added s0/d/n +txt",
        ),
        (
            {
                "s0": {
                    "d": {"a.jpg": b"new", "a.txt": b"", "b.jpg": WHITEOUT, "n.cls": b"", "n.jpg": b""},
                    "README": b"changed",
                    "top.txt": b"",
                },
                "more": {"x.txt": b""},
            },
            FILES,
            "changed s0/d/a +txt ~jpg, changed s0/d/b -jpg, added s0/d/n +cls +jpg, added s0/top +txt, "
            "added more/x +txt, changed s0/README",
        ),
        ({"s0": {"README": b"read me"}}, FILES, "time only s0/README"),
        (
            {"d": {"f.cls": b"", "f.txt": WHITEOUT, "a.txt": b""}, "n.txt": b""},
            {**FILES, **MERGED},
            "changed d/a +txt, changed d/f +cls -txt, added n +txt",
        ),
        ({"d": WHITEOUT}, MERGED, "removed d/a -cls -jpg, removed d/b -cls -jpg, removed d/f -txt"),
        (
            {"d": {"a": {"txt": b""}, "f": {"txt": b"new"}, "n": {"cls": b""}}, "e": WHITEOUT, "top": {"x": b""}},
            MERGED,
            "changed d/a +txt, removed e -txt, changed d/f ~txt, added d/n +cls, added top +x",
        ),
        (
            {"a~s1": {"txt": b"new"}},
            {**MERGED, "shards": (tars.tar(tars.A), tars.tar(tars.A))},
            "changed a~s1 ~txt",
        ),
        # A sample that shares its directory with a folder.
        (
            {"s0": {"a": {"jpg": b"new", "cls": b"", "b": {"jpg": WHITEOUT}}}},
            {"shards": (FOLDER,)},
            "changed s0/a +cls ~jpg, removed s0/a/b -jpg",
        ),
        (
            {"a": {"jpg": b"new", "cls": b"", "b": {"jpg": WHITEOUT}}},
            {**MERGED, "shards": (FOLDER,)},
            "changed a +cls ~jpg, removed a/b -jpg",
        ),
        # Beside hard links, and a file in place of a symbolic link.
        ({"s0": {"b.txt": b"new", "s.txt": WHITEOUT}}, LINKS, "changed s0/b ~txt, removed s0/s.txt"),
        ({"s0": {"s.txt": b"new"}}, LINKS, "added s0/s +txt, removed s0/s.txt"),
        # Samples of one key that do not meet.
        (
            {"s0": {"a": WHITEOUT, "k": {"txt": b""}}},
            {"shards": (tars.tar(tars.member(b"k.jpg", b"1"), tars.B, tars.A, tars.member(b"k.cls", b"2")),)},
            "changed s0/k +txt, removed s0/a -txt",
        ),
    ],
)
def test_samples(upper: dict[Any, Any], options: dict[str, Any], changes: str, tmp_path: Path) -> None:
    options = dict(options)
    result = found(tmp_path, upper, *options.pop("shards", ()), **options)
    assert told(result) == changes
    assert not result.unpackable + result.conflicts


def test_members_of_no_sample_are_told_as_json(tmp_path: Path) -> None:
    report = found(tmp_path, {"s0": {"README": b"changed"}}, **FILES).as_json()
    assert [(row["kind"], row["path"]) for row in report["others"]] == [("changed", "s0/README")]


def test_a_file_that_is_what_the_shard_has_is_no_change(tmp_path: Path) -> None:
    """As after a `chmod`, or when an editor saved the same again."""
    write_upper(tmp_path / "upper", {"s0": {"d": {"a": {OPAQUE: True, "jpg": b"A", "cls": b"1"}}}})
    for name in ("jpg", "cls"):
        os.utime(tmp_path / "upper/s0/d/a" / name, ns=(0, 10**9 + 5))
    assert found(tmp_path, {}) == Changes(notes=remarks(reasons.SAME, "s0/d/a/cls", "s0/d/a/jpg"))


def test_a_file_with_another_time(tmp_path: Path) -> None:
    """As after `rsync` without `-t`, or `touch`."""
    result = found(tmp_path, {"s0": {"d": {"a": {"cls": b"1"}, "b": {"cls": b"2", "jpg": b"new"}}}})
    assert told(result) == "time only s0/d/a @cls, changed s0/d/b ~jpg @cls"
    assert len(names_of(result.shards[0].members.values())) == 3
    result = found(tmp_path, {}, rules=Rules(ignore_times=True))
    assert told(result) == "changed s0/d/b ~jpg"
    assert result.notes == remarks(reasons.TIME_IGNORED, "s0/d/a/cls", "s0/d/b/cls")
    assert len(names_of(result.shards[0].members.values())) == 1


# --- files that programs leave -------------------------------------------------------------------------------

LEFT = ["txt~", ".txt.swp", ".txt.swx", "#txt#", ".DS_Store", "._jpg", "Thumbs.db", "desktop.ini", ".directory"]
LEFT += ["4913", ".fuse_hidden0000000100000001", ".nfs000000000000a1b2", ".jpg.Ab3dE6", ".~lock.csv#"]
LEFT += [".goutputstream-X1"]
NO_LEAVINGS = (".x.sha256", ".x.tensor", ".y.SHA256", ".y.Tensor")  # nor temporary names of rsync


def test_what_programs_leave_behind(tmp_path: Path) -> None:
    """No column of a sample; nor does it make a sample of a directory."""
    sample: dict[str, Any] = {**dict.fromkeys([*LEFT, *NO_LEAVINGS], b""), "txt": b"", ".#txt": "user@host.1"}
    sample[".ipynb_checkpoints"] = {"txt": b""}
    upper = {"s0": {"d": {"a": sample}, "n": {".DS_Store": b""}}, "Thumbs.db": b""}
    result = found(tmp_path, {**upper, ".Trash-0": {"files": {"x": {"txt": b""}}}})
    assert told(result) == "changed s0/d/a +.x.sha256 +.x.tensor +.y.SHA256 +.y.Tensor +txt"
    assert not result.unpackable + result.conflicts + result.notes
    left = ["Thumbs.db", ".Trash-0/files/x/txt", "s0/n/.DS_Store", "s0/d/a/.ipynb_checkpoints/txt"]
    paths = [*left, "s0/d/a/.#txt", *(f"s0/d/a/{name}" for name in LEFT)]
    assert result.leavings == sorted(remarks(reasons.LEAVING, *paths))
    result = found(tmp_path, {}, rules=Rules(with_leavings=True))
    assert result.leavings == []
    refused = ["Thumbs.db", "s0/d/a/.#txt", "s0/d/a/.ipynb_checkpoints/txt"]
    assert [os.fsdecode(one.path) for one in result.unpackable] == refused
    assert b"txt~" in result.samples[0].added


@pytest.mark.parametrize("layout", ["samples", "files"])
@pytest.mark.parametrize(("was", "left"), [("txt~", False), ("txt", True)])
def test_a_column_that_is_called_so_in_its_shard(was: str, left: bool, layout: str, tmp_path: Path) -> None:
    """It stays one when it is written and when its sample is renamed. But `txt~` may be the `txt` of the shard,
    which an editor has put there."""
    shard = tars.tar(*(tars.member(b"k." + one, b"A") for one in (b"jpg", b"txt", b"txt~")))
    (tmp_path / "one").mkdir()
    written = {"k.txt~": b"new"} if layout == "files" else {"k": {"txt~": b"new"}}
    assert told(found(tmp_path / "one", {"s0": written}, shard, layout=layout)) == "changed s0/k ~txt~"
    files = {"z.jpg": b"A", "z.txt~": b"A", "k.jpg": WHITEOUT, "k.txt": WHITEOUT, "k.txt~": WHITEOUT}
    sample = {OPAQUE: True, "jpg": b"A", "txt~": b"A"}
    write_upper(tmp_path / "upper", {"s0": files if layout == "files" else {"k": WHITEOUT, "z": sample}})
    dot = "." if layout == "files" else "/"
    origins = {f"s0/z{dot}jpg": f"s0/k{dot}jpg", f"s0/z{dot}txt~": f"s0/k{dot}{was}"}
    keep_origins(tmp_path, [shard], View(layout), origins)
    assert found(tmp_path, {}, shard, layout=layout).leavings == remarks(reasons.LEAVING, f"s0/z{dot}txt~") * left


def test_new_files_of_a_merged_set_look_into_each_shard_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = [tars.tar(tars.member(b"d/%d.txt" % number), tars.member(b"d/k.txt")) for number in range(12)]
    upper = {"d": {f"{number}.cls": b"" for number in range(2, 30)}, "k.txt": b"", "e": {"2.cls": b""}}
    record = Mock(side_effect=ShardSet.record)
    monkeypatch.setattr(ShardSet, "record", lambda *arguments: record(*arguments))
    result = found(tmp_path, upper, *shards, layout="files", merge=True)
    changed = [sample.path for sample in result.samples if sample.kind == "changed"]
    assert changed == [b"d/%d" % number for number in range(2, 12)]
    assert [sample.kind for sample in result.samples].count("added") == 18 + 2
    assert record.call_count < len(shards) * 29


# --- extensions that readers take for one ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("upper", "shards", "left_out", "changes"),
    [
        (
            {"s0": {"d": {"a": {"JPG": b"", "Cls": b"", "cls": WHITEOUT}, "b": {"CLS": b""}}}},
            (),
            ["s0/d/a/JPG", "s0/d/b/CLS"],
            "changed s0/d/a +Cls -cls",
        ),
        (
            {"s0": {"n": {"txt": b"", "TXT": b"", "seg.Png": b"", "seg.png": b""}}},
            (),
            ["s0/n/seg.png", "s0/n/txt"],
            "added s0/n +TXT +seg.Png",
        ),
        ({"s0": {"k": {"jpg": b"new"}}}, (CASES,), [], "changed s0/k ~jpg"),  # it stays
        ({"s0": {"k": {"cls": WHITEOUT, "Jpg": b""}}}, (CASES,), ["s0/k/Jpg"], "changed s0/k -cls"),
    ],
)
def test_new_extensions_that_differ_only_in_case_are_left_out(
    upper: dict[Any, Any], shards: tuple[bytes, ...], left_out: list[str], changes: str, tmp_path: Path
) -> None:
    result = found(tmp_path, upper, *shards)
    assert result.unpackable == remarks(reasons.ONLY_CASE, *left_out)
    assert told(result) == changes


def test_a_renamed_sample_keeps_extensions_that_differ_in_case(tmp_path: Path) -> None:
    upper = {"s0": {"k": WHITEOUT, "z": {OPAQUE: True, "jpg": b"A", "JPG": b"A", "Cls": b"", "cls": b""}}}
    write_upper(tmp_path / "upper", upper)
    keep_origins(tmp_path, [CASES], View(), {"s0/z": "s0/k"})
    result = found(tmp_path, {}, CASES)
    assert [sample.kind for sample in result.samples] == ["renamed"]
    assert result.unpackable == remarks(reasons.ONLY_CASE, "s0/z/Cls")


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
    upper = {
        "k": {"jpg~2": b"two", "txt": b"new"},
        "k~2": {"jpg": b"three"},
        "%2E%2E": {"up": {"%": b"X"}, "100%": {"txt": b""}},
        "%": {"abs": {"b": {"txt": b"y"}}},
    }
    with a_tree(tmp_path, [odd], View()) as tree:
        [long] = [e.name for e in tree.listing(tree.resolve(b"s0").inode) if e.name.startswith(b"xxx")]
        write_upper(tmp_path / "upper", {"s0": {**upper, os.fsdecode(long): {"txt": b"L", "cls": b""}}})
        result = find(tree, tmp_path / "upper")
    replaced = names_of(result.shards[0].members.values())
    assert (set(replaced), len(replaced)) == ({b"./k.jpg", b"../up.", b"x" * 300 + b".txt"}, 4)
    assert sorted(names_of(result.shards[0].following.values())) == [b"./k.txt", b"x" * 300 + b".cls"]
    assert [sample.key for sample in result.shards[0].appended] == [b"../100%", b"/abs/b"]
    assert not result.unpackable + result.conflicts


def nested(depth: int, inner: dict[str, Any]) -> dict[str, Any]:
    """Directories in directories, `depth` of them."""
    for _ in range(depth):
        inner = {"d": inner}
    return inner


DEEP = f"{reasons.TOO_LONG}: its name has 257 folders, and the limit is 256"


@pytest.mark.parametrize(
    ("upper", "options", "path", "reason"),
    [
        ({"file": b""}, {}, "file", reasons.OUTSIDE),
        ({"s0": {"file": b""}}, {}, "s0/file", reasons.OUTSIDE),
        ({"new": {"file": b""}}, {}, "new/file", reasons.OUTSIDE),
        ({"s0": {"d": {"a": {"link": "jpg"}}}}, {}, "s0/d/a/link", reasons.SYMBOLIC),
        ({"s0": {"d": {"a": {"jpg": "cls"}}}}, {}, "s0/d/a/jpg", reasons.SYMBOLIC),
        ({"s0": {"d": {"a": {"pipe": os.mkfifo}}}}, {}, "s0/d/a/pipe", reasons.SPECIAL),
        ({"s0": {"a.b": {"txt": b""}}}, {}, "s0/a.b/txt", reasons.DOTTED_KEY),
        ({"s0": {"d": {"a": {"__key__": b""}}}}, {}, "s0/d/a/__key__", reasons.RESERVED_COLUMN),
        ({"s0": {"%2E": {"a": {"txt": b""}}}}, {}, "s0/%2E/a/txt", reasons.ODD_FOLDER),
        ({"s0": nested(257, {"txt": b""})}, {}, "", ""),
        ({"s0": nested(258, {"txt": b""})}, {}, "s0/" + "d/" * 258 + "txt", DEEP),
        ({"new": nested(258, {"txt": b""})}, {}, "new/" + "d/" * 258 + "txt", DEEP),
        ({"s0": nested(257, {"a.txt": b""})}, FILES, "s0/" + "d/" * 257 + "a.txt", DEEP),
        ({"s0": {"n": {"é": b"", "É": b""}}}, {}, "s0/n/é", reasons.ONLY_CASE),
        ({"s0": {"d": {"a": {"noext": b""}}}}, FULL, "s0/d/a/noext", reasons.NO_EXTENSION),
        ({"s0": {"d": {"a": {"b.jpg": b""}}}}, FULL, "s0/d/a/b.jpg", reasons.OTHER_STEM),
        ({"s0": {"d": {"a": {".hidden": b""}}}}, FULL, "s0/d/a/.hidden", reasons.OTHER_STEM),
        ({"x.txt": b""}, FILES, "x.txt", reasons.OUTSIDE_FILES),
        ({"s0": {"LICENSE": b""}}, FILES, "s0/LICENSE", reasons.NO_EXTENSION),
        ({"s0": {"d": {".hidden": b""}}}, FILES, "s0/d/.hidden", reasons.HIDDEN),
        ({"s0": {"__m__": {"a.txt": b""}}}, FILES, "s0/__m__/a.txt", reasons.META),
        ({"x": b""}, MERGED, "x", reasons.OUTSIDE_MERGED),
    ],
)
def test_what_cannot_be_packed(
    upper: dict[Any, Any], options: dict[str, Any], path: str, reason: str, tmp_path: Path
) -> None:
    assert found(tmp_path, upper, **options).unpackable == (remarks(reason, path) if path else [])


LONG = "k" * 250


@pytest.mark.parametrize(
    ("upper", "options", "notes"),
    [
        ({"s0": {"empty": {}}}, {}, remarks(reasons.EMPTY_DIRECTORY, "s0/empty")),
        ({"s0": {"nothing": WHITEOUT}}, {}, remarks(reasons.DANGLING, "s0/nothing")),
        ({"top": {"sub": {}}}, {}, remarks(reasons.EMPTY_DIRECTORY, "top/sub")),
        # Names that come back in another form.
        (
            {"s0": {"d": {"a": {"%2E": b"", "x%2E": b""}}}},
            {},
            remarks(f"{reasons.ESCAPED} x%252E", "s0/d/a/x%2E"),
        ),
        ({"s0": {"d": {"K.%2E": b"", "K.%": b""}}}, FILES, remarks(f"{reasons.ESCAPED} K.%252E", "s0/d/K.%2E")),
        ({"new": {"k%25": {"txt": b""}}}, {}, remarks(f"{reasons.ESCAPED} k%2525", "new/k%25")),
        # Names that tar cannot extract.
        (
            {"s0": {"%2E%2E": {"a": {"txt": b""}}}},
            {},
            remarks(f"{reasons.UNEXTRACTABLE}: `..` is part of it", "s0/%2E%2E/a/txt"),
        ),
        (
            {"s0": {LONG: {"jpgjpg": b""}}},
            {},
            remarks(f"{reasons.UNEXTRACTABLE}: it is too long for a file system", f"s0/{LONG}/jpgjpg"),
        ),
    ],
)
def test_notes(upper: dict[Any, Any], options: dict[str, Any], notes: list[Remark], tmp_path: Path) -> None:
    result = found(tmp_path, upper, **options)
    assert result.notes == notes
    assert not result.unpackable + result.conflicts


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


HELD = tars.tar(tars.member(b"h.b/c.txt", b""), tars.B)


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
    result = found(tmp_path, upper, *([FIRST, SECOND] if "h" not in upper.get("s0", ()) else [HELD]))
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
    assert (
        Remark(b"s0/" + name.encode(), reasons.LINKED)
        in found(tmp_path, {"s0": {name: what}}, LINKED, layout="files").conflicts
    )


REVERSED = tars.tar(
    tars.member(b"h/b.txt", b"b"), tars.member(b"h/a.link", kind=tars.HARD_LINK, link=b"h/b.txt"), tars.B
)


@pytest.mark.parametrize(
    ("shard", "layout", "upper", "link", "changes"),
    [
        (LINKED, "files", {"a.txt": b"new"}, ("a.txt", "l"), "changed s0/a ~txt"),
        (LINKED, "samples", {"a": {"txt": b"new"}}, None, "changed s0/a ~txt"),
        (REVERSED, "files", {"h": {"a.link": b"new"}}, ("h/a.link", "h/b.txt"), "changed s0/h/b ~txt"),
    ],
)
def test_a_file_with_hard_links_gets_other_content(
    shard: bytes, layout: str, upper: Any, link: tuple[str, str] | None, changes: str, tmp_path: Path
) -> None:
    """All names of it, as a writable mount copies them up: links in the tar are links of the new member then."""
    write_upper(tmp_path / "upper", {"s0": upper})
    if link is not None:
        os.link(tmp_path / "upper/s0" / link[0], tmp_path / "upper/s0" / link[1])
    result = found(tmp_path, {}, shard, layout=layout)
    assert told(result) == changes
    assert not result.unpackable + result.conflicts


def test_a_hard_link_that_was_broken(tmp_path: Path) -> None:
    """Two names have new content, and the third one is another file: as a link it would get their content, too."""
    shard = tars.tar(tars.A, *(tars.member(name, kind=tars.HARD_LINK, link=b"a.txt") for name in (b"l", b"m")))
    write_upper(tmp_path / "upper", {"s0": {"a.txt": b"new", "m": b"aaa"}})
    for name in ("l", "n.txt"):
        os.link(tmp_path / "upper/s0/a.txt", tmp_path / "upper/s0" / name)
    with a_tree(tmp_path, [shard], View("files")) as tree:
        os.utime(tmp_path / "upper/s0/m", ns=(0, tree.resolve(b"s0/a.txt").mtime_ns))
    assert found(tmp_path, {}, shard, layout="files").conflicts == remarks(reasons.LINKED, "s0/a.txt")


def test_a_column_whose_name_was_shown_with_a_number(tmp_path: Path) -> None:
    """`b~2` beside the directory `b`: with that gone, a new file `b` would be the same column again."""
    shard = tars.tar(tars.member(b"a.b", b"1"), tars.member(b"a/b.jpg", b"2"))
    assert found(tmp_path, {"s0": {"a": {"b": b"new"}}}, shard).conflicts == remarks(reasons.TWICE, "s0/a/b")
    write_upper(tmp_path / "upper", {"s0": {"a": {"b~2": WHITEOUT}}})
    assert not found(tmp_path, {}, shard).conflicts


# --- renamed samples ---------------------------------------------------------------------------------------


def test_a_renamed_sample_stays_where_it_was(tmp_path: Path) -> None:
    write_upper(tmp_path / "upper", {"s0": {"d": {"a": WHITEOUT, "z": {"jpg": b"A", "cls": b"A"}}}})
    origins = {f"s0/d/z{file}": f"s0/d/a{file}" for file in ("/jpg", "/cls", "")}
    keep_origins(tmp_path, [FIRST, SECOND], View(), origins, times=True)
    (tmp_path / "upper/s0/d/z/txt").write_bytes(b"")
    os.utime(tmp_path / "upper/s0/d/z/jpg", (9, 9))
    result = found(tmp_path, {})
    assert told(result) == "renamed s0/d/a > s0/d/z +txt ~cls @jpg"
    assert result.as_json()["samples"][0]["was"] == "s0/d/a"
    assert list(result.shards[0].following) == [max(result.shards[0].members)]
    assert not result.shards[0].appended
    assert names_of(result.shards[0].members.values()) == [b"d/z.cls", b"d/z.jpg"]
    assert names_of(result.shards[0].following.values()) == [b"d/z.txt"]


STRAYS = tars.tar(tars.member(b"README", b"r"), tars.member(b".x.jpg", b"x"), tars.A)


@pytest.mark.parametrize(("stray", "new"), [("README", "c.txt"), (".x.jpg", "b.jpg")])
@pytest.mark.parametrize("shard", ["s0", "s1"])
def test_a_member_of_no_sample_renamed_to_a_proper_name(stray: str, new: str, shard: str, tmp_path: Path) -> None:
    """It goes where it was, and is a new sample: there is no place among the samples that it could keep."""
    write_upper(tmp_path / "upper", {"s0": {stray: WHITEOUT}})
    write_upper(tmp_path / "upper", {shard: {new: b"content"}})
    keep_origins(tmp_path, [STRAYS, SECOND], View("files"), {f"{shard}/{new}": f"s0/{stray}"})
    result = found(tmp_path, {}, STRAYS, SECOND, layout="files")
    stem, extension = new.split(".")
    assert told(result) == f"added {shard}/{stem} +{extension}, removed s0/{stray}"
    assert [one.key for one in result.shards[int(shard[1])].appended] == [stem.encode()]


@pytest.mark.parametrize("origin", [b"1:0", b"nonsense", b"4611686018427387904:0", b"%d:0" % (99 << 32 | 5 << 30)])
def test_an_origin_that_means_nothing(origin: bytes, tmp_path: Path) -> None:
    write_upper(tmp_path / "upper", {"s0": {"d": {"a": WHITEOUT, "z": {"jpg": b""}}}})
    for name in ("z/jpg", "z"):
        os.setxattr(tmp_path / "upper/s0/d" / name, "user.wdsfs.origin", origin)
    assert [one.kind for one in found(tmp_path, {}).samples] == ["removed", "added"]


def test_two_samples_of_one_key_do_not_become_one(tmp_path: Path) -> None:
    shard = tars.tar(tars.member(b"k.jpg", b"1"), tars.member(b"m.txt", b""), tars.member(b"k.cls", b"2"))
    result = found(tmp_path, {"s0": {"m": WHITEOUT}}, shard)
    assert [one.reason for one in result.conflicts] == [reasons.MEETING]
