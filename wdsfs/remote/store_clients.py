"""Clients of stores: by obstore with the credentials of each, and by urllib where obstore refuses an answer.

The credentials are from our options, or by the store's conventions. Only the fetcher may import this: a child of
a process that has used obstore hangs at its first call.

obstore (0.12) refuses an answer in chunks, without a length, also if it is a page of a listing at a signed
address. And it does not give the headers of an error: Retry-After is asked for here. The functions by urllib
wait, so callers use threads (`retries.blocking`). Each such request has a connection of its own. Redirects are
not followed.
"""

from __future__ import annotations

import base64
import configparser
import contextlib
import http.client
import importlib
import os
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import obstore
from obstore.store import AzureStore, GCSStore, HTTPStore, ObjectStore, S3Store

from wdsfs import __version__
from wdsfs.door.pins import NO_LENGTH, Pin
from wdsfs.door.urls import BUCKETS, Url, is_signed
from wdsfs.errors import MissingObject, ShardError, Unreachable
from wdsfs.remote import answers
from wdsfs.remote.retries import Transient
from wdsfs.remote.settings import pace
from wdsfs.wings import install_command

Options = dict[str, str]

_CONNECT = "5s"
_RETRYING = timedelta(minutes=3)  # within which a failed part of an upload is sent again
_WHOLE = "7days"  # a request may take as long as bytes keep coming
# Characters that HTTPStore puts into a URL unchanged; with others in the path the store is made for that one URL.
_PLAIN_PATH = re.compile(r"[\w/.~ +-]*", re.ASCII)
USER_AGENT = f"wdsfs/{__version__}"
_PROFILE_NAMES = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "region": "region",
    "endpoint_url": "endpoint",
}


class StoreAccess(NamedTuple):
    """The credentials for a store: as a configuration of obstore, and in words, without a secret."""

    config: dict[str, Any]
    kind: str
    headers: dict[str, str] = {}  # noqa: RUF012 (never changed)
    provider: Any = None  # of credentials that expire


def access(url: Url, options: Options) -> StoreAccess:
    """Return the credentials for the store of a URL. Raises Unreachable when something for that is missing."""
    return _ACCESS.get(url.scheme, _web)(url, options)


def place(url: Url) -> tuple[str, str]:
    """Return the place that needs a client of its own, and the path of the object in it.

    For web servers a query belongs to the place: HTTPStore would treat its "?" as a letter of the path.
    """
    if url.scheme in BUCKETS:
        return url.store, url.key
    if not url.query and _PLAIN_PATH.fullmatch(url.key):
        return url.store + "/", url.key
    return f"{url.store}/{url.path}" + (f"?{url.query}" if url.query else ""), ""


def make(url: Url, options: Options, retries: int = 0) -> ObjectStore:
    """Return a client for the place of a URL, which sends a request that fails up to `retries` times more."""
    entered = access(url, options)
    if url.scheme not in BUCKETS:
        return web_store(place(url)[0], options, entered.headers)
    kinds: dict[str, Any] = {"az": AzureStore, "gs": GCSStore}
    bucket = url.store.partition("://")[2]
    store: ObjectStore = kinds.get(url.scheme, S3Store)(
        bucket,
        config={name: value for name, value in {**entered.config, **_conditional_copy(url)}.items() if value},
        client_options={**_client_options(options, entered.headers), "allow_http": True},
        retry_config={"max_retries": retries, "retry_timeout": _RETRYING},
        **({"credential_provider": entered.provider} if entered.provider else {}),
    )
    return store


