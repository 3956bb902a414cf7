"""Portable indexes in use: finds the records in `*.wdsidx` files that still match the shards of a set.

The index looks here for records that LMDB does not have. A shard without a record in either is indexed. A row was
written on another machine, so inode and ctime are not compared. The row is of *the same* shard if the sizes are
equal, and so are the ETags of its store, or the mtimes in the unit of the coarser clock. If only the sizes are
equal, the shard may have been *moved* (copied without its times, uploaded). Then headers decide: some at first,
and those of each member when it is read. `Match` is the one home of this decision.

A file that nobody else can write, on a disk of this machine, is mapped, and its records are used in place. Of any
other (in a store, on a network file system, of another user) a record is copied into LMDB when it is first needed:
a map of a file that another machine replaces ends in a signal, and bytes that another user can write may change
after the check.

Threads: as `index/store.py`.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import logging
import mmap
import os
import re
import stat
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from wdsfs import mount_table, names, source, trust
from wdsfs.door.shard_door import DOOR, fingerprint_of
from wdsfs.door.urls import is_output, is_remote
from wdsfs.errors import MALFORMED, CorruptShard, MissingShard, ShardError, SpecError, several
from wdsfs.formats import OtherVersion
from wdsfs.index import record as record_module
from wdsfs.index import record_check
from wdsfs.index.record import RECORD, STRAY, Record
from wdsfs.index.record_builder import restamped
from wdsfs.shards import Fingerprint, Shard
from wdsfs.shared_settings import setting
from wdsfs.source import TarBytes
from wdsfs.spec import portable_head
from wdsfs.spec.portable_head import SUFFIX, IndexFile, Row, Times
from wdsfs.tar import scan

if TYPE_CHECKING:
    from wdsfs.door.pins import Pin

log = logging.getLogger(__name__)

CONFIRMED_MAX = 4096  # members of a moved shard that are remembered as compared
FETCHED_MAX = 1 << 20  # bytes of a member that are fetched with its headers
COMPARED = 16  # headers of a moved shard that are compared before its record is used; of a remote one the last
BESIDE_MAX = 16  # directories of a set in which an index is looked for
LISTED_MAX = 200_000  # names of a directory among which it is looked for

_TIME_UNITS = (1, 100, 1_000, 1_000_000)  # ns: the clocks of file systems and of copying tools
_SECOND = 1_000_000_000  # ns
_CONTENT_ETAG = re.compile(r'"[0-9a-f]{32}(?:-\d+)?"')  # of S3 and stores like it: an MD5, or one of the parts


class Match(enum.Enum):
    """The answer to "is this the shard of the row?": the same; perhaps moved, which its headers show; another."""

    SAME = 1
    PERHAPS = 2
    MOVED = 3
    OTHER = 4

    @staticmethod
    def of(row: Row | Times, now: Fingerprint | Pin) -> Match:
        """Compare a row with the present shard, by size and time."""
        if row.size != now.size:
            return Match.OTHER
        return Match.SAME if _same_time(row.mtime_ns, now.mtime_ns) else Match.PERHAPS

    @staticmethod
    def of_object(row: Row, shown: str, whole: str, pin: Pin) -> Match:
        """Compare a row with the object at `shown`. The shard was at `whole` when the row was made."""
        match = Match.of(row, pin)
        if match is Match.OTHER or not (row.pin.strong_etag and pin.strong_etag):
            return match
        # Elsewhere only an ETag that is made of the content means the same.
        means_the_same = shown == whole or match is Match.SAME or _CONTENT_ETAG.fullmatch(row.etag) is not None
        return Match.SAME if row.etag == pin.etag and means_the_same else Match.PERHAPS


def _same_time(first: int, second: int) -> bool:
    """Return True if two times (ns) are equal, as far as the coarser of the two is known.

    A time of whole seconds alone proves nothing: tools that pin the times of their files give it to every version
    of a shard, and tars, whose sizes are rounded, are often of one size.
    """
    return bool(first % _SECOND and second % _SECOND) and any(
        first // unit == second // unit and not (first % unit and second % unit) for unit in _TIME_UNITS
    )


class _Verdict(NamedTuple):
    fingerprint: Fingerprint
    match: Match


class PortableIndex:
    """A portable index. `rows` are its rows by the paths of its shards; the shards of a set may lie elsewhere."""

    def __init__(self, file: IndexFile, rows: Mapping[bytes, int]) -> None:
        self.file = file
        self._mark = file.reading.mark
        self._numbers = rows
        self._by_name: defaultdict[bytes, list[int]] | None = None
        self._verdicts: dict[int, _Verdict] = {}
        self._sound: set[int] = set()  # rows whose records were checked here
        self.fd, self._map = _mapped(file)
        if self.fd >= 0:
            weakref.finalize(self, os.close, self.fd)

    def number_of(self, key: bytes) -> int | None:
        """Return the row of the shard with this key in LMDB.

        None for one that is not listed, or read otherwise.
        """
        if not self._mark and key in self._numbers:  # the key of a shard that is read plainly is its path
            return self._numbers[key]
        path = path_in_key(key)
        if key[len(path) :] != self._mark:
            return None
        number = self._numbers.get(path)
        return self._by_its_end(path) if number is None else number

    def _by_its_end(self, path: bytes) -> int | None:
        """Return the row whose path ends as this one does, in more components than any other.

        At least in the name.
        """
        if self._by_name is None:
            self._by_name = defaultdict(list)
            for known, number in self._numbers.items():
                self._by_name[known.rpartition(b"/")[2]].append(number)
        candidates = self._by_name.get(path.rpartition(b"/")[2], [])
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        parts = path.split(b"/")[::-1]
        shared = sorted(
            (_shared(parts, os.fsencode(self.file.path_of(candidate))), candidate) for candidate in candidates
        )
        return shared[-1][1] if shared[-1][0] > shared[-2][0] else None

    # --- comparing shards

    def match(self, number: int, path: bytes, now: Fingerprint) -> Match:
        """Compare the shard at `path`, with its present fingerprint, with a row; no headers are read."""
        known = self._verdicts.get(number)
        if known is not None and known.fingerprint == now:
            return known.match
        if is_remote(path):
            row, pin = self.file.row(number), DOOR.remote.pin_of(path)
            whole = row.path if "://" in row.path else self.file.base() + row.path
            match = Match.of_object(row, os.fsdecode(path), whole, pin)
            if is_output(path):  # the command may give other bytes the next time
                match = Match.OTHER
        else:
            match = Match.of(self.file.times(number), now)
        self._verdicts[number] = _Verdict(now, match)
        return match

    def decide(self, number: int, path: bytes, now: Fingerprint, record: Record) -> Match:
        """Compare as `match` does; if that leaves it open, compare headers."""
        match = self.match(number, path, now)
        if match is Match.PERHAPS:
            match = Match.MOVED if _was_moved(path, now, record) else Match.OTHER
            self._verdicts[number] = _Verdict(now, match)
        return match

    def refuse(self, number: int) -> None:
        """Exclude a row from use: its shard turned out to be another one."""
        known = self._verdicts.get(number)
        if known is not None:
            self._verdicts[number] = _Verdict(known.fingerprint, Match.OTHER)

    # --- records

    @property
    def is_mapped(self) -> bool:
        """True if records are used in place."""
        if self._map is not None and _changed(self.fd, self.file.fingerprint):
            log.warning(
                "%s was changed in place, so it is not used any more; replace such a file by a rename (mv)", self
            )
            self._map = None
        return self._map is not None

    def in_place(self, number: int) -> Record | None:
        """Return the record of a row, mapped, with the fingerprint of its row; None if it cannot be used."""
        if not self.is_mapped:
            return None
        assert self._map is not None
        row = self.file.row(number)
        return self._checked(number, row, memoryview(self._map)[row.offset : row.offset + row.length])

    def read(self, number: int) -> bytes | None:
        """Return the bytes of the record of a row, checked; None if they cannot be used, or had."""
        row = self.file.row(number)
        try:
            data, now = DOOR.read_range(os.fsencode(self.file.path), row.length, row.offset)
        except (OSError, ShardError) as error:
            log.warning("%s: the record of %s cannot be read: %s", self, row.path, error)
            return None
        if now != self.file.fingerprint:
            return None
        return data if self._checked(number, row, memoryview(data)) is not None else None

    def _checked(self, number: int, row: Row, view: memoryview) -> Record | None:
        try:
            if number in self._sound:
                return Record(view, verify=False)
            if len(view) != row.length or int.from_bytes(view[8:16], "little") != row.crc:
                raise record_check.UnsoundRecord("its checksum is wrong")
            record = record_check.checked_record(view)
            if record.fingerprint != (row.size, row.mtime_ns, 0):
                raise record_check.UnsoundRecord("it is of a shard of another size or time")
            if record.counts() != row.numbers:
                raise record_check.UnsoundRecord("its row has other counts")
        except (*MALFORMED, OverflowError) as error:
            log.warning(
                "%s: the record of %s is damaged: %s; so the shard is indexed; write the file again: "
                "wdsfs index --update %s",
                *(self, row.path, error, self),
            )
            self.refuse(number)
            return None
        self._sound.add(number)
        return record

    def __str__(self) -> str:
        return self.file.path


def _shared(parts: Sequence[bytes], path: bytes) -> int:
    """Return how many last components a path shares with `parts`, the reversed components of another path."""
    pairs = zip(parts, reversed(path.split(b"/")), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


# --- the headers of moved shards ---------------------------------------------------------------------------


def _was_moved(path: bytes, now: Fingerprint, record: Record) -> bool:
    """Return True if headers of the shard at `path` are a record's: some of a file, the last of an object."""
    try:
        shard = DOOR.open_shard(path)
        try:
            if fingerprint_of(shard) != now or record.compression is not None:
                return False
            chosen = range(0) if is_remote(path) else _spread(record.members)
            return record_module.ends_match(shard, record.ends) and all(
                fits(record, member, shard) for member in chosen
            )
        finally:
            source.close(shard)
    except (OSError, ShardError):
        return False


