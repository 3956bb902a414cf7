"""The command line: every command and option, what it prints, and with which code it ends."""

from __future__ import annotations

import errno
import gzip
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from tests import tars
from tests.conftest import ROOT, InProcess, Mounted, Program, fails, need_fuse
from tests.processes import finished
from wdsfs import mount_registry
from wdsfs.cli import help_commands, main
from wdsfs.mount import mount_search
from wdsfs.mount.live_mount import FuseMount
from wdsfs.tree import opening

SAMPLES = tars.tar(
    tars.member(b"d/b.txt", b"bbb", mtime=1_600_000_000),
    tars.member(b"d/b.jpg", tars.ABC),
    tars.member(b"d/a.txt", b"a"),
    tars.member(b"README", b"read me"),
    tars.member(b"c.txt", b"c"),
)
TOP = click.Context(main.main)
COMMANDS = main.main.list_commands(TOP)


@pytest.fixture
def program(in_process: InProcess) -> InProcess:
    return in_process


@pytest.fixture
def shards(program: Program) -> Program:
    program.write("s-0.tar", SAMPLES)
    program.write("s-1.tar", tars.tar(tars.A, tars.B))
    return program


def lines(out: bytes) -> list[bytes]:
    return out.splitlines()


@pytest.fixture
def prepared(shards: InProcess) -> InProcess:
    """An Energon dataset of the two, with a number of samples that is wrong and a sample that is excluded."""
    meta = shards.home / ".nv-meta"
    meta.mkdir()
    (meta / ".info.json").write_text(json.dumps({"shard_counts": {"s-1.tar": 5, "s-0.tar": 3}}))
    (meta / "split.yaml").write_text(
        "split_parts: {train: ['s-{0..1}.tar'], val: [s-1.tar]}\nexclude: [s-0.tar/d/b]"
    )
    return shards


# --- help --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_lists_the_commands(flag: str) -> None:
    """Each once, below what it is for, with its whole line."""
    done = CliRunner().invoke(main.main, [flag])
    assert done.exit_code == 0
    modules = {module.stem for module in (ROOT / "wdsfs/cli").glob("*_command*.py")}
    assert {main.MODULES.get(command, f"{command}_command") for command in COMMANDS} == modules
    assert all(len(re.findall(rf"^  {command} +\w", done.output, re.M)) == 1 for command in COMMANDS)
    assert re.findall(r"^(\w.*):\n  [a-z]+ +[A-Z]", done.output, re.M) == list(main.GROUPS)
    assert "..." not in done.output.partition("Look at shards:")[2]
    assert max(map(len, done.output.partition("Exit codes:")[0].splitlines())) <= 80


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    """In 60 lines, with an example that can be typed. The last line names `--help-all`, which has every option."""
    done = CliRunner().invoke(main.main, [command, "--help"])
    assert done.exit_code == 0
    assert re.search(rf"Examples?:\n +wdsfs {command}\s", done.output)
    assert done.output.count("\n") <= 60
    explained = main.main.get_command(TOP, command)
    assert explained is not None
    options = [param for param in explained.params if isinstance(param, click.Option) and not param.hidden]
    rare = [option for option in options if f" {option.opts[-1]}" not in done.output.partition("ptions:")[2]]
    assert done.output.endswith(f"{len(rare)} more options.\n") == bool(rare)
    every = CliRunner().invoke(main.main, [command, "--help-all"]).output
    for option in options:
        assert option.help, option.name
        assert all(name in every for name in option.opts)
    if command in ("index", "ls", "info", "check", "status", "doctor", "cache", "diff", "commit", "restore"):
        assert "--json" in done.output


def test_help_as_a_command(program: Program) -> None:
    for name in ("umount", "unmount"):
        assert program.run("help", name).stdout == program.run("umount", "--help").stdout
    for words, text in ((["monut"], "`mount`"), (["layuots"], "`layouts`"), (["page", "cache"], "cache, cat")):
        assert text in program.refused("help", *words, code=2)


def test_help_names_commands_and_options_that_exist() -> None:
    """What to type for a task has no wrong word in it, fits 80 columns, and finds its way to every purpose."""
    page = CliRunner().invoke(main.main, ["help"]).output
    assert max(map(len, page.splitlines())) <= 80
    for line, _ in itertools.chain(*help_commands.TASKS.values()):
        assert line in page
        command = main.main.get_command(TOP, line.split()[1])
        assert command is not None, line
        options = [name for parameter in command.params for name in parameter.opts]
        assert all(word in options for word in line.split() if word.startswith("-")), line


def test_help_all_has_the_options_by_section() -> None:
    """`--help` has the first two sections, and the first part of the text; `help mount` is the same."""
    words = (["mount", "--help"], ["mount", "--help-all"], ["help", "mount"])
    short, every, helped = (CliRunner().invoke(main.main, typed, prog_name="wdsfs").output for typed in words)
    assert short == helped
    places = [every.index(text) for text in ("A single shard", "--overlay DIR", "What is shown:", "--cache-size")]
    assert places == sorted(places)
    assert not [text for text in ("A single shard", "--cache-size", "Which shards:") if text in short]
    assert "`wdsfs mount --help-all` shows" in short.splitlines()[-1]
    assert "--help-all` shows" not in every


