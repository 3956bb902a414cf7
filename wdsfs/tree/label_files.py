"""The files of `--associate`, `--keys` and `--order` as a user names them: their format, key column and content.

A format is a kind in KIND_OF_SUFFIX, and a function in `label_rows.py` that reads its rows. Here is what formats
share: opening, limits, keys, messages.

The idea is the webdataset library's `associate` (`filters.py`): a mapping from `__key__` to further columns.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import io
import itertools
import os
import reprlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

from wdsfs import wings
from wdsfs.door.shard_door import OpenShard
from wdsfs.door.urls import is_remote
from wdsfs.errors import CorruptShard, UsageError, ViewError
from wdsfs.spec import objects
from wdsfs.tree import json_fields

KEY_COLUMNS = ("__key__", "key")
SQLITE, CSV, TSV, JSON_LINES, PARQUET, TEXT = "SQLite", "CSV", "TSV", "JSON lines", "parquet", "text"
KIND_OF_SUFFIX = {
    **dict.fromkeys((".sqlite", ".sqlite3", ".db"), SQLITE),
    ".csv": CSV,
    ".tsv": TSV,
    **dict.fromkeys((".jsonl", ".ndjson"), JSON_LINES),
}
LINE_MAX = json_fields.JSON_MAX  # bytes of a line of JSON, characters of a row of CSV
KEY_MAX = 1 << 20  # bytes of a key of a list
COLUMNS_MAX = 1 << 16  # different columns of one file
ROW_BYTES = 16  # that a row counts for, beside its values
UNPACKED_MAX = 200  # bytes for each of a file in gzip, as of compressed shards
NAMED = 20  # columns that a message names
LABELS, LIST, ORDER = "--associate", "--keys", "--order"  # the options that name a file
NO_KEY = "lists no key"
TOO_LONG = f"is longer than {KEY_MAX >> 20} MiB; a key in each line is needed"
_typed_names: dict[bytes, str] = {}  # of copies of what can be read only once, by path: what the user has named

OpenFile = Callable[[bytes], OpenShard]  # opens a file at a path, as the mount may; raises ShardErrors
Row = tuple[bytes, int, dict[str, bytes]]  # key, line, values by column


class LabelFile(NamedTuple):
    """A label file of the options: an absolute path, or a URL without secrets, and for SQLite a table.

    `column` has the keys, if its name is not one of the usual ones. `is_list`: only the keys are read.
    """

    path: bytes
    kind: str
    table: str | None = None
    column: str | None = None
    is_list: bool = False

    @property
    def key_names(self) -> tuple[str, ...]:
        """The names that the column of the keys may have."""
        return KEY_COLUMNS if self.column is None else (self.column,)

    def shows(self, column: str) -> bool:
        """Return True for a column of the file that becomes a column of samples.

        Semantics decision: `__url__` and the like are metadata by the webdataset library's convention.
        """
        return not (self.is_list or column.startswith("__"))

    @property
    def text(self) -> str:
        """The name of the file for messages."""
        return _typed_names.get(self.path) or os.fsdecode(self.path)

    @property
    def parts(self) -> list[bytes]:
        """The file and those beside it in which SQLite keeps the latest writes."""
        has_more = self.kind == SQLITE and not is_remote(self.path)
        return [self.path, self.path + b"-wal"] if has_more else [self.path]


def lasting_label(text: str) -> str:
    """Return a label file of the options that means the same later, whichever process reads it."""
    return os.path.abspath(text) if objects.is_url(text) and os.path.exists(text) else text


def label_file(text: str, option: str = LABELS) -> LabelFile:
    """Return the label file FILE or FILE.sqlite:TABLE; for other options a list. Raises UsageError.

    A list is FILE, FILE:COLUMN or FILE.sqlite:TABLE:COLUMN.
    """
    path, table, column, is_list = text, None, None, option != LABELS
    refuse_empty(text, option)
    if os.path.exists(text):  # whatever it looks like, as for SHARDS
        path = text = os.path.abspath(text)
    else:
        path, table, column = _divided(text, is_list)
    shown = objects.without_secrets(text) if objects.is_url(text) else text
    path = objects.path_of_url(path) if objects.is_url(path) else os.path.abspath(path)
    kind = _kind_of(path, is_list) or (TEXT if is_list else None)
    if kind is None:
        known = " ".join(KIND_OF_SUFFIX)
        raise UsageError(f"{option} {shown}: not a kind of label file that wdsfs knows; these end in {known}")
    if not objects.is_file(path):
        raise UsageError(f"{option} {shown}: {_why_not(path)}{_of_a_column(text) if is_list else ''}")
    if kind == PARQUET and importlib.util.find_spec("pyarrow") is None:
        raise UsageError(f"{option} {shown}: needs pyarrow; type: {wings.install_command('parquet')}")
    return LabelFile(os.fsencode(path), kind, table, column, is_list)


def refuse_empty(text: str, option: str) -> None:
    """Raise UsageError for an option without a file, as an unset variable of a shell leaves it."""
    if not text:
        raise UsageError(f"{option} '': name the file")


def _why_not(path: str) -> str:
    if os.path.isdir(path):
        return "is a directory"
    return "is no file that can be read again" if os.path.exists(path) else "there is no such file"


def _of_a_column(text: str) -> str:
    """Return the end of a message about FILE:COLUMN if there is such a file, of another kind."""
    before, colon, _ = text.rpartition(":")
    if not colon or not os.path.isfile(before):
        return ""
    known = " ".join((*KIND_OF_SUFFIX, ".parquet"))
    return f"; there is {before}, but columns are read from files that end in {known}"


def _divided(text: str, is_list: bool) -> tuple[str, str | None, str | None]:
    """Divide the text of an option into the file, the table of SQLite, and for a list the column of the keys."""
    before, colon, after = text.rpartition(":")
    kind = _kind_of(before, is_list) if colon else None
    if kind == SQLITE:
        return before, after, None
    if kind is not None and is_list:
        return before, None, after
    above, colon, table = before.rpartition(":")
    if is_list and colon and _kind_of(above, is_list) == SQLITE:
        return above, table, after
    return text, None, None


def _kind_of(path: str, is_list: bool) -> str | None:
    """Return the kind of a file by its name, which may end in `.gz`; None for one that is not known."""
    name = path.partition("?")[0] if objects.is_url(path) else path
    plain = Path(name.removesuffix(".gz"))
    kind = PARQUET if is_list and plain.suffix.lower() == ".parquet" else KIND_OF_SUFFIX.get(plain.suffix.lower())
    return None if name.endswith(".gz") and kind in (SQLITE, PARQUET) else kind


def note_typed_name(copy: bytes, typed: str) -> None:
    """Have messages about the copy at this path name what the user has typed."""
    _typed_names[copy] = typed


def label_error(file: LabelFile, line: int | None, text: str) -> ViewError:
    """Return an error about a label file."""
    return ViewError(f"{file.text}: {text}" if line is None else f"{file.text}:{line}: {text}")


def key_column(file: LabelFile, columns: Sequence[str], others: Sequence[str] = ()) -> str:
    """Return which of the columns has the keys; `others` may, too. Raises ViewError."""
    for name in file.key_names if file.column else (*KEY_COLUMNS, *others):
        if name in columns:
            return name
    what = " or ".join(map(repr, file.key_names))
    text = f"has no column {what} that says which sample a row is for; it has {columns_text(columns)}"
    other = (
        f"; name another one as in {file.text}:COLUMN" if file.is_list and columns and file.kind != SQLITE else ""
    )
    raise label_error(file, None, text + other)


def value_of(file: LabelFile, line: int, column: str, value: Any) -> bytes | None:
    """Return the content of the file for a value; None for no file. Raises ViewError."""
    try:
        return json_fields.content_of(value)
    except CorruptShard as error:
        raise label_error(file, line, f"the field {column!r} {error}") from None


@contextlib.contextmanager
def open_content(path: bytes, open_file: OpenFile) -> Iterator[BinaryIO]:
    """Open a label file to read; a remote one is brought into the cache. Raises ShardError, OSError."""
    shard = open_file(path)
    if isinstance(shard, int):
        with os.fdopen(shard, "rb") as stream:
            yield stream
    else:
        with contextlib.closing(shard), open(f"/proc/self/fd/{shard.whole()}", "rb") as stream:
            yield stream


@contextlib.contextmanager
def open_text(file: LabelFile, open_file: OpenFile) -> Iterator[IO[bytes]]:
    """Open a file of text as `open_content`, unpacked if its name ends in `.gz`. Raises also ViewError."""
    with open_content(file.path, open_file) as stream:
        if not file.path.partition(b"?" if is_remote(file.path) else b"\0")[0].endswith(b".gz"):
            yield stream
            return
        most = UNPACKED_MAX * os.fstat(stream.fileno()).st_size + LINE_MAX
        try:
            yield io.BufferedReader(_Bounded(file, gzip.GzipFile(fileobj=stream), most))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise label_error(file, None, f"cannot be unpacked: {error}") from None


class _Bounded(io.RawIOBase):
    """A file that is unpacked, of at most `most` bytes. Raises ViewError at the next one."""

    def __init__(self, file: LabelFile, stream: gzip.GzipFile, most: int) -> None:
        super().__init__()
        self._file, self._stream, self._left = file, stream, most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        self._left -= len(data)
        if self._left < 0:
            raise label_error(self._file, None, f"unpacks to more than {UNPACKED_MAX} times its size")
        buffer[: len(data)] = data
        return len(data)


def shorten(value: object) -> str:
    """Return a value for a message: it may be as long as a line."""
    return reprlib.repr(value)


def columns_text(columns: Iterable[str]) -> str:
    """Return names of columns for a message, the first ones of many."""
    first = list(itertools.islice(columns, NAMED + 1))
    return (", ".join(map(shorten, first[:NAMED])) or "none") + (", ..." if len(first) > NAMED else "")
