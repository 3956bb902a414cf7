"""`wdsfs restore` over real mounts, where the kernel keeps what it has seen, and over overlays without one."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import BOTH_ENGINES, Program, fails, open_the_way
from tests.processes import PATIENCE, wait_until
from tests.writables import shard
from wdsfs import mount_registry
from wdsfs.fuse.write_ops import RESTORE

OVERLAY = ("--overlay", "o", "s{0..1}.tar")
KEYS = ("a", "b", "c", "d/e")


def content(number: int, key: str, extension: str) -> bytes:
    return f"{number}{key}{extension}".encode() * 100


@pytest.fixture
def a_set(program: Program) -> Program:
    for number in range(2):
        members = [(f"{key}.{ext}", content(number, key, ext)) for key in KEYS for ext in ("txt", "cls")]
        program.write(f"s{number}.tar", shard(members))
    return program


def picture(top: Path) -> dict[str, tuple[int, str, bytes]]:
    """Everything that can be seen: by path the number, the mode and the content."""
    shown = {}
    for path in sorted(top.rglob("*")):
        status = path.lstat()
        data = path.read_bytes() if path.is_file() else b""
        shown[str(path.relative_to(top))] = status.st_ino, stat.filemode(status.st_mode), data
    return shown


def edit(top: Path) -> None:
    (top / "s0/a/txt").write_bytes(b"changed")
    shutil.rmtree(top / "s0/b")
    os.rename(top / "s0/c", top / "s0/renamed")
    (top / "s0/n").mkdir()
    (top / "s0/n/txt").write_bytes(b"new")
    (top / "s1/a/cls").chmod(0o600)
    os.rename(top / "s1/b/txt", top / "s1/b/other")
    shutil.rmtree(top / "s1")
    (top / "more").mkdir()


UNDONE = """\
new      more
changed  s0/a/txt
removed  s0/b
new      s0/n
renamed  s0/c -> s0/renamed
removed  s1
"""


def test_everything_is_undone_for_whoever_looks(a_set: Program) -> None:
    """The kernel has seen all of it before, and what was made of it."""
    with a_set.mounted(*OVERLAY) as mounted:
        before = picture(mounted.path)
        with (
            (mounted.path / "s0/a/txt").open("rb") as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
        ):
            edit(mounted.path)
            after = picture(mounted.path)
            assert not (mounted.path / "s0/b").exists()
            with (mounted.path / "s0/n/txt").open("rb") as new:
                done = a_set.run("restore", "--dry-run", "--all", mounted.path)
                assert done.stdout.decode() == UNDONE
                assert done.stderr == b"would be undone: 1 changed, 2 removed, 1 renamed, 2 new\n"
                assert picture(mounted.path) == after
                assert a_set.run("restore", "--all", mounted.path).stdout.decode() == UNDONE
                assert picture(mounted.path) == before
                assert new.read() == b"new"  # of what is gone, as after rm
            assert mapped[:] == os.pread(file.fileno(), 5000, 0) == content(0, "a", "txt")
        assert a_set.run("diff", mounted.path).stdout == b""
        assert "there are no changes at any path" in a_set.refused("restore", "--all", mounted.path, code=6)
    with a_set.mounted(*OVERLAY) as mounted:
        assert picture(mounted.path) == before


def test_paths_as_they_are_typed(a_set: Program) -> None:
    """In the mount, from its top as `diff` shows them, from the working directory; a pattern is a plain name."""
    with a_set.mounted(*OVERLAY) as mounted:
        top, home = mounted.path, a_set.home
        before = picture(top)
        for paths, where in (
            ([top / "s0/a/txt"], home), (["s0/a/txt"], home), (["mnt/s0/a/txt"], home), (["s0/a", "s0/c"], home),
            (["txt"], top / "s0/a"), (["../a"], top / "s0/c"), (["."], top / "s0/a"),
        ):  # fmt: skip
            (top / "s0/a/txt").write_bytes(b"changed")
            done = a_set.run("restore", top, *paths, cwd=where)
            assert done.stdout == b"changed  s0/a/txt\n", paths
            assert picture(top) == before
        (top / "s0/[x").mkdir()
        (top / "s0/[x/txt").touch()
        assert a_set.run("restore", top, "s0/[x").stdout == b"new      s0/[x\n"


REFUSED = [
    (["/tmp"], 2, "/tmp: is outside of "),
    (["../x"], 2, "../x: is outside of "),
    ([""], 2, "a PATH is empty; to undo every change type --all"),
    ([], 2, "name the PATHs to restore, or --all"),
    (["--all", "s0"], 2, "--all takes no PATH"),
    (["s0/a", "s0/nothing"], 6, "no 'nothing' in "),
    (["s0/c"], 6, "there are no changes at s0/c"),
    (["s0/a", "s1/*"], 6, "no '*' in "),
    (["s0/a", "s0/b/txt"], 6, "s0/b was removed as a whole: restore that"),
]


def test_what_is_refused(a_set: Program) -> None:
    """Before anything is undone; and everything, where the mount is read-only."""
    with a_set.mounted(*OVERLAY) as mounted:
        (mounted.path / "s0/a/txt").write_bytes(b"changed")
        shutil.rmtree(mounted.path / "s0/b")
        for paths, code, text in REFUSED:
            assert text in a_set.refused("restore", mounted.path, *paths, code=code)
        assert (mounted.path / "s0/a/txt").read_bytes() == b"changed"
    with a_set.mounted("-r", *OVERLAY) as mounted:
        said = a_set.refused("restore", mounted.path, "s0/a", code=8)
        assert "nothing more can be restored: Read-only file system" in said


@BOTH_ENGINES
def test_where_there_is_nothing_to_restore(a_set: Program) -> None:
    assert "no mount of wdsfs is there" in a_set.refused("restore", a_set.mountpoint, "s0", code=5)
    with a_set.mounted("s0.tar") as mounted:
        assert "the mount has no overlay" in a_set.refused("restore", mounted.path, "s0", code=5)
    a_set.write("other/x", b"")
    message = a_set.refused("restore", "--overlay", "other", "x", code=8)
    assert "neither empty nor an overlay of wdsfs" in message
    assert "name PATHs in a mount; or a MOUNTPOINT and PATHs below it" in a_set.refused("restore", code=2)


def test_a_path_without_its_mount_point(a_set: Program) -> None:
    """As one types it inside the mount, as `where` takes it; the path need not be there any more."""
    with a_set.mounted(*OVERLAY) as mounted:
        top = mounted.path
        before = picture(top)
        for paths, where in (
            ([Path("s0/a/txt")], top),
            ([top / "s0/a"], top),
            ([Path("a/txt"), top / "s0/b"], top / "s0"),
        ):
            (top / "s0/a/txt").unlink()
            a_set.run("restore", *paths, cwd=where)
            assert picture(top) == before
        assert "name the PATHs to restore" in a_set.refused("restore", ".", code=2, cwd=top)
    for other in ("gone", "s0.tar"):
        assert f"{other}: no mount of wdsfs is there" in a_set.refused("restore", other, code=5)


def test_an_overlay_that_is_not_mounted(a_set: Program) -> None:
    with a_set.mounted(*OVERLAY) as mounted:
        before = picture(mounted.path)
        edit(mounted.path)
        assert "is in use by process" in a_set.refused("restore", "--overlay", "o", "--all", code=8)
    report = a_set.json("restore", "--overlay", "o", "s0/c", "s0/n")
    assert report == {
        "dry_run": False,
        "undone": [
            {"kind": "new", "path": "s0/n", "was": None},
            {"kind": "renamed", "path": "s0/renamed", "was": "s0/c"},
        ],
    }
    assert a_set.run("restore", "--overlay", "o", "--all").stderr == b"undone: 1 changed, 2 removed, 1 new\n"
    with a_set.mounted(*OVERLAY) as mounted:
        assert picture(mounted.path) == before


def test_meanwhile_a_commit_is_under_way(a_set: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that was stopped half-way."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", a_set.environment["XDG_RUNTIME_DIR"])
    with a_set.mounted(*OVERLAY) as mounted:
        (mounted.path / "s0/a/txt").write_bytes(b"changed")
        (a_set.home / "o/work/commit.json").write_text("{}")
        said = a_set.refused("restore", mounted.path, "s0/a", code=7)
        assert "was stopped half-way: the shards already have some of its changes" in said
        (a_set.home / "o/work/commit.json").unlink()
        registration = mount_registry.find_registration(str(mounted.path))
        assert registration is not None
        with mount_registry.Talk(registration) as commit:
            assert "shards" in commit.ask({"do": "freeze"}, PATIENCE)
            said = a_set.refused("restore", mounted.path, "s0/a", code=8)
            assert "nothing can be restored: it is being committed" in said
        wait_until(lambda: not a_set.run("restore", mounted.path, "s0/a", code=None).returncode, "the end of that")
        assert (mounted.path / "s0/a/txt").read_bytes() == content(0, "a", "txt")


def test_others_may_not(a_set: Program) -> None:
    """A user who may write to the top of a mount may not undo changes of the user who mounted."""
    if os.geteuid():
        pytest.skip("only root can become somebody else")
    a_set.mountpoint.chmod(0o755)
    with a_set.mounted(*OVERLAY, "-o", "allow_other") as mounted:
        mounted.path.chmod(0o777)
        (mounted.path / "s0/a/txt").write_bytes(b"changed")
        script = f"""
