"""The content of the members of a view: a class for each kind of place where their bytes may be.

A record of a view says which member of which shard a file is. That shard is read through its plain set, so all
guarantees of a plain mount hold for a view, too. The address of a member is the number of a place in the record's
directory, and a row there; `view_record.py` says what the row means.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from wdsfs.errors import CorruptShard, ShardError, StaleShard
from wdsfs.index.record import Record
from wdsfs.names import bytes_of
from wdsfs.shards import Fingerprint
from wdsfs.tar.sparse import NO_EXTENTS
from wdsfs.tree import content as content_module
from wdsfs.tree import json_fields
from wdsfs.tree.companions import CompanionWatch
from wdsfs.tree.content import HELD, IN_DATA, NO_DATA, Content, ContentColumns, Held
from wdsfs.tree.label_files import LabelFile
from wdsfs.tree.open_shards import ShardFile
from wdsfs.tree.shard_access import Access
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.texts import Ints

SHARD, VALUES, FIELD, NOTHING = "shard", "values", "field", "empty"  # kinds of a place
OWN = 0  # the place of the shard itself
FIELDS_BYTES = 64 << 20  # of files of fields that a process keeps

PlainMember = tuple[ShardSet, int, int]  # a plain set, and the numbers of a shard and a member there
Load = Callable[[], bytes]  # makes the bytes of a member; raises ShardErrors


class Wanted(NamedTuple):
    """A member of a shard of the view, and its address in the record: the row `row` of the place `place`."""

    record: Record
    number: int
    tag: int
    member: int
    place: int
    row: int

    @property
    def about(self) -> dict[str, Any]:
        """The facts that the record has about the place."""
        return _describe_place(self.record, self.place)

    @property
    def size(self) -> int:
        """The size of the member in bytes."""
        return self.record.size_and_time(self.member)[0]

    @property
    def json(self) -> Wanted:
        """The JSON that a field is taken from, for the same member."""
        assert self.record.view is not None
        shift, address = self.record.view["shift"], self.record.column["field.from"][self.row]
        return self._replace(place=address >> shift, row=address & (1 << shift) - 1)


class _Columns:
    """The content of all members of a record in the making, as `ContentColumns` has it."""

    def __init__(self, members: int) -> None:
        self.paths, self.data = list[bytes](), NO_DATA
        self.file, self.start = np.full(members, HELD, np.int64), np.zeros(members, np.int64)


class _Places:
    """All places of one kind. In `fill`, `rows` are those of `members` in a place."""

    def content(self, request: Wanted) -> Content:
        """Return the content of a member. Raises what `ShardSet.content` raises."""
        raise NotImplementedError

    def loader(self, request: Wanted) -> tuple[ShardFile, Load]:
        """Return the file of JSON that fields are taken from, and a function that returns the JSON."""
        raise NotImplementedError

    def fill(self, columns: _Columns, record: Record, number: int, place: int, members: Ints, rows: Ints) -> None:
        """Say where these members are; without that, they have to be made one by one."""

    def origin(self, request: Wanted) -> PlainMember | None:
        """Return the set, shard and member that a member is; None if it is in no shard."""
        return None


class _ShardPlaces(_Places):
    """Members of shards: of the shard itself, and of shards of joined sets."""

    def __init__(self, sources: Sequence[ShardSet], reconsider: Callable[[int], None]) -> None:
        self.plain, self._reconsider = sources[0], reconsider
        self._by_path = {
            shard.path: (source, number)
            for source in reversed(sources)
            for number, shard in enumerate(source.shards)
        }

    def content(self, request: Wanted) -> Content:
        return self.content_at(request.record, request.number, request.place, request.row)

    def content_at(self, record: Record, number: int, place: int, member: int) -> Content:
        source, base = self.source(record, number, place)
        try:
            return _present_content(source, base, member)
        except StaleShard:
            # The shard may have other content and its old times: then nothing else shows the change.
            self._reconsider(number)
            raise

    def loader(self, request: Wanted) -> tuple[ShardFile, Load]:
        raw = self.content(request)
        return raw.file, partial(_read_json, raw)

    def fill(self, columns: _Columns, record: Record, number: int, place: int, members: Ints, rows: Ints) -> None:
        base = self.columns_at(record, number, place)
        file = base.file[rows]
        columns.file[members] = file + np.where(file < 0, 0, len(columns.paths))
        columns.start[members] = base.start[rows]
        columns.paths += base.paths

    def columns_at(self, record: Record, number: int, place: int) -> ContentColumns:
        source, base = self.source(record, number, place)
        return source.content_columns(base)

    def origin(self, request: Wanted) -> PlainMember | None:
        source, base, _ = self.source_record(request.record, request.number, request.place)
        return source, base, request.row

    def source(self, record: Record, number: int, place: int) -> tuple[ShardSet, int]:
        """Return the plain set of a place of this record, and the shard's number there. Raises StaleShard."""
        source, base = self.plain, number
        made_of: tuple[int, ...] = record.fingerprint
        if record.view is not None:
            about = record.view["places"][place]
            made_of = tuple(about["fingerprint"])
            if place != OWN:
                source, base = self._by_path[bytes_of(about["path"])]
        # The address of a member is valid only in the record that this one was derived from. The source set may
        # not have been checked since this record was made, perhaps by another process.
        if source.fingerprint(base) != made_of:
            source.distrust()
        if source.fingerprint(base) != made_of:
            raise StaleShard(f"{source.path_text(base)} has changed since this was opened")
        return source, base

    def source_record(self, record: Record, number: int, place: int) -> tuple[ShardSet, int, Record]:
        """Return the source as `source`, with the record of that shard."""
        source, base = self.source(record, number, place)
        before = source.tag(base)
        return source, base, source.record(base, before)

    def read_member(self, path: bytes, member: int) -> bytes:
        """Return the whole content of a member of the shard at `path`. Raises NotIndexed, ShardError."""
        content = _present_content(*self._by_path[path], member)
        return content_module.read(content, 0, content.size)


