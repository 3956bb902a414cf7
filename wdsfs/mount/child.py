"""Forked processes for what the supervisor must not do itself: open an index, or touch its own mount.

The supervisor serves nothing while it does one thing, and a mount that does not answer would block it forever.
"""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable
from typing import Any

import trio

log = logging.getLogger(__name__)


async def in_child(function: Callable[[], dict[str, Any]], device: int | None) -> dict[str, Any]:
    """Return the result of `function` in a forked process; empty if it fails.

    The child closes `device`, unless that is None: a request without an answer would keep the mount, and with it
    the child, alive.
    """
    receiver, sender = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            signal.set_wakeup_fd(-1)
            if device is not None:
                os.close(device)
            os.write(sender, json.dumps(function()).encode() + b"\n")
        except Exception:  # of any kind: the supervisor waits for an answer
            log.exception("a question to the mount has failed")
            os.write(sender, b"{}\n")
        finally:
            os._exit(0)
    os.close(sender)
    text = b""
    try:
        # Not until the end of the pipe: a worker that is forked meanwhile has it, too.
        while not text.endswith(b"\n"):
            await trio.lowlevel.wait_readable(receiver)
            part = os.read(receiver, 1 << 16)
            if not part:
                break
            text += part
        while not os.waitpid(pid, os.WNOHANG)[0]:  # noqa: ASYNC110, ASYNC222  # it does not block
            await trio.sleep(0.001)
    except BaseException:
        # Not waited for: it may be waiting for this mount, which is about to end, and cannot die before.
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        os.close(receiver)
    answer: dict[str, Any] = json.loads(text or b"{}")
    return answer
