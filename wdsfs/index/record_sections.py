"""The bytes of a record: its sections, each an array or a list of names, and the directory in front of them.

docs/format.md lists the sections. What goes into them is decided in `record_builder.py`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdsfs.errors import StaleMount
from wdsfs.index.record import MAGIC, Record
from wdsfs.storage.identity import Fingerprint


class Sections:
    """The sections of a record, in the order in which they are put."""

    def __init__(self) -> None:
        self._parts: list[tuple[str, str, bytes]] = []

    def put(self, name: str, values: Any, dtype: str) -> None:
        """Add a section of numbers."""
        self._parts.append((name, dtype, np.ascontiguousarray(values, dtype=dtype).tobytes()))

    def put_narrow(self, name: str, values: NDArray[Any]) -> None:
        """Add a section of unsigned numbers, of the smallest type that holds them all."""
        top = int(values.max()) if len(values) else 0
        dtype = "u1" if top < 1 << 8 else "<u2" if top < 1 << 16 else "<u4" if top < 1 << 32 else "<u8"
        self.put(name, values, dtype)

    def put_names(self, name: str, values: Iterable[bytes]) -> None:
        """Add a list of byte strings: where each starts (one more for the end) and all of them joined."""
        values = list(values)
        starts = np.zeros(len(values) + 1, dtype=np.int64)
        np.cumsum(np.fromiter(map(len, values), np.int64, len(values)), out=starts[1:])
        self.put_narrow(name + ".start", starts)
        self._parts.append((name, "B", b"".join(values)))

    def put_hash(
        self, name: str, sums: NDArray[Any], parents: Sequence[int] | NDArray[Any], names: Sequence[bytes]
    ) -> None:
        """Add sorted checksums, and of each the row that it belongs to.

        Rows with equal sums are in the order of their parents and names: anybody can make names of equal sums.
        """
        order = np.argsort(sums, kind="stable")
        edges = np.flatnonzero(np.diff(sums[order], prepend=-1, append=-1))
        for at in np.flatnonzero(np.diff(edges) > 1).tolist():
            rows = slice(edges[at], edges[at + 1])
            order[rows] = sorted(order[rows].tolist(), key=lambda row: (parents[row], names[row]))
        self.put(name + ".hash", sums[order], "<u4")
        self.put(name + ".order", order, "<u4")

    def put_times(self, name: str, mtimes: NDArray[np.int64]) -> None:
        """Add times (ns): equal ones as one value, whole seconds in 4 bytes where they fit, else 8 bytes each."""
        if len(mtimes) and (mtimes == mtimes[0]).all():
            self.put(name, mtimes[:1], "<i8")
            return
        seconds = mtimes // 10**9
        if len(mtimes) and (seconds * 10**9 == mtimes).all() and seconds.min() >= 0 and seconds.max() < 1 << 32:
            self.put(name, seconds, "<u4")
        else:
            self.put(name, mtimes, "<i8")

    def to_bytes(self, directory: dict[str, Any]) -> bytes:
        """The whole record: magic, checksum, length of the directory, the directory (JSON), the sections."""
        offset, table = 0, []
        parts: list[bytes] = []
        for name, dtype, data in self._parts:
            table.append([name, dtype, offset, len(data)])
            padding = -len(data) % 8
            parts += [data, bytes(padding)]
            offset += len(data) + padding
        return _packed({**directory, "sections": table}, parts)


def restamped(data: bytes | memoryview, fingerprint: Fingerprint, moved: bool = False) -> bytes:
    """A sound record with another fingerprint; `moved` as in `Record`."""
    end = 20 + int.from_bytes(data[16:20], "little")
    directory = json.loads(bytes(data[20:end]))
    directory.pop("moved", None)
    directory["fingerprint"] = list(fingerprint)
    if moved:
        directory["moved"] = True
    return _packed(directory, [bytes(data[end:])])


def _packed(directory: dict[str, Any], parts: Iterable[bytes]) -> bytes:
    text = json.dumps(directory, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 4) % 8)
    body = b"".join([len(text).to_bytes(4, "little"), text, *parts])
    return MAGIC + zlib.crc32(body).to_bytes(8, "little") + body


def adopted(data: bytes, fingerprint: Fingerprint) -> bytes:
    """Return a record that another machine has made, under the fingerprint that the shard has on this one.

    Raises StaleMount if it is of a shard of another size or time.
    """
    try:
        theirs = Record(data).fingerprint
    except (ValueError, KeyError, TypeError) as error:
        raise StaleMount(f"a worker has sent what is no record: {error}") from None
    if theirs == fingerprint:
        return data
    if theirs[:2] != fingerprint[:2]:
        raise StaleMount("the shard has changed while a worker read it; try again when it is finished")
    return restamped(data, fingerprint)
