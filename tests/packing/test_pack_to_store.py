"""Packed sets whose shards are objects in a store."""

from __future__ import annotations

import pytest

from tests.conftest import Program
from tests.packing.conftest import FakeS3
from tests.packing.test_pack import CLASSES, pack, write


@pytest.fixture
def with_store(program: Program, s3: FakeS3) -> Program:
    for name in list(program.environment):
        if name.startswith("AWS_") or name.lower().endswith("_proxy"):
            del program.environment[name]
    program.environment.update(s3.environment)
    write(program.home / "tree", CLASSES)
    return program


def test_shards_and_classes_go_to_a_store(with_store: Program, s3: FakeS3) -> None:
    """With the bytes that files have. What is there is kept by the next run; something else is refused."""
    arguments = (
        "pack",
        "--layout",
        "classes",
        "--maxcount",
        "2",
        "tree",
        "-o",
        "s3://bucket/new/%d.tar",
        "--json",
    )
    expected = pack(with_store.home / "tree", layout="classes", maxcount=2)
    s3.store("new/0.tar", expected[0])
    assert with_store.json(*arguments)["written"] == 1
    assert s3.objects == {
        "new/0.tar": expected[0],
        "new/1.tar": expected[1],
        "new/classes.txt": b"cat\ndog\n",
    }
    s3.store("new/1.tar", expected[1][:-1] + b"x")
    assert "new/1.tar exists already with other content" in with_store.refused(*arguments, code=7)
