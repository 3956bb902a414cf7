"""Portable indexes: written, moved with their shards, believed or not, damaged and hostile."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import random
import re
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import sets, tars
from tests.conftest import descriptors
from wdsfs import source
from wdsfs.door.pins import Pin
from wdsfs.door.shard_door import DOOR
from wdsfs.errors import SpecError, StaleShard, UsageError
from wdsfs.index import portable, record_builder, record_check
from wdsfs.index.portable import Match, attached
from wdsfs.index.portable_writer import checked_target, write_index
from wdsfs.index.record import RECORD, Record
from wdsfs.index.record_builder import restamped
from wdsfs.index.record_of_file import build_file
from wdsfs.index.store import Index, Needed, Summary, open_index
from wdsfs.names import PLAIN, Reading
from wdsfs.remote import object_cache
from wdsfs.remote.client import FetcherClient
from wdsfs.remote.remote_shards import RemoteShards
from wdsfs.shards import GONE, Fingerprint, Shard
from wdsfs.spec import portable_head
from wdsfs.spec.expand import expand
from wdsfs.spec.portable_head import HEADER_SIZE, ROW_SIZE, IndexFile, Row
from wdsfs.tree.indexing import NotIndexed, indexed
from wdsfs.tree.shard_set import ShardSet

DAY = 86_400 * 10**9


def write(directory: Path, shards: list[Shard], name: str = "set.wdsidx") -> Path:
    """Index these shards, and write their portable index into a directory."""
    index = open_index(directory / "made")
    index.portables = attached(shards)
    index.refresh([one for one, _ in index.stale(shards, Needed.PROVABLE)], needed=Needed.PROVABLE)
    write_index(index, shards, checked_target(str(directory / name)))
    index.close()
    return directory / name


def made(home: Path, count: int) -> tuple[Path, list[Shard]]:
    """Make shards in a directory, and their portable index."""
    shards = sets.make(home, count)
    return write(home, shards), shards


@contextlib.contextmanager
def opened(home: Path, shards: list[Shard]) -> Iterator[Index]:
    """An index that knows nothing, with what is beside the shards."""
    index = open_index(home)
    index.portables = attached(shards)
    yield index
    index.close()


def built(index: Index, shards: list[Shard]) -> list[bytes]:
    """The names of the shards that have to be built, and not only copied."""
    stale = [one for one, _ in index.stale(shards, Needed.USABLE)]
    copies = {one.path for one, _ in index._copies(stale, set(), exact=False)}
    return [one.name for one in stale if one.path not in copies]


def content(index: Index, shards: list[Shard]) -> list[bytes]:
    """The bytes of all members of a set, as its trees would give them."""
    below = ShardSet(shards, index)
    found = []
    for number in range(len(shards)):
        record = indexed(below.record, number)
        for member in range(record.members):
            one = below.content(number, below.tag(number), member)
            found.append(source.pread(one.file.source, one.size, one.data))
    below.release()
    return found


def true_content(shards: list[Shard]) -> list[bytes]:
    """The same, of records that are built from the shards."""
    found = []
    for one in shards:
        record, data = Record(build_file(one.path)), sets.path_of(one).read_bytes()
        extents = [record.extent(member) for member in range(record.members)]
        found += [data[begin : begin + size] for begin, size in extents]
    return found


def moved(home: Path, target: Path, keep: Callable[[str, str], object] = shutil.copy2) -> list[Shard]:
    """Copy a directory with shards and index; `keep` copies a file."""
    target.mkdir()
    for path in sorted(home.iterdir()):
        if path.is_file():
            keep(str(path), str(target / path.name))
    return [sets.at(path) for path in sorted(target.glob("*.tar"))]


def touched(path: str, target: str) -> None:
    """Copy a file without its time."""
    shutil.copyfile(path, target)
    os.utime(target, ns=(DAY, DAY))


def test_the_same_shards_give_the_same_bytes_wherever_they_are(tmp_path: Path) -> None:
    first = made(tmp_path / "a", 5)[0]
    data = first.read_bytes()
    second = moved(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "set.wdsidx").unlink()
    assert write(tmp_path / "b", second).read_bytes() == data
    assert os.fsencode(tmp_path) not in data


def test_a_record_that_is_damaged_is_not_passed_on(tmp_path: Path) -> None:
    """Nor one of an older format: its summary is valid all the same."""
    shards = sets.make(tmp_path / "a", 2)
    index = open_index(tmp_path / "made")
    index.refresh(shards)
    digest = hashlib.blake2b(shards[0].key, digest_size=16).digest()
    index._write([(b"r" + digest, build_file(shards[0].path)[:-1] + b"?")])
    assert list(index.stale(shards)) == []
    assert [one for one, _ in index.stale(shards, Needed.PROVABLE)] == shards[:1]
    index.close()


def test_what_is_in_the_file(tmp_path: Path) -> None:
    """As docs/reference/formats.md has it."""
    shards = sets.make(tmp_path / "a", 2)
    data = write(tmp_path / "a", shards).read_bytes()
    head = struct.unpack_from("<8sIIIIIQQI", data)
    assert head[:6] == (b"wdsfs-x\n", 1, RECORD.version, 0, 2, 0)
    table, size, crc = head[6:]
    assert size == len(data)
    assert crc == zlib.crc32(data[HEADER_SIZE : HEADER_SIZE + table])
    assert int.from_bytes(data[60:64], "little") == zlib.crc32(data[:60])
    texts = HEADER_SIZE + 2 * ROW_SIZE
    for number, one in enumerate(shards):
        row = struct.unpack_from("<QqQQIHHIIIIIIIQII", data, HEADER_SIZE + number * ROW_SIZE)
        found = os.stat(one.path)
        assert row[:2] == (found.st_size, found.st_mtime_ns)
        offset, length, crc, etag, version, path = row[2:8]
        assert offset % 8 == 0
        assert (etag, version) == (0, 0)
        assert data[texts : texts + path] == os.path.basename(one.path)
        texts += path
        record = data[offset : offset + length]
        assert crc == zlib.crc32(record[16:])
        assert record == restamped(build_file(one.path), Fingerprint(found.st_size, found.st_mtime_ns, 0))
        assert row[8:] == tuple(sets.right_summary(one))[3:]
    assert texts == HEADER_SIZE + table


def test_a_set_is_used_from_the_file_without_being_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = made(tmp_path / "a", 3)[0]
    shards = expand([str(file)])
    assert [one.name for one in shards] == [b"s0", b"s1", b"s2"]
    with opened(tmp_path / "new", shards) as index:
        assert list(index.stale(shards, Needed.USABLE)) == []
        for one in shards:
            now = Fingerprint.at(one.path)
            assert index.summary(one.key, now) == sets.right_summary(one)
            record = index.record(one.key, now)
            assert record is not None
            assert record.moved is None
            assert record.fingerprint == now
            assert sets.listing(record) == sets.listing(Record(build_file(one.path)))
            assert index.packed(one.key, now) is None, "nothing is copied"
        assert content(index, shards) == true_content(shards)
    assert caplog.messages == []


def test_shards_without_their_times_are_known_by_their_headers(tmp_path: Path) -> None:
    made(tmp_path / "a", 3)[0]
    shards = moved(tmp_path / "a", tmp_path / "b", touched)
    with opened(tmp_path / "new", shards) as index:
        assert list(index.stale(shards, Needed.USABLE)) == []
        assert len(list(index.stale(shards, Needed.PROVABLE))) == 3, "what only headers show is not passed on"
        assert content(index, shards) == true_content(shards)
        record = index.record(shards[0].key, Fingerprint.at(shards[0].path))
        assert record is not None
        assert record.moved == set()


def twin(data: bytes) -> bytes:
    """A tar of the same size with the same first and last headers, in which one member in the middle is longer."""
    at = data.index(b"d1/0-1.txt")
    header = bytearray(data[at : at + 512])
    header[124:136] = b"%011o\0" % (int(header[124:135], 8) + 7)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return data[:at] + bytes(header) + data[at + 512 :]


def test_another_shard_of_its_size_gives_no_wrong_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some headers are compared at first; the one that differs may not be among them. Then reading it shows it."""
    home = tmp_path / "a"
    shards = sets.make(home, 2)
    write(home, shards)
    path = sets.path_of(shards[0])
    path.write_bytes(twin(path.read_bytes()))
    os.utime(path, ns=(DAY, DAY))
    with opened(tmp_path / "new", shards) as index:
        assert built(index, shards) == [b"s0"]
    monkeypatch.setattr(portable, "_spread", lambda members: range(0))
    with opened(tmp_path / "new2", shards) as index:
        assert built(index, shards) == []
        below = ShardSet(shards, index)
        members = indexed(below.record, 0).members
        with pytest.raises(StaleShard, match="another of its size"):
            [below.content(0, below.tag(0), member) for member in range(members)]
        with pytest.raises(NotIndexed):
            below.record(0)
        assert content(index, shards) == true_content(shards)
        below.release()


