"""The program of a worker: decodes members, one after the other, within limits that no content can exceed.

Before it loads its libraries it gives up all rights but to read files, and then all but those for decoding
(`sandbox`): it can open no file and no socket, change no file, start no process and signal none, and has limits
of memory, and of processor time for each member. A decoder that exceeds a limit ends this process, and the server
starts another.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import os
import resource
import socket
import warnings
import zipfile
from collections.abc import Callable
from typing import Any

from wdsfs.errors import UsageError, counted
from wdsfs.extras import zstd
from wdsfs.pages import decode_data, decode_media, sandbox, wire
from wdsfs.pages.preview import (
    KIND_BYTES,
    Content,
    Detail,
    Preview,
    TooMuch,
    content_of,
    error_text,
    hex_preview,
    plain_preview,
    without_controls,
)
from wdsfs.pages.wire import Member, MemberFile

PICKLE_NOTE = "A pickle can run any code when it is loaded, so it is not loaded here."


def main() -> None:
    """Serve the socket that is descriptor 0 until its other side is closed."""
    warnings.simplefilter("ignore")  # of libraries, about what they decode
    os.closerange(3, 1 << 20)  # inherited descriptors: files that the parent of the server had open
    connection = socket.socket(fileno=0)
    try:
        settings, _ = wire.receive(connection)
        try:
            sandbox.begin()
            warm_up()
            _give_up(int(settings["memory"]))
        except Exception as error:
            wire.send(connection, {"failed": f"{type(error).__name__}: {error}"})
            return
        wire.send(connection, {"ready": True})
        while True:
            task, head = wire.receive(connection)
            _allow_time(int(settings["seconds"]))
            if not _answer(connection, task, head):
                return
    except (wire.Broken, OSError):
        return


def _give_up(memory: int) -> None:
    """Limit this process for good."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    sandbox.close()
    for limit, value in (
        (resource.RLIMIT_AS, now + memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 0),
    ):
        resource.setrlimit(limit, (value, value))


def _allow_time(seconds: int) -> None:
    """Limit the processor time of this process to this many further seconds; the kernel ends it then."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    end = int(used.ru_utime + used.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))


def _answer(connection: socket.socket, task: dict[str, Any], head: bytes) -> bool:
    """Do one task; return False if this process should not do another."""
    size, detail = int(task["size"]), Detail(*task["detail"])
    file = io.BufferedReader(MemberFile(connection, size, head, detail.read), wire.BUFFER)
    blob = bytearray()
    try:
        extension = content_of(task["name"], b"").extension
        preview = wire.packed(decode(task["decoder"], task["name"], Member(file, size, extension), detail), blob)
    except MemoryError:
        # The library may have stopped half-way, in an unknown state: so this process ends.
        wire.send(connection, {"failed": "It needs more memory than a preview may have.", "ends": True})
        return False
    except TooMuch as error:
        wire.send(connection, {"failed": str(error)})
        return True
    except wire.Broken:
        return False
    except Exception as error:
        # Decoders raise exceptions of any class; each means that the content is damaged.
        wire.send(connection, {"failed": f"It cannot be decoded: {error_text(error)}."})
        return True
    wire.send(connection, {"done": preview}, blob)
    return True


# --- decoders


_DECODERS: dict[str, Callable[[Member, Detail], Preview]] = {
    "picture": decode_media.decode_picture,
    "audio": decode_media.decode_audio,
    "array": decode_data.decode_array,
    "arrays": decode_data.decode_arrays,
    "json": decode_data.decode_json,
    "json_lines": decode_data.decode_lines,
    "csv": decode_data.decode_csv,
    "pickle": lambda member, detail: _decode_pickle(member, detail),
}


def decode(decoder: str, name: str, member: Member, detail: Detail) -> Preview:
    """Return the preview of a member. Raises TooMuch, and any exception that a library raises."""
    return _decode_packed(name, member, detail) if decoder == "packed" else _DECODERS[decoder](member, detail)


def _decode_packed(name: str, member: Member, detail: Detail) -> Preview:
    """Return the preview of the content of a compressed member, unpacked up to a limit."""
    data, is_whole = unpacked(member, detail.read // 2)
    content = content_of(name.rpartition(".")[0], data[:KIND_BYTES])
    note = f"unpacked from {member.extension}"
    if not is_whole:
        note = f"only its first {len(data) >> 20} MiB were unpacked"
        if content.decoder not in ("json_lines", "csv", "text", "label", "hex", "pdf"):
            content = Content("text" if content.decoder == "json" else "hex", content.extension)
    elif content.decoder == "packed":
        content = Content("hex", content.extension)
    inner = Member(io.BytesIO(data), len(data), content.extension, is_whole)
    shown_size = inner.size if content.decoder in ("hex", "pdf") else inner.least_size
    preview = plain_preview(content, data, shown_size, detail)
    if preview is None:
        preview = _DECODERS[content.decoder](inner, detail)
    return preview._replace(summary=f"{preview.summary}; {note}", is_cut=preview.is_cut or not is_whole)


def unpacked(member: Member, most: int) -> tuple[bytes, bool]:
    """Return up to `most` unpacked bytes of a content, and True if that is all. Raises what its reader raises."""
    with _reader(member) as reader:
        target = io.BytesIO()
        while part := reader.read(min(1 << 20, most - target.tell())):
            target.write(part)
        return target.getvalue(), target.tell() < most or not reader.read(1)


def _reader(member: Member) -> Any:
    if member.extension == "gz":
        return gzip.GzipFile(fileobj=member.file)
    if member.extension == "bz2":
        return bz2.BZ2File(member.file)
    if member.extension in ("xz", "lzma"):
        return lzma.LZMAFile(member.file)
    try:
        return zstd().ZstdFile(member.file)
    except UsageError as error:
        raise TooMuch(f"It cannot be unpacked: {error}.") from None


def _decode_pickle(member: Member, detail: Detail) -> Preview:
    """Return a pickle, or the names in a PyTorch archive: as bytes, never loaded."""
    head = member.file.read(KIND_BYTES)
    preview = hex_preview(head, member.size, PICKLE_NOTE)
    if not head.startswith(b"PK\x03\x04"):
        return preview
    with zipfile.ZipFile(member.file) as archive:
        entries = archive.infolist()
    rows = [(without_controls(entry.filename)[:200], f"{entry.file_size:,}") for entry in entries[: detail.rows]]
    summary = f"a zip archive of {counted(len(entries), 'file')}, {preview.summary}"
    return preview._replace(summary=summary, rows=(("name", "bytes"), *rows))


def warm_up() -> None:
    """Load everything that decoding needs, since later no file can be opened."""
    decode_media.warm_up()
    decode_data.warm_up()
    for extension, data in (("gz", gzip.compress(b"a")), ("bz2", bz2.compress(b"a")), ("xz", lzma.compress(b"a"))):
        unpacked(Member(io.BytesIO(data), len(data), extension), 10)
    with contextlib.suppress(UsageError):
        unpacked(Member(io.BytesIO(zstd().compress(b"a")), 0, "zst"), 10)
    for encoding in ("utf-16", "utf-8-sig", "latin-1"):
        "a".encode(encoding).decode(encoding)
