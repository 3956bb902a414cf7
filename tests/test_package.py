"""The wheel and the sdist: the same bytes twice, and all that a user of the installed program needs."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from tests.processes import finished
from wdsfs import __version__

pytest.importorskip("build")
pytest.importorskip("hatchling")

ROOT = Path(__file__).parent.parent
SHARED = {
    "share/man/man1/wdsfs.1": b".TH WDSFS 1",
    "share/bash-completion/completions/wdsfs": b"_WDSFS_COMPLETE=bash_complete",
    "share/zsh/site-functions/_wdsfs": b"#compdef wdsfs",
    "share/fish/vendor_completions.d/wdsfs.fish": b"_WDSFS_COMPLETE=fish_complete",
}


def build(source: Path, to: Path) -> list[Path]:
    """Build both, a moment of 2026 given as the time, without the network."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1790000000"}
    finished(sys.executable, "-m", "build", "--no-isolation", "--outdir", to, source, env=environment)
    return sorted(to.iterdir())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, without what is ignored."""
    copy = tmp_path_factory.mktemp("source")
    for name in filter(lambda name: (ROOT / name).is_file(), listed()):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    return copy


def listed(*places: str) -> list[str]:
    """The files of the checkout, without those that are ignored."""
    names = finished("git", "ls-files", "-z", "-co", "--exclude-standard", *places, cwd=ROOT).stdout
    return [name for name in names.split("\0") if name]


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist."""
    sdist, wheel = sorted(build(source, tmp_path_factory.mktemp("dist")), key=lambda path: path.suffix)
    return wheel, sdist


def test_two_builds_are_the_same_bytes(built: tuple[Path, Path], source: Path, tmp_path: Path) -> None:
    for path in source.rglob("*"):  # a second checkout, later
        os.utime(path, (1_800_000_000, 1_800_000_000))
    again = build(source, tmp_path / "again")
    sums = [
        {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths} for paths in (built, again)
    ]
    assert sums[0] == sums[1]


def test_what_the_wheel_has(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        names = wheel.namelist()
        package = {name for name in names if name.startswith("wdsfs/")}
        assert package == {name for name in listed("wdsfs") if (ROOT / name).exists()}
        for name, begin in SHARED.items():
            assert begin in wheel.read(f"wdsfs-{__version__}.data/data/{name}"), name
        info = f"wdsfs-{__version__}.dist-info"
        assert wheel.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        about = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
        assert about["License-Expression"] == "MIT"
        assert about["Requires-Python"] == ">=3.11"
        assert built[0].name.endswith("-py3-none-any.whl"), "every machine, aarch64 too"
        scripts = wheel.read(f"{info}/entry_points.txt").decode()
        assert "wdsfs = wdsfs.__main__:main" in scripts
        assert "mount.wdsfs = wdsfs.__main__:mount_helper" in scripts


def test_what_the_sdist_has(built: tuple[Path, Path]) -> None:
    """All that is needed to build and test it."""
    with tarfile.open(built[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    needed = {"pyproject.toml", "hatch_build.py", "LICENSE", "Makefile", "constraints.txt", ".ci/setup"}
    assert needed | {"tests/conftest.py", "docs/README.md", "systemd/wdsfs@.service"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", "build/"))]


def test_the_installed_program(built: tuple[Path, Path], tmp_path: Path) -> None:
    """In an environment of its own, away from the checkout; the dependencies are those of the tests."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    [site] = (tmp_path / "env/lib").glob("python*/site-packages")
    [own] = Path(sys.prefix, "lib").glob("python*/site-packages")
    install = sys.executable, "-m", "pip", "--python", tmp_path / "env/bin/python", "install"
    finished(*install, "--no-deps", "--no-index", "--quiet", "--disable-pip-version-check", built[0])
    (site / "dependencies.py").write_text(
        f"import sys; sys.path.append({str(own)!r})\n"
        "sys.meta_path[:] = [one for one in sys.meta_path if 'editable' not in repr(one).lower()]\n"
    )
    (site / "dependencies.pth").write_text("import dependencies\n")

    def run(*words: str) -> bytes:
        home = {"HOME": str(tmp_path), "WDSFS_INDEX_DIR": str(tmp_path / "index"), "PATH": os.environ["PATH"]}
        return bytes(finished(tmp_path / "env/bin/wdsfs", *words, cwd=tmp_path, env=home, text=False).stdout)

    assert run("--version").decode().split()[-1] == __version__
    where = finished(tmp_path / "env/bin/python", "-c", "import wdsfs; print(wdsfs.__file__)", cwd=tmp_path)
    assert where.stdout.startswith(str(tmp_path))
    (tmp_path / "pets").mkdir()
    (tmp_path / "pets/im1.txt").write_text("a cat")
    run("pack", "-q", "--layout", "files", "pets", "-o", "pets-%d.tar")
    assert run("cat", "pets-0.tar", "pets-0/im1/txt") == b"a cat"
    assert b"ImageFolder" in run("help", "layouts"), "a page that the wheel ships"
    manual = (tmp_path / "env/share/man/man1/wdsfs.1").read_bytes()
    assert b"wdsfs mount" in manual
    for shell, name in zip(("bash", "zsh", "fish"), [*SHARED][1:], strict=True):
        assert (tmp_path / "env" / name).read_bytes() == run("completion", shell)
