"""Help of commands: options in sections, on pages. A command of the program is of the class `Command`."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import click

from wdsfs.cli.output import on_terminal, show_page

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
