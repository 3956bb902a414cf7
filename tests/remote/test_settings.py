"""Options of stores: where they come from, which wins, and which are refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from wdsfs.door import urls
from wdsfs.errors import UsageError
from wdsfs.remote import settings
from wdsfs.remote.settings import Settings

SECRET = "s3cr3t"
FILE = f"""
[store."s3://"]
endpoint = "https://all"
region = "r1"
requests = 7
[store."s3://bucket"]
endpoint = "https://bucket"
[store."s3://bucket/private/"]
access_key_id = "me"
secret_access_key = "{SECRET}"
anonymous = false
[store."hf://datasets/me/set"]
token = "{SECRET}"
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "wdsfs").mkdir()
    return tmp_path / "wdsfs"


def write(home: Path, text: str, mode: int = 0o600) -> None:
    (home / "config.toml").write_text(text)
    (home / "config.toml").chmod(mode)


def options_of(found: Settings, url: str) -> dict[str, str]:
    return found.options(urls.parse(url))


def test_the_longest_prefix_wins_option_by_option(home: Path) -> None:
    assert settings.load_settings() == Settings([])  # without a file
    write(home, FILE)
    found = settings.load_settings()
    bucket = {"endpoint": "https://bucket", "region": "r1", "requests": "7"}
    assert options_of(found, "s3://bucket/x.tar") == bucket
    assert options_of(found, "s3://bucket2/x.tar") == {**bucket, "endpoint": "https://all"}
    private = {**bucket, "access_key_id": "me", "secret_access_key": SECRET, "anonymous": "false"}
    assert options_of(found, "s3://bucket/private/x.tar") == private
    assert options_of(found, "hf://datasets/me/set@v1/x.tar") == {"token": SECRET}
    assert options_of(found, "hf://datasets/me/set2/x.tar") == {}


def test_the_name_of_a_file_means_the_same_in_another_directory(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One on the command line is relative to the working directory, one in the configuration to that file."""
    write(home, '[store."s3://"]\ncertificates = "ca.pem"\n[store."gs://"]\nservice_account = "~/key.json"\n')
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "a b").mkdir()
    monkeypatch.chdir(tmp_path / "a b")
    assert options_of(settings.load_settings(), "s3://b/x.tar") == {"certificates": str(home / "ca.pem")}
    assert options_of(settings.load_settings(), "gs://b/x.tar") == {"service_account": "/home/me/key.json"}
    arguments = ["s3://b:certificates=own.pem", "https://h/:certificates=../it's.pem", "anonymous=yes"]
    monkeypatch.setenv("WDSFS_STORE_OPTIONS", settings.text_of_arguments(arguments))
    monkeypatch.chdir("/")
    given = Settings(settings.parse_arguments(settings.arguments_of_environment()))
    assert options_of(given, "s3://b/x") == {
        "certificates": str(tmp_path / "a b" / "own.pem"),
        "anonymous": "true",
    }
    assert options_of(given, "https://h/x") == {"certificates": str(tmp_path / "it's.pem")}
    monkeypatch.setenv("WDSFS_STORE_OPTIONS", "certificates='ca.pem")
    with pytest.raises(UsageError, match="WDSFS_STORE_OPTIONS"):
        settings.arguments_of_environment()


def test_an_argument_wins_over_the_file_and_counts_only_where_it_means_something(home: Path) -> None:
    write(home, FILE)
    found = settings.load_settings(
        ["region=r2", "s3://bucket:endpoint=http://h:9000/a=b", "https://h:8443/d:timeout=2.5"]
    )
    assert options_of(found, "s3://bucket/x.tar")["region"] == "r2"
    assert options_of(found, "s3://bucket/x.tar")["endpoint"] == "http://h:9000/a=b"
    assert options_of(found, "https://h:8443/d/x.tar") == {"timeout": "2.5"}
    assert options_of(found, "https://h:8443/dd/x.tar") == {}


def test_settings_survive_json_and_do_not_show_their_values(home: Path) -> None:
    write(home, FILE)
    found = settings.load_settings()
    again = Settings(json.loads(json.dumps(found.sections)))
    assert options_of(again, "s3://bucket/private/x.tar") == options_of(found, "s3://bucket/private/x.tar")
    assert SECRET not in repr(found)
    assert SECRET not in f"{again}"


@pytest.mark.parametrize(
    ("argument", "what"),
    [
        (f"s3://b:secret_access_key={SECRET}", "AWS_SECRET_ACCESS_KEY"),
        (f"https://h:password={SECRET}", "config.toml"),
        (f"nosuch={SECRET}", "no option nosuch"),
        (f"s3://b:account_key={SECRET}", "no option account_key"),
        (f"https://me:{SECRET}@h:timeout=1", "without secrets"),
        (f"{SECRET}", "PREFIX"),
        ("anonymous=perhaps", "true or false"),
        ("timeout=0", "greater than 0"),
        ("ftp://h:timeout=1", "prefix"),
    ],
)
def test_an_argument_is_refused_with_the_way_out_and_without_its_value(
    home: Path, argument: str, what: str
) -> None:
    with pytest.raises(UsageError, match="--store-option") as caught:
        settings.load_settings([argument])
    assert what in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "mode", "what"),
    [
        (FILE, 0o644, "chmod 600"),
        (FILE, 0o620, "chmod go-w"),
        ('[store."s3://"]\nregion = "x"', 0o666, "chmod go-w"),
        ("[store", 0o600, "is not TOML"),
        ("store = 1", 0o600, "a table for each place"),
        ('[store."s3://b"]\nnosuch = 1', 0o600, "no option nosuch"),
    ],
)
def test_a_file_is_refused_with_the_way_out(home: Path, text: str, mode: int, what: str) -> None:
    write(home, text, mode)
    with pytest.raises(UsageError, match=r"config\.toml") as caught:
        settings.load_settings()
    assert what in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_file_in_a_directory_that_others_can_write_is_refused(home: Path) -> None:
    write(home, FILE)
    home.chmod(0o777)
    with pytest.raises(UsageError, match="others can write"):
        settings.load_settings()


def test_a_link_to_a_file_without_secrets_that_others_may_read_is_followed(home: Path) -> None:
    write(home, '[store."s3://"]\nregion = "r1"', 0o644)
    os.rename(home / "config.toml", home / "real.toml")
    (home / "config.toml").symlink_to("real.toml")
    assert options_of(settings.load_settings(), "s3://bucket/x.tar")["region"] == "r1"