def test_what_has_changed_is_indexed_with_one_line(tmp_path: Path) -> None:
    home = tmp_path / "a"
    file, shards = made(home, 6)
    for number in (1, 4):
        sets.path_of(shards[number]).write_bytes(sets.content(number, samples=9))
    with opened(tmp_path / "new", shards) as index:
        stale = [one for one, _ in index.stale(shards)]
        assert [one.name for one in stale] == [b"s1", b"s4"]
        [line] = index.portables.remarks(stale)
        assert all(text in line for text in ("2 of its 6", f"{home}/s1.tar, {home}/s4.tar", f"--update {file}"))
        index.refresh(stale)
        assert list(index.stale(shards)) == []
        assert content(index, shards) == true_content(shards)


def test_an_update_shares_old_records_and_leaves_readers_theirs(tmp_path: Path) -> None:
    home = tmp_path / "a"
    file, shards = made(home, 5)
    before = file.read_bytes()
    with opened(tmp_path / "reader", shards) as reader:
        old = [reader.record(one.key, Fingerprint.at(one.path)) for one in shards]
        listings = [sets.listing(one) for one in old if one is not None]
        sets.path_of(shards[2]).write_bytes(sets.content(2, samples=7))
        (home / "s5.tar").write_bytes(sets.content(5))
        now = [*shards, sets.at(home / "s5.tar")]
        shutil.rmtree(home / "made")
        write(home, now)
        assert file.read_bytes() != before
        assert [sets.listing(one) for one in old if one is not None] == listings
    with opened(tmp_path / "new", now) as index:
        assert list(index.stale(now, Needed.USABLE)) == []
        assert content(index, now) == true_content(now)
    updated = file.read_bytes()
    file.unlink()
    assert write(home, now).read_bytes() == updated, "as one that is made anew"


