"""The workers of a command: the engine that `--executor` names, opened when it is first needed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future
from typing import Any

from wdsfs import __version__
from wdsfs.cluster.engines import Engine, opener
from wdsfs.errors import ExecutorUnusable

UNITS, AHEAD = 64, 4  # in flight: at least so many, and so many for each unit that can be worked at
LOST: tuple[type[Exception], ...] = (BrokenExecutor, CancelledError)
PATIENCE_SECONDS = 5.0  # without a worker until that is said

# Asked in terms of Python alone, so that a worker without wdsfs can answer.
_VERSION = "__import__('importlib').import_module('wdsfs').__version__"

log = logging.getLogger(__name__)


class Workers:
    """The workers that `name` stands for (`engines.py`). Used by one thread.

    `most` is how many units are in flight at most; None: as many as keep the workers busy. Raises UsageError for a
    name that means nothing. To be closed.
    """

    def __init__(self, name: str, most: int | None = None) -> None:
        self.name, self.most = name, most
        self._open = opener(name)
        self._engine: Engine | None = None

    @classmethod
    def of(cls, executor: Executor, most: int | None = None) -> Workers:
        """The workers of an executor that is open, and is not closed here."""
        found = cls("ray", most)  # whose opener is not used
        found.name, found._engine = type(executor).__name__, Engine(executor)
        return found

    @property
    def engine(self) -> Engine:
        """The engine, open. Raises UsageError, ExecutorUnusable."""
        if self._engine is None:
            self._engine = self._open()
            self._refuse_another_version()
        return self._engine

    def in_flight(self) -> int:
        """How many units are to be in flight now."""
        return self.most or max(UNITS, AHEAD * self.engine.width())

    def submit(self, function: Callable[..., Any], argument: object) -> Future[Any]:
        """Hand over work. Raises ExecutorUnusable; RuntimeError if the executor has broken or was shut down."""
        try:
            future = self.engine.executor.submit(function, argument)
        except RuntimeError:  # of which BrokenExecutor is one
            raise
        except Exception as error:
            raise self._unusable(f"it takes no work ({type(error).__name__}: {error})") from error
        if not hasattr(future, "add_done_callback"):
            raise self._unusable(f"submit returns a {type(future).__name__}, not a concurrent.futures.Future")
        return future

    def renew(self) -> None:
        """Make an engine that has broken again. Raises ExecutorUnusable."""
        if not self.engine.renewable:
            raise ExecutorUnusable(f"--executor {self.name}: has broken down; what is finished is kept")
        self.close()

    def close(self) -> None:
        """Let go of the engine, after an error, too. Can be repeated."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _refuse_another_version(self) -> None:
        """Raise ExecutorUnusable if the first worker has no wdsfs, or another one. Each batch is checked, too."""
        assert self._engine is not None
        try:
            future = self.submit(eval, _VERSION)
            with contextlib.suppress(TimeoutError):
                found: Any = future.result(PATIENCE_SECONDS)
            if not future.done():
                log.info("waiting for the first worker of %s", self.name)
            found = future.result()
        except ExecutorUnusable:
            raise
        except (ImportError, AttributeError) as error:
            raise self._unusable(f"a worker has no wdsfs ({error}): install wdsfs {__version__} there") from None
        except LOST + self._engine.lost as error:
            raise self._unusable(f"its first worker has died ({type(error).__name__})") from None
        except Exception as error:
            raise self._unusable(f"a worker cannot work ({type(error).__name__}: {error})") from error
        if found != __version__:
            raise self._unusable(f"a worker has wdsfs {found}: install {__version__} there, too")

    def _unusable(self, text: str) -> ExecutorUnusable:
        return ExecutorUnusable(f"--executor {self.name}: {text}")
