"""`wdsfs/wings.py`: a wing that is left out is said to be so, once and in one line."""

import importlib
import sys
import tomllib
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.processes import finished
from wdsfs import wings
from wdsfs.errors import NotInstalled
from wdsfs.wings import install_command


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
    done = finished(sys.executable, "-c", code, code=1)
    assert done.stderr.strip().endswith("No module named 'a_package_that_is_not_there'")


def test_the_command_names_a_checkout_and_a_page() -> None:
    """`wdsfs[view]` is found on no package index."""
    assert install_command("view").startswith("pip install '.[view]' in a checkout")
    page = (ROOT / "docs/how-to/extras.md").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    of_developers = {"demo", "test", "bench", "bench-torch", "tools", "tools-torch", "dali", "release", "dev"}
    assert [name for name in extras if f"`{name}`" not in page and name not in of_developers] == []
    for path in [*(ROOT / "wdsfs").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]:
        assert "pip install 'wdsfs[" not in path.read_text().replace("'wdsfs[view] @ git+URL'", ""), path
