"""The rule of all writers for a name in the tar, compared with what a reader makes of the name."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import tars
from tests.index.test_record import make
from tests.thorough import examples
from wdsfs import names
from wdsfs.errors import CommitError
from wdsfs.packing import reasons
from wdsfs.packing.plan import NEW, Output, ShownSamples, Step
from wdsfs.tar.headers import DEPTH_MAX, NAME_MAX, encode, name_beyond_limit

parts = st.text("ab._/", max_size=6).map(str.encode)
longer = st.one_of(parts, st.sampled_from([b"d/" * 255, b"d/" * 256, b"x" * 4090, b"__key__", b"__m__/a"]))


@pytest.mark.parametrize(
    ("key", "extension", "reason"),
    [
        (b"d/a", b"jpg", None),
        (b"d/a", b".jpg", None),
        (b"d/a", b"", None),
        (b"./a", b"jpg", None),
        (b"a", b"__Key__", reasons.RESERVED_COLUMN),
        (b"d/.a", b"jpg", reasons.HIDDEN),
        (b"d/", b"jpg", reasons.HIDDEN),
        (b"__m__/a", b"jpg", reasons.META),
        (b"__a", b"b__", reasons.META),
        (b"d/a.b", b"jpg", reasons.DOTTED_KEY),
        (b"d/" * DEPTH_MAX + b"a", b"x", None),
        (
            b"d/" * (DEPTH_MAX + 1) + b"a",
            b"x",
            f"{reasons.TOO_LONG}: its name has 257 folders, and the limit is 256",
        ),
        (b"x" * (NAME_MAX - 2), b"x", None),
        (b"x" * (NAME_MAX - 2), b"xx", f"{reasons.TOO_LONG}: its name has 4,096 bytes, and the limit is 4,095"),
    ],
)
def test_why_readers_do_not_find_a_member_in_its_sample(key: bytes, extension: bytes, reason: str | None) -> None:
    assert reasons.misread(key, extension) == reason


@examples(300)
@given(longer, longer.map(lambda extension: extension.replace(b"/", b"")))
def test_a_reader_finds_what_is_not_refused(key: bytes, extension: bytes) -> None:
    if (
        reasons.misread(key, extension) is not None
    ):  # most are refused: hypothesis would give up before it has enough
        return
    record = make(tars.tar(encode(key + b"." + extension, 0, 0)))
    assert (record.samples, record.problems) == (1, [])
    assert record.extension(0) == extension


@examples(300)
@given(st.lists(st.builds(b"%b.%b".__mod__, st.tuples(longer, longer)), min_size=1, max_size=6))
def test_samples_of_a_plan_are_counted_as_readers_count_them(members: list[bytes]) -> None:
    """Whatever the names: one that readers leave out is an error, and so is a wrong number of samples."""
    wanted = [names.raw_key(name) for name in members]
    count = sum(1 for _ in itertools.groupby(wanted))
    refused = None in wanted or any(name_beyond_limit(name) for name in members)
    for planned in (count, count + 1):
        shown = ShownSamples(Step(Output(b"new.tar", []), NEW, None, planned))
        with pytest.raises(CommitError) if refused or planned > count else nullcontext():
            for name in members:
                shown.add_member(name)
            shown.compare()