def test_one_that_others_could_have_written_is_copied_not_mapped(tmp_path: Path) -> None:
    file = made(tmp_path / "a", 2)[0]
    os.link(file, tmp_path / "another name")
    shards = expand([str(file)])
    with opened(tmp_path / "new", shards) as index:
        assert list(index.stale(shards)) == []
        assert len(list(index.stale(shards, Needed.USABLE))) == 2
        now = Fingerprint.at(shards[0].path)
        assert index.record(shards[0].key, now) is None
        assert content(index, shards) == true_content(shards)
        assert index.packed(shards[0].key, now) is not None
        index.portables = portable.Portables()
        sets.check(index, shards)


def test_one_that_is_written_over_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = made(tmp_path / "a", 2)[0]
    shards = expand([str(file)])
    with opened(tmp_path / "new", shards) as index:
        with open(file, "r+b") as opened_file:
            opened_file.truncate(100)
        assert index.record(shards[0].key, Fingerprint.at(shards[0].path)) is None
        assert content(index, shards) == true_content(shards)
        assert "was changed in place" in caplog.text


def test_it_is_open_as_long_as_its_index(tmp_path: Path) -> None:
    write(tmp_path / "a", shards := sets.make(tmp_path / "a", 2))
    before = descriptors()
    for _ in range(2):
        with opened(tmp_path / "new", shards) as index:
            assert content(index, shards) == true_content(shards)
        assert descriptors() == before


