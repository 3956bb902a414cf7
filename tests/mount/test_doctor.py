"""The checks of `wdsfs doctor`, each shown a healthy and a sick place."""

import contextlib
import errno
import os
import resource
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import tars
from tests.conftest import Program, User, device_for_everyone, program_of
from tests.ground.test_mount_registry import a_registration
from wdsfs import __version__, host, mount_registry, mount_table, trust
from wdsfs.host import MachineFinding
from wdsfs.mount import doctor
from wdsfs.tree.composition import Composition, columns_of, fields_of


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> int:
    """An ordinary user, also when the tests run as root."""
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    monkeypatch.setattr(trust, "user_name", lambda uid: "ann")
    return 4242


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)


def assert_remedy(finding: doctor.Verdict, level: str, detail: str, remedy: str) -> None:
    assert finding.level == level
    assert detail in finding.detail
    assert remedy in finding.remedy


# -- all together ------------------------------------------------------------------------------------------


def test_a_diagnosis_has_every_check_once_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """What is not ok has a remedy, and no line says that a user can mount: another one may say the opposite."""
    missing = str(tmp_path / "missing")
    findings = doctor.diagnose(missing)
    assert [finding.name for finding in findings] == [
        "/dev/fuse", "privileges", "fusermount3", "libfuse", "kernel", "allow_other", "open files",
        "index directory", "runtime directory", "log directory", f"mount point {missing}",
    ]  # fmt: skip
    assert all(finding.detail and (finding.level == "ok" or finding.remedy) for finding in findings)
    assert not any("can mount" in finding.detail for finding in findings)
    assert len(doctor.diagnose()) == len(findings) - 1
    assert list(tmp_path.iterdir()) == []


# -- FUSE --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inside", "code", "remedy"),
    [
        ("", errno.ENOENT, "modprobe fuse"),
        ("", errno.EACCES, "chmod 0666 /dev/fuse"),
        ("docker", errno.ENOENT, "--device /dev/fuse --cap-add SYS_ADMIN"),
        ("podman", errno.ENOENT, "podman run"),
        ("container", errno.ENOENT, "docker run"),
        ("docker", errno.EACCES, "chmod 0666 /dev/fuse"),  # it is there, so nothing is missing outside
    ],
)
def test_the_device(monkeypatch: pytest.MonkeyPatch, inside: str, code: int, remedy: str) -> None:
    assert doctor.check_device("/dev/null").level == "ok"

    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(doctor, "container", lambda: inside)
    monkeypatch.setattr(os, "open", refuse)
    assert_remedy(doctor.check_device("/dev/fuse"), "fail", os.strerror(code), remedy)


def test_a_mount_that_fails_says_what_doctor_finds(user_program: Program, user: int) -> None:
    program = user_program
    program.write("a.tar", tars.tar(tars.A))
    with device_for_everyone():
        if doctor.check_allow_other().level == "ok":  # on this machine it does not fail
            with program.mounted("-o", "allow_other", "a.tar"):
                return
        said = program.run("mount", "-o", "allow_other", "a.tar", program.mountpoint, code=5).stderr.decode()
    assert "-> echo user_allow_other | sudo tee -a /etc/fuse.conf" in said


def test_findings_that_prevent_a_mount_are_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = {"/dev/fuse": "fail", "kernel": "ok", "open files": "warn", "allow_other": "warn"}
    findings = [MachineFinding(name, level, "detail", "remedy") for name, level in levels.items()]  # type: ignore[arg-type]
    monkeypatch.setattr(doctor, "diagnose", lambda _: findings)
    for option, more in (("ro", []), ("allow_other", ["allow_other"]), ("allow_root", ["allow_other"])):
        assert [one.name for one in doctor.preventing("/mnt", [option])] == ["/dev/fuse", *more]


ALL, NONE, DOCKER = "000001ffffffffff", "0000000000000000", "00000000a80425fb"


@pytest.mark.parametrize(
    ("uid", "effective", "bounding", "no_new", "level", "detail", "remedy"),
    [
        (0, ALL, ALL, 1, "ok", "", ""),
        (0, DOCKER, DOCKER, 0, "fail", "CAP_SYS_ADMIN", "SYS_ADMIN"),
        (4242, NONE, ALL, 0, "ok", "", ""),
        (4242, NONE, DOCKER, 0, "fail", "out of reach", "--cap-add SYS_ADMIN"),
        (4242, NONE, ALL, 1, "fail", "no_new_privs", "NoNewPrivileges="),
    ],
)
def test_privileges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, effective: str, bounding: str, no_new: int,
    level: str, detail: str, remedy: str,
) -> None:  # fmt: skip
    """Root needs the capability, a user needs it within reach of fusermount3."""
    monkeypatch.setattr(doctor, "container", lambda: "")
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    path = tmp_path / "status"
    path.write_text(f"Name:\tx\nCapEff:\t{effective}\nCapBnd:\t{bounding}\nNoNewPrivs:\t{no_new}\n")
    assert_remedy(doctor.check_privileges(str(path)), level, detail, remedy)
    assert doctor.check_privileges(str(tmp_path / "nothing")).level == "warn"


