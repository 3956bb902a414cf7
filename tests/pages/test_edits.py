"""Changes from the pages, of an overlay that is not mounted and of one that is."""

from __future__ import annotations

import contextlib
import re
import shutil
import tarfile
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

from tests import tars
from tests.conftest import BOTH_ENGINES, Program
from tests.overlay.test_overlay_mount import a_disk
from tests.pages.viewing import Browser, Viewer, viewing
from wdsfs.pages.edits import digest

SET = "t-{000000..000001}.tar"
OVERLAY = ("--overlay", "edits", SET)
A = "t-000000/a"
CHANGED_KINDS = "main tbody td:first-child"


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


def _type_into(browser: Browser, viewer: Viewer, name: str, text: str) -> None:
    """Type another text into the form of a file of the first sample."""
    browser.go(viewer, f"/sample/{A}")
    browser.wait_for_previews(2)
    area = browser.unfold(f"section[id={name}] textarea")
    area.clear()
    area.send_keys(text)
    browser.follow(f"section[id={name}] .edit button")


def test_change_delete_undo_diff_and_commit(browser: Browser, program: Program) -> None:
    with viewing(program, *OVERLAY) as viewer:
        browser.open(viewer)
        _type_into(browser, viewer, "cls", "7")
        assert browser.texts("section[id=cls] .mark") == ["changed"]
        browser.go(viewer, "/sample/t-000001/b")
        browser.follow("button.danger")
        assert browser.texts(CHANGED_KINDS) == ["changed", "removed"]
        assert browser.texts("main dd code")[0] == f"wdsfs diff --overlay edits '{SET}'"
        browser.go(viewer, "/")
        assert browser.texts(".grid .mark") == ["changed", "removed"]
        browser.follow(".undo button")
        assert browser.texts(CHANGED_KINDS) == ["changed"]
    [sample] = program.json("diff", *OVERLAY)["samples"]
    assert (sample["path"], sample["changed"]) == (A, ["cls"])
    program.run("commit", "-o", "new/%06d.tar", *OVERLAY)
    with tarfile.open(program.home / "new/000000.tar") as tar:
        changed = tar.extractfile("a.cls")
        assert changed is not None
        assert changed.read() == b"7"


def test_undo_goes_back_one_change_at_a_time(browser: Browser, program: Program) -> None:
    with viewing(program, *OVERLAY) as viewer:
        browser.open(viewer)
        _type_into(browser, viewer, "cls", "7")
        _type_into(browser, viewer, "cls", "8")
        assert viewer.ask(f"/file/{A}/cls").body == b"8"
        browser.go(viewer, f"/sample/{A}")
        browser.follow("button.danger")
        for expected in (b"8", b"7", b"0"):
            browser.follow(".undo button")
            assert viewer.ask(f"/file/{A}/cls").body == expected
        assert not browser.all(".undo button")
        assert browser.texts(CHANGED_KINDS) == []


def test_a_json_field(browser: Browser, program: Program) -> None:
    with viewing(program, *OVERLAY) as viewer:
        browser.open(viewer)
        browser.go(viewer, f"/sample/{A}")
        browser.wait_for_previews(2)
        browser.unfold("section[id=json] [name=field]").send_keys("of.1")
        browser.one("section[id=json] [name=value]").send_keys('"zwei"')
        browser.follow("section[id=json] .edit button", 1)
        assert viewer.ask(f"/file/{A}/json").body == b'{"x": 1, "of": [1, "zwei"]}\n'
        browser.wait_for_previews(2)
        browser.unfold("section[id=json] [name=field]").send_keys("x.y")
        browser.follow("section[id=json] .edit button", 1)
        assert "no place for a field" in browser.texts("[role=alert]")[0]


@pytest.mark.parametrize("content", [b"\r\n\r\none\r\ntwo", b"\n\nx\n", b"  x\n\n\n"])
def test_what_is_not_edited_stays_as_it_is(browser: Browser, program: Program, content: bytes) -> None:
    program.write("a.tar", tars.tar(tars.member(b"a.txt", content)))
    with viewing(program, "--overlay", "edits", "a.tar") as viewer:
        browser.open(viewer)
        browser.go(viewer, "/sample/a/a")
        browser.wait_for_previews(1)
        area = browser.unfold("textarea")
        area.send_keys(Keys.CONTROL, Keys.END)
        area.send_keys("!")
        browser.follow(".edit button")
        assert viewer.ask("/file/a/a/txt").body == content + b"!"


