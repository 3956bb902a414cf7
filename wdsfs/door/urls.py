"""URLs of shards, shown without their secrets, and the paths by which remote shards are known.

::

    s3://BUCKET/KEY     gs://BUCKET/KEY     az://CONTAINER/KEY     ais://BUCKET/KEY
    http://[USER:PASSWORD@]HOST[:PORT]/PATH[?QUERY]                https://...
    hf://datasets/OWNER/NAME[@REVISION]/PATH
    pipe:COMMAND                           shown as pipe:WORD-SUM/NAME

Keys of buckets and paths of hf:// are not encoded in a URL, as in the tools of these stores; paths of http(s) are
percent-encoded. USER:PASSWORD, QUERY and COMMAND may be secrets: only `store`, `key` and `shown` are for logs and
messages.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from wdsfs import names
from wdsfs.errors import SpecError

BUCKETS = frozenset({"s3", "gs", "az", "ais"})
WEB = frozenset({"http", "https"})
SCHEMES = BUCKETS | WEB | {"hf"}
PIPE = "pipe:"
STDIN = "-"  # as a shard
HERE = "./"  # before a relative path that looks like something else
KEY_MAX = 1 << 16  # characters; stores take 1,024 bytes, web servers some 8 KiB
DEFAULT_PORTS = {"http": 80, "https": 443}
EXPIRY_MAX = 253_402_300_799.0  # seconds of the Unix era: the end of the year 9999, the last that a date can show

_CONTROL = re.compile(r"[\x00-\x1f]")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_LIKE_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
# `@refs/pr/1` and `@refs/convert/parquet` are the revisions with slashes that the hub itself writes so.
_HUB = re.compile(r"datasets/([^/@]+/[^/@]+)(?:@(refs/(?:pr|convert)/[^/]+|[^/]+))?(?:/(.*))?", re.DOTALL)
_ESCAPE = re.compile(rb"%((?!2[5Ff]|3[Ff]|7[Ff])[2-9A-Fa-f][0-9A-Fa-f])")
_MARK = re.compile(rb"(https?://[^?]*)\?[0-9a-f]{8}", re.DOTALL)
_KEPT_ESCAPE = re.compile(r"(%2[Ff5])")
# All characters that RFC 3986 allows in a path, but "%": they are sent to servers, and signed, as typed.
_PLAIN = "/!$&'()*+,;=:@"

# Address, path and query. A fragment is never sent: browsers and curl drop it, too.
_WEB_PARTS = re.compile(r"([^/?#]*)([^?#]*)(?:\?([^#]*))?(?:#.*)?", re.DOTALL)
_HOST = re.compile(r"[\w.:%~-]+")  # names in any script, and addresses

_COMMAND_WORD = re.compile(r"[\w./+-]+")
_FILE_NAME = re.compile(r"[\w.,+@%~-]*\w[\w.,+@%~-]*")
_QUOTES = "\"'`()<>|&;"
_SUFFIXES = tuple(suffix.decode() for suffix in names.SHARD_SUFFIXES)
# Parameters that differ in each signed URL, in lower case: they tell who may read until when, not which object.
_SIGNING = re.compile(
    r"x-(amz|goog|oss|cos|obs|ms)-.*|(aws|google|oss)?accesskeyid|googleaccessid|signature|expires|policy|key-pair-id"
    r"|hash-algorithm|security-token|sig|token|.*[_-]token|auth|authorization|api[_-]?key|jwt|hdn(ts|ea)|response-.*"
)
# Those of an Azure shared access signature are so short that they count only beside `sig`.
_SIGNING_BESIDE_SIG = re.compile(
    r"sv|ss|srt|sp|se|st|spr|sr|skoid|sktid|skt|ske|sks|skv|sip|si|sdd|saoid|suoid|scid|ses"
)


class Url(NamedTuple):
    """The address of an object. `query` and `user` may be secrets; `str` and `repr` leave them out."""

    store: str  # "s3://bucket", "https://host:port", "hf://datasets/OWNER/NAME@REVISION", "pipe:WORD-SUM"
    key: str  # decoded path in the store, without a slash at its start
    query: str = ""  # of http(s), without "?"; of a program its working directory
    user: str = ""  # of http(s), "USER:PASSWORD" as it was typed; of a program the command

    @property
    def scheme(self) -> str:
        return self.store.partition(":")[0]

    @property
    def is_program(self) -> bool:
        """True if the object is the output of a command."""
        return self.store.startswith(PIPE)

    @property
    def counted_as(self) -> str:
        """The store as which its traffic is counted: all commands are one."""
        return PIPE if self.store.startswith(PIPE) else self.store

    @property
    def path(self) -> str:
        """The key as it stands in a URL: encoded for http(s)."""
        return _encoded(self.key) if self.scheme in WEB else self.key

    @property
    def shown(self) -> str:
        """Return the URL without user, password and query, for people, logs and `Shard.path`.

        A query with other parameters than those of a signature is shown as 8 hex digits of its sum. So
        `get?file=1` and `get?file=2` are two shards, and a URL that was signed again is the same shard.
        """
        fields = [] if self.is_program else parse_qsl(self.query, keep_blank_values=True)
        signed = any(name.lower() == "sig" for name, _ in fields)
        rest = sorted((name, value) for name, value in fields if not _is_signing(name.lower(), signed))
        mark = "?" + hashlib.blake2b(repr(rest).encode(), digest_size=4).hexdigest() if rest else ""
        return f"{self.store}/{self.path}{mark}"

    def __str__(self) -> str:
        return self.shown

    def __repr__(self) -> str:
        return f"Url({self.shown!r})"


def local(path: str) -> str:
    """Return a path of this machine in a form that is not taken for a URL, a command or the standard input."""
    return HERE + path if path == STDIN or _LIKE_SCHEME.match(path) else path


def is_url(text: str) -> bool:
    """Return True for text that starts with one of SCHEMES or with `pipe:`; `file:` is not a URL here."""
    if ":" not in text:  # nearly every path: this is called several times for each shard
        return False
    scheme = _SCHEME.match(text)
    return text.startswith(PIPE) or (scheme is not None and scheme[1].lower() in SCHEMES)


def is_remote(path: bytes) -> bool:
    """Return True for the path of a remote shard; paths of files are absolute."""
    return not path.startswith(b"/")


def is_output(path: bytes) -> bool:
    """Return True for the path of the output of a command, or of the standard input."""
    return path.startswith(PIPE.encode())


def program(command: str, directory: str) -> Url:
    """Return the output of a command of /bin/sh that is run in this directory.

    Semantics decision: its name is the last word of the command that looks like the name of a shard. Shown are the
    first word of the command, if it has no quotes and is not an assignment, and a sum: the rest may be secret.
    """
    words, first = command.split(), first_word(command)
    text = f"{directory}\0{command}".encode(errors="surrogateescape")
    key = next(filter(None, map(_shard_name, reversed(words))), "pipe")
    mark = hashlib.blake2b(text, digest_size=4).hexdigest()
    return Url(f"{PIPE}{first}-{mark}" if first else PIPE + mark, key, directory, command)


def first_word(command: str) -> str:
    """Return the program of a command; "" if the first word may be secret."""
    word = command.split()[0] if command.strip() else ""
    return word.rpartition("/")[2] if _COMMAND_WORD.fullmatch(word) else ""


def _shard_name(word: str) -> str:
    """Return the name of a shard at the end of a word of a command; "" if there is none."""
    name = re.split(r"[?#]", word.strip(_QUOTES))[0].rpartition("/")[2]
    return name if name.endswith(_SUFFIXES) and _FILE_NAME.fullmatch(name) else ""


def parse(text: str) -> Url:
    """Return the URL that a user typed. Raises SpecError, whose message holds no secret."""
    match = _SCHEME.match(text)
    scheme = match[1].lower() if match else ""
    if scheme not in SCHEMES:
        raise SpecError(f"{scheme or 'no scheme'}: shards are read from {', '.join(sorted(SCHEMES))} URLs")
    rest = text[len(scheme) + 3 :]
    if _CONTROL.search(rest):
        raise SpecError(f"{scheme}://...: a URL must not contain control characters")
    if scheme in WEB:
        return _parse_web(scheme, rest)
    return _parse_hub(rest) if scheme == "hf" else _parse_bucket(scheme, rest)


def store_of(shown: str) -> str:
    """Return the store of a shown URL, as `counted_as`. Raises SpecError."""
    return PIPE if shown.startswith(PIPE) else parse(shown).store


def decoded(shown: bytes) -> bytes:
    """Return a shown URL of http(s) with the characters that its escapes stand for, for names of shards.

    Slashes, percent and question marks and control characters stay escaped.
    """
    if not shown.startswith((b"http://", b"https://")):
        return shown
    return _ESCAPE.sub(lambda escape: bytes.fromhex(escape[1].decode()), shown)


def without_mark(shown: bytes) -> bytes:
    """Return a shown URL without the sum of its query."""
    marked = _MARK.fullmatch(shown)
    return marked[1] if marked else shown


def join(prefix: Url, name: str) -> Url:
    """Return the object `name` (decoded, may contain slashes) below a prefix.

    A signature for the prefix goes with it.
    """
    joined = "/".join(part for part in (prefix.key.rstrip("/"), name) if part)
    return prefix._replace(key=_checked(joined, f"{prefix.store}/{joined}"))


def _parse_bucket(scheme: str, rest: str) -> Url:
    bucket, _, key = rest.partition("/")
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", bucket):
        # It is not shown: it may be `USER:PASSWORD@BUCKET`.
        raise SpecError(f"{scheme}://...: there is no name of a bucket in this URL: write {scheme}://BUCKET/KEY")
    return Url(f"{scheme}://{bucket}", _checked(key, f"{scheme}://{bucket}/{key}"))


def _parse_hub(rest: str) -> Url:
    match = _HUB.fullmatch(rest)
    if not match:
        raise SpecError(f"hf://{rest}: write hf://datasets/OWNER/NAME[@REVISION]/PATH")
    repository, revision, path = match[1], match[2], match[3] or ""
    store = f"hf://datasets/{repository}" + (f"@{revision}" if revision else "")
    return Url(store, _checked(path, f"hf://{rest}"))


def _parse_web(scheme: str, rest: str) -> Url:
    match = _WEB_PARTS.fullmatch(rest)
    assert match is not None
    address, path, query = match.groups("")
    store = _web_store(scheme, address)
    return Url(store, _checked(_decoded(path.removeprefix("/")), store + path), query, address.rpartition("@")[0])


@lru_cache(maxsize=64)  # a set has many URLs of few servers
def _web_store(scheme: str, address: str) -> str:
    """Return the store at an address as it was typed. Raises SpecError, whose message holds no secret."""
    try:
        parts = urlsplit(f"{scheme}://{address}")
        port, host = parts.port, parts.hostname
    except ValueError:
        host = None
    if not host:
        raise SpecError(f"{scheme}://...: there is no host, or no proper port, in this URL")
    if not _HOST.fullmatch(host):
        raise SpecError(f"{scheme}://...: {host!r} is not the name of a host")
    store = f"{scheme}://" + (f"[{host}]" if ":" in host else host)
    return store + (f":{port}" if port and port != DEFAULT_PORTS[scheme] else "")


def _checked(key: str, shown: str) -> str:
    """Return the key. Raises SpecError for one that clients or servers on the way would change."""
    if len(key) > KEY_MAX:
        raise SpecError(f"{shown[:100]}...: a path of {len(key):,} characters: no store has such a name")
    segments = key.removesuffix("/").split("/")
    if key and any(segment in ("", ".", "..") for segment in segments):
        raise SpecError(f"{shown}: a path with an empty part, '.' or '..' is not read: write the path without it")
    return key


def _decoded(path: str) -> str:
    """Return a path of http(s) without escapes but %2F, which is not a separator, and %25, to tell both apart."""
    if "%" not in path:
        return path
    pieces = _KEPT_ESCAPE.split(path)
    return "".join(
        piece.upper() if at % 2 else unquote(piece, errors="surrogateescape") for at, piece in enumerate(pieces)
    )


def _encoded(key: str) -> str:
    """Return the reverse of `_decoded`."""
    pieces = _KEPT_ESCAPE.split(key)
    return "".join(
        piece if at % 2 else quote(piece, safe=_PLAIN, errors="surrogateescape") for at, piece in enumerate(pieces)
    )


def _is_signing(name: str, signed: bool) -> bool:
    return bool(_SIGNING.fullmatch(name)) or (signed and bool(_SIGNING_BESIDE_SIG.fullmatch(name)))


def is_signed(url: Url) -> bool:
    """Return True if the query has a signature, so that the URL itself is the credential."""
    return any(
        name.lower().endswith(("signature", "sig")) or name.lower() == "token" for name, _ in parse_qsl(url.query)
    )


def expiry(url: Url) -> float | None:
    """Return when its signature ends (seconds of the Unix era); None for a URL without such a time."""
    end = _signature_end({name.lower(): value for name, value in parse_qsl(url.query)})
    return end if end is not None and 0 <= end <= EXPIRY_MAX else None


def _signature_end(fields: Mapping[str, str]) -> float | None:
    try:
        for date, seconds in (("x-amz-date", "x-amz-expires"), ("x-goog-date", "x-goog-expires")):
            if date in fields and seconds in fields:
                signed = datetime.strptime(fields[date] + "+0000", "%Y%m%dT%H%M%SZ%z")
                return signed.timestamp() + int(fields[seconds])
        if "sig" in fields and "se" in fields:
            end = datetime.fromisoformat(fields["se"])
            return (end if end.tzinfo else end.replace(tzinfo=UTC)).timestamp()
        return float(int(fields["expires"])) if "expires" in fields else None
    except (ValueError, OverflowError):  # OverflowError: a number or a date that is too large for a float
        return None
