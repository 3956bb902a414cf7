"""What to type for libraries that are not installed, by how wdsfs was installed."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from tests.conftest import ROOT
from wdsfs.extras import install_command

METADATA = """\
Metadata-Version: 2.4
Name: wdsfs
Version: 0.1.0
Requires-Dist: numpy>=2
Requires-Dist: pillow>=11; extra == "view"
Requires-Dist: tinytag>=2; extra == 'view'
Requires-Dist: backports.zstd>=1; python_version < "3.14" and extra == "compressed"
Requires-Dist: distributed>=2024.1; extra == "dask"
Requires-Dist: dask-jobqueue>=0.8.5; extra == "slurm"
Requires-Dist: wdsfs[dask]; extra == "slurm"
"""


class Place:
    """An environment that something is installed in, and a checkout."""

    def __init__(self, home: Path) -> None:
        self.prefix, self.checkout = home / "my venv", home / "the checkout"
        self.info = self.prefix / "wdsfs-0.1.0.dist-info"
        self.info.mkdir(parents=True)
        self.checkout.mkdir()
        (self.info / "METADATA").write_text(METADATA)
        self.has("bin/pip", "")

    def has(self, name: str, content: str) -> None:
        (self.prefix / name).parent.mkdir(exist_ok=True)
        (self.prefix / name).write_text(content)

    def by(self, installer: str, **origin: object) -> None:
        (self.info / "INSTALLER").write_text(f"{installer}\n")
        if origin:
            (self.info / "direct_url.json").write_text(json.dumps(origin))

    def words(self, extra: str = "view") -> list[str]:
        """The command, as a shell takes it apart."""
        return shlex.split(install_command(extra, Distribution.at(self.info), str(self.prefix)))

    @property
    def pip(self) -> list[str]:
        return [f"{self.prefix}/bin/pip", "install"]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_pip_from_a_checkout(place: Place) -> None:
    place.by("pip", url=place.checkout.as_uri(), dir_info={})
    assert place.words() == [*place.pip, f"{place.checkout}[view]"]
    place.by("pip", url=place.checkout.as_uri(), dir_info={"editable": True})
    assert place.words() == [*place.pip, "-e", f"{place.checkout}[view]"]


def test_a_checkout_that_is_gone(place: Place) -> None:
    """Then the libraries themselves are named."""
    place.by("pip", url=(place.checkout / "gone").as_uri(), dir_info={})
    assert place.words() == [*place.pip, "pillow>=11", "tinytag>=2"]
    assert place.words("compressed") == [*place.pip, 'backports.zstd>=1; python_version < "3.14"']
    assert sorted(place.words("slurm")) == sorted([*place.pip, "dask-jobqueue>=0.8.5", "distributed>=2024.1"])


def test_pip_from_elsewhere(place: Place) -> None:
    place.by("pip", url="https://example.org/w.git", vcs_info={"vcs": "git", "commit_id": "4d7a"})
    assert place.words() == [*place.pip, "wdsfs[view] @ git+https://example.org/w.git@4d7a"]
    place.by("pip", url="https://example.org/wdsfs-0.1.0.tar.gz", archive_info={})
    assert place.words() == [*place.pip, "wdsfs[view] @ https://example.org/wdsfs-0.1.0.tar.gz"]


def test_pip_from_an_index(place: Place) -> None:
    place.by("pip")
    assert place.words() == [*place.pip, "pillow>=11", "tinytag>=2"]
    os.remove(place.prefix / "bin/pip")
    assert place.words()[1:4] == ["-m", "pip", "install"]


def test_pipx(place: Place) -> None:
    place.has("pipx_metadata.json", "{}")
    place.by("pip", url=place.checkout.as_uri(), dir_info={})
    assert place.words() == ["pipx", "install", "--force", f"{place.checkout}[view]"]
    os.rmdir(place.checkout)
    assert place.words() == ["pipx", "inject", "wdsfs", "pillow>=11", "tinytag>=2"]


def test_uv(place: Place) -> None:
    place.by("uv", url=place.checkout.as_uri(), dir_info={})
    python = f"{place.prefix}/bin/{os.path.basename(sys.executable)}"
    assert place.words() == ["uv", "pip", "install", "--python", python, f"{place.checkout}[view]"]


def test_an_environment_of_root(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.by("pip")
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(place.prefix))
    assert place.words()[0] == "sudo"


def test_the_command_for_this_very_program_is_one_that_pip_takes() -> None:
    program, *words = shlex.split(install_command("view"))
    assert words[:2] == ["install", "-e"]
    assert words[2] == f"{ROOT}[view]"
    done = subprocess.run([program, "--version"], capture_output=True, check=True)
    assert done.stdout.startswith(b"pip ")


def test_no_text_names_another_way() -> None:
    """`wdsfs[view]` is found on no index: every hint asks `install_command`."""
    for path in [*(ROOT / "wdsfs").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]:
        assert "pip install 'wdsfs[" not in path.read_text(), path
