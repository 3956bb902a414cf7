"""Makes the record of a shard in a view, in steps: keys, join, associate, fields, columns.

`compose` computes once what a shard shows in a view, and returns a second record of the same format. It is a
function of the shard's own record, of the joined records and values, and of the options. So trees,
listings and the index serve a view as they serve a shard.

In place of an offset, a member of a derived record has an *address*: the number of a place, and a number in that
place. Place 0 is the shard itself; the others are in the record's directory (`view`). The kind of the place
decides the meaning of the second number:

| kind    | the bytes are | the number is |
|---------|---------------|---------------|
| shard   | a member of a shard | that of the member in the shard's own record |
| values  | a value of a label file | its row in the section `values` of the record |
| field   | a field of a JSON column | the row in the section `field.from` (its address); the place has the path |
| empty   | none: a file that stands for a missing column | 0 |

The options, a `Composition`, are applied to a `Draft` (`draft.py`) in this order: left-out samples, keys, join,
associate, fields, columns, classes (`classes.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdsfs import names
from wdsfs.errors import CorruptShard, ViewError
from wdsfs.index.member_draft import DerivedMembers
from wdsfs.index.record import Record
from wdsfs.index.record_builder import derive
from wdsfs.names import text_of
from wdsfs.shards import Fingerprint
from wdsfs.tar.problems import BROKEN_FIELD, PROBLEMS_MAX, Problem
from wdsfs.tree import classes, json_fields
from wdsfs.tree.classes import LongNumber
from wdsfs.tree.companions import MISSING, TWICE, JoinedSet
from wdsfs.tree.composition import EMPTY, Column, Composition, Field
from wdsfs.tree.draft import (
    AS_THEY_ARE,
    MISSING_COLUMN_WAY_OUT,
    SHIFT,
    TWICE_AS_THEY_ARE,
    TWICE_WAY_OUT,
    Draft,
    Ingredients,
    Rows,
    rows_of,
)
from wdsfs.tree.label_files import text_of_files
from wdsfs.tree.label_names import Uses
from wdsfs.tree.label_table import KeyList, OpenLabels, refuse_column, refuse_shared
from wdsfs.tree.view_content import FIELD, NOTHING, OWN, VALUES

LISTED = "keys.place"  # the section with how samples of the shard use the list of keys: see `label_names.Uses`
LABELLED = "labels.row.{}"  # the sections with how they use the rows of each label file


def compose(options: Composition, source: Ingredients, fingerprint: Fingerprint) -> bytes:
    """Return the record that shows a shard with these options.

    If the options refuse a sample (`--missing error`), the record is empty, and `refusal` returns the reason.
    Raises the errors of the sources.
    """
    try:
        return _compose(Draft(options, source), fingerprint)
    except LongNumber as error:
        return refuse(str(error), fingerprint, error.digits)
    except ViewError as error:
        return refuse(str(error), fingerprint)


def _compose(draft: Draft, fingerprint: Fingerprint) -> bytes:
    """Run the steps in their order. Raises ViewError if the options refuse a sample."""
    options = draft.options
    _leave_out(draft)
    if draft.source.keys is not None:
        _choose(draft, draft.source.keys)
    for joined in draft.source.joined:
        add_joined(draft, joined)
    for number, labels in enumerate(draft.source.labels):
        draft.used[LABELLED.format(number)] = add_labels(draft, labels)
    if options.fields:
        add_fields(draft)
    if options.classes:
        classes.find_classes(draft)
    if options.columns:
        select(draft)
    elif options.ignore_case:
        # Semantics decision: in lower case, as the webdataset library reads them.
        draft.rename({number: names.lower_case(text) for number, text in enumerate(draft.extensions)})
    if options.classes:
        classes.into_classes(draft)
    draft.keep(np.bincount(draft.rows.entry, minlength=len(draft.paths)) > 0)
    view = {"shift": _shift(draft), "places": draft.places}
    return derive(_derived(draft), fingerprint, view, draft.source.shard.reading)


def _leave_out(draft: Draft) -> None:
    left_out = {names.plain_key(key) for key in draft.source.shard.without}
    pairs = zip(draft.paths, draft.strays.tolist(), strict=True)
    if left_out:
        draft.keep(np.fromiter((stray or path not in left_out for path, stray in pairs), bool, len(draft.paths)))
    if draft.options.columns or draft.options.classes:
        draft.keep(~draft.strays)


def _choose(draft: Draft, keys: KeyList) -> None:
    """Keep only the listed samples."""
    samples = draft.samples()
    is_kept = np.zeros(len(draft.paths), bool)
    places, uses = keys.find(draft.source.shard.name, [draft.paths[entry] for entry in samples.tolist()])
    refuse_shared(keys, [uses])
    draft.used[LISTED] = uses
    is_kept[samples[places >= 0]] = True
    draft.keep(is_kept)


def _derived(draft: Draft) -> DerivedMembers:
    rows, record = draft.rows, draft.record
    used, numbers = np.unique(rows.extension, return_inverse=True)
    links = {}
    if draft.links:
        own = {address: at for at, address in enumerate(rows.address.tolist()) if address in draft.links}
        links = {at: draft.links[address] for address, at in own.items()}
    folders = {}
    if "folder.mtime" in record.column and not draft.options.classes:
        times = {record.folder_path(n) + b"/": record.folder_mtime_ns(n) for n in range(1, record.folders)}
        folders = {path: time for path, time in times.items() if time is not None}
    problems = [*_problems_of_shown(draft), *record.problems]
    return DerivedMembers(
        paths=draft.paths,
        strays=draft.strays,
        entry=rows.entry,
        extension=numbers.reshape(-1),
        extensions=[draft.extensions[number] for number in used.tolist()] or [b""],
        addresses=_pack_addresses(draft, rows.address),
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
    below = ((address & (1 << SHIFT) - 1).bit_length() for address in draft.fields)
    return max(1, largest.bit_length(), *below)


def _pack_addresses(draft: Draft, addresses: NDArray[np.int64]) -> NDArray[np.int64]:
    """Pack addresses into no more bits than they need."""
    return addresses >> SHIFT << _shift(draft) | addresses & (1 << SHIFT) - 1


def _further_columns(draft: Draft) -> dict[str, list[int]]:
    """Return the sections about the JSON columns that fields are made of, and about lines of a list."""
    columns = {section: uses.tolist() for section, uses in draft.used.items() if len(uses)}
    if draft.fields:
        columns["field.from"] = _pack_addresses(draft, np.array(draft.fields, np.int64)).tolist()
    return columns


def refuse(text: str, fingerprint: Fingerprint, digits: int = 0) -> bytes:
    """Return the record of a shard that is refused for this reason; `digits` would have been enough."""
    nothing, problems = np.zeros(0, np.int64), [Problem(0, "refused", text)]
    empty = DerivedMembers(
        [], nothing.astype(bool), nothing, nothing, [], nothing, nothing, nothing, problems=problems
    )
    return derive(empty, fingerprint, {"shift": 1, "places": [], "refused": text, "digits": digits})


def refusal(record: Record) -> str | None:
    """Return why a derived record is refused, None if it is not."""
    return None if record.view is None else record.view.get("refused")


def digits_needed(record: Record) -> int:
    """Return the number of digits that the classes of a shard need, if it was refused for too few; else 0."""
    return 0 if record.view is None else int(record.view.get("digits", 0))


# --- join: members of the same samples from a parallel set of shards


def add_joined(draft: Draft, joined: JoinedSet) -> None:
    """Add the members of the same keys from this set. Raises ViewError, ShardErrors."""
    samples = draft.samples()
    shards, entries = joined.find(draft.source.number, [draft.paths[number] for number in samples.tolist()])
    missing, twice = samples[shards == MISSING], samples[shards == TWICE]
    is_there = draft.judged(draft.options.missing, missing, "is not in the joined set", AS_THEY_ARE)
    unique = draft.judged(
        draft.options.duplicates, twice, "is more than once in the joined set", TWICE_AS_THEY_ARE
    )
    parts = [
        _joined_rows(draft, joined, number, samples[shards == number], entries[shards == number])
        for number in np.unique(shards[shards >= 0]).tolist()
    ]
    draft.keep(_add(draft, parts) & is_there & unique)


def _joined_rows(
    draft: Draft, joined: JoinedSet, number: int, samples: NDArray[np.int64], entries: NDArray[np.int64]
) -> Rows:
    """Return the members of these entries of a joined shard, as members of these samples."""
    record, path = joined.lower.record(number), joined.lower.shards[number].path
    place = draft.shard_places.get(path)
    if place is None:
        place = draft.shard_places[path] = len(draft.places)
        draft.places.append(draft.shard_place(path, record))
    starts = np.asarray(record.entry_member).astype(np.int64)
    first, counts = starts[entries], starts[entries + 1] - starts[entries]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    members = np.repeat(first, counts) + within
    own = [record.extension_name[extension] for extension in range(len(record.extension_name))]
    is_used = np.array([draft.options.wants(extension) for extension in own], bool)
    numbers = np.array(
        [draft.number_of(extension) if draft.options.wants(extension) else -1 for extension in own], np.int64
    )
    extension = record.array("member.ext")[members]
    return Rows(
        np.repeat(samples, counts),
        numbers[extension],
        members | place << SHIFT,
        np.asarray(record.array("member.size"))[members].astype(np.int64),
        record.mtimes_ns(members),
    ).take(is_used[extension])


def _add(draft: Draft, parts: list[Rows]) -> NDArray[np.bool_]:
    """Add joined members. A column that the sample has already is a duplicate; return the entries to keep."""
    is_kept = np.ones(len(draft.paths), bool)
    for rows in parts:
        clash = np.isin(draft.codes(rows), draft.codes(draft.rows))
        if clash.any():
            first = draft.extensions[int(rows.extension[clash][0])]
            text = f"has the column {text_of(first)!r}, and so has the joined set"
            is_kept &= draft.judged(draft.options.duplicates, np.unique(rows.entry[clash]), text, TWICE_WAY_OUT)
            rows = rows.take(~clash)
        draft.rows = draft.rows.plus(rows)
    return is_kept


# --- associate: columns of a label file


def add_labels(draft: Draft, labels: OpenLabels) -> Uses:
    """Add the columns of these labels, in place of the shard's own; return which were used. Raises ViewError."""
    samples = draft.samples().tolist()
    known = labels.find([draft.paths[number] for number in samples])
    files = list(zip(labels.files, labels.fingerprints, strict=True))
    places: dict[int, int] = {}
    missing, twice, added = [], [], []
    numbers: dict[bytes, int] = {}
    for entry in samples:
        lines = known.get(draft.paths[entry])
        if lines is None:
            missing.append(entry)
        elif len(lines) > 1:
            twice.append(entry)
        else:
            at = lines[0].file
            if at not in places:
                places[at] = draft.place(VALUES, files[at][0].path, files[at][1])
            for extension, value in lines[0].values.items():
                number = numbers.get(extension)
                if number is None:
                    number = -1
                    if draft.options.wants(extension):
                        refuse_column(files[at][0], extension)
                        number = draft.number_of(extension)
                    numbers[extension] = number
                if number >= 0:
                    row = draft.values.number(value)
                    added.append((entry, number, places[at] << SHIFT | row, len(value), files[at][1].mtime_ns))
    by_guess = f", whose keys are in {' and '.join(map(repr, labels.guessed))}" if labels.guessed else ""
    where = text_of_files(labels.files) + by_guess
    is_there = draft.judged(draft.options.missing, np.array(missing, int), f"is not in {where}", AS_THEY_ARE)
    unique = draft.judged(
        draft.options.duplicates, np.array(twice, int), f"is more than once in {where}", TWICE_AS_THEY_ARE
    )
    rows = rows_of(added)
    # Semantics decision: a label wins over the shard's own column, as in webdataset's `associate`.
    replaced = np.isin(draft.codes(draft.rows), draft.codes(rows))
    own = draft.rows.take(~replaced | draft.strays[draft.rows.entry])
    draft.rows = own.plus(rows)
    draft.keep(is_there & unique)
    uses = labels.uses(known.values())
    refuse_shared(labels, [uses])
    return np.unique(uses)