def signed(url: Url, options: Options, query: str, lasts: timedelta) -> tuple[str, dict[str, str]]:
    """Return the address of an object in S3 or AIStore with a query and its signature for GET, and headers.

    Raises Unreachable; errors of obstore.
    """
    entered = access(url, options)
    if "skip_signature" in entered.config:
        endpoint = entered.config["endpoint"]
        if not endpoint:
            raise Unreachable(f"{url}: a name in it that is no path needs credentials, or an endpoint")
        bucket = quote(f"{url.store.partition('://')[2]}/{url.key}")
        return f"{endpoint.rstrip('/')}/{bucket}?{query}", entered.headers
    place = obstore.sign(_signing_store(url, options), "GET", url.key, lasts).partition("?")[0]
    # obstore signs a query only if it belongs to the endpoint, and appends a slash to that. Stores ignore
    # parameters that begin with x-.
    there = {**options, "endpoint": f"{place}?{query}&x-wdsfs=", "virtual_hosted": "true"}
    return obstore.sign(_signing_store(url, there), "GET", "", lasts), {}


def _signing_store(url: Url, options: Options) -> S3Store:
    client = make(url, options)
    assert isinstance(client, S3Store)
    return client


def _conditional_copy(url: Url) -> dict[str, str]:
    """Return the options for a copy in S3 that replaces nothing: a multipart upload, whose end is conditional."""
    return {"copy_if_not_exists": "multipart"} if url.scheme in ("s3", "ais") else {}


def web_store(location: str, options: Options, headers: dict[str, str]) -> HTTPStore:
    """Return a client for a place in the web. Redirects from https to http are not followed."""
    client_options = _client_options(options, headers)
    if location.startswith("http:"):
        client_options["allow_http"] = True
    return HTTPStore(location, client_options=client_options, retry_config={"max_retries": 0})  # type: ignore[arg-type]


def _client_options(options: Options, headers: dict[str, str]) -> dict[str, Any]:
    client_options: dict[str, Any] = {
        "connect_timeout": _CONNECT,
        "read_timeout": f"{int(pace(options).silence * 1000)}ms",
        "timeout": _WHOLE,
        "user_agent": USER_AGENT,
    }
    if headers:
        client_options["default_headers"] = headers
    if _yes(options, "allow_invalid_certificates"):
        client_options["allow_invalid_certificates"] = True
    if "certificates" in options:
        client_options["root_certificate"] = Path(options["certificates"]).read_bytes()
    return client_options


# --- credentials for each kind of store ----------------------------------------------------------------------


def _s3(url: Url, options: Options) -> StoreAccess:
    config = {
        "endpoint": options.get("endpoint"),
        "region": options.get("region"),
        "virtual_hosted_style_request": options.get("virtual_hosted"),
        "request_payer": options.get("requester_pays"),
    }
    if _yes(options, "anonymous"):
        return StoreAccess({**config, "skip_signature": "true"}, "none (anonymous)")
    if "secret_access_key" in options:
        return StoreAccess({**config, **_keys(options)}, "access key of the configuration file")
    chosen = options.get("profile")
    if os.environ.get("AWS_ACCESS_KEY_ID") and not chosen:
        return StoreAccess(config, "access key of the environment")
    profile = chosen or os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
    keys = _profile(profile or "default")
    config["region"] = config["region"] or (None if os.environ.get("AWS_REGION") else keys.get("region"))
    config["endpoint"] = config["endpoint"] or (
        None if os.environ.get("AWS_ENDPOINT_URL") else keys.get("endpoint")
    )
    if "secret_access_key" in keys:
        return StoreAccess({**config, **_keys(keys)}, f"access key of the profile {profile or 'default'}")
    if profile:
        return StoreAccess(config, f"profile {profile}, by boto3", provider=_boto3(url, profile))
    for variable, kind in (
        ("AWS_WEB_IDENTITY_TOKEN_FILE", "web identity"),
        ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "role of the container"),
        ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "role of the container"),
    ):
        if os.environ.get(variable):
            return StoreAccess(config, kind)
    return StoreAccess(config, "role of the instance")


