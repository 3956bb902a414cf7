"""The form of commands: help in sections, types of values, completion by TAB, groups of options.

Each command is a `Command`. A group of options maps the name of a value to the decorator that adds the option;
`gather_options` makes one object of the values. Completion asks no daemon, mount or network. It takes mount points
from the registry and from the kernel's table; the shell completes paths.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import click
from click.shell_completion import CompletionItem

from wdsfs.cli.output import on_terminal, show_page
from wdsfs.errors import UsageError, parse_size

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
Decorator = Callable[[Decorated], Decorated]

# The sections of options in a help text, in this order; options without a section are in OWN. `--help` shows the
# first two sections; `--help-all` shows all. Up to `_FEW` options of the other sections are on `--help`, too.
OWN, SHOWN, DETAILS = "Options", "What is shown", "Classes, fields, odd samples"
RARE, SET, SERVING, SHARED = "Less common", "Which shards", "How it is served", "Index, cache and stores"
_COMMON, _FEW = (OWN, SHOWN), 4
_SECTIONS = (*_COMMON, DETAILS, RARE, SET, SERVING, SHARED)
_LAST = ("as_json", "quiet", "jobs", "help_all", "help", "_click_default_help")  # of the options of a command
_COLUMN = 24  # the widest option with text beside it
_EXPLAINS_ALL = "wdsfs.explains_all"  # in the context's `meta`: `--help-all` was typed


class _BoldHeadings(click.HelpFormatter):
    """Help for a terminal."""

    def write_heading(self, heading: str) -> None:
        super().write_heading(click.style(heading, bold=True))


class _Context(click.Context):
    def make_formatter(self) -> click.HelpFormatter:
        if on_terminal():
            self.formatter_class = _BoldHeadings
        return super().make_formatter()


def _show_help(ctx: click.Context, param: click.Parameter, is_wanted: bool) -> None:
    if is_wanted and not ctx.resilient_parsing:
        ctx.meta[_EXPLAINS_ALL] = param in _HELP_ALL
        show_page(ctx.get_help())
        ctx.exit()


class Paged(click.Command):
    """A command that shows its help by a pager if the terminal is too small for it."""

    context_class = _Context

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        option = super().get_help_option(ctx)
        if option is not None:
            option.callback = _show_help
        return option


class Command(Paged):
    """A command whose help has the options in sections; `--help-all` shows the sections that `--help` leaves out.

    A form feed in the docstring begins the part of the text that is for `--help-all`.
    """

    def __init__(self, *args: Any, **details: Any) -> None:
        super().__init__(*args, **details)
        rare = [param for param in self.params if _section(param) not in _COMMON]
        self._rare_count = len(rare) if len(rare) > _FEW else 0

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), _HELP_ALL[self._rare_count == 0]]

    def _is_short(self, ctx: click.Context) -> bool:
        return self._rare_count > 0 and not ctx.meta.get(_EXPLAINS_ALL)

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        text = inspect.cleandoc(self.help or "")
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(text.partition("\f")[0] if self._is_short(ctx) else text.replace("\f", ""))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in _SECTIONS}
        for option in sorted(self.get_params(ctx), key=lambda param: param.name in _LAST):
            record = option.get_help_record(ctx) if isinstance(option, click.Option) else None
            if record is not None:
                sections[_section(option)].append(record)
        for title in _COMMON if self._is_short(ctx) else _SECTIONS:
            if sections[title]:
                with formatter.section(title):
                    formatter.write_dl(sections[title], col_max=_COLUMN)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self._is_short(ctx):
            formatter.write_paragraph()
            formatter.write_text(f"`{ctx.command_path} --help-all` shows {self._rare_count} more options.")


def _section(param: click.Parameter) -> str:
    return getattr(param, "section", OWN)


# The second one is for commands whose `--help` has all options already.
_HELP_ALL = [
    click.Option(
        ["--help-all"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_show_help,
        help="Show all options.",
        hidden=hidden,
    )
    for hidden in (False, True)
]


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


# --- options


class Directory(click.Path):
    """The type of options that name a local directory. It refuses URLs, which would be relative paths."""

    def __init__(self) -> None:
        super().__init__(file_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if "://" in os.fsdecode(value):
            self.fail("a URL cannot be used here: name a directory of this machine", param, ctx)
        return super().convert(value, param, ctx)


class AtLeastOne(click.FloatRange):
    """The type of options with a number of at least 1. It refuses `nan`, which would mean no limit."""

    def __init__(self) -> None:
        super().__init__(1)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


class Bytes(AtLeastOne):
    """The type of options with a number of bytes, with or without a unit."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and value.strip()[:1].isdigit() and value.strip()[-1:].isalpha():
            value = parse_size(value)
        return super().convert(value, param, ctx)