# --- fields: files of fields of JSON columns, of which only the sizes are kept


class _File(NamedTuple):
    """A file of a field: its size (bytes), and why reading it fails."""

    size: int
    problem: Problem | None = None


def add_fields(draft: Draft) -> None:
    """Add a file for each field that a sample has. Raises ViewError, ShardErrors."""
    own = set(draft.codes(draft.rows).tolist())
    clashing: set[int] = set()
    lines = []
    columns: dict[bytes, list[tuple[Field, int, int]]] = {}
    for field in draft.options.fields:
        place = draft.place(FIELD, b"", ())
        draft.places[place]["field"] = field.path
        columns.setdefault(field.column, []).append((field, place, draft.number_of(field.name)))
    same = draft.same()
    for column, fields in columns.items():
        for at in _members(draft, column):
            entry, address = int(draft.rows.entry[at]), int(draft.rows.address[at])
            files = _files(draft, at, [field for field, _, _ in fields])
            for (field, place, extension), made in zip(fields, files, strict=True):
                if made is None:
                    continue
                # Semantics decision: as for joined columns, only columns that are shown can clash.
                if draft.options.shows(field.name) and entry << 32 | int(same[extension]) in own:
                    clashing.add(entry)
                    continue
                row = place << SHIFT | len(draft.fields)
                lines.append((entry, extension, row, made.size, int(draft.rows.mtime[at])))
                draft.fields.append(address)
                if made.problem is not None:
                    draft.if_shown[row] = made.problem
    draft.rows = draft.rows.plus(rows_of(lines))
    if clashing:
        text = "has a column with the name of a --field"
        draft.keep(draft.judged(draft.options.duplicates, np.array(sorted(clashing)), text, TWICE_WAY_OUT))


