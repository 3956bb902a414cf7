"""`wdsfs view` while it serves, asked by a browser or by plain requests."""

from __future__ import annotations

import contextlib
import http.client
import io
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np
from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from tests import tars
from tests.conftest import Program
from tests.processes import PATIENCE, wait_until
from tests.servers import need_server

_LOADED = "document.readyState === 'complete'"


class Answer(NamedTuple):
    """An answer of the server."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


class Viewer:
    """A server, and a client that has its cookie."""

    def __init__(self, process: subprocess.Popen[bytes], address: str) -> None:
        self.process, self.address = process, address
        self.netloc = urlsplit(address).netloc
        entry = self.ask("/?" + urlsplit(address).query, cookie=False)
        self.cookie = entry.headers["set-cookie"].partition(";")[0]

    def ask(self, path: str, *, cookie: bool = True, method: str = "GET", **headers: str) -> Answer:
        """The answer to a request; `headers` in Python's spelling. A form has the page's origin, unless given."""
        connection = http.client.HTTPConnection(self.netloc, timeout=PATIENCE)
        if method == "POST":
            headers = {"Origin": f"http://{self.netloc}"} | headers
        sent = {name.replace("_", "-"): value for name, value in headers.items() if value}
        if cookie:
            sent.setdefault("Cookie", self.cookie)
        try:
            connection.request(method, path, headers=sent)
            answer = connection.getresponse()
            return Answer(
                answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
            )
        finally:
            connection.close()

    def paths(self, query: str = "", page: str = "/") -> list[str]:
        """The samples of a grid, by their paths."""
        links = self.ask(f"{page}{query}").text.split('href="/sample/')[1:]
        return [re.split('[?"]', link)[0] for link in links]

    @property
    def memory(self) -> int:
        """What the server itself has in memory, without pages of files (bytes)."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) << 10


@contextlib.contextmanager
def viewing(
    program: Program, *arguments: str | Path, cwd: Path | None = None, new_interpreter: bool = False
) -> Iterator[Viewer]:
    """`wdsfs view` with these arguments; ends as by Ctrl-C, and leaves no process behind."""
    said = program.home / "view.log"
    with said.open("wb") as log:
        process = program.start(
            "view",
            "--no-browser",
            *arguments,
            new_interpreter=new_interpreter,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=cwd or program.home,
        )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().decode().strip()
        assert address.startswith("http://127.0.0.1:"), said.read_text()
        yield Viewer(process, address)
        children = _children(process.pid)
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE)
        wait_until(lambda: not any(map(_is_alive, children)), "the end of the workers")
        assert "Traceback" not in said.read_text()
    except BaseException:
        print(f"--- log of the server\n{said.read_text()}---")
        raise
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(one) for one in (task / "children").read_text().split()]
    return found


