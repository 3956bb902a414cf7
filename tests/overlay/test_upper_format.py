"""The format of the upper, written by wdsfs or by the kernel, and the directory around it."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import sets
from tests.processes import Process
from tests.writables import FILES, Mount, a_set, fast_directory
from wdsfs.errors import OverlayBusy, OverlayUnusable
from wdsfs.inodes import UP
from wdsfs.names import Reading
from wdsfs.overlay.overlay_directory import (
    OverlayDirectory,
    OverlaySettings,
    ShardSeen,
    hold,
    read_settings,
    write_settings,
)
from wdsfs.overlay.upper_format import (
    DIRECTORY,
    FILE,
    OTHER,
    SYMLINK,
    WHITEOUT,
    Origin,
    UpperNode,
    load_names,
    open_below,
)
from wdsfs.shards import Fingerprint

as_root = pytest.mark.root


def loaded(path: Path) -> UpperNode:
    fd = os.open(path, os.O_RDONLY)
    try:
        return load_names(fd)
    finally:
        os.close(fd)


def test_every_kind_of_thing_is_read(tmp_path: Path) -> None:
    (tmp_path / "d/sub").mkdir(parents=True)
    (tmp_path / "d/f").write_bytes(b"content")
    os.link(tmp_path / "d/f", tmp_path / "d/sub/g")
    (tmp_path / "s").symlink_to("nowhere")
    os.mkfifo(tmp_path / "p")
    (tmp_path / "w").touch()
    os.setxattr(tmp_path / "w", "user.overlay.whiteout", b"y")
    os.setxattr(tmp_path / "d/sub", "user.overlay.opaque", b"y")
    os.setxattr(tmp_path / "d", "user.overlay.opaque", b"x")
    os.setxattr(tmp_path / "d/f", "user.wdsfs.origin", b"123:ff")
    root = loaded(tmp_path)
    d = root.children[b"d"]
    assert {name: node.kind for name, node in root.children.items()} == {
        b"d": DIRECTORY,
        b"s": SYMLINK,
        b"p": OTHER,
        b"w": WHITEOUT,
    }
    file = d.children[b"f"]
    assert (file.kind, file.origin, file.inode) == (FILE, Origin(123, 255), os.stat(tmp_path / "d/f").st_ino | UP)
    assert d.children[b"sub"].children[b"g"] is file
    assert {(parent.path(), name) for parent, name in file.places()} == {(b"d", b"f"), (b"d/sub", b"g")}
    assert (d.opaque, d.children[b"sub"].opaque) == (False, True)
    assert len(list(root.walk())) == 7
    fd = os.open(tmp_path, os.O_RDONLY)
    inner = open_below(fd, file.path())
    assert os.read(inner, 99) == b"content"
    os.close(inner)
    os.close(fd)


@as_root
def test_devices_that_the_kernel_writes_are_whiteouts(tmp_path: Path) -> None:
    os.mknod(tmp_path / "w", stat.S_IFCHR, 0)
    os.mknod(tmp_path / "null", stat.S_IFCHR, os.makedev(1, 3))
    root = loaded(tmp_path)
    assert (root.children[b"w"].kind, root.children[b"null"].kind) == (WHITEOUT, OTHER)


@pytest.mark.parametrize(
    "name",
    [
        *("user.overlay.redirect", "user.overlay.metacopy"),
        *(pytest.param(f"trusted.overlay.{mark}", marks=as_root) for mark in ("opaque", "whiteout", "redirect")),
    ],
)
def test_marks_of_an_overlayfs_mounted_by_hand_are_refused(tmp_path: Path, name: str) -> None:
    """Without them the mount would show something else."""
    for place in ("d", "d/f"):
        (tmp_path / "d").mkdir(exist_ok=True)
        (tmp_path / "d/f").touch()
        os.setxattr(tmp_path / place, name, b"y")
        with pytest.raises(OverlayUnusable, match=f"'{place}'.*{name}.*mounted by hand"):
            loaded(tmp_path)
        os.removexattr(tmp_path / place, name)


def test_an_upper_may_be_as_deep_as_it_likes() -> None:
    with fast_directory() as home:
        fd = os.open(home, os.O_RDONLY)
        for _ in range(1500):
            os.mkdir(b"d" * 100, dir_fd=fd)
            inner = os.open(b"d" * 100, os.O_RDONLY, dir_fd=fd)
            os.close(fd)
            fd = inner
        os.close(fd)
        assert len(list(loaded(home).walk())) == 1500
        subprocess.run(["rm", "-rf", *home.iterdir()], check=True)  # Python's own way of removing it recurses


def test_settings_come_back(tmp_path: Path) -> None:
    place = OverlayDirectory(tmp_path)
    assert read_settings(place) is None
    seen = ShardSeen(b"\xff", b"/\xfe/a.tar", Fingerprint(1, -2, 3))
    settings = OverlaySettings("samples", "ext", True, (seen,))
    write_settings(place, settings)
    assert read_settings(place) == settings
    without_reading = {**json.loads(place.settings.read_text()), "version": 1}
    del without_reading["reading"]
    place.settings.write_text(json.dumps(without_reading))
    assert read_settings(place) == settings
    settings = replace(settings, reading=Reading(group_by_key=True))
    write_settings(place, settings)
    assert read_settings(place) == settings
    place.settings.write_text('{"version": 99}')
    with pytest.raises(OverlayUnusable, match="99"):
        read_settings(place)


@pytest.mark.parametrize(
    ("holder", "text"),
    [
        pytest.param(str(os.getpid()), f"process {os.getpid()}", id="this process"),
        ("4194305", "daemon .process 4194305. has died"),  # a number over the maximum: workers of it hold the lock
        ("9" * 99, "in use by process 9+;"),
        ("", "in use;"),
    ],
)
def test_an_overlay_is_held_once(holder: str, text: str, tmp_path: Path) -> None:
    place = OverlayDirectory(tmp_path)
    fd = hold(place)
    (tmp_path / "lock").write_text(holder)
    with pytest.raises(OverlayBusy, match=text):
        hold(place)
    os.close(fd)
    os.close(hold(place))


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A directory that every user can reach and read."""
    home = Path(tempfile.mkdtemp())
    home.chmod(0o755)
    yield home
    shutil.rmtree(home)


