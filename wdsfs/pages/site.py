"""The pages by address: routes, templates, and the pages of a sample, plots and problems.

Every answer is made in a thread, of one snapshot of the set. Answers that wait for the bytes of shards
(thumbnails, previews, downloads) have threads of their own, so that a slow shard never holds up a page.

The plot of shards is a table with bars, bounded for sets of any size: neighbouring shards share one.
"""

from __future__ import annotations

import base64
import functools
import itertools
import os
import secrets
import shlex
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import anyio
import anyio.to_thread
import jinja2
import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from wdsfs import names as naming
from wdsfs import wings
from wdsfs.errors import NoSuchEntry, NotADirectory, StaleShard, UsageError, WdsfsError, bytes_text, counted
from wdsfs.pages.downloads import MEMBER_POLICY, Download, Downloads, requested_path, saved_as, suffix, text_of
from wdsfs.pages.filters import Filter
from wdsfs.pages.grid import PAGE, WAIT_SECONDS, Grid, query_of
from wdsfs.pages.preview import PLAYERS, Picture, Source, content_of, decoded, without_controls
from wdsfs.pages.previewer import Previewer
from wdsfs.pages.set_query import Neighbours, TableOfSet
from wdsfs.pages.shown_set import File, FileOrigin, Snapshot, Subject

SIDE = 192  # pixels of a thumbnail, at the most
SNIPPET = 600  # bytes of a text that is shown in the grid
LINES = 2000  # of a text that a page shows: a browser takes seconds for 100,000
QUICK, SLOW = 8, 12  # threads that read the index, and threads that wait for bytes

# Decoders whose files come first on the page of a sample.
SEEN = ("picture", "video", "audio", "array", "arrays")

LIST_SECONDS = 10.0  # that a list waits for the table
FINDINGS_MAX = 500  # findings that the page of problems lists
SAMPLE_KINDS = ("split sample", "sample count")  # kinds of findings beside damage, which shards are listed with
BYTES = ("/preview/", "/thumb/", "/snippet/")  # which read one file, and may wait for a slow shard

_HERE = Path(__file__).parent

PageMaker = Callable[[Snapshot, Request], Response]
Value = TypeVar("Value")


class _Lines(NamedTuple):
    """Lines of a list of keys, where to continue (None at the end), and the version of the set."""

    text: bytes
    after: int | None
    version: tuple[int, int]


