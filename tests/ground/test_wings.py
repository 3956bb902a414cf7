"""`wdsfs/wings.py`: a wing that is left out is said to be so, once and in one line."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from wdsfs import wings
from wdsfs.errors import NotInstalled


@pytest.mark.parametrize("wing", wings.WINGS)
def test_a_wing_that_is_there_is_loaded(wing: str) -> None:
    assert wings.load(wing) is importlib.import_module(f"wdsfs.{wing}")
    assert wings.is_installed(wing)


def test_a_module_of_a_wing_is_loaded() -> None:
    assert wings.load("interop", "lint").__name__ == "wdsfs.interop.lint"


@pytest.mark.parametrize("left", ["nothing", "an empty directory"])
def test_a_wing_that_is_left_out_is_named(left: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where an uninstalled package leaves its directory, which Python takes for a package."""
    if left != "nothing":
        (tmp_path / "kernel").mkdir()
    monkeypatch.setattr("wdsfs.__path__", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wdsfs.kernel", raising=False)
    with pytest.raises(NotInstalled, match=r"^wdsfs\.kernel is not installed: .*$"):
        wings.load("kernel")
    assert not wings.is_installed("kernel")
    sys.modules.pop("wdsfs.kernel", None)


def test_what_a_wing_needs_is_not_taken_for_the_wing(tmp_path: Path) -> None:
    package = tmp_path / "wdsfs"
    (package / "kernel").mkdir(parents=True)
    (package / "kernel" / "__init__.py").write_text("import a_package_that_is_not_there")
    code = f"import wdsfs; wdsfs.__path__[:0] = [{str(package)!r}]; from wdsfs import wings; wings.load('kernel')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip().endswith("No module named 'a_package_that_is_not_there'")
