"""What pages show of the changes of a writable mount, and the paths under which samples are changed."""

from __future__ import annotations

import html
import re
import shlex
import subprocess

import pytest

from tests import tars
from tests.conftest import BOTH_ENGINES, FUSE, KERNEL, Program
from tests.pages.viewing import viewing
from tests.processes import wait_until

SET = "t-{000000..000001}.tar"
A = "t-000000/a"
IN_SHARDS = ["t-000000/a", "t-000000/b", "t-000001/a", "t-000001/b"]


@pytest.fixture
def program(program: Program) -> Program:
    """Two shards with two samples each."""
    for number in range(2):
        members = []
        for key in (b"a", b"b"):
            members.append(tars.member(key + b".cls", b"%d" % number))
            members.append(tars.member(key + b".json", b'{"x": 1, "of": [1, 2]}\n'))
        program.write(f"t-{number:06d}.tar", tars.tar(*members))
    return program


def _cards(page: str) -> list[str]:
    """The samples of a grid with their marks, in their order."""
    cards = page.partition('<ol class="grid">')[2].partition("</ol>")[0].split("<li")[1:]
    marks = [card.partition('<span class="mark">')[2].partition("<")[0] for card in cards]
    paths = [re.split('[?"]', card.partition("/sample/")[2])[0] for card in cards]
    return [f"{path} {mark}".strip() for path, mark in zip(paths, marks, strict=True)]


def _commands(page: str) -> list[str]:
    return [html.unescape(part.partition("</code>")[0]) for part in page.split("<code>")[1:]]


def test_changed_and_removed_samples(program: Program) -> None:
    with program.mounted("-q", "--overlay", "edits", SET) as mounted, viewing(program, mounted.path) as viewer:
        (mounted.path / A / "cls").write_bytes(b"7")
        for name in ("cls", "json"):
            (mounted.path / "t-000001/b" / name).unlink()
        (mounted.path / "t-000001/b").rmdir()
        assert viewer.ask(f"/file/{A}/cls").body == b"7"
        assert ">7<" in viewer.ask(f"/preview/{A}/cls").text
        assert viewer.ask("/file/t-000001/b/cls").body == b"1"  # as the shard has it
        assert _cards(viewer.ask("/").text) == [f"{A} changed", *IN_SHARDS[1:3], "t-000001/b removed"]
        assert _cards(viewer.ask("/?column=cls&value=7").text) == [f"{A} changed"]


def test_the_extracting_command_gives_what_the_page_shows(program: Program) -> None:
    """Also of a file that is changed, new or removed."""
    shown = {"t-000000/a/cls": b"7", "t-000000/a/txt": b"new", "t-000000/b/cls": b"0", "t-000001/b/cls": b"1"}
    with program.mounted("-q", "--overlay", "edits", SET) as mounted, viewing(program, mounted.path) as viewer:
        (mounted.path / "t-000000/a/cls").write_bytes(b"7")
        (mounted.path / "t-000000/a/txt").write_bytes(b"new")
        (mounted.path / "t-000001/b/cls").unlink()
        for path, content in shown.items():
            command = _commands(viewer.ask(f"/preview/{path}").text)[0]
            words = shlex.split(command)
            if words[0] == "wdsfs":
                assert program.run(*words[1:-2]).stdout == content, command
            else:
                subprocess.run(words, cwd=program.home, check=True)
                assert (program.home / words[-1]).read_bytes() == content, command


