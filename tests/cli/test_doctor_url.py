"""`wdsfs doctor URL`: what it says of stores that work, and of those that do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import servers
from tests.conftest import Program
from tests.servers import BUCKET, KEY, Server
from tests.web_server import Fault, Served, WebServer

SECRET = "deadbeef"


def served(web: WebServer, **how: object) -> Served:
    return web.put("/x.tar", b"x" * 5000, **how)


def lines(program: Program, *words: str, code: int = 0) -> list[str]:
    done = program.run("doctor", *words, code=code)
    assert done.stderr == b""
    return done.stdout.decode().splitlines()


def levels(program: Program, *words: str, code: int = 0) -> dict[str, str]:
    """The level of each finding; each that is not ok has a remedy."""
    found = program.json("doctor", *words, code=code)
    assert all(one["remedy"] for one in found if one["level"] != "ok")
    return {one["name"]: one["level"] for one in found}


def test_a_server_that_can_all(program: Program, web: WebServer) -> None:
    served(web)
    found = [line.split(":")[0] for line in lines(program, f"{web.url}/x.tar")]
    assert found == ["ok   http", "ok   credentials", "ok   ranges", "ok   conditions"]


def test_a_server_without_ranges_conditions_and_etags(program: Program, web: WebServer) -> None:
    served(web, ranges=False, conditions=False, etag=None)
    assert "wdsfs fetch" in lines(program, f"{web.url}/x.tar")[3]
    expected = {f"{web.url}/x.tar": "ok", "ranges": "warn", "conditions": "ok", "changes": "warn"}
    assert levels(program, f"{web.url}/x.tar").items() >= expected.items()


def test_a_refusal_is_shown_with_the_kind_of_credentials_and_no_secret(program: Program, web: WebServer) -> None:
    served(web, always=Fault(status=403))
    url = web.url.replace("://", f"://ann:{SECRET}@") + "/x.tar?X-Amz-Signature=" + SECRET
    found = lines(program, url, code=3)
    assert found[:2] == [
        f"fail {web.url}/x.tar: its store refuses it (403)",
        "      -> check the credentials, and what they allow",
    ]
    assert found[2].startswith("ok   credentials: ")
    assert SECRET not in "".join(found)
    assert all(SECRET in one.target for one in web.requests)


def test_what_cannot_be_read(program: Program, web: WebServer) -> None:
    [port] = servers.free_ports(1)
    for url, fault, remedy in (
        (f"{web.url}/y.tar", "there is no such object", ""),
        (f"{web.url}/", "a web server does not list", "write out the names, with braces"),
        (f"http://127.0.0.1:{port}/x.tar", "its server cannot be connected to", "check the address"),
    ):
        found = lines(program, "--store-option", "total_time=0.1", url, code=3)
        assert found[0].startswith(f"fail {url}: {fault}")
        assert found[1].startswith(f"      -> {remedy}")
    levels(program, f"{web.url}/y.tar", code=3)
    assert "no name of a bucket" in program.refused("doctor", f"s3://ann:{SECRET}@x/y", code=2)


def test_a_bucket(program: Program, seaweedfs: Server, tmp_path_factory: pytest.TempPathFactory) -> None:
    put, _ = servers.writing(seaweedfs, "s3")
    put("s/x.tar", b"x" * 5000)
    program.environment |= _credentials(seaweedfs.options, tmp_path_factory.mktemp("home"))
    found = levels(program, f"s3://{BUCKET}/s/x.tar")
    assert set(found.values()) == {"ok"}
    assert list(found) == [f"s3://{BUCKET}/s/x.tar", "credentials", "ranges", "conditions"]
    assert lines(program, f"s3://{BUCKET}/s/") == [
        f"ok   s3://{BUCKET}/s/: can be reached, 1 object below it",
        "ok   credentials: access key of the environment",
    ]
    assert levels(program, f"s3://{BUCKET}/none/")[f"s3://{BUCKET}/none/"] == "warn"
    program.environment["AWS_SECRET_ACCESS_KEY"] = SECRET
    refused = "\n".join(lines(program, f"s3://{BUCKET}/s/x.tar", code=3))
    assert refused.startswith(f"fail s3://{BUCKET}/s/x.tar: its store refuses it (403")
    assert SECRET not in refused
    assert KEY not in refused


def _credentials(options: dict[str, str], home: Path) -> dict[str, str]:
    return {
        "HOME": str(home),
        "AWS_ACCESS_KEY_ID": options["access_key_id"],
        "AWS_SECRET_ACCESS_KEY": options["secret_access_key"],
        "AWS_ENDPOINT_URL": options["endpoint"],
        "AWS_REGION": "us-east-1",
    }
