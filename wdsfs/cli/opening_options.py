"""Options of all commands that open a set: the index, processes, tolerated damage, caches and stores.

Options of caches and stores are settings of all processes of a command (`shared_settings`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from wdsfs import shared_settings
from wdsfs.cli.option_kinds import (
    OWN,
    RARE,
    SET,
    SHARED,
    Decorator,
    Directory,
    all_of,
    flag,
    gather_options,
    group_in_section,
    in_section,
    jobs_option,
    offer_paths,
)
from wdsfs.errors import parse_size

if TYPE_CHECKING:
    from wdsfs.cluster_workers import Workers
    from wdsfs.tree.set_options import Opening, Tolerance

# --- settings of all processes ---


def set_for_all(name: str, value: str | None) -> None:
    """Give a setting a value for this command and all processes that it starts; None leaves it unchanged."""
    if value is not None:
        click.get_current_context().with_resource(shared_settings.chosen(name, value))


def _shared(flag: str, name: str, text_of: Callable[[Any], str], **details: Any) -> Decorator[Any]:
    """Return an option that is a setting of all processes. The command does not get its value.

    `text_of` returns the text of the setting. It raises UsageError for a wrong value.
    """

    def callback(_: click.Context, __: click.Parameter, value: Any) -> None:
        if value not in (None, False, ()):
            set_for_all(name, text_of(value))

    details = {"envvar": f"WDSFS_{name}", **details}
    option = click.option(flag, f"wdsfs_{name.lower()}", expose_value=False, callback=callback, **details)
    return in_section(SHARED, option)


def _size_text(value: str) -> str:
    return str(parse_size(value))


def _trust_text(value: str) -> str:
    from wdsfs.trust import trusted

    with shared_settings.chosen("TRUST", value):
        trusted()  # so that an unknown name is an error now
    return value


class StoreOption(click.ParamType[str]):
    """The type of --store-option. The environment variable holds several options, as words of a shell."""

    name = "text"

    def split_envvar_value(self, rv: str) -> list[str]:
        """Return the words of the variable. Raises UsageError."""
        from wdsfs import wings
        from wdsfs.door.shard_door import DOOR

        return DOOR.remote.store_arguments() if wings.is_installed("remote") else []


def _store_options_text(values: tuple[str, ...]) -> str:
    from wdsfs.door.shard_door import DOOR

    return DOOR.remote.text_of_store_arguments(values)  # so that a wrong option is an error now


def _always(_: bool) -> str:
    from wdsfs.spec.objects import ALWAYS

    return ALWAYS


trust_option = _shared(
    "--trust",
    "TRUST",
    _trust_text,
    metavar="WHO,...",
    help="Also use directories (index, cache, overlay) and changed shards of these users and @groups; "
    "`everyone` turns these checks off.  [default: only yours and root's; env WDSFS_TRUST]",
)
cache_size_option = _shared(
    "--cache-size",
    "CACHE_SIZE",
    _size_text,
    metavar="SIZE",
    help="Limit of the cache of remote and unpacked shards, images and tables, such as 800M or 2T.  "
    "[default: half of the free space of its disk; env WDSFS_CACHE_SIZE]",
)
_unpack_option = _shared(
    "--unpack",
    "UNPACK",
    str,
    type=click.Choice(["auto", "always", "never"]),
    help="Unpack compressed shards into the cache: always, never, or if there is room (auto).  "
    "[default: auto; env WDSFS_UNPACK]",
)
_unpack_memory_option = _shared(
    "--unpack-memory",
    "UNPACK_MEMORY",
    _size_text,
    metavar="SIZE",
    help="Limit of memory for unpacking a shard, for each process; `zstd --long=31` needs 2G.  "
    "[default: 256M; env WDSFS_UNPACK_MEMORY]",
)
store_option = _shared(
    "--store-option",
    "STORE_OPTIONS",
    _store_options_text,
    type=StoreOption(),
    metavar="[URL:]NAME=VALUE",
    multiple=True,
    help="Set an option of a store, such as endpoint=http://minio:9000 or s3://bucket:anonymous=true; "
    "repeatable.  [env WDSFS_STORE_OPTIONS]",
)
_fetch_memory_option = _shared(
    "--fetch-memory",
    "FETCH_MEMORY",
    _size_text,
    metavar="SIZE",
    help="Limit of memory for fetched bytes that are not in the cache yet, such as 1G.  [default: 256M; "
    "env WDSFS_FETCH_MEMORY]",
)
_allow_pipe_option = _shared(
    "--allow-pipe",
    "ALLOW_PIPE",
    _always,
    is_flag=True,
    help="Also run the commands (pipe:COMMAND) that lists and other files name, not only the commands that you "
    "type.  [env WDSFS_ALLOW_PIPE]",
)
index_file_option = _shared(
    "--index-file",
    "INDEX_FILE",
    "\n".join,
    envvar=None,  # click would split a name at a blank; the room index reads the variable
    metavar="FILE|URL",
    multiple=True,
    shell_complete=offer_paths,
    help="Also look for the index of a shard in this file (.wdsidx); repeatable.  [default: each .wdsidx beside "
    "the shards; env WDSFS_INDEX_FILE]",
)


def index_dir_option(text: str) -> Decorator[Any]:
    """Return `--index-dir` for a command that opens no index; `text` is its help."""
    return _shared("--index-dir", "INDEX_DIR", str, type=Directory(), help=text)


compressed_options = all_of(_unpack_option, _unpack_memory_option, cache_size_option)
remote_options = all_of(store_option, _fetch_memory_option, _allow_pipe_option)

# --- how a set is opened -----------------------------------------------------------------------------------


def _opening(
    index_dir: str | None,
    jobs: int | None,
    quiet: bool,
    executor: str | None = None,
    allow_missing: bool | None = None,
    *,
    strict: bool = False,
) -> Opening:
    from pathlib import Path

    from wdsfs.cli.output import bars
    from wdsfs.tree.set_options import Opening

    directory, tolerance = Path(index_dir) if index_dir else None, _tolerance(allow_missing, strict)
    return Opening(directory, jobs_of(jobs), quiet, tolerance, workers_of(executor, jobs), bars(quiet))


def _tolerance(allow_missing: bool | None, strict: bool) -> Tolerance:
    from wdsfs.tree.set_options import Tolerance

    if allow_missing is None:
        return Tolerance(is_option=False)
    return Tolerance(allow_missing, strict).check()


def jobs_of(jobs: int | None) -> int:
    """Return the typed number of processes, or the default."""
    from wdsfs.host import default_jobs

    return jobs or default_jobs()


def workers_of(executor: str | None, jobs: int | None) -> Workers | None:
    """Return the workers of `--executor`, or None without it. The end of the command closes them.

    `jobs` limits the units in flight. Raises UsageError.
    """
    if not executor:
        return None
    from wdsfs.cluster_workers import Workers

    workers = Workers(executor, jobs)
    click.get_current_context().call_on_close(workers.close)
    return workers


executor_option: Decorator[Any] = in_section(
    RARE,
    click.option(
        "--executor",
        metavar="NAME",
        envvar="WDSFS_EXECUTOR",
        help="Work on a cluster: dask:ADDRESS, ray[:ADDRESS], mpi, slurm:jobs=N,..., or MODULE:CALLABLE, which "
        "returns a concurrent.futures.Executor. --jobs then limits the units in flight.  "
        "[default: processes of this machine; env WDSFS_EXECUTOR]",
    ),
)
# Options for damage of a set that a command tolerates or refuses.
_TOLERANCE: dict[str, Decorator[Any]] = {
    "allow_missing": flag(
        "--allow-missing", "Leave out shards that are missing or unreadable; the set is then smaller."
    ),
    "strict": flag(
        "--strict",
        "Refuse a set with a damaged or unreadable shard, a split sample or a missing column, and list them.",
    ),
}


def _index_dir(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    set_for_all("INDEX_DIR", value)  # the cache is beside it
    return value


def opening_options_with(
    jobs: str = "Number of processes that index shards.", *, executor: bool = False, tolerance: bool = True
) -> Decorator[Any]:
    """Return the options of a command that opens a set; `jobs` is the help of `--jobs`.

    `executor`: with `--executor`, and with `--jobs` among the common options; `tolerance`: with `--allow-missing`
    and `--strict`.
    """
    group: dict[str, Decorator[Any]] = {
        **(group_in_section(SET, _TOLERANCE) if tolerance else {}),
        **({"executor": executor_option} if executor else {}),
        "quiet": flag("-q", "--quiet", "Show no progress bar and no hints."),
        "jobs": in_section(OWN if executor else SHARED, jobs_option(f"{jobs}  [default: one per core]")),
        "index_dir": in_section(
            SHARED,
            click.option(
                "--index-dir",
                type=Directory(),
                envvar="WDSFS_INDEX_DIR",
                callback=_index_dir,
                help="The directory of the index.  [default: wdsfs in your cache directory; env WDSFS_INDEX_DIR]",
            ),
        ),
    }
    opening = gather_options("opening", _opening, group)
    return all_of(opening, trust_option, compressed_options, remote_options, index_file_option)


opening_options = opening_options_with()
executor_opening_options = opening_options_with(executor=True)
index_options = opening_options_with(tolerance=False)
