"""New shards that are objects in a store: what is there afterwards, also when something comes between."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import urllib.request
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests import servers, tars
from tests.conftest import Program
from tests.overlay.test_overlay_mount import a_disk
from tests.packing.conftest import Answer, FakeS3, joined_parts
from tests.packing.test_pack import CLASSES, pack, write
from tests.processes import PATIENCE, wait_until
from tests.servers import BUCKET, KEY, SECRET, Server

SHARDS = [f"s{number}.tar" for number in range(3)]
NAMES = [f"new/t-{number}.tar" for number in range(3)]
PATTERN = f"s3://{BUCKET}/new/t-%d.tar"
PARTS = ("--store-option", "part_size=5000")  # of the 90 kB of a shard
ONE_BY_ONE = ("commit", "--overlay", "o", "-o", PATTERN, "--jobs", "1", *SHARDS)


@pytest.fixture
def a_set(program: Program) -> Program:
    """Three shards, and an overlay that changes the first one."""
    for number, name in enumerate(SHARDS):
        members = [tars.member(b"%03d.jpg" % sample, bytes([number]) * 3000) for sample in range(20)]
        (program.home / name).write_bytes(tars.tar(*members))
    program.write("o/upper/s0/003/jpg", b"changed")
    for name in list(program.environment):
        if name.startswith(("AWS_", "AZURE_")) or name.lower().endswith("_proxy"):
            del program.environment[name]
    return program


@pytest.fixture
def with_fake(a_set: Program, s3: FakeS3) -> Program:
    a_set.environment.update(s3.environment)
    return a_set


def configure(program: Program, store: str, options: dict[str, str]) -> None:
    directory = program.home / ".config/wdsfs"
    directory.mkdir(parents=True)
    lines = [f'[store."{store}"]', *(f'{name} = "{value}"' for name, value in options.items())]
    (directory / "config.toml").write_text("\n".join(lines))
    (directory / "config.toml").chmod(0o600)


def commit(program: Program, *more: str, output: str = PATTERN, **options: Any) -> tuple[str, str]:
    done = program.run("commit", "--overlay", "o", "-o", output, *more, *SHARDS, **options)
    return done.stdout.decode(), done.stderr.decode()


def expected(program: Program) -> dict[str, bytes]:
    """What the same commit writes to files."""
    commit(program, output="here/t-%d.tar")
    return {name: (program.home / "here" / os.path.basename(name)).read_bytes() for name in NAMES}


def outputs(program: Program) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((program.home / "o/outputs.json").read_text())["shards"]
    return found


def left_over(program: Program) -> list[Path]:
    """Files in the place from where shards are sent that are none of the cache's."""
    [place] = program.home.rglob("cache")
    return [path for path in place.iterdir() if path.suffix not in (".note", ".data", ".table", "")]


def fetched(server: Server, scheme: str, key: str) -> tuple[bytes, Message]:
    """Content and headers of an object, without wdsfs."""
    url = f"{server.url}/{BUCKET}/{quote(key)}?{servers.azure_signature()}"
    with urllib.request.urlopen(servers.sign(server, key) if scheme == "s3" else url, timeout=PATIENCE) as answer:
        return answer.read(), answer.headers


