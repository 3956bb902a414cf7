"""URLs in specs: expands globs and prefixes of object stores, and checks which objects are there.

The counterpart, for object stores, of the questions that `existence.py` asks of file systems. From here on a URL
is a path: the shown one, without secrets (`door/shard_door.py`).
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

from wdsfs import names
from wdsfs.door import urls
from wdsfs.door.pins import Listing, Pin
from wdsfs.door.shard_door import DOOR
from wdsfs.door.urls import WEB, Url, is_remote
from wdsfs.errors import MissingObject, NoMatch, ShardError, SpecError, Unreachable
from wdsfs.shared_settings import setting

# From this many shards below one prefix on, listing it beats one HEAD per shard: a LIST brings 1,000 names.
LISTING_PAYS = 64
DIRECTORIES_MAX = 64  # that a glob lists one by one
INDEX_SUFFIX = ".wdsidx"  # of portable indexes
ASKED_AGAIN = 64  # objects in a round of `ask_again`, at most, for which there is no listing

# Between specs that are joined; not in the address of a host, as in http://[2001:db8::1]/x.tar.
# An address has up to 45 characters: looking further ahead would take quadratic time for a list of short words.
_SEPARATOR = re.compile(r"::(?![0-9a-fA-F:.]{0,45}\](?:[:/]|$))")
_GLOB = re.compile(r"[*?\[]")
SHARD_SUFFIXES = tuple(os.fsdecode(suffix) for suffix in names.SHARD_SUFFIXES_OF_ANY_CASE)
ABOUT_SHARDS = (".idx", ".index", ".wdsidx", ".json", ".yaml", ".yml", ".txt", ".md")
Match = TypeVar("Match")


is_url = urls.is_url

_COMMAND = "{!r}: a command is run for SHARDS of the command line only, unless --allow-pipe is given"
_NO_COMMAND = "{!r}: pipe:COMMAND is run for a line in fstab only with the option allow-pipe"
_HIDDEN_COMMAND = "{!r}: braces and variables make no command: write pipe: itself at the beginning of the word"
ALLOW_PIPE, ALWAYS, NEVER = "ALLOW_PIPE", "1", "0"  # a setting; else: where the command line names a command
_OF_THIS_MACHINE = (
    "{!r}: a list at a URL may not name files or commands of this machine: copy the list here if you trust it"
)


def refuse_command(text: str, file: str = "") -> None:
    """Raise SpecError for a command, or the standard input, that a file names: another user may have written it.

    `file` is the path of the file, or its directory. One at a URL may not name commands in any case.
    """
    if is_command(text) or text == urls.STDIN:
        if is_url(file):
            raise SpecError(_OF_THIS_MACHINE.format(without_secrets(text)))
        if setting(ALLOW_PIPE) != ALWAYS:
            raise SpecError(_COMMAND.format(without_secrets(text)))


def refuse_hidden_command(text: str, typed: str) -> None:
    """Raise SpecError for a command that does not begin with `pipe:` as it was typed.

    Semantics decision: neither braces nor variables make a word a command. So a program that passes a text on as
    SHARDS only has to look at the first characters of each word.
    """
    if is_command(text) and not is_command(typed):
        raise SpecError(_HIDDEN_COMMAND.format(without_secrets(text)))


def refuse_local(path: str, file: str) -> None:
    """Raise SpecError for a local path that a file at a URL names: its author must not choose local files.

    `file` is the path of that file, or its directory.
    """
    if is_url(file) and not is_url(path):
        raise SpecError(_OF_THIS_MACHINE.format(path))


def is_command(text: str) -> bool:
    """Return True for the output of a command, as a spec or as a path."""
    return text.startswith(urls.PIPE)


def is_unnamed(path: bytes) -> bool:
    """Return True for the path of the output of a command that names no shard."""
    return path.startswith(urls.PIPE.encode()) and path.endswith(b"/pipe")


def _parse(text: str) -> Url:
    """Return the URL that was typed. Raises SpecError."""
    if not is_command(text):
        return urls.parse(text)
    if setting(ALLOW_PIPE) == NEVER:
        raise SpecError(_NO_COMMAND.format(without_secrets(text)))
    command = text.removeprefix(urls.PIPE)
    if not command.strip():
        raise SpecError(f"{text!r}: the command is missing")
    return urls.program(command, os.getcwd())


def standard_input() -> str:
    """Read the standard input, which is one shard; return its path. Raises ShardError, SpecError."""
    if os.isatty(0):
        raise SpecError("'-': the standard input is a terminal; pipe a shard into this command")
    return os.fsdecode(DOOR.remote.standard_input())


def read_object(path: str, limit: int) -> bytes:
    """Return the first `limit` bytes of an object. Raises ShardError."""
    with contextlib.closing(DOOR.remote.open(os.fsencode(path))) as reader:
        return reader.pread(limit, 0)


def is_file(path: str) -> bool:
    """Return True if there is a file or an object at this path. Raises ShardError when a store refuses to say."""
    return modes([path])[path] is not None if is_url(path) else os.path.isfile(path)


def is_listable(path: str) -> bool:
    """Return True for a URL of a store that can list the objects below it."""
    return is_url(path) and not is_command(path) and urls.parse(path).scheme not in WEB


def paths_of(text: str) -> list[str]:
    """Return the paths that a URL stands for: the matches of a glob, or itself. Raises SpecError, ShardError.

    Semantics decision: as in a file system, `*` matches no slash, `**` does, and neither matches a hidden name.
    """
    url = _parse(text)
    # In the web "?" begins a query, and brackets are characters.
    if not (_GLOB.search(url.key) and (url.scheme not in WEB or "*" in url.key)):
        return [_path_of(url)]
    matches = _pinned_paths(shards_among(url.key, _matches(url), lambda match: match[0].key))
    if not matches:
        literal = _path_of(url)
        if modes([literal])[literal] is not None:  # as for files: an existing name is taken literally
            return [literal]
        raise NoMatch(f"no object matches {url.shown!r}")
    return sorted(matches, key=os.fsencode)


def shards_among(pattern: str, matches: list[Match], name_of: Callable[[Match], str]) -> list[Match]:
    """Return the matches of a glob without the files about shards among them.

    Semantics decision: `shards/*` names what `shards/` does, also beside an index or a classes.txt. Such files
    count if the glob asks for their suffix, or matches no shard.
    """
    if pattern.endswith(ABOUT_SHARDS) or not any(name_of(match).endswith(SHARD_SUFFIXES) for match in matches):
        return matches
    return [match for match in matches if not name_of(match).endswith(ABOUT_SHARDS)]


def _matches(pattern: Url) -> list[tuple[Url, Pin]]:
    """Return the objects that match a glob. Raises ShardError.

    Directory by directory, for much else may lie below; all at once for `**` and where directories are many.
    """
    *folders, last = pattern.key.split("/")
    directories = [""]
    for folder in folders:
        if folder == "**" or len(directories) > DIRECTORIES_MAX:
            return _all_matches(pattern)
        if _GLOB.search(folder):
            listed = [(path, _list_prefix(pattern._replace(key=path)).folders) for path in directories]
            directories = [key for path, keys in listed for key in keys if _fits([key[len(path) : -1]], [folder])]
        else:
            directories = [f"{path}{folder}/" for path in directories]
    if last == "**" or len(directories) > DIRECTORIES_MAX:
        return _all_matches(pattern)
    return [
        (url, pin)
        for path in directories
        for url, pin in _list_prefix(pattern._replace(key=path)).objects
        if _fits([url.key[len(path) :]], [last])
    ]


def _all_matches(pattern: Url) -> list[tuple[Url, Pin]]:
    """Return the objects that match a glob, out of all below its first directories."""
    special = _GLOB.search(pattern.key)
    assert special is not None
    patterns = pattern.key.split("/")
    objects = _list_prefix(pattern._replace(key=pattern.key[: special.start()]), deep=True).objects
    return [(url, pin) for url, pin in objects if _fits(url.key.split("/"), patterns)]


def contents(prefix: str) -> dict[str, int | None]:
    """Return the shards directly below a path that ends in a slash, sorted bytewise.

    Raises SpecError, ShardError.
    """
    url = DOOR.remote.url_of(os.fsencode(prefix))
    objects = [
        (shard, pin) for shard, pin in _list_prefix(url).objects if is_shard_name(shard.key[len(url.key) :])
    ]
    shards = sorted(_pinned_paths(objects), key=os.fsencode)
    if not shards:
        raise NoMatch(f"{prefix!r} holds no shard, such as x.tar or x.tar.gz")
    return dict.fromkeys(shards, stat.S_IFREG)


def is_shard_name(name: str) -> bool:
    """Return True for the name of a shard, by its suffix; not for a hidden one."""
    return name.endswith(SHARD_SUFFIXES) and "/" not in name and not name.startswith(".")


def path_of_url(text: str) -> str:
    """Return the path of the shard at a URL. Raises SpecError."""
    return _path_of(_parse(text))


def without_secrets(spec: str) -> str:
    """Return a spec, valid or not, for messages: without secrets of URLs and arguments of commands."""
    return "::".join(map(_without_secrets, parts(spec)))


def parts(spec: str) -> list[str]:
    """Split a spec at `::`."""
    return _SEPARATOR.split(spec)


def _without_secrets(part: str) -> str:
    if is_command(part):
        return urls.PIPE + urls.first_word(part.removeprefix(urls.PIPE)) + " ..."
    scheme, separator, rest = part.partition("://")
    if not separator:
        return part
    address, query, _ = rest.partition("?")
    host, slash, path = address.partition("/")
    return scheme + separator + host.rpartition("@")[2] + slash + path + ("?..." if query else "")


def _path_of(url: Url) -> str:
    return os.fsdecode(DOOR.remote.path_of(url))


def _list_prefix(prefix: Url, *, deep: bool = False) -> Listing:
    """Return the objects and folders whose key starts with that of `prefix`. Raises ShardError."""
    try:
        listing = DOOR.remote.list_objects(prefix, deep=deep)
    except Unreachable as error:
        raise (error if prefix.scheme in WEB else not_listed(error)) from None
    # The index looks for portable indexes beside the shards among the objects that have a pin.
    _pinned_paths(listed for listed in listing.objects if listed[0].key.endswith(INDEX_SUFFIX))
    return listing


def _pinned_paths(objects: Iterable[tuple[Url, Pin]]) -> list[str]:
    """Note the pins of these objects; return their paths."""
    return [os.fsdecode(DOOR.remote.note_pin(url, pin)) for url, pin in objects]


def not_listed(error: Unreachable) -> Unreachable:
    """Return the error of a store that cannot list the shards now, with the way out."""
    return Unreachable(
        f"{error}; names with braces (x-{{000..099}}.tar) need no list: so the cache serves offline"
    )


def _fits(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    """Return True if the parts of a key match those of a pattern.

    All places of the pattern where a match can be are followed at once: one by one they would be exponentially
    many for many `**`, and the pattern may come from another user's list.
    """
    places = _places_after_stars({0}, patterns)
    for part in parts:
        following = set()
        for place in places - {len(patterns)}:
            pattern = patterns[place]
            if part.startswith(".") and not pattern.startswith("."):
                continue
            if pattern == "**":
                following.add(place)
            elif fnmatchcase(part, pattern):
                following.add(place + 1)
        places = _places_after_stars(following, patterns)
    return len(patterns) in places


def _places_after_stars(places: set[int], patterns: Sequence[str]) -> set[int]:
    """Return these places, and those after each `**`, which may match no part at all."""
    reached = set(places)
    for place, pattern in enumerate(patterns):
        if pattern == "**" and place in reached:
            reached.add(place + 1)
    return reached


def modes(paths: Sequence[str], refused: dict[str, ShardError] | None = None) -> dict[str, int | None]:
    """Return the mode of each path: of a regular file, of a directory for a final slash, None if there is nothing.

    Where a store refuses to say, the path is noted in `refused`, and its mode is None. Raises ShardError without
    it.
    """
    known: dict[str, int | None] = {path: stat.S_IFDIR for path in paths if path.endswith("/")}
    unlisted: list[str] = []
    for listed, siblings in _listings(path for path in paths if path not in known):
        there = listed or ()
        known.update(dict.fromkeys(there, stat.S_IFREG))
        unlisted += [path for path in siblings if path not in there]
    for path, answer in zip(
        unlisted, DOOR.remote.stat(list(map(os.fsencode, unlisted))) if unlisted else (), strict=True
    ):
        known[path] = stat.S_IFREG if isinstance(answer, Pin) else None
        if isinstance(answer, ShardError) and not isinstance(answer, MissingObject):
            if refused is None:
                raise answer
            refused[path] = answer
    return known


def stores_of(paths: Iterable[bytes]) -> list[str]:
    """Return the stores of the remote paths, each once, in order."""
    # By an example of each directory: a set has many shards in few directories.
    examples = {path.rpartition(b"/")[0]: path for path in paths if is_remote(path)}
    return list(dict.fromkeys(urls.store_of(os.fsdecode(path)) for path in examples.values()))


def ask_again(paths: Sequence[str], start: int) -> int:
    """Ask the stores for the present state of these paths, so that their pins are right.

    Of the paths that no listing shows, which may be gone, only ASKED_AGAIN from number `start` on are asked for;
    returns where to start next time. Raises ShardError.
    """
    unlisted = [path for listed, siblings in _listings(paths) for path in siblings if path not in (listed or ())]
    start = start if start < len(unlisted) else 0
    DOOR.remote.stat([os.fsencode(path) for path in unlisted[start : start + ASKED_AGAIN]])
    return start + ASKED_AGAIN


def gone(paths: Sequence[bytes]) -> list[bytes]:
    """Return the remote shards that their stores report as missing now."""
    if not paths:
        return []
    unlisted: list[str] = []
    unknown: list[str] = []
    for listed, siblings in _listings(map(os.fsdecode, paths)):
        if listed is None:
            unknown += siblings
        else:
            unlisted += [path for path in siblings if path not in listed]
    answers = DOOR.remote.stat(list(map(os.fsencode, unknown)))
    missing = [path for path, answer in zip(unknown, answers, strict=True) if isinstance(answer, MissingObject)]
    return list(map(os.fsencode, unlisted + missing))


def _listings(paths: Iterable[str]) -> list[tuple[set[str] | None, list[str]]]:
    """Return these paths in groups of one parent, each with the names that a listing of the parent shows.

    No listing (None) is made for few paths, and where the store does not list.
    """
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for path in paths:
        groups[path.rpartition("/")[0] + "/"].append(path)
    return [
        (_listed_among(parent, inside) if len(inside) >= LISTING_PAYS else None, inside)
        for parent, inside in groups.items()
    ]


def _listed_among(parent: str, paths: Sequence[str]) -> set[str] | None:
    """Return those of these paths that a listing of their parent shows; None where a store does not list."""
    if is_command(parent):
        return None
    url = DOOR.remote.url_of(os.fsencode(parent))
    if url.scheme in WEB:
        return None
    try:
        known = set(paths)
        return set(_pinned_paths(listed for listed in _list_prefix(url).objects if listed[0].shown in known))
    except ShardError:  # a store may forbid listing, but not reading: each object is asked for
        return None
