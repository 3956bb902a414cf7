"""From what mount(8) passes to what `wdsfs mount` takes. What it passes was seen with util-linux 2.38."""

import re
import sys
import types
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import sets
from tests.conftest import Program
from wdsfs.cli import mount_helper
from wdsfs.cli.mount_commands import mount
from wdsfs.cli.mount_helper import own_options, translate
from wdsfs.errors import UsageError
from wdsfs.mount.mount_options import split_options

SPEC = "/d/t-{0..9}.tar"


def arguments(*argv: str) -> list[str]:
    return translate(argv).arguments


def options(option: str, spec: str = SPEC) -> list[str]:
    """Return what `-o option` becomes, without the arguments of every call."""
    head, *found, dashes, given_spec, mountpoint = arguments(spec, "/mnt", "-o", option)
    assert (head, dashes, given_spec, mountpoint) == ("mount", "--", spec, "/mnt")
    return found


def test_a_line_with_everything() -> None:
    """The options in the order in which mount(8) passed them on."""
    passed = "ro,relatime,nosuid,nodev,layout=files,index-dir=/tmp/i,uid=1000,allow_other,user,nofail,_netdev,exec"
    own = ["--layout=files", "--index-dir=/tmp/i"]
    through = ["-o", "ro,nosuid,nodev,uid=1000,allow_other,exec,fsname=/d x/t.tar"]
    found = arguments("/d x/t.tar", "/mnt/t", "-s", "-n", "-v", "-o", passed)
    assert found == ["mount", *own, *through, "--", "/d x/t.tar", "/mnt/t"]
    assert arguments(SPEC, "/mnt/t", "-o", "rw") == ["mount", "-o", f"fsname={SPEC}", "--", SPEC, "/mnt/t"]


NOT_FOR_US = (
    *("auto", "noauto", "defaults", "user", "users", "user=ann", "owner", "group", "nofail", "_netdev"),
    *("x-systemd.automount", "x-gvfs-show", "X-mount.mkdir", "comment=a line", "uhelper=udisks2"),
    *("rw", "relatime", "noatime", "lazytime", ""),
)
# What an option becomes: our own ones, and the value of -o.
BECOMES = {
    **{f"{option},ro": ["-o", f"ro,fsname={SPEC}"] for option in NOT_FOR_US},
    **{
        option: ["-o", f"{option},fsname={SPEC}"]
        for option in ("ro", "nosuid", "noexec", "dev", "allow_other", "uid=7", "umask=022", "odd=1")
    },
    **{
        option: [f"--{option}", "-o", f"fsname={SPEC}"]
        for option in (
            *("layout=files", "names=full", "merge", "lazy", "jobs=4", "split=val", "shard-id=1", "follow"),
            *("follow=5", "index-dir=/var/cache/x"),
        )
    },
    "num_shards=4": ["--num-shards=4", "-o", f"fsname={SPEC}"],
    "index_dir=/var/cache/x": ["--index-dir=/var/cache/x", "-o", f"fsname={SPEC}"],
    # A comma in quotes, or behind a backslash, stays in its option; our own options lose the marks of quoting.
    "index-dir=/a\\,b": ["--index-dir=/a,b", "-o", f"fsname={SPEC}"],
    'context="a:b,c",ro': ["-o", rf'context="a:b\,c",ro,fsname={SPEC}'],
    r"fsname=a\,b,ro": ["-o", r"fsname=a\,b,ro"],
    "ro,fsname=mine": ["-o", "ro,fsname=mine"],
    **{
        f"keys={quoted},ro": ['--keys=a,b"c', "-o", f"ro,fsname={SPEC}"]
        for quoted in (r"a\,b\"c", r'"a,b"\"c', r'a","b\"c')
    },
    r'columns=a\{b\\"a,b"\"c': [r'--columns=a\{b\\a,b"c', "-o", f"fsname={SPEC}"],
}
# How a source is shown in the mount table: as fstab has it, for `mount -a` compares them; without a secret.
SHOWN_AS: dict[str, list[str]] = {
    "/d/{a,b}.tar::/e/*.tar": [r"fsname=/d/{a\,b}.tar::/e/*.tar"],
    "back\\slash.tar": ["fsname=back\\\\slash.tar"],
    'a"b.tar': [r"fsname=a\"b.tar"],
    "https://h/x.tar": ["fsname=https://h/x.tar"],
    "https://h/x.tar?sig=deadbeef": [],
    "https://me:deadbeef@h/x.tar": [],
    # A source that no option can carry.
    **{spec: [] for spec in ("/dätä/x.tar", "/d/\udcff.tar", "/d/\t.tar", "/d/" + "x" * 2000)},
}


