"""The commands that prepare shards: `index`, `fetch` (whole remote shards into the cache) and `cache`.

The fetcher (`remote/fetcher.py`) requests no bytes that are in the cache, and waits for bytes that another process
is fetching.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from wdsfs.cli.opening_options import (
    cache_size_option,
    executor_option,
    index_dir_option,
    opening_options_with,
    remote_options,
    trust_option,
    workers_of,
)
from wdsfs.cli.option_kinds import Command, flag, jobs_option, json_option, offer_paths, shards_argument
from wdsfs.cli.output import OUTPUT, bytes_bar, contents_text, print_table, say, table_of, write_json
from wdsfs.cli.process import when_interrupted
from wdsfs.cli.view_options import set_options
from wdsfs.door.shard_door import DOOR
from wdsfs.door.urls import is_remote
from wdsfs.errors import CacheFull, IndexUnusable, ShardError, UsageError, bytes_text, counted, several
from wdsfs.names import shown

if TYPE_CHECKING:
    from wdsfs.cache.cache_directory import CacheEntry
    from wdsfs.cache.file_cache import FileCache
    from wdsfs.door.remote_side import CachedEntry, CachedObjects
    from wdsfs.shards import Shard
    from wdsfs.tree.set_options import Opening, Selection

JOBS = 8  # shards fetched at a time: a small shard needs one request
_TO_LIMIT = "limit"  # the value of --trim without a SIZE
_GROUPS = {"remote": "remote shards", "unpacked": "unpacked shards", "images": "images", "labels": "tables"}
_GROUP_OF = {"table": "remote", "data": "remote", "erofs": "images", "labels": "labels"}  # by kind; else unpacked


log = logging.getLogger("wdsfs")

# --- index -------------------------------------------------------------------------------------------------


@click.command(cls=Command)
@click.argument("shards", nargs=-1, shell_complete=offer_paths)
@set_options
@opening_options_with(executor=True, tolerance=False)
@click.option(
    "-o",
    "--output",
    metavar="FILE|URL",
    shell_complete=offer_paths,
    help="Also write the index to FILE.wdsidx, for other machines and places.",
)
@click.option(
    "--update",
    metavar="FILE|URL",
    shell_complete=offer_paths,
    help="Renew FILE.wdsidx: index its shards again, and add SHARDS at the end.",
)
@flag("--allow-missing", "Leave missing and unreadable shards out of FILE.wdsidx.")
@flag("--prune", "Also drop the records of removed shards.")
@json_option
def index(
    shards: tuple[str, ...],
    selection: Selection,
    opening: Opening,
    output: str | None,
    update: str | None,
    allow_missing: bool,
    prune: bool,
    as_json: bool,
) -> None:
    """Build or refresh the index of SHARDS without mounting. wdsfs reads only new and changed shards.

    \b
    Examples:
      wdsfs index --jobs 8 'train-{000000..000999}.tar'
      wdsfs index -o set.wdsidx 'train-{000000..000999}.tar'
      wdsfs index --update set.wdsidx 'train-{001000..001999}.tar'
    """
    from wdsfs.tree.opening import index_set

    since = time.monotonic()
    if output is not None and update is not None:
        raise UsageError("-o writes an index, --update renews one: leave one of them out")
    expanded = _shards(shards, update, selection._replace(allow_missing=allow_missing))
    text = "; the index keeps the shards read so far" + (", no file was written" if update or output else "")
    with when_interrupted(text):
        counts = index_set(expanded, opening, update or output, allow_missing, prune)
    report = {**counts, "seconds": round(time.monotonic() - since, 3)}
    if as_json:
        write_json(report)
    else:
        say(*_index_lines(report))
    if report["unreadable"] and not allow_missing:
        sys.exit(3)


def _shards(specs: Sequence[str], update: str | None, selection: Selection) -> list[Shard]:
    """Return the named shards; with `update`, the shards of that portable index come first."""
    from wdsfs.spec.expand import expand

    if update is None:
        return expand(specs, *selection)
    if selection.slice is not None:
        raise UsageError("--update renews a whole index: leave out --shard-id")
    listed = expand([update], *selection)
    known = {shard.path for shard in listed}
    named = expand(specs, *selection._replace(base=None)) if specs else []
    return listed + [shard for shard in named if shard.path not in known]


def _index_lines(report: Mapping[str, Any]) -> tuple[str, str]:
    written = "written" in report
    where = f"{bytes_text(report['bytes'])} in {report['written']}" if written else f"kept in {report['index']}"
    return (
        f"{contents_text(report['shards'], report['samples'], report['members'])}; "
        f"{report['rebuilt']} indexed in {report['seconds']} s",
        where,
    )


# --- cache -------------------------------------------------------------------------------------------------


@click.command(cls=Command)
@click.argument("urls", metavar="[URL...]", nargs=-1)
@click.option("-l", "--long", "each", is_flag=True, help="Show a line for each object instead of each directory.")
@click.option(
    "--trim",
    metavar="[SIZE]",
    is_flag=False,
    flag_value=_TO_LIMIT,
    help="Remove the least recently used files, down to SIZE or to the current limit.",
)
@click.option(
    "--clear",
    is_flag=True,
    help="Remove all files, or the shards that the URLs select, except files that a mount has open.",
)
@click.option("--verify", is_flag=True, help="Read all cached bytes of remote shards, and drop damaged bytes.")
@index_dir_option("Directory of the index; the cache is beside it.  [env WDSFS_INDEX_DIR, WDSFS_CACHE_DIR]")
@json_option
@trust_option
def cache(urls: tuple[str, ...], each: bool, trim: str | None, clear: bool, verify: bool, as_json: bool) -> None:
    """Show the remote shards in the cache, and the size of the other cached files; or remove them.

    The other files are unpacked shards, images of `mount --engine kernel` and tables.

    A URL selects the shards whose URL begins with it. A mount continues: it fetches or makes removed files again.

    \b
    Examples:
      wdsfs cache s3://bucket/train/
      wdsfs cache --trim
      wdsfs cache --trim 100G
      wdsfs cache --clear s3://bucket/old-
    """
    from wdsfs import wings
    from wdsfs.cache import file_cache
    from wdsfs.errors import parse_size

    if (trim is not None) + clear + verify > 1:
        raise UsageError("--trim, --clear and --verify cannot be combined")
    if trim is not None and urls:
        raise UsageError("--trim takes no URL: it removes the least recently used files")
    prefixes = [_prefix(url) for url in urls] or [""]
    files = file_cache.cache()
    try:
        if trim is not None:
            _report_freed(files.trim(None if trim == _TO_LIMIT else parse_size(trim)), as_json)
        elif clear and not urls:
            _report_freed(files.clear(), as_json)
        elif clear:
            removed = itertools.chain(*map(DOOR.remote.cached_objects().clear, prefixes))
            _report_freed(sum(entry.files.bytes for entry in removed), as_json)
        elif verify:
            _verify(DOOR.remote.cached_objects(), prefixes, as_json)
        else:
            shards = _objects(prefixes) if urls or wings.is_installed("remote") else []
            report = _cache_report(files, shards, is_part=bool(urls))
            if as_json:
                write_json(report)
            else:
                _show(report, shards, each)
    except OSError as error:
        if error.filename in (None, OUTPUT):
            raise
        raise IndexUnusable(f"the cache cannot be used: {error.filename}: {error.strerror}") from None


def _prefix(url: str) -> str:
    """Return this start of a URL as the cache shows it, without secrets. Raises UsageError."""
    from wdsfs.door.urls import is_url, parse

    if not is_url(url):
        raise UsageError(f"{url} is not a URL; name the URLs of remote shards")
    return parse(url).shown


def _objects(prefixes: Sequence[str]) -> list[CachedEntry]:
    """Return the remote shards in the cache whose URL begins with one of the prefixes."""
    usage = DOOR.remote.cached_objects().usage
    return [*{entry.files.key: entry for prefix in prefixes for entry in usage(prefix)}.values()]


def _report_freed(freed: int, as_json: bool) -> None:
    if as_json:
        write_json({"freed": freed})
    else:
        say(f"{bytes_text(freed)} freed")


def _cache_report(files: FileCache, objects: Sequence[CachedEntry], *, is_part: bool) -> dict[str, Any]:
    """Return the content of the cache: files, bytes and last use by group, and each of `objects`.

    `is_part`: report only about `objects`. Raises OSError.
    """
    from wdsfs import trust

    groups: dict[str, list[CacheEntry]] = {name: [] for name in _GROUPS}
    for entry in [shard.files for shard in objects] if is_part else files.entries():
        groups[_GROUP_OF.get(entry.kind, "unpacked")].append(entry)
    report: dict[str, Any] = {
        name: {
            "files": len(entries),
            "bytes": sum(entry.bytes for entry in entries),
            "last_used": max((entry.used for entry in entries), default=None),
        }
        for name, entries in groups.items()
    }
    report["remote"]["objects"] = [_as_json(shard) for shard in objects]
    group = files.group()
    return {
        "directory": str(files.directory),
        "group": None if group is None else trust.group_name(group),
        "limit": files.limit,
        **report,
    }


def _as_json(shard: CachedEntry) -> dict[str, Any]:
    return {
        "url": shard.shown,
        **shard.pin._asdict(),
        "bytes": shard.bytes,
        "complete": shard.complete,
        "disk_bytes": shard.files.bytes,
        "last_used": shard.used,
    }


def _verify(objects: CachedObjects, prefixes: Sequence[str], as_json: bool) -> None:
    damaged = {entry.shown: size for prefix in prefixes for entry, size in objects.verify(prefix) if size}
    if as_json:
        write_json({"damaged": damaged})
        return
    for url, size in damaged.items():
        say(f"{url}: {bytes_text(size)} were damaged and dropped; the next read fetches them again")
    if not damaged:
        say("no damage")


# --- cache: showing ----------------------------------------------------------------------------------------


def _show(report: dict[str, Any], shards: Sequence[CachedEntry], each: bool) -> None:
    if shards:
        table = table_of("remote shards", *([] if each else ["shards"]), "complete", "bytes", "of", "last used")
        for row in _shard_rows(shards, each):
            table.add_row(*row)
        print_table(table)
    contents = {words: report[name] for name, words in _GROUPS.items() if report[name]["files"]}
    for words, content in contents.items():
        say(f"{words}: {bytes_text(content['bytes'])}, last used {_when(content['last_used'])}")
    size = sum(content["bytes"] for content in contents.values())
    limit = "half of the free space" if report["limit"] is None else bytes_text(report["limit"])
    sharing = f"; shared by the group {report['group']}" if report["group"] else ""
    say(f"in all: {bytes_text(size)} in {report['directory']} (limit: {limit}{sharing})")


def _shard_rows(shards: Iterable[CachedEntry], each: bool) -> Iterator[list[str]]:
    """Yield the rows of the table: one for each object, or for each directory."""
    groups: dict[str, list[CachedEntry]] = {}
    for shard in sorted(shards):
        groups.setdefault(shard.shown if each else shard.shown.rpartition("/")[0] + "/", []).append(shard)
    for name, group in groups.items():
        complete = sum(shard.complete for shard in group)
        counts = ["yes" if complete else "no"] if each else [f"{len(group):,}", f"{complete:,}"]
        sizes = sum(shard.bytes for shard in group), sum(shard.pin.size for shard in group)
        yield [shown(name), *counts, *map(bytes_text, sizes), _when(max(shard.used for shard in group))]


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


# --- fetch ----------------------------------------------------------------------------------------------


@click.command(cls=Command)
@shards_argument
@set_options
@click.option("-q", "--quiet", is_flag=True, help="Show no progress bar and no hints.")
@jobs_option(f"Number of shards fetched at a time.  [default: {JOBS}]")
@executor_option
@index_dir_option("Directory of the index; the cache is beside it.  [env WDSFS_INDEX_DIR, WDSFS_CACHE_DIR]")
@json_option
@remote_options
@cache_size_option
@trust_option
def fetch(
    shards: tuple[str, ...],
    selection: Selection,
    quiet: bool,
    jobs: int | None,
    executor: str | None,
    as_json: bool,
) -> None:
    """Download SHARDS at URLs into the cache as a whole, so that you can read them without a network.

    You can stop the command and repeat it: wdsfs fetches only bytes that are not in the cache.

    \b
    Example:
      wdsfs fetch --cache-size 500G 's3://bucket/train-{000000..000999}.tar'
    \f

    With --executor each worker fetches into its own cache, or all into a shared cache (WDSFS_CACHE_DIR).
    """
    from wdsfs.cache import file_cache
    from wdsfs.spec.expand import expand
    from wdsfs.tree.opening import fetch_shards

    since = time.monotonic()
    every = expand(shards, *selection)
    remote_shards = [shard for shard in every if is_remote(shard.path)]
    local = len(every) - len(remote_shards)
    if local and not quiet:
        log.info("%s on this machine: nothing to fetch", counted(local, "shard"))
    workers = workers_of(executor, jobs)
    total = sum(DOOR.remote.pin_of(shard.path).size for shard in remote_shards)
    with (
        when_interrupted("; the cache keeps the bytes fetched so far"),
        bytes_bar("fetching", total, quiet) as advance,
    ):
        outcome = fetch_shards(remote_shards, jobs or JOBS, workers, advance)
    report: dict[str, Any] = {
        "shards": len(remote_shards),
        "local": local,
        "bytes": outcome.size,
        "fetched": outcome.fetched,
        "there": outcome.there,
        "failed": {os.fsdecode(path): str(error) for path, error in outcome.failed.items()},
        "seconds": round(time.monotonic() - since, 3),
        "cache": str(file_cache.cache().directory) if workers is None else None,
    }
    _say_failures(outcome.failed)
    if as_json:
        write_json(report)
    else:
        say(*_fetched_lines(report))
    if report["failed"]:
        sys.exit(3)


def _fetched_lines(report: Mapping[str, Any]) -> tuple[str, str]:
    part = f"{report['shards'] - len(report['failed']):,} of " if report["failed"] else ""
    return (
        f"{part}{counted(report['shards'], 'shard')} in the cache, {bytes_text(report['bytes'])}: "
        f"{bytes_text(report['fetched'])} fetched, {bytes_text(report['there'])} were in it before",
        f"kept in {report['cache'] or 'the caches of the workers'}",
    )


def _say_failures(failed: Mapping[bytes, ShardError]) -> None:
    too_much = [os.fsdecode(path) for path, error in failed.items() if isinstance(error, CacheFull)]
    for error in failed.values():
        if not isinstance(error, CacheFull):
            log.error("%s", error)
    if too_much:
        log.error(
            "the cache has no room for %s more (%s): raise its limit by --cache-size, or remove files by "
            "`wdsfs cache --trim` or `--clear`",
            counted(len(too_much), "shard"),
            several(too_much),
        )
