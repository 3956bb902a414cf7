"""Names: the split into key and extension against the webdataset library's own, and the escapes."""

from __future__ import annotations

import inspect
import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from webdataset import tariterators

from tests.thorough import examples
from wdsfs import names

# Few characters, so that odd combinations are frequent.
tiny = st.text("ab._/%~2E0\0", max_size=8).map(str.encode)
wild = st.one_of(
    tiny, st.binary(max_size=12), st.lists(st.sampled_from([b"/", b".", b"__", b"a", b"\xff"])).map(b"".join)
)
components = wild.map(lambda name: name.replace(b"/", b""))
long_components = st.tuples(components, st.integers(240, 300), st.sampled_from([b"x", "é".encode(), b"\xff"])).map(
    lambda parts: (parts[0] + parts[2] * parts[1])[: parts[1]]
)


def by_webdataset(name: bytes) -> tuple[bytes, bytes] | None:
    """Key and extension as the webdataset library has them, None for what it leaves out."""
    text = os.fsdecode(name)
    prefix, suffix = tariterators.meta_prefix, tariterators.meta_suffix
    if "/" not in text and text.startswith(prefix) and text.endswith(suffix):
        return None
    if re.match(inspect.signature(tariterators.tar_file_iterator).parameters["skip_meta"].default, text):
        return None
    key, extension = tariterators.base_plus_ext(text)
    return None if key is None else (os.fsencode(key), os.fsencode(extension))


def by_us(name: bytes) -> tuple[bytes, bytes] | None:
    split = names.split(name)
    return None if split is None else (split.folder + split.stem, split.extension)


@examples(300)
@given(wild.filter(lambda name: b"\n" not in name))
def test_split_as_webdataset_does(name: bytes) -> None:
    """The key ends at the first dot after the last slash, the extension is everything after that dot, as in the
    webdataset library; but a base name that starts with a dot is in no sample."""
    if name.rpartition(b"/")[2].startswith(b"."):
        assert by_us(name) is None
    else:
        assert by_us(name) == by_webdataset(name)


@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        (b"d/.hidden", None, (b"d/", b"hidden")),
        (b"/.hidden", None, (b"/", b"hidden")),
        (b"d.v1\n/a.jpg", (b"d.v1\n/a", b"jpg"), None),
        (b"__m.x__\n", (b"__m", b"x__\n"), None),
        *((name, None, None) for name in b"d.v1/foo README .hidden a.b/.hidden.jpg ".split(b" ")),
        *((name, None, None) for name in (b"__m__", b"__", b"__m__/a.json", b"__m.x__")),  # data about the set
        *(
            (b".".join(pair.split(b"|")), *[tuple(pair.split(b"|"))] * 2)
            for pair in (
                b"a|jpg a|left.JPG d/e/a|jpg d.v1/a|jpg a| a|.jpg ./a|jpg /abs/a|jpg /a|jpg ../up|jpg "
                b"___/a|json __m__|json d/__m__/a|json"
            ).split()
        ),
    ],
)
def test_split(name: bytes, ours: tuple[bytes, bytes] | None, theirs: tuple[bytes, bytes] | None) -> None:
    """Differences from the webdataset library: hidden files are in no sample; a newline is a character like any
    other, where the library leaves out members below a folder with a dot and a newline in its name."""
    assert (by_us(name), by_webdataset(name)) == (ours, theirs)


@given(wild)
def test_split_loses_nothing(name: bytes) -> None:
    split = names.split(name)
    if split is not None:
        assert split.folder + split.stem + b"." + split.extension == name
        assert b"." not in split.stem
        assert b"/" not in split.stem + split.extension
    folder, base = names.split_folder(name)
    assert folder + base == name
    assert folder in (b"", name[: len(folder) - 1] + b"/")


SPEECH = [f"talk_{begin}_{end}.flac" for begin in (1.5, 11.708, 12.25) for end in (13.97, 14.2)]


@pytest.mark.parametrize(
    ("file_names", "example"),
    [
        ([f"1.2.840.{number}.dcm" for number in range(50)], "1_2_840_0.dcm"),
        ([f"series{number}/1.2.840.{number}" for number in range(50)], "1_2_840.0"),
        (SPEECH, "talk_1_5_13_97.flac"),
        (["a.jpg", "b 2.0 (Live).mp3", "b 2.0 (Live).json"], "b 2_0 (Live).mp3"),
        ([f"www.site{number}.org_a.jpg" for number in range(70)], "www_site0_org_a.jpg"),
        ([f"{key}.{view}.jpg" for key in range(50) for view in range(20)], None),
        ([f"{key}.{size}x{size}.jpg" for key in range(50) for size in range(5)], None),
        ([f"{key}.mask_{mask}.png" for key in range(50) for mask in range(100)], None),
        ([f"{key}.{extension}" for key in range(3) for extension in ("seg.png", "tar.gz", "v2.json", "7")], None),
        ([f"a.{number}" for number in range(500)], None),
        ([f"{key}.{frame:06}.jpg" for key in range(3) for frame in range(200 + 99 * key)], None),
        ([f"{key}.{frame:03}_{kind}.png" for key in range(9) for frame in range(30) for kind in "ab"], None),
        ([f"{key}.{frame}_{key}.png" for key in range(9) for frame in range(30)], "0_0_0.png"),
        (["a.5.0.jpg"], None),
        ([], None),
    ],
)
def test_dots_that_cut_keys(file_names: list[str], example: str | None) -> None:
    dotted, keys = names.DottedNames(), set()
    for number, name in enumerate(file_names):
        key, _, extension = name.encode().partition(b".")
        keys.add(key)
        if b"." in extension:
            dotted.add(name.encode(), extension, number)
    text = dotted.text(len(keys))
    assert bool(text) == bool(dotted.count(len(keys))) == (example is not None)
    if example is not None:
        assert text.endswith(f"for example to {example}")
        assert dotted.name == file_names[dotted.place].encode()


