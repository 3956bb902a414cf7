"""The content of members of a view: in a shard, decoded or taken from one, or a value of a label file.

A derived record says which member of which shard a file is. That shard is read through its plain set, so what is
true of reading a plain mount is true of a view.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from wdsfs.errors import CorruptShard, ShardError, StaleShard
from wdsfs.index.record import Record
from wdsfs.storage.identity import Fingerprint
from wdsfs.tar import member_reader
from wdsfs.tar.sparse import NO_EXTENTS
from wdsfs.tree import content as content_module
from wdsfs.tree import json_fields
from wdsfs.tree.companions import CompanionWatch
from wdsfs.tree.content import Content, Held
from wdsfs.tree.content_columns import HELD, IN_DATA, NO_DATA, ContentColumns
from wdsfs.tree.draft import DECODED, FIELD, NOTHING, OWN, SHARD, VALUES
from wdsfs.tree.label_files import LabelFile
from wdsfs.tree.open_files import ShardFile
from wdsfs.tree.shard_access import Access
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.source_sets import SourceSets, content_of

DECODED_BYTES = member_reader.DECODED_MAX  # of decoded members and fields that a process keeps

# Kinds of places whose members are made of others, and the section that says of which.
_MADE_OF = {DECODED: "decoded.from", FIELD: "field.from"}

_Key = tuple[int, int, int, int]  # shard, tag, place, row


class DerivedContent:
    """Finds what members of derived records consist of; keeps label files open, and an LRU of decoded content.

    `reconsider` is called with the number of a shard whose record may be wrong although its fingerprint is right.
    """

    def __init__(
        self,
        sources: SourceSets,
        labels: list[LabelFile],
        watch: CompanionWatch,
        access: Access,
        reconsider: Callable[[int], None],
    ) -> None:
        self._sources, self._watch, self._access, self._reconsider = sources, watch, access, reconsider
        self._labels = {one.path: one for one in labels}
        self._label_files: dict[bytes, ShardFile] = {}
        self._made: OrderedDict[_Key, bytes] = OrderedDict()
        self._made_bytes = 0

    def of(self, record: Record, number: int, tag: int, member: int) -> Content:
        """The content of a member of a shard of the view.

        Raises what `ShardSet.content` raises.
        """
        if record.view is None:
            return self._in_shard(record, number, OWN, member)
        place, row = record.address(member)
        return self._at(record, number, tag, place, row, member)

    def columns(self, record: Record, number: int) -> ContentColumns:
        """As `of`, of all members at once. Raises what `of` raises."""
        if record.view is None:
            return self._columns_of_shard(record, number, OWN)
        address, shift = record.array("member.head").astype(np.int64), record.view["shift"]
        place, row = address >> shift, address & (1 << shift) - 1
        order = np.argsort(place, kind="stable")
        file, start = np.full(record.members, HELD, np.int64), np.zeros(record.members, np.int64)
        paths, data = list[bytes](), NO_DATA
        ends = np.cumsum(np.bincount(place, minlength=len(record.view["places"]))).tolist()
        for at, (about, begin, end) in enumerate(zip(record.view["places"], [0, *ends], ends, strict=False)):
            its = order[begin:end]
            if not len(its):
                continue
            if about["kind"] == SHARD:
                found = self._columns_of_shard(record, number, at)
                file[its], start[its] = found.file[row[its]], found.start[row[its]]
                file[its] += np.where(file[its] < 0, 0, len(paths))
                paths += found.paths
            elif about["kind"] == VALUES:
                self._label_file(about)
                file[its], start[its] = IN_DATA, record.array("values.start")[row[its]]
                data = record.array("values")
            elif about["kind"] == NOTHING:
                file[its] = IN_DATA
        return ContentColumns(paths, file, start, data)

    def _columns_of_shard(self, record: Record, number: int, place: int) -> ContentColumns:
        source, base = self._source(record, number, place)
        return source.content_columns(base)

    def origin(self, record: Record, number: int, member: int) -> tuple[ShardSet, int, int] | None:
        """The set, shard and member that a member of the view comes from; None if it is in no shard.

        That shard is indexed. Raises StaleShard, and what `ShardSet.record` raises.
        """
        if record.view is None:
            return self._sources.plain, number, member
        place, row = record.address(member)
        while (section := _MADE_OF.get(record.view["places"][place]["kind"])) is not None:
            place, row = _packed_address(record, section, row)
        if record.view["places"][place]["kind"] != SHARD:
            return None
        source, base, _ = self._source_record(record, number, place)
        return source, base, row

    def plain_of(self, record: Record, number: int) -> Record:
        """The record of the shard that a record is made of. Raises what `origin` raises."""
        return self._source_record(record, number, OWN)[2]

    def _source_record(self, record: Record, number: int, place: int) -> tuple[ShardSet, int, Record]:
        """As `_source`, with the record of that shard."""
        source, base = self._source(record, number, place)
        before = source.tag(base)
        return source, base, source.record(base, before)

    def read_member(self, path: bytes, member: int) -> bytes:
        """The whole content of a member of the shard at `path`. Raises NotIndexed, ShardError."""
        source, number = self._sources.find(path)
        content = content_of(source, number, member)
        return content_module.read(content, 0, content.size)

    def _at(self, record: Record, number: int, tag: int, place: int, row: int, member: int) -> Content:
        assert record.view is not None
        about = record.view["places"][place]
        if about["kind"] == SHARD:
            return self._in_shard(record, number, place, row)
        size = record.size_and_time(member)[0]
        if about["kind"] in _MADE_OF:
            key = (number, tag, place, row)
            data = self._made.get(key)
            if data is not None:
                self._made.move_to_end(key)
            file, load = self._loader(record, number, place, row)
            held = Held(partial(self._make, key, file, load, record, member), data)
            return Content(file, 0, size, NO_EXTENTS, held)
        if about["kind"] == NOTHING:
            file = content_of(self._sources.plain, number, 0).file
            return Content(file, 0, 0, NO_EXTENTS, Held(bytes, b""))
        return Content(self._label_file(about), 0, size, NO_EXTENTS, Held(bytes, record.names_in("values")[row]))

    def _loader(
        self, record: Record, number: int, place: int, row: int, limited: bool = False
    ) -> tuple[ShardFile, Callable[[], bytes]]:
        """The file that the bytes at an address come from, and what returns all of them. Raises what `of` raises.

        The function raises CorruptShard for what cannot be decoded, is no JSON, or, if `limited`, is too long.
        """
        assert record.view is not None
        about = record.view["places"][place]
        section = _MADE_OF.get(about["kind"])
        if section is None and about["kind"] == SHARD:
            raw = self._in_shard(record, number, place, row)
            return raw.file, partial(_whole, raw, limited)
        if section is None:
            return self._label_file(about), partial(record.names_in("values").__getitem__, row)
        address = _packed_address(record, section, row)
        file, below = self._loader(record, number, *address, limited=about["kind"] == FIELD)
        if about["kind"] == DECODED:
            return file, partial(_decode, record.column["decoded.codec"][row], below)
        return file, partial(_field, about["field"], below)

    def _source(self, record: Record, number: int, place: int) -> tuple[ShardSet, int]:
        """The plain set and the number there of the shard that is a place of this record. Raises StaleShard."""
        source, base = self._sources.plain, number
        made_of: tuple[int, ...] = record.fingerprint
        if record.view is not None:
            about = record.view["places"][place]
            made_of = tuple(about["fingerprint"])
            if place != OWN:
                source, base = self._sources.find(_path_of(about))
        # The address of a member counts in the record that this one was derived from, and in no other. The source
        # set may not have looked since this record was made, perhaps by another process.
        if source.fingerprint(base) != made_of:
            source.distrust()
        if source.fingerprint(base) != made_of:
            raise StaleShard(f"{source.path_text(base)} has changed since this was opened")
        return source, base

    def _in_shard(self, record: Record, number: int, place: int, member: int) -> Content:
        source, base = self._source(record, number, place)
        try:
            return content_of(source, base, member)
        except StaleShard:
            # It may have other content with the times that it had: then nothing else shows the change.
            self._reconsider(number)
            raise

    def _label_file(self, about: dict[str, Any]) -> ShardFile:
        """The label file that a value comes from, if it is as it was then. Raises ShardError."""
        path, made_of = _path_of(about), tuple(about["fingerprint"])
        file = self._label_files.get(path)
        if file is not None and file.fingerprint == made_of:
            return file
        self._check_label_file(path, made_of)
        fd = self._access.open(path)
        ctime_ns = os.fstat(fd).st_ctime_ns if isinstance(fd, int) else 0
        fresh = ShardFile(fd, fd, path, Fingerprint(*made_of), ctime_ns)
        try:
            self._check_label_file(path, made_of)
        except ShardError:
            fresh.close()
            raise
        if file is not None:
            file.close()
        self._label_files[path] = fresh
        return fresh

    def _check_label_file(self, path: bytes, made_of: tuple[int, ...]) -> None:
        if self._watch.fingerprint_of(self._labels[path]) != made_of:
            raise StaleShard(f"{os.fsdecode(path)} has changed since this was opened")

    def _make(self, key: _Key, file: ShardFile, load: Callable[[], bytes], record: Record, member: int) -> bytes:
        try:
            data = load()
        except CorruptShard as error:
            name = record.entry_path(record.entry_of(member)) + b"." + record.extension(member)
            raise CorruptShard(f"{os.fsdecode(name)}: {error}") from None
        if len(data) != record.size_and_time(member)[0]:
            raise StaleShard(f"{os.fsdecode(file.path)} has changed since this was opened")
        if key not in self._made:
            self._made[key] = data
            self._made_bytes += len(data)
        while self._made_bytes > DECODED_BYTES:
            self._made_bytes -= len(self._made.popitem(last=False)[1])
        return data

    def release(self) -> None:
        """Close the label files."""
        for file in self._label_files.values():
            file.close()
        self._label_files.clear()


def _path_of(about: dict[str, Any]) -> bytes:
    path: str = about["path"]
    return path.encode("utf-8", "surrogateescape")


def _packed_address(record: Record, section: str, row: int) -> tuple[int, int]:
    """The address of the member that a member in this section is made of."""
    assert record.view is not None
    shift, address = record.view["shift"], record.column[section][row]
    return address >> shift, address & (1 << shift) - 1


def _whole(raw: Content, limited: bool) -> bytes:
    if limited:
        json_fields.refuse_size(raw.size)
    return content_module.read(raw, 0, raw.size)


def _decode(codec: int, load: Callable[[], bytes]) -> bytes:
    return member_reader.decode(codec, load())


def _field(path: str, load: Callable[[], bytes]) -> bytes:
    return json_fields.content_at(json_fields.parse(load()), path) or b""
