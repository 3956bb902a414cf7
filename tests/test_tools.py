"""Unmodified tools over a mount: they say and copy the same as over the files that `tar x` writes.

One set of shards by three kinds of writers: the webdataset library, GNU tar in each of its formats, and by hand.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import webdataset

from tests import tars
from tests.conftest import FUSE, KERNEL, Mounted, Program
from tests.kernel.mounts import need_erofs
from tests.processes import finished

SIZES = [("", 0), ("", 1), ("", 511), ("a/", 512), ("a/", 513), ("a/b/c/", 131_072), ("ü/x y/", 1_000_003)]
SAMPLES = [
    {"__key__": f"{folder}{at:03d}", "jpg": os.urandom(size), "left.png": bytes(range(256)) * (at % 5)}
    | {"json": b'{"needle": %d}\n' % at, "cls": b""}
    for at, (folder, size) in enumerate(SIZES)
]


TIME_NS = 1_400_000_000 * 10**9


def plain_files(directory: Path) -> None:
    """Files as a person might pack them, to be found in samples and beside them."""
    contents = {
        "one.txt": b"needle in one\n",
        "one.jpg": os.urandom(70_000),
        "two.txt": b"",
        "README": b"needle\n",
        ".hidden": b"h",
        "dir/three.tar.gz": os.urandom(5000),
        "dir/with space/four.txt": b"line\nneedle\n",
        "dir/umläut.txt": b"u",
        "dir/new\nline.txt": b"n",
        "dir/invalid\udcff.txt": b"\xff\x00needle\x00",
        "x" * 200 + "/" + "y" * 200 + ".bin": b"long",
    }
    for name, content in contents.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    with (directory / "holes.bin").open("wb") as holes:
        for at in (0, 100_000, 500_000):
            holes.seek(at)
            holes.write(b"needle\n" * 1000)
        holes.truncate(1_000_000)
    (directory / "empty").mkdir()
    (directory / "dir" / "five.txt").symlink_to("../one.txt")
    (directory / "dangling").symlink_to("/nowhere/at all")
    os.link(directory / "one.txt", directory / "zwei.txt")
    os.link(directory / "one.txt", directory / "dir" / "drei.txt")
    for number, path in enumerate(sorted(directory.rglob("*"), reverse=True)):
        os.utime(path, ns=(0, (1_500_000_000 + number) * 10**9), follow_symlinks=False)
    os.utime(directory, ns=(0, TIME_NS))


def write_shards(home: Path) -> list[Path]:
    shards = home / "shards"
    shards.mkdir()
    with webdataset.ShardWriter(f"{shards}/wds-%06d.tar", maxcount=3, verbose=0, encoder=False) as writer:
        for sample in SAMPLES:
            writer.write(sample)
    (shards / "ustar.tar").write_bytes(
        tars.with_webdataset([{**one, "__key__": f"u/{one['__key__']}"} for one in SAMPLES], mtime=1_234_567)
    )
    plain = home / "plain"
    plain.mkdir()
    plain_files(plain)
    for kind in ("gnu", "posix", "oldgnu"):
        shard = shards / f"{kind}.tar"
        shard.write_bytes(tars.with_gnu_tar(plain, f"--format={kind}", "--sparse"))
        os.utime(shard, ns=(0, TIME_NS))  # it is that of the shard's directory, whatever time its "." has
    few = [b"one.txt", b"one.jpg", b"two.txt", b"dir/five.txt", b"zwei.txt", b"empty"]
    for kind in ("ustar", "v7"):
        (shards / f"{kind}-few.tar").write_bytes(tars.with_gnu_tar(plain, f"--format={kind}", members=few))
    (shards / "hand.tar").write_bytes(
        tars.tar(
            tars.member(b"h/one.txt", b"needle", mtime=-5),
            tars.member(b"h/one.jpg", tars.ABC, mtime=8_000_000_000),
            tars.old_sparse(
                b"h/two.bin",
                [(1024, b"needle" + bytes(506)), (1 << 20, b"end"), ((1 << 20) + 5000, b"")],
                (1 << 20) + 5000,
            ),
            tars.member(b"h/link.bin", kind=tars.HARD_LINK, link=b"h/two.bin"),
            tars.member(b"h/three.txt", b"3", mtime=0),
        )
    )
    return sorted(shards.iterdir(), key=os.fsencode)


@pytest.fixture(scope="module", params=[FUSE, KERNEL])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Program:
    """The program, whose mounts are by FUSE, and once more by the kernel."""
    if request.param == KERNEL:
        need_erofs()
    made = Program(tmp_path_factory.mktemp("tools"), engine=request.param)
    write_shards(made.home)
    return made


@pytest.fixture(scope="module")
def shards(program: Program) -> list[Path]:
    return sorted((program.home / "shards").iterdir(), key=os.fsencode)


@pytest.fixture(scope="module")
def mounted(program: Program) -> Iterator[Mounted]:
    with program.mounted("--layout", "files", "shards") as one:
        yield one


@pytest.fixture(scope="module")
def second(program: Program) -> Path:
    """A mount point beside that of the mount that most tests share."""
    return program.directory("second")


@pytest.fixture(scope="module")
def extracted(program: Program, shards: list[Path]) -> Path:
    """A tar by GNU tar, with the owner and the modes of a mount."""
    top = program.home / "extracted"
    for shard in shards:
        (top / shard.stem).mkdir(parents=True)
        program.tool("tar", "xf", shard, "-C", top / shard.stem, "--no-same-owner")
    program.tool("chmod", "-R", "a=rX", top)
    return top


def masked(text: bytes) -> list[bytes]:
    """Lines of `ls -l` without what file systems differ in: blocks, sizes and link counts of directories."""
    lines = [line for line in text.splitlines() if not line.startswith(b"total ")]
    return [re.sub(rb"^(d\S+) +\d+ (\S+ +\S+) +\d+ ", rb"\1 - \2 - ", line) for line in lines]


# Directories that the tar has no member for have the time of the shard; tar gives them that of the extraction.
WITH_DIRECTORIES = ["gnu", "posix", "oldgnu"]


@pytest.mark.parametrize("shard", WITH_DIRECTORIES)
def test_ls(program: Program, mounted: Mounted, extracted: Path, shard: str) -> None:
    def listing(top: Path) -> list[bytes]:
        return masked(program.tool("ls", "-lRA", "--time-style=full-iso", ".", cwd=top / shard))

    assert listing(mounted.path) == listing(extracted)


@pytest.mark.parametrize(
    "tests",
    [
        [],
        ["-type", "f"],
        ["-type", "d", "-empty"],
        ["-type", "l", "-printf", r"%P %l\0"],
        ["-name", "*.txt", "-size", "+0"],
        ["-not", "-type", "d", "-printf", r"%P %y %s %m %n %U %G %l %T@\0"],
        ["-newermt", "2017-07-14 02:40:05"],
        ["-links", "+1", "-type", "f"],
        ["-type", "f", "-exec", "sha256sum", "{}", "+"],
        ["-type", "f", "-exec", "cksum", "{}", ";"],
    ],
    ids=" ".join,
)
def test_find(program: Program, mounted: Mounted, extracted: Path, tests: list[str]) -> None:
    """In any order: that of a mount is the order of the tar. With -newermt without directories' own times."""
    no_directories = ["-not", "-type", "d"] if "-newermt" in tests else []

    def found(top: Path, *options: str) -> list[bytes]:
        end = [] if "-printf" in tests or "-exec" in tests else ["-print0"]
        out = program.tool("find", ".", *options, *no_directories, *tests, *end, cwd=top)
        return sorted(out.split(b"\n" if "-exec" in tests else b"\0"))

    assert found(mounted.path) == found(extracted)
    # Without -noleaf find trusts the link counts of directories.
    assert found(mounted.path, "-noleaf") == found(mounted.path)


