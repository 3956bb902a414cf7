"""The pages that lead to samples: the grid, random samples, and the next one that passes a filter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import parse_qsl, quote

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from wdsfs.errors import NoSuchEntry, UsageError, counted
from wdsfs.pages.downloads import suffix
from wdsfs.pages.filters import Filter
from wdsfs.pages.preview import PLAYERS, TEXTS, content_of
from wdsfs.pages.set_query import TableOfSet
from wdsfs.pages.shown_set import Sample, Snapshot

PAGE = 60  # samples of a grid
WAIT_SECONDS = 1.0  # for the table to be whole, before a filter is answered from what is there
FIELDS_MAX = 100  # fields of an address
SHARDS_MAX = 500  # shards that are offered for the filter
SEED_MAX = 1 << 31

# Extensions of files for a thumbnail, the best first; of labels; and of texts whose beginning a tile shows.
PICTURES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm", "avif", "npy", "npz")
LABELS = ("cls", "label", "class", "labels")
BEGINNINGS = ("txt", "transcript", "caption", "text", *sorted(TEXTS), "json", "jsonl", "csv", "tsv", *LABELS)


def query_of(request: Request) -> list[tuple[str, str]]:
    """Return the fields of an address. Raises UsageError for too many.

    Bytes that are not UTF-8 become surrogates, as in names of shards.
    """
    text = request.scope["query_string"].decode("ascii", "replace")
    try:
        return parse_qsl(text, keep_blank_values=True, errors="surrogateescape", max_num_fields=FIELDS_MAX)
    except ValueError:
        raise UsageError(f"the address has more than {FIELDS_MAX} fields, the limit") from None


class Grid:
    """Makes the answers. `page` fills in a template.

    `run` is another text for each server: browsers cache thumbnails, and the next server may have another set at
    the same port.
    """

    def __init__(self, table: TableOfSet, page: Callable[..., Response], run: str) -> None:
        self._table, self._page, self._run = table, page, run

    def all(self, now: Snapshot, request: Request) -> Response:
        """Show samples in the order of the set or of the filter, those that pass it."""
        return self._grid(now, request, page="/", seed=None)

    def random(self, now: Snapshot, request: Request) -> Response:
        """Return a random sample of those that pass the filter; the same for the same seed."""
        seed = number_in(dict(query_of(request)), "seed") % SEED_MAX
        return self._grid(now, request, page="/random", seed=seed)

    def _grid(self, now: Snapshot, request: Request, *, page: str, seed: int | None) -> Response:
        query, notes = query_of(request), []
        at, filter_ = number_in(dict(query), "at"), Filter()
        numbers, total = list[int](), 0
        try:
            filter_ = Filter.of(query)
            self._table.wait(now, filter_, WAIT_SECONDS if filter_ else 0)
            if seed is None:
                numbers = self._table.numbers(now, filter_, at, PAGE)
            else:
                numbers = self._table.drawn(now, filter_, seed, at, PAGE)
            total = self._table.total(now, filter_)
        except UsageError as error:
            notes.append(str(error))
        fields = {} if seed is None else {"seed": seed}
        done, readable = self._table.progress_of(now, filter_)
        if filter_ and done < readable:
            notes.append(f"{done:,} of {counted(readable, 'shard')} are in the table so far.")
        if filter_ and (problem := self._table.progress(now).note):
            notes.append(problem)
        shards = [shard.name for shard in now.shards]
        return self._page(
            "grid.html",
            filter=dict(reversed(filter_.fields())),
            query=filter_.query(),
            cards=[self._card(now, now.sample(number)) for number in numbers],
            notes=notes,
            start=at,
            passing=total,
            back=f"{page}?{filter_.query(**fields, at=max(at - PAGE, 0))}" if at else None,
            more=f"{page}?{filter_.query(**fields, at=at + PAGE)}" if at + PAGE < total else None,
            total=now.total,
            unreadable=len(shards) - sum(1 for _ in now.readable),
            shards=shards if len(shards) <= SHARDS_MAX else [],
            shard_count=len(shards),
            seed=seed,
            next_seed=((seed or 0) + 1) % SEED_MAX,
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
        return _to_sample(now.sample(number_in(dict(query), "number")), Filter.of(query))

    def turn(self, now: Snapshot, request: Request, *, back: bool) -> Response:
        """Redirect to the next sample of the result, or to the previous one."""
        query = query_of(request)
        filter_ = Filter.of(query)
        self._table.wait(now, filter_, WAIT_SECONDS if filter_ else 0)
        beside = self._table.neighbours(now, filter_, number_in(dict(query), "number"))
        number = beside.before if back else beside.after
        if number is None:
            raise NoSuchEntry(f"no sample {'before' if back else 'after'} this one passes the filter")
        return _to_sample(now.sample(number), filter_)


def _to_sample(sample: Sample, filter_: Filter) -> Response:
    """Redirect to the page of a sample, which leads to others that pass the filter."""
    return RedirectResponse(f"/sample/{quote(sample.path)}{'?' if filter_ else ''}{filter_.query()}", 303)


def number_in(query: Mapping[str, str], field: str, default: int = 0) -> int:
    """Return a number in an address. Raises UsageError."""
    text = query.get(field)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise UsageError("a number is expected here")
    return int(text)
