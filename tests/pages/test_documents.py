"""The site of the documents, as `make docs` makes it: whole, and readable without a network."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.conftest import ROOT
from tests.pages.viewing import Browser
from tests.peers import LONG_PATIENCE, need_tool
from tests.processes import wait_until

VENV = ROOT / "build" / "docs-venv"
SITE = ROOT / "build" / "site"


def test_every_page_of_the_documents_is_in_the_menu() -> None:
    listed = re.findall(r"\S+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2])
    assert sorted(page for page in listed if page.startswith("docs/")) == sorted(
        str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")
    )
    assert all((ROOT / page).exists() for page in listed)


@pytest.mark.timeout(2 * LONG_PATIENCE)
def test_the_site_is_whole_and_searched_as_files(browser: Browser) -> None:
    need_tool("zensical", VENV)
    made = subprocess.run(
        [VENV / "bin" / "python", ROOT / ".ci" / "site.py"],
        capture_output=True,
        text=True,
        timeout=LONG_PATIENCE,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    pages = list(SITE.rglob("*.html"))
    assert len(pages) > 30
    foreign = re.compile(r'<(?:script|img|iframe)[^>]* src="?https?:|<link[^>]* href="?https?:')
    for page in pages:  # a link may lead to another site; what a page is made of may not
        assert not foreign.search(page.read_text()), page
    browser.driver.get(f"file://{SITE}/docs/reference/semantics.html")
    browser.one(".md-search__button").click()
    search = "[...document.querySelectorAll('div')].map(one => one.shadowRoot).find(one => one)"
    has_focus = f"return {search} && {search}.activeElement && {search}.activeElement.tagName === 'INPUT'"
    wait_until(lambda: browser.run(has_focus), "the field of the search")
    browser.driver.switch_to.active_element.send_keys("whiteout")
    wait_until(lambda: "The directory" in str(browser.run(f"return {search}.textContent")), "what was searched")
