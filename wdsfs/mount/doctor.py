"""Checks that this machine can mount by FUSE, or reach a store. Each finding has the command that helps.

A check changes nothing. The path that it looks at is a parameter, so that tests can name another path. The room
`kernel` has the checks of the kernel engine.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import re
import resource
import shlex
import shutil
import stat
import subprocess
from collections.abc import Collection, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

from wdsfs import __version__, host, mount_table, trust
from wdsfs.door import urls
from wdsfs.door.shard_door import DOOR
from wdsfs.errors import MountError, bytes_text, counted
from wdsfs.host import MachineFinding
from wdsfs.mount import mount_search
from wdsfs.mount.engines import KERNEL_ENGINE, is_installed, kernel_engine
from wdsfs.mount_registry import SILENT, canonical
from wdsfs.shared_settings import setting

ALLOW_OTHER = "allow_other"  # the name of a check
CAP_SYS_ADMIN = 21
LITTLE_SPACE = 1 << 28  # bytes; the index of some ten million members, by the size of the packed records
FEW_FILES = 4096  # open files; many machines start a shell with 1024, which it may raise


class Verdict(NamedTuple):
    """The result of a check, as in a `MachineFinding`."""

    level: Literal["ok", "warn", "fail"]
    detail: str
    remedy: str = ""


def diagnose(place: str | None = None) -> list[MachineFinding]:
    """Return the findings of all checks of FUSE, and the finding about a mount point `place`, if any."""
    return [*_diagnose_fuse(), *_diagnose_mountpoint(place)]


def _diagnose_fuse() -> list[MachineFinding]:
    verdicts = {
        "/dev/fuse": check_device(),
        "privileges": check_privileges(),
        "fusermount3": check_fusermount(),
        "libfuse": check_library(),
        "kernel": check_kernel(),
        ALLOW_OTHER: check_allow_other(),
        "open files": check_open_files(),
        "index directory": check_index_directory(Path(setting("INDEX_DIR") or host.cache_dir())),
        "runtime directory": check_runtime_directory(),
        "log directory": check_log_directory(host.state_dir()),
    }
    return [MachineFinding(name, *verdict) for name, verdict in verdicts.items()]


def _diagnose_mountpoint(place: str | None) -> list[MachineFinding]:
    return [] if place is None else [MachineFinding(f"mount point {place}", *check_mountpoint(place))]


def diagnose_engines(place: str | None) -> list[MachineFinding]:
    """Return the findings about FUSE, the kernel and a mount point."""
    return [*_diagnose_fuse(), _check_kernel_engine(), *_diagnose_mountpoint(place)]


def _check_kernel_engine() -> MachineFinding:
    if not is_installed():
        return MachineFinding(KERNEL_ENGINE, "ok", "not installed: FUSE serves every mount")
    return kernel_engine().check_machine()


def preventing(place: str, options: Collection[str]) -> list[MachineFinding]:
    """Return the findings that explain a failed mount at `place` with these options of `-o`."""
    for_others = not {"allow_other", "allow_root"}.isdisjoint(options)
    return [
        finding
        for finding in diagnose(place)
        if finding.remedy and (finding.level == "fail" or (finding.name == ALLOW_OTHER and for_others))
    ]


# -- a report --------------------------------------------------------------------------------------------------

# Findings whose details contain no path of this user.
_WITHOUT_PATHS = ("/dev/fuse", "privileges", "libfuse", "kernel", "open files", KERNEL_ENGINE)
_OF_MOUNT = (
    "engine state mode layout names merge index_tree follow wdsfs protocol shards samples damaged_count processes "
    "restarts failures memory_bytes uptime_seconds unfinished_commit"
)
_OF_VIEW = (
    "--associate --class-digits --class-from --class-names --columns --duplicates --field "
    "--ignore-case --join --keys --missing"
)
_FOR_TESTS = re.compile(r"extra == .(bench|dali|demo|dev|release|test|tools)")


def report() -> dict[str, Any]:
    """Return the facts for a bug report: versions, findings, mounts.

    It contains no path, no URL, and no name of a user, shard or sample. Raises MountError.
    """
    distribution = platform.freedesktop_os_release() if os.path.exists("/etc/os-release") else {}
    system = os.uname()
    return {
        "wdsfs": __version__,
        "python": platform.python_version(),
        "linux": f"{system.release} {system.machine}",
        "distribution": distribution.get("PRETTY_NAME", "unknown"),
        "container": container() or "none",
        "processors": os.cpu_count(),
        "fusermount3": host.version_text(fusermount_version()),
        "packages": _package_versions(),
        "findings": {finding.name: _shown_finding(finding) for finding in diagnose_engines(None)},
        "mounts": [_shown_mount(mount.report()) for mount in mount_search.live_mounts()],
    }


def _package_versions() -> dict[str, str]:
    """Return the versions of the packages that wdsfs needs, without the packages of its tests."""
    required = [line for line in metadata.requires("wdsfs") or [] if not _FOR_TESTS.search(line)]
    names = sorted({re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in required} - {"wdsfs"})
    versions = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _shown_finding(finding: MachineFinding) -> str:
    # The text of an exception may contain a path.
    is_shown = finding.name in _WITHOUT_PATHS and "/" not in finding.detail
    return f"{finding.level}: {finding.detail}" if is_shown else finding.level


def _shown_mount(mount: Mapping[str, Any]) -> dict[str, Any]:
    shown = {name: mount[name] for name in _OF_MOUNT.split() if name in mount}
    schemes = {spec.partition(":")[0].lower() for spec in mount.get("specs", ()) if urls.is_url(spec)}
    return {
        **shown,
        "processes": len(mount.get("processes", ())),
        "stores": sorted(schemes),
        "overlay": bool(mount.get("overlay")),
        "views": sorted({*_OF_VIEW.split()}.intersection(mount.get("composition", "").split())),
        "file_system": mount_table.filesystem_type(mount.get("directory") or "/"),
        "notices": len(mount.get("notices", ())),
    }


# -- FUSE ----------------------------------------------------------------------------------------------------


def check_device(device: str = "/dev/fuse") -> Verdict:
    """Check that the device exists and can be opened for reading and writing."""
    try:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return Verdict("fail", os.strerror(error.errno or 0), _device_remedy(error, device))
    return Verdict("ok", "can be opened")


def _device_remedy(error: OSError, device: str) -> str:
    inside = container()
    if inside and error.errno != errno.EACCES:  # else the device exists, with too narrow a mode
        return _CONTAINER_REMEDIES.get(inside, _CONTAINER_REMEDIES["docker"])
    if error.errno in (errno.ENOENT, errno.ENODEV, errno.ENXIO):
        return "sudo modprobe fuse"
    return f"sudo chmod 0666 {shlex.quote(device)}    (that is its usual mode: it gives access to no data)"


def check_privileges(status: str = "/proc/self/status") -> Verdict:
    """Check that this process, or fusermount3, has the right to mount, which a container may take away."""
    try:
        fields = dict(line.split(":", 1) for line in Path(status).read_text().splitlines() if ":" in line)
    except OSError:
        return Verdict("warn", f"unknown: {status} cannot be read")
    inside = container()
    remedy = _CONTAINER_REMEDIES.get(inside, _CONTAINER_REMEDIES["docker"])
    if os.geteuid() == 0:
        if not _has_capability(fields, "CapEff"):
            return Verdict("fail", "root, but without CAP_SYS_ADMIN", remedy)
        return Verdict("ok", "root with CAP_SYS_ADMIN")
    if not _has_capability(fields, "CapBnd"):
        return Verdict("fail", "CAP_SYS_ADMIN is out of reach here, even for fusermount3", remedy)
    if fields.get("NoNewPrivs", "0").strip() == "1":
        how = (
            remedy
            if inside
            else "remove NoNewPrivileges= and the settings that imply it from the unit (docs/how-to/boot.md)"
        )
        return Verdict("fail", "no_new_privs is set: fusermount3 cannot become root", how)
    return Verdict("ok", "setuid programs can get CAP_SYS_ADMIN")


def _has_capability(fields: Mapping[str, str], which: str) -> bool:
    return bool(int(fields.get(which, "0").strip() or "0", 16) >> CAP_SYS_ADMIN & 1)


_NAME_REMEDY = (
    "add wdsfs:x:{user}:{group}::/tmp:/bin/sh to /etc/passwd, or let libnss-unknown or nss_wrapper name the user"
)


def check_fusermount(program: str | None = None) -> Verdict:
    """Check that fusermount3, which mounts for users, exists and is setuid root. Root does not need it."""
    needed = os.geteuid() != 0
    program = program or host.program("fusermount3")
    if program is None:
        detail = "not found" if needed else "not found; root does not need it"
        return Verdict("fail" if needed else "ok", detail, "sudo apt install fuse3" if needed else "")
    if needed and trust.user_name(os.geteuid()) == str(os.geteuid()):
        detail = f"the user number {os.geteuid()} has no name, which {program} needs"
        return Verdict("fail", detail, _NAME_REMEDY.format(user=os.geteuid(), group=os.getegid()))
    status = os.stat(program)
    shown = f"{program}, version {host.version_text(fusermount_version(program))}"
    if needed and not (status.st_mode & stat.S_ISUID and status.st_uid == 0):
        quoted = shlex.quote(program)
        return Verdict("fail", f"{shown}, is not setuid root", f"sudo chmod u+s {quoted}")
    if needed and os.statvfs(program).f_flag & os.ST_NOSUID:
        mount = mount_table.mount_of(program)
        where = "/" if mount is None else shlex.quote(os.fsdecode(mount.path))
        detail = f"{shown}, cannot become root, because its file system is mounted nosuid"
        return Verdict("fail", detail, f"sudo mount -o remount,suid {where}")
    return Verdict("ok", shown)


def fusermount_version(program: str = "fusermount3") -> tuple[int, ...]:
    """Return the version that `fusermount3 -V` reports: (3, 14, 0); empty if it cannot be run."""
    try:
        said = subprocess.run([program, "-V"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return host.kernel_version(said.rpartition(":")[2].strip())


def check_library() -> Verdict:
    """Check that the Python binding can be loaded, and libfuse with it."""
    try:
        import pyfuse3
    except ImportError as error:
        return Verdict("fail", f"pyfuse3 cannot be loaded: {error}", "sudo apt install fuse3")
    return Verdict("ok", f"{_libfuse_version(pyfuse3.__file__)}, by pyfuse3 {pyfuse3.__version__}")


def _libfuse_version(extension: str) -> str:
    # Load libfuse by the binding's own file, as a mount does.
    try:
        ask = ctypes.CDLL(extension).fuse_pkgversion
        ask.restype = ctypes.c_char_p
        return str(ask().decode())
    except (OSError, AttributeError):
        return "version unknown"


def check_allow_other(conf: str = "/etc/fuse.conf") -> Verdict:
    """Check that this user may use `-o allow_other`. Root always may."""
    if os.geteuid() == 0:
        return Verdict("ok", "root may use it")
    try:
        lines = Path(conf).read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    if "user_allow_other" in (line.partition("#")[0].strip() for line in lines):
        return Verdict("ok", f"allowed by {conf}")
    return Verdict(
        "warn",
        f"user_allow_other is not set in {conf}: only you can read your mounts",
        f"echo user_allow_other | sudo tee -a {shlex.quote(conf)}    (only if other users should read them)",
    )


# -- the machine ---------------------------------------------------------------------------------------------


# Features of FUSE in newer kernels that a mount of wdsfs uses.
_KERNEL_FEATURES: Mapping[tuple[int, ...], str] = {
    (4, 18): "mounts in user namespaces (rootless containers)",
    (6, 9): "another worker continues the requests of a killed worker",
}


def check_kernel(version: tuple[int, ...] | None = None) -> Verdict:
    """List the features of this kernel's version. A mount needs none of them, so the check never fails."""
    version = host.kernel_version() if version is None else version
    features = [
        what if version >= since else f"not yet ({host.version_text(since)}): {what}"
        for since, what in _KERNEL_FEATURES.items()
    ]
    return Verdict("ok", f"{host.version_text(version)}: {'; '.join(features)}")


