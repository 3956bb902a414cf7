"""Options that several commands share, and the objects that commands get for their values.

A group of options is a mapping of the name of a value to the decorator that adds the option to a command;
`handing_over` makes one object of the values. Little is imported, so that a command starts quickly.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from wdsfs.cli import completion
from wdsfs.cli.output import on_terminal, show_page
from wdsfs.cli.process import ended_in_order
from wdsfs.errors import UsageError, parse_size

if TYPE_CHECKING:
    from pathlib import Path

    from wdsfs.executors import Workers
    from wdsfs.tree.composition import Composition
    from wdsfs.tree.set_options import Opening, Selection, Tolerance, TreeOptions

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
Decorator = Callable[[Decorated], Decorated]

# --- help: options in sections, on pages ---------------------------------------------------------------------

# The sections of options in a help text, in this order, after those options that are in none. Options of the last
# section are the same for all commands: all but one only name them.
_SHOWN, _SET, SERVING, _SHARED = "What is shown", "Which shards", "How it is served", "Index, cache and stores"
_EXPLAINS_SHARED, _FEW = "mount", 4
_LAST = ("as_json", "executor", "quiet", "jobs", "help", "_click_default_help")  # of the options of a command
_COLUMN = 24  # the widest option with text beside it


class _BoldHeadings(click.HelpFormatter):
    """Help for a terminal."""

    def write_heading(self, heading: str) -> None:
        super().write_heading(click.style(heading, bold=True))


class _Context(click.Context):
    def make_formatter(self) -> click.HelpFormatter:
        if on_terminal():
            self.formatter_class = _BoldHeadings
        return super().make_formatter()


def _show_help(ctx: click.Context, _: click.Parameter, is_wanted: bool) -> None:
    if is_wanted and not ctx.resilient_parsing:
        show_page(ctx.get_help())
        ctx.exit()


class Paged(click.Command):
    """A command whose help is shown by a pager where it is longer than the terminal."""

    context_class = _Context

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        option = super().get_help_option(ctx)
        if option is not None:
            option.callback = _show_help
        return option


class Command(Paged):
    """A command whose help has the options in sections: first its own, common ones before rare ones."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {
            title: [] for title in ("Options", _SHOWN, _SET, SERVING, _SHARED)
        }
        for option in sorted(self.get_params(ctx), key=lambda param: param.name in _LAST):
            record = option.get_help_record(ctx) if isinstance(option, click.Option) else None
            if record is not None:
                sections[getattr(option, "section", "Options")].append(record)
        shared = sections[_SHARED]
        if len(shared) > _FEW and ctx.info_name != _EXPLAINS_SHARED:
            names = ", ".join(name.split()[0] for name, _ in shared)
            explained = f"{names}: see `wdsfs help {_EXPLAINS_SHARED}`."
            lines = textwrap.wrap(explained, formatter.width - 2, break_on_hyphens=False)
            sections[_SHARED] = [(line, "") for line in lines]
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records, col_max=_COLUMN)


def in_section(title: str, option: Decorator[Any]) -> Decorator[Any]:
    """Return an option, to be shown in this section of a help text."""

    def decorate(command: Decorated) -> Decorated:
        decorated: Any = option(command)
        decorated.__click_params__[-1].section = title
        return cast(Decorated, decorated)

    return decorate


def group_in_section(title: str, group: Mapping[str, Decorator[Any]]) -> dict[str, Decorator[Any]]:
    """Return a group of options, to be shown in this section of a help text."""
    return {name: in_section(title, option) for name, option in group.items()}


def retired(word: str, way_out: str, metavar: str | None = None) -> Decorator[Any]:
    """Return an option that no longer exists: it says the way out. With a `metavar` it takes a value."""

    def refuse(ctx: click.Context, param: click.Parameter, value: object) -> None:
        if value:
            raise UsageError(f"{word}: no longer an option; {way_out}")

    return click.option(
        word, is_flag=metavar is None, metavar=metavar, hidden=True, expose_value=False, callback=refuse
    )


# --- the types of values, and groups of options --------------------------------------------------------------


