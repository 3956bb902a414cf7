"""The pages that lead to samples: the grid, random samples, and the next one that passes a filter.

A search that takes long makes a page piece by piece: each answer says where the next one goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from wdsfs.errors import NoSuchEntry, UsageError, several
from wdsfs.pages.downloads import suffix, text_of
from wdsfs.pages.filters import Filter, Masks, Pace, Search, SearchResult, unknown_columns
from wdsfs.pages.preview import PLAYERS, TEXTS, content_of
from wdsfs.pages.shown_set import Sample, Snapshot

PAGE = 60  # samples of a grid
COLUMNS = 50  # of a set that are listed where a filter names another one
FIELDS_MAX = 20  # fields of an address
SHARDS_MAX = 500  # shards that are offered for the filter
SEED_MAX = 1 << 31
TURNS_MAX = 120  # how often a search goes on by itself, some seconds each

# Extensions of files for a thumbnail, the best first; of labels; and of texts whose beginning a tile shows.
PICTURES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm", "avif", "npy", "npz")
LABELS = ("cls", "label", "class", "labels")
BEGINNINGS = ("txt", "transcript", "caption", "text", *sorted(TEXTS), "json", "jsonl", "csv", "tsv", *LABELS)


def query_of(request: Request) -> dict[str, str]:
    """Return the fields of an address, the first of each name. Raises UsageError for too many.

    Bytes that are not UTF-8 become surrogates, as in names of shards.
    """
    text = request.scope["query_string"].decode("ascii", "replace")
    try:
        pairs = parse_qsl(text, keep_blank_values=True, errors="surrogateescape", max_num_fields=FIELDS_MAX)
    except ValueError:
        raise UsageError(f"the address has more than {FIELDS_MAX} fields, the limit") from None
    return dict(reversed(pairs))


class PagePart(NamedTuple):
    """The part of a page of the grid that an answer makes.

    It begins at `at`, given in the field `name`; the page begins at `start`, and has `have` samples so far, after
    `turn` pieces in which `unread` files could not be read.
    """

    name: str
    at: int
    start: int
    have: int
    unread: int
    turn: int

    @classmethod
    def of(cls, query: Mapping[str, str], name: str) -> PagePart:
        """Return the piece that an address names. Raises UsageError."""
        at, have, unread, turn = (_number(query, field) for field in (name, "have", "unread", "turn"))
        return cls(name, at, _number(query, "start", at), min(have, PAGE - 1), unread, turn)

    @property
    def room(self) -> int:
        """The number of samples that the page has room for."""
        return PAGE - self.have

    def further(self, more: str, result: SearchResult) -> str | None:
        """Return the address of the next piece, which begins with `more`; None if the page is full, or slow."""
        have = self.have + len(result.samples)
        if have >= PAGE or self.turn >= TURNS_MAX:
            return None
        unread = self.unread + result.unread
        return f"{more}&have={have}&unread={unread}&start={self.start}&turn={self.turn + 1}"


class Grid:
    """Makes the answers. `page` fills in a template.

    `run` is another text for each server: browsers cache thumbnails, and the next server may have another set at
    the same port.
    """

    def __init__(self, masks: Masks, page: Callable[..., Response], run: str) -> None:
        self._masks, self._page, self._run = masks, page, run

    def all(self, now: Snapshot, request: Request) -> Response:
        """Show samples in the order of the set, those that pass the filter."""
        query = query_of(request)
        filter_, piece = Filter.of(query), PagePart.of(query, "at")
        notes, result = self._objection(filter_, now, piece)
        at = piece.at if "at" in query else None
        result = result or self._search(filter_, now, request).find(at, piece.room)
        back = None
        if piece.start:
            back = f"/?{filter_.query()}" if filter_ else f"/?at={max(piece.start - PAGE, 0)}"
        return self._grid(filter_, now, result, piece, notes, page="/", back=back, seed=None)

    def random(self, now: Snapshot, request: Request) -> Response:
        """Return a random sample of those that pass the filter; the same for the same seed."""
        query = query_of(request)
        filter_, piece = Filter.of(query), PagePart.of(query, "after")
        seed = _number(query, "seed") % SEED_MAX
        notes, result = self._objection(filter_, now, piece)
        result = result or self._search(filter_, now, request).draw(seed, piece.at, piece.room)
        back = f"/random?{filter_.query(seed=seed)}" if piece.start else None
        return self._grid(filter_, now, result, piece, notes, page="/random", back=back, seed=seed)

    def _search(self, filter_: Filter, now: Snapshot, request: Request) -> Search:
        return Search(self._masks, filter_, now, Pace(request.state.gone.is_set))

    def _objection(self, filter_: Filter, now: Snapshot, piece: PagePart) -> tuple[list[str], SearchResult | None]:
        """Return faults of a filter, in sentences, and the empty result where no search is needed."""
        nothing = SearchResult([], None, 1.0, 0)
        if filter_.value and not filter_.column:
            return ["To search for a value, type the name of its column, too."], nothing
        unknown = unknown_columns(filter_, now, Pace()) if not piece.turn else None
        if unknown is None:
            return [], None
        missing, known = (several([text_of(name) for name in names], COLUMNS) for names in unknown)
        note = f"No sample has a column {missing}. Columns of this set: {known or 'none'}."
        return [note], nothing if filter_.needs(unknown.missing) else None

    def _grid(
        self,
        filter_: Filter,
        now: Snapshot,
        result: SearchResult,
        piece: PagePart,
        notes: list[str],
        **values: Any,
    ) -> Response:
        shards, seed = [shard.name for shard in now.shards], values["seed"]
        fields = {} if seed is None else {"seed": seed}
        more = on = None
        if result.after is not None:
            more = f"{values['page']}?{filter_.query(**fields, **{piece.name: result.after})}"
            on = piece.further(more, result)
        return self._page(
            "grid.html",
            filter=filter_.fields(),
            query=filter_.query(),
            cards=[self._card(now, sample) for sample in result.samples],
            notes=notes,
            have=piece.have + len(result.samples),
            unread=piece.unread + result.unread,
            start=piece.start,
            looked=max(round(result.progress * now.total) - (piece.start if seed is None else 0), 0),
            progress=result.progress,
            more=more,
            on=on,
            total=now.total,
            unreadable=len(shards) - sum(1 for _ in now.readable),
            shards=shards if len(shards) <= SHARDS_MAX else [],
            shard_count=len(shards),
            next_seed=((seed or 0) + 1) % SEED_MAX,
            page_size=PAGE,
            **values,
        )

    def _card(self, now: Snapshot, sample: Sample) -> dict[str, Any]:
        """Return a sample as the grid shows it."""
        by_suffix: dict[str, int] = {}
        for at, column in enumerate(sample.columns):
            by_suffix.setdefault(suffix(column), at)

        def path_of_first(suffixes: Iterable[str]) -> bytes | None:
            at = next((by_suffix[suffix] for suffix in suffixes if suffix in by_suffix), None)
            return None if at is None else sample.path + b"/" + sample.names[at]

        def played(kind: str) -> bytes | None:
            return path_of_first(suffix for suffix in by_suffix if PLAYERS.get(suffix, "").startswith(kind))

        picture, sound = path_of_first(PICTURES), played("audio/")
        video = None if picture else played("video/")
        unknown = (suffix for suffix in by_suffix if content_of(suffix, b"").decoder == "hex")
        text = path_of_first(BEGINNINGS) or path_of_first(unknown)
        label = path_of_first(LABELS)
        tag = now.version_of(sample.shard)[2]  # another address for a thumbnail after a change of the shard
        return {
            "sample": sample,
            "key": sample.path.partition(b"/")[2] or sample.path,
            "picture": picture,
            "video": video,
            "sound": None if picture or video else sound,
            "text": None if picture or video else text,
            "caption": (label or text) if picture or video else label if label != text else None,
            "kind": next(iter(by_suffix), "…"),
            "version": f"{self._run}-{tag}",
        }

    def go(self, now: Snapshot, request: Request) -> Response:
        """Redirect to the sample with a number."""
        query = query_of(request)
        return _to_sample(now.sample(_number(query, "number")), Filter.of(query))

    def turn(self, now: Snapshot, request: Request, *, back: bool) -> Response:
        """Redirect to the next sample that passes the filter, or to the previous one."""
        query = query_of(request)
        filter_, number, turn = Filter.of(query), _number(query, "number"), _number(query, "turn")
        at = number - 1 if back else number + 1
        result = self._search(filter_, now, request).next(at, back=back)
        if result.samples:
            return _to_sample(result.samples[0], filter_)
        if result.after is None:
            raise NoSuchEntry(f"no sample {'before' if back else 'after'} this one passes the filter")
        start, last = _number(query, "start", number), result.after + 1 if back else result.after - 1
        page = "/previous" if back else "/next"
        return self._page(
            "turn.html",
            back=back,
            progress=result.progress,
            query=filter_.query(),
            start=start,
            looked=abs(last - start),
            more=f"{page}?{filter_.query(number=last, start=start, turn=turn + 1)}",
            is_going=turn < TURNS_MAX,
        )


def _to_sample(sample: Sample, filter_: Filter) -> Response:
    """Redirect to the page of a sample, which leads to others that pass the filter."""
    return RedirectResponse(f"/sample/{quote(sample.path)}{'?' if filter_ else ''}{filter_.query()}", 303)


def _number(query: Mapping[str, str], field: str, default: int = 0) -> int:
    """Return a number in an address. Raises UsageError."""
    text = query.get(field)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise UsageError("a number is expected here")
    return int(text)
