"""The pages in a real browser: grid, one sample, search, filters, random, plots, problems, keyboard, screens."""

from __future__ import annotations

import html
import io
import json
import re
import shlex
import tarfile
import wave
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

from tests import tars
from tests.conftest import Program
from tests.pages.viewing import Browser, Viewer, a_shard, picture, viewing
from tests.processes import wait_until
from wdsfs.pages.site import UNREADABLE, plot_shards

DOCS = Path(__file__).parent.parent.parent / "docs" / "images"
SAMPLE = "/sample/train-000000/class0/image0000"


def test_the_grid_shows_thumbnails_and_captions_and_turns_its_pages(browser: Browser, looking: Viewer) -> None:
    browser.open(looking)
    assert browser.texts(".grid .key")[:2] == ["class0/image0000", "class1/image0001"]
    assert "0 to 59 of 120 samples in 3 shards" in browser.texts(".summary")[0]
    browser.wait_for_what_is_seen()
    widths = "return [...document.querySelectorAll('.grid img')].slice(0, 4).map(one => one.naturalWidth)"
    assert browser.run(widths) == [96] * 4
    wait_until(lambda: browser.texts(".grid .value")[:3] == ["cls 0", "cls 1", "cls 2"], "the classes")
    assert browser.texts(".grid .caption")[0] == "a caption, of sample 1"
    assert browser.texts(".grid .columns")[0] == "png json cls npy"
    browser.follow("a[rel=next]")
    assert browser.texts(".grid .key")[0] == "class0/image1020"
    assert not browser.all("a[rel=next]")
    browser.follow("a[rel=prev]")
    assert browser.texts(".grid .key")[0] == "class0/image0000"


def test_a_sample_shows_all_its_columns_and_where_they_are(browser: Browser, looking: Viewer) -> None:
    browser.open(looking)
    browser.follow(".grid a")
    assert [text.split()[0] for text in browser.texts("section h2")] == ["png", "npy", "json", "cls"]
    browser.wait_for_previews(4)
    assert '"label": 0' in browser.texts("pre.json")[0]
    assert "float32" in " ".join(browser.texts(".preview .summary"))
    shard, member, offset, _, command, path = browser.texts("section[id=png] dd")
    assert shard.endswith("train-000000.tar")
    assert (member, offset) == ("class0/image0000.png", "512")
    assert command.startswith("wdsfs cat ")
    assert path == "MOUNTPOINT/train-000000/class0/image0000/png"
    browser.press("g")
    assert browser.all(".grid .key")


@pytest.mark.parametrize("options", [(), ("--columns", "x=png")])
def test_the_extracting_command_extracts(program: Program, options: tuple[str, ...]) -> None:
    content = picture(3)
    program.write("a.tar", tars.tar(tars.member(b"y.png", b""), tars.member(b"x/b c.png", content)))
    name = "x" if options else "png"
    with viewing(program, *options, "a.tar") as viewer:
        page = html.unescape(viewer.ask(f"/preview/a/x/b%20c/{name}").text)
    command = page.partition("<code>")[2].partition("</code>")[0]
    words = shlex.split(command)
    assert (words[0], words[-2:]) == ("wdsfs", [">", f"b c.{name}"])  # as *Save the file* calls it
    assert program.run(*words[1:-2]).stdout == content


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("q=class3/image2039", ["000002/class3/image2039"]),
        ("shard=train-000001&has=txt", [f"000001/class{n % 4}/image10{n:02d}" for n in (1, 11, 21, 31)]),
        ("shard=*2&class=class0&has=npy", ["000002/class0/image2000", "000002/class0/image2020"]),
        ("q=image000&lacks=npy,txt", [f"000000/class{n % 4}/image000{n}" for n in range(2, 10)]),
        ("column=json&field=of.shard&value=s*&q=image2000", ["000002/class0/image2000"]),
        ("column=txt&value=*caption*sample 31*&shard=train-000000", ["000000/class3/image0031"]),
    ],
)
def test_filters(looking: Viewer, query: str, expected: list[str]) -> None:
    assert looking.paths("?" + query.replace(" ", "+")) == [f"train-{path}" for path in expected]


