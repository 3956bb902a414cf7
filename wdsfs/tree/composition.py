"""The options of a view (`--columns`, `--field`, `--join` ...) as checked plain values, and as text.

This module is light to import, and reads no shard. `cli/view_options.py` declares the options, `view_record.py`
makes a view.
"""

from __future__ import annotations

import getopt
import hashlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from wdsfs.errors import UsageError
from wdsfs.names import lower_case, text_of
from wdsfs.spec import objects
from wdsfs.tree import json_fields

OF_CLASSES = ("class_from", "class_names", "class_digits")
_MANY = ("columns", "field", "join", "associate")
_FLAGS = ("ignore_case",)
_POLICIES = ("missing", "duplicates")
FORMAT = 7  # of derived records: count it up when the same options give another result, not for a new option
ERROR, SKIP, EMPTY = "error", "skip", "empty"
COLUMN_NAME_MAX = 200  # bytes of the name of a column


def composition_of(layout: str, **typed: Any) -> Composition:
    """Check options of a view, given by name, and return them. Raises UsageError."""
    class_options = [f"--{name.replace('_', '-')}" for name in OF_CLASSES if typed[name] is not None]
    if layout != "classes" and class_options:
        raise UsageError(f"{class_options[0]} is for --layout classes")
    extension, field = class_source("cls" if typed["class_from"] is None else typed["class_from"])
    columns, fields = columns_of(typed["columns"]), fields_of(typed["field"])
    refuse_equal_names(columns, fields)
    join, associate, keys = _lasting_files(typed["join"], typed["associate"], typed.get("keys"))
    as_typed = ("ignore_case", "missing", "duplicates", "class_names", "class_digits")
    return Composition(
        columns=columns,
        fields=fields,
        classes=layout == "classes",
        class_from=extension,
        class_field=field,
        join=join,
        associate=associate,
        keys=keys,
        **{name: typed[name] for name in as_typed},
    )


def _lasting_files(
    join: Sequence[str], associate: Sequence[str], keys: str | None
) -> tuple[tuple[str, ...], tuple[str, ...], str | None]:
    """Return joined shards, label files and list in a form that another process reads with the same meaning."""
    if not (join or associate or keys is not None):
        return (), (), None
    # Late: commands that need no view start without NumPy.
    from wdsfs.spec.spec_words import settled
    from wdsfs.tree.label_files import lasting_label

    list_ = None if keys is None else lasting_label(keys)
    return tuple(map(settled, join)), tuple(map(lasting_label, associate)), list_


def parse_composition(layout: str, text: str) -> Composition:
    """Return the options of a view from their text (`Composition.text`). Raises UsageError."""
    typed: dict[str, Any] = dict.fromkeys((*OF_CLASSES, "keys")) | dict.fromkeys(_FLAGS, False)
    typed |= dict.fromkeys(_POLICIES, "error") | {name: [] for name in _MANY}
    names = [name.replace("_", "-") for name in typed]
    flags = [name.replace("_", "-") for name in _FLAGS]
    try:
        pairs, _ = getopt.getopt(shlex.split(text), "", [name if name in flags else f"{name}=" for name in names])
    except (getopt.GetoptError, ValueError) as error:
        raise UsageError(f"{text}: {error}") from None
    for option, value in pairs:
        name = option[2:].replace("-", "_")
        if name in _MANY:
            typed[name].append(value)
        else:
            typed[name] = name in _FLAGS or (int(value) if name == "class_digits" else value)
    return composition_of(layout, **typed)


class Column(NamedTuple):
    """One output of `--columns`: its alternatives, as extensions, and the name it gets, empty for their own."""

    alternatives: tuple[bytes, ...]
    name: bytes = b""

    @property
    def text(self) -> str:
        """Return the text as typed on a command line."""
        return text_of((self.name + b"=" if self.name else b"") + b";".join(self.alternatives))


