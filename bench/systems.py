"""What is compared: ways to get at the files in shards. Each is prepared once for a set and mounted many times.

A mount is a context manager that is gone when it is left, with its processes, whatever happened meanwhile; and
`sweep` ends what is still there when the benchmark ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.clients import File
from bench.data import Member, Set, Shard
from wdsfs import host, mount_table
from wdsfs.kernel.erofs_mount import FILES_SINCE

START_SECONDS = 120.0  # a daemon may take to mount
END_SECONDS = 10.0  # and to end

Say = Callable[[str], None]


class Broken(Exception):
    """A system does not do what it should."""


# --- programs and processes ----------------------------------------------------------------------------------

_processes: list[subprocess.Popen[bytes]] = []
_mountpoints: list[Path] = []


def program(name: str) -> str | None:
    """A program beside this Python, or on the path."""
    beside = Path(sys.executable).parent / name
    return str(beside) if os.access(beside, os.X_OK) else shutil.which(name)


def run(*command: str | Path, limit: float = 1800.0, env: dict[str, str] | None = None, keep: bool = True) -> str:
    """Run a program to its end; returns what it said, if that is to be kept. Raises Broken."""
    words = [str(word) for word in command]
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if keep else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=env,
        process_group=0,
    )
    _processes.append(process)
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        raise Broken(f"{Path(words[0]).name} did not end within {limit:.0f} s") from None
    finally:
        _end(process)
    if process.returncode:
        said = (err or out or b"").decode(errors="replace").strip().splitlines()
        raise Broken(f"{Path(words[0]).name} ended with {process.returncode}: {' '.join(said[-3:])}")
    return out.decode(errors="replace") if keep else ""


def _end(process: subprocess.Popen[bytes], seconds: float = 0.0) -> None:
    """End a program, with what it has started; by itself, if it does so within these seconds."""
    for number, patience in ((0, seconds), (signal.SIGTERM, 1.0), (signal.SIGKILL, END_SECONDS)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=patience)
            break
    if process in _processes:
        _processes.remove(process)


def descendants(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for one in found:
        for children in Path(f"/proc/{one}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, children.read_text().split())
    return found


def processor_seconds(pids: Sequence[int]) -> float:
    """The processor time that these processes have used."""
    total = 0
    for pid in pids:
        for schedstat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, ValueError):
                total += int(schedstat.read_text().split()[0])
    return total / 1e9


def anonymous_bytes(pids: Sequence[int]) -> int:
    """Memory of these processes that no file backs; what they share is divided among those that do."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss_Anon:"):
                    total += int(line.split()[1]) * 1024
    return total


# --- mounts --------------------------------------------------------------------------------------------------


def _mounts() -> list[str]:
    """Every mount point, in the order of mounting; read from the kernel, without touching a mount."""
    lines = Path("/proc/self/mounts").read_bytes().splitlines()
    escape = re.compile(rb"\\(\d{3})")
    return [os.fsdecode(escape.sub(lambda octal: bytes([int(octal[1], 8)]), line.split()[1])) for line in lines]


