"""The changes of an overlay, sample by sample, for `wdsfs diff` and for a commit.

`changes_of` walks the upper beside the tree of the lower (`upper_walk.py`). It matches renamed samples with
their former names, and lists the files that no tar of samples can hold, or that readers would mix up. It writes
nothing.

New members of an existing sample follow its last member. New samples in the directory of a shard follow its last
sample. All others go into further shards. docs/reference/overlay.md has the same rules for users.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from wdsfs import names
from wdsfs.errors import ShardError
from wdsfs.index.record import STRAY, Record
from wdsfs.index.record_columns import equal_range
from wdsfs.inodes import MEMBER, ROOT, SAMPLE, index_of, kind_of
from wdsfs.overlay.overlay_directory import OverlayDirectory
from wdsfs.overlay.upper_directory import load_upper, open_upper
from wdsfs.overlay.upper_format import Origin, UpperNode, open_below
from wdsfs.packing import reasons
from wdsfs.packing.plan import NewMember, Remark
from wdsfs.packing.upper_walk import Home, Rules, Spot, UpperFile, Walk
from wdsfs.shards import GONE, Fingerprint
from wdsfs.tree.indexing import indexed
from wdsfs.tree.tree import LowerTree

FOLDER_FILES = 8  # images in a new sample that may be a copied folder
ADDED, CHANGED, REMOVED, RENAMED, TIME = "added", "changed", "removed", "renamed", "time only"


class ChangedSample(NamedTuple):
    """A sample that differs from the lower, with the extensions concerned.

    `was` is the former path of a renamed sample. `times`: extensions with the same content and another time.
    """

    kind: str
    path: bytes
    added: tuple[bytes, ...] = ()
    changed: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    was: bytes = b""
    times: tuple[bytes, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the sample as a row of `wdsfs diff --json`."""
        lists = {
            name: list(map(os.fsdecode, getattr(self, name))) for name in ("added", "changed", "removed", "times")
        }
        return {"kind": self.kind, "path": os.fsdecode(self.path), "was": os.fsdecode(self.was) or None, **lists}


class NewSample(NamedTuple):
    """A new sample: its key, and its members in order."""

    key: bytes
    members: tuple[NewMember, ...]

    @property
    def size(self) -> int:
        """Return its content in bytes."""
        return sum(new.size for new in self.members)


@dataclass(slots=True)
class ShardChanges:
    """The changes of a shard. Members and entries are numbers in its record.

    `members`: for each changed member its replacements, none if it is removed. `following`: the new members that
    follow each one. `appended`: whole samples at the end. `entries`: the samples that stay and change.
    `fingerprint` is that of the record with these numbers.
    """

    members: dict[int, tuple[NewMember, ...]] = field(default_factory=dict)
    following: dict[int, tuple[NewMember, ...]] = field(default_factory=dict)
    appended: list[NewSample] = field(default_factory=list)
    entries: set[int] = field(default_factory=set)
    fingerprint: Fingerprint = GONE

    def __bool__(self) -> bool:
        return bool(self.members or self.following or self.appended)


@dataclass(slots=True)
class Changes:
    """All that an overlay changes.

    `shards` has the changed ones by number; `further` the samples of each new shard directory, by its path (all in
    one for a merged tree). `samples` and `others` (members of no sample) are what `diff` shows, in the order of
    the shards and their tars, then of the paths. A commit that must lose nothing needs an empty `unpackable`; no
    commit can resolve `conflicts`; `leavings` are not packed; `notes` are harmless.

    `upper` is the tree that was compared. `covered` are the paths of its files that need not be written: the shard
    has the same content, or they are further names of a file that is written. A commit writes all others.
    """

    shards: dict[int, ShardChanges] = field(default_factory=dict)
    further: dict[bytes, list[NewSample]] = field(default_factory=dict)
    samples: list[ChangedSample] = field(default_factory=list)
    others: list[ChangedSample] = field(default_factory=list)
    unpackable: list[Remark] = field(default_factory=list)
    conflicts: list[Remark] = field(default_factory=list)
    notes: list[Remark] = field(default_factory=list)
    leavings: list[Remark] = field(default_factory=list)
    upper: UpperNode | None = field(default=None, compare=False)
    covered: set[bytes] = field(default_factory=set, compare=False)

    def __bool__(self) -> bool:
        return bool(self.shards or self.further)

    def as_json(self) -> dict[str, list[dict[str, Any]]]:
        """Return the changes as `wdsfs diff --json` shows them."""
        lists = ("samples", "others", "conflicts", "unpackable", "leavings", "notes")
        return {name: [row.as_json() for row in getattr(self, name)] for name in lists}