def test_du(program: Program, mounted: Mounted, extracted: Path) -> None:
    """Of several hard links du counts the first one that it meets."""

    def sizes(top: Path) -> set[bytes]:
        out = program.tool("du", "-a0", "--apparent-size", "--block-size=1", ".", cwd=top)
        lines = [line.split(b"\t") for line in out.split(b"\0") if line]
        files = [size + path for size, path in lines if not os.path.isdir(os.path.join(os.fsencode(top), path))]
        return {re.sub(rb"(?:(?:one|zwei|dir/drei).txt|(?:two|link).bin)$", b"", line) for line in files}

    assert len(sizes(mounted.path)) > 30
    assert sizes(mounted.path) == sizes(extracted)


def test_du_counts_what_the_files_hold(program: Program, mounted: Mounted) -> None:
    """A mount has no blocks but those of the contents, and by the kernel those of the lists of names."""
    out = program.tool("du", "-s", "--block-size=512", ".", cwd=mounted.path)
    seen = {one.st_ino: one for path in mounted.path.rglob("*") if stat.S_ISREG((one := path.lstat()).st_mode)}
    links = [path.lstat().st_size for path in mounted.path.rglob("*") if path.is_symlink()]
    folders = [path.stat().st_size for path in (mounted.path, *mounted.path.rglob("*")) if path.is_dir()]
    sizes = [one.st_size for one in seen.values()] + (folders if program.engine == KERNEL else [])
    assert int(out.split()[0]) == sum((size + 511) // 512 for size in sizes) + len(links)


def test_cp(program: Program, mounted: Mounted, extracted: Path) -> None:
    copy = program.home / "copy"
    program.tool("cp", "-a", mounted.path, copy)
    assert program.tool("diff", "-r", "--no-dereference", copy, extracted) == b""
    assert described(program, copy, directories=True) == described(program, mounted.path, directories=True)
    assert described(program, copy) == described(program, extracted)


def described(program: Program, top: Path, directories: bool = False) -> list[bytes]:
    kind = [] if directories else ["-not", "-type", "d"]
    out = program.tool("find", ".", *kind, "-printf", r"%P %y %m %U %G %l %T@\0", cwd=top)
    return sorted(out.split(b"\0"))


def test_rsync(program: Program, mounted: Mounted, extracted: Path) -> None:
    copy = program.home / "synced"
    program.tool("rsync", "-aH", "--checksum", f"{mounted.path}/", copy)
    assert program.tool("diff", "-r", "--no-dereference", copy, extracted) == b""
    for other in (copy, mounted.path):
        differences = program.tool(
            "rsync", "-aHn", "--checksum", "--omit-dir-times", "--itemize-changes", f"{other}/", f"{extracted}/"
        )
        assert differences == b""


@pytest.mark.parametrize("shard", WITH_DIRECTORIES)
def test_tar(program: Program, mounted: Mounted, extracted: Path, shard: str) -> None:
    def packed(top: Path) -> str:
        out = program.tool("tar", "c", "--sort=name", "--format=gnu", ".", cwd=top / shard)
        with tarfile.open(fileobj=io.BytesIO(out)) as archive:
            assert archive.getmember("./one.txt")
        return hashlib.sha256(out).hexdigest()

    assert packed(mounted.path) == packed(extracted)


def test_grep(program: Program, mounted: Mounted, extracted: Path) -> None:
    def matches(top: Path) -> list[bytes]:
        return sorted(program.tool("grep", "-rca", "needle", ".", cwd=top).splitlines())

    assert matches(mounted.path) == matches(extracted)
    assert any(line.endswith(b":1") for line in matches(mounted.path))


def test_other_tools(program: Program, mounted: Mounted, extracted: Path) -> None:
    name = "posix/one.jpg"
    for command in (
        ["cmp", extracted / name],
        ["dd", "bs=777", "status=none", f"if={mounted.path / name}"],
        ["cat"],
        ["md5sum", "--tag"],
        ["wc", "-c"],
        ["od", "-An", "-c", "-j", "69990"],
        ["sort", "-z"],
    ):
        arguments = [] if command[0] == "dd" else [mounted.path / name]
        shown = program.tool(*command, *arguments)
        expected = program.tool(
            *[str(one).replace(str(mounted.path), str(extracted)) for one in command + arguments]
        )
        assert shown.replace(bytes(mounted.path), b"") == expected.replace(bytes(extracted), b"")
    copy = program.home / "sparse.bin"  # the content of a sparse member, copied with holes
    program.tool("cp", "--sparse=always", mounted.path / "hand/h/two.bin", copy)
    assert copy.read_bytes() == (extracted / "hand/h/two.bin").read_bytes()


# --- the same samples as for the webdataset library --------------------------------------------------------


def samples_of(shard: Path) -> dict[str, bytes]:
    """`key.extension` and content of all samples that the webdataset library reads from a shard."""
    found = {}
    for sample in tars.by_webdataset(shard.read_bytes()):
        for extension, content in sample.items():
            if extension != "__key__":
                path = f"{sample['__key__']}.{extension}"
                assert path not in found
                found[path] = content
    return found


def shown_samples(top: Path, names: str) -> dict[str, bytes]:
    """The same of a tree in the samples layout."""
    found = {}
    for path in top.rglob("*"):
        if not path.is_dir():
            assert path.is_file()
            sample = path.parent.relative_to(top)
            if names == "full":
                assert path.name.startswith(f"{sample.name}.")
                found[str(sample.parent / path.name)] = path.read_bytes()
            else:
                found[f"{sample}.{path.name}"] = path.read_bytes()
    return found


@pytest.mark.parametrize("names", ["ext", "full"])
def test_the_samples_are_those_of_webdataset(
    program: Program, second: Path, shards: list[Path], names: str
) -> None:
    """In a tree for each shard, and in one of all."""
    with program.mounted("--names", names, "shards", at=second) as mounted:
        assert sorted(os.listdir(mounted.path)) == sorted(shard.stem for shard in shards)
        for shard in shards:
            expected = {path.removeprefix("./"): content for path, content in samples_of(shard).items()}
            assert expected
            assert shown_samples(mounted.path / shard.stem, names) == expected
    chosen = [one for one in shards if one.stem.startswith(("wds-", "ustar", "hand")) and "few" not in one.stem]
    assert len(chosen) == 5
    with program.mounted("--merge", "--names", names, *chosen, at=second) as mounted:
        expected = {path: content for shard in chosen for path, content in samples_of(shard).items()}
        assert shown_samples(mounted.path, names) == expected


def test_the_files_layout_has_the_names_of_the_tar(mounted: Mounted, shards: list[Path]) -> None:
    for shard in shards:
        listed = finished("tar", "tf", shard, "--quoting-style=literal", "--null", text=False).stdout
        names = [
            name.removeprefix(b"./").rstrip(b"/") for name in listed.replace(b"new\nline", b"NL").split(b"\n")
        ]
        top = os.fsencode(mounted.path / shard.stem)
        for name in filter(None, names):
            assert os.path.lexists(os.path.join(top, name.replace(b"NL", b"new\nline")))
