"""Expands SHARDS (paths, globs, braces, lists, URLs) to a list of shards, each with its name in the mount.

A spec is a brace expression (`train-{000000..000099}.tar`), a plain path, a glob (`train-*.tar`, `**` too), a
directory (its tars), a prepared Energon dataset, a file that names shards (JSON or YAML, read by
`spec/shard_lists.py`), a list of specs (`@list.txt`), or several of these joined by `::`, the webdataset library's
separator. `${NAME}` is replaced as in that library, and a leading `~` is expanded. No shard is opened and no
symbolic link is resolved; the room `tar` reads shards. Plain functions over names in the file system; no FUSE, no
LMDB.

The order of the shards is the order of the specs, and the set is exactly the one that was asked for: a shard that
is missing or named twice is an error, never a smaller set (unless `allow_missing`).
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
import shlex
import stat
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from wdsfs import names
from wdsfs.door import urls
from wdsfs.errors import (
    MissingShard,
    NoMatch,
    ShardError,
    SpecError,
    UnreadableShard,
    and_others,
    reason_of,
    several,
)
from wdsfs.names import PLAIN, Reading
from wdsfs.shards import Shard, check_count
from wdsfs.spec import braces, dependencies, index_file, located, metadataset, objects, shard_lists
from wdsfs.spec.objects import ABOUT_SHARDS, SHARD_SUFFIXES
from wdsfs.spec.shard_lists import Word

MAX_SHARDS = braces.MAX_WORDS  # per call
JOINER = b"--"

# From this many shards in one directory on, listing it beats one stat per shard. Measured with 100,000 shards
# on ext4: 0.08 s against 0.27 s; on a network file system a stat is a round trip and a listing is not.
LISTING_PAYS = 64
# ... unless the directory holds far more than was asked for: the listing is given up at this ratio.
LISTING_RATIO = 16

LIST = "@"
WITHOUT_MISSING = "; --allow-missing goes on without such shards"
IMAGE_SUFFIX = ".erofs"
SEARCHED = 32  # directories inside one without shards, for the message about it
MAX_LISTS = 1000  # read in one call: lists that each name the next list twice would never end
MAX_NESTED = 20
MAX_STEPS = 256  # directories in a glob: each is a level of recursion
MAX_PASSES = 10  # rounds of replacing variables, as in the webdataset library
MAX_SPEC = 1 << 20  # characters of one spec; a longer one has variables that refer to themselves

_GLOB = re.compile(r"[*?\[]")
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_PLAIN = re.compile(r"[^~@{}*?\[:][^{}*?\[:]*")  # has nothing to expand
_ESCAPED = re.compile(r"\[([*?\[:])\]")  # a character that a glob, or the split at `::`, takes literally
_ESCAPE, _BRACE = re.compile(r"[*?\[]"), re.compile(r"[{}\\]")  # what `settled` marks


class Slice(NamedTuple):
    """One of `num_shards` equal parts of a set, counted from 0; the words are DALI's.

    REQUIRES: 0 <= shard_id < num_shards.
    """

    shard_id: int
    num_shards: int


def expand(
    specs: Sequence[str | bytes],
    split: str | None = None,
    slice: Slice | None = None,
    reading: Reading = PLAIN,
    allow_missing: bool | None = None,
    base: str | None = None,
) -> list[Shard]:
    """Return the shards that `specs` name, in order: all of them, or those of a split, or of a slice.

    `reading` is how they are to be read. With `allow_missing` some may be missing, but not all; with None
    no error names that option. `base` is the directory, or URL, of the shards of a portable index.

    Semantics decision: a spec that names something that exists is taken literally, whatever it looks like: a
    command (`pipe:`), a URL, `-`, `@`, braces, glob characters or `::`. Otherwise it is split at `::`, then
    variables are replaced, then braces are expanded, then `@`, `~` and globs. Each result that exists is that
    path, too, and what a glob or a listing of a directory finds is a path only. Else the author of a file name
    would decide what a shell's `*.tar` runs. A spec of bytes is a path (`Shard.path`): nothing in it is expanded.
    Semantics decision: the shards of a glob or a directory are sorted bytewise by path, whatever the locale.
    Semantics decision: one path given twice is an error. Keeping it once would silently change the set, and
    twice would make two trees of one shard. Two links to one file are two shards.
    Semantics decision: a slice has every M-th shard, as with the webdataset library's `split_by_node`, which also
    distributes shards. (DALI distributes contiguous samples.) Neighbours, which are often alike, go to different
    parts, and parts differ by at most one shard. The slice is cut last, from the set with all its names: every
    rank sees the same errors, and a shard has the same name in all of them.

    Raises SpecError (means nothing, nothing matches, not a regular file, given twice), MissingShard, and
    UnreadableShard when the file system refuses to say whether a shard is there.
    """
    shards = _named_shards(specs, split, reading, lambda words: _existing_files(words, split, allow_missing, base))
    chosen = shards if slice is None else _sliced(shards, slice)
    check_count(len(chosen))
    return chosen


def expand_again(
    specs: Sequence[str | bytes], split: str | None = None, reading: Reading = PLAIN, base: str | None = None
) -> list[Shard]:
    """Return the shards that are there now, as `expand`, for a set that is checked again.

    Shards that are named one by one and missing are left out, unless all are missing.
    """
    return _named_shards(specs, split, reading, lambda words: _present_files(words, split, base))


def _named_shards(
    specs: Sequence[str | bytes],
    split: str | None,
    reading: Reading,
    files: Callable[[list[Word]], list[Word]],
) -> list[Shard]:
    """Return the shards that `specs` name; `files` returns those of the words that count, directories replaced."""
    words = _limited(_words(specs))
    if not words:
        raise SpecError("no shards given: name at least one, for example 'train-{000000..000099}.tar'")
    existing = files(words)
    paths = _absolute([word.path for word in existing])
    _refuse_repeated(paths, existing)
    return [
        Shard(path, name, word.without, word.samples, reading=reading, index_file=word.index_file)
        for path, name, word in zip(paths, _names(list(map(urls.readable, paths))), existing, strict=True)
    ]


def _sliced(shards: list[Shard], part: Slice) -> list[Shard]:
    if len(shards) < part.num_shards:
        # All ranks fail: if one failed alone, the others would wait for it.
        raise SpecError(
            f"the set has {len(shards):,} shards and cannot be cut into {part.num_shards:,} parts: "
            "one of them would be empty"
        )
    placed = (replace(shard, place=(number, len(shards))) for number, shard in enumerate(shards))
    return list(placed)[part.shard_id :: part.num_shards]


def refuse_left_out(shards: Iterable[Shard], why: str) -> None:
    """Raise SpecError if samples of these shards are left out: a part of a shard cannot be changed."""
    for shard in shards:
        if shard.without:
            raise SpecError(
                f"{why}: samples of {os.fsdecode(shard.path)!r} are excluded by the split file of its dataset; "
                "name the shards themselves, for example 'DIR/*.tar'"
            )


def extended(shards: Sequence[Shard], paths: Sequence[bytes]) -> list[Shard]:
    """Return the set with these further shards at its end; no name changes."""
    known = {shard.path for shard in shards}
    taken = {shard.name for shard in shards}
    longer = list(shards)
    for path in paths:
        if path not in known:
            name = free_name(_stems([path])[0].rpartition(b"/")[2], taken)
            taken.add(name)
            longer.append(Shard(path, name, reading=shards[0].reading))
    return longer


def settled(text: str) -> str:
    """Return a spec that means the same later: the name of an existing path stays that path when it is gone.

    Such a spec becomes an absolute path in which nothing is expanded; any other spec is returned unchanged.
    """
    if not _is_special(text) or not os.path.lexists(text):
        return text
    pattern = _ESCAPE.sub(r"[\g<0>]", os.fsdecode(_absolute([urls.local(text)])[0]))
    pattern = pattern.replace("::", "[:][:]")
    return _BRACE.sub(r"\\\g<0>", pattern) if braces.are_in(pattern) else pattern


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


def _literal_directory(globs: bool) -> str:
    """Return the working directory with its slash, with nothing in it to be expanded; empty if it is gone.

    The name of a list has no `globs`.
    """
    try:
        directory = os.getcwd()
    except FileNotFoundError:
        return ""
    pattern = _ESCAPE.sub(r"[\g<0>]", directory).replace("::", "[:][:]") if globs else directory
    return (_BRACE.sub(r"\\\g<0>", pattern) if braces.are_in(pattern) else pattern) + "/"


def split_path(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """Split the `SHARDS... [PATH]` of `wdsfs ls` into the specs and the path inside the tree, if any.

    Semantics decision: the last of two or more arguments is PATH when it names no shard at all: no file of that
    name, no list, no directory that holds a shard, no glob match, and not one existing file among its brace
    expansions (a set of which a part exists stays a spec, so that `expand` can report what is missing). An
    argument with `${NAME}` is never PATH. No list is read to decide this.
    """
    *specs, last = arguments
    if not specs or names_a_shard(last):
        return list(arguments), None
    return specs, last


def names_a_shard(argument: str) -> bool:
    """Return True if this argument is SHARDS: at least one of the shards that it names exists."""
    if _VARIABLE.search(argument) or objects.is_url(argument):
        return True  # if it is not set or not there, `expand` reports it
    try:
        words = islice(_Expansion(read=False).words(argument), MAX_SHARDS)
        return any(_is_or_holds_a_shard(word.path) for word in words)
    except UnreadableShard:
        return True  # it exists; `expand` reports what is wrong with it
    except SpecError:
        return False


def holds_files(argument: str) -> bool:
    """Return True for a directory of files that become shards, False for SHARDS: `wdsfs pack` takes both.

    Semantics decision: a directory is SHARDS if it is a prepared dataset of Energon, or has shards and besides
    nothing but hidden names and files about shards (indexes, lists, notes). Raises SpecError for one with both.
    """
    if not os.path.lexists(argument):
        return not (_is_special(argument) or argument.endswith(SHARD_SUFFIXES))
    if objects.is_url(argument) or not os.path.isdir(argument) or shard_lists.dataset_at(argument) is not None:
        return False
    shards = set(_shard_names(argument))
    others = (
        name for name in os.listdir(argument) if not name.startswith(".") and not name.endswith(ABOUT_SHARDS)
    )
    other = next((name for name in others if os.path.join(argument, name) not in shards), None)
    if shards and other is not None:
        raise SpecError(
            f"{argument}: has shards ({os.path.basename(min(shards))}) and other files ({other}): name the "
            f"shards, such as {shlex.quote(os.path.join(argument, '*.tar'))}, or say what the files are with "
            "--layout"
        )
    return not shards


def _is_or_holds_a_shard(path: str) -> bool:
    mode = stat.S_IFREG if path == urls.STDIN else _mode(path)
    if mode is None or not stat.S_ISDIR(mode):
        return mode is not None
    return shard_lists.dataset_at(path) is not None or bool(_contents(path))


# -- from specs to words -------------------------------------------------------------------------------------


def _limited(words: Iterable[Word]) -> list[Word]:
    taken = list(islice(words, MAX_SHARDS + 1))
    if len(taken) > MAX_SHARDS:
        raise SpecError(f"the specs name more than {MAX_SHARDS:,} shards: check the ranges")
    return taken


def _words(specs: Iterable[str | bytes]) -> Iterator[Word]:
    """Yield the paths of files and directories that the specs name, as typed."""
    expansion = _Expansion()
    for spec in specs:
        if isinstance(spec, bytes):
            yield Word(os.fsdecode(spec))
        else:
            yield from expansion.words(spec)


class _Expansion:
    """Expands specs to words, and keeps track of the lists that are being read.

    If `read` is False, a list is returned unread.
    """

    def __init__(self, read: bool = True) -> None:
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
        """Yield the words of a name, whose braces are expanded; it was `typed` so."""
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
            for path in _matching(base, shard_lists.without_scheme(name)):
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
            path = objects.path_of(path)
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
                    yield from self.words(line, "" if name == urls.STDIN else _parent(path), origin)
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


def _is_special(text: str) -> bool:
    """Return True for a text that may mean something else than a path."""
    return text == urls.STDIN or _PLAIN.fullmatch(text) is None


def _existing(base: str, text: str) -> str | None:
    """Return the path of a text that exists literally, or can only be a path; None for all other texts.

    A list at a URL names nothing of this machine.
    """
    path = _below(base, text)
    if not _is_special(text):
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
    is_whole = path.startswith("/") or objects.is_url(path) or shard_lists.is_elsewhere(path)
    return path if not base or is_whole else base + path


def _braces(text: str) -> Iterator[str]:
    try:
        return braces.expand(text)
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
    if not shard_lists.is_elsewhere(path):
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


# -- from words to files that exist --------------------------------------------------------------------------


def _existing_files(
    words: list[Word], split: str | None, allow_missing: bool | None, base: str | None
) -> list[Word]:
    """Return the words with directories and lists replaced by their shards. Raises if one is not a regular file.

    A shard that its store refuses counts as missing.
    """
    refused: dict[str, ShardError] = {}
    shards, missing = _files(words, split, base, refused)
    if missing and not (allow_missing and len(missing) < len(shards)):
        way_out = WITHOUT_MISSING if allow_missing is not None and len(missing) < len(shards) else ""
        raise (
            _refused_shards(missing, refused, len(shards), way_out)
            if refused
            else _missing_shards(missing, len(shards), way_out)
        )
    return shards


def _present_files(words: list[Word], split: str | None, base: str | None) -> list[Word]:
    """Return words as `_existing_files`, without those of missing files. Raises MissingShard if all are missing.

    What is not a regular file is returned, too: it cannot be read, and the others can.
    """
    shards, missing = _files(words, split, base, None, special=True)
    if len(missing) == len(shards):
        raise _missing_shards(missing, len(shards))
    gone = {word.path for word in missing}
    return [word for word in shards if word.path not in gone]


def _files(
    words: list[Word],
    split: str | None,
    base: str | None,
    refused: dict[str, ShardError] | None,
    special: bool = False,
) -> tuple[list[Word], list[Word]]:
    """Return all words of shards, and the missing or `refused` ones (see `objects.modes`).

    Raises if one is not a regular file, unless `special` files may be among them.
    """
    modes = _modes((word.path for word in words), refused)
    shards = _limited(_shard_words(words, modes, split, base))
    if base is not None and not any(word.index_file for word in shards):
        raise SpecError(f"--base {base}: it is for an index ({index_file.SUFFIX}): name one")
    modes.update(_modes((word.path for word in shards if word.path not in modes), refused))
    missing = []
    for word in shards:
        mode = modes[word.path]
        if mode is None:
            missing.append(word)
        elif not (stat.S_ISREG(mode) or special):
            raise SpecError(f"{word.shown} is not a regular file")
    return shards, missing


def _shard_words(
    words: list[Word], modes: dict[str, int | None], split: str | None, base: str | None
) -> Iterator[Word]:
    """Yield the words of shards and of missing files. Modes of further files are added to `modes`."""
    for word in words:
        mode = modes[word.path]
        if mode is not None and stat.S_ISDIR(mode):
            dataset = shard_lists.dataset_at(word.path)
            if dataset is not None:
                yield from shard_lists.energon(dataset, split)
                continue
            inside = _contents(word.path)
            modes.update(inside)
            shards = [Word(path, word.origin) for path in inside]
        elif mode is not None and stat.S_ISREG(mode) and word.path.endswith(index_file.SUFFIX):
            if split is not None:
                raise shard_lists.without_splits(word.path, split)
            yield from shard_lists.portable(word.path, base)
            modes.update(dict.fromkeys(index_file.load(word.path).presumed(base), stat.S_IFREG))
            continue
        elif mode is not None and stat.S_ISREG(mode) and word.path.endswith(shard_lists.SUFFIXES):
            yield from metadataset.words_of(word.path, split)
            continue
        elif mode is not None and stat.S_ISREG(mode) and word.path.endswith(IMAGE_SUFFIX):
            raise SpecError(f"{word.shown}: is an image over shards, which is mounted alone; name the shards")
        else:
            shards = [word]
        if split is not None and mode is not None:
            raise shard_lists.without_splits(word.path, split)
        yield from shards


def _missing_shards(missing: list[Word], total: int, way_out: str = "") -> SpecError | MissingShard:
    """Return the error for missing shards; its text ends in the way out."""
    if shard_lists.is_elsewhere(missing[0].path):
        origin = f"{missing[0].origin}: " if missing[0].origin else ""
        return SpecError(origin + shard_lists.NOT_READ.format(objects.without_secrets(missing[0].path)))
    listed = ", ".join(word.shown for word in missing[:3]) + (", ..." if len(missing) > 3 else "")
    if total == 1:
        directory = objects.is_listable(missing[0].path) and not missing[0].path.endswith(SHARD_SUFFIXES)
        hint = "; if it is a directory of shards, end it with a slash" if directory else ""
        return MissingShard(f"no such shard: {listed}{hint or _shard_before(missing[0].path)}")
    return MissingShard(
        f"{len(missing):,} of {total:,} shards are missing: {listed}; check the range and the directory{way_out}"
    )


def _refused_shards(missing: list[Word], refused: dict[str, ShardError], total: int, way_out: str) -> ShardError:
    """Return the error for shards of which some are refused by their stores; it ends in the way out."""
    first = next(iter(refused.values()))
    if total == 1:
        return first
    reasons = [f"{refused[word.path]}" if word.path in refused else f"{word.shown}: missing" for word in missing]
    text = f"{len(missing):,} of {total:,} shards cannot be read: {several(reasons)}"
    return type(first)(text + way_out)


def _shard_before(path: str) -> str:
    """Return the end of a message about a missing shard that goes on behind a shard: `a.tar/a/im0`."""
    place = path
    while not objects.is_url(path) and (place := os.path.dirname(place)) not in ("", "/"):
        if place.endswith(SHARD_SUFFIXES) and os.path.isfile(place):
            return f"; to list the content of a shard: wdsfs ls {shlex.quote(place)}"
    return ""


def _contents(directory: str) -> dict[str, int | None]:
    """Return the shards directly inside a directory, sorted bytewise, with their modes.

    Semantics decision: shards are recognised by their suffixes, in small or capital letters. Hidden names are left
    out, as by a shell's `*.tar` (macOS and unfinished downloads leave such files), and so are directories. A
    dangling link counts as a missing shard.
    """
    if objects.is_url(directory):
        return objects.contents(directory)
    modes = _modes(_shard_names(directory))
    shards = {path: mode for path, mode in modes.items() if mode is None or not stat.S_ISDIR(mode)}
    if not shards:
        mounted = os.path.isdir(os.path.join(directory, ".wdsfs"))
        hint = "; it is a mount of wdsfs: name its shards instead" if mounted else _advice_on(directory)
        raise NoMatch(f"the directory {directory!r} holds no shard, such as x.tar or x.tar.gz{hint}")
    return shards


def _advice_on(directory: str) -> str:
    """Return the end of a message about a directory without shards; "" if nothing in it can be named or packed.

    The first file that is not about shards decides. Only a few of the directories inside are searched for it.
    """
    files = (name for _, _, names in islice(os.walk(directory), SEARCHED) for name in names)
    others = (name for name in files if not name.startswith(".") and not name.endswith(ABOUT_SHARDS))
    first = next(others, "")
    if first.endswith(SHARD_SUFFIXES):
        pattern = shlex.quote(os.path.join(glob.escape(directory), "**/*.tar"))
        return f"; those in directories inside it are {pattern}"
    return f"; to make shards of its files: wdsfs pack {shlex.quote(directory)} -o 'set-%06d.tar'" if first else ""


def _shard_names(directory: str) -> list[str]:
    dependencies.note_directory(directory)
    try:
        listed = os.listdir(directory)
    except OSError as error:
        raise UnreadableShard(f"cannot list the directory {directory!r}: {error.strerror}") from error
    shards = [name for name in listed if name.endswith(SHARD_SUFFIXES) and not name.startswith(".")]
    return [os.path.join(directory, name) for name in sorted(shards, key=os.fsencode)]


def _modes(paths: Iterable[str], refused: dict[str, ShardError] | None = None) -> dict[str, int | None]:
    """Return the mode of each path, None if it is missing: from a listing where that is faster, else by stat.

    `refused` is as in `objects.modes`.
    """
    modes: dict[str, int | None] = dict.fromkeys(paths)
    remote = [path for path in modes if objects.is_url(path)]
    by_parent: defaultdict[str, list[str]] = defaultdict(list)
    for path in filter(objects.is_local, modes) if remote else modes:
        by_parent[_parent(path)].append(path)
    for parent, siblings in by_parent.items():
        dependencies.note_directory(parent)
        listed = _listed_files(parent, siblings) if len(siblings) >= LISTING_PAYS else set()
        for path in siblings:
            modes[path] = stat.S_IFREG if path in listed else _mode(path)
    if remote:
        modes.update(objects.modes(remote, refused))
    return modes


def _parent(word: str) -> str:
    """Return the directory part of a path, with its last slash; "" for a name in the current directory."""
    return word[: word.rfind("/") + 1]


def _mode(word: str) -> int | None:
    try:
        return os.stat(word).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):  # a name, or a link, that leads nowhere
            return None
        raise UnreadableShard(f"cannot look at the shard {word!r}: {reason_of(error)}") from error


def _listed_files(parent: str, siblings: list[str]) -> set[str]:
    """Return the paths, all in the directory `parent`, that a listing shows as regular files.

    `_mode` decides about the others: links, names that a cached listing of a network file system does not show
    yet, or all names if the directory cannot be listed.
    """
    paths = set(siblings)
    files: set[str] = set()
    # stat reports what is wrong with a directory that cannot be listed.
    with contextlib.suppress(OSError), os.scandir(parent or ".") as entries:
        for entry in islice(entries, LISTING_RATIO * len(siblings)):
            if parent + entry.name in paths and entry.is_file(follow_symlinks=False):
                files.add(parent + entry.name)
    return files


# -- absolute paths ------------------------------------------------------------------------------------------


def _absolute(files: list[str]) -> list[bytes]:
    parents: dict[str, str] = {}
    paths = []
    for file in files:
        if not file.startswith("/") and objects.is_url(file):
            paths.append(os.fsencode(file))
            continue
        parent = _parent(file)
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


def _refuse_repeated(paths: list[bytes], words: list[Word]) -> None:
    if len(set(paths)) == len(paths):
        return
    repeated = [path for path, count in Counter(paths).items() if count > 1]
    places = [
        str(word.origin) for path, word in zip(paths, words, strict=True) if path == repeated[0] and word.origin
    ]
    where = f" ({', '.join(places[:3])})" if places else ""
    shards = f"{os.fsdecode(repeated[0])!r}{and_others(len(repeated))}"
    raise SpecError(f"the shard {shards} is named twice{where}: name it once")


# -- names in the mount --------------------------------------------------------------------------------------


def _names(paths: list[bytes]) -> list[bytes]:
    """Return a distinct name for each of these distinct absolute paths.

    Semantics decision: a shard's name is its base name without `.tar`, `.tar.gz` or another suffix of a shard. The
    suffix stays where nothing, `.` or `..` would be left of the name, and where the set holds the path without it,
    too. Of `x.tar` and `x.tar.gz` in one directory the first is `x`, and all others keep theirs. So it is with the
    sum of a query: `x.tar?download=true` alone is `x`; of several that differ in the query each keeps its sum.
    Semantics decision: shards of equal names get the shortest trailing path that no other of them has, its
    components joined by `--`: `a/train-0.tar` and `b/train-0.tar` are `a--train-0` and `b--train-0`. Only the
    clashing ones are lengthened. `--`, because it needs no quoting in any shell.
    Semantics decision: what is longer than 255 bytes then is cut and marked by a checksum, as all names are.
    Semantics decision: a lengthened name that is some shard's name already gets `~2`, `~3`, ... in the order
    of the set. So do the outputs of commands that name no shard, which are all called `pipe`.
    """
    stems = _stems(paths)
    depths = [
        1 if objects.is_unnamed(path) else depth
        for path, depth in zip(paths, _distinguishing_depths(stems), strict=True)
    ]
    proposals = [JOINER.join(_trailing(stem, depth)) for stem, depth in zip(stems, depths, strict=True)]
    plain = [
        depth == 1 and len(name) <= names.NAME_MAX and not objects.is_unnamed(path)
        for path, depth, name in zip(paths, depths, proposals, strict=True)
    ]
    taken = {name for name, is_plain in zip(proposals, plain, strict=True) if is_plain}
    return [name if is_plain else free_name(name, taken) for name, is_plain in zip(proposals, plain, strict=True)]


def _stems(paths: list[bytes]) -> list[bytes]:
    """Return the paths without their suffixes, or with them where they have to stay. Distinct for distinct paths.

    A path keeps its suffix whenever its stem is a path of the set, so no stem equals such a path. Stems of `.tar`
    differ as their paths do; any other suffix is cut only where no other path has that stem.
    """
    known = set(paths)
    cut = [names.without_suffix(urls.without_mark(path)) for path in paths]
    times = Counter(cut)

    def stem(path: bytes, cut: bytes) -> bytes:
        shared = times[cut] > 1 and not path.endswith(names.SHARD_SUFFIXES[0])
        return path if shared or cut in known or cut.endswith((b"/", b"/.", b"/..")) else cut

    return [stem(path, short) for path, short in zip(paths, cut, strict=True)]


def _distinguishing_depths(stems: list[bytes]) -> list[int]:
    """Return for each stem the least number of trailing components that no other stem ends with."""
    depths = [0] * len(stems)
    clashing: Sequence[int] = range(len(stems))
    depth = 0
    while clashing:
        depth += 1
        for position in clashing:
            depths[position] = depth
        clashing = _clashing(stems, clashing, depth)
    return depths


def _clashing(stems: list[bytes], positions: Sequence[int], depth: int) -> list[int]:
    """Return the positions whose stem shares its last `depth` components with that of another position."""
    groups: defaultdict[bytes, list[int]] = defaultdict(list)
    for position in positions:
        groups[b"/".join(stems[position].rsplit(b"/", depth)[-depth:])].append(position)
    return [position for group in groups.values() if len(group) > 1 for position in group]


def _trailing(stem: bytes, depth: int) -> list[bytes]:
    """Return the last components of a stem; the root directory, which has no name, is left out."""
    return [component for component in stem.rsplit(b"/", depth)[-depth:] if component]


def free_name(proposal: bytes, taken: set[bytes]) -> bytes:
    """Return a name like `proposal`, of at most 255 bytes, that is not in `taken`; it is added to it."""
    name = names.shorten(proposal)
    number = 1
    while name in taken:
        number += 1
        name = names.numbered(proposal, number)
    taken.add(name)
    return name
