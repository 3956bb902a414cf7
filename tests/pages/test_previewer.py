"""Previews of real files of each kind: what is shown of them, and that what is odd or broken is said."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import wave
import zipfile
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.pages.conftest import Bytes
from wdsfs.errors import StaleShard
from wdsfs.pages.preview import CARD, WHOLE, Detail, Picture, Preview
from wdsfs.pages.previewer import Previewer


def image_of(picture: Picture) -> Image.Image:
    found = Image.open(io.BytesIO(picture.data))
    found.load()
    assert found.get_format_mimetype() == picture.media_type
    assert found.size == (picture.width, picture.height)
    return found


def photo(width: int = 640, height: int = 480, mode: str = "RGB") -> Image.Image:
    """A picture with a bright red upper left quarter."""
    found = Image.effect_mandelbrot((width, height), (-2, -1.5, 1, 1.5), 20).convert("RGB")
    found.paste((255, 0, 0), (0, 0, width // 2, height // 2))
    return found.convert(mode)


def written(image: Image.Image, kind: str, **options: Any) -> bytes:
    target = io.BytesIO()
    image.save(target, kind, **options)
    return target.getvalue()


def npy(array: np.ndarray, **options: Any) -> bytes:
    target = io.BytesIO()
    np.save(target, array, **options)
    return target.getvalue()


def is_red(colour: Any) -> bool:
    return bool(colour[0] > 200 and max(colour[1:3]) < 60)


@pytest.mark.parametrize(
    ("extension", "kind", "mode"),
    [
        ("jpg", "JPEG", "RGB"),
        ("left.jpeg", "JPEG", "CMYK"),
        ("PNG", "PNG", "RGBA"),
        ("seg.png", "PNG", "P"),
        ("webp", "WEBP", "RGB"),
        ("gif", "GIF", "P"),
        ("bmp", "BMP", "RGB"),
        ("tiff", "TIFF", "RGB"),
        ("ppm", "PPM", "RGB"),
        ("image", "JPEG", "RGB"),  # known by its bytes
    ],
)
def test_a_picture_is_drawn_anew_small(previewer: Previewer, extension: str, kind: str, mode: str) -> None:
    data = written(photo(mode=mode), kind)
    found = previewer.preview(extension, Bytes(data), CARD)
    assert found.kind == "image"
    assert found.summary.startswith(f"640 x 480 pixels, {kind}")
    assert not found.problem
    [picture] = found.pictures
    small = image_of(picture).convert("RGB")
    assert small.size == (256, 192)
    assert is_red(small.getpixel((20, 20)))
    assert not is_red(small.getpixel((200, 150)))
    assert found.pictures[0] == previewer.thumbnail(extension, Bytes(data))


def test_numbers_as_pixels_are_stretched(previewer: Previewer) -> None:
    depths = np.linspace(1000, 1100, 200 * 100).reshape(100, 200).astype(np.uint16)
    found = previewer.preview("depth.png", Bytes(written(Image.fromarray(depths), "PNG")))
    grey = np.asarray(image_of(found.pictures[0]).convert("L"))
    assert grey.shape == (100, 200)
    assert grey[0, 0] < 15
    assert grey[-1, -1] > 240
    assert "smallest value shown black" in found.summary


def test_a_mask_keeps_its_colours(previewer: Previewer) -> None:
    mask = Image.fromarray((np.indices((900, 900)).sum(0) // 7 % 3 * 100).astype(np.uint8)).convert("P")
    mask.putpalette([255, 0, 0] * 100 + [0, 255, 0] * 100 + [0, 0, 255] * 56)
    small = image_of(previewer.preview("png", Bytes(written(mask, "PNG")), CARD).pictures[0])
    assert set(small.convert("RGB").get_flattened_data()) == {(255, 0, 0), (0, 255, 0), (0, 0, 255)}


def test_a_picture_is_upright_and_without_metadata(previewer: Previewer) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn to the right
    exif[0x010E] = "a secret place"
    data = written(photo(), "JPEG", exif=exif)
    [picture] = previewer.preview("jpg", Bytes(data)).pictures
    upright = image_of(picture)
    assert upright.size == (480, 640)
    assert is_red(upright.getpixel((400, 100)))
    assert b"secret" not in picture.data
    assert not upright.getexif()


def test_a_picture_that_is_cut_off_is_shown_as_far_as_it_goes(previewer: Previewer) -> None:
    data = written(photo(), "JPEG")
    found = previewer.preview("jpg", Bytes(data[: len(data) // 2]))
    assert is_red(image_of(found.pictures[0]).getpixel((50, 10)))
    assert "damaged or cut off" in found.problem
    found = previewer.preview("jpg", Bytes(b"not a picture"))
    assert (found.kind, found.text[:21]) == ("hex", "00000000  6e 6f 74 20")
    assert "none of JPEG" in found.problem
    assert previewer.thumbnail("jpg", Bytes(b"not a picture")) is None


def test_json_is_laid_out(previewer: Previewer) -> None:
    data = b'{"b": 1e400, "a": [1.50, 12345678901234567890123, null, true, {"k": "\\u00e9\\u202e"}], "e": {}}'
    found = previewer.preview("json", Bytes(data))
    assert found.kind == "json"
    assert found.summary == "an object of 3 fields"
    assert not found.is_cut
    values = ["  1.5,", "  12345678901234567890123,", "  null,", "  true,", "  {", '    "k": "é\ufffd"', "  }"]
    fields = ['"b": Infinity,', '"a": [', *values, "],", '"e": {}']
    assert found.text.splitlines() == ["{", *(f"  {line}" for line in fields), "}"]
    # Of a long one the beginning is shown, also where a line for each value makes it a thousand times as long.
    for value in ("x" * 200_000, json.loads("[" * 300 + ", ".join("1" * 1_000_000) + "]" * 300)):
        found = previewer.preview("json", Bytes(json.dumps(value).encode()))
        assert (found.is_cut, len(found.text), found.problem) == (True, WHOLE.characters, "")
    halves = json.dumps({"\ud800": "\udfff" + "xxx", "short": "\ud800"}).encode()  # of characters
    text = previewer.preview("json", Bytes(halves)).text
    assert '"?": "?xxx' in text
    assert '"short": "?"' in text
    assert text.encode()


def test_json_lines(previewer: Previewer) -> None:
    found = previewer.preview("jsonl", Bytes(b'{"a": 1}\n\n{"b":[1,\t2]}\n'))
    assert (found.kind, found.summary) == ("json", "3 lines")
    assert found.text == '{"a": 1}\n{"b": [1, 2]}'
    broken = previewer.preview("jsonl", Bytes(b'{"a": 1}\n{"b"\n'))
    assert (broken.kind, broken.text) == ("text", '{"a": 1}\n{"b"\n')
    assert "line 2" in broken.problem
    broken = previewer.preview("json", Bytes(b"{'a': 1}"))
    assert (broken.kind, broken.text) == ("text", "{'a': 1}")
    assert "not shown as JSON" in broken.problem
    # They do not end at the other characters that end lines for Python, which texts may hold.
    found = previewer.preview("jsonl", Bytes('{"a": "x\u2028y\x85z"}\r\n{"b": 1}\n'.encode()))
    assert (found.kind, found.summary, found.problem) == ("json", "2 lines", "")


def test_texts(previewer: Previewer) -> None:
    def of(data: bytes, name: str = "txt") -> Preview:
        return previewer.preview(name, Bytes(data))

    assert of("Grüße\r\n".encode())[:2] == ("text", "7 characters in 1 line")
    assert of("Grüße\r\n".encode()).text == "Grüße\n"
    assert of(b"a\x00b\x1b[31m").text == "a␀b␛[31m"
    assert of("für".encode("latin-1")).text == "f\ufffdr"
    assert "not all of it is utf-8" in of("für".encode("latin-1")).problem.lower()
    assert of("für".encode("utf-16")).text == "für"
    assert of(b"plain", "anything").kind == "text"
    assert of(bytes(range(256)), "anything").kind == "hex"
    assert of(b"7\n", "cls") == Preview("text", "label", text="7")
    assert of(b"", "cls").summary == "empty"
    assert of(b"", "jpg").summary == "empty"
    source = Bytes("€".encode() * 1000, 3_000_000_000)
    found = previewer.preview("txt", source, Detail(10, 100, 1))
    assert (found.text, found.is_cut, found.problem) == ("€" * 100, True, "")  # cut between characters
    assert source.bytes_read < 10_000


def test_active_content_is_text_and_a_pdf_is_not_opened(previewer: Previewer) -> None:
    data = b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'><script>alert(2)</script></svg>"
    for extension in ("svg", "html", "xml", "js"):
        found = previewer.preview(extension, Bytes(data))
        assert (found.kind, found.text) == ("text", data.decode())
        assert "nothing in it is run" in found.summary
    found = previewer.preview("pdf", Bytes(b"%PDF-1.7\n1 0 obj"))
    assert (found.kind, found.pictures) == ("document", ())
    assert "extract the member" in found.problem


def test_arrays(previewer: Previewer) -> None:
    values = np.arange(3 * 20 * 30, dtype=np.float32).reshape(3, 20, 30)
    values[0, 0, 0] = np.nan
    found = previewer.preview("npy", Bytes(npy(values)))
    assert found.summary == "float32, 3 x 20 x 30, from 1.0 to 1799.0, 1 not finite"
    assert found.text.startswith("[nan  1.  2.")
    assert image_of(found.pictures[0]).size == (30, 20)
    assert found.pictures[0].alt.startswith("array of float32")
    plain = previewer.preview("npy", Bytes(npy(np.array(7))))
    assert plain.summary == "int64, a single value, from 7 to 7"
    assert not plain.pictures
    words = previewer.preview("npy", Bytes(npy(np.array([b"ab", b"c"]))))
    assert (words.summary, words.text) == ("|S2, 2", "[b'ab' b'c']")
    mixed = previewer.preview("npy", Bytes(npy(np.zeros(2, "i4,f8"))))
    assert "('f0', '<i4')" in mixed.summary
    nothing = previewer.preview("npy", Bytes(npy(np.zeros((0, 3)))))
    assert nothing.summary == "float64, 0 x 3, no values"
    cut = previewer.preview("npy", Bytes(npy(np.arange(1000, dtype=np.int64))[:-4000]))
    assert "500 of 1,000 values" in cut.problem
    assert "from 0 to 499" in cut.summary


def test_a_picture_of_an_array_has_its_colours(previewer: Previewer) -> None:
    red = np.zeros((40, 60, 3), np.uint8)
    red[:20, :30, 0] = 255
    for array in (red, red.transpose(2, 0, 1), np.asfortranarray(red)):
        shown = image_of(previewer.preview("npy", Bytes(npy(array))).pictures[0])
        assert is_red(shown.convert("RGB").getpixel((10, 10)))
        assert not is_red(shown.convert("RGB").getpixel((50, 30)))


def test_an_npz_file_is_a_table_of_its_arrays(previewer: Previewer) -> None:
    target = io.BytesIO()
    np.savez_compressed(target, mask=np.eye(64, dtype=bool), one=np.array([1, 2]), odd=np.array([{}], object))
    found = previewer.preview("npz", Bytes(target.getvalue()))
    assert found.summary == "3 arrays"
    shown = [("mask", "bool, 64 x 64, from False to True"), ("one", "int64, 2, from 1 to 2"), ("odd", "object, 1")]
    assert [row[:2] for row in found.rows[1:]] == shown
    assert "never loaded" in found.rows[3][2]
    [picture] = found.pictures
    assert picture.alt.startswith("mask:")
    noise = np.random.default_rng(1)
    target = io.BytesIO()
    np.savez(target, *(noise.integers(0, 255, (600, 600), np.uint8) for _ in range(12)))
    found = previewer.preview("npz", Bytes(target.getvalue()))
    assert len(found.pictures) == 12
    assert found.weight < 1 << 20  # a page has all of them


class Trap:
    """Loaded from a pickle it would raise, and so be noticed."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('unpickled')",)