@dataclass(slots=True, eq=False)
class _OldSample:
    """A sample of a shard, or a member of no sample, that changes. Members are numbers in the shard's record.

    `gone` are removed ones, `replaced` those with the content of a file, `timed` those of the latter of which only
    the time differs. `added` are new files by extension, `key` is the key as the tar has it. `heir` is the new
    sample that it has become by a rename.
    """

    number: int
    entry: int
    members: range
    gone: set[int] = field(default_factory=set)
    replaced: dict[int, UpperFile] = field(default_factory=dict)
    timed: frozenset[int] = frozenset()
    added: dict[bytes, UpperFile] = field(default_factory=dict)
    key: bytes = b""
    heir: _FreshSample | None = None

    def __bool__(self) -> bool:
        return bool(self.gone or self.replaced or self.added)

    @property
    def is_removed(self) -> bool:
        """True if none of its files is left."""
        return not self.added and len(self.gone) == len(self.members)


@dataclass(slots=True, eq=False)
class _FreshSample:
    """A new sample: its place, and its files by extension. `was` is what it was before a rename."""

    home: Home
    files: dict[bytes, UpperFile]
    was: _OldSample | None = None

    @property
    def stays(self) -> bool:
        """True if it was renamed within its shard, so that it keeps its place there."""
        return self.was is not None and self.was.number == self.home.shard

    @property
    def members(self) -> tuple[NewMember, ...]:
        """Return its members in the order of webdataset's writer: sorted by extension."""
        return _members(self.home.key, self.files)


