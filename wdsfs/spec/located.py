"""Small JSON, YAML and text files, read so that an error can name the place in the file.

A `Field` is a value and its place: `shards.json: shardlist[3].url`, `split.yaml:7: exclude[0]`.
The module of a format interprets the values. Such a file may be hostile: nothing in it is executed, nothing grows
when it is read (aliases of YAML are shared, never copied), and any mistake in it is a SpecError.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, NoReturn

from wdsfs import source
from wdsfs.door import urls
from wdsfs.errors import SpecError, UnreadableShard
from wdsfs.spec import dependencies, objects

_READ_BYTES = 1 << 20  # bytes
MAX_BYTES = 256 << 20  # of a JSON or text file: some 1.5 million shards; a larger one was not meant
MAX_YAML_BYTES = 32 << 20  # 100,000 scalars take 0.2 s, and much more memory than in the file
MAX_DEPTH = 32  # of YAML; the deepest that means something is 5

_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_DIGITS = re.compile(r"[0-9]{1,18}")


class Scalar(str):
    """A scalar of a YAML file as written there, whatever type YAML would give it (`no`, `1e3`, `007`)."""

    __slots__ = ("is_null", "line")
    is_null: bool
    line: int


class _Mapping(dict[str, Any]):
    line = 0


class _Sequence(list[Any]):
    line = 0


class Field(NamedTuple):
    """A value in a file, and the path to it from the top."""

    file: str
    value: Any
    key: str | int | None = None
    above: Field | None = None

    @property
    def place(self) -> str:
        """`shardlist[3].url`; nothing for the whole file."""
        if self.above is None:
            return ""
        outer = self.above.place
        if isinstance(self.key, str) and self.key.isidentifier():
            return f"{outer}.{self.key}" if outer else self.key
        return f"{outer}[{self.key!r}]"

    def __str__(self) -> str:
        """`shards.json: shardlist[3].url`; with the line if the format has it."""
        line = getattr(self.value, "line", 0)
        place = self.place
        return f"{self.file}{f':{line}' if line else ''}{f': {place}' if place else ''}"

    def wrong(self, text: str) -> SpecError:
        """Return an error about this value."""
        return SpecError(f"{self}: {text}")

    def is_object(self) -> bool:
        """Return True for an object of JSON, or a mapping of YAML."""
        return isinstance(self.value, dict)

    def get(self, key: str) -> Field | None:
        """Return a value of this object by name, None if it is missing. Raises SpecError if this is no object."""
        value = self._object().get(key, self)  # itself if the name is missing: None is a value, too
        return None if value is self else Field(self.file, value, key, self)

    def need(self, key: str) -> Field:
        """Return a value as `get`; raises SpecError if it is missing."""
        value = self.get(key)
        if value is None:
            raise self.wrong(f"{key!r} is missing")
        return value

    def named(self) -> Iterator[tuple[str, Field]]:
        """Yield the names and values of this object, in the order of the file."""
        for key, value in self._object().items():
            yield key, Field(self.file, value, key, self)

    def items(self) -> Iterator[Field]:
        """Yield the values of this list. Raises SpecError if this is no list."""
        if not isinstance(self.value, list):
            raise self.wrong(f"a list is needed, not {_kind(self.value)}")
        for number, value in enumerate(self.value):
            yield Field(self.file, value, number, self)

    def text(self) -> str:
        """Return this text. Raises SpecError if it is none."""
        if not isinstance(self.value, str) or _is_null(self.value):
            raise self.wrong(f"a text is needed, not {_kind(self.value)}")
        return self.value

    def texts(self) -> Iterator[Field]:
        """Return the texts of this list; a single text is a list of one, as in webdataset's YAML."""
        if isinstance(self.value, str) and not _is_null(self.value):
            return iter((self,))
        return self.items()

    def number(self) -> int:
        """Return this whole number. Raises SpecError if it is none, or negative."""
        if isinstance(self.value, Scalar) and _DIGITS.fullmatch(self.value):
            return int(self.value)
        if type(self.value) is not int or self.value < 0:
            printable = isinstance(self.value, int | float | str) and not isinstance(self.value, bool)
            shown = repr(str(self.value))[:40] if printable else _kind(self.value)
            raise self.wrong(f"a number from 0 on is needed, not {shown}")
        return self.value

    def allow(self, known: Iterable[str]) -> None:
        """Raise SpecError if this object has any other name than these."""
        names = sorted(known)
        for key, field in self.named():
            if key not in names:
                raise field.wrong(f"no such key; known are {', '.join(names)}")

    def _object(self) -> dict[str, Any]:
        if not isinstance(self.value, dict):
            raise self.wrong(f"an object is needed, not {_kind(self.value)}")
        return self.value


def read_list_file(path: str, limit: int = MAX_BYTES) -> bytes:
    """Return the bytes of a file, `-` for standard input. Raises SpecError, ShardError for I/O errors."""
    dependencies.note_file(path)
    data = objects.read_object(path, limit + 1) if objects.is_url(path) else _read_local(path, limit)
    if len(data) > limit:
        raise SpecError(f"{path!r} has more than {limit >> 20} MiB, the limit for a list of shards")
    if data.startswith(_UTF_16) and b"\0" in data[:16]:
        raise SpecError(f"{path!r} is in UTF-16: save it as UTF-8")
    return data