class Field(NamedTuple):
    """One `--field`: the extension of the file, that of the JSON column, and the path to the field there."""

    name: bytes
    column: bytes
    path: str

    @property
    def text(self) -> str:
        """Return the text as typed on a command line."""
        return f"{text_of(self.name)}={text_of(self.column)}:{self.path}"


@dataclass(frozen=True, slots=True)
class Composition:
    """The options of a view.

    `keys` is the list of the shown samples, None for all. `columns` are the outputs of `--columns`, `fields` are
    files from JSON. `join` are specs of shard sets, `associate` and `class_names` paths
    of files. `class_from` is an extension, `class_field` the path to a field of its JSON. Classes that are whole
    numbers are shown with `class_digits` digits. 0: as they are written. None: with the number of digits of the
    longest class of the set. To find it, `view_set.py` reads all shards.
    """

    columns: tuple[Column, ...] = ()
    fields: tuple[Field, ...] = ()
    ignore_case: bool = False
    missing: str = ERROR
    duplicates: str = ERROR
    join: tuple[str, ...] = ()
    associate: tuple[str, ...] = ()
    classes: bool = False
    class_from: bytes = b"cls"
    class_field: str = ""
    class_names: str | None = None
    class_digits: int | None = None
    keys: str | None = None

    @property
    def is_plain(self) -> bool:
        """True if shards are shown unchanged, except for left-out samples."""
        return self.only_chooses and self.keys is None

    @property
    def only_chooses(self) -> bool:
        """True if samples are shown unchanged, all or some."""
        changes = self.columns or self.fields or self.ignore_case or self.join or self.associate
        return not (changes or self.classes)

    @property
    def names_files(self) -> bool:
        """True if files are named, whose paths may be relative."""
        return bool(self.join or self.associate or self.class_names or self.keys)

    @property
    def text(self) -> str:
        """The options as typed on a command line."""
        words: list[str] = [] if self.keys is None else ["--keys", self.keys]
        words += [word for column in self.columns for word in ("--columns", column.text)]
        words += [word for field in self.fields for word in ("--field", field.text)]
        words += ["--ignore-case"] * self.ignore_case
        words += [word for spec in self.join for word in ("--join", spec)]
        words += [word for path in self.associate for word in ("--associate", path)]
        if self.classes:
            words += [
                "--class-from",
                text_of(self.class_from) + (f":{self.class_field}" if self.class_field else ""),
            ]
            words += ["--class-names", self.class_names] if self.class_names else []
            words += ["--class-digits", str(self.class_digits)] if self.class_digits is not None else []
        words += ["--missing", self.missing] if self.missing != ERROR else []
        words += ["--duplicates", self.duplicates] if self.duplicates != ERROR else []
        return shlex.join(words)

    @property
    def public_text(self) -> str:
        """Return `text` without possible secrets in URLs, fit for files and for other users."""
        join, associate = (tuple(map(objects.without_secrets, some)) for some in (self.join, self.associate))
        keys = None if self.keys is None else objects.without_secrets(self.keys)
        return replace(self, join=join, associate=associate, keys=keys).text

    def wants(self, extension: bytes) -> bool:
        """Return True if any option uses members with this extension."""
        if not self.columns:
            return True
        named = {*self._alternatives, *(field.column for field in self.fields)}
        if self.classes:
            named.add(self.class_from)
        return self._is_among(extension, named)

    def shows(self, extension: bytes) -> bool:
        """Return True if members with this extension may be shown under their own name or that of a column."""
        return not self.columns or self._is_among(extension, self._alternatives)

    @property
    def _alternatives(self) -> set[bytes]:
        return {extension for column in self.columns for extension in column.alternatives}

    def _is_among(self, extension: bytes, named: set[bytes]) -> bool:
        return extension in named or (self.ignore_case and lower_case(extension) in set(map(lower_case, named)))

    def digest(self, left_out: frozenset[bytes], name: bytes, companions: bytes) -> bytes:
        """Return 16 bytes: equal only for options that show a shard in the same way.

        `left_out` are keys, `name` is the name of the shard in the mount: both change the view.
        `companions` stands for the files that the options name.
        """
        text = repr((FORMAT, self, sorted(left_out), name if self.classes or self.keys else b"", companions))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


