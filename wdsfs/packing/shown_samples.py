"""The samples that a reader finds in a planned shard, by the reader's rules, compared with those of the plan.

Every source of shards (`overlay_source.py`, `view_source.py`, `file_source.py`) compares them before a byte is
written. So a rule that a source does not know makes an error, and never a smaller set.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from wdsfs import names
from wdsfs.errors import CommitError, counted
from wdsfs.index.member_draft import Folders, TooManyFolders, folders_max
from wdsfs.packing.plan import Step, member_names
from wdsfs.tar import headers
from wdsfs.tree.indexing import indexed
from wdsfs.tree.shard_set import ShardSet


class Key(NamedTuple):
    """The key of a sample: as a record has it, and a function that returns it as the tar has it."""

    plain: bytes
    raw: Callable[[], bytes]


class ShownSamples:
    """The samples that a reader finds in the shard of a step, added in the order of the tar.

    `lower` has the source shards, if there are any. Methods raise CommitError.
    """

    def __init__(self, step: Step, lower: ShardSet | None = None) -> None:
        self._step, self._lower = step, lower
        self._samples, self._last = 0, Key(b"", bytes)
        self._key: bytes | None = None  # of the member before, if that is a new one
        self._prefix: bytes | None = None  # with which a further name is known to have this key
        self._folders_most = 0  # which may count a folder several times

    def add_member(self, name: bytes, *, in_sample: bool = True) -> None:
        """Add a new member."""
        prefix = self._prefix
        if (
            prefix
            and name.startswith(prefix)
            and b"/" not in name[len(prefix) :]
            and len(name) <= headers.NAME_MAX
        ):
            return  # a further member of the last sample, in its folder: most are
        why = headers.name_beyond_limit(name)
        key = names.raw_key(name)
        if why is None and in_sample and key is None:
            why = "it is in no sample"
        if why is not None:
            raise self._refusal(f"would leave out {names.readable(name)} ({why})")
        if key is None or key != self._key:
            self._folders_most += name.count(b"/")
        if key is not None and key != self._key:
            self._add(Key(names.plain_key(key), lambda: key))
            self._key = key
            # Of `__a.x` the extension decides if it belongs to the set (`__a.x__`).
            self._prefix = None if key.startswith(b"__") else key + b"."

    def add_copies(self, first: Key, last: Key, count: int = 1) -> None:
        """Add this number of samples that are copied side by side, of which the first may have begun before."""
        self._add(first)
        self._key = self._prefix = None
        self._samples += count - 1
        self._last = last

    def _add(self, key: Key) -> None:
        if key.plain != self._last.plain or key.raw() != self._last.raw():
            self._samples += 1
        self._last = key

    def compare(self) -> None:
        """Compare the samples with those that are planned."""
        if self._samples != self._step.samples:
            shown = counted(self._samples, "sample")
            raise self._refusal(f"would find {shown} in place of {self._step.samples:,}")
        self._refuse_folders()

    def _refuse_folders(self) -> None:
        output, lower = self._step.output, self._lower
        limit, most = folders_max(output.length), self._folders_most
        if lower is not None:
            most += sum(indexed(lower.plain.record, number).folders for number in output.sources)
        if most <= limit:
            return  # nearly always: all names are looked at otherwise
        folders = Folders(limit)
        try:
            for key, _ in member_names(output, lower):
                folders.number(names.split_folder(key)[0])
        except TooManyFolders:
            target = os.fsdecode(output.target)
            raise CommitError(
                f"{target}: readers take no more than {limit:,} folders in a shard of its size: put fewer samples "
                "into each shard (--maxcount), or use fewer folders in the keys"
            ) from None

    def _refusal(self, what: str) -> CommitError:
        return CommitError(
            f"{os.fsdecode(self._step.target) or 'a new shard'}: readers {what}: nothing was written; this is an "
            "error of wdsfs, please report it"
        )
