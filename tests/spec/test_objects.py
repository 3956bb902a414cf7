"""Specs with URLs, against a web server that counts what it is asked."""

from __future__ import annotations

import fnmatch
import json
import os
import re
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests import tars
from tests.web_server import BORN, Fault, Request, WebServer, bucket_listing
from wdsfs.door import urls
from wdsfs.door.shard_door import DOOR
from wdsfs.errors import MissingShard, NoMatch, ShardError, SpecError, Unreachable
from wdsfs.spec import objects
from wdsfs.spec.expand import expand

TAR = tars.tar(tars.member(b"a.txt"))


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    """A server with three shards, and an empty cache."""
    monkeypatch.setenv("WDSFS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with WebServer().running() as server:
        for number in range(3):
            server.put(f"/set/x-{number}.tar", tars.tar(tars.member(b"%d.txt" % number)))
        yield server
    DOOR.close()


def paths(web: WebServer, *specs: str, **options: Any) -> list[str]:
    """The shards that the specs name, without the address of the server."""
    found = [os.fsdecode(shard.path) for shard in expand(specs, **options)]
    return [path.removeprefix(web.url + "") for path in found]


def test_braces_name_objects_and_files_are_in_one_set(web: WebServer, tmp_path: Path) -> None:
    (tmp_path / "local.tar").write_bytes(TAR)
    found = expand([web.url + "/set/x-{0..2}.tar", (tmp_path / "local.tar").as_uri()])
    assert [shard.name for shard in found] == [b"x-0", b"x-1", b"x-2", b"local"]
    assert found[1].path == f"{web.url}/set/x-1.tar".encode()
    assert {request.method for request in web.requests} == {"HEAD"}


def test_a_missing_object_is_a_missing_shard(web: WebServer) -> None:
    with pytest.raises(MissingShard, match=r"1 of 4 shards are missing: .*x-3.tar"):
        expand([web.url + "/set/x-{0..3}.tar"])
    assert len(expand([web.url + "/set/x-{0..3}.tar"], allow_missing=True)) == 4


REFUSALS = {
    "403": Fault(status=403),
    "501": Fault(status=501),
    "circle": Fault(status=302, headers={"Location": "/set/x-1.tar"}),
    "nowhere": Fault(status=302),
    "no answer": Fault(headers={"Content-Length": "many"}),
}


@pytest.mark.parametrize("fault", REFUSALS.values(), ids=REFUSALS)
def test_what_the_server_refuses_is_missing_and_named_with_its_reason(web: WebServer, fault: Fault) -> None:
    web.objects["/set/x-1.tar"].always = fault
    with pytest.raises(ShardError, match=r"x-1.tar: its s") as caught:
        expand([web.url + "/set/x-1.tar"])
    with pytest.raises(
        type(caught.value), match=r"^1 of 3 shards cannot be read: .*x-1.tar: its s.*--allow-missing"
    ):
        expand([web.url + "/set/x-{0..2}.tar"], allow_missing=False)
    assert len(expand([web.url + "/set/x-{0..2}.tar"], allow_missing=True)) == 3
    with pytest.raises(ShardError, match=r"x-1.tar: its s"):
        expand([web.url + "/set/x-1.tar"], allow_missing=True)


def test_of_many_shards_that_are_refused_some_are_named(web: WebServer) -> None:
    for number in range(10):
        web.put(f"/set/y-{number}.tar", b"").always = Fault(status=403)
    with pytest.raises(
        ShardError, match=r"^11 of 14 shards cannot be read: .*y-2.tar.* and 8 more; --allow"
    ) as caught:
        expand([web.url + "/set/{y-{0..9},x-{0..3}}.tar"], allow_missing=False)
    assert "y-3" not in str(caught.value)


def test_web_servers_list_nothing_which_is_said_of_the_directory(web: WebServer) -> None:
    """Also where a file that may be in it is refused."""
    for answer in (None, Fault(status=403)):
        if answer is not None:
            web.put("/set/.nv-meta/.info.json", b"").always = answer
        for spec in ("/set/x-*.tar", "/set/"):
            with pytest.raises(ShardError, match="/set/: a web server does not list"):
                expand([web.url + spec])


def test_a_signature_is_sent_and_never_shown(web: WebServer) -> None:
    [shard] = expand([web.url + "/set/x-0.tar?X-Amz-Signature=deadbeef"])
    assert b"deadbeef" not in shard.path
    assert DOOR.remote.open(shard.path).pread(5, 0) == b"0.txt"
    assert {request.target for request in web.requests} == {"/set/x-0.tar?X-Amz-Signature=deadbeef"}


@pytest.mark.parametrize(
    ("spec", "shown"),
    [
        ("gopher://ann:geheim@h/x.tar", "'gopher://h/x.tar'"),
        ("gopher://ann:geheim@h/*.tar", "'gopher://h/"),
        ("http://ho st/x.tar", "'ho st'"),
        ("{web}/set/x-{{0..2.tar?sig=geheim{{", "/set/x-"),
        ("{web}/set/x-9.tar?sig=geheim", "/set/x-9.tar"),
        ("{web}/set/../x.tar?sig=geheim", "/set/../x.tar"),
    ],
)
def test_what_is_no_url_or_no_shard_is_named_without_its_secrets(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, shown: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("list.txt").write_text(spec.format(web=web.url) + "\n")
    for one in (spec.format(web=web.url), "@list.txt"):
        with pytest.raises((SpecError, MissingShard), match=re.escape(shown)) as caught:
            expand([one])
        assert "geheim" not in str(caught.value)


def named(web: WebServer, *targets: str) -> list[str]:
    return [shard.name.decode() for shard in expand([f"{web.url}/set/{target}" for target in targets])]


def test_a_query_that_is_no_signature_is_in_a_name_only_to_tell_a_shard_from_others(web: WebServer) -> None:
    web.put("/set/get", TAR)
    assert named(web, "x-0.tar?download=true", "x-1.tar?token=1") == ["x-0", "x-1"]
    assert named(web, "get?file=1") == ["get"]
    first, second = named(web, "get?file=1", "get?file=2")
    assert first.startswith("get?")
    assert first != second
    plain, other = named(web, "x-0.tar", "x-0.tar?v=2")
    assert plain == "x-0"
    assert other.startswith("x-0.tar?")
    mark = urls.parse(f"{web.url}/set/get?file=1").shown.rpartition("?")[2]
    web.put(f"/set/get%3F{mark}", TAR)
    assert named(web, "get?file=1", f"get%3F{mark}") == ["get", f"get%3F{mark}"]


def test_a_shard_is_called_as_its_characters_are_and_not_their_escapes(web: WebServer) -> None:
    for name in ("a%20b", "%C3%A9", "p%25q", "x%2Fy", "n%0An"):
        web.put(f"/odd/{name}.tar", TAR)
    specs = [f"{web.url}/odd/{name}.tar" for name in ("a b", "é", "p%25q", "x%2Fy", "n%0An")]
    assert [shard.name.decode() for shard in expand(specs)] == ["a b", "é", "p%25q", "x%2Fy", "n%0An"]
    assert {request.path for request in web.requests} == set(web.objects) - {f"/set/x-{n}.tar" for n in range(3)}


def test_the_address_of_a_host_is_not_taken_apart() -> None:
    for parts in (["http://[::1]/x.tar", "http://[2001:db8::2]:80/y.tar"], ["http://[::ffff:1.2.3.4]"]):
        assert objects.parts("::".join(parts)) == parts
    assert objects.parts("x[a::b].tar::y") == ["x[a", "b].tar", "y"]
    assert objects.without_secrets("http://u:p@[::1]/x.tar?sig=deadbeef::y") == "http://[::1]/x.tar?...::y"
    # Looking for an address to the end of the text, at each of many short words, took half a minute.
    assert objects._SEPARATOR.pattern.count("{0,45}") == 1
    address = "[2001:0db8:85a3:0000:0000:8a2e:255.255.255.255]"  # as long as they get
    assert objects.parts(f"http://{address}/x.tar::" + "a::" * 100_000 + "b")[::100_001] == [
        f"http://{address}/x.tar",
        "b",
    ]


def test_patterns_of_keys_are_matched_in_polynomial_time(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def counting(name: str, pattern: str) -> bool:
        nonlocal calls
        calls += 1
        return fnmatch.fnmatchcase(name, pattern)

    monkeypatch.setattr(objects, "fnmatchcase", counting)
    assert not objects._fits(["a"] * 30, ["**", "a"] * 12 + ["b"])
    assert objects._fits(["a"] * 30, ["**", "a"] * 12)
    assert calls < 1000
    for key, pattern in (
        *(("a/x.tar", "a/*.tar"), ("a/b/c/x.tar", "a/**/*.tar"), ("a/x.tar", "a/**/*.tar")),
        *(("a/x-1.tar", "a/x-[0-9].tar"), ("a/x-a.tar", "a/x-?.tar")),
    ):
        assert objects._fits(key.split("/"), pattern.split("/"))
    no_matches = [("a/b/x.tar", "a/*.tar"), ("a/.x.tar", "a/*.tar"), ("a/.b/x.tar", "**/*.tar"), ("a", "a/b")]
    for key, pattern in no_matches:
        assert not objects._fits(key.split("/"), pattern.split("/"))


def test_a_line_of_a_list_that_is_no_name_is_not_asked_for(web: WebServer) -> None:
    web.put("/set/list.txt", b"x" * (1 << 20))
    web.requests.clear()
    with pytest.raises(SpecError, match="a path of 1,048,") as caught:
        expand(["@" + web.url + "/set/list.txt"])
    assert len(str(caught.value)) < 300
    assert {request.path for request in web.requests} == {"/set/list.txt"}


def test_files_that_name_shards_may_hold_urls_and_lie_at_one(web: WebServer, tmp_path: Path) -> None:
    local = tmp_path / "list.txt"
    local.write_text(web.url + "/set/x-2.tar" + "\n")
    web.put("/set/list.txt", b"# relative ones lie beside the list\nx-0.tar\n")
    assert paths(web, f"@{local}", f"@{web.url}/set/list.txt") == ["/set/x-2.tar", "/set/x-0.tar"]
    index = {"wids_version": 1, "shardlist": [{"url": "x-1.tar", "nsamples": 1}]}
    web.put("/set/index.json", json.dumps(index).encode())
    [shard] = expand([web.url + "/set/index.json"])
    assert (shard.name, shard.expected_samples) == (b"x-1", 1)
    web.put("/set/.nv-meta/.info.json", json.dumps({"shard_counts": {"x-0.tar": 1, "x-2.tar": 1}}).encode())
    split = {"split_parts": {"train": ["x-2.tar"], "val": ["x-0.tar"]}, "exclude": []}
    web.put("/set/.nv-meta/split.yaml", json.dumps(split).encode())
    assert paths(web, web.url + "/set/") == ["/set/x-0.tar", "/set/x-2.tar"]
    assert paths(web, web.url + "/set/", split="train") == ["/set/x-2.tar"]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("list.txt", "{secret}"),
        ("list.txt", "file://{secret}"),
        ("list.txt", "x-0.tar::{secret}"),
        ("list.txt", "/{{etc,usr}}"),
        ("list.txt", "@{secret}"),
        ("list.txt", "@-"),
        ("list.txt", "-"),
        ("list.txt", "pipe:touch run"),
        ("list.txt", "{{pipe:,b}}touch run"),
        ("x.json", '{{"wids_version": 1, "shardlist": [{{"url": "{secret}", "nsamples": 1}}]}}'),
        ("x.json", '{{"wids_version": 1, "datasets": [{{"source_url": "{secret}"}}]}}'),
        ("x.json", '{{"wids_version": 1, "datasets": [{{"base": "/etc", "shardlist": []}}]}}'),
        ("x.json", '{{"wids_version": 1, "shardlist": [{{"url": "pipe:touch run", "nsamples": 1}}]}}'),
        ("x.yaml", "datasets: [shards: ['{secret}']]"),
        ("x.yaml", "datasets: [shards: ['http://127.0.0.1:1/$WDSFS_SECRET/x.tar']]"),
        ("set/.nv-meta/.info.json", '{{"shard_counts": {{"{secret}": 1}}}}'),
    ],
)
def test_a_list_at_a_url_names_nothing_of_this_machine(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, content: str
) -> None:
    """Not even with --allow-pipe, which may have been given for another list."""
    monkeypatch.setenv("WDSFS_ALLOW_PIPE", "1")
    monkeypatch.setenv("WDSFS_SECRET", "geheim")
    monkeypatch.chdir(tmp_path)
    secret = tmp_path / "secret.tar"
    secret.write_bytes(TAR)
    web.put("/" + file, content.format(secret=secret).encode())
    spec = f"{web.url}/{file}".removesuffix(".nv-meta/.info.json")
    with pytest.raises(SpecError, match="of this machine"):
        expand(["@" + spec if file == "list.txt" else spec])
    assert not (tmp_path / "run").exists()


@pytest.fixture
def bucket(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The keys in the bucket `b` of a store, which answers as S3 does."""
    keys: set[str] = set()

    async def answer(request: Request) -> tuple[int, dict[str, str], bytes] | None:
        if request.path.rstrip("/") != "/b":
            known = unquote(request.path).removeprefix("/b/") in keys
            return (200, {"ETag": '"1"', "Last-Modified": formatdate(BORN, usegmt=True)}, b"") if known else None
        return bucket_listing(request, keys)

    web.handler = answer
    monkeypatch.setenv("WDSFS_STORE_OPTIONS", f"s3://:endpoint={web.url} s3://:anonymous=true s3://:region=x")
    return keys


def test_what_looks_like_a_pattern_or_a_directory(bucket: set[str]) -> None:
    bucket |= {"d/[b].tar", "d/c.tar"}
    assert [shard.path for shard in expand(["s3://b/d/[b].tar"])] == [b"s3://b/d/[b].tar"]
    with pytest.raises(NoMatch, match="no object matches 's3://b/d/"):
        expand(["s3://b/d/[x].tar"])
    with pytest.raises(MissingShard, match="if it is a directory of shards, end it with a slash"):
        expand(["s3://b/d"])


@pytest.mark.parametrize("spec", ["s3://b/d/", "s3://b/d/*.tar"])
def test_what_has_to_be_listed_names_the_way_to_the_cache(monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    options = "s3://:endpoint=http://127.0.0.1:9 s3://:anonymous=true s3://:region=x"
    monkeypatch.setenv("WDSFS_STORE_OPTIONS", options)
    with pytest.raises(Unreachable, match=r"cannot be connected to; names with braces \(x-\{000\.\.099\}\.tar\)"):
        expand([spec])
    DOOR.close()  # the fetcher has these options


@pytest.mark.parametrize(
    ("spec", "found", "requests"),
    [
        ("d/", ["d/a.tar", "d/b.tar"], 1),
        ("d/*.tar", ["d/a.tar", "d/b.tar"], 1),
        ("d/*", ["d/a.tar", "d/b.tar"], 1),
        ("*/?.tar", ["d/a.tar", "d/b.tar", "e/a.tar"], 3),
        ("d/s*/t/*.tar", ["d/s1/t/x.tar", "d/s2/t/x.tar"], 3),
        ("d/**/x.tar", ["d/s1/t/x.tar", "d/s2/t/x.tar"], 1),
    ],
)
def test_only_the_directories_that_a_spec_names_are_listed(
    web: WebServer, bucket: set[str], spec: str, found: list[str], requests: int
) -> None:
    """And of all that is listed only shards leave a note in the cache."""
    bucket |= {"d/a.tar", "d/b.tar", "d/.c.tar", "d/notes.txt", "e/a.tar", "d/s1/t/x.tar", "d/s2/t/x.tar"}
    assert paths(web, f"s3://b/{spec}") == [f"s3://b/{key}" for key in found]
    asked = [parse_qs(urlsplit(request.target).query) for request in web.requests if request.path == "/b"]
    assert len(asked) == requests
    assert all(("delimiter" in query) is ("**" not in spec) for query in asked)
    assert sorted(map(os.fsdecode, DOOR.known_objects())) == [f"s3://b/{key}" for key in found]
    assert len(list(Path(os.environ["WDSFS_CACHE_DIR"]).rglob("*.note"))) == len(found)


def test_a_glob_over_many_directories_lists_them_at_once(
    web: WebServer, bucket: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "DIRECTORIES_MAX", 2)
    bucket |= {f"d{number}/x.tar" for number in range(3)}
    assert len(expand(["s3://b/*/x.tar"])) == 3
    assert [request.path for request in web.requests if request.path == "/b"] == ["/b", "/b"]


def test_a_name_that_no_path_can_have_hides_no_shards(web: WebServer, bucket: set[str]) -> None:
    bucket |= {"d/a.tar", "d//notes.txt", "d/../b.tar", "d/c\x01.txt", "d/e/f//g.tar", "d/e/h.tar"}
    assert paths(web, "s3://b/d/") == paths(web, "s3://b/d/*.tar") == ["s3://b/d/a.tar"]
    assert paths(web, "s3://b/d/**/*.tar") == ["s3://b/d/a.tar", "s3://b/d/e/h.tar"]


def test_what_vanishes_from_a_listed_prefix_is_noticed(web: WebServer, bucket: set[str]) -> None:
    bucket |= {f"x-{number:03}.tar" for number in range(objects.LISTING_PAYS + 2)}
    found = [shard.path for shard in expand(["s3://b/x-{000..065}.tar"])]
    bucket -= {"x-003.tar"}
    web.requests.clear()
    objects.ask_again(list(map(os.fsdecode, found)), 0)
    assert [request.path for request in web.requests] == ["/b", "/b/x-003.tar"]
    with pytest.raises(MissingShard):
        DOOR.look(b"s3://b/x-003.tar")
    DOOR.look(b"s3://b/x-004.tar")
    web.requests.clear()
    assert objects.gone(found) == [b"s3://b/x-003.tar"]
    assert [request.path for request in web.requests] == ["/b"]