def test_fusermount_is_found_setuid_and_usable(tmp_path: Path, user: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there, setuid root, not on a disk that takes that away, and mounts for users who have a name."""
    program = fake_fusermount(tmp_path)
    assert doctor.fusermount_version(program) == (3, 14, 0)
    assert doctor.fusermount_version(str(tmp_path / "nothing")) == ()
    assert_remedy(doctor.check_fusermount(program), "fail", "3.14.0, is not setuid root", "chmod u+s")
    before = doctor.check_fusermount()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert doctor.check_fusermount() == before  # as libfuse, which starts that of the system by its own path
    with monkeypatch.context() as patch:
        patch.setattr(trust, "user_name", str)
        assert_remedy(doctor.check_fusermount(), "fail", f"user number {user} has no name", "/etc/passwd")
    of_system, statvfs = host.program("fusermount3"), os.statvfs
    nosuid = SimpleNamespace(f_flag=statvfs("/").f_flag | os.ST_NOSUID)
    monkeypatch.setattr(os, "statvfs", lambda path: nosuid)
    assert_remedy(doctor.check_fusermount(of_system), "fail", "mounted nosuid", "sudo mount -o remount,suid /")
    monkeypatch.setattr(host, "PROGRAMS", ())
    assert_remedy(doctor.check_fusermount(), "fail", "not found", "apt install fuse3")
    monkeypatch.setattr(os, "geteuid", lambda: 0)  # root does without it
    assert doctor.check_fusermount(program).level == "ok"
    assert_remedy(doctor.check_fusermount(), "ok", "root does not need it", "")


def fake_fusermount(tmp_path: Path) -> str:
    """A helper that is not setuid."""
    program = tmp_path / "fusermount3"
    program.write_text("#!/bin/sh\necho 'fusermount3 version: 3.14.0'\n")
    program.chmod(0o755)
    return str(program)


def test_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = doctor.check_library()
    assert finding.level == "ok"
    assert finding.detail.startswith("3.")
    monkeypatch.setitem(sys.modules, "pyfuse3", None)
    assert_remedy(doctor.check_library(), "fail", "pyfuse3 cannot be loaded", "apt install fuse3")


@pytest.mark.parametrize(
    ("conf", "level"),
    [
        ("user_allow_other\n", "ok"),
        ("# comment\n  user_allow_other  # yes\nmount_max = 1000\n", "ok"),
        *((conf, "warn") for conf in ("#user_allow_other\n", "user_allow_other = 1\n", "", None)),
    ],
)
def test_allow_other_is_read_as_fusermount_reads_it(
    tmp_path: Path, user: int, conf: str | None, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "fuse.conf"
    if conf is not None:
        path.write_text(conf)
    finding = doctor.check_allow_other(str(path))
    assert (finding.level, "tee -a" in finding.remedy) == (level, level == "warn")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert doctor.check_allow_other(str(path)).level == "ok"


# -- the machine -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "missing"), [((6, 9), 0), ((6, 1, 90), 1), ((4, 15), 2)])
def test_the_kernel_check_names_missing_features(version: tuple[int, ...], missing: int) -> None:
    finding = doctor.check_kernel(version)
    assert (finding.level, finding.detail.count("not yet")) == ("ok", missing)


def test_limits_of_open_files() -> None:
    assert doctor.check_open_files((1024, 1 << 20)).detail == "1,024 (can be raised to 1,048,576)"
    assert doctor.check_open_files((1024, resource.RLIM_INFINITY)).level == "ok"
    assert_remedy(doctor.check_open_files((1024, 1024)), "warn", "1,024", "limits.d")


def test_index_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    check = doctor.check_index_directory
    assert check(tmp_path / "not" / "yet" / "there", free=1 << 40).level == "ok"
    assert_remedy(check(tmp_path / "file" / "x"), "warn", "is not a directory", "WDSFS_INDEX_DIR")
    assert_remedy(check(tmp_path, free=1000), "warn", "1000 B free", "make room")
    monkeypatch.setattr(mount_table, "filesystem_type", lambda path: "lustre")
    assert_remedy(check(tmp_path), "warn", "network file system (lustre)", "WDSFS_INDEX_DIR")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert_remedy(check(tmp_path), "warn", "not writable: each mount would", "--index-dir")
    assert_remedy(check(tmp_path / "new"), "warn", "not writable: the index goes to /var/tmp", "--index-dir")


# -- mount points --------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path) -> Path:
    directory = tmp_path / "mount here"
    directory.mkdir()
    return directory


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


def test_doctor_and_mount_give_the_same_reason(program: Program) -> None:
    """`mount` refuses what `doctor` warns of, in the same words; of a healthy mount neither says to end it."""
    program.write("a.tar", tars.tar(tars.member(b"a.txt", b"a")))
    program.write("full/x", b"")
    remedies = {"full": "-o nonempty", "is missing": "mkdir -p '", "full/x": "choose", "/": "make a directory"}
    for place, remedy in remedies.items():
        *_, finding = program.json("doctor", place, code=5)
        assert (finding["level"], remedy in finding["remedy"]) == ("fail", True)
        assert place == "/" or finding["detail"] in program.refused("mount", "a.tar", place, code=5)
    with program.mounted("a.tar") as mounted:
        *_, finding = program.json("doctor", mounted.path)
        assert (finding["level"], f"(process {mounted.pid})" in finding["detail"]) == ("ok", True)


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
    """The one beside the logs is taken, for good. If that cannot be, doctor says so, and what to do."""
    environment = {"XDG_RUNTIME_DIR": "/nowhere"}
    with runtime_directory_of_root() as (wrong, user), program_of(user) as program:

        def finding(code: int | None) -> dict[str, str]:
            found = program.json("doctor", code=code, env=environment)
            return next(one for one in found if one["name"] == "runtime directory")

        spare = program.home / "state/wdsfs" / f"run-{os.uname().nodename}"
        assert (finding(None)["level"], finding(None)["detail"]) == ("ok", str(spare))
        assert not spare.exists()
        assert program.json("status", env=environment) == []
        assert stat.S_IMODE(spare.stat().st_mode) == 0o700
        wrong.rmdir()
        try:
            assert program.json("status", env=environment) == []
            assert not wrong.exists(), "all processes agree, also when what was in the way is gone"
        finally:
            wrong.mkdir()
        environment["XDG_STATE_HOME"] = "/proc"
        assert finding(5)["level"] == "fail"
        assert f"{wrong} belongs to another user (uid 0): have it removed" in finding(5)["detail"]
        for said in (finding(5)["remedy"], program.refused("status", code=5, env=environment)):
            assert "set XDG_RUNTIME_DIR" in said


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


def test_a_directory_of_another_user(place: Path, user: int, monkeypatch: pytest.MonkeyPatch) -> None:
    place.chmod(0o1777)
    assert_remedy(doctor.check_mountpoint(str(place)), "fail", "sticky", "mkdir")
    place.chmod(0o755)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert_remedy(doctor.check_mountpoint(str(place)), "fail", "not writable", "chown")


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
    assert_remedy(finding, "warn", "AppArmor", "docs/how-to/boot.md")


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


# -- the report ----------------------------------------------------------------------------------------------


def test_a_report_has_versions_and_mounts_and_no_names(program: Program) -> None:
    """No path, shard, sample, URL, secret or user is in it."""
    program.write("secretset/sh-0.tar", tars.tar(tars.member(b"secretsample.txt", b"secretbytes")))
    options = ("--overlay", "secretoverlay", "--columns", "secretcolumn=txt")
    with program.mounted(*options[:2], "secretset") as mounted:
        (mounted.path / "sh-0/secretnew").mkdir()
        (mounted.path / "sh-0/secretnew/txt").write_bytes(b"x")
        text = program.run("doctor", "--report").stdout.decode()
        report = program.json("doctor", "--report")
    words = (str(program.home), "secret", "sh-0", "/tmp", "/root", "/home", str(mounted.path))
    for output in (text, str(report)):
        for word in words:
            assert word not in output, word
    assert report["wdsfs"] == __version__
    assert report["linux"].startswith(os.uname().release)
    # Root sees the mounts of other tests, too.
    own = {"engine": "fuse", "state": "running", "mode": "rw", "samples": 1, "overlay": True}
    assert any(own.items() <= mount.items() for mount in report["mounts"])
    assert ": engine fuse, state running, mode rw" in text
    assert "name nothing else" in program.refused("doctor", "--report", "/mnt", code=2)


def test_a_report_has_no_path_and_of_urls_their_schemes() -> None:
    mount = {
        "engine": "fuse",
        "specs": [
            "https://user:secret@host.example/secret/{0..9}.tar?token=secret",
            "S3://secret/x.tar",
            "pipe:/home/secret/fetch-secret x://secret",
        ],
        "composition": "--columns 'a=b' --keys '/secret/--secret list.txt' --join '--secret'",
        "notices": ["/secret/0.tar has changed"],
        "directory": "/",
        "overlay": None,
    }
    shown = doctor._shown_mount(mount)
    assert "secret" not in str(shown)
    assert "host.example" not in str(shown)
    assert (shown["stores"], shown["notices"]) == (["https", "pipe", "s3"], 1)
    assert shown["views"] == ["--columns", "--join", "--keys"]
    for error, said in (
        ("cannot be loaded: /home/alice/x.so", "fail"),
        ("no libfuse3.so", "fail: no libfuse3.so"),
    ):
        assert doctor._shown_finding(MachineFinding("libfuse", "fail", error)) == said


def test_a_report_names_the_options_of_a_view() -> None:
    several = {"columns": columns_of(["a"]), "fields": fields_of(["a=b:c"]), "join": ("a",), "associate": ("a",)}
    single = {"ignore_case": True, "missing": "skip", "duplicates": "first", "keys": "a"}
    classes = {"classes": True, "class_names": "a", "class_digits": 1}
    every = Composition(**several, **single, **classes)  # type: ignore[arg-type]
    names = {word for word in every.text.split() if word.startswith("--")}
    assert doctor._shown_mount({"composition": every.text})["views"] == sorted(names)
    assert names == {*doctor._OF_VIEW.split()}
