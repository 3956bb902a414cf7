"""Members that are compressed one by one, such as `x.json.gz`: recognises and decodes them.

Pure functions over bytes. The suffixes are those that the webdataset library (`autodecode.gzfilter`: gz) and
Hugging Face datasets (all four) decode.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import lzma
import zlib
from typing import IO, Any

from wdsfs.errors import CorruptShard, UsageError

SUFFIXES = (b".gz", b".bz2", b".xz", b".zst")
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
    name = SUFFIXES[codec][1:].decode()
    try:
        with _opened(codec, io.BytesIO(data)) as stream:
            found: bytes = stream.read(DECODED_MAX + 1)
    except (OSError, EOFError, zlib.error, lzma.LZMAError, ValueError) as error:
        raise CorruptShard(f"is no whole {name} data ({error})") from None
    except _zstd_error() as error:
        raise CorruptShard(f"is no whole {name} data ({error})") from None
    if len(found) > DECODED_MAX:
        raise CorruptShard(f"holds more than {DECODED_MAX >> 20} MiB, the most that is decoded")
    return found


def _opened(codec: int, raw: IO[bytes]) -> Any:
    if codec == 0:
        return gzip.GzipFile(fileobj=raw)
    if codec == 1:
        return bz2.BZ2File(raw)
    if codec == 2:
        return lzma.LZMAFile(raw)
    return zstd().ZstdFile(raw)


def zstd() -> Any:
    """Python 3.14's zstd, or the same for earlier ones. Raises UsageError."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise UsageError("before Python 3.14, zstd needs the package backports.zstd: pip install 'wdsfs[compressed]'")


def _zstd_error() -> tuple[type[Exception], ...]:
    try:
        return (zstd().ZstdError,)
    except UsageError:
        return ()
