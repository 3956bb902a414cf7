"""A set of hundreds of thousands of samples: what a page costs, and what the server keeps."""

from __future__ import annotations

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
    assert f"4 shards with {SAMPLES // SHARDS:,} to" in browser.texts(".plot .summary")[0]
    browser.go(large, "/random?seed=5")
    assert len(set(browser.texts(".grid .key"))) == 60


def test_a_filter_counts_all_samples_of_a_large_set(large: Viewer) -> None:
    wait_until(lambda: 'class="state"' not in large.ask("/").text, "the table")
    size = "column=bytes.cls&value="
    for query, count in ((f"{size}0", SAMPLES), ("q=k02999", 100), (f"{size}1", 0)):
        page = " ".join(large.ask(f"/?{query}").text.split())
        assert f"{count:,} of {SAMPLES:,} samples" in page
    last = large.ask(f"/?column=bytes.cls&value=0&at={SAMPLES - 30}").text
    assert last.count('<span class="key">') == 30


def test_many_pages_leave_nothing_in_memory(large: Viewer) -> None:
    for number in range(PAGES):
        place = number * 7919 % (SAMPLES - 60)
        path = (f"/?at={place}", f"/random?seed={number}", f"/go?number={place}")[number % 3]
        if number % 10 == 0:  # the slow one: it goes through all keys
            path = f"/?q=k0{place:06d}"
        assert large.ask(path).status in (200, 303)
    assert large.memory < MEMORY