def check_open_files(limits: tuple[int, int] | None = None) -> Verdict:
    """Check the limit of open files, soft and hard. A mount raises the soft limit itself."""
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = f"{_limit(soft)} (can be raised to {_limit(hard)})" if soft != hard else _limit(soft)
    if hard != resource.RLIM_INFINITY and hard < FEW_FILES:
        remedy = "echo '* hard nofile 65536' | sudo tee /etc/security/limits.d/nofile.conf    (then log in again)"
        return Verdict("warn", shown, remedy)
    return Verdict("ok", shown)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"


def check_index_directory(directory: Path, free: int | None = None) -> Verdict:
    """Check that the index directory is writable, on a local file system, with space left (`free` bytes)."""
    quoted = shlex.quote(str(directory))
    place = _nearest_existing(directory)
    unsafe = _unsafe(directory)
    if unsafe is not None:
        return Verdict("warn", f"{unsafe[0]}: the index goes to /var/tmp instead", unsafe[1])
    if not place.is_dir():
        detail = f"{place} is not a directory: each mount would index all shards again"
        return Verdict("warn", detail, "wdsfs mount --index-dir DIR ..., or set WDSFS_INDEX_DIR")
    if not os.access(place, os.W_OK | os.X_OK):
        is_there = place == directory
        result = "each mount would index all shards again" if is_there else "the index goes to /var/tmp instead"
        remedy = "wdsfs mount --index-dir DIR ..., or set WDSFS_INDEX_DIR"
        return Verdict("warn", f"{place} is not writable: {result}", remedy)
    fstype = mount_table.filesystem_type(directory)
    if mount_table.is_network(fstype):
        detail = f"{directory} is on a network file system ({fstype}): the index goes to /var/tmp instead"
        return Verdict("warn", detail, "set WDSFS_INDEX_DIR to a directory on a local disk")
    free = shutil.disk_usage(place).free if free is None else free
    shown = f"{directory} ({fstype or 'unknown file system'}, {bytes_text(free)} free)"
    if free < LITTLE_SPACE:
        return Verdict("warn", shown, f"make room, or set WDSFS_INDEX_DIR; see: du -sh {quoted}")
    return Verdict("ok", shown)


