"""Facts about the machine: mount tables as text, directories with the wrong owner, the machine itself."""

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wdsfs import host
from wdsfs.errors import IndexUnusable, MountError

TABLE = rb"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:3 / / rw,relatime shared:1 master:2 - ext4 /dev/vda rw,discard
40 27 0:40 / /home rw,nosuid - nfs4 server:/export/home rw,vers=4.2
41 40 0:41 / /home/ann/with\040space\011and\134 ro,nodev - fuse.wdsfs /d/t-{0..9}.tar::/e\040x.tar ro,uid=7
42 40 0:42 / /home/ann ro - autofs  rw
43 40 0:43 / /home/ann rw - tmpfs none rw
44 27 0:44 / /homework rw - fuse.sshfs ann@far: rw
"""


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> list[host.MountPoint]:
    parsed = host.parse_mountinfo(TABLE)
    monkeypatch.setattr(host, "mounts", lambda: parsed)
    return parsed


# -- mounts ------------------------------------------------------------------------------------------------


def test_a_line_of_mountinfo() -> None:
    assert host.parse_mountinfo(TABLE)[3] == host.MountPoint(
        path=b"/home/ann/with space\tand\\",
        fstype="fuse.wdsfs",
        source=b"/d/t-{0..9}.tar::/e x.tar",
        options=("ro", "nodev"),
        super_options=("ro", "uid=7"),
        device=os.makedev(0, 41),
    )


def test_fields_that_may_be_there_or_empty() -> None:
    root, autofs = host.parse_mountinfo(TABLE)[1], host.parse_mountinfo(TABLE)[4]
    assert (root.path, root.device) == (b"/", os.makedev(254, 3))
    assert (autofs.fstype, autofs.source) == ("autofs", b"")


@given(st.binary(max_size=40).filter(lambda name: b"\0" not in name))
def test_any_name_survives_the_kernels_escapes(name: bytes) -> None:
    escaped = b"".join(b"\\%03o" % byte if byte in b" \t\n\\#" else bytes([byte]) for byte in name)
    [mount] = host.parse_mountinfo(b"1 1 0:1 / /%s rw - t %s rw\n" % (escaped, escaped))
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
    table: list[host.MountPoint], path: str | bytes | Path, fstype: str
) -> None:
    assert host.filesystem_type(path) == fstype


def test_a_path_is_looked_up_behind_its_links(tmp_path: Path, table: list[host.MountPoint]) -> None:
    (tmp_path / "link").symlink_to("/homework")
    assert host.filesystem_type(tmp_path / "link" / "below") == "fuse.sshfs"


def test_what_is_mounted_at_a_path(tmp_path: Path, table: list[host.MountPoint]) -> None:
    assert host.mounted_at("/home/ann") == table[5]
    assert host.mounted_at("/home/./ann/") == table[5]
    assert host.mounted_at("/") == table[1]
    assert host.mounted_at("/home/bob") is None
    (tmp_path / "link").symlink_to("/home")
    assert host.mounted_at(tmp_path / "link/ann") == table[5]


def test_without_proc_the_type_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "MOUNTINFO", "/nothing/here")
    assert host.filesystem_type("/") == ""


def test_this_machine() -> None:
    assert host.filesystem_type("/proc/self") == "proc"
    root = host.mount_of("/")
    assert root is not None
    assert root.device == os.stat("/").st_dev


@pytest.mark.parametrize("fstype", ["nfs", "nfs4", "lustre", "beegfs", "gpfs", "9p", "fuse.sshfs", "fuse.juicefs"])
def test_network_types(fstype: str) -> None:
    assert host.is_network(fstype)


@pytest.mark.parametrize("fstype", ["ext4", "xfs", "tmpfs", "overlay", "fuseblk", "fuse.mergerfs", "fuse", ""])
def test_local_types(fstype: str) -> None:
    assert not host.is_network(fstype)


# -- directories -------------------------------------------------------------------------------------------


def test_directories_follow_the_xdg_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    monkeypatch.setenv("XDG_STATE_HOME", "/s")
    assert (host.cache_dir(), host.state_dir()) == (Path("/c/wdsfs"), Path("/s/wdsfs"))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert (host.cache_dir(), host.state_dir()) == (
        Path("/h/.cache/wdsfs"),
        Path("/h/.local/state/wdsfs"),
    )


def test_without_home_the_user_database_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """At boot, systemd and mount(8) set no HOME."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert host.cache_dir().is_absolute()


def test_a_private_directory_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "p"
    for _ in range(2):
        assert host.private_directory(path, MountError) == path
        assert path.stat().st_mode & 0o777 == 0o700
    path.chmod(0o755)
    host.private_directory(path, MountError)
    assert path.stat().st_mode & 0o777 == 0o700


def test_a_private_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(MountError, match=r"p belongs to another user \(uid \d+\)"):
        host.private_directory(tmp_path / "p", MountError)


def test_a_link_or_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "file").touch()
    for name in ("link", "file", "missing/p"):
        with pytest.raises(IndexUnusable, match=f"cannot use the directory .*/{name}: "):
            host.private_directory(tmp_path / name, IndexUnusable)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Stands in for private_directory: what it was asked for."""
    asked: list[Path] = []

    def private_directory(path: Path, error: type[Exception], create: bool = True) -> Path:
        asked.append(path)
        return path

    monkeypatch.setattr(host, "private_directory", private_directory)
    return asked


def test_root_always_uses_run(made: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert host.runtime_dir() == Path("/run/wdsfs")


def test_a_user_has_the_directory_of_the_session(
    made: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    user = os.getuid() or 54321
    os.chown(tmp_path, user, -1)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert host.runtime_dir() == tmp_path / "wdsfs"


@pytest.mark.parametrize("session", ["", "relative", "/", "/nothing/here"])
def test_without_a_session_of_ones_own_it_is_in_tmp(
    made: list[Path], monkeypatch: pytest.MonkeyPatch, session: str
) -> None:
    """ "/" stands for a directory of another user, as after `su`."""
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    monkeypatch.setenv("XDG_RUNTIME_DIR", session)
    assert host.runtime_dir() == Path("/tmp/wdsfs-54321")


def test_the_node_local_directory(made: list[Path]) -> None:
    assert host.node_local_dir() == Path(f"/var/tmp/wdsfs-{os.geteuid()}")


# -- the kernel --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "version"),
    [
        ("6.18.44-fc-v669", (6, 18, 44)),
        ("6.9.0-rc1", (6, 9, 0)),
        ("5.15.167.4-microsoft-standard-WSL2", (5, 15, 167, 4)),
        ("6.1", (6, 1)),
        ("odd", ()),
    ],
)
def test_the_kernels_version(release: str, version: tuple[int, ...]) -> None:
    assert host.kernel_version(release) == version


def test_this_kernels_version() -> None:
    release = subprocess.run(["uname", "-r"], capture_output=True, text=True, check=True).stdout
    assert release.startswith(".".join(map(str, host.kernel_version())))
