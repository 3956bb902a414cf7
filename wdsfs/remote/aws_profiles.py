"""Profiles of the AWS tools, as far as plain files have them; the rest (SSO, roles, processes) is boto3's."""

from __future__ import annotations

import configparser
import os

_NAMES = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "region": "region",
    "endpoint_url": "endpoint",
}


def read(profile: str) -> dict[str, str]:
    """The settings of a profile in ~/.aws/credentials and ~/.aws/config, under the names of our options."""
    found: dict[str, str] = {}
    for variable, default, section in (
        ("AWS_CONFIG_FILE", "~/.aws/config", profile if profile == "default" else f"profile {profile}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", profile),
    ):
        parser = configparser.ConfigParser(interpolation=None, strict=False)
        try:
            parser.read(os.path.expanduser(os.environ.get(variable) or default))
        except (configparser.Error, UnicodeDecodeError):
            continue  # the AWS tools say what is wrong with it
        if parser.has_section(section):
            found.update({_NAMES[name]: value for name, value in parser.items(section) if name in _NAMES})
    return found
