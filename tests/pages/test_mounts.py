"""`wdsfs view MOUNT`: the pages show the set that the mount shows, also when it grows, and where it is changed."""

from __future__ import annotations

import html
import os
import shlex

import pytest

from tests import tars
from tests.conftest import BOTH_ENGINES, Program
from tests.pages.viewing import Viewer, viewing
from tests.processes import wait_until

NAMES = b"cat\ndog\n"


def a_shard(number: int) -> bytes:
    """Two samples, whose classes are in the other order than their keys."""
    members = []
    for at in range(2):
        key = b"s%d%d" % (number, at)
        members += [tars.member(key + b".cls", b"%d" % (1 - at)), tars.member(key + b".txt", b"text of " + key)]
        members += [tars.member(key + b".json", b'{"caption": "about %s"}' % key)]
    return tars.tar(*members)


@pytest.fixture
def shards(program: Program) -> Program:
    for number in range(2):
        program.write(f"set/t-{number}.tar", a_shard(number))
    return program


@BOTH_ENGINES
def test_columns_and_fields_of_the_mount(shards: Program) -> None:
    shards.write("labels.csv", b"key,mood\ns00,good\ns01,bad\ns10,good\ns11,bad\n")
    options = ("--columns", "about=caption.txt", "--columns", "mood", "--field", "caption.txt=json:caption")
    # Relative paths are of the directory of the mount's command.
    with shards.mounted(*options, "--associate", "labels.csv", "set") as mounted:
        elsewhere = shards.directory("elsewhere")
        with viewing(shards, mounted.path, cwd=elsewhere) as viewer:
            assert viewer.paths() == ["t-0/s00", "t-0/s01", "t-1/s10", "t-1/s11"]
            assert viewer.paths("?column=mood&value=bad") == ["t-0/s01", "t-1/s11"]
            shown = viewer.ask("/sample/t-0/s00").text
            assert [one in shown for one in (">about", ">mood", ">json", ">cls")] == [True, True, False, False]
            assert _commands(shown)[-1] == str(mounted.path / "t-0/s00")
            preview = viewer.ask("/preview/t-0/s00/mood").text
            assert str(mounted.path / "t-0/s00/mood") in _commands(preview)
            assert viewer.ask("/file/t-0/s00/about").body == (mounted.path / "t-0/s00/about").read_bytes()
        assert str(mounted.path) in shards.refused("view", mounted.path / "t-0", code=5)


@BOTH_ENGINES
def test_classes_of_the_mount_are_classes_here(shards: Program) -> None:
    shards.write("names.txt", NAMES)
    with (
        shards.mounted("-q", "--layout", "classes", "--class-names", "names.txt", "set") as mounted,
        viewing(shards, mounted.path) as viewer,
    ):
        # In the order of the tars, in which a dog comes first.
        assert viewer.paths() == ["t-0/dog/t-0--s00", "t-0/cat/t-0--s01", "t-1/dog/t-1--s10", "t-1/cat/t-1--s11"]
        assert viewer.paths("?class=cat") == ["t-0/cat/t-0--s01", "t-1/cat/t-1--s11"]
        assert viewer.ask("/go?number=3").headers["location"] == "/sample/t-1/cat/t-1--s11"
        assert "Sample 3 of the set" in viewer.ask("/sample/t-1/cat/t-1--s11").text
        content = viewer.ask("/file/t-1/cat/t-1--s11/txt").body
        assert content == (mounted.path / "cat/t-1--s11.txt").read_bytes() == b"text of s11"


@BOTH_ENGINES
@pytest.mark.parametrize("begins_so", [True, False])
def test_a_mount_with_a_file_that_is_no_tar(shards: Program, begins_so: bool) -> None:
    """The mount goes on, and so do its pages."""
    page = b"<html>"
    if begins_so:
        shards.write("set/t-1.tar", page)
    with shards.mounted("--allow-missing", "set") as mounted:
        mounted.allow_log("is an HTML page", "has changed")
        if not begins_so:
            shards.write("new", page).rename(shards.home / "set/t-1.tar")
        with viewing(shards, mounted.path) as viewer:
            assert viewer.paths() == ["t-0/s00", "t-0/s01"]


def test_samples_that_a_split_excludes_are_not_shown(program: Program) -> None:
    program.write("set/t-0.tar", a_shard(0))
    program.write("set/.nv-meta/.info.json", b'{"shard_counts": {"t-0.tar": 2}}')
    program.write("set/.nv-meta/split.yaml", b"split_parts:\n  train: [t-0.tar]\nexclude: [t-0.tar/s00]\n")
    with program.mounted("-q", "--split", "train", "set") as mounted:
        assert os.listdir(mounted.path / "t-0") == ["s01"]
        with viewing(program, mounted.path) as viewer:
            assert viewer.paths() == ["t-0/s01"]