def test_a_change_of_someone_else_is_not_overwritten(program: Program) -> None:
    with viewing(program, *OVERLAY) as viewer:
        form = {"path": f"{A}/cls", "seen": viewer.seen(f"{A}/cls")}
        assert viewer.ask("/edit", {**form, "text": "5"}).status == 303
        answer = viewer.ask("/edit", {**form, "text": "6"})
        assert (answer.status, "changed meanwhile" in answer.text) == (409, True)
        assert viewer.ask(f"/file/{A}/cls").body == b"5"


def test_filters_see_changed_values(program: Program) -> None:
    with viewing(program, *OVERLAY) as viewer:
        assert viewer.edit(f"{A}/cls", "5").status == 303
        page = viewer.ask("/?column=cls&value=5").text
        assert page.count('href="/sample/') == page.count(f'href="/sample/{A}?') == 1


def _names(page: str) -> list[str]:
    """The samples of a grid with their marks, in their order."""
    cards = page.partition('<ol class="grid">')[2].partition("</ol>")[0].split("<li")[1:]
    marks = [card.partition('<span class="mark">')[2].partition("<")[0] for card in cards]
    paths = [re.split('[?"]', card.partition("/sample/")[2])[0] for card in cards]
    return [f"{path} {mark}".strip() for path, mark in zip(paths, marks, strict=True)]


IN_SHARDS = ["t-000000/a", "t-000000/b", "t-000001/a", "t-000001/b"]


@BOTH_ENGINES
@pytest.mark.parametrize("names", ["ext", "full"])
def test_new_samples_are_in_the_grid_and_found(program: Program, names: str) -> None:
    stem = "n." if names == "full" else ""
    with program.mounted("-q", "--overlay", "edits", "--names", names, SET) as mounted:
        for place in ("t-000000/n", "t-000001/deep/n"):
            (mounted.path / place).mkdir(parents=True)
            (mounted.path / place / f"{stem}cls").write_bytes(b"7")
        (mounted.path / "t-000001/deep/n" / f"{stem}txt").write_bytes(b"a new text")
        (mounted.path / "t-000001/empty").mkdir()
        (mounted.path / "t-000000/a" / f"{'a.' if stem else ''}txt").write_bytes(b"more of a")
        with viewing(program, mounted.path) as viewer:
            new = ["t-000000/n new", "t-000001/deep/n new"]
            page = viewer.ask("/").text
            assert _names(page) == ["t-000000/a changed", *IN_SHARDS[1:], *new]
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
                assert _names(viewer.ask(f"/?{query}").text) == expected, query
            assert sorted(_names(viewer.ask("/random?q=n").text)) == new
            assert len(_names(viewer.ask("/random?seed=3").text)) == 6
            shown = viewer.ask("/sample/t-000001/deep/n").text
            assert [one in shown for one in ("A new sample", "Delete sample", "Restore sample")] == [
                True,
                True,
                False,
            ]
            assert ">new<" in viewer.ask(f"/sample/{A}").text
        with viewing(program, "--overlay", copied(program), SET) as viewer:
            assert "6 samples in 2 shards, 2 of them new" in viewer.ask("/").text


def copied(program: Program) -> str:
    """A copy of the overlay, which no mount uses."""
    shutil.copytree(program.home / "edits", program.home / "copy", ignore=shutil.ignore_patterns("work", "lock"))
    return "copy"


@pytest.mark.parametrize("through", ["the mount", "an overlay of its own"])
def test_a_new_sample_is_deleted_and_brought_back(program: Program, through: str) -> None:
    with program.mounted("-q", "--overlay", "edits", SET) as mounted:
        (mounted.path / "t-000000/n").mkdir()
        (mounted.path / "t-000000/n/cls").write_bytes(b"7")
        what: tuple[str | Path, ...] = (mounted.path,)
        if through != "the mount":
            what = ("--overlay", copied(program), SET)
        with viewing(program, *what) as viewer:
            assert viewer.ask("/remove", {"path": "t-000000/n"}).status == 303
            assert _names(viewer.ask("/").text) == IN_SHARDS
            assert viewer.ask("/undo", {}).status == 303
            assert _names(viewer.ask("/").text) == [*IN_SHARDS, "t-000000/n new"]


