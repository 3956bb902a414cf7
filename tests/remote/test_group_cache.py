"""One cache for a group: each range is fetched once, and what a killed member leaves stops nobody."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import wdsfs
from tests import tars
from tests.conftest import Program, User, program_of
from tests.processes import PATIENCE, answer_of_child, forked, wait_until
from tests.remote.cached import LIMIT, URL, content_of, pin_of
from tests.web_server import WebServer
from wdsfs.cache.file_cache import MADE_NS, FileCache, NewFile
from wdsfs.remote.cached_object import BLOCK
from wdsfs.remote.object_cache import ObjectCache
from wdsfs.trust import Untrusted

pytestmark = pytest.mark.root

GROUP, ANNA, BERT, STRANGER = 54321, 54001, 54002, 54003
SIZE = 4 * BLOCK
KEY = "0" * 32


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory that an administrator has made, and the word that it is to be trusted."""
    monkeypatch.setenv("WDSFS_TRUST", f"@{GROUP}")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as home:
        os.chmod(home, 0o755)
        directory = Path(home, "cache")
        directory.mkdir()
        os.chown(directory, 0, GROUP)
        directory.chmod(0o2770)
        yield directory


def become(user: int, work: Callable[[], object], group: int = GROUP) -> int:
    """Start a process of a member, whose umask closes files to others; it ends with 0 if all went well."""

    def as_user() -> None:
        os.umask(0o077)
        os.setgroups([GROUP] if group == GROUP else [])
        os.setgid(user)
        os.setuid(user)
        work()

    return forked(as_user)


def by(user: int, work: Callable[[], object], group: int = GROUP) -> None:
    """Do something as a member, to its end."""
    _, status = os.waitpid(become(user, work, group), 0)
    assert status == 0


def are_open_to_the_group(directory: Path) -> bool:
    files = [path.stat() for path in directory.iterdir()]
    assert files
    return all((file.st_gid, stat.S_IMODE(file.st_mode)) == (GROUP, 0o660) for file in files)


def test_what_one_member_puts_others_read_change_and_remove(shared: Path) -> None:
    def puts() -> None:
        with contextlib.closing(ObjectCache(shared, LIMIT).open(URL, pin_of(SIZE))) as cached:
            assert cached.put(0, content_of(SIZE)[:BLOCK])
        ObjectCache(shared, LIMIT).keep_pin(URL, pin_of(SIZE))

    def reads_and_puts() -> None:
        cache = ObjectCache(shared, LIMIT)
        assert cache.pin_of(URL)
        with contextlib.closing(cache.open(URL, pin_of(SIZE))) as cached:
            assert cached.read(BLOCK, 0) == content_of(SIZE)[:BLOCK]
            assert cached.put(0, content_of(SIZE))
            assert cached.complete

    def removes() -> None:
        cache = ObjectCache(shared, LIMIT)
        assert cache.files.group() == GROUP
        assert cache.has_all(URL, pin_of(SIZE))
        assert [entry.shown for entry in cache.clear("")] == [URL]

    by(ANNA, puts)
    assert are_open_to_the_group(shared)
    by(BERT, reads_and_puts)
    assert are_open_to_the_group(shared)
    by(ANNA, removes)
    assert not list(shared.glob("*.data"))


