"""Random sets, reads and edits: the engine by FUSE, the kernel's, and a plain model have to say the same.

The models are dictionaries: here that of what a set shows, in `tests/overlay/test_edits.py` that of edits. Odd
tars have their own test (`test_both_engines`), with no model. `WDSFS_THOROUGH=10` looks at ten times as many
examples.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests import tars
from tests.conftest import Program
from tests.kernel.test_image import end_mount, need_erofs
from tests.mount.test_both_engines import both, compared
from tests.overlay.test_edits import (
    FILES,
    OPTIONS,
    SHARDS,
    VIEWS,
    Before,
    KernelMount,
    World,
    check_diff,
    listed,
    model_of,
    reported,
)
from tests.thorough import THOROUGH, examples
from tests.writables import shard

WHEN = 1_700_000_000 * 10**9

# --- what a set shows --------------------------------------------------------------------------------------

FOLDERS, KEYS = ("", "d/", "d/e/", "f g/"), ("k", "l", "1", "é")
EXTENSIONS = ("jpg", "cls", "json", "seg.png")
SIZES = (0, 1, 511, 512, 513, 4095, 4096, 5000, 70_001)


class Member(NamedTuple):
    """A member of a shard; without `extension` it is of no sample. The content follows from `seed` and `size`."""

    key: str
    extension: str
    size: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.key}.{self.extension}" if self.extension else self.key

    @property
    def content(self) -> bytes:
        return random.Random(self.seed).randbytes(self.size)


contents = st.tuples(st.sampled_from(SIZES), st.integers(0, 99))


@st.composite
def shards(draw: st.DrawFn) -> list[Member]:
    """A shard whose keys are unique; some members belong to no sample."""
    keys = draw(st.lists(st.tuples(st.sampled_from(FOLDERS), st.sampled_from(KEYS)), unique=True, max_size=6))
    found = []
    for folder, key in keys:
        if draw(st.integers(0, 5)) == 0:
            found.append(Member(f"{folder}README {key}", "", *draw(contents)))
        extensions = draw(st.lists(st.sampled_from(EXTENSIONS), unique=True, min_size=1))
        found += [Member(folder + key, one, *draw(contents)) for one in extensions]
    return found


class Layout(NamedTuple):
    files: bool
    full: bool
    merge: bool

    @property
    def words(self) -> list[str]:
        return [
            *(["--layout", "files"] if self.files else []),
            *(["--names", "full"] if self.full else []),
            *["--merge"] * self.merge,
        ]


layouts = st.tuples(st.sampled_from(["files", "full", ""]), st.booleans()).map(
    lambda two: Layout(two[0] == "files", two[0] == "full", two[1])
)

Model = dict[str, bytes | None]  # by path; None: a directory


def model(sets: Sequence[Sequence[Member]], layout: Layout) -> Model:
    """What a mount of shards s0, s1 ... shows."""
    found: Model = {"": None}
    taken: dict[str, int] = {}  # the first shard with a path in a tree over all shards
    for number, members in enumerate(sets):
        top = "" if layout.merge else f"s{number}/"
        samples: dict[str, str] = {}
        found |= {} if layout.merge else {top[:-1]: None}
        for one in members:
            if layout.files:
                add(found, with_shard(top + one.name, number, taken), one.content)
            elif one.extension:
                if one.key not in samples:
                    samples[one.key] = with_shard(top + one.key, number, taken)
                name = f"{one.key.rpartition('/')[2]}.{one.extension}" if layout.full else one.extension
                add(found, f"{samples[one.key]}/{name}", one.content)
    return found


def with_shard(name: str, number: int, taken: dict[str, int]) -> str:
    return name if taken.setdefault(name, number) == number else f"{name}~s{number}"


def add(found: Model, path: str, content: bytes) -> None:
    assert path not in found
    found[path] = content
    while "/" in path:
        path = path.rpartition("/")[0]
        found[path] = None


# --- what is asked of it -----------------------------------------------------------------------------------

Answer = int | bytes | list[str] | str
READ_ONLY = errno.EROFS


def missing(found: Model, path: str) -> int:
    """The error for a path that is not there."""
    while "/" in path:
        path = path.rpartition("/")[0]
        if found.get(path) is not None:
            return errno.ENOTDIR
    return errno.ENOENT


def expected(found: Model, what: str, path: str, offset: int, size: int) -> Answer:
    """What the model answers; a number is an error."""
    if path not in found:
        is_parent_there = found.get(path.rpartition("/")[0], b"") is None
        return READ_ONLY if what in ("mkdir", "unlink") and is_parent_there else missing(found, path)
    content = found[path]
    match what:
        case "stat":
            return "directory" if content is None else f"file of {len(content)}"
        case "list":
            start = path + "/" if path else ""
            names = {one[len(start) :].partition("/")[0] for one in found if one.startswith(start)} - {""}
            return sorted(names) if content is None else errno.ENOTDIR
        case "read":
            return errno.EISDIR if content is None else content[offset : offset + size]
        case "write":
            return errno.EISDIR if content is None else READ_ONLY
        case "readlink":
            return errno.EINVAL
        case "mkdir":
            return errno.EEXIST
    return READ_ONLY


def answer(top: Path, what: str, path: str, offset: int, size: int) -> Answer:
    """What a mount answers."""
    try:
        return DEEDS[what](os.path.join(top, path).rstrip("/"), offset, size)
    except OSError as error:
        return error.errno or 0


def stat_of(path: str, *_: int) -> Answer:
    return "directory" if os.path.isdir(path) else f"file of {os.stat(path).st_size}"


def read(path: str, offset: int, size: int) -> Answer:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.pread(fd, size, offset)
    finally:
        os.close(fd)


def write(path: str, *_: int) -> Answer:
    os.close(os.open(path, os.O_WRONLY))
    return "can be written"


DEEDS: dict[str, Callable[..., Any]] = {
    "stat": stat_of,
    "list": lambda path, *_: sorted(name for name in os.listdir(path) if name != ".wdsfs"),
    "read": read,
    "write": write,
    "readlink": lambda path, *_: os.readlink(path),
    "mkdir": lambda path, *_: os.mkdir(path),
    "unlink": lambda path, *_: os.unlink(path),
}


@contextmanager
def a_program() -> Iterator[Program]:
    """The program in a directory for one example."""
    with TemporaryDirectory() as home:
        yield Program(Path(home))


@settings(examples(3), phases=(Phase.explicit, Phase.reuse, Phase.generate))  # shrinking takes too many mounts
@given(st.lists(shards(), min_size=1, max_size=3), layouts, st.integers(0, 999))
def test_random_reads(sets: list[list[Member]], layout: Layout, seed: int) -> None:
    """Names, kinds, sizes, any bytes of any file in any order, and errors."""
    need_erofs()
    with a_program() as program:
        for number, members in enumerate(sets):
            content = tars.tar(*(tars.member(one.name.encode(), one.content) for one in members))
            program.write(f"s{number}.tar", content)
        found = model(sets, layout)
        with both(program, *layout.words, *sorted(program.home.glob("*.tar"))) as mounts:
            shown = compared(*mounts)
            assert {path.decode() for path in shown} == {path or "." for path in found}
            chance, paths = random.Random(seed), sorted(found)
            for _ in range(300):
                path = chance.choice(paths) + chance.choice(["", "", "", "/x", "~2", "/x/y"])
                path = path.lstrip("/")
                deed = chance.choice(list(DEEDS) if path else ["stat", "list", "read"])
                asked = deed, path, chance.choice(SIZES), chance.choice(SIZES)
                assert [answer(top, *asked) for top in mounts] == [expected(found, *asked)] * 2, asked


# --- edits -------------------------------------------------------------------------------------------------


class SteadyMount(KernelMount):
    """A mount in which what is made gets one time, and what only one engine can rename is copied.

    Only FUSE renames samples, and sees that the files of one were moved to another (which are samples in the files
    layout). So a file is renamed in the directory of its sample only.
    """

    def __init__(self, top: Path, renames: bool) -> None:
        super().__init__(top)
        self.renames = renames

    def put(self, path: bytes, data: bytes) -> None:
        super().put(path, data)
        self.change_time(path, WHEN)

    def rename(self, path: bytes, new: bytes) -> None:
        if not os.path.lexists(self.at(path)):
            raise FileNotFoundError(errno.ENOENT, "no such file")
        if not self.renames or os.path.isdir(self.at(path)) or os.path.dirname(path) != os.path.dirname(new):
            raise OSError(errno.EXDEV, "only copied")
        if sum(one.is_file() for one in os.scandir(os.path.dirname(self.at(path)))) < 2:
            raise OSError(errno.EXDEV, "only copied")
        super().rename(path, new)


class Outcome(NamedTuple):
    """What came of edits: the steps that were done, what is shown, `diff --json`, and the new shards."""

    steps: list[str]
    shown: dict[bytes, bytes]
    report: dict[str, Any]
    written: dict[str, bytes]


def outcome(program: Program, engine: str, name: str, seed: int, steps: int) -> Outcome:
    """Edit a mount by random steps, and compare it with the model."""
    view, merge = VIEWS[name]
    overlay, out = program.home / engine, program.home / f"{engine}-out"
    words = (*OPTIONS[view], *["--merge"] * merge, *sorted(program.home.glob("*.tar")))
    try:
        program.run("mount", "-q", "--engine", engine, "--overlay", overlay, *words, program.mountpoint)
        world = World(SteadyMount(program.mountpoint, view is not FILES), view, merge, random.Random(seed))
        world.before, _ = world.look()
        world.files, world.directories = world.look()
        for _ in range(steps):
            world.step()
        settle(program, world)
        shown, directories = world.look()
        assert {path: one.content for path, one in shown.items()} == {
            path: one.content for path, one in world.files.items()
        }
        assert directories == world.directories
        before, after = Before(world, merge), model_of(world, world.files)
        report = program.json("diff", program.mountpoint, code=1 if after.bad else 0)
        found = reported(report)
        assert {one.path for one in found.unpackable + found.conflicts} == after.bad
        assert {one.path for one in found.leavings} == after.left
        if not after.bad:
            check_diff(found, before, after)
        program.run("commit", "-q", "--leave-out", "-o", out / "%d.tar", program.mountpoint)
        written = {path.name: path.read_bytes() for path in sorted(out.iterdir())}
        if not after.bad and not merge and view is FILES:
            assert {name for data in written.values() for name, _ in listed(data)} >= {
                member for members in after.members.values() for member in members
            }
        program.run("umount", program.mountpoint)
    except BaseException as error:
        error.add_note(f"seed {seed}, {name}, {engine}:\n  " + "\n  ".join(world.steps))
        raise
    finally:
        end_mount(program.mountpoint)
    return Outcome(world.steps, {path: one.content for path, one in shown.items()}, report, written)


def settle(program: Program, world: World) -> None:
    """Remove what no commit takes, not even with --leave-out: where samples and files contradict each other."""
    bad = model_of(world, world.files).bad
    if reported(program.json("diff", program.mountpoint, code=1 if bad else 0)).conflicts:
        for path in bad:
            world.mount.unlink(path)
            del world.files[path]


@pytest.mark.parametrize("seed", range(THOROUGH))
@pytest.mark.parametrize("name", sorted(VIEWS) if THOROUGH > 1 else ["merged", "files"])
def test_random_edits(name: str, seed: int) -> None:
    """The same steps have the same results, errors, changes and shards; all as the model says."""
    need_erofs()
    with a_program() as program:
        for number, members in enumerate(SHARDS):
            program.write(f"s{number}.tar", shard(members))
        one, other = (outcome(program, engine, name, seed, 20) for engine in ("fuse", "kernel"))
        assert one.steps
        assert other == one


@pytest.mark.parametrize("seed", range(THOROUGH))
@pytest.mark.parametrize("name", sorted(VIEWS) if THOROUGH > 1 else ["samples", "full"])
def test_random_edits_change_hands(name: str, seed: int) -> None:
    """An overlay is edited by FUSE, with all its renames, and by the kernel, in turn: each shows what the other
    has shown, name for name."""
    need_erofs()
    view, merge = VIEWS[name]
    random_steps = random.Random(f"{name} {seed}")
    with a_program() as program:
        for number, members in enumerate(SHARDS):
            program.write(f"s{number}.tar", shard(members))
        words = (*OPTIONS[view], *["--merge"] * merge, *sorted(program.home.glob("*.tar")))
        world = World(KernelMount(program.mountpoint), view, merge, random_steps)
        try:
            for engine in ("fuse", "kernel", "fuse", "kernel"):
                program.run("mount", "-q", "--engine", engine, "--overlay", "o", *words, program.mountpoint)
                files, directories = world.look()
                if world.steps:
                    assert {path: one.content for path, one in files.items()} == {
                        path: one.content for path, one in world.files.items()
                    }
                    assert directories == world.directories
                world.files, world.directories = files, directories
                for _ in range(40):
                    world.step()
                world.files, world.directories = world.look()
                program.run("umount", program.mountpoint)
        except BaseException as error:
            error.add_note(f"seed {seed}, {name}:\n  " + "\n  ".join(world.steps))
            raise
        finally:
            end_mount(program.mountpoint)
