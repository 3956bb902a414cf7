"""The pages that lead to samples: the grid, random samples, and the next one that passes a filter."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, quote

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from wdsfs.errors import NoSuchEntry, UsageError
from wdsfs.pages.downloads import suffix
from wdsfs.pages.filters import OPERATORS, Condition, Filter
from wdsfs.pages.preview import PLAYERS, TEXTS, content_of
from wdsfs.pages.set_query import Histogram, HistogramBar, TableOfSet, drawn
from wdsfs.pages.shown_set import Sample, Snapshot

PAGE = 60  # samples of a grid
WAIT_SECONDS = 1.0  # for the table to be whole, before a filter is answered from a part of it
FIELDS_MAX = 100  # fields of an address
SHARDS_MAX = 500  # shards that are offered for the filter
SEED_MAX = 1 << 31
COMMAND_MAX = 1000  # characters of the words of a set that a command is shown with

# Extensions of files for a thumbnail, the best first; of labels; and of texts whose beginning a tile shows.
PICTURES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm", "avif", "npy", "npz")
LABELS = ("cls", "label", "class", "labels")
CAPTIONS = ("txt", "transcript", "caption", "text")
BEGINNINGS = (*CAPTIONS, *sorted(TEXTS), "json", "jsonl", "csv", "tsv", *LABELS)


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
    the same port. `words` choose the set on a command line.
    """

    def __init__(self, table: TableOfSet, page: Callable[..., Response], run: str, words: Sequence[str]) -> None:
        self._table, self._page, self._run = table, page, run
        self._commands = _commands(words)

    def all(self, now: Snapshot, request: Request) -> Response:
        """Show the samples that pass the filter, in its order or in that of the set."""
        return self._grid(now, request, page="/", seed=None)

    def random(self, now: Snapshot, request: Request) -> Response:
        """Show random samples that pass the filter, the same ones for the same seed."""
        seed = number_in(dict(query_of(request)), "seed") % SEED_MAX
        return self._grid(now, request, page="/random", seed=seed)

    def _grid(self, now: Snapshot, request: Request, *, page: str, seed: int | None) -> Response:
        query, notes, filter_ = query_of(request), list[str](), Filter()
        at = number_in(dict(query), "at")
        progress = self._table.progress(now)  # before the samples: a page of an unfinished table asks again
        numbers, matches, charts = list[int](), 0, list[Histogram]()
        try:
            filter_ = Filter.of(query)
            self._table.wait(now, filter_, WAIT_SECONDS if filter_ else 0)
            progress = self._table.progress(now)
            result = self._table.result(now, filter_)
            matches = len(result)
            places = range(at, at + PAGE) if seed is None else drawn(matches, seed, at, PAGE)
            numbers = [int(result[place]) for place in places if place < matches]
            charts = self._table.histograms(now, filter_)
        except UsageError as error:
            notes.append(str(error))
        fields = {} if seed is None else {"seed": seed}

        def link(to: Filter, **more: int) -> str:
            return f"{page}?{to.query(**fields, **more)}"

        shards = [shard.name for shard in now.shards]
        return self._page(
            "grid.html",
            page=page,
            filter=filter_,
            query=filter_.query(),
            chips=[(text, link(other)) for text, other in filter_.parts()],
            operators=OPERATORS,
            columns=[column.name for column in self._table.columns()],
            charts=[_chart(chart, filter_, link) for chart in charts],
            progress=progress,
            cards=self._cards(now, filter_, numbers),
            notes=notes,
            matches=matches,
            start=at,
            back=link(filter_, at=max(at - PAGE, 0)) if at else None,
            more=link(filter_, at=at + PAGE) if at + PAGE < matches else None,
            total=now.total,
            unreadable=len(shards) - sum(1 for _ in now.readable),
            shards=shards if len(shards) <= SHARDS_MAX else [],
            shard_count=len(shards),
            seed=seed,
            next_seed=((seed or 0) + 1) % SEED_MAX,
            commands=self._commands,
        )

    def charts(self, now: Snapshot) -> list[dict[str, Any]]:
        """Return the counts of all samples; bars lead to the grid. Raises UsageError."""
        charts = self._table.histograms(now, Filter())
        return [_chart(chart, Filter(), lambda to: f"/?{to.query()}") for chart in charts]

    def _cards(self, now: Snapshot, filter_: Filter, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Return samples as the grid shows them, with what the table has of their class, order and caption."""
        class_column, caption = self._table.class_column(), self._table.caption_column()
        facts = dict.fromkeys(name for name in (class_column, filter_.order) if name)
        values = self._table.values(now, numbers, [*facts, *filter(None, (caption,))])
        cards = []
        for number in numbers:
            card, own = self._card(now, now.sample(number)), values.get(number, {})
            card["facts"] = [(name, self._shown(name, own[name])) for name in facts if name in own]
            if class_column in own:
                card["label"] = None  # no file has to be read
            if own and caption and card["words"]:
                card["words"], card["caption"] = None, " ".join(str(own.get(caption, "")).split())
            cards.append(card)
        return cards

    def _shown(self, column: str, value: object) -> str:
        """Return a value of the table for a card: a class with its name."""
        name = self._table.class_name(value) if column == self._table.class_column() else None
        text = f"{value:.6g}" if isinstance(value, float) else str(value)
        return text if name is None else f"{text} {name}"

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
            "label": label if picture or video or label != text else None,
            "words": (path_of_first(CAPTIONS) or (None if label else text)) if picture or video else None,
            "caption": "",
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


def _commands(words: Sequence[str]) -> list[str]:
    """Return commands that use a list of samples of the set that these words choose."""
    shown = words if len(shlex.join(words)) <= COMMAND_MAX else ("SHARDS",)
    pack = [] if "--split" in words else ["pack"]  # whose option of this name makes splits
    ends = {"pack": ("-o", "chosen-%06d.tar"), "mount": ("MOUNTPOINT",)}
    return [shlex.join(["wdsfs", name, "--keys", "keys.txt", *shown, *ends[name]]) for name in (*pack, "mount")]


def _chart(chart: Histogram, filter_: Filter, link: Callable[[Filter], str]) -> dict[str, Any]:
    """Return a histogram with the addresses that its bars lead to: the filter with their condition, or without."""
    most = max(max(bar.count for bar in chart.bars), 1)

    def changed(bar: HistogramBar) -> Filter:
        return filter_.minus(bar.condition) if bar.is_chosen else filter_.plus(bar.condition)

    return {
        "histogram": chart,
        "is_range": chart.kind in ("number", "size"),
        "bars": [(bar, link(changed(bar)), bar.count / most) for bar in chart.bars],
        "missing": link(filter_.plus(Condition(chart.column, "missing"))),
        "up": link(filter_.ordered(chart.column)),
        "down": link(filter_.ordered(chart.column, down=True)),
    }


def _to_sample(sample: Sample, filter_: Filter) -> Response:
    """Redirect to the page of a sample, which leads to others that pass the filter."""
    return RedirectResponse(f"/sample/{quote(sample.path)}{'?' if filter_ else ''}{filter_.query()}", 303)


def number_in(query: Mapping[str, str], field: str) -> int:
    """Return a number in an address; 0 for none. Raises UsageError."""
    text = query.get(field, "0")
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise UsageError("a number is expected here")
    return int(text)
