"""An image that is made again takes over what has not changed, and has the bytes of one made from nothing."""

from __future__ import annotations

import gzip
import hashlib
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import tars
from tests.dataset.test_shard_tree import SHARDS, tar
from tests.erofs import ErofsImage
from tests.image.test_image import NEW, OLD, OWNER, check, plain_tar
from tests.tars import member
from tests.thorough import examples
from wdsfs.dataset.numbered_tree import make_numbered
from wdsfs.dataset.texts import Texts
from wdsfs.dataset.tree import View
from wdsfs.errors import ImageError
from wdsfs.image import earlier, erofs, layout, manifest, shard_table
from wdsfs.image.build import Built, build
from wdsfs.image.erofs_columns import Times
from wdsfs.image.image_options import ImageOptions
from wdsfs.image.parts import Part, Wanted
from wdsfs.image.relocation import Move, relocate
from wdsfs.image.table import Chunks, Stored, Table, placed
from wdsfs.index.store import open_index
from wdsfs.owner import Owner
from wdsfs.spec.expand import expand
from wdsfs.views.companions import Companions
from wdsfs.views.composition import Composition, columns_of
from wdsfs.views.view_set import ViewSet, open_set

DEFAULT = View()
SECOND = 1_700_000_000


class Shards:
    """A directory of shards with an index, over which images are made."""

    def __init__(
        self, home: Path, view: View = DEFAULT, since: tuple[int, int] = NEW, owner: Owner = OWNER
    ) -> None:
        self.home, self.view, self.since, self.image = home, view, since, home / "set.erofs"
        self.options = ImageOptions(owner, os.fsencode(home), since, False, "")
        self.composition = Composition()

    def write(self, name: str, data: bytes, at: int = SECOND) -> str:
        """A shard, whose first file has the same time in each: images for old kernels depend on it."""
        path = self.home / f"{name}.tar"
        path.write_bytes(member(b"aa/0.x", b"", mtime=SECOND) + data)
        os.utime(path, (at, at))
        return name

    def make(self, names: Sequence[str], target: Path | None = None, look: bool = False) -> Built:
        """Make the image of these shards, in this order. `look`: compare it with the tree."""
        target = target or self.image
        found = expand([str(self.home / f"{name}.tar") for name in names])
        index, companions = open_index(self.home / "index"), Companions(self.composition)
        index.refresh([*found, *companions.shards])
        below = open_set(found, index, self.composition, companions)
        if isinstance(below, ViewSet):
            assert below.make() is None
        tree = make_numbered(below, self.view, False)
        try:
            built = build(tree, os.fsencode(target), self.options)
            if look:
                paths = [self.home / one.path for one in manifest.read(str(target)).devices]
                check(tree, ErofsImage(target, paths, self.since >= NEW), self.options.owner)
        finally:
            tree.lower.close()
        return built

    def again(self, names: Sequence[str], look: bool = False) -> int:
        """Make the image again, which has to be that from nothing; returns how many shards were taken over."""
        built, target = self.make(names, look=look), self.home / "nothing.erofs"
        target.unlink(missing_ok=True)
        assert self.make(names, target).taken_over == 0
        assert self.image.read_bytes() == target.read_bytes()
        return built.taken_over


# Inodes of both forms: all are short; all are long, because of the owner; those with one of the times are short.
WAYS = [
    (View(), NEW, Owner(1, 5, 0o007)),
    (View("files"), NEW, OWNER),
    (View(names="full", index_tree=True), OLD, Owner()),
]


LARGE = tars.tar(*(member(b"%d.x" % (n * 7919 % 3000), b"") for n in range(3000)))


def odd_tar(seed: int) -> bytes:
    """What is asked for name by name: links, stored content, folders with more names than are listed at a time."""
    many = [member(b"d/%05d.x" % number, b"x" * (number % 3)) for number in range(1100 + seed)]
    targets = (b"short", b"long/" * 30, b"longer/" * 200)
    links = [member(b"d/e/%d" % n, kind=tars.SYMLINK, link=target) for n, target in enumerate(targets[:2])]
    far = [tars.gnu_long(targets[2], b"K"), member(b"far", kind=tars.SYMLINK, link=b"longer/")]
    hard = member(b"again", kind=tars.HARD_LINK, link=b"d/00001.x")
    return tars.tar(*many, *links, *far, hard)


