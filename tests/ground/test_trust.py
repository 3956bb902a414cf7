"""Directories, links and files that another user of the machine has prepared: which are used, and which are not.

The other user is a real one: `another` runs commands as nobody.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import grp
import os
import pwd
import shlex
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import sets, tars
from tests.conftest import Program, fails
from tests.processes import finished
from wdsfs import host, mount_table, trust
from wdsfs.cache.file_cache import NoRoom, cache
from wdsfs.durable import Disk, temporary_of
from wdsfs.errors import IndexUnusable, MountError, OverlayUnusable, UsageError
from wdsfs.index.store import Index, open_index
from wdsfs.interop import export
from wdsfs.overlay.overlay_directory import OverlayDirectory, hold
from wdsfs.tree.shard_set import ShardSet
from wdsfs.trust import Untrusted

NOBODY = 65534
SMALL = tars.tar(tars.member(b"a.txt", b"aaa"), tars.member(b"a.cls", b"1"))

needs_root = pytest.mark.root


def another(*command: str | Path, code: int = 0) -> None:
    """Run a command as another user."""
    finished(*command, code=code, cwd="/", user=NOBODY, group=NOBODY, extra_groups=[])


@pytest.fixture
def common() -> Iterator[Path]:
    """A directory like /tmp: everybody may write to it."""
    with tempfile.TemporaryDirectory() as home:
        os.chmod(home, 0o1777)
        yield Path(home)


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[Index]:
    index = open_index(directory)
    try:
        yield index
    finally:
        index.close()


# --- the way to a directory ---------------------------------------------------------------------------------


def test_what_is_missing_is_made_for_this_user_alone(tmp_path: Path) -> None:
    """Only if that is asked for, and not where a link leads."""
    with pytest.raises(FileNotFoundError):
        trust.directory(tmp_path / "a")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(FileNotFoundError):
        trust.directory(tmp_path / "link", create=True)
    assert [*tmp_path.iterdir()] == [tmp_path / "link"]
    before = os.umask(0)
    try:
        trust.directory(tmp_path / "a/b/c", create=True)
    finally:
        os.umask(before)
    for name in ("a", "a/b", "a/b/c"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o700
    os.chmod(tmp_path / "a", 0o777)
    trust.directory(tmp_path / "a", tighten=True)  # what only wdsfs uses
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o755


def test_links_of_ones_own_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real/in").mkdir(parents=True)
    (tmp_path / "far").symlink_to(tmp_path / "real")
    (tmp_path / "near").symlink_to("real/../far/in")
    trust.directory(tmp_path / "near/new", create=True)
    assert (tmp_path / "real/in/new").is_dir()
    (tmp_path / "loop").symlink_to("loop")
    with fails(errno.ELOOP):
        trust.directory(tmp_path / "loop")
    (tmp_path / "file").touch()
    for place in ("file", "file/x"):
        with pytest.raises(NotADirectoryError):
            trust.directory(tmp_path / place, create=True)


@needs_root
def test_a_look_leaves_nothing_open(common: Path) -> None:
    another("ln", "-s", "nowhere", common / "link")
    (common / "file").touch()
    gc.collect()  # what earlier tests have left must not be closed meanwhile
    before = os.listdir("/proc/self/fd")
    for place, error in (("link/x", Untrusted), ("file", NotADirectoryError)):
        with pytest.raises(error):
            trust.directory(common / place)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize(
    ("mode", "way", "itself"),
    [(0o755, 1, 1), (0o1777, 1, 0), (0o777, 0, 0), (0o703, 0, 0), (0o1770, 1, 0)],
)
def test_who_may_write_decides(tmp_path: Path, mode: int, way: bool, itself: bool) -> None:
    """A sticky directory is safe to pass, since only owners replace things in it, and not to put names into."""
    (tmp_path / "d/in").mkdir(parents=True, mode=0o700)
    if os.geteuid() == 0:
        os.chown(tmp_path / "d", -1, NOBODY)
    os.chmod(tmp_path / "d", mode)
    for place, safe in ((tmp_path / "d/in", way), (tmp_path / "d", itself)):
        if safe:
            trust.directory(place)
        else:
            with pytest.raises(Untrusted, match=rf"can write to .*/d \(mode {mode:04o}\): "):
                trust.directory(place)


@needs_root
def test_whose_directories_count(common: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    another("mkdir", "-p", common / "theirs/in")
    another("ln", "-s", "theirs", common / "link")
    os.mkdir(common / "mine")
    another("ln", "-s", common / "mine", common / "theirs/to-mine")
    for place in ("theirs", "theirs/in", "link", "theirs/to-mine"):
        with pytest.raises(Untrusted, match=r"belongs to another user \(nobody\): .* --trust nobody"):
            trust.directory(common / place)
        with pytest.raises(Untrusted, match="belongs to another user"):
            trust.directory(common / place / "new", create=True)
        assert not (common / place / "new").exists()
    for who in ("nobody", "65534", "root,nobody", "everyone"):
        monkeypatch.setenv("WDSFS_TRUST", who)
        for place in ("theirs/in", "link", "theirs/to-mine"):
            trust.directory(common / place)


@needs_root
def test_groups_that_may_write(common: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkdir(common / "d")
    os.chown(common / "d", 0, NOBODY)
    os.chmod(common / "d", 0o2775)
    with pytest.raises(Untrusted, match=r"the group nogroup can write .* chmod g-w .* or --trust @nogroup"):
        trust.directory(common / "d")
    another("mkdir", common / "d/theirs")  # of the same group, and so of one of its members
    os.chmod(common / "d/theirs", 0o770)
    monkeypatch.setenv("WDSFS_TRUST", "@nogroup")
    trust.directory(common / "d")
    trust.directory(common / "d/theirs")
    os.chmod(common / "d", 0o2777)
    with pytest.raises(Untrusted, match="others can write"):
        trust.directory(common / "d")


def test_the_group_that_a_user_has_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the custom of many systems, whose users have the umask 002."""
    monkeypatch.setattr(pwd, "getpwuid", lambda _: pwd.struct_passwd(("ann", "x", 1000, 1000, "", "/", "")))
    for name, others, alone in (("ann", [], 1), ("ann", ["ann"], 1), ("ann", ["bob"], 0), ("users", [], 0)):
        group = grp.struct_group((name, "x", 1000, others))
        monkeypatch.setattr(grp, "getgrgid", lambda _, group=group: group)
        assert trust._private_group(1000) == ({1000} if alone else set())


