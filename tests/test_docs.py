"""The documents compared with the program."""

from __future__ import annotations

import ast
import io
import os
import re
import tarfile
from pathlib import Path

import click
import pytest

from tests.conftest import Program, need_fuse
from tests.peers import LONG_PATIENCE
from tests.processes import PATIENCE
from tests.typed import steps_of, type_in
from wdsfs.cli.main import main
from wdsfs.index import index_directory, store
from wdsfs.interop import lint
from wdsfs.mount import reports
from wdsfs.overlay import upper_format
from wdsfs.packing import reasons

ROOT = Path(__file__).parent.parent
_TOP = click.Context(main)
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
COMMANDS = {name: main.get_command(_TOP, name) for name in main.list_commands(_TOP)}
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "bench/RESULTS.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


def test_format_md_names_every_section_and_the_format(tmp_path: Path) -> None:
    text = (ROOT / "docs/reference/formats.md").read_text()
    source = (ROOT / "wdsfs/index/record_builder.py").read_text()
    sections = re.findall(r"\.put(?:_[a-z]+)?\(\s*\"([a-z.]+)\"", source)
    assert len(sections) > 20
    for section in sections:
        assert f"`{section}" in text, section
    assert f"`{index_directory.INDEX.version}`, the format of the environment" in text
    assert f"`{store._SUMMARY.format}`" in text


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_and_option_in_a_document_exists(document: Path) -> None:
    options = {"--help", "--help-all", "--version"}
    for command in COMMANDS.values():
        assert command is not None
        for parameter in command.params:
            options.update(parameter.opts if isinstance(parameter, click.Option) else [])
    for line in document.read_text().splitlines():
        for command in re.findall(r"(?:^|[`$ ])wdsfs ([a-z]+)", line):
            if line.startswith(("    wdsfs", "$ wdsfs")) or f"`wdsfs {command}" in line:
                assert main.get_command(_TOP, command), line
        if re.match(r"\s*(?:\$ )?wdsfs ", line):
            assert set(re.findall(r"(?<!\S)--[a-z][a-z-]*", line)) <= options, line


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_no_document_has_an_unfilled_place(document: Path) -> None:
    """A comment is not shown: what has only one, in a table or elsewhere, says nothing to readers."""
    assert "<!--" not in document.read_text().replace("<!-- bench: ", "")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", document.read_text()):
        if "://" not in target:
            page = document.parent / target if target else document
            assert page.exists(), target
            assert not anchor or anchor in _anchors(page), f"{target}#{anchor}"


LONGEST, ALL_PAGES = 300, 4_500  # lines of a page, and of all pages, that are written by hand
GENERATED = ("docs/reference/commands.md", "docs/reference/commands-make.md")


def test_pages_are_short() -> None:
    """What is new takes the place of something, and a fact stands once."""
    lines = {str(page.relative_to(ROOT)): page.read_text().count("\n") for page in (ROOT / "docs").rglob("*.md")}
    assert not {page: count for page, count in lines.items() if count > LONGEST}
    assert sum(count for page, count in lines.items() if page not in GENERATED) <= ALL_PAGES


def _anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


SHOWN_BY_TESTS = ["semantics", "shards", "views", "files", "damage", "indexes", "formats", "platforms"]


@pytest.mark.parametrize("page", [*(f"reference/{name}" for name in SHOWN_BY_TESTS), "how-to/pack"])
def test_every_section_names_the_tests_that_show_it(page: str) -> None:
    """Each section that says something has a footnote; each footnote names tests that exist."""
    text = (ROOT / f"docs/{page}.md").read_text()
    plain = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for section in re.split(r"^##+ ", plain, flags=re.MULTILINE)[1:]:
        assert not _says_something(section) or "[^" in section, f"no test is named: {section}"
    notes = dict(re.findall(r"^\[\^([a-z0-9-]+)\]: (.+)$", text, re.MULTILINE))
    assert set(re.findall(r"\[\^([a-z0-9-]+)\](?!:)", text)) == set(notes)
    existing = {file: set(re.findall(r"^def (test_\w+)\(", file.read_text(), re.MULTILINE)) for file in TESTS}
    for name, note in notes.items():
        shown_by = re.findall(r"`(tests/[a-z_/]+\.py)::(test_\w+)`", note)
        assert note == ", ".join(f"`{file}::{test}`" for file, test in shown_by), name
        for file, test in shown_by:
            assert test in existing.get(ROOT / file, ()), f"{page}.md, footnote {name}: there is no {file}::{test}"