class _LabelPlaces(_Places):
    """Values of label files, which the record holds. The files are kept open, so that a change is noticed."""

    def __init__(self, labels: Sequence[LabelFile], watch: CompanionWatch, access: Access) -> None:
        self._labels, self._watch, self._access = {file.path: file for file in labels}, watch, access
        self._open: dict[bytes, ShardFile] = {}

    def content(self, request: Wanted) -> Content:
        file, load = self.loader(request)
        return Content(file, 0, request.size, NO_EXTENTS, Held(bytes, load()))

    def loader(self, request: Wanted) -> tuple[ShardFile, Load]:
        return self._file(request.about), partial(request.record.names_in("values").__getitem__, request.row)

    def fill(self, columns: _Columns, record: Record, number: int, place: int, members: Ints, rows: Ints) -> None:
        self._file(_describe_place(record, place))
        columns.file[members], columns.start[members] = IN_DATA, record.array("values.start")[rows]
        columns.data = record.array("values")

    def _file(self, about: dict[str, Any]) -> ShardFile:
        """Return the label file that a value comes from, if it is unchanged since. Raises ShardError."""
        path, made_of = bytes_of(about["path"]), tuple(about["fingerprint"])
        file = self._open.get(path)
        if file is not None and file.fingerprint == made_of:
            return file
        self._refuse_changed(path, made_of)
        fd = self._access.open(path)
        ctime_ns = os.fstat(fd).st_ctime_ns if isinstance(fd, int) else 0
        new = ShardFile(fd, fd, path, Fingerprint(*made_of), ctime_ns)
        try:
            self._refuse_changed(path, made_of)
        except ShardError:
            new.close()
            raise
        if file is not None:
            file.close()
        self._open[path] = new
        return new

    def _refuse_changed(self, path: bytes, made_of: tuple[int, ...]) -> None:
        if self._watch.fingerprints_of((self._labels[path],)) != (made_of,):
            raise StaleShard(f"{os.fsdecode(path)} has changed since this was opened")

    def close(self) -> None:
        """Close the label files."""
        for file in self._open.values():
            file.close()
        self._open.clear()


class _FieldPlaces(_Places):
    """Fields of JSON, which are made when they are read. The last ones are kept."""

    def __init__(self, kinds: dict[str, _Places]) -> None:
        self._kinds = kinds
        self._read_last: OrderedDict[tuple[int, int, int, int], bytes] = OrderedDict()  # by shard, tag, place, row
        self._read_last_bytes = 0

    def content(self, request: Wanted) -> Content:
        key = request.number, request.tag, request.place, request.row
        data = self._read_last.get(key)
        if data is not None:
            self._read_last.move_to_end(key)
        json = request.json
        file, load = self._kinds[json.about["kind"]].loader(json)
        return Content(
            file, 0, request.size, NO_EXTENTS, Held(partial(self._make, key, request, file, load), data)
        )

    def origin(self, request: Wanted) -> PlainMember | None:
        return self._kinds[request.json.about["kind"]].origin(request.json)

    def _make(self, key: tuple[int, int, int, int], request: Wanted, file: ShardFile, load: Load) -> bytes:
        """Return the content of a field, and keep it. Raises StaleShard, and CorruptShard for broken JSON."""
        record, member = request.record, request.member
        try:
            data = json_fields.content_at(json_fields.parse(load()), request.about["field"]) or b""
        except CorruptShard as error:
            name = record.entry_path(record.entry_of(member)) + b"." + record.extension(member)
            raise CorruptShard(f"{os.fsdecode(name)}: {error}") from None
        if len(data) != request.size:
            raise StaleShard(f"{os.fsdecode(file.path)} has changed since this was opened")
        if key not in self._read_last:
            self._read_last[key] = data
            self._read_last_bytes += len(data)
        while self._read_last_bytes > FIELDS_BYTES:
            self._read_last_bytes -= len(self._read_last.popitem(last=False)[1])
        return data