@pytest.mark.parametrize("scheme", ["s3", "az"])
def test_the_objects_have_the_bytes_that_files_have(
    a_set: Program, request: pytest.FixtureRequest, scheme: str
) -> None:
    server: Server = request.getfixturevalue({"s3": "seaweedfs", "az": "azurite"}[scheme])
    configure(a_set, f"{scheme}://{BUCKET}", server.options)
    wanted = expected(a_set)
    place = f"{scheme}://{BUCKET}/{a_set.home.name}"
    said, _ = commit(a_set, "--jobs", "2", output=f"{place}/t-%d.tar")
    assert said.startswith("shards: 1 rewritten, 2 copied; 60 samples")
    found = {one["path"]: one for one in outputs(a_set)}
    assert found[f"{place}/t-0.tar"]["size"] == len(wanted[NAMES[0]])
    for name in NAMES:
        assert fetched(server, scheme, f"{a_set.home.name}/{os.path.basename(name)}")[0] == wanted[name]
    said, _ = commit(a_set, "--executor", "tests.work:threads", output=f"{place}/t-%d.tar")
    assert "3 of these existed already" in said
    # Over its own output the overlay would be committed twice.
    refused = a_set.run("diff", "--overlay", "o", f"{place}/t-{{0..2}}.tar", code=8).stderr
    assert f"{place}/t-0.tar was written by a commit of the overlay" in refused.decode()
    a_set.write("p/upper/t-1/003/jpg", b"changed")
    # Elsewhere in the bucket the store makes the copies.
    a_set.run("commit", "--overlay", "p", "-o", f"{place}/again/u-%d.tar", f"{place}/t-{{0..2}}.tar")
    for number, is_copy in ((0, True), (1, False), (2, True)):
        content, headers = fetched(server, scheme, f"{a_set.home.name}/again/u-{number}.tar")
        assert (content == wanted[NAMES[number]]) == is_copy
        assert (headers["ETag"].endswith('-1"') if scheme == "s3" else "x-ms-copy-id" in headers) == is_copy
    replaced = a_set.run("commit", "--overlay", "p", "--in-place", f"{place}/t-{{0..2}}.tar").stdout
    assert replaced.startswith(b"shards: 1 rewritten; 20 samples")
    assert a_set.run("cat", f"{place}/t-1.tar", "t-1/003/jpg").stdout == b"changed"


@pytest.mark.parametrize("scheme", ["gs", "ais"])
def test_stores_whose_conditions_or_paths_are_others(a_set: Program, s3: FakeS3, scheme: str) -> None:
    """There is no AIStore here, and the emulator of Google's store has no such uploads."""
    a_set.environment.pop("STORAGE_EMULATOR_HOST", None)
    configure(a_set, f"{scheme}://", {"endpoint": s3.web.url, **({"token": SECRET} if scheme == "gs" else {})})
    wanted, urls = expected(a_set), [f"{scheme}://{BUCKET}/{name}" for name in NAMES]
    output = f"{scheme}://{BUCKET}/new/t-%d.tar"
    if scheme == "ais":
        commit(a_set, *PARTS, output=output)
        assert s3.begun == len(NAMES)
    commit(a_set, output=output)
    assert s3.objects == wanted
    assert "3 of these existed already" in commit(a_set, output=output)[0]
    a_set.write("p/upper/t-1/003/jpg", b"changed")

    def newer_one_of_somebody_else(key: str, _: bytes) -> None:
        s3.store(key, wanted[NAMES[2]])

    s3.faults.append(newer_one_of_somebody_else)
    a_set.run("commit", "--overlay", "p", "--in-place", *urls, code=7)
    assert s3.objects[NAMES[1]] == wanted[NAMES[2]]
    a_set.run("commit", "--overlay", "p", "--abandon", *urls)
    a_set.run("commit", "--overlay", "p", "--in-place", *urls)
    assert tars.by_webdataset(s3.objects[NAMES[1]])[3]["jpg"] == b"changed"
    s3.store("other/t-1.tar", b"somebody else's")
    commit(a_set, output=f"{scheme}://{BUCKET}/other/t-%d.tar", code=7)
    assert s3.objects["other/t-1.tar"] == b"somebody else's"


def test_a_name_that_is_taken_stops_the_commit_before_anything_is_sent(with_fake: Program, s3: FakeS3) -> None:
    s3.store(NAMES[1], b"somebody else's")
    _, said = commit(with_fake, code=7)
    assert f"{PATTERN.replace('%d', '1')} exists already with other content" in said
    assert not s3.puts
    assert s3.objects == {NAMES[1]: b"somebody else's"}


@pytest.mark.parametrize(("parts", "replaces"), [((), False), (PARTS, False), (PARTS, True)])
def test_an_object_that_appears_meanwhile_is_not_overwritten(
    with_fake: Program, s3: FakeS3, parts: tuple[str, ...], replaces: bool
) -> None:
    """Nor are parts joined, if it appears before the last ones."""

    def appears(key: str, about: Any) -> None:
        if not parts or about == 3:
            s3.store(key, b"newer")

    if parts:
        s3.on_part = appears
    else:
        s3.faults.append(appears)
    for shard in SHARDS if replaces else ():
        s3.store(shard, (with_fake.home / shard).read_bytes())
    if replaces:
        in_place(with_fake, "--in-place", *parts, code=7)
    else:
        _, said = commit(with_fake, *parts, "--jobs", "1", code=7)
        assert "s3://bucket/new/t-0.tar exists already" in said
    assert s3.objects["s0.tar" if replaces else NAMES[0]] == b"newer"
    assert not s3.uploads
    assert not (parts and s3.puts)