def _says_something(section: str) -> bool:
    """Return whether a section has rows, points or paragraphs, other than those that lead to an example."""
    _, _, content = section.partition("\n")
    blocks = [block for block in re.split(r"\n{2,}", content) if block.strip() and not block.startswith("    ")]
    return any(not block.rstrip().endswith(":") for block in blocks)


def test_the_page_of_damage_lists_every_kind_of_finding() -> None:
    text = (ROOT / "docs/reference/damage.md").read_text()
    rooms = [file for room in ("tar", "index", "interop") for file in (ROOT / "wdsfs" / room).glob("*.py")]
    sources = "".join(file.read_text() for file in rooms)
    kinds = set(re.findall(r"(?:Problem|Damage)\([^,\"]+, \"([a-z ]+)\"", sources))
    kinds |= set(re.findall(r"(?:found\.add|Finding)\(\"([a-z ]+)\"", sources)) | lint.NOTES
    assert len(kinds) > 8
    for kind in kinds:
        assert f"`{kind}`" in text, kind


def test_overlay_md_has_every_reason_and_every_attribute() -> None:
    text = (ROOT / "docs/reference/overlay.md").read_text().replace("\\_", "_")
    texts = [
        str(node.value.value)
        for node in ast.parse((ROOT / "wdsfs/packing/reasons.py").read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and " " in str(node.value.value)
    ]
    assert reasons.OUTSIDE in texts
    assert len(texts) > 10
    for reason in texts:
        assert f"| {reason} |" in text, reason
    for name in (upper_format.OPAQUE, upper_format.WHITED_OUT, upper_format.ORIGIN, upper_format.MODE):
        assert f"`{name}`" in text, name


@pytest.mark.timeout(LONG_PATIENCE + PATIENCE)  # it starts thirty interpreters
def test_every_change_on_the_page_of_editing_is_what_happens(program: Program) -> None:
    """Every command is typed, in one shell; answers are compared word by word, times and places apart."""
    need_fuse()
    data = program.directory("data")
    _write_set(data)
    text = (ROOT / "docs/how-to/edit.md").read_text()
    section = text[text.index("## Every change once") : text.index("## Undoing")]
    assert len(steps_of(section)) > 20
    type_in(program, section, {"/mnt/train": program.mountpoint, "/data": data})


def _write_set(directory: Path) -> None:
    """Write the two shards of the page of editing."""
    for number, keys in enumerate((("cat1", "cat2", "dog1"), ("dog2", "cat3", "cat4"))):
        with tarfile.open(directory / f"train-{number:06d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for key in keys:
                for extension, content in (("jpg", bytes(3000)), ("cls", b"1\n"), ("json", b'{"is": "tabby"}\n')):
                    info = tarfile.TarInfo(f"images/{key}.{extension}")
                    info.size, info.mtime = len(content), 1_700_000_000
                    tar.addfile(info, io.BytesIO(content))


def test_the_example_for_contributors_names_what_exists() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    section = page.partition("### An example")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    assert len(rows) > 7
    source = "".join(file.read_text() for file in (ROOT / "wdsfs").rglob("*.py"))
    for place, what in rows:
        folder = ""
        for name in re.findall(r"`([\w./-]+\.(?:py|md))`", place):
            folder, name = os.path.split(name) if "/" in name else (folder, name)
            assert (ROOT / folder / name).exists(), place
        for name in re.findall(r"`(_?[A-Za-z_]+)`", place + what):
            assert re.search(rf"\b{name}\b", source), name


def test_the_address_of_the_repository_is_the_same_everywhere() -> None:
    """Its owner fills it in by one command, which CONTRIBUTING.md has."""
    pages = ["README.md", "SECURITY.md", "packaging/conda/recipe.yaml", ".github/ISSUE_TEMPLATE/config.yml"]
    texts = [(ROOT / page).read_text() for page in pages]
    owners = [re.findall(r"(?:github\.com/|--repo )([\w-]+)/wdsfs", text) for text in texts]
    assert all(owners)
    assert len({owner for names in owners for owner in names}) == 1


def test_the_page_on_monitoring_names_metrics_that_exist() -> None:
    page = (ROOT / "docs/how-to/monitor.md").read_text()
    named = set(re.findall(r"\bwdsfs_([a-z_]+[a-z])\b", page))
    tables = (reports._METRICS, reports._SET_METRICS, reports._PUSH_METRICS, reports._REMOTE_METRICS)
    assert len(named) > 15
    assert named <= {metric.name for table in tables for metric in table}
