"""Files that take the place of a mounted shard: which are shown, and which a mount for others refuses.

Another user, nobody, owns the directory of the shards; the mount is root's, with `allow_other`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import tars
from tests.conftest import BOTH_ENGINES, KERNEL, Mounted, Program
from tests.processes import wait_until
from tests.renumbering import RENUMBER, renumbering
from wdsfs.errors import MissingShard, RefusedShard
from wdsfs.source import TarBytes
from wdsfs.tree import shard_access

NOBODY, SOMEBODY = 65534, 65533
pytestmark = pytest.mark.root

OLD = tars.tar(tars.member(b"a.txt", b"old"), tars.member(b"a.cls", b"1"))
NEW = tars.tar(tars.member(b"a.txt", b"newer"), tars.member(b"a.cls", b"1"))
SECRET = tars.tar(tars.member(b"secret.txt", b"secret"), tars.member(b"secret.cls", b"1"))


def as_user(script: str, *arguments: Path, uid: int = NOBODY) -> bytes:
    """Return the output of a shell script of another user; it has to succeed."""
    options = {"user": uid, "group": uid, "extra_groups": []}
    command = ["sh", "-c", script, "sh", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, check=False, cwd="/", **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done
    return bytes(done.stdout)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that everybody can reach: `theirs` is another user's, with a shard; `private.tar` is root's."""
    home = Path(tempfile.mkdtemp())
    os.chmod(home, 0o755)
    (home / "theirs").mkdir()
    (home / "theirs/s.tar").write_bytes(OLD)
    for path in (home / "theirs", home / "theirs/s.tar"):
        os.chown(path, NOBODY, NOBODY)
    (home / "private.tar").write_bytes(SECRET)
    os.chmod(home / "private.tar", 0o600)
    (home / "mnt").mkdir()
    yield home
    shutil.rmtree(home)


# --- in the place of a mounted shard ------------------------------------------------------------------------


def _link(at: Path, target: str = "private.tar", name: str = "s.tar") -> None:
    """In one step: a mount that looks in between would say that the shard is gone."""
    script = 'ln -s "$1/$2" "$1/theirs/link" && mv -T "$1/theirs/link" "$1/theirs/$3"'
    as_user(script, at, Path(target), Path(name))


def _link_above(at: Path) -> None:
    as_user('mv "$1/theirs/sub" "$1/theirs/was" && ln -s "$1/dir" "$1/theirs/sub"', at)


def _hard_link(at: Path) -> None:
    """A hard link to the file of another user, which fs.protected_hardlinks forbids on most machines."""
    as_user('rm "$1/theirs/s.tar"', at)
    os.link(at / "private.tar", at / "theirs/s.tar")


def _other_owner(at: Path) -> None:
    as_user('rm "$1/theirs/s.tar"', at)
    (at / "theirs/s.tar").write_bytes(SECRET)
    os.chown(at / "theirs/s.tar", SOMEBODY, SOMEBODY)


def _moved(at: Path) -> None:
    """Out of a directory that others may write, as a file of root's may lie in one."""
    os.rename(at / "private.tar", at / "theirs/s.tar")


def _close(shard: TarBytes) -> None:
    assert isinstance(shard, int)
    os.close(shard)


REFUSED: list[tuple[Callable[[Path], None], str]] = [
    (_link, "a link leads from there to .*/private.tar"),
    (_hard_link, "another file of root's, which not everybody may read"),
    (_other_owner, r"belongs to another user \(65533\)"),
    (_moved, "another file of root's, which not everybody may read"),
]


@pytest.mark.parametrize(("prepare", "why"), REFUSED)
def test_what_is_refused(place: Path, prepare: Callable[[Path], None], why: str) -> None:
    path = os.fsencode(place / "theirs/s.tar")
    one = shard_access.access_of([path], shared=True)
    before = one.look(path)
    _close(one.open(path))
    prepare(place)
    for attempt in (one.look, one.open):
        with pytest.raises(RefusedShard, match=f"s.tar is refused: since the mount .*{why}"):
            attempt(path)
    os.unlink(path)
    with pytest.raises(MissingShard):
        one.look(path)
    as_user('cat > "$1"', place / "theirs/s.tar")
    assert one.look(path) != before


def test_what_is_refused_where_inode_numbers_do_not_last(place: Path) -> None:
    """Another file of the same size and time is no known one."""
    one, private = place / "theirs/s.tar", place / "private.tar"
    private.write_bytes(SECRET)
    one.write_bytes(OLD.ljust(len(SECRET), b"\0"))
    for tar in (one, private):
        os.truncate(tar, len(SECRET))
        os.utime(tar, (1, 1))
    with renumbering(place / "theirs", place / "shown"):
        path = os.fsencode(place / "shown/s.tar")
        access = shard_access.access_of([path], shared=True)
        access.look(path)
        os.rename(private, one)
        assert not (place / "shown" / RENUMBER).exists()
        for attempt in (access.look, access.open):
            with pytest.raises(RefusedShard, match="another file of root's"):
                attempt(path)


