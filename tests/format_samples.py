"""Samples of every format, as this release writes them, for later ones to read (`test_released_formats.py`).

    .venv/bin/python -m tests.format_samples tests/data/formats-VERSION

Needs /dev/fuse. Paths of the machine are written as @HERE@; a directory with an overlay is written as JSON, since
git keeps neither whiteouts nor attributes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests import tars
from tests.processes import finished
from wdsfs import mount_registry
from wdsfs.door.pins import Pin
from wdsfs.index.record_of_file import build_file
from wdsfs.index.store import open_index
from wdsfs.mount_registry import Registration, Talk
from wdsfs.remote.object_cache import ObjectCache

HERE = "@HERE@"
TIME = 1_700_000_000  # of all members and shards (s)
URL, PIN = "http://shards.example/pets-0.tar", Pin(3072, TIME * 1_000_000_000, '"abc"', "")
SHARDS = {
    "pets-0.tar": {b"cat.txt": b"a cat", b"cat.cls": b"0", b"dog.txt": b"a dog", b"dog.cls": b"1"},
    "pets-1.tar": {b"d/emu.txt": b"an emu", b"d/emu.cls": b"2", b"README": b"read me", b"fox.txt": b"a fox"},
}
# Edits of a mount by a shell: changed, added, removed, replaced directories, renamed.
EDITS = """
printf 'a big cat' >pets-0/cat/txt
printf '{}' >pets-0/cat/json
rm -r pets-0/dog && mkdir pets-0/dog && printf 'another dog' >pets-0/dog/txt
rm pets-1/d/emu/cls
mv pets-1/fox pets-1/wolf
mkdir pets-1/yak && printf 'a yak' >pets-1/yak/txt
"""
PROGRAM = "from wdsfs.__main__ import main; main()"
# The program, killed when it has replaced one shard.
KILLED = """
import os, sys
from wdsfs.packing.replacement import Replacement
replace, count = Replacement._replace, []
def once(self, step):
    if count:
        os.kill(os.getpid(), 9)
    replace(self, step)
    count.append(step)
Replacement._replace = once
from wdsfs.__main__ import main
main()
"""


def main(directory: Path) -> None:
    """Write all samples, and their sums."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="wdsfs-samples-") as name:
        home = Path(os.path.realpath(name))
        write_shards(home)
        write_indexes(home, directory)
        write_cache(home, directory)
        write_overlays(home, directory)
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in files_of(directory)]
    (directory / "SHA256SUMS").write_text("".join(f"{line}\n" for line in sums))


def files_of(directory: Path) -> list[Path]:
    """Return the samples in a directory."""
    return sorted(path for path in directory.iterdir() if path.name != "SHA256SUMS")


def write_shards(home: Path) -> None:
    """Write the shards of which all samples are."""
    for name, members in SHARDS.items():
        data = tars.tar(*(tars.member(path, content, mtime=TIME) for path, content in members.items()))
        (home / name).write_bytes(data)
        os.utime(home / name, (TIME, TIME))


def run(home: Path, *arguments: str, code: int = 0, program: str = PROGRAM) -> None:
    """Run wdsfs in `home`."""
    variables = {"WDSFS_INDEX_DIR": "index", "HOME": str(home), "XDG_STATE_HOME": str(home / "state")}
    finished(sys.executable, "-c", program, *arguments, cwd=home, env={**os.environ, **variables}, code=code)


def write_indexes(home: Path, directory: Path) -> None:
    """Write a record, an index directory, a portable index and an image."""
    for name in SHARDS:
        shutil.copy(home / name, directory)
    run(home, "index", "-q", "-o", "set.wdsidx", "pets-{0..1}.tar")
    run(home, "image", "-q", "pets-{0..1}.tar", "-o", "set.erofs")
    shutil.copy(home / "set.wdsidx", directory)
    shutil.copy(home / "set.erofs", directory)
    record = build_file(os.fsencode(home / "pets-0.tar"))
    (directory / "record.bin").write_bytes(record)
    index = open_index(home / "sample")
    index.store([(b"/shards/pets-0.tar", record)])
    index.close()
    shutil.copy(home / "sample/data.mdb", directory / "index.mdb")


