"""Images equal the trees that FUSE shows: name for name, attribute for attribute, byte for byte.

Most tests read images by a reader of their own (`tests/erofs.py`) and compare with the tree that a worker would
serve; some have the kernel mount them.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import random
import shutil
import signal
import stat
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import sets, tars
from tests.conftest import Program
from tests.erofs import ErofsImage, Inode, Unreadable
from tests.kernel.mounts import end_mount, shard_and_image, told
from tests.processes import wait_until
from tests.servers import need_server
from tests.tars import member
from tests.tree.test_shard_tree import SHARDS, content_of, tar, walk
from wdsfs import mount_table
from wdsfs.errors import CorruptShard, ImageError
from wdsfs.index.store import open_index
from wdsfs.inodes import ROOT
from wdsfs.kernel import erofs_header, erofs_mount, manifest, shard_table
from wdsfs.kernel.devices import close_devices, open_devices
from wdsfs.kernel.erofs_encoding import Table, first_slots
from wdsfs.kernel.image import ImageFile, make_image
from wdsfs.kernel.manifest import ImageOptions
from wdsfs.spec.expand import expand
from wdsfs.tree.companions import Companions
from wdsfs.tree.composition import Composition, columns_of, fields_of
from wdsfs.tree.merged_tree import make_tree
from wdsfs.tree.set_options import Owner
from wdsfs.tree.tree import LowerTree, Node, View
from wdsfs.tree.view_set import ViewSet, make_shard_set

OLD, NEW = (5, 16), (6, 15)  # kernels: the first that is supported, and the first with times in compact inodes
OWNER = Owner(1, 70_000, 0o007)
SIZE_MAX = 1 << 40  # of files whose bytes are compared: one of the odd tars claims more


@contextmanager
def a_tree(
    home: Path,
    shards: Sequence[bytes],
    view: View,
    merge: bool = False,
    wanted: Composition | None = None,
    at: int = 0,
) -> Iterator[LowerTree]:
    """The tree over these shards, called s0, s1 ... in the directory `home`, as `wdsfs image` opens it.

    They get the time `at` (seconds) unless that is 0.
    """
    for number, data in enumerate(shards):
        (home / f"s{number}.tar").write_bytes(data)
        if at:
            os.utime(home / f"s{number}.tar", (at, at))
    found = expand([f"{home}/s{{0..{len(shards) - 1}}}.tar"])
    index, companions = open_index(home / "index"), Companions(wanted or Composition())
    index.refresh([*found, *companions.shards])
    below = make_shard_set(found, index, wanted or Composition(), companions)
    if isinstance(below, ViewSet):
        assert below.make() is None
    tree = make_tree(below, replace(view, merge=merge))
    try:
        yield tree
    finally:
        tree.lower.close()


def image_of(home: Path, tree: LowerTree, since: tuple[int, int] = OLD, owner: Owner = OWNER) -> ErofsImage:
    """The image of a tree, opened by the reader of the tests."""
    target = home / "set.erofs"
    options = ImageOptions(owner, os.fsencode(home), since, tree.merged, "")
    make_image(tree, os.fsencode(target), options)
    found = manifest.read_manifest(os.fsencode(target))
    return ErofsImage(target, [home / one.path for one in found.devices], since >= NEW)


def nodes_of(tree: LowerTree) -> dict[bytes, Node]:
    """All paths of a tree, with their attributes."""
    return {b"": tree.getattr(ROOT)} | {path: entry.node for path, entry in walk(tree)}


def content_or_damage(tree: LowerTree, node: Node) -> bytes | None:
    """The bytes of a file, as FUSE reads them; None where that fails."""
    try:
        return content_of(tree, node.inode)
    except CorruptShard:
        return None


def check(tree: LowerTree, image: ErofsImage, owner: Owner = OWNER) -> dict[bytes, Inode]:
    """An image is the same as its tree; returns the inodes by path."""
    shown = nodes_of(tree)
    found = dict(image.walk())
    assert set(found) == set(shown)
    assert len({one.nid for one in found.values()}) == image.inodes
    numbers: dict[int, int] = {}
    for path, node in shown.items():
        one = found[path]
        expected = (node.mode & ~owner.umask, node.links, node.mtime_ns, *owner[:2])
        assert (one.mode, one.links, one.mtime_ns, one.uid, one.gid) == expected, path
        assert numbers.setdefault(node.inode, one.nid) == one.nid, "a hard link is another file"
        if stat.S_ISDIR(node.mode):
            continue
        assert one.size == node.size
        if stat.S_ISLNK(node.mode):
            assert image.read(one) == tree.readlink(node.inode)
        elif node.size < SIZE_MAX:
            content = content_or_damage(tree, node)
            if content is None:
                with pytest.raises(Unreadable):
                    image.read(one)
            else:
                assert image.read(one) == content, path
    return found


WAYS = [
    (View(), False, OLD),
    (View("files"), False, NEW),
    (View(names="full"), True, NEW),
    (View("files"), True, NEW),
]


@pytest.mark.parametrize("name", tars.ODD)
def test_odd_tars(name: str, tmp_path: Path) -> None:
    """In one shard, where no device number is left for what is missing, and in two."""
    for view, merge, since in WAYS:
        with a_tree(tmp_path, [tars.ODD[name].tar()] * (2 if merge else 1), view, merge) as tree:
            check(tree, image_of(tmp_path, tree, since))


# Names that get into each other's way, in one shard and in several.
_PARTS = st.sampled_from(["a", "b", "a.x", "b.x.y", "a~s1", "a~s1.x", ".a", "%", "k" * 254])
RIVALS = st.lists(
    st.lists(st.lists(_PARTS, min_size=1, max_size=3).map("/".join), max_size=9), min_size=1, max_size=4
)


@settings(max_examples=50, deadline=None)
@given(shards=SHARDS | RIVALS, way=st.sampled_from(WAYS), merge=st.booleans())
def test_any_names(shards: list[list[str]], way: tuple[View, bool, tuple[int, int]], merge: bool) -> None:
    view, _, since = way
    contents = [
        tar([(name, b"" if name.endswith("/") else b"%d:%d" % (n, at)) for at, name in enumerate(one)])
        for n, one in enumerate(shards)
    ]
    with TemporaryDirectory() as home, a_tree(Path(home), contents, view, merge) as tree:
        check(tree, image_of(Path(home), tree, since))


def plain_tar(
    seed: int, count: int, names: Sequence[bytes] = (b"jpg", b"left.json", b"a-b", b"-x", b"~")
) -> bytes:
    """A tar in which nothing is odd: folders, strays, samples of some columns, sizes and times of all kinds."""
    choose, members = random.Random(seed), []
    for number in range(count):
        folder = choose.choice([b"", b"d/", b"d/e.f/", b"+/", b"long" * 6 + b"/"])
        key = folder + choose.choice([b"%06d", b"!%d", b"k" * 60 + b"%d", b"%d"]) % number
        for extension in choose.sample(names, choose.randint(1, len(names))):
            content = bytes([number % 256]) * choose.choice([0, 1, 512, 513, 3000])
            members.append(member(key + b"." + extension, content, mtime=choose.choice([5, 1_700_000_000])))
        if number % 9 == 0:
            members.append(member(folder + b".hidden%d" % number, b"stray"))
    return tars.tar(*members)


@pytest.mark.parametrize(("view", "merge", "since"), WAYS, ids=str)
def test_many_members(view: View, merge: bool, since: tuple[int, int], tmp_path: Path) -> None:
    """Keys of several shards are the same ones in part."""
    with a_tree(tmp_path, [plain_tar(seed, 150) for seed in range(3)], view, merge) as tree:
        check(tree, image_of(tmp_path, tree, since))


def first_slots_one_by_one(slots: Sequence[int], whole: Sequence[bool]) -> list[int]:
    """What `first_slots` returns: its specification, for one object after the other."""
    first, end, at = [0] * len(slots), 0, 0
    while at < len(slots):
        behind, begin = at + 1, end  # the next object that does not go before this one
        if whole[at]:
            while begin % 16 + slots[at] > 16 and behind < len(slots) and not whole[behind]:
                begin, behind = begin + slots[behind], behind + 1
            if begin % 16 + slots[at] > 16:
                behind, end = at + 1, end + -end % 16
        for nth in (*range(at + 1, behind), at):
            first[nth], end = end, end + slots[nth]
        at = behind
    return first


@given(things=st.lists(st.tuples(st.integers(1, 16), st.booleans()), max_size=80))
def test_whole_entries_cross_no_block(things: list[tuple[int, bool]]) -> None:
    """Things lie one behind the other; before a whole one lie only its gap and some of those that follow it."""
    slots = np.array([count for count, _ in things], np.int64)
    whole = np.array([is_whole for _, is_whole in things], bool)
    found = first_slots(slots, whole).tolist()
    assert found == first_slots_one_by_one([count for count, _ in things], [one for _, one in things])
    order, end = sorted(range(len(found)), key=found.__getitem__), 0
    for nth in order:
        count, is_whole = things[nth]
        gap, end = found[nth] - end, found[nth] + count
        assert gap == 0 or (is_whole and found[nth] % 16 == 0 and 0 < gap < 16)
        assert not is_whole or found[nth] % 16 + count <= 16
    groups = np.cumsum(whole)  # with each whole thing those that follow it
    assert groups[order].tolist() == sorted(groups.tolist())


@pytest.mark.parametrize("columns", [1, 2, 3, 7])
def test_no_room_is_lost_between_samples(columns: int, tmp_path: Path) -> None:
    names = [b"%d.jpg" % n for n in range(columns)]
    data = tars.tar(*(member(b"%05d.%s" % (n, name), b"x", mtime=5) for n in range(1000) for name in names))
    with a_tree(tmp_path, [data], View()) as tree:
        image = image_of(tmp_path, tree, NEW)
        used = sum(
            -(-(one.end - (image.meta + one.nid * 32) + (8 if one.content == 4 else one.size)) // 32) * 32
            if one.content
            else 32 + one.size
            for _, one in image.walk()
        )
    assert image.blocks * erofs_header.BLOCK - used < 16 * erofs_header.BLOCK


@pytest.mark.parametrize("merge", [False, True])
def test_directories_of_100_000_entries(merge: bool, tmp_path: Path) -> None:
    count = 100_000
    data = b"".join(member(b"%d.x" % (n * 7919 % count), b"") for n in range(count)) + tars.END
    with a_tree(tmp_path, [data], View(), merge) as tree:
        image = image_of(tmp_path, tree, NEW)
        listing = image.listing(image.inode(image.root))
        top = listing if merge else image.listing(image.inode(listing[b"s0"][0]))
        assert set(top) - {b".", b".."} == {b"%d" % n for n in range(count)}
        for number in random.Random(1).sample(range(count), 100):
            assert set(image.listing(image.inode(top[b"%d" % number][0]))) == {b".", b"..", b"x"}


@settings(max_examples=40, deadline=None)
@given(
    shards=st.lists(
        st.dictionaries(
            st.sampled_from(["a", "b", "c/a", "c/b", "c/d/a"]),
            st.sets(st.sampled_from(["jpg", "json.gz", "json", "cls"]), min_size=1),
            max_size=4,
        ),
        min_size=1,
        max_size=3,
    ),
    chosen=st.sets(st.sampled_from(["join", "associate", "fields", "columns", "classes"])),
    view=st.sampled_from([View(), View("files"), View(names="full")]),
    merge=st.booleans(),
    stored_max=st.sampled_from([20, 1 << 20]),
)
def test_any_views(
    shards: list[dict[str, set[str]]], chosen: set[str], view: View, merge: bool, stored_max: int
) -> None:
    """All ways to make a view together, of samples that lack what others have; in one table for a shard, and in
    several."""
    json = b'{"caption": "%s"}'
    content = {
        "jpg": lambda n: b"j" * 600 * (n % 3),
        "json": lambda n: json % (b"text" * (n % 5)),
        "json.gz": lambda n: gzip.compress(json % (b"g" * 100 * (n % 7)), mtime=0),
        "cls": lambda n: b"%d" % (n % 2),
    }
    contents = [
        tar([(f"{key}.{one}", content[one](at)) for at, key in enumerate(keys) for one in sorted(keys[key])])
        for keys in shards
    ]
    with TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        home = Path(place)
        patch.setattr(shard_table, "STORED_MAX", stored_max)
        (home / "depth.tar").write_bytes(tar([(f"{key}.depth", key.encode()) for key in ("a", "c/a", "c/d/a")]))
        (home / "labels.csv").write_text("key,label\na,one\nb,\nc/b,three\n")
        options: dict[str, Any] = {
            "join": (str(home / "depth.tar"),),
            "associate": (str(home / "labels.csv"),),
            "fields": fields_of(["caption.txt=json:caption"]),
            "columns": columns_of(["img=jpg;depth", "json", "cls", "label"]),
            "classes": True,
        }
        wanted = Composition(missing="empty", duplicates="empty", **{one: options[one] for one in chosen})
        if wanted.classes:
            view, merge = View("classes"), True
        with a_tree(home, contents, view, merge, wanted) as tree:
            check(tree, image_of(home, tree))


@pytest.mark.parametrize("view", [View(), View("files")], ids=str)
@pytest.mark.parametrize("merge", [False, True])
def test_memory_does_not_grow_with_stored_content(
    view: View, merge: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much of a shard is stored in the image."""
    monkeypatch.setattr(shard_table, "STORED_MAX", 5000)
    append, stored = ImageFile.append, list[int]()

    def noted(self: ImageFile, table: Table) -> Any:
        stored.append(int(table.stored.contents.lengths.sum()))
        return append(self, table)

    monkeypatch.setattr(ImageFile, "append", noted)
    content = json.dumps({"t": "x" * 1000}).encode()
    shards = [tar([(f"d{n % 2}/{n:02}.json", content) for n in range(40)]), tar([("d0/x.y", b"z")])]
    with a_tree(tmp_path, shards, view, merge, Composition(fields=fields_of(["t.txt=json:t"]))) as tree:
        check(tree, image_of(tmp_path, tree))
    assert (sum(stored), max(stored)) == (40_000, 5000)


