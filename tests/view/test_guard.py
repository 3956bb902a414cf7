"""Who may ask, and what hostile members can do: nothing."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests import tars
from tests.conftest import Program
from tests.view.viewing import Browser, Viewer, viewing

HOSTILE = {
    b"svg": b"<svg xmlns='http://www.w3.org/2000/svg'><script>top.hit = 1; document.title = 'hit'</script></svg>",
    b"html": b"<!doctype html><title>hit</title><script>document.title = 'hit'; top.hit = 1</script>",
    b"pdf": b"%PDF-1.4\n1 0 obj<</OpenAction<</S/JavaScript/JS(app.alert(1))>>>>endobj\n",
    b"xml": b"<?xml version='1.0'?><!DOCTYPE x [<!ENTITY e SYSTEM 'file:///etc/passwd'>]><x>&e;</x>",
    b"json": b'{"</script><script>top.hit=1</script>": "<img src=x onerror=top.hit=1>"}',
    b"txt": b"</textarea></pre><script>top.hit=1</script><img src=x onerror=top.hit=1>",
}
KEY = b"<img src=x onerror=hit=1>&\"'\n\xff"  # no dot: that would end the key


def test_only_this_machine_reaches_it(looking: Viewer) -> None:
    port = urlsplit(looking.address).port
    assert port is not None
    found = set()
    for table in ("tcp", "tcp6"):
        rows = [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
        found |= {row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")}
    assert found == {f"0100007F:{port:04X}"}


def test_a_port_that_is_taken_is_named(program: Program, looking: Viewer) -> None:
    program.write("a.tar", tars.tar(tars.member(b"x.txt", b"x")))
    port = str(urlsplit(looking.address).port)
    assert f"port {port} cannot be used" in program.refused(
        "view", "--no-browser", "--port", port, "a.tar", code=2
    )


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Sec_Fetch_Site": "same-origin"}, 200),
        ({"Cookie": "wdsfs=x"}, 403),
        ({"Host": "evil.example"}, 421),
        ({"Host": "127.0.0.1:1"}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-site"}, 403),
    ],
)
def test_who_may_ask(looking: Viewer, headers: dict[str, str], status: int) -> None:
    for path in ("/", "/static/style.css", "/sample/train-000000/class0/image0000"):
        assert looking.ask(path, **headers).status == status, path


@pytest.mark.parametrize("token", ["A" * 43, "", "%FF"])
def test_a_wrong_token_gets_nothing(looking: Viewer, token: str) -> None:
    answer = looking.ask(f"/?token={token}", cookie=False)
    assert answer.status == 403
    assert "set-cookie" not in answer.headers


def test_the_cookie_is_out_of_reach(looking: Viewer) -> None:
    entry = looking.ask("/?" + urlsplit(looking.address).query, cookie=False)
    attributes = entry.headers["set-cookie"].lower()
    assert "httponly" in attributes
    assert "samesite=strict" in attributes


@pytest.mark.parametrize("origin", ["", "http://evil.example", "null"])
def test_a_form_of_another_site_changes_nothing(looking: Viewer, origin: str) -> None:
    assert looking.ask("/check", {}, Origin=origin).status == 403


def test_a_page_runs_no_script_but_its_own(looking: Viewer) -> None:
    for path in ("/", "/preview/train-000000/class0/image0000/json", "/problems", "/nothing"):
        policy = looking.ask(path).headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy


@pytest.fixture
def hostile(program: Program) -> Program:
    members = [tars.member(KEY + b"." + extension, data) for extension, data in HOSTILE.items()]
    program.write("h.tar", tars.tar(*members))
    return program


def test_members_are_never_active_content(hostile: Program) -> None:
    with viewing(hostile, "h.tar") as viewer:
        [folder] = [one.partition('"')[0] for one in viewer.ask("/").text.split('href="/sample/')[1:]]
        for extension, data in HOSTILE.items():
            answer = viewer.ask(f"/file/{folder}/{extension.decode()}")
            assert answer.body == data
            assert answer.headers["content-type"] == "application/octet-stream"
            assert answer.headers["content-disposition"].startswith("attachment")
            assert answer.headers["content-security-policy"] == "sandbox; default-src 'none'"
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert viewer.ask(f"/media/{folder}/{extension.decode()}").status == 404


def test_hostile_members_do_nothing_in_a_browser(browser: Browser, hostile: Program) -> None:
    with viewing(hostile, "--overlay", "edits", "h.tar") as viewer:
        browser.open(viewer)
        browser.wait_for_what_is_seen()
        browser.follow(".grid a")
        browser.wait_for_previews(len(HOSTILE))
        assert browser.run("return window.hit") is None
        assert browser.all("iframe, object, embed, main script, main img") == []
        assert "<script>" in " ".join(browser.texts("pre"))
        assert browser.texts("h1")[0].startswith("<img src=x")


@pytest.mark.parametrize(
    "path",
    [
        "/sample/../../etc/passwd",
        "/file/..%2f..%2fetc%2fpasswd",
        "/file/%2e%2e/%2e%2e/etc/passwd",
        "/file//etc/passwd",
        "/file/train-000000/%00",
        "/static/../pages.py",
        "/static/..%2fpages.py",
        "/sample/",
        "/sample/train-000000",
        "/thumb/train-000000",
    ],
)
def test_no_path_leads_out_of_the_set(looking: Viewer, path: str) -> None:
    answer = looking.ask(path)
    assert answer.status in (400, 404)
    assert b"root:" not in answer.body
    assert b"import" not in answer.body


@pytest.mark.parametrize("number", ["-1", "x", "9" * 30, "%F0%9F%92%A9"])
def test_odd_numbers_get_a_message(looking: Viewer, number: str) -> None:
    for path in (f"/?at={number}", f"/random?seed={number}", f"/go?number={number}"):
        assert looking.ask(path).status == 400


def test_a_form_that_is_too_large_is_refused(program: Program) -> None:
    program.write("a.tar", tars.tar(tars.member(b"x.txt", b"x")))
    with viewing(program, "--overlay", "edits", "a.tar") as viewer:
        assert viewer.ask("/edit", {"path": "a/x/txt", "seen": "", "text": "x" * (5 << 20)}).status == 413


def test_a_part_of_a_file_for_a_player(program: Program) -> None:
    program.write("a.tar", tars.tar(tars.member(b"x.wav", bytes(range(200)))))
    with viewing(program, "a.tar") as viewer:
        answer = viewer.ask("/media/a/x/wav", Range="bytes=10-19")
        assert (answer.status, answer.body) == (206, bytes(range(10, 20)))
        assert answer.headers["content-range"] == "bytes 10-19/200"
        assert answer.headers["content-type"] == "audio/wav"
        assert viewer.ask("/media/a/x/wav", Range="bytes=-5").body == bytes(range(195, 200))
        assert viewer.ask("/media/a/x/wav", Range="bytes=500-").status == 416