def test_pickles_are_never_loaded(previewer: Previewer) -> None:
    data = pickle.dumps(Trap())
    for extension in ("pkl", "pyd", "pickle", "pth", "pt"):
        found = previewer.preview(extension, Bytes(data))
        assert (found.kind, "not loaded here" in found.problem) == ("hex", True)
    array = npy(np.array([Trap()], object), allow_pickle=True)
    assert "never loaded" in previewer.preview("npy", Bytes(array)).problem
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("archive/data.pkl", data)
    found = previewer.preview("pth", Bytes(target.getvalue()))
    assert found.rows == (("name", "bytes"), ("archive/data.pkl", str(len(data))))


def test_csv_and_tsv(previewer: Previewer) -> None:
    data = 'key,name,score\n1,"Zoë\nB",0.5\n2,C,\n3,D,1e3\n'.encode()
    found = previewer.preview("csv", Bytes(data), Detail(10, 100, 2))
    assert found.kind == "table"
    assert found.summary == "3 rows of 3 columns"
    names = ("key (integer)", "name (text)", "score (number)")
    assert (found.rows, found.is_cut) == ((names, ("1", "Zoë\nB", "0.5"), ("2", "C", "")), True)
    tabs = previewer.preview("tsv", Bytes(b"a\tb,c\n1\t2\n")).rows
    assert tabs == (("a (integer)", "b,c (integer)"), ("1", "2"))
    assert previewer.preview("csv", Bytes(b"a;b\n1;x\n")).rows[1] == ("1", "x")
    assert previewer.preview("csv", Bytes(b"only")).rows == (("only",),)
    wide = previewer.preview("csv", Bytes("a,b\n1,ü\n".encode("utf-16")))
    assert (wide.summary, wide.rows[1]) == ("1 row of 2 columns", ("1", "ü"))


