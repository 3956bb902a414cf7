"""Specs that are commands, or the standard input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import PATIENCE
from wdsfs.door.shard_door import DOOR
from wdsfs.errors import MissingShard, ShardError, SpecError, UsageError
from wdsfs.spec import objects
from wdsfs.spec.existence import names_a_shard
from wdsfs.spec.expand import expand, expand_again
from wdsfs.spec.spec_words import settled
from wdsfs.tree.label_files import label_files, lasting_label

TAR = b"what is in a tar"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("WDSFS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("WDSFS_ALLOW_PIPE", raising=False)
    (tmp_path / "x.tar").write_bytes(TAR)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    DOOR.close()


def read(path: bytes) -> bytes:
    shard = DOOR.open_shard(path)
    assert not isinstance(shard, int)
    return shard.pread(1000, 0)


def test_a_command_is_a_shard_and_run_once(here: Path) -> None:
    """Also when it is looked at again, as all are from time to time."""
    [shard] = expand(["pipe:echo >> runs; cat x.tar"])
    assert shard.name == b"x"
    assert read(shard.path) == TAR
    DOOR.look(shard.path)
    objects.modes([os.fsdecode(shard.path)])
    DOOR.remote.stat([shard.path])
    assert (here / "runs").read_text() == "\n"


def test_braces_variables_and_lists_of_commands(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_TOOL", "cat")
    for number in range(3):
        (here / f"s-{number}.tar").write_bytes(b"%d" % number)
    found = expand(["pipe:${TOOL} s-{0..1}.tar::pipe:cat s-2.tar", "x.tar"])
    assert [shard.name for shard in found] == [b"s-0", b"s-1", b"s-2", b"x"]
    assert [read(shard.path) for shard in found[:3]] == [b"0", b"1", b"2"]


def test_names_of_outputs(here: Path) -> None:
    found = expand(["pipe:echo a", "pipe:echo b", "pipe:cat x.tar", "pipe:cat ./x.tar", "pipe:echo c"])
    names = [shard.name for shard in found]
    assert [names[0], names[1], names[4]] == [b"pipe", b"pipe~2", b"pipe~3"]
    assert all(name.startswith(b"pipe:cat-") and name.endswith(b"--x") for name in names[2:4])
    [shard] = expand(["pipe:curl -H 'Authorization: geheim' https://h/x.tar?sig=verborgen || cat x.tar"])
    assert shard.path.startswith(b"pipe:curl-")
    assert shard.path.endswith(b"/x.tar")
    assert len(shard.path) < 30


@pytest.mark.parametrize(
    "spec",
    ["pipe:curl geheim ${NO_SUCH}", "pipe:curl geheim::", "pipe:curl geheim {1..99999999}", "@pipe:curl geheim"],
)
def test_no_message_shows_a_command(spec: str) -> None:
    with pytest.raises(SpecError) as raised:
        expand([spec])
    assert "geheim" not in str(raised.value)


# File names that a shell's `*.tar` yields, with what they mean where no such file is.
ODD_NAMES = [
    "pipe:touch PWNED;cat x.tar;: .tar",
    "p{i,i}pe:touch PWNED;: .tar",
    "x.tar::pipe:touch PWNED;: .tar",
    "file:pipe:touch PWNED;: .tar",
    "@list.tar",
    "-",
    "http:x.tar",
    "{x,y}.tar",
    "${NOT_SET}.tar",
    "x[*].tar",
    "~x.tar",
    "back\\{slash}.tar",
]


@pytest.fixture
def odd(here: Path) -> Path:
    """A directory whose author has chosen the names."""
    (here / "list.tar").write_text("pipe:touch PWNED;cat x.tar\n")
    (here / "odd").mkdir()
    for name in ODD_NAMES:
        (here / "odd" / name).write_bytes(name.encode())
    return here / "odd"


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_word_that_names_an_existing_path_is_that_path(
    odd: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(odd)
    [shard] = expand([name])
    assert shard.path == os.fsencode(odd / name)
    assert expand([shard.path]) == [shard]
    Path("words.txt").write_text(f"{name}\n")
    assert expand(["@words.txt"]) == [shard]
    assert [one.path for one in expand_again([settled(name)])] == [shard.path]

    # It stays that path when it is gone: a mount that looks at its SHARDS again takes it for no command, no list.
    word = settled(name)
    (odd / name).unlink()
    monkeypatch.chdir(odd.parent)
    with pytest.raises(MissingShard):
        expand_again([word])
    (odd / name).write_bytes(TAR)
    assert [shard.path for shard in expand_again([word])] == [os.fsencode(odd / name)]
    assert not list(odd.parent.rglob("PWNED"))


@pytest.mark.parametrize("spec", ["*", "**/*", ".", "../odd/*"])
def test_what_a_glob_or_a_directory_finds_is_a_path(odd: Path, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(odd)
    names = [name for name in ODD_NAMES if spec != "." or name.endswith(".tar")]
    found = expand([spec])
    assert sorted(shard.path for shard in found) == sorted(os.fsencode(odd / name) for name in names)
    assert not list(odd.parent.rglob("PWNED"))


def test_a_directory_of_such_a_name_is_a_directory(here: Path) -> None:
    (here / "pipe:touch PWNED").mkdir()
    (here / "pipe:touch PWNED" / "x.tar").write_bytes(TAR)
    [shard] = expand(["pipe:touch PWNED"])
    assert shard.path == os.fsencode(here / "pipe:touch PWNED" / "x.tar")
    assert expand(["pipe*"]) == [shard]
    assert expand(["pipe*/x.tar"]) == [shard]


def test_the_path_of_a_file_url_is_no_command(here: Path) -> None:
    """Neither on the command line nor in a file, where a command would be refused."""
    spec = "file:pipe:touch PWNED;cat x.tar"
    (here / "list.txt").write_text(spec)
    shardlist = [{"url": spec, "nsamples": 1}]
    (here / "wids.json").write_text(json.dumps({"wids_version": 1, "shardlist": shardlist}))
    for words in (spec, "@list.txt", "wids.json"):
        with pytest.raises(MissingShard):
            expand([words])
    assert not (here / "PWNED").exists()


def test_a_label_file_of_such_a_name_is_a_file(here: Path) -> None:
    name = "pipe:touch PWNED;: .csv"
    (here / name).write_text("key,label\n")
    assert label_files(name)[0].path == os.fsencode(here / name)
    text = lasting_label(name)
    (here / name).unlink()
    with pytest.raises(UsageError, match="no such file"):
        label_files(text)
    assert not (here / "PWNED").exists()


@pytest.mark.parametrize("spec", ["{pi,pi}pe:touch run", "{pipe:,b}touch run", "${PIPE}", "x.tar::${PIPE}"])
@pytest.mark.parametrize("is_list", [False, True])
def test_braces_and_variables_make_no_command(
    here: Path, spec: str, is_list: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WDS_PIPE", "pipe:touch run")
    monkeypatch.setenv("WDSFS_ALLOW_PIPE", objects.ALWAYS)
    with pytest.raises(SpecError, match="write pipe: itself at the beginning"):
        expand([written(here, "list", spec) if is_list else spec])
    assert not (here / "run").exists()


@pytest.mark.parametrize(
    ("fields", "is_run"),
    [
        ({"datasets": [{"shards": ["{pi,pi}pe:cat x.tar"]}]}, False),
        ({"datasets": [{"shards": ["${PIPE}"]}]}, False),
        ({"prefix": "$PIPE", "datasets": [{"shards": [" x.tar"]}]}, False),
        ({"prefix": "pipe:cat ", "datasets": [{"shards": ["x.tar"]}]}, True),
        ({"datasets": [{"buckets": "pipe:cat .", "shards": ["x.tar"]}]}, True),
    ],
)
def test_braces_and_variables_in_yaml_make_no_command(
    here: Path, fields: dict[str, object], is_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPE", "pipe:cat x.tar")
    monkeypatch.setenv("WDSFS_ALLOW_PIPE", objects.ALWAYS)
    (here / "x.yaml").write_text(json.dumps(fields))
    if is_run:
        [shard] = expand(["x.yaml"])
        assert read(shard.path) == TAR
        return
    with pytest.raises(SpecError, match=r"x\.yaml.*write pipe: itself at the beginning"):
        expand(["x.yaml"])


@pytest.mark.parametrize("spec", ["pipe:cat x.tar", "x.tar::pipe:cat x.tar"])
def test_no_command_is_run_where_none_is_allowed(here: Path, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by `mount.wdsfs`, whose words may come from a line in fstab."""
    monkeypatch.setenv("WDSFS_ALLOW_PIPE", objects.NEVER)
    with pytest.raises(SpecError, match="allow-pipe"):
        expand([spec])
    with pytest.raises(SpecError, match="allow-pipe"):
        label_files("pipe:cat x.csv")


