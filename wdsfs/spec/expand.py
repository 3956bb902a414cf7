"""What a user types -> an ordered list of shards, each with the name it has in the mount.

A spec is a brace expression (`train-{000000..000099}.tar`), a plain path, a glob (`train-*.tar`, `**` too), a
directory (its tars), a prepared Energon dataset, a file that names shards (JSON or YAML, read by
`spec/shard_lists.py`), a list of specs (`@list.txt`), or several of these joined by `::`, the webdataset library's
separator. `${NAME}` is replaced as in that library, and a leading `~` is expanded. No shard is opened and no
symbolic link is resolved: what a shard holds is for `tar/scan.py` to say. Plain functions over the file system's
names; no FUSE, no LMDB.

The order of the shards is the order of the specs, and the set is exactly what was asked for: a shard that is
not there or that is named twice is an error, never a smaller set (unless that is asked for).
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
import stat
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

from wdsfs import names
from wdsfs.errors import MissingShard, SpecError, UnreadableShard
from wdsfs.reading import PLAIN, Reading
from wdsfs.spec import braces, located, shard_lists
from wdsfs.spec.shard_lists import Word

MAX_SHARDS = braces.MAX_WORDS  # per call
JOINER = b"--"

# From this many shards in one directory on, listing it beats one stat per shard. Measured with 100,000 shards
# on ext4: 0.08 s against 0.27 s; on a network file system a stat is a round trip and a listing is not.
LISTING_PAYS = 64
# ... unless the directory holds far more than was asked for: the listing is given up at this ratio.
LISTING_RATIO = 16

LIST = "@"
MAX_LISTS = 1000  # that are read in one call: two that each name a third one twice, and so on, would never end
MAX_NESTED = 20
MAX_PASSES = 10  # of replacing variables, as in the webdataset library
MAX_SPEC = 1 << 20  # characters of one spec; what grows past it refers to itself

_SEPARATOR = "::"
_GLOB = re.compile(r"[*?\[]")
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_PLAIN = re.compile(r"[^~@{}*?\[:][^{}*?\[:]*")  # nothing in it to expand
_SUFFIXES = tuple(os.fsdecode(suffix) for suffix in names.SHARD_SUFFIXES)


class Slice(NamedTuple):
    """One of `num_shards` equal parts of a set, counted from 0; the words are DALI's.

    REQUIRES: 0 <= shard_id < num_shards.
    """

    shard_id: int
    num_shards: int


class Selection(NamedTuple):
    """Which part of what the specs name is wanted, and how it is read: `expand(specs, *selection)`."""

    split: str | None = None
    slice: Slice | None = None
    reading: Reading = PLAIN
    allow_missing: bool = False

    @property
    def arguments(self) -> list[str]:
        """The options of a command that select the same of what is there."""
        found = [] if self.split is None else ["--split", self.split]
        if self.slice is not None:
            found += ["--shard-id", str(self.slice.shard_id), "--num-shards", str(self.slice.num_shards)]
        return found + self.reading.arguments


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard of a set.

    `path` is absolute, but not resolved: a symbolic link stays what the user called it. `name` is the name of
    its directory in the mount: one path component, at most 255 bytes, unlike every other shard's of the set.

    `without` are the keys, as in the names of members, of samples that are left out. `expected_samples` is how
    many there are in the shard, those included, according to the file that names it.

    `place` is the number of the shard in the whole set, and how many that has, if this is a part of it. `reading`
    is the same for all shards of a set.
    """

    path: bytes
    name: bytes
    without: frozenset[bytes] = frozenset()
    expected_samples: int | None = None
    place: tuple[int, int] | None = field(default=None, compare=False)
    reading: Reading = PLAIN

    @property
    def key(self) -> bytes:
        """What the index keeps the shard's record under."""
        return self.path + self.reading.mark

    def miscount(self, samples: int) -> str:
        """What is wrong when the shard has this many samples; empty if nothing is."""
        if self.expected_samples in (None, samples):
            return ""
        return f"has {samples:,} samples; the file that names it says {self.expected_samples:,}"


