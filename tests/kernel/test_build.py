"""The file of an image: the same bytes for the same shards, also where the writes of a disk are short."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import tars
from tests.erofs import ErofsImage
from tests.kernel.test_image import NEW, OLD, OWNER, check, plain_tar
from tests.tars import member
from wdsfs.index.store import open_index
from wdsfs.kernel import erofs, manifest, shard_table
from wdsfs.kernel.image import Built, make_image
from wdsfs.kernel.manifest import ImageOptions
from wdsfs.owner import Owner
from wdsfs.spec.expand import expand
from wdsfs.tree.numbered_tree import make_numbered
from wdsfs.tree.options import Composition
from wdsfs.tree.tree import View
from wdsfs.tree.view_set import ViewSet, open_set
from wdsfs.tree.view_sources import Companions

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
            built = make_image(tree, os.fsencode(target), self.options)
            if look:
                paths = [self.home / one.path for one in manifest.read(str(target)).devices]
                check(tree, ErofsImage(target, paths, self.since >= NEW), self.options.owner)
        finally:
            tree.lower.close()
        return built


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
    """Shards of all kinds."""
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


def test_the_number_of_the_layout(tmp_path: Path) -> None:
    """Whoever changes the bytes for the same shards counts `erofs.LAYOUT` up, and puts the digest here.

    Guards and overlays know an image by this number: the inode numbers of another layout are others.
    """
    shards = Shards(tmp_path, View(names="full", index_tree=True), OLD, Owner())
    shards.make(write_all(shards), look=True)
    image = shards.image.read_bytes()
    blocks = image[erofs.metadata_block(8) * erofs.BLOCK : image.index(b'{"format":')]
    assert (erofs.LAYOUT, hashlib.sha256(blocks).hexdigest()[:16]) == (4, "e73b1775be1a8e1c")


def test_an_image_that_is_replaced_leaves_no_trace(tmp_path: Path) -> None:
    shards = Shards(tmp_path)
    names = write_all(shards)
    shards.make(names[::2])
    shards.make(names)
    shards.make(names, tmp_path / "other.erofs")
    assert shards.image.read_bytes() == (tmp_path / "other.erofs").read_bytes()


def test_a_shard_of_several_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that is asked for name by name, in more than one table."""
    monkeypatch.setattr(shard_table, "STORED_MAX", 300)
    shards = Shards(tmp_path)
    shards.make([shards.write("plain", plain_tar(1, 50)), shards.write("odd", odd_tar(0))], look=True)


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