def test_sound_and_video(previewer: Previewer) -> None:
    target = io.BytesIO()
    with wave.open(target, "wb") as sound:
        sound.setparams((2, 2, 16000, 0, "NONE", ""))
        sound.writeframes(bytes(4 * 16000 * 90))
    source = Bytes(target.getvalue())
    found = previewer.preview("wav", source)
    assert found == Preview("audio", "WAV, 1:30, 16,000 Hz, 2 channels, 16 bits")
    assert source.bytes_read < 1_000_000
    assert previewer.preview("audio", source).kind == "audio"
    broken = previewer.preview("flac", Bytes(b"nothing of the kind"))
    assert broken.kind == "audio"
    assert broken.problem
    film = Bytes(bytes(5_000_000))  # left to the browser
    assert previewer.preview("mp4", film) == Preview("video", "MP4")
    assert film.bytes_read < 1_000_000
    assert "do not play" in previewer.preview("avi", Bytes(b"RIFF....AVI ")).problem
    assert previewer.preview("parquet", Bytes(b"PAR1\x00\x15")).kind == "hex"


@pytest.mark.parametrize(
    ("extension", "pack"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)]
)
def test_compressed_members(previewer: Previewer, extension: str, pack: Any) -> None:
    found = previewer.preview(f"json.{extension}", Bytes(pack(b'{"a":1}')))
    assert (found.kind, found.text) == ("json", '{\n  "a": 1\n}')
    assert f"unpacked from {extension}" in found.summary
    picture = previewer.preview(f"png.{extension}", Bytes(pack(written(photo(), "PNG"))))
    assert is_red(image_of(picture.pictures[0]).getpixel((50, 50)))
    long = previewer.preview(f"bin.{extension}", Bytes(pack(bytes(20 << 20))), CARD)
    assert (long.kind, long.is_cut) == ("hex", True)
    assert long.summary == "8,388,608 bytes; only its first 8 MiB were unpacked"
    assert "cannot be decoded" in previewer.preview(f"txt.{extension}", Bytes(b"nothing")).problem