def test_the_pages_of_a_result_add_up(looking: Viewer) -> None:
    assert 'href="/preview/train-000000/class0/image0000/json"' in looking.ask(SAMPLE).text  # without scripts
    assert "&#34;label&#34;: 0" in looking.ask("/preview/train-000000/class0/image0000/json").text
    query = "?column=json&field=label&value=*&order=json.label&down=1"
    pages = [looking.paths(f"{query}&at={at}") for at in (0, 60, 120)]
    assert [len(paths) for paths in pages] == [60, 60, 0]
    assert len(set(pages[0] + pages[1])) == 120
    assert pages[0][0] == "train-000000/class2/image0006"  # the first with the label 6
    assert "120 of 120 samples" in " ".join(looking.ask(f"/{query}").text.split())


def _shown(browser: Browser) -> list[int]:
    """The numbers of the samples in the grid, by their keys."""
    return [int(key[-4]) * 40 + int(key[-3:]) for key in browser.texts(".grid .key")]


def test_bars_and_typed_conditions_filter_and_chips_take_them_off(browser: Browser, looking: Viewer) -> None:
    """What passes is computed from what `a_shard` writes."""
    browser.open(looking)
    browser.wait_for_table()
    browser.search(column="cls", value="2")
    assert "30 of 120 samples" in browser.texts(".summary")[0]
    browser.follow("a[aria-label^='json.label 3:']")
    passing = [number for number in range(120) if number % 40 % 4 == 2 and number % 40 % 7 == 3]
    assert _shown(browser) == passing
    browser.follow("a[aria-label='Order by bytes.png, largest first']")
    assert sorted(_shown(browser)) == passing
    sizes = [int(text.rpartition(" ")[2]) for text in browser.texts(".value:has(+ .columns)")]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) > 1
    chips = [text[:-2] for text in browser.texts(".chips li:not(:last-child)")]
    assert chips == ["cls is 2", "json.label is 3", "by bytes.png, largest first"]
    browser.follow(".chips a", 2)
    browser.follow(".chips a")
    assert _shown(browser) == [number for number in range(120) if number % 40 % 7 == 3]
    assert browser.one("a[aria-current]").get_attribute("aria-label") == "json.label 3: 18 samples"
    browser.follow("a[aria-current]")
    bars = [bar.get_attribute("aria-label") or "" for bar in browser.all("a[aria-label^='json.score ']")]
    counts = [int(re.findall(": ([0-9]+) sample", bar)[0]) for bar in bars]
    assert (sum(counts), len(counts) > 1) == (120, True)
    fullest = counts.index(max(counts))
    with browser.leaving():  # by what lies under the mouse: the link of a drawing has no `click`
        browser.run(
            """arguments[0].scrollIntoView({block: "center"});
            const {x, y, width, height} = arguments[0].getBoundingClientRect();
            const hit = document.elementFromPoint(x + width / 2, y + height / 2);
            hit.dispatchEvent(new MouseEvent("click", {bubbles: true, cancelable: true}));""",
            browser.all("a[aria-label^='json.score ']")[fullest],
        )
    assert f"{counts[fullest]} of 120 samples" in browser.texts(".summary")[0]
    browser.follow(".chips .clear")
    assert "0 to 59 of 120 samples" in browser.texts(".summary")[0]


def test_the_page_follows_the_table_by_itself(browser: Browser, looking: Viewer) -> None:
    """A page of an unfinished table asks again; what has changed is replaced, and no more."""
    browser.open(looking)
    browser.wait_for_table()
    browser.run(
        """shown.set("head", ""); shown.set("charts", "");
        document.querySelector(".charts").replaceChildren();
        document.querySelector(".key").textContent = "as before";
        document.querySelector(".head").insertAdjacentHTML("beforeend", "<p class=state></p>");
        waitForTable(0);"""
    )
    browser.wait_for_table()
    assert browser.texts(".key")[0] == "as before"


