"""Stores in a process of their own: whoever has used obstore must not fork any more, and tests of other rooms do.

The clock of that process is a test's: waits take no time, and are noted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.processes import PATIENCE, Process
from tests.remote.clocks import JumpingClock
from wdsfs.door.pins import Listing, Pin
from wdsfs.door.urls import Url, parse
from wdsfs.errors import WdsfsError
from wdsfs.remote.retries import Counters
from wdsfs.remote.settings import Settings

ROOT = Path(__file__).parent.parent.parent


class Apart:
    """The stores of another process; each call waits for its answer."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def head(self, url: Url | str) -> Pin:
        pin = self._ask("head", _url(url))
        assert isinstance(pin, Pin)
        return pin

    def get(self, url: Url | str, pin: Pin, begin: int, end: int) -> bytes:
        return bytes(self._ask("get", _url(url), pin, begin, end))

    def get_all(self, url: Url | str, pin: Pin) -> bytes:
        return bytes(self._ask("get_all", _url(url), pin))

    def listing(self, prefix: Url | str, *, deep: bool = True) -> Listing:
        return Listing(*self._ask("list", _url(prefix), deep))

    def upload(self, url: Url | str, file: Path) -> Pin:
        pin = self._ask("upload", _url(url), str(file), None)
        assert isinstance(pin, Pin)
        return pin

    def pages(self, prefix: Url, *, deep: bool) -> Listing:
        """The listing that is made where obstore refuses a name."""
        return Listing(*self._ask("pages", prefix, deep))

    def describe(self, url: Url | str) -> dict[str, Any]:
        return dict(self._ask("describe", _url(url)))

    def together(self, *calls: tuple[Any, ...]) -> list[Any]:
        """What the calls give that are made at once: results, or errors."""
        return list(self._ask("together", *((name, _url(url), *more) for name, url, *more in calls)))

    def configure(self, *sections: tuple[str, dict[str, str]]) -> None:
        """Stores that know nothing yet, with these settings."""
        self._ask("configure", list(sections))

    def later(self, seconds: float) -> None:
        """Let so much time go by."""
        self._ask("later", seconds)

    def waits(self) -> list[float]:
        """The seconds that were waited since the last `configure`, wait by wait."""
        return list(self._ask("waits"))

    def logged(self) -> list[str]:
        """What was logged since the last question for it."""
        return list(self._ask("logged"))

    def counted(self, url: str) -> dict[str, int]:
        return dict(self._ask("counted")[parse(url).store])

    def _ask(self, *request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump(request, self._process.stdin)
        self._process.stdin.flush()
        answer = pickle.load(self._process.stdout)
        if isinstance(answer, Exception):
            raise answer
        return answer


def _url(url: Url | str) -> Url:
    return parse(url) if isinstance(url, str) else url


@contextlib.contextmanager
def running(log: Path, environment: dict[str, str]) -> Iterator[Apart]:
    """The process. It has to have said nothing when it ends: a warning of a library may hold a secret."""
    program = "from tests.remote import apart; apart.serve()"
    with (
        log.open("wb") as said,
        Process(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            cwd=ROOT,
            env=environment,
        ) as process,
    ):
        try:
            yield Apart(process)
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
    assert log.read_text() == ""


def serve() -> None:
    """Answer calls from the standard input until it ends."""
    asyncio.run(_serve())
    os._exit(0)  # at another end of the interpreter obstore's threads abort now and then


async def _serve() -> None:
    from wdsfs.remote import listings
    from wdsfs.remote.store_reader import StoreReader
    from wdsfs.remote.store_requests import StoreRequests
    from wdsfs.remote.store_sender import StoreSender

    log = _Log()
    logging.getLogger().addHandler(log)

    def new(sections: list[tuple[str, dict[str, str]]]) -> tuple[JumpingClock, Counters, Callable[..., Any]]:
        """Return a clock, counters, and what calls stores by the names of their functions."""
        clock, counters = JumpingClock(), Counters()
        requests = StoreRequests(Settings(sections), counters, clock)
        reader = StoreReader(requests)
        sender = StoreSender(requests, reader)

        async def call(name: str, *arguments: Any) -> Any:
            try:
                match name:
                    case "list":
                        return await reader.list(arguments[0], deep=arguments[1])
                    case "pages":
                        return await listings.list_by_pages(requests, arguments[0], deep=arguments[1])
                    case "get_all":
                        return b"".join([bytes(piece) async for piece in reader.get_all(*arguments)])
                    case _:
                        return await getattr(sender if name == "upload" else reader, name)(*arguments)
            except WdsfsError as error:
                return error

        return clock, counters, call

    clock, counters, call = new([])
    answers = sys.stdout.buffer
    while True:
        try:
            name, *arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: Any = None
        match name:
            case "configure":
                clock, counters, call = new(arguments[0])
            case "later":
                clock.time += arguments[0]
            case "waits":
                answer = clock.waits
            case "logged":
                answer, log.messages = log.messages, []
            case "counted":
                answer = counters.report()
            case "together":
                answer = await asyncio.gather(*(call(*each) for each in arguments))
            case _:
                answer = await call(name, *arguments)
        pickle.dump(answer, answers)
        answers.flush()


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