def test_a_link_in_the_way(place: Path) -> None:
    (place / "theirs/sub").mkdir()
    os.chown(place / "theirs/sub", NOBODY, -1)
    as_user('cp "$1/theirs/s.tar" "$1/theirs/sub/s.tar"', place)
    (place / "dir").mkdir()
    (place / "dir/s.tar").write_bytes(SECRET)
    path = os.fsencode(place / "theirs/sub/s.tar")
    one = shard_access.access_of([path], shared=True)
    _link_above(place)
    with pytest.raises(RefusedShard, match=r"a link leads from there to .*/dir/s.tar"):
        one.look(path)


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_a_new_shard_of_the_same_owner_or_of_the_mounter(place: Path, mode: int) -> None:
    path = os.fsencode(place / "theirs/s.tar")
    one = shard_access.access_of([path], shared=True)
    before = one.look(path)
    as_user(f'cp "$1/s.tar" "$1/n" && chmod {mode:o} "$1/n" && mv "$1/n" "$1/s.tar"', place / "theirs")
    assert one.look(path) != before
    _close(one.open(path))
    (place / "new").write_bytes(NEW)
    os.rename(place / "new", place / "theirs/s.tar")
    one.look(path)
    _close(one.open(path))


def test_a_shard_that_arrives_later(place: Path) -> None:
    """With `--allow-missing`: of the owner of its directory, not of somebody else."""
    paths = [os.fsencode(place / "theirs" / name) for name in ("late.tar", "other.tar")]
    one = shard_access.access_of(paths, shared=True)
    with pytest.raises(MissingShard):
        one.look(paths[0])
    as_user('cp "$1/s.tar" "$1/late.tar"', place / "theirs")
    _close(one.open(paths[0]))
    (place / "theirs/other.tar").write_bytes(NEW)
    os.chown(place / "theirs/other.tar", SOMEBODY, SOMEBODY)
    with pytest.raises(RefusedShard, match="belongs to another user"):
        one.look(paths[1])


