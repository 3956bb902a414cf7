"""The directory that `--overlay DIR` names: its layout, lock and settings, and whether a commit is unfinished.

It looks like this::

    DIR/overlay.json   which set, shown how, it was made over (`OverlaySettings`)
    DIR/lock           held by the process that mounts or commits
    DIR/outputs.json   which shards commits to elsewhere have written from it (`overlay/overlay_shards.py`)
    DIR/upper/         the changes, under the paths of the mount (`overlay/upper_format.py`)
    DIR/work/          files on their way into upper/; orphans/<inode>: unlinked files that the kernel still
                       knows; commit.json and others: a commit in place (`packing/replacement.py`);
                       kernel/: what the kernel's overlayfs needs, where it has served this overlay

This module neither reads nor changes the content of upper/.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from wdsfs import mount_table, trust
from wdsfs.errors import MALFORMED, OverlayBusy, OverlayUnusable
from wdsfs.formats import Format, OtherVersion
from wdsfs.names import PLAIN, Reading
from wdsfs.overlay.upper_format import OPEN_DIRECTORY
from wdsfs.shards import Fingerprint
from wdsfs.storage.durable import write_whole

_ESCAPE = re.compile(r"\\(.)", re.DOTALL)

# Of overlay.json, and by it of the whole directory. Version 1 has no options of reading.
OVERLAY = Format("an overlay", (1, 2), "use the wdsfs that wrote it; nothing in it was changed")


class OverlayDirectory(NamedTuple):
    """Paths of everything in an overlay's directory."""

    path: Path

    @property
    def upper(self) -> Path:
        """The changes: a directory of its own, or all of an upper that the kernel's overlayfs wrote."""
        return self.path if self.is_bare else self.path / "upper"

    @property
    def work(self) -> Path:
        return self.path / "work"

    @property
    def settings(self) -> Path:
        return self.path / "overlay.json"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def outputs(self) -> Path:
        """The list of shards that were written from this overlay; beside an upper of the kernel, not in it."""
        beside = self.path.with_name(self.path.name + ".wdsfs-outputs.json")
        return self.path / "outputs.json" if self.is_ours else beside

    @property
    def kernel_work(self) -> Path:
        """The work directory of the kernel's overlayfs, and the sign that it has written into this overlay."""
        return self.path / "work" / "kernel"

    @property
    def is_ours(self) -> bool:
        """True if a mount has made this directory; False for an upper of the kernel's, even if empty."""
        return self.settings.exists() or (self.path / "upper").is_dir()

    @property
    def is_bare(self) -> bool:
        """True if it has content, but none made by wdsfs: an `upperdir=` of the kernel's overlayfs."""
        if self.is_ours:
            return False
        ours = {"lock", "work"}
        return self.path.is_dir() and not ours.issuperset(os.listdir(self.path))


@dataclass(frozen=True, slots=True)
class ShardSeen:
    """A shard that an overlay was made over: its name in the mount, path, and fingerprint."""

    name: bytes
    path: bytes
    fingerprint: Fingerprint


@dataclass(frozen=True, slots=True)
class OverlaySettings:
    """The content of overlay.json: view and shards of the set for which the overlay was made."""

    layout: str
    names: str
    merge: bool
    shards: tuple[ShardSeen, ...]
    reading: Reading = PLAIN

    @property
    def options(self) -> list[str]:
        """The options of a command that shows the set so."""
        names = [f"--names {self.names}"] if self.layout == "samples" else []
        return [f"--layout {self.layout}", *names, *["--merge"] * self.merge, *self.reading.arguments]

    def to_json(self) -> bytes:
        shards = [
            {
                "name": os.fsdecode(shard.name),
                "path": os.fsdecode(shard.path),
                "fingerprint": list(shard.fingerprint),
            }
            for shard in self.shards
        ]
        view = {"version": OVERLAY.version, "layout": self.layout, "names": self.names, "merge": self.merge}
        content = {**view, "reading": self.reading._asdict(), "shards": shards}
        return json.dumps(content, indent=1).encode() + b"\n"

    @staticmethod
    def from_json(data: bytes) -> OverlaySettings:
        """Return the settings in this JSON. Raises one of MALFORMED for what `to_json` does not write."""
        content = json.loads(data)
        options = content["reading"] if OVERLAY.check(content["version"]) > 1 else {}
        shards = []
        for row in content["shards"]:
            seen = Fingerprint(*map(int, row["fingerprint"]))
            shards.append(ShardSeen(os.fsencode(row["name"]), os.fsencode(row["path"]), seen))
        return OverlaySettings(
            str(content["layout"]),
            str(content["names"]),
            bool(content["merge"]),
            tuple(shards),
            Reading(**{name: bool(value) for name, value in options.items()}),
        )