@pytest.mark.parametrize("names", ["full", "ext"])
def test_new_samples_are_in_the_grid(program: Program, names: str) -> None:
    stem = "n." if names == "full" else ""
    with program.mounted("-q", "--overlay", "edits", "--names", names, SET) as mounted:
        for place in ("t-000000/n", "t-000001/deep/n"):
            (mounted.path / place).mkdir(parents=True)
            (mounted.path / place / f"{stem}cls").write_bytes(b"7")
        (mounted.path / "t-000001/deep/n" / f"{stem}txt").write_bytes(b"a new text")
        (mounted.path / "t-000001/deep/n/.cls.swp").write_bytes(b"of an editor")
        (mounted.path / "t-000001/empty").mkdir()
        (mounted.path / "t-000000/a" / f"{'a.' if stem else ''}txt").write_bytes(b"more of a")
        with viewing(program, mounted.path) as viewer:
            new = ["t-000000/n new", "t-000001/deep/n new"]
            page = viewer.ask("/").text
            assert _cards(page) == ["t-000000/a changed", *IN_SHARDS[1:], *new]
            assert "6 samples in 2 shards, 2 of them new" in page
            for query, expected in {
                "q=n": new,
                "shard=t-000001": [*IN_SHARDS[2:], new[1]],
                "class=deep": new[1:],
                "has=txt": new[1:],
                "lacks=json": new,
                "column=cls&value=7": new,
                "at=5": new[1:],
            }.items():
                assert _cards(viewer.ask(f"/?{query}").text) == expected, query
            assert sorted(_cards(viewer.ask("/random?q=n").text)) == new
            assert len(_cards(viewer.ask("/random?seed=3").text)) == 6
            assert "A new sample" in viewer.ask("/sample/t-000001/deep/n").text
            assert ">new<" in viewer.ask(f"/sample/{A}").text


@pytest.mark.parametrize(
    ("engine", "options"), [(FUSE, ("--overlay", "edits")), (KERNEL, ())], indirect=["engine"]
)
def test_the_page_of_a_sample_has_its_path_in_the_mount(program: Program, options: tuple[str, ...]) -> None:
    with program.mounted("-q", *options, SET) as mounted:
        with viewing(program, mounted.path) as viewer:
            assert _commands(viewer.ask(f"/sample/{A}").text)[-1] == str(mounted.path / A)
            assert str(mounted.path / A / "cls") in _commands(viewer.ask(f"/preview/{A}/cls").text)
        assert str(mounted.path) in program.refused("view", mounted.path / "t-000000", code=5)


def test_shards_are_changed_in_a_mount(program: Program) -> None:
    """By what the page says: the command, then the path."""
    with viewing(program, SET) as viewer:
        command, directory = _commands(viewer.ask(f"/sample/{A}").text)[-2:]
    words = [word.replace("MOUNTPOINT", str(program.mountpoint)) for word in shlex.split(command)]
    program.mountpoint.mkdir(exist_ok=True)
    program.run(*words[1:])
    try:
        changed = program.home / directory.replace("MOUNTPOINT", str(program.mountpoint)) / "cls"
        changed.write_bytes(b"7")
        [sample] = program.json("diff", program.mountpoint)["samples"]
        assert (sample["path"], sample["changed"]) == (A, ["cls"])
    finally:
        program.run("umount", program.mountpoint)


def test_a_merged_mount_with_an_overlay_is_shown_without_its_changes(program: Program) -> None:
    with program.mounted("-q", "--merge", "--layout", "files", "--overlay", "edits", SET) as mounted:
        (mounted.path / "new.cls").write_bytes(b"7")
        with viewing(program, mounted.path) as viewer:
            page = viewer.ask("/").text
            assert _cards(page) == IN_SHARDS
            assert f"wdsfs diff {mounted.path}" in page


@BOTH_ENGINES
def test_options_of_a_set_are_refused_for_a_mount(program: Program) -> None:
    with program.mounted(SET) as mounted:
        assert "a mount knows" in program.refused("view", "--columns", "cls", mounted.path, code=2)


def test_a_symbolic_link_leads_out_of_no_mount(program: Program) -> None:
    outside = program.directory("outside")
    (outside / "cls").write_bytes(b"mine")
    with program.mounted("--overlay", "edits", SET) as mounted:
        (mounted.path / "t-000000/c").symlink_to(outside)
        (mounted.path / "t-000000/a/link").symlink_to(outside / "cls")
        with viewing(program, mounted.path) as viewer:
            for path in ("/sample/t-000000/c", "/file/t-000000/c/cls", "/file/t-000000/a/link"):
                assert viewer.ask(path).status == 404


def test_a_commit_shows_on_the_page(program: Program) -> None:
    with program.mounted("-q", "--overlay", "edits", SET) as mounted, viewing(program, mounted.path) as viewer:
        (mounted.path / A / "cls").write_bytes(b"7")
        assert _cards(viewer.ask("/").text)[0] == f"{A} changed"
        program.run("commit", "--in-place", mounted.path)
        wait_until(lambda: _cards(viewer.ask("/").text) == IN_SHARDS, "the new shard")
        assert viewer.ask(f"/file/{A}/cls").body == b"7"