def write_all(shards: Shards) -> list[str]:
    """Shards of all kinds; each but the last can be taken over."""
    kinds = {
        "plain": plain_tar(1, 150),
        "large": LARGE,
        "odd": odd_tar(0),
        "sparse": tars.tar(tars.old_sparse(b"s.x", [(n * 2048, bytes([n]) * 1024) for n in range(9)], 20_000)),
        "links": tars.ODD["hard links"].tar(),
        "cut": tars.ODD["cut in content"].tar(),
        "same": plain_tar(1, 150),
        "read": tars.ODD["no padding at the end"].tar(),
    }
    return [shards.write(name, data) for name, data in kinds.items()]


class Change(NamedTuple):
    """What happens to the shards: a text, the new order of the set, and how many are to be made anew."""

    what: str
    after: Callable[[Shards, list[str]], list[str]]
    anew: int


def _changed(name: str, data: bytes, at: int = SECOND) -> Callable[[Shards, list[str]], list[str]]:
    def change(shards: Shards, names: list[str]) -> list[str]:
        shards.write(name, data, at)
        return names

    return change


def _with_many(shards: Shards, names: list[str]) -> list[str]:
    return [*(shards.write(f"new{n}", plain_tar(10 + n, 5)) for n in range(9)), *names]


def _renamed(shards: Shards, names: list[str]) -> list[str]:
    os.rename(shards.home / "plain.tar", shards.home / "other.tar")
    return ["other", *names[1:]]


CHANGES = [
    Change("nothing", lambda _, names: names, 0),
    Change("one grows", _changed("plain", plain_tar(1, 190)), 1),
    Change("one shrinks", _changed("plain", plain_tar(1, 20)), 1),
    Change("one has other content of the same names", _changed("same", plain_tar(2, 150)), 1),
    Change("one has another time", _changed("large", LARGE, SECOND + 1), 1),
    Change("an odd one grows", _changed("odd", odd_tar(40)), 1),
    Change("one is no more damaged", _changed("cut", plain_tar(3, 3)), 1),
    Change("one in front", lambda shards, names: [shards.write("new", plain_tar(5, 7)), *names], 1),
    Change("many in front, so that the metadata begins elsewhere", _with_many, 9),
    Change("one at the end", lambda shards, names: [*names, shards.write("new", odd_tar(3))], 1),
    Change("the first goes", lambda _, names: names[1:], 0),
    Change("the last goes", lambda _, names: names[:-1], 0),
    Change("every other one goes", lambda _, names: names[::2], 0),
    Change("another order", lambda _, names: names[::-1], 0),
    Change("another name", _renamed, 0),
]