class Site:
    """The pages over a set; `title` names it."""

    def __init__(self, subject: Subject, title: str) -> None:
        self._subject, self._place = subject, subject.place
        self._snapshots = subject.snapshots
        self._previewer = Previewer()
        self._quick, self._slow = anyio.CapacityLimiter(QUICK), anyio.CapacityLimiter(SLOW)
        self._known: tuple[tuple[int, int], list[tuple[bytes, Any]]] | None = None  # version, and its findings
        self._searching = threading.Lock()  # once for all requests meanwhile
        self._downloads = Downloads(self._with_source, self._slow, self._refused)
        self.table = TableOfSet(subject)
        self._grid = Grid(self.table, self._page, secrets.token_hex(4), subject.words)
        loader = jinja2.FileSystemLoader(_HERE / "templates")
        self._templates = jinja2.Environment(
            loader=loader, autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
        )
        self._templates.filters.update(text=text_of, size=bytes_text, path=quote, picture=_picture_url)
        self._templates.globals.update(title=title, note=subject.note, counted=counted)
        self.app = Starlette(routes=[*self._routes()])

    def close(self) -> None:
        """End the processes that decode, and the table."""
        self._previewer.close()
        self.table.close()

    def _routes(self) -> list[Route | Mount]:
        quick: dict[str, PageMaker] = {
            "/": self._grid.all,
            "/random": self._grid.random,
            "/go": self._grid.go,
            "/next": functools.partial(self._grid.turn, back=False),
            "/previous": functools.partial(self._grid.turn, back=True),
            "/sample/{path:path}": self.sample,
        }
        slow: dict[str, PageMaker] = {
            "/preview/{path:path}": self.preview,
            "/thumb/{path:path}": self.thumbnail,
            "/snippet/{path:path}": self.snippet,
            "/plots": self.plots,
            "/problems": self.problems,
        }
        return [
            *(Route(path, self._answering(answer, self._quick)) for path, answer in quick.items()),
            *(Route(path, self._answering(answer, self._slow)) for path, answer in slow.items()),
            Route("/file/{path:path}", functools.partial(self._downloads.answer, as_media=False)),
            Route("/media/{path:path}", functools.partial(self._downloads.answer, as_media=True)),
            Route("/keys.txt", self._keys),
            Mount("/static", StaticFiles(directory=_HERE / "static")),
        ]

    def _answering(self, answer: PageMaker, limiter: anyio.CapacityLimiter) -> Any:
        async def endpoint(request: Request) -> Response:
            return await anyio.to_thread.run_sync(self._answered, answer, request, limiter=limiter)

        return endpoint

    async def _keys(self, request: Request) -> Response:
        """Return all samples that pass the filter as a list for `--keys`."""
        try:
            filter_ = Filter.of(query_of(request))
            # The first lines before the answer begins, so that an error has a page.
            first = await self._lines(filter_, 0, None)
        except (WdsfsError, OSError) as error:
            return self._refused(error)
        headers = {
            "Content-Security-Policy": MEMBER_POLICY,
            "Content-Disposition": "attachment; filename=keys.txt",
        }
        return Download(self._all_lines(filter_, first), headers=headers, media_type="text/plain")

    async def _all_lines(self, filter_: Filter, first: _Lines) -> AsyncIterator[bytes]:
        yield first.text
        after = first.after
        while after is not None:
            lines = await self._lines(filter_, after, first.version)
            yield lines.text
            after = lines.after

    async def _lines(self, filter_: Filter, at: int, version: tuple[int, int] | None) -> _Lines:
        """Return the next lines of a list. Raises StaleShard if the set is not of this version any more."""

        def question(now: Snapshot) -> _Lines:
            if version not in (None, now.version):
                raise StaleShard("the set has changed while its keys were listed")
            self.table.follow(now)
            if filter_ and not self.table.wait(now, filter_, LIST_SECONDS):
                done, shards = self.table.progress_of(now, filter_)
                raise UsageError(
                    f"{done:,} of {counted(shards, 'shard')} are in the table so far; list them later"
                )
            return _Lines(*self.table.key_lines(now, filter_, at), now.version)

        return await anyio.to_thread.run_sync(self._snapshots.answer, question, limiter=self._slow)

    def _answered(self, answer: PageMaker, request: Request) -> Response:
        """Return the answer of one snapshot of the set, or the page of an error."""
        renewal = self._subject.renewal
        if not request.url.path.startswith(BYTES) and renewal is not None:
            renewal.renew()
        try:
            return self._snapshots.answer(functools.partial(self._asked, answer, request))
        except (WdsfsError, OSError) as error:
            return self._refused(error)

    def _asked(self, answer: PageMaker, request: Request, now: Snapshot) -> Response:
        self.table.follow(now)
        return answer(now, request)

    def _refused(self, error: Exception) -> Response:
        """Return the page of an error."""
        status = 502  # the fault is in the shard, or the disk
        if isinstance(error, StaleShard):
            status = 503  # it changes at this moment
        elif isinstance(error, NoSuchEntry):
            status = 404
        elif isinstance(error, UsageError):
            status = 400
        return self._page("error.html", status, message=text_of(str(error)), is_stale=status == 503)

    def _page(self, template: str, status: int = 200, **values: Any) -> HTMLResponse:
        news = "" if self._subject.renewal is None else self._subject.renewal.news
        text = self._templates.get_template(template).render(news=news, **values)
        return HTMLResponse(text.encode("utf-8", "backslashreplace"), status)

    def _with_source(self, path: bytes, question: Callable[[Source], Value]) -> Value:
        """Return the answer to a question about the bytes of a file. Raises what both raise."""
        return self._snapshots.answer(lambda now: question(now.source(path)))

    # --- one sample

    def sample(self, now: Snapshot, request: Request) -> Response:
        """Return all columns of a sample."""
        path, filter_ = requested_path(request), Filter.of(query_of(request))
        files = sorted(_files(now, path), key=lambda file: _rank(file.name))
        if not files:
            raise NoSuchEntry(f"{text_of(path)}: there is no such sample")
        number = now.number_at(path)
        beside = Neighbours(None, None, None)
        if number is not None:
            self.table.wait(now, filter_, WAIT_SECONDS if filter_ else 0)
            beside = self.table.neighbours(now, filter_, number)
        shard, _, key = path.partition(b"/")
        return self._page(
            "sample.html",
            path=path,
            shard=shard,
            key=key or path,
            files=[(file, path + b"/" + file.name) for file in files],
            place=self._place,
            path_in_mount=self._path_in_mount(path),
            number=number,
            before=None if beside.before is None else f"/go?{filter_.query(number=beside.before)}",
            after=None if beside.after is None else f"/go?{filter_.query(number=beside.after)}",
            results=f"/?{filter_.query(at=(beside.place or 0) // PAGE * PAGE)}" if filter_ else None,
            filter_text=filter_.text,
            class_=key.rpartition(b"/")[0],
        )

    def _path_in_mount(self, path: bytes) -> str:
        """Return the path of a file or sample in a mount, quoted for a shell."""
        return "" if self._place is None else shlex.quote(f"{self._place.top}/{os.fsdecode(path)}")

    def preview(self, now: Snapshot, request: Request) -> Response:
        """Return the preview of one file, for the page of its sample."""
        path = requested_path(request)
        source, name = now.source(path), path.rpartition(b"/")[2]
        preview = self._previewer.preview(os.fsdecode(name), source)
        lines = preview.text.split("\n", LINES)
        origin = now.origin(path)
        return self._page(
            "preview.html",
            path=path,
            name=name,
            preview=preview,
            text="\n".join(lines[:LINES]),
            more=f"{LINES:,} lines are shown; there are more." if any(lines[LINES:]) else "",
            media=PLAYERS.get(suffix(name), "") if source.size else "",
            origin=origin,
            command=_extracting_command(now, path, origin),
            size=source.size,
            path_in_mount=self._path_in_mount(path),
        )

    def thumbnail(self, now: Snapshot, request: Request) -> Response:
        """Return a small picture of a file, drawn again."""
        path = requested_path(request)
        name = os.fsdecode(path.rpartition(b"/")[2])
        picture = self._previewer.thumbnail(name, now.source(path), SIDE)
        if picture is None:
            return PlainTextResponse("There is no picture of this file.", 404)
        # It may be cached: the address has the version of the shard.
        headers = {"Content-Security-Policy": MEMBER_POLICY, "Cache-Control": "private, max-age=3600"}
        return Response(picture.data, media_type=picture.media_type, headers=headers)

    def snippet(self, now: Snapshot, request: Request) -> Response:
        """Return the beginning of a text, for the grid; nothing for a file that is not text."""
        path = requested_path(request)
        source = now.source(path)
        data = source.read(0, min(source.size, SNIPPET))
        if content_of(os.fsdecode(path.rpartition(b"/")[2]), data).decoder == "hex":
            return PlainTextResponse("")
        text, _ = decoded(data, len(data) == source.size)
        lines = (" ".join(line.split()) for line in without_controls(text).split("\n"))
        text = "\n".join(line for line in lines if line) + ("…" if source.size > SNIPPET else "")
        return PlainTextResponse(text.encode("utf-8", "backslashreplace"))

    # --- plots, problems

    def plots(self, now: Snapshot, request: Request) -> Response:
        """Return the samples of each shard, and the counts of the table."""
        progress = self.table.progress(now)  # before the counts: a page of an unfinished table asks again
        plot, charts = plot_shards(_samples_of_shards(now)), self._grid.charts(now)
        return self._page("plots.html", plot=plot, charts=charts, progress=progress)

    def problems(self, now: Snapshot, request: Request) -> Response:
        """Return the shards that are damaged, and the findings of `check`, as far as the index knows."""
        findings = self._findings(now) if wings.is_installed("interop") else []
        return self._page("problems.html", known=now.damaged(), findings=findings, limit=FINDINGS_MAX)

    def _findings(self, now: Snapshot) -> list[tuple[bytes, Any]]:
        """Return the first findings, with names of shards: searched for once in each version of the set."""
        with self._searching:
            if self._known is None or self._known[0] != now.version:
                self._known = now.version, list(itertools.islice(_findings(now), FINDINGS_MAX + 1))
            return self._known[1]


