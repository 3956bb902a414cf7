"""The checks of `wdsfs doctor`, each shown a healthy and a sick place."""

import contextlib
import errno
import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import tars
from tests.conftest import Program, User, device_for_everyone, program_of
from tests.ground.test_mount_registry import a_registration
from wdsfs import host, mount_registry, mount_table
from wdsfs.host import MachineFinding
from wdsfs.mount import doctor


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> int:
    """An ordinary user, also when the tests run as root."""
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    return 4242


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """In no container, whatever the tests run in."""
    monkeypatch.setattr(doctor, "container", lambda: "")


def assert_remedy(finding: MachineFinding, level: str, detail: str, remedy: str) -> None:
    assert finding.level == level
    assert detail in finding.detail
    assert remedy in finding.remedy


# -- all together ------------------------------------------------------------------------------------------


def test_a_diagnosis_has_every_check_once(tmp_path: Path) -> None:
    findings = doctor.diagnose(str(tmp_path), str(tmp_path))
    names = [finding.name for finding in findings]
    assert names == [
        "/dev/fuse", "privileges", "fusermount3", "libfuse", "kernel", "allow_other", "open files",
        "index directory", "runtime directory", "log directory", f"mount point {tmp_path}",
    ]  # fmt: skip
    assert len(doctor.diagnose()) == len(findings) - 1


def test_whatever_is_not_ok_has_a_remedy(tmp_path: Path) -> None:
    for finding in doctor.diagnose(str(tmp_path / "missing"), str(tmp_path / "missing")):
        assert finding.detail
        assert finding.level == "ok" or finding.remedy, finding


def test_a_diagnosis_leaves_nothing_behind(tmp_path: Path) -> None:
    doctor.diagnose(str(tmp_path / "mnt"), str(tmp_path / "index"))
    assert list(tmp_path.iterdir()) == []


def test_the_index_directory_is_the_one_a_mount_would_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(doctor, "check_index_directory", asked.append)
    monkeypatch.setenv("WDSFS_INDEX_DIR", "/from-environment")
    doctor.diagnose(index_dir="/option")
    doctor.diagnose()
    monkeypatch.delenv("WDSFS_INDEX_DIR")
    doctor.diagnose()
    assert asked == [Path("/option"), Path("/from-environment"), host.cache_dir()]


# -- FUSE --------------------------------------------------------------------------------------------------


def test_a_device_that_opens() -> None:
    assert doctor.check_device("/dev/null").level == "ok"


def test_a_missing_device(bare: None) -> None:
    assert_remedy(doctor.check_device("/dev/no-fuse"), "fail", "No such file", "modprobe fuse")


def test_a_device_without_permission(bare: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    assert_remedy(doctor.check_device("/dev/fuse"), "fail", "Permission denied", "chmod 0666 /dev/fuse")


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("docker", "--device /dev/fuse --cap-add SYS_ADMIN"),
        ("podman", "podman run"),
        ("container", "docker run"),
    ],
)
def test_a_missing_device_in_a_container(monkeypatch: pytest.MonkeyPatch, kind: str, remedy: str) -> None:
    monkeypatch.setattr(doctor, "container", lambda: kind)
    assert_remedy(doctor.check_device("/dev/no-fuse"), "fail", "No such file", remedy)


def test_a_device_in_a_container_that_is_closed_to_this_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """The container has it, so nothing is missing where that was started."""

    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(doctor, "container", lambda: "docker")
    monkeypatch.setattr(os, "open", refuse)
    assert_remedy(doctor.check_device("/dev/fuse"), "fail", "Permission denied", "chmod 0666 /dev/fuse")


# -- what prevents a mount ---------------------------------------------------------------------------------


