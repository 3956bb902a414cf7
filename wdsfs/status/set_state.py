"""What a mount says of its list of shards: if it is followed, when it was looked at, what came and went.

The supervisor writes it, and any process that makes a report reads it: a text in shared memory, made before the
workers are forked.
"""

from __future__ import annotations

import json
import mmap
import struct
import zlib
from typing import Any

ERROR_MAX = 2000  # characters
LEFT_OUT_MAX = 100  # shards that are named; the others are counted
READS_MAX = 1000  # of a text that is being written
_ROOM = 16 << 10  # a report has room for 64 KiB in all
_HEAD = struct.Struct("<II")  # bytes, CRC-32


class SetState:
    """The state as JSON. `follow` is how often the set is looked at again (s), None for a set that is fixed."""

    def __init__(self, follow: float | None = None) -> None:
        self._memory = mmap.mmap(-1, _ROOM)  # what is not used takes no memory
        self.write(_state(follow))

    def write(self, state: dict[str, Any]) -> None:
        """Replace the state. Of the shards that are left out only as many are kept as there is room for."""
        state = {**state, "error": state["error"][:ERROR_MAX]}
        left_out = state["left_out"][:LEFT_OUT_MAX]
        while True:
            text = json.dumps({**state, "left_out": left_out}).encode()
            if len(text) + _HEAD.size <= _ROOM or not left_out:
                break
            left_out = left_out[: len(left_out) // 2]
        self._memory[: _HEAD.size + len(text)] = _HEAD.pack(len(text), zlib.crc32(text)) + text

    def read(self) -> dict[str, Any]:
        """The state as of now."""
        for _ in range(READS_MAX):
            length, crc = _HEAD.unpack_from(self._memory)
            text = bytes(self._memory[_HEAD.size : _HEAD.size + length])
            if zlib.crc32(text) == crc:  # else it is being written just now
                found: dict[str, Any] = json.loads(text)
                return found
        return _state(None, "the process that looks at the set again was killed while it noted what it had found")


def _state(follow: float | None, error: str = "") -> dict[str, Any]:
    nothing: list[dict[str, str]] = []
    counts = dict.fromkeys(("added", "removed", "left_out_count"), 0)
    return {"follow": follow, "looked": None, "left_out": nothing, **counts, "error": error}
