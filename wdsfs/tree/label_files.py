"""The files of `--associate`, `--keys` and `--order` as a user names them: their format, key column and content.

A format is a kind in KIND_OF_SUFFIX, and a function in `label_rows.py` that reads its rows. Here is what formats
share: opening, limits, keys, messages.

The idea is the webdataset library's `associate` (`filters.py`): a mapping from `__key__` to further columns.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import importlib.util
import io
import itertools
import os
import re
import reprlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from wdsfs import wings
from wdsfs.door.shard_door import OpenShard
from wdsfs.door.urls import is_remote
from wdsfs.errors import CorruptShard, UsageError, ViewError, and_others
from wdsfs.names import PLAIN, Reading
from wdsfs.shards import Fingerprint, lasting_number
from wdsfs.spec import objects
from wdsfs.spec.spec_words import collect, expand_words
from wdsfs.tree import json_fields

KEY_COLUMNS = ("__key__", "key")
# Semantics decision: names of files go before numbers, for `id` is often the number of a row or of a task.
_FILE_COLUMNS = ("file_name", "filename", "file_path", "filepath", "audio_filepath", "image_path", "audio_path")
_MEDIA = ("image", "audio", "video")  # of Hugging Face as {"bytes": ..., "path": ...}, of Label Studio in "data"
_MEDIA_FIELDS = [form.format(name) for form in ("{}", "{}.path", "data.{}") for name in _MEDIA]
GUESSED_COLUMNS = (*_FILE_COLUMNS, "path", "file", *_MEDIA_FIELDS)
ID_COLUMNS = ("uid", "id")
SQLITE, CSV, TSV, JSON, TEXT = "SQLite", "CSV", "TSV", "JSON", "text"
PARQUET, ARROW, NPY = "parquet", "Arrow", "npy"
KIND_OF_SUFFIX = {
    ".csv": CSV,
    ".tsv": TSV,
    **dict.fromkeys((".json", ".jsonl", ".ndjson", ".manifest"), JSON),
    **dict.fromkeys((".parquet", ".pq"), PARQUET),
    **dict.fromkeys((".arrow", ".feather"), ARROW),
    **dict.fromkeys((".sqlite", ".sqlite3", ".db"), SQLITE),
    ".npy": NPY,
}
_KIND_OF_HEAD = {  # of files whose suffix says nothing
    b"SQLite format 3\0": SQLITE,
    b"PAR1": PARQUET,
    b"ARROW1\0\0": ARROW,
    b"\x93NUMPY": NPY,
    **dict.fromkeys((b'{"', b'[{"', b'["'), JSON),
}
_HEAD = 64  # bytes of a file that are looked at for its kind
_PATTERN = re.compile(r"[*?\[{]")
LINE_MAX = json_fields.JSON_MAX  # bytes of a line of JSON, characters of a row of CSV
KEY_MAX = 1 << 20  # bytes of a key of a list
COLUMNS_MAX = 1 << 16  # different columns of one file
ROW_BYTES = 16  # that a row counts for, beside its values
_COSTLY = (b"\n", b"}", b"/")  # the end of a row or an object; a directory in a name
UNPACKED_MAX = 200  # bytes for each of a file in gzip, as of compressed shards
NAMED = 20  # columns that a message names
LABELS, LIST, ORDER, TABLE = "--associate", "--keys", "--order", "--table"  # the options that name a file
NO_KEY = "lists no key"
KEY_COLUMN_WAY_OUT = "FILE:COLUMN names another column"
TOO_LONG = f"is longer than {KEY_MAX >> 20} MiB; a key in each line is needed"
_typed_names: dict[bytes, str] = {}  # by the path of the copy of a file that can be read only once

OpenFile = Callable[[bytes], OpenShard]  # opens a file at a path, as the mount may; raises ShardErrors
Row = tuple[bytes, int, dict[str, bytes]]  # key, line, values by column


class LabelFile(NamedTuple):
    """A label file of the options: an absolute path, or a URL without secrets, and for SQLite a table.

    `column` has the keys, if it is named. `is_list`: only the keys are read. `reading` is that of the set.
    """

    path: bytes
    kind: str
    table: str | None = None
    column: str | None = None
    is_list: bool = False
    reading: Reading = PLAIN

    def shows(self, column: str) -> bool:
        """Return True for a column of the file that becomes a column of samples.

        Semantics decision: `__url__` and the like are metadata by the webdataset library's convention; pandas
        writes the numbers of its rows into a column without a name.
        """
        return bool(column) and not (self.is_list or column.startswith("__"))

    @property
    def text(self) -> str:
        """The name of the file for messages."""
        return _typed_names.get(self.path) or os.fsdecode(self.path)

    @property
    def parts(self) -> list[bytes]:
        """The file and those beside it in which SQLite keeps the latest writes."""
        has_more = self.kind == SQLITE and not is_remote(self.path)
        return [self.path, self.path + b"-wal"] if has_more else [self.path]


LabelFiles = tuple[LabelFile, ...]  # the files of one option: they are one table


def text_of_files(files: LabelFiles) -> str:
    """Return the name of a table for messages."""
    return files[0].text + and_others(len(files))


class LabelSource:
    """A label file that is being read.

    `guessed` is the column of its keys, if its name says so only nearly. `has_keys`: there are no names of files.
    """

    def __init__(self, file: LabelFile, open_file: OpenFile) -> None:
        self.file, self.open_file = file, open_file
        self.guessed: str | None = None
        self.has_keys = False

    def key_column(
        self, columns: Sequence[str], first: Sequence[str] = (), last: Sequence[str] = (), line: int | None = None
    ) -> str:
        """Return which of these columns has the keys. Raises ViewError.

        Columns of this file alone may be tried before or after columns that are guessed by their names.
        """
        file = self.file
        names = (file.column,) if file.column else (*KEY_COLUMNS, *first, *GUESSED_COLUMNS, *ID_COLUMNS, *last)
        name = next((name for name in names if name in columns), None)
        if name is not None:
            self.guessed = None if name in (file.column, *KEY_COLUMNS) else name
            self.has_keys = name in KEY_COLUMNS
            return name
        what = repr(file.column) if file.column else "that names the samples, such as 'key' or 'file_name'"
        place = "TABLE:COLUMN" if file.kind == SQLITE else "COLUMN"
        way_out = f"; name one as in {file.text}:{place}" if columns and not file.column else ""
        first = "; the first line has to name the columns" if file.kind in (CSV, TSV) and not file.column else ""
        raise label_error(file, line, f"has no column {what} (columns: {columns_text(columns)}){first}{way_out}")


def lasting_label(text: str) -> str:
    """Return a label file of the options that means the same later, whichever process reads it."""
    return os.path.abspath(text) if objects.is_url(text) and os.path.exists(text) else text


def label_files(text: str, option: str = LABELS, reading: Reading = PLAIN) -> LabelFiles:
    """Return the files of FILE, FILE:COLUMN, FILE.sqlite:TABLE or FILE.sqlite:TABLE:COLUMN, which are one table.

    FILE may be a glob, or have braces. Raises UsageError, SpecError.
    """
    refuse_empty(text, option)
    if os.path.exists(text):  # whatever it looks like, as for SHARDS
        typed, table, column, paths = text, None, None, [text]
    else:
        typed, table, column = _divided(text)
        is_pattern = _PATTERN.search(typed) and not os.path.exists(typed)
        paths = [word.path for word in collect(expand_words([typed]))] if is_pattern else [typed]
    return tuple(_checked_file(path, table, column, option, reading) for path in paths)


def _checked_file(text: str, table: str | None, column: str | None, option: str, reading: Reading) -> LabelFile:
    is_list = option in (LIST, ORDER)
    is_url = objects.is_url(text) and not os.path.exists(text)
    shown = objects.without_secrets(text) if is_url else text
    path = objects.path_of_url(text) if is_url else os.path.abspath(text)
    if not objects.is_file(path):
        raise UsageError(f"{option} {shown}: {_refusal_of(path)}")
    kind = _kind_of(path) or _kind_by_content(path) or (TEXT if is_list else None)
    if kind is None or (kind == NPY and not is_list):
        known = " ".join(suffix for suffix, some in KIND_OF_SUFFIX.items() if some != NPY)
        raise UsageError(f"{option} {shown}: not a kind of table that wdsfs knows: these end in {known}")
    if column is not None and kind in (TEXT, NPY):
        raise UsageError(f"{option} {shown}:{column}: the file has no columns; name it without :{column}")
    if kind in (PARQUET, ARROW) and importlib.util.find_spec("pyarrow") is None:
        raise UsageError(f"{option} {shown}: needs pyarrow; type: {wings.install_command('parquet')}")
    return LabelFile(os.fsencode(path), kind, table, column, is_list, reading)


def refuse_empty(text: str, option: str) -> None:
    """Raise UsageError for an option without a file, as an unset variable of a shell leaves it."""
    if not text:
        raise UsageError(f"{option} '': name the file")


def _refusal_of(path: str) -> str:
    if os.path.isdir(path):
        return "is a directory"
    return "is no file that can be read again" if os.path.exists(path) else "there is no such file"


def _divided(text: str) -> tuple[str, str | None, str | None]:
    """Divide the text of an option into the file, the table of SQLite, and the column of the keys."""
    before, colon, after = text.rpartition(":")
    if not colon:
        return text, None, None
    above, colon, table = before.rpartition(":")
    if colon and _kind_of(above) == SQLITE:
        return above, table, after
    kind = _kind_of(before) or (_kind_by_content(before) or TEXT if os.path.isfile(before) else None)
    if kind is None:
        return text, None, None
    return (before, after, None) if kind == SQLITE else (before, None, after)


def _kind_of(path: str) -> str | None:
    """Return the kind of a file by its name, which may end in `.gz`; None for one that is not known."""
    name = path.partition("?")[0] if objects.is_url(path) else path
    kind = KIND_OF_SUFFIX.get(Path(name.removesuffix(".gz")).suffix.lower())
    return None if name.endswith(".gz") and kind not in (CSV, TSV, JSON) else kind


def _kind_by_content(path: str) -> str | None:
    """Return the kind of a local file by how it begins; None for one that is not known."""
    if objects.is_url(path) or path.endswith((".txt", ".gz")):
        return None
    with contextlib.suppress(OSError), open(path, "rb") as stream:
        head = stream.read(_HEAD).removeprefix(b"\xef\xbb\xbf")
        begins = b"".join(head.split()) if head[:1] in b"[{" else head
        return next((kind for start, kind in _KIND_OF_HEAD.items() if begins.startswith(start)), None)
    return None


def fingerprints_of(files: LabelFiles, look: Callable[[bytes], Fingerprint]) -> tuple[Fingerprint, ...]:
    """Return the fingerprints of label files now; `look` is that of the mount. Raises what it raises."""
    return tuple(_fingerprint_of(file, look) for file in files)


def _fingerprint_of(file: LabelFile, look: Callable[[bytes], Fingerprint]) -> Fingerprint:
    """Return the fingerprint of a label file, mixed with those of the files that SQLite keeps beside it."""
    fingerprint = look(file.path)
    for path in file.parts[1:]:
        with contextlib.suppress(OSError):
            beside = os.stat(path)
            # An empty file means the same as none. The ctime is not used: SQLite sets it when it opens a file to
            # read.
            if beside.st_size:
                packed = Fingerprint(beside.st_size, beside.st_mtime_ns, lasting_number(beside)).packed
                digest = hashlib.blake2b(packed, digest_size=8).digest()
                fingerprint = fingerprint.mixed_with(int.from_bytes(digest, "little"))
    return fingerprint


def note_typed_name(copy: bytes, typed: str) -> None:
    """Have messages about the copy at this path name what the user has typed."""
    _typed_names[copy] = typed


def label_error(file: LabelFile, line: int | None, text: str) -> ViewError:
    """Return an error about a label file."""
    return ViewError(f"{file.text}: {text}" if line is None else f"{file.text}:{line}: {text}")


def key_of(file: LabelFile, line: int, column: str, value: Any) -> bytes:
    """Return the key in a row: a text or a number. Raises ViewError.

    Semantics decision: whole numbers are written without zeros in front. So are whole numbers that pandas has
    written as fractions (17.0), because a row had none. Any other fraction names no sample.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None or isinstance(value, dict | list | bool | float):
        raise label_error(file, line, f"the field {shorten(column)} is not a key: {shorten(value)}")
    return values_of(file, line, [(column, value)])[column]