@pytest.mark.parametrize("how", [("--jobs", "1"), ("--executor", "tests.work:threads"), ("--jobs", "1", *PARTS)])
def test_an_answer_that_is_lost_is_no_error(with_fake: Program, s3: FakeS3, how: tuple[str, ...]) -> None:
    """Of an object in parts, a part is sent again, too, and an error of status 200 is one."""

    def lost(key: str, content: bytes) -> Answer:
        s3.store(key, content)
        s3.uploads.clear()
        raise ConnectionResetError

    s3.faults.append(lost)
    in_parts = how[-2:] == PARTS
    if in_parts:
        s3.part_faults.append((503, {}, b"<Error><Code>SlowDown</Code></Error>"))
        s3.faults.append(lambda *_: (200, {}, b"<Error><Code>InternalError</Code></Error>"))
    wanted = expected(with_fake)
    commit(with_fake, *how)
    assert s3.objects == wanted
    assert sorted(set(s3.puts)) == NAMES
    assert len(s3.puts) == len(NAMES) + 1
    assert (s3.begun, s3.uploads) == (len(NAMES) * in_parts, {})


def test_a_store_that_is_busy_is_asked_again(with_fake: Program, s3: FakeS3) -> None:
    s3.faults += [lambda *_: (503, {}, b"<Error><Code>SlowDown</Code></Error>")] * 2
    shown = with_fake.on_terminal(*ONE_BY_ONE)
    assert b"packing and sending" in shown
    assert s3.puts == [NAMES[0], NAMES[0], *NAMES]


def test_a_sum_that_is_no_md5_has_the_object_read_back(with_fake: Program, s3: FakeS3) -> None:
    s3.etag = lambda content: f"kms-{len(content)}"
    wanted = expected(with_fake)
    commit(with_fake)
    assert s3.objects == wanted
    assert {request.path.removeprefix("/bucket/") for request in s3.web.gets()} == set(NAMES)


@pytest.mark.parametrize("parts", [(), PARTS])
def test_an_object_that_is_not_what_was_sent_is_an_error(
    with_fake: Program, s3: FakeS3, parts: tuple[str, ...]
) -> None:
    def damages(key: str, content: bytes) -> Answer:
        etag = str(s3.store(key, content[:5000] + b"x" + content[5001:]).etag)
        return joined_parts(key, etag) if parts else (200, {"ETag": etag}, b"")

    s3.faults.append(damages)
    _, said = commit(with_fake, "--jobs", "1", *parts, code=3)
    assert "s3://bucket/new/t-0.tar: the store has other bytes" in said
    assert list(s3.objects) == NAMES[:1]
    assert not left_over(with_fake)


@pytest.mark.parametrize("whom", ["command", "fetcher"])
def test_a_commit_that_is_killed_sends_only_the_rest_when_it_is_repeated(
    with_fake: Program, s3: FakeS3, whom: str
) -> None:
    wanted = expected(with_fake)
    s3.hangs = NAMES[2]
    with with_fake.start(*ONE_BY_ONE) as process:
        wait_until(lambda: NAMES[2] in s3.hanging, "the upload of the last shard")
        assert list(s3.objects) == NAMES[:2]
        if whom == "fetcher":  # then the command starts another one, and goes on
            s3.hangs = None
            os.kill(child_of(process), signal.SIGKILL)
            assert process.wait(PATIENCE) == 0
            assert s3.puts == [*NAMES, NAMES[2]]
            assert s3.objects == wanted
            return
        process.kill()
    s3.hangs = None
    s3.puts.clear()
    said, _ = commit(with_fake)
    assert "2 of these existed already" in said
    assert s3.puts == NAMES[2:]
    assert s3.objects == wanted


