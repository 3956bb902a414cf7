"""The options of a view, checked: what is to be shown of each shard.

How they are applied is in `views/view_record.py`; nothing here looks into a shard.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from wdsfs.errors import UsageError
from wdsfs.tar import member_codecs

FORMAT = 3  # of what is derived: goes up when the same options give something else
ERROR, SKIP, EMPTY = "error", "skip", "empty"


@dataclass(frozen=True, slots=True)
class Composition:
    """The options of a view.

    Each of `columns` is the alternatives of one output, as extensions. `join` are specs of shard sets, `associate`
    and `class_names` paths of files. `class_from` is an extension, `class_field` the path to a field of its JSON.
    Classes that are whole numbers are shown with `class_digits` digits, 0: as they are, None: with as many as the
    longest of the set has, which takes a look at all shards (`view_set.py`).
    """

    columns: tuple[tuple[bytes, ...], ...] = ()
    ignore_case: bool = False
    missing: str = ERROR
    duplicates: str = ERROR
    join: tuple[str, ...] = ()
    associate: tuple[str, ...] = ()
    decode: bool = False
    classes: bool = False
    class_from: bytes = b"cls"
    class_field: str = ""
    class_names: str | None = None
    class_digits: int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether a shard that nothing is left out of is shown as it is."""
        changes = self.columns or self.ignore_case or self.join or self.associate or self.decode or self.classes
        return not changes

    @property
    def text(self) -> str:
        """The options as they are typed."""
        words: list[str] = []
        for alternatives in self.columns:
            words += ["--columns", text_of(b";".join(alternatives))]
        words += ["--ignore-case"] * self.ignore_case
        words += [word for spec in self.join for word in ("--join", spec)]
        words += [word for path in self.associate for word in ("--associate", path)]
        words += ["--decode-members"] * self.decode
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

    def codec_of(self, extension: bytes) -> tuple[int, bytes] | None:
        """As `member_codecs.codec_of`, in any letter case if that does not count."""
        return member_codecs.codec_of(extension.lower() if self.ignore_case else extension)

    def wants(self, extension: bytes) -> bool:
        """Whether any option looks at members with this extension."""
        if not self.columns:
            return True
        decoded = self.codec_of(extension) if self.decode else None
        if decoded is not None and self.wants(decoded[1]):
            return True
        named = {one for alternatives in self.columns for one in alternatives}
        if self.classes:
            named.add(self.class_from)
        return extension in named or (self.ignore_case and extension.lower() in {one.lower() for one in named})

    def digest(self, left_out: frozenset[bytes], name: bytes, companions: bytes) -> bytes:
        """16 bytes that tell what this makes of a shard from what others make of it.

        `left_out` are keys, `name` is what the shard is called in the mount: both are part of what is shown.
        `companions` tells which files the options name.
        """
        told = repr((FORMAT, self, sorted(left_out), name if self.classes else b"", companions))
        return hashlib.blake2b(told.encode(), digest_size=16).digest()


def columns_of(texts: Sequence[str]) -> tuple[tuple[bytes, ...], ...]:
    """The outputs that `--columns` names, in DALI's syntax: alternatives are divided by `;`. Raises UsageError."""
    found = []
    for text in texts:
        alternatives = tuple(one.encode("utf-8", "surrogateescape") for one in text.split(";"))
        if any(not one or b"/" in one for one in alternatives):
            raise UsageError(f"--columns {text!r}: an extension is empty or has a slash; write 'jpg;png'")
        found.append(alternatives)
    return tuple(found)


def class_source(text: str) -> tuple[bytes, str]:
    """The extension and the field of `--class-from EXT[:FIELD]`. Raises UsageError."""
    extension, colon, fields = text.partition(":")
    if not extension or (colon and not all(fields.split("."))):
        raise UsageError(f"--class-from {text!r}: write an extension, or an extension and a field: json:label")
    return extension.encode("utf-8", "surrogateescape"), fields


def read_class_names(path: str) -> dict[str, str]:
    """The names of classes by what samples call them: a line for each number from 0 on, or JSON: a list or an
    object. Raises UsageError."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--class-names {path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        found = json.loads(text) if text.lstrip()[:1] in ("[", "{") else list(map(str.strip, text.splitlines()))
    except ValueError as error:
        raise UsageError(f"--class-names {path}: {error}") from None
    pairs = enumerate(found) if isinstance(found, list) else found.items()
    named = {str(key): value for key, value in pairs}
    if not named:
        raise UsageError(f"--class-names {path}: names no class")
    for key, value in named.items():
        if not isinstance(value, str):
            raise UsageError(f"--class-names {path}: the name of class {key} is no text")
    if isinstance(found, list):
        _refuse_twice(path, named)
    return named


def _refuse_twice(path: str, named: dict[str, str]) -> None:
    """Raises UsageError where a list gives two classes one name: there, nobody means to have them together."""
    first: dict[str, str] = {}
    for number, name in named.items():
        if name and first.setdefault(name, number) != number:
            raise UsageError(
                f"--class-names {path}: classes {first[name]} and {number} are both called {name!r} and would be "
                "one folder; give them different names, or use a JSON object to have them in one"
            )


def text_of(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")
