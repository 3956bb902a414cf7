"""The workers of an engine: hands them units of work, and checks that they have the same version of wdsfs.

The wing `executors` opens the engines that have names; `index/spread.py` decides which unit goes when.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future
from typing import Any, NamedTuple

from wdsfs import __version__, wings
from wdsfs.errors import ExecutorUnusable

UNITS, UNITS_AHEAD = 64, 4  # units in flight: at least UNITS, and UNITS_AHEAD for each unit that can be worked at
LOST: tuple[type[Exception], ...] = (BrokenExecutor, CancelledError)
PATIENCE_SECONDS = 5.0  # without a worker until that is said

# Asked in terms of Python alone, so that a worker without wdsfs can answer.
_VERSION = "__import__('importlib').import_module('wdsfs').__version__"

log = logging.getLogger(__name__)


class Engine(NamedTuple):
    """An engine that is open.

    `width` returns how many units the engine can work at together at this moment, 0 if that is not known. `lost`
    are the exceptions by which it reports that the worker of a unit has died. If `retries`, the engine has tried
    again before it reports. A `renewable` engine can be made again after it has broken.
    """

    executor: Executor
    width: Callable[[], int] = lambda: 0
    lost: tuple[type[Exception], ...] = ()
    retries: bool = False
    renewable: bool = False
    close: Callable[[], None] = lambda: None


class Workers:
    """The workers of the engine that `name` stands for (`executors.py`), or of an open one. Used by one thread.

    `most` is how many units are in flight at most; None: as many as keep the workers busy. Raises UsageError for a
    name that means nothing, NotInstalled. To be closed.
    """

    def __init__(self, name: str, most: int | None = None, engine: Engine | None = None) -> None:
        self.name, self.most = name, most
        self._open: Callable[[], Engine] | None = None if engine else wings.load("executors").opener(name)
        self._engine = engine

    @classmethod
    def of(cls, executor: Executor, most: int | None = None) -> Workers:
        """Return the workers of an executor that is open, and is not closed here."""
        return cls(type(executor).__name__, most, Engine(executor))

    @property
    def engine(self) -> Engine:
        """The engine, open. Raises UsageError, ExecutorUnusable."""
        if self._engine is None:
            assert self._open is not None
            self._engine = self._open()
            self._refuse_another_version()
        return self._engine

    def in_flight(self) -> int:
        """Return how many units may be in flight now."""
        return self.most or max(UNITS, UNITS_AHEAD * self.engine.width())

    def submit(self, function: Callable[..., Any], argument: object) -> Future[Any]:
        """Hand over work. Raises ExecutorUnusable; RuntimeError if the executor has broken or was shut down."""
        try:
            future = self.engine.executor.submit(function, argument)
        except RuntimeError:  # of which BrokenExecutor is one
            raise
        except Exception as error:
            raise self._unusable(f"it refuses work ({type(error).__name__}: {error})") from error
        if not hasattr(future, "add_done_callback"):
            raise self._unusable(f"submit returns a {type(future).__name__}, not a concurrent.futures.Future")
        return future

    def renew(self) -> None:
        """Make an engine that has broken again. Raises ExecutorUnusable."""
        if not self.engine.renewable:
            raise ExecutorUnusable(f"--executor {self.name}: has failed; finished work is kept")
        self.close()

    def close(self) -> None:
        """Close the engine, after an error, too. Can be repeated."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _refuse_another_version(self) -> None:
        """Raise ExecutorUnusable if the first worker has no wdsfs, or another one. Each batch is checked, too."""
        assert self._engine is not None
        try:
            future = self.submit(eval, _VERSION)
            with contextlib.suppress(TimeoutError):
                version: Any = future.result(PATIENCE_SECONDS)
            if not future.done():
                log.info("waiting for the first worker of %s", self.name)
            version = future.result()
        except ExecutorUnusable:
            raise
        except (ImportError, AttributeError) as error:
            raise self._unusable(f"a worker has no wdsfs ({error}): install wdsfs {__version__} there") from None
        except LOST + self._engine.lost as error:
            raise self._unusable(f"its first worker has died ({type(error).__name__})") from None
        except Exception as error:
            raise self._unusable(f"a worker cannot work ({type(error).__name__}: {error})") from error
        if version != __version__:
            raise self._unusable(f"a worker has wdsfs {version}: install {__version__} there, too")

    def _unusable(self, text: str) -> ExecutorUnusable:
        return ExecutorUnusable(f"--executor {self.name}: {text}")
