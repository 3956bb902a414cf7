"""Who may ask, and what hostile members can do: nothing."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests import tars
from tests.conftest import Program
from tests.pages.viewing import Browser, Viewer, viewing
from tests.processes import PATIENCE
from wdsfs.pages import server

HOSTILE = {
    b"svg": b"<svg xmlns='http://www.w3.org/2000/svg'><script>top.hit = 1; document.title = 'hit'</script></svg>",
    b"html": b"<!doctype html><title>hit</title><script>document.title = 'hit'; top.hit = 1</script>",
    b"pdf": b"%PDF-1.4\n1 0 obj<</OpenAction<</S/JavaScript/JS(app.alert(1))>>>>endobj\n",
    b"xml": b"<?xml version='1.0'?><!DOCTYPE x [<!ENTITY e SYSTEM 'file:///etc/passwd'>]><x>&e;</x>",
    b"json": b'{"</script><script>top.hit=1</script>": "<img src=x onerror=top.hit=1>"}',
    b"txt": b"</textarea></pre><script>top.hit=1</script><img src=x onerror=top.hit=1>",
}
KEY = b"<img src=x onerror=hit=1>&\"'\n\xff"  # no dot: that would end the key


def test_only_this_machine_reaches_its_port_which_nobody_else_gets(program: Program, looking: Viewer) -> None:
    port = urlsplit(looking.address).port
    assert port is not None
    found = set()
    for table in ("tcp", "tcp6"):
        rows = [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
        found |= {row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")}
    assert found == {f"0100007F:{port:04X}"}
    program.write("a.tar", tars.tar(tars.member(b"x.txt", b"x")))
    said = program.refused("view", "--no-browser", "--port", str(port), "a.tar", code=2)
    assert f"port {port}: Address already in use; name another port, or leave out --port" in said


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
def test_who_may_ask(looking: Viewer, headers: dict[str, Any], status: int) -> None:
    for path in ("/", "/static/style.css", "/sample/train-000000/class0/image0000"):
        assert looking.ask(path, **headers).status == status, path


def test_only_the_token_gets_the_cookie_which_is_out_of_reach(looking: Viewer) -> None:
    for token in ("A" * 43, "", "%FF"):
        answer = looking.ask(f"/?token={token}", cookie=False)
        assert answer.status == 403
        assert "set-cookie" not in answer.headers
    entry = looking.ask("/?" + urlsplit(looking.address).query, cookie=False)
    attributes = entry.headers["set-cookie"].lower()
    assert "httponly" in attributes
    assert "samesite=strict" in attributes


def _as_other_user(viewer: Viewer, *asked: tuple[str, str]) -> list[int]:
    """The statuses of requests (path and cookie) by a process of another user."""
    if os.geteuid():
        pytest.skip("only root can be another user")
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setuid(4321)
            for path, cookie in asked:
                connection = http.client.HTTPConnection(viewer.netloc, timeout=PATIENCE)
                connection.request("GET", path, headers={"Cookie": cookie} if cookie else {})
                os.write(writer, b"%d " % connection.getresponse().status)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as found:
        statuses = [int(one) for one in found.read().split()]
    os.waitpid(child, 0)
    return statuses


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Any, Any]]:
    """The client's socket of a connection, its address, and that of the server."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as client,
        listening.accept()[0],
    ):
        yield client, client.getsockname(), listening.getsockname()


@pytest.mark.parametrize("way", [server.user_of, server._diagnosed, server._user_in_tables])
def test_the_user_of_a_connection(ends: tuple[socket.socket, Any, Any], way: Callable[..., int | None]) -> None:
    client, here, there = ends
    assert way(here, there) == os.getuid()
    assert way(("127.0.0.1", 1), there) is None
    client.shutdown(socket.SHUT_WR)  # its user may have ended, and the number been given to another one
    assert way(here, there) is None


def test_a_client_that_speaks_ipv6_is_found_in_the_table() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket(socket.AF_INET6) as client:
        client.connect(("::ffff:127.0.0.1", listening.getsockname()[1]))
        here = ("127.0.0.1", client.getsockname()[1])
        assert server._user_in_tables(here, listening.getsockname()) == os.getuid()