def test_a_mount_that_fails_says_what_doctor_finds(user_program: Program, user: int) -> None:
    program = user_program
    program.write("a.tar", tars.tar(tars.A))
    with device_for_everyone():
        if doctor.check_allow_other().level == "ok":  # on this machine it does not fail
            with program.mounted("-o", "allow_other", "a.tar"):
                return
        said = program.run("mount", "-o", "allow_other", "a.tar", program.mountpoint, code=5).stderr.decode()
    assert "allow_other: user_allow_other is not set in /etc/fuse.conf" in said
    assert "-> echo user_allow_other | sudo tee -a /etc/fuse.conf" in said


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([], ["/dev/fuse"]),
        (["ro", "allow_other"], ["/dev/fuse", "allow_other"]),
        (["allow_root"], ["/dev/fuse", "allow_other"]),
    ],
)
def test_what_prevents_a_mount(monkeypatch: pytest.MonkeyPatch, options: list[str], named: list[str]) -> None:
    findings = [
        MachineFinding("/dev/fuse", "fail", "is closed", "open it"),
        MachineFinding("kernel", "ok", "is there"),
        MachineFinding("open files", "warn", "few", "take more"),
        MachineFinding("allow_other", "warn", "is not set", "set it"),
    ]
    monkeypatch.setattr(doctor, "diagnose", lambda _: findings)
    assert [one.name for one in doctor.preventing("/mnt", options)] == named


def test_no_line_says_more_than_its_check(user: int, tmp_path: Path) -> None:
    """None says that a user can mount: beside it another one may say the opposite."""
    for finding in doctor.diagnose(str(tmp_path)):
        assert "can mount" not in finding.detail