def check_runtime_directory() -> Verdict:
    """Check the place of control sockets, which `mount`, `status` and `umount` need."""
    try:
        return Verdict("ok", str(host.runtime_dir(create=False)))
    except MountError as error:
        remedy = f"sudo rm -r /tmp/wdsfs-{os.geteuid()}, or set XDG_RUNTIME_DIR to a directory of your own"
        return Verdict("fail", str(error), remedy)


def check_log_directory(directory: Path) -> Verdict:
    """Check the place of logs. If it cannot be used, they go to the runtime directory."""
    place = _nearest_existing(directory)
    unsafe = _unsafe(directory)
    if unsafe is not None:
        return Verdict("warn", f"{unsafe[0]}: logs go to the runtime directory", unsafe[1])
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        detail = f"{place} is not writable: logs go to the runtime directory"
        return Verdict("warn", detail, "set XDG_STATE_HOME to a directory of your own")
    return Verdict("ok", str(directory))


def _unsafe(directory: Path) -> tuple[str, str] | None:
    """Return why other users could change a directory of wdsfs, and the remedy; None if they cannot."""
    # A mount itself makes these safe, if its user owns them.
    own = directory in (host.cache_dir(), host.state_dir())
    place = _nearest_existing(directory)
    try:
        if place != directory or (own and place.stat().st_uid == os.geteuid()):
            trust.way(directory if place == directory else place / "new")
        else:
            trust.directory(place)
    except trust.Untrusted as error:
        text, _, remedy = str(error.strerror).partition(": ")
        return text, remedy
    except OSError:
        pass  # other checks report this
    return None


