"""Mounts of the output of commands, and of the standard input."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from tests import tars
from tests.conftest import Program
from tests.processes import wait_until

SIZE = 300_000
SHARD = tars.tar(*(tars.member(b"%d.jpg" % number, bytes([number]) * SIZE) for number in range(4)))


def read_anew(path: Path) -> bytes:
    """The content of a file as the mount gives it now: with O_DIRECT the kernel's cache takes no part."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        data = bytearray(SIZE + 1)
        return bytes(data[: os.preadv(file, [data], 0)])
    finally:
        os.close(file)


def test_outputs_of_commands_are_served_over_the_death_of_any_process(program: Program) -> None:
    """One of them fails: it is a damaged shard, and is said to be one."""
    whole, runs = program.write("x.tar", SHARD), program.home / "runs"
    fails_late = f"pipe:head -c 700000 {whole}; echo oh >&2; echo no disk >&2; exit 7 # bad.tar"
    with program.mounted(f"pipe:echo >> {runs}; cat {whole}", fails_late) as mounted:
        ending = "ended with exit code 7: no disk"
        mounted.expect_log(rf"{ending}(, so its output|; only)")
        mounted.allow_log("says: oh", "says: no disk", "killed by SIGKILL")

        def check() -> None:
            for shard, number in (("x", 0), ("x", 3), ("bad", 1)):
                assert read_anew(mounted.path / shard / str(number) / "jpg") == bytes([number]) * SIZE

        check()
        assert {path.name for path in mounted.path.iterdir() if path.is_dir()} >= {"x", "bad"}
        for victim in ("fetcher", "workers"):
            before = mounted.fetcher() if victim == "fetcher" else mounted.status()["processes"][1]
            os.kill(before, signal.SIGKILL)
            check()
        program.run("cache", "--clear")  # which leaves it, as long as it is mounted
        victims = mounted.status()["processes"][1:]
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        wait_until(lambda: not {*victims} & {*mounted.status()["processes"]}, "other workers")
        check()
        assert runs.read_text() == "\n"
        assert ending in program.run("status", mounted.path).stdout.decode()


def test_the_standard_input_is_served_as_long_as_the_mount_lasts(program: Program) -> None:
    with program.write("x.tar", SHARD).open("rb") as given, program.mounted("-", stdin=given) as mounted:
        mounted.allow_log("killed by SIGKILL")
        for number, victims in ((1, slice(0)), (2, slice(1, 2)), (3, slice(1, None))):
            for victim in mounted.status()["processes"][victims]:
                with contextlib.suppress(ProcessLookupError):  # a surplus one ends by itself
                    os.kill(victim, signal.SIGKILL)
            os.kill(mounted.fetcher(), signal.SIGKILL)
            assert (mounted.path / "stdin" / str(number) / "jpg").read_bytes() == bytes([number]) * SIZE
        program.run("cache", "--clear")
        for victim in mounted.status()["processes"][1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        assert (mounted.path / "stdin" / "0" / "jpg").read_bytes() == bytes(SIZE)
    assert program.json("cache", "--clear")["freed"] > 0