def test_who_may_write_one_beside_the_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, shards = made(tmp_path / "a", 1)
    monkeypatch.delenv("WDSFS_TRUST", raising=False)
    for mode, used in ((0o644, 1), (0o666, 0), (0o600, 1)):
        file.chmod(mode)
        assert len(attached(shards).files) == used
    if os.geteuid() == 0:
        os.chown(file, 12345, 12345)
        file.chmod(0o644)
        assert len(attached(shards).files) == 0
        assert len(attached(expand([str(file)])).files) == 1, "one that was named is the choice of its user"
        os.chown(shards[0].path, 12345, 12345)
        assert len(attached(shards).files) == 1, "its author could change the shard"


def test_further_files_and_other_readings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record belongs to how its shard is read; an index that is named may lie anywhere."""
    file, shards = made(tmp_path / "a", 2)
    (tmp_path / "b").mkdir()
    other = file.rename(tmp_path / "b" / "x.wdsidx")
    assert attached(shards).files == []
    monkeypatch.setenv("WDSFS_INDEX_FILE", str(other))
    with opened(tmp_path / "new", shards) as index:
        assert list(index.stale(shards)) == []
    otherwise = expand([str(tmp_path / "a")], reading=Reading(ignore_zeros=True))
    with opened(tmp_path / "new2", otherwise) as index:
        assert len(list(index.stale(otherwise))) == 2


def test_where_the_shards_are(tmp_path: Path) -> None:
    shards = sets.make(tmp_path / "a" / "deep", 2)
    (tmp_path / "b").mkdir()
    index = open_index(tmp_path / "made")
    index.refresh(shards)
    beside, away = (checked_target(f"{tmp_path}/{place}/set.wdsidx") for place in ("a", "b"))
    for target in (beside, away):
        write_index(index, shards, target)
        assert [one.path for one in expand([os.fsdecode(target)])] == [one.path for one in shards]
    index.close()
    (tmp_path / "a").rename(tmp_path / "c")
    here = [b"%s/c/deep/s%d.tar" % (os.fsencode(tmp_path), number) for number in range(2)]
    assert [one.path for one in expand([f"{tmp_path}/c/set.wdsidx"])] == here
    assert [one.path for one in expand([os.fsdecode(away)], base=f"{tmp_path}/c/deep")] == here
    with pytest.raises(SpecError, match="--base"):
        expand([f"{tmp_path}/c/deep/s0.tar"], base="x")
    with pytest.raises(UsageError, match="ends in"):
        checked_target("set.idx")


@pytest.mark.parametrize(
    ("row", "now", "expected"),
    [
        ((10, 5 * DAY + 700, ""), (10, 5 * DAY + 700, ""), Match.SAME),
        ((10, 5 * DAY + 700, ""), (10, 5 * DAY + 777, ""), Match.SAME),
        # Times that a copy has cut.
        *(((10, DAY + 123_456_789, ""), (10, DAY + at, ""), Match.SAME) for at in (123_456_000, 123_000_000)),
        ((10, DAY + 123_456_789, ""), (10, DAY + 120_000_001, ""), Match.PERHAPS),
        ((10, 5 * DAY, ""), (10, 5 * DAY, ""), Match.PERHAPS),  # a pinned time
        ((10, 5 * DAY + 7, ""), (10, 5 * DAY, ""), Match.PERHAPS),
        ((10, 5 * DAY + 7, ""), (10, 5 * DAY + 8, ""), Match.PERHAPS),
        ((10, 5 * DAY, ""), (11, 5 * DAY, ""), Match.OTHER),
        ((10, 0, ""), (10, 0, ""), Match.PERHAPS),
        ((10, DAY + 7, '"a"'), (10, DAY + 7, '"a"'), Match.SAME),
        ((10, DAY, '"a"'), (10, DAY, '"b"'), Match.PERHAPS),
        ((10, DAY, '"a"'), (10, DAY, '"a"'), Match.PERHAPS),
        ((10, DAY, '"a"'), (10, 2 * DAY, '"a"'), Match.PERHAPS),  # at another place, where "a" may mean another
        ((10, DAY, f'"{"a" * 32}"'), (10, 2 * DAY, f'"{"a" * 32}"'), Match.SAME),
        ((10, DAY, f'"{"a" * 32}-12"'), (10, 2 * DAY, f'"{"a" * 32}-12"'), Match.SAME),
        ((10, DAY, 'W/"a"'), (10, 2 * DAY, 'W/"a"'), Match.PERHAPS),
        ((10, DAY, ""), (10, DAY, '"a"'), Match.PERHAPS),
    ],
)
def test_what_counts_as_the_same_shard(
    row: tuple[int, int, str], now: tuple[int, int, str], expected: Match
) -> None:
    size, time, etag = row
    one = Row(size, time, 0, 8, 0, "x.tar", etag, "", ())
    pin = Pin(now[0], now[1], now[2], "")
    assert Match.of_object(one, "s3://b/x.tar", "s3://a/x.tar", pin) is expected
    if not etag:
        assert Match.of(one, Fingerprint(now[0], now[1], 7)) is expected
    else:
        assert Match.of_object(one, "s3://b/x.tar", "s3://b/x.tar", pin) is (
            Match.SAME if etag == now[2] and pin.strong_etag else expected
        )


# --- damaged and hostile ------------------------------------------------------------------------------------


def sealed(found: bytearray) -> bytes:
    """A file whose head and table have right checksums again."""
    size = int.from_bytes(found[28:36], "little")
    if size < len(found):
        found[44:48] = zlib.crc32(found[HEADER_SIZE : HEADER_SIZE + size]).to_bytes(4, "little")
    found[60:64] = zlib.crc32(found[:60]).to_bytes(4, "little")
    return bytes(found)


def replaced(file: Path, content: bytes) -> None:
    """Write another file in its place: one that is written over is dropped."""
    file.unlink()
    file.write_bytes(content)


def spoiled(data: bytes, random: random.Random) -> bytes:
    """Some bits turned, cut off, or parts exchanged; checksums of head and table may be made right again."""
    found = bytearray(data)
    way = random.randrange(4)
    if way == 0:
        return bytes(found[: random.randrange(len(found))])
    for _ in range(random.randrange(1, 6)):
        at = random.randrange(len(found) if way == 1 else min(len(found), HEADER_SIZE + 4 * ROW_SIZE))
        found[at] ^= 1 << random.randrange(8)
    return sealed(found) if way == 3 else bytes(found)


def test_a_damaged_file_gives_no_wrong_answer(tmp_path: Path) -> None:
    home = tmp_path / "a"
    file, shards = made(home, 3)
    data, right = file.read_bytes(), true_content(shards)
    listings = [sets.listing(Record(build_file(one.path))) for one in shards]
    index = open_index(tmp_path / "new")
    for seed in range(300):
        replaced(file, spoiled(data, random.Random(seed)))
        index.portables = attached(shards)
        for one, listing in zip(shards, listings, strict=True):
            record = index.record(one.key, Fingerprint.at(one.path))
            assert record is None or sets.listing(record) == listing
    assert content(index, shards) == right
    index.close()


def test_counts_that_no_answer_to_the_kernel_can_hold_are_refused(tmp_path: Path) -> None:
    file = made(tmp_path, 1)[0]
    found = bytearray(file.read_bytes())
    found[HEADER_SIZE + ROW_SIZE - 40 : HEADER_SIZE + ROW_SIZE] = b"\xff" * 40
    replaced(file, sealed(found))
    with pytest.raises(SpecError, match="counts of shard 0 are impossible"):
        expand([str(file)])


NUMBERS = ("mtime", *Summary._fields[len(Fingerprint._fields) :])


@pytest.mark.parametrize("field", NUMBERS)
def test_a_row_that_disagrees_with_its_record(
    tmp_path: Path, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever writes an index can give it right checksums; the row alone is believed until the record is read."""
    file, shards = made(tmp_path / "a", 2)
    listing = sets.listing(Record(build_file(shards[0].path)))
    head = portable_head.load_index(str(file))
    rows = [head.row(number) for number in range(2)]
    at = NUMBERS.index(field) - 1
    numbers = tuple(value + (number == at) for number, value in enumerate(rows[0].numbers))
    if field == "mtime":
        path = sets.path_of(shards[0])
        os.utime(path, ns=(0, rows[0].mtime_ns + 1))
        rows[0] = rows[0]._replace(mtime_ns=rows[0].mtime_ns + 1)
    else:
        rows[0] = rows[0]._replace(numbers=numbers)
    data = file.read_bytes()
    changed = portable_head.head_of(rows, "", RECORD.version, PLAIN, len(data))
    replaced(file, changed + data[len(changed) :])
    with opened(tmp_path / "new", shards) as index:
        below = ShardSet(shards, index)
        assert [path for path, _, _ in below.known_damage()] == []
        assert sets.listing(indexed(below.record, 0)) == listing
        assert (list(below.damaged()), list(below.known_damage())) == ([], [])
        assert "is damaged" in caplog.text
        assert f"wdsfs index --update {file}" in caplog.text
        below.release()


