"""`wdsfs restore`: after any edits everything is as in the shards again, also when a worker dies meanwhile."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.overlay.test_edits import World
from tests.overlay.test_model import SETS
from tests.overlay.test_writable_tree import Seam, Stopped
from tests.writables import Mount, a_set, mounted
from wdsfs.errors import EntryError, NoSuchEntry
from wdsfs.overlay.overlaid_tree import NodeTable
from wdsfs.overlay.restore import Restoration, RestoredChange
from wdsfs.overlay.upper_directory import load_upper
from wdsfs.overlay.upper_files import EXCHANGE, SystemCalls
from wdsfs.overlay.upper_format import UpperNode
from wdsfs.tree.tree import LowerTree

Walk = dict[bytes, tuple[Any, ...]]


def restore(mount: Mount, *paths: bytes) -> list[tuple[int, bytes]]:
    """Restore, and say what the kernel has to ask again for."""
    notes: list[tuple[int, bytes]] = []
    mount.tree.restore(paths, lambda inode, name: notes.append((inode, name)))
    return notes


def plan(mount: Mount, *paths: bytes) -> list[RestoredChange]:
    """Return what the command announces, from the names on disk."""
    nodes = NodeTable(mount.below, load_upper(mount.upper.place))
    nodes.bind()
    restoration = Restoration(nodes)
    return restoration.changes(restoration.targets(paths))


def names_in(top: UpperNode) -> list[bytes]:
    return [directory.path() + b"/" + name for directory, name, _ in top.walk()]


# --- any edits ---------------------------------------------------------------------------------------------


def edit(mount: Mount, chance: random.Random) -> None:
    """Things that a user may do; what cannot be done is no matter."""
    world = World(mount, mount.below.view, mount.below.merged, chance)
    for _ in range(12):
        world.step()


def with_numbers(mount: Mount) -> tuple[Walk, dict[bytes, int]]:
    return mount.walk(), mount.inodes()


@pytest.mark.parametrize("seed", range(6))
def test_after_any_edits_all_can_be_undone(tree: LowerTree, seed: int) -> None:
    """Numbers included, for this worker, for the next one and for the next mount; nothing stays in the upper."""
    chance = random.Random(seed)
    with mounted(tree) as mount:
        before = with_numbers(mount)
        for _ in range(2):
            edit(mount, chance)
            if chance.random() < 0.5:
                mount.replace_worker()
            restore(mount, b"")
            assert with_numbers(mount) == before
            assert os.listdir(mount.home / "upper") == []
            mount.replace_worker()
            assert with_numbers(mount) == before
        mount.remount()
        assert with_numbers(mount) == before
        assert os.listdir(mount.home / "work/orphans") == []


@pytest.mark.parametrize("seed", range(6))
def test_after_any_edits_a_part_can_be_undone(tree: LowerTree, seed: int) -> None:
    """Restored files are as in the shards, the rest stays consistent, and the next worker sees the same."""
    chance = random.Random(1000 + seed)
    with mounted(tree) as mount:
        before = mount.walk()
        edit(mount, chance)
        for _ in range(3):
            changed = names_in(mount.upper.top)
            if not changed:
                break
            path = chance.choice(changed).strip(b"/")
            try:
                expected = plan(mount, path)
            except EntryError:
                with pytest.raises(EntryError):
                    restore(mount, path)
                continue
            assert expected
            restore(mount, path)
            now = mount.walk()
            assert below(now, path) == below(before, path)
            mount.replace_worker()
            assert {name: line[:1] for name, line in mount.walk().items()} == {
                name: line[:1] for name, line in now.items()
            }
            assert below(mount.walk(), path) == below(before, path)


def below(walk: Walk, path: bytes) -> dict[bytes, Any]:
    """Return what is at a path and below it, without link counts: another name of a file may stay."""
    return {
        name: line[:2] + line[3:] if line[0] == "file" else line
        for name, line in walk.items()
        if name == path or name.startswith(path + b"/")
    }


@pytest.mark.parametrize("seed", range(3))
def test_a_worker_that_dies_while_it_restores(samples: LowerTree, seed: int) -> None:
    """At any system call: the next one gets the same request, and does the rest."""
    at, last = 1, False
    while not last:
        seam = Seam(SystemCalls, at, Stopped)
        with mounted(samples, seam) as mount:
            before = with_numbers(mount)
            edit(mount, random.Random(seed))
            seam.armed = True
            try:
                restore(mount, b"")
                last = True
            except Stopped:
                seam.armed = False
                mount.replace_worker()
                restore(mount, b"")
            assert with_numbers(mount) == before
        at += 1
    assert at > 5


# --- one change each ---------------------------------------------------------------------------------------


def test_restoring_a_changed_file(mount: Mount) -> None:
    mount.write(b"s0/a/x", b"!")
    mount.write(b"s0/a/y", b"!")
    number, folder = mount.look(b"s0/a/x").inode, mount.look(b"s0/a").inode
    assert plan(mount, b"s1/b", b"nothing") == []
    assert restore(mount, b"s1/b", b"nothing") == []
    assert plan(mount, b"s0/a/x") == [RestoredChange("changed", b"s0/a/x")]
    assert set(restore(mount, b"s0/a/x")) == {(number, b""), (folder, b"x")}
    assert (mount.read(b"s0/a/x"), mount.read(b"s0/a/y")) == (b"ax", b"!yayay")
    assert mount.look(b"s0/a/x").inode == number


def test_a_new_file_goes_and_stays_readable_while_open(mount: Mount) -> None:
    mount.mkdir(b"s0/n")
    inode = mount.create(b"s0/n/x")
    mount.write(b"s0/n/x", b"new")
    mount.told.pop(mount.look(b"s0/n").inode)
    assert plan(mount, b"s0/n") == [RestoredChange("new", b"s0/n")]
    restore(mount, b"s0/n")
    assert b"n" not in mount.names(b"s0")
    assert mount.read_inode(inode) == b"new"
    assert mount.tree.getattr(inode).links == 0
    mount.forget(inode)
    assert f"{inode:x}" not in os.listdir(mount.home / "work/orphans")


# What is done, what is restored, and what is announced: then all is as it was, numbers included.
CHANGED: dict[str, tuple[Callable[[Mount], object], bytes, list[RestoredChange]]] = {
    **{
        f"a sample, by {name!r}": (
            lambda mount: (mount.rename(b"s1/b", b"s1/new"), mount.write(b"s1/new/y", b"!")),
            name,
            [RestoredChange("renamed", b"s1/new", b"s1/b")],
        )
        for name in (b"s1/b", b"s1/new")
    },
    "removed": (
        lambda mount: (mount.unlink(b"s0/a/x"), mount.unlink(b"s0/a/y")),
        b"s0/a",
        [RestoredChange("removed", b"s0/a/x"), RestoredChange("removed", b"s0/a/y")],
    ),
    "one after the other": (
        lambda mount: (mount.rename(b"s1/d/c", b"s1/x"), mount.rename(b"s1/b", b"s1/d/c")),
        b"s1/b",
        [RestoredChange("renamed", b"s1/d/c", b"s1/b"), RestoredChange("renamed", b"s1/x", b"s1/d/c")],
    ),
    "exchanged": (
        lambda mount: mount.rename(b"s0/a/x", b"s0/a/y", EXCHANGE),
        b"s0/a/y",
        [RestoredChange("renamed", b"s0/a/x", b"s0/a/y"), RestoredChange("renamed", b"s0/a/y", b"s0/a/x")],
    ),
}


@pytest.mark.parametrize("case", CHANGED)
def test_restoring_one_change(mount: Mount, case: str) -> None:
    change, path, announced = CHANGED[case]
    before = with_numbers(mount)
    change(mount)
    assert plan(mount, path) == announced
    restore(mount, path)
    assert with_numbers(mount) == before


def test_a_file_moved_out_of_what_was_removed_stays(mount: Mount) -> None:
    """As a new one: what it was is there again, and under its own number."""
    mount.rename(b"s1/b/y", b"s1/d/c/moved")
    held = mount.look(b"s1/d/c/moved").inode
    mount.rmdir(b"s1/b")
    restore(mount, b"s1/b")
    assert (mount.read(b"s1/b/y"), mount.read(b"s1/d/c/moved")) == (b"by", b"by")
    assert mount.look(b"s1/b/y").inode == held != mount.look(b"s1/d/c/moved").inode
    mount.write(b"s1/d/c/moved", b"!")
    mount.remount()
    assert (mount.read(b"s1/b/y"), mount.read(b"s1/d/c/moved")) == (b"by", b"!y")


def test_a_whiteout_that_was_removed_by_hand(mount: Mount) -> None:
    """The way without `restore`: a renamed file is no second name of the one that is there again."""
    mount.rename(b"s1/b/y", b"s1/b/z")
    mount.write(b"s1/b/z", b"!")
    mount.upper.close()
    (mount.home / "upper/s1/b/y").unlink()
    mount.start()
    assert (mount.read(b"s1/b/y"), mount.read(b"s1/b/z")) == (b"by", b"!y")
    assert mount.look(b"s1/b/y").inode != mount.look(b"s1/b/z").inode


@pytest.mark.parametrize("change", ["removed", "renamed", "replaced"])
def test_nothing_is_restored_below_what_went_as_a_whole(mount: Mount, change: str) -> None:
    path = b"s1/b/y"
    if change == "renamed":
        mount.rename(b"s1/b", b"s1/n")
        path = b"s1/n/y"
    else:
        mount.unlink(path)
        mount.rmdir(b"s1/b")
    if change == "replaced":
        mount.mkdir(b"s1/b")
        mount.put(path, b"another")
    with pytest.raises(NoSuchEntry, match=f"s1/[bn] was {change} as a whole: restore that"):
        plan(mount, path)
    restore(mount, path.rpartition(b"/")[0])
    assert mount.read(b"s1/b/y") == b"by"


def test_names_of_a_hard_link_come_back_together() -> None:
    with a_set(*SETS["files"]) as tree, mounted(tree) as mount:
        before = with_numbers(mount)
        mount.write(b"s0/b", b"!")
        mount.link(b"s0/b", b"s0/new")
        restore(mount, b"s0/d/a")
        assert mount.read(b"s0/a.x") == mount.read(b"s0/b") == b"ax"
        assert mount.read(b"s0/new") == b"!x"
        assert mount.look(b"s0/new").inode != mount.look(b"s0/b").inode
        assert mount.look(b"s0/b").links == 3
        restore(mount, b"s0/new")
        assert with_numbers(mount) == before


def test_a_hard_link_comes_back_with_its_directory() -> None:
    """It is the file that it was, which is still changed; restoring the name itself undoes that, too."""
    with a_set(*SETS["files"]) as tree, mounted(tree) as mount:
        mount.write(b"s0/b", b"!")
        mount.unlink(b"s0/d/a")
        mount.unlink(b"s0/d/b.x")
        mount.rmdir(b"s0/d")
        restore(mount, b"s0/d")
        assert (mount.read(b"s0/d/b.x"), mount.read(b"s0/d/a"), mount.read(b"s0/b")) == (b"dbx", b"!x", b"!x")
        assert mount.look(b"s0/d/a").inode == mount.look(b"s0/b").inode
        restore(mount, b"s0/b")
        assert mount.read(b"s0/d/a") == mount.read(b"s0/b") == b"ax"