def child_of(process: subprocess.Popen[bytes]) -> int:
    [child] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(child)


def test_an_interrupt_ends_an_upload(with_fake: Program, s3: FakeS3) -> None:
    s3.hangs = NAMES[1]
    with with_fake.start(*ONE_BY_ONE, stderr=subprocess.PIPE) as process:
        wait_until(lambda: NAMES[1] in s3.hanging, "the upload of the second shard")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE)
        assert process.returncode == 130
    assert b"finished shards are kept: repeat the command, and it continues" in said
    assert list(s3.objects) == NAMES[:1]
    assert not left_over(with_fake)


def test_a_store_that_refuses(a_set: Program, seaweedfs: Server) -> None:
    configure(a_set, "s3://", {**seaweedfs.options, "secret_access_key": "wrong-s3cr3t"})
    _, said = commit(a_set, code=3)
    assert "its store refuses it (403" in said
    assert "s3cr3t" not in said
    assert KEY not in said


@pytest.mark.parametrize(
    "output",
    [
        *(
            f"https://user:{SECRET}@host/t-%d.tar?sig={SECRET}",
            "hf://datasets/a/b/t-%d.tar",
            f"s3://{BUCKET}/new/",
        ),
        *(f"s3://{BUCKET}/t-%d.tar.gz", PATTERN + " --link", PATTERN + " --export dali"),
    ],
)
def test_places_that_cannot_be_written(a_set: Program, output: str) -> None:
    place, *more = output.split()
    _, said = commit(a_set, *more, output=place, code=2)
    assert (more[0] if more else "--output") in said
    assert SECRET not in said


def test_remote_shards_are_sources(with_fake: Program, s3: FakeS3) -> None:
    wanted = expected(with_fake)
    for name in SHARDS:
        s3.store(name, (with_fake.home / name).read_bytes())
        (with_fake.home / name).unlink()
    with_fake.run("commit", "--overlay", "o", "-o", PATTERN, f"s3://{BUCKET}/s{{0..2}}.tar")
    assert {name: s3.objects[name] for name in NAMES} == wanted


def test_packed_shards_and_classes_go_to_a_store(with_fake: Program, s3: FakeS3) -> None:
    """With the bytes that files have. What is there is kept by the next run; something else is refused."""
    write(with_fake.home / "tree", CLASSES)
    arguments = ["pack", "--layout", "classes", "--maxcount", "2", "tree", "-o", "s3://bucket/new/%d.tar"]
    first, second = pack(with_fake.home / "tree", layout="classes", maxcount=2)
    s3.store("new/0.tar", first)
    assert with_fake.json(*arguments)["written"] == 1
    assert s3.objects == {"new/0.tar": first, "new/1.tar": second, "new/classes.txt": b"cat\ndog\n"}
    s3.store("new/1.tar", second[:-1] + b"x")
    assert "new/1.tar exists already with other content" in with_fake.refused(*arguments, code=7)


# --- in parts


@pytest.mark.parametrize(("scheme", "by_sas"), [("s3", False), ("az", False), ("az", True)])
def test_what_is_too_large_for_one_request_goes_in_parts(
    a_set: Program, request: pytest.FixtureRequest, scheme: str, by_sas: bool
) -> None:
    server: Server = request.getfixturevalue({"s3": "seaweedfs", "az": "azurite"}[scheme])
    options = {**server.options, "part_size": str(5 << 20)}
    if by_sas:
        del options["account_key"]
        options["sas_token"] = servers.azure_signature()
    configure(a_set, f"{scheme}://{BUCKET}", options)
    (a_set.home / "o/upper/s0/003/jpg").write_bytes(os.urandom(11 << 20))
    wanted = expected(a_set)
    directory = f"{a_set.home.name} +é"
    place = f"{scheme}://{BUCKET}/{directory}"
    commit(a_set, "--jobs", "2", output=f"{place}/t-%d.tar")
    for name in NAMES:
        content, headers = fetched(server, scheme, f"{directory}/{os.path.basename(name)}")
        assert content == wanted[name]
        assert scheme == "az" or headers["ETag"].endswith('-3"') == (len(content) > 11 << 20)
    assert "3 of these existed already" in commit(a_set, output=f"{place}/t-%d.tar")[0]
    a_set.write("p/upper/t-0/004/jpg", b"changed")
    a_set.run("commit", "--overlay", "p", "--in-place", f"{place}/t-{{0..2}}.tar")
    assert a_set.run("cat", f"{place}/t-0.tar", "t-0/004/jpg").stdout == b"changed"


