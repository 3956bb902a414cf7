"""Make specs into words: the paths of files and directories that specs name, as they are typed.

A spec is a path, a glob (`train-*.tar`, `**` too), a brace expression, a URL, a list of specs (`@list.txt`), or
several of these joined by `::`, the webdataset library's separator. `${NAME}` is replaced as in that library, and
a leading `~` is expanded. `existence.py` decides which words exist, and which shards a directory or an index has.
"""

from __future__ import annotations

import glob
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate, islice
from typing import Any, NamedTuple

from braceexpand import braceexpand

from wdsfs.door import urls
from wdsfs.errors import NoMatch, SpecError
from wdsfs.spec import dependencies, located, objects
from wdsfs.spec.located import Field

MAX_SHARDS = 10_000_000  # per call; more is a typing error, and the strings alone would take gigabytes
MAX_BRACES = 32  # braces in braces: each level is read once more
LIST = "@"
MAX_LISTS = 1000  # read in one call: lists that each name the next list twice would never end
MAX_NESTED = 20
MAX_STEPS = 256  # directories in a glob: each is a level of recursion
MAX_PASSES = 10  # rounds of replacing variables, as in the webdataset library
MAX_SPEC = 1 << 20  # characters of one spec; a longer one has variables that refer to themselves

_GLOB = re.compile(r"[*?\[]")
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_PLAIN = re.compile(r"[^~@{}*?\[:][^{}*?\[:]*")  # has nothing to expand
_ESCAPED = re.compile(r"\[([*?\[:])\]")  # a character that a glob, or the split at `::`, takes literally
_BRACE = re.compile(r"[{}\\]")  # what `settled` marks, and what a glob expands
_ELSEWHERE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|file:|pipe:|-$")
NOT_READ = f"{{!r}} is neither a path nor a URL that wdsfs reads ({', '.join(sorted(urls.SCHEMES))}, file)"
_HAS_BRACE = re.compile(r"[{}]")
# Ranges as braceexpand has them: "$" also matches before a newline at the end.
_INT_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?$")
_CHAR_RANGE = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.-?(\d+))?$")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"  # the order of braceexpand's ranges
_FILE_URL = re.compile(r"file:(?://(?=/)|(?!//))")


class Word(NamedTuple):
    """One path that a spec names, of a file or a directory.

    `origin` is its place, if that is not the command line: `list.txt:3`, or a Field. `samples` is the number of
    samples according to the file that names it, `without` the keys of samples to leave out. `index_file` is the
    portable index that names it.
    """

    path: str
    origin: str | Field = ""
    samples: int | None = None
    without: frozenset[bytes] = frozenset()
    index_file: str = ""

    @property
    def shown(self) -> str:
        """The text for error messages."""
        return f"{self.path!r} ({self.origin})" if self.origin else repr(self.path)


def without_scheme(text: str) -> str:
    """Return the path of a `file:` URL without a host, as the webdataset library and wids do; else the text."""
    scheme = _FILE_URL.match(text)
    return text if scheme is None else urls.local(text[scheme.end() :])


def is_elsewhere(text: str) -> bool:
    """Return True for what the webdataset library reads, but wdsfs does not."""
    return _ELSEWHERE.match(text) is not None and not urls.is_url(text)


def expand_words(specs: Iterable[str | bytes]) -> Iterator[Word]:
    """Yield the paths of files and directories that the specs name, as typed."""
    expansion = Expansion()
    for spec in specs:
        if isinstance(spec, bytes):
            yield Word(os.fsdecode(spec))
        else:
            yield from expansion.words(spec)


def collect(words: Iterable[Word]) -> list[Word]:
    """Return the words as a list. Raises SpecError for more than a set can have."""
    taken = list(islice(words, MAX_SHARDS + 1))
    if len(taken) > MAX_SHARDS:
        raise SpecError(f"the specs name more than {MAX_SHARDS:,} shards: check the ranges")
    return taken