def columns_of(texts: Sequence[str]) -> tuple[Column, ...]:
    """Return the outputs that `--columns` names. Raises UsageError.

    Alternatives are divided by `;`, as in DALI and webdataset; before `=` is a name for them.
    """
    columns = []
    for text in texts:
        name, equals, alternatives = text.partition("=")
        if not equals:
            name, alternatives = "", text
        column = Column(tuple(map(_extension, alternatives.split(";"))), _extension(name))
        if any(not extension or b"/" in extension for extension in column.alternatives):
            raise UsageError(f"--columns {text!r}: an extension is empty or has a slash; write 'jpg;png'")
        if equals:
            _refuse_name(f"--columns {text!r}", name, "'img=jpg;png'")
        columns.append(column)
    return tuple(columns)


def fields_of(texts: Sequence[str]) -> tuple[Field, ...]:
    """Return the files that `--field` names: `NAME=COLUMN:PATH`. Raises UsageError."""
    fields = []
    for text in texts:
        name, _, source = text.partition("=")
        column, _, path = source.partition(":")
        _refuse_name(f"--field {text!r}", name, "caption.txt=json:caption")
        if not column or "/" in column or not path:
            raise UsageError(f"--field {text!r}: write a name, a column and a field: caption.txt=json:caption")
        try:
            json_fields.parse_path(path)
        except UsageError as error:
            raise UsageError(f"--field {text!r}: {error}") from None
        fields.append(Field(_extension(name), _extension(column), path))
    return tuple(fields)


def refuse_equal_names(columns: Sequence[Column], fields: Sequence[Field]) -> None:
    """Raise UsageError if two options would make files of one name."""
    for at, field in enumerate(fields):
        if any(field.name == other.name for other in fields[:at]):
            raise UsageError(f"--field {field.text!r}: another --field makes a file of this name, too")
    # If a column names a field, the field is an alternative of this column, and makes no file of its own.
    alternatives = {extension for column in columns for extension in column.alternatives}
    made = [(field.name, f"--field {field.text!r}") for field in fields if field.name not in alternatives]
    made += [(column.name, f"--columns {column.text!r}") for column in columns if column.name]
    own = [column for column in columns if not column.name]
    shown = [(extension, f"--columns {column.text!r}") for column in own for extension in column.alternatives]
    first: dict[bytes, str] = {}
    for at, (name, option) in enumerate(made + shown):
        if name in first:
            text = f"{first[name]} and {option} would both make files called {text_of(name)!r}"
            raise UsageError(f"{text}; give one another name")
        if at < len(made):  # an alternative may be that of several columns
            first[name] = option


def _extension(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise UsageError(f"{text!a}: is not UTF-8") from None


def _refuse_name(option: str, name: str, example: str) -> None:
    """Raise UsageError for a text that cannot be the name of a file after the first dot."""
    if not name or "/" in name or "\0" in name or name in (".", "..") or len(_extension(name)) > COLUMN_NAME_MAX:
        raise UsageError(f"{option}: the name before = is empty or cannot be that of a file; write {example}")


def class_source(text: str) -> tuple[bytes, str]:
    """Return the extension and the field of `--class-from EXT[:FIELD]`. Raises UsageError."""
    extension, colon, path = text.partition(":")
    try:
        if not extension or (colon and not json_fields.parse_path(path)):
            raise UsageError("the extension is missing")
    except UsageError:
        text = f"--class-from {text!r}: write an extension, or an extension and a field: json:label"
        raise UsageError(text) from None
    return _extension(extension), path
