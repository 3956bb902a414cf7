"""The samples that only an overlay has. They have no number: pages show them after those of the shards.

What a commit makes of them is decided in `commit/`, and shown on the page of changes; here only names are looked
at, so that a page of the grid costs no more than the names of the upper.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from wdsfs import names as naming
from wdsfs.errors import WdsfsError
from wdsfs.overlay.upper_format import DIRECTORY, FILE, UpperNode
from wdsfs.pages.library import File, Library, Sample
from wdsfs.tree.tree import FULL_NAMES

NEW_MAX = 10_000  # samples that are found; further ones are on the page of changes only
REST_SHARE = 20  # no search for so many times the duration of the last one, where others may change the overlay
NOWHERE = -1  # in place of the number of a shard, or of an entry


class NewSamples:
    """The new samples of one overlay. `top_of` returns the names of its upper, `files_of` the files at a path."""

    def __init__(
        self, library: Library, top_of: Callable[[], UpperNode], files_of: Callable[[bytes], Sequence[File]]
    ) -> None:
        self._library, self._top_of, self._files_of = library, top_of, files_of
        self._top: UpperNode | None = None
        self._found: list[Sample] = []
        self._next = 0.0

    def forget(self) -> None:
        """Look anew for the next question: something was changed here."""
        self._next = 0.0

    def all(self) -> Sequence[Sample]:
        """The samples, by their paths. The list does not change."""
        top, began = self._top_of(), time.monotonic()
        if top is not self._top and began >= self._next:
            self._found, self._top = list(self._find(top)), top
            now = time.monotonic()
            self._next = now + (now - began) * REST_SHARE
        return self._found

    def _find(self, top: UpperNode) -> Iterator[Sample]:
        count = 0

        def number_at(path: bytes) -> int | None:
            return self._library.answer(lambda now: now.number_at(path))

        for path in _directories_with_files(top):
            if number_at(path) is None:
                with contextlib.suppress(WdsfsError, OSError):  # removed meanwhile
                    sample = self._sample(path)
                    if sample.names:
                        yield sample
                        count += 1
            if count == NEW_MAX:
                return

    def _sample(self, path: bytes) -> Sample:
        files = [one for one in self._files_of(path) if not naming.is_leaving(one.name)]
        stem = path.rpartition(b"/")[2] + b"."
        full = self._library.tree.view.names == FULL_NAMES
        columns = [one.name.removeprefix(stem) if full else one.name for one in files]
        return Sample(
            *(NOWHERE, NOWHERE, NOWHERE, path),
            *(tuple(columns), tuple(one.name for one in files), tuple(one.size for one in files)),
        )


def _directories_with_files(top: UpperNode) -> Iterator[bytes]:
    """The paths of the directories of an upper that lie in one and hold a file, in the order of the names."""
    waiting: list[tuple[bytes, UpperNode]] = [(b"", top)]
    while waiting:
        path, node = waiting.pop()
        children = sorted(node.children.items(), reverse=True)
        if b"/" in path and any(child.kind == FILE for _, child in children):
            yield path
        above = path + b"/" if path else b""
        waiting += [(above + name, child) for name, child in children if child.kind == DIRECTORY]