class _EmptyPlaces(_Places):
    """Files without bytes, which stand for missing columns."""

    def __init__(self, plain: ShardSet) -> None:
        self._plain = plain

    def content(self, request: Wanted) -> Content:
        file = _present_content(self._plain, request.number, 0).file
        return Content(file, 0, 0, NO_EXTENTS, Held(bytes, b""))

    def fill(self, columns: _Columns, record: Record, number: int, place: int, members: Ints, rows: Ints) -> None:
        columns.file[members] = IN_DATA


class ViewContent:
    """Finds the content of members of derived records.

    `sources` are the sets that the view is made of, the plain one first; a shard of several is that of the first.
    `reconsider` is called with the number of a shard whose record may be wrong although its fingerprint is right.
    """

    def __init__(
        self,
        sources: Sequence[ShardSet],
        labels: Sequence[LabelFile],
        watch: CompanionWatch,
        access: Access,
        reconsider: Callable[[int], None],
    ) -> None:
        self._shards, self._labels = _ShardPlaces(sources, reconsider), _LabelPlaces(labels, watch, access)
        self._kinds: dict[str, _Places] = {SHARD: self._shards, VALUES: self._labels}
        self._kinds |= {FIELD: _FieldPlaces(self._kinds), NOTHING: _EmptyPlaces(sources[0])}
        self.read_member = self._shards.read_member

    def of(self, record: Record, number: int, tag: int, member: int) -> Content:
        """Return the content of a member of a shard of the view. Raises what `ShardSet.content` raises."""
        if record.view is None:
            return self._shards.content_at(record, number, OWN, member)
        place, row = record.address(member)
        kind = self._kinds[record.view["places"][place]["kind"]]
        if kind is self._shards:  # most are, and this saves a tuple and a call for each read
            return self._shards.content_at(record, number, place, row)
        return kind.content(Wanted(record, number, tag, member, place, row))

    def columns(self, record: Record, number: int) -> ContentColumns:
        """Return the content of all members at once, as `of`. Raises what `of` raises."""
        if record.view is None:
            return self._shards.columns_at(record, number, OWN)
        address, shift = record.array("member.head").astype(np.int64), record.view["shift"]
        place, row = address >> shift, address & (1 << shift) - 1
        order, columns = np.argsort(place, kind="stable"), _Columns(record.members)
        ends = np.cumsum(np.bincount(place, minlength=len(record.view["places"]))).tolist()
        for at, (about, begin, end) in enumerate(zip(record.view["places"], [0, *ends], ends, strict=False)):
            members = order[begin:end]
            if len(members):
                self._kinds[about["kind"]].fill(columns, record, number, at, members, row[members])
        return ContentColumns(columns.paths, columns.file, columns.start, columns.data)

    def origin(self, record: Record, number: int, member: int) -> PlainMember | None:
        """Return the set, shard and member that a member of the view comes from; None if it is in no shard.

        That shard is indexed. Raises StaleShard, and what `ShardSet.record` raises.
        """
        if record.view is None:
            return self._shards.plain, number, member
        place, row = record.address(member)
        return self._kinds[record.view["places"][place]["kind"]].origin(
            Wanted(record, number, 0, member, place, row)
        )

    def plain_of(self, record: Record, number: int) -> Record:
        """Return the record of the shard that a record is made of. Raises what `origin` raises."""
        return self._shards.source_record(record, number, OWN)[2]

    def close(self) -> None:
        """Close the label files."""
        self._labels.close()


def _describe_place(record: Record, place: int) -> dict[str, Any]:
    """Return what a derived record says of one of its places."""
    assert record.view is not None
    about: dict[str, Any] = record.view["places"][place]
    return about


def _present_content(source: ShardSet, number: int, member: int) -> Content:
    """Return the content as `ShardSet.content`, in the present shard."""
    return source.content(number, source.tag(number), member)


def _read_json(raw: Content) -> bytes:
    """Return a document. Raises what `content.read` raises, and CorruptShard for one that is too long."""
    json_fields.refuse_size(raw.size)
    return content_module.read(raw, 0, raw.size)
