"""What another release has written: samples of every format that are read, newer versions that are refused.

`tests/data/formats-VERSION` are samples as that release wrote them (`format_samples.py`). They are never changed.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import tars
from tests.conftest import Program
from tests.format_samples import HERE, PIN, SHARDS, TIME, URL, files_of, put_back
from tests.kernel.mounts import end_mount, need_erofs
from tests.packing.overlays import EDITS, FIRST, SECOND, Set
from tests.packing.overlays import files_of as files_in
from tests.processes import wait_until
from wdsfs import host, mount_registry
from wdsfs.formats import Format
from wdsfs.index import index_directory, record, store
from wdsfs.index.record import Record
from wdsfs.index.record_of_file import build_file
from wdsfs.index.store import open_index
from wdsfs.kernel import manifest
from wdsfs.names import PLAIN, Reading
from wdsfs.overlay import overlay_directory, overlay_shards
from wdsfs.packing import replacement
from wdsfs.remote import cached_object
from wdsfs.remote.object_cache import ObjectCache
from wdsfs.shards import Fingerprint
from wdsfs.spec import portable_head

ROOT = Path(__file__).parent.parent
SAMPLES = sorted((ROOT / "tests/data").glob("formats-*"))
PAGE = ROOT / "docs/reference/formats.md"
FORMATS = [
    *(record.RECORD, index_directory.INDEX, portable_head.WDSIDX, overlay_directory.OVERLAY),
    *(overlay_shards.OUTPUTS, replacement.JOURNAL, cached_object.CACHED_OBJECT, manifest.IMAGE),
    mount_registry.PROTOCOL,
]
SET = "pets-{0..1}.tar"
# What the edits of the samples make of the set.
COMMITTED = [
    {"cat": {"txt": b"a big cat", "cls": b"0", "json": b"{}"}, "dog": {"txt": b"another dog"}},
    {"d/emu": {"txt": b"an emu"}, "wolf": {"txt": b"a fox"}, "yak": {"txt": b"a yak"}},
]


@pytest.fixture(params=SAMPLES, ids=lambda path: path.name)
def samples(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


@pytest.fixture
def shards(samples: Path, program: Program) -> Path:
    """The directory of a program, with the shards of the samples."""
    for name in SHARDS:
        shutil.copy(samples / name, program.home / name)
        os.utime(program.home / name, (TIME, TIME))
    return program.home


def committed(home: Path, pattern: str = "pets-?.tar") -> list[dict[str, dict[str, bytes]]]:
    """The samples of the shards in a directory."""
    contents = (path.read_bytes() for path in sorted(home.glob(pattern)))
    found = [{one.pop("__key__"): one for one in tars.by_webdataset(tar)} for tar in contents]
    return [
        {key: {name: one for name, one in sample.items() if name[:2] != "__"} for key, sample in shard.items()}
        for shard in found
    ]


def test_samples_are_never_changed(samples: Path) -> None:
    lines = (samples / "SHA256SUMS").read_text().splitlines()
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in files_of(samples)]
    assert sums == lines


def test_the_newest_samples_are_of_these_versions() -> None:
    """A format whose version goes up needs new samples."""
    newest = max(SAMPLES, key=lambda path: [*map(int, path.name.removeprefix("formats-").split("."))])
    overlay, half_done = ((newest / f"{name}.json").read_text() for name in ("overlay", "half-done"))
    registration, *_ = json.loads((newest / "control.json").read_text())
    image = (newest / "set.erofs").read_bytes()
    written = {
        record.RECORD: re.search(rb'"format":(\d+)', (newest / "record.bin").read_bytes()),
        overlay_directory.OVERLAY: re.search(r'version\\": (\d+),\\n \\"layout', overlay),
        replacement.JOURNAL: re.search(r'version\\": (\d+),\\n \\"sources', half_done),
        manifest.IMAGE: re.search(rb'"format":(\d+)', image),
        mount_registry.PROTOCOL: re.search(r"(\d+)", str(registration["protocol"])),
        # Version 2 is only of sets with --key-ends last-dot.
        Format("an index", (1,)): re.search(r"(\d+)", str((newest / "set.wdsidx").read_bytes()[8])),
    }
    for form, match in written.items():
        assert match, form
        assert int(match[1]) == form.version, form


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_the_page_says_versions_and_ways_out(form: Format) -> None:
    text = " ".join(PAGE.read_text().split())
    reads = ", ".join(map(str, form.reads))
    assert re.search(rf"\| {form.name} \|[^|]*\|[^|]*\| {reads} \|", text), (form.name, reads)
    assert form.way_out.replace("`", "") in text.replace("`", "")


# --- caches: read if they can be, else made again, without a word


def bumped(packed: bytes, version: int) -> bytes:
    """A record that says that it is of this version."""
    length = int.from_bytes(packed[16:20], "little")
    head = packed[20 : 20 + length].replace(b'"format":%d' % record.RECORD.version, b'"format":%d' % version)
    assert len(head) == length
    body = packed[16:20] + head + packed[20 + length :]
    return packed[:8] + zlib.crc32(body).to_bytes(8, "little") + body


def test_a_record(samples: Path, shards: Path) -> None:
    stored = Record((samples / "record.bin").read_bytes())
    fresh = Record(build_file(os.fsencode(shards / "pets-0.tar")))
    assert stored.checksum() == fresh.checksum()
    assert (stored.samples, stored.members) == (2, 4)


def test_an_index_directory(samples: Path, tmp_path: Path) -> None:
    (tmp_path / "index").mkdir(mode=0o700)
    shutil.copy(samples / "index.mdb", tmp_path / "index/data.mdb")
    fingerprint = Record((samples / "record.bin").read_bytes()).fingerprint
    index = open_index(tmp_path / "index")
    with contextlib.closing(index):
        assert index.notices == []
        stored = index.record(b"/shards/pets-0.tar", fingerprint)
        assert stored is not None
        assert stored.samples == 2


def test_a_newer_index_and_a_newer_record_are_made_again(
    samples: Path, shards: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = os.fsencode(shards / "pets-0.tar")
    later = index_directory.INDEX.version + 1
    for changed in ("directory", "record"):
        with monkeypatch.context() as patch:
            if changed == "directory":
                patch.setattr(index_directory, "_FORMAT", b"%d" % later)
            index = open_index(shards / "index")
            index.store([(path, build_file(path))])
            if changed == "record":
                index._write([(b"r" + store._digest(path), bumped(build_file(path), record.RECORD.version + 1))])
            index.close()
        done = program.run("ls", "pets-0.tar", "pets-0/cat")
        assert sorted(done.stdout.split()) == [b"cls", b"txt"]
        assert all(b": indexing " in line for line in done.stderr.splitlines()), (changed, done.stderr)


@pytest.fixture
def cached(samples: Path, tmp_path: Path) -> Path:
    put_back(json.loads((samples / "cache.json").read_text()), tmp_path / "cache")
    (tmp_path / "cache").chmod(0o700)
    return tmp_path / "cache"


def test_a_cached_object(samples: Path, cached: Path) -> None:
    """One of a newer version is fetched again."""
    content = (samples / "pets-0.tar").read_bytes()[: PIN.size]
    with contextlib.closing(ObjectCache(cached, 1 << 40).open(URL, PIN)) as one:
        assert one.read(PIN.size, 0) == content
    [table] = cached.glob("*.table")
    with table.open("r+b") as file:
        file.write(b"wdsfs-o%c" % (cached_object.CACHED_OBJECT.version + 1))
    with contextlib.closing(ObjectCache(cached, 1 << 40).open(URL, PIN)) as one:
        assert one.missing(0, PIN.size) == [(0, PIN.size)]
        assert one.put(0, content)


# --- what a user has asked for: an index file, an image


def test_an_index_file(samples: Path, shards: Path, program: Program) -> None:
    """A newer one is refused."""
    shutil.copy(samples / "set.wdsidx", shards)
    report = program.json("index", "set.wdsidx")
    assert report["rebuilt"] == 0, report
    assert program.run("cat", "set.wdsidx", "pets-0/cat/txt").stdout == b"a cat"
    data = bytearray((samples / "set.wdsidx").read_bytes())
    data[8:12] = (portable_head.WDSIDX.version + 1).to_bytes(4, "little")
    (shards / "set.wdsidx").write_bytes(data)
    text = program.refused("ls", "set.wdsidx", code=2)
    assert "set.wdsidx is an index of version 3, by a newer wdsfs" in text
    assert portable_head.WDSIDX.way_out in text


def test_an_image(samples: Path, shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer one is refused."""
    shutil.copy(samples / "set.erofs", shards)
    image = os.fsencode(shards / "set.erofs")
    assert manifest.read_manifest(image).paths(image) == [str(shards / name) for name in SHARDS]
    monkeypatch.setattr(manifest, "IMAGE", manifest.IMAGE._replace(reads=(1, 2)))
    with pytest.raises(Exception, match=r"set.erofs is an image of version 3, by a newer wdsfs") as raised:
        manifest.read_manifest(image)
    assert manifest.IMAGE.way_out in str(raised.value)