def _nearest_existing(path: Path) -> Path:
    path = path.absolute()
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


# -- a mount point -------------------------------------------------------------------------------------------


def check_mountpoint(path: str) -> Verdict:
    """Check if `path` can be a mount point, or is a mount, by the rules of `mount` and fusermount3."""
    place = canonical(path)
    try:
        obstacle = mount_search.obstacle(place)
    except MountError as error:  # without a runtime directory, which has a finding of its own
        return Verdict("warn", "cannot be checked without a runtime directory", str(error))
    if obstacle is not None and obstacle.mounted:
        return _check_mounted(place)
    if obstacle is not None:
        remedy = obstacle.remedy or f"choose another directory; see: ls -ld {shlex.quote(path)}"
        return Verdict("fail", obstacle.text, remedy)
    if os.geteuid() != 0:
        problem = _user_problem(path, os.stat(path))
        if problem:
            return Verdict("fail", *problem)
        if confined(path):
            detail = "AppArmor's profile of fusermount3 may not let a user mount here"
            return Verdict("warn", detail, "mount below your home, or see AppArmor in docs/how-to/boot.md")
    return Verdict("ok", f"an empty directory ({mount_table.filesystem_type(path)})")


def _check_mounted(place: str) -> Verdict:
    """Return the finding about a mount of wdsfs that answers."""
    mount = mount_search.find_mount(place)
    if mount is None or mount.registration is None:
        return Verdict("ok", "a mount of wdsfs by another user, in another session or by mount(8) answers here")
    state = mount.report()["state"]
    here = f"wdsfs is mounted here, {state}"
    if mount.is_alive and state != SILENT:
        return Verdict("ok", f"{here} (process {mount.registration.pid})")
    return Verdict("warn", f"{here}, but its process has ended or does not answer", mount.remedy)