def _picture_url(picture: Picture) -> str:
    return f"data:{picture.media_type};base64,{base64.b64encode(picture.data).decode()}"


def _files(now: Snapshot, path: bytes) -> list[File]:
    try:
        return now.files(path)
    except NotADirectory:
        raise NoSuchEntry(f"{text_of(path)}: is a file, not a sample") from None


def _extracting_command(now: Snapshot, path: bytes, origin: FileOrigin) -> str:
    """Return the command that extracts a file as the page shows it; empty if there is none."""
    if origin.offset is None:
        return ""
    stem = naming.without_suffix(os.path.basename(origin.shard))
    command = ["wdsfs", "cat"]
    if not now.is_view:
        command += [os.fsdecode(origin.shard), os.fsdecode(stem + b"/" + path.partition(b"/")[2])]
        if now.names != "ext":
            command[2:2] = ["--names", now.names]
    else:  # a view, whose names no shard has
        command += ["--layout", "files", os.fsdecode(origin.shard), os.fsdecode(stem + b"/" + origin.member)]
    return f"{shlex.join(command)} > {shlex.quote(os.fsdecode(saved_as(path)))}"


def _rank(name: bytes) -> int:
    """Return the place of a file on the page of its sample: pictures, sound and films come first, arrays next."""
    kind = content_of(os.fsdecode(name), b"").decoder
    return SEEN.index(kind) if kind in SEEN else len(SEEN)


