"""Questions about the table of the set: the samples that pass a filter, in any order, and counts of their values.

DuckDB answers them, from the rows that the table has so far. A filter becomes SQL here: its values and texts are
parameters, and its columns are looked up among the columns of the table.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import itertools
import math
import os
import random
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from wdsfs.errors import StaleShard, UsageError, bytes_text, several
from wdsfs.names import readable
from wdsfs.pages.filters import Condition, Filter, names_in
from wdsfs.pages.shown_set import Snapshot, Subject
from wdsfs.pages.table_maker import FOLDER, SIZES, WHOLE, Column, TableMaker, is_of_records
from wdsfs.tree.table_rows import SIZE

SECONDS = 10.0  # that a question may take
SMALL, SMALL_SECONDS = 20_000, 20.0  # samples of a small set, and the wait for its table
DRAWN_MAX = 100_000  # samples at random that are shown
LINES = 100_000  # samples that are listed at a time
LISTED = 50  # columns that an error names
VALUES_MAX = 100  # of a condition `in`
BARS, TOP = 20, 20  # of a histogram, and values of a column by their number
HISTOGRAMS_MAX = 16  # columns with histograms
FEW, MANY = 50, 10_000  # values of a text that has one, without and with a condition
TEXTS_MAX = 30  # columns of texts whose values are counted
LOOKED_AT = 100_000  # samples, whose texts say whether a column has few values
CACHED_MAX, NUMBERS_MAX = 32, 16 << 20  # answers, and numbers of samples in those
COPIED_MAX = 16 << 20  # values of samples that pass, for histograms
LABEL_MAX = 100  # characters
CAPTIONS = ("txt", "caption", "text", "transcript", "json.caption", "json.text")
NUMBER = "(first + place)"  # of a sample, in SQL
Ask = Callable[..., Any]
Result = range | NDArray[np.int64]


class Progress(NamedTuple):
    """Numbers of shards: readable ones, ones with keys and sizes in the table, and ones with values in it, too.

    `note` is a sentence about what stays out of the table, or empty.
    """

    shards: int
    sized: int
    valued: int
    note: str

    @property
    def is_complete(self) -> bool:
        """True if all values are there."""
        return self.valued == self.shards


@dataclass(frozen=True, slots=True)
class HistogramBar:
    """Samples with one value, or with those of a range; `condition` chooses them."""

    label: str
    count: int
    condition: Condition
    is_chosen: bool


class Histogram(NamedTuple):
    """Counts of samples by the values of a column; `low` and `high` are the ends of the axis of numbers.

    `missing` counts samples without a value, `rest` samples whose values have no bar.
    """

    column: str
    kind: str
    bars: tuple[HistogramBar, ...]
    missing: int
    rest: int
    low: str = ""
    high: str = ""


class Neighbours(NamedTuple):
    """The place of a sample in a result (None if it is not there), and the numbers of the samples beside it."""

    place: int | None
    before: int | None
    after: int | None


class TableOfSet:
    """The table of the set, made in the background since the first snapshot that `follow` is told.

    Numbers of samples are those of the snapshot that is asked about. Questions raise UsageError for columns that
    are not there, values that do not fit, and where an answer would need too much time or memory.
    """

    def __init__(self, subject: Subject) -> None:
        self._maker = TableMaker(subject)
        self._class_names = subject.class_names
        self._names_used = Counter(subject.class_names.values())
        self._cache: OrderedDict[Any, Any] = OrderedDict()
        self._lock = threading.Lock()
        self.close, self.follow = self._maker.close, self._maker.follow

    # --- progress of the table

    def progress(self, now: Snapshot) -> Progress:
        """Return how much of a snapshot is in the table."""

        def make() -> Progress:
            numbers, done = [self._maker.number_of(now, shard) for shard in now.readable], self._maker.done
            sized, valued = (sum(number in done[table] for number in numbers) for table in (SIZES, WHOLE))
            return Progress(len(numbers), sized, valued, self._maker.problem)

        progress: Progress = self._cached(("progress", now.version), make)
        return progress

    def progress_of(self, now: Snapshot, filter_: Filter) -> tuple[int, int]:
        """Return how many shards the table that answers a filter has, and how many the set has."""
        progress = self.progress(now)
        return (progress.valued if self._table_of(filter_) == WHOLE else progress.sized), progress.shards

    def wait(self, now: Snapshot, filter_: Filter, seconds: float) -> bool:
        """Wait until the table can answer a filter for the whole set; return whether it can.

        The table of a small set is made at once, so it is waited for longer.
        """

        def is_there() -> bool:
            done, shards = self.progress_of(now, filter_)
            return done == shards

        seconds = max(seconds, SMALL_SECONDS if now.total <= SMALL and seconds else 0)
        self._maker.wait_until(lambda: is_there() or self._maker.is_ready, seconds)
        return is_there()

    def columns(self) -> list[Column]:
        """Return the columns of the table so far."""
        return list(self._maker.columns.values())

    def caption_column(self) -> str | None:
        """Return the column with a text about the sample; None if there is none."""
        return next((name for name in CAPTIONS if name in self._maker.columns), None)

    def class_column(self) -> str | None:
        """Return the first column with classes, a file before a field; None if folders alone are classes."""
        names = (column.name for column in self.columns() if column.kind == "class" and column.name != FOLDER)
        return min(names, key=lambda name: name.count("."), default=None)

    def class_name(self, value: object) -> str | None:
        """Return the name of a class; None if it has none."""
        return self._class_names.get(str(value))

    # --- samples

    def result(self, now: Snapshot, filter_: Filter) -> Result:
        """Return the numbers of the samples that pass, in order: all of them, also those of other pages."""
        if not filter_:
            return range(now.total)
        result: Result = self._cached(("result", filter_, now.version), lambda: self._result(now, filter_))
        return result

    def _result(self, now: Snapshot, filter_: Filter) -> Result:
        order, parameters = self._order(filter_)
        with self._asking(now, filter_) as ask:
            numbers: Result = ask(f"SELECT {NUMBER} AS number {{rows}} {order}", parameters).fetchnumpy()["number"]
        return numbers if order else np.sort(numbers, kind="stable")

    def neighbours(self, now: Snapshot, filter_: Filter, number: int) -> Neighbours:
        """Return the place of a sample in the result, and the samples before and after it."""
        result = self.result(now, filter_)
        places = [number] if isinstance(result, range) else np.flatnonzero(result == number).tolist()
        if not places or places[0] >= len(result):
            return Neighbours(None, None, None)
        beside = (place for place in (places[0] - 1, places[0] + 1))
        return Neighbours(places[0], *(int(result[at]) if 0 <= at < len(result) else None for at in beside))

    def values(
        self, now: Snapshot, numbers: Sequence[int], names: Sequence[str]
    ) -> dict[int, dict[str, int | float | str | bool]]:
        """Return the values that samples have, by the numbers of the samples and the names of columns."""
        columns = [self._maker.columns[name] for name in names if name in self._maker.columns]
        if not (columns and numbers):
            return {}
        fields = ", ".join(column.field for column in columns)
        with self._asking(now, Filter(), columns, {now.shard_of(number) for number in numbers}) as ask:
            query = f"SELECT {NUMBER}, {fields} {{rows}} AND list_contains(?, {NUMBER})"
            rows = ask(query, [list(numbers)]).fetchall()
        return {
            number: {
                column.name: value for column, value in zip(columns, values, strict=True) if value is not None
            }
            for number, *values in rows
        }

    def key_lines(self, now: Snapshot, filter_: Filter, begin: int) -> tuple[bytes, int | None]:
        """Return lines SHARD/KEY for `--keys` of samples that pass, from the place `begin` on, and where to go on.

        None is the end. Raises UsageError also for a key with a line end, ShardErrors.
        """
        result = self.result(now, filter_.ordered(""))
        numbers, end = result[begin : begin + LINES], begin + LINES
        lines = []
        for shard, some in itertools.groupby(map(int, numbers), now.shard_of):
            name, first = now.shards[shard].name, now.first_of(shard)
            for key in now.keys(shard, [number - first for number in some]):
                if not {10, 13, 0}.isdisjoint(key):
                    text = readable(name + b"/" + key)
                    raise UsageError(f"{text}: a list cannot have this key, which has a line end")
                lines.append(b"%s/%s\n" % (name, key))
        return b"".join(lines), end if end < len(result) else None

    # --- counts of values

    def histograms(self, now: Snapshot, filter_: Filter) -> list[Histogram]:
        """Return histograms of classes, numbers, sizes, and texts with few values, for the samples that pass."""
        passing, unordered = len(self.result(now, filter_)), filter_.ordered("")
        key = ("histograms", unordered, now.version)
        histograms: list[Histogram] = self._cached(key, lambda: self._histograms(now, unordered, passing))
        return histograms

    def _histograms(self, now: Snapshot, filter_: Filter, passing: int) -> list[Histogram]:
        kinds: dict[str, list[Column]] = {kind: [] for kind in ("class", "number", "size", "truth", "text")}
        for column in self.columns():
            kinds[column.kind].append(column)
        values = self._values_of_texts(now, kinds["text"][:TEXTS_MAX])
        kinds["text"] = [column for column in kinds["text"] if 0 < values.get(column, 0) <= FEW]
        kinds["class"].sort(key=lambda column: (column.name.count("."), column.name == FOLDER))
        most = {"class": 3, "number": 4, "size": 2, "truth": 1, "text": 2}
        chosen = [column for kind, columns in kinds.items() for column in columns[: most[kind]]]
        names = {condition.column for condition in filter_.conditions}
        chosen += [
            column
            for column in self.columns()
            if column.name in names and column not in chosen and values.get(column, 0) <= MANY
        ]
        chosen = chosen[:HISTOGRAMS_MAX]
        if not chosen:
            return []
        with self._asking(now, filter_, chosen) as ask:
            if filter_ and passing * len(chosen) <= COPIED_MAX:  # so that the filter is asked once
                fields = ", ".join(column.field for column in chosen)
                ask(f"CREATE TEMP TABLE passing AS SELECT {fields} {{rows}}")
                ask = functools.partial(ask, rows="FROM passing")
            histograms = [
                (self._by_range if column.kind in ("number", "size") else self._by_value)(ask, filter_, column)
                for column in chosen
            ]
        return [histogram for histogram in histograms if histogram.bars]

    def _values_of_texts(self, now: Snapshot, columns: list[Column]) -> dict[Column, int]:
        """Return how many different values columns have in the first samples, about."""
        if not columns:
            return {}

        def count() -> list[int]:
            fields = ", ".join(column.field for column in columns)
            counts = ", ".join(f"approx_count_distinct({column.field})" for column in columns)
            with self._asking(now, Filter(), columns) as ask:
                query = f"SELECT {counts} FROM (SELECT {fields} {{rows}} LIMIT {LOOKED_AT})"
                return list(ask(query).fetchall()[0])

        return dict(zip(columns, self._cached(("texts", now.version, *columns), count), strict=True))

    def _by_range(self, ask: Ask, filter_: Filter, column: Column) -> Histogram:
        """Return the histogram of a column of numbers."""
        values = f"FROM (SELECT {column.field}::DOUBLE AS value {{rows}})"
        query = "min(value) FILTER (isfinite(value)), max(value) FILTER (isfinite(value))"
        total, present, *ends = ask(f"SELECT count(*), count(value), {query} {values}").fetchall()[0]
        edges = _edges(column, *ends)
        # A bin of DuckDB ends with a number that belongs to it, a bar before one that does not.
        bins = [math.nextafter(edge, -math.inf) for edge in edges[1:]]
        query = f"SELECT histogram(value, ?::DOUBLE[]) FILTER (isfinite(value)) {values}"
        counts = ask(query, before=[bins]).fetchall()[0][0] or {}
        bars = []
        for edge, end, last in zip(edges, edges[1:], bins, strict=False):
            condition = Condition(column.name, "range", f"{edge:.15g}..{end:.15g}")
            label, is_chosen = _number_text(column, edge), condition in filter_.conditions
            bars.append(HistogramBar(label, counts.get(last, 0), condition, is_chosen))
        rest = present - sum(bar.count for bar in bars)
        texts = [_number_text(column, end) for end in ends if end is not None]
        return Histogram(column.name, column.kind, tuple(bars), total - present, rest, *texts)

    def _by_value(self, ask: Ask, filter_: Filter, column: Column) -> Histogram:
        """Return the most frequent values of a column."""
        query = f"""
            SELECT {column.field}::VARCHAR AS value, count(*) AS samples, sum(count(*)) OVER () {{rows}}
            GROUP BY {column.field} ORDER BY value IS NULL DESC, samples DESC, value LIMIT ?"""
        rows = ask(query, [TOP + 1]).fetchall()
        counts = {value: count for value, count, _ in rows}
        missing, total = counts.pop(None, 0), int(rows[0][2]) if rows else 0
        bars = tuple(self._value_bar(filter_, column, *row) for row in list(counts.items())[:TOP])
        rest = total - missing - sum(bar.count for bar in bars)
        return Histogram(column.name, column.kind, bars, missing, rest)

    def _value_bar(self, filter_: Filter, column: Column, value: str, count: int) -> HistogramBar:
        named = self.class_name(value) if column.kind == "class" else None
        is_clear = named is not None and self._names_used[named] == 1 and named not in self._class_names
        condition = Condition(column.name, "=", named if named and is_clear else value)
        label = (value if named is None else f"{value} {named}")[:LABEL_MAX]
        return HistogramBar(label, count, condition, condition in filter_.conditions)

    # --- SQL

    def _table_of(self, filter_: Filter) -> str:
        """Return the table that has the columns of a filter."""
        names = [condition.column for condition in filter_.conditions] + [filter_.order] * bool(filter_.order)
        return SIZES if all(map(is_of_records, names)) else WHOLE

    def _column(self, name: str) -> Column:
        """Return a column. Raises UsageError."""
        column = self._maker.columns.get(_text(name))
        if column is None:
            names = list(self._maker.columns)
            if name.startswith(SIZE):  # the name of a file, which `has` takes
                names = [other.removeprefix(SIZE) for other in names if other.startswith(SIZE)]
            listed = several(sorted(names), LISTED) or "none"
            raise UsageError(
                f"No sample has a column {_text(name).removeprefix(SIZE)}. Columns of this set: {listed}."
            )
        return column

    def _order(self, filter_: Filter) -> tuple[str, list[Any]]:
        """Return the order of a result as SQL, and its parameters."""
        if filter_.order:
            field = self._column(filter_.order).field
            return f"ORDER BY {field} {'DESC' if filter_.down else 'ASC'} NULLS LAST, {NUMBER}", []
        if filter_.q:  # a sample with exactly this key comes first
            return f"ORDER BY key = ? DESC, {NUMBER}", [_text(filter_.q)]
        return "", []

    def _where(self, filter_: Filter) -> tuple[str, list[Any]]:
        """Return the conditions of a filter as SQL, and their parameters. Raises UsageError."""
        texts, parameters = ["true"], list[Any]()
        if filter_.q:
            texts.append("contains(key, ?)")
            parameters.append(_text(filter_.q))
        if filter_.class_:
            texts.append("starts_with(key, ?)")
            parameters.append(_text(filter_.class_) + "/")
        for names, word in ((filter_.has, "NOT NULL"), (filter_.lacks, "NULL")):
            texts += [f"{self._column(SIZE + name).field} IS {word}" for name in sorted(names_in(names))]
        for condition in filter_.conditions:
            text, more = self._condition(condition)
            texts.append(f"({text})")
            parameters += more
        return " AND ".join(texts), parameters

    def _condition(self, condition: Condition) -> tuple[str, list[Any]]:
        """Return a condition as SQL, and its parameters. Raises UsageError."""
        column, op, value = self._column(condition.column), condition.op, _text(condition.value)
        field = column.field
        if op in ("present", "missing"):
            return f"{field} IS {'NOT ' * (op == 'present')}NULL", []
        if op == "~":
            return f"contains(lower({field}::VARCHAR), ?)", [value.lower()]
        if op == "range":
            low, dots, high = value.partition("..")
            if not dots:
                raise UsageError(f"{value}: is no range; type FIRST..END, such as 3..5, which leaves out 5")
            return f"{field} >= ? AND {field} < ?", [_operand(column, low), _operand(column, high)]
        if op in ("=", "!=", "in"):
            values = _listed(value) if op == "in" else [value]
            tests = [self._equals(column, value) for value in values]
            text = " OR ".join(text for text, _ in tests) or "false"
            return (f"NOT ({text})" if op == "!=" else text), [value for _, more in tests for value in more]
        return f"{field} {op} ?", [_operand(column, value)]

    def _equals(self, column: Column, value: str) -> tuple[str, list[Any]]:
        """Return the test for a value as SQL, and its parameters; `*` stands for any text, a class has a name."""
        field, is_text = column.field, pa.types.is_string(column.type)
        if column.kind == "class" and (
            labels := [key for key, name in self._class_names.items() if name == value]
        ):
            return f"list_contains(?, {field}::VARCHAR)", [[*labels, value]]
        if "*" in value:
            escaped = value.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_").replace("*", "%")
            return f"{field}::VARCHAR LIKE ? ESCAPE '\\'", [escaped]
        if not is_text:
            return f"{field} = ?", [_operand(column, value)]
        number = _number(value)
        if number is None:
            return f"{field} = ?", [value]
        return f"{field} = ? OR TRY_CAST({field} AS DOUBLE) IS NOT DISTINCT FROM ?", [value, float(number)]

    @contextlib.contextmanager
    def _asking(
        self, now: Snapshot, filter_: Filter, needs: Collection[Column] = (), shards: Collection[int] | None = None
    ) -> Iterator[Ask]:
        """Ask about the samples that pass: SQL where `{rows}` is FROM and WHERE, and the parameters around that.

        `needs` are columns that are used beside those of the filter. Raises UsageError when it takes too long in
        all, or too much memory.
        """
        is_of_sizes = self._table_of(filter_) == SIZES and all(is_of_records(column.name) for column in needs)
        table = SIZES if is_of_sizes else WHOLE
        where, parameters = self._where(filter_)
        own_rows = f"FROM {table} JOIN shown USING (shard) WHERE {where}"

        def ask(query: str, after: Sequence[Any] = (), before: Sequence[Any] = (), rows: str = own_rows) -> Any:
            own = parameters if rows is own_rows else []
            return cursor.execute(query.replace("{rows}", rows), [*before, *own, *after])

        with self._maker.database.cursor() as cursor:
            cursor.register("shown", self._shown(now, table, filter_, shards))
            timer = threading.Timer(SECONDS, cursor.interrupt)
            timer.daemon = True
            timer.start()
            try:
                yield ask
            except duckdb.InterruptException:
                text = f"the answer takes longer than {SECONDS:.0f} seconds; choose fewer samples"
                raise UsageError(text) from None
            except duckdb.OutOfMemoryException:
                text = "the answer needs more memory than the table may have; choose fewer samples"
                raise UsageError(text) from None
            except duckdb.CatalogException:
                raise StaleShard("the table gets another column at this moment") from None
            except duckdb.Error as error:
                raise UsageError(f"the table has no answer: {str(error).splitlines()[0]}") from None
            finally:
                timer.cancel()

    def _shown(self, now: Snapshot, table: str, filter_: Filter, shards: Collection[int] | None = None) -> Any:
        """Return the shards of a snapshot that a table has, with the numbers of their first samples."""

        def make() -> Any:
            done, rows = self._maker.done[table], []
            for at in now.readable if shards is None else shards:
                number = self._maker.number_of(now, at)
                if number in done and filter_.takes_shard(now.shards[at].name):
                    rows.append((number, now.first_of(at)))
            columns = np.array(rows, np.int64).reshape(len(rows), 2).T
            return pa.table({"shard": columns[0].astype(np.int32), "first": columns[1]})

        return self._cached(("shown", table, filter_.shard, now.version), make) if shards is None else make()

    def _cached(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Return an answer, which is made once for each state of the table."""
        key = (*key, self._maker.state)
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        answer = make()
        with self._lock:
            self._cache[key] = answer
            numbers = sum(len(some) for (kind, *_), some in self._cache.items() if kind == "result")
            while len(self._cache) > CACHED_MAX or (numbers > NUMBERS_MAX and len(self._cache) > 1):
                (kind, *_), some = self._cache.popitem(last=False)
                numbers -= len(some) if kind == "result" else 0
        return answer