def test_names_that_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kind in (("no-such-one", "user"), ("@no-such-one", "group")):
        monkeypatch.setenv("WDSFS_TRUST", name)
        with pytest.raises(UsageError, match=f"--trust {name}: there is no such {kind}; write USER, @GROUP"):
            trust.trusted()


def test_a_fuse_mount_of_another_user(user_program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its daemon can say of any file that it is ours."""
    user_program.write("a.tar", SMALL)
    with user_program.mounted("a.tar") as mounted:
        found = mount_table.mounted_at(mounted.path)
        assert found is not None
        assert trust._fuse_mounter(found.device) == user_program.uid
    monkeypatch.setattr(trust, "_fuse_mounter", lambda _: 12345)
    with pytest.raises(Untrusted, match=r"is a FUSE mount of another user \(12345\)"):
        trust.directory("/")


# --- files --------------------------------------------------------------------------------------------------


@needs_root
def test_files_that_others_have_prepared(common: Path) -> None:
    victim = common / "victim"
    victim.write_bytes(b"content")
    os.chmod(common, 0o777)
    another("ln", "-s", victim, common / "symbolic link")
    os.link(victim, common / "several names")
    another("touch", common / "another user")
    another("mkfifo", common / "not a regular file")
    (common / "others can write").touch()
    os.chmod(common / "others can write", 0o666)
    for file in sorted({*common.iterdir()} - {victim}):
        for flags in (os.O_RDWR | os.O_CREAT | os.O_TRUNC, os.O_WRONLY | os.O_APPEND):
            with pytest.raises(
                OSError, match=f"{file.name}.*{file.name}|No such device"
            ):  # a pipe without a reader
                trust.open_file(file, flags)
    assert victim.read_bytes() == b"content"


# --- the index ----------------------------------------------------------------------------------------------


@needs_root
@pytest.mark.parametrize("name", ["lock.mdb", "data.mdb"])
def test_files_from_a_time_when_others_could_write(common: Path, name: str) -> None:
    """The directory is this user's and private now. What is not sound in it is made anew, through no link."""
    shards = sets.make(common / "shards", 1)
    with opened(common / "index") as index:
        index.refresh(shards)
    victim = common / "victim"
    for spoil in (
        lambda path: path.symlink_to(victim),
        lambda path: os.link(victim, path),
        lambda path: (path.touch(), os.chown(path, NOBODY, NOBODY)),
        lambda path: (path.touch(), os.chmod(path, 0o666)),
    ):
        victim.unlink(missing_ok=True)
        victim.write_bytes(b"content")
        (common / "index" / name).unlink()
        spoil(common / "index" / name)
        with opened(common / "index") as index:
            assert "is not trusted (" in index.notices[0]
            assert "it is rebuilt" in index.notices[0]
            assert index.directory == common / "index"
            index.refresh(shards)
            sets.check(index, shards)
        assert victim.read_bytes() == b"content"
        assert stat.S_IMODE((common / "index" / name).stat().st_mode) == 0o600


@needs_root
def test_an_index_that_a_group_shares(common: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named by `--trust`: the files can be written by the group as the directory can."""
    shards = sets.make(common / "shards", 1)
    os.mkdir(common / "index")
    os.chown(common / "index", 0, NOBODY)
    os.chmod(common / "index", 0o2770)
    with opened(common / "index") as index:
        assert "the group nogroup can write" in index.notices[0]
    monkeypatch.setenv("WDSFS_TRUST", "@nogroup")
    with opened(common / "index") as index:
        assert index.notices == []
        index.refresh(shards)
    for name in ("data.mdb", "lock.mdb", "open.lock"):
        found = (common / "index" / name).stat()
        assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o660, NOBODY)
    os.chown(common / "index/data.mdb", NOBODY, -1)  # whichever of them was the first
    monkeypatch.setenv("XDG_CACHE_HOME", str(common / "own"))
    monkeypatch.setenv("WDSFS_INDEX_DIR", str(common / "index"))
    with opened(common / "index") as index:
        assert index.notices == []
        sets.check(index, shards)
    assert cache().directory == common / "own/wdsfs/cache"


def test_a_temporary_index_is_not_where_others_can_replace_it(
    common: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (common / "tmp").mkdir()
    os.chmod(common / "tmp", 0o777)
    (common / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(common / "tmp"))
    with opened(common / "file") as index:
        assert index.temporary
        assert index.directory.parent == Path("/tmp")
    assert list((common / "tmp").iterdir()) == []


# --- what else is kept --------------------------------------------------------------------------------------


@needs_root
def test_the_cache(common: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its names follow from the shard, so a user who can write it can prepare what a shard unpacks to."""
    another("mkdir", common / "cache")
    monkeypatch.setenv("WDSFS_CACHE_DIR", str(common / "cache"))
    with pytest.raises(IndexUnusable, match=r"the cache is not used, since .* --trust nobody"):
        cache()
    monkeypatch.setenv("WDSFS_CACHE_DIR", str(common / "mine"))
    with contextlib.suppress(NoRoom):
        os.close(cache().make("0" * 32, ["tar"], lambda _: ("tar", 0)).fd)
    assert stat.S_IMODE((common / "mine").stat().st_mode) == 0o700
    monkeypatch.delenv("WDSFS_CACHE_DIR")
    os.mkdir(common / "index", 0o700)
    os.mkdir(common / "index/cache", 0o700)
    os.chown(common / "index/cache", NOBODY, -1)
    monkeypatch.setenv("WDSFS_INDEX_DIR", str(common / "index"))
    with pytest.raises(IndexUnusable, match="cache belongs to another user"):
        cache()
    # Where the index goes if its directory is not safe, there goes the cache.
    another("mkdir", common / "theirs")
    monkeypatch.setenv("WDSFS_INDEX_DIR", str(common / "theirs"))
    (common / "spare").mkdir(0o700)
    monkeypatch.setattr(host, "node_local_dir", lambda: common / "spare")
    assert cache().directory == common / "spare/cache"
    for place in ("cache", "cache/wdsfs"):  # as one of control sockets
        with pytest.raises(MountError, match="belongs to another user"):
            host.private_directory(common / place, MountError)


@needs_root
def test_logs_are_ours_alone(program: Program) -> None:
    """Not written through a link that somebody else has put there, and not for others to read."""
    program.write("a.tar", SMALL)
    with program.mounted("a.tar", umask=0) as mounted:
        log = Path(mounted.status()["log"])
        assert stat.S_IMODE(log.stat().st_mode) == 0o600
        for place in (log.parent, program.home / "index", program.home / "index/cache"):
            assert not place.exists() or stat.S_IMODE(place.stat().st_mode) == 0o700, place
        for file in (program.home / "index").iterdir():
            assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0, file
    victim = program.write("victim", b"content\n")
    log.unlink()
    log.symlink_to(victim)
    with program.mounted("a.tar") as mounted:
        mounted.expect_log("cannot write a log in .*: .* is a symbolic link")
        spare = Path(mounted.status()["log"])
        assert spare.parent == program.registration(mounted.path).parent
        spare.unlink()
    assert victim.read_bytes() == b"content\n"


@needs_root
def test_an_index_directory_that_another_user_made_first(program: Program, common: Path) -> None:
    """The file into which LMDB would write through the link stays; the index is elsewhere, and why is said."""
    program.write("a.tar", SMALL)
    victim = program.write("victim", b"content")
    another("mkdir", "-m", "0777", common / "index")
    another("ln", "-s", victim, common / "index/lock.mdb")
    # In mounts of its own, so that the index does not go to the machine's /var/tmp.
    wrapper = [*sets.in_own_mounts(), "sh", "-c", 'mount -t tmpfs none /var/tmp && exec "$@"', "sh"]
    environment = {**program.environment, "WDSFS_INDEX_DIR": str(common / "index")}
    done = subprocess.run(
        [*wrapper, *program.command("ls", "-R", "a.tar")],
        env=environment, cwd=program.home, capture_output=True, check=True,
    )  # fmt: skip
    assert done.stdout == b"a/\na/a/\na/a/txt\na/a/cls\n"
    assert b"index is not used, since %s/index belongs to another user (nobody)" % bytes(common) in done.stderr
    assert b": take a place of your own, or --trust nobody; using /var/tmp/wdsfs-0" in done.stderr
    assert victim.read_bytes() == b"content"
    assert os.listdir(common / "index") == ["lock.mdb"]


# --- overlays and targets -----------------------------------------------------------------------------------


@needs_root
def test_an_overlay_that_others_can_write(common: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal in it says which files a commit replaces, and the lock may be a link to any file."""
    victim = common / "victim"
    victim.write_bytes(b"content")
    another("mkdir", common / "o")
    another("ln", "-s", victim, common / "o/lock")
    with pytest.raises(OverlayUnusable, match=r"is not used, since .*/o belongs to another user .*--trust nobody"):
        hold(OverlayDirectory(common / "o"))
    monkeypatch.setenv("WDSFS_TRUST", "nobody")  # then it is used, but still nothing through a link
    with pytest.raises(OverlayUnusable, match="lock is a symbolic link: remove it"):
        hold(OverlayDirectory(common / "o"))
    assert victim.read_bytes() == b"content"


@needs_root
def test_a_mount_with_an_overlay_of_another_user(program: Program, common: Path) -> None:
    program.write("a.tar", SMALL)
    another("mkdir", common / "o")
    said = program.refused("mount", "--overlay", common / "o", "a.tar", program.mountpoint, code=8)
    assert "belongs to another user (nobody)" in said
    assert os.listdir(common / "o") == []
    with program.mounted("--trust", "nobody", "--overlay", common / "o/in", "a.tar", umask=0) as mounted:
        (mounted.path / "a/a/txt").write_bytes(b"new")
        assert (mounted.path / "a/a/txt").read_bytes() == b"new"
        assert stat.S_IMODE((common / "o/in").stat().st_mode) == 0o700


@needs_root
@pytest.mark.parametrize("how", ["link", "hard link", "their own"])
def test_temporary_names_that_others_have_taken(common: Path, how: str) -> None:
    """A shard that is written into another user's file could be changed by that user ever after."""
    os.chmod(common, 0o777)
    victim = common / "victim"
    victim.write_bytes(b"content")
    temporary = Path(os.fsdecode(temporary_of(bytes(common / "new.tar"))))
    if how == "hard link":
        os.link(victim, temporary)  # where fs.protected_hardlinks is 0, anybody can
    elif how == "link":
        another("ln", "-s", victim, temporary)
    else:
        another("sh", "-c", f"umask 0; echo theirs > {shlex.quote(str(temporary))}")
    fd = Disk().open_temporary(bytes(temporary), 0o600)
    try:
        found = os.fstat(fd)
        assert (found.st_uid, found.st_nlink, found.st_size) == (0, 1, 0)
        assert stat.S_IMODE(found.st_mode) == 0o600  # never open to others meanwhile
        assert os.path.samestat(found, os.lstat(temporary))
    finally:
        os.close(fd)
    assert victim.read_bytes() == b"content"


def test_a_temporary_name_that_cannot_be_had(user_program: Program) -> None:
    """In a directory like /tmp what another user has made stays."""
    if user_program.user is None:
        pytest.skip("takes a second user")
    shared = user_program.home / "shared"
    shared.mkdir()
    os.chmod(shared, 0o1777)
    user_program.write("a.tar", SMALL)
    (shared / ".wdsfs-n.tar.tmp").write_bytes(b"root's")
    with user_program.mounted("--overlay", user_program.home / "o", "a.tar") as mounted:
        user_program.tool("sh", "-c", f"echo 2 > {mounted.path}/a/a/cls")
        said = user_program.refused("commit", "-o", shared / "n.tar", mounted.path, code=7)
    assert ".wdsfs-n.tar.tmp cannot be removed: it belongs to another user" in said
    assert (shared / ".wdsfs-n.tar.tmp").read_bytes() == b"root's"


@needs_root
def test_an_export_takes_no_mode_from_where_a_link_leads(common: Path) -> None:
    shard = common / "s.tar"
    shard.write_bytes(SMALL)
    (common / "open").touch()
    os.chmod(common / "open", 0o666)
    another("ln", "-s", common / "open", common / "s.idx")
    with opened(common / "index") as index:
        below = ShardSet([sets.at(shard)], index)
        export.export(below, os.fsencode(common))
        below.release()
    assert stat.S_ISREG((common / "s.idx").lstat().st_mode)
    assert not stat.S_IMODE((common / "s.idx").lstat().st_mode) & 0o022
    assert (common / "open").read_bytes() == b""


def test_a_pipe_beside_a_shard_is_not_waited_for(program: Program) -> None:
    """It has the name of an index, so an indexing mount would hang."""
    program.write("a.tar", SMALL)
    for name in ("a.idx", "a.tar.idx"):
        os.mkfifo(program.home / name)
    assert program.json("index", "a.tar")["samples"] == 1
    assert b"is not a regular file" in program.run("check", "a.tar", code=1).stdout


def test_a_backup_of_hard_links(tmp_path: Path) -> None:
    """`cp -al`: the message names the small file that is in the way, and that nothing is lost with it."""
    os.mkdir(tmp_path / "o")
    os.close(hold(OverlayDirectory(tmp_path / "o")))
    finished("cp", "-al", tmp_path / "o", tmp_path / "backup")
    with pytest.raises(OverlayUnusable, match=r"/o/lock has several names .*: remove it \(it is only a lock"):
        hold(OverlayDirectory(tmp_path / "o"))
    (tmp_path / "o/lock").unlink()
    os.close(hold(OverlayDirectory(tmp_path / "o")))


@needs_root
@pytest.mark.parametrize("typed", [False, True])
def test_two_dots_after_a_link_lead_above_its_target(tmp_path: Path, common: Path, typed: bool) -> None:
    """`l/../f` is not `f` where `l` leads elsewhere: the file of another user is opened there."""
    for name in ("f", "x/f"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"ours")
    another("mkdir", "-p", common / "a/b")
    another("touch", common / "a/f")
    (tmp_path / "l").symlink_to(common / "a/b")
    (tmp_path / "safe").symlink_to("x")
    (tmp_path / "good").symlink_to("safe/../f")
    (tmp_path / "evil").symlink_to("l/../f")
    good, evil = ("safe/../f", "l/../f") if typed else ("good", "evil")
    trust.content(tmp_path / good)
    assert trust.holds(os.fsencode(tmp_path / good))
    with pytest.raises(Untrusted, match="belongs to another user"):
        trust.content(tmp_path / evil)
    assert not trust.holds(os.fsencode(tmp_path / evil))


def test_a_loop_of_links_is_no_file(tmp_path: Path) -> None:
    """Who can put one there while a shard is looked at keeps nobody busy for ever."""
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("./a")
    with fails(errno.ELOOP):
        trust.content(tmp_path / "a")
    assert not trust.holds(bytes(tmp_path / "a"))
    with open("/dev/null", "rb") as file, fails(errno.ELOOP):
        trust.own_links(bytes(tmp_path / "a"), file.fileno())


@needs_root
def test_hard_links_of_who_has_typed_sudo(tmp_path: Path) -> None:
    """In a directory of their own they are theirs; that of another user may have them from anywhere."""
    shard = tmp_path / "t.tar"
    shard.write_bytes(SMALL)
    shard.chmod(0o600)
    (tmp_path / "again.tar").hardlink_to(shard)
    for path in (tmp_path, shard):
        os.chown(path, NOBODY, NOBODY)
    with open(shard, "rb") as file:
        trust.own_links(os.fsencode(shard), file.fileno(), also=NOBODY)
        os.chown(tmp_path, NOBODY - 1, NOBODY - 1)
        with pytest.raises(Untrusted, match="is a hard link of a file of"):
            trust.own_links(os.fsencode(shard), file.fileno(), also=NOBODY)
