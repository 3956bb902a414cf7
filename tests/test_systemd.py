"""The unit files: systemd understands them, and nothing in them hides the mount from the rest of the machine."""

import configparser
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import sets
from tests.conftest import Program, need_fuse
from tests.kernel.mounts import end_mount, need_erofs
from tests.processes import Process, finished, wait_until
from tests.servers import need_server
from tests.service_manager import service_manager
from wdsfs.errors import NoMatch, Unreachable, UsageError

UNITS = Path(__file__).parent.parent / "systemd"
USER, SYSTEM = UNITS / "wdsfs@.service", UNITS / "wdsfs-system@.service"
PROGRAM = re.compile(r"(?:/usr/bin/env |/usr/local/bin/)wdsfs")

# Each of these gives a service a mount namespace of its own (systemd.exec(5)).
NAMESPACED = """
    BindPaths BindReadOnlyPaths DynamicUser ExecPaths ExtensionDirectories ExtensionImages InaccessiblePaths
    LogNamespace MountAPIVFS MountFlags MountImages NoExecPaths PrivateDevices PrivateIPC PrivateMounts
    PrivateTmp ProcSubset ProtectControlGroups ProtectHome ProtectKernelLogs ProtectKernelModules
    ProtectKernelTunables ProtectProc ProtectSystem ReadOnlyPaths ReadWritePaths RootDirectory RootImage
    TemporaryFileSystem
"""
# Each of these sets no_new_privs where the service manager is a user's, or takes the host's privileges away.
UNPRIVILEGED = """
    LockPersonality MemoryDenyWriteExecute NoNewPrivileges PrivateNetwork PrivateUsers ProtectClock
    ProtectHostname RestrictAddressFamilies RestrictFileSystems RestrictNamespaces RestrictRealtime
    RestrictSUIDSGID SystemCallArchitectures SystemCallFilter SystemCallLog
"""


def read(unit: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None, delimiters="=", comment_prefixes="#")
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(unit)
    return parser


