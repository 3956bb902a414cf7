"""What a process knows of the objects at remote paths: pins, lists that name them, and answers that none is there.

Pins are noted in the cache, too, for all processes and for a time without a network.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from wdsfs.errors import ShardError

if TYPE_CHECKING:
    from wdsfs.door.pins import Pin
    from wdsfs.door.remote_side import Presumption
    from wdsfs.remote.object_cache import ObjectCache

REFUSED_SECONDS = 5.0  # how long the answer of a store that an object is missing or refused stays valid


class KnownPins:
    """The last known pin of each remote shard, by path."""

    def __init__(self, cache: Callable[[], ObjectCache]) -> None:
        self._cache = cache
        self._pins: dict[bytes, Pin | None] = {}  # of this process: all, also those that the cache cannot keep
        self._presumptions: dict[str, Presumption] = {}  # by list: what counts where nothing else is known
        self._refused: dict[bytes, tuple[float, ShardError]] = {}  # until when (monotonic), which error

    def pin(self, path: bytes) -> Pin | None:
        """Return the last known pin; None without one, or if the store has said that the object is gone."""
        if path not in self._pins and (pin := self.presumed(path)) is not None:
            self._pins[path] = pin
        return self._cache().pin_or(os.fsdecode(path), self._pins.get(path))

    def own_pin(self, path: bytes) -> Pin | None:
        """Return the last pin that this process has noted."""
        return self._pins.get(path)

    def paths(self) -> list[bytes]:
        """Return the paths of the objects that this process knows."""
        return [path for path, pin in self._pins.items() if pin is not None]

    def note(self, path: bytes, pin: Pin) -> None:
        self._pins[path] = pin
        with contextlib.suppress(OSError):  # a full disk: this process still knows the pin
            self._cache().keep_pin(os.fsdecode(path), pin)

    def forget(self, path: bytes) -> None:
        """Note that a store does not have an object any more: its bytes in the cache are not served."""
        self._pins[path] = None
        with contextlib.suppress(OSError):
            self._cache().drop_pin(os.fsdecode(path))

    # --- lists of objects

    def presume(self, source: str, presumption: Presumption) -> None:
        self._presumptions[source] = presumption

    def is_presumed(self, path: bytes) -> bool:
        return path not in self._pins and any(path in known.rows for known in self._presumptions.values())

    def presumed(self, path: bytes) -> Pin | None:
        for known in self._presumptions.values():
            if path in known.rows:
                return known.pin(known.rows[path])
        return None

    # --- refusals

    def refuse(self, path: bytes, error: ShardError) -> None:
        """Note the error that a store has answered."""
        self._refused[path] = time.monotonic() + REFUSED_SECONDS, error

    def raise_refusal(self, path: bytes) -> None:
        """Raise the error that a store has just answered, so that it is not asked for each use of the shard."""
        until, error = self._refused.get(path, (0.0, None))
        if error is not None and time.monotonic() < until:
            raise type(error)(f"{error}")
