"""What the README shows of a run: its comparison, and a chart.

python -m bench --from bench/results/DATE.json --chart docs/images/figures.svg      both
"""

from __future__ import annotations

from html import escape
from typing import NamedTuple

from bench.report import Results, figure


class Measure(NamedTuple):
    workload: str
    case: str
    unit: str


FIRST = Measure("first read", "1 client, sequential", "µs a file")
TRAINING = Measure("training loader", "first epoch", "images/s")
COLUMNS = {
    "first read": FIRST,
    "second read": Measure("second read", "1 client, sequential", "µs a file"),
    "`find`": Measure("walk", "find", "µs a file"),
    "training": TRAINING,
}
PEERS = {"unpacked tars": "extracted", "squashfs": "squashfuse_ll-raw", "ratarmount": "ratarmount"}
ROWS = {
    "wdsfs": "wdsfs",
    "wdsfs, by the kernel": "wdsfs-image",
    **PEERS,
}
BESIDE = {  # systems without a figure in some column
    "training by `wdsfs.Shuffle` {} images/s": (TRAINING, "wdsfs.Shuffle"),
    "by the webdataset library {} images/s": (TRAINING, "webdataset"),
    "a first read by `energon mount` {} µs": (FIRST, "energon"),
}
FILES = {
    "wdsfs mount": "wdsfs",
    "unpacked tars": "extracted",
    "squashfs": "squashfuse_ll-raw",
    "ratarmount": "ratarmount",
}
LOADERS = {"wdsfs.Shuffle": "wdsfs.Shuffle", **FILES, "webdataset": "webdataset"}
PANELS = {
    "First read of a small file, µs (less is better)": (FIRST, FILES),
    "Training, first epoch, images/s (more is better)": (TRAINING, LOADERS),
}
# The greys and the blue are seen on white and on black: a picture in a page does not know the colours around it.
STYLE = "text{font:13px system-ui,sans-serif;fill:#77808a}.t{font-weight:600}.v{font-weight:600}.own{fill:#2f81f7}"
LABEL, BAR, STEP, VALUE, GAP = 112, 190, 26, 56, 36  # pixels: names, the longest bar, a row, a figure, between


def comparison(results: Results) -> str:
    """The table of the README and the sentence below it, in Markdown. A system without some figure is left out."""
    lines = [
        "| | " + " | ".join(f"{name}, {measure.unit}" for name, measure in COLUMNS.items()) + " |",
        "|---|" + "---:|" * len(COLUMNS),
    ]
    for name, system in ROWS.items():
        values = [results.median(measure.workload, measure.case, system) for measure in COLUMNS.values()]
        if (figures := [figure(value) for value in values if value is not None]) and len(figures) == len(values):
            lines.append(f"| {name} | {' | '.join(figures)} |")
    said = [
        text.format(figure(value))
        for text, (measure, system) in BESIDE.items()
        if (value := results.median(measure.workload, measure.case, system)) is not None
    ]
    return "\n".join([*lines, *(["", f"Also in this run: {', '.join(said)}."] if said else [])])


def chart(results: Results) -> str:
    """A picture with bars beside each other's: SVG. Empty if there are no figures for it."""
    drawn: list[str] = []
    rows = 0
    for title, (measure, systems) in PANELS.items():
        medians = {
            name: results.median(measure.workload, measure.case, system) for name, system in systems.items()
        }
        values = {name: value for name, value in medians.items() if value is not None}
        if values:
            left = len(drawn) * (LABEL + BAR + VALUE + GAP)
            drawn.append(f'<g transform="translate({left},0)">{_panel(title, values)}</g>')
            rows = max(rows, len(values))
    if not drawn:
        return ""
    width, height = len(drawn) * (LABEL + BAR + VALUE + GAP) - GAP, 34 + rows * STEP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
    return "\n".join([head, f"<title>{' '.join(PANELS)}</title>", f"<style>{STYLE}</style>", *drawn, "</svg>", ""])


def _panel(title: str, values: dict[str, float]) -> str:
    parts = [f'<text class="t" y="15">{escape(title)}</text>']
    for number, (name, value) in enumerate(values.items()):
        top, length = 30 + number * STEP, max(value / max(values.values()) * BAR, 1)
        own = ' class="own"' if name.startswith("wdsfs") else ' fill="#77808a" fill-opacity=".55"'
        parts += [
            f'<text x="{LABEL - 8}" y="{top + 13}" text-anchor="end">{escape(name)}</text>',
            f'<rect{own} x="{LABEL}" y="{top}" width="{length:.1f}" height="{STEP - 8}" rx="2"/>',
            f'<text class="v" x="{LABEL + length + 6:.1f}" y="{top + 13}">{figure(value)}</text>',
        ]
    return "\n".join(parts)