@pytest.mark.fuse
@pytest.mark.root
def test_an_image_is_mounted(samples: Path, shards: Path, program: Program) -> None:
    shutil.copy(samples / "set.erofs", shards)
    program.engine = "fuse"  # an image says itself who serves it
    with program.mounted("set.erofs") as mounted:
        assert (mounted.path / "pets-1/d/emu/txt").read_bytes() == b"an emu"


# --- a user's work


def restored(samples: Path, name: str, home: Path) -> Path:
    """The overlay of a sample in `home`; its shards are those that lie there."""
    text = (samples / f"{name}.json").read_text().replace(HERE, str(home))
    put_back(json.loads(text), home / "edits")
    place = overlay_directory.OverlayDirectory(home / "edits")
    settings = overlay_directory.read_settings(place)
    assert settings is not None
    # Files of git have other times and numbers than those that the overlay was made over.
    seen = tuple(replace(shard, fingerprint=Fingerprint.at(shard.path)) for shard in settings.shards)
    overlay_directory.write_settings(place, replace(settings, shards=seen))
    return home / "edits"


def spoil(path: Path, version: int) -> bytes:
    """Give a JSON file another version; returns its bytes."""
    path.write_text(re.sub(r'"version": \d+', f'"version": {version}', path.read_text(), count=1))
    return path.read_bytes()