class LayoutName(click.Choice[str]):
    """The type of options with a layout. The error for the name of another tool has the name used here."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if str(value).lower().replace("-", "").replace("_", "") in _CLASSES_ELSEWHERE:
            self.fail(f"{value!r} is called classes here: --layout classes", param, ctx)
        return super().convert(value, param, ctx)


_CLASSES_ELSEWHERE = frozenset(("imagefolder", "audiofolder", "datasetfolder", "class", "folders"))


def gather_options(name: str, make: Callable[..., object], group: Mapping[str, Decorator[Any]]) -> Decorator[Any]:
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


def typed_params() -> list[click.Parameter]:
    """Return the typed arguments and options of the command."""
    context, typed = click.get_current_context(), click.core.ParameterSource.COMMANDLINE
    return [param for param in context.command.params if context.get_parameter_source(str(param.name)) is typed]


def refuse_typed(reasons: Mapping[str, str], where: str) -> None:
    """Raise UsageError, with the reason, for a typed option that cannot be used with `where`."""
    for param in typed_params():
        if param.name in reasons:
            raise UsageError(f"{param.opts[-1]} cannot be used with {where}: {reasons[param.name]}")


def flag(*names: str) -> Decorator[Any]:
    """Return an option without a value; the last of `names` is its help."""
    return click.option(*names[:-1], is_flag=True, help=names[-1])


def all_of(*options: Decorator[Any]) -> Decorator[Any]:
    """Return a decorator that adds these options, in this order."""

    def decorate(command: Decorated) -> Decorated:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


# --- what shells offer: completion by TAB

_PATH, _DIRECTORY = "file", "dir"  # types of items that the shell itself completes
_NOT_LOCAL = re.compile(r"^[a-z][a-z0-9+.-]*://|^pipe:")
# A text that is one word to a shell. bash inserts it unquoted, and another user may have named the mount point.
_ONE_WORD = re.compile(r"[\w@%+=:,./-]+")


def offer_paths(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return files and directories. A URL gets no completion, which would need requests."""
    return [] if _NOT_LOCAL.match(incomplete) else [CompletionItem(incomplete, type=_PATH)]


def offer_directories(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return directories."""
    return [] if _NOT_LOCAL.match(incomplete) else [CompletionItem(incomplete, type=_DIRECTORY)]


def offer_mounts(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the mounts of this user, also dead mounts; directories if no mount point begins with `incomplete`."""
    offers = [CompletionItem(path) for path in _mounts() if path.startswith(incomplete)]
    return offers or offer_directories(ctx, param, incomplete)


def offer_mounts_or_paths(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the mounts of this user if `incomplete` is empty, else paths."""
    return offer_paths(ctx, param, incomplete) if incomplete else offer_mounts(ctx, param, incomplete)


def _mounts() -> list[str]:
    from wdsfs import mount_table
    from wdsfs.mount_registry import Registration, registrations

    points = {registration.mountpoint for registration in registrations(Registration)}
    for mount in mount_table.mounts():
        if mount.fstype == "fuse.wdsfs" and os.geteuid() in (0, mount.user):
            points.add(os.fsdecode(mount.path))
    return sorted(filter(_ONE_WORD.fullmatch, points))


# --- options of several commands

shards_argument = click.argument("shards", nargs=-1, required=True, shell_complete=offer_paths)
json_option = flag("--json", "as_json", "Print JSON.")

# Of the commands that write shards.
leave_out_option: Decorator[Any] = flag(
    "--leave-out", "Leave out the files that cannot be packed, and write the others."
)
dry_run_option: Decorator[Any] = flag("-n", "--dry-run", "Only list the shards that would be written.")


def jobs_option(text: str) -> Decorator[Any]:
    """Return the option `--jobs`; `text` is its help."""
    return click.option("-j", "--jobs", type=click.IntRange(1), metavar="N", help=text)


def space_check_option(text: str) -> Decorator[Any]:
    """Return the option that skips the check of free space; `text` is its help."""
    return click.option("--no-space-check", "space_check", is_flag=True, default=True, flag_value=False, help=text)