def unmount(path: Path) -> None:
    end = time.monotonic() + END_SECONDS
    while str(path) in _mounts():
        late = time.monotonic() > end
        if os.geteuid() == 0:
            command = ["umount", *(["-l"] if late else []), str(path)]
        else:
            command = ["fusermount3", "-u", *(["-z"] if late else []), str(path)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            if late and time.monotonic() > end + END_SECONDS:
                raise Broken(f"{path} cannot be unmounted")
            time.sleep(0.02)
    if path in _mountpoints:
        _mountpoints.remove(path)


def clear(top: Path) -> None:
    """Unmount what a killed run has left below a directory."""
    for path in reversed(_mounts()):
        if path.startswith(f"{top}/"):
            unmount(Path(path))


def sweep() -> None:
    """End every mount and process of this run that is still there."""
    for path in reversed(list(_mountpoints)):
        with contextlib.suppress(Exception):
            unmount(path)
    for process in list(_processes):
        with contextlib.suppress(Exception):
            _end(process)


@dataclass(frozen=True)
class View:
    """A mounted set: where its files are, and which process serves them."""

    root: Path
    layout: str
    top: Callable[[Shard], str]  # the directory of a shard, with a slash in front; "" where there is none
    pid: int | None = None

    def path(self, shard: Shard, member: Member) -> str:
        name = member.name
        if self.layout == "samples":
            slash = name.rfind("/") + 1
            key, _, extension = name[slash:].partition(".")
            name = f"{name[:slash]}{key}/{extension}"
        return f"{self.root}{self.top(shard)}/{name}"

    def file(self, shard: Shard, member: Member) -> File:
        return File(self.path(shard, member), member.size, member.crc, member.total)

    def files(self, data: Set) -> list[File]:
        """In the order of the tars."""
        return [self.file(shard, member) for shard, member in data.members()]

    def directories(self, data: Set) -> list[str]:
        """Those that hold files, in the files layout."""
        paths = (f"{self.root}{self.top(shard)}/{folder}".rstrip("/") for shard, folder in data.folders())
        return list(dict.fromkeys(paths))

    @property
    def pids(self) -> list[int]:
        return descendants(self.pid) if self.pid else []


def stem(shard: Shard) -> str:
    """The directory of a shard in most mounts."""
    return f"/{shard.stem}"


class System:
    """One way to get at the files. `home` of a set is where it keeps what it made of it."""

    name = ""
    title = ""
    writes = False  # whether it can be mounted writable
    stream_part = 1  # of the bytes that are streamed into a file, one in this many is enough for it

    def __init__(self, say: Say) -> None:
        self.say = say

    def absent(self) -> str:
        """Why it cannot be measured here; empty when it can."""
        return ""

    def version(self) -> str:
        return ""

    def can(self, data: Set, layout: str = "files") -> bool:
        """Whether it can show this set in this layout."""
        return layout == "files"

    def home(self, data: Set) -> Path:
        return data.directory.parent / self.name

    def prepare(self, data: Set) -> None:
        """Make what a mount needs, if it is not there."""
        home = self.home(data)
        if (home / "done").exists():
            return
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        self.say(f"preparing {self.name} for the set {data.name!r}")
        self.make(data, home)
        (home / "done").touch()

    def make(self, data: Set, home: Path) -> None:
        raise NotImplementedError

    def behind(self, data: Set) -> list[Path]:
        """The files that the bytes come from."""
        return data.paths

    def mounted(self, data: Set, layout: str = "files") -> contextlib.AbstractContextManager[View]:
        """A mount of its own while the context is open."""
        raise NotImplementedError

    def writable(self, data: Set, overlay: Path) -> contextlib.AbstractContextManager[View]:
        """The same in the files layout, and writable. What is changed goes to a directory, empty at first; another
        mount with the same directory shows it again."""
        raise NotImplementedError

    @contextlib.contextmanager
    def _daemon(
        self, data: Set, command: Sequence[str | Path], env: dict[str, str] | None = None
    ) -> Iterator[int]:
        """A program that mounts and serves until the mount ends; yields its process."""
        mountpoint = self.mountpoint(data)
        mountpoint.mkdir(exist_ok=True)
        with (self.home(data) / "log").open("ab") as log:
            process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                process_group=0,  # an interrupt is for the benchmark, which then ends the others in good order
            )
        _processes.append(process)
        _mountpoints.append(mountpoint)
        patience = 0.0  # before the mount is there, its daemon has no reason to end
        try:
            end = time.monotonic() + START_SECONDS
            while str(mountpoint) not in _mounts():
                if process.poll() is not None:
                    raise Broken(f"{self.name} ended with {process.returncode}: {self._last_words(data)}")
                if time.monotonic() > end:
                    raise Broken(f"{self.name} has not mounted within {START_SECONDS:.0f} s")
                time.sleep(0.002)
            patience = END_SECONDS
            yield process.pid
        finally:
            try:
                unmount(mountpoint)
            finally:
                _end(process, patience)
                unmount(mountpoint)  # it may have mounted meanwhile

    def mountpoint(self, data: Set) -> Path:
        return self.home(data) / "mnt"

    def _last_words(self, data: Set) -> str:
        return " ".join((self.home(data) / "log").read_text(errors="replace").splitlines()[-3:])