def everything(top: Path) -> dict[str, bytes | None]:
    """All files in a directory but locks, with their bytes, and all directories."""
    paths = (path for path in sorted(top.rglob("*")) if path.name != "lock")
    return {str(path): path.read_bytes() if path.is_file() else None for path in paths}


def test_an_overlay_is_committed(samples: Path, shards: Path, program: Program) -> None:
    restored(samples, "overlay", shards)
    changes = program.json("diff", "--overlay", "edits", SET)
    assert [row["path"] for row in changes["samples"] if row["kind"] == "added"] == ["pets-1/wolf", "pets-1/yak"]
    program.run("commit", "-q", "--overlay", "edits", "-o", "new/pets-%d.tar", SET)
    assert committed(shards / "new") == COMMITTED


@pytest.mark.fuse
def test_an_overlay_is_mounted(samples: Path, shards: Path, program: Program) -> None:
    restored(samples, "overlay", shards)
    with program.mounted("--overlay", "edits", SET) as mounted:
        assert (mounted.path / "pets-0/cat/txt").read_bytes() == b"a big cat"
        assert sorted(os.listdir(mounted.path / "pets-1")) == ["d", "wolf", "yak"]
        (mounted.path / "pets-0/cat/txt").write_bytes(b"a cat again")
    assert (shards / "edits/upper/pets-0/cat/txt").read_bytes() == b"a cat again"