def test_without_an_overlay_nothing_can_be_changed(program: Program) -> None:
    with viewing(program, SET) as viewer:
        assert "<textarea" not in viewer.ask(f"/preview/{A}/cls").text
        for action in ("/edit", "/field", "/remove", "/restore", "/undo"):
            answer = viewer.ask(action, {"path": A})
            assert (answer.status, "--overlay" in answer.text) == (400, True), action


def test_an_overlay_has_one_user_at_a_time(program: Program) -> None:
    with viewing(program, *OVERLAY):
        assert "edits" in program.refused("view", *OVERLAY, code=8)


def test_what_was_changed_is_there_the_next_time(program: Program) -> None:
    with viewing(program, *OVERLAY) as viewer:
        assert viewer.ask("/remove", {"path": A}).status == 303
    with viewing(program, *OVERLAY) as viewer:
        assert "removed" in viewer.ask(f"/sample/{A}").text
        assert viewer.ask("/restore", {"path": A}).status == 303
        assert "Restore" not in viewer.ask(f"/sample/{A}").text


@pytest.mark.parametrize("names", ["ext", "full"])
def test_a_writable_mount_is_changed_through_itself(program: Program, names: str) -> None:
    stem = "{}." if names == "full" else ""
    a, b = stem.format("a") + "cls", stem.format("b") + "cls"
    with program.mounted("--overlay", "edits", "--names", names, SET) as mounted:
        with viewing(program, mounted.path) as viewer:
            answer = viewer.edit(f"{A}/{a}", "5")
            assert answer.status == 303, answer.text
            assert (mounted.path / A / a).read_bytes() == b"5"
            assert viewer.ask("/remove", {"path": "t-000001/b"}).status == 303
            assert not (mounted.path / "t-000001/b").exists()
            (mounted.path / "t-000000/b" / b).write_bytes(b"9")  # by another program
            changes = viewer.ask("/changes").text
            assert [changes.count(f">{path}</a>") for path in (A, "t-000000/b", "t-000001/b")] == [1, 1, 1]
            assert f"wdsfs commit --in-place {mounted.path}" in changes
            assert viewer.ask("/undo", {}).status == 303
            assert (mounted.path / "t-000001/b").exists()
            assert viewer.ask("/undo", {}).status == 303
            assert (mounted.path / A / a).read_bytes() == b"0"
        assert [one["path"] for one in program.json("diff", mounted.path)["samples"]] == ["t-000000/b"]


@BOTH_ENGINES
def test_a_mount_without_an_overlay_is_looked_at(program: Program) -> None:
    with program.mounted(SET) as mounted:
        with viewing(program, mounted.path) as viewer:
            assert "4 samples in 2 shards" in viewer.ask("/").text
            assert viewer.ask("/changes").status == 400
        assert str(mounted.path) in program.refused("view", mounted.path / "t-000000", code=5)


@BOTH_ENGINES
def test_options_of_a_set_are_refused_for_a_mount(program: Program) -> None:
    with program.mounted(SET) as mounted:
        assert "a mount knows" in program.refused("view", "--overlay", "edits", mounted.path, code=2)
        assert "a mount knows" in program.refused("view", "--columns", "cls", mounted.path, code=2)


def test_undo_takes_back_no_change_of_someone_else(program: Program) -> None:
    with program.mounted("--overlay", "edits", SET) as mounted, viewing(program, mounted.path) as viewer:
        assert viewer.edit(f"{A}/cls", "5").status == 303
        (mounted.path / A / "cls").write_bytes(b"6")  # by another program
        answer = viewer.ask("/undo", {})
        assert (answer.status, "since then" in answer.text) == (409, True)
        assert (mounted.path / A / "cls").read_bytes() == b"6"
        assert viewer.ask("/undo", {}).status == 404  # it is not offered again
        assert viewer.ask("/remove", {"path": A}).status == 303
        (mounted.path / A).mkdir()
        (mounted.path / A / "txt").write_bytes(b"new")
        assert viewer.ask("/undo", {}).status == 409
        assert (mounted.path / A / "txt").read_bytes() == b"new"


def test_undo_takes_back_what_its_button_says(program: Program) -> None:
    """Not the change that was made meanwhile in another tab, nor the one before at a double click."""
    with viewing(program, *OVERLAY) as viewer:
        for text in ("5", "6"):
            assert viewer.edit(f"{A}/cls", text).status == 303
        number = viewer.ask("/").text.partition('name="number" value="')[2].partition('"')[0]
        assert viewer.edit("t-000001/b/cls", "7").status == 303
        answer = viewer.ask("/undo", {"number": number})
        assert (answer.status, "nothing was undone" in answer.text) == (409, True)
        assert viewer.ask("/undo", {}).status == 303
        assert [viewer.ask("/undo", {"number": number}).status for _ in range(2)] == [303, 409]
        assert viewer.ask(f"/file/{A}/cls").body == b"5"
        assert viewer.ask("/file/t-000001/b/cls").body == b"1"


