"""Settings of all processes of a command: options before variables, and passed on."""

import os

import pytest

from wdsfs import shared_settings
from wdsfs.shared_settings import choose, chosen, setting, variables


def test_an_option_counts_before_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_settings, "_chosen", {})
    monkeypatch.setenv("WDSFS_CACHE_SIZE", "1G")
    assert (setting("CACHE_SIZE"), setting("UNPACK")) == ("1G", "")
    assert variables() == {}
    with chosen("CACHE_SIZE", "2G"):
        with chosen("CACHE_SIZE", ""):
            assert setting("CACHE_SIZE") == ""
        assert setting("CACHE_SIZE") == "2G"
        assert variables() == {"WDSFS_CACHE_SIZE": "2G"}
        assert os.environ["WDSFS_CACHE_SIZE"] == "1G"
    assert setting("CACHE_SIZE") == "1G"
    choose("CACHE_SIZE", "3G")
    assert setting("CACHE_SIZE") == "3G"