def _lock_as_nobody(path: Path) -> Process:
    """A process of another user that locks a path, says so, and holds it until it is killed."""
    command: list[str | Path] = ["flock", "-n", path, "sh", "-c", "echo locked && read -r _"]
    who: dict[str, Any] = {"user": "nobody", "group": "nogroup", "extra_groups": []}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return Process(command, cwd="/", **pipes, **who)


@as_root
@pytest.mark.parametrize("mode", [None, 0o644])
def test_no_other_user_can_lock_an_overlay(open_to_all: Path, mode: int | None) -> None:
    """Neither a new one, nor one of an earlier version, whose lock all could read."""
    place = OverlayDirectory(open_to_all)
    if mode is not None:
        place.lock.touch()
        place.lock.chmod(mode)
    os.close(hold(place))
    assert stat.S_IMODE(place.lock.stat().st_mode) == 0o600
    with _lock_as_nobody(place.lock) as locker:
        out, err = locker.communicate()
    assert (out, b"Permission denied" in err) == (b"", True)


@as_root
def test_a_process_of_another_user_that_has_locked_it_is_named(open_to_all: Path) -> None:
    """A lock of an earlier version may be held when it is repaired."""
    place = OverlayDirectory(open_to_all)
    place.lock.touch()
    place.lock.chmod(0o644)
    with _lock_as_nobody(place.lock) as locker:
        try:
            assert locker.stdout is not None
            assert locker.stdout.readline() == b"locked\n"
            with pytest.raises(
                OverlayBusy, match=rf"process {locker.pid} of another user \(nobody\) has locked it"
            ):
                hold(place)
        finally:
            locker.communicate()  # its standard input ends, and so does it
    os.close(hold(place))


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    """Such as an upper of the kernel's overlayfs; nothing is written there."""
    (tmp_path / "s0").mkdir()
    for make in (True, False):
        with pytest.raises(OverlayUnusable, match="neither empty nor an overlay of wdsfs"):
            hold(OverlayDirectory(tmp_path), make=make)
    assert os.listdir(tmp_path) == ["s0"]


