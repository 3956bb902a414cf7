"""Files that name shards: lists, wids indexes, webdataset's YAML, prepared Energon datasets; and hostile ones."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import string
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from webdataset import shardlists

from tests.conftest import descriptors
from tests.spec.test_expand import found, here, names_of, refused, touch  # noqa: F401  # here: a fixture
from tests.tar.test_scan import count_calls
from wdsfs import source
from wdsfs.errors import MissingShard, SpecError, UnreadableShard, WdsfsError
from wdsfs.shards import Shard
from wdsfs.spec import located, spec_words
from wdsfs.spec.expand import Slice, expand, refuse_left_out, split_path

pytestmark = pytest.mark.usefixtures("here")


def write(path: str, content: str | bytes | dict[str, Any]) -> None:
    if isinstance(content, dict):
        content = json.dumps(content)
    os.makedirs(os.path.dirname(path) or os.curdir, exist_ok=True)
    Path(path).write_bytes(content if isinstance(content, bytes) else os.fsencode(content))


def listed(*specs: str, **selection: Any) -> list[str]:
    return [os.path.relpath(os.fsdecode(shard.path)) for shard in expand(specs, **selection)]


def error_of(*specs: str, **selection: Any) -> str:
    with pytest.raises(WdsfsError) as caught:
        expand(specs, **selection)
    return str(caught.value)


# -- variables ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["${A}", "x${A}", "${A}${A}${A}${A}${A}${A}${A}${A}${A}${A}"])
def test_variables_without_end(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("WDS_A", value)
    assert "'${A}.tar' refer to each other without end" in refused(SpecError, "${A}.tar")


VALUES = {"A": "x", "B": "{1..3}", "C": "${A}-${B}", "D": "${C}::y", "E": "", "É": "z"}
piece = st.sampled_from([*(f"${{{name}}}" for name in VALUES), "$A", "${", "{1,2}", "a", "::", ".", "/b", "}"])


@settings(max_examples=200)
@given(st.lists(piece, min_size=1, max_size=6).map("".join))
def test_words_are_those_of_the_webdataset_library(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in VALUES.items():
            patch.setenv(f"WDS_{name}", value)
        try:
            expected = shardlists.expand_urls(text)
        except (ValueError, AssertionError):  # braces, and `${${A}}`
            expected = []
        if not all(expected) or not expected:
            with pytest.raises(SpecError):
                list(spec_words.expand_words([text]))
        else:
            assert [word.path for word in spec_words.expand_words([text])] == expected


# -- lists -------------------------------------------------------------------------------------------------


def test_a_list_has_a_spec_on_each_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_X", "x")
    touch(*(f"sets/{name}.tar" for name in "abcx"), "sets/d/1.tar", "sets/d/2.tar", "top.tar", "sets/#e.tar")
    write(
        "sets/train.txt",
        b"\xef\xbb\xbf# the first half\r\nc.tar\r\n\n  {b,a}.tar\t\n../top.tar\nd\n${X}.tar::./#e.tar\n# end",
    )
    expected = [f"sets/{name}.tar" for name in ("c", "b", "a", "../top", "d/1", "d/2", "x", "#e")]
    expected[3] = "top.tar"
    assert found("@sets/train.txt") == expected
    assert found(f"@{os.getcwd()}/sets/train.txt") == expected
    os.chdir("sets")
    assert [os.path.normpath(f"sets/{path}") for path in found("@train.txt")] == expected


def test_a_list_has_any_bytes_in_its_names() -> None:
    touch(b"s[1]/\xff\xfe {x}.tar", b"s[1]/\xc3\xa9.tar", b"s[1]/n.tar", b"s1/n.tar")
    write("s[1]/l.txt", b"\xff\xfe {x}.tar\n\xc3\xa9.tar\nn*.tar\n")
    assert [shard.path for shard in expand(["@s[1]/l.txt"])] == [
        os.path.join(os.getcwdb(), b"s[1]", name) for name in (b"\xff\xfe {x}.tar", b"\xc3\xa9.tar", b"n.tar")
    ]


def test_lists_name_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    touch("a/1.tar", "a/b/2.tar", "3.tar")
    write("all.txt", "@a/some.txt\n3.tar")
    write("a/some.txt", "1.tar\n@b/more-{0..0}.txt\n")
    write("a/b/more-0.txt", "2.tar")
    assert found("@all.txt") == ["a/1.tar", "a/b/2.tar", "3.tar"]
    monkeypatch.setenv("HOME", os.path.abspath("a"))
    assert found("@~/some.txt") == ["a/1.tar", "a/b/2.tar"]


def test_a_list_comes_from_standard_input_too() -> None:
    touch("a.tar", "b.tar")
    receiver, sender = os.pipe()
    os.write(sender, b"b.tar\na.tar\n")
    os.close(sender)
    kept = os.dup(0)
    os.dup2(receiver, 0)
    os.close(receiver)
    try:
        assert found("@-") == ["b.tar", "a.tar"]
        assert "'-' names no shards" in error_of("@-")  # it can be read once
    finally:
        os.dup2(kept, 0)
        os.close(kept)


def test_a_pipe_is_a_list_if_a_program_writes_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    touch("a.tar")
    receiver, sender = os.pipe()
    os.write(sender, b"%b/a.tar\n" % os.getcwdb())
    os.close(sender)
    assert found(f"@/dev/fd/{receiver}") == ["a.tar"]
    os.close(receiver)
    os.mkfifo("l")
    with subprocess.Popen(["/bin/sh", "-c", "echo a.tar >l"]):
        assert [shard.name for shard in expand(["@l"])] == [b"a"]
    monkeypatch.setattr(source, "WRITER_SECONDS", 0.01)
    assert "'l' cannot be read: is a pipe that no program writes to" in error_of("@l")


def test_a_directory_in_the_place_of_a_list_leaves_no_descriptor() -> None:
    before = descriptors()
    assert "Is a directory" in error_of("@.")
    assert descriptors() <= before


def test_lists_that_would_never_end() -> None:
    for number in range(30):
        write(f"{number}.txt", f"@{number + 1}.txt\n@{number + 1}.txt\n")
    write("30.txt", "a.tar\n")
    assert "too many lists" in error_of("@0.txt")
    assert "too many lists" in error_of("@15.txt")


def test_a_huge_file_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("l.txt", "x.json", "x.yaml"):
        write(name, "")
        os.truncate(name, 5 << 30)
    for argument in ("@l.txt", "x.json", "x.yaml"):
        assert "MiB, the limit for a list of shards" in error_of(argument)


def test_what_a_disk_says_is_not_a_typing_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> io.BytesIO:
        raise PermissionError(13, "Permission denied")

    write("l.txt", "a.tar")
    monkeypatch.setattr(source, "open_stream", refuse)
    with pytest.raises(UnreadableShard, match=r"'l.txt' cannot be read: Permission denied"):
        expand(["@l.txt"])


# -- wids --------------------------------------------------------------------------------------------------


def index(*urls: str, **more: Any) -> dict[str, Any]:
    """As `widsindex create` writes it."""
    shards = [{"url": url, "md5sum": "0" * 32, "nsamples": len(url), "filesize": 10240} for url in urls]
    return {"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": shards, **more}


def test_a_wids_index_names_shards_and_their_samples() -> None:
    touch("set/b.tar", "set/{a}.tar", "c.tar")
    write("set/index.json", index("b.tar", "{a}.tar", "../c.tar", f"file://{os.getcwd()}/set/a.tar", base="/no"))
    touch("set/a.tar")
    shards = expand(["set/index.json"])
    assert [shard.name for shard in shards] == [b"b", b"{a}", b"c", b"a"]
    assert [shard.expected_samples for shard in shards][:3] == [5, 7, 8]
    assert shards[0] == Shard(os.fsencode(os.path.abspath("set/b.tar")), b"b", frozenset(), 5)
    os.chdir("set")
    assert expand(["index.json"]) == shards


def test_a_wids_index_of_several_datasets() -> None:
    touch("a/1.tar", "b/2.tar", "c/d/3.tar", "e/4.tar", "0.tar", "5.tar")
    write("c/three.json", index("3.tar", base="d", name="three"))
    write("b/two.json", index("2.tar"))
    write(
        "all.json",
        index(
            "0.tar",
            name="all",
            datasets=[
                {"name": "one", "weight": 2.5, "shardlist": [{"url": "a/1.tar", "nsamples": 3}]},
                {"source_url": "b/two.json", "weight": 1},
                {"source_url": "c/three.json"},
                {"base": "e/", "shardlist": [{"url": "4.tar", "nsamples": 4}]},
                {"base": os.getcwd(), "shardlist": [{"url": "5.tar", "nsamples": 5}]},
            ],
        ),
    )
    assert found("all.json") == ["0.tar", "a/1.tar", "b/2.tar", "c/d/3.tar", "e/4.tar", "5.tar"]


def test_what_an_index_names_is_a_shard_whatever_it_is_called() -> None:
    write("a.json", index("b.json"))
    write("b.json", index("a.json"))
    assert found("a.json") == ["b.json"]


# -- webdataset's YAML -------------------------------------------------------------------------------------


YAML = """
prefix: &here set/
buckets: top
datasets:
  - name: a
    shards: 'a-{0..1}.tar'
  - buckets: [$BUCKET]   # the environment's
    shards:
      - b.tar
      - c-{x,y}.tar
    choose: 1
  - buckets: []
    shards: [~/h.tar, no.tar, 1e3, 007]
    resample: 2
