"""The fingerprint of a file: what belongs to it on which file system."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from wdsfs import mount_table, shards
from wdsfs.shards import Fingerprint


@pytest.fixture
def _no_types() -> Iterator[None]:
    """Look at the file systems of this test, and leave none to others."""
    shards._stand_in.cache_clear()
    yield
    shards._stand_in.cache_clear()


@pytest.mark.parametrize(
    ("fstype", "number_counts", "has_ctime"),
    [
        *((fstype, True, True) for fstype in ("ext4", "xfs", "tmpfs", "overlay", "lustre", "unknown")),
        *((fstype, False, True) for fstype in ("nfs", "nfs4", "cifs", "smb3")),
        *((fstype, False, False) for fstype in ("fuse.rclone", "fuse.sshfs", "fuse", "fuseblk", "vfat", "exfat")),
    ],
)
@pytest.mark.usefixtures("_no_types")
def test_what_identifies_a_file(
    monkeypatch: pytest.MonkeyPatch, fstype: str, number_counts: bool, has_ctime: bool
) -> None:
    monkeypatch.setattr(mount_table, "types_of", lambda device: {fstype} - {"unknown"})
    one, other = (
        os.stat_result((0o100644, number, 7, 1, 0, 0, 9, 5, 5, 5), {"st_mtime_ns": 5, "st_ctime_ns": 5})
        for number in (100, 101)
    )
    assert (Fingerprint.of(one) != Fingerprint.of(other)) == number_counts
    assert Fingerprint.of(one).is_by_mtime != has_ctime
    later = os.stat_result((0o100644, 100, 7, 1, 0, 0, 9, 5, 5, 6), {"st_mtime_ns": 5, "st_ctime_ns": 6})
    assert Fingerprint.of(one) != Fingerprint.of(later)
    assert not Fingerprint.of(later).is_by_mtime
