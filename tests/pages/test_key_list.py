"""The list of the samples that pass a filter, which `--keys` takes: looked at, chosen, packed."""

from __future__ import annotations

import html
import re
from pathlib import Path
from urllib.parse import parse_qsl

import pytest

from tests import tars
from tests.conftest import Program
from tests.packing.test_view_shards import members
from tests.pages.viewing import viewing
from wdsfs.pages import set_query
from wdsfs.pages.filters import Filter

KEYS = ["d/a", "d/a", "e", "f.g/h"]


def a_set(home: Path) -> None:
    for number in range(2):
        parts = [tars.member(f"{key}.cls".encode(), b"%d" % (nth % 2)) for nth, key in enumerate(KEYS)]
        parts.insert(1, tars.member(b"between.x", b""))
        (home / f"s{number}.tar").write_bytes(tars.tar(*parts, tars.member(b"README", b"no sample")))


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", [f"s{n}/{key}" for n in range(2) for key in ("d/a", "between", "d/a", "e", "f.g/h")]),
        ("?q=d/a", ["s0/d/a", "s0/d/a", "s1/d/a", "s1/d/a"]),
        ("?shard=s1&has=x", ["s1/between"]),
        ("?column=cls&value=1", ["s0/d/a", "s0/f.g/h", "s1/d/a", "s1/f.g/h"]),
        ("?q=nothing", []),
    ],
)
def test_all_that_pass_are_listed(program: Program, query: str, expected: list[str]) -> None:
    """Not only those of the page; also a second sample of a key."""
    a_set(program.home)
    with viewing(program, "s{0..1}.tar") as viewer:
        answer = viewer.ask(f"/keys.txt{query}")
        assert (answer.status, answer.headers["content-disposition"]) == (200, "attachment; filename=keys.txt")
        assert answer.text.split("\n") == [*expected, ""]
        page = viewer.ask(f"/{query}").text
        links = [html.unescape(link) for link in re.findall('href="/keys.txt([^"]*)"', page)]
        wanted = [Filter.of(parse_qsl(query[1:]))] if expected else []
        assert [Filter.of(parse_qsl(link[1:])) for link in links] == wanted
    if expected:
        program.write("keys.txt", answer.body)
        program.run("pack", "-q", "--keys", "keys.txt", "s{0..1}.tar", "-o", "good-%d.tar")
        packed = {name.rpartition(".")[0] for path in program.home.glob("good-*.tar") for name, _ in members(path)}
        assert packed == {line.partition("/")[2] for line in expected}


def test_the_classes_of_a_mount_are_no_part_of_the_keys(program: Program) -> None:
    parts = [tars.member(f"{key}.{column}".encode(), b"7") for key in ("d/a", "e") for column in ("cls", "png")]
    (program.home / "s0.tar").write_bytes(tars.tar(*parts))
    with (
        program.mounted("-q", "--layout", "classes", "s0.tar") as mounted,
        viewing(program, mounted.path) as viewer,
    ):
        lines = viewer.ask("/keys.txt").text.split()
        assert lines == ["s0/d/a", "s0/e"]


def test_a_list_of_many_is_sent_while_it_is_made(program: Program) -> None:
    count = 3 * set_query.LINES
    (program.home / "s.tar").write_bytes(tars.tar(*(tars.member(b"%06d.x" % number) for number in range(count))))
    with viewing(program, "s.tar") as viewer:
        assert len(viewer.ask("/keys.txt").body) == count * len("s/000000\n")
        assert viewer.ask("/keys.txt", method="HEAD").body == b""


def test_a_key_that_is_no_line_is_an_error(program: Program) -> None:
    name = tars.pax({b"path": b"a\nb.x"}) + tars.member(b"y")
    (program.home / "s.tar").write_bytes(tars.tar(tars.member(b"a.x"), name))
    with viewing(program, "s.tar") as viewer:
        answer = viewer.ask("/keys.txt")
        assert answer.status == 400
        assert "which has a line end" in answer.text


def test_a_shard_that_cannot_be_read_has_no_lines(program: Program) -> None:
    a_set(program.home)
    (program.home / "s1.tar").rename(program.home / "s2.tar")
    (program.home / "s1.tar").write_bytes(b"no tar" * 100)
    with viewing(program, "--allow-missing", "s{0..2}.tar") as viewer:
        assert viewer.ask("/keys.txt?q=d/a").text.split() == ["s0/d/a", "s0/d/a", "s2/d/a", "s2/d/a"]