def verify(tmp_path: Path, *units: Path, user: bool = False) -> str:
    """Return the output of systemd-analyze for copies of the units whose program exists on this machine."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    copies = []
    for unit in units:
        # A template is verified as an instance.
        copy = tmp_path / unit.name.replace("@.", "@train.")
        copy.write_text(PROGRAM.sub("/bin/true", unit.read_text()))
        copies.append(str(copy))
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700, exist_ok=True)
    # A user's manager needs a runtime directory, and its own configuration is not ours to judge.
    places = {**os.environ, "XDG_RUNTIME_DIR": str(runtime), "XDG_CONFIG_HOME": str(tmp_path), "LC_ALL": "C"}
    words = [*(["--user"] if user else []), "verify", "--man=no", *copies]
    done = finished("systemd-analyze", *words, env=places, code=None)
    said = [line for line in (done.stdout + done.stderr).splitlines() if str(tmp_path) in line or "train" in line]
    return "\n".join(said) + (f"\nexit status {done.returncode}" if done.returncode else "")


@pytest.mark.parametrize("unit", ["wdsfs-system@.service", "mnt-train.mount", "mnt-train.automount"])
def test_systemd_understands_the_units_of_the_system(tmp_path: Path, unit: str) -> None:
    companions = [UNITS / "mnt-train.mount"] if unit == "mnt-train.automount" else []
    assert verify(tmp_path, UNITS / unit, *companions) == ""


def test_systemd_understands_the_unit_of_a_user(tmp_path: Path) -> None:
    """And a mistake would be noticed."""
    assert verify(tmp_path, USER, user=True) == ""
    broken = tmp_path / "broken" / SYSTEM.name
    broken.parent.mkdir()
    broken.write_text(SYSTEM.read_text().replace("RestrictRealtime=", "RestrictRealTime="))
    assert "RestrictRealTime" in verify(tmp_path, broken)
    known = {USER.name, SYSTEM.name, "mnt-train.mount", "mnt-train.automount"}
    assert {unit.name for unit in UNITS.iterdir()} == known, "each is checked here"


def test_the_guard_may_end_the_mount_in_containers(program: Program) -> None:
    """With the capabilities of the unit: else a writer would wait for it in vain, and then readers get a mix."""
    need_erofs()
    for program_of_the_system in ("setpriv", "unshare"):
        need_server(shutil.which(program_of_the_system), program_of_the_system)
    shard = program.write("s0.tar", sets.content(0))
    kept = read(SYSTEM)["Service"]["CapabilityBoundingSet"].lower().replace("cap_", "+").replace(" ", ",")
    mount: list[Any] = program.command("mount", "--engine", "kernel", shard, program.mountpoint)
    try:
        finished("setpriv", "--inh-caps=-all", f"--bounding-set=-all,{kept}", *mount, env=program.environment)
        with Process(["unshare", "--mount", "sleep", "infinity"]) as container:
            try:
                table = Path(f"/proc/{container.pid}/ns/mnt")
                wait_until(lambda: table.readlink() != Path("/proc/self/ns/mnt").readlink(), "its namespace")
                seen = Path(f"/proc/{container.pid}/mountinfo")
                assert str(program.mountpoint) in seen.read_text()
                shard.open("r+b").close()
                assert str(program.mountpoint) not in seen.read_text()
            finally:
                container.kill()
    finally:
        end_mount(program.mountpoint)


@pytest.mark.parametrize("unit", [USER, SYSTEM], ids=lambda unit: unit.name)
def test_the_service_is_ready_when_the_mount_is(unit: Path) -> None:
    """The mount is visible outside. A store that is away for hours is tried again, and a mistake is not."""
    service = read(unit)["Service"]
    assert service["Type"] == "notify"
    assert " mount --foreground $OPTIONS -- $SHARDS ${MOUNTPOINT}" in service["ExecStart"]
    assert PROGRAM.sub("wdsfs", service["ExecStop"]) == "-wdsfs umount ${MOUNTPOINT}"
    assert set(service) & {*NAMESPACED.split(), *(UNPRIVILEGED.split() if unit == USER else ())} == set()
    assert (service["Restart"], service["RestartSec"]) == ("on-failure", "30")
    assert read(unit)["Unit"]["StartLimitIntervalSec"] == "0"
    assert int(service["RestartPreventExitStatus"]) == UsageError.exit_code
    assert UsageError.exit_code not in (NoMatch.exit_code, Unreachable.exit_code)


def test_the_debian_package_has_both_services_with_the_path_of_its_program() -> None:
    """As `packaging/debian/rules` rewrites them."""
    rules = (UNITS.parent / "packaging/debian/rules").read_text()
    [command] = re.findall(r"^\t(sed .*) debian/wdsfs/usr/lib/systemd/\*/wdsfs\*@\.service$", rules, re.MULTILINE)
    for unit, place in ((USER, "user"), (SYSTEM, "system")):
        assert f"systemd/{unit.name} debian/wdsfs/usr/lib/systemd/{place}/{unit.name}\n" in rules
        edit = [word for word in shlex.split(command) if word != "-i"]
        packaged = finished(*edit, unit).stdout
        assert packaged.count("/usr/bin/wdsfs") == packaged.count("/bin/wdsfs") == 3 * (unit == SYSTEM)
        assert "Copy this file" not in packaged


def test_both_services_differ_only_where_they_have_to() -> None:
    user, system = read(USER)["Service"], read(SYSTEM)["Service"]
    for key in user:
        if key != "Environment":  # given twice for the system, which configparser does not show
            assert PROGRAM.sub("wdsfs", user[key]) == PROGRAM.sub("wdsfs", system[key]), key


@pytest.mark.parametrize("unit", [USER, SYSTEM], ids=lambda unit: unit.name)
@pytest.mark.parametrize("alive", [True, False])
def test_only_a_dead_mount_point_is_cleared(tmp_path: Path, unit: Path, alive: bool) -> None:
    """The command before the start; a path that does not exist fails as a dead one does."""
    program, place, told = tmp_path / "wdsfs", tmp_path / "a mount", tmp_path / "told"
    program.write_text(f'#!/bin/sh\necho "$*" > {told}\n')
    program.chmod(0o755)
    if alive:
        place.mkdir()
    line = read(unit)["Service"]["ExecStartPre"]
    script, arguments = re.fullmatch(r"-/bin/sh -c '(.*)' (.*)", line).groups()  # type: ignore[union-attr]
    assert PROGRAM.sub("wdsfs", arguments) == "${MOUNTPOINT} wdsfs"
    finished("/bin/sh", "-c", script.replace("$$", "$"), place, program)
    assert told.exists() != alive
    if not alive:
        assert told.read_text() == f"umount {place}\n"


BOOT = (UNITS.parent / "docs" / "how-to" / "boot.md").read_text()
FILES = dict(re.findall(r"^sudo tee (\S+) <<'END'\n(.*?)^END$", BOOT, re.MULTILINE | re.DOTALL))


def test_the_file_for_secrets_is_closed_before_it_is_filled() -> None:
    recipe = BOOT.partition("### A set in S3, for all users")[2].partition("\n### ")[0]
    assert recipe.index("install -m 600 /dev/null /etc/wdsfs/train.conf") < recipe.index("AWS_SECRET_ACCESS_KEY")


DROP_INS = [*re.findall(r"^```ini\n(.*?)^```$", BOOT, re.MULTILINE | re.DOTALL), *map(str, FILES.values())]


@pytest.mark.parametrize("text", [text for text in DROP_INS if text.startswith("[")])
def test_systemd_understands_the_drop_ins_of_the_page(tmp_path: Path, text: str) -> None:
    copy = tmp_path / "changed" / SYSTEM.name
    copy.parent.mkdir()
    copy.write_text(SYSTEM.read_text() + "\n" + text)
    assert verify(tmp_path, copy) == ""
    assert not {line.partition("=")[0] for line in text.splitlines()} & {*NAMESPACED.split()}


@pytest.mark.root
@pytest.mark.parametrize("own", [True, False], ids=["for one user", "for the machine"])
def test_the_unit_of_a_user_finds_the_program(tmp_path: Path, own: bool) -> None:
    need_fuse()
    shard, units = tmp_path / "train-0.tar", tmp_path / "units"
    shard.write_bytes(sets.content(0))
    units.mkdir()
    (units / USER.name).write_text(USER.read_text().replace("%h", str(tmp_path)))
    (units / "train.conf").write_text(f"SHARDS={shard}\nMOUNTPOINT=/mnt/train\n")
    if own:
        (tmp_path / ".local" / "bin").mkdir(parents=True)
        (tmp_path / ".local" / "bin" / "wdsfs").symlink_to(Path(sys.executable).with_name("wdsfs"))
    with service_manager(tmp_path, units) as manager:
        if own:
            manager.run("rm", "/usr/local/bin/wdsfs")
        manager.run("mkdir", "/mnt/train")
        manager.run("systemctl", "start", "wdsfs@train")
        assert manager.run("ls", "/mnt/train") == "train-0\n"
        manager.run("systemctl", "stop", "wdsfs@train")
        assert manager.run("ls", "/mnt/train") == ""


@pytest.mark.root
@pytest.mark.parametrize("unit", ["mnt-train", "mnt-val", "mnt-kernel"])
def test_an_automount_mounts_at_the_first_access(tmp_path: Path, unit: str) -> None:
    """By the units of the page, and by lines of /etc/fstab.

    Until a mount is announced, autofs holds up each process outside of the process group of its helper.
    """
    need_fuse()
    if unit == "mnt-kernel":
        need_erofs()
    shard = tmp_path / "train-0.tar"
    shard.write_bytes(sets.content(0))
    units, place = tmp_path / "units", unit.replace("mnt-", "/mnt/")
    units.mkdir()
    for name in ("mnt-train.mount", "mnt-train.automount"):
        text = (UNITS / name).read_text().replace("/data/train-{000000..000099}.tar", str(shard))
        (units / name).write_text(text.replace("RequiresMountsFor=/data\n", ""))
    lines = [("/mnt/val", "allow_other"), ("/mnt/kernel", "engine=kernel")]
    fstab = [f"{shard} {line} wdsfs ro,{option},x-systemd.automount 0 0\n" for line, option in lines]
    (units / "fstab").write_text("".join(fstab))
    with service_manager(tmp_path, units) as manager:
        manager.run("systemctl", "start", f"{unit}.automount")
        for _ in range(2):
            assert manager.run("ls", place) == "train-0\n"
            assert manager.run("systemctl", "is-active", f"{unit}.mount") == "active\n"
            manager.run("systemctl", "stop", f"{unit}.mount")