"""


def test_the_yaml_of_the_webdataset_library(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("BUCKET", "deep/er")
    monkeypatch.setenv("HOME", "home")
    monkeypatch.setenv("ALLOW_OBSOLETE", "1")
    text = YAML.replace("1e3, 007", "'1e3', '007'")
    write("x.yaml", text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = shardlists.MultiShardSample("x.yaml")
    expected = [url for source in library.sources for url in source.urls]
    assert len(expected) == 9
    touch(*expected)
    write("x.yml", YAML)  # what is written is what is meant
    with caplog.at_level(logging.INFO):
        assert found("x.yml") == expected
    assert [record.getMessage().partition(": a mount")[0] for record in caplog.records] == [
        "x.yml:11: datasets[1].choose",
        "x.yml:14: datasets[2].resample",
    ]


def test_paths_in_yaml_are_below_its_directory() -> None:
    touch("a/b/1.tar", "a/2.tar")
    write("a/x.yaml", f"datasets:\n- shards: [b/1.tar]\n- shards: {os.getcwd()}/a/2.tar\n")
    assert found("a/x.yaml") == ["a/b/1.tar", "a/2.tar"]


def test_aliases_do_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec_words, "MAX_SHARDS", 1000)
    shards = ", ".join(f"{number}.tar" for number in range(100))
    datasets = "\n".join(["- &d", f"  shards: [{shards}]", *["- *d"] * 100])
    write("x.yaml", f"datasets:\n{datasets}\n")
    assert "more than 1,000 shards" in error_of("x.yaml")
    levels = "\n".join(f"- &l{level} [{', '.join([f'*l{level - 1}'] * 9)}]" for level in range(1, 25))
    write("x.yaml", f"- &l0 lol\n{levels}\n")
    assert "an object is needed, not a list" in error_of("x.yaml")


# -- prepared Energon datasets -----------------------------------------------------------------------------


def energon(split: str | None = None, name: str = "split.yaml", counts: dict[str, Any] | None = None) -> None:
    """A dataset `set` as `energon prepare` leaves it."""
    if counts is None:
        counts = {"b.tar": 3, "a.tar": 2, "deep/c.tar": 4, "d.tar": 1}
    touch(*(f"set/{one}" for one in counts), "set/unprepared.tar")
    write("set/.nv-meta/.info.json", {"energon_version": "7.4.1", "shard_counts": counts})
    if split is not None:
        write(f"set/.nv-meta/{name}", split)


SPLIT = """
split_parts:
  train: ["{d,a}.tar", deep/c.tar]
  val:
    - b.tar
  no: []