def _profile(profile: str) -> dict[str, str]:
    """Return the settings of an AWS profile in plain files, under the names of the options here.

    Other kinds of profiles (SSO, roles, processes) are handled by boto3.
    """
    options: dict[str, str] = {}
    for variable, default, section in (
        ("AWS_CONFIG_FILE", "~/.aws/config", profile if profile == "default" else f"profile {profile}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", profile),
    ):
        parser = configparser.ConfigParser(interpolation=None, strict=False)
        try:
            parser.read(os.path.expanduser(os.environ.get(variable) or default))
        except (configparser.Error, UnicodeDecodeError):
            continue  # the AWS tools report the fault
        if parser.has_section(section):
            options.update(
                {_PROFILE_NAMES[name]: value for name, value in parser.items(section) if name in _PROFILE_NAMES}
            )
    return options


def _keys(options: Options) -> Options:
    return {
        name: options[name] for name in ("access_key_id", "secret_access_key", "session_token") if name in options
    }


def _boto3(url: Url, profile: str) -> Any:
    try:
        provider = importlib.import_module("obstore.auth.boto3").Boto3CredentialProvider
        session = importlib.import_module("boto3.session")
        errors = importlib.import_module("botocore.exceptions")
    except ImportError:
        raise Unreachable(
            f"{url}: there is no access key of the profile {profile} in ~/.aws: for SSO and roles, "
            f"type: {install_command('aws')}"
        ) from None
    try:
        return provider(session=session.Session(profile_name=profile))
    except errors.BotoCoreError as error:
        raise Unreachable(f"{url}: boto3 cannot use the profile {profile}: {type(error).__name__}") from None


def _ais(url: Url, options: Options) -> StoreAccess:
    endpoint = options.get("endpoint") or os.environ.get("AIS_ENDPOINT")
    if not endpoint:
        raise Unreachable(f"{url}: set AIS_ENDPOINT, or --store-option ais://:endpoint=http://HOST:PORT")
    config = {"endpoint": endpoint.rstrip("/") + "/s3", "region": options.get("region") or "us-east-1"}
    if "secret_access_key" in options:
        return StoreAccess({**config, **_keys(options)}, "access key of the configuration file")
    token = os.environ.get("AIS_AUTHN_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token and not _yes(options, "anonymous") else {}
    return StoreAccess(
        {**config, "skip_signature": "true"}, "token of the environment" if headers else "none", headers
    )


def _gs(url: Url, options: Options) -> StoreAccess:
    config = {"base_url": options.get("endpoint") or os.environ.get("STORAGE_EMULATOR_HOST")}
    if _yes(options, "anonymous"):
        return StoreAccess({**config, "skip_signature": "true"}, "none (anonymous)")
    if "token" in options:
        return StoreAccess({**config, "bearer_token": options["token"]}, "token of the configuration file")
    if "service_account" in options:
        return StoreAccess({**config, "service_account": options["service_account"]}, "service account (a file)")
    names = ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_SERVICE_ACCOUNT_KEY")
    if any(os.environ.get(name) for name in names):
        return StoreAccess(config, "service account of the environment")
    default = os.path.expanduser("~/.config/gcloud/application_default_credentials.json")
    if os.environ.get("GOOGLE_APPLICATION_CREDENTIALS") or os.path.exists(default):
        return StoreAccess(config, "application default credentials")
    return StoreAccess(config, "role of the instance")


def _az(url: Url, options: Options) -> StoreAccess:
    fields = _connection_string()
    account = (
        options.get("account_name")
        or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
        or fields.get("AccountName")
        or os.environ.get("AZURE_STORAGE_ACCOUNT")
    )
    if not account:
        raise Unreachable(f"{url}: set AZURE_STORAGE_ACCOUNT_NAME, or --store-option {url.store}:account_name=...")
    config = {"account_name": account, "endpoint": options.get("endpoint") or fields.get("BlobEndpoint")}
    if _yes(options, "anonymous"):
        return StoreAccess({**config, "skip_signature": "true"}, "none (anonymous)")
    for key, value, kind in (
        ("account_key", options.get("account_key"), "account key of the configuration file"),
        ("sas_key", options.get("sas_token"), "sas token of the configuration file"),
        ("token", options.get("token"), "token of the configuration file"),
        ("account_key", fields.get("AccountKey"), "account key of the connection string"),
        ("sas_key", fields.get("SharedAccessSignature"), "signature of the connection string"),
        ("account_key", os.environ.get("AZURE_STORAGE_KEY"), "account key of the environment"),
    ):
        if value:
            return StoreAccess({**config, key: value.removeprefix("?")}, kind)
    # Variables that do more than name the account.
    starts = ("AZURE_STORAGE_", "AZURE_CLIENT_", "AZURE_FEDERATED_")
    is_given = any(name.startswith(starts) and "ACCOUNT_NAME" not in name for name in os.environ)
    return StoreAccess(config, "of the environment" if is_given else "role of the instance")


def _connection_string() -> dict[str, str]:
    """Return the fields of AZURE_STORAGE_CONNECTION_STRING."""
    parts = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "").split(";")
    return {name: value for name, equals, value in (part.partition("=") for part in parts) if equals}