def all_kinds() -> list[bytes]:
    """Shards of all kinds; the first file has one time in each, on which images for old kernels depend."""
    many = [member(b"d/%05d.x" % number, b"x" * (number % 3)) for number in range(1100)]
    links = [member(b"d/e/%d" % n, kind=tars.SYMLINK, link=to) for n, to in enumerate((b"short", b"long/" * 30))]
    far = [tars.gnu_long(b"longer/" * 200, b"K"), member(b"far", kind=tars.SYMLINK, link=b"longer/")]
    hard = member(b"again", kind=tars.HARD_LINK, link=b"d/00001.x")
    kinds = [
        plain_tar(1, 150),
        tars.tar(*(member(b"%d.x" % (n * 7919 % 3000), b"") for n in range(3000))),
        tars.tar(*many, *links, *far, hard),
        tars.tar(tars.old_sparse(b"s.x", [(n * 2048, bytes([n]) * 1024) for n in range(9)], 20_000)),
        tars.ODD["hard links"].tar(),
        tars.ODD["cut in content"].tar(),
        plain_tar(1, 150),
        tars.ODD["no padding at the end"].tar(),
    ]
    return [member(b"aa/0.x", b"", mtime=1_700_000_000) + data for data in kinds]


def test_the_number_of_the_layout(tmp_path: Path) -> None:
    """Whoever changes the bytes for the same shards counts `erofs_header.LAYOUT` up, and puts the digest here.

    Images in the cache are found by this number.
    """
    with a_tree(tmp_path, all_kinds(), View(names="full"), at=1_700_000_000) as tree:
        check(tree, image_of(tmp_path, tree, OLD, Owner()), Owner())
    image = (tmp_path / "set.erofs").read_bytes()
    blocks = image[erofs_header.metadata_block(8) * erofs_header.BLOCK : image.index(b'{"format":')]
    assert (erofs_header.LAYOUT, hashlib.sha256(blocks).hexdigest()[:16]) == (5, "0fec205d92971531")