def read_settings(place: OverlayDirectory) -> OverlaySettings | None:
    """Return the content of overlay.json; None if there is none. Raises OverlayUnusable."""
    try:
        return OverlaySettings.from_json(place.settings.read_bytes())
    except FileNotFoundError:
        return None
    except OtherVersion as error:
        raise OverlayUnusable(f"{place.settings} {error}") from None
    except MALFORMED as error:
        way_out = (
            "put it back from a copy, or move it away and name the same shards as before: the changes are kept"
        )
        raise OverlayUnusable(f"{place.settings} is damaged, {error!r}: {way_out}") from None


def write_settings(place: OverlayDirectory, settings: OverlaySettings) -> None:
    """Write overlay.json."""
    write_whole(os.fsencode(place.settings), settings.to_json(), 0o644)


# --- the lock


def hold(place: OverlayDirectory, make: bool = True, served_at: str | None = None) -> int:
    """Lock this overlay against other mounts and commits, as long as the returned descriptor is open.

    With `make` an empty directory becomes an overlay of wdsfs; without, no file is written: the directory may be
    an upper of the kernel. A forked process inherits the lock, which ends with the last of these processes.
    `served_at` is the path where the kernel serves the overlay already, if the caller only guards that mount.
    Raises OverlayBusy, which names the holder; OverlayUnusable where others can write to the directory: its files
    say which shards a commit replaces.
    """
    try:
        trust.directory(place.path)
        fd, ours = _open_lock(place, make)
    except trust.Untrusted as error:
        raise OverlayUnusable(f"the overlay {place.path} is not used, since {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if ours:
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        _refuse_use_by_kernel(place, served_at)
    except BlockingIOError:
        busy = _busy(place, fd, ours)
        os.close(fd)
        raise busy from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _refuse_use_by_kernel(place: OverlayDirectory, served_at: str | None) -> None:
    """Raise OverlayBusy for an overlay that the kernel still serves, although nobody guards it any more."""
    if served_at is not None and is_served_at(place.upper, served_at):
        return
    if not (place.kernel_work / "work").is_dir() or not is_used(place.upper):
        return
    mount = mounted_on(place.upper)
    if mount is None:
        raise OverlayBusy(
            f"the overlay {place.path} is in use: it was unmounted, but programs still have its files open; "
            "wait for them, or end them"
        )
    mountpoint = os.fsdecode(mount.path)
    raise OverlayBusy(
        f"the overlay {place.path} is in use: the kernel serves it at {mountpoint}, without a guard; end that "
        f"with: wdsfs umount {shlex.quote(mountpoint)}"
    )


def _busy(place: OverlayDirectory, fd: int, ours: bool) -> OverlayBusy:
    """Return the error for an overlay whose lock, open as `fd`, another process has."""
    stranger = trust.foreign_holder(fd)
    if stranger is not None:
        return OverlayBusy(
            f"the overlay {place.path} cannot be locked, because {stranger} has locked it: end that process, "
            f"and make it private: chmod 0700 {shlex.quote(str(place.path))}"
        )
    holder = os.pread(fd, 20, 0).decode("ascii", "replace").strip() if ours else ""
    return OverlayBusy(f"the overlay {place.path} is in use{_holder_text(holder)}")


def _holder_text(holder: str) -> str:
    """Return the message for an overlay that is in use.

    `holder` is the pid in its lock, empty if there is none.
    """
    with contextlib.suppress(PermissionError, OverflowError):  # PermissionError: a process of another user
        try:
            if holder.isdecimal():
                os.kill(int(holder), 0)
        except ProcessLookupError:
            return (
                f" by workers of a mount whose daemon (process {holder}) has died: `wdsfs status` shows where it "
                "is, and `wdsfs umount MOUNTPOINT` ends them"
            )
    by = f" by process {holder}" if holder else ""
    return f"{by}; only one mount or commit may use it"


def _open_lock(place: OverlayDirectory, make: bool) -> tuple[int, bool]:
    """Return the file to lock, and True if the holder's pid may be written to it."""
    if not place.is_bare and (make or os.listdir(place.path)):  # else nothing of ours belongs in there
        try:
            return trust.open_lock(place.lock), True
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
    return os.open(place.path, OPEN_DIRECTORY), False


@contextlib.contextmanager
def held(place: OverlayDirectory, served_at: str | None = None) -> Iterator[None]:
    """Hold the overlay, as `hold`, for a block; makes no overlay of an empty directory."""
    fd = hold(place, make=False, served_at=served_at)
    try:
        yield
    finally:
        os.close(fd)


# --- use by the kernel's overlayfs, which knows nothing of our lock


def is_used(upper: Path) -> bool:
    """Return True if a mount of the kernel's overlayfs writes into this directory.

    Users other than root see only visible mounts.

    Such a mount can outlive the process that made it. If it is detached, and still has open files, it is not in
    the list of mounts. But the kernel marks the upper of each overlay mount, and refuses a second mount that wants
    the same upper for itself (`index=on`). So this tries to make such a mount, with directories that the kernel
    refuses right after that check, because an upper cannot be its own work directory: no mount is ever made.
    """
    if os.geteuid() == 0:
        path = escaped(upper)
        options = [(b"lowerdir", b"/"), (b"upperdir", path), (b"workdir", path), (b"index", b"on")]
        try:
            mount_table.attempt(b"overlay", options)
        except OSError as error:
            if error.errno == errno.EBUSY:
                return True
        else:
            return False
    return mounted_on(upper) is not None


def is_served_at(upper: Path, mountpoint: str) -> bool:
    """Return True if what is mounted at this path is the kernel's overlayfs over this upper."""
    mount = mount_table.mounted_at(mountpoint)
    return mount is not None and _is_over(mount, upper)


def mounted_on(upper: Path) -> mount_table.MountPoint | None:
    """Return the mount of the kernel's overlayfs over this upper, as far as this process sees it."""
    return next((mount for mount in mount_table.mounts() if _is_over(mount, upper)), None)


def _is_over(mount: mount_table.MountPoint, upper: Path) -> bool:
    path = upper_of(mount)
    return path is not None and os.path.realpath(path) == os.path.realpath(upper)


def upper_of(mount: mount_table.MountPoint) -> str | None:
    """Return the upper of a mount of the kernel's overlayfs; None for all other mounts."""
    if mount.fstype != "overlay":
        return None
    option = next((option for option in mount.super_options if option.startswith("upperdir=")), None)
    return None if option is None else _ESCAPE.sub(r"\1", option.partition("=")[2])  # as it was given


def escaped(path: Path) -> bytes:
    """Return a path as overlayfs takes it: it reads a backslash as an escape."""
    return os.fsencode(path).replace(b"\\", b"\\\\")


# --- commits in place


def state_of(place: OverlayDirectory) -> Path:
    """Return the directory of the journal of a commit in place; it is beside an upper of the kernel.

    Raises OverlayUnusable if another user has made that directory: a journal decides what is written where.
    """
    if place.is_ours:
        return place.work
    beside = _beside(place)
    if os.path.lexists(beside):
        try:
            trust.directory(beside)
        except OSError as error:
            raise OverlayUnusable(f"{beside}: {error.strerror}") from None
    # A commit that was killed while it emptied such an upper may leave it without anything to recognise it by.
    return beside if place.is_bare or (beside / "commit.json").exists() else place.work


def _beside(place: OverlayDirectory) -> Path:
    return place.path.with_name(place.path.name + ".wdsfs-commit")


def clean(place: OverlayDirectory) -> None:
    """Remove the leftovers of a commit that was killed at its very end, or before its first shard.

    REQUIRES: the caller holds the overlay, which has no unfinished commit.
    """
    beside = _beside(place)
    if not place.is_ours and beside.is_dir() and not (beside / "commit.json").exists():
        shutil.rmtree(beside, ignore_errors=True)
    if not place.is_bare:
        shutil.rmtree(place.work / "committed", ignore_errors=True)
        for path in [place.work / "commit.json.tmp", *place.work.glob("commit.log*")]:
            with contextlib.suppress(OSError):
                path.unlink()


def unfinished(place: OverlayDirectory) -> bool:
    """Return True if an in-place commit of this overlay was interrupted: then only `replace` may use it."""
    return (state_of(place) / "commit.json").exists()


def is_half_done(overlay: str | None) -> bool:
    """Return True if a mount has this overlay (None: no overlay), with an unfinished commit."""
    return overlay is not None and unfinished(OverlayDirectory(Path(overlay)))
