"""The mounts of this machine: tables as text, and the real one."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.processes import Process, finished
from wdsfs import mount_table, mount_users

TABLE = rb"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:3 / / rw,relatime shared:1 master:2 - ext4 /dev/vda rw,discard
40 27 0:40 / /home rw,nosuid - nfs4 server:/export/home rw,vers=4.2
41 40 0:41 / /home/ann/with\040space\011and\134 ro,nodev - fuse.wdsfs /d/t-{0..9}.tar::/e\040x.tar ro,uid=7
42 40 0:42 / /home/ann ro - autofs  rw
43 40 0:43 / /home/ann rw - tmpfs none rw
44 27 0:44 / /homework rw - fuse.sshfs ann@far: rw
"""


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[mount_table.MountPoint]:
    (tmp_path / "mountinfo").write_bytes(TABLE)
    monkeypatch.setattr(mount_table, "MOUNTINFO", tmp_path / "mountinfo")
    return mount_table.parse_mountinfo(TABLE)


# -- mounts ------------------------------------------------------------------------------------------------


def test_lines_of_mountinfo(table: list[mount_table.MountPoint]) -> None:
    assert table[3] == mount_table.MountPoint(
        path=b"/home/ann/with space\tand\\",
        fstype="fuse.wdsfs",
        source=b"/d/t-{0..9}.tar::/e x.tar",
        options=("ro", "nodev"),
        super_options=("ro", "uid=7"),
        device=os.makedev(0, 41),
    )
    # Fields that may be there, or empty.
    assert (table[1].path, table[1].device) == (b"/", os.makedev(254, 3))
    assert (table[4].fstype, table[4].source) == ("autofs", b"")
    assert [mount_table.types_of(one.device) for one in table] == [{one.fstype} for one in table]
    assert mount_table.types_of(os.makedev(0, 999)) == set()


@given(st.binary(max_size=40).filter(lambda name: b"\0" not in name))
def test_any_name_survives_the_kernels_escapes(name: bytes) -> None:
    escaped = b"".join(b"\\%03o" % byte if byte in b" \t\n\\#" else bytes([byte]) for byte in name)
    [mount] = mount_table.parse_mountinfo(b"1 1 0:1 / /%s rw - t %s rw\n" % (escaped, escaped))
    assert (mount.path, mount.source) == (b"/" + name, name)


@pytest.mark.parametrize(
    ("path", "fstype"),
    [
        ("/", "ext4"),
        ("/nothing/here/yet", "ext4"),
        ("/home", "nfs4"),
        ("/home/bob/.cache", "nfs4"),
        ("/homework/x", "fuse.sshfs"),
        ("/home2", "ext4"),
        ("/home/ann/x", "tmpfs"),  # the newest of two at one place
        (b"/home/ann/with space\tand\\/train-0", "fuse.wdsfs"),
        (Path("/proc/self-not-there"), "proc"),
    ],
)
def test_the_longest_mount_point_holds_a_path(
    table: list[mount_table.MountPoint], path: str | bytes | Path, fstype: str
) -> None:
    assert mount_table.filesystem_type(path) == fstype


def test_what_is_mounted_at_a_path(tmp_path: Path, table: list[mount_table.MountPoint]) -> None:
    """Also behind links on the way."""
    (tmp_path / "link").symlink_to("/home")
    for path in ("/home/ann", "/home/./ann/", tmp_path / "link/ann"):
        assert mount_table.mounted_at(path) == table[5]
    assert mount_table.mounted_at("/") == table[1]
    assert mount_table.mounted_at("/home/bob") is None
    assert mount_table.filesystem_type(tmp_path / "link/below") == "nfs4"


def test_files_that_another_machine_can_write(tmp_path: Path, table: list[mount_table.MountPoint]) -> None:
    """By the place of the file itself: a link to it may be on a local disk."""
    link = tmp_path / "s1.tar"
    link.symlink_to("/homework/s.tar")
    assert mount_table.on_network([b"/d/s0.tar", b"/home/ann/s.tar"]) is None
    assert mount_table.on_network([b"/d/s0.tar", b"/home/s.tar", b"/homework/s.tar"]) == (b"/home/s.tar", "nfs4")
    assert mount_table.on_network([b"/d/s0.tar", os.fsencode(link)]) == (os.fsencode(link), "fuse.sshfs")


@contextlib.contextmanager
def _mount(*arguments: str | Path) -> Iterator[Path]:
    """Have mount(8) mount with these arguments, of which the last is the mount point."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    finished("mount", *arguments)
    try:
        yield Path(arguments[-1])
    finally:
        finished("umount", arguments[-1])


def test_a_file_that_is_mounted_over_a_local_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mount_table, "NETWORK_TYPES", {"ramfs"})
    local, over, place = tmp_path / "local.tar", tmp_path / "over.tar", tmp_path / "place"
    local.touch(), over.touch(), place.mkdir()
    with _mount("-t", "ramfs", "ramfs", place):
        (place / "s.tar").touch()
        assert mount_table.on_network(map(os.fsencode, (local, over))) is None
        with _mount("--bind", place / "s.tar", over):
            assert mount_table.on_network(map(os.fsencode, (local, over))) == (os.fsencode(over), "ramfs")
            found = mount_table.mounted_at(over)
            assert found is not None
            assert mount_table.mounts_of(over.stat().st_dev)[1:] == [found]


def test_a_mount_point_of_any_name(tmp_path: Path) -> None:
    place = tmp_path / "a b\tc\nd\\e\rf"
    place.mkdir()
    with _mount("-t", "ramfs", "ramfs", place):
        found = mount_table.mounted_at(place)
        assert found is not None
        assert found.path == os.fsencode(place)
        assert mount_table.mounts_of(place.stat().st_dev) == [found]


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mount_table.filesystem_type("/proc/self") == "proc"
    root = mount_table.mount_of("/")
    assert root is not None
    assert root.device == os.stat("/").st_dev
    monkeypatch.setattr(mount_table, "MOUNTINFO", "/nothing/here")  # without /proc nothing is known
    assert (mount_table.filesystem_type("/"), mount_table.types_of(0)) == ("", set())


def test_network_and_local_types() -> None:
    network = ["nfs", "nfs4", "lustre", "beegfs", "gpfs", "9p", "fuse.sshfs", "fuse.juicefs"]
    local = ["ext4", "xfs", "tmpfs", "overlay", "fuseblk", "fuse.mergerfs", "fuse", ""]
    assert [*filter(mount_table.is_network, network + local)] == network


# -- holders -----------------------------------------------------------------------------------------------


def test_a_process_with_a_mount_table_of_its_own_holds_what_it_sees() -> None:
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    command = ["unshare", "--mount", "--propagation", "private", *as_root, "sh", "-c", "echo there; read line"]
    with Process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline() != b"there\n":
            pytest.skip("this machine does not let a test have a mount table of its own")
        holding = mount_users.holders(os.stat("/").st_dev)
        elsewhere = mount_users.holders(os.makedev(0, 0))
        process.stdin.close()
    assert process.pid in holding
    assert os.getpid() not in holding
    assert elsewhere == []
    assert process.pid not in mount_users.holders(os.stat("/").st_dev)
