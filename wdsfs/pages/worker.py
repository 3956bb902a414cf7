"""The program of a worker: decodes members, one after the other, within limits that no content can exceed.

Before it loads its libraries it gives up all but reading files, and then all but decoding (`sandbox`): it can open
no file and no socket, change no file, start no process and signal none, and has a limit of memory, and of a
processor's time for each member. A decoder that exceeds a limit ends this process, and the server starts another.
"""

from __future__ import annotations

import os
import resource
import socket
import warnings
from typing import Any

from wdsfs.pages import sandbox, wire
from wdsfs.pages.decoders import Task, decode, warm_up
from wdsfs.pages.member_file import TooMuch, open_member
from wdsfs.pages.plain import error_text
from wdsfs.pages.preview import Detail, packed


def main() -> None:
    """Serve the socket that is descriptor 0 until its other side is closed."""
    warnings.simplefilter("ignore")  # of libraries, about what they decode
    os.closerange(3, 1 << 20)  # inherited descriptors: files that the parent of the server had open
    connection = socket.socket(fileno=0)
    try:
        settings, _ = wire.receive(connection)
        try:
            sandbox.begin()
            warm_up(settings["libraries"])
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
    """Have the kernel end this process after so many more seconds of processor time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    end = int(used.ru_utime + used.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))


def _answer(connection: socket.socket, task: dict[str, Any], head: bytes) -> bool:
    """Do one task; False if this process should not do another."""
    size, detail = int(task["size"]), Detail(*task["detail"])
    file = open_member(connection, size, head, detail.read)
    blob = bytearray()
    try:
        found = packed(decode(Task(task["decoder"], task["name"], detail), file, size), blob)
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
    wire.send(connection, {"done": found}, blob)
    return True