def values_of(file: LabelFile, line: int, fields: Iterable[tuple[str, Any]]) -> dict[str, bytes]:
    """Return the content of the file for each value, none for `null`, by columns. Raises ViewError."""
    values, column = dict[str, bytes](), ""
    try:
        for column, value in fields:
            if (content := json_fields.content_of(value)) is not None:
                values[column] = content
    except CorruptShard as error:
        raise label_error(file, line, f"the field {shorten(column)} {error}") from None
    return values


@contextlib.contextmanager
def open_content(path: bytes, open_file: OpenFile) -> Iterator[io.BufferedReader]:
    """Open a label file to read; a remote one is brought into the cache. Raises ShardError, OSError."""
    shard = open_file(path)
    if isinstance(shard, int):
        with os.fdopen(shard, "rb") as stream:
            yield stream
    else:
        with contextlib.closing(shard), open(f"/proc/self/fd/{shard.whole()}", "rb") as stream:
            yield stream


@contextlib.contextmanager
def open_text(source: LabelSource) -> Iterator[io.BufferedReader]:
    """Open a file of text as `open_content`, unpacked if its name ends in `.gz`. Raises also ViewError."""
    file = source.file
    with open_content(file.path, source.open_file) as stream:
        text, most = stream, UNPACKED_MAX * os.fstat(stream.fileno()).st_size + LINE_MAX
        if file.path.partition(b"?" if is_remote(file.path) else b"\0")[0].endswith(b".gz"):
            text = io.BufferedReader(_Bounded(file, gzip.GzipFile(fileobj=stream), most))
        try:
            if text.peek(2).startswith((b"\xff\xfe", b"\xfe\xff")):
                raise label_error(file, None, "is in UTF-16: save it as UTF-8")
            yield text
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise label_error(file, None, f"cannot be unpacked: {error}") from None


class _Bounded(io.RawIOBase):
    """A file that is unpacked, of at most `most` bytes. Raises ViewError at the next one.

    Rows and directories of names count for more: short ones, again and again, would take minutes to store.
    """

    def __init__(self, file: LabelFile, stream: gzip.GzipFile, most: int) -> None:
        super().__init__()
        self._file, self._stream, self._left = file, stream, most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        self._left -= len(data) + ROW_BYTES * sum(map(data.count, _COSTLY))
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