def _user_problem(path: str, status: os.stat_result) -> tuple[str, str] | None:
    """Return why fusermount3 refuses this directory to an ordinary user, and the remedy; None if it does not."""
    quoted = shlex.quote(path)
    if status.st_mode & stat.S_ISVTX and status.st_uid != os.geteuid():
        return "shared by many users (sticky) and not yours", f"mkdir {quoted}/mine, and mount there"
    if not os.access(path, os.W_OK):
        return "not writable for you, so fusermount3 refuses it", f"sudo chown $USER {quoted}"
    return None


def confined(path: str, profile: str = "/etc/apparmor.d/fusermount3") -> bool:
    """Return True if AppArmor may keep fusermount3 from mounting at `path`.

    Ubuntu 24.10 and others ship a profile with which users can mount in a few places only. This
    function knows the places of that profile, and does not read changes of its rules.
    """
    if not os.path.exists(profile):
        return False
    places = [os.path.expanduser("~"), "/mnt", "/media", "/tmp", "/cvmfs", f"/run/user/{os.geteuid()}"]
    real = os.path.realpath(path)
    return not any(
        os.path.commonpath([real, os.path.realpath(place)]) == os.path.realpath(place) for place in places
    )


# -- containers ----------------------------------------------------------------------------------------------

_CONTAINER_REMEDIES = {
    "docker": "docker run --device /dev/fuse --cap-add SYS_ADMIN --security-opt apparmor=unconfined ...",
    "podman": "podman run --device /dev/fuse --cap-add SYS_ADMIN ...",
    "kubernetes": "give the container /dev/fuse and SYS_ADMIN, or privileged: true (docs/how-to/containers.md)",
    "apptainer": "mount on the host and bind it: apptainer exec --bind MOUNTPOINT ...",
}


