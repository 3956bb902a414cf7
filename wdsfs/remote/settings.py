"""Options of stores: the configuration file and `--store-option`, checked.

::

    # ~/.config/wdsfs/config.toml
    [store."s3://"]                       # all of S3
    endpoint = "https://minio.example"
    [store."s3://bucket/private/"]        # the longest prefix wins, option by option
    access_key_id = "..."
    secret_access_key = "..."

An argument wins over the file. The conventions of stores (environment, credentials files, instance metadata) are
not handled here: `store_clients.py` looks there for missing options. A secret is accepted from the file only,
because every user of a machine can read the arguments of a process.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from wdsfs import host, trust
from wdsfs.door.urls import BUCKETS, SCHEMES, WEB, Url
from wdsfs.errors import UsageError
from wdsfs.shared_settings import setting

_S3 = frozenset({"s3", "ais"})

# Seconds and bytes a second, where the options do not say otherwise.
TOTAL_TIME = 60.0
SILENCE = 20.0
LOWEST_RATE = 8 << 10  # of an answer
LOWEST_RATE_OF_UPLOADS = 1 << 20  # of a whole request: its progress is not known before its end
ANSWER_HEAD = 64 << 10  # bytes of the head of an answer


class Option(NamedTuple):
    """An option of the stores of these schemes."""

    schemes: frozenset[str]
    kind: str = "text"  # or "number", "switch", "secret", "file"
    variable: str = ""  # of the environment, which has a secret by convention


OPTIONS = {
    "endpoint": Option(BUCKETS | {"hf"}),
    "region": Option(_S3),
    "anonymous": Option(BUCKETS | {"hf"}, "switch"),
    "access_key_id": Option(_S3),
    "secret_access_key": Option(_S3, "secret", "AWS_SECRET_ACCESS_KEY"),
    "session_token": Option(_S3, "secret", "AWS_SESSION_TOKEN"),
    "profile": Option(_S3),
    "virtual_hosted": Option(_S3, "switch"),
    "requester_pays": Option(_S3, "switch"),
    "account_name": Option(frozenset({"az"})),
    "account_key": Option(frozenset({"az"}), "secret", "AZURE_STORAGE_ACCOUNT_KEY"),
    "sas_token": Option(frozenset({"az"}), "secret", "AZURE_STORAGE_SAS_TOKEN"),
    "service_account": Option(frozenset({"gs"}), "file"),
    "token": Option(WEB | {"gs", "az", "hf"}, "secret", "HF_TOKEN (hf://)"),
    "user": Option(WEB),
    "password": Option(WEB, "secret"),
    "part_size": Option(_S3 | {"az"}, "number"),  # bytes of the parts of an upload, and the most that goes in one
    "certificates": Option(SCHEMES, "file"),  # of PEM, besides the certificates that the system trusts
    "allow_invalid_certificates": Option(SCHEMES, "switch"),  # their server is whoever answers
    "requests": Option(SCHEMES, "number"),  # at once, at most
    "timeout": Option(SCHEMES, "number"),  # seconds without a byte
    "total_time": Option(SCHEMES, "number"),  # seconds, over all attempts
    "lowest_rate": Option(SCHEMES, "number"),  # bytes a second of an answer, or of an upload
}

_PREFIX = re.compile(f"(?:{'|'.join(sorted(SCHEMES))})://[^?@]*")
_ARGUMENT = re.compile(r"(?:(?P<prefix>[a-z0-9]+://.*?):)?(?P<name>[a-z_]+)=(?P<value>.*)", re.DOTALL)
_SWITCH = {"true": "true", "yes": "true", "1": "true", "false": "false", "no": "false", "0": "false"}


class Settings(NamedTuple):
    """Options by prefix of URLs, weakest first. JSON keeps `sections`."""

    sections: list[tuple[str, dict[str, str]]]

    def options(self, url: Url) -> dict[str, str]:
        """Return the options for a URL."""
        merged: dict[str, str] = {}
        for prefix, options in self.sections:
            if _covers(prefix, url.shown):
                merged.update(
                    {name: value for name, value in options.items() if url.scheme in OPTIONS[name].schemes}
                )
        return merged

    def __repr__(self) -> str:
        return f"Settings({[prefix for prefix, _ in self.sections]})"


class Pace(NamedTuple):
    """Limits on the time of an answer; `pace` makes them of options."""

    silence: float  # seconds without a byte until a request counts as not answered
    rate: float  # bytes a second below which it does, too
    total: float  # seconds that a reader waits for a store

    def seconds(self, size: int) -> float:
        """Return the seconds that an answer may take, from the request to the end of a body of `size` bytes."""
        return min(self.silence + (ANSWER_HEAD + size) / self.rate, self.total)


def pace(options: Mapping[str, str], rate: float = LOWEST_RATE) -> Pace:
    """Return the pace of these options; `rate` is the default of its rate."""
    total = float(options.get("total_time", TOTAL_TIME))
    return Pace(min(float(options.get("timeout", SILENCE)), total), float(options.get("lowest_rate", rate)), total)


def load_settings(arguments: Iterable[str] = ()) -> Settings:
    """Return the settings of the user's configuration file and of `--store-option`.

    Raises UsageError.
    """
    return Settings(_sorted(_from_file(default_file())) + parse_arguments(arguments))


def parse_arguments(arguments: Iterable[str]) -> list[tuple[str, dict[str, str]]]:
    """Return the sections that `--store-option` gives. Raises UsageError."""
    return _sorted(map(_parse_argument, arguments))


def arguments_of_environment() -> list[str]:
    """Return the arguments in WDSFS_STORE_OPTIONS. Raises UsageError."""
    try:
        return shlex.split(setting("STORE_OPTIONS"))
    except ValueError as error:
        raise UsageError(f"WDSFS_STORE_OPTIONS: {error}") from None


def text_of_arguments(arguments: Iterable[str]) -> str:
    """Return arguments as WDSFS_STORE_OPTIONS has them, for processes in any directory. Raises UsageError."""
    sections = map(_parse_argument, arguments)
    return shlex.join(
        f"{prefix}:{name}={value}" if prefix else f"{name}={value}"
        for prefix, options in sections
        for name, value in options.items()
    )


def default_file() -> Path:
    """Return where the configuration of this user lies."""
    return host.config_dir() / "config.toml"


def _sorted(sections: Iterable[tuple[str, dict[str, str]]]) -> list[tuple[str, dict[str, str]]]:
    return sorted(sections, key=lambda section: len(section[0]))


def _covers(prefix: str, shown: str) -> bool:
    """Return True if a URL lies in the place that a prefix names: `s3://b` covers `s3://b/x`, but not `s3://bc/x`."""
    return shown.startswith(prefix) and (
        prefix.endswith("/") or not prefix or shown[len(prefix) : len(prefix) + 1] in ("", "/", "@")
    )


def _parse_argument(argument: str) -> tuple[str, dict[str, str]]:
    match = _ARGUMENT.fullmatch(argument)
    if not match:
        # The text is not shown: it may be a secret.
        raise UsageError("--store-option: write [PREFIX:]NAME=VALUE, such as s3://bucket:region=eu-west-1")
    prefix, name, value = match["prefix"] or "", match["name"], match["value"]
    where = f"--store-option {name}"
    section = prefix, _checked({name: value}, prefix, where, "")
    if OPTIONS[name].kind == "secret":
        variable = OPTIONS[name].variable
        raise UsageError(
            f"{where}: other users could see this secret in the list of processes: "
            + (f"set {variable}, or " if variable else "")
            + f'write it to {default_file()}, below [store."{prefix or "s3://bucket"}"]'
        )
    return section


def _from_file(path: Path) -> list[tuple[str, dict[str, str]]]:
    try:
        text, mode = _read_file(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UsageError(f"{path}: this configuration is not used: {error.strerror}") from None
    try:
        tables = tomllib.loads(text).get("store", {})
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: is not TOML: {error}") from None
    if not isinstance(tables, dict) or not all(isinstance(options, dict) for options in tables.values()):
        raise UsageError(f'{path}: write a table for each place, such as [store."s3://bucket"]')
    directory = os.path.dirname(os.path.abspath(path))
    sections = [
        (prefix, _checked(options, prefix, f"{path}: {prefix}", directory)) for prefix, options in tables.items()
    ]
    secrets = {name for _, options in sections for name in options if OPTIONS[name].kind == "secret"}
    if secrets and mode & (stat.S_IRGRP | stat.S_IROTH):
        raise UsageError(
            f"{path}: others can read it, and it has secrets ({sorted(secrets)[0]}): chmod 600 {path}"
        )
    return sections


def _read_file(path: Path) -> tuple[str, int]:
    """Return the text and the mode of the file. Raises OSError, also where another user could have written it."""
    place = os.path.realpath(path)  # people keep such files elsewhere and link to them
    mode = os.stat(place).st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(0, f"others can write it: chmod go-w {path}")
    trust.content(path)
    with open(trust.open_file(place, os.O_RDONLY), "rb") as file:
        return file.read().decode("utf-8", "replace"), mode


def _checked(options: Mapping[str, Any], prefix: str, where: str, directory: str) -> dict[str, str]:
    """Return options as texts; relative paths are below `directory`. Raises UsageError, with no value in it."""
    if prefix and not _PREFIX.fullmatch(prefix):
        raise UsageError(
            f"{where}: a prefix is the start of a URL, such as s3:// or https://host/, without secrets"
        )
    scheme = prefix.partition("://")[0]
    checked = {}
    for name, value in options.items():
        known = [option_name for option_name, option in OPTIONS.items() if not scheme or scheme in option.schemes]
        if name not in known:
            raise UsageError(f"{where}: there is no option {name}; the options are {', '.join(known)}")
        checked[name] = _text(OPTIONS[name].kind, value, f"{where}: {name}", directory)
    return checked


def _text(kind: str, value: object, where: str, directory: str) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if kind == "switch" and text not in _SWITCH:
        raise UsageError(f"{where}: write true or false")
    if kind == "number" and not (re.fullmatch(r"\d+(\.\d+)?", text) and float(text) > 0):
        raise UsageError(f"{where}: write a number greater than 0")
    if kind == "file":
        # Semantics decision: absolute from here on, for a daemon opens it in another directory. A relative path in
        # the configuration is below the directory of that file, as commands are typed in any directory.
        return os.path.abspath(os.path.join(directory, os.path.expanduser(text)))
    return _SWITCH[text] if kind == "switch" else text
