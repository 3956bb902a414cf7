"""Hints at a mount about names and classes that loaders of directories would misread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tests import tars
from tests.conftest import Program
from wdsfs.mount.hints import hints
from wdsfs.tree.composition import parse_composition
from wdsfs.tree.opening import open_typed_set
from wdsfs.tree.set_options import Opening, Selection, TreeOptions

LAYOUTS = "`wdsfs help layouts` shows the layout for each loader"


def said(
    home: Path,
    shards: Iterable[Iterable[bytes]],
    layout: str = "samples",
    *,
    writable: bool = False,
    view: str = "",
    names: str = "ext",
) -> list[str]:
    """What is said of a set of shards with these members."""
    for number, members in enumerate(shards):
        (home / f"{number:02d}.tar").write_bytes(tars.tar(*members))
    tree = TreeOptions(layout, names, composition=parse_composition(layout, view))
    specs = [str(path) for path in sorted(home.glob("*.tar"))]
    with open_typed_set(specs, Selection(), Opening(home / "index"), tree.composition, whole=True) as below:
        return [*hints(below, tree, writable)]


@pytest.mark.parametrize(
    ("name", "other", "options", "hint"),
    [
        (b"a.left.JPG", b"a.cls", {}, "loaders that look for *.jpg need --names full or --layout classes"),
        (b"a.wav", b"a.txt", {}, "loaders that look for *.wav need --names full or --layout files"),  # no classes
        (b"a.jpg", b"a.cls", {"writable": True}, ""),  # it is edited, not trained from
        (b"a.jpg", b"a.cls", {"names": "full"}, ""),
        (b"a.jpg", b"a.cls", {"layout": "files"}, ""),
        (b"a.jpg", b"a.cls", {"view": "--columns cls"}, ""),
        (b"a.npy", b"a.cls", {}, ""),
    ],
)
def test_a_mount_says_what_loaders_by_suffix_need(
    tmp_path: Path, name: bytes, other: bytes, options: dict[str, object], hint: str
) -> None:
    found = said(tmp_path, [[tars.member(name), tars.member(other, b"0")]], **options)  # type: ignore[arg-type]
    assert found == ([hint, LAYOUTS] if hint else [])
    assert all(len(f"wdsfs: {line}") <= 80 for line in found)


@pytest.mark.parametrize(
    ("classes", "view", "hint"),
    [
        ((b"0", b"1", b"10", b"2"), "", "class 10 the label 3: a class has no sample"),
        ([b"%d" % number for number in range(11)], "--class-digits 0", "class 10 the label 2: they sort as text"),
        ([b"%d" % number for number in range(11)], "", ""),
        ((b"5", b"cat"), "", ""),  # words: nobody expects certain numbers
    ],
)
def test_a_mount_says_which_class_gets_another_number(
    tmp_path: Path, classes: Sequence[bytes], view: str, hint: str
) -> None:
    shards = ([tars.member(b"a.jpg"), tars.member(b"a.cls", label)] for label in classes)
    found = said(tmp_path, shards, "classes", view=view)
    assert found == ([f"ImageFolder gives {hint}", LAYOUTS] if hint else [])


def test_names_of_classes_that_sort_otherwise_than_their_numbers_are_told(tmp_path: Path) -> None:
    members = [(b"%d" % number, column) for number in range(3) for column in (b".cls", b".jpg")]
    shard = [tars.member(number + column, number) for number, column in members]
    file = tmp_path / "names.txt"
    for names, hint in (
        (b"dog\nant\ncat\n", ["class 1 (ant) the label 0: they sort as text"]),
        (b"ant\ncat\ndog\n", []),
    ):
        file.write_bytes(names)
        found = said(tmp_path, [shard], "classes", view=f"--class-names {file}")
        assert found == [text for one in hint for text in (f"ImageFolder gives {one}", LAYOUTS)]


def test_sets_without_samples(tmp_path: Path) -> None:
    assert "no member of the set is in a sample" in said(tmp_path, [[tars.member(b".a")]])[0]
    assert said(tmp_path, [[tars.member(b".a")]], "files") == []
    assert "have no members" in said(tmp_path, [[]])[0]
    assert said(tmp_path, [[]], writable=True) == []


def test_a_mount_says_that_dots_in_names_cut_keys(program: Program) -> None:
    """The command prints hints, unless they are not known yet, or nobody wants them."""
    path = program.write("a.tar", tars.tar(*(tars.member(b"1.2.840.%d.dcm" % number) for number in range(9))))
    for option in ("--lazy", "--quiet"):
        with program.mounted(option, "a.tar") as mounted:
            assert mounted.output == ""
    with program.mounted("a.tar") as mounted:
        assert mounted.output.endswith(f"--key-ends last-dot; wdsfs check {path} says more\n")