@pytest.mark.parametrize(
    ("folder", "components"),
    [
        *((b"", []), (b"a/", [b"a"]), (b"a/b/", [b"a", b"b"]), (b"./", []), (b"././a/./", [b"a", b"."])),
        *((b"/", [b""]), (b".//", [b""]), (b"/abs/", [b"", b"abs"]), (b"a//b/", [b"a", b"", b"b"])),
        (b"../../", [b"..", b".."]),
    ],
)
def test_folder_components(folder: bytes, components: list[bytes]) -> None:
    """Leading `./` mean nothing; every other component of a name is a directory, also an empty one and `..`."""
    assert names.folder_components(folder) == components


# --- escapes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("component", "shown"),
    [
        *((name, name) for name in (b"jpg", b"...", b"100%", b"%41", b"\xff \n", b"x" * 255)),
        *((b"", b"%"), (b"%", b"%25"), (b".", b"%2E"), (b"..", b"%2E%2E"), (b"a\0b", b"a%00b")),
        *((b"%2E", b"%252E"), (b"%25", b"%2525"), (b"%00\0", b"%2500%00")),
    ],
)
def test_escape(component: bytes, shown: bytes) -> None:
    """A component is shown as it is, but for NUL (`%00`), `.`, `..` and the empty one (`%`), and for names that
    look like these escapes, whose percent sign becomes `%25`."""
    assert names.escape(component) == shown
    assert names.unescape(shown) == component


@examples(200)
@given(components | long_components)
def test_escape_can_always_be_shown(component: bytes) -> None:
    """Every name in a tar is shown as a name that a file system can have."""
    shown = names.escape(component)
    assert shown not in (b"", b".", b"..")
    assert not {0, ord("/")} & set(shown)
    assert len(shown) <= names.NAME_MAX


@examples(200)
@given(components, components)
def test_escape_can_be_undone(one: bytes, other: bytes) -> None:
    """Two components are never shown under the same name, and the name gives back the component."""
    assert names.unescape(names.escape(one)) == one
    assert (names.escape(one) == names.escape(other)) == (one == other)


@given(long_components, long_components)
def test_long_names_are_told_apart(one: bytes, other: bytes) -> None:
    """Names over 255 bytes are cut and end in a checksum of the whole name, by which they differ."""
    assert (names.escape(one) == names.escape(other)) == (one == other)
    if len(one.replace(b"\0", b"%00")) > 255:
        assert re.search(rb"%[0-9a-f]{16}\Z", names.escape(one))


@given(st.text("aé漢", min_size=1), st.integers(20, 300))
def test_cut_names_stay_text(name: str, limit: int) -> None:
    """A cut does not go through a UTF-8 character."""
    short = names.shorten(name.encode() * 20, limit)
    assert len(short) <= limit
    assert short.decode()


@examples(200)
@given(st.lists(wild, max_size=3))
def test_plain_names_need_no_escape(given_names: list[bytes]) -> None:
    if names.are_plain(given_names):
        for name in given_names:
            folder, base = names.split_folder(name)
            shown = [names.escape(part) for part in [*names.folder_components(folder), base]]
            assert b"/".join(shown) == name
            assert len(name) <= names.NAME_MAX
            split = names.split(name)
            assert split is None or names.escape(split.stem) == split.stem


def test_ordinary_names_are_plain() -> None:
    """The fast path is taken for what nearly all shards hold."""
    ordinary = [b"a.jpg", b"d/a.left.jpg", b"d.v1/b c.x", b"..a/b..c", b"a/.hidden", b"\xff\xc3\xa9.txt", b"~2"]
    assert names.are_plain(ordinary)
    for odd in (b"", b"a//b", b"/a", b"./a", b"a/..", b"..", b"a/./b", b"%", b"a\0", b"x" * 256, b"a/"):
        assert not names.are_plain([*ordinary, odd])


# --- numbers -----------------------------------------------------------------------------------------------


@given(components.filter(bool), long_components, st.integers(2, 10**6))
def test_numbered(name: bytes, long: bytes, number: int) -> None:
    """The second thing that wants a name gets `name~2`, the third `name~3`."""
    shown = names.numbered(name, number)
    assert shown == name + b"~%d" % number
    assert names.number_of(shown) == (name, number)
    assert len(names.numbered(long, number)) <= names.NAME_MAX
    assert names.numbered(long, number).endswith(b"~%d" % number)


@pytest.mark.parametrize(
    "name", [b"", b"a", b"~2", b"a~", b"a~1", b"a~0", b"a~02", b"a~2x", b"a~-2", b"a~" + b"9" * 5000]
)
def test_no_number(name: bytes) -> None:
    assert names.number_of(name) is None