def test_without_a_word_of_the_kernel_the_table_decides(
    ends: tuple[socket.socket, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel without the module for questions about sockets says the same for each."""
    _, here, there = ends
    monkeypatch.setattr(server, "_diagnosed", lambda *_: None)
    assert server.user_of(here, there) == os.getuid()
    monkeypatch.setattr(server, "_TABLES", {"/nowhere": ""})
    assert server.user_of(here, there) is None


def test_nobody_gets_a_cookie_where_users_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_user", lambda _: None)
    guard = server.Guard(lambda *_: None, 80)  # type: ignore[arg-type]  # it is not asked
    query = urlsplit(guard.address).query.encode()
    host = [(b"host", b"127.0.0.1:80"), (b"cookie", f"{guard._cookie}={guard._session}".encode())]
    for query_string, words in ((query, "does not say which user"), (b"", "Open the address")):
        scope = {"type": "http", "method": "GET", "path": "/", "query_string": query_string, "headers": host}
        refusal = guard._refusal(scope)
        assert refusal is not None
        assert refusal.status_code == 403
        assert words in bytes(refusal.body).decode()


def test_a_cookie_is_of_no_use_to_another_user(program: Program) -> None:
    """A server of theirs at another port of this machine can get it from the browser."""
    program.write("a.tar", tars.tar(tars.member(b"x.txt", b"x")))
    with viewing(program, "a.tar") as viewer:
        token = "/?" + urlsplit(viewer.address).query
        assert token.partition("=")[2] not in viewer.cookie
        asked = [("/", viewer.cookie), (f"{token}x", ""), (token, ""), ("/", viewer.cookie)]
        assert _as_other_user(viewer, *asked) == [403, 403, 200, 200]


@pytest.mark.parametrize("origin", ["", "http://evil.example", "null"])
def test_a_form_of_another_site_changes_nothing(looking: Viewer, origin: str) -> None:
    assert looking.ask("/check", method="POST", Origin=origin).status == 403


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
    with viewing(hostile, "h.tar") as viewer:
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


def test_odd_queries_get_a_message(looking: Viewer) -> None:
    for number in ("-1", "x", "9" * 30, "%F0%9F%92%A9"):
        for path in (f"/?at={number}", f"/random?seed={number}", f"/go?number={number}"):
            assert looking.ask(path).status == 400
    query = "&".join(f"a{number}=1" for number in range(200))
    assert "fields, the limit" in looking.ask(f"/?{query}").text


def test_a_part_of_a_file_for_a_player(program: Program) -> None:
    content = bytes(range(200))
    program.write("a.tar", tars.tar(tars.member(b"x.wav", content)))
    with viewing(program, "a.tar") as viewer:
        for text, begin, end in (("10-19", 10, 20), ("-5", 195, 200), (f"190-{'9' * 30}", 190, 200)):
            answer = viewer.ask("/media/a/x/wav", Range=f"bytes={text}")
            assert (answer.status, answer.body) == (206, content[begin:end])
            assert answer.headers["content-range"] == f"bytes {begin}-{end - 1}/200"
            assert answer.headers["content-type"] == "audio/wav"
        for text in ("bytes=0-1,5-6", "words=1-2"):  # a server may answer with all
            answer = viewer.ask("/media/a/x/wav", Range=text)
            assert (answer.status, answer.body) == (200, content)
        for text in ("500-", "x-y"):
            assert viewer.ask("/media/a/x/wav", Range=f"bytes={text}").status == 416


def a_large_shard(path: Path, size: int) -> None:
    """A shard of one member, of zeros that take no room on the disk."""
    info = tarfile.TarInfo("x.bin")
    info.size = size
    with path.open("wb") as file:
        file.write(info.tobuf(tarfile.GNU_FORMAT))
        file.truncate(512 + size)
        file.seek(0, os.SEEK_END)
        file.write(tars.END)


def test_the_head_of_an_answer_reads_nothing(program: Program) -> None:
    """Of a file that would take hours to be read."""
    a_large_shard(program.home / "a.tar", 1 << 42)
    with viewing(program, "a.tar") as viewer:
        answer = viewer.ask("/file/a/x/bin", method="HEAD")
        assert (answer.status, answer.headers["content-length"]) == (200, str(1 << 42))


def test_a_file_that_cannot_be_read_to_its_end_does_not_look_whole(program: Program) -> None:
    a_large_shard(program.home / "a.tar", 64 << 20)
    with viewing(program, "a.tar") as viewer:
        connection = http.client.HTTPConnection(viewer.netloc, timeout=PATIENCE)
        connection.request("GET", "/file/a/x/bin", headers={"Cookie": viewer.cookie})
        answer = connection.getresponse()
        assert len(answer.read(1000)) == 1000
        os.truncate(program.home / "a.tar", 1 << 20)
        with pytest.raises(http.client.IncompleteRead):
            answer.read()
        connection.close()
        with pytest.raises(http.client.IncompleteRead):  # the shard as it is now ends inside the file
            viewer.ask("/file/a/x/bin")


def test_connections_that_ask_nothing_hold_up_nobody(program: Program) -> None:
    """Anybody on the machine can make them, without the token."""
    program.write("a.tar", tars.tar(tars.member(b"x.txt", b"x")))
    with viewing(program, "a.tar") as viewer, contextlib.ExitStack() as stack:
        host, _, port = viewer.netloc.partition(":")
        for number in range(300):
            one = stack.enter_context(socket.create_connection((host, int(port)), PATIENCE))
            if number % 2:
                with contextlib.suppress(OSError):  # it may be ended already
                    one.sendall(b"GET / HTTP/1.1\r\nHost: ")
        assert viewer.ask("/").status == 200
        assert established(int(port)) < 150


def established(port: int) -> int:
    """The connections that a server at this port has: of a process that hides, nobody sees the descriptors."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "01" for row in rows)


def test_names_that_are_not_utf_8_are_found_by_their_links(program: Program) -> None:
    program.write("g[1].tar", tars.tar(tars.member(b"cl\xff/k\xfe.txt", b"x")))
    with viewing(program, "g[1].tar") as viewer:
        page = viewer.ask("/sample/g%5B1%5D/cl%FF/k%FE").text
        for link in ("/?shard=g%5B1%5D", "/?class=cl%FF"):
            assert f'href="{link}"' in page
            assert viewer.ask(link).text.count('class="key"') == 1
        assert viewer.ask("/?q=k%FE").text.count('class="key"') == 1