@pytest.mark.parametrize("option", BECOMES)
def test_an_option(option: str) -> None:
    assert options(option) == BECOMES[option]


@pytest.mark.parametrize("spec", SHOWN_AS)
def test_the_source_in_the_mount_table(spec: str) -> None:
    assert options("ro", spec) == ["-o", ",".join(["ro", *SHOWN_AS[spec]])]
    assert options("rw", "/d/\t.tar") == []


def test_options_may_come_in_several_pieces_and_places() -> None:
    assert arguments("-o", "ro", SPEC, "-sv", "/mnt", "-o", "merge,nodev", "-t", "wdsfs", "-N", "/ns") == [
        *("mount", "--merge", "-o", f"ro,nodev,fsname={SPEC}", "--", SPEC, "/mnt")
    ]
    assert arguments(SPEC, "/mnt", "-r")[1:3] == ["-o", f"ro,fsname={SPEC}"]
    assert arguments("-o", "ro", "--", "-x.tar", "/mnt") == [
        *("mount", "-o", "ro,fsname=-x.tar", "--", "-x.tar", "/mnt")
    ]
    found = arguments("none", "/mnt", "-o", "new,overlay=/edits")  # a set that begins empty has no shards
    assert found == ["mount", "--new", "--overlay=/edits", "-o", "fsname=none", "--", "/mnt"]


@pytest.mark.parametrize(("given", "single"), [
    (["ro,,nodev", "uid=1", ""], ["ro", "nodev", "uid=1"]),
    ([r"fsname=my\,layout=x,ro"], [r"fsname=my\,layout=x", "ro"]),
    ([r"fsname=my\\,ro"], [r"fsname=my\\", "ro"]),
    (['context="a:b,c",ro'], [r'context="a:b\,c"', "ro"]),
    ([r'fsname=a\"b,ro'], [r'fsname=a\"b', "ro"]),
    (["ro,fsname=a\\"], ["ro", "fsname=a\\"]),
])  # fmt: skip
def test_the_single_options(given: list[str], single: list[str]) -> None:
    """As for libfuse and mount(8); what comes out gives the same when it is joined and read again."""
    assert split_options(given) == single
    assert split_options(single) == single
    with pytest.raises(UsageError, match=r'fsname=a"b.*: a double quote has no end'):
        split_options(['uid=1,fsname=a"b,ro'])


def test_a_name_of_our_own_in_a_value(program: Program) -> None:
    """It is no option of its own, which `-o` does not take."""
    refused = program.refused("mount", "-o", r"fsname=my\,layout=x", "missing.tar", program.mountpoint, code=3)
    assert "missing.tar" in refused
    assert "instead; -o is for mount options" in program.refused(
        "mount", "-o", "layout=x", "a.tar", program.mountpoint, code=2
    )


@given(st.text("ab,\\{}.:/ ", min_size=1, max_size=20))
def test_any_source_is_one_option(spec: str) -> None:
    """Taken apart as libfuse does: a backslash keeps the next character."""
    [_, option] = options("ro", spec)
    apart, rest = [""], iter(option)
    for character in rest:
        if character == ",":
            apart.append("")
        else:
            apart[-1] += next(rest) if character == "\\" else character
    assert apart == ["ro", f"fsname={spec}"]