def drawn(total: int, seed: int, at: int, count: int) -> list[int]:
    """Return numbers below `total` in a random order, the same for the same seed, from the place `at` on."""
    return [] if at > DRAWN_MAX else list(itertools.islice(draws(total, seed), at, at + count))


def draws(total: int, seed: int) -> Iterator[int]:
    """Yield every number below `total` once, in a random order, which is the same for the same seed."""
    generator, moved = random.Random(seed), dict[int, int]()
    for at in range(total):
        place = generator.randrange(at, total)
        yield moved.get(place, place)
        moved[place] = moved.pop(at, at)


def _text(text: bytes | str) -> str:
    """Return a text of an address as the table has it: bytes that are not UTF-8 are written out."""
    return os.fsencode(text).decode("utf-8", "backslashreplace")


def _listed(text: str) -> list[str]:
    """Return the values in a text with commas between them, which quotes may hold. Raises UsageError."""
    try:
        values = next(csv.reader([text], skipinitialspace=True), [])
    except csv.Error as error:
        raise UsageError(f"{text[:LABEL_MAX]}: is no list of values: {error}") from None
    if len(values) > VALUES_MAX:
        raise UsageError(f"{len(values)} values are too many for a condition; at most {VALUES_MAX} are allowed")
    return values


def _number(text: str) -> int | float | None:
    """Return the number that a text is, whole ones of 64 bits as such; None if it is none."""
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        if -(1 << 63) <= number < 1 << 63 or (kind is float and not math.isnan(number)):
            return number
    return None