def test_undo_of_what_was_committed_is_refused(program: Program) -> None:
    with program.mounted("--overlay", "edits", SET) as mounted, viewing(program, mounted.path) as viewer:
        assert viewer.edit(f"{A}/cls", "5").status == 303
        program.run("commit", "--in-place", mounted.path)
        assert viewer.ask("/undo", {}).status in (409, 502)
        assert (mounted.path / A / "cls").read_bytes() == b"5"


@BOTH_ENGINES
def test_a_symbolic_link_leads_no_change_out_of_a_mount(program: Program) -> None:
    outside = program.home / "outside"
    outside.mkdir()
    (outside / "cls").write_bytes(b"mine")
    with program.mounted("--overlay", "edits", SET) as mounted:
        (mounted.path / "t-000000/c").symlink_to(outside)
        with viewing(program, mounted.path) as viewer:
            assert viewer.ask("/remove", {"path": "t-000000/c"}).status == 404
            assert viewer.ask("/file/t-000000/c/cls").status == 404
            assert viewer.ask("/edit", {"path": "t-000000/c/cls", "seen": "", "text": "x"}).status == 404
    assert (outside / "cls").read_bytes() == b"mine"


@BOTH_ENGINES
def test_a_swap_file_of_an_editor_is_left_alone(program: Program) -> None:
    with program.mounted("--overlay", "edits", SET) as mounted:
        swap = mounted.path / A / ".cls.swp"
        swap.write_bytes(b"what vim would recover")
        with viewing(program, mounted.path) as viewer:
            assert viewer.edit(f"{A}/cls", "5").status == 303
            assert swap.read_bytes() == b"what vim would recover"


@pytest.mark.parametrize("way", ["own", "mount"])
def test_an_edit_that_does_not_fit_changes_nothing(program: Program, way: str) -> None:
    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(a_disk(program, "tmpfs"))
        overlay = ("--overlay", disk / "edits", SET)
        shown: tuple[str | Path, ...] = overlay
        if way == "mount":
            mounted = stack.enter_context(program.mounted(*overlay))
            mounted.allow_log("No space left on device")
            shown = (mounted.path,)
        viewer = stack.enter_context(viewing(program, *shown))
        assert viewer.edit(f"{A}/cls", "7").status == 303
        with contextlib.suppress(OSError), (disk / "filling").open("wb", buffering=0) as filling:
            while True:
                filling.write(bytes(65536))
        answer = viewer.edit(f"{A}/cls", "8" * 500_000)
        assert (answer.status, "No space left" in answer.text) == (502, True)
        assert viewer.ask(f"/file/{A}/cls").body == b"7"
        assert "left behind" not in viewer.ask("/changes").text
        (disk / "filling").unlink()
        assert viewer.ask("/undo", {}).status == 303
        assert viewer.ask(f"/file/{A}/cls").body == b"0"


def test_a_form_without_a_text_empties_nothing(program: Program) -> None:
    with viewing(program, *OVERLAY) as viewer:
        assert viewer.ask("/edit", {"path": f"{A}/cls", "seen": viewer.seen(f"{A}/cls")}).status == 400
        assert viewer.ask(f"/file/{A}/cls").body == b"0"


def test_a_field_beside_half_a_character_and_odd_numbers(program: Program) -> None:
    content = b'{"a": 1.10, "b": 1e400, "s": "\\ud83d", "x": 1}'
    program.write("a.tar", tars.tar(tars.member(b"a.json", content), tars.member(b"a.txt", b"\xff{}")))
    with viewing(program, "--overlay", "edits", "a.tar") as viewer:
        form = {"path": "a/a/json", "seen": viewer.seen("a/a/json"), "field": "x", "value": "2"}
        assert viewer.ask("/field", form).status == 303
        assert viewer.ask("/file/a/a/json").body == content.replace(b": 1}", b": 2}")
        form = {"path": "a/a/txt", "seen": digest(b"\xff{}"), "field": "x", "value": "2"}
        assert viewer.ask("/field", form).status == 400