@pytest.mark.fuse
@pytest.mark.parametrize("words", ["diff", "commit -o new/%d.tar", "commit --in-place", "mount -q"])
def test_a_newer_overlay_is_refused(samples: Path, shards: Path, program: Program, words: str) -> None:
    edits = restored(samples, "overlay", shards)
    spoil(edits / "overlay.json", 9)
    before = everything(edits)
    place = [program.mountpoint] if "mount" in words else []
    text = program.refused(*words.split(), "--overlay", "edits", SET, *place, code=8)
    assert "overlay.json is an overlay of version 9, by a newer wdsfs" in text
    assert overlay_directory.OVERLAY.way_out in text
    assert everything(edits) == before


DAMAGED = ["", "{", "[]", '{"version": 2}', '{"version": true}', '{"version": "2"}', "[" * 100_000]


@pytest.mark.parametrize("content", DAMAGED, ids=lambda content: content[:16])
def test_damaged_settings_of_an_overlay_are_refused(
    samples: Path, shards: Path, program: Program, content: str
) -> None:
    """Nothing is touched; what the message says brings the changes back."""
    edits = restored(samples, "overlay", shards)
    (edits / "overlay.json").write_text(content)
    before = everything(edits)
    for words in (["diff"], ["mount", "-q", "-o", "ro"], ["mount", "-q"], ["commit", "--in-place"]):
        place = [program.mountpoint] if words[0] == "mount" else []
        text = program.refused(*words, "--overlay", "edits", SET, *place, code=8)
        assert "overlay.json is " in text
        assert everything(edits) == before, words
    (edits / "overlay.json").rename(shards / "away")
    program.run("commit", "-q", "--overlay", "edits", "-o", "new/pets-%d.tar", SET)
    assert committed(shards / "new") == COMMITTED


@pytest.fixture
def half_done(samples: Path, shards: Path) -> Path:
    """An overlay whose commit in place was killed when it had replaced the first shard."""
    shutil.copy(samples / "half-done-0.tar", shards / "pets-0.tar")
    edits = restored(samples, "half-done", shards)
    journal, log = edits / "work/commit.json", edits / "work/commit.log"
    line = json.loads(log.read_text())
    # The log names the file that was written by its number, and the journal by its sum, both of that machine.
    line["file"][0] = (shards / "pets-0.tar").stat().st_ino
    line["commit"] = replacement._sum(journal.read_bytes())
    log.write_text(json.dumps(line) + "\n")
    return edits


def test_a_half_finished_commit_is_finished(half_done: Path, shards: Path, program: Program) -> None:
    first, second = (shards / name for name in SHARDS)
    before = [path.stat().st_ino for path in (first, second)]
    program.run("commit", "-q", "--in-place", "--overlay", "edits", SET)
    assert first.stat().st_ino == before[0], "done before the kill"
    assert second.stat().st_ino != before[1]
    assert committed(shards) == COMMITTED
    assert os.listdir(half_done / "upper") == []


def test_a_half_finished_commit_is_abandoned(half_done: Path, shards: Path, program: Program) -> None:
    program.run("commit", "-q", "--abandon", "--overlay", "edits", SET)
    assert (half_done / "upper/pets-1/yak/txt").read_bytes() == b"a yak"
    assert not (half_done / "upper/pets-0").exists()


NEWER = "unfinished commit of version 9, by a newer wdsfs"


@pytest.mark.parametrize("content", [*DAMAGED[:4], NEWER], ids=lambda content: content[:16])
def test_a_damaged_or_newer_half_finished_commit_is_refused(
    half_done: Path, shards: Path, program: Program, content: str
) -> None:
    """Nothing is touched; what the message says finishes it."""
    journal = half_done / "work/commit.json"
    right = journal.read_bytes()
    if content == NEWER:
        spoil(journal, 9)
    else:
        journal.write_text(content)
    before = everything(shards)
    for word in ("--in-place", "--abandon"):
        text = program.refused("commit", word, "--overlay", "edits", SET, code=7)
        assert f"commit.json is {'an ' + NEWER if content == NEWER else 'damaged'}" in text
        assert content != NEWER or replacement.JOURNAL.way_out in text
        after = everything(shards)
        assert {path: after[path] for path in before} == before
    if content == NEWER:
        journal.write_bytes(right)
    else:
        journal.rename(shards / "away")
    program.run("commit", "-q", "--in-place", "--overlay", "edits", SET)
    assert committed(shards) == COMMITTED