def test_where_only_trusted_users_can_write(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that root points elsewhere each night, and files of anybody: nobody else can have done it."""
    for name in ("v1", "v2"):
        (place / name).mkdir()
        (place / name / "s.tar").write_bytes(OLD)
    (place / "now").symlink_to("v1")
    path = os.fsencode(place / "now/s.tar")
    one = shard_access.access_of([path], shared=True)
    (place / "now").unlink()
    (place / "now").symlink_to("v2")
    os.chown(place / "v2/s.tar", SOMEBODY, SOMEBODY)
    _close(one.open(path))
    path = os.fsencode(place / "theirs/s.tar")
    one = shard_access.access_of([path], shared=True)
    _link(place)
    monkeypatch.setenv("WDSFS_TRUST", "nobody")
    _close(one.open(path))


def test_who_is_guarded(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount that only its user sees pays nothing."""
    path = os.fsencode(place / "theirs/s.tar")
    for shared, trusted, guarded in ((True, "", True), (False, "", False), (True, "everyone", False)):
        monkeypatch.setenv("WDSFS_TRUST", trusted)
        assert isinstance(shard_access.access_of([path], shared), shard_access.GuardedAccess) == guarded


# --- mounts -------------------------------------------------------------------------------------------------


def reads(mounted: Mounted, name: str) -> bytes:
    """Return what another user reads; empty for an error."""
    options = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    command = ["cat", str(mounted.path / name)]
    done = subprocess.run(command, capture_output=True, check=False, cwd="/", **options)  # type: ignore[call-overload]
    assert done.returncode == 0 or b"Permission denied" in done.stderr or b"Stale" in done.stderr, done
    return bytes(done.stdout)


def test_a_private_tar_is_not_read_through_a_mount_of_root(program: Program, place: Path) -> None:
    """The other user replaces a shard by a link to it, and by a good one again."""
    with program.mounted("-o", "allow_other", place / "theirs/s.tar", at=place / "mnt") as mounted:
        assert reads(mounted, "s/a/txt") == b"old"
        _link(place)
        wait_until(lambda: not reads(mounted, "s/a/txt"), "the mount to see the link")
        listed = subprocess.run(["ls", "-R", mounted.path], capture_output=True, check=False)
        assert b"secret" not in listed.stdout
        assert b"Permission denied" in listed.stderr
        mounted.expect_log(r"s.tar is refused: since the mount a link leads from there to .*/private.tar")
        wait_until(lambda: mounted.status()["damaged"], "the status")
        ((damaged,)) = mounted.status()["damaged"]
        assert "is refused" in damaged["problem"] or "a link leads" in damaged["problem"]
        assert "private.tar" in (mounted.path / ".wdsfs/problems.txt").read_text()
        (place / "new").write_bytes(NEW)
        os.chown(place / "new", NOBODY, NOBODY)
        os.rename(place / "new", place / "theirs/s.tar")
        wait_until(lambda: reads(mounted, "s/a/txt") == b"newer", "the good one")
        mounted.allow_log("has changed, so it is indexed again", "has changed since this was opened")


# --- at the mount -------------------------------------------------------------------------------------------


# Which file of root's nobody links, by which name, and SHARDS and options that lead there.
PLANTED = {
    "a shard": ("private.tar", "s.tar", "{place}/theirs/s.tar"),
    "a directory": ("dir", "sub", "{place}/theirs/sub/s.tar"),
    "a hard link": (None, "s.tar", "{place}/theirs/s.tar"),
    "a glob": ("private.tar", "s.tar", "{place}/theirs/*.tar"),
    "a joined set": ("private.tar", "s.tar", "--join {place}/theirs/s.tar {place}/own.tar"),
    "labels": ("private.csv", "l.csv", "--associate {place}/theirs/l.csv {place}/own.tar"),
    "names of classes": ("names", "n", "--layout classes --class-names {place}/theirs/n {place}/own.tar"),
    "a list": ("list.txt", "list.txt", "@{place}/theirs/list.txt"),
}


@BOTH_ENGINES
@pytest.mark.parametrize("case", PLANTED)
def test_what_others_planted_before_the_mount_is_refused(program: Program, place: Path, case: str) -> None:
    """A link, or a hard link, of another user to a file that only root can read: at a boot, or after a restart."""
    (place / "own.tar").write_bytes(OLD)
    (place / "dir").mkdir(mode=0o700)
    (place / "dir/s.tar").write_bytes(SECRET)
    (place / "list.txt").write_text(f"{place}/private.tar\n")
    for name, text in (("private.csv", "key,secret\na,secret\n"), ("names", "secret\nsecret too\n")):
        (place / name).write_text(text)
        os.chmod(place / name, 0o600)
    target, name, typed = PLANTED[case]
    if target is None:
        _hard_link(place)
    else:
        _link(place, target, name)
    engine = ("--engine", "kernel") if program.engine == KERNEL else ()
    arguments = (*engine, "-o", "allow_other", *typed.format(place=place).split(), place / "mnt")
    message = program.refused("mount", *arguments, code=3)
    assert re.search(
        r"a link of another user \(nobody\) leads to a file of root|is a hard link of a file", message
    )
    assert "secret" not in message


@BOTH_ENGINES
def test_links_that_lead_nowhere_else_are_no_obstacle(program: Program, place: Path) -> None:
    """Those of root, of others to files of theirs, also in a sticky directory, and of trusted users."""
    as_user('mv "$1/theirs/s.tar" "$1/theirs/file" && ln -s file "$1/theirs/s.tar"', place)
    (place / "r.tar").symlink_to(place / "private.tar")
    (place / "sticky").mkdir()
    os.chmod(place / "sticky", 0o1777)
    as_user('ln -s "$1/theirs/file" "$1/sticky/t.tar"', place)
    as_user('ln -s "$1/private.tar" "$1/sticky/p.tar"', place)
    shards = [place / "theirs/s.tar", place / "r.tar", place / "sticky/t.tar"]
    with program.mounted("-o", "allow_other", *shards, at=place / "mnt") as mounted:
        assert (reads(mounted, "s/a/txt"), reads(mounted, "t/a/txt")) == (b"old", b"old")
        assert reads(mounted, "r/secret/txt") == b"secret"
    with program.mounted(
        "-o", "allow_other", "--trust", "nobody", place / "sticky/p.tar", at=place / "mnt"
    ) as mounted:
        assert reads(mounted, "p/secret/txt") == b"secret"


def test_who_is_trusted_may_change_the_link(program: Program, place: Path) -> None:
    os.chmod(place / "private.tar", 0o600)
    command = ("-o", "allow_other", "--trust", "nobody", place / "theirs/s.tar")
    with program.mounted(*command, at=place / "mnt") as mounted:
        _link(place)
        wait_until(lambda: os.path.exists(mounted.path / "s/secret/txt"), "the file to which the link leads")
        assert reads(mounted, "s/secret/txt") == b"secret"
        mounted.expect_log("has changed, so it is indexed again")
        mounted.allow_log("has changed since this was opened")  # by a look that was under way: ESTALE


def test_a_planted_link_beside_shards_that_may_be_missing(program: Program, place: Path) -> None:
    _link(place)
    (place / "own.tar").write_bytes(OLD)
    shards = (place / "own.tar", place / "theirs/s.tar")
    with program.mounted("--allow-missing", "-o", "allow_other", *shards, at=place / "mnt") as mounted:
        assert reads(mounted, "own/a/txt") == b"old"
        assert not reads(mounted, "s/secret/txt")
        mounted.expect_log("s.tar is refused: a link leads from there to .*/private.tar")
        as_user('rm "$1/theirs/s.tar" && cp "$1/own.tar" "$1/theirs/s.tar"', place)
        wait_until(lambda: reads(mounted, "s/a/txt") == b"old", "the good one")
        mounted.allow_log("has changed")


@pytest.mark.parametrize("view", ["join", "labels"])
def test_what_shards_are_shown_with_is_guarded_too(program: Program, place: Path, view: str) -> None:
    program.write("own/s.tar", tars.tar(tars.member(b"a.jpg", b"jjj")))
    (place / "private.tar").write_bytes(NEW)
    (place / "theirs/l.csv").write_text("key,x\na,old\n")
    os.chown(place / "theirs/l.csv", NOBODY, NOBODY)
    (place / "private.csv").write_text("key,x\na,secret\n")
    os.chmod(place / "private.csv", 0o600)
    option, shown, linked = {
        "join": ("--join", "s/a/txt", ("private.tar", "s.tar")),
        "labels": ("--associate", "s/a/x", ("private.csv", "l.csv")),
    }[view]
    with_them = option, place / "theirs" / linked[1]
    with program.mounted("-o", "allow_other", *with_them, program.home / "own/s.tar", at=place / "mnt") as mounted:
        assert reads(mounted, shown) == b"old"
        _link(place, *linked)
        wait_until(lambda: not reads(mounted, shown), "the mount to see the link")
        mounted.expect_log("is refused: since the mount a link leads from there to .*/private")
        mounted.allow_log("has changed", "ESTALE", "tries again later")


def _overlay(place: Path) -> tuple[str | Path, ...]:
    """Another user's shards `s.tar` and `t.tar`, under a mount of root's with an overlay of root's."""
    as_user('cp "$1/s.tar" "$1/t.tar"', place / "theirs")
    return "-o", "allow_other", "--overlay", place / "overlay", place / "theirs/s.tar", place / "theirs/t.tar"


def test_a_commit_of_another_shard_does_not_lift_a_refusal(program: Program, place: Path) -> None:
    with program.mounted(*_overlay(place), at=place / "mnt") as mounted:
        _link(place)
        wait_until(lambda: not reads(mounted, "s/a/txt"), "the mount to see the link")
        (mounted.path / "t/a/cls").write_bytes(b"2")
        program.run("commit", "--in-place", mounted.path)
        assert reads(mounted, "t/a/cls") == b"2"
        assert not reads(mounted, "s/secret/txt")
        assert "private.tar" in (mounted.path / ".wdsfs/problems.txt").read_text()
        mounted.expect_log("s.tar is refused")
        mounted.allow_log("has changed")


@pytest.mark.parametrize("command", ["diff", "in place", "elsewhere"])
def test_a_refused_shard_is_not_committed(program: Program, place: Path, command: str) -> None:
    """Neither written to, through the link, nor copied where others may read it."""
    arguments = {
        "diff": ("diff",),
        "in place": ("commit", "--in-place"),
        "elsewhere": ("commit", "-o", place / "n%d.tar"),
    }
    with program.mounted(*_overlay(place), at=place / "mnt") as mounted:
        (mounted.path / ("t" if command == "elsewhere" else "s") / "a/cls").write_bytes(b"2")
        _link(place)
        wait_until(lambda: not reads(mounted, "s/a/txt"), "the mount to see the link")
        done = program.run(*arguments[command], mounted.path, code=3)
        assert b"s.tar is refused" in done.stderr
        assert (place / "private.tar").read_bytes() == SECRET
        assert not (place / "n0.tar").exists()
        mounted.expect_log("s.tar is refused")
        mounted.allow_log("has changed")


def test_no_commit_writes_through_a_link_that_others_made(program: Program, place: Path) -> None:
    shards = place / "theirs/s.tar", place / "theirs/t.tar"
    with program.mounted(*_overlay(place), at=place / "mnt") as mounted:
        (mounted.path / "s/a/cls").write_bytes(b"2")
    _link(place)
    commit = ("commit", "--in-place", "--overlay", place / "overlay")
    done = program.run(*commit, *shards, code=7)
    assert b"s.tar is not replaced: a link leads from there to" in done.stderr
    assert (place / "private.tar").read_bytes() == SECRET
    program.run(*commit, "--trust", "nobody", *shards)
    assert (place / "theirs/s.tar").is_symlink()
    assert (place / "private.tar").read_bytes() != SECRET
