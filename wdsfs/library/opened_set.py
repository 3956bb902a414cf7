"""A set that is open for the threads of a process, its forks, and the processes that it is sent to."""

from __future__ import annotations

import atexit
import logging
import os
import re
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self, TypeAlias, TypedDict, TypeVar

from wdsfs import host
from wdsfs.errors import UsageError, WdsfsError
from wdsfs.library.key_lists import file_of_keys
from wdsfs.names import KEY_ENDS, meant
from wdsfs.spec.spec_words import anchored, anchored_options
from wdsfs.tree.composition import OF_CLASSES, Composition, composition_of
from wdsfs.tree.opening import open_typed_set
from wdsfs.tree.set_options import Opening, Progress, Tolerance, selection_of
from wdsfs.tree.shard_set import ShardSet

logging.getLogger("wdsfs").addHandler(logging.NullHandler())  # nothing is written unless the program wants it

DESCRIPTORS_MAX = 16384  # of the shards that are open at a time
DIGITS_MAX = 18  # of classes that are numbers

Report: TypeAlias = Callable[[str, int, int], object]
Shards: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Keys: TypeAlias = str | os.PathLike[str] | Iterable[str | bytes]
Part = TypeVar("Part")


class SetOptions(TypedDict, total=False):
    """Options of a set: the words and the meaning of those of `wdsfs mount`."""

    columns: str | Sequence[str]
    field: str | Sequence[str]
    join: str | Sequence[str]
    associate: str | Sequence[str]
    ignore_case: bool
    missing: str
    duplicates: str
    keys: Keys | None
    split: str | None
    shard_id: int | None
    num_shards: int | None
    ignore_zeros: bool
    group_by_key: bool
    key_ends: str
    base: str | None
    allow_missing: bool
    strict: bool
    index_dir: str | os.PathLike[str] | None
    jobs: int | None
    progress: Report | None


_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("columns", "field", "join", "associate"), ()),
    "ignore_case": False,
    **dict.fromkeys(("missing", "duplicates"), "error"),
}
_SELECTION = ("split", "shard_id", "num_shards", "ignore_zeros", "group_by_key", "base")
_POLICIES = ("error", "skip", "empty")
_PATHS = {  # options that are paths, and the kind of file there
    "class_names": "a file with a class in each line; write the classes into one",
    "index_dir": "a directory",
    "base": "a directory",
}


_TYPED = re.compile(r"(?<![\w/.-])--([a-z]+(?:-[a-z]+)*)(?![\w-])(?: \1(?=:))?")  # also "--keys keys:", of a list
_NAMES = frozenset((*SetOptions.__annotations__, *OF_CLASSES, "layout", "names", "merge", "index_tree"))


def named_here(text: str, names: Collection[str] = _NAMES) -> str:
    """Return a message with these options as Python has them: `shard_id` for `--shard-id`."""

    def name_of(match: re.Match[str]) -> str:
        name = match[1].replace("-", "_")
        return name if name in names else match[0]

    return _TYPED.sub(name_of, text)


@contextmanager
def options_named_here() -> Iterator[None]:
    """Name the options in the errors of a block, or of a function that this decorates, as Python has them."""
    try:
        yield
    except WdsfsError as error:
        error.args = tuple(named_here(str(line)) for line in error.args)
        raise