def expand(
    specs: Sequence[str | bytes],
    split: str | None = None,
    slice: Slice | None = None,
    reading: Reading = PLAIN,
    allow_missing: bool = False,
) -> list[Shard]:
    """The shards that `specs` name, in order: all of them, or those of a split, or of a slice; to be read so.

    With `allow_missing` they need not all be there, but one has to be.

    Semantics decision: a spec that names something that exists is taken literally, whatever braces, glob
    characters or `::` it holds. Otherwise it is split at `::`, then variables are replaced, then braces are
    expanded, then `@`, `~` and globs.
    Semantics decision: the shards of a glob or a directory are sorted bytewise by path, whatever the locale.
    Semantics decision: one path given twice is an error. Keeping it once would silently change the set, and
    twice would make two trees of one shard. Two links to one file are two shards.
    Semantics decision: a slice has every M-th shard, as the webdataset library's `split_by_node` deals them out,
    for what is dealt out is shards, as there. (DALI gives out contiguous samples.) Neighbours, which are often
    alike, are spread, and parts differ by at most one shard. It is cut last, from the set with all its names:
    every rank sees the same errors, and a shard has the same name in all of them.

    Raises SpecError (means nothing, nothing matches, not a regular file, given twice), MissingShard, and
    UnreadableShard when the file system refuses to say whether a shard is there.
    """
    words = _limited(_words(specs))
    if not words:
        raise SpecError("no shards given: name at least one, for example 'train-{000000..000099}.tar'")
    found = _existing_files(words, split, allow_missing)
    paths = _absolute([word.path for word in found])
    _refuse_repeated(paths, found)
    shards = [
        Shard(path, name, word.without, word.samples, reading=reading)
        for path, name, word in zip(paths, _names(paths), found, strict=True)
    ]
    return shards if slice is None else _sliced(shards, slice)


def _sliced(shards: list[Shard], part: Slice) -> list[Shard]:
    if len(shards) < part.num_shards:
        # For all of them: one rank that fails alone leaves the others waiting.
        raise SpecError(
            f"the set has {len(shards):,} shards and cannot be cut into {part.num_shards:,} parts: "
            "one of them would be empty"
        )
    placed = (replace(shard, place=(number, len(shards))) for number, shard in enumerate(shards))
    return list(placed)[part.shard_id :: part.num_shards]


def refuse_left_out(shards: Iterable[Shard], why: str) -> None:
    """Raises SpecError when samples of these shards are left out: a part of a shard cannot be changed."""
    for shard in shards:
        if shard.without:
            raise SpecError(
                f"{why}: samples of {os.fsdecode(shard.path)!r} are excluded by the split file of its dataset; "
                "name the shards themselves, for example 'DIR/*.tar'"
            )


def extended(shards: Sequence[Shard], paths: Sequence[bytes]) -> list[Shard]:
    """The set with these further shards behind it; no name changes."""
    known = {shard.path for shard in shards}
    taken = {shard.name for shard in shards}
    found = list(shards)
    for path in paths:
        if path not in known:
            name = _free_name(_stems([path])[0].rpartition(b"/")[2], taken)
            taken.add(name)
            found.append(Shard(path, name, reading=shards[0].reading))
    return found


