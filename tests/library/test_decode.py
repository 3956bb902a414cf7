"""`wdsfs.decode`, and `decode=` of `wdsfs.samples`: values by extension; damage and pickles; further decoders."""

from __future__ import annotations

import io
import pickle
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import wdsfs
from tests import tars
from tests.peers import TOOLS, need_tool
from wdsfs.tree import sample_decoder


def picture(kind: str, mode: str = "RGB", size: tuple[int, int] = (4, 3)) -> bytes:
    file = io.BytesIO()
    Image.new(mode, size, 7).save(file, kind)
    return file.getvalue()


def array(values: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, values, **options)
    return file.getvalue()


def arrays(**values: Any) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **values)
    return file.getvalue()


PICKLE = pickle.dumps(Path("x"))


def plain(value: Any) -> Any:
    """Return a decoded value in a form that can be compared."""
    if isinstance(value, Image.Image):
        return value.mode, value.size
    return value.tolist() if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize(
    ("name", "data", "value"),
    [
        ("jpg", picture("JPEG"), ("RGB", (4, 3))),
        ("JPEG", picture("PNG", "L"), ("L", (4, 3))),  # the bytes decide, and the mode is that of the file
        ("seg.png", picture("PNG", "P"), ("P", (4, 3))),
        ("webp", picture("WEBP"), ("RGB", (4, 3))),
        ("npy", array([[1, 2]]), [[1, 2]]),
        ("cls", b" 7\n", 7),
        ("txt", "ä\n".encode(), "ä\n"),
        ("meta.json", b'{"a": [1, null]}', {"a": [1, None]}),
        ("cls", b"", None),
        ("jpg", b"", None),
        ("txt", b"", ""),
        ("pkl", PICKLE, PICKLE),
        ("wav", b"RIFF", b"RIFF"),
        ("txt.gz", b"x", b"x"),
        ("wav", b"", b""),
        ("__shard__", "s-0", "s-0"),
    ],
)
def test_the_value_of_a_column(name: str, data: Any, value: Any) -> None:
    assert plain(wdsfs.decode({"__key__": "k", name: data})[name]) == value


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("cls", b"cat", r"b'cat' is no whole number; decode=\{'cls': bytes.decode\} is its text"),
        ("cls", b"1" * 5000, "no whole number"),
        ("json", b"[" * 100_000, "is not JSON"),
        ("txt", b"\xff", "can't decode byte"),
        ("npy", array([Path("x")], allow_pickle=True), "allow_pickle=False"),
        ("npz", arrays(a=np.array([Path("x")])), "allow_pickle=False"),
        ("npy", array([1, 2])[:-1], "."),
        ("npy", array([1]).replace(b"(1,)", b"(1%s,)" % (b"0" * 12)).replace(b" " * 13, b""), "."),
        ("npz", PICKLE, "not a zip file"),
        ("jpg", picture("JPEG")[:200], "."),
        ("png", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n", "none of JPEG, PNG"),  # a program
    ],
)
def test_what_cannot_be_decoded_names_sample_and_column(name: str, data: bytes, text: str) -> None:
    with pytest.raises(wdsfs.DecodeError, match=rf"^s-0/k\.{name} cannot be decoded: .*{text}") as raised:
        wdsfs.decode({"__key__": "k", "__shard__": "s-0", name: data})
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)  # as a worker of a loader sends it


def test_arrays_that_would_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_decoder, "_ARRAYS_MAX", 1000)
    assert wdsfs.decode({"npz": arrays(a=np.zeros(10))})["npz"]["a"].tolist() == [0.0] * 10
    with pytest.raises(wdsfs.DecodeError, match=r"have 7\.9 KiB; the limit is 1000 B"):
        wdsfs.decode({"npz": arrays(a=np.zeros(1000))})


@pytest.fixture
def shard(tmp_path: Path) -> str:
    members = {"k0.jpg": picture("JPEG"), "k0.cls": b"3", "k1.jpg": picture("JPEG"), "k1.cls": b"x"}
    (tmp_path / "s.tar").write_bytes(
        tars.tar(*(tars.member(name.encode(), data) for name, data in members.items()))
    )
    return "s.tar"


def test_samples_are_decoded_however_they_are_asked_for(shard: str) -> None:
    with wdsfs.samples(shard, decode=True, columns="cls") as samples:
        expected = {"__key__": "k0", "__shard__": "s", "cls": 3}
        assert samples[0] == samples[-2] == samples[:1][0] == samples[[0]][0] == samples.by_key("k0") == expected
        assert next(iter(samples)) == pickle.loads(pickle.dumps(samples))[0] == expected
        with pytest.raises(wdsfs.DecodeError, match=r"s/k1\.cls"):
            samples[1]


def test_further_decoders_come_first(shard: str) -> None:
    with wdsfs.samples(shard, decode={"CLS": bytes.decode, "jpg": len}) as samples:
        assert [sample["cls"] for sample in samples] == ["3", "x"]
        assert samples[1]["jpg"] == len(picture("JPEG"))
    sample = {"seg.png": b"ab", "png": picture("PNG"), "cls": b"1", "id": b""}
    decoded = wdsfs.decode(sample, {"seg.png": len, "cls": bytes, "id": bytes})
    assert (decoded["seg.png"], decoded["png"].size, decoded["cls"], decoded["id"]) == (2, (4, 3), b"1", b"")
    with pytest.raises(wdsfs.DecodeError, match="cls cannot be decoded: StopIteration"):
        wdsfs.decode({"cls": b"1"}, {"cls": lambda _: next(iter(()))})
    for decode, text in (({"jpg": "rgb"}, "'jpg' needs a function of bytes, not 'rgb'"), ("pil", "by extension")):
        with pytest.raises(wdsfs.UsageError, match=text):
            wdsfs.samples(shard, decode=decode)  # type: ignore[arg-type]
    with wdsfs.samples(shard, decode=None) as samples:
        assert samples[0]["cls"] == b"3"


def test_values_are_those_of_webdataset() -> None:
    need_tool("webdataset")
    sample = {"cls": b"3", "txt": "ä".encode(), "json": b'{"a": 1}', "npy": array([1.5]), "bin": b"\0", "id": b"4"}
    script = (
        "import sys, pickle, webdataset.autodecode as a; s = pickle.load(sys.stdin.buffer)\n"
        "s = a.Decoder([]).decode(s); s['npy'] = s['npy'].tolist(); sys.stdout.buffer.write(pickle.dumps(s))"
    )
    done = subprocess.run(
        [str(TOOLS / "bin/python"), "-c", script], input=pickle.dumps(sample), capture_output=True, check=True
    )
    assert pickle.loads(done.stdout) == {name: plain(value) for name, value in wdsfs.decode(sample).items()}
