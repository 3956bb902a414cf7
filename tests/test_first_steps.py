"""The first hour: what README says under "First steps", typed in over three small sets, each as a new user has it.

Images are real ones, of handwritten digits; sound is a tone. A video is the frame of a file only: nothing here
plays it.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import shlex
import struct
import sys
import wave
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from PIL import Image
from sklearn.datasets import load_digits

from tests import tars
from tests.conftest import ROOT, Program, need_fuse
from tests.peers import LONG_PATIENCE, SCRIPTS, TOOLS, environment_of, need_tool
from tests.typed import steps_of, type_in

_TEXT = (ROOT / "README.md").read_text()
_STEPS = _TEXT[_TEXT.index("## First steps\n") : _TEXT.index("## Everyday use\n")]
SETS = {one.partition(".**")[0]: one for one in re.split(r"^\*\*", _STEPS, flags=re.MULTILINE)[1:]}
IMAGES, SPEECH, VIDEO = "Images with classes", "Speech with transcripts", "Video with JSON"

pytestmark = pytest.mark.timeout(2 * LONG_PATIENCE)

Sample = tuple[str, Mapping[str, bytes]]


def images() -> Iterable[Sample]:
    digits = load_digits()
    for number in range(20):
        file = io.BytesIO()
        Image.fromarray((digits.images[number] * 15).astype("uint8")).save(file, "PNG")
        yield f"img{number:02d}", {"png": file.getvalue(), "cls": b"%d" % digits.target[number]}


def speech() -> Iterable[Sample]:
    for number in range(4):
        tone = (int(9000 * math.sin(time * (number + 1) / 7)) for time in range(4000))
        file = io.BytesIO()
        with wave.open(file, "wb") as sound:
            sound.setparams((1, 2, 8000, 0, "NONE", ""))
            sound.writeframes(b"".join(struct.pack("<h", one) for one in tone))
        yield f"anna/say{number}", {"wav": file.getvalue(), "txt": b"this is sentence %d" % number}


def video() -> Iterable[Sample]:
    frame = struct.pack(">I4s4sI", 16, b"ftyp", b"isom", 0) + struct.pack(">I4s", 2048, b"mdat") + bytes(2040)
    for number, caption in enumerate(("a cat on a roof", "rain", "a dog in the snow", "a train")):
        yield f"clip{number}", {"mp4": frame, "json": json.dumps({"caption": caption, "fps": 25}).encode()}


def write_shards(directory: Path, name: str, samples: Iterable[Sample]) -> None:
    """Two shards with half of the samples each."""
    found = list(samples)
    half = len(found) // 2
    for shard in range(2):
        members = [
            tars.member(f"{key}.{column}".encode(), content)
            for key, columns in found[shard * half : shard * half + half]
            for column, content in columns.items()
        ]
        (directory / f"{name}-{shard}.tar").write_bytes(tars.tar(*members))


MADE = {IMAGES: ("digits", images), SPEECH: ("speech", speech), VIDEO: ("clips", video)}


@pytest.mark.parametrize("title", MADE)
def test_first_steps_can_be_typed_from_the_readme_alone(program: Program, title: str) -> None:
    need_fuse()
    python: tuple[str, ...] = (sys.executable,)
    if title == IMAGES:
        need_tool("torchvision")
        python = (str(TOOLS / "bin" / "python"), str(SCRIPTS / "with_torchvision.py"))
    data = program.directory("data")
    name, samples = MADE[title]
    write_shards(data, name, samples())
    program.environment = {**environment_of(program), "LC_ALL": "C.UTF-8"}
    start = f'python() {{ {shlex.join(python)} "$@"; }}'
    place = data / "mnt"
    try:
        type_in(program, SETS[title], {"/data": data}, start)
        assert not os.path.ismount(place), "the steps do not unmount"
    finally:
        if os.path.ismount(place):
            program.run("umount", "--lazy", place, code=None)


def test_there_is_a_set_for_each_of_the_first_steps() -> None:
    assert set(SETS) == set(MADE)
    for title, page in SETS.items():
        commands = [step.command for step in steps_of(page)]
        assert any(one.startswith("wdsfs mount ") for one in commands), title
        assert commands[-1].startswith("wdsfs umount "), title


def test_the_readme_is_short() -> None:
    """What is said in full is on a page of its own: everyday use takes a screen here, and the rest four."""
    everyday = _TEXT[_TEXT.index("## Everyday use\n") : _TEXT.index("## Editing\n")]
    assert len(everyday.splitlines()) <= 30
    assert len(_TEXT.splitlines()) <= 200