class Wdsfs(System):
    title = "wdsfs"
    writes = True

    def __init__(
        self, say: Say, name: str = "wdsfs", options: Sequence[str] = (), own_program: str | None = None
    ) -> None:
        super().__init__(say)
        self.name, self.options = name, options
        self._program = own_program or program("wdsfs")

    def absent(self) -> str:
        return "" if self._program else "wdsfs is not installed beside this Python"

    def version(self) -> str:
        return run(*self.command("--version")).strip()

    def can(self, data: Set, layout: str = "files") -> bool:
        return True

    def command(self, *arguments: str | Path) -> list[str | Path]:
        return [self._program or "wdsfs", *arguments]

    def environment(self, data: Set) -> dict[str, str]:
        """Nothing of a measurement is left in the user's own directories."""
        runtime = self.home(data) / "run"
        runtime.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = str(self.home(data) / "state")
        return os.environ | {"XDG_RUNTIME_DIR": str(runtime), "XDG_STATE_HOME": state}

    def make(self, data: Set, home: Path) -> None:
        run(*self.command("index", "-q", "--index-dir", home / "index", data.directory))

    def mounted(self, data: Set, layout: str = "files") -> contextlib.AbstractContextManager[View]:
        return self._mount(data, layout)

    def writable(self, data: Set, overlay: Path) -> contextlib.AbstractContextManager[View]:
        return self._mount(data, "files", "--overlay", overlay)

    @contextlib.contextmanager
    def _mount(self, data: Set, layout: str, *options: str | Path) -> Iterator[View]:
        options = (*self._options(data, layout), *self.options, *options)
        command = self.command("mount", "-f", *options, data.directory, self.mountpoint(data))
        with self._daemon(data, command, self.environment(data)) as pid:
            yield View(self.mountpoint(data), layout, stem, pid)

    def commit(self, data: Set, overlay: Path, output: Path, limit: float) -> None:
        """Pack the changes of an overlay into new shards."""
        options = [*self._options(data, "files"), "--overlay", overlay, "-o", output]
        run(*self.command("commit", *options, data.directory), limit=limit, env=self.environment(data))

    def _options(self, data: Set, layout: str) -> list[str | Path]:
        return ["-q", "--layout", layout, "--index-dir", self.home(data) / "index"]


def _why_not_in_the_kernel(kind: str) -> str:
    """Why this file system cannot be mounted here, else nothing."""
    if os.geteuid() != 0:
        return "only root can mount it"
    if load := program("modprobe"):
        subprocess.run([load, "-q", kind], check=False, capture_output=True)
    if not re.search(rf"\b{kind}$", Path("/proc/filesystems").read_text(), re.MULTILINE):
        return f"the kernel has no {kind}"
    return ""