exclude:
  - deep/c.tar
  - a.tar/x/y
  - "b.tar/k{1..2}"
"""


def test_a_prepared_dataset_has_the_shards_of_its_info() -> None:
    energon()
    expected = ["set/b.tar", "set/a.tar", "set/deep/c.tar", "set/d.tar"]
    for name in ("set", "set/", "set/.nv-meta", "set/.nv-meta/", "set/.nv-meta/.info.json", "./set//"):
        assert found(name) == expected
    assert [shard.expected_samples for shard in expand(["set"])] == [3, 2, 4, 1]
    assert found("set/*.tar") == ["set/a.tar", "set/b.tar", "set/d.tar", "set/unprepared.tar"]
    os.chdir("set")
    assert listed(".nv-meta") == listed(".") == ["b.tar", "a.tar", "deep/c.tar", "d.tar"]


def test_an_exclude_of_many_slashes_is_read_once() -> None:
    """It is cut only where the name of a shard may end."""
    key = "x" + "/" * 20_000
    energon(json.dumps({"split_parts": {}, "exclude": [f"a.tar/{key}"]}), "split.json")
    expand(["set"])
    with count_calls(10_000):
        assert expand(["set"])[1].without == {key.encode()}


def test_metadata_of_another_user_names_nothing_outside_of_its_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else who may write in a directory of sets decides which files a mount by root shows."""
    touch("secret.tar", "set/a.tar", "set/deep/b.tar")
    outside = ("../secret.tar", "deep/../../secret.tar", os.path.abspath("secret.tar"), "file:../secret.tar")
    for name in outside:
        write("set/.nv-meta/.info.json", {"shard_counts": {"a.tar": 1, name: 1}})
        assert listed("set") == ["set/a.tar", "secret.tar"]  # one's own
        os.chown("set/.nv-meta/.info.json", 65534, 65534)
        message = error_of("set")
        assert "set/.nv-meta/.info.json: shard_counts[" in message
        assert "a shard outside of the dataset, in a file that others can write" in message
        assert "belongs to another user (nobody)" in message
        monkeypatch.setenv("WDSFS_TRUST", "nobody")
        assert listed("set") == ["set/a.tar", "secret.tar"]
        monkeypatch.delenv("WDSFS_TRUST")
        os.chown("set/.nv-meta/.info.json", 0, 0)
    write("set/.nv-meta/.info.json", {"shard_counts": {"a.tar": 1, "deep/b.tar": 1}})
    os.chown("set/.nv-meta/.info.json", 65534, 65534)
    assert listed("set") == ["set/a.tar", "set/deep/b.tar"]


