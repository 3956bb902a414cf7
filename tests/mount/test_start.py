"""Which engine a mount gets, and what is said where the kernel's engine is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import sets
from wdsfs import wings
from wdsfs.errors import NotInstalled
from wdsfs.mount import mount_search, start
from wdsfs.mount.mount_options import MountOptions, Serving
from wdsfs.mount.mount_search import obstacle


@pytest.fixture
def without_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    load = wings.load

    def load_others(wing: str, module: str = "") -> object:
        if wing == "kernel":
            raise NotInstalled("wdsfs.kernel is not installed: the kernel cannot serve a mount")
        return load(wing, module)

    monkeypatch.setattr(wings, "load", load_others)


def mount_of(home: Path, *specs: str, **serving: object) -> MountOptions:
    return MountOptions(specs, str(home), serving=Serving(**serving))  # type: ignore[arg-type]


@pytest.mark.usefixtures("without_kernel")
def test_without_the_kernels_engine_fuse_serves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    (tmp_path / "set.erofs").write_bytes(b"")
    shard = str(sets.path_of(sets.make(tmp_path, 1)[0]))
    assert start._start_by_kernel(mount_of(tmp_path, shard, engine="auto")) is None
    assert "engine: FUSE, because the kernel's engine is not installed" in caplog.text
    for specs, engine in (([shard], "kernel"), ([str(tmp_path / "set.erofs")], "fuse")):
        with pytest.raises(NotInstalled, match="not installed"):
            start.start_mount(mount_of(tmp_path, *specs, engine=engine))
    assert not start.is_guarded([shard], str(tmp_path))
    assert mount_search.find_mount(str(tmp_path)) is None
    assert obstacle("/proc") is not None