class Directory(click.Path):
    """The type of options that name a directory of this machine, for which a URL would be a relative path."""

    def __init__(self) -> None:
        super().__init__(file_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if "://" in os.fsdecode(value):
            self.fail("a URL cannot be used here: name a directory of this machine", param, ctx)
        return super().convert(value, param, ctx)


class AtLeastOne(click.FloatRange):
    """The type of options with a number from 1 on. Nothing compares with `nan`: it would mean no limit."""

    def __init__(self) -> None:
        super().__init__(1)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


class Bytes(AtLeastOne):
    """The type of options with a number of bytes, which may have a unit."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and value[:1].isdigit() and value[-1:].isalpha():
            value = parse_size(value)
        return super().convert(value, param, ctx)


class LayoutName(click.Choice[str]):
    """The type of options with a layout. Of a name that other tools use it says which layout that is here."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if str(value).lower().replace("-", "").replace("_", "") in _CLASSES_ELSEWHERE:
            self.fail(f"{value!r} is called classes here: --layout classes", param, ctx)
        return super().convert(value, param, ctx)


_CLASSES_ELSEWHERE = frozenset(("imagefolder", "audiofolder", "datasetfolder", "class", "folders"))


def handing_over(name: str, make: Callable[..., object], group: Mapping[str, Decorator[Any]]) -> Decorator[Any]:
    """Return a decorator that adds these options to a command, in this order.

    The command gets them as one argument `name`: the result of `make`, called with their values.
    """

    def decorate(command: Decorated) -> Decorated:
        @functools.wraps(command)
        def with_object(**given: Any) -> Any:
            own = {key: given.pop(key) for key in group}
            return command(**given, **{name: make(**own)})

        decorated: Any = with_object
        for option in reversed([*group.values()]):
            decorated = option(decorated)
        return cast(Decorated, decorated)

    return decorate


def refuse_typed(reasons: Mapping[str, str], where: str) -> None:
    """Raise UsageError, with the reason, for an option that was typed and is not to be used here."""
    context = click.get_current_context()
    for param in context.command.params:
        reason = reasons.get(str(param.name))
        typed = context.get_parameter_source(str(param.name)) is click.core.ParameterSource.COMMANDLINE
        if reason is not None and typed:
            raise UsageError(f"{param.opts[-1]}: not with {where}: {reason}")


def flag(*names: str) -> Decorator[Any]:
    """Return an option without a value; the last of `names` is its help."""
    return click.option(*names[:-1], is_flag=True, help=names[-1])


shards_argument = click.argument("shards", nargs=-1, required=True, shell_complete=completion.paths)
json_option = flag("--json", "as_json", "Machine-readable output.")

# Of the commands that write shards.
leave_out_option: Decorator[Any] = flag("--leave-out", "Go ahead without the files that cannot be packed.")
dry_run_option: Decorator[Any] = flag("-n", "--dry-run", "Only show which shards would be written.")


def jobs_option(text: str) -> Decorator[Any]:
    """Return the option for how much is done at a time; `text` is its help."""
    return click.option("-j", "--jobs", type=click.IntRange(1), metavar="N", help=text)


def space_check_option(text: str) -> Decorator[Any]:
    """Return the option that leaves out the check for room; `text` is its help."""
    return click.option("--no-space-check", "space_check", is_flag=True, default=True, flag_value=False, help=text)


# --- which shards, and how they are read -------------------------------------------------------------------


def _selection(**typed: Any) -> Selection:
    from wdsfs.tree.set_options import selection_of

    return selection_of(**typed)


# Which part of a set is wanted, and how its shards are read.
_PART: dict[str, Decorator[Any]] = {
    "split": click.option(
        "--split",
        metavar="NAME",
        help="Only this split (train, val ...) of a prepared Energon dataset, a directory with .nv-meta.",
    ),
    "shard_id": click.option(
        "--shard-id",
        type=click.IntRange(0),
        metavar="N",
        help="Only part N of M, from 0 on: shards N, N+M, N+2M ... of the set, one part for each rank.",
    ),
    "num_shards": click.option(
        "--num-shards", type=click.IntRange(1), metavar="M", help="The number of parts for --shard-id."
    ),
    "ignore_zeros": flag(
        "--ignore-zeros", "Read on after the end mark of a tar, for shards that are several tars joined by cat."
    ),
    "group_by_key": flag(
        "--group-by-key", "Take all members of a key in a shard for one sample, also where they lie apart."
    ),
}
_BASE: dict[str, Decorator[Any]] = {
    "base": click.option(
        "--base",
        metavar="DIR|URL",
        shell_complete=completion.directories,
        help="Where the shards of a portable index (.wdsidx) or an image are.  [default: beside it]",
    ),
}

# Of all commands that take SHARDS.
set_options = handing_over("selection", _selection, group_in_section(_SET, {**_PART, **_BASE}))
set_options_without_base = handing_over("selection", _selection, group_in_section(_SET, _PART))
# Of `pack`, whose --split makes splits, too.
set_options_without_split = handing_over(
    "selection",
    _selection,
    group_in_section(_SET, {name: option for name, option in {**_PART, **_BASE}.items() if name != "split"}),
)

# --- passed on to all processes by the environment ---------------------------------------------------------------


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def set_for_all(name: str, value: str | None) -> None:
    """Set a variable for this command and all processes that it starts; None leaves it unchanged."""
    if value is not None:
        click.get_current_context().with_resource(_environment(name, value))


def _exported(flag: str, variable: str, text_of: Callable[[Any], str], **details: Any) -> Decorator[Any]:
    """Return an option that is passed on by a variable of the environment, so that no command gets it.

    `text_of` makes the value of the variable, and raises UsageError for a wrong one.
    """

    def callback(_: click.Context, __: click.Parameter, value: Any) -> None:
        if value not in (None, False, ()):
            set_for_all(variable, text_of(value))

    details = {"envvar": variable, **details}
    option = click.option(flag, variable.lower(), expose_value=False, callback=callback, **details)
    return in_section(_SHARED, option)


def _size_text(value: str) -> str:
    return str(parse_size(value))


def _trust_text(value: str) -> str:
    from wdsfs.trust import trusted

    with _environment("WDSFS_TRUST", value):
        trusted()  # so that an unknown name is an error now
    return value


class StoreOption(click.ParamType[str]):
    """The type of --store-option. The environment variable has several of them, as words of a shell."""

    name = "text"

    def split_envvar_value(self, rv: str) -> list[str]:
        """Return the words of the variable. Raises UsageError."""
        from wdsfs.door.shard_door import DOOR

        return DOOR.remote.store_arguments()


def _store_options_text(values: tuple[str, ...]) -> str:
    from wdsfs.door.shard_door import DOOR

    return DOOR.remote.text_of_store_arguments(values)  # so that a wrong one is an error now


def _always(_: bool) -> str:
    from wdsfs.spec.objects import ALWAYS

    return ALWAYS


trust_option = _exported(
    "--trust",
    "WDSFS_TRUST",
    _trust_text,
    metavar="WHO,...",
    help="Also use directories (index, cache, overlay) and changed shards of these users and @groups; "
    "`everyone` ends all such checks.  [default: only yours and root's; env WDSFS_TRUST]",
)
cache_size_option = _exported(
    "--cache-size",
    "WDSFS_CACHE_SIZE",
    _size_text,
    metavar="SIZE",
    help="Limit of the cache of remote and unpacked shards, images and label tables, such as 800M or 2T.  "
    "[default: half of what is free on its disk; env WDSFS_CACHE_SIZE]",
)
_unpack_option = _exported(
    "--unpack",
    "WDSFS_UNPACK",
    str,
    type=click.Choice(["auto", "always", "never"]),
    help="Compressed shards: unpack them into the cache (always), never, or if there is room (auto).  "
    "[default: auto; env WDSFS_UNPACK]",
)
_unpack_memory_option = _exported(
    "--unpack-memory",
    "WDSFS_UNPACK_MEMORY",
    _size_text,
    metavar="SIZE",
    help="Limit of memory for unpacking a shard, in each process that does; 2G for `zstd --long=31`.  "
    "[default: 256M; env WDSFS_UNPACK_MEMORY]",
)
store_option = _exported(
    "--store-option",
    "WDSFS_STORE_OPTIONS",
    _store_options_text,
    type=StoreOption(),
    metavar="[URL:]NAME=VALUE",
    multiple=True,
    help="How to reach a store, such as endpoint=http://minio:9000 or s3://bucket:anonymous=true; "
    "repeatable.  [env WDSFS_STORE_OPTIONS]",
)
_fetch_memory_option = _exported(
    "--fetch-memory",
    "WDSFS_FETCH_MEMORY",
    _size_text,
    metavar="SIZE",
    help="Limit of memory for bytes that are fetched and not in the cache yet, such as 1G.  [default: 256M; "
    "env WDSFS_FETCH_MEMORY]",
)
_allow_pipe_option = _exported(
    "--allow-pipe",
    "WDSFS_ALLOW_PIPE",
    _always,
    is_flag=True,
    help="Also run the commands (pipe:COMMAND) that lists and other files name, not only those of the "
    "command line.  [env WDSFS_ALLOW_PIPE]",
)
index_file_option = _exported(
    "--index-file",
    "WDSFS_INDEX_FILE",
    "\n".join,
    envvar=None,  # click would take a name with a blank for two; the variable is read where the index is
    metavar="FILE|URL",
    multiple=True,
    shell_complete=completion.paths,
    help="Also look for the index of a shard in this file (.wdsidx); repeatable.  [default: any beside the "
    "shards; env WDSFS_INDEX_FILE]",
)


def index_dir_option(text: str) -> Decorator[Any]:
    """Return the option for the directory of the index of a command that opens none; `text` is its help."""
    return _exported("--index-dir", "WDSFS_INDEX_DIR", str, type=Directory(), help=text)


def _all_of(*options: Decorator[Any]) -> Decorator[Any]:
    """Return a decorator that adds these options, in this order."""

    def decorate(command: Decorated) -> Decorated:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


compressed_options = _all_of(_unpack_option, _unpack_memory_option, cache_size_option)
remote_options = _all_of(store_option, _fetch_memory_option, _allow_pipe_option)

# --- how a set is opened -----------------------------------------------------------------------------------


def _opening(
    index_dir: str | None,
    jobs: int | None,
    quiet: bool,
    executor: str | None = None,
    allow_missing: bool | None = None,
    strict: bool = False,
) -> Opening:
    from wdsfs.cli.output import bars
    from wdsfs.tree.set_options import Opening

    tolerance = _tolerance(allow_missing, strict)
    return Opening(path_of(index_dir), jobs_of(jobs), quiet, tolerance, workers_of(executor, jobs), bars(quiet))


def _tolerance(allow_missing: bool | None, strict: bool) -> Tolerance:
    from wdsfs.tree.set_options import Tolerance

    if allow_missing is None:
        return Tolerance(is_option=False)
    if not strict:
        return Tolerance(allow_missing)
    from wdsfs.interop.lint import findings_of_set

    return Tolerance(allow_missing, findings_of_set).check()


def path_of(text: str | None) -> Path | None:
    """Return the path that was typed; None if there was none."""
    from pathlib import Path

    return Path(text) if text else None


def jobs_of(jobs: int | None) -> int:
    """Return the number of processes that was typed, or the default."""
    from wdsfs.host import default_jobs

    return jobs or default_jobs()


def workers_of(executor: str | None, jobs: int | None) -> Workers | None:
    """Return the workers that `--executor` names, closed with the command; None if it was not given.

    `jobs` are the units in flight at most. Raises UsageError.
    """
    if not executor:
        return None
    from wdsfs.executors import Workers

    workers = Workers(executor, jobs)
    click.get_current_context().call_on_close(workers.close)
    return workers


executor_option: Decorator[Any] = click.option(
    "--executor",
    metavar="NAME",
    envvar="WDSFS_EXECUTOR",
    help="Work on a cluster: dask:ADDRESS, ray[:ADDRESS], mpi, slurm:jobs=N,..., or MODULE:CALLABLE, which "
    "returns a concurrent.futures.Executor; --jobs is then the number of units in flight.  "
    "[default: processes of this machine; env WDSFS_EXECUTOR]",
)
# The damage of a set that a command tolerates.
_TOLERANCE: dict[str, Decorator[Any]] = {
    "allow_missing": flag(
        "--allow-missing",
        "Leave out shards that are missing or cannot be read: the set is smaller.",
    ),
    "strict": flag(
        "--strict",
        "Refuse a set with a damaged or unreadable shard, a split sample or a missing column; list these.",
    ),
}


def _index_dir(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    set_for_all("WDSFS_INDEX_DIR", value)  # the cache is beside it
    return value


def opening_options_with(
    jobs: str = "Processes that index shards.", executor: bool = False, tolerance: bool = True
) -> Decorator[Any]:
    """Return the options of a command that opens a set; `jobs` is the help of `--jobs`.

    `executor`: with `--executor`; `tolerance`: with `--allow-missing` and `--strict`.
    """
    group: dict[str, Decorator[Any]] = {
        **(group_in_section(_SET, _TOLERANCE) if tolerance else {}),
        **({"executor": executor_option} if executor else {}),
        "quiet": flag("-q", "--quiet", "No progress bar, no hints."),
        "jobs": jobs_option(f"{jobs}  [default: one per core]"),
        "index_dir": in_section(
            _SHARED,
            click.option(
                "--index-dir",
                type=Directory(),
                envvar="WDSFS_INDEX_DIR",
                callback=_index_dir,
                help="Where the index is.  [default: wdsfs in the user's cache directory; env WDSFS_INDEX_DIR]",
            ),
        ),
    }
    opening = handing_over("opening", _opening, group)
    return _all_of(opening, trust_option, compressed_options, remote_options, index_file_option)


opening_options = opening_options_with()
executor_opening_options = opening_options_with(executor=True)
index_options = opening_options_with(tolerance=False)

# --- how a set is shown ---------------------------------------------------------------------------------------


def _composition(layout: str = "samples", **typed: Any) -> Composition:
    from wdsfs.tree.composition import OF_CLASSES, composition_of

    return composition_of(layout, **{**dict.fromkeys(OF_CLASSES), **typed})


def _plain_tree(**typed: Any) -> TreeOptions:
    from wdsfs.tree.set_options import TreeOptions

    return TreeOptions(**typed)


def _tree(layout: str, names: str, merge: bool, index_tree: bool = False, **composed: Any) -> TreeOptions:
    from wdsfs.tree.composition import composition_of
    from wdsfs.tree.set_options import TreeOptions

    return TreeOptions(layout, names, merge, index_tree, composition_of(layout, **composed))


_LAYOUTS = {
    "samples": "samples: a directory for each sample",
    "files": "files: the members as `tar x` writes them",
    "classes": "classes: a directory for each class",
}


def _view_group(*layouts: str) -> dict[str, Decorator[Any]]:
    return {
        "layout": click.option(
            "--layout",
            type=LayoutName(layouts),
            default="samples",
            show_default=True,
            help="; ".join(_LAYOUTS[layout] for layout in layouts) + ".",
        ),
        "names": click.option(
            "--names",
            type=click.Choice(["ext", "full"]),
            default="ext",
            show_default=True,
            help="Name the files of a sample `left.jpg` (ext) or `image194.left.jpg` (full).",
        ),
        "merge": flag("--merge", "One tree over all shards. A second file of the same name is NAME~SHARD."),
    }


_POLICY = click.Choice(["error", "skip", "empty"])


def list_file(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Return the file of a list of keys; what can be read only once is copied into one for this command."""
    if value is None or (value not in ("", "-") and (not os.path.exists(value) or os.path.isfile(value))):
        return value
    from wdsfs.tree.label_files import refuse_empty
    from wdsfs.tree.label_text import copy_list

    option = param.opts[-1]
    refuse_empty(value, option)
    if os.path.isdir(value):
        raise UsageError(f"{option} {value}: is a directory")
    if ctx.info_name in ("mount", "image"):
        raise UsageError(f"{option} {value}: a mount reads the list again when it changes: write it into a file")
    import tempfile

    ctx.with_resource(ended_in_order())
    directory = tempfile.TemporaryDirectory(prefix="wdsfs-keys-")
    try:
        copy = copy_list(value, option, directory.name)
    except BaseException as error:  # an interrupt, too: click closes no context whose options are being read
        directory.cleanup()
        if isinstance(error, OSError):
            raise UsageError(f"{option} {value}: {error.strerror}") from None
        raise
    ctx.with_resource(directory)
    return copy


keys_option: Decorator[Any] = click.option(
    "--keys",
    metavar="FILE[:COLUMN]",
    callback=list_file,
    shell_complete=completion.paths,
    help="Only the samples that FILE lists: KEY or SHARD/KEY in each line, or in a COLUMN of .csv, .tsv, .jsonl, "
    ".parquet or .sqlite:TABLE; `-`: the standard input.",
)

_COMPOSITION: dict[str, Decorator[Any]] = {
    "keys": keys_option,
    "class_from": click.option(
        "--class-from",
        metavar="EXT[:FIELD]",
        help="The class for --layout classes: a column, or a field of a JSON column.  [default: cls]",
    ),
    "class_names": click.option(
        "--class-names",
        type=click.Path(dir_okay=False),
        metavar="FILE",
        help="Names of the classes: one a line for 0, 1, 2 ..., or a JSON list or object.",
    ),
    "class_digits": click.option(
        "--class-digits",
        type=click.IntRange(0, 18),
        metavar="N",
        help="Show classes that are numbers with N digits, so that they sort as numbers; 0: as they are "
        "written.  [default: as many as the longest has]",
    ),
    "columns": click.option(
        "--columns",
        multiple=True,
        metavar="[NAME=]EXT;EXT...",
        help="Show only this column; repeatable. Of alternatives (jpg;png) a sample shows the first in the tar; "
        "with a NAME, the first as typed.",
    ),
    "field": click.option(
        "--field",
        multiple=True,
        metavar="NAME=EXT:FIELD",
        help="Show a field of a JSON column as a file: caption.txt=json:caption; FIELD may be a.b[0]; repeatable.",
    ),
    "ignore_case": flag("--ignore-case", "Match --columns in any letter case."),
    "missing": click.option(
        "--missing",
        type=_POLICY,
        default="error",
        show_default=True,
        help="If a sample lacks a column, key or class: refuse the set (error), leave the sample out (skip), or "
        "show an empty file.",
    ),
    "duplicates": click.option(
        "--duplicates",
        type=_POLICY,
        default="error",
        show_default=True,
        help="If a key or column is there twice: refuse the set (error), leave the sample out (skip), or show it "
        "without the columns (empty).",
    ),
    "join": click.option(
        "--join",
        multiple=True,
        metavar="SHARDS",
        shell_complete=completion.paths,
        help="Add the columns of samples with the same key in these shards; repeatable.",
    ),
    "associate": click.option(
        "--associate",
        multiple=True,
        metavar="FILE",
        shell_complete=completion.paths,
        help="Add columns (labels, captions) from FILE (.sqlite[:TABLE], .csv, .tsv, .jsonl) by key; they "
        "replace those of the shards; repeatable.",
    ),
}

_INDEX_TREE = flag(
    "--index-tree", "Also show by-index/000/000/000123: a link to each sample by its number in the set, from 0."
)


view_options = handing_over("tree", _plain_tree, group_in_section(_SHOWN, _view_group("samples", "files")))

_DECODE = retired("--decode-members", "decode compressed members in the loader, or with zcat FILE")

# Of a command that shows no tree, and so has no layout.
_FOR_COLUMNS = {name: option for name, option in _COMPOSITION.items() if not name.startswith("class_")}
composition_options = _all_of(
    handing_over("composition", _composition, group_in_section(_SHOWN, _FOR_COLUMNS)), _DECODE
)

_TREE = group_in_section(_SHOWN, {**_view_group("samples", "files", "classes"), **_COMPOSITION})

tree_options = _all_of(handing_over("tree", _tree, _TREE), _DECODE)
numbered_tree_options = _all_of(
    handing_over("tree", _tree, {**_TREE, "index_tree": in_section(_SHOWN, _INDEX_TREE)}), _DECODE
)