def test_a_preview_is_made_once(previewer: Previewer) -> None:
    data = written(photo(), "PNG")
    first, second = Bytes(data, key=("s", 1)), Bytes(data, key=("s", 1))
    made = previewer.preview("png", first, WHOLE)
    assert previewer.preview("png", second, WHOLE) is made
    assert (first.reads > 0, second.reads) == (True, 0)
    assert previewer.preview("png", Bytes(data, key=("s", 2)), WHOLE) is not made


def test_the_cache_is_bounded() -> None:
    with_little = Previewer(cache_bytes=10_000)
    try:
        for number in range(100):
            with_little.preview("txt", Bytes(b"x" * 1000, key=number))
        again = Bytes(b"x" * 1000, key=99)
        with_little.preview("txt", again)
        assert again.reads == 0
        gone = Bytes(b"x" * 1000, key=1)
        with_little.preview("txt", gone)
        assert gone.reads > 0
    finally:
        with_little.close()


def test_an_error_of_reading_is_raised(previewer: Previewer) -> None:
    def stale(offset: int) -> None:
        if offset:
            raise StaleShard("s.tar has changed")

    source = Bytes(written(photo(1000, 1000), "BMP"))
    source.before_read = stale
    with pytest.raises(StaleShard, match=r"s\.tar has changed"):
        previewer.preview("bmp", source)
    workers = previewer.workers
    assert previewer.preview("bmp", Bytes(written(photo(), "BMP"))).kind == "image"
    assert previewer.workers == workers
