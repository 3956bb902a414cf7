"""The samples of a set: as a sequence, which PyTorch takes as a data set without being needed; as a table."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, SupportsIndex, TypeAlias, Unpack, overload

from wdsfs import wings
from wdsfs.errors import NoSuchEntry, ShardError, StaleShard, UsageError, WdsfsError
from wdsfs.library.opened_set import Closed, OfSet, OpenedSet, SetOptions, Shards, options_named_here, texts
from wdsfs.tree.sample_decoder import Decoder, SampleDecoder
from wdsfs.tree.sample_reader import RESERVED, SampleReader

Sample: TypeAlias = dict[str, Any]
Decode: TypeAlias = bool | Mapping[str, Decoder] | None


class Samples(OfSet, Sequence[Sample]):
    """The samples of a set by their numbers, made by `wdsfs.samples`.

    A sample is a dict of the bytes of its columns by their names, or of their values if it is decoded, with the
    texts `__key__` and `__shard__`. A number, a slice or a list of numbers can be in the brackets. It can be used
    by several threads, after a fork, and in processes to which it is pickled; a set that is another one there
    raises StaleShard.
    """

    @options_named_here()
    def __init__(self, shards: Shards, decode: Decode = False, **options: Any) -> None:
        for text in (*texts(options.get("columns") or ()), *texts(options.get("field") or ())):
            if text.partition("=")[0] in RESERVED:
                raise UsageError(f"{text!r}: each sample has a key and a shard of that name; take another name")
        self._decode = decode
        decoders = {} if decode is True else decode
        self._decoder = None if decoders is None or decoders is False else SampleDecoder(decoders)
        self._set = OpenedSet(shards, "samples", True, **options)
        self._reader = self._set.build(lambda lower: SampleReader(lower, self._set.lock))
        self._count = self._reader.count

    def close(self) -> None:
        self._reader = Closed()  # type: ignore[assignment]  # it raises whatever is asked
        super().close()

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, number: SupportsIndex) -> Sample: ...
    @overload
    def __getitem__(self, number: slice | Iterable[SupportsIndex]) -> list[Sample]: ...
    def __getitem__(self, number: SupportsIndex | slice | Iterable[SupportsIndex]) -> Sample | list[Sample]:
        """Return a sample, or a list of those of a slice or of many numbers.

        Raises IndexError, StaleShard for a shard that has changed since the set was opened, other ShardErrors.
        """
        if type(number) is int and 0 <= number < self._count:  # nearly always
            return self._decoded(self._reader.sample(number))
        if isinstance(number, slice):
            return self.__getitems__(range(self._count)[number])
        try:
            operator.index(number)  # type: ignore[arg-type]
        except TypeError:
            if isinstance(number, str | bytes):
                raise TypeError("samples are numbered; for the sample of a key call by_key") from None
            return self.__getitems__(number)  # type: ignore[arg-type]
        return self._decoded(self._reader.sample(self._checked(number)))  # type: ignore[arg-type]

    def __getitems__(self, numbers: Iterable[SupportsIndex]) -> list[Sample]:
        """Return many samples, in the order of the numbers. They are read in the order of the shards."""
        read = self._reader.samples([self._checked(number) for number in numbers])
        return read if self._decoder is None else list(map(self._decoder.decode, read))

    def _decoded(self, sample: Sample) -> Sample:
        return sample if self._decoder is None else self._decoder.decode(sample)

    def will_read(self, first: int, stop: int) -> None:
        """Begin to read the samples from number `first` to before `stop`, so that they are there when asked for.

        Returns at once. The bytes go to the page cache, those of a store to the cache of the node: all processes
        of the node share them. This is only a hint: samples that cannot be read raise where they are asked for.
        """
        with contextlib.suppress(ShardError):
            self._reader.will_read(range(max(first, 0), min(stop, self._count)))

    def _checked(self, number: SupportsIndex) -> int:
        """Return the number of a sample, which may be counted from the end. Raises IndexError, TypeError."""
        if isinstance(number, bool):
            raise TypeError("samples have numbers: turn a list of booleans into the numbers of its true elements")
        number = operator.index(number)
        if not -self._count <= number < self._count:
            raise IndexError(f"there is no sample {number:,}; the set has {self._count:,}")
        return number % self._count

    def __iter__(self) -> Iterator[Sample]:
        return map(self.__getitem__, range(self._count))

    def by_key(self, key: str) -> Sample:
        """Return the sample with this key, `KEY` or `SHARD/KEY`.

        The first call makes a table of all keys, which the index keeps. Raises NoSuchEntry, UsageError if several
        shards have it.
        """
        numbers = self._reader.find(key)
        if not numbers:
            raise NoSuchEntry(f"no sample has the key {key!r}")
        if len(numbers) > 1:
            first, last = self[numbers[0]]["__shard__"], self[numbers[-1]]["__shard__"]
            way_out = "use their numbers" if first == last else "name the shard before the key, SHARD/KEY"
            text = f"{len(numbers)} samples have the key {key!r}, the first, number {numbers[0]}, in {first}"
            raise UsageError(f"{text}: {way_out}")
        return self[numbers[0]]

    def keys(self) -> Iterator[str]:
        """Yield the keys of all samples, in the order of the set."""
        for shard in range(self._reader.shards):
            yield from self._reader.keys(shard)

    def __repr__(self) -> str:
        with contextlib.suppress(WdsfsError):
            return f"<wdsfs.samples: {self._count:,} in {len(self._set.lower):,} shards>"
        return f"<wdsfs.samples: {self._count:,}, which cannot be read>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _sent, (*self._set.sent, self._reader.digest, self._decode, self._count)


def _sent(shards: list[str], options: dict[str, Any], digest: bytes, decode: Decode, count: int) -> Samples:
    """Open the samples that another process has sent. If they are gone or have changed, each question raises that.

    Not this call: a worker that PyTorch spawns would end here, and the loop would not know why.
    """
    try:
        samples = Samples(shards, decode, **options)
        if samples._reader.digest == digest:
            return samples
        samples.close()
        error: WdsfsError = StaleShard("the set has changed since it was sent to this process: open it again")
    except WdsfsError as failure:
        error = failure.with_traceback(None)  # whose frames would keep all that was opened
    samples = Samples.__new__(Samples)
    samples._count, samples._decoder = count, None
    samples._set = samples._reader = Closed(error)  # type: ignore[assignment]
    return samples


def samples(shards: Shards, *, decode: Decode = False, **options: Unpack[SetOptions]) -> Samples:
    """Open the samples of a set; SHARDS and options are those of `wdsfs mount`.

    ::

        train = wdsfs.samples("train-{000000..000999}.tar", columns=["jpg", "cls"])
        train[0]["jpg"], train[-1]["__key__"], len(train), train[[5, 3]]

    `columns`, `field`, `join`, `associate` (each a text or several), `ignore_case`, `missing`,
    `duplicates`, `keys`, `split`, `shard_id` of `num_shards`, `ignore_zeros`, `group_by_key`, `key_ends`,
    `base`, `allow_missing`, `strict`, `index_dir` and `jobs` mean what `wdsfs mount --help` says. `keys` may also
    be a list, an array or a column of keys; samples stay in the order of the set. `decode`: True for the values
    that `wdsfs.decode` returns, or its decoders. `progress` is called with what is being done, how many shards are
    done, and how many there are. Raises WdsfsError.
    """
    return Samples(shards, decode, **options)


def decode(sample: Mapping[str, Any], decoders: Mapping[str, Decoder] = MappingProxyType({})) -> Sample:
    """Return a sample with the values of its columns, by the last part of the extension.

    Pictures (`jpg`, `png` ...) as those of Pillow, `npy` and `npz` as arrays of NumPy, `txt` as text, `cls` as a
    number, `json` parsed; other columns stay bytes, and nothing is unpickled. `decoders` are functions of bytes by
    extension, which come first. Raises DecodeError, which names sample and column.
    """
    return SampleDecoder(decoders).decode(sample)


@options_named_here()
def table(shards: Shards, *, sizes: bool = False, **options: Unpack[SetOptions]) -> Any:
    """Return a table of a set as a `pyarrow.Table`, a row a sample; SHARDS and options are those of `samples`.

    Its columns are those of `wdsfs table --help`; with `sizes` only keys and sizes, for which no shard is read.
    Needs pyarrow (the extra `parquet`). Raises WdsfsError, also where pyarrow is missing.
    """
    wings.need_tables()
    import pyarrow as pa  # late: only tables need it

    from wdsfs.tree.set_table import SetTable

    with contextlib.closing(OpenedSet(shards, "samples", True, **options)) as opened:
        made = SetTable(opened.lower, opened.composition, opened.opening, with_values=not sizes)
        return pa.concat_tables([made.schema.empty_table(), *made.parts()])