def _operand(column: Column, text: str) -> Any:
    """Return a value that is compared with those of a column. Raises UsageError."""
    if pa.types.is_string(column.type):
        return text
    if pa.types.is_boolean(column.type):
        if text.lower() not in ("true", "false"):
            raise UsageError(f"{text or 'nothing'}: {column.name} is true or false")
        return text.lower() == "true"
    number = _number(text)
    if number is None:
        what = "no number, and no name of a class" if column.kind == "class" else "no number"
        raise UsageError(f"{text or 'nothing'}: is {what}; {column.name} has numbers")
    return number


def _edges(column: Column, low: float | None, high: float | None) -> list[float]:
    """Return the ends of the bars of a histogram: round numbers, of sizes powers of two; none without values."""
    if low is None or high is None:
        return [0.0]
    if column.kind == "size":
        first, last = (int(size).bit_length() for size in (low, high))
        width = -(-(last - first + 1) // BARS)
        return [float((1 << bits) >> 1) for bits in range(first, last + width + 1, width)]
    raw = max(high / BARS - low / BARS, 1e-9 * max(abs(low), abs(high))) if low < high else abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(max(raw, 1e-300)))
    step = next(times * power for times in (1, 2, 2.5, 5, 10, 20) if times * power >= raw)
    if pa.types.is_integer(column.type):
        step = float(max(math.ceil(step), 1))
    begin, end = math.floor(low / step), math.floor(high / step) + 1
    return [float(f"{number * step:.15g}") for number in range(begin, end + 1)]


def _number_text(column: Column, number: float) -> str:
    if column.kind == "size":
        return bytes_text(int(number))
    return f"{number:,.6g}" if abs(number) >= 10_000 else f"{number:.6g}"  # a year has no comma