# -- the program -------------------------------------------------------------------------------------------


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A command line in the place of the real one: what it was called with."""
    calls: list[list[str]] = []

    def main(arguments: list[str], prog_name: str) -> None:
        assert prog_name == "wdsfs"
        calls.append(arguments)
        sys.exit(5)

    cli = types.ModuleType("wdsfs.cli.main")
    cli.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wdsfs.cli.main", cli)
    monkeypatch.setattr("wdsfs.cli.main", cli, raising=False)
    return calls


def test_the_program_calls_the_command_line(
    called: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mount.wdsfs", SPEC, "/mnt", "-o", "ro"])
    assert mount_helper.main() == mount_helper.MOUNT_FAILURE
    assert called == [["mount", "-o", f"ro,fsname={SPEC}", "--", SPEC, "/mnt"]]
    # `mount -f` only checks.
    assert mount_helper.main([SPEC, "/mnt", "-f", "-o", "rw"]) == 0
    assert mount_helper.main([SPEC, "/mnt", "-fv", "-o", "layout="]) == mount_helper.WRONG_CALL
    assert mount_helper.main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: mount.wdsfs SHARDS")
    assert len(called) == 1


# -- what the documentation says -----------------------------------------------------------------------------

DEPLOYMENT = (Path(__file__).parent.parent.parent / "docs" / "how-to" / "boot.md").read_text()
LINES = re.findall(r"^(\S+)\s+(/\S+)\s+wdsfs\s+(\S+)\s+0\s+0$", DEPLOYMENT, re.MULTILINE)


@pytest.mark.parametrize(("spec", "mountpoint", "option"), LINES)
def test_the_lines_in_the_documentation_are_understood(spec: str, mountpoint: str, option: str) -> None:
    call = translate([spec.replace("\\040", " "), mountpoint, "-o", option])
    passed = call.arguments[call.arguments.index("-o") + 1].split(",")
    assert {name.partition("=")[0] for name in passed} == {"ro", "allow_other", "fsname"}


def test_every_option_of_mount_can_be_written_in_fstab() -> None:
    """Except those that are for a user at a terminal; docs/how-to/boot.md has a list of them."""
    known = {name.removeprefix("--") for one in mount.params for name in one.opts if name.startswith("--")}
    assert known - {"foreground", "quiet", "read-only"} == {*own_options()}  # the last is "ro" there
    offered = [name for name, option in own_options().items() if not option.hidden]
    assert not [name for name in offered if not re.search(rf"`{name}=?`", DEPLOYMENT)]
    assert len(LINES) == 4


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "name shards and a mount point"),
        ([SPEC], "name shards and a mount point"),
        ([SPEC, "/mnt", "/more"], "name shards and a mount point"),
        ([SPEC, "/mnt", "-z"], "-z"),
        ([SPEC, "/mnt", "-o"], "-o"),
        ([SPEC, "/mnt", "-o", "remount,ro"], "cannot remount"),
        ([SPEC, "/mnt", "-o", "layout"], "layout needs a value"),
        ([SPEC, "/mnt", "-o", "jobs="], "jobs needs a value"),
        ([SPEC, "/mnt", "-o", "merge=yes"], "merge takes no value"),
        ([SPEC, "/mnt", "-o", "ro,layot=files"], "-o layot=files: no such option; did you mean layout?\n"),
        ([SPEC, "/mnt", "-o", "ro,colums=jpg"], "-o colums=jpg: no such option; did you mean columns?\n"),
        ([SPEC, "/mnt", "-o", "ro,index_dri=/x"], "-o index_dri=/x: no such option; did you mean index-dir?\n"),
        ([SPEC, "/mnt", "-o", "ro,allow_othr"], "-o allow_othr: no such option; did you mean allow_other?\n"),
    ],
)
def test_wrong_arguments(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert mount_helper.main(argv) == mount_helper.WRONG_CALL
    said = capsys.readouterr().err
    assert said.startswith("mount.wdsfs: ")
    assert message in said


@pytest.mark.parametrize(
    ("words", "way"),
    [
        (("pipe:touch PWNED",), "allow-pipe"),
        (("p{i,i}pe:touch PWNED",), "at the beginning"),
        (("x.tar::p{i,i}pe:touch PWNED",), "at the beginning"),
        (("${HIDDEN}",), "at the beginning"),
        (("x.tar", "-o", "join=p{i..i}pe:touch PWNED"), "at the beginning"),
        (("x.tar", "-o", "associate=pipe:touch PWNED;: .csv"), "allow-pipe"),
        (("x.tar", "-o", "engine=auto,join=pipe:touch PWNED"), "allow-pipe"),
    ],
)
def test_a_command_is_run_only_if_that_is_allowed(
    program: Program,
    words: tuple[str, ...],
    way: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    program.write("x.tar", sets.content(0))
    monkeypatch.chdir(program.home)
    for name, value in {**program.environment, "WDS_HIDDEN": "pipe:touch PWNED"}.items():
        monkeypatch.setenv(name, value)
    spec, *rest = words
    assert mount_helper.main([spec, str(program.mountpoint), *rest]) == mount_helper.WRONG_CALL
    assert way in capfd.readouterr().err
    assert not (program.home / "PWNED").exists()
    assert "--allow-pipe" in options("ro,allow_pipe", "pipe:cat x.tar")
