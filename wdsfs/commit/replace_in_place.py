"""Commit in place: new shards replace the old ones, and the overlay is emptied.

A journal makes this one step, also for a reader after a kill at any instant.

The journal, in the directory `state_of(place)`::

    commit.json   the plan, whole, written and synced before the first shard is replaced
    commit.log    a line for each shard, synced before it gets its name: which file that is (inode, size, mtime);
                  a last line when all are there
    committed/    the old upper on its way out

What the plan leaves out is in no shard, so it stays in the overlay, under its path.

While commit.json is there, only the commit that finishes it may use the overlay: some of its changes are in the
shards already, and names in the tree depend on them. For the same reason it is not planned anew.

`commit/commit_journal.py` has the plan as JSON, `commit/free_space.py` refuses a commit that would fill the disk.
Writes shards by way of `run.Runner`, and DIR; no FUSE. The caller holds the overlay (`overlay_directory.held`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import stat
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from wdsfs import trust
from wdsfs.commit.commit_journal import plan_to_json
from wdsfs.commit.free_space import refuse_without_space
from wdsfs.commit.output_names import refuse_foreign_link
from wdsfs.commit.pieces import NewMember
from wdsfs.commit.run import Runner
from wdsfs.commit.steps import NEW, REWRITE, Step
from wdsfs.dataset.indexing import NotIndexed
from wdsfs.errors import CommitError, ShardError, several
from wdsfs.overlay.overlay_directory import (
    OverlayDirectory,
    OverlaySettings,
    ShardSeen,
    clean,
    read_settings,
    state_of,
    unfinished,
    write_settings,
)
from wdsfs.overlay.upper_format import OPAQUE, OPAQUE_OF_ROOT
from wdsfs.storage.durable import named, new_file
from wdsfs.storage.identity import look

DONE, LEFT, CHANGED = "done", "left", "changed"  # states of a shard of an unfinished commit

log = logging.getLogger(__name__)


def is_half_done(overlay: str | None) -> bool:
    """`unfinished` for the overlay of a mount, if it has one."""
    return overlay is not None and unfinished(OverlayDirectory(Path(overlay)))


class Replacement:
    """An in-place commit of the overlay at `place`, which the caller holds.

    `emptied` is called with the further shards and the replaced ones when the overlay is new and the old one still
    there: a mount of it has to change over before the commit is over. With `check_space`, nothing is written that
    the file systems have no room for.
    """

    def __init__(
        self,
        place: OverlayDirectory,
        runner: Runner,
        emptied: Callable[[Sequence[bytes], Sequence[bytes]], None] = lambda _new, _published: None,
        check_space: bool = True,
    ) -> None:
        self.place, self.runner, self.disk = place, runner, runner.disk
        self.emptied, self.check_space = emptied, check_space
        self.directory = state_of(place)
        self.journal, self.log = self.directory / "commit.json", self.directory / "commit.log"
        # Ties the log to the journal: a power cut may bring the log of an earlier commit back.
        self.sum = _sum(self.journal.read_bytes()) if self.journal.exists() else ""
        self._lock = threading.Lock()
        self._kept = {one.path for one in runner.plan.left_out}  # files of the upper that are in no shard

    def begin(self) -> None:
        """Write the plan down. From here on the commit has to be finished."""
        if self.place.is_bare:
            self.runner.plan.upper = dict(_stamps(os.fsencode(self.place.path), b""))
        else:
            self.place.upper.mkdir(exist_ok=True)  # of an overlay that is an empty directory
        self._add_checksums()
        data = plan_to_json(self.runner.plan)
        self.sum = _sum(data)
        with named(os.fsencode(self.journal)):
            self._write_journal(data)

    def _write_journal(self, data: bytes) -> None:
        self.directory.mkdir(exist_ok=True)
        # Of an earlier commit, which was killed at its very end.
        shutil.rmtree(self.directory / "committed", ignore_errors=True)
        self._create_log()
        temporary = os.fsencode(self.directory / "commit.json.tmp")
        with new_file(self.disk, os.fsencode(self.journal), temporary=temporary) as fd:
            self.disk.write(fd, data)
            self.disk.sync(fd)
        self.disk.sync_directory(os.fsencode(self.directory))
        self.disk.sync_directory(os.fsencode(self.directory.parent))

    def _add_checksums(self) -> None:
        """Note what the shards are that give way, so that they are known again with another time or mode."""
        sources, lower = self.runner.plan.sources, self.runner.lower
        for number, source in sources.items():
            with contextlib.suppress(NotIndexed):  # it has changed this moment: that stops the commit anyway
                sources[number] = source._replace(checksum=lower.record(number).checksum())

    def _create_log(self) -> None:
        """An empty log, on disk: a line that is synced later must not be lost with the name of its file."""
        fd = trust.open_file(self.log, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.ftruncate(fd, 0)
            self.disk.sync(fd)
        finally:
            os.close(fd)
        self.disk.sync_directory(os.fsencode(self.directory))

    def finish(self) -> list[Step]:
        """Replace what is not replaced yet, then empty the overlay; returns the steps that were done now.

        Raises CommitError when somebody else has changed a shard meanwhile, and when there is no room.
        """
        lines = self._lines()
        states = self._states(lines)
        if _are_published(lines):
            self._empty(_done(states))
            return []
        changed = [os.fsdecode(step.output.target) for step, state in states if state == CHANGED]
        if changed and not lines:
            self.disk.remove(os.fsencode(self.journal))
            raise CommitError(
                f"{several(changed)}: changed by somebody else, or gone, since the commit was begun. Nothing had "
                "been replaced, so the commit is undone: repeat the command"
            )
        if changed:
            raise CommitError(
                f"{several(changed)}: changed by somebody else, or gone, since the commit was begun, so it cannot "
                "be finished. Use --abandon instead of --in-place to end it: shards that are replaced stay so, "
                "the changes of the others stay in the overlay, for another commit"
            )
        left = [step for step, state in states if state == LEFT]
        self.runner.lower.release()  # a shard that is open keeps its space when it is replaced
        try:
            if self.check_space:
                refuse_without_space(left, self.runner.jobs)
            self.runner.each(left, self._replace)
        except BaseException:
            if not self._lines():  # nothing has been replaced: as if it had not been begun
                self.disk.remove(os.fsencode(self.journal))
            raise
        self._log({"published": True})
        self._empty(self.runner.plan.steps)
        return left

    # --- the shards

    def _replace(self, step: Step) -> None:
        target = step.output.target
        if step.number is not None:
            refuse_foreign_link(self._path(step))
        replaces = os.stat(target) if step.action == REWRITE else None

        def tell(found: os.stat_result) -> None:
            if step.number is not None and look(target) != self.runner.plan.sources[step.number].fingerprint:
                raise CommitError(f"{os.fsdecode(target)} was changed by somebody else meanwhile")
            self._log({"target": os.fsdecode(target), "file": [found.st_ino, found.st_size, found.st_mtime_ns]})

        self.runner.writer.publish(step.output, replaces, tell)

    def _states(self, lines: Sequence[dict[str, Any]]) -> list[tuple[Step, str]]:
        """The state of each step, by what the log says of its shard."""
        logged: dict[str, list[dict[str, Any]]] = {}
        for line in lines:
            logged.setdefault(line.get("target", ""), []).append(line)
        return [
            (step, self._state(step, logged.get(os.fsdecode(step.output.target), [])))
            for step in self.runner.plan.steps
        ]

    def _state(self, step: Step, lines: Sequence[dict[str, Any]]) -> str:
        """Whether a shard is there that was to be written, or what it was before, or something else."""
        target = step.output.target
        try:
            found = os.stat(target)
        except FileNotFoundError:
            return LEFT if step.action == NEW else CHANGED
        # Not its time: somebody may have touched it. While it was written the old shard had another inode number.
        file = [found.st_ino, found.st_size]
        if any(line["file"][:2] == file for line in lines):
            return DONE
        return LEFT if step.number is not None and self._is_source(step.number, target) else CHANGED

    def _is_source(self, number: int, target: bytes) -> bool:
        """Whether a shard is what it was when the commit was begun, so that the plan can be carried out.

        The plan is of the places and names of members. Where these are what they were, it holds: what else has
        been written there meanwhile goes into the new shard, as if the commit were planned now.
        """
        source, lower = self.runner.plan.sources[number], self.runner.lower
        try:
            if look(target) == source.fingerprint:
                return True
            record = lower.with_index(lambda: lower.record(number))
        except ShardError:
            return False
        if record.checksum() != source.checksum:
            return False
        log.warning("%s: has another time, mode or place than before, and the same members", os.fsdecode(target))
        size, mtime_ns, identity = record.fingerprint
        self.runner.plan.sources[number] = source._replace(fingerprint=(size, mtime_ns, identity))
        return True

    # --- the log

    def _log(self, line: dict[str, Any]) -> None:
        with self._lock, named(os.fsencode(self.log)):
            fd = trust.open_file(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                self.disk.write(fd, json.dumps({**line, "commit": self.sum}).encode() + b"\n")
                self.disk.sync(fd)
            finally:
                os.close(fd)

    def _lines(self) -> list[dict[str, Any]]:
        """The lines of this commit; one that a kill cut short says nothing, for nothing was done behind it."""
        lines = []
        with contextlib.suppress(FileNotFoundError):
            for text in self.log.read_bytes().split(b"\n"):
                with contextlib.suppress(ValueError):
                    line = json.loads(text)
                    if line["commit"] == self.sum:
                        lines.append(line)
        return lines

    # --- giving up

    def abandon(self, merged: bool) -> tuple[list[Step], Path | None]:
        """End the commit where it is: returns the steps that are done, and where the overlay was put, if it was.

        What is in the shards goes from the overlay, the changes of the other shards stay. In a merged tree nobody
        can know whose they are: names depend on all shards. There the whole upper is put aside, unless
        nothing was done. When all shards are there, only the overlay is left to be emptied. Can be repeated from
        any point.
        """
        lines = self._lines()
        done = _done(self._states(lines))
        if _are_published(lines):
            self._empty(done)
            return list(self.runner.plan.steps), None
        upper = self.place.path if self.directory != self.place.work else self.place.path / "upper"
        aside = None
        if merged and lines:
            aside = upper.with_name(f"{upper.name}.abandoned-{self.sum[:8]}")
            self._put_aside(upper, aside)
        else:
            for step in done:
                self._take_out(upper, step)
        self.disk.sync_directory(os.fsencode(upper))
        settings = read_settings(self.place)
        if settings is not None:
            write_settings(self.place, renewed(settings, {self._path(step) for step in done}))
        self.emptied(_further(done), self._replaced(done))
        self.disk.remove(os.fsencode(self.journal))
        self.disk.sync_directory(os.fsencode(self.directory))
        clean(self.place)
        return done, aside

    def _replaced(self, steps: Sequence[Step]) -> list[bytes]:
        """The shards that were replaced, under the paths by which the set has them."""
        return [self._path(step) for step in steps if step.number is not None]

    def _path(self, step: Step) -> bytes:
        return self.runner.plan.sources[step.number].path if step.number is not None else b""

    def _put_aside(self, upper: Path, aside: Path) -> None:
        aside.mkdir(exist_ok=True)
        for name in sorted(os.listdir(upper)):
            self.disk.rename(os.fsencode(upper / name), os.fsencode(aside / name))
        self.disk.sync_directory(os.fsencode(aside))

    def _take_out(self, upper: Path, step: Step) -> None:
        """Remove from an upper what a step has brought into the shards: all below the directory of its shard, or
        the files that are in a further one."""
        if step.number is not None:
            self._remove_below(os.fsencode(upper), self.runner.lower.shards[step.number].name)
            return
        for piece in step.output.pieces:
            if isinstance(piece, NewMember):
                path = os.path.join(os.fsencode(upper), piece.path)
                with contextlib.suppress(FileNotFoundError):
                    self.disk.remove(path)
                with contextlib.suppress(OSError):  # not empty, or the upper itself
                    while (path := os.path.dirname(path)) != os.fsencode(upper):
                        os.rmdir(path)

    def _remove_below(self, upper: bytes, name: bytes) -> None:
        self._remove_planned(upper, b"", only=name)

    # --- the overlay

    def _empty(self, done: Sequence[Step]) -> None:
        """Take away what was brought into the shards. Can be repeated from any point.

        `done` are the steps whose shards are still the ones that were written.
        """
        if self.directory == self.place.work:
            self._exchange_upper()
        else:
            self._remove_planned(os.fsencode(self.place.path), b"")
            self.disk.sync_directory(os.fsencode(self.place.path))
        self.place.outputs.unlink(missing_ok=True)  # what they were written from is no longer in the overlay
        self.emptied(_further(done), self._replaced(done))
        self.disk.remove(os.fsencode(self.journal))  # this ends the commit; the rest is only in the way
        self.disk.sync_directory(os.fsencode(self.directory))
        self.disk.remove(os.fsencode(self.log))
        if self.directory == self.place.work:
            self._remove_tree(self.directory / "committed")
        else:
            self._remove_tree(self.directory)

    def _exchange_upper(self) -> None:
        old, upper = self.directory / "committed", self.place.path / "upper"
        if not old.exists():
            self.disk.rename(os.fsencode(upper), os.fsencode(old))
        self._make_like(os.fsencode(upper), os.fsencode(old))
        self._move_kept_back(os.fsencode(old), os.fsencode(upper))
        # Both, before the journal goes: with the old upper back and no journal all would be done a second time.
        self.disk.sync_directory(os.fsencode(self.place.path))
        self.disk.sync_directory(os.fsencode(self.directory))
        settings = read_settings(self.place)
        if settings is not None:
            write_settings(self.place, renewed(settings))

    def _make_like(self, directory: bytes, old: bytes) -> None:
        """Make a directory with the mode and owner of another, if it is not there. It is never opaque."""
        if not os.path.isdir(directory):
            like = os.stat(old)
            self.disk.make_directory(directory)
            os.chmod(directory, stat.S_IMODE(like.st_mode))
            with contextlib.suppress(PermissionError):
                os.chown(directory, like.st_uid, like.st_gid)

    def _move_kept_back(self, old: bytes, upper: bytes) -> None:
        """Bring what is in no shard from the old upper into the new one, on disk."""
        directories = set()
        for path in sorted(self._kept):
            if not os.path.lexists(os.path.join(old, path)):
                continue  # it was moved before a kill
            inner = b""
            for name in path.split(b"/")[:-1]:
                directories.add(os.path.join(upper, inner))
                inner = os.path.join(inner, name)
                self._make_like(os.path.join(upper, inner), os.path.join(old, inner))
            directories.add(os.path.join(upper, inner))
            self.disk.rename(os.path.join(old, path), os.path.join(upper, path))
        for directory in sorted(directories):
            self.disk.sync_directory(directory)

    def _remove_planned(self, directory: bytes, path: bytes, only: bytes | None = None) -> None:
        """Remove from an upper what is in the shards. What is in none stays, and what came into an upper of the
        kernel's since the commit began.

        With `only`, just what has this name in the directory, and what is in it.
        """
        with os.scandir(directory) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if only is not None and entry.name != only:
                    continue
                inner = path + b"/" + entry.name if path else entry.name
                found = entry.stat(follow_symlinks=False)
                if entry.is_dir(follow_symlinks=False):
                    self._remove_planned(entry.path, inner)
                    try:
                        os.rmdir(entry.path)
                    except OSError:  # not empty: something stays; what went must not come back
                        _make_transparent(entry.path)
                        self.disk.sync_directory(entry.path)
                elif inner not in self._kept and self._was_planned(inner, found):
                    self.disk.remove(entry.path)

    def _was_planned(self, path: bytes, found: os.stat_result) -> bool:
        """Whether a file was in the upper when the commit began: our own overlay nobody else changes."""
        return self.directory == self.place.work or self.runner.plan.upper.get(path) in _stamps_of(found)

    def _remove_tree(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _are_published(lines: Sequence[dict[str, Any]]) -> bool:
    """Whether the log says that all shards are there: what happens to them later is no matter of the commit."""
    return any("published" in line for line in lines)


def _done(states: Sequence[tuple[Step, str]]) -> list[Step]:
    return [step for step, state in states if state == DONE]


def _further(steps: Sequence[Step]) -> list[bytes]:
    return [step.output.target for step in steps if step.action == NEW]


def _sum(journal: bytes) -> str:
    return hashlib.blake2b(journal, digest_size=16).hexdigest()


def _stamps(directory: bytes, path: bytes) -> Iterator[tuple[bytes, tuple[int, int]]]:
    with os.scandir(directory) as entries:
        for entry in entries:
            inner = path + b"/" + entry.name if path else entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from _stamps(entry.path, inner)
            else:
                found = entry.stat(follow_symlinks=False)
                yield inner, _stamps_of(found)[found.st_nlink > 1]


def _stamps_of(found: os.stat_result) -> tuple[tuple[int, int], tuple[int, int]]:
    """What tells a file from a later one. That of ctime is surer; but for whoever has several names, such as the
    kernel's whiteouts, which are all one file, it is another when one of them goes."""
    return (found.st_ino, found.st_ctime_ns), (found.st_ino, found.st_mtime_ns)


def _make_transparent(directory: bytes) -> None:
    """Let a directory of an upper that stays show what is in the shards now."""
    for name in (OPAQUE, OPAQUE_OF_ROOT):
        with contextlib.suppress(OSError):  # it has no such attribute; that of root only root can see and remove
            if os.getxattr(directory, name) == b"y":
                os.removexattr(directory, name)


def renewed(settings: OverlaySettings, paths: Collection[bytes] | None = None) -> OverlaySettings:
    """The settings with the shards as they are now, or just those with these paths.

    A shard that cannot be read stays what it was: it may be missing, or be gone since it was written.
    """

    def seen(one: ShardSeen) -> ShardSeen:
        with contextlib.suppress(ShardError):
            if paths is None or one.path in paths:
                return replace(one, fingerprint=look(one.path))
        return one

    return replace(settings, shards=tuple(map(seen, settings.shards)))