def container(root: str = "/", environ: Mapping[str, str] | None = None) -> str:
    """Return the kind of container in which this process seems to run, or ""."""
    environ, top, group = os.environ if environ is None else environ, Path(root), ""
    with contextlib.suppress(OSError):
        group = (top / "proc/1/cgroup").read_text(errors="replace")
    signs = {  # the most specific first: Kubernetes and Apptainer leave the signs of other kinds, too
        "kubernetes": "KUBERNETES_SERVICE_HOST" in environ,
        "apptainer": "APPTAINER_CONTAINER" in environ or "SINGULARITY_CONTAINER" in environ,
        "podman": (top / "run/.containerenv").exists(),
        "docker": (top / ".dockerenv").exists() or "docker" in group,
        "container": bool(environ.get("container")) or "lxc" in group,
    }
    return next((kind for kind, is_inside in signs.items() if is_inside), "")


# --- a store -----------------------------------------------------------------------------------------------

STORE_SECONDS = 10  # longest wait for a store, because a person waits
_SPELLING = "check how it is spelt; the keys of a bucket are case-sensitive"
_ADDRESS = "check the address, the network and the proxy (https_proxy)"


def diagnose_store(text: str) -> list[MachineFinding]:
    """Return the findings about a URL. Raises SpecError, UsageError."""
    url = urls.parse(text)
    return list(_findings_of(url, DOOR.remote.describe_store(url)))


def _findings_of(url: urls.Url, facts: dict[str, Any]) -> Iterator[MachineFinding]:
    """Yield the findings about a URL, from the facts of `StoreReader.describe`."""
    yield _reached(url, facts)
    if facts["credentials"] is not None:
        yield MachineFinding("credentials", "ok", facts["credentials"])
    if facts["ranges"]:
        yield MachineFinding("ranges", "ok", "work: a read fetches only the bytes that it needs")
    elif facts["ranges"] is not None:
        yield MachineFinding(
            "ranges",
            "warn",
            "the server sends only whole objects: the first read of a shard fetches all of it",
            "fetch the shards first (wdsfs fetch), with enough room in the cache (--cache-size)",
        )
    if facts["conditions"] is not None:
        works = "work: the store does not send a replaced object"
        ignored = "ignored by the server, so wdsfs compares each answer with the known object"
        yield MachineFinding("conditions", "ok", works if facts["conditions"] else ignored)
    if facts.get("pinned") is False:
        yield MachineFinding(
            "changes",
            "warn",
            "the server sends no ETag: wdsfs notices a change only by size, or by time in seconds",
            "give a changed shard a new name",
        )


def _reached(url: urls.Url, facts: dict[str, Any]) -> MachineFinding:
    if facts["error"] is not None:
        what, _, remedy = facts["error"].removeprefix(f"{url.shown}: ").partition(": ")
        if not remedy:
            remedy = _SPELLING if "no such object" in what else _address(url)
        prefix = "it is there, but " if facts["reachable"] else ""
        return MachineFinding(url.shown, "fail", prefix + what, remedy)
    if "objects" not in facts:
        return MachineFinding(url.shown, "ok", f"can be reached, {bytes_text(facts['size'])}")
    if not facts["objects"]:
        return MachineFinding(url.shown, "warn", "can be reached, but has no objects below this URL", _SPELLING)
    return MachineFinding(url.shown, "ok", f"can be reached, {counted(facts['objects'], 'object')} below it")


def _address(url: urls.Url) -> str:
    if url.scheme in urls.BUCKETS:
        return f"{_ADDRESS}; for a store of your own: --store-option {url.store}:endpoint=https://..."
    return _ADDRESS