def test_a_newer_list_of_outputs_is_refused(samples: Path, shards: Path, program: Program) -> None:
    edits = restored(samples, "overlay", shards)
    program.run("commit", "-q", "--overlay", "edits", "-o", "new/pets-%d.tar", SET)
    spoil(edits / "outputs.json", 9)
    text = program.refused("commit", "--overlay", "edits", "-o", "more/%d.tar", SET, code=8)
    assert "outputs.json is a list of outputs of version 9, by a newer wdsfs" in text
    assert overlay_shards.OUTPUTS.way_out in text


# --- live mounts


def conversation(samples: Path, home: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The registration of a daemon of that release, and its answers by the word of the request."""
    registration, *lines = json.loads((samples / "control.json").read_text().replace(HERE, str(home)))
    return registration, {request["do"]: answer for request, answer in zip(lines[::2], lines[1::2], strict=True)}


@contextlib.contextmanager
def daemon_of(samples: Path, program: Program, **changed: Any) -> Iterator[None]:
    """A registered daemon that answers what one of that release has answered, alive like this process."""
    registration, answers = conversation(samples, program.home)
    registration |= {"pid": os.getpid(), "start_ticks": mount_registry.start_ticks(os.getpid()), **changed}
    file = program.registration(program.mountpoint)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.write_text(json.dumps({key: value for key, value in registration.items() if value is not ...}))
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        address = file.with_suffix(".sock")
        address.unlink(missing_ok=True)
        listener.bind(str(address))
        listener.listen()
        thread = threading.Thread(target=_answer, args=(listener, answers))
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            file.unlink(missing_ok=True)
            address.unlink(missing_ok=True)


def _answer(listener: socket.socket, answers: dict[str, dict[str, Any]]) -> None:
    with contextlib.suppress(OSError):
        while True:
            client, _ = listener.accept()
            with client, client.makefile("rb") as lines:
                request = json.loads(lines.readline())
                client.sendall(json.dumps(answers.get(request["do"], {})).encode() + b"\n")


@pytest.mark.parametrize("changed", [{}, {"protocol": ..., "wdsfs": ...}], ids=["as it was", "without a version"])
def test_a_daemon_of_another_release_is_asked(
    samples: Path, shards: Path, program: Program, changed: dict[str, Any]
) -> None:
    with daemon_of(samples, program, **changed):
        [report] = program.json("status", program.mountpoint)
        assert (report["state"], report["shards"], report["samples"]) == ("running", 2, 4)


def test_a_newer_daemon_is_not_asked(samples: Path, shards: Path, program: Program) -> None:
    later = mount_registry.PROTOCOL.version + 1
    with daemon_of(samples, program, protocol=later, wdsfs="9.0"):
        [report] = program.json("status", program.mountpoint)
        assert report["state"] == "running"
        assert "is a live mount of version 2, by a newer wdsfs" in report["notices"][0]
        text = program.refused("refresh", program.mountpoint, code=5)
        assert mount_registry.PROTOCOL.way_out in text


@pytest.mark.fuse
def test_a_client_of_another_release_is_answered(samples: Path, shards: Path, program: Program) -> None:
    """With the fields that it knows; and what this release does not know is refused."""
    with program.mounted("--overlay", "edits", SET) as mounted:
        told = json.loads(program.registration(mounted.path).read_text())
        registration = mount_registry.Registration.parse(told)
        _, answers = conversation(samples, program.home)
        with _runtime_of(program):
            for word, before in answers.items():
                with mount_registry.Talk(registration) as talk:
                    assert before.keys() <= talk.ask({"do": word}).keys(), word
            with mount_registry.Talk(registration) as talk:
                assert "which has no such request" in talk.ask({"do": "something else"})["error"]


@contextlib.contextmanager
def _runtime_of(program: Program) -> Iterator[None]:
    """Have this process look for sockets where the program makes them."""
    with pytest.MonkeyPatch.context() as patch:
        directory = program.registration(program.mountpoint).parent
        patch.setattr(host, "runtime_dir", lambda: directory)
        yield


# --- the programs of other releases: what they have mounted and edited, and what they make of a mount of this one

# The last commit without versions of formats, the first with them, and the last before the kernel's engine became
# a wing. A release is named by its tag.
BEFORE_WINGS = "b77e592"
RELEASES = ["de9fa6e1395d294a4cc365193475e122b2fbd1e9", "e64c72b", BEFORE_WINGS]


# The last whose kernel engine had overlays, copies of compressed shards, and links by number.
WITH_KERNEL_OVERLAYS = "7867125"


def program_of(commit: str, tree: Path) -> dict[str, str]:
    """The environment in which an interpreter runs the program of another release."""
    archive = subprocess.run(["git", "archive", commit, "wdsfs"], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip("no history of git here")
    subprocess.run(["tar", "x"], cwd=tree, input=archive.stdout, check=True)
    return {"PYTHONPATH": str(tree)}


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return program_of(request.param, tmp_path_factory.mktemp("release"))


@pytest.fixture(scope="module")
def release_before(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    need_erofs()
    return program_of(WITH_KERNEL_OVERLAYS, tmp_path_factory.mktemp("release"))


@pytest.mark.fuse
def test_a_live_mount_of_another_release(release: dict[str, str], shards: Path, program: Program) -> None:
    """Its edits are seen and committed while it lives; then this release goes on with its overlay."""
    with program.mounted("--overlay", "edits", SET, env=release) as mounted:
        assert str(release["PYTHONPATH"]).encode() in Path(f"/proc/{mounted.pid}/environ").read_bytes()
        (mounted.path / "pets-0/cat/txt").write_bytes(b"a big cat")
        shutil.rmtree(mounted.path / "pets-1/fox")
        [report] = program.json("status", mounted.path)
        assert (report["state"], report["mode"], report["samples"]) == ("running", "rw", 4)
        changes = program.json("diff", mounted.path)
        assert [(row["kind"], row["path"]) for row in changes["samples"]] == [
            ("changed", "pets-0/cat"),
            ("removed", "pets-1/fox"),
        ]
        program.run("restore", "-q", mounted.path / "pets-1/fox")
        assert (mounted.path / "pets-1/fox/txt").read_bytes() == b"a fox"
        program.run("commit", "-q", "-o", "new/pets-%d.tar", mounted.path)
        (mounted.path / "pets-1/fox/cls").write_bytes(b"3")
    [first, second] = committed(shards / "new")
    assert (first["cat"]["txt"], second["fox"]) == (b"a big cat", {"txt": b"a fox"})
    with program.mounted("--overlay", "edits", SET) as mounted:
        assert (mounted.path / "pets-1/fox/cls").read_bytes() == b"3"
        program.run("commit", "-q", "--in-place", mounted.path)
        assert (mounted.path / "pets-1/fox/cls").read_bytes() == b"3"
    assert committed(shards)[1]["fox"] == {"txt": b"a fox", "cls": b"3"}


@pytest.mark.fuse
def test_a_release_before_is_answered(release: dict[str, str], shards: Path, program: Program) -> None:
    """A downgrade: the older program asks a mount of this release, ends it, and reads its overlay."""
    with program.mounted("--overlay", "edits", SET, ends_itself=True) as mounted:
        (mounted.path / "pets-0/cat/txt").write_bytes(b"a big cat")
        [report] = program.json("status", mounted.path, env=release)
        assert (report["state"], report["samples"]) == ("running", 4)
        program.run("commit", "-q", "-o", "new/pets-%d.tar", mounted.path, env=release)
        program.run("umount", mounted.path, env=release)
    assert committed(shards / "new")[0]["cat"]["txt"] == b"a big cat"
    with program.mounted("--overlay", "edits", SET, env=release) as mounted:
        assert (mounted.path / "pets-0/cat/txt").read_bytes() == b"a big cat"


# Stands in front of the program of another release: a commit in place dies when it has replaced one shard.
DYING = """
import os, signal
from wdsfs.cli.main import main
from wdsfs.storage.durable import Disk
rename = Disk.rename
def rename_and_die(disk, source, target):
    rename(disk, source, target)
    if target.endswith(b".tar"):
        os.kill(os.getpid(), signal.SIGKILL)
Disk.rename = rename_and_die
main(prog_name="wdsfs")
"""
SPLIT_UP = tars.tar(*(tars.member(b"%b.%b" % (k, e), k + e) for e in (b"cls", b"jpg") for k in (b"a", b"b")))
HALF_DONE: dict[str, tuple[list[bytes], Reading, dict[str, Any], tuple[str, ...]]] = {
    "plain": ([FIRST, SECOND], PLAIN, {**EDITS, "s1": {"e": {"cls": b"1"}}, "more": {"x": {"txt": b"x"}}}, ()),
    "sorted": ([FIRST, SECOND], PLAIN, {**EDITS, "s1": {"e": {"cls": b"1"}}}, ("--sort",)),
    "samples apart": ([SPLIT_UP, SPLIT_UP], Reading(group_by_key=True), {"s0": {"a": {"txt": b"new"}}}, ()),
}


@pytest.mark.parametrize("way", ["--in-place", "--abandon"])
@pytest.mark.parametrize("case", HALF_DONE)
def test_a_commit_that_the_build_before_began(
    case: str, way: str, program: Program, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It is finished as that build would, or ended; also with options that are gone: the journal has the plan."""
    contents, reading, edits, options = HALF_DONE[case]
    before = {**os.environ, **program.environment, **program_of(BEFORE_WINGS, tmp_path_factory.mktemp("release"))}
    here = Set(program.home, *contents, reading=reading).edit(edits)
    finished = Set(program.directory("finished"), *contents, reading=reading).edit(edits)
    words = ["commit", "--in-place", "-j", "1", *options, "--overlay", "o", "s{0..1}.tar"]
    subprocess.run([sys.executable, "-m", "wdsfs", *words], cwd=finished.home, env=before, check=True)
    done = subprocess.run([sys.executable, "-c", DYING, *words], cwd=here.home, env=before, check=False)
    assert done.returncode == -signal.SIGKILL
    assert here.set() not in (contents, finished.set())
    assert "was stopped half-way" in program.refused("diff", "--overlay", "o", "s{0..1}.tar", code=7)
    program.run("commit", way, "--overlay", "o", "s{0..1}.tar")
    if way == "--in-place":
        assert here.set() == finished.set()
        assert files_in(here.place.upper) == {}
        assert b"changes no shard" in program.run("commit", "--in-place", "--overlay", "o", "s{0..1}.tar").stdout
    else:
        left = program.run("diff", "--overlay", "o", "s{0..1}.tar").stdout.splitlines()
        expected = {"plain": [b"changed  s1/e +cls", b"added    more/x"], "sorted": [b"changed  s1/e +cls"]}
        assert left == expected.get(case, [])


def by_kernel(program: Program, before: dict[str, str], *words: str | Path) -> mount_registry.Registration:
    """Have the release before mount by the kernel; its guard."""
    program.run("mount", "-q", "--engine", "kernel", *words, program.mountpoint, env=before)
    with _runtime_of(program):
        guard = mount_registry.find_registration(str(program.mountpoint))
    assert guard is not None
    return guard


@pytest.mark.fuse
@pytest.mark.parametrize("is_guarded", [True, False], ids=["guarded", "guard killed"])
def test_a_kernel_overlay_of_the_release_before(
    is_guarded: bool, release_before: dict[str, str], shards: Path, program: Program
) -> None:
    """It is shown and ended, and nothing else; then FUSE goes on with the overlay."""
    top = program.mountpoint
    try:
        guard = by_kernel(program, release_before, "--overlay", "edits", SET)
        (top / "pets-0/cat/txt").write_bytes(b"a big cat")
        shutil.rmtree(top / "pets-1/fox")
        (top / "pets-0/yak").mkdir()
        (top / "pets-0/yak/txt").write_bytes(b"a yak")
        if not is_guarded:
            os.kill(guard.pid, signal.SIGKILL)
            wait_until(lambda: not guard.alive, "the guard to die")
        [report] = program.json("status", top)
        assert (report["engine"], report["mode"], report["overlay"]) == ("kernel", "rw", str(shards / "edits"))
        assert "an earlier wdsfs mounted its overlay by the kernel" in report["notices"][0]
        for words in (["diff"], ["commit", "-o", "new/%d.tar"], ["restore", "--all"], ["view", "--no-browser"]):
            assert f"wdsfs umount {top}" in program.refused(*words, top, code=5)
        assert f"wdsfs umount {top}" in program.refused("where", top / "pets-0/cat/txt", code=5)
        message = program.refused("mount", "--overlay", "edits", SET, program.directory("other"), code=8)
        assert "is in use" in message
        program.run("umount", top)
        wait_until(lambda: not guard.alive, "the guard to end")
    finally:
        end_mount(top)
    with program.mounted("--overlay", "edits", SET) as mounted:
        assert (mounted.path / "pets-0/cat/txt").read_bytes() == b"a big cat"
        program.run("commit", "-q", "--in-place", mounted.path)
        assert sorted(os.listdir(mounted.path / "pets-1")) == ["d"]
    first, second = committed(shards)
    assert (first["cat"]["txt"], first["yak"], "fox" in second) == (b"a big cat", {"txt": b"a yak"}, False)


@pytest.mark.fuse
def test_a_kernel_mount_of_the_release_before(
    release_before: dict[str, str], shards: Path, program: Program
) -> None:
    """Of a plain set all goes on; one over copies is shown and ended."""
    (shards / "packed.tar.gz").write_bytes(gzip.compress((shards / "pets-0.tar").read_bytes()))
    try:
        by_kernel(program, release_before, "--index-tree", SET)
        [report] = program.json("status", program.mountpoint)
        assert (report["state"], report["shards"], report["index_tree"]) == ("served by the kernel", 2, True)
        [found] = program.json("where", program.mountpoint / "pets-0/cat/txt")
        assert found["key"] == "cat"
        [found] = program.json("where", program.mountpoint / "by-index/000/000/000000")
        assert found["key"] == "cat"
        program.run("umount", program.mountpoint)
        by_kernel(program, release_before, "packed.tar.gz")
        [report] = program.json("status", program.mountpoint)
        assert "mount the shards themselves: wdsfs mount" in report["notices"][0]
        image = report["image"]
        program.run("umount", program.mountpoint)
        message = program.refused("mount", image, program.mountpoint, code=5)
        assert "mount the shards themselves: wdsfs mount" in message
    finally:
        end_mount(program.mountpoint)


@pytest.mark.fuse
def test_a_kernel_mount_from_before_the_wings(
    shards: Path, program: Program, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One whose guard is gone is guarded by this release."""
    need_erofs()
    before, top = program_of(BEFORE_WINGS, tmp_path_factory.mktemp("release")), program.mountpoint
    try:
        guard = by_kernel(program, before, SET)
        os.kill(guard.pid, signal.SIGKILL)
        wait_until(lambda: not guard.alive, "the guard to die")
        program.run("mount", "-q", "--engine", "kernel", SET, top)
        [report] = program.json("status", top)
        assert report["pid"] != guard.pid
        assert report["notices"] == []
        program.run("umount", top)
    finally:
        end_mount(top)