def _web(url: Url, options: Options) -> StoreAccess:
    user, kind = unquote(url.user), "user and password of the URL"
    if not user and "password" in options:
        user = f"{options.get('user', '')}:{options['password']}"
        kind = "user and password of the configuration file"
    if user:
        return StoreAccess({}, kind, {"Authorization": f"Basic {base64.b64encode(user.encode()).decode()}"})
    if "token" in options:
        return StoreAccess({}, "token of the configuration file", {"Authorization": f"Bearer {options['token']}"})
    return StoreAccess({}, "signed URL" if is_signed(url) else "none")


def _hf(url: Url, options: Options) -> StoreAccess:
    """Return access by a token; `hub.py` makes the headers, as it knows where huggingface_hub keeps it."""
    if _yes(options, "anonymous"):
        return StoreAccess({}, "none (anonymous)")
    if "token" in options:
        return StoreAccess({}, "token of the configuration file")
    if os.environ.get("HF_TOKEN"):
        return StoreAccess({}, "token of the environment")
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    has_token = os.path.exists(os.environ.get("HF_TOKEN_PATH") or os.path.join(home, "token"))
    return StoreAccess({}, "token of `hf auth login`" if has_token else "none")


def _yes(options: Options, name: str) -> bool:
    return options.get(name) == "true"


_ACCESS: dict[str, Callable[[Url, Options], StoreAccess]] = {
    "s3": _s3,
    "ais": _ais,
    "gs": _gs,
    "az": _az,
    "hf": _hf,
}


# --- by urllib ------------------------------------------------------------------------------------------------

HEAD_MAX = 64 << 10  # bytes of the answer to a request whose headers count
_NO_ANSWER = (OSError, ValueError, http.client.HTTPException)  # of urllib, at any moment of an answer
_RANGE = re.compile(r"bytes \d{1,19}-\d{1,19}/(\d{1,19})")


def get_by_urllib(
    url: Url, options: Options, address: str, headers: dict[str, str], seconds: float, most: int
) -> tuple[int, bytes]:
    """Return status and body, up to `most` bytes, of the answer at an address that is signed for an object.

    Raises Transient, Unreachable.
    """
    with _translated(url), _open_address(address, options, headers, seconds) as answer:
        return answer.status, _next_bytes(answer, most, seconds)


def head_by_urllib(url: Url, options: Options, seconds: float) -> Pin:
    """Return the pin of the object that is at a URL now. Raises ShardError, Transient."""
    with _translated(url), _open_object(url, options, {"Range": "bytes=0-0"}, pace(options).silence) as answer:
        body = _next_bytes(answer, HEAD_MAX, seconds)
    if answer.status not in (200, 206):
        raise _refusal(url, answer.status, body)
    content = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    size = content[1] if content else answer.headers.get("Content-Length") if answer.status == 200 else ""
    if size is None:
        return _pin_of(answer.headers, NO_LENGTH)
    if not size.isdecimal():
        raise answers.no_length(url)
    return _pin_of(answer.headers, int(size))


