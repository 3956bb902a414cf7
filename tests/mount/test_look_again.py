"""A look at a set that grows, without a mount: what it finds, and what every layout shows afterwards."""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import sets, tars
from tests.tree.test_shard_tree import content_of, walk
from wdsfs.errors import MissingShard, NoSuchEntry, ShardError, UnreadableShard
from wdsfs.index import record_of_file, store
from wdsfs.index.portable_writer import checked_target, write_index
from wdsfs.index.store import open_index
from wdsfs.inodes import ROOT
from wdsfs.mount import fuse_session, look_again
from wdsfs.mount.look_again import Earlier, LeftOut, change_of
from wdsfs.mount.mount_options import MountOptions, Serving
from wdsfs.mount.mounted_set import MountedSet
from wdsfs.shards import Shard, Shards
from wdsfs.spec.dependencies import noted
from wdsfs.spec.expand import expand
from wdsfs.spec.growth import Change
from wdsfs.tree import shard_access
from wdsfs.tree.companions import Companions
from wdsfs.tree.composition import Composition, columns_of
from wdsfs.tree.freshness import Generations
from wdsfs.tree.indexing import indexed
from wdsfs.tree.set_options import Opening, Tolerance, TreeOptions
from wdsfs.tree.shard_access import access_of
from wdsfs.tree.tree import LowerTree, View
from wdsfs.tree.view_set import ViewSet, make_shard_set

LONG_AGO = 1_000_000_000.0


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """A look is made in a process of its own, in which it says less."""
    logger = logging.getLogger(shard_access.__name__)
    yield
    logger.setLevel(logging.NOTSET)


class Followed:
    """A set that a mount would show, as its processes share it."""

    def __init__(self, home: Path, specs: list[str], shared: bool = False, **options: Any) -> None:
        self.options = mount_options(specs, str(home / "mnt"), follow=60.0, **options)
        wanted, shards = self.options.tree.composition, expand(specs)
        companions, index = Companions(wanted), open_index(home / "index")
        index.refresh([*shards, *companions.shards])
        below = make_shard_set(shards, index, wanted, companions)
        if isinstance(below, ViewSet):
            assert below.make() is None
            wanted = below.composition
        below.release()
        index.suspend()
        access = access_of([one.path for one in shards], shared)
        tags = Generations.at_mount(len(shards), followed=True)
        self.served = MountedSet(self.options, Shards(shards), wanted, companions, access, index, 16, tags, None)
        self.earlier = Earlier({})

    def look(self) -> dict[str, Any]:
        """Look, and show what is found; returns the answer after it was JSON, as it is for a mount.

        `new` are the names of new shards.
        """
        answer = json.loads(json.dumps(look_again.look_again(self.served, "", self.earlier, False)))
        left_out = [LeftOut(*row) for row in answer["left_out"]]
        change = change_of(self.served, answer)
        superseded = self.served.shards if change else ()
        if change:
            self.served = self.served.grown(change)
        self.earlier = Earlier({one.path: one for one in left_out}, superseded)
        reasons = {os.path.basename(one.path): one.why for one in left_out}
        return {**answer, "left_out": reasons, "new": [row[1] for row in answer.get("new", ())]}

    def shown(self) -> dict[bytes, tuple[int, bytes]]:
        """The number and the content of every file and link, by its path."""
        tree = self.served.lower_tree()
        try:
            return indexed(lambda: dict(_files(tree)))
        finally:
            tree.close(True)


def mount_options(
    specs: list[str],
    mountpoint: str,
    follow: float | None = None,
    view: View | None = None,
    tolerance: Tolerance | None = None,
    **rest: Any,
) -> MountOptions:
    """The options of a mount, of which only some are said."""
    view = view or View()
    composition = rest.pop("composition", Composition())
    tree = TreeOptions(view.layout, view.names, rest.pop("merge", False), view.index_tree, composition)
    opening = Opening(tolerance=tolerance or Tolerance())
    return MountOptions(specs, mountpoint, tree, opening=opening, serving=Serving(follow=follow), **rest)


