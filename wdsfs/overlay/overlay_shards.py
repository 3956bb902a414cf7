"""Checks that an overlay fits a set: its own shards, in the same view, and not what its commits wrote elsewhere.

An overlay may be used over the set that overlay.json names, shown in the same way. It may not be used over shards
that outputs.json names: these have its changes already, which would be made a second time.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import shlex
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from wdsfs import trust
from wdsfs.door.shard_door import DOOR
from wdsfs.door.urls import is_remote
from wdsfs.durable import write_whole
from wdsfs.errors import MALFORMED, OverlayUnusable, ShardError, several
from wdsfs.formats import Format, OtherVersion
from wdsfs.names import PLAIN, Reading
from wdsfs.overlay.overlay_directory import OverlayDirectory, OverlaySettings, ShardSeen, read_settings, unfinished
from wdsfs.overlay.upper_directory import load_upper
from wdsfs.overlay.upper_format import DIRECTORY
from wdsfs.shards import GONE, Shard, numbered_at
from wdsfs.tree.tree import View

log = logging.getLogger(__name__)

OUTPUTS = Format("a list of outputs", (2,), "use the wdsfs that wrote it; nothing was changed")  # outputs.json
SAMPLE_BYTES = 64 << 10  # of a written shard, by which it is recognised; half of them before the first change
SHARDS_NAMED_MAX = 5  # changed shards that a warning names


# --- the shards that it was made over


def check_set(place: OverlayDirectory, shards: Sequence[Shard], view: View) -> OverlaySettings:
    """Return the settings of an overlay over these shards in this view.

    Warns about shards that have changed since: changes belong to paths, so all of them still apply. While a commit
    in place is unfinished, shards may have been changed by that commit. Raises OverlayUnusable if the overlay does
    not belong to these shards.
    """
    is_halfway = unfinished(place)
    seen = tuple(_seen(shard) for shard in shards)
    settings = OverlaySettings(view.layout, view.names, view.merged, seen, shards[0].reading if shards else PLAIN)
    before = read_settings(place)
    if not is_halfway:
        untouched = frozenset(() if before is None else (shard.fingerprint for shard in before.shards))
        refuse_outputs(place, [shard.path for shard in seen if shard.fingerprint not in untouched])
    if before is not None:
        check_view(place, before, settings)
        changed = _changed(place, before, settings)
        if changed and not is_halfway:
            log.warning(
                "shards have changed since the overlay %s was made: %s; the changes still apply, by path: see "
                "them with `wdsfs diff`",
                *(place.path, several(changed, SHARDS_NAMED_MAX)),
            )
    return settings


def _seen(shard: Shard) -> ShardSeen:
    try:
        return ShardSeen(shard.name, shard.path, DOOR.look(shard.path))
    except ShardError:
        return ShardSeen(shard.name, shard.path, GONE)


def check_view(place: OverlayDirectory, before: OverlaySettings, now: OverlaySettings) -> None:
    """Raise OverlayUnusable when the overlay was made over another view: its paths mean nothing in this one."""
    if replace(before, shards=()) == replace(now, shards=()):
        return
    flags = ["--merge"] * now.merge + now.reading.arguments
    more = [option for option in flags if option not in before.options]
    raise OverlayUnusable(
        f"the overlay {place.path} was made with {' '.join(before.options)}, and its paths are of that tree; use "
        f"it with the same options{' and without ' + ' '.join(more) if more else ''}, or commit it first"
    )


# --- the way in which the shards are read


def judge_reading(place: OverlayDirectory, settings: OverlaySettings) -> None:
    """Refuse (OverlayUnusable) to edit shards that are read with options: no commit could write the changes.

    Semantics decision: an overlay with changes, which an earlier release made over such shards, is served all the
    same, with a warning: what a user has saved stays readable, and the mount is the way to save it elsewhere.
    """
    if settings.reading.is_plain:
        return
    if _has_changes(place):
        log.warning("%s", uncommitted_text(place, settings))
    else:
        refuse_reading(settings.reading)


def refuse_reading(reading: Reading) -> None:
    """Raise OverlayUnusable for a new overlay over shards that are read with options."""
    if not reading.is_plain:
        options = " ".join(reading.arguments)
        raise OverlayUnusable(
            f"shards that are read with {options} cannot be edited: other tools would not find these samples in "
            "them. Make new shards first, and mount those with --overlay and a new directory: wdsfs pack "
            f"--keep-shards {options} -o 'new/%06d.tar' SHARDS"
        )


def uncommitted_text(place: OverlayDirectory, settings: OverlaySettings, mountpoint: str = "MOUNTPOINT") -> str:
    """Return why changes of shards that are read with options are not committed, and how to save them."""
    top = shlex.quote(mountpoint) + ("" if settings.merge else "/*")
    return (
        f"the changes of the overlay {place.path} cannot be committed, because its shards are read with "
        f"{' '.join(settings.reading.arguments)}. Save what its mount shows, with the changes (one "
        f"directory of the mount at a time, if shards have keys in common), as new shards: "
        f"wdsfs pack --layout {settings.layout} {top} -o 'new/%06d.tar'"
    )


def _changed(place: OverlayDirectory, before: OverlaySettings, now: OverlaySettings) -> list[str]:
    """Return the shards that have changed since the overlay was made.

    Raises OverlayUnusable when a shard is not in the set: its changes would look like new files.
    """
    fingerprints = {shard.name: shard.fingerprint for shard in now.shards}
    missing = [os.fsdecode(shard.name) for shard in before.shards if shard.name not in fingerprints]
    if missing:
        raise OverlayUnusable(
            f"{place.path} is an overlay of a set that has {several(missing, SHARDS_NAMED_MAX)}, too: name the "
            "same SHARDS"
        )
    # A shard that cannot be read now is reported when it is used.
    return [
        os.fsdecode(shard.name)
        for shard in before.shards
        if fingerprints[shard.name] not in (shard.fingerprint, GONE)
        and numbered_at(shard.path) != shard.fingerprint
    ]


# --- the shards that were written from it


class Written(NamedTuple):
    """A shard that a commit to elsewhere wrote from the changes of an overlay, and the --output that named it.

    `sample` is that of `distinct_sample`; None while the commit is at work, and where there is none. An object in
    a store has an ETag instead, and its path is its URL. Sizes are in bytes.
    """

    path: bytes
    size: int
    output: str
    sample: tuple[int, int] | None = None
    etag: str = ""


def distinct_sample(path: bytes, change: int, sources: Iterable[bytes]) -> tuple[int, int] | None:
    """Return a sample of a written shard that no source of its size has: its offset (bytes), and its CRC-32.

    `change` is the first byte that may differ from a source; the sample begins before it, since there are only
    zeros after the last sample of a shard. None if the shard equals a source. Raises OSErrors.
    """
    size = os.path.getsize(path)
    rivals = [
        source
        for source in sources
        if not is_remote(source) and os.path.exists(source) and os.path.getsize(source) == size
    ]
    differences = (_first_difference(path, rival) for rival in rivals)
    for offset in itertools.chain([max(change - SAMPLE_BYTES // 2, 0)], differences):
        checksum = _checksum(path, offset)
        if all(_checksum(rival, offset) != checksum for rival in rivals):
            return offset, checksum
    return None


def _first_difference(path: bytes, other: bytes) -> int:
    """Return the offset of a sample in which two files of one size differ, or their size."""
    with open(path, "rb") as file, open(other, "rb") as another:
        at = 0
        while (piece := file.read(SAMPLE_BYTES)) and piece == another.read(SAMPLE_BYTES):
            at += len(piece)
    return at


def _checksum(path: bytes, offset: int) -> int:
    with open(path, "rb") as file:
        return zlib.crc32(os.pread(file.fileno(), SAMPLE_BYTES, offset))


def read_outputs(place: OverlayDirectory) -> list[Written]:
    """Return the content of outputs.json; empty if there is none. Raises OverlayUnusable."""
    try:
        with os.fdopen(trust.open_file(place.outputs, os.O_RDONLY), "rb") as file:
            content = json.load(file)
        OUTPUTS.check(content["version"])
        return [
            Written(
                os.fsencode(row["path"]),
                int(row["size"]),
                str(row["output"]),
                (int(row["sample"][0]), int(row["sample"][1])) if row["sample"] else None,
                str(row["etag"]),
            )
            for row in content["shards"]
        ]
    except FileNotFoundError:
        return []
    except trust.Untrusted as error:
        raise OverlayUnusable(error.strerror) from None
    except OtherVersion as error:
        raise OverlayUnusable(f"{place.outputs} {error}") from None
    except (OSError, *MALFORMED) as error:
        text = f"{place.outputs} cannot be used: {error}; remove it: it only lists the shards that were written"
        raise OverlayUnusable(f"{text} from the overlay") from None


def add_outputs(place: OverlayDirectory, written: Sequence[Written]) -> None:
    """Note these shards in outputs.json, in the place of earlier notes about the same paths. Raises OSErrors."""
    shards = {shard.path: shard for shard in (*read_outputs(place), *written)}
    rows = [{**shard._asdict(), "path": os.fsdecode(shard.path)} for shard in shards.values()]
    content = json.dumps({"version": OUTPUTS.version, "shards": rows}, indent=1).encode() + b"\n"
    write_whole(os.fsencode(place.outputs), content, 0o644)


def refuse_outputs(place: OverlayDirectory, shards: Sequence[bytes]) -> None:
    """Refuse (OverlayUnusable) to use the overlay over shards (paths) that were written from it.

    A file is recognised by its size and a sample, also if it was moved or copied; an object by size and ETag.
    Semantics decision: a file without a sample of its own (it equals its source, or has no samples) is recognised
    at its path only: an untouched shard must never lock the overlay out of its own set.

    An overlay without changes may be used over its outputs. From then on it is an overlay of these shards, so its
    outputs.json is removed. Raises OSErrors of the upper, too.
    """
    written: defaultdict[int, list[Written]] = defaultdict(list)
    for output in read_outputs(place):
        written[output.size].append(output)
    again = [os.fsdecode(shard) for shard in shards if written and _is_written(shard, written)]
    if again and not _has_changes(place):
        place.outputs.unlink(missing_ok=True)
    elif again:
        verb = "was" if len(again) == 1 else "were"
        raise OverlayUnusable(
            f"{several(again)} {verb} written by a commit of the overlay {place.path} (see {place.outputs}): its "
            "changes would be packed a second time. Begin with a new directory for --overlay, or name the shards "
            "that this one was made over"
        )


def _is_written(shard: bytes, written: Mapping[int, Sequence[Written]]) -> bool:
    """Return True if a shard (path) is one of these outputs, which are given by their sizes.

    False if the shard cannot be read: its use will report that.
    """
    try:
        if is_remote(shard):
            pin = DOOR.remote.pin_of(shard)
            # An ETag that is a sum of the content is also that of a copy.
            return any(
                output.etag == pin.etag if output.etag else output.path == shard
                for output in written.get(pin.size, ())
                if is_remote(output.path)
            )
        path = os.path.realpath(shard)
        outputs = [output for output in written.get(os.path.getsize(path), ()) if not is_remote(output.path)]
        return any(_is_output(path, output) for output in outputs)
    except (OSError, OverflowError, ShardError):  # OverflowError: an offset that no file has
        return False


def _is_output(path: bytes, output: Written) -> bool:
    if output.sample is None:
        return output.path == path
    # Sizes of tars are often the same: another shard may have come into its place.
    offset, checksum = output.sample
    blank = zlib.crc32(bytes(max(min(SAMPLE_BYTES, output.size - offset), 0)))
    return _checksum(path, offset) == checksum and (checksum != blank or output.path == path)


def _has_changes(place: OverlayDirectory) -> bool:
    """Return True if the upper has more than the plain directories that a restored file leaves."""
    nodes = (node for _, _, node in load_upper(place).walk())
    return any(node.kind != DIRECTORY or node.opaque or node.origin is not None for node in nodes)
