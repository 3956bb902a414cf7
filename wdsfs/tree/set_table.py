"""Tables of a set, made shard by shard: keys and sizes by the index, values by the cache, or read now.

The values of a shard are kept in the cache as a file of Arrow. Its key has the content of the shard and how the
set is shown: a set that has grown is read once, and a shard that has changed is read again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from wdsfs.cache import file_cache
from wdsfs.cache.file_cache import NewFile
from wdsfs.errors import ShardError, StaleShard, UnreadableShard
from wdsfs.index import process_pool
from wdsfs.spec.spec_words import anchored_options
from wdsfs.tree.composition import Composition
from wdsfs.tree.indexing import indexed
from wdsfs.tree.numbered_tree import samples_of
from wdsfs.tree.opening import open_known_set
from wdsfs.tree.sample_reader import SampleReader
from wdsfs.tree.set_options import Opening
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.table_rows import (
    KEY,
    NUMBER,
    SHARD,
    SIZE,
    Left,
    ShardMembers,
    common_type,
    entries_of,
    keys_of,
    kinds_of,
    values_of,
)

FORMAT, KIND = "4", "rows"  # of values in the cache
_LEFT = b"left"  # in the metadata of such a file: a `Left`
ROWS = 1 << 16  # of a part
_ALONE = 2000  # samples that this process reads before others have started


class ShardValues:
    """The values of each shard of an open set, from the cache, or read now by `reader`."""

    def __init__(self, lower: ShardSet, composition: Composition, reader: SampleReader) -> None:
        self._lower, self._composition, self._reader = lower, composition, reader
        self.keys: dict[int, str] = {}  # of shards, if they were made before

    def table(self, shard: int) -> Any:
        """Return the values of a shard as a table of Arrow. Raises ShardErrors."""
        return self._stored(shard, pa.RecordBatchFileReader.read_all)

    def schema(self, shard: int) -> Any:
        """Return the columns of `table`, whose metadata counts the values that it lacks. Raises ShardErrors."""
        return self._stored(shard, lambda stored: stored.schema)

    def find(self, shard: int) -> Any | None:
        """Return `table` if it is in the cache, else None. Raises ShardErrors."""
        return self.table(shard) if self.is_cached(shard) else None

    def is_cached(self, shard: int) -> bool:
        """Return True if the values of a shard are in the cache. Raises ShardErrors."""
        cached = file_cache.cache().find(self.key(shard), (KIND,))
        if cached is not None:
            os.close(cached.fd)
        return cached is not None

    def key(self, shard: int) -> str:
        """Return the key of values in the cache: another one for other bytes or options. Raises ShardErrors."""
        if shard in self.keys:
            return self.keys[shard]
        digest = self._lower.record(shard).digest().hex()
        path = self._lower.shards[shard].path
        about = FORMAT, path, *self._lower.fingerprint(shard), digest, self._composition.text
        return hashlib.blake2b(repr(about).encode(), digest_size=16).hexdigest()

    def store(self, shard: int, packed: bytes = b"") -> int:
        """Return a descriptor of values in the cache; new ones are `packed`, or read now. Raises ShardErrors."""
        cache = file_cache.cache()

        def fill(file: NewFile) -> tuple[str, int]:
            data = packed or self.pack(shard)
            file.write(data)
            return KIND, len(data)

        try:
            return cache.make(self.key(shard), (KIND,), fill).fd
        except file_cache.NoRoom as error:
            raise UnreadableShard(
                f"the cache {cache.directory} has no room for the values of a table: {error}; see --cache-size"
            ) from None

    def pack(self, shard: int) -> bytes:
        """Return the values of a shard, read now, as a file of Arrow. Raises ShardErrors."""
        with self._reader.lock:
            kinds = kinds_of(self._composition, indexed(self._lower.record, shard))
        table, left = values_of(self._reader, self._reader.numbers(shard), kinds)
        table = table.replace_schema_metadata({_LEFT: json.dumps(left)})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
            writer.write_table(table)
        return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]

    def _stored(self, shard: int, ask: Callable[[Any], Any]) -> Any:
        """Ask the file of a shard. Raises ShardErrors."""
        for _ in range(2):
            try:
                with open(self.store(shard), "rb") as file:
                    return ask(pa.ipc.open_file(file))
            except pa.ArrowInvalid:  # damaged: the next turn makes it again
                file_cache.cache().drop(self.key(shard), KIND)
        raise UnreadableShard(f"the cache {file_cache.cache().directory} does not keep its files")


class SetTable:
    """The table of an open set, whose columns are settled when this has been made.

    `with_values`: the values of columns are in it, too. `schema` is that of Arrow; `left` counts the values that
    are not in the table. Raises ShardErrors of reading.
    """

    def __init__(
        self, lower: ShardSet, composition: Composition, opening: Opening, *, with_values: bool = True
    ) -> None:
        self._lower, self._composition, self._opening = lower, composition, opening
        self._with_values = with_values
        self._reader = SampleReader(lower, nullcontext())
        self._values = ShardValues(lower, composition, self._reader)
        if with_values:
            self._read_missing()
        self.left = Left()
        self.schema = self._schema()

    @property
    def rows(self) -> int:
        """The number of samples."""
        return self._reader.count

    def parts(self) -> Iterator[Any]:
        """Yield the rows, of each shard or a part of it, as tables of Arrow with the columns of `schema`.

        Raises ShardErrors.
        """
        for shard in range(len(self._lower)):
            entries = self._entries(shard)
            values = self._values.table(shard) if self._with_values and len(entries) else None
            for begin in range(0, len(entries), ROWS):
                part = None if values is None else values.slice(begin, ROWS)
                yield self._part(shard, begin, entries[begin : begin + ROWS], part)

    def _part(self, shard: int, begin: int, entries: Any, values: Any | None) -> Any:
        record, name = indexed(self._lower.record, shard), os.fsdecode(self._lower.shards[shard].name)
        first = self._reader.numbers(shard).start + begin
        columns = {
            KEY: keys_of(record, entries),
            SHARD: pa.repeat(pa.scalar(name, pa.large_string()), len(entries)),
            NUMBER: pa.array(np.arange(first, first + len(entries))),
            **{SIZE + column: sizes for column, sizes in self._members(shard, entries).sizes().items()},
        }
        if values is not None:
            columns |= dict(zip(values.column_names, values.columns, strict=True))
        arrays = [
            as_type(columns[field.name], field.type)
            if field.name in columns
            else pa.nulls(len(entries), field.type)
            for field in self.schema
        ]
        return pa.table(arrays, schema=self.schema)

    def _schema(self) -> Any:
        """Return the columns of the table, in the order in which the shards have them."""
        sizes, values = dict[str, None](), dict[str, Any]()
        for shard in range(len(self._lower)):
            sizes.update(dict.fromkeys(self._members(shard, self._entries(shard)).names))
            if not self._with_values:
                continue
            schema = self._values.schema(shard)
            self.left = self.left.plus(left_of(schema))
            for field in schema:
                values[field.name] = common_type(values.get(field.name, pa.null()), field.type)
        fixed = [(KEY, pa.large_string()), (SHARD, pa.large_string()), (NUMBER, pa.int64())]
        return pa.schema([*fixed, *((SIZE + name, pa.int64()) for name in sizes), *values.items()])

    def _entries(self, shard: int) -> Any:
        return entries_of(indexed(samples_of, self._lower, shard))

    def _members(self, shard: int, entries: Any) -> ShardMembers:
        return ShardMembers(indexed(self._lower.record, shard), entries)

    def _read_missing(self) -> None:
        """Read the values of all shards that are not in the cache, by several processes. Raises ShardErrors."""
        missing = [shard for shard in range(len(self._lower)) if not self._values.is_cached(shard)]
        samples = sum(len(self._reader.numbers(shard)) for shard in missing)
        with self._opening.progress.shards("reading values", len(missing)) as advance:
            workers = self._opening.workers
            if workers is None and (samples <= _ALONE or self._opening.jobs == 1):
                for shard in missing:
                    os.close(self._values.store(shard))
                    advance()
                return
            # A worker of a cluster has an index of its own.
            index_dir = self._opening.index_dir if workers is None else None
            # Not the words of the user: standard input can be read only once.
            shards, composition = list(self._lower.shards), _anchored(self._composition)
            sent = pickle.dumps((shards, composition, index_dir, self._opening.tolerance, self._reader.digest))
            work = process_pool.units(
                _values_elsewhere,
                missing,
                self._opening.jobs,
                workers,
                name=lambda shard: os.fsdecode(self._lower.shards[shard].path),
                prepare=lambda shard: (sent, shard),
            )
            with contextlib.closing(work):
                for shard, packed in work:
                    if isinstance(packed, ShardError):
                        raise packed
                    os.close(self._values.store(shard, packed))
                    advance()


def left_of(schema: Any) -> Left:
    """Return the counts of values that a table with this schema lacks."""
    return Left(*json.loads(schema.metadata[_LEFT]))


def _values_elsewhere(unit: tuple[bytes, int]) -> bytes:
    """Return the packed values of a shard; runs in a process of the pool."""
    sent, shard = unit
    return _opened_elsewhere(sent).pack(shard)


@lru_cache(maxsize=1)
def _opened_elsewhere(sent: bytes) -> ShardValues:
    """Open a set that the parent has open, too, for as long as this process lives. Raises StaleShard."""
    shards, composition, index_dir, tolerance, digest = pickle.loads(sent)
    opening = Opening(index_dir, jobs=1, quiet=True, tolerance=tolerance)
    lower = open_known_set(shards, opening, composition, whole=True).__enter__()
    reader = SampleReader(lower, nullcontext())
    if reader.digest != digest:
        raise StaleShard("the set changes while it is read; repeat the command")
    return ShardValues(lower, composition, reader)


def _anchored(composition: Composition) -> Composition:
    """Return options that mean the same in another working directory."""
    names = "join", "associate", "keys", "class_names"
    return replace(composition, **anchored_options({name: getattr(composition, name) for name in names}))


def as_type(array: Any, kind: Any) -> Any:
    """Return a column of a shard as the set has it; beside fractions whole numbers of 54 bits are rounded."""
    if array.type == kind:
        return array
    if pa.types.is_string(kind) and not pa.types.is_null(array.type):
        return pa.array([None if value is None else json.dumps(value) for value in array.to_pylist()], kind)
    return array.cast(kind, safe=False)
