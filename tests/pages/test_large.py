"""A set of hundreds of thousands of samples: what a page costs, and what the server keeps."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

import pytest

from tests import sets
from tests.conftest import Program
from tests.pages.viewing import Browser, Viewer, viewing
from tests.processes import wait_until
from tests.thorough import THOROUGH

SAMPLES, SHARDS = 300_000, 4
PAGES = 60 * THOROUGH
MEMORY = 200 << 20


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    program = Program(tmp_path_factory.mktemp("large"))
    each = SAMPLES // SHARDS
    for number in range(SHARDS):
        sets.write_samples(program.home / f"m-{number:06d}.tar", each, number * each, b"k%s.cls")
    with viewing(program, "m-{000000..000003}.tar", new_interpreter=True) as found:
        yield found


def test_pages_search_and_filters_of_a_large_set(browser: Browser, large: Viewer) -> None:
    browser.open(large)
    assert f"{SAMPLES:,} samples in 4 shards" in browser.texts(".summary")[0]
    browser.search(q="k0299999")
    assert browser.texts(".grid .key") == ["k0299999"]
    browser.go(large, "/?q=77777")
    assert "k0077777" in browser.texts(".grid .key")
    browser.go(large, "/go?number=154321")
    assert browser.texts("h1") == ["k0154321"]
    browser.go(large, "/plots")
    assert len(browser.all(".plot table")) == 2  # the keys have no folders
    browser.go(large, "/random?seed=5")
    assert len(set(browser.texts(".grid .key"))) == 60


def test_a_value_is_looked_for_page_by_page(large: Viewer) -> None:
    """A filter that reads members does not go through the set for one page: it says where to go on."""
    page = large.ask("/?column=cls&value=none").text
    assert "None found yet" in page
    assert "Search on" in page
    # Without scripts, too: the browser asks on.
    [address] = re.findall('<noscript><meta http-equiv="refresh" content="1; url=([^"]*)"></noscript>', page)
    further = large.ask(html.unescape(address)).text
    assert _looked(further) > _looked(page) > 0


def _looked(page: str) -> int:
    """How many samples a search has looked at."""
    return int(re.findall(r"looked at\s+([\d,]+)", page)[0].replace(",", ""))


def test_a_search_shows_its_progress_and_can_be_stopped(browser: Browser, large: Viewer) -> None:
    browser.open(large)
    browser.search(column="cls", value="none")
    first = _looked(browser.texts(".summary")[0])
    wait_until(lambda: _looked(browser.texts(".summary")[0]) > first, "the search to go on")
    assert 0 < float(str(browser.run("return document.querySelector('progress').value"))) < 1
    browser.one(".searching button").click()
    wait_until(lambda: browser.texts(".searching") == ["Stopped."], "its end")
    looked = _looked(browser.texts(".summary")[0])
    address = browser.one("a[rel=next]").get_attribute("href") or ""
    assert address.endswith(f"at={looked}")


@pytest.mark.parametrize(("page", "number"), [("next", 0), ("previous", SAMPLES - 1)])
def test_the_next_sample_is_looked_for_page_by_page(large: Viewer, page: str, number: int) -> None:
    looked = [0]
    address = f"/{page}?column=cls&value=none&number={number}"
    for _ in range(3):
        answer = large.ask(address)
        assert answer.status == 200
        [further] = re.findall('http-equiv="refresh" content="0; url=([^"]*)"', answer.text)
        address = html.unescape(further)
        looked.append(int(re.findall(r"Looked at ([\d,]+)", answer.text)[0].replace(",", "")))
    assert looked == sorted(set(looked))
    assert "Stop" in answer.text
    # It does not go on by itself for ever.
    assert 'http-equiv="refresh"' not in large.ask(re.sub("turn=[0-9]+", "turn=1000", address)).text


def test_many_pages_leave_nothing_in_memory(large: Viewer) -> None:
    for number in range(PAGES):
        place = number * 7919 % (SAMPLES - 60)
        path = (f"/?at={place}", f"/random?seed={number}", f"/go?number={place}")[number % 3]
        if number % 10 == 0:  # the slow one: it goes through all keys
            path = f"/?q=k0{place:06d}"
        assert large.ask(path).status in (200, 303)
    assert large.memory < MEMORY
