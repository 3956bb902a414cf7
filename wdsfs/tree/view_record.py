"""Views made of records: some columns only, columns of other shards and of label files, folders by class.

`compose` works out once what a shard shows in such a view, and returns a second record of the same format: a
function of the shard's own record, of the records and values that it is joined with, and of the options. So
trees, listings and the index serve a view as they serve a shard.

A member of a derived record has, in the place of its offset, an *address*: the number of a place and a number
there. Place 0 is the shard itself; the others are in the record's directory (`view`). What the number means
follows from the place's kind:

| kind    | the bytes are | the number is |
|---------|---------------|---------------|
| shard   | a member of a shard | that of the member in the shard's own record |
| values  | a value of a label file | its row in the section `values` of the record |
| decoded | a member, decompressed | the row in the sections `decoded.from` (its address) and `decoded.codec` |
| field   | a field of a JSON column | the row in the section `field.from` (its address); the place has the path |
| empty   | none: a file that stands for a missing column | 0 |

The order in which the options work: samples that are left out, join, decode, associate, columns, classes. Each
but the first has a module of its own. They work on a `Draft` (`tree/draft.py`); the options are in
`tree/composition.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wdsfs import names
from wdsfs.errors import ViewError
from wdsfs.index.member_draft import DerivedMembers
from wdsfs.index.record import Record
from wdsfs.index.record_builder import derive
from wdsfs.storage.identity import Fingerprint
from wdsfs.tar.problems import PROBLEMS_MAX, Problem
from wdsfs.tree import associate, classes, decode, fields, join, select_columns
from wdsfs.tree.classes import LongNumber
from wdsfs.tree.composition import Composition
from wdsfs.tree.draft import SHIFT, ContentSource, Draft, Surroundings


def compose(wanted: Composition, source: ContentSource, around: Surroundings, fingerprint: Fingerprint) -> bytes:
    """Return the record of what a shard shows with these options.

    If the options refuse a sample (`--missing error`), the record is empty, and `refusal` returns why. Raises what
    the surroundings raise.
    """
    try:
        return _compose(Draft(wanted, source, around), fingerprint)
    except LongNumber as error:
        return refuse(str(error), fingerprint, error.digits)
    except ViewError as error:
        return refuse(str(error), fingerprint)


def _compose(draft: Draft, fingerprint: Fingerprint) -> bytes:
    """Run the steps in their order. Raises ViewError if the options refuse a sample."""
    wanted = draft.wanted
    _leave_out(draft)
    for joined in draft.around.joined:
        join.add_joined(draft, joined)
    if wanted.decode:
        decode.decode(draft)
    for labels in draft.around.labels:
        associate.add_labels(draft, labels)
    if wanted.fields:
        fields.add_fields(draft)
    if wanted.classes:
        classes.find_classes(draft)
    if wanted.columns:
        select_columns.select(draft)
    elif wanted.ignore_case:
        # Semantics decision: in lower case, as the webdataset library reads them.
        draft.rename({number: one.lower() for number, one in enumerate(draft.extensions)})
    if wanted.classes:
        classes.into_classes(draft)
    draft.keep(np.bincount(draft.rows.entry, minlength=len(draft.paths)) > 0)
    return derive(_derived(draft), fingerprint, {"shift": _shift(draft), "places": draft.places})


def _leave_out(draft: Draft) -> None:
    left_out = {names.plain_key(key) for key in draft.source.left_out}
    pairs = zip(draft.paths, draft.strays.tolist(), strict=True)
    if left_out:
        draft.keep(np.fromiter((stray or path not in left_out for path, stray in pairs), bool, len(draft.paths)))
    if draft.wanted.columns or draft.wanted.classes:
        draft.keep(~draft.strays)


def _derived(draft: Draft) -> DerivedMembers:
    rows, record = draft.rows, draft.record
    used, numbers = np.unique(rows.extension, return_inverse=True)
    links = {}
    if draft.links:
        own = {address: at for at, address in enumerate(rows.address.tolist()) if address in draft.links}
        links = {at: draft.links[address] for address, at in own.items()}
    folders = {}
    if "folder.mtime" in record.column and not draft.wanted.classes:
        times = {record.folder_path(n) + b"/": record.folder_mtime_ns(n) for n in range(1, record.folders)}
        folders = {path: time for path, time in times.items() if time is not None}
    problems = [*draft.problems, *_problems_of_shown(draft), *record.problems]
    return DerivedMembers(
        paths=draft.paths,
        strays=draft.strays,
        entry=rows.entry,
        extension=numbers.reshape(-1),
        extensions=[draft.extensions[number] for number in used.tolist()] or [b""],
        addresses=_packed(draft, rows.address),
        sizes=rows.size,
        mtimes=rows.mtime,
        links=links,
        folders=folders,
        problems=problems[:PROBLEMS_MAX],
        problems_more=record.problem_count - len(record.problems) + len(problems[PROBLEMS_MAX:]),
        unshown=record.unshown,
        unshown_count=record.unshown_count,
        lists={"values": draft.values.texts} if draft.values.texts else {},
        numbers=_further_columns(draft),
    )


def _problems_of_shown(draft: Draft) -> list[Problem]:
    if not draft.if_shown:
        return []
    shown = set(draft.rows.address.tolist())
    return list(dict.fromkeys(problem for address, problem in draft.if_shown.items() if address in shown))


def _shift(draft: Draft) -> int:
    largest = int((draft.rows.address & (1 << SHIFT) - 1).max()) if len(draft.rows.address) else 0
    below = [address for address, _ in draft.decoded] + draft.fields
    return max(1, largest.bit_length(), *((address & (1 << SHIFT) - 1).bit_length() for address in below))


def _packed(draft: Draft, addresses: NDArray[np.int64]) -> NDArray[np.int64]:
    """Pack addresses into no more bits than they need."""
    return addresses >> SHIFT << _shift(draft) | addresses & (1 << SHIFT) - 1


def _further_columns(draft: Draft) -> dict[str, list[int]]:
    """The sections of what is made of other members: of which, and how."""
    found: dict[str, list[int]] = {}
    if draft.decoded:
        raw = np.array([address for address, _ in draft.decoded], np.int64)
        found["decoded.from"] = _packed(draft, raw).tolist()
        found["decoded.codec"] = [codec for _, codec in draft.decoded]
    if draft.fields:
        found["field.from"] = _packed(draft, np.array(draft.fields, np.int64)).tolist()
    return found


def refuse(text: str, fingerprint: Fingerprint, digits: int = 0) -> bytes:
    """Return the record of a shard that is refused for this reason; with so many `digits` it would not be."""
    nothing, problems = np.zeros(0, np.int64), [Problem(0, "refused", text)]
    empty = DerivedMembers(
        [], nothing.astype(bool), nothing, nothing, [], nothing, nothing, nothing, problems=problems
    )
    return derive(empty, fingerprint, {"shift": 1, "places": [], "refused": text, "digits": digits})


def refusal(record: Record) -> str | None:
    """Return why a derived record is refused, None if it is not."""
    return None if record.view is None else record.view.get("refused")


def digits_wanted(record: Record) -> int:
    """Return how many digits the classes of a shard need that was refused for too few; else 0."""
    return 0 if record.view is None else int(record.view.get("digits", 0))