def _findings(now: Snapshot) -> Iterator[tuple[bytes, Any]]:
    """Yield the findings of `check` that records show, with names of shards. Raises StaleShard."""
    rules = wings.load("interop", "judge")
    judge = rules.Judge()
    for number in now.readable:
        shard = now.shards[number]
        lint = now.record(number, rules.lint_record)
        findings = judge.add(os.fsdecode(shard.name), lint, shard.miscount(lint.samples))
        yield from ((shard.name, finding) for finding in findings if finding.kind in SAMPLE_KINDS)
    yield from ((os.fsencode(name), finding) for name, finding in judge.missing())


def _samples_of_shards(now: Snapshot) -> list[int]:
    """Return the number of samples of each shard, or UNREADABLE."""
    readable = set(now.readable)
    return [
        now.first_of(shard + 1) - now.first_of(shard) if shard in readable else UNREADABLE
        for shard in range(len(now.shards))
    ]


BARS_MAX = 120  # neighbouring shards share a bar where there are more
UNREADABLE = -1  # instead of the samples of a shard


class Bar(NamedTuple):
    """A row of a chart: its cells, and the length of its bar, from 0 to 1."""

    cells: tuple[str, ...]
    length: float = 0.0


class Plot(NamedTuple):
    """A chart: its content in words, the names of the columns of its table, and its rows."""

    title: str
    alt: str
    columns: tuple[str, ...] = ()
    bars: tuple[Bar, ...] = ()


def plot_shards(counts: Sequence[int]) -> Plot:
    """Return the samples of each shard, or of neighbours, in the order of the set."""
    title = "Samples by shard"
    samples = np.array(counts, np.int64)
    readable = samples[samples != UNREADABLE]
    if not readable.any():
        return Plot(title, f"There are no samples in {counted(len(samples), 'shard')}.")
    alt = (
        f"{title}: {counted(len(samples), 'shard')} with {readable.min():,} to {readable.max():,} samples, "
        f"{readable.mean():,.0f} on average."
    )
    if len(readable) < len(samples):
        alt += f" {counted(len(samples) - len(readable), 'shard')} cannot be read."
    bars, first = [], 0
    for group in np.array_split(np.maximum(samples, 0), min(len(samples), BARS_MAX)):
        last = first + len(group) - 1
        numbers = f"{first:,}" if last == first else f"{first:,} to {last:,}"
        cells = (numbers, f"{group.min():,}", f"{group.mean():,.1f}", f"{group.max():,}")
        bars.append(Bar(cells, float(group.mean() / readable.max())))
        first = last + 1
    return Plot(title, alt, ("shards", "least samples", "mean", "most samples"), tuple(bars))
