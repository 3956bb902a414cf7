"""Log lines: fit for a terminal, and repeated ones suppressed. Standard library only."""

from __future__ import annotations

import logging
import time
from typing import Any

from wdsfs import names

QUIET_SECONDS = 30.0  # the same message is logged once in this time
QUIET_MAX = 1000  # messages that are remembered for that


class TerminalFormatter(logging.Formatter):
    """One line for each message, fit for a terminal, whatever names are in it.

    The lines of a traceback are indented, so that no text of an exception looks like a message.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = names.shown(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return "\n".join(f"  {names.shown(line)}" for line in super().formatException(ei).split("\n"))


class LoggedMessages:
    """The messages that a process has logged a moment ago.

    A loader may ask a broken shard for every file in it; all readers of a store that is down meet the same error.
    """

    def __init__(self) -> None:
        self._logged: dict[str, float] = {}  # by message: when, in monotonic seconds

    def add(self, message: str) -> bool:
        """Note a message; returns False if the same one was logged within QUIET_SECONDS."""
        now = time.monotonic()
        if now - self._logged.get(message, -QUIET_SECONDS) < QUIET_SECONDS:
            return False
        if len(self._logged) >= QUIET_MAX:
            self._logged.clear()
        self._logged[message] = now
        return True