class OpenedSet:
    """The shards that `shards` names, opened with `options`, in which None stands for the default.

    `whole`: shards that cannot be read would be missing unnoticed. `lock` is held for every question to the set.
    Raises what opening a set for a command raises.
    """

    def __init__(self, shards: Shards, layout: str, whole: bool, /, **options: Any) -> None:
        self.shards, self._layout = texts(shards), layout
        self.options = {name: value for name, value in options.items() if value is not None and name != "progress"}
        self.lock = threading.RLock()
        with _opening, ExitStack() as stack:
            self._open(whole, options.get("progress"), stack)
            self._stack = stack.pop_all()
            _sets.add(self)
        # The arguments that open the same set in another process, whose working directory may be another one.
        self.sent = [anchored(spec) for spec in self.shards], anchored_options(self.options)

    def _open(self, whole: bool, progress: Report | None, stack: ExitStack) -> None:
        known = {*SetOptions.__annotations__, *OF_CLASSES}
        for name in self.options.keys() - known:
            raise TypeError(f"there is no option {name!r}{meant(name, known)}")
        for name in self.options.keys() & _PATHS.keys():
            if not isinstance(self.options[name], str | os.PathLike):
                raise UsageError(f"{name}={self.options[name]!r:.40}: give the path of {_PATHS[name]}")
        if "keys" in self.options:
            self.options["keys"] = stack.enter_context(file_of_keys(self.options["keys"]))
        self.opening, self.composition = _opening_of(self.options, progress), self._composition()
        selection = _selection_of(self.options)
        set_ = open_typed_set(self.shards, selection, self.opening, self.composition, whole=whole)
        self.lower: ShardSet = stack.enter_context(set_)

    def _composition(self) -> Composition:
        typed: dict[str, Any] = {**dict.fromkeys((*OF_CLASSES, "keys")), **_DEFAULTS}
        typed |= {name: value for name, value in self.options.items() if name in typed}
        for name in ("missing", "duplicates"):
            check_choice(name, typed[name], _POLICIES)
        for name in ("columns", "field", "join", "associate"):
            typed[name] = texts(typed[name])
        digits = typed["class_digits"]
        if digits is not None and not 0 <= digits <= DIGITS_MAX:
            raise UsageError(f"class_digits={digits}: is a number from 0 to {DIGITS_MAX}")
        return composition_of(self._layout, **typed)

    def build(self, make: Callable[[ShardSet], Part]) -> Part:
        """Return `make(lower)`; close the set if that raises.

        The lock is held meanwhile: `make` reads the index, which a fork by another thread would close.
        """
        try:
            with self.lock:
                return make(self.lower)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the set: it must not be used any more."""
        with _opening, self.lock:
            _sets.discard(self)
            self._stack.close()
            self.lower.index = Closed()  # type: ignore[assignment]  # threads that wait for the lock would read it

    def suspend(self) -> None:
        """Close what does not survive a fork; the next question opens it again."""
        for lower in {id(lower): lower for lower in (self.lower, *self.lower.sources)}.values():
            lower.index.suspend()


class Closed:
    """A stand-in for a set that was closed, cannot be opened or has changed: each question raises `error`."""

    def __init__(self, error: WdsfsError | None = None) -> None:
        self._error = error or UsageError("this is closed; open it again")

    def close(self) -> None:
        """Do nothing: there is nothing left to close."""

    def __getattr__(self, name: str) -> Any:
        raise self._error.with_traceback(None)  # else the one error would keep the frames of all its raises


class OfSet:
    """A part of an opened set, such as its samples: `close`, or the end of a `with` block, closes the set."""

    _set: OpenedSet

    def close(self) -> None:
        """Close the shards and the index. Each later question raises UsageError."""
        self._set.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise UsageError for an option that is none of these."""
    if value not in choices:
        raise UsageError(f"{name}={value!r}: is one of {', '.join(choices)}")


def texts(values: Shards) -> list[str]:
    """Return the texts of one value, or of several."""
    some = [values] if isinstance(values, str | bytes | os.PathLike) else values
    return [os.fsdecode(value) for value in some]


def _selection_of(options: dict[str, Any]) -> Any:
    chosen = {name: options[name] for name in _SELECTION if name in options}
    key_ends = options.get("key_ends", KEY_ENDS[0])
    check_choice("key_ends", key_ends, KEY_ENDS)
    return selection_of(**chosen, last_dot=key_ends == KEY_ENDS[1])


def _opening_of(options: dict[str, Any], report: Report | None) -> Opening:
    tolerance = Tolerance(bool(options.get("allow_missing")), bool(options.get("strict"))).check()
    place, jobs = options.get("index_dir"), options.get("jobs")
    if jobs is not None and jobs < 1:
        raise UsageError(f"jobs={jobs}: at least one process is needed")
    opening = Opening(
        index_dir=None if place is None else Path(place),
        tolerance=tolerance,
        progress=Progress() if report is None else _Reported(report),
        descriptors=min(host.files_for_shards(host.file_limit()), DESCRIPTORS_MAX),
    )
    return opening if jobs is None else opening._replace(jobs=jobs)


class _Reported(Progress):
    """Calls a function with the name of the work, the number of finished shards, and the number of shards."""

    def __init__(self, report: Report) -> None:
        self._report = report

    @contextmanager
    def indexing(self, shards: int) -> Iterator[Callable[[int], None]]:
        done = 0

        def advance(members: int) -> None:
            nonlocal done
            done += 1
            self._report("indexing", done, shards)

        yield advance

    @contextmanager
    def composing(self, shards: int) -> Iterator[Callable[[int], None]]:
        def update(done: int) -> None:
            self._report("composing", done, shards)

        yield update


# --- forks: LMDB survives none, and a lock that another thread has would be held in the child for ever

_sets: weakref.WeakSet[OpenedSet] = weakref.WeakSet()
_opening = threading.RLock()
_locked: list[OpenedSet] = []


def _close_all() -> None:
    """Close what the program has left open, while all modules are there; not what a daemon thread still holds."""
    if _opening.acquire(timeout=1):
        for set_ in list(_sets):
            if set_.lock.acquire(timeout=1):
                set_.close()
                set_.lock.release()
        _opening.release()


def _before_fork() -> None:
    _opening.acquire()
    for set_ in list(_sets):
        set_.lock.acquire()
        _locked.append(set_)
    for set_ in _locked:  # not before all are locked: sets share an index, and another thread may read its map
        set_.suspend()


def _after_fork() -> None:
    while _locked:
        _locked.pop().lock.release()
    _opening.release()


atexit.register(_close_all)
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