class SampleSummary:
    """The changes of shards and samples, made from the result of a walk."""

    def __init__(self, walk: Walk) -> None:
        self.walk, self.lower = walk, walk.lower
        self.result = Changes(
            unpackable=walk.unpackable, conflicts=walk.conflicts, notes=walk.notes, leavings=walk.leavings
        )
        self.old: dict[tuple[int, int], _OldSample] = {}  # by shard and entry
        self.fresh: list[_FreshSample] = []  # in the order of their places

    def changes(self) -> Changes:
        """Turn the result of the walk into changes; called once."""
        self._gather()
        self._refuse_half_linked()
        self._find_renamed()
        self._drop_twins()
        of_shards: dict[int, list[_OldSample]] = {}
        for (number, _), sample in self.old.items():
            of_shards.setdefault(number, []).append(sample)
        for number in sorted(
            {*of_shards, *(fresh.home.shard for fresh in self.fresh if fresh.home.shard is not None)}
        ):
            changes = self._shard(number, of_shards.get(number, []))
            if changes:
                self.result.shards[number] = changes
        self._note_added()
        self._note_unextractable()
        for remarks in (self.result.leavings, self.result.unpackable, self.result.conflicts, self.result.notes):
            remarks.sort()
        return self.result

    def _gather(self) -> None:
        """Make an object of each sample that the walk has found to change, or to be new."""
        walk = self.walk
        for number, members in walk.gone.items():
            members.difference_update(walk.files.get(number, ()), walk.covering.get(number, ()))
            record = walk.lower.record(number)
            for member in members:
                self._old_sample(number, record, record.entry_of(member)).gone.add(member)
        for number, files in walk.files.items():
            record, timed = walk.lower.record(number), walk.times.get(number, set())
            for member, file in files.items():
                sample = self._old_sample(number, record, record.entry_of(member))
                sample.replaced[member] = file
                if member in timed:
                    sample.timed |= {member}
        for home in sorted(walk.fresh, key=_order):
            if home.shard is not None and home.entry >= 0:
                sample = self._old_sample(home.shard, walk.lower.record(home.shard), home.entry)
                sample.added, sample.key = walk.fresh[home], home.key
            else:
                self.fresh.append(_FreshSample(home, walk.fresh[home]))

    def _old_sample(self, number: int, record: Record, entry: int) -> _OldSample:
        sample = self.old.get((number, entry))
        if sample is None:
            sample = self.old[number, entry] = _OldSample(number, entry, record.entry_members(entry))
        return sample

    def _extensions(self, sample: _OldSample) -> list[tuple[int, bytes]]:
        """Return the members of a sample, with their extensions, as its shard has them."""
        record = self.lower.record(sample.number)
        return [(member, record.extension(member)) for member in sample.members]

    def _shown_path(self, sample: _OldSample) -> bytes:
        return self.walk.paths.get((sample.number, sample.entry), b"")

    # --- renamed samples

    def _find_renamed(self) -> None:
        """Match new samples with former ones: by the origin of the directory, or else by those of all files."""
        for fresh in self.fresh:
            was = self.old.get(self._origin(fresh) or (-1, -1))
            if was is not None and was.heir is None and was.is_removed:
                was.heir, fresh.was = fresh, was

    def _origin(self, fresh: _FreshSample) -> tuple[int, int] | None:
        own = self.walk.origins.get(fresh.home)
        if own is not None and kind_of(own.inode) == SAMPLE:
            return self._entry_of(own)
        origins = [file.node.origin for file in fresh.files.values()]
        entries = {
            None if origin is None or kind_of(origin.inode) != MEMBER else self._entry_of(origin)
            for origin in origins
        }
        return entries.pop() if len(entries) == 1 else None

    def _entry_of(self, origin: Origin) -> tuple[int, int] | None:
        """Return the shard and the sample of an origin; None if the shard has changed.

        Semantics decision: a member of no sample is no origin. If it is renamed so that it becomes a sample, the
        member is removed and the sample is new.
        """
        place = self.walk.place_of(origin)
        if place is None:
            return None
        number, where = place
        record = self.lower.record(number)
        entry = index_of(where) if kind_of(where) == SAMPLE else record.entry_of(index_of(where))
        return None if record.entry_flags[entry] & STRAY else (number, entry)

    def _refuse_half_linked(self) -> None:
        """Refuse names of one member that are two files now: links in the tar would follow the new content."""
        for number, files in self.walk.files.items():
            for member in files.keys() & self.walk.covering.get(number, set()):
                self.result.conflicts.append(Remark(files[member].path, reasons.LINKED))

    # --- extensions that readers take for one

    def _drop_twins(self) -> None:
        """Leave out new files whose extensions differ only in letter case from others of the sample.

        Files of the lower stay as they are, also under another key.
        """
        for sample in [sample for sample in self.old.values() if sample.added]:
            there = [extension for member, extension in self._extensions(sample) if member not in sample.gone]
            # It was shown as `jpg~2` beside a directory `jpg`, which is removed now: the plain name is free.
            twice = [extension for extension in there if extension in sample.added]
            self.result.conflicts += (Remark(sample.added[extension].path, reasons.TWICE) for extension in twice)
            self._drop_twins_of(sample.added, there)
        for fresh in self.fresh:
            before = [] if fresh.was is None else [extension for _, extension in self._extensions(fresh.was)]
            self._drop_twins_of(fresh.files, [extension for extension in before if extension in fresh.files])

    def _drop_twins_of(self, files: dict[bytes, UpperFile], there: list[bytes]) -> None:
        first = {names.lower_case(extension): extension for extension in there}
        for extension in sorted(files.keys() - set(there)):
            if first.setdefault(names.lower_case(extension), extension) != extension:
                self.result.unpackable.append(Remark(files.pop(extension).path, reasons.ONLY_CASE))

    # --- one shard

    def _shard(self, number: int, samples: list[_OldSample]) -> ShardChanges:
        """Return the changes of a shard, of these samples and of new ones."""
        record = self.lower.record(number)
        changes = ShardChanges(fingerprint=record.fingerprint)
        for sample in sorted(samples, key=lambda sample: record.member(record.entry_member[sample.entry]).head):
            if sample:
                self._add_changed(record, sample, changes)
        for fresh in self.fresh:
            if fresh.home.shard == number and not fresh.stays:
                changes.appended.append(NewSample(fresh.home.key, fresh.members))
        self._refuse_meetings(number, record, changes)
        return changes

    def _add_changed(self, record: Record, sample: _OldSample, changes: ShardChanges) -> None:
        """Add a sample, or a member of none, to the changes of its shard, and to what `diff` shows."""
        path = self._shown_path(sample)
        for member in sample.gone:
            changes.members[member] = ()
            if record.has_links and record.link_count(member) > 1:
                self.result.conflicts.append(Remark(path, reasons.LINKED))
        for member, file in sample.replaced.items():
            changes.members[member] = (file.new(self.lower.member_name(sample.number, member)),)
        if record.entry_flags[sample.entry] & STRAY:
            kind = (
                REMOVED if not sample.replaced else TIME if sample.timed.issuperset(sample.replaced) else CHANGED
            )
            self.result.others.append(ChangedSample(kind, path))
        elif sample.heir is not None:
            self.result.samples.append(self._renamed(sample, sample.heir))
            if sample.heir.stays:
                self._keep_place(sample, sample.heir, changes)
        else:
            if sample.added:
                changes.following[sample.members[-1]] = _members(sample.key, sample.added)
            if not sample.is_removed:
                changes.entries.add(sample.entry)
            self.result.samples.append(self._changed(record, sample))

    def _changed(self, record: Record, sample: _OldSample) -> ChangedSample:
        """Return a sample that keeps its name, or is removed, as `diff` shows it."""
        contents = sample.replaced.keys() - sample.timed
        changed = tuple(record.extension(member) for member in sample.members if member in contents)
        timed = tuple(record.extension(member) for member in sample.members if member in sample.timed)
        removed = tuple(record.extension(member) for member in sample.members if member in sample.gone)
        kind = REMOVED if sample.is_removed else CHANGED if sample.added or changed or removed else TIME
        added = tuple(sorted(sample.added))
        return ChangedSample(kind, self._shown_path(sample), added, changed, removed, times=timed)

    def _renamed(self, sample: _OldSample, heir: _FreshSample) -> ChangedSample:
        """Return a renamed sample as `diff` shows it."""
        before, files = self._extensions(sample), heir.files
        added = tuple(sorted(files.keys() - {extension for _, extension in before}))
        removed, changed, times = [], [], []
        for member, extension in before:
            if extension not in files:
                removed.append(extension)
            elif not self.walk.has_content(sample.number, member, files[extension]):
                changed.append(extension)
            elif not self.walk.has_time(sample.number, member, files[extension]):
                times.append(extension)
        was, path = self._shown_path(sample), self._path(heir)
        return ChangedSample(RENAMED, path, added, tuple(changed), tuple(removed), was, tuple(times))

    def _keep_place(self, sample: _OldSample, heir: _FreshSample, changes: ShardChanges) -> None:
        """Let a renamed sample keep its place in its shard, and its members their order."""
        changes.entries.add(sample.entry)
        key, left, before = heir.home.key, dict(heir.files), self._extensions(sample)
        for member, extension in before:
            if extension in left:
                changes.members[member] = (left.pop(extension).new(key + b"." + extension),)
        if left:
            changes.following[before[-1][0]] = _members(key, left)

    def _path(self, fresh: _FreshSample) -> bytes:
        """Return the shown path of a new sample."""
        file = min(fresh.files.values(), key=lambda file: file.path)
        if not self.walk.tree.files_layout:
            return file.path.rpartition(b"/")[0]
        folder, base = names.split_folder(file.path)
        return folder + base.partition(b".")[0]

    def _refuse_meetings(self, number: int, record: Record, changes: ShardChanges) -> None:
        """Refuse changes that make samples with the same key adjacent: readers would take them for one sample."""
        if not _may_repeat(record, changes):
            return
        last: tuple[int, bytes] | None = None
        for place, entry, key in _in_order(record, changes):
            if last is not None and key == last[1] and place > last[0] + 1:
                path = self.walk.paths.get((number, entry)) or self.lower.shards[number].name + b"/" + key
                self.result.conflicts.append(Remark(path, reasons.MEETING))
            last = place, key

    # --- new samples

    def _note_added(self) -> None:
        for fresh in self.fresh:
            if fresh.home.shard is None:
                sample = NewSample(fresh.home.key, fresh.members)
                self.result.further.setdefault(fresh.home.top, []).append(sample)
            if fresh.was is None:
                self.result.samples.append(ChangedSample(ADDED, self._path(fresh), tuple(sorted(fresh.files))))
                if self._is_folder(fresh):
                    self.result.notes.append(Remark(self._path(fresh), reasons.FOLDER))

    def _is_folder(self, fresh: _FreshSample) -> bool:
        """Return True if a new sample looks like a copied folder of images, with columns that no sample has."""
        own = fresh.files.keys()
        suffixes = Counter(extension.rpartition(b".")[2].lower() for extension in own if b"." in extension)
        if all(suffixes[suffix] < FOLDER_FILES for suffix in names.MEDIA & suffixes.keys()):
            return False
        known = set[bytes]()
        if self.walk.lower.shards:  # a set can begin without any
            with contextlib.suppress(ShardError):
                record = self.lower.record(fresh.home.shard or 0)
                known.update(record.extension_name.of(range(len(record.extension_name))))
        return 2 * len(known & own) < len(own)

    # --- names that tar cannot extract

    def _note_unextractable(self) -> None:
        """Add notes of new names that tar cannot extract. Readers of samples accept them."""
        for number, changes in self.result.shards.items():
            samples = (sample.members for sample in changes.appended)
            moved = (changes.members.get(member, ()) for member in self._moved_members(number))
            new = [*chain.from_iterable((*moved, *changes.following.values(), *samples))]
            self._note_unextractable_of(new, self.lower.record(number), changes)
        for further in self.result.further.values():
            self._note_unextractable_of([member for sample in further for member in sample.members], None, None)

    def _moved_members(self, number: int) -> Iterator[int]:
        """Yield the members of a shard that keep their places under other names."""
        for fresh in self.fresh:
            if fresh.was is not None and fresh.stays and fresh.home.shard == number:
                yield from fresh.was.members

    def _note_unextractable_of(
        self, new: list[NewMember], record: Record | None, changes: ShardChanges | None
    ) -> None:
        files = {member.name for member in new}
        folders = {folder for member in new for folder in _folders(member.name)}
        for member in new:
            why = names.unextractable(member.name)
            meets = member.name in folders or not files.isdisjoint(_folders(member.name))
            if record is not None and changes is not None:
                meets = meets or _meets(member.name, record, changes)
            if why is not None:
                self.result.notes.append(Remark(member.path, f"{reasons.UNEXTRACTABLE}: {why}"))
            elif meets:
                self.result.notes.append(Remark(member.path, reasons.FILE_AND_FOLDER))