def split_path(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """Split the `SHARDS... [PATH]` of `wdsfs ls` into the specs and the path inside the tree, if any.

    Semantics decision: the last of two or more arguments is PATH when it names no shard at all: no file of
    that name, no list, no directory that holds a shard, no glob match, and not one existing file among its brace
    expansions (a set that is there in part stays a spec, so that `expand` can say what is missing). What has a
    `${NAME}` in it is never PATH. No list is read to know that.
    """
    *specs, last = arguments
    if not specs or names_a_shard(last):
        return list(arguments), None
    return specs, last


def names_a_shard(argument: str) -> bool:
    """Whether this argument is SHARDS: at least one of the shards that it names is there."""
    if _VARIABLE.search(argument):
        return True  # if it is not set, `expand` says so
    try:
        words = islice(_Expansion(read=False).words(argument), MAX_SHARDS)
        return any(_is_or_holds_a_shard(word.path) for word in words)
    except UnreadableShard:
        return True  # it is there; let `expand` say what is wrong with it
    except SpecError:
        return False


def _is_or_holds_a_shard(path: str) -> bool:
    mode = stat.S_IFREG if path == located.STDIN else _mode(path)
    if mode is None or not stat.S_ISDIR(mode):
        return mode is not None
    return shard_lists.dataset_at(path) is not None or bool(_contents(path))


# -- from specs to words -------------------------------------------------------------------------------------


def _limited(words: Iterable[Word]) -> list[Word]:
    found = list(islice(words, MAX_SHARDS + 1))
    if len(found) > MAX_SHARDS:
        raise SpecError(f"the specs name more than {MAX_SHARDS:,} shards: check the ranges")
    return found


def _words(specs: Iterable[str | bytes]) -> Iterator[Word]:
    """The paths that the specs name, of files and of directories, as typed and lazily."""
    expansion = _Expansion()
    for spec in specs:
        yield from expansion.words(os.fsdecode(spec))


class _Expansion:
    """Specs on their way to words, and the lists that are being read for them.

    Where `read` is False, a list stands for itself.
    """

    def __init__(self, read: bool = True) -> None:
        self.read = read
        self.inside: list[str] = []  # the lists that the spec is in, by their real paths
        self.lists = 0

    def words(self, text: str, base: str = "", origin: str = "") -> Iterator[Word]:
        """The words of one spec. Relative paths are below `base`, which is empty or ends in a slash."""
        _refuse_no_path(text)
        if _PLAIN.fullmatch(text) or os.path.lexists(_below(base, text)):
            yield Word(_below(base, text), origin)
            return
        for part in text.split(_SEPARATOR):
            for word in braces.expand(_substituted(part)):
                if not word:
                    raise SpecError(f"an empty shard name in {text!r}")
                if word.startswith(LIST) and not os.path.lexists(_below(base, word)):
                    yield from self._list(base, word.removeprefix(LIST))
                else:
                    for path in _glob_paths(base, shard_lists.without_scheme(word)):
                        yield Word(path, origin)

    def _list(self, base: str, name: str) -> Iterator[Word]:
        """The words of the specs in a text file, one a line."""
        path = name if name == located.STDIN else _below(base, os.path.expanduser(name))
        if not self.read:
            yield Word(path)
            return
        identity = path if name == located.STDIN else os.path.realpath(path)
        if identity in self.inside:
            raise SpecError(f"the list {path!r} is named inside of itself")
        self.lists += 1
        if self.lists > MAX_LISTS or len(self.inside) >= MAX_NESTED:
            raise SpecError(f"the list {path!r} is one list too many: {MAX_LISTS:,} are read, {MAX_NESTED} deep")
        self.inside.append(identity)
        empty = True
        for number, line in located.lines(path):
            if line and not line.startswith("#"):
                empty = False
                origin = f"{path}:{number}"
                try:
                    yield from self.words(line, "" if name == located.STDIN else _parent(path), origin)
                except SpecError as error:
                    raise SpecError(f"{origin}: {error}") from None
        if empty:
            raise SpecError(f"the list {path!r} names no shards")
        self.inside.pop()


def _refuse_no_path(text: str) -> None:
    """Raises SpecError for what no path can be."""
    if not text or "\0" in text:
        raise SpecError("an empty shard name" if not text else f"a NUL in the shard name {text!r}")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise SpecError(f"the shard name {text!r} cannot be encoded for the file system") from None


def _below(base: str, path: str) -> str:
    return path if not base or path.startswith("/") or shard_lists.is_elsewhere(path) else base + path


def _substituted(text: str) -> str:
    """The text with each `${NAME}` replaced by the variable WDS_NAME, and again what has come in by that.

    The rule is that of the webdataset library (`shardlists.py`, `expand_urls`), which leaves what is not done
    after ten passes as it is; here that is an error.
    """
    found = text
    for _ in range(MAX_PASSES):
        if not _VARIABLE.search(found):
            return found
        if len(found) > MAX_SPEC:
            break
        found = _VARIABLE.sub(lambda match: _variable(match[1], text), found)
    if _VARIABLE.search(found):
        raise SpecError(f"the variables in {text[:200]!r} refer to each other without end")
    return found


def _variable(name: str, text: str) -> str:
    value = os.environ.get(f"WDS_{name}")
    if value is None:
        raise SpecError(f"the environment variable WDS_{name} is not set; {text!r} needs it")
    return value


def _glob_paths(base: str, word: str) -> list[str]:
    """What a glob matches; the path itself when it is none."""
    expanded = os.path.expanduser(word) if word.startswith("~") else word
    path = _below(base, expanded)
    if not _GLOB.search(word) or os.path.lexists(path):
        return [path]
    pattern = path if path == expanded else glob.escape(base) + expanded
    matches = sorted(glob.iglob(pattern, recursive=True), key=os.fsencode)
    if not matches:
        raise SpecError(f"no file matches {word!r}")
    return matches


# -- from words to files that exist --------------------------------------------------------------------------


def _existing_files(words: list[Word], split: str | None, allow_missing: bool) -> list[Word]:
    """The words, with what holds or names shards replaced by these. Raises for what is no regular file."""
    modes = _modes(word.path for word in words)
    found = _limited(_shard_words(words, modes, split))
    modes.update(_modes(word.path for word in found if word.path not in modes))
    missing = []
    for word in found:
        mode = modes[word.path]
        if mode is None:
            missing.append(word)
        elif not stat.S_ISREG(mode):
            raise SpecError(f"{word.shown} is no regular file")
    if missing and not (allow_missing and len(missing) < len(found)):
        raise _missing_shards(missing, len(found))
    return found


def _shard_words(words: list[Word], modes: dict[str, int | None], split: str | None) -> Iterator[Word]:
    """Shards, and what does not exist. `modes` takes in what is known of further files."""
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
        elif mode is not None and stat.S_ISREG(mode) and word.path.endswith(shard_lists.SUFFIXES):
            yield from shard_lists.words_of(word.path, split)
            continue
        else:
            shards = [word]
        if split is not None and mode is not None:
            raise shard_lists.without_splits(word.path, split)
        yield from shards


def _missing_shards(missing: list[Word], total: int) -> SpecError | MissingShard:
    """The error for shards that are not there, with the likely way out."""
    if shard_lists.is_elsewhere(missing[0].path):
        return SpecError(f"{missing[0].shown} is no path: wdsfs takes paths of files on mounted file systems")
    listed = ", ".join(word.shown for word in missing[:3]) + (", ..." if len(missing) > 3 else "")
    if total == 1:
        return MissingShard(f"no such shard: {listed}")
    return MissingShard(
        f"{len(missing):,} of {total:,} shards are missing: {listed}; check the range and the directory"
    )


def _contents(directory: str) -> dict[str, int | None]:
    """The shards directly inside a directory, sorted bytewise, with their modes.

    Semantics decision: they are known by their suffixes, and hidden names are left out, as a shell's `*.tar` does
    (they are what macOS and unfinished downloads leave behind), and so are directories. A dangling link counts as
    a missing shard.
    """
    modes = _modes(_shard_names(directory))
    shards = {path: mode for path, mode in modes.items() if mode is None or not stat.S_ISDIR(mode)}
    if not shards:
        raise SpecError(f"the directory {directory!r} holds no shard, such as x.tar or x.tar.gz")
    return shards


def _shard_names(directory: str) -> list[str]:
    try:
        listed = os.listdir(directory)
    except OSError as error:
        raise UnreadableShard(f"cannot list the directory {directory!r}: {error.strerror}") from error
    found = [name for name in listed if name.endswith(_SUFFIXES) and not name.startswith(".")]
    return [os.path.join(directory, name) for name in sorted(found, key=os.fsencode)]


def _modes(paths: Iterable[str]) -> dict[str, int | None]:
    """The mode of each path, None for what does not exist: from a listing where that pays, else by stat."""
    modes: dict[str, int | None] = dict.fromkeys(paths)
    by_parent: defaultdict[str, list[str]] = defaultdict(list)
    for path in modes:
        by_parent[_parent(path)].append(path)
    for parent, siblings in by_parent.items():
        listed = _listed_files(parent, siblings) if len(siblings) >= LISTING_PAYS else set()
        for path in siblings:
            modes[path] = stat.S_IFREG if path in listed else _mode(path)
    return modes


def _parent(word: str) -> str:
    """The directory part of a path, with its last slash; "" for a name in the current directory."""
    return word[: word.rfind("/") + 1]


def _mode(word: str) -> int | None:
    try:
        return os.stat(word).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return None
        raise UnreadableShard(f"cannot look at the shard {word!r}: {error.strerror}") from error


def _listed_files(parent: str, siblings: list[str]) -> set[str]:
    """Those of these words, all in the directory `parent`, that a listing shows to be regular files.

    What is not in the result is for `_mode` to tell: a link, a name that a cached listing of a network file
    system does not show yet, or any name when the directory cannot be listed.
    """
    wanted = set(siblings)
    found: set[str] = set()
    # stat says what is wrong with a directory that cannot be listed.
    with contextlib.suppress(OSError), os.scandir(parent or ".") as entries:
        for entry in islice(entries, LISTING_RATIO * len(siblings)):
            if parent + entry.name in wanted and entry.is_file(follow_symlinks=False):
                found.add(parent + entry.name)
    return found


# -- absolute paths ------------------------------------------------------------------------------------------


def _absolute(files: list[str]) -> list[bytes]:
    parents: dict[str, str] = {}
    paths = []
    for file in files:
        parent = _parent(file)
        directory = parents.get(parent)
        if directory is None:
            directory = parents[parent] = _absolute_directory(parent)
        paths.append(os.fsencode(directory + file[len(parent) :]))
    return paths


def _absolute_directory(directory: str) -> str:
    """The absolute path of a directory ("" is the current one), with a slash at its end.

    `..` behind a symbolic link does not lead to where the text says: `link/../x.tar` lies beside what the
    link points to, and `os.path.abspath` would name another file. So all up to the last `..` is resolved.
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
    more = f" (and {len(repeated) - 1:,} more)" if len(repeated) > 1 else ""
    places = [
        str(word.origin) for path, word in zip(paths, words, strict=True) if path == repeated[0] and word.origin
    ]
    where = f" ({', '.join(places[:3])})" if places else ""
    raise SpecError(f"the shard {os.fsdecode(repeated[0])!r}{more} is named twice{where}: name it once")


# -- names in the mount --------------------------------------------------------------------------------------


def _names(paths: list[bytes]) -> list[bytes]:
    """A distinct name for each of these distinct absolute paths.

    Semantics decision: a shard's name is its base name without `.tar`, `.tar.gz` or another suffix of a shard. The
    suffix stays where nothing, `.` or `..` would be left of the name, and where the set holds the path without it,
    too. Of `x.tar` and `x.tar.gz` in one directory the first is `x`, and all others keep theirs.
    Semantics decision: shards of equal names get the shortest trailing path that no other of them has, its
    components joined by `--`: `a/train-0.tar` and `b/train-0.tar` are `a--train-0` and `b--train-0`. Only the
    clashing ones are lengthened. `--`, because it needs no quoting in any shell.
    Semantics decision: what is longer than 255 bytes then is cut and marked by a checksum, as all names are.
    Semantics decision: a lengthened name that is some shard's name already gets `~2`, `~3`, ... in the order
    of the set.
    """
    stems = _stems(paths)
    depths = _distinguishing_depths(stems)
    wanted = [JOINER.join(_trailing(stem, depth)) for stem, depth in zip(stems, depths, strict=True)]
    plain = [depth == 1 and len(name) <= names.NAME_MAX for depth, name in zip(depths, wanted, strict=True)]
    taken = {name for name, is_plain in zip(wanted, plain, strict=True) if is_plain}
    return [name if is_plain else _free_name(name, taken) for name, is_plain in zip(wanted, plain, strict=True)]


def _stems(paths: list[bytes]) -> list[bytes]:
    """The paths without their suffixes, or with them where they have to stay. Distinct for distinct paths.

    They are: a path keeps its suffix whenever the stem it would have is a path of the set, so no stem equals
    a path that was kept whole. And what loses `.tar` differs as its path does; any other suffix is cut only where
    no other path has that stem.
    """
    known = set(paths)
    cut = [names.without_suffix(path) for path in paths]
    times = Counter(cut)

    def stem(path: bytes, cut: bytes) -> bytes:
        shared = times[cut] > 1 and not path.endswith(names.SHARD_SUFFIXES[0])
        return path if shared or cut in known or cut.endswith((b"/", b"/.", b"/..")) else cut

    return [stem(path, short) for path, short in zip(paths, cut, strict=True)]


def _distinguishing_depths(stems: list[bytes]) -> list[int]:
    """For each stem the least number of trailing components that no other stem ends with."""
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
    """Those of the positions whose stem ends as another's of them does, by `depth` components."""
    groups: defaultdict[bytes, list[int]] = defaultdict(list)
    for position in positions:
        groups[b"/".join(stems[position].rsplit(b"/", depth)[-depth:])].append(position)
    return [position for group in groups.values() if len(group) > 1 for position in group]


def _trailing(stem: bytes, depth: int) -> list[bytes]:
    """The last components of a stem; the root directory, which has no name, is left out."""
    return [component for component in stem.rsplit(b"/", depth)[-depth:] if component]


def _free_name(wanted: bytes, taken: set[bytes]) -> bytes:
    """A name like `wanted`, of at most 255 bytes, that is not in `taken`; it is added to it."""
    name = names.shorten(wanted)
    number = 1
    while name in taken:
        number += 1
        name = names.numbered(wanted, number)
    taken.add(name)
    return name