def _members(draft: Draft, column: bytes) -> list[int]:
    """Return for each sample the first row with this column.

    The rows are in the order of the shard, so that the disk is read in one pass.
    """
    rows = draft.rows
    at = np.flatnonzero(np.isin(rows.extension, draft.matching(column)) & ~draft.strays[rows.entry])
    first = at[np.unique(rows.entry[at], return_index=True)[1]]
    ordered: list[int] = first[np.argsort(rows.address[first], kind="stable")].tolist()
    return ordered


def _files(draft: Draft, at: int, fields: list[Field]) -> list[_File | None]:
    """Return the files of these fields of the member in this row; None for no file.

    Semantics decision: a JSON that cannot be read may have the field. So there is a file, and reading it fails.
    Its size is that of the JSON, because an empty file would be read without an error.
    """
    size, address = int(draft.rows.size[at]), int(draft.rows.address[at])
    try:
        json_fields.refuse_size(size)
        document: Any = json_fields.parse(draft.read(address))
    except CorruptShard as error:
        return [_File(max(size, 1), _problem(draft, at, error))] * len(fields)
    files: list[_File | None] = []
    for field in fields:
        try:
            data = json_fields.content_at(document, field.path)
            files.append(None if data is None else _File(len(data)))
        except CorruptShard as error:
            files.append(_File(max(size, 1), _problem(draft, at, error)))
    return files