def test_what_somebody_else_writes_while_the_last_parts_are_on_their_way_is_replaced(
    with_fake: Program, s3: FakeS3
) -> None:
    """obstore has no condition for the request that joins parts."""

    def appears(key: str, _: bytes) -> None:
        s3.store(key, b"newer")

    s3.faults.append(appears)
    commit(with_fake, *PARTS, "--jobs", "1")
    assert s3.objects == expected(with_fake)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_parts_of_a_command_that_ends_are_aborted(with_fake: Program, s3: FakeS3, how: int) -> None:
    s3.part_hangs = 2
    with with_fake.start(*ONE_BY_ONE, *PARTS) as process:
        wait_until(lambda: s3.hanging, "a part that hangs")
        process.send_signal(how)
        process.wait(PATIENCE)
        s3.end.set()  # an upload is aborted when the next part would be sent
        wait_until(lambda: not s3.uploads, "the upload to be aborted")
    assert not s3.objects
    assert not left_over(with_fake)


def test_after_a_kill_of_the_fetcher_an_upload_begins_again_and_parts_are_left(
    with_fake: Program, s3: FakeS3
) -> None:
    s3.part_hangs = 2
    with with_fake.start(*ONE_BY_ONE, *PARTS) as process:
        wait_until(lambda: s3.hanging, "a part that hangs")
        s3.part_hangs = None
        os.kill(child_of(process), signal.SIGKILL)
        assert process.wait(PATIENCE) == 0
    assert s3.begun == len(NAMES) + 1
    assert len(s3.uploads) == 1  # for a rule of the bucket
    assert s3.objects == expected(with_fake)


# --- in place

URLS = f"s3://{BUCKET}/s{{0..2}}.tar"


@pytest.fixture
def in_store(with_fake: Program, s3: FakeS3) -> Program:
    """The set in a store, and an overlay that changes two of its shards and adds one."""
    for name in SHARDS:
        s3.store(name, (with_fake.home / name).read_bytes())
        (with_fake.home / name).unlink()
    for path in ("s2/004/jpg", "more/x/jpg"):
        with_fake.write(f"o/upper/{path}", b"new")
    return with_fake


def in_place(program: Program, *more: str, **options: Any) -> tuple[str, str]:
    done = program.run("commit", "--overlay", "o", *(more or ("--in-place",)), "--jobs", "1", URLS, **options)
    return done.stdout.decode(), done.stderr.decode()


def changes(program: Program) -> list[str]:
    return program.run("diff", "--overlay", "o", URLS, code=None).stdout.decode().splitlines()


@pytest.fixture(params=["here", "elsewhere"])
def anywhere(request: pytest.FixtureRequest, in_store: Program) -> Program:
    """The same; the new shards are written and sent by this process, or as units of work of an executor."""
    if request.param == "elsewhere":
        in_store.environment["WDSFS_EXECUTOR"] = "tests.work:threads"
    return in_store


def test_shards_in_a_store_are_replaced(anywhere: Program, s3: FakeS3) -> None:
    in_store, old = anywhere, s3.objects
    said, _ = in_place(in_store)
    assert said.startswith("shards: 2 rewritten, 1 new; 41 samples")
    assert s3.puts == ["s0.tar", "s2.tar", "s3.tar"]
    assert tars.by_webdataset(s3.objects["s0.tar"])[3]["jpg"] == b"changed"
    assert tars.by_webdataset(s3.objects["s2.tar"])[4]["jpg"] == b"new"
    assert [sample["__key__"] for sample in tars.by_webdataset(s3.objects["s3.tar"])] == ["x"]
    assert s3.objects["s1.tar"] == old["s1.tar"]
    s3.web.requests.clear()
    assert in_store.run("cat", f"s3://{BUCKET}/s2.tar", "s2/004/jpg").stdout == b"new"
    assert not s3.web.gets()  # what was sent is in the cache
    assert changes(in_store) == []
    assert in_place(in_store)[0] == "the overlay changes no shard\n"