@pytest.mark.parametrize("name", ["split.yaml", "split.json"])
def test_splits_and_excludes(name: str) -> None:
    as_json = {
        "split_parts": {"train": ["{d,a}.tar", "deep/c.tar"], "val": ["b.tar"], "no": []},
        "exclude": ["deep/c.tar", "a.tar/x/y", "b.tar/k{1..2}"],
    }
    energon(SPLIT if name.endswith("yaml") else json.dumps(as_json), name)
    assert listed("set", split="train") == ["set/d.tar", "set/a.tar"]
    assert listed("set", split="val") == ["set/b.tar"]
    assert listed("set") == ["set/b.tar", "set/a.tar", "set/d.tar"]
    assert [shard.without for shard in expand(["set"])] == [{b"k1", b"k2"}, {b"x/y"}, frozenset()]
    assert listed(f"set/.nv-meta/{name}", split="val") == ["set/b.tar"]
    assert "the split 'no' in 'set/.nv-meta' has no shard" in error_of("set", split="no")
    message = error_of("set", split="trian")
    assert f"set/.nv-meta/{name}" in message
    assert "split_parts: no split is called 'trian'; there are: 'train', 'val', 'no'" in message


def test_a_split_file_of_another_name_is_taken_by_its_path() -> None:
    energon(SPLIT)
    write("set/.nv-meta/mine.yaml", "split_parts: {train: [b.tar]}")
    assert listed("set/.nv-meta/mine.yaml", split="train") == ["set/b.tar"]
    assert len(expand(["set/.nv-meta/mine.yaml"])) == 4


def test_several_datasets_and_lists_of_them() -> None:
    energon(SPLIT)
    os.rename("set", "one")
    energon(SPLIT)
    write("l.txt", "one\nset")
    assert listed("@l.txt", split="val") == ["one/b.tar", "set/b.tar"]
    assert [shard.name for shard in expand(["one", "set"], split="val")] == [b"one--b", b"set--b"]


