"""Log lines: fit for a terminal, and the same one not again and again. Standard library only."""

from __future__ import annotations

import logging
import time

from wdsfs import names

QUIET_SECONDS = 30.0  # the same message is logged once in this time
QUIET_MAX = 1000  # messages that are remembered for that


class TerminalFormatter(logging.Formatter):
    """Lines that can be shown on a terminal, whatever names are in them."""

    def format(self, record: logging.LogRecord) -> str:
        return names.shown_lines(super().format(record))


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