def open_whole(url: Url, options: Options) -> tuple[Pin, Any]:
    """Return the answer to a request for a whole object: its pin, and its body to be closed.

    Raises ShardError, Transient.
    """
    with _translated(url):
        answer = _open_object(url, options, {}, pace(options).silence)
    if answer.status != 200:
        with answer, _translated(url):
            raise _refusal(url, answer.status, answer.read(HEAD_MAX))
    return _pin_of(answer.headers, NO_LENGTH), answer


def next_piece(url: Url, body: Any, most: int, seconds: float) -> bytes:
    """Return the next bytes of an answer, none at its end. Raises Transient, Unreachable."""
    with _translated(url):
        return _next_bytes(body, most, seconds)


def retry_after(url: Url, options: Options, seconds: float) -> float | None:
    """Return the Retry-After of the answer to a question for one byte; None when there is none (any more)."""
    try:
        with _open_object(url, options, {"Range": "bytes=0-0"}, seconds) as answer:
            text = answer.headers.get("Retry-After", "") if answer.status in answers.THROTTLING else ""
    except _NO_ANSWER:
        return None
    return answers.seconds_of(text, time.time())


@contextlib.contextmanager
def _translated(url: Url) -> Iterator[None]:
    """Turn errors of urllib into Transient and Unreachable."""
    try:
        yield
    except TimeoutError:
        raise Transient("its server does not answer", silent=True) from None
    except _NO_ANSWER as error:
        if isinstance(getattr(error, "reason", None), ssl.SSLCertVerificationError):
            raise answers.untrusted(url) from None
        raise Transient("the connection to its server broke") from None


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Refuse to follow: the headers for the first place are not for another."""


def _open_object(url: Url, options: Options, headers: dict[str, str], timeout: float) -> Any:
    """Return the answer to GET, open, whatever its status. Raises OSError, ValueError, HTTPException."""
    target = f"{url.store}/{url.path}" + (f"?{url.query}" if url.query else "")
    return _open_address(target, options, {**access(url, options).headers, **headers}, timeout)


def _open_address(target: str, options: Options, headers: dict[str, str], timeout: float) -> Any:
    """Return the answer to a GET at any place, as `_open_object`."""
    context = ssl.create_default_context()
    if "certificates" in options:
        context.load_verify_locations(options["certificates"])
    if options.get("allow_invalid_certificates") == "true":
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    opener = urllib.request.build_opener(_Stay, urllib.request.HTTPSHandler(context=context))
    request = urllib.request.Request(target, headers={**headers, "User-Agent": USER_AGENT})
    try:
        return opener.open(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        return error


def _next_bytes(answer: Any, most: int, seconds: float) -> bytes:
    """Return the next bytes of an answer, up to `most`, or up to its end.

    Raises TimeoutError after `seconds`, also while bytes come one by one: there are few threads.
    """
    body, late = bytearray(), time.monotonic() + seconds
    while len(body) < most and (piece := answer.read1(most - len(body))):
        body += piece
        if time.monotonic() > late:
            raise TimeoutError
    return bytes(body)


def _refusal(url: Url, status: int, body: bytes) -> ShardError | Transient:
    """Return the error for an answer that has no bytes of an object."""
    if status in (404, 410):
        return MissingObject(f"{url}: there is no such object")
    return answers.of_status(status, body.decode("latin-1"), url)


def _pin_of(headers: Mapping[str, str], size: int) -> Pin:
    etag = answers.etag_of({"e_tag": headers.get("ETag")})
    return Pin(size, _time_ns(headers.get("Last-Modified", "")), etag, "")


def _time_ns(text: str) -> int:
    """Return the time of a Last-Modified; 0 without one."""
    try:
        return int(parsedate_to_datetime(text).timestamp()) * 10**9
    except (ValueError, OverflowError):  # OverflowError: a very long number in the place of a day
        return 0
