"""Random edits of writable sets against a model: what diff says, what commit writes, and what others then read.

The model is the files that the mount shows (`test_model.py` compares these with a plain directory), and a rule of
its own for which name in the mount is which member. From these follow the samples that diff should list,
the members of the new shards, and what tarfile, GNU tar, the webdataset library and a new mount find in them.
`WDSFS_EDITS=1000` runs so many seeds, from `WDSFS_FIRST_EDIT` on; what was found this way has tests with names.
"""

from __future__ import annotations

import errno
import io
import os
import random
import re
import stat
import subprocess
import tarfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import tars
from tests.uppers import find
from tests.writables import EXT, FILES, FULL, Members, Mount, check_whiteouts, fast_directory, shard, tree_over
from wdsfs.overlay.overlay_directory import OverlayDirectory, OverlaySettings, ShardSeen, write_settings
from wdsfs.overlay.upper_files import EXCHANGE
from wdsfs.packing import diff, reasons
from wdsfs.packing.diff import Changes
from wdsfs.packing.overlay_commit import CommitOptions, Planner
from wdsfs.packing.replacement import Replacement
from wdsfs.packing.runner import Runner
from wdsfs.packing.shard_writer import Files
from wdsfs.packing.upper_walk import Rules
from wdsfs.shards import Fingerprint
from wdsfs.tree.tree import View

SEEDS = int(os.environ.get("WDSFS_EDITS", "60"))
FIRST = int(os.environ.get("WDSFS_FIRST_EDIT", "0"))
GROUPS = 20  # tests, so that several processes share the seeds