def test_every_bit_that_turns_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A head that is damaged is refused, a damaged record named with the way out; never is one used."""
    file, shards = made(tmp_path / "a", 3)
    data, chosen = file.read_bytes(), random.Random(4)
    index = open_index(tmp_path / "new")
    for at in chosen.sample(range(len(data)), 200):
        found = bytearray(data)
        found[at] ^= 1 << chosen.randrange(8)
        replaced(file, bytes(found))
        caplog.clear()
        index.portables = attached(shards)
        read = [index.record(one.key, Fingerprint.at(one.path)) for one in shards]
        (message,) = caplog.messages
        assert str(file) in message
        assert "wdsfs index --update" in message or "wdsfs index -o" in message
        assert None in read
    index.close()


Change = Callable[[dict[str, Any], Callable[..., None]], object]


def hostile(data: bytes, change: Change) -> bytes:
    """A record after a change of its directory, or of numbers of its sections, with a right checksum."""
    length = int.from_bytes(data[16:20], "little")
    meta, body = json.loads(data[20 : 20 + length]), bytearray(data[20 + length :])
    places = {name: (np.dtype(kind.replace("B", "u1")), at) for name, kind, at, _ in meta["sections"]}

    def put(section: str, at: int, *numbers: int) -> None:
        kind, begin = places[section]
        begin += at * kind.itemsize
        body[begin : begin + len(numbers) * kind.itemsize] = np.array(numbers, kind).tobytes()

    change(meta, put)
    head = json.dumps(meta, separators=(",", ":")).encode()
    rest = len(head).to_bytes(4, "little") + head + body
    return data[:8] + zlib.crc32(rest).to_bytes(8, "little") + rest


EVERY_KIND = (
    *(tars.member(b"d%d/e/%d.a" % (one % 2, one), b"x" * one) for one in range(4)),
    *(tars.member(b"../x.a", b"1"), tars.member(b"../x.a", b"2"), tars.member(b"stray", b"3")),
    tars.old_sparse(b"s.txt", [(1000, b"a" * 600), (5000, b"b" * 600)], 9000),
)

# What the record of these members would lead to, and what is refused.
HOSTILE: dict[str, tuple[str, Change]] = {
    "nothing": ("", lambda meta, put: None),
    "a path of /": ("entry.name", lambda meta, put: put("entry.name", 0, ord("/"))),
    "an alias of /": ("aliases", lambda meta, put: put("alias2.name", 0, ord("/"))),
    "an alias of NUL": ("aliases", lambda meta, put: put("alias0.name", 0, 0)),
    "an alias that is ..": (
        "aliases",
        lambda meta, put: (put("alias2.name.start", 1, 2), put("alias2.name", 0, 46, 46)),
    ),
    "a circle of folders": (
        "folder.parent",
        lambda meta, put: (put("folder.child", 0, 1, 1, 4, 5, 6), put("folder.parent", 1, 1, 1, 1, 2, 3)),
    ),
    "folders that are no children": ("folder.child", lambda meta, put: put("folder.parent", 2, 1)),
    "names that overlap": ("entry.name.start", lambda meta, put: put("entry.name.start", 1, 9, 0)),
    "a name beyond the text": ("entry.name.start", lambda meta, put: put("entry.name.start", 1, 255)),
    "more members than bytes": ("entry.member", lambda meta, put: meta.update(members=1 << 33)),
    "more folders than bytes": ("folder.parent", lambda meta, put: meta.update(folders=1 << 33)),
    "more samples than bytes": ("counts", lambda meta, put: meta.update(samples=1 << 33)),
    "a count below zero": ("counts", lambda meta, put: meta.update(unshown_count=-1)),
    "no folder at all": ("counts", lambda meta, put: meta.update(folders=0)),
    "entries that go backwards": ("entry.member", lambda meta, put: put("entry.member", 1, 3, 1)),
    "members of other shards": ("kind", lambda meta, put: meta.update(view={"shift": 1})),
    "a place that is no number": ("counts", lambda meta, put: meta.update(ends=["0", 0])),
    "a problem that is no text": ("problems", lambda meta, put: meta.update(problems=[[0, [], "x"]])),
    "a sparse part as large as a disk": ("sparse.place", lambda meta, put: put("sparse.place", 1, 1 << 50)),
    "a sparse part before the first": ("sparse.place", lambda meta, put: put("sparse.place", 0, 512, 1112)),
    "sparse parts that overlap": ("sparse.place", lambda meta, put: put("sparse.offset", 1, 1200)),
    "a sparse part beyond the member": ("sparse.offset", lambda meta, put: put("sparse.offset", 1, 8999)),
    "a place beyond 64 bits": ("not a record", lambda meta, put: meta["sections"][0].__setitem__(2, 1 << 70)),
    "a section that is missing": ("not a record", lambda meta, put: meta["sections"].pop(0)),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_record_is_refused(case: str) -> None:
    """Whoever writes an index can give any bytes a right checksum. See `record` in tests/test_fuzz.py, too."""
    refused, change = HOSTILE[case]
    with tars.opened(tars.tar(*EVERY_KIND)) as fd:
        data = hostile(record_builder.build(fd, Fingerprint(1, 2, 3)), change)
    if refused:
        with pytest.raises(record_check.UnsoundRecord, match=re.escape(refused)):
            record_check.checked_record(data)
    else:
        assert record_check.checked_record(data).samples == 6


def test_of_another_version(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, shards = made(tmp_path / "a", 2)
    data = file.read_bytes()

    def changed(at: int, number: int) -> None:
        found = bytearray(data)
        found[at : at + 4] = number.to_bytes(4, "little")
        replaced(file, sealed(found))

    changed(12, RECORD.version + 1)
    assert [one.path for one in expand([str(file)])] == [one.path for one in shards]
    assert attached(shards).files == []
    assert "is a record of version 4, by a newer wdsfs" in caplog.text
    changed(8, 3)
    with pytest.raises(SpecError, match="is an index of version 3, by a newer wdsfs"):
        expand([str(file)])
    changed(20, 1 << 31)
    with pytest.raises(SpecError, match="its table does not fit into it"):
        expand([str(file)])


@pytest.mark.parametrize("text", ["../x.tar", "a/../../x.tar", "pipe:rm x", "-"])
def test_a_file_does_not_lead_out_of_its_place(tmp_path: Path, text: str) -> None:
    with pytest.raises(SpecError):
        expand([str(of_rows(tmp_path / "x.wdsidx", [Row(1, 1, 0, 8, 0, text, "", "", (0,) * 9)]))])


def of_rows(file: Path, rows: list[Row], base: str = "") -> Path:
    """An index with these rows, and no records."""
    size = len(portable_head.head_of(rows, base, RECORD.version, PLAIN, 0))
    offset = size + -size % 8
    there = [row._replace(offset=offset) for row in rows]
    head = portable_head.head_of(there, base, RECORD.version, PLAIN, offset + 8)
    file.write_bytes(head.ljust(offset + 8, b"\0"))
    return file


def listing_remote(file: Path, etags: list[str]) -> Path:
    """An index of shards at a port where nothing listens, with these ETags; there are no records in it."""
    rows = [Row(9, 10**9, 0, 8, 0, f"x-{number}.tar", etag, "", (0,) * 9) for number, etag in enumerate(etags)]
    return of_rows(file, rows, "http://127.0.0.1:9/set/")


def test_shards_of_a_list_with_etags_are_taken_for_its_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WDSFS_CACHE_DIR", str(tmp_path / "cache"))
    file = listing_remote(tmp_path / "x.wdsidx", [f'"{number}"' for number in range(100)])
    DOOR.close()
    monkeypatch.setattr(FetcherClient, "stat", lambda *_: pytest.fail("a store was asked"))
    shards = expand([str(file)])
    with opened(tmp_path / "index", shards) as index:
        with monkeypatch.context() as unread:
            unread.setattr(IndexFile, "row", lambda *_: pytest.fail("a row was read"))
            assert list(index.stale(shards)) == []
            assert index.no_tars(shards) == {}
        assert DOOR.look(shards[7].path) == Pin(9, 10**9, '"7"', "").fingerprint("http://127.0.0.1:9/set/x-7.tar")
        assert list(index.stale(shards)) == []
        # What is known of an object counts more than the list: a later one, or none.
        object_cache.cache().keep_pin(os.fsdecode(shards[8].path), Pin(9, 10**9, '"later"', ""))
        remote = DOOR.remote
        assert isinstance(remote, RemoteShards)
        remote._forget_pin(shards[9].path)
        assert DOOR.look(shards[8].path) == Pin(9, 10**9, '"later"', "").fingerprint(os.fsdecode(shards[8].path))
        assert remote._known_pin(shards[9].path) is None
    DOOR.close()


@pytest.mark.parametrize("etag", ["", 'W/"1"', '"spooled-1"'])
def test_shards_of_a_list_without_strong_etags_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, etag: str
) -> None:
    monkeypatch.setenv("WDSFS_CACHE_DIR", str(tmp_path / "cache"))
    file = listing_remote(tmp_path / "x.wdsidx", ['"0"', etag, '"2"'])
    DOOR.close()
    paths: list[bytes] = []

    def stat(unknown: list[bytes]) -> list[Pin]:
        paths.extend(unknown)
        return [Pin(9, 0, "", "")]

    monkeypatch.setattr(DOOR.remote, "stat", stat)
    assert len(expand([str(file)])) == 3
    assert paths == [b"http://127.0.0.1:9/set/x-1.tar"]
    DOOR.close()


def test_a_shard_that_is_gone_is_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    file, shards = made(tmp_path / "a", 2)
    sets.path_of(shards[0]).unlink()
    with pytest.raises(Exception, match="missing"):
        expand([str(file)])
    assert len(expand([str(file)], allow_missing=True)) == 2
    with opened(tmp_path / "new", shards) as index:
        assert index.portables.same(shards[0].key, GONE) is None