def _members(key: bytes, files: dict[bytes, UpperFile]) -> tuple[NewMember, ...]:
    """Return files as members of a sample, sorted by extension."""
    return tuple(files[extension].new(key + b"." + extension) for extension in sorted(files))


def _folders(name: bytes) -> Iterator[bytes]:
    """Yield the directories above a member: `a/b/c.txt` -> `a`, `a/b`."""
    at = name.find(b"/")
    while at >= 0:
        yield name[:at]
        at = name.find(b"/", at + 1)


def _meets(name: bytes, record: Record, changes: ShardChanges) -> bool:
    """Return True if a new member is a file where the shard has a directory, or the other way round."""
    if record.find_path(name) is not None:
        return True
    files = chain.from_iterable(_files_at(folder, record) for folder in _folders(name))
    return any(changes.members.get(member, True) for member in files)


def _files_at(path: bytes, record: Record) -> Iterator[int]:
    """Return the members of a shard with this plain name."""
    *way, base = path.split(b"/")
    folder = record.find_path(b"/".join(way)) if way else 0
    if folder is None:
        return
    stem, dot, extension = base.partition(b".")
    for entry in record.find_entries(folder, base, record.crc_below(folder, base)):
        if record.entry_flags[entry] & STRAY:
            yield from record.entry_members(entry)
    if dot:
        yield from record.find_files(folder, stem, extension)