def write_cache(home: Path, directory: Path) -> None:
    """Write a remote object in the cache, of which the first block is there."""
    cached = ObjectCache(home / "cache", 1 << 40).open(URL, PIN)
    cached.put(0, (home / "pets-0.tar").read_bytes()[: PIN.size])
    cached.close()
    (directory / "cache.json").write_text(encoded(listing(home / "cache"), home))


def write_overlays(home: Path, directory: Path) -> None:
    """Write what a live mount says, its overlay, and one whose commit was killed half-way."""
    (home / "mnt").mkdir()
    run(home, "mount", "-q", "--overlay", "edits", "pets-{0..1}.tar", "mnt")
    try:
        subprocess.run(["bash", "-ec", EDITS], cwd=home / "mnt", check=True)
        registration = mount_registry.find_registration(str(home / "mnt"))
        assert registration is not None
        (directory / "control.json").write_text(encoded([*conversation(registration)], home))
    finally:
        run(home, "umount", "mnt")
    (directory / "overlay.json").write_text(encoded(listing(home / "edits"), home))
    commit = "commit", "-q", "-j", "1", "--in-place", "--overlay", "edits", "pets-{0..1}.tar"
    run(home, *commit, code=-9, program=KILLED)
    (directory / "half-done.json").write_text(encoded(listing(home / "edits"), home))
    shutil.copy(home / "pets-0.tar", directory / "half-done-0.tar")


def conversation(registration: Registration) -> Iterator[Any]:
    """Yield the registration, then requests and answers in turn."""
    yield registration.as_json()
    for word in ("status", "shards", "refresh", "freeze"):
        with Talk(registration) as talk:
            yield {"do": word}
            yield talk.ask({"do": word})


def listing(top: Path) -> list[dict[str, Any]]:
    """Return all that is in a directory, without locks."""
    rows: list[dict[str, Any]] = []
    for path in sorted(top.rglob("*")):
        status = path.lstat()
        names = [name for name in os.listxattr(path, follow_symlinks=False) if name.startswith("user.")]
        place = str(path.relative_to(top))
        row: dict[str, Any] = {"path": place, "mode": status.st_mode, "time": status.st_mtime_ns}
        if names:
            row["attributes"] = {name: base64.b64encode(os.getxattr(path, name)).decode() for name in names}
        if path.name == "lock":
            continue
        if stat.S_ISREG(status.st_mode):
            data = path.read_bytes()
            try:
                row["text"] = data.decode()
            except UnicodeDecodeError:
                row["base64"] = base64.b64encode(data).decode()
        rows.append(row)
    return rows


def put_back(rows: list[dict[str, Any]], top: Path) -> None:
    """Make the directory of which this is the listing."""
    top.mkdir()
    for row in rows:
        path = top / row["path"]
        if stat.S_ISDIR(row["mode"]):
            path.mkdir()
        elif stat.S_ISREG(row["mode"]):
            path.write_bytes(row["text"].encode() if "text" in row else base64.b64decode(row["base64"]))
        else:
            os.mknod(path, row["mode"])
        for name, value in row.get("attributes", {}).items():
            os.setxattr(path, name, base64.b64decode(value))
        if not stat.S_ISCHR(row["mode"]):
            path.chmod(stat.S_IMODE(row["mode"]))
    for row in reversed(rows):  # a directory after what is in it
        os.utime(top / row["path"], ns=(row["time"], row["time"]))


def encoded(value: Any, home: Path) -> str:
    """Return JSON in which nothing is of this machine."""
    return json.dumps(value, indent=1).replace(str(home), HERE) + "\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