def test_a_shard_that_is_replaced_meanwhile_is_not_lost(in_store: Program, s3: FakeS3) -> None:
    newer = tars.tar(tars.member(b"newer.jpg", b"newer"))

    def appears(key: str, _: bytes) -> None:
        s3.store(key, newer)

    s3.faults += [lambda *_: None, appears]
    s3.hangs = "s3.tar"
    _, said = in_place(in_store, code=7)
    assert f"s3://{BUCKET}/s2.tar was changed by another program meanwhile" in said
    assert s3.objects["s2.tar"] == newer
    _, said = in_place(in_store, code=7)
    assert "so it cannot be finished: end it by --abandon instead of --in-place" in said
    said, _ = in_place(in_store, "--abandon")
    assert said.startswith("abandoned: 1 of 3 shards written")
    assert s3.objects["s2.tar"] == newer
    assert changes(in_store) == ["added    s2/004", "added    more/x"]


@pytest.mark.parametrize(
    ("anywhere", "etag"),
    [("here", "md5"), ("here", "other"), ("elsewhere", "md5")],
    indirect=["anywhere"],
)
@pytest.mark.parametrize("stored", [False, True])
def test_a_commit_in_place_that_is_killed_is_finished_by_the_next(
    anywhere: Program, s3: FakeS3, stored: bool, etag: str
) -> None:
    in_store = anywhere
    if etag == "other":
        s3.etag = lambda content: f"other-{hashlib.sha256(content).hexdigest()}"

    def arrives(key: str, content: bytes) -> None:
        if stored:
            s3.store(key, content)
        s3.hangs = key

    s3.faults += [lambda *_: None, arrives]
    with in_store.start("commit", "--overlay", "o", "--in-place", "--jobs", "1", URLS) as process:
        wait_until(lambda: s3.hanging, "the upload of the second shard")
        process.kill()
    s3.hangs = None
    s3.puts.clear()
    assert "was stopped half-way" in in_store.run("diff", "--overlay", "o", URLS, code=7).stderr.decode()
    in_place(in_store)
    assert s3.puts == ["s3.tar"] if stored else ["s2.tar", "s3.tar"]
    assert tars.by_webdataset(s3.objects["s2.tar"])[4]["jpg"] == b"new"
    assert changes(in_store) == []


def test_a_mount_shows_the_replaced_shards(in_store: Program, s3: FakeS3) -> None:
    with in_store.mounted("--overlay", "o", URLS) as mounted:
        assert (mounted.path / "s1/000/jpg").read_bytes() == b"\1" * 3000
        (mounted.path / "s1/000/jpg").write_bytes(b"by the mount")
        shutil.rmtree(mounted.path / "s2/005")
        in_store.run("commit", "--in-place", mounted.path)
        assert sorted(os.listdir(mounted.path)) == ["s0", "s1", "s2", "s3"]
        assert (mounted.path / "s0/003/jpg").read_bytes() == b"changed"
        assert (mounted.path / "s1/000/jpg").read_bytes() == b"by the mount"
        assert (mounted.path / "s3/x/jpg").read_bytes() == b"new"
        assert not (mounted.path / "s2/005").exists()
        assert not list((in_store.home / "o/upper").iterdir())
    assert tars.by_webdataset(s3.objects["s1.tar"])[0]["jpg"] == b"by the mount"


def test_a_place_without_room_for_a_shard_is_named_before_anything_is_sent(with_fake: Program, s3: FakeS3) -> None:
    with a_disk(with_fake, "tmpfs") as disk:
        (disk / "cache").mkdir(mode=0o700)
        free = os.statvfs(disk)
        (disk / "full").write_bytes(bytes(free.f_bavail * free.f_bsize - 120_000))
        with_fake.environment["WDSFS_CACHE_DIR"] = str(disk / "cache")
        _, said = commit(with_fake, "--jobs", "2", code=7)
        assert f"{disk}/cache: 1" in said
        assert "bytes are needed for shards before they are sent" in said
        assert not s3.puts