@pytest.mark.parametrize("way", WAYS, ids=["short", "long", "both"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.what)
def test_the_bytes_of_an_image_from_nothing(
    change: Change, way: tuple[View, tuple[int, int], Owner], tmp_path: Path
) -> None:
    """All that is as it was is taken over, wherever it lies now."""
    shards = Shards(tmp_path, *way)
    names = write_all(shards)
    shards.make(names)
    names = change.after(shards, names)
    is_read = "read" in names
    assert shards.again(names, look=change.what == "nothing") == len(names) - change.anew - is_read


@examples(40)
@given(
    pool=SHARDS,
    before=st.lists(st.integers(0, 9), max_size=6),
    after=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    way=st.sampled_from(WAYS),
)
def test_any_sets(
    pool: list[list[str]], before: list[int], after: list[int], way: tuple[View, tuple[int, int], Owner]
) -> None:
    """Of shards with any names, in any order, more than once: some become others of the same size and time."""
    with TemporaryDirectory() as home:
        shards = Shards(Path(home), *way)

        def write(numbers: list[int], other: int) -> list[str]:
            found = []
            for at, number in enumerate(numbers):
                names = pool[(number + other * (number % 2)) % len(pool)]
                content = [(name, b"" if name.endswith("/") else b"x" * number) for name in names]
                found.append(shards.write(f"s{at}", tar(content)))
            return found

        if before:
            shards.make(write(before, 0))
        shards.again(write(after, 1), look=True)


def test_the_number_of_the_layout(tmp_path: Path) -> None:
    """Who changes what is written for the same shards counts `erofs.LAYOUT` up, and puts the new digest here.

    Else a new version would take over parts that an older one has made, and put its own beside them.
    """
    shards = Shards(tmp_path, *WAYS[2])
    shards.make(write_all(shards))
    place = manifest.read(str(shards.image)).parts
    assert place is not None
    blocks = shards.image.read_bytes()[erofs.metadata_block(8) * erofs.BLOCK : place.offset]
    assert (erofs.LAYOUT, hashlib.sha256(blocks).hexdigest()[:16]) == (3, "3bcd2ceb708b86ec")


@pytest.mark.parametrize("name", tars.ODD)
def test_odd_tars(name: str, tmp_path: Path) -> None:
    """In another place, all of it is the same."""
    shards = Shards(tmp_path)
    names = [shards.write("odd", tars.ODD[name].tar()), shards.write("plain", plain_tar(1, 3))]
    shards.make(names)
    assert shards.again([shards.write("new", plain_tar(2, 30)), *names]) >= 1


def test_parts_of_several_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that is asked for name by name, in more than one table."""
    monkeypatch.setattr(shard_table, "STORED_MAX", 300)
    shards = Shards(tmp_path)
    names = [shards.write("plain", plain_tar(1, 50)), shards.write("odd", odd_tar(0))]
    shards.make(names)
    assert shards.again([shards.write("new", plain_tar(2, 9)), *names], look=True) == 2


def test_runs_that_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More parts than are moved together."""
    monkeypatch.setattr(earlier, "RUN_BLOCKS", 40)
    shards = Shards(tmp_path)
    names = [shards.write(f"s{n}", plain_tar(n, 20)) for n in range(12)]
    shards.make(names)
    assert shards.again([shards.write("new", plain_tar(20, 9)), *names]) == 12


@pytest.mark.parametrize(
    "other",
    [
        {"owner": Owner(1, 5, 0o007)},
        {"owner": Owner(1, 70_000, 0)},
        {"since": OLD},
        {"writable": True},
        {"composition": "--columns jpg"},
    ],
    ids=str,
)
def test_other_options(other: dict[str, Any], tmp_path: Path) -> None:
    """Nothing is taken from an image that shows the shards otherwise."""
    shards = Shards(tmp_path)
    names = [shards.write(f"s{n}", plain_tar(n, 20)) for n in range(2)]
    shards.make(names)
    shards.options = shards.options._replace(**other)
    assert shards.again(names) == 0


@pytest.mark.parametrize("view", [View("files"), View(names="full")], ids=str)
def test_another_view(view: View, tmp_path: Path) -> None:
    shards = Shards(tmp_path)
    names = [shards.write(f"s{n}", plain_tar(n, 20)) for n in range(2)]
    shards.make(names)
    shards.view = view
    assert shards.again(names) == 0


def columns(extensions: Sequence[bytes], keys: Sequence[int], content: bytes = b"x") -> bytes:
    """Samples with these extensions."""
    return tars.tar(*(member(b"%d.%s" % (key, one), content * key) for key in keys for one in extensions))


def test_views(tmp_path: Path) -> None:
    """Shards with columns of others and values of labels are taken over, as long as these are as they were."""
    shards, keys, labels = Shards(tmp_path, View("files")), range(0, 60, 10), tmp_path / "labels.csv"

    def write(name: str, extensions: Sequence[bytes], numbers: range) -> str:
        content = [member(b"%d.%s" % (key, one), b"x" * key) for key in numbers for one in extensions]
        (tmp_path / f"{name}.tar").write_bytes(tars.tar(*content))
        os.utime(tmp_path / f"{name}.tar", (SECOND, SECOND))
        return name

    names = [write(f"s{n}", [b"jpg", b"json"], range(key, key + 10)) for n, key in enumerate(keys)]
    for number, key in enumerate(keys[::2]):
        write(f"j{number}", [b"depth"], range(key, key + 20))

    def label(of_33: int) -> None:
        labels.write_text("\n".join(["key,cls", *(f"{key},{of_33 if key == 33 else 5}" for key in range(60))]))
        os.utime(labels, (SECOND, SECOND))

    label(5)
    wanted = Composition(join=(f"{tmp_path}/j{{0..2}}.tar",), associate=(str(labels),))
    shards.composition = wanted
    shards.make(names)
    assert shards.again(names[::-1], look=True) == 6
    # The members of one joined shard lie elsewhere: the two shards with columns of it are made anew.
    write("j1", [b"depth", b"other"], range(20, 40))
    shards.composition = replace(wanted, columns=columns_of(["jpg", "json", "depth", "cls"]))
    shards.make(names)
    write("j1", [b"other", b"depth"], range(20, 40))
    assert shards.again(names, look=True) == 4
    label(6)
    assert shards.again(names, look=True) == 5
    shards.composition = replace(wanted, columns=columns_of(["jpg", "depth"]))
    assert shards.again(names, look=True) == 0
    shards.composition = Composition(decode=True)
    (tmp_path / "s0.tar").write_bytes(tars.tar(member(b"a.json.gz", gzip.compress(b"{}", mtime=0))))
    shards.make(names)
    assert shards.again(names, look=True) == 5  # what is decoded is read each time


def test_another_common_time(tmp_path: Path) -> None:
    """Before Linux 6.15 the bytes of all parts depend on the time of the first file."""
    shards = Shards(tmp_path, since=OLD)
    names = [shards.write(f"s{n}", tars.tar(member(b"a.x", b"", mtime=5))) for n in range(3)]
    shards.make(names)
    (tmp_path / "s0.tar").write_bytes(tars.tar(member(b"aa/0.x", b"", mtime=6)))
    assert shards.again(names, look=True) == 0


def test_content_that_was_read_is_read_again(tmp_path: Path) -> None:
    """A shard with the names, sizes and times of before, but other bytes in what the image stores."""
    shards, data = Shards(tmp_path), tars.ODD["no padding at the end"].tar()
    shards.write("s0", data)
    shards.make(["s0"])
    before = shards.image.read_bytes()
    shards.write("other", data[:-1] + bytes([data[-1] ^ 1]))
    os.replace(tmp_path / "other.tar", tmp_path / "s0.tar")
    assert shards.again(["s0"], look=True) == 0
    assert shards.image.read_bytes() != before


def test_a_shard_that_loses_its_last_bytes(tmp_path: Path) -> None:
    """Its record and its time stay as they were, but a block that was whole is not any more."""
    shards, data = Shards(tmp_path), tars.ODD["no padding at the end"].tar()
    shards.write("s0", data + bytes(-len(data) % 512))
    shards.make(["s0"])
    assert shards.again(["s0"]) == 1
    shards.write("s0", data)
    assert shards.again(["s0"], look=True) == 0


def test_numbers_of_devices() -> None:
    """A part is not taken over if one shard stood for what are two shards now, or nothing for what is missing."""
    part = Part(b"", 0, 1, 1, 4, (1, 2, 1), 0)
    assert Wanted(b"", (5, 6, 5), 9).numbers_for(part) == {1: 5, 2: 6, 4: 9}
    assert Wanted(b"", (5, 5, 5), 9).numbers_for(part) == {1: 5, 2: 5, 4: 9}
    assert Wanted(b"", (5, 6, 7), 9).numbers_for(part) is None
    assert Wanted(b"", (5, 6, 5), None).numbers_for(part) is None


def test_all_that_can_be_moved() -> None:
    """Also what is in no part that is taken over, as it was read: a last chunk that is stored."""

    def laid_out(block: int, metadata: int, device: int, missing: int) -> layout.Part:
        """A directory with files: of one chunk, empty, of chunks, of which the last is stored, stored, inline."""
        files, nothing = 5, np.zeros(6, np.int64)
        contents = Texts.of([b"p" * 3000, b"i" * 40])
        table = Table(
            mode=np.array([0o40555, *[0o100444] * files]),
            links=nothing + 1,
            size=np.array([0, 700, 0, 1600, 3000, 40]),
            mtime_ns=nothing,
            device=np.array([0, device, 0, 0, 0, 0]),
            block=np.array([0, 77, erofs.NO_BLOCK, 0, 0, 0]),
            parent=np.array([placed(16)]),
            holder=nothing[:files],
            child=np.arange(1, 6),
            kind=nothing[:files] + erofs.REGULAR,
            names=Texts.of([b"%d" % n for n in range(files)]),
            chunks={3: Chunks(0, np.array([0, missing, device, 0]), np.array([erofs.NO_BLOCK, 0, 5, 0]), b"end")},
            stored=Stored(np.array([4, 5]), contents),
        )
        return layout.lay_out(table, block, metadata, Times(0, NEW), (0, 0))

    before, after = laid_out(1 << 30, 5, 1, 3), laid_out(123, 9, 4, 7)
    move = Move(1 << 30, 123, 5, 9, {1: 4, 3: 7})
    data = before.data.copy()
    assert (data != after.data).any()
    relocate(data.view(np.uint32), before.nids - move.nid_before, move)
    assert (data == after.data).all()
    with pytest.raises(ImageError, match="points to a shard that it does not name"):
        relocate(before.data.view(np.uint32), before.nids - move.nid_before, move._replace(devices={1: 4}))


def test_damage(tmp_path: Path) -> None:
    """An image of which any byte is wrong, or the end is missing: what is damaged is not inherited."""
    shards = Shards(tmp_path)
    names = [shards.write("plain", plain_tar(1, 20)), shards.write("odd", odd_tar(0)[-4096:])]
    names += [shards.write(f"s{n}", plain_tar(n, 10)) for n in range(2, 5)]
    shards.make(names)
    good = shards.image.read_bytes()
    place = manifest.read(str(shards.image)).parts
    assert place is not None
    names = ["s3", "plain", "odd", "s2", "s4"]
    anew = tmp_path / "anew.erofs"
    shards.make(names, anew)
    expected = anew.read_bytes()

    def taken_over(earlier: bytes) -> int:
        shards.image.write_bytes(earlier)
        built = shards.make(names)
        assert shards.image.read_bytes() == expected
        return built.taken_over

    random_places = random.Random(1).sample(range(len(good)), 40)
    taken = set()
    for at in [*range(place.offset, place.offset + place.size, 7), len(good) - 1, 1024, 1100, *random_places]:
        taken.add(taken_over(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :]))
        assert taken_over(good[:at]) == 0
    assert taken == {0, 4, 5}