class Expansion:
    """Expands specs to words, and keeps track of the lists that are being read.

    If `read` is False, a list is returned unread.
    """

    def __init__(self, *, read: bool = True) -> None:
        self.read = read
        self.inside: list[str] = []  # the lists around the current spec, by their real paths
        self.lists = 0

    def words(self, text: str, base: str = "", origin: str = "") -> Iterator[Word]:
        """Yield the words of one spec. Relative paths are below `base`, which is empty or ends in a slash."""
        _refuse_no_path(text)
        word = self._literal(base, text, origin)
        if word is not None:
            yield word
            return
        for part in objects.parts(text):
            for name in _braces(_substituted(part)):
                if not name:
                    raise SpecError(f"an empty shard name in {objects.without_secrets(text)[:200]!r}")
                yield from self._named(base, name, part, origin)

    def _literal(self, base: str, text: str, origin: str) -> Word | None:
        """Return the word of a text that names an existing path. Raises SpecError for a command in a list."""
        path = _existing(base, text)
        if path is not None:
            return Word(path, origin)
        if self.inside:
            objects.refuse_command(text, base)
        return None

    def _named(self, base: str, name: str, typed: str, origin: str) -> Iterator[Word]:
        """Yield the words of a name, whose braces are expanded. `typed` is the name for messages."""
        word = self._literal(base, name, origin)
        if word is None:
            objects.refuse_hidden_command(name, typed)
        if word is not None:
            yield word
        elif name == urls.STDIN:
            yield Word(objects.standard_input() if self.read else name, origin)
        elif name.startswith(LIST):
            yield from self._list(base, name.removeprefix(LIST))
        else:
            for path in _matching(base, without_scheme(name)):
                yield Word(path, origin)

    def _list(self, base: str, name: str) -> Iterator[Word]:
        """Yield the words of the specs in a text file, one spec a line."""
        path = name
        if name != urls.STDIN:
            path = _existing(base, name) or _below(base, os.path.expanduser(name))
        objects.refuse_local(path, base)
        if objects.is_command(path):
            raise SpecError(
                f"{objects.without_secrets(name)!r}: a list cannot come from a command: use COMMAND | wdsfs ... @-"
            )
        if objects.is_url(path):
            path = objects.path_of_url(path)
        if not self.read:
            yield Word(path)
            return
        identity = path if name == urls.STDIN else os.path.realpath(path)
        if identity in self.inside:
            raise SpecError(f"the list {path!r} includes itself")
        self.lists += 1
        if self.lists > MAX_LISTS or len(self.inside) >= MAX_NESTED:
            raise SpecError(f"too many lists, at {path!r}: the limits are {MAX_LISTS:,}, and {MAX_NESTED} deep")
        self.inside.append(identity)
        empty = True
        for number, line in located.lines(path):
            if line and not line.startswith("#"):
                empty = False
                origin = f"{path}:{number}"
                try:
                    yield from self.words(line, "" if name == urls.STDIN else parent_of(path), origin)
                except SpecError as error:
                    raise type(error)(f"{origin}: {error}") from None
        if empty:
            raise SpecError(f"the list {path!r} names no shards")
        self.inside.pop()


def _refuse_no_path(text: str) -> None:
    """Raise SpecError for a text that cannot be a path."""
    if not text or "\0" in text:
        raise SpecError("an empty shard name" if not text else f"a NUL in the shard name {text!r}")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise SpecError(f"the shard name {text!r} cannot be encoded for the file system") from None


def is_special(text: str) -> bool:
    """Return True for a text that may mean something else than a path."""
    return text == urls.STDIN or _PLAIN.fullmatch(text) is None


def _existing(base: str, text: str) -> str | None:
    """Return the path of a text that exists literally, or can only be a path; None for all other texts.

    A list at a URL names nothing of this machine.
    """
    path = _below(base, text)
    if not is_special(text):
        if objects.is_url(path):
            return None
        objects.refuse_local(path, base)
        return path
    if objects.is_url(base):
        return None
    path = base + text if base and not text.startswith("/") else text
    return urls.local(path) if os.path.lexists(path) else None


def _below(base: str, path: str) -> str:
    """Return the path or URL that stands in a list whose directory is `base`."""
    is_whole = path.startswith("/") or objects.is_url(path) or is_elsewhere(path)
    return path if not base or is_whole else base + path


def _braces(text: str) -> Iterator[str]:
    try:
        return expand_braces(text)
    except SpecError as error:
        if not objects.is_url(text):
            raise
        raise SpecError(str(error).replace(text, objects.without_secrets(text))) from None


def _substituted(text: str) -> str:
    """Return the text with each `${NAME}` replaced by the variable WDS_NAME, repeated for variables in the values.

    The rule is that of the webdataset library (`shardlists.py`, `expand_urls`), which stops after ten passes and
    leaves the rest unreplaced; here that is an error.
    """
    result = text
    for _ in range(MAX_PASSES):
        if not _VARIABLE.search(result):
            return result
        if len(result) > MAX_SPEC:
            break
        result = _VARIABLE.sub(lambda match: _variable(match[1], text), result)
    if _VARIABLE.search(result):
        raise SpecError(
            f"the variables in {objects.without_secrets(text)[:200]!r} refer to each other without end"
        )
    return result


def has_variables(text: str) -> bool:
    """Return True for a text with `${NAME}`."""
    return _VARIABLE.search(text) is not None