def _read_local(path: str, limit: int) -> bytes:
    try:
        with source.open_stream(0 if path == urls.STDIN else path) as file:
            # Not all at once: that would allocate memory for `limit` bytes.
            return b"".join(itertools.islice(iter(lambda: file.read(_READ_BYTES), b""), limit // _READ_BYTES + 1))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise SpecError(f"{path!r} cannot be read: {error.strerror}") from None
    except OSError as error:
        raise UnreadableShard(f"{path!r} cannot be read: {error.strerror}") from None


def lines(path: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text file with their numbers, stripped of white space, decoded as paths are."""
    for number, line in enumerate(read_list_file(path).removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        yield number, os.fsdecode(line.strip(b" \t\r"))


def load_file(path: str) -> Field:
    """Read a JSON file, by its suffix, or a YAML file. Raises SpecError, UnreadableShard."""
    return load_json(path) if path.endswith(".json") else load_yaml(path)


def load_json(path: str) -> Field:
    """Read a JSON file. Raises SpecError, UnreadableShard."""
    text = _read_file(path, MAX_BYTES).decode("utf-8-sig", "surrogateescape")
    try:
        return Field(path, json.loads(text, object_pairs_hook=lambda pairs: _unique(path, pairs)))
    except json.JSONDecodeError as error:
        raise SpecError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
    except RecursionError:
        raise SpecError(f"{path}: nested too deeply") from None
    except ValueError:  # Python reads at most 4,300 digits
        raise SpecError(f"{path}: a number in it is too large") from None


def _unique(path: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        repeated = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise SpecError(f"{path}: {repeated!r} occurs twice in one object")
    return values


def load_yaml(path: str) -> Field:
    """Read a YAML file of one document. Raises SpecError, UnreadableShard."""
    return Field(path, _yaml(path, _read_file(path, MAX_YAML_BYTES)))


def _read_file(path: str, limit: int) -> bytes:
    if os.path.exists(path) and not os.path.isfile(path):
        raise SpecError(f"{path!r} is not a regular file")  # reading a pipe would block
    return read_list_file(path, limit)


def _is_null(value: str) -> bool:
    return isinstance(value, Scalar) and value.is_null


def _kind(value: object) -> str:
    if value is None or (isinstance(value, str) and _is_null(value)):
        return "nothing"
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    return next((word for kind, word in kinds.items() if isinstance(value, kind)), "a number")


# -- YAML ----------------------------------------------------------------------------------------------------
# From the parser's events. `yaml.compose`, or a loader, would need a scan for the depth before, as they recurse in
# C; both take 1.7 times as long for a list of 100,000 shards. Events keep the lines, and make no types of names.


def _yaml(path: str, data: bytes) -> Any:
    import yaml

    events = yaml.parse(data, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    try:
        return _YamlReader(path, events).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise SpecError(f"{path}{where}: not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:  # from its reader: characters that YAML does not allow
        raise SpecError(f"{path}: not YAML: {' '.join(str(error).split())}") from None


class _YamlReader:
    """Builds the value of one document from its events. Raises SpecError."""

    def __init__(self, path: str, events: Iterator[Any]) -> None:
        import yaml

        self.path, self.events = path, events
        self.anchors: dict[str, Any] = {}
        self.yaml: Any = yaml

    def document(self) -> Any:
        """Return the value; None if the document is empty."""
        value = None
        for event in self.events:
            if isinstance(event, self.yaml.NodeEvent):
                if value is not None:
                    self._refuse(event, "a second document; the file must have a single one")
                value = self._value(event, MAX_DEPTH)
        return value

    def _value(self, event: Any, depth: int) -> Any:
        """Return the value that begins with an event, and may have collections nested `depth` deep."""
        if isinstance(event, self.yaml.ScalarEvent):
            scalar = Scalar(event.value)
            scalar.line = event.start_mark.line + 1
            scalar.is_null = event.implicit[0] and scalar in ("", "~", "null", "Null", "NULL")
            if event.anchor is not None:
                self.anchors[event.anchor] = scalar
            return scalar
        if isinstance(event, self.yaml.AliasEvent):
            if event.anchor not in self.anchors:
                self._refuse(event, f"no anchor is called {event.anchor!r}")
            return self.anchors[event.anchor]
        if not depth:
            self._refuse(event, "nested too deeply")
        collection = _Mapping() if isinstance(event, self.yaml.MappingStartEvent) else _Sequence()
        collection.line = event.start_mark.line + 1
        if event.anchor is not None:
            self.anchors[event.anchor] = collection
        if isinstance(collection, _Mapping):
            for key in self._inside():
                self._add(collection, key, depth)
        else:
            collection.extend(self._value(item, depth - 1) for item in self._inside())
        return collection

    def _inside(self) -> Iterator[Any]:
        """Yield the next events up to the end of a collection."""
        end = self.yaml.CollectionEndEvent
        return itertools.takewhile(lambda event: not isinstance(event, end), self.events)

    def _add(self, mapping: _Mapping, event: Any, depth: int) -> None:
        """Add to a mapping the key that begins with an event, and its value."""
        key = self._value(event, depth - 1)
        if not isinstance(key, str):
            self._refuse(event, "a key that is not text")
        if key in mapping:
            self._refuse(event, f"{str(key)!r} occurs twice in one object")
        mapping[str(key)] = self._value(next(self.events), depth - 1)

    def _refuse(self, event: Any, text: str) -> NoReturn:
        raise SpecError(f"{self.path}:{event.start_mark.line + 1}: {text}")