def test_no_descriptor_is_left_open() -> None:
    with a_set([[("a.x", b"ax"), ("b.x", b"bx")]]) as tree, fast_directory() as home:
        tree.lookup(1, b"s0")
        before = len(os.listdir("/proc/self/fd"))
        mount = Mount(tree, home)
        for number in range(300):
            mount.mkdir(b"d%d" % number)
            mount.put(b"d%d/f" % number, b"f")
        assert len(os.listdir("/proc/self/fd")) < before + 50
        mount.replace_worker()
        mount.remount()
        mount.close()
        assert len(os.listdir("/proc/self/fd")) <= before


# --- with the kernel


def need_overlayfs() -> None:
    probe = subprocess.run([*sets.in_own_mounts(), "grep", "-w", "overlay", "/proc/filesystems"], check=False)
    if probe.returncode:
        pytest.skip("the kernel has no overlayfs here")


_OVERLAY = """
import os, subprocess, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from tests.writables import EXT, FILES, Mount, a_set, copy_out, walk_directory
home = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "none", home], check=True)
with a_set([[("a.x", b"ax"), ("a.y", b"ay"), ("d/b.x", b"dbx"), ("e/f.x", b"efx")]]) as tree:
    mount = Mount(tree, home / "overlay")
    (home / "lower").mkdir()
    copy_out(mount, os.fsencode(home / "lower"))
    mount.write(b"s0/a/x", b"!")
    mount.unlink(b"s0/a/y")
    mount.rename(b"s0/d/b", b"s0/new")
    mount.unlink(b"s0/e/f/x")
    mount.rmdir(b"s0/e/f")
    mount.mkdir(b"s0/e/f")
    mount.put(b"s0/e/f/g", b"g")
    mount.mkdir(b"top")
    mount.remount()
    ours = mount.walk()
    (home / "merged").mkdir()
    (home / "kernel").mkdir()
    where = "lowerdir={0}/lower,upperdir={0}/overlay/upper,workdir={0}/kernel,userxattr".format(home)
    subprocess.run(["mount", "-t", "overlay", "none", "-o", where, home / "merged"], check=True)
    theirs = walk_directory(os.fsencode(home / "merged"))
    hidden = {path: about[:2] + about[-2:-1] for path, about in theirs.items()}
    assert hidden == {path: about[:2] + about[-2:-1] for path, about in ours.items()}, (ours, theirs)
    os.unlink(home / "merged/s0/a/x")
    os.rename(home / "merged/s0/e/f/g", home / "merged/s0/g")
    subprocess.run(["umount", home / "merged"], check=True)
    mount.remount()
    assert mount.names(b"s0/a") == []
    assert mount.read(b"s0/g") == b"g"
    mount.close()
    subprocess.run(["mount", "-o", "remount,ro", home], check=True)
    mount.start()
    assert mount.read(b"s0/g") == b"g"
    changes = [
        lambda: mount.write(b"s0/g", b"!"),
        lambda: mount.create(b"s0/n"),
        lambda: mount.unlink(b"s0/g"),
        lambda: mount.change(b"s0/g", size=0),
        lambda: mount.change(b"s0/new", mode=0),
    ]
    for change in changes:
        try:
            change()
        except OSError as error:
            assert error.errno == 30, error
        else:
            raise AssertionError(change)
    mount.close()
"""