class WdsfsImage(Wdsfs):
    """An image that wdsfs has made, which the kernel serves."""

    title = "an image of wdsfs (in the kernel, as root)"
    writes = False

    def __init__(self, say: Say) -> None:
        super().__init__(say, "wdsfs-image")

    def absent(self) -> str:
        return _why_not_in_the_kernel("erofs") or super().absent()

    def make(self, data: Set, home: Path) -> None:
        super().make(data, home)
        for layout in ("files", "samples"):
            self.image(data, layout)

    def image(self, data: Set, layout: str) -> tuple[float, int]:
        """Make an image; returns the seconds that it took, and its size (bytes)."""
        since = time.perf_counter()
        run(*self.command("image", *self._options(data, layout), data.directory, "-o", self._image(data, layout)))
        return time.perf_counter() - since, self._image(data, layout).stat().st_size

    def _image(self, data: Set, layout: str) -> Path:
        return self.home(data) / f"{layout}.erofs"

    def behind(self, data: Set) -> list[Path]:
        return [*data.paths, self._image(data, "files"), self._image(data, "samples")]

    @contextlib.contextmanager
    def _mount(self, data: Set, layout: str, *options: str | Path) -> Iterator[View]:
        where: list[str | Path] = ["--base", self.home(data), self._image(data, layout), self.mountpoint(data)]
        with self._daemon(data, self.command("mount", "-f", *where), self.environment(data)) as pid:
            yield View(self.mountpoint(data), layout, stem, pid)


def is_complaint(line: str) -> bool:
    """Whether a line of the log of wdsfs tells of something that should not be; killed workers are meant to be."""
    return bool(re.search(r"warning|error|Traceback", line)) and not line.endswith("it is replaced")


class FuseOverlayfs(System):
    """fuse-overlayfs over a read-only mount of wdsfs: what one would do if that could not be mounted writable."""

    name = "fuse-overlayfs"
    title = "fuse-overlayfs over a read-only mount of wdsfs"
    writes = True

    def __init__(self, say: Say, wdsfs: Wdsfs) -> None:
        super().__init__(say)
        self.wdsfs = wdsfs

    def absent(self) -> str:
        return self.wdsfs.absent() if program("fuse-overlayfs") else "no program fuse-overlayfs"

    def version(self) -> str:
        said = run(program("fuse-overlayfs") or "", "--version")
        return next(iter(re.findall(r"fuse-overlayfs: version ([\d.]+)", said)), "")

    def can(self, data: Set, layout: str = "files") -> bool:
        return False  # it has nothing to read from by itself

    def make(self, data: Set, home: Path) -> None:
        self.wdsfs.prepare(data)

    @contextlib.contextmanager
    def writable(self, data: Set, overlay: Path) -> Iterator[View]:
        upper, work = overlay / "upper", overlay / "work"
        for directory in (upper, work):
            directory.mkdir(exist_ok=True)
        with self.wdsfs.mounted(data) as lower:
            places = f"lowerdir={lower.root},upperdir={upper},workdir={work}"
            command = [program("fuse-overlayfs") or "", "-f", "-o", places, str(self.mountpoint(data))]
            with self._daemon(data, command) as pid:
                yield View(self.mountpoint(data), "files", lower.top, pid)


class Extracted(System):
    name = "extracted"
    title = "extracted files on the local disk"
    writes = True

    def can(self, data: Set, layout: str = "files") -> bool:
        return True

    def make(self, data: Set, home: Path) -> None:
        files = View(home / "files", "files", stem)
        for shard in data.shards:
            directory = files.root / shard.stem
            directory.mkdir(parents=True)
            run("tar", "-xf", shard.path, "--no-same-owner", "-C", directory)
        self._link(data, files, View(home / "samples", "samples", stem))
        os.sync()  # what is not written yet cannot leave the page cache

    def _link(self, data: Set, files: View, samples: View) -> None:
        """The same files once more, each sample a directory, by hard links."""
        for shard, member in data.members():
            path = Path(samples.path(shard, member))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.hardlink_to(files.path(shard, member))

    def behind(self, data: Set) -> list[Path]:
        root = self.home(data) / "files"
        return [root / shard.stem / member.name for shard, member in data.members()]

    @contextlib.contextmanager
    def mounted(self, data: Set, layout: str = "files") -> Iterator[View]:
        yield View(self.home(data) / layout, layout, stem)

    @contextlib.contextmanager
    def writable(self, data: Set, overlay: Path) -> Iterator[View]:
        files = overlay / "files"
        if not files.exists():
            run("cp", "-a", self.home(data) / "files", files)
        yield View(files, "files", stem)