import os, sys
try:
    os.setxattr(sys.argv[1], {RESTORE!r}, b"s0/a")
except OSError as error:
    print(error.errno)
"""
        open_the_way(a_set.home)
        nobody: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": []}
        said = a_set.tool("/usr/bin/env", "python3", "-c", script, mounted.path, cwd="/", **nobody)
        assert int(said) == errno.EPERM
        assert (mounted.path / "s0/a/txt").read_bytes() == b"changed"
        with fails(errno.EOPNOTSUPP):
            os.setxattr(mounted.path / "s0", RESTORE, b"s0/a")


def test_attributes_of_another_tree_undo_nothing(a_set: Program) -> None:
    """As `rsync -X` and `tar --xattrs` copy them, also for the user who mounted."""
    with a_set.mounted(*OVERLAY) as mounted:
        (mounted.path / "s0/a/txt").write_bytes(b"changed")
        for value in (b"", b"s0/a", bytes(16), bytes(16) + b"s0/a"):
            with fails(errno.EPERM):
                os.setxattr(mounted.path, RESTORE, value)
        assert (mounted.path / "s0/a/txt").read_bytes() == b"changed"
        a_set.run("restore", mounted.path, "s0/a")
        assert (mounted.path / "s0/a/txt").read_bytes() == content(0, "a", "txt")


@pytest.mark.parametrize("change", ["gone", "replaced"])
@pytest.mark.parametrize("how", ["mounted", "unmounted"])
def test_a_renamed_sample_whose_shard_is_another(a_set: Program, change: str, how: str) -> None:
    """The name that it had stays hidden by its whiteout, so the copy is all that is left of it."""
    with contextlib.ExitStack() as stack:
        mounted = stack.enter_context(a_set.mounted(*OVERLAY))
        os.rename(mounted.path / "s0/a", mounted.path / "s0/z")
        (mounted.path / "s1/a/txt").write_bytes(b"changed")
        mounted.allow_log(r"s0\.tar(: the shard is gone| has changed)")
        source: tuple[str, ...] = (str(mounted.path),)
        if how == "unmounted":
            stack.close()
            source = ("--overlay", "o")
        if change == "gone":
            (a_set.home / "s0.tar").unlink()
        else:
            a_set.write("s0.tar", shard([(f"{key}.txt", b"x") for key in "ab"]))
        text = "s0.tar: the shard is gone" if change == "gone" else "perhaps s0/a; restore all that was removed"
        assert text in a_set.run("restore", *source, "s0/z", code=3).stderr.decode()
        assert (a_set.home / "o/upper/s0/z/txt").read_bytes() == content(0, "a", "txt")
        assert a_set.run("restore", *source, "s1/a").stdout == b"changed  s1/a/txt\n"  # of the other shard
        if change == "replaced":
            a_set.run("restore", *source, "s0/z", "s0/a")
            assert not list((a_set.home / "o/upper/s0").iterdir())


def test_a_copy_in_place_of_a_shard_that_was_touched(a_set: Program) -> None:
    """It is where it was, so it is no renamed one."""
    with a_set.mounted(*OVERLAY) as mounted:
        (mounted.path / "s0/a/txt").write_bytes(b"changed")
        shutil.rmtree(mounted.path / "s0/b")
    os.utime(a_set.home / "s0.tar")
    done = a_set.run("restore", "--overlay", "o", "s0/a")
    assert done.stdout == b"changed  s0/a/txt\n"
    assert b"/o was made: s0; the changes still apply" in done.stderr


def test_a_merged_tree_is_restored_only_whole(a_set: Program) -> None:
    with a_set.mounted("--merge", "--overlay", "o", "s0.tar") as mounted:
        os.rename(mounted.path / "c", mounted.path / "z")
    (a_set.home / "s0.tar").unlink()
    assert "s0.tar: " in a_set.refused("restore", "--overlay", "o", "z", code=3)
    assert (a_set.home / "o/upper/z").is_dir()


def test_a_user_who_is_not_root(user_program: Program) -> None:
    """Whose whiteouts are files."""
    user_program.write("s.tar", shard([("a.txt", b"a"), ("b.txt", b"b")]))
    options = ("--overlay", user_program.home / "o", user_program.home / "s.tar")
    with user_program.mounted(*options) as mounted:
        script = 'cd "$1"; rm -r s/a; mv s/b s/c; chmod 0 s/c/txt'
        user_program.tool("sh", "-c", script, "sh", mounted.path)
        user_program.run("restore", "--all", mounted.path)
        assert user_program.tool("cat", mounted.path / "s/a/txt", mounted.path / "s/b/txt") == b"ab"
        assert user_program.tool("ls", mounted.path / "s") == b"a\nb\n"
