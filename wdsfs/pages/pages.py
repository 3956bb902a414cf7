"""The pages, by address. Their contents come from `library.py`, `filters.py`, `writable_mount.py` and so on.

Every answer is made in a thread, of one snapshot of the set. Those that wait for the bytes of shards (thumbnails,
previews, downloads) have threads of their own, so that a slow shard never holds up a page.
"""

from __future__ import annotations

import base64
import functools
import logging
import os
import secrets
import shlex
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl, quote

import anyio
import anyio.to_thread
import jinja2
import markupsafe
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from wdsfs import names as naming
from wdsfs.errors import (
    NoSuchEntry,
    NotADirectory,
    StaleShard,
    UsageError,
    WdsfsError,
    bytes_text,
    counted,
    several,
)
from wdsfs.index.record import Record
from wdsfs.pages import plain
from wdsfs.pages.downloads import CHUNK, MEDIA, Downloads, path_of, saved_as, suffix, text_of
from wdsfs.pages.filters import Filter, Found, Pace, Search
from wdsfs.pages.guard import MEMBER_POLICY
from wdsfs.pages.kinds import HEAD, TEXTS, content_of
from wdsfs.pages.library import File, Library, Sample, Snapshot
from wdsfs.pages.plots import Plot, drawn, plots_of
from wdsfs.pages.preview import Picture, Preview, Source
from wdsfs.pages.previewer import Previewer, draws_videos
from wdsfs.pages.problems import Check
from wdsfs.pages.renewal import Renewal
from wdsfs.pages.writable_mount import NOWHERE, WritableMount
from wdsfs.tree.distributions import Distribution

PAGE = 60  # samples of a grid
COLUMNS = 50  # of a set that are listed where a filter names another one
SIDE = 192  # pixels of a thumbnail, at the most
SNIPPET = 600  # bytes of a text that is shown in the grid
LINES = 2000  # of a text that a page shows: a browser takes seconds for 100,000
COUNTED_MAX = 4 << 20  # bytes of a text whose lines are counted
FIELDS_MAX = 20  # fields of an address
SHARDS_MAX = 500  # shards that are offered for the filter
CHANGES_MAX = 500  # changed samples that are listed
QUICK, SLOW = 8, 12  # threads that ask the set, and threads that wait for bytes
SEED_MAX = 1 << 31
TURNS_MAX = 120  # how often a search goes on by itself, some seconds each

# Extensions of files for a thumbnail, the best first; of labels; and of what a tile shows the beginning of.
PICTURES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm", "avif", "npy", "npz")
VIDEOS = ("mp4", "m4v", "mov", "webm", "mkv", "ogv", "avi", "mpg")
LABELS = ("cls", "label", "class", "labels")
BEGINNINGS = ("txt", "transcript", "caption", "text", *sorted(TEXTS), "json", "jsonl", "csv", "tsv", *LABELS)

# Decoders whose files come first on the page of a sample.
SEEN = ("picture", "video", "audio", "array", "arrays")

SEARCHES = ("/", "/random", "/next", "/previous")  # which read files where values are looked for
BYTES = ("/preview/", "/thumb/", "/snippet/")  # what is asked for by path, and may wait for a slow shard

log = logging.getLogger("wdsfs")

_HERE = Path(__file__).parent

Answer = Callable[["Pages", Snapshot, Request], Response]
Value = TypeVar("Value")


def _data_address(picture: Picture) -> str:
    return _data_url(picture.media_type, picture.data)


