"""Make words into shards that exist: directories, lists and indexes among the words are replaced by their shards.

A shard that is missing is noticed here, before anything is opened. No shard is opened and no symbolic link is
resolved.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import logging
import os
import re
import shlex
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice

from wdsfs.door import urls
from wdsfs.errors import MissingShard, NoMatch, ShardError, SpecError, UnreadableShard, reason_of, several
from wdsfs.spec import dependencies, energon_dataset, objects, portable_head
from wdsfs.spec.located import Field, load_file, load_json
from wdsfs.spec.objects import ABOUT_SHARDS, SHARD_SUFFIXES
from wdsfs.spec.spec_words import (
    MAX_SHARDS,
    NOT_READ,
    Expansion,
    Word,
    collect,
    expand_field,
    has_variables,
    is_elsewhere,
    is_special,
    listed_path,
    parent_of,
)

log = logging.getLogger(__name__)

# From this many shards in one directory on, listing it beats one stat per shard. Measured with 100,000 shards
# on ext4: 0.08 s against 0.27 s; on a network file system a stat is a round trip and a listing is not.
LISTING_PAYS = 64
# ... unless the directory holds far more names than the shards: the listing is given up at this ratio.
LISTING_RATIO = 16
WITHOUT_MISSING = "; --allow-missing goes on without such shards"
IMAGE_SUFFIX = ".erofs"
LIST_SUFFIXES = (".json", ".yaml", ".yml")  # of files that are read as lists of shards
SEARCHED_NAMES = 10_000  # names of a directory among which one with other leading zeros is looked for
_ZEROS = re.compile(r"(?<![0-9])0+(?=[0-9])")  # leading zeros of a number
SEARCHED = 32  # directories inside one without shards, for the message about it


def existing_files(
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


def present_files(words: list[Word], split: str | None, base: str | None) -> list[Word]:
    """Return words as `_existing_files`, without those of missing files. Raises MissingShard if all are missing.

    Paths that are not regular files are returned, too: the other shards can be read.
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
    *,
    special: bool = False,
) -> tuple[list[Word], list[Word]]:
    """Return all words of shards, and the missing or `refused` ones (see `objects.modes`).

    Raises if one is not a regular file, unless `special` files may be among them.
    """
    modes = _modes((word.path for word in words), refused)
    shards = collect(_shard_words(words, modes, split, base))
    if base is not None and not any(word.index_file for word in shards):
        raise SpecError(f"--base {base}: it is for an index ({portable_head.SUFFIX}): name one")
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
        is_file = mode is not None and stat.S_ISREG(mode)
        if mode is not None and stat.S_ISDIR(mode):
            dataset = energon_dataset.dataset_at(word.path)
            if dataset is not None:
                yield from energon_dataset.read_shards(dataset, split)
                continue
            inside = _contents(word.path)
            modes.update(inside)
            shards = [Word(path, word.origin) for path in inside]
        elif is_file and word.path.endswith(portable_head.SUFFIX):
            shards = _words_of_index(word.path, base, modes)
        elif is_file and word.path.endswith(LIST_SUFFIXES):
            yield from _words_of_file(word.path, split)
            continue
        elif is_file and word.path.endswith(IMAGE_SUFFIX):
            raise SpecError(f"{word.shown}: is an image over shards, which is mounted alone; name the shards")
        else:
            shards = [word]
        if split is not None and mode is not None:
            raise energon_dataset.without_splits(word.path, split)
        yield from shards


def _missing_shards(missing: list[Word], total: int, way_out: str = "") -> SpecError | MissingShard:
    """Return the error for missing shards, whose text ends with the way out."""
    if is_elsewhere(missing[0].path):
        origin = f"{missing[0].origin}: " if missing[0].origin else ""
        return SpecError(origin + NOT_READ.format(objects.without_secrets(missing[0].path)))
    listed = several([word.shown for word in missing])
    if total == 1:
        directory = objects.is_listable(missing[0].path) and not missing[0].path.endswith(SHARD_SUFFIXES)
        hint = "; if it is a directory of shards, end it with a slash" if directory else ""
        return MissingShard(
            f"no such shard: {listed}{hint or _shard_before(missing[0].path) or _other_zeros(missing[0].path)}"
        )
    hint = _other_zeros(missing[0].path) or "; check the range and the directory"
    return MissingShard(f"{len(missing):,} of {total:,} shards are missing: {listed}{hint}{way_out}")