SHARDS: list[Members] = [
    [
        ("d", None),
        ("d/a.cls", b"1"),
        ("d/a.jpg", b"A" * 600),
        ("README", b"read me"),
        ("d/b.cls", b"2"),
        ("d/b.jpg", b"B"),
        (".x.jpg", b"hidden"),
        ("c.txt", b"c"),
        ("s", "-> c.txt"),
        ("d/.h", b"h"),
        ("d/NOTES", b"n"),
    ],
    [
        ("INFO", b"i"),
        ("e.txt", b"e"),
        ("d/f.txt", b"f"),
        ("d/f.jpg", b"F"),
        ("g.txt~", b"as it was"),
        ("g.jpg", b"G"),
    ],
]
VIEWS: dict[str, tuple[View, bool]] = {
    "samples": (EXT, False),
    "full": (FULL, False),
    "files": (FILES, False),
    "merged": (EXT, True),
    "merged-full": (FULL, True),
    "merged-files": (FILES, True),
}
TOPS = [b"s0", b"s1", b"more", b"new"]
NAMES = b"a n z d jpg cls txt a.b README .h txt~ .DS_Store __key__".split()
WHOLE = [b"n.jpg", b"n.cls", b"z.txt", b"a.jpg", b"a.txt", b"b.txt", b".x.jpg", b"c.txt~", b"y.seg.png"]
LEAVING = re.compile(rb".+~|\.DS_Store|\._.+")  # as far as these names go
SAMPLE = re.compile(rb"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)  # the webdataset library's rule
STEPS = ["write", "write", "new", "mkdir", "again", "touch", "chmod", "remove", "remove", "link", "copy", "sample"]
STEPS += ["symlink", "move", "move file", "move file", "move up", "remove and move", "exchange"]
EXPECTED_ERRORS = {
    *(errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.EINVAL, errno.EISDIR, errno.ENOTDIR, errno.EPERM),
    *(errno.EROFS, errno.EXDEV),
}


class File(NamedTuple):
    """A file of a mount; `origin` is the member of the shards that it was copied up from."""

    content: bytes
    origin: bytes = b""
    link: bool = False


class Column(NamedTuple):
    content: bytes
    seconds: int


Samples = dict[bytes, dict[bytes, Column]]  # by shown path and extension


class World:
    """A mount that is edited: what it shows (`files`, `directories`), and what it showed `before`."""

    def __init__(self, mount: Mount, view: View, merge: bool, rng: random.Random) -> None:
        self.mount, self.view, self.merge, self.rng = mount, view, merge, rng
        self.steps: list[str] = []
        self.origins: dict[int, bytes] = {}  # by inode number, which a file keeps
        self.look()
        self.origins = {mount.look(path).inode: path for path in self.files}
        self.look()
        self.before = self.files

    def look(self) -> None:
        self.files: dict[bytes, File] = {}
        self.directories: set[bytes] = set()
        for path, (kind, *about) in self.mount.walk().items():
            if kind == "directory":
                self.directories.add(path)
            else:
                origin = self.origins.get(self.mount.look(path).inode, b"")
                is_link = kind == "symlink"
                self.files[path] = File(about[0] if is_link else about[2], origin, is_link)

    def seconds(self, path: bytes) -> int:
        return self.mount.look(path).mtime_ns // 10**9

    # --- steps

    def do(self, name: str, *arguments: Any, **fields: int) -> int:
        """Do something; return the number of the error of the mount, 0 if it has done it."""
        try:
            getattr(self.mount, name)(*arguments, **fields)
        except OSError as error:
            if error.errno not in EXPECTED_ERRORS:
                raise
            return error.errno
        self.steps.append(f"{name}{arguments}{fields or ''}"[:100])
        return 0

    def directory(self) -> bytes:
        return self.rng.choice(sorted({b"", *self.directories}))

    def place(self) -> bytes:
        """A path that may be there or not."""
        directory = self.directory()
        if not directory and not self.merge:
            return self.rng.choice(TOPS)
        names = NAMES if self.view is EXT else NAMES + WHOLE
        name = self.rng.choice(names)
        if self.view is FULL and self.rng.random() < 0.6:
            name = directory.rpartition(b"/")[2] + b"." + self.rng.choice([b"jpg", b"txt", b"txt~", b"__key__"])
        return directory + b"/" + name if directory else name

    def thing(self) -> bytes:
        return self.rng.choice(sorted({*self.files, *self.directories}) or [b"nothing"])

    def a_file(self) -> bytes:
        return self.rng.choice(sorted(path for path, file in self.files.items() if not file.link) or [b"nothing"])

    def write(self, path: bytes, content: bytes) -> None:
        if path not in self.files or not self.files[path].link:
            self.do("put", path, content)

    def remove(self, top: bytes) -> None:
        """Do what `rm -r` does."""
        for path in sorted((p for p in {*self.files, *self.directories} if is_below(p, top)), reverse=True):
            self.do("unlink" if path in self.files else "rmdir", path)

    def move(self, old: bytes, new: bytes) -> None:
        """Do what `mv -T` does: a directory of the shards that cannot be renamed is copied."""
        if is_below(new, old) or is_below(old, new):
            return
        if self.do("rename", old, new) == errno.EXDEV and new not in self.files and new not in self.directories:
            self.copy(old, new)
            self.remove(old)

    def copy(self, old: bytes, new: bytes) -> None:
        for path in sorted(path for path in {*self.files, *self.directories} if is_below(path, old)):
            goal = new + path[len(old) :]
            if path in self.directories:
                self.do("mkdir", goal)
            elif self.files[path].link:
                self.do("symlink", self.files[path].content, goal)
            else:
                self.write(goal, self.files[path].content)

    def step(self) -> None:
        self.act(self.rng.choice(STEPS))
        self.look()

    def act(self, step: str) -> None:
        match step:
            case "write":
                self.write(self.a_file(), self.rng.choice([b"other", b"A" * 600, b"c"]))
            case "new":
                self.write(self.place(), self.rng.randbytes(self.rng.choice([0, 3, 700])))
            case "mkdir":
                self.do("mkdir", self.place())
            case "again":
                path = self.a_file()
                if path in self.files:
                    self.write(path, self.files[path].content)
            case "touch":
                self.do("change", self.a_file(), mtime_ns=self.rng.choice([5, 1_600_000_000]) * 10**9)
            case "chmod":
                self.do("change", self.a_file(), mode=0o600)
            case "remove":
                self.remove(self.thing())
            case "move":
                self.move(self.thing(), self.place())
            case "move file":
                self.move(self.a_file(), self.place())
            case "exchange":
                self.do("rename", self.thing(), self.thing(), EXCHANGE)
            case "move up":  # between shards
                path, top = self.a_file(), self.rng.choice(TOPS[:3])
                self.move(path, top + b"/" + path.rpartition(b"/")[2])
            case "remove and move":  # the directory that has lost a file
                path = self.a_file()
                self.remove(path)
                self.look()
                self.move(path.rpartition(b"/")[0] or path, self.place())
            case "link":
                self.do("link", self.a_file(), self.place())
            case "copy":
                path, new = self.thing(), self.place()
                if not is_below(new, path) and new not in self.files and new not in self.directories:
                    self.copy(path, new)
            case "symlink":
                self.do("symlink", b"to", self.place())
            case "sample":
                directory = self.place()
                stem = directory.rpartition(b"/")[2]
                if self.view is FILES:
                    self.write(directory + b".jpg", b"new")
                elif not self.do("mkdir", directory):
                    self.write(directory + (b"/jpg" if self.view is EXT else b"/" + stem + b".jpg"), b"new")


def is_below(path: bytes, top: bytes) -> bool:
    return path == top or path.startswith(top + b"/")


# --- the rules of the model --------------------------------------------------------------------------------


@dataclass
class Model:
    """The files of a world after a commit."""

    world: World
    samples: Samples = field(default_factory=dict)
    strays: dict[bytes, Column] = field(default_factory=dict)
    members: dict[bytes, dict[bytes, bytes]] = field(default_factory=dict)  # by directory at the top, and name
    paths: dict[bytes, bytes] = field(default_factory=dict)  # of all of these: what a mount shows
    bad: set[bytes] = field(default_factory=set)
    left: set[bytes] = field(default_factory=set)

    def take(self, path: bytes, file: File) -> None:
        world = self.world
        is_old = path in world.before and world.before[path].link == file.link
        if not is_old and self._is_left(path, file):
            self.left.add(path)
            return
        top, member = self.member(path)
        key_and_extension = None if member is None or file.link else self.key(member)
        if key_and_extension is not None and not is_old and not self._is_sound(path, *key_and_extension):
            key_and_extension = None
        if key_and_extension is not None:
            key, extension = key_and_extension
            sample = top + b"/" + key if top else key
            self.samples.setdefault(sample, {})[extension] = Column(file.content, world.seconds(path))
        elif is_old and world.view is FILES and (not file.link or world.before[path].content == file.content):
            assert member is not None
            self.strays[path] = Column(file.content, world.seconds(path))
        else:
            self.bad.add(path)
            return
        assert member is not None
        self.paths[path] = file.content
        if not file.link:
            self.members.setdefault(top, {})[member] = file.content

    def _is_sound(self, path: bytes, key: bytes, extension: bytes) -> bool:
        """True if readers find the intended sample; the directory of a sample is its key, without a dot."""
        directory = path.rpartition(b"/")[0]
        meant = self.world.view is FILES or (b"/" + directory).endswith(b"/" + key)
        return meant and extension.lower() != b"__key__"

    def _is_left(self, path: bytes, file: File) -> bool:
        if not LEAVING.fullmatch(path.rpartition(b"/")[2]):
            return False
        return not LEAVING.fullmatch(file.origin.rpartition(b"/")[2])

    def member(self, path: bytes) -> tuple[bytes, bytes | None]:
        """The directory at the top, and the name in the tar; None where there can be none."""
        top, _, inner = (b"", b"", path) if self.world.merge else path.partition(b"/")
        if self.world.view is FILES or not inner:
            return top, inner or None
        directory, _, name = inner.rpartition(b"/")
        if not directory:
            return top, None
        if self.world.view is EXT:
            return top, directory + b"." + name
        stem = directory.rpartition(b"/")[2] + b"."
        return top, directory + b"." + name[len(stem) :] if name.startswith(stem) else None

    def key(self, member: bytes) -> tuple[bytes, bytes] | None:
        match = SAMPLE.fullmatch(member)
        first = member.partition(b"/")[0]
        if match is None or member.rpartition(b"/")[2].startswith(b".") or re.fullmatch(rb"__.*__", first):
            return None
        return match[1], match[2]


def model_of(world: World) -> Model:
    """The model of what a world shows now."""
    model = Model(world)
    for path, file in world.files.items():
        model.take(path, file)
    return model


def key_of(member: str) -> str | None:
    """The key of a member; None for one that is in no sample."""
    match = SAMPLE.fullmatch(member.encode())
    return None if match is None or "/." in f"/{member}" else match[1].decode()


# --- what diff says ----------------------------------------------------------------------------------------


def columns_of(old: dict[bytes, Column], new: dict[bytes, Column]) -> tuple[set[bytes], ...]:
    both = old.keys() & new.keys()
    changed = {column for column in both if old[column].content != new[column].content}
    times = {column for column in both - changed if old[column].seconds != new[column].seconds}
    return set(new.keys() - old.keys()), changed, set(old.keys() - new.keys()), times


def check_diff(report: Changes, before: Model, after: Model) -> None:
    old, new = before.samples, after.samples
    kinds = Counter((sample.kind, sample.path) for sample in report.samples)
    assert not kinds or max(kinds.values()) == 1
    by_kind: dict[str, list[diff.ChangedSample]] = {}
    for sample in report.samples:
        by_kind.setdefault(sample.kind, []).append(sample)
    renamed = by_kind.get("renamed", [])
    gone = {sample.path for sample in by_kind.get("removed", [])} | {sample.was for sample in renamed}
    come = {sample.path for sample in by_kind.get("added", [])} | {sample.path for sample in renamed}
    assert gone == old.keys() - new.keys()
    assert come == new.keys() - old.keys()
    for sample in report.samples:
        was = old.get(sample.was or sample.path, {})
        shown = tuple(map(set, (sample.added, sample.changed, sample.removed, sample.times)))
        assert shown == columns_of(was, new.get(sample.path, {})), sample
    rows = by_kind.get("changed", []) + by_kind.get("time only", [])
    differing = {path for path in old.keys() & new.keys() if any(columns_of(old[path], new[path]))}
    assert {sample.path for sample in rows} == differing
    assert {sample.path for sample in by_kind.get("time only", [])} == {
        path for path in differing if not any(columns_of(old[path], new[path])[:3])
    }
    if after.world.view is FILES:
        expected = {}
        for path, column in before.strays.items():
            now = after.strays.get(path)
            if now is None:
                expected[path] = "removed"
            elif now.content != column.content:
                expected[path] = "changed"
            elif now.seconds != column.seconds and not after.world.before[path].link:
                expected[path] = "time only"
        assert {row.path: row.kind for row in report.others} == expected
    else:
        assert not report.others


# --- what is written ---------------------------------------------------------------------------------------


def listed(data: bytes) -> list[tuple[bytes, bytes]]:
    """Names and contents of the regular members, as tarfile reads them."""
    contents: list[tuple[bytes, bytes]] = []
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            if member.isfile():
                content = tar.extractfile(member)
                assert content is not None
                contents.append((os.fsencode(member.name), content.read()))
    return contents


def by_tarfile(data: bytes) -> dict[bytes, bytes]:
    contents = listed(data)
    assert len(dict(contents)) == len(contents), f"a name twice in {[name for name, _ in contents]}"
    return dict(contents)


def by_gnu_tar(home: Path, data: bytes) -> dict[bytes, bytes] | None:
    """Return the files in a directory after `tar x`; None if it fails."""
    directory = home / "extracted"
    directory.mkdir()
    done = subprocess.run(["tar", "-C", directory, "-xf", "-"], input=data, capture_output=True, check=False)
    top = os.fsencode(directory)
    files = {
        os.path.relpath(os.path.join(path, name), top): Path(os.fsdecode(os.path.join(path, name))).read_bytes()
        for path, _, names in os.walk(top)
        for name in names
        if stat.S_ISREG(os.lstat(os.path.join(path, name)).st_mode)
    }
    subprocess.run(["rm", "-r", directory], check=True)
    return files if done.returncode == 0 else None


def sample_columns(members: dict[bytes, bytes]) -> dict[str, dict[str, bytes]]:
    """The samples of a tar with these members, as the webdataset library should read them."""
    samples: dict[str, dict[str, bytes]] = {}
    for member, content in members.items():
        match = SAMPLE.fullmatch(member)
        if match is not None and not member.rpartition(b"/")[2].startswith(b"."):
            samples.setdefault(match[1].decode(), {})[match[2].decode().lower()] = content
    return samples


def check_readers(home: Path, data: bytes, expected: dict[bytes, bytes], may_meet: bool) -> None:
    assert by_tarfile(data) == expected
    read = tars.by_webdataset(data)
    assert {sample.pop("__key__"): sample for sample in read} == sample_columns(expected)
    assert len(read) == len(sample_columns(expected))
    extracted = by_gnu_tar(home, data)
    assert extracted == expected or (extracted is None and may_meet)


def mounted_files(home: Path, shards: list[Path], view: View, merge: bool) -> dict[bytes, bytes]:
    """Return the files that a new mount of these shards shows."""
    with tree_over(shards, home / "index", view, merge) as tree:
        mount = Mount(tree, home / f"again-{len(os.listdir(home))}")
        try:
            walked = mount.walk()
        finally:
            mount.close()
    return {
        path: about[0] if kind == "symlink" else about[2]
        for path, (kind, *about) in walked.items()
        if kind != "directory"
    }


# --- one run -----------------------------------------------------------------------------------------------


def run(seed: int) -> None:
    rng = random.Random(seed)
    name = rng.choice(sorted(VIEWS))
    view, merge = VIEWS[name]
    with fast_directory() as home:
        shards = []
        for number, members in enumerate(SHARDS):
            shards.append(home / f"s{number}.tar")
            shards[-1].write_bytes(shard(members))
        with tree_over(shards, home / "index", view, merge) as tree:
            mount = Mount(tree, home / "o")
            world = World(mount, view, merge, rng)
            before = model_of(world)
            try:
                for _ in range(rng.randint(1, 14)):
                    world.step()
                check_whiteouts(tree, home / "o/upper")
                finish(home, shards, world, before, tree)
            except BaseException as error:
                error.add_note(f"seed {seed}, {name}:\n  " + "\n  ".join(world.steps))
                raise
            finally:
                mount.close()


def finish(home: Path, shards: list[Path], world: World, before: Model, tree: Any) -> None:
    """Look at the diff, put aside what cannot be packed as its reasons say, commit, and read."""
    upper = home / "o/upper"
    after = model_of(world)
    report = find(tree, upper)
    assert {remark.path for remark in report.leavings} == after.left
    assert {remark.path for remark in report.unpackable + report.conflicts} == after.bad
    assert {remark.reason for remark in report.conflicts} <= {reasons.OLD_STEM}
    if report.conflicts or world.rng.random() < 0.5:
        for path in after.bad:
            world.do("unlink", path)
        after.bad.clear()
        report = find(tree, upper)
        assert not report.unpackable + report.conflicts
    check_diff(report, before, after)
    may_meet = any(remark.reason == reasons.FILE_AND_FOLDER for remark in report.notes)
    kind = world.rng.choice(["plain", "ignore times"] + ["in place", "in place"] * (not after.bad))
    options: dict[str, Any] = {"in_place": True}
    if kind != "in place":
        options = {"ignore_times": kind == "ignore times", "leave_out": bool(after.bad)}
        options["output"] = f"{home}/out/o-%03d.tar"
    outputs, left_out = commit(home, shards, world, tree, CommitOptions(**options))
    contents = [path.read_bytes() for path in outputs]
    assert left_out == after.left | after.bad
    check_written(home, outputs, contents, after, may_meet)
    if kind != "in place":
        check_order(contents, after)


def commit(
    home: Path, shards: list[Path], world: World, tree: Any, options: CommitOptions
) -> tuple[list[Path], set[bytes]]:
    """The shards of the new set, and what was left out."""
    place = OverlayDirectory(home / "o")
    seen = (ShardSeen(path.stem.encode(), os.fsencode(path), Fingerprint.at(os.fsencode(path))) for path in shards)
    write_settings(place, OverlaySettings(world.view.layout, world.view.names, world.merge, tuple(seen)))
    report = find(tree, place.upper, Rules(ignore_times=options.ignore_times))
    plan = Planner(tree.lower, report, options).make()
    runner = Runner(plan, Files(os.fsencode(place.upper)), tree.lower)
    if options.in_place and plan.steps:
        replacement = Replacement(place, runner)
        replacement.begin()
        replacement.finish()
    elif not options.in_place:
        runner.write()
    left_out = {remark.path for remark in plan.left_out}
    assert len(left_out) == len(plan.left_out)
    where = home if options.in_place else home / "out"
    return (sorted(where.glob("*.tar")) if where.is_dir() else []), left_out


def check_written(home: Path, outputs: list[Path], contents: list[bytes], after: Model, may_meet: bool) -> None:
    world = after.world
    hidden: dict[bytes, dict[bytes, bytes]] = {}  # members of no sample, which only the files layout shows
    for number, shown_members in enumerate(SHARDS if world.view is not FILES else ()):
        some = {
            name.encode(): data for name, data in shown_members if key_of(name) is None and isinstance(data, bytes)
        }
        hidden[b"s%d" % number] = some
    names = [b"s0", b"s1"]
    expected: list[dict[bytes, bytes]]
    if world.merge:
        everything = [pair for members in (*after.members.values(), *hidden.values()) for pair in members.items()]
        written = [pair for data in contents for pair in by_tarfile(data).items()]
        assert sorted(written) == sorted(everything)
        expected = [by_tarfile(data) for data in contents]
    else:
        names += sorted(after.members.keys() - set(names))
        expected = [{**after.members.get(top, {}), **hidden.get(top, {})} for top in names]
        assert len(contents) == len(names)
    for data, members in zip(contents, expected, strict=True):
        check_readers(home, data, members, may_meet)
    shown = mounted_files(home, outputs, world.view, world.merge)
    if not world.merge:
        tops = {path.stem.encode(): top for path, top in zip(outputs, names, strict=True)}
        shown = {
            tops[path.partition(b"/")[0]] + b"/" + path.partition(b"/")[2]: data for path, data in shown.items()
        }
    elif world.view is not FILES:
        shards = {os.fsencode(path.stem): members for path, members in zip(outputs, expected, strict=True)}
        after.paths = beside_folders(after.paths, shards)
    assert shown == after.paths


def beside_folders(paths: dict[bytes, bytes], shards: dict[bytes, dict[bytes, bytes]]) -> dict[bytes, bytes]:
    """Paths of a merged tree of these shards: `key~shard` for a sample whose path is a folder of another shard."""
    homes: dict[bytes, bytes] = {}
    folders: dict[bytes, set[bytes]] = {}
    for name, members in shards.items():
        for key in (matched[1] for member in members if (matched := SAMPLE.fullmatch(member))):
            homes[key] = name
            folders.setdefault(name, set()).update(key[: at.start()] for at in re.finditer(rb"/", key))
    everywhere = set().union(*folders.values())
    found = {}
    for path, data in paths.items():
        key, _, file = path.rpartition(b"/")
        renamed = key in everywhere and key not in folders[homes[key]]
        found[(key + b"~" + homes[key] if renamed else key) + b"/" + file] = data
    return found


def check_order(contents: list[bytes], after: Model) -> None:
    """Samples that are still there are in their shard, in the order that they had."""
    for number, (data, members) in enumerate(zip(contents, SHARDS, strict=False)):
        top = "" if after.world.merge else f"s{number}/"
        now = [sample["__key__"] for sample in tars.by_webdataset(data)]
        order = dict.fromkeys(key for name, _ in members if (key := key_of(name)))
        left = [key for key in order if (top + key).encode() in after.samples]
        assert [key for key in now if key in left] == left


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_edits(group: int) -> None:
    for seed in range(FIRST + group, FIRST + SEEDS, GROUPS):
        run(seed)