def test_a_whole_file_is_made_again_after_a_member_was_killed_at_it(shared: Path) -> None:
    def fill(new: NewFile) -> tuple[str, int]:
        new.write(b"content")
        return "x", 7

    def dies(new: NewFile) -> tuple[str, int]:
        new.write(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
        return "x", 4

    def finds() -> None:
        file = FileCache(shared, LIMIT).find(KEY, ["x"])
        assert file is not None
        assert os.read(file.fd, 100) == b"content"
        assert os.fstat(file.fd).st_mtime_ns == MADE_NS

    os.waitpid(become(ANNA, lambda: FileCache(shared, LIMIT).make(KEY, ["x"], dies)), 0)
    assert list(shared.glob("*.part"))
    by(BERT, lambda: FileCache(shared, LIMIT).make(KEY, ["x"], fill))
    by(ANNA, finds)
    assert are_open_to_the_group(shared)


def test_the_group_of_root_is_a_group_like_others(shared: Path) -> None:
    """Its number is 0."""
    os.chown(shared, 0, 0)
    shared.chmod(0o770)

    def puts() -> bool:
        os.setegid(ANNA)
        ObjectCache(shared, LIMIT).keep_pin(URL, pin_of(SIZE))
        return True

    assert answer_of_child(puts)
    assert {path.stat().st_gid for path in shared.iterdir()} == {0}


def test_strangers_get_nothing_and_a_group_that_nobody_named_is_not_believed(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_refused() -> None:
        with pytest.raises(PermissionError):
            ObjectCache(shared, LIMIT).open(URL, pin_of(SIZE))

    by(STRANGER, is_refused, group=STRANGER)
    monkeypatch.delenv("WDSFS_TRUST")
    with pytest.raises(Untrusted, match=f"the group {GROUP} can write"):
        ObjectCache(shared, LIMIT).open(URL, pin_of(SIZE))


def _reachable() -> str:
    """Return lines for a shell in a mount namespace of its own, after which others can run this interpreter.

    A fetcher is started by its path, and that may lie in the closed home of root.
    """
    needed = [Path(sys.base_prefix), Path(sys.prefix), Path(wdsfs.__file__).parents[1]]
    parents = reversed(needed[0].parents)
    closed = next((directory for directory in parents if not directory.stat().st_mode & stat.S_IXOTH), None)
    if closed is None:
        return ""
    lines = [f"mount --rbind '{closed}' /mnt", f"mount -t tmpfs -o mode=755 none '{closed}'"]
    for place in needed:
        if place.is_relative_to(closed):
            lines += [f"mkdir -p '{place}'", f"mount --bind '/mnt/{place.relative_to(closed)}' '{place}'"]
    return "\n".join([*lines, "umount -l /mnt", ""])


def start_by(member: Program, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a command as a member, whose umask closes files to others."""
    assert member.user is not None
    script = "set -e\n" + _reachable() + 'umask 077\nexec setpriv "$@"'
    user = ["--reuid", str(member.user.uid), "--regid", str(member.user.gid), "--clear-groups"]
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", *user]
    return subprocess.Popen(
        [*command, sys.executable, "-m", "wdsfs", *arguments],
        env=member.environment,
        cwd=member.home,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def run_by(member: Program, *arguments: str) -> bytes:
    """Run a command as a member to its end; return its output."""
    with start_by(member, *arguments) as process:
        try:
            output, problems = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert process.returncode == 0, problems
    return output


@contextlib.contextmanager
def two_members(shared: Path) -> Iterator[list[Program]]:
    with contextlib.ExitStack() as stack:
        members = [stack.enter_context(program_of(User(uid, GROUP))) for uid in (ANNA, BERT)]
        for member in members:
            member.environment |= {"WDSFS_CACHE_DIR": str(shared), "WDSFS_TRUST": f"@{GROUP}", "no_proxy": "*"}
        yield members


def test_commands_of_two_users_fetch_each_range_once(shared: Path) -> None:
    count = 20
    content = tars.tar(*(tars.member(b"%03d.jpg" % number, os.urandom(100_000)) for number in range(count)))
    # Where answers are slow a scan fetches headers alone: these few blocks come again with what lies around them.
    headers = count * 2 * BLOCK
    with WebServer().running() as web, two_members(shared) as members:
        web.put("/a.tar", content)
        url = f"{web.url}/a.tar"

        def reads(member: Program, sample: int) -> bytes:
            return run_by(member, "cat", url, f"a/{sample:03d}/jpg")

        run_by(members[1], "fetch", url)
        sent = web.sent
        assert sent <= len(content) + headers
        assert reads(members[0], 3) == reads(members[1], 3)
        run_by(members[0], "fetch", url)
        assert web.sent == sent
        assert "shared by the group" in run_by(members[0], "cache").decode()
    assert are_open_to_the_group(shared)


def test_a_command_that_is_killed_while_it_fetches_stops_no_other_user(shared: Path) -> None:
    content = os.urandom(100_000)
    with WebServer().running() as web, two_members(shared) as (anna, bert):
        web.put("/a.tar", tars.tar(tars.member(b"0.jpg", content)))
        web.hold.clear()
        with start_by(anna, "fetch", f"{web.url}/a.tar") as killed:
            wait_until(lambda: any(web.gets("/a.tar")), "a request under way")
            os.killpg(killed.pid, signal.SIGKILL)
        assert list(shared.glob("*.table")), "what is claimed in"
        web.hold.set()
        assert run_by(bert, "cat", f"{web.url}/a.tar", "a/0/jpg") == content
