"""Lists of keys that a program has in memory, as files that `--keys` reads.

Such a file lies in the cache under a name that its content decides. So a view of the same keys is the same view,
also in other processes, and its records in the index are used again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from typing import Any

from wdsfs.cache import file_cache
from wdsfs.cache.file_cache import NewFile
from wdsfs.errors import UnreadableShard, UsageError
from wdsfs.tree.label_files import KEY_MAX, note_typed_name
from wdsfs.tree.sample_reader import TEXT

_KIND = "list"  # of the files in the cache
SHOWN = "keys"  # in messages, where a file has its name


@contextlib.contextmanager
def file_of_keys(keys: Any) -> Iterator[str]:
    """Provide the path of a file with these keys, or of the file that `keys` names already.

    The cache does not evict the file inside the block. Raises UsageError, UnreadableShard, IndexUnusable.
    """
    if isinstance(keys, str | os.PathLike):
        yield os.fspath(keys)
        return
    text = _text_of(keys)

    def fill(file: NewFile) -> tuple[str, int]:
        file.write(text)
        return _KIND, len(text)

    cache = file_cache.cache(notes_use=False)  # a new atime would change the fingerprint of the list
    try:
        fd = cache.make(hashlib.blake2b(text, digest_size=16).hexdigest(), (_KIND,), fill).fd
    except (OSError, file_cache.NoRoom) as error:
        reason = getattr(error, "strerror", None) or error
        raise UnreadableShard(f"keys: the cache {cache.directory} does not take the list: {reason}") from None
    try:
        path = os.readlink(f"/proc/self/fd/{fd}")
        note_typed_name(os.fsencode(path), SHOWN)
        yield path
    finally:
        os.close(fd)


def _text_of(keys: Any) -> bytes:
    """Return keys with NULs between them, and one before them, which tells a list from other kinds of files."""
    if isinstance(keys, bytes) or getattr(keys, "ndim", 1) != 1 or not hasattr(keys, "__iter__"):
        raise UsageError(f"keys={keys!r:.40}: give a list or a column of keys, or the path of a file with keys")
    to_list = getattr(keys, "to_pylist", None) or getattr(keys, "tolist", None) or (lambda: list(keys))
    values = to_list()
    try:
        parts = [key.encode(*TEXT) if isinstance(key, str) else key for key in values]
        text = b"\0".join([b"", *parts])
    except UnicodeEncodeError as error:
        raise UsageError(f"keys: {error.object!a:.100} is not UTF-8") from None
    except TypeError:
        at, key = next((at, key) for at, key in enumerate(values) if not isinstance(key, str | bytes))
        raise UsageError(f"keys[{at}]={key!r:.40}: a key is a text or bytes") from None
    if text.count(b"\0") != len(parts):
        raise UsageError("keys: a key has a NUL, which no name in a tar has")
    if max(map(len, parts), default=0) > KEY_MAX:
        raise UsageError(f"keys: a key is longer than {KEY_MAX >> 20} MiB")
    return text
