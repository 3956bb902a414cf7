"""The pages, by address. Their contents come from `library.py`, `filters.py`, `edits.py` and so on.

Every answer is made in a thread. Those that wait for the bytes of shards (thumbnails, previews, downloads) have
threads of their own, so that a slow shard never holds up a page.
"""

from __future__ import annotations

import base64
import functools
import logging
import os
import secrets
import shlex
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote_to_bytes

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
from wdsfs.dataset.distributions import Distribution
from wdsfs.errors import EntryExists, NoSuchEntry, ShardError, UsageError, WdsfsError, counted
from wdsfs.index.record import Record
from wdsfs.plots.plots import Plot, plots_of
from wdsfs.previews.preview import Picture, Preview, Source
from wdsfs.previews.previewer import Previewer, draws_videos
from wdsfs.view.downloads import MEDIA, Downloads, inside, path_of, saved_as, suffix, text_of
from wdsfs.view.edits import EDIT_MAX, Edits, digest
from wdsfs.view.filters import Filter, Found, Search
from wdsfs.view.guard import MEMBER_POLICY
from wdsfs.view.json_text import set_field
from wdsfs.view.library import File, Library, Sample
from wdsfs.view.new_samples import NOWHERE
from wdsfs.view.problems import Check, known
from wdsfs.view.renewal import Renewal

PAGE = 60  # samples of a grid
SIDE = 192  # pixels of a thumbnail, at the most
SNIPPET = 200  # bytes of a text that is shown in the grid
FIELDS_MAX = 20  # fields of a form or an address
FORM_MAX = 4 * EDIT_MAX  # bytes of a form: each byte of a text may take three
SHARDS_MAX = 500  # shards that are offered for the filter
CHANGES_MAX = 500  # changed samples that are listed
QUICK, SLOW = 8, 12  # threads that ask the set, and threads that wait for bytes
SEED_MAX = 1 << 31

# Extensions of files for a thumbnail, the best first; and of those short enough for a caption.
PICTURES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm", "avif", "npy", "npz")
VIDEOS = ("mp4", "m4v", "mov", "webm", "mkv", "ogv", "avi", "mpg")
CAPTIONS = ("cls", "txt", "text", "caption", "label", "json")

BYTES = ("/preview/", "/thumb/", "/snippet/")  # what is asked for by path, and may wait for a slow shard

log = logging.getLogger("wdsfs")

_HERE = Path(__file__).parent

Answer = Callable[["Pages", Request], Response]


def size_text(size: int) -> str:
    """A number of bytes for people."""
    if size < 1000:
        return f"{size} bytes"
    amount = float(size)
    for unit in ("kB", "MB", "GB", "TB"):
        amount /= 1000
        if amount < 999.5 or unit == "TB":
            break
    return f"{amount:.3g} {unit}" if amount < 999.5 else f"{amount:,.0f} {unit}"


def _data_address(picture: Picture) -> str:
    return f"data:{picture.media_type};base64,{base64.b64encode(picture.data).decode()}"