def test_a_list_is_saved_and_its_commands_work(browser: Browser, looking: Viewer, program: Program) -> None:
    browser.open(looking)
    browser.go(looking, "/?column=cls&is=%3D&value=3&q=image1")
    address = browser.one(".save a").get_attribute("href") or ""
    assert address.endswith("/keys.txt?q=image1&column=cls&is=%3D&value=3")
    pack, mount = browser.texts(".command code")
    assert mount == "wdsfs mount --keys keys.txt 'train-{000000..000002}.tar' MOUNTPOINT"
    program.write("keys.txt", looking.ask(f"/{address.rpartition('/')[2]}").body)
    for number in range(3):
        program.write(f"train-{number:06d}.tar", a_shard(number))
    program.run(*shlex.split(pack)[1:])
    with tarfile.open(program.home / "chosen-000000.tar") as packed:
        keys = {name.partition(".")[0] for name in packed.getnames()}
    assert keys == {f"class3/image10{at:02d}" for at in range(3, 40, 4)}


def test_a_narrow_screen_shows_samples_first(browser: Browser, looking: Viewer) -> None:
    browser.open(looking)
    browser.set_width(400)
    try:
        browser.go(looking, "/")
        assert browser.run("return document.querySelector('.grid').getBoundingClientRect().top < 250")
        assert not browser.one(".filter").is_displayed()
        browser.one("body").send_keys("/")
        assert browser.one(".filter").is_displayed()
        browser.driver.switch_to.active_element.send_keys("image1007")
        browser.press(Keys.ENTER)
        assert browser.texts(".grid .key") == ["class3/image1007"]
    finally:
        browser.set_width(1200)


@pytest.mark.parametrize("options", [(), ("--class-names", "names.json")])
def test_classes_have_their_names(program: Program, options: tuple[str, ...]) -> None:
    """Beside the shards, or as told; a name that is another class's label stands for neither."""
    program.write("a.tar", tars.tar(*(tars.member(b"s%d.cls" % at, b"%d" % (at % 3)) for at in range(6))))
    name, names = ("names.json", b'["cat", "2", "dog"]') if options else ("classes.txt", b"cat\n2\ndog\n")
    program.write(name, names)
    with viewing(program, *options, "a.tar") as viewer:
        wait_until(lambda: 'class="state"' not in viewer.ask("/").text, "the table")
        page = viewer.ask("/").text
        assert re.findall("cls</span> <b>([^<]*)", page) == ["0 cat", "1 2", "2 dog"] * 2
        links = [html.unescape(link) for link in re.findall('<li><a href="([^"]*column=cls[^"]*)"', page)]
        assert [link.rpartition("=")[2] for link in links] == ["cat", "1", "dog"]
        assert [viewer.paths(link, "") for link in links] == [[f"a/s{at}", f"a/s{at + 3}"] for at in range(3)]
    if options:
        program.write("names.json", b"{}")
        assert b"names no class" in program.run("view", *options, "a.tar", code=2).stderr


HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[31m\u202e\"'&"


def test_hostile_names_and_values_are_text(browser: Browser, program: Program) -> None:
    value = json.dumps({HOSTILE: 1, "text": HOSTILE, "long": "x" * 100_000})
    files = {"json": value.encode(), "txt": HOSTILE.encode() * 100, "cls": HOSTILE.encode(), "<b>": b"x"}
    members = [tars.member(f"s{at}.{name}".encode(), data) for at in range(2) for name, data in files.items()]
    program.write("a.tar", tars.tar(*members))
    program.write("classes.txt", HOSTILE.encode())
    with viewing(program, "a.tar") as viewer:
        browser.open(viewer)
        browser.wait_for_table()
        browser.follow(".chart li a")
        browser.wait_for_what_is_seen()
        assert "2 of 2 samples" in browser.texts(".summary")[0]
        assert browser.run("return document.querySelectorAll('img, b b, .grid script').length") == 0
        assert not any(set(text) & {"\x1b", "\u202e"} for text in browser.texts("main"))
        assert "\\x1b[31m\\u202e" in browser.texts(".chips")[0]
        assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
        assert len(viewer.ask("/").body) < 100_000


@pytest.mark.parametrize(
    ("query", "note"),
    [
        ("has=jpg", "No sample has a column jpg. Columns of this set: cls, json, npy, png, txt."),
        ("lacks=jpg,cls", "No sample has a column jpg. Columns"),
        ("column=josn&field=label&value=3", "No sample has a column josn.label. Columns"),
        ("value=3", "To search for a value, type the name of its column, too."),
        ("has=png&column=txt&value=none", ""),
    ],
)
def test_an_unknown_column_is_named(looking: Viewer, query: str, note: str) -> None:
    for page in ("/", "/random"):
        answer = " ".join(looking.ask(f"{page}?{query}").text.split())
        assert answer.partition('role="alert">')[2].startswith(note)
        assert ('role="alert"' in answer) == bool(note)


def test_next_and_previous_keep_the_filter(browser: Browser, looking: Viewer) -> None:
    browser.open(looking)
    browser.search(column="cls", value="3", has="png")
    browser.follow(".grid a", 1)
    assert browser.texts("h1") == ["class3/image0007"]
    for key, expected in (
        ("j", "image0011"),
        ("k", "image0007"),
        ("k", "image0003"),
        (Keys.ARROW_RIGHT, "image0007"),
    ):
        browser.press(key)
        assert browser.texts("h1") == [f"class3/{expected}"]
    assert "with column png, cls is 3" in browser.texts(".summary q")[0]
    browser.follow(".summary q + a")
    assert browser.texts(".grid .key")[:2] == ["class3/image0003", "class3/image0007"]


def test_next_and_previous_go_over_shards_and_have_an_end(looking: Viewer) -> None:
    for place, expected in (("next?number=30", "class0/image1000"), ("previous?number=80", "class2/image1030")):
        location = looking.ask(f"/{place}&has=npy").headers["location"]
        assert location == f"/sample/train-000001/{expected}?has=npy"
    for query in ("column=cls&value=1", "class=class1", "q=image0001"):
        first, last = (looking.ask(f"/{page}&{query}") for page in ("previous?number=1", "next?number=119"))
        assert (first.status, "no sample before this one passes" in first.text) == (404, True)
        assert (last.status, "no sample after this one passes" in last.text) == (404, True)


def test_media_come_first_on_the_page_of_a_sample(program: Program) -> None:
    names = [b"cls", b"json", b"npy", b"txt", b"wav", b"seg.png", b"mp4", b"jpg"]
    program.write("a.tar", tars.tar(*(tars.member(b"x." + name, b"0") for name in names)))
    with viewing(program, "a.tar") as viewer:
        page = viewer.ask("/sample/a/x").text
        answer = viewer.ask("/sample/a/x/txt")
        assert (answer.status, "a/x/txt: is a file, not a sample" in answer.text) == (404, True)
        shown = [part.partition('"')[0] for part in page.split('<section id="')[1:]]
        assert shown == ["seg.png", "jpg", "mp4", "wav", "npy", "cls", "json", "txt"]


def test_tiles_of_samples_without_pictures(browser: Browser, program: Program) -> None:
    columns = {
        b"a": {b"cls": b"3", b"txt": b"what was said", b"wav": b"RIFF"},
        b"b": {b"cls": b"4", b"json": b'{"caption": "a dog"}'},
        b"c": {b"csv": b"name,age\nanna,3\nbert,4\n"},
        b"d": {b"cls": b"5"},
        b"e": {b"sentence": "in a column of another name, in Czech: \u017elu\u0165".encode()},
        b"f": {b"bin": bytes(range(256))},
        b"g": {b"txt": "\ufeffwide".encode("utf-16-le")},
        b"h": {b"mp4": b"film", b"txt": b"words"},
    }
    members = (tars.member(key + b"." + name, data) for key in columns for name, data in columns[key].items())
    program.write("a.tar", tars.tar(*members))
    with viewing(program, "a.tar") as viewer:
        browser.open(viewer)
        browser.wait_for_table()
        browser.wait_for_what_is_seen()
        tiles = browser.run("return [...document.querySelectorAll('.tile')].map(one => one.textContent)")
        own = ("what was said", '{"caption": "a dog"}', "name,age\nanna,3\nbert,4", "5")
        assert tiles == [*own, "in a column of another name, in Czech: \u017elu\u0165", "bin", "wide"]
        assert browser.texts(".grid .value") == ["cls 3", "cls 4", "cls 5"]
        assert browser.texts(".caption") == ["words"]
        player = browser.one(".grid audio")
        assert [player.get_attribute("preload"), player.get_attribute("aria-label")] == ["none", "Sound of a"]
        assert (player.get_attribute("src") or "").endswith("/media/a/a/wav")
        player = browser.one(".grid video")
        assert (player.get_attribute("preload"), player.get_attribute("controls")) == ("metadata", None)
        assert (player.get_attribute("src") or "").endswith("/media/a/h/mp4")
        browser.go(viewer, "/sample/a/h")
        browser.wait_for_previews(2)
        assert browser.one("video").get_attribute("preload") == "metadata"


def test_a_page_shows_a_bounded_number_of_lines(program: Program) -> None:
    texts = {b"empty": b"\n" * 500_000, b"long": b"x\n" * 2000 + b"y", b"all": b"x\n" * 2000}
    program.write("a.tar", tars.tar(*(tars.member(key + b".txt", text) for key, text in texts.items())))
    with viewing(program, "a.tar") as viewer:
        for key in ("empty", "long", "all"):
            page = viewer.ask(f"/preview/a/{key}/txt").text
            assert page.partition("<pre")[2].partition("</pre>")[0].count("\n") <= 2000
            assert ("2,000 lines are shown; there are more." in page) == (key != "all")
            assert ("Save the whole file" in page) == (key != "all")


def test_the_same_seed_gives_the_same_random_sample(looking: Viewer) -> None:
    first = looking.paths("?seed=7", "/random")
    assert len(set(first)) == 60
    assert first != sorted(first)
    assert looking.paths("?seed=8", "/random") != first == looking.paths("?seed=7", "/random")
    [further] = re.findall('rel="next" href="([^"]*)"', looking.ask("/random?seed=7").text)
    assert set(looking.paths(html.unescape(further), "")).isdisjoint(first)
    assert len(looking.paths("?seed=1&has=npy", "/random")) == 12


def test_plots(browser: Browser, looking: Viewer) -> None:
    browser.open(looking)
    browser.go(looking, "/plots")
    browser.wait_for_table()
    assert max(float(bar.get_attribute("value") or 0) for bar in browser.all(".plot progress")) == 1
    browser.follow("a[aria-label='cls 3: 30 samples']")
    assert "30 of 120 samples" in browser.texts(".summary")[0]


def test_the_chart_of_shards() -> None:
    plot = plot_shards([100, 50, UNREADABLE, 100])
    assert "4 shards with 50 to 100 samples, 83 on average. 1 shard cannot" in plot.alt
    assert [bar.length for bar in plot.bars] == [1, 0.5, 0, 1]
    assert plot.bars[1].cells == ("1", "50", "50.0", "50")
    assert plot_shards([]).alt == "There are no samples in 0 shards."
    many = plot_shards([1000] * 50_000 + [1] + [1000] * 49_999)
    assert len(many.bars) == 120
    assert {bar.cells[3] for bar in many.bars} == {"1,000"}
    [odd] = [bar.cells for bar in many.bars if bar.cells[1] == "1"]
    assert int(odd[0].split(" ")[0].replace(",", "")) <= 50_000


def test_a_broken_shard_does_not_hide_the_others(program: Program) -> None:
    program.write("a.tar", tars.tar(tars.member(b"x.txt", b"x")))
    program.write("b.tar", b"this is no tar" * 100)
    program.write("cut.tar", tars.tar(tars.member(b"y.txt", bytes(5000)))[:3000])
    with viewing(program, "--allow-missing", "a.tar", "b.tar", "cut.tar") as viewer:
        assert "2 samples in 3 shards" in viewer.ask("/").text
        assert "1 shard cannot be read" in viewer.ask("/plots").text
        page = viewer.ask("/problems").text
        assert [name in page for name in ("/a.tar:", "/b.tar:", "/cut.tar:")] == [False, True, True]
        page = viewer.ask("/?column=txt&value=none").text
        assert re.search("1 file without a value, the first: .*cut.tar: the shard ends", page)


def test_the_findings_of_check_that_the_index_knows_lead_to_their_samples(program: Program) -> None:
    samples = [tars.member(b"s%d.%s" % (at, name), b"1") for at in range(9) for name in (b"txt", b"cls")]
    split = [tars.member(b"s0.json", b"{}"), tars.member(b"<b>\x1b.txt", b"x")]
    program.write("a.tar", tars.tar(*samples, *split))
    with viewing(program, "a.tar") as viewer:
        page = viewer.ask("/problems").text
        rows = [re.sub("<[^>]*>", "|", row) for row in page.partition("<tbody>")[2].split("<tr>")[1:]]
        assert ["split sample" in rows[0], "s0" in rows[0], "side by side" in rows[0]] == [True] * 3
        assert ["missing extension" in row and "has no" in row for row in rows[1:]] == [True] * 2
        assert "&lt;b&gt;\\x1b" in page
        for link in re.findall('href="([^"]*q=[^"]*)"', page):
            assert viewer.paths(html.unescape(link), ""), link


def test_a_narrow_screen_has_nothing_beside_it_and_everything_has_a_name(
    browser: Browser, looking: Viewer
) -> None:
    """By the browser's own tree of accessible names."""
    roles = ("link", "button", "textbox", "searchbox", "image")
    browser.open(looking)
    browser.set_width(360)
    try:
        for path in ("/", "/random?seed=3", SAMPLE, "/plots", "/problems"):
            browser.go(looking, path)
            assert browser.run("return document.documentElement.scrollWidth <= innerWidth"), path
            browser.wait_for_what_is_seen()
            nodes = browser.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
            used = [node for node in nodes if not node.get("ignored") and node["role"]["value"] in roles]
            assert used
            assert [node for node in used if not node["name"]["value"]] == [], path
    finally:
        browser.set_width(1200)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(browser: Browser, looking: Viewer, scheme: str) -> None:
    """The text can be read. The pictures in docs/ come from here: remove them to have them made anew."""
    _set_colours(browser, scheme)
    try:
        browser.open(looking)
        wait_until(lambda: not browser.all(".state") and browser.all(".grid .value"), "the table")
        browser.wait_for_what_is_seen()
        found = browser.run("const one = getComputedStyle(document.body); return [one.color, one.backgroundColor]")
        assert isinstance(found, list)
        text, ground = map(_brightness, found)
        assert (text < 80 and ground > 200) if scheme == "light" else (text > 200 and ground < 80)
        shot, place = browser.driver.get_screenshot_as_png(), DOCS / f"view-{scheme}.png"
        if not place.exists():
            place.write_bytes(shot)
    finally:
        _set_colours(browser, "light")


def _set_colours(browser: Browser, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def _brightness(colour: str) -> float:
    numbers = [float(one) for one in colour.partition("(")[2].rstrip(")").split(",")[:3]]
    return sum(numbers) / 3


def test_a_player_plays(browser: Browser, program: Program) -> None:
    sound = io.BytesIO()
    with wave.open(sound, "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(16000))
    program.write("a.tar", tars.tar(tars.member(b"x.wav", sound.getvalue())))
    with viewing(program, "a.tar") as viewer:
        browser.open(viewer)
        browser.go(viewer, "/sample/a/x")
        browser.wait_for_previews(1)
        wait_until(lambda: browser.run("return document.querySelector('audio').readyState"), "the sound")
        assert browser.run("return document.querySelector('audio').duration") == 1


def test_nothing_is_loaded_from_elsewhere(browser: Browser, looking: Viewer) -> None:
    browser.open(looking)
    browser.driver.get_log("browser")
    browser.go(looking, SAMPLE)
    browser.wait_for_previews(4)
    names = browser.run("return performance.getEntriesByType('resource').map(one => one.name)")
    assert isinstance(names, list)
    assert names
    assert [name for name in names if not name.startswith((f"http://{looking.netloc}/", "data:"))] == []
    assert browser.driver.get_log("browser") == []