def _data_url(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


class Place(NamedTuple):
    """Where the samples of the pages can be changed: in the directory `top`, once `command` has been typed."""

    top: str
    command: str


class Pages:
    """The pages over a set. `title` names it; `mount` is the writable mount that shows it, if there is one.

    `place` tells where samples can be changed, None where they have other paths than here. `note` is shown on
    every page: what is special about this view of the set. `renewal` keeps a set that grows up to date.
    """

    def __init__(
        self,
        library: Library,
        title: str,
        mount: WritableMount | None = None,
        place: Place | None = None,
        note: str = "",
        renewal: Renewal | None = None,
    ) -> None:
        self.library, self._mount, self._place, self._renewal = library, mount, place, renewal
        self.search = Search(self.source, self._new_samples)
        self.check = Check(library)
        self.previewer = Previewer()
        self._quick, self._slow = anyio.CapacityLimiter(QUICK), anyio.CapacityLimiter(SLOW)
        self._plots: tuple[tuple[int, int], list[tuple[Plot, str]]] = (-1, -1), []
        self._plotting = threading.Lock()  # once for all who ask meanwhile
        # Browsers keep thumbnails, and the next server may have another set at the same port.
        self._run = secrets.token_hex(4)
        self._downloads = Downloads(self._with_source, self._slow, self._refused)
        loader = jinja2.FileSystemLoader(_HERE / "templates")
        self._templates = jinja2.Environment(
            loader=loader, autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
        )
        self._templates.filters.update(
            markup=markupsafe.Markup, text=text_of, size=bytes_text, path=quote, picture=_data_address
        )
        self._templates.globals.update(title=title, note=note, has_changes=mount is not None, counted=counted)
        self.app = Starlette(routes=[*self._routes()])

    def close(self) -> None:
        """End the threads and processes."""
        self.check.stop()
        self.previewer.close()

    def _routes(self) -> list[Route | Mount]:
        quick: dict[str, Answer] = {
            "/": Pages.grid,
            "/random": Pages.random,
            "/go": Pages.go,
            "/next": functools.partial(Pages.turn, back=False),
            "/previous": functools.partial(Pages.turn, back=True),
            "/sample/{path:path}": Pages.sample,
            "/problems": Pages.problems,
            "/changes": Pages.changes,
        }
        slow: dict[str, Answer] = {
            "/preview/{path:path}": Pages.preview,
            "/thumb/{path:path}": Pages.thumbnail,
            "/snippet/{path:path}": Pages.snippet,
            "/plots": Pages.plots,
        }
        routes: list[Route | Mount] = [
            Route(path, self._answering(answer, self._quick)) for path, answer in quick.items()
        ]
        routes += [Route(path, self._answering(answer, self._slow)) for path, answer in slow.items()]
        routes += [
            Route("/check", self.begin_check, methods=["POST"]),
            Route("/file/{path:path}", functools.partial(self._downloads.answer, as_media=False)),
            Route("/media/{path:path}", functools.partial(self._downloads.answer, as_media=True)),
            Mount("/static", StaticFiles(directory=_HERE / "static")),
        ]
        return routes

    def _answering(self, answer: Answer, limiter: anyio.CapacityLimiter) -> Any:
        async def endpoint(request: Request) -> Response:
            work = functools.partial(self._answered, answer, request)
            reads = request.url.path in SEARCHES and request.query_params.get("column")
            request.state.gone = threading.Event()
            async with anyio.create_task_group() as waiting:
                waiting.start_soon(_wait_for_the_end, request)
                response = await anyio.to_thread.run_sync(work, limiter=self._slow if reads else limiter)
                waiting.cancel_scope.cancel()
            return response

        return endpoint

    def _answered(self, answer: Answer, request: Request) -> Response:
        """The answer of one snapshot of the set, or a page that says what is wrong."""
        if not request.url.path.startswith(BYTES) and self._renewal is not None and self._renewal.look():
            self.check.stop()
            self.check = Check(self.library)
        return self._guarded(lambda: self.library.answer(lambda now: answer(self, now, request)))

    def _guarded(self, work: Callable[[], Response]) -> Response:
        """The answer, or a page that says what is wrong."""
        try:
            return work()
        except (WdsfsError, OSError) as error:
            return self._refused(error)

    def _refused(self, error: Exception) -> Response:
        """The page that says what is wrong."""
        status = 404 if isinstance(error, NoSuchEntry) else 400
        if not isinstance(error, NoSuchEntry | UsageError):
            status = 502  # the fault is in the shard, or the disk
        if isinstance(error, StaleShard):
            status = 503  # it changes at this moment
        return self._page("error.html", status, message=text_of(str(error)), is_stale=status == 503)

    def _page(self, template: str, status: int = 200, **values: Any) -> HTMLResponse:
        news = "" if self._renewal is None else self._renewal.text
        text = self._templates.get_template(template).render(news=news, **values)
        return HTMLResponse(text.encode("utf-8", "backslashreplace"), status)

    # --- files as they are now: with the changes of the overlay

    def source(self, now: Snapshot, path: bytes) -> Source:
        """The bytes of a file. Raises EntryError, ShardError, OSError."""
        if self._mount is None or self._mark(path) == "removed":
            return now.source(path)
        return self._mount.source(path)

    def _with_source(self, path: bytes, question: Callable[[Source], Value]) -> Value:
        """The answer to a question about the bytes of a file. Raises what `source` raises, and the question."""
        return self.library.answer(lambda now: question(self.source(now, path)))

    def _files(self, now: Snapshot, path: bytes) -> list[File]:
        try:
            if self._mount is None or self._mark(path) == "removed":
                return now.files(path)
            return self._mount.files(path)
        except (NotADirectory, NotADirectoryError):
            raise NoSuchEntry(f"{text_of(path)}: is a file, no sample") from None

    def _mark(self, path: bytes) -> str:
        return "" if self._mount is None else self._mount.mark(path)

    def _new_samples(self) -> Sequence[Sample]:
        return () if self._mount is None else self._mount.new_samples()

    # --- the grid

    def grid(self, now: Snapshot, request: Request) -> Response:
        """Samples in the order of the set, those that pass the filter."""
        query = _query(request)
        wanted, piece = Filter.of(query), _Piece.of(query, "at")
        objection = self._objection(wanted, now, piece)
        after = piece.at if "at" in query else None
        found = objection.found or self.search.find(wanted, now, after, piece.room, _pace(request))
        back = None
        if piece.start:
            back = f"/?{wanted.query()}" if wanted else f"/?at={max(piece.start - PAGE, 0)}"
        return self._grid(wanted, now, found, piece, objection.notes, page="/", back=back, seed=None)

    def random(self, now: Snapshot, request: Request) -> Response:
        """A random sample of the set, or of what passes the filter; the same one for the same seed."""
        query = _query(request)
        wanted, piece = Filter.of(query), _Piece.of(query, "after")
        seed = _number(query.get("seed", "0")) % SEED_MAX
        objection = self._objection(wanted, now, piece)
        found = objection.found or self.search.draw(wanted, now, seed, piece.at, piece.room, _pace(request))
        back = f"/random?{wanted.query(seed=seed)}" if piece.start else None
        return self._grid(wanted, now, found, piece, objection.notes, page="/random", back=back, seed=seed)

    def _objection(self, wanted: Filter, now: Snapshot, piece: _Piece) -> _Objection:
        """The faults of a filter that show without a search."""
        if wanted.value and not wanted.column:
            return _Objection(["A value is looked for in a column: type its name, too."], Found([], None, 1.0, 0))
        unknown = self.search.unknown(wanted, now, Pace()) if not piece.turn else None
        if unknown is None:
            return _Objection([], None)
        missing, known = (several([text_of(name) for name in names], COLUMNS) for names in unknown)
        note = f"No sample has a column {missing}. Columns of this set: {known or 'none'}."
        return _Objection([note], Found([], None, 1.0, 0) if wanted.needs(unknown.missing) else None)

    def _grid(
        self, wanted: Filter, now: Snapshot, found: Found, piece: _Piece, notes: list[str], **values: Any
    ) -> Response:
        new_count, shards = len(self.search.new()), [shard.name for shard in now.shards]
        total, seed = now.total + new_count, values["seed"]
        fields = {} if seed is None else {"seed": seed}
        more = on = None
        if found.after is not None:
            more = f"{values['page']}?{wanted.query(**fields, **{piece.name: found.after})}"
            on = piece.further(more, found)
        return self._page(
            "grid.html",
            wanted=wanted.fields(),
            query=wanted.query(),
            cards=[_card(sample, self._mark(sample.path), self._version(now, sample)) for sample in found.samples],
            notes=notes,
            have=piece.have + len(found.samples),
            unread=piece.unread + found.unread,
            start=piece.start,
            looked=max(round(found.progress * total) - (piece.start if seed is None else 0), 0),
            progress=found.progress,
            more=more,
            on=on,
            total=total,
            new_count=new_count,
            unreadable=len(shards) - sum(1 for _ in now.readable),
            shards=shards if len(shards) <= SHARDS_MAX else [],
            shard_count=len(shards),
            next_seed=((seed or 0) + 1) % SEED_MAX,
            page_size=PAGE,
            **values,
        )

    def _version(self, now: Snapshot, sample: Sample) -> str:
        """A text for the addresses of thumbnails: another one after a change of the shard."""
        tag = 0 if sample.shard == NOWHERE else now.version_of(sample.shard)[2]
        return f"{self._run}-{tag}"

    def go(self, now: Snapshot, request: Request) -> Response:
        """To the sample with a number."""
        query = _query(request)
        return _to_sample(now.sample(_number(query.get("number", "0"))), Filter.of(query))

    def turn(self, now: Snapshot, request: Request, back: bool) -> Response:
        """To the next sample that passes the filter, or to the previous one."""
        query = _query(request)
        wanted, number, turn = Filter.of(query), *(_number(query.get(name, "0")) for name in ("number", "turn"))
        found = self.search.next(wanted, now, number, back, _pace(request))
        if found.samples:
            return _to_sample(found.samples[0], wanted)
        if found.after is None:
            raise NoSuchEntry(f"no sample {'before' if back else 'after'} this one passes the filter")
        start = _number(query.get("start", str(number)))
        page = "/previous" if back else "/next"
        return self._page(
            "turn.html",
            back=back,
            found=found,
            wanted=wanted.query(),
            start=start,
            looked=abs(found.after - start),
            more=f"{page}?{wanted.query(number=found.after, start=start, turn=turn + 1)}",
            is_going=turn < TURNS_MAX,
        )

    # --- one sample

    def sample(self, now: Snapshot, request: Request) -> Response:
        """All columns of a sample."""
        path, wanted = path_of(request), Filter.of(_query(request))
        mark = self._mark(path)
        files = sorted(self._files(now, path), key=lambda file: _rank(file.name))
        if not files:
            raise NoSuchEntry(f"{text_of(path)}: there is no such sample")
        number = now.number_at(path)
        before = after = None
        if number is not None and wanted:
            before, after = f"/previous?{wanted.query(number=number)}", f"/next?{wanted.query(number=number)}"
        elif number is not None:
            before, after = f"/go?number={number - 1}", f"/go?number={number + 1}"
        return self._page(
            "sample.html",
            path=path,
            shard=path.partition(b"/")[0],
            key=path.partition(b"/")[2] or path,
            files=[(file, path + b"/" + file.name, self._mark(path + b"/" + file.name)) for file in files],
            mark=mark,
            place=self._place,
            path_in_mount=self._mount_path(path),
            number=number,
            before=before if number else None,
            after=after if number is not None and number + 1 < now.total else None,
            results=f"/?{wanted.query(at=number or 0)}" if wanted else None,
            filter_text=wanted.text,
            class_=path.partition(b"/")[2].rpartition(b"/")[0],
        )

    def preview(self, now: Snapshot, request: Request) -> Response:
        """The preview of one file, for the page of its sample."""
        path = path_of(request)
        source = self.source(now, path)
        name = path.rpartition(b"/")[2]
        found: Preview = self.previewer.preview(os.fsdecode(name), source)
        text, more = _bounded(found, name, source)
        media = MEDIA.get(suffix(name), "") if found.media_type else ""
        return self._page(
            "preview.html",
            path=path,
            name=name,
            preview=found,
            text=text,
            more=more,
            media=media,
            origin=self._origin(now, path),
            size=source.size,
            place=self._mount_path(path),
        )

    def _mount_path(self, path: bytes) -> str:
        """The path of a file or sample in a mount, as it is typed."""
        return "" if self._place is None else shlex.quote(f"{self._place.top}/{os.fsdecode(path)}")

    def _origin(self, now: Snapshot, path: bytes) -> dict[str, Any] | None:
        """Where a file lies in a shard, and how to take it out; None for one that only the overlay has."""
        try:
            found = now.origin(path)
        except NoSuchEntry:
            return None
        stem = naming.without_suffix(os.path.basename(found.shard))
        command = ["wdsfs", "cat"]
        if not now.is_view:
            command += [os.fsdecode(found.shard), os.fsdecode(stem + b"/" + path.partition(b"/")[2])]
            if now.names != "ext":
                command[2:2] = ["--names", now.names]
        else:  # a view, whose names no shard has
            command += ["--layout", "files", os.fsdecode(found.shard), os.fsdecode(stem + b"/" + found.member)]
        target = shlex.quote(os.fsdecode(saved_as(path)))
        return {"found": found, "command": f"{shlex.join(command)} > {target}" if found.offset is not None else ""}

    def thumbnail(self, now: Snapshot, request: Request) -> Response:
        """A small picture of a file, drawn anew."""
        path = path_of(request)
        name = os.fsdecode(path.rpartition(b"/")[2])
        picture = self.previewer.thumbnail(name, self.source(now, path), SIDE)
        if picture is None:
            return PlainTextResponse("There is no picture of this file.", 404)
        headers = {"Content-Security-Policy": MEMBER_POLICY}
        if self._mount is None:
            headers["Cache-Control"] = "private, max-age=3600"  # the address has the version of the shard
        return Response(picture.data, media_type=picture.media_type, headers=headers)

    def snippet(self, now: Snapshot, request: Request) -> Response:
        """The beginning of a text, for the grid; nothing of what is no text."""
        path = path_of(request)
        source = self.source(now, path)
        data = source.read(0, min(source.size, SNIPPET))
        content = content_of(os.fsdecode(path.rpartition(b"/")[2]), data)
        if content.decoder == "hex":
            return PlainTextResponse("")
        text, _ = plain.decoded(data, len(data) == source.size)
        lines = (" ".join(line.split()) for line in plain.readable(text).split("\n"))
        text = "\n".join(line for line in lines if line) + ("…" if source.size > SNIPPET else "")
        return PlainTextResponse(text.encode("utf-8", "backslashreplace"))

    # --- plots and problems

    def plots(self, now: Snapshot, request: Request) -> Response:
        """The plots, and their figures as tables."""
        return self._page("plots.html", plots=self._plots_of(now))

    def _plots_of(self, now: Snapshot) -> list[tuple[Plot, str]]:
        """The plots of the set, each with its picture as a URL; other pages get their turn between shards."""
        with self._plotting:
            version, plots = self._plots
            if now.version != version:
                plots = [
                    (plot, _data_url("image/svg+xml", drawn([plot], "svg"))) for plot in plots_of(_counted(now))
                ]
                self._plots = now.version, plots
            return plots

    def problems(self, now: Snapshot, request: Request) -> Response:
        """What is wrong with the set."""
        check = self.check
        return self._page(
            "problems.html",
            known=now.damaged(),
            check=check,
            problems=check.problems[:],
            total=len(now.shards),
        )

    async def begin_check(self, request: Request) -> Response:
        """Look for problems in all shards."""
        self.check.begin()
        return RedirectResponse("/problems", 303)

    # --- changes

    def changes(self, now: Snapshot, request: Request) -> Response:
        """The changes of the overlay, as `wdsfs diff` shows them."""
        if self._mount is None:
            raise UsageError("only a mount that was made with --overlay DIR has changes")
        changes = self._mount.changes()
        remarks = [("conflict", changes.conflicts), ("cannot be packed", changes.unpackable)]
        remarks += [("left behind", changes.leavings), ("note", changes.notes)]
        samples = [*changes.samples, *changes.others]
        return self._page(
            "changes.html",
            samples=samples[:CHANGES_MAX],
            count=len(samples),
            remarks=[(word, remark) for word, some in remarks for remark in some[:CHANGES_MAX]],
            mountpoint=shlex.quote(self._mount.mountpoint),
        )


def _query(request: Request) -> dict[str, str]:
    """The fields of an address, the first of each name. Raises UsageError for too many.

    Bytes that are not UTF-8 are kept, as names in shards have them.
    """
    text = request.scope["query_string"].decode("ascii", "replace")
    try:
        pairs = parse_qsl(text, keep_blank_values=True, errors="surrogateescape", max_num_fields=FIELDS_MAX)
    except ValueError:
        raise UsageError(f"more than {FIELDS_MAX} fields are too many") from None
    return dict(reversed(pairs))


class _Piece(NamedTuple):
    """The part of a page of the grid that an answer makes. A search that takes long makes a page piece by piece.

    `name` is the field that says where it begins, which is `at`; the page begins at `start`, and has `have`
    samples so far, after `turn` pieces in which `unread` files could not be read.
    """

    name: str
    at: int
    start: int
    have: int
    unread: int
    turn: int

    @classmethod
    def of(cls, query: Mapping[str, str], name: str) -> _Piece:
        """The piece that an address asks for. Raises UsageError."""
        at, have, unread, turn = (_number(query.get(field, "0")) for field in (name, "have", "unread", "turn"))
        return cls(name, at, _number(query.get("start", str(at))), min(have, PAGE - 1), unread, turn)

    @property
    def room(self) -> int:
        """The number of samples that the page has room for."""
        return PAGE - self.have

    def further(self, more: str, found: Found) -> str | None:
        """The address of the next piece, which begins as `more`; None if the page is full, or has had its time."""
        have = self.have + len(found.samples)
        if have >= PAGE or self.turn >= TURNS_MAX:
            return None
        unread = self.unread + found.unread
        return f"{more}&have={have}&unread={unread}&start={self.start}&turn={self.turn + 1}"


class _Objection(NamedTuple):
    """Faults of a filter, in sentences; `found` is the empty answer where no search is needed."""

    notes: list[str]
    found: Found | None


async def _wait_for_the_end(request: Request) -> None:
    """Note that nobody waits for the answer any more, when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    request.state.gone.set()


def _pace(request: Request) -> Pace:
    """The time that the answer to a request may take."""
    return Pace(request.state.gone.is_set)


def _bounded(preview: Preview, name: bytes, source: Source) -> tuple[str, str]:
    """The first lines of the text of a preview, and what is said of the others."""
    lines = preview.text.split("\n", LINES)
    if len(lines) <= LINES or not lines[LINES]:
        return preview.text, ""
    count = _count_lines(name, source)
    rest = "there are more" if count is None else f"the file has {counted(count - LINES, 'more line')}"
    return "\n".join(lines[:LINES]), f"{LINES:,} lines are shown; {rest}."


def _count_lines(name: bytes, source: Source) -> int | None:
    """The number of lines of a text; None where counting takes too long, or its bytes do not show them."""
    if source.size > COUNTED_MAX or content_of(os.fsdecode(name), source.read(0, HEAD)).decoder != "text":
        return None
    if source.read(0, 2) in plain.UTF_16:
        return None
    ends = sum(source.read(at, CHUNK).count(b"\n") for at in range(0, source.size, CHUNK))
    return ends + (source.read(source.size - 1, 1) != b"\n")


def _rank(name: bytes) -> int:
    """The place of a file on the page of its sample: what is seen or heard comes first, arrays next."""
    kind = content_of(os.fsdecode(name), b"").decoder
    return SEEN.index(kind) if kind in SEEN else len(SEEN)


def _card(sample: Sample, mark: str, version: str) -> dict[str, Any]:
    """A sample as the grid shows it."""
    by_suffix: dict[str, int] = {}
    for at, column in enumerate(sample.columns):
        by_suffix.setdefault(suffix(column), at)

    def path_of_first(suffixes: Iterable[str]) -> bytes | None:
        at = next((by_suffix[one] for one in suffixes if one in by_suffix), None)
        return None if at is None else sample.path + b"/" + sample.names[at]

    picture = path_of_first((*PICTURES, *VIDEOS) if draws_videos() else PICTURES)
    sound = path_of_first(one for one in by_suffix if MEDIA.get(one, "").startswith("audio/"))
    text = path_of_first(BEGINNINGS) or path_of_first(
        one for one in by_suffix if content_of(one, b"").decoder == "hex"
    )
    label = path_of_first(LABELS)
    return {
        "sample": sample,
        "key": sample.path.partition(b"/")[2] or sample.path,
        "shard": sample.path.partition(b"/")[0],
        "picture": picture,
        "sound": None if picture else sound,
        "text": None if picture else text,
        "caption": (label or text) if picture else label if label != text else None,
        "kind": next(iter(by_suffix), "…"),
        "mark": mark,
        "version": version,
    }


def _to_sample(sample: Sample, wanted: Filter) -> Response:
    """To the page of a sample, which leads to others that pass the filter."""
    return RedirectResponse(f"/sample/{quote(sample.path)}{'?' if wanted else ''}{wanted.query()}", 303)


def _counted(now: Snapshot) -> Distribution:
    """The figures for plots. Raises StaleShard."""
    counts = Distribution()
    readable = set(now.readable)
    for number in range(len(now.shards)):
        if number in readable:
            now.record(number, functools.partial(_count, counts))
        else:
            counts.add_unreadable()
    return counts


def _count(counts: Distribution, record: Record) -> None:
    counts.add(record)
    counts.add_classes(record)


def _number(text: str) -> int:
    """A number in an address. Raises UsageError."""
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise UsageError("a number is expected here")
    return int(text)
