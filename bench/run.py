"""A run of the benchmark: what takes part in which order, fresh mounts, and where results go."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from bench import cache, clients
from bench.clients import Clients, ClientsFailed, Job
from bench.data import Set, Sets
from bench.report import Case, Results
from bench.systems import (
    Broken,
    System,
    View,
    run,
)

SETTLE_SECONDS = 0.1  # from the first answer until all processes of a mount have started
RESIDENT_MOST = 0.02  # of what should have left the page cache


class Bench:
    """A run: what takes part, how often, and where the results go."""

    def __init__(
        self,
        sets: Sets,
        systems: dict[str, System],
        results: Results,
        repetitions: int,
        limit: float,
        say: Callable[[str], None],
    ) -> None:
        self.sets, self.systems, self.results = sets, systems, results
        self.repetitions, self.limit, self.say = repetitions, limit, say
        self._out: set[str] = set()

    def begin(self, workload: str) -> None:
        self.workload = workload
        self._out = set()

    def taking(
        self, data: Set, layout: str = "files", among: Iterable[str] = (), writing: bool = False
    ) -> list[System]:
        """The systems that can show this set, or mount it writable, prepared; those that fail at that are out."""
        wanted = list(among)
        able = []
        for system in self.systems.values():
            if (wanted and system.name.removesuffix("-base") not in wanted) or system.name in self._out:
                continue
            if not (system.writes if writing else system.can(data, layout)):
                continue
            with self.attempt(system):
                system.prepare(data)
                able.append(system)
        return able

    def turns(self, systems: Sequence[System], repetitions: int | None = None) -> Iterator[tuple[int, System]]:
        """A B C A B C ..., without those that have failed meanwhile."""
        for repetition in range(repetitions or self.repetitions):
            for system in systems:
                if system.name not in self._out:
                    yield repetition, system

    def attempt(self, system: System) -> contextlib.AbstractContextManager[None]:
        """Whatever fails in here is reported, and puts the system out of the workload."""
        return self.attempt_at(system.name)

    @contextlib.contextmanager
    def attempt_at(self, name: str) -> Iterator[None]:
        """The same for a system by its name."""
        try:
            yield
        except (Broken, ClientsFailed, OSError, subprocess.SubprocessError, ValueError) as error:
            self._out.add(name)
            self.results.failed(self.workload, name, str(error))
            self.say(f"{name} is out of {self.workload}: {error}")

    @contextlib.contextmanager
    def mounted(self, system: System, data: Set, layout: str = "files", cold: bool = False) -> Iterator[View]:
        """A fresh mount, with what is behind it in the page cache, or not."""
        behind = system.behind(data)
        if not cold:
            cache.warm(behind)
        with system.mounted(data, layout) as view:
            with self.clients([clients.StatRoot(str(view.root))]) as first:
                first.go()  # now it serves
            time.sleep(SETTLE_SECONDS)
            if cold:  # only now: a daemon may read as it starts
                self.evict(system.name, behind)
            yield view

    def evict(self, name: str, paths: Sequence[Path]) -> None:
        """Drop files from the page cache; a note says if they do not go."""
        cache.evict(paths)
        if (there := cache.resident(paths)) > RESIDENT_MOST:
            self.results.note(f"{self.workload}, {name}: {there:.0%} stayed in the page cache")

    @contextlib.contextmanager
    def overlay(self, system: System, data: Set) -> Iterator[Path]:
        """An empty directory for changes."""
        directory = system.home(data) / "overlay"
        with empty(directory):
            yield directory

    @contextlib.contextmanager
    def writable(self, system: System, data: Set, overlay: Path) -> Iterator[View]:
        """A fresh writable mount, with what is behind it in the page cache, and nothing left to be written."""
        cache.warm(system.behind(data))
        with system.writable(data, overlay) as view:
            with self.clients([clients.StatRoot(str(view.root))]) as first:
                first.go()
            run("sync", "-f", overlay)
            time.sleep(SETTLE_SECONDS)
            yield view

    def clients(self, *jobs: Sequence[Job]) -> Clients:
        return Clients(jobs, self.limit)

    def add(self, case: str, unit: str, system: str, value: float) -> None:
        self.results.add(Case(self.workload, case, unit), system, value)


@contextlib.contextmanager
def empty(directory: Path) -> Iterator[None]:
    """A directory that is there, and empty, while the context is open."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    try:
        yield
    finally:
        shutil.rmtree(directory, ignore_errors=True)