def _order(home: Home) -> tuple[bool, int, bytes, bytes]:
    return home.shard is None, home.shard or 0, home.top, home.key


def _may_repeat(record: Record, changes: ShardChanges) -> bool:
    """Return True if a key may occur twice in a changed shard.

    This is rare, and only then every sample is compared.
    """
    sums = record.array("entry.hash")
    if (sums[1:] == sums[:-1]).any():
        return True
    new = {sample.key for sample in changes.appended}
    for member, news in changes.members.items():
        new.update(
            {_key_of(new_member.name) for new_member in news} - {record.entry_path(record.entry_of(member))}
        )
    return any(equal_range(record.column["entry.hash"], zlib.crc32(key)) for key in new)


def _in_order(record: Record, changes: ShardChanges) -> Iterator[tuple[int, int, bytes]]:
    """Return the remaining samples of a changed shard, in order: (former place, entry, plain key).

    New samples have places that no sample had and that are not adjacent to any.
    """
    entries = [entry for entry in range(record.entries) if not record.entry_flags[entry] & STRAY]
    entries.sort(key=lambda entry: record.member(record.entry_member[entry]).head)
    for place, entry in enumerate(entries):
        members = record.entry_members(entry)
        left = [member for member in members if changes.members.get(member, True)]
        if not left and not any(member in changes.following for member in members):
            continue
        new = next((new[0] for member in left if (new := changes.members.get(member))), None)
        yield place, entry, record.entry_path(entry) if new is None else _key_of(new.name)
    for at, sample in enumerate(changes.appended):
        yield len(entries) + 2 * at + 1, -1, sample.key


def _key_of(name: bytes) -> bytes:
    """Return the plain key of a member; the name of a member that is in no sample."""
    parts = names.split(name)
    if parts is None:
        return name
    return b"/".join((*names.folder_components(parts.folder), parts.stem))


def changes_of(place: OverlayDirectory, tree: LowerTree, rules: Rules = Rules()) -> Changes:  # noqa: B008  # immutable
    """Return the changes of the tree by an overlay.

    Raises ShardErrors for shards that are needed and cannot be read, OSErrors of the upper, OverlayUnusable.
    """
    with open_upper(place) as directory:
        upper = load_upper(place)
        return indexed(_collect, tree, upper, lambda node: open_below(directory, node.path()), rules)


def _collect(tree: LowerTree, upper: UpperNode, open_file: Callable[[UpperNode], int], rules: Rules) -> Changes:
    """Return the changes of the tree by the upper, whose files `open_file` opens."""
    walk = Walk(tree, open_file, rules)
    tree.prepare()
    walk.directory(upper, Spot(b"", ROOT))
    result = SampleSummary(walk).changes()
    result.upper, result.covered = upper, walk.covered
    return result