class Pages:
    """The pages over a set. `title` names it; `edits` are the changes of an overlay, if there is one.

    `note` is shown on every page: what is special about this view of the set. `renewal` has the set grow.
    """

    def __init__(
        self,
        library: Library,
        title: str,
        edits: Edits | None = None,
        note: str = "",
        renewal: Renewal | None = None,
    ) -> None:
        self.library, self.edits, self._renewal = library, edits, renewal
        self._turn, self._answering_now = threading.Lock(), 0  # answers that go by the numbers of samples
        self.search = Search(library, self.source, (lambda: ()) if edits is None else edits.new_samples)
        self.check = Check(library)
        self.previewer = Previewer()
        self._quick, self._slow = anyio.CapacityLimiter(QUICK), anyio.CapacityLimiter(SLOW)
        self._plots: tuple[tuple[int, int], list[Plot]] = (-1, -1), []
        self._plotting = threading.Lock()  # once for all who ask meanwhile
        # Browsers keep thumbnails, and the next server may have another set at the same port.
        self._run = secrets.token_hex(4)
        self._downloads = Downloads(self.source, self._slow, self._refused)
        loader = jinja2.FileSystemLoader(_HERE / "templates")
        self._templates = jinja2.Environment(
            loader=loader, autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
        )
        self._templates.filters.update(
            markup=markupsafe.Markup, text=text_of, size=size_text, path=quote, picture=_data_address
        )
        self._templates.globals.update(title=title, note=note, editable=edits is not None, counted=counted)
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
        forms: dict[str, Callable[[Pages, Mapping[str, str]], Response]] = {
            "/check": Pages.begin_check,
            "/edit": Pages.edit,
            "/field": Pages.field,
            "/remove": Pages.remove,
            "/restore": Pages.restore,
            "/undo": Pages.undo,
        }
        routes: list[Route | Mount] = [
            Route(path, self._answering(answer, self._quick)) for path, answer in quick.items()
        ]
        routes += [Route(path, self._answering(answer, self._slow)) for path, answer in slow.items()]
        routes += [Route(path, self._receiving(answer), methods=["POST"]) for path, answer in forms.items()]
        routes += [
            Route("/file/{path:path}", functools.partial(self._downloads.answer, as_media=False)),
            Route("/media/{path:path}", functools.partial(self._downloads.answer, as_media=True)),
            Mount("/static", StaticFiles(directory=_HERE / "static")),
        ]
        return routes

    def _answering(self, answer: Answer, limiter: anyio.CapacityLimiter) -> Any:
        async def endpoint(request: Request) -> Response:
            work = functools.partial(answer, self, request)
            if not request.url.path.startswith(BYTES):
                work = functools.partial(self._in_one_set, work)
            reads = answer in (Pages.grid, Pages.random) and "column" in request.query_params
            limiter_now = self._slow if reads else limiter
            return await anyio.to_thread.run_sync(functools.partial(self._guarded, work), limiter=limiter_now)

        return endpoint

    def _receiving(self, answer: Callable[[Pages, Mapping[str, str]], Response]) -> Any:
        async def endpoint(request: Request) -> Response:
            body = bytearray()
            async for part in request.stream():
                body += part
                if len(body) > FORM_MAX:
                    return PlainTextResponse("This form is too large.", 413)
            work = functools.partial(self._guarded, lambda: answer(self, _fields(bytes(body))))
            return await anyio.to_thread.run_sync(work, limiter=self._quick)

        return endpoint

    def _in_one_set(self, work: Callable[[], Response]) -> Response:
        """The answer over one set: while it is made, no number stands for another sample."""
        with self._turn:
            if self._renewal is not None and not self._answering_now and self._renewal.look():
                self.check.stop()
                self.check = Check(self.library)
            self._answering_now += 1
        try:
            return work()
        finally:
            with self._turn:
                self._answering_now -= 1

    def _guarded(self, work: Callable[[], Response]) -> Response:
        """The answer, or a page that says what is wrong."""
        try:
            return work()
        except (WdsfsError, OSError) as error:
            return self._refused(error)

    def _refused(self, error: Exception) -> Response:
        """The page that says what is wrong."""
        status = 404 if isinstance(error, NoSuchEntry) else 409 if isinstance(error, EntryExists) else 400
        if not isinstance(error, NoSuchEntry | EntryExists | UsageError):
            status = 502  # the fault is in the shard, or the disk
        return self._page("error.html", status, message=text_of(str(error)))

    def _page(self, template: str, status: int = 200, **values: Any) -> HTMLResponse:
        undoable = self.edits.undoable if self.edits is not None else None
        news = "" if self._renewal is None else self._renewal.text
        text = self._templates.get_template(template).render(undoable=undoable, news=news, **values)
        return HTMLResponse(text.encode("utf-8", "backslashreplace"), status)

    # --- files as they are now: with the changes of the overlay

    def source(self, path: bytes) -> Source:
        """The bytes of a file. Raises EntryError, ShardError, OSError."""
        if self.edits is None or self._mark(path) == "removed":
            return self.library.source(path)
        return self.edits.files.source(path)

    def _files(self, path: bytes) -> list[File]:
        if self.edits is None or self._mark(path) == "removed":
            return self.library.files(path)
        return self.edits.files.list(path)

    def _mark(self, path: bytes) -> str:
        return "" if self.edits is None else self.edits.mark(path)

    # --- the grid

    def grid(self, request: Request) -> Response:
        """Samples in the order of the set, those that pass the filter."""
        query = _query(request)
        wanted, at = Filter.of(query), _number(query.get("at", "0"))
        found = self.search.find(wanted, at if "at" in query else None, PAGE)
        more = None if found.after is None else f"/?{wanted.query(at=found.after)}"
        back = None
        if not wanted and at:
            back = f"/?{wanted.query(at=max(at - PAGE, 0))}"
        elif at:
            back = f"/?{wanted.query()}"
        return self._grid(wanted, found, at=at, more=more, back=back, seed=None)

    def random(self, request: Request) -> Response:
        """A random sample of the set, or of what passes the filter; the same one for the same seed."""
        query = _query(request)
        wanted, after = Filter.of(query), _number(query.get("after", "0"))
        seed = _number(query.get("seed", "0")) % SEED_MAX
        found = self.search.draw(wanted, seed, after, PAGE)
        more = None if found.after is None else f"/random?{wanted.query(seed=seed, after=found.after)}"
        back = f"/random?{wanted.query(seed=seed)}" if after else None
        return self._grid(wanted, found, at=after, more=more, back=back, seed=seed)

    def _grid(self, wanted: Filter, found: Found, **values: Any) -> Response:
        shards = self.library.shard_names
        return self._page(
            "grid.html",
            wanted=wanted.fields(),
            query=wanted.query(),
            cards=[_card(sample, self._mark(sample.path), self._version(sample)) for sample in found.samples],
            found=found,
            total=self.library.total + len(self.search.new()),
            new_count=len(self.search.new()),
            shards=shards if len(shards) <= SHARDS_MAX else [],
            shard_count=len(shards),
            next_seed=((values["seed"] or 0) + 1) % SEED_MAX,
            **values,
        )

    def _version(self, sample: Sample) -> str:
        """A text for the addresses of thumbnails: another one after a change of the shard."""
        return f"{self._run}-{self.library.lower.tag(sample.shard) if sample.shard != NOWHERE else 0}"

    def go(self, request: Request) -> Response:
        """To the sample with a number."""
        sample = self.library.sample(_number(_query(request).get("number", "0")))
        return RedirectResponse(f"/sample/{quote(sample.path)}", 303)

    # --- one sample

    def sample(self, request: Request) -> Response:
        """All columns of a sample."""
        path = path_of(request)
        mark = self._mark(path)
        files = self._files(path)
        if not files:
            raise NoSuchEntry(f"{text_of(path)}: there is no such sample")
        number, total = self.library.number_at(path), self.library.total
        return self._page(
            "sample.html",
            path=path,
            shard=path.partition(b"/")[0],
            key=path.partition(b"/")[2] or path,
            files=[(file, path + b"/" + file.name, self._mark(path + b"/" + file.name)) for file in files],
            mark=mark,
            can_restore=self.edits is not None and not self.edits.lasting,
            number=number,
            before=number - 1 if number else None,
            after=number + 1 if number is not None and number + 1 < total else None,
            class_=path.partition(b"/")[2].rpartition(b"/")[0],
        )

    def preview(self, request: Request) -> Response:
        """The preview of one file, for the page of its sample."""
        path = path_of(request)
        source = self.source(path)
        name = path.rpartition(b"/")[2]
        found: Preview = self.previewer.preview(os.fsdecode(name), source)
        mark = self._mark(path)
        media = MEDIA.get(suffix(name), "") if found.media_type else ""
        return self._page(
            "preview.html",
            path=path,
            name=name,
            preview=found,
            media=media,
            origin=self._origin(path),
            size=source.size,
            form=None if self.edits is None or mark == "removed" else _form(source),
        )

    def _origin(self, path: bytes) -> dict[str, Any] | None:
        """Where a file lies in a shard, and how to take it out; None for one that only the overlay has."""
        try:
            found = self.library.origin(path)
        except NoSuchEntry:
            return None
        stem = naming.without_suffix(os.path.basename(found.shard))
        command = ["wdsfs", "cat"]
        if self.library.lower.plain is self.library.lower:
            command += [os.fsdecode(found.shard), os.fsdecode(stem + b"/" + path.partition(b"/")[2])]
            if self.library.tree.view.names != "ext":
                command[2:2] = ["--names", self.library.tree.view.names]
        else:  # a view, whose names no shard has
            command += ["--layout", "files", os.fsdecode(found.shard), os.fsdecode(stem + b"/" + found.member)]
        target = shlex.quote(os.fsdecode(saved_as(path)))
        return {"found": found, "command": f"{shlex.join(command)} > {target}" if found.offset is not None else ""}

    def thumbnail(self, request: Request) -> Response:
        """A small picture of a file, drawn anew."""
        path = path_of(request)
        name = os.fsdecode(path.rpartition(b"/")[2])
        picture = self.previewer.thumbnail(name, self.source(path), SIDE)
        if picture is None:
            return PlainTextResponse("There is no picture of this file.", 404)
        headers = {"Content-Security-Policy": MEMBER_POLICY}
        if self.edits is None:
            headers["Cache-Control"] = "private, max-age=3600"  # the address has the version of the shard
        return Response(picture.data, media_type=picture.media_type, headers=headers)

    def snippet(self, request: Request) -> Response:
        """The beginning of a text, for the grid."""
        source = self.source(path_of(request))
        data = source.read(0, min(source.size, SNIPPET))
        text = " ".join(data.decode("utf-8", "replace").split())
        text = naming.shown(text) + ("…" if source.size > SNIPPET else "")
        return PlainTextResponse(text.encode("utf-8", "backslashreplace"))

    # --- plots and problems

    def plots(self, request: Request) -> Response:
        """The plots, and their figures as tables."""
        return self._page("plots.html", plots=self._plots_now())

    def _plots_now(self) -> list[Plot]:
        """The plots of the set as it is; one shard after the other, so that other pages get their turn."""
        with self._plotting:
            version, found = self._plots
            with self.library.asking():
                now = self.library.version
            if now != version:
                found = plots_of(self._counted())
                self._plots = now, found
            return found

    def _counted(self) -> Distribution:
        counts = Distribution()
        for number in range(len(self.library.lower)):
            try:
                self.library.record(number, functools.partial(_count, counts))
            except ShardError:
                counts.add_unreadable()
        return counts

    def problems(self, request: Request) -> Response:
        """What is wrong with the set."""
        shards = self.library.shard_names
        return self._page(
            "problems.html",
            known=known(self.library),
            check=self.check,
            problems=self.check.problems[:],
            shards=shards,
            total=len(shards),
        )

    def begin_check(self, form: Mapping[str, str]) -> Response:
        """Look for problems in all shards."""
        self.check.begin()
        return RedirectResponse("/problems", 303)

    # --- changes

    def _edits(self) -> Edits:
        if self.edits is None:
            raise UsageError("nothing can be changed here: start `wdsfs view` with --overlay DIR")
        return self.edits

    def changes(self, request: Request) -> Response:
        """What the overlay changes, as `wdsfs diff` shows it."""
        edits = self._edits()
        found = edits.changes()
        remarks = [("conflict", found.conflicts), ("cannot be packed", found.unpackable)]
        remarks += [("left behind", found.leavings), ("note", found.notes)]
        samples = [*found.samples, *found.others]
        return self._page(
            "changes.html",
            samples=samples[:CHANGES_MAX],
            count=len(samples),
            remarks=[(word, one) for word, some in remarks for one in some[:CHANGES_MAX]],
            diff=shlex.join(["wdsfs", "diff", *edits.command]),
            commit=shlex.join(["wdsfs", "commit", "-o", "new/%06d.tar", *edits.command]),
            in_place=shlex.join(["wdsfs", "commit", "--in-place", *edits.command]),
            lasting=edits.lasting,
        )

    def edit(self, form: Mapping[str, str]) -> Response:
        """Give a file another text."""
        if "text" not in form and self.edits is not None:
            raise UsageError("this form has no text")
        typed = form.get("text", "").replace("\r\n", "\n")

        def change(now: bytes) -> bytes:
            text = typed.replace("\n", "\r\n") if b"\r\n" in now else typed
            return text.encode("utf-8", "surrogateescape")

        return self._write(form, change)

    def field(self, form: Mapping[str, str]) -> Response:
        """Give a field of a JSON file another value."""

        def change(now: bytes) -> bytes:
            try:
                return set_field(now.decode(), form.get("field", ""), form.get("value", "")).encode()
            except UnicodeError:
                raise UsageError("this is not UTF-8, or would not be") from None

        return self._write(form, change)

    def _write(self, form: Mapping[str, str], change: Callable[[bytes], bytes]) -> Response:
        path = _form_path(form)
        self._edits().write(path, change, form.get("seen", ""))
        sample, _, name = path.rpartition(b"/")
        return RedirectResponse(f"/sample/{quote(sample)}#{quote(name)}", 303)

    def remove(self, form: Mapping[str, str]) -> Response:
        """Delete a sample."""
        path = _form_path(form)
        self._edits().remove(path)
        return RedirectResponse("/changes", 303)

    def restore(self, form: Mapping[str, str]) -> Response:
        """Take back the changes of a sample or a file."""
        self._edits().restore(_form_path(form))
        return RedirectResponse("/changes", 303)

    def undo(self, form: Mapping[str, str]) -> Response:
        """Take back the last change."""
        self._edits().undo(_number(form["number"]) if "number" in form else None)
        return RedirectResponse("/changes", 303)


