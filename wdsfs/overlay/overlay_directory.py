"""The directory that `--overlay DIR` names: its layout, lock and settings, and what commits note in it.

It looks like this::

    DIR/overlay.json   which set, shown how, it was made over (`OverlaySettings`)
    DIR/lock           held by the process that mounts or commits
    DIR/outputs.json   which shards commits to elsewhere have written from it (`Written`)
    DIR/upper/         the changes, under the paths of the mount (`overlay/upper_format.py`)
    DIR/work/          files on their way into upper/; orphans/<inode>: unlinked files that the kernel still
                       knows; commit.json and others: a commit in place (`packing/replacement.py`);
                       kernel/: what the kernel's overlayfs needs, where it has served this overlay

What is in upper/ is not read or changed here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shlex
import shutil
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from wdsfs import trust
from wdsfs.errors import MALFORMED, OverlayBusy, OverlayUnusable, ShardError, several
from wdsfs.names import PLAIN, Reading
from wdsfs.overlay import kernel_use
from wdsfs.overlay.upper_format import DIRECTORY, OPEN_DIRECTORY, UpperNode, load
from wdsfs.remote import shard_paths
from wdsfs.remote.shard_paths import is_remote
from wdsfs.storage.durable import write_whole
from wdsfs.storage.identity import Fingerprint

# Of overlay.json and the files beside it. The second is for shards that are read with options: a program that does
# not know these options would take the paths for those of another tree.
VERSION, VERSION_READ = 1, 2
SAMPLE_BYTES = 64 << 10  # of a written shard, by which it is known again


class OverlayDirectory(NamedTuple):
    """Where everything in an overlay's directory is."""

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
        """Which shards were written from it: for an upper that the kernel wrote beside it, not in it."""
        beside = self.path.with_name(self.path.name + ".wdsfs-outputs.json")
        return self.path / "outputs.json" if self.is_ours else beside

    @property
    def kernel_work(self) -> Path:
        """The work directory of the kernel's overlayfs, and the sign that it has written into this overlay."""
        return self.path / "work" / "kernel"

    @property
    def is_ours(self) -> bool:
        """True if a mount has made this directory; False for an upper of the kernel's overlayfs, also an empty
        one."""
        return self.settings.exists() or (self.path / "upper").is_dir()

    @property
    def is_bare(self) -> bool:
        """True if it has contents, but not ours: an `upperdir=` of the kernel's overlayfs."""
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
                "name": os.fsdecode(one.name),
                "path": os.fsdecode(one.path),
                "fingerprint": list(one.fingerprint),
            }
            for one in self.shards
        ]
        about: dict[str, Any] = {"layout": self.layout, "names": self.names, "merge": self.merge}
        if self.reading.is_plain:
            about = {"version": VERSION, **about}
        else:
            about = {"version": VERSION_READ, **about, "reading": self.reading._asdict()}
        return json.dumps({**about, "shards": shards}, indent=1).encode() + b"\n"

    @staticmethod
    def from_json(data: bytes) -> OverlaySettings:
        """Raises one of MALFORMED for what `to_json` does not write."""
        about = json.loads(data)
        if about["version"] not in (VERSION, VERSION_READ):
            raise ValueError(f"version {about['version']}, not {VERSION} or {VERSION_READ}")
        options = {} if about["version"] == VERSION else about["reading"]
        reading = Reading(**{name: bool(value) for name, value in options.items()})
        shards = (
            ShardSeen(
                os.fsencode(one["name"]), os.fsencode(one["path"]), Fingerprint(*map(int, one["fingerprint"]))
            )
            for one in about["shards"]
        )
        return OverlaySettings(
            str(about["layout"]), str(about["names"]), bool(about["merge"]), tuple(shards), reading
        )


def read_settings(place: OverlayDirectory) -> OverlaySettings | None:
    """The content of overlay.json; None if there is none. Raises OverlayUnusable."""
    try:
        return OverlaySettings.from_json(place.settings.read_bytes())
    except FileNotFoundError:
        return None
    except MALFORMED as error:
        raise OverlayUnusable(f"{place.settings} cannot be used: {error}") from None


def write_settings(place: OverlayDirectory, settings: OverlaySettings) -> None:
    """Write overlay.json."""
    write_whole(os.fsencode(place.settings), settings.to_json(), 0o644)


