"""Pages of the documents that a test types in: the commands after `$ ` in blocks without a language.

Files that a page has the reader write stand in blocks with a language, after a line that has their name in
backquotes and ends in a colon.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import Program
from tests.peers import LONG_PATIENCE
from tests.processes import finished

_MARK = "-- end of the answer --"
_MARKED = re.compile(rf"{_MARK} (\d+)\n")
# What an unmount says while a disk is busy (docs/reference/overlay.md, "Promises").
_PATIENT = re.compile(r"^wdsfs: waiting for process .*\n", re.MULTILINE)
_FILE = re.compile(r"^[^\n]*`([\w-]+\.\w+)`[^\n]*:\n\n```[a-z]+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"^```\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Step:
    command: str
    answer: str


def steps_of(page: str) -> list[Step]:
    blocks = _BLOCK.findall(_FILE.sub("", page))
    steps = [one for block in blocks for one in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    return [Step(command, answer) for command, _, answer in (step.partition("\n") for step in steps)]


def files_of(page: str) -> dict[str, str]:
    return dict(_FILE.findall(page))


def type_in(
    program: Program, page: str, places: Mapping[str, Path], start: str = "", merge_errors: bool = True
) -> None:
    """Type every command of the page in one shell, in `/data`, and compare the answers word by word.

    `places` says where the paths of the page are in this test: `/mnt/train` and `/data`. Times are not compared.
    Without `merge_errors` only the standard output is an answer, and every command has to succeed.
    """

    def here(text: str) -> str:
        return re.sub("|".join(map(re.escape, places)), lambda found: str(places[found[0]]), text)

    def there(text: str) -> str:
        for name, path in places.items():
            text = text.replace(str(path), name)
        return text

    for name, content in files_of(page).items():
        (places["/data"] / name).write_text(here(content))
    steps = steps_of(page)
    script = [f'wdsfs() {{ {shlex.quote(sys.executable)} -m wdsfs "$@"; }}', start]
    for step in steps:
        script += [here(step.command), f"code=$?; echo '{_MARK}' $code"]
        script += [] if merge_errors else ["test $code = 0 || exit"]
    try:
        streams = {"stderr": subprocess.STDOUT} if merge_errors else {}
        given: dict[str, Any] = {"env": program.environment, "cwd": places["/data"], **streams}
        done = finished("bash", "-c", "\n".join(script), code=None, timeout=LONG_PATIENCE, **given)
    finally:
        if os.path.ismount(program.mountpoint):
            program.run("umount", "--lazy", program.mountpoint, code=None)
    said = _MARKED.split(there(done.stdout))
    for step, answer, code in zip(steps, said[:-1:2], said[1::2], strict=False):
        assert merge_errors or code == "0", (step.command, done.stderr)
        assert _words(answer) == _words(step.answer), f"{step.command}\n{answer}{done.stderr or ''}"
        if step.command.startswith("tree "):  # a picture: what is below what is said by the place on the line
            assert answer.replace("\u00a0", " ").split("\n") == step.answer.split("\n"), step.command
    assert len(said) == 2 * len(steps) + 1


def _words(text: str) -> list[str]:
    text = _PATIENT.sub("", text)
    return re.sub(r"in [\d.]+ s$", "in 0.1 s", text, flags=re.MULTILINE).replace("\u2500", "").split()