def test_what_is_shown_is_no_command(here: Path) -> None:
    """Another process that has the path only does not run what it looks like; nor does a question what it is."""
    assert names_a_shard("pipe:touch run")
    assert names_a_shard("-")
    assert names_a_shard("https://host/a.tar")
    assert not (here / "run").exists()
    path = b"pipe:touch-0123abcd/run"
    with pytest.raises(ShardError, match="only the process that was given its command can run it"):
        DOOR.open_shard(path)
    assert objects.gone([path]) == []


# --- files that name them ----------------------------------------------------------------------------------


def written(here: Path, kind: str, spec: str) -> str:
    """SHARDS that lead to a file which names this."""
    if kind == "list":
        (here / "l.txt").write_text(spec + "\n")
        return "@l.txt"
    if kind == "wids":
        (here / "x.json").write_text(json.dumps({"wids_version": 1, "shardlist": [{"url": spec, "nsamples": 1}]}))
        return "x.json"
    if kind == "yaml":
        (here / "x.yaml").write_text(json.dumps({"datasets": [{"shards": [spec]}]}))
        return "x.yaml"
    meta = here / "set" / ".nv-meta"
    meta.mkdir(parents=True, exist_ok=True)
    (meta / ".info.json").write_text(json.dumps({"shard_counts": {spec: 1}}))
    return "set"


