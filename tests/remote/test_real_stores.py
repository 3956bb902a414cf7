"""The same against real servers: SeaweedFS (S3), an emulator of Azure, one of Google's store, nginx with TLS."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import servers
from tests.remote.apart import Apart
from tests.servers import BUCKET, SECRET, Server
from tests.web_server import Fault, WebServer
from wdsfs.door import urls
from wdsfs.errors import DeniedObject, MissingObject, ObjectChanged, Unreachable

CONTENT = bytes(range(256)) * 1000
OTHER = CONTENT[::-1]


class Bucket(NamedTuple):
    """A bucket of a real store: how to get at it, and how to put something into it."""

    url: str
    options: dict[str, str]
    put: Callable[[str, bytes], object]
    remove: Callable[[str], object]


@pytest.fixture(params=["s3", "az", "gs"])
def bucket(request: pytest.FixtureRequest) -> Bucket:
    name = {"s3": "seaweedfs", "az": "azurite", "gs": "fake_gcs"}[request.param]
    server: Server = request.getfixturevalue(name)
    put, remove = servers.writing(server, request.param)
    return Bucket(f"{request.param}://{BUCKET}", server.options, put, remove)


@pytest.fixture
def asked(apart: Apart, bucket: Bucket) -> Apart:
    apart.configure((bucket.url, bucket.options))
    return apart


def test_an_object_is_read_by_its_pin_until_it_is_replaced_or_removed(asked: Apart, bucket: Bucket) -> None:
    bucket.put("d/a b+c.tar", CONTENT)
    url = f"{bucket.url}/d/a b+c.tar"
    pin = asked.head(url)
    assert (pin.size, pin.is_weak) == (len(CONTENT), False)
    for begin, end in ((0, 1), (1000, 100_000), (len(CONTENT) - 5, len(CONTENT))):
        assert asked.get(url, pin, begin, end) == CONTENT[begin:end]
    assert asked.get_all(url, pin) == CONTENT
    bucket.put("d/a b+c.tar", OTHER)
    with pytest.raises(ObjectChanged):
        asked.get(url, pin, 0, 10)
    new = asked.head(url)
    assert new.etag != pin.etag
    assert asked.get(url, new, 0, 10) == OTHER[:10]
    bucket.remove("d/a b+c.tar")
    with pytest.raises(ObjectChanged):
        asked.get(url, new, 0, 10)
    with pytest.raises(MissingObject):
        asked.head(url)


def test_a_listing_has_the_same_pins_as_single_objects(asked: Apart, bucket: Bucket) -> None:
    for name in ("list/b.tar", "list/a.tar", "list/deep/c.tar", "listed.tar"):
        bucket.put(name, CONTENT[: len(name)])
    found = asked.listing(f"{bucket.url}/list/").objects
    assert [url.key for url, _ in found] == ["list/a.tar", "list/b.tar", "list/deep/c.tar"]
    assert [pin for _, pin in found] == [asked.head(url) for url, _ in found]
    assert [url.key for url, _ in asked.listing(f"{bucket.url}/list/b").objects] == ["list/b.tar"]
    assert "listed.tar" in [url.key for url, _ in asked.listing(f"{bucket.url}/list").objects]
    assert asked.listing(f"{bucket.url}/nosuch/") == ([], [])
    shallow = asked.listing(f"{bucket.url}/list/", deep=False)
    assert shallow.objects == found[:2]
    assert shallow.folders == ["list/deep/"]
    assert asked.listing(f"{bucket.url}/list/a", deep=False) == (found[:1], [])


@pytest.mark.parametrize("deep", [False, True])
def test_a_listing_by_signed_pages_is_that_of_obstore(apart: Apart, seaweedfs: Server, *, deep: bool) -> None:
    """They are for buckets with names that obstore refuses."""
    put, _ = servers.writing(seaweedfs, "s3")
    for number in range(3):
        put(f"pages/é {number}&+.tar", CONTENT)
    put("pages/deep/x.tar", CONTENT)
    apart.configure(("s3://", seaweedfs.options))
    prefix = urls.parse(f"s3://{BUCKET}/pages/")
    by_pages, by_obstore = apart.pages(prefix, deep=deep), apart.listing(prefix, deep=deep)
    assert len(by_obstore.objects) == 3 + deep
    assert by_pages == by_obstore


def test_credentials_of_s3(apart: Apart, seaweedfs: Server) -> None:
    put, _ = servers.writing(seaweedfs, "s3")
    put("private.tar", CONTENT)
    url = f"s3://{BUCKET}/private.tar"
    place = {"endpoint": seaweedfs.url, "region": "us-east-1"}
    for options in (
        {"anonymous": "true"},
        {"access_key_id": servers.KEY, "secret_access_key": "wrong-s3cr3t"},
        {"access_key_id": "nobody", "secret_access_key": SECRET},
    ):
        apart.configure(("s3://", {**place, **options}))
        with pytest.raises(DeniedObject, match="403") as caught:
            apart.head(url)
        assert "s3cr3t" not in str(caught.value)
        assert SECRET not in str(caught.value)


def test_new_keys_in_the_files_of_the_aws_tools_are_found(
    seaweedfs: Server, tmp_path: Path, own_apart: Callable[..., Any]
) -> None:
    """Tools for single sign-on write new ones each hour."""
    put, _ = servers.writing(seaweedfs, "s3")
    put("keys.tar", CONTENT)
    url, new, file = f"s3://{BUCKET}/keys.tar", f"s3://{BUCKET}/new-keys.tar", tmp_path / "credentials"
    (tmp_path / "content").write_bytes(OTHER)
    text = "[default]\naws_access_key_id = {}\naws_secret_access_key = {}\n"
    place = {
        "AWS_ENDPOINT_URL": seaweedfs.url,
        "AWS_REGION": "us-east-1",
        "AWS_SHARED_CREDENTIALS_FILE": str(file),
    }
    with own_apart(place) as apart:
        file.write_text(text.format("old", "old"))
        with pytest.raises(DeniedObject):
            apart.head(url)
        with pytest.raises(DeniedObject):
            apart.upload(new, tmp_path / "content")
        file.write_text(text.format(servers.KEY, SECRET))
        with pytest.raises(DeniedObject):
            apart.head(url)
        apart.later(61)
        assert apart.head(url).size == len(CONTENT)
        assert apart.upload(new, tmp_path / "content").size == len(OTHER)


def test_a_signed_url_of_s3(apart: Apart, seaweedfs: Server) -> None:
    put, _ = servers.writing(seaweedfs, "s3")
    put("signed.tar", CONTENT)
    good = servers.sign(seaweedfs, "signed.tar", timedelta(minutes=5))
    pin = apart.head(good)
    assert apart.get(good, pin, 10, 20) == CONTENT[10:20]
    assert urls.parse(good).shown == f"{seaweedfs.url}/{BUCKET}/signed.tar"
    bad = good.replace("X-Amz-Signature=", "X-Amz-Signature=0")
    with pytest.raises(DeniedObject):
        apart.get(bad, pin, 10, 20)
    with pytest.raises(DeniedObject, match="ended at"):
        apart.get(servers.sign(seaweedfs, "signed.tar", timedelta(seconds=-60)), pin, 10, 20)


def test_a_signed_url_of_azure(apart: Apart, azurite: Server) -> None:
    put, _ = servers.writing(azurite, "az")
    put("signed.tar", CONTENT)
    url = f"{azurite.url}/{BUCKET}/signed.tar?"
    pin = apart.head(url + servers.azure_signature())
    assert apart.get(url + servers.azure_signature(), pin, 10, 20) == CONTENT[10:20]
    with pytest.raises(DeniedObject, match="ended at 2020-01-01"):
        apart.get(url + servers.azure_signature("2020-01-01T00:00:00Z"), pin, 10, 20)


def test_the_environment_by_the_convention_of_each_store(
    seaweedfs: Server, azurite: Server, tmp_path: Path, own_apart: Callable[..., Any]
) -> None:
    for server, kind in ((seaweedfs, "s3"), (azurite, "az")):
        put, _ = servers.writing(server, kind)
        put("env.tar", CONTENT)
    keys = {"AWS_ACCESS_KEY_ID": servers.KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}
    with own_apart({**keys, "AWS_ENDPOINT_URL": seaweedfs.url}) as apart:
        assert apart.describe(f"s3://{BUCKET}/env.tar")["credentials"] == "access key of the environment"
        assert apart.head(f"s3://{BUCKET}/env.tar").size == len(CONTENT)
    (tmp_path / "credentials").write_text(
        f"[default]\naws_access_key_id = no\naws_secret_access_key = no\n"
        f"[work]\naws_access_key_id = {servers.KEY}\naws_secret_access_key = {SECRET}\n"
    )
    (tmp_path / "config").write_text(f"[profile work]\nregion = us-east-1\nendpoint_url = {seaweedfs.url}\n")
    files = {
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
    }
    with own_apart({**files, "AWS_PROFILE": "work"}) as apart:
        assert apart.head(f"s3://{BUCKET}/env.tar").size == len(CONTENT)
        assert apart.describe(f"s3://{BUCKET}/env.tar")["credentials"] == "access key of the profile work"
        apart.configure(("s3://", {"profile": "sso"}))
        with pytest.raises(Unreachable, match=r"pip install .*\[aws\]"):
            apart.head(f"s3://{BUCKET}/env.tar")
    text = f"AccountName={servers.AZURE_ACCOUNT};AccountKey={servers.AZURE_KEY};BlobEndpoint={azurite.url}"
    with own_apart({"AZURE_STORAGE_CONNECTION_STRING": text}) as apart:
        assert apart.head(f"az://{BUCKET}/env.tar").size == len(CONTENT)
    with own_apart({}) as apart:
        with pytest.raises(Unreachable, match="AIS_ENDPOINT"):
            apart.head(f"ais://{BUCKET}/env.tar")
        with pytest.raises(Unreachable, match="AZURE_STORAGE_ACCOUNT_NAME"):
            apart.head(f"az://{BUCKET}/env.tar")


def test_aistore_is_entered_by_its_s3_interface_and_redirects_to_its_nodes(
    web: WebServer, other_web: WebServer, own_apart: Callable[..., Any]
) -> None:
    there = "/s3/bucket/x.tar"
    web.put(there, CONTENT).always = Fault(status=307, headers={"Location": f"{other_web.url}{there}?node=1"})
    other_web.put(there, CONTENT)
    with own_apart({"AIS_ENDPOINT": web.url + "/", "AIS_AUTHN_TOKEN": SECRET}) as apart:
        pin = apart.head("ais://bucket/x.tar")
        assert apart.get("ais://bucket/x.tar", pin, 10, 20) == CONTENT[10:20]
        assert apart.describe("ais://bucket/x.tar")["credentials"] == "token of the environment"
    assert web.requests[0].headers["authorization"] == f"Bearer {SECRET}"


def test_the_web_over_tls(apart: Apart, nginx: Server) -> None:
    (nginx.directory / "x.tar").write_bytes(CONTENT)
    url = f"{nginx.url}/x.tar"
    with pytest.raises(Unreachable, match="certificate"):
        apart.head(url)
    assert apart.waits() == []
    apart.configure((nginx.url, nginx.options))
    pin = apart.head(url)
    assert not pin.is_weak
    assert apart.get(url, pin, 100, 200) == CONTENT[100:200]
    assert apart.get(f"{nginx.url}/moved/x.tar", pin, 100, 200) == CONTENT[100:200]
    (nginx.directory / "x.tar").write_bytes(OTHER)
    os.utime(nginx.directory / "x.tar", (1, 1))
    with pytest.raises(ObjectChanged):
        apart.get(url, pin, 100, 200)
    with pytest.raises(MissingObject):
        apart.head(f"{nginx.url}/nosuch.tar")
    (nginx.directory / "refused").mkdir()
    (nginx.directory / "refused" / "x.tar").write_bytes(CONTENT)
    with pytest.raises(DeniedObject, match="403"):
        apart.head(f"{nginx.url}/refused/x.tar")