def test_shards_that_come_and_go_do_so_on_the_page(shards: Program) -> None:
    def shows(viewer: Viewer, expected: list[str]) -> bool:
        return viewer.paths() == expected

    typed = shards.directory("typed")
    options = ("--field", "caption.txt=json:caption")
    with shards.mounted(*options, "set") as mounted, viewing(shards, mounted.path, cwd=typed) as viewer:
        typed.rmdir()
        assert viewer.paths() == ["t-0/s00", "t-0/s01", "t-1/s10", "t-1/s11"]
        assert viewer.paths("?q=s20") == []
        shards.write("set/t-2.tar", a_shard(2))
        shards.run("refresh", mounted.path)
        expected = ["t-0/s00", "t-0/s01", "t-1/s10", "t-1/s11", "t-2/s20", "t-2/s21"]
        wait_until(lambda: shows(viewer, expected), "the new shard")
        assert "1 shard came since this view began." in viewer.ask("/random").text
        assert viewer.paths("?q=s20") == ["t-2/s20"]
        assert viewer.paths("?column=caption.txt&value=*s*1&order=caption.txt&down=1") == [
            "t-2/s21",
            "t-1/s11",
            "t-0/s01",
        ]
        assert viewer.ask("/file/t-2/s20/txt").body == b"text of s20"
        (shards.home / "set/t-0.tar").unlink()
        shards.run("refresh", mounted.path)
        wait_until(lambda: shows(viewer, expected[2:]), "the end of a shard")
        assert "1 shard came and 1 shard went since this view began." in viewer.ask("/plots").text
        assert "Sample 2 of the set" in viewer.ask("/sample/t-2/s20").text


@BOTH_ENGINES
def test_a_mount_that_ends_leaves_the_pages(shards: Program) -> None:
    with shards.mounted("set", ends_itself=True) as mounted, viewing(shards, mounted.path) as viewer:
        shards.run("umount", mounted.path)
        wait_until(lambda: "the mount has ended" in viewer.ask("/").text, "the word on the page")
        assert len(viewer.paths()) == 4


@BOTH_ENGINES
def test_a_merged_mount_says_how_the_pages_differ_and_takes_no_options(shards: Program) -> None:
    with shards.mounted("--merge", "set") as mounted, viewing(shards, mounted.path) as viewer:
        assert "one tree over all shards" in viewer.ask("/").text
        assert len(viewer.paths()) == 4
        assert "leave them out for a mount" in shards.refused("view", "--columns", "cls", mounted.path, code=2)
    assert "nothing is mounted" in shards.refused("view", shards.directory("empty"), code=2)


# --- writable mounts


def _commands(page: str) -> list[str]:
    return [html.unescape(part.partition("</code>")[0]) for part in page.split("<code>")[1:]]


@pytest.mark.parametrize("options", [(), ("--merge", "--layout", "files")])
def test_of_a_writable_mount_the_pages_show_the_shards_and_say_so(
    shards: Program, options: tuple[str, ...]
) -> None:
    with shards.mounted("-q", *options, "--overlay", "edits", "set") as mounted:
        (mounted.path / ("s00.cls" if options else "t-0/s00/cls")).write_bytes(b"7")
        with viewing(shards, mounted.path) as viewer:
            page = viewer.ask("/sample/t-0/s00").text
            assert f"wdsfs diff {mounted.path}" in page
            assert viewer.paths() == ["t-0/s00", "t-0/s01", "t-1/s10", "t-1/s11"]
            assert viewer.ask("/file/t-0/s00/cls").body == b"1"
            path = str(mounted.path / "t-0/s00")
            assert _commands(page)[-1:] == ([] if options else [path])
            shards.run("commit", "--in-place", mounted.path)
            wait_until(lambda: viewer.ask("/file/t-0/s00/cls").body == b"7", "the new shard")


def test_shards_are_changed_in_a_mount(shards: Program) -> None:
    """By what the page says: the command, then the path."""
    with viewing(shards, "set") as viewer:
        command, directory = _commands(viewer.ask("/sample/t-0/s00").text)[-2:]
    words = [word.replace("MOUNTPOINT", str(shards.mountpoint)) for word in shlex.split(command)]
    shards.mountpoint.mkdir(exist_ok=True)
    shards.run(*words[1:])
    try:
        changed = shards.home / directory.replace("MOUNTPOINT", str(shards.mountpoint)) / "cls"
        changed.write_bytes(b"7")
        [sample] = shards.json("diff", shards.mountpoint)["samples"]
        assert (sample["path"], sample["changed"]) == ("t-0/s00", ["cls"])
    finally:
        shards.run("umount", shards.mountpoint)