def _variable(name: str, text: str) -> str:
    value = os.environ.get(f"WDS_{name}")
    if value is None:
        raise SpecError(
            f"the environment variable WDS_{name} is not set; {objects.without_secrets(text)!r} needs it"
        )
    return value


def _matching(base: str, word: str) -> list[str]:
    """Return the paths that a glob matches, or those at a URL; the path itself when it is neither."""
    if objects.is_url(path := _below(base, word)):
        return objects.paths_of(path)
    expanded = os.path.expanduser(word) if word.startswith("~") else word
    path = _below(base, expanded)
    if not is_elsewhere(path):
        objects.refuse_local(path, base)
    if not _GLOB.search(_ESCAPED.sub("", word)):
        literal = _ESCAPED.sub(r"\1", path)
        return [path if literal == path else urls.local(literal)]
    if word.count("/") > MAX_STEPS:
        raise SpecError(f"{word[:60]!r}... has too many directories for a glob: the limit is {MAX_STEPS}")
    pattern = path if path == expanded else glob.escape(base) + expanded
    dependencies.note_glob(pattern)
    matches = sorted(map(urls.local, glob.iglob(pattern, recursive=True)), key=os.fsencode)
    if not matches:
        raise NoMatch(f"no file matches {objects.without_secrets(word)[:200]!r}")
    return objects.shards_among(word, matches, str)


# -- specs that mean the same later ---------------------------------------------------------------------------


def settled(text: str) -> str:
    """Return a spec that means the same later: the name of an existing path stays that path when it is gone.

    Such a spec becomes an absolute path in which nothing is expanded; any other spec is returned unchanged.
    """
    if not is_special(text) or not os.path.lexists(text):
        return text
    return _literal(os.fsdecode(absolute_paths([urls.local(text)])[0]), globs=True)


def _literal(path: str, *, globs: bool) -> str:
    """Return a spec in which nothing of a path is expanded; the name of a list has no `globs`."""
    pattern = _GLOB.sub(r"[\g<0>]", path).replace("::", "[:][:]") if globs else path
    return _BRACE.sub(r"\\\g<0>", pattern) if has_braces(pattern) else pattern


def anchored(text: str) -> str:
    """Return a spec that means the same in another working directory.

    Not one whose first word only its expansion can tell: `{a,/b}/x.tar`.
    """
    text = settled(text)
    parts = []
    for part in objects.parts(text):
        sign = LIST if part.startswith(LIST) else ""
        name = part.removeprefix(LIST)
        is_fixed = name.startswith(("/", "~", "$", "{")) or name == urls.STDIN or objects.is_url(name)
        parts.append(part if is_fixed else f"{sign}{_literal_directory(globs=not sign)}{name}")
    return "::".join(parts)


def anchored_file(path: str) -> str:
    """Return the path or URL of a file, which means the same in another working directory."""
    return path if objects.is_url(path) and not os.path.exists(path) else os.path.abspath(path)