def test_the_info_of_older_versions() -> None:
    energon(SPLIT)
    os.remove("set/.nv-meta/.info.json")
    write("set/.nv-meta/.info.yaml", "energon_version: 5.0\nshard_counts:\n  a.tar: 2\n  b.tar: 007\n")
    assert [(shard.name, shard.expected_samples) for shard in expand(["set"])] == [(b"a", 2), (b"b", 7)]
    assert found("set/.nv-meta/.info.yaml") == ["set/a.tar", "set/b.tar"]


@pytest.mark.parametrize("other", ["a.tar", "plain", "@l.txt", "x.json", "x.yaml", "{a,b}.tar"])
def test_a_split_of_what_has_none(other: str) -> None:
    energon(SPLIT)
    touch("a.tar", "b.tar", "plain/a.tar")
    write("l.txt", "a.tar")
    write("x.json", index("a.tar"))
    write("x.yaml", "datasets:\n- shards: a.tar")
    for specs in ([other], ["set", other]):
        assert "has no splits. Only a dataset that `energon prepare` has prepared" in error_of(*specs, split="val")


def test_a_dataset_without_a_split_file() -> None:
    energon()
    assert "--split val: 'set/.nv-meta' has no split.yaml" in error_of("set", split="val")
    os.remove("set/.nv-meta/.info.json")
    assert found("set") == ["set/a.tar", "set/b.tar", "set/d.tar", "set/unprepared.tar"]  # prepared otherwise
    assert "has no .info.json" in error_of("set/.nv-meta")


def test_an_exclude_that_excludes_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    energon("split_parts: {}\nexclude: [gone.tar, 'gone.tar/k{1..3}', a.tar, deep/c.tar/k/l, 'deep/c.tar/']")
    assert listed("set") == ["set/b.tar", "set/deep/c.tar", "set/d.tar"]
    assert expand(["set"])[1].without == {b"k/l", b""}
    assert caplog.messages[0] == (
        "set/.nv-meta/split.yaml:2: exclude[0]: 'gone.tar' (and 3 more) names no shard of the dataset and "
        "excludes nothing"
    )


def test_a_shard_of_which_samples_are_left_out_is_not_written_to() -> None:
    energon(SPLIT)
    refuse_left_out(expand(["set/*.tar"]), "no")
    with pytest.raises(SpecError, match=r"--overlay: samples of '.*/set/a.tar' are excluded .* name the shards"):
        refuse_left_out(expand(["set"], split="train"), "--overlay")


# -- what is wrong is told with its place -----------------------------------------------------------------

A = {"url": "a.tar", "nsamples": 1}


def wids(*shards: object, **more: object) -> dict[str, Any]:
    return {"wids_version": 1, "shardlist": list(shards), **more}


def sources(*datasets: object) -> dict[str, Any]:
    return {"wids_version": 1, "datasets": list(datasets)}


