"""`wdsfs.prefetch`: the files of a mount are fetched at the same time, before they are opened."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import wdsfs
from tests import tars
from tests.processes import wait_until
from tests.web_server import WebServer

SIZE = 300_000


def test_files_of_a_mount_are_fetched_together_and_once(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a store that sends nothing before it has been asked for all; what is no file is passed over."""
    bodies = {f"s-{shard}/k{at}/bin": os.urandom(SIZE) for shard in range(2) for at in range(4)}
    for shard in range(2):
        members = (tars.member(b"k%d.bin" % at, bodies[f"s-{shard}/k{at}/bin"]) for at in range(4))
        web.put(f"/s-{shard}.tar", tars.tar(*members))
    os.mkfifo(tmp_path / "fifo")
    spec = f"{web.url}/s-{{0..1}}.tar"
    with wdsfs.samples(spec):  # so that the mount need not fetch headers, and has none in its cache
        monkeypatch.setenv("WDSFS_CACHE_DIR", str(tmp_path / "another"))
    with wdsfs.mount(spec, push="off") as mounted:
        paths = [mounted / name for name in bodies if name.endswith(("1/bin", "3/bin"))]
        web.requests.clear()
        web.hold.clear()
        try:
            wdsfs.prefetch([*paths[1:], mounted / "missing", tmp_path / "fifo", tmp_path])
            wdsfs.prefetch(str(paths[0]))
            wait_until(lambda: web.under_way == 4, "requests for all files")
        finally:
            web.hold.set()
        assert [path.read_bytes() for path in paths] == [bodies[str(path.relative_to(mounted))] for path in paths]
        assert len(web.gets()) == 4