class Written(NamedTuple):
    """A shard that a commit to elsewhere wrote from the changes of an overlay, and the --output that named it.

    `size` in bytes; `mtime_ns` is 0 while the commit is at work. `sample`: where it begins to differ from its
    source, and the CRC-32 of what is there (`sample_of`); None until it is read. An object in a store has an
    ETag instead, and its path is its URL.
    """

    path: bytes
    size: int
    mtime_ns: int
    output: str
    sample: tuple[int, int] | None = None
    etag: str = ""


def sample_of(path: bytes, offset: int) -> tuple[int, int]:
    """The offset (bytes) and the CRC-32 of what a file has there. Raises OSErrors."""
    with open(path, "rb") as file:
        return offset, zlib.crc32(os.pread(file.fileno(), SAMPLE_BYTES, offset))


def read_outputs(place: OverlayDirectory) -> list[Written]:
    """The content of outputs.json; empty if there is none. Raises OverlayUnusable."""
    try:
        with os.fdopen(trust.open_file(place.outputs, os.O_RDONLY), "rb") as file:
            about = json.load(file)
        if about["version"] != VERSION:
            raise ValueError(f"version {about['version']}, not {VERSION}")
        return [
            Written(
                os.fsencode(one["path"]),
                int(one["size"]),
                int(one["mtime_ns"]),
                str(one["output"]),
                (int(one["sample"][0]), int(one["sample"][1])) if one.get("sample") else None,
                str(one.get("etag", "")),
            )
            for one in about["shards"]
        ]
    except FileNotFoundError:
        return []
    except trust.Untrusted as error:
        raise OverlayUnusable(error.strerror) from None
    except (OSError, *MALFORMED) as error:
        text = f"{place.outputs} cannot be used: {error}; it only says which shards were written from the overlay"
        raise OverlayUnusable(f"{text}, so it may be removed") from None


def add_outputs(place: OverlayDirectory, written: Sequence[Written]) -> None:
    """Note these shards in outputs.json, in the place of what is noted of the same paths. Raises OSErrors."""
    found = {one.path: one for one in (*read_outputs(place), *written)}
    shards = [_row(one) for one in found.values()]
    content = json.dumps({"version": VERSION, "shards": shards}, indent=1).encode() + b"\n"
    write_whole(os.fsencode(place.outputs), content, 0o644)


def _row(one: Written) -> dict[str, Any]:
    row = {**one._asdict(), "path": os.fsdecode(one.path)}
    if not one.etag:
        del row["etag"]
    return row


def refuse_outputs(place: OverlayDirectory, shards: Sequence[bytes]) -> None:
    """Raise OverlayUnusable when the overlay is to be used over shards (paths) that were written from it.

    All its changes would be made a second time, and each new directory packed again. A file is known by size and
    time, also if it was moved or copied with its time; where the time is another, by path, size and a sample. An
    object is known by size and ETag.

    An overlay without changes may be used over them. From then on it is an overlay of these shards, so its
    outputs.json goes. Raises OSErrors of the upper, too.
    """
    written = read_outputs(place)
    if not written:
        return
    again = [os.fsdecode(shard) for shard in shards if _was_written(shard, written)]
    if again and not _has_changes(place):
        place.outputs.unlink(missing_ok=True)
    elif again:
        verb = "was" if len(again) == 1 else "were"
        raise OverlayUnusable(
            f"{several(again)} {verb} written by a commit of the overlay {place.path} (see {place.outputs}): its "
            "changes would be packed a second time. Begin with a new directory for --overlay, or name the shards "
            "that this one was made over"
        )


def _was_written(shard: bytes, written: Sequence[Written]) -> bool:
    """True if a shard (path) is one of these; of one that cannot be read that is said where it is needed."""
    if is_remote(shard):
        return _was_sent(shard, [one for one in written if is_remote(one.path)])
    path = os.path.realpath(shard)
    try:
        found = os.stat(path)
        for one in written:
            if found.st_size != one.size or is_remote(one.path):
                continue
            # Sizes of tars are often the same: another shard may have come into its place.
            if one.path == path and (one.sample is None or sample_of(path, one.sample[0]) == one.sample):
                return True
            if one.mtime_ns == found.st_mtime_ns:
                return True
    except OSError:
        pass
    return False


def _was_sent(shard: bytes, written: Sequence[Written]) -> bool:
    if not written:
        return False
    try:
        pin = shard_paths.pin_of(shard)
    except ShardError:
        return False
    # An ETag that is a sum of the content is also that of a copy.
    return any(
        one.size == pin.size and (one.etag == pin.etag if one.etag else one.path == shard) for one in written
    )


