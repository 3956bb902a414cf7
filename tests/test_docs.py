"""What the documents say, held against the program."""

from __future__ import annotations

import io
import os
import re
import tarfile
from pathlib import Path

import click
import pytest

from wdsfs import check, index, record
from wdsfs.cli import main

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_example_in_format_md_is_what_is_stored(tmp_path: Path) -> None:
    path = tmp_path / "example.tar"
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in (("d/a.jpg", b"abc"), ("d/a.cls", b"7"), ("d/b.jpg", b"def")):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    fd = os.open(path, os.O_RDONLY)
    built = record.Record(record.build(fd, [1, 2, 3]))
    os.close(fd)
    text = (ROOT / "docs/format.md").read_text()
    rows = re.findall(r"^\| `([a-z]+\.[a-z.]+)` \| `([0-9a-f ]+)`", text, re.MULTILINE)
    assert len(rows) == 9
    for section, digits in rows:
        assert built.column[section].tobytes() == bytes.fromhex(digits), section


def test_format_md_names_every_section_and_the_format(tmp_path: Path) -> None:
    text = (ROOT / "docs/format.md").read_text()
    source = (ROOT / "wdsfs/record.py").read_text()
    for section in re.findall(r"_put(?:_names|_hash)?\(\s*\"([a-z.]+)\"", source):
        assert f"`{section}" in text, section
    assert f"`{index.FORMAT.decode()}`, the format of the environment" in text
    assert f"`{index._SUMMARY.format}`" in text


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_and_option_in_a_document_exists(document: Path) -> None:
    options = {"--help", "--version"}
    for command in main.commands.values():
        for parameter in command.params:
            options.update(parameter.opts if isinstance(parameter, click.Option) else [])
    for line in document.read_text().splitlines():
        for command in re.findall(r"(?:^|[`$ ])wdsfs ([a-z]+)", line):
            if line.startswith(("    wdsfs", "$ wdsfs")) or f"`wdsfs {command}" in line:
                assert command in main.commands, line
        if re.match(r"\s*(?:\$ )?wdsfs ", line):
            assert set(re.findall(r"(?<!\S)--[a-z][a-z-]*", line)) <= options, line


@pytest.mark.parametrize("name", sorted(main.commands))
def test_every_command_explains_itself_and_is_in_the_readme(name: str) -> None:
    command = main.commands[name]
    assert re.search(r"Examples?:", command.help or ""), "no example in its help"
    assert f"wdsfs {name}" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), target


def test_semantics_md_lists_every_kind_of_finding() -> None:
    text = (ROOT / "docs/semantics.md").read_text()
    sources = "".join((ROOT / f"wdsfs/{name}.py").read_text() for name in ("shard", "record", "check"))
    kinds = set(re.findall(r"(?:Problem|_Damage)\([^,\"]+, \"([a-z ]+)\"", sources))
    kinds |= set(re.findall(r"(?:found\.add|Finding)\(\"([a-z ]+)\"", sources)) | check.NOTES
    assert len(kinds) > 8
    for kind in kinds:
        assert f"`{kind}`" in text, kind
