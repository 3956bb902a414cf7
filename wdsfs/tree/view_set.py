"""A view as a set of shards: a `ShardSet` that makes, stores and renews the records of the view.

This module decides under which key and fingerprint a record of a view is stored and when it is made, and checks
that nothing has changed meanwhile. `companions.py` has the sources of a record, `view_content.py` the content of
its members.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from typing import TypeVar

from wdsfs import names
from wdsfs.errors import ShardError, StaleShard, UnreadableShard, UsageError, ViewError, and_others
from wdsfs.index.record import Record
from wdsfs.index.record_of_file import PATIENCE_SECONDS
from wdsfs.index.store import COMMIT_BYTES, COMMIT_SECONDS, Index
from wdsfs.shards import Fingerprint, Shard, Shards, wait_for_tick
from wdsfs.tar.problems import BROKEN_FIELD, Problem
from wdsfs.tree.companions import Companions, CompanionWatch, JoinedSet, KeysMissing, read_class_names
from wdsfs.tree.composition import Composition, Field
from wdsfs.tree.content import Content, ContentColumns
from wdsfs.tree.draft import Ingredients
from wdsfs.tree.freshness import Generations
from wdsfs.tree.indexing import NotIndexed
from wdsfs.tree.label_files import LabelFiles, text_of_files
from wdsfs.tree.label_names import Uses
from wdsfs.tree.label_table import (
    KeyList,
    Missing,
    OpenLabels,
    guess_remarks,
    missing_text,
    open_key_list,
    open_labels,
    refuse_shared,
)
from wdsfs.tree.shard_access import Access
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.view_content import ViewContent
from wdsfs.tree.view_record import LABELLED, LISTED, compose, digits_needed, refusal, refuse

log = logging.getLogger(__name__)

OpenTable = Callable[..., AbstractContextManager[OpenLabels | KeyList]]  # `open_labels` or `open_key_list`
Table = TypeVar("Table", bound=OpenLabels | KeyList)
Found = TypeVar("Found", tuple[str, str], tuple[str, Problem, int])


def is_view(shards: Sequence[Shard], composition: Composition) -> bool:
    """Return True if these shards, shown with these options, need derived records."""
    return not (composition.is_plain and Shards.of(shards).are_whole)


def make_shard_set(
    shards: Sequence[Shard],
    index: Index,
    composition: Composition,
    companions: Companions,
    *,
    descriptors: int = 256,
    tags: Generations | None = None,
    access: Access | None = None,
) -> ShardSet:
    """Return the set of these shards, shown with these options; the last three are those of `ShardSet`."""
    if not is_view(shards, composition):
        return ShardSet(shards, index, descriptors, tags, access)
    return ViewSet(shards, index, composition, companions, descriptors=descriptors, tags=tags, access=access)


class ViewSet(ShardSet):
    """A set of shards seen through a view. `plain` is the set without it.

    It is a subclass because `ShardSet` needs its fingerprints and records of shards, and trees need all else from
    `ShardSet`.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        index: Index,
        composition: Composition,
        companions: Companions,
        *,
        descriptors: int = 256,
        tags: Generations | None = None,
        access: Access | None = None,
    ) -> None:
        super().__init__(shards, index, descriptors, tags, access)
        # `make` finds out the digits of classes that are numbers, unless an option gives them.
        self._finds_digits = composition.classes and composition.class_digits is None
        self.composition = replace(composition, class_digits=1) if self._finds_digits else composition
        # Shards that the options do not change keep their plain record, under its plain key.
        self._unchanged = [composition.is_plain and not shard.without for shard in shards]
        each = max(1, descriptors // (1 + len(companions.joined)))
        self._sources = [ShardSet(some, index, each, access=self.access) for some in (shards, *companions.joined)]
        self.plain, *joined = self._sources
        for source in self._sources:
            source.on_files = lambda _: self.on_files(sum(lower.open_files for lower in self._sources))
            source.slowly = lambda: self.slowly()
        self._watch = CompanionWatch(companions, self.access, self.generations, lambda: self.slowly())
        self._joined = [JoinedSet(shards, lower, self._watch.number) for lower in joined]
        labels: LabelFiles = sum(companions.labels, ())
        self._content = ViewContent(self._sources, labels, self._watch, self.access, self._reconsider)
        self._companions = companions
        self._companions_digest = companions.digest
        self.label_files = companions.others
        self._keys = self._view_keys()
        self.unmade: dict[bytes, ShardError] = {}  # by path: shards that `make` has left out, and why
        self.rest_waits = False  # `make` has left shards to be derived when they are used

    @property
    def sources(self) -> list[ShardSet]:
        return self._sources

    def _view_keys(self) -> list[bytes]:
        """Return the keys under which the index has the records of this view."""
        return [shard.key if self._unchanged[at] else self._view_key(at) for at, shard in enumerate(self.shards)]

    def _view_key(self, number: int) -> bytes:
        shard, partners = self.shards[number], [joined.partner(number) for joined in self._joined]
        common = self._companions_digest + repr(partners).encode()
        return shard.key + b"\0" + self.composition.digest(shard.without, shard.name, common)

    # --- what a shard is now

    def _stat(self, number: int) -> Fingerprint:
        fingerprint = super()._stat(number)
        return fingerprint if self._unchanged[number] else fingerprint.mixed_with(self._watch.number())

    def _log_change(self, number: int, before: Fingerprint, now: Fingerprint) -> None:
        """Log a change as `ShardSet`, but only once if it is one of companions, which all shards have."""
        if self._unchanged[number] or not self._watch.explains(before, now):
            super()._log_change(number, before, now)
        else:
            self._watch.log_change()

    def distrust(self) -> None:
        super().distrust()
        self._distrust_sources()

    def _distrust_sources(self) -> None:
        for source in self._sources:
            source.distrust()

    def record(self, number: int, tag: int | None = None) -> Record:
        """Return the record as `ShardSet.record`. Raises ViewError, too, if the options refuse the shard."""
        record = super().record(number, tag)
        text = refusal(record)
        if text is not None:
            raise ViewError(text)
        return record

    def _indexed_fingerprint(self, number: int) -> Fingerprint:
        if self.summary(number).problems:
            self.record(number)  # raises an error for one that was refused, which counts as none
        return super()._indexed_fingerprint(number)

    # --- making records

    def build(self, number: int) -> bytes:
        """Return the derived record of a shard as everything is now; what it is made of is indexed first."""
        if self._unchanged[number]:
            return self.plain.build(number)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            self._distrust_sources()
            before = self._stat(number)
            try:
                data = self._record_or_refusal(number, before)
            except NotIndexed as missing:  # a shard of one of the sources
                missing.shards.index_now(missing.number)
                continue
            except KeysMissing as missing:
                missing.joined.load()
                continue
            except StaleShard:
                if time.monotonic() > deadline:
                    raise
                continue
            # If something has changed since, the record has the older fingerprint, and so will not be used.
            if self._stat(number) == before:
                return data
            if time.monotonic() > deadline:
                text = "it, or a file that it is shown with, is being written; try again when that is finished"
                raise UnreadableShard(f"{self.path_text(number)}: {text}")

    def _record_or_refusal(self, number: int, fingerprint: Fingerprint) -> bytes:
        """Return the record of a shard by the index; a refusal if a label file cannot be used."""
        keys, class_names = self._companions.keys, self._companions.class_names
        self._wait_for_writers()
        try:
            with ExitStack() as stack:
                tables = [self._opened(open_labels, files) for files in self._companions.labels]
                source = Ingredients(
                    shard=self.shards[number],
                    number=number,
                    record=self.plain.record(number),
                    joined=self._joined,
                    labels=[stack.enter_context(table) for table in tables],
                    keys=None if keys is None else stack.enter_context(self._opened(open_key_list, keys)),
                    class_names=None if class_names is None else read_class_names(class_names),
                    read=self._content.read_member,
                )
                return compose(self.composition, source, fingerprint)
        except (ViewError, UsageError) as error:  # names of classes were right when the mount began
            return refuse(str(error), fingerprint)

    def _opened(
        self, open_table: Callable[..., AbstractContextManager[Table]], files: LabelFiles
    ) -> AbstractContextManager[Table]:
        """Open the table of these files as they are now. Raises as `open_labels`."""
        return open_table(files, self._watch.fingerprints_of(files), self.access.open)

    def keys_missing(self) -> str | None:
        """Return a warning if no sample has some keys of the list. Raises ViewError if no sample has any.

        Raises StaleShard if the list changes meanwhile.
        """
        files = self._companions.keys
        if files is None:
            return None
        missing, uses = self._compared(files, LISTED, open_key_list)
        if not missing.number:
            return None
        text = f"--keys {text_of_files(files)}: {missing_text(missing, 'key', uses)}"
        if not any(map(len, uses)):
            raise ViewError(f"{text}; a line is KEY or SHARD/KEY, as the mount shows them, or the name of a file")
        return text

    def labels_missing(self) -> list[str]:
        """Return remarks on the rows of label files that no sample has. Raises as `keys_missing`."""
        texts = []
        for number, files in enumerate(self._companions.labels):
            missing, uses = self._compared(files, LABELLED.format(number), open_labels)
            text = f"--associate {text_of_files(files)}: {missing_text(missing, 'row', uses)}"
            texts += [text] if missing.number else []
        return texts

    def _compared(self, files: LabelFiles, section: str, open_table: OpenTable) -> tuple[Missing, list[Uses]]:
        """Return the rows of a table that no sample has, and how samples use the others. Raises as `keys_missing`.

        Raises ViewError, too, for a row that several samples have by leaving out directories.
        """
        uses = list[Uses]()
        self.distrust()  # or records would be of the table of a second ago
        before = self._watch.number()
        changed = StaleShard(f"{text_of_files(files)} has changed while it was compared with the set")
        for number in self.numbers:
            try:
                record = self.record(number)
                uses += [record.array(section)] if section in record.column else []
            except NotIndexed:
                if self.shards[number].path not in self.unmade:
                    raise changed from None
            except ShardError:  # a warning of its own
                pass
        fingerprints = self._watch.fingerprints_of(files)
        self.distrust()
        if self._watch.number() != before:
            raise changed
        with open_table(files, fingerprints, self.access.open) as table:
            refuse_shared(table, uses)
            return table.missing(uses), uses

    def guesses(self) -> list[str]:
        """Return remarks on the columns of keys that no option has named. Raises ShardError."""
        labels, keys = self._companions.labels, self._companions.keys
        tables: list[tuple[str, LabelFiles, OpenTable]] = [("--associate", files, open_labels) for files in labels]
        tables += [] if keys is None else [("--keys", keys, open_key_list)]
        texts = list[str]()
        for option, files, open_table in tables:
            with self._opened(open_table, files) as table:
                texts += guess_remarks(option, table)
        return texts

    def _wait_for_writers(self) -> None:
        """Wait until a later write to a companion shows in its times."""
        names = self._companions.class_names
        for path in [file.path for file in self._companions.tables] + ([names] if names is not None else []):
            with suppress(OSError):  # reported when it is read; a remote one never changes while it is open
                wait_for_tick(os.stat(path))

    def was_indexed_elsewhere(self, number: int) -> bool:
        try:
            return super().was_indexed_elsewhere(number)
        except ViewError:
            # Another process has found that it is refused. Only requests for this shard are to fail for that: in a
            # merged tree there may be none.
            self.generation += 1
            return True

    def _log_damage(self, number: int, made: Record) -> None:
        text = refusal(made)
        if text is not None:  # not derived when the mount began, or changed since
            log.error("nothing is shown of this shard: %s", text)
        # The problems of the shard itself were logged when it was indexed.
        texts = [problem.text for problem in made.problems if problem.kind == BROKEN_FIELD]
        if texts:
            log.warning("%s: %s%s", self.path_text(number), texts[0], and_others(len(texts)))

    def make(self, on_done: Callable[[int], None] = lambda _: None, *, some: bool = False) -> str | None:
        """Derive the missing records, up to the first shard that is refused; return the reason, if there is one.

        With `some`, up to the first shard that shows a sample, if the options can refuse none.

        With classes it also finds the number of digits of the longest class: each time a longer one comes, the
        shards so far are derived again, with more digits. These are few, since most numbers of a set are as long
        as the longest. Records with fewer digits are kept, so that the next mount of the same shards derives
        nothing.

        Shards that cannot be read are left out and listed in `unmade`. `on_done` is called with the number of
        shards that are done. Raises MissingShard, UnreadableShard for a companion.
        """
        self._watch.number()
        while True:
            refused = self._make_all(on_done, some and self.composition.only_chooses)
            digits = 0 if refused is None else digits_needed(refused)
            if not (digits and self._finds_digits):
                return None if refused is None else refusal(refused)
            self.composition = replace(self.composition, class_digits=digits)
            self._keys = self._view_keys()
            self._drop_records()

    def _make_all(self, on_done: Callable[[int], None], some: bool) -> Record | None:
        """Derive the missing records, as `make`; return the record of a shard that is refused."""
        pending: list[tuple[bytes, bytes]] = []
        refused: Record | None = None
        self.unmade.clear()
        self.rest_waits = False
        since, size = time.monotonic(), 0
        for number in self.numbers:
            made: Record | None = None
            samples = 0
            try:
                try:
                    summary = self.summary(number)
                    samples = summary.samples
                    if summary.problems:
                        made = super().record(number)  # it may be one that was refused
                except NotIndexed:
                    data = self.build(number)
                    made = Record(data, verify=False)
                    samples = made.samples
                    pending.append((self._keys[number], data))
                    size += len(data)
            except ShardError as error:
                self.unmade[self.shards[number].path] = error
            if made is not None and refusal(made) is not None:
                refused = made
                break
            on_done(number + 1)
            if some and samples:
                self.rest_waits = True
                break
            if pending and (time.monotonic() - since > COMMIT_SECONDS or size > COMMIT_BYTES):
                self._store(pending)
                since, size = time.monotonic(), 0
        self._store(pending)
        return refused

    def missing_fields(self, shards: int) -> list[Field]:
        """Return the options `--field` that make no file in the first `shards`: they may be misspelt."""
        options = self.composition
        fields = [field for field in options.fields if not (options.columns and options.shows(field.name))]
        samples = 0
        for number in range(min(len(self), shards)):
            with suppress(ShardError, NotIndexed):
                record = self.record(number)
                samples += record.samples
                extensions = record.extension_name.of(range(len(record.extension_name)))
                there = set(map(names.lower_case, extensions))
                fields = [field for field in fields if names.lower_case(field.name) not in there]
        return fields if samples else []

    def _store(self, pending: list[tuple[bytes, bytes]]) -> None:
        if pending:
            self.index.store(pending)
            pending.clear()

    def damaged(self) -> Iterator[tuple[str, str]]:
        """Yield as `ShardSet.damaged`, and the joined shards: what they lack is missing here as well.

        A label file or a list that cannot be used is named itself, once: the shards are whole.
        """
        files, seen = [*map(os.fsdecode, self.label_files)], set[tuple[str, str]]()
        for path, text in self._with_joined(super().damaged(), ShardSet.damaged):
            fault = next(((file, text[len(file) + 2 :]) for file in files if text.startswith(f"{file}: ")), None)
            if fault is None:
                yield path, text
            elif fault not in seen:
                seen.add(fault)
                yield fault

    def known_damage(self) -> Iterator[tuple[str, Problem, int]]:
        yield from self._with_joined(super().known_damage(), ShardSet.known_damage)

    def _with_joined(self, own: Iterator[Found], ask: Callable[[ShardSet], Iterator[Found]]) -> Iterator[Found]:
        """Yield the findings of the set, and those of the joined shards that it does not have itself."""
        seen = {self.path_text(number) for number in self.numbers}
        yield from own
        for below in self._sources[1:]:
            for answer in ask(below):
                if answer[0] not in seen:
                    seen.add(answer[0])
                    yield answer

    # --- content

    def record_and_plain(self, number: int, tag: int | None = None) -> tuple[Record, Record]:
        """Return both as `ShardSet.record_and_plain`. Raises StaleShard if the shard has changed since then."""
        record = self.record(number, tag)
        return record, self._content.plain_of(record, number)

    def origin(self, number: int, member: int, tag: int | None = None) -> tuple[ShardSet, int, int] | None:
        """Return the origin as `ShardSet.origin`; the source shard is indexed. Raises what `content` raises."""
        return self._content.origin(self.record(number, tag), number, member)

    def content(self, number: int, tag: int, member: int) -> Content:
        return self._content.of(self.record(number, tag), number, tag, member)

    def content_columns(self, number: int) -> ContentColumns:
        return self._content.columns(self.record(number), number)

    def release(self) -> None:
        self._content.close()
        for source in self._sources:
            source.release()
        super().release()
