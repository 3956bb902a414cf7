"""What to type for libraries that are not installed."""

import tomllib

from tests.conftest import ROOT
from wdsfs.extras import install_command


def test_the_command_names_a_checkout_and_a_page() -> None:
    """`wdsfs[view]` is found on no package index."""
    assert install_command("view").startswith("pip install '.[view]' in a checkout")
    page = (ROOT / "docs/how-to/extras.md").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    of_developers = {"demo", "test", "bench", "bench-torch", "tools", "tools-torch", "dali", "release", "dev"}
    assert [name for name in extras if f"`{name}`" not in page and name not in of_developers] == []
    for path in [*(ROOT / "wdsfs").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]:
        assert "pip install 'wdsfs[" not in path.read_text().replace("'wdsfs[view] @ git+URL'", ""), path