def _refused_shards(missing: list[Word], refused: dict[str, ShardError], total: int, way_out: str) -> ShardError:
    """Return the error for shards of which stores refuse some. Its text ends with the way out."""
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


def _other_zeros(path: str) -> str:
    """Return the end of a message about a missing shard whose number has other leading zeros in the directory."""
    directory, name = os.path.split(path)
    with contextlib.suppress(OSError), os.scandir(directory or ".") as entries:
        for entry in islice(entries, SEARCHED_NAMES):
            if entry.name != name and _ZEROS.sub("", entry.name) == _ZEROS.sub("", name):
                return f"; there is {entry.name!r}: write as many leading zeros"
    return ""


# -- files that name shards -----------------------------------------------------------------------------------


def _words_of_file(path: str, split: str | None) -> Iterator[Word]:
    """Return the shards that a JSON or YAML file names. Raises SpecError, UnreadableShard."""
    directory, name = os.path.split(path)
    dataset, above = os.path.split(directory)
    if above == energon_dataset.META:
        return energon_dataset.read_shards(dataset, split, None if name in energon_dataset.INFO else path)
    top = load_file(path)
    if energon_dataset.is_metadataset(top):
        return energon_dataset.read_part_shards(top, split)
    if split is not None:
        raise energon_dataset.without_splits(path, split)
    energon_dataset.refuse_misplaced(top)
    words = _read_wids_index(top) if path.endswith(".json") else _read_yaml_spec(top)
    return _refuse_none(words, path)


def _refuse_none(words: Iterator[Word], path: str) -> Iterator[Word]:
    """Yield the words; raise SpecError if there is none."""
    first = next(words, None)
    if first is None:
        raise SpecError(f"{path}: names no shards")
    yield first
    yield from words


def _words_of_index(path: str, base: str | None, modes: dict[str, int | None]) -> list[Word]:
    """Return the shards that a portable index lists; relative ones are below `base`.

    `modes` gets those of the remote shards that the index knows well enough. Raises SpecError, ShardError.
    """
    dependencies.note_file(path)
    file = portable_head.load_index(path)
    modes.update(dict.fromkeys(file.presumed(base), stat.S_IFREG))
    return [Word(shard, file.path, index_file=file.path) for shard in file.paths(base)]


# -- files of the webdataset library: indexes of wids (`*.json`), YAML specs ------------------------------------
# Sources: `wids_specs.py` of wids 0.2.x; `shardlist.py`, `MultiShardSample.parse_spec`. docs/reference/formats.md
# has the fields.


def _read_wids_index(top: Field) -> Iterator[Word]:
    """Yield the shards of a wids index, version 1. As in wids, the `base` at the top is not used."""
    version = top.get("wids_version")
    if version is None:
        raise top.wrong("is not a list of shards: an index of wids has a 'wids_version'")
    if version.value != 1:
        raise version.wrong("only version 1 is known")
    base = parent_of(top.file)
    immediate, components = top.get("shardlist"), top.get("datasets")
    if immediate is not None:
        yield from _shardlist(immediate, base)
    if components is not None:
        for component in components.items():
            yield from _component(component, base)


def _component(component: Field, base: str) -> Iterator[Word]:
    """Yield the shards of one of the `datasets`, which may be in a file of its own."""
    source = component.get("source_url")
    if source is not None:
        if component.get("shardlist") is not None:
            raise component.wrong("has both a source_url and a shardlist: leave one out")
        component = load_json(listed_path(base, source.text(), source))
        base = parent_of(component.file)
        for further in (component.get("source_url"), component.get("datasets")):
            if further is not None and further.value:
                raise further.wrong(f"{source} refers to this file, and a reference leads one step only")
    own = component.get("base")
    if own is not None:
        base = listed_path(base, own.text(), own).rstrip("/") + "/"
    yield from _shardlist(component.need("shardlist"), base)


def _shardlist(shards: Field, base: str) -> Iterator[Word]:
    for shard in shards.items():
        url = shard.need("url")
        yield Word(listed_path(base, url.text(), url), url, shard.need("nsamples").number())


