"""The command `cache`: what the caches of remote and of unpacked shards and of images hold, and removing it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from wdsfs.cli.options import Directory, json_option, set_for_all, trust_option
from wdsfs.cli.output import print_table, say, table_of, write_json
from wdsfs.errors import IndexUnusable, UsageError, bytes_text
from wdsfs.names import shown

if TYPE_CHECKING:
    from wdsfs.remote.object_cache import CachedEntry, ObjectCache
    from wdsfs.storage.unpack_cache import UnpackCache


_TO_LIMIT = "limit"  # the value of --trim without one


@click.command()
@click.argument("urls", metavar="[URL...]", nargs=-1)
@click.option("-l", "--long", "each", is_flag=True, help="A line for each object, not for each directory.")
@click.option(
    "--trim",
    metavar="[SIZE]",
    is_flag=False,
    flag_value=_TO_LIMIT,
    help="Evict what was used the longest time ago; keep SIZE of each cache, or as much as it may have now. Of "
    "images without SIZE those whose shards are gone or have changed.",
)
@click.option(
    "--clear",
    is_flag=True,
    help="Remove everything, or the shards that the URLs select. What the kernel's mounts read stays.",
)
@click.option("--verify", is_flag=True, help="Read all cached bytes of remote shards; drop damaged ones.")
@click.option(
    "--index-dir",
    type=Directory(),
    envvar="WDSFS_INDEX_DIR",
    help="The caches are beside this index.  [env WDSFS_INDEX_DIR; WDSFS_CACHE_DIR names another place]",
)
@json_option
@trust_option
def cache(
    urls: tuple[str, ...],
    each: bool,
    trim: str | None,
    clear: bool,
    verify: bool,
    index_dir: str | None,
    as_json: bool,
) -> None:
    """Show which remote shards are in the cache, how much the unpacked ones take, and the images of
    `mount --engine kernel`; or remove them.

    A URL selects the shards whose URL begins with it. Mounts may go on: they fetch again what they need.

    \b
    Examples:
      wdsfs cache s3://bucket/train/
      wdsfs cache --trim
      wdsfs cache --trim 100G
      wdsfs cache --clear s3://bucket/old-
    """
    from wdsfs.kernel import kept_images
    from wdsfs.remote import object_cache
    from wdsfs.storage import unpack_cache
    from wdsfs.storage.cache_place import parse_size

    if (trim is not None) + clear + verify > 1:
        raise UsageError("--trim, --clear and --verify exclude each other")
    if trim is not None and urls:
        raise UsageError("--trim takes no URL: it removes what was used the longest time ago")
    set_for_all("WDSFS_INDEX_DIR", index_dir)
    prefixes = [_prefix(url) for url in urls] or [""]
    remote, unpacked = object_cache.cache(), unpack_cache.cache()
    try:
        if trim is not None:
            size = None if trim == _TO_LIMIT else parse_size(trim)
            _report_freed(remote.trim(size) + unpacked.trim(size) + kept_images.trim(size, _mounted()), as_json)
        elif clear:
            freed = sum(one.disk for prefix in prefixes for one in remote.clear(prefix))
            _report_freed(freed + (0 if urls else unpacked.trim(0) + kept_images.trim(0, _mounted())), as_json)
        elif verify:
            _verify(remote, prefixes, as_json)
        else:
            found = {one.key: one for prefix in prefixes for one in remote.usage(prefix)}
            _show(remote, [*found.values()], None if urls else unpacked, each, as_json)
    except OSError as error:
        if error.filename is None:  # of the output
            raise
        raise IndexUnusable(f"the cache cannot be used: {error.filename}: {error.strerror}") from None


def _prefix(url: str) -> str:
    """How the URLs that begin with this are shown: without what may be a secret. Raises UsageError."""
    from wdsfs.remote.urls import is_url, parse

    if not is_url(url):
        raise UsageError(f"{url} is no URL: only remote shards can be selected")
    return parse(url).shown


def _mounted() -> dict[str, list[str]]:
    """The images that are mounted, with their mount points."""
    from wdsfs.kernel.manifest import mounted_images
    from wdsfs.mount.guard import living_guards

    found: dict[str, list[str]] = {}
    for one in mounted_images():
        found.setdefault(os.fsdecode(one.image), []).append(os.fsdecode(one.mount.path))
    for guard in living_guards():  # also of mounts in another namespace, or that are still in use
        places = found.setdefault(guard.image, [])
        if guard.mountpoint not in places:
            places.append(guard.mountpoint)
    return found


def _report_freed(freed: int, as_json: bool) -> None:
    if as_json:
        write_json({"freed": freed})
    else:
        say(f"{bytes_text(freed)} freed")


def _verify(remote: ObjectCache, prefixes: Sequence[str], as_json: bool) -> None:
    damaged = {one.shown: dropped for prefix in prefixes for one, dropped in remote.verify(prefix) if dropped}
    if as_json:
        write_json({"damaged": damaged})
        return
    for url, dropped in damaged.items():
        say(f"{url}: {bytes_text(dropped)} were damaged; they are fetched again when they are read")
    if not damaged:
        say("no damage")


# --- showing -----------------------------------------------------------------------------------------------


def _show(
    remote: ObjectCache, entries: Sequence[CachedEntry], unpacked: UnpackCache | None, each: bool, as_json: bool
) -> None:
    report = _report(remote, entries, unpacked)
    if as_json:
        write_json(report)
        return
    if entries:
        table = table_of("remote shards", *([] if each else ["shards"]), "complete", "bytes", "of", "last used")
        for row in _rows_of_objects(entries) if each else _rows_of_directories(entries):
            table.add_row(*row)
        print_table(table)
    _say_place("remote shards", report["remote"], sum(one.disk for one in entries))
    if unpacked is not None:
        _say_place("unpacked shards", report["unpacked"], report["unpacked"]["bytes"])
        _show_images(report["images"])


def _report(remote: ObjectCache, entries: Sequence[CachedEntry], unpacked: UnpackCache | None) -> dict[str, Any]:
    objects = [
        {
            "url": one.shown,
            "etag": one.pin.etag,
            "version": one.pin.version,
            "size": one.pin.size,
            "bytes": one.bytes,
            "complete": one.complete,
            "disk_bytes": one.disk,
            "last_used": one.used,
        }
        for one in entries
    ]
    held = sum(one.disk for one in entries if remote.is_held(one.key))
    report: dict[str, Any] = {
        "remote": {
            "directory": str(remote.directory),
            "limit": remote.limit,
            "held_bytes": held,
            "objects": objects,
        }
    }
    if unpacked is not None:
        files = unpacked.files()
        report["unpacked"] = {
            "directory": str(unpacked.directory),
            "limit": unpacked.limit,
            "files": len(files),
            "bytes": sum(one.size for one in files),
            "held_bytes": sum(one.size for one in unpacked.held()),
            "last_used": max((one.opened for one in files), default=None),
        }
        report["images"] = _images()
    return report


def _images() -> dict[str, Any]:
    from wdsfs.kernel import kept_images

    mounted = _mounted()
    return {
        "directory": str(kept_images.place()),
        "images": [
            {
                "path": one.path,
                "bytes": one.size,
                "shards": one.shards,
                "current": one.current,
                "mounted": mounted.get(one.path, []),
                "last_used": one.used,
            }
            for one in kept_images.images()
        ],
    }


def _show_images(report: dict[str, Any]) -> None:
    """The images of `--engine kernel`; nothing on machines that have none."""
    if not report["images"]:
        return
    table = table_of("images", "shards", "bytes", "last mounted")
    for one in report["images"]:
        state = ", ".join(one["mounted"]) or ("not mounted" if one["current"] else "not mounted, out of date")
        name = f"{os.path.basename(one['path'])}: {state}"
        table.add_row(shown(name), f"{one['shards']:,}", bytes_text(one["bytes"]), _when(one["last_used"]))
    print_table(table)
    say(f"images: {bytes_text(sum(one['bytes'] for one in report['images']))} in {report['directory']}")


def _rows_of_objects(entries: Iterable[CachedEntry]) -> list[list[str]]:
    return [
        [
            shown(one.shown),
            "yes" if one.complete else "no",
            bytes_text(one.bytes),
            bytes_text(one.pin.size),
            _when(one.used),
        ]
        for one in sorted(entries)
    ]


def _rows_of_directories(entries: Iterable[CachedEntry]) -> list[list[str]]:
    groups: dict[str, list[CachedEntry]] = {}
    for one in sorted(entries):
        groups.setdefault(one.shown.rpartition("/")[0] + "/", []).append(one)
    return [
        [
            shown(directory),
            f"{len(group):,}",
            f"{sum(one.complete for one in group):,}",
            bytes_text(sum(one.bytes for one in group)),
            bytes_text(sum(one.pin.size for one in group)),
            _when(max(one.used for one in group)),
        ]
        for directory, group in groups.items()
    ]


def _say_place(what: str, place: dict[str, Any], taken: int) -> None:
    limit = "half of what is free" if place["limit"] is None else bytes_text(place["limit"])
    held = f"; the kernel's mounts hold {bytes_text(place['held_bytes'])}" if place.get("held_bytes") else ""
    say(f"{what}: {bytes_text(taken)} in {place['directory']} (limit: {limit}{held})")


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