def anchored_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a set that mean the same in another working directory."""
    sent = dict(options)
    for name in _ANCHORS.keys() & sent.keys():
        anchor, value = _ANCHORS[name], sent[name]
        if isinstance(value, list | tuple):
            sent[name] = tuple(anchor(os.fsdecode(text)) for text in value)
        elif value:
            sent[name] = anchor(os.fsdecode(value))
    return sent


_ANCHORS: dict[str, Callable[[str], str]] = {
    "join": anchored,
    **dict.fromkeys(("associate", "keys", "class_names", "index_dir", "base"), anchored_file),
}


def _literal_directory(globs: bool) -> str:
    """Return the working directory with its slash, with nothing in it to be expanded; empty if it is gone."""
    try:
        return _literal(os.getcwd(), globs=globs) + "/"
    except FileNotFoundError:
        return ""


# -- paths ----------------------------------------------------------------------------------------------------


def absolute_paths(files: list[str]) -> list[bytes]:
    """Return the absolute paths of these files, and URLs as they are."""
    parents: dict[str, str] = {}
    paths = []
    for file in files:
        if not file.startswith("/") and objects.is_url(file):
            paths.append(os.fsencode(file))
            continue
        parent = parent_of(file)
        directory = parents.get(parent)
        if directory is None:
            directory = parents[parent] = _absolute_directory(parent)
        paths.append(os.fsencode(directory + file[len(parent) :]))
    return paths


def _absolute_directory(directory: str) -> str:
    """Return the absolute path of a directory ("" is the current one), with a slash at its end.

    `..` after a symbolic link does not lead where the text says: `link/../x.tar` lies beside the target of the
    link, and `os.path.abspath` would name another file. So all up to the last `..` is resolved.
    """
    head, dots, tail = f"/{directory}".rpartition("/../")
    if dots:
        directory = os.path.join(os.path.realpath(f"{head[1:]}/.." if head else ".."), tail.lstrip("/"))
    path = os.path.abspath(directory)
    return path if path.endswith("/") else path + "/"


def parent_of(word: str) -> str:
    """Return the directory part of a path, with its last slash; "" for a name in the current directory."""
    return word[: word.rfind("/") + 1]


# -- paths in files that name shards --------------------------------------------------------------------------


def listed_path(base: str, text: str, place: Field) -> str:
    """Return the path that a text in a file means. A relative one is below `base`, which is empty or ends in /.

    Raises SpecError for a text that cannot be a path.
    """
    try:
        objects.refuse_command(text, place.file)
        if is_elsewhere(text := without_scheme(text)):
            raise SpecError(NOT_READ.format(objects.without_secrets(text)))
        _refuse_no_path(text)
        path = text if text.startswith("/") or urls.is_url(text) else base + text
        objects.refuse_local(path, place.file)
        return objects.path_of_url(path) if urls.is_url(path) else path
    except SpecError as error:
        raise place.wrong(str(error)) from None


def path_in(file: str, field: Field) -> str:
    """Return the path that a field of a file means, below the directory of the file. Raises SpecError."""
    return listed_path(parent_of(file), field.text(), field)


def expand_field(text: str, place: Field) -> Iterator[str]:
    """Expand the braces in a text of a file. Raises SpecError."""
    try:
        return expand_braces(text)
    except SpecError as error:
        raise place.wrong(str(error)) from None


# -- braces ---------------------------------------------------------------------------------------------------
# The braceexpand library does the work, which is what webdataset and Energon use. It expands a range into memory
# before it yields the first word, so the number of words has to be known first: the functions below follow its
# grammar to count them, and a test compares the two.


def has_braces(text: str) -> bool:
    """Return True if the text has a brace."""
    return _HAS_BRACE.search(text) is not None


def expand_braces(text: str) -> Iterator[str]:
    """Return the words of a brace expression; for a text without braces the text itself.

    Raises SpecError when the braces are unbalanced or nested too deeply, or name more than MAX_SHARDS.
    """
    # Without braces a backslash is just a character of the name.
    if not has_braces(text):
        return iter((text,))
    if _depth(text) > MAX_BRACES:
        raise SpecError(f"the braces of {text[:60]!r}... are nested too deeply: the limit is {MAX_BRACES} levels")
    try:
        if _expansions(text) > MAX_SHARDS:
            raise SpecError(f"{text[:200]!r} names more than {MAX_SHARDS:,} shards: check the range")
        words: Iterator[str] = braceexpand(text)
        return words
    except ValueError:  # braceexpand.UnbalancedBracesError is one, but is not in its type hints
        raise SpecError(
            rf"unbalanced braces in {text[:200]!r}: close them, or write \{{ and \}} for braces in the name"
        ) from None


def _depth(text: str) -> int:
    """Return how many braces are open at most."""
    steps = ((character == "{") - (character == "}") for _, character in _unescaped(text))
    return max(accumulate(steps), default=0)


def _expansions(text: str) -> int:
    """Return the number of words that `text` expands to. Raises ValueError for unbalanced braces."""
    return math.prod(_expression_count(expression) for expression in _expressions(text))


def _expressions(text: str) -> Iterator[str]:
    """Yield the text inside each of the outermost braces."""
    depth = start = 0
    for position, character in _unescaped(text):
        if character == "{":
            start = position + 1 if depth == 0 else start
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                yield text[start:position]
    if depth:
        raise ValueError("unbalanced braces")


def _expression_count(expression: str) -> int:
    if match := _INT_RANGE.match(expression):
        return _range_count(_int(match[1]), _int(match[2]), _int(match[3] or "1"))
    if match := _CHAR_RANGE.match(expression):
        return _range_count(_LETTERS.index(match[1]), _LETTERS.index(match[2]), _int(match[3] or "1"))
    return sum(_expansions(item) for item in _items(expression))


def _range_count(start: int, end: int, step: int) -> int:
    return abs(end - start) // (step or 1) + 1


def _int(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:  # Python reads at most 4,300 digits
        raise SpecError(f"the number {digits[:20]}... of a range is too large") from None


def _items(expression: str) -> Iterator[str]:
    """Split `a,b{c,d}` into `a`, `b{c,d}`; an expression without a comma is a single item."""
    depth = start = 0
    for position, character in _unescaped(expression):
        depth += (character == "{") - (character == "}")
        if character == "," and depth == 0:
            yield expression[start:position]
            start = position + 1
    yield expression[start:]


def _unescaped(text: str) -> Iterator[tuple[int, str]]:
    position = 0
    while position < len(text):
        if text[position] == "\\":
            position += 1
        else:
            yield position, text[position]
        position += 1