def _files(tree: LowerTree) -> Iterator[tuple[bytes, tuple[int, bytes]]]:
    for path, entry in walk(tree):
        inode, kind = entry.node.inode, stat.S_IFMT(entry.node.mode)
        if kind != stat.S_IFDIR:
            yield path[1:], (inode, tree.readlink(inode) if kind == stat.S_IFLNK else content_of(tree, inode))


def write(path: Path, number: int, samples: int = 3) -> None:
    path.write_bytes(sets.content(number, samples))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    directory = tmp_path / "shards"
    sets.make(directory, 3)
    (tmp_path / "labels.csv").write_text("key,extra\nd0/0-0,zero\nd0/9-0,nine\n")
    (tmp_path / "beside").mkdir()
    for number in (0, 1, 2, 9):
        beside = tars.tar(tars.member(b"d0/%d-0.more" % number, b"more of %d" % number))
        (tmp_path / f"beside/s{number}.tar").write_bytes(beside)
    return directory


LAYOUTS: dict[str, dict[str, Any]] = {
    "samples": {},
    "full": {"view": View(names="full")},
    "files": {"view": View(layout="files")},
    "classes": {"view": View(layout="classes"), "composition": Composition(classes=True)},
    "merged": {"merge": True},
    "merged files": {"merge": True, "view": View(layout="files")},
    "numbered": {"view": View(index_tree=True)},
    "merged numbered": {"merge": True, "view": View(names="full", index_tree=True)},
    "columns": {"composition": Composition(columns=columns_of(["cls"]))},
    "renamed": {"composition": Composition(columns=columns_of(["label=none;cls", "cls", "txt"]))},
    "labels": {"composition": Composition(associate=("labels.csv",), missing="empty")},
    "joined": {"composition": Composition(columns=columns_of(["txt", "more"]), join=("beside",), missing="empty")},
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_every_layout_grows_and_shrinks(
    layout: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stays keeps numbers and names; the rest is what a mount of the set as it is now would show."""
    monkeypatch.chdir(tmp_path)
    followed = Followed(tmp_path, [str(shards)], **LAYOUTS[layout])
    before = followed.shown()
    write(shards / "s9.tar", 9)
    write(shards / "a.tar", 8)  # in a new mount it would be the first
    answer = followed.look()
    assert (answer["error"], answer["gone"], answer["left_out"]) == ("", [], {})
    larger = followed.shown()
    # Links by number are inodes of a version of the set; where they lead stays.
    stays = {path: found for path, found in before.items() if not path.startswith(b"by-index/")}
    assert stays.items() <= larger.items()
    links = {path: target for path, (_, target) in before.items() if path.startswith(b"by-index/")}
    assert links.items() <= {path: target for path, (_, target) in larger.items()}.items()

    (shards / "s1.tar").unlink()
    assert followed.look()["gone"] == [[1, 3]]
    now = followed.shown()
    (tmp_path / "new").mkdir()
    fresh = Followed(tmp_path / "new", [str(shards)], **LAYOUTS[layout]).shown()
    if not followed.options.view.index_tree:
        assert _contents(now) == _contents(fresh)
    else:
        left = {path: found for path, found in _contents(larger).items() if path.startswith(b"by-index/")}
        gone = {b"by-index/000/000/%06d" % number for number in (3, 4, 5)}
        assert {path: found for path, found in _contents(now).items() if path in left} == {
            path: found for path, found in left.items() if path not in gone
        }
        assert len(left) == 15
    assert {
        path: found for path, found in now.items() if not path.startswith(b"by-index/")
    }.items() <= larger.items()


def _contents(shown: dict[bytes, tuple[int, bytes]]) -> dict[bytes, bytes]:
    return {path: data for path, (_, data) in shown.items()}


def test_numbers_of_samples_that_are_gone_stay_unused(shards: Path, tmp_path: Path) -> None:
    followed = Followed(tmp_path, [str(shards)], view=View(index_tree=True))
    (shards / "s0.tar").rename(tmp_path / "kept.tar")
    # It is not taken out yet: of a set that is followed, what is missing is as good as gone, and no error.
    tree = followed.served.lower_tree()
    folder = tree.resolve(b"by-index/000/000").inode
    assert [entry.name for entry in tree.listing(folder)][2:] == [b"%06d" % number for number in range(3, 9)]
    tree.close(True)
    followed.look()
    write(shards / "s0.tar", 0, samples=4)
    assert followed.look()["new"] == ["s0"]  # others would get other numbers
    shown = followed.shown()
    assert shown[b"by-index/000/000/000009"][1] == b"../../../s0/d0/0-0"
    assert b"by-index/000/000/000002" not in shown
    tree = followed.served.lower_tree()
    assert [entry.name for entry in tree.listing(folder)][-1] == b"000012"  # a listing that is under way goes on
    folder = tree.resolve(b"by-index/000/000").inode
    with pytest.raises(NoSuchEntry, match="sample 2 does not exist"):
        tree.lookup(folder, b"000002")
    tree.close(True)
    (shards / "s0.tar").unlink()
    followed.look()
    (tmp_path / "kept.tar").rename(shards / "s0.tar")
    assert followed.look()["back"] == [0]
    assert followed.shown()[b"by-index/000/000/000002"][1] == b"../../../s0/d0/0-2"


def test_open_files_of_a_removed_shard_can_be_read_while_it_exists(shards: Path, tmp_path: Path) -> None:
    names = tmp_path / "list.txt"
    names.write_text("shards/s0.tar\nshards/s1.tar\n")
    followed = Followed(tmp_path, [f"@{names}"])
    inode, data = followed.shown()[b"s1/d0/1-0/txt"]
    names.write_text("shards/s0.tar\n")
    assert followed.look()["gone"] == [[1, 3]]
    assert [path for path in followed.shown() if path.startswith(b"s1")] == []
    tree = followed.served.lower_tree()
    assert content_of(tree, inode) == data
    assert tree.getattr(ROOT).links == 3
    assert tree.totals().shards == 1
    (shards / "s1.tar").unlink()
    tree.lower.distrust()
    with pytest.raises(ShardError):
        tree.content(inode)
    tree.close(True)


def test_equal_names_of_a_merged_tree(tmp_path: Path) -> None:
    """The first keeps the plain name as long as it is there; then the next one has it, as after a new mount."""
    same = tars.tar(tars.member(b"a.txt", b"first"))
    shards = tmp_path / "shards"
    shards.mkdir()
    (shards / "m.tar").write_bytes(same)
    followed = Followed(tmp_path, [str(shards)], merge=True)
    (shards / "a.tar").write_bytes(same.replace(b"first", b"later"))
    followed.look()
    assert _contents(followed.shown()) == {b"a/txt": b"first", b"a~a/txt": b"later"}
    (shards / "m.tar").unlink()
    followed.look()
    assert _contents(followed.shown()) == {b"a/txt": b"later"}


def test_a_listing_goes_on_in_the_next_list(shards: Path, tmp_path: Path) -> None:
    """Its cursors stand for the shards that were there before, which keep their places."""
    followed = Followed(tmp_path, [str(shards)], merge=True, view=View(layout="files"))
    tree = followed.served.lower_tree()
    folder = tree.resolve(b"d0").inode
    begun = list(tree.listing(folder))
    tree.close(True)
    write(shards / "a.tar", 8)
    (shards / "s2.tar").unlink()
    followed.look()
    tree = followed.served.lower_tree()
    rest = [entry.name for entry in tree.listing(folder, begun[3].cursor)]
    assert rest == [entry.name for entry in begun[4:] if not entry.name.startswith(b"2-")] + [
        *(b"8-0.txt", b"8-0.cls", b"8-2.txt", b"8-2.cls")
    ]
    tree.close(True)


def test_superseded_tables_are_dropped_and_rebuilt_on_demand(shards: Path, tmp_path: Path) -> None:
    followed = Followed(tmp_path, [str(shards)], merge=True)
    fixed = followed.served.lower_tree()  # another mount of the same set, which does not follow it
    before = [entry.name for entry in fixed.listing(ROOT)]
    followed.served.index.suspend()
    write(shards / "t.tar", 8)
    followed.look()
    followed.look()  # drops the tables of the list before
    assert [entry.name for entry in indexed(lambda: list(fixed.listing(ROOT)))] == before
    fixed.lower.renew()
    assert [entry.name for entry in indexed(lambda: list(fixed.listing(ROOT)))] == before
    assert indexed(fixed.lookup, ROOT, b"d0").inode
    fixed.close(True)


def test_a_portable_index_is_a_list_that_grows(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of new shards are taken from it."""
    listed = sets.make(shards, 4)
    portable(shards, listed[:3])
    followed = Followed(tmp_path, [f"{shards}/set.wdsidx"])
    before = followed.shown()
    portable(shards, listed[1:])

    def build(*_: object, **__: object) -> bytes:
        raise AssertionError("a shard was read")

    monkeypatch.setattr(store, "build_file", build)
    answer = followed.look()
    assert (answer["new"], answer["gone"], answer["left_out"]) == (["s3"], [[0, 3]], {})
    now = followed.shown()
    assert now[b"s3/d0/3-0/txt"][1] == b"3"
    assert {path: found for path, found in before.items() if not path.startswith(b"s0/")}.items() <= now.items()


def portable(directory: Path, shards: list[Shard]) -> None:
    """Write the portable index of some shards."""
    index = store.open_index(directory.parent / "made")
    index.refresh(shards)
    write_index(index, shards, checked_target(str(directory / "set.wdsidx")))
    index.close()


# --- what is left out --------------------------------------------------------------------------------------


def test_a_shard_that_is_being_written_is_left_out(shards: Path, tmp_path: Path) -> None:
    """One that rests without an end is damaged, and shown."""
    followed = Followed(tmp_path, [str(shards)])
    whole = sets.content(7)
    new = shards / "t.tar"
    # The tail of a file of zeros looks like an end, and is none.
    zeros = tars.tar(tars.member(b"zeros.bin", bytes(8192)))[:-2048]
    for part in (b"", whole[:1000], whole[: len(whole) // 2], whole[:-1024], zeros):
        new.write_bytes(part)
        answer = followed.look()
        assert (answer["new"], answer["left_out"]) == ([], {"t.tar": record_of_file.BEING_WRITTEN})
    new.write_bytes(whole)
    (shards / "u.tar").write_bytes(sets.content(8)[:1024])
    os.utime(shards / "u.tar", (LONG_AGO, LONG_AGO))
    answer = followed.look()
    assert (sorted(answer["new"]), answer["left_out"]) == (["t", "u"], {})
    assert followed.shown()[b"u/d0/8-0/txt"][1] == b"8"


def test_a_compressed_shard_has_to_rest(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_of_file, "RESTED_SECONDS", 3600.0)  # however long this test takes
    followed = Followed(tmp_path, [str(shards)])
    packed = gzip.compress(sets.content(7))
    new = shards / "t.tar.gz"
    new.write_bytes(packed)
    assert followed.look()["left_out"] == {"t.tar.gz": record_of_file.BEING_WRITTEN}
    os.utime(new, (LONG_AGO, LONG_AGO))
    assert followed.look()["new"] == ["t"]


def test_an_unreadable_shard_is_left_out_and_not_read_again(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = Followed(tmp_path, [str(shards)])
    new = shards / "t.tar"
    write(new, 7)
    os.utime(new, (LONG_AGO, LONG_AGO))

    def fails(*_: object) -> None:
        raise UnreadableShard(f"{new}: Input/output error")

    with monkeypatch.context() as context:
        context.setattr(look_again._Look, "_objection", fails)
        assert followed.look()["left_out"] == {"t.tar": "Input/output error"}
    assert followed.look()["left_out"] == {"t.tar": "Input/output error"}
    os.utime(new)
    assert followed.look()["new"] == ["t"]


def test_a_path_that_is_no_file_does_not_hide_other_shards(shards: Path, tmp_path: Path) -> None:
    """A look does not wait for the writer of a pipe either."""
    followed = Followed(tmp_path, [str(shards)])
    os.mkfifo(shards / "fifo.tar")
    (shards / "loop.tar").symlink_to("loop.tar")
    write(shards / "t.tar", 7)
    answer = followed.look()
    assert answer["new"] == ["t"]
    assert (answer["error"], answer["left_out"]) == ("", {"fifo.tar": "is not a regular file"})


CLASS_12 = tars.tar(tars.member(b"k.txt", b"-"), tars.member(b"k.cls", b"12"))


@pytest.mark.parametrize(
    ("options", "name", "content", "why"),
    [
        ({"tolerance": Tolerance(strict=True)}, "t.tar", sets.content(7)[:1536], "^--strict: "),
        ({"view": View(index_tree=True)}, "by-index.tar", sets.content(7), "--index-tree"),
        # With more digits all other classes would get other names.
        (LAYOUTS["classes"], "t.tar", CLASS_12, "digits"),
    ],
)
def test_a_shard_that_does_not_go_with_the_options_is_left_out(
    shards: Path, tmp_path: Path, options: dict[str, Any], name: str, content: bytes, why: str
) -> None:
    followed = Followed(tmp_path, [str(shards)], **options)
    (shards / name).write_bytes(content)
    os.utime(shards / name, (LONG_AGO, LONG_AGO))
    answer = followed.look()
    assert answer["new"] == []
    assert re.search(why, answer["left_out"][name])


def test_a_shard_beyond_the_last_number_is_left_out(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look_again, "SHARD_MAX", 3)
    followed = Followed(tmp_path, [str(shards)])
    write(shards / "t.tar", 7)
    write(shards / "u.tar", 8)
    answer = followed.look()
    assert answer["new"] == ["t"]
    assert answer["left_out"] == {
        "u.tar": "the mount already has 4 shards, the most that it can show: mount again"
    }


def test_remote_shards_need_a_mount_that_began_with_some(shards: Path, tmp_path: Path) -> None:
    names = tmp_path / "list.txt"
    names.write_text("shards/s0.tar\n")
    followed = Followed(tmp_path, [f"@{names}"])
    left = look_again._Look(followed.served, Earlier({}), fetches=False)
    assert not left._passes(sets.at(b"s3://bucket/x.tar"))
    assert "mount again" in left.left_out[0].why
    left.close()


# --- what ends a look, and changes nothing ----------------------------------------------------------------


def test_a_directory_out_of_reach_keeps_its_shards(shards: Path, tmp_path: Path) -> None:
    """It is empty while its file system is not mounted; so are some of several."""
    sets.make(tmp_path / "other", 1)
    followed = Followed(tmp_path, [f"{shards}/s*.tar", f"{tmp_path}/other/*.tar"])
    before = followed.shown()
    shards.rename(tmp_path / "away")
    shards.mkdir()
    for look in range(2):
        answer = followed.look()
        assert answer["error"] == f"no file matches '{shards}/s*.tar'", look
    shards.rmdir()
    (tmp_path / "away").rename(shards)
    assert not change_of(followed.served, {**followed.look(), "new": [], "error": ""})
    assert followed.shown() == before
    several = Followed(tmp_path, [f"{tmp_path}/*/s0.tar"])
    (tmp_path / "other/s0.tar").unlink()
    answer = several.look()
    assert (answer["gone"], answer["error"]) == ([], "")
    assert answer["kept"].startswith(f"{tmp_path}/other: empty or not readable")


def test_a_list_that_others_can_write_is_not_read_again(shards: Path, tmp_path: Path) -> None:
    """It could have a mount for others show them what only the mounter may read."""
    names = tmp_path / "list.txt"
    names.write_text("shards/s0.tar\n")
    place = tmp_path / "place"
    place.mkdir()
    (place / "list.txt").write_text(f"{shards}/s0.tar\n")
    place.chmod(0o777)
    (place / "index").mkdir(mode=0o700)
    followed = Followed(tmp_path, [f"@{place}/list.txt"], shared=True)
    (place / "list.txt").write_text(f"{shards}/s0.tar\n{shards}/s1.tar\n")
    assert "other users can write it" in followed.look()["error"]
    place.chmod(0o755)
    assert followed.look()["new"] == ["s1"]


def test_a_link_in_a_directory_of_others_is_left_out(tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    sets.make(shards, 1)
    shards.chmod(0o777)
    followed = Followed(tmp_path, [str(shards)], shared=True)
    write(tmp_path / "private.tar", 7)
    (tmp_path / "private.tar").chmod(0o600)
    (shards / "link.tar").symlink_to(tmp_path / "private.tar")
    os.link(tmp_path / "private.tar", shards / "same.tar")
    write(shards / "right.tar", 8)
    answer = followed.look()
    assert answer["new"] == ["right"]
    assert set(answer["left_out"]) == {"link.tar", "same.tar"}
    assert all("refused" in why for why in answer["left_out"].values())


def test_a_shard_missing_at_the_mount_may_appear_later(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", 1)

    def names(**options: Any) -> tuple[list[bytes], list[str]]:
        with noted() as used:
            shards = fuse_session._shards(mount_options([f"{tmp_path}/{{a,b}}.tar"], "mnt", **options))
        return [shard.name for shard in shards], used.absolute()

    tolerant = Tolerance(allow_missing=True)
    assert names(follow=1.0, tolerance=tolerant) == ([b"a"], [str(tmp_path)])
    assert names(tolerance=tolerant)[0] == [b"a", b"b"]
    with pytest.raises(MissingShard):
        names(follow=1.0)


def test_a_shard_of_a_fixed_set_that_is_missing_is_an_error(shards: Path, tmp_path: Path) -> None:
    """Only a mount that follows its set takes it for gone."""
    followed = Followed(tmp_path, [str(shards)], merge=True)
    (shards / "s1.tar").unlink()
    assert [path for path in followed.shown() if b"/1-" in path] == []
    followed.served.tags.followed = False
    with pytest.raises(ShardError, match="names in the merged tree are missing"):
        followed.shown()


def test_a_view_that_cannot_be_made_later_is_said(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of it is made while the mount is there, and a companion may have gone by then."""
    monkeypatch.setattr(os, "nice", lambda _: 0)
    labels = Composition(associate=(f"{tmp_path}/labels.csv",), missing="empty")
    followed = Followed(tmp_path, [str(shards)], composition=labels)
    (tmp_path / "labels.csv").unlink()
    assert "labels.csv" in followed.served.derive()["refusal"]


def test_joined_shards_stay_beside_theirs(shards: Path, tmp_path: Path) -> None:
    """Else all derived records would be of another set, and be made again."""
    joined = Composition(join=(f"{tmp_path}/beside",), missing="empty")
    grown = Followed(tmp_path, [str(shards)], composition=joined).served.grown(
        Change({}, (), [sets.at(shards / "t.tar")])
    )
    assert [one.place for one in grown.shards] == [(0, 3), (1, 3), (2, 3), (3, 0)]