class Ratarmount(System):
    name = "ratarmount"
    title = "ratarmount"
    writes = True
    stream_part = 5  # 31 MB/s in a trial

    def absent(self) -> str:
        return "" if program("ratarmount") else "no program ratarmount"

    def version(self) -> str:
        return next(iter(re.findall(r"ratarmount ([\d.]+)", run(program("ratarmount") or "", "--version"))), "")

    def command(self, index: Path, *arguments: str | Path, union: bool = False) -> list[str | Path]:
        options = [*([] if union else ["--disable-union-mount"]), "--index-minimum-file-count", "0"]
        return [program("ratarmount") or "ratarmount", *options, "--index-folders", index, *arguments]

    def make(self, data: Set, home: Path) -> None:
        (home / "index").mkdir()
        run(*self.command(home / "index", "--no-mount", *data.paths))

    @contextlib.contextmanager
    def mounted(self, data: Set, layout: str = "files") -> Iterator[View]:
        command = self.command(self.home(data) / "index", "-f", *data.paths, self.mountpoint(data))
        several = len(data.shards) > 1  # a single archive is shown without a directory of its own
        with self._daemon(data, command) as pid:
            yield View(self.mountpoint(data), layout, lambda shard: f"/{shard.path.name}" if several else "", pid)

    @contextlib.contextmanager
    def writable(self, data: Set, overlay: Path) -> Iterator[View]:
        """All shards in one directory: it refuses an overlay over several that are kept apart."""
        places = [overlay, *data.paths, self.mountpoint(data)]
        command = self.command(self.home(data) / "index", "-f", "--write-overlay", *places, union=True)
        with self._daemon(data, command) as pid:
            yield View(self.mountpoint(data), "files", lambda shard: "", pid)


class Squashfuse(System):
    """squashfuse_ll over an image of the extracted files."""

    def __init__(self, say: Say, extracted: Extracted, compressed: bool) -> None:
        super().__init__(say)
        self.extracted, self.compressed = extracted, compressed
        self.name = "squashfuse_ll" if compressed else "squashfuse_ll-raw"
        kind = "the default compression (gzip)" if compressed else "no compression"
        self.title = f"squashfuse_ll over an image with {kind}"

    def absent(self) -> str:
        missing = [name for name in ("squashfuse_ll", "mksquashfs") if not program(name)]
        return f"no program {' and '.join(missing)}" if missing else ""

    def version(self) -> str:
        said = subprocess.run([program("squashfuse_ll") or "", "-V"], capture_output=True, check=False)
        return next(iter(re.findall(rb"squashfuse ([\d.]+)", said.stderr + said.stdout)), b"").decode()

    def can(self, data: Set, layout: str = "files") -> bool:
        # What cannot be compressed is stored as it is: for large files the two images are the same.
        return layout == "files" and (not self.compressed or data.name in {"small", "tree"})

    def make(self, data: Set, home: Path) -> None:
        self.extracted.prepare(data)
        options = [] if self.compressed else ["-noI", "-noId", "-noD", "-noF", "-noX"]
        files = self.extracted.home(data) / "files"
        run(program("mksquashfs") or "", files, home / "image", "-noappend", "-quiet", "-no-progress", *options)

    def behind(self, data: Set) -> list[Path]:
        return [self.home(data) / "image"]

    @contextlib.contextmanager
    def mounted(self, data: Set, layout: str = "files") -> Iterator[View]:
        places = [self.home(data) / "image", self.mountpoint(data)]
        command = [program("squashfuse_ll") or "", "-f", *map(str, places)]
        with self._daemon(data, command) as pid:
            yield View(self.mountpoint(data), layout, stem, pid)


