"""The command `cache`: what the cache holds, and removing it."""

from __future__ import annotations

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
    from wdsfs.storage.cache_directory import CacheEntry
    from wdsfs.storage.file_cache import FileCache

_TO_LIMIT = "limit"  # the value of --trim without one
_GROUPS = {"remote": "remote shards", "unpacked": "unpacked shards", "images": "images", "labels": "label tables"}
_GROUP_OF = {"table": "remote", "data": "remote", "erofs": "images", "labels": "labels"}  # by kind


@click.command()
@click.argument("urls", metavar="[URL...]", nargs=-1)
@click.option("-l", "--long", "each", is_flag=True, help="A line for each object, not for each directory.")
@click.option(
    "--trim",
    metavar="[SIZE]",
    is_flag=False,
    flag_value=_TO_LIMIT,
    help="Evict what was used the longest time ago; keep SIZE, or as much as the cache may have now.",
)
@click.option(
    "--clear",
    is_flag=True,
    help="Remove everything, or the shards that the URLs select. What mounts have open stays.",
)
@click.option("--verify", is_flag=True, help="Read all cached bytes of remote shards; drop damaged ones.")
@click.option(
    "--index-dir",
    type=Directory(),
    envvar="WDSFS_INDEX_DIR",
    help="The cache is beside this index.  [env WDSFS_INDEX_DIR; WDSFS_CACHE_DIR names another place]",
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
    """Show which remote shards are in the cache, and how much unpacked ones, images of `mount --engine kernel` and
    label tables take; or remove them.

    A URL selects the shards whose URL begins with it. Mounts may go on: they fetch or make again what they need.

    \b
    Examples:
      wdsfs cache s3://bucket/train/
      wdsfs cache --trim
      wdsfs cache --trim 100G
      wdsfs cache --clear s3://bucket/old-
    """
    from wdsfs.remote import object_cache
    from wdsfs.storage import file_cache
    from wdsfs.storage.cache_room import parse_size

    if (trim is not None) + clear + verify > 1:
        raise UsageError("--trim, --clear and --verify exclude each other")
    if trim is not None and urls:
        raise UsageError("--trim takes no URL: it removes what was used the longest time ago")
    set_for_all("WDSFS_INDEX_DIR", index_dir)
    prefixes = [_prefix(url) for url in urls] or [""]
    objects, files = object_cache.cache(), file_cache.cache()
    try:
        if trim is not None:
            _report_freed(files.trim(None if trim == _TO_LIMIT else parse_size(trim)), as_json)
        elif clear and not urls:
            _report_freed(files.clear(), as_json)
        elif clear:
            freed = sum(entry.files.bytes for prefix in prefixes for entry in objects.clear(prefix))
            _report_freed(freed, as_json)
        elif verify:
            _verify(objects, prefixes, as_json)
        else:
            shards = {entry.files.key: entry for prefix in prefixes for entry in objects.usage(prefix)}
            report = _report(files, [*shards.values()], bool(urls))
            if as_json:
                write_json(report)
            else:
                _show(report, [*shards.values()], each)
    except OSError as error:
        if error.filename is None:  # of the output
            raise
        raise IndexUnusable(f"the cache cannot be used: {error.filename}: {error.strerror}") from None


def _prefix(url: str) -> str:
    """Return how the URLs that begin with this are shown: without what may be a secret. Raises UsageError."""
    from wdsfs.remote.urls import is_url, parse

    if not is_url(url):
        raise UsageError(f"{url} is no URL: only remote shards can be selected")
    return parse(url).shown


def _report_freed(freed: int, as_json: bool) -> None:
    if as_json:
        write_json({"freed": freed})
    else:
        say(f"{bytes_text(freed)} freed")


def _verify(objects: ObjectCache, prefixes: Sequence[str], as_json: bool) -> None:
    damaged = {entry.shown: size for prefix in prefixes for entry, size in objects.verify(prefix) if size}
    if as_json:
        write_json({"damaged": damaged})
        return
    for url, size in damaged.items():
        say(f"{url}: {bytes_text(size)} were damaged; they are fetched again when they are read")
    if not damaged:
        say("no damage")


# --- showing -----------------------------------------------------------------------------------------------


def _report(files: FileCache, shards: Sequence[CachedEntry], is_part: bool) -> dict[str, Any]:
    groups: dict[str, list[CacheEntry]] = {name: [] for name in _GROUPS}
    for entry in [shard.files for shard in shards] if is_part else files.entries():
        groups[_GROUP_OF.get(entry.kind, "unpacked")].append(entry)
    report: dict[str, Any] = {name: _content(files, entries) for name, entries in groups.items()}
    report["remote"]["objects"] = [_object(shard) for shard in shards]
    return {"directory": str(files.directory), "limit": files.limit, **report}


def _content(files: FileCache, entries: Sequence[CacheEntry]) -> dict[str, Any]:
    return {
        "files": len(entries),
        "bytes": sum(entry.bytes for entry in entries),
        "held_bytes": sum(entry.bytes for entry in entries if files.is_held(entry)),
        "last_used": max((entry.used for entry in entries), default=None),
    }


def _object(shard: CachedEntry) -> dict[str, Any]:
    return {
        "url": shard.shown,
        "etag": shard.pin.etag,
        "version": shard.pin.version,
        "size": shard.pin.size,
        "bytes": shard.bytes,
        "complete": shard.complete,
        "disk_bytes": shard.files.bytes,
        "last_used": shard.used,
    }


def _show(report: dict[str, Any], shards: Sequence[CachedEntry], each: bool) -> None:
    if shards:
        table = table_of("remote shards", *([] if each else ["shards"]), "complete", "bytes", "of", "last used")
        for row in _rows_of_objects(shards) if each else _rows_of_directories(shards):
            table.add_row(*row)
        print_table(table)
    contents = {words: report[name] for name, words in _GROUPS.items() if report[name]["files"]}
    for words, content in contents.items():
        holding = (
            f"; the kernel's mounts hold {bytes_text(content['held_bytes'])}" if content["held_bytes"] else ""
        )
        say(f"{words}: {bytes_text(content['bytes'])}, last used {_when(content['last_used'])}{holding}")
    size = sum(content["bytes"] for content in contents.values())
    limit = "half of what is free" if report["limit"] is None else bytes_text(report["limit"])
    say(f"in all: {bytes_text(size)} in {report['directory']} (limit: {limit})")


def _rows_of_objects(shards: Iterable[CachedEntry]) -> list[list[str]]:
    return [
        [
            shown(shard.shown),
            "yes" if shard.complete else "no",
            bytes_text(shard.bytes),
            bytes_text(shard.pin.size),
            _when(shard.used),
        ]
        for shard in sorted(shards)
    ]


def _rows_of_directories(shards: Iterable[CachedEntry]) -> list[list[str]]:
    groups: dict[str, list[CachedEntry]] = {}
    for shard in sorted(shards):
        groups.setdefault(shard.shown.rpartition("/")[0] + "/", []).append(shard)
    return [
        [
            shown(directory),
            f"{len(group):,}",
            f"{sum(shard.complete for shard in group):,}",
            bytes_text(sum(shard.bytes for shard in group)),
            bytes_text(sum(shard.pin.size for shard in group)),
            _when(max(shard.used for shard in group)),
        ]
        for directory, group in groups.items()
    ]


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