WRONG: dict[str, list[tuple[Any, str]]] = {
    "l.txt": [
        (b"a.tar\n\nb.tar\n", "1 of 2 shards are missing: 'b.tar' (l.txt:3); "),
        (b"# x\na.tar\na.tar", "/a.tar' is named twice (l.txt:2, l.txt:3): name it once"),
        (b"a{.tar\n", "l.txt:1: unbalanced braces in 'a{.tar'"),
        (b"\n${N}.tar\n", "l.txt:2: the environment variable WDS_N is not set"),
        (b"a.tar::\n", "l.txt:1: an empty shard name in 'a.tar::'"),
        (b"a.tar\0b.tar\0", "l.txt:1: a NUL in the shard name 'a.tar\\x00b.tar\\x00'"),
        (b"x*\n", "l.txt:1: no file matches 'x*'"),
        (b"hdfs://b/a.tar\n", "l.txt:1: 'hdfs://b/a.tar' is neither a path nor a URL"),
        (b"fifo\n", "'fifo' (l.txt:1) is not a regular file"),
        (b"@l.txt\n", "l.txt:1: the list 'l.txt' includes itself"),
        (b"@m.txt\n", "l.txt:1: m.txt:1: the list './l.txt' includes itself"),
        (b"@none.txt\n", "l.txt:1: 'none.txt' cannot be read: No such file or directory"),
        (b"@.\n", "l.txt:1: '.' cannot be read: Is a directory"),
        (b"# nothing\n\n \t\n", "the list 'l.txt' names no shards"),
        (b"", "the list 'l.txt' names no shards"),
        (b"\xff\xfea\0.\0", "'l.txt' is in UTF-16: save it as UTF-8"),
    ],
    "x.json": [
        (wids(A, {}), "shardlist[1]: 'url' is missing"),
        (index("a.tar", "b.tar"), "1 of 2 shards are missing: 'b.tar' (x.json: shardlist[1].url)"),
        (index("a.tar", "./a.tar"), "is named twice (x.json: shardlist[0].url, x.json: shardlist[1].url)"),
        (index("ftp://h/a.tar"), "x.json: shardlist[0].url: 'ftp://h/a.tar' is neither a path nor a URL"),
        (index("a\0.tar"), "x.json: shardlist[0].url: a NUL in"),
        (index("\ud800.tar"), "x.json: shardlist[0].url: the shard name '\\ud800.tar' cannot be encoded"),
        (index(""), "x.json: shardlist[0].url: an empty shard name"),
        ({**index("a.tar"), "wids_version": 2}, "x.json: wids_version: only version 1 is known"),
        ({"files": {}}, "x.json: is not a list of shards"),
        ({"wids_version": 1}, "x.json: names no shards"),
        ({"wids_version": 1, "shardlist": {}}, "x.json: shardlist: a list is needed, not an object"),
        (wids([]), "x.json: shardlist[0]: an object is needed, not a list"),
        (wids({**A, "url": None}), "x.json: shardlist[0].url: a text is needed, not nothing"),
        (wids({**A, "nsamples": True}), "shardlist[0].nsamples: a number from 0 on is needed, not true or false"),
        (wids({**A, "nsamples": -1}), "x.json: shardlist[0].nsamples: a number from 0 on is needed, not '-1'"),
        (sources({}), "x.json: datasets[0]: 'shardlist' is missing"),
        (sources({"source_url": "y.json", "shardlist": []}), "datasets[0]: has both a source_url and a shardlist"),
        (sources({"source_url": "y.json"}), "y.json: source_url: x.json: datasets[0].source_url refers to this "),
        (sources({"source_url": "z.json"}), "z.json: datasets: x.json: datasets[0]"),
        (sources({"source_url": "fifo"}), "'fifo' is not a regular file"),
        (sources({"source_url": "gone"}), "'gone' cannot be read: No such file"),
        ({"split_parts": {}, "exclude": []}, "x.json: a file of Energon belongs into the directory .nv-meta"),
        ({"odd key": 1, "wids_version": 1, "shardlist": 7}, "x.json: shardlist: a list is needed, not a number"),
        (b'{"wids_version": 1,\n "shardlist": [}', "x.json:2:16: not JSON: Expecting value"),
        (b'{"wids_version": 1, "wids_version": 1}', "x.json: 'wids_version' occurs twice in one object"),
        (b"", "x.json:1:1: not JSON: Expecting value"),
        (b"[]", "x.json: an object is needed, not a list"),
        (b"[" * 100_000, "x.json: nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "x.json: a number in it is too large"),
        (b"\x80", "x.json:1:1: not JSON"),
    ],
    "x.yaml": [
        ("datasets:\n- shards: x.tar\n", "no such shard: 'x.tar' (x.yaml:2: datasets[0].shards)"),
        ("datasets:\n- shards: [a.tar,\n   a.tar]", "is named twice (x.yaml:2: datasets[0].shards[0], x.yaml:3: "),
        ("datasets:\n- shards: hdfs://b/a.tar", "x.yaml:2: datasets[0].shards: 'hdfs://b/a.tar' is neither"),
        ("prefix: 'hdfs://b/'\ndatasets:\n- shards: a.tar", "x.yaml:3: datasets[0].shards: 'hdfs://b/a.tar' is"),
        ("datasets:\n- shards: 'a{'", "x.yaml:2: datasets[0].shards: unbalanced braces in 'a{'"),
        ("datasets:\n- shards: ''", "x.yaml:2: datasets[0].shards: an empty shard name"),
        ("datasets:\n- shards:", "x.yaml:2: datasets[0].shards: a list is needed, not nothing"),
        ("datasets:\n- shards: [~]", "x.yaml:2: datasets[0].shards[0]: a text is needed, not nothing"),
        ("datasets:\n- shards: [[a]]", "x.yaml:2: datasets[0].shards[0]: a text is needed, not a list"),
        ("datasets:\n- name: x", "x.yaml:2: datasets[0]: 'shards' is missing"),
        ("datasets: x.tar", "x.yaml:1: datasets: a list is needed, not a text"),
        ("datasets:\n- shard: x", "x.yaml:2: datasets[0].shard: no such key; known are buckets, choose, name, "),
        ("dataset: []", "x.yaml:1: dataset: no such key; known are buckets, datasets, prefix"),
        ("prefix: x", "x.yaml:1: 'datasets' is missing"),
        ("datasets: []", "x.yaml: names no shards"),
        ("buckets: [a, b]\ndatasets:\n- shards: x", "x.yaml:1: buckets: more than one bucket"),
        ("split_parts: {}", "x.yaml:1: a file of Energon belongs into the directory .nv-meta"),
        ("- a.tar", "x.yaml:1: an object is needed, not a list"),
        ("", "x.yaml: an object is needed, not nothing"),
        ("a: [", "x.yaml:2:1: not YAML: "),
        ("a: 1\n a: 2", "x.yaml:2:3: not YAML: "),
        ("datasets: []\ndatasets: []", "x.yaml:2: 'datasets' occurs twice in one object"),
        ("[a]: 1", "x.yaml:1: a key that is not text"),
        ("a: *b", "x.yaml:1: no anchor is called 'b'"),
        ("a: 1\n---\nb: 1", "x.yaml:3: a second document"),
        (b"a: \xff", "x.yaml: not YAML: "),
        ("a: \x07", "x.yaml: not YAML: "),
        (b"[" * 100_000, "x.yaml:1: nested too deeply"),
        ("datasets: &a\n- *a", "x.yaml:1: datasets[0]: an object is needed, not a list"),
        ("datasets:\n- shards: !!python/object/apply:os.system [exit]", "no such shard: 'exit'"),
    ],
    "split.yaml": [
        ("split_parts: {train: [x.tar]}", "split.yaml:1: split_parts.train[0]: 'x.tar' is not a shard of .in"),
        ("split_parts: {train: [unprepared.tar]}", "split_parts.train[0]: 'unprepared.tar' is not a shard of"),
        ("split_parts: {train: a.tar}", "split_parts.train: a list is needed, not a text"),
        ("split_parts: [train]", "split_parts: an object is needed, not a list"),
        ("exclude: []", "split.yaml:1: 'split_parts' is missing"),
        ("split_parts: {train: [a.tar]}\nexcludes: [a.tar]", "split.yaml:2: excludes: no such key"),
        ("split_parts: {train: [a.tar]}\nexclude: a.tar", "split.yaml:2: exclude: a list is needed"),
        ("split_parts: {train: [a.tar]}\nexclude: ['{a,d}.tar']", "the split 'train' in 'set/.nv-meta' has no"),
        ("split_parts: {train: ['a{']}", "split_parts.train[0]: unbalanced braces"),
        ("split_parts: {train: [a.tar, a.tar]}", "is named twice"),
    ],
    ".info.json": [
        ({"shard_counts": []}, "set/.nv-meta/.info.json: shard_counts: an object is needed, not a list"),
        ({"shard_counts": {}}, "the dataset in 'set/.nv-meta' has no shard"),
        ({"shard_counts": {"a.tar": "2"}}, ".info.json: shard_counts['a.tar']: a number from 0 on is needed, "),
        ({"shard_counts": {"a\0.tar": 2}}, "set/.nv-meta/.info.json: shard_counts['a\\x00.tar']: a NUL"),
        ({"shard_counts": {"g.tar": 2}}, "'set/g.tar' (set/.nv-meta/.info.json: shard_counts['g.tar'])"),
    ],
}


@pytest.mark.parametrize(("file", "at"), [(file, at) for file, cases in WRONG.items() for at in range(len(cases))])
def test_what_is_wrong_is_told_with_its_place(file: str, at: int) -> None:
    content, message = WRONG[file][at]
    energon()
    touch("a.tar")
    os.mkfifo("fifo")
    write("m.txt", "@./l.txt")
    write("y.json", {"source_url": "z.json"})
    write("z.json", index("a.tar", datasets=[{}]))
    is_energon = file in ("split.yaml", ".info.json")
    write(f"set/.nv-meta/{file}" if is_energon else file, content)
    spec = "set" if is_energon else file
    split = "train" if file == "split.yaml" else None
    assert message in error_of(f"@{spec}" if file == "l.txt" else spec, split=split)


# -- slices ------------------------------------------------------------------------------------------------


def test_a_slice_has_every_mth_shard_and_the_names_of_the_whole_set() -> None:
    touch("a/1.tar", "b/1.tar", *(f"{n}.tar" for n in range(2, 7)))
    whole = expand(["{a,b}/1.tar", "{2..6}.tar"])
    parts = [expand(["{a,b}/1.tar", "{2..6}.tar"], slice=Slice(rank, 3)) for rank in range(3)]
    assert [len(part) for part in parts] == [3, 2, 2]
    assert parts[0] == whole[::3]
    assert sorted((shard for part in parts for shard in part), key=lambda one: one.name) == sorted(
        whole, key=lambda one: one.name
    )
    assert parts[1][0].name == b"b--1"
    assert expand(["2.tar"], slice=Slice(0, 1)) == expand(["2.tar"])
    for rank in range(3):  # every rank sees what is wrong
        with pytest.raises(SpecError, match=r"has 2 shards and cannot be cut into 3 parts"):
            expand(["{2..3}.tar"], slice=Slice(rank, 3))
        with pytest.raises(MissingShard, match=r"'9.tar'"):
            expand(["{2..6}.tar", "9.tar"], slice=Slice(rank, 3))


# -- SHARDS... [PATH] --------------------------------------------------------------------------------------


def test_the_last_argument_is_a_path_when_it_names_no_shard() -> None:
    """Also not in part: `expand` says then what is missing. A directory without a shard is none."""
    energon()
    touch("t-0.tar", "t-1.tar", "t-2.tar", "zipped/b.tgz", "extracted/jpg")
    write("l.txt", "@l.txt")
    write("x.json", "no JSON")
    for last in (
        *("t-0", "t-0/a/jpg", "t-9.tar", "t-{7..9}.tar", "t-[89].tar", "extracted", "odd{name", "", "/"),
        *("@gone.txt", "$UNSET", "t/x.json"),
    ):
        assert split_path(["t-{0..2}.tar", last]) == (["t-{0..2}.tar"], last)
    shards = ["t-1.tar", "t-{1..9}.tar", "t-[12].tar", "set", "set/.nv-meta", "zipped"]
    for last in (*shards, "@l.txt", "@-", "x.json", "${UNSET}/a.tar"):
        assert split_path(["t-0.tar", last]) == (["t-0.tar", last], None)
    assert split_path(["missing.tar"]) == (["missing.tar"], None)
    assert split_path(["t-0.tar", "t-1.tar", "t-9.tar"]) == (["t-0.tar", "t-1.tar"], "t-9.tar")


# -- anything ----------------------------------------------------------------------------------------------

plain = (
    st.none() | st.booleans() | st.integers(-2, 3) | st.floats() | st.sampled_from(["a.tar", "", "x.json", "\0"])
)
key = st.sampled_from(
    [
        *("wids_version", "shardlist", "url", "nsamples", "datasets", "source_url", "base"),
        *("shards", "prefix", "buckets", "choose", "split_parts", "train", "exclude", "shard_counts"),
    ]
)
value = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(key, inner, max_size=4))


@settings(max_examples=150)
@given(
    st.dictionaries(key, value),
    st.sampled_from([".json", ".yaml", "/.nv-meta/.info.json", "/.nv-meta/split.yaml"]),
)
def test_any_document_is_read_or_refused(content: dict[str, Any], suffix: str) -> None:
    touch("a.tar")
    write("any/.nv-meta/.info.json", {"shard_counts": {"a.tar": 1}})
    write(f"any{suffix}", content)
    for split in (None, "train"):
        with contextlib.suppress(WdsfsError):
            assert expand([f"any{suffix}"], split=split)


@given(st.text(string.printable, max_size=40) | st.binary(max_size=40))
def test_any_text_is_read_or_refused(content: str | bytes) -> None:
    for name, load in (("any.json", located.load_json), ("any.yaml", located.load_yaml)):
        write(name, content)
        with contextlib.suppress(SpecError):
            assert load(name).file == name