def _problem(draft: Draft, at: int, error: CorruptShard) -> Problem:
    """Return the problem of a member, given by its row, whose fields cannot be read."""
    address = int(draft.rows.address[at])
    name = text_of(draft.paths[int(draft.rows.entry[at])] + b"." + draft.extensions[draft.rows.extension[at]])
    head = draft.record.member(address).head if address >> SHIFT == OWN else 0
    return Problem(head, BROKEN_FIELD, f"{name}: {error}; the file that --field makes cannot be read")


# --- columns: chosen extensions only, each under the name that was typed or given


def select(draft: Draft) -> None:
    """Choose for each output one of its alternatives; keep files of fields that no output names."""
    rows, count = draft.rows, len(draft.paths)
    is_kept = np.ones(count, bool)
    free = _free_fields(draft)
    taken = free.copy()
    chosen = [(np.flatnonzero(free), rows.extension[free])]
    lines = []
    empty = -1
    for column in draft.options.columns:
        ranks, shown = _matches(draft, column)
        matches = np.flatnonzero(ranks >= 0)
        # Semantics decision: the first in the order of the tar, as in DALI; with a name the first in the order in
        # which they are typed, as in webdataset's `rename`.
        if column.name:
            matches = matches[np.lexsort((matches, ranks[matches], rows.entry[matches]))]
        entries, first = np.unique(rows.entry[matches], return_index=True)
        first = matches[first]
        # A member is shown once under its own name; other outputs may also show it under other names.
        fresh = first if column.name else first[~taken[first]]
        if not column.name:
            taken[fresh] = True
        chosen.append((fresh, shown[rows.extension[fresh]]))
        missing = np.setdiff1d(np.arange(count), entries, assume_unique=True)
        text = f"has no column {text_of(b';'.join(column.alternatives))!r}"
        way_out = MISSING_COLUMN_WAY_OUT
        if not len(entries):  # no sample has it: it may have another name
            way_out = f"{_columns_hint(draft, column.alternatives)}; {MISSING_COLUMN_WAY_OUT}"
            if any(b"," in extension for extension in column.alternatives):
                way_out = f"between columns to choose from is a semicolon: --columns 'jpg;png'; {way_out}"
        is_kept &= draft.judged(draft.options.missing, missing, text, way_out)
        if len(missing) and draft.options.missing == EMPTY:
            empty = draft.place(NOTHING, draft.path, ()) if empty < 0 else empty
            name, mtime = draft.number_of(_name_of(column)), draft.record.fingerprint.mtime_ns
            lines += [(entry, name, empty << SHIFT, 0, mtime) for entry in missing.tolist()]
    numbers, extensions = (np.concatenate(some) for some in zip(*chosen, strict=True))
    order = np.argsort(numbers, kind="stable")  # that of the tar
    draft.rows = rows.take(numbers[order])
    draft.rows.extension = extensions[order]
    draft.rows = draft.rows.plus(rows_of(lines))
    draft.keep(is_kept)


