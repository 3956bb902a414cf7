"""The directory that `--overlay DIR` names: its layout, lock and settings, and whether a commit is unfinished.

It looks like this::

    DIR/overlay.json   which set, shown how, it was made over (`OverlaySettings`)
    DIR/lock           held by the process that mounts or commits
    DIR/outputs.json   which shards commits to elsewhere have written from it (`overlay/overlay_shards.py`)
    DIR/upper/         the changes, under the paths of the mount (`overlay/upper_format.py`)
    DIR/work/          files on their way into upper/; orphans/<inode>: unlinked files that the kernel still
                       knows; commit.json and others: a commit in place (`packing/replacement.py`);
                       kernel/: of an earlier release, which had the kernel's overlayfs serve this overlay

This module neither reads nor changes the content of upper/.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from wdsfs import mount_table, trust
from wdsfs.durable import write_whole
from wdsfs.errors import MALFORMED, OverlayBusy, OverlayUnusable
from wdsfs.formats import Format, OtherVersion
from wdsfs.names import PLAIN, Reading
from wdsfs.overlay.upper_format import OPEN_DIRECTORY
from wdsfs.shards import Fingerprint

# Of overlay.json, and by it of the whole directory. Version 1 has no options of reading.
OVERLAY = Format("an overlay", (1, 2), "use the wdsfs that wrote it; nothing in it was changed")


class OverlayDirectory:
    """Paths of everything in an overlay's directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.upper, self.work = path / "upper", path / "work"
        self.settings, self.lock, self.outputs = path / "overlay.json", path / "lock", path / "outputs.json"


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
        content = {**view, "reading": self.reading.as_json(), "shards": shards}
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


def hold(place: OverlayDirectory, *, make: bool = True) -> int:
    """Lock this overlay against other mounts and commits, as long as the returned descriptor is open.

    With `make` an empty directory becomes an overlay; without, no file is written there. A forked process inherits
    the lock, which ends with the last of these processes. Raises OverlayBusy, which names the holder;
    OverlayUnusable for a directory of something else, or one that others can write to: its files say which shards
    a commit replaces.
    """
    try:
        trust.directory(place.path)
        _refuse_other_content(place)
        fd, is_file = _open_lock(place, make)
    except trust.Untrusted as error:
        raise OverlayUnusable(f"the overlay {place.path} is not used, since {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_file:
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        _refuse_use_by_kernel(place)
    except BlockingIOError:
        busy = _busy(place, fd, is_file)
        os.close(fd)
        raise busy from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _refuse_other_content(place: OverlayDirectory) -> None:
    """Raise OverlayUnusable for a directory with content that no mount has made.

    Semantics decision: an `upperdir=` of the kernel's overlayfs is refused, too: its marks are others, and the
    kernel knows nothing of commits.
    """
    is_overlay = place.settings.exists() or place.upper.is_dir()
    if not is_overlay and not {"lock", "work"}.issuperset(os.listdir(place.path)):
        raise OverlayUnusable(
            f"{place.path} is neither empty nor an overlay of wdsfs; name another directory. Changes that the "
            "kernel's overlayfs wrote there: copy them into a mount with --overlay"
        )


def _refuse_use_by_kernel(place: OverlayDirectory) -> None:
    """Raise OverlayBusy for an overlay that the kernel serves: an earlier release has mounted it so."""
    if not (place.work / "kernel").is_dir():
        return
    mount = next((mount for mount in mount_table.mounts() if _is_over(mount, place.upper)), None)
    if mount is not None:
        mountpoint = os.fsdecode(mount.path)
        raise OverlayBusy(
            f"the overlay {place.path} is in use: the kernel serves it at {mountpoint}; end that with: "
            f"wdsfs umount {shlex.quote(mountpoint)}"
        )


def _is_over(mount: mount_table.MountPoint, upper: Path) -> bool:
    path = mount.upperdir
    return path is not None and os.path.realpath(path) == os.path.realpath(upper)


def _busy(place: OverlayDirectory, fd: int, is_file: bool) -> OverlayBusy:
    """Return the error for an overlay whose lock, open as `fd`, another process has."""
    stranger = trust.foreign_holder(fd)
    if stranger is not None:
        return OverlayBusy(
            f"the overlay {place.path} cannot be locked, because {stranger} has locked it: end that process, "
            f"and make it private: chmod 0700 {shlex.quote(str(place.path))}"
        )
    holder = os.pread(fd, 20, 0).decode("ascii", "replace").strip() if is_file else ""
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
    """Return the file or directory to lock, and True for a file, to which the holder's pid may be written."""
    if make or os.listdir(place.path):
        try:
            return trust.open_lock(place.lock), True
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
    return os.open(place.path, OPEN_DIRECTORY), False


@contextlib.contextmanager
def held(place: OverlayDirectory) -> Iterator[None]:
    """Hold the overlay, as `hold`, for a block; makes no overlay of an empty directory."""
    fd = hold(place, make=False)
    try:
        yield
    finally:
        os.close(fd)


# --- commits in place


def clean(place: OverlayDirectory) -> None:
    """Remove the leftovers of a commit that was killed at its very end, or before its first shard.

    REQUIRES: the caller holds the overlay, which has no unfinished commit.
    """
    shutil.rmtree(place.work / "committed", ignore_errors=True)
    for path in [place.work / "commit.json.tmp", *place.work.glob("commit.log*")]:
        with contextlib.suppress(OSError):
            path.unlink()


def unfinished(place: OverlayDirectory) -> bool:
    """Return True if an in-place commit of this overlay was interrupted: then only `replace` may use it."""
    return (place.work / "commit.json").exists()


def is_half_done(overlay: str | None) -> bool:
    """Return True if a mount has this overlay (None: no overlay), with an unfinished commit."""
    return overlay is not None and unfinished(OverlayDirectory(Path(overlay)))
