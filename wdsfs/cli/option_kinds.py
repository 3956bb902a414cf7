"""The form of commands: help in sections and on pages, types of values and what TAB offers, groups of options.

A command of the program is of the class `Command`. A group is a mapping of the name of a value to the decorator
that adds the option to a command; `gather_options` makes one object of the values.
The completion by TAB asks no daemon, mount or network: mount points are those of the registry and of the kernel's
table; the shell itself completes paths.
"""

from __future__ import annotations

import functools
import math
import os
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import click
from click.shell_completion import CompletionItem

from wdsfs.cli.output import on_terminal, show_page
from wdsfs.errors import UsageError, parse_size

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
Decorator = Callable[[Decorated], Decorated]

# The sections of options in a help text, in this order, after those options that are in none. Options of the last
# section are the same for all commands: all but one only name them.
SHOWN, SET, SERVING, SHARED = "What is shown", "Which shards", "How it is served", "Index, cache and stores"
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
            title: [] for title in ("Options", SHOWN, SET, SERVING, SHARED)
        }
        for option in sorted(self.get_params(ctx), key=lambda param: param.name in _LAST):
            record = option.get_help_record(ctx) if isinstance(option, click.Option) else None
            if record is not None:
                sections[getattr(option, "section", "Options")].append(record)
        shared = sections[SHARED]
        if len(shared) > _FEW and ctx.info_name != _EXPLAINS_SHARED:
            names = ", ".join(name.split()[0] for name, _ in shared)
            explained = f"{names}: see `wdsfs help {_EXPLAINS_SHARED}`."
            lines = textwrap.wrap(explained, formatter.width - 2, break_on_hyphens=False)
            sections[SHARED] = [(line, "") for line in lines]
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


# --- options


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
        if isinstance(value, str) and value.strip()[:1].isdigit() and value.strip()[-1:].isalpha():
            value = parse_size(value)
        return super().convert(value, param, ctx)


class LayoutName(click.Choice[str]):
    """The type of options with a layout. Of a name that other tools use it says which layout that is here."""

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
    """Return the arguments and options of the command that were typed."""
    context, typed = click.get_current_context(), click.core.ParameterSource.COMMANDLINE
    return [param for param in context.command.params if context.get_parameter_source(str(param.name)) is typed]


def refuse_typed(reasons: Mapping[str, str], where: str) -> None:
    """Raise UsageError, with the reason, for an option that was typed and is not to be used here."""
    for param in typed_params():
        if param.name in reasons:
            raise UsageError(f"{param.opts[-1]}: not with {where}: {reasons[param.name]}")


def flag(*names: str) -> Decorator[Any]:
    """Return an option without a value; the last of `names` is its help."""
    return click.option(*names[:-1], is_flag=True, help=names[-1])


def retired(word: str, way_out: str, metavar: str | None = None) -> Decorator[Any]:
    """Return an option that no longer exists: it says the way out. With a `metavar` it takes a value."""

    def refuse(ctx: click.Context, param: click.Parameter, value: object) -> None:
        if value:
            raise UsageError(f"{word}: no longer an option; {way_out}")

    return click.option(
        word, is_flag=metavar is None, metavar=metavar, hidden=True, expose_value=False, callback=refuse
    )


def all_of(*options: Decorator[Any]) -> Decorator[Any]:
    """Return a decorator that adds these options, in this order."""

    def decorate(command: Decorated) -> Decorated:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


# --- what shells offer: completion by TAB

_PATH, _DIRECTORY = "file", "dir"  # of items: the shell completes what is typed
_NOT_LOCAL = re.compile(r"^[a-z][a-z0-9+.-]*://|^pipe:")
# A text that a shell takes for one word. bash inserts texts as they are, and others may have named a mount point.
_ONE_WORD = re.compile(r"[\w@%+=:,./-]+")


def offer_paths(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return files and directories; no URLs, which would take requests."""
    return [] if _NOT_LOCAL.match(incomplete) else [CompletionItem(incomplete, type=_PATH)]


def offer_directories(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return directories."""
    return [] if _NOT_LOCAL.match(incomplete) else [CompletionItem(incomplete, type=_DIRECTORY)]


def offer_mounts(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the mounts of this user, dead ones included; directories if none begins like that."""
    offers = [CompletionItem(path) for path in _mounts() if path.startswith(incomplete)]
    return offers or offer_directories(ctx, param, incomplete)


def offer_mounts_or_paths(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the mounts of this user as long as nothing is typed, then paths."""
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
