"""Names of new shards, and checks of the places where they are written.

Names come from the pattern of --output, or continue the numbers of the set.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from wdsfs import trust
from wdsfs.errors import CommitError, UsageError
from wdsfs.names import suffix_of
from wdsfs.remote import urls
from wdsfs.remote.shard_paths import is_remote
from wdsfs.spec import braces

if TYPE_CHECKING:
    from wdsfs.packing.plan import Plan


_NUMBER = re.compile(r"%0?\d{0,2}d")


def namer(pattern: str | None) -> Callable[[int], bytes]:
    """Return a function from a number, from 0 on, to the absolute path of that new shard. Raises UsageError."""
    if pattern is None:
        raise UsageError("--output is missing: it names the new shards, for example 'out/train-%06d.tar'")
    if braces.are_in(pattern):
        if "%" in pattern:
            raise UsageError(f"--output {pattern}: write the numbers like %06d or in braces, not both")
        return _listed(pattern, list(braces.expand(pattern)))
    if "%" not in pattern:
        return _listed(pattern, [pattern])
    if len(_NUMBER.findall(pattern)) != 1 or "%" in _NUMBER.sub("", pattern):
        raise UsageError(f"--output {pattern}: a number is written like %06d, and once")
    return lambda number: _absolute(pattern % number)


def refuse_compressed_name(target: bytes) -> None:
    """Raise UsageError for a name under which readers would unpack the shard."""
    suffix = suffix_of(target.lower())
    if suffix not in (b"", b".tar"):
        text = f"shards are written as plain tars, and under a name in {suffix.decode()} readers would unpack them"
        raise UsageError(f"--output: {os.fsdecode(target)}: {text}; name them .tar and compress them afterwards")


def _listed(pattern: str, names: list[str]) -> Callable[[int], bytes]:
    def name(number: int) -> bytes:
        if number >= len(names):
            many = "1 shard" if len(names) == 1 else f"{len(names)} shards"
            raise UsageError(f"--output {pattern} names {many}, and there are more to be written")
        return _absolute(names[number])

    return name


def _absolute(name: str) -> bytes:
    if urls.is_url(name):
        return _object(name)
    if os.path.basename(name) in ("", ".", ".."):
        example = shlex.quote(os.path.join(name, "train-%06d.tar"))
        raise UsageError(f"--output {name} is a directory: name the shards in it, for example {example}")
    return os.fsencode(os.path.abspath(name))


def _object(name: str) -> bytes:
    """Return the path of an object. Raises UsageError for places that objects cannot be written to."""
    url = urls.parse(name)
    if url.scheme not in urls.BUCKETS:
        places = ", ".join(f"{scheme}://" for scheme in sorted(urls.BUCKETS))
        raise UsageError(f"--output {url}: new shards go to files and to {places}, not to {url.scheme}://")
    if not url.key or url.key.endswith("/"):
        example = shlex.quote(f"{url.store}/{url.key}train-%06d.tar")
        raise UsageError(f"--output {url} is no object: name the shards in it, for example {example}")
    return os.fsencode(url.shown)


def canonical(path: bytes) -> bytes:
    """Return the path of a shard without symbolic links; that of an object as it is."""
    return path if is_remote(path) else os.path.realpath(path)


def continued(path: bytes) -> Iterator[bytes]:
    """Yield the names after this one: its last number counts up. Raises UsageError if it has none."""
    parts = re.fullmatch(rb"(.*?)(\d+)([^\d/]*)", path, re.DOTALL)
    if parts is None or b"/" in parts[3]:
        text = f"{os.fsdecode(path)} has no number to go on from: give --output for the new shards"
        raise UsageError(text)
    for number in itertools.count(int(parts[2]) + 1):
        yield parts[1] + b"%0*d" % (len(parts[2]), number) + parts[3]


class Targets:
    """The names of new shards, of which none is taken twice, or by one of `sources`; `way_out` says what helps."""

    def __init__(self, sources: Iterable[bytes] = (), way_out: str = "choose another --output") -> None:
        self._sources, self._targets = set(map(canonical, sources)), set[bytes]()
        self._way_out = way_out

    def add(self, target: bytes, is_tar: bool = False) -> None:
        """Note a name. `is_tar`: readers take what has it for a tar already. Raises CommitError, UsageError."""
        place = canonical(target)
        if place in self._targets:
            raise CommitError(f"{os.fsdecode(place)} would be written twice")
        if not is_tar:
            refuse_compressed_name(place)
        if place in self._sources:
            raise CommitError(f"{os.fsdecode(place)} is one of the shards: {self._way_out}")
        self._targets.add(place)


def refuse_below(plan: Plan, directory: str, what: str) -> None:
    """Raise UsageError for a new shard that would be in this directory, which is `what`."""
    top = os.path.realpath(os.fsencode(directory))
    replaced = {canonical(source.path) for source in plan.sources.values()}
    for target in (canonical(step.target) for step in plan.steps if not step.is_remote):
        if target not in replaced and os.path.commonpath([top, target]) == top:
            text = f"{os.fsdecode(target)} would be in {what}: name another directory with --output"
            raise UsageError(text)


def refuse_foreign_link(path: bytes) -> None:
    """Raise CommitError for a shard that is reached by a link that other users can have made or changed.

    Replacing its target would mean to write where they want, with the rights of this user.
    """
    place = canonical(path)
    if place == path or place == os.path.abspath(path) or trust.holds(path):
        return
    raise CommitError(
        f"{os.fsdecode(path)} is not replaced: a link leads from there to {os.fsdecode(place)}, and others can "
        "have made it; if it is right, name that file instead, or those who made the link with --trust"
    )
