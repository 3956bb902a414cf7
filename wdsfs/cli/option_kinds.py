"""Kinds of options: types of their values, options that no longer exist, groups that become one argument.

A group is a mapping of the name of a value to the decorator that adds the option to a command; `gather_options`
makes one object of the values.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, cast

import click

from wdsfs.cli import completion
from wdsfs.cli.command_help import Decorated, Decorator
from wdsfs.errors import UsageError, parse_size


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
