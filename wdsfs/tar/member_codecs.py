"""Members that are compressed one by one, such as `x.json.gz`: recognises and decodes them.

Pure functions over bytes. The suffixes are those that the webdataset library (`autodecode.gzfilter`: gz) and
Hugging Face datasets (all four) decode.
"""

from __future__ import annotations

from wdsfs.errors import CorruptShard
from wdsfs.storage.unpack_cache import DAMAGED, TRAILING, TRUNCATED, WHOLE
from wdsfs.tar import streams

SUFFIXES = (b".gz", b".bz2", b".xz", b".zst")
_KINDS = ("gzip", "bzip2", "xz", "zstd")  # in the same order
_WRONG = {TRAILING: "something else follows it", TRUNCATED: "it is cut off", DAMAGED: "it is damaged"}
DECODED_MAX = 64 << 20  # bytes; a larger one is not decoded: it would be a bomb, or not fit into a worker's memory


def codec_of(extension: bytes) -> tuple[int, bytes] | None:
    """The number of the codec in SUFFIXES and the extension without its suffix; None for any other."""
    for number, suffix in enumerate(SUFFIXES):
        if extension.endswith(suffix) and len(extension) > len(suffix):
            return number, extension[: -len(suffix)]
    return None


def decode(codec: int, data: bytes) -> bytes:
    """Return the content of `data`, of all its streams.

    Raises CorruptShard if it is no such data, is cut off, or contains more than DECODED_MAX bytes; UsageError if
    the library for it is not installed.
    """
    name, content = SUFFIXES[codec][1:].decode(), bytearray()

    def write(part: bytes) -> None:
        content.extend(part)
        if len(content) > DECODED_MAX:
            raise CorruptShard(f"holds more than {DECODED_MAX >> 20} MiB, the most that is decoded")

    try:
        state, size = streams.unpack(_KINDS[codec], BytesReader(data), write)
    except streams.TooLarge as error:
        raise CorruptShard(f"is not decoded: {error}") from None
    if state != WHOLE:
        why = _WRONG[state] if size or state != TRAILING else "it begins with something else"
        raise CorruptShard(f"is no whole {name} data ({why})")
    return bytes(content)


class BytesReader:
    """Bytes as a `source.TarReader`."""

    def __init__(self, data: bytes) -> None:
        self.size, self._data = len(data), data

    def pread(self, size: int, offset: int, /) -> bytes:
        return self._data[offset : offset + size]

    def close(self) -> None:
        pass