def _free_fields(draft: Draft) -> NDArray[np.bool_]:
    """Return a mask of the rows that are files of fields which no output names."""
    free = [number for number, place in enumerate(draft.places) if place["kind"] == FIELD]
    rows = draft.rows
    named = [number for number, extension in enumerate(draft.extensions) if draft.options.shows(extension)]
    return np.isin(rows.address >> SHIFT, free) & ~np.isin(rows.extension, named)


def _name_of(column: Column) -> bytes:
    return column.name or column.alternatives[0]


def _matches(draft: Draft, column: Column) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rank of the alternative that each row matches, or -1; and for each extension the shown one."""
    typed = _matching_extensions(draft, column.alternatives)
    if column.name:
        name = draft.number_of(column.name)
        typed = {number: (rank, name) for number, (rank, _) in typed.items()}
    ranks = np.full(len(draft.extensions), -1, np.int64)
    shown = np.arange(len(draft.extensions))
    for number, (rank, name) in typed.items():
        ranks[number], shown[number] = rank, name
    return ranks[draft.rows.extension], shown


def _columns_hint(draft: Draft, alternatives: tuple[bytes, ...]) -> str:
    """Return a hint for a column that no sample of the shard has: which one was perhaps meant."""
    there, hint = draft.columns(), draft.columns_there()
    for typed in alternatives:
        parts = typed.split(b",")
        if len(parts) > 1 and all(part in there for part in parts):
            options = " ".join(f"--columns {text_of(part)}" for part in parts)
            return f"{hint}; for several columns write {options}"
        if typed.lstrip(b".*") in there:
            return f"{hint}; write --columns {text_of(typed.lstrip(b'.*'))}"
        if any(names.lower_case(typed) == names.lower_case(other) for other in there):
            return f"{hint}; --ignore-case matches any letter case"
    return hint


def _matching_extensions(draft: Draft, alternatives: tuple[bytes, ...]) -> dict[int, tuple[int, int]]:
    """Return the extensions that match one of these, with its rank and the number of the shown one."""
    ranks = {extension: rank for rank, extension in reversed([*enumerate(alternatives)])}
    if not draft.options.ignore_case:
        there = [
            (draft.numbers[extension], rank) for extension, rank in ranks.items() if extension in draft.numbers
        ]
        return {number: (rank, number) for number, rank in there}
    lowered = {names.lower_case(extension): extension for extension in reversed(alternatives)}
    typed = {}
    for number, extension in enumerate(list(draft.extensions)):
        name = extension if extension in ranks else lowered.get(names.lower_case(extension))
        if name is not None:
            typed[number] = ranks[name], draft.number_of(name)
    return typed