@pytest.mark.parametrize("spoil", ["mode of the image", "mode of the directory", "no table of parts"])
def test_images_that_are_not_used(spoil: str, tmp_path: Path) -> None:
    """What other users can write, and an image of a version that had no parts."""
    home = tmp_path / "home"
    home.mkdir()
    shards = Shards(home)
    names = [shards.write(f"s{n}", plain_tar(n, 20)) for n in range(2)]
    shards.make(names)
    assert shards.again(names) == 2
    if spoil == "mode of the image":
        shards.image.chmod(0o666)
    elif spoil == "mode of the directory":
        home.chmod(0o777)
    else:
        found = manifest.read(str(shards.image))
        place = found.parts
        assert place is not None
        tail = found._replace(parts=None).encoded()
        shards.image.write_bytes(shards.image.read_bytes()[: place.offset] + tail)
        assert manifest.read(str(shards.image)).devices == found.devices
    assert shards.again(names) == 0


def test_what_is_no_image(tmp_path: Path) -> None:
    shards = Shards(tmp_path)
    shards.write("s0", plain_tar(1, 3))
    for content in (b"", b"text" * 1000):
        shards.image.write_bytes(content)
        assert shards.again(["s0"]) == 0


def test_a_disk_that_takes_some_bytes_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does that is nearly full: nothing is left out, also of what lies behind the blocks."""
    shards, pwrite = Shards(tmp_path), os.pwrite
    shards.write("s0", plain_tar(1, 3))
    shards.make(["s0"])
    whole = shards.image.read_bytes()
    shards.image.unlink()
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, bytes(data)[:100], offset))
    shards.make(["s0"])
    assert shards.image.read_bytes() == whole
