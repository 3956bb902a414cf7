"""The command `view`: shows a set as pages in a browser. The pages are the room `pages`, which needs an extra."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import click

from wdsfs import wings
from wdsfs.cli import completion
from wdsfs.cli.opening_options import opening_options
from wdsfs.cli.option_kinds import Command, gather_options
from wdsfs.cli.output import say
from wdsfs.cli.process import ended_in_order
from wdsfs.cli.view_options import composition_options, set_options
from wdsfs.errors import UsageError, several

if TYPE_CHECKING:
    from wdsfs.tree.composition import Composition
    from wdsfs.tree.set_options import Opening, Selection

log = logging.getLogger("wdsfs")

_NEEDED = ("jinja2", "PIL", "starlette", "tinytag", "uvicorn")


class Showing(NamedTuple):
    """The options of the page."""

    port: int
    browser: bool


showing_options = gather_options(
    "showing",
    Showing,
    {
        "port": click.option(
            "--port",
            type=click.IntRange(0, 65535),
            default=0,
            help="The port on 127.0.0.1.  [default: a free one]",
        ),
        "browser": click.option(
            "--browser/--no-browser", default=True, help="Open the page in the browser, where there is a desktop."
        ),
    },
)


@click.command(cls=Command)
@click.argument(
    "sources",
    metavar="SHARDS...|MOUNT",
    nargs=-1,
    required=True,
    shell_complete=completion.mount_points_or_paths,
)
@set_options
@composition_options
@showing_options
@opening_options
def view(
    sources: tuple[str, ...],
    selection: Selection,
    composition: Composition,
    showing: Showing,
    opening: Opening,
) -> None:
    """Look at a set in the browser: samples with thumbnails, search, plots, problems.

    The page is served on this machine only, under an address that nobody else knows; it ends with Ctrl-C. It is
    for looking: samples are changed in a writable mount, and their pages say where. Needs the libraries of the
    extra `view`, and says what to type without them.

    \b
    Examples:
      wdsfs view 'train-{000000..000999}.tar'
      wdsfs view /mnt/train
    """
    wings.load("pages")
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        from wdsfs.extras import install_command

        raise UsageError(f"the page needs {several(missing)}; type: {install_command('view')}")
    from wdsfs.mount import mount_search
    from wdsfs.pages.server import listen, serve
    from wdsfs.pages.shown_set import open_mount, open_shards
    from wdsfs.pages.site import Site

    mount = mount_search.find_viewed(sources)
    if mount is None:
        opened = open_shards(sources, selection, composition, opening)
    elif selection.arguments or not composition.is_plain:
        raise UsageError("options of the set are for SHARDS; a mount knows what it shows")
    else:
        opened = open_mount(mount, opening)
    with (
        ended_in_order(),
        opened as subject,
        contextlib.closing(listen(showing.port)) as listening,
        _launcher(showing.browser) as launch,
    ):
        title = several([os.path.basename(source.rstrip("/")) or source for source in sources])
        with contextlib.closing(Site(subject, title)) as site:
            serve(site, listening, launch)


@contextlib.contextmanager
def _launcher(browser: bool) -> Iterator[Callable[[str], None]]:
    """Yield the function that prints the address, and opens it where there is a desktop and `browser` is set."""
    with contextlib.ExitStack() as stack:

        def launch(address: str) -> None:
            say(address)
            log.info("serving on this machine until Ctrl-C")
            if browser and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
                import webbrowser

                from wdsfs.pages.server import page_leading_to

                webbrowser.open(f"file://{stack.enter_context(page_leading_to(address))}")

        yield launch
