"""Which credentials a store is entered with: options first, then the store's own conventions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.remote.conftest import FOREIGN
from tests.web_server import Fault, WebServer
from wdsfs.door import urls
from wdsfs.errors import Unreachable
from wdsfs.remote import answers, store_clients
from wdsfs.remote.retries import Transient

SECRET = "c2VjcmV0"  # keys of Azure are base64
S3, GS, AZ, AIS, HF, WEB = "s3://b/x", "gs://b/x", "az://b/x", "ais://b/x", "hf://datasets/a/b/x", "https://h/x"
ACCOUNT = {"AZURE_STORAGE_ACCOUNT_NAME": "me"}
CONNECTION = f"AccountName=me;AccountKey={SECRET};EndpointSuffix=core.windows.net"


@pytest.fixture(autouse=True)
def _no_conventions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ:
        if name.startswith(FOREIGN):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("url", "options", "environment", "kind"),
    [
        (
            S3,
            {"anonymous": "true"},
            {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": SECRET},
            "none (anonymous)",
        ),
        (S3, {"access_key_id": "a", "secret_access_key": SECRET}, {"AWS_PROFILE": "b"}, "of the config"),
        (S3, {}, {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": SECRET}, "of the environment"),
        (S3, {}, {"AWS_WEB_IDENTITY_TOKEN_FILE": "/x"}, "web identity"),
        (S3, {}, {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://x"}, "role of the container"),
        (S3, {}, {}, "role of the instance"),
        (GS, {"token": SECRET}, {}, "token"),
        (GS, {"anonymous": "true"}, {}, "none (anonymous)"),
        (GS, {"service_account": "/x.json"}, {}, "service account (a file)"),
        (GS, {}, {"GOOGLE_SERVICE_ACCOUNT": "/x.json"}, "service account of the environment"),
        (GS, {}, {"GOOGLE_APPLICATION_CREDENTIALS": "/x.json"}, "application default credentials"),
        (GS, {}, {}, "role of the instance"),
        (AZ, {"account_name": "me", "account_key": SECRET}, {}, "account key of the config"),
        (AZ, {"sas_token": "?sig=" + SECRET}, ACCOUNT, "sas token of the config"),
        (AZ, {"anonymous": "true"}, ACCOUNT, "none (anonymous)"),
        (AZ, {}, {"AZURE_STORAGE_CONNECTION_STRING": CONNECTION}, "account key of the connection string"),
        (AZ, {}, {**ACCOUNT, "AZURE_STORAGE_KEY": SECRET}, "account key of the environment"),
        (AZ, {}, {**ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": SECRET}, "of the environment"),
        (AZ, {}, ACCOUNT, "role of the instance"),
        (AIS, {}, {"AIS_ENDPOINT": "http://ais"}, "none"),
        (AIS, {"endpoint": "http://ais"}, {"AIS_AUTHN_TOKEN": SECRET}, "token of the environment"),
        (HF, {}, {"HF_TOKEN": SECRET}, "token of the environment"),
        (HF, {"anonymous": "true"}, {"HF_TOKEN": SECRET}, "none (anonymous)"),
        (HF, {}, {}, "none"),
        (WEB, {}, {}, "none"),
        (f"https://me:{SECRET}@h/x", {}, {}, "user and password of the URL"),
        (WEB, {"user": "me", "password": SECRET}, {}, "user and password of the config"),
        (WEB, {"token": SECRET}, {}, "token of the config"),
        (f"{WEB}?X-Amz-Signature={SECRET}", {}, {}, "signed URL"),
    ],
)
def test_the_kind_of_credentials(
    monkeypatch: pytest.MonkeyPatch, url: str, options: dict[str, str], environment: dict[str, str], kind: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = store_clients.access(urls.parse(url), options).kind
    assert kind in found
    assert SECRET not in found
    if "/x.json" not in [*options.values(), *environment.values()]:  # which obstore would read
        store_clients.make(urls.parse(url), options)


def test_a_body_that_comes_byte_by_byte_holds_no_thread(web: WebServer) -> None:
    """The threads for such answers are few: one that went on would be missing for other servers."""
    web.put("/a.tar", bytes(100_000)).always = Fault(chunked=True, drips="body")
    with pytest.raises(Transient) as caught:
        store_clients.get_by_urllib(urls.parse(f"{web.url}/a.tar"), {}, f"{web.url}/a.tar", {}, 0.1, 100_000)
    assert caught.value.silent


def test_keys_in_the_files_of_the_aws_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        f"[default]\naws_access_key_id=d\naws_secret_access_key={SECRET}%\n[p]\naws_access_key_id=p\n"
        f"aws_secret_access_key={SECRET}\naws_session_token=t\n"
    )
    (tmp_path / ".aws" / "config").write_text(
        "[profile p]\nregion = r\nendpoint_url = http://e\n[default]\nregion=q"
    )
    url = urls.parse(S3)
    found = store_clients.access(url, {})
    assert (found.config["access_key_id"], found.config["region"]) == ("d", "q")
    assert found.config["secret_access_key"] == SECRET + "%"
    monkeypatch.setenv("AWS_PROFILE", "p")
    found = store_clients.access(url, {"region": "mine"})
    assert (found.config["access_key_id"], found.config["region"], found.config["endpoint"]) == (
        "p",
        "mine",
        "http://e",
    )
    assert found.config["session_token"] == "t"
    assert store_clients.access(url, {"profile": "default"}).config["access_key_id"] == "d"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "e")
    assert store_clients.access(url, {}).kind == "access key of the environment"
    (tmp_path / ".aws" / "credentials").write_text("no such file as it should be")
    with pytest.raises(Unreachable, match=r"pip install .*\[aws\]"):
        store_clients.access(url, {"profile": "nosuch"})


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("17", 17.0),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 90.0),
        ("Thu, 01 Jan 1970 00:00:01 GMT", 0.0),
        ("", None),
        ("soon", None),
        ("-5", None),
    ],
)
def test_how_long_a_retry_after_is(said: str, seconds: float | None) -> None:
    assert answers.seconds_of(said, 10.0) == seconds