def _spread(members: int) -> range:
    """Return some members, evenly spread."""
    return range(0, members, max(1, members // COMPARED))


def fits(record: Record, member: int, tar: TarBytes) -> bool:
    """Return True if the member of a record has its headers where the record says. Raises OSError."""
    place, entry = record.member(member), record.entry_of(member)
    try:
        placed = scan.placed(tar, place.head)
    except CorruptShard:
        return False
    path = record.entry_path(entry)
    if not record.entry_flags[entry] & STRAY:
        path += b"." + record.extension(member)
    return (placed.data, placed.size, names.plain_key(placed.name)) == (place.data, place.size, path)


def confirmed(record: Record, member: int, tar: TarBytes) -> bool:
    """Check a member of a moved shard, as `fits` does, before it is read; note in the record that it fits."""
    if not isinstance(tar, int):  # the content is read next: one request for both
        place = record.member(member)
        tar.pread(min(place.data + place.size - place.head, FETCHED_MAX), place.head)
    if not fits(record, member, tar):
        return False
    assert record.moved is not None
    if len(record.moved) >= CONFIRMED_MAX:
        record.moved.clear()
    record.moved.add(member)
    return True


# --- which files -------------------------------------------------------------------------------------------


class Portables:
    """The portable indexes of a set, as the index asks them: for each shard, the first that matches it."""

    def __init__(self, files: Sequence[PortableIndex] = ()) -> None:
        self.files = list(files)

    def _listing(self, key: bytes) -> Iterator[tuple[PortableIndex, int]]:
        for file in self.files:
            number = file.number_of(key)
            if number is not None:
                yield file, number

    def numbers(self, key: bytes, now: Fingerprint, *, exact: bool = False) -> tuple[int, ...] | None:
        """Return the numbers of the summary of a shard; None if no row matches it.

        `exact`: a moved shard has none.
        """
        path = path_in_key(key)
        for file, number in self._listing(key):
            match = file.match(number, path, now)
            if match is Match.PERHAPS and not exact and file.is_mapped and not is_remote(path):
                record = file.in_place(number)
                match = Match.OTHER if record is None else file.decide(number, path, now, record)
            if match is Match.SAME or (match is not Match.OTHER and not exact):
                return file.file.numbers(number)
        return None

    def presumed(self, shard: Shard) -> tuple[int, ...] | None:
        """Return the numbers of the summary of a remote shard of which nothing is known but the row that names it.

        Nothing is asked: a shard that has changed is noticed when it is first used. None for others.
        """
        file = next((file for file in self.files if file.file.path == shard.index_file), None)
        number = None if file is None or not DOOR.is_presumed(shard.path) else file.number_of(shard.key)
        return None if file is None or number is None else file.file.numbers(number)

    def known(self, key: bytes) -> tuple[Times, tuple[int, ...]] | None:
        """Return size and time in the first row of a shard, and the numbers of its summary, true or not."""
        listing = next(self._listing(key), None)
        return (
            None if listing is None else (listing[0].file.times(listing[1]), listing[0].file.numbers(listing[1]))
        )

    def record(self, key: bytes, now: Fingerprint) -> Record | None:
        """Return the record of a shard, in place; None if it has to be copied first (`copy`), or built."""
        for file, number in self._listing(key):
            if file.is_mapped and file.match(number, path_in_key(key), now) is not Match.OTHER:
                record = file.in_place(number)
                if record is not None:
                    match = file.decide(number, path_in_key(key), now, record)
                    if match is not Match.OTHER:
                        record.fingerprint = now
                        record.moved = set() if match is Match.MOVED else None
                        return record
        return None

    def has_in_place(self, key: bytes, now: Fingerprint) -> bool:
        """Return True if `record` has the record of a shard, unless it is damaged."""
        return any(
            file.is_mapped and file.match(number, path_in_key(key), now) is not Match.OTHER
            for file, number in self._listing(key)
        )

    def copy(self, key: bytes, now: Fingerprint, *, exact: bool = False) -> bytes | None:
        """Return the record of a shard as LMDB keeps it; None if it has to be built."""
        for file, number in self._listing(key):
            match = file.match(number, path_in_key(key), now)
            if match is Match.OTHER or (exact and match is not Match.SAME):
                continue
            data = file.read(number)
            if data is not None:
                match = file.decide(number, path_in_key(key), now, Record(data, verify=False))
                if match is not Match.OTHER:
                    return restamped(data, now, moved=match is Match.MOVED)
        return None

    def same(self, key: bytes, now: Fingerprint) -> tuple[PortableIndex, Row] | None:
        """Return the row of exactly this shard, and the file that has it."""
        for file, number in self._listing(key):
            if file.match(number, path_in_key(key), now) is Match.SAME:
                return file, file.file.row(number)
        return None

    def refuse(self, key: bytes) -> None:
        """Exclude the records of this shard from use."""
        for file, number in self._listing(key):
            file.refuse(number)

    def remarks(self, stale: Iterable[Shard], *, exact: bool = False) -> Iterator[str]:
        """Yield a line for each file that lists some of these shards, but in another state.

        Shards whose records only have to be copied are not counted. `exact` as in `numbers`.
        """
        if not self.files:
            return
        indexed = [
            shard
            for shard in stale
            if (now := _fingerprint_now(shard.path)) is not None
            and self.numbers(shard.key, now, exact=exact) is None
        ]
        for file in self.files:
            listed = [shard for shard in indexed if file.number_of(shard.key) is not None]
            if listed:
                shown = several([os.fsdecode(shard.path) for shard in listed])
                count = f"{len(listed):,} of its {len(file.file):,} shards"
                yield (
                    f"{file}: {count} have changed since it was written ({shown}) and are indexed; "
                    f"renew it: wdsfs index --update {file}"
                )


def _fingerprint_now(path: bytes) -> Fingerprint | None:
    try:
        return DOOR.look(path)
    except ShardError:
        return None


def path_in_key(key: bytes) -> bytes:
    """Return the path of the shard with this key in the index."""
    return key.partition(b"\0")[0]


def attached(shards: Sequence[Shard]) -> Portables:
    """Return the indexes for these shards: files that list them, those of WDSFS_INDEX_FILE, and those beside them.

    An unusable index is left out with a warning. Raises MissingShard for a named index that is not there.
    """
    files: dict[str, PortableIndex] = {}
    for path in dict.fromkeys(shard.index_file for shard in shards if shard.index_file):
        _add(files, path)
    for path in filter(None, setting("INDEX_FILE").split("\n")):
        _add(files, path)
    for path in _beside(shards):
        with contextlib.suppress(MissingShard):  # removed since it was listed
            _add(files, path)
    return Portables(list(files.values()))


def _add(files: dict[str, PortableIndex], path: str) -> None:
    try:
        file = portable_head.load_index(path)
        if file.path in files:
            return
        RECORD.check(file.record_format)
        files[file.path] = PortableIndex(file, file.rows())
    except MissingShard:
        raise
    except OtherVersion as error:
        log.warning("%s is not used, since its content %s: type wdsfs index --update %s", path, error, path)
    except (SpecError, ShardError) as error:
        log.warning("%s; the shards are indexed without it", error)


def _beside(shards: Sequence[Shard]) -> list[str]:
    """Return the indexes in the directories of these shards that are as trustworthy as the shards."""
    is_listed = any(shard.index_file for shard in shards)
    directories = {} if is_listed else dict.fromkeys(shard.path.rpartition(b"/")[0] for shard in shards)
    indexes: list[str] = []
    for directory in list(directories)[:BESIDE_MAX]:
        if is_remote(directory + b"/"):
            indexes += _listed_in_store(directory)
            continue
        with contextlib.suppress(OSError), os.scandir(directory or b"/") as entries:
            paths = [
                os.path.join(directory or b"/", entry.name)
                for _, entry in zip(range(LISTED_MAX), entries, strict=False)
                if entry.name.endswith(SUFFIX.encode()) and not entry.name.startswith(b".")
            ]
            indexes += [os.fsdecode(path) for path in sorted(paths) if _is_trusted(path, shards)]
    return indexes


def _listed_in_store(directory: bytes) -> list[str]:
    """Return the indexes in a listing that was made for the shards: no further request is made."""
    known = [path for path in DOOR.known_objects() if path.endswith(SUFFIX.encode())]
    return sorted(os.fsdecode(path) for path in known if path.rpartition(b"/")[0] == directory)


def _is_trusted(path: bytes, shards: Sequence[Shard]) -> bool:
    """Return True for a file that only this user, root, or the owner of the shards beside it can have written.

    The owner of the shards could change these instead; others who may put a file into the directory could not.
    """
    directory = os.path.dirname(path)
    beside = next(shard.path for shard in shards if os.path.dirname(shard.path) == directory)
    try:
        status, own = os.lstat(path), os.stat(beside)
    except OSError:
        return False
    who = trust.trusted()
    owned = who.owns(status) or status.st_uid == own.st_uid
    if status.st_gid in who.groups:
        open_to_others = status.st_mode & stat.S_IWOTH
    else:
        open_to_others = status.st_mode & (stat.S_IWOTH | stat.S_IWGRP)
        if status.st_gid == own.st_gid:  # users who may write the shards may write this
            open_to_others &= ~own.st_mode
    if stat.S_ISREG(status.st_mode) and owned and (who.everyone or not open_to_others):
        return True
    log.warning(
        "%s is not used: users who cannot write the shards can write it; if you trust it, name it with "
        "--index-file",
        os.fsdecode(path),
    )
    return False


def _mapped(file: IndexFile) -> tuple[int, mmap.mmap | None]:
    """Return the file, mapped, if it is on a disk of this machine and only trusted users can write it."""
    path = os.fsencode(file.path)
    if is_remote(path) or not trust.holds(path) or mount_table.is_network(mount_table.filesystem_type(path)):
        return -1, None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return -1, None
    try:
        trust.require_file(os.fstat(fd), file.path)
        if not _changed(fd, file.fingerprint):
            return fd, mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    except OSError:
        pass
    os.close(fd)
    return -1, None


def _changed(fd: int, fingerprint: Fingerprint) -> bool:
    """Return True if an open file was written, or cut, since it had this fingerprint.

    A new link or name is no change.
    """
    now = Fingerprint.of(os.fstat(fd))
    return (now.size, now.mtime_ns) != (fingerprint.size, fingerprint.mtime_ns)