@as_root
def test_the_kernel_and_wdsfs_see_the_same_upper(tmp_path: Path) -> None:
    """Then the file system is made read-only: everything can be read, and writers get EROFS."""
    need_overlayfs()
    sets.run(_OVERLAY, tmp_path, Path(__file__).parent.parent, wrapper=sets.in_own_mounts())


_PLACES = """
import subprocess, sys
from pathlib import Path
from wdsfs.errors import OverlayUnusable
from wdsfs.overlay.overlay_directory import OverlayDirectory
from wdsfs.overlay.upper_directory import UpperDirectory
def mount(*words):
    subprocess.run(["mount", *words], check=True)
home = Path(sys.argv[1])
for disk in ("low", "up"):
    (home / disk).mkdir()
    mount("-t", "tmpfs", "none", home / disk)
for directory in ("up/plain", "up/u", "up/w", "two-disks", "bound/upper", "bound/work", "elsewhere"):
    (home / directory).mkdir(parents=True)
mount("-t", "overlay", "none", "-o", "lowerdir={0}/low,upperdir={0}/up/u,workdir={0}/up/w,xino=off".format(home),
      home / "two-disks")
mount("--bind", home / "elsewhere", home / "bound/work")
for name in ("up/plain", "two-disks", "bound"):
    try:
        UpperDirectory(OverlayDirectory(home / name)).close(clean=True)
    except OverlayUnusable as error:
        print(error)
    else:
        print("taken")
"""


@as_root
def test_an_upper_that_could_be_written_and_not_read_is_refused(tmp_path: Path) -> None:
    """Files of an overlayfs over two disks have another device than its directories: no commit would take them."""
    need_overlayfs()
    taken, layers, bound = sets.run(_PLACES, tmp_path, wrapper=sets.in_own_mounts()).splitlines()
    assert taken == "taken"
    assert f"the file system of {tmp_path}/two-disks cannot take an overlay" in layers
    assert f"the file system of {tmp_path}/bound cannot take an overlay" in bound


_AS_USER = """
import os, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from tests.writables import Mount, a_set
home = Path(sys.argv[1])
os.chown(home, 65534, 65534)
os.setgid(65534), os.setuid(65534)
with a_set([[("a.x", b"ax"), ("a.y", b"ay")]]) as tree:
    mount = Mount(tree, home / "overlay")
    inode = mount.look(b"s0/a/x").inode
    mount.change(b"s0/a/x", mode=0)
    mount.mkdir(b"s0/d", 0o000)
    mount.create(b"s0/d/f", 0o200)
    for again in (mount.replace_worker, mount.remount, lambda: None):
        assert mount.look(b"s0/a/x").mode & 0o7777 == 0
        assert mount.look(b"s0/d").mode & 0o7777 == 0
        assert mount.look(b"s0/d/f").mode & 0o7777 == 0o200
        assert mount.tree.read(inode, 0, 9) == b"ax"
        again()
    mount.change(b"s0/d", mode=0o700)
    assert mount.look(b"s0/d").mode & 0o7777 == 0o700
    assert os.listxattr(home / "overlay/upper/s0/d") == ["user.overlay.opaque"]
    mount.close()
    os.chdir("/")
os._exit(0)
"""


@as_root
def test_a_daemon_that_is_not_root_can_always_open_its_own_files() -> None:
    with fast_directory() as home:
        os.chmod(home, 0o777)
        sets.run(_AS_USER, home, Path(__file__).parent.parent)


def test_a_file_of_a_tar_stays_linked(tmp_path: Path) -> None:
    """A stop between two names of a copied-up file is made good when the next worker starts."""
    with a_set([[("a", b"aa"), ("b", "== a")]], FILES) as tree:
        mount = Mount(tree, tmp_path)
        mount.write(b"s0/a", b"!")
        os.unlink(tmp_path / "upper/s0/b")
        mount.replace_worker()
        assert (mount.read(b"s0/b"), mount.look(b"s0/b").links) == (b"!a", 2)
        assert (tmp_path / "upper/s0/b").read_bytes() == b"!a"
        mount.close()