def _query(request: Request) -> dict[str, str]:
    """The fields of an address. Bytes that are not UTF-8 are kept, as names in shards have them."""
    return _fields(request.scope["query_string"])


def _fields(encoded: bytes) -> dict[str, str]:
    """The fields of a form or an address, the first of each name. Raises UsageError for too many."""
    text = encoded.decode("ascii", "replace")
    try:
        pairs = parse_qsl(text, keep_blank_values=True, errors="surrogateescape", max_num_fields=FIELDS_MAX)
    except ValueError:
        raise UsageError(f"more than {FIELDS_MAX} fields are too many") from None
    return dict(reversed(pairs))


def _card(sample: Sample, mark: str, version: str) -> dict[str, Any]:
    """A sample as the grid shows it."""
    by_suffix: dict[str, int] = {}
    for at, column in enumerate(sample.columns):
        by_suffix.setdefault(suffix(column), at)
    pictures = (*PICTURES, *VIDEOS) if draws_videos() else PICTURES
    picture = next((by_suffix[one] for one in pictures if one in by_suffix), None)
    caption = next((by_suffix[one] for one in CAPTIONS if one in by_suffix), None)
    media = next((one for one in by_suffix if one in MEDIA), None)
    return {
        "sample": sample,
        "key": sample.path.partition(b"/")[2] or sample.path,
        "shard": sample.path.partition(b"/")[0],
        "picture": None if picture is None else sample.path + b"/" + sample.names[picture],
        "caption": None if caption is None else sample.path + b"/" + sample.names[caption],
        "kind": (MEDIA[media].partition("/")[0] if media else ""),
        "mark": mark,
        "version": version,
    }


def _count(counts: Distribution, record: Record) -> None:
    counts.add(record)
    counts.add_classes(record)


def _form(source: Source) -> dict[str, Any] | None:
    """The fields of a form that edits a file as text; None if it is not text, or too long for a page."""
    if source.size > EDIT_MAX:
        return None
    data = source.read(0, source.size)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    lines = data.replace(b"\r\n", b"")
    if "\0" in text or b"\r" in lines or (b"\r\n" in data and b"\n" in lines):
        return None  # a form would change it
    return {"text": text.replace("\r\n", "\n"), "seen": digest(data), "is_json": text.lstrip()[:1] in ("{", "[")}


def _form_path(form: Mapping[str, str]) -> bytes:
    return inside(unquote_to_bytes(form.get("path", "")))


def _number(text: str) -> int:
    """A number in an address. Raises UsageError."""
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise UsageError("a number is expected here")
    return int(text)