def load_upper(place: OverlayDirectory, directory: int) -> UpperNode:
    """The names in the upper of an overlay, of which `directory` is a descriptor. Raises as `load` does.

    Where the kernel serves an overlay it has its marks in `user.overlay.`, and anything in `trusted.overlay.` is
    what root has copied into it: the mount does not heed that, and so it is refused here.
    """
    return load(directory, marks_of_root=not (place.is_ours and place.kernel_work.is_dir()))


def _has_changes(place: OverlayDirectory) -> bool:
    """True if the upper has more than the plain directories that a restored file leaves."""
    if not place.upper.is_dir():
        return False
    directory = os.open(place.upper, OPEN_DIRECTORY)
    try:
        waiting = [load_upper(place, directory)]
    finally:
        os.close(directory)
    while waiting:
        node = waiting.pop()
        if node.kind != DIRECTORY or node.opaque or node.origin is not None:
            return True
        waiting += node.children.values()
    return False


def hold(place: OverlayDirectory, make: bool = True, served_at: str | None = None) -> int:
    """Lock this overlay against other mounts and commits, as long as the returned descriptor is open.

    With `make` an empty directory becomes an overlay of ours; without, nothing is left in it: it may be an upper
    of the kernel's. A forked process inherits the lock: it ends with the last of them. `served_at` is the mount of
    it by the kernel that the caller is to guard. Raises OverlayBusy, which names the holder; OverlayUnusable where
    others can write to the directory: what lies in it says which shards a commit replaces.
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
    if served_at is not None and kernel_use.is_served_at(place.upper, served_at):
        return
    if not (place.kernel_work / "work").is_dir() or not kernel_use.is_used(place.upper):
        return
    found = kernel_use.mounted_on(place.upper)
    if found is None:
        raise OverlayBusy(
            f"the overlay {place.path} is in use: programs still have files open of a mount of it that has been "
            "ended; wait for them, or end them"
        )
    where = os.fsdecode(found.path)
    raise OverlayBusy(
        f"the overlay {place.path} is in use: the kernel serves it at {where}, without a guard; end that with: "
        f"wdsfs umount {shlex.quote(where)}"
    )


def _busy(place: OverlayDirectory, fd: int, ours: bool) -> OverlayBusy:
    """The error for an overlay whose lock, open as `fd`, another process has."""
    stranger = trust.foreign_holder(fd)
    if stranger is not None:
        return OverlayBusy(
            f"the overlay {place.path} cannot be locked, because {stranger} has locked it: end that process; "
            f"and let nobody else read it: chmod 0700 {shlex.quote(str(place.path))}"
        )
    holder = os.pread(fd, 20, 0).decode("ascii", "replace").strip() if ours else ""
    return OverlayBusy(f"the overlay {place.path} is in use{_holder_text(holder)}")


def _holder_text(holder: str) -> str:
    """The message for an overlay that is in use. `holder` is the pid in its lock, empty if there is none."""
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
    """The file to lock, and True if the holder's pid may be written to it."""
    if not place.is_bare and (make or os.listdir(place.path)):  # else nothing of ours belongs in there
        try:
            return trust.open_lock(place.lock), True
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
    return os.open(place.path, OPEN_DIRECTORY), False


@contextlib.contextmanager
def held(place: OverlayDirectory, served_at: str | None = None) -> Iterator[None]:
    """`hold` for the time of a block that makes no overlay of an empty directory."""
    fd = hold(place, make=False, served_at=served_at)
    try:
        yield
    finally:
        os.close(fd)


def state_of(place: OverlayDirectory) -> Path:
    """Where the journal of an in-place commit is: for an upper of the kernel's beside it, not in it.

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
    # A commit that was killed while it emptied such an upper leaves nothing by which the upper is recognised.
    return beside if place.is_bare or (beside / "commit.json").exists() else place.work


def _beside(place: OverlayDirectory) -> Path:
    return place.path.with_name(place.path.name + ".wdsfs-commit")


def clean(place: OverlayDirectory) -> None:
    """Remove the leftovers of a commit that was killed at its very end, or before its first shard.

    REQUIRES: the caller holds the overlay, and no commit of it is unfinished.
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
    """True if an in-place commit of this overlay was interrupted: then only `replace` may use it."""
    return (state_of(place) / "commit.json").exists()


def is_half_done(overlay: str | None) -> bool:
    """True if a mount has this overlay (None: no overlay), with an unfinished commit."""
    return overlay is not None and unfinished(OverlayDirectory(Path(overlay)))