class Energon(System):
    name = "energon"
    title = "energon mount"

    def absent(self) -> str:
        return "" if program("energon") else "no program energon"

    def version(self) -> str:
        from importlib.metadata import PackageNotFoundError, version

        with contextlib.suppress(PackageNotFoundError):
            return version("megatron-energon")
        return ""

    def can(self, data: Set, layout: str = "files") -> bool:
        return data.flat and data.name in {"small", "large"}

    def make(self, data: Set, home: Path) -> None:
        (home / "set").mkdir()
        for path in data.paths:
            os.link(path, home / "set" / path.name)
        options = ["--non-interactive", "--split-ratio", "1,0,0", "--skip-dataset-yaml"]
        run(program("energon") or "", "prepare", home / "set", *options)

    @contextlib.contextmanager
    def mounted(self, data: Set, layout: str = "files") -> Iterator[View]:
        options = ["-s"] if layout == "samples" else []
        places = [self.home(data) / "set", self.mountpoint(data)]
        command = [program("energon") or "", "mount", *map(str, places), *options]
        with self._daemon(data, command) as pid:
            yield View(self.mountpoint(data), layout, lambda shard: "", pid)


class Erofs(System):
    """The kernel's own EROFS: an index of the tar's headers, and the tar, both given to the kernel as files."""

    name = "erofs"
    title = "EROFS over the tars (in the kernel, as root)"

    def absent(self) -> str:
        if why := _why_not_in_the_kernel("erofs"):
            return why
        make = program("mkfs.erofs")
        if not make:
            return "no program mkfs.erofs"
        if host.kernel_version() < FILES_SINCE:
            return "this kernel takes loop devices only"
        said = subprocess.run([make, "--help"], capture_output=True, check=False)
        return "" if b"--tar" in said.stdout + said.stderr else "mkfs.erofs is too old to index a tar (before 1.7)"

    def version(self) -> str:
        said = subprocess.run([program("mkfs.erofs") or "", "-V"], capture_output=True, check=False)
        return next(iter(re.findall(rb"([\d.]+\d)", said.stdout)), b"").decode()

    def make(self, data: Set, home: Path) -> None:
        for shard in data.shards:
            run(program("mkfs.erofs") or "", "--tar=i", "--quiet", home / f"{shard.stem}.erofs", shard.path)

    def behind(self, data: Set) -> list[Path]:
        return data.paths + [self.home(data) / f"{shard.stem}.erofs" for shard in data.shards]

    @contextlib.contextmanager
    def mounted(self, data: Set, layout: str = "files") -> Iterator[View]:
        with contextlib.ExitStack() as stack:
            for shard in data.shards:
                mountpoint = self.mountpoint(data) / shard.stem
                mountpoint.mkdir(parents=True, exist_ok=True)
                image = self.home(data) / f"{shard.stem}.erofs"
                files = [(b"source", bytes(image)), (b"device", bytes(shard.path))]
                _mountpoints.append(mountpoint)
                mount_table.mount(b"erofs", files, [b"ro"], str(mountpoint), mount_table.READ_ONLY)
                stack.callback(unmount, mountpoint)
            yield View(self.mountpoint(data), layout, stem)


def systems(say: Say, mount_options: str, base: str = "") -> dict[str, System]:
    """Everything that can be compared, by name; wdsfs first. `base` is the program of another build of wdsfs."""
    extracted = Extracted(say)
    own = shlex.split(mount_options)
    wdsfs = Wdsfs(say, options=own)
    every: list[System] = [
        wdsfs,
        *([Wdsfs(say, "wdsfs-base", own, base)] if base else []),
        WdsfsImage(say),
        Squashfuse(say, extracted, compressed=True),
        Squashfuse(say, extracted, compressed=False),
        Ratarmount(say),
        Energon(say),
        Erofs(say),
        FuseOverlayfs(say, wdsfs),
        extracted,
    ]
    return {system.name: system for system in every}