def test_the_same_bytes_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever makes an image, whenever: by another index, with other inode numbers of the shards; in the place of
    another image; on a disk that takes some bytes at a time, as one does that is nearly full."""
    images, pwrite = set(), os.pwrite
    for name in ("a", "b", "c"):
        home = tmp_path / name
        home.mkdir()
        if name == "b":
            with a_tree(home, [plain_tar(2, 200)], View()) as tree:
                image_of(home, tree)
        if name == "c":
            monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, bytes(data)[:100], offset))
        with a_tree(home, [plain_tar(1, 20), tars.ODD["hard links"].tar()], View(), at=7) as tree:
            image_of(home, tree)
        images.add((home / "set.erofs").read_bytes())
    assert len(images) == 1


def test_limits_are_refused() -> None:
    with pytest.raises(ImageError, match="an image takes 65,534 shards, not 65,535; make several"):
        erofs_header.device_table([(b"s", 512)] * 65_535)
    with pytest.raises(ImageError, match="up to 2 TiB"):
        erofs_header.device_table([(b"s", 1 << 41)])
    assert [erofs_header.missing_device(count) for count in (1, 2, 3, 4, 7)] == [None, 3, None, 5, None]


# --- mounted -----------------------------------------------------------------------------------------------


_MOUNTED = ["hard links", "sparse GNU", "sparse 1.0", "no padding at the end", "cut in content"]
LINKS = tars.tar(
    member(b"d/l", kind=tars.SYMLINK, link=b"../a"),
    member(b"e", kind=tars.SYMLINK, link=b""),
    *(tars.gnu_long(b"x/" * 300, b"K"), member(b"far", kind=tars.SYMLINK, link=b"x/")),
)


def contents_below(top: Path) -> dict[bytes, bytes | None]:
    """The contents of files and links below a directory, whose names have a slash; None for damaged files."""
    found: dict[bytes, bytes | None] = {}
    for path in top.rglob("*"):
        name = bytes(path)[len(bytes(top)) :]
        if path.is_symlink():
            found[name] = os.readlink(bytes(path))
        elif path.is_dir():
            found[name + b"/"] = None
        else:
            try:
                found[name] = path.read_bytes()
            except OSError as error:
                if error.errno not in (errno.EIO, errno.ENODEV):
                    raise
                found[name] = None
    return found


def contents_of(tree: LowerTree) -> dict[bytes, bytes | None]:
    """The same of a tree."""
    found: dict[bytes, bytes | None] = {}
    for path, node in nodes_of(tree).items():
        if stat.S_ISLNK(node.mode):
            found[path] = tree.readlink(node.inode)
        elif stat.S_ISREG(node.mode):
            found[path] = content_or_damage(tree, node)
        elif path:
            found[path + b"/"] = None
    return found


@pytest.mark.parametrize("since", [OLD, NEW], ids=["5.16", "6.15"])
@pytest.mark.parametrize(("view", "merge"), [(View(), False), (View("files"), True)])
def test_another_program_extracts_the_same(
    view: View, merge: bool, since: tuple[int, int], tmp_path: Path
) -> None:
    """fsck.erofs of erofs-utils, which knows the format from elsewhere, finds nothing wrong."""
    fsck = need_server(shutil.which("fsck.erofs"), "erofs-utils")
    odd = (tars.ODD[name].tar() for name in _MOUNTED if "cut" not in name)
    link = tars.tar(member(b"d/l", kind=tars.SYMLINK, link=b"../a"))
    with a_tree(tmp_path, [*odd, plain_tar(2, 40), link], view, merge) as tree:
        image_of(tmp_path, tree, since)
        image, copy = tmp_path / "set.erofs", tmp_path / "copy"
        devices = [f"--device={tmp_path / one.path}" for one in manifest.read_manifest(bytes(image)).devices]
        command: list[str | Path] = [fsck, f"--extract={copy}", "--no-preserve", *devices, image]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if "blksize 512 isn't supported" in done.stderr:
            pytest.skip("this fsck.erofs is too old (1.5, of Debian 12) for blocks of 512 bytes")
        assert done.returncode == 0, done
        assert contents_below(copy) == contents_of(tree)


@pytest.mark.parametrize("by_loops", [False, True])
def test_the_kernel_shows_the_same(by_loops: bool, program: Program) -> None:
    """By the shards themselves, and by loop devices, which go away with the mount."""
    shards = [*(tars.ODD[name].tar() for name in _MOUNTED), plain_tar(2, 40), LINKS]
    image, home = program.home / "set.erofs", str(program.home)
    with a_tree(program.home, shards, View("files")) as tree:
        image_of(program.home, tree, OLD, Owner())
        devices = open_devices(manifest.read_manifest(bytes(image)), home, False)
        mount = erofs_mount.mount_by_loops if by_loops else erofs_mount.mount_image
        mount(str(image), str(program.mountpoint), [one.fd for one in devices], 0)
        close_devices(devices)
        assert contents_below(program.mountpoint) == contents_of(tree)
        source = mount_table.mounted_at(program.mountpoint)
        assert source is not None
        assert source.source.startswith(b"/dev/loop") == by_loops
    end_mount(program.mountpoint)
    # Whatever looks at new disks may have one open for a moment; it goes with its last user.
    wait_until(lambda: not any(os.fsencode(home) in one for one in looped()), "the loop devices to go")


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_no_loop_device_is_left_of_a_process_that_was_killed(
    steps: int, program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, between and after its loop devices: the kernel releases them with their last user."""
    with a_tree(tmp_path, [plain_tar(1, 5), plain_tar(2, 5)], View()) as tree:
        image_of(tmp_path, tree)
    image, mountpoint = tmp_path / "set.erofs", program.mountpoint
    plainly = erofs_mount._loop_device

    def make(fd: int) -> tuple[int, str]:
        made.append(fd)
        found = plainly(fd)
        if len(made) == steps:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    made: list[int] = []
    monkeypatch.setattr(erofs_mount, "_loop_device", make)
    with open(tmp_path / "s0.tar", "rb") as one, open(tmp_path / "s1.tar", "rb") as other:
        pid = os.fork()
        if not pid:
            try:
                erofs_mount.mount_by_loops(str(image), str(mountpoint), [one.fileno(), other.fileno()], 0)
            finally:  # also of an error: this process must not go on with the tests
                os.kill(os.getpid(), signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert (mount_table.mounted_at(mountpoint) is not None) == (steps > 3)
    end_mount(mountpoint)
    wait_until(lambda: not any(os.fsencode(tmp_path) in one for one in looped()), "the loop devices to go")


def looped() -> Iterator[bytes]:
    """The files of all loop devices of this machine, some of which are going."""
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        with suppress(OSError):
            yield file.read_bytes()


def test_image_and_mount_by_the_program(program: Program) -> None:
    """Made, mounted, shown by `status`, ended; with its shards moved to another directory."""
    one, other = (program.write(f"set/s{number}.tar", sets.content(number)) for number in (0, 1))
    image = one.parent / "set.erofs"
    made = program.json("image", str(one.parent / "s{0..1}.tar"), "-o", image)
    assert (made["devices"], made["size"]) == (2, image.stat().st_size)
    assert made["files"] == [str(one), str(other)]
    image = one.parent.rename(program.home / "moved") / "set.erofs"
    program.run("mount", "-o", "noexec", image, program.mountpoint)
    assert (program.mountpoint / "s1" / "d1" / "1-1" / "txt").read_bytes() == b"1"
    (report,) = program.json("status", program.mountpoint)
    assert (report["state"], report["specs"], report["shards"]) == ("served by the kernel", [str(image)], 2)
    found = mount_table.mounted_at(program.mountpoint)
    assert found is not None
    assert {"ro", "nosuid", "nodev", "noexec"} <= set(found.options)
    program.run("umount", program.mountpoint)
    assert not list(program.mountpoint.iterdir())


def test_changed_shards_and_cut_images_are_not_mounted(program: Program) -> None:
    shard, image = shard_and_image(program)
    home, mountpoint = program.home, program.mountpoint
    os.utime(shard, (7, 7))
    message = told(home, "mount", "-f", image, mountpoint, code=3)
    assert f"shards have changed since the image was made: {shard}; make the image again" in message
    assert "--trust-shards" in message
    program.run("mount", "--trust-shards", image, mountpoint)
    assert [file.name for file in mountpoint.iterdir()] == ["s"]
    words = ("-f", "--trust-shards", image, mountpoint)
    told(home, "mount", *words, code=5)
    program.run("umount", mountpoint)
    with shard.open("ab") as file:
        file.write(bytes(512))
    assert "shards have changed" in told(home, "mount", "-f", "--trust-shards", image, mountpoint, code=3)
    shard.unlink()
    message = told(home, "mount", "-f", image, mountpoint, code=3)
    assert f"{shard}: there is no such shard; --base DIR says where the shards of an image are" in message
    whole, at = image.read_bytes(), 1024 + 14  # the number of the top
    for size in (-1, 2000, 100, 0):
        image.write_bytes(whole[:size])
        assert "the image is incomplete" in told(home, "mount", "-f", image, mountpoint, code=5)
    shard_and_image(program)
    image.write_bytes(whole[:at] + b"\x99" + image.read_bytes()[at + 1 :])
    message = told(home, "mount", "-f", image, mountpoint, code=5)
    assert f"does not mount {image}" in message
    assert "the image is damaged; remove it, and make it again" in message


def test_an_image_is_no_shard(tmp_path: Path) -> None:
    shard, image = tmp_path / "s0.tar", tmp_path / "set.erofs"
    shard.write_bytes(sets.content(0))
    told(tmp_path, "image", shard, "-o", image, code=0)
    commands: list[list[str | Path]] = [["info", image], ["ls", image], ["check", shard, image]]
    for words in commands:
        assert f"'{image}': is an image over shards" in told(tmp_path, *words, code=2)
    assert "fuse cannot mount an image" in told(tmp_path, "mount", "--engine", "fuse", image, tmp_path, code=2)


def test_options_that_an_image_does_not_take(tmp_path: Path) -> None:
    shard, image = tmp_path / "s0.tar", tmp_path / "set.erofs"
    shard.write_bytes(sets.content(0))
    told(tmp_path, "image", shard, "-o", image, "--uid", "5", "--umask", "027", "--layout", "files", code=0)
    reader = ErofsImage(image, [shard])
    top = reader.inode(reader.root)
    assert (top.mode, top.uid, top.gid) == (0o40750 & 0o40555, 5, 0)
    for words, text in (
        (["--layout", "files"], "--layout cannot be used with an image"),
        (["--overlay", str(tmp_path / "upper")], "--overlay cannot be used with an image"),
        (["-o", "uid=5"], "uid, gid and umask are for FUSE"),
        (["-o", "auto_unmount"], "-o auto_unmount: not for an image"),
    ):
        assert text in told(tmp_path, "mount", *words, image, tmp_path, code=2)
    assert "is for images" in told(tmp_path, "mount", "--trust-shards", shard, tmp_path, code=2)
    assert "--umask 9" in told(tmp_path, "image", shard, "-o", image, "--umask", "9", code=2)


def test_shards_that_cannot_be_in_an_image(tmp_path: Path) -> None:
    """Nothing is left of an image that cannot be made, and no shard is overwritten."""
    shard, packed, target = tmp_path / "s0.tar", tmp_path / "z.tar.gz", tmp_path / "set.erofs"
    shard.write_bytes(sets.content(0))
    packed.write_bytes(gzip.compress(sets.content(1)))
    message = told(tmp_path, "image", packed, "-o", target, code=9)
    assert f"{packed}: is compressed" in message
    assert "mount the set by FUSE" in message
    assert "is a shard of the set" in told(tmp_path, "image", shard, "-o", shard, code=9)
    assert shard.read_bytes() == sets.content(0)
    missing = tmp_path / "no" / "set.erofs"
    assert "No such file or directory" in told(tmp_path, "image", shard, "-o", missing, code=9)
    assert not [name for name in os.listdir(tmp_path) if "erofs" in name]


def test_a_user_is_told_who_may_mount(user_program: Program) -> None:
    shard = user_program.write("s0.tar", sets.content(0))
    image = user_program.home / "set.erofs"
    user_program.run("image", shard, "-o", image)
    message = user_program.refused("mount", image, user_program.mountpoint, code=5)
    assert "only root may do that" in message