def test_fusermount_of_the_system_is_there_without_a_path(user: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """libfuse starts it by its own path."""
    before = doctor.check_fusermount()
    monkeypatch.setenv("PATH", "/nonexistent")
    assert doctor.check_fusermount() == before


def status(tmp_path: Path, effective: str, bounding: str, no_new: int) -> str:
    path = tmp_path / "status"
    path.write_text(f"Name:\tx\nCapEff:\t{effective}\nCapBnd:\t{bounding}\nNoNewPrivs:\t{no_new}\n")
    return str(path)


ALL, NONE, DOCKER = "000001ffffffffff", "0000000000000000", "00000000a80425fb"


def test_root_needs_the_capability(root: None, tmp_path: Path) -> None:
    assert doctor.check_privileges(status(tmp_path, ALL, ALL, 1)).level == "ok"
    finding = doctor.check_privileges(status(tmp_path, DOCKER, DOCKER, 0))
    assert_remedy(finding, "fail", "CAP_SYS_ADMIN", "SYS_ADMIN")


def test_a_user_needs_it_within_reach(user: int, bare: None, tmp_path: Path) -> None:
    assert doctor.check_privileges(status(tmp_path, NONE, ALL, 0)).level == "ok"
    finding = doctor.check_privileges(status(tmp_path, NONE, DOCKER, 0))
    assert_remedy(finding, "fail", "out of reach", "--cap-add SYS_ADMIN")
    finding = doctor.check_privileges(status(tmp_path, NONE, ALL, 1))
    assert_remedy(finding, "fail", "no_new_privs", "NoNewPrivileges=")


def test_without_proc_privileges_are_unknown(tmp_path: Path) -> None:
    assert doctor.check_privileges(str(tmp_path / "nothing")).level == "warn"


def fake_fusermount(tmp_path: Path, mode: int = 0o4755) -> str:
    program = tmp_path / "fusermount3"
    program.write_text("#!/bin/sh\necho 'fusermount3 version: 3.14.0'\n")
    program.chmod(mode)
    return str(program)


def test_the_helper_has_to_be_setuid_for_users(tmp_path: Path, user: int) -> None:
    program = fake_fusermount(tmp_path, 0o755)
    assert_remedy(doctor.check_fusermount(program), "fail", "3.14.0, is not setuid root", "chmod u+s")


def test_the_helper_on_a_disk_without_setuid(user: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program, statvfs = host.program("fusermount3"), os.statvfs
    assert program is not None

    def nosuid(path: str) -> SimpleNamespace:
        return SimpleNamespace(f_flag=statvfs(path).f_flag | os.ST_NOSUID)

    monkeypatch.setattr(os, "statvfs", nosuid)
    assert_remedy(doctor.check_fusermount(program), "fail", "mounted nosuid", "sudo mount -o remount,suid /")


def test_root_does_without_the_helper(tmp_path: Path, root: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_fusermount(fake_fusermount(tmp_path, 0o755)).level == "ok"
    monkeypatch.setattr(host, "PROGRAMS", ())
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert_remedy(doctor.check_fusermount(), "ok", "root does not need it", "")


def test_a_user_without_the_helper(tmp_path: Path, user: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "PROGRAMS", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    assert_remedy(doctor.check_fusermount(), "fail", "not found", "apt install fuse3")


def test_the_version_of_the_helper(tmp_path: Path) -> None:
    assert doctor.fusermount_version(fake_fusermount(tmp_path, 0o755)) == (3, 14, 0)
    assert doctor.fusermount_version(str(tmp_path / "nothing")) == ()


def test_the_library_of_this_machine() -> None:
    finding = doctor.check_library()
    assert finding.level == "ok"
    assert finding.detail.startswith("3.")


def test_a_library_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyfuse3", None)
    assert_remedy(doctor.check_library(), "fail", "pyfuse3 cannot be loaded", "apt install libfuse3-3")


@pytest.mark.parametrize(
    ("conf", "level"),
    [
        ("user_allow_other\n", "ok"),
        ("# comment\n  user_allow_other  # yes\nmount_max = 1000\n", "ok"),
        ("#user_allow_other\n", "warn"),
        ("user_allow_other = 1\n", "warn"),
        ("", "warn"),
    ],
)
def test_allow_other_is_read_as_fusermount_reads_it(tmp_path: Path, user: int, conf: str, level: str) -> None:
    (tmp_path / "fuse.conf").write_text(conf)
    assert doctor.check_allow_other(str(tmp_path / "fuse.conf")).level == level


def test_allow_other_without_a_configuration(tmp_path: Path, user: int) -> None:
    assert_remedy(doctor.check_allow_other(str(tmp_path / "fuse.conf")), "warn", "not set", "tee -a")


def test_allow_other_for_root(tmp_path: Path, root: None) -> None:
    assert doctor.check_allow_other(str(tmp_path / "fuse.conf")).level == "ok"


# -- the machine -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "missing"), [((6, 9), 0), ((6, 1, 90), 1), ((4, 15), 2)])
def test_what_a_kernel_enables(version: tuple[int, ...], missing: int) -> None:
    finding = doctor.check_kernel(version)
    assert (finding.level, finding.detail.count("not yet")) == ("ok", missing)


def test_limits_of_open_files() -> None:
    assert doctor.check_open_files((1024, 1 << 20)).detail == "1,024 (can be raised to 1,048,576)"
    assert doctor.check_open_files((1024, resource.RLIM_INFINITY)).level == "ok"
    assert_remedy(doctor.check_open_files((1024, 1024)), "warn", "1,024", "limits.d")


def test_a_good_index_directory(tmp_path: Path) -> None:
    assert doctor.check_index_directory(tmp_path / "not" / "yet" / "there", free=1 << 40).level == "ok"


def test_bad_index_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert_remedy(
        doctor.check_index_directory(tmp_path / "file" / "x"), "warn", "is no directory", "WDSFS_INDEX_DIR"
    )
    assert_remedy(doctor.check_index_directory(tmp_path, free=1000), "warn", "1000 B free", "make room")
    monkeypatch.setattr(mount_table, "filesystem_type", lambda path: "lustre")
    assert_remedy(
        doctor.check_index_directory(tmp_path), "warn", "network file system (lustre)", "WDSFS_INDEX_DIR"
    )
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert_remedy(doctor.check_index_directory(tmp_path), "warn", "not writable", "--index-dir")


# -- mount points --------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path) -> Path:
    directory = tmp_path / "mount here"
    directory.mkdir()
    return directory


def test_an_empty_directory_will_do(place: Path, root: None) -> None:
    assert doctor.check_mountpoint(str(place)).level == "ok"


def test_a_missing_mount_point(place: Path) -> None:
    assert_remedy(doctor.check_mountpoint(f"{place}/x"), "fail", "no such directory", f"mkdir -p '{place}/x'")


def test_a_file_as_mount_point(place: Path) -> None:
    (place / "x").touch()
    assert_remedy(doctor.check_mountpoint(f"{place}/x"), "fail", "no directory", "choose")


def test_the_root_directory_is_no_mount_point(root: None) -> None:
    """To mount over all that is there is no remedy."""
    assert_remedy(doctor.check_mountpoint("/"), "fail", "is the root directory", "make a directory")


def test_a_mount_point_with_content(place: Path, root: None) -> None:
    (place / "x").touch()
    assert_remedy(doctor.check_mountpoint(str(place)), "fail", "is not empty", "-o nonempty")


@pytest.mark.parametrize(
    ("code", "detail", "remedy"),
    [
        (errno.ENOTCONN, "dead mount", "wdsfs umount '/a b'"),
        (errno.EACCES, "another user's", "findmnt"),
        (errno.EIO, "Input/output error", "ls -ld"),
    ],
)
def test_a_mount_point_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, code: int, detail: str, remedy: str
) -> None:
    def refuse(path: str) -> os.statvfs_result:
        raise OSError(code, os.strerror(code), path)

    monkeypatch.setattr(os, "statvfs", refuse)
    assert_remedy(doctor.check_mountpoint("/a b"), "fail", detail, remedy)


def test_a_place_that_is_mounted_already(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"1 1 0:1 / {str(place).replace(' ', chr(92) + '040')} ro - fuse.wdsfs x ro\n"
    (tmp_path / "mountinfo").write_text(line)
    monkeypatch.setattr(mount_table, "MOUNTINFO", tmp_path / "mountinfo")
    assert_remedy(
        doctor.check_mountpoint(str(place)), "ok", "by another user, in another session or by mount(8)", ""
    )
    monkeypatch.setattr(host, "runtime_dir", lambda: tmp_path)
    with mount_registry.registered(a_registration(str(place))):  # nobody listens at its socket
        assert_remedy(doctor.check_mountpoint(str(place)), "warn", "not answering", "wdsfs umount")


def test_a_healthy_mount(program: Program) -> None:
    """A healthy mount: neither command that checks it says to end it."""
    program.write("a.tar", tars.tar(tars.member(b"a.txt", b"a")))
    with program.mounted("a.tar") as mounted:
        *_, finding = program.json("doctor", mounted.path)
        assert finding["level"] == "ok"
        assert finding["detail"] == f"wdsfs is mounted here, running (process {mounted.pid})"
        said = program.refused("mount", "a.tar", mounted.path, code=5)
        assert f"wdsfs is mounted there already (process {mounted.pid})" in said


def test_the_same_is_wrong_for_both_commands(program: Program) -> None:
    """`mount` refuses what `doctor` warns of, in the same words."""
    program.write("a.tar", tars.tar(tars.member(b"a.txt", b"a")))
    program.write("full/x", b"")
    program.run("index", "a.tar")
    for place in ("full", "missing", "full/x"):
        *_, finding = program.json("doctor", place, code=5)
        said = program.refused("mount", "a.tar", place, code=5)
        assert finding["level"] == "fail"
        assert finding["detail"] in said


@contextlib.contextmanager
def runtime_directory_of_root() -> Iterator[tuple[Path, User]]:
    """/tmp/wdsfs-UID, made by root, of a user who has none; mkdir(2) keeps tests beside this one from the same."""
    for uid in range(60_001, 65_000):
        with contextlib.suppress(FileExistsError):
            (place := Path(f"/tmp/wdsfs-{uid}")).mkdir()
            break
    try:
        yield place, User(uid, uid)
    finally:
        place.rmdir()


@pytest.mark.root
def test_a_runtime_directory_of_another_user() -> None:
    """The one beside the logs is taken. If that cannot be, doctor says so, and what to do."""
    environment = {"XDG_RUNTIME_DIR": "/nowhere"}
    with runtime_directory_of_root() as (wrong, user), program_of(user) as program:
        spare = program.home / "state/wdsfs" / f"run-{os.uname().nodename}"
        findings = {one["name"]: one for one in program.json("doctor", code=None, env=environment)}
        assert (findings["runtime directory"]["level"], findings["runtime directory"]["detail"]) == (
            "ok",
            str(spare),
        )
        assert not spare.exists()
        environment["XDG_STATE_HOME"] = "/proc"
        findings = {one["name"]: one for one in program.json("doctor", code=5, env=environment)}
        finding = findings["runtime directory"]
        assert finding["level"] == "fail"
        assert f"{wrong} belongs to another user (uid 0): have it removed" in finding["detail"]
        assert "set XDG_RUNTIME_DIR" in finding["remedy"]
        assert "set XDG_RUNTIME_DIR" in program.refused("status", code=5, env=environment)


@pytest.mark.root
def test_all_processes_agree_on_the_spare_runtime_directory() -> None:
    """Also when the other user removes the directory that was in the way."""
    environment = {"XDG_RUNTIME_DIR": "/nowhere"}
    with runtime_directory_of_root() as (wrong, user), program_of(user) as program:
        spare = program.home / "state/wdsfs" / f"run-{os.uname().nodename}"
        assert program.json("status", env=environment) == []
        assert stat.S_IMODE(spare.stat().st_mode) == 0o700
        wrong.rmdir()
        try:
            assert program.json("status", env=environment) == []
            assert not wrong.exists()
        finally:
            wrong.mkdir()


def test_directories_that_others_can_write(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    os.chmod(tmp_path / "open", 0o777)
    for check, instead in (
        (doctor.check_index_directory, "/var/tmp"),
        (doctor.check_log_directory, "runtime directory"),
    ):
        for name in ("open", "open/new"):
            finding = check(tmp_path / name)
            assert_remedy(finding, "warn", f"others can write to {tmp_path}/open", "chmod go-w")
            assert instead in finding.detail
    assert list((tmp_path / "open").iterdir()) == []


def test_a_sticky_directory_of_another_user(place: Path, user: int) -> None:
    place.chmod(0o1777)
    assert_remedy(doctor.check_mountpoint(str(place)), "fail", "sticky", "mkdir")


def test_a_directory_that_is_not_writable(place: Path, user: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert_remedy(doctor.check_mountpoint(str(place)), "fail", "not writable", "chown")


@pytest.mark.parametrize(
    ("fstype", "version", "allowed"),
    [
        ("ext4", (3, 14, 0), True),
        ("fuse.sshfs", (3, 14, 0), True),
        ("lustre", (3, 2, 6), False),
        ("lustre", (3, 3, 0), True),
        ("wekafs", (3, 14, 0), False),
        ("wekafs", (3, 18, 0), True),
        ("beegfs", (3, 14, 0), False),
        ("beegfs", (3, 19, 0), True),  # not known yet
        ("proc", (3, 14, 0), False),
        ("proc", (3, 0, 0), True),  # there was no list yet
        ("proc", (), True),
        ("", (3, 14, 0), True),
    ],
)
def test_what_fusermount_lets_a_user_mount_over(fstype: str, version: tuple[int, ...], allowed: bool) -> None:
    assert doctor.mountable(fstype, version) == allowed


def test_a_refused_file_system(place: Path, user: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mount_table, "filesystem_type", lambda path: "lustre")
    finding = doctor.check_mountpoint(str(place), version=(3, 2, 6))
    assert_remedy(finding, "fail", "3.2.6 lets no user mount over lustre", "fuse3 3.3 or newer, or a mount point")
    monkeypatch.setattr(mount_table, "filesystem_type", lambda path: "beegfs")
    finding = doctor.check_mountpoint(str(place), version=(3, 14, 0))
    assert_remedy(finding, "fail", "over beegfs", "mktemp -d")


def test_apparmor_confines_fusermount(tmp_path: Path, user: int, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = tmp_path / "fusermount3"
    assert not doctor.confined("/srv/x", str(profile))
    profile.touch()
    monkeypatch.setenv("HOME", "/home/ann")
    assert doctor.confined("/srv/x", str(profile))
    assert doctor.confined("/mnt-not", str(profile))
    for allowed in ("/mnt/x", "/home/ann/x", "/tmp/x", f"/run/user/{user}/x"):
        assert not doctor.confined(allowed, str(profile))
    monkeypatch.setattr(doctor, "confined", lambda path: True)
    (tmp_path / "mnt").mkdir()
    finding = doctor.check_mountpoint(str(tmp_path / "mnt"))
    assert_remedy(finding, "warn", "AppArmor", "docs/deployment.md")


# -- containers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "environ", "kind"),
    [
        ([], {}, ""),
        ([".dockerenv"], {}, "docker"),
        (["run/.containerenv"], {"container": "podman"}, "podman"),
        ([".dockerenv"], {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        (["run/.containerenv"], {"APPTAINER_CONTAINER": "x.sif"}, "apptainer"),
        ([], {"container": "lxc"}, "container"),
        (["proc/1/cgroup"], {}, "docker"),
    ],
)
def test_kinds_of_containers(tmp_path: Path, files: list[str], environ: dict[str, str], kind: str) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("1:name=systemd:/docker/0123abcd\n")
    assert doctor.container(str(tmp_path), environ) == kind


def test_the_device_of_this_machine_is_what_mounts_need() -> None:
    """So that a machine on which the mount tests cannot run is noticed here first."""
    assert stat.S_ISCHR(os.stat("/dev/fuse").st_mode)
    assert doctor.check_device().level == "ok"
