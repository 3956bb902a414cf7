"""Lists of keys as text: their keys, and copies of lists that can be read only once."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence

from wdsfs import source
from wdsfs.errors import UsageError
from wdsfs.tree.label_files import KEY_MAX, NO_KEY, TEXT, TOO_LONG, LabelFile, label_error, note_typed_name


def read_keys(file: LabelFile, read: Callable[[int], bytes]) -> Iterator[tuple[list[bytes], Sequence[int]]]:
    """Yield the keys of a text, with empty ones.

    Semantics decision: a key in each line; if there is a NUL in the first MiB, NULs are between the keys, which
    may then have newlines; if there are neither NULs nor newlines, but carriage returns, these are. Nothing else
    is left out: a key may have blanks, or begin with #.
    """
    block, lines, rest = read(KEY_MAX), 0, b""
    if block.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise label_error(file, None, "is in UTF-16: save it as UTF-8")
    block = block.removeprefix(b"\xef\xbb\xbf")
    parts = ((b"\0", block), (b"\n", block), (b"\r", block[:-1]))  # the last one may be half of a CRLF
    between = next((mark for mark, part in parts if mark in part), b"\n")
    while block:
        text = rest + block
        *keys, rest = text.split(between)
        if between == b"\n" and b"\r" in text:
            keys = [key.removesuffix(b"\r") for key in keys]
        if len(keys) > KEY_MAX // 2 and not any(keys):
            raise label_error(file, lines + 1, "is the first of half a million empty lines")
        yield keys, range(lines + 1, lines + 1 + len(keys))
        lines += len(keys)
        if len(rest) > KEY_MAX:
            raise label_error(file, lines + 1, TOO_LONG)
        block = read(KEY_MAX)
    yield [rest if between == b"\0" else rest.removesuffix(b"\r")], [lines + 1]


def copy_list(value: str, option: str, directory: str) -> str:
    """Copy a list that can be read only once, `-` for the standard input, into a file in this directory.

    Returns its path. At most half of the room there is taken. Raises UsageError, ViewError, OSError.
    """
    copy, is_input = os.path.join(directory, "keys.txt"), value == "-"
    file = LabelFile(os.fsencode(copy), TEXT, is_list=True)
    note_typed_name(file.path, "standard input" if is_input else value)
    with source.open_stream(0 if is_input else value) as stream, open(copy, "xb") as target:
        about, room = os.fstat(stream.fileno()), os.statvfs(copy)
        if stat.S_ISCHR(about.st_mode) and not stream.isatty() and about.st_rdev != os.stat(os.devnull).st_rdev:
            raise UsageError(f"{option} {value}: is a device; name a file, a pipe or - for the standard input")
        most = room.f_bavail * room.f_frsize // 2

        def read(size: int) -> bytes:
            data = stream.read(size)
            if target.tell() + len(data) > most:
                raise UsageError(
                    f"{option} {value}: is larger than half of the room in {directory}; write it into a file"
                )
            target.write(data)
            return data

        if not sum(any(keys) for keys, _ in read_keys(file, read)):
            raise label_error(file, None, NO_KEY)
    return copy