KINDS = ["list", "wids", "yaml", "energon"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_runs_commands_only_if_it_may(here: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for spec in ("pipe:touch run; cat x.tar", "-"):
        with pytest.raises(SpecError, match="--allow-pipe"):
            expand([written(here, kind, spec)])
    assert not (here / "run").exists()
    monkeypatch.setenv("WDSFS_ALLOW_PIPE", "1")
    [shard] = expand([written(here, kind, f"pipe:cat {here}/x.tar")])
    assert read(shard.path) == TAR


@pytest.mark.parametrize("hidden", ["a.tar::pipe:touch run", "{pipe:,b}touch run", "${RUN}touch run", "@m.txt"])
def test_a_list_cannot_hide_a_command(here: Path, hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_RUN", "pipe:")
    (here / "m.txt").write_text("pipe:touch run\n")
    with pytest.raises(SpecError, match="--allow-pipe"):
        expand([written(here, "list", hidden)])
    assert not (here / "run").exists()


# --- the standard input ------------------------------------------------------------------------------------

_EXPAND = """
import sys
from wdsfs.door.shard_door import DOOR
from wdsfs.spec.expand import expand
for shard in expand(sys.argv[1:]):
    print(shard.path.decode(), shard.name.decode(), len(DOOR.open_shard(shard.path).pread(1 << 30, 0)))
"""


def expanded(content: bytes, *specs: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", _EXPAND, *specs]
    return subprocess.run(command, input=content, capture_output=True, check=False, timeout=PATIENCE)


def test_the_standard_input_is_a_shard() -> None:
    first, again, other = (expanded(content, "-") for content in (TAR * 100_000, TAR * 100_000, TAR))
    path, name, size = first.stdout.decode().split()
    assert (name, size) == ("stdin", str(len(TAR) * 100_000))
    assert again.stdout == first.stdout
    assert other.stdout.decode().split()[0] != path


@pytest.mark.parametrize(
    ("content", "specs", "message"),
    [
        (TAR, ["-", "-"], b"is named twice"),
        (b"", ["-"], b"it has to be a shard"),
        (b"x.tar\n", ["@-", "-"], b"it has to be a shard"),  # it was read already, for a list
    ],
)
def test_what_the_standard_input_cannot_be(content: bytes, specs: list[str], message: bytes) -> None:
    assert message in expanded(content, *specs).stderr
