"""Opens the shards of a mount by their paths; refuses files that other users may have put there.

A mount by root, or one with `allow_other`, reads with the rights of its mounter on behalf of users with fewer
rights. Users who can write to the directory of a shard could put a link there to a file that only the mounter may
read. It may be a hard link, too. So at the mount a file is refused if a link of such a user leads to it
(`trust.foreign_link`, as in mounts by the kernel). The mount remembers owner, place and inode of each file. Later
a file that is still the same is accepted at once. A new file has to be at the same place, belong to the same owner
or to the mounter, and not be private. Where only trusted users can write (`trust`), these checks are skipped.

A file is checked through the descriptor that is then read, because a path can change between check and open.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import stat
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from wdsfs import source, trust
from wdsfs.door.shard_door import DOOR, OpenShard
from wdsfs.door.urls import is_remote
from wdsfs.errors import MissingShard, RefusedShard, UnreadableShard
from wdsfs.shards import Fingerprint

log = logging.getLogger(__name__)

_LOOK = os.O_PATH | os.O_CLOEXEC
_NOBODY = -1  # the owner of a directory that was not there


class Access:
    """The files and remote shards at paths, unchecked."""

    def look(self, path: bytes) -> Fingerprint:
        """Return the fingerprint of the file at `path` now. Raises MissingShard, UnreadableShard, RefusedShard."""
        return DOOR.look(path)

    def open(self, path: bytes) -> OpenShard:
        """Return the file at `path`, open. Raises MissingShard, UnreadableShard, RefusedShard."""
        return DOOR.open_shard(path)

    def renewed(self, published: Iterable[bytes], further: Iterable[bytes]) -> Access:
        """Return the same after a commit that has replaced the files `published` and added the files `further`."""
        return self

    def grown(self, further: Iterable[bytes]) -> Access:
        """Return the same with files that came after the mount."""
        return self

    def to_json(self) -> list[list[Any]] | None:
        """Return the state with which another process of this user refuses the same files, or None."""
        return None


class _SeenFile(NamedTuple):
    owner: int
    place: bytes  # the path without links
    device: int
    inode: int


class GuardedAccess(Access):
    """Opens files by their paths, unless another user may have put a file there that the mount must not show.

    Made at the time of the mount. Paths that are not known then are treated as in `Access`. So are remote shards:
    only users who can write to the store decide what the mounter's credentials bring.
    """

    def __init__(self, paths: Iterable[bytes]) -> None:
        self._seen: dict[bytes, _SeenFile] = {}
        self._known: dict[bytes, Fingerprint] = {}  # of accepted files, with the inode number
        self._reasons: dict[bytes, str] = {}
        local = sorted((path for path in paths if not is_remote(path)), key=_directory)
        for directory, inside in itertools.groupby(local, key=_directory):
            self._note_files(directory, list(inside))

    def _note_files(self, directory: bytes, paths: Sequence[bytes]) -> None:
        """Note the files at these paths, which are all in this directory."""
        try:
            fd = os.open(directory, _LOOK | os.O_DIRECTORY)
        except OSError:  # it may come later
            place = os.path.realpath(directory)
            self._seen |= {path: _absent_file(os.path.join(place, os.path.basename(path))) for path in paths}
            return
        try:
            place, is_foreign = _read_place(fd), trust.has_foreign_links(directory, fd)
            for path in paths:
                name = os.path.basename(path)
                try:
                    self._note_file(path, os.path.join(place, name), name, fd, is_foreign)
                except OSError:
                    target = os.path.realpath(path) if os.path.islink(path) else os.path.join(place, name)
                    self._seen[path] = _absent_file(target)
        finally:
            os.close(fd)

    def _note_file(self, path: bytes, place: bytes, name: bytes, directory: int, is_foreign: bool) -> None:
        state, expected, refusal = os.stat(name, dir_fd=directory, follow_symlinks=False), place, None
        if is_foreign or stat.S_ISLNK(state.st_mode) or trust.is_another_name(state):
            fd = os.open(path, _LOOK)
            try:
                state, place, refusal = os.fstat(fd), _read_place(fd), trust.foreign_link(path, fd)
            finally:
                os.close(fd)
        if refusal is None:
            self._seen[path] = _SeenFile(state.st_uid, place, state.st_dev, state.st_ino)
            self._known[path] = Fingerprint.numbered(state)
        else:
            self._seen[path], self._reasons[path] = _absent_file(expected), refusal

    @property
    def refused(self) -> list[str]:
        """The reasons why files are refused."""
        return list(self._reasons.values())

    def look(self, path: bytes) -> Fingerprint:
        fingerprint = DOOR.look(path)
        if self._known.get(path) == fingerprint or path not in self._seen:
            return fingerprint
        try:
            fd = os.open(path, _LOOK)
        except FileNotFoundError:
            raise MissingShard(f"{os.fsdecode(path)}: the shard is gone") from None
        except OSError as error:
            raise UnreadableShard(f"{os.fsdecode(path)}: {error.strerror}") from None
        try:
            return self._require(path, fd)
        finally:
            os.close(fd)

    def open(self, path: bytes) -> OpenShard:
        if is_remote(path):
            return super().open(path)
        fd = source.open_shard(path)
        try:
            self._require(path, fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def renewed(self, published: Iterable[bytes], further: Iterable[bytes]) -> Access:
        # Only files that the commit has written are checked again: refused files stay refused.
        new = GuardedAccess(further)
        new._seen = {**new._seen, **self._seen}
        new._known = {**new._known, **self._known}
        new._reasons = dict(self._reasons)
        for path in published:
            seen = new._seen.get(path)
            with contextlib.suppress(OSError):  # the file is gone again: keep the earlier state
                # A shard that a commit wrote is no link, and has no second name.
                if seen and stat.S_ISREG((state := os.lstat(seen.place)).st_mode) and state.st_nlink == 1:
                    new._seen[path] = _SeenFile(state.st_uid, seen.place, state.st_dev, state.st_ino)
                    new._known[path] = Fingerprint.numbered(state)
        return new

    def grown(self, further: Iterable[bytes]) -> Access:
        new = GuardedAccess(())
        new._seen, new._known, new._reasons = dict(self._seen), dict(self._known), dict(self._reasons)
        for path in further:
            if not is_remote(path) and path not in new._seen:
                directory, _, name = path.rpartition(b"/")
                new._seen[path] = _absent_file(os.path.realpath(directory or b"/").rstrip(b"/") + b"/" + name)
        return new

    def to_json(self) -> list[list[Any]] | None:
        return [
            [os.fsdecode(path), seen.owner, os.fsdecode(seen.place), seen.device, seen.inode]
            for path, seen in self._seen.items()
        ]

    def _require(self, path: bytes, fd: int) -> Fingerprint:
        """Return the fingerprint of an opened file. Raises RefusedShard for one that the mount must not show."""
        state = os.fstat(fd)
        numbered, seen = Fingerprint.numbered(state), self._seen.get(path)
        if seen is None or self._known.get(path) == numbered:
            return Fingerprint.of(state)
        text = _refusal(path, fd, state, seen)
        if text is not None:
            if self._reasons.get(path) != text:
                log.error("%s", text)
            self._reasons[path] = text
            raise RefusedShard(text)
        self._known[path] = numbered
        self._reasons.pop(path, None)
        return Fingerprint.of(state)


def _directory(path: bytes) -> bytes:
    return os.path.dirname(path)


def _read_place(fd: int) -> bytes:
    """Return the path of an open file, without links."""
    return os.readlink(b"/proc/self/fd/%d" % fd)


def _refusal(path: bytes, fd: int, state: os.stat_result, seen: _SeenFile) -> str | None:
    """Return the reason why an open file must not be shown; None if it may be. Raises UnreadableShard."""
    try:
        why = _objection(state, _read_place(fd), seen)
        if why is None or trust.holds(path):
            return trust.foreign_link(path, fd)
    except OSError as error:
        raise UnreadableShard(f"{os.fsdecode(path)}: {error.strerror}") from None
    return (
        f"{os.fsdecode(path)} is refused: {why}, and other users can write there; if this is "
        "right, mount again, with --trust for them"
    )


def _absent_file(place: bytes) -> _SeenFile:
    """Return the file that is accepted where none was at the mount.

    Semantics decision: the owner of the directory may put a file there.
    """
    return _SeenFile(_owner(place.rpartition(b"/")[0] or b"/"), place, 0, 0)


def _objection(state: os.stat_result, place: bytes, seen: _SeenFile) -> str | None:
    """Return the reason why another file than the one that was mounted may not be shown; None if it may be."""
    since = "since the mount " if seen.inode else ""
    if place.removesuffix(b" (deleted)") != seen.place:
        return f"{since}a link leads from there to {os.fsdecode(place)}"
    mounter, named = os.geteuid(), trust.trusted().users
    owner = trust.user_name(state.st_uid)
    if state.st_uid not in (mounter, seen.owner) and state.st_uid not in named:
        return f"{since}it belongs to another user ({owner})"
    # Another name of a file, or the file itself moved there: harmless for a file that everybody may read.
    another = (state.st_dev, state.st_ino) != (seen.device, seen.inode)
    private = not state.st_mode & stat.S_IROTH
    if another and private and (state.st_uid == mounter or state.st_nlink > 1):
        return f"{since}it is another file of {owner}'s, which not everybody may read"
    return None


def access_from_json(rows: Iterable[Sequence[Any]] | None) -> Access:
    """Return the same refusals as in the process that made `rows` (`Access.to_json`)."""
    if rows is None:
        return Access()
    access = GuardedAccess(())
    for path, owner, place, device, inode in rows:
        access._seen[os.fsencode(path)] = _SeenFile(owner, os.fsencode(place), device, inode)
    return access


def _owner(directory: bytes) -> int:
    try:
        return os.stat(directory).st_uid
    except OSError:
        return _NOBODY


def access_of(paths: Iterable[bytes], shared: bool, *, allow_missing: bool = False) -> Access:
    """Return the access of a mount to these files. `shared`: other users may see it, or its user is root.

    Raises RefusedShard for a file that such a mount must not show, unless some may be missing.
    """
    if not shared or trust.trusted().everyone:
        return Access()
    guarded = GuardedAccess(paths)
    if guarded.refused and not allow_missing:
        raise RefusedShard(guarded.refused[0])
    return guarded


def refuse_foreign_lists(files: Iterable[str], shared: bool) -> None:
    """Raise RefusedShard for a list of shards whose path has a link that is refused for a shard.

    `files` are paths and URLs. The content of a list is not judged here: the user has chosen the list.
    """
    access_of((os.fsencode(os.path.abspath(file)) for file in files if "://" not in file and file != "-"), shared)
