"""Commit in place: new shards replace the old ones by a journal, and the overlay is emptied.

A journal makes the commit atomic: after a kill at any moment you can finish or abandon it.

The journal, in the directory `work` of the overlay::

    commit.json   the plan, whole, written and synced before the first shard is replaced
    commit.log    a line for each shard, synced before the shard gets its name: its inode, size, mtime;
                  of one in a store the size and MD5; a last line when all are there
    commit.log.*  the same line for one shard each, written by a worker of a cluster that sends it to a store
    committed/    the old upper while it is being removed

Files that the plan leaves out are in no shard, so they stay in the overlay, under the same paths.

While commit.json exists, only the commit that finishes it may use the overlay: some changes are in the shards
already, and names in the tree depend on them. For the same reason the commit is not planned again.

Shards are written by `runner.Runner`. The caller holds the overlay (`overlay_directory.held`).
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
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from wdsfs import trust
from wdsfs.door.shard_door import DOOR
from wdsfs.door.urls import is_remote
from wdsfs.durable import named, new_file
from wdsfs.errors import MALFORMED, CommitError, ShardError, StaleShard, several
from wdsfs.formats import Format, OtherVersion
from wdsfs.overlay.overlay_directory import (
    OverlayDirectory,
    OverlaySettings,
    ShardSeen,
    clean,
    read_settings,
    write_settings,
)
from wdsfs.overlay.upper_format import OPAQUE
from wdsfs.packing.cluster_units import ObjectNote, Publication
from wdsfs.packing.plan import (
    NEW,
    REWRITE,
    CopiedRange,
    NewMember,
    Output,
    Piece,
    Plan,
    Remark,
    SourceShard,
    Step,
    Zeros,
    refuse_foreign_link,
)
from wdsfs.packing.runner import Runner, refuse_without_space
from wdsfs.shards import Fingerprint, lasting_number
from wdsfs.tree.indexing import NotIndexed, indexed
from wdsfs.tree.shard_set import ShardSet

JOURNAL = Format(
    "an unfinished commit",
    (2,),
    "finish it with the wdsfs that began it; nothing was changed",
)


def read_plan(place: OverlayDirectory, lower: ShardSet) -> Plan:
    """Return the plan of an unfinished commit of this set. Raises CommitError."""
    path = place.work / "commit.json"
    try:
        plan = plan_from_json(path.read_bytes())
    except OtherVersion as error:
        raise CommitError(f"{path} {error}") from None
    except (OSError, *MALFORMED) as error:
        way_out = "put it back from a copy, or move it away and commit again: the changes are kept"
        raise CommitError(f"{path} is damaged ({error!r}): {way_out}") from None
    for number, source in plan.sources.items():
        if number >= len(lower) or lower.shards[number].path != source.path:
            text = f"shard {number + 1} of the set was {os.fsdecode(source.path)} when the commit was begun"
            raise CommitError(f"{text}: name the same SHARDS in the same order")
    return plan


def plan_to_json(plan: Plan) -> bytes:
    """Return the plan as `plan_from_json` reads it."""
    steps = [
        {
            "target": os.fsdecode(step.target),
            "action": step.action,
            "number": step.number,
            "samples": step.samples,
            "pieces": [_piece_to_json(piece) for piece in step.output.pieces],
        }
        for step in plan.steps
    ]
    sources = {
        number: [os.fsdecode(item.path), item.fingerprint, item.checksum] for number, item in plan.sources.items()
    }
    left_out = [[os.fsdecode(item.path), item.reason] for item in plan.left_out]
    about = {"version": JOURNAL.version, "sources": sources, "steps": steps, "left_out": left_out}
    about["upper"] = {}  # unused; earlier releases that read this version need it
    return json.dumps(about, indent=1).encode() + b"\n"


def plan_from_json(data: bytes) -> Plan:
    """Return the plan. Raises one of MALFORMED for JSON that `plan_to_json` does not write."""
    about = json.loads(data)
    JOURNAL.check(about["version"])
    plan = Plan()
    for number, (path, fingerprint, checksum) in about["sources"].items():
        plan.sources[int(number)] = SourceShard(os.fsencode(path), Fingerprint(*fingerprint), checksum)
    plan.left_out = [Remark(os.fsencode(path), reason) for path, reason in about["left_out"]]
    for item in about["steps"]:
        output = Output(os.fsencode(item["target"]), [_piece_from_json(piece) for piece in item["pieces"]])
        plan.steps.append(Step(output, item["action"], item["number"], item["samples"]))
    return plan


def _piece_to_json(piece: Piece) -> list[Any]:
    if isinstance(piece, CopiedRange):
        return ["run", *piece]
    if isinstance(piece, Zeros):
        return ["zeros", *piece]
    assert isinstance(piece, NewMember)
    common = [key.decode() for key in piece.common]
    return ["new", os.fsdecode(piece.name), os.fsdecode(piece.path), piece.size, piece.mtime_ns, common]


def _piece_from_json(piece: list[Any]) -> Piece:
    kind, *rest = piece
    if kind == "run":
        return CopiedRange(*rest)
    if kind == "zeros":
        return Zeros(*rest)
    name, path, size, mtime_ns, common = rest
    return NewMember(os.fsencode(name), os.fsencode(path), size, mtime_ns, tuple(key.encode() for key in common))


DONE, LEFT, CHANGED = "done", "left", "changed"  # states of a shard of an unfinished commit

log = logging.getLogger(__name__)


class Replacement:
    """An in-place commit of the overlay at `place`, which the caller holds.

    `show` is called with the new shards and the replaced ones when the new overlay exists and the old one is not
    yet removed: a mount has to change over before the commit ends.
    """

    def __init__(
        self,
        place: OverlayDirectory,
        runner: Runner,
        show: Callable[[Sequence[bytes], Sequence[bytes]], None] = lambda _new, _replaced: None,
    ) -> None:
        self.place, self.runner, self.disk = place, runner, runner.disk
        self.show = show
        self.directory = place.work
        self.journal, self.log = self.directory / "commit.json", self.directory / "commit.log"
        # Ties the log to the journal: a power cut may bring the log of an earlier commit back.
        self.sum = _sum(self.journal.read_bytes()) if self.journal.exists() else ""
        self._lock = threading.Lock()
        self._left_out = {
            remark.path for remark in runner.plan.left_out
        }  # files of the upper that are in no shard

    def begin(self) -> None:
        """Write the plan to the journal. From here on the commit has to be finished or abandoned."""
        self.place.upper.mkdir(exist_ok=True)  # missing in an overlay that is an empty directory
        self._add_checksums()
        data = plan_to_json(self.runner.plan)
        self.sum = _sum(data)
        with named(os.fsencode(self.journal)):
            self._write_journal(data)

    def _write_journal(self, data: bytes) -> None:
        self.directory.mkdir(exist_ok=True)
        # Left by an earlier commit that was killed at its very end.
        shutil.rmtree(self.directory / "committed", ignore_errors=True)
        self._create_log()
        temporary = os.fsencode(self.directory / "commit.json.tmp")
        with new_file(self.disk, os.fsencode(self.journal), temporary=temporary) as fd:
            self.disk.write(fd, data)
            self.disk.sync(fd)
        self.disk.sync_directory(os.fsencode(self.directory))
        self.disk.sync_directory(os.fsencode(self.directory.parent))

    def _add_checksums(self) -> None:
        """Add checksums of the shards to be replaced, so that they are recognised after a new time or mode."""
        sources, lower = self.runner.plan.sources, self.runner.lower
        for number, source in sources.items():
            with contextlib.suppress(NotIndexed):  # the shard has just changed, which stops the commit later
                sources[number] = source._replace(checksum=lower.record(number).checksum())

    def _create_log(self) -> None:
        """Make an empty log, and sync its name: later synced lines must not be lost with the name of the file."""
        fd = trust.open_file(self.log, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.ftruncate(fd, 0)
            self.disk.sync(fd)
        finally:
            os.close(fd)
        self.disk.sync_directory(os.fsencode(self.directory))

    def finish(self) -> list[Step]:
        """Replace the remaining shards, then empty the overlay; return the steps that were done now.

        Raises CommitError if another program has changed a shard meanwhile, or if there is no room.
        """
        lines = self._lines()
        states = self._states(lines)
        if _are_published(lines):
            self._empty(_done(states))
            return []
        changed = [os.fsdecode(step.target) for step, state in states if state == CHANGED]
        if changed and not lines:
            self.disk.remove(os.fsencode(self.journal))
            raise CommitError(
                f"{several(changed)}: changed by another program, or removed, since the commit was begun; no "
                "shard was replaced, so the commit is undone: repeat the command"
            )
        if changed:
            raise CommitError(
                f"{several(changed)}: changed by another program, or removed, since the commit was begun, so it "
                "cannot be finished: end it by --abandon instead of --in-place; new shards stay, and the changes "
                "of the others stay in the overlay, for another commit"
            )
        left = [step for step, state in states if state == LEFT]
        self.runner.lower.release()  # a shard that is open keeps its space when it is replaced
        try:
            if self.runner.space_check:
                refuse_without_space(left, self.runner.together)
                self.runner.refuse_without_staging(left)
            if self.runner.cluster:
                self.runner.cluster.each(left, self.runner.prepare, self._publication, self._note)
            else:
                self.runner.each(left, self._replace)
        except BaseException as error:
            if not self._lines():  # nothing has been replaced: undo the beginning
                self.disk.remove(os.fsencode(self.journal))
            elif isinstance(error, StaleShard):
                text = "or use --abandon instead of --in-place to give the commit up"
                raise CommitError(f"{error}; {text}") from None
            raise
        self._log({"published": True})
        self._empty(self.runner.plan.steps)
        return left

    # --- the shards

    def _replace(self, step: Step) -> None:
        if step.is_remote:
            self._replace_object(step)
        else:
            self.runner.writer.publish(step.output, *self._publication(step))

    def _publication(self, step: Step) -> Publication:
        target = step.target
        if step.number is not None:
            refuse_foreign_link(self._path(step))
        replaces = os.stat(target) if step.action == REWRITE else None

        def log(status: os.stat_result) -> None:
            source = None if step.number is None else self.runner.plan.sources[step.number]
            if source is not None and Fingerprint.at(target) != source.fingerprint:
                raise CommitError(f"{os.fsdecode(target)} was changed by another program meanwhile")
            self._log({"target": os.fsdecode(target), "file": [status.st_ino, status.st_size, status.st_mtime_ns]})

        return Publication(replaces, log)

    def _replace_object(self, step: Step) -> None:
        target = os.fsdecode(step.target)

        def log(size: int, digest: str) -> None:
            self._log({"target": target, "object": [size, digest]})

        self.runner.objects.replace(step.output, self._replaced_object(step), log)

    def _replaced_object(self, step: Step) -> Fingerprint | None:
        return None if step.number is None else self.runner.plan.sources[step.number].fingerprint

    def _note(self, step: Step) -> ObjectNote:
        """Return the file beside the log in which a worker notes the shard that it sends."""
        name = f"commit.log.{_sum(step.target)}"
        return ObjectNote(os.fsencode(self.directory / name), self.sum, self._replaced_object(step))

    def _states(self, lines: Sequence[dict[str, Any]]) -> list[tuple[Step, str]]:
        """Return the state of each step, by the lines of the log about its shard."""
        logged: dict[str, list[dict[str, Any]]] = {}
        for line in lines:
            logged.setdefault(line.get("target", ""), []).append(line)
        remote = [path for step in self.runner.plan.steps if is_remote(path := step.target)]
        if remote:
            self.runner.objects.look(remote)
        return [
            (step, self._state(step, logged.get(os.fsdecode(step.target), []))) for step in self.runner.plan.steps
        ]

    def _state(self, step: Step, lines: Sequence[dict[str, Any]]) -> str:
        """Return the state of a step: DONE for the new shard, LEFT for the old one, CHANGED for anything else."""
        is_new = self._is_new_shard(step, lines)
        if is_new is None:
            return LEFT if step.action == NEW else CHANGED
        if is_new:
            return DONE
        return LEFT if step.number is not None and self._is_source(step.number, step.target) else CHANGED

    def _is_new_shard(self, step: Step, lines: Sequence[dict[str, Any]]) -> bool | None:
        """Return True if the target is the written shard in the log; None if no file is there."""
        if step.is_remote:
            objects = self.runner.objects
            if not objects.exists(step.target):
                return None
            return any(objects.is_written(step.target, *line["object"]) for line in lines)
        try:
            status = os.stat(step.target)
        except FileNotFoundError:
            return None
        # Where inode numbers last, the time is not compared: another program may have touched the file. The new
        # file cannot have the number of the old shard, which existed while the new one was written.
        own = [status.st_ino, status.st_size, status.st_mtime_ns]
        compared = slice(0, 2) if lasting_number(status) == status.st_ino else slice(1, 3)
        return any(line["file"][compared] == own[compared] for line in lines)

    def _is_source(self, number: int, target: bytes) -> bool:
        """Return True if a shard is still the shard of the plan.

        The plan depends on the places and names of members only. If these are the same it is still valid, and
        other changes since then go into the new shard, as if the commit were planned now.
        """
        source, lower = self.runner.plan.sources[number], self.runner.lower
        try:
            if DOOR.look(target) == source.fingerprint:
                return True
            record = indexed(lower.record, number)
        except ShardError:
            return False
        if record.checksum() != source.checksum:
            return False
        log.warning("%s: has another time, mode or place than before, and the same members", os.fsdecode(target))
        self.runner.plan.sources[number] = source._replace(fingerprint=record.fingerprint)
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
        """Return the lines of this commit, without one that a kill cut short: nothing was done after it."""
        lines = []
        for file in [self.log, *sorted(self.directory.glob("commit.log.*"))]:
            with contextlib.suppress(FileNotFoundError):
                for text in file.read_bytes().split(b"\n"):
                    with contextlib.suppress(ValueError):
                        line = json.loads(text)
                        if line["commit"] == self.sum:
                            lines.append(line)
        return lines

    # --- giving up

    def abandon(self, merged: bool) -> tuple[list[Step], Path | None]:
        """Give up the commit; return the steps that are done, and where the overlay was moved, if it was.

        Changes that are in new shards are removed from the overlay, other changes stay. In a merged tree the shard
        of a change is unknown, because names depend on all shards. So the whole upper is moved aside, unless no
        shard was replaced. If all new shards exist, only the overlay is emptied. Idempotent.
        """
        lines = self._lines()
        done = _done(self._states(lines))
        if _are_published(lines):
            self._empty(done)
            return list(self.runner.plan.steps), None
        upper, aside = self.place.upper, None
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
        self._show_replaced(done)
        self.disk.remove(os.fsencode(self.journal))
        self.disk.sync_directory(os.fsencode(self.directory))
        clean(self.place)
        return done, aside

    def _show_replaced(self, steps: Sequence[Step]) -> None:
        """Let the mount show the new and the replaced shards, under their paths in the set."""
        replaced = [self._path(step) for step in steps if step.number is not None]
        self.show([step.target for step in steps if step.action == NEW], replaced)

    def _path(self, step: Step) -> bytes:
        return self.runner.plan.sources[step.number].path if step.number is not None else b""

    def _put_aside(self, upper: Path, aside: Path) -> None:
        aside.mkdir(exist_ok=True)
        for name in sorted(os.listdir(upper)):
            self.disk.rename(os.fsencode(upper / name), os.fsencode(aside / name))
        self.disk.sync_directory(os.fsencode(aside))

    def _take_out(self, upper: Path, step: Step) -> None:
        """Remove from an upper the files that a step has written to a shard."""
        if step.number is not None:
            self._remove_packed(os.fsencode(upper), b"", only=self.runner.lower.shards[step.number].name)
            return
        for piece in step.output.pieces:
            if isinstance(piece, NewMember):
                path = os.path.join(os.fsencode(upper), piece.path)
                with contextlib.suppress(FileNotFoundError):
                    self.disk.remove(path)
                with contextlib.suppress(OSError):  # not empty, or the upper itself
                    while (path := os.path.dirname(path)) != os.fsencode(upper):
                        os.rmdir(path)

    # --- the overlay

    def _empty(self, done: Sequence[Step]) -> None:
        """Remove the changes that are in the shards. Idempotent.

        `done` are the steps whose shards are still the ones that were written.
        """
        self._exchange_upper()
        self.place.outputs.unlink(missing_ok=True)  # its changes are no longer in the overlay
        self._show_replaced(done)
        self.disk.remove(os.fsencode(self.journal))  # this ends the commit; the rest is cleaning up
        self.disk.sync_directory(os.fsencode(self.directory))
        self.disk.remove(os.fsencode(self.log))
        if (self.directory / "committed").exists():
            shutil.rmtree(self.directory / "committed")

    def _exchange_upper(self) -> None:
        old, upper = self.directory / "committed", self.place.upper
        if not old.exists():
            self.disk.rename(os.fsencode(upper), os.fsencode(old))
        self._make_like(os.fsencode(upper), os.fsencode(old))
        self._move_back(os.fsencode(old), os.fsencode(upper))
        # Both steps before the journal is removed: the old upper without a journal would be committed again.
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

    def _move_back(self, old: bytes, upper: bytes) -> None:
        """Move files that are in no shard from the old upper to the new one, on disk."""
        directories = set()
        for path in sorted(self._left_out):
            if not os.path.lexists(os.path.join(old, path)):
                continue  # moved already, before a kill
            inner = b""
            for name in path.split(b"/")[:-1]:
                directories.add(os.path.join(upper, inner))
                inner = os.path.join(inner, name)
                self._make_like(os.path.join(upper, inner), os.path.join(old, inner))
            directories.add(os.path.join(upper, inner))
            self.disk.rename(os.path.join(old, path), os.path.join(upper, path))
        for directory in sorted(directories):
            self.disk.sync_directory(directory)

    def _remove_packed(self, directory: bytes, path: bytes, only: bytes | None = None) -> None:
        """Remove the files of an upper that are in the shards; files in no shard stay.

        `only` limits this to one name in the directory, and all below it.
        """
        with os.scandir(directory) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if only is not None and entry.name != only:
                    continue
                inner = path + b"/" + entry.name if path else entry.name
                if entry.is_dir(follow_symlinks=False):
                    self._remove_packed(entry.path, inner)
                    try:
                        os.rmdir(entry.path)
                    except OSError:  # not empty, because files stay; removed files must not reappear
                        _make_transparent(entry.path)
                        self.disk.sync_directory(entry.path)
                elif inner not in self._left_out:
                    self.disk.remove(entry.path)


def _are_published(lines: Sequence[dict[str, Any]]) -> bool:
    """Return True if the log says that all shards are there: later changes of them do not concern the commit."""
    return any("published" in line for line in lines)


def _done(states: Sequence[tuple[Step, str]]) -> list[Step]:
    return [step for step, state in states if state == DONE]


def _sum(journal: bytes) -> str:
    return hashlib.blake2b(journal, digest_size=16).hexdigest()


def _make_transparent(directory: bytes) -> None:
    """Remove the opaque attribute of a directory that stays, so that it shows what is in the shards now."""
    with contextlib.suppress(OSError):  # no such attribute
        if os.getxattr(directory, OPAQUE) == b"y":
            os.removexattr(directory, OPAQUE)


def renewed(settings: OverlaySettings, paths: Collection[bytes] | None = None) -> OverlaySettings:
    """Return the settings with the present fingerprints of all shards, or of those with these paths.

    A shard that cannot be read keeps its fingerprint: it may be missing, or removed since it was written.
    """

    def seen(shard: ShardSeen) -> ShardSeen:
        with contextlib.suppress(ShardError):
            if paths is None or shard.path in paths:
                return replace(shard, fingerprint=DOOR.look(shard.path))
        return shard

    return replace(settings, shards=tuple(map(seen, settings.shards)))