def _read_yaml_spec(top: Field) -> Iterator[Word]:
    """Yield the shards of a webdataset spec: prefix + bucket / shard, variables, `~` and braces expanded.

    Semantics decision: `choose` and `resample` are not followed. The library draws other shards in every epoch, so
    each of them can come up; a mount has no epochs and shows all of them.
    """
    top.allow(("prefix", "datasets", "buckets"))
    base = parent_of(top.file)
    prefix_field = top.get("prefix")
    prefix = _expanded(prefix_field) if prefix_field else ""
    for dataset in top.need("datasets").items():
        dataset.allow(("buckets", "name", "shards", "resample", "choose"))
        for drawn in filter(None, (dataset.get("resample"), dataset.get("choose"))):
            log.info("%s: a mount has no epochs to draw shards for; all shards are shown", drawn)
        buckets = dataset.get("buckets") or top.get("buckets")
        bucket = _bucket(buckets)
        first = next(buckets.texts(), None) if buckets else None
        for shards in dataset.need("shards").texts():
            typed = prefix_field or first or shards
            for shard in expand_field(_expanded(shards), shards):
                text = prefix + os.path.join(bucket, shard)
                _refuse_hidden_command(text, typed)
                yield Word(listed_path(base, text, shards), shards)


def _refuse_hidden_command(text: str, typed: Field) -> None:
    try:
        objects.refuse_hidden_command(text, typed.text())
    except SpecError as error:
        raise typed.wrong(str(error)) from None


def _bucket(buckets: Field | None) -> str:
    names = [] if buckets is None else [_expanded(bucket) for bucket in buckets.texts()]
    if buckets is not None and len(names) > 1:
        raise buckets.wrong("more than one bucket: the webdataset library takes one; make a dataset of each")
    return names[0] if names else ""


def _expanded(field: Field) -> str:
    text = os.path.expanduser(os.path.expandvars(field.text()))
    if text != field.text() and urls.is_url(field.file):  # a variable may be a secret, which its server would get
        raise field.wrong(f"{str(field.text())!r}: variables of this machine are not for a list at a URL")
    return text


# -- directories ----------------------------------------------------------------------------------------------


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
        hint = ": it is a mount of wdsfs, so name its shards instead" if mounted else _advice_on(directory)
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
        return f"; {pattern} names the shards in directories inside it"
    return f"; to make shards of its files: wdsfs pack {shlex.quote(directory)} -o 'set-%06d.tar'" if first else ""


def _shard_names(directory: str) -> list[str]:
    dependencies.note_directory(directory)
    try:
        listed = os.listdir(directory)
    except OSError as error:
        raise UnreadableShard(f"cannot list the directory {directory!r}: {error.strerror}") from error
    return [
        os.path.join(directory, name) for name in sorted(filter(objects.is_shard_name, listed), key=os.fsencode)
    ]


# -- is it there? ---------------------------------------------------------------------------------------------


def _modes(paths: Iterable[str], refused: dict[str, ShardError] | None = None) -> dict[str, int | None]:
    """Return the mode of each path, None if it is missing: from a listing where that is faster, else by stat.

    `refused` is as in `objects.modes`.
    """
    modes: dict[str, int | None] = dict.fromkeys(paths)
    remote = [path for path in modes if objects.is_url(path)]
    by_parent: defaultdict[str, list[str]] = defaultdict(list)
    for path in [path for path in modes if not objects.is_url(path)] if remote else modes:
        by_parent[parent_of(path)].append(path)
    for parent, siblings in by_parent.items():
        dependencies.note_directory(parent)
        listed = _listed_files(parent, siblings) if len(siblings) >= LISTING_PAYS else set()
        for path in siblings:
            modes[path] = stat.S_IFREG if path in listed else _mode(path)
    if remote:
        modes.update(objects.modes(remote, refused))
    return modes


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


# -- arguments of commands ------------------------------------------------------------------------------------


def names_a_shard(argument: str) -> bool:
    """Return True if this argument is SHARDS: at least one of the shards that it names exists."""
    if has_variables(argument) or objects.is_url(argument):
        return True  # if it is not set or not there, `expand` reports it
    try:
        words = islice(Expansion(read=False).words(argument), MAX_SHARDS)
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
        return not (is_special(argument) or argument.endswith(SHARD_SUFFIXES))
    if objects.is_url(argument) or not os.path.isdir(argument) or energon_dataset.dataset_at(argument) is not None:
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
    return energon_dataset.dataset_at(path) is not None or bool(_contents(path))
