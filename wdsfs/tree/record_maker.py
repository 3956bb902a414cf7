"""Makes derived records of shards that others may be changing: indexes what they are made of, and makes sure that
nothing has changed in the meantime."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

from wdsfs.errors import StaleShard, UnreadableShard, UsageError, ViewError
from wdsfs.index.record_of_file import PATIENCE_SECONDS, wait_for_tick
from wdsfs.index.store import Index
from wdsfs.storage.identity import Fingerprint
from wdsfs.tree import label_files
from wdsfs.tree.companions import Companions, CompanionWatch
from wdsfs.tree.composition import Composition, read_class_names
from wdsfs.tree.derived_content import DerivedContent
from wdsfs.tree.draft import ContentSource, Surroundings
from wdsfs.tree.indexing import NotIndexed
from wdsfs.tree.joined_sets import JoinedSets, KeysMissing
from wdsfs.tree.shard_access import Access
from wdsfs.tree.source_sets import SourceSets
from wdsfs.tree.view_record import compose, refuse


class RecordMaker:
    """Makes the records of a view from its sources and companions."""

    def __init__(
        self,
        sources: SourceSets,
        joins: JoinedSets,
        companions: Companions,
        watch: CompanionWatch,
        content: DerivedContent,
        index: Index,
        access: Access,
    ) -> None:
        self._sources, self._joins, self._companions, self._watch = sources, joins, companions, watch
        self._content, self._index, self._access = content, index, access

    def make(self, number: int, wanted: Composition, look: Callable[[], Fingerprint]) -> bytes:
        """The derived record of a shard as everything is now; what it is made of is indexed first.

        `look` returns the fingerprint of the shard and its companions. Raises ShardError, UnreadableShard when
        anything is written to all the time.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            self._sources.distrust()
            before = look()
            try:
                data = self._make_or_refuse(number, wanted, before)
            except NotIndexed as wanting:  # a shard of one of the sources
                wanting.shards.index_now(wanting.number)
                continue
            except KeysMissing as wanting:
                self._joins.load(wanting.which)
                continue
            except StaleShard:
                if time.monotonic() > deadline:
                    raise
                continue
            # If something has changed since, the record has the older fingerprint and so is not taken for right.
            if look() == before:
                return data
            if time.monotonic() > deadline:
                text = "it, or what it is shown with, is being written; try again when that is finished"
                raise UnreadableShard(f"{self._sources.plain.path_text(number)}: {text}")

    def _make_or_refuse(self, number: int, wanted: Composition, fingerprint: Fingerprint) -> bytes:
        self._wait_for_writers()
        source = self._sources.plain.shards[number]
        try:
            with ExitStack() as stack:
                tables = [
                    stack.enter_context(
                        label_files.opened(
                            file, self._watch.fingerprint_of(file), self._index.label_tables, self._access.open
                        )
                    )
                    for file in self._companions.labels
                ]
                record = self._sources.plain.record(number)
                return compose(
                    wanted,
                    ContentSource(source.path, source.name, record, source.without),
                    Surroundings(
                        self._joins.around(number), tables, self._class_names(), self._content.read_member
                    ),
                    fingerprint,
                )
        except ViewError as error:  # a label file that cannot be used
            return refuse(str(error), fingerprint)

    def _wait_for_writers(self) -> None:
        """Wait until a later write to a companion would show in its times."""
        names = self._companions.class_names
        for path in [file.path for file in self._companions.labels] + ([names] if names is not None else []):
            with suppress(OSError):  # reported when it is read; a remote one never changes while it is open
                wait_for_tick(os.stat(path))

    def _class_names(self) -> dict[str, str] | None:
        if self._companions.class_names is None:
            return None
        try:
            return read_class_names(self._companions.class_names)
        except UsageError as error:  # it was right when the mount began
            raise ViewError(str(error)) from None