def run_python(program: Program, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run an interpreter of its own in the directory and the environment of a program."""
    return finished(sys.executable, *arguments, env=program.environment, cwd=program.home, **options)


def test_help_loads_little(program: Program) -> None:
    """Nothing slow, and at most 110 modules besides those of the interpreter; 88 when this was written."""

    def loaded(*arguments: str) -> list[str]:
        said = run_python(program, "-X", "importtime", *arguments).stderr
        return re.findall(r"^import time: +\d+ \|[^|]*\| +(\S+)$", said, re.M)

    modules = loaded("-m", "wdsfs", "--help")
    slow = {"trio", "pyfuse3", "lmdb", "numpy", "rich", "multiprocessing", "asyncio"}
    assert {*slow, "hashlib", "queue", "wdsfs.trust", "wdsfs.mount_table"}.isdisjoint(modules)
    assert 30 < len(modules) - len(loaded("-c", "pass")) <= 110


def test_local_shards_are_listed_without_the_room_remote(program: Program) -> None:
    """But for the modules that know a URL when they see one."""
    program.write("s.tar", tars.tar(tars.A))
    text = (
        "import sys; from wdsfs.cli.main import main; main(['ls', '-R', 's.tar'], standalone_mode=False)\n"
        "print(*sys.modules)"
    )
    *listed, modules = run_python(program, "-c", text).stdout.splitlines()
    assert listed == ["s/", "s/a/", "s/a/txt"]
    assert not [module for module in modules.split() if module.startswith("wdsfs.remote")]


# --- ls ----------------------------------------------------------------------------------------------------


def test_ls(shards: Program) -> None:
    for words, expected in (
        (["s-{0,1}.tar"], b"s-0/ s-1/"),
        (["s-0.tar", "s-1.tar"], b"s-0/ s-1/"),
        (["s-0.tar", "s-0"], b"d/ c/"),
        (["s-0.tar", "/s-0/d/"], b"b/ a/"),
        (["s-0.tar", "s-0/d/b"], b"txt jpg"),
        (["s-0.tar", "s-0/d/b/txt"], b"s-0/d/b/txt"),
        (["--names", "full", "s-0.tar", "s-0/d/b"], b"b.txt b.jpg"),
        (["--layout", "files", "s-0.tar", "s-0"], b"d/ README c.txt"),
        (["--merge", "s-*.tar"], b"d/ c/ a/ b/"),
        (["-R", "s-0.tar", "s-0"], b"d/ d/b/ d/b/txt d/b/jpg d/a/ d/a/txt c/ c/txt"),
    ):
        assert lines(shards.run("ls", *words).stdout) == expected.split()
    null = shards.run("ls", "-R0", "s-0.tar", "s-0").stdout
    assert null == shards.run("ls", "-R", "s-0.tar", "s-0").stdout.replace(b"\n", b"\0")
    out = lines(shards.run("ls", "-l", "s-0.tar", "s-0/d/b", env={"TZ": "UTC"}).stdout)
    assert out[0] == b"-r--r--r--            3 2020-09-13 12:26 txt"
    (directory, *_) = lines(shards.run("ls", "--long", "s-0.tar").stdout)
    assert re.fullmatch(rb"dr-xr-xr-x +0 \d{4}-\d\d-\d\d \d\d:\d\d s-0", directory)
    shards.write("s-0", b"a file with the name of a directory of the tree")
    assert "s-0" in shards.refused("ls", "s-0.tar", "s-0/nothing", code=6)


def test_ls_json(shards: Program) -> None:
    """One object a line."""
    out = shards.run("ls", "-R", "--json", "s-0.tar", "s-0").stdout
    rows = [json.loads(line) for line in lines(out)]
    assert [row["name"] for row in rows] == ["d", "d/b", "d/b/txt", "d/b/jpg", "d/a", "d/a/txt", "c", "c/txt"]
    assert rows[2].items() >= {"directory": False, "size": 3, "mtime_ns": 1_600_000_000 * 10**9}.items()
    assert rows[0]["directory"] is True
    assert len({row["inode"] for row in rows}) == len(rows)
    assert all(set(row) == {"name", "directory", "size", "mtime_ns", "inode"} for row in rows)


def test_ls_of_every_kind_of_spec(prepared: Program) -> None:
    prepared.write("list.txt", b"s-1.tar\ns-0.tar\n")
    prepared.write("x.json", b'{"wids_version": 1, "shardlist": [{"url": "s-0.tar", "nsamples": 3}]}')
    prepared.write("x.yaml", b"datasets: [{shards: 's-{1,0}.tar'}]")
    for specs in (["@list.txt"], ["x.yaml"], ["."], [".nv-meta"], ["${TWO}"]):
        assert prepared.run("ls", *specs, env={"WDS_TWO": "s-{1,0}.tar"}).stdout == b"s-1/\ns-0/\n"
    assert prepared.run("ls", "--split", "val", ".").stdout == b"s-1/\n"
    assert prepared.run("ls", "--shard-id=1", "--num-shards=2", "@list.txt").stdout == b"s-0/\n"
    assert prepared.run("ls", "x.json", "s-0/c").stdout == b"txt\n"
    assert prepared.run("ls", "@list.txt", "s-0/c").stdout == b"txt\n"
    assert prepared.run("cat", "--split", "val", ".", "s-1/a/txt").stdout == b"aaa"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shard-id=1"], b"--shard-id and --num-shards belong together"),
        (["--num-shards=1"], b"--shard-id and --num-shards belong together"),
        (["--shard-id=2", "--num-shards=2"], b"the last of 2 is 1"),
        (["--shard-id=0", "--num-shards=3"], b"has 2 shards and cannot be cut into 3 parts"),
        (["--shard-id=-1", "--num-shards=3"], b"-1 is not in the range"),
        (["--split=test"], b"no split is called 'test'; there are: 'train', 'val'"),
    ],
)
@pytest.mark.parametrize("command", ["mount", "index", "ls", "cat", "info", "check", "diff", "commit"])
def test_which_part_of_the_shards(prepared: InProcess, command: str, options: list[str], message: bytes) -> None:
    """Every command that takes SHARDS takes these, and refuses them for the same reasons."""
    further = {"mount": [".", "mnt"], "cat": [".", "x"], "diff": ["."], "commit": ["-o", "out/%d.tar", "."]}
    (prepared.home / "edits").mkdir()
    over = ["--overlay", "edits"] if command in ("diff", "commit") else []
    arguments = [command, *options, *over, *further.get(command, ["."])]
    assert message in prepared.run(*arguments, code=2).stderr


def test_an_overlay_is_of_whole_shards(prepared: Program) -> None:
    prepared.directory("edits")
    for command in (["diff"], ["commit", "--in-place"]):
        done = prepared.run(*command, "--split", "val", "mnt", code=2)
        assert b"--split is for SHARDS; leave it out for a mount" in done.stderr
        done = prepared.run(*command, "--overlay", "edits", ".", code=2)
        assert b"s-0.tar' are excluded by the split file" in done.stderr
    done = prepared.run("mount", "--overlay", "edits", ".", "mnt", code=2)
    assert b"--overlay is for whole shards" in done.stderr
    assert prepared.run("diff", "--overlay", "edits", "--split", "val", ".").stdout == b""


def test_other_numbers_of_samples_than_the_index_says(prepared: Program) -> None:
    text = b"s-1.tar: has 2 samples; the file that names it says 5"
    assert text in prepared.run("index", ".").stderr
    assert text not in prepared.run("index", "s-1.tar").stderr
    done = prepared.run("check", ".", code=1)
    assert b"s-1.tar: [sample count] has 2 samples; the file that names it says 5" in done.stdout
    assert b"the counts include 1 sample that a split file excludes" in done.stderr
    assert prepared.json("info", ".")["samples"] == 4
    assert prepared.json("info", "s-0.tar", "s-1.tar")["samples"] == 4 + 1


def test_ls_of_a_directory_in_many_pieces(program: Program) -> None:
    """More entries than are asked for at a time, and just as many."""
    for count in (999, 1000, 1001, 3000):
        program.write("a.tar", tars.tar(*(tars.header(b"%04d.x" % number) for number in range(count))))
        assert lines(program.run("ls", "a.tar", "a").stdout) == [b"%04d/" % number for number in range(count)]


def test_ls_says_what_a_mount_shows(program: Program) -> None:
    for name, case in tars.ODD.items():
        case.write(program.home / f"{name.replace('/', '|')}.tar")
    for options in ([], ["--merge", "--layout", "files"], ["--names", "full"]):
        listed = program.run("ls", "-R0", *options, program.home).stdout
        with program.mounted(*options, program.home) as mounted:
            mounted.allow_log(r"\.tar: .*; see: wdsfs check", "more shards are damaged")
            found = program.tool("find", ".", "-mindepth", "1", "-printf", r"%P%y\0", cwd=mounted.path)
        shown = {line[:-1] + (b"/" if line.endswith(b"d") else b"") for line in found.split(b"\0") if line}
        assert {line for line in listed.split(b"\0") if line} == shown


@pytest.mark.parametrize(
    "path", ["s-2", "s-0/d/b/png", "s-0/d/b/txt/x", "s-0/..", "s-0/d/../d", "S-0", "s-0/d/b/TXT"]
)
def test_paths_that_are_not_there(shards: Program, path: str) -> None:
    for command in ("ls", "cat"):
        assert path.rpartition("/")[2][:1] in shards.refused(command, "s-0.tar", path, code=6)


def test_names_of_any_bytes(program: Program) -> None:
    name = b"inv\xff\n\x1b[31m \xc3\xbc"
    shard = program.write(
        b"sh\xfe.tar", tars.tar(tars.member(name + b".txt", b"x"), tars.header(b"cut.bin", 1000))
    )
    damaged = {"code": 1}
    listed = program.run("ls", "-R0", shard).stdout.split(b"\0")
    assert listed[:3] == [b"sh\xfe/", b"sh\xfe/" + name + b"/", b"sh\xfe/" + name + b"/txt"]
    assert program.run("cat", shard, b"sh\xfe/" + name + b"/txt").stdout == b"x"
    assert b"sh\xfe.tar" in program.run("check", shard, **damaged).stdout
    assert json.loads(lines(program.run("ls", "--json", shard).stdout)[0])["name"] == "sh\udcfe"
    assert program.run("index", shard).stdout
    assert program.run("info", shard).stdout
    found = [json.loads(line) for line in lines(program.run("check", "--json", shard, **damaged).stdout)]
    assert found
    assert {one["shard"] for one in found} == {os.fsdecode(bytes(shard))}
    with program.mounted(shard) as mounted:
        mounted.expect_log("without an end-of-archive mark")
        assert b"sh\xfe.tar" in program.run("status", mounted.path).stdout
        assert program.run("status").stdout


# --- cat ---------------------------------------------------------------------------------------------------


def test_cat_is_exact(program: Program) -> None:
    big = os.urandom((3 << 20) + 17)
    links = [
        tars.member(b"h.txt", kind=tars.HARD_LINK, link=b"b.txt"),
        tars.member(b"s.txt", kind=tars.SYMLINK, link=b"b.txt"),
    ]
    program.write("a.tar", tars.tar(tars.member(b"big.bin", big), tars.member(b"no.txt"), tars.B, *links))
    for words, content in (
        (["a.tar", "a/big/bin"], big),
        (["a.tar", "a/no/txt"], b""),
        (["--names", "full", "a.tar", "a/b/b.txt"], tars.ABC),
        (["--merge", "a.tar", "b/txt"], tars.ABC),
        (["--layout", "files", "a.tar", "a/b.txt"], tars.ABC),
        (["--layout", "files", "a.tar", "a/h.txt"], tars.ABC),
    ):
        assert program.run("cat", *words).stdout == content
    assert "'b.txt'" in program.refused("cat", "--layout", "files", "a.tar", "a/s.txt", code=6)


def test_cat_of_what_is_cut_off(program: Program) -> None:
    program.write("a.tar", tars.ODD["cut in content"].tar())
    done = program.run("cat", "-q", "a.tar", "a/b/txt", code=3)
    assert b"a.tar" in lines(done.stderr)[-1]
    assert tars.ABC.startswith(done.stdout)


# --- info --------------------------------------------------------------------------------------------------


def test_info(shards: Program) -> None:
    report = shards.json("info", "s-{0,1}.tar")
    expected = {"shards": 2, "samples": 5, "members": 7, "bytes": 3 + 768 + 1 + 7 + 1 + 3 + 768, "damaged": 0}
    assert report.items() >= expected.items()
    assert report["shard_bytes"] == sum(path.stat().st_size for path in shards.home.glob("*.tar"))
    by_extension = {row["extension"]: row for row in report["extensions"]}
    assert list(by_extension) == ["txt", "jpg"]
    assert by_extension["txt"] == {
        "extension": "txt", "count": 5, "bytes": 776, "min": 1, "median": 3, "p90": 768, "max": 768
    }  # fmt: skip
    text = shards.run("info", "s-{0,1}.tar").stdout
    assert b"2 shards, 5 samples, 7 members" in text
    assert re.search(rb"^ ?txt +5 +776 B", text, re.M)


def test_info_of_many_extensions_and_of_nothing(program: Program) -> None:
    program.write("a.tar", tars.tar(*(tars.member(b"a.%04d" % number) for number in range(1002))))
    report = program.json("info", "a.tar")
    assert (len(report["extensions"]), report["more_extensions"]) == (1000, 2)
    assert program.run("info", "a.tar").stdout.rstrip().endswith(b"\nand 2 more extensions")
    program.write("a.tar", tars.END)
    assert program.json("info", "a.tar").items() >= {"shards": 1, "samples": 0, "extensions": []}.items()
    assert b"1 shard, 0 samples" in program.run("info", "a.tar").stdout


# --- index -------------------------------------------------------------------------------------------------


def test_index_builds_what_has_changed(shards: Program) -> None:
    report = shards.json("index", "s-{0,1}.tar")
    keys = {"shards", "rebuilt", "unreadable", "damaged", "samples", "members", "pruned", "seconds", "index"}
    assert set(report) == keys
    assert report.items() >= {"shards": 2, "rebuilt": 2, "samples": 5, "members": 7, "damaged": 0}.items()
    assert report["index"] == str(shards.home / "index")
    assert shards.json("index", "s-{0,1}.tar")["rebuilt"] == 0
    os.utime(shards.home / "s-1.tar")
    assert shards.json("index", "s-{0,1}.tar")["rebuilt"] == 1
    shards.write("s-2.tar", tars.ODD["cut in content"].tar())
    done = shards.run("index", "--json", "s-*.tar")
    assert json.loads(done.stdout).items() >= {"shards": 3, "rebuilt": 1, "damaged": 1}.items()
    assert b"s-2.tar: the file ends at byte 1536" in done.stderr
    assert b"0 indexed" in shards.run("index", "--quiet", "--jobs", "1", "s-*.tar").stdout
    assert shards.json("index", "--index-dir", shards.home / "other index", "s-*.tar")["rebuilt"] == 3
    (shards.home / "s-1.tar").unlink()
    for pruned in (1, 0):
        assert shards.json("index", "--prune", "s-0.tar").items() >= {"rebuilt": 0, "pruned": pruned}.items()


SHARDS, INTERRUPTED = 40, 20  # of a set, and the shard of it at which a command is interrupted

# All processes are interrupted, as a terminal does it, when so many shards have been begun; no further one is.
_INTERRUPTED = """
import itertools, os, runpy, signal, sys, time
from wdsfs.index import process_pool

begun, last, in_this_process, in_another = (
    itertools.count(1), int(sys.argv.pop()), process_pool._try, process_pool._Processes.call
)

def here(*arguments):
    if next(begun) == last:
        os.killpg(0, signal.SIGINT)
    return in_this_process(*arguments)

def elsewhere(processes, *arguments):
    number = next(begun)
    if number == last:
        os.killpg(0, signal.SIGINT)
    while number >= last and not processes._killed:
        time.sleep(0.01)
    return in_another(processes, *arguments)

process_pool.ALONE_BYTES = 0
process_pool._try, process_pool._Processes.call = here, elsewhere
runpy.run_module("wdsfs", run_name="__main__")
"""


def interrupted(program: Program, *arguments: str | Path) -> str:
    """What a command says that indexes SHARDS shards and is interrupted in the middle."""
    shard = program.write("000.tar", tars.tar(tars.A))
    for number in range(1, SHARDS):
        os.link(shard, program.home / f"{number:03d}.tar")
    words = ["-c", _INTERRUPTED, *map(str, arguments), str(INTERRUPTED)]
    done = run_python(program, *words, start_new_session=True, code=130)
    assert done.stderr.count("interrupted") == 1
    assert "Traceback" not in done.stderr
    return done.stderr


MANY = f"{{000..{SHARDS - 1:03d}}}.tar"


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_an_interrupt_leaves_a_valid_index(program: Program, jobs: str) -> None:
    """Work done so far is kept, and the next run continues there."""
    interrupted(program, "index", "--jobs", jobs, MANY)
    report = program.json("index", MANY)
    assert SHARDS - INTERRUPTED < report["rebuilt"] < SHARDS
    assert report["members"] == SHARDS
    assert program.json("index", MANY)["rebuilt"] == 0


# Ways in which an interrupt in the middle of an import would be lost, or come out as another exception.
_INTERRUPTS = """
import os, runpy, signal, sys, weakref
class Interrupt:
    def __set_name__(self, owner, name):
        os.kill(os.getpid(), signal.SIGINT)
def plain():
    os.kill(os.getpid(), signal.SIGINT)
def attribute():
    type("Owner", (), {"name": Interrupt()})
def callback():
    weakref.ref(type("Object", (), {})(), lambda _: os.kill(os.getpid(), signal.SIGINT))
class Interrupter:
    def find_spec(self, name, path, target=None):
        if modules and name == modules[0]:
            modules.pop()
            interrupt()
sys.meta_path.insert(0, Interrupter())
interrupt, modules = globals()[sys.argv.pop()], [sys.argv.pop()]
runpy.run_module("wdsfs", run_name="__main__")
"""


@pytest.mark.parametrize("way", ["plain", "attribute", "callback"])
@pytest.mark.parametrize(("module", "code", "text"), [
    ("wdsfs.cli.main", -signal.SIGINT, ""),
    ("click", -signal.SIGINT, ""),
    ("wdsfs.cli.look_commands", 130, r"wdsfs: interrupted.*\n"),
    ("wdsfs.tree.statistics", 130, r"wdsfs: interrupted.*\n"),
    ("numpy", 130, r"wdsfs: interrupted.*\n"),
])  # fmt: skip
def test_an_interrupt_of_an_import(shards: Program, module: str, code: int, text: str, way: str) -> None:
    """No traceback, whenever it comes: of what is imported at the start, and when a command needs it."""
    done = run_python(shards, "-c", _INTERRUPTS, "info", "s-0.tar", module, way, code=code)
    assert re.fullmatch(text, done.stderr), done  # it may come a moment later, when something is kept already


_LOST = """
import os, signal, weakref
from wdsfs.cli.process import interruptible
signal.signal(signal.SIGINT, signal.SIG_DFL)
try:
    with interruptible():
        weakref.ref(type("Object", (), {})(), lambda _: os.kill(os.getpid(), signal.SIGINT))
        while True:
            pass
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_that_python_drops_comes_again(program: Program) -> None:
    done = run_python(program, "-c", _LOST)
    assert (done.stdout, done.stderr) == ("interrupted\n", "")


def test_an_interrupted_mount(program: Program) -> None:
    need_fuse()
    interrupted(program, "mount", MANY, program.mountpoint)
    assert not program.registration(program.mountpoint).exists()
    assert os.listdir(program.mountpoint) == []


# --- check -------------------------------------------------------------------------------------------------


def test_check_has_a_line_for_each_finding(program: Program) -> None:
    shard = program.write("a.tar", tars.tar(tars.A, tars.B))
    done = program.run("check", shard)
    assert done.stdout == b""
    assert b"1 shard, 2 samples, 2 members: 0 findings, 0 notes" in done.stderr
    program.write(
        "a.tar", tars.tar(tars.A, tars.B, tars.member(b"a.jpg"), tars.member(b"d/", kind=tars.DIRECTORY))
    )
    split = 512 * (2 + 3)
    done = program.run("check", shard, code=1)
    assert f"{shard}:{split}: a: [split sample]".encode() in done.stdout
    assert b"[directory]" not in done.stdout
    assert b"2 notes (--notes shows them)" in done.stderr
    assert b"[directory]" in program.run("check", "--notes", "--jobs", "1", shard, code=1).stdout
    found = [json.loads(line) for line in lines(program.run("check", "--json", shard, code=1).stdout)]
    assert all(set(one) == {"shard", "kind", "offset", "member", "text"} for one in found)
    assert (found[0]["kind"], found[0]["offset"], found[0]["member"]) == ("split sample", split, "a")


# --- shards that cannot be had -----------------------------------------------------------------------------


def test_a_shard_that_cannot_be_read(user_program: Program) -> None:
    """It is named, and the others are not silently fewer."""
    program = user_program
    program.write("a.tar", tars.tar(tars.A))
    os.chmod(program.write("b.tar", tars.tar(tars.B)), 0)
    program.write("c.tar", tars.tar(tars.B))
    spec = "{a,b,c}.tar"
    done = program.run("ls", "-R", spec, code=3)
    assert lines(done.stdout) == [b"a/", b"a/a/", b"a/a/txt", b"b/", b"c/", b"c/b/", b"c/b/txt"]
    assert b"b.tar: Permission denied" in done.stderr
    assert b"Permission denied" in program.run("cat", spec, "b/b/txt", code=3).stderr
    report = json.loads(program.run("index", "--json", spec, code=3).stdout)
    assert report.items() >= {"shards": 3, "rebuilt": 0, "unreadable": 1}.items()
    assert b"[unreadable]" in program.run("check", spec, code=3).stdout


# --- status and doctor -------------------------------------------------------------------------------------


def test_status_without_mounts(user_program: Program) -> None:
    program = user_program
    assert program.run("status").stdout == b"no wdsfs mounts\n"
    assert "no mount of wdsfs is there" in program.refused("status", "--json", program.mountpoint, code=5)


def told_of(mounted: Mounted, out: bytes) -> str:
    """What `status` says of one mount; other tests have mounts, too."""
    blocks = re.split(r"\n(?! )", out.decode(errors="replace") + "\n")
    (block,) = [one for one in blocks if one.startswith(f"{mounted.path}: ")]
    return block


def test_status(shards: Program) -> None:
    with shards.mounted("--merge", "--names", "full", "s-{0,1}.tar") as mounted:
        assert (mounted.path / "a/a.txt").read_bytes() == b"aaa"
        (report,) = shards.json("status", mounted.path)
        expected = {"state": "running", "shards": 2, "indexed": 2, "samples": 5, "members": 7, "merge": True}
        expected |= {"layout": "samples", "names": "full", "specs": ["s-{0,1}.tar"], "pid": mounted.pid}
        assert report.items() >= expected.items()
        assert set(report) > {"open_files", "bytes_read", "damaged", "index", "failures", "notices", "started"}
        assert report["memory_bytes"] > 1 << 20
        assert report["uptime_seconds"] > 0
        moving = ("uptime_seconds", "memory_bytes", "requests", "processes")
        assert report in [{**one, **{key: report[key] for key in moving}} for one in shards.json("status")]
        block = told_of(mounted, shards.run("status").stdout)
        assert block.startswith(f"{mounted.path}: running, read-only")
        assert f"\n  shards   s-{{0,1}}.tar (in {shards.home})\n  layout   samples, full names, merged\n" in block
        detail = shards.run("status", mounted.path).stdout.decode()
        assert re.search(rf"^  process +{mounted.pid}$", detail, re.M)
        assert report["log"] in detail
        assert "2 shards (2 indexed), 5 samples, 7 members" in detail


def test_a_mount_of_a_part_of_a_dataset(prepared: Program) -> None:
    prepared.write("list.txt", b".\n")
    options = ["--split", "train", "--shard-id", "1", "--num-shards", "2"]
    with prepared.mounted(*options, "@list.txt") as mounted:
        mounted.expect_log(r"s-1\.tar: has 2 samples; the file that names it says 5")
        assert os.listdir(mounted.path) == ["s-1"]
        (report,) = prepared.json("status", mounted.path)
        assert (report["selection"], report["specs"]) == (options, ["@list.txt"])
        shown = rf"shards +--split train --shard-id 1 --num-shards 2 @list\.txt \(in {prepared.home}\)\n"
        assert re.search(shown, prepared.run("status", mounted.path).stdout.decode())


@pytest.mark.parametrize(("option", "mode"), [("rw", "read-write"), ("ro", "read-only")])
def test_status_of_a_mount_with_an_overlay(shards: Program, option: str, mode: str) -> None:
    with shards.mounted("--overlay", "edits", "-o", option, "s-{0,1}.tar") as mounted:
        overlay = f"{shards.home}/edits"
        assert mounted.status()["overlay"] == overlay
        for arguments in ([], [mounted.path]):
            told = told_of(mounted, shards.run("status", *arguments).stdout)
            assert re.search(rf"^{mounted.path}: running, {mode}.*(\n  .*)*\n  overlay +{overlay}\n", told + "\n")
            assert "stopped half-way" not in told
        journal = shards.write("edits/work/commit.json", b"{}")
        assert b"stopped half-way" in shards.run("status", mounted.path).stdout
        assert shards.json("status", mounted.path)[0]["unfinished_commit"] is True
        assert json.loads((mounted.path / ".wdsfs/status.json").read_text())["unfinished_commit"] is True
        journal.unlink()


def test_status_fits_a_terminal(shards: Program) -> None:
    """Nothing is cut within a word, and what has no room goes on in the next line."""
    columns = "80"
    specs = [shards.write(f"a-{number}.tar", tars.tar(tars.A)).name for number in range(30)]
    with shards.mounted(*specs) as mounted:
        shown = shards.on_terminal("status", mounted.path, env={"COLUMNS": columns}).decode().splitlines()
        whole = shards.run("status", mounted.path).stdout.decode()
        for line in shown:
            assert len(line) <= int(columns) or len(line.split()) <= 2, line  # a path that is longer
        words = [word for line in shown for word in line.split()]
        assert words[5 : words.index("layout")] == whole[: whole.index("\n  layout")].split()[5:]  # after the time
        assert len(shown) > len(whole.splitlines())


def test_root_sees_the_mounts_of_others(user_program: Program, tmp_path: Path) -> None:
    """As the kernel has them: nothing that they wrote themselves is read."""
    if os.geteuid():
        pytest.skip("only root sees them")
    user_program.write("a.tar", tars.tar(tars.A))
    root = InProcess(tmp_path)
    with user_program.mounted("a.tar") as mounted:
        registration = user_program.registration(mounted.path)
        true = registration.read_text()
        registration.write_text(json.dumps({**json.loads(true), "specs": ["\x1b[2Jlies"], "overlay": "/etc"}))
        told = root.run("status", mounted.path).stdout.decode()
        assert told.splitlines()[:2] == [f"{mounted.path}: mounted, read-only, by nobody", "  shards  a.tar"]
        assert "its daemon belongs to nobody" in told
        (report,) = root.json("status", mounted.path)
        assert report.items() >= {"user": "nobody", "state": "mounted", "specs": ["a.tar"], "mode": "ro"}.items()
        assert f"{mounted.path}: mounted" in root.run("status").stdout.decode(errors="replace")
        registration.write_text(true)


def test_mounts_of_root_that_a_user_may_read_are_shown(program: Program, user_program: Program) -> None:
    if os.geteuid():
        pytest.skip("only root makes them")
    program.write("a.tar", tars.tar(tars.A))
    with program.mounted("a.tar") as mounted:
        assert str(mounted.path) not in [report["mountpoint"] for report in user_program.json("status")]
    with program.mounted("-o", "allow_other", "a.tar") as mounted:
        reports = {report["mountpoint"]: report for report in user_program.json("status")}
        assert reports[str(mounted.path)].items() >= {"user": "root", "state": "mounted"}.items()
        assert f"{mounted.path}: mounted" in user_program.run("status").stdout.decode(errors="replace")
        user_program.run("umount", "--all")
        assert mounted.status()["state"] == "running"


def test_where_a_mount_in_the_foreground_logs(shards: Program) -> None:
    """systemd says what the journal is (systemd.exec(5))."""
    log = shards.home / "foreground.log"
    with shards.mounted("s-0.tar", foreground=True) as mounted:
        assert mounted.status()["log"] == str(log)
    found = log.stat()
    journal = {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}
    shards.environment |= journal
    with shards.mounted("s-0.tar", foreground=True) as mounted:
        assert mounted.status()["log"] == "journal"
        assert re.search(r"^  log +journal$", shards.run("status", mounted.path).stdout.decode(), re.M)


def test_status_of_one_mount_asks_no_other(shards: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may take seconds over an answer."""
    asked, report = [], FuseMount.report

    def note(mount: FuseMount) -> dict[str, Any]:
        asked.append(mount.mountpoint)
        return report(mount)

    monkeypatch.setattr(FuseMount, "report", note)
    with shards.mounted("s-0.tar", at=shards.directory("other")), shards.mounted("s-1.tar") as mounted:
        (report,) = shards.json("status", mounted.path)
    assert report["state"] == "running"
    assert asked == [str(mounted.path)]


def test_status_of_a_daemon_that_does_not_answer(shards: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mount_registry, "ANSWER_SECONDS", 0.05)
    # Without the mounts of tests that run at the same time: the time is too short for them.
    live_mounts = mount_search.live_mounts
    own = str(shards.mountpoint)
    monkeypatch.setattr(
        mount_search, "live_mounts", lambda: [one for one in live_mounts() if one.mountpoint == own]
    )
    with shards.mounted("s-0.tar") as mounted:
        os.kill(mounted.pid, signal.SIGSTOP)
        try:
            (report,) = shards.json("status", mounted.path)
            assert report["state"] == "not answering"
            assert b"not answering" in shards.run("status").stdout
            assert b"not answering" in shards.run("status", mounted.path).stdout
        finally:
            os.kill(mounted.pid, signal.SIGCONT)


def test_all_mounts_are_ended(user_program: Program) -> None:
    """Those of this user, the latest first, dead ones included; and nothing where there is none."""
    program = user_program
    program.write("a.tar", tars.tar(tars.A))
    other = program.directory("other")
    assert program.run("umount", "--all").stdout == b"no wdsfs mounts\n"
    with (
        program.mounted("a.tar", ends_itself=True) as one,
        program.mounted("a.tar", at=other, ends_itself=True) as two,
    ):
        assert program.run("umount", "--all").stdout == f"{two.path}\n{one.path}\n".encode()
    assert "name a MOUNTPOINT, or --all" in program.refused("umount", code=2)
    assert "--all takes no MOUNTPOINT" in program.refused("umount", "--all", other, code=2)


@pytest.mark.parametrize("option", ["-r", "-oro"])
def test_a_mount_that_is_read_only(shards: Program, option: str) -> None:
    """Without an overlay that is nothing new."""
    with shards.mounted(option, "--overlay", "edits", "s-0.tar") as mounted, fails(errno.EROFS):
        (mounted.path / "s-0/c/new").touch()
    with shards.mounted(option, "s-0.tar"):
        pass


def test_doctor(program: Program) -> None:
    done = program.run("doctor", "--json", program.mountpoint, code=None)
    findings = json.loads(done.stdout)
    assert all(set(one) == {"name", "level", "detail", "remedy"} for one in findings)
    assert done.returncode == (5 if any(one["level"] == "fail" for one in findings) else 0)
    text = program.run("doctor", "--index-dir", program.home / "index", code=None).stdout.decode()
    assert len(re.findall(r"^(ok|warn|fail) ", text, re.M)) >= len(findings) - 1
    assert program.run("doctor", program.home / "missing", code=5).stdout


# --- output that nobody takes ------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 30_000])
def test_a_pipe_that_is_closed(program: Program, count: int) -> None:
    """`wdsfs ls ... | head -1`: an end without a word, whether much or little was left to say."""
    program.write("a.tar", tars.tar(*(tars.header(b"%05d.x" % number) for number in range(count))))
    program.run("index", "a.tar")
    for words in ("ls -R a.tar", "cat a.tar a/00000/x", "info a.tar", "ls -l a.tar"):
        receiver, sender = os.pipe()
        os.close(receiver)
        try:
            done = program.run(*words.split(), code=None, stdout=sender)
        finally:
            os.close(sender)
        assert done.stderr == b""
        assert done.returncode in (0, 1, 141)


def test_a_disk_that_is_full(shards: Program) -> None:
    with open("/dev/full", "wb") as full:
        for arguments in (["ls", "s-0.tar"], ["cat", "s-0.tar", "s-0/d/b/jpg"], ["info", "--json", "s-0.tar"]):
            message = shards.refused(*arguments, code=1, stdout=full)
            assert f"the output cannot be written: {os.strerror(errno.ENOSPC)}" in message


def test_an_error_that_names_no_file_is_not_of_the_output(
    program: Program, shards: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limited(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(opening, "open_typed_set", limited)
    message = program.run("info", shards.home / "s-0.tar", code=1).stderr.decode()
    assert os.strerror(errno.EMFILE) in message
    assert "raise OSError" in message  # the line of the call that has failed
    assert "output" not in message


def test_a_bar_is_for_terminals(shards: Program) -> None:
    """Output into a file or a pipe has no control characters."""
    done = shards.run("index", "s-{0,1}.tar")
    assert done.stderr == b""
    for words in (["index", "s-{0,1}.tar"], ["--verbose", "info", "s-{0,1}.tar"], ["doctor"]):
        assert b"\x1b" not in shards.run(*words, code=None).stdout
    only_errors: dict[str, Any] = {"stdout": subprocess.DEVNULL, "env": {"TERM": "xterm", "COLUMNS": "100"}}
    for shard in ("s-0.tar", "s-1.tar"):
        os.utime(shards.home / shard)
    shown = shards.on_terminal("index", "s-{0,1}.tar", **only_errors).decode()
    assert re.search(r"indexing .*2/2.* shards", shown)
    os.utime(shards.home / "s-0.tar")
    assert shards.on_terminal("index", "--quiet", "s-{0,1}.tar", **only_errors) == b""


# --- what is said -------------------------------------------------------------------------------------------


# Wrong calls, and the words of the message that name what is wrong and the way out. s-0.tar and s-1.tar are there.
REFUSED = [
    (["mount", "{s-0,s-1}.tar"], 2, "is missing; name an empty directory: wdsfs mount '{s-0,s-1}.tar' MOUNTPOINT"),
    (["mount", "typo.tar"], 2, "MOUNTPOINT is missing"),
    (["mount", "."], 2, "MOUNTPOINT is missing"),  # a directory of shards
    (["mount", "mnt"], 2, "SHARDS are missing"),
    (["mount"], 2, "needs SHARDS and a MOUNTPOINT"),
    (["mount", "s-0.tar", "s-1.tar"], 2, "the MOUNTPOINT is missing: s-1.tar is a shard"),
    (["mount", "s-0.tar", "S-1.TAR"], 2, "the MOUNTPOINT is missing: S-1.TAR is a shard"),
    *((["mount", "mnt", spec], 2, f"the MOUNTPOINT comes last: wdsfs mount {shlex.quote(spec)} mnt")
      for spec in ("set", "set/s.tar", "set/{s,t}.tar")),
    (["mount", "-o", "ro,layout=files", "s-0.tar", "mnt"], 2,
     "wdsfs: -o layout=files: type --layout files instead; -o is for mount options"),
    (["mount", "-o", "ro,layot=files", "s-0.tar", "mnt"], 2,
     "wdsfs: -o layot=files: no such option; did you mean --layout?"),
    (["mount", "-o", "index_dri=/x", "s-0.tar", "mnt"], 2,
     "wdsfs: -o index_dri=/x: no such option; did you mean --index-dir?"),
    (["mount", "-o", "allow_othr", "s-0.tar", "mnt"], 2, "; did you mean allow_other?"),
    *((command, 3, "wdsfs pack photos -o") for command in (["mount", "photos", "mnt"], ["ls", "photos"])),
    (["ls", "flat"], 3, "wdsfs pack flat -o"),
    *((["ls", "s-0.tar", typo], 3, f"no such shard: '{typo}'; the tree has no such path")
      for typo in ("dir/typo.tar", "typo.tar", "b-{0..3}.tar.gz")),
    (["ls", "s-0.tar", "s-0/typo"], 6, "no 'typo' in"),
    (["ls", "s-0.tar", "s-1.tar", "x"], 6, "wdsfs: no 'x' at the top of the tree; there is 's-0', 's-1'"),
    (["ls", "--merge", "s-0.tar", "s-1.tar", "x/y"], 6,
     "wdsfs: no 'x' at the top of the merged tree; there is 'd', 'c', 'a' ..."),
    (["ls", "--merge", "s-0.tar", "d/x"], 6, "wdsfs: no 'x' in the directory 'd' of the merged tree"),
    *((["cat", "s-0.tar", path], 6, "directory") for path in ("s-0", "s-0/d/b", "")),
    (["cat", "s-0.tar"], 2, "PATH"),
    *((["info", "--", spec], 2, "") for spec in ("", "ftp://example.org/a.tar", "s-{0..1.tar")),
    (["info", "none-*.tar"], 3, "none-*.tar"),
    *(([*command.split(), "s-{0..2}.tar", *mountpoint], 3, "s-2.tar")
      for command, *mountpoint in (["ls"], ["info"], ["check"], ["index"], ["mount", "mnt"])),
]  # fmt: skip


@pytest.mark.parametrize(("words", "code", "text"), REFUSED, ids=[shlex.join(words) for words, *_ in REFUSED])
def test_a_wrong_call_is_told_what_is_wrong(shards: Program, words: list[str], code: int, text: str) -> None:
    for name in ("set/s.tar", "set/t.tar", "S-1.TAR", "photos/cat/a.jpg", "flat/a.jpg"):
        shards.write(name, SAMPLES)
    assert text in shards.refused(*words, code=code)


@pytest.mark.parametrize("name", ["notes/README.md", "above/shards/s.tar"])
def test_a_directory_that_is_not_for_pack(program: Program, name: str) -> None:
    program.write(name, SAMPLES)
    assert "pack" not in program.refused("ls", name.partition("/")[0], code=3)


@pytest.mark.parametrize("name", ["s.tar", "s.tar.gz"])
@pytest.mark.parametrize("ready", [False, True], ids=["a new directory", "an empty directory"])
def test_a_single_shard_needs_no_mount_point(program: Program, name: str, ready: bool) -> None:
    """A directory that was there before stays."""
    need_fuse()
    program.write(name, gzip.compress(SAMPLES) if name.endswith("gz") else SAMPLES)
    place = program.home / "s"
    if ready:
        place.mkdir()
    assert f"umount {place}" in program.run("mount", name).stderr.decode()
    try:
        assert os.listdir(place) == ["s"]
        assert "mounted there already" in program.refused("mount", name, code=5)
    finally:
        program.run("umount", place)
    assert place.exists() == ready


def test_a_directory_that_was_made_for_a_mount_goes_where_it_fails(program: Program) -> None:
    program.write("s.tar", b"no tar")
    assert "s.tar" in program.refused("mount", "s.tar", code=3)
    assert not (program.home / "s").exists()
    (program.home / "s").write_bytes(b"a file")
    assert "not a directory" in program.refused("mount", "s.tar", code=5)


def test_what_cannot_be_unpacked_is_said_once(program: Program) -> None:
    with gzip.open(program.home / "bomb.tar.gz", "wb", compresslevel=1) as file:
        file.write(tars.member(b"a.bin", bytes(100 << 20)) + tars.END)
    said = program.refused("ls", "--unpack", "never", "bomb.tar.gz", "bomb/a", code=3)
    assert said.count("200 times") == 1
    assert "200 times" in program.refused("cat", "--unpack", "never", "bomb.tar.gz", "bomb/a/bin", code=3)