def _is_alive(pid: int) -> bool:
    """True for a process that has not ended; the tests may not have reaped it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Browser:
    """A headless browser. What a test waits for is in the page, not in a time."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, viewer: Viewer) -> None:
        """The first page, by the address that the command has printed."""
        self.driver.delete_all_cookies()
        self._get(viewer.address)  # which leads on to the first page
        script = f"return {_LOADED} && document.querySelector('main h1') !== null"
        wait_until(lambda: self.run(script), "the first page")

    def go(self, viewer: Viewer, path: str) -> None:
        self._get(f"http://{viewer.netloc}{path}")

    def _get(self, address: str) -> None:
        with self.leaving():  # chromedriver comes back before the page is whole, once in twenty times
            self.driver.get(address)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        wait_until(lambda: self.all(selector), selector)
        return self.all(selector)[0]

    def run(self, script: str, *arguments: object) -> object:
        return self.driver.execute_script(script, *arguments)

    def texts(self, selector: str) -> list[str]:
        """The texts of elements, at one moment."""
        found = self.run(
            "return [...document.querySelectorAll(arguments[0])].map(one => one.textContent)", selector
        )
        assert isinstance(found, list)
        return [" ".join(one.split()) for one in found]

    @contextlib.contextmanager
    def leaving(self) -> Iterator[None]:
        """What is done in here leads to another page; wait for it."""
        self.run("document.documentElement.dataset.old = '1'")
        yield
        script = f"return {_LOADED} && !document.documentElement.dataset.old"
        wait_until(lambda: self.run(script), "the next page")

    def follow(self, selector: str, at: int = 0) -> None:
        """Click what leads to another page."""
        self.one(selector)
        with self.leaving():
            self.run("arguments[0].click()", self.all(selector)[at])

    def press(self, key: str) -> None:
        """A key that leads to another page."""
        with self.leaving():
            self.driver.switch_to.active_element.send_keys(key)

    def search(self, **fields: str) -> None:
        """Fill in the filter, and show what passes."""
        self.run("document.querySelectorAll('details').forEach(one => { one.open = true })")
        for name, value in fields.items():
            field = self.one(f".filter [name={name}]")
            field.clear()
            field.send_keys(value)
        self.follow(".filter button")

    def wait_for_table(self) -> None:
        """Until then, the page replaces some of its parts."""
        wait_until(lambda: not self.all(".state") and self.all(".chart"), "the table")

    def wait_for_what_is_seen(self) -> None:
        script = """return [...document.querySelectorAll('.grid img, .pictures img')].every(
                one => one.complete || one.getBoundingClientRect().top > innerHeight)
            && [...document.querySelectorAll('[data-snippet], [data-preview]')].every(
                one => one.dataset.filled || one.getBoundingClientRect().top > innerHeight)"""
        wait_until(lambda: self.run(script), "what is on the screen")

    def wait_for_previews(self, count: int) -> None:
        """Scroll through a sample until all its files are shown."""

        def are_there() -> bool:
            self.run("document.querySelector('[data-preview]:not([data-filled])')?.scrollIntoView()")
            return len(self.all("[data-preview][data-filled=yes]")) == count

        wait_until(are_there, f"{count} previews")

    def set_width(self, width: int, height: int = 800) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


@contextlib.contextmanager
def a_browser() -> Iterator[Browser]:
    """Debian's chromium, without a window."""
    binary = need_server(shutil.which("chromium"), "chromium")
    driver_binary = need_server(shutil.which("chromedriver"), "chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = str(binary)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory(prefix="wdsfs-browser-", ignore_cleanup_errors=True) as profile:
        for one in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "no-first-run"):
            options.add_argument(f"--{one}")
        options.add_argument(f"--user-data-dir={profile}")
        here = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(driver_binary), env=here))
        try:
            driver.set_page_load_timeout(PATIENCE)
            found = Browser(driver)
            found.set_width(1200)
            yield found
        finally:
            driver.quit()


def picture(shade: int, size: tuple[int, int] = (96, 72)) -> bytes:
    """A small PNG: a disc, whose place and colours `shade` decides."""
    rows, columns = np.mgrid[0 : size[1], 0 : size[0]]
    turn = shade / 25
    middle = size[1] * (0.5 + 0.2 * np.sin(turn)), size[0] * (0.5 + 0.3 * np.cos(turn))
    inside = np.hypot(rows - middle[0], columns - middle[1])[..., None] < size[1] / 3.5
    ground = 90 + 60 * np.sin(turn + np.arange(3) * 2.1) + (rows / size[1] * 60)[..., None]
    pixels = np.where(inside, 255 - ground, ground).clip(0, 255).astype(np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    return data.getvalue()


def array() -> bytes:
    data = io.BytesIO()
    np.save(data, np.arange(48, dtype=np.float32).reshape(6, 8))
    return data.getvalue()


def a_shard(number: int, count: int = 40) -> bytes:
    """Samples of four classes, as directories; some have an array, some a text."""
    members = []
    for at in range(count):
        key = b"class%d/image%d%03d" % (at % 4, number, at)
        members.append(tars.member(key + b".png", picture(number * 40 + at * 5)))
        members.append(
            tars.member(
                key + b".json", b'{"label": %d, "score": %d, "of": {"shard": "s%d"}}' % (at % 7, at * at, number)
            )
        )
        members.append(tars.member(key + b".cls", b"%d" % (at % 4)))
        if at % 10 == 0:
            members.append(tars.member(key + b".npy", array()))
        if at % 10 == 1:
            members.append(tars.member(key + b".txt", b"a caption, of sample %d" % at))
    return tars.tar(*members)
