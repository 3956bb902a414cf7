"""The steps of the smoke suite, run as root inside a virtual machine (`kernels.py`), or on any machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

WDSFS = str(Path(sys.executable).with_name("wdsfs"))
PATIENCE = 900  # seconds: an emulated machine is slow


def wdsfs(*words: str, code: int = 0) -> str:
    done = subprocess.run([WDSFS, *words], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == code, (words, done.returncode, done.stdout, done.stderr)
    return done.stdout + done.stderr


@contextlib.contextmanager
def mounted(*words: str) -> Iterator[Path]:
    wdsfs("mount", "-q", *words, "mnt")
    try:
        yield Path("mnt")
    finally:
        wdsfs("umount", "mnt")


def make() -> None:
    Path("pets").mkdir()
    Path("mnt").mkdir()
    for number in range(200):
        Path(f"pets/im{number:03}.txt").write_text(f"cat number {number}")
        Path(f"pets/im{number:03}.cls").write_text(str(number % 10))
    wdsfs("pack", "-q", "--layout", "files", "--maxcount", "100", "pets", "-o", "pets-%d.tar")


def read() -> None:
    with mounted("pets-{0..1}.tar") as tree:
        for number in range(200):
            path = tree / f"pets-{number // 100}/im{number:03}/txt"
            assert path.read_text() == f"cat number {number}", path
        assert len(list(tree.rglob("*"))) == 2 + 200 * 3


def edit_and_commit() -> None:
    with mounted("--overlay", "edits", "pets-{0..1}.tar") as tree:
        (tree / "pets-0/im000/txt").write_text("changed")
        (tree / "pets-1/new").mkdir()
        (tree / "pets-1/new/txt").write_text("new")
        subprocess.run(["/bin/busybox", "rm", "-r", tree / "pets-1/im150"], check=True)
        wdsfs("commit", "-q", "-o", "new/pets-%d.tar", "mnt")
        wdsfs("commit", "-q", "--in-place", "mnt")
    for place in ("new/", ""):
        assert wdsfs("cat", f"{place}pets-0.tar", "pets-0/im000/txt") == "changed"
        assert "im150" not in wdsfs("ls", f"{place}pets-1.tar", "pets-1").split()
        assert wdsfs("cat", f"{place}pets-1.tar", "pets-1/new/txt") == "new"


def kill_a_worker() -> str:
    """Readers see no error where the kernel sends a request again (6.9); else the one in flight fails."""
    errors, reads, ended = [], [0], threading.Event()

    def read_on(tree: Path) -> None:
        while not ended.is_set():
            try:
                assert (tree / "pets-0/im001/txt").read_text() == "cat number 1"
                os.listdir(tree / "pets-1")
                reads[0] += 1
                ended.wait(0.005)  # an emulated machine has other things to do, too
            except OSError as error:
                errors.append(error.strerror)

    with mounted("pets-{0..1}.tar") as tree:
        thread = threading.Thread(target=read_on, args=(tree,))
        thread.start()
        for _ in range(3):
            [report] = json.loads(wdsfs("status", "--json", "mnt"))
            before = reads[0]
            for worker in report["processes"][1:]:
                os.kill(worker, signal.SIGKILL)
            while reads[0] < before + 20:
                ended.wait(0.01)
        ended.set()
        thread.join()
    release = tuple(map(int, os.uname().release.split(".")[:2]))
    assert not errors or release < (6, 9), errors
    return f"{reads[0]} reads, errors: {errors or 'none'}"


def kernel_engine() -> str:
    """Mount by the kernel, or be told why not, and what to do."""
    done = subprocess.run(
        [WDSFS, "mount", "--engine", "kernel", "pets-{0..1}.tar", "mnt"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        assert done.returncode == 5, done
        return f"refused: {done.stderr.strip()}"
    try:
        assert Path("mnt/pets-0/im001/txt").read_text() == "cat number 1"
        assert len(list(Path("mnt").rglob("*"))) > 500
    finally:
        wdsfs("umount", "mnt")
    return "mounted"


STEPS: tuple[Callable[[], str | None], ...] = (*(make, read, edit_and_commit, kill_a_worker, kernel_engine),)


def main() -> None:
    os.chdir(tempfile.mkdtemp(dir=os.environ.get("HOME", "/tmp")))
    print(
        f"smoke: Linux {os.uname().release}, Python {sys.version.split()[0]}, {wdsfs('--version').strip()}",
        flush=True,
    )
    failed = 0
    for step in [step for step in STEPS if not sys.argv[1:] or step.__name__ in sys.argv[1:]]:
        try:
            said = step()
        except Exception as error:
            failed += 1
            print(f"smoke: {step.__name__}: FAILED: {error!r}", flush=True)
        else:
            print(f"smoke: {step.__name__}: ok{': ' + said if said else ''}", flush=True)
    print(wdsfs("doctor", code=0) if not failed else "", flush=True)
    print(f"smoke: {failed} failed", flush=True)


if __name__ == "__main__":
    main()
